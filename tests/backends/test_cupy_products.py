"""Products of bfloat16 on the cupy backend: by cuBLAS where they are large, with sums in float32."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.interpreters.execution import small_float_calls
from tests.backends.test_cupy import launched, machine
from tests.layouts import assert_rounded
from tests.pairs import spread

pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")

PRODUCT = "gemm of bfloat16"


def integers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers whose sums of products are exact in float32, and are rounded to bfloat16."""
    return np.random.default_rng(seed).integers(-9, 9, shape).astype(np.float32)


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_float_calls, "_LARGE", 0)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(
    "shapes",
    [
        ((11, 6), (6, 13)), ((11, 1), (1, 13)), ((1, 11), (11, 1)), ((11, 6), (6, 0)), ((11, 0), (0, 13)),
        ((5, 11, 6), (6, 13)), ((5, 11, 6), (5, 6, 13)), ((11, 6), (5, 6, 13)), ((5, 1, 11, 6), (1, 3, 6, 13)),
        ((5, 3, 11, 6), (5, 3, 6, 13)), ((1, 11, 6), (5, 6, 13)), ((1, 1, 11, 6), (6, 13)), ((5, 11, 6), (1, 6, 13)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("any_size")
def test_products_of_every_layout(shapes: Any, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = [integers(shape, seed) for seed, shape in enumerate(shapes)]
    with machine(4, devices=gpus) as m:
        names = launched(monkeypatch)
        specs = [
            [st.P(*[None] * d, *axes) for d in (x.ndim - 2, x.ndim - 1) for axes in ([], ["d"])][:4] for x in (a, b)
        ]
        for left, right in spread(itertools.product(*specs), 3, a.size + b.size):
            x, y = [
                st.device_put(v.astype(st.bfloat16), st.NamedSharding(m.mesh(), spec))
                for v, spec in ((a, left), (b, right))
            ]
            names.clear()
            assert_rounded(x @ y, a @ b)
            assert (PRODUCT in names) == (a.size > 0 < b.size)


@pytest.mark.usefixtures("any_size")
def test_views_are_multiplied_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed matrices and parts of rows and columns are read as they lie; every second element is copied."""
    a, b = integers((12, 17), 0), integers((17, 17), 1)
    stack = integers((3, 17, 12), 2)
    with machine(2, devices=1) as m:
        x, y, z = [st.device_put(v.astype(st.bfloat16), m.mesh().flat[0]) for v in (a, b, stack)]
        names = launched(monkeypatch)
        views: list[tuple[Any, Any]] = [
            (lambda x, y, z: x @ y.T, 1), (lambda x, y, z: y @ x.T, 1), (lambda x, y, z: y.T @ x.T, 1),
            (lambda x, y, z: x[2:, 3:] @ y[3:, :5], 1), (lambda x, y, z: z.mT @ y, 1), (lambda x, y, z: z[1:] @ x, 1),
            (lambda x, y, z: x[:, ::2] @ y[::2, ::-1], 3),
        ]  # fmt: skip
        for view, most in views:
            names.clear()
            found = view(x, y, z)
            assert names.count(PRODUCT) == 1
            assert len(names) <= most
            assert_rounded(found, view(a, b, stack))


def test_only_large_products_of_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, v = integers((700, 500), 0), integers((500, 600), 1), integers((500,), 2)
    with machine(2, devices=1) as m:
        x, y, u = [st.device_put(value.astype(st.bfloat16), m.mesh()) for value in (a, b, v)]
        names = launched(monkeypatch)
        assert_rounded(x @ y, a @ b)
        assert PRODUCT in names
        names.clear()
        assert_rounded(x @ u, a @ v)
        assert_rounded(x[:5, :5] @ y[:5, :5], a[:5, :5] @ b[:5, :5])
        assert (x @ y.astype("float32")).dtype == np.float32
        assert PRODUCT not in names
        assert st.eval_shape(st.matmul, x, y).dtype == st.bfloat16


@pytest.mark.usefixtures("any_size")
def test_partial_results_are_added_in_float32() -> None:
    """In bfloat16, 256 + 1 is 256."""
    a = np.zeros((2, 16), np.float32)
    a[:, ::4] = [[256, 1, 1, 1]]
    with machine(4, devices=2) as m:
        x = st.device_put(a.astype(st.bfloat16), st.NamedSharding(m.mesh(), st.P(None, "d")))
        y = st.device_put(np.ones((16, 3)).astype(st.bfloat16), st.NamedSharding(m.mesh(), st.P("d")))
        assert_rounded(x @ y, np.full((2, 3), 259.0))
        assert_rounded(st.jit(lambda a, b: a @ b)(x, y), np.full((2, 3), 259.0))
