"""The operators of loops and branches, and the carry that a loop passes from trip to trip."""

from __future__ import annotations

import functools
import operator as python
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shardtensor.backend.registry import in_job
from shardtensor.communication.between_processes.processes import leaves_out
from shardtensor.communication.transfer import gather_across
from shardtensor.core import call, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, ConcretizationError, type_text
from shardtensor.functions.random.random_keys import Key
from shardtensor.interpreters.views.views import View
from shardtensor.tensor.operands import is_data
from shardtensor.tensor.ownership import shared
from shardtensor.tensor.pytree import hint_to_register, leaves, map_leaves, paths, replaced
from shardtensor.tensor.storage import NoElements, Storage
from shardtensor.tensor.tensor import SCALARS, ShardedTensor, lacks_elements, mark_array, tensor

Carry = Any
"""A pytree of arrays and numbers, which a loop passes from each trip to the next."""

Function = Callable[..., Any]

T = TypeVar("T")


@operator(
    operands=("init", "xs", "bounds"),
    trees=("init", "xs", "bounds"),
    functions=("body",),
    tags=("internal", "loop", "spmd"),
)
def counted_loop(init: Carry, xs: Any, bounds: Any, /, body: Function, reverse: bool, caller: str) -> Any:
    """Calls ``body(i, carry, x)`` for each number of the bounds: the operator of `scan`, `fori_loop` and `map`.

    Args:
        init: the carry of the first trip.
        xs: a pytree of arrays, of which each trip gets the slice ``x[i]``; or None.
        bounds: the first number, and the one after the last.
        body: returns the next carry, and a pytree of arrays that are stacked, or None.
        reverse: whether the last number is the first.
        caller: the function that the user called.

    Returns:
        The last carry, and the stacked arrays.

    Raises:
        ArgumentError: the carry changes its structure, a shape, a dtype or a sharding.
    """


@operator(operands=("init",), trees=("init",), functions=("cond", "body"), tags=("internal", "loop", "spmd"))
def conditional_loop(init: Carry, /, cond: Function, body: Function, caller: str) -> Carry:
    """Calls ``body(carry)`` while ``cond(carry)`` is true: the operator of `while_loop`.

    Raises:
        ArgumentError: the carry changes its structure, a shape, a dtype or a sharding.
        ArgumentTypeError: the condition is not a scalar of bool.
    """


@operator(
    operands=("index", "operands"), trees=("index", "operands"), functions=("branches",), tags=("internal", "spmd")
)
def branch(index: Any, operands: Sequence[Any], /, branches: Sequence[Function], caller: str) -> Any:
    """Calls one of several functions: the operator of `cond` and `switch`.

    Raises:
        ArgumentError: in a program, the results of the functions differ in structure, shape, dtype or sharding.
        ArgumentTypeError: the index is not a scalar.
    """


# -- the carry -------------------------------------------------------------------------------------


def on_own(function: Function) -> Function:
    """Returns a function that calls another one with arrays to which it may write."""
    return functools.partial(_call_on_own, function)


def _call_on_own(function: Function, *args: Any) -> Any:
    return function(*owned(args))


def owned(tree: T) -> T:
    """Returns arrays of the same values, to which a write changes no others: neither those of the caller nor one
    another, as in a program. A function may return its arguments or an array that it closes over as a carry or a
    result.
    """
    owned: T = map_leaves(_own, tree)
    return owned


def _own(x: Any) -> Any:
    """Returns a new handle on the value of a tensor, or a copy of an array; any other object unchanged."""
    if type(x) is not ShardedTensor:
        return call("asarray", x, copy=True) if x is not None and type(x) not in SCALARS and is_data(x) else x
    if x._is_scalar:  # Scalars are never written.
        return x
    if type(x._storage) is not Storage:
        base, view_spec = x._base_and_view()
        if base is not x:
            return tensor(x._aval, View(_own(base), view_spec))
        if isinstance(x._storage, NoElements):
            x._storage.share()
        elif not lacks_elements(x):
            return call("copy", x)
        return mark_array(tensor(x._aval, x._storage))
    return mark_array(tensor(x._aval, shared(x._storage)))


def converted(x: Any) -> Any:
    """Returns what a function has returned as an array; an object that is neither an array nor a number unchanged."""
    return call("asarray", x) if type(x) is not ShardedTensor and (type(x) in SCALARS or is_data(x)) else x


def following(caller: str, before: Carry, after: Carry, *, is_first: bool) -> Carry:
    """Returns the next carry, of arrays.

    Raises:
        ArgumentError: it differs from the one before it.
    """
    names = paths(before, "carry")
    if names != paths(after, "carry"):
        raise ArgumentError(
            f"{caller}: the carry changes its structure: it is {structure_of(before, 'carry')} before a trip, and "
            f"{structure_of(after, 'carry')} after it; return the structure of the initial value"
        )
    new_leaves = [
        _follower(caller, *leaf, is_first=is_first) for leaf in zip(names, leaves(before), leaves(after), strict=True)
    ]
    return replaced(before, new_leaves)


def _follower(caller: str, name: str, old: Any, new: Any, *, is_first: bool) -> Any:
    """Returns a leaf of the next carry: an array, a key or None."""
    if type(old) is type(new) is ShardedTensor and old._aval is new._aval:  # The common case.
        return new
    for x in (old, new):
        if not (x is None or isinstance(x, (*SCALARS, Key, ShardedTensor)) or is_data(x)):
            advice = "wanted arrays, numbers, keys and None"
            raise ArgumentTypeError(f"{caller}: {name} is {type_text(x)}; {advice}{hint_to_register(x)}")
    array = converted(new)
    may_change = is_first and (type(old) in SCALARS or not getattr(old, "committed", True))
    expected, found = kind_of(old), kind_of(array)
    if type(old) in SCALARS and is_first:
        expected, found = expected[:1], found[:1]
    elif may_change:
        expected, found = expected[:2], found[:2]
    if expected != found:
        raise ArgumentError(
            f"{caller}: {name} changes: it is {text_of(old)} before a trip, and {text_of(array)} after it; wanted the "
            f"same shape, dtype{'' if may_change else ' and sharding'}: cast{'' if may_change else ' or reshard'} what "
            "the function returns, or begin with such a value"
        )
    return array


def kind_of(x: Any) -> Any:
    """Returns the shape, the dtype and the sharding of an array; of another object, the shape of a number and the
    type.
    """
    if not hasattr(x, "shape"):
        return () if type(x) in SCALARS else None, Key if isinstance(x, Key) else type(x), None
    return tuple(x.shape), str(x.dtype), getattr(x, "sharding", None)


def text_of(x: Any) -> str:
    """Returns dtype, shape and spec of an array, or the type of another object, for error messages."""
    if isinstance(x, Key):
        return "a key"
    if not hasattr(x, "shape"):
        return type_text(x)
    where = f" {x.sharding.spec}" if type(x) is ShardedTensor else ""
    return f"{x.dtype}[{', '.join([str(n) for n in x.shape])}]{where}"


def structure_of(tree: Any, name: str) -> str:
    """Returns the paths of the leaves of a tree, for error messages."""
    return ", ".join(paths(tree, name)) or "empty"


# -- scalars ---------------------------------------------------------------------------------------


def lack_elements(tree: Any) -> bool:
    """Whether a tensor in a tree lacks elements, as those on an `AbstractMesh` do, so that a loop is inferred. One
    example of a batch lacks them only if all examples do.
    """
    return any(lacks_elements(_of_all(x)) for x in leaves(tree))


def _of_all(x: Any) -> Any:
    """Returns the values of all examples, for a value of `vmap` or of a tape around it."""
    while type(x) is ShardedTensor and hasattr(storage := getattr(x._storage, "base", x)._storage, "primal"):
        x = storage.primal
    return x


def result_array(caller: str, y: Any) -> Any:
    """Returns a result that is stacked, as an array."""
    y = converted(y)
    if not hasattr(y, "shape"):
        raise ArgumentTypeError(f"{caller}: the function returned {text_of(y)}, which cannot be stacked; wanted arrays")
    return y


def read(x: Any) -> Any:
    """Returns a scalar whose element all processes have: in a job, an element of a tensor is in some of them."""
    if type(x) is not ShardedTensor or not in_job():
        return x
    x = call("copy", x)
    # Processes without a device of the tensor have to take the same branches, and to make as many trips.
    return gather_across(x, "read") if type(x._storage) is Storage and leaves_out(x.sharding.mesh.flat) else x


def check_scalar(caller: str, name: str, x: Any, kinds: str) -> None:
    """Checks an array without elements.

    Raises:
        ArgumentTypeError: it has dimensions, or a dtype of another kind.
    """
    if x.shape != () or x.dtype.kind not in kinds:
        raise ArgumentTypeError(
            f"{caller}: {name} is {text_of(x)}; wanted {'a scalar' if 'f' in kinds else 'an integer'}"
        )


def integer(caller: str, name: str, x: Any) -> int:
    """Returns a bound or an index, which in a job is the same in all processes.

    Raises:
        ArgumentTypeError: it is not an integer.
    """
    try:
        n: int = python.index(read(x))
    except ConcretizationError:
        raise
    except TypeError:
        raise ArgumentTypeError(f"{caller}: {name} is {text_of(x)}; wanted an integer") from None
    return n


def check_condition(caller: str, what: str, x: Any) -> None:
    """Checks that a condition is a scalar of bool.

    Raises:
        ArgumentTypeError: it is another object.
    """
    is_bool = type(x) is bool or (getattr(x, "shape", None) == () and str(x.dtype).rpartition(".")[2] == "bool")
    if not is_bool:
        raise ArgumentTypeError(f"{caller}: {what} {text_of(x)}; wanted a scalar of bool")


def branch_number(index: Any, count: int, caller: str) -> int:
    """Returns the number of the branch that an index selects."""
    if caller == "cond":
        if getattr(index, "shape", ()) != () or not (type(index) in SCALARS or hasattr(index, "dtype")):
            raise ArgumentTypeError(f"cond: pred is {text_of(index)}; wanted a scalar")
        return int(bool(read(index)))
    return min(max(integer("switch", "index", index), 0), count - 1)
