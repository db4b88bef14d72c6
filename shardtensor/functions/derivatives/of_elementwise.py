"""The derivatives of elementwise operators."""

from __future__ import annotations

import math
from typing import Any

from shardtensor.core import call
from shardtensor.functions.derivatives.cotangents import Call, unbroadcast
from shardtensor.functions.derivatives.forms import Cotangents, Elementwise, elementwise, linear, rows, vjp, zero
from shardtensor.tensor.operands import dtype_of

_LN2, _LN10 = math.log(2), math.log(10)
_DEGREE = math.pi / 180


def _where(condition: Any, x1: Any, x2: Any) -> Any:
    return call("where", condition, x1, x2)


def _exp(x: Any) -> Any:
    return call("exp", x)


def _sqrt(x: Any) -> Any:
    return call("sqrt", x)


def _log(x: Any) -> Any:
    return call("log", x)


def _is_complex(x: Any) -> bool:
    return dtype_of(x).kind == "c"


class _Multiplied(Elementwise):
    """The derivative of a product: of a square one multiple, in place of two equal contributions."""

    def transposed(self, g: Any, call: Call) -> Cotangents:
        """See `Elementwise`. A cotangent may be one number, which is multiplied first."""
        if all(call.active) and call.saved["x1"] is call.saved["x2"]:
            return [g * 2 * call.saved["x1"], None]
        return super().transposed(g, call)


class _Subtracted(Elementwise):
    """The derivative of a difference: what was broadcast is summed before its sign changes, which is less work."""

    def transposed(self, g: Any, call: Call) -> Cotangents:
        """See `Elementwise`."""
        first = unbroadcast(g, call, 0) if call.active[0] else None
        return [first, -unbroadcast(g, call, 1) if call.active[1] else None]


rows(
    add=elementwise(lambda g: g, lambda g: g),
    subtract=_Subtracted((lambda g: g, lambda g: -g)),
    multiply=_Multiplied((lambda g, x2: g * x2, lambda g, x1: g * x1)),
    divide=elementwise(lambda g, x2: g / x2, lambda g, x2, y: g * (y / -x2)),
    negative=elementwise(lambda g: -g),
    positive=elementwise(lambda g: g),
    reciprocal=elementwise(lambda g, y: -(g * y * y)),
    square=elementwise(lambda g, x: g * 2 * x),
    remainder=elementwise(lambda g: g, lambda g, x1, x2: -(g * call("floor_divide", x1, x2))),
    fmod=elementwise(lambda g: g, lambda g, x1, x2: -(g * call("trunc", x1 / x2))),
    nextafter=elementwise(lambda g: g, None),
    heaviside=elementwise(None, lambda g, x1: _where(x1 == 0, g, 0)),
    fabs=elementwise(lambda g, x: g * call("sign", x)),
    ldexp=elementwise(lambda g, x2: call("ldexp", g, x2), None),
    deg2rad=elementwise(lambda g: g * _DEGREE),
    radians=elementwise(lambda g: g * _DEGREE),
    rad2deg=elementwise(lambda g: g / _DEGREE),
    degrees=elementwise(lambda g: g / _DEGREE),
)

# -- powers, exponentials and logarithms -----------------------------------------------------------


def _power_of_base(g: Any, x1: Any, x2: Any) -> Any:
    if type(x2) in (int, float):
        return g * 2 * x1 if x2 == 2 else g * 0 if x2 == 0 else g * (x2 * x1 ** (x2 - 1))
    return g * (x2 * x1 ** _where(x2 == 0, 1, x2 - 1))


def _power_of_exponent(g: Any, x1: Any, y: Any) -> Any:
    return g * (y * _log(_where(x1 == 0, 1, x1)))


rows(
    pow=elementwise(_power_of_base, _power_of_exponent),
    float_power=elementwise(_power_of_base, _power_of_exponent),
    exp=elementwise(lambda g, y: g * y),
    exp2=elementwise(lambda g, y: g * (y * _LN2)),
    expm1=elementwise(lambda g, y: g * (y + 1)),
    log=elementwise(lambda g, x: g / x),
    log2=elementwise(lambda g, x: g / (x * _LN2)),
    log10=elementwise(lambda g, x: g / (x * _LN10)),
    log1p=elementwise(lambda g, x: g / (x + 1)),
    logaddexp=elementwise(lambda g, x1, y: g * _exp(x1 - y), lambda g, x2, y: g * _exp(x2 - y)),
    logaddexp2=elementwise(lambda g, x1, y: g * call("exp2", x1 - y), lambda g, x2, y: g * call("exp2", x2 - y)),
    sqrt=elementwise(lambda g, y: g / (2 * y)),
    cbrt=elementwise(lambda g, y: g / (3 * y * y)),
    hypot=elementwise(lambda g, x1, y: g * (x1 / y), lambda g, x2, y: g * (x2 / y)),
)

# -- trigonometric and hyperbolic functions --------------------------------------------------------

rows(
    sin=elementwise(lambda g, x: g * call("cos", x)),
    cos=elementwise(lambda g, x: -(g * call("sin", x))),
    tan=elementwise(lambda g, y: g * (1 + y * y)),
    asin=elementwise(lambda g, x: g / _sqrt(1 - x * x)),
    acos=elementwise(lambda g, x: -(g / _sqrt(1 - x * x))),
    atan=elementwise(lambda g, x: g / (1 + x * x)),
    atan2=elementwise(
        lambda g, x1, x2: g * (x2 / (x1 * x1 + x2 * x2)), lambda g, x1, x2: -(g * (x1 / (x1 * x1 + x2 * x2)))
    ),
    sinh=elementwise(lambda g, x: g * call("cosh", x)),
    cosh=elementwise(lambda g, x: g * call("sinh", x)),
    tanh=elementwise(lambda g, y: g * (1 - y * y)),
    asinh=elementwise(lambda g, x: g / _sqrt(x * x + 1)),
    acosh=elementwise(lambda g, x: g / (_sqrt(x - 1) * _sqrt(x + 1))),
    atanh=elementwise(lambda g, x: g / (1 - x * x)),
)

# -- choices, parts and casts ----------------------------------------------------------------------


def _chosen(g: Any, x1: Any, x2: Any, name: str) -> Any:
    """Returns the cotangent of x1 where it is chosen, and half of it where x2 is equal."""
    return g * _where(call(name, x1, x2), 1.0, _where(x1 == x2, 0.5, 0.0))


def _chosen_numbers(g: Any, x1: Any, x2: Any, name: str) -> Any:
    """Likewise for operators that choose numbers in place of NaN."""
    is_chosen = call("logical_or", call(name, x1, x2), call("isnan", x2))
    share = _where(is_chosen, 1.0, _where(x1 == x2, 0.5, 0.0))
    return g * _where(call("isnan", x1), 0.0, share)


def _of_abs(g: Any, x: Any) -> Any:
    return g * (call("conj", call("sign", x)) if _is_complex(x) else call("sign", x))


def _of_sign(g: Any, recorded: Call) -> Any:
    """The sign of a complex number is its direction, which is not a holomorphic function."""
    x = recorded.saved["x"]
    if not _is_complex(x):
        return None
    size = call("where", x == 0, 1, call("abs", x))
    return g / size - call("conj", x) * (call("real", g * x) / size**3)


def _inside(g: Any, x: Any, min: Any, max: Any) -> Any:
    kept = [call(name, x, bound) for name, bound in (("greater_equal", min), ("less_equal", max)) if bound is not None]
    if not kept:
        return g
    return _where(kept[0] if len(kept) == 1 else call("logical_and", *kept), g, 0.0)


def _at_lower(g: Any, x: Any, min: Any, max: Any) -> Any:
    is_less = call("less", x, min)
    return _where(is_less if max is None else call("logical_and", is_less, call("less", min, max)), g, 0.0)


def _at_upper(g: Any, x: Any, min: Any, max: Any) -> Any:
    is_greater = call("greater", x if min is None else call("maximum", x, min), max)
    return _where(is_greater, g, 0.0)


rows(
    maximum=elementwise(
        lambda g, x1, x2: _chosen(g, x1, x2, "greater"), lambda g, x1, x2: _chosen(g, x2, x1, "greater")
    ),
    minimum=elementwise(lambda g, x1, x2: _chosen(g, x1, x2, "less"), lambda g, x1, x2: _chosen(g, x2, x1, "less")),
    fmax=elementwise(
        lambda g, x1, x2: _chosen_numbers(g, x1, x2, "greater"), lambda g, x1, x2: _chosen_numbers(g, x2, x1, "greater")
    ),
    fmin=elementwise(
        lambda g, x1, x2: _chosen_numbers(g, x1, x2, "less"), lambda g, x1, x2: _chosen_numbers(g, x2, x1, "less")
    ),
    clip=elementwise(_inside, _at_lower, _at_upper),
    where=elementwise(
        None, lambda g, condition: _where(condition, g, 0.0), lambda g, condition: _where(condition, 0.0, g)
    ),
    abs=elementwise(_of_abs),
    sign=vjp(_of_sign, "x", after_composition=True),
    mantissa=elementwise(lambda g, x: call("ldexp", g, -call("exponent", x))),
    # Of these, only copies of arrays without elements are recorded, and zeros: other results are views.
    real=elementwise(lambda g: None),
    imag=elementwise(lambda g: None),
    copysign=elementwise(lambda g, x1, y: g * (call("sign", x1) * call("sign", y)), None),
    conj=elementwise(lambda g: call("conj", g)),
    astype=linear(lambda g, call: g, partial_sums=True),
)

zero(
    "floor ceil trunc rint round floor_divide spacing signbit exponent gcd lcm "
    "equal not_equal less less_equal greater greater_equal isfinite isinf isnan logical_and logical_not logical_or "
    "logical_xor bitwise_and bitwise_or bitwise_xor bitwise_invert bitwise_left_shift bitwise_right_shift "
    "bitwise_count argmax argmin count_nonzero nonzero searchsorted"
)
