"""Maps that `vmap` calls once for all examples: each program gets its blocks of all of them, and has a batcher."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from shardtensor.core import Op, Operands, bind, interpreting
from shardtensor.interpreters.batching.batched_loops import Flags
from shardtensor.interpreters.batching.batcher import Batcher, special
from shardtensor.interpreters.program_arrays import tensor_here
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


special(map_shards=called, check_equal=pairs_checked)
