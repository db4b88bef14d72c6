"""Runs random programs on tensors that span processes: ``spanning_programs.py FILE PROGRAMS``.

PROGRAMS is a file with lists of lines (see `tests.interpreters.test_state`). Process 0 writes a line to FILE for each
program: a hash of the bits of all tensors after every line, and of the errors. Jobs with the same number of devices in
other numbers of processes must write the same lines.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import shardtensor as st
from shardtensor import distributed

ERRORS = (IndexError, ValueError, TypeError, OverflowError, NameError)
AXES = ("x", "y", "z")


def layout(shape: tuple[int, ...], where: int | list[int], spec: st.P, _: object = None) -> st.NamedSharding:
    """Returns a layout over devices of several processes: the first device, the last one, and others."""
    known = st.devices()
    size = math.prod(shape)
    if not 2 <= size <= len(known):
        shape, size = (len(known),), len(known)
        spec = st.P(*[tuple(axis for axis in chain if axis == "x") for chain in spec.chains])
    turn = where if isinstance(where, int) else where[0]
    inner = known[1:-1][turn:] + known[1:-1][:turn]
    ends = (inner[: size - 2], known[:1], known[-1:]) if turn % 2 else (known[:1], inner[: size - 2], known[-1:])
    return st.NamedSharding(st.make_mesh(shape, AXES[: len(shape)], devices=[d for some in ends for d in some]), spec)


def whole(x: Any) -> np.ndarray:
    """Returns all elements of a tensor or of a value that was read from one, as a host array."""
    if isinstance(x, st.ShardedTensor) and not x.is_fully_addressable:
        return np.asarray(distributed.process_allgather(x))
    return np.asarray(x)


def array(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    from tests.layouts import array  # Imported late: the module uses devices, which exist once processes are connected.

    return array(shape, dtype, seed)


def names() -> dict[str, Any]:
    """Returns the names that programs use, with their values."""
    return {
        "xp": st, "np": np, "array": array, "P": st.P, "put": st.device_put, "reshard": st.reshard, "layout": layout,
        "spread": st.broadcast_to, "zeros": lambda shape, dtype, where: st.zeros(shape, dtype=dtype, device=where),
        "apart": lambda x: x, "share": lambda x: st.device_put(x, x.sharding, may_alias=True), "host": whole,
        "copied": lambda x: x.copy(), "shallow": copy.copy, "pickled": lambda x: x.copy(), "shards": lambda x: 0,
        "donated": functools.partial(st.reshard, donate=True),
    }  # fmt: skip


def outcome(lines: list[str]) -> str:
    """Returns a hash of all tensors after every line."""
    space, bits = names(), hashlib.blake2b(digest_size=8)
    for number, line in enumerate(lines):
        try:
            exec(line, space)
        except ERRORS as error:
            bits.update(f"{number} {type(error).__name__}".encode())
        for name in sorted(name for name in space if name[1:].isdigit()):
            if not getattr(space[name], "is_donated", False):
                found = whole(space[name])
                bits.update(f"{number} {name} {found.dtype} {found.shape}".encode())
                bits.update(np.ascontiguousarray(found).tobytes())
        if os.environ.get("VERBOSE"):
            print(number, line, bits.hexdigest())
    return bits.hexdigest()


def main(path: str, programs: str) -> None:
    distributed.initialize(engine=None if "SHARDTENSOR_ALONE" not in os.environ else "local", timeout=20)
    with Path(path if distributed.process_index() == 0 else os.devnull).open("a") as file:
        for number, lines in enumerate(json.loads(Path(programs).read_text())):
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                print(number, outcome(lines), file=file, flush=True)
    distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
