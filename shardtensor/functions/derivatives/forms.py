"""The forms of derivatives: what an operator's row declares, so that the operator can be differentiated.

A derivative is a function of a cotangent and of the recorded call, and returns a cotangent for each operand. Most rows
have a shorter form: factors for elementwise operators, nothing but the rule string for products, a transpose for linear
operators. All of them are calls of operators, so that they run in every interpreter, and have derivatives themselves.

The shorter forms serve both directions: they also say how tangents of the operands become those of the results. From
other rows this follows by transposing them twice.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from shardtensor.core import Op
from shardtensor.core import call as call_op
from shardtensor.functions.derivatives.cotangents import Call, unbroadcast

Cotangents = Sequence[Any]
"""A cotangent for each leaf of the operands; None for an operand that gets none."""


class Derivative(abc.ABC):
    """The derivative of an operator.

    Attributes:
        takes_partial_sums: whether it passes unreduced cotangents on as they are; other derivatives get their sums.
        records: whether it records calls itself (see `Recording`).
        after_composition: whether the composition of the operator is called first, so that only the calls are recorded
            for which it returns NotImplemented.
        meets: whether it is called without a cotangent, too, since the programs of a map meet in it.
        calls_functions: whether it is that of a function, of which it calls the rule or the transposes.
    """

    takes_partial_sums = False
    after_composition = False
    records = False
    meets = False
    calls_functions = False

    def saves(self, op: Op, active: Sequence[bool]) -> Sequence[str]:
        """Returns the names of the values that the derivative needs: names of operands, or ``y`` for the result."""
        return ()

    @abc.abstractmethod
    def transposed(self, g: Any, call: Call) -> Cotangents:
        """Returns the cotangents of the operands of a call, given that of its result: for several results a list, with
        None for those that have none. Cotangents may have size 1 along dimensions along which they are constant.
        """

    def pushed(self, tangents: Sequence[Any], call: Call) -> Any:
        """Returns the tangent of the result of a call, given those of its operands, where None stands for zeros: for
        several results a list. Tangents may be smaller than their values, and of other dtypes and layouts.

        NotImplemented means that the tangent follows from `transposed`, which is linear in the cotangent.
        """
        return NotImplemented


class Elementwise(Derivative):
    """The derivative of an elementwise operator: see `elementwise`."""

    after_composition = True

    def __init__(self, factors: Sequence[Callable[..., Any] | None]) -> None:
        self.factors = factors
        self.names = [tuple(inspect.signature(f).parameters)[1:] if f else () for f in factors]

    def saves(self, op: Op, active: Sequence[bool]) -> Sequence[str]:
        """The arguments of the factors of operands that have a gradient."""
        if len(self.names) == 1:
            return self.names[0]
        saved: dict[str, None] = {}
        for is_active, names in zip(active, self.names, strict=True):
            if is_active and names:
                saved.update(dict.fromkeys(names))
        return tuple(saved)

    def transposed(self, g: Any, call: Call) -> Cotangents:
        """Multiplies the cotangent by the factors."""
        cotangents: list[Any] = []
        for k, (factor, names) in enumerate(zip(self.factors, self.names, strict=True)):
            if factor is None or not call.active[k]:
                cotangents.append(None)
                continue
            product = factor(g, *[call.saved[n] for n in names])
            cotangents.append(None if product is None else unbroadcast(product, call, k))
        return cotangents

    def pushed(self, tangents: Sequence[Any], call: Call) -> Any:
        """Adds up the products of the tangents and the factors."""
        total = None
        for t, factor, names in zip(tangents, self.factors, self.names, strict=True):
            product = None if t is None or factor is None else factor(t, *[call.saved[n] for n in names])
            if product is not None:
                total = product if total is None else call_op("add", total, product)
        return total


def elementwise(*factors: Callable[..., Any] | None) -> Derivative:
    """Returns the derivative of an elementwise operator: for each operand the product of a cotangent, the first
    argument, and the derivative; None where that is zero, in place of the function or of its result. It serves both
    directions, so that the product with a tangent has to be the same, or its real part if the result is real.

    The names of the other arguments are those of operands, or ``y`` for the result: these are saved. Operands may have
    been broadcast or cast, which need not be considered.

    >>> from shardtensor.functions.derivatives.forms import elementwise
    >>> product = elementwise(lambda g, x2: g * x2, lambda g, x1: g * x1)
    >>> product.saves(st.OPS["multiply"], (True, False))
    ('x2',)
    """
    return Elementwise(factors)


Pushed = Callable[[Sequence[Any], Call], Any]
"""A function of tangents and of the call: see `Derivative.pushed`."""


class General(Derivative):
    """A derivative that is a function: see `vjp`."""

    def __init__(
        self,
        function: Callable[[Any, Call], Any],
        saved: Sequence[str],
        pushed: Pushed | None,
        after_composition: bool,
        partial_sums: bool = False,
    ) -> None:
        self.function = function
        self.saved = saved
        self.push = pushed
        self.takes_partial_sums = partial_sums
        self.after_composition = after_composition

    def saves(self, op: Op, active: Sequence[bool]) -> Sequence[str]:
        """The names that the row gives."""
        return self.saved

    def transposed(self, g: Any, call: Call) -> Cotangents:
        """Calls the function."""
        cotangents = self.function(g, call)
        if type(cotangents) is not list:
            return [cotangents, *[None] * (len(call.active) - 1)]
        return cotangents

    def pushed(self, tangents: Sequence[Any], call: Call) -> Any:
        """Calls the function for tangents, if there is one."""
        return NotImplemented if self.push is None else self.push(tangents, call)


def linear(
    transpose: Callable[[Any, Call], Any],
    *saved: str,
    pushed: Pushed = lambda tangents, call: call.applied(tangents),
    partial_sums: bool = False,
    after_composition: bool = False,
) -> Derivative:
    """Returns the derivative of an operator that is linear in its operands.

    Args:
        transpose: a function of the cotangent and of the `Call`; it returns the cotangent of the first operand, or a
            list with one for each operand.
        saved: the names of the operands in which the operator is not linear, such as indices.
        pushed: a function of tangents of the leaves of the operands and of the `Call`; by default the operator itself.
        partial_sums: whether an unreduced cotangent is passed on as it is.
        after_composition: see `Derivative`.
    """
    return General(transpose, saved, pushed, after_composition, partial_sums)


def vjp(
    function: Callable[[Any, Call], Any], *saved: str, pushed: Pushed | None = None, after_composition: bool = False
) -> Derivative:
    """Returns a derivative that is a function of the cotangent and of the `Call`.

    Args:
        function: it returns the cotangent of the first operand, or a list with one for each operand.
        saved: the names of the operands that are saved, which it finds in ``call.saved``; ``y`` for the result.
        pushed: a function of tangents of the leaves of the operands and of the `Call`, which returns that of the
            result, or a list of several. By default it follows from ``function``, which takes about three times as
            long.
        after_composition: see `Derivative`.
    """
    return General(function, saved, pushed, after_composition)


class Recording(Derivative):
    """A derivative that records calls itself, also those of which no operand depends on a differentiated argument."""

    records = True

    @abc.abstractmethod
    def record(self, tape: Any, op: Op, operands: Any, params: Any, /) -> Any:
        """Executes a call, records it on a tape, and returns its result."""

    def transposed(self, g: Any, call: Call) -> Cotangents:
        """Is never called."""
        raise AssertionError("what it records has derivatives of its own")


class Zero(Derivative):
    """The derivative of an operator that is constant almost everywhere, or whose results are not real numbers."""

    def transposed(self, g: Any, call: Call) -> Cotangents:
        """Returns no cotangents."""
        return [None] * len(call.active)

    def pushed(self, tangents: Sequence[Any], call: Call) -> Any:
        """Returns no tangent."""
        return None


ZERO = Zero()


class Refused(Derivative):
    """Stands for the derivative of an operator that has none.

    Attributes:
        reason: the end of the sentence "it has no derivative: ...".
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def transposed(self, g: Any, call: Call) -> Cotangents:
        """Is never called."""
        raise AssertionError("such a call is refused when it is recorded")


ROWS: dict[str, Derivative] = {}
"""The derivatives by the names of operators. An operator of another package has its derivative attached to itself, by
`shardtensor.core.implements`.
"""


def rows(**derivatives: Derivative) -> None:
    """Declares the derivatives of operators, given by name: their declarations need not be loaded."""
    ROWS.update(derivatives)


def zero(names: str) -> None:
    """Declares that operators, whose names are separated by blanks, have the derivative zero."""
    rows(**dict.fromkeys(names.split(), ZERO))
