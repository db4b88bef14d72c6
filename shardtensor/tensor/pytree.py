"""Pytrees: nested dicts, lists, tuples and named tuples; every other object is a leaf.

The entries of a dict are visited in the order of their keys, not of their insertion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shardtensor.errors import ArgumentError

Form = Any
"""The structure of a tree without its leaves; forms can be compared with ``==``."""


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Returns a tree of the same structure with ``fn`` applied to every leaf, from left to right."""
    kind = type(tree)
    if kind is dict:
        made = {key: map_leaves(fn, tree[key]) for key in _keys(tree)}
        return {key: made[key] for key in tree}
    if kind is list or kind is tuple:
        return kind([map_leaves(fn, item) for item in tree])
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return kind(*[map_leaves(fn, item) for item in tree])
    return fn(tree)


def leaves(tree: Any) -> list[Any]:
    """Returns the leaves of a tree, from left to right."""
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found


def form_of(tree: Any) -> Form:
    """Returns the structure of a tree: the same containers with None at each leaf."""
    return map_leaves(lambda leaf: None, tree)


def replaced(tree: Any, new: Iterable[Any]) -> Any:
    """Returns a tree of the same structure with the leaves ``new``, from left to right."""
    rest = iter(new)
    return map_leaves(lambda leaf: next(rest), tree)


def items_of(tree: Any) -> list[tuple[str, Any]] | None:
    """Returns the entries of the outermost container, each with its access path as in Python; None for a leaf."""
    if type(tree) is dict:
        return [(f"[{key!r}]", tree[key]) for key in _keys(tree)]
    if type(tree) in (list, tuple):
        return [(f"[{i}]", item) for i, item in enumerate(tree)]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", item) for name, item in zip(tree._fields, tree, strict=True)]
    return None


def _keys(tree: dict[Any, Any]) -> list[Any]:
    try:
        return sorted(tree)
    except TypeError:  # keys of several types cannot be compared
        return sorted(tree, key=lambda key: (type(key).__qualname__, repr(key)))


def paths(tree: Any, root: str = "") -> Iterator[str]:
    """Yields the access path of each leaf, from left to right, as written in Python: ``['w'][0]``."""
    items = items_of(tree)
    if items is None:
        yield root
        return
    for step, item in items:
        yield from paths(item, root + step)


def spread(prefix: Any, tree: Any, what: str, of: str) -> list[Any]:
    """Broadcasts a prefix tree: returns, for each leaf of ``tree``, the leaf of ``prefix`` that covers it.

    A prefix has the structure of the tree, except that a leaf of it may cover a whole subtree.

    Raises:
        ArgumentError: ``prefix`` is not a prefix of the tree. The message calls the prefix ``what`` and the tree
            ``of``.
    """
    given = items_of(prefix)
    if given is None:
        return [prefix] * len(leaves(tree))
    there = items_of(tree)
    if there is None:
        raise ArgumentError(f"{what} is a {type(prefix).__name__} of {len(given)}, and {of} is a leaf")
    if [step for step, _ in given] != [step for step, _ in there]:
        raise ArgumentError(
            f"{what} has the entries {', '.join(s for s, _ in given) or 'none'}, and {of} has "
            f"{', '.join(s for s, _ in there) or 'none'}; wanted one for each, or one for all"
        )
    found = []
    for (step, p), (_, t) in zip(given, there, strict=True):
        found += spread(p, t, what + step, of + step)
    return found
