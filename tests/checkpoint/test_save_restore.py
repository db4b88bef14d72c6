"""Checkpoints of every dtype, layout and kind of leaf: what is restored has the bits of what was saved."""

from __future__ import annotations

import collections
import dataclasses
import gc
import json
import os
import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.backend.small_floats import SMALL_FLOATS
from shardtensor.checkpoint import plans, trees
from shardtensor.checkpoint.pieces import DevicePiece
from shardtensor.checkpoint.plans import plan_save
from shardtensor.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConcretizationError,
)
from shardtensor.files import box_reader, chunk_grids, zarr
from tests.draws import drawn
from tests.layouts import (
    DTYPES,
    USABLE,
    allocated,
    array,
    everywhere,
    in_use,
    mesh_of,
    meshes,
    placed,
    put,
    shapes,
    specs,
    values_of,
)
from tests.scripts import run_script

MORE = ("bool", "complex64", "complex128", "longdouble", "M8[s]", "m8[ms]", *SMALL_FLOATS)


def same_bits(found: Any, wanted: Any) -> None:
    found, wanted = values_of(found), values_of(wanted)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if found.dtype.char in "gG":  # Some of their bytes are padding.
        np.testing.assert_array_equal(found, wanted)
    else:
        assert found.tobytes() == wanted.tobytes()


# -- tensors ---------------------------------------------------------------------------------------


@everywhere
def test_every_dtype_is_restored_on_every_backend(backend: str, tmp_path: Path) -> None:
    rng, tree = np.random.default_rng(0), {}
    for name in dict.fromkeys((*DTYPES, *MORE)):
        dtype = np.dtype(name) if name not in SMALL_FLOATS else np.dtype(getattr(st, name))
        bits = np.frombuffer(rng.bytes(7 * 3 * dtype.itemsize), dtype) if name != "bool" else rng.random(21) < 0.5
        if dtype.char in "gG":
            bits = rng.normal(size=21).astype(dtype)
        try:
            tree[name] = put(bits.reshape(7, 3), backend, (2, 2), st.P("x", "y"))
        except (ArgumentTypeError, TypeError):
            continue  # The backend has no arrays of it.
    assert len(tree) > 10
    st.checkpoint.save(tmp_path / "a", tree)
    other = st.NamedSharding(mesh_of((3,), backend), st.P(None, "x"))
    for like in (None, tree, other):
        found = st.checkpoint.restore(tmp_path / "a", like)
        assert found.keys() == tree.keys()
        for name, x in tree.items():
            same_bits(found[name], x)
            assert found[name].sharding == (other if like is other else x.sharding)
            assert found[name].committed
    st.checkpoint.verify(tmp_path / "a")


@settings(max_examples=drawn(400, fast=40))
@given(data=some.data())
def test_any_layout_is_restored_in_any_other_one(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("any")
    backend, other = data.draw(some.sampled_from(USABLE)), data.draw(some.sampled_from(USABLE))
    shape, dtype = data.draw(shapes()), data.draw(some.sampled_from(["float32", "int64", "bool", "complex64"]))
    value = array(shape, dtype, 0)
    mesh = data.draw(meshes(backend))
    x = placed(data, value, backend, mesh)
    x = np.asarray(x) if isinstance(x, np.generic) else x
    with pytest.MonkeyPatch.context() as patch:
        # Arrays of few elements then have several inner chunks and slabs.
        patch.setattr(chunk_grids, "_LEAST", data.draw(some.sampled_from([8, 64, 4 << 20])))
        patch.setattr(zarr, "_SLAB", data.draw(some.sampled_from([16, 1 << 20])))
        patch.setattr(chunk_grids, "_ROW", 4)
        chunk_grids._planned.cache_clear()
        st.checkpoint.save(folder / "a", {"x": x}, memory=data.draw(some.sampled_from([1, 1 << 20])))
    chunk_grids._planned.cache_clear()
    target = data.draw(meshes(other))
    sharding = st.NamedSharding(target, data.draw(specs(target, len(shape))))
    found = st.checkpoint.restore(folder / "a", {"x": st.ShapeDtypeStruct(shape, dtype, sharding)})["x"]
    same_bits(found, value)
    assert found.sharding == sharding
    for shard in found.addressable_shards:
        same_bits(shard.data, value[shard.index])
    st.checkpoint.verify(folder / "a")


def test_results_of_maps_and_offloaded_and_replicated_tensors_are_saved(backend: str, tmp_path: Path) -> None:
    mesh = mesh_of((4,), backend)
    value = np.arange(30.0).reshape(10, 3)
    parts = st.pmap(lambda x: st.asarray(x, copy=True), st.shard(value, devices=mesh))
    pinned = st.NamedSharding(mesh, st.P("x"), memory_kind="pinned_host")
    tree = {
        "parts": st.unshard(parts),
        "pinned": st.device_put(value, pinned),
        "copies": st.device_put(value, st.NamedSharding(mesh, st.P())),
        "view": put(value, backend)[2:, ::2].T,
        "sum": put(value, backend).sum(),
    }
    st.checkpoint.save(tmp_path / "a", tree)
    found = st.checkpoint.restore(tmp_path / "a")
    for name, x in tree.items():
        same_bits(found[name], x)
    assert found["pinned"].sharding == pinned
    assert st.checkpoint.restore(tmp_path / "a", device=pinned.with_spec(st.P()), only="parts")["parts"].shape == (
        10,
        3,
    )
    found["copies"][0] = 7
    assert found["copies"][0].tolist() == [7, 7, 7]
    assert found["sum"]._is_scalar


def test_restored_tensors_are_written_in_place(tmp_path: Path) -> None:
    st.checkpoint.save(tmp_path / "a", st.zeros(1000))
    x = st.checkpoint.restore(tmp_path / "a")
    place = np.asarray(x).__array_interface__["data"][0]
    x[0] = 1
    assert np.asarray(x).__array_interface__["data"][0] == place
    assert x.tolist() == [1, *[0] * 999]


def test_partial_sums_and_unknown_elements_are_refused(tmp_path: Path) -> None:
    mesh = mesh_of((2,), "numpy")
    partial = st.reshard(st.ones(3), st.NamedSharding(mesh, st.P(unreduced={"x"})))
    with pytest.raises(ArgumentTypeError, match=r"checkpoint.save: tree: a/0: .*unreduced along x.*st.reshard"):
        st.checkpoint.save(tmp_path / "a", {"a": [partial]})
    with pytest.raises(ConcretizationError, match=r"tree: value: the elements"):
        st.eval_shape(lambda x: st.checkpoint.save(tmp_path / "a", x), st.ones(3))
    with pytest.raises(ConcretizationError):
        st.jit(lambda x: st.checkpoint.save(tmp_path / "a", x))(st.ones(3))
    st.checkpoint.save(tmp_path / "b", st.ones(3))
    with pytest.raises(ArgumentTypeError, match="unreduced"):
        st.checkpoint.restore(tmp_path / "b", partial)
    assert os.listdir(tmp_path) == ["b"]


# -- trees -----------------------------------------------------------------------------------------


class Moments(NamedTuple):
    mu: Any
    nu: Any


@dataclasses.dataclass
class State:
    params: Any
    step: int


st.register_pytree_node(State, lambda s: ((s.params, s.step), None), lambda _, c: State(*c))


KEYS = some.one_of(some.text(max_size=6), some.integers(-3, 12), some.sampled_from(
    ["a/b", "..", ".", "", "__x", "zarr.json", "c", "A", "a", "a b", "ä", "x" * 300, "%", "~", "a~2", "1", "NUL\0", "\ud800"]
))  # fmt: skip
LEAVES = some.one_of(
    some.none(), some.booleans(), some.integers(), some.integers(-(10**5000), 10**5000), some.floats(),
    some.complex_numbers(), some.text(max_size=5), some.binary(max_size=5),
    some.sampled_from([st.random.key(3), np.float32(0.1), np.bool_(True), np.datetime64("2026-01-02", "D"), np.int8(-3)]),
    some.integers(0, 5).map(lambda n: np.arange(n, dtype="f4")),
    some.integers(0, 5).map(lambda n: st.arange(n) * 2),
)  # fmt: skip
TREES = some.recursive(
    LEAVES,
    lambda t: some.one_of(
        some.lists(t, max_size=3), some.lists(t, max_size=3).map(tuple), some.dictionaries(KEYS, t, max_size=4),
        some.tuples(t, t).map(lambda p: Moments(*p)), some.tuples(t, some.integers()).map(lambda p: State(*p)),
        some.lists(t, max_size=2).map(collections.deque),
        some.dictionaries(some.text(max_size=2), t, max_size=2).map(collections.OrderedDict),
    ),
    max_leaves=8,
)  # fmt: skip


def plain(tree: Any) -> Any:
    """What a tree is without the classes of its containers."""
    if isinstance(tree, dict):
        return {key: plain(child) for key, child in tree.items()}
    if isinstance(tree, Moments):
        return {"mu": plain(tree.mu), "nu": plain(tree.nu)}
    if isinstance(tree, State):
        return {"params": plain(tree.params), "step": plain(tree.step)}
    if isinstance(tree, (list, collections.deque)):
        return [*map(plain, tree)]
    return tuple(map(plain, tree)) if isinstance(tree, tuple) else tree


def assert_equal_trees(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_equal_trees(found[key], wanted[key])
    elif isinstance(wanted, State):
        assert_equal_trees([found.params, found.step], [wanted.params, wanted.step])
    elif isinstance(wanted, (list, tuple, collections.deque)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_equal_trees(one, other)
    elif isinstance(wanted, (np.ndarray, np.generic, st.ShardedTensor)):
        same_bits(found, wanted)
    elif isinstance(wanted, (float, complex)):
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
    else:
        assert found == wanted


@settings(max_examples=drawn(1000, fast=30))
@given(tree=TREES)
def test_every_leaf_of_a_tree_comes_back(tree: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("tree") / "a"
    st.checkpoint.save(path, tree)
    assert_equal_trees(st.checkpoint.restore(path), plain(tree))
    if tree is not None:  # It stands for the saved layout.
        assert_equal_trees(st.checkpoint.restore(path, tree), tree)
    info = st.checkpoint.inspect(path)
    assert len(info.leaves) == len({name.casefold() for name in info.leaves})
    assert_equal_trees(st.checkpoint.restore(path, info.tree), plain(tree))


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    generators = [
        np.random.Generator(kind(5)) for kind in
        (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
    ]  # fmt: skip
    generators += [np.random.default_rng([1, 2]).spawn(2)[1], np.random.default_rng()]
    legacy, own = np.random.RandomState(3), random.Random(4)
    for g in generators:
        g.integers(0, 9, 3, dtype=np.uint8)
    legacy.normal()
    own.gauss(0, 1)
    st.checkpoint.save(tmp_path / "a", {"g": generators, "r": legacy, "o": own})
    found = st.checkpoint.restore(tmp_path / "a")
    for one, other in zip(found["g"], generators, strict=True):
        assert one.integers(0, 2**60, 9).tolist() == other.integers(0, 2**60, 9).tolist()
        assert one.spawn(1)[0].random() == other.spawn(1)[0].random()
    assert found["r"].normal(size=3).tolist() == legacy.normal(size=3).tolist()
    assert [found["o"].gauss(0, 1), found["o"].random()] == [own.gauss(0, 1), own.random()]


class Number(int):
    pass


REFUSED = {
    "objects": (object(), "it is an object"),
    "subclasses": (Number(3), r"it is a Number.*int\(x\) is one"),
    "unregistered": (dataclasses.make_dataclass("Point", ["x"])(1), "not registered as a pytree"),
    "sets": ({1}, "it is a set"),
    "functions": (len, "it is a"),
    "masked": (np.ma.array([1, 2]), r"a subclass of numpy.ndarray.*np.asarray"),
    "text": (np.array(["a"]), "dtype <U1 cannot be stored"),
    "big endian": (np.array([1], ">i4"), "byte order of other machines"),
    "records": (np.zeros(2, "i4,f4"), "cannot be stored"),
    "python objects": (np.array([None]), "cannot be stored"),
    "meshes": (st.P("x"), "which is not stored"),
}


@pytest.mark.parametrize(("leaf", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_come_back_differently_is_refused(leaf: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^checkpoint.save: tree: a/1: .*{message}"):
        st.checkpoint.save(tmp_path / "a", {"a": [1, leaf]})
    assert os.listdir(tmp_path) == []


@dataclasses.dataclass
class Reversed:
    w: Any
    moments: Any


st.register_pytree_node(Reversed, lambda x: ((x.moments, x.w), None), lambda _, c: Reversed(c[1], c[0]))


class Positive:
    def __init__(self, n: int) -> None:
        self.n = n + 0


st.register_pytree_node(Positive, lambda x: ((x.n,), None), lambda _, c: Positive(*c))


def test_children_are_those_of_their_fields_in_any_order_and_with_equal_values(tmp_path: Path) -> None:
    st.checkpoint.save(tmp_path / "a", Reversed(1, 2))
    for like in (Reversed(0, 0), Reversed(None, None)):
        assert st.checkpoint.restore(tmp_path / "a", like) == Reversed(1, 2)
    st.checkpoint.save(tmp_path / "b", Positive(3))  # It refuses children of other types, which tell its fields.
    assert st.checkpoint.restore(tmp_path / "b") == {0: 3}
    assert st.checkpoint.restore(tmp_path / "b", Positive(0)).n == 3


def test_keys_and_depth_are_limited(tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match=r"a has the key 1.5, a float; wanted text or an integer"):
        st.checkpoint.save(tmp_path / "a", {"a": {1.5: 1}})
    tree: Any = 1
    for _ in range(trees.DEEPEST):
        tree = [tree]
    st.checkpoint.save(tmp_path / "a", tree)
    assert st.checkpoint.restore(tmp_path / "a") == tree
    with pytest.raises(ArgumentError, match="nested more than 64 levels"):
        st.checkpoint.save(tmp_path / "b", [tree])


# -- like ------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    mesh = mesh_of((2, 2), "numpy")
    w = st.device_put(np.arange(12.0).reshape(4, 3), st.NamedSharding(mesh, st.P("x", "y")))
    layers = [{"w": w + k, "b": st.ones(3) * k} for k in range(3)]
    st.checkpoint.save(
        tmp_path / "a", {"params": {"layers": layers}, "opt": Moments(w, 2.5), "step": 3, "h": np.arange(3)}
    )
    return tmp_path / "a"


def test_prefixes_of_like_are_layouts(saved: Path) -> None:
    one, mesh = st.devices()[1], mesh_of((3,), "numpy")
    found = st.checkpoint.restore(saved, {"params": one, "opt": mesh, "step": 0, "h": None})
    assert found["params"]["layers"][2]["w"].device == one
    assert found["opt"]["mu"].sharding == st.NamedSharding(mesh, st.P("x"))
    assert (found["opt"]["nu"], found["step"], found["h"].tolist()) == (2.5, 3, [0, 1, 2])
    with st.use_mesh(mesh):
        found = st.checkpoint.restore(
            saved, {"params": st.P("x"), "opt": Moments(None, 0.0), "step": 1, "h": np.zeros(3, int)}
        )
    assert found["params"]["layers"][0]["b"].sharding == st.NamedSharding(mesh, st.P("x"))
    assert found["opt"].mu.sharding.spec == st.P("x", "y")
    assert type(found["opt"]) is Moments


def test_arrays_become_tensors_and_tensors_arrays(saved: Path) -> None:
    like = {"h": st.zeros(3, dtype=int), "opt": {"mu": np.empty((4, 3)), "nu": 0.0}}
    found = st.checkpoint.restore(saved, like, only=["h", "opt"])
    assert isinstance(found["h"], st.ShardedTensor)
    assert type(found["opt"]["mu"]) is np.ndarray
    same_bits(found["opt"]["mu"], np.arange(12.0).reshape(4, 3))


def test_one_error_lists_all_that_does_not_fit(saved: Path) -> None:
    like = {
        "params": {"layers": [{"w": st.ones((4, 2)), "b": st.ones(3, dtype="f4")}]},
        "opt": 1,
        "step": 3.0,
        "new": None,
    }
    with pytest.raises(ArgumentError) as caught:
        st.checkpoint.restore(saved, like)
    for text in (
        "checkpoint.restore", "new is missing", "h is extra", "params/layers/1 is extra", "params/layers/2 is extra",
        "params/layers/0/w has shape (4, 3) and dtype float64 in the checkpoint, and (4, 2) and float64 in like",
        "params/layers/0/b has shape (3,) and dtype float64 in the checkpoint, and (3,) and float32 in like",
        "opt is a class in the checkpoint, and like has an int there", "step is of type int in the checkpoint, and float",
        "only=", "rename=",
    ):  # fmt: skip
        assert text in str(caught.value)
    with pytest.raises(ArgumentError, match="h is of type array in the checkpoint, and int in like"):
        st.checkpoint.restore(saved, {"h": 1}, only="h")
    with pytest.raises(ArgumentError, match=r"step is a leaf, and like has a list there"):
        st.checkpoint.restore(saved, {"step": [1]}, only="step")
    with pytest.raises(ArgumentError, match=r"opt/mu has shape \(4, 3\), and its layout in like is P\("):
        st.checkpoint.restore(
            saved, {"opt": st.NamedSharding(mesh_of((2,), "numpy"), st.P(None, None, "x"))}, only="opt"
        )


def test_parts_are_restored_by_their_names(saved: Path) -> None:
    found = st.checkpoint.restore(saved, only=("params/layers/1", "step"))
    assert found.keys() == {"params", "step"}
    assert found["params"]["layers"].keys() == {1}
    assert found["params"]["layers"][1]["b"].tolist() == [1, 1, 1]
    assert st.checkpoint.restore(saved, only="opt/nu") == {"opt": {"nu": 2.5}}
    with pytest.raises(ArgumentError, match=r"only: no leaf has the name 'param'.*; the checkpoint has h, opt/mu"):
        st.checkpoint.restore(saved, only="param")


def test_parts_are_restored_under_other_names(saved: Path) -> None:
    found = st.checkpoint.restore(
        saved, rename={"params/layers": "model/blocks", "opt/mu": "opt/momentum", "h": "params"}
    )
    assert [block["b"].tolist() for block in found["model"]["blocks"]] == [[0] * 3, [1] * 3, [2] * 3]
    assert found["opt"].keys() == {"momentum", "nu"}
    assert found["params"].tolist() == [0, 1, 2]
    like = {"params": {"layers": [{"w": None, "kernel": None}] * 3}}
    names = {f"params/layers/{k}/b": f"params/layers/{k}/kernel" for k in range(3)}
    found = st.checkpoint.restore(saved, like, only="params", rename=names)
    assert found["params"]["layers"][2]["kernel"].tolist() == [2, 2, 2]
    for rename, message in (
        ({"nothing": "x"}, "no leaf has the old name"), ({"h": "step"}, "the name of something else"),
        ({"h": "step/x"}, "is a leaf, and no container"), ({"opt": "a", "opt/nu": "b"}, "is in another name"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            st.checkpoint.restore(saved, rename=rename)


def test_wrong_arguments_are_errors(saved: Path, tmp_path: Path) -> None:
    restore: Any = st.checkpoint.restore
    save: Any = st.checkpoint.save
    with pytest.raises(ArgumentError, match="device and like are given"):
        restore(saved, {}, device=st.devices()[0])
    with pytest.raises(ArgumentTypeError, match="device is 3, an int"):
        restore(saved, device=3)
    with pytest.raises(FileNotFoundError, match=r"checkpoint.restore: there is no checkpoint"):
        restore(tmp_path / "none")
    with pytest.raises(
        ArgumentError, match=r"a folder without checkpoint.json; it has 1 checkpoint, the last ones are a"
    ):
        restore(tmp_path)
    (tmp_path / "file").write_text("a")
    with pytest.raises(ArgumentError, match=r"it is a file"):
        restore(tmp_path / "file")
    for path, error in ((3, ArgumentTypeError), ("", ArgumentError), ("a\0", ArgumentError), (b"a", ArgumentTypeError)):
        with pytest.raises(error, match="path is"):
            save(path, 1)
    for options, error in (
        ({"memory": 0}, ArgumentError), ({"memory": "a"}, ArgumentTypeError), ({"timeout": -1}, ArgumentError),
    ):  # fmt: skip
        with pytest.raises(error, match=f"checkpoint.save: {next(iter(options))} is"):
            save(tmp_path / "b", 1, **options)
    for name, value in (("only", 5), ("only", [5]), ("rename", ["w"]), ("rename", {"w": 3}), ("rename", {3: "w"})):
        with pytest.raises(ArgumentTypeError, match=f"{name} is"):
            restore(saved, **{name: value})
    for name in ("memory", "timeout", "keep"):
        with pytest.raises(ArgumentTypeError, match=f"checkpoint.Manager: {name} is"):
            st.checkpoint.Manager(tmp_path, **{name: "a"})  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="step is"):
        st.checkpoint.Manager(tmp_path).save(np.array([1, 2]), 1)  # type: ignore[arg-type]
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save(saved, 1)
    with pytest.raises(NotADirectoryError):
        save(tmp_path / "file", 1, overwrite=True)
    with pytest.raises(ArgumentTypeError, match=r"st.remat"):
        st.checkpoint(len)  # type: ignore[operator]
    assert restore(saved)["step"] == 3


OTHERS = """
import sys
import numpy as np
import shardtensor as st

st.set_num_devices(3)
found = st.checkpoint.restore(sys.argv[1])
assert found["x"].sharding == st.NamedSharding(st.make_mesh((3,), ("d",)), st.P("d")), found["x"].sharding
assert not found["x"].committed
assert found["one"].sharding.mesh.size == 3
assert found["two"].device == st.devices()[2], found["two"].device
mesh = st.Mesh(np.array(st.devices()[:2]).reshape(1, 2), ("x", "y"))
with st.use_mesh(mesh):
    assert st.checkpoint.restore(sys.argv[1])["x"].sharding.mesh.size == 2  # By the default mesh.
mesh = st.Mesh(np.array(st.devices()[:2][::-1]), ("z",))
with st.use_mesh(mesh):
    z = st.checkpoint.restore(sys.argv[1])["z"].sharding
    assert (z.mesh, z.spec) == (mesh, st.P(None, "z")), z
"""


def test_without_its_devices_a_tensor_is_on_the_default_mesh(tmp_path: Path) -> None:
    mesh, small = mesh_of((4, 2), "numpy"), mesh_of((2,), "numpy")
    x = st.device_put(np.arange(10.0), st.NamedSharding(mesh, st.P("y")))
    z = st.device_put(np.ones((2, 4)), st.NamedSharding(st.Mesh(small.devices, ("z",)), st.P(None, "z")))
    one, two = (st.ones(3, device=st.devices()[k]) for k in (5, 2))
    st.checkpoint.save(tmp_path / "a", {"x": x, "one": one, "two": two, "z": z})
    done = run_script(OTHERS, str(tmp_path / "a"))
    assert (done.returncode, done.stderr) == (0, "")


# -- what is in a checkpoint -----------------------------------------------------------------------


def test_inspection_shows_what_is_saved(saved: Path) -> None:
    info = st.checkpoint.inspect(saved)
    assert [*info.leaves] == [
        "h", "opt/mu", "opt/nu", *[f"params/layers/{k}/{n}" for k in range(3) for n in "bw"], "step",
    ]  # fmt: skip
    leaf = info.leaves["params/layers/0/w"]
    assert (leaf.type, leaf.shape, leaf.dtype, leaf.nbytes, leaf.files) == ("tensor", (4, 3), np.dtype(float), 96, 2)
    assert info.classes == {"opt": f"{__name__}.Moments"}
    assert info.nbytes == 24 + 4 * 96 + 3 * 24
    text = str(info)
    assert "opt was a " in text
    assert "P('x', 'y') on x=2 x y=2" in text
    assert info.tree["opt"]["mu"].sharding.spec == st.P("x", "y")
    assert info.stored == sum(f.stat().st_size for f in saved.rglob("*") if f.is_file() and f.name != "checkpoint.json")


def test_a_file_of_another_checkpoint_is_noticed(tmp_path: Path) -> None:
    """Its own checksums are right."""
    for name, value in (("a", 0.0), ("b", 1.0)):
        st.checkpoint.save(tmp_path / name, {"x": st.full((3, 4), value), "one": st.asarray(value)})
    for key in ("x/c/0/0", "one/c"):
        (tmp_path / "a" / key).write_bytes((tmp_path / "b" / key).read_bytes())
    with pytest.raises(ArgumentError, match=r"leaf one: .*one/c is damaged.*; leaf x: .*x/c/0/0 is damaged"):
        st.checkpoint.verify(tmp_path / "a")
    for name in ("x", "one"):
        with pytest.raises(ArgumentError, match=f"{name}: .*/{name}/c.* is damaged: it is not the file"):
            st.checkpoint.restore(tmp_path / "a", only=name)


def test_threads_save_one_after_the_other(tmp_path: Path) -> None:
    def save(k: int) -> None:
        st.checkpoint.save(tmp_path / str(k), {"k": k, "x": st.arange(k)})
        assert st.checkpoint.restore(tmp_path / str(k))["k"] == k

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(20)))


def test_the_manifest_is_readable_json(saved: Path) -> None:
    content = json.loads((saved / "checkpoint.json").read_text())
    assert (content["format"], content["version"]) == ("shardtensor.checkpoint", 1)
    assert content["arrays"]["opt/mu"]["layout"]["spec"] == [["x"], ["y"]]


@pytest.mark.filterwarnings("ignore:Object at checkpoint.json")
@pytest.mark.parametrize("name", ["zarr", "tensorstore", "xarray", "dask.array"])
def test_other_programs_read_the_arrays(name: str, saved: Path) -> None:
    library = pytest.importorskip(name)
    value = np.arange(12.0).reshape(4, 3)
    if name == "zarr":
        group = library.open_group(str(saved), mode="r")
        found = group["params/layers/0/w"][...]
        assert sorted(group) == ["h", "opt", "params"]
    elif name == "tensorstore":
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(saved / "params/layers/0/w")}}
        found = library.open(spec).result().read().result()
    elif name == "xarray":
        pytest.importorskip("zarr")
        found = library.DataArray(pytest.importorskip("zarr").open_array(str(saved / "opt/mu"), mode="r")).values
    else:
        found = library.from_zarr(str(saved / "opt/mu")).compute()
    same_bits(found, value)


# -- in the background -----------------------------------------------------------------------------


@everywhere
def test_later_writes_do_not_change_what_is_saved(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write happens while the save waits for it."""
    x, host = put(np.arange(40.0).reshape(10, 4), backend), np.arange(5)
    before, kept = values_of(x), host.copy()
    write_chunk = zarr.write_chunk

    def slow(*args: Any) -> Any:
        nonlocal x
        x[::2] = -1
        x += 1
        host[...] = 7
        return write_chunk(*args)

    monkeypatch.setattr("shardtensor.checkpoint.saving.write_chunk", slow)
    st.checkpoint.save(tmp_path / "a", {"x": x, "h": host}, wait=False)
    st.checkpoint.wait()
    found = st.checkpoint.restore(tmp_path / "a")
    same_bits(found["x"], before)
    same_bits(found["h"], kept)


def test_donation_while_a_save_runs_copies(backend: str, tmp_path: Path) -> None:
    x = put(np.arange(4000.0), backend)
    before = values_of(x)
    step = st.jit(lambda x: x * 2, donate_argnums=0)
    st.checkpoint.save(tmp_path / "a", x, wait=False)
    y = step(x)
    st.checkpoint.wait()
    same_bits(st.checkpoint.restore(tmp_path / "a"), before)
    same_bits(y, before * 2)


def test_saves_come_one_after_the_other(tmp_path: Path) -> None:
    for k in range(5):
        st.checkpoint.save(tmp_path / str(k), st.full(1000, k), wait=False)
        assert k == 0 or st.checkpoint.restore(tmp_path / str(k - 1))[0] == k - 1
    st.checkpoint.wait()
    assert st.checkpoint.restore(tmp_path / "4")[0] == 4
    st.checkpoint.wait()


# -- memory and traffic ----------------------------------------------------------------------------


def test_a_save_of_the_host_copies_nothing(tmp_path: Path) -> None:
    x = put(np.zeros((1 << 10, 1 << 12)), "numpy")  # 32 MiB
    x.block_until_ready()
    before = in_use("numpy")
    plan = plan_save({"x": x}, 1, 1 << 20)
    (source,) = [source for _, source in plan.arrays[0].pieces]
    assert isinstance(source, np.ndarray)
    assert np.shares_memory(source, np.asarray(x))
    assert in_use("numpy") - before < 1 << 16


def test_device_memory_is_copied_in_pieces() -> None:
    x = put(np.arange(1 << 14, dtype="i8").reshape(1 << 7, 1 << 7), "checked", (1,))
    plan = plan_save({"x": x}, 1, 1 << 14)
    ((_, piece),) = plan.arrays[0].pieces
    assert isinstance(piece, DevicePiece)
    found = [piece[slice(k, k + 1), slice(3, 60), ...] for k in range(1 << 7)]
    same_bits(np.concatenate(found), np.asarray(x)[:, 3:60])
    assert piece._block is not None
    assert piece._block.nbytes <= 1 << 14
    same_bits(piece[slice(0, 128), slice(0, 128), ...], x)


def test_a_restore_needs_little_memory_beside_the_result(tmp_path: Path) -> None:
    x = put(np.zeros((1 << 10, 1 << 11)), "numpy", (8,))  # 16 MiB, of which each shard has 2 MiB
    st.checkpoint.save(tmp_path / "a", x)
    st.free_cache()
    for backend, shape, spec in (
        ("numpy", (8,), st.P("x")), ("numpy", (3,), st.P(None, "x")), ("checked", (8,), st.P("x")),
        ("checked", (2, 2), st.P("y", "x")),
    ):  # fmt: skip
        sharding = st.NamedSharding(mesh_of(shape, backend), spec)
        st.checkpoint.restore(tmp_path / "a", device=sharding)  # Threads and plans exist then.
        st.free_cache()
        with allocated(backend) as peak:
            found = st.checkpoint.restore(tmp_path / "a", device=sharding)
        largest = max(shard.data.nbytes for shard in found.addressable_shards)
        assert peak[0] <= found.nbytes + 1.1 * largest, (backend, shape)


def test_a_save_in_the_background_needs_little_memory(tmp_path: Path) -> None:
    """Beside what the program overwrites meanwhile, which is nothing here."""
    for backend in ("numpy", "checked"):
        x = put(np.zeros((1 << 10, 1 << 11)), backend, (4,))  # 16 MiB
        st.checkpoint.save(tmp_path / backend, x)
        with allocated(backend) as peak:
            st.checkpoint.save(tmp_path / f"{backend} 2", x, wait=False, memory=1 << 20)
            st.checkpoint.wait()
        assert peak[0] < 8 << 20, backend  # slabs, and of devices copies of blocks


def test_many_saves_need_no_more_memory_than_few(tmp_path: Path) -> None:
    tree = {"w": st.ones(1000), "n": 3, "h": np.arange(100)}
    gc.collect()
    tracemalloc.start()
    sizes = []
    for k in range(30):
        st.checkpoint.save(tmp_path / "a", tree, overwrite=True, wait=k % 2 == 0)
        if k % 10 == 9:
            st.checkpoint.wait()
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[2] - sizes[1] < 1 << 13
    assert os.listdir(tmp_path) == ["a"]


def test_a_layout_reads_little_more_than_its_elements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large array that was cut into rows, devices read columns."""
    x = put(np.zeros((2048, 4096), "f4"), "numpy", (8,))
    monkeypatch.setattr(chunk_grids, "_LEAST", 1 << 17)
    chunk_grids._planned.cache_clear()
    st.checkpoint.save(tmp_path / "a", x)
    chunk_grids._planned.cache_clear()
    read, read_into = [], box_reader.read_into
    monkeypatch.setattr(box_reader, "is_available", lambda: False)  # C reads as much.
    monkeypatch.setattr(box_reader, "read_into", lambda d, m, o, p: read.append(m.size) or read_into(d, m, o, p))
    for shape, spec in (((4,), st.P(None, "x")), ((3,), st.P("x")), ((2, 2), st.P("x", "y")), ((1,), st.P())):
        read.clear()
        st.checkpoint.restore(tmp_path / "a", device=st.NamedSharding(mesh_of(shape, "checked"), spec))
        assert sum(read) <= 1.3 * x.nbytes, (shape, spec)


def test_scalars_of_numpy_have_their_dtypes(tmp_path: Path) -> None:
    st.checkpoint.save(tmp_path / "a", {"x": np.float32(1)})
    with pytest.raises(
        ArgumentError, match="x is of type scalar of dtype float32 in the checkpoint, and scalar of dtype"
    ):
        st.checkpoint.restore(tmp_path / "a", {"x": np.float64(1)})
    assert type(st.checkpoint.restore(tmp_path / "a", {"x": np.float32(0)})["x"]) is np.float32
    assert st.checkpoint.inspect(tmp_path / "a").leaves["x"].type == "scalar of dtype float32"


def test_values_that_processes_compare_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"h": np.arange(1000).reshape(50, 20), "x": put(np.arange(35.0).reshape(7, 5), "checked", (1,))}
    rows = plan_save(tree, 2, 1 << 20).rows()
    monkeypatch.setattr(plans, "_SUMMED", 24)
    assert plan_save(tree, 2, 1 << 20).rows() == rows
    tree["h"][30, 3] += 1
    assert plan_save(tree, 2, 1 << 20).rows()[0] != rows[0]


def test_a_reduced_layout_is_kept(tmp_path: Path) -> None:
    mesh = st.make_mesh((2, 2), ("x", "y"))
    x = st.device_put(np.arange(6.0).reshape(2, 3), st.NamedSharding(mesh, st.P("x", reduced={"y"})))
    st.checkpoint.save(tmp_path / "a", {"w": x})
    found = st.checkpoint.restore(tmp_path / "a")["w"]
    assert found.sharding == x.sharding
    assert found.tolist() == x.tolist()
