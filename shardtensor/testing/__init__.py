"""Tools for authors of backends: `BackendTests`, a conformance suite, and the ``checked`` backend, which simulates
devices with separate memories on the host. `docs/writing_a_backend.md` shows how to use both.

Importing this package loads neither pytest nor hypothesis; the first access to `BackendTests` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardtensor.testing.checked import CheckedArray, CheckedBackend

if TYPE_CHECKING:
    from shardtensor.testing.suite import BackendTests

__all__ = ["BackendTests", "CheckedArray", "CheckedBackend"]


def __getattr__(name: str) -> Any:
    if name != "BackendTests":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from shardtensor.testing.suite import BackendTests
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("pytest", "hypothesis"):
            raise
        raise ImportError(f"BackendTests needs pytest and hypothesis: {error}; pip install pytest hypothesis") from None
    return BackendTests
