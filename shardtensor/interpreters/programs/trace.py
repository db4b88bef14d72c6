"""The interpreter that records a function as a program.

A traced value is a tensor whose storage names a value of the program. Since tensors are handles on immutable values,
code that writes in place is traced as it is: a write binds the handle to a new value.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import numpy as np

from shardtensor.backend.device import HOST
from shardtensor.backend.registry import backend_of
from shardtensor.communication.transfer_log import recorded_by
from shardtensor.core import (
    OPS,
    Function,
    Interpreter,
    Op,
    Operands,
    Params,
    bind_by,
    call,
    execute,
    innermost,
    interpreting,
)
from shardtensor.errors import ArgumentError, ConcretizationError
from shardtensor.functions.building.python_numbers import PYTHON
from shardtensor.functions.random.random_keys import Key, SymbolicKey
from shardtensor.interpreters.calls import CallInterpreter
from shardtensor.interpreters.infer import INFER
from shardtensor.interpreters.programs.program import Equation, Program, ValueKind, Var, vars_of
from shardtensor.interpreters.programs.traced_values import Captured, Trace, Traced, is_traced, user_line
from shardtensor.interpreters.views.views import View, aval_of_view, stand_in
from shardtensor.interpreters.writes.write_ops import is_view
from shardtensor.sharding.index import canonical
from shardtensor.sharding.layout import as_sharding
from shardtensor.sharding.mesh import Mesh, default_mesh
from shardtensor.sharding.view_spec import ViewSpec, part_dtype
from shardtensor.tensor.operands import HostAval, as_operand, host_aval, is_data
from shardtensor.tensor.pytree import leaves, map_leaves, replaced
from shardtensor.tensor.tensor import SCALARS, ShardedTensor, lacks_elements, mark_array, tensor, without_elements
from shardtensor.tensor.value import Aval, aval

_adding: ContextVar[bool] = ContextVar("shardtensor_adding_gradients", default=False)


@contextlib.contextmanager
def adding_gradients() -> Iterator[None]:
    """Declares that the calls in the context add gradients; see `Equation`."""
    token = _adding.set(True)
    try:
        yield
    finally:
        _adding.reset(token)


class Tracer(CallInterpreter):
    """Records the operators that are called, and infers their results.

    Args:
        trace: what the tracers of one function share.
        inner: the interpreter that infers results.
        in_map: whether it records a program of a map.
        depends: for a program of a map, the inputs that its arguments depend on, as bits.
    """

    def __init__(self, trace: Trace, inner: Interpreter = INFER, *, in_map: bool = False, depends: int = 0) -> None:
        self.trace = trace
        self.inner = inner
        self.in_map = in_map
        self.is_inside = False
        self._depends = depends
        self.equations: list[Equation] = []
        self._transposed: Any = None  # the recorded call of which the transpose is called
        self._views: dict[Any, Traced] = {}
        self._tensors: dict[int, Traced] = {}

    # -- calls ---------------------------------------------------------------------------------------

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Records one call of an operator. Views, and operators that are composed of others, are not recorded."""
        if op in PYTHON and all(type(x) in SCALARS or self._is_weak(x) for x in operands):
            return self._on_python_scalars(op, operands)
        if "escapes" in op.tags:
            return self._escape(op, operands, params)
        if op.name == "copy" and self._is_weak(operands[0]):
            return operands[0]  # A number never changes, and stays one.
        result = super().apply(op, operands, params)
        self.trace.note_copy(op, operands, result)
        return result

    def composed(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Calls the operators of a composition. The placement of a host array or a number is recorded as it is."""
        if op.name == "asarray" and self._is_unplaced(operands[0]):
            return NotImplemented
        return super().composed(op, operands, params)

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Records a write, and binds the base of ``out`` to the new value."""
        if self.in_map:
            super().write(out, op, operands, params)
            return
        if type(out._storage) is Traced:
            out._make_writable()
        base, view_spec = out._base_and_view()
        base = self.trace.roots.get(id(base), base)
        if self.is_inside and not (type(base._storage) is Traced and base._storage.tracer is self):
            raise ArgumentError(
                f"{op.error_name}: writes into a tensor outside of the function of a loop or of a branch, which jit "
                f"traces once ({user_line()}); make the tensor a part of the carry, or return the new value"
            )
        if "assigns" in op.tags:
            at = canonical(operands[2], view_spec.shape)
            # Python ends ``x[i] += v`` with ``x[i] = x[i]``, which changes nothing.
            if at is not None and is_view(operands[1], base, view_spec.at(at)):
                return
        before = self._state(base)
        if not isinstance(before.value.kind, Aval):
            raise ConcretizationError(
                f"{op.error_name}: {self.trace.names([before.value])} is a host array, which jit does not "
                f"write ({user_line()}); give st.asarray(array), or return the new value"
            )
        held, stand_ins = self._operands(op, operands)
        written = mark_array(without_elements(base._aval))
        target = written if out is base else tensor(out._aval, View(written, view_spec))
        try:
            with interpreting(self.inner):
                self.inner.write(target, op, (target, *stand_ins[1:]) if "assigns" in op.tags else stand_ins, params)
        except ConcretizationError as error:
            self._raise_located(op, held, error)
        if not out.size or ("assigns" in op.tags and at is not None and 0 in view_spec.at(at).shape):
            return  # Nothing is written.
        others, window = held, out._aval
        if "assigns" in op.tags:
            others = held[1:]
            # A write to elements that a basic index selects is one to a view, so that all such equations look alike.
            if at is not None:
                view_spec = view_spec.at(at)
                window = aval_of_view(base._aval, view_spec.chains, view_spec.shape, view_spec.part)
                others = (held[1], ...)
        operands = (before.value, *others)
        after = self._traced(base._aval, written, self.trace.depends(vars_of(operands)))
        self._add(Equation(op, operands, params, after.value, view_spec, window, True))
        self._rebind(base, after)

    def _rebind(self, base: ShardedTensor, state: Traced) -> None:
        if type(base._storage) is Traced:
            base._storage = state
        else:
            self.trace.captured[id(base)].now = state

    def transpose(self, step: Any, /) -> Function:
        """Returns the transpose of a recorded call, of which the equations name the call."""
        return functools.partial(self._transpose, super().transpose(step))

    def _transpose(self, transposed: Function, g: Any, step: Any) -> Any:
        around, self._transposed = self._transposed, step
        try:
            return transposed(g, step)
        finally:
            self._transposed = around

    def line_of_call(self) -> str:
        """See `Interpreter`."""
        return user_line()

    def mapped(self, submesh: Mesh, /) -> Interpreter:
        """Returns the tracer of one program of a map."""
        return Tracer(self.trace, self.inner.mapped(submesh), in_map=True, depends=self._depends)

    def planned(self, op: Op, operands: Operands, params: Params, *_: Any) -> Any:
        """Records a call."""
        # The inference places what is not placed, and the program afterwards, where the function needs it.
        unplaced = [x for x in leaves(operands[0]) if self._is_unplaced(x)] if "loop" in op.tags else []
        known = {id(x): x._storage.stand_in for x in unplaced}
        held, stand_ins = self._operands(
            op, (map_leaves(lambda x: known.get(id(x), x), operands[0]), *operands[1:]) if known else operands
        )
        programs: dict[int, Program] = {}
        params = tuple([_copied(p) if type(p) is list else p for p in params])
        kept = given_params = _without_donation(op, params)
        bits = self._depends = self.trace.depends([*vars_of(held), *[x._storage.value for x in unplaced]])
        if op.name == "map_shards":
            count = len(params[1])
            held, stand_ins = (_numbered(held[0], count),), (_numbered(stand_ins[0], count),)
            given_params = (functools.partial(_trace_program, programs, params[0]), *params[1:])
            kept = (None, *params[1:])
        elif op.signature.functions:
            given_params, kept = self._with_traced_functions(op, params, programs)
        # A map asks the innermost interpreter, which is this one, for those of its programs.
        is_map_or_collective = "spmd" in op.tags and not op.signature.functions
        try:
            if is_map_or_collective:
                result = self.inner.apply(op, stand_ins, given_params)
            else:
                result = bind_by(self.inner.apply, op, stand_ins, given_params)
        except ConcretizationError as error:
            self._raise_located(op, (held, params), error)
        if "loop" in op.tags:
            placed = self._placed(operands[0], result[0] if op.name == "counted_loop" else result)
            held = (self._operand(op, True, placed)[0], *held[1:])
        for program in programs.values():
            bits |= self.trace.depends(program.free())
        outputs = map_leaves(functools.partial(self._made, bits), result)
        results = map_leaves(lambda x: x._storage.value if is_traced(x := _bits_in(x)) else x, outputs)
        self._add(Equation(op, held, kept, results, programs=programs))
        return outputs

    element = planned

    def algorithm(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Records a call, except for that of a copy of a Python number, which never changes."""
        if op.name == "copy" and self._is_weak(operands[0]):
            return tensor(operands[0]._aval, operands[0]._storage)
        return self.planned(op, operands, params)

    def _with_traced_functions(self, op: Op, params: Params, programs: dict[int, Program]) -> tuple[Params, Params]:
        """Returns the parameters with functions that are traced where they are called, and those of the equation, which
        holds their programs instead.
        """
        count = itertools.count()

        def traced(fn: Any) -> Any:
            return functools.partial(_trace_function, self, programs, next(count), fn)

        new_params, kept = list(params), list(params)
        for name in op.signature.functions:
            at = op.params.index(name)
            fns = params[at]
            new_params[at] = tuple(map(traced, fns)) if isinstance(fns, tuple) else traced(fns)
            kept[at] = len(fns) if isinstance(fns, tuple) else None
        return tuple(new_params), tuple(kept)

    def _placed(self, init: Any, carry: Any) -> Any:
        """Returns the initial carry of a loop with the dtypes and layouts of later ones, for which its function was
        traced.
        """
        new_leaves = []
        for x, target in zip(leaves(init), leaves(carry), strict=True):
            if lacks_elements(target):
                where = None if self.in_map else target.sharding
                if type(x) in SCALARS or self._is_weak(x):
                    x = call("full", (), x, dtype=target.dtype, device=where)
                elif type(x) is not ShardedTensor or x.dtype != target.dtype or self._is_unplaced(x):
                    x = call("asarray", x, dtype=target.dtype, device=where)
                elif where is not None and x.sharding != where:
                    x = call("reshard", x, where)
            new_leaves.append(x)
        return replaced(init, new_leaves)

    def _add(self, equation: Equation) -> None:
        equation.source = user_line()
        if (step := self._transposed) is not None:
            equation.source = f"{step.line or equation.source}, in the backward pass of {step.op.error_name}"
        errors, outside = np.geterr(), self.trace.errors
        if errors != outside:
            equation.ignored = tuple([(k, m) for k, m in errors.items() if m == "ignore" and outside[k] != m])
        equation.adds_gradients = _adding.get()
        self.equations.append(equation)

    def _escape(self, op: Op, operands: Operands, params: Params) -> Any:
        x = operands[0]
        if lacks_elements(x):
            raise self.trace.needs_elements(op.error_name, [self._read(x).value])
        if type(x) is ShardedTensor:
            known = self.trace.captured.get(id(x._base_and_view()[0]))
            if known is not None and known.now.value is not known.value:
                raise self.trace.needs_elements(op.error_name, [known.now.value])
        return execute(op, operands, params)

    def _on_python_scalars(self, op: Op, operands: Operands) -> ShardedTensor:
        held, stand_ins = self._operands(op, operands)
        kind = type(PYTHON[op](*stand_ins))
        number = self.weak(kind, self.trace.depends(vars_of(held)))
        self._add(Equation(op, held, (), number._storage.value))
        return number

    def _raise_located(self, op: Op, held: Any, error: ConcretizationError) -> NoReturn:
        """Raises the error of an inference that needs elements as one that names the arguments they depend on."""
        try:
            if "eval_shape knows only" not in str(error):
                raise error
            read = [x for x in leaves(held) if type(x) is Var or is_traced(x)]
            values = [x if type(x) is Var else x._storage.value for x in read]
            raise self.trace.needs_elements(op.error_name, values) from None
        finally:
            del error  # The reference cycle of the error and this frame would keep the operands alive.

    # -- operands ------------------------------------------------------------------------------------

    def _operands(self, op: Op, operands: Operands) -> tuple[Operands, Operands]:
        """Returns the operands as the equation holds them, and as inference takes them."""
        names = op.operands * len(operands) if op.signature.variadic else op.operands
        pairs = [self._operand(op, name in op.signature.trees, x) for name, x in zip(names, operands, strict=False)]
        return tuple([held for held, _ in pairs]), tuple([one for _, one in pairs])

    def _operand(self, op: Op, in_tree: bool, x: Any) -> tuple[Any, Any]:
        if in_tree and not isinstance(x, (ShardedTensor, np.ndarray)):
            pairs = [self._leaf(op, True, leaf) for leaf in leaves(x)]
            return replaced(x, [held for held, _ in pairs]), replaced(x, [one for _, one in pairs])
        return self._leaf(op, in_tree, x)

    def _leaf(self, op: Op, in_tree: bool, x: Any) -> tuple[Any, Any]:
        if type(x) is SymbolicKey:
            bits = self._read(x.bits).value
            return SymbolicKey(bits) if op.signature.functions else bits, x
        if type(x) in SCALARS or (type(x) is not ShardedTensor and not is_data(x)):
            return x, x
        if isinstance(x, (np.ndarray, np.generic)):
            x = _frozen(x)
            return x, x
        state = self._read(x)
        kind = state.value.kind
        if type(kind) is Aval:
            return state.value, state.stand_in
        unknown = (in_tree and not op.signature.functions) or (isinstance(kind, HostAval) and op.parts.algorithm)
        if unknown and "reads no host arrays" not in op.tags:
            state = self._as_tensor(state)
        return state.value, state.stand_in

    def _read(self, x: Any) -> Traced:
        """Returns the current value of a tensor, or of an array of a backend; a view of a base is an equation."""
        if type(x) is not ShardedTensor:
            return self._captured(as_operand(x, "jit"))
        storage = x._storage
        if type(storage) is Traced and storage.tracer.trace is self.trace:
            return storage
        if type(storage) is Traced or not hasattr(storage, "view_spec"):
            return self._state(x)
        base, view_spec = x._base_and_view()
        return self._view(self._state(base), view_spec, x._aval)

    def _state(self, base: ShardedTensor) -> Traced:
        storage = self.trace.roots.get(id(base), base)._storage
        if type(storage) is not Traced:
            return self._captured(base)
        if storage.tracer.trace is not self.trace:
            if storage.tracer.trace.ended:
                raise ConcretizationError(storage.tracer.trace.left())
            return self._captured(base)  # It is a value of a jit around this one.
        return storage

    def _captured(self, x: ShardedTensor) -> Traced:
        known = self.trace.captured.get(id(x))
        if known is None:
            state = self._traced(x._aval, stand_in(x), 0)
            known = self.trace.captured[id(x)] = Captured(x, state.value, state)
        return known.now

    def _view(self, state: Traced, view_spec: ViewSpec, value: Aval) -> Traced:
        if isinstance(state.value.kind, type):
            state = self._as_tensor(state)
        key = state.value.number, view_spec.boxes, view_spec.part
        view = self._views.get(key)
        if view is None:
            kind: ValueKind = value
            if isinstance(state.value.kind, HostAval):
                kind = host_aval(view_spec.shape, part_dtype(state.value.kind.dtype, view_spec.part))
                stand_in = view_spec.of(backend_of(HOST), state.stand_in)
            else:
                stand_in = tensor(value, View(state.stand_in, view_spec))
            view = self._views[key] = self._traced(kind, stand_in, self.trace.depends([state.value]))
            self._add(Equation(OPS["view"], (state.value,), (view_spec,), view.value, view_spec, kind))  # type: ignore[arg-type]
        return view

    def _as_tensor(self, state: Traced) -> Traced:
        """Returns a host array or a Python scalar as a tensor on the default mesh."""
        array = self._tensors.get(state.value.number)
        if array is None:
            op = OPS["asarray"]
            with interpreting(self.inner):
                result = self.inner.apply(op, (state.stand_in,), (None, None, None))
            array = self._made(self.trace.depends([state.value]), result)._storage
            self._tensors[state.value.number] = array
            self._add(Equation(op, (state.value,), (None, None, None), array.value))
        return array

    # -- values --------------------------------------------------------------------------------------

    def _traced(self, kind: ValueKind, stand_in: Any, depends: int) -> Traced:
        return Traced(self.trace.new(kind, depends), self, stand_in)

    def _made(self, depends: int, x: Any) -> Any:
        """Returns an inferred result as a traced tensor or a traced key."""
        if type(x) is SymbolicKey:
            return SymbolicKey(self.weak(int, depends))
        if not lacks_elements(x):
            return x
        substitute = stand_in(x) if not is_traced(x) else x._storage.stand_in
        result = tensor(x._aval, self._traced(x._aval, substitute, depends))
        return result if x._is_scalar else mark_array(result)

    def traced_input(self, x: Any, depends: int) -> ShardedTensor:
        """Returns a traced tensor for an input: a tensor that is not a view of another input, a host array or a
        scalar.
        """
        if type(x) in SCALARS:
            return self.weak(type(x), depends)
        if type(x) is ShardedTensor:
            substitute = stand_in(x)
            if hasattr(substitute._storage, "view_spec"):
                substitute = mark_array(without_elements(x._aval))
            result = tensor(x._aval, self._traced(x._aval, substitute, depends))
            return result if x._is_scalar else mark_array(result)
        placed = aval(x.shape, x.dtype, as_sharding(default_mesh(), x.ndim, "jit"), False)
        result = tensor(placed, self._traced(host_aval(x.shape, x.dtype), np.empty(x.shape, x.dtype), depends))
        return result if isinstance(x, np.generic) else mark_array(result)

    def weak(self, kind: type, depends: int) -> ShardedTensor:
        """Returns a traced Python scalar."""
        value = aval((), np.asarray(kind(1)).dtype, as_sharding(default_mesh(), 0, "jit"), False)
        return tensor(value, self._traced(kind, kind(1), depends))

    def _held(self, x: Any) -> Any:
        """Returns a result of a function as its program holds it."""
        if type(x) is SymbolicKey:
            return SymbolicKey(self._read(x.bits).value)
        return self._read(x).value if type(x) is ShardedTensor else x

    def _is_weak(self, x: Any) -> bool:
        return is_traced(x) and isinstance(x._storage.value.kind, type)

    def _is_unplaced(self, x: Any) -> bool:
        return is_traced(x) and not isinstance(x._storage.value.kind, Aval)


def _frozen(x: Any) -> Any:
    """Returns a host array that nothing writes: the function may go on to write its own."""
    if isinstance(x, np.generic) or (x.base is None and not x.flags.writeable):
        return x
    array = np.array(x)
    array.flags.writeable = False
    return array


def _copied(items: list[Any]) -> list[Any]:
    """Returns a copy of nested lists: the program does not change with the list that the function gave."""
    return [_copied(item) if type(item) is list else item for item in items]


def _without_donation(op: Op, params: Params) -> Params:
    """Returns the parameters without ``donate=True``: a program holds its inputs to the end."""
    if "donate" not in op.params:
        return params
    at = op.params.index("donate")
    return (*params[:at], False, *params[at + 1 :])


def _numbered(columns: Sequence[Any], count: int) -> Sequence[Any]:
    """Returns the arguments of a map without donations, and with one more: the number of each call."""
    if not columns:
        raise ArgumentError("jit: a map inside has no arguments; give its function an array")
    return [*[c._replace(donated=False) for c in columns], type(columns[0])(list(range(count)), True)]


def _trace_program(programs: dict[int, Program], fn: Callable[..., Any], *args: Any) -> Any:
    """Records one call of a mapped function, of which all arrays are tensors without elements. The last argument is the
    number of the call.
    """
    *args, number = args  # type: ignore[assignment]
    tracer = innermost()
    assert isinstance(tracer, Tracer)
    arg_leaves = leaves(args)
    positions = [k for k, x in enumerate(arg_leaves) if lacks_elements(x)]
    new_leaves = [tracer._made(tracer._depends, x) if lacks_elements(x) else x for x in arg_leaves]
    inputs = [new_leaves[k]._storage.value for k in positions]
    out = fn(*replaced(args, new_leaves))
    result = map_leaves(lambda x: tracer._read(x).value if lacks_elements(x) else x, out)
    programs[number] = Program(inputs, (), tracer.equations, vars_of(result), positions=positions, result=result)
    return out


def _trace_function(outer: Tracer, programs: dict[int, Program], number: int, fn: Function, *args: Any) -> Any:
    """Records one call of a function of a loop or of a branch. The operators that it calls are not those of ``outer``,
    but the values that they read may be.
    """
    tracer = Tracer(outer.trace, outer.inner, in_map=outer.in_map, depends=outer._depends)
    tracer.is_inside = True
    arg_leaves = leaves(args)
    positions = [k for k, x in enumerate(arg_leaves) if isinstance(x, (*SCALARS, Key)) or lacks_elements(x)]
    new_leaves = list(arg_leaves)
    for k in positions:
        x = arg_leaves[k]
        if isinstance(x, Key):
            x = _ANY_KEY
        new_leaves[k] = tracer.weak(type(x), outer._depends) if type(x) in SCALARS else tracer._made(outer._depends, x)
    inputs = [_bits_in(new_leaves[k])._storage.value for k in positions]
    with interpreting(tracer):
        out = fn(*replaced(args, new_leaves))
        result = map_leaves(tracer._held, out)
    programs[number] = Program(inputs, (), tracer.equations, vars_of(result), positions=positions, result=result)
    return map_leaves(lambda x: x._storage.stand_in if is_traced(x) else _ANY_KEY if isinstance(x, Key) else x, out)


_ANY_KEY = SymbolicKey(1)
"""The key that inference takes for every other one."""


def _bits_in(x: Any) -> Any:
    """Returns the bits of a key of jit; any other object unchanged."""
    return x.bits if type(x) is SymbolicKey else x


@contextlib.contextmanager
def tracing(tracer: Tracer) -> Iterator[None]:
    """Traces the calls in the ``with`` block; transfers of inference are not recorded."""
    try:
        with interpreting(tracer), recorded_by():
            yield
    finally:
        tracer.trace.ended = True
