"""Sliding windows, and the windows that smooth the ends of a signal, against NumPy under drawn shardings."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.lib.stride_tricks import sliding_window_view
from tests.draws import drawn
from tests.layouts import DTYPES, array, assert_same, mesh_of, meshes, placed

NUMPYS = np.lib.stride_tricks.sliding_window_view


@hypothesis.settings(max_examples=drawn(25))
@hypothesis.given(some.data())
def windows(backend: str, data: Any) -> None:
    shape = data.draw(some.lists(some.integers(1, 9), min_size=1, max_size=3))
    host = array(tuple(shape), data.draw(some.sampled_from(DTYPES)), 0)
    axes = data.draw(some.lists(some.integers(-len(shape), len(shape) - 1), max_size=3))
    left, sizes = list(shape), []
    for a in axes:
        sizes.append(data.draw(some.integers(0, left[a])))
        left[a] -= sizes[-1] - 1
    x = placed(data, host, backend, data.draw(meshes(backend)))
    assert_same(sliding_window_view(x, sizes, axes), NUMPYS(host, sizes, axes), exact=True)


def test_windows_match_numpy(backend: str) -> None:
    windows(backend)


def test_windows_stay_distributed_and_take_the_elements_behind_each_shard(backend: str) -> None:
    x = st.arange(20, device=mesh_of((3,), backend))
    with st.transfers() as log:
        found = np.lib.stride_tricks.sliding_window_view(x, 4)
    assert found.sharding.spec == x.sharding.spec
    assert log.bytes <= 2 * (1 + 2 + 3) * x.dtype.itemsize
    assert_same(found, NUMPYS(np.arange(20), 4), exact=True)
    assert_same(sliding_window_view(np.arange(4), 2), NUMPYS(np.arange(4), 2), exact=True)


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ((9, 0), st.ShapeError, "dimension 0 has size 6; the window has 9"),
        ((-1, 0), st.ShapeError, "negative size"),
        (((1, 1, 1),), st.ArgumentError, "3 window sizes for 2 axes"),
        ((2, 2), st.AxisError, "axis 2"),
        ((2.5, 0), TypeError, "2.5"),
    ],
)
def test_wrong_windows_are_refused(args: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        sliding_window_view(st.zeros((6, 7)), *args)
    with pytest.raises(error.__mro__[2] if issubclass(error, st.ShardTensorError) else error):
        NUMPYS(np.zeros((6, 7)), *args)


def test_writable_windows_are_refused() -> None:
    with pytest.raises(st.ArgumentTypeError, match="the windows are a copy"):
        sliding_window_view(st.zeros(3), 2, writeable=True)


@pytest.mark.parametrize("points", [-1, 0, 0.5, 1, 2, 2.5, 7])
@pytest.mark.parametrize("name", ["bartlett", "blackman", "hamming", "hanning", "kaiser"])
def test_windows_of_few_points_are_numpys(name: str, points: float) -> None:
    args = (points, 5.0) if name == "kaiser" else (points,)
    with np.errstate(invalid="ignore"):  # 2.5 points are no window of Kaiser: it has NaN at the end.
        assert_same(getattr(st, name)(*args), getattr(np, name)(*args))
