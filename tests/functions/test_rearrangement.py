"""Functions that repeat, pad, split, join and rearrange, against NumPy: on large and odd arrays, in maps, by inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some
from hypothesis.extra.numpy import array_shapes

import shardtensor as st
from shardtensor import P
from shardtensor.functions.algorithms import first_device
from tests.draws import drawn
from tests.layouts import array, assert_same, everywhere, mesh_of, placed, put

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "append": lambda xp, x: xp.append(x, x, axis=0),
    "array_split": lambda xp, x: xp.array_split(x, 3),
    "array_split at": lambda xp, x: xp.array_split(x, [1, 3, 2], axis=-1),
    "atleast_1d": lambda xp, x: xp.atleast_1d(x),
    "atleast_2d": lambda xp, x: xp.atleast_2d(x, x),
    "atleast_3d": lambda xp, x: xp.atleast_3d(x),
    "broadcast_arrays": lambda xp, x: xp.broadcast_arrays(x, x[:1], x[..., :1]),
    "column_stack": lambda xp, x: xp.column_stack([x, x]),
    "delete": lambda xp, x: xp.delete(x, slice(None, None, 2), axis=0),
    "delete one": lambda xp, x: xp.delete(x, -1),
    "diag": lambda xp, x: xp.diag(xp.ravel(x)[:9], k=-1),
    "diagonal": lambda xp, x: xp.diag(xp.atleast_2d(x)[:, :, *[0] * max(x.ndim - 2, 0)], k=1),
    "diagflat": lambda xp, x: xp.diagflat(x[:1, ..., :2] if x.ndim > 1 else x[:2]),
    "dsplit": lambda xp, x: xp.dsplit(xp.atleast_3d(x), [1]),
    "dstack": lambda xp, x: xp.dstack([x, x]),
    "fliplr": lambda xp, x: xp.fliplr(xp.atleast_2d(x)),
    "flipud": lambda xp, x: xp.flipud(x),
    "hsplit": lambda xp, x: xp.hsplit(x, [2]),
    "hstack": lambda xp, x: xp.hstack([x, x]),
    "insert": lambda xp, x: xp.insert(x, 1, x[:1], axis=0),
    "insert several": lambda xp, x: xp.insert(x, [0, 0], 7, axis=-1),
    "meshgrid": lambda xp, x: xp.meshgrid(xp.ravel(x)[:7], xp.ravel(x)[:2], xp.ravel(x)[:3]),
    "meshgrid ij": lambda xp, x: xp.meshgrid(xp.ravel(x)[:5], xp.ravel(x)[:3], indexing="ij"),
    "pad": lambda xp, x: xp.pad(x, ((2, 1),) * x.ndim),
    "pad constants": lambda xp, x: xp.pad(x, (1, 2), constant_values=((3, 4),)),
    "pad reflect": lambda xp, x: xp.pad(x, 3, "reflect"),
    "pad ramp": lambda xp, x: xp.pad(x, (2, 4), "linear_ramp", end_values=((-8, 4),)),
    "pad wrap": lambda xp, x: xp.pad(x, (0, 2), mode="wrap"),
    "ravel": lambda xp, x: xp.ravel(x),
    "ravel F": lambda xp, x: xp.ravel(x, order="F"),
    "repeat": lambda xp, x: xp.repeat(x, 3, axis=0),
    "repeat flat": lambda xp, x: xp.repeat(x, 2),
    "repeat each": lambda xp, x: xp.repeat(x, np.arange(x.shape[-1]) % 3, axis=-1),
    "resize": lambda xp, x: xp.resize(x, (5, 7)),
    "rollaxis": lambda xp, x: xp.rollaxis(x, -1),
    "rot90": lambda xp, x: xp.rot90(xp.atleast_2d(x)),
    "rot90 back": lambda xp, x: xp.rot90(xp.atleast_2d(x), 3, axes=(1, 0)),
    "split": lambda xp, x: xp.split(x, [1, 2]),
    "swapaxes": lambda xp, x: xp.swapaxes(x, 0, -1),
    "tile": lambda xp, x: xp.tile(x, (2, 1, 3)),
    "tile often": lambda xp, x: xp.tile(x, 35),
    "tril": lambda xp, x: xp.tril(xp.atleast_2d(x), k=1),
    "triu": lambda xp, x: xp.triu(xp.atleast_2d(x), k=-2),
    "vsplit": lambda xp, x: xp.vsplit(xp.atleast_2d(x), [1]),
    "vstack": lambda xp, x: xp.vstack([x, x]),
}
"""Calls of each function, in the namespace of NumPy or of the library, with an array of at least one dimension."""


def compare(found: Any, wanted: Any) -> None:
    if isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert_same(a, b, exact=True)
    else:
        assert_same(found, wanted, exact=True)


DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64", "datetime64[s]"]


@some.composite
def arrays(draw: Any) -> Any:
    """Draws arrays of up to 4 dimensions and sides up to 40, with NaN and infinities."""
    shape = draw(array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=draw(some.sampled_from([3, 7, 40]))))
    while np.prod(shape) > 4000:
        shape = shape[1:]
    rng = np.random.default_rng(draw(some.integers(0, 99)))
    dtype = np.dtype(draw(some.sampled_from(DTYPES)))
    if dtype.kind in "fc":
        return rng.choice([1.5, -2.0, 0.0, -0.0, np.nan, np.inf, -np.inf], shape).astype(dtype)
    return rng.integers(0, 100, shape).astype(dtype)


def sweep(name: str, backend: str, examples: int) -> None:
    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        x = data.draw(arrays())
        call = CALLS[name]
        operand = placed(data, x, backend, mesh_of((3,), backend))
        try:
            wanted = call(np, x)
        except (ValueError, IndexError, TypeError):
            with pytest.raises((ValueError, IndexError, TypeError)) as found:
                call(st, operand)
            assert isinstance(found.value, st.ShardTensorError)
        else:
            compare(call(st, operand), wanted)

    run()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("backend", ["numpy", "checked"])
@pytest.mark.parametrize("name", CALLS)
def test_large_and_odd_arrays(name: str, backend: str) -> None:
    sweep(name, backend, 60)


@everywhere
@pytest.mark.parametrize("name", CALLS)
def test_numpys_functions_inference_and_maps(name: str, backend: str) -> None:
    """NumPy's own function takes tensors, inference predicts the layout, and mapped functions call it on their shard."""
    mesh, call = mesh_of((3,), backend), CALLS[name]
    host = np.random.default_rng(3).integers(0, 99, (8, 5)).astype("float32")
    x = st.device_put(host, st.NamedSharding(mesh, P("x")))
    wanted, found = call(np, host), call(st, x)
    compare(found, wanted)
    compare(call(np, x), wanted)
    with st.transfers():  # Small results are then composed of other operators on every backend.
        compare(call(st, x), wanted)
    inferred = st.eval_shape(lambda x: call(st, x), x)
    several = isinstance(found, (list, tuple))
    for shape, made in zip(inferred if several else [inferred], found if several else [found], strict=True):
        assert (shape.shape, shape.dtype, shape.sharding) == (made.shape, made.dtype, made.sharding)
    mapped = st.pmap(lambda x: call(st, x), st.shard(host, devices=mesh))
    for part, shard in zip(mapped, np.array_split(host, 3), strict=True):
        expected = call(np, shard)
        for made, value in zip(part if several else [part], expected if several else [expected], strict=True):
            np.testing.assert_array_equal(np.asarray(made), value)


# -- layouts ---------------------------------------------------------------------------------------


def test_what_is_split_stays_split() -> None:
    mesh = mesh_of((4,), "checked")
    x = st.device_put(np.arange(16 * 1024.0).reshape(16, 1024), st.NamedSharding(mesh, P("x")))
    assert x.nbytes > first_device.GATHERED
    with st.transfers() as log:
        for made in (st.tril(x), st.triu(x), st.tile(x, (1, 3)), st.repeat(x, 2, axis=1), st.repeat(x, 2, axis=0)):
            assert made.sharding.spec == P("x")
        assert st.broadcast_arrays(x)[0].sharding.spec == P("x")
        assert st.pad(x, ((0, 0), (1, 1))).sharding.spec == P("x")
    assert log.bytes == 0
    with st.transfers() as log:
        assert st.repeat(x, np.full(16, 2), axis=0).sharding.spec == P("x")
        assert st.pad(x, ((1, 0), (0, 0))).sharding.spec == P("x")
    assert log.bytes < x.nbytes
    with st.transfers() as log:
        made = st.tile(x, (2, 1))
    assert made.sharding.spec == P("x")
    assert log.bytes <= made.nbytes


def test_a_grid_has_one_layout() -> None:
    x, y = st.meshgrid(st.arange(40), st.arange(7))
    assert x.sharding == y.sharding
    with st.transfer_guard("disallow"):
        assert (x * y).shape == (7, 40)
    sparse = st.meshgrid(st.arange(4), st.arange(5), sparse=True, indexing="ij")
    assert [a.shape for a in sparse] == [(4, 1), (1, 5)]
    for key in (np.s_[0:4, 1:9:2], np.s_[0:1:5j, 0:3], np.s_[2:9], np.s_[0:1:3j]):
        assert_same(st.mgrid[key], np.mgrid[key])
        compare(st.ogrid[key], np.ogrid[key])
    with pytest.raises(st.IndexingError, match="mgrid: 3 is not a coordinate; wanted slices"):
        st.mgrid[0:4, 3]
    with st.transfer_guard("disallow"):
        made = st.fromfunction(lambda i, j: i * 10 + j, (9, 4))
    np.testing.assert_array_equal(made, np.fromfunction(lambda i, j: i * 10 + j, (9, 4)))


def test_small_results_are_what_the_composition_returns() -> None:
    """On devices that share a memory, NumPy computes small results of compositions, with the same layout and status."""
    for spec, committed in ((P("x"), True), (P(None, "x"), True), (P("x"), False)):
        host = np.arange(12.0).reshape(4, 3)
        mesh = mesh_of((2,), "numpy")
        with st.use_mesh(mesh):
            x = st.device_put(host, st.NamedSharding(mesh, spec)) if committed else st.zeros((4, 3)) + host
            for name in (
                "tile",
                "repeat",
                "repeat flat",
                "pad",
                "pad constants",
                "pad wrap",
                "diag",
                "diagonal",
                "resize",
            ):
                small = CALLS[name](st, x.T)
                with st.transfers():
                    composed = CALLS[name](st, x.T)
                assert (small.sharding, small.committed) == (composed.sharding, composed.committed), name
                small[...] = 7  # It is independent of x.
                assert x.tolist() == host.tolist(), name
    x = st.device_put(np.arange(8.0), st.devices("numpy")[0])
    st.device_put(x, st.devices("numpy")[1], donate=True)
    with pytest.raises(st.DonatedError):
        st.tile(x, 2)


# -- creation --------------------------------------------------------------------------------------

RANGES = [
    (0, 1, 7),
    (3, -5.5, 4),
    (0, 1, 1),
    (0, 1, 0),
    (1, 1, 3),
    (2**53, 2**53 + 9, 8),
    (0, 1e-323, 9),
    (-0.5, 0.1, 64),
]


@everywhere
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_linspace_has_numpys_bits(backend: str) -> None:
    sharding = st.NamedSharding(mesh_of((3,), backend), P("x"))
    for start, stop, num in RANGES:
        for endpoint in (True, False):
            for dtype in (None, "float32", "int32"):
                options: dict[str, Any] = {"endpoint": endpoint, "dtype": dtype}
                made = st.linspace(start, stop, num, **options, device=sharding)
                assert_same(made, np.linspace(start, stop, num, **options), exact=backend != "torch")
    assert_same(st.linspace(0, 1j, 5, device=sharding), np.linspace(0, 1j, 5))
    assert_same(st.logspace(0, 3, 9, device=sharding), np.logspace(0, 3, 9))
    assert_same(st.geomspace(-1, -1000, 9, device=sharding), np.geomspace(-1, -1000, 9))
    assert_same(st.tri(4, 3, -1, device=sharding), np.tri(4, 3, -1))
    assert_same(st.identity(3, device=sharding), np.identity(3))
    assert_same(st.indices((4, 3), device=sharding), np.indices((4, 3)))
    made = st.pmap(lambda _: st.linspace(0, 1, 5), st.shard(np.ones(2), devices=st.devices(backend)[:2]))
    assert made[1].tolist() == np.linspace(0, 1, 5).tolist()


@everywhere
def test_ranges_from_zeros_of_both_signs_are_told_apart(backend: str) -> None:
    sharding = st.NamedSharding(mesh_of((3,), backend), P("x"))
    for zero in (0.0, -0.0, 0.0, np.float32(-0.0), np.float32(0)):
        for dtype in ("f4", "f8"):
            wanted = np.arange(zero, 2.3, 1.5, dtype)
            found = np.asarray(st.arange(zero, 2.3, 1.5, dtype, device=sharding))
            np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


@everywhere
def test_arange_has_numpys_bits(backend: str) -> None:
    sharding = st.NamedSharding(mesh_of((3,), backend), P("x"))
    numbers = some.sampled_from([0.0, -0.0, 1.0, -1.0, 0.1, 1e-7, -3489.1, 1e20]) | some.floats(-5, 5, width=16)

    @hypothesis.settings(max_examples=drawn(60))
    @hypothesis.given(numbers, numbers.filter(bool), some.floats(0, 12), some.sampled_from(["f2", "f4", "f8", None]))
    def run(start: float, step: float, count: float, dtype: Any) -> None:
        span = (start, start + step * count, step)
        try:
            with np.errstate(all="ignore"):
                wanted = np.arange(*span, dtype)
        except ValueError:  # The sum of a large number and a small one is the large one.
            hypothesis.reject()
        hypothesis.assume(wanted.size < 50)
        with np.errstate(all="ignore"):
            made = st.arange(*span, dtype, device=sharding)
        assert_same(made, wanted, exact=backend != "torch")
        np.testing.assert_array_equal(np.signbit(np.asarray(made)), np.signbit(wanted))

    run()


# -- methods ---------------------------------------------------------------------------------------


def test_methods_and_orders(backend: str) -> None:
    host = np.arange(24.0).reshape(4, 6)
    x = st.device_put(host, st.NamedSharding(mesh_of((3,), backend), P("x")))
    for order in "CF":
        assert_same(x.reshape(3, 8, order=order), host.reshape(3, 8, order=order))
        assert_same(x.reshape((2, -1), order=order), host.reshape((2, -1), order=order))
        assert_same(x.ravel(order), host.ravel(order))
        assert_same(x.flatten(order), host.flatten(order))
        assert x.tobytes(order) == host.tobytes(order)
    assert_same(x.repeat(2, axis=1), host.repeat(2, axis=1))
    assert_same(x.cumsum(), host.cumsum())
    assert_same(x.cumsum(1), host.cumsum(1))
    assert_same(x[:2].cumprod(axis=0, dtype="float32"), host[:2].cumprod(axis=0, dtype="float32"))
    assert_same(np.reshape(x, (8, 3), order="F"), np.reshape(host, (8, 3), order="F"))
    assert_same(np.reshape(x, -1), host.reshape(-1))
    assert_same(np.copy(x, order="F"), host)
    assert_same(np.ones_like(x, order="F"), np.ones_like(host))
    assert_same(x.astype("int32", order="F").copy(order="K"), host.astype("int32"))
    with pytest.raises(st.ArgumentError, match="reshape: order is 'Z'; wanted 'C', 'F', 'A' or 'K'"):
        np.reshape(x, (24,), order="Z")  # type: ignore[call-overload]


def test_flat(backend: str) -> None:
    host = np.arange(12.0).reshape(3, 4)
    x = st.device_put(host, mesh_of((2,), backend))
    for a, b in ((x, host), (x.T, host.T)):
        assert len(a.flat) == 12
        assert [float(e) for e in a.flat] == list(b.flat)
        a.flat[3] = 70
        b.flat[3] = 70
        a.flat[::5] = [1, 2, 3]
        b.flat[::5] = [1, 2, 3]
        np.testing.assert_array_equal(a.flat[2:], b.flat[2:])
        np.testing.assert_array_equal(np.asarray(a.flat), np.asarray(b.flat))
    np.testing.assert_array_equal(x, host)
    with pytest.raises(st.IndexingError, match="flat: "):
        x.flat[12] = 1
    piece = x.flat[:3]
    piece[0] = -1  # As in NumPy, it is a copy.
    np.testing.assert_array_equal(x, host)
    x.flat = [5, 6]
    host.flat = [5, 6]
    np.testing.assert_array_equal(x, host)


# -- errors ----------------------------------------------------------------------------------------

MISUSE: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda x: st.tile(x, -1), ValueError, r"tile: repetitions \(-1,\) has a negative number"),
    (lambda x: st.tile(x, 1.5), TypeError, "tile: repetitions"),
    (lambda x: st.repeat(x, -1), ValueError, "repeat: repeats has a negative number, -1"),
    (lambda x: st.repeat(x, np.array([1.5])), TypeError, "repeat: repeats has dtype float64; wanted integers"),
    (
        lambda x: st.repeat(x, [1, 2, 3], axis=0),
        ValueError,
        r"repeat: repeats has shape \(3,\), and dimension 0 of x has size 4",
    ),
    (lambda x: st.repeat(x, 2, axis=2), st.AxisError, "repeat: axis 2 is out of range"),
    (lambda x: st.tril(x, k=0.5), TypeError, "tril: k is 0.5; wanted an integer"),
    (lambda x: st.triu(x[0, 0]), ValueError, "triu"),
    (lambda x: st.diag(x[None]), ValueError, "diag: v has shape"),
    (lambda x: st.pad(x, 1, "bogus"), ValueError, "pad: mode is 'bogus'; wanted one of"),
    (lambda x: st.pad(x, -1), ValueError, "pad: pad_width is -1, with a negative width"),
    (lambda x: st.pad(x, ((1, 1), (2, 2), (3, 3))), ValueError, "pad: pad_width"),
    (lambda x: st.pad(x[:0], 1, "edge"), ValueError, "pad: dimension 0 of x has size 0"),
    (lambda x: st.split(x, 3), ValueError, "split: dimension 0 has size 4, which does not divide into 3 equal parts"),
    (lambda x: st.array_split(x, 0), ValueError, "array_split: 0 parts"),
    (lambda x: st.vsplit(x[0], 2), ValueError, "vsplit: x has 1 dimension; wanted at least 2"),
    (lambda x: st.hstack([]), ValueError, "hstack: there is nothing to join"),
    (lambda x: st.delete(x, 9, axis=0), IndexError, "delete: index 9 is out of bounds"),
    (lambda x: st.insert(x, 9, 0, axis=0), IndexError, "insert: index 9 is out of bounds"),
    (lambda x: st.rot90(x, axes=(0, 0)), ValueError, "rot90: axis 0 occurs twice"),
    (lambda x: st.rollaxis(x, 0, 5), ValueError, "rollaxis: start 5 is out of range"),
    (lambda x: st.ravel(x, "Z"), ValueError, "ravel: order is 'Z'"),
    (lambda x: st.broadcast_arrays(x, np.ones(3)), ValueError, "do not broadcast together"),
    (lambda x: st.broadcast_shapes((2,), (3,)), ValueError, r"broadcast_shapes: \(2,\), \(3,\) do not broadcast"),
    (lambda x: st.meshgrid(x, indexing="uv"), ValueError, "meshgrid: indexing is 'uv'; wanted 'xy' or 'ij'"),
    (lambda x: st.meshgrid([1, 2]), TypeError, "is a list; wanted a tensor"),
    (lambda x: st.atleast_1d([1, 2]), TypeError, "is a list; wanted a tensor"),
    (lambda x: st.linspace(0, 1, -1), ValueError, "linspace: num is -1; wanted at least 0"),
    (lambda x: st.linspace(0, 1, 2.5), TypeError, "linspace: num is 2.5, a float; wanted an integer"),
    (lambda x: st.linspace(0, "1"), TypeError, "linspace: stop is a str; wanted a number"),
    (
        lambda x: st.geomspace(0, 1),
        ValueError,
        "geomspace: start=0 and stop=1; a geometric sequence does not contain 0",
    ),
    (lambda x: st.eval_shape(st.repeat, x[0], st.asarray([1] * 5)), TypeError, "repeat|eval_shape"),
]


@pytest.mark.parametrize(("call", "kind", "message"), MISUSE)
def test_misuse(call: Any, kind: Any, message: str) -> None:
    x = st.device_put(np.arange(20.0).reshape(4, 5), mesh_of((2,), "numpy"))
    with pytest.raises(kind, match=message) as found:
        call(x)
    assert isinstance(found.value, st.ShardTensorError)
    assert x.tolist() == np.arange(20.0).reshape(4, 5).tolist()


def test_none_and_text_are_broadcast_as_in_numpy(backend: str) -> None:
    a = array((4, 3), "float64", 1)
    given = (None, "text", [1, 2, 3], ["a", None, "c"], np.array([[b"x"]]), 2.0)
    found, wanted = np.broadcast_arrays(put(a, backend, (3,)), *given), np.broadcast_arrays(a, *given)
    assert type(found) is type(wanted)
    for mine, its in zip(found, wanted, strict=True):
        assert isinstance(mine, st.ShardedTensor) == (its.dtype.kind in "if")
        assert mine.dtype == its.dtype
        np.testing.assert_array_equal(np.asarray(mine), its)
    with pytest.raises(st.ShapeError, match="do not broadcast together"):
        np.broadcast_arrays(put(a, backend, (3,)), ["a", "b"])
