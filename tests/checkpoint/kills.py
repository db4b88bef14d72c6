"""A program that saves again and again, and appends a line to a file for each checkpoint that is complete.

Arguments: the folder, the kind of saves, when it is killed, counted from the first checkpoint that is complete (the
number of an operation of the file system, or with ``ms`` a time), and in a job the process that is, or ``all``.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from typing import Any

import numpy as np

import shardtensor as st
from shardtensor import distributed
from shardtensor.errors import ArgumentError
from shardtensor.files.atomic import DISK
from tests.checkpoint.disks import OPERATIONS, Faulty, kills

KINDS = ("save", "background", "overwrite", "manager")


def tree(step: int) -> dict[str, Any]:
    """Every element depends on the step. The tree is the same on any devices."""
    mesh = st.make_mesh((st.device_count(),), ("x",))
    x = np.arange(24.0).reshape(8, 3) * step
    return {"a": {"x": st.device_put(x, st.NamedSharding(mesh, st.P("x")))}, "b": np.full(5, step), "step": step}


def latest(folder: str) -> tuple[int, Any]:
    """The step of the last checkpoint, and its tree; 0 if there is none."""
    names = {name[1:].split(".")[0] if name.startswith(".") else name for name in os.listdir(folder)} - {"log"}
    for name in sorted(names, reverse=True):
        try:
            restored = st.checkpoint.restore(f"{folder}/{name}")
        except (ArgumentError, FileNotFoundError) as error:
            if "there is no checkpoint" in str(error):
                continue
            raise
        return restored["step"], restored
    return 0, None


def save(folder: str, kind: str, step: int, manager: st.checkpoint.Manager | None) -> None:
    if kind == "manager":
        assert manager is not None
        manager.save(step, tree(step))
    elif kind == "overwrite":
        st.checkpoint.save(f"{folder}/00000000", tree(step), overwrite=True)
    else:
        st.checkpoint.save(f"{folder}/{step:08d}", tree(step), wait=kind == "save")


def arm(when: str) -> None:
    """Kills this process at an operation of the file system, or after a time."""
    if when.endswith("ms"):
        threading.Timer(float(when[:-2]) / 1000, kills, [None]).start()
        return
    disk = Faulty(int(when), kills)
    for name in OPERATIONS:
        setattr(DISK, name, getattr(disk, name))


def run(folder: str, kind: str, when: str, process: str = "0") -> None:
    """Saves from the step after the last one on, until it is killed."""
    manager = st.checkpoint.Manager(folder, keep=1) if kind == "manager" else None
    begin, here = latest(folder)[0] + 1, distributed.process_index()
    with open(f"{folder}/log", "a", encoding="ascii") as log:
        for step in itertools.count(begin):
            if step == begin + 1:
                st.checkpoint.wait()
                if process in (str(here), "all"):
                    arm(when)
            save(folder, kind, step, manager)
            done = step - (kind in ("background", "manager"))
            if not here and done >= begin:
                log.write(f"{done}\n")
                log.flush()


if __name__ == "__main__":
    distributed.initialize(timeout=20)
    run(*sys.argv[1:])
