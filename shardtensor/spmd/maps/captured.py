"""What a mapped function gets, as processes compare it: its arguments, and the values that it captures.

Each process runs the function on its own devices, and what the function does there is not compared. Its result depends
on the tensors that it gets, and on the arrays and numbers that it takes from around it: where these differ between
processes, sums over all of them are wrong in each.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shardtensor.communication.between_processes.processes import compared, described, described_array, is_common, note
from shardtensor.spmd.scheduling.mapped_program import current
from shardtensor.tensor.identity import identity_of
from shardtensor.tensor.pytree import leaves
from shardtensor.tensor.tensor import ShardedTensor

_MOST = 256
"""How many values of one function are looked at."""


def note_map(caller: str, fn: Callable[..., Any], columns: Sequence[tuple[Any, Sequence[Any]]]) -> None:
    """Adds a map over devices of several processes to what the next exchange compares.

    Maps inside of maps run in another order in each process, and are not compared.

    Args:
        caller: the map.
        fn: the function.
        columns: the arguments: items for all calls, or one for all, and the leaves that all calls share.
    """
    if current() is not None:
        return
    arguments = [", ".join(_texts_of(*column)) for column in columns]
    taken = [f"{name}={text}" for name, text in _captured(fn)]
    note(f"{caller}({'; '.join(arguments)})" + (f" of a function with {', '.join(taken)}" if taken else ""))


def _texts_of(items: Any, shared: Sequence[Any]) -> Sequence[str]:
    """Returns the texts of what processes compare of an argument, each once: the identities of tensors, where blocks
    have that of the whole, and the arrays and the numbers with a fraction that all calls share.
    """
    items = items if type(items) is list else leaves(items)
    tensors = [x for item in items for x in ((item,) if type(item) is ShardedTensor else leaves(item))]
    identities = dict.fromkeys([identity_of(x) for x in tensors if type(x) is ShardedTensor])
    texts = dict.fromkeys([text for x in shared if type(x) is not ShardedTensor for _, text in _text_of("", x)])
    return [*(f"#{identity}" for identity in identities if identity), *texts]


def _captured(fn: Any) -> Iterator[tuple[str, str]]:
    """Yields the names and the texts of the values that a function takes from around it and that have to be the same in
    all processes: tensors of several processes, host arrays, and numbers with a fraction. Integers, bools and strings
    may be the number or the name of a process, and other objects, such as tensors on devices of this process, belong
    to it.
    """
    seen: set[int] = set()
    for name, x in _reached("fn", fn, seen):
        if _is_container(x):  # It has a limit of its own, since processes may have more names of files, for example.
            for entry, value in _reached(name, x, seen, enters=True):
                yield from _text_of(entry, value)
        else:
            yield from _text_of(name, x)


def _reached(name: str, x: Any, seen: set[int], enters: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields at most `_MOST` values that a value refers to, itself included; those in containers if it ``enters``."""
    pending = [(name, x)]
    for _ in range(_MOST):
        if not pending:
            return
        name, x = pending.pop()
        yield name, x
        if id(x) not in seen and (enters or not _is_container(x)):
            seen.add(id(x))
            pending += reversed(list(_inside(name, x)))


def _text_of(name: str, x: Any) -> Iterator[tuple[str, str]]:
    if isinstance(x, (float, complex, np.inexact)):
        yield name, repr(x)
    elif type(x) is np.ndarray:
        if not x.dtype.hasobject:
            yield name, described_array(x, compared(x))
    elif is_common(x):
        yield name, described(x)


def _is_container(x: Any) -> bool:
    return type(x) in (list, dict, OrderedDict, defaultdict) or isinstance(x, tuple)


def _inside(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    """Yields the values that a function or a container refers to, with their names; but not the variables that the
    function sets itself, such as the seconds that it has taken so far.
    """
    if isinstance(x, types.FunctionType):
        used, own = _names_in(x.__code__)
        for variable, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            if variable not in own:
                try:
                    yield variable, cell.cell_contents
                except ValueError:  # The variable has no value yet.
                    continue
        defaults = x.__defaults__ or ()
        arguments = x.__code__.co_varnames[: x.__code__.co_argcount]
        yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
        yield from (x.__kwdefaults__ or {}).items()
        for variable in used:
            value = x.__globals__.get(variable)
            origin = _unwrapped(value)
            if not isinstance(origin, types.FunctionType) or origin.__globals__ is x.__globals__:
                yield variable, value
    elif isinstance(x, functools.partial):
        yield from ((name, part) for part in (x.func, *x.args))
        yield from x.keywords.items()
    elif isinstance(x, types.MethodType):
        yield name, x.__func__
    elif isinstance(x, dict) and _is_container(x) and len(x) <= _MOST:
        entries = [(f"{name}[{key!r:.20}]" if type(key) is str else name, part) for key, part in list(x.items())]
        # Where a set of strings determines the order of the entries, it differs between processes.
        yield from sorted(entries, key=lambda entry: entry[0])
    elif _is_container(x) and len(x) <= _MOST:
        # Functions append what they compute on their own devices to lists.
        skipped = (float, complex, np.inexact, np.ndarray) if type(x) is list else ()
        yield from [(name, part) for part in x if not isinstance(part, skipped)]
    elif (wrapped := _unwrapped(x)) is not x:
        yield name, wrapped


def _unwrapped(x: Any) -> Any:
    """Returns the function of which another one is made, by `st.jit` for example; otherwise ``x`` itself."""
    if not callable(x) or isinstance(x, (type, types.FunctionType)):
        return x
    wrapped = inspect.getattr_static(x, "__wrapped__", None)
    return wrapped if isinstance(wrapped, types.FunctionType) else x


@functools.lru_cache(1024)
def _names_in(code: types.CodeType) -> tuple[Sequence[str], frozenset[str]]:
    """Returns the global names that a function only reads, and the names of variables around it that it sets; those of
    the functions in it included.
    """
    import dis  # Programs of one process do not need it.

    used, own = dict[str, None](), set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            used[instruction.argval] = None
        elif instruction.opname in ("STORE_GLOBAL", "STORE_DEREF") and instruction.argval not in code.co_cellvars:
            own.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, set_there = _names_in(constant)
            used.update(dict.fromkeys(inner))
            own |= set_there - {*code.co_cellvars}
    return tuple([name for name in used if name not in own]), frozenset(own)
