"""Reductions of large arrays on the simulated CuPy: every layout and group of dimensions, and bits that do not depend on either."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some
from shardtensor_cupy.kernels import large_reductions, large_ufuncs, reducing_functions, reduction_kernels
from shardtensor_cupy.kernels.reduction_kernels import Variant

import shardtensor as st
from tests.backends.test_cupy import Machine, launched, machine
from tests.backends.test_cupy_elementwise import LAYOUTS, laid_out
from tests.conftest import NO_GPU
from tests.draws import drawn
from tests.pairs import pairwise, spread

pytestmark = pytest.mark.skipif(not NO_GPU, reason="the double takes the place of CuPy")

SHAPES = (
    (), (1,), (700,), (0, 3), (3, 0), (1, 300), (300, 1), (3, 257), (7, 33), (40, 128), (9, 300, 5), (6, 4, 8),
    (2, 3, 5, 7), (2, 1, 40, 3), (5, 2100),
)  # fmt: skip
NAMES = ("sum", "mean", "var", "std", "max", "min")
SMALL = {"LEAST": 2, "_SHORTEST": 1, "_EACH": 1, "_CHUNKS": 3, "_CHUNKS_OF_COLUMNS": 3}


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Makes every array a large one, which is divided into a few chunks."""
    for name, value in SMALL.items():
        patch.setattr(large_reductions, name, value)
    patch.setattr(reducing_functions, "LEAST", 2)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    shrink(monkeypatch)
    with machine(1, devices=1) as made:
        yield made


def numbers(rng: Any, shape: tuple[int, ...], dtype: str) -> Any:
    if np.dtype(dtype).kind in "iub":
        return rng.integers(0, 2 if dtype == "?" else 100, shape).astype(dtype)
    return (rng.random(shape) + 0.5).astype(dtype)


def axes_of(data: Any, ndim: int) -> Any:
    one = some.integers(-ndim, ndim - 1) if ndim else some.none()
    several = some.sets(some.integers(0, max(ndim - 1, 0)), min_size=1, max_size=max(ndim, 1)).map(
        lambda found: tuple(sorted(found)) if ndim else None
    )
    return data.draw(some.one_of(some.none(), one, several))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@hypothesis.given(data=some.data())
@hypothesis.settings(max_examples=drawn(80), deadline=None)
def test_every_layout(data: Any) -> None:
    shape, dtype = data.draw(some.sampled_from(SHAPES)), data.draw(some.sampled_from(("f4", "f8", "f2", "i4", "?")))
    name, keepdims = data.draw(some.sampled_from(NAMES)), data.draw(some.booleans())
    axis, host = axes_of(data, len(shape)), numbers(np.random.default_rng(len(shape)), shape, dtype)
    if name in ("max", "min") and not host.size:
        return
    with machine(1, devices=1) as m, pytest.MonkeyPatch.context() as patch, m.backend.on(m.devices[0]):
        shrink(patch)
        x, host = laid_out(m.cupy, host, data.draw(some.sampled_from(LAYOUTS)))
        for _ in range(2):
            found = m.backend.to_host(getattr(m.backend.xp, name)(x, axis=axis, keepdims=keepdims), m.devices[0])
        with np.errstate(all="ignore"):
            wide = host.astype("f8") if host.dtype.kind == "f" else host
            wanted = np.asarray(getattr(wide, name)(axis=axis, keepdims=keepdims))
        wanted = wanted.astype(host.dtype) if host.dtype.kind == "f" else wanted
        tolerance = 3e-3 if dtype == "f2" else 2e-6
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance / 10)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)


def strided(cupy: Any, host: Any, kind: str) -> Any:
    """An array with the elements of a host array, of which the rows begin at other addresses and distances."""
    if kind == "whole":
        return cupy.asarray(host)
    made = cupy.empty((*host.shape[:-1], host.shape[-1] + 3), host.dtype)[..., 1:-2]
    made[...] = cupy.asarray(host)
    return made


REDUCED = (
    ((700,), None), ((3, 700), 1), ((40, 128), 0), ((300, 3), 0), ((5, 60, 8), 1), ((30, 24), None),
    ((4, 7, 9), (0, 2)),
)  # fmt: skip


@pytest.mark.parametrize(("name", "reduced", "dtype"), pairwise(("sum", "mean", "var"), REDUCED, ("f4", "f8")), ids=str)
def test_bits_depend_on_the_reduced_dimensions_only(name: str, reduced: Any, dtype: str, gpu: Machine) -> None:
    """A part has the same bits alone and beside others, whatever its strides and address are."""
    shape, axis = reduced
    host = numbers(np.random.default_rng(0), (3, *shape), dtype)
    axes = (axis,) if type(axis) is int else axis or tuple(range(len(shape)))
    with gpu.backend.on(gpu.devices[0]):
        found = [
            (part, getattr(gpu.backend.xp, name)(strided(gpu.cupy, host[part], kind), axis=axis))
            for part, kind in spread(itertools.product(range(3), ("whole", "strided")), 5)
        ]
        for kind in ("whole", "strided"):
            together = strided(gpu.cupy, host, kind)
            made = getattr(gpu.backend.xp, name)(together, axis=tuple([d + 1 for d in axes]))
            rows = gpu.backend.to_host(made, gpu.devices[0])
            for part, alone in found:
                np.testing.assert_array_equal(gpu.backend.to_host(alone, gpu.devices[0]), rows[part])


def test_what_runs_here(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy, xp = gpu.cupy, gpu.backend.xp
    with gpu.backend.on(gpu.devices[0]):
        x = cupy.ones((64, 40), "f4")
        names = launched(monkeypatch)

        def launches(function: Any, *args: Any, **kwargs: Any) -> list[str]:
            names.clear()
            function(*args, **kwargs)
            return list(names)

        launches(xp.sum, x)  # It fills the counters with zeros.
        assert launches(xp.sum, x) == ["shardtensor_sum_rows"]
        assert launches(xp.mean, x, axis=0) == ["shardtensor_sum_columns"]
        assert launches(xp.var, x, axis=1) == ["shardtensor_sum_rows", "shardtensor_squares_rows"]
        assert launches(xp.max, x, axis=0) == ["shardtensor_max_columns"]
        assert launches(xp.sum, x[:, :20]) == ["shardtensor_sum_rows"], "rows in pieces"
        assert launches(xp.sum, x[:, ::2]) == ["shardtensor_sum_rows"], "pieces of one element"
        assert launches(xp.sum, x[:, ::3]) == ["astype", "shardtensor_sum_rows"], "copied first"
        assert launches(xp.sum, x.reshape(64, 5, 8), axis=(0, 2)) == ["shardtensor_sum_rows", "shardtensor_sum_columns"]
        assert launches(xp.sum, x, dtype="f8") == ["shardtensor_sum_rows"]
        assert launches(xp.sum, x.astype("i4"))[-1] == "sum", "integers"
        assert launches(xp.sum, x.astype("c8"))[-1] == "sum", "complex numbers"
        assert launches(xp.sum, x, axis=()) == ["sum"]
        assert launches(xp.sum, cupy.broadcast_to(x[:1], (64, 40))) == ["sum"], "repeated elements"
        monkeypatch.setattr(large_reductions, "LEAST", x.size + 1)
        gpu.backend.xp._reductions._plans.clear()
        assert launches(xp.sum, x) == ["sum"], "few elements"


def test_extremes_are_nan(gpu: Machine) -> None:
    host = np.linspace(-9, 9, 800, dtype="f4").reshape(40, 20)
    host[3, 4] = np.nan
    host[:, 7] = -np.inf
    with gpu.backend.on(gpu.devices[0]):
        x = gpu.cupy.asarray(host)
        for name in ("max", "min"):
            for axis in (None, 0, 1):
                found = gpu.backend.to_host(getattr(gpu.backend.xp, name)(x, axis=axis), gpu.devices[0])
                np.testing.assert_array_equal(found, getattr(host, name)(axis=axis))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_variances_of_large_means(gpu: Machine) -> None:
    host = np.random.default_rng(0).standard_normal((70, 33)) + 1e8
    with gpu.backend.on(gpu.devices[0]):
        for axis, correction in ((None, 0), (0, 1), (1, 33), (1, 40)):
            made = gpu.backend.xp.var(gpu.cupy.asarray(host), axis=axis, correction=correction)
            with np.errstate(all="ignore"):
                wanted = host.var(axis=axis, ddof=correction)
            np.testing.assert_allclose(gpu.backend.to_host(made, gpu.devices[0]), wanted, rtol=1e-7)


def test_each_stream_has_counters(gpu: Machine) -> None:
    with gpu.backend.on(gpu.devices[0]):
        x, counters = gpu.cupy.ones((3000,), "f4"), gpu.backend.xp._reductions._counters
        gpu.backend.xp.sum(x)
        assert len(counters) == 1
        other = gpu.cupy.cuda.Stream()
        other.wait_event(gpu.backend.record(gpu.devices[0]))
        with other:
            assert float(gpu.backend.xp.sum(x)) == 3000
        assert len(counters) == 2
        gpu.backend.wait(gpu.devices[0], other.record(gpu.cupy.cuda.Event()))


def test_many_counters(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_reductions, "_COUNTERS", 1)
    host = np.random.default_rng(0).random((9, 3000)).astype("f4")
    with gpu.backend.on(gpu.devices[0]):
        for rows in (1, 9, 2):
            found = gpu.backend.to_host(gpu.backend.xp.sum(gpu.cupy.asarray(host[:rows]), axis=1), gpu.devices[0])
            np.testing.assert_allclose(found, host[:rows].sum(axis=1), rtol=1e-5)


SPLIT = (("d", None), (None, "d"), ("d", "e"))


@pytest.mark.parametrize(("name", "spec"), spread(itertools.product(("sum", "mean", "var"), SPLIT), 2))
def test_logical_devices_have_the_bits_of_gpus(
    name: str, spec: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over eight logical devices of one GPU are one launch, with the bits that eight GPUs have."""
    shrink(monkeypatch)
    host, found = np.random.default_rng(0).random((32, 1024)).astype("f4"), []
    for gpus in (1, 8):
        with machine(8, devices=gpus) as m, pytest.MonkeyPatch.context() as patch:
            shape, axes = ((8,), "d") if "e" not in spec else ((2, 4), "de")
            mesh = st.Mesh(np.array(m.devices, object).reshape(shape), tuple(axes))
            x = st.device_put(host, st.NamedSharding(mesh, st.P(*spec)))
            for axis in (None, 0, 1):
                counted = gpus == 1 and name == "sum" and "e" not in spec
                if counted:
                    getattr(x, name)(axis=axis)
                names = launched(patch)
                made = getattr(x, name)(axis=axis)
                if counted:
                    assert [n for n in names if n != "combined"] == [n for n in names if "shardtensor_sum" in n]
                    assert len(names) <= 2
                found.append(np.asarray(made))
                np.testing.assert_allclose(found[-1], getattr(host.astype("f8"), name)(axis=axis), rtol=1e-5)
    for one, eight in zip(found[:3], found[3:], strict=True):
        np.testing.assert_array_equal(one, eight)


def test_long_shards_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one block of CuPy's kernels would add too many elements."""
    monkeypatch.setattr("shardtensor.interpreters.execution.cell_reduction._TERMS", 8)
    shrink(monkeypatch)
    with machine(8, devices=1) as m:
        x = st.device_put(np.ones((64, 8), "f4"), st.NamedSharding(m.mesh(), st.P("d")))
        whole = st.device_put(np.ones((64, 8), "i4"), st.NamedSharding(m.mesh(), st.P("d")))
        float(x.sum())
        names = launched(monkeypatch)
        assert float(x.sum()) == 512
        assert names == ["shardtensor_sum_rows", "combined", "get"]
        assert int(whole.sum()) == 512


def test_a_thread_reads_at_most_16_bytes() -> None:
    for dtype in ("int8", "float16", "float32", "float64"):
        pack = min(reduction_kernels.PACK // np.dtype(dtype).itemsize, reduction_kernels.MOST)
        text = Variant("sum", dtype, "float64", "float64", pack, True, 0).text()
        assert f"aligned({pack * np.dtype(dtype).itemsize})" in text
        assert math.log2(pack).is_integer()


def test_where_of_large_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_ufuncs, "LARGE", 1)
    with machine(1, devices=1) as m, m.backend.on(m.devices[0]):
        cupy, xp = m.cupy, m.backend.xp
        host = np.arange(24.0, dtype="f4").reshape(4, 6)
        mask, x = host % 2 > 0, cupy.asarray(host)
        names = launched(monkeypatch)
        for args in ((x, x + 1), (x, 0), (2.5, x), (x, x[:1]), (x[:, :1], 7)):
            wanted = np.where(mask, *[cupy.asnumpy(a) if hasattr(a, "get") else a for a in args])
            names.clear()
            made = xp.where(cupy.asarray(mask), *args)
            assert names[-1].startswith("shardtensor_where")
            np.testing.assert_array_equal(cupy.asnumpy(made), wanted, strict=True)
        for args in ((x, x.astype("f8")), (x.astype("c8"), 0)):
            xp.where(cupy.asarray(mask), *args)
            assert names[-1] != "shardtensor_where"


@pytest.mark.parametrize("shape", [(64, 512), (3, 16384), (64, 4096)], ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "var"])
def test_transposed_tensors_have_the_bits_of_separate_gpus(name: str, shape: tuple[int, int]) -> None:
    host = np.random.default_rng(0).normal(size=shape).astype("f4")
    found = []
    for gpus in (1, 4):
        with machine(4, devices=gpus) as m:
            x = st.device_put(host, st.NamedSharding(m.mesh(), st.P(None, "d")))
            turned = st.permute_dims(x, (1, 0))
            found.append([np.asarray(getattr(st, name)(turned, axis=axis)) for axis in (0, 1, None)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
