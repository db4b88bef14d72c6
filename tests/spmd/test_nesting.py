"""Maps in maps: the devices that each call owns, and the transfers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.tensor.pytree import leaves
from tests.layouts import array, assert_same, everywhere, values_of


@pytest.fixture
def devices(backend: str) -> Iterator[list[st.Device]]:
    """Eight devices, which are the default mesh."""
    with st.use_mesh(st.Mesh(st.devices(backend), ("d",))):
        yield st.devices(backend)


def default(devices: Sequence[st.Device]) -> Any:
    """Makes these devices the default mesh."""
    return st.use_mesh(st.Mesh(devices, ("d",)))


def places(x: Any) -> Any:
    """The numbers of the devices of each tensor in nested lists and tuples."""
    if isinstance(x, (list, tuple)):
        return [places(item) for item in x]
    return [device.id for device in x.sharding.mesh.flat]


def moved(log: Any) -> int:
    """Bytes that went from one device to another one; host arrays that are put on devices do not count."""
    return sum(record.bytes for record in log if record.source.backend == record.destination.backend)


def double(x: Any) -> Any:
    return x * 2


def nested(fn: Callable[..., Any], names: str, direct: bool, **kwargs: Any) -> Callable[..., Any]:
    """Maps in maps along these axis names, the outermost first: of one another, or of functions that call them."""
    for depth, name in enumerate(reversed(names)):
        inner = fn
        body = inner if direct or not depth else lambda *args, inner=inner: inner(*args)
        fn = st.pmap(body, axis_name=name, **kwargs)
    return fn


direct_or_not = pytest.mark.parametrize("direct", [True, False], ids=["direct", "in a function"])


# -- calls that own one device ---------------------------------------------------------------------


@everywhere
@direct_or_not
@pytest.mark.parametrize("placed", [False, True], ids=["host arrays", "tensors"])
def test_lists_in_lists_run_where_the_outer_calls_run(devices: Any, direct: bool, placed: bool) -> None:
    values = [array((2,), "float64", k) for k in range(3)]
    items = [[st.device_put(v, d)] if placed else [v] for v, d in zip(values, devices, strict=False)]
    with default(devices[:3]), st.transfers() as log:
        made = nested(double, "ij", direct)(items)
    assert places(made) == [[[0]], [[1]], [[2]]]
    assert moved(log) == 0
    for (x,), value in zip(made, values, strict=True):
        assert_same(x, value * 2)


@everywhere
@direct_or_not
def test_a_grid_with_an_axis_of_one_device(devices: Any, direct: bool) -> None:
    grid = st.make_mesh((3, 1), ("a", "b"), devices=devices[2:])
    value = array((3, 1, 2), "float64", 1)
    x = st.device_put(value, st.NamedSharding(grid, st.P("a", "b")))
    seen: list[Any] = []

    def body(v: Any) -> Any:
        seen.append((st.axis_index(("i", "j")), st.current_device()))
        return v * 2

    inner = st.pmap(body, axis_name="j")
    with st.transfers() as log:
        made = st.pmap(inner if direct else lambda v: inner(v), x, axis_name="i", devices=grid)
    assert sorted(seen) == [(k, devices[2 + k]) for k in range(3)]
    assert places(made) == [2, 3, 4]
    assert moved(log) == 0
    assert_same(made, value * 2)


INSIDE: dict[str, Callable[[Any], Any]] = {
    "pmap of a list": lambda x: st.pmap(double, [x[:1], np.ones(2), 3.0 * np.ones(())]),
    "pmap of an array": lambda x: st.pmap(double, x[:1]),
    "pmap of a host array": lambda x: st.pmap(double, np.ones((1, 3))),
    "smap": lambda x: st.smap(double, x, axes=[0]),
    "smap of a host array": lambda x: st.smap(double, np.ones((6, 4)), axes=[(0, 1)]),
    "shard": lambda x: st.shard(x),
    "shard of a host array": lambda x: st.shard(np.ones(4)),
    "shard_map": lambda x: st.shard_map(double, in_specs=st.P("d"), out_specs=st.P("d"))(x),
    "device_put": lambda x: st.device_put({"x": x, "host": np.ones(4)})["host"],
    "to_batched_list": lambda x: st.to_batched_list(np.ones(5), 2),
    "maps in maps": lambda x: st.pmap(st.pmap(double), [[x], [x, x]]),
    "use_mesh": lambda x: _with_default_mesh(),
}


def _with_default_mesh() -> Any:
    with st.use_mesh(st.make_mesh((1, 1), ("a", "b"), devices=[st.current_device()])):
        return st.device_put(np.ones(4))


@everywhere
@pytest.mark.parametrize("what", INSIDE)
@pytest.mark.parametrize("outer", ["list", "array", "smap", "shard_map"])
def test_arrays_created_on_one_device_stay_there(devices: Any, outer: str, what: str) -> None:
    seen: dict[st.Device | None, Any] = {}

    def body(x: Any) -> Any:
        seen[st.current_device()] = places(INSIDE[what](x))
        return x

    value, row = array((3, 2), "float64", 1), devices[4:7]
    with st.transfers() as log:
        if outer == "list":
            st.pmap(body, st.shard(value, devices=row))
        elif outer == "array":
            st.pmap(body, value, devices=row)
        elif outer == "smap":
            st.smap(body, value, axes=[0], devices=row)
        else:
            mesh = st.Mesh(row, ("z",))
            st.shard_map(body, mesh=mesh, in_specs=st.P("z"), out_specs=st.P("z"))(value)
    assert set(seen) == set(row)
    for device, there in seen.items():
        assert device is not None
        assert set(leaves(there)) == {device.id}
    assert moved(log) == 0


@everywhere
def test_created_arrays_are_the_devices_own(devices: Any) -> None:
    """Creation functions in a call return the backend's arrays, which are transferred to no other device when they are
    mapped.
    """

    def body(k: int) -> Any:
        made = [
            st.zeros((1, 2)),
            st.asarray([[1.0, 2.0]]),
            st.full((1, 2), k),
            st.eye(1, 2),
            st.ones_like(np.ones((1, 2))),
        ]
        return [st.pmap(double, x) for x in made], st.stack(made)

    with st.transfers() as log:
        made = st.pmap(body, [1, 2, 3], devices=devices[5:])
    assert places(made) == [[[[k]] * 5, [k]] for k in (5, 6, 7)]
    assert moved(log) == 0


@everywhere
def test_arrays_created_in_a_call_follow_placed_tensors(devices: Any) -> None:
    """An array that was created in a call was not placed, whichever library made it."""
    w = st.device_put(np.arange(2.0), devices[6])
    seen: list[Any] = []
    st.pmap(lambda x: seen.append(places(st.add(x, w))), [np.ones((50, 2))] * 2)
    assert seen == [[6], [6]]


# -- calls that own several ------------------------------------------------------------------------


@everywhere
@direct_or_not
def test_a_grid_of_data_takes_as_many_devices(devices: Any, direct: bool) -> None:
    value = array((2, 4), "float64", 1)

    def body(v: Any) -> Any:
        return v / st.psum(v, ("i", "j")) + st.axis_index("j") + 10 * st.axis_size("i")

    made = nested(body, "ij", direct)(value)
    assert_same(made, value / value.sum() + np.arange(4) + 20)
    assert made.sharding.spec == st.P("i", "j")
    assert sorted(places(made)) == list(range(8))
    assert made.sharding.shard_shape(made.shape) == (1, 1)
    rows = made.sharding.mesh.devices
    assert rows.shape == (2, 4)
    assert [d.id for d in rows[:, 0]] == ([0, 4] if direct else [0, 1])  # calls of functions begin on the first devices


@everywhere
@pytest.mark.parametrize("axes", list(itertools.permutations(range(3), 2)))
def test_nested_maps_of_matching_layouts_move_nothing(devices: Any, axes: tuple[int, int]) -> None:
    value = np.moveaxis(array((2, 4, 3), "float64", 1), (0, 1), axes)
    spec: list[str | None] = [None] * 3
    spec[axes[0]], spec[axes[1]] = "x", "y"
    mesh = st.make_mesh((2, 4), ("x", "y"), devices=devices)
    x = st.device_put(value, st.NamedSharding(mesh, st.P(*spec)))
    inside = axes[1] - (axes[1] > axes[0])
    mapped = st.pmap(st.pmap(double, in_axes=inside, out_axes=inside), in_axes=axes[0], out_axes=axes[0])
    with st.transfers() as log, st.transfer_guard("disallow"):
        made = mapped(mapped(x))
    assert log.bytes == 0
    assert_same(made, value * 4)
    assert made.sharding.mesh.flat == mesh.flat
    assert made.sharding.shard_shape(made.shape) == x.sharding.shard_shape(x.shape)


@everywhere
def test_devices_are_in_the_order_of_the_data(devices: Any) -> None:
    value = array((2, 4), "float64", 1)
    mesh = st.make_mesh((4, 2), ("x", "y"), devices=devices)
    x = st.device_put(value, st.NamedSharding(mesh, st.P("y", "x")))
    flat = st.device_put(value.ravel(), st.NamedSharding(mesh, st.P(("y", "x"))))
    with st.transfers() as log:
        made, one = st.pmap(st.pmap(double))(x), st.pmap(double)(flat)
    assert log.bytes == 0
    assert places(made) == places(one) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert_same(made, value * 2)
    assert_same(one, value.ravel() * 2)


@everywhere
@direct_or_not
def test_three_levels(devices: Any, direct: bool) -> None:
    value = array((2, 2, 2, 3), "float64", 1)
    made = nested(lambda v: st.psum(v, "i") + 10 * st.psum(v, ("k", "i")) + 0 * v, "ijk", direct)(value)
    wanted = value.sum(axis=0, keepdims=True) + 10 * value.sum(axis=(0, 2), keepdims=True)
    assert_same(made, np.broadcast_to(wanted, value.shape))
    assert made.sharding.spec == st.P("i", "j", "k")
    assert sorted(places(made)) == list(range(8))


@everywhere
def test_levels_of_pytrees_and_of_whole_arguments(devices: Any) -> None:
    x, w = array((2, 3, 2), "float64", 1), array((3,), "float64", 2)
    tree = {"x": x, "scale": np.arange(2.0)}
    inner = st.pmap(lambda t, w, n, *, b: (t["x"] * t["scale"] * w * n + b, st.psum(w, "j")), axis_name="j",
                    in_axes=({"x": 0, "scale": None}, 0, None), static_argnums=2, out_axes=(0, None))  # fmt: skip
    outer = st.pmap(inner, axis_name="i", in_axes=(0, None, None), static_argnums=2)
    made, total = outer(tree, w, 2, b=array((2, 3), "float64", 3))
    wanted = x * np.arange(2.0)[:, None, None] * w[:, None] * 2 + array((2, 3), "float64", 3)[..., None]
    assert_same(made, wanted)
    assert_same(total, [w.sum()] * 2)
    assert places(made) == list(range(6))


LISTS = [
    # How many items each inner list has, on how many devices; where they run; where they do so inside of functions.
    ([4, 4], 8, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ([1, 3], 4, [[0], [1, 2, 3]], [[0], [1, 1, 3]]),
    ([1, 3], 3, [[0], [0, 1, 2]], [[0], [1, 1, 1]]),
    ([2, 0, 1], 4, [[0, 1], [], [2]], [[0, 3], [], [2]]),
    ([4, 4], 2, [[0] * 4, [1] * 4], [[0] * 4, [1] * 4]),
    ([1, 1, 1], 2, [[0], [0], [1]], [[0], [0], [1]]),
    ([3, 2], 1, [[0] * 3, [0] * 2], [[0] * 3, [0] * 2]),
]


@everywhere
@direct_or_not
@pytest.mark.parametrize(("lengths", "count", "whole", "parts"), LISTS)
def test_lists_of_lists(devices: Any, lengths: list[int], count: int, whole: Any, parts: Any, direct: bool) -> None:
    items = [[np.full(2, 10.0 * k + j) for j in range(n)] for k, n in enumerate(lengths)]
    with default(devices[:count]), st.transfers() as log:
        made = nested(double, "ij", direct)(items)
    assert [[device for (device,) in places(inner)] for inner in made] == (whole if direct else parts)
    for inner, given in zip(made, items, strict=True):
        for x, value in zip(inner, given, strict=True):
            assert_same(x, value * 2)
    if direct:
        assert moved(log) == 0


@everywhere
def test_a_list_of_arrays_and_an_array_of_calls_that_map_lists(devices: Any) -> None:
    values = [array((n, 2), "float64", n) for n in (1, 4, 2)]
    with st.transfers() as log:
        made = st.pmap(st.pmap(double), values)
    assert places(made) == [[0], [1, 2, 3, 4], [5, 6]]
    assert moved(log) == 0
    for x, value in zip(made, values, strict=True):
        assert_same(x, value * 2)
    value = array((2, 6), "float64", 1)
    sums = st.pmap(lambda x: st.stack(st.pmap(lambda v: st.sum(v), [x[:3], x[3:4], x[4:]])), value)
    assert_same(sums, np.stack([value[:, :3].sum(1), value[:, 3], value[:, 4:].sum(1)], 1))
    assert sorted(places(sums)) == [0, 1, 2, 3, 4, 5]


@everywhere
def test_smap_and_shard_use_the_devices_of_the_call(devices: Any) -> None:
    value = array((2, 8), "float64", 1)
    made = st.pmap(lambda x: st.smap(double, x, axes=[0]), value)
    assert_same(made, value * 2)
    assert places(made) == [0, 2, 4, 6, 1, 3, 5, 7]
    parts = st.pmap(lambda x: [st.shard(x)], [value[0], value[1], value[0]])
    assert places(parts) == [[[[0], [3], [6]]], [[[1], [4], [7]]], [[[2], [5]]]]
    seen: list[Any] = []
    rows = st.smap(lambda x: (seen.append(places(st.device_put(x))), x)[1], value, axes=[0])
    assert sorted(seen) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert places(rows) == [0, 1]


@everywhere
def test_pmap_in_smap_and_in_shard_map(devices: Any) -> None:
    value = array((2, 4), "float64", 1)
    made = st.smap(lambda x: st.pmap(lambda v: v - st.psum(v, ("i", "j")), x, axis_name="j", in_axes=1, out_axes=1),
                   value, axes=[0], axis_name="i")  # fmt: skip
    assert_same(made, value - value.sum())
    mesh = st.make_mesh((2, 4), ("x", "y"), devices=devices)
    x = st.device_put(value, st.NamedSharding(mesh, st.P("x", "y")))

    @st.shard_map(mesh=mesh, in_specs=st.P("x", "y"), out_specs=st.P("x", "y"))
    def single(block: Any) -> Any:
        return st.pmap(lambda v: v - st.pmax(v, ("x", "y")), block)

    @st.shard_map(mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"), axis_names={"x"})
    def rows(block: Any) -> Any:
        return st.pmap(double, block, in_axes=1, out_axes=1)

    with st.transfers() as log:
        assert_same(single(x), value - value.max())
    assert {r.operator for r in log if r.bytes and r.source.backend == r.destination.backend} == {"pmax"}
    with st.transfers() as log:
        assert_same(rows(x), value * 2)
    assert moved(log) == 0


@everywhere
def test_plain_maps_take_the_first_devices(devices: Any) -> None:
    """The division of the other devices over the calls has no effect on functions without inner maps."""
    value = array((3, 2), "float64", 1)
    made = st.pmap(
        lambda x: (x + st.zeros(2), st.psum(x, "i"), st.current_device().id), value, axis_name="i", out_axes=0
    )
    assert places(made[0]) == places(made[1]) == [0, 1, 2]
    assert made[2].tolist() == [0, 1, 2]
    assert places(st.pmap(double, [value, value])) == [[0], [1]]


# -- too few ---------------------------------------------------------------------------------------


def test_more_slices_than_devices(devices: Any, backend: str) -> None:
    value = np.zeros((3, 4))
    with pytest.raises(st.ShardingError, match=r"^pmap: 3 x 4 slices for 8 devices; one device takes one slice"):
        st.pmap(st.pmap(double), value)
    mine = (
        f"pmap: 4 slices for the 3 devices that the call around this map owns ({backend}:0, {backend}:3, {backend}:6)"
    )
    with pytest.raises(st.ShardingError) as caught:
        st.pmap(lambda x: st.pmap(double, x), value)
    assert str(caught.value).startswith(mine)
    parts = st.shard(np.zeros((3, 4)), devices=devices[:3])
    with pytest.raises(st.ShardingError, match="4 slices for the 1 device that"):
        st.pmap(lambda x: st.pmap(double, x, in_axes=1), parts)


def test_scalars_that_are_mapped_name_the_in_axes_that_pass_them() -> None:
    for given, in_axes in [((np.ones(4), 2), (0, None)), ((2, np.ones(4), 3), (None, 0, 0))]:
        with pytest.raises(st.AxisError, match=re.escape(f"in_axes={in_axes} passes it whole")):
            st.pmap(lambda *x: sum(x))(*given)
    assert st.pmap(np.add, in_axes=(0, None))(np.ones(4), 2).tolist() == [3.0] * 4
    with pytest.raises(st.AxisError, match=r"argument 0\['a'\]: axis 0 .*; None for it in in_axes passes it whole"):
        st.pmap(lambda x: x["b"], {"a": 2, "b": np.ones(4)})
    with pytest.raises(st.AxisError, match="wanted an array or a list to map over"):
        st.pmap(np.sin)(3)


def test_a_mapped_function_is_printed_with_its_name() -> None:
    assert repr(st.pmap(test_errors_of_a_map_of_a_map_say_so)) == "<pmap of test_errors_of_a_map_of_a_map_say_so>"
    assert repr(st.pmap(st.pmap(np.add))) == "<pmap of <pmap of add>>"


def test_errors_of_a_map_of_a_map_say_so(devices: Any) -> None:
    with pytest.raises(st.AxisError, match="axis 0 is out of range for an array without dimensions") as caught:
        st.pmap(st.pmap(double), np.ones(4))
    assert "raised for a map of a map" in caught.value.__notes__[0]
    with pytest.raises(st.ShapeError, match="lists of 2 and of 1 shard") as caught:
        st.pmap(st.pmap(np.add), [[1, 2], [3, 4]], [[1, 2], [3]])
    assert "raised for a map of a map" in caught.value.__notes__[0]
    with pytest.raises(st.ShapeError, match=r"of shape \(0,\) along axis 0 has no elements"):
        st.pmap(st.pmap(double), np.ones((4, 0)))
    assert st.pmap(st.pmap(double), []) == []
    assert st.pmap(st.pmap(double), [[], []]) == [[], []]


@everywhere
def test_one_device(devices: Any) -> None:
    with default(devices[5:6]):
        assert places(st.pmap(st.pmap(double), np.ones((1, 1, 2)))) == [5]
        assert places(st.pmap(lambda x: st.pmap(double, x), np.ones((1, 1, 2)))) == [5]
        assert places(st.smap(lambda x: st.smap(double, x, axes=[1]), np.ones((2, 2)), axes=[0])) == [5]
        with pytest.raises(st.ShardingError, match="1 x 2 slices for 1 device;"):
            st.pmap(st.pmap(double), np.ones((1, 2)))


def test_results_of_maps_inside_are_values(devices: Any) -> None:
    made = st.pmap(lambda x: st.pmap(double, x), np.ones((2, 4)))
    made[0] = 5.0
    assert values_of(made).tolist() == [[5.0] * 4, [2.0] * 4]
