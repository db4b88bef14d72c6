"""Square matrices that are split over devices: factorized panel by panel, without gathering them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.functions.linalg import blocked_factorizations, elimination, panels
from tests.draws import drawn
from tests.layouts import array, everywhere, mesh_of

linalg = st.linalg
LAYOUTS: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
    ((4,), ("x",)),
    ((3,), (None, "x")),
    ((2, 3), ("x", "y")),
    ((2, 2), (("y", "x"),)),
    ((2, 2), (None, "y")),
    ((8,), (None, "x")),
]
TYPES = ["float32", "float64", "complex64", "complex128", "int32"]


@pytest.fixture(autouse=True)
def small_panels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Factorizes small matrices, in panels of three columns, of which two are eliminated one by one."""
    with monkeypatch.context() as patch:
        patch.setattr(panels, "GATHERED", 0)
        patch.setattr(panels, "PANEL", 3)
        patch.setattr(elimination, "_BASE", 2)
        patch.setattr(panels, "SCRATCH", 512)
        yield


def split(host: Any, mesh: st.Mesh, *spec: Any) -> st.ShardedTensor:
    return st.device_put(host, st.NamedSharding(mesh, st.P(*[None] * (host.ndim - 2), *spec)))


def matrices(data: Any, size: int, positive: bool = False) -> tuple[Any, st.Mesh, Any]:
    (counts, spec), n = data.draw(some.sampled_from(LAYOUTS)), data.draw(some.integers(1, size))
    stack = data.draw(some.sampled_from([(), (), (1,), (2, 1)]))
    host = array((*stack, n, n), data.draw(some.sampled_from(TYPES)), n)
    if positive:
        host = np.matmul(host, np.conj(np.matrix_transpose(host))) + np.eye(n, dtype=host.dtype)
    return host, counts, spec


def norm(x: Any) -> Any:
    return np.linalg.norm(x, 1, (-2, -1))


def precision(x: Any) -> float:
    return float(np.finfo(x.dtype).eps) * max(x.shape[-1], 1)


def solved(data: Any, backend: str, size: int) -> None:
    host, counts, spec = matrices(data, size)
    mesh, n = mesh_of(counts, backend), host.shape[-1]
    host = (host + (n + 3) * np.eye(n)[::-1]).astype(host.dtype)  # Pivots are far from the diagonal.
    x = split(host, mesh, *spec)
    k = data.draw(some.sampled_from([1, 2, 30]))
    right = array((*host.shape[:-1], k), data.draw(some.sampled_from(TYPES)), k)
    y = split(right, mesh, *data.draw(some.sampled_from([(), ("x",), (None, "x")])))
    found = linalg.solve(x, y)
    wanted = np.linalg.solve(host, right)
    assert found.dtype == wanted.dtype
    got = np.asarray(found)
    # As LAPACK's test of xGESV measures it.
    assert np.all(norm(right - host @ got) <= 30 * precision(wanted) * np.maximum(norm(host) * norm(got), 1e-30))
    inverse = np.asarray(linalg.inv(x))
    assert inverse.dtype == np.linalg.inv(host).dtype
    assert np.all(norm(np.eye(n) - host @ inverse) <= 30 * precision(inverse) * norm(host) * norm(inverse))
    near = {"rtol": 100 * precision(inverse), "atol": 100 * precision(inverse)}
    sign, logarithm = linalg.slogdet(x)
    for part, expected in zip((sign, logarithm), np.linalg.slogdet(host), strict=True):
        assert (part.dtype, part.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(np.asarray(part), expected, **near)
    np.testing.assert_allclose(np.asarray(linalg.det(x)), np.linalg.det(host), rtol=1000 * precision(inverse))
    other = data.draw(some.sampled_from([linalg.inv, linalg.det, lambda x: linalg.slogdet(x)[1]]))
    for f in (other, lambda x: linalg.solve(x, y)):
        inferred, made = st.eval_shape(f, x), f(x)
        assert (inferred.shape, inferred.dtype, inferred.sharding) == (made.shape, made.dtype, made.sharding)


def decomposed(data: Any, backend: str, size: int) -> None:
    host, counts, spec = matrices(data, size, positive=True)
    x = split(host, mesh_of(counts, backend), *spec)
    upper = data.draw(some.booleans())
    found = linalg.cholesky(x, upper=upper)
    wanted = np.linalg.cholesky(host, upper=upper)
    factor = np.asarray(found)
    assert (factor.dtype, factor.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(factor, np.triu(factor) if upper else np.tril(factor))
    adjoint = np.conj(np.matrix_transpose(factor))
    again = adjoint @ factor if upper else factor @ adjoint
    assert np.all(norm(again - host) <= 10 * precision(factor) * norm(host))
    inferred = st.eval_shape(lambda x: linalg.cholesky(x, upper=upper), x)
    assert (inferred.shape, inferred.dtype, inferred.sharding) == (found.shape, found.dtype, found.sharding)


def orthogonalized(data: Any, backend: str, size: int) -> None:
    (counts, spec), kind = data.draw(some.sampled_from(LAYOUTS)), data.draw(some.sampled_from(TYPES))
    *stack, rows, columns = data.draw(some.sampled_from([(), (), (2, 1)])) + tuple(
        data.draw(some.lists(some.integers(1, size), min_size=2, max_size=2))
    )
    host, mode = array((*stack, rows, columns), kind, rows), data.draw(some.sampled_from(["reduced", "complete"]))
    if data.draw(some.booleans()):
        host[..., columns // 2 :] = host[..., :1]  # Columns that depend on others.
    x = split(host, mesh_of(counts, backend), *spec)
    q, r = found = linalg.qr(x, mode=mode)
    wanted = np.linalg.qr(host, mode=mode)
    for made, expected in zip(found, wanted, strict=True):
        assert (made.dtype, made.shape) == (expected.dtype, expected.shape)
    left, right = np.asarray(q), np.asarray(r)
    np.testing.assert_array_equal(right, np.triu(right))
    # As LAPACK's test of xGEQRF measures them.
    eps = np.finfo(left.dtype).eps * max(rows, columns)
    assert np.all(norm(host - left @ right) <= 30 * eps * norm(host))
    assert np.all(norm(np.eye(left.shape[-1]) - np.conj(np.matrix_transpose(left)) @ left) <= 30 * eps)
    for made, inferred in zip(found, st.eval_shape(lambda x: linalg.qr(x, mode=mode), x), strict=True):
        assert (inferred.shape, inferred.dtype, inferred.sharding) == (made.shape, made.dtype, made.sharding)


CHECKS = [solved, decomposed, orthogonalized]


@everywhere
@pytest.mark.parametrize("check", CHECKS)
def test_residuals_are_those_of_lapack(check: Any, backend: str) -> None:
    run = hypothesis.given(some.data())(lambda data: check(data, backend, 7))
    hypothesis.settings(max_examples=3, deadline=None)(run)()


@pytest.mark.full
@pytest.mark.parametrize("check", CHECKS)
def test_residuals_are_those_of_lapack_at_length(check: Any, backend: str) -> None:
    run = hypothesis.given(some.data())(lambda data: check(data, backend, 19))
    hypothesis.settings(max_examples=drawn(100), deadline=None)(run)()


# -- bytes -----------------------------------------------------------------------------------------


def bytes_of(value: Any) -> dict[str, int]:
    """Returns the formulas of the module."""
    (n, _), others = value.shape, len(value.sharding.mesh.flat) - 1
    steps = panels.panels(value._aval)
    half = value.dtype.itemsize * (n * n + sum(p.width**2 for p in steps)) // 2
    rows = 8 * sum(n - p.begin for p in steps)
    each = {"cholesky": half, "slogdet": half + rows, "det": half + rows, "inv": 2 * half + rows}
    each["qr"] = 2 * value.dtype.itemsize * sum((n - p.begin + p.width) * p.width for p in steps)
    return {name: others * nbytes for name, nbytes in each.items()}


@everywhere
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_bytes_of_panels(count: int, backend: str) -> None:
    n, mesh = 13, mesh_of((count,), backend)
    host = np.eye(n, dtype="float32") + 1
    x, right = split(host, mesh, None, "x"), st.device_put(np.ones((n, 1), "float32"), mesh.flat[0])
    wanted = bytes_of(x)
    for name, nbytes in wanted.items():
        with st.transfers() as log:
            getattr(linalg, name)(x)
        assert log.bytes == nbytes, name
        assert not any(t.explicit for t in log)
    rows, right = split(host, mesh, "x"), st.reshard(right, st.NamedSharding(mesh, st.P()))
    with st.transfers() as log:
        linalg.solve(x, right)
    assert log.bytes == wanted["inv"]
    with st.transfers() as log:
        linalg.cholesky(rows)
    kept = sum(int(size) ** 2 for size in np.diff(x._aval.grid.offsets[-1]))
    assert log.bytes == wanted["cholesky"] + 4 * (n * n - kept)
    with st.transfer_guard("disallow"), pytest.raises(st.TransferError, match="cholesky"):
        linalg.cholesky(x)


def test_bytes_of_1024_simulated_devices() -> None:
    n, mesh = 40, st.AbstractMesh((1024,), ("x",))
    x = st.zeros((n, n), device=st.NamedSharding(mesh, st.P(None, "x")))
    for name in ("cholesky", "inv", "qr"):
        assert st.simulate(getattr(linalg, name), x).bytes == bytes_of(x)[name]


def test_a_log_does_not_change_results() -> None:
    host = array((24, 24), "float64", 0)
    x = split(host, mesh_of((4,), "numpy"), "x")
    with st.transfers() as log:
        recorded = linalg.inv(x)
    assert log.bytes
    np.testing.assert_array_equal(np.asarray(recorded), np.asarray(linalg.inv(x)))
    np.testing.assert_array_equal(np.asarray(recorded), np.linalg.inv(host))


# -- shapes, and errors ----------------------------------------------------------------------------


@everywhere
def test_matrices_that_are_not_square_are_factorized_by_panels(backend: str) -> None:
    """They are wide, tall with a square Q, or have fewer columns than devices."""
    for shape, mode, spec in [
        ((5, 11), "reduced", (None, "x")),
        ((11, 5), "complete", ("x",)),
        ((6, 2), "reduced", (None, "x")),
        ((9, 5), "reduced", ("x",)),
    ]:
        host = array(shape, "float64", 1)
        q, r = linalg.qr(split(host, mesh_of((4,), backend), *spec), mode=mode)
        assert q.sharding.spec == r.sharding.spec == st.P(None, "x")
        np.testing.assert_allclose(np.asarray(q) @ np.asarray(r), host, atol=1e-12)


@everywhere
def test_vectors_and_stacks_of_right_hand_sides(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    host = array((6, 6), "float64", 1) + 9 * np.eye(6)
    x = split(host, mesh, "x")
    for shape in ((6,), (2, 6, 1)):
        right = array(shape, "float32", 2)
        np.testing.assert_allclose(np.asarray(linalg.solve(x, right)), np.linalg.solve(host, right), rtol=1e-5)
    stack = np.stack([host, 2 * host])
    right = array((6, 2), "float64", 3)
    found = linalg.solve(split(stack, mesh, "x"), st.device_put(right, mesh))
    np.testing.assert_allclose(np.asarray(found), np.linalg.solve(stack, right), rtol=1e-9)


def test_matrices_that_are_not_split_are_not_factorized_by_panels() -> None:
    mesh = mesh_of((4,), "numpy")
    assert not blocked_factorizations.is_blocked(split(np.eye(6), mesh))
    assert not blocked_factorizations.is_blocked(
        st.device_put(np.ones((8, 6, 6)), st.NamedSharding(mesh, st.P(None, "x")))
    )
    assert not blocked_factorizations.is_blocked(split(np.ones((8, 6)), mesh, "x"))
    assert not blocked_factorizations.is_blocked(np.eye(6))
    assert blocked_factorizations.is_blocked(split(np.ones((3, 6, 6)), mesh, "x"))


@everywhere
def test_errors_of_split_matrices(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    for spec in (("x",), (None, "x")):
        ones, bad = split(np.ones((7, 7)), mesh, *spec), split(np.diag([1.0, 2, 3, -1, 5, 6, 7]), mesh, *spec)
        with pytest.raises(np.linalg.LinAlgError, match=r"^inv: Singular matrix"):
            linalg.inv(ones)
        with pytest.raises(np.linalg.LinAlgError, match=r"^solve: Singular matrix"):
            linalg.solve(ones, np.ones(7))
        if backend == "cupy":  # CuPy does not report it.
            assert np.isnan(np.asarray(linalg.cholesky(bad))).any()
        else:
            with pytest.raises(np.linalg.LinAlgError, match=r"^cholesky: "):
                linalg.cholesky(bad)
        assert linalg.det(ones).item() == 0
        assert [part.item() for part in linalg.slogdet(ones)] == [0, -np.inf]
        with pytest.raises(st.ArgumentTypeError, match=r"^inv: does not take float16"):
            linalg.inv(ones.astype("float16"))
        with pytest.raises(st.ShapeError):
            linalg.solve(ones, np.ones((6, 2)))


@everywhere
def test_undefined_elements(backend: str) -> None:
    host = array((7, 7), "float64", 1)
    host[3, 2] = np.nan
    x = split(host, mesh_of((3,), backend), "x")
    with np.errstate(invalid="ignore"):  # NumPy warns.
        assert np.isnan(np.asarray(linalg.inv(x))).all() == np.isnan(np.linalg.inv(host)).all()
        assert np.isnan(linalg.det(x).item())
        assert [np.isnan(np.asarray(factor)).any() for factor in linalg.qr(x)] == [True, True]
