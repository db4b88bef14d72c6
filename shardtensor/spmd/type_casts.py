"""`pcast` and `pvary`, which declare how the arrays of the programs of a map are related along its axes."""

from __future__ import annotations

import functools
from typing import Any, TypeVar, cast

import numpy as np

from shardtensor.core import OPS, implements
from shardtensor.errors import ArgumentError
from shardtensor.spmd.axes import AxisName, axis_position
from shardtensor.spmd.collectives import collective
from shardtensor.spmd.manual_types import Function, axes_of, is_array, manual_axis_type, note, without
from shardtensor.tensor.array_type import ManualAxisType
from shardtensor.tensor.pytree import leaves, map_leaves

Tree = TypeVar("Tree")

_TO = {"varying": ("reduced", "invarying"), "unreduced": ("varying",), "reduced": ("invarying",)}
"""For each type the types from which an array is cast to it."""


def _noted(declared: Function) -> Function:
    """Declares that the results of `pcast` have the type to which they are cast, which programs note.

    Raises:
        ArgumentError: there is no such type, or an array of another type cannot be cast to it.
    """

    @functools.wraps(declared)
    def called(*args: Any, **kwargs: Any) -> Any:
        if (to := kwargs.get("to", "varying")) not in _TO:
            raise ArgumentError(f'pcast: to is {to!r:.60}; wanted "varying", "unreduced" or "reduced"')
        result = declared(*args, **kwargs)
        x, axis_name = [args[k] if k < len(args) else kwargs[name] for k, name in enumerate(("x", "axis_name"))]
        for leaf, one in zip(leaves(x), leaves(result), strict=True):
            note(one, _cast(manual_axis_type(leaf), axes_of(axis_name), to))
        return result

    OPS[declared.__name__].dispatch = called
    return cast("Function", called)


def _cast(known: ManualAxisType, axes: frozenset[str], to: str) -> ManualAxisType:
    for axis in sorted(axes):
        now = next((name for name in _TO if axis in getattr(known, name)), "invarying")
        # An array whose type is not known counts as one that varies, and may be equal.
        if now != "varying" and now not in _TO[to]:
            raise ArgumentError(
                f"pcast: x is {now} along {axis!r}, and to is {to!r}; wanted an array that is {' or '.join(_TO[to])}"
            )
    rest = without(known, axes)
    return ManualAxisType(**{name: getattr(rest, name) | (axes if name == to else frozenset()) for name in _TO})


@_noted
@collective
def pcast(x: Any, axis_name: AxisName, *, to: str) -> Any:
    """Declares how the arrays of all devices are related along a named axis; the elements stay as they are, and nothing
    is transferred.

    No collective needs the declaration, as in JAX: it is for `typeof`, and for gradients that a mapped function takes
    itself. There, the cotangent of an array that is cast to varying or to reduced is the sum of those of all devices,
    by a `psum`; without a cast, each device has the gradient of its own result. (In a gradient of a map, what is equal
    and what varies is inferred.)

    Args:
        x: a pytree of arrays.
        axis_name: the name of an axis of an enclosing map, or a tuple of names.
        to: ``"varying"``: the arrays, which are equal, count as arrays that may differ. ``"unreduced"``: the arrays
            are partial sums. ``"reduced"``: the arrays are equal, and their gradients are partial sums.

    Raises:
        ArgumentError: ``to`` is another value, or an array is known to be of a type that is not cast to it. An array
            that varies is cast to any, since it may be one of which only that is known.
        ShardingError: no enclosing map has such an axis.

    >>> @st.shard_map(mesh=st.make_mesh((2,), ("i",)), in_specs=(st.P(), st.P("i")), out_specs=st.P())
    ... def gradient(w, block):
    ...     return st.grad(lambda w: (st.pcast(w, "i", to="varying") * block).sum())(w)
    >>> gradient(np.ones(1), np.arange(4.0)).tolist()
    [6.0]
    """


@implements(pcast, "algorithm", "infer")
def _pcast(x: Any, axis_name: AxisName, to: str) -> Any:
    axis_position("pcast", axis_name)
    return map_leaves(_handle, x)


def _handle(x: Any) -> Any:
    """Returns another object with the same elements, which can have another type."""
    x = np.asarray(x) if isinstance(x, np.generic) else x
    return x[...] if is_array(x) else x


def pvary(x: Tree, axis_name: AxisName) -> Tree:
    """Declares that arrays that are equal on all devices along a named axis count as arrays that may differ:
    ``pcast(x, axis_name, to="varying")``, which has replaced it in JAX.

    Args:
        x, axis_name: see `pcast`.

    Raises:
        ShardingError: no enclosing map has such an axis.

    >>> st.pmap(lambda x: st.pvary(x, "i"), np.arange(4), axis_name="i").tolist()
    [0, 1, 2, 3]
    """
    varying: Tree = pcast(x, axis_name, to="varying")
    return varying
