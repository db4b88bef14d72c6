"""Test cases of every operator: calls with operands drawn by hypothesis, and NumPy's results.

Importing this module loads hypothesis.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.backend import HOST, HostArray, function_of
from shardtensor.backend.registry import backend_of
from shardtensor.core import OPS
from shardtensor.testing.layouts import DTYPES, FLOATS, array, assert_same, broadcastable, meshes, placed, shapes

for _name in dir(st):  # Modules that are imported on first use declare operators, too.
    getattr(st, _name)


@dataclass
class Case:
    """A call ``op(*operands, *args, **params)`` and its result.

    Attributes:
        operands: the array operands.
        args: the other positional arguments.
        params: the keyword arguments.
        answer: the expected result, or a function of the operator's name that returns it; None for that of NumPy's
            function of the same name, or of the composition if NumPy has no such function.
        listed: whether the operands are passed as one list.
    """

    operands: list[HostArray]
    args: tuple[Any, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    answer: Any = None
    listed: bool = False

    def run(self, function: Callable[..., Any], operands: list[Any]) -> Any:
        """Calls ``function`` with other operands and the arguments of this case."""
        arguments = [operands] if self.listed else operands
        return function(*arguments, *self.args, **self.params)


def wanted(name: str, example: Case) -> Any:
    """Returns the expected result of a case of the operator ``name``."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # Means of empty slices warn, as in NumPy.
        if example.answer is None:
            return example.run(_on_host(name), example.operands)
        return example.answer(name) if callable(example.answer) else example.answer


def check(name: str, example: Case, operands: list[Any]) -> None:
    """Asserts that an operator on sharded operands of a case gives NumPy's result and leaves the operands unchanged."""
    answer, before = wanted(name, example), [np.array(x) for x in example.operands]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        result = example.run(OPS[name].dispatch, operands)
    assert_same(result, answer)
    for x, value in zip(operands, before, strict=True):
        np.testing.assert_array_equal(np.asarray(x), value)


def sharded_somehow(data: Any, example: Case, backend: str) -> list[Any]:
    """Draws shardings for the operands of a case, at least one of them on devices of ``backend``."""
    mesh = data.draw(meshes(backend))
    operands = [placed(data, x, backend, mesh) for x in example.operands]
    if not any(isinstance(x, st.ShardedTensor) for x in operands):
        operands[0] = placed(data, example.operands[0], backend, None)
    return operands


Maker = Callable[[Any], Case]
CASES: dict[str, Maker] = {}


def case(*names: str) -> Callable[[Maker], Maker]:
    """Registers the function that draws the cases of the named operators."""

    def register(maker: Maker) -> Maker:
        for name in names:
            CASES[name] = maker
        return maker

    return register


def seed(data: Any) -> int:
    """Draws a seed for `array`."""
    return int(data.draw(some.integers(0, 2**20)))


def some_array(data: Any, min_dims: int = 0, max_dims: int = 3, dtypes: Sequence[str] = DTYPES) -> HostArray:
    """Draws an array of one of the dtypes."""
    return array(data.draw(shapes(min_dims, max_dims)), data.draw(some.sampled_from(dtypes)), seed(data))


def axes(data: Any, ndim: int, *, one: bool = False) -> Any:
    """Draws an axis argument: None, an axis or (unless ``one``) a tuple of axes, some of them negative."""
    if not ndim or data.draw(some.integers(0, 2)) == 0:
        return None
    picked = data.draw(some.lists(some.integers(0, ndim - 1), min_size=1, max_size=1 if one else ndim, unique=True))
    picked = [a - ndim if data.draw(some.booleans()) else a for a in picked]
    return picked[0] if one or (len(picked) == 1 and data.draw(some.booleans())) else tuple(picked)


def _on_host(name: str) -> Callable[..., Any]:
    return function_of(backend_of(HOST), name)


def _accepts(name: str, dtypes: tuple[str, ...]) -> bool:
    try:
        with np.errstate(all="ignore"):
            _on_host(name)(*[np.ones(1, d) for d in dtypes])
    except TypeError:
        return False
    return True


def elementwise_cases(name: str) -> Maker:
    """Returns the function that draws the cases of an elementwise operator of arrays, of all dtypes that it takes."""
    count = len(OPS[name].operands)
    known = some.sampled_from([d for d in DTYPES if _accepts(name, (d,) * count)])

    def make(data: Any) -> Case:
        dtypes = [data.draw(known) for _ in range(count)]
        if not _accepts(name, tuple(dtypes)):
            dtypes = dtypes[:1] * count
        return Case([array(s, d, seed(data)) for s, d in zip(data.draw(broadcastable(count)), dtypes, strict=True)])

    return make


for _name, _op in OPS.items():
    if _op.rule in ("... -> ...", "..., ... -> ...") and _op.parts.kernel is None:
        CASES[_name] = elementwise_cases(_name)


@case("pow")
def _pow(data: Any) -> Case:
    (a, b) = data.draw(broadcastable(2))
    dtype = data.draw(some.sampled_from(FLOATS))
    return Case([np.abs(array(a, dtype, seed(data))) + 1, array(b, dtype, seed(data))])


@case("bitwise_left_shift", "bitwise_right_shift")
def _shift(data: Any) -> Case:
    (a, b) = data.draw(broadcastable(2))
    return Case([array(a, "int32", seed(data)), np.abs(array(b, "int32", seed(data)))])


@case("clip")
def _clip(data: Any) -> Case:
    a, b, c = data.draw(broadcastable(3))
    x, low = array(a, "float32", seed(data)), array(b, "float32", seed(data))
    if data.draw(some.booleans()):
        return Case([x, low], answer=np.clip(x, low, None))
    high = array(c, "float32", seed(data))
    return Case([x, low, high])


@case("where")
def _where(data: Any) -> Case:
    a, b, c = data.draw(broadcastable(3))
    d = data.draw(some.sampled_from(DTYPES))
    return Case([array(a, "bool", seed(data)), array(b, d, seed(data)), array(c, "float32", seed(data))])


@case("astype")
def _astype(data: Any) -> Case:
    x = array(data.draw(shapes()), data.draw(some.sampled_from(["bool", "int32", "float32"])), seed(data))
    dtype = data.draw(some.sampled_from(["int64", "float64", "complex64", "float16"]))
    return Case([x], (dtype,), answer=x.astype(dtype))


@case("reshard")
def _reshard(data: Any) -> Case:
    x = some_array(data)
    return Case([x], (st.devices("numpy")[-1],), answer=x)


def _drawn(name: str, operands: list[HostArray]) -> Case:
    """Returns a case of an operator that draws random numbers: they are those that one device of the host draws."""
    key, dtype = 12345 << 64 | 678, np.dtype(np.float64 if name == "truncated_normal" else bool)
    placed = [st.device_put(x, st.local_devices("numpy")[0]) for x in operands]
    answer = np.asarray(OPS[name].dispatch(*placed, key, dtype=dtype))
    return Case(operands, (key,), {"dtype": dtype}, answer=answer)


@case("bernoulli")
def _bernoulli(data: Any) -> Case:
    return _drawn("bernoulli", [array(data.draw(shapes()), "float64", seed(data))])


@case("truncated_normal")
def _truncated_normal(data: Any) -> Case:
    lower = array(data.draw(shapes()), "float64", seed(data))
    return _drawn("truncated_normal", [lower, np.asarray(lower + 1.25)])
