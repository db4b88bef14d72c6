"""Eight logical devices for every test, set before anything asks for one; and the two backends that every operator
runs on.
"""

from __future__ import annotations

import os

os.environ["SHARDTENSOR_NUM_DEVICES"] = "8"
os.environ.pop("SHARDTENSOR_BACKEND", None)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small matrices on busy machines: a hundred times faster so

import hypothesis
import pytest

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
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="marked full: run with --full")
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(skip)


@pytest.fixture(params=["numpy", "checked"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend by name."""
    return str(request.param)
