"""Kernels in CUDA give what NumPy's functions give, on the double of CuPy, whose threads are the host's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from shardtensor.errors import ArgumentTypeError
from shardtensor.interpreters.jit.c.compiler import find_compiler
from shardtensor.interpreters.jit.cuda import cuda_executor
from shardtensor.interpreters.jit.cuda.cuda_executor import CudaKernel, fits
from shardtensor.interpreters.jit.cuda.cuda_source import cuda_source, has_cuda, row_source
from shardtensor.interpreters.jit.kernels.expressions import EXPRESSIONS
from shardtensor.interpreters.jit.kernels.kernel import Kernel, KernelBuilder
from tests.backends.test_cupy import Machine, machine
from tests.conftest import NO_GPU
from tests.interpreters.jit.random_kernels import (
    EXACT,
    Case,
    assert_same,
    random_case,
    reference,
    special,
    spread_kernel,
)
from tests.interpreters.jit.test_kernels import softmax

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not NO_GPU, reason="the double takes the place of CuPy"),
    pytest.mark.skipif(find_compiler() is None, reason="no C compiler"),
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """One GPU. Blocks are small, since the double changes from thread to thread at each barrier."""
    monkeypatch.setattr(cuda_executor, "_BLOCK", 32)
    with machine(1, devices=1) as made:
        yield made


def on_gpu(made: Machine, x: Any, turn: int) -> Any:
    """An array of the GPU with the elements of one of NumPy's, in one of several memory layouts. Numbers are left."""
    if not isinstance(x, np.ndarray):
        return x
    cupy = made.backend._cupy
    if turn % 3 == 0 or not x.ndim:
        return cupy.asarray(x)
    if turn % 3 == 1:
        return cupy.asarray(x.T.copy()).T
    wide = cupy.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)
    wide[..., ::-2] = cupy.asarray(np.ascontiguousarray(x))
    return wide[..., ::-2]


def run(made: Machine, kernel: Kernel, shape: Sequence[int], inputs: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """What a kernel writes."""
    (device,) = made.backend.devices()
    with made.backend.on(device):
        arrays = [on_gpu(made, x, k + len(shape)) for k, x in enumerate(inputs)]
        targets = [on_gpu(made, out, k) for k, out in enumerate(outs)]
        CudaKernel(kernel, made.backend).run(tuple(shape), arrays, targets)
        return [made.backend.to_host(out, device) for out in targets]


def check_on_gpu(made: Machine, case: Case) -> None:
    for out, wanted in zip(
        run(made, case.kernel, case.shape, case.inputs, case.outputs()), reference(case), strict=True
    ):
        assert_same(out, wanted, case)


CASES = [case for case in map(random_case, range(60)) if has_cuda(case.kernel)]


@pytest.mark.parametrize("number", range(8))
def test_random_kernels_equal_numpy(number: int, gpu: Machine) -> None:
    check_on_gpu(gpu, CASES[number])


@pytest.mark.full
@pytest.mark.parametrize("segment", [8, 1 << 13], ids=["divided rows", "whole rows"])
@pytest.mark.parametrize("chunk", range(20))
def test_many_random_kernels_equal_numpy(
    chunk: int, segment: int, monkeypatch: pytest.MonkeyPatch, gpu: Machine
) -> None:
    monkeypatch.setattr(cuda_executor, "SEGMENT", segment)
    for case in map(random_case, range(100 + 20 * chunk, 120 + 20 * chunk)):
        if has_cuda(case.kernel):
            check_on_gpu(gpu, case)


@pytest.mark.parametrize("shape", [(1, 600), (3, 300), (40, 7), (700, 2)], ids=str)
@pytest.mark.parametrize("segment", [64, 1 << 13], ids=["divided rows", "whole rows"])
def test_rows(shape: tuple[int, int], segment: int, monkeypatch: pytest.MonkeyPatch, gpu: Machine) -> None:
    monkeypatch.setattr(cuda_executor, "SEGMENT", segment)
    x = np.random.default_rng(0).normal(size=shape).astype("f4")
    (made,) = run(gpu, softmax(), shape, [x], [np.empty_like(x)])
    e = np.exp(x - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(made, e / e.sum(axis=1, keepdims=True), rtol=1e-5)
    sums, deviations = run(gpu, spread_kernel("f8"), shape, [x.astype("f8")], [np.empty(shape[0]), np.empty(shape)])
    wide = 2.0 * x.astype("f8")
    np.testing.assert_allclose(sums, np.var(wide, axis=1) * shape[1], rtol=1e-12)
    np.testing.assert_allclose(deviations, (wide - wide.mean(axis=1, keepdims=True)) / sums[:, None], rtol=1e-9)


@pytest.mark.parametrize("dtype", ["f4", pytest.param("f8", marks=pytest.mark.full)])
def test_extrema_and_sums_of_special_numbers(dtype: str, gpu: Machine) -> None:
    k = KernelBuilder(2, 1)
    x = k.input(dtype, (True, True))
    for name in ("max", "min", "sum", "prod", "any", "all"):
        k.output(k.reduce(name, x), per_row=True)
    rows = np.array([[np.nan, 1, 2], [0.0, -0.0, 0], [np.inf, 1, -1], [-np.inf, np.inf, 0], [1, 2, 3]], dtype)
    case = Case(k.build(), rows.shape, [rows])
    for out, wanted in zip(
        run(gpu, case.kernel, case.shape, case.inputs, case.outputs()), reference(case), strict=True
    ):
        assert_same(out + out.dtype.type(0), wanted + wanted.dtype.type(0))  # A maximum of zeros may have either sign.


def launches_of(made: Machine) -> list[str]:
    """Returns a list to which the names of functions that are launched from now on are added."""
    launched: list[str] = []
    raw, elementwise = made.backend.raw_kernel, made.backend.elementwise_kernel
    made.backend.raw_kernel = lambda text, name: counted(raw(text, name), name)  # type: ignore[method-assign]
    made.backend.elementwise_kernel = lambda *a, **k: counted(elementwise(*a, **k), "elements")  # type: ignore[method-assign]

    def counted(function: Any, name: str) -> Any:
        return lambda *args: (launched.append(name), function(*args))[1]

    return launched


def test_one_launch_for_rows_and_elements(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launches_of(gpu)
    x = np.ones((50, 40), "f4")
    run(gpu, softmax(), x.shape, [x], [np.empty_like(x)])
    k = KernelBuilder(2)
    v = k.input("f4", (True, True))
    k.output(k.call("exp", k.call("add", v, v)))
    run(gpu, k.build(), x.shape, [x], [np.empty_like(x)])
    assert launched == ["rows", "elements"]
    monkeypatch.setattr(cuda_executor, "SEGMENT", 64)
    long = np.ones((1, 200), "f4")
    run(gpu, softmax(), long.shape, [long], [np.empty_like(long)])
    assert launched[2:] == ["part_0", "join_0", "part_1", "join_1", "finish"]


def variance_kernel(dtype: str, name: str = "positive") -> Kernel:
    """Returns a kernel whose result is the sum of the squares of the differences of a function of x from its means."""
    k = KernelBuilder(2, 1)
    x = k.call(name, k.input(dtype, (True, True)))
    k.output(k.reduce("sum_of_squares", k.call("subtract", x, k.reduce("mean", x))), per_row=True)
    return k.build()


@pytest.mark.parametrize("name", ["positive", "exp"])
def test_a_variance_reads_its_operand_once(name: str, monkeypatch: pytest.MonkeyPatch, gpu: Machine) -> None:
    source = row_source(variance_kernel("f4", name), 1, 1, frozenset())
    for text in (source.whole, source.divided):
        assert text.count("(q0") == 1  # The address of the row, from which a thread reads an element.
    assert source.stages == 1
    results = row_source(spread_kernel("f4"), 1, 1, frozenset())  # The results for each element read it again.
    assert results.whole.count("(q0") == results.divided.count("(q0") == 2
    monkeypatch.setattr(cuda_executor, "SEGMENT", 64)
    x = np.random.default_rng(0).normal(size=(1, 200))
    launched = launches_of(gpu)
    run(gpu, variance_kernel("f8", name), x.shape, [x], [np.empty(1)])
    assert launched == ["part_0", "join_0"]


def lines_of_numbers(n: int) -> dict[str, np.ndarray[Any, Any]]:
    """Returns numbers whose variances lose digits if squares are added relative to a number that is not near them."""
    normal, at = np.random.default_rng(0).normal(size=n), np.arange(n)
    return {
        "normal": normal,
        "far from zero": normal + 1000,
        "zeros before": np.where(at < 40, 0, normal + 1000),
        "an outlier at first": np.where(at < 1, 1e6, normal),
        "growing": np.exp2(at / (n / 40)),
        "shrinking": np.exp2(-at / (n / 40)),
        "large": (normal + 1) * 1e16,
    }


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("segment", [64, 1 << 13], ids=["divided rows", "whole rows"])
@pytest.mark.parametrize("n", [2, 33, 5000])
def test_variances_are_accurate(
    n: int, segment: int, dtype: str, monkeypatch: pytest.MonkeyPatch, gpu: Machine
) -> None:
    monkeypatch.setattr(cuda_executor, "SEGMENT", segment)
    kernel, info = variance_kernel(dtype), np.finfo(dtype)
    for name, numbers in lines_of_numbers(n).items():
        x = numbers.astype(dtype)[None]
        (made,) = run(gpu, kernel, x.shape, [x], [np.empty(1, dtype)])
        exact = x.astype(np.longdouble)
        exact -= exact.mean(axis=1, keepdims=True)
        wanted = (exact * exact).sum()
        np.testing.assert_allclose(made, wanted, rtol=100 * float(info.eps), err_msg=name)
    x = np.stack([np.full(n, number, dtype) for number in (0.0, 3.0, 2.0**100, np.inf, np.nan)])
    (made,) = run(gpu, kernel, x.shape, [x], [np.empty(len(x), dtype)])
    np.testing.assert_array_equal(made, [0, 0, 0, np.nan, np.nan])


def test_the_table_says_what_cuda_has() -> None:
    def kernel(name: str, dtype: str) -> Kernel:
        k = KernelBuilder(1)
        x = k.input(dtype, (True,))
        k.output(k.call(name, x, x))
        return k.build()

    assert has_cuda(kernel("remainder", "i4"))
    assert not has_cuda(kernel("remainder", "f4"))  # CuPy's differs from NumPy's.
    assert not has_cuda(kernel("add", "f2"))
    assert "v1 = v0 + v0" in cuda_source(kernel("add", "f4"))
    assert "__syncthreads" in cuda_source(softmax())
    assert fits(kernel("add", "f4"))


def test_parameters_of_a_launch_are_limited(gpu: Machine) -> None:
    k = KernelBuilder(4)
    inputs = [k.input("f4", (True,) * 4) for _ in range(60)]
    total = inputs[0]
    for x in inputs[1:]:
        total = k.call("add", total, x)
    k.output(total)
    assert not fits(k.build())


def table_kernel(dtype: str) -> tuple[Kernel, list[str]]:
    """Every function that has an expression in CUDA for a dtype, and their names."""
    k = KernelBuilder(1)
    operands = [k.input(dtype, (True,)) for _ in range(2)]
    names = []
    for name in sorted(set(EXPRESSIONS) - {"where", "astype", "clip", "clip_to_scalars"}):
        alone, nin = KernelBuilder(1), getattr(np, name).nin
        given = [alone.input(dtype, (True,)) for _ in range(2)]
        try:
            alone.output(alone.call(name, *given[:nin]))
        except ArgumentTypeError:
            continue
        if has_cuda(alone.build()):
            k.output(k.call(name, *operands[:nin]))
            names.append(name)
    return k.build(), names


@pytest.mark.parametrize(
    "dtype", ["f4", *[pytest.param(d, marks=pytest.mark.full) for d in ("f8", "i1", "u4", "i8", "b1")]]
)
def test_all_functions(dtype: str, gpu: Machine) -> None:
    kernel, names = table_kernel(dtype)
    assert len(names) >= 15
    rng = np.random.default_rng(0)
    case = Case(kernel, (97,), [special(dtype, 97, rng) for _ in range(2)])
    for name, out, wanted in zip(
        names, run(gpu, kernel, (97,), case.inputs, case.outputs()), reference(case), strict=True
    ):
        if name in EXACT:
            assert_same(out, wanted, name)
        else:
            np.testing.assert_allclose(out, wanted, rtol=1e-5 if out.dtype == np.float32 else 1e-13, err_msg=name)
