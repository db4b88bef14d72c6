"""pmap: of arrays as in JAX, of lists as in Nx; named axes; maps in maps."""

from __future__ import annotations

import time
import weakref
from collections import namedtuple
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.communication import array_communicator
from shardtensor.host import threads
from shardtensor.tensor.pytree import leaves, map_leaves, replaced
from tests.draws import drawn
from tests.layouts import array, assert_same, everywhere, mesh_of, placed, values_of

Pair = namedtuple("Pair", "left right")


def row(backend: str, count: int = 4, start: int = 0) -> list[st.Device]:
    return st.devices(backend)[start : start + count]


def listed(trees: Any) -> Any:
    """Results of maps in maps as nested lists of numbers."""
    return map_leaves(lambda x: values_of(x).tolist(), trees)


# -- arrays: against NumPy -------------------------------------------------------------------------


@some.composite
def trees(draw: Any, leaf: Any, depth: int = 2) -> Any:
    """Draws a pytree, which is mostly a single leaf."""
    kind = draw(some.sampled_from(["leaf", "leaf", "dict", "tuple", "named"])) if depth else "leaf"
    if kind == "leaf":
        return draw(leaf)
    if kind == "named":
        return Pair(draw(trees(leaf, depth - 1)), draw(trees(leaf, depth - 1)))
    inside = draw(some.lists(trees(leaf, depth - 1), min_size=1, max_size=2))
    return dict(zip("ab", inside, strict=False)) if kind == "dict" else tuple(inside)


@some.composite
def shortened(draw: Any, axes: Any) -> Any:
    """Draws a prefix of a tree of axes, which ends where all axes below are equal."""
    found = leaves(axes)
    if found and all(a == found[0] for a in found) and draw(some.booleans()):
        return found[0]
    if type(axes) is dict:
        return {key: draw(shortened(value)) for key, value in axes.items()}
    if isinstance(axes, tuple):
        parts = [draw(shortened(item)) for item in axes]
        return type(axes)(*parts) if hasattr(axes, "_fields") else tuple(parts)
    return axes


def cut(value: Any, axis: int | None, k: int) -> Any:
    return value if axis is None else np.take(value, k, axis)


@hypothesis.settings(max_examples=drawn(60, fast=10))
@hypothesis.given(data=some.data())
def test_arrays_are_split_and_stacked_as_in_jax(backend: str, data: Any) -> None:
    count = data.draw(some.integers(1, 8))
    seeds = iter(range(100))

    @some.composite
    def mapped_or_whole(draw: Any) -> tuple[np.ndarray, int | None]:
        ndim = draw(some.integers(0, 3))
        shape = [draw(some.sampled_from([0, 1, 2, 3])) for _ in range(ndim)]
        dtype = draw(some.sampled_from(["float64", "float32", "int32", "bool"]))
        axis = draw(some.integers(-ndim, ndim - 1)) if ndim and draw(some.booleans()) else None
        if axis is not None:
            shape[axis] = count
        return array(tuple(shape), dtype, next(seeds)), axis

    drawn = [data.draw(trees(some.builds(_Leaf, mapped_or_whole()))) for _ in range(data.draw(some.integers(1, 3)))]
    drawn.insert(0, _Leaf((array((count, 2), "float64", 77), 0)))  # one at least is mapped
    mesh = mesh_of((8,), backend)
    args, plain, said = [], [], []
    for tree in drawn:
        plain.append(map_leaves(lambda leaf: leaf.value, tree))
        axes = map_leaves(lambda leaf: leaf.axis, tree)
        said.append(data.draw(shortened(axes)))
        args.append(map_leaves(lambda leaf: placed(data, leaf.value, backend, mesh), tree))
    in_axes = 0 if all(a == 0 for a in said) and data.draw(some.booleans()) else tuple(said)
    pairs = [leaf for tree in drawn for leaf in leaves(tree)]
    # A leaf that is whole, and so equal on all devices, may come back once.
    outs = []
    for leaf in pairs:
        ndim = leaf.value.ndim - (leaf.axis is not None)
        once = leaf.axis is None and data.draw(some.booleans())
        outs.append(None if once else data.draw(some.integers(-ndim - 1, ndim)))
    out_axes = data.draw(shortened(tuple(replaced(drawn, outs))))
    seen: list[Any] = []

    def fn(*parts: Any) -> Any:
        k = int(st.axis_index("i"))
        seen.append((k, st.current_device()))
        for part, leaf in zip(leaves(parts), pairs, strict=True):
            assert not isinstance(part, st.ShardedTensor)
            assert tuple(part.shape) == cut(leaf.value, leaf.axis, k).shape
        return tuple(map_leaves(lambda x: st.where(x > 0, x, x * 3) if x.ndim else x, list(parts)))

    own = data.draw(some.sampled_from([None, "list", "mesh"]))
    devices: Any = own and st.devices(backend)[-count:]
    if own == "mesh":
        devices = st.make_mesh((count,), ("q",), devices=devices)
    made = st.pmap(fn, *args, axis_name="i", in_axes=in_axes, out_axes=out_axes, devices=devices)
    wanted = []
    for leaf, at in zip(pairs, outs, strict=True):
        v = leaf.value
        answer = np.where(v > 0, v, v * 3).astype(np.result_type(v, v * 3)) if v.ndim - (leaf.axis is not None) else v
        wanted.append(answer if at is None else np.stack([cut(answer, leaf.axis, k) for k in range(count)], at))
    for result, answer in zip(leaves(made), wanted, strict=True):
        assert_same(result, answer, exact=True)
    assert map_leaves(lambda _: None, made) == tuple(map_leaves(lambda _: None, drawn))
    assert sorted(k for k, _ in seen) == list(range(count))
    places = [device for _, device in sorted(seen, key=lambda s: s[0])]
    if own:
        assert places == st.devices(backend)[-count:]
    assert len(set(places)) == count


class _Leaf:
    """A value and the axis along which it is mapped."""

    def __init__(self, pair: tuple[np.ndarray, int | None]) -> None:
        self.value, self.axis = pair


@everywhere
def test_a_prefix_of_the_devices_serves_fewer_slices(backend: str) -> None:
    for count in (1, 3, 8):
        with st.use_mesh(mesh_of((8,), backend)) as mesh:
            made = st.pmap(lambda x: x * 2, np.arange(count * 2.0).reshape(count, 2))
        assert made.sharding.mesh.flat == mesh.flat[:count]
        assert made.sharding.shard_shape(made.shape) == (1, 2)
        assert_same(made, np.arange(count * 2.0).reshape(count, 2) * 2)


def test_devices_determine_places_and_number(backend: str) -> None:
    value = array((3, 2), "float64", 1)
    chosen = [st.devices(backend)[k] for k in (6, 1, 4)]
    made = st.pmap(lambda x: x + 1, value, devices=chosen)
    assert list(made.sharding.mesh.flat) == chosen
    assert_same(made, value + 1)
    for wrong in (chosen[:2], [*chosen, st.devices(backend)[0]]):
        with pytest.raises(st.ShapeError, match=rf"3 slices for {len(wrong)} devices"):
            st.pmap(lambda x: x, value, devices=wrong)


@everywhere
def test_chains_of_maps_over_arrays_move_nothing(backend: str) -> None:
    value = array((4, 5, 3), "float64", 1)
    x = st.device_put(value, st.NamedSharding(mesh_of((4,), backend, start=3), st.P("x")))
    with st.transfers() as log, st.transfer_guard("disallow"):
        y = st.pmap(lambda a: (a * 2).T, x)
        z = st.pmap(lambda a: a.sum(axis=0), y, out_axes=1)
        w = st.pmap(lambda a, b: b + a[0], z, y, in_axes=(1, 0))
    assert log.bytes == 0
    for made in (y, z, w):
        assert list(made.sharding.mesh.flat) == row(backend, 4, 3)
    assert_same(y, (value * 2).transpose(0, 2, 1))
    assert_same(z, (value * 2).sum(axis=2).T)
    assert_same(w, (value * 2).transpose(0, 2, 1) + (value * 2).sum(axis=2)[:, :1, None])


def test_computation_follows_placed_tensors(backend: str) -> None:
    there = mesh_of((4,), backend, start=4)
    x = st.device_put(np.arange(4.0), st.NamedSharding(there, st.P("x")))
    made = st.pmap(lambda a, b: a + b, np.ones(4), x)  # the second one is committed
    assert list(made.sharding.mesh.flat) == row(backend, 4, 4)
    # An argument on another number of devices does not determine the devices of the map.
    wide = st.device_put(np.arange(4.0), mesh_of((8,), backend))
    with st.use_mesh(mesh_of((8,), backend)) as mesh:
        made = st.pmap(lambda a: a + 1, wide)
    assert made.sharding.mesh.flat == mesh.flat[:4]
    assert_same(made, np.arange(4.0) + 1)


def test_numpy_slices_are_views_and_results_are_adopted() -> None:
    x = st.device_put(np.arange(12.0).reshape(4, 3), st.NamedSharding(mesh_of((4,), "numpy"), st.P("x")))
    seen: list[Any] = []

    def fn(a: Any) -> Any:
        seen.append(a)
        return a * 2

    with st.transfers() as log:
        made = st.pmap(fn, x, out_axes=-1)
    assert (log.bytes, log.copied) == (0, 0)
    assert len(seen) == 4
    assert all(np.shares_memory(a, np.asarray(x)) for a in seen)
    assert_same(made, np.arange(12.0).reshape(4, 3).T * 2)


@everywhere
def test_equal_results_come_once(backend: str) -> None:
    x = np.arange(8.0).reshape(4, 2)
    devices = row(backend)
    total, parts = st.pmap(lambda a: (st.psum(a, "i"), a), x, axis_name="i", out_axes=(None, 0), devices=devices)
    assert_same(total, x.sum(axis=0))
    assert total.sharding.is_fully_replicated
    assert_same(parts, x)
    nan = st.pmap(lambda a: st.full((2,), float("nan")), x, out_axes=None, devices=devices)
    assert np.isnan(values_of(nan)).all()
    for fn, other in [
        (lambda a: a, 1),
        (lambda a: st.psum(a, "i")[: 1 + (st.axis_index("i") == 3)], 3),
        (lambda a: st.astype(st.psum(a, "i"), "float32" if st.axis_index("i") == 2 else "float64"), 2),
    ]:
        with pytest.raises(st.ShapeError, match="pmap: the result is declared to be equal") as caught:
            st.pmap(fn, x, axis_name="i", out_axes=None, devices=devices)
        assert f"on {backend}:0 and {backend}:{other} it differs" in str(caught.value)


def test_none_is_a_leaf_of_results(backend: str) -> None:
    made = st.pmap(lambda a: {"x": a, "none": None}, np.arange(3.0), devices=row(backend, 3))
    assert made["none"] is None
    assert_same(made["x"], np.arange(3.0))


@everywhere
@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")
def test_an_argument_is_returned_in_the_shape_that_the_function_gave_it(backend: str) -> None:
    def turned(a: Any) -> Any:
        if hasattr(a, "t_"):
            a.t_()
        else:
            a.shape = a.shape[::-1]
        return a

    for shape in [(2, 3), (3, 3)]:
        value = array(shape, "float64", 5)
        x = st.device_put(value, row(backend)[1])
        (result,) = st.pmap(turned, [x])
        assert_same(result, value.T if backend == "torch" else value.reshape(shape[::-1]))
        assert_same(x, value)


KEPT = {
    "the argument": lambda a: a,
    "a view of the argument": lambda a: a[1:],
    "a new array": lambda a: a + 1,
    "a sum over the programs": lambda a: st.psum(a, "i"),
    "a view of a sum": lambda a: st.psum(a, "i")[1:],
    "what was gathered": lambda a: st.all_gather(a, "i", tiled=True),
    "what was exchanged": lambda a: st.all_to_all(a, "i", 1, 0, tiled=True),
    "what another program has sent": lambda a: st.pshuffle(a, "i", [1, 0]),
}


@everywhere
@pytest.mark.parametrize("given", ["shards", "host arrays", "views of a tensor"])
@pytest.mark.parametrize("what", KEPT)
@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")
def test_a_kept_array_can_change_its_shape_after_the_map(what: str, given: str, backend: str) -> None:
    kept = []

    def f(a: Any) -> Any:
        result = KEPT[what](a)
        kept.append(result)
        return {"": result} if given == "host arrays" else result

    value, devices = array((6, 4), "float64", 5), row(backend, 2)
    x = st.device_put(value, devices[1])
    parts = {
        "shards": st.shard(value, devices=devices),
        "host arrays": [value[:3], value[3:]],
        "views of a tensor": [x[:3], x[3:]],
    }[given]
    results = leaves(st.pmap(f, parts, axis_name="i", devices=devices if given == "host arrays" else None))
    before = [np.array(values_of(r)) for r in results]
    for one in {id(one): one for one in kept}.values():
        if hasattr(one, "unsqueeze_"):
            one.unsqueeze_(0)
        else:
            one.shape = (1, *one.shape)
    for result, wanted in zip(results, before, strict=True):
        assert result.shape == wanted.shape
        assert_same(result, wanted)
        assert_same(result + 0, wanted)


# -- static arguments and keywords -----------------------------------------------------------------


@pytest.mark.parametrize("numbers", [(1, 3), [1, -2], (-4, 3), (3, 1, 1)])
def test_static_arguments_are_passed_unchanged(numbers: Any, backend: str) -> None:
    a_list, an_array = [1, 2, 3], np.arange(7)

    def fn(x: Any, first: Any, y: Any, second: Any, z: Any) -> Any:
        assert first is a_list
        assert second is an_array
        return x + y + z

    x = array((4, 2), "float64", 1)
    made = st.pmap(fn, x, a_list, x, an_array, x, static_argnums=numbers, devices=row(backend))
    assert_same(made, x * 3)


def test_static_arguments_only_and_together_with_lists(backend: str) -> None:
    tensor = st.ones((3,), device=mesh_of((2,), backend))
    static = [7, 8]
    for number in (1, -1, (1,)):
        made = st.pmap(lambda x, s: (x + s[1], s is static), [1, 2, 3], static, static_argnums=number)
        assert made == [(9, True), (10, True), (11, True)]
    made = st.pmap(lambda t, x: t is tensor and x, tensor, [1, 2, 3], static_argnums=0)
    assert made == [1, 2, 3]
    made = st.pmap(lambda f, x: f(x), np.negative, np.arange(3.0), static_argnums=0, in_axes=(None, 0))
    assert_same(made, -np.arange(3.0))
    with st.use_mesh(mesh_of((4,), backend)):
        made = st.pmap(lambda x, s: st.asarray(float(len(s))), np.arange(2.0), [1, 2, 3], static_argnums=1)
    assert made.tolist() == [3.0, 3.0]


def test_keywords_are_split_along_axis_0(backend: str) -> None:
    x, y = array((4, 3), "float64", 1), array((4, 2), "float64", 2)
    mapped = st.pmap(lambda a, *, b, c: a.sum() + b + c["k"], in_axes=1, devices=row(backend, 3))
    made = mapped(x, b=y.T[[0, 1, 0]], c={"k": np.arange(3.0)})
    assert_same(made, x.sum(axis=0)[:, None] + y.T[[0, 1, 0]] + np.arange(3.0)[:, None])
    lists = st.pmap(lambda a, b: a * b)([1, 2], b=[3, 4])
    assert lists == [3, 8]
    with pytest.raises(st.ShapeError, match="3 elements"):
        mapped(x, b=np.zeros((2, 2)), c={"k": np.arange(3.0)})


def test_methods_and_decorators(backend: str) -> None:
    devices = row(backend)

    class Model:
        scale = 3

        @st.pmap
        def plain(self, x: Any) -> Any:
            return x * self.scale

    model = Model()
    assert [m.tolist() for m in model.plain(st.shard(np.arange(4.0), devices=devices))] == [[0.0], [3.0], [6.0], [9.0]]


# -- lists with names ------------------------------------------------------------------------------


@everywhere
def test_more_items_than_devices_are_more_programs(backend: str) -> None:
    places: list[Any] = []

    def fn(x: Any) -> Any:
        places.append(st.current_device())
        return (
            st.psum(x, "i"),
            st.axis_index("i"),
            st.axis_size("i"),
            st.ppermute(x, "i", [(k, (k + 1) % 10) for k in range(10)]),
        )

    items = [np.full(3, float(k)) for k in range(10)]
    made = st.pmap(fn, items, axis_name="i", devices=row(backend))
    assert sorted(d.id for d in places) == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    for k, (total, index, size, before) in enumerate(made):
        assert (index, size) == (k, 10)
        assert_same(total, np.full(3, 45.0))
        assert_same(before, np.full(3, float((k - 1) % 10)))


def test_a_disagreement_names_shards_where_a_device_has_several(backend: str) -> None:
    with pytest.raises(st.CollectiveError) as caught:
        st.pmap(
            lambda x: x if st.axis_index("i") == 3 else st.psum(x, "i"),
            [1, 2, 3, 4],
            axis_name="i",
            devices=row(backend, 2),
        )
    assert f"shard 3 on {backend}:1 returned" in str(caught.value)
    assert f"shard 0 on {backend}:0" in str(caught.value)


@everywhere
def test_lists_of_different_shapes_gather(backend: str) -> None:
    items = [array((n, 2), "float64", n) for n in (3, 0, 1, 4)]
    made = st.pmap(
        lambda x: (st.all_gather(x, "i", tiled=True), x.sum(axis=0)), items, axis_name="i", devices=row(backend)
    )
    for (whole, own), item in zip(made, items, strict=True):
        assert_same(whole, np.concatenate(items))
        assert_same(own, item.sum(axis=0))
    swapped = st.pmap(lambda x: st.ppermute(x, "i", [(0, 3), (3, 0)]), items, axis_name="i", devices=row(backend))
    for m, wanted in zip(swapped, [items[3], items[1] * 0, items[2] * 0, items[0]], strict=True):
        assert_same(m, wanted)
    # The order in which threads reach the call decides which two of the shapes are named.
    shape = r"with x = \S*float64\[\d, 2\]"
    with pytest.raises(st.CollectiveError, match=f"{shape}, and .* {shape}"):
        st.pmap(lambda x: st.psum(x, "i"), items, axis_name="i", devices=row(backend))


@hypothesis.settings(max_examples=drawn(40, fast=8))
@hypothesis.given(data=some.data())
def test_lists_against_numpy(backend: str, data: Any) -> None:
    """The lists have any number of items, with and without devices of their own: sums, maxima, gathers and means are
    compared.
    """
    count = data.draw(some.integers(1, 11))
    sizes = data.draw(some.lists(some.integers(0, 4), min_size=count, max_size=count))
    plain = [array((n, 2), "float64", k) for k, n in enumerate(sizes)]
    devices = st.devices(backend)
    homes = [data.draw(some.one_of(some.none(), some.sampled_from(devices))) for _ in plain]
    items = [p if home is None else st.device_put(p, home) for p, home in zip(plain, homes, strict=True)]
    pinned = data.draw(some.booleans())

    def fn(x: Any) -> Any:
        total = st.psum(st.sum(x, axis=0), "i")
        where = st.current_device()
        return {"sum": total, "all": st.all_gather(x, "i", tiled=True), "place": (where, st.axis_index("i"))}

    with st.use_mesh(mesh_of((8,), backend)):
        made = st.pmap(fn, items, axis_name="i", devices=devices[2:5] if pinned else None)
    whole = np.concatenate(plain)
    for k, m in enumerate(made):
        assert_same(m["sum"], whole.sum(axis=0))
        assert_same(m["all"], whole, exact=True)
        where, index = m["place"]
        assert index == k
        assert m["all"].device == where
        if pinned:
            assert where in devices[2:5]
        elif homes[k]:
            assert where == homes[k]


# -- maps in maps ----------------------------------------------------------------------------------


@everywhere
def test_lists_of_lists(backend: str) -> None:
    d = st.devices(backend)
    grid = [[st.device_put(np.array([10.0 * i + j]), d[3 * i + j]) for j in range(3)] for i in range(2)]

    def inner(x: Any) -> Any:
        assert st.current_device() is not None
        return (
            st.psum(x, "i"),
            st.psum(x, "j"),
            st.psum(x, ("i", "j")),
            st.axis_index(("i", "j")),
            st.axis_index(("j", "i")),
        )

    def outer(items: Any) -> Any:
        assert type(items) is list
        assert all(isinstance(x, st.ShardedTensor) for x in items)
        assert st.current_device() is None
        return st.pmap(inner, items, axis_name="j")

    with st.transfers() as log:
        made = st.pmap(outer, grid, axis_name="i")
    assert {r.operator for r in log if r.bytes} == {"psum"}
    for i in range(2):
        for j in range(3):
            over_i, over_j, over_both, major_i, major_j = made[i][j]
            assert over_i.device == d[3 * i + j]
            assert over_i.tolist() == [10.0 + 2 * j]
            assert over_j.tolist() == [30.0 * i + 3]
            assert over_both.tolist() == [36.0]
            assert (major_i, major_j) == (3 * i + j, 2 * j + i)


def test_ragged_lists_of_lists(backend: str) -> None:
    """Inner maps of different sizes cannot form one grid: each has its own axis."""
    items = [[1.0, 2.0, 3.0], [10.0]]
    made = st.pmap(
        lambda inner: st.pmap(lambda x: (st.psum(x, "j"), st.axis_size("j")), inner, axis_name="j"),
        items,
        axis_name="i",
    )
    assert made == [[(6.0, 3)] * 3, [(10.0, 1)]]


@pytest.mark.parametrize("how", ["mesh", "nested list", "nested array"])
def test_grids_of_devices(how: str, backend: str) -> None:
    value = array((2, 4, 3), "float64", 1)
    devices = st.devices(backend)
    mesh = st.make_mesh((2, 4), ("a", "b"), devices=devices)
    grid: Any = {"mesh": mesh, "nested list": [devices[:4], devices[4:]], "nested array": mesh.devices}[how]

    def outer(rows: Any) -> Any:
        assert isinstance(rows, st.ShardedTensor)
        assert list(rows.sharding.mesh.flat) == devices[4 * st.axis_index("i") :][:4]
        assert st.zeros(()).sharding.mesh == rows.sharding.mesh  # its devices are the default here
        return st.pmap(lambda x: x / st.psum(x, ("i", "j")) + st.psum(x, "i") * st.psum(x, "j"), rows, axis_name="j")

    x = st.device_put(value, st.NamedSharding(mesh, st.P("a", "b")))
    with st.transfers() as log:
        made = st.pmap(outer, x, axis_name="i", devices=grid)
    assert {r.operator for r in log if r.bytes} == {"psum"}
    assert_same(made, value / value.sum(axis=(0, 1)) + value.sum(axis=0) * value.sum(axis=1, keepdims=True))
    assert [made.sharding.mesh.shape[n] for n in made.sharding.spec[0:1]] == [2]
    assert made.sharding.shard_shape(made.shape) == (1, 1, 3)
    assert list(made.sharding.mesh.flat) == devices


@hypothesis.settings(max_examples=drawn(30))
@hypothesis.given(data=some.data())
def test_grids_against_numpy(backend: str, data: Any) -> None:
    n, m = data.draw(some.sampled_from([(1, 1), (2, 3), (4, 2), (2, 4), (8, 1), (1, 5)]))
    mesh = st.make_mesh((n, m), ("a", "b"), devices=st.devices(backend))
    value = array((n, m, 2), "float64", data.draw(some.integers(0, 9)))
    order = data.draw(some.permutations(range(3)))
    outer_in, inner_in = order.index(0), [d for d in order if d != 0].index(1)
    outer_out, inner_out = data.draw(some.integers(-3, 2)), data.draw(some.integers(-2, 1))
    names = data.draw(some.sampled_from(["i", "j", ("i", "j"), ("j", "i")]))

    def body(x: Any) -> Any:
        return x - st.pmax(x, names)

    def outer(rows: Any) -> Any:
        return st.pmap(body, rows, axis_name="j", in_axes=inner_in, out_axes=inner_out)

    x = placed(data, value.transpose(order), backend, mesh)
    made = st.pmap(outer, x, axis_name="i", in_axes=outer_in, out_axes=outer_out, devices=mesh)
    over = {"i": (0,), "j": (1,)}.get(names, (0, 1))  # type: ignore[call-overload]
    answer = value - value.max(axis=over, keepdims=True)
    rows = [np.stack(list(answer[i]), inner_out) for i in range(n)]
    assert_same(made, np.stack(rows, outer_out), exact=True)


@everywhere
def test_three_levels_and_an_unnamed_one_between(backend: str) -> None:
    mesh = mesh_of((2, 2, 2), backend)
    value = array((2, 2, 2, 3), "float64", 1)

    def innermost(x: Any) -> Any:
        with pytest.raises(st.ShardingError, match="bind 'i', 'k'"):
            st.psum(x, "j")
        return st.psum(x, "i") + 10 * st.psum(x, ("k", "i"))

    def middle(rows: Any) -> Any:
        return st.pmap(innermost, rows, axis_name="k")

    def outer(planes: Any) -> Any:
        assert planes.sharding.mesh.axis_sizes == (2, 2)
        return st.pmap(middle, planes, devices=planes.sharding.mesh)  # no name: no collectives along this axis

    made = st.pmap(outer, value, axis_name="i", devices=mesh)
    wanted = value.sum(axis=0, keepdims=True) + 10 * value.sum(axis=(0, 2), keepdims=True)
    assert_same(made, np.broadcast_to(wanted, value.shape))


def test_collectives_of_unnamed_maps_in_a_named_one(backend: str) -> None:
    """Programs of inner maps communicate with those at the same position in the inner maps of the other calls."""
    items = [[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]]
    made = st.pmap(
        lambda inner: st.pmap(lambda x: st.psum(x, "i"), inner), items, axis_name="i", devices=row(backend, 3)
    )
    assert made == [[111.0, 222.0]] * 3
    with pytest.raises(st.CollectiveError, match="no two of these calls match"):
        st.pmap(lambda inner: st.pmap(lambda x: st.psum(x, "i"), inner), [[1.0, 2.0], [10.0]], axis_name="i")


@everywhere
def test_collectives_of_tensors_at_the_outer_level(backend: str) -> None:
    mesh = st.make_mesh((2, 4), ("a", "b"), devices=st.devices(backend))
    value = array((2, 5, 3), "float64", 1)  # five rows over four devices

    def outer(x: Any) -> Any:
        assert isinstance(x, st.ShardedTensor)
        assert x.sharding.shard_shape(x.shape) == (2, 3)
        return {
            "sum": st.psum(x, "i"),
            "mean": st.pmean({"deep": (x,)}, "i")["deep"][0],
            "swap": st.ppermute(x, "i", [(0, 1)]),
            "first": st.pbroadcast(x + 1, "i", 0),
            "count": st.full((), float(st.psum(1, "i"))),
        }

    x = st.device_put(value, st.NamedSharding(mesh, st.P("a", "b")))
    with st.transfers() as log:
        made = st.pmap(outer, x, axis_name="i", devices=mesh)
    assert {(r.operator, r.axis) for r in log if r.bytes} == {
        (w, "i") for w in ("psum", "pmean", "ppermute", "pbroadcast")
    }
    for record in log:
        if record.bytes:  # along the columns of the grid only
            assert abs(record.source.id - record.destination.id) == 4
    assert_same(made["sum"], np.stack([value.sum(axis=0)] * 2))
    assert_same(made["mean"], np.stack([value.mean(axis=0)] * 2))
    assert_same(made["swap"], np.stack([value[0] * 0, value[0]]))
    assert_same(made["first"], np.stack([value[0] + 1] * 2))
    assert made["count"].tolist() == [2.0, 2.0]


def test_tensors_at_the_outer_level_in_lists(backend: str) -> None:
    devices = st.devices(backend)
    homes = [st.make_mesh((2,), ("x",), devices=devices[k : k + 2]) for k in (0, 2, 4)]
    values = [array((3, 2), "float64", k) for k in range(3)]
    items = [st.device_put(v, st.NamedSharding(h, st.P("x"))) for v, h in zip(values, homes, strict=True)]
    made = st.pmap(lambda x: (st.psum(x, "i"), x.sharding), items, axis_name="i")
    for (total, sharding), item in zip(made, items, strict=True):
        assert sharding == item.sharding
        assert total.sharding == item.sharding
        assert_same(total, sum(values))
    with pytest.raises(st.ArgumentTypeError, match="over 2 devices, and its shape would change"):
        st.pmap(lambda x: st.all_gather(x, "i"), items, axis_name="i")
    with pytest.raises(st.ArgumentTypeError, match="this program has 2 devices"):
        st.pmap(lambda x: st.psum(np.zeros(3), "i"), items, axis_name="i")
    with pytest.raises(st.CollectiveError, match="all devices along an axis"):
        st.pmap(lambda x: st.psum(x[:2] if st.axis_index("i") == 1 else x, "i"), items, axis_name="i")


# -- with shard_map and smap -----------------------------------------------------------------------


@everywhere
def test_shard_map_in_pmap(backend: str) -> None:
    mesh = st.make_mesh((2, 4), ("a", "b"), devices=st.devices(backend))
    value = array((2, 5, 3), "float64", 1)

    def outer(x: Any) -> Any:
        inner = st.shard_map(
            lambda block: (block * 2 + st.psum(st.sum(block), ("a", "b")), st.psum(st.sum(block), "b")),
            mesh=mesh,  # the part of it that is here
            in_specs=st.P("b"),
            out_specs=(st.P("b"), st.P()),
        )
        return inner(x)

    made, rows = st.pmap(outer, value, axis_name="a", devices=mesh)
    assert_same(made, value * 2 + value.sum())
    assert_same(rows, value.sum(axis=(1, 2)))


@everywhere
def test_pmap_in_shard_map_over_some_axes(backend: str) -> None:
    mesh = st.make_mesh((2, 4), ("a", "b"), devices=st.devices(backend))
    value = array((6, 4, 2), "float64", 1)

    @st.shard_map(mesh=mesh, in_specs=st.P("a"), out_specs=(st.P("a"), st.P()), axis_names={"a"})
    def outer(block: Any) -> Any:
        assert isinstance(block, st.ShardedTensor)
        assert block.shape == (3, 4, 2)
        columns = st.pmap(lambda x: x - st.pmean(x, ("a", "j")), block, axis_name="j", in_axes=1, out_axes=1)
        return columns, st.psum(st.sum(block), "a")

    made, total = outer(value)
    halves = value.reshape(2, 3, 4, 2)
    assert_same(made, (halves - halves.mean(axis=(0, 2), keepdims=True)).reshape(6, 4, 2))
    assert_same(total, value.sum())


def test_shard_map_on_one_device_inside_of_pmap(backend: str) -> None:
    """The innermost level is one device, over which a mesh can still be made."""
    value = array((3, 4), "float64", 1)

    def fn(x: Any) -> Any:
        here = st.make_mesh((1,), ("z",), devices=[st.current_device()])
        return st.shard_map(lambda v: st.psum(v, ("i", "z")), mesh=here, in_specs=st.P("z"), out_specs=st.P())(x)

    made = st.pmap(fn, value, axis_name="i", devices=row(backend, 3))
    assert_same(made, np.stack([value.sum(axis=0)] * 3))


@everywhere
def test_smap_with_names(backend: str) -> None:
    x, y = array((10, 6), "float64", 1), array((6,), "float64", 2)
    devices = row(backend)
    made = st.smap(lambda x: x / st.psum(x.sum(axis=0), "i"), x, axes=[0], axis_name="i", devices=devices)
    assert_same(made, x / x.sum(axis=0))
    made = st.smap(lambda x: x - st.pmax(st.max(x), ("i",)), x, axes=[-1], axis_name=["i"], devices=devices)
    assert_same(made, x - x.max())
    everything = st.devices(backend)
    assert_same(
        st.smap(
            lambda x, y: st.psum(x @ y, "j"), x, y,
            axes=[(0, 1), (None, 0)], out_axes=(0, None), axis_name=("i", "j"), devices=everything,
        ),
        x @ y,
    )  # fmt: skip
    places = st.smap(
        lambda x: x * 0 + st.axis_index(("i", "j")) + 100 * st.axis_size("i") + 10 * st.axis_size("j"),
        np.zeros((4, 2)), axes=(0, 1), axis_name=("i", "j"), devices=everything,
    )  # fmt: skip
    assert_same(places, np.arange(8.0).reshape(4, 2) + 420)


def test_smap_in_pmap_and_pmap_in_smap(backend: str) -> None:
    mesh = st.make_mesh((2, 4), ("a", "b"), devices=st.devices(backend))
    value = array((2, 6), "float64", 1)
    made = st.pmap(
        lambda x: st.smap(lambda v: v - st.pmin(st.min(v), ("i", "k")), x, axes=[0], axis_name="k"),
        value, axis_name="i", devices=mesh,
    )  # fmt: skip
    assert_same(made, value - value.min())

    def part(v: Any) -> Any:  # one device, several programs
        return st.concat(st.pmap(lambda w: st.psum(w, ("i", "k")), [v[:1], v[1:2]], axis_name="k"))

    made = st.smap(part, np.arange(8.0), axes=[0], axis_name="i", devices=row(backend))
    assert_same(made, np.full(8, 28.0))


def test_names_are_bound_once(backend: str) -> None:
    items = [[1, 2], [3, 4]]
    mesh = st.make_mesh((2, 4), ("i", "b"), devices=st.devices(backend))
    calls: dict[str, Any] = {
        "pmap": lambda inner: st.pmap(lambda x: x, inner, axis_name="i"),
        "smap": lambda inner: st.smap(lambda x: x, np.zeros(4), axes=[0], axis_name="i"),
        "shard_map": lambda inner: st.shard_map(
            lambda x: x, mesh=st.make_mesh((1,), ("i",), devices=[mesh.flat[0]]), in_specs=st.P(), out_specs=st.P()
        )(np.zeros(4)),
    }
    for who, call in calls.items():
        with pytest.raises(st.ShardingError, match=rf"^{who}: .*by a map around this one"):
            st.pmap(call, items, axis_name="i")
    # One after the other, and side by side, it is free.
    assert st.pmap(lambda x: st.psum(x, "i"), [1, 2], axis_name="i") == [3, 3]
    made = st.pmap(lambda inner: st.pmap(lambda x: st.psum(x, "i"), inner, axis_name="i"), items)
    assert made == [[3, 3], [7, 7]]


# -- modes of other libraries ----------------------------------------------------------------------


def _gradients(index: int, modes: list[Any], torch: Any) -> None:
    """Program 0 records no gradients during a collective."""
    if index == 0:
        with torch.no_grad():
            st.psum(1.0, "i")
            modes.append((0, "inside", torch.is_grad_enabled()))
            st.psum(1.0, "i")
            modes.append((0, "inside", torch.is_grad_enabled()))
        modes.append((0, "after", torch.is_grad_enabled()))
        return
    for _ in range(2):
        modes.append((index, "after", torch.is_grad_enabled()))
        st.psum(1.0, "i")
        modes.append((index, "after", torch.is_grad_enabled()))


@pytest.mark.parametrize("helped", [False, True])
def test_a_programs_gradient_mode_is_its_own(helped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(threads, "usable_cores", lambda: 3)
    modes: list[Any] = []

    def fn(x: Any) -> Any:
        index = st.axis_index("i")
        if helped:
            time.sleep(0.005)
        _gradients(index, modes, torch)
        w = x.clone().requires_grad_()
        (st.asarray(w) ** 2).sum().backward()
        return w.grad

    x = st.shard(np.arange(4.0), devices=row("torch"))
    made = st.pmap(fn, x, axis_name="i")
    assert {m for m in modes if m[0] == 0} == {(0, "inside", False), (0, "after", True)}
    assert {m[2] for m in modes if m[0] != 0} == {True}
    assert len(modes) == 3 + 3 * 4
    assert torch.is_grad_enabled()
    assert [m.tolist() for m in made] == [[0.0], [2.0], [4.0], [6.0]]


def test_gradients_of_a_data_parallel_step() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, y, w = rng.normal(size=(10, 3)), rng.normal(size=10), rng.normal(size=3)

    def step(x: Any, y: Any, w: Any) -> Any:
        mine = w.clone().requires_grad_()
        loss = ((x @ mine - y) ** 2).sum()
        loss.backward()
        with torch.no_grad():
            return mine - 0.1 * st.psum(mine.grad, "i") / st.psum(x.shape[0], "i")

    made = st.pmap(step, st.shard(x, devices=row("torch")), st.shard(y, devices=row("torch")), w, axis_name="i")
    for m in made:
        assert_same(m, w - 0.1 * 2 * x.T @ (x @ w - y) / 10)


def test_more_slices_than_devices_name_the_call_for_more_devices() -> None:
    """The advice holds if the default mesh has all devices, and is not one that the program chose."""
    hint = "or call st.set_num_devices(9) at the start of the program"
    with pytest.raises(st.ShardingError) as caught:
        st.pmap(np.sin, np.ones((9, 2)))
    assert hint in str(caught.value)
    with st.use_mesh(mesh_of((4,), "numpy")), pytest.raises(st.ShardingError) as caught:
        st.pmap(np.sin, np.ones((9, 2)))
    assert hint not in str(caught.value)


def test_results_that_a_backend_exports_without_a_view_are_freed() -> None:
    array = np.zeros(3)
    reference = weakref.ref(array)
    assert array_communicator._exported(array, array) is array
    del array
    assert reference() is None


@everywhere
def test_stacked_results_that_are_held_elsewhere(backend: str) -> None:
    """What a call returns gets its new axis as a view; a write to the stack, or to a tensor in it, copies first."""
    devices = row(backend)
    kept = st.device_put(np.arange(3.0), devices[0])
    stacked = st.pmap(lambda x: kept, np.ones(1), devices=devices[:1])
    kept += 1
    assert_same(stacked, np.arange(3.0)[None])
    stacked += 5
    assert_same(kept, np.arange(3.0) + 1)
    made = st.pmap(lambda x: x * 2, np.arange(4.0), devices=devices, out_axes=0)
    parts = st.pmap(lambda x: x, made, devices=devices)
    parts += 1
    assert_same(made, np.arange(4.0) * 2)
    assert_same(parts, np.arange(4.0) * 2 + 1)
