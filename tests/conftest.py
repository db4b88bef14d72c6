"""The configuration of all tests: eight logical devices, set before a backend is loaded, and fixtures for the backends.

Operators run on NumPy, on checked memories, on CuPy (without a GPU, on the simulated CuPy in `tests.fakecupy`) and on
torch.
"""

from __future__ import annotations

import os

os.environ["SHARDTENSOR_NUM_DEVICES"] = "8"
os.environ.pop("SHARDTENSOR_BACKEND", None)
os.environ.pop("SHARDTENSOR_NUM_THREADS", None)
os.environ.setdefault("SHARDTENSOR_TRACEBACK", "full")  # failures of tests show the frames of the library
os.environ.setdefault("SCIPY_ARRAY_API", "1")  # SciPy reads it when it is imported; JAX imports SciPy
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # JAX gives values to compare with, most of them once
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a hundred times faster for small matrices on a busy machine
os.environ.setdefault("OMP_NUM_THREADS", "1")  # likewise for torch, whose threads spin while they wait

import contextlib
import ctypes
import functools
import gc
import logging
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import hypothesis
import pytest

import shardtensor as st
from shardtensor.backend import protocol, registry
from shardtensor.errors import BackendError
from shardtensor.testing.checked import CheckedBackend
from tests import fakecupy, scripts
from tests.draws import drawn

for _name in st.__all__:  # Imports the modules that are imported on first use: tests iterate over all operators.
    getattr(st, _name)

os.environ["SHARDTENSOR_BACKEND"] = "numpy"
registry.default_backend()  # The default is the numpy backend even if there is a GPU.
del os.environ["SHARDTENSOR_BACKEND"]


class Grouped(CheckedBackend):
    """Checked devices of which every four share a memory, like the logical devices of a GPU."""

    name = "grouped"

    def __init__(self) -> None:
        super().__init__(sharing=4)


registry._loaded["grouped"] = Grouped()
registry.load("checked")  # loaded here, before a test of CuPy changes the number of devices


def unusable_reason(name: str) -> str:
    """Returns the reason why a backend cannot be used on this machine; an empty string if it can."""
    try:
        registry.load(name)
    except BackendError as error:
        return str(error)
    return ""


NO_GPU = unusable_reason("cupy")
"""The reason why there is no usable GPU; empty if there is one."""
if NO_GPU:
    fakecupy.install()
    registry.load("cupy")
NO_TORCH = next((f"{name} is not installed" for name in ("torch", "array_api_compat") if find_spec(name) is None), "")
"""The reason why torch cannot be used; empty if it can."""

pytest_plugins = ["tests.selection"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start background jobs in this state
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup does; tests send it to launchers
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

st.set_cache_limit(1 << 25)  # The default is a quarter of the machine's memory, which a run of all tests fills.

with contextlib.suppress(ImportError):  # These modules are private, and other versions may not have them.
    from hypothesis.internal.conjecture import providers
    from hypothesis.internal.constants_ast import Constants

    # hypothesis would draw constants from the source of all modules that are loaded, which takes seconds to read, and
    # makes the examples depend on which other tests run in the same process.
    NO_CONSTANTS = Constants()
    providers._get_local_constants = lambda: NO_CONSTANTS


def pytest_configure() -> None:
    hypothesis.settings.register_profile(
        "drawn",
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=drawn(100),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],  # explaining a failure takes minutes
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("drawn")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if NO_GPU:
        missing = pytest.mark.skip(reason=f"there is no GPU: {NO_GPU}")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(missing)


def pytest_collection_finish() -> None:
    """Loads the torch backend before a test changes the number of devices that a backend starts with.

    The controller of pytest-xdist, which collects no tests, does not load it, and so saves 200 MB.
    """
    if not NO_TORCH:
        registry.load("torch")


FAST = ("numpy", "checked")
SLOW = tuple(pytest.param(name, marks=pytest.mark.full) for name in ("cupy", "torch"))


@pytest.fixture(params=[*FAST, *SLOW])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each backend in turn."""
    if request.param == "torch" and NO_TORCH:
        pytest.skip(NO_TORCH)
    return str(request.param)


class Logged(logging.Handler):
    """The messages of loggers in a test.

    As pytest's own `caplog`, whose plugin is left out in `pyproject.toml`: it adds handlers around each phase of each
    test, which takes a fifth of the time that pytest takes for a test.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    @contextlib.contextmanager
    def at_level(self, level: int, logger: str) -> Iterator[None]:
        """Lets a logger pass on the messages of a level."""
        found = logging.getLogger(logger)
        before = found.level
        found.setLevel(level)
        try:
            yield
        finally:
            found.setLevel(before)


@pytest.fixture
def logged() -> Iterator[Logged]:
    """The messages of all loggers during the test."""
    handler = Logged()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


@pytest.fixture(autouse=True)
def no_races(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Fails a test in which the simulated GPUs detected a race."""
    yield
    if NO_GPU:
        races = list(fakecupy.races)
        fakecupy.races.clear()
        assert not races, races


@pytest.fixture(autouse=True)
def numbers_of_devices() -> Iterator[None]:
    """Removes the numbers of devices that a test has set: pages and notebooks call `st.set_num_devices`."""
    before = dict(protocol.device_counts)
    yield
    if protocol.device_counts != before:
        protocol.device_counts.clear()
        protocol.device_counts.update(before)


def clear_caches() -> None:
    """Empties the library's caches of limited size, which hold plans for thousands of devices."""
    for module in [module for name, module in sys.modules.items() if name.startswith("shardtensor")]:
        for cached in vars(module).values():
            if isinstance(cached, functools._lru_cache_wrapper) and cached.cache_parameters()["maxsize"]:
                cached.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def close_server() -> Iterator[None]:
    """Ends the process that forks for scripts, whose processor time counts."""
    yield
    scripts.close()


@pytest.fixture(scope="module", autouse=True)
def free_memory() -> Iterator[None]:
    """Returns the memory in caches and pools to the system after the tests of a module.

    The C library returns free memory only on request. Objects that remain, such as imported modules, are excluded from
    later garbage collections.
    """
    yield
    clear_caches()
    gc.collect()
    gc.freeze()
    st.free_cache()
    if NO_GPU:
        fakecupy.free()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


class Late(Exception):
    """Raised by the handler of SIGALRM; see `late`."""


@pytest.fixture
def late() -> Iterator[None]:
    """Installs a handler of SIGALRM that raises `Late`, like the timeouts of test runners and services."""

    def handler(number: int, frame: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, handler)
    yield
    signal.signal(signal.SIGALRM, before)
