"""Pytrees of arrays that are placed by one sharding, a prefix tree of shardings, or a tree of them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import shardtensor as st
from shardtensor.tensor.pytree import leaves, replaced
from tests.interpreters.jit.eager import check_under_jit
from tests.layouts import everywhere, mesh_of

Place = Callable[..., Any]

PLACERS: dict[str, Place] = {
    "device_put": st.device_put,
    "reshard": st.reshard,
    "with_sharding_constraint": st.with_sharding_constraint,
}


class Pair(NamedTuple):
    w: Any
    b: Any


@dataclasses.dataclass
class Layer:
    w: Any
    b: Any


st.register_pytree_node(Layer, lambda layer: ((layer.w, layer.b), None), lambda _, children: Layer(*children))

W, B = np.arange(24.0).reshape(6, 4), np.arange(4.0)


def sharding(mesh: st.Mesh, *spec: Any) -> st.NamedSharding:
    return st.NamedSharding(mesh, st.P(*spec))


def trees_of(mesh: st.Mesh) -> dict[str, tuple[Any, Any, list[Any]]]:
    """Pytrees with shardings for them, and those that their leaves get; None for a leaf that is None."""
    rows, columns, whole = sharding(mesh, "x"), sharding(mesh, None, "y"), sharding(mesh)
    return {
        "one for all": ({"w": W, "b": (B, None)}, rows, [rows, None, rows]),
        "a device": ({"w": W, "b": B}, mesh.flat[1], [st.SingleDeviceSharding(mesh.flat[1])] * 2),
        "a prefix": ({"w": [W, W], "b": B}, {"w": columns, "b": whole}, [whole, columns, columns]),
        "a tree": ({"w": [W, None], "b": B}, {"b": rows, "w": [columns, None]}, [rows, columns, None]),
        "a named tuple": (Pair(W, B), Pair(columns, whole), [columns, whole]),
        "a registered class": (Layer([W], B), Layer(columns, rows), [columns, rows]),
        "an OrderedDict": (OrderedDict(w=W, b=B), OrderedDict(b=rows, w=columns), [columns, rows]),
        "a tuple by a list": ((W, [B, B]), [columns, rows], [columns, rows, rows]),
        "nothing": ({"a": [None], "b": ()}, rows, [None]),
        "an integer": ({"n": 3}, whole, [whole]),
    }


@everywhere
@pytest.mark.parametrize("name", trees_of(mesh_of((2, 2), "numpy")))
def test_trees_are_placed_by_prefix_trees(name: str, backend: str) -> None:
    tree, wanted, where = trees_of(mesh_of((2, 2), backend))[name]
    on_mesh = st.device_put(tree, mesh_of((4,), backend))
    assert [None if x is None else x.sharding.mesh.size for x in leaves(on_mesh)] == [s and 4 for s in where]
    for place in PLACERS.values():
        for given in (tree, on_mesh):
            found = place(given, wanted)
            assert type(found) is type(tree)
            assert [x if x is None else x.sharding for x in leaves(found)] == where
            assert all(x is None or x.committed for x in leaves(found))
            for x, value in zip(leaves(found), leaves(tree), strict=True):
                assert (x is None and value is None) or np.array_equal(x, value)
    if all(s is not None for s in where):
        check_under_jit(lambda given: st.with_sharding_constraint(given, wanted), on_mesh, executor="numpy")
        assert [x.sharding for x in leaves(st.jit(lambda t: t, out_shardings=wanted)(on_mesh))] == where


@everywhere
def test_arrays_without_a_sharding(backend: str) -> None:
    """None in a tree of shardings means what it means for one array, and nothing where there is no default."""
    mesh = mesh_of((2, 2), backend)
    rows, x = sharding(mesh, "x"), st.device_put(W, sharding(mesh, None, "y"))
    put = st.device_put({"host": B, "tensor": x, "w": W}, {"host": None, "tensor": None, "w": rows})
    assert put["tensor"] is x
    assert not put["host"].committed
    assert put["w"].sharding == rows
    kept = st.reshard([B, x, W], [None, None, rows])
    assert kept[0] is B
    assert kept[1] is x
    assert kept[2].sharding == rows
    with st.set_mesh(mesh):
        assert st.device_put([B, W], [st.P("y"), st.P()])[0].sharding == sharding(mesh, "y")


@everywhere
def test_trees_in_transformations(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    wanted, tree = {"w": sharding(mesh, "x", "y"), "b": sharding(mesh)}, {"w": W, "b": B}
    shapes = st.eval_shape(lambda t: st.device_put(t, wanted), st.device_put(tree, mesh))
    assert shapes["w"].sharding == wanted["w"]
    whole = st.device_put(tree, sharding(mesh))
    with st.transfers() as log:
        st.reshard(whole, wanted)
    assert log.bytes == 0  # Each device has its shard already.
    found = st.pmap(lambda part: st.device_put({"p": part}, mesh.flat[0])["p"], st.shard(B, devices=mesh))
    assert [x.device for x in found] == [mesh.flat[0]] * 4


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(st.ShardTensorError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("name", PLACERS)
def test_errors_name_the_path(name: str, backend: str) -> None:
    place, mesh = PLACERS[name], mesh_of((2, 2), backend)
    rows, both = sharding(mesh, "x"), sharding(mesh, "x", "y")
    x = st.device_put(W, mesh)
    what = "device" if name == "device_put" else "sharding"
    assert raised(lambda: place({"w": [x, B]}, {"w": [both, both]})).startswith(
        f"ShardingError: {name}: x['w'][1]: P('x', 'y') has 2 dimensions and the array has 1"
    )
    assert raised(lambda: place({"w": x, "b": B}, {"w": rows, "b": "gpu"})).startswith(
        f"ArgumentTypeError: {name}: x['b']: 'gpu' is a str; wanted a Device"
    )
    assert raised(lambda: place(Pair(x, "text"), rows)).startswith(f"ArgumentTypeError: {name}: x.b: 'text' is a str")
    assert raised(lambda: place({"w": x, "b": B}, {"w": rows})) == (
        f"ArgumentError: {name}: {what} has the entries ['w'], and x has ['b'], ['w']; wanted one for each, or one "
        "for all"
    )
    assert raised(lambda: place({"w": x}, {"w": [rows]})) == (
        f"ArgumentError: {name}: {what}['w'] is a list of 1, and x['w'] is a leaf"
    )
    assert raised(lambda: place(x, {"w": rows})).startswith(f"ArgumentTypeError: {name}: {{'w': NamedSharding")
    assert raised(lambda: place(None, rows)).startswith(f"ArgumentTypeError: {name}: None is not an array")
    assert raised(lambda: st.jit(lambda t: t, out_shardings={"b": both})({"b": st.ones(4)})).startswith(
        "ShardingError: jit: the result['b']: out_shardings: P('x', 'y') has 2 dimensions"
    )
    assert raised(lambda: st.jit(lambda a, b: a, in_shardings=(None,))(B, B)) == (
        "ArgumentError: jit: in_shardings has the entries [0], and args has [0], [1]; wanted one for each, or one for "
        "all"
    )
    assert raised(lambda: st.jit(lambda t: t, in_shardings=both)(B)).startswith("ShardingError: jit: args[0]: in_sh")


@everywhere
@pytest.mark.parametrize("place", [st.device_put, st.reshard])
def test_donated_trees(place: Place, backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    rows, both = sharding(mesh, "x"), sharding(mesh, "x", "y")

    def fresh() -> dict[str, Any]:
        return {"w": st.device_put(W, mesh), "b": st.device_put(B, mesh)}

    tree = fresh()
    raised(lambda: place(tree, {"w": rows, "b": both}, donate=True))
    raised(lambda: place({**tree, "text": "a"}, rows, donate=True))
    raised(lambda: place({**tree, "host": W}, rows, donate=True))
    raised(lambda: place(tree, rows, donate=True, may_alias=True))
    assert "x['tied'] is the same tensor as x['b']" in raised(
        lambda: place({**tree, "tied": tree["b"]}, rows, donate=True)
    )
    assert not any(x.is_donated for x in tree.values())  # An error donates nothing.
    found = place(tree, rows, donate=True)
    assert all(x.is_donated for x in tree.values())
    assert np.array_equal(found["w"], W)
    assert "donated" in raised(lambda: place({"a": fresh()["w"], **tree}, rows, donate=True))
    kept = fresh()
    copies = place(kept, {"w": kept["w"].sharding, "b": kept["b"].sharding}, may_alias=False)
    copies["w"][...] = 0
    assert np.array_equal(kept["w"], W)


@everywhere
@pytest.mark.parametrize("place", [st.device_put, st.reshard])
def test_donation_of_a_tensor_and_a_view_of_it(place: Place, backend: str) -> None:
    x, where = st.device_put(W, mesh_of((2, 2), backend)), mesh_of((4,), backend)
    for tree in ([x, x.reshape(-1)], [x.T, x], {"a": {"b": x[1:]}, "c": (x[1:][1:], x)}):
        message = raised(lambda tree=tree: place(tree, where, donate=True))
        assert message.startswith(f"ArgumentError: {place.__name__}: donate=True"), message
        assert "is a view of x[" in message
        np.testing.assert_array_equal(x, W)  # The error donated nothing.
    first, second = place([x[:2], x[1:]], where, donate=True)  # Views leave the memory to their base.
    np.testing.assert_array_equal(first, W[:2])
    np.testing.assert_array_equal(second, W[1:])
    np.testing.assert_array_equal(x, W)


def test_host_local_arrays_are_placed_by_prefix_trees() -> None:
    mesh = mesh_of((2, 2), "numpy")
    tree, specs = {"w": [W, W], "b": B}, {"w": st.P("x"), "b": st.P()}
    found = st.distributed.host_local_array_to_global_array(tree, mesh, specs)
    assert [x.sharding.spec for x in leaves(found)] == [st.P(), st.P("x"), st.P("x")]
    back = st.distributed.global_array_to_host_local_array(found, mesh, specs)
    assert all(np.array_equal(x, y) for x, y in zip(leaves(back), leaves(tree), strict=True))
    assert replaced(back, leaves(tree)) == tree
    assert raised(lambda: st.distributed.global_array_to_host_local_array(found, mesh, {"w": st.P()})).startswith(
        "ArgumentError: global_array_to_host_local_array: pspecs has the entries ['w'], and global_inputs has"
    )


@everywhere
def test_parts_in_a_tree(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    rows, whole = sharding(mesh, "x"), sharding(mesh)
    batch = {"w": (W, [B]), "n": np.float64(3)}
    found = st.make_array_from_process_local_data({"w": rows, "n": whole}, batch, {"w": None, "n": ()})
    assert [x.sharding for x in leaves(found)] == [whole, rows, rows]
    for x, part in zip(leaves(found), leaves(batch), strict=True):
        np.testing.assert_array_equal(x, part)
    with st.set_mesh(mesh):
        found = st.make_array_from_process_local_data(st.P("x"), [W, W], W.shape)
        assert [x.sharding for x in found] == [rows, rows]
        assert st.make_array_from_process_local_data(st.P("x"), [[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
        x = st.make_array_from_callback(W.shape, st.P("x"), lambda index: W[index], "float32")
        assert (x.sharding, x.dtype) == (rows, "float32")
        parts = [shard.data for shard in st.device_put(W, whole).addressable_shards]
        own = [st.device_put(part, device) for part, device in zip(parts, mesh.flat, strict=True)]
        x = st.make_array_from_single_device_arrays(W.shape, st.P(), own, dtype=W.dtype)
        np.testing.assert_array_equal(x, W)
        message = raised(lambda: st.make_array_from_single_device_arrays(W.shape, st.P(), own, dtype="float32"))
        assert message.endswith("and float32")
    message = raised(lambda: st.make_array_from_process_local_data({"a": rows}, {"a": W, "b": B}))
    assert message.startswith("ArgumentError: make_array_from_process_local_data: sharding has the entries ['a'], and")
    message = raised(lambda: st.make_array_from_process_local_data(rows, {"a": W}, {"a": (1, 2, 3)}))
    assert message.startswith(
        "ShapeError: make_array_from_process_local_data: local_data['a']: local_data has 2 dimens"
    )
