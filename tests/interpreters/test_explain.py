"""`st.explain`: what each operator transfers, runs and combines, compared with the log of a run."""

from __future__ import annotations

import functools
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import P
from tests.draws import drawn
from tests.interpreters.test_infer import layouts, split, step, totals
from tests.interpreters.test_recording import COLLECTIVES, MAPS
from tests.layouts import everywhere, mesh_of


def same_transfers(fn: Callable[..., Any], *args: Any) -> st.Explanation:
    """Explains a function, and compares the totals of each operator with the log of a run."""
    found = st.explain(fn, *args)
    with st.transfers() as log:
        result = fn(*args)
    assert layouts(found.result) == layouts(result)
    assert totals(*[call.transfers for call in found.calls]) == totals(log)
    return found


@everywhere
def test_transfers_are_those_of_a_run(backend: str) -> None:
    same_transfers(lambda x, w: {**step(x, w), "text": 0}, split(backend), split(backend, (6, 4)))


@everywhere
@pytest.mark.parametrize("name", sorted(set(MAPS) - {"a closure"}))  # NumPy's arrays do not tell their device.
def test_transfers_of_maps_are_those_of_a_run(name: str, backend: str) -> None:
    x = split(backend, (6, 6))
    if name == "an equal result":
        x = st.device_put(np.asarray(x), st.devices(backend)[0])
    with st.use_mesh(st.make_mesh((8,), ("i",), devices=st.devices(backend)[:8])):
        same_transfers(functools.partial(MAPS[name], d=st.devices(backend)), x)


def aliased(x: Any) -> None:
    """Writes views whose operands alias the same base."""
    row = x[-3]
    row -= row.reshape(-1)
    flat = x.ravel()
    flat[...] *= flat
    flat[...] += flat[::-1]
    x[1:] += x[:-1]
    x[0] = x[0]


VIEWS: dict[str, Callable[[Any], Any]] = {
    "an element as an array": lambda x: x[0, 0][...] * x,
    "an array made of an element": lambda x: x[0, 0][None],
    "a reshaped element": lambda x: st.reshape(x[0, 0], (1, 1)) * 2,
    "the real part of an element": lambda x: x[0, 0].real * x,
    "a view of an element's array": lambda x: st.clip(x[0, 0][...].T, 0, x),
    "a copied element": lambda x: x[0, 0].copy(),
    "a copied view": lambda x: x[1:].copy(),
    "a view of a scalar": lambda x: x.sum()[...] + x.sum()[None],
    "a written element": lambda x: x[0, 0][...].__iadd__(1) * x,
    "aliased operands": aliased,
    "a view that is mapped": lambda x: st.pmap(lambda b: b * 2, x.T[:4, 5]),
    "a view that is mapped with collectives": lambda x: st.shard_map(
        lambda b: b * 2, mesh=x.device, in_specs=P("x", "y"), out_specs=P("x", "y")
    )(x[1:]),
}


@everywhere
@pytest.mark.parametrize("name", list(VIEWS))
def test_transfers_of_views_are_those_of_a_run(name: str, backend: str) -> None:
    same_transfers(VIEWS[name], split(backend))


def test_a_view_that_is_given_twice_is_read_once(backend: str) -> None:
    rows = split(backend)[1:]
    assert same_transfers(lambda a, b: [a * 2, b * 2], rows, rows).bytes == 24
    element = split(backend)[0, 0]
    assert same_transfers(lambda e, x: (e + 1) * x, element, split(backend)).bytes == 12


def of_collective(name: str, backend: str) -> tuple[Callable[..., Any], st.ShardedTensor]:
    mesh = mesh_of((4,), backend)
    f = st.shard_map(COLLECTIVES[name], mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    return f, st.device_put(np.ones((16, 8), "f4"), st.NamedSharding(mesh, P("x")))


BOUNDED = {"ragged_all_to_all", "ragged_return"}
"""Collectives that send as many rows as elements of arrays say, which only a run knows."""


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name not in BOUNDED])
def test_transfers_of_collectives_are_those_of_a_run(name: str, backend: str) -> None:
    same_transfers(*of_collective(name, backend))


@pytest.mark.parametrize("name", sorted(BOUNDED))
def test_transfers_of_ragged_collectives_are_a_bound(name: str, backend: str) -> None:
    f, x = of_collective(name, backend)
    with st.transfers() as log:
        f(x)
    bound = sum([transfer.bytes for call in st.explain(f, x).calls for transfer in call.transfers])
    assert 0 < log.bytes <= bound


WANTED = """\
matmul(float64[8, 6] P('x', 'y'), float64[6, 4] P('y')) -> float64[8, 4] P('x')
    runs on each of 4 devices
    combines partial results along y: 512 bytes
add(2 x float64[7, 4] P('x')) -> float64[7, 4] P('x')
    writes in place
    add: 64 bytes from checked:0, checked:1 to checked:2, checked:3 (transfers: 2)
setitem(float64[8, 4] P('x'), float64[7, 4] P('x')) -> float64[8, 4] P('x')
    writes in place
split_over(float64[8, 4] P('x')) -> 4 x float64[4, 4] P()
    transfers elements
map_shards(4 x float64[4, 4] P()) -> 4 x float64[4] P()
    runs on each device
    psum along x: 128 bytes from checked:0..3 to checked:0..3 (transfers: 4)
        sum(float64[4, 4] P()) -> float64[4] P()
        psum(float64[4] P()) -> float64[4] P()
        multiply(float64[4] P()) -> float64[4] P()
check_equal(6 x float64[4] P()) -> None
    runs on each device
    shard_map: 96 bytes from checked:1..3 to checked:0 (transfers: 3)
assemble(4 x float64[4] P()) -> float64[4] P()
    moves elements
getitem(float64[8, 4] P('x')) -> float64[] P()
    runs where the element is
multiply(float64[4] P(), float64[] P()) -> float64[4] P()
    runs on each of 4 devices
    getitem: 16 bytes from checked:0, checked:1 to checked:2, checked:3 (transfers: 2)
add(float64[4] P(), float64[4] on the host) -> float64[4] P()
    runs on each of 4 devices
    transfers x2 from the host to P(): 128 bytes
944 bytes are transferred"""


def test_explanations_are_printed() -> None:
    mesh = mesh_of((2, 2), "checked")
    x = st.device_put(np.ones((8, 6)), st.NamedSharding(mesh, P("x", "y")))
    w = st.device_put(np.ones((6, 4)), st.NamedSharding(mesh, P("y")))

    @st.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P())
    def total(block: Any) -> Any:
        return st.psum(block.sum(axis=0), "x") * 2

    def f(x: Any, w: Any) -> Any:
        h = x @ w
        h[1:] += h[:-1]
        return total(h) * h[0, 0] + np.ones(4)

    found = same_transfers(f, x, w)
    assert str(found) == WANTED
    assert repr(found) == "Explanation(10 calls, 944 bytes)"
    np.testing.assert_array_equal(x, 1)


def test_explanations_show_themselves_in_notebooks() -> None:
    found = st.explain(lambda x: x.sum(), st.ones(3, device=st.devices("numpy")[0]))
    for shown in (found, found.calls[0]):
        assert ET.fromstring(shown._repr_html_()).text == str(shown)
    assert repr(found) == "Explanation(1 call, 0 bytes)"


def test_any_number_of_devices() -> None:
    count = drawn(4096, fast=1024)
    mesh = st.AbstractMesh((count,), ("x",))
    x = st.ShapeDtypeStruct((1 << 20,), "float32", st.NamedSharding(mesh, P("x")))
    found = st.explain(lambda x: x - x.mean(), x)
    assert [call.runs for call in found.calls] == [f"runs on each of {count} devices"] * 2
    assert (
        found.bytes
        == st.simulate(lambda: (x := st.zeros(1 << 20, dtype="f4", device=mesh)) - x.mean(), mesh=mesh).bytes
    )


def test_nothing_is_recorded_elsewhere() -> None:
    x = split("numpy")
    with st.transfer_guard("disallow"), st.transfers() as log:
        assert st.explain(lambda x: x[1:] + x[:-1], x).bytes
    assert not log.bytes


def test_what_cannot_be_explained() -> None:
    with pytest.raises(st.ConcretizationError, match=r"^getitem: needs the elements"):
        st.explain(lambda x: x[st.argmax(x, axis=0)], split("numpy"))
    with pytest.raises(st.ArgumentTypeError, match="explain: fn is an int"):
        st.explain(3)  # type: ignore[arg-type]


def test_a_shared_argument_is_sent_once_to_each_device(backend: str) -> None:
    devices = st.devices(backend)
    parts = [st.device_put(np.ones(2), devices[k % 2]) for k in range(4)]
    w = st.device_put(np.ones(2), devices[3])
    assert same_transfers(lambda: st.pmap(lambda a, b: a + b, parts, w)).bytes == 2 * w.nbytes


READS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "integers": lambda x, known, mask: x[known],
    "a tuple": lambda x, known, mask: x[known, 0],
    "a mask": lambda x, known, mask: x[mask],
    "elements of a view": lambda x, known, mask: x * float(np.asarray(known[1:])[0]),
}


@pytest.mark.parametrize("name", list(READS))
def test_tensors_that_the_function_closes_over_can_be_read(name: str, backend: str) -> None:
    x, known = (st.device_put(h, mesh_of((2,), backend)) for h in (np.ones((4, 6)), np.array([3, 1, 0, 2])))
    mask = known > 1
    same_transfers(lambda x: READS[name](x, known, mask), x)
