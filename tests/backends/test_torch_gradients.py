"""PyTorch's gradients in mapped functions: collectives, hooks, modules for each program, and functions of tensors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'shardtensor[torch]'")
pytest.importorskip("array_api_compat", reason="array-api-compat is not installed: pip install 'shardtensor[torch]'")

import shardtensor as st  # noqa: E402 - what follows wants torch
import shardtensor_torch  # noqa: E402
from shardtensor.backend.registry import load  # noqa: E402
from shardtensor.core import implements  # noqa: E402
from shardtensor.spmd.collectives import collective  # noqa: E402
from shardtensor.spmd.rendezvous import rendezvous  # noqa: E402
from tests.draws import drawn  # noqa: E402

COUNT = 4


def row(count: int = COUNT) -> list[Any]:
    return st.devices("torch")[:count]


def total(parts: list[Any]) -> Any:
    return functools.reduce(operator.add, parts)


def split(x: Any, axis: int = 0, count: int = COUNT) -> list[Any]:
    return list(torch.tensor_split(x, count, axis))


def product(parts: list[Any]) -> Any:
    return functools.reduce(operator.mul, parts)


Case = tuple[Callable[[Any], Any], Callable[[list[Any]], list[Any]], list[tuple[int, ...]]]
"""A collective, the same function of the arrays of all programs, and the shapes of these."""

SAME = [(3, 2)] * COUNT
GROUPS = [[0, 3], [1, 2]]
SHIFT = [(0, 1), (1, 2), (3, 0)]

CASES: dict[str, Case] = {
    "psum": (lambda x: st.psum(x, "i"), lambda xs: [total(xs)] * COUNT, SAME),
    "psum in groups": (
        lambda x: st.psum(x, "i", axis_index_groups=GROUPS),
        lambda xs: [xs[0] + xs[3], xs[1] + xs[2], xs[1] + xs[2], xs[0] + xs[3]],
        SAME,
    ),
    "pmean": (lambda x: st.pmean(x, "i"), lambda xs: [total(xs) / COUNT] * COUNT, SAME),
    "pmax": (lambda x: st.pmax(x, "i"), lambda xs: [torch.stack(xs).amax(0)] * COUNT, SAME),
    "pmin": (lambda x: st.pmin(x, "i"), lambda xs: [torch.stack(xs).amin(0)] * COUNT, SAME),
    "pprod": (lambda x: st.pprod(x, "i"), lambda xs: [product(xs)] * COUNT, SAME),
    "psum_scatter": (
        lambda x: st.psum_scatter(x, "i", scatter_dimension=-1),
        lambda xs: list(total(xs).unbind(-1)),
        [(2, COUNT)] * COUNT,
    ),
    "psum_scatter, tiled": (
        lambda x: st.psum_scatter(x, "i", tiled=True),
        lambda xs: split(total(xs)),
        [(10, 2)] * COUNT,
    ),
    "all_gather": (lambda x: st.all_gather(x, "i", axis=1), lambda xs: [torch.stack(xs, 1)] * COUNT, SAME),
    "all_gather, tiled": (
        lambda x: st.all_gather(x, "i", axis=-1, tiled=True),
        lambda xs: [torch.cat(xs, 1)] * COUNT,
        [(2, 3), (2, 2), (2, 2), (2, 2)],
    ),
    "all_gather of any sizes": (
        lambda x: st.all_gather(x, "i", tiled=True),
        lambda xs: [torch.cat(xs)] * COUNT,
        [(2, 3), (0, 3), (4, 3), (1, 3)],
    ),
    "all_to_all": (
        lambda x: st.all_to_all(x, "i", 1, 0),
        lambda xs: [torch.stack([x[:, k] for x in xs]) for k in range(COUNT)],
        [(3, COUNT)] * COUNT,
    ),
    "all_to_all, tiled": (
        lambda x: st.all_to_all(x, "i", 1, 0, tiled=True),
        lambda xs: [torch.cat(parts) for parts in zip(*[split(x, 1) for x in xs], strict=True)],
        [(2, 6), (2, 6), (1, 6), (1, 6)],
    ),
    "pswapaxes": (
        lambda x: st.pswapaxes(x, "i", 1),
        lambda xs: [torch.stack([x[:, k] for x in xs], 1) for k in range(COUNT)],
        [(3, COUNT)] * COUNT,
    ),
    "ppermute": (
        lambda x: st.ppermute(x, "i", SHIFT),
        lambda xs: [xs[3], xs[0], xs[1], torch.zeros_like(xs[3])],
        [(1, 2), (2, 2), (3, 2), (4, 2)],
    ),
    "pshuffle": (
        lambda x: st.pshuffle(x, "i", [2, 0, 3, 1]),
        lambda xs: [xs[2], xs[0], xs[3], xs[1]],
        [(1, 2), (2, 2), (3, 2), (4, 2)],
    ),
    "pbroadcast": (lambda x: st.pbroadcast(x, "i", 2), lambda xs: [xs[2]] * COUNT, [(2, 2), (2, 2), (2, 1), (2, 2)]),
}


def operands(shapes: list[tuple[int, ...]], dtype: str = "float64", seed: int = 0) -> list[Any]:
    """Small integers, so that there are equal extremes, and a fraction by which programs differ."""
    rng = np.random.default_rng(seed)
    parts = [torch.from_numpy(rng.integers(1, 4, shape).astype(dtype)) for shape in shapes]
    return [x * (1 + 0.5j) for x in parts] if dtype.startswith("complex") else parts


def loss_of(y: Any, k: int) -> Any:
    """A loss of the result of program ``k``, which is not linear."""
    square = (y * y.conj()).real
    return (square * torch.arange(1.0, 1 + y.numel(), dtype=square.dtype).reshape(y.shape)).sum() * (k + 1)


def wanted_gradients(case: Case, xs: list[Any], twice: bool) -> list[Any]:
    given = [x.clone().requires_grad_() for x in xs]
    value = total([loss_of(y, k) for k, y in enumerate(case[1]([x * x for x in given]))])
    gradients = torch.autograd.grad(value, given, create_graph=twice, materialize_grads=True)
    if not twice:
        return list(gradients)
    return list(torch.autograd.grad(total([(g * g.conj()).real.sum() for g in gradients]), given, materialize_grads=True))


def by_backward(value: Callable[[Any], Any], x: Any) -> Any:
    w = x.clone().requires_grad_()
    value(w).backward()
    return w.grad


def by_grad(value: Callable[[Any], Any], x: Any) -> Any:
    w = x.clone().requires_grad_()
    return torch.autograd.grad(value(w), w)[0]


def by_func(value: Callable[[Any], Any], x: Any) -> Any:
    return torch.func.grad(value)(x)


def twice(value: Callable[[Any], Any], x: Any) -> Any:
    w = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(w), w, create_graph=True)
    return torch.autograd.grad((gradient * gradient.conj()).real.sum(), w)[0]


def twice_by_func(value: Callable[[Any], Any], x: Any) -> Any:
    def square(w: Any) -> Any:
        gradient = torch.func.grad(value)(w)
        return (gradient * gradient.conj()).real.sum()

    return torch.func.grad(square)(x)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_collectives(name: str) -> None:
    """All ways to a gradient give that of the sum of the losses of all programs."""
    case = CASES[name]
    for dtype in ("float64", "complex128") if name not in ("pmax", "pmin") else ("float64",):
        xs = operands(case[2], dtype)
        for way in (by_backward, by_grad, by_func, twice, twice_by_func):
            if dtype == "complex128" and way in (by_func, twice_by_func):
                continue  # They are the same functions of PyTorch.

            def fn(x: Any, way: Any = way) -> Any:
                return way(lambda w: loss_of(case[0](w * w), st.axis_index("i")), x)

            found = st.pmap(fn, [st.device_put(x.numpy(), d) for x, d in zip(xs, row(), strict=True)], axis_name="i")
            wanted = wanted_gradients(case, xs, way in (twice, twice_by_func))
            for mine, there in zip(found, wanted, strict=True):
                np.testing.assert_allclose(np.asarray(mine), there.numpy(), rtol=1e-12, err_msg=f"{dtype} {way}")


def test_every_collective_has_a_transpose() -> None:
    from shardtensor.core import OPS
    from shardtensor.spmd.recorded import TRANSPOSES

    assert set(TRANSPOSES) == {name for name, op in OPS.items() if op.spmd and op.operands == ("x",)} & set(st.__all__)
