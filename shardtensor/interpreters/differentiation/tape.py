"""The tape: the interpreter of a differentiated function.

It executes every call by the interpreter around it, and records the calls of which an operand depends on a
differentiated argument. What a derivative has saved never changes: a write copies a value first if it was saved, and
happens in place otherwise.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np

from shardtensor.core import OPS, Op, Operands, Params, bind_by, bind_into
from shardtensor.errors import ArgumentError, ArgumentTypeError, ConcretizationError
from shardtensor.functions.building.python_numbers import PYTHON
from shardtensor.functions.derivatives import derivative_of
from shardtensor.functions.derivatives.cotangents import is_inexact
from shardtensor.functions.derivatives.forms import ZERO, Derivative, Elementwise, Pushed, Recording, Refused, vjp
from shardtensor.interpreters.calls import InferredView
from shardtensor.interpreters.differentiation.backward import WRITTEN, Gathered, is_gathered, window
from shardtensor.interpreters.differentiation.recorder import INSTEAD, Recorder, any_write, row_of
from shardtensor.interpreters.differentiation.taped_values import LEAVES, Taped
from shardtensor.interpreters.writes.write_ops import is_view
from shardtensor.interpreters.writes.writes import check_result
from shardtensor.places import is_in_package
from shardtensor.sharding.index import canonical
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.pytree import leaves, map_leaves, replaced
from shardtensor.tensor.tensor import SCALARS, ShardedTensor, mark_array, tensor

WRITES_OUTSIDE = (
    "remat: the function writes a tensor that it closes over, which calling it again would repeat; return the new value"
)


class Tape(Recorder):
    """Executes calls by the interpreter around it, and records those that depend on differentiated arguments."""

    can_be_read = True
    """Whether single elements may be read, for conditions."""

    writes_outside = WRITES_OUTSIDE
    """The error of a write to a tensor that the function closes over."""

    def __init__(self, around: Tape | None = None) -> None:
        super().__init__(around)
        self._written: dict[int, tuple[ShardedTensor, Any]] = {}

    # -- calls ---------------------------------------------------------------------------------------

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Executes one call, and records it if an operand depends on a differentiated argument."""
        if "spmd" in op.tags and isinstance(derivative := derivative_of(op), Recording):
            return derivative.record(self, op, operands, params)
        for x in operands:
            if type(x) is ShardedTensor:
                if self.taped(x) is not None:
                    break
            elif isinstance(x, (tuple, list, dict)) and any(self.taped(leaf) is not None for leaf in leaves(x)):
                if op.name == "asarray":
                    operands = self._stacked(x), *operands[1:]
                break
        else:
            result = bind_by(self.outer, op, operands, params)
            if op.name == "split_over":
                self.split = [*self.split[-15:], (result, operands[0], params[0])]
            return result
        if "escapes" in op.tags:
            return self._escape(op, operands, params)
        if op in PYTHON and (scalar := self._of_scalars(op, operands)) is not NotImplemented:
            return scalar
        if op.parts.view_spec and type(operands[0]) is ShardedTensor:
            self.make_tensor(operands[0])
        return super().apply(op, operands, params)

    def element(self, op: Op, operands: Operands, params: Params, view: InferredView, /) -> Any:
        """Records an element of a tensor, or a copy of a scalar."""
        x, view_spec = operands[0], view[1]
        base = self.taped(x)
        assert base is not None
        result = bind_by(self.outer, op, (self.constant(x),), params)
        if not is_inexact(result.dtype):
            return result
        variable = self.variable(result)
        kinds, results = [base.primal._aval], [result._aval]
        self.add_call(
            OPS["view"], {"view_spec": view_spec}, row_of("view"), [base], kinds, [variable._storage], results, {}
        )
        return variable

    def composed(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Calls the operators of a composition, unless it has a derivative itself: then it is recorded as one call."""
        derivative = derivative_of(op)
        if derivative is not None and not derivative.after_composition:
            return NotImplemented
        return super().composed(op, operands, params)

    def planned(self, op: Op, operands: Operands, params: Params, *_: Any) -> Any:
        """Executes a call, and records it.

        Raises:
            ArgumentTypeError: the operator has no derivative.
        """
        derivative = derivative_of(op)
        if derivative is ZERO:
            return bind_by(self.outer, op, self.constants(operands), params)
        if derivative is not None and derivative.records:
            return cast("Recording", derivative).record(self, op, operands, params)
        if derivative is None or type(derivative) is Refused:
            reason = "none is defined yet" if derivative is None else derivative.reason
            name = params[op.params.index("caller")] if "spmd" in op.tags and "caller" in op.params else op.error_name
            raise ArgumentTypeError(f"{name}: it has no derivative: {reason}; {INSTEAD}")
        return self.recorded(op, operands, params, derivative)

    def recorded(
        self, op: Op, operands: Operands, params: Params, derivative: Derivative, *, depends: bool = False
    ) -> Any:
        """Executes a call, and records it with a derivative, if an operand depends on a differentiated argument, or if
        the result ``depends`` on one in another way.
        """
        in_trees = op.signature.variadic or bool(op.signature.trees)
        operand_leaves = leaves(operands) if in_trees else operands
        states = [self.active(x) for x in operand_leaves]
        if not any(states) and not depends:
            return bind_by(self.outer, op, self.constants(operands), params)
        primals = [self.constant(x) if s is None else s.primal for x, s in zip(operand_leaves, states, strict=True)]
        if self.in_program is not None:
            primals = list(map(self.adopted, primals))
        args: Operands = tuple(replaced(operands, primals)) if in_trees else tuple(primals)
        result = bind_by(self.outer, op, args, params)
        if self.in_program is not None:
            result = map_leaves(self.adopted, result)
        for x, primal in zip(operand_leaves, primals, strict=True):
            if result is primal:  # As `st.astype(x, x.dtype, copy=False)`.
                return x
        outs = [result] if type(result) is ShardedTensor else leaves(result)
        tensors, new = self._variables(outs)
        if op.name == "transfer_to" and self.gathers_again and states[0] is not None and new[0] is not None:
            source = states[0].source or states[0]
            if is_gathered(source.primal, result):
                new[0].source = source
        if any(new):
            saved = self._saved(op, derivative, states, operands, args, outs, new)
            named = dict(zip(op.params, params, strict=True))
            kinds, results = list(map(_kind, primals)), list(map(_kind, outs))
            tree = replaced(operands, kinds) if in_trees else None
            self.add_call(op, named, derivative, states, kinds, new, results, saved, tree)
        return tensors[0] if type(result) is ShardedTensor else replaced(result, tensors)

    def algorithm(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Executes and records a call of an operator that takes tensors only, not numbers."""
        state = self.taped(operands[0])
        if op.name == "copy" and state is not None and type(state.primal) in SCALARS:
            return tensor(operands[0]._aval, state)  # A number never changes, and stays one.
        for x in operands:
            self.make_tensor(x)
        return self.planned(op, operands, params)

    def _saved(
        self,
        op: Op,
        derivative: Derivative,
        states: Sequence[Taped | None],
        operands: Operands,
        args: Operands,
        outs: Sequence[Any],
        new: Sequence[Taped | None],
    ) -> dict[str, Any]:
        """Returns the values that a derivative needs, by name, and marks those of the tape as saved."""
        saved: dict[str, Any] = {}
        for name in derivative.saves(op, [s is not None for s in states]):
            if name == "y":
                saved[name] = outs[0] if len(outs) == 1 else outs
                held: Iterable[Taped | None] = new
            else:
                at = op.operands.index(name)
                x = operands[at]
                base = self.taped(x) if type(x) is ShardedTensor else None
                source = None if base is None else base.source
                if base is not None and source is not None and source.exists():
                    view_spec = x._base_and_view()[1] if hasattr(x._storage, "view_spec") else None
                    saved[name] = Gathered(source.primal, base.primal._aval, x._aval, view_spec)
                    held = (source,)
                elif type(x) is ShardedTensor or type(x) in SCALARS:
                    saved[name] = self._kept(args[at]) if base is None else args[at]
                    held = (base,)
                else:
                    held = list(map(self.taped, leaves(x)))
                    values = zip(leaves(args[at]), held, strict=True)
                    saved[name] = replaced(args[at], [self._kept(x) if s is None else x for x, s in values])
            for state in held:
                if state is not None:
                    state.save()
        return saved

    def _kept(self, x: Any) -> Any:
        """Returns an operand from outside of the tape, as a derivative saves it: later writes do not change it."""
        x = x if self.in_program is None else self.adopted(x)
        if type(x) is ShardedTensor:
            return x if self.is_lent(x) else bind_by(self.outer, OPS["copy"], (x,), ())
        return x.copy() if isinstance(x, np.ndarray) else x

    def add_function(
        self,
        function: Callable[[Any, Any], Any] | Derivative,
        states: Sequence[Taped | None],
        results: Sequence[Any],
        saved: dict[str, Any] | None = None,
        pushed: Pushed | None = None,
        name: str = "asarray",
    ) -> list[Any]:
        """Records a call of a function of the user, and returns its results as tensors of the tape.

        Args:
            function: its derivative, or a function as in `shardtensor.functions.derivatives.forms.vjp`.
            states: the values of the tape on which the results depend, which are saved.
            results: what it has returned.
            saved: the values that the derivative finds in its `Call`. It must not refer to other tensors, since a loop
                or a map keeps those of all its calls.
            pushed: its derivative in the other direction, as in ``vjp``.
            name: the operator that has called the function.
        """
        for state in states:
            if state is not None:
                state.save()
        tensors, new = self._variables(list(map(self.adopted, results)))
        kinds = [None if s is None else _kind(s.primal) for s in states]
        derivative = function if isinstance(function, Derivative) else vjp(function, pushed=pushed)
        derivative.calls_functions = True
        results = [s.primal if s is not None else y for s, y in zip(new, results, strict=True)]
        self.add_call(OPS[name], {}, derivative, states, kinds, new, list(map(_kind, results)), saved or {})
        return tensors

    def _of_scalars(self, op: Op, operands: Operands) -> Any:
        """Returns the result of an operator of Python scalars, which stays one, so that it does not promote dtypes."""
        primals = []
        for x in operands:
            state = self.taped(x)
            primal = x if state is None else state.primal
            if type(primal) not in SCALARS:
                return NotImplemented
            primals.append(primal)
        result = PYTHON[op](*primals)
        derivative = derivative_of(op)
        if derivative in (None, ZERO) or type(result) not in (float, complex):
            return result
        variable = self.variable(result)
        states = [self.active(x) for x in operands]
        named = dict(zip(op.operands, primals, strict=True)) | {"y": result}
        self.add_call(op, {}, derivative, states, primals, [variable._storage], [result], named)
        return variable

    def _escape(self, op: Op, operands: Operands, params: Params) -> Any:
        """Executes a call of which the result leaves the library, or has a shape that depends on elements."""
        is_read = self.can_be_read and op.name == "to_host" and operands[0].size <= 1 and _is_read_by_user()
        if not is_read and derivative_of(op) is not ZERO:
            raise ConcretizationError(f"{op.error_name}: the elements of a tensor are taken out, {LEAVES}")
        self.was_read = self.was_read or is_read
        return bind_by(self.outer, op, self.constants(operands), params)

    def _stacked(self, x: Any) -> Any:
        """Returns nested lists of tensors and numbers as one tensor."""
        if not isinstance(x, (list, tuple)):
            return x if type(x) is ShardedTensor else bind_by(self.outer, OPS["asarray"], (x,), (None, None, None))
        return self.apply(OPS["stack"], tuple(map(self._stacked, x)), (0,))

    # -- writes --------------------------------------------------------------------------------------

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Executes a write, and binds the base of ``out`` to the new value."""
        base = out._base_and_view()[0]
        self.check_write(base)
        is_mine = self.taped(base) is not None
        if not is_inexact(base._aval.dtype) or not (is_mine or any(map(self.taped, leaves(operands)))):
            with self.outside():
                bind_into(out, op, self.constants(operands), params)
            return
        with contextlib.nullcontext() if is_mine else self.outside():
            out._make_writable()
        self.make_tensor(out)
        base, view_spec = out._base_and_view()
        if "assigns" in op.tags:
            value, index = operands[1], operands[2]
            at = canonical(index, view_spec.shape)
            if at is None and self._assign(base, out, value, index):
                return
            if at is None:  # The new value of the view is computed, and then all of it written.
                value, at = self.apply(OPS["setitem"], (out, value, index), ()), canonical(..., view_spec.shape)
            elif is_view(value, base, view_spec.at(at)):
                return  # Python ends ``x[i] += v`` with ``x[i] = x[i]``.
            assert at is not None
            view_spec = view_spec.at(at)
        elif self._update(base, out, op, operands, params):
            return
        else:
            value = self.apply(op, operands, params)
            check_result(op.name, value, out.shape, out.dtype)
        if not self._rebinds(base, out, op, operands, value):
            self._put(base, view_spec, value)

    def _assign(self, base: ShardedTensor, out: ShardedTensor, value: Any, index: Any) -> bool:
        """Writes a value to the elements that an index with arrays selects, in place. Returns whether that was
        possible: the base is a value of the tape that no derivative needs.
        """
        state, op = self.taped(base), OPS["setitem"]
        if state is None or state.is_saved or base._storage is not state or isinstance(value, (list, tuple)):
            return False
        operands = out, value, index
        operand_leaves = leaves(operands)
        states = [self.active(x) for x in operand_leaves]
        args = self.constants(operands)
        saved = self._saved(op, row_of("setitem"), states, operands, args, (), ())
        kinds = list(map(_kind, leaves(args)))
        with self.outside():
            bind_into(args[0], op, args, ())
        tree = replaced(args, kinds)
        self._written_in_place(base, out, op, {}, row_of("setitem"), states, kinds, saved, tree)
        return True

    def _update(self, base: ShardedTensor, out: ShardedTensor, op: Op, operands: Operands, params: Params) -> bool:
        """Computes an elementwise operator into one of its operands, as ``x += y``, in place. Returns whether that was
        possible: neither the derivative of the operator nor another one needs the old elements or the new ones.
        """
        state, derivative = self.taped(base), derivative_of(op)
        if state is None or state.is_saved or base._storage is not state or not isinstance(derivative, Elementwise):
            return False
        states = [self.active(x) for x in operands]
        for name in derivative.saves(op, [s is not None for s in states]) if op.is_ufunc else ("y",):
            if name == "y" or self.taped(operands[op.operands.index(name)]) is state:
                return False
        args = tuple([self.constant(x) for x in operands])
        saved = self._saved(op, derivative, states, operands, args, (), ())
        with self.outside():
            bind_into(self.constant(out), op, args, params)
        named = dict(zip(op.params, params, strict=True))
        self._written_in_place(base, out, op, named, derivative, states, list(map(_kind, args)), saved)
        return True

    def _written_in_place(
        self,
        base: ShardedTensor,
        out: ShardedTensor,
        op: Op,
        params: dict[str, Any],
        derivative: Derivative,
        states: Sequence[Taped | None],
        kinds: Sequence[Any],
        saved: dict[str, Any],
        tree: Any = None,
    ) -> None:
        """Records a call of which the result has been written into ``out``, a tensor of the tape or a view of one."""
        state, view_spec = base._storage, out._base_and_view()[1]
        new, state.primal = state.primal, None  # This value exists no longer.
        base._storage = new_state = Taped(self, new)
        result = new_state if out is base else Taped(self, None)
        value = out._aval
        self.add_call(op, params, derivative, states, kinds, [result], [value], saved, tree)
        if out is not base:
            kinds = [new._aval, value]
            self.add_call(
                OPS["put"], {"view_spec": view_spec}, WRITTEN, [state, result], kinds, [new_state], [new._aval], {}
            )

    def _rebinds(self, base: ShardedTensor, out: ShardedTensor, op: Op, operands: Operands, value: Any) -> bool:
        """Binds a tensor of the tape to the result of an operator, if that is its new value as it is."""
        if "assigns" in op.tags or out is not base:
            return False
        if type(base._storage) is not Taped or base._storage.tape is not self:
            return False
        if value._aval is not base._aval or type(value._storage) is not Taped:
            return False
        if any(x is value for x in operands):
            return False
        base._storage = value._storage
        return True

    def _put(self, base: ShardedTensor, view_spec: ViewSpec, value: Any) -> None:
        """Writes a value into the elements that a view spec selects: in place, unless the old ones are saved."""
        state, source = self.taped(base), self.active(value)
        if state is not None and base._storage is not state:
            raise ArgumentError(self.writes_outside)
        primal = self.constant(value)
        old = base if state is None else state.primal
        is_in_place = state is not None and not state.is_saved
        new = old if is_in_place else mark_array(bind_by(self.outer, OPS["copy"], (old,), ()))
        is_whole = view_spec.part is None and len(view_spec.boxes) == 1 and view_spec.boxes[0].is_whole
        target = new if is_whole else window(new, view_spec)
        with self.outside():
            bind_into(target, OPS["setitem"], (target, primal, ...), ())
        if 0 in view_spec.shape:
            return
        if state is None:
            self._written[id(base)] = base, base._storage
        elif is_in_place:
            state.primal = None  # This value exists no longer.
        base._storage = new_state = Taped(self, new)
        kinds = [new._aval, _kind(primal)]
        self.add_call(
            OPS["put"], {"view_spec": view_spec}, WRITTEN, [state, source], kinds, [new_state], [new._aval], {}
        )

    def end(self) -> None:
        """Ends the recording. Tensors from outside that the function has written get their values."""
        self.ended = True
        self.check_write = any_write
        self.end_writes()

    def end_writes(self) -> None:
        """Writes the values of tensors from outside that the function has written."""
        written = [(base, storage, self.constant(base)) for base, storage in self._written.values()]
        self._written.clear()
        for base, storage, _ in written:
            base._storage = storage
        with self.outside():
            for base, _, new in written:
                bind_into(base, OPS["setitem"], (base, new, ...), ())


_DISPATCH = ("shardtensor.core", "shardtensor.interpreters.", "shardtensor.tensor.")
"""The modules whose functions are called between a conversion and the tape."""


def _is_read_by_user() -> bool:
    """Whether a function of the user converts a tensor to a Python number, for its control flow. Where a function of
    the library takes an argument for a number, or NumPy makes an array of it, the gradient would be lost.
    """
    frame = sys._getframe(1)
    while (name := frame.f_globals.get("__name__") or "").startswith(_DISPATCH) and frame.f_back is not None:
        if frame.f_code.co_name == "__array__":
            return False
        frame = frame.f_back
    return not is_in_package(name)


class Linear(Tape):
    """The tape of a linear function that is transposed: zeros stand for its arguments, which are therefore not read."""

    can_be_read = False


def _kind(x: Any) -> Any:
    """Returns what a step keeps of an operand: its aval, or a scalar in place of a host array."""
    if type(x) is ShardedTensor:
        return x._aval
    return np.broadcast_to(np.zeros((), x.dtype), x.shape) if isinstance(x, np.ndarray) else x
