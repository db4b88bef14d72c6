"""Kernels compute the results of NumPy's functions, on blocked NumPy and as compiled C."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.interpreters.jit.c import c_executor
from shardtensor.interpreters.jit.c.c_source import _LONG, LANES, SEGMENT
from shardtensor.interpreters.jit.c.compiler import find_compiler
from shardtensor.interpreters.jit.kernels import kernel_operands, numpy_executor
from shardtensor.interpreters.jit.kernels.expressions import has_c
from shardtensor.interpreters.jit.kernels.kernel import Kernel, KernelBuilder
from shardtensor.interpreters.jit.kernels.row_schedule import row_schedule
from tests.interpreters.jit.random_kernels import Case, assert_same, random_case, reference, spread_kernel
from tests.scripts import new_process, output_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Run = Callable[[Kernel, tuple[int, ...], Sequence[Any], Sequence[Any]], None]
COUNT = 24


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of a few elements have several blocks and pieces."""
    monkeypatch.setattr(numpy_executor, "BLOCK", 16)
    monkeypatch.setattr(numpy_executor, "_LEAST", 16)
    monkeypatch.setattr(numpy_executor, "_TASK", 64)
    monkeypatch.setattr(c_executor, "LONG", 0.0)
    monkeypatch.setattr(c_executor, "_ALIGNED", 8)
    monkeypatch.setattr(c_executor, "_LONG_ROW", 1)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [random_case(seed) for seed in range(COUNT)]


@pytest.fixture(scope="module")
def compiled(cases: list[Case]) -> dict[Kernel, c_executor.CompiledKernel]:
    if find_compiler() is None:
        pytest.skip("no C compiler")
    return c_executor.compile_kernels([case.kernel for case in cases])


def run_c(kernel: Kernel, shape: tuple[int, ...], inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    c_executor.compile_kernels([kernel])[kernel].run(shape, inputs, outputs)


EXECUTORS = [pytest.param(numpy_executor.run, id="blocked"), pytest.param(run_c, id="c")]


@pytest.mark.parametrize("number", range(COUNT))
def test_random_kernels_equal_numpy_on_blocks(number: int, cases: list[Case]) -> None:
    check_kernel(numpy_executor.run, cases[number])


@pytest.mark.parametrize("number", range(COUNT))
def test_random_kernels_equal_numpy_in_c(number: int, cases: list[Case], compiled: Any) -> None:
    kernel = cases[number].kernel
    assert (kernel in compiled) == has_c(kernel)
    if kernel in compiled:
        check_kernel(run_c, cases[number])


def check_kernel(run: Run, case: Case) -> None:
    """Also in place, where an input has the shape and dtype of an output, and with outputs of any strides."""
    expected = reference(case)
    outs = case.outputs()
    run(case.kernel, case.shape, case.inputs, outs)
    for out, wanted in zip(outs, expected, strict=True):
        assert_same(out, wanted, case)
    turned = [np.empty_like(out.T).T[...] if out.ndim else out for out in outs]
    run(case.kernel, case.shape, case.inputs, turned)
    for out, wanted in zip(turned, expected, strict=True):
        assert_same(out, wanted, case)
    for k, x in enumerate(case.inputs):
        for n, out in enumerate(outs):
            if isinstance(x, np.ndarray) and x.shape == out.shape and x.dtype == out.dtype and 0 not in x.strides:
                mine = [x.copy(order="K") if m == k else y for m, y in enumerate(case.inputs)]
                run(case.kernel, case.shape, mine, [mine[k] if m == n else o for m, o in enumerate(outs)])
                assert_same(mine[k], expected[n], case)


@pytest.mark.parametrize("run", EXECUTORS)
@pytest.mark.parametrize("place", range(3))
def test_where_may_be_written_into_its_operands(run: Run, place: int) -> None:
    k = KernelBuilder(1)
    inputs = [k.input(dtype, (True,)) for dtype in ("b1", "b1", "b1")]
    k.output(k.call("where", *inputs))
    arrays = [np.random.default_rng(n).random(100) < 0.5 for n in range(3)]
    expected = np.where(*arrays)
    run(k.build(), (100,), arrays, [arrays[place]])
    assert_same(arrays[place], expected)


@pytest.mark.full
@pytest.mark.parametrize("chunk", range(100))
def test_many_random_kernels_equal_numpy(chunk: int) -> None:
    cases = [random_case(1000 + 30 * chunk + k) for k in range(30)]
    made = c_executor.compile_kernels([case.kernel for case in cases])
    for case in cases:
        check_kernel(numpy_executor.run, case)
        if case.kernel in made:
            check_kernel(run_c, case)


# -- kernels that people write ---------------------------------------------------------------------


def softmax(dtype: str = "f4") -> Kernel:
    k = KernelBuilder(2, 1)
    x = k.input(dtype, (True, True))
    e = k.call("exp", k.call("subtract", x, k.reduce("max", x)))
    k.output(k.call("divide", e, k.reduce("sum", e)))
    return k.build()


def layer_norm(dtype: str = "f4") -> Kernel:
    k = KernelBuilder(2, 1)
    x, scale, shift = k.input(dtype, (True, True)), k.input(dtype, (False, True)), k.input(dtype, (False, True))
    epsilon = k.input(float)
    d = k.call("subtract", x, k.reduce("mean", x))
    n = k.call("sqrt", k.call("add", k.reduce("mean", k.call("square", d)), epsilon))
    k.output(k.call("add", k.call("multiply", k.call("divide", d, n), scale), shift))
    return k.build()


def log_sum_exp(dtype: str = "f8") -> Kernel:
    k = KernelBuilder(2, 1)
    x = k.input(dtype, (True, True))
    most = k.reduce("max", x)
    total = k.reduce("sum", k.call("exp", k.call("subtract", x, most)))
    k.output(k.call("add", k.call("log", total), most), per_row=True)
    k.output(total, per_row=True)
    return k.build()


def stencil() -> Kernel:
    k = KernelBuilder(2)
    a, b, c, d = [k.input("f8", (True, True)) for _ in range(4)]
    quarter = k.input(float)
    k.output(k.call("multiply", k.call("add", k.call("add", k.call("add", a, b), c), d), quarter))
    return k.build()


def distances() -> Kernel:
    """Of all pairs: every operand is broadcast."""
    k = KernelBuilder(2)
    a, b = k.input("f4", (True, False)), k.input("f4", (False, True))
    k.output(k.call("abs", k.call("subtract", a, b)))
    return k.build()


@pytest.fixture(scope="module")
def written() -> None:
    """All of them in one run of the compiler."""
    if find_compiler() is not None:
        kernels = [make(dtype) for make in (softmax, layer_norm, log_sum_exp) for dtype in ("f4", "f8")]
        c_executor.compile_kernels([*kernels, stencil(), distances()])


@pytest.mark.parametrize("run", EXECUTORS)
@pytest.mark.parametrize("shape", [(5, 7), (3, 64), (2, 4097), (1, 1), (4, 300), (40, 3), (0, 5)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_rows_are_normalized(run: Run, shape: tuple[int, int], dtype: str, written: None) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(dtype)
    scale, shift = rng.normal(size=(2, 1, shape[1])).astype(dtype)
    tolerance = 60 * np.finfo(dtype).eps
    out = np.empty_like(x)
    run(softmax(dtype), shape, [x], [out])
    e = np.exp(x - x.max(-1, keepdims=True))
    np.testing.assert_allclose(out, e / e.sum(-1, keepdims=True), rtol=tolerance)
    run(layer_norm(dtype), shape, [x, scale, shift, 1e-5], [out])
    d = x - x.mean(-1, keepdims=True)
    wanted = d / np.sqrt((d * d).mean(-1, keepdims=True) + np.dtype(dtype).type(1e-5)) * scale + shift
    np.testing.assert_allclose(out, wanted, rtol=tolerance, atol=tolerance)
    rows = [np.empty(shape[0], dtype) for _ in range(2)]
    run(log_sum_exp(dtype), shape, [x], rows)
    np.testing.assert_allclose(rows[1], e.sum(-1), rtol=tolerance)
    np.testing.assert_allclose(rows[0], np.log(e.sum(-1)) + x.max(-1), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("run", EXECUTORS)
def test_windows_of_one_array_are_operands_and_results(run: Run, written: None) -> None:
    grid = np.random.default_rng(1).normal(size=(20, 33))
    wanted = grid.copy()
    wanted[1:-1, 1:-1] = (grid[:-2, 1:-1] + grid[2:, 1:-1] + grid[1:-1, :-2] + grid[1:-1, 2:]) * 0.25
    windows = [grid[:-2, 1:-1], grid[2:, 1:-1], grid[1:-1, :-2], grid[1:-1, 2:]]
    run(stencil(), (18, 31), [*windows, 0.25], [grid[1:-1, 1:-1]])
    assert_same(grid, wanted)


@pytest.mark.parametrize("run", EXECUTORS)
@pytest.mark.parametrize(
    "to", [(slice(1, -1), slice(1, -1)), (slice(None, 18), slice(2, 64, 2)), (slice(17, None, -1), slice(31))], ids=repr
)
def test_results_are_windows_of_a_larger_buffer(run: Run, to: tuple[slice, ...], written: None) -> None:
    grid = np.random.default_rng(1).normal(size=(20, 33))
    windows = [grid[:-2, 1:-1], grid[2:, 1:-1], grid[1:-1, :-2], grid[1:-1, 2:]]
    large = np.random.default_rng(2).normal(size=(20, 33 if to[1] == slice(1, -1) else 70))
    wanted = large.copy()
    wanted[to] = (windows[0] + windows[1] + windows[2] + windows[3]) * 0.25
    run(stencil(), (18, 31), [*windows, 0.25], [large[to]])
    assert_same(large, wanted)


def test_windows_between_one_another_are_not_copied() -> None:
    buffer = np.zeros((40, 60))
    inputs = [buffer[:, :30], buffer[::2, 30:][:20], buffer[:, 29:31]]
    arrays, in_place = kernel_operands.separated(list(inputs), [buffer[:, 30:]])
    assert [array is given for array, given in zip(arrays, inputs, strict=True)] == [True, False, False]
    assert not in_place


@pytest.mark.parametrize("run", EXECUTORS)
def test_operands_broadcast_against_each_other(run: Run, written: None) -> None:
    a, b = np.arange(70, dtype="f4")[:, None], np.arange(33, dtype="f4")[None, ::-1]
    out = np.empty((70, 33), "f4")
    run(distances(), out.shape, [a, b], [out])
    assert_same(out, np.abs(a - b))
    column = np.empty((70, 1), "f4")
    run(distances(), column.shape, [a, b[:, :1]], [column])
    assert_same(column, np.abs(a - b[:, :1]))


@pytest.mark.parametrize("run", EXECUTORS)
def test_a_kernel_reads_an_operand_before_it_overwrites_it(run: Run, written: None) -> None:
    x = np.random.default_rng(2).normal(size=(6, 100)).astype("f4")
    out = np.empty_like(x)
    run(softmax(), x.shape, [x], [out])
    run(softmax(), x.shape, [x], [x])
    assert_same(x, out)
    line = np.arange(40, dtype="f8")
    grid = np.broadcast_to(line, (5, 40))
    mine = line[None, 1:-1].copy()
    run(stencil(), (1, 38), [line[None, :-2], line[None, 2:], line[None, 1:-1], mine, 0.25], [line[None, 1:-1]])
    assert_same(line[1:-1], np.arange(1, 39, dtype="f8"))


@pytest.mark.parametrize("run", EXECUTORS)
def test_the_number_of_threads_changes_no_bit(run: Run, written: None) -> None:
    x = np.random.default_rng(3).normal(size=(50, 4500)).astype("f4")
    results = []
    for threads in (1, 2, 7):
        with st.set_num_threads(threads):
            out, rows = np.empty_like(x), [np.empty(50, "f4") for _ in range(2)]
            run(softmax(), x.shape, [x], [out])
            run(log_sum_exp("f4"), x.shape, [x], rows)
            results.append([out, *rows])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("count", [1, 3])
def test_long_rows_are_divided_over_threads_without_a_change_of_bits(
    count: int, written: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_compiler() is None:
        pytest.skip("no C compiler")
    x = np.random.default_rng(3).normal(size=(count, 3, 33_000)).astype("f4")[:, 1]
    results = []
    for longest, threads in [(1 << 62, 1), (1, 1), (1, 2), (1, 7)]:
        monkeypatch.setattr(c_executor, "_LONG_ROW", longest)
        with st.set_num_threads(threads):
            out, rows = np.empty_like(x), [np.empty(count, "f4") for _ in range(2)]
            run_c(softmax(), x.shape, [x], [out])
            run_c(log_sum_exp("f4"), x.shape, [x], rows)
            results.append([out, *rows])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("shape", [(3, 5), (2, 4096), (2, 4097), (1, 50_000)])
def test_variances_are_accurate_and_read_their_operand_once(dtype: str, shape: tuple[int, int]) -> None:
    if find_compiler() is None:
        pytest.skip("no C compiler")
    kernel = spread_kernel(dtype)
    assert len(row_schedule(kernel, stores=True).stages) == 2  # the sums, and the results
    rng = np.random.default_rng(0)
    for offset in (0.0, 1000.0):
        array = (rng.normal(size=shape) + offset + np.arange(shape[1]) * 1e-3).astype(dtype)
        outs = [np.empty(shape[0], dtype), np.empty(shape, dtype)]
        run_c(kernel, shape, [array], outs)
        exact = array.astype("f8") * 2
        exact -= exact.mean(1, keepdims=True)
        wanted = (exact * exact).sum(1)
        np.testing.assert_allclose(outs[0], wanted, rtol=1e-5 if dtype == "f4" else 1e-13)
        np.testing.assert_allclose(outs[1], exact / wanted[:, None], atol=2e-3 / shape[1])
    array[0, 0] = np.inf
    run_c(kernel, shape, [array], outs)
    assert np.isnan(outs[0][0])


def reduced_in_lanes(x: np.ndarray, step: Callable[[Any, Any], Any], neutral: float) -> Any:
    """The reduction of a row in the order that `c_source` documents: lanes, a tree, and a binary counter."""
    parts: list[Any] = []
    for k, begin in enumerate(range(0, len(x), SEGMENT)):
        segment = x[begin : begin + SEGMENT]
        width = min(1 << (len(segment) - 1).bit_length(), LANES)
        lanes = np.full(width, neutral, x.dtype)
        for first in range(0, len(segment), LANES):
            terms = segment[first : first + LANES]
            lanes[: len(terms)] = step(lanes[: len(terms)], terms)
        while len(lanes) > 1:
            lanes = step(lanes[: len(lanes) // 2], lanes[len(lanes) // 2 :])
        part = lanes[0]
        while k & 1:
            part, k = step(parts.pop(), part), k >> 1
        parts.append(part)
    while len(parts) > 1:
        parts.append(step(*[parts.pop() for _ in range(2)][::-1]))
    return parts[0]


LENGTHS = [1, 2, 63, 64, 65, _LONG * LANES - 1, _LONG * LANES, _LONG * LANES + 1, 1000, SEGMENT - 1, SEGMENT]
LENGTHS += [SEGMENT + 1, 3 * SEGMENT + _LONG * LANES, 5 * SEGMENT + _LONG * LANES + 70]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_rows_of_every_length_are_reduced_in_the_documented_order(dtype: str) -> None:
    if find_compiler() is None:
        pytest.skip("no C compiler")
    k = KernelBuilder(2, 1)
    x, y = k.input(dtype, (True, True)), k.input(dtype, (True, True))
    for name, value in (("max", x), ("min", x), ("sum", k.call("multiply", x, y)), ("prod", y), ("sum", y)):
        k.output(k.reduce(name, value), per_row=True)
    alone = KernelBuilder(2, 1)
    alone.output(alone.reduce("max", alone.input(dtype, (True, True))), per_row=True)
    several, one = k.build(), alone.build()
    made = c_executor.compile_kernels([several, one])
    rng = np.random.default_rng(5)
    kind, nan = np.dtype(f"i{dtype[1]}"), np.array([np.nan], dtype)
    largest = lambda a, b: np.where((a > b) | (a != a), a, b)  # noqa: E731
    smallest = lambda a, b: np.where((a < b) | (a != a), a, b)  # noqa: E731
    for n in LENGTHS:
        y = (1 + rng.normal(size=(4, n)) * 1e-3).astype(dtype)
        x = rng.integers(-2, 3, (4, n)).astype(dtype) * rng.choice([-1, 1, np.inf], (4, n), p=[0.45, 0.45, 0.1])
        x = np.nan_to_num(x, nan=-0.0, posinf=np.inf, neginf=-np.inf).astype(dtype)
        x[0] = rng.choice([-0.0, 0.0], n)
        for row in (1, 2):  # Several NaN, of which each has other bits.
            at = rng.integers(0, n, row)
            x[row, at] = (nan.view(kind) + np.arange(row, dtype=kind) + 1).view(dtype)
        outs = [np.empty(4, dtype) for _ in range(6)]
        made[several].run(x.shape, [x, y], outs[:5])
        made[one].run(x.shape, [x], outs[5:])
        for row in range(4):
            wanted = [
                reduced_in_lanes(x[row], largest, -np.inf),
                reduced_in_lanes(x[row], smallest, np.inf),
                reduced_in_lanes(x[row] * y[row], np.add, -0.0),
                reduced_in_lanes(y[row], np.multiply, 1.0),
                reduced_in_lanes(y[row], np.add, -0.0),
                reduced_in_lanes(x[row], largest, -np.inf),
            ]
            for number, (out, value) in enumerate(zip(outs, np.array(wanted, dtype), strict=True)):
                assert_same(out[row : row + 1], value[None], (n, row, number))
                if number in (0, 1, 5):
                    assert out[row].tobytes() == value.tobytes(), (n, row, number)


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "b1"])
def test_integers_and_bools_are_reduced_in_long_rows(dtype: str) -> None:
    if find_compiler() is None:
        pytest.skip("no C compiler")
    k = KernelBuilder(2, 1)
    x = k.input(dtype, (True, True))
    names = ("max", "min", "any", "all")
    for name in names:
        k.output(k.reduce(name, x), per_row=True)
    run = c_executor.compile_kernels([kernel := k.build()])[kernel].run
    for n in (LANES * _LONG, LANES * _LONG + 5, SEGMENT + LANES * _LONG + 1):
        for zeros in (n, n - 1, 0):
            row = np.arange(n) >= zeros
            array = np.random.default_rng(n).permutation(row)[None].astype(dtype)
            outs = [np.empty(1, dtype if name in ("max", "min") else "b1") for name in names]
            run(array.shape, [array], outs)
            for name, out in zip(names, outs, strict=True):
                assert_same(out, getattr(np, name)(array, axis=1), (name, n, zeros))


@pytest.mark.parametrize("threads", [1, 2, 64])
@pytest.mark.parametrize(("count", "unit"), [(1, 1), (7, 1), (1000, 1), (1 << 24, 4096), (4097, 4096)])
def test_pieces_get_shorter_and_contain_each_step_once(count: int, unit: int, threads: int) -> None:
    for seconds in (1e-6, 1e-3, 0.05):
        ends = c_executor._pieces(count, unit, seconds, threads)
        sizes = np.diff(ends)
        assert (ends[0], ends[-1]) == (0, count)
        assert (sizes > 0).all()
        assert (sizes[1:] <= sizes[:-1]).all()
        assert not (sizes[:-1] % unit).any()
        assert (sizes * seconds <= np.maximum(c_executor._PIECE * count, unit * seconds) + unit * seconds).all()


def test_sums_of_long_rows_are_accurate() -> None:
    if find_compiler() is None:
        pytest.skip("no C compiler")
    x = np.random.default_rng(4).random((1, 1 << 20), "f4")
    rows = [np.empty(1, "f4") for _ in range(2)]
    run_c(log_sum_exp("f4"), x.shape, [x], rows)
    exact = np.exp(x.astype("f8") - x.max()).sum()
    assert abs(rows[1][0] / exact - 1) < 1e-6


@pytest.mark.parametrize("kind", ["f2", "c8", "c16"])
def test_dtypes_without_expressions_run_on_blocks(kind: str) -> None:
    k = KernelBuilder(1)
    x = k.input(kind, (True,))
    k.output(k.call("multiply", k.call("add", x, x), x))
    kernel = k.build()
    assert not has_c(kernel)
    a = np.arange(100).astype(kind)
    out = np.empty_like(a)
    numpy_executor.run(kernel, a.shape, [a], [out])
    assert_same(out, (a + a) * a)


def test_floating_point_errors_are_those_of_numpy() -> None:
    k = KernelBuilder(1)
    x = k.input("f8", (True,))
    k.output(k.call("sqrt", k.call("divide", x, x)))
    k.output(k.call("log", x))
    zeros, outs = np.zeros(1000), [np.empty(1000), np.empty(1000)]
    with pytest.warns(RuntimeWarning) as seen:
        numpy_executor.run(k.build(), (1000,), [zeros], outs)
    said = sorted([str(w.message) for w in seen])
    assert said == ["divide by zero encountered in log", "invalid value encountered in divide"]
    with np.errstate(all="raise"), pytest.raises(FloatingPointError, match="in divide"):
        numpy_executor.run(k.build(), (1000,), [zeros], outs)
    with np.errstate(all="ignore"):
        numpy_executor.run(k.build(), (1000,), [zeros], outs)


def test_rows_are_added_as_numpy_adds_them() -> None:
    x = np.random.default_rng(5).normal(size=(64, 1000)).astype("f4")
    k = KernelBuilder(2, 1)
    v = k.input("f4", (True, True))
    d = k.call("subtract", v, k.reduce("mean", v))
    k.output(k.reduce("sum_of_squares", d), per_row=True)
    k.output(k.reduce("sum", k.call("exp", v)), per_row=True)
    kernel = k.build()
    outs = [np.empty(64, "f4") for _ in range(2)]
    assert numpy_executor.is_exact(kernel, x.shape, [x])
    assert not numpy_executor.is_exact(kernel, x.T.shape, [x.T])
    numpy_executor.run(kernel, x.shape, [x], outs)
    d = x - x.mean(1, keepdims=True)
    assert_same(outs[0], np.vecdot(d, d))
    assert_same(outs[1], np.exp(x).sum(1))


# -- values and errors -----------------------------------------------------------------------------


def test_kernels_are_values() -> None:
    assert softmax() == softmax()
    assert hash(softmax()) == hash(softmax())
    assert softmax() != softmax("f8")
    code = "import pickle, sys; k = pickle.load(sys.stdin.buffer); assert k in {eval(repr(k), vars(sys.modules[type(k).__module__]))}"
    output_of(new_process("-c", code, stdin=pickle.dumps(softmax())))
    assert "reduce max v0" in str(softmax())
    assert "f4 = astype v3" in str(layer_norm())


def test_equal_steps_are_one() -> None:
    k = KernelBuilder(1)
    x = k.input("f4", (True,))
    assert k.call("add", x, x) == k.call("add", x, x)


def test_python_scalars_stay_weak_in_steps_of_their_own() -> None:
    k = KernelBuilder(1)
    x, a, b = k.input("f4", (True,)), k.input(float), k.input(int)
    condition = k.call("greater", a, b)
    both = k.call("logical_and", condition, condition)
    assert k.dtype(k.call("multiply", x, k.call("add", both, a))) == "f4"
    assert k.dtype(k.call("multiply", x, condition)) == "f4"


def test_misuse_is_named() -> None:
    k = KernelBuilder(1)
    x = k.input("f4", (True,))
    with pytest.raises(ArgumentTypeError, match="bitwise_and"):
        k.call("bitwise_and", x, x)
    with pytest.raises(ArgumentTypeError, match="nothing"):
        k.call("nothing", x)
    with pytest.raises(ArgumentTypeError, match="datetime"):
        k.astype(x, "M8[s]")
    with pytest.raises(ArgumentError, match="at least one output"):
        k.build()
    k.output(k.call("exp", x))
    with pytest.raises(ArgumentError, match="before the first step"):
        k.input("f4")
    kernel, a = k.build(), np.zeros(5, "f4")
    with pytest.raises(ArgumentTypeError, match="v0"):
        numpy_executor.run(kernel, (5,), [a.astype("f8")], [a])
    with pytest.raises(ShapeError, match="broadcast"):
        numpy_executor.run(kernel, (4,), [a], [a[:4]])
    with pytest.raises(ShapeError, match="output"):
        numpy_executor.run(kernel, (5,), [a], [a[:4]])
    with pytest.raises(ArgumentTypeError, match="2 inputs"):
        numpy_executor.run(kernel, (5,), [a, a], [a])
