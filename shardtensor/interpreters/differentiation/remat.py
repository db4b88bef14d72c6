"""`remat`: functions that are called again in the backward pass, in place of saving what their derivatives need.

The first call runs on a tape that saves nothing (`_Trial`), so that it makes the same calls of operators as the second
one, which records them. A policy chooses results that the first call saves, by their number (`_Saving`), and the second
call gets them in place of computing them (`_Replaying`).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from shardtensor.checkpoint_policies import Offloadable
from shardtensor.core import Op, Operands, Params, bind_by, bind_into, call, innermost, interpreting
from shardtensor.errors import ArgumentError, ArgumentTypeError, type_text
from shardtensor.functions.derivatives.cotangents import Call
from shardtensor.functions.derivatives.forms import Cotangents, Derivative
from shardtensor.functions.random.random_keys import SymbolicKey
from shardtensor.interpreters.differentiation.inner import Inner, handle_on, number_in, numbers_around, storage_of
from shardtensor.interpreters.differentiation.tape import WRITES_OUTSIDE, Tape
from shardtensor.interpreters.differentiation.taped_values import kind_of, number_of
from shardtensor.interpreters.nested import Nested, innermost_of
from shardtensor.tensor.pytree import leaves, map_leaves, replaced
from shardtensor.tensor.tensor import ShardedTensor

_DIFFERS = (
    "remat: the second call of the function differs from the first one: {}; the function must not depend on what "
    "changes meanwhile, such as global variables"
)
_KEY = (
    "remat: the function takes a key of the carry, or one that a trip has made, in a program, and keys are not kept "
    "for the backward pass; draw the numbers outside of st.remat, or make the key in it, of the number of the trip: "
    "st.random.fold_in(key, i)"
)


class _Trial(Inner):
    """The tape of the first call, which saves nothing.

    Attributes:
        others: what it closes over of values that have no gradient, and that are other ones in each trip of a loop
            around it, by their storages.
    """

    writes_outside = WRITES_OUTSIDE

    def __init__(self, around: Tape) -> None:
        super().__init__(around)
        self.others: dict[Any, ShardedTensor] = {}
        self._known = numbers_around(around) if isinstance(around, Inner) else {}

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Executes one call."""
        if self._known and not op.signature.variadic:
            for name, x in zip(op.operands, operands, strict=False):
                if name in ("bits", "key"):
                    self.check_key(x)
        return super().apply(op, operands, params)

    def check_key(self, bits: Any) -> None:
        """Checks a key, given its bits.

        Raises:
            ArgumentTypeError: the second call would not find it.
        """
        if self._is_closed_over(bits) and storage_of(bits).tracer.is_inside:
            raise ArgumentTypeError(_KEY)

    def current(self, tree: Any) -> Any:
        """See `Inner.current`. Notes the operands."""
        tree = super().current(tree)
        if self._known:
            for x in leaves(tree):
                if self._is_closed_over(x):
                    self.others[storage_of(x)] = x._base_and_view()[0]
        return tree

    def _is_closed_over(self, x: Any) -> bool:
        """Whether an operand is a value of the interpreters around the function that exists before its call."""
        if type(x) is not ShardedTensor:
            return False
        maker, number = number_in(storage_of(x))
        return maker in self._known and number < self._known[maker]

    def add_call(self, *_: Any) -> None:
        """Records nothing."""


class _Second(Inner):
    """The tape of the second call."""

    writes_outside = WRITES_OUTSIDE
    closed_over = Tape.closed_over
    _kept = Tape._kept


class _Calls(Nested):
    """Numbers the calls that it passes to the interpreter around it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Executes one call. Views, copies, loops and branches have no number."""
        if op.name == "copy" or op.parts.view_spec or op.signature.functions:
            return bind_by(self.outer, op, operands, params)
        self.count += 1
        return self.numbered(op, operands, params)

    def numbered(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Returns the result of the call with the number ``count``."""
        return bind_by(self.outer, op, operands, params)

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Executes a write to a tensor that the function has made."""
        with self.outside():
            bind_into(out, op, operands, params)

    def run(self, program: Any, inputs: Any, /) -> Any:
        """Runs a program as one call, which has no number."""
        with self.outside():
            return innermost_of(self.outer).run(program, inputs)


class _Saving(_Calls):
    """Saves the results that a policy chooses.

    Attributes:
        saved: by the numbers of calls: the operator, the forms of the operands, and the result.
    """

    def __init__(self, policy: Callable[..., Any]) -> None:
        super().__init__()
        self._policy = policy
        self._made: dict[int, tuple[weakref.ref[ShardedTensor], int, Op, list[Any]]] = {}
        self.saved: dict[int, tuple[Op, Any, Any]] = {}

    def numbered(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Executes one call, and saves the result if the policy says so. A value that has got a name is saved as the
        result of the call that has made it, which need not be executed again then.
        """
        number, forms = self.count, _forms(operands)
        result = bind_by(self.outer, op, operands, params)
        if not any(type(y) is ShardedTensor for y in leaves(result)):
            return result
        kinds = list(map(kind_of, leaves(operands)))
        chosen = self._policy(op, *kinds, **dict(zip(op.params, params, strict=True)))
        if chosen:
            if op.name == "name" and (entry := self._made.get(id(operands[0]))) and entry[0]() is operands[0]:
                _, number, op, forms = entry
            kind = chosen.dst if isinstance(chosen, Offloadable) else None
            with self.outside():
                self.saved[number] = op, forms, map_leaves(lambda y: _moved(y, kind), result)
        elif type(result) is ShardedTensor:
            self._made[id(result)] = weakref.ref(result), number, op, forms
        return result

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Executes a write, after which a value is no longer the result of the call that has made it."""
        self._made.pop(id(out._base_and_view()[0]), None)
        super().write(out, op, operands, params)


class _Replaying(_Calls):
    """Returns saved results in place of computing them.

    Raises:
        ArgumentError: the calls differ from those of which results were saved.
    """

    def __init__(self, count: int, saved: dict[int, tuple[Op, Any, Any]]) -> None:
        super().__init__()
        self._count = count
        self._saved = saved

    def numbered(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Executes one call, or returns its saved result."""
        entry = self._saved.get(self.count)
        if entry is None:
            return bind_by(self.outer, op, operands, params)
        before, forms, result = entry
        if op is not before or _forms(operands) != forms:
            raise ArgumentError(
                _DIFFERS.format(
                    f"call {self.count} is {_text(op, _forms(operands))}, and it was {_text(before, forms)}"
                )
            )
        with self.outside():
            return map_leaves(lambda y: _moved(y, "device"), result)

    def check_count(self) -> None:
        """Raises ArgumentError if the second call of the function has made more or fewer calls than the first one."""
        if self.count != self._count:
            raise ArgumentError(_DIFFERS.format(f"it calls {self.count} operators in place of {self._count}"))


def _moved(x: Any, kind: str | None) -> Any:
    """Returns a tensor of its own with the elements of another one, in the memory of a kind."""
    if type(x) is not ShardedTensor:
        return x
    if kind is None or x.sharding.memory_kind == kind:
        return call("copy", x)
    return call("transfer_to", x, x.sharding.with_memory_kind(kind), "remat", committed=x.committed)


def _forms(operands: Any) -> list[Any]:
    """Returns the shapes, dtypes and layouts of operands."""
    return [
        x._aval if type(x) is ShardedTensor else (x.shape, x.dtype) if isinstance(x, np.ndarray) else type(x)
        for x in leaves(operands)
    ]


def _text(op: Op, forms: Sequence[Any]) -> str:
    """Describes a call."""
    shapes = [f"{x.dtype}{list(x.shape)}" if hasattr(x, "sharding") else str(x) for x in forms]
    return f"{op.name}({', '.join(shapes)})"


def remat(
    fun: Callable[..., Any],
    *,
    prevent_cse: bool = True,
    policy: Callable[..., Any] | None = None,
    static_argnums: int | tuple[int, ...] = (),
    static_argnames: str | Iterable[str] = (),
) -> Callable[..., Any]:
    """Returns a function with the same results that saves its arguments only: the gradient calls it again.

    The second call must do what the first one did: the function must not depend on what changes meanwhile, nor write
    tensors that it closes over. The gradients of tensors that it closes over are computed, too.

    Args:
        fun: the function; its arguments and results are pytrees.
        prevent_cse: has no effect. The second call is never merged with the first one, also under `st.jit`.
        policy: which results of operators the first call saves besides, so that the second one need not compute them:
            a function of `st.checkpoint_policies`, or one that is called as they are; by default none.
        static_argnums, static_argnames: positional arguments, and some that are given by name, that are passed on as
            they are, and have no gradient.

    >>> f = st.remat(lambda x: st.sin(st.sin(x)))
    >>> st.grad(lambda x: f(x).sum())(st.zeros(2)).tolist()
    [1.0, 1.0]
    >>> f = st.remat(lambda x, w: st.tanh(x @ w), policy=st.checkpoint_policies.dots_saveable)
    >>> st.grad(lambda w: f(st.ones((2, 3)), w).sum())(st.zeros((3, 1))).tolist()
    [[2.0], [2.0], [2.0]]
    """
    if not callable(fun):
        raise ArgumentTypeError(f"remat: fun is {type_text(fun)}; wanted a function")
    if policy is not None and not callable(policy):
        raise ArgumentTypeError(
            f"remat: policy is {type_text(policy)}; wanted a function, such as st.checkpoint_policies.dots_saveable"
        )
    numbers = static_argnums if isinstance(static_argnums, (tuple, list)) else (static_argnums,)
    if any(not isinstance(n, (int, np.integer)) or isinstance(n, bool) for n in numbers):
        raise ArgumentTypeError(
            f"remat: static_argnums is {static_argnums!r}; wanted an integer, or several in a tuple"
        )
    names = {static_argnames} if isinstance(static_argnames, str) else set(static_argnames)

    @functools.wraps(fun)
    def computed(*args: Any, **kwargs: Any) -> Any:
        tape = innermost()
        if not isinstance(tape, Tape) or not tape.records:
            return fun(*args, **kwargs)
        if not all(-len(args) <= n < len(args) for n in numbers):
            raise ArgumentError(
                f"remat: static_argnums is {static_argnums!r}, and the function is called with {len(args)} positional "
                "arguments"
            )
        static = {int(n) % len(args): args[n] for n in numbers}
        others = {name: kwargs[name] for name in kwargs.keys() & names}

        def with_static(*args: Any, **kwargs: Any) -> Any:
            return fun(*[static.get(k, x) for k, x in enumerate(args)], **kwargs, **others)

        args = tuple([None if k in static else x for k, x in enumerate(args)])
        kwargs = {name: x for name, x in kwargs.items() if name not in names}
        return _recorded(tape, with_static if static or others else fun, args, kwargs, policy)

    return computed


def _recorded(tape: Tape, fun: Callable[..., Any], args: Any, kwargs: Any, policy: Callable[..., Any] | None) -> Any:
    """Calls a function outside of a tape, and records the call as one step."""
    tree = args, kwargs
    states = [tape.active(x) for x in leaves(tree)]
    with tape.outside():
        kept = [handle_on(tape.constant(x)) for x in leaves(tree)]
        saving = _Saving(policy) if policy is not None else None
        with interpreting(saving) if saving is not None else contextlib.nullcontext():
            trial = _Trial(tape)
        for x in leaves(tree):
            if type(x) is SymbolicKey:
                trial.check_key(x.bits)
        try:
            result = _called(trial, fun, tree, kept, [s is not None for s in states])[1]
            outputs = map_leaves(trial.result, trial.current(result))
            del result
        finally:
            trial.end()
        saved = {
            "kept": kept,
            "closed": [state.primal for state in trial.closed],
            "others": list(map(handle_on, trial.others.values())),
            "results": [] if saving is None else [y for _, _, y in saving.saved.values()],
        }
    if not trial.closed and not any(states):
        return outputs
    again = _Again(fun, tree, [s is not None for s in states], trial, saving)
    return replaced(outputs, tape.add_function(again, [*states, *trial.closed], leaves(outputs), saved))


def _called(
    tape: Tape, fun: Callable[..., Any], tree: Any, kept: Sequence[Any], active: Sequence[bool]
) -> tuple[list[Any], Any]:
    """Calls the function on a tape. Returns the tensors of the tape that stand for the arguments that have gradients,
    and the result.
    """
    copies = [tape.variable(_own(x)) if a else _own(x) for x, a in zip(kept, active, strict=True)]
    boxes = [x for x, a in zip(copies, active, strict=True) if a]
    args, kwargs = replaced(tree, copies)
    with interpreting(tape):
        return boxes, fun(*args, **kwargs)


class _Again(Derivative):
    """The derivative of a function that is called again."""

    def __init__(
        self,
        fun: Callable[..., Any],
        tree: Any,
        active: Sequence[bool],
        trial: _Trial,
        saving: _Saving | None,
    ) -> None:
        self._fun = fun
        self._tree = map_leaves(lambda _: None, tree)
        self._active = active
        self._around = trial.around
        self._closed = [state.number for state in trial.closed]
        self._others = list(trial.others)
        self._count = None if saving is None else saving.count
        self._chosen = {} if saving is None else {n: (op, forms) for n, (op, forms, _) in saving.saved.items()}

    def transposed(self, g: Any, call: Call) -> Cotangents:
        """Calls the function again, and returns the cotangents of its arguments and of what it closes over."""
        sub, numbers, inputs = self._recorded(call)
        start: dict[int, list[Any]] = {}
        cotangents = g if isinstance(g, list) else [g]
        del g  # The backward pass frees cotangents as soon as they have been used.
        while cotangents:
            one, n = cotangents.pop(), numbers.pop()
            if n is not None and one is not None:
                start.setdefault(n, []).append(one)
        del one
        gradients = iter(sub.pull(start, inputs, keep=False))
        return [next(gradients) if a else None for a in self._active] + list(gradients)

    def _recorded(self, call: Call) -> tuple[Tape, list[int | None], list[tuple[int, Any]]]:
        """Calls the function again. Returns the tape, the numbers of the results, and the inputs."""
        saved, replaying = call.saved, None
        if self._count is not None:
            pairs = zip(self._chosen.items(), saved["results"], strict=True)
            replaying = _Replaying(self._count, {n: (*chosen, y) for (n, chosen), y in pairs})
        with interpreting(replaying) if replaying is not None else contextlib.nullcontext():
            sub = _Second(self._around())
        sub.now = dict(zip(self._others, saved["others"], strict=True))
        outside = [sub.variable(_own(x)) for x in saved["closed"]]
        sub.known_as = {n: box._storage for n, box in zip(self._closed, outside, strict=True)}
        try:
            boxes, result = _called(sub, self._fun, self._tree, saved["kept"], self._active)
            again = leaves(result)
            if [_shape(y) for y in again] != [_shape(y) for y in call.results]:
                raise ArgumentError(_DIFFERS.format("it returns other arrays"))
            numbers = [number_of(state) for state in map(sub.active, again)]
        finally:
            sub.end()
        if replaying is not None:
            replaying.check_count()
        return sub, numbers, [(b._storage.number, b._aval) for b in (*boxes, *outside)]


def _shape(x: Any) -> Any:
    return getattr(x, "shape", ())


def _own(x: Any) -> Any:
    """Returns a leaf for one call of the function, which may write it."""
    return call("copy", x) if type(x) is ShardedTensor else x
