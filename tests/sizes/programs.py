"""Random programs of all functions, of views of views and of writes, eager and under jit."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import shardtensor as st
from tests.layouts import mesh_of
from tests.numpy_table import leaves
from tests.sizes.functions import CALLS, COPIED, POWERS, PROGRAM_CALLS, Call
from tests.sizes.operands import (
    DTYPES,
    LAYOUTS,
    MESHES,
    SPECIALS,
    Differs,
    check_errors,
    compare,
    compare_all,
    made,
    outcome,
    place,
    scale_of,
    viewed,
)  # fmt: skip

VIEWS: dict[str, Call] = {
    "x[1:]": lambda x: x[1:],
    "x[:-1]": lambda x: x[:-1],
    "x[::2]": lambda x: x[::2],
    "x[::-1]": lambda x: x[::-1],
    "x[..., ::-1]": lambda x: x[..., ::-1],
    "x[..., 1:]": lambda x: x[..., 1:],
    "x[0]": lambda x: x[0],
    "x[None, 0]": lambda x: x[None, 0],
    "x.T": lambda x: x.T,
    "x.reshape(-1)": lambda x: x.reshape(-1),
    "x.ravel()": lambda x: x.ravel(),
    "x.flatten()": lambda x: x.flatten(),
    "x.reshape(-1, 1)": lambda x: x.reshape(-1, 1),
    "x.copy()": lambda x: x.copy(),
    "x.real": lambda x: x.real,
    "x[[0, -1, 0]]": lambda x: x[[0, -1, 0]],
    "x[x > 0]": lambda x: x[x.real > 0],
    "np.flip(x, 0)": lambda x: np.flip(x, 0),
    "np.array(x)": lambda x: np.array(x, copy=True),
    "np.asarray(x)": lambda x: np.asanyarray(x) if isinstance(x, np.ndarray) else x,
    "np.swapaxes(x, 0, -1)": lambda x: np.swapaxes(x, 0, -1),
    "np.atleast_2d(x)": np.atleast_2d,
}
"""Statements that make views, and copies beside them."""

WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "x[...] = y": lambda x, y: x.__setitem__(..., y),
    "x[1:] = y[:-1]": lambda x, y: x.__setitem__(slice(1, None), y[:-1]),
    "x[::-1] = y": lambda x, y: x.__setitem__(slice(None, None, -1), y),
    "x[::2] = 1": lambda x, y: x.__setitem__(slice(None, None, 2), 1),
    "x[..., -1] = 0": lambda x, y: x.__setitem__((..., -1), 0),
    "x[[0, -1]] = 2": lambda x, y: x.__setitem__([0, -1], 2),
    "x[x > 0] = 1": lambda x, y: x.__setitem__(x.real > 0, 1),
    "x.flat[::2] = 1": lambda x, y: x.flat.__setitem__(slice(None, None, 2), 1),
    "x += y": lambda x, y: x.__iadd__(y),
    "x -= x[::-1]": lambda x, y: np.subtract(x, x[::-1], out=x),
    "x.T += 1": lambda x, y: np.add(x.T, 1, out=x.T),
    "x.sort(0)": lambda x, y: x.sort(axis=0),
    "x[::-1].sort(0)": lambda x, y: x[::-1].sort(axis=0),
    "x.fill(3)": lambda x, y: x.fill(3),
    "np.copyto(x.T, y.T)": lambda x, y: np.copyto(x.T, y.T),
    "np.fill_diagonal(x, 1)": lambda x, y: np.fill_diagonal(x, 1),
    "np.fill_diagonal(x.T, 2)": lambda x, y: np.fill_diagonal(x.T, 2),
    "np.put(x, [0, 1], [2, 3])": lambda x, y: np.put(x, [0, 1], [2, 3]),
    "np.place(x, x > 0, [1, 2])": lambda x, y: np.place(x, x.real > 0, [1, 2]),
    "np.putmask(x, x > 0, y)": lambda x, y: np.putmask(x, x.real > 0, y),
    "np.put_along_axis(x, 0, 1)": lambda x, y: np.put_along_axis(x, np.zeros((1,) * x.ndim, int), 1, 0),
    "np.put_along_axis(x.T, [0], 1)": lambda x, y: np.put_along_axis(x.T, np.array([0, 1]), 1, None),
    "np.add.at(x, [0, 0], 1)": lambda x, y: np.add.at(x, [0, 0], x.dtype.type(1)),
    "np.multiply(x, 2, out=x)": lambda x, y: np.multiply(x, 2, out=x),
    "np.cumsum(x, 0, out=x)": lambda x, y: np.cumsum(x, axis=0, out=x),
    "np.clip(x, 0, 1, out=x)": lambda x, y: np.clip(x, 0, 1, out=x),
}
"""Statements that write. A float that is no number does not become an integer: C leaves the value open."""

MOST = 200
"""The most elements of a value."""


class Pool:
    """The values of a program as operands of a call: which value is which operand is drawn, or known from before."""

    def __init__(self, values: list[Any], draw: random.Random, chosen: dict[str, int]) -> None:
        self.values, self.draw, self.chosen = values, draw, chosen

    def __getattr__(self, name: str) -> Any:
        if name not in self.chosen:
            wanted = 2 if name in "xyzcfnbqrt" else 1
            fitting = [k for k, x in enumerate(self.values) if x.ndim == wanted]
            self.chosen[name] = self.draw.choice(fitting or range(len(self.values)))
        return self.values[self.chosen[name]]


def tamed(x: Any) -> Any:
    """Returns small integers in place of numbers that may have errors of rounding, and of those that are not finite."""
    rounded = np.round(x)
    return np.where(np.abs(rounded) < 100, rounded, 1)


def is_same(x: Any, y: np.ndarray) -> bool:
    """Whether a result equals NumPy's without any error of rounding."""
    x = np.asarray(x)
    return bool(((x == y) | ((x != x) & (y != y))).all())


def is_tame(x: np.ndarray) -> bool:
    """Whether sums of products of these numbers are exact, or not finite."""
    if x.dtype.kind not in "fc":
        return True
    parts = np.stack([x.real, x.imag]).astype(float)
    parts = parts[np.isfinite(parts)]
    return bool((abs(parts) <= 64).all() and (parts * 4 == np.round(parts * 4)).all())


Statement = tuple[str, str, dict[str, int], bool]
"""A kind, a name, the numbers of the values that are used, and whether the results are tamed."""


class Program:
    """Statements on values in NumPy and in the library, one after the other; then the same statements under jit.

    Attributes:
        seed: all else is drawn by it.
        backend: the backend of the devices, which is drawn.
        executor: that of jit.
        has_log: whether a log of transfers is open meanwhile.
        is_compiled: whether the statements are also run under jit.
        statements: those that have run without an error.
    """

    def __init__(self, seed: int, backends: Sequence[str], executor: str = "numpy") -> None:
        ways = random.Random(f"{seed} ways")
        self.seed, self.backend, self.draw = seed, ways.choice(backends), random.Random(f"{seed} program")
        self.executor, self.has_log = executor, ways.random() < 0.25
        self.is_compiled = executor != "numpy" or ways.random() < 0.25
        self.statements: list[Statement] = []
        draw, rng = self.draw, np.random.default_rng(seed)
        mesh = mesh_of(draw.choice(MESHES), self.backend)
        dtypes = [draw.choice(DTYPES) for _ in range(3)]
        special = draw.choice(SPECIALS[:2])
        if self.backend == "torch":
            dtypes = [dtype for dtype in dtypes if dtype not in ("u2", "u4", "u8", "c8", "c16")] + ["f8"]
        rows, columns = draw.choice([3, 4, 7]), draw.choice([1, 2, 5])
        shapes = [(rows, columns), draw.choice([(rows, columns), (columns, rows)]), (draw.choice([rows, columns]),)]
        self.given = [
            made(np.round(rng.uniform(-2, 2, shape) * 4) / 4, draw.choice(dtypes), special, rng) for shape in shapes
        ]
        axes = [*mesh.axis_names, None]
        self.layouts = [(draw.choice(LAYOUTS), st.NamedSharding(mesh, st.P(*draw.sample(axes, 2)))) for _ in shapes]

    def __str__(self) -> str:
        return f"program {self.seed} on {self.backend}, {self.layouts}, {[x.dtype.str for x in self.given]}, {self.statements}"

    def placed(self) -> list[Any]:
        return [place(x, *how) for x, how in zip(self.given, self.layouts, strict=True)]

    def check(self, length: int = 8) -> None:
        """Compares all values with NumPy's after every statement, and after all of them under jit."""
        mine = self.placed()
        plain = [
            viewed(x, layout, lambda a: np.array(a, order="C"))
            for x, (layout, _) in zip(self.given, self.layouts, strict=True)
        ]
        with contextlib.ExitStack() as stack:
            if self.has_log:
                stack.enter_context(st.transfers())
            for _ in range(length):
                if not self._step(plain, mine):
                    return
            if self.is_compiled and self.statements:
                self._check_jit(plain)

    def _step(self, plain: list[Any], mine: list[Any]) -> bool:
        """Runs a statement. Returns whether the values are still those of NumPy: not after an error on one side only."""
        kind = self.draw.choice(["call", "call", "view", "view", "write"])
        names = {"call": PROGRAM_CALLS, "view": VIEWS, "write": WRITES}[kind]
        name = self.draw.choice(sorted({*names} - ({*POWERS} if self.backend == "cupy" else set())))
        chosen = {} if kind == "call" else {"x": self._one(plain), "y": self._one(plain)}
        if kind == "write" and not np.can_cast(plain[chosen["y"]].dtype, plain[chosen["x"]].dtype, "same_kind"):
            chosen["y"] = chosen["x"]
        if kind == "write" and not (plain[chosen["x"]].flags.writeable and plain[chosen["x"]].size):
            return True
        before = [x.copy() for x in plain]
        wanted = outcome(lambda values: execute(kind, name, Pool(values, self.draw, chosen)), plain)
        found = outcome(lambda values: execute(kind, name, Pool(values, self.draw, chosen)), mine)
        self.last = (kind, name, chosen)
        operands = [before[number] for number in chosen.values()]
        if name == "intersect1d" and merges(operands):
            return True
        if name == "einsum" and len({x.shape for x in operands}) > 1:
            # Where one operand lacks a dimension, infinities are added before they are multiplied (as the pages say). So
            # does NumPy in some memory orders.
            return True
        if isinstance(wanted, Exception) or isinstance(found, Exception):
            check_errors(found, wanted)
            for x, y in zip(plain, before, strict=True):  # NumPy may have written some elements before the error.
                if x.flags.writeable:
                    x[...] = y
            if isinstance(found, Exception):
                compare_all(mine, plain)
            return isinstance(found, Exception) and isinstance(wanted, Exception)
        scale = scale_of(name, before)
        for x, y in zip(found, wanted, strict=True):
            compare(x, y, exact=False, scale=scale)
        results = [(x, y) for x, y in zip(found, wanted, strict=True) if is_value(x, y)] if name not in COPIED else []
        tame = not all(is_tame(y) and is_same(x, y) for x, y in results)
        self.statements.append((kind, name, chosen, tame))
        for x, y in results[:2]:
            if tame:
                x, y = tamed(x), tamed(y)
                if not is_same(x, y):  # They were about half way between two integers.
                    return False
            if not any(np.shares_memory(y, z) for z in plain):
                y = np.ascontiguousarray(y)
            mine.append(x)
            plain.append(y)
        compare_all(mine, plain)
        return True

    def _one(self, values: list[Any]) -> int:
        return self.draw.randrange(len(values))

    def _check_jit(self, plain: list[Any]) -> None:
        given = self.placed()
        self.last = ("jit", self.executor, {})
        found = outcome(lambda values: st.jit(self._replayed, executor=self.executor)(*values), given)
        if isinstance(found, Exception):
            if not isinstance(found, st.ConcretizationError):
                raise Differs(f"{found!r} under jit")
            return
        compare_all([*given, *found], plain)

    def _replayed(self, *values: Any) -> Any:
        values = list(values)
        with np.errstate(all="ignore"):
            for kind, name, chosen, tame in self.statements:
                made = leaves(execute(kind, name, Pool(values, self.draw, chosen)))
                results = [x for x in made if is_value(x, x)] if name not in COPIED else []
                values += [tamed(x) if tame else x for x in results[:2]]
        return values[3:]


def merges(operands: list[np.ndarray]) -> bool:
    """Whether different elements of an operand are equal in the common dtype: NumPy takes them for one of both arrays."""
    dtype = np.result_type(*operands)
    return any(np.unique(x.astype(dtype)).size < np.unique(x).size for x in operands)


def execute(kind: str, name: str, pool: Pool) -> Any:
    """Runs a statement."""
    if kind == "call":
        return CALLS[name](pool)
    if kind == "view":
        return VIEWS[name](pool.x)
    WRITES[name](pool.x, pool.y)
    return []


def is_value(x: Any, y: Any) -> bool:
    """Whether a result becomes a value of the program."""
    return (
        isinstance(x, st.ShardedTensor)
        and isinstance(y, np.ndarray | st.ShardedTensor)
        and 1 <= x.ndim <= 2
        and 0 < x.size <= MOST
    )


def run_programs(backends: list[str], first: int, count: int, executor: str) -> Iterator[str]:
    """Checks the programs of a range of seeds, and yields what is wrong."""
    for seed in range(first, first + count):
        program = Program(seed, backends, executor)
        try:
            program.check()
        except Differs as error:
            yield f"{program} {program.last}: {error}"
        except Exception as error:
            yield f"{program} {program.last}: raised {error!r}"
