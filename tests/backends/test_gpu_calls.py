"""The host synchronizes with a GPU only in the calls in which CuPy's function does.

The page `docs/gpu_calls.md` has the numbers counted on CuPy; the simulated CuPy synchronizes in the same places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

import shardtensor as st
from tests import fakecupy
from tests.backends.test_cupy import machine
from tests.gpu_table import BARE, CHAPTERS, PAGE, SETTINGS, Call, measured, waits_of

TABLE = waits_of(PAGE.read_text())
COLUMNS = (BARE, *SETTINGS)

READ = {
    "allclose": "returns a bool",
    "array_equal": "returns a bool",
    "array_equiv": "returns a bool",
    "x[k]": "the index is read, because it says which elements move",
    "apply_along_axis": "calls a function of NumPy, on the host",
}
"""The calls in which the host waits and in which bare CuPy's do not, and why."""


@contextmanager
def count() -> Iterator[SimpleNamespace]:
    """Counts of a call, of which the double has those of synchronizations."""
    made, before = SimpleNamespace(launches=0, copies=0, events=0, waits=0), fakecupy.waits
    yield made
    made.waits = fakecupy.waits - before


def waits(call: Call, setting: str) -> int | str:
    """How often the host waits in the second of two calls on the double; the name of the error if it raises one."""
    gpus, devices = SETTINGS[setting]
    with machine(devices, devices=gpus) as made:
        mesh = made.mesh()
        with st.use_mesh(mesh):
            found = measured(call, lambda x: st.device_put(x, st.NamedSharding(mesh, st.P("d"))), count)
    return found if isinstance(found, str) else found[3]


def test_the_page_has_a_wait_only_where_cupy_waits_or_a_value_is_read() -> None:
    wrong = {
        name: row
        for (_, name), row in TABLE.items()
        if row[0] == 0 and any(row[1:]) and name not in READ and not name.startswith("float")
    }
    assert not wrong


@pytest.mark.parametrize(("chapter", "name"), [(c, name) for c in list(CHAPTERS)[:2] for name in CHAPTERS[c]])
def test_the_host_waits_for_as_many_results_as_on_the_page(chapter: str, name: str) -> None:
    assert waits(CHAPTERS[chapter][name], "1 × 8") == TABLE[chapter, name][COLUMNS.index("1 × 8")]


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_host_waits_as_on_the_page(chapter: str, setting: str) -> None:
    column = COLUMNS.index(setting)
    wrong = {}
    for name, call in CHAPTERS[chapter].items():
        if (on_page := TABLE.get((chapter, name), [None] * len(COLUMNS))[column]) is not None:
            found = waits(call, setting)
            if bool(found) != bool(on_page):
                wrong[name] = found, on_page
    assert not wrong
