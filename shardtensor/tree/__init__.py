"""Functions of pytrees, with the names and the rules of `jax.tree`: None is a tree without leaves, and the entries of a
dict are visited in the order of their keys. `shardtensor.register_pytree_node` makes the objects of a class pytrees.

In other functions of the package, such as `shardtensor.device_put`, None is a leaf that stays None.

>>> st.tree.map(lambda x: 2 * x, {"w": [1, 2], "b": None})
{'w': [2, 4], 'b': None}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from shardtensor.errors import ArgumentError
from shardtensor.hints import missing
from shardtensor.tensor import pytree

if TYPE_CHECKING:
    from optree import PyTreeSpec

__all__ = ["flatten", "leaves", "map", "structure", "unflatten"]

_IsLeaf = Callable[[Any], bool] | None


def flatten(tree: Any, is_leaf: _IsLeaf = None) -> tuple[list[Any], PyTreeSpec]:
    """Returns the leaves of a tree, from left to right, and its structure.

    Args:
        tree: the tree.
        is_leaf: a function that returns whether a subtree is a leaf.

    >>> leaves, structure = st.tree.flatten({"b": 1, "a": (2, None)})
    >>> leaves, st.tree.unflatten(structure, [3, 4])
    ([2, 1], {'b': 4, 'a': (3, None)})
    """
    return pytree.flattened(tree, is_leaf, none_is_leaf=False)


def leaves(tree: Any, is_leaf: _IsLeaf = None) -> list[Any]:
    """Returns the leaves of a tree, from left to right; see `flatten`.

    >>> st.tree.leaves({"b": 1, "a": (2, None)})
    [2, 1]
    """
    return flatten(tree, is_leaf)[0]


def structure(tree: Any, is_leaf: _IsLeaf = None) -> PyTreeSpec:
    """Returns the structure of a tree, which can be compared, hashed and given to `unflatten`; see `flatten`.

    >>> st.tree.structure({"a": 1}) == st.tree.structure({"a": "text"})
    True
    """
    return flatten(tree, is_leaf)[1]


def unflatten(treedef: PyTreeSpec, leaves: Iterable[Any]) -> Any:
    """Returns the tree of a structure with these leaves.

    Raises:
        ArgumentError: there are more or fewer leaves than the structure has.

    >>> st.tree.unflatten(st.tree.structure([0, 0]), "ab")
    ['a', 'b']
    """
    items = list(leaves)
    if len(items) != treedef.num_leaves:
        raise ArgumentError(f"tree.unflatten: there are {len(items)} leaves; wanted {treedef.num_leaves}")
    return treedef.unflatten(items)


def map(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: _IsLeaf = None) -> Any:
    """Returns a tree of the same structure with ``f`` applied to every leaf, from left to right.

    Args:
        f: a function of a leaf, and of those at its place in the other trees.
        tree: the tree.
        rest: other trees of the same structure; a leaf of ``tree`` may have a whole subtree at its place there.
        is_leaf: see `flatten`.

    Raises:
        ArgumentError: another tree has not the structure of the first.

    >>> st.tree.map(lambda w, g: w - g, {"w": st.ones(2)}, {"w": st.arange(2)})["w"].tolist()
    [1.0, 0.0]
    """
    first, treedef = flatten(tree, is_leaf)
    try:
        others = [treedef.flatten_up_to(other) for other in rest]
    except ValueError as error:
        raise ArgumentError(f"tree.map: the trees have different structures: {error}") from None
    # optree does not call `f` itself: a program may be suspended in it, with no frame of C++ on its stack.
    return treedef.unflatten([f(*of_place) for of_place in zip(first, *others, strict=True)])


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise missing(__name__, name)
