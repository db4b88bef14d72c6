"""Collectives: the result on each device, compared with NumPy on the list of all devices' arrays."""

from __future__ import annotations

import cProfile
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.backend.registry import load, shared_memory
from shardtensor.communication import array_communicator
from shardtensor.communication.all_reduce import CHUNKED_FROM, combine
from shardtensor.communication.array_communicator import ArrayCommunicator
from shardtensor.host import threads
from shardtensor.tensor.pytree import leaves, map_leaves
from tests.draws import drawn
from tests.layouts import (
    DTYPES,
    READ_ONLY,
    SIZES,
    array,
    assert_close,
    by_tree,
    everywhere,
    mesh_of,
    on_host,
    values_of,
)

GRIDS = [(1,), (2,), (3,), (4,), (5,), (6,), (7,), (8,), (2, 2), (2, 3), (3, 2), (4, 2), (1, 3), (2, 2, 2)]
EXACT = (*READ_ONLY, "cupy")
"""The backends that compute with NumPy, on machines without a GPU: theirs are NumPy's bits."""
Blocks = Sequence[np.ndarray]


def dtypes_of(backend: str) -> list[str]:
    return DTYPES if backend == "torch" else [*DTYPES, "int16", "uint16", "uint32", "uint64"]


# -- what NumPy says: from the blocks of devices along an axis, in order, to what each of them gets ------------------------


def fold(ufunc: np.ufunc, blocks: Blocks, sizes: Sequence[int] = ()) -> np.ndarray:
    """Combines blocks along the tree; bools are counted."""
    if ufunc in (np.add, np.multiply) and blocks[0].dtype == bool:
        blocks = [b.astype("int64") for b in blocks]
    return np.asarray(by_tree(ufunc, blocks, sizes))


def mean(blocks: Blocks, sizes: Sequence[int] = ()) -> np.ndarray:
    if blocks[0].dtype.kind in "biu":
        blocks = [b.astype("float64") for b in blocks]
    return np.asarray(fold(np.add, blocks, sizes) / len(blocks))


def psum_scatter(
    blocks: Blocks, sizes: Sequence[int] = (), *, scatter_dimension: int = 0, tiled: bool = False
) -> list[np.ndarray]:
    total = fold(np.add, blocks, sizes)
    if tiled:
        return np.array_split(total, len(blocks), scatter_dimension)
    return [np.take(total, k, scatter_dimension) for k in range(len(blocks))]


def all_gather(blocks: Blocks, *, axis: int = 0, tiled: bool = False) -> list[np.ndarray]:
    return [np.concatenate(blocks, axis) if tiled else np.stack(blocks, axis)] * len(blocks)


def all_to_all(blocks: Blocks, split_axis: int, concat_axis: int, *, tiled: bool = False) -> list[np.ndarray]:
    count = range(len(blocks))
    if tiled:
        cut = [np.array_split(b, len(blocks), split_axis) for b in blocks]
        return [np.concatenate([row[k] for row in cut], concat_axis) for k in count]
    return [np.stack([np.take(b, k, split_axis) for b in blocks], concat_axis) for k in count]


def ppermute(blocks: Blocks, perm: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    found = [np.zeros_like(b) for b in blocks]
    for source, destination in perm:
        found[destination] = blocks[source]
    return found


ANSWERS: dict[str, Callable[..., Sequence[np.ndarray]]] = {
    "psum": lambda blocks, sizes=(): [fold(np.add, blocks, sizes)] * len(blocks),
    "pmean": lambda blocks, sizes=(): [mean(blocks, sizes)] * len(blocks),
    "pmax": lambda blocks, sizes=(): [fold(np.maximum, blocks, sizes)] * len(blocks),
    "pmin": lambda blocks, sizes=(): [fold(np.minimum, blocks, sizes)] * len(blocks),
    "pprod": lambda blocks, sizes=(): [fold(np.multiply, blocks, sizes)] * len(blocks),
    "psum_scatter": psum_scatter,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "ppermute": ppermute,
    "pshuffle": lambda blocks, perm: [blocks[k] for k in perm],
    "pswapaxes": lambda blocks, axis: all_to_all(blocks, axis, axis),
    "pbroadcast": lambda blocks, source: [blocks[source]] * len(blocks),
}
REDUCTIONS = ("psum", "pmean", "pmax", "pmin", "pprod")
MOVES = ("ppermute", "pshuffle", "pbroadcast")


class Call(NamedTuple):
    """A collective, and what follows the name of the axis."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - never written

    def __call__(self, x: Any, axis: Any, **more: Any) -> Any:
        return getattr(st, self.name)(x, axis, *self.args, **self.kwargs, **more)

    def answer(self, blocks: Blocks, sizes: Sequence[int] = ()) -> Sequence[np.ndarray]:
        along = (sizes,) if sizes and self.name in (*REDUCTIONS, "psum_scatter") else ()
        with np.errstate(all="ignore"):
            return ANSWERS[self.name](blocks, *along, *self.args, **self.kwargs)


def teams_along(grid: Sequence[int], names: Sequence[str], axes: Sequence[str]) -> list[list[int]]:
    """Returns the positions of the devices of each group along the axes, in the order in which these are named."""
    positions = np.arange(math.prod(grid)).reshape(grid)
    inner = [names.index(a) for a in axes]
    outer = [d for d in range(len(grid)) if d not in inner]
    return positions.transpose(outer + inner).reshape(-1, math.prod(grid[d] for d in inner)).tolist()


def together(f: Callable[[Any], Any], offers: Sequence[Any], mesh: st.Mesh) -> list[Any]:
    """Returns the result of ``f`` on each device for its own operand, a pytree of host arrays."""
    found: list[Any] = [None] * mesh.size

    def body() -> None:
        k = st.axis_index(mesh.axis_names)
        device = st.current_device()
        assert device == mesh.flat[k]
        mine = map_leaves(lambda x: st.asarray(x) if isinstance(x, np.ndarray) else x, offers[k])
        result = f(mine)
        found[k] = map_leaves(lambda y: on_host(y, device) if hasattr(y, "shape") else y, result)

    st.shard_map(body, mesh=mesh, in_specs=(), out_specs=st.P())()
    return found


# -- everything with everything ----------------------------------------------------------------------------------------


def size_at(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    axis %= len(shape)
    return (*shape[:axis], size, *shape[axis + 1 :])


def some_call(data: Any, name: str, teams: Sequence[Sequence[int]]) -> tuple[Call, list[tuple[int, ...]]]:
    """Draws a call of a collective, and shapes for all devices, which differ as far as the collective allows."""
    draw = data.draw
    needs = name not in (*REDUCTIONS, "all_gather", *MOVES)
    ndim = draw(some.integers(int(needs), 3))
    tiled = name not in ("pswapaxes",) and bool(ndim) and draw(some.booleans())
    shapes: list[tuple[int, ...]] = [()] * sum(map(len, teams))
    for members in teams:
        shape = tuple(draw(some.lists(SIZES, min_size=ndim, max_size=ndim)))
        for k in members:
            shapes[k] = shape

    def axis(ndim: int) -> int:
        return int(draw(some.integers(-ndim, ndim - 1)))

    def whole(at: int) -> None:  # one element for each device
        for members in teams:
            for k in members:
                shapes[k] = size_at(shapes[k], at, len(members))

    def uneven(at: int) -> None:
        for k, shape in enumerate(shapes):
            shapes[k] = size_at(shape, at, draw(SIZES))

    if name in REDUCTIONS:
        return Call(name), shapes
    if name == "psum_scatter":
        at = axis(ndim)
        if not tiled:
            whole(at)
        return Call(name, (), {"scatter_dimension": at, "tiled": tiled}), shapes
    if name == "all_gather":
        at = axis(ndim + (not tiled))
        if tiled:
            uneven(at)
        return Call(name, (), {"axis": at, "tiled": tiled}), shapes
    if name == "all_to_all":
        cut, join = axis(ndim), axis(ndim)
        if tiled:
            uneven(join)
        else:
            whole(cut)
        return Call(name, (cut, join), {"tiled": tiled}), shapes
    if name == "pswapaxes":
        at = axis(ndim)
        whole(at)
        return Call(name, (at,)), shapes
    for d in range(ndim):
        uneven(d)
    count = len(teams[0])
    order = draw(some.permutations(range(count)))
    if name == "ppermute":
        others = draw(some.permutations(range(count)))
        return Call(name, (list(zip(order, others, strict=True))[: draw(some.integers(0, count))],)), shapes
    return Call(name, (order,) if name == "pshuffle" else (order[0],)), shapes


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_any_call_agrees_with_numpy(name: str, backend: str) -> None:
    @hypothesis.settings(max_examples=drawn(60, fast=9))
    @hypothesis.given(data=some.data())
    def check(data: Any) -> None:
        grid = data.draw(some.sampled_from(GRIDS))
        mesh = mesh_of(grid, backend)
        axes = data.draw(some.permutations(mesh.axis_names))[: data.draw(some.integers(1, len(grid)))]
        counted = [a for a in mesh.axis_names if a in axes] if name in ("ppermute", "pshuffle") else axes
        teams = teams_along(grid, mesh.axis_names, counted)
        more = {}
        if name not in MOVES and data.draw(some.booleans()):
            indices = data.draw(some.permutations(range(len(teams[0]))))
            cuts = sorted(data.draw(some.sets(some.integers(1, len(indices)))) | {0, len(indices)})
            lists = [indices[a:b] for a, b in itertools.pairwise(cuts)]
            more = {"axis_index_groups": lists}
            teams = [[members[i] for i in group] for members in teams for group in lists]
        call, shapes = some_call(data, name, teams)
        kinds = [d for d in dtypes_of(backend) if not (backend == "torch" and d[0] == "c" and name in ("pmax", "pmin"))]
        dtype = data.draw(some.sampled_from(kinds))
        blocks = [array(shape, dtype, k) for k, shape in enumerate(shapes)]
        others = [array(shape, "int32", 10 + k) for k, shape in enumerate(shapes)]
        tree = data.draw(some.booleans())
        offers = [{"a": b, "b": (None, [o])} if tree else b for b, o in zip(blocks, others, strict=True)]
        axis = axes[0] if len(axes) == 1 and data.draw(some.booleans()) else tuple(axes)
        found = together(lambda x: call(x, axis, **more), offers, mesh)
        rounds = name == "pprod" and dtype[0] == "c"  # complex products do so by their place in a row
        exact = backend in EXACT and not rounds
        for members in teams:
            sizes = () if more else [mesh.shape[a] for a in axes]
            answers = call.answer([blocks[k] for k in members], sizes)
            others_answers = call.answer([others[k] for k in members], sizes)
            for k, answer, other in zip(members, answers, others_answers, strict=True):
                if tree:
                    assert list(found[k]) == ["a", "b"]
                    assert found[k]["b"][0] is None
                    assert type(found[k]["b"]) is tuple
                    assert type(found[k]["b"][1]) is list
                    assert_close(found[k]["b"][1][0], other, exact)
                assert_close(found[k]["a"] if tree else found[k], answer, exact)

    check()


@pytest.mark.parametrize("grid", [(5,), (2, 3), (2, 2, 2)], ids=str)
def test_index_and_size_along_any_axes_in_any_order(grid: tuple[int, ...], backend: str) -> None:
    mesh = mesh_of(grid, backend)
    names = mesh.axis_names
    asked = [axes for n in range(1, len(grid) + 1) for axes in itertools.permutations(names, n)]
    found = together(lambda _: [(st.axis_index(axes), st.axis_size(axes)) for axes in asked], [None] * mesh.size, mesh)
    for k, place in enumerate(np.ndindex(grid)):
        for axes, (index, size) in zip(asked, found[k], strict=True):
            sizes = [mesh.shape[a] for a in axes]
            assert size == math.prod(sizes)
            assert index == np.ravel_multi_index([place[names.index(a)] for a in axes], sizes)
    one = together(lambda _: (st.axis_index(names[-1]), st.axis_size(names[-1])), [None] * mesh.size, mesh)
    assert one == [(place[-1], grid[-1]) for place in np.ndindex(grid)]


# -- several names, against JAX ----------------------------------------------------------------------------------------

GROUPS = [[4, 1, 2], [0, 5, 3]]

JAX: dict[str, tuple[Callable[[Any, Any], Any], list[Any], list[Any]]] = {
    # A call; what JAX 0.10.2 gives for the names ("x", "y") on each device of a mesh (x=2, y=3), where device k offers
    # 10 * (k + 1) + arange(6); and for the names ("y", "x").
    "axis_index": (
        lambda v, n: st.axis_index(n),
        [0, 1, 2, 3, 4, 5],
        [0, 2, 4, 1, 3, 5],
    ),
    "axis_size": (
        lambda v, n: st.axis_size(n),
        [6] * 6,
        [6] * 6,
    ),
    "psum": (
        lambda v, n: st.psum(v[0], n),
        [210] * 6,
        [210] * 6,
    ),
    "psum in groups": (
        lambda v, n: st.psum(v[0], n, axis_index_groups=GROUPS),
        [110, 100, 100, 110, 100, 110],
        [120, 90, 90, 90, 120, 120],
    ),
    "pmax in groups": (
        lambda v, n: st.pmax(v[0], n, axis_index_groups=GROUPS),
        [60, 50, 50, 60, 50, 60],
        [60, 40, 40, 40, 60, 60],
    ),
    "pmin in groups": (
        lambda v, n: st.pmin(v[0], n, axis_index_groups=GROUPS),
        [10, 20, 20, 10, 20, 10],
        [10, 20, 20, 20, 10, 10],
    ),
    "all_gather": (
        lambda v, n: st.all_gather(v[0], n),
        [[10, 20, 30, 40, 50, 60]] * 6,
        [[10, 40, 20, 50, 30, 60]] * 6,
    ),
    "all_gather tiled": (
        lambda v, n: st.all_gather(v[:1], n, tiled=True),
        [[10, 20, 30, 40, 50, 60]] * 6,
        [[10, 40, 20, 50, 30, 60]] * 6,
    ),
    "all_gather in groups": (
        lambda v, n: st.all_gather(v[0], n, axis_index_groups=GROUPS),
        [[10, 60, 40], [50, 20, 30], [50, 20, 30], [10, 60, 40], [50, 20, 30], [10, 60, 40]],
        [[10, 60, 50], [30, 40, 20], [30, 40, 20], [30, 40, 20], [10, 60, 50], [10, 60, 50]],
    ),
    "all_to_all": (
        lambda v, n: st.all_to_all(v, n, 0, 0),
        [
            [10, 20, 30, 40, 50, 60],
            [11, 21, 31, 41, 51, 61],
            [12, 22, 32, 42, 52, 62],
            [13, 23, 33, 43, 53, 63],
            [14, 24, 34, 44, 54, 64],
            [15, 25, 35, 45, 55, 65],
        ],
        [
            [10, 40, 20, 50, 30, 60],
            [12, 42, 22, 52, 32, 62],
            [14, 44, 24, 54, 34, 64],
            [11, 41, 21, 51, 31, 61],
            [13, 43, 23, 53, 33, 63],
            [15, 45, 25, 55, 35, 65],
        ],
    ),
    "all_to_all tiled": (
        lambda v, n: st.all_to_all(v, n, 0, 0, tiled=True),
        [
            [10, 20, 30, 40, 50, 60],
            [11, 21, 31, 41, 51, 61],
            [12, 22, 32, 42, 52, 62],
            [13, 23, 33, 43, 53, 63],
            [14, 24, 34, 44, 54, 64],
            [15, 25, 35, 45, 55, 65],
        ],
        [
            [10, 40, 20, 50, 30, 60],
            [12, 42, 22, 52, 32, 62],
            [14, 44, 24, 54, 34, 64],
            [11, 41, 21, 51, 31, 61],
            [13, 43, 23, 53, 33, 63],
            [15, 45, 25, 55, 35, 65],
        ],
    ),
    "all_to_all in groups": (
        lambda v, n: st.all_to_all(v[:3], n, 0, 0, axis_index_groups=GROUPS),
        [[10, 60, 40], [51, 21, 31], [52, 22, 32], [12, 62, 42], [50, 20, 30], [11, 61, 41]],
        [[10, 60, 50], [32, 42, 22], [30, 40, 20], [31, 41, 21], [12, 62, 52], [11, 61, 51]],
    ),
    "pswapaxes": (
        lambda v, n: st.pswapaxes(v, n, 0),
        [
            [10, 20, 30, 40, 50, 60],
            [11, 21, 31, 41, 51, 61],
            [12, 22, 32, 42, 52, 62],
            [13, 23, 33, 43, 53, 63],
            [14, 24, 34, 44, 54, 64],
            [15, 25, 35, 45, 55, 65],
        ],
        [
            [10, 40, 20, 50, 30, 60],
            [12, 42, 22, 52, 32, 62],
            [14, 44, 24, 54, 34, 64],
            [11, 41, 21, 51, 31, 61],
            [13, 43, 23, 53, 33, 63],
            [15, 45, 25, 55, 35, 65],
        ],
    ),
    "psum_scatter": (
        lambda v, n: st.psum_scatter(v, n),
        [210, 216, 222, 228, 234, 240],
        [210, 222, 234, 216, 228, 240],
    ),
    "psum_scatter tiled": (
        lambda v, n: st.psum_scatter(v, n, tiled=True)[0],
        [210, 216, 222, 228, 234, 240],
        [210, 222, 234, 216, 228, 240],
    ),
    "psum_scatter in groups": (
        lambda v, n: st.psum_scatter(v[:3], n, axis_index_groups=GROUPS),
        [110, 103, 106, 116, 100, 113],
        [120, 96, 90, 93, 126, 123],
    ),
    "ppermute": (
        lambda v, n: st.ppermute(v[0], n, [(k, (k + 1) % 6) for k in range(6)]),
        [60, 10, 20, 30, 40, 50],
        [60, 10, 20, 30, 40, 50],
    ),
    "ppermute of some": (
        lambda v, n: st.ppermute(v[0], n, [(0, 5), (1, 2), (4, 0)]),
        [50, 0, 20, 0, 0, 10],
        [50, 0, 20, 0, 0, 10],
    ),
    "pshuffle": (
        lambda v, n: st.pshuffle(v[0], n, [2, 0, 5, 1, 3, 4]),
        [30, 10, 60, 20, 40, 50],
        [30, 10, 60, 20, 40, 50],
    ),
}


@everywhere
@pytest.mark.parametrize("what", JAX)
def test_names_in_any_order_have_the_meaning_of_jax(what: str, backend: str) -> None:
    call, *wanted = JAX[what]
    mesh = st.make_mesh((2, 3), ("x", "y"), devices=st.devices(backend))
    offers = [10 * (k + 1) + np.arange(6) for k in range(6)]
    for names, answer in zip([("x", "y"), ("y", "x")], wanted, strict=True):
        found = together(lambda v, names=names: call(v, names), offers, mesh)
        assert [np.asarray(x).tolist() for x in found] == answer


# -- reductions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("name", [*REDUCTIONS, "psum_scatter"])
def test_the_bits_are_those_of_the_tree_on_every_backend(name: str, count: int) -> None:
    """The sums of the numbers are rounded; their sizes are below and above the limits for dividing work."""
    call = Call(name, (), {"tiled": True} if name == "psum_scatter" else {})
    for shape in [(), (7,), (131, 127), (CHUNKED_FROM // 8 + 13,)]:
        if not shape and name == "psum_scatter":
            continue
        for dtype in ("float64", "float32", "float16"):
            rng = np.random.default_rng(len(shape))
            blocks = [np.asarray(rng.uniform(0.5, 1.5, shape)).astype(dtype) for _ in range(count)]
            answers = call.answer(blocks)
            for backend in READ_ONLY:
                found = together(lambda x: call(x, "x"), blocks, mesh_of((count,), backend))
                assert [f.dtype for f in found] == [np.dtype(dtype)] * count
                assert [f.tobytes() for f in found] == [np.ascontiguousarray(a).tobytes() for a in answers]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_large_results_of_any_memory_order(count: int, backend: str) -> None:
    """They are combined in one chunk for each device; the number of devices does not divide their size."""
    mesh = mesh_of((count,), backend)
    blocks = [array((331, 211), "float64", k) for k in range(count)]
    assert blocks[0].nbytes > CHUNKED_FROM

    def body(x: Any) -> Any:
        turned = x.T
        return (
            st.psum((x, turned), "x"), st.pmax(turned, "x"), st.pmean(x, "x"), st.psum(x[::2], "x"),
            st.psum_scatter(turned, "x", tiled=True),
        )  # fmt: skip

    total, exact = fold(np.add, blocks), backend in EXACT
    for k, found in enumerate(together(body, blocks, mesh)):
        (whole, turned), largest, average, half, part = found
        assert_close(whole, total, exact)
        assert_close(turned, total.T, exact)
        assert_close(largest, fold(np.maximum, blocks).T, exact)
        assert_close(average, total / count, exact)
        assert_close(half, total[::2], exact)
        assert_close(part, np.array_split(total.T, count)[k], exact)


@everywhere
def test_nan_is_never_lost(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    for size in (3, CHUNKED_FROM // 4 + 5):
        blocks = [array((size,), "float32", k) for k in range(4)]
        blocks[0][1] = blocks[3][0] = blocks[2][-1] = np.nan

        def body(x: Any) -> Any:
            return [f(x, "x") for f in (st.psum, st.pmean, st.pmax, st.pmin, st.pprod)]

        for found in together(body, blocks, mesh):
            for name, result in zip(REDUCTIONS, found, strict=True):
                assert np.isnan(result[[0, 1, -1]]).all(), name
                assert np.isnan(result).sum() == 3
    assert math.isnan(together(lambda x: st.pmax(x, "x"), [1.0, math.nan, 3.0, 0.0], mesh)[0])
    assert math.isnan(together(lambda x: st.pmin(x, "x"), [1.0, math.nan, 3.0, 0.0], mesh)[3])


@everywhere
def test_dtypes_of_reductions(backend: str) -> None:
    mesh = mesh_of((3,), backend)
    ones = [np.array([True, True, False]), np.array([True, False, False]), np.array([True, True, False])]
    for found in together(lambda x: [getattr(st, name)(x, "x") for name in REDUCTIONS], ones, mesh):
        total, average, largest, smallest, product = found
        assert_close(total, np.array([3, 2, 0]), True)
        assert_close(average, np.array([1, 2 / 3, 0]), backend in EXACT)
        assert_close(largest, np.array([True, True, False]), True)
        assert_close(smallest, np.array([True, False, False]), True)
        assert_close(product, np.array([1, 0, 0]), True)
    for dtype in ("int8", "uint8", "int32", "int64"):
        blocks = [np.array([100, k], dtype) for k in range(3)]
        for found in together(lambda x: [getattr(st, name)(x, "x") for name in REDUCTIONS], blocks, mesh):
            total, average, largest, smallest, product = found
            with np.errstate(all="ignore"):
                assert_close(total, np.array([300, 3]).astype(dtype), True)  # wraps, as NumPy's
                assert_close(product, np.array([100**3, 0]).astype(dtype), True)
            assert_close(largest, np.array([100, 2], dtype), True)
            assert_close(smallest, np.array([100, 0], dtype), True)
            assert_close(average, np.array([100.0, 1.0]), backend in EXACT)  # and this does not


@pytest.mark.parametrize("name", REDUCTIONS)
def test_python_scalars_give_python_scalars(name: str, backend: str) -> None:
    mesh = mesh_of((4,), backend)
    wanted: dict[str, list[Any]] = {
        "psum": [4, 10, 10.5, 2, 4 + 6j, 1 << 82],
        "pmean": [1.0, 2.5, 2.625, 0.5, 1 + 1.5j, float(1 << 80)],
        "pmax": [1, 4, 4.5, True, 1 + 3j, 1 << 80],
        "pmin": [1, 1, 1.0, False, 1 + 0j, 1 << 80],
        "pprod": [1, 24, 27.0, 0, 1 * (1 + 1j) * (1 + 2j) * (1 + 3j), 1 << 320],
    }
    offers = [[1, k + 1, k + 1.0 + (k == 3) / 2, k > 1, 1 + k * 1j, 1 << 80] for k in range(4)]
    with st.transfers() as log:
        found = together(lambda x: getattr(st, name)(x, "x"), offers, mesh)
    for row in found:
        assert row == wanted[name]
        assert [type(x) for x in row] == [type(x) for x in wanted[name]]
    groups = together(lambda x: getattr(st, name)(x, "x", axis_index_groups=[[0, 3], [2], [1]]), [2, 3, 4, 5], mesh)
    both = {"psum": 7, "pmean": 3.5, "pmax": 5, "pmin": 2, "pprod": 10}[name]
    assert groups == [both, 3, 4, both]
    assert not log.bytes


def test_scalars_elsewhere_become_arrays(backend: str) -> None:
    def body(k: Any) -> Any:
        return st.all_gather(k, "x"), st.ppermute(k, "x", [(0, 2)]), st.pbroadcast(k, "x", 1), st.all_gather(True, "x")

    for k, (all_, sent, one, truth) in enumerate(together(body, [5, 6, 7], mesh_of((3,), backend))):
        assert_close(all_, np.array([5, 6, 7]), True)
        assert_close(sent, np.array(5 if k == 2 else 0), True)
        assert_close(one, np.array(6), True)
        assert_close(truth, np.array([True] * 3), True)


# -- who has a hand on what --------------------------------------------------------------------------------------------

SQUARE = [
    *[Call(name) for name in REDUCTIONS],
    Call("psum_scatter"),
    Call("psum_scatter", (), {"tiled": True, "scatter_dimension": -1}),
    Call("all_gather"),
    Call("all_gather", (), {"tiled": True, "axis": 1}),
    Call("all_to_all", (0, 1)),
    Call("all_to_all", (1, 0), {"tiled": True}),
    Call("all_to_all", (0, 0), {"tiled": True}),
    Call("ppermute", ([(0, 0)],)),
    Call("pswapaxes", (0,)),
    Call("pbroadcast", (0,)),
]
"""Calls for arrays of as many rows as there are devices."""


def calls_for(count: int) -> list[Call]:
    cycle = [(k + 1) % count for k in range(count)]
    return [*SQUARE, Call("pshuffle", (cycle,)), Call("ppermute", (list(enumerate(cycle)),))]


@everywhere
@pytest.mark.parametrize("count", [1, 2, 4])
def test_writes_after_a_collective_change_no_result(count: int, backend: str) -> None:
    """The writes, to the operand or to the memory of which it is a view, are visible neither to the device itself nor
    to others.
    """
    blocks = [array((count, 6), "float64", k) for k in range(count)]
    calls = calls_for(count)

    def body(x: Any) -> Any:
        found = []
        for call in calls:
            mine = x * 1.0
            found.append(call(mine, "x"))
            mine[...] = 99.0
            wide = st.concat([x, x], axis=1)
            found.append(call(wide[:, :6], "x"))
            wide[...] = 77.0
        return found

    found = together(body, blocks, mesh_of((count,), backend))
    for n, call in enumerate(calls):
        for k, answer in enumerate(call.answer(blocks)):
            assert_close(found[k][2 * n], answer, backend in EXACT)
            assert_close(found[k][2 * n + 1], answer, backend in EXACT)


@pytest.mark.parametrize("backend", READ_ONLY)
@pytest.mark.parametrize("count", [1, 3])
def test_results_are_read_only(count: int, backend: str) -> None:
    calls = calls_for(count)

    def body(x: Any) -> None:
        flat = st.psum_scatter(x[:, 0], "x")
        assert flat.shape == ()
        results = [call(x, "x") for call in calls]
        results += [flat, st.psum(x[0, 0], "x"), st.all_gather(1.5, "x"), st.pbroadcast(x[0, 0] * 1, "x", 0)]
        for result in results:
            assert not result.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                result[...] = 0

    together(body, [array((count, 6), "float64", k) for k in range(count)], mesh_of((count,), backend))


@pytest.mark.parametrize("backend", READ_ONLY)
@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")  # of NumPy 2.5
def test_the_shape_of_a_result_belongs_to_its_program(backend: str) -> None:
    def body(x: Any) -> Any:
        results = [st.psum(x, "x"), st.pbroadcast(x, "x", 0), st.all_gather(x, "x", tiled=True)]
        if st.axis_index("x") == 1:
            for result in results:
                result.shape = (2, result.size // 2)
        st.psum(0, "x")  # Now all programs have their results.
        return [result.shape for result in results]

    found = together(body, [array((4,), "float64", k) for k in range(3)], mesh_of((3,), backend))
    assert found == [[(4,), (4,), (12,)], [(2, 2), (2, 2), (2, 6)], [(4,), (4,), (12,)]]


@pytest.mark.parametrize("size", [8, CHUNKED_FROM // 16])
@pytest.mark.parametrize("count", [1, 4])
def test_results_are_kept_without_a_copy(count: int, size: int) -> None:
    """Where devices share memory, results are returned as they are, or as a view."""
    mesh = mesh_of((count,), "numpy")
    value = array((count * count, size), "float64", 1)
    x = st.device_put(value, st.NamedSharding(mesh, st.P("x")))
    blocks = np.split(value, count)
    for call in calls_for(count):
        answers = call.answer(blocks)
        for view in (lambda r: r, lambda r: r[:1], lambda r: (r, [r[..., ::2]])):
            f = functools.partial(lambda call, view, x: view(call(x, "x")), call, view)
            f = st.shard_map(f, mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))
            with st.transfers() as log:
                made = f(x)
            assert log.copied == 0, call
            for result, wanted in zip(leaves(made), zip(*[leaves(view(a)) for a in answers], strict=True), strict=True):
                assert_close(values_of(result), np.concatenate(wanted), True)
    made = st.shard_map(lambda x: st.psum(x, "x"), mesh=mesh, in_specs=st.P("x"), out_specs=st.P())
    with st.transfers() as log:
        total = made(x)
    assert log.copied == 0
    assert_close(values_of(total), fold(np.add, blocks), True)


def test_views_of_the_result_of_a_collective_are_what_programs_returned() -> None:
    """The whole result is stored once for all programs; any other view of its memory as it is."""
    total, mesh = np.arange(6.0) * 3, mesh_of((3,), "numpy")

    def reshaped(x: Any) -> Any:
        return x.reshape(2, 3)

    for view in (lambda x: x, lambda x: x[::-1], lambda x: x[1:], reshaped, lambda x: np.broadcast_to(x[2:3], 6)):
        f = st.pmap(lambda x, view=view: view(st.psum(x, "i")), axis_name="i")
        parts = f([st.device_put(np.arange(6.0), device) for device in mesh.flat])
        for part in parts:
            assert_close(values_of(part), view(total), True)
        assert len({id(part._storage.buffers[0]) for part in parts}) == (1 if view(total) is total else 3)
        parts[0][...] = -1
        assert_close(values_of(parts[1]), view(total), True)


def test_adopted_results_are_independent_values(backend: str) -> None:
    """Several tensors share the memory of one result; a write to one of them is not visible in the others."""
    mesh = mesh_of((4,), backend)
    body = st.pmap(lambda x: st.psum(x, "i"), axis_name="i")
    first, *rest = body(st.shard(np.arange(8.0), devices=mesh))
    other = rest[0]
    first[0] = 100.0
    other += 1
    assert [r.tolist() for r in (first, *rest)] == [[100.0, 16.0], [13.0, 17.0], [12.0, 16.0], [12.0, 16.0]]


# -- the log -----------------------------------------------------------------------------------------------------------


def sent_along(count: int, backend: str, offers: Blocks, call: Call) -> dict[tuple[int, int], int]:
    """How many bytes a collective sent from each device to each other, by their positions."""
    mesh = mesh_of((count,), backend, start=8 - count)
    with st.transfers() as log:
        together(lambda x: call(x, "x"), offers, mesh)
    found: dict[tuple[int, int], int] = {}
    for record in log:
        if record.operator == call.name and record.bytes:
            assert record.axis.strip("'\"") == "x"
            assert record.explicit
            assert record.copied == (0 if shared_memory(mesh.flat) else record.bytes)
            pair = mesh.flat.index(record.source), mesh.flat.index(record.destination)
            found[pair] = found.get(pair, 0) + record.bytes
    return found


COUNTS = pytest.mark.parametrize("count", [1, 2, 3, 5, 8])


def pairs(count: int) -> list[tuple[int, int]]:
    return list(itertools.permutations(range(count), 2))


@COUNTS
@pytest.mark.parametrize("name", REDUCTIONS)
def test_bytes_of_small_reductions(name: str, count: int, backend: str) -> None:
    """The tree combines on the way to the first device: k sends to k without its lowest bit. The result is broadcast
    along a binomial tree: k receives it from k without its highest bit.
    """
    nbytes = 24 * 8 if name == "pmean" else 24 * 4  # of integers, means are added in float64
    wanted = {(k, k & (k - 1)): nbytes for k in range(1, count)}
    for k in range(1, count):
        edge = (k - (1 << (k.bit_length() - 1)), k)
        wanted[edge] = wanted.get(edge, 0) + nbytes
    offers = [array((24,), "int32", k) for k in range(count)]
    found = sent_along(count, backend, offers, Call(name))
    assert found == wanted
    assert sum(found.values()) == 2 * (count - 1) * nbytes


@pytest.mark.parametrize("count", [3, 5, 8])
def test_bytes_of_large_reductions(count: int, backend: str) -> None:
    """Every device combines a chunk and sends it to all others: all links carry the same, up to the remainder."""
    size = CHUNKED_FROM // 4 + 1
    chunks = [len(c) * 4 for c in np.array_split(np.empty(size, "float32"), count)]
    found = sent_along(count, backend, [array((size,), "float32", k) for k in range(count)], Call("psum"))
    for i, k in pairs(count):
        assert abs(found[i, k] - (chunks[k] + chunks[i])) <= 8  # bytes are cut where elements are, or nearly so
    assert sum(found.values()) == 2 * (count - 1) * size * 4


@COUNTS
def test_bytes_of_psum_scatter(count: int, backend: str) -> None:
    offers = [array((11, 3), "float64", k) for k in range(count)]
    found = sent_along(count, backend, offers, Call("psum_scatter", (), {"tiled": True}))
    rows = [len(c) for c in np.array_split(np.empty(11), count)]
    assert found == {(i, k): rows[k] * 24 for i, k in pairs(count)}
    assert sum(found.values()) == (count - 1) * 11 * 24
    offers = [array((3, count), "int16" if backend != "torch" else "int32", k) for k in range(count)]
    found = sent_along(count, backend, offers, Call("psum_scatter", (), {"scatter_dimension": 1}))
    assert found == dict.fromkeys(pairs(count), 3 * offers[0].itemsize)


@COUNTS
def test_bytes_of_all_gather(count: int, backend: str) -> None:
    offers = [array((k, 3), "float32", k) for k in range(count)]
    found = sent_along(count, backend, offers, Call("all_gather", (), {"tiled": True}))
    assert found == {(i, k): i * 12 for i, k in pairs(count) if i}
    offers = [array((2, 3), "float32", k) for k in range(count)]
    found = sent_along(count, backend, offers, Call("all_gather"))
    assert sum(found.values()) == count * (count - 1) * 24


@COUNTS
def test_bytes_of_all_to_all(count: int, backend: str) -> None:
    offers = [array((10, k + 1), "float64", k) for k in range(count)]
    found = sent_along(count, backend, offers, Call("all_to_all", (0, 1), {"tiled": True}))
    rows = [len(c) for c in np.array_split(np.empty(10), count)]
    assert found == {(i, k): rows[k] * (i + 1) * 8 for i, k in pairs(count)}
    offers = [array((count, 5), "float64", k) for k in range(count)]
    for call in (Call("all_to_all", (0, 1)), Call("pswapaxes", (0,))):
        found = sent_along(count, backend, offers, call)
        assert found == dict.fromkeys(pairs(count), 40)
        assert sum(found.values()) == (count - 1) * sum(o.nbytes for o in offers) // count


@COUNTS
def test_bytes_of_ppermute_and_pshuffle(count: int, backend: str) -> None:
    offers = [array((k + 1,), "float64", k) for k in range(count)]
    ring = [(k, (k + 1) % count) for k in range(count)]
    moves = {(i, k): (i + 1) * 8 for i, k in ring if i != k}
    assert sent_along(count, backend, offers, Call("ppermute", (ring,))) == moves
    assert sent_along(count, backend, offers, Call("pshuffle", ([(k - 1) % count for k in range(count)],))) == moves
    one = {(0, count - 1): 8} if count > 1 else {}
    assert sent_along(count, backend, offers, Call("ppermute", ([(0, count - 1)],))) == one
    assert sent_along(count, backend, offers, Call("ppermute", ([(k, k) for k in range(count)],))) == {}


@COUNTS
def test_bytes_of_pbroadcast(count: int, backend: str) -> None:
    """Each device receives the array once and forwards it; after ⌈log2 n⌉ rounds all devices have it."""
    offers = [array((5,), "float64", k) for k in range(count)]
    source = count - 1
    found = sent_along(count, backend, offers, Call("pbroadcast", (source,)))
    assert sorted(k for _, k in found) == [k for k in range(count) if k != source]
    assert set(found.values()) <= {40}
    rounds = 0
    known = {source}
    while len(known) < count:
        known |= {k for i, k in found if i in known}
        rounds += 1
    assert rounds <= max(math.ceil(math.log2(count)), 0)
    assert max([sum(i == j for i, _ in found) for j in range(count)]) <= math.ceil(math.log2(count))


def test_bytes_between_devices_of_a_group(backend: str) -> None:
    """The groups are those of one axis of a grid, and of `axis_index_groups`; a device sends nothing to itself."""
    mesh = mesh_of((2, 3), backend)
    offers = [array((4,), "float64", k) for k in range(6)]
    for axis, along in (("x", [(0, 3), (1, 4), (2, 5)]), ("y", [(0, 1, 2), (3, 4, 5)]), (("y", "x"), [range(6)])):
        with st.transfers() as log:
            together(lambda x, axis=axis: st.all_gather(x, axis), offers, mesh)
        found = sorted((r.source.id, r.destination.id, r.bytes) for r in log if r.operator == "all_gather")
        assert found == sorted((i, k, 32) for team_ in along for i, k in itertools.permutations(team_, 2))
        assert all(name in r.axis for r in log if r.operator == "all_gather" for name in axis)
    with st.transfers() as log:
        together(lambda x: st.all_gather(x, "y", axis_index_groups=[[2, 0], [1]]), offers, mesh)
    found = sorted((r.source.id, r.destination.id) for r in log if r.operator == "all_gather")
    assert found == [(0, 2), (2, 0), (3, 5), (5, 3)]
    twice = np.split(np.arange(8.0), 4)
    with st.transfers() as log:
        f = functools.partial(st.all_gather, axis_name="i", tiled=True)
        made = st.pmap(f, twice, axis_name="i", devices=st.devices(backend)[:2])
    assert [m.tolist() for m in made] == [list(range(8))] * 4
    found = [(r.source.id, r.destination.id) for r in log if r.operator == "all_gather"]
    assert sorted(found) == [(0, 1)] * 4 + [(1, 0)] * 4


# -- where they are called ---------------------------------------------------------------------------------------------


@everywhere
def test_in_lists_of_shards(backend: str) -> None:
    """As in pmap of lists, the shards have any sizes, and the results are lists."""
    devices = st.devices(backend)[2:6]
    parts = [array((n, 3), "float32", n) for n in (2, 0, 3, 1)]
    square = [array((4, 2), "float32", n) for n in range(4)]

    def body(part: Any, grid: Any) -> Any:
        total = st.psum(part.sum(axis=0), "i")
        return {
            "total": total,
            "all": st.all_gather(part, "i", tiled=True),
            "next": st.ppermute(part, "i", [(0, 1), (1, 2), (3, 3)]),
            "turned": st.all_to_all(grid, "i", 0, 1),
            "rows": st.psum_scatter(grid, "i"),
            "second": st.pbroadcast(grid, "i", 1),
            "place": st.axis_index("i"),
        }

    made = st.pmap(body, parts, square, axis_name="i", devices=devices)
    exact = backend in EXACT
    total = fold(np.add, [p.sum(axis=0) for p in parts])
    gathered = all_gather(parts, tiled=True)
    sent = ppermute(parts, [(0, 1), (1, 2), (3, 3)])
    turned, rows = all_to_all(square, 0, 1), psum_scatter(square)
    for k, row in enumerate(made):
        assert row["total"].device == devices[k]
        assert row["place"] == k
        assert_close(values_of(row["total"]), total, False)
        for name, answer in (("all", gathered), ("next", sent), ("turned", turned), ("rows", rows)):
            assert_close(values_of(row[name]), answer[k], exact)
        assert_close(values_of(row["second"]), square[1], True)


@everywhere
def test_in_smap_and_in_pmap_of_arrays(backend: str) -> None:
    devices = st.devices(backend)[:6]
    value = array((7, 5), "float64", 1)
    made = st.smap(
        lambda x: x - st.pmean(x.sum(axis=0, keepdims=True), "rows"),
        value, axes=[(0, 1)], devices=devices, axis_name=("rows", "columns"),
    )  # fmt: skip
    assert_close(values_of(made), value - value.sum(axis=0) / made.sharding.mesh.shape["rows"], False)
    made = st.pmap(lambda x: x / st.psum(x, "i"), np.arange(1.0, 5), axis_name="i", devices=devices[:4])
    assert_close(values_of(made), np.arange(1.0, 5) / 10, False)


@everywhere
def test_permutations_around_a_ring(backend: str) -> None:
    """Many permutations in a row, along several axes in turn, until each block is back on its device."""
    mesh = mesh_of((2, 3), backend)
    blocks = [array((3,), "int64", k) for k in range(6)]
    ring = [(k, (k + 1) % 6) for k in range(6)]

    def body(x: Any) -> Any:
        total = x
        for _ in range(5):
            x = st.ppermute(x, ("x", "y"), ring)
            total = total + x
        home = st.ppermute(x, ("x", "y"), ring)
        return total, st.psum(st.psum(home, "y"), "x"), home

    for k, (total, sums, home) in enumerate(together(body, blocks, mesh)):
        assert_close(total, fold(np.add, blocks), True)
        assert_close(sums, fold(np.add, blocks), True)
        assert_close(home, blocks[k], True)


def test_entries_of_dicts_are_matched_by_key(backend: str) -> None:
    """The order in which a device has inserted them does not matter."""

    def body(x: Any) -> Any:
        tree = {"a": x, "b": x * 10}
        return st.psum(dict(reversed(tree.items())) if st.axis_index("x") else tree, "x")

    for found in together(body, [np.array([1.0]), np.array([2.0]), np.array([3.0])], mesh_of((3,), backend)):
        assert {key: x.tolist() for key, x in found.items()} == {"a": [6.0], "b": [60.0]}


def test_helper_threads_change_nothing(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Slow programs run in several threads and arrive in any order; the tree determines how they are combined."""
    monkeypatch.setattr(threads, "usable_cores", lambda: 3)
    rng = np.random.default_rng(1)
    blocks = [rng.random(50) for _ in range(6)]

    def body(x: Any) -> Any:
        found = []
        for turn in range(4):
            time.sleep(0.0005 * ((st.axis_index("x") + turn) % 3))
            found.append(st.psum(x, "x"))
            found.append(st.all_gather(x[:turn], "x", tiled=True))
        return found

    for found in together(body, blocks, mesh_of((6,), backend)):
        for turn in range(4):
            assert_close(found[2 * turn], fold(np.add, blocks), backend in EXACT)
            assert_close(found[2 * turn + 1], np.concatenate([b[:turn] for b in blocks]), True)


def test_tensors_over_several_devices_combine_device_by_device(backend: str) -> None:
    """Along a mapped axis, each device combines with the devices at the same position of the other, unmapped axes."""
    mesh = mesh_of((2, 3), backend)
    value = array((4, 7), "float64", 1)
    x = st.device_put(value, st.NamedSharding(mesh, st.P("x", "y")))

    def body(x: Any) -> Any:
        assert isinstance(x, st.ShardedTensor)
        assert st.axis_index("x") in (0, 1)
        return st.psum(x, "x"), st.ppermute(x, "x", [(0, 1)]), st.pmax(1 + st.axis_index("x"), "x") * x

    f = st.shard_map(body, mesh=mesh, in_specs=st.P("x"), out_specs=(st.P(), st.P("x"), st.P("x")), axis_names={"x"})
    with st.transfers() as log:
        total, sent, doubled = f(x)
    assert_close(values_of(total), value[:2] + value[2:], True)
    assert_close(values_of(sent), np.concatenate([np.zeros((2, 7)), value[:2]]), True)
    assert_close(values_of(doubled), 2 * value, True)
    assert total.sharding.spec == st.P(None, "y")
    for r in log:
        if r.operator in ("psum", "ppermute"):
            assert r.source.id % 3 == r.destination.id % 3
    assert sum(r.bytes for r in log if r.operator == "ppermute") == 2 * 7 * 8


@pytest.mark.parametrize("dtype", ["bool", "int8", "float32"])
@everywhere
def test_tensors_over_several_devices_get_the_dtype_that_arrays_get(dtype: str, backend: str) -> None:
    """Sums of bool count, and means of integers are fractions, whatever the number of devices of a call."""
    mesh = mesh_of((2, 3), backend)
    value = np.array([[1, 0, 1, 1], [1, 1, 0, 0]]).astype(dtype)
    x = st.device_put(value, st.NamedSharding(mesh, st.P("x", "y")))

    def body(x: Any) -> Any:
        return [getattr(st, name)(x, "x") for name in REDUCTIONS]

    over_several = st.shard_map(body, mesh=mesh, in_specs=st.P("x"), out_specs=st.P(), axis_names={"x"})(x)
    over_one = st.shard_map(body, mesh=mesh, in_specs=st.P("x", "y"), out_specs=st.P(None, "y"))(x)
    for found, wanted in zip(over_several, over_one, strict=True):
        assert found.dtype == wanted.dtype
        assert_close(values_of(found), values_of(wanted), True)


@everywhere
def test_collectives_of_offloaded_tensors_stay_offloaded(backend: str) -> None:
    mesh = mesh_of((2, 3), backend)
    value = array((4, 6), "float64", 1)
    x = st.device_put(value, st.NamedSharding(mesh, st.P("x", "y"), memory_kind="pinned_host"))
    seen: list[str] = []

    def body(x: Any) -> Any:
        total = st.psum(x, "x")
        seen.extend([x.sharding.memory_kind, total.sharding.memory_kind])
        return total

    total = st.shard_map(body, mesh=mesh, in_specs=st.P("x"), out_specs=st.P(), axis_names={"x"})(x)
    assert len(set(seen)) == 1
    assert_close(values_of(total), value[:2] + value[2:], True)


# -- what they refuse --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "kind", "words"), [
    (lambda x: st.psum(x, "q"), st.ShardingError, "psum: no axis is called 'q' here"),
    (lambda x: st.pmax(x, ("x", "x")), st.ShardingError, "axis 'x' occurs twice"),
    (lambda x: st.pmin(x, 0), st.ArgumentTypeError, "wanted the name of an axis"),
    (lambda x: st.axis_index("q"), st.ShardingError, "axis_index: no axis is called 'q'"),
    (lambda x: st.psum("text", "x"), st.ArgumentTypeError, "psum: x is a str"),
    (lambda x: st.psum(x, "x", axis_index_groups=[[0, 1], [1]]), st.ArgumentError, "every index from 0 to 2 must occur once"),
    (lambda x: st.ppermute(x, "x", [(0, 3)]), st.ArgumentError, "the destination 3"),
    (lambda x: st.ppermute(x, "x", [(0, 1), (0, 2)]), st.ArgumentError, "the source 0 twice"),
    (lambda x: st.ppermute(x, "x", [(0, 1), (2, 1)]), st.ArgumentError, "the destination 1 twice"),
    (lambda x: st.ppermute(x, "x", [0, 1]), st.ArgumentTypeError, "wanted pairs"),
    (lambda x: st.pshuffle(x, "x", [0, 0, 1]), st.ArgumentError, "each index from 0 to 2 once"),
    (lambda x: st.pbroadcast(x, "x", 3), st.ArgumentError, "source is 3; axis 'x' goes from 0 to 2"),
    (lambda x: st.pbroadcast(x, "x", 0.5), st.ArgumentTypeError, "wanted an integer"),
    (lambda x: st.all_gather(x, "x", axis=3), st.AxisError, "axis is 3, and the array has 3 dimensions"),
    (lambda x: st.all_gather(x, "x", axis=2, tiled=True), st.AxisError, "axis is 2, and the array has 2 dimensions"),
    (lambda x: st.all_to_all(x, "x", 0, 1), st.ShapeError, "has 4 elements along dimension 0, and axis 'x' has 3 devices"),
    (lambda x: st.all_to_all(x, "x", 0, -3, tiled=True), st.AxisError, "concat_axis is -3"),
    (lambda x: st.pswapaxes(x, "x", 1), st.ShapeError, "2 elements along dimension 1"),
    (lambda x: st.psum_scatter(x, "x"), st.ShapeError, "wanted as many, or tiled=True"),
    (lambda x: st.psum_scatter(x, "x", scatter_dimension=5, tiled=True), st.AxisError, "scatter_dimension is 5"),
    (lambda x: st.psum(x[min(st.axis_index("x"), 1) :], "x"), st.CollectiveError, "float64[3, 2]"),
    (lambda x: st.all_gather(x[st.axis_index("x") :], "x"), st.ShapeError, "wanted equal shapes"),
    (lambda x: st.all_gather(x[:, st.axis_index("x") :], "x", tiled=True), st.ShapeError, "along dimension 0 only"),
    (lambda x: (st.psum if st.axis_index("x") else st.pmax)(x, "x"), st.CollectiveError, "pmax over 'x'"),
    (lambda x: st.psum(x, "x") if st.axis_index("x") else x, st.CollectiveError, "returned without such a call"),
])  # fmt: skip
def test_errors(call: Any, kind: type[Exception], words: str, backend: str) -> None:
    mesh = mesh_of((3,), backend)
    blocks = [array((4, 2), "float64", k) for k in range(3)]
    with pytest.raises(kind) as caught:
        together(call, blocks, mesh)
    assert words in str(caught.value)
    assert st.current_device() is None
    assert_close(together(lambda x: st.psum(x, "x"), blocks, mesh)[2], fold(np.add, blocks), backend in EXACT)


@pytest.mark.parametrize("name", [*sorted(ANSWERS), "axis_index", "axis_size"])
def test_outside_of_a_map_there_is_no_axis(name: str) -> None:
    rest = {"all_to_all": (0, 0), "ppermute": ([],), "pshuffle": ([],), "pswapaxes": (0,), "pbroadcast": (0,)}
    arguments = ("x",) if name.startswith("axis") else (np.ones(2), "x", *rest.get(name, ()))
    with pytest.raises(st.ShardingError, match=f"{name}: there is no mapped function around this call"):
        getattr(st, name)(*arguments)


def test_the_cost_of_checks_is_proportional_to_the_bytes_sent() -> None:
    """The events that order n² messages carry the times of n devices each; they are not merged one time after the
    other.
    """

    def calls(count: int) -> int:
        """How many functions are called in an all-gather of so many devices."""
        backend, devices = load("checked"), [st.Device("checked", k) for k in range(count)]
        arrays = []
        for device in devices:
            with backend.on(device):
                arrays.append(backend.from_host(np.ones(2), device))
        profile = cProfile.Profile()
        gathered = profile.runcall(ArrayCommunicator("all_gather", "x", devices).all_gather, arrays, 0, True)
        assert {array.shape for array in gathered} == {(2 * count,)}
        return sum(entry.callcount for entry in profile.getstats())

    few, many = calls(24), calls(48)
    assert many < 1.2 * 4 * few


@hypothesis.given(some.data())
def test_blocks_are_reduced_along_any_tree(data: Any) -> None:
    """Partial results share memory, and the bits are those of the tree."""
    parents = [data.draw(some.integers(0, k - 1)) for k in range(1, data.draw(some.integers(2, 9)))]
    tree = tuple([tuple([k for k, parent in enumerate(parents, 1) if parent == j]) for j in range(len(parents) + 1)])
    arrays = [np.random.default_rng(k).normal(size=53).astype("f4") for k in range(len(tree))]
    before = [array.copy() for array in arrays]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_communicator, "_BLOCK", 64)
        patch.setattr(array_communicator, "_BLOCKS", 2)
        found = array_communicator._reduced(np.add, arrays, tree)
    np.testing.assert_array_equal(found, combine(tree, arrays.__getitem__, np.add))
    np.testing.assert_array_equal(arrays, before)
