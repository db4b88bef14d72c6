"""The cases of the curves of `cpu.py`: how costs grow with sizes and with the number of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpu_cases import COLUMNS, ROWS, WHOLE, Cases, Sizes, placement
from harness import DEVICES


@dataclass(frozen=True)
class Point:
    """A point of a curve.

    Attributes:
        function: the name of the function, whose operands are square arrays.
        nbytes: the bytes of an operand.
        devices: the number of devices over which the operands are split.
    """

    function: str
    nbytes: int
    devices: int

    @property
    def name(self) -> str:
        """The name of the point's case."""
        return f"{self.function} {self.nbytes} {self.devices}"

    @property
    def side(self) -> int:
        """The side of an operand."""
        return math.isqrt(self.nbytes // 4)

    @property
    def elements(self) -> int:
        """The elements of an operand; for a product, the number of multiplications."""
        return self.side ** (3 if self.function in ("matmul", "contraction") else 2)

    @property
    def operands(self) -> tuple[int, int, str, str]:
        """The group of the case, which determines its operands: their side, the devices, and the layout of each."""
        layouts = {"matmul": (ROWS, WHOLE), "contraction": (COLUMNS, ROWS)}.get(self.function, (ROWS, ROWS))
        return self.side, self.devices, *layouts


BY_SIZE = ("add", "sum", "sin", "matmul")
BY_DEVICES = ("add", "sum", "sum0", "reshard", "contraction")


def points_by_size(sizes: Sizes) -> list[Point]:
    """Returns the points of the curves over size."""
    return [
        Point(function, nbytes, DEVICES)
        for k, nbytes in enumerate(sizes.curve)
        for function in BY_SIZE
        if function != "matmul" or k < sizes.multiplied
    ]


def points_by_devices(sizes: Sizes) -> list[Point]:
    """Returns the points of the curves over the number of devices."""
    return [Point(function, nbytes, n) for nbytes in sizes.ends for n in sizes.devices for function in BY_DEVICES]


def points(sizes: Sizes) -> list[Point]:
    """Returns the points of all curves, each once."""
    return list(dict.fromkeys(points_by_size(sizes) + points_by_devices(sizes)))


def curve_functions() -> dict[str, Callable[..., Any]]:
    """Returns the functions of the points by name; their source code is the same for NumPy and shardtensor."""
    import numpy as np

    return {
        "add": lambda x, y: x + y,
        "sum": lambda x, y: x.sum(),
        "sum0": lambda x, y: x.sum(axis=0),
        "sin": lambda x, y: np.sin(x),
        "matmul": lambda x, y: x @ y,
        "contraction": lambda x, y: x @ y,
    }


def point_cases(
    points: Sequence[Point], functions: Mapping[str, Callable[..., Any]], place: Callable[..., Any]
) -> Cases:
    """Returns the cases of points.

    Args:
        points: the points.
        functions: the functions of the points by name.
        place: converts a NumPy array into an operand, from a number of devices, the array and a layout.
    """
    import numpy as np

    def make_operands(operands: tuple[int, int, str, str]) -> list[Any]:
        side, devices, *layouts = operands
        generator = np.random.default_rng(0)
        return [place(devices, generator.random((side, side), dtype=np.float32), layout) for layout in layouts]

    by_name = {point.name: point for point in points}
    return Cases(
        {name: functions[point.function] for name, point in by_name.items()},
        lambda name: by_name[name].operands,
        make_operands,
        {},
    )


def shardtensor_curves() -> Cases:
    """Returns the cases of shardtensor, on the first devices of the backend."""
    import shardtensor as st

    def reshard(x: Any, y: Any) -> Any:
        return st.device_put(x, placement(x.sharding.mesh.size).sharding(COLUMNS))

    return point_cases(
        points(Sizes.from_environment()),
        curve_functions() | {"reshard": reshard},
        lambda devices, array, layout: placement(devices)(array, layout),
    )


def numpy_curves() -> Cases:
    """Returns the cases of NumPy, on one array. Of a curve over devices, it has the first point only."""
    sizes = Sizes.from_environment()
    single = [p for p in points_by_devices(sizes) if p.devices == sizes.devices[0] and p.function != "reshard"]
    return point_cases(points_by_size(sizes) + single, curve_functions(), lambda devices, array, layout: array)
