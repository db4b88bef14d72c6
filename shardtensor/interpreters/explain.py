"""`explain`: what every operator of a function transfers, runs and combines, without running it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shardtensor.communication.transfer_log import TransferLog, recorded_by, transfer_lines
from shardtensor.core import ABOVE, Function, Interpreter, Op, Operands, Params, interpreting
from shardtensor.errors import ArgumentTypeError, type_text
from shardtensor.host.units import counted
from shardtensor.interpreters.calls import CallInterpreter, InferredView
from shardtensor.interpreters.execution.plan_cache import planned
from shardtensor.interpreters.infer import INFER, arguments, struct
from shardtensor.interpreters.views.scalar_elements import ScalarElement
from shardtensor.sharding.mesh import Mesh
from shardtensor.tensor.pytree import leaves, map_leaves
from shardtensor.tensor.tensor import ShardedTensor


@dataclasses.dataclass(eq=False)
class ExplainedCall:
    """One call of an operator.

    Attributes:
        operator: the name of the operator.
        operands: the layouts of its operands, as text.
        results: the layouts of its results, as text; for a write, of the tensor that is written.
        runs: how it runs, and on which devices; empty inside of a map.
        messages: descriptions of what is transferred and combined; empty inside of a map.
        transfers: the log of the transfers, with their devices; for a map, of those of all programs.
        inside: for a map, the calls of its first program; for a loop or a branch, those of one call of each function.
    """

    operator: str
    operands: Sequence[str]
    results: Sequence[str]
    runs: str = ""
    messages: Sequence[str] = ()
    transfers: TransferLog = dataclasses.field(default_factory=TransferLog)
    inside: Sequence[ExplainedCall] = ()

    def lines(self) -> Iterator[str]:
        """Yields the lines of the printed form."""
        yield f"{self.operator}({_some(self.operands)}) -> {_some(self.results) or None}"
        yield from (f"    {line}" for line in (self.runs, *self.messages) if line)
        for call in self.inside:
            yield from (f"        {line}" for line in call.lines())

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return ABOVE["text_html"](str(self))  # type: ignore[no-any-return]


class Explanation:
    """The calls of operators that a function makes, as `explain` lists them. It prints one after the other, and so does
    a notebook.

    Attributes:
        calls: an `ExplainedCall` for each call of an operator, in order. Views and operators that are composed of
            others are not listed: they transfer nothing themselves.
        result: the result of the function, with a `ShapeDtypeStruct` in place of each tensor.
        bytes: the bytes of all transfers.

    >>> st.explain(lambda x: x.sum(), st.ones(8, device=st.make_mesh((2,), ("d",)))).calls[0].runs
    'runs on each of 2 devices'
    """

    def __init__(self, calls: Sequence[ExplainedCall], result: Any) -> None:
        self.calls = calls
        self.result = result
        self.bytes = sum(call.transfers.bytes for call in calls)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.calls), f"{counted(self.bytes, 'byte is', 'bytes are')} transferred"])

    def __repr__(self) -> str:
        return f"Explanation({counted(len(self.calls), 'call')}, {counted(self.bytes, 'byte')})"

    def _repr_html_(self) -> str:
        return ABOVE["text_html"](str(self))  # type: ignore[no-any-return]


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Lists the operators that ``fn(*args, **kwargs)`` calls: where each one runs, and how many bytes it transfers and
    combines. No elements are computed or transferred.

    The bytes are those that machines with separate memories would send, as `st.transfers` counts them. Inside of a
    map, the operators of its first program are listed; the transfers of all programs are listed with the map. A loop or
    a branch is listed likewise, with one call of each of its functions and the transfers of all trips.

    Args:
        fn: the function. It is called once, on tensors without elements, as by `eval_shape`.
        *args: its arguments: pytrees of tensors, host arrays, `ShapeDtypeStruct` and other objects.
        **kwargs: likewise.

    Raises:
        ConcretizationError: the function needs elements (see `eval_shape`), or an index is a tensor without elements,
            which would determine what is transferred.
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
        raise ArgumentTypeError(f"explain: fn is {type_text(fn)}; wanted a function")
    explainer = _Explainer(INFER)
    inputs = arguments((args, kwargs))
    with interpreting(explainer), recorded_by():
        result = fn(*inputs[0], **inputs[1])
    return Explanation(explainer.calls, map_leaves(struct, result))


class _Explainer(CallInterpreter):
    """Infers results by another interpreter, and lists the calls.

    Args:
        inner: the other interpreter.
        in_map: whether the calls are those of a program of a map, whose transfers are listed with the map.
    """

    def __init__(self, inner: Interpreter, *, in_map: bool = False) -> None:
        self.inner = inner
        self.in_map = in_map
        self.calls: list[ExplainedCall] = []
        self._program: _Explainer | None = None

    def element(self, op: Op, operands: Operands, params: Params, view: InferredView, /) -> Any:
        """Lists the copy of an element, or of a scalar."""
        return self._inferred(op, operands, params, "runs on each device")

    def algorithm(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Lists a distributed algorithm, a map with the calls of its first program, or a loop or a branch with those of
        its functions.
        """
        runs = "runs on each device" if "spmd" in op.tags else "transfers elements"
        return self._inferred(op, operands, params, "calls functions" if op.signature.functions else runs)

    def planned(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Lists a plan."""
        result, call = self._inferred(op, operands, params, ""), self.calls[-1]
        if not (self.in_map or call.runs):
            plan = planned(op, operands, params)[0]
            call.runs, call.messages = plan.runs, [*transfer_lines(call.transfers, beside=op.name), *plan.messages()]
        return result

    def _inferred(self, op: Op, operands: Operands, params: Params, runs: str) -> Any:
        """Returns the result of ``op`` without elements, and adds the call to the list."""
        with self._listed(op, operands) as call:
            if op.signature.functions:
                params = self._with_listed_functions(op, params, call)
            result = self.inner.apply(op, operands, params)
        call.results = _layouts(result)
        if not self.in_map:
            is_element = type(getattr(result, "_storage", None)) is ScalarElement
            call.runs = "runs where the element is" if is_element else runs
            if self._program is not None:
                call.inside, self._program = self._program.calls, None
        return result

    def _with_listed_functions(self, op: Op, params: Params, call: ExplainedCall) -> Params:
        """Returns the parameters with functions whose calls are listed inside of the loop or of the branch, the last
        time that they are called.
        """
        named = dict(zip(op.params, params, strict=True))
        call.operator = named["caller"]
        calls: dict[int, list[ExplainedCall]] = {}

        def listed(fn: Function) -> Function:
            number = len(calls)
            calls[number] = []

            def function(*args: Any) -> Any:
                explainer = _Explainer(self.inner, in_map=True)
                with interpreting(explainer):
                    result = fn(*args)
                calls[number] = explainer.calls
                call.inside = [c for one in calls.values() for c in one]
                return result

            return function

        for name in op.signature.functions:
            functions = named[name]
            named[name] = tuple(map(listed, functions)) if isinstance(functions, tuple) else listed(functions)
        return tuple(named.values())

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Checks a write, and adds it to the list."""
        with self._listed(op, operands) as call:
            self.inner.write(out, op, operands, params)
        call.results, call.runs = _layouts(out), "" if self.in_map else "writes in place"

    def mapped(self, submesh: Mesh, /) -> Interpreter:
        """Returns the interpreter of one program of a map. The calls of the first program of an outermost map are
        listed.
        """
        inner = self.inner.mapped(submesh)
        if self.in_map or self._program is not None:
            return inner
        self._program = _Explainer(inner, in_map=True)
        return self._program

    @contextlib.contextmanager
    def _listed(self, op: Op, operands: Operands) -> Iterator[ExplainedCall]:
        """Yields the description of a call, and adds it to the list with the transfers of the ``with`` block."""
        call = ExplainedCall(op.name, _layouts(operands), ())
        with contextlib.nullcontext() if self.in_map else recorded_by(call.transfers):
            yield call
        call.messages = list(transfer_lines(call.transfers))
        self.calls.append(call)


def _layouts(tree: Any) -> list[str]:
    """Returns the layouts of the arrays in a pytree, as text."""
    arrays = [x for x in leaves(tree) if isinstance(x, (ShardedTensor, np.ndarray))]
    where = [x.sharding.spec if isinstance(x, ShardedTensor) else "on the host" for x in arrays]
    return [f"{x.dtype}{list(x.shape)} {place}" for x, place in zip(arrays, where, strict=True)]


def _some(layouts: Sequence[str]) -> str:
    """Joins layouts: equal ones that follow one another are counted."""
    counted = [(layout, len(list(group))) for layout, group in itertools.groupby(layouts)]
    return ", ".join([layout if n == 1 else f"{n} x {layout}" for layout, n in counted])
