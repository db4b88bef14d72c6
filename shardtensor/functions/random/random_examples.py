"""Random numbers of many examples, each with its own key: the results of `vmap` for the operators that draw them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.core import OPS, implements, operator
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import sharded_dtype
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor


def _rule(shapes: Sequence[Shape], *, shape: Shape, **params: Any) -> tuple[str, Shape]:
    names = " ".join(["example", *[f"n{d}" for d in range(len(shape))]])
    return f"{', '.join(['example word!', *[names] * (len(shapes) - 1)])} -> {names}", (shapes[0][0], *shape)


@operator(
    _rule,
    variadic=True,
    dtype=lambda *arrays, dtype, **params: np.empty((), sharded_dtype(dtype)),
    error_name="vmap",
    tags=("internal",),
)
def draws_of_examples(
    arrays: Sequence[ArrayLike],
    /,
    name: str,
    shape: Shape,
    numbers: tuple[int, ...],
    params: tuple[Any, ...],
    dtype: Any,
) -> ShardedTensor:
    """Draws random numbers of several examples by an operator: for each the same as a call with its key.

    Args:
        arrays: the two words of the key of each example, in an array of int64, and the parameters of the distribution,
            of which each example has those of one index.
        name: the name of the operator.
        shape: the shape of one example.
        numbers: its operands besides the key and the arrays.
        params: pairs of the names and the values of its other parameters.
        dtype: the dtype of the result.

    >>> from shardtensor.functions.random.random_examples import draws_of_examples
    >>> words = np.array([[7, 0], [8, 0]])
    >>> settings = (("shape", (2,)), ("dtype", np.float64))
    >>> draws = draws_of_examples([words], "normal", (2,), (), settings, np.float64)
    >>> bool(st.all(draws[1] == st.random.normal(st.random.key(8), (2,))))
    True
    """


@implements(draws_of_examples, "kernel")
def _draws_of_examples(
    xp: Any,
    context: ShardContext,
    words: Any,
    *parameters: Any,
    name: str,
    shape: Shape,
    numbers: tuple[int, ...],
    params: tuple[Any, ...],
    dtype: Any,
) -> Any:
    kernel: Any = OPS[name].parts.kernel
    boxes, shapes = tuple([box[1:] for box in context.boxes[1:]]), tuple([s[1:] for s in context.shapes[1:]])
    one = ShardContext(context.box[1:], boxes, context.shape[1:], shapes, context.dtype)
    draws = []
    for k in range(words.shape[0]):
        seed, stream = [int(words[k, i]) % 2**64 for i in range(2)]
        draws.append(kernel(xp, one, *[p[k] for p in parameters], seed | stream << 64, *numbers, **dict(params)))
    return xp.stack(draws) if draws else xp.empty(context.local_shape, dtype=context.dtype)
