"""Runs random programs with collectives in maps over the devices of all processes: ``spanning_maps.py FIRST LAST``.

Each process compares the arrays of its own devices with NumPy's. The arguments are the range of seeds; a third one is the
number of the processes whose devices the maps have, if these are not all.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor import distributed

if __name__ == "__main__":
    distributed.initialize(timeout=60)  # The statements below use the devices of the job.

import shardtensor as st
from tests.interpreters.test_state import Dice, assert_alike, quietly
from tests.layouts import NAMES
from tests.spmd import test_spmd_programs as programs


class OnRow(programs.OnRow):
    """The namespace of a program that owns several devices, of one process or of all."""

    def on_host(self, x: Any) -> Any:
        return super().on_host(x) if x.is_fully_addressable else distributed.process_allgather(x)


def results(lines: Sequence[str], map_by: Callable[..., None], mesh: st.Mesh, in_rows: bool) -> dict[int, Any]:
    """Runs a program on all devices; returns the arrays of the programs of this process, by position and name."""
    found: dict[int, dict[str, Any]] = {}

    def body() -> None:
        here: Any = OnRow(("x",)) if in_rows else programs.OnDevice(mesh.axis_names)
        for line in lines:
            exec(line, here.space)
        found[here.position] = {
            name: tuple(map(here.on_host, x if isinstance(x, tuple) else (x,)))
            for name, x in here.space.items()
            if name[0] == "v"
        }

    map_by(body, mesh)
    return found


def run(seed: int, processes: int) -> None:
    """Runs one program, by one map, by one in another for each axis, or by one whose calls have several devices: all of
    a process, or some of each.
    """
    dice = Dice(seed)
    known = [d for d in st.devices() if d.process_index < processes]
    count = len(known)
    ways = {"shard_map": 3, "maps_in_maps": 2, "pmap_of_arrays": 2, "rows_by_shard_map": 1, "rows_by_pmap_of_arrays": 1}
    if processes < distributed.process_count():
        ways = {"shard_map": 1}
    way = dice.pick([way for way, times in ways.items() for _ in range(times)])
    in_rows = way in programs.ROWS
    grids = [grid for grid in programs.GRIDS if math.prod(grid) == count]
    if way in ("maps_in_maps", "pmap_of_arrays"):
        grids = [grid for grid in grids if len(grid) == 1 or grid[0] % processes == 0 == grid[-1] % processes]
    if in_rows:
        grids = [(n,) for n in range(1, count) if n % processes == 0 == count // n % processes]
    if not grids:
        return
    grid = dice.pick(grids)
    author = (programs.AuthorOfRows if in_rows else programs.Author)(dice, grid, "numpy")
    with quietly():
        for _ in range(12):
            author.write()
    devices = np.array(known, object)
    if way == "shard_map" or (len(grid) == 1 and not in_rows):
        devices = np.array(author.permuted(known), object)
    elif dice.once_in(2):
        devices = devices.reshape(processes, -1).T.ravel()
    sizes, names = ((*grid, count // grid[0]), ("x", "r")) if in_rows else (grid, NAMES[: len(grid)])
    mesh = st.make_mesh(sizes, names, devices=list(devices))
    with quietly():
        found = results(author.lines, (programs.WAYS | programs.ROWS)[way], mesh, in_rows)
    rows = np.reshape(np.array(mesh.flat, object), (math.prod(grid), -1))
    assert set(found) == {k for k, row in enumerate(rows) if not {*row}.isdisjoint(st.local_devices())}
    for k, arrays in found.items():
        for name, parts in arrays.items():
            wanted = author.oracle.space[name]
            for part, answer in zip(parts, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
                assert_alike(part, answer[k], f"seed {seed}: {name} of program {k}, by {way} over {mesh}")


if __name__ == "__main__":
    for number in range(*map(int, sys.argv[1:3])):
        try:
            run(number, int(sys.argv[3]) if sys.argv[3:] else distributed.process_count())
        except BaseException as error:
            error.add_note(f"seed {number}")
            raise
    distributed.shutdown()
