"""Random programs with views, writes, reductions, reshards and aliasing, and what holds for each of them.

The programs are drawn by a seed, without the bookkeeping of hypothesis, so that very many run. To run those of a range
of seeds: ``python -m tests.interpreters.jit.random_programs numpy 0 100000``, with ``c`` for compiled kernels, or
with ``default`` for the executor None.
"""

from __future__ import annotations

import contextlib
import random
import sys
from typing import Any
from unittest import mock

import numpy as np

import shardtensor as st
from shardtensor.interpreters.jit.c import c_executor, temporal_blocking
from shardtensor.interpreters.jit.grouping import groups
from tests.interpreters.test_infer import totals
from tests.layouts import MESHES, array, mesh_of

Step = tuple[str, int, int, int]

STEPS = (
    "add", "scale", "tanh", "slice", "rows", "transpose", "reverse", "sum", "mean", "copy", "where", "write", "write row",
    "in place", "in place rows", "out", "reshard", "matmul", "sort", "concat", "index", "stencil", "stencil of a copy",
    "write a chain", "add products", "cast", "compare", "extrema", "var", "count", "time steps",
    "host array", "host stencil",
)  # fmt: skip

WIDE = ["float64", "float64", "int64", "int32"]
DTYPES = ["float64", "float32", "int64", "int32", "uint8", "bool", "float16", "complex64"]
"""The dtypes of arguments: with few rounding errors, and all. Those of casts are among the first six."""

_JUMPS = ("compare", "count")
"""Steps by which rounding errors become large."""

SHAPES = [(5, 5), (4, 3), (8, 2), (1, 6), (7, 1), (9, 10), (3, 17)]


def run_step(xp: Any, values: list[Any], step: Step, placed: Any) -> None:
    """Adds a value to the list, or writes one."""
    name, i, j, n = step
    x, y = values[i % len(values)], values[j % len(values)]
    match name:
        case "add":
            values.append(x + y if x.shape == y.shape else x + 1)
        case "scale":
            values.append(x * 0.5 - n)
        case "tanh":
            values.append(xp.tanh(x))
        case "slice":
            values.append(x[n % 3 :, : max(1, n % 5)])
        case "rows":
            values.append(x[::2])
        case "transpose":
            values.append(x.T)
        case "reverse":
            values.append(x[::-1])
        case "sum":
            values.append(x - x.sum(axis=-1, keepdims=True))
        case "mean":
            values.append(x * xp.mean(x) if x.size else x + 0)
        case "copy":
            values.append(x.copy())
        case "where":
            values.append(xp.where(x > 0, x, -x))
        case "write":
            x[1:] = y[:-1] if x.shape == y.shape and _fits(y, x) else n
        case "write row":
            x[0] = n
        case "in place":
            x += y if x.shape == y.shape else n
        case "in place rows":
            x[: n % 4] *= 0.5
        case "out":
            np.subtract(
                n, x, out=x
            )  # NumPy 2.4's negative is wrong with AVX-512 where the elements are 64 bytes apart.
        case "reshard":
            values.append(placed(x, n))
        case "matmul":
            values.append(xp.tanh(x @ x.T) if x.size else x)
        case "sort":
            values.append(xp.sort(x, axis=0))
        case "concat":
            values.append(xp.concat([x, x], axis=0) if x.size < 100 else x + 0)
        case "index":
            values.append(x[[0, -1]] if x.shape[0] else x.copy())
        case "stencil":
            x[1:-1, 1:-1] = 0.25 * (x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:])
        case "stencil of a copy":
            new = (y if x.shape == y.shape and _fits(x * 0.5, y) else x).copy()
            new[n % 2 : -1] = 0.5 * x[n % 2 : -1] - x[1 : len(x) - n % 2] * (n % 3)
            values.append(new)
        case "write a chain":
            if x.shape == y.shape and _fits(y * 0.5, x):
                x[:: 1 + n % 2, n % 3 :] = xp.tanh(y[:: 1 + n % 2, n % 3 :] * 0.5) + n
        case "add products":
            values.append((x @ y.T + x @ x.T) * 0.1 if x.shape == y.shape and x.size else x - 1)
        case "cast":
            values.append(
                xp.astype(x, DTYPES[n % (6 if x.dtype.kind in "biu" else 2)] if x.dtype.kind != "c" else x.dtype)
            )
        case "compare":
            # Numbers that no result equals but for rounding errors, unlike the limits of tanh.
            values.append(xp.where((x > y if x.shape == y.shape else x > 0.3337) & (x < n + 0.3337), x, x + x))
        case "extrema":
            low = x.min(axis=-1, keepdims=True) if x.size else 0
            values.append(xp.maximum(x, low * 2) - xp.minimum(x, n))
        case "var":
            values.append(x * xp.var(x, axis=-1, keepdims=True) if x.size else x)
        case "count":
            values.append(x + (x > n / 8).sum(axis=n % 2, keepdims=True))
        case "time steps":
            for _ in range(n % 5 * _fits(x * 0.5 + y, x)):
                x[1:-1] = 0.5 * x[:-2] - 0.25 * x[2:] + (y[1:-1] if x.shape == y.shape and n % 2 else n)
        case "host array":
            h = array([x.shape, x.shape[1:], (*x.shape[:1], 1)][n % 3], x.dtype, n)
            values.append(x * h + h)
        case "host stencil":
            h = array([x[1:-1].shape, x.shape[1:]][n % 2], x.dtype, n)
            x[1:-1] = 0.5 * x[:-2] + h if _fits(x * 0.5, x) else x[2:] + h


def _fits(y: Any, x: Any) -> bool:
    """Whether a write of one array to another gives what the elements determine: no float becomes an integer."""
    return np.can_cast(y.dtype, x.dtype, "same_kind")


class Case:
    """A random program with its arguments.

    Attributes:
        steps: the program.
        alias: how its arguments share memory.
        dtypes: the dtypes of its arguments.
        is_narrow: whether values may have few digits.
        shardings: the layouts of arguments and reshards.
    """

    def __init__(self, draw: random.Random, backend: str) -> None:
        mesh = mesh_of(draw.choice(MESHES), backend)
        self.shape = draw.choice(SHAPES)
        self.shardings = [st.NamedSharding(mesh, _spec(draw, mesh)) for _ in range(3)]
        self.is_narrow = draw.random() < 0.5
        self.dtypes = [draw.choice(DTYPES if self.is_narrow else WIDE) for _ in range(2)]
        known = [name for name in STEPS if name not in (_JUMPS if self.is_narrow else ("cast",))]
        self.steps = [(draw.choice(known), *[draw.randrange(30) for _ in range(3)]) for _ in range(draw.randint(1, 10))]
        self.alias = draw.choice(["none", "none", "same", "shifted", "view"])

    def arguments(self, xp: Any) -> tuple[Any, Any, Any]:
        """Returns the arguments, and the tensors whose values a call may change."""
        x, y = (array(self.shape, dtype, k) for k, dtype in enumerate(self.dtypes, 1))
        if xp is st:
            x, y = (st.device_put(a, s) for a, s in zip((x, y), self.shardings, strict=False))
        return {"none": (x, y), "same": (x, x), "shifted": (x[:-1], x[1:]), "view": (x.T, x)}[self.alias], x, y

    def run(self, xp: Any, a: Any, b: Any) -> Any:
        """Runs the program."""
        values = [a, b]
        for step in self.steps:
            run_step(xp, values, step, (lambda x, n: st.reshard(x, self.shardings[n % 3])) if xp is st else _copied)
        return values[2:]

    def answer(self, xp: Any, function: Any) -> tuple[Any, list[Any]]:
        """Returns the results of a function, or the type of its error, and the values of the arguments after it."""
        args, *bases = self.arguments(xp)
        with np.errstate(all="ignore"):
            try:
                return function(*args), bases
            except (ValueError, IndexError, TypeError, OverflowError) as error:
                return type(error), bases

    def check(self, executor: str | None, *, counts: bool) -> None:
        """Checks that jit gives the results of eager mode, and NumPy's, and, if ``counts``, that it moves no more bytes."""
        traced = st.jit(lambda a, b: self.run(st, a, b), executor=executor)
        plain, after = self.answer(np, lambda a, b: self.run(np, a, b))
        with st.transfers() as sent:
            eager, mine = self.answer(st, lambda a, b: self.run(st, a, b))
        found, its = self.answer(st, traced)
        if isinstance(eager, type) or isinstance(plain, type):
            assert isinstance(found, type) or isinstance(plain, type)
            if isinstance(found, type):
                for x, y in zip(self.arguments(np)[1:], its, strict=True):
                    np.testing.assert_array_equal(np.asarray(y), x)
            return
        for a, b in zip([*eager, *mine], [*found, *its], strict=True):
            assert a.sharding == b.sharding
            if executor == "numpy":
                np.testing.assert_array_equal(np.asarray(b), np.asarray(a))
        for a, b in zip([*plain, *after], [*found, *its], strict=True):
            assert b.dtype == a.dtype
            if not {"float16", "uint8", "bool"} & {*self.dtypes}:  # Functions of these have three digits.
                small = 1e-2 if self.is_narrow else 1e-6
                scale = np.abs(a[np.isfinite(a)] * 1.0).max(initial=0)
                np.testing.assert_allclose(np.asarray(b), a, rtol=small, atol=small * (0.1 + scale * 0.01))
        if counts:
            after_call = its
            with st.transfers() as moved:
                again, its = self.answer(st, traced)
            assert sum(totals(moved).values()) <= sum(totals(sent).values())
            # Where transfers are recorded, devices on one memory have buffers of other strides, and the C compiler
            # vectorizes functions of other elements; NumPy's buffers are equal.
            limit = 1e-14 if executor == "c" and its[0].sharding.mesh.flat[0].backend == "torch" else 0
            for a, b in zip([*found, *after_call], [*again, *its], strict=True):
                np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=limit, atol=limit)


_SMALL = (
    *[(groups, "LEAST", 1), (temporal_blocking, "LEAST_BYTES", 0), (temporal_blocking, "ROWS", 0)],
    *[(c_executor, "_BAND", 8), (c_executor, "_CHUNK", 1e-9), (c_executor, "_WIDTH", 2)],
)
"""The sizes from which on there are kernels, bands and chunks of rows, for small arrays."""


def _copied(x: Any, n: int) -> Any:
    return x.copy()


def _spec(draw: random.Random, mesh: st.Mesh) -> st.P:
    names = draw.sample(mesh.axis_names, draw.randint(0, len(mesh.axis_names)))
    parts: list[list[str]] = [[], []]
    for name in names:
        parts[draw.randrange(2)].append(name)
    return st.P(*[tuple(part) or None for part in parts])


def run_seeds(executor: str | None, first: int, count: int, backend: str = "numpy", every: int = 10) -> None:
    """Checks the programs of a range of seeds; of every tenth, the bytes, too. Groups of loops of any size are fused,
    and their steps blocked in time.

    Raises:
        AssertionError: one is wrong; a note names the seed.
    """
    with contextlib.ExitStack() as patches:
        for module, name, value in _SMALL:
            patches.enter_context(mock.patch.object(module, name, value))
        for seed in range(first, first + count):
            case = Case(random.Random(seed), backend)
            try:
                case.check(executor, counts=seed % every == 0)
            except BaseException as error:
                error.add_note(f"seed {seed}: {case.alias}, {case.shape}, {case.shardings}, {case.steps}")
                raise


if __name__ == "__main__":
    kind, begin, number = {"default": None}.get(sys.argv[1], sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for start in range(begin, begin + number, 1000):
        run_seeds(kind, start, min(1000, begin + number - start))
        print(kind, start + min(1000, begin + number - start), flush=True)
