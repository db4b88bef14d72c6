"""The one door: operators are declared, filed in `OPS`, and every call of one goes through `bind`.

A declaration is a function with a signature and a docstring and no body::

    @operator("... i k, ... k j -> ... i j", combine="sum")
    def matmul(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor: ...

The decorator files it and returns the function that users call: same signature, and for a body the call
``bind(op, operands, params)``, which hands it to the innermost interpreter. What an operator *does* is the
interpreter's
business: run now (`shardtensor.interpreters.eager`), run on one device (`shardtensor.spmd.launch`), write into a graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar, cast

import numpy as np

from shardtensor.errors import ArgumentTypeError, ShardTensorError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])

Operands = tuple[Any, ...]
Params = tuple[Any, ...]


class Op:
    """An operator as it was declared.

    Attributes:
        name: its public name.
        said: the name by which its errors go: that of the operator for which it stands in.
        operands: the names of its array arguments, in order; one name if it takes a sequence of arrays (`variadic`).
        optional: those of them that may be None.
        params: the names of its other arguments, in order. `bind` gets their values, defaults included.
        positional: how many of its arguments can be given by position.
        dispatch: the function that users call.
        split: takes what `dispatch` takes, and gives the operands and the params of the call.
        rule: how the dimensions of operands and result correspond (see `shardtensor.sharding.rules`); None for an
            operator that lays out its result itself (`mover`) or consists of others (`composite`).
        combine: the name of the monoid (see `shardtensor.functions.monoids`) that joins what shards computed where a
            dimension vanishes.
        kernel: what runs on the arrays of one device, ``kernel(xp, place, *arrays, **params)``; None stands for the
            function of the same name in the backend's namespace.
        mover: for operators that only move elements: ``mover(avals, params)`` gives the movement (see
            `shardtensor.communication.transfer`).
        composite: for operators that consist of others: a function of the operator's own arguments; it answers
            NotImplemented for those with which the operator stands for itself.
        algorithm: for operators that know better than their rule how to run distributed: ``algorithm(params,
            *tensors)``.
        window: for operators whose result NumPy gives as a view: ``window(window, *params)`` is what it sees of its
            operand (see `shardtensor.sharding.view_spec`), or None where it is a copy after all.
        is_ufunc: whether it is a ufunc of NumPy's, computed element by element.
        lists_only: whether its sequence of arrays must not be an array itself, whose rows would be taken.
        creates: whether it makes arrays anew, where its parameter ``device`` says.
    """

    __slots__ = (
        "algorithm",
        "combine",
        "composite",
        "creates",
        "dispatch",
        "error_name",
        "is_ufunc",
        "kernel",
        "lists_only",
        "movement",
        "name",
        "operands",
        "optional",
        "params",
        "positional",
        "rule",
        "split",
        "variadic",
        "window",
    )  # fmt: skip

    def __init__(
        self, function: Callable[..., Any], rule: Any, combine: str | None, error_name: str | None, lists_only: bool
    ) -> None:
        self.name = function.__name__
        self.error_name = error_name or self.name
        self.rule = rule
        self.combine = combine
        self.kernel: Callable[..., Any] | None = None
        self.movement: Callable[..., Any] | None = None
        self.composite: Callable[..., Any] | None = None
        self.algorithm: Callable[..., Any] | None = None
        self.window: Callable[..., Any] | None = None
        arguments = inspect.signature(function).parameters.values()
        kinds = {a.name: str(a.annotation) for a in arguments}
        self.operands = tuple(n for n, kind in kinds.items() if "ArrayLike" in kind)
        self.optional = tuple(n for n in self.operands if "None" in kinds[n])
        self.lists_only = lists_only
        self.variadic = any("Sequence[ArrayLike]" in kind for kind in kinds.values())
        self.params = tuple(n for n in kinds if n not in self.operands)
        self.positional = sum(a.kind is not a.KEYWORD_ONLY for a in arguments)
        self.is_ufunc = rule in ("... -> ...", "..., ... -> ...") and isinstance(getattr(np, self.name, None), np.ufunc)
        self.creates = "device" in self.params
        self.split: Callable[..., tuple[Operands, Params]]
        self.dispatch = _dispatcher(self, function)

    def __repr__(self) -> str:
        return f"<operator {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return lookup, (self.name,)


OPS: dict[str, Op] = {}
"""Every operator by its name: the one table that is documented, printed and tested."""


def lookup(name: str) -> Op:
    """The operator of that name."""
    return OPS[name]


class Interpreter(Protocol):
    """What gives a call of an operator its meaning."""

    def __call__(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """The result of ``op``. Operands are tensors, host or backend arrays, scalars or None (an optional one not
        given).
        """


_innermost: ContextVar[Interpreter | None] = ContextVar("shardtensor_interpreter", default=None)
_outermost: Interpreter
_outermost_into: Callable[..., None]


def set_default_interpreter(interpreter: Interpreter, into: Callable[..., None]) -> None:
    """Who answers when no other interpreter is entered, and who writes: called once, by the eager one."""
    global _outermost, _outermost_into
    _outermost, _outermost_into = interpreter, into


def interpret_by(interpreter: Interpreter | None) -> None:
    """Makes ``interpreter`` the innermost one for the rest of this context; None stands for the default one."""
    _innermost.set(interpreter)


def innermost() -> Interpreter | None:
    """The interpreter that is entered here, None outside of all."""
    return _innermost.get()


def bind(op: Op, operands: Operands, params: Params) -> Any:
    """Hands one call of an operator to the innermost interpreter."""
    return (_innermost.get() or _outermost)(op, operands, params)


def bind_into(out: Any, op: Op, operands: Operands, params: Params) -> None:
    """Hands one call, whose result is to be written into the tensor ``out``, to the innermost interpreter that writes:
    for ``x[i] = v`` (the operator `setitem`), ``x += y`` and ``out=``.
    """
    getattr(_innermost.get(), "into", _outermost_into)(out, op, operands, params)


def call(name: str, *operands: Any, **params: Any) -> Any:
    """The operator of that name on these arguments: for floors below the declarations."""
    return OPS[name].dispatch(*operands, **params)


def operator(
    rule: Any = None, *, combine: str | None = None, error_name: str | None = None, lists_only: bool = False
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Declares an operator; see the module's docstring and `Op`."""

    def declare(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        op = OPS[function.__name__] = Op(function, rule, combine, error_name, lists_only)
        return cast("Callable[Arguments, Result]", op.dispatch)

    return declare


def implements(function: Callable[..., Any], part: str) -> Callable[[Function], Function]:
    """Gives a declared operator its ``kernel``, ``mover``, ``composite``, ``algorithm`` or ``window``."""

    def attach(body: Function) -> Function:
        setattr(OPS[function.__name__], part, body)
        return body

    return attach


def raise_in_the_name_of(op: Op, error: ShardTensorError) -> NoReturn:
    """Raises the error, its message beginning with the operator's name unless some function's stands there already."""
    text = str(error)
    try:
        if text.partition(":")[0].isidentifier():
            raise error
        raise type(error)(f"{op.error_name}: {text}") from None
    finally:
        del error  # else it and this frame would keep each other, and the operands, alive


def _dispatcher(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that users call. It is compiled from the declared signature, so that the interpreter of Python
    itself binds arguments and defaults, which is ten times faster than `inspect.Signature.bind`.
    """
    signature = inspect.signature(function)
    scope: dict[str, Any] = {"_bind": bind, "_op": op, "_several": _several}
    plain = []
    for argument in signature.parameters.values():
        default: Any = argument.empty
        if argument.default is not argument.empty:
            scope[f"_default_{argument.name}"] = argument.default
            default = _Name(f"_default_{argument.name}")
        plain.append(argument.replace(annotation=argument.empty, default=default))
    header = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    operands = f"_several(_op, {op.operands[0]})" if op.variadic else f"({''.join(n + ', ' for n in op.operands)})"
    params = f"({''.join(n + ', ' for n in op.params)})"
    source = f"def {op.name}{header}: return _bind(_op, {operands}, {params})\n"
    source += f"def _split{header}: return {operands}, {params}"
    exec(compile(source, f"<operator {op.name}>", "exec"), scope)
    op.split = scope["_split"]
    dispatch: Callable[..., Any] = scope[op.name]
    for attribute in ("__module__", "__qualname__", "__doc__", "__annotations__"):
        setattr(dispatch, attribute, getattr(function, attribute))
    return dispatch


def _several(op: Op, arrays: Any) -> Operands:
    """The operands of an operator that takes a sequence of arrays.

    Raises:
        ArgumentTypeError: it is none, or an array where only lists are meant.
    """
    if op.lists_only and hasattr(arrays, "shape"):
        raise ArgumentTypeError(
            f"{op.error_name}: {op.operands[0]} is one array of shape {tuple(arrays.shape)}, which is whole as it is; "
            "wanted the list that st.shard or st.pmap returned (st.concat joins the rows of an array)"
        )
    try:
        items = iter(arrays)
    except TypeError:
        kind = type(arrays).__name__
        raise ArgumentTypeError(f"{op.error_name}: {op.operands[0]} is a {kind}; wanted a list of arrays") from None
    return tuple(items)


class _Name:
    """Prints as a name, so that a printed signature reads its defaults from the scope."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name
