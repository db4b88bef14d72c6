"""`custom_vjp` and `custom_jvp`: functions with derivatives of their own, with the signatures of JAX."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

from shardtensor.backend.protocol import current_device
from shardtensor.core import Op, Operands, Params, call, innermost, interpreting
from shardtensor.errors import ArgumentError, ArgumentTypeError, ConcretizationError, type_text
from shardtensor.functions.derivatives.cotangents import Call, is_inexact, zeros_of
from shardtensor.host.units import counted
from shardtensor.interpreters.differentiation.cotangents import Step, pulled_back
from shardtensor.interpreters.differentiation.outside import Outside
from shardtensor.interpreters.differentiation.tangents import Forward, like, pushed_forward
from shardtensor.interpreters.differentiation.tape import Linear, Tape, innermost_of
from shardtensor.interpreters.differentiation.values import Taped, number_of
from shardtensor.tensor.operands import dtype_of, shape_of
from shardtensor.tensor.pytree import form_of, items_of, leaves, map_leaves, paths, replaced
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import Aval, reduced

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Rule = TypeVar("Rule", bound=Callable[..., Any])

_FLOAT0 = np.dtype([("float0", np.void, 0)])


class _Rule(Outside):
    """Executes calls of a rule outside of the tape that differentiates its function."""

    def __init__(self, tape: Tape, name: str) -> None:
        super().__init__(tape)
        self.name = name

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """See `Outside`.

        Raises:
            ArgumentError: the function writes a differentiated tensor that it closes over.
        """
        self.noted(out)
        super().write(out, op, operands, params)

    def noted(self, x: Any) -> Any:
        """See `Outside.noted`.

        Raises:
            ArgumentError: the tensor is a differentiated one.
        """
        if self.tape.active(x) is not None:
            raise ArgumentError(
                f"{self.name}: the function closes over a differentiated tensor, of which its rule gives no "
                "derivative; pass it as an argument, or st.stop_gradient(x) of it"
            )
        return self.tape.constant(x)


class _Custom(Generic[Arguments, Result]):
    """A function with a rule for its derivative.

    Attributes:
        fun: the function.
        nondiff_argnums: the positions of the arguments that are not differentiated.
    """

    def __init__(
        self,
        fun: Callable[Arguments, Result],
        nondiff_argnums: Sequence[int] = (),
        nondiff_argnames: Sequence[str] = (),
    ) -> None:
        kind = type(self).__name__
        if not callable(fun):
            raise ArgumentTypeError(f"{kind}: fun is {type_text(fun)}; wanted a function")
        functools.update_wrapper(self, fun, updated=())
        self.fun = fun
        self._name = f"{kind} {getattr(fun, '__name__', None) or type_text(fun)}"
        self._signature = _signature(fun)
        numbers: list[int] = [nondiff_argnums] if isinstance(nondiff_argnums, int) else list(nondiff_argnums)
        for name in [nondiff_argnames] if isinstance(nondiff_argnames, str) else nondiff_argnames:
            known = list(self._signature.parameters) if self._signature else []
            if name not in known:
                raise ArgumentError(f"{self._name}: nondiff_argnames has {name!r}; wanted names among {known}")
            numbers.append(known.index(name))
        if not all(type(n) is int and n >= 0 for n in numbers):
            raise ArgumentError(f"{self._name}: nondiff_argnums is {nondiff_argnums}; wanted positions, from 0 on")
        self.nondiff_argnums = tuple(sorted(set(numbers)))

    def __repr__(self) -> str:
        return f"<{self._name.replace(' ', ' of ', 1)}>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Calls the function; in a differentiated function, the rule if an argument is differentiated."""
        self._check_rule()
        return self._called(self._positional(args, kwargs))  # type: ignore[no-any-return]

    def _check_rule(self) -> None:
        raise NotImplementedError

    def _recorded(self, tape: Tape, args: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
        raise NotImplementedError

    def _check_statics(self, tape: Tape, args: tuple[Any, ...]) -> None:
        """Checks the arguments of ``nondiff_argnums``."""

    def _called(self, args: tuple[Any, ...]) -> Any:
        interpreter = innermost()
        if not isinstance(interpreter, (Tape, Outside)):
            return self.fun(*args)  # type: ignore[call-arg]
        tape = interpreter if isinstance(interpreter, Tape) else interpreter.tape
        if tape is interpreter:
            self._check_statics(tape, args)
        given = tuple([x for k, x in enumerate(args) if k not in self.nondiff_argnums])
        if tape is interpreter and any(tape.active(x) is not None for x in leaves(given)):
            return self._recorded(tape, args, given)
        if isinstance(interpreter, Outside):
            outside, args = interpreter, map_leaves(interpreter.noted, args)
        else:
            outside, args = _Rule(tape, self._name), map_leaves(tape.constant, args)
        if _is_differentiated(tape):
            with tape.outside():
                return self._called(args)
        with interpreting(outside):
            return self.fun(*args)  # type: ignore[call-arg]

    def _positional(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Returns the arguments by position, with defaults, which the rules get."""
        if self._signature is None:
            if kwargs:
                raise ArgumentTypeError(f"{self._name}: called with names of arguments; give them by position")
            return tuple(args)
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentTypeError(f"{self._name}: {error}") from None
        bound.apply_defaults()
        if self.nondiff_argnums and self.nondiff_argnums[-1] >= len(bound.args):
            raise ArgumentError(
                f"{self._name}: nondiff_argnums is {self.nondiff_argnums}, and the function has "
                f"{counted(len(bound.args), 'argument')}"
            )
        if bound.kwargs:
            raise ArgumentTypeError(
                f"{self._name}: {', '.join(bound.kwargs)} can be given by name only; rules get arguments by position"
            )
        return bound.args

    def _statics(self, args: Sequence[Any]) -> list[Any]:
        return [args[k] for k in self.nondiff_argnums]

    def _pair(self, made: Any, rule: str, wanted: str) -> tuple[Any, Any]:
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise ArgumentTypeError(f"{self._name}: {rule} returns {type_text(made)}; wanted the pair {wanted}")
        return made[0], made[1]

    def _check_like(self, what: str, x: Any, kind: Any, of: str) -> None:
        """Checks that what a rule returns has the shape and the dtype of a value."""
        if not (hasattr(x, "shape") and hasattr(x, "dtype")) and type(x) not in (bool, int, float, complex):
            raise ArgumentTypeError(f"{self._name}: {what} is {type_text(x)}; wanted an array like {of}")
        shape, dtype, wanted = shape_of(x), dtype_of(x), dtype_of(kind)
        is_weak = not hasattr(x, "dtype") and (dtype.kind != "c" or wanted.kind == "c")
        if shape != shape_of(kind):
            raise ArgumentError(f"{self._name}: {what} has shape {shape}; wanted that of {of}, {shape_of(kind)}")
        if dtype != wanted and not is_weak:
            raise ArgumentTypeError(f"{self._name}: {what} has dtype {dtype}; wanted that of {of}, {wanted}")


class custom_vjp(_Custom[Arguments, Result]):  # noqa: N801
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
        statics, primals = self._statics(args), _Arguments(tape, given)
        with interpreting(_Rule(tape, self._name)):
            made = self.fwd(*_with_statics(args, self.nondiff_argnums, primals.values))
            value, residuals = self._pair(made, "the rule fwd", "(result, residuals)")
        with tape.outside():
            results = list(map(_own, leaves(value)))
            saved = {"residuals": list(map(_kept, leaves(residuals))), "statics": statics}

        def backward(g: Any, recorded: Call) -> list[Any]:
            assert self.bwd is not None
            found = g if len(results) > 1 else [g]
            cotangents = [_cotangent(g, kind) for g, kind in zip(found, recorded.results, strict=True)]
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

        value, residuals = [map_leaves(_kind, tree) for tree in (value, residuals)]
        return replaced(value, tape.add_function(backward, primals.states, results, saved))

    def _cotangents(self, made: Any, primals: _Arguments) -> list[Any]:
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


class custom_jvp(_Custom[Arguments, Result]):  # noqa: N801
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
            zeros = [_zero(x) for x in leaves(value)]
            total = [functools.reduce(lambda a, b: a + b, some) for some in zip(*terms, strict=True)] or zeros
            return value, replaced(value, total)

        self.defjvp(rule)

    def _check_rule(self) -> None:
        if self.jvp is None:
            raise ArgumentError(f"{self._name}: it has no rule; give it by its method defjvp")

    def _recorded(self, tape: Tape, args: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
        statics = [map_leaves(tape.constant, x) for x in self._statics(args)]
        primals = _Arguments(tape, given)
        rule = _Rule(tape, self._name)
        if isinstance(tape, Forward):
            with interpreting(rule):
                states = zip(primals.states, primals.kinds, strict=True)
                tangents = [_zero(kind) if s is None else s.tangent for s, kind in states]
                value, tangent = self._of_rule(statics, primals, tangents)
                kinds = list(map(_kind, leaves(value)))
                made = [t if _is_zero(t) else like(_tensor(t), k) for t, k in zip(leaves(tangent), kinds, strict=True)]
            with tape.outside():
                results = list(map(_own, leaves(value)))
            return replaced(
                value, [tape.dual(y, None if _is_zero(t) else t) for y, t in zip(results, made, strict=True)]
            )
        with interpreting(rule):
            sub = Linear()
            tangents = list(map(_zero, primals.kinds))
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
                results = [_own(sub.constant(y)) for y in leaves(value)]
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

    def _of_rule(self, statics: Sequence[Any], primals: _Arguments, tangents: Sequence[Any]) -> tuple[Any, Any]:
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
            if not _is_zero(t) and is_inexact(dtype_of(y)):
                self._check_like(f"{path} from the rule", t, _kind(y), "the result")
        return value, tangent


class _Arguments:
    """The arguments of one call that may be differentiated.

    Attributes:
        tree: the arguments with their avals in place of tensors.
        values: the arguments without the tape, which no one else writes.
        states: for each leaf the value of the tape; None if it is not differentiated.
        kinds: for each leaf its aval, or the leaf itself.
        paths: for each leaf its name in errors.
    """

    def __init__(self, tape: Tape, given: tuple[Any, ...]) -> None:
        found = leaves(given)
        self.states: list[Taped | None] = list(map(tape.active, found))
        primals = list(map(tape.constant, found))
        with tape.outside():
            own = [call("copy", x) if type(x) is ShardedTensor else x for x in primals]
        self.values: tuple[Any, ...] = replaced(given, own)
        self.kinds = list(map(_kind, primals))
        self.tree: tuple[Any, ...] = replaced(given, self.kinds)
        self.paths = [path for n, x in enumerate(given) for path in paths(x, f"argument {n}")]


def _signature(fun: Callable[..., Any]) -> inspect.Signature | None:
    """Returns the signature of a function; None for one that has none, as some of those that are written in C."""
    try:
        return inspect.signature(fun)
    except ValueError:
        return None


def _is_differentiated(tape: Tape) -> bool:
    """Whether another tape is around a tape."""
    interpreter = innermost_of(tape.outer)
    while isinstance(interpreter, Outside):
        interpreter = innermost_of(interpreter.tape.outer)
    return isinstance(interpreter, Tape)


def _with_statics(args: Sequence[Any], numbers: Sequence[int], values: Sequence[Any]) -> list[Any]:
    given = iter(values)
    return [x if k in numbers else next(given) for k, x in enumerate(args)]


def _kind(x: Any) -> Any:
    return x._aval if type(x) is ShardedTensor else x


def _is_number(x: Any) -> bool:
    return isinstance(x, Aval) or hasattr(x, "dtype") or type(x) in (bool, int, float, complex)


def _is_zero(t: Any) -> bool:
    return t is None or getattr(t, "dtype", None) == _FLOAT0


def _zero(x: Any) -> Any:
    """Returns the tangent of a value that is not differentiated, or its cotangent; None for what is no number."""
    kind = _kind(x)
    if not _is_number(kind):
        return None
    return zeros_of(kind) if is_inexact(dtype_of(kind)) else np.zeros(shape_of(kind), _FLOAT0)


def _cotangent(g: Any, kind: Any) -> Any:
    return _zero(kind) if g is None else like(g, kind)


def _tensor(x: Any) -> Any:
    return x if type(x) is ShardedTensor or current_device() is not None else call("asarray", x)


def _own(y: Any) -> Any:
    """Returns a leaf of the result as a tensor of its own, if it has a derivative."""
    if type(y) is ShardedTensor:
        return call("copy", y)
    return _tensor(y) if _is_number(y) and is_inexact(dtype_of(y)) else y


def _kept(x: Any) -> Any:
    """Returns a leaf of the residuals, which later writes do not change."""
    if type(x) is ShardedTensor:
        return call("copy", x)
    return x.copy() if isinstance(x, np.ndarray) else x
