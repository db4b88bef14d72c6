"""Loops and branches of tensors, with the signatures of ``jax.lax``.

In eager mode they are Python's loops and branches. In a program of `st.jit` each of them is one equation, which holds
the program of each of its functions: neither the text of the program nor the time to trace it grows with the number of
trips.

The main nouns are the carry, which a loop passes from trip to trip, and the trip. This module has the public functions,
`operators` the operators that they call, `execution` and `inference` what these do. The derivatives and the batching
rules of loops are beside the tape and the batcher, which must not be imported here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import shardtensor.interpreters.control_flow.execution  # noqa: F401 - it attaches the algorithms
from shardtensor.core import call, hinted
from shardtensor.errors import ArgumentError, ArgumentTypeError, AxisError, ShapeError, type_text
from shardtensor.functions.random.random_keys import Key
from shardtensor.interpreters.control_flow.operators import (
    Function,
    branch,
    conditional_loop,
    counted_loop,
    integer,
    on_own,
    owned,
    structure_of,
    text_of,
)
from shardtensor.sharding.rules import normalize_axis
from shardtensor.tensor.pytree import leaves, paths, replaced
from shardtensor.tensor.tensor import SCALARS

T = TypeVar("T")
X = TypeVar("X")
Y = TypeVar("Y")


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
        ArgumentTypeError: ``f`` is not a function, or does not return a pair.

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
    pair = f(owned(carry), x)
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ArgumentTypeError(f"scan: f returned {type_text(pair)}; wanted a pair: the next carry, and a result")
    return pair[0], pair[1]


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
        ArgumentTypeError: a bound is not an integer; ``body_fun`` is not a function.

    >>> st.fori_loop(0, 4, lambda i, x: x + i, st.zeros(3)).tolist()
    [6.0, 6.0, 6.0]
    """
    _check_function("fori_loop", "body_fun", body_fun)
    body = functools.partial(_numbered, body_fun)
    last: T = counted_loop(init_val, None, (lower, upper), body, False, "fori_loop")[0]
    return last


def _numbered(body_fun: Function, i: Any, carry: Any, _: Any) -> tuple[Any, None]:
    return body_fun(i, owned(carry)), None


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
        ArgumentTypeError: ``f`` is not a function.

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
        ArgumentTypeError: the condition is not a scalar of bool; an argument is not a function.

    >>> st.while_loop(lambda x: x.sum() < 100, lambda x: 2 * x, st.ones(3)).tolist()
    [64.0, 64.0, 64.0]
    """
    _check_function("while_loop", "cond_fun", cond_fun)
    _check_function("while_loop", "body_fun", body_fun)
    last: T = conditional_loop(init_val, on_own(cond_fun), on_own(body_fun), "while_loop")
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
        ArgumentTypeError: ``pred`` is not a scalar; an argument is not a function.

    >>> st.cond(True, st.sum, st.max, st.ones(3)).tolist()
    3.0
    """
    _check_function("cond", "true_fun", true_fun)
    _check_function("cond", "false_fun", false_fun)
    result: Y = branch(pred, operands, (on_own(false_fun), on_own(true_fun)), "cond")
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
        ArgumentTypeError: the index is not a scalar of integers; a branch is not a function.

    >>> st.switch(2, [st.sum, st.max, st.min], st.arange(4)).tolist()
    0
    """
    branches = tuple(branches)
    if not branches:
        raise ArgumentError("switch: branches is empty; wanted at least one function")
    for k, function in enumerate(branches):
        _check_function("switch", f"branches[{k}]", function)
    result: Y = branch(index, operands, tuple([on_own(f) for f in branches]), "switch")
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
        ArgumentTypeError: ``fn`` is not a function.
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
        left = replaced(elems, _to_axis(a, axis))
        result = on_own(fn)(left, replaced(elems, _to_axis(b, axis)))
        if paths(result, "elems") != paths(elems, "elems"):
            raise ArgumentError(
                f"associative_scan: fn returned {structure_of(result, 'elems')}; wanted {structure_of(elems, 'elems')}"
            )
        for name, x, y in zip(paths(elems, "elems"), leaves(left), leaves(result), strict=True):
            if getattr(y, "shape", None) != x.shape:
                raise ShapeError(
                    f"associative_scan: fn returned {text_of(y)} for {name}, which is {text_of(x)}; wanted one shape"
                )
        return leaves(result)

    def on_front(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        return [call("moveaxis", x, axis, 0) for x in combined(a, b)]

    scans = _scanned(on_front, arrays)
    scans = [call("flip", x, axis=0) for x in scans] if reverse else scans
    scanned: T = replaced(elems, _to_axis(scans, axis))
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
        advice = "; wanted arrays"
        if type(x) in SCALARS:
            advice = ", which has no first dimension; wanted arrays: st.asarray converts a list"
        if isinstance(x, Key):
            advice = "; make the keys in the function: split a key of the carry, or fold_in a number of xs into one"
        raise ArgumentTypeError(f"{caller}: {name} is {text_of(x)}{advice}")
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
        lengths["length"] = integer(caller, "length", length)
        if lengths["length"] < 0:
            raise ArgumentError(f"{caller}: length is {length}; wanted 0 or more")
    if not lengths:
        raise ArgumentError(f"{caller}: there is no array and no length; give one of them")
    if len(set(lengths.values())) > 1:
        text = ", ".join([f"{name} is {n}" for name, n in lengths.items()])
        raise ArgumentError(f"{caller}: the lengths differ: {text}; wanted the same length")
    return int(min(lengths.values()))
