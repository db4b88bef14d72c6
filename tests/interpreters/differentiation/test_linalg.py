"""Gradients of linear algebra: against central differences and JAX, in stacks and matrices that are split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.functions.algorithms import first_device
from shardtensor.functions.linalg import elimination, panels
from tests.interpreters.differentiation.numeric import check_gradients
from tests.layouts import everywhere, mesh_of, strided

RNG = np.random.default_rng(0)
WEIGHTS = RNG.standard_normal((2, 8, 8))

SQUARE, STACK = (4, 4), (2, 3, 3)
ALL = [SQUARE, STACK, (6, 3), (3, 6), (2, 2, 4), (2, 4, 2)]


def adjoint(np: Any, x: Any) -> Any:
    return np.conj(np.matrix_transpose(x))


def hermitian(np: Any, x: Any) -> Any:
    return (x + adjoint(np, x)) / 2


def positive(np: Any, x: Any) -> Any:
    return x @ adjoint(np, x) + 3 * np.eye(x.shape[-1])


def mixed(np: Any, y: Any) -> Any:
    """Returns a number that depends on all elements."""
    a, b = WEIGHTS[:, : y.shape[-2], : y.shape[-1]]
    return (a * np.real(y) + b * np.imag(y) + np.real(a * y * y)).sum()


def projected(np: Any, vectors: Any) -> Any:
    """Returns a number that does not depend on the phases of vectors."""
    return mixed(np, (vectors * np.arange(1.0, vectors.shape[-1] + 1)) @ adjoint(np, vectors))


def space(np: Any, vectors: Any) -> Any:
    """Returns a number that depends on the space only that vectors span."""
    return mixed(np, vectors @ adjoint(np, vectors))


def of_svd(full: bool) -> Callable[[Any, Any], Any]:
    def f(np: Any, x: Any) -> Any:
        u, s, vh = np.linalg.svd(x, full_matrices=full)
        k = s.shape[-1]
        total = mixed(np, (u[..., :k] * np.arange(1.0, k + 1)) @ vh[..., :k, :]) + (s**3).sum()
        return total + space(np, u[..., k:]) + space(np, adjoint(np, vh[..., k:, :])) if full else total

    return f


def of_qr(mode: str) -> Callable[[Any, Any], Any]:
    def f(np: Any, x: Any) -> Any:
        q, r = np.linalg.qr(x, mode=mode)
        k = min(x.shape[-2:])
        signs = np.sign(np.real(np.diagonal(r, axis1=-2, axis2=-1)))
        first = mixed(np, q[..., :k] * signs[..., None, :]) + mixed(np, r[..., :k, :] * signs[..., :, None])
        return first + space(np, q[..., k:]) if q.shape[-1] > k else first

    return f


def of_slogdet(np: Any, x: Any) -> Any:
    sign, logarithm = np.linalg.slogdet(x)
    return (logarithm**2).sum() + np.real(sign * (1 + 2j)).sum()


def of_eigh(np: Any, x: Any) -> Any:
    values, vectors = np.linalg.eigh(hermitian(np, x))
    return (values**3).sum() + projected(np, vectors)


def of_eigvals(np: Any, x: Any) -> Any:
    values = np.linalg.eigvals(x)
    return (np.real(values**3) + np.abs(values) ** 4).sum()


def of_eig(np: Any, x: Any) -> Any:
    """The eigenvectors are those of LAPACK: of length 1, with a real greatest element."""
    values, vectors = np.linalg.eig(x)
    sizes = np.where(np.imag(vectors) == 0, np.abs(vectors), 0)
    greatest = np.take_along_axis(vectors, np.argmax(sizes, axis=-2)[..., None, :], axis=-2)
    vectors = vectors / np.sign(np.real(greatest))  # In some libraries, all elements of a real vector are negative.
    powers = np.stack([values, values**2])[..., None, :]
    return np.real(powers * vectors * WEIGHTS[0, : x.shape[-1], 0][:, None]).sum()


def of_norm(order: Any) -> Callable[[Any, Any], Any]:
    return lambda np, x: np.linalg.matrix_norm(x, ord=order).sum()


def of_condition(p: Any) -> Callable[[Any, Any], Any]:
    return lambda np, x: np.linalg.cond(x, p).sum()


def of_lstsq(rcond: float | None) -> Callable[[Any, Any], Any]:
    def f(np: Any, x: Any) -> Any:
        solution, residuals, _, values = np.linalg.lstsq(x, x[:, :1] ** 2 + 1, rcond)
        return mixed(np, solution) + (residuals**2).sum() + (values**3).sum()

    return f


FUNCTIONS: dict[str, tuple[Callable[[Any, Any], Any], list[Any]]] = {
    "inv": (lambda np, x: mixed(np, np.linalg.inv(x)), [SQUARE, STACK]),
    "det": (lambda np, x: np.real(np.linalg.det(x) * (1 - 2j)).sum(), [SQUARE, STACK]),
    "slogdet": (of_slogdet, [SQUARE, STACK]),
    "cholesky": (lambda np, x: mixed(np, np.linalg.cholesky(positive(np, x))), [SQUARE, STACK]),
    "cholesky, upper": (lambda np, x: mixed(np, np.linalg.cholesky(positive(np, x), upper=True)), [SQUARE, STACK]),
    "eigh": (of_eigh, [SQUARE, STACK]),
    "eigvalsh": (lambda np, x: (np.linalg.eigvalsh(hermitian(np, x)) ** 3).sum(), [SQUARE, STACK]),
    "eig": (of_eig, [SQUARE, STACK]),
    "eigvals": (of_eigvals, [SQUARE, STACK]),
    "svd": (of_svd(False), ALL),
    "svd, left": (lambda np, x: projected(np, np.linalg.svd(x, full_matrices=False)[0]), ALL),
    "svd, right": (lambda np, x: projected(np, adjoint(np, np.linalg.svd(x, full_matrices=False)[2])), ALL),
    "svd, full": (of_svd(True), ALL),
    "svdvals": (lambda np, x: (np.linalg.svdvals(x) ** 3).sum(), ALL),
    "qr": (of_qr("reduced"), ALL),
    "qr, q": (lambda np, x: projected(np, np.linalg.qr(x)[0]), ALL),
    "qr, complete": (of_qr("complete"), ALL),
    "pinv": (lambda np, x: mixed(np, np.linalg.pinv(x)), ALL),
    "pinv of lower rank": (lambda np, x: mixed(np, np.linalg.pinv(x, rtol=0.4)), ALL),
    "solve": (lambda np, x: mixed(np, np.linalg.solve(x, x[..., :2] ** 2)), [SQUARE, STACK]),
    "solve, vector": (lambda np, x: mixed(np, np.linalg.solve(x, x.reshape(-1)[: x.shape[-1]])[..., None]), [SQUARE, STACK]),
    "solve, stack": (lambda np, x: mixed(np, np.linalg.solve(x[..., :1, :, :], x)), [STACK]),
    "solve, one matrix": (lambda np, x: mixed(np, np.linalg.solve(x[0], x)), [STACK]),
    "matrix_power": (lambda np, x: mixed(np, np.linalg.matrix_power(x, 3) + np.linalg.matrix_power(x, -2)), [SQUARE, STACK]),
    "lstsq": (of_lstsq(None), [SQUARE, (6, 3), (3, 6)]),
    "lstsq of lower rank": (of_lstsq(0.3), [SQUARE, (6, 3), (3, 6)]),
    **{f"cond, {p}": (of_condition(p), [SQUARE, STACK]) for p in (None, -2, 1, -np.inf, "fro", "nuc")},
    **{f"norm, {order}": (of_norm(order), ALL) for order in ("fro", "nuc", 2, -2, 1, -1, np.inf, -np.inf)},
}  # fmt: skip


def numbers(shape: Any, dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    made = rng.standard_normal(shape)
    return np.asarray(made + 1j * rng.standard_normal(shape) if dtype == "complex128" else made)


def put(host: Any, backend: str, *spec: Any, count: int = 2) -> st.ShardedTensor:
    return st.device_put(host, st.NamedSharding(mesh_of((count,), backend), st.P(*spec)))


def squared(fn: Any) -> Any:
    """Returns a function whose gradient needs the second derivatives of another one."""

    def f(x: Any) -> Any:
        g = st.grad(fn)(x)
        return st.real(g * g * st.asarray(WEIGHTS[0].ravel()[: x.shape[-1]])).sum()

    return f


@everywhere
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_central_differences(backend: str, name: str) -> None:
    if backend == "cupy" and name.startswith("eig") and not name.startswith("eigh") and name != "eigvalsh":
        pytest.skip("CuPy has no eigenvalues of general matrices")
    function, shapes = FUNCTIONS[name]
    for k, shape in enumerate(shapes):
        for dtype in strided(("complex128", "float64"), 2, k):
            x = put(numbers(shape, dtype, k), backend, "x" if len(shape) > 2 or k % 2 else None)
            (g,) = check_gradients(lambda x: function(st, x), [x], [0])
            if k == len(shapes) - 1 and not name.startswith("lstsq"):  # The rank is needed in Python.
                compiled = st.jit(st.grad(lambda x: function(st, x)))(x)
                np.testing.assert_allclose(np.asarray(compiled), np.asarray(g), rtol=1e-10, atol=1e-10)
                assert compiled.sharding == g.sharding
                check_gradients(squared(lambda x: function(st, x)), [x], [0], limit=1e-5)


def of_gradient(np: Any, grad: Any, function: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Returns a function whose gradient needs second derivatives."""
    return lambda x: np.real(grad(lambda x: function(np, x))(x) ** 2).sum()


@pytest.mark.full
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_jax(name: str) -> None:
    jax = pytest.importorskip("jax")
    function, shapes = FUNCTIONS[name]
    for k, shape in enumerate(shapes):
        for dtype in ("float64", "complex128"):
            if name == "eig" or (name == "svd, full" and shape[-2] != shape[-1]):
                continue  # JAX has no derivatives of these.
            if name == "qr, complete" and shape[-2] > shape[-1]:
                continue  # JAX's are those of the vectors that LAPACK chooses to complete the basis.
            if "lower rank" in name:
                continue  # JAX's are those of matrices of that rank, of which no singular value was cut off.
            x = numbers(shape, dtype, k)

            pairs = [(lambda x: function(jax.numpy, x), lambda x: function(st, x))]
            if k == 0 and name != "eigvals":
                pairs.append((of_gradient(jax.numpy, jax.grad, function), of_gradient(st, st.grad, function)))
            for theirs, mine in pairs:
                with jax.enable_x64(True):
                    wanted = np.asarray(jax.jit(jax.grad(theirs))(x))
                found = np.asarray(st.grad(mine)(put(x, "numpy", "x")))
                np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9 * (1 + np.abs(wanted).max()))


# -- what is particular ------------------------------------------------------------------------------


def test_the_gradient_of_a_cholesky_factor_is_symmetric() -> None:
    x = put(positive(np, numbers((4, 4), "complex128")), "numpy")
    g = np.asarray(st.grad(lambda x: mixed(st, st.linalg.cholesky(x)))(x))
    np.testing.assert_allclose(g, np.conj(g.T), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_determinant_of_a_singular_matrix_has_a_gradient(rank: int) -> None:
    x = (
        np.zeros((3, 3))
        + np.asarray([[0, 1], [1, 2], [1, -1.0]])[:, :rank] @ np.asarray([[1, 2, 0], [0, 4, 1.0]])[:rank]
    )
    minors = [[np.delete(np.delete(x, i, 0), j, 1) for j in range(3)] for i in range(3)]
    adjugate = [[(-1) ** (i + j) * np.linalg.det(minors[i][j]) for j in range(3)] for i in range(3)]
    stack = put(np.stack([x, np.eye(3) * 2]), "numpy", "x")
    g = st.grad(lambda x: st.linalg.det(x).sum())(stack)
    np.testing.assert_allclose(np.asarray(g), [adjugate, np.eye(3) * 4], rtol=1e-12, atol=1e-12)
    if rank == 2:
        check_gradients(squared(lambda x: st.linalg.det(x).sum()), [stack], [0], limit=1e-5)


def test_least_squares_of_orthonormal_columns_have_a_gradient() -> None:
    x, right = np.eye(4, 2), np.arange(1.0, 5)
    a, b = put(x, "numpy", "x"), put(right, "numpy", "x")
    check_gradients(lambda a, b: (st.linalg.lstsq(a, b)[0] ** 3).sum(), [a, b], [0, 1])


def test_equal_values_have_gradients_if_no_vectors_are_used() -> None:
    x = put(np.eye(3), "numpy")
    for fn in (lambda x: st.linalg.eigh(x).eigenvalues.sum(), lambda x: st.linalg.svd(x).S.sum()):
        np.testing.assert_allclose(np.asarray(st.grad(fn)(x)), np.eye(3), atol=1e-12)
    with np.errstate(all="ignore"):
        g = st.grad(lambda x: mixed(st, st.linalg.eigh(x).eigenvectors))(x)
    assert not np.isfinite(np.asarray(g)).all()


@everywhere
def test_matrices_without_elements_have_gradients(backend: str) -> None:
    for name in ("inv", "det", "slogdet", "eigh", "eigvalsh", "eigvals", "svd", "svdvals", "qr", "pinv", "norm, 1"):
        if backend == "cupy" and name == "eigvals":
            continue
        for shape in [(0, 3, 3), (0, 0)] + [(2, 0, 3), (2, 3, 0)] * (FUNCTIONS[name][1] is ALL):
            x = put(np.zeros(shape), backend)
            assert st.grad(lambda x: FUNCTIONS[name][0](st, x))(x).shape == shape  # noqa: B023


@pytest.mark.parametrize("dtype", ["float32", "complex64", "bfloat16"])
def test_dtypes_are_kept(dtype: str) -> None:
    host = positive(np, numbers((2, 3, 3), "float64"))
    wide = put(host.astype("complex128" if dtype == "complex64" else "float64"), "numpy")
    wanted = np.asarray(st.grad(lambda x: mixed(st, st.linalg.inv(x)))(wide))
    x = st.astype(put(host, "numpy", "x"), dtype)
    for name in ("inv", "det", "slogdet", "cholesky", "eigh", "svd", "qr", "pinv", "solve", "eigvals"):
        g = st.grad(lambda x: FUNCTIONS[name][0](st, x).astype("float32"))(x)  # noqa: B023
        assert (g.dtype, g.sharding) == (x.dtype, x.sharding), name
        if name == "inv":
            got = np.asarray(st.astype(g, wanted.dtype))
            np.testing.assert_allclose(got, wanted, rtol=0.1 if dtype == "bfloat16" else 1e-3, atol=0.1)


# -- layouts -----------------------------------------------------------------------------------------


BATCHED = ["inv", "det", "slogdet", "cholesky", "eigh", "eigvalsh", "svd", "svdvals", "qr", "pinv", "solve"]


@pytest.mark.parametrize("name", BATCHED)
def test_a_stack_that_is_split_is_not_gathered(name: str) -> None:
    x = put(positive(np, numbers((4, 3, 3), "float64")), "numpy", "x", count=4)
    weights = st.device_put(np.arange(1.0, 5), st.NamedSharding(x.sharding.mesh, st.P("x")))

    def each(x: Any) -> Any:
        found = getattr(st.linalg, name)(*([x, x] if name == "solve" else [x]))
        parts = found if isinstance(found, tuple) else (found,)
        return sum([((y * y).reshape(4, -1).sum(axis=-1) * weights).sum() for y in parts])

    with st.transfers() as forward:
        each(x)
    with st.transfers() as log:
        g = st.grad(each)(x)
    assert g.sharding == x.sharding
    assert log.bytes == forward.bytes <= 3 * 2 * 3 * 8  # Those of the sums.


@everywhere
@pytest.mark.parametrize(
    "name", ["cholesky", "cholesky, upper", "inv", "det", "slogdet", "solve", "solve, vector", "qr"]
)
def test_gradients_of_split_matrices(monkeypatch: pytest.MonkeyPatch, backend: str, name: str) -> None:
    monkeypatch.setattr(panels, "GATHERED", 0)
    monkeypatch.setattr(panels, "PANEL", 3)
    monkeypatch.setattr(elimination, "_BASE", 2)
    function, host = FUNCTIONS[name][0], numbers((7, 7), "float64" if name != "qr" else "complex128") + 3 * np.eye(7)
    wanted = np.asarray(st.grad(lambda x: function(st, x))(put(host, "numpy")))
    for spec in (("x",), (None, "x")):
        x = put(host, backend, *spec, count=3)
        for wrap in (lambda f: f, st.jit):
            g = wrap(st.grad(lambda x: function(st, x)))(x)
            assert g.sharding == x.sharding
            np.testing.assert_allclose(np.asarray(g), wanted, rtol=1e-9, atol=1e-9)


def of_tall(name: str, x: Any) -> Any:
    """Returns a number that depends on what is computed of a tall matrix, but not on signs."""
    weights = st.arange(1.0, 4)
    if name in ("svdvals", "cond"):
        return (getattr(st.linalg, name)(x) ** 2).sum()
    if name == "pinv":
        return (st.linalg.pinv(x) ** 3).sum() * 1e5
    params = {"full_matrices": False} if name == "svd" else {}
    return sum([(y**4 * weights).sum() for y in getattr(st.linalg, name)(x, **params)])


@everywhere
@pytest.mark.parametrize("name", ["qr", "svd", "svdvals", "pinv", "cond"])
def test_gradients_of_tall_matrices_move_small_factors_only(backend: str, name: str) -> None:
    host = numbers((4000, 3), "float64")
    assert host.nbytes > first_device.GATHERED
    wanted = np.asarray(st.grad(lambda x: of_tall(name, x))(put(host, "numpy")))
    x = put(host, backend, "x", count=4)
    with st.transfers() as log:
        g = st.grad(lambda x: of_tall(name, x))(x)
    assert g.sharding == x.sharding
    np.testing.assert_allclose(np.asarray(g), wanted, rtol=1e-9, atol=1e-12)
    assert log.bytes < host.nbytes / 2
