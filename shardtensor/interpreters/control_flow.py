"""Loops and branches of tensors, with the signatures of ``jax.lax``.

In eager mode they are Python's loops and branches. In a program of `st.jit` each of them is one equation, which holds
the program of each of its functions: neither the text of the program nor the time to trace it grows with the number of
trips.
"""

from __future__ import annotations

import functools
import operator as python
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from shardtensor.backend.protocol import current_device
from shardtensor.backend.registry import in_job
from shardtensor.communication.transfer_log import UNKNOWN_TRIPS, record_transfer, recorded_by
from shardtensor.core import call, hinted, implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, ConcretizationError, ShapeError, type_text
from shardtensor.host import blockwise
from shardtensor.interpreters.infer import argument, inferring
from shardtensor.tensor.operands import is_data
from shardtensor.tensor.ownership import track
from shardtensor.tensor.pytree import leaves, map_leaves, paths, replaced
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import SCALARS, ShardedTensor, lacks_elements, mark_array, tensor, without_elements
from shardtensor.tensor.value import aval

Carry = Any
"""A pytree of arrays and numbers, which a loop passes from each trip to the next."""

Function = Callable[..., Any]

T = TypeVar("T")
X = TypeVar("X")
Y = TypeVar("Y")

# -- the operators ---------------------------------------------------------------------------------


@operator(operands=("init", "xs", "bounds"), trees=("init", "xs", "bounds"), spmd=True, functions=("body",))
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


@operator(operands=("init",), trees=("init",), spmd=True, functions=("cond", "body"))
def conditional_loop(init: Carry, /, cond: Function, body: Function, caller: str) -> Carry:
    """Calls ``body(carry)`` while ``cond(carry)`` is true: the operator of `while_loop`.

    Raises:
        ArgumentError: the carry changes its structure, a shape, a dtype or a sharding.
        ArgumentTypeError: the condition is no scalar of bool.
    """


@operator(operands=("index", "operands"), trees=("index", "operands"), spmd=True, functions=("branches",))
def branch(index: Any, operands: Sequence[Any], /, branches: Sequence[Function], caller: str) -> Any:
    """Calls one of several functions: the operator of `cond` and `switch`.

    Raises:
        ArgumentError: in a program, the results of the functions differ in structure, shape, dtype or sharding.
        ArgumentTypeError: the index is no scalar.
    """


# -- the public functions --------------------------------------------------------------------------


@hinted
def scan(
    f: Callable[[T, X], tuple[T, Y]],
    init: T,
    xs: X | None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[T, Y]:
    """Calls ``carry, y = f(carry, x)`` for each slice of ``xs`` along its first dimension, and stacks what it returns.

    Args:
        f: the function. It may write in place to its arguments, which are its own, and to nothing else.
        init: the first carry: a pytree of arrays and numbers. Each later carry has its structure, shapes, dtypes and
            shardings; a number takes the dtype, and an uncommitted array the sharding, of what ``f`` returns.
        xs: a pytree of arrays of the same length, or None.
        length: the number of trips; by default the length of the arrays.
        reverse: whether to begin with the last slice. The results are stacked in the order of ``xs``.
        unroll: accepted for programs that are written for JAX; it changes nothing.

    Returns:
        The last carry, and a pytree of the stacked results: arrays of shape ``(length, *y.shape)`` whose first
        dimension is whole on each device and whose others are laid out as those of ``y``.

    Raises:
        ArgumentError: the lengths differ; there is neither a length nor an array; the carry changes.
        ArgumentTypeError: ``f`` is no function, or returns no pair.

    >>> total, sums = st.scan(lambda total, x: (total + x, total + x), 0, st.arange(1, 6))
    >>> int(total), sums.tolist()
    (15, [1, 3, 6, 10, 15])
    """
    _check_function("scan", "f", f)
    xs = map_leaves(functools.partial(_as_array, "scan", "xs"), xs)
    n = _length("scan", xs, length)
    pair_of_results: tuple[T, Y] = counted_loop(init, xs, (0, n), functools.partial(_pair, f), bool(reverse), "scan")
    return pair_of_results


def _pair(f: Function, _: Any, carry: Any, x: Any) -> tuple[Any, Any]:
    made = f(carry, x)
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise ArgumentTypeError(f"scan: f returned {type_text(made)}; wanted a pair: the next carry, and a result")
    return made[0], made[1]


@hinted
def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Any, T], T], init_val: T, *, unroll: Any = None) -> T:
    """Calls ``val = body_fun(i, val)`` for each integer from ``lower`` up to, but without, ``upper``.

    Args:
        lower, upper: integers, or arrays of one integer without dimensions, also such as are traced by `st.jit`.
        body_fun: the function. ``i`` is a Python integer, or stands for one: it promotes no dtype.
        init_val: the first value, as the carry of `scan`.
        unroll: accepted for programs that are written for JAX; it changes nothing.

    Returns:
        The last value; ``init_val`` if there is no trip.

    Raises:
        ArgumentError: the value changes its structure, a shape, a dtype or a sharding.
        ArgumentTypeError: a bound is no integer; ``body_fun`` is no function.

    >>> st.fori_loop(0, 4, lambda i, x: x + i, st.zeros(3)).tolist()
    [6.0, 6.0, 6.0]
    """
    _check_function("fori_loop", "body_fun", body_fun)
    body = functools.partial(_numbered, body_fun)
    last: T = counted_loop(init_val, None, (lower, upper), body, False, "fori_loop")[0]
    return last


def _numbered(body_fun: Function, i: Any, carry: Any, _: Any) -> tuple[Any, None]:
    return body_fun(i, carry), None


@hinted
def map(f: Callable[[X], Y], xs: X) -> Y:
    """Calls ``f`` with each slice of ``xs`` along the first dimension, and stacks the results.

    Args:
        f: the function.
        xs: a pytree of arrays of the same length.

    Returns:
        A pytree of the stacked results, as those of `scan`.

    Raises:
        ArgumentError: the lengths differ, or there is no array.
        ArgumentTypeError: ``f`` is no function.

    >>> st.map(lambda x: x.sum(), st.ones((3, 2))).tolist()
    [2.0, 2.0, 2.0]
    """
    _check_function("map", "f", f)
    xs = map_leaves(functools.partial(_as_array, "map", "xs"), xs)
    bounds = (0, _length("map", xs, None))
    stacked: Y = counted_loop((), xs, bounds, functools.partial(_alone, f), False, "map")[1]
    return stacked


def _alone(f: Function, _: Any, carry: Any, x: Any) -> tuple[Any, Any]:
    return carry, f(x)


@hinted
def while_loop(cond_fun: Callable[[T], Any], body_fun: Callable[[T], T], init_val: T) -> T:
    """Calls ``val = body_fun(val)`` while ``cond_fun(val)`` is true.

    Args:
        cond_fun: returns a bool, or an array of one bool without dimensions. In a job, all processes use the same one.
        body_fun: the function.
        init_val: the first value, as the carry of `scan`.

    Returns:
        The last value.

    Raises:
        ArgumentError: the value changes its structure, a shape, a dtype or a sharding.
        ArgumentTypeError: the condition is no scalar of bool; an argument is no function.

    >>> st.while_loop(lambda x: x.sum() < 100, lambda x: 2 * x, st.ones(3)).tolist()
    [64.0, 64.0, 64.0]
    """
    _check_function("while_loop", "cond_fun", cond_fun)
    _check_function("while_loop", "body_fun", body_fun)
    last: T = conditional_loop(init_val, cond_fun, body_fun, "while_loop")
    return last


@hinted
def cond(pred: Any, true_fun: Callable[..., Y], false_fun: Callable[..., Y], *operands: Any) -> Y:
    """Calls ``true_fun(*operands)`` if ``pred`` is true, otherwise ``false_fun(*operands)``.

    Args:
        pred: a bool, a number, or an array of one without dimensions.
        true_fun, false_fun: the functions. In a program of `st.jit` both are traced, and their results have the same
            structure, shapes, dtypes and shardings.
        *operands: pytrees of arrays and numbers.

    Returns:
        The result of the function that is called. Only its operators run.

    Raises:
        ArgumentError: in a program, the results of the functions differ.
        ArgumentTypeError: ``pred`` is no scalar; an argument is no function.

    >>> st.cond(True, st.sum, st.max, st.ones(3)).tolist()
    3.0
    """
    _check_function("cond", "true_fun", true_fun)
    _check_function("cond", "false_fun", false_fun)
    result: Y = branch(pred, operands, (false_fun, true_fun), "cond")
    return result


@hinted
def switch(index: Any, branches: Sequence[Callable[..., Y]], *operands: Any) -> Y:
    """Calls ``branches[index](*operands)``. An index below 0 is 0, and one beyond the last branch is that of the last.

    Args:
        index: an integer, or an array of one without dimensions.
        branches: the functions, of which the results agree as those of `cond`.
        *operands: pytrees of arrays and numbers.

    Returns:
        The result of the function that is called.

    Raises:
        ArgumentError: there is no branch; in a program, the results of the branches differ.
        ArgumentTypeError: the index is no scalar of integers; a branch is no function.

    >>> st.switch(2, [st.sum, st.max, st.min], st.arange(4)).tolist()
    0
    """
    branches = tuple(branches)
    if not branches:
        raise ArgumentError("switch: branches is empty; wanted at least one function")
    for k, function in enumerate(branches):
        _check_function("switch", f"branches[{k}]", function)
    result: Y = branch(index, operands, branches, "switch")
    return result


@hinted
def associative_scan(fn: Callable[[T, T], T], elems: T, reverse: bool = False, axis: int = 0) -> T:
    """Returns the results of an associative function for the first element, the first two, and so on.

    The function is called with whole slices, about ``2 log2(n)`` times: Blelloch, Prefix sums and their applications,
    1990. For sums and products, `st.cumulative_sum` and `st.cumulative_prod` move less.

    Args:
        fn: takes and returns pytrees of the structure of ``elems``, and is elementwise along ``axis``.
        elems: a pytree of arrays of the same length along ``axis``.
        reverse: whether to begin with the last element.
        axis: the dimension along which the elements are.

    Returns:
        A pytree of arrays with the shapes of ``elems``.

    Raises:
        ArgumentError: the lengths differ, or there is no array.
        ArgumentTypeError: ``fn`` is no function.
        AxisError: an array has no such dimension.

    >>> st.associative_scan(st.maximum, st.asarray([1, 3, 2, 5, 4])).tolist()
    [1, 3, 3, 5, 5]
    """
    _check_function("associative_scan", "fn", fn)
    elems = map_leaves(functools.partial(_as_array, "associative_scan", "elems"), elems)
    arrays = [call("moveaxis", x, axis, 0) for x in leaves(elems)]
    _length("associative_scan", arrays, None)
    arrays = [call("flip", x, axis=0) for x in arrays] if reverse else arrays

    def combined(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        return leaves(fn(replaced(elems, _placed(a, axis)), replaced(elems, _placed(b, axis))))

    def on_front(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        return [call("moveaxis", x, axis, 0) for x in combined(a, b)]

    made = _scanned(on_front, arrays)
    made = [call("flip", x, axis=0) for x in made] if reverse else made
    scanned: T = replaced(elems, _placed(made, axis))
    return scanned


def _placed(arrays: Sequence[Any], axis: int) -> list[Any]:
    return [call("moveaxis", x, 0, axis) for x in arrays]


def _scanned(combined: Callable[[Sequence[Any], Sequence[Any]], list[Any]], arrays: Sequence[Any]) -> list[Any]:
    """Returns the scan along the first dimension: that of pairs, and in between one more call of the function."""
    n = arrays[0].shape[0]
    if n < 2:
        return list(arrays)
    odd = _scanned(combined, combined([x[: n - 1 : 2] for x in arrays], [x[1::2] for x in arrays]))
    if n == 2:
        even = [x[:1] for x in arrays]
    else:
        before = [x[: (n - 1) // 2] for x in odd]
        rest = combined(before, [x[2::2] for x in arrays])
        even = [call("concat", [x[:1], y], axis=0) for x, y in zip(arrays, rest, strict=True)]
    return [_interleaved(a, b) for a, b in zip(even, odd, strict=True)]


def _interleaved(even: Any, odd: Any) -> Any:
    """Returns the slices of two arrays in turn; ``even`` has as many as ``odd``, or one more."""
    n = odd.shape[0]
    both = call("reshape", call("stack", [even[:n], odd], axis=1), (2 * n, *odd.shape[1:]))
    return both if even.shape[0] == n else call("concat", [both, even[n:]], axis=0)


# -- arguments -------------------------------------------------------------------------------------


def _check_function(caller: str, name: str, function: Any) -> None:
    if not callable(function):
        raise ArgumentTypeError(f"{caller}: {name} is {type_text(function)}; wanted a function")


def _as_array(caller: str, name: str, x: Any) -> Any:
    """Returns an array of the library; None unchanged."""
    if x is None:
        return None
    if not hasattr(x, "shape"):
        if type(x) in SCALARS:
            raise ArgumentTypeError(f"{caller}: {name} has {type_text(x)}, which has no first dimension; wanted arrays")
        raise ArgumentTypeError(f"{caller}: {name} has {type_text(x)}; wanted arrays")
    array = call("asarray", x)
    if not array.ndim:
        raise ArgumentError(f"{caller}: {name} has an array without dimensions; wanted a first dimension")
    return array


def _length(caller: str, xs: Any, length: int | None) -> int:
    """Returns the number of trips."""
    lengths: dict[str, int] = {
        path: x.shape[0] for path, x in zip(paths(xs, "xs"), leaves(xs), strict=True) if x is not None
    }
    if length is not None:
        lengths["length"] = python.index(length)
    if not lengths:
        raise ArgumentError(f"{caller}: there is no array and no length; give one of them")
    if len(set(lengths.values())) > 1:
        found = ", ".join([f"{name} is {n}" for name, n in lengths.items()])
        raise ArgumentError(f"{caller}: the lengths differ: {found}; wanted the same length")
    return int(min(lengths.values()))


# -- the carry -------------------------------------------------------------------------------------


def _own(x: Any) -> Any:
    """Returns an array to which a function may write: a new handle on the value of a tensor, or a copy of an array."""
    if x is None or type(x) in SCALARS:
        return x
    if type(x) is not ShardedTensor:
        return call("asarray", x, copy=True) if is_data(x) else x
    if x._is_scalar or lacks_elements(x):  # Scalars are never written.
        return x
    if type(x._storage) is not Storage:
        return call("copy", x)
    made = mark_array(tensor(x._aval, Storage(x._storage.buffers)))
    track([(x,)], made)
    return made


def _converted(x: Any) -> Any:
    """Returns what a function has returned as an array."""
    return x if type(x) is ShardedTensor else call("asarray", x)


def _following(caller: str, before: Carry, after: Carry, *, is_first: bool) -> Carry:
    """Returns the next carry, of arrays.

    Raises:
        ArgumentError: it differs from the one before it.
    """
    names = paths(before, "carry")
    if names != paths(after, "carry"):
        raise ArgumentError(
            f"{caller}: the carry changes its structure: it is {_structure(before)} before a trip, and "
            f"{_structure(after)} after it; return the structure of the initial value"
        )
    made = []
    for name, old, new in zip(names, leaves(before), leaves(after), strict=True):
        array = _converted(new)
        may_change = is_first and (type(old) in SCALARS or not getattr(old, "committed", True))
        if (not may_change and _kind(old) != _kind(array)) or (
            may_change and tuple(getattr(old, "shape", ())) != array.shape
        ):
            raise ArgumentError(
                f"{caller}: {name} changes: it is {_text(old)} before a trip, and {_text(array)} after it; wanted the "
                "same shape, dtype and sharding: cast or reshard what the function returns, or begin with such a value"
            )
        if may_change and type(old) not in SCALARS and old.dtype != array.dtype:
            raise ArgumentError(
                f"{caller}: {name} changes: it is {_text(old)} before a trip, and {_text(array)} after it; wanted the "
                "same shape and dtype: cast what the function returns, or begin with such a value"
            )
        made.append(array)
    return replaced(before, made)


def _follows(old: Any, new: Any, is_first: bool) -> Any:
    """Whether a leaf of the carry may be followed by an array. Only an initial number takes another dtype, and only an
    initial array that is not committed another sharding.
    """
    if is_first and type(old) in SCALARS:
        return not new.ndim
    same = _kind(old), _kind(new)
    if is_first and not getattr(old, "committed", True):
        return same[0][:2] == same[1][:2]
    return same[0] == same[1]


def _kind(x: Any) -> Any:
    """Returns the shape, the dtype and the sharding of an array."""
    return tuple(x.shape), str(x.dtype), getattr(x, "sharding", None)


def _text(x: Any) -> str:
    if type(x) in SCALARS:
        return type_text(x)
    where = f" {x.sharding.spec}" if type(x) is ShardedTensor else ""
    return f"{x.dtype}[{', '.join([str(n) for n in x.shape])}]{where}"


def _structure(tree: Any) -> str:
    return ", ".join(paths(tree, "carry")) or "empty"


# -- execution -------------------------------------------------------------------------------------


@implements(counted_loop, "algorithm")
def _run_counted(init: Carry, xs: Any, bounds: Any, body: Function, reverse: bool, caller: str) -> tuple[Any, Any]:
    if _lacks_elements((init, xs, bounds)):
        with inferring():
            return _infer_counted(init, xs, bounds, body, reverse, caller)
    begin, end = [_integer(caller, name, x) for name, x in zip(("lower", "upper"), bounds, strict=True)]
    if end <= begin:
        return _without_trips(init, xs, bounds, body, reverse, caller)
    carry, names, stacks = map_leaves(_own, init), paths(None, "y"), list[Any]()
    slices = [None if x is None else _Slices(x) for x in leaves(xs)]
    for k in range(begin, end):
        i = begin + end - 1 - k if reverse else k
        after, y = body(i, carry, replaced(xs, [x and x.at(i) for x in slices]))
        if k == begin:
            carry = _next(caller, carry, after, body, is_first=True)
            names, stacks = paths(y, "y"), [None if one is None else _Stack(end - begin, one) for one in leaves(y)]
        else:
            carry = _next(caller, carry, after, body, is_first=False)
            if not keeps_avals(body) and paths(y, "y") != names:
                raise ArgumentError(f"{caller}: the results of f differ in structure; wanted the same in each trip")
        for name, stack, one in zip(names, stacks, leaves(y), strict=True):
            if stack is not None:
                stack.put(caller, name, i - begin, one)
    return carry, replaced(y, [stack and stack.array for stack in stacks])


def _lacks_elements(tree: Any) -> bool:
    """Whether a tensor in a tree lacks elements, as those on an `AbstractMesh` do."""
    return any(lacks_elements(x) for x in leaves(tree))


def _next(caller: str, before: Carry, after: Carry, body: Function, *, is_first: bool) -> Carry:
    """Returns the next carry: of a program, which writes to nothing that it gets, as it is; otherwise of arrays of its
    own.
    """
    if not keeps_avals(body):
        return map_leaves(_own, _following(caller, before, after, is_first=is_first))
    return _following(caller, before, after, is_first=True) if is_first else after


def keeps_avals(function: Function) -> bool:
    """Returns whether a function is a program, so that its arrays have the same avals in each trip."""
    return getattr(function, "keeps_avals", False)


class _Slices:
    """The slices of an array, to which the function may write."""

    def __init__(self, x: Any) -> None:
        self._x = x
        self._buffer = _host_buffer(x)
        self._first: Any = None

    def at(self, i: int) -> Any:
        """Returns a slice."""
        if self._first is None or self._buffer is None:
            made = call("copy", self._x[i])
            self._first = self._first or (made._aval, made._is_scalar) if self._buffer is not None else None
            return made
        value, is_scalar = self._first
        made = tensor(value, Storage((blockwise.copied(self._buffer[i, ...]),), ([],)))
        return made if is_scalar else mark_array(made)


class _Stack:
    """The stacked results of a loop.

    Args:
        n: the number of trips.
        y: the result of the first one that runs.

    Attributes:
        array: the stacked results.
    """

    def __init__(self, n: int, y: Any) -> None:
        y = _converted(y)
        self.array = call("copy", call("broadcast_to", y, (n, *y.shape)))
        self._buffer: Any = None
        self._shape, self._dtype = tuple(y.shape), y.dtype

    def put(self, caller: str, name: str, k: int, y: Any) -> None:
        """Writes the result of a trip.

        Raises:
            ShapeError: it has another shape than that of the first trip.
        """
        array = _converted(y)
        if tuple(array.shape) != self._shape:
            raise ShapeError(
                f"{caller}: {name} has shape {tuple(array.shape)}, and {self._shape} in the first trip; wanted results "
                "of one shape"
            )
        if self._buffer is not None and (given := _host_buffer(array)) is not None and array.dtype == self._dtype:
            blockwise.copy_into(self._buffer[k, ...], given)
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
    with inferring():
        carry, ys = _infer_counted(init, xs, (0, 0), body, reverse, caller)
    made = [_like(x, a) for x, a in zip(leaves(init), leaves(carry), strict=True)]
    return replaced(init, made), map_leaves(_empty_like, ys)


def _like(x: Any, wanted: Any) -> Any:
    """Returns an initial value as an array with the dtype and sharding of the carry."""
    if current_device() is not None:
        return call("asarray", x, dtype=wanted.dtype)
    return call("reshard", call("asarray", x, dtype=wanted.dtype), wanted.sharding)


def _empty_like(x: Any) -> Any:
    if x is None or current_device() is not None:
        return None if x is None else call("zeros", x.shape, dtype=x.dtype)
    return call("zeros", x.shape, dtype=x.dtype, device=x.sharding)


def _read(x: Any) -> Any:
    """Returns a scalar whose element all processes have: in a job, an element of a tensor is in some of them."""
    return call("copy", x) if type(x) is ShardedTensor and in_job() else x


def _integer(caller: str, name: str, x: Any) -> int:
    try:
        n: int = python.index(_read(x))
    except ConcretizationError:
        raise
    except TypeError:
        raise ArgumentTypeError(f"{caller}: {name} is {type_text(x)}; wanted an integer") from None
    return n


@implements(conditional_loop, "algorithm", "announcing")
def _run_conditional(init: Carry, cond: Function, body: Function, caller: str) -> Carry:
    if _lacks_elements(init):
        with inferring():
            return _infer_conditional(init, cond, body, caller)
    carry, is_first = map_leaves(_own, init), True
    while _is_true(caller, "cond_fun returned", cond(carry)):
        carry, is_first = _next(caller, carry, body(carry), body, is_first=is_first), False
    return map_leaves(_converted, carry)


def _is_true(caller: str, what: str, x: Any) -> bool:
    """Returns a condition as a bool, which in a job is the same in all processes."""
    if type(x) is bool or type(x) is np.bool_:
        return bool(x)
    if not hasattr(x, "shape") or x.shape != () or str(x.dtype).rpartition(".")[2] != "bool":
        found = _text(x) if hasattr(x, "shape") else type_text(x)
        raise ArgumentTypeError(f"{caller}: {what} {found}; wanted a scalar of bool")
    return bool(_read(x))


@implements(branch, "algorithm", "announcing")
def _run_branch(index: Any, operands: Sequence[Any], branches: Sequence[Function], caller: str) -> Any:
    if lacks_elements(index):
        with inferring():
            return _infer_branch(index, operands, branches, caller)
    return map_leaves(_converted_result, branches[_number(index, len(branches), caller)](*operands))


def _number(index: Any, count: int, caller: str) -> int:
    """Returns the number of the branch that an index selects."""
    if caller == "cond":
        if getattr(index, "shape", ()) != ():
            raise ArgumentTypeError(f"cond: pred is {_text(index)}; wanted a scalar")
        return int(bool(_read(index)))
    return min(max(_integer("switch", "index", index), 0), count - 1)


def _converted_result(x: Any) -> Any:
    return _converted(x) if is_data(x) or type(x) in SCALARS else x


# -- inference -------------------------------------------------------------------------------------


class _Trip:
    """The transfers of one trip of a loop, or of one branch, which are recorded once for each trip."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[[], Any], Sequence[Any]]] = []

    def record(self, records: Callable[[], Any], made: Callable[[], Any]) -> None:
        """See `TransferListener`."""
        self._calls.append((records, list(made())))

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
def _infer_counted(init: Carry, xs: Any, bounds: Any, body: Function, reverse: bool, caller: str) -> tuple[Any, Any]:
    n = UNKNOWN_TRIPS.get()  # The bounds of a loop whose results are not stacked may be unknown.
    if not any(lacks_elements(x) for x in bounds):
        begin, end = [_integer(caller, name, x) for name, x in zip(("lower", "upper"), bounds, strict=True)]
        n = max(end - begin, 0)
    known: dict[int, Any] = {}
    xs = map_leaves(functools.partial(_inferred_slice, known), xs)
    carry, trip, y = _infer_trips(
        caller, map_leaves(functools.partial(argument, known), init), lambda c: body(0, c, xs)
    )
    trip.repeat(n)
    y = map_leaves(lambda y: None if y is None else _converted(y), y)
    return carry, map_leaves(lambda y: None if y is None else call("broadcast_to", y, (n, *y.shape)), y)


def _infer_trips(caller: str, init: Carry, body: Callable[[Carry], tuple[Any, Any]]) -> tuple[Carry, _Trip, Any]:
    """Returns the carry, the transfers of one trip, and the other results of the function.

    Numbers take dtypes, and uncommitted arrays shardings, of what the function returns, so it is called again with
    these.
    """
    carry = init
    for k in (0, 1, 2):
        trip = _Trip()
        with recorded_by(trip):
            after, y = body(carry)
            found = _following(caller, carry, after, is_first=k < 2)
        if all(
            _kind(old) == _kind(new) if hasattr(old, "shape") else False
            for old, new in zip(leaves(carry), leaves(found), strict=True)
        ):
            break
        carry = map_leaves(_committed, found)
    return found, trip, y


def _committed(x: Any) -> Any:
    """Returns an inferred value as one to which the same value is assigned in each trip."""
    return without_elements(aval(x.shape, x.dtype, x.sharding, True))


def _inferred_slice(known: dict[int, Any], x: Any) -> Any:
    if x is None:
        return None
    x = argument(known, x)
    if not x.shape[0]:
        x = without_elements(aval((1, *x.shape[1:]), x.dtype, x.sharding, x.committed))
    with recorded_by():
        return call("copy", x[0])


@implements(conditional_loop, "infer")
def _infer_conditional(init: Carry, cond: Function, body: Function, caller: str) -> Carry:
    known: dict[int, Any] = {}
    given = map_leaves(functools.partial(argument, known), init)

    def once(carry: Carry) -> tuple[Carry, Any]:
        condition = cond(carry)
        if getattr(condition, "shape", ()) != () or str(getattr(condition, "dtype", "bool")) != "bool":
            raise ArgumentTypeError(f"{caller}: cond_fun returned {_text(condition)}; wanted a scalar of bool")
        return body(carry), None

    carry, trip, _ = _infer_trips(caller, given, once)
    trip.repeat(UNKNOWN_TRIPS.get())
    return carry


@implements(branch, "infer")
def _infer_branch(index: Any, operands: Sequence[Any], branches: Sequence[Function], caller: str) -> Any:
    known: dict[int, Any] = {}
    given = [map_leaves(functools.partial(argument, known), x) for x in operands]
    if getattr(index, "shape", ()) != ():
        raise ArgumentTypeError(
            f"{caller}: {'pred' if caller == 'cond' else 'index'} is {_text(index)}; wanted a scalar"
        )
    results = []
    for function in branches:
        results.append(map_leaves(_converted_result, function(*given)))
    first = results[0]
    for k, other in enumerate(results[1:], 1):
        if paths(first, "result") != paths(other, "result"):
            raise ArgumentError(
                f"{caller}: the branches return different structures: {_structure(first)} and {_structure(other)}"
            )
        for name, a, b in zip(paths(first, "result"), leaves(first), leaves(other), strict=True):
            if hasattr(a, "shape") and _kind(a) != _kind(b):
                raise ArgumentError(
                    f"{caller}: {name} is {_text(a)} of branch 0, and {_text(b)} of branch {k}; wanted the same shape, "
                    "dtype and sharding: cast or reshard what they return"
                )
    return first
