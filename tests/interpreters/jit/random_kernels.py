"""Random kernels with operands, and the results that NumPy's functions compute for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardtensor.errors import ArgumentTypeError
from shardtensor.interpreters.jit.kernels.kernel import Kernel, KernelBuilder

EXACT = (
    *["add", "subtract", "multiply", "divide", "floor_divide", "remainder", "maximum", "minimum", "fmod", "copysign"],
    *["equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_xor"],
    *["bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "bitwise_invert"],
    *["negative", "positive", "abs", "sign", "square", "reciprocal", "sqrt", "ceil", "floor", "trunc", "rint", "where"],
    *["isnan", "isinf", "isfinite", "signbit", "logical_not", "nextafter", "heaviside", "clip", "degrees", "radians"],
)  # fmt: skip
"""Functions whose results in C have the same bits as NumPy's."""

DTYPES = ("b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8")
ODD = np.array([0.0, -0.0, 1, -1, 2, 3.5, -7, 100, np.nan, np.inf, -np.inf, 1e-310, 3e38, 1e-45])


def special(dtype: Any, size: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Returns elements of a dtype, among them extreme ones."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, size).astype(bool)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        few = np.array([info.min, info.max, 0, 1, 2, 3, 7, 31, 32, 63, 64], dtype)
        return np.where(rng.random(size) < 0.5, rng.choice(few, size), rng.integers(0, 5, size).astype(dtype))
    with np.errstate(all="ignore"):
        reals = np.where(rng.random(size) < 0.5, rng.choice(ODD, size), rng.normal(size=size)).astype(dtype)
    return reals + 1j * reals[::-1] if dtype.kind == "c" else reals


@dataclass
class Case:
    """A kernel, and the operands of one call."""

    kernel: Kernel
    shape: tuple[int, ...]
    inputs: list[Any]

    def outputs(self) -> list[np.ndarray[Any, Any]]:
        outer = self.shape[: self.kernel.ndim - self.kernel.row_ndim]
        shapes = [outer if out.per_row else self.shape for out in self.kernel.outputs]
        outs = [np.empty(s, self.kernel.dtype(o.value)) for s, o in zip(shapes, self.kernel.outputs, strict=True)]
        for out in outs:
            out.view("u1" if out.ndim else out.dtype)[...] = 1  # Elements that the kernel does not write are detected.
        return outs


def random_case(seed: int, dtypes: Sequence[str] = DTYPES, names: Sequence[str] = EXACT) -> Case:
    """Returns a kernel of up to ten steps, with operands of all kinds of strides."""
    rng = np.random.default_rng(seed)
    kernel, weak = _random_kernel(rng, dtypes, names)
    shape = tuple([int(n) for n in rng.choice([1, 2, 3, 5, 17, 130], kernel.ndim, p=[0.15, 0.2, 0.2, 0.2, 0.15, 0.1])])
    if seed % 23 == 22 and kernel.ndim > kernel.row_ndim:
        shape = (0, *shape[1:])
    return Case(kernel, shape, [_operand(rng, kernel, k, shape, weak) for k in range(len(kernel.inputs))])


def _random_kernel(rng: np.random.Generator, dtypes: Sequence[str], names: Sequence[str]) -> tuple[Kernel, set[int]]:
    ndim = int(rng.integers(0, 4))
    row_ndim = int(rng.integers(0, ndim + 1)) if rng.random() < 0.6 else 0
    builder = KernelBuilder(ndim, row_ndim)
    weak = set()
    for k in range(rng.integers(1, 4)):
        varies = [k == 0 or rng.random() < 0.7 for _ in range(ndim)]
        if k and rng.random() < 0.3:
            weak.add(builder.input(float if rng.random() < 0.5 else int))
        else:
            builder.input(str(rng.choice(dtypes)), varies)
    inputs = values = k + 1
    while values < inputs + rng.integers(1, 11):
        values = 1 + _random_step(rng, builder, values, names, row_ndim)
    # The outputs are late steps, because those depend on the most other steps. A reduced value is written once per row.
    for value in {values - 1, *[int(v) for v in rng.integers(inputs, values, 2)]}:
        try:
            builder.output(value, per_row=True)
            builder.build()
        except ValueError:
            builder._outputs.pop()
            builder.output(value)
        else:
            if not row_ndim or rng.random() < 0.3:
                builder._outputs.pop()
                builder.output(value)
    return builder.build(), weak


def _random_step(
    rng: np.random.Generator, builder: KernelBuilder, values: int, names: Sequence[str], row_ndim: int
) -> int:
    """Adds one or several steps, and returns the number of the last value."""
    if row_ndim and rng.random() < 0.25:
        name = str(rng.choice(["sum", "max", "min", "prod", "any", "all", "mean", "sum_of_squares"]))
        value = int(rng.integers(0, values))
        try:
            if name not in ("any", "all"):
                value = _whole_numbers(builder, value, 1 if name == "prod" else 8)
            builder.reduce(name, value)
            builder.output(len(builder._inputs) + len(builder._steps) - 1)
            builder.build()  # Raises an error for values that do not vary along a row.
        except ValueError:
            builder._steps.pop()
            builder._known.clear()
        finally:
            builder._outputs.clear()
    else:
        for _ in range(20):
            name = str(rng.choice(list(names)))
            count = {"where": 3, "clip": 3}.get(name) or getattr(np, name).nin
            operands = [int(v) for v in rng.integers(0, values, count)]
            if name in ("signbit", "copysign"):  # The sign of a NaN that was computed is undefined.
                operands[-1] %= len(builder._inputs)
            try:
                builder.call(name, *operands)
            except ArgumentTypeError:
                continue
            break
    return max(len(builder._inputs) + len(builder._steps) - 1, values - 1)


def _whole_numbers(builder: KernelBuilder, value: int, most: int) -> int:
    """Adds steps that convert a value to small whole numbers in float64, without -0.0, and returns their number.

    Sums of such numbers have the same bits in any order.
    """
    value = builder.astype(value, "f8")
    zero = builder.call("subtract", value, value)
    one = builder.call("equal", zero, zero)
    bound = builder.call("multiply", builder.astype(one, "f8"), builder.astype(one, "f8"))
    for _ in range(most.bit_length() - 1):
        bound = builder.call("add", bound, bound)
    value = builder.call("maximum", builder.call("minimum", value, bound), builder.call("negative", bound))
    return builder.call("add", builder.call("rint", value), builder.call("logical_and", one, one))


def _operand(rng: np.random.Generator, kernel: Kernel, k: int, shape: tuple[int, ...], weak: set[int]) -> Any:
    given = kernel.inputs[k]
    if k in weak:
        return float(rng.choice([0.5, -2.0, 3.0])) if given.dtype == "f8" else int(rng.integers(0, 100))
    sizes = [n if v and rng.random() < 0.9 else 1 for n, v in zip(shape, given.varies, strict=True)]
    steps = [int(s) for s in rng.choice([1, 1, 1, -1, 2], len(shape))]
    order = rng.permutation(len(shape)) if rng.random() < 0.3 else np.arange(len(shape))
    room = [n * abs(s) for n, s in zip(sizes, steps, strict=True)]
    memory = special(given.dtype, math.prod(room), rng).reshape([room[d] for d in order])
    array = memory.transpose(np.argsort(order)) if len(shape) else memory
    array = array[tuple([slice(None, None, s) for s in steps])]
    return np.broadcast_to(array, shape) if rng.random() < 0.2 else array


def spread_kernel(dtype: str) -> Kernel:
    """Returns a kernel on ``x + x`` with two outputs.

    They are the sums of the squares of its deviations from the means of its rows, and the deviations divided by them.
    """
    k = KernelBuilder(2, 1)
    x = k.input(dtype, (True, True))
    doubled = k.call("add", x, x)
    deviation = k.call("subtract", doubled, k.reduce("mean", doubled))
    spread = k.reduce("sum_of_squares", deviation)
    k.output(spread, per_row=True)
    k.output(k.call("divide", deviation, spread))
    return k.build()


def reference(case: Case) -> list[np.ndarray[Any, Any]]:
    """Returns the outputs of a case, computed by NumPy's functions on whole arrays."""
    kernel, axes = case.kernel, tuple(range(-case.kernel.row_ndim, 0))
    values = [np.asarray(x, given.dtype) for x, given in zip(case.inputs, kernel.inputs, strict=True)]
    for node in kernel.nodes:
        operands = [values[v] for v in node.operands]
        if node.reduces:
            # An operand of size 1 along a reduced dimension counts once for each element of the shape.
            full = np.broadcast_shapes(operands[0].shape, (1,) * (kernel.ndim - len(axes)) + case.shape[-len(axes) :])
            values.append(_reduced(node.name, np.broadcast_to(operands[0], full), axes))
        elif node.name == "astype":
            values.append(operands[0].astype(node.dtype))
        else:
            values.append(np.asarray(getattr(np, node.name)(*operands)))
        assert values[-1].dtype == node.dtype, node
    outer = case.shape[: kernel.ndim - kernel.row_ndim]
    results = []
    for out in kernel.outputs:
        value = values[out.value]
        if out.per_row:
            # An input that does not vary along a row may be an array that repeats its elements there.
            value = value[(..., *[slice(1)] * min(kernel.row_ndim, value.ndim))]
            value = np.broadcast_to(value, outer + (1,) * kernel.row_ndim).reshape(outer)
        results.append(np.broadcast_to(value, outer if out.per_row else case.shape))
    return results


def _reduced(name: str, x: np.ndarray[Any, Any], axes: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if name == "sum_of_squares":
        return np.sum(x * x, axis=axes, keepdims=True)
    made = getattr(np, name)(x, axis=axes, keepdims=True)
    return np.asarray(made)


def assert_same(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], what: Any = "") -> None:
    """Asserts that arrays have the same bits, except for those of NaN."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype.kind in "fc":
        assert np.array_equal(np.isnan(actual), np.isnan(expected)), what
        numbers = ~np.isnan(expected)
        actual, expected = actual[numbers], expected[numbers]
        assert np.array_equal(np.signbit(actual.real), np.signbit(expected.real)), what
    assert np.array_equal(actual, expected), what
