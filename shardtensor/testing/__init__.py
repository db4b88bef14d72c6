"""Tools for tests: `check_grads` compares gradients with finite differences.

Tools for authors of plugins: `BackendTests` and `EngineTests`, the conformance suites of backends and engines, and
the ``checked`` backend, which simulates devices with separate memories on the host. `docs/writing_a_backend.md` and
`docs/writing_an_engine.md` show how to use them.

Importing this package loads neither pytest nor hypothesis; the first access to `BackendTests` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardtensor.exports import modules_of_names
from shardtensor.signatures import without_quotes

_modules = modules_of_names("shardtensor.testing.public")

if TYPE_CHECKING:
    from shardtensor.testing.public import *  # noqa: F403
else:  # They would take this `__all__` for an empty one.
    __all__ = sorted(_modules)

<<<<<<< 672a83f2f700095f9e3657eb15f637260b58403e
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
=======
    def __getattr__(name: str) -> Any:
        if name not in _modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(_modules[name]), name)
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] not in ("pytest", "hypothesis"):
                raise
            raise ImportError(f"{name} needs pytest and hypothesis: {error}; pip install pytest hypothesis") from None
        globals()[name] = without_quotes(value)
        return value
>>>>>>> 5fe37975eb56e891ebbb622208b15c54bc094018
