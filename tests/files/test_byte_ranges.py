"""Boxes of arrays in files: any box is written and read alone, and no other bytes are read where rows are long."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

from shardtensor.errors import ArgumentError
from shardtensor.files import byte_ranges
from shardtensor.files.byte_ranges import read_box, runs, write_box
from shardtensor.files.chunk_grids import Box
from tests.draws import drawn

BEGIN = 5
"""The bytes in a file before the array."""


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in box)


@some.composite
def cases(draw: Any) -> tuple[np.ndarray, Box]:
    shape = draw(some.lists(some.integers(0, 5), max_size=4).map(tuple))
    bounds = [sorted((draw(some.integers(0, n)), draw(some.integers(0, n)))) for n in shape]
    dtype = draw(some.sampled_from(["i1", "i4", "c16"]))
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype), tuple(map(tuple, bounds))


@hypothesis.settings(max_examples=drawn(60))
@hypothesis.given(
    case=cases(),
    page=some.sampled_from([1, 16, 1 << 12]),
    span=some.sampled_from([1, 40, 1 << 22]),
    slab=some.sampled_from([1, 64, 1 << 20]),
)
def test_any_box_is_read_and_written(tmp_path_factory: Any, case: Any, page: int, span: int, slab: int) -> None:
    array, box = case
    path = tmp_path_factory.mktemp("ranges") / "x"
    path.write_bytes(bytes(BEGIN) + array.tobytes())
    descriptor = os.open(path, os.O_RDWR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_ranges, "_PAGE", page)
        patch.setattr(byte_ranges, "_SPAN", span)
        patch.setattr("shardtensor.files.byte_ranges._SLAB", slab)
        for order in "CF":
            out = np.full_like(array[index(box)], 3, order=order, subok=False)
            read_box(descriptor, str(path), BEGIN, array.shape, box, out)
            np.testing.assert_array_equal(out, array[index(box)])
            write_box(descriptor, str(path), BEGIN, array.shape, box, np.asarray(out + 1, array.dtype, order=order))
            array[index(box)] += 1
    os.close(descriptor)
    assert path.read_bytes() == bytes(BEGIN) + array.tobytes()


def test_runs_are_as_long_as_possible() -> None:
    for shape, box, offsets, nbytes in (
        ((4, 6), ((1, 3), (0, 6)), [12], 24),
        ((4, 6), ((1, 3), (2, 4)), [16, 28], 4),
        ((2, 3, 4), ((0, 2), (1, 2), (0, 4)), [8, 32], 8),
        ((2, 3, 4), ((1, 2), (0, 3), (0, 4)), [24], 24),
        ((), (), [0], 2),
        ((5,), ((2, 4),), [4], 4),
    ):
        found = runs(shape, 2, box)
        assert (found[0].tolist(), found[1]) == (offsets, nbytes)


def test_bytes_between_long_rows_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(16 * 4096.0).reshape(16, 4096)
    array.tofile(tmp_path / "x")
    descriptor, read = os.open(tmp_path / "x", os.O_RDONLY), list[int]()
    read_into = byte_ranges.read_into
    monkeypatch.setattr(
        byte_ranges, "read_into", lambda d, memory, *rest: (read.append(memory.size), read_into(d, memory, *rest))
    )
    for box in (((0, 16), (8, 40)), ((3, 4), (1, 4000)), ((2, 9), (0, 4096))):
        read.clear()
        out = np.empty(array[index(box)].shape)
        read_box(descriptor, "x", 0, array.shape, box, out)
        np.testing.assert_array_equal(out, array[index(box)])
        assert sum(read) == out.nbytes
    with pytest.raises(ArgumentError, match="x is truncated"):
        read_box(descriptor, "x", 8, array.shape, ((0, 16), (0, 4096)), np.empty(array.shape))
    os.close(descriptor)
