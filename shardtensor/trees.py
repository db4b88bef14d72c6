"""Pytrees: nested dicts, lists, tuples and named tuples, whose leaves are everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with ``fn`` applied to every leaf, from left to right."""
    kind = type(tree)
    if kind is dict:
        return {key: map_leaves(fn, value) for key, value in tree.items()}
    if kind is list or kind is tuple:
        return kind([map_leaves(fn, item) for item in tree])
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return kind(*[map_leaves(fn, item) for item in tree])
    return fn(tree)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, from left to right."""
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found
