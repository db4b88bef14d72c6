"""What JAX's guide to the pmap of JAX 0.8 warns of: an error of JAX, a cost, or a wrong result, and what happens here.

The programs of the guide are in `jax_maps`, and those of several processes in `tests/communication`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import P
from tests.layouts import everywhere, mesh_of, put, values_of

X = np.random.default_rng(0).normal(size=(8, 6, 4))
ROW = X[0].nbytes


def double(v: Any) -> Any:
    return v * 2


def between_devices(log: Any) -> int:
    return sum(r.bytes for r in log if r.source.backend == r.destination.backend)


@everywhere
def test_arguments_on_other_devices_are_transferred_and_counted(backend: str) -> None:
    """JAX: "Received incompatible devices"."""
    mesh = mesh_of((8,), backend)
    rows = st.NamedSharding(mesh, P("x"))
    placed = {
        "one device": st.device_put(X, mesh.flat[3]),
        "another mesh": put(X, backend, (4, 2), P(None, "x", "y")),
        "replicated": st.device_put(X, st.NamedSharding(mesh, P())),
        "rows": st.device_put(X, rows),
    }
    sent = {}
    for name, x in placed.items():
        with st.transfers() as log:
            made = st.pmap(double, devices=mesh)(x)
            mapped = st.shard_map(double, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)
        np.testing.assert_array_equal(values_of(made), X * 2)
        np.testing.assert_array_equal(values_of(mapped), X * 2)
        assert made.sharding.shard_shape(X.shape) == mapped.sharding.shard_shape(X.shape) == (1, 6, 4)
        assert all(r.explicit for r in log)
        sent[name] = between_devices(log)
    assert sent == {"one device": 2 * 7 * ROW, "another mesh": 2 * 7 * ROW, "replicated": 0, "rows": 0}


@everywhere
@pytest.mark.parametrize(
    ("spec", "result", "sent"), [(P(), P(), 0), (P(None, "x"), P("x"), 0), (P("x"), P(), 7 * ROW)], ids=str
)
def test_an_index_sends_at_most_one_slice_to_each_device(spec: P, result: P, sent: int, backend: str) -> None:
    """JAX: the array is gathered on each device before it is indexed."""
    x = put(X, backend, (8,), spec)
    with st.transfers() as log:
        first = x[0] + 1
    assert (first.sharding.spec, between_devices(log)) == (result, sent)
    with st.transfers() as log:
        compiled = st.jit(lambda x: x[0] + 1)(x)
    assert (compiled.sharding.spec, between_devices(log)) == (result, sent)
    with st.transfers() as log:
        host = np.asarray(x[0])
    assert between_devices(log) == 0
    for found in (values_of(first) - 1, values_of(compiled) - 1, host, values_of(x.addressable_shards[0].data)[0]):
        np.testing.assert_allclose(found, X[0][: len(found)], rtol=1e-12, atol=1e-12)


@everywhere
def test_the_copies_of_a_state_are_read_without_transfers_between_devices(backend: str) -> None:
    """`unreplicate` takes the first of the copies; a result that is declared to be equal has none."""
    mesh = mesh_of((8,), backend)
    w = X[0]
    copies = {"w": put(np.stack([w] * 8), backend, (8,))}
    with st.transfers() as log:
        state = st.pmap(lambda s: {"w": s["w"] + 1}, devices=mesh)(copies)
        host = np.asarray(state["w"][0])
        once = st.pmap(
            lambda s: {"w": s["w"] + 1}, in_axes=None, out_axes=None, axis_name="i"
        )  # needs a mapped argument
    assert between_devices(log) == 0
    np.testing.assert_array_equal(host, w + 1)
    with pytest.raises(st.ArgumentError, match="pmap: "):
        once(copies)
    step = st.pmap(
        lambda s, v: s + st.pmean(v.sum(), "i"), axis_name="i", in_axes=(None, 0), out_axes=None, devices=mesh
    )
    whole = st.device_put(w, st.NamedSharding(mesh, P()))
    found = step(whole, put(X, backend, (8,)))
    assert found.is_fully_replicated
    with st.transfers() as log:
        values = np.asarray(found), np.asarray(found[0])
    assert between_devices(log) == 0
    np.testing.assert_allclose(values[0], w + X.sum(axis=(1, 2)).mean(), rtol=1e-12)
    np.testing.assert_array_equal(values[1], values[0][0])


@everywhere
def test_each_copy_is_read_by_any_kind_of_number(backend: str) -> None:
    """JAX: numbers of `jnp.arange` gather the array, those of `range` do not."""
    x = put(X, backend, (8,))
    with st.transfers() as log:
        found = [np.asarray(x[number(k)]) for k in range(8) for number in (int, np.int64)]
    assert between_devices(log) == 0
    np.testing.assert_array_equal(found, np.repeat(X, 2, axis=0))
    np.testing.assert_array_equal(values_of(x[st.asarray(3)]), X[3])


@everywhere
def test_keys_of_each_device(backend: str) -> None:
    """`shard_prng_key` splits a key, one for each device: the numbers are those of the keys, on whatever devices."""
    keys = st.random.split(st.random.key(0), 8)
    wanted = np.stack([np.asarray(st.random.normal(key, (3,))) for key in keys])
    assert len(set(wanted.ravel())) == 24
    for count in (8, 3):
        made = st.pmap(lambda key: st.random.normal(key, (3,)), keys, devices=st.devices(backend)[:count])
        np.testing.assert_allclose([values_of(x) for x in made], wanted, rtol=1e-12)


@everywhere
def test_results_that_are_not_equal_are_not_returned_once(backend: str) -> None:
    mesh, x = mesh_of((8,), backend), put(X, backend, (8,))
    for call in (
        lambda: st.pmap(lambda v: v, out_axes=None, devices=mesh)(x),
        lambda: st.shard_map(lambda v: v, mesh=mesh, in_specs=P("x"), out_specs=P())(x),
    ):
        with pytest.raises(st.ShapeError, match=r"is declared to be equal along .*, and on .* it differs"):
            call()


@everywhere
def test_reductions_of_results_are_of_all_devices(backend: str) -> None:
    """JAX warns of reductions outside of jit that are of one device."""
    scores = st.pmap(lambda v: v * 2, devices=mesh_of((8,), backend))(X)
    mask = X > 0.5
    for found, wanted in (
        (st.mean(scores), (X * 2).mean()),
        (st.mean(scores, where=mask), (X * 2)[mask].mean()),
        (np.mean(scores, where=mask), (X * 2)[mask].mean()),
        (scores.sum(axis=0), (X * 2).sum(axis=0)),
        (st.jit(lambda s: st.reshape(s, [-1]))(scores), (X * 2).ravel()),
    ):
        np.testing.assert_allclose(values_of(found), wanted, rtol=1e-12)


@everywhere
def test_donated_arguments_cannot_be_used_again(backend: str) -> None:
    """`donate_argnums` of pmap is that of the jit around the map, which writes where the argument was."""
    mesh = mesh_of((8,), backend)
    step = st.jit(st.shard_map(lambda v: v + 1, mesh=mesh, in_specs=P("x"), out_specs=P("x")), donate_argnums=(0,))
    for x in (put(X, backend, (8,)), st.device_put(X, mesh.flat[2])):  # in the layout of the map, and not
        y = step(x)
        assert x.is_donated
        with pytest.raises(st.DonatedError):
            x + 1
        np.testing.assert_array_equal(values_of(y), X + 1)


@everywhere
def test_a_map_is_lowered_by_jit(backend: str) -> None:
    mapped = st.jit(st.pmap(lambda v: v / st.psum(v, "i"), axis_name="i", devices=mesh_of((8,), backend)))
    compiled = mapped.lower(X).compile()
    np.testing.assert_allclose(values_of(compiled(X)), X / X.sum(axis=0), rtol=1e-12)


def test_arrays_say_what_is_here() -> None:
    x = put(X, "numpy", (8,))
    assert x.is_fully_addressable
    assert not x.is_fully_replicated
    one = st.device_put(X, st.devices("numpy")[3])
    assert one.sharding == st.SingleDeviceSharding(st.devices("numpy")[3])
    assert one.devices() == {st.devices("numpy")[3]}


def test_the_name_of_the_axis_is_a_keyword() -> None:
    with pytest.raises(
        st.ArgumentTypeError, match=r"argument 0 is a str; .*, or axis_name='i' if it is the name of the axis"
    ):
        st.pmap(double, "i")
    for keyword, words in (
        ("axis_size", "leave it out"),
        ("backend", "devices= names"),
        ("donate_argnums", "donate=True"),
    ):
        with pytest.raises(st.ArgumentTypeError, match=f"unexpected keyword argument '{keyword}'; .*{words}"):
            st.pmap(double, **{keyword: 8})  # type: ignore[call-overload]
