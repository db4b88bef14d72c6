"""Results do not depend on sizes: every function and random programs on both sides of every threshold, against NumPy."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.draws import drawn
from tests.scripts import new_process
from tests.sizes.functions import CALLS, COPIED, EITHER_ZERO, EXACT, ILL_CONDITIONED, LEFT_OUT, NOT_STABLE, UNSORTED
from tests.sizes.thresholds import OTHERS, THRESHOLDS, constants

BACKENDS = "numpy,checked,torch,cupy"
MIXED = "numpy,checked,numpy,torch,numpy,checked,cupy"
FAST = (
    "numpy,numpy,numpy,checked", "numpy,numpy,numpy,torch,checked", "numpy,numpy,numpy,checked",
    "numpy,numpy,numpy,numpy,checked,numpy,numpy,numpy,cupy",
)  # fmt: skip
"""Most programs of the fast tier are on NumPy: those on simulated GPUs take ten times as long, and the import of torch as
long as a hundred programs.
"""


def short(module: str, name: str) -> str:
    return f"{module}.{name}".removeprefix("shardtensor.").removeprefix("shardtensor_")


def run(kind: str, setting: str, backends: str, first: int, count: int, executor: str = "numpy") -> None:
    """Runs calls or programs in a process with these thresholds; see `tests.sizes`."""
    usable = [name for name in backends.split(",") if name not in ("torch", "cupy") or find_spec(name)]
    words = [kind, setting, ",".join(usable), str(first), str(count), executor]
    ended = new_process("-m", "tests.sizes", *words, seconds=1200)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_number_of_a_module_is_a_threshold_or_is_listed_as_something_else() -> None:
    thresholds = {short(module, name) for module, names in THRESHOLDS.items() for name in names}
    others = [name for names in OTHERS.values() for name in names.split()]
    assert len(set(others)) == len(others)
    assert not thresholds & set(others)
    assert thresholds | set(others) == {short(*constant) for constant in constants()}


def test_the_lists_of_functions_have_names_of_calls() -> None:
    names = {name.rpartition(".")[2] for name in CALLS}
    assert {*LEFT_OUT, *NOT_STABLE, *ILL_CONDITIONED, *UNSORTED, *COPIED} <= set(CALLS)
    assert {*EITHER_ZERO, *EXACT} <= names


@pytest.mark.parametrize("setting", ["none", "low"])
def test_every_function_is_numpys_below_and_above_the_thresholds(setting: str) -> None:
    run("calls", setting, MIXED, 0, drawn(2, fast=1))


@pytest.mark.parametrize("part", range(4))
def test_few_random_programs_are_numpys(part: int) -> None:
    run("programs", ["none", "low", "1", "2"][part], FAST[part], 500 * part, drawn(250, fast=40))


def test_random_programs_in_c_are_numpys() -> None:
    run("programs", "low", "numpy", 5000, 12, "c")


@pytest.mark.full
@pytest.mark.parametrize("part", range(20))
def test_functions_and_random_programs_in_c_are_numpys(part: int) -> None:
    run("programs", ["none", "low", str(part)][part % 3], MIXED, 200_000 + 100 * part, 100, "c")
    run("calls", ["none", "low", str(part)][part % 3], "numpy,checked,torch", 1000 + part, 1, "c")


@pytest.mark.full
@pytest.mark.parametrize("part", range(100))
def test_a_hundred_thousand_random_programs_are_numpys(part: int) -> None:
    run("programs", ["none", "low", str(part)][part % 3], MIXED, 10_000 + 1000 * part, 1000)


@pytest.mark.full
@pytest.mark.parametrize("module", THRESHOLDS)
def test_every_function_is_numpys_above_the_thresholds_of_each_module(module: str) -> None:
    run("calls", module, BACKENDS, 100, 4)


@pytest.mark.full
@pytest.mark.parametrize("part", range(40))
def test_every_function_is_numpys_with_drawn_thresholds(part: int) -> None:
    run("calls", str(part), BACKENDS, 200 + 12 * part, 12)
