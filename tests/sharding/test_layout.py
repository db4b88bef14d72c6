"""The split rule, meshes, specs and shardings, compared with NumPy and with counting by hand."""

from __future__ import annotations

import itertools
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.backend import Device
from shardtensor.sharding.layout import Grid, as_sharding, offsets
from shardtensor.sharding.mesh import default_mesh
from tests.draws import drawn
from tests.layouts import MESHES, THREADS_INHERIT, all_specs, mesh_of, meshes, specs

DEVICES = [Device("numpy", i) for i in range(8)]
COUNTS = some.lists(some.integers(1, 6), min_size=0, max_size=3).map(tuple)


def mesh_over(devices: Any, shape: tuple[int, ...], names: Any) -> st.Mesh:
    grid = np.empty(math.prod(shape), object)
    grid[:] = list(devices)[: grid.size]
    return st.Mesh(grid.reshape(shape), names)


def row(count: int = 4) -> st.Mesh:
    return mesh_over(DEVICES, (count,), ("x",))


def square() -> st.Mesh:
    return mesh_over(DEVICES, (2, 2), ("x", "y"))


# -- the split rule --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "counts", "sizes"),
    [
        (10, (4,), [3, 3, 2, 2]),
        (10, (2, 2), [3, 2, 3, 2]),
        (10, (2,), [5, 5]),
        (11, (2, 3), [2, 2, 2, 2, 2, 1]),
        (3, (2, 3), [1, 1, 0, 1, 0, 0]),
        (8, (4,), [2, 2, 2, 2]),
        (2, (4,), [1, 1, 0, 0]),
        (0, (3,), [0, 0, 0]),
        (7, (1,), [7]),
        (7, (), [7]),
        (7, (1, 2, 1), [4, 3]),
    ],
)
def test_split_rule(size: int, counts: tuple[int, ...], sizes: list[int]) -> None:
    assert np.diff(offsets(size, counts)).tolist() == sizes


@hypothesis.given(size=some.integers(0, 10_000), counts=COUNTS)
def test_parts_follow_one_another_and_cover(size: int, counts: tuple[int, ...]) -> None:
    bounds = offsets(size, counts)
    assert len(bounds) == math.prod(counts) + 1
    assert (bounds[0], bounds[-1]) == (0, size)
    assert (np.diff(bounds) >= 0).all()


@hypothesis.given(size=some.integers(0, 10_000), count=some.integers(1, 40))
def test_first_parts_of_one_axis_are_the_larger_ones(size: int, count: int) -> None:
    wanted = [len(part) for part in np.array_split(np.arange(size), count)]
    assert np.diff(offsets(size, (count,))).tolist() == wanted
    assert wanted == [size // count + 1] * (size % count) + [size // count] * (count - size % count)


@hypothesis.given(size=some.integers(0, 10_000), counts=COUNTS)
def test_several_axes_split_one_after_the_other(size: int, counts: tuple[int, ...]) -> None:
    parts = [np.arange(size)]
    for count in counts:
        parts = [piece for part in parts for piece in np.array_split(part, count)]
    assert np.diff(offsets(size, counts)).tolist() == [len(part) for part in parts]


def test_offsets_are_not_to_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        offsets(10, (4,))[0] = 1
    assert offsets(10, (4,)).tolist() == [0, 3, 6, 8, 10]


# -- meshes ----------------------------------------------------------------------------------------


def test_mesh_says_what_it_is() -> None:
    mesh = mesh_over(DEVICES, (2, 3), ("a", "b"))
    assert dict(mesh.shape) == {"a": 2, "b": 3}
    assert list(mesh.shape) == ["a", "b"]
    assert mesh.axis_sizes == (2, 3)
    assert mesh.axis_names == ("a", "b")
    assert mesh.size == 6
    assert mesh.flat == tuple(DEVICES[:6])
    assert mesh.local_devices == DEVICES[:6]
    assert mesh.devices.shape == (2, 3)
    assert mesh.devices[1, 0] == DEVICES[3]
    assert mesh.coordinates.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert repr(mesh) == "Mesh(a=2, b=3; numpy:0..5)"
    assert repr(st.Mesh([DEVICES[1], DEVICES[0]], "x")) == "Mesh(x=2; numpy:1, numpy:0)"


def test_mesh_is_immutable() -> None:
    mesh = square()
    with pytest.raises(TypeError):
        mesh.shape["x"] = 3  # type: ignore[index]
    with pytest.raises(ValueError, match="read-only"):
        mesh.devices[0, 0] = DEVICES[5]
    with pytest.raises(ValueError, match=r"WRITEABLE|writeable"):
        mesh.devices.flags.writeable = True
    assert mesh.devices[0, 0] == DEVICES[0]


def test_mesh_does_not_follow_its_argument() -> None:
    grid = np.array(DEVICES[:2], dtype=object)
    mesh = st.Mesh(grid, ("x",))
    grid[0] = DEVICES[7]
    assert mesh.flat == tuple(DEVICES[:2])
    assert mesh.devices[0] == DEVICES[0]


def test_mesh_of_processes() -> None:
    devices = [Device("numpy", i, process_index=i // 2) for i in range(4)]
    mesh = st.Mesh(devices, ("x",))
    assert mesh.local_devices == devices[:2]
    sharding = st.NamedSharding(mesh, st.P("x"))
    assert sharding.addressable_devices == set(devices[:2])
    assert sharding.device_set == set(devices)
    assert not sharding.is_fully_addressable
    assert st.NamedSharding(row(), st.P("x")).is_fully_addressable


def test_mesh_equality_and_hash() -> None:
    mesh = square()
    same = st.Mesh([DEVICES[:2], DEVICES[2:4]], ["x", "y"])
    assert mesh == same
    assert hash(mesh) == hash(same)
    others = [
        mesh_over(DEVICES, (2, 2), ("y", "x")),
        mesh_over(DEVICES, (4,), ("x",)),
        mesh_over(DEVICES, (4, 1), ("x", "y")),
        mesh_over(DEVICES[::-1], (2, 2), ("x", "y")),
        mesh_over(DEVICES[4:], (2, 2), ("x", "y")),
        mesh_over([Device("checked", i) for i in range(4)], (2, 2), ("x", "y")),
    ]
    assert len({mesh, same, *others}) == 1 + len(others)
    assert mesh not in others
    assert mesh != "mesh"
    assert mesh != mesh.devices.tolist()


def test_equality_is_more_than_equal_hashes() -> None:
    mesh, other = row(2), mesh_over(DEVICES[1:], (2,), ("x",))
    a, b = st.NamedSharding(mesh, st.P("x")), st.NamedSharding(mesh, st.P())
    other._hash, b._hash = mesh._hash, a._hash
    assert mesh != other
    assert a != b


@pytest.mark.parametrize("shape", [*MESHES, ()], ids=str)
def test_mesh_can_be_pickled(shape: tuple[int, ...]) -> None:
    mesh = mesh_over(DEVICES, shape, tuple("xyz"[: len(shape)]))
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh
    assert hash(again) == hash(mesh)
    assert again.devices.shape == shape
    assert again.devices.tolist() == mesh.devices.tolist()


def test_mesh_without_axes() -> None:
    """A mesh without axes has one device: "any number of dimensions" includes none."""
    mesh = st.Mesh(DEVICES[0], ())
    assert (mesh.size, mesh.axis_names, mesh.axis_sizes, dict(mesh.shape)) == (1, (), (), {})
    assert mesh.coordinates.shape == (1, 0)
    assert st.NamedSharding(mesh, st.P()).devices_indices_map((3,)) == {DEVICES[0]: (slice(0, 3),)}


@pytest.mark.parametrize(
    ("devices", "names", "error", "culprit"),
    [
        ([DEVICES[:2], DEVICES[2:4]], ("x", "x"), st.ShardingError, "'x' occurs twice"),
        ([DEVICES[3], DEVICES[3]], ("x",), st.ShardingError, "numpy:3 occurs twice"),
        (DEVICES[:2], ("x", "y"), st.ShardingError, r"1 dimension.*\('x', 'y'\).*2"),
        ([DEVICES[:2], DEVICES[2:4]], ("x",), st.ShardingError, r"2 dimensions.*\('x',\).*1"),
        ([DEVICES[:2], DEVICES[2:4]], "xy", st.ShardingError, r"2 dimensions.*\('xy',\)"),
        ([], ("x",), st.ShardingError, "no device"),
        (np.empty((0, 2), object), ("x", "y"), st.ShardingError, "no device"),
        ([0, 1], ("x",), st.ArgumentTypeError, "0 is an int, not a Device"),
        ([DEVICES[0], "numpy:1"], ("x",), st.ArgumentTypeError, "'numpy:1' is a str"),
        ([DEVICES[:2], DEVICES[2:3]], ("x", "y"), st.ArgumentTypeError, "list, not a Device"),
        (None, ("x",), st.ArgumentTypeError, "None is a NoneType"),
        ([DEVICES[:2], DEVICES[2:4]], ("x", None), st.ShardingError, "None is not a non-empty string"),
        (DEVICES[:2], ("",), st.ShardingError, "'' is not a non-empty string"),
        (DEVICES[:2], (3,), st.ShardingError, "3 is not a non-empty string"),
        (DEVICES[:2], None, st.ShardTensorError, "axis_names"),
        (DEVICES[:2], 3, st.ShardTensorError, "axis_names"),
    ],
)
def test_mesh_refuses(devices: Any, names: Any, error: type[Exception], culprit: str) -> None:
    with pytest.raises(error, match=r"Mesh: .*" + culprit):
        st.Mesh(devices, names)


def test_make_mesh_takes_the_first_devices() -> None:
    assert st.make_mesh((2, 3), ("a", "b")) == mesh_over(st.devices(), (2, 3), ("a", "b"))
    assert st.make_mesh((2,), ("a",), devices=DEVICES[5:]).flat == tuple(DEVICES[5:7])
    assert st.make_mesh((2,), ("a",), devices=DEVICES[::-1]).flat == (DEVICES[7], DEVICES[6])
    assert st.make_mesh([1, 2], ["a", "b"]).axis_sizes == (1, 2)
    assert st.make_mesh((8,), ("a",)).size == 8
    assert st.make_mesh((3,), "a").shape == {"a": 3}
    assert st.make_mesh((2, -1)) == st.make_mesh((2, 4), ("axis_0", "axis_1"))
    assert st.make_mesh(3, devices=DEVICES[5:]) == st.make_mesh((3,), ("axis_0",), devices=DEVICES[5:])


@pytest.mark.parametrize(
    ("sizes", "devices", "wanted"),
    [((-1,), 8, (8,)), ((2, -1), 8, (2, 4)), ((-1, 3), 6, (2, 3)), ((1, -1, 7), 7, (1, 1, 7))],
)
def test_make_mesh_works_out_one_size(sizes: tuple[int, ...], devices: int, wanted: tuple[int, ...]) -> None:
    mesh = st.make_mesh(sizes, tuple("abc"[: len(sizes)]), devices=DEVICES[:devices])
    assert mesh.axis_sizes == wanted
    assert mesh.flat == tuple(DEVICES[: math.prod(wanted)])


@pytest.mark.parametrize(
    ("sizes", "names", "culprit"),
    [
        (
            (9,),
            ("x",),
            r"\(9,\) needs 9 devices and there are 8; call st\.set_num_devices\(9\) before.*SHARDTENSOR_NUM_DEVICES=9",
        ),
        ((3, 3), ("x", "y"), r"\(3, 3\) needs 9 devices and there are 8"),
        ((3, -1), ("x", "y"), r"\(3, -1\).*8 devices"),
        ((0, -1), ("x", "y"), r"\(0, -1\).*8 devices"),
        ((-1, -1), ("x", "y"), r"\(-1, -1\)"),
        ((0,), ("x",), r"\(0,\) must be positive"),
        ((2, 0), ("x", "y"), r"\(2, 0\) must be positive"),
        ((-2,), ("x",), r"\(-2,\) must be positive"),
        ((2, 2), ("x",), r"\('x',\)"),
        ((2,), ("x", "y"), r"\('x', 'y'\)"),
        ((2, 2), ("x", "x"), "'x' occurs twice"),
        ((2, 2), ("x", None), "None is not a non-empty string"),
    ],
)
def test_make_mesh_refuses(sizes: Any, names: Any, culprit: str) -> None:
    with pytest.raises(st.ShardingError, match=culprit):
        st.make_mesh(sizes, names)


@pytest.mark.parametrize(
    ("sizes", "names", "culprit"),
    [
        (None, ("x",), "axis_sizes"),
        ((2.5,), ("x",), r"axis_sizes|2\.5"),
        (("a",), ("x",), "axis_sizes|'a'"),
        ((2,), None, "axis_names"),
        ((2,), 3, "axis_names"),
    ],
)
def test_make_mesh_refuses_what_is_no_size_or_name(sizes: Any, names: Any, culprit: str) -> None:
    """The error is one of the library's own, and names the argument."""
    with pytest.raises(st.ShardTensorError, match=culprit):
        st.make_mesh(sizes, names)


def test_use_mesh_nests_and_is_undone() -> None:
    everything = default_mesh()
    assert everything == st.Mesh(st.devices(), ("d",))
    outer, inner = row(2), square()
    with st.use_mesh(outer) as given:
        assert given is outer
        assert default_mesh() == outer
        assert st.zeros((3,)).sharding == st.NamedSharding(outer, st.P("x"))
        with st.use_mesh(inner):
            assert default_mesh() == inner
            assert st.zeros((3, 2)).sharding == st.NamedSharding(inner, st.P(("x", "y")))
            assert st.zeros(()).sharding == st.NamedSharding(inner, st.P())
        assert default_mesh() == outer
    assert default_mesh() == everything


def test_use_mesh_is_undone_after_an_error() -> None:
    before = default_mesh()
    with pytest.raises(ZeroDivisionError), st.use_mesh(row(2)), st.use_mesh(row(3)):
        _ = 1 / 0
    assert default_mesh() == before


@pytest.mark.parametrize("mesh", [None, "x", [DEVICES[0]]])
def test_use_mesh_refuses(mesh: Any) -> None:
    with pytest.raises(st.ArgumentTypeError, match=r"use_mesh: mesh is a \w+; wanted a Mesh"), st.use_mesh(mesh):
        pass


def test_other_threads_do_not_see_use_mesh() -> None:
    seen = []
    before = default_mesh()
    with st.use_mesh(row(2)):
        thread = threading.Thread(target=lambda: seen.append(default_mesh()))
        thread.start()
        thread.join()
    assert seen == [row(2) if THREADS_INHERIT else before]


@pytest.fixture
def no_mesh_is_left() -> Iterator[None]:
    yield
    st.set_mesh(None)


@pytest.mark.usefixtures("no_mesh_is_left")
def test_set_mesh_is_for_the_process_or_for_a_block() -> None:
    everything, seen = default_mesh(), []

    def elsewhere() -> st.Mesh:
        thread = threading.Thread(target=lambda: seen.append(st.get_mesh()))
        thread.start()
        thread.join()
        return seen.pop()

    st.set_mesh(row(2))
    assert st.get_mesh() == elsewhere() == row(2)
    assert st.zeros(3).sharding == st.NamedSharding(row(2), st.P("x"))
    with st.set_mesh(square()) as given:
        assert given == st.get_mesh() == square()
        assert elsewhere() == (square() if THREADS_INHERIT else row(2))
        with st.set_mesh(None), pytest.raises(st.ShardingError, match="no mesh is in use"):
            st.zeros(3, device=st.P("x"))
        assert st.pmap(lambda _: st.get_mesh().size, [1, 2], devices=st.devices()[:2]) == [1, 1]
        with st.use_mesh(row(3)):
            assert st.get_mesh() == row(3)
    assert st.get_mesh() == row(2)
    with pytest.raises(ZeroDivisionError), st.set_mesh(square()):
        _ = 1 / 0
    assert st.get_mesh() == row(2)
    for _ in range(200):  # what earlier calls set is forgotten
        st.set_mesh(row(3))
    st.set_mesh(None)
    assert st.get_mesh() == elsewhere() == everything


@pytest.mark.parametrize("mesh", ["x", [DEVICES[0]], DEVICES[0]])
def test_set_mesh_refuses(mesh: Any) -> None:
    before = st.get_mesh()
    with pytest.raises(st.ArgumentTypeError, match=r"set_mesh: mesh is a \w+; wanted a Mesh"):
        st.set_mesh(mesh)
    assert st.get_mesh() == before


X = np.arange(24.0).reshape(4, 6)

TAKES_A_SHARDING: dict[str, Callable[[Any], st.ShardedTensor | st.ShapeDtypeStruct]] = {
    "device_put": lambda where: st.device_put(X, where),
    "device_put of a pytree": lambda where: st.device_put({"a": [X]}, where)["a"][0],
    "reshard": lambda where: st.reshard(X, where),
    "with_sharding_constraint": lambda where: st.with_sharding_constraint(st.asarray(X), where),
    "to_device": lambda where: st.asarray(X).to_device(where),
    "x.reshard": lambda where: st.asarray(X).reshard(where),
    "asarray": lambda where: st.asarray(X, device=where),
    "from_dlpack": lambda where: st.from_dlpack(X, device=where),
    "from_dlpack of a list": lambda where: st.from_dlpack([X[:2, :3], X[:2, 3:], X[2:, :3], X[2:, 3:]], device=where),
    "ShapeDtypeStruct": lambda where: st.ShapeDtypeStruct(X.shape, X.dtype, where),
    "empty": lambda where: st.empty((4, 6), device=where),
    "zeros_like": lambda where: st.zeros_like(X, device=where),
    "full": lambda where: st.full((4, 6), 3, device=where),
    "eye": lambda where: st.eye(4, 6, device=where),
    "in eval_shape": lambda where: st.eval_shape(lambda x: st.reshard(x, where) + st.ones(x.shape, device=where), X),
}


@pytest.mark.parametrize("name", TAKES_A_SHARDING)
@pytest.mark.parametrize("backend", ["numpy", "checked"])
def test_a_bare_spec_is_a_sharding_on_the_mesh_in_use(name: str, backend: str) -> None:
    """The mesh is that of each call: a cached plan does not hold the mesh of an earlier call."""
    call, spec = TAKES_A_SHARDING[name], st.P("x", "y")
    devices = st.devices(backend)
    for mesh in (st.Mesh(np.reshape(devices[k : k + 4], (2, 2)), ("x", "y")) for k in (0, 4)):
        with st.use_mesh(mesh):
            assert call(spec).sharding == st.NamedSharding(mesh, spec)
            assert call(spec).committed
            with pytest.raises(st.ShardingError, match=r"P\('z'\) names axis 'z'; the mesh in use has \('x', 'y'\)"):
                call(st.P("z"))
            with pytest.raises(st.ShardTensorError, match="3 dimensions"):
                call(st.P(None, None, "x"))
    with pytest.raises(
        st.ShardingError, match=r"P\('x', 'y'\) is a spec without a mesh.*st.set_mesh\(mesh\).*st.NamedSharding"
    ):
        call(spec)


def test_a_picture_of_a_bare_spec(capsys: pytest.CaptureFixture[str]) -> None:
    with st.use_mesh(row(2)):
        st.visualize_sharding((4,), st.P("x"))
    assert "2:4" in capsys.readouterr().out


def test_calls_of_maps_have_their_devices_as_the_default_mesh() -> None:
    """This includes the calls that helper threads run, which begins after one call has taken long."""

    def slow(_: int) -> st.Mesh:
        time.sleep(0.002)
        return default_mesh()

    with st.use_mesh(row(2)):
        assert st.pmap(slow, list(range(8)), devices=st.devices()) == [
            st.make_mesh((1,), ("d",), devices=[d]) for d in st.devices()
        ]
        assert default_mesh() == row(2)


# -- specs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (st.P("x"), st.P("x", None)),
        (st.P("x"), st.P("x", None, None)),
        (st.P("x"), st.P(("x",))),
        (st.P("x"), st.P(["x"])),
        (st.P("x"), st.P("x", ())),
        (st.P(), st.P(None)),
        (st.P(), st.P((), None, [])),
        (st.P(None, "x"), st.P((), "x", None)),
        (st.P(("x", "y")), st.P(["x", "y"])),
    ],
)
def test_specs_that_say_the_same_are_equal(left: st.P, right: st.P) -> None:
    assert left == right
    assert hash(left) == hash(right)
    assert repr(left) == repr(right)
    assert list(left) == list(right)
    assert len(left) == len(right)


def test_specs_that_say_something_else_differ() -> None:
    different = [
        st.P(),
        st.P("x"),
        st.P("y"),
        st.P(None, "x"),
        st.P("x", "y"),
        st.P("y", "x"),
        st.P(("x", "y")),
        st.P(("y", "x")),
    ]
    for a, b in itertools.combinations(different, 2):
        assert a != b
    assert len(set(different)) == len(different)
    assert st.P("x") != "x"
    assert st.P("x") != ("x",)
    assert st.P("x") != (("x",),)


@pytest.mark.parametrize(
    ("spec", "text", "items"),
    [
        (st.P(), "P()", []),
        (st.P("x"), "P('x')", ["x"]),
        (st.P(("x",), None), "P('x')", ["x"]),
        (st.P(None, "x"), "P(None, 'x')", [None, "x"]),
        (st.P(("x", "y"), None, "z"), "P(('x', 'y'), None, 'z')", [("x", "y"), None, "z"]),
        (st.P([]), "P()", []),
    ],
)
def test_spec_as_text_and_as_sequence(spec: st.P, text: str, items: list[Any]) -> None:
    assert repr(spec) == text
    assert list(spec) == items
    assert len(spec) == len(items)
    assert [spec[i] for i in range(len(spec))] == items
    assert spec[-1:] == tuple(items[-1:])
    assert eval(text, {"P": st.P}) == spec
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert hash(again) == hash(spec)
    with pytest.raises(IndexError):
        spec[len(spec)]


@pytest.mark.parametrize("parts", [("x", "x"), (("x", "x"),), ("x", None, ("y", "x"))], ids=repr)
def test_spec_refuses_an_axis_twice(parts: Any) -> None:
    with pytest.raises(st.ShardingError, match="P: axis 'x' occurs twice"):
        st.P(*parts)


@pytest.mark.parametrize("part", [3, 2.5, b"x", {"x"}, {"x": 1}, ("x", None), ("x", 1), ["x", ["y"]], row(2)], ids=repr)
def test_spec_refuses_what_is_no_axis(part: Any) -> None:
    with pytest.raises(st.ArgumentTypeError, match=r"P: .*wanted None, an axis name or a tuple of names"):
        st.P("z", part)


def test_partition_spec_is_p() -> None:
    assert st.PartitionSpec is st.P


# -- shardings -------------------------------------------------------------------------------------


def by_hand(mesh: st.Mesh, spec: st.P, shape: tuple[int, ...]) -> dict[Device, tuple[np.ndarray, ...]]:
    """Returns, for each device and dimension, the indices that it holds, by NumPy's array_split along one mesh axis
    after the other.
    """
    out = {}
    for at in np.ndindex(*mesh.axis_sizes):
        place = dict(zip(mesh.axis_names, at, strict=True))
        held = []
        for size, part in itertools.zip_longest(shape, spec):
            indices = np.arange(size)
            for axis in (part,) if isinstance(part, str) else part or ():
                indices = np.array_split(indices, mesh.shape[axis])[place[axis]]
            held.append(indices)
        out[mesh.devices[at]] = tuple(held)
    return out


@hypothesis.settings(max_examples=drawn(300))
@hypothesis.given(data=some.data())
def test_every_index_of_every_device(data: Any) -> None:
    mesh = data.draw(meshes("numpy"))
    shape = tuple(data.draw(some.lists(some.integers(0, 19), max_size=3)))
    sharding = st.NamedSharding(mesh, data.draw(specs(mesh, len(shape))))
    wanted = by_hand(mesh, sharding.spec, shape)
    found = sharding.devices_indices_map(shape)
    assert list(found) == list(mesh.flat)
    for device, index in found.items():
        assert len(index) == len(shape)
        for part, held, size in zip(index, wanted[device], shape, strict=True):
            assert part.step is None
            assert 0 <= part.start <= part.stop <= size
            np.testing.assert_array_equal(np.arange(size)[part], held)
    largest = tuple(max(len(held[d]) for held in wanted.values()) for d in range(len(shape)))
    assert sharding.shard_shape(shape) == largest
    assert all(isinstance(n, int) for n in sharding.shard_shape(shape))


@hypothesis.given(data=some.data())
def test_grid_says_the_same_as_the_map(data: Any) -> None:
    mesh = data.draw(meshes("numpy"))
    shape = tuple(data.draw(some.lists(some.integers(0, 9), max_size=3)))
    sharding = st.NamedSharding(mesh, data.draw(specs(mesh, len(shape))))
    grid = sharding.grid(shape)
    found = sharding.devices_indices_map(shape)
    assert grid.devices == mesh.flat
    for k, device in enumerate(grid.devices):
        assert grid.index(k) == found[device]
        assert grid.shape(k) == tuple(s.stop - s.start for s in found[device])
        assert grid.box(k) == tuple((s.start, s.stop) for s in found[device])
    owned = np.zeros(shape, int)
    for k in grid.owners():
        owned[grid.index(k)] += 1
    assert (owned == 1).all()
    numbers = grid.linear_parts().tolist()
    for k in grid.owners():
        assert numbers.index(numbers[k]) == k
    assert grid.same(Grid(grid.devices, grid.offsets, grid.parts.copy()))
    if mesh.size > 1:
        assert not grid.same(Grid(grid.devices[::-1], grid.offsets, grid.parts))


def test_known_indices() -> None:
    mesh = square()
    assert [s.start for (s,) in st.NamedSharding(mesh, st.P(("x", "y"))).devices_indices_map((10,)).values()] == [
        0,
        3,
        5,
        8,
    ]
    # ('y', 'x'): y is the major axis, and mesh order walks y first
    assert [s.start for (s,) in st.NamedSharding(mesh, st.P(("y", "x"))).devices_indices_map((10,)).values()] == [
        0,
        5,
        3,
        8,
    ]
    assert [s.start for (s,) in st.NamedSharding(mesh, st.P("y")).devices_indices_map((10,)).values()] == [0, 5, 0, 5]
    assert st.NamedSharding(row(), st.P("x")).shard_shape((10, 3)) == (3, 3)
    assert st.NamedSharding(row(), st.P("x")).shard_shape((2, 3)) == (1, 3)
    assert st.NamedSharding(row(), st.P()).shard_shape(()) == ()


def test_sharding_keeps_what_it_was_given() -> None:
    mesh, spec = square(), st.P("x", None)
    sharding = st.NamedSharding(mesh, spec)
    assert (sharding.mesh, sharding.spec, sharding.memory_kind) == (mesh, spec, "device")
    assert sharding.num_devices == 4
    assert sharding.device_set == set(DEVICES[:4])
    other = sharding.with_spec(st.P("y"))
    assert other == st.NamedSharding(mesh, st.P("y"))
    pinned = sharding.with_memory_kind("pinned_host")
    assert pinned == st.NamedSharding(mesh, spec, memory_kind="pinned_host")
    assert pinned.with_spec(st.P("y")).memory_kind == "pinned_host"
    assert pinned.with_memory_kind(None) == sharding
    assert pinned.with_memory_kind("device") == sharding
    assert repr(sharding) == "NamedSharding(Mesh(x=2, y=2; numpy:0..3), P('x'))"
    assert repr(pinned) == "NamedSharding(Mesh(x=2, y=2; numpy:0..3), P('x'), memory_kind='pinned_host')"


def test_sharding_equality_and_hash() -> None:
    mesh = square()
    sharding = st.NamedSharding(mesh, st.P("x"))
    same = [
        st.NamedSharding(square(), st.P(("x",), None)),
        st.NamedSharding(mesh, st.P("x"), memory_kind=None),
        st.NamedSharding(mesh, st.P("x"), memory_kind="device"),
    ]
    different = [
        st.NamedSharding(mesh, st.P("y")),
        st.NamedSharding(mesh, st.P()),
        st.NamedSharding(mesh_over(DEVICES[4:], (2, 2), ("x", "y")), st.P("x")),
        st.NamedSharding(mesh, st.P("x"), memory_kind="pinned_host"),
    ]
    for other in same:
        assert sharding == other
        assert hash(sharding) == hash(other)
    assert len({sharding, *same, *different}) == 1 + len(different)
    assert sharding not in different
    assert sharding != mesh


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize("spec", [st.P(), st.P("x"), st.P(None, ("y", "x"))], ids=repr)
def test_sharding_can_be_pickled(spec: st.P, kind: str) -> None:
    sharding = st.NamedSharding(square(), spec, memory_kind=kind)
    again = pickle.loads(pickle.dumps(sharding))
    assert again == sharding
    assert hash(again) == hash(sharding)
    assert again.memory_kind == kind
    assert again.devices_indices_map((5, 7)) == sharding.devices_indices_map((5, 7))


def test_sharding_refuses() -> None:
    mesh = square()
    data = st.make_mesh((2,), ("data",))
    with pytest.raises(st.ShardingError, match=r"P\('dta'\) names axis 'dta'; .*\('data',\); did you mean 'data'\?"):
        st.NamedSharding(data, st.P("dta"))
    with st.set_mesh(data), pytest.raises(st.ShardingError, match=r"x\['w'\]: .*did you mean 'data'\?"):
        st.device_put({"w": np.ones(2)}, {"w": st.P("dta")})
    with pytest.raises(st.ShardingError, match=r"names axis 'z'; the mesh has \('x', 'y'\)"):
        st.NamedSharding(mesh, st.P(None, "z"))
    with pytest.raises(st.ShardingError, match="axis 'x' occurs twice"):
        st.NamedSharding(mesh, st.P("x", "x"))
    with pytest.raises(st.ShardingError, match=r"memory_kind is 'disk'; there are .*'device'.*'pinned_host'"):
        st.NamedSharding(mesh, st.P("x"), memory_kind="disk")
    with pytest.raises(st.ShardingError, match="'disk'"):
        st.NamedSharding(mesh, st.P("x")).with_memory_kind("disk")
    with pytest.raises(st.ShardingError, match="'z'"):
        st.NamedSharding(mesh, st.P("x")).with_spec(st.P("z"))
    with pytest.raises(st.ArgumentTypeError, match="mesh is a list; wanted a Mesh"):
        st.NamedSharding(DEVICES, st.P("x"))  # type: ignore[arg-type]
    with pytest.raises(st.ArgumentTypeError, match="spec is a tuple; wanted a P"):
        st.NamedSharding(mesh, ("x",))  # type: ignore[arg-type]


def test_spec_longer_than_the_array() -> None:
    sharding = st.NamedSharding(square(), st.P(None, "x"))
    for use in (sharding.shard_shape, sharding.devices_indices_map, sharding.grid):
        with pytest.raises(st.ShardingError, match="2 dimensions and the array has 1"):
            use((4,))
    with pytest.raises(st.ShardingError, match="2 dimensions and the array has 1"):
        sharding.is_equivalent_to(st.NamedSharding(square(), st.P()), 1)
    with pytest.raises(st.ShardingError, match="2 dimensions and the array has 0"):
        st.device_put(np.float64(1), sharding)
    assert sharding.shard_shape((4, 4)) == (4, 2)
    assert st.NamedSharding(square(), st.P("x", None, None)).shard_shape((4,)) == (2,)  # trailing None do not count


def test_shapes_with_negative_sizes() -> None:
    sharding = st.NamedSharding(row(), st.P("x"))
    with pytest.raises(st.ShapeError, match=r"shard_shape: shape \(4, -1\) has a negative size"):
        sharding.shard_shape((4, -1))
    with pytest.raises(st.ShapeError, match=r"devices_indices_map: shape \(-4,\)"):
        sharding.devices_indices_map((-4,))


@pytest.mark.parametrize("shape", [(2.5,), ("4",), (None,), None], ids=repr)
def test_what_is_no_shape(shape: Any) -> None:
    sharding = st.NamedSharding(row(), st.P("x"))
    for use in (sharding.shard_shape, sharding.devices_indices_map):
        with pytest.raises(st.ShardTensorError, match=use.__name__):
            use(shape)


@pytest.mark.parametrize(
    ("shape", "spec", "replicated"),
    [
        ((4,), st.P(), True),
        ((4,), st.P("x"), False),
        ((1,), st.P("x"), True),
        ((1, 4), st.P("x"), True),
        ((1, 4), st.P("x", "y"), False),
        ((1, 4), st.P(("x", "y")), False),
        ((1, 1), st.P(("y", "x")), True),
        ((2, 2), st.P(None, "y"), False),
    ],
)
def test_is_fully_replicated(shape: tuple[int, ...], spec: st.P, replicated: bool) -> None:
    mesh = mesh_over(DEVICES, shape, ("x", "y")[: len(shape)])
    sharding = st.NamedSharding(mesh, spec)
    assert sharding.is_fully_replicated is replicated
    whole = (slice(0, 8), slice(0, 8))
    assert all(index == whole for index in sharding.devices_indices_map((8, 8)).values()) is replicated


def test_single_device_sharding() -> None:
    device = DEVICES[3]
    single = st.SingleDeviceSharding(device)
    same = st.NamedSharding(single.mesh, st.P())
    assert isinstance(single, st.NamedSharding)
    assert single == same
    assert same == single
    assert hash(single) == hash(same)
    assert single == st.SingleDeviceSharding(device)
    assert single == as_sharding(device, 2, "test")
    assert single == st.device_put(np.ones(3), device).sharding
    assert single != st.SingleDeviceSharding(DEVICES[2])
    assert single.device_set == {device}
    assert single.is_fully_replicated
    assert single.shard_shape((10, 3)) == (10, 3)
    assert single.devices_indices_map((10, 3)) == {device: (slice(0, 10), slice(0, 3))}
    pinned = st.SingleDeviceSharding(device, memory_kind="pinned_host")
    assert pinned == same.with_memory_kind("pinned_host")
    assert pinned != single
    for sharding in (single, pinned):
        assert pickle.loads(pickle.dumps(sharding)) == sharding
    assert single.is_equivalent_to(st.NamedSharding(st.Mesh([device], ("other",)), st.P("other")), 2)
    with pytest.raises(st.ArgumentTypeError, match="SingleDeviceSharding: device is a str"):
        st.SingleDeviceSharding("numpy:0")  # type: ignore[arg-type]


def test_what_device_means() -> None:
    mesh, sharding = square(), st.NamedSharding(square(), st.P(None, "y"))
    assert as_sharding(mesh, 3, "test") == st.NamedSharding(mesh, st.P(("x", "y")))
    assert as_sharding(mesh, 0, "test") == st.NamedSharding(mesh, st.P())
    assert as_sharding(sharding, 2, "test") is sharding
    with pytest.raises(st.ShardingError, match=r"test: .*2 dimensions and the array has 1"):
        as_sharding(sharding, 1, "test")
    with pytest.raises(
        st.ArgumentTypeError, match="test: 'numpy' is a str; wanted a Device, a Mesh, a NamedSharding or a P"
    ):
        as_sharding("numpy", 1, "test")  # type: ignore[arg-type]


# -- equivalence -----------------------------------------------------------------------------------


def probes(ndim: int) -> list[tuple[int, ...]]:
    """Returns shapes that distinguish all shardings of up to eight devices: sizes from 0 to 17 in each dimension."""
    if ndim == 0:
        return [()]
    return [tuple(n if d == e else 16 for e in range(ndim)) for d in range(ndim) for n in range(18)]


def same_maps(a: st.NamedSharding, b: st.NamedSharding, ndim: int) -> bool:
    return all(a.devices_indices_map(s) == b.devices_indices_map(s) for s in probes(ndim))


@hypothesis.settings(max_examples=drawn(300))
@hypothesis.given(data=some.data())
def test_equivalence_against_the_maps(data: Any) -> None:
    ndim = data.draw(some.integers(0, 2))
    a, b = (
        st.NamedSharding(mesh, data.draw(specs(mesh, ndim)))
        for mesh in (data.draw(meshes("numpy")), data.draw(meshes("numpy")))
    )
    assert a.is_equivalent_to(b, ndim) == same_maps(a, b, ndim)
    assert b.is_equivalent_to(a, ndim) == a.is_equivalent_to(b, ndim)


@pytest.mark.parametrize("ndim", [0, 1, 2])
def test_equivalence_of_all_layouts_of_four_devices(ndim: int) -> None:
    """Every pair of layouts on meshes of the same four devices is compared; some are equivalent, most are not."""
    turned = [DEVICES[i] for i in (0, 2, 1, 3)]
    grids = [
        mesh_over(DEVICES, (4,), ("x",)),
        mesh_over(DEVICES, (1, 4), ("x", "y")),
        mesh_over(DEVICES, (2, 2), ("x", "y")),
        mesh_over(turned, (2, 2), ("x", "y")),
        mesh_over(turned, (4,), ("x",)),
        mesh_over(DEVICES[3::-1], (4,), ("x",)),
    ]
    layouts = [st.NamedSharding(mesh, spec) for mesh in grids for spec in all_specs(mesh, ndim)]
    maps = [[tuple(sorted(a.devices_indices_map(s).items(), key=repr)) for s in probes(ndim)] for a in layouts]
    equivalent = 0
    for (a, map_a), (b, map_b) in itertools.combinations(zip(layouts, maps, strict=True), 2):
        assert a.is_equivalent_to(b, ndim) == (map_a == map_b), (a, b)
        equivalent += map_a == map_b
    assert equivalent


@pytest.mark.slow
@hypothesis.settings(max_examples=drawn(300))
@hypothesis.given(data=some.data())
def test_equivalence_of_the_same_in_other_words(data: Any) -> None:
    """The layouts differ in the names of axes, in axes of size 1, and in the order of the mesh's axes."""
    ndim = data.draw(some.integers(0, 3))
    mesh = data.draw(meshes("numpy"))
    sharding = st.NamedSharding(mesh, data.draw(specs(mesh, ndim)))
    order = data.draw(some.permutations(range(len(mesh.axis_names))))
    names = dict(zip(mesh.axis_names, data.draw(some.permutations(["a", "b", "x"])), strict=False))
    other_mesh = st.Mesh(mesh.devices.transpose(order)[..., None], (*[names[mesh.axis_names[i]] for i in order], "one"))
    parts: list[Any] = [[names[axis] for axis in chain] for chain in sharding.spec.chains_of(ndim)]
    home = data.draw(some.integers(-1, ndim - 1))
    if home >= 0:
        parts[home].insert(data.draw(some.integers(0, len(parts[home]))), "one")
    other = st.NamedSharding(other_mesh, st.P(*parts))
    assert same_maps(sharding, other, ndim)
    assert sharding.is_equivalent_to(other, ndim)
    assert other.is_equivalent_to(sharding, ndim)


def test_equivalence_looks_at_memory_and_devices() -> None:
    sharding = st.NamedSharding(row(), st.P("x"))
    assert not sharding.is_equivalent_to(sharding.with_memory_kind("pinned_host"), 1)
    assert not sharding.is_equivalent_to(st.NamedSharding(mesh_over(DEVICES[4:], (4,), ("x",)), st.P("x")), 1)
    assert not sharding.is_equivalent_to(st.NamedSharding(mesh_over(DEVICES[3::-1], (4,), ("x",)), st.P("x")), 1)
    # all hold everything, in whatever order they stand
    replicated = [st.NamedSharding(mesh_over(d, (4,), ("x",)), st.P()) for d in (DEVICES[:4], DEVICES[3::-1])]
    assert replicated[0].is_equivalent_to(replicated[1], 2)


def test_two_by_two_is_not_four() -> None:
    """They agree wherever four divides the size, and 10 is 3, 3, 2, 2 for one and 3, 2, 3, 2 for the other."""
    four, two_by_two = st.NamedSharding(row(), st.P("x")), st.NamedSharding(square(), st.P(("x", "y")))
    assert four.devices_indices_map((8,)) == two_by_two.devices_indices_map((8,))
    assert four.devices_indices_map((10,)) != two_by_two.devices_indices_map((10,))
    assert not four.is_equivalent_to(two_by_two, 1)


# -- what users ask --------------------------------------------------------------------------------


def test_devices(backend: str) -> None:
    devices = st.devices(backend)
    kind = "cpu" if backend in ("numpy", "checked") else devices[0].kind
    assert devices == [Device(backend, i, kind=kind) for i in range(8)]
    assert st.local_devices(backend) == devices
    assert st.device_count(backend) == st.num_shards(backend) == 8
    devices.pop()  # the caller's own list
    assert st.device_count(backend) == 8


def test_default_devices() -> None:
    assert st.devices() == st.local_devices() == st.devices("numpy")
    assert st.device_count() == st.num_shards() == 8
    assert default_mesh() == st.Mesh(st.devices("numpy"), ("d",))


@pytest.mark.parametrize(
    "function", [st.devices, st.local_devices, st.device_count, st.num_shards], ids=lambda f: f.__name__
)
def test_devices_of_a_backend_that_is_not_there(function: Any) -> None:
    with pytest.raises(st.ArgumentError, match=r"no backend named 'nonsense'.*'checked', .*'numpy'"):
        function("nonsense")


def test_meshes_of_helpers_are_as_drawn() -> None:
    assert [mesh_of(shape, "numpy").axis_sizes for shape in MESHES] == MESHES


def test_is_equivalent_to_judges_its_arguments_first() -> None:
    sharding = st.NamedSharding(row(), st.P("x"))
    with pytest.raises(st.ShardingError, match="is_equivalent_to"):
        sharding.is_equivalent_to(sharding, 0)
    with pytest.raises(st.ArgumentTypeError, match="other is a NoneType"):
        sharding.is_equivalent_to(None, 1)  # type: ignore[arg-type]
