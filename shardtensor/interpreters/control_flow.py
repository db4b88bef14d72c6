"""Loops and branches of tensors, with the signatures of ``jax.lax``.

In eager mode they are Python's loops and branches. In a program of `st.jit` each of them is one equation, which holds
the program of each of its functions: neither the text of the program nor the time to trace it grows with the number of
trips.
"""

from __future__ import annotations

import contextlib
import functools
import operator as python
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from shardtensor.backend.protocol import current_device
from shardtensor.backend.registry import in_job
from shardtensor.communication.transfer_log import UNKNOWN_TRIPS, is_recording, record_transfer, recorded_by
from shardtensor.core import call, hinted, implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, AxisError, ConcretizationError, ShapeError, type_text
from shardtensor.functions.random_keys import Key
from shardtensor.host import blockwise
from shardtensor.interpreters.infer import inferring
from shardtensor.interpreters.mutation.views import View, stand_in
from shardtensor.sharding.rules import normalize_axis
from shardtensor.tensor.operands import is_data
from shardtensor.tensor.ownership import shared
from shardtensor.tensor.pytree import hint_to_register, leaves, map_leaves, paths, replaced
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
    xs = _as_arrays("scan", "xs", xs)
    n = _length("scan", xs, length)
    pair_of_results: tuple[T, Y] = counted_loop(init, xs, (0, n), functools.partial(_pair, f), bool(reverse), "scan")
    return pair_of_results


def _pair(f: Function, _: Any, carry: Any, x: Any) -> tuple[Any, Any]:
    made = f(_owned(carry), x)
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
    return body_fun(i, _owned(carry)), None


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
    xs = _as_arrays("map", "xs", xs)
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
    last: T = conditional_loop(init_val, _on_own(cond_fun), _on_own(body_fun), "while_loop")
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
    result: Y = branch(pred, operands, (_on_own(false_fun), _on_own(true_fun)), "cond")
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
    result: Y = branch(index, operands, tuple([_on_own(f) for f in branches]), "switch")
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
    elems = _as_arrays("associative_scan", "elems", elems)
    try:
        for x in leaves(elems):
            normalize_axis(axis, x.ndim)
    except (ArgumentTypeError, AxisError) as error:
        raise type(error)(f"associative_scan: {error}") from None
    arrays = [call("moveaxis", x, axis, 0) for x in leaves(elems)]
    _length("associative_scan", arrays, None)
    arrays = [call("flip", x, axis=0) for x in arrays] if reverse else arrays

    def combined(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        given = replaced(elems, _to_axis(a, axis))
        made = _on_own(fn)(given, replaced(elems, _to_axis(b, axis)))
        if paths(made, "elems") != paths(elems, "elems"):
            raise ArgumentError(
                f"associative_scan: fn returned {_structure(made, 'elems')}; wanted {_structure(elems, 'elems')}"
            )
        for name, x, y in zip(paths(elems, "elems"), leaves(given), leaves(made), strict=True):
            if getattr(y, "shape", None) != x.shape:
                raise ShapeError(
                    f"associative_scan: fn returned {_text(y)} for {name}, which is {_text(x)}; wanted one shape"
                )
        return leaves(made)

    def on_front(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        return [call("moveaxis", x, axis, 0) for x in combined(a, b)]

    made = _scanned(on_front, arrays)
    made = [call("flip", x, axis=0) for x in made] if reverse else made
    scanned: T = replaced(elems, _to_axis(made, axis))
    return scanned


def _to_axis(arrays: Sequence[Any], axis: int) -> list[Any]:
    return [call("moveaxis", x, 0, axis) for x in arrays]


def _scanned(combined: Callable[[Sequence[Any], Sequence[Any]], list[Any]], arrays: Sequence[Any]) -> list[Any]:
    """Returns the scan along the first dimension: that of pairs, and in between one more call of the function."""
    n = arrays[0].shape[0]
    if n < 2:
        return [call("copy", x) for x in arrays]
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


def _as_arrays(caller: str, name: str, tree: T) -> T:
    """Returns a pytree of arrays of the library, in which None is unchanged."""
    pairs = zip(paths(tree, name), leaves(tree), strict=True)
    return replaced(tree, [_as_array(caller, path, x) for path, x in pairs])  # type: ignore[no-any-return]


def _as_array(caller: str, name: str, x: Any) -> Any:
    if x is None:
        return None
    if not hasattr(x, "shape"):
        wanted = "; wanted arrays"
        if type(x) in SCALARS:
            wanted = ", which has no first dimension; wanted arrays: st.asarray converts a list"
        if isinstance(x, Key):
            wanted = "; make the keys in the function: split a key of the carry, or fold_in a number of xs into one"
        raise ArgumentTypeError(f"{caller}: {name} is {_text(x)}{wanted}")
    array = call("asarray", x)
    if not array.ndim:
        raise ArgumentError(f"{caller}: {name} is an array without dimensions; wanted a first dimension")
    return array


def _length(caller: str, xs: Any, length: int | None) -> int:
    """Returns the number of trips."""
    lengths: dict[str, int] = {
        path: x.shape[0] for path, x in zip(paths(xs, "xs"), leaves(xs), strict=True) if x is not None
    }
    if length is not None:
        lengths["length"] = _integer(caller, "length", length)
        if lengths["length"] < 0:
            raise ArgumentError(f"{caller}: length is {length}; wanted 0 or more")
    if not lengths:
        raise ArgumentError(f"{caller}: there is no array and no length; give one of them")
    if len(set(lengths.values())) > 1:
        found = ", ".join([f"{name} is {n}" for name, n in lengths.items()])
        raise ArgumentError(f"{caller}: the lengths differ: {found}; wanted the same length")
    return int(min(lengths.values()))


# -- the carry -------------------------------------------------------------------------------------


def _on_own(function: Function) -> Function:
    """Returns a function that calls another one with arrays to which it may write."""
    return functools.partial(_call_on_own, function)


def _call_on_own(function: Function, *args: Any) -> Any:
    return function(*_owned(args))


def _owned(tree: T) -> T:
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
        return mark_array(tensor(x._aval, x._storage)) if lacks_elements(x) else call("copy", x)
    return mark_array(tensor(x._aval, shared(x._storage)))


def _converted(x: Any) -> Any:
    """Returns what a function has returned as an array; an object that is neither an array nor a number unchanged."""
    return call("asarray", x) if type(x) is not ShardedTensor and (type(x) in SCALARS or is_data(x)) else x


def _following(caller: str, before: Carry, after: Carry, *, is_first: bool) -> Carry:
    """Returns the next carry, of arrays.

    Raises:
        ArgumentError: it differs from the one before it.
    """
    names = paths(before, "carry")
    if names != paths(after, "carry"):
        raise ArgumentError(
            f"{caller}: the carry changes its structure: it is {_structure(before, 'carry')} before a trip, and "
            f"{_structure(after, 'carry')} after it; return the structure of the initial value"
        )
    made = [
        _follower(caller, *leaf, is_first=is_first) for leaf in zip(names, leaves(before), leaves(after), strict=True)
    ]
    return replaced(before, made)


def _follower(caller: str, name: str, old: Any, new: Any, *, is_first: bool) -> Any:
    """Returns a leaf of the next carry: an array, a key or None."""
    if type(old) is type(new) is ShardedTensor and old._aval is new._aval:  # The common case.
        return new
    for x in (old, new):
        if not (x is None or isinstance(x, (*SCALARS, Key, ShardedTensor)) or is_data(x)):
            wanted = "wanted arrays, numbers, keys and None"
            raise ArgumentTypeError(f"{caller}: {name} is {type_text(x)}; {wanted}{hint_to_register(x)}")
    array = _converted(new)
    may_change = is_first and (type(old) in SCALARS or not getattr(old, "committed", True))
    expected, found = _kind(old), _kind(array)
    if type(old) in SCALARS and is_first:
        expected, found = expected[:1], found[:1]
    elif may_change:
        expected, found = expected[:2], found[:2]
    if expected != found:
        raise ArgumentError(
            f"{caller}: {name} changes: it is {_text(old)} before a trip, and {_text(array)} after it; wanted the same "
            f"shape, dtype{'' if may_change else ' and sharding'}: cast{'' if may_change else ' or reshard'} what the "
            "function returns, or begin with such a value"
        )
    return array


def _kind(x: Any) -> Any:
    """Returns the shape, the dtype and the sharding of an array; of another object, the shape of a number and the
    type.
    """
    if not hasattr(x, "shape"):
        return () if type(x) in SCALARS else None, Key if isinstance(x, Key) else type(x), None
    return tuple(x.shape), str(x.dtype), getattr(x, "sharding", None)


def _text(x: Any) -> str:
    if isinstance(x, Key):
        return "a key"
    if not hasattr(x, "shape"):
        return type_text(x)
    where = f" {x.sharding.spec}" if type(x) is ShardedTensor else ""
    return f"{x.dtype}[{', '.join([str(n) for n in x.shape])}]{where}"


def _structure(tree: Any, name: str) -> str:
    return ", ".join(paths(tree, name)) or "empty"


# -- execution -------------------------------------------------------------------------------------


@implements(counted_loop, "algorithm")
def _run_counted(init: Carry, xs: Any, bounds: Any, body: Function, reverse: bool, caller: str) -> tuple[Any, Any]:
    if _lacks_elements((init, xs, bounds)):
        with inferring():
            return _infer_counted(init, xs, bounds, body, reverse, caller)
    begin, end = [_integer(caller, name, x) for name, x in zip(("lower", "upper"), bounds, strict=True)]
    if end <= begin:
        return _without_trips(init, xs, bounds, body, reverse, caller)
    carry, slices = _owned(init), [None if x is None else _Slices(x) for x in leaves(xs)]
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
    return _owned(carry), replaced(y, [stack and stack.array for stack in stacks])


def _lacks_elements(tree: Any) -> bool:
    """Whether a tensor in a tree lacks elements, as those on an `AbstractMesh` do."""
    return any(lacks_elements(x) for x in leaves(tree))


def _next(caller: str, before: Carry, after: Carry, body: Function, *, is_first: bool) -> Carry:
    """Returns the next carry, of arrays; the one that a program returns is as it is wanted."""
    return after if keeps_avals(body) and not is_first else _following(caller, before, after, is_first=is_first)


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
            made = call("copy", self._x[i])
            self._first = self._first or (made._aval, made._is_scalar) if self._buffer is not None else None
            return made
        value, is_scalar = self._first
        made = tensor(value, Storage((blockwise.copied(self._buffer[i, ...]),), ([],)))
        return made if is_scalar else mark_array(made)


def _stacks(caller: str, n: int, y: Any) -> list[Any]:
    """Returns a stack for n results like each leaf of y."""
    return [None if one is None else _Stack(n, _result(caller, one)) for one in leaves(y)]


def _put(caller: str, names: Sequence[str], stacks: Sequence[Any], k: int, y: Any) -> None:
    """Writes the results of a trip."""
    for name, stack, one in zip(names, stacks, leaves(y), strict=True):
        if stack is not None:
            stack.put(caller, name, k, one)


def _result(caller: str, y: Any) -> Any:
    """Returns a result that is stacked, as an array."""
    y = _converted(y)
    if not hasattr(y, "shape"):
        raise ArgumentTypeError(f"{caller}: the function returned {_text(y)}, which cannot be stacked; wanted arrays")
    return y


def _has_changed(first: Any, second: Any) -> bool:
    """Whether results of the second trip have other dtypes or layouts than those of the first one."""
    return [_kind(_converted(x))[1:] for x in leaves(first)] != [_kind(_converted(x))[1:] for x in leaves(second)]


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
    with inferring(), recorded_by():
        carry, ys = _infer_counted(init, xs, (0, 0), body, reverse, caller)
    return _owned(_placed(init, carry)), map_leaves(_empty_like, ys)


def _placed(init: Carry, carry: Carry) -> Carry:
    """Returns an initial carry, which no trip has changed, with the dtypes and layouts of an inferred one."""
    return replaced(init, [_like(x, a) for x, a in zip(leaves(init), leaves(carry), strict=True)])


def _like(x: Any, wanted: Any) -> Any:
    """Returns an initial value as an array with the dtype and sharding of the carry."""
    if type(wanted) is not ShardedTensor:
        return x
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


def _check_scalar(caller: str, name: str, x: Any, kinds: str) -> None:
    """Checks an array without elements.

    Raises:
        ArgumentTypeError: it has dimensions, or a dtype of another kind.
    """
    if x.shape != () or x.dtype.kind not in kinds:
        raise ArgumentTypeError(
            f"{caller}: {name} is {_text(x)}; wanted {'a scalar' if 'f' in kinds else 'an integer'}"
        )


def _integer(caller: str, name: str, x: Any) -> int:
    try:
        n: int = python.index(_read(x))
    except ConcretizationError:
        raise
    except TypeError:
        raise ArgumentTypeError(f"{caller}: {name} is {_text(x)}; wanted an integer") from None
    return n


@implements(conditional_loop, "algorithm", "announcing")
def _run_conditional(init: Carry, cond: Function, body: Function, caller: str) -> Carry:
    if _lacks_elements(init):
        with inferring():
            return _infer_conditional(init, cond, body, caller)
    carry, is_first = _owned(init), True
    while _is_true(caller, "cond_fun returned", cond(carry)):
        carry, is_first = _next(caller, carry, body(carry), body, is_first=is_first), False
    if is_first:
        with inferring(), recorded_by():
            inferred = _infer_conditional(init, cond, body, caller)
        carry = _placed(init, inferred)
    return _owned(carry)


def _is_true(caller: str, what: str, x: Any) -> bool:
    """Returns a condition as a bool, which in a job is the same in all processes."""
    _check_condition(caller, what, x)
    return bool(_read(x))


def _check_condition(caller: str, what: str, x: Any) -> None:
    is_bool = type(x) is bool or (getattr(x, "shape", None) == () and str(x.dtype).rpartition(".")[2] == "bool")
    if not is_bool:
        raise ArgumentTypeError(f"{caller}: {what} {_text(x)}; wanted a scalar of bool")


@implements(branch, "algorithm", "announcing")
def _run_branch(index: Any, operands: Sequence[Any], branches: Sequence[Function], caller: str) -> Any:
    if lacks_elements(index):
        with inferring():
            return _infer_branch(index, operands, branches, caller)
    return _owned(map_leaves(_converted, branches[_number(index, len(branches), caller)](*operands)))


def _number(index: Any, count: int, caller: str) -> int:
    """Returns the number of the branch that an index selects."""
    if caller == "cond":
        if getattr(index, "shape", ()) != () or not (type(index) in SCALARS or hasattr(index, "dtype")):
            raise ArgumentTypeError(f"cond: pred is {_text(index)}; wanted a scalar")
        return int(bool(_read(index)))
    return min(max(_integer("switch", "index", index), 0), count - 1)


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
    for name, x in zip(("lower", "upper"), bounds, strict=True):
        if lacks_elements(x):
            _check_scalar(caller, name, x, "iu")
    if not any(lacks_elements(x) for x in bounds):
        begin, end = [_integer(caller, name, x) for name, x in zip(("lower", "upper"), bounds, strict=True)]
        n = max(end - begin, 0)
    known: dict[int, Any] = {}
    given = _owned(map_leaves(functools.partial(stand_in, known=known), init))
    slices = functools.partial(_inferred_slice, known)
    carry, trip, y = _infer_trips(caller, given, lambda c: body(0, c, map_leaves(slices, xs)))
    trip.repeat(n)
    return carry, map_leaves(functools.partial(_inferred_stack, caller, n), y)


def _inferred_stack(caller: str, n: int, y: Any) -> Any:
    if y is None:
        return None
    y = _result(caller, y)
    return call("broadcast_to", y, (n, *y.shape))


def _infer_trips(caller: str, init: Carry, body: Callable[[Carry], tuple[Any, Any]]) -> tuple[Carry, _Trip, Any]:
    """Returns the carry, the transfers of one trip, and the other results of the function.

    Numbers take dtypes, and uncommitted arrays shardings, of what the function returns, so it is called again with
    these.
    """
    carry = init
    for k in (0, 1, 2):
        trip = _Trip()
        # Operators whose transfers follow from elements are inferred without these only where nothing is recorded.
        with recorded_by(trip) if is_recording() else contextlib.nullcontext():
            after, y = body(carry)
            found = _following(caller, carry, after, is_first=k < 2)
        if all(_kind(old) == _kind(new) for old, new in zip(leaves(carry), leaves(found), strict=True)):
            break
        carry = map_leaves(_committed, found)
    return found, trip, y


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
def _infer_conditional(init: Carry, cond: Function, body: Function, caller: str) -> Carry:
    known: dict[int, Any] = {}
    given = _owned(map_leaves(functools.partial(stand_in, known=known), init))

    def once(carry: Carry) -> tuple[Carry, Any]:
        _check_condition(caller, "cond_fun returned", cond(carry))
        return body(carry), None

    carry, trip, _ = _infer_trips(caller, given, once)
    trip.repeat(UNKNOWN_TRIPS.get())
    return carry


@implements(branch, "infer")
def _infer_branch(index: Any, operands: Sequence[Any], branches: Sequence[Function], caller: str) -> Any:
    known: dict[int, Any] = {}
    given = [map_leaves(functools.partial(stand_in, known=known), x) for x in operands]
    if lacks_elements(index):
        _check_scalar(caller, "pred" if caller == "cond" else "index", index, "biufc" if caller == "cond" else "biu")
    else:
        _number(index, len(branches), caller)
    results = []
    for function in branches:
        results.append(map_leaves(_converted, function(*given)))
    names = ("false_fun", "true_fun") if caller == "cond" else [f"branches[{k}]" for k in range(len(branches))]
    first = results[0]
    for k, other in enumerate(results[1:], 1):
        if paths(first, "result") != paths(other, "result"):
            raise ArgumentError(
                f"{caller}: {names[0]} returns {_structure(first, 'result')}, and {names[k]} "
                f"{_structure(other, 'result')}; wanted the same structure"
            )
    columns = zip(paths(first, "result"), *[leaves(x) for x in results], strict=True)
    return replaced(first, [_agreed(caller, names, *column) for column in columns])


def _agreed(caller: str, names: Sequence[str], path: str, *found: Any) -> Any:
    """Returns the leaf of the results of all branches. One that is not placed explicitly takes the sharding of one that
    is.
    """
    given = next((k for k, x in enumerate(found) if getattr(x, "committed", True)), 0)
    a = found[given]
    for k, b in enumerate(found):
        n = 3 if getattr(b, "committed", True) else 2
        if _kind(a)[:n] != _kind(b)[:n] or not (hasattr(a, "shape") or isinstance(a, Key) or a == b):
            raise ArgumentError(
                f"{caller}: {path} is {_text(a)} of {names[given]}, and {_text(b)} of {names[k]}; wanted the same "
                "shape, dtype and sharding: cast or reshard what they return"
            )
    return a
