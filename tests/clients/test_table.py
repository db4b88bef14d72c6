"""The tables of `docs/libraries.md` are up to date: which calls of other libraries take tensors, and how."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.clients.programs import devices, numbers
from tests.clients_calls import ESTIMATORS, GENERATORS, LIBRARIES, MATPLOTLIB, SKLEARN, XARRAY
from tests.clients_table import AS_IT_IS, PAGE, TENSORS, measured, section, version_of
from tests.layouts import put

# Libraries warn of the releases of each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.full
@pytest.mark.parametrize("title", LIBRARIES)
def test_the_page_is_up_to_date(title: str) -> None:
    module, _ = LIBRARIES[title]
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed: see the extra `clients`")
    if f"### {title.format(version_of(module))}\n" not in PAGE.read_text():
        pytest.skip(f"the page describes another version of {module}")
    assert section(title) in PAGE.read_text(), "run python -m tests.clients_table"


def test_there_are_as_many_calls_as_the_page_promises() -> None:
    assert len(MATPLOTLIB) >= 34
    assert len(ESTIMATORS) >= 30
    assert PAGE.read_text().count("\n### ") == len(LIBRARIES)


EVERYDAY: dict[str, tuple[str, Any, set[str]]] = {
    **{name: ("matplotlib", MATPLOTLIB[name], {AS_IT_IS}) for name in ("bar", "barh", "plot_surface")},
    **{name: ("sklearn", SKLEARN[name], {AS_IT_IS}) for name in ("KMeans", "RandomForestClassifier", "StandardScaler")},
    "mean, std, var": ("xarray", XARRAY["mean, std, var"], {TENSORS}),
    "permutation": ("numpy", GENERATORS["permutation"], {AS_IT_IS}),
}
"""Calls that once needed ``np.asarray(x)``: the library, the call and its kinds."""


@pytest.mark.parametrize("name", EVERYDAY)
def test_everyday_calls_take_tensors_as_they_are(name: str) -> None:
    module, call, kinds = EVERYDAY[name]
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed: see the extra `clients`")
    kind, cause = measured(call)
    assert kind in kinds, cause


def test_arrays_of_a_tensor_may_share_its_memory(backend: str) -> None:
    """Programs that write to what they have converted copy it then."""
    a = numbers(10, 3)
    x = put(a, backend, (3,))
    for y in (x, x[1:, ::2], x.T, x[2]):
        export = np.asarray(y)
        assert not export.flags.writeable
        assert np.may_share_memory(export, y)
        assert np.may_share_memory(y, export)
        assert not np.may_share_memory(np.array(y), y)
        assert np.shares_memory(export, y) == np.shares_memory(export, np.asarray(x)) == (backend == "numpy")
    assert not np.may_share_memory(x, a)
    assert not np.shares_memory(x, a)
    frozen = a.copy()
    frozen.flags.writeable = False
    for other in (frozen, frozen[1:], np.broadcast_to(1.0, (3,)), np.frombuffer(b"12345678")):
        for y in (x, x[1:, ::2], x.sum(), st.asarray(a)):
            assert not np.may_share_memory(other, y)
            assert not np.may_share_memory(y, other)
    if backend == "numpy":
        assert not np.may_share_memory(np.asarray(st.asarray(a)), x)
        assert not np.may_share_memory(np.asarray(x[:2]), x[5:])
    parts = st.unshard(st.pmap(lambda part: part + 1, st.shard(a, devices=x.sharding.mesh)))
    assert not np.may_share_memory(parts[1:, 1], a)
    with devices(3):
        shared = st.asarray(a, copy=False)
        assert np.shares_memory(shared, a)
        assert np.may_share_memory(a, shared[1:])
        assert not np.shares_memory(shared[5:], a[:5])
