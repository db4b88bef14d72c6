"""The loops of CuPy's ufuncs, and CuPy 14.2's choice: the first loop to which every operand can be cast safely.

The loops differ from NumPy's. For a dtype without a loop, `TypeError` is raised, as by CuPy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

_INTEGERS, _FLOATS, _COMPLEX = "bBhHiIlLqQ", "efd", "FD"
_NUMBERS = _INTEGERS + _FLOATS + _COMPLEX


def _same(letters: str, nin: int = 1, nout: int = 1) -> list[str]:
    """Returns loops whose operands and results have one dtype."""
    return [f"{c * nin}->{c * nout}" for c in letters]


def _test(letters: str, nin: int = 1) -> list[str]:
    """Returns loops whose results are bools."""
    return [f"{c * nin}->?" for c in letters]


_COMPARED = ["??->?", *_test("qQ", 2), "qQ->?", "Qq->?", *_test(_FLOATS, 2)]
_ARITHMETIC = _same("?" + _NUMBERS, 2)
_ROUNDED = _same("?" + _INTEGERS + _FLOATS)
_DIVIDED = ["qq->d", "qQ->d", "Qq->d", "QQ->d", *_same(_FLOATS + _COMPLEX, 2)]

_GROUPS: dict[str, list[str]] = {
    "add maximum minimum multiply subtract fmax fmin": _ARITHMETIC,
    "absolute": [*_same("?" + _INTEGERS + _FLOATS), "F->f", "D->d"],
    "arccos arccosh arcsin arcsinh arctan arctanh cos cosh exp exp2 expm1 log log10 log1p log2 rint sin sinh sqrt tan "
    "tanh": _same(_FLOATS + _COMPLEX),
    "arctan2 copysign hypot nextafter": _same(_FLOATS + _COMPLEX, 2),
    "bitwise_and bitwise_or bitwise_xor gcd lcm": _same("?" + _INTEGERS, 2),
    "bitwise_count": [f"{c}->B" for c in _INTEGERS],
    "cbrt deg2rad degrees fabs rad2deg radians": _same(_FLOATS),
    "ceil floor trunc": _ROUNDED,
    "conjugate reciprocal sign square": _same(_NUMBERS),
    "divide true_divide": _DIVIDED,
    "divmod": _same(_INTEGERS + _FLOATS, 2, 2),
    "equal not_equal greater greater_equal less less_equal": [*_COMPARED, "FF->?", "DD->?"],
    "float_power": ["dd->d", "FF->D", "DD->D"],
    "floor_divide fmod mod remainder": _same(_INTEGERS + _FLOATS, 2),
    "frexp": ["e->ei", "f->fi", "d->di"],
    "heaviside logaddexp logaddexp2": _same(_FLOATS, 2),
    "invert": _same("?" + _INTEGERS),
    "isfinite isinf isnan": _test(_FLOATS + _COMPLEX),
    "ldexp": ["ei->e", "fi->f", "el->e", "fl->f", "di->d", "dq->d"],
    "left_shift right_shift": _same(_INTEGERS, 2),
    "logical_and logical_or": _COMPARED,
    "logical_not": _test("?" + _INTEGERS + _FLOATS),
    "logical_xor": _test("?" + _INTEGERS + _FLOATS, 2),
    "modf": _same(_FLOATS, 1, 2),
    "negative positive": _same("?" + _NUMBERS),
    "power": ["??->b", *_same(_NUMBERS, 2)],
    "signbit": _test(_FLOATS),
    "where": [f"?{c}{c}->{c}" for c in "?" + _NUMBERS],
}

LOOPS: dict[str, list[str]] = {name: loops for names, loops in _GROUPS.items() for name in names.split()}
"""The loops of each ufunc in CuPy's order, in NumPy's letters, without those for bfloat16 and structures."""

_CODE = {
    "add": "in0 + in1", "subtract": "in0 - in1", "multiply": "in0 * in1", "divide": "(out0_type)in0 / (out0_type)in1",
    "true_divide": "(out0_type)in0 / (out0_type)in1", "sqrt": "sqrt(in0)", "less": "in0 < in1", "equal": "in0 == in1", "square": "in0 * in0",
}  # fmt: skip
"""The code of those ufuncs whose loops a C compiler takes, for dtypes that C has."""

_IN_C = "bBhHiIlLqQfd"

_REFUSES_BOOLS = ("negative", "positive", "subtract")  # their loops for bools only raise an error
_COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal", "logical_and", "logical_or")
_RANK = {int: 1, float: 2, complex: 2}
_KINDS = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 2}

Kind = tuple[Any, Any]
"""The dtype of an operand and, for a Python number other than a bool, its type."""


def kind_of(x: Any) -> Kind:
    """Returns the kind of an operand, an array or a number, on which the choice of a loop depends.

    Raises:
        OverflowError: a Python integer has more than 64 bits, which CuPy never accepts.
    """
    if type(x) is int:
        dtype = np.dtype(np.uint64 if x >= 1 << 63 else np.int64)
        dtype.type(x)
        return dtype, int
    if type(x) in (float, complex):
        return np.dtype(type(x)), type(x)
    return np.dtype(bool) if type(x) is bool else x.dtype, None


@functools.lru_cache(20000)
def choose(name: str, kinds: tuple[Kind, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the dtypes of the operands and of the results of the loop that CuPy chooses.

    Raises:
        TypeError: there is no such loop.
    """
    weak = _weak(name, kinds)
    for loop in LOOPS[name]:
        inputs, outputs = [tuple(map(np.dtype, side)) for side in loop.split("->")]
        if all(_fits(kind[0], python, to) for kind, python, to in zip(kinds, weak, inputs, strict=True)):
            if name in _REFUSES_BOOLS and inputs[0].kind == "b":
                raise TypeError(f"The cupy boolean {name} is not supported")
            return inputs, outputs
    raise TypeError(f"Wrong type ({tuple([kind[0] for kind in kinds])}) of arguments for cupy_{name}")


def _weak(name: str, kinds: tuple[Kind, ...]) -> list[Any]:
    """Returns the type of each Python number that adopts the dtype of the arrays, and None for all other operands.

    No number adopts a dtype if one of them has a higher kind than all arrays.
    """
    numbers = [_RANK[python] for _, python in kinds if python is not None]
    arrays = [_KINDS[dtype.kind] for dtype, python in kinds if python is None]
    if not numbers or not arrays or max(arrays) < max(numbers):
        return [None] * len(kinds)
    beside_integers = name in _COMPARISONS and any(d.kind in "iu" for d, python in kinds if python is None)
    return [None if python is int and beside_integers else python for _, python in kinds]


def _fits(dtype: Any, python: Any, to: Any) -> bool:
    return np.can_cast(dtype, to) or (python is not None and np.result_type(python(0), to) == to)


@dataclass(frozen=True)
class Loop:
    """A loop of a ufunc; the code is None where the double has none."""

    in_types: tuple[Any, ...]
    out_types: tuple[Any, ...]
    routine: str | None
    error_func: None = None
    _resolution_func: None = None


class Loops:
    """The loops of a ufunc."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _guess_routine_from_in_types(self, in_types: tuple[Any, ...], weaks: Any = None) -> Loop | None:
        kinds = tuple(
            [(np.dtype(t), w or None) for t, w in zip(in_types, weaks or [None] * len(in_types), strict=True)]
        )
        try:
            inputs, outputs = choose(self._name, kinds)
        except TypeError:
            return None
        in_c = all(dtype.char in _IN_C for dtype in inputs) and len(set(inputs)) == 1 and outputs[0].char in _IN_C + "?"
        code = f"out0 = {_CODE[self._name]}" if in_c and self._name in _CODE else None
        return Loop(inputs, outputs, code)
