"""Blockwise passes over host arrays: elementwise functions, copies and writes in many blocks, compared with NumPy."""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.core import OPS
from shardtensor.host import blockwise, memory_pool
from tests import draws, layouts
from tests.draws import drawn
from tests.layouts import DTYPES, array, assert_same, mesh_of, meshes, placed, quiet, strided

UFUNCS = sorted(name for name, op in OPS.items() if op.is_ufunc)
BINARY = [name for name in UFUNCS if len(OPS[name].operands) == 2]
ROUNDED = {"acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "exp", "expm1", "hypot", "log"} | {
    "log10", "log1p", "log2", "logaddexp", "pow", "sin", "sinh", "tan", "tanh",
}  # fmt: skip
"""Whose last bits may depend on whether neighbours lie next to one another: NumPy has several loops for them."""

SHAPES = [(1,), (3,), (4,), (5,), (67,), (1, 1), (5, 13), (13, 1), (1, 9), (2, 40), (7, 5, 3), (4, 1, 6), (2, 3, 2, 5)]
LAYOUTS = ["C", "F", "turned", "reversed", "steps"]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrites cached memory, so that it does not contain the result of an earlier call by chance."""
    monkeypatch.setattr(memory_pool, "empty", poisoned)


def poisoned(shape: Any, dtype: Any, empty: Callable[..., Any] = memory_pool.empty) -> Any:
    array = empty(shape, dtype)
    np.ndarray(array.nbytes, np.uint8, array)[:] = 0xA5
    return array


def cut(**sizes: Any) -> AbstractContextManager[None]:
    """Divides all but the smallest arrays into blocks of a few elements."""
    small: dict[str, Any] = {"LONG": 0.0, "_BLOCK": 16, "_LEAST": 4, "_TILE": 3, "_STEP": 4, **sizes}
    return layouts.cut(blockwise, **small)


@pytest.fixture
def _cut() -> Iterator[None]:
    with cut():
        yield


in_blocks = pytest.mark.usefixtures("_cut")


@pytest.fixture
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of 8 MB are divided as those are that do not fit into a cache."""
    monkeypatch.setattr(blockwise, "_CACHE", 0)


outside_of_caches = pytest.mark.usefixtures("_no_cache")


def laid(x: np.ndarray, layout: str) -> st.ShardedTensor:
    """Returns a tensor with the elements, in another memory layout."""
    if layout == "F":
        return st.asarray(np.ascontiguousarray(x.T)).T
    if layout == "turned":
        axes = tuple(np.roll(range(x.ndim), 1).tolist())
        return st.permute_dims(st.asarray(np.ascontiguousarray(x.transpose(axes))), tuple(np.argsort(axes).tolist()))
    if layout == "reversed":
        return st.asarray(np.ascontiguousarray(np.flip(x)))[(slice(None, None, -1),) * x.ndim]
    if layout == "steps":
        wide = np.zeros([2 * n for n in x.shape], x.dtype)
        wide[(slice(None, None, 2),) * x.ndim] = x
        return st.asarray(wide)[(slice(None, None, 2),) * x.ndim]
    return st.asarray(x)


def host(x: Any) -> Any:
    """Returns the same array for NumPy, in the same memory layout."""
    return np.asarray(x) if isinstance(x, st.ShardedTensor) else x


def order_of(x: np.ndarray) -> list[int]:
    """Returns the dimensions of more than one element in the order of their strides."""
    return sorted((d for d in range(x.ndim) if x.shape[d] > 1), key=lambda d: -abs(x.strides[d]))


def agree(operands: list[Any], shape: tuple[int, ...]) -> bool:
    """Returns whether NumPy's memory layout of the result is determined: the operands have the same order, or two
    dimensions.
    """
    arrays = [x for x in map(host, operands) if np.ndim(x)]
    return len(shape) < 3 or len({(x.shape == shape, *order_of(x)) for x in arrays}) == 1


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Numbers of that dtype with many digits."""
    x = array(shape, dtype, seed)
    return x * np.asarray(1.1, x.dtype) if x.dtype.kind in "fc" else x


def takes(name: str, dtypes: list[str]) -> bool:
    try:
        with quiet():
            getattr(np, name)(*[np.ones(1, d) for d in dtypes])
    except TypeError:
        return False
    return True


def assert_numpys(name: str, found: Any, wanted: Any, operands: list[Any]) -> None:
    """Asserts that the bits are NumPy's (the values, for functions that are rounded), and that the memory layout is."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if name in ROUNDED and wanted.dtype.kind in "fc":
        limit = 4 * np.finfo(wanted.dtype).eps
        np.testing.assert_allclose(found, wanted, rtol=limit, atol=limit)
    else:
        np.testing.assert_array_equal(found, wanted)
    if wanted.size and agree(operands, wanted.shape):
        assert order_of(found) == order_of(wanted), [np.shape(x) for x in operands]


def thread_counts(results: list[np.ndarray]) -> Iterator[int]:
    """Yields 1, and larger numbers of threads: several in the full tier, else one, which the first result determines, so
    that hypothesis repeats an example with the same number.
    """
    yield 1
    others = (2, 3, 7)
    yield from others if draws.all_of_them else [others[zlib.crc32(results[0].tobytes()) % len(others)]]


def same_for_any_number_of_threads(call: Callable[[], Any]) -> np.ndarray:
    """Returns the result of a call, after asserting that it does not depend on the number of threads."""
    results = []
    for number in thread_counts(results):
        with st.set_num_threads(number), quiet():
            results.append(np.asarray(call()))
    assert len({x.tobytes() for x in results}) == 1
    assert len({x.strides for x in results}) == 1
    return results[0]


# -- every function of elements --------------------------------------------------------------------


@some.composite
def operands_of(draw: Any, name: str) -> list[Any]:
    """Operands of a ufunc: in some layout each, and some of them broadcast; not all of them scalars."""
    count = len(OPS[name].operands)
    dtypes = draw(
        some.lists(some.sampled_from(DTYPES), min_size=count, max_size=count).filter(lambda d: takes(name, d))
    )
    shape = draw(some.sampled_from(SHAPES))
    out: list[Any] = []
    for k, dtype in enumerate(dtypes):
        lead = 0 if k == 0 else draw(some.integers(0, len(shape)))
        narrow = tuple(1 if k and draw(some.integers(0, 4)) == 0 else n for n in shape[lead:])
        x = numbers(narrow, dtype, draw(some.integers(0, 999)))
        if "shift" in name or name == "pow":
            x = np.abs(x)
        out.append(laid(x, draw(some.sampled_from(LAYOUTS))) if narrow else st.asarray(x))
    if count == 2 and draw(some.integers(0, 3)) == 0:
        scalar = {"b": True, "i": 3, "u": 3, "f": 1.5, "c": 1.5 - 2j}[np.dtype(dtypes[1]).kind]
        if takes(name, dtypes[:1]) if count == 1 else accepts(name, out[0].dtype, scalar):
            out[1] = scalar
    return out[::-1] if draw(some.booleans()) and takes(name, dtypes[::-1]) else out


def accepts(name: str, dtype: Any, scalar: Any) -> bool:
    try:
        with quiet():
            getattr(np, name)(np.ones(1, dtype), scalar)
            getattr(np, name)(scalar, np.ones(1, dtype))
    except (TypeError, OverflowError, ValueError):
        return False
    return True


@in_blocks
@pytest.mark.parametrize("name", UFUNCS)
def test_ufunc(name: str) -> None:
    @hypothesis.settings(max_examples=drawn(25, fast=4))
    @hypothesis.given(operands=operands_of(name))
    def run(operands: list[Any]) -> None:
        with quiet():
            wanted = getattr(np, name)(*map(host, operands))
        found = same_for_any_number_of_threads(lambda: getattr(st, name)(*operands))
        assert_numpys(name, found, wanted, operands)

    run()


@in_blocks
@pytest.mark.parametrize("name", ["add", "divide", "sin", "equal", "logical_and", "pow"])
def test_sharded_operands(name: str) -> None:
    """The operands have any sharding."""

    @hypothesis.settings(max_examples=drawn(40, fast=6))
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        shape = data.draw(some.sampled_from([*SHAPES, (0,), (3, 0), ()]))
        mesh = data.draw(meshes("numpy"))
        values = [
            numbers(shape, data.draw(some.sampled_from(["float32", "float64"])), k)
            for k in range(len(OPS[name].operands))
        ]
        values = [np.abs(x) + 1 for x in values] if name == "pow" else values
        operands = [placed(data, x, "numpy", mesh) for x in values]
        if not any(isinstance(x, st.ShardedTensor) for x in operands):
            return
        with quiet(), st.set_num_threads(data.draw(some.integers(1, 3))):
            assert_same(getattr(st, name)(*operands), getattr(np, name)(*values))

    run()


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "float32", "int64", "complex64", "complex128", "M8[s]"])
@pytest.mark.parametrize("shape", [(), (0, 3), (7, 10, 30), (1 << 15,), (2, 1 << 14)])
def test_where_selects_bits(shape: tuple[int, ...], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "_LEAST_MASKED", 2)
    monkeypatch.setattr(blockwise, "_SELECTED", 1 << 10)
    size = int(np.prod(shape))
    x, y = ((np.arange(size) * k % 97).reshape(shape).astype(dtype) for k in (3, 5))
    if x.dtype.kind in "fc":
        x.reshape(-1)[::3], y.reshape(-1)[::5] = np.nan, -0.0
    condition = (np.arange(size) % 7 < 3).reshape(shape)
    for chosen in (condition, condition * 2.0, condition[:1] if shape else True):
        wanted = np.where(chosen, x, y).tobytes()
        strided = np.empty((*shape, 2), dtype)[..., 0]
        for a, b, out in ((x, y, np.empty_like(x)), (x, y, strided), (x.T.copy().T, y, np.empty_like(x))):
            blockwise.where(chosen, a, b, out=out)
            assert out.tobytes() == wanted
        for number in (0, 1):  # In place.
            pair = x.copy(), y.copy()
            blockwise.where(chosen, *pair, out=pair[number])
            assert pair[number].tobytes() == wanted
    if dtype == "float32":
        out = np.empty_like(x)
        blockwise.where(condition, x, 0.1, out=out)
        assert out.tobytes() == np.where(condition, x, 0.1).tobytes()


@in_blocks
def test_clip_round_and_where() -> None:
    @hypothesis.settings(max_examples=drawn(150, fast=24))
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        name = data.draw(some.sampled_from(["clip", "round", "where"]))
        shape = data.draw(some.sampled_from(SHAPES))
        kinds = [d for d in DTYPES if name != "round" or d != "bool"]
        kinds = [d for d in kinds if name != "clip" or d not in ("bool", "complex64", "complex128")]
        dtype = data.draw(some.sampled_from(kinds))
        count = 1 if name == "round" else 3
        operands: list[Any] = []
        for k in range(count):
            lead = data.draw(some.sampled_from([0, 0, len(shape) - 1])) if k else 0
            x = numbers(
                shape[lead:], "bool" if name == "where" and not k else dtype, k + data.draw(some.integers(0, 99))
            )
            operands.append(laid(x, data.draw(some.sampled_from(LAYOUTS))))
            if k and data.draw(some.integers(0, 3)) == 0:
                operands[-1] = np.dtype(dtype).type(1).item()
        if name == "clip":
            operands[1 + data.draw(some.integers(0, 1))] = data.draw(
                some.sampled_from([None, operands[1], operands[2]])
            )
        if name == "where" and not any(isinstance(x, st.ShardedTensor) for x in operands[1:]):
            operands[1] = laid(numbers(shape, dtype, 5), "C")
        wanted = getattr(np, name)(*map(host, operands))
        found = same_for_any_number_of_threads(lambda: getattr(st, name)(*operands))
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_array_equal(found, wanted)

    run()


@in_blocks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_astype(layout: str) -> None:
    cases = itertools.product(DTYPES, DTYPES, [(67,), (5, 13), (7, 5, 3), (1, 1)])
    for before, after, shape in strided(cases, 3, LAYOUTS.index(layout)):
        with quiet():
            x = laid(np.abs(numbers(shape, before, 3)), layout)
            wanted = np.asarray(x).astype(after)
        found = same_for_any_number_of_threads(lambda: st.astype(x, after))  # noqa: B023
        assert_numpys("astype", found, wanted, [x])


@in_blocks
@pytest.mark.parametrize("dtype", DTYPES)
def test_scalars_are_weak(dtype: str) -> None:
    x = np.ones(50, dtype)
    for scalar in True, 2, 2.5, 2 + 1j:
        for a, b in (x, scalar), (scalar, x):
            wanted = a * b
            found = st.multiply(*[st.asarray(v) if v is x else v for v in (a, b)])
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(np.asarray(found), wanted)


@in_blocks
def test_operands_of_one_element_and_of_none() -> None:
    for shape in (), (1,), (0,), (0, 5), (5, 0, 2), (1, 1, 1):
        x = numbers(shape, "float64", 1)
        assert_same(st.asarray(x) + st.asarray(x), np.asarray(x + x), exact=True)
        assert_same(st.sin(st.asarray(x)), np.asarray(np.sin(x)))
        assert_same(st.astype(st.asarray(x), "int32"), np.asarray(x).astype("int32"), exact=True)


# -- how the result lies ---------------------------------------------------------------------------


@in_blocks
def test_results_have_numpys_dimension_order() -> None:
    """The operands have the same order, or two dimensions."""
    for shape in (5, 13), (13, 5), (2, 40), (9, 9), (1, 40):
        for a, b in itertools.product(LAYOUTS, repeat=2):
            x, y = laid(numbers(shape, "float64", 1), a), laid(numbers(shape, "float64", 2), b)
            wanted = np.asarray(x) + np.asarray(y)
            found = np.asarray(x + y)
            assert found.strides == wanted.strides, (shape, a, b)
    x = numbers((7, 5, 3), "float64", 1)
    for axes in itertools.permutations(range(3)):
        given = st.permute_dims(st.asarray(x), axes)
        for y in given, 2.0, given[::-1], given[0, 0], given[:1, :1]:
            wanted = np.asarray(given) * host(y)
            assert np.asarray(given * y).strides == wanted.strides, axes


@in_blocks
@pytest.mark.parametrize("narrow", [False, True])
def test_operands_with_partly_equal_dimension_orders(narrow: bool) -> None:
    x, y = laid(numbers((7, 5, 3), "float64", 1), "F"), laid(numbers((7, 5, 3), "float64", 2), "turned")
    y = st.asarray(np.ascontiguousarray(np.asarray(y)[:1])) if narrow else y
    assert np.asarray(x + y).strides == (np.asarray(x) + np.asarray(y)).strides


# -- blocks ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted(module: Any = blockwise) -> Iterator[list[int]]:
    """Returns the amount of work that a module divided, for each call."""
    found: list[int] = []

    def each(work: Any, count: int, **options: Any) -> None:
        found.append(count)
        real(work, count, **options)

    real = module.each
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "each", each)
        yield found


@in_blocks
def test_these_calls_are_divided_into_blocks() -> None:
    """Otherwise the tests above would compare NumPy with itself."""
    x, y = (laid(numbers((40, 30), "float64", k), "C") for k in (1, 2))
    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: x + y,
        "sin": lambda: st.sin(x),
        "clip": lambda: st.clip(x, 0, 1),
        "where": lambda: st.where(x, x, y),
        "round": lambda: st.round(x),
        "astype": lambda: x.astype("int8"),
        "copy": lambda: st.asarray(np.asarray(x)),
        "mixed": lambda: x[:30] + y[:30].T,
    }
    for name, call in calls.items():
        with counted() as found:
            call()
        assert max(found) > 10, name
    for name in "__iadd__", "assigned":
        with counted() as found:
            x.__iadd__(y) if name == "__iadd__" else x.__setitem__(..., y)
        assert max(found) > 10, name


@some.composite
def windows(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    """Draws an array and a window of it, with permuted dimensions, gaps and negative strides."""
    shape = tuple(draw(some.lists(some.integers(0, 9), min_size=1, max_size=4)))
    whole = np.zeros([2 * n for n in shape], np.int64)
    index = [draw(some.sampled_from([slice(None, n), slice(None, None, 2), slice(None, None, -2)])) for n in shape]
    return whole, whole[tuple(index)].transpose(draw(some.permutations(range(len(shape)))))


@hypothesis.settings(max_examples=drawn(300, fast=40))
@hypothesis.given(data=some.data())
def test_every_element_is_computed_once(data: Any) -> None:
    """Elements outside of the window are not written."""
    sizes = {name: data.draw(some.integers(1, 20), label=name) for name in ("_BLOCK", "_LEAST", "_TILE", "_STEP")}
    whole, out = data.draw(windows())
    other = np.ones(out.shape[::-1], np.int64).T if data.draw(some.booleans()) else np.ones(out.shape, np.int64)

    def add(x: Any, y: Any, *, out: Any) -> None:
        np.add(x, y, out=out)

    with cut(**sizes), st.set_num_threads(data.draw(some.integers(1, 3))):
        blockwise.into(out, add, (out, other))
    assert (out == 1).all()
    assert whole.sum() == out.size


@outside_of_caches
@pytest.mark.parametrize(
    "shape", [(10**7,), (1000, 1001), (10**6, 2), (2, 10**6), (3, 1000, 700), (1, 10**6), (10**6, 1)]
)
@pytest.mark.parametrize("layout", ["C", "gaps", "mixed"])
def test_sizes_of_blocks(shape: tuple[int, ...], layout: str) -> None:
    """In blocks that are too short, the calls take time; if they are too long, threads have no work."""
    out = np.empty([*shape[:-1], shape[-1] + (layout == "gaps")])[..., : shape[-1]]
    other = np.empty(shape[::-1]).T if layout == "mixed" else np.empty(shape)
    blocks: list[int] = []

    def look(*arrays: Any, out: Any) -> None:
        blocks.append(out.size)

    with st.set_num_threads(1):
        blockwise.into(out, look, (other, 2.0))
    assert sum(blocks) == out.size
    assert max(blocks) <= blockwise._BLOCK + blockwise._STEP
    assert len(blocks) >= 8
    assert sorted(blocks)[len(blocks) // 2] >= (blockwise._TILE if layout == "mixed" else blockwise._LEAST // 2)


@outside_of_caches
def test_blocks_of_contiguous_arrays_begin_at_cache_lines() -> None:
    begins: list[int] = []

    def look(x: Any, *, out: Any) -> None:
        begins.append(out.__array_interface__["data"][0] - start)

    out = np.empty((1001, 1003))
    start = out.__array_interface__["data"][0]
    with st.set_num_threads(1):
        blockwise.into(out, look, (np.empty(out.shape),))
    assert len(begins) > 8
    assert not any(at % 64 for at in begins)


def test_short_work_is_one_call() -> None:
    x = st.ones((100, 100))
    with counted() as found:
        x + x, x.T + x, st.sin(x[:10]), st.asarray(x, copy=True)
        x += 1
    assert found == []


@pytest.mark.parametrize(("elements", "divides"), [(1 << 20, False), (1 << 21, True)])
def test_functions_of_cached_arrays_are_one_call(elements: int, divides: bool) -> None:
    """Three arrays of 8 MiB, between which NumPy adds in less time than a thread takes to wake, and larger ones."""
    x = st.ones(elements)
    with counted() as found:
        x + x
    assert (max(found, default=0) > 1) == divides


# -- real sizes ------------------------------------------------------------------------------------


@outside_of_caches
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_arrays(layout: str) -> None:
    a, b = np.random.default_rng(1).normal(size=(2, 900, 1100))
    x, y = laid(a, layout), laid(b, "C")
    for name in strided(["add", "divide", "maximum", "less"], 2, LAYOUTS.index(layout)):
        wanted = getattr(np, name)(np.asarray(x), np.asarray(y))
        with counted() as found:
            result = same_for_any_number_of_threads(lambda: getattr(st, name)(x, y))  # noqa: B023
        assert max(found) > 1
        assert_numpys(name, result, wanted, [x, y])
    for name in strided(["sin", "sqrt", "exp", "tanh"], 2, LAYOUTS.index(layout)):
        with quiet():
            wanted = getattr(np, name)(np.asarray(x))
        assert_numpys(name, same_for_any_number_of_threads(lambda: getattr(st, name)(x)), wanted, [x])  # noqa: B023
    assert_numpys("where", st.where(x > 0, x, y), np.where(a > 0, a, b), [])
    assert_numpys("astype", x.astype("float32"), np.asarray(x).astype("float32"), [x])


def test_large_arrays_of_three_dimensions() -> None:
    x = np.random.default_rng(1).normal(size=(40, 150, 130))
    for axes in itertools.permutations(range(3)):
        y = np.random.default_rng(2).normal(size=[x.shape[a] for a in np.argsort(axes)]).transpose(axes)
        turned = st.permute_dims(st.asarray(np.ascontiguousarray(y.transpose(np.argsort(axes)))), axes)
        np.testing.assert_array_equal(np.asarray(st.asarray(x) - turned), x - y)
        np.testing.assert_array_equal(np.asarray(st.asarray(x) * y[:, :1]), x * y[:, :1])


# -- floating-point errors -------------------------------------------------------------------------

BIG = np.full(50, 3e38, "float32")
HALVES = np.arange(50.0) % 2
COMPLAINTS: dict[str, tuple[Callable[..., Any], ...]] = {
    "overflow": (lambda xp, x: xp.add(x, x), BIG),
    "zero and invalid": (lambda xp, x, y: xp.divide(x, y), HALVES, np.zeros(50)),
    "invalid at the end": (lambda xp, x: xp.sqrt(x), np.where(np.arange(50) == 49, -1.0, 1)),
    "exp": (lambda xp, x: xp.exp(x), np.full(50, 1e4)),
    "underflow": (lambda xp, x: xp.multiply(x, x), np.full(50, 1e-30, "float32")),
    "to int": (lambda xp, x: xp.astype(x, "int32"), np.full(50, np.nan)),
    "to float32": (lambda xp, x: xp.astype(x, "float32"), np.full(50, 1e300)),
    "integers": (lambda xp, x, y: xp.floor_divide(x, y), HALVES.astype(int), np.zeros(50, int)),
    "nothing": (lambda xp, x: xp.add(x, x), HALVES),
    "none of NaN": (lambda xp, x: xp.clip(x, 0, None), np.full(50, np.nan)),
}  # type: ignore[assignment]
MODES = ["warn", "raise", "call", "log", "ignore"]


class Lines(list[str]):
    write = list.append


def heard(call: Callable[[], Any], mode: str, handler: bool = True) -> tuple[Any, ...]:
    """Returns the reports of a call: warnings, calls of a handler, logged lines, an error. Asserts that the error state
    is restored.
    """
    called: list[Any] = []
    lines = Lines()
    listener = None if not handler else lines if mode == "log" else lambda *a: called.append(a)
    error: Any = None
    with warnings.catch_warnings(record=True) as warned, np.errstate(all=mode, call=listener):
        warnings.simplefilter("always")
        before = np.geterr(), np.geterrcall()
        try:
            call()
        except (FloatingPointError, NameError) as raised:
            error = type(raised), str(raised)
        assert (np.geterr(), np.geterrcall()) == before
    return [(w.category, str(w.message)) for w in warned], called, list(lines), error


@in_blocks
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COMPLAINTS)
def test_errors_are_reported_as_by_numpy(name: str, mode: str) -> None:
    """There is one report for each call, with its name, for any number of threads."""
    function, *arrays = COMPLAINTS[name]
    wanted = heard(lambda: function(np, *arrays), mode)
    tensors = [st.asarray(x) for x in arrays]
    for number in 1, 2, 7:
        with st.set_num_threads(number):
            assert heard(lambda: function(st, *tensors), mode) == wanted


@in_blocks
@pytest.mark.parametrize("name", sorted(COMPLAINTS.keys() - {"nothing", "none of NaN"}))
def test_warnings_name_the_line_of_the_caller(name: str) -> None:
    function, *arrays = COMPLAINTS[name]
    tensors = [st.asarray(x) for x in arrays]
    with pytest.warns(RuntimeWarning) as warned, np.errstate(all="warn"):
        function(st, *tensors)
    assert {w.filename for w in warned} == {__file__}


@in_blocks
def test_errors_are_printed(capfd: pytest.CaptureFixture[str]) -> None:
    x = np.arange(50.0) % 2
    given = st.asarray(x)
    with np.errstate(all="print"):
        x / 0
        wanted = capfd.readouterr()
        given / 0
        assert capfd.readouterr() == wanted


@in_blocks
def test_each_kind_has_its_own_mode() -> None:
    x = st.asarray(HALVES)
    with np.errstate(divide="ignore", invalid="raise"), pytest.raises(FloatingPointError, match="invalid value"):
        x / 0
    with np.errstate(divide="raise", invalid="ignore"), pytest.raises(FloatingPointError, match="divide by zero"):
        x / 0
    with np.errstate(divide="ignore", invalid="ignore", over="raise", under="raise"):
        x / 0


@in_blocks
@pytest.mark.parametrize("mode", ["call", "log"])
def test_a_missing_error_callback(mode: str) -> None:
    x = st.asarray(BIG)
    assert heard(lambda: x + x, mode, handler=False) == heard(lambda: BIG + BIG, mode, handler=False)


@in_blocks
def test_warnings_as_errors() -> None:
    """The warnings are errors, as under ``-W error``, and later calls work."""
    x = st.asarray(BIG)
    for number in 1, 3:
        with st.set_num_threads(number), warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="overflow encountered in add"):
                x + x
            with pytest.raises(RuntimeWarning, match="invalid value encountered in cast"):
                (x * np.float32(np.nan)).astype("int8")
            np.testing.assert_array_equal(np.asarray(x * 0.5), BIG * np.float32(0.5))


@in_blocks
def test_an_error_of_the_callback_propagates() -> None:
    def refuse(kind: str, flag: int) -> None:
        raise KeyError(kind)

    x = st.asarray(BIG)
    with np.errstate(all="call", call=refuse), pytest.raises(KeyError, match="overflow"):
        x + x


@in_blocks
def test_each_thread_has_its_own_error_state() -> None:
    """An error state that ignores errors in one thread has no effect on another thread."""
    x, errors, start = st.asarray(BIG), [], threading.Barrier(4)

    def work(mode: str) -> None:
        start.wait()
        for _ in range(30):
            with np.errstate(all=mode):
                try:
                    x + x
                    errors.append((mode, "passed"))
                except FloatingPointError:
                    errors.append((mode, "raised"))

    threads = [threading.Thread(target=work, args=(mode,)) for mode in ("raise", "ignore") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(errors) == {("raise", "raised"), ("ignore", "passed")}
    assert len(errors) == 120


def warnings_of(cast: Callable[[], Any]) -> int:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        cast()
    return len(warned)


@in_blocks
def test_imaginary_parts_are_discarded_with_one_warning() -> None:
    x = st.asarray(np.ones(50) + 1j)
    assert warnings_of(lambda: x.astype("float64")) == 1


@in_blocks
def test_writes_discard_imaginary_parts_with_one_warning() -> None:
    x, y = st.asarray(np.ones(50) + 1j), st.zeros(50)
    assert warnings_of(lambda: y.__setitem__(..., x)) == 1
    np.testing.assert_array_equal(np.asarray(y), np.ones(50))


# -- writes ----------------------------------------------------------------------------------------


def _add_in_place(x: Any, y: Any) -> None:
    x += y


def _add_turned(x: Any, y: Any) -> None:
    v = x.T
    v += x


WRITES: dict[str, Callable[[Any, Any], None]] = {
    "x += y": _add_in_place,
    "x += y.T": lambda x, y: _add_in_place(x, y.T),
    "x += x": lambda x, y: _add_in_place(x, x),
    "x += x.T": lambda x, y: _add_in_place(x, x.T),
    "x += y[0]": lambda x, y: _add_in_place(x, y[0]),
    "x += x[0]": lambda x, y: _add_in_place(x, x[0]),
    "x += x[:, :1]": lambda x, y: _add_in_place(x, x[:, :1]),
    "x += x[::-1]": lambda x, y: _add_in_place(x, x[::-1]),
    "x += 5": lambda x, y: _add_in_place(x, 5),
    "x.T += x": _add_turned,
    "x[1:] += x[:-1]": lambda x, y: x.__setitem__(np.s_[1:], x[1:] + 0) or _add_in_place(x[1:], x[:-1]),
    "x[:, 1:] += x[:, :-1]": lambda x, y: _add_in_place(x[:, 1:], x[:, :-1]),
    "x[:-1] += x[1:]": lambda x, y: _add_in_place(x[:-1], x[1:]),
    "x[::-1] += y": lambda x, y: _add_in_place(x[::-1], y),
    "x[::2] += y[1::2]": lambda x, y: _add_in_place(x[::2], y[1::2]),
    "x[...] = y": lambda x, y: x.__setitem__(..., y),
    "x[...] = y.T": lambda x, y: x.__setitem__(..., y.T),
    "x[...] = x[::-1]": lambda x, y: x.__setitem__(..., x[::-1]),
    "x[...] = x.T": lambda x, y: x.__setitem__(..., x.T),
    "x[1:] = x[:-1]": lambda x, y: x.__setitem__(np.s_[1:], x[:-1]),
    "x[:, ::2] = y[0, 0]": lambda x, y: x.__setitem__(np.s_[:, ::2], y[0, 0]),
    "x[...] = y[0]": lambda x, y: x.__setitem__(..., y[0]),
    "x[...] = 7": lambda x, y: x.__setitem__(..., 7),
    "subtract(y, x, out=x)": lambda x, y: np.subtract(y, x, out=x),
    "subtract(x.T, x, out=x)": lambda x, y: np.subtract(x.T, x, out=x),
    "multiply(x[1:], y[1:], out=x[:-1])": lambda x, y: np.multiply(x[1:], y[1:], out=x[:-1]),
    "add(x[::2], y[::2], out=x[1::2])": lambda x, y: np.add(x[::2], y[::2], out=x[1::2]),
    "clip(x, 0, y, out=x)": lambda x, y: np.clip(x, 0, y, out=x),
}


@in_blocks
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", ["int64", "float32"])
@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
def test_writes(write: str, dtype: str, shared: bool) -> None:
    """The results are bitwise equal, and no other tensor changes."""
    sizes = enumerate(itertools.product((8, 18), ((1,), (4,), (2, 2))))
    for number, (m, mesh) in strided(sizes, 2, list(WRITES).index(write) + shared + (dtype == "float32")):
        a, b = numbers((m, m), dtype, 1), numbers((m, m), dtype, 2)
        spec = st.P("x") if number % 2 else st.P(None, "x")
        x = st.device_put(a, st.NamedSharding(mesh_of(mesh, "numpy"), spec))
        y = st.device_put(b, st.NamedSharding(mesh_of(mesh, "numpy"), st.P("x")))
        holder = st.asarray(x, copy=False) if shared else None
        before = np.asarray(x) if shared else None
        kept = a.copy()
        for threads in 1, 3:
            WRITES[write](a, b)
            with st.set_num_threads(threads):
                WRITES[write](x, y)
            np.testing.assert_array_equal(np.asarray(x), a)
        assert_same(y, b, exact=True)
        if before is not None:
            np.testing.assert_array_equal(before, kept)
            del holder


@in_blocks
@pytest.mark.parametrize("name", [n for n in BINARY if n not in ("pow", "bitwise_left_shift", "bitwise_right_shift")])
def test_every_ufunc_writes_in_place(name: str) -> None:
    dtype = next(d for d in ("float32", "int32", "bool") if takes(name, [d, d]))
    out = getattr(np, name)(np.ones(1, dtype), np.ones(1, dtype)).dtype
    a, b = numbers((6, 11), dtype, 3), numbers((11, 6), dtype, 4).T
    wanted, found = np.zeros((6, 22), out), st.zeros((6, 22), dtype=out)
    with quiet():
        getattr(np, name)(a, b, out=wanted[:, ::2])
        getattr(np, name)(st.asarray(a), st.asarray(b.T.copy()).T, out=found[:, ::2])
    assert_numpys(name, found, wanted, [])


@in_blocks
def test_parts_of_complex_numbers_are_written() -> None:
    """A view of the real parts begins where the numbers do, and has their shape and strides."""
    c = numbers((9, 9), "complex128", 1)
    x = st.asarray(c)
    for write in (
        lambda z: _add_in_place(z, z.real),
        lambda z: _add_in_place(z.real, z.imag),
        lambda z: z.imag.__setitem__(..., z.real),
        lambda z: _add_in_place(z.real.T, z.real),
    ):
        write(c)
        write(x)
        np.testing.assert_array_equal(np.asarray(x), c)


@in_blocks
def test_writes_to_exclusive_and_shared_arrays() -> None:
    x = st.asarray(numbers((40, 30), "float64", 1))
    place = np.asarray(x).__array_interface__["data"]
    x += 1
    x *= x
    x[...] = x[::-1]
    assert np.asarray(x).__array_interface__["data"][0] == place[0]
    reader = np.asarray(x)
    kept = reader.copy()
    x += 1
    np.testing.assert_array_equal(reader, kept)
    np.testing.assert_array_equal(np.asarray(x), kept + 1)


@in_blocks
@pytest.mark.parametrize("mode", ["raise", "call", "warn"])
@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
def test_results_with_floating_point_errors_are_written(mode: str, shared: bool) -> None:
    """As in NumPy, the error is raised after all elements have been written."""

    def refuse(kind: str, flag: int) -> None:
        raise KeyError(kind)

    def divide(x: Any) -> None:
        with np.errstate(all=mode, call=refuse):
            x /= 0

    a = np.arange(60.0)
    x = st.asarray(a)
    reader = np.asarray(x) if shared else None
    for given in a, x:
        with pytest.raises((FloatingPointError, KeyError, RuntimeWarning)):
            divide(given)
    np.testing.assert_array_equal(np.asarray(x), a)
    if reader is not None:
        np.testing.assert_array_equal(reader, np.arange(60.0))


@in_blocks
@pytest.mark.parametrize("write", ["x += y", "x[...] = y"])
@pytest.mark.parametrize(
    "shared",
    [False, True],
    ids=["exclusive", "shared"],
)
def test_a_memory_error_during_a_write(write: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose allocation fails is computed once more, because a value that is written in part is worse."""
    WRITES[write](st.asarray(np.arange(60.0)), st.ones(60))  # the plan of such a write is cached from here on
    x, y = st.asarray(np.arange(60.0)), st.ones(60)
    reader, calls = np.asarray(x) if shared else None, itertools.count()

    def fail(*arrays: Any, **options: Any) -> None:
        if next(calls) == 3:
            raise MemoryError
        original(*arrays, **options)

    name = "add" if write == "x += y" else "copyto"
    original = getattr(np, name)
    monkeypatch.setattr(np, name, fail)
    with st.set_num_threads(1):
        WRITES[write](x, y)
    monkeypatch.undo()
    assert next(calls) > 3
    np.testing.assert_array_equal(np.asarray(x), np.arange(60.0) + 1 if name == "add" else np.ones(60))
    if reader is not None:
        np.testing.assert_array_equal(reader, np.arange(60.0))


# -- copies ----------------------------------------------------------------------------------------


@in_blocks
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bool", "int8", "float64", "complex64"])
def test_copies(layout: str, dtype: str) -> None:
    for shape in [*SHAPES, (0,), (3, 0)]:
        x = np.asarray(laid(numbers(shape, dtype, 1), layout))
        for number in 1, 3:
            with st.set_num_threads(number):
                found = blockwise.copied(x)
            wanted = np.array(x, order="C")
            np.testing.assert_array_equal(found, wanted)
            assert found.dtype == wanted.dtype
            assert order_of(found) == order_of(wanted)
            assert not np.shares_memory(found, x)
            assert found.flags.writeable


@in_blocks
def test_copies_of_tensors() -> None:
    x = numbers((7, 20), "float64", 1)
    for layout, mesh in itertools.product(LAYOUTS, ((1,), (3,), (2, 2))):
        given = laid(x, layout)
        for spec in st.P("x"), st.P(None, "x"), st.P():
            copies = [
                st.device_put(given, st.NamedSharding(mesh_of(mesh, "numpy"), spec)),
                st.asarray(given, copy=True),
                st.asarray(np.asarray(given)),
            ]
            for y in copies:
                assert_same(y, x, exact=True)
                y += 1
                assert_same(y, x + 1, exact=True)
            np.testing.assert_array_equal(np.asarray(given), x)


@in_blocks
def test_written_values_are_converted() -> None:
    for before, after in itertools.product(["bool", "int8", "int64", "float32", "float64"], repeat=2):
        x = np.abs(numbers((5, 12), before, 1))
        for value in x, x.T.copy().T, x[0], x[:, :1], x[0, 0]:
            wanted, found = np.zeros((5, 12), after), np.zeros((5, 12), after)
            wanted[...] = value
            blockwise.copy_into(found, value)
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("rest", [(), (3,)], ids=str)
def test_index_arrays_select_in_threads(monkeypatch: pytest.MonkeyPatch, rest: tuple[int, ...]) -> None:
    """Index arrays of several parts, negative indices and another memory order included, as NumPy selects."""
    monkeypatch.setattr(blockwise, "_ROWS", 16)
    generator = np.random.default_rng(0)
    x = generator.random((50, 7, *rest))
    rows = np.asfortranarray(generator.integers(-50, 50, (9, 11)))
    columns = generator.integers(0, 7, (9, 11)).astype(np.uint8)
    for index in [(rows,), (rows, columns), (columns,), (columns.astype(np.uint64),), (rows.astype(np.int8),)]:
        np.testing.assert_array_equal(blockwise.select(x, index), x[index], strict=True)
    for wrong in 50, -51:
        rows[3, 4] = wrong
        with pytest.raises(IndexError, match=f"index {wrong} is out of bounds for axis 0 with size 50"):
            blockwise.select(x, (rows,))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_histograms_of_parts(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Elements on edges, outside of the range and NaN are counted as NumPy counts them."""
    from shardtensor.functions.statistics import histograms

    monkeypatch.setattr(histograms, "_PART", 64)
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.normal(size=500), np.linspace(-1, 1, 11).repeat(9), [np.nan, np.inf]]).astype(dtype)
    for bins in (10, 3):
        found = st.histogram(st.asarray(x), bins, (-1, 1))
        for mine, numpys in zip(found, np.histogram(x, bins, (-1, 1)), strict=True):
            np.testing.assert_array_equal(np.asarray(mine), numpys, strict=True)


@pytest.mark.parametrize("step", [1, 4, 100])
@pytest.mark.parametrize("size", [0, 1, 5, 6, 77])
def test_repeated_elements_are_those_of_resize(step: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "_STEP", step)
    for x in (np.arange(1), np.arange(6.0).reshape(2, 3), np.arange(200, dtype=np.uint8)[::2]):
        found = blockwise.repeated(x, size)
        np.testing.assert_array_equal(found, np.resize(x, size), strict=True)
        assert not np.shares_memory(found, x)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_where_of_runs(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks in which all conditions are the same are copied, those in which they differ are masked."""
    monkeypatch.setattr(blockwise, "_LEAST_MASKED", 1)
    monkeypatch.setattr(blockwise, "_SELECTED", 32)
    x = np.arange(48, dtype=dtype)
    conditions = [np.arange(48) < 13, np.arange(48) >= 8, np.ones(48, bool), np.zeros(48, bool), np.arange(48) == 47]
    for condition in conditions:
        for pair in ((x, -x), (x, x.dtype.type(7)), (x.dtype.type(7), x)):
            wanted, out = np.where(condition, *pair), np.empty(48, dtype)
            blockwise.where(condition, *pair, out=out)
            np.testing.assert_array_equal(out, wanted, strict=True)
