"""Calls of NumPy's functions with tensors: the functions of the same names in the package.

Each of NumPy's modules has its functions in the module of the same name here, which is imported on first use. A
function that has NumPy's parameters is called with the same arguments. Otherwise arguments are translated by the names
of the parameters in both signatures: the positional-only ones here have other names, but are in the same order. The
exceptions are the rows of `shardtensor.functions.numpy.function_table`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.core import ABOVE, OPS, Function, Op, bind_into, call
from shardtensor.dispatchers import splitter
from shardtensor.errors import ArgumentTypeError, ShapeError, type_text
from shardtensor.functions.numpy.function_table import (
    CAST_OPERANDS,
    DEFAULTS,
    FUNCTIONS,
    NUMPY_NAMES,
    PARAMETER_NAMES,
    WITHOUT_EFFECT,
    WRITTEN,
    refusal,
)
from shardtensor.hints import is_known, unexpected
from shardtensor.host.units import counted
from shardtensor.tensor.handle import Handle
from shardtensor.tensor.nested_lists import from_lists
from shardtensor.tensor.tensor import ShardedTensor

_MODULES = frozenset(["numpy", "numpy.fft", "numpy.lib.stride_tricks", "numpy.linalg"])
"""NumPy's modules of which the package has the functions for tensors, in modules of the same names."""

_UNREADABLE: dict[str, Function] = {
    "concatenate": lambda arrays, /, axis=0, out=None, *, dtype=None, casting="same_kind": None,
    "dot": lambda a, b, out=None: None,
    "einsum": lambda *operands, out=None, optimize=False, dtype=None, order="K", casting="safe": None,
    "empty_like": lambda prototype, /, dtype=None, order="K", subok=True, shape=None, *, device=None: None,
}
"""The signatures of functions that `inspect.signature` cannot read in every version of NumPy, or that have keyword
arguments without names.
"""

_Parameters = dict[str, inspect.Parameter]
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


# -- arguments -------------------------------------------------------------------------------------


def with_out(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls an operator with an optional ``out=``, which is a tensor or a host array."""
    out = kwargs.pop("out", None)
    out = out[0] if isinstance(out, tuple) and len(out) == 1 else out
    if op.name in _REDUCTIONS and hasattr(out, "dtype"):
        x = args[0]
        # A scan of the same dtype is written in place, but truth values are counted in the dtype of ``out``.
        if not isinstance(x, Handle) or (x.shape, x.dtype) != (out.shape, out.dtype) or x.dtype == bool:
            return _reduced_into(op, args, kwargs, out)
    if not isinstance(out, Handle) or any(name in kwargs for name in op.signature.options):
        return _written(op.name, op.dispatch(*args, **kwargs), out)
    operands, params = splitter(op)(*args, **kwargs)
    bind_into(out, op, operands, params)
    return out


def _reduced_into(op: Op, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """Calls a reduction as NumPy does with ``out=``, which may have any dtype."""
    dtype = args[0].dtype if isinstance(args[0], (Handle, np.ndarray, np.generic)) else out.dtype
    if {dtype.kind, out.dtype.kind} in ({"m", "f"}, {"m", "c"}):
        raise ArgumentTypeError(f"{op.name}: out has dtype {out.dtype} for elements of {dtype}")
    if op.name in ("mean", "nanmean"):  # Those of integers are always computed in float64.
        chooses = dtype.kind in "fc" and np.can_cast(dtype, out.dtype)
    else:
        chooses = op.name.endswith(("sum", "prod")) and dtype.kind not in "mM"
    if chooses and out.dtype.kind not in "mM" and kwargs.get("dtype") is None:
        kwargs["dtype"] = np.promote_types(dtype, out.dtype)
    if dtype == np.float16 and op.name.endswith(("std", "var")):  # NumPy rounds results only if there is no ``out``.
        kwargs.setdefault("dtype", np.promote_types(np.float32, out.dtype if out.dtype.kind == "f" else np.float32))
    result = op.dispatch(*args, **kwargs)
    if result.shape != out.shape:
        raise ShapeError(f"{op.name}: out has shape {out.shape}, and the result {result.shape}; wanted equal shapes")
    if not op.name.endswith("std"):  # NumPy's ``sqrt`` checks that ``out`` can hold a float.
        result = call("astype", result, out.dtype, copy=False)
    return _written(op.name, result, out)


def _written(name: str, result: Any, out: Any) -> Any:
    """Returns a result, written into ``out`` if that is not None."""
    if out is None:
        return result
    if isinstance(out, Handle):
        from shardtensor.functions.ufunc_protocol.ufunc_calls import into  # Few programs give ``out``.

        return into(name, result, out)
    if not isinstance(out, np.ndarray):
        raise ArgumentTypeError(f"{name}: out is {type_text(out)}; wanted a tensor or a host array")
    np.copyto(out, np.asarray(result), casting="same_kind")
    return out


_REDUCTIONS = frozenset([
    "all", "any", "cumulative_prod", "cumulative_sum", "max", "mean", "min", "nancumprod", "nancumsum", "nanmax",
    "nanmean", "nanmin", "nanprod", "nanstd", "nansum", "nanvar", "prod", "std", "sum", "var",
])  # fmt: skip
"""Functions of which NumPy promotes the dtype to that of ``out`` where it chooses one, and that write results of any
dtype.
"""


# -- calls -----------------------------------------------------------------------------------------


def call_numpy(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls the function for tensors that has the name of a function of NumPy, with the same arguments.

    Raises:
        ArgumentTypeError: there is no such function, it is called with more positional arguments than NumPy's takes, or
            it lacks an argument that differs from NumPy's default; or the arrays are given by an iterator.
    """
    if args and type(args[0]) is not ShardedTensor and _is_iterator(args[0]):
        # NumPy has used it up to find the tensors in it.
        raise ArgumentTypeError(
            f"numpy.{function.__name__}: the first argument is {type_text(args[0])}, which can be read only "
            "once; wanted a list or a tuple of arrays"
        )
    known = _direct_call(function, len(args), *kwargs)
    if known is None:
        return _call_translated(function, args, kwargs)
    ours, count, named = known
    for (_, default, kind, is_operand), value in zip(named, (*args, *kwargs.values()), strict=False):
        given = type(value)
        if given is not ShardedTensor and (
            value is default
            or (given is kind and value == default)
            or (is_operand and (given is list or given is tuple))
        ):
            return _call_translated(function, args, kwargs)
    if len(args) > count:
        for (parameter, *_), value in zip(named[count:], args[count:], strict=False):
            kwargs[parameter] = value
        args = args[:count]
    return ours(*args, **kwargs)


def _is_iterator(x: Any) -> bool:
    """Whether an argument is an iterator. Files are iterators, too, and are no arrays."""
    return hasattr(type(x), "__next__") and not hasattr(x, "write")


_Direct = tuple[Function, int, list[tuple[str, Any, type, bool]]]
"""A function for tensors, the number of its arguments that are given by position, and of each argument of the call our
name, NumPy's default with its type, and whether it is an operand."""


@functools.cache
def _direct_call(function: Any, count: int, *keywords: str) -> _Direct | None:
    """Returns how our function is called with the values of a call of NumPy's as they are, unless these are lists or
    defaults; None if they have to be translated.

    Args:
        function: NumPy's function.
        count: the number of positional arguments.
        keywords: the names of the other arguments.

    Raises:
        ArgumentTypeError: there is no such function, or it does not take these arguments.
    """
    ours, op, translated = _counterpart(function)
    if not translated:
        return ours, count, []
    form = _call_form(function, ours, op, count, keywords)
    if form.named is None:
        return None
    named = [(mine, default, type(default), mine in form.operands) for mine, default in form.named]
    return ours, len(form.by_position), named


@functools.cache
def _counterpart(function: Any) -> tuple[Function, Op | None, bool]:
    """Returns the function for tensors, its operator if it is one, and whether arguments have to be translated.

    Raises:
        ArgumentTypeError: there is no such function.
    """
    name = f"{function.__module__}.{function.__name__}"
    if name in FUNCTIONS:
        return FUNCTIONS[name], None, False
    standard = NUMPY_NAMES.get(function.__name__, function.__name__)
    ours = getattr(_namespace(function.__module__), standard, None) if function.__module__ in _MODULES else None
    if ours is None:
        raise refusal(name)
    op = OPS.get(standard)
    if op is not None and op.dispatch is ours:
        return ours, op, True
    theirs = _parameters(function)
    return ours, None, theirs is not None and not _is_subset(theirs, inspect.signature(ours).parameters)


def _namespace(module: str) -> Any:
    """Returns the module that has the functions for tensors of one of NumPy's modules."""
    return functools.reduce(getattr, module.split(".")[1:], ABOVE["array_namespace"]())


def _parameters(function: Any) -> _Parameters | None:
    """Returns the parameters of NumPy's function; None if they cannot be read, so that they are taken for ours."""
    try:
        return dict(inspect.signature(_UNREADABLE.get(function.__name__, function)).parameters)
    except ValueError:
        return None


def _is_subset(theirs: _Parameters, ours: Any) -> bool:
    """Whether a function that takes our parameters accepts all calls of one that takes theirs."""
    mine = list(ours.values())[: len(theirs)]
    same = [(p.name, p.kind) for p in mine] == [(p.name, p.kind) for p in theirs.values()]
    return same and all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])


def _call_translated(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls our function with the arguments of a call of NumPy's, by our names of the parameters."""
    ours, op, _ = _counterpart(function)
    form = _call_form(function, ours, op, len(args), tuple(kwargs))
    name = f"{function.__module__}.{function.__name__}"
    known = _translated(name, op, form, kwargs.values() if form.variadic else (*args, *kwargs.values()))
    if missing := [parameter for parameter in form.by_position if parameter not in known]:
        raise ArgumentTypeError(f"{name}: has no sharded form here without {' and '.join(missing)}")
    joining = function.__name__ in CAST_OPERANDS
    if cast := {option: known.pop(option) for option in ("dtype", "casting") if joining and option in known}:
        joined = next(mine for _, mine, _ in form.arguments if mine in known)
        known[joined] = _cast(name, known[joined], **cast)
    positional = args if form.variadic else [known.pop(parameter) for parameter in form.by_position]
    known = DEFAULTS.get(name, {}) | known
    if op:
        return with_out(op, positional, known)
    out = known.pop("out", None)
    return _written(function.__name__, ours(*positional, **known), out)


def _translated(name: str, op: Op | None, form: _Form, values: Iterable[Any]) -> dict[str, Any]:
    """Returns the values of a call by our names of the parameters, without those that are NumPy's defaults.

    Raises:
        ArgumentTypeError: our function lacks a parameter, and the value has an effect; a value is given twice.
    """
    known: dict[str, Any] = {}
    for (theirs, mine, default), value in zip(form.arguments, values, strict=True):
        if value is default or (type(value) is type(default) in (bool, int, float, str) and value == default):
            continue
        if mine is None:
            if value is not None and not _is_ignored(theirs, value, op):
                if op and default is inspect.Parameter.empty and is_known(theirs):
                    raise ArgumentTypeError(
                        unexpected(op.error_name, list(inspect.signature(op.dispatch).parameters), theirs)
                    )
                raise ArgumentTypeError(
                    f"{name}: has no sharded form here with {theirs}={value!r:.60}; leave {theirs} out, or take the "
                    "whole array on the host with np.asarray(x)"
                )
        elif mine in known:
            raise ArgumentTypeError(f"{name}: {mine} is given twice; wanted it once")
        else:
            known[mine] = _from_lists_in(value, name.rpartition(".")[2], op) if mine in form.operands else value
    return known


def _from_lists_in(value: Any, caller: str, op: Op | None) -> Any:
    """Returns an operand with nested lists of numbers as host arrays; of a sequence of operands, those in its items."""
    if type(value) not in (list, tuple):
        return value
    if op and op.signature.variadic:
        return [from_lists(item, caller) if type(item) in (list, tuple) else item for item in value]
    return from_lists(value, caller)


def _is_ignored(name: str, value: Any, op: Op | None) -> bool:
    """Whether an argument that the function for tensors lacks has no effect."""
    if name == "order":  # The layout in memory is not visible.
        return value in ("C", "A", "K", "F" if op and op.creates else "K")
    if op and op.name == "pad":
        return name == "reflect_type" and value == "even"
    if op and op.name == "isin":  # The algorithm follows from the operands.
        return name == "assume_unique" or (name == "kind" and value in ("sort", "table"))
    if name == "kind" and op and "stable" in op.params:  # Sorting is stable by default.
        return value in ("quicksort", "heapsort", "mergesort", "stable")
    return name in WITHOUT_EFFECT


def _cast(name: str, arrays: Any, dtype: Any = None, casting: Any = "same_kind") -> list[Any]:
    """Returns arrays that are joined, in the dtype of the result.

    Raises:
        ArgumentTypeError: ``casting`` does not allow that.
    """
    items: list[Any] = [x if isinstance(x, Handle) else np.asarray(x) for x in arrays]
    target = np.result_type(*[x.dtype for x in items]) if dtype is None else np.dtype(dtype)
    for x in items:
        if not np.can_cast(x.dtype, target, casting):
            raise ArgumentTypeError(f"{name}: {x.dtype} to {target} is not allowed by casting={casting!r}")
    return items if dtype is None else [x.astype(target) for x in items]


class _Form(NamedTuple):
    """How calls of a function of NumPy, with some numbers of positional arguments and some keywords, are translated.

    Attributes:
        variadic: whether positional arguments are passed as they are, because there may be any number of them.
        by_position: the names of our positional-only parameters.
        operands: the names of the operands.
        arguments: for each argument NumPy's name, our name (None if the parameter is missing) and NumPy's default.
        named: our name and NumPy's default of each argument, if our function takes them all, as they are, unless they
            are lists or defaults; otherwise None.
    """

    variadic: bool
    by_position: list[str]
    operands: frozenset[str]
    arguments: list[tuple[str, str | None, Any]]
    named: list[tuple[str, Any]] | None


@functools.cache
def _call_form(function: Any, ours: Function, op: Op | None, count: int, keywords: tuple[str, ...]) -> _Form:
    """Returns how calls of NumPy's function, with that many positional arguments and these keywords, are translated.

    Raises:
        ArgumentTypeError: there are more positional arguments than NumPy's function takes, or one is given twice.
    """
    parameters, own = _parameters(function), inspect.signature(ours).parameters
    assert parameters is not None
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    theirs = [p.name for p in parameters.values() if p.kind in _BY_POSITION]
    positional = [] if variadic else theirs[:count]
    if count > len(theirs) and not variadic:
        raise ArgumentTypeError(
            f"{function.__name__}: {counted(count, 'argument')} by position; it takes {len(theirs)}: "
            f"{', '.join(theirs)}"
        )
    if twice := sorted({*positional} & {*keywords}):
        raise ArgumentTypeError(f"{function.__name__}: {twice[0]} is given by position and by name; wanted it once")
    by_position = [p.name for p in own.values() if p.kind is p.POSITIONAL_ONLY]
    known = {*own, "out"} - {"out_sharding"} | ({"dtype", "casting"} if function.__name__ in CAST_OPERANDS else set())
    # The operands are in the same order, but some have other names, and NumPy has parameters between them.
    mine = [n for n in op.operands if own[n].kind is not inspect.Parameter.KEYWORD_ONLY] if op else by_position
    others = [n for n in theirs if n not in known], [n for n in mine if n not in theirs]
    names = {name: name for name in known} | dict(zip(*others, strict=False))
    names |= {n: other for n, other in PARAMETER_NAMES.items() if other in known and (op or n not in known)}
    if any(p.kind is p.VAR_KEYWORD for p in own.values()):  # Files take arrays by any names.
        names = {name: name for name in keywords if name not in parameters} | names
    defaults = {p.name: p.default for p in parameters.values()}
    arguments = [(n, names.get(n), defaults.get(n, inspect.Parameter.empty)) for n in (*positional, *keywords)]
    arrays = [p.name for p in own.values() if p.annotation == "ArrayLike"]
    operands = frozenset([n for n in op.operands if n not in op.signature.trees] if op else arrays)
    operands -= {WRITTEN.get(function.__name__, "")}
    chosen = [mine for _, mine, _ in arguments]
    is_special = variadic or f"{function.__module__}.{function.__name__}" in DEFAULTS
    is_special = is_special or function.__name__ in CAST_OPERANDS or not {"out", None}.isdisjoint(chosen)
    is_special = is_special or len({*chosen}) < len(chosen) or len(positional) < len(by_position)
    named = None
    if not is_special and chosen[: len(by_position)] == by_position and tuple(chosen[len(positional) :]) == keywords:
        named = [(mine, default) for _, mine, default in arguments]
    return _Form(variadic, [] if variadic else by_position, operands, arguments, named)  # type: ignore[arg-type]
