"""Reductions with ``where`` and ``initial``, against NumPy, under drawn shapes, masks and layouts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.testing.cases import axes
from tests.layouts import DTYPES, array, assert_same, everywhere, mesh_of, meshes, placed, put, shapes

WITH_INITIAL = ["sum", "prod", "max", "min", "nansum", "nanprod", "nanmax", "nanmin"]
NAMES = [*WITH_INITIAL, "mean", "var", "std", "all", "any", "nanmean", "nanvar", "nanstd"]


@everywhere
@pytest.mark.parametrize("name", NAMES)
@hypothesis.settings(max_examples=6)
@hypothesis.given(data=some.data())
def test_options_give_numpys_results(name: str, backend: str, data: Any) -> None:
    dtypes = [d for d in DTYPES if not (backend == "torch" and d == "uint8")]  # torch lacks the uint64 of their sums.
    a = array(data.draw(shapes()), data.draw(some.sampled_from(dtypes)), 1)
    a = (1 + a / 64).astype(a.dtype) if "prod" in name and a.dtype.kind in "fc" else a
    if a.dtype.kind in "fc" and a.size and data.draw(some.booleans()):
        a.flat[data.draw(some.integers(0, a.size - 1))] = np.nan
    shape = a.shape[data.draw(some.integers(0, a.ndim)) :]
    mask = np.asarray(array(shape, "bool", 2))
    params: dict[str, Any] = {"axis": axes(data, a.ndim), "keepdims": data.draw(some.booleans())}
    options: dict[str, Any] = {"where": mask}
    if name in WITH_INITIAL:
        options["initial"] = data.draw(some.sampled_from([0, 1, True]))
    mesh = data.draw(meshes(backend))
    x = placed(data, a, backend, mesh)
    given = {key: placed(data, mask, backend, mesh) if key == "where" else value for key, value in options.items()}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        wanted = getattr(np, name)(a, **params, **options)
        for module in (st, np) if isinstance(x, st.ShardedTensor) else (st,):
            assert_same(getattr(module, name)(x, **params, **given), wanted)


@pytest.mark.parametrize("name", ["sum", "max", "any", "mean", "std"])
def test_results_are_sharded_and_move_no_elements(name: str) -> None:
    a = np.arange(35.0).reshape(7, 5)
    x = st.device_put(a, mesh_of((4,), "numpy"))
    mask = st.device_put(a % 3 > 0, x.sharding)
    options: dict[str, Any] = {"initial": 2} if name == "max" else {}
    with st.transfer_guard("disallow"):
        found = getattr(x, name)(axis=1, where=mask, **options)
    assert found.sharding.spec == st.P("x")
    assert_same(found, getattr(a, name)(axis=1, where=a % 3 > 0, **options))


def test_defaults_of_numpy_are_no_options() -> None:
    x = st.arange(6.0)
    assert st.sum(x, where=True, initial=None).item() == np.sum(x, where=True, initial=np._NoValue).item() == 15
    assert st.max(x, initial=9).item() == x.max(initial=9).item() == 9
    assert st.sum(x, where=[True, False] * 3).item() == 6
    assert st.sum(x, initial=st.sum(x)).item() == 30
    assert st.sum(st.zeros((0, 3)), axis=0, initial=2).tolist() == [2, 2, 2]


def test_options_in_out_maps_and_inference() -> None:
    a = np.arange(12.0).reshape(4, 3)
    x, out = st.device_put(a, mesh_of((2,), "numpy")), st.zeros(3)
    assert np.sum(x, axis=0, where=x > 4, out=out) is out
    np.testing.assert_array_equal(np.asarray(out), a.sum(0, where=a > 4))
    assert st.eval_shape(lambda x: st.var(x, axis=0, where=x > 4), x).shape == (3,)
    (found,) = st.pmap(lambda b: st.mean(b, where=b > 4), [a], devices=st.devices("numpy")[:1])
    assert found.item() == a.mean(where=a > 4)


ERRORS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "max where": (lambda x: st.max(x, where=x > 1), ValueError, "^max: where needs initial"),
    "nanmin where": (lambda x: np.nanmin(x, where=x > 1), ValueError, "^nanmin: where needs initial"),
    "integers": (lambda x: st.sum(x, where=np.ones(3, int)), TypeError, "^sum: where has dtype int64; wanted bools"),
    "a larger mask": (lambda x: st.sum(x, where=np.ones((2, 4, 3), bool)), ValueError, "^sum: where has shape"),
    "another shape": (lambda x: st.mean(x, where=np.ones(2, bool)), ValueError, "^mean: where has shape .2,.; wanted"),
    "initial array": (lambda x: st.sum(x, initial=st.ones(3)), ValueError, "initial has shape .3,.; wanted a scalar"),
    "initial text": (lambda x: st.sum(x, initial="a"), ValueError, "^sum: initial 'a' for elements of float64"),
    "initial of a mean": (lambda x: st.mean(x, initial=1), TypeError, "unexpected keyword argument 'initial'"),
    "an axis": (lambda x: st.sum(x, axis=3, where=x > 1), st.AxisError, "^sum: axis 3 is out of range"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_function(name: str, backend: str) -> None:
    call, kind, words = ERRORS[name]
    with pytest.raises(kind, match=words):
        call(st.device_put(np.ones((4, 3)), mesh_of((2,), backend)))


@pytest.mark.parametrize("name", ["var", "std"])
def test_ddof_is_numpys_name_of_correction(name: str, backend: str) -> None:
    a = array((10, 3), "float64", 1)
    x, mine, its = put(a, backend, (3,)), getattr(st, name), getattr(np, name)
    for ddof in (0, 1, 0.5):
        for params in (
            {"axis": 0},
            {"axis": None, "keepdims": True},
            {"axis": 1, "where": a > 0},
            {"dtype": "float32"},
        ):
            with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
                assert_same(mine(x, ddof=ddof, **params), its(a, ddof=ddof, **params))
        assert_same(st.jit(lambda y, ddof=ddof: mine(y, axis=0, ddof=ddof))(x), its(a, axis=0, ddof=ddof))
        assert_same(st.pmap(lambda y, ddof=ddof: mine(y, ddof=ddof), [x])[0], its(a, ddof=ddof))
    replicated = st.NamedSharding(x.sharding.mesh, st.P())
    assert mine(x, axis=1, ddof=1, out_sharding=replicated).sharding == replicated
