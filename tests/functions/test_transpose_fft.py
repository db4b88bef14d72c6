"""Transforms of long lines that are split over devices: by transpositions, without gathering them."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.core import OPS
from shardtensor.functions.fft import chirp_fft, transpose_fft
from shardtensor.host import fourier
from tests.draws import drawn
from tests.layouts import READ_ONLY, array, assert_same, everywhere, mesh_of

NAMES = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]
SPECS: list[tuple[tuple[int, ...], Any]] = [((4,), ("x",)), ((2, 3), ("x", "y")), ((2, 3), ("y",)), ((3,), ("x",))]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets lines of 80 elements stay split."""
    monkeypatch.setattr(transpose_fft, "_GATHERED", 16)


def transformed(data: Any, name: str, backend: str) -> None:
    kinds = ["bool", "int16", "float32", "float64"] + ["complex64", "complex128"] * (name not in ("rfft", "ihfft"))
    kinds += ["longdouble"] * (backend in READ_ONLY)
    size = data.draw(some.sampled_from([78, 81, 84, 97, 98, 100, 101, 128, 146, 225, 256]))
    host = array((size,), data.draw(some.sampled_from(kinds)), data.draw(some.integers(0, 9)))
    counts, chain = data.draw(some.sampled_from(SPECS))
    spec, axis = (chain,), 0
    if data.draw(some.booleans()):
        host, spec, axis = np.stack([host, host[::-1]], 1), (chain, None), data.draw(some.sampled_from([0, -2]))
        if data.draw(some.booleans()):
            host, spec, axis = np.swapaxes(host, 0, 1).copy(), (None, chain), -1
    if host.dtype.kind in "fc" and backend in READ_ONLY and data.draw(some.integers(0, 5)) == 0:
        host.flat[size // 3] = np.nan
    n = data.draw(some.sampled_from([None, size + 31, size - 2, 5]))
    norm = data.draw(some.sampled_from(["backward", "ortho", "forward", None]))
    x = st.device_put(host, st.NamedSharding(mesh_of(counts, backend), st.P(*spec)))
    found, wanted = [getattr(where.fft, name) for where in (st, np)]
    result = found(x, n, axis, norm)
    with np.errstate(all="ignore"):
        expected, elements = wanted(host, n, axis, norm), np.asarray(result)
    # Every element of the transform of a line with NaN is NaN, of which NumPy's transforms of even sizes leave some out.
    has_nan = np.isnan(expected).any(axis=axis, keepdims=True)
    assert_same(result, np.where(has_nan & np.isnan(elements), elements, expected))
    inferred = st.eval_shape(lambda x: found(x, n, axis, norm), x)
    assert (inferred.shape, inferred.dtype, inferred.sharding) == (result.shape, result.dtype, result.sharding)
    if n != 5:
        assert result.sharding == x.sharding


@everywhere
@pytest.mark.usefixtures("short")
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", NAMES)
def test_split_lines_match_numpy(name: str, backend: str) -> None:
    run = hypothesis.given(some.data())(lambda data: transformed(data, name, backend))
    hypothesis.settings(max_examples=4, deadline=None)(run)()


@pytest.mark.full
@pytest.mark.usefixtures("short")
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", NAMES)
def test_split_lines_match_numpy_at_length(name: str, backend: str) -> None:
    run = hypothesis.given(some.data())(lambda data: transformed(data, name, backend))
    hypothesis.settings(max_examples=drawn(150), deadline=None)(run)()


def parts(size: int, count: int) -> list[int]:
    return [size // count + (k < size % count) for k in range(count)]


@everywhere
@pytest.mark.parametrize(("count", "n"), [(2, 1 << 15), (3, 144 * 150), (4, 132 * 128), (8, 1 << 15)])
def test_bytes_of_a_split_line(count: int, n: int, backend: str) -> None:
    """Three all-to-alls, of which each device keeps what is in its part before and after; see the module."""
    x = st.device_put(array((n,), "complex64", 1), mesh_of((count,), backend))
    with st.transfers() as log:
        st.fft.fft(x)
    n1 = transpose_fft._factor(n)
    n2 = n // n1
    assert n1 % count == n2 % count == 0
    stays = sum(r * c for r, c in zip(parts(n1, count), parts(n2, count), strict=True))
    assert log.bytes == 3 * 8 * (n - stays) == 3 * 8 * n * (count - 1) // count


@pytest.mark.parametrize("count", [256, pytest.param(1024, marks=pytest.mark.full)])
def test_bytes_on_simulated_devices(count: int) -> None:
    x = st.zeros((1 << 24,), dtype="complex64", device=st.AbstractMesh((count,), ("x",)))
    with st.transfers() as log:
        y = st.fft.fft(x)
    assert y.sharding == x.sharding
    assert log.bytes == 3 * 8 * (1 << 24) * (count - 1) // count
    with st.transfers() as log:
        y = st.fft.rfft(st.zeros((1 << 24,), dtype="float32", device=x.sharding.mesh))
    assert y.sharding == x.sharding
    assert log.bytes < 2.1 * 8 * (1 << 24)


def owners(size: int, count: int) -> Any:
    """Returns the device of each element of a split line."""
    return np.repeat(np.arange(count), parts(size, count))


def bytes_of_convolution(n: int, count: int, itemsize: int) -> int:
    """Returns the formula of the module: the transforms, and the elements that are cut, padded and joined."""
    number, size = chirp_fft._division(2 * n - 1, count)
    rows = transpose_fft._factor(size)
    assert rows % count == size // rows % count == 0
    line, wanted, moved = owners(n, count), owners(size, count), 0
    for begin in range(0, n, size):
        length = min(size, n - begin)
        piece, lacking = owners(length, count), owners(size - length, count)
        moved += 2 * int((line[begin : begin + length] != piece).sum())
        if length < size:
            moved += 2 * int((wanted[:length] != piece).sum()) + int((wanted[length:] != lacking).sum())
    return itemsize * (moved + 3 * number * 3 * size * (count - 1) // count)


@everywhere
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("count", [2, 4, 8])
def test_bytes_of_a_line_whose_size_has_no_factors(count: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chirp_fft, "PIECE", 700)
    host = array((1129,), "complex128", 1)
    x = st.device_put(host, mesh_of((count,), backend))
    with st.transfers() as log:
        y = st.fft.fft(x)
    assert_same(y, np.fft.fft(host))
    assert log.bytes == bytes_of_convolution(1129, count, 16)


def test_bytes_of_a_line_without_factors_on_1024_simulated_devices() -> None:
    n = 3 * (1 << 20) - 7  # A prime.
    x = st.zeros((n,), dtype="complex64", device=st.AbstractMesh((1024,), ("x",)))
    assert st.simulate(st.fft.fft, x).bytes == bytes_of_convolution(n, 1024, 8)


@everywhere
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", NAMES)
def test_lines_are_convolved_in_parts(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chirp_fft, "PIECE", 70)
    kind = "float32" if name in ("rfft", "ihfft") else "complex64"
    host = np.stack([array((101,), kind, 1), array((101,), kind, 2)])
    x = st.device_put(host, st.NamedSharding(mesh_of((3,), backend), st.P(None, "x")))
    n = 199 if name in ("irfft", "hfft") else 101
    found = getattr(st.fft, name)(x, n)
    assert_same(found, getattr(np.fft, name)(host, n))
    assert found.sharding == x.sharding


def test_dtypes_are_found_without_transforms_of_empty_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's irfft of an empty array reads uninitialized memory, and warns if that contains a NaN."""
    sizes, transform = [], np.fft.irfft
    monkeypatch.setattr(np.fft, "irfft", lambda a, n: sizes.append(a.size) or transform(a, n))
    assert OPS["irfft"].dtype(np.empty(0, "complex64")).dtype == "float32"
    assert 0 not in sizes
    assert sizes


@everywhere
def test_one_long_line_is_accurate(backend: str) -> None:
    """The error grows as that of NumPy's transform: a few units in the last place."""
    n = 3 * 5 * 7 * (1 << 8)
    host = array((n,), "complex128", 1)
    x = st.device_put(host, mesh_of((4,), backend))
    with np.errstate(all="ignore"):
        wanted = np.fft.fft(host.astype("clongdouble"))
        error = np.abs(np.asarray(st.fft.fft(x)) - wanted).max() / np.abs(wanted).max()
        back = np.abs(np.asarray(st.fft.ifft(st.fft.fft(x))) - host).max() / np.abs(host).max()
    assert error < 8 * np.finfo("float64").eps
    assert back < 16 * np.finfo("float64").eps


@everywhere
def test_lines_that_another_dimension_can_split_move_once(backend: str) -> None:
    host = array((1 << 15, 4), "complex64", 1)
    x = st.device_put(host, st.NamedSharding(mesh_of((4,), backend), st.P("x")))
    with st.transfers() as log:
        y = st.fft.fft(x, axis=0)
    assert y.sharding.spec == st.P(None, "x")
    assert log.bytes == 3 * x.nbytes // 4
    grid = mesh_of((2, 2), backend)
    z = st.fft.fft(st.device_put(host.T.copy(), st.NamedSharding(grid, st.P(None, ("x", "y")))))
    assert math.prod(z.addressable_shards[0].data.shape) == host.size // 4


@everywhere
def test_errors_of_split_lines(backend: str) -> None:
    x = st.device_put(np.ones(1 << 15), mesh_of((2,), backend))
    with pytest.raises(st.ArgumentTypeError, match=r"^rfft: does not take complex128"):
        st.fft.rfft(x * 1j)
    with pytest.raises(st.ArgumentError, match=r"^fft: norm is 'no'"):
        st.fft.fft(x, norm="no")
    with pytest.raises(st.ArgumentError, match=r"^irfft: n is 0"):
        st.fft.irfft(x, 0)


@pytest.mark.parametrize("name", NAMES)
def test_numpy_transforms_in_threads_where_scipy_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "float32" if name in ("rfft", "ihfft") else "complex64"
    for shape, axis in (((300, 130), 0), ((300, 130), 1), ((40, 41, 30), 1), ((1 << 16,), 0)):
        host = array(shape, kind, 1)
        wanted = getattr(np.fft, name)(host, axis=axis)
        for library in (fourier.scipy_fft(), None):
            monkeypatch.setattr(fourier, "scipy_fft", lambda library=library: library)
            found = fourier.transform(name, host, wanted.shape, wanted.dtype, axis=axis, norm=None)
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)
            assert found.dtype == wanted.dtype


def test_transpositions_in_threads() -> None:
    for shape in ((300, 700), (3, 513, 257), (5, 7)):
        host = array(shape, "complex64", 1)
        np.testing.assert_array_equal(fourier.transposed(host), np.swapaxes(host, -1, -2))
