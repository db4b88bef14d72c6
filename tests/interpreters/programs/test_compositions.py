"""Compositions as programs: which are recorded, and that their steps have the results of the operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.core import composition, recorded
from shardtensor.interpreters.programs.compositions import on_buffers, program_of
from shardtensor.tensor.ownership import is_shared
from tests.functions.test_small_results import assert_same_outcome
from tests.layouts import mesh_of
from tests.numpy_table import leaves


def views(x: Any) -> Any:
    turned = (x * 2).T[::-1]
    return turned, [st.reshape(x + 1, (-1,)), (x + 3)[..., 0]]


def parts(x: Any) -> Any:
    z = x * 1j
    return z.real + 1, st.imag(z + 2).T * 2, st.real(x) + 1, (z + 1).imag


def elements(x: Any) -> Any:
    return (x * 3)[0, 0] * x, (x + 1)[0, 0], st.asarray(st.sum(x)), st.sum(x)[...], st.max(x)


def algorithms(x: Any) -> Any:
    ordered, order = st.cumulative_sum(st.sort(x, axis=0), axis=0), st.argsort(x, axis=0)
    return ordered[::-1] * 2, st.take_along_axis(ordered, order, axis=0), st.linalg.svd(x)


def constants(x: Any) -> Any:
    return st.multiply(x, np.arange(3)), st.asarray([1.0, 2.0]), st.zeros(2), st.add(x, -0.0)


@pytest.mark.parametrize("function", [views, parts, elements, algorithms, constants])
def test_programs_have_the_results_of_operators(function: Callable[..., Any], backend: str) -> None:
    composed = composition(recorded)(function)
    for spec in (st.P("x"), st.P(None, "x"), st.P()):
        x = st.device_put(np.random.default_rng(0).normal(size=(5, 3)), st.NamedSharding(mesh_of((3,), backend), spec))
        for given in (x, x[::-1], st.asarray(np.ones((5, 3)))):
            wanted = leaves(function(given))
            for _ in range(3):
                assert_same_outcome(leaves(composed(given)), wanted, to_the_bit=backend != "cupy")


def test_views_of_one_value_stay_views_of_it() -> None:
    """A write to one of the results is visible in the others, as if the operators were called."""

    @composition(recorded)
    def composed(x: Any) -> Any:
        made = x + 1
        return made[1:], made.T

    x = st.device_put(np.zeros((3, 3)), mesh_of((3,), "numpy"))
    for _ in range(3):
        rows, turned = composed(x)
        rows[...] = 5
        assert turned.tolist() == [[1, 5, 5]] * 3


def test_a_result_that_is_a_view_of_new_memory_is_written_in_place() -> None:
    @composition(recorded)
    def composed(x: Any) -> Any:
        return st.reshape(x * 2, (-1,))

    split = st.NamedSharding(mesh_of((3,), "numpy"), st.P("x"))
    x = st.device_put(np.arange(12.0).reshape(4, 3), split)
    for given in (x, st.reshape(x, (3, 4))):
        composed(given)  # The second call records it.
        for _ in range(2):
            result = composed(given)
            assert not is_shared(result._storage)
            buffer = result._storage.buffers[0]
            result[0] = 7.0
            assert result._storage.buffers[0] is buffer
            assert float(result[0]) == 7.0
    assert np.asarray(x).tolist() == np.arange(12.0).reshape(4, 3).tolist()


def test_what_is_not_recorded() -> None:
    x = st.device_put(np.arange(6.0).reshape(2, 3), mesh_of((2,), "numpy"))
    outside = x * 1

    def written(x: Any) -> Any:
        made = x.copy()
        made[0] = 1
        return made

    functions: dict[str, Callable[[Any], Any]] = {
        "elements are read": lambda x: x * float(x.sum()),
        "a shape depends on elements": lambda x: x[x > 2],
        "a write": written,
        "an operand": lambda x: x,
        "a view of an operand": lambda x: x.T,
        "a part of the result is no tensor": lambda x: (x + 1, 3),
        "a tensor that the function closes over": lambda x: x + outside,
        "a map": lambda x: st.smap(lambda a: a + 1, x, devices=x.sharding.mesh),
    }
    for name, function in functions.items():
        assert program_of(function, (x,), {}, [x]) is None, name
    with pytest.raises(st.errors.AxisError, match=r"^sum: axis 5"):
        program_of(lambda x: st.sum(x, axis=5), (x,), {}, [x])
    found = on_buffers(lambda x, y: st.sum(x[0] * y), ([x],), {"y": x}, [x, x])
    assert found is not None
    assert found([x, x]).tolist() == 55


def test_floating_point_errors_are_ignored_where_the_composition_ignores_them() -> None:
    @composition(recorded)
    def composed(x: Any) -> Any:
        with np.errstate(divide="ignore"):
            inverse = st.divide(1.0, x)
        return inverse, st.log(x)

    x = st.device_put(np.zeros((2, 3)), mesh_of((2,), "numpy"))
    for _ in range(4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            composed(x)
        assert [str(w.message) for w in caught] == ["divide by zero encountered in log"]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        composed(x)


def test_a_nan_among_the_arguments_is_the_same_as_another_one() -> None:
    from shardtensor.interpreters import small_results

    x = st.device_put(np.zeros(3), mesh_of((2,), "numpy"))
    keys = [small_results._key((x, float("nan"), np.float32("nan")), []) for _ in range(2)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("count", [8, 1 << 15], ids=["one by one", "kernels"])
def test_programs_of_jit_ignore_the_errors_that_functions_ignore(count: int) -> None:
    host = np.zeros((count, 2))
    host[0] = np.nan

    def f(x: Any) -> Any:
        with np.errstate(divide="ignore"):
            inverse = st.divide(1.0, x)
        return st.nanmean(x, axis=1), inverse * 2, st.log(x)

    x = st.device_put(host, mesh_of((2,), "numpy"))
    traced = st.jit(f, executor="numpy")
    for call in (f, traced, traced):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(x)
        assert [str(w.message) for w in caught] == ["divide by zero encountered in log"]
