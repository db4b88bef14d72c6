"""The functions that users call: each is compiled from the declared signature, so that Python binds the arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any, NoReturn

from shardtensor.declarations import Function, Op, Operands, Params
from shardtensor.errors import ArgumentTypeError, type_text
from shardtensor.hints import wrong_arguments
from shardtensor.sequences import as_tuple
from shardtensor.tracebacks import GENERATED


def dispatcher(
    op: Op, declaration: CodeType, arguments: Mapping[str, inspect.Parameter], calls: dict[str, Any]
) -> Function:
    """Makes the function that users call.

    Args:
        op: the operator.
        declaration: the code of the declared function.
        arguments: the arguments of the declared function, by name.
        calls: the functions that it calls: ``_bind(op, operands, params)``; ``_extended``, which has the options as
            well; and ``_place``, which has the argument ``out_sharding`` as well.
    """
    operands, params = _operands_and_params(op, arguments)
    result = f"_bind(_op, {operands}, {params})"
    options = op.signature.options
    named = "".join([f", {n}={n}" for n in options])
    condition = " or ".join([f"{n} is not _default_{n}" for n in options])
    if options:  # Comparing them with their defaults costs the calls without options a few nanoseconds.
        result = f"_extended(_op, {operands}, {params}{named}) if {condition} else {result}"
    if op.signature.placeable:
        result = (
            f"({result}) if out_sharding is None else "
            f"_place(_op, {operands}, {params}, out_sharding, {condition or False}{named})"
        )
    # All arguments have a default, so that `_refuse` raises the error for a call that lacks some.
    required = [n for n, a in arguments.items() if a.default is a.empty and a.kind is not a.VAR_POSITIONAL]
    only_by_position = [n for n in required if arguments[n].kind is inspect.Parameter.POSITIONAL_ONLY]
    checked = [n for n in required if n not in only_by_position[:-1]]  # A call that gives the last one gives all.
    more = "()" if any(a.kind is a.VAR_POSITIONAL for a in arguments.values()) else "_more"
    wrong = " or ".join(["_others", more, *[f"{n} is _REQUIRED" for n in checked]])
    result = f"_refuse(_op, {more}, _others, locals()) if {wrong} else {result}"
    header = _header(arguments, "*_more", "=_REQUIRED") + ", **_others"
    scope = {**calls, "_refuse": _refuse, "_REQUIRED": _REQUIRED}
    return _compiled(op, declaration, header, arguments, result, scope)


@functools.cache  # Compiled at the first use: for all operators, it takes 5 % of the import.
def splitter(op: Op) -> Callable[..., tuple[Operands, Params]]:
    """Returns the function that returns the operands and the params of a call with its arguments."""
    arguments = inspect.signature(op.dispatch).parameters
    result = ", ".join(_operands_and_params(op, arguments))
    return _compiled(op, op.dispatch.__code__, _header(arguments), arguments, result, {})


class _Required:
    """Stands for an argument that is not given."""


_REQUIRED = _Required()


def _refuse(op: Op, more: Operands, others: dict[str, Any], values: dict[str, Any]) -> NoReturn:
    """Raises the error for arguments that an operator does not take, or lacks.

    Args:
        op: the operator.
        more: the positional arguments beyond those that it takes.
        others: the keyword arguments that it does not take.
        values: the values of its arguments.
    """
    parameters = inspect.signature(op.dispatch).parameters
    required = [n for n, a in parameters.items() if a.default is a.empty and a.kind is not a.VAR_POSITIONAL]
    named = {n: values[n] for n in required if values[n] is not _REQUIRED}
    args = [named.pop(n) for n in list(named) if parameters[n].kind is inspect.Parameter.POSITIONAL_ONLY]
    if more:
        count = sum(a.kind is not a.KEYWORD_ONLY for a in parameters.values())
        args, named = [None] * count + list(more), {}
    raise ArgumentTypeError(wrong_arguments(op.error_name, parameters, args, others | named))


def _operands_and_params(op: Op, arguments: Mapping[str, inspect.Parameter]) -> tuple[str, str]:
    """Returns the sources of the tuples of operands and of parameters of a call.

    Rules, kernels and caches get a tuple of the items of a parameter that may be an iterator.
    """
    operands = f"_several(_op, {op.operands[0]})" if op.signature.variadic else f"({_listed(op.operands)})"
    params = [f"_as_tuple({n})" if "Iterable" in str(arguments[n].annotation) else n for n in op.params]
    return operands, f"({_listed(params)})"


def _listed(sources: Iterable[str]) -> str:
    """Returns the source of the items of a tuple."""
    return "".join([f"{source}, " for source in sources])


def _compiled(
    op: Op,
    declaration: CodeType,
    header: str,
    arguments: Mapping[str, inspect.Parameter],
    result: str,
    scope: dict[str, Any],
) -> Function:
    """Returns a function with the arguments ``header``, whose result is an expression, given as source.

    The function is compiled from the declared signature, so that Python binds arguments and defaults, which is ten
    times faster than `inspect.Signature.bind`. In tracebacks its line is that of the declaration.
    """
    scope = {**GENERATED, "_as_tuple": as_tuple, "_op": op, "_several": _several, **scope}
    scope |= {f"_default_{n}": a.default for n, a in arguments.items() if a.default is not a.empty}
    # Beyond the end of a line of the declaration, tracebacks mark no columns.
    exec(_code(f"def _function({header}): return {' ' * 120}{result}"), scope)
    function: Function = scope["_function"]
    function.__code__ = function.__code__.replace(
        co_name=op.name, co_filename=declaration.co_filename, co_firstlineno=declaration.co_firstlineno
    )
    return function


@functools.cache  # Many operators have the same signature, and compiling takes most of the time of a declaration.
def _code(source: str) -> Any:
    return compile(source, "<operator>", "exec")


def _header(arguments: Mapping[str, inspect.Parameter], star: str = "*", required: str = "") -> str:
    """Returns the arguments of a signature as source, with the defaults as variables, ``star`` behind those that are
    given by position, and ``required`` behind the name of each that has no default.
    """
    kinds = [a.kind for a in arguments.values()]
    parts = [
        f"*{n}" if a.kind is a.VAR_POSITIONAL
        else f"{n}{required}" if a.default is a.empty
        else f"{n}=_default_{n}"
        for n, a in arguments.items()
    ]  # fmt: skip
    positional = kinds.count(inspect.Parameter.POSITIONAL_ONLY)
    by_name = kinds.count(inspect.Parameter.KEYWORD_ONLY)
    if inspect.Parameter.VAR_POSITIONAL not in kinds and (by_name or star != "*"):
        parts.insert(len(parts) - by_name, star)
    if positional:
        parts.insert(positional, "/")
    return ", ".join(parts)


def _several(op: Op, arrays: Any) -> Operands:
    """Returns the operands of an operator that takes a sequence of arrays.

    Raises:
        ArgumentTypeError: ``arrays`` is not iterable, or it is an array and the operator accepts only lists.
    """
    if "lists only" in op.tags and hasattr(arrays, "shape"):
        raise ArgumentTypeError(
            f"{op.error_name}: {op.operands[0]} is one array of shape {tuple(arrays.shape)}, which is whole as it is; "
            "wanted the list that st.shard or st.pmap returned (st.concat joins the rows of an array)"
        )
    try:
        items = iter(arrays)
    except TypeError:
        kind = type_text(arrays)
        raise ArgumentTypeError(f"{op.error_name}: {op.operands[0]} is {kind}; wanted a list of arrays") from None
    operands = tuple(items)
    for k, item in enumerate(operands):
        if item is None:
            raise ArgumentTypeError(
                f"{op.error_name}: {op.operands[0]}[{k}] is None; wanted a tensor, an array or a scalar in its place"
            )
    return operands
