"""`PartitionSpec`: the mesh axes that split each dimension of an array."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

from shardtensor.errors import ArgumentTypeError, ShardingError, type_text
from shardtensor.hints import explains_attributes

Chain: TypeAlias = tuple[str, ...]
"""The mesh axes that split one dimension, major first."""


@explains_attributes
class PartitionSpec:
    """The mesh axes that split each dimension of an array; `P` is short for it.

    Args:
        parts: for each dimension None (not split), the name of a mesh axis, or a tuple of names, major first.
            Dimensions without a part are not split.
        unreduced: mesh axes along which the devices hold partial sums: the array is the sum of them.
        reduced: mesh axes along which the devices hold the same elements, as without it, and along which gradients of
            the array are unreduced: they are partial sums, and the caller adds them. The gradient of an array that is
            unreduced is in turn reduced. The result of an operator is reduced where all of its operands are.

    Raises:
        ArgumentTypeError: a part is anything else, or ``unreduced`` or ``reduced`` is not a collection of names.
        ShardingError: an axis occurs twice.

    Specs that split alike are equal: a trailing None is ignored, and so is the tuple around a single name.

    >>> st.P("x", None) == st.P("x") == st.P(("x",))
    True
    >>> st.P("x", unreduced={"y"}), st.P(None, reduced={"x"})
    (P('x', unreduced={'y'}), P(reduced={'x'}))
    """

    __slots__ = ("_hash", "chains", "reduced", "unreduced")

    def __init__(
        self,
        *parts: str | Sequence[str] | None,
        unreduced: Collection[str] = (),
        reduced: Collection[str] = (),
    ) -> None:
        chains = [_chain(part) for part in parts]
        while chains and not chains[-1]:
            chains.pop()
        named = [axis for chain in chains for axis in chain]
        for axis in named:
            if named.count(axis) > 1:
                raise ShardingError(f"P: axis {axis!r} occurs twice in {parts}; an axis splits one dimension at most")
        self.chains: tuple[Chain, ...] = tuple(chains)
        self.unreduced = _names(unreduced, "unreduced")
        self.reduced = _names(reduced, "reduced")
        for what, names in (("unreduced", self.unreduced), ("reduced", self.reduced)):
            for axis in sorted(names.intersection(named)):
                raise ShardingError(
                    f"P: axis {axis!r} splits a dimension in {parts} and is among {what}={set(names)}; an axis that "
                    "splits a dimension is neither unreduced nor reduced"
                )
        for axis in sorted(self.unreduced & self.reduced):
            raise ShardingError(
                f"P: axis {axis!r} is among unreduced={set(self.unreduced)} and reduced={set(self.reduced)}; the "
                "devices along it hold partial sums, or the same elements"
            )
        self._hash = hash((self.chains, self.unreduced, self.reduced))

    def chains_of(self, ndim: int) -> tuple[Chain, ...]:
        """Returns the mesh axes that split each of ``ndim`` dimensions."""
        return self.chains + ((),) * (ndim - len(self.chains))

    @property
    def axes(self) -> Chain:
        """The mesh axes that the spec names: those that split dimensions, then those that are unreduced or reduced."""
        return (*[axis for chain in self.chains for axis in chain], *sorted(self.unreduced), *sorted(self.reduced))

    def with_chains(self, chains: Sequence[Chain]) -> PartitionSpec:
        """Returns the spec of an array that these mesh axes split; it is unreduced and reduced along the same ones."""
        return PartitionSpec(*chains, unreduced=self.unreduced, reduced=self.reduced)

    @property
    def of_cotangent(self) -> PartitionSpec:
        """The spec of the gradient of an array in this layout: what is reduced becomes unreduced, and vice versa."""
        if not self.unreduced and not self.reduced:
            return self
        return PartitionSpec(*self.chains, unreduced=self.reduced, reduced=self.unreduced)

    def __len__(self) -> int:
        return len(self.chains)

    def __iter__(self) -> Iterator[str | Chain | None]:
        return iter([None if not c else c[0] if len(c) == 1 else c for c in self.chains])

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PartitionSpec)
            and self.chains == other.chains
            and self.unreduced == other.unreduced
            and self.reduced == other.reduced
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.chains, tuple(sorted(self.unreduced)), tuple(sorted(self.reduced)))

    def __repr__(self) -> str:
        parts = list(map(repr, self))
        for what, names in (("unreduced", self.unreduced), ("reduced", self.reduced)):
            if names:
                parts.append(f"{what}={{{', '.join(map(repr, sorted(names)))}}}")
        return f"P({', '.join(parts)})"


P = PartitionSpec


def _rebuild(chains: Sequence[Chain], unreduced: Chain, reduced: Chain = ()) -> PartitionSpec:
    return PartitionSpec(*chains, unreduced=unreduced, reduced=reduced)


def _names(names: object, what: str) -> frozenset[str]:
    if not isinstance(names, (set, frozenset, tuple, list)) or not all(isinstance(n, str) for n in names):
        raise ArgumentTypeError(f"P: {what} is {names!r}; wanted a set of axis names, such as {{'x'}}")
    return frozenset(names)


def _chain(part: object) -> Chain:
    if part is None:
        return ()
    names = (part,) if isinstance(part, str) else part
    if not isinstance(names, (tuple, list)) or not all(isinstance(n, str) for n in names):
        raise ArgumentTypeError(f"P: {part!r} is {type_text(part)}; wanted None, an axis name or a tuple of names")
    return tuple(names)
