"""`explain`: what every operator of a function transfers, runs and combines, without running it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shardtensor.communication.transfer_log import TransferLog, recorded_by
from shardtensor.core import Interpreter, Op, Operands, Params, interpreting
from shardtensor.errors import ArgumentTypeError
from shardtensor.interpreters.execution.plan_cache import planned
from shardtensor.interpreters.infer import INFER, arguments, derived, struct
from shardtensor.interpreters.mutation.views import ScalarElement
from shardtensor.sharding.mesh import Mesh
from shardtensor.tensor.pytree import leaves, map_leaves
from shardtensor.tensor.tensor import ShardedTensor


class ExplainedCall:
    """One call of an operator.

    Attributes:
        operator: the name of the operator.
        operands: the layouts of its operands, as text.
        results: the layouts of its results, as text; for a write, of the tensor that is written.
        runs: how it runs, and on which devices; empty inside of a map.
        messages: descriptions of what is transferred and combined; empty inside of a map.
        transfers: the log of the transfers, with their devices; for a map, of those of all programs.
        inside: for a map, the calls of its first program.
    """

    def __init__(
        self,
        op: Op,
        operands: Operands,
        results: Any,
        runs: str = "",
        messages: Sequence[str] = (),
        transfers: TransferLog | None = None,
    ) -> None:
        self.operator = op.name
        self.operands = [_layout(x) for x in leaves(operands) if isinstance(x, (ShardedTensor, np.ndarray))]
        self.results = [_layout(x) for x in leaves(results) if isinstance(x, ShardedTensor)]
        self.runs = runs
        self.messages = messages
        self.transfers = transfers or TransferLog()
        self.inside: list[ExplainedCall] = []

    def lines(self) -> Iterator[str]:
        """Yields the lines of the printed form."""
        yield f"{self.operator}({_some(self.operands)}) -> {_some(self.results) or None}"
        yield from (f"    {line}" for line in (self.runs, *self.messages) if line)
        for call in self.inside:
            yield from (f"        {line}" for line in call.lines())

    def __str__(self) -> str:
        return "\n".join(self.lines())


class Explanation:
    """The calls of operators that a function makes, as `explain` lists them. It prints one after the other.

    Attributes:
        calls: an `ExplainedCall` for each call of an operator, in order. Views and operators that are composed of
            others are not listed: they transfer nothing themselves.
        result: the result of the function, with a `ShapeDtypeStruct` in place of each tensor.
        bytes: the bytes of all transfers.
    """

    def __init__(self, calls: Sequence[ExplainedCall], result: Any) -> None:
        self.calls = calls
        self.result = result
        self.bytes = sum(call.transfers.bytes for call in calls)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.calls), f"{self.bytes} bytes are transferred"])

    def __repr__(self) -> str:
        return f"Explanation({len(self.calls)} calls, {self.bytes} bytes)"


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Lists for each operator that ``fn(*args, **kwargs)`` calls what is transferred, where it runs, and what is
    combined, with bytes. No elements are computed or transferred.

    The bytes are those that machines with separate memories would send, as `st.transfers` counts them. Inside of a
    map, the operators of its first program are listed; the transfers of all programs are listed with the map.

    Args:
        fn: the function. It is called once, on tensors without elements, as by `eval_shape`.
        *args: its arguments: pytrees of tensors, host arrays, `ShapeDtypeStruct` and other objects.
        **kwargs: likewise.

    Raises:
        ConcretizationError: the function needs elements (see `eval_shape`), or an index is a tensor, whose elements
            determine what is transferred.
        ShardTensorError: an operator does not accept its operands.

    >>> mesh = st.make_mesh((2,), ("d",))
    >>> x = st.ShapeDtypeStruct((8, 4), "float32", st.NamedSharding(mesh, st.P(None, "d")))
    >>> w = st.ShapeDtypeStruct((4, 2), "float32", st.NamedSharding(mesh, st.P()))
    >>> print(st.explain(lambda x, w: st.tanh(x @ w), x, w))
    matmul(float32[8, 4] P(None, 'd'), float32[4, 2] P()) -> float32[8, 2] P()
        runs on each of 2 devices
        combines partial results along d: 128 bytes
    tanh(float32[8, 2] P()) -> float32[8, 2] P()
        runs once on the buffer that 2 devices share
    128 bytes are transferred
    """
    if not callable(fn):
        raise ArgumentTypeError(f"explain: fn is a {type(fn).__name__}; wanted a function")
    explainer = _Explainer(INFER)
    given = arguments((args, kwargs))
    with interpreting(explainer), recorded_by():
        result = fn(*given[0], **given[1])
    return Explanation(explainer.calls, map_leaves(struct, result))


class _Explainer(Interpreter):
    """Infers results by another interpreter, and lists the calls."""

    def __init__(self, inner: Interpreter) -> None:
        self.inner = inner
        self.calls: list[ExplainedCall] = []
        self._program: _ProgramExplainer | None = None

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Returns the result of ``op`` without elements, and adds the call to the list."""
        result = derived(op, operands, params)
        if result is not NotImplemented:
            return result
        with recorded_by(log := TransferLog()):
            result = self.inner.apply(op, operands, params)
        element = type(getattr(result, "_storage", None)) is ScalarElement
        scalar = op.view_spec and getattr(operands[0], "_is_scalar", False)
        if op.algorithm or element or scalar:
            runs = (
                "transfers elements"
                if op.algorithm and not op.spmd
                else "runs where the element is"
                if element
                else "runs on each device"
            )
            call = ExplainedCall(op, operands, result, runs, list(_transfers(log)), log)
        else:
            plan = planned(op, operands, params)[0]
            messages = [*_transfers(log, beside=op.name), *plan.messages()]
            call = ExplainedCall(op, operands, result, plan.runs, messages, log)
        if self._program is not None:
            call.inside, self._program = self._program.calls, None
        self.calls.append(call)
        return result

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Checks a write, and adds it to the list."""
        with recorded_by(log := TransferLog()):
            self.inner.write(out, op, operands, params)
        self.calls.append(ExplainedCall(op, operands, out, "writes in place", list(_transfers(log)), log))

    def mapped(self, submesh: Mesh, /) -> Interpreter:
        """Returns the interpreter of one program of a map; only the calls of the first one are listed."""
        inner = self.inner.mapped(submesh)
        if self._program is not None:
            return inner
        self._program = _ProgramExplainer(inner)
        return self._program


class _ProgramExplainer(Interpreter):
    """The interpreter of a program of a map. Its transfers are listed with the map."""

    def __init__(self, inner: Interpreter) -> None:
        self.inner = inner
        self.calls: list[ExplainedCall] = []

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Returns the result of ``op`` without elements, and adds the call to the list."""
        result = derived(op, operands, params)
        if result is NotImplemented:
            result = self.inner.apply(op, operands, params)
            self.calls.append(ExplainedCall(op, operands, result))
        return result

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Checks a write, and adds it to the list."""
        self.inner.write(out, op, operands, params)
        self.calls.append(ExplainedCall(op, operands, out))

    def mapped(self, submesh: Mesh, /) -> Interpreter:
        """Returns the interpreter of a program of an inner map, whose calls are not listed."""
        return self.inner.mapped(submesh)


def _transfers(log: TransferLog, beside: str = "") -> Iterator[str]:
    """Yields a line for each operator, and axis of a collective, in a log, except for the operator ``beside``."""
    for operator, axis, count, nbytes, sources, destinations in log.by_operator():
        if operator != beside:
            name = f"{operator} along {axis}" if axis else operator
            yield f"{name}: {nbytes} bytes from {sources} to {destinations} (transfers: {count})"


def _layout(x: Any) -> str:
    where = x.sharding.spec if isinstance(x, ShardedTensor) else "on the host"
    return f"{x.dtype}{list(x.shape)} {where}"


def _some(layouts: Sequence[str]) -> str:
    """Joins layouts: equal ones that follow one another are counted."""
    counted = [(layout, len(list(group))) for layout, group in itertools.groupby(layouts)]
    return ", ".join([layout if n == 1 else f"{n} x {layout}" for layout, n in counted])
