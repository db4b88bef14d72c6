"""Random faults: every process that can still print names the faulty one, and nothing is left running or on disk."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardtensor import launcher
from tests.communication import random_faults
from tests.communication.outputs import of_each
from tests.communication.random_faults import DIFFERENT, KILLED, MESSAGE, RAISED, STUCK, Fault
from tests.communication.test_distributed import ENGINES
from tests.communication.test_launcher import ROOT, processes_of

LIMIT = 60.0
"""Seconds within which a job has to end by itself."""

AT_ONCE = 4
"""Jobs at the same time: they wait most of the time."""


def output_of(seed: int, folder: Path) -> tuple[int, str]:
    """The exit status and the output of the job of a seed, which has its own folder for temporary files."""
    fault, path = Fault.drawn(seed), os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environ = {"PYTHONPATH": path, "SHARDTENSOR_NUM_DEVICES": "2", "TMPDIR": str(folder)}
    lines: list[str] = []
    command = [sys.executable, "-m", random_faults.__name__, str(seed)]
    status = launcher.launch(
        command, fault.processes, fault.engine, timeout=LIMIT, environ=environ, output=lines.append
    )
    return status, "\n".join(of_each(lines))


def naming(fault: Fault) -> str:
    """A pattern of what the other processes print."""
    name = rf"process(es)? ([0-9, ]*, )?{fault.rank}\b"
    if fault.kind in RAISED:
        return rf"{name}.*{MESSAGE}"
    if fault.kind == "sigint":
        return rf"{name}.*KeyboardInterrupt"
    if fault.kind in STUCK:
        return rf"{name}.* did not reach .* within"
    return name


def problem(seed: int, parent: Path) -> str:
    """What is wrong with the job of a seed; empty if nothing is."""
    fault, folder = Fault.drawn(seed), parent / str(seed)
    folder.mkdir()
    begin = time.monotonic()
    status, text = output_of(seed, folder)
    found = []
    if status in (0, 124):
        found.append(f"exit status {status} after {time.monotonic() - begin:.0f} s")
    speakers = [k for k in range(fault.processes) if k != fault.rank]
    if fault.kind in KILLED:
        if not re.search(
            rf"shardtensor launch: .*process(es)? [0-9, ]*{fault.rank} ended .*{KILLED[fault.kind]}", text
        ):
            found.append("the launcher does not name the process")
        if fault.engine == "mpi":  # mpiexec ends the others at once.
            speakers = []
        # The connections of those that notice it first end, so that others may miss these, too.
        elif not any(re.search(rf"^\[{k}\].*{naming(fault)}", text, re.M) for k in speakers):
            found.append("no process names it")
        speakers = []
    if fault.kind in (*DIFFERENT, *random_faults.OPERANDS):
        speakers = list(range(fault.processes))
    found += [
        f"process {k} does not name it" for k in speakers if not re.search(rf"^\[{k}\].*{naming(fault)}", text, re.M)
    ]
    deadline = time.monotonic() + 5
    while (left := [*processes_of(folder), *map(str, folder.iterdir())]) and time.monotonic() < deadline:
        time.sleep(0.05)
    found += [f"left: {thing}" for thing in left]
    return f"{seed}, {fault}: {'; '.join(found)}\n{text}" if found else ""


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param([6, 8, 20], id="three"),
        pytest.param([3, 24], id="two", marks=pytest.mark.full),
        pytest.param([2, 5, 11, 16, 18, 19, 21], id="seven", marks=pytest.mark.full),
        *(
            pytest.param(range(begin, begin + 20), id=f"{begin}-{begin + 19}", marks=pytest.mark.full)
            for begin in range(1000, 1200, 20)
        ),
    ],
)
def test_a_random_fault_is_named_and_leaves_nothing(
    seeds: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "launcher"
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    possible = [seed for seed in seeds if not ENGINES[Fault.drawn(seed).engine]]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        problems = list(filter(None, threads.map(lambda seed: problem(seed, tmp_path), possible)))
    assert not problems, "\n".join(problems)
    assert list(own.iterdir()) == []
