"""For those who bring devices: `BackendTests`, the suite that proves a backend, and the `checked` backend, which stands
in for real devices where there are none. `docs/writing_a_backend.md` shows both at work.

Importing this loads neither pytest nor hypothesis: `BackendTests` does, when it is first asked for.
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
