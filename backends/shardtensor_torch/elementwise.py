"""NumPy's dtypes and elementwise functions for PyTorch tensors.

`numpy.ufunc.resolve_dtypes` determines the dtypes in which a ufunc computes. The operands are cast to these dtypes
before PyTorch is called, so that PyTorch's type promotion never applies. Where PyTorch's result differs from NumPy's,
the tables `KERNELS` and `COMPLEX` contain a replacement.

Importing this module imports torch.
"""

from __future__ import annotations

import functools
import importlib
import math
import warnings
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType
from typing import Any

import numpy as np

from shardtensor.backend import SMALL_FLOATS, is_small_float, small_float
from shardtensor.errors import ArgumentError, ArgumentTypeError

torch: Any = importlib.import_module("torch")  # Torch is optional, so that type checkers must not depend on it.

NUMPY: dict[Any, np.dtype[Any]] = {
    getattr(torch, name): np.dtype(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
} | {torch.complex64: np.dtype("complex64"), torch.complex128: np.dtype("complex128")}
"""The supported torch dtypes and the NumPy dtypes that they correspond to."""

TORCH: dict[np.dtype[Any], Any] = {known: dtype for dtype, known in NUMPY.items()}
PLAIN = (bool, int, float, complex)


@functools.cache
def add_small_floats() -> None:
    """Adds bfloat16 and those float8 kinds that PyTorch has to the tables.

    Raises:
        ArgumentTypeError: the library ml_dtypes, which defines them for NumPy, is not installed.
    """
    for name in SMALL_FLOATS:
        if hasattr(torch, name):
            dtype, known = getattr(torch, name), small_float(name)
            NUMPY[dtype], TORCH[known] = known, dtype


def to_torch(dtype: Any) -> Any:
    """Returns the torch dtype for anything that `numpy.dtype` accepts; a torch dtype is returned unchanged.

    Raises:
        ArgumentTypeError: PyTorch does not support computation in that dtype.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        known = np.dtype(dtype)
        if is_small_float(known):
            add_small_floats()
        return TORCH[known]
    except KeyError:
        raise ArgumentTypeError(f"PyTorch does not compute with dtype {np.dtype(dtype)}; pass another dtype=") from None


def dtype_of(x: Any) -> np.dtype[Any]:
    """Returns the NumPy dtype of a tensor.

    Raises:
        ArgumentTypeError: NumPy lacks the dtype, as complex32; or PyTorch lacks most functions for it, as for uint16,
            uint32 and uint64.
    """
    if x.dtype not in NUMPY and str(x.dtype).removeprefix("torch.") in SMALL_FLOATS:
        add_small_floats()
    try:
        return NUMPY[x.dtype]
    except KeyError:
        known = ", ".join(sorted(map(str, TORCH)))
        raise ArgumentTypeError(
            f"a tensor of {x.dtype} is not supported; convert it to one of {known}, as by x.to(torch.int64)"
        ) from None


def resolved(x: Any) -> Any:
    """Returns the tensor with pending conjugation and negation carried out, so that its memory holds its values."""
    return x.resolve_conj().resolve_neg()


def cast(x: Any, dtype: Any) -> Any:
    """Casts a tensor to a torch dtype with NumPy's semantics; returns the tensor itself if it already has the dtype."""
    if x.dtype is dtype:
        return x
    if x.dtype.is_complex and dtype is torch.bool:
        return x != 0
    if x.dtype.is_complex and not dtype.is_complex:
        message = "casting complex values to real discards the imaginary part"
        warnings.warn(message, np.exceptions.ComplexWarning, stacklevel=2)
        return x.real.to(dtype, copy=True)  # Without copy=True the result could be a view.
    if dtype is torch.float8_e4m3fn:  # It has no infinity, and PyTorch takes the largest number instead of NaN.
        wide = x if x.dtype.is_floating_point and x.element_size() > 1 else x.to(torch.float32)
        return torch.where(wide.abs() > _E4M3FN_ENDS, torch.nan, wide).to(dtype)
    return x.to(dtype)


_E4M3FN_ENDS = 464
"""Larger numbers are nearer to the next power of two than to 448, the largest number of float8_e4m3fn."""


def flip(x: Any, axes: Sequence[int]) -> Any:
    """Reverses the order of the elements along axes."""
    if x.dtype.itemsize > 1 or not x.dtype.is_floating_point:
        return torch.flip(x, axes)
    return torch.flip(x.view(torch.uint8), axes).view(x.dtype)  # PyTorch moves no float8 kinds.


def fill_where(out: Any, mask: Any, value: Any) -> None:
    """Writes a scalar to the elements of ``out`` where a mask of its shape is true."""
    if out.dtype.itemsize == 1 and out.dtype.is_floating_point:  # PyTorch fills no float8 kinds.
        number = cast(torch.tensor(float(value), dtype=torch.float32, device=out.device), out.dtype)
        out, value = out.view(torch.uint8), number.view(torch.uint8)
    out[mask] = value


def store(out: Any, x: Any) -> Any:
    """Writes ``x``, cast and broadcast, to the tensor ``out`` and returns ``out``."""
    return out.copy_(cast(x, out.dtype))


def axes_of(axis: Any, ndim: int) -> tuple[int, ...]:
    """Returns the normalized (non-negative) axes as a tuple; all axes for None.

    Raises:
        AxisError: an axis is out of range or repeated.
    """
    if axis is None:
        return tuple(range(ndim))
    axes = [int(a) for a in (axis if isinstance(axis, (tuple, list)) else (axis,))]
    if any(not -ndim <= a < ndim for a in axes) or len({a % ndim for a in axes}) < len(axes):
        raise np.exceptions.AxisError(f"axis {axis} is repeated or out of bounds for ndim={ndim}")
    return tuple([a % ndim for a in axes])


# -- elementwise functions whose results differ between PyTorch and NumPy ----------------------------------------------


def is_int(x: Any) -> bool:
    """Whether a tensor has an integer or bool dtype."""
    return not (x.dtype.is_floating_point or x.dtype.is_complex)


def _unchanged(function: Any) -> Callable[..., Any]:
    """Wraps a function so that it returns a copy of integer and bool tensors."""
    return lambda x: x.clone() if is_int(x) else function(x)


def _divisor(b: Any) -> Any:
    """Replaces the divisors 0, and -1 (for which the quotient can overflow), by 1, so that no division traps."""
    traps = (b == 0) | (b == -1) if b.dtype.is_signed else b == 0
    return torch.where(traps, torch.ones((), dtype=b.dtype, device=b.device), b)


def _floor_divide(a: Any, b: Any) -> Any:
    if not is_int(a):
        return torch.floor_divide(a, b)
    quotient = torch.div(a, _divisor(b), rounding_mode="floor")
    if b.dtype.is_signed:
        quotient = torch.where(b == -1, -a, quotient)
    return quotient.masked_fill_(torch.broadcast_to(b == 0, quotient.shape), 0)


def _remainder(a: Any, b: Any) -> Any:
    if is_int(a):
        return torch.remainder(a, _divisor(b))
    rest = torch.remainder(a, b)
    return torch.where(rest == 0, torch.copysign(torch.zeros_like(rest), b), rest)


def _fmod(a: Any, b: Any) -> Any:
    if not is_int(a):
        return torch.fmod(a, b)
    return torch.fmod(a, _divisor(b)).masked_fill_(
        torch.broadcast_to(b == 0, torch.broadcast_shapes(a.shape, b.shape)), 0
    )


def _gcd(a: Any, b: Any) -> Any:
    # PyTorch's divisor has the wrong sign where it meets the least integer, of which the magnitude overflows.
    return torch.abs(torch.gcd(a, b))


def _lcm(a: Any, b: Any) -> Any:
    divisor = _gcd(a, b)  # PyTorch divides the least integer by its divisor of -1, which traps.
    parts = torch.div(a, torch.where(divisor == 0, 1, divisor), rounding_mode="trunc")
    return torch.abs(parts) * torch.abs(b)  # As in NumPy, the product of the magnitudes wraps around.


def _pow(a: Any, b: Any) -> Any:
    if is_int(b) and b.dtype.is_signed and bool((b < 0).any()):
        raise ArgumentError("pow: integers to negative integer powers are not allowed")
    return torch.pow(a, b)


def _reciprocal(x: Any) -> Any:
    if not is_int(x):
        return torch.reciprocal(x)
    least = torch.iinfo(x.dtype).min if x.dtype in (torch.int32, torch.int64) else 0  # The converted infinity.
    itself = (x == 1) | (x == -1) if x.dtype.is_signed else x == 1
    return torch.where(x == 0, least, torch.where(itself, x, torch.zeros_like(x)))


def _abs(x: Any) -> Any:
    return x.clone() if x.dtype is torch.bool else torch.abs(x)


def _sign(x: Any) -> Any:
    return torch.sign(x) if is_int(x) else torch.where(torch.isnan(x), x, torch.sign(x))


def _complex_sign(x: Any) -> Any:
    # If one part is infinite, a finite other part is replaced by zero, because it is negligible in the quotient.
    parts = torch.view_as_real(resolved(x))
    infinite = torch.isinf(parts).any(-1, keepdim=True)
    parts = torch.where(infinite, torch.where(torch.isinf(parts), torch.sign(parts), parts * 0), parts)
    x = torch.view_as_complex(parts)
    return torch.where(x == 0, torch.zeros_like(x), x / torch.abs(x))


def _nextafter(a: Any, b: Any) -> Any:
    if a.dtype is not torch.float16:
        return torch.nextafter(a, b)
    a, b = torch.broadcast_tensors(a, b)
    bits = a.contiguous().view(torch.int16)
    away = torch.where((b > a) == (a > 0), bits + 1, bits - 1)  # Bit patterns are ordered as the magnitudes are.
    least = torch.copysign(torch.full_like(a, 2.0**-24), b)
    moved = torch.where(a == 0, least, away.view(torch.float16))
    return torch.where(a == b, a, torch.where(torch.isnan(a) | torch.isnan(b), a + b, moved))


def _heaviside(a: Any, b: Any) -> Any:
    return torch.where(torch.isnan(a), a, torch.heaviside(a, b))


def _logaddexp2(a: Any, b: Any) -> Any:
    return torch.where(a == b, a + 1, torch.logaddexp2(a, b))  # PyTorch's sum of equal terms is rounded.


def _before(strict: bool) -> Callable[[Any, Any], Any]:
    """Returns a comparison in NumPy's order of complex numbers: by real part, then by imaginary part."""
    less = torch.lt if strict else torch.le

    def before(a: Any, b: Any) -> Any:
        ordered = ~(torch.isnan(a.imag) | torch.isnan(b.imag))
        return ((a.real < b.real) & ordered) | ((a.real == b.real) & less(a.imag, b.imag))

    return before


def _by_parts(function: Any) -> Callable[[Any, Any], Any]:
    """Applies a function to the real and imaginary parts separately.

    PyTorch's complex addition multiplies one operand by 1, which turns infinities into NaN.
    """
    return lambda a, b: torch.view_as_complex(function(*[torch.view_as_real(resolved(x)) for x in (a, b)]))


_less, _less_equal = _before(True), _before(False)

KERNELS: dict[str, Callable[..., Any]] = {
    "equal": torch.eq,
    "not_equal": torch.ne,
    "less": torch.lt,
    "less_equal": torch.le,
    "greater": torch.gt,
    "greater_equal": torch.ge,
    "invert": torch.bitwise_not,
    "bitwise_invert": torch.bitwise_not,
    "conj": torch.conj_physical,
    "conjugate": torch.conj_physical,
    "positive": torch.clone,
    "rint": torch.round,
    "fabs": torch.abs,
    "abs": _abs,
    "absolute": _abs,
    "floor": _unchanged(torch.floor),
    "ceil": _unchanged(torch.ceil),
    "trunc": _unchanged(torch.trunc),
    "floor_divide": _floor_divide,
    "fmod": _fmod,
    "remainder": _remainder,
    "mod": _remainder,
    "gcd": _gcd,
    "lcm": _lcm,
    "heaviside": _heaviside,
    "logaddexp2": _logaddexp2,
    "pow": _pow,
    "power": _pow,
    "reciprocal": _reciprocal,
    "sign": _sign,
    "nextafter": _nextafter,
}
"""The kernels of NumPy's ufuncs by name. Ufuncs that are not listed use PyTorch's function of the same name."""

COMPOSED = frozenset({"ldexp"})
"""The operators that are composed of others, although PyTorch has a function of that name.

PyTorch's `ldexp` multiplies by the power of two, which overflows and underflows where the product does not.
"""

COMPLEX: dict[str, Callable[..., Any]] = {
    "add": _by_parts(torch.add),
    "subtract": _by_parts(torch.subtract),
    "rint": lambda x: torch.view_as_complex(torch.round(torch.view_as_real(resolved(x)))),
    "sign": _complex_sign,
    "less": _less,
    "less_equal": _less_equal,
    "greater": lambda a, b: _less(b, a),
    "greater_equal": lambda a, b: _less_equal(b, a),
    "maximum": lambda a, b: torch.where(torch.isnan(a) | _less_equal(b, a), a, b),
    "minimum": lambda a, b: torch.where(torch.isnan(a) | _less_equal(a, b), a, b),
    "fmax": lambda a, b: torch.where(torch.isnan(b) | _less_equal(b, a), a, b),
    "fmin": lambda a, b: torch.where(torch.isnan(b) | _less_equal(a, b), a, b),
}
"""The kernels for complex operands, where they differ."""

NO_OUT = ("isfinite", "isinf", "isnan", "positive")
"""The builtin functions of PyTorch that take no ``out=``."""

COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")


@functools.lru_cache(4096)
def loop(name: str, kinds: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    """Selects the loop of a NumPy ufunc.

    Args:
        name: the name of the ufunc.
        kinds: for each operand its torch dtype, or its type if it is a Python scalar.

    Returns:
        The torch dtypes to which the operands are cast, and the torch dtype of the result.

    Raises:
        TypeError: NumPy's ufunc does not support these dtypes, or PyTorch lacks one of them.
    """
    if all(k in PLAIN for k in kinds):  # Without an array operand, Python scalars are promoted as 0-d arrays.
        dtypes = [np.asarray(k(1)).dtype for k in kinds]
    else:
        dtypes = [NUMPY.get(k, np.dtype(bool) if k is bool else k) for k in kinds]
    *inputs, result = getattr(np, name).resolve_dtypes((*dtypes, None))
    if name in ("divide", "true_divide"):  # NumPy converts integers to floats inside the loop.
        inputs = [result, result]
    return tuple([to_torch(d) for d in inputs]), to_torch(result)


def elementwise(name: str, kernel: Callable[..., Any], scalar: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Returns NumPy's ufunc of that name for tensors.

    Args:
        name: the name of the ufunc.
        kernel: the function that computes it on tensors of the loop's dtypes.
        scalar: ``scalar(value, dtype)`` returns a 0-d tensor of a Python number.
    """
    complex_kernel = COMPLEX.get(name, kernel)
    takes_out = isinstance(kernel, BuiltinFunctionType) and name not in NO_OUT
    single = False  # Whether float16 is computed in float32, as in NumPy, because PyTorch has no float16 kernel.

    def compute(operands: Sequence[Any], result: Any, out: Any = None) -> Any:
        nonlocal single
        dtype = operands[0].dtype
        if dtype is torch.float16 and single:
            return cast(kernel(*[x.float() for x in operands]), result)
        try:
            if dtype.is_complex:
                return complex_kernel(*operands)
            return kernel(*operands) if out is None else kernel(*operands, out=out)
        except NotImplementedError as error:
            if dtype is torch.float16 and not single:
                single = True
                return compute(operands, result)
            raise ArgumentTypeError(f"{name}: PyTorch does not support {dtype}: {error}") from None

    def call(*args: Any, out: Any = None) -> Any:
        args = tuple([x if type(x) in PLAIN or isinstance(x, torch.Tensor) else as_tensor(x, scalar) for x in args])
        dtypes, result = loop(name, tuple([type(x) if type(x) in PLAIN else x.dtype for x in args]))
        if name in COMPARISONS and not any(isinstance(x, torch.Tensor) and x.dtype is torch.bool for x in args):
            args, dtypes = _in_range(args, dtypes)
        operands = [
            scalar(x, dtype) if type(x) in PLAIN else cast(x, dtype) for x, dtype in zip(args, dtypes, strict=True)
        ]
        if out is None:
            return cast(compute(operands, result), result)
        straight = takes_out and out.dtype is result and _fits(out, operands)
        output = compute(operands, result, out if straight else None)
        return out if output is out else store(out, output)

    call.__name__ = name
    return call


def _fits(out: Any, operands: Sequence[Any]) -> bool:
    """Whether ``out`` certainly has the shape of the result; PyTorch would resize it otherwise."""
    shapes = {x.shape for x in operands if x.ndim}
    return shapes == {out.shape} or (not shapes and not out.ndim)


def as_tensor(x: Any, scalar: Callable[[Any, Any], Any]) -> Any:
    """Converts a NumPy scalar or array to a tensor on the device on which ``scalar`` creates tensors."""
    x = np.asarray(x)
    zero = scalar(0, to_torch(x.dtype))
    return torch.tensor(host(x), device=zero.device)


def host(x: Any) -> Any:
    """Returns a host array in the form that PyTorch accepts: row-major, aligned, in native byte order.

    Raises:
        ArgumentTypeError: PyTorch does not support the dtype.
    """
    x = np.asarray(x)
    native = x.dtype.newbyteorder("=")
    to_torch(native)
    fits = x.flags.c_contiguous and x.flags.aligned and x.dtype == native and all(s >= 0 for s in x.strides)
    return x if fits else np.array(x, native, order="C")


def _in_range(args: tuple[Any, ...], dtypes: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Replaces a Python integer that the operands' dtype cannot represent by an infinity, compared in float64."""
    for x, dtype in zip(args, dtypes, strict=True):
        if type(x) is int and not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
            known = torch.iinfo(dtype)
            if not known.min <= x <= known.max:
                infinite = tuple([math.copysign(math.inf, a) if a is x else a for a in args])
                return infinite, (torch.float64,) * len(args)
    return args, dtypes
