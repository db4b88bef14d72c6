"""Arrays with odd values and layouts, and the comparison of results and errors with NumPy's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import shardtensor as st
from tests.numpy_table import leaves
from tests.sizes.functions import ADDING, DECOMPOSITIONS, PERMITTED, REFUSED, Call

FLOATS = ("f8", "f4", "f2")
DTYPES = (*FLOATS, *FLOATS, "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "c8", "c16")
SPECIALS = ("plain", "odd", "extreme")
LAYOUTS = ("whole", "slice", "slice of a slice", "reversed", "transposed", "steps")
MESHES = ((1,), (2,), (3,), (8,), (2, 2), (4, 2))


def made(x: np.ndarray, dtype: str, special: str, rng: np.random.Generator) -> np.ndarray:
    """Returns an array of that dtype, with some special values."""
    kind = np.dtype(dtype).kind
    x = (abs(x) if kind == "u" else x.real if kind != "c" else x).astype(dtype)
    if special != "plain" and kind != "b":
        where = rng.random(x.shape) < rng.choice([0.2, 0.6])
        values = odd(dtype) if special == "odd" else extreme(dtype)
        x[where] = rng.choice(np.asarray(values, dtype), int(where.sum()))
    return x


def odd(dtype: str) -> list[Any]:
    """Returns numbers that are not finite, and zeros; of integers the least and the greatest."""
    if np.dtype(dtype).kind in "iu":
        return extreme(dtype)
    signs = [np.inf, -np.inf, np.nan, -0.0, 0.0]
    return signs if np.dtype(dtype).kind == "f" else [complex(a, b) for a in signs for b in signs]


def extreme(dtype: str) -> list[Any]:
    """Returns the greatest and least numbers of a dtype."""
    if np.dtype(dtype).kind in "iu":
        return [np.iinfo(dtype).min, np.iinfo(dtype).max]
    limits = np.finfo(dtype)
    return [limits.max, limits.min, limits.tiny, -limits.smallest_subnormal, limits.max / 2]


def viewed(x: np.ndarray, layout: str, put: Callable[[np.ndarray], Any]) -> Any:
    """Returns an array as a view of a larger one, or of one with other strides, that ``put`` places."""
    if not x.ndim:
        return put(x)
    wide = [(1, 2)] * x.ndim
    match layout:
        case "slice":
            return put(np.pad(x, wide))[(slice(1, -2),) * x.ndim]
        case "slice of a slice":
            return put(np.pad(x, wide))[(slice(1, None),) * x.ndim][(slice(None, -2),) * x.ndim]
        case "reversed":
            return put(x[::-1])[::-1]
        case "transposed":
            return put(x.T).T
        case "steps":
            return put(np.repeat(x, 2, axis=-1))[..., ::2]
    return put(x)


def place(x: np.ndarray, layout: str, sharding: st.NamedSharding) -> st.ShardedTensor:
    """Places an array as a view on the devices of a sharding, whose spec may have more dimensions."""

    def put(a: np.ndarray) -> st.ShardedTensor:
        return st.device_put(a, st.NamedSharding(sharding.mesh, st.P(*list(sharding.spec)[: a.ndim])))

    return viewed(x, layout, put)


class Differs(AssertionError):
    """A result is not NumPy's."""


ERRORS = (ArithmeticError, AttributeError, IndexError, TypeError, ValueError)


def outcome(call: Call, operands: Any) -> Any:
    """Returns the results of a call, or its error."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return leaves(call(operands))
        except ERRORS as error:
            return error


PLAIN = (bool, int, float, complex, str, bytes)
"""The types of Python's values that are compared; others, such as flags and shapes of NumPy's own types, have no equality."""


def compare(found: Any, wanted: Any, exact: bool, scale: float, either_zero: bool = False) -> None:
    """Compares a result with NumPy's: to the bit, or up to errors of rounding of numbers up to a scale."""
    if not isinstance(found, st.ShardedTensor | np.ndarray | np.generic):
        if isinstance(wanted, np.ndarray) or (type(found) in PLAIN and not (found == wanted or found != found)):
            raise Differs(f"{found!r:.80} instead of {wanted!r:.80}")
        return
    found, wanted = np.asarray(found), np.asarray(wanted)
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        raise Differs(f"{found.shape} {found.dtype} instead of {wanted.shape} {wanted.dtype}")
    if found.dtype.kind not in "fc":
        if not np.array_equal(found, wanted):
            raise different(found, wanted)
        return
    if exact:
        either_zero |= found.dtype.kind == "c"  # Whether a product adds 0 to a part or takes it away is not defined.
        same = (found == wanted) & ((np.signbit(found.real) == np.signbit(wanted.real)) | either_zero)
        if not (same | (np.isnan(found) & np.isnan(wanted))).all():
            raise different(found, wanted)
        return
    eps = float(np.finfo(found.dtype).eps)
    if found.dtype.kind == "c":  # C leaves it open which part of a product with infinity is NaN.
        found, wanted = [np.where(np.isfinite(x), x, np.nan) for x in (found, wanted)]
    with np.errstate(all="ignore"):
        if not np.allclose(found, wanted, rtol=64 * eps, atol=64 * eps * scale, equal_nan=True):
            raise different(found, wanted)


def compare_all(found: list[Any], wanted: list[Any]) -> None:
    """Compares the values of a program."""
    for x, y in zip(found, wanted, strict=True):
        compare(x, y, exact=False, scale=1)


def different(found: np.ndarray, wanted: np.ndarray) -> Differs:
    """Returns an error that shows the elements that differ."""
    where = ~(
        (found == wanted) & (np.signbit(found.real) == np.signbit(wanted.real)) | (found != found) & (wanted != wanted)
    )
    rows = [
        f"{i}: {a} instead of {b}"
        for i, a, b in zip(np.argwhere(where).tolist(), found[where], wanted[where], strict=True)
    ]
    return Differs(f"{found.shape} {found.dtype}, {len(rows)} elements: {'; '.join(rows[:4])}")


def scale_of(name: str, operands: Iterable[np.ndarray]) -> float:
    """Returns the magnitude of numbers that a function adds, at least 1: that of products of operands."""
    is_transform = name.startswith("fft") and "shift" not in name
    adds = is_transform or name.rpartition(".")[2] in ADDING or name in DECOMPOSITIONS
    return min(greatest(operands), 1e150) ** 2 if adds else 1.0


def greatest(arrays: Iterable[np.ndarray]) -> float:
    """Returns the greatest magnitude of finite numbers, at least 1."""
    finite = [np.abs(x[np.isfinite(x)]) for x in arrays if x.dtype.kind in "iufc"]
    return max([1.0, *[float(x.max(initial=0)) for x in finite]])


def check_errors(found: Any, wanted: Any) -> None:
    """Compares the outcomes of a call of which at least one is an error, which is one of the library or of NumPy's class."""
    if isinstance(found, Exception) and not isinstance(found, st.ShardTensorError | type(wanted)):
        raise Differs(f"{found!r} instead of {wanted!r:.200}")
    if not isinstance(found, Exception):
        if not any(words in str(wanted) for words in PERMITTED):
            raise Differs(f"a result instead of {wanted!r}")
    elif not isinstance(wanted, Exception):
        refuses = isinstance(found, st.ConcretizationError) or any(words in str(found) for words in REFUSED)
        if not refuses:
            raise Differs(f"{found!r} instead of {[getattr(y, 'dtype', y) for y in wanted]}")
