"""Decompositions of tall matrices whose rows are split: by a tree of QR factorizations, without gathering them."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.functions.algorithms import first_device
from shardtensor.functions.linalg.tsqr import is_tall, is_wide, tall_r
from tests.draws import drawn
from tests.layouts import array, everywhere, mesh_of

linalg = st.linalg
LAYOUTS: list[tuple[tuple[int, ...], Any]] = [((4,), ("x",)), ((3,), ("x",)), ((2, 3), ("x", "y")), ((2, 2), ("y",))]


def residuals(a: Any, q: Any, r: Any) -> None:
    """Asserts that A = Q R and that Q is orthonormal, as LAPACK's tests measure them."""
    a, q, r = [np.asarray(x, np.result_type(x.dtype, np.float32)) for x in (a, q, r)]
    (m, n), eps = a.shape[-2:], np.finfo(q.dtype).eps
    size = np.maximum(np.linalg.norm(a, 1, (-2, -1)), np.finfo(q.dtype).tiny)
    assert np.all(np.linalg.norm(a - q @ r, 1, (-2, -1)) <= 10 * m * eps * size)
    identity = np.swapaxes(q, -1, -2).conj() @ q - np.eye(n)
    assert np.all(np.linalg.norm(identity, 1, (-2, -1)) <= 10 * m * eps)
    assert np.array_equal(r, np.triu(r))


def decomposed(data: Any, backend: str) -> None:
    (counts, chain), n = data.draw(some.sampled_from(LAYOUTS)), data.draw(some.integers(1, 4))
    m = data.draw(some.integers(6 * n, 6 * n + 11))
    stack = data.draw(some.sampled_from([(), (2,), (1, 1)]))
    host = array((*stack, m, n), data.draw(some.sampled_from(["float32", "float64", "complex64", "int32"])), m)
    if data.draw(some.booleans()):
        host[..., -1] = host[..., 0]  # Of lower rank, unless there is one column.
    spec = st.P(*[None] * len(stack), chain)
    x = st.device_put(host, st.NamedSharding(mesh_of(counts, backend), spec))
    if len(stack) == 1 and chain == ("y",):  # The other dimension takes the split.
        assert not is_tall(x)
        return
    assert is_tall(x)
    q, r = linalg.qr(x)
    assert q.sharding == x.sharding
    assert not any(r.sharding.spec)
    residuals(host, q, r)
    u, s, vh = linalg.svd(x, full_matrices=False)
    assert u.sharding == x.sharding
    wanted = np.linalg.svd(host, compute_uv=False)
    near = {"rtol": 0, "atol": 40 * np.finfo(wanted.dtype).eps * max(wanted.max(), 1e-30)}
    rebuilt = (np.asarray(u) * np.asarray(s)[..., None, :]) @ np.asarray(vh)
    np.testing.assert_allclose(rebuilt, host, rtol=0, atol=4 * near["atol"])
    for y in (x, st.matrix_transpose(x)):
        np.testing.assert_allclose(np.asarray(linalg.svdvals(y)), wanted, **near)
        assert np.array_equal(np.asarray(linalg.matrix_rank(y, rtol=1e-4)), np.linalg.matrix_rank(host, rtol=1e-4))
    np.testing.assert_allclose(np.asarray(s), wanted, **near)
    pinv = linalg.pinv(x, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(pinv), np.linalg.pinv(host, rtol=1e-4), rtol=1e-3, atol=1e-4)
    assert pinv.sharding == st.matrix_transpose(x).sharding
    wide = linalg.svd(st.matrix_transpose(x), full_matrices=False)
    assert wide.Vh.sharding == st.matrix_transpose(x).sharding
    for f in (lambda x: linalg.qr(x).Q, lambda x: linalg.qr(x).R, linalg.svdvals, linalg.pinv):
        inferred, found = st.eval_shape(f, x), f(x)
        assert (inferred.shape, inferred.dtype, inferred.sharding) == (found.shape, found.dtype, found.sharding)


@everywhere
def test_tall_matrices_match_numpy(backend: str) -> None:
    run = hypothesis.given(some.data())(lambda data: decomposed(data, backend))
    hypothesis.settings(max_examples=drawn(10), deadline=None)(run)()


@pytest.mark.full
def test_tall_matrices_match_numpy_at_length(backend: str) -> None:
    run = hypothesis.given(some.data())(lambda data: decomposed(data, backend))
    hypothesis.settings(max_examples=drawn(200), deadline=None)(run)()


@everywhere
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_bytes_of_the_tree(count: int, backend: str) -> None:
    """Each R but the first is sent, a factor comes back, and R is sent to all; see the module."""
    n, x = 3, st.device_put(array((8000, 3), "float32", 1), mesh_of((count,), backend))
    assert x.nbytes > first_device.GATHERED
    with st.transfers() as log:
        linalg.qr(x)
    assert log.bytes == 3 * (count - 1) * n * n * 4
    with st.transfers() as log:
        linalg.svdvals(x)
    assert log.bytes == 2 * (count - 1) * n * n * 4


@everywhere
@pytest.mark.parametrize("dtype", ["float32", "complex128", "int16"])
@pytest.mark.parametrize(("count", "shape"), [(2, (62, 3)), (3, (61, 4)), (7, (61, 2)), (8, (2, 61, 5)), (5, (30, 6))])
def test_up_to_64_kib_the_first_device_has_the_bits_of_the_tree(
    count: int, shape: tuple[int, ...], dtype: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It receives all rows, and sends the others their rows of Q, and R."""
    host, spec = array(shape, dtype, 1), [None] * (len(shape) - 2)
    few, tree = (
        st.device_put(host, st.NamedSharding(st.make_mesh((count,), (name,), devices=devices), st.P(*spec, name)))
        for devices in [st.devices(backend)[:count]]
        for name in ("few", "tree")
    )
    with st.transfers() as log:
        q, r = linalg.qr(few)
    away = math.prod([*shape[:-2], shape[-2] - -(-shape[-2] // count), shape[-1]])
    assert log.bytes == away * (few.dtype.itemsize + q.dtype.itemsize) + (count - 1) * r.nbytes
    found = [q, r, tall_r(few), *linalg.qr(few)]
    monkeypatch.setattr(first_device, "GATHERED", 0)
    wanted = [*linalg.qr(tree), tall_r(tree), *linalg.qr(tree)]
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_64_kib_are_few() -> None:
    mesh = mesh_of((4,), "checked")
    for rows, sent in ((4096, 3 * 1024 * 4 * (4 + 4) + 3 * 64), (4100, 3 * 3 * 64)):
        x = st.ones((rows, 4), dtype="float32", device=mesh)
        with st.transfers() as log:
            linalg.qr(x)
        assert log.bytes == sent


def test_bytes_of_the_tree_on_1024_simulated_devices() -> None:
    x = st.zeros((1 << 22, 32), dtype="float32", device=st.AbstractMesh((1024,), ("x",)))
    with st.transfers() as log:
        q, r = linalg.qr(x)
    assert (q.sharding, r.shape) == (x.sharding, (32, 32))
    assert log.bytes == 3 * 1023 * 32 * 32 * 4


@everywhere
def test_least_squares_of_tall_matrices(backend: str) -> None:
    a, b = array((4100, 3), "float64", 1), array((4100, 2), "float64", 2)
    mesh = mesh_of((4,), backend)
    x, y = st.device_put(a, mesh), st.device_put(b, mesh)
    assert min(x.nbytes, y.nbytes) > first_device.GATHERED
    with st.transfers() as log:
        found = linalg.lstsq(x, y)
    for part, wanted in zip(found, np.linalg.lstsq(a, b), strict=True):
        np.testing.assert_allclose(np.asarray(part), wanted, rtol=1e-8)
    assert log.bytes < a.nbytes + b.nbytes


RIGHT_SIDES: dict[str, tuple[Any, ...]] = {
    "one": ((), "float64", "float64"),
    "half": ((2,), "float64", "float64"),  # the most columns that are factorized together with the matrix
    "more": ((3,), "float64", "float64"),
    "none": ((0,), "float64", "float64"),
    "wider": ((1,), "float32", "float64"),
    "narrower": ((1,), "complex64", "float32"),
    "integers": ((1,), "int64", "int32"),
}


@pytest.mark.parametrize("lower_rank", [False, True])
@pytest.mark.parametrize("name", RIGHT_SIDES)
@everywhere
def test_least_squares_with_any_right_sides(backend: str, name: str, lower_rank: bool) -> None:
    columns, of_a, of_b = RIGHT_SIDES[name]
    a, b = array((41, 4), of_a, 1), array((41, *columns), of_b, 2)
    if lower_rank:
        a[:, 3] = a[:, 1]
    mesh = mesh_of((4,), backend)
    found = linalg.lstsq(st.device_put(a, mesh), st.device_put(b, mesh), 1e-4)
    wanted = np.linalg.lstsq(a, b, 1e-4)
    tolerance = 1e-4 if "64" not in of_a or of_a == "complex64" else 1e-9
    for part, expected in zip(found, wanted, strict=True):
        assert np.shape(part) == np.shape(expected)
        np.testing.assert_allclose(np.asarray(part), expected, rtol=tolerance, atol=tolerance)
    inferred = st.eval_shape(lambda a, b: linalg.svdvals(a), st.device_put(a, mesh), st.device_put(b, mesh))
    assert found[3].dtype == inferred.dtype


@everywhere
def test_matrices_that_are_not_tall_are_not_factorized_by_parts(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    for shape, spec in (
        ((15, 4), ("x",)),
        ((16, 4), (None, "x")),
        ((16, 4), ()),
        ((16, 0), ("x",)),
        ((5, 8, 2), (None, "x")),
    ):
        x = st.device_put(np.ones(shape, "float32"), st.NamedSharding(mesh, st.P(*spec)))
        assert not is_tall(x)
        assert not is_wide(x) or spec == (None, "x")
        assert linalg.svdvals(x).shape == (*shape[:-2], min(shape[-2:]))


def test_blocks_of_rows_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtensor.functions.linalg.tsqr._BLOCK", 64)
    for m in (64, 400, 407):
        host = array((m, 3), "float64", m)
        x = st.device_put(host, mesh_of((3,), "numpy"))
        q, r = linalg.qr(x)
        residuals(host, q, r)
        assert np.array_equal(np.asarray(tall_r(x)), np.asarray(r))  # without Q, the same bits


@pytest.mark.parametrize("backend", ["numpy", "checked"])
def test_errors_of_tall_matrices(backend: str) -> None:
    x = st.device_put(np.full((8, 1), np.nan), mesh_of((2,), backend))
    with pytest.raises(np.linalg.LinAlgError):
        linalg.svd(x, full_matrices=False)
    with pytest.raises(st.ArgumentTypeError, match=r"^qr: array type float16 is unsupported in linalg"):
        linalg.qr(x.astype("float16"))
