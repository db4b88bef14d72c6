"""Deferred sums: partial sums of a program that are added as late, and into as narrow a layout, as the program allows.

Eager mode adds the partial sums of a reduction at once, so that every device gets the whole result. Here the result
stays unreduced through linear operators (see `shardtensor.interpreters.execution.linear`) up to the first equation that
needs its elements. There it is added: into the layout to which all equations that need it would transfer it, by a
reduce-scatter, or, if there is no such layout, as in eager mode. Sums of several products are added once in this way.

The reductions whose partial sums meet are one decision: they are deferred if that moves fewer bytes. A value that
several equations take, such as a gradient, would be added once for each of them if it stayed unreduced: it is added
before them if that moves fewer bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from shardtensor.core import OPS
from shardtensor.interpreters.programs.passes import Setting
from shardtensor.interpreters.programs.program import Equation, Program, ValueKind, Var
from shardtensor.interpreters.programs.replay import bytes_of, plan_of, result_of, with_operands
from shardtensor.interpreters.views.views import aval_of_view
from shardtensor.sharding.layout import NamedSharding
from shardtensor.sharding.spec import P
from shardtensor.tensor.value import Aval, aval


def with_deferred_sums(program: Program, setting: Setting) -> Program:
    """Returns a program with the same results that moves fewer bytes; the program itself if none is found.

    Where no transfer moves elements, deferring sums only changes their order. Gradients are added in that of eager mode
    if the program is to have its bits.
    """
    return _deferred(program, setting, program.next_number())


def _deferred(program: Program, setting: Setting, count: int) -> Program:
    """Returns a program, or that of the function of a loop or a branch, with deferred sums; see `with_deferred_sums`.

    Args:
        program: the program.
        setting: how it will run.
        count: the number of the next value, which no value around the program has either.
    """
    program, count = _with_functions(program, setting, count)
    if not setting.moves and not (setting.exact and any(e.adds_gradients for e in program.equations)):
        return program
    candidates = [k for k, e in enumerate(program.equations) if partial_axes(e)]
    if not candidates:
        return program
    exact = setting.exact
    options = [_Deferral(program, candidates, count, exact)]
    if options[0].divides:
        options.append(_Deferral(program, candidates, count, exact, once=True))
    decisions = [(*option.decided(), option) for option in options]
    chosen, saved, best = max(decisions, key=lambda decision: decision[1])
    if not saved:
        return program
    if len(chosen) != len(candidates):
        best = _Deferral(program, chosen, count, exact, once=best is not options[0])
    return dataclasses.replace(program, equations=best.equations)


def _with_functions(program: Program, setting: Setting, count: int) -> tuple[Program, int]:
    """Returns a program with deferred sums in the functions of its loops and branches, and the number of the next
    value. (The calls of a map have one device each, and no partial sums.)
    """
    equations = list(program.equations)
    for k, equation in enumerate(equations):
        if equation.op.signature.functions and equation.op.name != "map_shards":
            programs = {}
            for number, function in equation.programs.items():
                programs[number] = _deferred(function, setting, count)
                count = max(count, programs[number].next_number())
            if any(programs[number] is not function for number, function in equation.programs.items()):
                equations[k] = dataclasses.replace(equation, programs=programs)
    is_same = all(before is after for before, after in zip(program.equations, equations, strict=True))
    return (program if is_same else dataclasses.replace(program, equations=equations)), count


def partial_axes(equation: Equation) -> Sequence[str]:
    """Returns the mesh axes along which an equation adds partial sums that it could leave."""
    op = equation.op
    if op.combine != "sum" or equation.writes or equation.into is not None or op.params[-1:] == ("layout",):
        return ()
    if type(equation.results) is not Var or not isinstance(equation.results.kind, Aval):
        return ()
    plan = plan_of(equation)
    mesh = equation.results.kind.sharding.mesh
    if plan is None or not op.placed or plan.result.sharding.memory_kind != "device":  # Partial sums stay on devices.
        return ()
    return [axis for axis in plan.partial_axes if mesh.shape[axis] > 1]


def without_addition(equation: Equation, axes: Sequence[str], number: int) -> Equation | None:
    """Returns a reduction that leaves its partial sums along mesh axes, as a value with that number; None if it adds
    them nevertheless.
    """
    op, kind = equation.op.placed, equation.results.kind
    assert op is not None
    spec = P(*kind.sharding.spec.chains_of(kind.ndim), unreduced=frozenset(axes))
    partial = dataclasses.replace(equation, op=op, params=(*equation.params, kind.sharding.with_spec(spec)))
    result = result_of(partial)
    return (
        dataclasses.replace(partial, results=Var(number, result)) if result is not None and result.unreduced else None
    )


class _Deferral:
    """A program in which the sums of some reductions are deferred.

    Args:
        program: the program.
        deferred: the reductions, as numbers of equations.
        count: the number of the next value.
        exact: whether sums stay unreduced only through operators that do not change bits.
        once: whether values that several equations take are added before these.

    Attributes:
        equations: the equations.
        divides: whether several equations take a value that is unreduced.
    """

    def __init__(
        self, program: Program, deferred: Sequence[int], count: int, exact: bool, once: bool = False
    ) -> None:  # fmt: skip
        self.equations: list[Equation] = []
        self.divides = False
        self._once = once
        self._count = count
        self._exact = exact
        self._unreduced: dict[Var, Var] = {}  # by the value of the program that is their sum
        self._narrow: dict[Var, Var] = {}  # the sums in a layout of their own, likewise
        self._added: set[Var] = set()
        self._late: set[Var] = set()  # the values that eager mode computes of sums, and not of partial sums
        self._bits: dict[Var, int] = {}  # the reductions that a value of the program is made of
        self._touched: list[tuple[int, list[Equation], list[Equation]]] = []
        self._outputs = {*program.outputs, *program.writes.values()}
        self._users = {v: [program.equations[k] for k in users if k >= 0] for v, users in program.users().items()}
        numbers = {k: bit for bit, k in enumerate(deferred)}
        self._deferred = list(deferred)
        for k, equation in enumerate(program.equations):
            equations = self._reduction(equation, 1 << numbers[k]) if k in numbers else self._rewritten(equation)
            self.equations += equations
        for v in sorted(self._unreduced, key=lambda v: v.number):
            if v in self._outputs and v not in self._added:
                self.equations.append(self._addition(v))
                self._touched.append((self._bits[v], [], self.equations[-1:]))

    def _new(self, kind: ValueKind) -> Var:
        v = Var(self._count, kind)
        self._count += 1
        return v

    def _reduction(self, equation: Equation, bit: int) -> list[Equation]:
        """Returns the reduction without the sum of its partial results."""
        v, axes = equation.results, partial_axes(equation)
        before = self._rewritten(equation)  # Its operands may be unreduced themselves.
        equation = before[-1]
        if type(equation.results) is not Var or equation.results is not v:
            return before
        partial = without_addition(equation, axes, self._count)
        if partial is None:
            return before
        self._count += 1
        self._unreduced[v], self._bits[v] = partial.results, bit
        self._touched.append((bit, [equation], [partial]))
        return [*before[:-1], partial]

    def _rewritten(self, equation: Equation) -> list[Equation]:
        """Returns an equation, which takes unreduced operands where it is linear in them, after the sums of others."""
        sums = [v for v in equation.reads() if v in self._unreduced]
        if not sums:
            return [equation]
        bits = 0
        for v in sums:
            bits |= self._bits[v]
        linear = self._linear(equation)
        if linear is not None:
            value, v = linear.results.kind, equation.results
            self.divides = self.divides or any(map(self._divides, sums))
            if value.unreduced:
                self._unreduced[v], self._bits[v] = self._new(value), bits
                linear.results = self._unreduced[v]
                is_early = equation.adds_gradients or "same elements" in equation.op.tags
                if not is_early or not self._late.isdisjoint(sums):
                    self._late.add(v)
            self._touched.append((bits, [equation], [linear]))
            return [linear]
        additions = [self._addition(v) for v in sums if v not in self._added]
        narrow = {v: self._narrow[v] for v in sums if v in self._narrow}
        changed = with_operands(equation, narrow) if narrow else equation
        self._touched.append((bits, [equation], [*additions, changed]))
        return [*additions, changed]

    def _linear(self, equation: Equation) -> Equation | None:
        """Returns an equation that is linear in its unreduced operands, or transfers them, with these operands; its
        result has the kind that it then has. None for another equation.
        """
        if equation.writes or equation.programs or type(equation.results) is not Var:
            return None
        is_as_eager = equation.adds_gradients and self._late.isdisjoint(equation.reads())
        if self._exact and "exact" not in equation.op.tags and not is_as_eager:
            return None
        taken = {v: u for v, u in self._unreduced.items() if v not in self._narrow}
        if any(v in self._narrow or (self._once and self._divides(v)) for v in equation.reads()):
            return None
        changed = with_operands(equation, taken)
        if equation.into is not None:
            (base,), view_spec = changed.operands, equation.into
            value = aval_of_view(base.kind, view_spec.chains, view_spec.shape, view_spec.part, base.kind.unreduced)
            write = dataclasses.replace(changed, results=Var(-1, value), window=value)
            return write if view_spec.part is None else None
        result = result_of(changed)
        moved = equation.op.name == "transfer_to" and result == equation.results.kind
        if result is None or not (result.unreduced or moved):
            return None
        return dataclasses.replace(changed, results=Var(-1, result) if result.unreduced else equation.results)

    def _divides(self, v: Var) -> bool:
        """Returns whether several equations take a value that is unreduced."""
        return v in self._unreduced and len(self._users[v]) + (v in self._outputs) > 1

    def _addition(self, v: Var) -> Equation:
        """Returns the equation that adds partial sums."""
        self._added.add(v)
        kind, target = v.kind, self._narrow_layout(v)
        assert isinstance(kind, Aval)
        sharding, total = kind.sharding, v
        if target is not None:
            sharding = target
            total = self._narrow[v] = self._new(aval(kind.shape, kind.dtype, target, kind.committed))
        params = (sharding, "jit", kind.committed, False, None)
        return Equation(OPS["transfer_to"], (self._unreduced[v],), params, total)

    def _narrow_layout(self, v: Var) -> NamedSharding | None:
        """Returns the layout to which all equations that need the elements of a value transfer it, if there is one."""
        targets: set[NamedSharding] = set()
        if v in self._outputs:
            return None
        for equation in self._users[v]:
            if equation.writes or self._linear(equation) is not None:
                return None
            plan = plan_of(equation)
            if plan is None:
                return None
            for x, transfer in zip(equation.operands, plan.transfers, strict=False):
                if x == v and type(x) is Var:
                    if transfer is None or transfer.target == v.kind.sharding:  # type: ignore[union-attr]
                        return None
                    targets.add(transfer.target)
        if len(targets) != 1:
            return None
        (target,) = targets
        kind = dataclasses.replace(v, kind=aval(v.kind.shape, v.kind.dtype, target, v.kind.committed))  # type: ignore[union-attr]
        same = all(result_of(with_operands(e, {v: kind})) == e.results.kind for e in self._users[v])
        return target if same else None

    # -- decisions -----------------------------------------------------------------------------------

    def decided(self) -> tuple[list[int], int]:
        """Returns the reductions that move fewer bytes if their sums are deferred, as numbers of equations of the
        program, and the number of these bytes. Those whose partial sums meet in an equation are one decision.
        """
        parts: dict[int, _Part] = {}  # by the bit of each reduction
        for bits, old, new in self._touched:
            met = list(_each_once([parts[bit] for bit in _single_bits(bits) if bit in parts]))
            part = max(met, key=lambda part: len(part.old), default=_Part(0, [], []))
            for other in met:
                if other is not part:
                    part.bits, part.old, part.new = part.bits | other.bits, part.old + other.old, part.new + other.new
            part.bits |= bits
            part.old += old
            part.new += new
            parts.update(dict.fromkeys(_single_bits(part.bits if len(met) > 1 else bits), part))
        saved = {id(part): max(bytes_of(part.old) - bytes_of(part.new), 0) for part in _each_once(parts.values())}
        chosen = [k for n, k in enumerate(self._deferred) if 1 << n in parts and saved[id(parts[1 << n])]]
        return chosen, sum(saved.values())


@dataclasses.dataclass(slots=True)
class _Part:
    """Reductions whose partial sums meet: their bits, and the equations before and after their deferral."""

    bits: int
    old: list[Equation]
    new: list[Equation]


def _each_once(parts: Iterable[_Part]) -> Iterable[_Part]:
    return {id(part): part for part in parts}.values()


def _single_bits(bits: int) -> Iterator[int]:
    """Yields the bits of a number, lowest first."""
    while bits:
        yield bits & -bits
        bits &= bits - 1
