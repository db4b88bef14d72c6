"""Functions of one matrix of positive numbers, of at least 8 rows and 4 columns, that return a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import shardtensor as st

PROGRAMS: dict[str, Callable[[Any], Any]] = {}
ON_VALUES: set[str] = set()
"""The programs that depend on values, which a trace does not know."""


def program(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    PROGRAMS[fn.__name__] = fn
    return fn


def on_values(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    ON_VALUES.add(fn.__name__)
    return program(fn)


@program
def a_broadcast_factor_under_a_sum(x: Any) -> Any:
    row = x[0]
    return (x + row).sum() + (x * 2 + row[:1]).sum(axis=0).mean() * x[0, 0]


@program
def views(x: Any) -> Any:
    y = x.T[1:3, ::-2]
    z = x.reshape(-1)[3:20:2]
    return (y * y).sum() * z.prod() ** 0.1 + (x[None, :, 1] * x[2, 3]).sum() + st.flip(x).ravel()[5] * x[-1, -1]


@program
def a_written_copy(x: Any) -> Any:
    y = x.copy()
    y[2:4] *= 3
    y[0] = y[1] * y[2]
    y += y
    y[:, 1] = 7
    return (y * x).sum()


@program
def a_written_view_that_a_rule_has_saved(x: Any) -> Any:
    y = x * 1
    z = y[1:5]
    a = z * z  # It saves the view.
    z *= y[2:6]
    b = (y * y).sum()
    y[...] = 0.5
    return a.sum() + b + (z * x[1:5]).sum()


@program
def jacobi_in_place(x: Any) -> Any:
    y = x.copy()
    for _ in range(3):
        y[1:-1, 1:-1] = 0.25 * (y[:-2, 1:-1] + y[2:, 1:-1] + y[1:-1, :-2] + y[1:-1, 2:])
    return (y * y).sum()


@program
def a_recurrence(x: Any) -> Any:
    y = st.zeros(x.shape[0], dtype=x.dtype)
    y[0] = x[0, 0]
    for k in range(1, x.shape[0]):
        y[k] = y[k - 1] * 0.5 + st.sin(x[k, 1])
    return (y * y).sum()


@program
def an_argument_that_is_written(x: Any) -> Any:
    x[1] = x[0] * 2
    x[x.shape[0] - 1 :] -= 1
    return (x * x).sum()


@program
def updates_in_place(x: Any) -> Any:
    y = x.copy()
    y *= 0.5
    y += x
    y[1:] += y[:-1]
    z = y.T
    z[1:3] -= x.T[:2] * z[0]
    z *= z
    y /= 2
    y **= 2
    y[2:4][:, 1] *= x[2:4, 0]
    return (y * x).sum()


@program
def results_written_by_ufuncs(x: Any) -> Any:
    y = st.zeros_like(x)
    np.multiply(x, x, out=y)
    st.sqrt(y + 1, out=y) if False else np.sqrt(y + 1, out=y)
    np.floor(x[:2], out=y[:2])
    return (y * y * x).sum()


@program
def writes_by_index_arrays(x: Any) -> Any:
    y = x * 2
    at = np.array([3, 0, 3, -1])
    y[at] = x[:4] * x[0]  # The last value for row 3 is written.
    y[:, st.asarray([4, 1])] = x[:, :2]
    y[1:6][[0, 2], 1:4] = x[0, 0]
    y.T[np.array([2, 0]), np.array([1, 1])] = x[0, :2]
    y[at] = y[:4]
    z = y * y  # It saves y.
    y[at] = 1.5
    y[st.asarray(np.arange(9) % 4 == 1)] = x[8, 4]
    y[np.arange(9) % 4 == 2] = x[8]
    return (y * y * x).sum() + z.sum()


@program
def index_arrays(x: Any) -> Any:
    at = np.array([2, 0, 2, 1])
    y = x[at] * x[[3, 4, 4, 4], [0, 1, 1, 2]][:, None]
    z = x.copy()
    z[[1, 1, 3]] = x[[4, 5, 6]] * 2
    z[:, [0, 2]] = x[:, [1, 1]]
    return (y * y).sum() + (z * z).sum() + (st.take(x, st.asarray([0, -1]), axis=1) ** 3).sum()


@program
def a_mask_that_is_written(x: Any) -> Any:
    y = x.copy()
    y[x > 1.2] = 3
    y[st.asarray(np.arange(x.shape[0]) % 2 == 0)] = 2
    return (y * x).sum() + st.where(x > 1, x * x, -x).sum()


@program
def reductions(x: Any) -> Any:
    a = x.max(axis=0) * x.min(axis=0) + x.mean(axis=0) + x.std(axis=0, correction=1) * x.var()
    return (a * x.prod(axis=0)).sum() + st.cumulative_sum(x, axis=0)[-1, 0] * x.sum(axis=1, keepdims=True).max()


@program
def products(x: Any) -> Any:
    y = x @ x.T + st.einsum("ij,kj->ik", x, x * 2)
    return (y @ x[:, 0]).sum() + st.tensordot(x, x, axes=((0,), (0,))).sum() + st.vecdot(x, x).prod() ** 0.01


@program
def orders(x: Any) -> Any:
    y = st.sort(x, axis=0)
    order = st.argsort(x, axis=1)
    return (y * y * x).sum() + (st.take_along_axis(x, order[:, :2], axis=1) ** 2).sum() + st.topk(x, 2)[0].sum()


@program
def joins(x: Any) -> Any:
    y = st.concat([x, x[:2] * 3], axis=0)
    z = st.stack([x, x * x], axis=1)
    return (
        (y * y).sum()
        + (z[:, 0] * z[:, 1]).sum()
        + (st.roll(x, 1, axis=0) * x).sum()
        + st.tile(x, (2, 1)).prod() ** 0.01
    )


@program
def a_transfer(x: Any) -> Any:
    y = st.reshard(x * 2, st.NamedSharding(x.sharding.mesh, st.P()))
    return (y * y).sum() + (st.with_sharding_constraint(y, x.sharding) * x).sum()


@program
def numpy_functions(x: Any) -> Any:
    return np.sum(np.tanh(x) * np.maximum(x, 1.1)) + np.linalg.norm(x[0]) * 0 + np.dot(x[0], x[1])


@program
def a_program_of_a_jit(x: Any) -> Any:
    return st.jit(lambda y: (st.exp(-y) * y).sum())(x) + st.jit(lambda y: y * 2)(x[0]).sum()


@program
def recomputed(x: Any) -> Any:
    scale = x[0] * 2
    f = st.remat(lambda y: st.sin(y * scale) * y)
    return (f(f(x)) * scale).sum()


@program
def a_tensor_from_outside(x: Any) -> Any:
    y = st.ones(x.shape, device=x.sharding)
    y[1:] = x[1:] * x[:-1]
    return (y * y).sum()


@on_values
def branches_and_masks(x: Any) -> Any:
    z = x.copy()
    z[z > 1.2] *= 0.5
    z[x > 1.3] = x[0, 0]
    z[np.arange(x.shape[0]) % 2 == 0] *= 2
    y = x[x > 1.1] ** 2 * z[x > 1.1]
    while float(y.sum()) < 200:
        y = y * 1.5
    total = y.sum()
    if bool(x[0, 0] > 0):
        total = total + x[0].sum() * int(st.argmax(x[1]))
    str(x), repr(y)
    return total + sum(float(v) * 0 for v in x[0]) + x.flat[3] * int(x[0, 1].item())


@program
def partitions(x: Any) -> Any:
    y = st.partition(x, 2, axis=0)
    return (y[:3].sum(axis=0) ** 2).sum() + (st.partition(x, (1, 3), axis=1)[:, 1] ** 3).sum()


@on_values
def weighted_counts(x: Any) -> Any:
    return (st.bincount(np.arange(x.shape[0]) % 3, weights=x[:, 1] * x[:, 0]) ** 2).sum()
