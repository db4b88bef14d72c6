"""The values of a tape, which depend on differentiated arguments, and the calls that have made them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import OPS, Op, bind_by, call
from shardtensor.errors import ArgumentTypeError, ConcretizationError
from shardtensor.functions.derivatives import derivative_of
from shardtensor.functions.derivatives.cotangents import is_inexact
from shardtensor.functions.derivatives.forms import Derivative
from shardtensor.interpreters.calls import CallInterpreter
from shardtensor.interpreters.differentiation.backward import Step, pulled_back
from shardtensor.interpreters.differentiation.left_sums import LeftSums
from shardtensor.interpreters.differentiation.taped_values import LEFT, Taped
from shardtensor.interpreters.nested import Nested
from shardtensor.interpreters.program_arrays import adopted, exported
from shardtensor.interpreters.views.views import View
from shardtensor.sharding.layout import as_sharding
from shardtensor.sharding.mesh import default_mesh
from shardtensor.sharding.view_spec import ViewSpec, part_steps
from shardtensor.tensor.pytree import map_leaves
from shardtensor.tensor.tensor import ShardedTensor, mark_array, tensor
from shardtensor.tensor.value import Aval, aval

INSTEAD = "use other operators, or st.stop_gradient(x) for its operands where no gradient is wanted"
"""The end of the error of a call without a derivative."""


class Recorder(Nested, CallInterpreter):
    """The values and the calls of a tape (see `Tape`, which decides what is recorded).

    Attributes:
        steps: the recorded calls.
        uses: for the number of each value, how many operands of these calls it is.
        ended: whether the function has returned.
        was_read: whether an element has been read as a Python number.
        around: for a function that is a part of another one, a weak reference to the tape of that.
        gathers_again: whether values that a gather has made are saved as its source.
        known_as: by the numbers of values of that tape, which the function closes over, those that stand for them here.
        check_write: is called with each tensor that is about to be written.
        split: the last arguments for maps that do not depend on differentiated ones: the parts of each, the tensor, and
            the axes along which it was split.
        one_value: for results of maps that are one value of all programs along some axes, the number of the cotangent
            of that value, and these axes.
        next_number: the number of the next value.
    """

    records = True
    """Whether calls are recorded, so that what is recorded may call a function again."""

    def __init__(self, around: Recorder | None = None) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.uses: dict[int, int] = {}
        self.ended = False
        self.was_read = False
        self.around: Callable[[], Any] = (lambda: None) if around is None else weakref.ref(around)
        self.gathers_again = self.records
        self.known_as: dict[int, Taped] = {}
        self.check_write: Callable[[ShardedTensor], None] = any_write
        self.split: list[tuple[list[Any], ShardedTensor, Sequence[str]]] = []
        self.one_value: dict[int, tuple[int, frozenset[str]]] = {}
        self.next_number = 0

    # -- values --------------------------------------------------------------------------------------

    def variable(self, primal: Any) -> ShardedTensor:
        """Returns a tensor of the tape for a value, to which no other object may refer."""
        if type(primal) is ShardedTensor:
            if type(primal._storage) is View:  # As `solve` of a vector returns, a column of a matrix.
                primal = bind_by(self.outer, OPS["copy"], (primal,), ())
            variable = tensor(primal._aval, Taped(self, primal))
            return variable if primal._is_scalar else mark_array(variable)
        return tensor(aval_of_scalar(primal), Taped(self, primal))

    def _variables(self, results: Sequence[Any]) -> tuple[list[Any], list[Taped | None]]:
        """Returns results as tensors of the tape, where they can have a gradient, and the values that these have."""
        tensors: list[Any] = []
        new: list[Taped | None] = []
        for y in results:
            is_new = type(y) is ShardedTensor and is_inexact(y._aval.dtype)
            tensors.append(self.variable(y) if is_new else y)
            new.append(tensors[-1]._storage if is_new else None)
        return tensors, new

    def taped(self, x: Any) -> Taped | None:
        """Returns the value of this tape that is that of a tensor, or of the base of a view; None if there is none.

        Raises:
            ConcretizationError: the tensor has left another differentiated function.
        """
        if type(x) is not ShardedTensor:
            return None
        storage = getattr(x._storage, "base", x)._storage
        if type(storage) is not Taped:
            return None
        if storage.tape is self:
            return storage
        if (known := self.from_outside(storage)) is not None:
            return known
        if storage.tape.ended:
            raise ConcretizationError(LEFT)
        return None

    def from_outside(self, state: Taped) -> Taped | None:
        """Returns the value of this tape that stands for one of another tape; None if there is none."""
        around = self.around()
        if around is None:
            return None
        outer_state = state if state.tape is around else around.from_outside(state)
        return None if outer_state is None else self.closed_over(outer_state)

    def closed_over(self, state: Taped) -> Taped | None:
        """Returns the value that stands for one of the tape around this one; None if there is none."""
        return self.known_as.get(state.number)

    def active(self, x: Any) -> Taped | None:
        """Returns the value of this tape that a tensor or a view has, None if it has no gradient here."""
        base = self.taped(x)
        if base is None or not is_inexact(x._aval.dtype):
            return None
        if not hasattr(x._storage, "view_spec"):
            return base
        return self._view(base, x._base_and_view()[1], x._aval)

    def constant(self, x: Any) -> Any:
        """Returns what the interpreter around the tape takes for an operand: the primal, or the operand itself."""
        base = self.taped(x)
        if base is None:
            return x
        assert base.primal is not None
        if not hasattr(x._storage, "view_spec"):
            return base.primal
        return tensor(x._aval, View(base.primal, x._base_and_view()[1]))

    def result(self, x: Any) -> Any:
        """Returns a leaf of the function's result without the tape. What a derivative has saved is copied, since
        the caller may write what it gets.
        """
        state = self.taped(x)
        if state is None:
            return x
        primal = self.constant(x)
        return call("copy", primal) if state.is_saved or primal is not state.primal else primal

    def _view(self, base: Taped, view_spec: ViewSpec, value: Aval) -> Taped:
        """Returns the value of a view, which is recorded when it is first read."""
        if any(not isinstance(step, str) for step in part_steps(view_spec.part)):
            raise ArgumentTypeError(f"view: it has no derivative: bits are no numbers; {INSTEAD}")
        if base.views is None:
            base.views = {}
        key = view_spec.boxes, view_spec.part
        state = base.views.get(key)
        if state is None:
            state = Taped(self, tensor(value, View(base.primal, view_spec)), base)
            base.views[key] = state
            self.add_call(
                OPS["view"], {"view_spec": view_spec}, row_of("view"), [base], [base.primal._aval], [state], [value], {}
            )
        return state

    def constants(self, tree: Any) -> Any:
        """Returns operands as the interpreter around the tape takes them."""
        return map_leaves(self.constant, tree)

    def make_tensor(self, x: Any) -> None:
        """Replaces the value of a Python scalar by a tensor, of which there can be views."""
        state = self.taped(x)
        if state is None or type(state.primal) is ShardedTensor or x._storage is not state:
            return
        result = self.adopted(bind_by(self.outer, OPS["asarray"], (state.primal,), (None, None, None)))
        x._storage = new_state = Taped(self, result)
        x._aval = result._aval
        self.add_call(OPS["copy"], {}, row_of("copy"), [state], [state.primal], [new_state], [result._aval], {})

    def is_lent(self, x: Any) -> bool:
        """Whether the elements of a tensor are those of an argument of a program, which nothing writes."""
        return False

    def adopted(self, x: Any) -> Any:
        """Returns an array of the device of a program as a tensor; other objects as they are."""
        here = self.in_program
        return x if here is None else adopted(here, x)

    def given(self, x: Any) -> Any:
        """Returns a tensor as a function of the user gets it: in a program on one device as an array of that."""
        here = self.in_program
        if here is None:
            return x
        with self.outside():
            return exported(here, x)

    # -- calls ---------------------------------------------------------------------------------------

    def add_call(
        self,
        op: Op,
        params: dict[str, Any],
        derivative: Derivative,
        inputs: Sequence[Taped | None],
        kinds: Sequence[Any],
        outputs: Sequence[Taped | None],
        results: Sequence[Any],
        saved: dict[str, Any],
        tree: Any = None,
    ) -> None:
        """Records a call."""
        step = Step()
        step.op, step.params, step.derivative = op, params, derivative
        step.kinds, step.results, step.saved, step.tree = kinds, results, saved, tree
        step.active = [s is not None for s in inputs]
        step.inputs = numbers = [None if s is None else s.number for s in inputs]
        step.outputs = [None if s is None else s.number for s in outputs]
        uses = self.uses
        for n in numbers:
            if n is not None:
                uses[n] = uses.get(n, 0) + 1
        self.steps.append(step)

    def pull(
        self,
        cotangents: dict[int, list[Any]],
        inputs: Sequence[tuple[int, Any]],
        *,
        keep: bool,
        left: LeftSums | None = None,
    ) -> list[Any]:
        """Returns the cotangents of inputs, given those of results; see `pulled_back`."""
        steps = list(self.steps) if keep else self.steps
        return pulled_back(steps, self.uses, cotangents, inputs, left=left)


def any_write(base: ShardedTensor) -> None:
    """Accepts a write to any tensor."""


def row_of(name: str) -> Derivative:
    """Returns the derivative of an operator that has one."""
    derivative = derivative_of(OPS[name])
    assert derivative is not None
    return derivative


def aval_of_scalar(x: Any) -> Aval:
    """Returns the aval of a Python number."""
    return aval((), np.asarray(x).dtype, as_sharding(default_mesh(), 0, "grad"), False)
