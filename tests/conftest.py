"""Eight logical devices for every test, set before anything asks for one; and the backends that operators run on: NumPy,
the checked memories, CuPy (on a GPU where there is one, else on the double in `tests.fakecupy`) and torch.
"""

from __future__ import annotations

import os

os.environ["SHARDTENSOR_NUM_DEVICES"] = "8"
os.environ.pop("SHARDTENSOR_BACKEND", None)
os.environ.pop("SHARDTENSOR_NUM_THREADS", None)
os.environ.setdefault("SCIPY_ARRAY_API", "1")  # SciPy reads it when it is imported, which JAX does, too
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small matrices on busy machines: a hundred times faster so

import ctypes
import functools
import gc
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import hypothesis
import pytest

import shardtensor as st
from shardtensor.backend import registry
from shardtensor.errors import BackendError
from shardtensor.testing.checked import CheckedBackend
from tests import fakecupy

for _name in st.__all__:  # Modules that are imported on first use: tests of all operators iterate over the table.
    getattr(st, _name)

os.environ["SHARDTENSOR_BACKEND"] = "numpy"
registry.default_backend()  # also where there is a GPU
del os.environ["SHARDTENSOR_BACKEND"]


class Grouped(CheckedBackend):
    """Checked devices of which every four share a memory, as the logical devices of a GPU do."""

    name = "grouped"

    def __init__(self) -> None:
        super().__init__(sharing=4)


registry._loaded["grouped"] = Grouped()
registry.load("checked")  # before a test of CuPy changes the number of devices


def usable(name: str) -> str:
    """Why a backend cannot be used here; nothing if it can."""
    try:
        registry.load(name)
    except BackendError as error:
        return str(error)
    return ""


NO_GPU = usable("cupy")
if NO_GPU:
    fakecupy.install()
    registry.load("cupy")
NO_TORCH = next((f"{name} is not installed" for name in ("torch", "array_api_compat") if find_spec(name) is None), "")
"""Why torch cannot be used here; nothing if it can."""

pytest_plugins = ["tests.selection"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

st.set_cache_limit(1 << 25)  # by default it is a quarter of the machine's memory, which a run of all tests does fill

hypothesis.settings.register_profile(
    "fast",
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],  # explaining a failure takes minutes
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("fast")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if NO_GPU:
        missing = pytest.mark.skip(reason=f"there is no GPU: {NO_GPU}")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(missing)


def pytest_collection_finish() -> None:
    """Before a test changes the number of devices that a backend begins with. The controller of pytest-xdist, which
    collects nothing, does without the 200 MB.
    """
    if not NO_TORCH:
        registry.load("torch")


FAST = ("numpy", "checked")
SLOW = tuple(pytest.param(name, marks=pytest.mark.full) for name in ("cupy", "torch"))


@pytest.fixture(params=[*FAST, *SLOW])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend by name."""
    if request.param == "torch" and NO_TORCH:
        pytest.skip(NO_TORCH)
    return str(request.param)


@pytest.fixture(autouse=True)
def no_races(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What nothing has ordered on the double's GPUs fails the test that did it."""
    yield
    if NO_GPU:
        found = list(fakecupy.races)
        fakecupy.races.clear()
        assert not found, found


def forget() -> None:
    """Empties the library's caches, those that drop what is old: they hold plans for thousands of devices."""
    for module in [module for name, module in sys.modules.items() if name.startswith("shardtensor")]:
        for cached in vars(module).values():
            if isinstance(cached, functools._lru_cache_wrapper) and cached.cache_parameters()["maxsize"]:
                cached.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def memory_is_freed() -> Iterator[None]:
    """What the tests of a module leave in caches and pools goes back to the system, which the C library does when it is
    asked to; and what they leave for good, such as a library that they imported, is not collected over and over.
    """
    yield
    forget()
    gc.collect()
    gc.freeze()
    st.free_cache()
    if NO_GPU:
        fakecupy.free()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


class Late(Exception):
    """What the handler of an alarm raises."""


@pytest.fixture
def late() -> Iterator[None]:
    """SIGALRM raises `Late`, as the timeouts of tests and services do."""

    def handler(number: int, frame: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, handler)
    yield
    signal.signal(signal.SIGALRM, before)
