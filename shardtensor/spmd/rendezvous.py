"""Rendezvous of collectives: checks the contributions of the programs and passes them to the communicator, leaf by
leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.registry import backend_of, in_job
from shardtensor.backend.small_floats import is_element
from shardtensor.communication.abstract_communicator import AbstractCommunicator, array_without_elements
from shardtensor.communication.array_communicator import ArrayCommunicator
from shardtensor.communication.communicator import Communicator
from shardtensor.communication.communicators import communicator
from shardtensor.communication.transfer import array_on
from shardtensor.errors import ArgumentTypeError, BackendError, ShardTensorError, type_text
from shardtensor.host.units import counted
from shardtensor.spmd.axes import AxisPosition
from shardtensor.spmd.collective_call import CollectiveCall, HostNumbers, read_all
from shardtensor.spmd.scheduling import mapped_program
from shardtensor.spmd.scheduling.mapped_program import Program
from shardtensor.tensor.ownership import Lent
from shardtensor.tensor.pytree import form_of, hint_to_register, leaves, replaced
from shardtensor.tensor.tensor import SCALARS, ShardedTensor
from shardtensor.tensor.value import aval

Arrays = Sequence[Any]
Body = Callable[[Communicator, Arrays], Sequence[Any]]
"""Implements a collective on a communicator and one array for each program; returns one result for each program."""


def rendezvous(
    caller: str,
    at: AxisPosition,
    x: Any,
    details: tuple[Any, ...],
    body: Body,
    *,
    alike: bool = False,
    scalars: bool = False,
) -> Any:
    """Contributes ``x`` to a collective, waits for the other programs, and returns the result of this program.

    Args:
        caller: the collective.
        at: the axis position of the program.
        x: a pytree.
        details: further pairs of name and value that must be equal in the calls of all programs.
        body: implements the collective for one leaf, on one array for each program.
        alike: whether the arrays of a leaf must be equal in shape and dtype; otherwise in dtype and number of
            dimensions.
        scalars: whether the body accepts Python scalars unchanged.

    Returns:
        A pytree of the form of ``x``.

    Raises:
        ArgumentTypeError: a leaf is not an array of numbers, or not a tensor over all devices of the program.
        CollectiveError: the programs do not all make this call, with equal ``details`` and leaves that match.
    """
    program = mapped_program.CURRENT.get()
    assert program is not None  # `axis_position` raises outside of programs.
    form = None if type(x) is np.ndarray else form_of(x)  # The common case takes no traversal.
    if form is None:
        mine = [_contribution(x, program, caller, "x", scalars)]
        kinds: Any = _kind(mine[0], alike)
    else:
        mine = [_contribution(leaf, program, caller, "x", scalars) for leaf in leaves(x)]
        kinds = [_kind(leaf, alike) for leaf in mine]
    compared = (("a tree", form), ("x", kinds), *details)

    def results_of(communicator_of: Any, groups: Any, leaves_of: Any, lent: Any) -> Sequence[Any]:
        columns = [_column(communicator_of, groups, column, lent, body) for column in zip(*leaves_of, strict=True)]
        return list(zip(*columns, strict=True)) if columns else [()] * len(groups)

    results = _met(program, caller, at, mine, compared, results_of)
    return replaced(x, results) if form is not None else results[0]


def joint_rendezvous(
    caller: str,
    at: AxisPosition,
    arrays: dict[str, Any],
    numbers: dict[str, Any],
    details: tuple[Any, ...],
    body: Body,
) -> Any:
    """Contributes several arrays to a collective that takes them together; see `rendezvous`.

    Args:
        caller, at, details: see `rendezvous`.
        arrays: the arrays of this program, by the names of the arguments.
        numbers: likewise arrays of integers, which the host reads when all programs have arrived.
        body: implements the collective, given for each program the list of its arrays, and of its `HostNumbers`.

    Raises:
        ArgumentTypeError: an argument is not an array of numbers, or the program has several devices.
        CollectiveError: the programs do not all make this call.
    """
    program = mapped_program.CURRENT.get()
    assert program is not None  # `axis_position` raises outside of programs.
    if len(program.devices) > 1:
        raise ArgumentTypeError(
            f"{caller}: this program has {counted(len(program.devices), 'device')}; wanted programs of one device "
            "each, as those of a map inside of this one"
        )
    for name, x in (arrays | numbers).items():
        if not hasattr(x, "shape"):
            raise ArgumentTypeError(f"{caller}: {name} is {'None' if x is None else type_text(x)}; wanted an array")
    mine = [_contribution(x, program, caller, name, False) for name, x in arrays.items()]
    integers = [
        x if isinstance(x, np.ndarray) else _contribution(x, program, caller, name, False)
        for name, x in numbers.items()
    ]
    mine.append(HostNumbers(integers, program.devices[0]))

    def results_of(communicator_of: Any, groups: Any, leaves_of: Any, lent: Any) -> Sequence[Any]:
        read_all([values[-1] for values in leaves_of])
        return _on_single_devices(communicator_of, groups, leaves_of, lent, body)

    return _met(program, caller, at, mine, details, results_of)


def _met(
    program: Program,
    caller: str,
    at: AxisPosition,
    mine: Sequence[Any],
    compared: tuple[Any, ...],
    results_of: Callable[..., Sequence[Any]],
) -> Any:
    """Contributes to a collective, and returns the result of this program.

    Args:
        program, caller, at: see `rendezvous`.
        mine: what this program contributes.
        compared: pairs of name and value that must be equal in the calls of all programs.
        results_of: ``results_of(communicator_of, devices, contributions, lent)`` returns the results of all programs.
    """
    across = None
    if in_job():
        # Programs of one process do not need it.
        from shardtensor.spmd.maps.maps_across_processes import programs_across

        across = programs_across(program, at, caller)
    kind = communicator if across else program.communicator

    def work(contributions: list[Any]) -> Sequence[Any]:
        groups, leaves_of, lent = zip(*contributions, strict=True)
        # A process also executes its part of the collectives of programs elsewhere, in groups of other sizes.
        sizes = at.sizes if at.size == len(contributions) else (len(contributions),)
        return results_of(functools.partial(kind, caller, at.axis, sizes=sizes), groups, leaves_of, lent)

    description = f"{caller} over {at.description}"
    call = CollectiveCall(description, at.key, at.size, work, compared, lambda there: at.at(there).key, across)
    return program.meet(call, at.index, (program.devices, mine, program.lent))


def _column(
    communicator_of: Callable[[Sequence[Device]], Communicator],
    groups: Sequence[tuple[Device, ...]],
    column: Sequence[Any],
    lent: Sequence[Sequence[Lent]],
    body: Body,
) -> Sequence[Any]:
    """Returns the results for one leaf; ``lent`` are the arrays that were lent to each program."""
    if column[0] is None:
        return column
    if len(groups[0]) == 1 or not isinstance(column[0], ShardedTensor):
        return _on_single_devices(communicator_of, groups, column, lent, body)
    shards = communicator_of(()).shards
    communicators = [communicator_of(devices) for devices in zip(*groups, strict=True)]
    parts = zip(*map(shards, column), strict=True)
    rows = [_run_body(body, of_row, arrays) for of_row, arrays in zip(communicators, parts, strict=True)]
    communicator = communicators[0]  # That of the first array of each tensor, which may be in another process.
    tensors = []
    for x, arrays in zip(column, zip(*rows, strict=True), strict=True):
        if [tuple(a.shape) for a in arrays] != [x._aval.grid.shape(k) for k in range(len(arrays))]:
            raise ArgumentTypeError(
                f"{communicator.caller}: x is a tensor over {counted(len(groups[0]), 'device')}, and its shape would "
                "change; map down to single devices first"
            )
        # The dtype is read from the result, since sums of bool arrays are integers and means of integers are floats.
        value = x._aval
        result = aval(value.shape, communicator.dtype_of(arrays[0]), value.sharding, value.committed)
        tensors.append(communicator.assembled(result, arrays))
    return tensors


def _on_single_devices(
    communicator_of: Callable[[Sequence[Device]], Communicator],
    groups: Sequence[tuple[Device, ...]],
    column: Sequence[Any],
    lent: Sequence[Sequence[Lent]],
    body: Body,
) -> Sequence[Any]:
    """Returns the results of programs of one device each; see `_column`."""
    communicator = communicator_of([devices[0] for devices in groups])
    communicator.lent = lent
    results = _run_body(body, communicator, column)
    return [communicator.result(array, device) for array, device in zip(results, communicator.devices, strict=True)]


def _run_body(body: Body, communicator: Communicator, column: Arrays) -> Sequence[Any]:
    try:
        results = body(communicator, column)
    except TypeError as error:
        if isinstance(error, ShardTensorError):
            raise
        first = column[0]
        dtype = communicator.dtype_of(first[0] if type(first) is list else first)
        raise ArgumentTypeError(f"{communicator.caller}: does not take {dtype} ({error})") from None
    communicator.settle()
    return results


def _contribution(leaf: Any, program: Program, caller: str, name: str, scalars: bool) -> Any:
    """Returns the contribution of a program for one leaf of the argument ``name``: None, a Python scalar where
    ``scalars``, an array on the device of the program, or a tensor over all of its devices.
    """
    if leaf is None or (scalars and type(leaf) in SCALARS):
        return leaf
    devices = program.devices
    if len(devices) > 1:
        if not isinstance(leaf, ShardedTensor) or leaf.sharding.mesh.flat != devices:
            raise ArgumentTypeError(
                f"{caller}: {name} is {_named(leaf)}, and this program has {counted(len(devices), 'device')}; wanted "
                "tensors over all of them, or a map inside of this one"
            )
        return leaf
    (device,) = devices
    backend = backend_of(device)
    if (
        type(leaf) is np.ndarray
        and backend.on_host
        and leaf.dtype.kind in _NUMBERS
        and program.communicator is ArrayCommunicator
        and backend.is_array(leaf)
    ):
        return leaf  # The common case.
    on_host = not backend.is_array(leaf)
    is_tensor = isinstance(leaf, ShardedTensor)
    if on_host and not is_tensor and not isinstance(leaf, (np.ndarray, np.generic)) and type(leaf) not in SCALARS:
        raise ArgumentTypeError(
            f"{caller}: {name} is {_named(leaf)}; wanted arrays, scalars, or a pytree of them{hint_to_register(leaf)}"
        )
    try:
        array = leaf if is_tensor else np.asarray(leaf) if on_host else backend.contribution(leaf)
    except BackendError as error:
        raise BackendError(f"{caller}: {error}") from None
    if not is_element(array.dtype if on_host else backend.dtype_of(array)):
        raise ArgumentTypeError(f"{caller}: {name} is an array of {array.dtype}; wanted numbers")
    if program.communicator is AbstractCommunicator:
        return array_without_elements(array, device, caller)
    if is_tensor:
        return array_on(leaf, device, caller)
    return backend.from_host(array, device) if on_host else array


_NUMBERS = frozenset("biufc")
"""The kinds of NumPy's dtypes whose elements are numbers."""


def _named(x: Any) -> str:
    return f"a tensor on {x.device}" if isinstance(x, ShardedTensor) else f"{type_text(x)}"


def _kind(leaf: Any, alike: bool) -> Any:
    """Returns the properties in which the leaves of different programs must agree."""
    if leaf is None or type(leaf) in SCALARS:
        return None if leaf is None else "a Python scalar"
    if isinstance(leaf, ShardedTensor) and leaf.sharding.mesh.size > 1:
        return leaf.shape, str(leaf.dtype), leaf.sharding.spec
    return _Kind((tuple(leaf.shape) if alike else leaf.ndim, leaf.dtype))


class _Kind(tuple[Any, ...]):
    """Shape (or number of dimensions) and dtype of an array, printed readably in errors."""

    __slots__ = ()

    def __repr__(self) -> str:
        shape, dtype = self
        return f"{dtype}{list(shape)}" if isinstance(shape, tuple) else f"{dtype} of {counted(shape, 'dimension')}"
