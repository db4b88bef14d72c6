"""`st.fft` against NumPy: transforms of several dimensions, frequencies, shifts, layouts and errors."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
import shardtensor.fft
from tests.draws import drawn
from tests.layouts import READ_ONLY, array, assert_same, everywhere, mesh_of, meshes, placed

fft = shardtensor.fft
ALL = ["fftn", "ifftn", "rfftn", "irfftn"]


def transformed(data: Any, name: str, backend: str, sides: Any = (1, 2, 3, 5, 8)) -> None:
    kinds = ["bool", "int32", "float32", "float64"] + ["complex64", "complex128"] * (name != "rfftn")
    shape = tuple(data.draw(some.lists(some.sampled_from(sides), min_size=1, max_size=4)))
    host = array(shape, data.draw(some.sampled_from(kinds)), 1)
    # Libraries differ in the elements that are NaN, too.
    if backend in READ_ONLY and host.dtype.kind in "fc" and data.draw(some.integers(0, 5)) == 0:
        host.flat[data.draw(some.integers(0, host.size - 1))] = np.nan
    axes = s = None
    if data.draw(some.booleans()):
        axes = data.draw(
            some.lists(
                some.integers(-host.ndim, host.ndim - 1), min_size=1, max_size=3, unique_by=lambda a: a % host.ndim
            )
        )
        s = data.draw(some.sampled_from([None, [data.draw(some.sampled_from([1, 2, 4, 7, -1])) for _ in axes]]))
    norm = data.draw(some.sampled_from(["backward", "ortho", "forward", None]))
    x = placed(data, host, backend, data.draw(meshes(backend)))
    try:
        wanted = getattr(np.fft, name)(host, s, axes, norm)
    except ValueError:  # The inverse transform of one element has none.
        with pytest.raises(ValueError, match="wanted at least 1"):
            getattr(fft, name)(x, s, axes, norm)
        return
    found = getattr(fft, name)(x, s, axes, norm)
    # NaN spreads to all elements that depend on it, of which NumPy's real transforms leave some out.
    along, elements = tuple(range(host.ndim)) if axes is None else tuple(axes), np.asarray(found)
    has_nan = np.isnan(wanted).any(axis=along, keepdims=True)
    wanted = np.where(has_nan & np.isnan(elements), elements, wanted)
    # The rounding errors of each element are those of the largest one of the same transform.
    scale = np.abs(wanted).max(axis=along, keepdims=True, initial=0, where=np.isfinite(wanted))
    scale = np.where(scale > 0, scale, 1).astype(elements.real.dtype)
    assert_same(found / scale, wanted / scale)
    inferred = st.eval_shape(lambda x: getattr(fft, name)(x, s, axes, norm), x)
    assert (inferred.shape, inferred.dtype, inferred.sharding) == (found.shape, found.dtype, found.sharding)


@everywhere
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALL)
def test_transforms_of_several_dimensions_match_numpy(name: str, backend: str) -> None:
    hypothesis.settings(max_examples=drawn(12))(
        hypothesis.given(some.data())(lambda data: transformed(data, name, backend))
    )()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALL)
def test_transforms_of_several_dimensions_match_numpy_at_length(name: str, backend: str) -> None:
    run = hypothesis.given(some.data())(lambda data: transformed(data, name, backend, (1, 2, 7, 16, 40)))
    hypothesis.settings(max_examples=drawn(200), deadline=None)(run)()


@everywhere
def test_a_matrix_is_never_gathered(backend: str) -> None:
    """The transform of a matrix that is split along one dimension moves the split once: an all-to-all."""
    mesh = mesh_of((4,), backend)
    host = array((8, 12), "float64", 1)
    for spec, after in ((st.P("x"), st.P(None, "x")), (st.P(None, "x"), st.P("x"))):
        x = st.device_put(host, st.NamedSharding(mesh, spec))
        with st.transfers() as log:
            y = fft.fftn(x)
        assert y.sharding.spec == after
        assert log.bytes == 3 * y.nbytes // 4  # of the complex result of the first dimension
        assert_same(y, np.fft.fftn(host))
    line = st.device_put(host[0], st.NamedSharding(mesh, st.P("x")))
    with st.transfer_guard("disallow"):
        fft.fft(st.device_put(host, st.NamedSharding(mesh, st.P("x"))))
        with pytest.raises(st.TransferError, match="rfft"):
            fft.rfft(line)


@everywhere
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_frequencies(n: int, backend: str) -> None:
    mesh = mesh_of((3,), backend)
    for name in ("fftfreq", "rfftfreq"):
        made, wanted = getattr(fft, name), getattr(np.fft, name)
        for device in (mesh, mesh.flat[1], st.NamedSharding(mesh, st.P())):
            assert_same(made(n, d=0.3, device=device), wanted(n, 0.3), exact=True)
        assert_same(made(n, dtype="float32", device=mesh), wanted(n).astype("float32"), exact=True)
        assert made(n).sharding == st.arange(len(wanted(n))).sharding
        parts = st.pmap(lambda _, made=made: made(n), st.shard(st.zeros(2, device=mesh.flat[0])))
        np.testing.assert_array_equal(np.asarray(parts[0]), wanted(n))


@everywhere
def test_shifts(backend: str) -> None:
    host = array((5, 4, 3), "float64", 1)
    x = st.device_put(host, st.NamedSharding(mesh_of((2, 2), backend), st.P("x", "y")))
    for axes in (None, 0, -1, (0, 2), [1]):
        assert_same(fft.fftshift(x, axes), np.fft.fftshift(host, axes), exact=True)
        assert_same(fft.ifftshift(x, axes=axes), np.fft.ifftshift(host, axes), exact=True)
        assert fft.fftshift(x, axes).sharding == x.sharding


@everywhere
def test_in_maps(backend: str) -> None:
    host = array((4, 6), "float32", 1)

    def f(x: Any) -> Any:
        return (
            fft.irfftn(fft.rfftn(x)) + fft.ifft(fft.fft(x)) + fft.hfft(fft.ihfft(x), 6) + fft.fftshift(fft.ifftshift(x))
        )

    found = st.pmap(f, st.shard(host, devices=mesh_of((2,), backend)))
    np.testing.assert_allclose(np.asarray(st.unshard(found)), 4 * host, rtol=1e-4, atol=1e-5)
    assert found[0].dtype == np.complex64


@everywhere
@pytest.mark.parametrize("name", ["fft", "irfft", "hfft"])
def test_half_precision(name: str, backend: str) -> None:
    host = array((3, 4), "float16", 1)
    x = st.device_put(host, mesh_of((2,), backend))
    assert_same(getattr(fft, name)(x), getattr(np.fft, name)(host))


@everywhere
def test_transforms_of_no_elements(backend: str) -> None:
    x = st.device_put(np.zeros((0, 4)), mesh_of((2,), backend))
    assert_same(fft.fft(x), np.fft.fft(np.zeros((0, 4))))
    assert_same(fft.rfft(x, axis=0, n=3), np.zeros((2, 4), "complex128"))
    assert_same(fft.fftn(st.astype(x, "float32"), axes=()), np.zeros((0, 4), "complex64"))


ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "axis": (lambda x: fft.fft(x, axis=2), st.AxisError, "^fft: axis 2 is out of range"),
    "n": (lambda x: fft.fft(x, 0), st.ArgumentError, "^fft: n is 0 for x of shape .2, 1. along axis -1; wanted at least 1"),
    "inverse": (lambda x: fft.irfft(x), st.ArgumentError, "^irfft: n is 0"),
    "a float": (lambda x: fft.fft(x, 2.5), st.ArgumentTypeError, "^fft: n is .*a float; wanted an integer"),
    "norm": (lambda x: fft.fft(x, norm="x"), st.ArgumentError, "^fft: norm is 'x'; wanted 'backward'"),
    "complex": (lambda x: fft.rfft(x * 1j), st.ArgumentTypeError, "^rfft: does not take complex128"),
    "0-d": (lambda x: fft.fft(x[0, 0]), st.AxisError, "^fft: axis -1 is out of range"),
    "sizes": (lambda x: fft.fftn(x, (2, 2), (0,)), st.ArgumentError, "^fftn: s has 2 sizes and axes 1 dimension"),
    "no axes": (lambda x: fft.rfftn(x, axes=()), st.AxisError, "^rfftn: axes is empty"),
    "frequencies": (lambda x: fft.fftfreq(2.0), st.ArgumentTypeError, "^fftfreq: n is .*a float"),
    "no frequencies": (lambda x: fft.rfftfreq(0), st.ArgumentError, "^rfftfreq: n is 0; wanted at least 1"),
    "integers": (lambda x: fft.fftfreq(3, dtype="int64"), st.ArgumentTypeError, "^fftfreq: dtype is int64; wanted a fl"),
    "shift": (lambda x: fft.fftshift(x, 2), st.AxisError, "axis 2 is out of range"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str, backend: str) -> None:
    function, kind, text = ERRORS[name]
    x = st.device_put(np.ones((2, 1)), mesh_of((2,), backend))
    with pytest.raises(kind, match=text):
        function(x)


def test_the_namespace_has_the_names_of_the_standard() -> None:
    names = "fft ifft fftn ifftn rfft irfft rfftn irfftn hfft ihfft fftfreq rfftfreq fftshift ifftshift"
    assert {*names.split(), "fft2", "ifft2", "rfft2", "irfft2"} == set(fft.__all__) == set(dir(fft))
    assert st.fft is fft
