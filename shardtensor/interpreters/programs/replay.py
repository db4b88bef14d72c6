"""Runs programs: a step for each equation, prepared once.

The steps are those of eager mode: the same plans, views and writes, so that results are the same to the bit and the
same transfers are recorded. A value is dropped after its last use; a write whose base nothing else uses is in place.
The steps that compute several equations at once are those of `shardtensor.interpreters.jit.steps`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator as python
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import HOST
from shardtensor.backend.protocol import current_device
from shardtensor.backend.registry import backend_of
from shardtensor.communication.transfer import announce_reading
from shardtensor.communication.transfer_log import TransferLog, announcing, recorded_by
from shardtensor.core import (
    OPS,
    Interpreter,
    Op,
    bind,
    bind_into,
    call,
    default_interpreter,
    innermost,
    interpreting,
    outermost,
)
from shardtensor.errors import ShardTensorError
from shardtensor.functions.building.python_numbers import PYTHON
from shardtensor.functions.random.random_keys import Key, bits_of
from shardtensor.host.fork import cached_property
from shardtensor.interpreters.execution.plan import Plan
from shardtensor.interpreters.execution.plan_cache import plan_for
from shardtensor.interpreters.infer import INFER
from shardtensor.interpreters.programs.program import Equation, Program, Var, kind_of, replace_vars, vars_of
from shardtensor.interpreters.views.views import View, evaluate, stand_in
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.operands import HostAval
from shardtensor.tensor.ownership import is_new, track
from shardtensor.tensor.pytree import LEAF_TYPES, leaves, replaced
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import SCALARS, ShardedTensor, lacks_elements, mark_array, tensor, without_elements
from shardtensor.tensor.value import Aval

Values = Any
"""The values of a program by number: a list, or a dict inside of maps."""

Step = Callable[[Values], None]

Node = Sequence[Equation]
"""What one step does: an equation, or those that one kernel computes."""

OWN_STEPS: dict[Op, Callable[[Equation, Program, Interpreter, Sequence[int]], Step]] = {}
"""For operators that only rewrites of programs make, and that read values of the program by number: the function that
returns the step, given the equation, its program, the interpreter, and the numbers of the values to drop.
"""


def steps_of(program: Program, interpreter: Interpreter) -> list[Step]:
    """Returns a step for each equation of a program.

    Each of them takes the values, adds its results, and drops those that no later step uses.

    Args:
        program: the program.
        interpreter: the eager interpreter, `INFER`, or `BOUND`.
    """
    nodes = [(e,) for e in program.equations]
    dropped, made = dropped_after(last_uses(program, nodes), nodes), set(program.made())
    return [
        step_of(equation, program, interpreter, dead, is_in_place(equation, made, dead))
        for equation, dead in zip(program.equations, dropped, strict=False)
    ]


def step_of(
    equation: Equation, program: Program, interpreter: Interpreter, dead: Sequence[int] = (), in_place: bool = False
) -> Step:
    """Returns the step of an equation, after which the values of the numbers ``dead`` are dropped."""
    op = equation.op
    if op in OWN_STEPS:
        return OWN_STEPS[op](equation, program, interpreter, dead)
    if op.signature.functions:
        return functions_step(equation, interpreter, dead, lambda body: steps_of(body, interpreter))
    if equation.programs:
        return map_step(equation, interpreter, dead, lambda body: steps_of(body, BOUND))
    executes = interpreter is default_interpreter()
    if executes and is_announcing(equation):
        return _announcing(equation, dead, in_place)
    if equation.writes:
        return _write(equation, interpreter, dead, in_place)
    if op.name == "view":
        return view_step(equation, dead)
    if type(equation.results) is Var and isinstance(equation.results.kind, type):
        return _on_python_scalars(equation, dead)
    if executes and (plan := plan_of(equation)) is not None:
        return _planned(equation, plan, dead)
    return _call(equation, interpreter, dead)


def is_in_place(equation: Equation, made: Collection[Var], dead: Sequence[int]) -> bool:
    """Whether an equation is a write of a base that is among the values that the program has made, and that is dropped
    after it.
    """
    return equation.writes and equation.operands[0].number in dead and equation.operands[0] in made


def dropped_after(last: Mapping[Var, int], nodes: Sequence[Node]) -> list[tuple[int, ...]]:
    """Returns for each node the numbers of the values that no later one uses, and at the end those of the outputs, from
    their `last_uses`.
    """
    dropped: list[list[int]] = [[] for _ in (*nodes, "outputs")]
    for v, use in last.items():
        dropped[use].append(v.number)
    return list(map(tuple, dropped))  # The garbage collector need not look at tuples of integers.


def last_uses(program: Program, nodes: Sequence[Node]) -> dict[Var, int]:
    """Returns for each value the number of the node after which it is dropped. A base is used where its views are; a
    result that nothing uses is dropped by its own node, and outputs are never dropped.
    """
    last = dict.fromkeys([*program.outputs, *program.writes.values()], len(nodes))
    for k in range(len(nodes) - 1, -1, -1):
        for equation in reversed(nodes[k]):
            uses = [last.setdefault(v, k) for v in equation.makes()]
            use = max(uses) if equation.op.name == "view" else k
            for v in equation.reads():
                if last.get(v, k) <= use:
                    last[v] = use
    return last


# -- operators with a plan -------------------------------------------------------------------------


def plan_of(equation: Equation) -> Plan | None:
    """Returns the plan of an equation whose plan depends on nothing but the kinds of its operands; else None."""
    op, parts = equation.op, equation.op.parts
    if parts.view_spec or parts.composite or parts.algorithm or op.creates:
        return None
    if type(equation.results) is not Var:
        return None
    kinds: list[Any] = [None if x is None else kind_of(x) for x in equation.operands]
    if any(isinstance(kind, type) and kind not in SCALARS for kind in kinds):
        return None
    tensors = [kind for kind in kinds if isinstance(kind, Aval)]
    # A scalar may be an element of another tensor, with which devices that own the element compute.
    if not tensors or any(not kind.ndim or kind.unreduced for kind in tensors) or op.params[-1:] == ("layout",):
        return None
    return plan_for(op, kinds, equation.params)


def _planned(equation: Equation, plan: Plan, dead: Sequence[int]) -> Step:
    result, run = equation.results.number, plan.run
    operands = [np.asarray(x) if isinstance(x, np.generic) else x for x in equation.operands]
    at = [x.number for x in operands if type(x) is Var]
    if len(at) == len(operands) > 1:
        get: Callable[[Values], tuple[Any, ...]] = python.itemgetter(*at)
    elif len(at) == len(operands):
        get = functools.partial(_one, at[0])
    else:
        get = getter(operands)

    # Arguments take less time than variables of the function around it, and fewer objects.
    def step(
        values: Values,
        get: Callable[[Values], tuple[Any, ...]] = get,
        run: Callable[[tuple[Any, ...]], Any] = run,
        result: int = result,
        dead: Sequence[int] = dead,
    ) -> None:
        operands = get(values)
        output = run(operands)
        storage = output._storage
        if type(storage) is not Storage or not storage.leases:
            if type(storage) is Storage and is_new(storage, operands):
                storage.leases = ([],)
            else:
                track([operands], output)
        values[result] = output
        for number in dead:
            values[number] = None

    return step


def _one(number: int, values: Values) -> tuple[Any]:
    return (values[number],)


def getter(operands: Sequence[Any]) -> Callable[[Values], tuple[Any, ...]]:
    """Returns the function that takes the operands of an equation out of the values."""
    return lambda values: tuple([values[x.number] if type(x) is Var else x for x in operands])


# -- other calls -----------------------------------------------------------------------------------


def _call(equation: Equation, interpreter: Interpreter, dead: Sequence[int]) -> Step:
    op, params, apply = equation.op, equation.params, interpreter.apply
    trees = any(type(x) not in LEAF_TYPES for x in equation.operands)
    get = functools.partial(replace_vars, equation.operands) if trees else getter(equation.operands)

    def step(values: Values) -> None:
        operands = get(values)
        _bind_results(values, equation.results, _independent(apply(op, operands, params), operands))
        for number in dead:
            values[number] = None

    return step


def is_announcing(equation: Equation) -> bool:
    """Whether the transfers of an equation follow from elements: those of an index, of what its functions read, or of
    a collective in a map.
    """
    op, inside = equation.op, [e for program in equation.programs.values() for e in program.equations]
    if any(map(is_announcing if op.signature.functions else _has_announcing_collective, inside)):
        return True
    index = equation.operands[2:] if "assigns" in op.tags else equation.operands[1:] if op.name == "gather" else ()
    return op.parts.announcing is not None or bool(vars_of(index))


def _has_announcing_collective(equation: Equation) -> bool:
    """Whether an equation of a program of a map is a collective whose transfers follow from elements, or has one."""
    op, programs = equation.op, equation.programs.values()
    is_one = "axis_name" in op.params and op.parts.announcing is not None
    return is_one or any(_has_announcing_collective(e) for program in programs for e in program.equations)


def _announcing(equation: Equation, dead: Sequence[int], in_place: bool) -> Step:
    """Returns the step of an operator whose transfers follow from elements: it records them as it runs, but for those
    of reading its operands, which are inferred (see `only_read`).
    """
    run = _write(equation, BOUND, dead, in_place) if equation.writes else _call(equation, BOUND, dead)
    read = [x.number for x in equation.operands if type(x) is Var]

    def step(values: Values) -> None:
        for number in read:
            x = values[number]
            if type(x) is ShardedTensor and not lacks_elements(x):
                x._storage.buffers  # noqa: B018 - views are read where nothing is recorded
        with _recorded_as_it_runs():
            run(values)

    return step


@contextlib.contextmanager
def _recorded_as_it_runs() -> Iterator[None]:
    """Makes the calls in the ``with`` block those of a program without jit, whose transfers are recorded."""
    with announcing(), interpreting(outermost()):
        yield


def only_read(equation: Equation, inferred: Step) -> Step:
    """Returns the step that infers an operator whose transfers follow from elements, and records those of reading its
    operands only. A loop, a branch or a map does not read its operands: its functions do.
    """
    read = (
        []
        if equation.op.signature.functions or equation.programs
        else [x.number for x in equation.operands if type(x) is Var]
    )

    def step(values: Values) -> None:
        for number in read:
            announce_reading(values[number])
        with recorded_by():
            inferred(values)

    return step


def inference_of(program: Program) -> list[Step]:
    """Returns the steps that infer a program, which leave out the transfers that are recorded as it runs."""
    steps = zip(program.equations, steps_of(program, INFER), strict=True)
    return [only_read(equation, step) if is_announcing(equation) else step for equation, step in steps]


def _independent(result: Any, operands: Sequence[Any]) -> Any:
    """Returns a result; a copy of it where it is an operand itself, so that a write to one does not reach the other."""
    if type(result) is ShardedTensor and any(result is x for x in operands):
        copied = default_interpreter().apply(OPS["copy"], (result,), ())
        return copied if result._is_scalar else mark_array(copied)
    return result


def _bind_results(values: Values, names: Any, result: Any) -> None:
    if type(names) is Var:
        values[names.number] = result
        return
    for name, value in zip(leaves(names), leaves(result), strict=True):
        if type(name) is Var:
            values[name.number] = bits_of(value, "jit") if type(value) is Key else value


def view_step(equation: Equation, dead: Sequence[int]) -> Step:
    """Returns the step of a view, after which the values of some numbers are dropped."""
    (base,), result = equation.operands, equation.results.number
    view_spec, value = equation.into, equation.window
    assert view_spec is not None
    assert value is not None

    def step(values: Values) -> None:
        values[result] = view_of(values[base.number], view_spec, value)
        for number in dead:
            values[number] = None

    return step


def view_of(base: Any, view_spec: ViewSpec, value: Aval | HostAval) -> Any:
    """Returns a view of a tensor, whose aval is given, of a host array, or of an array of a device in a map."""
    if type(base) is ShardedTensor:
        if type(base._storage) is View:
            return _view_of_view(base, view_spec, value)
        return tensor(value, View(base, view_spec))  # type: ignore[arg-type]
    if isinstance(value, HostAval):
        return view_spec.of(backend_of(HOST), base)
    return bind(OPS["view"], (base,), (view_spec,))


def _view_of_view(x: ShardedTensor, view_spec: ViewSpec, value: Any) -> ShardedTensor:
    """Returns a view of a view, whose base is that of the view: ownership is recorded for bases only.

    Where NumPy would copy x to reshape it, the result is such a copy. Programs that write it or return it as a view are
    traced for the base of x instead (see `Trace.copies_argument`).
    """
    base, outer = x._base_and_view()
    composed = _composed(outer, view_spec)
    if composed is not None:
        return tensor(value, View(base, composed))
    copy = tensor(value, evaluate(x, view_spec)._storage)
    track([(x,)], copy)
    return copy


@functools.lru_cache(1024)
def _composed(outer: ViewSpec, inner: ViewSpec) -> ViewSpec | None:
    return outer.then(inner)


def compute(equation: Equation, values: Values) -> None:
    """Adds a Python number that an equation computes of others."""
    operands = [values[x.number] if type(x) is Var else x for x in equation.operands]
    values[equation.results.number] = PYTHON[equation.op](*operands)


def _on_python_scalars(equation: Equation, dead: Sequence[int]) -> Step:
    def step(values: Values) -> None:
        compute(equation, values)
        for number in dead:
            values[number] = None

    return step


# -- writes ----------------------------------------------------------------------------------------


def _write(equation: Equation, interpreter: Interpreter, dead: Sequence[int], in_place: bool) -> Step:
    op, params, view_spec, window = equation.op, equation.params, equation.into, equation.window
    base, result = equation.operands[0].number, equation.results.number
    assert view_spec is not None
    assert isinstance(window, Aval)
    value = equation.results.kind
    whole = window is value and len(view_spec.boxes) == 1 and view_spec.boxes[0].is_whole and view_spec.part is None
    others = equation.operands[1:]

    def step(values: Values) -> None:
        operands = replace_vars(others, values)
        written = values[base]
        if not in_place:
            written = mark_array(interpreter.apply(OPS["copy"], (written,), ()))
        out = written if whole else tensor(window, View(written, view_spec))
        interpreter.write(out, op, (out, *operands) if "assigns" in op.tags else operands, params)
        for number in dead:
            values[number] = None
        values[result] = written

    return step


# -- maps ------------------------------------------------------------------------------------------


def map_step(
    equation: Equation,
    interpreter: Interpreter,
    dead: Sequence[int],
    body_steps: Callable[[Program], Sequence[Step]],
    more: Callable[[], dict[int, Any]] = dict,
) -> Step:
    """Returns the step of a map. With a collective whose transfers follow from elements, it records all of them as it
    runs.

    Args:
        equation: the equation.
        interpreter: what runs the map.
        dead: the numbers of the values that are dropped after it.
        body_steps: returns the steps of the program of one call.
        more: returns what the values of each call have besides.
    """
    op, params = equation.op, equation.params
    free = {v.number for program in equation.programs.values() for v in program.free()}
    bodies = {number: _Body(program, body_steps(program)) for number, program in equation.programs.items()}
    announces = interpreter is default_interpreter() and is_announcing(equation)
    apply = (BOUND if announces else interpreter).apply

    def step(values: Values) -> None:
        around = {number: values[number] for number in free} | more()
        call = functools.partial(_run_program, bodies, around)
        with _recorded_as_it_runs() if announces else contextlib.nullcontext():
            output = apply(op, replace_vars(equation.operands, values), (call, *params[1:]))
        _bind_results(values, equation.results, output)
        for number in dead:
            values[number] = None

    return step


def functions_step(
    equation: Equation, interpreter: Interpreter, dead: Sequence[int], body_steps: Callable[[Program], Sequence[Step]]
) -> Step:
    """Returns the step of a loop or a branch, whose functions are programs. Where the number of calls follows from
    elements, each call records its transfers as it runs.

    Args:
        equation: the equation.
        interpreter: what runs it.
        dead: the numbers of the values that are dropped after it.
        body_steps: returns the steps of the program of a function.
    """
    op = equation.op
    free = {v.number for program in equation.programs.values() for v in program.free()}
    executes = interpreter is default_interpreter()
    announces = executes and is_announcing(equation)
    bodies = [
        _Function(program, body_steps(program), executes=executes, announces=announces)
        for _, program in sorted(equation.programs.items())
    ]
    apply = (BOUND if announces else interpreter).apply

    def step(values: Values) -> None:
        around = {number: values[number] for number in free}
        remaining = iter([_BoundFunction(body, around) for body in bodies])
        params = list(equation.params)
        for name in op.signature.functions:
            at = op.params.index(name)
            count = params[at]
            params[at] = next(remaining) if count is None else tuple([next(remaining) for _ in range(count)])
        operands = replace_vars(equation.operands, values)
        with _recorded_as_it_runs() if announces else contextlib.nullcontext():
            output = apply(op, operands, tuple(params))
            if op.name == "branch":
                output = replaced(output, map(_placed, leaves(equation.results), leaves(output)))
            _bind_results(values, equation.results, output)
        for number in dead:
            values[number] = None

    return step


def _placed(name: Any, x: Any) -> Any:
    """Returns a result of a branch in the layout of those of the others, which it has unless it is not placed."""
    if type(name) is Var and type(x) is ShardedTensor and current_device() is None:
        assert isinstance(name.kind, Aval)
        if x.sharding != name.kind.sharding:
            return call("reshard", x, name.kind.sharding)
    return x


class _Function:
    """The program of a function of a loop or of a branch.

    Args:
        program: the program.
        steps: its steps.
        executes: whether they execute it, where the call is not inferred.
        announces: whether each call records its transfers as it runs.
    """

    def __init__(self, program: Program, steps: Sequence[Step], *, executes: bool, announces: bool) -> None:
        self.program = program
        self.steps = steps
        self._executes = executes
        self._announces = announces

    @cached_property
    def _inference(self) -> Sequence[Step]:
        return inference_of(self.program)

    @cached_property
    def keeps_avals(self) -> bool:
        """Whether the arrays that it returns for arrays of certain avals always have the same ones: all but numbers."""
        kinds = [x.kind if type(x) is Var else None for x in leaves(self.program.result) if x is not None]
        return all(isinstance(kind, Aval) for kind in kinds)

    def __call__(self, around: Mapping[int, Any], *args: Any) -> Any:
        arg_leaves = leaves(args)
        values = dict(around)
        for v, k in zip(self.program.inputs, self.program.positions, strict=True):
            x = arg_leaves[k]
            values[v.number] = bits_of(x, "jit") if type(x) is Key else x
        del arg_leaves, args
        if self._executes and (interpreter := innermost()) is not None and interpreter.only_infers:
            return self._run(self._inference, values)
        return outermost().run(self, values) if self._announces else self.execute(values)

    def execute(self, values: Any) -> Any:
        """Runs the program, and returns its result."""
        return self._run(self.steps, values)

    def _run(self, steps: Sequence[Step], values: Any) -> Any:
        for step in steps:
            step(values)
        return replace_vars(self.program.result, values)

    def infer(self, values: Mapping[int, Any]) -> None:
        """Records the transfers of a call."""
        known: dict[int, ShardedTensor] = {}
        self._run(self._inference, {number: stand_in(x, known) for number, x in values.items()})


class _BoundFunction:
    """A function of a loop or of a branch, with the values that it takes from outside.

    Attributes:
        keeps_avals: see `shardtensor.interpreters.control_flow.execution`.
    """

    __slots__ = ("_around", "_function", "keeps_avals")

    def __init__(self, function: _Function, around: Mapping[int, Any]) -> None:
        self._function = function
        self._around = around
        self.keeps_avals = function.keeps_avals

    def __call__(self, *args: Any) -> Any:
        return self._function(self._around, *args)


def _run_program(bodies: Mapping[int, _Body], around: Mapping[int, Any], *args: Any) -> Any:
    """Runs one call of a map; the last argument is its number."""
    return bodies[args[-1]](around, args[:-1])


class _Body:
    """The program of one call of a map, which `bind` runs by the interpreter of its device."""

    def __init__(self, program: Program, steps: Sequence[Step]) -> None:
        self.program = program
        self.steps = steps

    def __call__(self, around: Mapping[int, Any], args: Any) -> Any:
        values = dict(around)
        arg_leaves = leaves(args)
        for v, k in zip(self.program.inputs, self.program.positions, strict=True):
            values[v.number] = arg_leaves[k]
        del arg_leaves
        for step in self.steps:
            step(values)
        return replace_vars(self.program.result, values)


class _Bound(Interpreter):
    """Passes calls to the innermost interpreter, which inside of a map is that of the device."""

    __slots__ = ()

    def apply(self, op: Any, operands: Any, params: Any, /) -> Any:
        return bind(op, operands, params)

    def write(self, out: Any, op: Any, operands: Any, params: Any, /) -> None:
        bind_into(out, op, operands, params)


BOUND = _Bound()


# -- inference -------------------------------------------------------------------------------------


def inferred(
    program: Program, inputs: Sequence[Any], around: Callable[[Equation], contextlib.AbstractContextManager[None]]
) -> None:
    """Runs a program on operands without elements, by which the transfers are recorded.

    Args:
        program: the program.
        inputs: what stands for its inputs and for what it captures: tensors without elements, host arrays, scalars.
        around: makes a context for each equation, in which it is inferred.
    """
    values: Values = {v.number: x for v, x in zip((*program.inputs, *program.captured), inputs, strict=True)}
    with interpreting(INFER):
        for equation, step in zip(program.equations, steps_of(program, INFER), strict=True):
            with around(equation):
                step(values)


def bytes_of(equations: Sequence[Equation]) -> int:
    """Returns the bytes that equations transfer."""
    program = Program((), (), equations, ())
    free, log = program.free(), TransferLog()
    nothing: Callable[[Equation], Any] = lambda _: contextlib.nullcontext()  # noqa: E731
    with recorded_by(log):
        inferred(dataclasses.replace(program, inputs=free), [stand_in_of(v) for v in free], nothing)
    return log.bytes


def stand_in_of(v: Var) -> Any:
    """Returns what inference takes for a value."""
    kind = v.kind
    if isinstance(kind, Aval):
        return without_elements(kind)
    return np.empty(kind.shape, kind.dtype) if isinstance(kind, HostAval) else kind(1)


def with_operands(equation: Equation, others: dict[Var, Var]) -> Equation:
    """Returns an equation with other values in place of some."""
    values = {v.number: others.get(v, v) for v in vars_of(equation.operands)}
    return dataclasses.replace(equation, operands=replace_vars(equation.operands, values))


def result_of(equation: Equation) -> Aval | None:
    """Returns the aval of the result of an equation; None if it is not a tensor, or the operands are rejected."""
    operands = replace_vars(equation.operands, {v.number: stand_in_of(v) for v in vars_of(equation.operands)})
    try:
        with interpreting(INFER), recorded_by():
            result = INFER.apply(equation.op, operands, equation.params)
    except ShardTensorError:
        return None
    return result._aval if type(result) is ShardedTensor else None
