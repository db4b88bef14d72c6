"""Common sums: the partial sums of several reductions are added in one message.

Eager mode adds the partial sums of a reduction at once, by an all-reduce of its own. Where no sum depends on another
one, as for the gradients of a data-parallel step, the devices join their partial sums in one array for each dtype, and
add that. The bytes and the bits are those of single sums, since each element is added along the same tree, but there
are fewer messages, each of which takes a time of its own (Li et al., PyTorch Distributed, 2020: buckets of gradients).

A program has no order but that of its values: equations that need one of the sums come after the message.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardtensor.core import OPS, call, declared, execute
from shardtensor.functions.algorithms.shards import shards_of
from shardtensor.interpreters.jit.rewrites.deferred_sums import partial_axes, without_addition
from shardtensor.interpreters.programs.passes import Setting
from shardtensor.interpreters.programs.program import Equation, Program, Var
from shardtensor.interpreters.programs.replay import bytes_of, result_of
from shardtensor.sharding.spec import P
from shardtensor.tensor.ownership import track
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements, mark_array, shard_arrays, without_elements
from shardtensor.tensor.value import Aval, aval, summed

_MOST_BYTES = 25 << 20
"""The maximum size of a message: it is the memory that joining partial sums takes."""

_LARGE_BYTES = 4 << 20
"""The size of partial sums from which on the bandwidth limits their message, so that joining gains nothing."""


def common_sum(tensors: Any, /) -> None:
    """Adds the partial sums of unreduced tensors of one dtype, which no other axis splits, by one all-reduce."""


COMMON_SUM = declared(common_sum, operands=("tensors",), variadic=True, error_name="jit")
"""The operator of common sums. It is not in OPS, since only rewritten programs have it."""


def _common_sum(tensors: Sequence[ShardedTensor]) -> tuple[ShardedTensor, ...]:
    partials = [call("partial_sums", x) for x in tensors]
    ends = list(itertools.accumulate([x.size for x in tensors], initial=0))
    first = partials[0]._aval
    sharding = first.sharding.with_spec(P(*first.sharding.spec.chains[:1]))  # Others are axes with one device.
    value = aval((first.shape[0], ends[-1]), first.dtype, sharding, first.committed)
    if lacks_elements(partials[0]):
        joined = without_elements(value)
    else:
        joined = shards_of(value, ()).make(value, _join, *map(shard_arrays, partials)).tensor()
    total = execute(OPS["add_partials"], (joined,), (True, 0, False, None))
    parts = tuple([_part(total, summed(x._aval), begin) for x, begin in zip(tensors, ends, strict=False)])
    track([tensors], parts)
    return tuple([y if x._is_scalar else mark_array(y) for x, y in zip(tensors, parts, strict=True)])


def _part(total: ShardedTensor, value: Aval, begin: int) -> ShardedTensor:
    """Returns one of the sums."""
    if lacks_elements(total):
        return without_elements(value)
    cut = functools.partial(_cut, begin)
    return shards_of(value, ()).make(value, cut, shard_arrays(total)).tensor()


def _join(xp: Any, out: Any, *arrays: Any) -> None:
    begin = 0
    for array in arrays:
        flat = xp.reshape(array, (-1,))
        out[0, begin : begin + flat.shape[0]] = flat
        begin += flat.shape[0]


def _cut(begin: int, xp: Any, out: Any, array: Any) -> None:
    out[...] = xp.reshape(array[begin : begin + math.prod(out.shape)], out.shape)


COMMON_SUM.parts.composite = _common_sum


def with_common_sums(program: Program, _: Setting) -> Program:
    """Returns a program with the same results in which independent partial sums are added in one message; the program
    itself if it has none.
    """
    count = program.next_number()
    candidates = [(k, _sum_of(e, count + 2 * k)) for k, e in enumerate(program.equations)]
    sums = _together(program, {k: entry for k, entry in candidates if entry is not None})
    sums = _together(program, {k: entry for k, entry in sums.items() if entry.is_possible()})
    return dataclasses.replace(program, equations=_Schedule(program, sums).equations) if sums else program


def _together(program: Program, sums: Mapping[int, _Sum]) -> dict[int, _Sum]:
    """Returns those sums that have a message with others."""
    buckets = _Schedule(program, sums).buckets
    return {k: sums[k] for k in sorted(k for bucket in buckets if len(bucket) > 1 for k in bucket)}


@dataclasses.dataclass(slots=True)
class _Sum:
    """An equation that adds partial sums.

    Attributes:
        equation: the equation.
        partials: the value of the partial sums.
        total: their sum.
        reduction: what computes the partial sums; None where the program has them.
        after: what computes the result from the sum: the division of a mean.
    """

    equation: Equation
    partials: Var
    total: Var
    reduction: Equation | None = None
    after: Sequence[Equation] = ()

    @property
    def key(self) -> Any:
        """What sums in one message have in common."""
        value = self.partials.kind
        assert isinstance(value, Aval)
        sharding = value.sharding
        return sharding.mesh, sharding.memory_kind, sharding.spec.unreduced, value.dtype

    def before(self) -> Sequence[Equation]:
        """Returns the equation that leaves the partial sums, if the program has none; it may be missing."""
        if self.reduction is None:
            return ()
        equation = without_addition(self.reduction, self.partials.kind.unreduced, self.partials.number)  # type: ignore[union-attr]
        return () if equation is None else (equation,)

    def is_possible(self) -> bool:
        """Whether the partial sums can be left, and whether each device has a part in the sum: in eager mode, those
        with empty shards have none, which a message with other sums would change.
        """
        before = self.before()
        if self.reduction is not None and (not before or before[0].results != self.partials):
            return False
        if any(result_of(e) != e.results.kind for e in self.after):
            return False
        alone = Equation(COMMON_SUM, (self.partials,), (), (self.total,))
        return bytes_of([*before, alone, *self.after]) == bytes_of([self.equation])


def _sum_of(equation: Equation, number: int) -> _Sum | None:
    """Returns an equation as a sum that may be a part of a message; None for any other equation.

    Args:
        equation: the equation.
        number: the first of two numbers that no value has.
    """
    v, x = equation.results, equation.operands[0] if equation.operands else None
    if type(v) is not Var or not isinstance(v.kind, Aval) or not 0 < v.kind.nbytes < _LARGE_BYTES:
        return None
    kind = v.kind
    if not kind.sharding.is_fully_replicated or kind.dtype.kind not in "iufc":
        return None
    if equation.op.name == "transfer_to" and type(x) is Var and isinstance(x.kind, Aval) and x.kind.unreduced:
        return _Sum(equation, x, v) if summed(x.kind) == kind else None
    total, reduction = v, equation
    after: Sequence[Equation] = ()
    if equation.op.name == "mean" and (equations := _mean_as_sum(equation, number + 1)) is not None:
        reduction, after = equations[0], equations[1:]
        total = reduction.results
    axes = partial_axes(reduction)
    if not axes:
        return None
    sharding = kind.sharding.with_spec(P(*kind.sharding.spec.chains, unreduced=frozenset(axes)))
    partials = Var(number, aval(kind.shape, kind.dtype, sharding, kind.committed))
    return _Sum(equation, partials, total, reduction, after)


def _mean_as_sum(equation: Equation, number: int) -> tuple[Equation, Equation] | None:
    """Returns the sum and the division that a mean is; None where it is computed in another dtype."""
    (x,), v = equation.operands, equation.results
    params = dict(zip(equation.op.params, equation.params, strict=True))
    if params["dtype"] is not None or type(x) is not Var or not isinstance(x.kind, Aval):
        return None
    if x.kind.dtype.char not in "fdFD":
        return None
    total, op = Var(number, v.kind), OPS["sum"]
    count = x.kind.size // max(v.kind.size, 1)
    return (
        Equation(op, (x,), tuple([params[name] for name in op.params]), total, source=equation.source),
        Equation(OPS["divide"], (total, count), (), v, source=equation.source),
    )


class _Schedule:
    """The equations of a program in an order in which several sums are added at the same time.

    Args:
        program: the program.
        sums: the sums that may be a part of a message, by the number of their equation.

    Attributes:
        equations: the equations.
        buckets: the numbers of the sums of each message.
    """

    def __init__(self, program: Program, sums: Mapping[int, _Sum]) -> None:
        self.equations: list[Equation] = []
        self.buckets: list[list[int]] = []
        self._sums = sums
        self._open: dict[Any, list[int]] = {}
        self._later: list[Equation] = []
        self._missing: set[Var] = set()
        for k, equation in enumerate(program.equations):
            if k in sums:
                if not self._missing.isdisjoint(equation.reads()):
                    self._close()
                self._add(k)
            elif self._missing.isdisjoint(equation.reads()):
                self.equations.append(equation)
            else:
                self._later.append(equation)
                self._missing.update(equation.makes())
        self._close()

    def _add(self, k: int) -> None:
        entry = self._sums[k]
        bucket = self._open.get(entry.key, [])
        if sum([self._sums[n].equation.results.kind.nbytes for n in [*bucket, k]]) > _MOST_BYTES:
            self._close()
        self.equations += entry.before()
        self._open.setdefault(entry.key, []).append(k)
        self._missing.update(entry.equation.makes())

    def _close(self) -> None:
        """Adds the open sums, and the equations that need them."""
        for bucket in self._open.values():
            entries = [self._sums[k] for k in bucket]
            self.equations.append(
                Equation(COMMON_SUM, tuple([s.partials for s in entries]), (), tuple([s.total for s in entries]))
            )
            self.equations += [e for s in entries for e in s.after]
        self.buckets += self._open.values()
        self.equations += self._later
        self._open, self._later, self._missing = {}, [], set()
