"""Runs random programs with collectives in maps over the devices of all processes: ``spanning_maps.py FIRST LAST``.

Each process compares the arrays of its own devices with NumPy's. The arguments are the range of seeds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from shardtensor import distributed

if __name__ == "__main__":
    distributed.initialize(timeout=60)  # The statements below use the devices of the job.

import shardtensor as st
from tests.interpreters.test_state import Dice, assert_alike, quietly
from tests.layouts import NAMES
from tests.spmd.test_spmd_programs import GRIDS, Author, Blocks, OnDevice, by_shard_map


class OuterAuthor(Author):
    """Writes programs without nested maps, whose collectives cannot span processes."""

    def nested(self, name: str, x: Blocks) -> str:
        return ""


def results(lines: Sequence[str], mesh: st.Mesh) -> dict[int, dict[str, Any]]:
    """Runs a program on all devices; returns the arrays of the devices of this process, by position and name."""
    found: dict[int, dict[str, Any]] = {}

    def body() -> None:
        here = OnDevice(mesh.axis_names)
        for line in lines:
            exec(line, here.space)
        found[here.position] = {
            name: tuple(map(here.on_host, x if isinstance(x, tuple) else (x,)))
            for name, x in here.space.items()
            if name[0] == "v"
        }

    by_shard_map(body, mesh)
    return found


def run(seed: int) -> None:
    """Runs one program."""
    dice = Dice(seed)
    author = OuterAuthor(dice, dice.pick([grid for grid in GRIDS if math.prod(grid) == st.device_count()]), "numpy")
    with quietly():
        for _ in range(12):
            author.write()
        grid = author.oracle.grid
        mesh = st.make_mesh(grid, NAMES[: len(grid)], devices=author.permuted(st.devices()))
        found = results(author.lines, mesh)
    assert set(found) == {k for k, device in enumerate(mesh.flat) if device in st.local_devices()}
    for k, arrays in found.items():
        for name, parts in arrays.items():
            wanted = author.oracle.space[name]
            for part, answer in zip(parts, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
                assert_alike(part, answer[k], f"seed {seed}: {name} on device {k}")


if __name__ == "__main__":
    for number in range(*map(int, sys.argv[1:])):
        run(number)
    distributed.shutdown()
