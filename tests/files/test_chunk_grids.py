"""Grids: every element is in one piece of one chunk, chunks follow uneven shards, and inner chunks have 4 to 16 MiB."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from shardtensor.errors import ShardingError
from shardtensor.files.chunk_grids import Box, Grid, chunk_box, cut_over_replicas, plan_grid, size_of, slabs
from tests.draws import drawn

MIB = 1 << 20


def moved(grid: Grid) -> int:
    """The number of elements that owners get from others."""
    return sum(size_of(p.box) for pieces in grid.pieces.values() for p in pieces if p.owner != pieces[0].owner)


def uneven(n: int, k: int) -> list[tuple[int, int]]:
    """The bounds of the parts of a dimension, as the library splits it."""
    ends = list(itertools.accumulate([n // k + (i < n % k) for i in range(k)], initial=0))
    return list(itertools.pairwise(ends))


def boxes(shape: tuple[int, ...], mesh: tuple[int, ...], replicas: int = 1) -> list[Box]:
    return [box for box in itertools.product(*map(uneven, shape, mesh)) for _ in range(replicas)]


def check(grid: Grid, held: list[Box]) -> None:
    assert all(c % i == 0 for c, i in zip(grid.chunk, grid.inner, strict=True))
    for index, pieces in grid.pieces.items():
        box = chunk_box(index, grid.chunk, grid.shape)
        assert sum(size_of(p.box) for p in pieces) == size_of(box)
        for p in pieces:
            for (b, e), (x, y), (s, t) in zip(p.box, held[p.owner], box, strict=True):
                assert max(x, s) <= b < e <= min(y, t)
        for p, q in itertools.combinations(pieces, 2):
            assert any(max(a, c) >= min(b, d) for (a, b), (c, d) in zip(p.box, q.box, strict=True))
    count = math.prod(-(-n // c) for n, c in zip(grid.shape, grid.chunk, strict=True))
    assert len(grid.pieces) == (0 if 0 in grid.shape else count)


@pytest.mark.parametrize("seed", range(drawn(600, fast=60)))
def test_each_element_is_in_one_piece(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nd = int(rng.integers(0, 4))
    shape = tuple(rng.integers(0, 40, nd).tolist())
    mesh = tuple(rng.integers(1, 5, nd).tolist())
    held = boxes(shape, mesh, int(rng.integers(1, 4)))
    grid = plan_grid(shape, int(rng.choice([1, 2, 16, 1 << 18, 1 << 23])), held, seed)
    check(grid, held)
    assert len(grid.pieces) <= math.prod(k + 1 for k in mesh) * (len(held) // math.prod(mesh) + 1)


def test_even_shards_move_nothing() -> None:
    for mesh in ((4, 1), (1, 4), (2, 2), (4, 2)):
        held = boxes((4096, 8192), mesh)
        grid = plan_grid((4096, 8192), 4, held)
        check(grid, held)
        assert moved(grid) == 0
        assert sorted(grid.owner(i) for i in grid.pieces) == list(range(len(held)))
        assert 4 * MIB <= math.prod(grid.inner) * 4 <= 16 * MIB


@pytest.mark.parametrize(
    ("shape", "mesh", "itemsize"),
    [((10_000_019,), (8,), 8), ((1_000_003, 7), (4, 1), 4), ((4097, 4099), (3, 2), 4), ((52, 2 * MIB), (4, 1), 4),
     ((53, 2 * MIB), (4, 1), 4), ((30001, 1001), (7, 3), 2), ((50257, 768), (8, 1), 2)],
)  # fmt: skip
def test_uneven_shards_move_at_most_an_inner_chunk_for_each_border(
    shape: tuple[int, ...], mesh: tuple[int, ...], itemsize: int
) -> None:
    held = boxes(shape, mesh)
    grid = plan_grid(shape, itemsize, held)
    check(grid, held)
    nbytes = math.prod(grid.inner) * itemsize
    assert nbytes <= 16 * MIB
    assert nbytes >= 4 * MIB or math.prod(grid.chunk) * itemsize < 8 * MIB
    rows = [(k - 1) * max(i, k) * math.prod(shape) / n for n, k, i in zip(shape, mesh, grid.inner, strict=True)]
    assert moved(grid) <= sum(rows)
    assert len(grid.pieces) <= math.prod(k + (k > 1) for k in mesh)


def test_one_row_more_than_owners() -> None:
    held = boxes((9, 100), (8, 1))
    grid = plan_grid((9, 100), 8, held)
    check(grid, held)
    assert moved(grid) == 0
    assert len(grid.pieces) == 9


def test_replicas_all_write_large_arrays_and_take_turns_at_small_ones() -> None:
    whole = ((0, 4096), (0, 4096))
    grid = plan_grid((4096, 4096), 4, [whole] * 4)
    check(grid, [whole] * 4)
    assert sorted(grid.owner(i) for i in grid.pieces) == [0, 1, 2, 3]
    assert moved(grid) == 0
    for shape in ((3,), ()):
        box = tuple((0, n) for n in shape)
        owners = [plan_grid(shape, 4, [box] * 4, turn) for turn in range(4)]
        assert [g.owner(i) for g in owners for i in g.pieces] in ([0, 1, 2, 3], [0, 3, 2, 1])
    assert len(cut_over_replicas([((0, 3),)] * 4, 4 * MIB)) == 3


def test_parts_that_replicas_write_of_split_arrays() -> None:
    held = boxes((4099, 4096), (2, 1), 2)
    grid = plan_grid((4099, 4096), 4, held)
    check(grid, held)
    assert {grid.owner(i) for i in grid.pieces} == {0, 1, 2, 3}


def test_successive_splits_of_one_dimension() -> None:
    held = [((0, 3),), ((3, 5),), ((5, 8),), ((8, 10),)]
    grid = plan_grid((10,), 1, held)
    check(grid, held)
    assert moved(grid) <= 2


def test_other_layouts_read_few_elements_that_they_do_not_need() -> None:
    shape = (8192, 8192)
    grid = plan_grid(shape, 4, boxes(shape, (4, 1)))
    for mesh in ((1, 8), (2, 4), (8, 1), (3, 1), (1, 3)):
        touched = sum(
            math.prod(-(-e // i) * i - b // i * i for (b, e), i in zip(box, grid.inner, strict=True))
            for box in boxes(shape, mesh)
        )
        assert touched <= 1.3 * math.prod(shape), mesh


@pytest.mark.parametrize("shape", [(), (5,), (3, 1 << 19), (2, 3, 1 << 18), (1 << 10, 1 << 11), (2, 1 << 21, 2)])
def test_slabs_have_each_element_once_and_in_order(shape: tuple[int, ...]) -> None:
    box = tuple((3, 3 + n) for n in shape)
    at = 0
    for slab in slabs(box, 4, MIB):
        assert 0 < size_of(slab) * 4 <= MIB
        assert at == (np.ravel_multi_index([b - 3 for b, _ in slab], shape) if shape else 0)
        last = np.ravel_multi_index([e - 4 for _, e in slab], shape) if shape else 0
        assert last - at + 1 == size_of(slab)
        at += size_of(slab)
    assert at == math.prod(shape)


def test_elements_that_no_owner_has() -> None:
    with pytest.raises(ShardingError, match="held by no owner"):
        plan_grid((10,), 4, [((0, 4),), ((5, 10),)])
    with pytest.raises(ShardingError, match="held by no owner"):
        plan_grid((), 4, [])
