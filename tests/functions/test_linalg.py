"""`st.linalg` against NumPy: decompositions, norms, powers; the layouts of results, and errors."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
import shardtensor.linalg
from shardtensor.testing.linear_algebra_cases import matrices
from tests.draws import drawn
from tests.interpreters.test_infer import layouts
from tests.layouts import array, assert_same, everywhere, mesh_of, meshes, placed, shapes

linalg = shardtensor.linalg
SEVERAL = ["eig", "eigh", "eigvals", "qr", "qr complete", "slogdet", "svd", "svd full"]


def call(name: str, xp: Any, x: Any) -> Any:
    kind, _, mode = name.partition(" ")
    params = {"qr": {"mode": mode or "reduced"}, "svd": {"full_matrices": bool(mode)}}.get(kind, {})
    return getattr(xp, kind)(x, **params)


def on_host(x: Any) -> np.ndarray:
    return np.asarray(x)


def adjoint(x: np.ndarray) -> np.ndarray:
    return np.conj(np.matrix_transpose(x))


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    limit = 1e-3 if found.dtype.char in "fF" else 1e-9
    np.testing.assert_allclose(found, wanted, rtol=limit, atol=limit)


def consists(name: str, x: np.ndarray, result: Any) -> None:
    """Compares what does not depend on signs of vectors, or on the order of eigenvalues."""
    made = [on_host(part) for part in (result if isinstance(result, tuple) else (result,))]
    kind = name.partition(" ")[0]
    if kind == "eig":
        close(x @ made[1], made[1] * made[0][..., None, :])
    elif kind == "eigvals":
        close(np.sort_complex(made[0]), np.sort_complex(np.linalg.eigvals(x)))
    elif kind == "eigh":
        close(made[1] * made[0][..., None, :] @ adjoint(made[1]), x)
        close(made[0], np.linalg.eigvalsh(x))
    elif kind == "qr":
        close(made[0] @ made[1], x)
        close(
            adjoint(made[0]) @ made[0],
            np.broadcast_to(np.eye(made[0].shape[-1]), (*x.shape[:-2],) + (made[0].shape[-1],) * 2),
        )
        close(made[1], np.triu(made[1]))
    elif kind == "svd":
        k = made[1].shape[-1]
        close(made[0][..., :k] * made[1][..., None, :] @ made[2][..., :k, :], x)
        close(made[1], np.linalg.svdvals(x))
    else:
        close(made[0], np.linalg.slogdet(x)[0])
        close(made[1], np.linalg.slogdet(x)[1])


def decomposed(data: Any, name: str, backend: str) -> None:
    x = matrices(data, square=not name.startswith(("qr", "svd")))
    if name == "eigh":
        x = ((x + adjoint(x)) / 2).astype(x.dtype)
    mesh = data.draw(meshes(backend))
    operand = placed(data, x, backend, mesh)
    found = call(name, linalg, operand)
    wanted = call(name, np.linalg, x)
    for part, answer in zip(*[made if isinstance(made, tuple) else (made,) for made in (found, wanted)], strict=True):
        complex_too = (
            np.result_type(answer, np.complex64) if name.startswith("eig") and name != "eigh" else answer.dtype
        )
        assert (part.shape, part.dtype) == (answer.shape, complex_too)
        assert_same(part, on_host(part), exact=True)  # Every shard is the part of the whole that its index says.
    consists(name, x, found)
    inferred = st.eval_shape(lambda x: call(name, linalg, x), operand)
    assert layouts(inferred) == layouts(found)
    assert st.explain(lambda x: call(name, linalg, x), operand).bytes >= 0


@everywhere
@pytest.mark.parametrize("name", SEVERAL)
def test_decompositions_match_numpy(name: str, backend: str) -> None:
    hypothesis.settings(max_examples=8)(hypothesis.given(some.data())(lambda data: decomposed(data, name, backend)))()


@pytest.mark.full
@pytest.mark.parametrize("name", SEVERAL)
def test_decompositions_match_numpy_at_length(name: str, backend: str) -> None:
    hypothesis.settings(max_examples=drawn(200))(
        hypothesis.given(some.data())(lambda data: decomposed(data, name, backend))
    )()


@everywhere
def test_stacks_stay_split_and_matrices_are_gathered_only_if_they_must(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    x = st.device_put(np.eye(3) + array((6, 3, 3), "float64", 1) / 9, st.NamedSharding(mesh, st.P("x")))
    with st.transfer_guard("disallow"):
        for name in (
            "inv",
            "cholesky",
            "det",
            "eigvalsh",
            "svdvals",
            "pinv",
            "matrix_rank",
            "slogdet",
            "eig",
            "svd",
            "qr",
            "cond",
        ):
            operand = st.device_put(np.broadcast_to(np.eye(3), (6, 3, 3)), x.sharding) if name == "cholesky" else x
            made = getattr(linalg, name)(operand)
            for part in made if isinstance(made, tuple) else (made,):
                assert part.sharding.spec == st.P("x"), name
        whole, columns = [st.NamedSharding(mesh, spec) for spec in (st.P(), st.P(None, "x"))]
        right = st.device_put(np.ones((3, 8)), columns)
        assert linalg.solve(st.device_put(np.eye(3), whole), right).sharding.spec == st.P(None, "x")
    rows = st.device_put(np.asarray(x), st.NamedSharding(mesh, st.P(None, "x")))
    with st.transfers() as log:
        made = linalg.inv(rows)
    assert made.sharding.spec == st.P("x")  # The split moves: an all-to-all, of less than the tensor.
    assert 0 < log.bytes < rows.nbytes
    matrix = st.device_put(np.eye(8), st.NamedSharding(mesh, st.P("x")))
    with st.transfer_guard("disallow"), pytest.raises(st.TransferError, match="inv"):
        linalg.inv(matrix)
    with st.transfer_guard("disallow"), pytest.raises(st.TransferError, match="svd"):
        linalg.svd(matrix)
    with st.transfers() as log:
        linalg.matrix_norm(matrix)
        linalg.matrix_norm(matrix, ord=np.inf)
        linalg.trace(matrix)
    assert log.bytes < matrix.nbytes


ORDERS = [None, 0, 1, -1, 2, -2, 3, 0.5, np.inf, -np.inf, "fro", "nuc", "f", "x"]


def norms(data: Any, backend: str) -> None:
    host = array(
        data.draw(shapes(1, 3)), data.draw(some.sampled_from(["int64", "float32", "float64", "complex64", "bool"])), 1
    )
    if host.dtype.kind in "fc" and host.size and data.draw(some.booleans()):
        host.flat[data.draw(some.integers(0, host.size - 1))] = data.draw(some.sampled_from([np.nan, np.inf]))
    order, keepdims = data.draw(some.sampled_from(ORDERS)), data.draw(some.booleans())
    axes: list[Any] = [None, *range(-host.ndim, host.ndim)]
    axis = data.draw(some.sampled_from(axes))
    if host.ndim > 1 and data.draw(some.booleans()):
        axis = tuple(data.draw(some.permutations(range(host.ndim)))[:2])
    if order in (2, -2, "nuc") and not np.isfinite(host).all():
        order = "fro"  # Libraries differ in the singular values of NaN: some raise.
    x = placed(data, host, backend, data.draw(meshes(backend)))
    with np.errstate(all="ignore"):
        try:
            wanted = np.linalg.norm(host, order, axis, keepdims)
        except (ValueError, TypeError, np.linalg.LinAlgError):
            with pytest.raises((ValueError, TypeError)):
                linalg.norm(x, order, axis, keepdims)
            return
        assert_same(linalg.norm(x, order, axis, keepdims), wanted)


@everywhere
@pytest.mark.filterwarnings("ignore")
def test_norms_match_numpy(backend: str) -> None:
    hypothesis.settings(max_examples=drawn(50))(hypothesis.given(some.data())(lambda data: norms(data, backend)))()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_norms_match_numpy_at_length(backend: str) -> None:
    hypothesis.settings(max_examples=drawn(2000))(hypothesis.given(some.data())(lambda data: norms(data, backend)))()


@everywhere
@pytest.mark.parametrize("order", [0, 1, 2, 3, np.inf, -np.inf])
def test_long_norms_are_combined_from_partial_results(order: float, backend: str) -> None:
    """They have more elements than the limit below which norms are composed of other operators."""
    host = array((70, 80), "float32", 3)
    for spec in (st.P("x"), st.P("y", "x"), st.P()):
        x = st.device_put(host, st.NamedSharding(mesh_of((2, 3), backend), spec))
        for axis in (None, 0, 1):
            assert_same(linalg.vector_norm(x, axis=axis, ord=order), np.linalg.vector_norm(host, axis=axis, ord=order))


@everywhere
def test_powers_and_chains_of_products(backend: str) -> None:
    mesh = mesh_of((3,), backend)
    for dtype in ("int64", "float64"):
        host = (array((5, 4, 4), dtype, 1) + 9 * np.eye(4)).astype(dtype)
        x = st.device_put(host, st.NamedSharding(mesh, st.P("x")))
        for n in (0, 1, 2, 3, 5, 8, *((-1, -3) if dtype == "float64" else ())):
            assert_same(linalg.matrix_power(x, n), np.linalg.matrix_power(host, n))
    hosts = [array(s, "float64", 1) for s in ((7,), (7, 2), (2, 9), (9, 3), (3,))]
    x = st.device_put(hosts[2], st.NamedSharding(mesh, st.P("x")))
    for part in (slice(1, 4), slice(0, 4), slice(1, 5), slice(0, 5), slice(2, 4)):
        given = [x if k == 2 else host for k, host in enumerate(hosts)][part]
        assert_same(linalg.multi_dot(given), np.linalg.multi_dot(hosts[part]))


@everywhere
@pytest.mark.parametrize("shape", [(6, 3), (3, 6), (4, 4)], ids=str)
def test_least_squares(shape: tuple[int, int], backend: str) -> None:
    mesh = mesh_of((3,), backend)
    for rank, right in ((min(shape), (shape[0],)), (2, (shape[0], 2)), (min(shape), (shape[0], 2))):
        a, b = array(shape, "float64", 1) + 5 * np.eye(*shape), array(right, "float64", 2)
        a[:, rank:] = a[:, : max(shape[1] - rank, 0)] if rank < min(shape) else a[:, rank:]
        x = st.device_put(a, st.NamedSharding(mesh, st.P("x")))
        for found, wanted in zip(linalg.lstsq(x, b), np.linalg.lstsq(a, b), strict=True):
            if isinstance(found, st.ShardedTensor):
                assert found.shape == wanted.shape
                np.testing.assert_allclose(on_host(found), wanted, rtol=1e-9, atol=1e-9)
            else:
                assert found == wanted
    with pytest.raises(st.ConcretizationError):
        st.eval_shape(linalg.lstsq, x, b)


@everywhere
def test_in_maps(backend: str) -> None:
    """Functions of a mapped function return arrays of its device, of the same elements and dtypes."""
    kinds = set()

    def f(x: Any) -> Any:
        w, v = linalg.eigh(x)
        q, r = linalg.qr(x)
        made = v @ (w[..., None] * st.matrix_transpose(v)) + q @ r + linalg.inv(x) + linalg.pinv(x) + linalg.cholesky(x)
        made = made + linalg.norm(x) + linalg.matrix_power(x, 3) + linalg.solve(x, x) + linalg.cholesky(x, upper=True)
        made = (
            made
            + linalg.slogdet(x)[1][..., None, None]
            + linalg.matrix_norm(x, keepdims=True)
            + linalg.cond(x)[..., None, None]
        )
        made = made + st.real(linalg.eigvals(x)).sum() + linalg.svd(x).S[..., None] + linalg.svdvals(x)[..., None]
        kinds.add(type(made) is type(x))
        return (
            made
            + linalg.det(x)[..., None, None]
            + linalg.eigvalsh(x)[..., None]
            + linalg.matrix_rank(x)[..., None, None]
        )

    host = np.stack([np.eye(3) * k + 1 for k in range(1, 5)])
    found = st.pmap(f, st.shard(host, devices=mesh_of((2,), backend)))
    for k, part in enumerate((host[:2], host[2:])):
        assert_same(st.asarray(on_host(found[k])), on_host(f(st.asarray(part))))
    assert kinds == {True}


def singular(backend: str) -> Any:
    return st.device_put(np.zeros((4, 2, 2)), st.NamedSharding(mesh_of((2,), backend), st.P("x")))


ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "singular": (lambda x: linalg.inv(x), np.linalg.LinAlgError, "^inv: "),
    "singular system": (lambda x: linalg.solve(x, x), np.linalg.LinAlgError, "^solve: "),
    "not positive": (lambda x: linalg.cholesky(x), np.linalg.LinAlgError, "^cholesky: "),
    "no matrix": (lambda x: linalg.inv(x[0, 0]), np.linalg.LinAlgError, "^inv: x has shape .2,.; wanted at least two dim"),
    "no matrix to factor": (lambda x: linalg.svd(x[0, 0]), np.linalg.LinAlgError, "^svd: x has shape"),
    "not square": (lambda x: linalg.det(x[:, :1]), np.linalg.LinAlgError, "^det: x has shape .4, 1, 2.; wanted square"),
    "not square, several": (lambda x: linalg.eig(x[:, :1]), np.linalg.LinAlgError, "^eig: x has shape .4, 1, 2."),
    "half": (lambda x: linalg.inv(st.astype(x, "float16")), st.ArgumentTypeError, "^inv: .* float16 is unsupported in linalg"),
    "half, several": (lambda x: linalg.qr(st.astype(x, "float16")), st.ArgumentTypeError, "^qr: array type float16"),
    "mode": (lambda x: linalg.qr(x, mode="raw"), st.ArgumentError, "^qr: mode is 'raw'; wanted 'reduced'"),
    "right-hand side": (lambda x: linalg.solve(x, np.ones((3, 2))), st.ShapeError, "^solve: .* do not fit"),
    "vector": (lambda x: linalg.solve(x, np.ones(3)), st.ShapeError, "^solve: .* do not fit"),
    "scalar": (lambda x: linalg.solve(x, np.ones(())), st.ShapeError, "^solve: x2 has no dimensions"),
    "ord": (lambda x: linalg.vector_norm(x, ord="fro"), st.ArgumentError, "^vector_norm: ord is 'fro'"),
    "matrix ord": (lambda x: linalg.matrix_norm(x, ord=3), st.ArgumentError, "^matrix_norm: ord is 3"),
    "least of nothing": (lambda x: linalg.vector_norm(x[:0], ord=-np.inf), st.ShapeError, "^vector_norm: "),
    "three axes": (lambda x: linalg.norm(x, 2), st.ArgumentError, "^norm: axis is None, of 3 dimensions"),
    "power": (lambda x: linalg.matrix_power(x, 1.5), st.ArgumentTypeError, "^matrix_power: n is a float"),
    "outer": (lambda x: linalg.outer(x, x), st.ShapeError, "^outer: x1 has 3 dimensions; wanted one"),
    "one matrix": (lambda x: linalg.multi_dot([x]), st.ShapeError, "^multi_dot: 1 array is given"),
    "stack in a chain": (lambda x: linalg.multi_dot([x, x]), np.linalg.LinAlgError, "^multi_dot: array 0 has shape"),
    "empty": (lambda x: linalg.cond(x[:, :0]), np.linalg.LinAlgError, "^cond: x has shape .4, 0, 2."),
    "squares": (lambda x: linalg.lstsq(x[0], np.ones(3)), np.linalg.LinAlgError, "^lstsq: a has shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str, backend: str) -> None:
    function, kind, text = ERRORS[name]
    x = singular(backend)
    if backend == "cupy" and name in ("singular", "singular system", "not positive"):
        assert np.isnan(on_host(function(x))).any()  # To raise an error, CuPy would wait for the GPU.
        return
    with pytest.raises(kind, match=text):
        function(x)
    assert not on_host(x).any()


@pytest.mark.parametrize("backend", ["numpy", "checked", "torch"], indirect=True)
def test_singular_matrices_raise_numpys_error_on_all_backends_with_errors(backend: str) -> None:
    """CuPy does not check the status of its solver."""
    for function in (linalg.inv, linalg.cholesky, lambda x: linalg.solve(x, x)):
        with pytest.raises(linalg.LinAlgError):
            function(singular(backend))
        with pytest.raises(st.ShardTensorError):
            function(singular(backend))


@pytest.mark.parametrize("name", [n for n in [*linalg.__all__, *st.fft.__all__] if n[0].islower()])
def test_functions_are_documented(name: str) -> None:
    text = inspect.getdoc(getattr(linalg if name in linalg.__all__ else st.fft, name))
    assert ">>>" in (text or "")


def test_namespaces_have_the_names_of_the_standard() -> None:
    wanted = """cholesky cross det diagonal eigh eig eigvals eigvalsh inv matmul matrix_norm matrix_power matrix_rank
        matrix_transpose outer pinv qr slogdet solve svd svdvals tensordot trace vecdot vector_norm"""
    assert set(wanted.split()) <= set(dir(linalg)) == set(linalg.__all__)
    assert linalg.LinAlgError is np.linalg.LinAlgError
    assert linalg.matmul is st.matmul


def test_results_are_named_tuples_and_pickle() -> None:
    found = linalg.svd(st.device_put(np.eye(3), mesh_of((2,), "numpy")))
    assert found._fields == ("U", "S", "Vh")
    assert isinstance(found, linalg.SVDResult)
    np.testing.assert_array_equal(on_host(pickle.loads(pickle.dumps(found)).S), np.ones(3))
    assert linalg.eigh(np.eye(2))._fields == linalg.eig(np.eye(2))._fields == ("eigenvalues", "eigenvectors")
    assert linalg.qr(np.eye(2))._fields == ("Q", "R")
    assert linalg.slogdet(np.eye(2))._fields == ("sign", "logabsdet")


NUMPYS: dict[str, tuple[Any, ...]] = {
    "inv": (), "det": (), "cholesky": (), "eigvalsh": (), "svdvals": (), "pinv": (), "pinv of rank 1": (0.9,), "cond": (1,),
    "matrix_rank": (), "matrix_power": (3,), "norm": (), "norm of rows": (2, 1), "solve": (np.ones(4),), "trace": (),
    "diagonal": (), "vector_norm": (), "matrix_norm": (), "eigh": (), "qr": (), "svd": (), "slogdet": (),
    "matrix_transpose": (), "tensorinv": (1,), "tensorsolve": (np.ones(4),), "outer": (np.ones(3),),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMPYS)
def test_numpys_functions_of_tensors(name: str, backend: str) -> None:
    """`numpy.linalg` calls the functions of this library; matrices are the last dimensions, as there."""
    kind, args = name.partition(" ")[0], NUMPYS[name]
    host = np.eye(4) * 3 + 1
    if kind in ("trace", "diagonal", "matrix_transpose", "inv"):
        host = np.stack([host, host * 2, host * 3])
    host = host[0] if kind == "outer" else host
    x = st.device_put(host, mesh_of((2,), backend))
    wanted, found = getattr(np.linalg, kind)(host, *args), getattr(np.linalg, kind)(x, *args)
    if not isinstance(wanted, tuple):
        assert_same(found, wanted)
    elif kind != "svd":
        consists(kind, host, found)


def test_other_arguments_of_numpys_functions() -> None:
    host = np.eye(3) * np.array([3.0, 2, 1e-3])
    x = st.device_put(host, mesh_of((2,), "numpy"))
    assert_same(np.linalg.svd(x, compute_uv=False), np.linalg.svd(host, compute_uv=False))
    assert_same(np.linalg.pinv(x, rcond=1e-2), np.linalg.pinv(host, rcond=1e-2))
    assert_same(
        np.linalg.pinv(np.ones((2, 2)) + x[:2, :2] * 1e-15), np.linalg.pinv(np.ones((2, 2)) + host[:2, :2] * 1e-15)
    )
    assert_same(np.linalg.matrix_rank(x, rtol=1e-2), np.linalg.matrix_rank(host, rtol=1e-2))
    assert_same(np.linalg.multi_dot([x, x, x]), np.linalg.multi_dot([host] * 3))
    assert np.linalg.svd(x, full_matrices=False).U.shape == (3, 3)
    for function in (np.fft.fft, np.fft.fft2, np.fft.rfft2, np.fft.irfft2, np.fft.ifft2, np.fft.fftshift):
        assert_same(function(x), function(host))
    with pytest.raises(
        st.ArgumentTypeError, match=r"numpy.linalg.matrix_rank: has no sharded form here with tol=0.1; leave"
    ):
        np.linalg.matrix_rank(x, tol=0.1)
    with pytest.raises(st.ArgumentTypeError, match=r"numpy.linalg.eigh: has no sharded form here with UPLO='U'"):
        np.linalg.eigh(x, UPLO="U")


def test_tensors_as_matrices_of_wrong_sizes() -> None:
    with pytest.raises(np.linalg.LinAlgError, match=r"tensorsolve: b has 3 elements and the solution 2"):
        linalg.tensorsolve(st.ones((3, 2)), st.ones(3))
    with pytest.raises(np.linalg.LinAlgError, match=r"tensorinv: a has shape .3, 2.; wanted"):
        linalg.tensorinv(st.ones((3, 2)), 1)
    with pytest.raises(st.ArgumentError, match=r"tensorinv: ind is 0"):
        linalg.tensorinv(st.ones((3, 2)), 0)


@pytest.mark.parametrize("p", [1, "fro", np.inf])
def test_the_condition_number_of_a_matrix_with_nan_is_nan(p: Any) -> None:
    host = np.asarray([[[np.nan, 1], [1, 1]], [[1, 1], [1, 1]], [[np.inf, 1], [1, 1]]], np.float32)
    with np.errstate(all="ignore"):
        assert_same(st.linalg.cond(st.asarray(host), p), np.linalg.cond(host, p))
