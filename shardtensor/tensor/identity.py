"""The identity of a tensor that concerns several processes: which call made it.

Two tensors of one shape, dtype and layout look alike. Processes that pass different ones to the same call would compute
wrong elements, so they compare the identities of the operands. All processes make the same calls in the same order, so
the number of a call identifies its result in all of them. It stays with the tensor, since writes are compared, too. A
view is identified by its base and its elements.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

from shardtensor.tensor.storage import Storage


def identity_of(x: Any) -> str:
    """Returns a text that differs between tensors of one aval: ``#12`` of the result of call 12, and for a view of it
    the offset and the strides, too. It is empty for a tensor that no compared call has made.
    """
    storage = x._storage
    if type(storage) is not Storage and hasattr(storage, "view_spec"):
        view_spec = storage.view_spec
        part = f".{view_spec.part}" if view_spec.part else ""
        return f"{identity_of(storage.base)}[{view_spec.offset}, {view_spec.strides}]{part}"
    identity: str = getattr(x, "_identity", "")
    if not identity or identity[0] == "#":
        return identity
    return _after_writes(identity, x)  # Another result of this operator on these operands may be written otherwise.


def value_identity(x: Any) -> str:
    """Returns the identity of the value that a tensor has now, which later writes to the tensor do not change."""
    identity = identity_of(x)
    return _after_writes(identity, getattr(x._storage, "base", x)) if identity[:1] == "#" else identity


def _after_writes(identity: str, x: Any) -> str:
    state = x._write_state
    return f"{identity} after {state.version} writes" if state and state.version else identity


def derived_identity(name: str, operands: Iterable[Any]) -> str:
    """Returns the identity of the result of an operator that processes do not compare, from those of its operands. It
    is empty if these have none.
    """
    texts = [value_identity(x) if hasattr(x, "_storage") else repr(x) for x in operands]
    if not any("#" in text for text in texts):
        return ""
    text = f"{name}({', '.join(texts)})"
    return text if len(text) <= _LONGEST else f"{name}(#{crc32(text.encode()):08x})"


_LONGEST = 60
"""The number of characters of the longest derived identity: of a longer one, it is a checksum."""


def with_identity(made: Any, x: Any) -> Any:
    """Returns ``made``, a handle on the value of the tensor ``x``, with the identity of ``x``."""
    if identity := identity_of(x):
        made._identity = identity
    return made
