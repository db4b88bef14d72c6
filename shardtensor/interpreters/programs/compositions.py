"""Compositions of operators as programs: what eager mode calls one by one is recorded once, and then run again.

The calls of a composition take several times as long as its plans on small arrays: shapes and dtypes are checked,
masks are built, and every operator is dispatched. Which plans run follows only from the avals of the operands, if
no element is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardtensor.core import Function
from shardtensor.errors import ConcretizationError
from shardtensor.interpreters.programs.passes import Setting, rewritten
from shardtensor.interpreters.programs.program import Program, Var
from shardtensor.interpreters.programs.trace import Tracer, tracing
from shardtensor.interpreters.programs.traced_values import Trace, Traced
from shardtensor.interpreters.programs.whole_buffers import BufferProgram
from shardtensor.tensor.pytree import map_items
from shardtensor.tensor.tensor import ShardedTensor, without_elements


def program_of(
    function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], arrays: Sequence[Any]
) -> tuple[Program, Any] | None:
    """Returns a composition as a program, and its result: the value that it returns, or nested tuples and lists of
    values. Returns None if it reads elements, writes, or returns an operand or a view of one.

    Args:
        function: the composition.
        args, kwargs: its arguments.
        arrays: the tensors and host arrays in them, which may be nested in lists: those of ``kwargs`` first. They are
            the inputs of the program.

    Raises:
        ShardTensorError: the composition raises it.
    """
    name = str(getattr(function, "__name__", "composition"))
    with np.errstate(all="warn"):
        tracer = Tracer(Trace(name, name, [f"array {k}" for k in range(len(arrays))]))
        inputs = [tracer.traced_input(_stand_in(x), 1 << k) for k, x in enumerate(arrays)]
        remaining = iter(inputs)

        def replaced(x: Any) -> Any:
            return next(remaining) if type(x) is ShardedTensor or type(x) is np.ndarray else x

        named = {name: map_items(replaced, x) for name, x in kwargs.items()}
        positional = map_items(replaced, tuple(args))
        try:
            with tracing(tracer):
                result = map_items(lambda x: _value(tracer, inputs, x), function(*positional, **named))
        except (ConcretizationError, _NotRecordedError):
            return None
    outputs: list[Var] = []
    map_items(outputs.append, result)
    program = Program([x._storage.value for x in inputs], (), tracer.equations, outputs)
    return (program, result) if not tracer.trace.captured and _is_pure(program) else None


def on_buffers(
    function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[ShardedTensor]
) -> BufferProgram | None:
    """Returns the program of a composition, after all passes, as one that runs on whole buffers of the host. Its
    messages are those of its operators, which a log has as well. See `program_of`.
    """
    pair = program_of(function, args, kwargs, tensors)
    if pair is None:
        return None
    program = rewritten(pair[0], Setting(moves=False))
    return BufferProgram(program, pair[1]) if BufferProgram.takes(program) else None


class _NotRecordedError(Exception):
    """The result of a composition does not follow from the avals, or shares memory with an operand."""


def _stand_in(x: Any) -> Any:
    return without_elements(x._aval) if type(x) is ShardedTensor else x


def _value(tracer: Tracer, inputs: Sequence[ShardedTensor], x: Any) -> Var:
    """Returns the value of the program that a leaf of the result is.

    Raises:
        _NotRecordedError: the leaf is not a tensor, or is an operand or a view of one, so that writes are visible in
            it.
    """
    base = getattr(getattr(x, "_storage", None), "base", x)
    if type(base) is not ShardedTensor or type(base._storage) is not Traced or any(base is y for y in inputs):
        raise _NotRecordedError
    return tracer._read(x).value


def _is_pure(program: Program) -> bool:
    """Whether a program neither writes nor calls other programs, and returns each of its values once, also in views."""
    views = {e.results: e.operands[0] for e in program.equations if e.op.name == "view"}
    returned = {v: views.get(v, v) for v in program.outputs}
    pure = not any(e.writes or "spmd" in e.op.tags for e in program.equations)
    return pure and len(set(returned.values())) == len(returned)
