"""Gradients of Fourier transforms: against central differences and JAX, and of lines that are split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.functions.fft import transpose_fft
from tests.interpreters.differentiation.numeric import check_gradients
from tests.layouts import everywhere, mesh_of

NAMES = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]
NORMS = ["backward", "ortho", "forward"]
WEIGHTS = np.random.default_rng(1).standard_normal((2, 600))


def weighted(np: Any, y: Any) -> Any:
    a, b = [w[: y.size].reshape(y.shape) for w in WEIGHTS]
    return (a * np.real(y) + b * np.imag(y) + np.abs(y) ** 2).sum()


def numbers(shape: Any, name: str, real: bool = False) -> np.ndarray:
    rng = np.random.default_rng(0)
    made = rng.standard_normal(shape)
    return np.asarray(made if real or name in ("rfft", "ihfft") else made + 1j * rng.standard_normal(shape))


def put(host: Any, backend: str, *spec: Any, count: int = 2) -> st.ShardedTensor:
    return st.device_put(host, st.NamedSharding(mesh_of((count,), backend), st.P(*spec)))


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [None, 1, 2, 5, 6, 9])
def test_gradients_are_those_of_jax(name: str, n: int | None) -> None:
    jax = pytest.importorskip("jax")
    for size in (2, 5, 6):
        for axis, norm, real in [(-1, "backward", False), (0, "ortho", False), (1, "forward", True)]:
            shape = [3, 3]
            shape[axis] = size
            x = numbers(shape, name, real)

            def loss(np: Any, x: Any) -> Any:
                return weighted(np, getattr(np.fft, name)(x, n=n, axis=axis, norm=norm))  # noqa: B023

            def of_gradient(np: Any, grad: Any, x: Any) -> Any:
                return np.real(grad(lambda x: loss(np, x * x))(x) ** 2).sum()

            with jax.enable_x64(True):
                wanted = [jax.jit(jax.grad(lambda x: loss(jax.numpy, x)))(x)]
                wanted.append(jax.jit(jax.grad(lambda x: of_gradient(jax.numpy, jax.grad, x)))(x))
            put_x = put(x, "numpy", "x")
            found = [st.grad(lambda x: loss(st, x))(put_x)]
            found.append(st.grad(lambda x: of_gradient(st, st.grad, x))(put_x))
            for g, other in zip(found, wanted, strict=True):
                scale = 1 + np.abs(np.asarray(other)).max()
                np.testing.assert_allclose(np.asarray(g), np.asarray(other), rtol=0, atol=1e-12 * scale)


SEVERAL: dict[str, Callable[[Any, Any], Any]] = {
    "fftn": lambda np, x: np.fft.fftn(x, s=(4, 3), axes=(0, 1)),
    "ifft2": lambda np, x: np.fft.ifft2(x),
    "rfftn": lambda np, x: np.fft.rfftn(np.real(x), norm="ortho"),
    "rfft2": lambda np, x: np.fft.rfft2(np.imag(x), s=(5, 6)),
    "irfftn": lambda np, x: np.fft.irfftn(x),
    "irfft2": lambda np, x: np.fft.irfft2(x, s=(3, 5), norm="forward"),
    "shifts": lambda np, x: np.fft.ifftshift(np.fft.fftshift(np.fft.fft(x), axes=0) ** 2),
}


@everywhere
@pytest.mark.parametrize("name", [*NAMES, *SEVERAL])
def test_gradients_are_central_differences(backend: str, name: str) -> None:
    for k, spec in enumerate([(), ("x",), (None, "x")]):
        x = put(numbers((4, 6), name), backend, *spec)
        params = {"axis": k - 1, "n": (None, 5, 8)[k], "norm": NORMS[k]}
        fn = SEVERAL.get(name, lambda np, x: getattr(np.fft, name)(x, **params))  # noqa: B023

        def loss(x: Any) -> Any:
            return weighted(st, fn(st, x))  # noqa: B023

        (g,) = check_gradients(loss, [x], [0])
        if k:
            compiled = st.jit(st.grad(loss))(x)
            assert compiled.sharding == g.sharding
            np.testing.assert_allclose(np.asarray(compiled), np.asarray(g), rtol=1e-12, atol=1e-12)
            check_gradients(lambda x: st.real(st.grad(lambda x: loss(x * x))(x) ** 2).sum(), [x], [0])


def test_lines_that_are_not_split_move_nothing() -> None:
    for name in NAMES:
        x = put(numbers((8, 6), name), "numpy", "x", count=4)

        def loss(x: Any) -> Any:
            return (st.abs(getattr(st.fft, name)(x)) ** 3).sum()  # noqa: B023

        with st.transfers() as forward:
            loss(x)
        with st.transfers() as log:
            g = st.grad(loss)(x)
        assert g.sharding == x.sharding
        assert log.bytes == forward.bytes


@everywhere
@pytest.mark.parametrize("name", NAMES)
def test_long_lines_that_are_split_are_not_gathered(monkeypatch: pytest.MonkeyPatch, backend: str, name: str) -> None:
    monkeypatch.setattr(transpose_fft, "_GATHERED", 16)
    host = numbers((256,), name)
    n = 256 if name in ("irfft", "hfft") else None

    def loss(x: Any) -> Any:
        return weighted(st, getattr(st.fft, name)(x, n)) if n is None else (getattr(st.fft, name)(x, n) ** 3).sum()

    wanted = np.asarray(st.grad(loss)(put(host, "numpy")))
    x = put(host, backend, "x", count=4)
    with st.transfers() as log:
        g = st.grad(loss)(x)
    assert g.sharding == x.sharding
    np.testing.assert_allclose(np.asarray(g), wanted, rtol=1e-10, atol=1e-10)
    assert max(t.bytes for t in log) < 256 * 16 * 3 // 2


@pytest.mark.parametrize("dtype", ["float32", "complex64", "bfloat16"])
def test_dtypes_are_kept(dtype: str) -> None:
    for name in NAMES:
        if dtype == "complex64" and name in ("rfft", "ihfft"):
            continue
        x = st.astype(put(numbers((4, 5), name, real=True), "numpy", "x"), dtype)
        g = st.grad(lambda x: (st.abs(getattr(st.fft, name)(x)) ** 2).sum())(x)  # noqa: B023
        assert (g.dtype, g.sharding) == (x.dtype, x.sharding), name


def test_lines_without_elements_have_gradients() -> None:
    for name in NAMES:
        x = put(numbers((0, 4), name), "numpy")
        assert st.grad(lambda x: weighted(st, getattr(st.fft, name)(x)))(x).shape == (0, 4)  # noqa: B023
