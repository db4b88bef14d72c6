"""The cases of `scaling.py`: how costs grow with sizes, devices, shapes, processes, and the length of programs."""

from __future__ import annotations

import functools
import itertools
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
    points: Sequence[Point],
    functions: Mapping[str, Callable[..., Any]],
    place: Callable[..., Any],
    counted: Mapping[str, Callable[[], Any]] | None = None,
) -> Cases:
    """Returns the cases of points.

    Args:
        points: the points.
        functions: the functions of the points by name.
        place: converts a NumPy array into an operand, from a number of devices, the array and a layout.
        counted: further cases, which have no operands.
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
        counted or {},
    )


def shardtensor_cases() -> Cases:
    """Returns the cases of shardtensor, on the first devices of the backend."""
    import shardtensor as st

    def reshard(x: Any, y: Any) -> Any:
        return st.device_put(x, placement(x.sharding.mesh.size).sharding(COLUMNS))

    sizes = Sizes.from_environment()
    makers = {"plan": plan, "trace": trace, "run": run, "shapes": shapes, "pmap": pmap, "psum": psum}
    counted = {
        f"{function} {n}": functools.partial(_made_once(makers[function]), n)
        for function, counts in COUNTED.items()
        for n in counts(sizes)
    }
    return point_cases(
        points(sizes),
        curve_functions() | {"reshard": reshard},
        lambda devices, array, layout: placement(devices)(array, layout),
        counted,
    )


COUNTED: dict[str, Callable[[Sizes], Sequence[int]]] = {
    "plan": lambda sizes: sizes.simulated,
    "trace": lambda sizes: sizes.equations,
    "run": lambda sizes: sizes.equations,
    "shapes": lambda sizes: sizes.shapes,
    "pmap": lambda sizes: sizes.devices,
    "psum": lambda sizes: sizes.devices,
}
"""The functions whose costs grow with a number that is not the size of an array, and these numbers."""


def _made_once(make: Callable[[int], Callable[[], Any]]) -> Callable[[int], Any]:
    """Returns a function of a number that calls what ``make`` returns for it, which is made once."""
    made = functools.cache(make)
    return lambda n: made(n)()


def plan(devices: int) -> Callable[[], Any]:
    """Returns a call that plans a copy of rows to columns between devices that do not exist."""
    import shardtensor as st
    from shardtensor.backend import Device
    from shardtensor.sharding.copy_plan import plan_reshard

    first_id = itertools.count(step=devices)

    def call() -> Any:
        first = next(first_id)  # each call has other devices, so that no cache of the library is hit
        mesh = st.make_mesh((devices,), ("d",), devices=[Device("numpy", first + i) for i in range(devices)])
        ends = st.NamedSharding(mesh, st.P("d")), st.NamedSharding(mesh, st.P(None, "d"))
        return plan_reshard.__wrapped__(*ends, (4 * devices, 4 * devices))

    return call


def _program(equations: int) -> Callable[[Any], Any]:
    import shardtensor as st

    def program(x: Any) -> Any:
        for _ in range(max(equations // 5, 1)):
            x = st.tanh(x * 0.5) + st.sqrt(x * x)
        return x

    return program


def trace(equations: int) -> Callable[[], Any]:
    """Returns a call that traces and prepares a program of this number of equations."""
    import shardtensor as st

    x, program = st.zeros((64, 64)), _program(equations)
    return lambda: st.jit(lambda x: program(x), executor="numpy").lower(x)


def run(equations: int) -> Callable[[], Any]:
    """Returns a call of a compiled program of this number of equations."""
    import shardtensor as st

    x, compiled = st.zeros((64, 64)), st.jit(_program(equations))
    return lambda: compiled(x)


def shapes(count: int) -> Callable[[], Any]:
    """Returns a call that adds arrays of this number of shapes, one after the other."""
    import shardtensor as st

    arrays = [st.zeros((8 + k % 64, 1 + k // 64), device=placement(DEVICES).sharding(ROWS)) for k in range(count)]

    def call() -> None:
        for x in arrays:
            x + x

    return call


def _add_one(x: Any) -> Any:
    return x + 1


def pmap(devices: int) -> Callable[[], Any]:
    """Returns a call of a pmap over this number of devices."""
    import shardtensor as st

    shards = st.zeros(4 * devices, device=placement(devices).sharding(ROWS)).addressable_shards
    parts = [shard.data for shard in shards]
    return lambda: st.pmap(_add_one, parts)


def psum(devices: int) -> Callable[[], Any]:
    """Returns a call of a map over this number of devices with one collective."""
    import shardtensor as st

    sharding = placement(devices).sharding(ROWS)
    x = st.zeros(devices, device=sharding)
    axis = sharding.mesh.axis_names[0]
    mapped = st.shard_map(lambda a: st.psum(a, axis), mesh=sharding.mesh, in_specs=st.P(axis), out_specs=st.P())
    return lambda: mapped(x)


def groups(sizes: Sizes) -> list[list[str]]:
    """Returns the names of the cases that are measured together: those with the same operands, and those counted."""
    by_operands = itertools.groupby(sorted(points(sizes), key=lambda p: p.operands), lambda p: p.operands)
    counted = [[f"{function} {n}" for n in counts(sizes)] for function, counts in COUNTED.items()]
    return [*[[point.name for point in group] for _, group in by_operands], *counted]


def numpy_cases() -> Cases:
    """Returns the cases of NumPy, on one array. Of a curve over devices, it has the first point only."""
    sizes = Sizes.from_environment()
    single = [p for p in points_by_devices(sizes) if p.devices == sizes.devices[0] and p.function != "reshard"]
    return point_cases(points_by_size(sizes) + single, curve_functions(), lambda devices, array, layout: array)
