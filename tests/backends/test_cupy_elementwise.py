"""Elementwise kernels of the CuPy backend, on the simulated CuPy: every layout of the operands, and ufuncs of large arrays."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some
from shardtensor_cupy.kernels import elementwise_kernel, large_ufuncs
from shardtensor_cupy.kernels.elementwise_kernel import ElementwiseKernel

import shardtensor as st
from tests import gpu_memory
from tests.backends.test_cupy import Machine, launched, machine
from tests.conftest import NO_GPU
from tests.draws import drawn

pytestmark = pytest.mark.skipif(not NO_GPU, reason="the double takes the place of CuPy")

DTYPES = ("i1", "u2", "i4", "f4", "f8", "i8", "u8", "?")
SHAPES = ((), (1,), (7,), (300,), (4, 8), (3, 5), (2, 3, 8), (5, 1, 4), (0, 3), (3, 1))
LAYOUTS = ("whole", "shifted", "columns", "reversed", "transposed", "every other row", "one row", "one column")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """One GPU, on which every array is a large one."""
    monkeypatch.setattr(large_ufuncs, "LARGE", 1)
    monkeypatch.setattr(elementwise_kernel, "_THREADS", 32)
    with machine(1, devices=1) as made:
        yield made


def laid_out(cupy: Any, host: Any, layout: str) -> tuple[Any, Any]:
    """An array of the GPU, and NumPy's with the same elements, in a layout; where it does not apply, in row-major order."""
    shape, dtype = host.shape, host.dtype
    made = cupy.empty(shape, dtype)
    if layout == "shifted" and host.size:
        made = cupy.empty((host.size + 1,), dtype)[1:].reshape(shape)
    elif layout == "columns" and shape:
        made = cupy.empty((*shape[:-1], shape[-1] + 3), dtype)[..., 1:-2]
    elif layout == "reversed" and shape:
        made = cupy.empty(shape, dtype)[..., ::-1]
    elif layout == "transposed" and len(shape) > 1:
        made = cupy.empty(shape[::-1], dtype).T
    elif layout == "every other row" and len(shape) > 1:
        made = cupy.empty((2 * shape[0], *shape[1:]), dtype)[::2]
    elif layout == "one row" and len(shape) > 1:
        host, made = host[:1], made[:1]
    elif layout == "one column" and shape:
        host, made = host[..., :1], made[..., :1]
    made[...] = cupy.asarray(np.ascontiguousarray(host).reshape(host.shape))
    return made, host


def numbers(rng: Any, shape: tuple[int, ...], dtype: str) -> Any:
    return rng.integers(0, 2 if dtype == "?" else 50, shape).astype(dtype)


@hypothesis.given(data=some.data())
@hypothesis.settings(max_examples=drawn(40), deadline=None)
def test_every_layout(data: Any) -> None:
    shape = data.draw(some.sampled_from(SHAPES))
    kinds = data.draw(some.lists(some.sampled_from(DTYPES), min_size=1, max_size=3))
    results = data.draw(some.lists(some.sampled_from(("f8", "i8", "i2")), min_size=1, max_size=2))
    rng = np.random.default_rng(data.draw(some.integers(0, 99)))
    with machine(1, devices=1) as m, m.backend.on(m.devices[0]):
        given = [laid_out(m.cupy, numbers(rng, shape, k), data.draw(some.sampled_from(LAYOUTS))) for k in kinds]
        number = data.draw(some.sampled_from([3, np.int64(5)]))
        outs = [laid_out(m.cupy, np.zeros(shape, k), data.draw(some.sampled_from(LAYOUTS[:6]))) for k in results]
        inputs = ", ".join([f"{np.dtype(k).name} x{j}" for j, k in enumerate(kinds)]) + ", int64 n"
        total = " + ".join([f"x{j}" for j in range(len(kinds))])
        kernel = ElementwiseKernel(
            m.cupy, inputs, ", ".join([f"{np.dtype(k).name} y{j}" for j, k in enumerate(results)]),
            "\n".join([f"y{j} = ({total}) * n + {j} + 2 * (long long)i;" for j in range(len(results))]), "test", "", (),
        )  # fmt: skip
        for _ in range(2):
            kernel(*[x for x, _ in given], number, *[out for out, _ in outs])
        at = 2 * np.arange(np.prod(shape, dtype=int)).reshape(shape)
        wanted = sum([x.astype("i8") for _, x in given]) * number
        for j, (out, host) in enumerate(outs):
            found = m.backend.to_host(out, m.devices[0])
            np.testing.assert_array_equal(
                found, (np.broadcast_to(wanted, shape) + j + at).astype(host.dtype), strict=True
            )


def test_packs_have_16_bytes_of_the_widest_array(gpu: Machine) -> None:
    cupy = gpu.cupy
    with gpu.backend.on(gpu.devices[0]):
        x, y = cupy.zeros((4, 8), "f4"), cupy.zeros((4, 8), "f8")

        def pack(*arrays: Any) -> tuple[int, int]:
            parameters = [elementwise_kernel._Parameter(a.dtype, "x") for a in arrays]
            layout = elementwise_kernel._Layout(parameters, arrays, [True] * len(arrays))
            return layout.pack, layout.ndim

        assert pack(x, x) == (4, 0)
        assert pack(x, y) == (2, 0)
        assert pack(x.astype("?"), x.astype("i1")) == (8, 0)
        assert pack(x[:, :4], x[:, :4]) == (4, 2)
        assert pack(x[:1], x) == (4, 2)
        assert pack(x[:, :1], x) == (4, 2), "one column repeats along the rows"
        assert pack(x.reshape(-1)[1:], x.reshape(-1)[1:]) == (0, 1), "not aligned"
        assert pack(x[:, :3], x[:, :3]) == (0, 2), "rows are no whole packs"
        assert pack(x[:, ::2], x[:, ::2]) == (0, 1)
        assert pack(*[x] * 60)[0] == 2


@hypothesis.given(data=some.data())
@hypothesis.settings(max_examples=drawn(40), deadline=None)
def test_large_arrays_have_the_results_of_small_ones(data: Any) -> None:
    name = data.draw(
        some.sampled_from(["add", "subtract", "multiply", "divide", "sqrt", "square", "less", "equal", "exp"])
    )
    shape = data.draw(some.sampled_from(SHAPES[1:]))
    rng = np.random.default_rng(data.draw(some.integers(0, 99)))
    with machine(1, devices=1) as m, pytest.MonkeyPatch.context() as patch, m.backend.on(m.devices[0]):
        args, layouts = [], []
        for _ in range(getattr(m.cupy, name).nin):
            if args and data.draw(some.booleans()):
                args.append(data.draw(some.sampled_from([2, 2.5, -1, 300, True, 2**40, 2**70])))
            else:
                layouts.append(data.draw(some.sampled_from(LAYOUTS)))
                args.append(laid_out(m.cupy, numbers(rng, shape, data.draw(some.sampled_from(DTYPES))), layouts[-1])[0])
        function = getattr(m.backend.xp, name)
        results = []
        for least in (1 << 60, 1):
            patch.setattr(large_ufuncs, "LARGE", least)
            with np.errstate(all="ignore"):
                try:
                    results.append(m.backend.to_host(function(*args), m.devices[0]))
                except (OverflowError, TypeError) as error:
                    results.append(type(error))
        np.testing.assert_array_equal(*results, strict=isinstance(results[0], np.ndarray))


def test_which_calls_are_own_kernels(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy, xp = gpu.cupy, gpu.backend.xp
    with gpu.backend.on(gpu.devices[0]):
        x, n, z = cupy.ones((4, 8), "f4"), cupy.ones((4, 8), "i4"), cupy.ones((4, 8), "c8")
        names = launched(monkeypatch)

        def launches(function: Any, *args: Any, **kwargs: Any) -> list[str]:
            names.clear()
            function(*args, **kwargs)
            return list(names)

        for args in ((x, x), (x, 2), (x, 2.5), (n, n), (n, 3), (x[:1], x), (x, x[:, :1]), (x[1:, 1:], x[1:, 1:])):
            assert launches(xp.add, *args) == ["shardtensor_add"]
        assert launches(xp.add, x, n) == ["shardtensor_add"], "converts as CuPy does"
        assert launches(xp.add, z, z) == ["add"], "C has no complex numbers"
        assert launches(xp.add, n, 2.5) == ["add"], "a Python float beside integers"
        assert launches(xp.add, x, x, out=x) == ["shardtensor_add"]
        assert launches(xp.add, x[:2], x[:2], out=x[2:]) == ["shardtensor_add"]
        assert launches(xp.add, x[:2], 1, out=x[1:3]) == ["add"], "the output overlaps with the operand"
        assert launches(xp.add, x[:, ::-1], 1, out=x) == ["add"]
        assert launches(xp.add, x, x, out=x.astype("f8"))[-1] == "add"
        monkeypatch.setattr(large_ufuncs, "LARGE", 1 << 20)
        assert launches(xp.add, x, x) == ["add"]


def test_results_are_laid_out_as_cupys(gpu: Machine) -> None:
    with gpu.backend.on(gpu.devices[0]):
        x = gpu.cupy.ones((8, 4), "f4").T
        assert gpu.backend.xp.add(x, 1).flags.f_contiguous
        assert gpu.backend.xp.add(x, gpu.cupy.ones((4, 8), "f4")).flags.c_contiguous


def test_operands_in_column_major_order_broadcast_by_their_last_dimensions(gpu: Machine) -> None:
    with gpu.backend.on(gpu.devices[0]):
        host, other = np.arange(12.0).reshape(3, 4), np.arange(36.0).reshape(3, 4, 3) - 5
        x, y = gpu.cupy.asarray(host).T, gpu.cupy.asarray(other).transpose(2, 1, 0)
        xp, read = gpu.backend.xp, gpu.cupy.asnumpy
        for a, b in ((x, y), (y, x)):
            np.testing.assert_array_equal(read(xp.add(a, b)), read(a) + read(b))
        np.testing.assert_array_equal(read(xp.where(x > 3, y, 2.0)), np.where(host.T > 3, read(y), 2.0))


def test_arguments_of_large_arrays_are_checked(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    xp = gpu.backend.xp
    with gpu.backend.on(gpu.devices[0]):
        x = gpu.cupy.ones((4, 8))
        with pytest.raises(ValueError, match="copy"):
            xp.asarray(x, dtype=np.float32, copy=False)
        monkeypatch.setattr("shardtensor_cupy.kernels.ordering_functions.LONG", 1)
        for function in (xp.cumsum, xp.cumprod):
            with pytest.raises(np.exceptions.AxisError):
                function(x, axis=2)
        with pytest.raises(np.exceptions.AxisError):
            xp.sort(x, axis=5)


def test_the_program_for_the_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_ufuncs, "LARGE", large_ufuncs.LARGE)  # which the program changes
    monkeypatch.setattr(importlib.import_module("cupy").cuda, "set_allocator", lambda allocator: None, raising=False)
    gpu_memory.check()


@pytest.mark.parametrize("count", [1, 8])
def test_tensors_use_them(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_ufuncs, "LARGE", 16)
    host = np.arange(64.0).reshape(16, 4)
    with machine(count, devices=1) as m:
        x = st.device_put(host, st.NamedSharding(m.mesh(), st.P("d")))
        names = launched(monkeypatch)
        y = x * x + 3
        x -= y[:1]
        assert names == ["shardtensor_multiply", "shardtensor_add", "shardtensor_subtract"]
        np.testing.assert_array_equal(np.asarray(y), host * host + 3)
        np.testing.assert_array_equal(np.asarray(x), host - (host * host + 3)[:1])
