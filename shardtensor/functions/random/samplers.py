"""The functions of `shardtensor.random` that return arrays.

They check their arguments and call the operators of `shardtensor.functions.random.distributions`. Common arguments:

- ``key``: a `Key`.
- ``shape``: the shape of the result. Where there are parameters that can be arrays, they broadcast to it, and None is
  the shape to which they broadcast.
- ``dtype``: float16, float32 or float64. The default is float64; for parameters of a floating-point dtype, that one.
- ``device`` or ``out_sharding``: a Device, Mesh, NamedSharding or P, as for `shardtensor.functions.standard.creation`.
  By default, the result is sharded like the parameters that are arrays, and over the default mesh without any.

Raises:
    ArgumentTypeError: an argument has the wrong type, such as an integer in the place of a key.
    ArgumentError: a scalar parameter is out of its range. Elements of arrays that are give NaN, and -1 where the result
        consists of integers.
    ShapeError: a size is negative, or a parameter does not broadcast to ``shape``.
    ShardingError: the spec of ``device`` has more dimensions than the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.backend.registry import array_backend
from shardtensor.core import hinted
from shardtensor.errors import ArgumentError, ArgumentTypeError, AxisError, ShapeError, type_text
from shardtensor.functions.placement.conversion import asarray
from shardtensor.functions.placement.transfers import device_put
from shardtensor.functions.random import discrete_distributions, distributions
from shardtensor.functions.random.random_keys import Key, bits_of, integer
from shardtensor.functions.standard.manipulation import broadcast_to
from shardtensor.functions.standard.searching import argmax
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape, Where, as_sharding, checked_shape, chosen
from shardtensor.sharding.rules import normalize_axis
from shardtensor.tensor.operands import dtype_of, sharded_dtype
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_Where = Where | None

# -- without parameters that can be arrays ---------------------------------------------------------


def _float_dtype(dtype: Any, caller: str) -> np.dtype[Any]:
    try:
        known = sharded_dtype(np.float64 if dtype is None else dtype)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{caller}: {error}") from None
    if known.kind != "f" or known.itemsize > 8:
        raise ArgumentTypeError(f"{caller}: dtype is {known}; wanted float16, float32 or float64")
    return known


@hinted
def uniform(
    key: Key,
    shape: int | Shape = (),
    *,
    dtype: npt.DTypeLike | None = None,
    device: _Where = None,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Draws numbers that are uniformly distributed in [0, 1).

    They are multiples of 2**-53 for float64, of 2**-24 for float32 and of 2**-11 for float16, all equally likely.

    Args:
        key, shape, dtype, device, out_sharding: see `shardtensor.functions.random.samplers`.

    >>> x = st.random.uniform(st.random.key(0), (1000, 1000), dtype="float32")
    >>> abs(x.mean().item() - 0.5) < 1e-3
    True
    """
    device = chosen(device, out_sharding, "uniform")
    bits, known = bits_of(key, "uniform"), _float_dtype(dtype, "uniform")
    return distributions.uniform(bits, shape=checked_shape(shape, "uniform"), dtype=known, device=device)


@hinted
def normal(
    key: Key,
    shape: int | Shape = (),
    *,
    dtype: npt.DTypeLike | None = None,
    device: _Where = None,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Draws numbers of the standard normal distribution, of mean 0 and variance 1.

    Those of float64 are made by a ziggurat (Marsaglia and Tsang, 2000) from 64 bits each, and from another 64 bits for
    one number of 80; they reach 11 standard deviations. Those of the smaller dtypes are made by the method of Box and
    Muller from 32 bits each, and reach 6.7. Both tails are symmetric and have a full significand up to their ends.

    Args:
        key, shape, dtype, device, out_sharding: see `shardtensor.functions.random.samplers`.

    >>> x = st.random.normal(st.random.key(0), (1000, 1000))
    >>> abs(x.mean().item()) < 5e-3, abs(x.var().item() - 1) < 5e-3
    (True, True)
    """
    device = chosen(device, out_sharding, "normal")
    bits, known = bits_of(key, "normal"), _float_dtype(dtype, "normal")
    return distributions.normal(bits, shape=checked_shape(shape, "normal"), dtype=known, device=device)


@hinted
def exponential(
    key: Key,
    shape: int | Shape = (),
    *,
    dtype: npt.DTypeLike | None = None,
    device: _Where = None,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Draws numbers of the exponential distribution of mean 1: up to 45 for float64, and to 22.9 for smaller dtypes.

    Args:
        key, shape, dtype, device, out_sharding: see `shardtensor.functions.random.samplers`.

    >>> round(st.random.exponential(st.random.key(0), (1000, 1000)).mean().item(), 1)
    1.0
    """
    device = chosen(device, out_sharding, "exponential")
    bits, known = bits_of(key, "exponential"), _float_dtype(dtype, "exponential")
    return distributions.exponential(bits, shape=checked_shape(shape, "exponential"), dtype=known, device=device)


@hinted
def integers(
    key: Key, low: int, high: int, shape: int | Shape = (), *, device: _Where = None, out_sharding: _Where = None
) -> ShardedTensor:
    """Draws integers from ``low`` to ``high - 1``, all equally likely.

    Args:
        key, shape, device, out_sharding: see `shardtensor.functions.random.samplers`.
        low: the least integer, from -2**63.
        high: the end, which is excluded: greater than ``low``, and at most 2**63.

    Returns:
        A tensor of int64.

    >>> st.random.integers(st.random.key(0), 1, 7, (8,)).tolist()
    [5, 1, 3, 6, 6, 6, 6, 3]
    """
    device = chosen(device, out_sharding, "integers")
    first, end = integer(low, "integers", "low"), integer(high, "integers", "high")
    if not -(2**63) <= first < end <= 2**63:
        raise ArgumentError(f"integers: low is {first} and high {end}; wanted -2**63 <= low < high <= 2**63")
    sizes = checked_shape(shape, "integers")
    return distributions.integers(
        bits_of(key, "integers"), first, end, shape=sizes, dtype=np.dtype(np.int64), device=device
    )


@hinted
def permutation(key: Key, n: int, *, device: _Where = None, out_sharding: _Where = None) -> ShardedTensor:
    """Draws a permutation of the integers below ``n``, all equally likely: the order of n random words.

    Each device draws its part of the words, and they are sorted as by `shardtensor.argsort`; up to 64 KiB of words,
    each device draws and sorts all of them. Devices that share a memory sort them together. The numbers do not depend
    on the devices.

    Args:
        key, device, out_sharding: see `shardtensor.functions.random.samplers`.
        n: the number of integers.

    Returns:
        A tensor of int64 with one dimension.

    >>> st.random.permutation(st.random.key(0), 8).tolist()
    [7, 2, 1, 4, 0, 6, 5, 3]
    """
    device = chosen(device, out_sharding, "permutation")
    count = integer(n, "permutation", "n")
    if count < 0:
        raise ArgumentError(f"permutation: n is {count}; wanted at least 0")
    bits, dtype = bits_of(key, "permutation"), np.dtype(np.int64)
    return distributions.permutation(bits, n=count, shape=(count,), dtype=dtype, device=device)


@hinted
def choice(
    key: Key,
    a: int | ArrayLike,
    shape: int | Shape = (),
    replace: bool = True,
    *,
    device: _Where = None,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Draws elements of ``a``, all equally likely.

    Args:
        key, shape, device, out_sharding: see `shardtensor.functions.random.samplers`.
        a: an array, of which elements along the first dimension are drawn; or an integer n, for those of ``arange(n)``.
            An array is indexed as in ``a[indices]``.
        replace: whether an element can be drawn more than once. Otherwise a permutation is drawn (see `permutation`).

    Raises:
        ArgumentError: there are no elements, or fewer than are to be drawn without replacement.

    >>> st.random.choice(st.random.key(0), 5, (5,), replace=False).tolist()
    [2, 1, 4, 0, 3]
    >>> st.random.choice(st.random.key(1), np.array([10, 20, 30]), (4,)).tolist()
    [30, 30, 10, 20]
    """
    device = chosen(device, out_sharding, "choice")
    sizes, bits, dtype = checked_shape(shape, "choice"), bits_of(key, "choice"), np.dtype(np.int64)
    array = _elements(a)
    count, size = integer(a, "choice", "a") if array is None else array.shape[0], math.prod(sizes)
    if count < 0 or (size and (not count or (size > count and not replace))):
        manner = "with" if replace else "without"
        raise ArgumentError(
            f"choice: a has {counted(count, 'element')}, and {size} are to be drawn {manner} replacement"
        )
    if replace:
        indices = distributions.integers(bits, 0, max(count, 1), shape=sizes, dtype=dtype, device=device)
    else:
        indices = distributions.permutation(bits, n=count, shape=sizes, dtype=dtype, device=device)
    if array is None:
        return indices
    elements: ShardedTensor = array[indices]
    return elements if device is None else device_put(elements, as_sharding(device, elements.ndim, "choice"))


def _elements(a: Any) -> Any:
    """Returns an array of at least one dimension, as a tensor or an array of a backend; None for an integer."""
    if hasattr(a, "__index__") and not getattr(a, "ndim", 0):
        return None
    array = a if isinstance(a, ShardedTensor) or array_backend(a) is not None else asarray(a)
    if not array.ndim:
        raise ArgumentTypeError(f"choice: a is {type_text(a)}; wanted an array or an integer")
    return array


# -- with parameters that can be arrays ------------------------------------------------------------


def _parameter(value: Any, caller: str, name: str, fits: Callable[[float], bool], wanted: str) -> Any:
    """Returns a parameter as an array, or as a float if it is a scalar.

    Raises:
        ArgumentTypeError: it is neither.
        ArgumentError: it is a scalar that does not fit.
    """
    if isinstance(value, ShardedTensor) or array_backend(value) is not None:
        if isinstance(value, (np.generic, np.ndarray)) and not value.ndim:
            value = value.item()
        else:
            return value
    if isinstance(value, np.ndarray) and value.ndim:
        return value
    if not isinstance(value, (bool, int, float, np.generic, np.ndarray)) or isinstance(value, np.complexfloating):
        kind = type_text(value)
        raise ArgumentTypeError(f"{caller}: {name} is {kind}; wanted a tensor, an array or a real number")
    number = float(value)
    if not fits(number):
        raise ArgumentError(f"{caller}: {name} is {number:g}; wanted {wanted}")
    return number


def _sizes(caller: str, parameters: Sequence[Any], shape: Any) -> Shape:
    """Returns the shape of the result, to which parameters broadcast.

    Raises:
        ShapeError: they do not.
    """
    shapes = [tuple(getattr(p, "shape", ())) for p in parameters]
    try:
        together = np.broadcast_shapes(*shapes)
        sizes = together if shape is None else checked_shape(shape, caller)
        fits = np.broadcast_shapes(together, sizes) == sizes
    except ShapeError:
        raise
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(f"{caller}: parameters of shapes {', '.join(map(str, shapes))} do not broadcast to {shape}")
    return sizes


def _drawn(
    distribution: Callable[..., ShardedTensor],
    bits: Any,
    parameters: Sequence[Any],
    shape: Any,
    device: Any,
    dtype: Any,
) -> ShardedTensor:
    """Draws numbers by an operator that takes arrays of the shape of the result; if all parameters are numbers, by
    `distributions.drawn`.
    """
    name = distribution.__name__
    sizes = _sizes(name, parameters, shape)
    if all(isinstance(p, float) for p in parameters):
        first, second = [*parameters, 0.0][:2]
        return distributions.drawn(
            bits, first, second, distribution=name, shape=sizes, dtype=np.dtype(dtype), device=device
        )
    operands = [p if isinstance(p, float) else _spread(p, sizes, device) for p in parameters]
    return distribution(*operands, bits, dtype=np.dtype(dtype))


def _spread(array: Any, shape: Shape, device: Any) -> Any:
    if tuple(array.shape) != shape:
        array = broadcast_to(array, shape)
    return array if device is None else device_put(array, as_sharding(device, len(shape), "device"))


def _result_dtype(parameters: Sequence[Any], dtype: Any, caller: str) -> np.dtype[Any]:
    """Returns the dtype that the caller gave, else that of parameters of a floating-point dtype, else float64."""
    if dtype is not None:
        return _float_dtype(dtype, caller)
    dtypes = [dtype_of(p) for p in parameters if not isinstance(p, float)]
    common = np.result_type(*dtypes) if dtypes else np.dtype(np.float64)
    return _float_dtype(common if common.kind == "f" else np.float64, caller)


def _from_0_to(most: float) -> Callable[[float], bool]:
    return lambda number: 0 <= number <= most


@hinted
def bernoulli(
    key: Key,
    p: ArrayLike = 0.5,
    shape: int | Shape | None = None,
    *,
    device: _Where = None,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Draws bools that are true with probability ``p``.

    Args:
        key, shape, device, out_sharding: see `shardtensor.functions.random.samplers`.
        p: the probability, from 0 to 1. Bools are false where it is not a number.

    >>> round(st.random.bernoulli(st.random.key(0), 0.25, (1000, 1000)).mean().item(), 2)
    0.25
    """
    device = chosen(device, out_sharding, "bernoulli")
    bits = bits_of(key, "bernoulli")
    parameters = [_parameter(p, "bernoulli", "p", _from_0_to(1), "a probability from 0 to 1")]
    return _drawn(distributions.bernoulli, bits, parameters, shape, device, bool)


@hinted
def categorical(
    key: Key,
    logits: ArrayLike,
    axis: int = -1,
    shape: int | Shape | None = None,
    *,
    device: _Where = None,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Draws indices along ``axis``: index i with a probability that is proportional to ``exp(logits[i])``.

    A number of the Gumbel distribution is added to each logit, and the index of the greatest sum is drawn. The logits
    and the sums stay sharded.

    Args:
        key, device, out_sharding: see `shardtensor.functions.random.samplers`.
        logits: an array of the logarithms of the probabilities, up to a constant. -inf is never drawn.
        axis: the dimension of the logits along which indices are drawn; negative numbers count from the end.
        shape: the shape of the result, which ends with the shape of the logits without ``axis``; the other dimensions
            are those of repeated draws. None is that shape.

    Returns:
        A tensor of int64.

    Raises:
        AxisError: the logits have no such axis.

    >>> logits = np.log([0.5, 0.5, 0.0], where=[True, True, False], out=np.full(3, -np.inf))
    >>> st.random.categorical(st.random.key(0), logits, shape=(8,)).tolist()
    [1, 0, 1, 1, 0, 1, 0, 1]
    """
    device = chosen(device, out_sharding, "categorical")
    bits, array = bits_of(key, "categorical"), _parameter(logits, "categorical", "logits", math.isnan, "an array")
    sizes = tuple(getattr(array, "shape", ()))
    if not sizes:
        raise AxisError("categorical: logits has 0 dimensions; wanted at least 1")
    try:
        along = normalize_axis(axis, len(sizes))
    except (AxisError, ArgumentTypeError) as error:
        raise type(error)(f"categorical: {error}") from None
    batch = sizes[:along] + sizes[along + 1 :]
    if not sizes[along]:
        raise ShapeError(f"categorical: logits has shape {sizes}, with no elements along axis {axis}")
    drawn = batch if shape is None else checked_shape(shape, "categorical")
    extra = len(drawn) - len(batch)
    if extra < 0 or drawn[extra:] != batch:
        raise ShapeError(f"categorical: shape is {drawn}; wanted one that ends with that of the draws, {batch}")
    noisy = _drawn(distributions.categorical, bits, [array], (*drawn[:extra], *sizes), device, np.float64)
    return argmax(noisy, axis=extra + along)


@hinted
def gamma(
    key: Key,
    a: ArrayLike,
    shape: int | Shape | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
    device: _Where = None,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Draws numbers of the gamma distribution of shape ``a`` and scale 1, whose mean and variance are ``a``.

    Args:
        key, shape, dtype, device, out_sharding: see `shardtensor.functions.random.samplers`.
        a: the shape parameter, at least 0. Where it is far below 1, most numbers are too small for a float and 0.

    >>> round(st.random.gamma(st.random.key(0), 3.0, (1000, 1000)).mean().item(), 1)
    3.0
    """
    device = chosen(device, out_sharding, "gamma")
    bits = bits_of(key, "gamma")
    parameters = [_parameter(a, "gamma", "a", _from_0_to(math.inf), "a number of at least 0")]
    known = _result_dtype(parameters, dtype, "gamma")
    return _drawn(distributions.gamma, bits, parameters, shape, device, known)


@hinted
def poisson(
    key: Key, lam: ArrayLike, shape: int | Shape | None = None, *, device: _Where = None, out_sharding: _Where = None
) -> ShardedTensor:
    """Draws integers of the Poisson distribution, whose mean and variance are ``lam``.

    Args:
        key, shape, device, out_sharding: see `shardtensor.functions.random.samplers`.
        lam: the mean, from 0 to 2**53.

    Returns:
        A tensor of int64.

    >>> st.random.poisson(st.random.key(0), 4.0, (8,)).tolist()
    [1, 6, 6, 4, 0, 3, 2, 4]
    """
    device = chosen(device, out_sharding, "poisson")
    bits = bits_of(key, "poisson")
    parameters = [_parameter(lam, "poisson", "lam", _from_0_to(2.0**53), "a number from 0 to 2**53")]
    return _drawn(discrete_distributions.poisson, bits, parameters, shape, device, np.int64)


@hinted
def binomial(
    key: Key,
    n: ArrayLike,
    p: ArrayLike,
    shape: int | Shape | None = None,
    *,
    device: _Where = None,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Draws numbers of successes in ``n`` independent trials, each of which succeeds with probability ``p``.

    Args:
        key, shape, device, out_sharding: see `shardtensor.functions.random.samplers`.
        n: the number of trials, an integer from 0 to 2**53.
        p: the probability, from 0 to 1.

    Returns:
        A tensor of int64.

    >>> st.random.binomial(st.random.key(0), 10, np.array([0.0, 0.5, 1.0])).tolist()
    [0, 7, 10]
    """
    device = chosen(device, out_sharding, "binomial")
    bits = bits_of(key, "binomial")
    parameters = [
        _parameter(n, "binomial", "n", lambda n: 0 <= n <= 2.0**53 and n == int(n), "an integer from 0 to 2**53"),
        _parameter(p, "binomial", "p", _from_0_to(1), "a probability from 0 to 1"),
    ]
    return _drawn(discrete_distributions.binomial, bits, parameters, shape, device, np.int64)


@hinted
def truncated_normal(
    key: Key,
    lower: ArrayLike,
    upper: ArrayLike,
    shape: int | Shape | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
    device: _Where = None,
    out_sharding: _Where = None,
) -> ShardedTensor:
    """Draws numbers of the standard normal distribution, given that they are from ``lower`` to ``upper``.

    The numbers are as accurate in the tails as elsewhere.

    Args:
        key, shape, dtype, device, out_sharding: see `shardtensor.functions.random.samplers`.
        lower: the least number, or -inf.
        upper: the greatest number, greater than ``lower``, or inf.

    >>> x = st.random.truncated_normal(st.random.key(0), 5.0, np.inf, (1000,))
    >>> 5 <= x.min().item(), x.mean().item() < 5.3
    (True, True)
    """
    device = chosen(device, out_sharding, "truncated_normal")
    bits = bits_of(key, "truncated_normal")
    parameters = [
        _parameter(lower, "truncated_normal", "lower", lambda a: a < math.inf, "a number below inf"),
        _parameter(upper, "truncated_normal", "upper", lambda b: b > -math.inf, "a number above -inf"),
    ]
    if all(isinstance(end, float) for end in parameters) and not parameters[0] < parameters[1]:
        raise ArgumentError(
            f"truncated_normal: lower is {parameters[0]:g} and upper {parameters[1]:g}; wanted lower < upper"
        )
    known = _result_dtype(parameters, dtype, "truncated_normal")
    return _drawn(distributions.truncated_normal, bits, parameters, shape, device, known)
