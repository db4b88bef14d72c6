"""Linear operators on unreduced tensors: they compute with the partial sums, and the result is unreduced, too.

The partial sums are the elements of a tensor with one more, leading dimension (see
`shardtensor.tensor.partial_sum_storage`). How an operator is called with such a dimension is what its batching rule
says, by which `vmap` calls it for all examples; in which operands it is linear, its tags say. So the rule is called
with the partial sums in place of examples. They keep their layout, and nothing is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import OPS, Interpreter, Op, Operands, Params, execute, interpreting
from shardtensor.interpreters.execution.plan import Kind, Plan
from shardtensor.interpreters.execution.planning import kind_of, make_plan
from shardtensor.sharding.spec import P
from shardtensor.tensor.operands import HostAval
from shardtensor.tensor.partial_sum_storage import PartialSums
from shardtensor.tensor.tensor import ShardedTensor, tensor, without_elements
from shardtensor.tensor.value import Aval, aval, stacked

_LINEAR: dict[str, Callable[[Sequence[bool]], bool]] = {
    "linear": all,
    "linear in each": lambda sums: sum(sums) == 1,
    "linear in the first": lambda sums: sums[0] and not any(sums[1:]),
    "linear in the others": lambda sums: not sums[0] and all(sums[1:]),
}
"""For each tag, whether an operator with it is linear in its unreduced operands, given for each operand whether it is
unreduced.
"""


def linear_plan(op: Op, kinds: Sequence[Kind], params: Params) -> Plan | None:
    """Returns the plan of an operator that is linear in its unreduced operands; None if it is not.

    The operator is linear only if its result has the dtype of the partial sums, or is inexact and no narrower: sums of
    integers could overflow in the smaller dtype, and those of floats would be rounded before they are added.
    """
    sums = [isinstance(k, Aval) and bool(k.unreduced) for k in kinds]
    if not any(is_linear(sums) for tag, is_linear in _LINEAR.items() if tag in op.tags):
        return None
    named = dict(zip(op.params, params, strict=True))
    layout = named.pop("layout", None)
    if named.get("device") is not None or (layout is not None and not getattr(layout, "spec", P()).unreduced):
        return None
    tensors = [k for k in kinds if isinstance(k, Aval)]
    unreduced = [k for k in tensors if k.unreduced]
    mesh, axes = unreduced[0].sharding.mesh, unreduced[0].unreduced
    alike = all(k.sharding.mesh == mesh for k in tensors) and all(k.unreduced == axes for k in unreduced)
    if not alike or any(set(axes).intersection(c) for k in tensors for c in k.sharding.spec.chains):
        return None
    recorder = _Recorder([stacked(k) if isinstance(k, Aval) and k.unreduced else k for k in kinds])
    result = recorder.called(OPS[op.name], sums, named)
    if result is None:
        return None
    partials = next(plan.result for plan, _, number in recorder.steps if number == result)
    chains = partials.sharding.spec.chains_of(partials.ndim)
    if chains[0] != axes or partials.sharding.mesh != mesh:
        return None
    if not all(_is_wider(k.dtype, partials.dtype, op) for k in unreduced):
        return None
    value = aval(
        partials.shape[1:],
        partials.dtype,
        partials.sharding.with_spec(P(*chains[1:], unreduced=axes)),
        partials.committed,
    )
    return LinearPlan(op, sums, recorder, result, value)


def _is_wider(dtype: np.dtype[Any], sum_dtype: np.dtype[Any], op: Op) -> bool:
    """Whether an operator may compute partial sums of one dtype that are added in another one."""
    if dtype == sum_dtype:
        return True
    return sum_dtype.kind in "fc" and (dtype.kind in "fc" or op.name != "astype") and np.can_cast(dtype, sum_dtype)


class _NotPlanned(Exception):
    """A rule calls an operator that has no plan."""


class _Recorder(Interpreter):
    """Records the plans of the operators that a rule calls, on tensors without elements.

    Args:
        kinds: the kinds of the operands of the rule.

    Attributes:
        steps: the plans, with the numbers of their operands and of the result.
        others: the values behind the operands of the rule, by number: constants of the rule, and None for results.
    """

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.steps: list[tuple[Plan, Sequence[int], int]] = []
        self.others: list[Any] = []
        self._operands = tuple(map(_stand_in, kinds))
        self._values = list(self._operands)  # They are held, so that their identities stay theirs.

    def called(self, op: Op, sums: Sequence[bool], named: dict[str, Any]) -> int | None:
        """Returns the number of the result of the batching rule of an operator; None if plans do not compute it.

        Args:
            op: the operator.
            sums: for each operand whether it has the dimension of the partial sums.
            named: the parameters.
        """
        from shardtensor.functions.batching import Call, rule_of  # Few programs have unreduced tensors.

        count = next(x.shape[0] for x, has_sums in zip(self._operands, sums, strict=True) if has_sums)
        rule = rule_of(op)
        assert rule is not None, f"{op.name} is declared as linear, and has no batching rule"
        try:
            with interpreting(self):
                result = rule(Call(op, self._operands, sums, named, count))
        except _NotPlanned:
            return None
        number = self._number(result)
        return number if any(n == number for *_, n in self.steps) else None

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Records the plan of a call, and returns the result without elements."""
        if op.parts.composite:
            result = op.parts.composite(*(operands if not op.signature.variadic else (operands,)), *params)
            if result is not NotImplemented:
                return result
        if op.parts.algorithm:
            raise _NotPlanned
        plan = make_plan(op, list(map(kind_of, operands)), params)
        numbers = list(map(self._number, operands))
        value = without_elements(plan.result)
        self.steps.append((plan, numbers, self._added(value, None)))
        return value

    def _number(self, x: Any) -> int:
        """Returns the number of a value; a new one is a constant."""
        known = next((n for n, value in enumerate(self._values) if value is x), None)
        return self._added(x, x) if known is None else known

    def _added(self, value: Any, constant: Any) -> int:
        self._values.append(value)
        self.others.append(constant)
        return len(self._values) - 1


def _stand_in(kind: Kind) -> Any:
    """Returns an operand of that kind; only tensors have no elements. At most one operand of a linear operator is a
    Python scalar, and rules of linear operators have no scalars of their own, so that identities tell values apart.
    """
    if isinstance(kind, Aval):
        return without_elements(kind)
    if isinstance(kind, HostAval):
        return np.broadcast_to(np.zeros((), kind.dtype), kind.shape)
    return None if kind is None else kind(1)


class LinearPlan(Plan):
    """The plan of a linear operator on unreduced tensors: those of operators on their partial sums.

    Args:
        op: the operator.
        sums: for each operand whether it is unreduced.
        recorder: it has recorded the plans.
        number: the number of the partial sums of the result.
        result: the aval of the result, which is unreduced.
    """

    __slots__ = ("_number", "_others", "_steps", "_sums")

    def __init__(self, op: Op, sums: Sequence[bool], recorder: _Recorder, number: int, result: Aval) -> None:
        self._sums = sums
        self._steps, self._others = recorder.steps, recorder.others
        self._number = number
        main = next((plan for plan, *_ in self._steps if plan.op is op), self._steps[-1][0])
        execution = (main.strategy, lambda operands: self._with("run", operands))
        super().__init__(op, result, (), main.transfers, main.schedules, lambda: execution)

    def infer(self, operands: Operands) -> ShardedTensor:
        """See `Plan`."""
        return self._with("infer", operands)

    def _with(self, method: str, operands: Operands) -> ShardedTensor:
        """Returns the result of the plans by their method ``run`` or ``infer``."""
        pairs = zip(operands, self._sums, strict=True)
        values = [execute(OPS["partial_sums"], (x,), ()) if unreduced else x for x, unreduced in pairs]
        values += self._others
        for plan, numbers, number in self._steps:
            values[number] = getattr(plan, method)(tuple([values[n] for n in numbers]))
        return tensor(self.result, PartialSums(values[self._number]))
