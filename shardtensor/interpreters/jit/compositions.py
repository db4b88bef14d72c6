"""Elementwise compositions on GPUs: the operators of a call are one program of `jit`: one kernel for each GPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from shardtensor.core import Function
from shardtensor.errors import ShardTensorError
from shardtensor.interpreters.jit.api import JitFunction, jit
from shardtensor.interpreters.programs.program import exact_key
from shardtensor.tensor.tensor import SCALARS, ShardedTensor

_CONSTANTS = (*SCALARS, type(None), str)

_MOST = 1024
"""The maximum number of programs that are kept."""

_programs: dict[Any, JitFunction[Any, Any]] = {}

_ARRAY = object()
"""Stands for an array among the arguments."""


def compiled_call(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of a composition by its program, for arguments among which are tensors on GPUs; NotImplemented
    where the composition has to run: for other arguments than arrays, numbers and texts, and for those that it refuses.
    """
    arrays, constants, keys = [], [], []
    for x in (*args, *kwargs.values()):
        if type(x) is ShardedTensor or type(x) is np.ndarray:
            arrays.append(x)
            constants.append(_ARRAY)
            keys.append(_ARRAY)
        elif type(x) in _CONSTANTS:
            constants.append(x)
            keys.append(exact_key(x))
        else:
            return NotImplemented
    key = (function, len(args), tuple(kwargs), *keys)
    program = _programs.get(key)
    if program is None:
        if len(_programs) >= _MOST:
            _programs.clear()  # in one step, as other threads may do the same
        program = _programs[key] = jit(_of_arrays(function, constants, tuple(kwargs)))
    try:
        return program(*arrays)
    except ShardTensorError:  # The composition raises the error, in its own name.
        return NotImplemented


def _of_arrays(function: Function, constants: list[Any], names: tuple[str, ...]) -> Function:
    """Returns a composition as a function of its arrays."""
    count = len(constants) - len(names)

    @functools.wraps(function)
    def call(*arrays: Any) -> Any:
        rest = iter(arrays)
        given = [next(rest) if x is _ARRAY else x for x in constants]
        return function(*given[:count], **dict(zip(names, given[count:], strict=True)))

    return call
