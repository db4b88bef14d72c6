"""How the arrays of the programs of a map are related along its axes, as far as it is known (see `st.typeof`).

The types are annotations: no call depends on them. Arguments have those of the specs with which they were split, some
collectives note those of their results, and `pcast` those that the user declares. Arrays are known by their identity,
since mapped functions compute with arrays of the backend's library.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from shardtensor.backend.registry import array_backend
from shardtensor.core import OPS
from shardtensor.sharding.spec import PartitionSpec
from shardtensor.spmd.scheduling.mapped_program import Program, current
from shardtensor.tensor.array_type import ManualAxisType
from shardtensor.tensor.pytree import leaves
from shardtensor.tensor.tensor import ShardedTensor

Function = TypeVar("Function", bound=Callable[..., Any])

_MOST_NOTED = 256
"""The number of noted arrays from which on those that no longer exist are removed."""


def manual_axis_type(x: Any) -> ManualAxisType:
    """Returns the type of an array along the axes of the maps around this call."""
    program = current()
    if program is None or not is_array(x):
        return ManualAxisType()
    order = _axes(program)
    within: Program | None = program
    while within is not None:
        known = _known(within, x)
        if known is not None:
            return ManualAxisType(known.varying, known.unreduced, known.reduced, order)
        within = within.run.parent
    return ManualAxisType(frozenset(order), order=order)


def notes(rule: Callable[..., ManualAxisType]) -> Callable[[Function], Function]:
    """Declares the types of the results of a collective: the programs note them.

    Args:
        rule: ``rule(known, axes, **params)`` returns the type of a result, given that of the array, the axes of the
            collective, and its other arguments that are given by name.
    """

    def declare(declared: Function) -> Function:
        @functools.wraps(declared)
        def called(*args: Any, **kwargs: Any) -> Any:
            result, params = declared(*args, **kwargs), kwargs.copy()
            x, axis_name = [params.pop(name) if k >= len(args) else args[k] for k, name in enumerate(_FIRST)]
            axes = frozenset((axis_name,) if isinstance(axis_name, str) else axis_name)
            for leaf, one in zip(leaves(x), leaves(result), strict=True):
                if is_array(one):
                    _note(one, rule(manual_axis_type(leaf), axes, **params))
            return result

        OPS[declared.__name__].dispatch = called
        return called

    return declare


_FIRST = ("x", "axis_name")
"""The first parameters of collectives."""


def joined(known: ManualAxisType, axes: frozenset[str], *, axis_index_groups: Any = None, **_: Any) -> ManualAxisType:
    """Returns the type of a result that is the same on all devices along axes."""
    return known if axis_index_groups is not None else without(known, axes)


def without(known: ManualAxisType, axes: frozenset[str]) -> ManualAxisType:
    """Returns a type without some axes."""
    return ManualAxisType(known.varying - axes, known.unreduced - axes, known.reduced - axes)


def _note(x: Any, known: ManualAxisType) -> None:
    """Notes the type of an array in the program that calls this."""
    program = current()
    if program is None:  # The axis is that of a `vmap`.
        return
    noted = program.noted
    if noted is None:
        noted = program.noted = {}
    elif len(noted) >= _MOST_NOTED:
        program.noted = noted = {k: one for k, one in noted.items() if one[0]() is not None}
    noted[id(x)] = weakref.ref(x), known


def is_array(x: Any) -> bool:
    """Whether an object is an array whose type can be known, as numbers are not."""
    return isinstance(x, (ShardedTensor, np.ndarray)) or array_backend(x) is not None


class WithTypes(functools.partial[Any]):
    """A mapped function whose arguments have known types. It is called in each program with the arguments that the
    interpreters around the function have made of the blocks.

    Attributes:
        types: for each argument, the types of its leaves.
    """

    types: Sequence[Sequence[ManualAxisType]]

    def __call__(self, /, *args: Any) -> Any:
        program = current()
        assert program is not None
        program.arguments = self.types, args
        return self.func(*args)


def with_types(f: Callable[..., Any], specs: Sequence[Sequence[PartitionSpec | None]]) -> WithTypes:
    """Returns a function whose arguments are blocks, given the specs of their leaves: None for what is passed unchanged.
    """
    function = WithTypes(f)
    function.types = [[ManualAxisType() if spec is None else _of_spec(spec) for spec in row] for row in specs]
    return function


@functools.lru_cache(1024)
def _of_spec(spec: PartitionSpec) -> ManualAxisType:
    varying = frozenset([axis for chain in spec.chains for axis in chain])
    return ManualAxisType(varying, spec.unreduced, spec.reduced)


def _axes(program: Program) -> tuple[str, ...]:
    return tuple([name for name in program.run.axes if not name.startswith("#")])


def _known(program: Program, x: Any) -> ManualAxisType | None:
    """Returns the type of an array in a program; None if it is not known."""
    if program.noted is not None and (one := program.noted.get(id(x))) is not None and one[0]() is x:
        return one[1]
    for types, argument in zip(*program.arguments, strict=True):
        for known, leaf in zip(types, leaves(argument), strict=True):
            if leaf is x:
                parent = program.run.parent
                around = frozenset(() if parent is None else _axes(parent))
                return ManualAxisType(known.varying | around, known.unreduced, known.reduced)
    return None
