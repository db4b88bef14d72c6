"""The identity of a tensor that concerns several processes: which call made it.

Two tensors of one shape, dtype and layout look alike. Processes that pass different ones to the same call would compute
wrong elements, so they compare the identities of the operands. All processes make the same calls in the same order, so
the number of a call identifies its result in all of them. It stays with the tensor, since writes are compared, too. A
view is identified by its base and its elements, and the result of an operator that processes do not compare, such as a
copy, by the operands.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias
from zlib import crc32

Identity: TypeAlias = int | str
"""The number of the call that made a tensor, or a text that contains such numbers. It is printed after a ``#``."""


def identity_of(x: Any) -> Identity:
    """Returns the identity of a tensor, which differs between tensors of one aval: 12 of the result of call 12, and for
    a view of it the offset and the strides, too. It is empty for a tensor that no compared call has made.
    """
    view_spec = getattr(x._storage, "view_spec", None)
    if view_spec is not None:
        base = identity_of(x._storage.base)
        part = f".{view_spec.part}" if view_spec.part else ""
        return f"{base}[{view_spec.offset}, {view_spec.strides}]{part}" if base else ""
    identity: Identity = getattr(x, "_identity", "")
    # Two results of one operator on the same operands, such as two copies, have one identity until one is written.
    return identity if _is_of_call(identity) else _after_writes(identity, x)


def value_identity(x: Any) -> Identity:
    """Returns the identity of the value that a tensor has now, which later writes to the tensor do not change."""
    base = getattr(x._storage, "base", x)
    identity = identity_of(x)
    return _after_writes(identity, base) if _is_of_call(getattr(base, "_identity", "")) else identity


def derived_identity(name: str, operands: Iterable[Any]) -> Identity:
    """Returns the identity of the result of an operator that processes do not compare, from those of its operands. It
    is empty if these have none.
    """
    identities = [value_identity(x) if hasattr(x, "_storage") else "" for x in operands]
    if not any(identities):
        return ""
    texts = [str(i) if i else repr(x) for i, x in zip(identities, operands, strict=True)]
    text = f"{name}({', '.join(texts)})"
    return text if len(text) <= _LONGEST else f"{name}({crc32(text.encode()):08x})"


_LONGEST = 60
"""The number of characters of the longest derived identity: of a longer one, it has a checksum."""


def with_identity(handle: Any, x: Any) -> Any:
    """Returns ``handle``, a handle on the value that the tensor ``x`` has now, with the identity of ``x``."""
    if identity := identity_of(x):
        handle._identity = identity
    return handle


def _is_of_call(identity: Identity) -> bool:
    """Whether an identity is the number of a call, or of one of its results."""
    return type(identity) is int or identity[:1].isdigit()  # type: ignore[index]


def _after_writes(identity: Identity, x: Any) -> Identity:
    state = x._write_state
    return f"{identity} after {state.version} writes" if identity and state and state.version else identity
