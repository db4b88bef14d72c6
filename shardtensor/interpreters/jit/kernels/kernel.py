"""Kernels: elementwise computations and reductions of rows that one pass over the arrays of one device computes.

A `Kernel` is a pure value: it can be hashed, compared and printed, and it contains neither arrays nor shapes. It
computes over a loop of ``ndim`` dimensions, to which all inputs broadcast:

- An input varies along some of the loop dimensions and repeats along the others, where its array has size 1 or stride
  0. A window of a stencil is a strided view, made by the caller. A scalar is an input that varies along none, so that a
  new value needs no new kernel.
- A node applies an elementwise function to earlier values, or reduces a value along the rows. A row consists of the
  last ``row_ndim`` loop dimensions. A reduced value is one number per row, and later nodes broadcast it again.
- An output is the result of a node, written for each element or, if it does not vary within rows, once per row.

Values are numbered: first the inputs, then the nodes. Node dtypes are explicit, and functions compute in the dtype of
their operands: casts (``astype``) are nodes. `KernelBuilder` inserts the casts of NumPy's type promotion.

The softmax of the rows of a matrix:

>>> from shardtensor.interpreters.jit.kernels.kernel import KernelBuilder
>>> k = KernelBuilder(ndim=2, row_ndim=1)
>>> x = k.input("f4", (True, True))
>>> e = k.call("exp", k.call("subtract", x, k.reduce("max", x)))
>>> k.output(k.call("divide", e, k.reduce("sum", e)))
>>> print(k.build())
kernel over 2 dimensions, rows of 1:
  v0: f4[d0, d1]
  v1: f4 = reduce max v0
  v2: f4 = subtract v0 v1
  v3: f4 = exp v2
  v4: f4 = reduce sum v3
  v5: f4 = divide v3 v4
  out v5

An executor (`numpy_executor`, `c_executor`) is called with the shape of the loop, the inputs and the arrays for the
outputs:

- inputs: arrays with ``ndim`` dimensions that broadcast to the shape, with any strides; for an input that varies along
  no dimension also a scalar or a 0-d array.
- outputs: an array of the shape of the loop for each output per element, and of its first ``ndim - row_ndim``
  dimensions for each output per row, with any strides: a write to a slice of a tensor is an output that is a window of
  a larger buffer, whose other elements are neither read nor written. An output may share its memory with inputs: those
  of which it overwrites elements are copied first, unless they are the same array as the output. It shares none with
  other outputs, which may be other windows of its buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor.host.fork import cached_property
from shardtensor.host.units import counted

Value: TypeAlias = int
"""The number of an input or a node: inputs come first, in order."""

Shape: TypeAlias = tuple[int, ...]
HostArray: TypeAlias = npt.NDArray[Any]

REDUCTIONS = ("sum", "prod", "max", "min", "any", "all", "mean", "sum_of_squares")
"""The reductions of rows: operators of that name, and ``sum_of_squares``, of the deviations of a variance."""

_TO_BOOL = ("any", "all")


@dataclass(frozen=True, slots=True)
class Input:
    """An operand of a kernel.

    Attributes:
        dtype: kind and item size, such as ``"f4"`` (see `dtype_name`).
        varies: for each loop dimension, whether the elements differ along it.
    """

    dtype: str
    varies: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A step of a kernel.

    Attributes:
        name: of an elementwise function (that of the operator and of NumPy; ``astype`` for a cast) or, if ``reduces``,
            one of `REDUCTIONS`.
        operands: the values that it takes.
        dtype: of the result.
        reduces: whether the operand is reduced along the rows.
    """

    name: str
    operands: tuple[Value, ...]
    dtype: str
    reduces: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """A result of a kernel.

    Attributes:
        value: the value that is written, a node.
        per_row: whether it is written once per row; otherwise for every element.
    """

    value: Value
    per_row: bool = False


@dataclass(frozen=True)
class Kernel:
    """A computation on the arrays of one device; see the docstring of the module.

    Attributes:
        ndim: the number of loop dimensions.
        inputs: the operands.
        nodes: the steps, each after those that it uses.
        outputs: the results.
        row_ndim: the number of trailing dimensions that make a row; 0 if nothing is reduced.

    Raises:
        ArgumentError: a value is used before it is computed, a reduction has no rows or reduces a value that does not
            vary within them, an output is not a node, or an output per row varies within rows.
    """

    ndim: int
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    row_ndim: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.row_ndim <= self.ndim or any(len(i.varies) != self.ndim for i in self.inputs):
            raise ArgumentError(
                f"Kernel: wanted inputs and rows of {counted(self.ndim, 'dimension')}, got {self.inputs}"
            )
        if len(self.outputs) < 1:
            raise ArgumentError("Kernel: wanted at least one output")
        for k, node in enumerate(self.nodes, len(self.inputs)):
            if not node.operands or not all(0 <= v < k for v in node.operands):
                raise ArgumentError(f"Kernel: v{k} = {node.name} uses values {node.operands}; wanted earlier ones")
            if node.reduces and (node.name not in REDUCTIONS or self.is_row(node.operands[0])):
                raise ArgumentError(f"Kernel: v{k} = reduce {node.name} cannot reduce v{node.operands[0]}")
        for out in self.outputs:
            if not len(self.inputs) <= out.value < self.values or (out.per_row and not self.is_row(out.value)):
                raise ArgumentError(f"Kernel: output {out} is not a node of this kernel, or varies within rows")

    @property
    def values(self) -> int:
        """The number of values."""
        return len(self.inputs) + len(self.nodes)

    def node(self, value: Value) -> Node | None:
        """Returns the node that computes a value; None for an input."""
        return self.nodes[value - len(self.inputs)] if value >= len(self.inputs) else None

    def dtype(self, value: Value) -> str:
        """Returns the dtype of a value."""
        return (self.node(value) or self.inputs[value]).dtype

    def varies(self, value: Value) -> tuple[bool, ...]:
        """Returns, for each loop dimension, whether the elements of a value differ along it."""
        return self._varies[value]

    def is_row(self, value: Value) -> bool:
        """Returns whether a value is the same within each row. Without reductions, only scalars are."""
        return not any(self._varies[value][self.ndim - self.row_ndim if self.row_ndim else 0 :])

    @cached_property
    def _varies(self) -> tuple[tuple[bool, ...], ...]:
        known = [i.varies for i in self.inputs]
        outer = self.ndim - self.row_ndim
        for node in self.nodes:
            both = tuple([any(dims) for dims in zip(*[known[v] for v in node.operands], strict=True)])
            known.append(both[:outer] + (False,) * self.row_ndim if node.reduces else both)
        return tuple(known)

    @cached_property
    def is_whole(self) -> tuple[bool, ...]:
        """For each value, whether it varies along all loop dimensions."""
        return tuple([all(varies) for varies in self._varies])

    @cached_property
    def operands(self) -> tuple[tuple[np.dtype[Any], bool], ...]:
        """For each input its dtype, and whether it is a scalar."""
        return tuple([(np.dtype(operand.dtype), not any(operand.varies)) for operand in self.inputs])

    @cached_property
    def results(self) -> tuple[tuple[np.dtype[Any], bool], ...]:
        """For each output its dtype, and whether it is written once per row."""
        return tuple([(np.dtype(self.dtype(out.value)), out.per_row) for out in self.outputs])

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:  # The hash differs between processes.
        return Kernel, (self.ndim, self.inputs, self.nodes, self.outputs, self.row_ndim)

    @cached_property
    def _hash(self) -> int:  # A kernel is the key of caches that every call of a program looks up.
        return hash((self.ndim, self.inputs, self.nodes, self.outputs, self.row_ndim))

    def __str__(self) -> str:
        rows = f", rows of {self.row_ndim}" if self.row_ndim else ""
        lines = [f"kernel over {counted(self.ndim, 'dimension')}{rows}:"]
        for k, operand in enumerate(self.inputs):
            dims = ", ".join([f"d{d}" for d, varies in enumerate(operand.varies) if varies])
            lines.append(f"  v{k}: {operand.dtype}[{dims}]")
        for k, node in enumerate(self.nodes, len(self.inputs)):
            name = f"reduce {node.name}" if node.reduces else node.name
            lines.append(f"  v{k}: {node.dtype} = {name} " + " ".join([f"v{v}" for v in node.operands]))
        outs = [f"v{out.value} per row" if out.per_row else f"v{out.value}" for out in self.outputs]
        return "\n".join([*lines, f"  out {', '.join(outs)}"])


@functools.lru_cache(1 << 8)
def dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype in kernels: its kind and item size, such as ``"f4"``.

    Raises:
        ArgumentTypeError: the elements are not bools or numbers of the machine's byte order.
    """
    numpy_dtype = np.dtype(dtype)
    if (
        numpy_dtype.kind not in "biufc"
        or not numpy_dtype.isnative
        or numpy_dtype.itemsize > 8 * (1 + (numpy_dtype.kind == "c"))
    ):
        raise ArgumentTypeError(
            f"kernel: dtype {numpy_dtype} has no kernels; wanted bools, integers, floats or complex"
        )
    return str(numpy_dtype.str[1:])


_PYTHON = {"b": bool, "i": int, "u": int, "f": float, "c": complex}


class KernelBuilder:
    """Builds a `Kernel` step by step. Each step returns the number of its value; equal steps are one value.

    Args:
        ndim: the number of loop dimensions.
        row_ndim: the number of trailing dimensions that make a row.
    """

    def __init__(self, ndim: int, row_ndim: int = 0) -> None:
        self._ndim, self._row_ndim = ndim, row_ndim
        self._inputs: list[Input] = []
        self._weak: dict[Value, type] = {}
        self._steps: list[Node] = []
        self._known: dict[Node, Value] = {}
        self._outputs: list[Output] = []

    def input(self, dtype: Any, varies: Sequence[bool] | None = None) -> Value:
        """Adds an operand.

        Args:
            dtype: its dtype. For a Python scalar its type (bool, int, float or complex), which is weak: it takes the
                dtype of the other operands. The caller checks that an integer fits.
            varies: for each loop dimension, whether it varies along it; by default along none.
        """
        if self._steps:
            raise ArgumentError("KernelBuilder.input: wanted all inputs before the first step")
        at = len(self._inputs)
        if isinstance(dtype, type) and dtype in (int, float, complex):  # NumPy's float64 dtype equals the type float.
            self._weak[at] = dtype
        self._inputs.append(Input(dtype_name(dtype), tuple(varies) if varies else (False,) * self._ndim))
        return at

    def dtype(self, value: Value) -> np.dtype[Any]:
        """Returns the dtype of a value."""
        at = value - len(self._inputs)
        return np.dtype(self._steps[at].dtype if at >= 0 else self._inputs[value].dtype)

    def call(self, name: str, *operands: Value) -> Value:
        """Applies NumPy's function ``name`` (a ufunc, ``where`` or ``clip``) to values, with NumPy's type promotion.

        Raises:
            ArgumentTypeError: NumPy has no such function, or it is not defined for the dtypes.
        """
        *taken, result = _loop_dtypes(name, tuple([self._promoting(v) for v in operands]))
        cast = tuple([self.astype(v, dtype) for v, dtype in zip(operands, taken, strict=True)])
        value = self._step(Node(name, cast, dtype_name(result)))
        if all(v in self._weak for v in operands):  # As Python computes with its scalars.
            self._weak[value] = _PYTHON[result.kind]
        return value

    def _promoting(self, value: Value) -> Any:
        """Returns what NumPy promotes: the dtype, or the type of a Python scalar; bools have a dtype in any case."""
        weak = self._weak.get(value)
        return self.dtype(value) if weak in (None, bool) else weak

    def astype(self, value: Value, dtype: Any) -> Value:
        """Casts a value; returns the value itself if it has the dtype."""
        name = dtype_name(dtype)
        return value if self.dtype(value) == name else self._step(Node("astype", (value,), name))

    def reduce(self, name: str, value: Value) -> Value:
        """Reduces a value along the rows, in its own dtype: NumPy's promotion (sums of int32) is the caller's."""
        return self._step(Node(name, (value,), "b1" if name in _TO_BOOL else dtype_name(self.dtype(value)), True))

    def output(self, value: Value, *, per_row: bool = False) -> None:
        """Makes a value a result."""
        self._outputs.append(Output(value, per_row))

    def build(self) -> Kernel:
        """Returns the kernel."""
        return Kernel(self._ndim, tuple(self._inputs), tuple(self._steps), tuple(self._outputs), self._row_ndim)

    def _step(self, node: Node) -> Value:
        if node not in self._known:
            self._known[node] = len(self._inputs) + len(self._steps)
            self._steps.append(node)
        return self._known[node]


@functools.lru_cache(1 << 10)
def _loop_dtypes(name: str, dtypes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the dtypes in which a function computes, those of the operands first, then that of the result."""
    if name in ("where", "clip"):  # No ufuncs of NumPy's public names.
        alike = dtypes[name == "where" :]
        common = np.result_type(*[dtype if isinstance(dtype, np.dtype) else dtype(0) for dtype in alike])
        return (*([np.dtype(bool)] if name == "where" else []), *[common] * (len(alike) + 1))
    function = getattr(np, name, None)
    if not isinstance(function, np.ufunc) or function.nout != 1 or function.signature or function.nin != len(dtypes):
        raise ArgumentTypeError(
            f"kernel: {name} of {counted(len(dtypes), 'operand')} is not an elementwise function of NumPy"
        )
    try:
        return tuple(function.resolve_dtypes((*dtypes, None)))
    except TypeError as error:
        raise ArgumentTypeError(f"kernel: {name} is not defined for {dtypes}") from error
