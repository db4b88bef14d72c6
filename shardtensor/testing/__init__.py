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

    def __getattr__(name: str) -> Any:
        if name not in _modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:  # Tests of backends do without those of engines; and pytest may be missing.
            value = getattr(importlib.import_module(_modules[name]), name)
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] not in ("pytest", "hypothesis"):
                raise
            raise ImportError(f"{name} needs pytest and hypothesis: {error}; pip install pytest hypothesis") from None
        globals()[name] = without_quotes(value)
        return value
