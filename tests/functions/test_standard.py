"""The functions of the array API standard on realistic arrays under drawn layouts, compared with NumPy."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
import shardtensor.fft
import shardtensor.linalg
from shardtensor.backend import registry
from tests.draws import drawn
from tests.layouts import meshes, placed, quiet
from tests.numpy_table import leaves
from tests.standard_calls import CALLS
from tests.standard_draws import ALL, Call, Draw

ERRORS = (ArithmeticError, IndexError, TypeError, ValueError)

NAMES = sorted(name for name in CALLS if "item" in name or hasattr(np, name.partition(".")[0]))
"""The functions that this version of NumPy has."""


def check_call(name: str, data: Any, backend: str) -> None:
    dtypes = [d for d in ALL if registry.load(backend).has_dtype(np.dtype(d))]
    with quiet():
        call = CALLS[name](Draw(data, dtypes))
        try:
            wanted = call.function(np, *[x.copy() for x in call.operands])
        except ERRORS:
            wanted = None
    refused = wanted is None or any(str(np.asarray(x).dtype) not in dtypes for x in leaves(wanted))
    mesh = data.draw(meshes(backend))
    with quiet(), st.use_mesh(mesh):
        operands = [operand(data, x, backend, mesh) for x in call.operands]
        if operands and not any(isinstance(x, st.ShardedTensor) for x in operands):
            operands[0] = placed(data, call.operands[0], backend, None)
        if refused:
            with pytest.raises(ERRORS):
                call.function(st, *operands)
            return
        found = call.function(st, *operands)
        compare(found, wanted, call)  # The double of CuPy delays work, and what it warns of, until elements are read.


def operand(data: Any, x: np.ndarray, backend: str, mesh: st.Mesh) -> Any:
    """Returns the array as it is placed, or as a view of its mirror image; from a host array of drawn strides."""
    how = data.draw(some.sampled_from(["row-major", "column-major", "negative", "gaps"]))
    if mirrored := x.ndim > 0 and data.draw(some.booleans()):
        x = np.flip(x, -1).copy()
    if how == "column-major":
        x = np.asarray(x, order="F")
    elif how == "negative":
        x = np.flip(np.flip(x).copy())
    elif how == "gaps":
        x = np.stack([x, x], -1)[..., 0]
    made = placed(data, x, backend, mesh)
    return made[..., ::-1] if mirrored else made


def compare(found: Any, wanted: Any, call: Call) -> None:
    if isinstance(wanted, (tuple, list)):
        assert len(found) == len(wanted)
        for pair in zip(found, wanted, strict=True):
            compare(*pair, call)
        return
    assert isinstance(found, st.ShardedTensor)
    mine, numpys = np.asarray(found), np.asarray(wanted)
    assert (found.shape, found.dtype) == (mine.shape, mine.dtype) == (numpys.shape, numpys.dtype)
    if numpys.dtype.kind not in "fc":
        np.testing.assert_array_equal(mine, numpys)
        return
    unit = float(np.finfo(numpys.dtype).eps)
    limits = {"rtol": call.rtol * unit, "atol": call.scale * unit}
    finite = np.isfinite(numpys)
    np.testing.assert_allclose(mine[finite], numpys[finite], **limits)
    for part in (np.real, np.imag):  # One part of a complex number may be infinite, and the other rounded.
        np.testing.assert_allclose(part(mine)[~finite], part(numpys)[~finite], **limits)
        if call.signs:
            zero = (part(numpys) == 0) & (part(mine) == 0)
            np.testing.assert_array_equal(np.signbit(part(mine))[zero], np.signbit(part(numpys))[zero])


@pytest.mark.parametrize("backend", ["numpy", "checked"], indirect=True)
def test_drawn_functions(backend: str) -> None:
    @hypothesis.settings(max_examples=drawn(60))
    @hypothesis.given(name=some.sampled_from(NAMES), data=some.data())
    def run(name: str, data: Any) -> None:
        check_call(name, data, backend)

    run()


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["numpy", "checked", "cupy", "torch", "grouped"])
def test_every_function(name: str, backend: str) -> None:
    @hypothesis.settings(max_examples=drawn(25))
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        check_call(name, data, backend)

    run()
