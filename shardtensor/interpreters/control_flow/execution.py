"""Loops and branches as those of Python: eager mode, maps, and the trips of programs that no kernel runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.protocol import current_device
from shardtensor.communication.transfer_log import recorded_by
from shardtensor.core import call, implements
from shardtensor.errors import ArgumentError, ShapeError
from shardtensor.host import blockwise
from shardtensor.interpreters.control_flow.inference import infer_branch, infer_conditional, infer_counted
from shardtensor.interpreters.control_flow.operators import (
    Carry,
    Function,
    branch,
    branch_number,
    check_condition,
    conditional_loop,
    converted,
    counted_loop,
    following,
    integer,
    kind_of,
    lack_elements,
    owned,
    read,
    result_array,
)
from shardtensor.interpreters.infer import inferring
from shardtensor.tensor.pytree import leaves, map_leaves, paths, replaced
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements, mark_array, tensor


@implements(counted_loop, "algorithm")
def _run_counted(init: Carry, xs: Any, bounds: Any, body: Function, reverse: bool, caller: str) -> tuple[Any, Any]:
    if lack_elements((init, xs, bounds)):
        with inferring():
            return infer_counted(init, xs, bounds, body, reverse, caller)
    begin, end = [integer(caller, name, x) for name, x in zip(("lower", "upper"), bounds, strict=True)]
    if end <= begin:
        return _without_trips(init, xs, bounds, body, reverse, caller)
    carry, slices = owned(init), [None if x is None else _Slices(x) for x in leaves(xs)]
    first, names, stacks = None, paths(None, "y"), list[Any]()
    for k in range(begin, end):
        i = begin + end - 1 - k if reverse else k
        after, y = body(i, carry, replaced(xs, [x and x.at(i) for x in slices]))
        carry = _next(caller, carry, after, body, is_first=k == begin)
        if k == begin:
            first, names, stacks = y, paths(y, "y"), _stacks(caller, end - begin, y)
        elif not keeps_avals(body):
            if paths(y, "y") != names:
                raise ArgumentError(f"{caller}: the results of f differ in structure; wanted the same in each trip")
            if k == begin + 1 and _has_changed(first, y):  # The first trip had a number, or an array in another layout.
                stacks = _stacks(caller, end - begin, y)
                _put(caller, names, stacks, i + 1 - begin if reverse else 0, first)
        _put(caller, names, stacks, i - begin, y)
    return owned(carry), replaced(y, [stack and stack.array for stack in stacks])


def _next(caller: str, before: Carry, after: Carry, body: Function, *, is_first: bool) -> Carry:
    """Returns the next carry, of arrays; the one that a program returns is as it is wanted."""
    return after if keeps_avals(body) and not is_first else following(caller, before, after, is_first=is_first)


def keeps_avals(function: Function) -> bool:
    """Returns whether a function is a program, so that its arrays have the same avals in each trip."""
    return getattr(function, "keeps_avals", False)


class _Slices:
    """The slices of an array, to which the function may write."""

    def __init__(self, x: Any) -> None:
        self._x = x
        is_split = type(x) is ShardedTensor and bool(x.sharding.spec.chains_of(x.ndim)[0])
        self._buffer = None if is_split else _host_buffer(x)  # Slices of a split dimension are transferred.
        self._first: Any = None

    def at(self, i: int) -> Any:
        """Returns a slice."""
        if self._first is None or self._buffer is None:
            array = call("copy", self._x[i])
            self._first = self._first or (array._aval, array._is_scalar) if self._buffer is not None else None
            return array
        value, is_scalar = self._first
        array = tensor(value, Storage((blockwise.copied(self._buffer[i, ...]),), ([],)))
        return array if is_scalar else mark_array(array)


def _stacks(caller: str, n: int, y: Any) -> list[Any]:
    """Returns a stack for n results like each leaf of y."""
    return [None if one is None else _Stack(n, result_array(caller, one)) for one in leaves(y)]


def _put(caller: str, names: Sequence[str], stacks: Sequence[Any], k: int, y: Any) -> None:
    """Writes the results of a trip."""
    for name, stack, one in zip(names, stacks, leaves(y), strict=True):
        if stack is not None:
            stack.put(caller, name, k, one)


def _has_changed(first: Any, second: Any) -> bool:
    """Whether results of the second trip have other dtypes or layouts than those of the first one."""
    return [kind_of(converted(x))[1:] for x in leaves(first)] != [kind_of(converted(x))[1:] for x in leaves(second)]


class _Stack:
    """The stacked results of a loop.

    Args:
        n: the number of trips.
        y: the result of the first one that runs.

    Attributes:
        array: the stacked results.
    """

    def __init__(self, n: int, y: Any) -> None:
        self.array = call("copy", call("broadcast_to", y, (n, *y.shape)))
        self._buffer: Any = None
        self._shape, self._dtype = tuple(y.shape), y.dtype

    def put(self, caller: str, name: str, k: int, y: Any) -> None:
        """Writes the result of a trip.

        Raises:
            ShapeError: it has another shape than that of the first trip.
        """
        array = converted(y)
        if tuple(array.shape) != self._shape:
            raise ShapeError(
                f"{caller}: {name} has shape {tuple(array.shape)}, and {self._shape} in the first trip; wanted results "
                "of one shape"
            )
        if self._buffer is not None and (buffer := _host_buffer(array)) is not None and array.dtype == self._dtype:
            blockwise.copy_into(self._buffer[k, ...], buffer)
            return
        self.array[k] = array
        # Nothing else has the memory after the first write.
        self._buffer = _host_buffer(self.array)


def _host_buffer(x: Any) -> Any:
    """Returns the buffer of a tensor in the memory of the host that all its devices share; None for others."""
    if type(x) is not ShardedTensor or type(x._storage) is not Storage or len(x._storage.buffers) != 1:
        return None
    value = x._aval
    shared = value.memory is not None and value.backend.on_host and not value.backend.simulated
    return x._storage.buffers[0] if shared and isinstance(x._storage.buffers[0], np.ndarray) else None


def _without_trips(init: Carry, xs: Any, bounds: Any, body: Function, reverse: bool, caller: str) -> tuple[Any, Any]:
    """Returns the initial carry, and stacks of length 0."""
    with inferring(), recorded_by():
        carry, ys = infer_counted(init, xs, (0, 0), body, reverse, caller)
    return owned(_placed(init, carry)), map_leaves(_empty_like, ys)


def _placed(init: Carry, carry: Carry) -> Carry:
    """Returns an initial carry, which no trip has changed, with the dtypes and layouts of an inferred one."""
    return replaced(init, [_like(x, a) for x, a in zip(leaves(init), leaves(carry), strict=True)])


def _like(x: Any, target: Any) -> Any:
    """Returns an initial value as an array with the dtype and sharding of the carry."""
    if type(target) is not ShardedTensor:
        return x
    if current_device() is not None:
        return call("asarray", x, dtype=target.dtype)
    return call("reshard", call("asarray", x, dtype=target.dtype), target.sharding)


def _empty_like(x: Any) -> Any:
    if x is None or current_device() is not None:
        return None if x is None else call("zeros", x.shape, dtype=x.dtype)
    return call("zeros", x.shape, dtype=x.dtype, device=x.sharding)


@implements(conditional_loop, "algorithm", "announcing")
def _run_conditional(init: Carry, cond: Function, body: Function, caller: str) -> Carry:
    if lack_elements(init):
        with inferring():
            return infer_conditional(init, cond, body, caller)
    carry, is_first = owned(init), True
    while _is_true(caller, "cond_fun returned", cond(carry)):
        carry, is_first = _next(caller, carry, body(carry), body, is_first=is_first), False
    if is_first:
        with inferring(), recorded_by():
            inferred = infer_conditional(init, cond, body, caller)
        carry = _placed(init, inferred)
    return owned(carry)


def _is_true(caller: str, what: str, x: Any) -> bool:
    """Returns a condition as a bool, which in a job is the same in all processes."""
    check_condition(caller, what, x)
    return bool(read(x))


@implements(branch, "algorithm", "announcing")
def _run_branch(index: Any, operands: Sequence[Any], branches: Sequence[Function], caller: str) -> Any:
    if lacks_elements(index):
        with inferring():
            return infer_branch(index, operands, branches, caller)
    return owned(map_leaves(converted, branches[branch_number(index, len(branches), caller)](*operands)))
