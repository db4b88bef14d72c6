"""Pytrees: which containers they are, in which order their leaves are visited, and what maps do with them."""

from __future__ import annotations

import collections
import dataclasses
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest

import shardtensor as st
from shardtensor.tensor.pytree import form_of, items_of, leaves, map_leaves, paths, replaced, spread
from tests.layouts import mesh_of
from tests.scripts import new_process, output_of


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Plain:
    array: Any


@attrs.define
class WithAttrs:
    array: Any


@dataclasses.dataclass(eq=False)
class Registered:
    array: Any
    name: str = ""


st.register_pytree_node(Registered, lambda r: ((r.array,), r.name), lambda name, children: Registered(*children, name))

TREES: dict[str, tuple[Any, list[Any], list[str]]] = {
    "leaf": (1, [1], ["t"]),
    "None": (None, [None], ["t"]),
    "text": ("ab", ["ab"], ["t"]),
    "dict": ({"b": 1, "a": 2}, [2, 1], ["t['a']", "t['b']"]),
    "dict of several types": ({"b": 1, 3: 2}, [2, 1], ["t[3]", "t['b']"]),
    "OrderedDict": (OrderedDict(b=1, a=2), [1, 2], ["t['b']", "t['a']"]),
    "defaultdict": (defaultdict(list, {"b": 1, "a": [2]}), [2, 1], ["t['a'][0]", "t['b']"]),
    "list": ([1, (2, None)], [1, 2, None], ["t[0]", "t[1][0]", "t[1][1]"]),
    "list of leaves": ([1, None, "a"], [1, None, "a"], ["t[0]", "t[1]", "t[2]"]),
    "named tuple": (Pair(1, [2]), [1, 2], ["t.first", "t.second[0]"]),
    "deque": (deque([1, 2]), [1, 2], ["t[0]", "t[1]"]),
    "empty": ([{}, ()], [], []),
}


@pytest.mark.parametrize("name", TREES)
def test_containers(name: str) -> None:
    tree, found, where = TREES[name]
    assert leaves(tree) == found
    assert list(paths(tree, "t")) == where
    doubled = map_leaves(lambda leaf: (leaf, leaf), tree)
    assert type(doubled) is type((tree, tree) if name in ("leaf", "None", "text") else tree)
    assert replaced(tree, found) == tree
    assert form_of(tree) == form_of(replaced(tree, [None] * len(found)))
    if isinstance(tree, dict):
        assert list(doubled) == list(tree)
        assert getattr(doubled, "default_factory", None) is getattr(tree, "default_factory", None)


def test_forms() -> None:
    assert form_of(3) is None
    assert form_of({"a": 1, "b": 2}) == form_of({"b": 3, "a": 4})
    assert form_of(OrderedDict(a=1)) != form_of({"a": 1})
    assert hash(form_of([1])) == hash(form_of([2]))
    assert repr(form_of([1, {"a": None}])) == "[*, {'a': *}]"


def test_prefixes() -> None:
    tree = {"w": [1, 2], "b": OrderedDict(y=3, x=4)}
    assert leaves(tree) == [3, 4, 1, 2]
    assert spread(0, tree, "axes", "x") == [0] * 4
    assert spread({"b": {"x": 5, "y": 6}, "w": 7}, tree, "axes", "x") == [6, 5, 7, 7]
    assert items_of(3) is None
    with pytest.raises(
        st.ArgumentError, match=r"axes\['b'\] has the entries \['x'\], and x\['b'\] has \['y'\], \['x'\]"
    ):
        spread({"b": {"x": 5}, "w": 7}, tree, "axes", "x")
    with pytest.raises(st.ArgumentError, match=r"axes\['w'\] is a list of 1, and x\['w'\] is a leaf"):
        spread({"w": [1]}, {"w": 1}, "axes", "x")


MAKERS = {
    "OrderedDict": lambda x: OrderedDict(k=x),
    "defaultdict": lambda x: defaultdict(list, k=x),
    "named tuple": lambda x: Pair(x, 1),
    "registered": lambda x: Registered(x, "a name"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_maps_find_the_arrays_in(name: str, backend: str) -> None:
    """They pass no array of the caller's, to which every device could write."""
    mesh, mine = mesh_of((4,), backend), np.arange(4.0)
    make = MAKERS[name]

    def f(tree: Any, x: Any) -> Any:
        (array, *_) = leaves(tree)
        assert type(array) is type(x)
        if isinstance(array, np.ndarray):
            assert array is not mine
            assert not array.flags.writeable
        return map_leaves(lambda leaf: leaf * 2, tree)

    found = st.pmap(f, make(mine), st.shard(np.arange(4.0), devices=mesh))
    assert [type(tree) for tree in found] == [type(make(0))] * 4
    assert all(np.array_equal(leaves(tree)[0], mine * 2) for tree in found)
    assert {leaves(tree)[0].device for tree in found} == set(mesh.flat)
    placed = st.device_put(MAKERS[name](mine), mesh)
    assert leaves(placed)[0].sharding == st.NamedSharding(mesh, st.P("x"))
    summed = st.shard_map(lambda tree: st.psum(tree, "x"), mesh=mesh, in_specs=st.P("x"), out_specs=st.P())(
        make(mine) if name != "named tuple" else Pair(mine, mine)
    )
    assert type(summed) is type(make(0))
    assert leaves(summed)[0].tolist() == [6.0]
    shapes = st.eval_shape(lambda tree: map_leaves(lambda leaf: leaf + 1, tree), placed)
    assert leaves(shapes)[0].shape == (4,)


def test_subclasses_of_registered_classes_and_unregistered_ones_are_leaves() -> None:
    class Child(Registered):
        pass

    for x in (Child(1), Plain(1), WithAttrs(1), collections.Counter("ab")):
        assert leaves(x) == [x]


@pytest.mark.parametrize("kind", [Plain, WithAttrs])
def test_errors_about_a_leaf_say_how_to_register_its_class(kind: Any, backend: str) -> None:
    mesh = mesh_of((2,), backend)
    x = st.device_put(np.arange(2.0), mesh)
    calls = {
        "device_put": lambda: st.device_put(kind(np.ones(2)), mesh),
        "asarray": lambda: st.asarray(kind(1)),
        "add": lambda: st.add(x, kind(1)),
        "pmap of arrays": lambda: st.pmap(lambda p: p, kind(np.ones(2)), devices=mesh),
        "a result of pmap": lambda: st.pmap(kind, x),
        "shard_map": lambda: st.shard_map(lambda p: p, mesh=mesh, in_specs=st.P("x"), out_specs=st.P())(kind(x)),
        "a result of shard_map": lambda: st.shard_map(kind, mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))(x),
        "smap": lambda: st.smap(kind, x),
        "psum": lambda: st.pmap(lambda p: st.psum(kind(p), "i"), x, axis_name="i"),
    }
    for name, call in calls.items():
        with pytest.raises(st.ArgumentTypeError) as caught:
            call()
        text = f"{kind.__name__} is not registered as a pytree: see st.register_pytree_node"
        assert text in str(caught.value), (name, str(caught.value))


def test_classes_that_cannot_be_registered() -> None:
    with pytest.raises(st.ArgumentError, match="register_pytree_node: Registered is a pytree already"):
        st.register_pytree_node(Registered, lambda r: ((r.array,), None), lambda _, c: Registered(*c))
    with pytest.raises(st.ArgumentError, match="register_pytree_node: dict is a pytree already"):
        st.register_pytree_node(dict, lambda r: ((), None), lambda _, c: {})
    with pytest.raises(st.ArgumentTypeError, match="nodetype is a Plain; wanted a class"):
        st.register_pytree_node(Plain(1), lambda r: ((), None), lambda _, c: Plain(1))  # type: ignore[arg-type]
    with pytest.raises(st.ArgumentTypeError, match="unflatten_func is a NoneType; wanted a function"):
        st.register_pytree_node(Plain, lambda r: ((), None), None)  # type: ignore[arg-type]
    assert leaves(Plain(1)) == [Plain(1)]


def test_optree_is_imported_on_use() -> None:
    code = "import sys, shardtensor as st; print('optree' in sys.modules); st.device_put([3]); print('optree' in sys.modules)"
    assert output_of(new_process("-c", code)).split() == ["False", "True"]
