"""Every operator called by `vmap` for a batch of drawn cases, compared with a loop over the examples."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.core import OPS
from shardtensor.functions.batching import rule_of
from shardtensor.functions.batching.batching_forms import RULES
from shardtensor.functions.derivatives import load_all
from shardtensor.interpreters.batching.batcher import SPECIAL
from tests.cases import CASES
from tests.interpreters.test_infer import examples, some_backend
from tests.layouts import mesh_of

load_all()

NEVER_BATCHED = {
    # Steps of algorithms of operators that are called for all examples.
    "between", "elements_of_ranks", "isin_sorted", "nan_quantiles", "searchsorted_split", "take_along_split",
}  # fmt: skip
NAMES = sorted(name for name in CASES if "escapes" not in OPS[name].tags and name not in NEVER_BATCHED)


ORDERED = {"searchsorted", "counts_between", "interpolated"}
"""Operators of arrays of which one is in order."""


def batch_of(name: str, x: np.ndarray, n: int, axis: int, rng: np.random.Generator) -> np.ndarray:
    """Returns n arrays like an operand, of the same elements in other orders, stacked along an axis."""
    made = [x, *[rng.permutation(x.ravel()).reshape(x.shape) for _ in range(n - 1)]]
    if x.ndim >= 2 and x.shape[-1] == x.shape[-2]:  # They stay positive definite, if the matrices are.
        orders = [rng.permutation(x.shape[-1]) for _ in range(n - 1)]
        made = [x, *[x[..., order, :][..., order] for order in orders]]
    if name in ORDERED:
        made = [x + np.asarray(k).astype(x.dtype) for k in range(n)]
    return np.stack(made[:n], axis=axis) if n else np.empty((*x.shape[:axis], 0, *x.shape[axis:]), x.dtype)


def outcome(fn: Any) -> Any:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return fn()


@pytest.mark.parametrize("name", NAMES)
def test_every_operator(name: str) -> None:
    @examples(name, 60)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        made = CASES[name](data)
        if not made.operands:
            return
        n = data.draw(some.sampled_from([3, 1, 7, 0]))
        mapped = [data.draw(some.booleans()) for _ in made.operands]
        if not any(mapped):
            mapped[0] = True
        rng = np.random.default_rng(data.draw(some.integers(0, 99)))
        mesh = mesh_of((2, 2), some_backend(data))
        stacked, axes, given = [], [], []
        for x, is_mapped in zip(made.operands, mapped, strict=True):
            axis = data.draw(some.integers(0, np.ndim(x))) if is_mapped else None
            whole = batch_of(name, np.asarray(x), n, axis, rng) if is_mapped else x
            stacked.append(whole)
            axes.append(axis)
            split = [None] * np.ndim(whole)
            if is_mapped and data.draw(some.booleans()):
                split[axis] = "x"
            given.append(st.device_put(whole, st.NamedSharding(mesh, st.P(*split))) if np.ndim(whole) else whole)

        def fn(*xs: Any) -> Any:
            return made.run(OPS[name].dispatch, list(xs))

        def one(i: int) -> Any:
            return fn(
                *[x if a is None else st.asarray(np.take(x, i, axis=a)) for x, a in zip(stacked, axes, strict=True)]
            )

        try:
            wanted = outcome(lambda: [st.tree.leaves(one(i)) for i in range(n)])
            single = outcome(lambda: st.tree.leaves(fn(*made.operands)))
        except st.ShardTensorError:
            return
        found = st.tree.leaves(outcome(lambda: st.vmap(fn, in_axes=tuple(axes))(*given)))
        for k, y in enumerate(found):
            of_none = np.empty((0, *np.shape(single[k])), np.asarray(single[k]).dtype)
            answer = np.stack([np.asarray(w[k]) for w in wanted]) if n else of_none
            got = np.asarray(y)
            assert (got.shape, got.dtype) == (answer.shape, answer.dtype)
            limit = 1e-2 if got.dtype.itemsize <= 2 else 1e-6
            np.testing.assert_allclose(
                got, answer, rtol=limit if got.dtype.kind in "fc" else 0, atol=1e-6, equal_nan=True
            )

    run()


REFUSED = {
    # The shapes of the results depend on elements, or these leave the library.
    "nonzero", "unique", "unique_all", "unique_counts", "unique_inverse", "unique_values", "dlpack_device",
    "from_dlpack", "to_dlpack", "to_host",
}  # fmt: skip

STEPS = NEVER_BATCHED | {
    # Steps of algorithms, and of writes, of which operators that are called for all examples consist.
    "add_partials", "blocked_cholesky", "blocked_inv", "blocked_qr", "blocked_slogdet", "blocked_solve", "fft_added",
    "fft_chirped", "fft_columns", "fft_of_real", "fft_packed", "fft_real_columns", "fft_rotated", "fft_to_real",
    "fft_transposed", "fft_unpacked", "lines_copied", "put", "tall_qr", "tall_r", "view", "with_windows",
}  # fmt: skip


def test_every_operator_has_a_rule_or_is_in_one_class() -> None:
    for op in list(OPS.values()):
        if op.parts.batching is not None:
            importlib.import_module(op.parts.batching)
    lacking = set()
    for name, op in OPS.items():
        is_composed = op.parts.composite and not (op.parts.kernel or op.parts.movement or op.parts.algorithm)
        if rule_of(op) is None and not is_composed and not (op.creates and not op.operands):
            lacking.add(name)
    assert lacking - set(SPECIAL) == REFUSED | STEPS
    assert set(RULES) <= set(OPS)
