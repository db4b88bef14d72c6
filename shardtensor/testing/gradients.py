"""`check_grads`: derivatives of a function compared with finite differences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardtensor.core import call
from shardtensor.errors import ArgumentError
from shardtensor.functions.derivatives.cotangents import is_inexact
from shardtensor.interpreters.differentiation.grad import jvp, linearize, vjp
from shardtensor.tensor.operands import dtype_of, shape_of
from shardtensor.tensor.pytree import form_of, leaves, map_leaves, paths, replaced
from shardtensor.tensor.tensor import ShardedTensor

_STEPS = {"float16": 0.05, "float32": 5e-3, "float64": 1e-4, "complex64": 5e-3, "complex128": 1e-4}
"""By dtype: about the cube root of the distance from 1 to the next number. Smaller floats have 0.1."""

_TOLERANCES = {"float16": 1e-2, "float32": 2e-3, "float64": 1e-5, "complex64": 1e-3, "complex128": 1e-5}
"""By dtype; those of JAX. Smaller floats have 0.1."""

Tolerance = float | Mapping[Any, float] | None


def check_grads(
    f: Callable[..., Any],
    args: Sequence[Any],
    order: int,
    modes: Sequence[str] = ("fwd", "rev"),
    atol: Tolerance = None,
    rtol: Tolerance = None,
    eps: float | None = None,
) -> None:
    """Checks the derivatives of a function against finite differences, in one random direction.

    The function is called several times, with copies of the arguments.

    Args:
        f: the function. Its arguments and results are pytrees of tensors, host arrays and numbers; integers are not
            changed.
        args: a tuple of its arguments.
        order: up to which order derivatives are checked: of the second order are the derivatives of `jvp` and of `vjp`.
        modes: ``"fwd"`` checks `jvp`, ``"rev"`` checks `vjp`, and ``"lin"`` checks `linearize`.
        atol: the absolute tolerance, or one for each dtype in a dict; by default 1e-5 in double precision, 2e-3 in
            single precision.
        rtol: likewise, the tolerance relative to the finite difference.
        eps: the step of the finite differences; by default 1e-4, in single precision 5e-3.

    Raises:
        AssertionError: a derivative differs.

    >>> from shardtensor.testing import check_grads
    >>> check_grads(lambda x: st.sin(x) * x, (st.asarray([0.5, 1.5]),), order=2)
    """
    args = tuple(args)
    names = [np.dtype(dtype_of(x)).name for x in leaves(args) if _is_number(x) and is_inexact(dtype_of(x))]
    eps = eps or max([_STEPS.get(name, 0.1) for name in names], default=1e-4)
    tolerance = _Tolerance(atol, rtol)
    if unknown := sorted(set(modes) - {"fwd", "rev", "lin"}):
        raise ArgumentError(f"check_grads: modes has {unknown}; wanted 'fwd', 'rev' and 'lin'")
    name = getattr(f, "__name__", "the function")
    for mode in ("fwd", "rev", "lin"):
        if mode in modes:
            _check(f, args, order, modes, mode, eps, tolerance, name)


def _check(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    order: int,
    modes: Sequence[str],
    mode: str,
    eps: float,
    tolerance: _Tolerance,
    name: str,
) -> None:
    """Checks one mode, and the derivatives of its result."""
    more: tuple[Any, ...] = args
    if mode == "rev":
        name = f"vjp of {name}"
        _check_vjp(f, args, eps, tolerance, name)
        derived: Callable[..., Any] = functools.partial(_pulled, f)
    else:
        derived = functools.partial(jvp if mode == "fwd" else _linearized, f)
        name = f"{'jvp' if mode == 'fwd' else 'linearize'} of {name}"
        _check_jvp(f, derived, args, eps, tolerance, name)
        more = (args, args)
    if order > 1:
        for other in modes:
            _check(derived, more, order - 1, modes, other, eps, tolerance, name)


def _linearized(f: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    value, push = linearize(f, *primals)
    return value, push(*tangents)


def _pulled(f: Callable[..., Any], *args: Any) -> Any:
    """Returns the cotangents of the arguments for the result itself as the cotangent."""
    value, pull = vjp(f, *args)
    return pull(value)


def _check_jvp(
    f: Callable[..., Any], derived: Callable[..., Any], args: Any, eps: float, tolerance: _Tolerance, name: str
) -> None:
    direction = _random(args)
    value, tangent = derived(_copied(args), direction)
    tolerance.compare(f"{name}: the value", value, f(*_copied(args)))
    tolerance.compare(f"{name}: the tangent", tangent, _difference(f, args, direction, eps), value)


def _check_vjp(f: Callable[..., Any], args: Any, eps: float, tolerance: _Tolerance, name: str) -> None:
    value, pull = vjp(f, *_copied(args))
    tolerance.compare(f"{name}: the value", value, f(*_copied(args)))
    direction, cotangent = _random(args), _random(value)
    product = _product(pull(cotangent), direction)
    difference = _product(cotangent, _difference(f, args, direction, eps))
    tolerance.check(f"{name}: the product of the gradient and a direction", product, difference, leaves((args, value)))


class _Tolerance:
    """What is compared by absolute and relative tolerances."""

    def __init__(self, atol: Tolerance, rtol: Tolerance) -> None:
        self.limits = atol, rtol

    def of(self, dtypes: Sequence[Any]) -> list[float]:
        """Returns the absolute and the relative tolerance, the greatest of some dtypes."""
        tolerances: list[float] = []
        for limit in self.limits:
            if limit is not None and not isinstance(limit, Mapping):
                tolerances.append(limit)
                continue
            by_name = {np.dtype(key).name: value for key, value in (limit or {}).items()}
            known = _TOLERANCES | by_name
            tolerances.append(max([known.get(np.dtype(d).name, 0.1) for d in dtypes if is_inexact(d)], default=0.0))
        return tolerances

    def check(self, what: str, found: Any, wanted: Any, values: Sequence[Any]) -> None:
        """Asserts that two numbers are equal."""
        atol, rtol = self.of([dtype_of(x) for x in values if _is_number(x)])
        error = abs(found - wanted)
        if not error <= atol + rtol * abs(wanted):
            raise AssertionError(
                f"check_grads: {what} is {found:.8g}, and {wanted:.8g} by finite differences: they differ by "
                f"{error:.3g}; tolerated are {atol:.3g} and {rtol:.3g} times the second one"
            )

    def compare(self, what: str, found: Any, wanted: Any, like: Any = None) -> None:
        """Asserts that the numbers of two trees are equal."""
        if form_of(found) != form_of(wanted):
            raise AssertionError(f"check_grads: {what} has the structure {form_of(found)}; wanted {form_of(wanted)}")
        values = leaves(found if like is None else like)
        for path, x, y, value in zip(paths(found, what), leaves(found), leaves(wanted), values, strict=True):
            if y is None or not _is_number(value) or not is_inexact(dtype_of(value)):
                continue
            if (shape_of(x), dtype_of(x)) != (shape_of(value), dtype_of(value)):
                raise AssertionError(
                    f"check_grads: {path} has shape {shape_of(x)} and dtype {dtype_of(x)}; wanted {shape_of(value)} "
                    f"and {dtype_of(value)}"
                )
            for index, one, other in _worst(x, y, self.of([dtype_of(value)])[1]):
                self.check(f"{path}{index}", one, other, [value])


def _worst(x: Any, y: Any, rtol: float) -> list[tuple[str, Any, Any]]:
    """Returns the index at which two arrays differ most, and their elements there; an empty list if they are equal."""
    x, y = _wide(x), _wide(y)
    same = call("logical_or", x == y, call("logical_and", call("isnan", x), call("isnan", y)))
    if bool(call("all", same)):
        return []
    excess = call("abs", x - y) - rtol * call("abs", y)
    excess = call("where", call("isfinite", excess), excess, np.inf)  # NaN or an infinity in only one of them
    number = int(call("argmax", call("reshape", call("where", same, -np.inf, excess), (-1,))))
    at = tuple(map(int, np.unravel_index(number, x.shape)))
    return [(f"[{', '.join(map(str, at))}]" if at else "", _scalar(x[at]), _scalar(y[at]))]


def _scalar(x: Any) -> Any:
    """Returns an element, which only some of the processes hold, in all of them."""
    x = call("copy", x)
    return complex(x) if dtype_of(x).kind == "c" else float(x)


def _wide(x: Any) -> Any:
    """Returns an array as a tensor in double precision."""
    x = x if type(x) is ShardedTensor else call("asarray", x)
    return call("astype", x, "complex128" if x.dtype.kind == "c" else "float64")


def _is_number(x: Any) -> bool:
    return hasattr(x, "dtype") or type(x) in (bool, int, float, complex)


def _copied(args: Any) -> Any:
    """Returns copies of arguments, which a function may write."""
    return map_leaves(lambda x: x.copy() if isinstance(x, (ShardedTensor, np.ndarray)) else x, args)


def _random(tree: Any) -> Any:
    """Returns random numbers in the shapes, dtypes and layouts of a tree; None for leaves of other
    kinds than floating-point numbers.
    """
    rng = np.random.RandomState(0)
    return map_leaves(lambda x: _random_like(rng, x), tree)


def _random_like(rng: np.random.RandomState, x: Any) -> Any:
    if not _is_number(x) or not is_inexact(dtype_of(x)):
        return None
    numbers = rng.standard_normal(shape_of(x))
    if dtype_of(x).kind == "c":
        numbers = numbers + 1j * rng.standard_normal(shape_of(x))
    if type(x) in (float, complex):
        return type(x)(numbers)
    numbers = call("asarray", numbers, device=x.sharding if type(x) is ShardedTensor else None)
    return call("astype", numbers, x.dtype)


def _difference(f: Callable[..., Any], args: Any, direction: Any, eps: float) -> Any:
    """Returns a central difference of the results; None for those that are not floating-point numbers."""

    def moved(step: float) -> Any:
        pairs = zip(leaves(_copied(args)), leaves(direction), strict=True)
        return f(*replaced(args, [x if d is None else _sum(x, d, step) for x, d in pairs]))

    ahead, behind = moved(eps), moved(-eps)
    quotients = [
        (_wide(a) - _wide(b)) * (0.5 / eps) if _is_number(a) and is_inexact(dtype_of(a)) else None
        for a, b in zip(leaves(ahead), leaves(behind), strict=True)
    ]
    return replaced(ahead, quotients)


def _sum(x: Any, d: Any, step: float) -> Any:
    if type(x) in (float, complex):
        return x + d * step
    total = call("add", x, d * step)
    return total if total.dtype == x.dtype else call("astype", total, x.dtype)


def _product(gs: Any, ts: Any) -> float:
    """Returns the real part of the sum of the products of cotangents and tangents."""
    total = 0.0
    for g, t in zip(leaves(gs), leaves(ts), strict=True):
        if g is not None and t is not None:
            total += float(call("real", call("sum", _wide(g) * _wide(t))))
    return total
