"""Functions along dimensions that are not split, on other devices than the host: each is one operator there.

Where the dimension is split, and on the host, they are composed of slices, which move the elements at the boundaries of
shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.core import implements, innermost, operator
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, lacks_elements


def are_whole(x: Any, dims: Sequence[int]) -> bool:
    """Whether x is a tensor on other devices than the host that splits none of the dimensions, and no interpreter
    records the operators.
    """
    if not isinstance(x, ShardedTensor) or innermost() is not None or lacks_elements(x):
        return False
    value = x._aval
    if value.backend.on_host or value.offloaded:
        return False
    counts = value.grid.counts
    return all(counts[d] == 1 for d in dims)


# -- padding ---------------------------------------------------------------------------------------


def _padded_rule(shapes: Sequence[Shape], *, widths: Any, value: bytes) -> tuple[str, Shape]:
    (shape,) = shapes
    left = " ".join([f"d{d}!" if any(pair) else f"d{d}" for d, pair in enumerate(widths)])
    right = " ".join([f"p{d}" if any(pair) else f"d{d}" for d, pair in enumerate(widths)])
    new = [before + n + after for n, (before, after) in zip(shape, widths, strict=True)]
    return f"{left} -> {right}", tuple(new)


@operator(_padded_rule, error_name="pad")
def padded(x: ArrayLike, /, *, widths: tuple[tuple[int, int], ...], value: bytes) -> ShardedTensor:
    """Returns x with a number at the ends of its dimensions.

    Args:
        x: a tensor.
        widths: the numbers of elements before and behind those of each dimension.
        value: the bytes of the number, because those that are equal may differ.

    >>> from shardtensor.functions.building.unsplit_lines import padded
    >>> padded(st.asarray([1, 2]), widths=((1, 2),), value=np.int64(7).tobytes()).tolist()
    [7, 1, 2, 7, 7]
    """


@implements(padded, "kernel")
def _padded(xp: Any, context: ShardContext, x: Any, *, widths: tuple[tuple[int, int], ...], value: bytes) -> Any:
    number = np.frombuffer(value, context.dtype)[0].item()
    out = xp.empty(context.local_shape, dtype=context.dtype)
    inner = tuple([slice(before, before + n) for n, (before, _) in zip(x.shape, widths, strict=True)])
    if xp is not np and math.prod(x.shape) >= _LARGE:
        for d, (n, (before, after)) in enumerate(zip(out.shape, widths, strict=True)):
            for line in ((0, before), (n - after, n)):
                if line[0] < line[1]:
                    out[(*inner[:d], slice(*line))] = number
    else:
        out[...] = number
    if hasattr(xp, "store"):
        xp.store(out, inner, x)
    else:
        out[inner] = x
    return out


_LARGE = 1 << 21
"""The number of elements from which on filling all of an array takes longer than the launches for its ends."""


# -- derivatives -----------------------------------------------------------------------------------


def _derivative_rule(shapes: Sequence[Shape], *, axis: int, spacing: float) -> str:
    names = [f"d{d}" for d in range(len(shapes[0]))]
    whole = " ".join([f"{name}!" if d == axis else name for d, name in enumerate(names)])
    return f"{whole} -> {' '.join(names)}"


@operator(_derivative_rule, error_name="gradient")
def central_differences(x: ArrayLike, /, *, axis: int, spacing: float) -> ShardedTensor:
    """Returns `gradient` along one axis, whose points have the same spacing, with differences of first order at the
    ends.

    >>> from shardtensor.functions.building.unsplit_lines import central_differences
    >>> central_differences(st.asarray([1.0, 2.0, 4.0]), axis=0, spacing=1.0).tolist()
    [1.0, 1.5, 2.0]
    """


@implements(central_differences, "kernel")
def _central_differences(xp: Any, context: ShardContext, x: Any, *, axis: int, spacing: float) -> Any:
    out, before = xp.empty(context.local_shape, dtype=context.dtype), (slice(None),) * axis
    for to, (behind, front), distance in (
        (slice(1, -1), (slice(2, None), slice(None, -2)), 2.0 * spacing),
        (slice(0, 1), (slice(1, 2), slice(0, 1)), spacing),
        (slice(-1, None), (slice(-1, None), slice(-2, -1)), spacing),
    ):
        part = out[(*before, to)]
        if hasattr(xp, "difference_quotient"):
            xp.difference_quotient(x[(*before, behind)], x[(*before, front)], distance, part)
        else:
            xp.subtract(x[(*before, behind)], x[(*before, front)], out=part)
            xp.divide(part, distance, out=part)
    return out
