"""The table of NumPy's functions that are not called by their own names and arguments here.

A call of NumPy's function with a tensor is one of the function of the same name in the package: see
`shardtensor.functions.numpy.translated_calls`, which also finds out how the arguments correspond. The rows here are the
exceptions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor.backend.device import HOST, HostArray
from shardtensor.backend.exclusive_memory import lender_of
from shardtensor.backend.registry import backend_of
from shardtensor.core import ABOVE, call
from shardtensor.errors import ArgumentError, ArgumentTypeError, RangeError
from shardtensor.tensor.conversions import is_column_major
from shardtensor.tensor.handle import Handle
from shardtensor.tensor.nested_lists import from_lists
from shardtensor.tensor.numpy_protocols import UFUNC_NAMES
from shardtensor.tensor.ownership import storage_of

Function = Callable[..., Any]

NUMPY_NAMES = {
    "absolute": "abs", "amax": "max", "amin": "min", "around": "round",
    "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan",
    "arctan2": "atan2", "arctanh": "atanh", "bitwise_not": "bitwise_invert", "concatenate": "concat",
    "conjugate": "conj", "invert": "bitwise_invert", "left_shift": "bitwise_left_shift", "mod": "remainder",
    "power": "pow", "right_shift": "bitwise_right_shift", "true_divide": "divide",
}  # fmt: skip
"""NumPy's names of functions that have the array API standard's names here. NumPy's protocols call functions by them,
and the package has them as attributes that `dir` does not list.
"""

UFUNC_NAMES.update({u: NUMPY_NAMES.get(u.__name__, u.__name__) for u in vars(np).values() if isinstance(u, np.ufunc)})

SCIPY_UFUNCS = frozenset(["cbrt", "exp2", "expm1", "i0", "log1p", "round"])
"""Ufuncs of `scipy.special` that compute the functions of the operators of the same names."""

PARAMETER_NAMES = {"ddof": "correction", "reps": "repetitions", "rcond": "rtol"}
"""NumPy's names of parameters that have the standard's name here."""

WITHOUT_EFFECT = frozenset(["allow_pickle", "hermitian", "subok"])
"""Parameters of NumPy that change nothing here: nothing is pickled, decompositions of Hermitian matrices are those of
any matrix, and tensors have no subclasses.
"""

CAST_OPERANDS = frozenset(["concatenate", "hstack", "stack", "vstack"])
"""Functions of which the operands are cast to NumPy's argument ``dtype``, which they lack here."""

WRITTEN = {"insert": "values", "place": "vals", "put_along_axis": "values", "putmask": "values"}
"""The parameters of which lists are converted to the dtype of the array to which they are written."""

DEFAULTS: dict[str, dict[str, Any]] = {"numpy.linalg.pinv": {"rtol": 1e-15}}
"""NumPy's defaults where they are not the standard's."""


# -- functions that the package lacks, or has with other operands ----------------------------------


def _on_host(x: Any) -> Any:
    """Returns an argument with each tensor in it, also in lists, as a host array."""
    if isinstance(x, (list, tuple)):
        return type(x)(map(_on_host, x))
    return np.asarray(x) if hasattr(type(x), "__array_function__") else x


def _computed_on_host(name: str) -> Function:
    """Returns NumPy's function of host copies of its arguments."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(np, name)(*map(_on_host, args), **{key: _on_host(value) for key, value in kwargs.items()})

    return function


def _without_elements(name: str) -> Function:
    """Returns NumPy's function of arrays of the same shapes and dtypes, which occupy the memory of one element."""

    def stand_in(x: Any) -> Any:
        return np.broadcast_to(np.empty((), x.dtype), x.shape) if isinstance(x, Handle) else x

    return lambda *args, **kwargs: getattr(np, name)(
        *map(stand_in, args), **{k: stand_in(x) for k, x in kwargs.items()}
    )


def _between(name: str) -> Function:
    """Returns the function for ranges between the elements of arrays, which is imported on first use."""

    def function(*args: Any, **kwargs: Any) -> Any:
        from shardtensor.functions.numpy import grids  # Few programs need the chapter.

        return getattr(grids, f"{name}_between")(*args, **kwargs)

    return function


def _where(condition: Any, *choices: Any) -> Any:
    """`numpy.where`, which is `nonzero` of a condition without choices."""
    if not choices:
        return call("nonzero", condition)
    if len(choices) != 2:
        raise ArgumentError("where: either both or neither of x and y should be given")
    return call(
        "where", *[from_lists(x, "where") if isinstance(x, (list, tuple)) else x for x in (condition, *choices)]
    )


def _created_like(name: str) -> Function:
    """Returns NumPy's function that creates an array like another one, or of another shape on its devices."""

    def function(
        a: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, *, device: Any = None
    ) -> Any:
        return _created(name, a, (), dtype, order, shape, device)

    return function


def _full_like(
    a: Any,
    fill_value: Any,
    dtype: Any = None,
    order: str = "K",
    subok: bool = True,
    shape: Any = None,
    *,
    device: Any = None,
) -> Any:
    """`numpy.full_like`, which also takes an array that broadcasts to the result."""
    fill = from_lists(fill_value, "full_like") if isinstance(fill_value, (list, tuple)) else fill_value
    if not np.ndim(fill):
        return _created("full", a, (fill,), dtype, order, shape, device)
    result = _created("empty", a, (), dtype, order, shape, device)
    result[...] = fill
    return result


def _created(name: str, a: Any, fill: tuple[Any, ...], dtype: Any, order: str, shape: Any, device: Any) -> Any:
    is_column_major(order, f"{name}_like")  # The layout in memory is not visible.
    if shape is None:
        return call(f"{name}_like", a, *fill, dtype=dtype, device=device)
    where = a.device if device is None and isinstance(a, Handle) else device
    return call(name, shape, *fill, dtype=a.dtype if dtype is None else dtype, device=where)


def _copyto(dst: Any, src: Any, casting: Any = "same_kind", where: Any = True) -> None:
    """`numpy.copyto` to or from a tensor. Python integers must fit the dtype of ``dst``."""
    if isinstance(dst, np.ndarray):
        np.copyto(dst, np.asarray(src), casting=casting, where=np.asarray(where))
        return
    # Python scalars are weak: they take the dtype of dst where its kind allows it.
    weak = type(src) in (bool, int, float, complex)
    dtype = np.result_type(dst.dtype, src) if weak else src.dtype if hasattr(src, "dtype") else np.asarray(src).dtype
    if not np.can_cast(dtype, dst.dtype, casting):
        raise ArgumentTypeError(f"copyto: {dtype} to {dst.dtype} is not allowed by casting={casting!r}")
    try:
        src = np.asarray(src, dst.dtype) if type(src) is int else np.asarray(src) if type(src) in (list, tuple) else src
    except OverflowError as error:
        raise RangeError(f"copyto: {error}; use a dtype that holds it, or give an array, which is cast") from None
    dst[...] = src if where is True else call("where", where, src, dst)


def _copy(a: Any, order: str = "K", subok: bool = False) -> Any:
    """`numpy.copy`, whose result is an array, never a scalar."""
    if order not in ("K", "A", "C", "F"):  # The layout in memory is not visible.
        raise ArgumentTypeError(f"numpy.copy: order is {order!r}; wanted 'C', 'F', 'A' or 'K'")
    return call("asarray", a, copy=True)


def _may_share_memory(a: Any, b: Any, max_work: Any = None) -> bool:
    """`numpy.may_share_memory`: whether the extents of two tensors in one base overlap.

    A write to one of the tensors is visible in the other only if they do. For a tensor whose memory is not one host
    array, `numpy.asarray` returns a copy that is read-only, too: such an array is taken for the memory of the tensor,
    because programs that write to what they convert copy it then.
    """
    if not (isinstance(a, Handle) and isinstance(b, Handle)):
        x, array = (a, b) if isinstance(a, Handle) else (b, a)
        if not isinstance(array, np.ndarray):
            return False
        return _holds(x, array, np.may_share_memory) or (not _is_one_host_array(x) and lender_of(array) is not None)
    (base, low, high), (other, start, end) = _extent(a), _extent(b)
    return base is other and low < end and start < high


def _shares_memory(a: Any, b: Any, max_work: Any = None) -> bool:
    """`numpy.shares_memory`: whether two tensors are views of one base, and have an element in common; or a tensor and
    a host array.
    """
    if not (isinstance(a, Handle) and isinstance(b, Handle)):
        x, array = (a, b) if isinstance(a, Handle) else (b, a)
        return isinstance(array, np.ndarray) and _holds(
            x, array, functools.partial(np.shares_memory, max_work=max_work)
        )
    if not _may_share_memory(a, b):
        return False
    base = np.empty(_extent(a)[0].shape, np.int8)  # No element of it is read or written, so that it takes no memory.
    arrays = [_placed_like(x, base) for x in (a, b)]
    return bool(np.shares_memory(arrays[0], arrays[1], max_work=max_work))


def _holds(x: Any, array: HostArray, share: Callable[[Any, Any], bool]) -> bool:
    """Whether one of the arrays that hold the elements of a tensor shares memory with a host array, by ``share``."""
    storage = storage_of(x)
    if storage is None or not x._aval.backend.on_host:
        return False
    buffers = storage.buffers
    if len(buffers) == 1:
        return share(_placed_like(x, buffers[0]), array)
    return any(share(buffer, array) for buffer in buffers)  # They are joined, and copied, when a view is read.


def _is_one_host_array(x: Any) -> bool:
    """Whether `numpy.asarray` of a tensor returns its memory, whatever part of it the tensor is a view of."""
    storage = storage_of(x)
    return storage is not None and x._aval.backend.on_host and len(storage.buffers) == 1


def _placed_like(x: Any, base: Any) -> Any:
    view_spec = getattr(x._storage, "view_spec", None)
    return base if view_spec is None else view_spec.of(backend_of(HOST), base)


def _extent(x: Any) -> tuple[Any, int, int]:
    """Returns the base of a tensor, and the first index and the end of its elements in the flattened base."""
    view_spec = getattr(x._storage, "view_spec", None)
    return (x, 0, x.size) if view_spec is None else (x._storage.base, *view_spec.extent)


def _broadcast_arrays(*args: Any, subok: bool = False) -> tuple[Any, ...]:
    """`numpy.broadcast_arrays`, which also takes None and text, as matplotlib passes them: these become host arrays."""
    texts = {k: np.asarray(x) for k, x in enumerate(args) if _has_no_numbers(x)}
    arrays = [from_lists(x, "broadcast_arrays") if type(x) in (list, tuple) else x for x in args]
    for k, text in texts.items():
        arrays[k] = np.broadcast_to(np.False_, text.shape)  # It stands for the text, which tensors cannot hold.
    results = list(call("broadcast_arrays", *arrays))
    for k, text in texts.items():
        results[k] = np.broadcast_to(text, results[k].shape)
    return tuple(results)


_NUMBERS = {bool, int, float, complex}


def _has_no_numbers(x: Any) -> bool:
    """Whether an argument is None or text, or an array or a list of such objects."""
    if isinstance(x, (list, tuple)):  # Lists of many numbers are looked through at the speed of C.
        return not {*map(type, x)} <= _NUMBERS and any(map(_has_no_numbers, x))
    return x is None or isinstance(x, (str, bytes)) or getattr(getattr(x, "dtype", None), "kind", "") in {*"OSTU"}


def _svd(a: Any, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False) -> Any:
    """`numpy.linalg.svd`, which returns singular values only for ``compute_uv=False``."""
    linalg = ABOVE["array_namespace"]().linalg
    return linalg.svd(a, full_matrices=full_matrices) if compute_uv else linalg.svdvals(a)


def _qr(a: Any, mode: str = "reduced") -> Any:
    """`numpy.linalg.qr`, which returns R only for ``mode="r"``."""
    linalg = ABOVE["array_namespace"]().linalg
    return linalg.qr(a, mode="reduced").R if mode == "r" else linalg.qr(a, mode=mode)


FUNCTIONS: dict[str, Function] = {
    **{f"numpy.{name}": _computed_on_host(name) for name in ("array2string", "array_repr", "array_str", "savetxt")},
    **{f"numpy.{name}": _without_elements(name) for name in ("einsum_path", "ndim", "shape", "size")},
    **{f"numpy.{name}": _between(name) for name in ("geomspace", "linspace", "logspace")},
    **{f"numpy.{name}_like": _created_like(name) for name in ("empty", "ones", "zeros")},
    "numpy.broadcast_arrays": _broadcast_arrays,
    "numpy.copy": _copy,
    "numpy.copyto": _copyto,
    "numpy.full_like": _full_like,
    "numpy.linalg.qr": _qr,
    "numpy.linalg.svd": _svd,
    "numpy.may_share_memory": _may_share_memory,
    "numpy.put": lambda a, ind, v, mode="raise": a.put(ind, v, mode),
    "numpy.reshape": lambda a, /, shape, order="C", *, copy=None: a.reshape(shape, order=order, copy=copy),
    "numpy.shares_memory": _shares_memory,
    "numpy.where": _where,
}
"""Functions that the package lacks, or has with fewer arguments: text, files and plans, which NumPy makes of the
elements on the host or without them; metadata, copies and writes.
"""


# -- what is refused -------------------------------------------------------------------------------

_DATES = "calendars are on the host only; np.asarray(x) gives the whole array on the host"

REFUSED = {
    "numpy.busday_count": _DATES,
    "numpy.busday_offset": _DATES,
    "numpy.is_busday": _DATES,
    "numpy.datetime_as_string": "tensors have no text; np.asarray(x) gives the whole array on the host",
}
"""The reasons why functions of NumPy are not called with tensors, and what to use instead."""


def refusal(name: str) -> ArgumentTypeError:
    """Returns the error for a function of NumPy that is not called with tensors."""
    reason = REFUSED.get(name)
    told = f", since {reason}" if reason else "; np.asarray(x) gives the whole array on the host"
    return ArgumentTypeError(f"{name}: has no sharded form here{told}")
