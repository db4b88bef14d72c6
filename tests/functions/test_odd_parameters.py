"""Odd values of parameters: each is an error of the library, or gives what NumPy gives for it."""

from __future__ import annotations

import inspect
import math
import random
import warnings
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.layouts import mesh_of

X = np.array([[3.0, 1.0, 2.0], [6.0, 5.0, 4.0]])
I = np.array([[3, 1, 2], [6, 5, 4]])  # noqa: E741
V = np.array([4.0, 1.0, 3.0, 2.0])

ODD: dict[str, Any] = {
    "None": None,
    "True": True,
    "2.5": 2.5,
    "nan": math.nan,
    "inf": math.inf,
    "-1": -1,
    "0": 0,
    "7": 7,
    "2**31": 2**31,
    "2**63": 2**63,
    "2**100": 2**100,
    "-2**63": -(2**63),
    "'0'": "0",
    "'x'": "x",
    "bytes": b"x",
    "[]": [],
    "()": (),
    "[None]": [None],
    "two sizes": (2**33, 2**33),
    "int64": np.int64(1),
    "float32": np.float32(1),
    "0-d array": np.array(1),
    "array": np.array([1, 2]),
    "tensor": "tensor",
    "object": object(),
    "dict": {},
    "set": {1},
    "1j": 1j,
    "lambda": lambda: 1,
    "type": int,
    "slice": slice(1),
    "nested": [[1, 2], [0]],
    "Ellipsis": ...,
}
"""The values by their names. That of "tensor" is made where the devices are."""

# The operands of each function, as names of arrays, and the parameters, with values that are right.
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "expand_dims": ("X", {"axis": 0}),
    "squeeze": ("X", {"axis": ()}),
    "permute_dims": ("X", {"axes": (1, 0)}),
    "transpose": ("X", {"axes": (1, 0)}),
    "moveaxis": ("X", {"source": 0, "destination": 1}),
    "swapaxes": ("X", {"axis1": 0, "axis2": 1}),
    "flip": ("X", {"axis": 0}),
    "roll": ("X", {"shift": 1, "axis": 0}),
    "rot90": ("X", {"k": 1, "axes": (0, 1)}),
    "reshape": ("X", {"shape": (3, 2), "copy": None}),
    "broadcast_to": ("V", {"shape": (2, 4)}),
    "repeat": ("X", {"repeats": 2, "axis": 0}),
    "tile": ("X", {"repetitions": (2,)}),
    "concat": ("[X]", {"axis": 0}),
    "stack": ("[X]", {"axis": 0}),
    "unstack": ("X", {"axis": 0}),
    "diff": ("X", {"n": 1, "axis": 0}),
    "histogram": ("V", {"bins": 3, "range": None, "density": False}),
    "bincount": ("I", {"minlength": 0}),
    "topk": ("V", {"k": 2, "axis": 0}),
    "sort": ("X", {"axis": 0, "descending": False, "stable": True}),
    "argsort": ("X", {"axis": 0, "descending": False, "stable": True}),
    "partition": ("X", {"kth": 1, "axis": 0}),
    "sum": ("X", {"axis": 0, "keepdims": False, "dtype": None}),
    "prod": ("X", {"axis": 0, "keepdims": False, "dtype": None}),
    "max": ("X", {"axis": 0, "keepdims": False}),
    "mean": ("X", {"axis": 0, "keepdims": False}),
    "std": ("X", {"axis": 0, "correction": 0, "keepdims": False}),
    "any": ("X", {"axis": 0, "keepdims": False}),
    "argmax": ("X", {"axis": 0, "keepdims": False}),
    "count_nonzero": ("X", {"axis": 0, "keepdims": False}),
    "cumulative_sum": ("X", {"axis": 0, "include_initial": False, "dtype": None}),
    "cumulative_prod": ("X", {"axis": 0, "include_initial": False}),
    "median": ("X", {"axis": 0, "keepdims": False}),
    "quantile": ("X", {"q": 0.5, "axis": 0, "keepdims": False}),
    "arange": ("", {"start": 0, "stop": 3, "step": 1, "dtype": None}),
    "linspace": ("", {"start": 0.0, "stop": 1.0, "num": 3, "endpoint": True, "dtype": None}),
    "eye": ("", {"n_rows": 2, "n_cols": 3, "k": 0, "dtype": None}),
    "zeros": ("", {"shape": (2,), "dtype": None}),
    "ones": ("", {"shape": (2,), "dtype": None}),
    "empty": ("", {"shape": (2,), "dtype": None}),
    "full": ("", {"shape": (2,), "fill_value": 1, "dtype": None}),
    "zeros_like": ("X", {"dtype": None}),
    "tril": ("X", {"k": 0}),
    "triu": ("X", {"k": 0}),
    "diagonal": ("X", {"offset": 0, "axis1": 0, "axis2": 1}),
    "trace": ("X", {"offset": 0, "axis1": 0, "axis2": 1}),
    "tensordot": ("X X", {"axes": 2}),
    "vecdot": ("X X", {"axis": -1}),
    "take": ("X", {"indices": [0], "axis": 0}),
    "astype": ("X", {"dtype": "f4", "copy": True}),
    "asarray": ("X", {"dtype": None, "copy": None}),
    "pad": ("X", {"pad_width": 1, "mode": "constant"}),
    "clip": ("X", {"min": 0, "max": 1}),
    "round": ("X", {"decimals": 0}),
    "searchsorted": ("V V", {"side": "left"}),
    "unique_values": ("X", {}),
    "shard": ("V", {"axis": 0}),
}


def parameters() -> list[tuple[str, str]]:
    """Returns each function of the table that exists with each parameter that it has."""
    found = []
    for name, (_, params) in CALLS.items():
        signature = inspect.signature(getattr(st, name)).parameters if hasattr(st, name) else {}
        found += [(name, param) for param in params if param in signature]
    return found


PARAMETERS = parameters()
SIZES = {
    "repeats",
    "repetitions",
    "shape",
    "num",
    "stop",
    "start",
    "n_rows",
    "n_cols",
    "minlength",
    "bins",
    "pad_width",
}
"""The parameters for which 2**31 is a size that a machine may have memory for."""

PRODUCT = [(name, param, odd) for name, param in PARAMETERS for odd in ODD if not (param in SIZES and odd == "2**31")]
DRAWN = random.Random(7).sample(PRODUCT, 900)


def outcome(name: str, param: str, value: Any, jit: bool = False) -> Any:
    """Calls a function with an odd value; returns the result, or the error."""
    operands, params = CALLS[name]
    mesh = mesh_of((2,), "numpy")
    arrays = {"X": X, "I": I.ravel() if name == "bincount" else I, "V": V}
    given: list[Any] = [st.device_put(arrays[key.strip("[]")], mesh) for key in operands.split()]
    if isinstance(value, str) and value == "tensor":
        value = st.device_put(np.array([1, 0]), mesh)
    function, signature = getattr(st, name), inspect.signature(getattr(st, name)).parameters
    known = {key: at for key, at in params.items() if key in signature} | {param: value}
    positional = [known.pop(key) for key, at in signature.items() if key in known and at.kind is at.POSITIONAL_ONLY]

    def run(*given: Any) -> Any:
        return (
            function(list(given) if "[" in operands else given[0], *positional, **known)
            if len(given) == 1
            else (function(*given, *positional, **known))
        )

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return (st.jit(run) if jit else run)(*given)
    except Exception as error:
        return error


def raw(result: Any) -> str:
    """Returns what is wrong with the outcome of a call; nothing if it is a result, or an error of the library."""
    if not isinstance(result, Exception) or isinstance(result, st.ShardTensorError):
        return ""
    return f"{type(result).__name__}: {result}"


def wrong(drawn: list[tuple[str, str, str]]) -> list[str]:
    found = []
    for name, param, odd in drawn:
        if problem := raw(outcome(name, param, ODD[odd])):
            found.append(f"{name}({param}={odd}): {problem}")
    return found


@pytest.mark.parametrize("jit", [False, True])
def test_the_other_values_of_the_table_are_right(jit: bool) -> None:
    for name, param in PARAMETERS:
        found = outcome(name, param, CALLS[name][1][param], jit)
        if jit and isinstance(found, st.ConcretizationError):  # The shape of the result depends on the elements.
            continue
        assert not isinstance(found, Exception), f"{name}: {found!r}"


def test_an_error_has_the_same_class_in_a_compiled_program() -> None:
    different = []
    for name, param, odd in random.Random(3).sample(PRODUCT, 250):
        eager, traced = (outcome(name, param, ODD[odd], jit) for jit in (False, True))
        if isinstance(eager, Exception) and (raw(traced) or not isinstance(traced, Exception)):
            different.append(f"{name}({param}={odd}): {eager!r:.80}, and {traced!r:.80}")
    assert not different


def test_odd_values_of_parameters_are_errors_of_the_library() -> None:
    assert not wrong(DRAWN)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted({name for name, _ in PARAMETERS}))
def test_all_odd_values_of_parameters_are_errors_of_the_library(name: str) -> None:
    assert not wrong([row for row in PRODUCT if row[0] == name])
