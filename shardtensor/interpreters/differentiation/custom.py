"""`custom_vjp` and `custom_jvp`: functions with derivatives of their own, with the signatures of JAX."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Self, TypeVar

from shardtensor.backend.protocol import current_device
from shardtensor.core import call, interpreting
from shardtensor.custom_derivatives import CustomVJPPrimal, SymbolicZero, is_zero, zero_of
from shardtensor.errors import ArgumentError, ArgumentTypeError, ConcretizationError, type_text
from shardtensor.functions.derivatives.cotangents import Call, is_inexact
from shardtensor.host.units import counted
from shardtensor.interpreters.differentiation.backward import Step, pulled_back
from shardtensor.interpreters.differentiation.custom_rules import (
    Custom,
    GivenArguments,
    RuleCalls,
    as_tensor,
    kept,
    own,
    with_statics,
)
from shardtensor.interpreters.differentiation.examples import Examples
from shardtensor.interpreters.differentiation.tangents import Forward, like, pushed_forward
from shardtensor.interpreters.differentiation.tape import Linear, Tape
from shardtensor.interpreters.differentiation.taped_values import Taped, kind_of, number_of
from shardtensor.tensor.operands import dtype_of
from shardtensor.tensor.pytree import form_of, items_of, leaves, map_leaves, paths, replaced
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import Aval, summed

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Rule = TypeVar("Rule", bound=Callable[..., Any])


class custom_vjp(Custom[Arguments, Result]):  # noqa: N801
    """A function whose gradient is given by two other functions. It is used as a decorator.

    Outside of differentiation the function itself is called. In a differentiated function the forward rule is called
    in its place, with the same arguments, which are arrays as they are outside: it may compute by any means, such as
    `numpy.asarray` and kernels. The gradient then is what the backward rule returns. If it consists of operators, it
    can be differentiated again, and also in forward mode.

    Args:
        fun: the function; its arguments and results are pytrees.
        nondiff_argnums: the positions of arguments that are not differentiated, such as functions. The backward rule
            gets them first.
        nondiff_argnames: likewise, the names of arguments.

    >>> @st.custom_vjp
    ... def clipped(x):
    ...     return x
    >>> clipped.defvjp(lambda x: (x, None), lambda _, g: (st.clip(g, -1, 1),))
    >>> st.grad(lambda x: (5 * clipped(x)).sum())(st.zeros(2)).tolist()
    [1.0, 1.0]
    """

    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None
    symbolic_zeros = False

    def defvjp(
        self,
        fwd: Callable[..., tuple[Any, Any]],
        bwd: Callable[..., Any],
        symbolic_zeros: bool = False,
        optimize_remat: bool = False,
    ) -> None:
        """Defines the rules.

        Args:
            fwd: a function of the same arguments that returns a pair: the result, and residuals, which may be anything.
            bwd: a function of the arguments of ``nondiff_argnums``, the residuals, and the cotangent of the result, of
                its structure. It returns a tuple with a cotangent for each other argument, of its structure, shapes
                and dtypes. None, for an argument or a part of it, stands for zeros; so does anything for integers.
            symbolic_zeros: whether the rules get what is known of zeros, in objects of `st.custom_derivatives`. Then
                ``fwd`` gets a `CustomVJPPrimal` for each leaf of the arguments that are not in ``nondiff_argnums``,
                which says whether the leaf is differentiated; and the cotangents of results that are not used are
                `SymbolicZero` objects instead of arrays of zeros.
            optimize_remat: without effect.
        """
        for name, rule in (("fwd", fwd), ("bwd", bwd)):
            if not callable(rule):
                raise ArgumentTypeError(f"{self._name}: {name} is {type_text(rule)}; wanted a function")
        self.fwd, self.bwd, self.symbolic_zeros = fwd, bwd, symbolic_zeros

    def _check_rule(self) -> None:
        if self.fwd is None or self.bwd is None:
            raise ArgumentError(f"{self._name}: it has no rules; give them by its method defvjp(fwd, bwd)")

    def _check_statics(self, tape: Tape, args: tuple[Any, ...]) -> None:
        if any(tape.active(x) is not None for x in leaves(self._statics(args))):
            raise ArgumentError(
                f"{self._name}: an argument of nondiff_argnums is a differentiated tensor; leave it out there, since "
                "the backward rule may return None for it"
            )

    def _recorded(self, tape: Tape, args: tuple[Any, ...], candidates: tuple[Any, ...]) -> Any:
        assert self.fwd is not None
        statics, primals = self._statics(args), GivenArguments(tape, candidates)
        values = primals.marked() if self.symbolic_zeros else primals.values
        with interpreting(RuleCalls(tape, self._name)):
            pair = self.fwd(*with_statics(args, self.nondiff_argnums, values))
            value, residuals = self._pair(pair, "the rule fwd", "(result, residuals)")
        if any(type(x) is CustomVJPPrimal for x in leaves((value, residuals))):
            raise ArgumentTypeError(f"{self._name}: the rule fwd returns a CustomVJPPrimal; return its value")
        with tape.outside():
            results = list(map(own, leaves(value)))
            saved = {"residuals": list(map(kept, leaves(residuals))), "statics": statics}

        def backward(g: Any, recorded: Call) -> list[Any]:
            assert self.bwd is not None
            gradients = g if len(recorded.results) > 1 else [g]
            cotangents = [
                zero_of(kind, self.symbolic_zeros) if g is None else like(g, kind)
                for g, kind in zip(gradients, recorded.results, strict=True)
            ]
            kept = replaced(residuals, recorded.saved["residuals"])
            try:
                rule_result = self.bwd(*recorded.saved["statics"], kept, replaced(value, cotangents))
            except ConcretizationError as error:
                if not any(type(getattr(x, "_storage", None)) is Taped for x in leaves((kept, cotangents))):
                    raise
                raise ConcretizationError(
                    f"{self._name}: forward mode and second derivatives differentiate the rule bwd, which has to "
                    f"consist of operators for that; {error}"
                ) from None
            return self._cotangents(rule_result, tree, names, active)

        # The rule must not refer to the tape, nor to elements that it does not need.
        tree, names, active = primals.tree, primals.paths, [s is not None for s in primals.states]
        value, residuals = [map_leaves(kind_of, x) for x in (value, residuals)]
        return replaced(value, tape.add_function(backward, primals.states, results, saved))

    def _for_examples(self, examples: Examples) -> Self:
        def fwd(*args: Any) -> tuple[Any, Any]:
            assert self.fwd is not None
            return self._pair(self.fwd(*args), "the rule fwd", "(result, residuals)")

        def bwd(*args: Any) -> list[Any]:
            assert self.bwd is not None
            return self._leaves_of(self.bwd(*args[:-1]), args[-1])

        mapped = copy.copy(self)
        mapped.fun = examples.of_function(self.fun)
        mapped.fwd, mapped.bwd = examples.of_vjp(fwd, bwd)
        return mapped

    def _leaves_of(self, result: Any, tree: tuple[Any, ...]) -> list[Any]:
        """Returns what the backward rule returns, for each leaf of the arguments."""
        if not isinstance(result, (tuple, list)) or len(result) != len(tree):
            what = counted(len(result), "item") if isinstance(result, (tuple, list)) else type_text(result)
            raise ArgumentTypeError(
                f"{self._name}: the rule bwd returns {what}; wanted a tuple of {counted(len(tree), 'cotangent')}, "
                "one for each argument"
            )
        return [g for one, x in zip(result, tree, strict=True) for g in self._spread(one, x)]

    def _cotangents(
        self, result: Any, tree: tuple[Any, ...], names: Sequence[str], active: Sequence[bool]
    ) -> list[Any]:
        """Returns the leaves of what the backward rule returns; None for zeros.

        Args:
            result: what it returns.
            tree: the arguments, with avals in place of tensors.
            names: the names of the leaves.
            active: whether they are differentiated.
        """
        cotangents: list[Any] = []
        for g, path, kind, is_active in zip(self._leaves_of(result, tree), names, leaves(tree), active, strict=True):
            if g is None or not is_active:
                cotangents.append(None)
                continue
            self._check_like(f"the cotangent of {path} from the rule bwd", g, kind, "the argument")
            if type(g) is SymbolicZero:
                cotangents.append(None)
                continue
            where = summed(kind).sharding if isinstance(kind, Aval) and current_device() is None else None
            if type(g) is not ShardedTensor:
                g = call("asarray", g, dtype=dtype_of(kind), device=where)
            cotangents.append(g)
        return cotangents

    def _spread(self, g: Any, tree: Any) -> list[Any]:
        """Returns a cotangent for each leaf of an argument."""
        items = items_of(tree)
        if g is None or items is None:
            return [g] if items is None else [None] * len(leaves(tree))
        g_items = items_of(g)
        if g_items is None or type(g) is not type(tree) or [name for name, _ in g_items] != [name for name, _ in items]:
            raise ArgumentTypeError(
                f"{self._name}: a cotangent from the rule bwd has the structure {form_of(g)}; wanted that of the "
                f"argument, {form_of(tree)}"
            )
        return [x for (_, one), (_, item) in zip(g_items, items, strict=True) for x in self._spread(one, item)]


class custom_jvp(Custom[Arguments, Result]):  # noqa: N801
    """A function whose derivative in a direction is given by another function. It is used as a decorator.

    Outside of differentiation the function itself is called. In a differentiated function the rule is called in its
    place. It serves both modes: a gradient is the transpose of the derivative, so that the tangent of the result has to
    be a linear function of tangents that consists of operators.

    Args:
        fun: the function; its arguments and results are pytrees.
        nondiff_argnums: the positions of arguments that are not differentiated, such as functions. The rule gets them
            first.
        nondiff_argnames: likewise, the names of arguments.

    >>> @st.custom_jvp
    ... def log1pexp(x):
    ...     return st.log(1 + st.exp(x))
    >>> @log1pexp.defjvp
    ... def rule(primals, tangents):
    ...     (x,), (t,) = primals, tangents
    ...     return log1pexp(x), t / (1 + st.exp(-x))
    >>> st.grad(log1pexp)(0.0).tolist()
    0.5
    """

    jvp: Callable[..., Any] | None = None
    symbolic_zeros = False

    def defjvp(self, jvp: Rule, symbolic_zeros: bool = False) -> Rule:
        """Defines the rule, and returns it, so that this is a decorator.

        Args:
            jvp: a function of the arguments of ``nondiff_argnums``, of a tuple of the other arguments and of a tuple of
                their tangents. It returns the result and its tangent, of the same structure, shapes and dtypes.
            symbolic_zeros: whether the tangents of leaves that are not differentiated are `SymbolicZero` objects of
                `st.custom_derivatives`, which the rule may also return. Otherwise they are arrays of zeros. Those of
                integers have the dtype float0.
        """
        if not callable(jvp):
            raise ArgumentTypeError(f"{self._name}: jvp is {type_text(jvp)}; wanted a function")
        self.jvp, self.symbolic_zeros = jvp, symbolic_zeros
        return jvp

    def defjvps(self, *jvps: Callable[..., Any] | None) -> None:
        """Defines the rule by one function for each argument, or None where the derivative is zero.

        Args:
            *jvps: functions of a tangent of the argument, of the result, and of all arguments, that return a tangent of
                the result. Their sum is the derivative.

        Raises:
            ArgumentError: there are ``nondiff_argnums``.
        """
        if self.nondiff_argnums:
            raise ArgumentError(f"{self._name}: defjvps is not possible with nondiff_argnums; use defjvp")

        def rule(primals: Any, tangents: Any) -> Any:
            if len(jvps) != len(primals):
                raise ArgumentTypeError(
                    f"{self._name}: defjvps got {counted(len(jvps), 'function')}; wanted one for each of "
                    f"{counted(len(primals), 'argument')}"
                )
            value = self._called(primals)
            terms = [leaves(f(t, value, *primals)) for f, t in zip(jvps, tangents, strict=True) if f is not None]
            zeros = [zero_of(x) for x in leaves(value)]
            total = [functools.reduce(lambda a, b: a + b, some) for some in zip(*terms, strict=True)] or zeros
            return value, replaced(value, total)

        self.defjvp(rule)

    def _check_rule(self) -> None:
        if self.jvp is None:
            raise ArgumentError(f"{self._name}: it has no rule; give it by its method defjvp")

    def _recorded(self, tape: Tape, args: tuple[Any, ...], candidates: tuple[Any, ...]) -> Any:
        statics = [map_leaves(tape.constant, x) for x in self._statics(args)]
        primals = GivenArguments(tape, candidates)
        rule = RuleCalls(tape, self._name)
        if isinstance(tape, Forward):
            with interpreting(rule):
                states = zip(primals.states, primals.kinds, strict=True)
                tangents = [zero_of(kind, self.symbolic_zeros) if s is None else s.tangent for s, kind in states]
                value, tangent = self._of_rule(statics, primals.values, replaced(primals.tree, tangents))
                kinds = list(map(kind_of, leaves(value)))
                new_tangents = [
                    t if is_zero(t) else like(as_tensor(t), k) for t, k in zip(leaves(tangent), kinds, strict=True)
                ]
            with tape.outside():
                results = list(map(own, leaves(value)))
            return replaced(
                value, [tape.dual(y, None if is_zero(t) else t) for y, t in zip(results, new_tangents, strict=True)]
            )
        with interpreting(rule):
            sub = Linear()
            sub.gathers_again = tape.gathers_again
            states = zip(primals.states, primals.kinds, strict=True)
            tangents = [
                zero_of(kind, self.symbolic_zeros) if s is None else sub.variable(zero_of(kind)) for s, kind in states
            ]
            inputs = [
                None if s is None else (t._storage.number, t._aval)
                for s, t in zip(primals.states, tangents, strict=True)
            ]
            try:
                with interpreting(sub):
                    value, tangent = self._of_rule(statics, primals.values, replaced(primals.tree, tangents))
                numbers = [number_of(sub.active(t)) for t in leaves(tangent)]
                results = [own(sub.constant(y)) for y in leaves(value)]
            finally:
                sub.end()

        def steps(recorded: Call) -> list[Step]:
            return [step.with_saved(saved) for step, saved in zip(unsaved, recorded.saved["steps"], strict=True)]

        def backward(g: Any, recorded: Call) -> list[Any]:
            start: dict[int, list[Any]] = {}
            for n, one in zip(numbers, g if len(recorded.results) > 1 else [g], strict=True):
                if n is not None and one is not None:
                    start.setdefault(n, []).append(one)
            gradients = pulled_back(steps(recorded), uses, start, [i for i in inputs if i is not None])
            remaining = iter(gradients)
            return [None if i is None else next(remaining) for i in inputs]

        def forward(tangents: Sequence[Any], recorded: Call) -> list[Any]:
            pairs = zip(inputs, tangents, strict=True)
            start = {i[0]: t for i, t in pairs if i is not None and t is not None}
            return pushed_forward(steps(recorded), start, numbers)

        saved = {"steps": [step.saved for step in sub.steps]}
        # The derivatives must not refer to the tape, nor to elements that they do not need.
        unsaved, uses = [step.with_saved({}) for step in sub.steps], sub.uses
        return replaced(value, tape.add_function(backward, primals.states, results, saved, forward))

    def _for_examples(self, examples: Examples) -> Self:
        def rule(*args: Any) -> tuple[Any, Any]:
            *statics, primals, tangents = args
            return self._of_rule(statics, primals, tangents)

        mapped = copy.copy(self)
        mapped.fun = examples.of_function(self.fun)
        mapped.jvp = examples.of_jvp(rule)
        return mapped

    def _of_rule(self, statics: Sequence[Any], primals: Any, tangents: Any) -> tuple[Any, Any]:
        """Calls the rule, and returns the result and its tangent."""
        assert self.jvp is not None
        pair = self.jvp(*statics, primals, tangents)
        value, tangent = self._pair(pair, "the rule", "(result, tangent)")
        if form_of(value) != form_of(tangent):
            raise ArgumentTypeError(
                f"{self._name}: the tangent from the rule has the structure {form_of(tangent)}; wanted that of the "
                f"result, {form_of(value)}"
            )
        for y, t, path in zip(leaves(value), leaves(tangent), paths(tangent, "the tangent"), strict=True):
            if (type(t) is SymbolicZero or not is_zero(t)) and is_inexact(dtype_of(y)):
                self._check_like(f"{path} from the rule", t, kind_of(y), "the result")
        return value, tangent
