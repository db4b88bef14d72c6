"""The list API: shard, unshard, stack, concat, to_batched_list."""

from __future__ import annotations

import logging
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from tests.conftest import Logged
from tests.draws import drawn
from tests.layouts import USABLE, array, assert_same, everywhere, mesh_of, meshes, shapes, specs


@hypothesis.settings(max_examples=drawn(60))
@hypothesis.given(data=some.data())
@pytest.mark.parametrize("name", USABLE)
def test_shard_and_back(name: str, data: Any) -> None:
    value = array(data.draw(shapes(1)), "float32", 1)
    axis = data.draw(some.integers(-value.ndim, value.ndim - 1))
    mesh = data.draw(meshes(name))
    x = (
        value
        if data.draw(some.booleans())
        else st.device_put(value, st.NamedSharding(mesh, data.draw(specs(mesh, value.ndim))))
    )
    devices = data.draw(some.lists(some.sampled_from(st.devices(name)), min_size=1, max_size=8, unique=True))
    parts = st.shard(x, axis, devices=devices)
    assert [p.device for p in parts] == devices
    for part, wanted in zip(parts, np.array_split(value, len(devices), axis), strict=True):
        assert_same(part, wanted, exact=True)
    with st.transfers() as log:
        whole = st.unshard(parts, axis)
    assert_same(whole, value, exact=True)
    assert (log.bytes, log.copied) == (0, 0)
    assert whole.sharding.mesh.flat == tuple(devices)
    assert_same(whole + 1, value + 1)


def test_shard_moves_only_what_is_elsewhere(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    x = st.zeros((8, 2), dtype="float32", device=mesh)
    with st.transfers() as log:
        parts = st.shard(x, devices=mesh)
    assert log.bytes == 0
    assert [p.device for p in parts] == list(mesh.flat)
    with st.transfers() as log:
        st.shard(x, axis=1, devices=mesh)
    assert log.bytes == 48  # columns 0 and 1 on devices 0 and 1, three quarters of each from elsewhere
    assert all(r.explicit for r in log)


def test_shard_without_devices_takes_the_default_mesh() -> None:
    x = st.zeros((3,), device=st.devices("checked")[0])
    assert [p.device for p in st.shard(x)] == st.devices()
    with st.use_mesh(mesh_of((2, 2), "checked")) as mesh:
        assert [p.device for p in st.shard(np.zeros(5))] == list(mesh.flat)
    assert x.shard(devices=st.devices("checked")[:2])[1].shape == (1,)


@everywhere
def test_unshard_of_ragged_lists_rebalances_and_says_so(backend: str, logged: Logged) -> None:
    values = [array((n, 2), "float64", n) for n in (1, 5, 0, 2)]
    parts = [st.device_put(v, d) for v, d in zip(values, st.devices(backend), strict=False)]
    with logged.at_level(logging.INFO, "shardtensor"), st.transfers() as log:
        whole = st.unshard(parts)
    assert_same(whole, np.concatenate(values), exact=True)
    assert log.bytes == 16 * 3  # the split rule wants 2, 2, 2, 2: row 1, and rows 4 and 5, leave the second device
    assert "rebalanced" in "".join(logged.messages)
    logged.messages.clear()
    with logged.at_level(logging.INFO, "shardtensor"):
        st.unshard(parts)
        st.unshard(st.shard(whole))
        st.unshard([parts[1], parts[1]])
    assert len(logged.messages) == 1  # each time that rows change their device, and only then


@everywhere
def test_stack_of_what_lives_apart(backend: str) -> None:
    devices = st.devices(backend)[:4]
    values = [np.full((2,), i, "float32") for i in range(10)]
    homes = [devices[k] for k, n in enumerate([3, 3, 2, 2]) for _ in range(n)]
    items = [st.device_put(v, d) for v, d in zip(values, homes, strict=True)]
    with st.transfers() as log:
        x = st.stack(items)
    assert log.bytes == 0
    assert x.sharding.spec == st.P("d")
    assert x.sharding.mesh.flat == tuple(devices)
    assert_same(x, np.stack(values), exact=True)
    with st.transfers() as log:
        y = st.stack(items, axis=1)
    assert log.bytes == 0
    assert y.sharding.spec == st.P(None, "d")
    assert_same(y, np.stack(values, axis=1), exact=True)
    swapped = [st.device_put(v, d) for v, d in zip(values, reversed(homes), strict=True)]
    assert_same(st.stack([*swapped, np.zeros(2, "float32")]), np.stack([*values, np.zeros(2, "float32")]))


def test_a_host_array_is_flattened_on_the_host(backend: str) -> None:
    """``concat(axis=None)`` puts it directly into the layout of the result, as ``concat(axis=0)`` does."""
    value, x = array((3, 3), "float32", 2), st.device_put(array((4, 3), "float32", 1), mesh_of((2,), backend))
    with st.transfers() as flat:
        made = st.concat([value, x, np.float32(2), 0.5], axis=None)
    with st.transfers() as straight:
        again = st.concat([value.reshape(-1), st.reshape(x, (-1,)), np.array([2], "f4"), np.array([0.5])])
    assert_same(made, np.concatenate([value.ravel(), np.asarray(x).ravel(), [np.float32(2)], [0.5]]))
    assert (made.sharding, list(flat)) == (again.sharding, list(straight))


def test_concat_of_one_device_stays_there(backend: str) -> None:
    d = st.devices(backend)[3]
    parts = [st.ones((2,), device=d), st.zeros((3,), device=d)]
    assert st.concat(parts).device == d


def test_host_arrays_beside_tensors_on_one_device_each(backend: str) -> None:
    """Without the host array, the tensors would be the shards of the result."""
    values = [np.arange(4.0), np.arange(4.0) + 10, np.arange(4.0) + 20]
    x, y = (st.device_put(value, d) for value, d in zip(values, st.devices(backend)[:2], strict=False))
    host = values[2]
    assert_same(st.concat([x, host]), np.concatenate([values[0], host]), exact=True)
    assert_same(st.concat([host, x]), np.concatenate([host, values[0]]), exact=True)
    assert_same(st.unshard([x, host]), np.concatenate([values[0], host]), exact=True)
    assert_same(st.stack([x, host]), np.stack([values[0], host]), exact=True)
    assert_same(st.stack([host, x], axis=1), np.stack([host, values[0]], axis=1), exact=True)
    assert_same(st.stack([x, host, y]), np.stack([values[0], host, values[1]]), exact=True)


def test_stack_and_concat_take_an_array_for_its_rows(backend: str) -> None:
    """The rows of an array are the operands, as in NumPy and JAX."""
    value = array((3, 2), "float64", 1)
    for x in (st.device_put(value, mesh_of((2,), backend)), value):
        assert_same(st.stack(x), value, exact=True)
        assert_same(st.stack(x, axis=1), np.stack(value, axis=1), exact=True)
        assert_same(st.concat(x), np.concatenate(value), exact=True)
    assert_same(st.unshard(part for part in st.shard(value)), value, exact=True)  # any other iterable is a list


@pytest.mark.parametrize(("rows", "size", "leftover", "wanted"), [
    (10, 5, "keep", [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),
    (5, 2, "keep", [[0, 1], [2, 3], [4]]),
    (5, 2, "discard", [[0, 1], [2, 3]]),
    (5, 2, "repeat", [[0, 1], [2, 3], [4, 0]]),
    (7, 5, "repeat", [[0, 1, 2, 3, 4], [5, 6, 0, 1, 2]]),
    (2, 5, "keep", [[0, 1]]),
    (2, 5, "discard", []),
    (2, 5, "repeat", [[0, 1, 0, 1, 0]]),
    (0, 3, "repeat", []),
    (0, 3, "keep", []),
])  # fmt: skip
def test_to_batched_list(rows: int, size: int, leftover: str, wanted: list[list[int]], backend: str) -> None:
    mesh = mesh_of((3,), backend)
    x = st.arange(rows, device=mesh)
    batches = st.to_batched_list(x, size, leftover=leftover)
    assert [b.tolist() for b in batches] == wanted
    assert all(b.device == mesh for b in batches)
    assert [b.tolist() for b in x.to_batched_list(size, leftover=leftover)] == wanted
    assert [b.tolist() for b in st.to_batched_list(np.arange(rows), size, leftover=leftover)] == wanted


@pytest.mark.parametrize("leftover", ["keep", "repeat", "discard"])
def test_batches_in_programs_gradients_and_vmap(leftover: str, backend: str) -> None:
    """Rows that are repeated have the gradients of both batches, and rows that are left out have none."""
    x = st.device_put(array((7, 2), "float64", 1), mesh_of((2,), backend))

    def f(x: Any) -> Any:
        return sum([((k + 1) * b**2).sum() for k, b in enumerate(st.to_batched_list(x, 3, leftover=leftover))])

    times = {"keep": [1, 1, 1, 2, 2, 2, 3], "repeat": [4, 4, 1, 2, 2, 2, 3], "discard": [1, 1, 1, 2, 2, 2, 0]}[leftover]
    assert_same(st.jit(f)(x), np.asarray(f(x)))
    assert_same(st.grad(f)(x), 2 * np.array(times)[:, None] * np.asarray(x))
    assert_same(st.jit(st.grad(f))(x), 2 * np.array(times)[:, None] * np.asarray(x))
    assert_same(st.vmap(f)(st.stack([x, 2 * x])), np.asarray(f(x)) * np.array([1, 4]))


def test_batches_of_rows(backend: str) -> None:
    value = array((7, 3), "float32", 1)
    batches = st.to_batched_list(st.device_put(value, mesh_of((2,), backend)), 3, leftover="repeat")
    for batch, wanted in zip(batches, [value[:3], value[3:6], value[[6, 0, 1]]], strict=True):
        assert_same(batch, wanted, exact=True)


@pytest.mark.parametrize(("call", "kind", "words"), [
    (lambda x: st.shard(x, 2), st.AxisError, "shard: axis 2 is out of range for 2 dimensions"),
    (lambda x: st.shard(x, "0"), st.ArgumentTypeError, "axis '0'"),
    (lambda x: st.shard(np.float64(3)), st.ShapeError, "shard: x has no dimensions"),
    (lambda x: st.shard(x, devices=[]), st.ShardingError, "devices is empty"),
    (lambda x: st.shard(x, devices=st.devices()[0]), st.ArgumentTypeError, "wanted a list of devices"),
    (lambda x: st.shard(x, devices=st.devices()[:1] * 2), st.ShardingError, "twice"),
    (lambda x: st.shard([1, 2]), st.ArgumentTypeError, "shard: "),
    (lambda x: st.to_batched_list(x, 0), st.ArgumentError, "batch_size is 0"),
    (lambda x: st.to_batched_list(x, 1.5), st.ArgumentTypeError, "batch_size is a float"),
    (lambda x: st.to_batched_list(x, 2, leftover="drop"), st.ArgumentError, "leftover is 'drop'"),
    (lambda x: st.to_batched_list(np.float64(1), 2), st.ShapeError, "no dimensions"),
    (lambda x: st.stack([]), st.ShapeError, "stack: there is nothing to join"),
    (lambda x: st.stack([x, x[:1]]), st.ShapeError, "stack: array 1 has shape"),
    (lambda x: st.stack([x], axis=4), st.AxisError, "stack: axis 4"),
    (lambda x: st.concat([]), st.ShapeError, "concat: there is nothing to join"),
    (lambda x: st.concat([x, x[:, :1]]), st.ShapeError, "concat: array 1 has shape"),
    (lambda x: st.concat([x[0, 0]]), st.ShapeError, "no dimensions to join"),
    (lambda x: st.unshard([x, x[:, :1]]), st.ShapeError, "unshard: array 1"),
    (lambda x: st.unshard([]), st.ShapeError, "unshard: "),
    (lambda x: st.concat([x, "y"]), st.ArgumentTypeError, "concat: "),
    (lambda x: st.concat(5), st.ArgumentTypeError, "concat: arrays is an int; wanted a list of arrays"),
    (lambda x: st.stack(None), st.ArgumentTypeError, "stack: arrays is a NoneType"),
    (lambda x: st.unshard(3), st.ArgumentTypeError, "unshard: arrays is an int"),
    (lambda x: st.unshard(x), st.ArgumentTypeError, "unshard: arrays is one array of shape (4, 3), which is whole as it"),
    (lambda x: st.unshard(np.asarray(x)), st.ArgumentTypeError, "wanted the list that st.shard or st.pmap returned"),
    (lambda x: st.unshard(arrays=x, axis=1), st.ArgumentTypeError, "(st.concat joins the rows of an array)"),
    (lambda x: st.pmap(lambda v: st.unshard(v), [x]), st.ArgumentTypeError, "unshard: arrays is one array"),
    (lambda x: st.to_batched_list([x, x], 1), st.ArgumentTypeError, "to_batched_list: a list of tensors is not one"),
    (lambda x: st.smap(abs, [x, x], axes=[0]), st.ArgumentTypeError, "smap: a list of tensors is not one array"),
])  # fmt: skip
def test_errors(call: Any, kind: type[Exception], words: str, backend: str) -> None:
    value = array((4, 3), "float64", 1)
    x = st.device_put(value, mesh_of((2,), backend))
    with pytest.raises(kind, match=None) as caught:
        call(x)
    assert words in str(caught.value)
    assert_same(x, value, exact=True)
