"""The derivatives of Fourier transforms, whose transposes are Fourier transforms.

The matrices of `fft` and `ifft` are symmetric. Those of transforms from or to real numbers have only the first half of
the frequencies, since the others follow: all but the first and, of an even number of elements, the last one of the half
stand for two.
"""

from __future__ import annotations

from typing import Any

from shardtensor.core import call
from shardtensor.functions.derivatives.cotangents import Call, whole
from shardtensor.functions.derivatives.forms import Derivative, linear, rows
from shardtensor.sharding.rules import normalize_axis
from shardtensor.sharding.spec import P
from shardtensor.tensor.operands import shape_of


def _transposed(name: str, *, to_half: bool = False, from_half: bool = False) -> Derivative:
    """Returns the derivative of a transform.

    Args:
        name: the transform that is its transpose, but for the frequencies that stand for two.
        to_half: whether the result has half of the frequencies.
        from_half: whether the operand has.
    """

    def transposed(g: Any, recorded: Call) -> Any:
        shape, over = shape_of(recorded.kinds[0]), shape_of(recorded.results[0])
        along = normalize_axis(recorded.params["axis"], len(shape))
        n = recorded.params["n"]
        size = over[along] if not to_half else shape[along] if n is None else int(n)
        if 0 in shape or 0 in over:
            return None
        g = whole(g, recorded.results[0])
        if to_half:
            g = _weighted(g, along, size, 0.5)
        g = call(name, g, size, along, recorded.params["norm"])
        if from_half:
            g = _weighted(g, along, size, 2)
        return _resized(g, along, shape[along])

    return linear(transposed)


def _weighted(x: Any, along: int, size: int, weight: float) -> Any:
    """Returns the frequencies of ``size`` elements, of which those that stand for two are multiplied by a number."""
    chains = x.sharding.spec.chains_of(x.ndim)
    numbers = call("arange", x.shape[along], device=x.sharding.with_spec(P(chains[along])))
    stands_for_itself = numbers % (size if size % 2 else size // 2) == 0
    others = tuple([d for d in range(x.ndim) if d != along])
    return call("where", call("expand_dims", stands_for_itself, axis=others), x, x * weight)


def _resized(x: Any, along: int, size: int) -> Any:
    """Returns x with ``size`` elements along a dimension: cut, or padded with zeros."""
    if size <= x.shape[along]:
        return x if size == x.shape[along] else x[(slice(None),) * along + (slice(size),)]
    return call("pad", x, [(0, size - x.shape[along] if d == along else 0) for d in range(x.ndim)])


rows(
    fft=_transposed("fft"),
    ifft=_transposed("ifft"),
    rfft=_transposed("hfft", to_half=True),
    ihfft=_transposed("irfft", to_half=True),
    irfft=_transposed("ihfft", from_half=True),
    hfft=_transposed("rfft", from_half=True),
)
