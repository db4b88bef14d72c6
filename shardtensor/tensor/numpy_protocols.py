"""Python's operators and NumPy's protocols on tensors.

Each operator of Python, and each ufunc or function of NumPy, that is applied to a tensor calls the corresponding
operator in `OPS`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardtensor.backend.device import HOST
from shardtensor.backend.registry import array_backend, backend_of
from shardtensor.core import OPS, Op, bind_into, call
from shardtensor.errors import ArgumentTypeError, ShapeError
from shardtensor.tensor.handle import Handle
from shardtensor.tensor.numpy_compositions import COMPUTED, refusal
from shardtensor.tensor.numpy_functions import COMPOSED, NUMPY_NAMES

if TYPE_CHECKING:
    from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.numpy_extensions import call_extension, has_extension


def _is_operand(x: object) -> bool:
    return isinstance(x, (Operators, np.ndarray, np.generic, bool, int, float, complex)) or array_backend(x) is not None


def from_lists(x: list[Any] | tuple[Any, ...], caller: str) -> np.ndarray[Any, Any]:
    """Converts nested lists of numbers to a host array, as `numpy.asarray` does.

    Raises:
        ArgumentTypeError: the lists contain tensors with dimensions.
        ShapeError: the lists differ in length.
    """
    check_leaves(x, caller)
    try:
        return np.asarray(x)
    except ValueError as error:
        raise ShapeError(f"{caller}: nested lists of different lengths ({error})") from None


def check_leaves(x: list[Any] | tuple[Any, ...], caller: str) -> None:
    """Raises ArgumentTypeError if nested lists contain tensors with dimensions, which must be joined explicitly."""
    for item in x:
        if isinstance(item, (list, tuple)):
            check_leaves(item, caller)
        elif isinstance(item, Operators) and item.ndim:
            raise ArgumentTypeError(
                f"{caller}: a list of tensors is not one array; join them with st.stack, st.concat or st.unshard"
            )


def _is_list(x: object) -> bool:
    return isinstance(x, (list, tuple))


def _operand(x: Any, caller: str) -> Any:
    """Returns an operand of Python's operators, with lists converted to host arrays as NumPy's arrays do.

    Any other object gives NotImplemented, so that Python tries the reflected method of the other operand.
    """
    if _is_operand(x):
        return x
    return from_lists(x, caller) if isinstance(x, (list, tuple)) else NotImplemented


def _binary(name: str) -> tuple[Callable[[Any, Any], ShardedTensor], Callable[[Any, Any], ShardedTensor]]:
    """Returns the methods for ``self ⊕ other`` and for ``other ⊕ self``."""

    def method(self: Any, other: Any) -> ShardedTensor:
        x = _operand(other, name)
        return x if x is NotImplemented else call(name, self, x)

    def reflected(self: Any, other: Any) -> ShardedTensor:
        x = _operand(other, name)
        return x if x is NotImplemented else call(name, x, self)

    return method, reflected


def _in_place(name: str) -> Callable[[Any, Any], ShardedTensor]:
    """Returns the method for ``self ⊕= other``."""

    def method(self: Any, other: Any) -> ShardedTensor:
        x = _operand(other, name)
        if x is NotImplemented:
            return x  # type: ignore[no-any-return]
        if self._is_scalar:
            return call(name, self, x)  # type: ignore[no-any-return]
        bind_into(self, OPS[name], (self, x), ())
        return self  # type: ignore[no-any-return]

    return method


def _unary(name: str) -> Callable[[Any], ShardedTensor]:
    def method(self: Any) -> ShardedTensor:
        return call(name, self)  # type: ignore[no-any-return]

    return method


_UFUNC_CALLS = "shardtensor.functions.ufunc_calls"
"""The module of ufuncs, which is above this package, and is imported on first use."""


def with_out(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls an operator with an optional ``out=``, which is a tensor or a host array."""
    out = kwargs.pop("out", None)
    out = out[0] if isinstance(out, tuple) and len(out) == 1 else out
    if out is None:
        return op.dispatch(*args, **kwargs)
    if isinstance(out, np.ndarray):
        np.copyto(out, np.asarray(op.dispatch(*args, **kwargs)), casting="same_kind")
    elif isinstance(out, Operators) and any(name in kwargs for name in op.options):
        importlib.import_module(_UFUNC_CALLS).into(op.name, op.dispatch(*args, **kwargs), out)
    elif isinstance(out, Operators):
        operands, params = op.split(*args, **kwargs)
        bind_into(out, op, operands, params)
    else:
        raise ArgumentTypeError(f"{op.name}: out is a {type(out).__name__}; wanted a tensor or a host array")
    return out


# -- NumPy's functions -----------------------------------------------------------------------------

_WRITTEN_IN_C = {
    "concatenate": lambda arrays, /, axis=0, out=None, *, dtype=None, casting="same_kind": None,
    "empty_like": lambda prototype, /, dtype=None, order="K", subok=True, shape=None, *, device=None: None,
    "where": lambda condition, x=None, y=None, /: None,
}
"""The signatures of functions that `inspect.signature` cannot read in every version of NumPy."""

_OTHER_NAMES = {"ddof": "correction", "reps": "repetitions"}
"""NumPy's names of parameters that have the standard's name here."""

_Argument = tuple[str, str | None, Any]


@functools.cache
def _call_form(function: Any, op: Op, count: int, keywords: tuple[str, ...]) -> tuple[tuple[str, ...], list[_Argument]]:
    """Returns how calls of NumPy's function, with that many positional arguments and these keywords, are translated.

    The result has the names of the operator's positional-only parameters, and for each argument of the call NumPy's
    name, the operator's name (None if it lacks the parameter) and NumPy's default.

    Raises:
        ArgumentTypeError: there are more positional arguments than NumPy's function takes, or one is given twice.
    """
    parameters = inspect.signature(_WRITTEN_IN_C.get(function.__name__, function)).parameters.values()
    theirs = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if count > len(theirs):
        raise ArgumentTypeError(
            f"{function.__name__}: {count} arguments by position; it takes {len(theirs)}: {', '.join(theirs)}"
        )
    if twice := sorted({*theirs[:count]} & {*keywords}):
        raise ArgumentTypeError(f"{function.__name__}: {twice[0]} is given by position and by name; wanted it once")
    ours = (*op.operands, *op.params, *op.options, "out")
    # The operands are in the same order, but some have other names, and NumPy has parameters between them.
    others = [n for n in theirs if n not in ours], [n for n in op.operands if n not in theirs]
    names = {name: name for name in ours} | dict(zip(*others, strict=False))
    names |= {other: known for other, known in _OTHER_NAMES.items() if known in ours}
    defaults = {p.name: p.default for p in parameters}
    arguments = [(n, names.get(n), defaults.get(n, inspect.Parameter.empty)) for n in (*theirs[:count], *keywords)]
    own = inspect.signature(op.dispatch).parameters.values()
    return tuple([p.name for p in own if p.kind is p.POSITIONAL_ONLY]), arguments


def as_numpy(function: Any, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls an operator with the arguments of NumPy's function, positional or by NumPy's names.

    Raises:
        ArgumentTypeError: there are more positional arguments than NumPy's function takes, or an argument that the
            operator lacks differs from NumPy's default.
    """
    by_position, arguments = _call_form(function, op, len(args), tuple(kwargs))
    known: dict[str, Any] = {}
    for (name, ours, default), value in zip(arguments, (*args, *kwargs.values()), strict=True):
        if value is default or (type(value) is type(default) in (bool, int, float, str) and value == default):
            continue
        if name == "order" and ours is None and value in ("C", "A", "K", "F" if op.creates else "K"):
            continue  # The layout in memory is not visible.
        if name == "kind" and "stable" in op.params and value in ("quicksort", "heapsort", "mergesort", "stable"):
            continue  # Sorting is stable by default.
        if ours is None:
            raise ArgumentTypeError(
                f"numpy.{function.__name__}: has no sharded form here with {name}={value!r:.60}; leave {name} out, or "
                "take the whole array on the host with np.asarray(x)"
            )
        if ours in known:
            raise ArgumentTypeError(f"numpy.{function.__name__}: {ours} is given twice; wanted it once")
        listed = type(value) in (list, tuple) and ours in op.operands and not op.variadic and ours not in op.trees
        known[ours] = from_lists(value, op.name) if listed else value
    if missing := [name for name in by_position if name not in known]:
        raise ArgumentTypeError(f"numpy.{function.__name__}: has no sharded form here without {' and '.join(missing)}")
    return with_out(op, [known.pop(name) for name in by_position], known)


def _size(a: Any, axis: Any = None) -> int:
    """`numpy.size`, computed by NumPy on an array of the same shape that occupies the memory of one element."""
    return int(np.size(np.broadcast_to(np.empty(()), a.shape), axis))


def _copyto(dst: Any, src: Any, casting: Any = "same_kind", where: Any = True) -> None:
    """`numpy.copyto` to or from a tensor."""
    if isinstance(dst, np.ndarray):
        np.copyto(dst, np.asarray(src), casting=casting, where=np.asarray(where))
        return
    # Python scalars are weak: they take the dtype of dst where its kind allows it.
    weak = type(src) in (bool, int, float, complex)
    dtype = np.result_type(dst.dtype, src) if weak else src.dtype if hasattr(src, "dtype") else np.asarray(src).dtype
    if not np.can_cast(dtype, dst.dtype, casting):
        raise ArgumentTypeError(f"copyto: {dtype} to {dst.dtype} is not allowed by casting={casting!r}")
    dst[...] = src if where is True else call("where", where, src, dst)


def _copy(a: Any, order: str = "K", subok: bool = False) -> Any:
    """`numpy.copy`, whose result is an array, never a scalar."""
    if order not in ("K", "A", "C", "F"):  # The layout in memory is not visible.
        raise ArgumentTypeError(f"numpy.copy: order is {order!r}; wanted 'C', 'F', 'A' or 'K'")
    return call("asarray", a, copy=True)


def _result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    """`numpy.result_type`, of tensors among others."""
    known = [x.dtype if isinstance(x, Operators) else x for x in arrays_and_dtypes]
    return np.result_type(*known)


def _may_share_memory(a: Any, b: Any, max_work: Any = None) -> bool:
    """`numpy.may_share_memory`: whether the extents of two tensors in one base overlap.

    A write to one of the tensors is visible in the other only if they do.
    """
    if not (isinstance(a, Operators) and isinstance(b, Operators)):
        return False
    (base, low, high), (other, start, end) = _extent(a), _extent(b)
    return base is other and low < end and start < high


def _shares_memory(a: Any, b: Any, max_work: Any = None) -> bool:
    """`numpy.shares_memory`: whether two tensors are views of one base, and have an element in common."""
    if not _may_share_memory(a, b):
        return False
    base = np.empty(_extent(a)[0].shape, np.int8)  # No element of it is read or written, so that it takes no memory.
    found = [_placed_like(x, base) for x in (a, b)]
    return bool(np.shares_memory(found[0], found[1], max_work=max_work))


def _placed_like(x: Any, base: Any) -> Any:
    view_spec = getattr(x._storage, "view_spec", None)
    return base if view_spec is None else view_spec.of(backend_of(HOST), base)


def _extent(x: Any) -> tuple[Any, int, int]:
    """Returns the base of a tensor, and the first index and the end of its elements in the flattened base."""
    view_spec = getattr(x._storage, "view_spec", None)
    return (x, 0, x.size) if view_spec is None else (x._storage.base, *view_spec.extent)


def _file_function(name: str) -> Callable[..., None]:
    """Returns NumPy's function that writes a file, which the package has under the same name."""

    def function(file: Any, *arrays: Any, allow_pickle: bool = True, **named: Any) -> None:
        module = importlib.import_module("shardtensor.functions.files")  # It is above this package.
        getattr(module, name)(file, *arrays, **named)

    return function


_ONLY_NUMPYS: dict[str, Callable[..., Any]] = {
    **COMPOSED,
    **COMPUTED,
    "copy": _copy, "copyto": _copyto, "may_share_memory": _may_share_memory, "size": _size,
    "shares_memory": _shares_memory,
    "reshape": lambda a, /, shape, order="C", *, copy=None: a.reshape(shape, order=order, copy=copy),
    "meshgrid": lambda *xi, **options: call("meshgrid", *xi, **options),
    "broadcast_arrays": lambda *args, subok=False: call("broadcast_arrays", *args),
    "atleast_1d": lambda *arys: call("atleast_1d", *arys), "atleast_2d": lambda *arys: call("atleast_2d", *arys),
    "atleast_3d": lambda *arys: call("atleast_3d", *arys),
    "cumsum": lambda a, axis=None, dtype=None, out=None: a.cumsum(axis, dtype, out), "ndim": lambda a: a.ndim,
    "cumprod": lambda a, axis=None, dtype=None, out=None: a.cumprod(axis, dtype, out), "shape": lambda a: a.shape,
    "put": lambda a, ind, v, mode="raise": a.put(ind, v, mode),
    "transpose": lambda a, axes=None: a.transpose(axes),
    "result_type": _result_type,
    **{name: _file_function(name) for name in ("save", "savez", "savez_compressed")},
}  # fmt: skip
"""Functions of NumPy that are not operators here: metadata, copies, memory checks, methods of a tensor, and functions
that are composed of operators.
"""


class Operators(Handle):
    """The base class of tensors that implements Python's operators and NumPy's protocols."""

    __slots__ = ()

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs:
            op = OPS.get(NUMPY_NAMES.get(ufunc.__name__, ufunc.__name__))
            if op is not None and len(op.operands) == len(inputs) and not any(map(_is_list, inputs)):
                return op.dispatch(*inputs)
        return importlib.import_module(_UFUNC_CALLS).call_ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if has_extension(func):
            return call_extension(func, args, kwargs)
        if function := _ONLY_NUMPYS.get(func.__name__):
            return function(*args, **kwargs)
        op = OPS.get(NUMPY_NAMES.get(func.__name__, func.__name__))
        if op is None or op.error_name != op.name:  # An internal operator, such as `put`, is not NumPy's function.
            raise ArgumentTypeError(refusal(func.__name__))
        return as_numpy(func, op, args, kwargs)

    __hash__ = None  # type: ignore[assignment]  # equality is elementwise

    __abs__, __neg__, __pos__, __invert__ = map(_unary, ("abs", "negative", "positive", "bitwise_invert"))
    __add__, __radd__ = _binary("add")
    __sub__, __rsub__ = _binary("subtract")
    __mul__, __rmul__ = _binary("multiply")
    __truediv__, __rtruediv__ = _binary("divide")
    __floordiv__, __rfloordiv__ = _binary("floor_divide")
    __mod__, __rmod__ = _binary("remainder")
    __pow__, __rpow__ = _binary("pow")
    __matmul__, __rmatmul__ = _binary("matmul")
    __and__, __rand__ = _binary("bitwise_and")
    __or__, __ror__ = _binary("bitwise_or")
    __xor__, __rxor__ = _binary("bitwise_xor")
    __lshift__, __rlshift__ = _binary("bitwise_left_shift")
    __rshift__, __rrshift__ = _binary("bitwise_right_shift")
    __eq__, __ne__ = _binary("equal")[0], _binary("not_equal")[0]  # type: ignore[assignment]
    __lt__, __le__ = _binary("less")[0], _binary("less_equal")[0]
    __gt__, __ge__ = _binary("greater")[0], _binary("greater_equal")[0]

    def __divmod__(self, other: Any) -> tuple[ShardedTensor, ShardedTensor]:
        return (self // other, self % other)

    def __rdivmod__(self, other: Any) -> tuple[ShardedTensor, ShardedTensor]:
        return (other // self, other % self)

    __iadd__, __isub__, __imul__ = map(_in_place, ("add", "subtract", "multiply"))
    __itruediv__, __ifloordiv__, __imod__ = map(_in_place, ("divide", "floor_divide", "remainder"))
    __ipow__, __imatmul__ = map(_in_place, ("pow", "matmul"))
    __iand__, __ior__, __ixor__ = map(_in_place, ("bitwise_and", "bitwise_or", "bitwise_xor"))
    __ilshift__, __irshift__ = map(_in_place, ("bitwise_left_shift", "bitwise_right_shift"))
