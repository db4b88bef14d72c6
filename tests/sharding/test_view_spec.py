"""View specs, boxes and index arithmetic, compared with NumPy's results for the same indices."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.backend.registry import load
from shardtensor.communication.gather_scatter import GatherPlan, GatherRequest, last_of_each
from shardtensor.communication.transfer_plan import TransferPlan
from shardtensor.interpreters.views.index_entries import AdvancedIndex
from shardtensor.sharding.copy_plan import host_grid
from shardtensor.sharding.index import Index, canonical, region_of, to_numpy
from shardtensor.sharding.layout import Grid
from shardtensor.sharding.view_spec import (
    BoxIndex,
    ViewSpec,
    aligned,
    broadcast_region,
    reshape_grid,
    reshape_groups,
    reshaped_chains,
    reshaped_strides,
    whole_box,
    whole_view_spec,
)
from tests.cases import array_indices, indices
from tests.draws import drawn
from tests.interpreters.test_advanced_indexing import outcome
from tests.layouts import meshes, shapes, specs

Shape = tuple[int, ...]

HERE = load("numpy")


def numbered(shape: Shape) -> np.ndarray:
    """Returns an array whose elements are their own positions."""
    return np.arange(int(np.prod(shape))).reshape(shape)


def some_grid(data: Any, shape: Shape) -> Grid:
    mesh = data.draw(meshes("numpy"))
    return st.NamedSharding(mesh, data.draw(specs(mesh, len(shape)))).grid(shape)


def shards(grid: Grid, a: np.ndarray) -> list[np.ndarray]:
    return [a[(*grid.index(k), Ellipsis)] for k in range(len(grid.devices))]


def some_box(data: Any, shape: Shape) -> tuple[BoxIndex, np.ndarray]:
    """Draws a box and its view of `numbered`. A dimension that was added stays, because empty arrays have no views."""
    box, a = whole_box(shape), numbered(shape)
    for _ in range(data.draw(some.integers(0, 3))):
        if data.draw(some.booleans()):
            index = data.draw(indices(a.shape))
            found = canonical(index, a.shape)
            assert found is not None
            if all(d is not None or n for d, n in zip(box.at(found).order, box.at(found).shape, strict=True)):
                box, a = box.at(found), np.asarray(a[index])
        else:
            order = tuple(data.draw(some.permutations(range(a.ndim))))
            box, a = box.permuted(order), a.transpose(order)
    return box, a


def some_shape(data: Any, a: np.ndarray) -> Shape:
    """Draws another shape with as many elements: dimensions are merged, split, or have size 1."""
    sizes: list[int] = []
    for n in a.shape:
        divisor = data.draw(some.sampled_from([d for d in range(1, n + 1) if n % d == 0] or [1]))
        sizes += [n // divisor, divisor] if data.draw(some.booleans()) else [n]
    out: list[int] = []
    for n in sizes:
        if out and data.draw(some.integers(0, 2)) == 0:
            out[-1] *= n
        else:
            out.append(n)
    return tuple(out)


def some_window(data: Any, shape: Shape) -> tuple[ViewSpec, np.ndarray, np.ndarray]:
    """A window, the array that it is on, and NumPy's view of that."""
    base = numbered(shape)
    view_spec, a = whole_view_spec(shape, ((),) * len(shape)), base
    for _ in range(data.draw(some.integers(0, 4))):
        view_spec, a = some_step(data, view_spec, a)
    return view_spec, base, a


def some_step(data: Any, view_spec: ViewSpec, a: np.ndarray) -> tuple[ViewSpec, np.ndarray]:
    kind = data.draw(some.sampled_from(["index", "order", "shape", "flip"]))
    if kind == "index":
        index = data.draw(indices(a.shape))
        taken = a[index]
        if not isinstance(taken, np.ndarray):
            index = (*(index if type(index) is tuple else (index,)), Ellipsis)
        found = canonical(index, a.shape)
        assert found is not None
        if None in view_spec.boxes[-1].order and not a[index].size:
            return view_spec, a  # a dimension that was added stays: of nothing there are no views
        return view_spec.at(found), a[index]
    if kind == "order":
        order = tuple(data.draw(some.permutations(range(a.ndim))))
        return view_spec.permuted(order), a.transpose(order)
    if kind == "flip":
        turned = Index([(n - 1, n, -1) if n else (0, 0, 1) for n in a.shape])
        return view_spec.at(turned), a[(*[slice(None, None, -1)] * a.ndim, Ellipsis)]
    new = some_shape(data, a)
    other = view_spec.reshaped(new)
    return (view_spec, a) if other is None else (other, a.reshape(new))


def in_elements(base: np.ndarray, a: np.ndarray) -> tuple[list[int], int]:
    """Returns NumPy's strides of a view, in dimensions of several elements, and its offset."""
    step = base.itemsize
    offset = a.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return [s // step for s, n in zip(a.strides, a.shape, strict=True) if n > 1], offset // step


# -- indices ----------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=drawn(200))
@hypothesis.given(data=some.data())
def test_canonical_indices_say_the_same(data: Any) -> None:
    """A canonical index omits nothing, has no negative numbers, and selects the same elements."""
    shape = data.draw(shapes())
    a = numbered(shape)
    index = data.draw(indices(shape))
    found = canonical(index, shape)
    assert isinstance(found, Index)
    wanted = np.asarray(a[index])
    np.testing.assert_array_equal(a[(*to_numpy(found), Ellipsis)], wanted)
    taken = [e for e in found if e is not None]
    assert len(taken) == len(shape)
    for entry, n in zip(taken, shape, strict=True):
        if isinstance(entry, int):
            assert type(entry) is int
            assert 0 <= entry < n
        else:
            start, count, step = entry
            assert count == 0 or (0 <= start < n and 0 <= start + (count - 1) * step < n)
    assert tuple(1 if e is None else e[1] for e in found if not isinstance(e, int)) == wanted.shape
    assert canonical(to_numpy(found), shape) == found or 0 in wanted.shape
    moved = TransferPlan((region_of(found),), (host_grid(shape),), host_grid(wanted.shape)).run(((a,),), a.dtype)
    np.testing.assert_array_equal(moved[0], wanted)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (4, "index 4 is out of bounds for axis 0 with size 4"),
        ((0, -4), "index -4 is out of bounds for axis 1 with size 3"),
        ((..., 3), "index 3 is out of bounds for axis 1 with size 3"),
        (np.int64(7), "index 7 is out of bounds"),
        ((0, 0, 0), "3 indices for a tensor of 2 dimensions"),
        ((0, None, slice(None), slice(None)), "3 indices"),
        ((0, ..., 0, 0), "3 indices"),
        ((..., ...), "one ellipsis"),
        (1.5, "index 1.5 in dimension 0 is a float"),
        ((0, "a"), "index 'a' in dimension 1 is a str"),
        pytest.param(object(), "is an object", id="an object"),
        ({}, "is a dict"),
        (slice(None, None, 0), "slice step"),
        (slice(0.5), "slice indices"),
    ],
    ids=repr,
)
def test_indices_that_are_none(index: Any, words: str) -> None:
    with pytest.raises((IndexError, ValueError, TypeError)) as wanted:
        numbered((4, 3))[index]
    with pytest.raises(wanted.type) as caught:
        canonical(index, (4, 3))
    assert isinstance(caught.value, st.ShardTensorError)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "index",
    [[0], [], (0, [1, 2]), np.array([1]), np.array(1), True, np.True_, (..., True), np.ones((4, 3), bool), ((0, 1),), (0, (1,)),
     (..., 2, np.ones(3, bool)), (..., 3, np.ones((1,), int)), (None, ..., 3, True), (3, ..., np.ones((3,), bool))],
    ids=lambda x: repr(x)[:40],
)  # fmt: skip
def test_indices_with_arrays_are_left_to_selections(index: Any) -> None:
    """The arrays may be at any position, and a mask may cover several dimensions."""
    assert canonical(index, (4, 3)) is None
    assert canonical(st.device_put(np.array([1]), st.devices("numpy")[0]), (4, 3)) is None


def test_masks_count_as_many_dimensions_as_they_have() -> None:
    """An ellipsis before a mask does not include the dimensions that the mask covers."""
    square = np.ones((2, 2), bool)
    for index, shape in [
        ((..., 3, square), (5, 2, 2)),
        ((..., -5, None, square), (5, 2, 2)),
        ((None, ..., 4, True), (2, 5)),
        ((..., 4, np.array(False)), (2, 5)),
    ]:
        assert numbered(shape)[index].ndim
        assert canonical(index, shape) is None


# -- boxes ------------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=drawn(300))
@hypothesis.given(data=some.data())
def test_boxes_are_chains_of_indices_and_permutations(data: Any) -> None:
    shape = data.draw(shapes())
    a = numbered(shape)
    box, wanted = some_box(data, shape)
    assert (box.over, box.shape) == (shape, wanted.shape)
    taken = box.of(HERE, a)
    np.testing.assert_array_equal(taken, wanted)
    assert isinstance(taken, np.ndarray)
    assert np.shares_memory(taken, a) or not taken.size
    by_entries = a[(*to_numpy(box.entries), Ellipsis)].transpose(box.axes)
    np.testing.assert_array_equal(by_entries[(*to_numpy(box.new), Ellipsis)], wanted)
    if box.in_order:
        np.testing.assert_array_equal(a[(*to_numpy(box.index), Ellipsis)], wanted)
    if box.is_whole:
        np.testing.assert_array_equal(wanted, a)
    same = BoxIndex(box.over, box.entries, box.order, box.shape)
    assert box == same
    assert hash(box) == hash(same)
    if wanted.shape != shape:
        assert box != whole_box(shape)
        assert not box.is_whole


# -- windows ----------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=drawn(400))
@hypothesis.given(data=some.data())
def test_windows_have_the_strides_of_numpy(data: Any) -> None:
    view_spec, base, a = some_window(data, data.draw(shapes()))
    assert view_spec.shape == a.shape
    assert view_spec.size == a.size
    assert len(view_spec.strides) == len(view_spec.chains) == a.ndim
    seen = view_spec.of(HERE, base)
    np.testing.assert_array_equal(seen, a)
    if a.size:
        assert np.shares_memory(seen, base)
        walked = [s for s, n in zip(view_spec.strides, view_spec.shape, strict=True) if n > 1]
        assert (walked, view_spec.offset) == in_elements(base, a)
        assert (walked, view_spec.offset) == in_elements(base, seen)


@hypothesis.given(data=some.data())
def test_views_of_views_are_views_of_the_base(data: Any) -> None:
    outer, base, a = some_window(data, data.draw(shapes()))
    inner, _, _ = some_window(data, a.shape)
    if not a.size or (len(inner.boxes) > 1 and outer.reshaped((a.size,)) is None):
        return
    both = outer.then(inner)
    wanted = inner.of(HERE, a)
    assert both.shape == wanted.shape
    np.testing.assert_array_equal(both.of(HERE, base), wanted)
    if wanted.size:
        walked = [s for s, n in zip(both.strides, both.shape, strict=True) if n > 1]
        assert (walked, both.offset) == in_elements(base, wanted)


@hypothesis.settings(max_examples=drawn(400))
@hypothesis.given(data=some.data())
def test_reshapes_are_views_exactly_where_they_are_in_numpy(data: Any) -> None:
    view_spec, base, a = some_window(data, data.draw(shapes()))
    new = some_shape(data, a)
    if data.draw(some.booleans()) and a.size:
        new = data.draw(some.sampled_from([(a.size,), (1, a.size), (*a.shape[::-1],), (*a.shape, 1)]))
    wanted = a.reshape(new)
    other = view_spec.reshaped(new)
    if not a.size:
        return
    assert (other is not None) == np.shares_memory(wanted, base)
    if other is not None:
        assert other.shape == new
        np.testing.assert_array_equal(other.of(HERE, base), wanted)
        strides = reshaped_strides(a.shape, view_spec.strides, new)
        assert strides == other.strides


@pytest.mark.slow
@hypothesis.settings(max_examples=drawn(300))
@hypothesis.given(data=some.data())
def test_windows_are_the_same_where_they_see_the_same(data: Any) -> None:
    shape = data.draw(shapes(1, 2))
    (left, _, a), (right, _, b) = some_window(data, shape), some_window(data, shape)
    if a.size and b.size:
        assert left.same(right) == np.array_equal(a, b)
        assert left.same(right) == right.same(left)
    assert left.same(left)
    back = left.permuted(tuple(range(a.ndim))[::-1])
    assert back.permuted(tuple(range(a.ndim))[::-1]).same(left)
    flat = left.reshaped((a.size,))
    if flat is not None and a.size:
        again = flat.reshaped(a.shape)
        assert again is not None
        assert again.same(left)
    assert left.only("real").same(left.only("real"))
    assert not left.only("real").same(left.only("imag"))
    assert not left.only("imag").same(left)


def test_parts_of_complex_numbers() -> None:
    z = numbered((3, 4)) * (1 + 2j)
    view_spec = whole_view_spec((3, 4), (("x",), ()))
    part = view_spec.only("imag").at(Index([(1, 2, 1), 3])).permuted((0,))
    np.testing.assert_array_equal(part.of(HERE, z), z.imag[1:3, 3])
    flat = view_spec.only("real").reshaped((12,))
    assert flat is not None
    np.testing.assert_array_equal(flat.of(HERE, z), z.real.ravel())
    assert np.shares_memory(flat.of(HERE, z), z)
    assert view_spec.only("imag").only(None).part is None


@hypothesis.settings(max_examples=drawn(300))
@hypothesis.given(data=some.data())
def test_reshapes_keep_every_split(data: Any) -> None:
    """Each axis splits one dimension before and one after, and merges with no other order."""
    old = data.draw(shapes())
    new = some_shape(data, numbered(old))
    mesh = data.draw(meshes("numpy"))
    chains = data.draw(specs(mesh, len(old))).chains_of(len(old))
    before, after = reshaped_chains(old, new, chains)
    assert (len(before), len(after)) == (len(old), len(new))
    grouped = {d for left, _ in reshape_groups(old, new) for d in left}
    kept = [axis for d, chain in enumerate(chains) if d in grouped for axis in chain]
    assert [axis for chain in before for axis in chain] == kept
    if 0 not in old:
        assert [axis for chain in after for axis in chain] == kept
    for left, right in reshape_groups(old, new):
        assert np.prod([old[d] for d in left]) == np.prod([new[d] for d in right])
        if 0 not in old:
            for k in range(1, min(len(left), len(right))):
                assert np.prod([old[d] for d in left[:k]]) != np.prod([new[d] for d in right[:k]])


# -- windows on shards ------------------------------------------------------------------------------


@pytest.mark.slow
@hypothesis.settings(max_examples=drawn(400))
@hypothesis.given(data=some.data())
def test_aligned_boxes_are_where_their_elements_are(data: Any) -> None:
    """The parts of a box cover the box, and each device has all elements of it that it holds, and no others."""
    shape = data.draw(shapes())
    a, grid = numbered(shape), some_grid(data, shape)
    box, wanted = some_box(data, shape)
    here = aligned(grid, box)
    assert here.grid.devices == tuple(grid.devices[k] for k in here.positions)
    assert [int(o[-1]) for o in here.grid.offsets] == list(wanted.shape)
    pieces = shards(grid, a)
    whole = np.full(wanted.shape, -1)
    mine: dict[int, np.ndarray] = {}
    for n, (k, local) in enumerate(zip(here.positions, here.boxes, strict=True)):
        assert local.over == pieces[k].shape
        part = local.of(HERE, pieces[k])
        np.testing.assert_array_equal(part, wanted[here.grid.index(n)])
        assert local.shape == part.shape == here.grid.shape(n)
        whole[here.grid.index(n)] = part
        mine[k] = part
    np.testing.assert_array_equal(whole, wanted)
    for k, piece in enumerate(pieces):
        held = np.intersect1d(piece, wanted)
        np.testing.assert_array_equal(np.sort(mine[k].ravel()) if k in mine else held[:0], held)
    for bounds in here.grid.offsets:
        assert (np.diff(bounds) >= 0).all()


def is_box(places: np.ndarray, shape: Shape, groups: Any) -> bool:
    """Returns whether elements, given by their positions, fill a box of an array of that shape. The box must be whole
    in all dimensions except the first one of each group.
    """
    if not places.size:
        return True
    ends = [(int(w.min()), int(w.max()) + 1) for w in np.unravel_index(places.ravel(), shape)]
    first = [right[0] for _, right in groups]
    whole = all(ends[d] == (0, n) for d, n in enumerate(shape) if d not in first)
    return whole and int(np.prod([b - a for a, b in ends])) == places.size


@pytest.mark.slow
@hypothesis.settings(max_examples=drawn(500))
@hypothesis.given(data=some.data())
def test_shards_are_carried_into_another_shape(data: Any) -> None:
    """Each device has the same elements in the same order; the result is None only where a shard is not a box."""
    old = data.draw(shapes())
    a, grid = numbered(old), some_grid(data, old)
    new = some_shape(data, a)
    hypothesis.assume(a.size)
    other = reshape_grid(grid, old, new)
    pieces = shards(grid, a)
    if other is None:
        ones = any(n == 1 and len(bounds) > 2 for n, bounds in zip(old, grid.offsets, strict=True))
        groups = reshape_groups(old, new)
        inner = any(len(grid.offsets[d]) > 2 for left, _ in groups for d in left[1:])
        assert ones or inner or not all(is_box(p, new, groups) for p in pieces)
        return
    assert other.devices == grid.devices
    assert [int(o[-1]) for o in other.offsets] == list(new)
    for piece, mine in zip(pieces, shards(other, a.reshape(new)), strict=True):
        np.testing.assert_array_equal(piece.ravel(), mine.ravel())


@pytest.mark.slow
@hypothesis.settings(max_examples=drawn(400))
@hypothesis.given(data=some.data())
def test_boxes_are_sent_and_broadcast(data: Any) -> None:
    """They are sent to the host and to other grids; each element that a device lacks is sent to it once, however often
    it occurs.
    """
    shape = data.draw(shapes())
    a, grid = numbered(shape), some_grid(data, shape)
    box, taken = some_box(data, shape)
    wide = tuple(data.draw(some.sampled_from([1, 2, 5])) if n == 1 else n for n in taken.shape)
    wide = (*data.draw(some.lists(some.sampled_from([1, 3]), max_size=2)), *wide)
    wanted = np.broadcast_to(taken, wide)
    here = aligned(grid, box)
    region, source = broadcast_region(box.shape, wide), here.grid
    arrays = [local.of(HERE, shards(grid, a)[k]) for k, local in zip(here.positions, here.boxes, strict=True)]
    for target in (host_grid(wide), some_grid(data, wide)):
        movement = TransferPlan((region,), (source,), target)
        parts = movement.run((arrays,), a.dtype)
        lacks = 0
        for k, (device, part) in enumerate(zip(target.devices, parts, strict=True)):
            np.testing.assert_array_equal(np.broadcast_to(part, target.shape(k)), wanted[target.index(k)])
            held = shards(grid, a)[grid.devices.index(device)] if device in grid.devices else []
            lacks += len(np.setdiff1d(wanted[target.index(k)], held))
        assert movement.size == lacks
        assert sum(r.bytes for r in movement.records(1, False, "test", False)) == lacks


def test_leading_ones_of_a_value_are_dropped() -> None:
    """As NumPy does in assignments: ``x[...] = np.ones((1, 1, 3))`` for two dimensions."""
    a = numbered((1, 2, 1, 3))
    for shape in [(2, 1, 3), (2, 5, 3), (1, 2, 1, 3), (4, 2, 2, 3)]:
        moved = TransferPlan((broadcast_region(a.shape, shape),), (host_grid(a.shape),), host_grid(shape))
        (out,) = moved.run(((a,),), a.dtype)
        np.testing.assert_array_equal(np.broadcast_to(out, shape), np.broadcast_to(a.reshape(2, 1, 3), shape))


# -- selections -------------------------------------------------------------------------------------


def some_selection(data: Any, shape: Shape) -> tuple[Any, np.ndarray]:
    index = (*data.draw(array_indices(shape)), True)
    wanted = outcome(lambda: numbered(shape)[index])
    hypothesis.assume(not isinstance(wanted, Exception))
    return index, wanted


def chosen_by(chosen: AdvancedIndex, a: np.ndarray) -> np.ndarray:
    """Returns the elements of a selection, using only the simplest case of NumPy's advanced indexing."""
    taken = a[(*to_numpy(chosen.basic), Ellipsis)]
    others = [d for d in range(taken.ndim) if d not in chosen.dims]
    rows = taken.transpose((*chosen.dims, *others))[tuple(chosen.arrays)]
    n = len(chosen.block)
    out = rows.reshape((*chosen.block, *chosen.rest))
    return out.transpose((*range(n, n + chosen.at), *range(n), *range(n + chosen.at, out.ndim)))


@pytest.mark.slow
@hypothesis.settings(max_examples=drawn(500))
@hypothesis.given(data=some.data())
def test_selections_are_numpys(data: Any) -> None:
    shape = data.draw(shapes())
    index, wanted = some_selection(data, shape)
    chosen = AdvancedIndex(index, shape)
    assert chosen.shape == wanted.shape
    assert chosen.rows == np.prod(chosen.block)
    assert chosen.rest == tuple(
        n for d, n in enumerate(np.shape(numbered(shape)[(*to_numpy(chosen.basic), Ellipsis)])) if d not in chosen.dims
    )
    for array in chosen.arrays:
        assert array.shape == (chosen.rows,)
        assert not (array < 0).any()
    np.testing.assert_array_equal(chosen_by(chosen, numbered(shape)), wanted)
    np.testing.assert_array_equal(numbered(shape)[chosen.numpy], wanted)
    assert len(index) == 1 or not chosen.is_mask


@pytest.mark.parametrize(
    ("index", "shape", "at", "block"),
    [
        (([0, 1],), (2, 2, 5, 4), 0, (2,)),
        ((slice(None), [0, 1]), (2, 2, 5, 4), 1, (2,)),
        (([0, 1], [0, 1]), (2, 5, 4), 0, (2,)),
        ((slice(None), [0, 1], [[0], [1]]), (2, 2, 2, 4), 1, (2, 2)),
        (([0, 1], slice(None), [0, 1]), (2, 3, 4), 0, (2,)),
        ((slice(None), 0, [0, 1]), (2, 2, 4), 1, (2,)),
        ((0, slice(None), [0, 1]), (2, 3, 4), 0, (2,)),
        ((slice(None), [0, 1], None, [0, 1]), (2, 2, 1, 4), 0, (2,)),
        ((..., [0, 1], 0), (2, 2, 3), 2, (2,)),
        ((slice(None), np.ones((3, 5), bool)), (2, 15, 4), 1, (15,)),
        ((True,), (1, 2, 3, 5, 4), 0, (1,)),
        ((slice(None), True), (2, 1, 3, 5, 4), 1, (1,)),
        ((slice(None), True, 0), (2, 1, 5, 4), 1, (1,)),
        ((False, [0]), (0, 3, 5, 4), 0, (0,)),
        ((np.array(1), slice(None), np.array(2)), (3, 4), 0, ()),
    ],
    ids=lambda x: repr(x)[:50],
)
def test_where_the_block_stands(index: Any, shape: Shape, at: int, block: Shape) -> None:
    """It is at the position of the first array if the arrays are adjacent, and otherwise in front."""
    a = numbered((2, 3, 5, 4))
    chosen = AdvancedIndex(index, a.shape)
    assert a[index].shape == chosen.shape
    assert (chosen.at, chosen.block) == (at, block)
    assert chosen.shape == (*chosen.rest[:at], *block, *chosen.rest[at:])
    np.testing.assert_array_equal(chosen_by(chosen, a), a[index])


def test_a_lone_mask_is_known() -> None:
    assert AdvancedIndex(np.ones((2, 3), bool), (2, 3)).is_mask
    assert AdvancedIndex((np.ones(2, bool),), (2, 3)).is_mask
    assert AdvancedIndex([True, False], (2, 3)).is_mask
    assert not AdvancedIndex((np.ones(2, bool), 0), (2, 3)).is_mask
    assert not AdvancedIndex([0, 1], (2, 3)).is_mask


@pytest.mark.slow
@hypothesis.settings(max_examples=drawn(300))
@hypothesis.given(data=some.data())
def test_picking_moves_only_what_is_not_at_home(data: Any) -> None:
    shape = data.draw(shapes(1))
    a, grid = numbered(shape), some_grid(data, shape)
    hypothesis.assume(0 not in shape)
    dims = data.draw(some.lists(some.integers(0, len(shape) - 1), min_size=1, unique=True))
    others = [d for d in range(len(shape)) if d not in dims]
    rng = np.random.default_rng(data.draw(some.integers(0, 99)))
    wants, answers = [], []
    for device in data.draw(some.permutations(st.devices("numpy")))[:3]:
        rows = data.draw(some.integers(0, 6))
        coordinates = [rng.integers(0, shape[d], rows) for d in dims]
        ends = [sorted(rng.integers(0, shape[d] + 1, 2).tolist()) for d in others]
        wants.append(GatherRequest(device, rows, coordinates, [(low, high) for low, high in ends]))
        runs = tuple(slice(low, high) for low, high in ends)
        answers.append(a.transpose((*dims, *others))[(*coordinates, *runs)])
        assert wants[-1].shape == answers[-1].shape
    plan = GatherPlan(grid, dims, wants)
    for got, answer in zip(plan.run(shards(grid, a), a.dtype), answers, strict=True):
        np.testing.assert_array_equal(got, answer)
        assert got.dtype == a.dtype
    held = dict(zip(grid.devices, shards(grid, a), strict=True))
    sent: dict[Any, int] = {}
    for record in plan.records(1, True, "test", False):
        assert record.source in held
        assert record.copied == record.bytes
        sent[record.destination] = sent.get(record.destination, 0) + record.bytes
    for want, answer in zip(wants, answers, strict=True):
        lacks = np.setdiff1d(answer, held.get(want.device, []))
        times = int(np.isin(answer, lacks).sum())
        assert len(lacks) <= sent.get(want.device, 0) <= times


def test_replicas_share_the_work_of_sending() -> None:
    """A device reads its own elements; the requests of the others are divided over the holders."""
    mesh = st.make_mesh((2, 2), ("x", "y"), devices=st.devices("numpy")[:4])
    grid = st.NamedSharding(mesh, st.P("x")).grid((4, 2))
    rows = np.array([0, 3])
    devices = st.devices("numpy")
    plan = GatherPlan(grid, (0,), [GatherRequest(d, 2, [rows], [(0, 2)]) for d in (devices[1], devices[6], devices[7])])
    moves = sorted((r.source.id, r.destination.id, r.bytes) for r in plan.records(8, False, "test", False))
    assert [(n, b) for _, b, n in moves if b == 1] == [(16, 1)]
    assert sorted(b for _, b, _ in moves) == [1, 6, 6, 7, 7]
    assert {a for a, b, _ in moves if b == 6} != {a for a, b, _ in moves if b == 7}


@hypothesis.given(data=some.data())
def test_the_last_of_each_place(data: Any) -> None:
    sizes = data.draw(some.lists(some.integers(1, 4), min_size=1, max_size=3))
    rows = data.draw(some.integers(0, 8))
    rng = np.random.default_rng(data.draw(some.integers(0, 99)))
    coordinates = [rng.integers(0, n, rows) for n in sizes]
    places = list(zip(*[c.tolist() for c in coordinates], strict=True))
    wanted = sorted({place: i for i, place in enumerate(places)}.values())
    last = last_of_each(coordinates, sizes)
    if len(wanted) == rows:
        assert last is None
    else:
        assert last is not None
        assert last.tolist() == wanted
