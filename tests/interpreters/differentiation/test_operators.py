"""The derivative of every operator, in drawn layouts, compared with central differences."""

from __future__ import annotations

import warnings
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.core import OPS
from shardtensor.functions.derivatives import derivative_of, load_all
from shardtensor.functions.derivatives.forms import ROWS, ZERO, Refused
from tests.cases import CASES, sharded_somehow
from tests.interpreters.differentiation.numeric import check_gradients, check_tangents, in_domain, taken, weighted
from tests.interpreters.test_infer import examples, some_backend

load_all()


def differentiable(name: str, made: Any, seed: int) -> list[int]:
    """Replaces the operands of a case by numbers in double precision, where they have derivatives; returns which."""
    rng = np.random.default_rng(seed)
    op, found = OPS[name], []
    takes_any = isinstance(op.rule, str) and set(op.rule.replace("->", "").replace(",", "").split()) == {"..."}
    for k, x in enumerate(made.operands):
        operand = op.operands[0 if op.signature.variadic else min(k, len(op.operands) - 1)]
        numbers = "fciu" if takes_any and operand not in ("condition", "x2" * (name == "ldexp")) else "fc"
        if isinstance(x, np.ndarray) and x.dtype.kind in numbers and x.dtype.itemsize <= 16:
            made.operands[k] = in_domain(name, k, x, rng)
            found.append(k)
    return found


def class_of(name: str) -> str:
    """Returns the class of an operator: how it is differentiated."""
    op = OPS[name]
    derivative = derivative_of(op)
    if derivative is not None:
        return "zero" if derivative is ZERO else "refused" if isinstance(derivative, Refused) else "rule"
    if op.creates:
        return "creation"
    if op.parts.composite and not (op.parts.kernel or op.parts.movement or op.parts.algorithm):
        return "composed"
    return "internal" if op.error_name != name else "missing"


NEVER_ACTIVE = {
    # Steps of algorithms of operators that are recorded as one call.
    "add_partials", "between", "blocked_cholesky", "blocked_inv", "blocked_qr", "blocked_slogdet", "blocked_solve",
    "elements_of_ranks", "fft_added", "fft_chirped", "fft_columns", "fft_of_real", "fft_packed", "fft_real_columns",
    "fft_rotated", "fft_to_real", "fft_transposed", "fft_unpacked", "nan_quantiles", "take_along_split", "tall_qr",
    "tall_r",
    # The functions that call them call others, or are recorded as one call, where something is recorded.
    "central_differences", "mapped_lines", "with_windows",
    # Writes are recorded by the tape itself, with a derivative of its own.
    "put",
    # The elements leave the library, which the tape refuses itself.
    "to_host",
    # The keys and the parameters of a batch: random numbers have no derivatives of these.
    "draws_of_examples",
}  # fmt: skip
"""The internal operators of which no operand ever depends on a differentiated argument."""


def test_every_operator_is_in_one_class() -> None:
    classes = {name: class_of(name) for name in OPS}
    missing = {name for name, kind in classes.items() if kind == "missing"}
    assert missing == set(), "add a row to shardtensor/functions/derivatives/ (docs/adding_a_derivative.md)"
    assert {name for name, kind in classes.items() if kind == "internal"} == NEVER_ACTIVE
    assert set(ROWS) <= set(OPS)


AT_THE_SAME_PROBABILITY = {"truncated_normal"}
"""Random numbers, which change by jumps with their parameters; `test_functions` tests their derivatives."""

DIFFERENTIATED = sorted(
    name
    for name in set(CASES) - AT_THE_SAME_PROBABILITY
    if class_of(name) in ("rule", "composed") and "escapes" not in OPS[name].tags
)


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_every_operator(name: str) -> None:
    @examples(name, 100)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        made = CASES[name](data)
        argnums = differentiable(name, made, data.draw(some.integers(0, 1000)))
        if not argnums or np.dtype(made.params.get("dtype") or "float64").kind not in "fc":
            return
        operands = sharded_somehow(data, made, some_backend(data))
        fn = weighted(lambda *xs: made.run(OPS[name].dispatch, taken(name, xs)))
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                value = fn(*operands)
            except st.ShardTensorError:
                return
        if not isinstance(value, st.ShardedTensor) or not np.isfinite(float(value)):
            return
        gradients = check_gradients(fn, operands, argnums)
        check_tangents(fn, operands, argnums, gradients)

    run()
