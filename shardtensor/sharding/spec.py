"""`PartitionSpec`: the mesh axes that split each dimension of an array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from shardtensor.errors import ArgumentTypeError, ShardingError

Chain: TypeAlias = tuple[str, ...]
"""The mesh axes that split one dimension, major first."""


class PartitionSpec:
    """The mesh axes that split each dimension of an array; `P` is short for it.

    Args:
        parts: for each dimension None (not split), the name of a mesh axis, or a tuple of names, major first.
            Dimensions without a part are not split.

    Raises:
        ArgumentTypeError: a part is anything else.
        ShardingError: an axis occurs twice.

    Specs that split alike are equal: a trailing None is ignored, and so is the tuple around a single name.

    >>> st.P("x", None) == st.P("x") == st.P(("x",))
    True
    """

    __slots__ = ("_hash", "chains")

    def __init__(self, *parts: str | Sequence[str] | None) -> None:
        chains = [_chain(part) for part in parts]
        while chains and not chains[-1]:
            chains.pop()
        named = [axis for chain in chains for axis in chain]
        for axis in named:
            if named.count(axis) > 1:
                raise ShardingError(f"P: axis {axis!r} occurs twice in {parts}; an axis splits one dimension at most")
        self.chains: tuple[Chain, ...] = tuple(chains)
        self._hash = hash(self.chains)

    def chains_of(self, ndim: int) -> tuple[Chain, ...]:
        """Returns the mesh axes that split each of ``ndim`` dimensions."""
        return self.chains + ((),) * (ndim - len(self.chains))

    def __len__(self) -> int:
        return len(self.chains)

    def __iter__(self) -> Iterator[str | Chain | None]:
        return iter([None if not c else c[0] if len(c) == 1 else c for c in self.chains])

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartitionSpec) and self.chains == other.chains

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return PartitionSpec, self.chains

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"


P = PartitionSpec


def _chain(part: object) -> Chain:
    if part is None:
        return ()
    names = (part,) if isinstance(part, str) else part
    if not isinstance(names, (tuple, list)) or not all(isinstance(n, str) for n in names):
        raise ArgumentTypeError(
            f"P: {part!r} is a {type(part).__name__}; wanted None, an axis name or a tuple of names"
        )
    return tuple(names)
