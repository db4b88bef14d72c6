"""What loops and branches return and transfer, inferred: their functions are called on tensors without elements."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from shardtensor.communication.transfer_log import UNKNOWN_TRIPS, is_recording, record_transfer, recorded_by
from shardtensor.core import call, implements
from shardtensor.errors import ArgumentError
from shardtensor.functions.random.random_keys import Key
from shardtensor.interpreters.control_flow.operators import (
    Carry,
    Function,
    branch,
    branch_number,
    check_condition,
    check_scalar,
    conditional_loop,
    converted,
    counted_loop,
    following,
    integer,
    kind_of,
    owned,
    result_array,
    structure_of,
    text_of,
)
from shardtensor.interpreters.infer import inferring
from shardtensor.interpreters.views.views import stand_in
from shardtensor.tensor.pytree import leaves, map_leaves, paths, replaced
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements, without_elements
from shardtensor.tensor.value import aval


class _Trip:
    """The transfers of one trip of a loop, or of one branch, which are recorded once for each trip."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[[], Any], Sequence[Any]]] = []

    def record(self, records: Callable[[], Any], cached: Callable[[], Any]) -> None:
        """See `TransferListener`."""
        self._calls.append((records, list(cached())))

    def inferred(self) -> contextlib.AbstractContextManager[None]:
        """Records the transfers of the ``with`` block here, if they are recorded. Operators whose transfers follow from
        elements are inferred without these only where nothing is recorded.
        """
        return recorded_by(self) if is_recording() else contextlib.nullcontext()

    @property
    def bytes(self) -> int:
        """The bytes of all transfers."""
        return sum([r.bytes for _, transfers in self._calls for r in transfers])

    def repeat(self, trips: int) -> None:
        """Records the transfers of all trips."""
        for _ in range(trips):
            for records, transfers in self._calls:
                if transfers:
                    nbytes = sum([r.bytes for r in transfers])
                    record_transfer(transfers[0].operator, nbytes, transfers[0].explicit, records)


@implements(counted_loop, "infer")
def infer_counted(init: Carry, xs: Any, bounds: Any, body: Function, reverse: bool, caller: str) -> tuple[Any, Any]:
    """Returns the carry and the stacked results of a loop, and records the transfers of all trips."""
    n = UNKNOWN_TRIPS.get()  # The bounds of a loop whose results are not stacked may be unknown.
    for name, x in zip(("lower", "upper"), bounds, strict=True):
        if lacks_elements(x):
            check_scalar(caller, name, x, "iu")
    if not any(lacks_elements(x) for x in bounds):
        begin, end = [integer(caller, name, x) for name, x in zip(("lower", "upper"), bounds, strict=True)]
        n = max(end - begin, 0)
    known: dict[int, Any] = {}
    start = owned(map_leaves(functools.partial(stand_in, known=known), init))
    slices = functools.partial(_inferred_slice, known)
    carry, trip, y = _infer_trips(caller, start, lambda c: body(0, c, map_leaves(slices, xs)))
    trip.repeat(n)
    return carry, map_leaves(functools.partial(_inferred_stack, caller, n), y)


def _inferred_stack(caller: str, n: int, y: Any) -> Any:
    if y is None:
        return None
    y = result_array(caller, y)
    return call("broadcast_to", y, (n, *y.shape))


def _infer_trips(caller: str, init: Carry, body: Callable[[Carry], tuple[Any, Any]]) -> tuple[Carry, _Trip, Any]:
    """Returns the carry, the transfers of one trip, and the other results of the function.

    Numbers take dtypes, and uncommitted arrays shardings, of what the function returns, so it is called again with
    these.
    """
    carry = init
    for k in (0, 1, 2):
        trip = _Trip()
        with trip.inferred():
            after, y = body(carry)
            new_carry = following(caller, carry, after, is_first=k < 2)
        if all(kind_of(old) == kind_of(new) for old, new in zip(leaves(carry), leaves(new_carry), strict=True)):
            break
        carry = map_leaves(_committed, new_carry)
    return new_carry, trip, y


def _committed(x: Any) -> Any:
    """Returns an inferred value as one to which the same value is assigned in each trip."""
    if type(x) is not ShardedTensor:
        return x
    return without_elements(aval(x.shape, x.dtype, x.sharding, True))


def _inferred_slice(known: dict[int, Any], x: Any) -> Any:
    if x is None:
        return None
    x = stand_in(x, known)
    if not x.shape[0]:
        x = without_elements(aval((1, *x.shape[1:]), x.dtype, x.sharding, x.committed))
    with inferring():  # `explain` does not list it: it is a part of the loop.
        return call("copy", x[0])


@implements(conditional_loop, "infer")
def infer_conditional(init: Carry, cond: Function, body: Function, caller: str) -> Carry:
    """Returns the carry of a loop, and records the transfers of one trip, or of as many as `simulate` assumes."""
    known: dict[int, Any] = {}
    start = owned(map_leaves(functools.partial(stand_in, known=known), init))

    def once(carry: Carry) -> tuple[Carry, Any]:
        check_condition(caller, "cond_fun returned", cond(carry))
        return body(carry), None

    carry, trip, _ = _infer_trips(caller, start, once)
    trip.repeat(UNKNOWN_TRIPS.get())
    return carry


@implements(branch, "infer")
def infer_branch(index: Any, operands: Sequence[Any], branches: Sequence[Function], caller: str) -> Any:
    """Returns the result on which the branches agree, and records the transfers of the one that transfers most."""
    known: dict[int, Any] = {}
    stand_ins = [map_leaves(functools.partial(stand_in, known=known), x) for x in operands]
    if lacks_elements(index):
        check_scalar(caller, "pred" if caller == "cond" else "index", index, "biufc" if caller == "cond" else "biu")
    else:
        branch_number(index, len(branches), caller)
    results, calls = [], [_Trip() for _ in branches]
    for function, one in zip(branches, calls, strict=True):
        with one.inferred():
            results.append(map_leaves(converted, function(*stand_ins)))
    max(calls, key=lambda one: one.bytes).repeat(1)
    names = ("false_fun", "true_fun") if caller == "cond" else [f"branches[{k}]" for k in range(len(branches))]
    first = results[0]
    for k, other in enumerate(results[1:], 1):
        if paths(first, "result") != paths(other, "result"):
            raise ArgumentError(
                f"{caller}: {names[0]} returns {structure_of(first, 'result')}, and {names[k]} "
                f"{structure_of(other, 'result')}; wanted the same structure"
            )
    columns = zip(paths(first, "result"), *[leaves(x) for x in results], strict=True)
    return replaced(first, [_agreed(caller, names, *column) for column in columns])


def _agreed(caller: str, names: Sequence[str], path: str, *values: Any) -> Any:
    """Returns the leaf of the results of all branches. One that is not placed explicitly takes the sharding of one that
    is.
    """
    index = next((k for k, x in enumerate(values) if getattr(x, "committed", True)), 0)
    a = values[index]
    for k, b in enumerate(values):
        n = 3 if getattr(b, "committed", True) else 2
        if kind_of(a)[:n] != kind_of(b)[:n] or not (hasattr(a, "shape") or isinstance(a, Key) or a == b):
            raise ArgumentError(
                f"{caller}: {path} is {text_of(a)} of {names[index]}, and {text_of(b)} of {names[k]}; wanted the same "
                "shape, dtype and sharding: cast or reshard what they return"
            )
    return a
