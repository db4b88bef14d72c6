"""Test cases of products, decompositions and Fourier transforms; importing this module adds them to `cases.CASES`."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as some

import shardtensor.fft
import shardtensor.linalg  # noqa: F401 - it declares its operators
from shardtensor.backend import HostArray
from shardtensor.testing.cases import Case, case, seed
from shardtensor.testing.layouts import DTYPES, array, broadcastable, shapes

_NUMBERS = some.sampled_from(["int64", "float32", "float64", "complex64", "complex128"])
_SIDES = some.sampled_from([0, 1, 2, 3, 5])


def matrices(data: Any, *, square: bool = True) -> HostArray:
    """Draws well-conditioned matrices, those of a stack of up to two dimensions."""
    m = data.draw(_SIDES)
    n = m if square else data.draw(_SIDES)
    x = array((*data.draw(shapes(0, 2)), m, n), data.draw(_NUMBERS), seed(data))
    return (x + 20 * np.eye(m, n)).astype(x.dtype)


@case("inv", "det", "svdvals")
def _inverse(data: Any) -> Case:
    """Draws square matrices: the singular values of others are drawn by `_rank`."""
    x = matrices(data)
    return Case([x], answer=lambda name: getattr(np.linalg, name)(x))


@case("cholesky")
def _cholesky(data: Any) -> Case:
    x, upper = _positive(data), data.draw(some.booleans())
    return Case([x], params={"upper": upper}, answer=np.linalg.cholesky(x, upper=upper))


@case("eigvalsh")
def _eigvalsh(data: Any) -> Case:
    x = _positive(data)
    return Case([x], answer=np.linalg.eigvalsh(x))


def _positive(data: Any) -> HostArray:
    x = matrices(data)
    return np.asarray((x + np.conj(np.matrix_transpose(x))) / 2).astype(x.dtype)


@case("matrix_rank")
def _rank(data: Any) -> Case:
    x = matrices(data, square=False)
    if x.shape[-1] and data.draw(some.booleans()):
        x[..., -1] = x[..., 0]
    params: dict[str, Any] = {"rtol": 0.5} if data.draw(some.booleans()) else {}
    return Case([x], params=params, answer=np.linalg.matrix_rank(x, **params))


@case("pinv")
def _pinv(data: Any) -> Case:
    x = matrices(data, square=False)
    x = x if x.size else x.astype(np.result_type(x, np.float32))  # NumPy's result of no elements has x's dtype.
    rtol = max(x.shape[-2:]) * np.finfo(np.result_type(x, np.float32)).eps
    return Case([x], answer=np.linalg.pinv(x, rtol=rtol))


@case("solve")
def _solve(data: Any) -> Case:
    x1 = matrices(data)
    n, dtype = x1.shape[-1], data.draw(_NUMBERS)
    vector = data.draw(some.booleans())
    stack = () if vector else data.draw(some.sampled_from([(), x1.shape[:-2], (1,) * (x1.ndim - 2)]))
    x2 = array((*stack, n, *(() if vector else (data.draw(_SIDES),))), dtype, seed(data))
    return Case([x1, x2], answer=np.linalg.solve(x1, x2))


@case("vector_norm")
def _vector_norm(data: Any) -> Case:
    x = array(data.draw(shapes()), data.draw(some.sampled_from(DTYPES)), seed(data))
    axis: Any = None
    if x.ndim and data.draw(some.booleans()):
        axis = tuple(data.draw(some.lists(some.integers(0, x.ndim - 1), min_size=1, unique=True)))
    params: dict[str, Any] = {"axis": axis, "keepdims": data.draw(some.booleans())}
    params["ord"] = data.draw(some.sampled_from([2, 1, 0, 3, np.inf] + [-np.inf] * bool(x.size)))
    with np.errstate(all="ignore"):
        return Case([x], params=params, answer=np.linalg.vector_norm(x, **params))


@case("cross")
def _cross(data: Any) -> Case:
    a, b = data.draw(broadcastable(2))
    x, y = [array((*s, 3), data.draw(_NUMBERS), seed(data)) for s in (a, b)]
    axisa, axisb = data.draw(some.integers(-x.ndim, -1)), data.draw(some.integers(-y.ndim, -1))
    axisc = data.draw(some.integers(-max(x.ndim, y.ndim), -1))
    x, y = np.moveaxis(x, -1, axisa), np.moveaxis(y, -1, axisb)
    params = {"axisa": axisa, "axisb": axisb, "axisc": axisc}
    return Case([x, y], params=params, answer=np.cross(x, y, axisa, axisb, axisc))


@case("diagonal", "trace")
def _diagonal(data: Any) -> Case:
    x = array(data.draw(shapes(2)), data.draw(some.sampled_from([d for d in DTYPES if d != "uint8"])), seed(data))
    axis1, axis2 = data.draw(some.permutations(range(-x.ndim, 0)))[:2]
    return Case([x], (data.draw(some.integers(-9, 9)), axis1, axis2))


_CONTRACTIONS = [
    "a b, b c -> a c", "a b, c b -> a c", "a b c, c b d -> a d", "b a k, k b -> b a", "k b, b k j -> b j", "k, k -> ",
    "a k b l, l c k -> a b c", "x y k, y k x -> x y",
]  # fmt: skip


@case("contract")
def _contract(data: Any) -> Case:
    rule, dtype = data.draw(some.sampled_from(_CONTRACTIONS)), data.draw(_NUMBERS)
    left, _, result = rule.partition("->")
    sizes = {name: data.draw(_SIDES) for name in left.replace(",", "").split()}
    terms = [term.split() for term in left.split(",")]
    operands = [array(tuple([sizes[name] for name in term]), dtype, seed(data)) for term in terms]
    text = f"{','.join(map(''.join, terms))}->{''.join(result.split())}"
    return Case(operands, params={"rule": rule}, answer=np.einsum(text, *operands))


@case("cond")
def _cond(data: Any) -> Case:
    x = matrices(data)
    if not x.shape[-1]:
        x = np.ones((*x.shape[:-2], 1, 1), x.dtype)
    p = data.draw(some.sampled_from([None, 2, -2, 1, -1, np.inf, "fro", "nuc"]))
    return Case([x], params={"p": p}, answer=np.linalg.cond(x, p))


@case("fft", "ifft", "hfft", "irfft")
def _fft(data: Any) -> Case:
    return _transform(data, data.draw(_NUMBERS))


@case("rfft", "ihfft")
def _rfft(data: Any) -> Case:
    return _transform(data, data.draw(some.sampled_from(["bool", "int32", "float32", "float64"])))


def _transform(data: Any, dtype: str) -> Case:
    shape = list(data.draw(shapes(1)))
    axis = data.draw(some.integers(-len(shape), len(shape) - 1))
    shape[axis] = max(shape[axis], 1)  # NumPy's irfft of no elements is not initialized.
    x = array(tuple(shape), dtype, seed(data))
    params: dict[str, Any] = {
        "n": data.draw(some.sampled_from([None, 1, 4, 9] if x.shape[axis] > 1 else [1, 4])),
        "axis": axis,
        "norm": data.draw(some.sampled_from(["backward", "ortho", "forward"])),
    }
    return Case([x], params=params, answer=lambda name: getattr(np.fft, name)(x, **params))


@case("matmul")
def _matmul(data: Any) -> Case:
    n, k, m = (data.draw(some.sampled_from([0, 1, 2, 5, 9])) for _ in range(3))
    batch = data.draw(broadcastable(2))
    left = (k,) if data.draw(some.integers(0, 3)) == 0 else (*batch[0], n, k)
    right = (k,) if data.draw(some.integers(0, 3)) == 0 else (*batch[1], k, m)
    dtypes = [data.draw(some.sampled_from(["int64", "float32", "float64", "complex64"])) for _ in range(2)]
    return Case([array(s, d, seed(data)) for s, d in zip((left, right), dtypes, strict=True)])


@case("vecdot")
def _vecdot(data: Any) -> Case:
    k = data.draw(some.sampled_from([0, 1, 3, 8]))
    a, b = data.draw(broadcastable(2))
    axis = data.draw(some.sampled_from([-1, -2])) if a and b else -1
    left, right = [(*s[: len(s) + 1 + axis], k, *s[len(s) + 1 + axis :]) for s in (a, b)]
    d = data.draw(some.sampled_from(["float64", "complex128"]))
    return Case([array(left, d, seed(data)), array(right, d, seed(data))], params={"axis": axis})


@case("tensordot")
def _tensordot(data: Any) -> Case:
    a, b = data.draw(shapes(1, 2)), data.draw(shapes(1, 2))
    shared = data.draw(shapes(0, 2))
    axes: Any = len(shared)
    left, right = (*a, *shared), (*shared, *b)
    if shared and data.draw(some.booleans()):
        right = (*b, *shared)
        axes = (list(range(-len(shared), 0)), tuple(range(len(b), len(b) + len(shared))))
    return Case([array(left, "float64", seed(data)), array(right, "float64", seed(data))], params={"axes": axes})
