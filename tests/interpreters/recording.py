"""A recording interpreter, which traces a function, prints the trace, and replays it on any other interpreter."""

import functools
from collections import ChainMap
from typing import Any

import numpy as np

import shardtensor as st
from shardtensor.core import OPS, Interpreter, bind, innermost, interpreting
from shardtensor.interpreters.calls import CallInterpreter
from shardtensor.interpreters.infer import INFER
from shardtensor.spmd.scheduling.mapped_program import current
from shardtensor.tensor.pytree import leaves, map_leaves
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements, mark_array, without_elements


class Recorder(CallInterpreter):
    """Records the operators that are called. The storages of tensors without elements identify values."""

    def __init__(self, inner: Interpreter, names: dict[Any, str]) -> None:
        self.inner, self.names, self.steps = inner, names, []  # type: ignore[var-annotated]

    def planned(self, op: Any, operands: Any, params: Any, *_: Any) -> Any:
        read, given = map_leaves(self.read, operands), params
        if op.name == "map_shards":
            params = ({}, *params[1:])
            given = (functools.partial(trace_program, params[0], given[0]), *given[1:])
        result = self.inner.apply(op, operands, given)
        self.steps.append((op, read, params, map_leaves(self.name, result)))
        return result

    element = algorithm = planned

    def mapped(self, submesh: Any, /) -> Interpreter:
        return Recorder(self.inner.mapped(submesh), self.names)

    def name(self, x: Any) -> Any:
        if not lacks_elements(x):
            return x
        self.names.setdefault(x._storage, f"v{len(self.names)}")
        return x._storage

    def read(self, x: Any) -> Any:
        base, view_spec = x._base_and_view() if lacks_elements(x) else (x, None)
        if base is not x:
            return self.read(self.apply(OPS["view"], (base,), (view_spec,)))
        if lacks_elements(x) and x._storage not in self.names:
            raise st.ConcretizationError("a tensor was created without a call of the interpreter")
        return x._storage if lacks_elements(x) else x


def trace_program(programs: dict[int, Any], fn: Any, *args: Any) -> Any:
    recorder: Any = innermost()
    names = map_leaves(recorder.name, args)
    out = map_leaves(lambda x: x.copy() if lacks_elements(x) else x, fn(*args))
    programs[current().number] = recorder.steps, names, map_leaves(recorder.read, out)  # type: ignore[union-attr]
    return out


class Trace:
    """The operators that a function calls, with their operands; printable, and callable to replay them."""

    def __init__(self, fn: Any, *args: Any) -> None:
        recorder = Recorder(INFER, {})
        given = map_leaves(lambda x: mark_array(without_elements(x._aval)) if isinstance(x, ShardedTensor) else x, args)
        self.arguments = map_leaves(recorder.name, given)
        with interpreting(recorder):
            self.result = map_leaves(recorder.read, fn(*given))
        self.written, self.steps, self.names = map_leaves(recorder.read, given), recorder.steps, recorder.names

    def lines(self, steps: Any, indent: str = "") -> Any:
        named = functools.partial(map_leaves, lambda x: self.names[x] if self.is_name(x) else type(x).__name__)
        for op, operands, params, results in steps:
            yield f"{indent}{named(results)} = {op.name}{named(operands)}"
            yield from self.lines(params[0][0][0], indent + "    ") if op.name == "map_shards" else ()

    def __call__(self, *args: Any) -> Any:
        values = self.replay(self.steps, ChainMap({}), self.arguments, args)
        for x, before, after in zip(*map(leaves, (args, self.arguments, self.written)), strict=True):
            if after is not before:
                x[...] = values[after]
        return self.value(values, self.result)

    def replay(self, steps: Any, values: Any, names: Any, given: Any) -> Any:
        self.bind(values, names, given)
        for op, operands, params, results in steps:
            if op.name == "map_shards":
                params = (functools.partial(self.replay_program, params[0], values), *params[1:])
            self.bind(values, results, bind(op, self.value(values, operands), params))
        return values

    def replay_program(self, programs: Any, around: Any, *args: Any) -> Any:
        steps, names, result = programs[current().number]  # type: ignore[union-attr]
        return self.value(self.replay(steps, around.new_child(), names, args), result)

    def bind(self, values: Any, names: Any, given: Any) -> None:
        values.update((k, v) for k, v in zip(leaves(names), leaves(given), strict=True) if self.is_name(k))

    def value(self, values: Any, tree: Any) -> Any:
        return map_leaves(lambda x: values[x] if self.is_name(x) else x, tree)

    def is_name(self, x: Any) -> bool:
        modules = "shardtensor.tensor.storage", "shardtensor.tensor.partial_sum_storage"
        return type(x).__module__ in modules or type(x).__name__ == "ScalarElement"


def jacobi(steps: int, u: Any) -> None:
    """Runs steps of Jacobi's method in place, written as in a NumPy program."""
    for _ in range(steps):
        u[1:-1, 1:-1] = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])


def write_views(x: Any) -> Any:
    """Writes to an argument and to views of it; two views are returned."""
    columns = x.T
    columns[1] = 5
    columns.reshape(-1, copy=True)[0] = 7
    np.add(columns[2], 1, out=columns[3])
    x.real += 1
    x[[0, 2], 1:3] *= 2
    x[-1, 0] += x[0, 1]
    return columns, x[::2].copy()
