"""Eight logical devices for every test, set before anything asks for one; and the backends that operators run on: NumPy,
the checked memories, CuPy (on a GPU where there is one, else on the double in `tests.fakecupy`) and torch.
"""

from __future__ import annotations

import os

os.environ["SHARDTENSOR_NUM_DEVICES"] = "8"
os.environ.pop("SHARDTENSOR_BACKEND", None)
os.environ.pop("SHARDTENSOR_NUM_THREADS", None)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small matrices on busy machines: a hundred times faster so

import signal
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from shardtensor.backend import registry
from shardtensor.errors import BackendError
from tests import fakecupy

os.environ["SHARDTENSOR_BACKEND"] = "numpy"
registry.default_backend()  # also where there is a GPU
del os.environ["SHARDTENSOR_BACKEND"]


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
NO_TORCH = usable("torch")

hypothesis.settings.register_profile(
    "fast",
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],  # explaining a failure takes minutes
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("fast")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    full = pytest.mark.skip(reason="marked full: run with --full")
    gpu = pytest.mark.skip(reason=f"there is no GPU: {NO_GPU}")
    for item in items:
        if item.get_closest_marker("full") and not config.getoption("--full"):
            item.add_marker(full)
        if item.get_closest_marker("gpu") and NO_GPU:
            item.add_marker(gpu)


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
