"""Pytrees: nested dicts, lists, tuples, named tuples, OrderedDicts, defaultdicts, deques and objects of registered
classes, by the library `optree`. Every other object, None included, is a leaf.

The entries of a dict are visited in the order of their keys, not of their insertion; those of an OrderedDict in its
order. optree is imported on first use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShardTensorError, type_text
from shardtensor.sharding.layout import NamedSharding, SingleDeviceSharding
from shardtensor.sharding.mesh import Mesh
from shardtensor.sharding.spec import PartitionSpec

if TYPE_CHECKING:
    from optree import PyTreeSpec

T = TypeVar("T")

_NAMESPACE = "shardtensor"
"""The namespace of optree in which classes are registered, so that those that other libraries register for themselves
stay leaves here. Classes that are registered globally are pytrees here, too.
"""


def register_pytree_node(
    nodetype: type[T],
    flatten_func: Callable[[T], tuple[Iterable[Any], Any]],
    unflatten_func: Callable[[Any, Any], T],
) -> None:
    """Registers a class, so that its objects are pytrees: maps, collectives, `device_put`, `eval_shape` and `simulate`
    find the arrays in them. Arguments are those of `jax.tree_util.register_pytree_node`.

    Args:
        nodetype: the class. Objects of its subclasses stay leaves.
        flatten_func: returns the children of an object, and the rest of it, which must be hashable and comparable.
        unflatten_func: creates an object from that rest and a tuple of children. The children may be of any type.

    Raises:
        ArgumentTypeError: ``nodetype`` is not a class, or one of the functions is not callable.
        ArgumentError: the class is registered already.

    >>> class Point:
    ...     def __init__(self, x, y):
    ...         self.x, self.y = x, y
    >>> st.register_pytree_node(Point, lambda p: ((p.x, p.y), None), lambda _, children: Point(*children))
    >>> st.device_put(Point(np.arange(2), 3.5), st.devices()[1]).x.device
    Device('numpy:1')
    """
    if not isinstance(nodetype, type):
        raise ArgumentTypeError(f"register_pytree_node: nodetype is {type_text(nodetype)}; wanted a class")
    for name, function in (("flatten_func", flatten_func), ("unflatten_func", unflatten_func)):
        if not callable(function):
            raise ArgumentTypeError(f"register_pytree_node: {name} is {type_text(function)}; wanted a function")
    import optree  # It takes 10 ms, and programs without pytrees do not need it.

    register: Any = optree.register_pytree_node  # Its annotations require a class of collections.
    try:
        register(nodetype, flatten_func, unflatten_func, namespace=_NAMESPACE)
    except ValueError as error:
        raise ArgumentError(f"register_pytree_node: {nodetype.__name__} is a pytree already ({error})") from None


def hint_to_register(x: object) -> str:
    """Returns the end of an error message about a leaf that is not an array: how to make the objects of its class
    pytrees. It is empty unless the object is one of a dataclass or of an attrs class, whose fields may be arrays.
    """
    kind = type(x)
    if hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__attrs_attrs__"):
        return f"; {kind.__name__} is not registered as a pytree: see st.register_pytree_node"
    return ""


LEAF_TYPES: set[type] = {
    np.ndarray, bool, int, float, complex, str, bytes, type(None),
    Device, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding,
}  # fmt: skip
"""Types of common leaves, for which optree is not needed: it cannot be imported while the interpreter shuts down."""


def flattened(tree: Any, is_leaf: Callable[[Any], bool] | None, *, none_is_leaf: bool) -> tuple[list[Any], PyTreeSpec]:
    """Returns the leaves of a tree, from left to right, and its structure.

    Args:
        tree: the tree.
        is_leaf: a function that returns whether a subtree is a leaf.
        none_is_leaf: whether None is a leaf, or a tree without leaves.
    """
    import optree  # See above.

    return optree.tree_flatten(tree, is_leaf, none_is_leaf=none_is_leaf, namespace=_NAMESPACE)


def _flat(tree: Any) -> tuple[list[Any], PyTreeSpec]:
    return flattened(tree, None, none_is_leaf=True)


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Returns a tree of the same structure with ``fn`` applied to every leaf, from left to right."""
    if type(tree) in LEAF_TYPES:
        return fn(tree)
    leaf_list, spec = _flat(tree)
    # optree does not call `fn` itself: a program may be suspended in it, with no frame of C++ on its stack.
    return spec.unflatten([fn(leaf) for leaf in leaf_list])


def map_items(function: Callable[[Any], Any], x: Any) -> Any:
    """Applies a function to the items of nested lists, tuples and named tuples."""
    if type(x) in (list, tuple):
        return type(x)([map_items(function, item) for item in x])
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*[map_items(function, item) for item in x])
    return function(x)


def leaves(tree: Any) -> list[Any]:
    """Returns the leaves of a tree, from left to right."""
    if type(tree) in LEAF_TYPES:
        return [tree]
    # A list of leaves, such as one of shards, takes no call of optree.
    return list(tree) if type(tree) is list and LEAF_TYPES.issuperset(map(type, tree)) else _flat(tree)[0]


class Form:
    """The structure of a tree without its leaves; forms can be compared with ``==``."""

    __slots__ = ("_spec",)

    def __init__(self, spec: PyTreeSpec) -> None:
        self._spec = spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and self._spec == other._spec

    def __hash__(self) -> int:
        return hash(self._spec)

    def __repr__(self) -> str:
        return str(self._spec).removeprefix("PyTreeSpec(").partition(", NoneIsLeaf")[0]


def form_of(tree: Any) -> Form | None:
    """Returns the structure of a tree; None for a leaf."""
    if type(tree) in LEAF_TYPES:
        return None
    spec = _flat(tree)[1]
    return None if spec.is_leaf() else Form(spec)


def replaced(tree: Any, new: Iterable[Any]) -> Any:
    """Returns a tree of the same structure with the leaves ``new``, from left to right."""
    if type(tree) in LEAF_TYPES:
        (leaf,) = new
        return leaf
    return _flat(tree)[1].unflatten(new)


def children_of(tree: Any) -> Sequence[Any] | None:
    """Returns the entries of the outermost container; None for a leaf."""
    if type(tree) in (list, tuple):
        return tree  # type: ignore[no-any-return]
    children, spec = _one_level(tree)
    return None if spec is None else children


def items_of(tree: Any) -> list[tuple[str, Any]] | None:
    """Returns the entries of the outermost container, each with its access path as in Python; None for a leaf."""
    children, spec = _one_level(tree)
    if spec is None:
        return None
    return list(zip([accessor.codify("") for accessor in spec.accessors()], children, strict=True))


def keys_of(tree: Any) -> list[tuple[Any, Any]] | None:
    """Returns the entries of the outermost container, each with its key; None for a leaf.

    The key is that of a dict, the index of a list, the field of a named tuple, and of an object of a registered class
    the field that has the child. It is the number of the child if no field has it, or if the class refuses to be made
    of children of any type.
    """
    children, spec = _one_level(tree)
    if spec is None:
        return None
    keys: list[Any] = spec.entries()
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        keys = list(tree._fields)
    elif not isinstance(tree, (dict, list, tuple, deque)):
        owners = _owners(spec, len(children))
        keys = [owners.get(number, number) for number in range(len(children))]
    return list(zip(keys, children, strict=True))


def _owners(spec: PyTreeSpec, count: int) -> dict[int, str]:
    """Returns the names of the fields that have the children of an object, by their numbers.

    An object with other children shows them: of the object itself, several fields may have the same child, such as
    None, and fields in another order would be taken for each other.
    """
    marks = [object() for _ in range(count)]
    try:
        marked = spec.unflatten(marks)
    except Exception:  # Of any kind: the class accepts only some children.
        return {}
    numbers, owners = {id(mark): number for number, mark in enumerate(marks)}, dict[int, str]()
    for name in _fields_of(marked):
        if (number := numbers.get(id(getattr(marked, name, None)))) is not None:
            owners.setdefault(number, name)
    return owners


def _fields_of(x: Any) -> list[str]:
    """Returns the names of the fields of a dataclass, an attrs class or an ordinary object."""
    declared = getattr(x, "__dataclass_fields__", None) or [a.name for a in getattr(x, "__attrs_attrs__", ())]
    return list(declared or getattr(x, "__dict__", ()))


def _one_level(tree: Any) -> tuple[list[Any], PyTreeSpec | None]:
    """Returns the entries of the outermost container and its structure, which is None for a leaf."""
    if type(tree) in LEAF_TYPES:
        return [tree], None
    import optree  # See above.

    children, spec = optree.tree_flatten(tree, lambda node: node is not tree, none_is_leaf=True, namespace=_NAMESPACE)
    return children, None if spec.is_leaf() else spec


def paths(tree: Any, root: str = "") -> Sequence[str]:
    """Returns the access path of each leaf, from left to right, as written in Python: ``['w'][0]``."""
    if type(tree) in LEAF_TYPES:
        return [root]
    spec = _flat(tree)[1]
    return [root] if spec.is_leaf() else [accessor.codify(root) for accessor in spec.accessors()]


def spread(prefix: Any, tree: Any, what: str, of: str) -> list[Any]:
    """Broadcasts a prefix tree: returns, for each leaf of ``tree``, the leaf of ``prefix`` that covers it.

    A prefix has the structure of the tree, except that a leaf of it may cover a whole subtree.

    Raises:
        ArgumentError: ``prefix`` is not a prefix of the tree. The message calls the prefix ``what`` and the tree
            ``of``.
    """
    if type(prefix) in LEAF_TYPES or (entries := items_of(prefix)) is None:
        return [prefix] * (1 if type(tree) in LEAF_TYPES else len(leaves(tree)))
    there = items_of(tree)
    if there is None:
        raise ArgumentError(f"{what} is {type_text(prefix)} of {len(entries)}, and {of} is a leaf")
    covering = dict(entries)
    if covering.keys() != dict(there).keys():
        raise ArgumentError(
            f"{what} has the entries {', '.join(s for s, _ in entries) or 'none'}, and {of} has "
            f"{', '.join(s for s, _ in there) or 'none'}; wanted one for each, or one for all"
        )
    return [leaf for step, t in there for leaf in spread(covering[step], t, what + step, of + step)]


def map_with_prefix(fn: Callable[[Any, Any], T], tree: Any, prefix: Any, caller: str, what: str, of: str) -> list[T]:
    """Returns ``fn(leaf, covering)`` for each leaf of a tree, from left to right, and the leaf of ``prefix`` that
    covers it, as `spread` finds it.

    Errors begin with the name ``caller``, and those of ``fn`` have the path of the leaf after it.

    Raises:
        ArgumentError: ``prefix`` is not a prefix of the tree. The message calls the prefix ``what`` and the tree
            ``of``.
    """
    results = []
    covering = spread(prefix, tree, f"{caller}: {what}", of)
    for path, leaf, one in zip(paths(tree, of), leaves(tree), covering, strict=True):
        try:
            results.append(fn(leaf, one))
        except ShardTensorError as error:
            if path == of:
                raise
            raise type(error)(f"{caller}: {path}: {str(error).removeprefix(f'{caller}: ')}") from None
    return results
