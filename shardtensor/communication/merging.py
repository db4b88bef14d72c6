"""Merging: arrays on one device are combined along a tree by as few kernels as the backend can make of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from shardtensor.backend.functions import function_of
from shardtensor.backend.protocol import Backend
from shardtensor.communication.all_reduce import Tree, combine

MERGED_AT_ONCE = 32
"""The maximum number of arrays that one kernel combines. A kernel has at most 4 KiB of arguments."""

_ARGUMENT_WORDS = 255
"""The maximum number of words of 16 bytes for the arrays of a kernel, each with one for every dimension and one for its
address and size.
"""


def merged(backend: Backend, ufunc: str, tree: Tree, arrays: Sequence[Any], k: int = 0) -> Any:
    """Combines arrays of one shape and dtype, on the device that is current, along a tree, by a binary ufunc of the
    backend. It has the same bits as `combine`, which calls the ufunc for each merge.

    Args:
        backend: the backend of the arrays.
        ufunc: the name of the ufunc.
        tree: the tree; its result is not a new array where it has only one contributor.
        arrays: the array of each contributor.
        k: the root of the subtree that is combined.
    """
    if (
        ufunc == "multiply" and backend.dtype_of(arrays[k]).kind == "c"
    ):  # Their sums of products are not a kernel: see `fuse`.
        return combine(tree, arrays.__getitem__, function_of(backend, ufunc), k)
    most = max(min(MERGED_AT_ONCE, _ARGUMENT_WORDS // (arrays[k].ndim + 1) - 1), 2)
    members, subtree, rest = _at_once(tree, k, most)
    total = arrays[k]
    if len(members) > 1:
        total = _kernel(backend, ufunc, subtree)(*[arrays[member] for member in members])
    for other in rest:
        total = function_of(backend, ufunc)(total, merged(backend, ufunc, tree, arrays, other))
    return total


@functools.lru_cache(4096)
def _at_once(tree: Tree, k: int, most: int) -> tuple[tuple[int, ...], Tree, tuple[int, ...]]:
    """Returns the contributors that one kernel combines at the root of a subtree, the tree of these, and the roots of
    the subtrees that are to be merged into their result.
    """
    members, children = [k], tree[k]
    for count, other in enumerate(children):
        subtree = _members(tree, other)
        if len(members) + len(subtree) > most:
            children = children[:count]
            break
        members += subtree
    number = {member: n for n, member in enumerate(members)}
    inner = [children if member == k else tree[member] for member in members]
    return tuple(members), tuple([tuple(map(number.__getitem__, row)) for row in inner]), tree[k][len(children) :]


def _members(tree: Tree, k: int) -> tuple[int, ...]:
    """Returns the contributors of a subtree, its root first."""
    return (k, *[member for other in tree[k] for member in _members(tree, other)])


@functools.lru_cache(1024)
def _kernel(backend: Backend, ufunc: str, tree: Tree) -> Callable[..., Any]:
    """Returns the function that combines the arrays of all contributors of a tree."""
    merge = function_of(backend, ufunc)

    def combined(*arrays: Any) -> Any:
        return combine(tree, arrays.__getitem__, merge)

    return backend.fuse(combined)
