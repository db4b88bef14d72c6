"""The cases of the curves of `cpu.py`: how costs grow with sizes and with the number of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpu_cases import COLUMNS, ROWS, WHOLE, Cases, Sizes, placing
from harness import DEVICES


@dataclass(frozen=True)
class Point:
    """One figure of a curve.

    Attributes:
        what: is done, with square arrays.
        nbytes: of an operand.
        devices: on which the operands lie.
    """

    what: str
    nbytes: int
    devices: int

    @property
    def name(self) -> str:
        """Of its case."""
        return f"{self.what} {self.nbytes} {self.devices}"

    @property
    def side(self) -> int:
        """Of an operand."""
        return math.isqrt(self.nbytes // 4)

    @property
    def elements(self) -> int:
        """Of an operand; of a product, the multiplications."""
        return self.side ** (3 if self.what in ("matmul", "contraction") else 2)

    @property
    def operands(self) -> tuple[int, int, str, str]:
        """What the case shares with others: the side, the devices, and how each operand lies."""
        lies = {"matmul": (ROWS, WHOLE), "contraction": (COLUMNS, ROWS)}.get(self.what, (ROWS, ROWS))
        return self.side, self.devices, *lies


BY_SIZE = ("add", "sum", "sin", "matmul")
BY_DEVICES = ("add", "sum", "sum0", "reshard", "contraction")


def points_by_size(sizes: Sizes) -> list[Point]:
    """Those of the curves over size."""
    return [
        Point(what, nbytes, DEVICES)
        for k, nbytes in enumerate(sizes.curve)
        for what in BY_SIZE
        if what != "matmul" or k < sizes.multiplied
    ]


def points_by_devices(sizes: Sizes) -> list[Point]:
    """Those of the curves over numbers of devices."""
    return [Point(what, nbytes, n) for nbytes in sizes.ends for n in sizes.devices for what in BY_DEVICES]


def points(sizes: Sizes) -> list[Point]:
    """All of them, each once."""
    return list(dict.fromkeys(points_by_size(sizes) + points_by_devices(sizes)))


def curve_functions() -> dict[str, Callable[..., Any]]:
    """What is written alike with arrays of NumPy and of this library, by what a point does."""
    import numpy as np

    return {
        "add": lambda x, y: x + y,
        "sum": lambda x, y: x.sum(),
        "sum0": lambda x, y: x.sum(axis=0),
        "sin": lambda x, y: np.sin(x),
        "matmul": lambda x, y: x @ y,
        "contraction": lambda x, y: x @ y,
    }


def curves(chosen: Sequence[Point], functions: Mapping[str, Callable[..., Any]], place: Callable[..., Any]) -> Cases:
    """The cases of points."""
    import numpy as np

    def made(operands: tuple[int, int, str, str]) -> list[Any]:
        side, devices, *lies = operands
        generator = np.random.default_rng(0)
        return [place(devices, generator.random((side, side), dtype=np.float32), how) for how in lies]

    by_name = {point.name: point for point in chosen}
    return Cases(
        {name: functions[point.what] for name, point in by_name.items()},
        lambda name: by_name[name].operands,
        made,
        {},
    )


def shardtensor_curves() -> Cases:
    """The library itself, on the first of many devices."""
    import shardtensor as st

    def reshard(x: Any, y: Any) -> Any:
        return st.device_put(x, placing(x.sharding.mesh.size).sharding(COLUMNS))

    return curves(
        points(Sizes.told()),
        curve_functions() | {"reshard": reshard},
        lambda devices, array, how: placing(devices)(array, how),
    )


def numpy_curves() -> Cases:
    """Plain NumPy: one array, which is the same for any number of devices, and stands beside the first."""
    sizes = Sizes.told()
    single = [p for p in points_by_devices(sizes) if p.devices == sizes.devices[0] and p.what != "reshard"]
    return curves(points_by_size(sizes) + single, curve_functions(), lambda devices, array, how: array)
