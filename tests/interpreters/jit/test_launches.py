"""The blocks of the buffers that only a segment reads."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardtensor.interpreters.jit.launches import _ALIGNMENT, Blocks


@pytest.mark.parametrize("shapes", [[(1,), (3, 5), (0,), (7,)], [(128,), (129,), (2, 64)], [(512,), (1,), (511,)]])
@pytest.mark.parametrize("dtype", ["i1", "f4", "c16"])
def test_buffers_are_aligned_and_do_not_overlap(shapes: list[tuple[int, ...]], dtype: str) -> None:
    blocks = Blocks()
    for name, shape in enumerate(shapes):
        blocks.add(name, "memory", shape, np.dtype(dtype))
        blocks.add((name, "other"), "other memory", (1,), np.dtype("i1"))
    end = 0
    for name, shape in enumerate(shapes):
        space, position = blocks.places[name]
        begin, found, of = blocks.parts[space][position]
        assert (space, found, of) == ("memory", shape, np.dtype(dtype))
        assert begin % _ALIGNMENT == 0
        assert end <= begin < end + _ALIGNMENT
        end = begin + math.prod(shape) * of.itemsize
    assert end <= blocks.sizes["memory"] < end + _ALIGNMENT
    assert blocks.sizes["memory"] % _ALIGNMENT == 0
    assert blocks.sizes["other memory"] == len(shapes) * _ALIGNMENT
