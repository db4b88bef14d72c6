"""DLPack in both directions: ownership of the memory, permission to write, and arrays that cannot be shared."""

from __future__ import annotations

import gc
import importlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.backend import HOST_MEMORY, registry
from shardtensor.functions.interchange import dlpack_memory
from shardtensor.functions.interchange.dlpack_methods import to_dlpack
from tests.draws import drawn
from tests.layouts import DTYPES, MESHES, all_specs, array, assert_same, mesh_of, shapes

JAX_DTYPES = ["bool", "int8", "int32", "uint8", "float16", "float32", "complex64"]  # without its 64-bit mode
KEPT: list[Any] = []


def library(name: str) -> Any:
    """The library of that name, where it is installed."""
    return pytest.importorskip(name, reason=f"{name} is not installed")


def usable(name: str) -> list[st.Device]:
    """The devices of a backend, where it can be used."""
    try:
        return st.devices(name)
    except st.BackendError as error:
        pytest.skip(str(error))


def address(x: Any) -> int:
    """Where the first element of an array lies."""
    for name in ("data_ptr", "unsafe_buffer_pointer"):
        if hasattr(x, name):
            return int(getattr(x, name)())
    return int(x.__array_interface__["data"][0])


def only(x: st.ShardedTensor) -> Any:
    """The array of a tensor on one device."""
    (shard,) = x.addressable_shards
    return shard.data


def produce(name: str, value: np.ndarray) -> Any:
    """Returns an array of a library with the value; in NumPy and torch it has the strides of the value."""
    if name == "numpy":
        return value
    if name == "torch":
        library("torch")
        return importlib.import_module("torch").from_dlpack(value) if value.flags.writeable else None
    return library("jax").numpy.asarray(value)


JAX = pytest.param("jax", marks=pytest.mark.full)  # it and what it compiles are a quarter of a GB
PRODUCERS = ["numpy", "torch", JAX]
CONSUMERS: dict[str, Callable[[Any], Any]] = {
    "numpy": np.from_dlpack,
    "torch": lambda x: library("torch").from_dlpack(x),
    "jax": lambda x: library("jax").dlpack.from_dlpack(x),
}
each_consumer = pytest.mark.parametrize("consumer", ["numpy", "torch", JAX])


def aligned(count: int, dtype: str = "float32") -> np.ndarray:
    """Returns an array whose address is aligned as JAX requires."""
    room = np.zeros(count * np.dtype(dtype).itemsize + 64, np.uint8)
    begin = -address(room) % 64
    made = room[begin : begin + count * np.dtype(dtype).itemsize].view(dtype)
    made[...] = np.arange(count)
    return made


class Lender:
    """An array of another library, with the device that it reports by DLPack."""

    def __init__(self, x: Any, memory: Any = HOST_MEMORY) -> None:
        self.x = x
        self.memory = memory
        self.asked: list[dict[str, Any]] = []

    def __dlpack__(self, **wishes: Any) -> Any:
        self.asked.append(wishes)
        return self.x.__dlpack__(**wishes)

    def __dlpack_device__(self) -> Any:
        return self.memory


# -- in --------------------------------------------------------------------------------------------


def lay(data: Any, value: np.ndarray) -> np.ndarray:
    """The value in some strides."""
    how = data.draw(some.sampled_from(["C", "F", "backwards", "gaps", "broadcast", "read-only"]))
    if how == "F":
        return np.asfortranarray(value)
    if how == "backwards" and value.ndim:
        return np.ascontiguousarray(value[::-1])[::-1]
    if how == "gaps" and value.ndim:
        return np.repeat(value, 2, axis=-1)[..., ::2]
    if how == "broadcast":
        value = np.broadcast_to(value, (2, *value.shape))
        return np.lib.stride_tricks.as_strided(value, value.shape, value.strides, writeable=True)
    value = np.array(value)
    value.flags.writeable = how != "read-only"
    return value


@pytest.mark.parametrize("target", [None, "numpy", "checked", "torch"])
@pytest.mark.parametrize("producer", PRODUCERS)
@hypothesis.settings(max_examples=drawn(40))
@hypothesis.given(data=some.data())
def test_every_array_comes_in(producer: str, target: str | None, data: Any) -> None:
    value = array(data.draw(shapes()), data.draw(some.sampled_from(JAX_DTYPES if producer == "jax" else DTYPES)), 3)
    if producer != "jax":
        value = lay(data, value)
    if producer == "torch" and (not value.flags.writeable or any(n < 0 for n in value.strides)):
        value = np.array(value)
    theirs = produce(producer, value)
    if target:
        mesh = mesh_of(data.draw(some.sampled_from(MESHES)), target) if usable(target) else None
        spec = data.draw(some.sampled_from(all_specs(mesh, value.ndim)))
        where = data.draw(some.sampled_from([st.devices(target)[3], mesh, st.NamedSharding(mesh, spec)]))
    else:
        where = None
    x = st.from_dlpack(theirs, device=where, copy=data.draw(some.sampled_from([None, True])))
    assert_same(x, value, exact=True)
    if isinstance(where, st.NamedSharding):
        assert x.sharding == where
    else:
        assert x.sharding.mesh.flat == (
            where.flat if isinstance(where, st.Mesh) else (where or st.devices("numpy")[0],)
        )
    if x.size and (x.ndim or target != "torch"):
        before = value.copy()
        x[...] = np.zeros((1,) * x.ndim, x.dtype)
        assert not np.asarray(x).any()
        np.testing.assert_array_equal(value, before)


def test_memory_is_shared_and_the_default_device_takes_it() -> None:
    a = np.arange(6.0)
    x = st.from_dlpack(a)
    assert address(only(x)) == address(a)
    assert x.device == st.devices()[0]
    assert not x.committed
    a[0] = 9
    assert x.tolist() == [9, 1, 2, 3, 4, 5]
    assert st.from_dlpack(a, device=st.devices()[2]).committed
    assert (x + st.ones((6,), device=st.make_mesh((3,), ("x",)))).sharding.num_devices == 3


def test_default_mesh_comes_first() -> None:
    with st.use_mesh(mesh_of((2,), "numpy", 4)):
        assert st.from_dlpack(np.arange(3)).device == st.devices("numpy")[4]
        parts = st.from_dlpack([np.arange(3), np.arange(2)])
        assert parts.sharding.mesh.flat == tuple(st.devices("numpy")[4:6])
        more = st.from_dlpack([np.ones(1)] * 3)  # more than it has: those of the backend
        assert more.sharding.mesh.flat == tuple(st.devices("numpy")[:3])


def writes() -> dict[str, Callable[[Any], None]]:
    seven = np.full(1, 7, "float32")

    def ellipsis(x: Any) -> None:
        x[...] = seven

    def element(x: Any) -> None:
        x[:1] = seven

    def inplace(x: Any) -> None:
        x += 7

    def view(x: Any) -> None:
        x[1:][:2] = seven

    def turned(x: Any) -> None:
        x[::-1][1:3] = seven

    def mask(x: Any) -> None:
        x[x == x] = seven

    def out(x: Any) -> None:
        np.add(x, 7, out=x)

    return {f.__name__: f for f in (ellipsis, element, inplace, view, turned, mask, out)}


@pytest.mark.parametrize("write", writes().values(), ids=writes())
@pytest.mark.parametrize("target", ["numpy", "torch", "checked"])
@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("dropped", [False, True])
def test_no_write_shows_in_the_callers_array(
    producer: str, target: str, write: Callable[[Any], None], dropped: bool
) -> None:
    value = aligned(6)
    theirs = produce(producer, value)
    kept = np.from_dlpack(theirs)
    x = st.from_dlpack(theirs, device=usable(target)[1])
    if target != "checked":
        assert address(only(x)) == address(kept)
    wanted = kept.copy()
    write(wanted)
    if dropped:  # the memory belongs to the caller as long as any array holds it
        del theirs
    write(x)
    np.testing.assert_array_equal(np.asarray(x), wanted)
    np.testing.assert_array_equal(kept, np.arange(6))
    second = np.asarray(x)
    there = address(only(x))
    del second
    x += 1  # from now on it has memory of its own
    assert target == "checked" or address(only(x)) == there


@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_views_of_what_was_taken_see_its_writes(target: str) -> None:
    a = np.arange(12.0).reshape(3, 4)
    x = st.from_dlpack(a, device=usable(target)[0])
    view = x.T[1]
    a[0, 1] = 50
    assert view.tolist() == [50, 5, 9]
    view[0] = 60
    assert float(x[0, 1]) == 60
    assert a[0, 1] == 50


@pytest.mark.parametrize("target", ["numpy", "torch"])
@pytest.mark.parametrize("producer", PRODUCERS)
def test_copy(producer: str, target: str) -> None:
    device = usable(target)[0]
    theirs = produce(producer, aligned(6))
    here = address(np.from_dlpack(theirs))
    with st.transfers() as log:
        assert address(only(st.from_dlpack(theirs, device=device))) == here
        assert address(only(st.from_dlpack(theirs, device=device, copy=False))) == here
    assert log.copied == 0
    with st.transfers() as log:
        x = st.from_dlpack(theirs, device=device, copy=True)
    assert address(only(x)) != here
    assert log.copied == 24
    assert {(r.operator, r.explicit) for r in log} == {("from_dlpack", True)}


def test_copy_is_whole_where_a_part_could_stay() -> None:
    a = np.arange(8.0)
    x = st.from_dlpack(a, device=mesh_of((2,), "torch") if usable("torch") else None, copy=True)
    a[...] = 0
    assert x.tolist() == list(range(8))


def test_a_mesh_that_shares_the_hosts_memory_takes_no_copy() -> None:
    a = np.arange(10)
    mesh = st.make_mesh((4,), ("x",))
    x = st.from_dlpack(a, device=mesh, copy=False)
    assert x.sharding.spec == st.P("x")
    a[9] = 3
    assert [s.data.tolist() for s in x.addressable_shards] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 3]]


def test_without_a_copy_where_it_takes_one() -> None:
    mesh = mesh_of((2,), "torch") if usable("torch") else None
    with pytest.raises(st.InterchangeError, match=r"^from_dlpack: copy=False, and x is one array for Mesh\(x=2.*list"):
        st.from_dlpack(np.arange(4), device=mesh, copy=False)
    with pytest.raises(st.InterchangeError, match=r"negative"):
        st.from_dlpack(np.arange(4)[::-1], device=mesh.flat[0], copy=False)
    assert st.from_dlpack(np.arange(4)[::-1], device=mesh.flat[0]).tolist() == [3, 2, 1, 0]
    assert st.from_dlpack(np.arange(4)[::-1], copy=False).tolist() == [3, 2, 1, 0]
    with pytest.raises(BufferError, match="copy=False"):
        st.from_dlpack(np.arange(4), device=mesh, copy=False)


def test_what_is_no_array() -> None:
    class Half:
        def __dlpack__(self) -> None: ...

    for x in (3, None, "text", {}, Half(), np.ndarray, np.arange(3).__dlpack__()):
        with pytest.raises(
            TypeError, match=r"^from_dlpack: x is an? \w+ without __dlpack__ and __dlpack_device__; wanted"
        ):
            st.from_dlpack(x)
    with pytest.raises(TypeError, match=r"^from_dlpack: x\[1\] is a list"):
        st.from_dlpack([np.arange(3), [1, 2]])
    with pytest.raises(st.ArgumentTypeError, match=r"__dlpack_device__\(\) is 'cpu'; wanted a device type"):
        st.from_dlpack(Lender(np.arange(3), "cpu"))
    with pytest.raises(st.ArgumentTypeError, match="wanted a Device, a Mesh, a NamedSharding or a P"):
        st.from_dlpack(np.arange(3), device="cpu")
    with pytest.raises(st.ShardingError, match="host"):
        st.from_dlpack(np.arange(3), device=st.HOST)
    with pytest.raises(st.ShardingError, match="2 dimensions"):
        st.from_dlpack(np.arange(3), device=st.NamedSharding(st.make_mesh((2,), ("x",)), st.P(None, "x")))


@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("bad", ["M8[D]", "m8[s]", ">f8", "U1", "O", "S3"])
def test_dtypes_that_dlpack_lacks(bad: str, copy: bool | None) -> None:
    with pytest.raises(
        st.InterchangeError, match=r"^from_dlpack: x, a ndarray, cannot be imported: \w+: DLPack.*native"
    ):
        st.from_dlpack(np.zeros(3, bad), copy=copy)


@pytest.mark.parametrize("device", ["numpy", "torch"])
def test_dtypes_that_numpy_lacks(device: str) -> None:
    torch, where = library("torch"), usable(device)[0]
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        with pytest.raises(
            st.InterchangeError, match=r"^from_dlpack: x, a Tensor, cannot be imported: .*that NumPy has"
        ):
            st.from_dlpack(torch.zeros(3).to(dtype), device=where)


@pytest.mark.full
@pytest.mark.parametrize("device", ["numpy", "torch"])
def test_dtypes_of_jax_that_numpy_lacks(device: str) -> None:
    jax, where = library("jax"), usable(device)[0]
    with pytest.raises(st.InterchangeError, match=r"cannot be imported"):
        st.from_dlpack(jax.numpy.ones(3, jax.numpy.bfloat16), device=where)


def test_dtypes_that_the_backend_lacks() -> None:
    with pytest.raises(st.ArgumentTypeError, match=r"'torch' has no arrays of uint16"):
        st.from_dlpack(np.zeros(3, "uint16"), device=usable("torch")[0])


def test_torch_tensors_that_stand_for_others() -> None:
    torch = library("torch")
    z = torch.tensor([1 + 2j, 3 - 4j])
    with pytest.raises(st.InterchangeError, match=r"requires? grad.*detach"):
        st.from_dlpack(torch.ones(3, requires_grad=True))
    with pytest.raises(st.InterchangeError, match="conjugate"):
        st.from_dlpack(z.conj())
    with pytest.raises(st.InterchangeError, match=r"resolve_neg"):  # torch itself would give the other sign
        st.from_dlpack(z.conj().imag)
    assert st.from_dlpack(z.conj().imag.resolve_neg()).tolist() == [-2, 4]


def test_memory_that_nobody_drives() -> None:
    far = Lender(np.arange(3), (42, 7))
    assert st.from_dlpack(Lender(np.arange(3), (3, 0))).tolist() == [0, 1, 2]  # page-locked by CUDA
    with pytest.raises(st.InterchangeError, match=r"copy=False.*device type 42, number 7, which no usable backend"):
        st.from_dlpack(far, copy=False)
    with pytest.raises(st.InterchangeError, match="which is not that of Mesh"):
        st.from_dlpack(far, device=st.devices()[0], copy=False)
    with pytest.raises(st.InterchangeError, match="no usable backend drives all of that"):
        st.from_dlpack([far, np.arange(3)])

    class Copies(Lender):  # to the host, where it is asked
        def __dlpack_device__(self) -> Any:
            return self.memory

        def __dlpack__(self, *, dl_device: Any = None, **wishes: Any) -> Any:
            assert dl_device == HOST_MEMORY
            return self.x.copy().__dlpack__(**wishes)

    x = st.from_dlpack(Copies(np.arange(3), (42, 7)), device=st.devices()[1])
    assert (x.tolist(), x.device) == ([0, 1, 2], st.devices()[1])

    class Stays(Lender):
        def __dlpack__(self, **wishes: Any) -> Any:
            raise BufferError("not from here")

    with pytest.raises(st.InterchangeError, match=r"number 7, which no usable.*: not from here"):
        st.from_dlpack(Stays(np.arange(3), (42, 7)))


def test_a_tensor_is_an_array_like_any_other() -> None:
    x = st.arange(6, device=st.devices()[2])
    here = address(only(x))
    y = st.from_dlpack(x)
    assert address(only(y)) == here
    x[0] = 9
    y[1] = 8
    assert (x.tolist(), y.tolist()) == ([9, 1, 2, 3, 4, 5], [0, 8, 2, 3, 4, 5])
    z = st.arange(6, device=st.make_mesh((3,), ("x",)))
    assert address(np.asarray(st.from_dlpack(z, copy=False))) == address(np.asarray(z))


@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_in_a_mapped_function(target: str) -> None:
    a = np.arange(3.0)

    def f(x: Any) -> Any:
        mine = st.from_dlpack(a)
        assert not isinstance(mine, st.ShardedTensor)
        assert address(mine) == address(a)
        assert address(st.from_dlpack(a, copy=True)) != address(a)
        KEPT.append(np.from_dlpack(only(st.device_put(1.0, st.devices(target)[0]))) if target == "torch" else None)
        return x + mine

    parts = st.pmap(f, st.shard(np.arange(6.0), devices=usable(target)[:2]))
    assert [p.tolist() for p in parts] == [[0, 2, 4], [3, 5, 7]]
    (same,) = st.pmap(lambda x: st.from_dlpack(a), st.shard(a, devices=usable(target)[:1]))
    same += 1
    assert a.tolist() == [0, 1, 2]


# -- lists -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["numpy", "torch"])
@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("rows", [8, 7, 2, 0])
def test_a_list_is_the_shards(producer: str, target: str, rows: int) -> None:
    whole = np.arange(rows * 4, dtype="float32").reshape(rows, 4)
    mesh = mesh_of((3,), target) if usable(target) else None
    pieces = [produce(producer, p.copy()) for p in np.array_split(whole, 3)]
    for x in (
        st.from_dlpack(pieces, device=mesh),
        st.from_dlpack(tuple(pieces), device=st.NamedSharding(mesh, st.P("x", None)), copy=None),
    ):
        assert x.committed
        assert x.sharding == st.NamedSharding(mesh, st.P("x"))
        for piece, shard in zip(pieces, x.addressable_shards, strict=True):
            assert 0 in piece.shape or address(shard.data) == address(np.from_dlpack(piece))
        assert_same(x, whole, exact=True)
        if rows:
            x[...] = np.zeros((1, 1), "float32")
            assert not np.asarray(x).any()
            np.testing.assert_array_equal(np.concatenate([np.from_dlpack(p) for p in pieces]), whole)


def test_a_list_takes_devices_in_order() -> None:
    with st.transfers() as log:
        x = st.from_dlpack([np.arange(2), np.arange(2), np.arange(1)])
    assert len(log) == 0
    assert x.sharding == st.NamedSharding(st.Mesh(st.devices()[:3], "d"), st.P("d"))
    assert x.tolist() == [0, 1, 0, 1, 0]
    assert [p.tolist() for p in st.pmap(lambda a: a + 1, st.shard(x, devices=x.device))] == [[1, 2], [1, 2], [1]]
    assert st.from_dlpack([np.array(3)]).tolist() == 3
    assert st.from_dlpack([np.arange(2)], device=st.devices()[5]).device == st.devices()[5]


@pytest.mark.parametrize("target", ["numpy", "torch", "checked"])
@hypothesis.settings(max_examples=drawn(60))
@hypothesis.given(data=some.data())
def test_a_list_in_any_layout(target: str, data: Any) -> None:
    mesh = mesh_of(data.draw(some.sampled_from(MESHES)), target) if usable(target) else None
    value = array(data.draw(shapes()), data.draw(some.sampled_from(["int32", "float64", "bool"])), 5)
    sharding = st.NamedSharding(mesh, data.draw(some.sampled_from(all_specs(mesh, value.ndim))))
    indices = sharding.devices_indices_map(value.shape).values()
    pieces = [np.array(value[i]) for i in indices]
    copy = data.draw(some.sampled_from([None, True, False]))
    x = st.from_dlpack(pieces, device=sharding, copy=copy)
    assert x.sharding == sharding
    assert_same(x, value, exact=True)
    for piece in pieces:
        piece[...] = 0
    if copy:
        assert_same(x, value, exact=True)


def test_lists_that_do_not_fit() -> None:
    mesh = st.make_mesh((2,), ("x",))
    ones = [np.ones((n, 2)) for n in (1, 3)]
    with pytest.raises(st.ShapeError, match=r"^from_dlpack: x is an empty list"):
        st.from_dlpack([])
    with pytest.raises(
        st.ShapeError,
        match=r"x\[0\] has shape \(1, 2\), and of the whole \(4, 2\) P\('d'\) gives numpy:0 \(2, 2\).*unshard",
    ):
        st.from_dlpack(ones)
    assert st.unshard([st.from_dlpack(a) for a in ones]).shape == (4, 2)
    with pytest.raises(st.ShapeError, match=r"x\[1\] has shape \(1, 2\).*\(1, 1\)|x\[1\] has shape \(1, 2\)"):
        st.from_dlpack([np.ones((1, 1)), np.ones((1, 2))], device=st.NamedSharding(mesh, st.P("x")))
    with pytest.raises(st.ShapeError, match=r"x\[1\] has shape \(2, 2\)"):  # replicated
        st.from_dlpack([np.ones((1, 2)), np.ones((2, 2))], device=st.NamedSharding(mesh, st.P(None, "x")))
    with pytest.raises(st.ShapeError, match=r"as many dimensions"):
        st.from_dlpack([np.ones(2), np.ones((2, 2))])
    for where in (None, mesh):
        with pytest.raises(st.ShapeError, match=r"x\[0\] has shape \(\).*st\.stack"):
            st.from_dlpack([np.array(1), np.array(1)], device=where)
    with pytest.raises(st.ArgumentTypeError, match=r"x\[1\] has dtype float32, and x\[0\] has float64"):
        st.from_dlpack([np.ones(2), np.ones(2, "float32")])
    with pytest.raises(st.ShardingError, match=r"a list of 3 arrays for the 2 devices of Mesh\(x=2"):
        st.from_dlpack([np.ones(2)] * 3, device=mesh)
    with pytest.raises(st.ShardingError, match=r"a list of 9 arrays in host memory.*SHARDTENSOR_NUM_DEVICES=9"):
        st.from_dlpack([np.ones(1)] * 9)


@pytest.mark.parametrize("more", [[], pytest.param(["jax"], marks=pytest.mark.full)])
def test_pieces_of_several_libraries(more: list[str]) -> None:
    names = ["numpy", "torch", *more]
    x = st.from_dlpack([produce(name, np.ones(2, "float32")) for name in names])
    assert x.tolist() == [1] * 2 * len(names)


# -- out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["numpy", "torch", "checked"])
@each_consumer
@hypothesis.settings(max_examples=drawn(40))
@hypothesis.given(data=some.data())
def test_every_tensor_goes_out(consumer: str, source: str, data: Any) -> None:
    value = array(data.draw(shapes()), data.draw(some.sampled_from(JAX_DTYPES if consumer == "jax" else DTYPES)), 3)
    x = st.device_put(value, usable(source)[2])
    how = data.draw(some.sampled_from(["whole", "T", "element", "gaps", "backwards"]))
    if how == "T":
        x, value = x.T, value.T
    elif value.ndim and how != "whole" and not (consumer == "jax" and how == "gaps"):  # which takes no gaps
        index = {"element": 0, "gaps": slice(None, None, 2), "backwards": slice(None, None, -1)}[how]
        if how != "element" or len(value):
            x, value = x[index], value[index]
    here = address(only(x)) if how == "whole" and source != "checked" else 0
    theirs = CONSUMERS[consumer](x)
    np.testing.assert_array_equal(np.asarray(theirs), value)
    assert np.asarray(theirs).dtype == value.dtype
    again = CONSUMERS[consumer](x)  # as often as you like
    assert again.shape == theirs.shape
    if value.size and here and consumer != "jax":
        assert address(theirs) == here == address(again)


@pytest.mark.full
@pytest.mark.parametrize("source", ["numpy", "torch"])
def test_jax_takes_what_is_aligned_without_a_copy(source: str) -> None:
    x = st.device_put(np.arange(1 << 19, dtype="float32"), usable(source)[0])  # large arrays are aligned
    here = address(only(x))
    assert here % 64 == 0
    assert address(CONSUMERS["jax"](x)) == here


@pytest.mark.parametrize("source", ["numpy", "torch", "checked"])
@each_consumer
@pytest.mark.parametrize("write", writes().values(), ids=writes())
def test_what_was_exported_keeps_its_value(consumer: str, source: str, write: Callable[[Any], None]) -> None:
    x = st.device_put(np.arange(6, dtype="float32"), usable(source)[0])
    theirs = CONSUMERS[consumer](x)
    wanted = np.arange(6, dtype="float32")
    write(wanted)
    write(x)
    assert x.tolist() == wanted.tolist()
    assert theirs.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("source", ["numpy", "torch"])
def test_a_capsule_holds_it_too_and_lets_go(source: str) -> None:
    x = st.device_put(np.arange(6.0), usable(source)[0])
    here = address(only(x))
    x += 1
    assert address(only(x)) == here  # in place
    for version in (None, (1, 0)):
        capsule = x.__dlpack__(max_version=version)
        x += 1
        there = address(only(x))
        assert there != here
        del capsule
        x += 1
        assert address(only(x)) == there
        here = there


@each_consumer
def test_shards_go_out_by_themselves(consumer: str) -> None:
    x = st.arange(10, dtype="float32", device=st.make_mesh((4,), ("x",)))
    shard = x.addressable_shards[1].data
    assert address(np.from_dlpack(shard)) == address(shard) == address(CONSUMERS["torch"](shard))
    if consumer == "jax":  # it asks for no version, to which NumPy gives nothing read-only
        with pytest.raises(BufferError, match="readonly"):
            CONSUMERS[consumer](shard)
    parts = st.shard(x, devices=x.device)
    assert CONSUMERS[consumer](parts[1]).tolist() == [3, 4, 5]
    assert address(np.from_dlpack(parts[1], copy=False)) == address(shard)  # read-only: it is x's memory, too
    y = st.device_put(np.arange(10), mesh_of((4,), "torch") if usable("torch") else None)
    assert CONSUMERS[consumer](y.addressable_shards[1].data).tolist() == [3, 4, 5]


@pytest.mark.parametrize("source", ["numpy", "checked", "torch"])
def test_several_devices_that_use_host_memory(source: str) -> None:
    x = st.device_put(np.arange(6), mesh_of((3,), source) if usable(source) else None)
    for y in (x, x[1:], x.T, x.reshape(2, 3), x[::-2], x[0], x.sum()):
        assert y.__dlpack_device__() == HOST_MEMORY
        for made in (np.from_dlpack(y), np.from_dlpack(y, device="cpu"), np.from_dlpack(y, copy=True)):
            np.testing.assert_array_equal(made, np.asarray(y))
        assert st.from_dlpack(y).sharding == y.sharding
        assert st.from_dlpack(y, copy=False).tolist() == y.tolist()
    assert np.from_dlpack(st.device_put(x, x.sharding.mesh.flat[1])).tolist() == list(range(6))
    z = st.zeros(6, device=x.sharding)
    if x.sharding.mesh.flat[0].backend != "numpy":
        with pytest.raises(st.InterchangeError, match=r"copy=False, and x must be copied .* Mesh\(x=3"):
            z.__dlpack__(copy=False)
        return
    theirs = np.from_dlpack(z)  # It shares the buffer of the devices.
    z[1] = 5
    assert theirs.tolist() == [0] * 6
    assert z.tolist() == [0, 5, 0, 0, 0, 0]


def test_several_devices_with_memories_of_their_own() -> None:
    x = st.device_put(np.arange(6), mesh_of((3,), "cupy"))
    for ask in (x.__dlpack__, x.__dlpack_device__, lambda: np.from_dlpack(x)):
        with pytest.raises(
            BufferError, match=r"3 devices, Mesh\(x=3.*device='cpu'.*st\.device_put\(x, device\).*addressable_shards"
        ):
            ask()
    assert np.from_dlpack(x, device="cpu").tolist() == list(range(6))
    assert st.from_dlpack(x).sharding == x.sharding
    with pytest.raises(BufferError, match="copy=False, and x must be copied to the host"):
        x.__dlpack__(dl_device=(1, 0), copy=False)


@pytest.mark.parametrize("source", ["numpy", "checked"])
def test_what_was_donated(source: str) -> None:
    x = st.device_put(np.arange(6), st.devices(source)[0])
    view = x[1:]
    st.device_put(x, st.devices(source)[1], donate=True)
    for y in (x, view):
        for ask in (y.__dlpack__, y.__dlpack_device__):
            with pytest.raises(st.DonatedError, match="donated by device_put"):
                ask()


def test_views_and_elements() -> None:
    x = st.device_put(np.arange(12.0).reshape(3, 4), st.devices()[0])
    here = address(only(x))
    for view in (x[1], x[:, 1], x.T, x[::2, 1:3]):
        theirs = np.from_dlpack(view)
        np.testing.assert_array_equal(theirs, np.asarray(view))
        assert here <= address(theirs) < here + x.nbytes
        assert view.__dlpack_device__() == HOST_MEMORY
    assert np.from_dlpack(x.sum()) == 66
    assert np.from_dlpack(x[2, 3]) == 11
    with pytest.raises(st.InterchangeError, match="negative strides"):
        x[::-1].__dlpack__(copy=False)
    theirs = CONSUMERS["torch"](x[::-1, :2])
    assert theirs.tolist() == [[8, 9], [4, 5], [0, 1]]
    one = st.device_put(np.arange(4.0).reshape(1, 4), st.devices()[0])[::-1]
    assert CONSUMERS["torch"](one).tolist() == [[0, 1, 2, 3]]


def test_wishes_that_cannot_be() -> None:
    x = st.device_put(np.arange(3), st.devices()[0])
    assert np.from_dlpack(x, device="cpu").tolist() == [0, 1, 2]
    with pytest.raises(BufferError, match=r"dl_device is the memory of CUDA GPU 1, and the tensor lies in host memory"):
        x.__dlpack__(dl_device=(2, 1))
    with pytest.raises(TypeError, match=r"dl_device is 'cpu'; wanted a device type and a number"):
        x.__dlpack__(dl_device="cpu")  # type: ignore[arg-type]
    with pytest.raises(st.ArgumentError, match=r"stream is 3, and numpy:0 is in host memory"):
        x.__dlpack__(stream=3)
    x.__dlpack__(stream=-1)
    with pytest.raises(BufferError, match=r"DLPack has no datetime64\[D\]; give x\.astype\('int64'\)"):
        np.from_dlpack(st.device_put(np.zeros(2, "M8[D]"), st.devices()[0]))
    for dtype in (">i4", "g") if np.dtype("g").itemsize > 8 else (">i4",):
        with pytest.raises(st.InterchangeError, match=r"^__dlpack__: DLPack only supports.*astype"):
            np.from_dlpack(st.device_put(np.zeros(2, dtype), st.devices()[0]))
    with pytest.raises(st.ArgumentTypeError, match="wanted a tensor"):
        to_dlpack(np.arange(3))


def test_a_capsule_is_for_one() -> None:
    torch = library("torch")
    capsule = st.zeros((3,), device=st.devices()[0]).__dlpack__(max_version=(1, 0))
    torch.utils.dlpack.from_dlpack(capsule)
    with pytest.raises(RuntimeError):
        torch.utils.dlpack.from_dlpack(capsule)


# -- who outlives whom -----------------------------------------------------------------------------


class Watched(np.ndarray):
    """An array whose deletion is observable."""


@pytest.mark.parametrize("target", ["numpy", "torch", "checked"])
def test_the_tensor_outlives_the_array(target: str) -> None:
    a = np.arange(1000.0).view(Watched)
    gone = weakref.ref(a)
    x = st.from_dlpack(a, device=usable(target)[0])
    view = x[10:12]
    del a
    gc.collect()
    assert gone() is not None
    assert view.tolist() == [10, 11]
    del x, view
    gc.collect()
    assert gone() is None


def test_the_array_of_a_list_is_let_go() -> None:
    pieces = [np.arange(3.0).view(Watched) for _ in range(2)]
    gone = [weakref.ref(a) for a in pieces]
    x = st.from_dlpack(pieces)
    del pieces
    x += 1
    gc.collect()
    assert x.tolist() == [1, 2, 3, 1, 2, 3]
    assert [g() for g in gone] == [None, None]


@pytest.mark.parametrize("source", ["numpy", "torch", "checked"])
@each_consumer
def test_the_export_outlives_the_tensor(consumer: str, source: str) -> None:
    x = st.device_put(np.arange(1000, dtype="float32"), usable(source)[0])
    gone = weakref.ref(x)
    theirs = CONSUMERS[consumer](x)
    del x
    gc.collect()
    assert gone() is None
    filler = [np.full(1000, 7, "float32") for _ in range(10)]
    np.testing.assert_array_equal(np.asarray(theirs), np.arange(1000))
    assert len(filler) == 10


def test_round_trips_of_a_mesh() -> None:
    torch = library("torch")
    x = st.arange(7, dtype="float32", device=st.make_mesh((3,), ("x",)))
    theirs = [torch.from_dlpack(part) * 2 for part in st.shard(x, devices=x.device)]
    y = st.from_dlpack(theirs, device=x.sharding, copy=False)
    assert_same(y, np.arange(7, dtype="float32") * 2)
    assert y.sharding == x.sharding


# -- GPUs ------------------------------------------------------------------------------------------

_numbers = itertools.count()


@pytest.fixture(params=["random", "lazy", "eager"])
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[st.Device]]]:
    """The double of CuPy on two GPUs, and four devices of a backend on it: two on each."""
    from tests import fakecupy

    pytest.importorskip("array_api_compat", reason="array-api-compat is not installed")
    cupy = fakecupy.install(devices=2, scheduler=request.param)
    try:
        monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", "4")
        kind = importlib.import_module("shardtensor_cupy").CuPyBackend
        name = f"cupy_dlpack{next(_numbers)}"  # plans and values know a backend by its name
        backend = type("Double", (kind,), {"name": name})()
        monkeypatch.setitem(registry._loaded, name, backend)
        monkeypatch.setattr(dlpack_memory, "backend_names", lambda: ["checked", "numpy", name])
        yield cupy, list(backend.devices())
        gc.collect()
        races = list(fakecupy.races)
        assert races == []
    finally:
        fakecupy.uninstall()


def on(cupy: Any, gpu: int, value: Any) -> Any:
    with cupy.cuda.Device(gpu):
        return cupy.asarray(value)


def test_gpu_in(gpus: tuple[Any, list[st.Device]]) -> None:
    cupy, devices = gpus
    a = on(cupy, 1, np.arange(6.0))
    x = st.from_dlpack(a)
    assert (x.device, x.committed) == (devices[2], True)
    assert x.addressable_shards[0].data.data.ptr == a.data.ptr
    assert st.from_dlpack(a, device=devices[3], copy=False).device == devices[3]
    with pytest.raises(st.InterchangeError, match="CUDA GPU 1, which is not that of"):
        st.from_dlpack(a, device=devices[0], copy=False)
    with st.transfers() as log:
        assert st.from_dlpack(a, device=devices[0]).tolist() == list(range(6))
    assert next((r.bytes, r.explicit) for r in log) == (48, True)
    with st.transfers() as log:
        there = st.from_dlpack(a, device=st.devices("numpy")[0])
    assert (log.bytes, there.tolist()) == (48, list(range(6)))
    assert st.from_dlpack(np.arange(3), device=devices[1]).tolist() == [0, 1, 2]  # from the host it is a copy
    with pytest.raises(st.InterchangeError, match="host memory, which is not that of"):
        st.from_dlpack(np.arange(3), device=devices[1], copy=False)
    mine = st.from_dlpack(a, copy=True)
    assert mine.addressable_shards[0].data.data.ptr != a.data.ptr


def test_no_write_shows_in_a_gpus_array(gpus: tuple[Any, list[st.Device]]) -> None:
    cupy, devices = gpus
    a = on(cupy, 1, np.arange(6.0))
    x = st.from_dlpack(a)
    x[0] = 9
    assert (x.tolist()[0], float(a[0])) == (9, 0)


def test_gpu_lists(gpus: tuple[Any, list[st.Device]]) -> None:
    cupy, devices = gpus
    pieces = [on(cupy, gpu, np.full(2, i)) for i, gpu in enumerate([1, 0, 1])]
    with st.transfers() as log:
        x = st.from_dlpack(pieces)
    assert len(log) == 0
    assert x.sharding.mesh.flat == (devices[2], devices[0], devices[3])
    assert [s.data.data.ptr for s in x.addressable_shards] == [p.data.ptr for p in pieces]
    assert x.tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(st.ShardingError, match="SHARDTENSOR_NUM_DEVICES=3"):
        st.from_dlpack([pieces[0]] * 3)
    with pytest.raises(st.InterchangeError, match="drives all of that"):
        st.from_dlpack([pieces[0], np.ones(2)])
    mesh = st.Mesh(devices[:3], "x")
    with st.transfers() as log:
        y = st.from_dlpack(pieces, device=mesh)
    assert log.bytes == 16  # the first came from the other GPU
    assert y.tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(st.InterchangeError, match=r"x\[0\] lies in the memory of CUDA GPU 1"):
        st.from_dlpack(pieces, device=mesh, copy=False)


def test_gpu_out(gpus: tuple[Any, list[st.Device]]) -> None:
    cupy, devices = gpus
    x = st.device_put(np.arange(6.0), devices[2])
    x += 1
    assert x.__dlpack_device__() == (2, 1)
    here = x.addressable_shards[0].data.data.ptr
    with cupy.cuda.Device(1):
        theirs = cupy.from_dlpack(x)
        assert theirs.data.ptr == here
        assert theirs.get().tolist() == [1, 2, 3, 4, 5, 6]
        x[...] = 0
        assert theirs.get().tolist() == [1, 2, 3, 4, 5, 6]
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            assert (cupy.from_dlpack(x) + 1).get().tolist() == [1] * 6
            assert cupy.from_dlpack(Lender(x, (2, 1))).get().tolist() == [0] * 6
    x.__dlpack__(stream=-1, copy=True)
    with st.transfers() as log:
        host = np.from_dlpack(x, device="cpu")
    assert host.tolist() == [0] * 6
    assert [(r.bytes, r.destination, r.explicit) for r in log] == [(48, st.HOST, True)]
    with pytest.raises(BufferError, match="copy=False"):
        x.__dlpack__(dl_device=HOST_MEMORY, copy=False)
    with pytest.raises(BufferError, match=r"dl_device is the memory of CUDA GPU 0"):
        x.__dlpack__(dl_device=(2, 0))


@pytest.mark.parametrize("copy", [None, True])
def test_gpu_out_to_a_stream_that_is_not_current(gpus: tuple[Any, list[st.Device]], copy: bool | None) -> None:
    """The consumer names the stream on which it will read, and makes it current later, or never."""
    cupy, devices = gpus
    for device in (devices[2], devices[3]):
        x = st.device_put(np.arange(6.0), device) * 3
        with cupy.cuda.Device(1):
            reader, other = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
            with other:
                capsule = x.__dlpack__(stream=reader.ptr, max_version=(1, 0), copy=copy)
                theirs = cupy.from_dlpack(capsule)
            with reader:
                doubled = theirs * 2
                assert doubled.get().tolist() == [0, 6, 12, 18, 24, 30]
            reader.synchronize()


def test_gpu_pinned(gpus: tuple[Any, list[st.Device]]) -> None:
    cupy, devices = gpus
    pieces = [on(cupy, gpu, np.full(2, float(gpu))) for gpu in range(2)]
    mesh = st.Mesh([devices[0], devices[2]], "x")
    sharding = st.NamedSharding(mesh, st.P("x"), memory_kind="pinned_host")
    x = st.from_dlpack(pieces, device=sharding)
    assert (x.sharding, x.tolist()) == (sharding, [0, 0, 1, 1])
    alone = st.SingleDeviceSharding(devices[0], memory_kind="pinned_host")
    for what, where in ((pieces, sharding), (pieces[0], alone)):
        with pytest.raises(
            st.InterchangeError, match=r"copy=False, and x(\[0\])? must be copied to pinned_host memory"
        ):
            st.from_dlpack(what, device=where, copy=False)
    y = st.from_dlpack(pieces[0], device=alone)
    assert y.__dlpack_device__() == HOST_MEMORY
    with st.transfers() as log:
        theirs = np.from_dlpack(y, copy=False)
    assert len(log) == 0
    assert address(theirs) == address(only(y))
    assert not theirs.flags.writeable
    y += 1
    assert (theirs.tolist(), y.tolist()) == ([0, 0], [1, 1])


class Described:
    """An array of another library, which has NumPy's protocol only."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False and dtype not in (None, self.value.dtype):
            raise ValueError("a dtype that needs a copy")
        return np.array(self.value, dtype) if copy else np.asarray(self.value, dtype)


def test_objects_with_numpys_protocol_are_arrays(backend: str) -> None:
    host = np.arange(10.0)
    x = st.asarray(Described(host), device=mesh_of((3,), backend))
    assert_same(x, host, exact=True)
    assert_same(st.asarray(Described(host), dtype="float32"), host.astype("float32"), exact=True)
    shared = st.asarray(Described(host), copy=False)
    host[0] = 5
    assert (shared[0].item(), x[0].item()) == (5, 0)
    with pytest.raises(st.ArgumentTypeError, match="is an object; wanted a tensor, an array"):
        st.asarray(object())
