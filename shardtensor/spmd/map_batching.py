"""Maps that `vmap` calls once for all examples: each program gets its blocks of all of them, and has a batcher; and the
collective whose operands are several arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import Op, Operands, bind, call, interpreting
from shardtensor.errors import ArgumentError
from shardtensor.interpreters.batching.batched_loops import Flags
from shardtensor.interpreters.batching.batcher import Batcher, names_of, special
from shardtensor.interpreters.program_arrays import tensor_here
from shardtensor.spmd.axes import axis_position
from shardtensor.spmd.maps.launch import MappedArgument, Unmapped
from shardtensor.spmd.scheduling.mapped_program import current
from shardtensor.tensor.pytree import leaves, map_leaves, replaced


def called(batcher: Batcher, op: Op, operands: Operands, params: dict[str, Any]) -> list[Any]:
    """Returns the results of a map, given those parameters; the interpreter around the batcher is the innermost one."""
    columns: list[MappedArgument] = []
    flags: list[Sequence[Flags] | None] = []
    for items, each, donated in operands[0]:
        if type(items) is Unmapped:
            columns.append(MappedArgument(items, each, donated))
            flags.append(None)
            continue
        every = list(items) if each else [items]
        flags.append([list(map(batcher.differs, leaves(item))) for item in every])
        examples = [map_leaves(batcher.examples, item) for item in every]
        columns.append(MappedArgument(examples if each else examples[0], each, donated))
    function = functools.partial(_program, batcher, params["fn"], flags)
    results = bind(op, (columns,), tuple((params | {"fn": function}).values()))
    return [batcher.boxed(result, differing) for result, differing in results]


def _program(
    batcher: Batcher,
    fn: Callable[..., Any],
    columns: Sequence[Sequence[Flags] | None],
    *args: Any,
) -> tuple[Any, Flags]:
    """Calls the function in one program. Returns the result, and which of its leaves differ between examples: other
    processes have to know that, too.
    """
    program = current()
    assert program is not None
    mine = Batcher(batcher.size, batcher.axis_name)
    boxed = []
    for argument, rows in zip(args, columns, strict=True):
        flags = None if rows is None else rows[program.number if len(rows) > 1 else 0]
        boxed.append(argument if flags is None else mine.boxed(map_leaves(tensor_here, argument), flags))
    try:
        with interpreting(mine):
            result = fn(*boxed)
        differing = list(map(mine.differs, leaves(result)))
        with mine.outside():
            return replaced(result, [mine.shown(mine.examples(y)) for y in leaves(result)]), differing
    finally:
        mine.ended = True


def pairs_checked(batcher: Batcher, op: Op, operands: Operands, params: dict[str, Any]) -> None:
    """Checks that results are equal, of all examples."""
    bind(op, (map_leaves(batcher.examples, operands[0]),), tuple(params.values()))


def exchanged(batcher: Batcher, op: Op, operands: Operands, params: dict[str, Any]) -> Any:
    """Calls `ragged_all_to_all` once for all examples. If they have the same offsets and sizes, a row has one more
    dimension; otherwise the rows of the examples follow each other, and each example has slices of its own.

    Raises:
        ArgumentError: the axis is that of the examples.
    """
    if batcher.axis_name in names_of(params["axis_name"]):
        raise ArgumentError(
            f"{op.error_name}: {batcher.axis_name!r} is an axis of vmap; wanted axes of maps, or the rows that an "
            "example receives by an index: x[i]"
        )
    flags = list(map(batcher.differs, operands))
    with batcher.outside():
        given = [tensor_here(batcher.examples(x)) for x in operands]
        arrays = [_of_all(x, f, batcher.size) for x, f in zip(given[:2], flags, strict=False)]
        if not any(flags[2:]):
            wide = [call("moveaxis", x, 0, 1) for x in arrays]
            result = call("moveaxis", tensor_here(bind(op, (*wide, *given[2:]), tuple(params.values()))), 1, 0)
        else:
            columns = [
                call("moveaxis", _of_all(call("asarray", x), f, batcher.size), 0, 1)
                for x, f in zip(given[2:], flags[2:], strict=True)
            ]
            numbers = [call("reshape", x, (-1,)) for x in _shifted(columns, arrays, op, params)]
            joined = [call("reshape", x, (-1, *x.shape[2:])) for x in arrays]
            result = tensor_here(bind(op, (*joined, *numbers), tuple(params.values())))
            result = call("reshape", result, arrays[1].shape)
        return batcher.value(call("copy", result))


def _of_all(x: Any, differs: bool, size: int) -> Any:
    """Returns an operand with a first dimension of examples."""
    return x if differs else call("broadcast_to", x, (size, *x.shape))


def _shifted(columns: Sequence[Any], arrays: Sequence[Any], op: Op, params: dict[str, Any]) -> list[Any]:
    """Returns the offsets and sizes of the slices (slice, example), with the offsets in the joined rows of all
    examples. The rows of an example differ in number from device to device.
    """
    begins, sizes, places, expected = columns
    groups = {name: params[name] for name in ("axis_name", "axis_index_groups")}
    at = axis_position(op.error_name, *groups.values())
    here, there = arrays if op.name == "ragged_all_to_all" else arrays[::-1]
    lengths = call("psum", [there.shape[1] if k == at.index else 0 for k in range(at.size)], **groups)
    examples = np.arange(arrays[0].shape[0])
    shift = np.repeat(lengths, sizes.shape[0] // at.size)[:, None] * examples
    return [call("add", begins, here.shape[1] * examples), sizes, call("add", places, shift), expected]


special(
    map_shards=called,
    check_equal=pairs_checked,
    ragged_all_to_all=exchanged,
    ragged_return=exchanged,
)
