"""`custom_vjp` and `custom_jvp`: functions with derivatives of their own, with the signatures of JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from shardtensor.backend.protocol import current_device
from shardtensor.core import call, interpreting
from shardtensor.errors import ArgumentError, ArgumentTypeError, ConcretizationError, type_text
from shardtensor.functions.derivatives.cotangents import Call, is_inexact
from shardtensor.host.units import counted
from shardtensor.interpreters.differentiation.backward import Step, pulled_back
from shardtensor.interpreters.differentiation.custom_rules import (
    Custom,
    GivenArguments,
    RuleCalls,
    as_tensor,
    cotangent_of,
    is_zero,
    kept,
    own,
    with_statics,
    zero_of,
)
from shardtensor.interpreters.differentiation.tangents import Forward, like, pushed_forward
from shardtensor.interpreters.differentiation.tape import Linear, Tape
from shardtensor.interpreters.differentiation.taped_values import Taped, kind_of, number_of
from shardtensor.tensor.operands import dtype_of
from shardtensor.tensor.pytree import form_of, items_of, leaves, map_leaves, paths, replaced
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import Aval, reduced

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
            symbolic_zeros: not supported: cotangents of results that are not used are arrays of zeros.
            optimize_remat: without effect.

        Raises:
            ArgumentError: ``symbolic_zeros`` is true.
        """
        if symbolic_zeros:
            raise ArgumentError(
                f"{self._name}: symbolic_zeros=True is not supported; leave it out, rules get zeros as arrays"
            )
        for name, rule in (("fwd", fwd), ("bwd", bwd)):
            if not callable(rule):
                raise ArgumentTypeError(f"{self._name}: {name} is {type_text(rule)}; wanted a function")
        self.fwd, self.bwd = fwd, bwd

    def _check_rule(self) -> None:
        if self.fwd is None or self.bwd is None:
            raise ArgumentError(f"{self._name}: it has no rules; give them by its method defvjp(fwd, bwd)")

    def _check_statics(self, tape: Tape, args: tuple[Any, ...]) -> None:
        if any(tape.active(x) is not None for x in leaves(self._statics(args))):
            raise ArgumentError(
                f"{self._name}: an argument of nondiff_argnums is a differentiated tensor; leave it out there, since "
                "the backward rule may return None for it"
            )

    def _recorded(self, tape: Tape, args: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
        assert self.fwd is not None
        statics, primals = self._statics(args), GivenArguments(tape, given)
        with interpreting(RuleCalls(tape, self._name)):
            made = self.fwd(*with_statics(args, self.nondiff_argnums, primals.values))
            value, residuals = self._pair(made, "the rule fwd", "(result, residuals)")
        with tape.outside():
            results = list(map(own, leaves(value)))
            saved = {"residuals": list(map(kept, leaves(residuals))), "statics": statics}

        def backward(g: Any, recorded: Call) -> list[Any]:
            assert self.bwd is not None
            found = g if len(results) > 1 else [g]
            cotangents = [cotangent_of(g, kind) for g, kind in zip(found, recorded.results, strict=True)]
            kept = replaced(residuals, recorded.saved["residuals"])
            try:
                made = self.bwd(*recorded.saved["statics"], kept, replaced(value, cotangents))
            except ConcretizationError as error:
                if not any(type(getattr(x, "_storage", None)) is Taped for x in leaves((kept, cotangents))):
                    raise
                raise ConcretizationError(
                    f"{self._name}: forward mode and second derivatives differentiate the rule bwd, which has to "
                    f"consist of operators for that; {error}"
                ) from None
            return self._cotangents(made, primals)

        value, residuals = [map_leaves(kind_of, tree) for tree in (value, residuals)]
        return replaced(value, tape.add_function(backward, primals.states, results, saved))

    def _cotangents(self, made: Any, primals: GivenArguments) -> list[Any]:
        """Returns the leaves of what the backward rule returns; None for zeros."""
        if not isinstance(made, (tuple, list)) or len(made) != len(primals.tree):
            what = counted(len(made), "item") if isinstance(made, (tuple, list)) else type_text(made)
            raise ArgumentTypeError(
                f"{self._name}: the rule bwd returns {what}; wanted a tuple of "
                f"{counted(len(primals.tree), 'cotangent')}, one for each argument"
            )
        spread = [g for one, x in zip(made, primals.tree, strict=True) for g in self._spread(one, x)]
        found: list[Any] = []
        for g, path, kind, state in zip(spread, primals.paths, primals.kinds, primals.states, strict=True):
            if g is None or state is None:
                found.append(None)
                continue
            self._check_like(f"the cotangent of {path} from the rule bwd", g, kind, "the argument")
            where = reduced(kind).sharding if isinstance(kind, Aval) and current_device() is None else None
            if type(g) is not ShardedTensor:
                g = call("asarray", g, dtype=dtype_of(kind), device=where)
            found.append(g)
        return found

    def _spread(self, g: Any, tree: Any) -> list[Any]:
        """Returns a cotangent for each leaf of an argument."""
        items = items_of(tree)
        if g is None or items is None:
            return [g] if items is None else [None] * len(leaves(tree))
        given = items_of(g)
        if given is None or type(g) is not type(tree) or [name for name, _ in given] != [name for name, _ in items]:
            raise ArgumentTypeError(
                f"{self._name}: a cotangent from the rule bwd has the structure {form_of(g)}; wanted that of the "
                f"argument, {form_of(tree)}"
            )
        return [x for (_, one), (_, item) in zip(given, items, strict=True) for x in self._spread(one, item)]


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

    def defjvp(self, jvp: Rule, symbolic_zeros: bool = False) -> Rule:
        """Defines the rule, and returns it, so that this is a decorator.

        Args:
            jvp: a function of the arguments of ``nondiff_argnums``, of a tuple of the other arguments and of a tuple of
                their tangents. It returns the result and its tangent, of the same structure, shapes and dtypes.
            symbolic_zeros: not supported: tangents of what is not differentiated are arrays of zeros; those of
                integers have the dtype float0.

        Raises:
            ArgumentError: ``symbolic_zeros`` is true.
        """
        if symbolic_zeros:
            raise ArgumentError(
                f"{self._name}: symbolic_zeros=True is not supported; leave it out, rules get zeros as arrays"
            )
        if not callable(jvp):
            raise ArgumentTypeError(f"{self._name}: jvp is {type_text(jvp)}; wanted a function")
        self.jvp = jvp
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

    def _recorded(self, tape: Tape, args: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
        statics = [map_leaves(tape.constant, x) for x in self._statics(args)]
        primals = GivenArguments(tape, given)
        rule = RuleCalls(tape, self._name)
        if isinstance(tape, Forward):
            with interpreting(rule):
                states = zip(primals.states, primals.kinds, strict=True)
                tangents = [zero_of(kind) if s is None else s.tangent for s, kind in states]
                value, tangent = self._of_rule(statics, primals, tangents)
                kinds = list(map(kind_of, leaves(value)))
                made = [t if is_zero(t) else like(as_tensor(t), k) for t, k in zip(leaves(tangent), kinds, strict=True)]
            with tape.outside():
                results = list(map(own, leaves(value)))
            return replaced(
                value, [tape.dual(y, None if is_zero(t) else t) for y, t in zip(results, made, strict=True)]
            )
        with interpreting(rule):
            sub = Linear()
            sub.gathers_again = tape.gathers_again
            tangents = list(map(zero_of, primals.kinds))
            for k, state in enumerate(primals.states):
                if state is not None:
                    tangents[k] = sub.variable(tangents[k])
            inputs = [
                None if s is None else (t._storage.number, t._aval)
                for s, t in zip(primals.states, tangents, strict=True)
            ]
            try:
                with interpreting(sub):
                    value, tangent = self._of_rule(statics, primals, tangents)
                numbers = [number_of(sub.active(t)) for t in leaves(tangent)]
                results = [own(sub.constant(y)) for y in leaves(value)]
            finally:
                sub.end()

        def steps(recorded: Call) -> list[Step]:
            return [step.with_saved(saved) for step, saved in zip(sub.steps, recorded.saved["steps"], strict=True)]

        def backward(g: Any, recorded: Call) -> list[Any]:
            start: dict[int, list[Any]] = {}
            for n, one in zip(numbers, g if len(results) > 1 else [g], strict=True):
                if n is not None and one is not None:
                    start.setdefault(n, []).append(one)
            made = pulled_back(steps(recorded), sub.uses, start, [i for i in inputs if i is not None])
            found = iter(made)
            return [None if i is None else next(found) for i in inputs]

        def forward(tangents: Sequence[Any], recorded: Call) -> list[Any]:
            pairs = zip(inputs, tangents, strict=True)
            start = {i[0]: t for i, t in pairs if i is not None and t is not None}
            return pushed_forward(steps(recorded), start, numbers)

        saved = {"steps": [step.saved for step in sub.steps]}
        sub.steps = [step.with_saved({}) for step in sub.steps]
        return replaced(value, tape.add_function(backward, primals.states, results, saved, forward))

    def _of_rule(self, statics: Sequence[Any], primals: GivenArguments, tangents: Sequence[Any]) -> tuple[Any, Any]:
        """Calls the rule, and returns the result and its tangent."""
        assert self.jvp is not None
        made = self.jvp(*statics, primals.values, replaced(primals.tree, tangents))
        value, tangent = self._pair(made, "the rule", "(result, tangent)")
        if form_of(value) != form_of(tangent):
            raise ArgumentTypeError(
                f"{self._name}: the tangent from the rule has the structure {form_of(tangent)}; wanted that of the "
                f"result, {form_of(value)}"
            )
        for y, t, path in zip(leaves(value), leaves(tangent), paths(tangent, "the tangent"), strict=True):
            if not is_zero(t) and is_inexact(dtype_of(y)):
                self._check_like(f"{path} from the rule", t, kind_of(y), "the result")
        return value, tangent
