"""Queues calls of NumPy's functions. The shapes and dtypes of the results are inferred at once, by calling the function
with placeholders that have the shapes and dtypes of the operands.
"""

from __future__ import annotations

import functools
import threading
import warnings
from typing import Any

import numpy as np

from . import computed, graphs, loops, memory
from . import world as w
from .errors import WrongDeviceError

_array: Any = None  # the array class, whose module imports this one
_metas: dict[Any, Any] = {}
_PLAIN = {bool, int, float, complex}


def bind(array_class: type) -> None:
    """Sets the array class of this module."""
    global _array
    _array = array_class


# -- new arrays ------------------------------------------------------------------------------------


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], order: str = "C", cls: Any = None) -> Any:
    """Allocates an array on the current device; its elements are undefined (poison)."""
    made = object.__new__(_array if cls is None else cls)
    size = dtype.itemsize
    for n in shape:
        size *= n
    pointer = memory.alloc(size)
    block = pointer.mem.block
    made._a = np.ndarray(shape, dtype, None if block is None else block.raw, 0, None, order)
    made.data = pointer
    made.base = None
    return made


def view(source: Any, raw: Any, cls: Any = None) -> Any:
    """Returns an array that shares the memory of ``source``, and at the same address also its pointer, as in CuPy."""
    made = object.__new__(_array if cls is None else cls)
    made._a = raw
    data = source.data
    if not raw.size:
        made.data, made.base = data, source if source.base is None else source.base
        return made
    place = raw.__array_interface__["data"][0]
    made.data = (
        data if place == data.ptr or data.mem.block is None else memory.MemoryPointer(data.mem, place - data.mem.ptr)
    )
    made.base = source if source.base is None else source.base
    return made


def from_host(value: Any) -> Any:
    """Returns a new array with the elements of a host array, which must not change until the copy has run."""
    graphs.check_copy(w.world.stream(), "H2D")
    made = empty(value.shape, value.dtype)
    to = made._a
    w.world.launch("copy from host", lambda: np.copyto(to, value), (), (made,))
    return made


# -- arguments -------------------------------------------------------------------------------------


def check(array: Any, device: int) -> None:
    """Raises `WrongDeviceError` if an array is not on the current device."""
    if array.data.device_id != device:
        raise WrongDeviceError(
            f"the current device is {device}, and an operand is {array.describe()} on device {array.data.device_id}; "
            "CuPy would use peer access, which is slow, or fail"
        )


class Arguments:
    """The arguments of a call: with NumPy's views in place of arrays, the arrays, and a key.

    The keys of two calls are equal if all shapes, dtypes and other arguments are.
    """

    __slots__ = ("args", "arrays", "key", "kwargs")

    def __init__(self, args: Any, kwargs: dict[str, Any], strict: bool = True) -> None:
        self.arrays: list[Any] = []
        key: list[Any] = []
        self.args = [self._strip(x, key) for x in args]
        self.kwargs = {k: self._strip(x, key) for k, x in kwargs.items()}
        self.key = (*key, *kwargs)
        if strict:
            device = w.world.current()
            for a in self.arrays:
                check(a, device)

    def _strip(self, x: Any, key: list[Any]) -> Any:
        if isinstance(x, _array):
            self.arrays.append(x)
            raw = x._a
            key.append((raw.shape, raw.dtype, raw.flags.fnc))
            return raw
        if isinstance(x, (list, tuple)):
            key.append((type(x), len(x)))
            items = [self._strip(item, key) for item in x]
            return items if isinstance(x, list) else tuple(items)
        if isinstance(x, np.ndarray):
            raise TypeError(f"Unsupported type {type(x)}")
        if isinstance(x, slice):
            key.append((slice, x.start, x.stop, x.step))
            return x
        if isinstance(x, Ufunc):
            x = x.numpy
        key.append((type(x), x))
        return x


def _stand_in(x: Any, name: str, linear: bool) -> Any:
    """Returns an argument with placeholders for arrays, which no function rejects, of the same shapes and dtypes."""
    if isinstance(x, np.ndarray):
        order = "F" if x.flags.fnc else "C"
        if x.dtype.kind in "fc" or name == "average":
            made = np.ones(x.shape, x.dtype, order)
            if linear and x.ndim > 1:
                made[...] = np.eye(*x.shape[-2:], dtype=x.dtype)
            return made
        return np.zeros(x.shape, x.dtype, order)
    if isinstance(x, (list, tuple)):
        return type(x)(_stand_in(item, name, linear) for item in x)
    return x


def _rehearse(name: str, function: Any, given: Arguments, linear: bool) -> Any:
    """Returns the result of the call for placeholders."""
    args = [_stand_in(x, name, linear) for x in given.args]
    kwargs = {k: _stand_in(x, name, linear) for k, x in given.kwargs.items()}
    try:
        return _quiet(function, args, kwargs)
    except np.linalg.LinAlgError:  # the placeholder is regular in its last two axes, but the function uses others
        rng = np.random.default_rng(0)
        args = [rng.random(x.shape).astype(x.dtype) if isinstance(x, np.ndarray) else x for x in args]
        return _quiet(function, args, kwargs)


# -- results ---------------------------------------------------------------------------------------


def _describe(result: Any) -> Any:
    """Returns the structure of a result, with (shape, dtype, order) in place of each array."""
    if isinstance(result, (np.ndarray, np.generic, bool, int, float, complex)):
        a = np.asarray(result)
        return a.shape, a.dtype, "F" if a.flags.fnc else "C"
    if isinstance(result, (list, tuple)):
        return [type(result), *map(_describe, result)]
    raise TypeError(f"Unsupported result {type(result)}")


def _allocate(spec: Any, made: list[Any]) -> Any:
    if isinstance(spec, tuple):
        made.append(empty(*spec))
        return made[-1]
    items = [_allocate(s, made) for s in spec[1:]]
    return _sequence(spec[0], items)


def _sequence(kind: type, items: list[Any]) -> Any:
    if kind is list:
        return items
    return kind(*items) if hasattr(kind, "_fields") else tuple(items)


def _leaves(result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        for item in result:
            yield from _leaves(item)
    else:
        yield result


def _store(outs: list[Any], result: Any) -> None:
    for to, value in zip(outs, _leaves(result), strict=True):
        if to.shape != np.shape(value):
            raise RuntimeError(f"the inferred shape of a result is {to.shape}, the actual shape {np.shape(value)}")
        np.copyto(to, value, casting="unsafe")


# -- calls -----------------------------------------------------------------------------------------

_CUBLAS = frozenset(("dot", "einsum", "inner", "matmul", "matvec", "outer", "tensordot", "vdot", "vecdot", "vecmat"))
"""The functions that CuPy computes by cuBLAS."""


def _quiet(function: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function without NumPy's warnings of empty slices and the like, which CuPy does not have."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def call(name: str, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Queues a call of a function whose result has a shape that does not depend on values, and returns the result."""
    out = kwargs.pop("out", None)
    if isinstance(out, tuple):
        (out,) = out
    given = Arguments(args, kwargs)
    linear = function.__module__ == "numpy.linalg"
    if linear or name in _CUBLAS:
        graphs.check_library("cuBLAS" if name in _CUBLAS else "cuSOLVER")
    try:
        spec = _metas.get(key := (function, given.key))
    except TypeError:  # something that cannot be hashed
        spec = key = None
    if spec is None:
        spec = _describe(_rehearse(name, function, given, linear))
        if key is not None:
            if len(_metas) > 20000:
                _metas.clear()
            _metas[key] = spec
    made: list[Any] = []
    if out is None:
        result = _allocate(spec, made)
    else:
        _check_out(out, spec[0], spec[1])
        made.append(out)
        result = out
    outs = [a._a for a in made]
    args, kwargs = given.args, given.kwargs
    careful = linear or name.startswith("nan") or any(not a.size for a in given.arrays)

    def run() -> None:
        try:
            values = _quiet(function, args, kwargs) if careful else function(*args, **kwargs)
        except np.linalg.LinAlgError:  # CuPy ignores the status of the solver
            for to in outs:
                to.fill(np.nan)
        else:
            _store(outs, values)

    w.world.launch(name, run, given.arrays, made)
    return result


def _check_out(out: Any, shape: tuple[int, ...], dtype: Any) -> None:
    if not isinstance(out, _array):
        raise TypeError(f"return arrays must be of ArrayType, not {type(out)}")
    check(out, w.world.current())
    if out.shape != shape:
        raise ValueError(f"Out shape is mismatched: {out.shape} instead of {shape}")
    if not np.can_cast(dtype, out.dtype, "same_kind"):
        raise TypeError(f"output ({dtype}) could not be cast to {out.dtype}")


def call_now(name: str, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a function whose result has a shape that depends on values; the host waits for it, as in CuPy."""
    given = Arguments(args, kwargs)
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(_quiet(function, given.args, given.kwargs))
        except Exception as error:
            box.append(error)

    w.world.synchronize(w.world.launch(name, run, given.arrays, ()))
    if isinstance(box[0], Exception):
        raise box[0]
    return _upload(box[0])


def _upload(result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return _sequence(type(result), [_upload(x) for x in result])
    return from_host(np.array(result))


def call_view(name: str, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a function that returns views. Where NumPy returns a copy instead, the copy is queued."""
    given = Arguments(args, kwargs, strict=False)
    result = _quiet(function, given.args, given.kwargs)
    flat = list(_leaves(result))
    sources = []
    for raw in flat:
        source = next((a for a in given.arrays if np.may_share_memory(a._a, raw)), None)
        if source is None:
            return call(name, function, args, kwargs)
        sources.append(source)
    views = iter([view(source, _writable(source, raw)) for source, raw in zip(sources, flat, strict=True)])
    return _rebuild(result, views)


def _writable(source: Any, raw: Any) -> Any:
    """Returns a writable view of a source's memory: in CuPy all views are writable, also broadcast ones."""
    block = source.data.mem.block
    if block is None or _quiet(lambda: raw.flags.writeable, (), {}):  # NumPy warns for results of `broadcast_arrays`.
        return raw
    start = raw.__array_interface__["data"][0] - block.ptr
    return np.ndarray(raw.shape, raw.dtype, block.raw, start, raw.strides)


def _rebuild(result: Any, leaves: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return _sequence(type(result), [_rebuild(x, leaves) for x in result])
    return next(leaves)


def call_in_place(name: str, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Queues a call that changes its first argument and returns nothing."""
    given = Arguments(args, kwargs)
    args, kwargs = given.args, given.kwargs
    w.world.launch(name, lambda: function(*args, **kwargs), given.arrays[1:], given.arrays[:1])


# -- ufuncs ----------------------------------------------------------------------------------------


class Ufunc:
    """One of NumPy's ufuncs for arrays on devices."""

    __slots__ = ("__name__", "nin", "nout", "numpy")

    def __init__(self, numpy_ufunc: np.ufunc) -> None:
        self.numpy, self.__name__ = numpy_ufunc, numpy_ufunc.__name__
        self.nin, self.nout = numpy_ufunc.nin, numpy_ufunc.nout

    @property
    def types(self) -> list[str]:
        """The loops of CuPy's ufunc."""
        return list(loops.LOOPS[self.__name__])

    @property
    def name(self) -> str:
        """CuPy's name of the ufunc."""
        return f"cupy_{self.__name__}"

    @property
    def _ops(self) -> Any:
        """The loops; generalized ufuncs, such as ``matmul``, have none."""
        return loops.Loops(self.__name__) if self.numpy.signature is None else None

    _loop_prep = _preamble = ""

    def __repr__(self) -> str:
        return f"<ufunc '{self.name}'>"

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        if getattr(_fusing, "active", False):
            return _in_kernel(computed.KERNELS.get(self.__name__, self.numpy), args)
        if len(args) > self.nin:
            out, args = args[self.nin :], args[: self.nin]
        if len(args) < self.nin:
            raise TypeError(f"Wrong number of arguments for {self!r}: {len(args)}")
        if self.numpy.signature is not None:
            return call(self.__name__, self.numpy, args, {**kwargs, "out": out})
        return _elementwise(computed.KERNELS.get(self.__name__, self.numpy), args, out, kwargs)

    def reduce(self, array: Any, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return call(
            f"{self.__name__}.reduce", self.numpy.reduce, (array, axis, dtype), {"keepdims": keepdims, "out": out}
        )

    def accumulate(self, array: Any, axis: int = 0, dtype: Any = None, out: Any = None) -> Any:
        return call(f"{self.__name__}.accumulate", self.numpy.accumulate, (array, axis, dtype), {"out": out})

    def outer(self, a: Any, b: Any, **kwargs: Any) -> Any:
        return call(f"{self.__name__}.outer", self.numpy.outer, (a, b), kwargs)

    def at(self, a: Any, indices: Any, b: Any = None) -> None:
        call_in_place(f"{self.__name__}.at", self.numpy.at, (a, indices) if b is None else (a, indices, b), {})


def where(condition: Any, x: Any, y: Any) -> Any:
    """Calls CuPy's ufunc ``where``, whose first operand is an array of bools."""
    return _elementwise(computed.where, (condition, x, y), None, {})


def _elementwise(f: Any, args: Any, out: Any, kwargs: dict[str, Any]) -> Any:
    """Queues a ufunc without a signature. Most launches are of this kind, so the function is optimized for speed."""
    world = w.world
    device = getattr(world.tls, "device", 0)
    raws, reads, key, kinds = [], [], [f], []
    for x in args:
        kind = type(x)
        if isinstance(x, _array):
            if x.data.device_id != device:
                check(x, device)
            raw = x._a
            reads.append(x)
            raws.append(raw)
            key.append((raw.shape, raw.dtype, raw.ndim > 1 and raw.flags.fnc))
            kinds.append((raw.dtype, None))
        elif kind in _PLAIN or isinstance(x, np.generic):
            raws.append(x)
            key.append(loops.kind_of(x))
            kinds.append(key[-1])
        else:
            raise TypeError(f"Unsupported type {kind}")
    where = kwargs.get("where")
    if isinstance(where, _array):
        check(where, device)
        reads.append(where)
        kwargs["where"] = where._a
        key.append((where.shape, "where"))
    elif where is None:
        kwargs.pop("where", None)
    if kwargs:
        key.append((kwargs.get("dtype"), kwargs.get("casting")))
    identity = tuple(key)
    known = _metas.get(identity)
    if known is None:
        known = _metas[identity] = _elementwise_specs(f, raws, tuple(kinds), kwargs)
    inputs, specs = known
    operands = [
        x if isinstance(x, np.ndarray) or to is None else np.asarray(x, to) for x, to in zip(raws, inputs, strict=True)
    ]
    if out is None:
        made = [empty(*spec) for spec in specs]
    else:
        made = list(out) if isinstance(out, tuple) else [out]
        for a, spec in zip(made, specs, strict=True):
            _check_out(a, spec[0], spec[1])
    outs = tuple([a._a for a in made])
    world.launch(f.__name__, lambda: f(*_cast(operands, inputs), out=outs, **kwargs), reads, made)
    return made[0] if len(made) == 1 else tuple(made)


def _cast(operands: list[Any], dtypes: tuple[Any, ...]) -> list[Any]:
    """Returns operands in the dtypes of a loop; None leaves the conversion to NumPy."""
    return [x if to is None or x.dtype == to else x.astype(to) for x, to in zip(operands, dtypes, strict=True)]


def _elementwise_specs(f: Any, raws: list[Any], kinds: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the dtypes of the operands of CuPy's loop, and (shape, dtype, order) for each result.

    The shape is inferred by broadcasting, the dtype by a call on single elements.
    """
    if len(_metas) > 20000:
        _metas.clear()
    inputs = loops.choose(f.__name__, kinds)[0] if kwargs.get("dtype") is None else (None,) * len(raws)
    arrays = [x for x in raws if isinstance(x, np.ndarray)]
    where = kwargs.get("where")
    shape = np.broadcast_shapes(*(x.shape for x in arrays), *([where.shape] if isinstance(where, np.ndarray) else []))
    ones = [
        np.ones((1,) * x.ndim, x.dtype) if isinstance(x, np.ndarray) else np.asarray(1, kind[0])
        for x, kind in zip(raws, kinds, strict=True)
    ]
    result = _quiet(f, _cast(ones, inputs), {k: v for k, v in kwargs.items() if k != "where"})
    full = [x for x in arrays if x.ndim == len(shape) and x.ndim > 1]
    order = "F" if full and all(x.flags.fnc for x in full) else "C"
    return inputs, [(shape, r.dtype, order) for r in (result if isinstance(result, tuple) else (result,))]


# -- fused kernels ---------------------------------------------------------------------------------

_fusing = threading.local()
"""Whether a fused kernel runs in this thread, in which ufuncs compute at once."""


def fuse(*given: Any, kernel_name: str | None = None) -> Any:
    """Makes one launch of a function that calls ufuncs, as ``cupy.fuse``: a decorator, or a function that returns one."""
    if not given:
        return functools.partial(_fused, kernel_name)
    if len(given) > 1 or kernel_name is not None:
        raise TypeError("`fuse` must be applied to one function, or takes keywords")
    return _fused(None, given[0])


def _fused(name: str | None, function: Any) -> Any:
    name = name or function.__name__
    if not name.isidentifier():  # The real one fails to compile.
        raise ValueError(f"{name} is no name of a kernel")

    def kernel(*arrays: Any) -> Any:
        _fusing.active = True
        try:
            made = function(*[_Variable(x) if isinstance(x, np.ndarray) else x for x in arrays])
        finally:
            _fusing.active = False
        return tuple(map(_value, made)) if isinstance(made, (tuple, list)) else _value(made)

    return functools.wraps(function)(lambda *args: call(name, kernel, args, {}))


class _Variable(np.lib.mixins.NDArrayOperatorsMixin):
    """A variable in a fused kernel: it has a dtype and a number of dimensions, but neither a shape nor a size."""

    def __init__(self, value: Any) -> None:
        self._value = value

    @property
    def dtype(self) -> Any:
        return self._value.dtype

    @property
    def ndim(self) -> int:
        return int(self._value.ndim)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        assert method == "__call__"
        assert not kwargs
        return _in_kernel(ufunc, args)


def _value(x: Any) -> Any:
    return x._value if isinstance(x, _Variable) else x


def _in_kernel(f: Any, args: Any) -> Any:
    """A ufunc in a fused kernel."""
    args = [np.asarray(x._value) if isinstance(x, _Variable) else x for x in args]
    kinds = tuple([(x.dtype, None) if isinstance(x, np.ndarray) else loops.kind_of(x) for x in args])
    inputs = loops.choose(f.__name__, kinds)[0]
    made = f(*_cast([np.asarray(x) for x in args], inputs))
    return tuple(map(_Variable, made)) if isinstance(made, tuple) else _Variable(made)
