"""The cells of sharded arrays, for any assignment of the devices of a mesh to memories."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.communication.transfer_plan import TransferPlan
from shardtensor.sharding.cells import Cells, cells
from shardtensor.sharding.copy_plan import identity
from shardtensor.sharding.layout import Grid
from tests.draws import drawn
from tests.layouts import SIZES, mesh_of, meshes, specs


@some.composite
def grids(draw: Any, ndim: int = 2) -> tuple[Grid, tuple[int, ...]]:
    """A grid, and the memory of each of its devices."""
    mesh = draw(meshes("numpy"))
    shape = tuple(draw(some.lists(SIZES, min_size=ndim, max_size=ndim)))
    grid = st.NamedSharding(mesh, draw(specs(mesh, ndim))).grid(shape)
    count = len(grid.devices)
    some_memories = some.lists(some.integers(0, 3), min_size=count, max_size=count)
    in_blocks = some.integers(1, count).map(lambda each: [k // each for k in range(count)])
    return grid, tuple(draw(some_memories | in_blocks))


def within(held: Cells, k: int) -> np.ndarray:
    """The box of the k-th shard, from its index in its cell."""
    number, index = held.shards[k]
    box = np.array(held.grid.box(number)).reshape(-1, 2)
    return box if index is None else box[:, :1] + np.array([(s.start, s.stop) for s in index]).reshape(-1, 2)


@hypothesis.settings(max_examples=drawn(40))
@hypothesis.given(grids() | grids(ndim=0) | grids(ndim=3))
def test_every_shard_is_in_one_cell_of_its_memory(drawn: tuple[Grid, tuple[int, ...]]) -> None:
    grid, memories = drawn
    held = cells(grid, memories)
    assert sorted(itertools.chain.from_iterable(held.positions)) == list(range(len(memories)))
    assert held.apart == all(len(positions) == 1 for positions in held.positions)
    for number, positions in enumerate(held.positions):
        assert {held.shards[k][0] for k in positions} == {number}
        assert len({memories[k] for k in positions}) == 1
        assert held.grid.devices[number] == grid.devices[positions[0]]
        covered = np.zeros([int(o[-1]) for o in grid.offsets], int)
        for box in {grid.box(k) for k in positions}:
            covered[tuple([slice(*ends) for ends in box])] += 1
        assert (covered[held.grid.index(number)] == 1).all(), "each distinct box once"
        assert covered.sum() == covered[held.grid.index(number)].size
    for k in range(len(memories)):
        np.testing.assert_array_equal(within(held, k), np.array(grid.box(k)).reshape(-1, 2))
    kept = [(memories[p[0]], held.grid.box(n)) for n, p in enumerate(held.positions) if 0 not in held.grid.shape(n)]
    assert len(kept) == len(set(kept)), "replicas in one memory are one"


@hypothesis.settings(max_examples=drawn(40))
@hypothesis.given(grids())
def test_one_memory_is_one_cell_and_separate_memories_are_the_shards(drawn: tuple[Grid, tuple[int, ...]]) -> None:
    grid, _ = drawn
    count = len(grid.devices)
    together, apart = cells(grid, (0,) * count), cells(grid, tuple(range(count)))
    assert together.grid.index(0) == tuple([slice(0, int(o[-1])) for o in grid.offsets])
    assert [list(positions) for positions in together.positions] == [list(range(count))]
    assert apart.grid is grid
    assert apart.apart


def test_the_shards_of_a_memory_that_tile_a_box_are_one_cell() -> None:
    grid = st.NamedSharding(mesh_of((2, 4), "numpy"), st.P(("x", "y"))).grid((19, 2))
    held = cells(grid, (0,) * 4 + (1,) * 4)
    assert [held.grid.box(n) for n in range(2)] == [((0, 10), (0, 2)), ((10, 19), (0, 2))]
    assert held.shards[5] == (1, (slice(3, 5), slice(0, 2)))
    rows = cells(st.NamedSharding(mesh_of((2, 4), "numpy"), st.P("y")).grid((19, 2)), (0,) * 4 + (1,) * 4)
    assert [rows.grid.box(n) for n in range(2)] == [((0, 19), (0, 2))] * 2, "both have all of it"
    turned = cells(grid, (0, 1) * 4)
    assert turned.apart, "these shards do not tile a box"


@hypothesis.settings(max_examples=drawn(40))
@hypothesis.given(grids(), some.data())
def test_parts_of_groups(drawn: tuple[Grid, tuple[int, ...]], data: Any) -> None:
    grid, memories = drawn
    held = cells(grid, memories)
    every = [[k] for k in range(len(memories))]
    assert [held.shards[k] for k in range(len(memories))] == [
        (n, None if index == tuple([slice(0, m) for m in held.grid.shape(n)]) else index)
        for n, index in held.parts(every) or ()
    ] or any(0 in grid.shape(k) for k in range(len(memories)))
    assert held.parts(held.positions) == [(n, None) for n in range(len(held.positions))]
    two = data.draw(some.lists(some.integers(0, len(memories) - 1), min_size=1, max_size=3))
    found = held.parts([two])
    if len({held.shards[k][0] for k in two}) > 1:
        assert found is None
    elif found and found[0][1] is not None:
        outer = [(s.start, s.stop) for s in found[0][1]]
        inner = [held.shards[k][1] for k in two]
        assert all(a <= s.start <= s.stop <= b for i in inner if i for s, (a, b) in zip(i, outer, strict=True))


@hypothesis.settings(max_examples=drawn(40))
@hypothesis.given(some.data())
def test_copies_between_cells(data: Any) -> None:
    """Also where memories hold different numbers of replicas."""
    (first, here), (second, there) = data.draw(grids()), data.draw(grids())
    shape = tuple([int(o[-1]) for o in first.offsets])
    second = Grid(
        second.devices, tuple([np.clip(o, 0, n) for o, n in zip(second.offsets, shape, strict=True)]), second.parts
    )
    for o, n in zip(second.offsets, shape, strict=True):
        o[-1] = n
    source, result = cells(first, here), cells(second, there)
    host = np.arange(np.prod(shape)).reshape(shape)
    plan = TransferPlan((identity(shape),), (source.grid,), result.grid)
    made = plan.run(([host[source.grid.index(n)] for n in range(len(source.positions))],), host.dtype)
    for n, array in enumerate(made):
        np.testing.assert_array_equal(array, host[result.grid.index(n)])
