"""What a mapped function gets, as processes compare it: its arguments, and the values that it captures.

Each process runs the function on its own devices, and what the function does there is not compared. Its result depends
on the tensors that it gets, and on the arrays and numbers that it takes from around it: where these differ between
processes, sums over all of them are wrong in each.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shardtensor.communication.processes import compared, described, described_array, is_common, note
from shardtensor.spmd.program import current
from shardtensor.tensor.identity import identity_of
from shardtensor.tensor.pytree import leaves
from shardtensor.tensor.tensor import ShardedTensor

_MOST = 256
"""How many values of one function are looked at."""


def note_map(caller: str, fn: Callable[..., Any], columns: Sequence[Any]) -> None:
    """Adds a map over devices of several processes to what the next exchange compares.

    Maps inside of maps run in another order in each process, and are not compared.

    Args:
        caller: the map.
        fn: the function.
        columns: the arguments: items for all calls, or one for all.
    """
    if current() is not None:
        return
    given = [", ".join(_identified(column)) for column in columns]
    taken = [f"{name}={text}" for name, text in _captured(fn)]
    note(f"{caller}({'; '.join(given)})" + (f" of a function with {', '.join(taken)}" if taken else ""))


def _identified(column: Any) -> Sequence[str]:
    """Returns the identities of the tensors in an argument, each once: blocks have that of the whole. Their shapes,
    dtypes and layouts follow from them.
    """
    items = column if type(column) is list else leaves(column)
    tensors = [x for item in items for x in ((item,) if type(item) is ShardedTensor else leaves(item))]
    found = dict.fromkeys([identity_of(x) for x in tensors if type(x) is ShardedTensor])
    return [f"#{identity}" for identity in found if identity]


def _captured(fn: Any) -> Iterator[tuple[str, str]]:
    """Yields the names and the texts of the values that a function takes from around it and that have to be the same in
    all processes: tensors of several processes, host arrays, and numbers with a fraction. Integers, bools and strings
    may be the number or the name of a process, and other objects, such as tensors on devices of this process, belong
    to it.
    """
    seen: set[int] = set()
    pending = [("fn", fn)]
    for _ in range(_MOST):
        if not pending:
            return
        name, x = pending.pop()
        if isinstance(x, (float, complex, np.inexact)):
            yield name, repr(x)
        elif type(x) is np.ndarray:
            if not x.dtype.hasobject:
                yield name, described_array(x, compared(x))
        elif is_common(x):
            yield name, described(x)
        elif id(x) not in seen:
            seen.add(id(x))
            pending += reversed(list(_inside(name, x)))


def _inside(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    """Yields the values that a function or a container refers to, with their names."""
    if isinstance(x, types.FunctionType):
        for variable, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            try:
                yield variable, cell.cell_contents
            except ValueError:  # The variable has no value yet.
                continue
        defaults = x.__defaults__ or ()
        arguments = x.__code__.co_varnames[: x.__code__.co_argcount]
        yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
        yield from (x.__kwdefaults__ or {}).items()
        for variable in _globals_of(x.__code__):
            value = x.__globals__.get(variable)
            if not isinstance(value, types.FunctionType) or value.__globals__ is x.__globals__:
                yield variable, value
    elif isinstance(x, functools.partial):
        yield from ((name, part) for part in (x.func, *x.args))
        yield from x.keywords.items()
    elif isinstance(x, types.MethodType):
        yield name, x.__func__
    elif type(x) in (list, tuple) and len(x) <= _MOST:
        yield from ((name, part) for part in x)
    elif type(x) is dict and len(x) <= _MOST:
        yield from ((f"{name}[{key!r:.20}]", part) for key, part in x.items())


@functools.lru_cache(1024)
def _globals_of(code: types.CodeType) -> Sequence[str]:
    """Returns the global names that a function reads, those of the functions in it included."""
    import dis  # Programs of one process do not need it.

    found = dict.fromkeys([i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"])
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(_globals_of(constant)))
    return tuple(found)
