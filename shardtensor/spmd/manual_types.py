"""How the arrays of the programs of a map are related along its axes, as far as it is known (see `st.typeof`).

The types are annotations: no call depends on them. Arguments have those of the specs with which they were split, some
collectives note those of their results, and `pcast` those that the user declares. Arrays are known by their identity,
since mapped functions compute with arrays of the backend's library.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from shardtensor.backend.registry import array_backend
from shardtensor.core import OPS
from shardtensor.sharding.spec import P, PartitionSpec
from shardtensor.spmd.axes import AxisName
from shardtensor.spmd.scheduling import mapped_program
from shardtensor.spmd.scheduling.mapped_program import Program, current
from shardtensor.tensor.array_type import ManualAxisType
from shardtensor.tensor.pytree import leaves
from shardtensor.tensor.tensor import SCALARS, ShardedTensor

Function = TypeVar("Function", bound=Callable[..., Any])

_MOST_NOTED = 256
"""The number of noted arrays at which, and at each doubling of which, those that no longer exist are removed."""


def manual_axis_type(x: Any) -> ManualAxisType:
    """Returns the type of an array along the axes of the maps around this call."""
    program = current()
    return ManualAxisType() if program is None or not is_array(x) else _type_in(program, x)


def _type_in(program: Program, x: Any) -> ManualAxisType:
    """Returns the type of an array in a program. One that no longer exists, None, may have differed along all axes."""
    order = _axes(program)
    within: Program | None = None if x is None else program
    while within is not None:
        known = _known(within, x)
        if known is not None:
            return ManualAxisType(known.varying, known.unreduced, known.reduced, order)
        within = within.run.parent
    return ManualAxisType(frozenset(order), order=order)


def is_array(x: Any) -> bool:
    """Whether an object is an array whose type can be known, as numbers are not."""
    return isinstance(x, (ShardedTensor, np.ndarray)) or array_backend(x) is not None


def without(known: ManualAxisType, axes: frozenset[str]) -> ManualAxisType:
    """Returns a type without some axes."""
    return ManualAxisType(known.varying - axes, known.unreduced - axes, known.reduced - axes)


def _axes(program: Program) -> tuple[str, ...]:
    return tuple([name for name in program.run.axes if not name.startswith("#")])


def _known(program: Program, x: Any) -> ManualAxisType | None:
    """Returns the type of an array in a program; None if it is not known."""
    if (entry := program.noted.get(id(x))) is not None and entry[0]() is x:
        _, known, source, axes = entry
        return without(known or _type_in(program, source()), frozenset(axes))
    specs, arguments = program.arguments
    for row, argument in zip(specs, arguments, strict=True):
        for spec, leaf in zip(row, leaves(argument), strict=True):
            if leaf is x:
                return _of_block(P() if spec is None else spec, program.run.parent)
    return None


def _of_block(spec: PartitionSpec, around: Program | None) -> ManualAxisType:
    """Returns the type of the block of an argument. In a map inside of a map, blocks may differ along outer axes."""
    varying = frozenset([axis for chain in spec.chains for axis in chain])
    return ManualAxisType(varying.union(_axes(around) if around else ()), spec.unreduced, spec.reduced)


# -- arguments -------------------------------------------------------------------------------------


class WithSpecs(functools.partial[Any]):
    """A mapped function whose arguments are blocks.

    Interpreters around the function call it with arguments that they have made of these; the program then knows them.

    Attributes:
        specs: for each argument the specs of its leaves; None for one that is passed unchanged.
    """

    specs: Sequence[Sequence[PartitionSpec | None]]

    def __call__(self, /, *args: Any) -> Any:
        """Calls the function, after the program knows its arguments."""
        program = current()
        assert program is not None
        program.arguments = self.specs, args
        return self.func(*args)


# -- results ---------------------------------------------------------------------------------------


def note(x: Any, known: ManualAxisType) -> None:
    """Notes the type of an array in the program that calls this."""
    program = current()
    if program is not None and is_array(x):
        program.noted[id(x)] = weakref.ref(x), known, None, ()
        _drop_dead(program.noted)


def axes_of(axis_name: AxisName) -> frozenset[str]:
    """Returns the axes that an argument ``axis_name`` names."""
    return frozenset((axis_name,) if isinstance(axis_name, str) else axis_name)


def joins(declared: Function) -> Function:
    """Declares that the results of a collective are the same on all devices along its axes, which programs note."""

    @functools.wraps(declared)
    def called(*args: Any, **kwargs: Any) -> Any:
        result, program = declared(*args, **kwargs), mapped_program.CURRENT.get()
        if program is not None and kwargs.get("axis_index_groups") is None:
            x, axes = args[0] if args else kwargs["x"], args[1] if len(args) > 1 else kwargs["axis_name"]
            # Another call of a function would take as long as all of this, and what is noted is rarely read.
            if type(result).__weakrefoffset__ and type(x).__weakrefoffset__:
                noted, gone = program.noted, (axes,) if isinstance(axes, str) else tuple(axes)
                entry = noted.get(id(x))
                if entry is None or entry[0]() is not x:
                    noted[id(result)] = weakref.ref(result), None, weakref.ref(x), gone
                else:  # The entry of what x was made of: it may no longer exist when the type is read.
                    every = entry[3] if entry[3] == gone else tuple(dict.fromkeys(entry[3] + gone))
                    noted[id(result)] = weakref.ref(result), entry[1], entry[2], every
                if len(noted) >= _MOST_NOTED:
                    _drop_dead(noted)
            elif type(result) not in SCALARS:
                for leaf, one in zip(leaves(x), leaves(result), strict=True):
                    note(one, without(manual_axis_type(leaf), axes_of(axes)))
        return result

    OPS[declared.__name__].dispatch = called
    return cast("Function", called)


def _drop_dead(noted: dict[int, Any]) -> None:
    """Removes the entries of arrays that no longer exist, if there are many entries: at each doubling of their number,
    since those of arrays that do exist remain.
    """
    if len(noted) >= _MOST_NOTED and not len(noted) & (len(noted) - 1):
        for key in [key for key, entry in noted.items() if entry[0]() is None]:
            del noted[key]
