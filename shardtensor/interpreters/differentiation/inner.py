"""Tapes of functions that a differentiated function passes to a loop, to a branch or to `remat`.

Such a function runs on a tape of its own, while the interpreter around the tape of the caller executes, traces or
infers it. The values of that tape which it closes over become variables. What its derivatives have saved is given to
its transpose later, as slices of stacked arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardtensor.backend.device import HOST
from shardtensor.backend.registry import backend_of
from shardtensor.communication.transfer_log import recorded_by
from shardtensor.core import Function, Interpreter, Op, Operands, Params, bind_by, call, interpreting
from shardtensor.errors import ArgumentError, ConcretizationError
from shardtensor.functions.building.python_numbers import PYTHON
from shardtensor.functions.derivatives.cotangents import is_inexact
from shardtensor.interpreters.control_flow.operators import lack_elements
from shardtensor.interpreters.differentiation.backward import pulled_back
from shardtensor.interpreters.differentiation.recorder import aval_of_scalar
from shardtensor.interpreters.differentiation.tape import Tape
from shardtensor.interpreters.differentiation.taped_values import LEFT, Taped, kind_of, number_of
from shardtensor.interpreters.infer import INFER
from shardtensor.interpreters.nested import Nested, innermost_of
from shardtensor.interpreters.programs.trace import Tracer
from shardtensor.interpreters.programs.traced_values import Traced
from shardtensor.interpreters.views.views import View
from shardtensor.tensor.pytree import leaves, map_leaves, replaced
from shardtensor.tensor.storage import NoElements
from shardtensor.tensor.tensor import SCALARS, ShardedTensor, lacks_elements, mark_array, tensor, without_elements


def with_functions(op: Op, params: Params, around: Callable[[Function], Function]) -> Params:
    """Returns the parameters of an operator with other functions in place of those that it calls."""
    new_params = list(params)
    for name in op.signature.functions:
        at = op.params.index(name)
        new_params[at] = (
            tuple(map(around, new_params[at])) if isinstance(new_params[at], tuple) else around(new_params[at])
        )
    return tuple(new_params)


def root_of(interpreter: Interpreter | None) -> Interpreter | None:
    """Returns the interpreter around all tapes, and around those that pass calls on like these; None for the outermost
    one.
    """
    root = interpreter
    while isinstance(root, Nested):
        root = None if root.outer is None else innermost_of(root.outer)
    return root


def knows_no_elements(tape: Tape, operands: Any) -> bool:
    """Whether a call is traced or inferred, so that functions cannot be called trip by trip."""
    root = root_of(tape)
    is_abstract = isinstance(root, Tracer) or (root is not None and root.only_infers)
    return is_abstract or lack_elements(operands)


def by_trips(tape: Tape, op: Op, operands: Operands, params: Params) -> Any:
    """Executes a loop or a branch as that of Python, of which the tape records each operator."""
    assert op.parts.algorithm is not None
    with interpreting(tape):
        return op.parts.algorithm(*operands, *params)


def storage_of(x: ShardedTensor) -> Any:
    """Returns the storage of a tensor, or of the base of a view."""
    return getattr(x._storage, "base", x)._storage


class Inner(Tape):
    """The tape of a function that is called within a function on another tape, whose values it may close over.

    Args:
        around: the other tape; None if it exists no longer.
        outer: what executes the calls; by default the innermost interpreter.

    Attributes:
        tracer: the tracer of the function, None if it is executed or only inferred.
        closed: the values of the other tape that the function closes over, which are found while it runs.
        now: for values that the function closes over, those that it takes now, by their storages.
    """

    writes_outside = (
        "{}: writes a tensor that the function of a loop or of a branch closes over; make it a part of the carry, or "
        "return the new value"
    )
    """The message of the error if the function writes a value of the other tape."""

    def __init__(self, around: Tape | None, outer: Callable[..., Any] | None = None) -> None:
        super().__init__(around)
        self.outer = outer or self.outer
        self.gathers_again = False  # A loop stacks what is saved, and what is recomputed is used soon.
        root = root_of(self)
        self.tracer = root if isinstance(root, Tracer) else None
        self.closed: list[Taped] = []
        self.now: dict[Any, Any] = {}

    def closed_over(self, state: Taped) -> Taped | None:
        """Returns the value that stands for one of the other tape: a new variable, when it is first used.

        Raises:
            ConcretizationError: the other tape has ended.
        """
        if state.number not in self.known_as:
            if state.tape.ended:
                raise ConcretizationError(LEFT)
            with self.outside():
                primal = handle_on(state.primal)
            self.known_as[state.number] = self.variable(primal)._storage
            self.closed.append(state)
        return self.known_as[state.number]

    def constant(self, x: Any) -> Any:
        """See `Tape.constant`."""
        return super().constant(self.current(x))

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Executes one call, and records it if an operand depends on a variable."""
        operands = self.current(operands)
        return super().apply(op, map_leaves(self._mine, operands) if op.signature.functions else operands, params)

    def _mine(self, x: Any) -> Any:
        """Returns an operand as a tensor of this tape, if it is one of the other tape's."""
        state = self.taped(x)
        if state is None or storage_of(x) is state:
            return x
        base, view_spec = x._base_and_view()
        own = tensor(base._aval, state)
        own = own if base._is_scalar else mark_array(own)
        return own if base is x else tensor(x._aval, View(own, view_spec))

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Executes a write.

        Raises:
            ArgumentError: the tensor is one of the other tape.
        """
        base = out._base_and_view()[0]
        if self.taped(base) not in (None, base._storage):
            raise ArgumentError(self.writes_outside.format(op.error_name))
        super().write(out, op, self.current(operands), params)

    def current(self, tree: Any) -> Any:
        """Returns operands with the values of now in place of those that the function closes over."""
        around = self.around()
        tree = around.current(tree) if isinstance(around, Inner) else tree
        return map_leaves(self._current, tree) if self.now else tree

    def _current(self, x: Any) -> Any:
        if type(x) is not ShardedTensor or (base := self.now.get(storage_of(x))) is None:
            return x
        return tensor(x._aval, View(base, x._base_and_view()[1])) if hasattr(x._storage, "view_spec") else base

    def _kept(self, x: Any) -> Any:
        """Returns an operand that does not belong to the tape, as a derivative saves it. A tensor from outside of the
        function is copied by the caller, once for all trips.
        """
        if type(x) is not ShardedTensor or not is_inside(x, self.tracer):
            return x if type(x) is ShardedTensor else super()._kept(x)
        return shared_handle(x) if isinstance(x._storage, NoElements) else super()._kept(x)


def is_inside(x: ShardedTensor, tracer: Tracer | None) -> bool:
    """Returns whether a tensor has been made in a function that a tracer traces, or may have been."""
    storage = storage_of(x)
    while hasattr(storage, "primal"):  # That of a tape, or of a batch.
        if type(storage.primal) is not ShardedTensor:
            return True
        storage = storage_of(storage.primal)
    if type(storage) is Traced:
        return storage.tracer is tracer
    return tracer is None and lacks_elements(x)


def held(tape: Tape, x: Any) -> Any:
    """Returns a tensor from outside of a function, as the call of the function saves it. A tensor that the caller
    closes over itself is saved by its own caller.
    """
    return x if isinstance(tape, Inner) and not is_inside(x, tape.tracer) else handle_on(x)


def has_gradient(x: Any) -> bool:
    """Whether an argument of a function can have a gradient."""
    return is_inexact(x.dtype) if type(x) is ShardedTensor else type(x) in (float, complex)


def number_in(storage: Any) -> tuple[Any, int]:
    """Returns the tape or the trace of which a value is, and the number of the value there."""
    if type(storage) is Taped:
        return storage.tape, storage.number
    if hasattr(storage, "batcher"):
        return number_in(storage_of(storage.primal))
    return (storage.tracer.trace, storage.value.number) if type(storage) is Traced else (None, 0)


def numbers_around(tape: Tape) -> dict[Any, int]:
    """Returns the number of the next value of the tapes around a tape and of the trace."""
    numbers: dict[Any, int] = {}
    interpreter: Any = tape
    while isinstance(interpreter, Nested) and interpreter.outer is not None:
        interpreter = innermost_of(interpreter.outer)
        if isinstance(interpreter, Tape):
            numbers[interpreter] = interpreter.next_number
        elif isinstance(interpreter, Tracer):
            numbers[interpreter.trace] = interpreter.trace.count
    return numbers


class Ref:
    """Stands for a tensor that derivatives have saved, by its number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class InnerCall:
    """One call of a function on a tape of its own, and what its transpose needs.

    Args:
        around: the tape of the caller.
        function: the function.
        args: its arguments: a pytree.
        active: for each leaf, whether its cotangent is wanted.
        outer: see `Inner`.

    Attributes:
        args: the arguments.
        result: the result of the function, without the tape.
        inputs: for each leaf of the arguments the number of its variable and its aval; None for others.
        closed: the values of the caller's tape that the function closes over, with number and aval.
        outputs: for each leaf of the result the number of its value; None if it depends on no variable.
        saved: the tensors that derivatives have saved.
        tracer: see `Inner`.
    """

    def __init__(
        self,
        around: Tape,
        function: Function,
        args: Any,
        active: Sequence[bool],
        outer: Callable[..., Any] | None = None,
    ) -> None:
        self._tape = tape = Inner(around, outer)  # Functions that its steps call again refer to it, weakly.
        self.args = args
        self.tracer = tape.tracer
        self.inputs: list[Any] = []
        values = []
        for x, is_active in zip(leaves(args), active, strict=True):
            x = tape.variable(handle_on(x)) if is_active else x
            self.inputs.append((x._storage.number, kind_of(x._storage.primal)) if is_active else None)
            values.append(x)
        try:
            with interpreting(tape):
                result = function(*replaced(args, values))
            self.outputs = [number_of(s) for s in map(tape.active, leaves(result))]
            self.result = map_leaves(tape.constant, result)
        finally:
            tape.end()
        self.closed = [(state, tape.known_as[state.number].number, kind_of(state.primal)) for state in tape.closed]
        self._uses = tape.uses
        self._numbers: dict[Any, int] = {}
        self.saved: list[Any] = []
        self._steps = [step.with_saved(map_leaves(self._ref, step.saved)) for step in tape.steps]
        tape.steps = []

    def _ref(self, x: Any) -> Any:
        if type(x) is not ShardedTensor:
            return x
        key = key_of(x)
        if key not in self._numbers:
            self._numbers[key] = len(self.saved)
            self.saved.append(x)
        return Ref(self._numbers[key])

    def pulled(self, cotangents: Iterable[Any], accumulated: Sequence[Any], saved: Sequence[Any]) -> list[Any]:
        """Returns the cotangents of the inputs, None for those that have none, and then of what is closed over.

        Args:
            cotangents: those of the leaves of the result; None for none.
            accumulated: the sums of earlier cotangents of what is closed over; None for none.
            saved: the saved tensors.
        """
        start: dict[int, list[Any]] = {}
        closed = [number for _, number, _ in self.closed]
        for n, g in [*zip(closed, accumulated, strict=True), *zip(self.outputs, cotangents, strict=True)]:
            if n is not None and g is not None:
                start.setdefault(n, []).append(g)
        steps = [step.with_saved(map_leaves(lambda x: _taken(x, saved), step.saved)) for step in self._steps]
        variables = [x for x in self.inputs if x is not None] + [(n, kind) for _, n, kind in self.closed]
        gradients = iter(pulled_back(steps, self._uses, start, variables))
        return [None if x is None else next(gradients) for x in self.inputs] + list(gradients)


def key_of(x: Any) -> Any:
    """Returns what is the same for all handles of one value, or of one view of it."""
    if type(x) is not ShardedTensor:
        return None
    if not hasattr(x._storage, "view_spec"):
        return x._storage
    view_spec = x._base_and_view()[1]
    return storage_of(x), view_spec.boxes, view_spec.part


def _taken(x: Any, saved: Sequence[Any]) -> Any:
    return saved[x.number] if type(x) is Ref else x


def handle_on(x: Any) -> Any:
    """Returns a tensor of the same value, which no write to another one changes; other objects unchanged."""
    if type(x) is not ShardedTensor:
        return x
    return shared_handle(x) if isinstance(x._storage, NoElements) else call("copy", x)


def shared_handle(x: ShardedTensor) -> ShardedTensor:
    """Returns another handle on a value without elements."""
    x._storage.share()
    handle = tensor(x._aval, x._storage)
    return handle if x._is_scalar else mark_array(handle)


class _Weak(NoElements):
    """The storage of a Python number that is inferred, which promotes no dtype.

    Attributes:
        stand_in: a number of its type.
    """

    __slots__ = ("stand_in",)

    def __init__(self, number: Any) -> None:
        self.stand_in = number


class _Abstract(Interpreter):
    """Infers calls, of which operands may be values of tracers and tapes, without recording anything."""

    only_infers = True

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Infers one call. The results of Python's numbers stay such numbers."""
        operands = map_leaves(abstract, operands)
        if op in PYTHON and all(type(x) in SCALARS for x in operands):
            return _weak(PYTHON[op](*operands))
        if op.name == "copy" and type(operands[0]) in SCALARS:
            return _weak(operands[0])
        if op.signature.functions:
            params = with_functions(op, params, _inferred)
        return bind_by(INFER.apply, op, operands, params)

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Checks a write."""
        with interpreting(INFER):
            INFER.write(abstract(out), op, map_leaves(abstract, operands), params)


def _inferred(function: Function) -> Function:
    def inferred(*args: Any) -> Any:
        with interpreting(ABSTRACT):
            return function(*args)

    return inferred


ABSTRACT = _Abstract()


def abstract(x: Any) -> Any:
    """Returns what inference takes for a value of tracers and tapes."""
    while type(x) is ShardedTensor and type(storage := storage_of(x)) in (Taped, Traced, _Weak):
        value = storage.primal if type(storage) is Taped else storage.stand_in
        if not hasattr(x._storage, "view_spec"):
            x = value
            continue
        view_spec = x._base_and_view()[1]
        if type(value) is not ShardedTensor:
            return view_spec.of(backend_of(HOST), value)
        x = tensor(x._aval, View(value, view_spec))
    if type(x) is ShardedTensor and hasattr(storage_of(x), "batcher"):
        return without_elements(x._aval)  # One example of a batch.
    return x


def argument(x: Any) -> Any:
    """Returns an argument of a function that is called to be inferred only."""
    value = abstract(x)
    if type(value) in SCALARS and type(x) is ShardedTensor:
        return _weak(value)
    return handle_on(value) if type(value) is ShardedTensor and lacks_elements(value) else value


def _weak(x: Any) -> Any:
    return tensor(aval_of_scalar(x), _Weak(x))


def inferred_call(around: Tape, function: Function, args: Any, active: Sequence[bool]) -> InnerCall:
    """Returns a call of a function that is inferred only, which records nothing but in what it returns."""
    error = None
    try:
        with recorded_by():
            return InnerCall(around, function, map_leaves(argument, args), active, ABSTRACT.apply)
    except ConcretizationError as refusal:
        if "eval_shape knows only" not in str(refusal):
            raise
        error = refusal
    InnerCall(around, function, args, [False] * len(active))  # The error of a tracer names the arguments.
    raise error
