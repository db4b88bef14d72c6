"""Parts of arrays, laid out as in the whole array, have the bits that NumPy computes there."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

from shardtensor.host.summation_order import as_part, may_differ
from tests.draws import drawn

SIDES = [1, 2, 3, 9, 17, 40, 150]


@some.composite
def parts(draw: Any) -> Any:
    """Draws a dense array in any order of dimensions, a box of it, and the dimensions along which it is added."""
    shape = draw(some.lists(some.sampled_from(SIDES), min_size=1, max_size=4))
    while np.prod(shape) > 50_000:
        shape[np.argmax(shape)] //= 3
    order = draw(some.permutations(range(len(shape))))
    dtype = draw(some.sampled_from(["float32", "float64", "complex64", "float16"]))
    numbers = np.random.default_rng(draw(some.integers(0, 99))).normal(size=2 * int(np.prod(shape)))
    numbers = numbers.view(complex) if dtype[0] == "c" else numbers[: len(numbers) // 2]
    whole = numbers.astype(dtype).reshape([shape[d] for d in order]).transpose(np.argsort(order))
    box = []
    for n in shape:
        begin = draw(some.integers(0, n - 1))
        box.append((begin, draw(some.sampled_from([n, begin + 1, draw(some.integers(begin + 1, n))]))))
        box[-1] = draw(some.sampled_from([box[-1], (0, n)]))
    axes = draw(some.sets(some.sampled_from(range(len(shape))), min_size=1))
    return whole, tuple(box), tuple(sorted(axes)), order


def alone(whole: np.ndarray, box: Any, order: Any) -> np.ndarray:
    """Returns a part as an array of its own, whose dimensions have the order of the whole array in memory."""
    part = whole[tuple([slice(*ends) for ends in box])].transpose(order)
    return np.ascontiguousarray(part).reshape(part.shape).transpose(np.argsort(order))


def once(ndim: int, twice: tuple[int, ...]) -> tuple[slice, ...]:
    """Returns the index of one of each two equal elements."""
    return tuple([slice(0, 1) if d in twice else slice(None) for d in range(ndim)])


@pytest.mark.parametrize("function", [np.sum, np.mean, np.prod], ids=lambda f: f.__name__)
@hypothesis.settings(max_examples=drawn(150))
@hypothesis.given(drawn=parts())
@np.errstate(all="ignore")
def test_parts_have_the_bits_of_the_whole(function: Any, drawn: Any) -> None:
    whole, box, axes, order = drawn
    # What is kept, is whole: a result is computed beside its neighbours.
    added = tuple([slice(*ends) if d in axes else slice(None) for d, ends in enumerate(box)])
    kept = tuple([slice(None) if d in axes else slice(*ends) for d, ends in enumerate(box)])
    wanted = function(whole[added], axis=axes, keepdims=True)[kept]
    x = alone(whole, box, order)
    part, twice = as_part(x, box, whole.shape, axes)
    some_of_it = once(x.ndim, twice)
    np.testing.assert_array_equal(part[some_of_it], x)
    made = function(part, axis=axes, keepdims=True)[some_of_it]
    assert made.tobytes() == wanted.tobytes()
    if part is not x:
        assert may_differ(box, whole.shape, axes)


@pytest.mark.parametrize(
    ("shape", "box", "axes"),
    [
        ((1500, 203), ((0, 1500), (20, 71)), (0, 1)),
        ((900, 8), ((0, 900), (3, 4)), (0,)),
        ((50, 7, 90), ((0, 50), (2, 3), (0, 90)), (0, 2)),
    ],
    ids=str,
)
def test_parts_alone_have_other_bits(shape: tuple[int, ...], box: Any, axes: tuple[int, ...]) -> None:
    numbers, differ = np.random.default_rng(0), 0
    for _ in range(20):
        whole = numbers.normal(size=shape)
        added = whole[tuple([slice(*ends) if d in axes else slice(None) for d, ends in enumerate(box)])]
        kept = tuple([slice(None) if d in axes else slice(*ends) for d, ends in enumerate(box)])
        wanted = np.sum(added, axis=axes, keepdims=True)[kept]
        x = alone(whole, box, range(len(shape)))
        part, twice = as_part(x, box, shape, axes)
        made = np.sum(part, axis=axes, keepdims=True)[once(x.ndim, twice)]
        assert made.tobytes() == wanted.tobytes()
        differ += np.sum(x, axis=axes, keepdims=True).tobytes() != wanted.tobytes()
    assert differ
