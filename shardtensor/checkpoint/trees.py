"""The tree of a checkpoint: containers with the keys of their entries, and leaves with names.

The name of a leaf is the path of its keys, such as ``params/layers/0/w``. It is also the path of its array below the
folder, so that other programs find it there.
"""

from __future__ import annotations

import hashlib
import string
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from shardtensor.errors import ArgumentError, ArgumentTypeError, type_text
from shardtensor.files.metadata import Object, brief
from shardtensor.tensor.pytree import keys_of

L = TypeVar("L")
M = TypeVar("M")

Key = str | int
"""The key of an entry: that of a dict, the index of a list or tuple, the field of an object of a class."""

DEEPEST = 64
"""The containers in each other that a tree has at most."""

_PLAIN = frozenset(string.ascii_letters + string.digits + "-_+=@,.()[]{}!#$^&~ ")
"""The characters of keys that names have as they are: those that every file system accepts."""

_FILES = ("zarr.json", "checkpoint.json")
"""The files that are beside the folders of arrays."""

_LONGEST = 100
"""The characters of a part of a name from which on it has a digest instead of the rest."""


@dataclass(frozen=True)
class Node(Generic[L]):
    """A container.

    Attributes:
        kind: ``"dict"``, ``"list"``, ``"tuple"``, or ``"class"`` for objects of other classes.
        entries: the entries by their keys, each a container or a leaf.
        type_name: the name of the class, where a dict, list or tuple is none of Python's own.
    """

    kind: str
    entries: dict[Key, Node[L] | L]
    type_name: str = ""


# -- trees of Python -------------------------------------------------------------------------------


def tree_of(tree: Any) -> Node[Any] | Any:
    """Returns a pytree as containers, and as leaves whatever else it has.

    Raises:
        ArgumentError: containers are nested too deeply.
        ArgumentTypeError: a key is neither text nor an integer.
    """
    return _tree_of(tree, ())


def _tree_of(tree: Any, path: tuple[Key, ...]) -> Node[Any] | Any:
    items = keys_of(tree)
    if items is None:
        return tree
    if len(path) >= DEEPEST:
        raise ArgumentError(f"tree is nested more than {DEEPEST} levels deep, at {shown(path)}")
    for key, _ in items:
        if type(key) not in (str, int):
            raise ArgumentTypeError(
                f"{shown(path) or 'tree'} has the key {key!r:.60}, {type_text(key)}; wanted text or an integer"
            )
    kind, type_name = _kind_of(tree)
    return Node(kind, {key: _tree_of(child, (*path, key)) for key, child in items}, type_name)


def _kind_of(tree: Any) -> tuple[str, str]:
    kind = type(tree)
    if kind in (dict, list, tuple):
        return kind.__name__, ""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind in (OrderedDict, defaultdict):
        return "dict", name
    return "list" if kind is deque else "class", name


def python_tree(node: Node[Any] | Any) -> Any:
    """Returns the containers as dicts, lists and tuples: objects of classes, and lists that lack items, as dicts."""
    if not isinstance(node, Node):
        return node
    children = {key: python_tree(child) for key, child in node.entries.items()}
    if node.kind in ("list", "tuple") and [*children] == [*range(len(children))]:
        return list(children.values()) if node.kind == "list" else tuple(children.values())
    return children


# -- names -----------------------------------------------------------------------------------------


def shown(path: tuple[Key, ...]) -> str:
    """Returns a path of keys as errors show it: as a name, where no two keys share one."""
    return "/".join(map(_part, path))


def _part(key: Key) -> str:
    """Returns the part of a name for a key, in which ``%`` and two hexadecimal digits stand for a byte of others."""
    text = "".join([c if c in _PLAIN else _escaped(c) for c in str(key)])
    if text.strip(".") == "" or text.startswith("__") or text.casefold() in _FILES or text[-1] in ". ":
        text = f"{text[:-1]}{_escaped(text[-1:])}" if text and not text.startswith("__") else f"%{text}"
    if len(text) > _LONGEST:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        text = f"{text[: _LONGEST - 20].rstrip('%. ')}~{digest}"
    return text


def _escaped(character: str) -> str:
    return "".join([f"%{byte:02X}" for byte in character.encode(errors="surrogatepass")])


def names_of(node: Node[Any] | Any) -> Iterator[tuple[str, tuple[Key, ...], Any]]:
    """Yields the name, the path and the value of each leaf. The name of a tree that is a leaf is ``value``."""
    if not isinstance(node, Node):
        yield "value", (), node
        return
    yield from _names(node, "", ())


def _names(node: Node[Any], prefix: str, path: tuple[Key, ...]) -> Iterator[tuple[str, tuple[Key, ...], Any]]:
    used: set[str] = set()
    for key, child in node.entries.items():
        part, number = _part(key), 1
        # Some file systems do not distinguish cases, and the key 1 of a dict is not "1".
        while (candidate := part if number == 1 else f"{part}~{number}").casefold() in used:
            number += 1
        used.add(candidate.casefold())
        if isinstance(child, Node):
            yield from _names(child, f"{prefix}{candidate}/", (*path, key))
        else:
            yield f"{prefix}{candidate}", (*path, key), child


def mapped(node: Node[L] | L, function: Callable[[str, L], M]) -> Node[M] | M:
    """Returns a tree with ``function(name, leaf)`` in place of each leaf, called from left to right."""
    values = iter([function(name, leaf) for name, _, leaf in names_of(node)])
    return _rebuilt(node, values)


def _rebuilt(node: Node[L] | L, values: Iterator[M]) -> Node[M] | M:
    if not isinstance(node, Node):
        return next(values)
    return Node(node.kind, {key: _rebuilt(child, values) for key, child in node.entries.items()}, node.type_name)


# -- JSON ------------------------------------------------------------------------------------------


def tree_to_json(node: Node[Object] | Object) -> Object:
    """Returns an object of JSON for a tree whose leaves are objects of JSON."""
    if not isinstance(node, Node):
        return node
    content: Object = {node.kind: [[key, tree_to_json(child)] for key, child in node.entries.items()]}
    return {**content, "type": node.type_name} if node.type_name else content


def tree_from_json(content: Any, name: str, is_leaf: Callable[[Object], bool]) -> Node[Object] | Object:
    """Returns the tree of an object of JSON.

    Args:
        content: the object.
        name: the name of the file, for errors.
        is_leaf: whether an object has the form of a leaf.

    Raises:
        ArgumentError: it is broken, or nested too deeply.
    """
    return _from_json(content, name, is_leaf, 0)


def _from_json(content: Any, name: str, is_leaf: Callable[[Object], bool], depth: int) -> Node[Object] | Object:
    if isinstance(content, dict) and is_leaf(content):
        return content
    kinds = [kind for kind in ("dict", "list", "tuple", "class") if isinstance(content, dict) and kind in content]
    if len(kinds) != 1 or depth > DEEPEST or not {*content} <= {kinds[0], "type"}:
        raise ArgumentError(f"{name} is broken: its tree has {brief(content)}, nested {depth} levels deep")
    (kind,) = kinds
    rows, type_name = content[kind], content.get("type", "")
    pairs = isinstance(rows, list) and all(isinstance(r, list) and len(r) == 2 for r in rows)
    if not pairs or not isinstance(type_name, str) or not all(type(key) in (str, int) for key, _ in rows):
        raise ArgumentError(f"{name} is broken: the entries of a {kind} in its tree are {brief(rows)}")
    entries = {key: _from_json(child, name, is_leaf, depth + 1) for key, child in rows}
    is_sequence = kind in ("list", "tuple")
    if len(entries) != len(rows) or (is_sequence and [*entries] != [*range(len(rows))]):
        raise ArgumentError(f"{name} is broken: the keys of a {kind} in its tree are {brief([*entries])}")
    return Node(kind, entries, type_name)


# -- selections ------------------------------------------------------------------------------------


def selected(node: Node[L] | L, only: Collection[str]) -> Node[L] | L:
    """Returns a tree with the leaves that have one of the names, or begin with one and ``/``.

    Raises:
        ArgumentError: no leaf has a name.
    """
    names = {name: path for name, path, _ in names_of(node)}
    keep: set[tuple[Key, ...]] = set()
    for one in (name.rstrip("/") for name in only):
        below = {path for name, path in names.items() if name == one or name.startswith(f"{one}/")}
        if not below:
            raise ArgumentError(f"only: no leaf has the name {one!r:.80}, or begins with it{_known(names)}")
        keep |= below
    return _pruned(node, keep, ()) if isinstance(node, Node) else node


def _known(names: Mapping[str, Any]) -> str:
    few = ", ".join(list(names)[:8])
    return f"; the checkpoint has {few or 'none'}{', ...' if len(names) > 8 else ''}"


def _pruned(node: Node[L], keep: Collection[tuple[Key, ...]], path: tuple[Key, ...]) -> Node[L]:
    entries: dict[Key, Node[L] | L] = {}
    for key, child in node.entries.items():
        here = (*path, key)
        if not isinstance(child, Node):
            if here in keep:
                entries[key] = child
        elif (part := _pruned(child, keep, here)).entries:
            entries[key] = part
    return Node(node.kind, entries, node.type_name)


def renamed(node: Node[L] | L, rename: Mapping[str, str]) -> Node[L] | L:
    """Returns a tree in which leaves, or all that begin with a name and ``/``, have other names. The parts of a new
    name are keys of dicts, or of the containers that exist there.

    Raises:
        ArgumentError: no leaf has an old name, or something has the new one.
    """
    if not rename:
        return node
    if not isinstance(node, Node):
        raise ArgumentError("rename: the checkpoint is one leaf, whose name has no meaning")
    names = [(name, path) for name, path, _ in names_of(node)]
    moves = []
    for old, new in rename.items():
        path = next((path for name, path in names if name == old or name.startswith(f"{old}/")), None)
        if path is None or not new:
            raise ArgumentError(
                f"rename: {old!r:.80} to {new!r:.80}: no leaf has the old name, or begins with it{_known(dict(names))}"
            )
        moves.append((path[: old.count("/") + 1], tuple(new.split("/"))))
    moved = []
    for path, target in moves:
        node, child = _without(node, path)
        moved.append((target, child))
    for target, child in moved:
        node = _with(node, target, child)
    return node


def _without(node: Node[L], path: tuple[Key, ...]) -> tuple[Node[L], Node[L] | L]:
    """Returns a tree without what is at a path, and without containers that are then empty, and what was there."""
    key, entries = path[0], dict(node.entries)
    child = entries.get(key)
    if child is None:
        raise ArgumentError(f"rename: {shown(path)} is in another name that is changed")
    if len(path) == 1:
        taken = entries.pop(key)
    else:
        assert isinstance(child, Node)
        rest, taken = _without(child, path[1:])
        entries[key] = rest
        if not rest.entries:
            del entries[key]
    return Node(node.kind, entries, node.type_name), taken


def _with(node: Node[L], path: tuple[str, ...], child: Node[L] | L) -> Node[L]:
    known = {_part(key): key for key in node.entries}
    is_index = node.kind in ("list", "tuple") and path[0].isascii() and path[0].isdigit() and len(path[0]) < 10
    key: Key = known.get(path[0], int(path[0]) if is_index else path[0])
    before = node.entries.get(key)
    if len(path) == 1:
        if before is not None:
            raise ArgumentError(f"rename: {path[0]!r:.80} is the name of something else, too")
        after = child
    else:
        if before is not None and not isinstance(before, Node):
            raise ArgumentError(f"rename: {path[0]!r:.80} is a leaf, and no container")
        after = _with(before or Node("dict", {}), path[1:], child)
    return Node(node.kind, {**node.entries, key: after}, node.type_name)
