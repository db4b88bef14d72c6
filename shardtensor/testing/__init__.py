"""Tools for tests: `check_grads` compares gradients with finite differences.

Tools for authors of plugins: `BackendTests` and `EngineTests`, the conformance suites of backends and engines, and
the ``checked`` backend, which simulates devices with separate memories on the host. `docs/writing_a_backend.md` and
`docs/writing_an_engine.md` show how to use them.

Importing this package loads neither pytest nor hypothesis; the first access to `BackendTests` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardtensor.testing.checked import CheckedArray, CheckedBackend

if TYPE_CHECKING:
    from shardtensor.testing.engines import EngineTests
    from shardtensor.testing.gradients import check_grads
    from shardtensor.testing.suite import BackendTests

__all__ = ["BackendTests", "CheckedArray", "CheckedBackend", "EngineTests", "check_grads"]


def __getattr__(name: str) -> Any:
    if name == "EngineTests":
        from shardtensor.testing.engines import EngineTests  # Tests of backends do without it.

        return EngineTests
    if name == "check_grads":
        from shardtensor.testing.gradients import check_grads  # See above.

        return check_grads
    if name != "BackendTests":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from shardtensor.testing.suite import BackendTests  # It imports pytest and hypothesis.
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("pytest", "hypothesis"):
            raise
        raise ImportError(f"BackendTests needs pytest and hypothesis: {error}; pip install pytest hypothesis") from None
    return BackendTests
