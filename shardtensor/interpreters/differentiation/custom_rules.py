"""Functions with rules for their derivatives: what `custom_vjp` and `custom_jvp` share."""

from __future__ import annotations

import abc
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, Self, TypeVar

import numpy as np

from shardtensor.backend.protocol import current_device
from shardtensor.core import Op, Operands, Params, call, innermost, interpreted_by, interpreting
from shardtensor.custom_derivatives import CustomVJPPrimal
from shardtensor.errors import ArgumentError, ArgumentTypeError, type_text
from shardtensor.functions.derivatives.cotangents import is_inexact, is_number
from shardtensor.host.units import counted
from shardtensor.interpreters.batching.batcher import Batcher
from shardtensor.interpreters.differentiation.examples import Examples, boxed
from shardtensor.interpreters.differentiation.outside import Outside
from shardtensor.interpreters.differentiation.tape import Tape
from shardtensor.interpreters.differentiation.taped_values import Taped, kind_of
from shardtensor.interpreters.nested import innermost_of
from shardtensor.tensor.operands import dtype_of, shape_of
from shardtensor.tensor.pytree import leaves, map_leaves, paths, replaced
from shardtensor.tensor.tensor import ShardedTensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class RuleCalls(Outside):
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


class Custom(abc.ABC, Generic[Arguments, Result]):
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

    @abc.abstractmethod
    def _check_rule(self) -> None:
        """Raises ArgumentError if the function has no rule yet."""

    @abc.abstractmethod
    def _recorded(self, tape: Tape, args: tuple[Any, ...], candidates: tuple[Any, ...]) -> Any:
        """Calls the rule, and records it on a tape.

        Args:
            tape: the tape.
            args: the arguments.
            candidates: those that may be differentiated.
        """

    def _check_statics(self, tape: Tape, args: tuple[Any, ...]) -> None:
        """Checks the arguments of ``nondiff_argnums``."""

    @abc.abstractmethod
    def _for_examples(self, examples: Examples) -> Self:
        """Returns the function, and its rules, for all examples of a batch."""

    def _called(self, args: tuple[Any, ...]) -> Any:
        interpreter = innermost()
        if isinstance(interpreter, Batcher) and _is_differentiated(interpreter.outer):
            return self._called_for_examples(interpreter, args)
        if not isinstance(interpreter, (Tape, Outside)):
            return self.fun(*args)  # type: ignore[call-arg]
        tape = interpreter if isinstance(interpreter, Tape) else interpreter.tape
        if tape is interpreter:
            self._check_statics(tape, args)
        candidates = tuple([x for k, x in enumerate(args) if k not in self.nondiff_argnums])
        if tape is interpreter and any(tape.active(x) is not None for x in leaves(candidates)):
            return self._recorded(tape, args, candidates)
        if isinstance(interpreter, Outside):
            outside, args = interpreter, map_leaves(interpreter.noted, args)
        else:
            outside, args = RuleCalls(tape, self._name), map_leaves(tape.constant, args)
        if _is_differentiated(outside.outer):
            with interpreted_by(outside.outer):
                return self._called(args)
        with interpreting(outside):
            return self.fun(*args)  # type: ignore[call-arg]

    def _called_for_examples(self, batcher: Batcher, args: tuple[Any, ...]) -> Any:
        examples = Examples(batcher, args, self.nondiff_argnums)
        with batcher.outside():
            result = self._for_examples(examples)._called(map_leaves(batcher.examples, args))
        del examples.batcher  # It refers to the tape, and that to the backward rule: a cycle would keep the memory.
        return boxed(batcher, result, examples.results)

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

    def _pair(self, result: Any, rule: str, wanted: str) -> tuple[Any, Any]:
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise ArgumentTypeError(f"{self._name}: {rule} returns {type_text(result)}; wanted the pair {wanted}")
        return result[0], result[1]

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


class GivenArguments:
    """The arguments of one call that may be differentiated.

    Attributes:
        tree: the arguments with their avals in place of tensors.
        values: the arguments without the tape, which nothing else writes.
        states: for each leaf the value of the tape; None if it is not differentiated.
        kinds: for each leaf its aval, or the leaf itself.
        paths: for each leaf its name in errors.
    """

    def __init__(self, tape: Tape, args: tuple[Any, ...]) -> None:
        arg_leaves = leaves(args)
        self.states: list[Taped | None] = list(map(tape.active, arg_leaves))
        primals = list(map(tape.constant, arg_leaves))
        with tape.outside():
            own = [tape.given(call("copy", x)) if type(x) is ShardedTensor else x for x in primals]
        self.values: tuple[Any, ...] = replaced(args, own)
        self.kinds = list(map(kind_of, primals))
        self.tree: tuple[Any, ...] = replaced(args, self.kinds)
        self.paths = [path for n, x in enumerate(args) for path in paths(x, f"argument {n}")]

    def marked(self) -> tuple[Any, ...]:
        """Returns the arguments with a `CustomVJPPrimal` in place of each leaf but None, which is not a leaf in JAX."""
        pairs = zip(leaves(self.values), self.states, strict=True)
        marked = [x if x is None else CustomVJPPrimal(x, state is not None) for x, state in pairs]
        return replaced(self.tree, marked)  # type: ignore[no-any-return]


def _signature(fun: Callable[..., Any]) -> inspect.Signature | None:
    """Returns the signature of a function; None for one that has none, as some of those that are written in C."""
    try:
        return inspect.signature(fun)
    except ValueError:
        return None


def _is_differentiated(outer: Callable[..., Any] | None) -> bool:
    """Whether the interpreter that has the method ``apply``, or one around it, is another tape."""
    interpreter = innermost_of(outer)
    while isinstance(interpreter, (Outside, Batcher)):
        interpreter = innermost_of(interpreter.outer)
    return isinstance(interpreter, Tape)


def with_statics(args: Sequence[Any], numbers: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Returns arguments with other values in place of those that may be differentiated."""
    remaining = iter(values)
    return [x if k in numbers else next(remaining) for k, x in enumerate(args)]


def as_tensor(x: Any) -> Any:
    """Returns an array or a number as a tensor; in a map, the arrays are those of a device."""
    return x if type(x) is ShardedTensor or current_device() is not None else call("asarray", x)


def own(y: Any) -> Any:
    """Returns a leaf of the result as a tensor of its own, if it has a derivative."""
    if type(y) is ShardedTensor:
        return call("copy", y)
    return as_tensor(y) if is_number(y) and is_inexact(dtype_of(y)) else y


def kept(x: Any) -> Any:
    """Returns a leaf of the residuals, which later writes do not change."""
    if type(x) is ShardedTensor:
        return call("copy", x)
    return x.copy() if isinstance(x, np.ndarray) else x
