"""The trees of a step: one function of their leaves, the layout and dtype of results, and numbers for leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError, type_text
from shardtensor.functions.placement.conversion import asarray
from shardtensor.functions.placement.transfers import device_put
from shardtensor.functions.standard.creation import zeros, zeros_like
from shardtensor.functions.standard.data_types import astype, isdtype
from shardtensor.functions.standard.elementwise import minimum
from shardtensor.sharding.layout import NamedSharding
from shardtensor.sharding.spec import PartitionSpec
from shardtensor.tensor import pytree
from shardtensor.tensor.array_type import typeof
from shardtensor.tensor.tensor import ShardedTensor

if TYPE_CHECKING:
    from optree import PyTreeSpec

LAST_COUNT = np.iinfo(np.int32).max
"""The count of steps at which it stays."""


# -- one function of all leaves --------------------------------------------------------------------


def mapped(caller: str, function: Callable[..., Any], trees: Mapping[str, Any]) -> Any:
    """Returns the tree of the results of a function for the leaves at each place of trees; see `mapped_to`."""
    return mapped_to(1, caller, lambda *leaves: (function(*leaves),), trees)[0]


def mapped_to(count: int, caller: str, function: Callable[..., Any], trees: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the trees of the results of a function that returns several for the leaves at each place of trees.

    None is no leaf. Leaves that are no arrays, such as numbers, are made tensors.

    Args:
        count: the number of results.
        caller: the name of the function of the public API, for errors.
        function: the function, which gets one leaf of each tree.
        trees: the trees by their names.

    Raises:
        ArgumentError: the trees have different structures.
        ShapeError: leaves at one place have different shapes.
    """
    rows, structure = aligned(caller, trees)
    for number, row in enumerate(rows):
        for name, leaf in zip(trees, row, strict=True):
            if leaf.shape != row[0].shape:
                path, first = structure.accessors()[number].codify(""), next(iter(trees))
                raise ShapeError(
                    f"{caller}: {first}{path} has the shape {row[0].shape}, and {name}{path} has {leaf.shape}; wanted "
                    "equal shapes"
                )
    columns = list(zip(*[function(*row) for row in rows], strict=True)) or [()] * count
    return tuple([structure.unflatten(column) for column in columns])


def aligned(caller: str, trees: Mapping[str, Any]) -> tuple[list[tuple[Any, ...]], PyTreeSpec]:
    """Returns the leaves at each place of trees of one structure, from left to right, and the structure."""
    flat = [pytree.flattened(tree, None, none_is_leaf=False) for tree in trees.values()]
    (first, tree), *others = trees.items()
    structure = flat[0][1]
    for (name, other), (_, found) in zip(others, flat[1:], strict=True):
        if found != structure:
            raise ArgumentError(
                f"{caller}: {_difference(first, tree, name, other)}; wanted trees of one structure, and the state that "
                "init returns for the parameters"
            )
    return list(zip(*[[_array(leaf) for leaf in leaves] for leaves, _ in flat], strict=True)), structure


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, ShardedTensor) else asarray(leaf)


def _difference(name: str, tree: Any, other_name: str, other: Any, path: str = "") -> str:
    """Returns which entry is the first that only one of two trees has; an empty text if there is none."""
    here, there = pytree.items_of(tree), pytree.items_of(other)
    if here is None or there is None or type(tree) is not type(other):
        same = here is None and there is None and (tree is None) == (other is None)
        return "" if same else f"{name}{path} is {kind_text(tree)}, and {other_name}{path} is {kind_text(other)}"
    ours, theirs = dict(here), dict(there)
    for step in ours | theirs:
        if step not in theirs:
            return f"{name}{path}{step} exists, and {other_name}{path}{step} does not"
        if step not in ours:
            return f"{other_name}{path}{step} exists, and {name}{path}{step} does not"
        if text := _difference(name, ours[step], other_name, theirs[step], path + step):
            return text
    return ""


def kind_text(x: Any) -> str:
    """Returns the type of an object for messages: ``float64[3]``, ``a dict``."""
    return "None" if x is None else str(typeof(x)) if hasattr(x, "shape") else type_text(x)


# -- states ----------------------------------------------------------------------------------------


def moments(caller: str, params: Any, dtype: npt.DTypeLike | None = None) -> Any:
    """Returns zeros of the shape, dtype and layout of each parameter.

    Args:
        caller: the name of the function of the public API, for errors.
        params: the parameters.
        dtype: another dtype.

    Raises:
        ArgumentTypeError: a parameter has no real floating-point numbers.
    """
    return mapped(caller, lambda p: zeros_like(p, dtype=dtype), {"params": floating(caller, params)})


def floating(caller: str, params: Any) -> Any:
    """Returns parameters as they are.

    Raises:
        ArgumentTypeError: one has no real floating-point numbers.
    """
    rows, structure = aligned(caller, {"params": params})
    for number, (leaf,) in enumerate(rows):
        dtype = typeof(leaf).dtype
        if not isdtype(dtype, "real floating"):
            path = structure.accessors()[number].codify("params")
            raise ArgumentTypeError(
                f"{caller}: {path} has the dtype {dtype}; wanted real floating-point numbers. Keep other arrays out of "
                "the parameters, or put None in their place"
            )
    return params


def count_of(params: Any) -> ShardedTensor:
    """Returns the count of steps of a new state: the int32 zero, replicated on the mesh of the first parameter."""
    leaves = pytree.flattened(params, None, none_is_leaf=False)[0]
    mesh = next((leaf.sharding.mesh for leaf in leaves if isinstance(leaf, ShardedTensor)), None)
    return zeros((), dtype=np.int32, device=mesh and NamedSharding(mesh, PartitionSpec()))


def incremented(count: Any) -> Any:
    """Returns the count of the next state, which stays at the largest number of int32."""
    return minimum(count, LAST_COUNT - 1) + 1


def expect_state(caller: str, state: Any, kind: type) -> None:
    """Raises an error if a state is not of the class that ``init`` returns."""
    if not isinstance(state, kind):
        raise ArgumentTypeError(
            f"{caller}: state is {type_text(state)}; wanted the {kind.__name__} that init of the same transformation "
            "returns"
        )


def expect_params(caller: str, params: Any) -> None:
    """Raises an error if there are no parameters."""
    if params is None:
        raise ArgumentTypeError(f"{caller}: params is None; wanted the parameters: update(grads, state, params)")


# -- results and numbers ---------------------------------------------------------------------------


def like(new: Any, old: Any) -> Any:
    """Returns an array in the dtype and the layout of another one."""
    if new.dtype != old.dtype:
        new = astype(new, old.dtype)
    if isinstance(old, ShardedTensor) and new.sharding != old.sharding:
        new = device_put(new, old.sharding)
    return new


def in_layout_of(g: Any, moment: Any) -> Any:
    """Returns a gradient in the layout of its moment, in which the step is computed: a split state needs only a part
    of a gradient, which a program then adds up by a reduce-scatter.
    """
    if isinstance(moment, ShardedTensor) and isinstance(g, ShardedTensor) and g.sharding != moment.sharding:
        return device_put(g, moment.sharding)
    return g


def for_leaves(value: Any) -> Callable[[Any], Any]:
    """Returns a function of a leaf that returns a number in the dtype of the leaf and on its mesh.

    Numbers of Python are what they are, because they promote no dtype. A tensor without dimensions is converted once
    for all leaves of one dtype and mesh.

    Args:
        value: a number of Python, or a tensor or an array without dimensions.
    """
    if type(value) in (int, float):
        return lambda leaf: value
    array, made = _array(value), dict[Any, Any]()

    def number(leaf: Any) -> Any:
        mesh = leaf.sharding.mesh if isinstance(leaf, ShardedTensor) else None
        if (leaf.dtype, mesh) not in made:
            new = astype(array, leaf.dtype)
            if mesh is not None and new.sharding.mesh != mesh:
                new = device_put(new, NamedSharding(mesh, PartitionSpec()))
            made[leaf.dtype, mesh] = new
        return made[leaf.dtype, mesh]

    return number
