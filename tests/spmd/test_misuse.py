"""Misuse of mapped functions and collectives: every case ends in time with an error that names the operator and the
device, or with the user's own error; and the next map works.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

import shardtensor as st
from shardtensor.errors import message_of
from tests.spmd.test_scheduler import (
    hard_end,  # noqa: F401 - the first one works by being here
    in_time,
    total_works,
)

LIMIT = 10.0
"""Seconds that a case may take."""

SOME = ["numpy", "checked"]


class Case(NamedTuple):
    """One misuse.

    Attributes:
        name: what it is called.
        call: the misuse, given the devices of a backend.
        kind: what it raises.
        words: what the message or a note of the error says, with ``{b}`` for the backend's name.
    """

    name: str
    call: Callable[[list[st.Device]], Any]
    kind: type[BaseException]
    words: tuple[str, ...]


CASES: list[Case] = []


def case(name: str, kind: type[BaseException], *words: str) -> Callable[[Any], Any]:
    def add(call: Any) -> Any:
        CASES.append(Case(name, call, kind, words))
        return call

    return add


class Mine(Exception):
    """The user's own error."""


def over(fn: Callable[[Any], Any], devices: list[st.Device], count: int = 4, name: str | None = "i") -> Any:
    """Maps over as many arrays of three numbers."""
    return st.pmap(fn, [np.arange(3.0) + k for k in range(count)], axis_name=name, devices=devices[:count])


def at_2(here: Any, elsewhere: Any) -> Any:
    """Returns one value on the third device and another on all others."""
    return here if st.axis_index("i") == 2 else elsewhere


# -- each collective -------------------------------------------------------------------------------

RING = [(k, (k + 1) % 4) for k in range(4)]
COLLECTIVES: dict[str, Callable[[Any, Any], Any]] = {
    "psum": lambda x, name: st.psum(x, name),
    "pmean": lambda x, name: st.pmean(x, name),
    "pmax": lambda x, name: st.pmax(x, name),
    "pmin": lambda x, name: st.pmin(x, name),
    "pprod": lambda x, name: st.pprod(x, name),
    "psum_scatter": lambda x, name: st.psum_scatter(x, name, tiled=True),
    "all_gather": lambda x, name: st.all_gather(x, name),
    "all_to_all": lambda x, name: st.all_to_all(x, name, 0, 0, tiled=True),
    "pswapaxes": lambda x, name: st.pswapaxes(x, name, 0),
    "ppermute": lambda x, name: st.ppermute(x, name, RING),
    "pshuffle": lambda x, name: st.pshuffle(x, name, [3, 2, 1, 0]),
    "pbroadcast": lambda x, name: st.pbroadcast(x, name, 0),
    "ragged_all_to_all": lambda x, name: st.ragged_all_to_all(x, x, *[np.zeros(4, int)] * 4, axis_name=name),
    "axis_index": lambda x, name: st.axis_index(name),
    "axis_size": lambda x, name: st.axis_size(name),
}
MEET = [who for who in COLLECTIVES if not who.startswith("axis_")]
"""Those in which programs meet."""


def for_each_collective(who: str, collective: Callable[[Any, Any], Any]) -> None:
    def arrays(x: Any) -> Any:  # four numbers, as many as there are devices
        return st.concat([x, x[:1]])

    @case(f"{who} outside of maps", st.ShardingError, f"{who}: there is no mapped function around this call")
    def outside(d: Any) -> Any:
        return collective(np.zeros(4), "i")

    @case(
        f"{who} over an unbound name", st.ShardingError, f"{who}: no axis is called 'k'", "bind 'i'", "shard 0 on {b}:0"
    )
    def unbound(d: Any) -> Any:
        return over(lambda x: collective(x, "k"), d)

    @case(f"{who} in a map without a name", st.ShardingError, f"{who}: no axis is called 'i'", "names its axis")
    def nameless(d: Any) -> Any:
        return over(lambda x: collective(x, "i"), d, name=None)

    @case(f"{who} over a number", st.ArgumentTypeError, f"{who}: axis_name is 0")
    def numbered(d: Any) -> Any:
        return over(lambda x: collective(x, 0), d)

    @case(f"{who} over an axis twice", st.ShardingError, f"{who}: axis 'i' occurs twice")
    def twice(d: Any) -> Any:
        return over(lambda x: collective(x, ("i", "i")), d)

    @case(f"{who} in another thread", st.ShardingError, f"{who}: there is no mapped function around this call")
    def threaded(d: Any) -> Any:
        def fn(x: Any) -> Any:
            # Without a GIL, threads inherit the context of their starter by default.
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(contextvars.Context().run, collective, x, "i").result(LIMIT)

        return over(fn, d)

    if who not in MEET:
        return

    @case(
        f"{who} and an early return",
        st.CollectiveError,
        f"{who} over 'i'",
        "{b}:2 returned",
        "{b}:0, {b}:1, {b}:3 called",
    )
    def returns(d: Any) -> Any:
        return over(lambda x: at_2(lambda: x, lambda: collective(arrays(x), "i"))(), d)

    @case(f"{who} and an error before it", Mine, "on purpose", "shard 2 on {b}:2")
    def raises(d: Any) -> Any:
        def fn(x: Any) -> Any:
            if st.axis_index("i") == 2:
                raise Mine("on purpose")
            return collective(arrays(x), "i")

        return over(fn, d)

    @case(f"{who} and another collective", st.CollectiveError, "over 'i'", "{b}:2 called", f"called {who} over 'i'")
    def other(d: Any) -> Any:
        another = "pmin" if who == "psum" else "psum"
        return over(lambda x: COLLECTIVES[at_2(another, who)](arrays(x), "i"), d)

    @case(f"{who} once more", st.CollectiveError, f"{who} over 'i'", "{b}:2 called", "{b}:0, {b}:1, {b}:3 returned")
    def again(d: Any) -> Any:
        return over(lambda x: (collective(arrays(x), "i"), at_2(lambda: collective(arrays(x), "i"), int)()), d)

    if who == "ragged_all_to_all":
        return  # Its arguments are several arrays: see `test_ragged_exchange`.

    @case(f"{who} of another dtype", st.CollectiveError, f"{who} over 'i'", "{b}:2 called", "float32", "float64")
    def dtype(d: Any) -> Any:
        return over(lambda x: collective(st.astype(arrays(x), at_2("float32", "float64")), "i"), d)

    @case(f"{who} of another tree", st.CollectiveError, f"{who} over 'i'", "{b}:2 called", "a tree", "{{'k': *}}")
    def tree(d: Any) -> Any:
        return over(lambda x: collective(at_2({"k": arrays(x)}, [arrays(x)]), "i"), d)

    @case(f"{who} of another number of dimensions", st.CollectiveError, f"{who} over 'i'", "{b}:2 called")
    def ndim(d: Any) -> Any:
        return over(lambda x: collective(at_2(st.reshape(arrays(x), (2, 2)), arrays(x)), "i"), d)

    @case(f"{who} of text", st.ArgumentTypeError, f"{who}: x is a str", "{b}:0")
    def text(d: Any) -> Any:
        return over(lambda x: collective("text", "i"), d)

    @case(f"{who} of objects", st.ArgumentTypeError, f"{who}: x is")
    def objects(d: Any) -> Any:
        return over(lambda x: collective({"k": np.array([None, {}], object)}, "i"), d)


for _who, _collective in COLLECTIVES.items():
    for_each_collective(_who, _collective)

# -- their arguments -------------------------------------------------------------------------------


def argument_cases() -> None:
    E, T, C = st.ArgumentError, st.ArgumentTypeError, st.CollectiveError
    rows: list[tuple[str, Callable[[Any], Any], type[BaseException], tuple[str, ...]]] = [
        ("a source that is not there", lambda x: st.ppermute(x, "i", [(4, 0)]),
         E, ("ppermute: perm has the source 4", "'i'", "0 to 3")),
        ("a destination that is not there", lambda x: st.ppermute(x, "i", [(0, 9)]),
         E, ("ppermute: perm has the destination 9",)),
        ("a negative destination", lambda x: st.ppermute(x, "i", [(0, -1)]),
         E, ("ppermute: perm has the destination -1",)),
        ("a source twice", lambda x: st.ppermute(x, "i", [(0, 1), (0, 2)]),
         E, ("ppermute: perm has the source 0 twice",)),
        ("a destination twice", lambda x: st.ppermute(x, "i", [(0, 1), (2, 1)]),
         E, ("ppermute: perm has the destination 1 twice",)),
        ("no pairs", lambda x: st.ppermute(x, "i", [0, 1, 2, 3]), T, ("ppermute: perm is [0, 1, 2, 3]", "pairs")),
        ("triples", lambda x: st.ppermute(x, "i", [(0, 1, 2)]), T, ("ppermute: perm is [(0, 1, 2)]",)),
        ("perm None", lambda x: st.ppermute(x, "i", None), T, ("ppermute: perm is None",)),
        ("perm of floats", lambda x: st.ppermute(x, "i", [(0.0, 1.0)]), T, ("ppermute: perm is [(0.0, 1.0)]",)),
        ("perm of text", lambda x: st.ppermute(x, "i", "ab"), T, ("ppermute: perm is 'ab'",)),
        ("perm of bools", lambda x: st.ppermute(x, "i", [(True, False)]), T, ("ppermute: perm is [(True, False)]",)),
        ("another perm", lambda x: st.ppermute(x, "i", at_2([(0, 1)], [(1, 0)])),
         C, ("ppermute over 'i' with perm", "{b}:2 called", "((0, 1),)")),
        ("no permutation", lambda x: st.pshuffle(x, "i", [0, 0, 1, 2]),
         E, ("pshuffle: perm is [0, 0, 1, 2]", "0 to 3")),
        ("a short permutation", lambda x: st.pshuffle(x, "i", [0, 1]), E, ("pshuffle: perm is [0, 1]",)),
        ("a long permutation", lambda x: st.pshuffle(x, "i", range(5)), E, ("pshuffle: perm is [0, 1, 2, 3, 4]",)),
        ("a permutation of floats", lambda x: st.pshuffle(x, "i", [0.0, 1.0, 2.0, 3.0]),
         T, ("pshuffle: perm is [0.0,",)),
        ("a permutation of pairs", lambda x: st.pshuffle(x, "i", RING), T, ("pshuffle: perm is [(0, 1)",)),
        ("a permutation None", lambda x: st.pshuffle(x, "i", None), T, ("pshuffle: perm is None",)),
        ("another permutation", lambda x: st.pshuffle(x, "i", at_2([1, 0, 2, 3], [0, 1, 2, 3])),
         C, ("pshuffle over 'i' with perm", "{b}:2 called")),
        ("a source out of range", lambda x: st.pbroadcast(x, "i", 4), E, ("pbroadcast: source is 4", "'i'", "0 to 3")),
        ("a negative source", lambda x: st.pbroadcast(x, "i", -1), E, ("pbroadcast: source is -1",)),
        ("a source of text", lambda x: st.pbroadcast(x, "i", "0"), T, ("pbroadcast: source is '0'",)),
        ("a source None", lambda x: st.pbroadcast(x, "i", None), T, ("pbroadcast: source is None",)),
        ("a source array", lambda x: st.pbroadcast(x, "i", np.array([0, 1])),
         T, ("pbroadcast: source is array([0, 1])",)),
        ("another source", lambda x: st.pbroadcast(x, "i", at_2(0, 1)),
         C, ("pbroadcast over 'i' with source = 0", "{b}:2 called")),
        ("another shape to sum", lambda x: st.psum(at_2(x[:2], x), "i"),
         C, ("psum over 'i'", "float64[2]", "{b}:2", "float64[3]")),
        ("a scalar beside arrays", lambda x: st.psum(at_2(1.0, x), "i"),
         C, ("psum over 'i'", "{b}:2 called", "a Python scalar")),
        ("a None beside arrays", lambda x: st.psum(at_2(None, x), "i"), C, ("psum over 'i'", "{b}:2 called")),
        ("other keys", lambda x: st.psum({at_2("a", "b"): x}, "i"), C, ("psum over 'i' with a tree", "{b}:2 called")),
        ("a function", lambda x: st.psum(lambda: x, "i"), T, ("psum: x is a function",)),
        ("a set", lambda x: st.psum({1, 2}, "i"), T, ("psum: x is a set",)),
        ("a generator", lambda x: st.psum((x for _ in "a"), "i"), T, ("psum: x is a generator",)),
        ("a mesh", lambda x: st.psum(st.make_mesh((1,), ("x",)), "i"), T, ("psum: x is a Mesh",)),
        ("dates summed", lambda x: st.psum(np.array(["2020-01-01"], "datetime64[D]"), "i"),
         st.ShardTensorError, ("psum",)),
        ("no axis name", lambda x: st.psum(x, None), T, ("psum: axis_name is None",)),
        ("a name that cannot be hashed", lambda x: st.psum(x, {"i": 1}), T, ("psum: axis_name is {{'i': 1}}",)),
        ("a name in a tuple that cannot be hashed", lambda x: st.psum(x, ("i", ["j"])), T,
         ("psum: axis_name is ('i', ['j'])",)),
        ("names in any order with one that is a number", lambda x: st.ppermute(x, ("i", 2), [(0, 1)]), T,
         ("ppermute: axis_name is ('i', 2)",)),
        ("a list with a number", lambda x: st.psum(x, ["i", 2]), T, ("psum: axis_name is", "'i', 2")),
        ("an empty name", lambda x: st.psum(x, ""), st.ShardingError, ("psum: no axis is called ''",)),
        ("the name of an unnamed axis", lambda x: st.psum(x, "#0"),
         st.ShardingError, ("psum: no axis is called '#0'",)),
        ("groups that lack an index", lambda x: st.psum(x, "i", axis_index_groups=[[0, 1], [2]]),
         E, ("psum: axis_index_groups is [[0, 1], [2]]",)),
        ("groups with an index twice", lambda x: st.psum(x, "i", axis_index_groups=[[0, 1, 2, 3, 3]]),
         E, ("psum: axis_index_groups", "once")),
        ("groups with an index too large", lambda x: st.psum(x, "i", axis_index_groups=[[0, 1], [2, 4]]),
         E, ("psum: axis_index_groups", "0 to 3")),
        ("groups that are none", lambda x: st.psum(x, "i", axis_index_groups=[0, 1, 2, 3]),
         T, ("psum: axis_index_groups is [0, 1, 2, 3]",)),
        ("groups of text", lambda x: st.psum(x, "i", axis_index_groups=["ab"]),
         st.ShardTensorError, ("psum: axis_index_groups is ['ab']",)),
        ("groups of floats", lambda x: st.psum(x, "i", axis_index_groups=[[0.5, 1, 2, 3]]),
         T, ("psum: axis_index_groups is [[0.5,",)),
        ("other groups", lambda x: st.psum(x, "i", axis_index_groups=at_2([[0, 1, 2, 3]], [[0, 1], [2, 3]])),
         C, ("psum over 'i'", "{b}:2")),
        ("a dimension to scatter that is not there", lambda x: st.psum_scatter(x, "i", scatter_dimension=1),
         st.AxisError, ("psum_scatter: scatter_dimension is 1", "1 dimension")),
        ("a dimension to scatter of text", lambda x: st.psum_scatter(x, "i", scatter_dimension="0"),
         T, ("psum_scatter: scatter_dimension is '0'",)),
        ("a size to scatter that does not fit", lambda x: st.psum_scatter(x, "i"),
         st.ShapeError, ("psum_scatter: x of shape (3,)", "'i'", "4 devices", "tiled=True")),
        ("another dimension to scatter", lambda x: st.psum_scatter(x, "i", scatter_dimension=at_2(-1, 0), tiled=True),
         C, ("psum_scatter over 'i' with scatter_dimension = -1", "{b}:2")),
        ("an array of no dimensions scattered", lambda x: st.psum_scatter(x.sum(), "i", tiled=True),
         st.AxisError, ("psum_scatter: scatter_dimension is 0", "0 dimensions")),
        ("tiled on one device", lambda x: st.all_gather(x, "i", tiled=at_2(True, False)),
         C, ("all_gather over 'i' with tiled = True", "{b}:2")),
        ("an axis to gather along that is not there", lambda x: st.all_gather(x, "i", axis=2),
         st.AxisError, ("all_gather: axis is 2", "2 dimensions")),
        ("an axis to gather along of text", lambda x: st.all_gather(x, "i", axis="x"), T, ("all_gather: axis is 'x'",)),
        ("an axis to gather along None", lambda x: st.all_gather(x, "i", axis=None), T, ("all_gather: axis is None",)),
        ("unequal shapes stacked", lambda x: st.all_gather(at_2(x[:1], x), "i"),
         st.ShapeError, ("all_gather: {b}:0 has shape (3,) and {b}:2 (1,)",)),
        ("shapes that do not join", lambda x: st.all_gather(st.ones((2, at_2(2, 3))), "i", tiled=True),
         st.ShapeError, ("all_gather: {b}:0 has shape (2, 3) and {b}:2 (2, 2)", "dimension 0")),
        ("scalars joined", lambda x: st.all_gather(1.0, "i", tiled=True),
         st.AxisError, ("all_gather: axis is 0", "0 dimensions")),
        ("a dimension to split that is not there", lambda x: st.all_to_all(x, "i", 1, 0, tiled=True),
         st.AxisError, ("all_to_all: split_axis is 1",)),
        ("a dimension to join that is not there", lambda x: st.all_to_all(x, "i", 0, 3, tiled=True),
         st.AxisError, ("all_to_all: concat_axis is 3",)),
        ("a dimension to split of text", lambda x: st.all_to_all(x, "i", "0", 0),
         T, ("all_to_all: split_axis is '0'",)),
        ("a size to split that does not fit", lambda x: st.all_to_all(x, "i", 0, 0),
         st.ShapeError, ("all_to_all: x of shape (3,)", "4 devices")),
        ("a size that does not fit on one device", lambda x: st.all_to_all(st.ones(at_2(3, 4)), "i", 0, 0),
         st.ShapeError, ("all_to_all: x of shape (3,)",)),
        ("other dimensions to split", lambda x: st.all_to_all(st.ones((4, 4)), "i", at_2(1, 0), 0),
         C, ("all_to_all over 'i' with split_axis = 1", "{b}:2")),
        ("a dimension to swap that is not there", lambda x: st.pswapaxes(x, "i", 5),
         st.AxisError, ("pswapaxes: ", "is 5")),
        ("a dimension to swap of another size", lambda x: st.pswapaxes(x, "i", 0),
         st.ShapeError, ("pswapaxes: x of shape (3,)", "4 devices")),
        ("a dimension to swap None", lambda x: st.pswapaxes(x, "i", None), T, ("pswapaxes: ", "None")),
    ]  # fmt: skip
    for name, fn, kind, words in rows:
        case(name, kind, *words)(lambda d, fn=fn: over(fn, d))


argument_cases()

# -- orders and nests ------------------------------------------------------------------------------


@case("another order", st.CollectiveError, "over 'i'", "{b}:2 called", "same order")
def order(d: Any) -> Any:
    def fn(x: Any) -> Any:
        steps = [lambda: st.psum(x, "i"), lambda: st.pmax(x, "i")]
        return [step() for step in at_2(steps[::-1], steps)]

    return over(fn, d)


@case("an odd device", st.CollectiveError, "{b}:1 called pmax", "{b}:0 called psum over 'i' (2 others had not called")
def odd(d: Any) -> Any:
    return over(lambda x: (st.pmax if st.axis_index("i") == 1 else st.psum)(x, "i"), d)


@case("another order along two axes", st.CollectiveError, "psum over 'x'", "psum over 'y'", "{b}:0")
def order_of_axes(d: Any) -> Any:
    mesh = st.make_mesh((2, 2), ("x", "y"), devices=d)

    @st.shard_map(mesh=mesh, in_specs=st.P("x", "y"), out_specs=st.P("x", "y"))
    def fn(x: Any) -> Any:
        names = ["x", "y"] if st.axis_index("x") == st.axis_index("y") else ["y", "x"]
        for name in names:
            x = st.psum(x, name)
        return x

    return fn(np.ones((2, 2)))


@case("axes named in another order", st.CollectiveError, "('y', 'x')", "('x', 'y')")
def order_of_names(d: Any) -> Any:
    mesh = st.make_mesh((2, 2), ("x", "y"), devices=d)

    @st.shard_map(mesh=mesh, in_specs=st.P("x", "y"), out_specs=st.P("x", "y"))
    def fn(x: Any) -> Any:
        return st.psum(x, ("x", "y") if st.axis_index("x") else ("y", "x"))

    return fn(np.ones((2, 2)))


@case(
    "a collective in a branch of the data",
    st.CollectiveError,
    "psum over 'i'",
    "{b}:3 called",
    "returned without such a call",
)
def branch(d: Any) -> Any:
    return over(lambda x: st.psum(x, "i") if x[0] > 2 else x, d)


@case(
    "a loop that ends early on one device", st.CollectiveError, "psum over 'i'", "{b}:1 returned", "{b}:0, {b}:2, {b}:3"
)
def loop(d: Any) -> Any:
    def fn(x: Any) -> Any:
        for _ in range(3 if st.axis_index("i") == 1 else 5):
            x = st.psum(x, "i")
        return x

    return over(fn, d)


@case("an error after a collective", Mine, "on purpose", "shard 3 on {b}:3")
def raises_late(d: Any) -> Any:
    def fn(x: Any) -> Any:
        if st.psum(x, "i")[0] and st.axis_index("i") == 3:
            raise Mine("on purpose")
        return st.psum(x, "i")

    return over(fn, d)


@case("an error on every device", Mine, "from 0", "shard 0 on {b}:0")
def raises_everywhere(d: Any) -> Any:
    def fn(x: Any) -> Any:
        st.psum(x, "i")
        raise Mine(f"from {st.axis_index('i')}")

    return over(fn, d)


@case("an error that is swallowed", st.CollectiveError, "{b}:2 returned")
def swallowed(d: Any) -> Any:
    def fn(x: Any) -> Any:
        if st.axis_index("i") == 2:
            return x
        try:
            return st.psum(x, "i")
        except st.CollectiveError:
            return x

    return over(fn, d)


@case("another collective after one that failed", st.CollectiveError, "{b}:2 returned")
def after_failure(d: Any) -> Any:
    def fn(x: Any) -> Any:
        if st.axis_index("i") == 2:
            return x
        for name in ("psum", "pmax", "all_gather"):
            try:
                return COLLECTIVES[name](x, "i")
            except st.CollectiveError:
                continue
        return st.psum(x, "i")

    return over(fn, d)


@case("SystemExit on one device", SystemExit, "7")
def leaves(d: Any) -> Any:
    def fn(x: Any) -> Any:
        if st.axis_index("i") == 1:
            raise SystemExit(7)
        return st.psum(x, "i")

    return over(fn, d)


@case("GeneratorExit on one device", GeneratorExit)
def generator_exit(d: Any) -> Any:
    def fn(x: Any) -> Any:
        if st.axis_index("i") == 1:
            raise GeneratorExit
        return st.psum(x, "i")

    return over(fn, d)


@case("StopIteration on one device", StopIteration, "shard 1 on {b}:1")
def stop(d: Any) -> Any:
    return over(lambda x: next(iter(())) if st.axis_index("i") == 1 else st.psum(x, "i"), d)


@case("recursion without end on one device", RecursionError, "shard 1 on {b}:1")
def recursion(d: Any) -> Any:
    def deep(n: int) -> int:
        return deep(n + 1) + 1

    return over(lambda x: deep(0) if st.axis_index("i") == 1 else st.psum(x, "i"), d)


def grid_of(d: Any) -> Any:
    return [[float(4 * i + j) for j in range(3)] for i in range(2)]


def nested(inner: Callable[[Any], Any], d: Any, name: str | None = "j", outer: Any = lambda made: made) -> Any:
    mesh = st.make_mesh((2, 3), ("a", "b"), devices=d)
    return st.pmap(
        lambda x: outer(st.pmap(inner, x, axis_name=name)), np.arange(6.0).reshape(2, 3), axis_name="i", devices=mesh
    )


@case(
    "an early return inside, over both axes", st.CollectiveError, "psum over ('i', 'j')", "5 called", "; {b}:4 returned"
)
def nested_return(d: Any) -> Any:
    return nested(lambda x: x if st.axis_index(("i", "j")) == 4 else st.psum(x, ("i", "j")), d)


@case(
    "an early return inside, over the outer axis",
    st.CollectiveError,
    "{b}:1 called psum over 'i'; {b}:3..{b}:5 returned",
)
def nested_return_outer(d: Any) -> Any:
    return nested(lambda x: x if st.axis_index(("i", "j")) == 4 else st.psum(x, "i"), d)


@case(
    "an early return beside a program that waits", st.CollectiveError, "; {b}:4 returned", "{b}:3 called psum over 'j'"
)
def nested_return_beside(d: Any) -> Any:
    def inner(x: Any) -> Any:
        place = st.axis_index("i"), st.axis_index("j")
        return x if place == (1, 1) else st.psum(x, "j" if place == (1, 0) else ("i", "j"))

    return nested(inner, d)


@case(
    "a map that was not called beside one that was",
    st.CollectiveError,
    "called pmax over 'i'",
    "{b}:5 called psum over 'i': no",
)
def nested_not_called(d: Any) -> Any:
    def outer(x: Any) -> Any:
        if st.axis_index("i") == 0:
            st.pmax(x, "i")
        return st.pmap(lambda y: st.psum(y, "i"), x, axis_name="j")

    mesh = st.make_mesh((2, 3), ("a", "b"), devices=d)
    with st.set_num_threads(1):  # several may call in another order
        return st.pmap(outer, np.ones((2, 3)), axis_name="i", devices=mesh)


@case(
    "an error inside",
    Mine,
    "on purpose",
    "pmap: raised for shard 1 on {b}:4",
    "pmap: raised for shard 1 on {b}:3..{b}:5",
)
def nested_raise(d: Any) -> Any:
    def inner(x: Any) -> Any:
        if st.axis_index(("i", "j")) == 4:
            raise Mine("on purpose")
        return st.psum(x, ("j", "i"))

    return nested(inner, d)


@case(
    "another collective inside one of the outer calls",
    st.CollectiveError,
    "over 'i'",
    "called pmax over 'i'",
    "called psum over 'i'",
)
def nested_other(d: Any) -> Any:
    return nested(lambda x: st.pmax(x, "i") if st.axis_index("i") else st.psum(x, "i"), d)


@case("one level waits for another", st.CollectiveError, "psum over 'i'", "{b}:0..{b}:2")
def level_waits_for_level(d: Any) -> Any:
    def outer(x: Any) -> Any:
        if st.axis_index("i") == 0:
            return st.psum(x, "i")
        return st.pmap(lambda y: st.psum(y, "i"), x)

    return st.pmap(outer, np.zeros((2, 3)), axis_name="i", devices=st.make_mesh((2, 3), ("a", "b"), devices=d))


@case(
    "an inner map in one of the outer calls only",
    st.CollectiveError,
    "psum over 'i'",
    "{b}:0",
    "no two of these calls match",
)
def one_inner(d: Any) -> Any:
    def outer(items: Any) -> Any:
        return st.pmap(lambda y: st.psum(y, "i"), items) if st.axis_index("i") == 0 else items

    return st.pmap(outer, grid_of(d), axis_name="i", devices=d[:2])


@case(
    "a deadlock in which each waits",
    st.CollectiveError,
    "{b}:0, {b}:1, {b}:3 called pmax over ('x', 'y')",
    "{b}:2 called psum over 'y': no two",
)
def nobody_returned(d: Any) -> Any:
    def body() -> None:
        if st.axis_index(("x", "y")) != 3:
            st.psum(np.ones(2), "y")
        st.pmax(np.ones(2), ("x", "y"))

    return st.shard_map(body, mesh=st.make_mesh((2, 2), ("x", "y"), devices=d), in_specs=(), out_specs=st.P())()


@case(
    "an early return from one row of several",
    st.CollectiveError,
    "{b}:3 called psum over 'y'; {b}:2 returned without such a call",
)
def returned_from_a_row(d: Any) -> Any:
    mesh = st.make_mesh((2, 2), ("x", "y"), devices=d)

    def body() -> None:
        if st.axis_index(("x", "y")) == 3:
            st.psum(np.ones(2), "y")

    return st.shard_map(body, mesh=mesh, in_specs=(), out_specs=st.P())()


@pytest.mark.parametrize("groups", [[[0, 2], [1, 3]], [[1, 2, 0, 3]]])
def test_errors_name_the_indices_that_returned_early(groups: list[list[int]], backend: str) -> None:
    devices = st.devices(backend)[:4]

    def fn(x: Any) -> Any:
        return x if st.axis_index("i") == 1 else st.psum(x, "i", axis_index_groups=groups)

    with pytest.raises(st.CollectiveError, match=f"called psum over 'i'; {backend}:1 returned without such a call"):
        st.pmap(fn, [np.ones(2)] * 4, axis_name="i", devices=devices)


@case("inner maps of different sizes", st.CollectiveError, "psum over ('i', 'j')")
def inner_sizes(d: Any) -> Any:
    inner = [[1.0, 2.0, 3.0], [1.0, 2.0]]
    return st.pmap(lambda x: st.pmap(lambda y: st.psum(y, ("i", "j")), x, axis_name="j"), inner, axis_name="i")


@case("inner maps of different names", st.CollectiveError, "psum over 'i'", "no two of these calls match")
def inner_names(d: Any) -> Any:
    return st.pmap(
        lambda x: st.pmap(lambda y: st.psum(y, "i"), x, axis_name="j" if st.axis_index("i") else "k"),
        grid_of(d),
        axis_name="i",
    )


@case("the inner name outside of the inner map", st.ShardingError, "psum: no axis is called 'j'", "bind 'i'")
def inner_name_outside(d: Any) -> Any:
    return nested(lambda x: x, d, outer=lambda made: st.psum(made, "j"))


@case("the outer name once more", st.ShardingError, "pmap: axis 'i' is bound by a map around this one")
def same_name(d: Any) -> Any:
    return nested(lambda x: x, d, name="i")


@case(
    "a tensor of several devices gathered",
    st.ArgumentTypeError,
    "all_gather: x is a tensor over 3 devices",
    "single devices",
)
def outer_gather(d: Any) -> Any:
    return nested(lambda x: x, d, outer=lambda made: st.all_gather(made, "i"))


@case("a host array at a level of several devices", st.ArgumentTypeError, "psum: x is a ndarray", "3 devices")
def outer_host(d: Any) -> Any:
    return nested(lambda x: x, d, outer=lambda made: st.psum(np.zeros(3), "i"))


@case("a tensor of other devices", st.ArgumentTypeError, "psum: x is a tensor on", "3 devices")
def outer_elsewhere(d: Any) -> Any:
    elsewhere = st.zeros((2,), device=d[7])
    return nested(lambda x: x, d, outer=lambda made: st.psum(elsewhere, "i"))


@case("tensors of other layouts", st.CollectiveError, "psum over 'i'", "P(")
def outer_layouts(d: Any) -> Any:
    def other(made: Any) -> Any:
        whole = st.NamedSharding(made.sharding.mesh, st.P())
        return st.psum(st.reshard(made, whole) if st.axis_index("i") else made, "i")

    return nested(lambda x: x, d, outer=other)


@case("outer results that differ where they are promised not to", st.ShapeError, "pmap: the result", "{b}:0")
def outer_differs(d: Any) -> Any:
    mesh = st.make_mesh((2, 3), ("a", "b"), devices=d)
    return st.pmap(lambda x: x, np.arange(6.0).reshape(2, 3), out_axes=None, devices=mesh)


# -- pmap, smap, shard_map: their own arguments ----------------------------------------------------


def map_cases() -> None:
    def same(*args: Any) -> Any:
        return args[0]

    E, T, A, S, D = st.ArgumentError, st.ArgumentTypeError, st.AxisError, st.ShapeError, st.ShardingError
    x = np.arange(12.0).reshape(4, 3)
    P = st.P

    def pm(fn: Any = same, *args: Any, **options: Any) -> Callable[[Any], Any]:
        return lambda d: st.pmap(fn, *args, **{"devices": d[:4], **options})

    def sm(fn: Any = same, *args: Any, **options: Any) -> Callable[[Any], Any]:
        return lambda d: st.smap(fn, *args, **{"devices": d[:4], **options})

    def sh(fn: Any = same, *args: Any, **options: Any) -> Callable[[Any], Any]:
        def call(d: Any) -> Any:
            mesh = st.make_mesh((2, 2), ("x", "y"), devices=d)
            return st.shard_map(fn, **{"mesh": mesh, "in_specs": P("x"), "out_specs": P("x"), **options})(
                *(args or (x,))
            )

        return call

    def leaving(x: Any) -> Any:
        return x if st.axis_index("i") == 1 else st.psum(x, "i")

    def failing(x: Any) -> Any:
        return {1: x}[st.axis_index("i") and st.psum(1, "i")]

    def again(block: Any) -> Any:  # over the mesh of the map around it
        mesh = st.make_mesh((2, 2), ("x", "y"), devices=st.devices(st.current_device().backend))
        return st.shard_map(same, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(block)

    def uneven(d: Any) -> Any:
        mesh = st.make_mesh((4,), ("x",), devices=d)
        return st.shard_map(lambda b: st.psum(b, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(np.arange(5.0))

    rows: list[tuple[str, Callable[[Any], Any], type[BaseException], tuple[str, ...]]] = [
        ("pmap of no function", pm(3, x), T, ("pmap: fn is an int",)),
        ("pmap with a number for a name", pm(same, x, axis_name=3), T, ("pmap: axis_name is 3",)),
        ("pmap with an empty name", pm(same, x, axis_name=""), T, ("pmap: axis_name is ''",)),
        ("pmap with a tuple of names", pm(same, x, axis_name=("i",)), T, ("pmap: axis_name is ('i',)",)),
        ("pmap of a number", pm(same, 3.0), A, ("pmap: argument 0: axis 0",)),
        ("pmap of text", pm(same, "abcd"), T, ("pmap: argument 0 is a str",)),
        ("pmap of None", pm(same, None), T, ("pmap: argument 0 is a NoneType", "in_axes")),
        ("pmap of an empty tree", pm(same, {}), E, ("pmap: in_axes maps no argument",)),
        ("pmap of nothing mapped", pm(same, x, in_axes=None), E, ("pmap: in_axes maps no argument",)),
        ("pmap of an axis that is not there", pm(same, x, in_axes=2), A, ("pmap: argument 0: axis 2",)),
        ("pmap of a negative axis that is not there", pm(same, {"k": x}, in_axes=-3),
         A, ("pmap: argument 0['k']: axis -3",)),
        ("pmap of a fraction of an axis", pm(same, x, in_axes=0.5), T, ("pmap: in_axes[0] is 0.5",)),
        ("pmap of a bool for an axis", pm(same, x, in_axes=True), T, ("pmap: in_axes[0] is True",)),
        ("pmap with too many in_axes", pm(same, x, in_axes=(0, 0)),
         E, ("pmap: in_axes has 2 entries for 1 argument",)),
        ("pmap with a tree for a leaf", pm(same, x, in_axes=({"k": 0},)),
         E, ("pmap: in_axes[0] is a dict of 1", "argument 0")),
        ("pmap with other keys", pm(same, {"k": x}, in_axes=({"j": 0},)),
         E, ("pmap: in_axes[0] has the entries ['j']", "['k']")),
        ("pmap of sizes that differ", pm(same, x, x.T),
         S, ("pmap: argument 0 of shape (4, 3)", "argument 1 of shape (3, 4)")),
        ("pmap of sizes that differ in a tree", pm(same, {"a": x, "b": x[:2]}),
         S, ("pmap: argument 0['a']", "argument 0['b']")),
        ("pmap with too few devices", lambda d: st.pmap(same, x, devices=d[:3]), S, ("pmap: 4 slices for 3 devices",)),
        ("pmap with more slices than devices", lambda d: st.pmap(same, np.zeros(len(st.devices()) + 1)),
         D, ("pmap: 9 slices for 8 devices",)),
        ("pmap of no slices", lambda d: st.pmap(same, np.zeros((0, 2))), st.ShardTensorError, ("pmap: ", "0")),
        ("pmap on text", lambda d: st.pmap(same, x, devices="cpu"), T, ("pmap: devices is a str",)),
        ("pmap on no devices", lambda d: st.pmap(same, [1], devices=[]), D, ("pmap: ", "devices")),
        ("pmap on a number", lambda d: st.pmap(same, [1], devices=3), T, ("pmap: devices is an int",)),
        ("pmap on names of devices", lambda d: st.pmap(same, [1], devices=["cpu:0"]),
         T, ("'cpu:0' is a str", "st.devices()")),
        ("pmap on a device twice", lambda d: st.pmap(same, x, devices=[d[0]] * 4), D, ("{b}:0 occurs twice",)),
        ("pmap on a ragged grid", lambda d: st.pmap(same, x[:2], devices=[[d[0], d[1]], [d[2]]]),
         st.ShardTensorError, ("pmap: ", "devices")),
        ("pmap with static argument that is not there", pm(same, x, static_argnums=1),
         E, ("pmap: static_argnums names argument 1",)),
        ("pmap with static text", pm(same, x, static_argnums="0"), T, ("pmap: static_argnums is '0'",)),
        ("pmap with a static fraction", pm(same, x, static_argnums=(0.5,)), T, ("pmap: static_argnums is (0.5,)",)),
        ("pmap with every argument static", pm(same, x, static_argnums=0), E, ("pmap: in_axes maps no argument",)),
        ("pmap called without arguments", lambda d: st.pmap(same)(),
         E, ("pmap: the mapped function was called without arguments",)),
        ("pmap with an argument too many", pm(lambda: 1, x), TypeError, ("shard 0 on {b}:0",)),
        ("pmap of lists of different lengths", pm(same, [1, 2], [1]), S, ("pmap: lists of 2 and of 1",)),
        ("pmap of lists along an axis", pm(same, [1, 2], in_axes=1), E, ("pmap: in_axes is 1", "lists")),
        ("pmap of lists with out_axes", pm(same, [1, 2], out_axes=1), E, ("pmap: out_axes is 1", "st.stack")),
        ("pmap of arrays donated", lambda d: st.pmap(same, st.device_put(x, d[0]), donate=True, in_axes=None),
         E, ("pmap: ",)),
        ("pmap with out_axes that are not there", pm(same, x, out_axes=5), A, ("pmap: the result: axis 5",)),
        ("pmap with out_axes of text", pm(same, x, out_axes="0"), T, ("pmap: out_axes is '0'",)),
        ("pmap with out_axes for a tree", pm(same, x, out_axes=(0, 0)),
         E, ("pmap: out_axes is a tuple of 2", "the result")),
        ("pmap with out_axes of another tree", pm(lambda x: {"a": x}, x, out_axes={"b": 0}),
         E, ("pmap: out_axes has the entries ['b']", "['a']")),
        ("pmap of results that differ", pm(same, x, out_axes=None),
         S, ("pmap: the result is declared to be equal", "{b}:0 and {b}:1")),
        ("pmap with text for a result", pm(lambda x: "text", x), T, ("pmap: the result is a str",)),
        ("pmap with an object for a result", pm(lambda x: object(), x), T, ("pmap: the result is an object",)),
        ("pmap with a function for a result", pm(lambda x: {"k": same}, x),
         T, ("pmap: the result['k'] is a function",)),
        ("pmap with None in one result", pm(lambda x: at_2(None, x), x, axis_name="i"),
         T, ("pmap: the result is a NoneType", "{b}:2")),
        ("pmap with another shape in one result", pm(lambda x: at_2(x[:1], x), x, axis_name="i"),
         S, ("pmap: the result", "{b}:2")),
        ("pmap with another rank in one result", pm(lambda x: at_2(x[None], x), x, axis_name="i"),
         S, ("pmap: the result", "{b}:2")),
        ("pmap with another tree in one result", pm(lambda x: at_2({"a": x}, {"b": x}), x, axis_name="i"),
         S, ("pmap: calls 0 and 2 return", "{{'a': *}}")),
        ("pmap with a generator", pm(lambda x: (yield x), x), T, ("pmap: the result is a generator",)),
        ("writing to a slice", pm(lambda x: x.__setitem__(0, 1), x), ValueError, ("read-only", "shard 0 on {b}:0")),
        ("smap of no argument", lambda d: st.smap(same, axes=[0]), E, ("smap: there is no argument to split",)),
        ("smap of no function", sm(3, x, axes=[0]), T, ("smap: fn is an int",)),
        ("smap of an axis that is not there", sm(same, x, axes=[2]), A, ("smap: argument 0: axis 2",)),
        ("smap of nothing split", sm(same, x, axes=[None]), E, ("smap: no argument is split",)),
        ("smap with too few axes", sm(same, x, x, axes=[0]), E, ("smap: axes has 1 entry for 2 arguments",)),
        ("smap with axes of text", sm(same, x, axes="0"), T, ("smap: axes is a str",)),
        ("smap with an axis of text", sm(same, x, axes=["0"]), E, ("smap: '0' is not an entry of axes",)),
        ("smap of sizes that differ", sm(same, x, x.T, axes=[0, 0]),
         S, ("smap: argument 1 has 3 elements along axis 0",)),
        ("smap with a name too many", sm(same, x, axes=[0], axis_name=("i", "j")),
         E, ("smap: axis_name is ('i', 'j')", "1 grid axis")),
        ("smap with a name too few", sm(same, x, axes=(0, 1), axis_name="i"),
         E, ("smap: axis_name is 'i'", "2 grid axes")),
        ("smap with a number for a name", sm(same, x, axes=[0], axis_name=3), E, ("smap: axis_name is 3",)),
        ("smap with a name twice", sm(same, x, axes=(0, 1), axis_name=("i", "i")), st.ShardTensorError, ("'i'",)),
        ("smap with out_axes that are not there", sm(same, x, axes=[0], out_axes=4), S, ("smap: ", "no axis 4")),
        ("smap of results that differ", sm(same, x, axes=[0], out_axes=(None,)),
         S, ("smap: the result is declared to be equal", "{b}:0 and {b}:1")),
        ("smap with text for a result", sm(lambda x: "text", x, axes=[0]), T, ("smap: the result is a str",)),
        ("smap on text", lambda d: st.smap(same, x, axes=[0], devices="cpu"), T, ("smap: devices is a str",)),
        ("smap and an early return", sm(leaving, x, axes=[0], axis_name="i"),
         st.CollectiveError, ("psum over 'i'", "{b}:1 returned")),
        ("smap and an error on one device", sm(failing, x, axes=[0], axis_name="i"),
         KeyError, ("shard 0 on {b}:0",)),
        ("smap and the name of its grid", sm(lambda x: st.psum(x, "g0"), x, axes=[0]),
         D, ("psum: no axis is called 'g0'",)),
        ("shard_map of no function", sh(3), T, ("shard_map: f is an int",)),
        ("shard_map on no mesh", sh(mesh="x"), T, ("shard_map: mesh is a str",)),
        ("shard_map on devices", lambda d: st.shard_map(same, mesh=d, in_specs=P(), out_specs=P()),
         T, ("shard_map: mesh is a",)),
        ("shard_map with in_specs of text", sh(in_specs="x"), T, ("shard_map: in_specs has a str in it",)),
        ("shard_map with in_specs of numbers", sh(in_specs=(0,)), T, ("shard_map: in_specs has an int in it",)),
        ("shard_map with out_specs of text", sh(out_specs="x"), T, ("shard_map: out_specs has a str in it",)),
        ("shard_map with out_specs None", sh(out_specs=None),
         E, ("shard_map: the result is a", "out_specs says None for it")),
        ("shard_map over an axis that is not there", sh(in_specs=P("z")),
         D, ("shard_map: in_specs has P('z')", "('x', 'y')")),
        ("shard_map to an axis that is not there", sh(out_specs=P("z")),
         D, ("shard_map: out_specs has P('z')", "('x', 'y')")),
        ("shard_map with too many in_specs", sh(in_specs=(P("x"), P("x"))),
         E, ("shard_map: in_specs has 2 entries for 1 argument",)),
        ("shard_map with in_specs of another tree", sh(same, {"a": x}, in_specs=({"b": P("x")},)),
         E, ("shard_map: in_specs[0] has the entries ['b']", "['a']")),
        ("shard_map with a spec too long", sh(in_specs=P(None, None, "x")),
         S, ("shard_map: argument 0 has shape (4, 3)", "3 dimensions")),
        ("shard_map with an out_spec too long", sh(out_specs=P(None, None, "x")),
         A, ("shard_map: the result has shape (2, 3)", "3 dimensions")),
        ("shard_map with out_specs of another tree", sh(out_specs=(P("x"), P("x"))),
         E, ("shard_map: out_specs is a tuple of 2", "the result")),
        ("shard_map of text", sh(same, "text"), T, ("shard_map: argument 0 is a str",)),
        ("shard_map of None", sh(same, {"k": None}), T, ("shard_map: argument 0['k'] is a NoneType",)),
        ("shard_map of results that differ", sh(out_specs=P()),
         S, ("shard_map: the result is declared to be equal along", "'x'", "{b}:0 and {b}:")),
        ("shard_map with text for a result", sh(lambda x: "text"), T, ("shard_map: the result is a str",)),
        ("shard_map with results of different ranks", sh(lambda x: x[0] if st.axis_index("x") else x),
         S, ("shard_map: the result has shapes (2, 3) and (3,)", "{b}:")),
        ("shard_map with results that do not fit", sh(lambda x: x[:, : 1 + st.axis_index("x")]),
         S, ("shard_map: the result",)),
        ("shard_map over axis_names that are not there", sh(axis_names={"z"}),
         D, ("shard_map: axis_names has 'z'", "('x', 'y')")),
        ("shard_map over a number of axes", sh(axis_names=2), T, ("shard_map: axis_names is",)),
        ("shard_map with specs of axes that are not mapped", sh(in_specs=P("y"), axis_names={"x"}),
         D, ("shard_map: in_specs has P('y')", "the map is over")),
        ("shard_map to axes that are not mapped", sh(out_specs=P("y"), axis_names={"x"}),
         D, ("shard_map: out_specs has P('y')", "the map is over")),
        ("shard_map over the same axes inside", sh(again), D, ("shard_map: ", "mapped by a map around this one")),
        ("shard_map and an early return", sh(lambda b: b if st.axis_index(("x", "y")) == 3 else st.psum(b, ("x", "y"))),
         st.CollectiveError, ("psum over ('x', 'y')", "{b}:3 returned", "{b}:0, {b}:1, {b}:2 called")),
        ("shard_map and blocks that differ", uneven, st.CollectiveError,
         ("psum over 'x'", "float64[1]", "float64[2]", "x.sum()", "all_gather with tiled=True")),
        ("shard_map called with keywords", sh(lambda **k: k), TypeError, ()),
    ]  # fmt: skip
    for name, call, kind, words in rows:
        case(name, kind, *words)(call)


map_cases()

# -- threads, contexts, coroutines, generators -----------------------------------------------------


@case("a thread with the program's context", st.ShardTensorError, "psum", "thread")
def context_in_thread(d: Any) -> Any:
    def fn(x: Any) -> Any:
        context = contextvars.copy_context()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(context.run, st.psum, x, "i").result(LIMIT)

    return over(fn, d)


@case("asyncio's threads", st.ShardTensorError, "psum", "thread")
def to_thread(d: Any) -> Any:
    def fn(x: Any) -> Any:
        return asyncio.run(asyncio.to_thread(st.psum, x, "i"))

    return over(fn, d)


@case("the context of another program", st.ShardTensorError, "psum")
def borrowed_context(d: Any) -> Any:
    contexts: dict[int, contextvars.Context] = {}

    def fn(x: Any) -> Any:
        index = st.axis_index("i")
        contexts[index] = contextvars.copy_context()
        st.psum(x, "i")
        return contexts[0].run(st.psum, x, "i") if index == 1 else st.psum(x, "i")

    return over(fn, d)


@case("the context of a program that has ended", st.ShardTensorError, "psum")
def old_context(d: Any) -> Any:
    contexts: list[contextvars.Context] = []
    over(lambda x: contexts.append(contextvars.copy_context()), d)
    return contexts[0].run(st.psum, 1.0, "i")


@case("a coroutine for a result", st.ArgumentTypeError, "pmap: the result is a coroutine")
def coroutine(d: Any) -> Any:
    async def meet(x: Any) -> Any:
        return st.psum(x, "i")

    made: list[Any] = []

    def fn(x: Any) -> Any:
        made.append(meet(x))
        return made[-1]

    try:
        return st.pmap(fn, np.arange(4.0), axis_name="i", devices=d[:4])
    finally:
        for each in made:
            each.close()  # it is never awaited


@case("an event loop in each program of one thread", RuntimeError, "event loop", "shard 1 on {b}:1")
def event_loops(d: Any) -> Any:
    """There is one thread: with more, the first program in each thread could start a loop, and the next one fails."""

    async def meet(x: Any) -> Any:
        return st.psum(x, "i")

    def fn(x: Any) -> Any:
        coroutine = meet(x)
        try:
            return asyncio.run(coroutine)
        finally:
            coroutine.close()

    with st.set_num_threads(1):
        return over(fn, d)


@case("a generator run outside of its program", st.ShardingError, "psum: there is no mapped function")
def generator_outside(d: Any) -> Any:
    def fn(x: Any) -> Iterator[Any]:
        yield st.psum(x, "i")

    return [list(made) for made in over(fn, d)]


@case("a function kept for later", st.ShardingError, "pmax: there is no mapped function")
def function_outside(d: Any) -> Any:
    return [later() for later in over(lambda x: lambda: st.pmax(x, "i"), d)]


@case("a tensor of the whole map in a program", st.CollectiveError, "psum over 'i'", "{b}:1 returned")
def tensor_of_all(d: Any) -> Any:
    x = st.device_put(np.arange(8.0), st.make_mesh((4,), ("x",), devices=d))
    return over(lambda _: st.psum(x, "i") if st.axis_index("i") != 1 else x, d)


@case("a lock that one program holds while it waits", st.CollectiveError, "psum over 'i'")
def lock_held(d: Any) -> Any:
    """The lock has a time-out: without one, the library could not detect the deadlock."""
    lock = threading.Lock()

    def fn(x: Any) -> Any:
        if not lock.acquire(timeout=0.05):
            return x
        try:
            return st.psum(x, "i")
        finally:
            lock.release()

    return over(fn, d)


class Mute(Exception):
    """An error of the user's whose message raises an error."""

    def __str__(self) -> str:
        raise ValueError("there is no message")

    __repr__ = __str__


def silent(x: Any) -> Any:
    raise Mute


@case("an error whose message raises an error", Mute, "shard 2 on {b}:2")
def mute(d: Any) -> Any:
    return over(lambda x: at_2(silent, lambda x: x)(x), d)


@case("an error whose message raises an error, while others wait", Mute, "shard 2 on {b}:2")
def mute_in_a_collective(d: Any) -> Any:
    return over(lambda x: st.psum(at_2(silent, lambda x: x)(x), "i"), d)


@case("an error whose message raises an error, in an inner map", Mute, "shard 0 on {b}:0")
def mute_inside(d: Any) -> Any:
    return st.pmap(lambda x: st.pmap(silent, [x]), [np.ones(2)], devices=d[:1])


@case("None for an operand", st.ArgumentTypeError, "sum: x is None; wanted", "shard 0")
def no_operand(d: Any) -> Any:
    return over(lambda x: st.sum(None), d)


@case("None for an array", st.ArgumentTypeError, "asarray: None is not an array")
def no_array(d: Any) -> Any:
    return over(lambda x: st.asarray(None), d)


@case("None in a list of operands", st.ArgumentTypeError, "stack: arrays[1] is None")
def no_item(d: Any) -> Any:
    return over(lambda x: st.stack([x, None]), d)


@case("a donated argument used again", st.DonatedError, "pmap", "was donated")
def donated(d: Any) -> Any:
    items = [st.device_put(np.zeros(3), device) for device in d[:4]]
    st.pmap(lambda x: st.psum(x, "i"), items, axis_name="i", donate=True)
    return st.pmap(lambda x: st.psum(x, "i"), items, axis_name="i")


@pytest.mark.parametrize("backend", SOME)
@pytest.mark.parametrize("misuse", CASES, ids=lambda c: c.name.replace(" ", "-"))
def test_misuse(misuse: Case, backend: str) -> None:
    devices = list(st.devices(backend))

    def call() -> Any:
        with st.use_mesh(st.make_mesh((8,), ("d",), devices=devices)):
            return misuse.call(devices)

    with pytest.raises(misuse.kind) as caught:
        in_time(call, LIMIT)
    error = caught.value
    said = "\n".join([message_of(error), *getattr(error, "__notes__", [])])
    for words in misuse.words:
        assert words.format(b=backend) in said, said
    assert type(error).__module__.startswith(("shardtensor", "tests", "builtins"))
    in_time(lambda: total_works(devices), LIMIT)


def test_the_number_of_cases() -> None:
    names = [c.name for c in CASES]
    assert len(names) == len(set(names))
    assert len(names) >= 150
