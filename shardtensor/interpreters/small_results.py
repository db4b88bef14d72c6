"""Compositions in eager mode: a small result is one call of NumPy on whole buffers, or that of a recorded program.

A composition takes several times as long as NumPy on small arrays, because it calls several operators. What it would
return is inferred once for each combination of function, parameters and avals; then only the elements are computed.
Where NumPy's bits are others, the program of its operators runs. Kernels compute those that are elementwise: on GPUs,
and of large arrays of the host, block by block, so that what one operator passes to the next stays in the cache.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from shardtensor.backend.small_floats import is_small_float
from shardtensor.communication.transfer import whole_array
from shardtensor.communication.transfer_log import recorded_by
from shardtensor.core import ABOVE, Function, Op, Operands, Params, bind, interpreting, recorded
from shardtensor.errors import ConcretizationError, ShardTensorError
from shardtensor.host.memory_pool import POOLED_FROM
from shardtensor.interpreters.infer import INFER
from shardtensor.sharding.mesh import default_mesh
from shardtensor.tensor.operands import host_aval
from shardtensor.tensor.ownership import reading
from shardtensor.tensor.pytree import map_items
from shardtensor.tensor.storage import NoElements, Storage
from shardtensor.tensor.tensor import ShardedTensor, tensor_of, without_elements
from shardtensor.tensor.value import Aval

_Layout = Any
"""The aval of a result, or (class, layouts of its items) of a sequence of results."""

_MOST_BYTES = 1 << 17
"""The size of operands up to which one call of NumPy in one thread takes less time than those of several operators."""

_PLAIN = frozenset([bool, int, str, type(None)])
"""Types of arguments that are not arrays, hold none, and are equal only if they are the same."""

_FAILURES = (ArithmeticError, LookupError, TypeError, ValueError)
"""The errors of NumPy's functions."""


def small_result(op: Op, operands: Operands, params: Params) -> Any:
    """Returns the result of an operator that has the part ``small``; see `small_call`."""
    args = ((operands,) if op.signature.variadic else operands) + params
    return small_call(op.parts.composite, op.parts.small, args, {}, _bound(op))  # type: ignore[arg-type]


@functools.cache
def _bound(op: Op) -> Function:
    """Returns an operator as a function of its operands and parameters, by position."""
    count = 1 if op.signature.variadic else len(op.operands)
    return lambda *args: bind(op, args[0] if op.signature.variadic else args[:count], args[count:])


def small_call(
    function: Function,
    host: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inferred: Function | None = None,
    *,
    fused: bool = False,
) -> Any:
    """Returns the result of ``host``, which computes the composition ``function`` on whole host arrays, or of its
    program; NotImplemented where the composition has to run.

    That is the case for large arrays, for other backends, and for every error, so that the composition raises it. The
    layout of the result is inferred when a call is repeated, because a call that is not repeated, such as one with ever
    different numbers, would only take longer.

    Args:
        function: the composition.
        host: see `shardtensor.core.composition`.
        args, kwargs: its arguments.
        inferred: the function of the same arguments whose result is inferred, if it is not the composition.
        fused: whether the composition is one kernel, see `shardtensor.core.composition`.
    """
    arrays: list[Any] = []
    try:
        keywords = tuple([(name, _key(x, arrays)) for name, x in kwargs.items()]) if kwargs else ()
        key = (function, default_mesh(), _key(args, arrays), keywords)
        value = _layouts.get(key, _NEW)
    except TypeError:  # An argument is not hashable.
        return NotImplemented
    if value is _NEW:
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()  # in one step, as other threads may do the same
        value = _layouts[key] = _SEEN
        if not (fused and any(map(_is_on_gpu, arrays))):
            return NotImplemented
    if value is _SEEN:
        tensors = [x for x in arrays if type(x) is ShardedTensor]
        try:
            if fused and (any(map(_is_on_gpu, tensors)) or _are_large(tensors)):
                value = _compiled(function, args, kwargs, arrays)
            elif host is recorded:
                value = _recorded(function, args, kwargs, arrays)
            else:
                value = _inferred(inferred or function, args, kwargs, tensors)
        except ConcretizationError:  # The composition reads elements, such as the range of a histogram.
            result = function(*args, **kwargs)
            _layouts[key] = _layout_of(result, Storage, tensors)
            return result
        except (ShardTensorError, *_FAILURES):  # The composition raises the error.
            value = None
        _layouts[key] = value
    if value is None:
        return NotImplemented
    if callable(value):
        return value(arrays)
    with reading(arrays):
        return _computed(host, value, args, kwargs, function.__name__)


_NEW, _SEEN = object(), object()

_layouts: dict[Any, Any] = {}
_MOST_LAYOUTS = 4096

_MOST_ITEMS = 32
"""The greatest number of items of a list for which a layout is kept."""


def _key(x: Any, arrays: list[Any]) -> Any:
    """Returns what identifies an argument, without the elements of arrays; adds the tensors and host arrays in it to
    ``arrays``.

    Raises:
        TypeError: a list is long.
    """
    kind = type(x)
    if kind is ShardedTensor:
        arrays.append(x)
        return x._aval
    if kind is tuple or kind is list:
        if len(x) > _MOST_ITEMS:
            raise TypeError("the list is long")
        return (kind, *[(type(item), item) if type(item) in _PLAIN else _key(item, arrays) for item in x])
    if kind is np.ndarray:
        arrays.append(x)
        return host_aval(x.shape, x.dtype)
    if isinstance(x, (complex, np.complexfloating)) or (isinstance(x, (float, np.inexact)) and (not x or x != x)):
        return (kind, repr(x))  # Zeros of both signs are equal, and a NaN differs from itself.
    return (kind, x)


def _are_small(tensors: list[ShardedTensor]) -> bool:
    """Whether the operands are small, and in the memory of the host."""
    avals = [x._aval for x in tensors]
    if not tensors or not all(value.backend.on_host and not value.offloaded for value in avals):
        return False
    return sum([value.nbytes for value in avals]) <= _MOST_BYTES


_LARGE_BYTES = 1 << 22
"""The size of operands on the host from which a kernel takes less time than its operators one by one."""


def _are_large(tensors: list[ShardedTensor]) -> bool:
    """Whether the operands are large, and in one memory, that of the host."""
    avals = [x._aval for x in tensors]
    on_host = all(value.backend.on_host and value.memory is not None and not value.backend.simulated for value in avals)
    return on_host and sum([value.nbytes for value in avals]) >= _LARGE_BYTES


def _is_on_gpu(x: Any) -> bool:
    return type(x) is ShardedTensor and x._aval.backend.kernel_language == "cuda"


def _recorded(function: Function, args: Any, kwargs: Any, arrays: list[Any]) -> Function | None:
    """Returns the program of a composition of small operands as a function of the arrays; None if there is none: the
    composition may read the elements of host arrays.
    """
    if any(type(x) is np.ndarray for x in arrays) or not _are_small(arrays):
        return None
    from shardtensor.interpreters.programs import compositions  # Most programs call none of these functions.

    return compositions.on_buffers(function, args, kwargs, arrays)


def _compiled(function: Function, args: Any, kwargs: Any, arrays: list[Any]) -> Function | None:
    """Returns the kernel of an elementwise composition as a function of the arrays; None if it has no program."""
    return ABOVE["compiled"](function, args, kwargs, arrays)  # type: ignore[no-any-return]


def _inferred(function: Function, args: Any, kwargs: Any, tensors: list[ShardedTensor]) -> _Layout | None:
    """Returns the layout of the result of a composition of tensors without elements; None if it is not computed whole.

    Raises:
        ShardTensorError: the composition raises it.
    """
    if not _are_small(tensors):
        return None
    operands: list[ShardedTensor] = []
    dtypes: list[Any] = []

    def stand_in(x: Any) -> Any:
        if isinstance(x, (ShardedTensor, np.ndarray, np.generic)):
            dtypes.append(x.dtype)
        if type(x) is ShardedTensor:
            operands.append(without_elements(x._aval))
            return operands[-1]
        return np.zeros(x.shape, x.dtype) if type(x) is np.ndarray else x

    arrays, named = map_items(stand_in, args), {name: map_items(stand_in, x) for name, x in kwargs.items()}
    if any(map(is_small_float, dtypes)):  # NumPy promotes these to other dtypes than operators do.
        return None
    with interpreting(INFER), recorded_by(), np.errstate(all="ignore"):  # Zeros may be divisors.
        return _layout_of(function(*arrays, **named), NoElements, operands)


def _layout_of(result: Any, kind: type, operands: list[ShardedTensor]) -> _Layout | None:
    """Returns the layout of the result of a composition; None for views of its operands, large results and other
    objects than tensors. ``kind`` is the class of the storages of independent tensors.
    """
    if isinstance(result, (tuple, list)):
        parts = [_layout_of(item, kind, operands) for item in result]
        return None if None in parts else (type(result), parts)
    if type(result) is not ShardedTensor:
        return None
    base = getattr(result._storage, "base", result)
    if type(base._storage) is not kind or any(getattr(x._storage, "base", x) is base for x in operands):
        return None
    value, is_array = result._aval, not result.ndim and not result._is_scalar
    return value if value.nbytes < POOLED_FROM and value.backend.on_host and not is_array else None


def _computed(host: Function, layout: _Layout, args: Any, kwargs: dict[str, Any], caller: str) -> Any:
    """Returns the result of ``host`` in a layout; NotImplemented if it fails or the result has another shape."""

    def whole(x: Any) -> Any:
        if type(x) is not ShardedTensor:
            return x
        array = whole_array(x, caller).view()
        array.flags.writeable = False  # NumPy's functions that write to an operand raise an error.
        return array

    arrays = [x if type(x) in _PLAIN else map_items(whole, x) for x in args]
    named = {name: map_items(whole, x) for name, x in kwargs.items()}
    try:
        result = host(*arrays, **named)
    except _FAILURES:  # The composition raises an error of its own.
        return NotImplemented
    return NotImplemented if result is NotImplemented else _placed(layout, result)


def _placed(layout: _Layout, result: Any) -> Any:
    if not isinstance(layout, Aval):
        kind, parts = layout
        items = [_placed(*pair) for pair in zip(parts, result, strict=True)]
        if any(item is NotImplemented for item in items):
            return NotImplemented
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    array = np.asarray(result)
    if array.shape != layout.shape or array.dtype != layout.dtype:  # They depend on elements.
        return NotImplemented
    return tensor_of(layout, (array if array.base is None else array.copy(),))  # It may be a view of an operand.
