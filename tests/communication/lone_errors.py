"""A program in which the last process only raises an error that depends on elements, and handles it: ``lone_errors.py
EVENT``. The elements of the other processes are valid.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

import shardtensor as st
from shardtensor import distributed
from shardtensor.communication.between_processes.agreement import Agreement
from shardtensor.communication.between_processes.processes import JOB


def count() -> int:
    """The number of elements, of which each device has two."""
    return 2 * st.device_count()


def rows(valid: float, invalid: float, dtype: str = "int64") -> st.ShardedTensor:
    """A tensor whose last element is another one than the others."""
    host = np.full(count(), valid, dtype)
    host[-1] = invalid
    return st.device_put(host, st.NamedSharding(st.make_mesh((st.device_count(),), ("x",)), st.P("x")))


def index_along_an_axis() -> None:
    st.take_along_axis(rows(0, 0), rows(3, count()), axis=0)


def power_of_integers() -> None:
    rows(2, 2) ** rows(3, -1)


def in_place() -> None:
    x = rows(2, 2)
    x **= rows(3, -1)


def compiled() -> None:
    st.jit(lambda x, y: x**y + 1)(rows(2, 2), rows(3, -1))


def floating_point() -> None:
    with np.errstate(all="raise"):
        st.log(rows(1, 0, "float64"))


def nan_in_a_program() -> None:
    """The error is that of all processes, of which the last one only has the NaN at first."""
    with st.debug_nans(), np.errstate(all="ignore"):
        st.jit(lambda x: st.log(x + 0 * x.sum()).sum() * x)(rows(1, -100, "float64"))


def in_a_map() -> None:
    def checked(block: np.ndarray) -> np.ndarray:
        if block.min() < 0:
            raise ValueError("negative rows")
        return st.psum(block.sum(), "x")

    x = rows(1, -1)
    st.shard_map(checked, mesh=x.sharding.mesh, in_specs=st.P("x"), out_specs=st.P())(x)


def callback() -> None:
    def read(index: tuple[slice, ...]) -> np.ndarray:
        if index[0].stop == count():
            raise FileNotFoundError("part 3")
        return np.zeros(count())[index]

    distributed.make_array_from_callback((count(),), rows(1, 1).sharding, read)


def in_all() -> None:
    """All processes raise the same error, and go on."""
    rows(2, 2).reshape(3, count())


EVENTS: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (
        index_along_an_axis, power_of_integers, in_place, compiled, floating_point, in_a_map, callback, in_all,
        nan_in_a_program,
    )
}  # fmt: skip

SEVERAL = ("power_of_integers", "in_place", "compiled", "floating_point", "callback")
"""Events of which the errors are caught, all in one job."""


def attempt(event: str, ending: str) -> None:
    total = rows(1, 1)
    try:
        EVENTS[event]()
    except (IndexError, ValueError, ArithmeticError, OSError) as error:
        print("handles", type(error).__name__, *str(error).partition(", at ")[:1] * isinstance(error, st.NaNError))
    if not ending:
        print("the sum is", int(total.sum()))


def catch_each() -> None:
    """Prints the errors of several events, each with a history of calls of its own, and goes on after one that is in all."""
    engine = JOB.agreement.engine
    for event in SEVERAL:
        JOB.agreement = Agreement(engine, 10)
        try:
            attempt(event, "")
        except st.DistributedError as error:
            print(f"{event}: {error}")
    JOB.agreement = Agreement(engine, 10)
    attempt("in_all", "")
    attempt("nan_in_a_program", "")


if __name__ == "__main__":
    event, _, ending = sys.argv[1].partition("-")
    distributed.initialize(timeout=10)
    if event == "catch_each":
        catch_each()
    else:
        attempt(event, ending)
    distributed.shutdown()
    print("done")
