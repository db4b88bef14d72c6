"""Calls of NumPy's ufuncs with tensors: ``out``, ``where``, ``dtype``, ``casting``, and the methods of ufuncs.

The handle calls `call_ufunc` for all calls that are more than an operator of arrays. The function itself is the
operator of the ufunc's name, and what NumPy does around it is composed of operators.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.registry import array_backend
from shardtensor.core import OPS, Op, bind_into, call
from shardtensor.dispatchers import splitter
from shardtensor.errors import ArgumentError, ArgumentTypeError, AxisError, ShapeError, type_text
from shardtensor.functions.building.monoids import FOLDS
from shardtensor.functions.numpy.function_table import SCIPY_UFUNCS
from shardtensor.functions.statistics.masked_reductions import (
    is_empty,
    logical,
    mask_of,
    of_nothing,
    of_selection,
    scalar_of,
    selected,
    with_initial,
)
from shardtensor.functions.ufunc_protocol import ufunc_methods as methods
from shardtensor.host.units import counted
from shardtensor.sharding.rules import normalize_axis
from shardtensor.tensor.nested_lists import from_lists
from shardtensor.tensor.numpy_protocols import UFUNC_NAMES
from shardtensor.tensor.operands import dtype_of, shape_of
from shardtensor.tensor.tensor import ShardedTensor

Options = dict[str, Any]


def call_ufunc(ufunc: np.ufunc, method: str, inputs: Sequence[Any], options: Options) -> Any:
    """Calls a ufunc, or the method of a ufunc, with tensors among the inputs or outputs, as NumPy calls it.

    Raises:
        ArgumentTypeError: there is no operator of the ufunc, or it lacks the method or an option.
        ShapeError, AxisError, ArgumentError: the arguments are invalid, as for NumPy.
    """
    if method != "__call__" and ufunc not in UFUNC_NAMES:
        raise _missing(ufunc, f"{ufunc.__name__}.{method}")
    listed = [isinstance(x, (list, tuple)) and not (method == "at" and k == 1) for k, x in enumerate(inputs)]
    operands = [from_lists(x, ufunc.__name__) if lists else x for x, lists in zip(inputs, listed, strict=True)]
    return _METHODS[method](ufunc, operands, dict(options))


_WITH_ARRAY_API = frozenset([
    "betainc", "betaincc", "chdtr", "chdtrc", "entr", "erf", "erfc", "expit", "gammainc", "gammaincc", "gammaln", "i0",
    "i0e", "i1", "i1e", "log_ndtr", "logit", "ndtr", "ndtri", "rel_entr", "stdtr", "xlogy",
])  # fmt: skip
"""Ufuncs of scipy.special that compute tensors where SCIPY_ARRAY_API is set."""


def _operator_of(ufunc: np.ufunc, what: str, count: int) -> Op:
    name = ufunc.__name__
    is_scipys = name in SCIPY_UFUNCS and getattr(sys.modules.get("scipy.special"), name, None) is ufunc
    op: Op | None = OPS.get(name if is_scipys else UFUNC_NAMES.get(ufunc, ""))
    if op is None or len(op.operands) != count:
        raise _missing(ufunc, what)
    return op


def _missing(ufunc: np.ufunc, what: str) -> ArgumentTypeError:
    subject, way, name = f"numpy.{what}: has", "", ufunc.__name__
    if ufunc not in UFUNC_NAMES:  # A function of host arrays, such as those of SciPy.
        subject = f"{what}: is not a ufunc of NumPy, and has"
        if not any(loop.endswith("O") for loop in ufunc.types):  # There are no tensors of objects.
            way = "st.smap calls it on the part of each device, and "
        if "scipy.special" in sys.modules and name in _WITH_ARRAY_API:
            way = f"scipy.special.{name} takes tensors if SCIPY_ARRAY_API=1 is set before SciPy is imported; {way}"
    return ArgumentTypeError(f"{subject} no sharded form here; {way}np.asarray(x) gives the whole array on the host")


def _check_rest(what: str, options: Options) -> None:
    """Raises ArgumentTypeError for options that no caller has taken; the layout in memory is not visible."""
    for name in ("order", "subok"):
        options.pop(name, None)
    if options:
        raise ArgumentTypeError(
            f"numpy.{what}: has no sharded form here with {', '.join(sorted(options))}; np.asarray(x) gives the whole "
            "array on the host"
        )


# -- calls -----------------------------------------------------------------------------------------


def _call(ufunc: np.ufunc, operands: list[Any], options: Options) -> Any:
    op = _operator_of(ufunc, ufunc.__name__, len(operands))
    outs = options.pop("out", None) or (None,) * ufunc.nout
    where, casting = options.pop("where", True), options.pop("casting", "same_kind")
    signature = options.pop("signature", options.pop("sig", None))
    dtype = options.pop("dtype", None)
    params = {name: options.pop(name) for name in op.params if name in options}
    _check_rest(ufunc.__name__, options)
    if dtype is not None or signature is not None or casting != "same_kind":
        if dtype is not None:
            signature = (None,) * ufunc.nin + (np.dtype(dtype),) * ufunc.nout
        operands = _in_dtypes(ufunc, operands, signature, casting)
    mask = True
    if where is not True:
        shapes = [shape_of(x) for x in (*operands, *outs) if x is not None]
        mask = mask_of(where, _common_shape(ufunc.__name__, [np.shape(where), *shapes]))
        operands = [_harmless(ufunc, x, mask) for x in _without_scalars(ufunc, operands)]
    if len(outs) == 1 and isinstance(outs[0], ShardedTensor) and mask is True and casting == "same_kind":
        bind_into(outs[0], op, *splitter(op)(*operands, **params))  # Eager mode computes in place.
        return outs[0]
    value = op.dispatch(*operands, **params)
    results = value if isinstance(value, tuple) else (value,)
    for result, out in zip(results, outs, strict=True):
        _check_out(ufunc.__name__, result, out, casting)  # Before any of them is written.
    outputs = tuple([_stored(r, o, mask, casting) for r, o in zip(results, outs, strict=True)])
    return outputs[0] if len(outputs) == 1 else outputs


def _in_dtypes(ufunc: np.ufunc, operands: Sequence[Any], signature: Any, casting: Any) -> list[Any]:
    """Returns the operands in the dtypes in which NumPy computes, given its arguments ``signature`` and ``casting``.

    Raises:
        ArgumentTypeError: NumPy has no such loop, or does not cast an operand to its dtype.
    """
    kinds, loop = _dtypes_of(ufunc, operands, signature, casting)
    pairs = zip(operands, kinds, loop, strict=False)
    return [x if isinstance(k, type) or k == d else call("astype", x, d) for x, k, d in pairs]


def _dtypes_of(ufunc: np.ufunc, operands: Sequence[Any], signature: Any, casting: Any) -> tuple[list[Any], Any]:
    """Returns the dtypes of the operands, or the type of a Python scalar, and those in which NumPy computes."""
    kinds = [type(x) if type(x) in (int, float, complex) else dtype_of(x) for x in operands]
    try:
        named = {} if signature is None else {"signature": signature}
        return kinds, ufunc.resolve_dtypes((*kinds, *(None,) * ufunc.nout), casting=casting, **named)
    except TypeError as error:
        raise ArgumentTypeError(f"numpy.{ufunc.__name__}: {error}") from None


def _without_scalars(ufunc: np.ufunc, operands: Sequence[Any]) -> list[Any]:
    """Returns the operands with 0-d arrays in place of Python scalars, of the dtypes in which NumPy computes.

    An array of the scalar's own dtype would promote the other operands. Scalars that are compared may be beyond these
    dtypes, and are returned unchanged.
    """
    if not any(type(x) in (int, float, complex) for x in operands):
        return list(operands)
    kinds, loop = _dtypes_of(ufunc, operands, None, "same_kind")
    if loop[-1] == np.bool:
        return list(operands)
    pairs = zip(operands, kinds, loop, strict=False)
    return [call("asarray", x, dtype=d) if isinstance(kind, type) else x for x, kind, d in pairs]


_SAFE = {"arctanh": 0.5}
"""Values for which ufuncs compute a number without a warning, where that is not one."""


def _harmless(ufunc: np.ufunc, x: Any, mask: Any) -> Any:
    """Returns an operand with a harmless value in place of the elements that are not selected: NumPy neither computes
    them nor warns of them, and raises no error for them.
    """
    dtype = dtype_of(x)
    if dtype.kind in "mM" or type(x) in (int, float, complex):
        return x
    value = np.asarray(_SAFE.get(ufunc.__name__, 1), dtype)[()].item()
    return call("where", mask, x if shape_of(x) or array_backend(x) else call("asarray", x), value)


def _check_out(name: str, result: Any, out: Any, casting: Any) -> None:
    """Raises an error if a result cannot be written into ``out``, a tensor or a host array; None means no output.

    Raises:
        ArgumentTypeError: ``casting`` does not allow the dtypes, or ``out`` is not an array.
        ShapeError: the shapes do not fit.
    """
    if out is None:
        return
    if not isinstance(out, (ShardedTensor, np.ndarray)):
        raise ArgumentTypeError(f"{name}: out is {type_text(out)}; wanted a tensor or a host array")
    result_dtype = dtype_of(result)
    if not np.can_cast(result_dtype, out.dtype, casting):
        raise ArgumentTypeError(
            f"{name}: the result has dtype {result_dtype}, and casting={casting!r} does not allow out of {out.dtype}"
        )
    if _common_shape(name, [shape_of(result), out.shape]) != out.shape:
        raise ShapeError(f"{name}: the result has shape {shape_of(result)}, and out {out.shape}")


def _common_shape(name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the shape to which operands, outputs and masks broadcast.

    Raises:
        ShapeError: they do not broadcast together.
    """
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        listed = ", ".join(map(str, shapes))
        raise ShapeError(f"{name}: shapes {listed} of the operands, out and where do not broadcast together") from None


def _stored(result: Any, out: Any, mask: Any, casting: Any) -> Any:
    """Writes the selected elements of a result into ``out`` and returns it; None returns the result."""
    if out is None:
        return result
    if isinstance(out, np.ndarray):
        np.copyto(out, np.asarray(result), casting=casting, where=np.asarray(mask))
    elif mask is True:
        out[...] = call("astype", result, out.dtype, copy=False)
    else:
        bind_into(out, OPS["where"], (mask, call("astype", result, out.dtype, copy=False), out), ())
    return out


def into(what: str, result: Any, out: Any) -> Any:
    """Returns a result, written into ``out`` if that is not None. ``what`` is the name of the function in errors."""
    _check_out(what, result, out, "same_kind")
    return _stored(result, out, True, "same_kind")


# -- methods ---------------------------------------------------------------------------------------

_REDUCTIONS = {
    "add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min", "fmax": "nanmax", "fmin": "nanmin",
    "logical_and": "all", "logical_or": "any",
}  # fmt: skip
"""The operators that reduce by a ufunc."""


def _reduce(ufunc: np.ufunc, operands: list[Any], options: Options) -> Any:
    name, (x,) = ufunc.__name__, operands
    what = f"{name}.reduce"
    (out,) = options.pop("out", None) or (None,)
    axis, keepdims = options.pop("axis", 0), bool(options.pop("keepdims", False))
    dtype, where = options.pop("dtype", None), options.pop("where", True)
    initial = options.pop("initial", np._NoValue)
    _check_rest(what, options)
    if not shape_of(x) and axis in (0, -1):  # NumPy takes a scalar for one row.
        axis = None
    dtype = _dtype_of_loop(ufunc, what, dtype, out, x)
    if initial is None and (where is not True or is_empty(x, axis)):  # It states that there is no neutral element.
        raise ShapeError(f"{what}: initial is None where a result may be that of no elements; wanted a number")
    initial = None if initial is np._NoValue else initial
    if name in ("add", "multiply"):
        result = call(_REDUCTIONS[name], x, axis=axis, dtype=dtype, keepdims=keepdims, initial=initial, where=where)
    elif name in ("logical_and", "logical_or"):
        neutral = name == "logical_and"
        result = logical(_REDUCTIONS[name], neutral)(x, axis, keepdims, where=where)
        result = with_initial(name, result, initial)
    else:
        x = x if dtype is None else call("astype", x, dtype, copy=False)
        if name in _REDUCTIONS:
            result = call(_REDUCTIONS[name], x, axis=axis, keepdims=keepdims, initial=initial, where=where)
        else:
            result = _folded(ufunc, x, axis, keepdims, initial, where)
    return _reduced_into(what, result, out)


def _dtype_of_loop(ufunc: np.ufunc, what: str, dtype: Any, out: Any, x: Any) -> Any:
    """Returns the dtype in which a method of a ufunc computes: by default, as in NumPy, the one to which those of x and
    ``out`` are promoted, or None.

    Raises:
        ArgumentTypeError: NumPy has no loop of that dtype, or only one of x and ``out`` is of durations.
    """
    if out is not None and {dtype_of(x).kind, out.dtype.kind} in ({"m", "f"}, {"m", "c"}):
        raise ArgumentTypeError(f"numpy.{what}: out has dtype {out.dtype} for elements of {dtype_of(x)}")
    if dtype is None and (out is None or ufunc.__name__ in ("logical_and", "logical_or")):
        return None
    if dtype is None and (out.dtype.kind in "mM" or dtype_of(x).kind in "mM"):
        return None
    dtype = np.promote_types(dtype_of(x), out.dtype) if dtype is None else np.dtype(dtype)
    try:
        ufunc.resolve_dtypes((None, dtype, None), signature=(dtype, None, None), casting="unsafe", reduction=True)
    except TypeError as error:
        raise ArgumentTypeError(f"numpy.{what}: {error}") from None
    return dtype


def _reduced_into(what: str, result: Any, out: Any) -> Any:
    """Returns a result, written into ``out`` if that is not None, which may have any dtype, as in NumPy.

    Raises:
        ShapeError: ``out`` has another shape.
    """
    if out is None:
        return result
    if shape_of(result) != out.shape:
        raise ShapeError(f"{what}: out has shape {out.shape}, and the result {shape_of(result)}; wanted equal shapes")
    return into(what, call("astype", result, out.dtype, copy=False), out)


def _folded(ufunc: np.ufunc, x: Any, axis: Any, keepdims: bool, initial: Any, where: Any) -> Any:
    """Reduces by a ufunc that has no operator of its own.

    Raises:
        ArgumentTypeError: the ufunc is none of `FOLDS`; the result of most others depends on the order of elements.
    """
    name = ufunc.__name__
    if name not in FOLDS:
        raise ArgumentTypeError(
            f"numpy.{name}.reduce: has no sharded form here; wanted one of {', '.join((*_REDUCTIONS, *FOLDS))}, or "
            "np.asarray(x) for the whole array on the host"
        )
    x = call("astype", x, _reduced_dtype(ufunc, x), copy=False)  # It has the neutral element.
    neutral = methods.neutral_of(name, dtype_of(x))
    if is_empty(x, axis):
        return of_nothing(x, axis, keepdims, neutral if initial is None else initial)
    result = methods.fold(selected(x, where, neutral), ufunc=name, axis=axis, keepdims=keepdims)
    combined = with_initial(name, result, initial)
    if initial is None or where is True or name not in ("gcd", "hypot"):
        return combined
    # The neutral element makes `initial` positive, which it stays only where there are elements to combine it with.
    some = of_selection("any", x, where, axis, keepdims)
    return call("where", some, combined, scalar_of(initial, dtype_of(combined)))


def _reduced_dtype(ufunc: np.ufunc, x: Any) -> np.dtype[Any]:
    """Returns the dtype of a reduction.

    Raises:
        ArgumentTypeError: NumPy has no loop for the elements.
    """
    try:
        return ufunc.resolve_dtypes((None, dtype_of(x), None), reduction=True)[-1]
    except TypeError as error:
        raise ArgumentTypeError(f"numpy.{ufunc.__name__}.reduce: {error}") from None


def _axis_of(what: str, x: Any, axis: Any) -> int:
    if not shape_of(x):
        raise ArgumentTypeError(f"numpy.{what}: x has no dimensions; wanted at least one")
    axes = axis if isinstance(axis, tuple) else tuple(range(len(shape_of(x)))) if axis is None else (axis,)
    if len(axes) != 1:
        raise ArgumentError(
            f"numpy.{what}: axis is {axis} for {counted(len(shape_of(x)), 'dimension')}; wanted one axis"
        )
    try:
        return normalize_axis(axes[0], len(shape_of(x)))
    except AxisError as error:
        raise AxisError(f"numpy.{what}: {error}") from None


def _accumulate(ufunc: np.ufunc, operands: list[Any], options: Options) -> Any:
    name, (x,) = ufunc.__name__, operands
    what = f"{name}.accumulate"
    (out,) = options.pop("out", None) or (None,)
    axis, dtype = _axis_of(what, x, options.pop("axis", 0)), options.pop("dtype", None)
    _check_rest(what, options)
    dtype = _dtype_of_loop(ufunc, what, dtype, out, x)
    if name in ("add", "multiply"):
        result = call("cumulative_sum" if name == "add" else "cumulative_prod", x, axis=axis, dtype=dtype)
    else:
        _check_binary(ufunc, what)
        x = x if dtype is None else call("astype", x, dtype, copy=False)
        name = _operator_of(ufunc, what, 2).name
        result = (methods.running if name in methods.ASSOCIATIVE else methods.accumulated)(x, ufunc=name, axis=axis)
    return _reduced_into(what, result, out)


def _check_binary(ufunc: np.ufunc, what: str) -> None:
    """Raises ArgumentTypeError unless the ufunc combines two elements into one."""
    if ufunc.nin != 2 or ufunc.nout != 1 or ufunc.signature:
        raise ArgumentTypeError(f"numpy.{what}: wanted a ufunc of two arrays that returns one")


def _outer(ufunc: np.ufunc, operands: list[Any], options: Options) -> Any:
    _check_binary(ufunc, f"{ufunc.__name__}.outer")
    # NumPy makes arrays of Python scalars here, which promote as arrays do.
    a, b = [np.asarray(x) if type(x) in (bool, int, float, complex) else x for x in operands]
    if shape_of(b):
        shape = (*shape_of(a), *(1,) * len(shape_of(b)))
        a = call("reshape", a, shape) if shape_of(a) else a
    return _call(ufunc, [a, b], options)


def _reduceat(ufunc: np.ufunc, operands: list[Any], options: Options) -> Any:
    what = f"{ufunc.__name__}.reduceat"
    _check_binary(ufunc, what)
    x, indices = operands
    (out,) = options.pop("out", None) or (None,)
    axis, dtype = _axis_of(what, x, options.pop("axis", 0)), options.pop("dtype", None)
    _check_rest(what, options)
    starts = methods.positions_of(indices, what, shape_of(x)[axis])
    dtype = _dtype_of_loop(ufunc, what, dtype, out, x)
    if dtype is not None:
        x = call("astype", x, dtype, copy=False)
    name = _operator_of(ufunc, what, 2).name
    return _reduced_into(what, methods.segments(x, ufunc=name, starts=starts, axis=axis, dtype=dtype), out)


def _at(ufunc: np.ufunc, operands: list[Any], options: Options) -> None:
    what = f"{ufunc.__name__}.at"
    _check_rest(what, options)
    x, index, *values = operands
    op = _operator_of(ufunc, what, 1 + len(values))
    if not isinstance(x, ShardedTensor):
        raise ArgumentTypeError(f"numpy.{what}: a is {type_text(x)}; wanted a tensor, which is written")
    methods.update(x, index, op.name, values, what)


_METHODS: dict[str, Callable[[np.ufunc, list[Any], Options], Any]] = {
    "__call__": _call, "reduce": _reduce, "accumulate": _accumulate, "outer": _outer, "reduceat": _reduceat, "at": _at,
}  # fmt: skip
