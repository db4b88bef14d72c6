"""The handle: its attributes, Python's protocols, NumPy's protocols, and reading."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import math
import operator
import pickle
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

import shardtensor as st
from shardtensor.core import OPS
from shardtensor.interpreters.execution.plan_cache import _cached_plan
from shardtensor.tensor import tensor as handles
from shardtensor.tensor.storage import WriteState
from tests.draws import drawn
from tests.layouts import READ_ONLY, array, assert_same, everywhere, mesh_of, on_host
from tests.scripts import VARIABLES, new_process, output_of


def make(
    backend: str, shape: tuple[int, ...] = (10, 3), spec: st.P | None = None
) -> tuple[np.ndarray, st.ShardedTensor]:
    value = array(shape, "float32", 5)
    sharding = st.NamedSharding(mesh_of((2, 2), backend), st.P("x") if spec is None else spec)
    return value, st.device_put(value, sharding)


def test_what_it_is(backend: str) -> None:
    value, x = make(backend)
    assert (x.shape, x.dtype, x.ndim, x.size, x.nbytes, x.itemsize) == ((10, 3), np.float32, 2, 30, 120, 4)
    assert x.sharding.spec == st.P("x")
    assert x.devices() == set(st.devices(backend)[:4])
    assert x.block_until_ready() is x
    assert len(x) == 10
    assert x.committed
    assert not x.is_donated
    with pytest.raises(TypeError, match="not made by calling"):
        st.ShardedTensor()
    with pytest.raises(TypeError):
        hash(x)


def test_device_names_the_group_and_never_the_layout(backend: str) -> None:
    _, x = make(backend)
    mesh = x.sharding.mesh
    assert x.device == x.T.device == x[0, 0].device == st.sum(x).device == mesh
    assert hash(x.device) == hash(x.sum().device)
    assert st.zeros((5, 2), device=x.device).device == x.device
    assert st.zeros((), device=x.device).sharding.spec == st.P()
    assert st.zeros((5, 2), device=x.device).sharding.spec == st.P(("x", "y"))
    one = x.to_device(st.devices(backend)[6])
    assert one.device == st.devices(backend)[6]
    assert one.to_device(one.device).device == one.device


@everywhere
def test_shards_replicas_and_data(backend: str) -> None:
    value, x = make(backend)
    shards = x.addressable_shards
    assert [s.device for s in shards] == list(x.sharding.mesh.flat)
    assert [s.index for s in shards] == [(slice(0, 5), slice(0, 3))] * 2 + [(slice(5, 10), slice(0, 3))] * 2
    assert [s.replica_id for s in shards] == [0, 1, 0, 1]
    for s in shards:
        np.testing.assert_array_equal(on_host(s.data, s.device), value[s.index])


@pytest.mark.parametrize("backend", READ_ONLY)
def test_shards_cannot_be_written(backend: str) -> None:
    _, x = make(backend)
    with pytest.raises((ValueError, st.BackendError)):
        x.addressable_shards[0].data[0] = 1


def test_elements_of_shape_one_tensor_convert(backend: str) -> None:
    value, x = make(backend)
    assert float(x[2, 1]) == float(value[2, 1])
    assert int(x[2, 1]) == int(value[2, 1])
    assert bool(x[2, 1] == value[2, 1])
    assert complex(x[2, 1]) == complex(value[2, 1])
    assert x[2:3, 1:2].item() == value[2, 1].item()
    assert [10, 20, 30][st.asarray(1, device=x.device)] == 20
    assert not np.arange(4)[st.asarray(0, device=x.device)]
    for call in (bool, lambda x: x.item()):
        with pytest.raises(st.ShapeError, match="30 elements"):
            call(x)
    for shape in ((1,), (1, 1), (3,), (0,)):
        for kind in (int, float, complex):
            with pytest.raises(st.ArgumentTypeError, match=rf"^{kind.__name__}: the tensor has shape \("):
                kind(st.ones(shape, device=x.device))
    assert bool(st.ones((1, 1), device=x.device)) is True
    with pytest.raises(TypeError, match="float32 is not an index"):
        [1][x[0, 0]]


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2,), (0,)], ids=str)
def test_tensors_with_dimensions_are_no_python_indices(shape: tuple[int, ...], backend: str) -> None:
    """They behave as arrays: NumPy accepts them as indices, and lists do not."""
    value = np.arange(30).reshape(10, 3)
    at = np.full(shape, 1)
    i = st.asarray(at, device=mesh_of((2,), backend))
    np.testing.assert_array_equal(value[i], value[at])
    np.testing.assert_array_equal(value[i, 1:], value[at, 1:])
    np.testing.assert_array_equal(value[1:, i], value[1:, at])
    x = st.asarray(value, device=i.device)
    assert_same(x[i], value[at])
    for call in (lambda: [1, 2, 3][i], lambda: range(i), lambda: operator.index(i), lambda: "abc"[i]):
        with pytest.raises(st.ArgumentTypeError, match="is not an index; wanted an integer one without dimensions"):
            call()
    for kind in (bool, float):
        with pytest.raises(TypeError):
            [1, 2, 3][st.asarray(1, dtype=kind, device=i.device)]


@everywhere
def test_lists_beside_tensors_are_arrays(backend: str) -> None:
    """They behave as beside NumPy's arrays: Python must not use a tensor as a number of repetitions of a list."""
    value, mesh = np.array([3, 4]), mesh_of((2,), backend)
    one = np.array(3)
    for symbol, pair in itertools.product(["+", "*", "-", "//", "==", "<", "@"], [("a", "x"), ("x", "a"), ("x", "b")]):
        code = f"{pair[0]} {symbol} {pair[1]}"
        names = {"a": [1, 2], "b": (5, 4)}
        assert_same(eval(code, names | {"x": st.asarray(value, device=mesh)}), eval(code, names | {"x": value}))
        if symbol != "@":
            assert_same(eval(code, names | {"x": st.asarray(one, device=mesh)}), eval(code, names | {"x": one}))
    x = st.asarray(value, device=mesh)
    x += [10, 20]
    assert_same(x, np.array([13, 24]))
    assert_same(np.add([[1], [2]], x), np.add([[1], [2]], [13, 24]))
    assert_same(np.array([x[0].item()]) + x[:1], np.array([26]))
    with pytest.raises(st.ShapeError, match="multiply: nested lists of different lengths"):
        x * [[1], [2, 3]]
    with pytest.raises(st.ArgumentTypeError, match="multiply: a list of tensors is not one array"):
        [x, x] * x
    with pytest.raises(st.ArgumentTypeError, match="multiply"):
        ["a", "b"] * x


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.copy()]
)
def test_copies_of_scalars_are_scalars_and_of_arrays_arrays(again: Any, backend: str) -> None:
    value, x = make(backend)
    for scalar in (x.sum(), x[2, 1], x[2, 1] + 1, st.max(x)):
        before = scalar.item()
        kept = made = again(scalar)
        made += 1
        assert (kept.item(), made.item()) == (before, before + 1)
        assert_same(again(kept), np.float32(before))
    for whole in (st.zeros((), device=x.device), x[2, 1, ...], x.reshape(-1)[3:4].reshape(()), np.copy(x.sum()),
                  st.asarray(x.sum(), copy=True)):  # fmt: skip
        before = whole.item()
        kept = made = again(whole)
        made += 1
        assert (kept.item(), made is kept, whole.item()) == (before + 1, True, before)
    assert_same(x, value, exact=True)


def test_results_without_dimensions_are_written_as_arrays(backend: str) -> None:
    """The array API has only arrays; SciPy writes NaN into the 0-d results of reductions."""
    value, x = make(backend)
    for make_scalar in (lambda x: x.sum(), st.max, lambda x: st.add(x.sum(), 1), lambda x: copy.copy(x.sum())):
        scalar, before = make_scalar(x), make_scalar(x).item()
        copies = [copy.copy(scalar), scalar.reshape(()), scalar + 0]
        scalar[scalar > np.inf] = 5
        assert scalar.item() == before
        scalar[st.isfinite(scalar)] = 7
        assert scalar.item() == 7
        kept = scalar
        scalar += 1
        scalar[...] = scalar * 2
        scalar.fill(scalar.item() + 1)
        assert kept.item() == 17
        assert [c.item() for c in copies] == [before] * 3
    assert_same(x, value, exact=True)


def test_an_element_that_was_read_is_not_written(backend: str) -> None:
    value, x = make(backend)
    for element in (x[2, 1], x[2, 1] + 1, x[0][1]):
        with pytest.raises(TypeError, match=r"one element of a tensor is a scalar, .* x\[index\] = value writes"):
            element[...] = 0
    assert_same(x, value, exact=True)


def test_iteration(backend: str) -> None:
    value, x = make(backend)
    for item, wanted in zip(x, value, strict=True):
        assert_same(item, wanted, exact=True)
    a, b = x[:2, 0]
    assert (a.item(), b.item()) == (value[0, 0], value[1, 0])
    for call in (len, iter):
        with pytest.raises(TypeError, match="no dimensions"):
            call(x[0, 0])
    assert value[0, 0] in [float(v) for v in x[:, 0]]


def test_transposes(backend: str) -> None:
    value, x = make(backend, (2, 3, 4))
    assert_same(x.T, value.T, exact=True)
    assert_same(x.mT, value.mT, exact=True)
    assert x.T.sharding.spec == st.P(None, None, "x")


@everywhere
def test_host_arrays_in_and_out(backend: str) -> None:
    value, x = make(backend)
    out = np.asarray(x)
    np.testing.assert_array_equal(out, value)
    assert not out.flags.writeable
    assert np.array(x).flags.writeable
    assert np.asarray(x, dtype="float64").dtype == np.float64
    with pytest.raises(ValueError, match="needs a copy"):
        np.asarray(x, dtype="float64", copy=False)
    assert x.tolist() == value.tolist()
    value[0, 0] = 99
    assert x[0, 0].item() != 99


def test_copies_and_pickles(backend: str) -> None:
    value, x = make(backend, spec=st.P(None, ("y", "x")))
    free = st.ones((3,))
    for y in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x)), copy.deepcopy({"a": [x]})["a"][0]):
        assert y is not x
        assert_same(y, value, exact=True)
        assert y.sharding == x.sharding
        assert y.committed
    assert not pickle.loads(pickle.dumps(free)).committed
    assert_same(pickle.loads(pickle.dumps(x[0, 0])), value[0, 0])


def test_pickles_travel_to_another_process(backend: str, tmp_path: Any) -> None:
    value, x = make(backend)
    (tmp_path / "x").write_bytes(pickle.dumps(x))
    load = f"x = pickle.load(open({str(tmp_path / 'x')!r}, 'rb')); print(x.sum().item(), x.sharding.spec)"
    code = f"import pickle{', tests.conftest' if backend == 'cupy' else ''}; {load}"  # of which there may be the double
    assert output_of(new_process("-c", code, **VARIABLES)) == f"{value.sum()} P('x')\n"


def test_repr_shows_layout_before_values(backend: str) -> None:
    _, x = make(backend)
    head, rest = repr(x).split("\n", 1)
    assert head == f"ShardedTensor(shape=(10, 3), dtype=float32, sharding=P('x') on Mesh(x=2, y=2; {backend}:0..3))"
    assert rest.count("[") == 11
    pinned = st.reshard(x, x.sharding.with_memory_kind("pinned_host"))
    assert ", pinned_host)" in repr(pinned)
    assert (pinned + 1).sharding.memory_kind == "pinned_host"
    assert repr(st.zeros((0, 3))).endswith("[]")
    assert str(x) == str(np.asarray(x))


def test_lists_of_shards_have_one_expression_for_each(backend: str) -> None:
    d = st.devices(backend)
    assert repr(st.shard(np.arange(5), devices=d[:3])) == (
        f"[ShardedTensor([0, 1], device={d[0]}), ShardedTensor([2, 3], device={d[1]}), "
        f"ShardedTensor([4], device={d[2]})]"
    )
    x = st.asarray(np.ones((2, 2), "float32"), device=d[1])
    assert repr(x) == f"ShardedTensor([[1., 1.],\n               [1., 1.]], dtype=float32, device={d[1]})"
    assert repr(x.sum()) == f"ShardedTensor(4., dtype=float32, device={d[1]})"
    assert repr(st.zeros((0, 3), device=d[0])) == f"ShardedTensor([], shape=(0, 3), dtype=float64, device={d[0]})"
    large = repr(st.zeros((2000,), dtype="bool", device=d[0]))
    assert large == (f"ShardedTensor([False, False, False, ..., False, False, False], shape=(2000,), device={d[0]})")
    pinned = st.reshard(x, x.sharding.with_memory_kind("pinned_host"))
    assert repr(pinned).endswith(f"device={d[1]}, pinned_host)")


class Result(NamedTuple):
    statistic: Any
    count: int


@dataclasses.dataclass
class Fit:
    slope: Any


def test_results_without_dimensions_are_legible_in_containers(backend: str) -> None:
    x = st.device_put(np.arange(6.0), mesh_of((2, 2), backend))
    total = f"ShardedTensor(15., device=Mesh(x=2, y=2; {backend}:0..3))"
    assert repr(x[0]) == total.replace("15", "0")
    assert not any(
        "\n" in repr(y) for y in (st.zeros((), dtype="float32"), st.asarray(1j), x[0, ...], st.asarray(True))
    )
    s = x.sum()
    assert repr([s, (s,), {"s": s}]) == f"[{total}, ({total},), {{'s': {total}}}]"
    assert (repr(Result(s, 6)), repr(Fit(s))) == (f"Result(statistic={total}, count=6)", f"Fit(slope={total})")
    few = st.reshard(x.astype("float32").sum(), s.sharding.with_memory_kind("pinned_host"))
    assert repr(few) == total.replace("15.", "15., dtype=float32").replace("))", "), pinned_host)")


def test_str_is_what_numpy_prints(backend: str) -> None:
    value = np.arange(200 * 300.0).reshape(200, 300)
    x = st.device_put(value, mesh_of((4,), backend))
    with st.transfers() as log:
        assert str(x) == f"{x}" == str(value)
    assert log.bytes == 2 * 49 * 8
    assert str(st.sum(x)) == str(value.sum())
    assert str(x[:0]) == "[]"
    st.device_put(x, st.devices(backend)[0], donate=True)
    assert str(x) == repr(x)
    assert str(x).endswith("<donated>")


def test_python_rounds_an_element(backend: str) -> None:
    x = st.device_put(np.array([1.25, -2.625, 7.0]), mesh_of((3,), backend))
    y = x[1]
    assert (round(y, 2), round(y), math.trunc(y), math.floor(y), math.ceil(y)) == (-2.62, -3, -2, -3, -2)
    assert [type(n) for n in (round(y, 2), round(y), math.trunc(y))] == [float, int, int]
    big = st.asarray(2**62 + 1)
    assert (round(big), math.trunc(big), math.floor(big), math.ceil(big)) == (2**62 + 1,) * 4
    for function in (round, math.trunc, math.floor, math.ceil):
        with pytest.raises(st.ArgumentTypeError, match=r"the tensor has shape \(3,\)"):
            function(x)


def test_repr_of_large_tensors_reads_the_corners_alone(backend: str) -> None:
    value = np.arange(200 * 300.0).reshape(200, 300)
    x = st.device_put(value, mesh_of((4,), backend))
    with st.transfers() as log:
        text = repr(x)
    assert log.bytes == 49 * 8
    assert text.split("\n", 1)[1] == str(value)


def test_numpy_functions_run_here_or_say_so(backend: str) -> None:
    value, x = make(backend)
    assert_same(np.exp(x), np.exp(value))
    assert_same(np.arctan2(x, value), np.arctan2(value, value))
    assert_same(value + x, value + value)
    assert_same(np.float64(2) * x, np.float64(2) * value)
    assert_same(np.sum(x, axis=0), np.sum(value, axis=0))
    assert_same(np.concatenate([x, value]), np.concatenate([value, value]))
    assert (np.shape(x), np.ndim(x), np.size(x)) == ((10, 3), 2, 30)
    with pytest.raises(TypeError, match=r"numpy\.busday_offset: has no sharded form"):
        np.busday_offset(x, 1)


@everywhere
def test_methods(backend: str) -> None:
    value, x = make(backend)
    assert_same(x.sum(0), value.sum(0))
    assert_same(x.mean(axis=1, keepdims=True), value.mean(1, keepdims=True))
    assert_same(x.clip(-1, 1), value.clip(-1, 1))
    assert_same(x.clip(-1), value.clip(-1))
    assert_same(x.clip(max=0), value.clip(max=0))
    assert_same(x.argmin(1), value.argmin(1))
    assert_same(x.reshape(5, -1), value.reshape(5, -1))
    assert_same(x.reshape((30,)), value.reshape(30))
    assert_same(x[None].squeeze(0), value)
    assert_same(x.astype("int16"), value.astype("int16"))
    assert_same(x.round(), value.round())
    with pytest.raises(TypeError):
        x.sum(axes=0)


def test_unknown_operands_are_left_to_python(backend: str) -> None:
    _, x = make(backend)
    for other in ("a", None, object(), {1: 2}):
        with pytest.raises(TypeError):
            x + other
        with pytest.raises(TypeError):
            other + x
    assert (x == None) is False  # noqa: E711 - what Python falls back to


@everywhere
def test_asarray_and_device_put(backend: str) -> None:
    mesh = mesh_of((2,), backend)
    assert_same(st.asarray([[1, 2], [3, 4]], device=mesh), np.array([[1, 2], [3, 4]]))
    assert_same(st.asarray(3, device=mesh), np.array(3))
    assert_same(st.asarray(np.float32(3), dtype="int8", device=mesh), np.array(3, "int8"))
    x = st.asarray([1.5, 2.5], device=mesh)
    assert st.asarray(x) is x
    assert_same(st.asarray(x, dtype="int32", device=st.devices(backend)[3]), np.array([1, 2], "int32"))
    tree = st.device_put({"w": np.ones(2), "b": (1.0, x)}, mesh)
    assert_same(tree["b"][0], np.array(1.0))
    assert tree["w"].device == tree["b"][1].device == mesh
    assert st.device_put(x) is x
    assert not st.device_put(np.ones(2)).committed
    raw = x.addressable_shards[0].data
    if backend != "numpy":
        assert st.asarray(raw).device == mesh.flat[0]
        assert_same(st.asarray(raw) + 1, np.array([2.5]))
    shared = np.ones(4)
    if backend == "numpy":
        assert np.shares_memory(np.asarray(st.asarray(shared, copy=False)), shared)
        assert shared.flags.writeable
    else:
        with pytest.raises(ValueError, match="does not share the host's memory"):
            st.asarray(shared, copy=False, device=mesh)
        for device in (None, mesh.flat[0]):
            with pytest.raises(ValueError, match=r"copy=False, and an array of the backend .* is copied"):
                st.asarray(raw, copy=False, device=device)


@everywhere
def test_donation_of_device_put(backend: str) -> None:
    value, x = make(backend)
    y = st.device_put(x, st.devices(backend)[0], donate=True)
    assert_same(y, value)
    with pytest.raises(st.DonatedError, match="donated by device_put"):
        x + 1
    with pytest.raises(st.DonatedError):
        x.addressable_shards
    assert (x.shape, x.is_donated) == ((10, 3), True)


def test_what_leaves_cannot_be_written() -> None:
    value, x = make("numpy")
    views = [x, x.T, x[1:], x.reshape(-1), st.reshard(x, x.sharding.with_spec(st.P())), *st.shard(x)]
    for v in views:
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(v)[...] = 0
    assert_same(x, value, exact=True)


@everywhere
def test_arrays_of_scalars_can_be_written_as_numpys(backend: str) -> None:
    value, x = make(backend)
    for scalar in (st.sum(x), x[0, 1]):
        wanted = float(scalar)
        array = np.asarray(scalar)
        array *= 2
        assert (float(array), float(scalar), np.asarray(scalar).item()) == (2 * wanted, wanted, wanted)
    assert_same(x, value, exact=True)


def exports(x: st.ShardedTensor) -> dict[str, list[np.ndarray]]:
    """The arrays that show a tensor's memory outside of the library, by how they come out."""
    inside: list[np.ndarray] = []
    axis = x.sharding.mesh.axis_names[0]
    parts = st.shard(x) if x.ndim else [st.device_put(x, x.sharding.mesh.flat[0])]
    st.pmap(inside.append, parts)
    st.shard_map(lambda a: inside.append(a) or a, mesh=x.sharding.mesh, in_specs=st.P(), out_specs=st.P())(x)
    st.shard_map(
        lambda a: inside.append(st.all_gather(a, axis)) or a, mesh=x.sharding.mesh, in_specs=st.P(), out_specs=st.P()
    )(x)
    return {
        "np.asarray": [np.asarray(x), np.asarray(st.asarray(x, copy=True)), x.__array__(), np.asarray(x[...])],
        "views": [np.asarray(x.T), np.asarray(x.reshape(-1)[::-1]), np.asarray(x[None])],
        "shards": [s.data for s in x.addressable_shards],
        "inside": inside,
        "results": [np.asarray(r) for r in st.pmap(lambda a: a[...], parts)],
    }


@pytest.mark.parametrize("backend", READ_ONLY)
@pytest.mark.parametrize("dtype", ["float64", "complex64", "float16", "bool", "datetime64[s]", "timedelta64[ns]"])
@pytest.mark.parametrize("shape", [(10, 3), (2, 1), (), (0, 3)], ids=str)
def test_what_leaves_cannot_be_made_writable(shape: tuple[int, ...], dtype: str, backend: str) -> None:
    value = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    x = st.device_put(value, mesh_of((2,), backend))
    for how, arrays in exports(x).items():
        assert arrays, how
        for export in arrays:
            assert export.dtype == value.dtype, how
            if how == "results" and not shape:  # They are scalars, of which NumPy's arrays are new ones.
                export[...] = value
                continue
            assert type(export) is not np.ndarray or export.__array_interface__["data"][1], how
            for view in (export, export.T, export.view(np.ndarray)):
                with pytest.raises(ValueError, match="cannot set WRITEABLE flag to True"):
                    view.flags.writeable = True
                with pytest.raises(ValueError, match="cannot set WRITEABLE flag to True"):
                    view.setflags(write=True)
    assert_same(x, value, exact=True)


@pytest.mark.parametrize("backend", ["numpy"])
def test_exports_share_the_memory_and_results_that_view_it_are_not_copied(backend: str) -> None:
    value, x = make(backend, spec=st.P(("x", "y")))
    whole, parts = np.asarray(x), st.shard(x)
    for export in (whole.T, np.asarray(x[1:]), *[s.data for s in x.addressable_shards]):
        assert np.shares_memory(whole, export)
        assert export.strides in (whole.strides, whole.strides[::-1])
    with st.transfers() as log:
        back = st.unshard(st.pmap(lambda a: a, parts))
        assert np.shares_memory(np.asarray(back), whole)
    assert log.copied == 0
    back += 1  # into memory of its own
    assert_same(x, value, exact=True)
    assert_same(back, value + 1, exact=True)


@pytest.mark.parametrize(("call", "kind", "words"), [
    (lambda x: x + np.ones((4, 3)), ValueError, "add: x1 has shape (10, 3) and x2 has shape (4, 3), which do not fit: size 10 in dimension 0"),
    (lambda x: st.sum(x, axis=2), st.AxisError, "sum: axis 2 is out of range for 2 dimensions; wanted -2 to 1"),
    (lambda x: st.sum(x, axis=(0, -2)), st.AxisError, "sum: axis -2 occurs twice"),
    (lambda x: st.sum(x, axis=0.5), TypeError, "sum: axis 0.5 is a float"),
    (lambda x: st.max(x[:0]), ValueError, "max: x has shape (0, 3)"),
    (lambda x: st.argmax(x[:0], axis=0), ValueError, "argmax: x has shape (0, 3)"),
    (lambda x: st.sum(x, axis=True), TypeError, "sum: axis True is a bool"),
    (lambda x: st.sum(x, dtype=object), TypeError, "sum: dtype object cannot be sharded"),
    (lambda x: st.prod(x, dtype="S3"), TypeError, "prod: dtype |S3 cannot be sharded"),
    (lambda x: st.argmax(x, axis=(0,)), TypeError, "argmax: axis (0,) is a tuple"),
    (lambda x: st.argmin(x, axis=False), TypeError, "argmin: axis False is a bool"),
    (lambda x: st.expand_dims(x, axis=None), TypeError, "expand_dims: axis None is a NoneType"),
    (lambda x: st.permute_dims(x, None), TypeError, "permute_dims: axis None is a NoneType"),
    (lambda x: st.moveaxis(x, None, 0), TypeError, "moveaxis: axis None is a NoneType"),
    (lambda x: st.moveaxis(x, 0, None), TypeError, "moveaxis: axis None is a NoneType"),
    (lambda x: st.stack([x, x], axis=None), TypeError, "stack: axis None is a NoneType"),
    (lambda x: st.stack([x, x], axis=(1,)), TypeError, "stack: axis (1,) is a tuple"),
    (lambda x: st.concat([x, x], axis=(1,)), TypeError, "concat: axis (1,) is a tuple"),
    (lambda x: st.unshard([x, x], None), TypeError, "unshard: axis None is a NoneType"),
    (lambda x: st.unstack(x, axis=None), TypeError, "unstack: axis None is a NoneType"),
    (lambda x: st.unstack(x, axis=(0,)), TypeError, "unstack: axis (0,) is a tuple"),
    (lambda x: st.vecdot(x, x, axis=None), TypeError, "vecdot: axis None is a NoneType"),
    (lambda x: st.shard(x, None), TypeError, "shard: axis None is a NoneType"),
    (lambda x: st.roll(x, 3, axis=1.0), TypeError, "roll: axis 1.0 is a float"),
    (lambda x: st.eye(3, k="a"), TypeError, "eye: k is 'a'"),
    (lambda x: x @ x, ValueError, "matmul: x1 has shape (10, 3) and x2 has shape (10, 3)"),
    (lambda x: st.matmul(x, 2.0), ValueError, "matmul: x2 has no dimensions"),
    (lambda x: x & x, TypeError, "bitwise_and: does not take float32 and float32"),
    (lambda x: x[10], IndexError, "getitem: index 10 is out of bounds for axis 0 with size 10"),
    (lambda x: x[0, 0, 0], IndexError, "getitem: 3 indices for a tensor of 2 dimensions"),
    (lambda x: x[..., ...], IndexError, "one ellipsis"),
    (lambda x: x[..., [0], ...], IndexError, "getitem: an index can have one ellipsis"),
    (lambda x: x["a"], IndexError, "index 'a' in dimension 0 is a str"),
    (lambda x: x[::0], ValueError, "slice step cannot be zero"),
    (lambda x: x[1.0], IndexError, "is a float"),
    (lambda x: x.reshape(7), ValueError, "reshape: x has 30 elements and shape (7,) needs 7"),
    (lambda x: x.reshape(-1, -1), ValueError, "reshape: shape (-1, -1) has -1 more than once"),
    (lambda x: x.reshape(-2, -15), ValueError, "reshape: shape (-2, -15) has a negative size"),
    (lambda x: x.reshape(7, -1), ValueError, "reshape: x has 30 elements, which leaves no whole size for -1"),
    (lambda x: x.reshape("a"), TypeError, "reshape: shape is"),
    (lambda x: st.reshape(x.T, (30,), copy=False), ValueError, "reshape: copy=False"),
    (lambda x: st.permute_dims(x, (0,)), ValueError, "permute_dims: axes=(0,) names 1 of x's 2 dimensions"),
    (lambda x: st.permute_dims(x, (0, 0)), ValueError, "permute_dims: axis 0 occurs twice"),
    (lambda x: st.matrix_transpose(x[0]), ValueError, "matrix_transpose: x has 1 dimension"),
    (lambda x: st.moveaxis(x, (0, 1), 0), ValueError, "moveaxis: source has 2 axes and destination 1"),
    (lambda x: st.squeeze(x, 0), ValueError, "squeeze: dimension 0 of x has size 10"),
    (lambda x: st.expand_dims(x, axis=4), st.AxisError, "expand_dims: axis 4"),
    (lambda x: st.broadcast_to(x, (3,)), ValueError, "broadcast_to: x has shape (10, 3), which does not broadcast to (3,)"),
    (lambda x: st.roll(x, (1, 2, 3), axis=(0, 1)), ValueError, "roll: 3 shifts for 2 axes"),
    (lambda x: st.roll(x, "a"), TypeError, "roll: shift is 'a'; wanted an integer"),
    (lambda x: st.flip(x, axis=2), st.AxisError, "flip: axis 2"),
    (lambda x: st.sum(x[0, 0], axis=0), st.AxisError, "sum: axis 0 is out of range for an array without dimensions"),
    (lambda x: st.pmap(np.sin, 3.0), st.AxisError, "pmap: argument 0: axis 0 is out of range for an array without dimensions"),
    (lambda x: st.concat(x, x), TypeError, "concat: axis is a ShardedTensor; wanted a Python value, such as a number"),
    (lambda x: np.add(x, 1, out=x.copy(), where=np.ones(4, bool)), ValueError, "add: shapes (4,), (10, 3), (), (10, 3) of the operands"),
    (lambda x: np.add(x, 1, out=np.zeros(4, "float32")), ValueError, "add: "),
    (lambda x: st.with_sharding_constraint(x, st.P("z")), ValueError, "with_sharding_constraint: P('z') is a spec without a mesh"),
    (lambda x: st.transpose(x, (0, 0)), ValueError, "transpose: axis 0 occurs twice"),
    (lambda x: st.tensordot(x, x, axes=3), st.AxisError, "tensordot: axes=3"),
    (lambda x: st.tensordot(x, x, axes=((0,), (0, 1))), ValueError, "tensordot: axes has 1 axis of x1 and 2 of x2"),
    (lambda x: st.vecdot(x, x[0, 0]), ValueError, "vecdot: an operand has no dimensions"),
    (lambda x: st.astype(x, "nonsense"), TypeError, "nonsense"),
    (lambda x: st.astype(x, "S3"), TypeError, "cannot be sharded"),
    (lambda x: st.exp("a"), TypeError, "exp: 'a' is a str"),
    (lambda x: st.exp([1.0]), TypeError, "exp: [1.0] is a list"),
    (lambda x: st.exp(None), TypeError, "exp: x is None"),
    (lambda x: st.add(x, np.array(["a"])), TypeError, "add: dtype <U1 cannot be sharded"),
    (lambda x: st.zeros((2, -1)), ValueError, "zeros: shape (2, -1) has a negative size"),
    (lambda x: st.zeros("a"), TypeError, "zeros: shape is 'a'"),
    (lambda x: st.zeros(2, dtype="nonsense"), TypeError, "zeros: dtype is 'nonsense'"),
    (lambda x: st.zeros(2, dtype=object), TypeError, "zeros: dtype object cannot be sharded"),
    (lambda x: st.zeros(2, device="cpu"), TypeError, "zeros: 'cpu' is a str; wanted a Device, a Mesh, a NamedSharding or a P"),
    (lambda x: st.zeros(2, device=st.NamedSharding(x.device, st.P(None, "x"))), ValueError, "zeros: P(None, 'x') has 2 dimensions"),
    (lambda x: st.full((2,), np.ones(2)), ValueError, "full: fill_value has shape (2,)"),
    (lambda x: st.arange(0, 5, 0), ValueError, "arange: step is 0"),
    (lambda x: st.arange("a"), TypeError, "arange: start is a str"),
    (lambda x: st.arange(float("inf")), ValueError, "arange: "),
    (lambda x: st.eye(-1), ValueError, "eye: shape (-1, -1)"),
    (lambda x: st.asarray([[1], [1, 2]]), ValueError, "asarray: nested lists of different lengths"),
    (lambda x: st.asarray([x, x[1:]]), ValueError, "asarray: array 1 has shape"),
    (lambda x: st.asarray([x, None]), TypeError, "asarray: None is not an array"),
    (lambda x: st.asarray([x, x], copy=False), ValueError, "asarray: copy=False, and a list has no memory to share"),
    (lambda x: st.asarray({"a": 1}), TypeError, "asarray: "),
    (lambda x: st.asarray(["a"]), TypeError, "asarray: dtype <U1 cannot be sharded"),
    (lambda x: st.device_put(x, "gpu"), TypeError, "device_put: 'gpu' is a str"),
    (lambda x: st.device_put(x[0, 0], x.sharding), ValueError, "device_put: P('x') has 1 dimension and the array has 0"),
    (lambda x: st.device_put(x, x.sharding, donate=True, may_alias=True), ValueError, "device_put: donate=True"),
    (lambda x: st.reshard(x, st.P("x")), ValueError, "reshard: P('x') is a spec without a mesh, and no mesh is in use"),
    (lambda x: st.stack([x, None]), TypeError, "stack: arrays[1] is None"),
    (lambda x: st.concat([None]), TypeError, "concat: arrays[0] is None"),
    (lambda x: st.unshard([None]), TypeError, "unshard: arrays[0] is None"),
    (lambda x: st.asarray(None), TypeError, "asarray: None is not an array"),
    (lambda x: st.device_put(None, x.device), TypeError, "device_put: None is not an array"),
    (lambda x: st.reshard(None, x.device), TypeError, "reshard: None is not an array"),
    (lambda x: st.smap(lambda a: a, None), TypeError, "smap: None is not an array"),
    (lambda x: st.where(x > 0, x, None), TypeError, "where: x2 is None"),
    (lambda x: x.sum(axis=True), TypeError, "sum: axis True is a bool"),
    (lambda x: st.device_put(np.ones(2), x.device, donate=True), ValueError, "device_put: donate=True gives away the memory of tensors"),
    (lambda x: st.device_put([x, np.ones(2)], x.device, donate=True), ValueError, "device_put: donate=True gives away the memory of tensors"),
    (lambda x: st.reshard(np.ones(2), x.device, donate=True), ValueError, "reshard: donate=True gives away the memory of tensors"),
    (lambda x: st.pmap(np.sin, [x, np.ones(2)], donate=True), ValueError, "pmap: donate=True gives away the memory of tensors"),
    (lambda x: st.pmap(np.sin, x, donate=True), ValueError, "pmap: donate=True gives away the memory of the tensors in lists"),
    (lambda x: x.to_device(x.device, stream=3), ValueError, "to_device: stream must be None"),
    (lambda x: st.where(x > 0, x, np.ones(7)), ValueError, "where: "),
    (lambda x: st.result_type("nonsense"), TypeError, "result_type: "),
])  # fmt: skip
def test_errors_say_what_came_and_what_was_wanted(call: Any, kind: type[Exception], words: str, backend: str) -> None:
    value, x = make(backend)
    with pytest.raises(kind) as caught:
        call(x)
    assert words in str(caught.value)
    assert isinstance(caught.value, st.ShardTensorError)
    assert_same(x, value, exact=True)


def test_plans_do_not_pile_up(backend: str) -> None:
    x = st.arange(6000, device=mesh_of((2,), backend))
    for i in range(5000):
        x[i]
    assert _cached_plan.cache_info().currsize <= 4096


@everywhere
def test_many_threads_share_plans_and_tensors(backend: str) -> None:
    value, x = make(backend, (64, 3))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(30):
                n = (seed * 7 + i) % 60
                np.testing.assert_array_equal(np.asarray(x[n:] + x[n:] * 2), value[n:] * 3)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_threads_share_one_write_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two writers would hold different locks."""
    second, made = threading.Event(), list[WriteState]()

    class Slow(WriteState):
        def __init__(self, generation: int) -> None:
            super().__init__(generation)
            made.append(self)
            if len(made) > 1:
                second.set()
            second.wait(0.1)  # It ends only without a lock.

    x = st.ones((4,))
    monkeypatch.setattr(handles, "WriteState", Slow)
    with ThreadPoolExecutor(2) as pool:
        first, other = [f.result(10) for f in [pool.submit(handles.write_state_of, x) for _ in range(2)]]
    assert [first] == [other] == made


def test_a_donation_during_a_write_is_not_lost() -> None:
    x = st.ones((4,))
    donor = threading.Thread(target=handles.mark_donated, args=(x, "smap"))
    with handles.write_state_of(x).lock:
        before = x._storage
        donor.start()
        donor.join(0.1)  # It ends only without the lock.
        x._storage = before  # as a write does at its end
    donor.join(10)
    assert x.is_donated


@pytest.mark.slow
def test_many_reductions_neither_hang_nor_grow() -> None:
    x = st.ones((64,), dtype="float32", device=mesh_of((8,), "numpy"))
    tracemalloc.start()
    for _ in range(1000):  # fills Python's free lists, too
        x.sum()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(drawn(100_000, fast=10_000)):
        last = x.sum()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert last.item() == 64
    assert after - before < 20_000


def test_a_plan_serves_only_calls_like_the_one_it_was_made_for(backend: str) -> None:
    value, x = make(backend)
    assert_same(st.sum(x, axis=1), value.sum(axis=1))
    with pytest.raises(TypeError, match=r"axis 1\.0 is a float"):
        st.sum(x, axis=1.0)
    assert st.full((2,), 1).dtype != st.full((2,), 1.0).dtype != st.full((2,), True).dtype
    assert st.arange(3).dtype != st.arange(3.0).dtype
    everywhere = st.ones((5, 2))
    with st.use_mesh(mesh_of((2,), backend)) as mesh:
        assert st.ones((5, 2)).device == mesh
        assert st.exp(np.ones((5, 2))).device == mesh
    assert st.ones((5, 2)).device == everywhere.device != mesh
    assert st.exp(np.ones((5, 2))).device == everywhere.device


@everywhere
def test_pieces_are_joined_under_many_threads(backend: str) -> None:
    value = np.arange(4000.0)
    failures: list[BaseException] = []
    for _ in range(drawn(40, fast=15)):
        x = st.unshard(st.pmap(lambda p: p + 1, st.shard(value, devices=st.devices(backend))))
        together = threading.Barrier(6)

        def use(x: st.ShardedTensor = x, together: threading.Barrier = together) -> None:
            try:
                together.wait(10)
                np.testing.assert_array_equal(np.asarray(x * 2), (value + 1) * 2)
                assert x.addressable_shards[3].data.shape == (500,)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=use) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


AS_NUMPY: dict[str, Callable[[Any], Any]] = {
    "roll": lambda x: np.roll(x, 5, 0),
    "roll, axes": lambda x: np.roll(x, (1, 2), (0, 1)),
    "sum, dtype": lambda x: np.sum(x, 0, "f4"),
    "sum, keepdims": lambda x: np.sum(x, 0, None, None, True),
    "sum, names": lambda x: np.sum(a=x, axis=0, keepdims=True),
    "sum, defaults": lambda x: np.sum(x, None, None, None, False),
    "prod": lambda x: np.prod(x, 1, "f8", None, True),
    "mean": lambda x: np.mean(x, (0, 1), None, None, True),
    "std": lambda x: np.std(x, 0, None, None, 1),
    "var": lambda x: np.var(a=x, ddof=1, axis=1),
    "max": lambda x: np.max(x, 1, None, True),
    "amax": lambda x: np.amax(x, 1),
    "amin": lambda x: np.amin(x, axis=0),
    "any": lambda x: np.any(x, 0, None, True),
    "all": lambda x: np.all(a=x, axis=0),
    "argmax": lambda x: np.argmax(x, 1, keepdims=True),
    "around": lambda x: np.around(x),
    "round": lambda x: np.round(x, 0),
    "clip": lambda x: np.clip(x, 2, 5),
    "clip, names": lambda x: np.clip(x, a_min=2, a_max=None),
    "clip, one": lambda x: np.clip(x, None, 5),
    "reshape": lambda x: np.reshape(x, (4, 3), "C"),
    "concatenate": lambda x: np.concatenate([x, x], 1),
    "stack": lambda x: np.stack([x, x], 1),
    "zeros_like": lambda x: np.zeros_like(x, "i4"),
    "ones_like": lambda x: np.ones_like(x, None, "K", True, None),
    "full_like": lambda x: np.full_like(x, 3, "i4"),
    "expand_dims": lambda x: np.expand_dims(x, 1),
    "flip": lambda x: np.flip(x, 1),
    "squeeze": lambda x: np.squeeze(x[:1], 0),
    "tensordot": lambda x: np.tensordot(a=x, b=x, axes=2),
    "tensordot, position": lambda x: np.tensordot(x, x, 2),
    "vecdot": lambda x: np.vecdot(x, x, axis=0),
    "moveaxis": lambda x: np.moveaxis(x, source=0, destination=1),
    "broadcast_to": lambda x: np.broadcast_to(array=x, shape=(2, 3, 4)),
    "where": lambda x: np.where(x > 3, x, 0),
    "transpose": lambda x: np.transpose(a=x),
    "transpose, axes": lambda x: np.transpose(x, axes=(1, 0)),
    "swapaxes": lambda x: np.swapaxes(a=x, axis1=0, axis2=1),
    "ravel": lambda x: np.ravel(x, "C"),
    "copy": lambda x: np.copy(a=x),
    "imag": lambda x: np.imag(val=x),
    "size": lambda x: np.full(2, np.size(x, 1)),
    "shape": lambda x: np.array(np.shape(a=x)),
    "x.sum": lambda x: x.sum(0, None, None, True),
    "x.std": lambda x: x.std(0, None, None, 1),
    "x.std, ddof": lambda x: x.std(ddof=1),
    "x.var, ddof": lambda x: x.var(axis=0, ddof=1),
    "x.clip": lambda x: x.clip(2, 5),
    "x.clip, out": lambda x: x.clip(2, out=np.zeros((3, 4))),
    "sum, no keepdims": lambda x: np.sum(x, 0, keepdims=np._NoValue),
    "x.argmax": lambda x: x.argmax(1, keepdims=True),
    "x.round": lambda x: x.round(0),
    "out": lambda x: np.sum(x, 0, None, np.zeros(4)),
}


@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_cumulative_functions_of_numpy(name: str) -> None:
    x = np.arange(1.0, 7).reshape(2, 3)
    for axis in (None, 0, 1):
        np.testing.assert_array_equal(getattr(np, name)(st.asarray(x), axis), getattr(np, name)(x, axis))


@pytest.mark.parametrize("name", AS_NUMPY)
def test_arguments_are_given_as_numpy_takes_them(name: str, backend: str) -> None:
    value = array((3, 4), "float64", 1)
    found, wanted = (np.asarray(AS_NUMPY[name](x)) for x in (st.device_put(value, mesh_of((2,), backend)), value))
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


MORE_ARGUMENTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "argpartition": lambda x: (1,), "astype": lambda x: ("f4",), "broadcast_to": lambda x: ((4, 4),), "clip": lambda x: (0, 1),
    "digitize": lambda x: (np.arange(3),), "expand_dims": lambda x: (0,), "isin": lambda x: (x,),
    "nanpercentile": lambda x: (50,), "nanquantile": lambda x: (0.5,), "partition": lambda x: (1,),
    "percentile": lambda x: (50,), "quantile": lambda x: (0.5,), "take": lambda x: ([0, 2],),
    "take_along_axis": lambda x: (np.ones((4, 1), int),), "full_like": lambda x: (1,), "moveaxis": lambda x: (0, 1),
    "reshape": lambda x: ((2, 8),), "roll": lambda x: (1,), "tensordot": lambda x: (x,),
    "append": lambda x: (x,), "delete": lambda x: (1,), "insert": lambda x: (1, 5.0), "pad": lambda x: (1,),
    "repeat": lambda x: (2,), "resize": lambda x: ((2, 3),), "rollaxis": lambda x: (1,), "swapaxes": lambda x: (0, 1),
    "tile": lambda x: (2,), "vdot": lambda x: (x,),
}  # fmt: skip
FUNCTIONS = {n for n in dir(np) if n in OPS and hasattr(getattr(np, n), "__wrapped__")} - {
    "unstack",
    "where",
    "put",
    "cumulative_sum",
    "cumulative_prod",
    "cross",  # of vectors of three elements
    "linspace",
    *("array_split", "split", "hsplit", "vsplit", "dsplit", "broadcast_arrays", "meshgrid"),  # several results
    "bincount",
    "searchsorted",
    "histogram",
    "nonzero",
    "unique_all",
    "unique_counts",
    "unique_inverse",
}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_every_position_of_numpys_functions_is_known(name: str) -> None:
    """Every parameter that NumPy accepts by position is accepted by position."""
    function = getattr(np, name)
    parameters = inspect.signature(function).parameters.values()
    defaults = [p.default for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]

    def called(x: Any) -> Any:
        first = ([x, x] if name in ("concat", "stack") else x, *MORE_ARGUMENTS.get(name, lambda x: ())(x))
        return function(*first, *defaults[len(first) :])

    made, wanted = called(st.ones((4, 4))), called(np.ones((4, 4)))
    if name == "empty_like":  # whose elements may be anything
        made.fill(0)
        wanted.fill(0)
    assert_same(made, wanted)


WRONG_AS_NUMPY = [
    (
        lambda x: np.pad(x, 1, "reflect", reflect_type="odd"),
        "numpy.pad: has no sharded form here with reflect_type='odd'",
    ),
    (lambda x: np.copy(x, "Z"), "numpy.copy: order is 'Z'"),
    (lambda x: np.clip(x, 1, 2, min=3), "min is given twice"),
    (lambda x: x.sum(0, axis=1), "axis is given by position and by name"),
    (lambda x: x.sum(0, 1, 2, 3, 4, 5, 6, 7), "9 arguments by position; it takes 7: a, axis, dtype, out"),
]


@pytest.mark.parametrize(("call", "words"), WRONG_AS_NUMPY)
def test_what_numpy_takes_and_an_operator_lacks_is_named(call: Any, words: str) -> None:
    with pytest.raises(st.ArgumentTypeError, match=words):
        call(st.ones((3, 4)))


def test_one_element_takes_a_format(backend: str) -> None:
    x = st.device_put(np.arange(6.0).reshape(2, 3), mesh_of((2,), backend))
    assert f"{st.sum(x):.3f}|{x[1, 2]:6.1f}|{st.asarray(7):03d}" == "15.000|   5.0|007"
    assert f"{x}" == str(x)
    with pytest.raises(st.ArgumentTypeError, match=r"format: '\.3f' of a tensor of shape \(2, 3\)"):
        f"{x:.3f}"


def test_a_view_of_a_donated_tensor_moves_nothing(backend: str) -> None:
    x = st.device_put(np.arange(24.0).reshape(4, 6), st.NamedSharding(mesh_of((4,), backend), st.P(None, "x")))
    view = x.ravel()
    st.reshard(x, st.NamedSharding(mesh_of((4,), backend), st.P("x")), donate=True)
    for use in (np.asarray, lambda v: v + 1, lambda v: st.reshard(v, v.sharding)):
        with st.transfers() as log, st.transfer_guard("disallow"), pytest.raises(st.DonatedError):
            use(view)
        assert len(log) == 0


def test_a_roll_without_an_axis_is_a_tensor_of_its_own(backend: str) -> None:
    """Donating it donates its views."""
    x = st.device_put(np.arange(24.0).reshape(4, 6), st.NamedSharding(mesh_of((4,), backend), st.P("x")))
    rolled = st.roll(x, 5)
    view = rolled[:]
    assert_same(rolled, np.roll(np.arange(24.0).reshape(4, 6), 5), exact=True)
    st.reshard(rolled, rolled.sharding, donate=True)
    assert view.is_donated


def test_numpys_array_argument_may_come_last(backend: str) -> None:
    value = np.arange(6).reshape(2, 3)
    x = st.device_put(value, mesh_of((2,), backend))
    assert_same(np.transpose(axes=(1, 0), a=x), value.T)
    assert_same(np.swapaxes(axis1=0, a=x, axis2=1), value.T)


def test_python_scalars_are_weak_in_copyto(backend: str) -> None:
    x = st.zeros(4, dtype="uint8", device=mesh_of((2,), backend))
    np.copyto(x, 5)
    assert_same(x, np.full(4, 5, "uint8"), exact=True)
    with pytest.raises(OverflowError):
        np.copyto(x, 300)
    with pytest.raises(TypeError, match="copyto: float64 to uint8"):
        np.copyto(x, 2.5)
    y = st.zeros(4, dtype="float32", device=mesh_of((2,), backend))
    np.copyto(y, 2.5, casting="safe")
    assert_same(y, np.full(4, 2.5, "float32"), exact=True)
