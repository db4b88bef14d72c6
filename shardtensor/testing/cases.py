"""Test cases of every operator: calls with operands drawn by hypothesis, and NumPy's results.

Importing this module loads hypothesis.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.backend import HOST, HostArray, function_of
from shardtensor.backend.registry import backend_of
from shardtensor.core import OPS
from shardtensor.sharding.index import is_array
from shardtensor.testing.layouts import DTYPES, FLOATS, array, assert_same, broadcastable, meshes, placed, shapes

for _name in st.__all__:  # Modules that are imported on first use declare operators, too.
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


def wanted(name: str, made: Case) -> Any:
    """Returns the expected result of a case of the operator ``name``."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # Means of empty slices warn, as in NumPy.
        if made.answer is None:
            return made.run(_on_host(name), made.operands)
        return made.answer(name) if callable(made.answer) else made.answer


def check(name: str, made: Case, operands: list[Any]) -> None:
    """Asserts that an operator on sharded operands of a case gives NumPy's result and leaves the operands unchanged."""
    answer, before = wanted(name, made), [np.array(x) for x in made.operands]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        result = made.run(OPS[name].dispatch, operands)
    assert_same(result, answer)
    for x, value in zip(operands, before, strict=True):
        np.testing.assert_array_equal(np.asarray(x), value)


def sharded_somehow(data: Any, made: Case, backend: str) -> list[Any]:
    """Draws shardings for the operands of a case, at least one of them on devices of ``backend``."""
    mesh = data.draw(meshes(backend))
    operands = [placed(data, x, backend, mesh) for x in made.operands]
    if not any(isinstance(x, st.ShardedTensor) for x in operands):
        operands[0] = placed(data, made.operands[0], backend, None)
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
    known = [d for d in DTYPES if _accepts(name, (d,) * count)]

    def make(data: Any) -> Case:
        dtypes = [data.draw(some.sampled_from(known)) for _ in range(count)]
        if not _accepts(name, tuple(dtypes)):
            dtypes = dtypes[:1] * count
        return Case([array(s, d, seed(data)) for s, d in zip(data.draw(broadcastable(count)), dtypes, strict=True)])

    return make


for _name, _op in OPS.items():
    if _op.rule in ("... -> ...", "..., ... -> ...") and _op.kernel is None:
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


def _axes(data: Any, ndim: int, *, one: bool = False) -> Any:
    """Draws an axis argument: None, an axis or (unless ``one``) a tuple of axes, some of them negative."""
    if not ndim or data.draw(some.integers(0, 2)) == 0:
        return None
    picked = data.draw(some.lists(some.integers(0, ndim - 1), min_size=1, max_size=1 if one else ndim, unique=True))
    picked = [a - ndim if data.draw(some.booleans()) else a for a in picked]
    return picked[0] if one or (len(picked) == 1 and data.draw(some.booleans())) else tuple(picked)


@case("prod")
def _prod(data: Any) -> Case:
    """Draws factors near 1, because infinities in complex products depend on the order of multiplication."""
    made = _reduction(data)
    x = made.operands[0]
    made.operands = [x if x.dtype.kind in "biu" else (1 + x / 64).astype(x.dtype)]
    return made


@case("sum", "mean", "var", "std", "any", "all")
def _reduction(data: Any) -> Case:
    x = array(data.draw(shapes()), data.draw(some.sampled_from(DTYPES)), seed(data))
    return Case([x], params={"axis": _axes(data, x.ndim), "keepdims": data.draw(some.booleans())})


@case("max", "min", "nanmax", "nanmin")
def _extremum(data: Any) -> Case:
    made = _reduction(data)
    x = made.operands[0]
    made.operands = [
        np.ones([n or 1 for n in x.shape], x.dtype) * x if x.size else np.ones([n or 1 for n in x.shape], x.dtype)
    ]
    if made.operands[0].dtype.kind in "fc" and made.operands[0].size and data.draw(some.booleans()):
        made.operands[0].flat[data.draw(some.integers(0, made.operands[0].size - 1))] = np.nan
    return made


@case("cumulative_sum")
def _cumulative_sum(data: Any) -> Case:
    x = array(data.draw(shapes(1)), data.draw(some.sampled_from(DTYPES)), seed(data))
    return _cumulative(data, x, np.cumsum, 0)


@case("cumulative_prod")
def _cumulative_prod(data: Any) -> Case:
    return _cumulative(data, _prod(data).operands[0], np.cumprod, 1)


def _cumulative(data: Any, x: HostArray, function: Callable[..., Any], initial: int) -> Case:
    x = x.astype("int64") if x.dtype.kind == "u" else x  # Not every backend has the uint64 of their sums.
    x = x if x.ndim else x.reshape(1)
    axis = data.draw(some.integers(-x.ndim, x.ndim - 1))
    with np.errstate(all="ignore"):
        answer = function(x, axis=axis)
    if include := data.draw(some.booleans()):
        first = [1 if d == axis % x.ndim else n for d, n in enumerate(x.shape)]
        answer = np.concatenate([np.full(first, initial, answer.dtype), answer], axis=axis)
    return Case([x], params={"axis": axis, "include_initial": include}, answer=answer)


@case("argmax", "argmin")
def _arg(data: Any) -> Case:
    made = _extremum(data)
    made.params["axis"] = _axes(data, made.operands[0].ndim, one=True)
    return made


def _lines(data: Any, dtypes: list[str] = DTYPES) -> tuple[HostArray, int]:
    """Draws an array of at least one dimension, with NaN if its dtype has it, and an axis."""
    x = array(data.draw(shapes(1)), data.draw(some.sampled_from(dtypes)), seed(data))
    if x.dtype.kind in "fc" and x.size and data.draw(some.booleans()):
        x.flat[data.draw(some.integers(0, x.size - 1))] = np.nan
    return x, data.draw(some.integers(-x.ndim, x.ndim - 1))


@case("sort")
def _sort(data: Any) -> Case:
    x, axis = _lines(data)
    descending = data.draw(some.booleans())
    answer = np.sort(x, axis=axis)
    answer = np.flip(answer, axis=axis) if descending else answer
    return Case([x], params={"axis": axis, "descending": descending}, answer=answer)


@case("argsort")
def _argsort(data: Any) -> Case:
    x, axis = _lines(data)
    if data.draw(some.booleans()):
        return Case([x], params={"axis": axis, "stable": True})
    answer = x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis=axis), axis=axis, stable=True), axis=axis)
    return Case([x], params={"axis": axis, "descending": True}, answer=answer)


@case("topk_indices")
def _topk_indices(data: Any) -> Case:
    x, axis = _lines(data)
    k = data.draw(some.integers(0, x.shape[axis]))
    answer = x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis=axis), axis=axis, stable=True), axis=axis)
    return Case([x], (k,), {"axis": axis}, answer=np.take(answer, range(k), axis=axis))


@case("take")
def _take(data: Any) -> Case:
    x, axis = _lines(data, ["int32", "float64"])
    n = x.shape[axis]
    indices = some.lists(some.integers(-n, n - 1), max_size=5) if n else some.just([])
    return Case([x], (np.array(data.draw(indices), np.int64),), {"axis": axis})


@case("take_along_axis")
def _take_along_axis(data: Any) -> Case:
    x, axis = _lines(data, ["int32", "float64"])
    shape, n = list(x.shape), x.shape[axis]
    shape[axis] = data.draw(some.integers(0, 5)) if n else 0
    indices = np.random.default_rng(seed(data)).integers(-max(n, 1), max(n, 1), shape)
    if indices.ndim > 1 and data.draw(some.booleans()):
        other = (axis + 1) % x.ndim
        indices = indices[(slice(None),) * other + (slice(1),)]
    return Case([x, indices], params={"axis": axis})


@case("searchsorted")
def _searchsorted(data: Any) -> Case:
    dtype = data.draw(some.sampled_from(["int32", "float32", "float64", "complex128"]))
    x1 = np.sort(array((data.draw(some.integers(0, 20)),), dtype, seed(data)))
    x2 = array(data.draw(shapes()), dtype, seed(data))
    return Case([x1, x2], params={"side": data.draw(some.sampled_from(["left", "right"]))})


@case("isin")
def _isin(data: Any) -> Case:
    x1, x2 = [array(data.draw(shapes()), data.draw(some.sampled_from(DTYPES)), seed(data)) for _ in range(2)]
    return Case([x1, x2], params={"invert": data.draw(some.booleans())})


@case("count_nonzero")
def _count_nonzero(data: Any) -> Case:
    made = _reduction(data)
    made.answer = np.count_nonzero(made.operands[0], **made.params)
    return made


def _numbers(data: Any, dtypes: list[str]) -> tuple[HostArray, Any]:
    """Draws an array with elements, perhaps NaN, and an axis argument."""
    x = array(tuple([n or 1 for n in data.draw(shapes())]), data.draw(some.sampled_from(dtypes)), seed(data))
    if x.dtype.kind in "fc" and data.draw(some.booleans()):
        x.flat[data.draw(some.integers(0, x.size - 1))] = np.nan
    return x, _axes(data, x.ndim)


@case("median")
def _median(data: Any) -> Case:
    x, axis = _numbers(data, ["int8", "int64", "uint8", "float16", "float32", "float64"])
    return Case([x], params={"axis": axis, "keepdims": data.draw(some.booleans())})


@case("quantile")
def _quantile(data: Any) -> Case:
    x, axis = _numbers(data, ["int8", "int64", "float32", "float64"])
    q = data.draw(some.sampled_from([0.25, 1.0, [0.1, 0.5], [0.0, 0.7, 1.0]]))
    return Case([x], (q,), {"axis": axis, "keepdims": data.draw(some.booleans())})


@case("counts_of_integers")
def _counts_of_integers(data: Any) -> Case:
    x = np.abs(array((data.draw(some.integers(0, 20)),), "int64", seed(data)))
    if data.draw(some.booleans()):
        return Case([x], params={"length": 6}, answer=np.bincount(x, minlength=6))
    weights = array(x.shape, "float64", seed(data))
    return Case([x, weights], params={"length": 6}, answer=np.bincount(x, weights, 6).astype("float64"))


@case("counts_between")
def _counts_between(data: Any) -> Case:
    x = array(data.draw(shapes(1)), data.draw(some.sampled_from(["int32", "float64"])), seed(data))
    edges = np.array([-2.0, -1.0, 0.5, 2.0])
    return Case([x, edges], answer=np.histogram(x, edges)[0])


@case("matmul")
def _matmul(data: Any) -> Case:
    n, k, m = (data.draw(some.sampled_from([0, 1, 2, 5, 9])) for _ in range(3))
    batch = data.draw(broadcastable(2))
    left = (k,) if data.draw(some.integers(0, 3)) == 0 else (*batch[0], n, k)
    right = (k,) if data.draw(some.integers(0, 3)) == 0 else (*batch[1], k, m)
    dtypes = [data.draw(some.sampled_from(["int64", "float32", "float64", "complex64"])) for _ in range(2)]
    return Case([array(s, d, seed(data)) for s, d in zip((left, right), dtypes, strict=True)])


@case("vecdot")
def _vecdot(data: Any) -> Case:
    k = data.draw(some.sampled_from([0, 1, 3, 8]))
    a, b = data.draw(broadcastable(2))
    axis = data.draw(some.sampled_from([-1, -2])) if a and b else -1
    left, right = [(*s[: len(s) + 1 + axis], k, *s[len(s) + 1 + axis :]) for s in (a, b)]
    d = data.draw(some.sampled_from(["float64", "complex128"]))
    return Case([array(left, d, seed(data)), array(right, d, seed(data))], params={"axis": axis})


@case("tensordot")
def _tensordot(data: Any) -> Case:
    a, b = data.draw(shapes(1, 2)), data.draw(shapes(1, 2))
    shared = data.draw(shapes(0, 2))
    axes: Any = len(shared)
    left, right = (*a, *shared), (*shared, *b)
    if shared and data.draw(some.booleans()):
        right = (*b, *shared)
        axes = (list(range(-len(shared), 0)), tuple(range(len(b), len(b) + len(shared))))
    return Case([array(left, "float64", seed(data)), array(right, "float64", seed(data))], params={"axes": axes})


def _some_array(data: Any, min_dims: int = 0) -> HostArray:
    return array(data.draw(shapes(min_dims)), data.draw(some.sampled_from(["int32", "float64"])), seed(data))


@case("permute_dims")
def _permute(data: Any) -> Case:
    x = _some_array(data)
    return Case([x], (tuple(data.draw(some.permutations(range(x.ndim)))),))


@case("matrix_transpose")
def _matrix_transpose(data: Any) -> Case:
    return Case([_some_array(data, 2)])


@case("moveaxis")
def _moveaxis(data: Any) -> Case:
    x = _some_array(data, 1)
    return Case([x], (data.draw(some.integers(0, x.ndim - 1)), data.draw(some.integers(-x.ndim, x.ndim - 1))))


@case("squeeze")
def _squeeze(data: Any) -> Case:
    x = _some_array(data)
    ones = [a for a, n in enumerate(x.shape) if n == 1]
    axis = tuple(data.draw(some.lists(some.sampled_from(ones), unique=True))) if ones else None
    return Case([x], (axis,))


@case("expand_dims")
def _expand(data: Any) -> Case:
    x = _some_array(data)
    return Case([x], params={"axis": data.draw(some.integers(-x.ndim - 1, x.ndim))})


@case("broadcast_to")
def _broadcast(data: Any) -> Case:
    narrow, wide = data.draw(broadcastable(2))
    return Case([array(narrow, "int32", seed(data))], (np.broadcast_shapes(narrow, wide),))


@case("reshape")
def _reshape(data: Any) -> Case:
    """Draws the old and the new shape by merging adjacent factors of one list in two ways."""
    factors = data.draw(some.lists(some.sampled_from([1, 2, 2, 3, 3, 5, 0]), max_size=4))
    old, new = _merged(data, factors), _merged(data, factors)
    if new and 0 not in new and data.draw(some.booleans()):
        new = list(new)
        new[data.draw(some.integers(0, len(new) - 1))] = -1
    return Case([array(tuple(old), "int32", seed(data))], (tuple(new),))


def _merged(data: Any, factors: list[int]) -> list[int]:
    out: list[int] = []
    for f in factors:
        if out and data.draw(some.booleans()):
            out[-1] *= f
        else:
            out.append(f)
    return out


@case("flip")
def _flip(data: Any) -> Case:
    x = _some_array(data)
    return Case([x], params={"axis": _axes(data, x.ndim)})


@case("roll")
def _roll(data: Any) -> Case:
    x = _some_array(data)
    axis = _axes(data, x.ndim)
    shift: Any = data.draw(some.integers(-20, 20))
    if isinstance(axis, tuple) and data.draw(some.booleans()):
        shift = tuple(data.draw(some.integers(-20, 20)) for _ in axis)
    return Case([x], (shift,), {"axis": axis})


def _joinable(data: Any, along: int, base: tuple[int, ...]) -> list[HostArray]:
    out = []
    for _ in range(data.draw(some.integers(1, 4))):
        shape = list(base)
        shape[along] = data.draw(some.sampled_from([0, 1, 2, 5]))
        out.append(array(tuple(shape), data.draw(some.sampled_from(["int32", "float64"])), seed(data)))
    return out


@case("concat")
def _concat(data: Any) -> Case:
    base = data.draw(shapes(1))
    along = data.draw(some.integers(0, len(base) - 1))
    flat = data.draw(some.integers(0, 4)) == 0
    return Case(_joinable(data, along, base), params={"axis": None if flat else along}, listed=True)


@case("unshard")
def _unshard(data: Any) -> Case:
    base = data.draw(shapes(1))
    along = data.draw(some.integers(0, len(base) - 1))
    arrays = _joinable(data, along, base)
    return Case(arrays, (along,), answer=np.concatenate(arrays, axis=along), listed=True)


@case("stack")
def _stack(data: Any) -> Case:
    shape = data.draw(shapes())
    arrays = [array(shape, "int32", seed(data)) for _ in range(data.draw(some.integers(1, 9)))]
    return Case(arrays, params={"axis": data.draw(some.integers(-len(shape) - 1, len(shape)))}, listed=True)


@some.composite
def indices(draw: Any, shape: tuple[int, ...]) -> Any:
    """Draws a basic index: integers, slices with any step, at most one ellipsis, None."""
    out: list[Any] = []
    for n in shape[: draw(some.integers(0, len(shape)))]:
        if n and draw(some.integers(0, 3)) == 0:
            out.append(draw(some.integers(-n, n - 1)))
        else:
            bound = some.one_of(some.none(), some.integers(-n - 2, n + 2))
            step = draw(some.sampled_from([None, 1, 2, 3, -1, -2, -5]))
            out.append(slice(draw(bound), draw(bound), step))
    for extra in draw(some.lists(some.just(None), max_size=2)):
        out.insert(draw(some.integers(0, len(out))), extra)
    if draw(some.booleans()):
        taken = sum(1 for e in out if e is not None)
        at = draw(some.integers(0, len(out)))
        after = sum(1 for e in out[at:] if e is not None)
        tail = shape[len(shape) - after :] if after else ()
        if all(
            not isinstance(e, int) or -n <= e < n
            for e, n in zip([e for e in out[at:] if e is not None], tail, strict=True)
        ):
            out.insert(at, Ellipsis)
        assert taken <= len(shape)
    return out[0] if len(out) == 1 and draw(some.booleans()) else tuple(out)


@case("getitem")
def _getitem(data: Any) -> Case:
    x = _some_array(data)
    index = data.draw(indices(x.shape))
    return Case([x], (index,), answer=x[index])


def _run(draw: Any, sizes: tuple[int, ...], block: tuple[int, ...]) -> list[Any]:
    """Draws index entries for dimensions of given sizes: arrays broadcastable to ``block``, masks, integers, slices."""
    out: list[Any] = []
    while sizes:
        n = sizes[0]
        kind = draw(some.sampled_from(["array", "array", "mask", "mask", "integer", "slice", "slice"]))
        width = 1
        if kind == "mask":
            width = draw(some.integers(1, min(2, len(sizes))))
            count = block[-1] if block else draw(some.integers(0, 3))
            mask = np.zeros(sizes[:width], bool)
            mask.flat[np.random.default_rng(draw(some.integers(0, 99))).permutation(mask.size)[:count]] = True
            out.append(mask)
        elif kind == "array":
            shape = tuple(1 if draw(some.integers(0, 4)) == 0 else m for m in block)
            shape = shape[draw(some.integers(0, len(shape))) :]
            if n or 0 in shape:
                bound = max(n, 1)
                out.append(np.random.default_rng(draw(some.integers(0, 99))).integers(-bound, bound, shape))
            else:
                out.append(slice(None))
        elif kind == "integer" and n:
            i = draw(some.integers(-n, n - 1))
            out.append(draw(some.sampled_from([i, np.int64(i), np.int16(i)])))
        else:
            bounds = some.one_of(some.none(), some.integers(-n - 2, n + 2))
            out.append(slice(draw(bounds), draw(bounds), draw(some.sampled_from([None, 1, 2, -1, -3]))))
        sizes = sizes[width:]
    return out


@some.composite
def array_indices(draw: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Draws an index that usually contains integer arrays and masks; some of these are invalid in NumPy."""
    block = draw(some.lists(some.sampled_from([0, 1, 2, 2, 3, 5]), max_size=2))
    left = draw(some.integers(0, len(shape)))
    right = draw(some.integers(0, len(shape) - left))
    out = _run(draw, shape[:left], tuple(block))
    if right or draw(some.booleans()):
        out.append(Ellipsis)
    out += _run(draw, shape[len(shape) - right :], tuple(block))
    for extra in draw(some.lists(some.sampled_from([None, None, None, True, np.array(True), False]), max_size=2)):
        out.insert(draw(some.integers(0, len(out))), extra)
    return tuple(out)


def _valid_index(data: Any, x: HostArray) -> Any:
    index = data.draw(array_indices(x.shape))
    try:
        x[index]
    except IndexError:  # The masks and arrays do not broadcast together.
        return np.array(True)
    return index if any(is_array(e) for e in index) else (*index, True)


@case("gather")
def _gather(data: Any) -> Case:
    x = _some_array(data)
    index = _valid_index(data, x)
    return Case([x], (index,), answer=x[index])


@case("setitem")
def _setitem(data: Any) -> Case:
    x = _some_array(data)
    index = _valid_index(data, x) if data.draw(some.booleans()) else data.draw(indices(x.shape))
    answer = x.copy()
    value = array(np.shape(x[index]), "int32", seed(data))
    if value.size:
        value = value[(slice(0, 1),) * data.draw(some.integers(0, value.ndim))]
    return Case([x, value], (index,), answer=assigned(answer, index, value))


def assigned(x: HostArray, index: Any, value: Any) -> HostArray:
    """Returns x after ``x[index] = value``, where the last value wins if an element is indexed several times."""
    positions = np.arange(x.size).reshape(x.shape)[index]
    values = np.asarray(value)
    values = values.reshape(values.shape[max(values.ndim - positions.ndim, 0) :]).astype(x.dtype)
    new = x.flatten()
    for position, v in zip(positions.ravel(), np.broadcast_to(values, positions.shape).ravel(), strict=True):
        new[position] = v
    return new.reshape(x.shape)


@case("reshard")
def _reshard(data: Any) -> Case:
    x = _some_array(data)
    return Case([x], (st.devices("numpy")[-1],), answer=x)


def _drawn(name: str, operands: list[HostArray]) -> Case:
    """Returns a case of an operator that draws random numbers: they are those that one device of the host draws."""
    key, dtype = 12345 << 64 | 678, np.dtype(np.float64 if name == "truncated_normal" else bool)
    placed = [st.device_put(x, st.devices("numpy")[0]) for x in operands]
    answer = np.asarray(OPS[name].dispatch(*placed, key, dtype=dtype))
    return Case(operands, (key,), {"dtype": dtype}, answer=answer)


@case("bernoulli")
def _bernoulli(data: Any) -> Case:
    return _drawn("bernoulli", [array(data.draw(shapes()), "float64", seed(data))])


@case("truncated_normal")
def _truncated_normal(data: Any) -> Case:
    lower = array(data.draw(shapes()), "float64", seed(data))
    return _drawn("truncated_normal", [lower, np.asarray(lower + 1.25)])


# Creation functions, operators whose operand or result is not a single tensor, and compositions are tested separately.
ELSEWHERE = {
    "arange", "asarray", "assemble", "dlpack_device", "empty", "empty_like", "eye", "from_dlpack", "full",
    "full_like", "ones", "ones_like", "shard", "to_batched_list", "to_dlpack", "to_host", "transfer_to", "unstack",
    "zeros", "zeros_like", "convolve_valid", "coordinate", "fftfreq", "linspace", "rfftfreq",
    # Those that only exchange dimensions, or are composed of others.
    "argpartition", "argwhere", "bincount", "diff", "digitize", "flatnonzero", "fliplr", "flipud", "histogram",
    "lexsort", "nanargmax", "nanargmin", "nancumprod", "nancumsum", "nanmean", "nanmedian", "nanpercentile", "nanprod",
    "nanquantile", "nanstd", "nansum", "nanvar", "partition", "percentile", "rollaxis", "swapaxes",
    # Several results, or eigenvalues in no particular order.
    "array_split", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_arrays", "dsplit", "eig", "eigh", "eigvals",
    "hsplit", "meshgrid", "nonzero", "qr", "slogdet", "spanned", "split", "svd", "topk", "unique", "unique_all",
    "unique_counts", "unique_inverse", "unique_values", "vsplit",
    # Maps, halos, collectives, copies, and views and writes by view specs.
    "all_gather", "all_to_all", "check_equal", "copy", "map_shards", "pbroadcast", "pmax", "pmean", "pmin", "ppermute",
    "pprod", "pshuffle", "psum", "psum_scatter", "pswapaxes", "put", "split_over", "unsqueeze", "view", "with_halos",
    # Partial sums, and the layout of a result.
    "add_partials", "partial_sums", "place_result",
    # Random numbers.
    "binomial", "categorical", "exponential", "gamma", "integers", "normal", "permutation", "poisson", "uniform",
}  # fmt: skip
