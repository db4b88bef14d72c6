"""Products on meshes of several axes: values, layouts, and at most the bytes and the memory of SUMMA."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor import P
from shardtensor.backend.registry import load
from tests.draws import drawn
from tests.layouts import allocated, array, everywhere, mesh_of, specs

GRIDS = [(2, 2), (2, 4), (3, 2), (2, 2, 2)]


def split(value: Any, mesh: st.Mesh, *parts: Any) -> st.ShardedTensor:
    return st.device_put(value, st.NamedSharding(mesh, P(*parts)))


@everywhere
@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("sizes", [(7, 5, 6), (16, 16, 16), (40, 3, 50)], ids=str)
def test_both_operands_move_in_panels_and_the_result_stays(
    shape: tuple[int, int], sizes: tuple[int, int, int], backend: str
) -> None:
    mesh = mesh_of(shape, backend)
    n, k, m = sizes
    a, b = array((n, k), "float64", 0), array((k, m), "float64", 1)
    x, y = split(a, mesh, "x", "y"), split(b, mesh, "x", "y")
    with st.transfers() as log:
        product = x @ y
    assert product.sharding.spec == P("x", "y")
    assert log.bytes == a.nbytes * (shape[1] - 1) + b.nbytes * (shape[0] - 1)
    assert not any(t.explicit for t in log)
    np.testing.assert_allclose(np.asarray(product), a @ b)
    inferred = st.explain(lambda x, y: x @ y, x, y)
    assert (inferred.bytes, inferred.result.sharding) == (log.bytes, product.sharding)
    with st.transfer_guard("disallow"), pytest.raises(st.TransferError, match="matmul"):
        x @ y


@everywhere
def test_replicas_of_a_result_in_one_memory_are_added_to_once(backend: str) -> None:
    mesh = mesh_of((4, 2), backend)
    x, y = split(np.arange(72.0).reshape(9, 8), mesh, "y", "x"), split(np.eye(8), mesh)
    np.testing.assert_array_equal(np.asarray(x @ y), np.asarray(x))


@pytest.mark.parametrize("backend", ["numpy", "checked", "grouped", "torch", "cupy"], indirect=True)
def test_products_of_any_layouts(backend: str) -> None:
    @hypothesis.settings(max_examples=drawn(25))
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        mesh = mesh_of(data.draw(some.sampled_from(GRIDS)), backend)
        n, k, m = [data.draw(some.sampled_from([0, 1, 2, 5, 8, 11])) for _ in range(3)]
        dtype = data.draw(some.sampled_from(["float32", "complex128", "int64", "bool"]))
        batch = data.draw(some.sampled_from([(), (3,)]))
        a, b = array((*batch, n, k), dtype, 0), array((*batch, k, m), dtype, 1)
        x, y = [st.device_put(v, st.NamedSharding(mesh, data.draw(specs(mesh, v.ndim)))) for v in (a, b)]
        how = data.draw(some.sampled_from(["matmul", "tensordot", "einsum"]))
        hypothesis.assume(dtype != "bool" or how == "matmul")
        functions: dict[str, Any] = {
            "matmul": lambda of, x, y: of.matmul(x, y),
            "tensordot": lambda of, x, y: of.tensordot(x, y, axes=((x.ndim - 1,), (y.ndim - 2,))),
            "einsum": lambda of, x, y: of.einsum("...ik,...kj->...ij", x, y),
        }
        with st.transfers() as log:
            found = functions[how](st, x, y)
        np.testing.assert_allclose(np.asarray(found), functions[how](np, a, b), rtol=1e-4, atol=1e-4)
        inferred = st.explain(lambda x, y: functions[how](st, x, y), x, y)
        assert (inferred.bytes, inferred.result.sharding) == (log.bytes, found.sharding)

    run()


def test_the_layout_with_the_fewest_bytes_is_taken() -> None:
    mesh = st.AbstractMesh((4, 8), ("x", "y"))

    def laid(sizes: tuple[int, int, int], left: P, right: P) -> tuple[P, int]:
        n, k, m = sizes
        x, y = (st.zeros(s, device=st.NamedSharding(mesh, spec)) for s, spec in (((n, k), left), ((k, m), right)))
        report = st.simulate(lambda x, y: x @ y, x, y)
        return st.eval_shape(lambda x, y: x @ y, x, y).sharding.spec, report.bytes

    both = (P("x", "y"), P("x", "y"))
    size = 1 << 10
    assert laid((size, size, size), *both) == (P("x", "y"), 8 * size * size * (7 + 3))
    spec, nbytes = laid((size, size, 8), *both)  # A narrow result: only y moves, and partial sums are added.
    assert spec == P("x")
    assert nbytes < 8 * size * size * 7
    spec, nbytes = laid((8, size, size), *both)  # A flat result: only x moves.
    assert spec == P(None, "y")
    assert nbytes < 8 * size * size * 3
    assert laid((size, size, size), P("x", "y"), P("y")) == (P("x"), 2 * 7 * 4 * size * size // 4 * 8)
    # Without a conflict nothing moves.
    assert laid((size, size, size), P("x"), P(None, "y")) == (P("x", "y"), 0)


def test_1024_simulated_devices_send_what_the_formula_says() -> None:
    mesh = st.AbstractMesh((32, 32), ("x", "y"))
    n, k, m = 10_007, 5_003, 20_011
    x = st.zeros((n, k), dtype="float32", device=st.NamedSharding(mesh, P("x", "y")))
    y = st.zeros((k, m), dtype="float32", device=st.NamedSharding(mesh, P("x", "y")))
    assert st.simulate(lambda x, y: x @ y, x, y).bytes == 4 * k * (n * 31 + m * 31)


@pytest.mark.parametrize("sizes", [(512, 512, 512), (512, 64, 512)], ids=str)
def test_devices_hold_their_shares_the_result_and_a_panel_of_each_operand(sizes: tuple[int, int, int]) -> None:
    mesh = mesh_of((2, 4), "checked")
    n, k, m = sizes
    a, b = array((n, k), "float64", 0), array((k, m), "float64", 1)
    x, y = split(a, mesh, "x", "y"), split(b, mesh, "x", "y")
    x @ y  # The plan is made once.
    with allocated("checked") as peak:
        product = x @ y
    assert product.sharding.spec == P("x", "y")
    panels = 2 * a.nbytes + 2 * b.nbytes  # of all devices: what they receive, and the product that is added
    assert peak[0] <= product.nbytes + panels + (1 << 18)


@pytest.mark.parametrize(("n", "shape"), [(33, (2, 2)), (64, (2, 4))])
def test_one_buffer_is_multiplied_by_one_call(n: int, shape: tuple[int, int]) -> None:
    assert load("numpy").on_host
    mesh = mesh_of(shape, "numpy")
    a, b = array((n, n), "float64", 0), array((n, n), "float64", 1)
    product = split(a, mesh, "x", "y") @ split(b, mesh, "x", "y")
    np.testing.assert_array_equal(np.asarray(product), a @ b)


@pytest.mark.parametrize("backend", ["numpy", "checked"])
def test_operands_on_different_meshes(backend: str) -> None:
    a, b = array((6, 4), "float64", 0), array((4, 8), "float64", 1)
    x = split(a, mesh_of((2, 2), backend), "x", "y")
    other = st.make_mesh((2, 4), ("p", "q"), devices=st.devices(backend))
    for product in (x @ split(b, other, "p", "q"), split(a, other, "p", "q") @ split(b, mesh_of((2, 2), backend), "x")):
        np.testing.assert_array_equal(np.asarray(product), a @ b)
