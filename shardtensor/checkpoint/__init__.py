"""Checkpoints: pytrees of tensors and other values, written as a whole, and restored on any mesh by any processes.

`save`, `restore`, `inspect` and `verify` know one folder, `Manager` the checkpoints of a program. The main nouns are
the *tree* (`trees`: containers with keys, leaves with names), the *manifest* (`manifest`: all that is not elements),
the *plan* (`plans`: which process writes which chunk from which pieces) and the *save* (`saving`: files, then the
manifest, then the rename). `values` has the leaves that are no arrays, `saved_layouts` the layouts by numbers of
devices, `pieces` the elements that a process holds, and `together` the agreement of processes.

Formats and durable writes are `shardtensor.files`; the command line and the public API import this package, and nothing
below may import it.

>>> folder = __import__("tempfile").mkdtemp()
>>> st.checkpoint.save(f"{folder}/state", {"w": st.ones((4, 2)), "step": 7})
>>> st.checkpoint.restore(f"{folder}/state")["step"]
7
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from shardtensor.checkpoint.contents import Info, Leaf, inspect, verify
from shardtensor.checkpoint.manager import Manager
from shardtensor.checkpoint.restoring import restore
from shardtensor.checkpoint.writing import save, wait
from shardtensor.errors import ArgumentTypeError
from shardtensor.hints import missing

__all__ = ["Info", "Leaf", "Manager", "inspect", "restore", "save", "verify", "wait"]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise missing(__name__, name)


class _Module(ModuleType):
    """The module, whose call is an error: in JAX, `jax.checkpoint` is a function."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ArgumentTypeError(
            "checkpoint: st.checkpoint is the module of checkpoints, and no function; st.remat(f) recomputes values in "
            "the backward pass, as jax.checkpoint(f) does"
        )


sys.modules[__name__].__class__ = _Module
