"""Stencils and convolutions on every layout and backend, compared with NumPy on the padded array."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as draws

import shardtensor as st
from shardtensor import P
from shardtensor.functions.numpy import differences
from tests.draws import drawn
from tests.interpreters.test_infer import totals
from tests.layouts import READ_ONLY, everywhere, mesh_of, strided

MODES = {"periodic": "wrap", "reflect": "symmetric", "nearest": "edge"}


def weighted(depth: Sequence[int]) -> Callable[[Any], Any]:
    """Returns a stencil that gives every neighbour another weight, and whose result has no halo."""

    def stencil(block: Any) -> Any:
        total = 0
        for weight, at in enumerate(itertools.product(*[range(2 * d + 1) for d in depth])):
            shape = zip(at, block.shape, depth, strict=True)
            total = total + (weight % 11 + 1) * block[tuple([slice(i, i + n - 2 * d) for i, n, d in shape])]
        return total

    return stencil


def padded(x: Any, depth: Sequence[int], boundary: Any) -> Any:
    widths = [(d, d) for d in depth]
    if isinstance(boundary, str):
        return np.pad(x, widths, mode=MODES[boundary])  # type: ignore[call-overload]
    return np.pad(x, widths, constant_values=boundary)


@everywhere
@settings(max_examples=drawn(100, fast=10))
@given(data=draws.data())
def test_layouts(backend: str, data: Any) -> None:
    shape = tuple(data.draw(draws.lists(draws.integers(1, 9), min_size=1, max_size=3), "shape"))
    depth = [data.draw(draws.integers(0, min(n, 3)), "depth") for n in shape]
    boundary = data.draw(draws.sampled_from([*MODES, 0, -7]), "boundary")
    axes = [*["x", "y", ("x", "y"), ("y", "x")], *[None] * 3]
    entries = data.draw(draws.permutations(axes), "spec")[: len(shape)]
    used: set[str] = set()
    spec = []
    for entry in entries:
        names = set(entry or ())
        spec.append(None if names & used else entry)
        used |= names
    x = np.arange(np.prod(shape), dtype="int64").reshape(shape)
    placed = st.device_put(x, st.NamedSharding(mesh_of((2, 3), backend), P(*spec)))
    result = st.map_overlap(weighted(depth), placed, depth=depth, boundary=boundary)
    assert result.sharding == placed.sharding
    np.testing.assert_array_equal(np.asarray(result), weighted(depth)(padded(x, depth, boundary)))
    np.testing.assert_array_equal(np.asarray(placed), x)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "complex64", "datetime64[s]"])
@everywhere
def test_dtypes_and_results_with_their_halo(backend: str, dtype: str) -> None:
    if backend != "numpy" and dtype.startswith("datetime"):
        pytest.skip("only NumPy has datetimes")
    x = np.arange(7).astype(dtype)
    placed = st.device_put(x, mesh_of((3,), backend))
    result = st.map_overlap(lambda block: block, placed, depth=2, boundary="reflect")
    assert result.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(result), x)


@everywhere
def test_shards_thinner_than_the_halo_and_empty_ones(backend: str) -> None:
    x = np.arange(3.0)
    placed = st.device_put(x, mesh_of((8,), backend))
    for boundary in (*MODES, 5.0):
        result = st.map_overlap(weighted((3,)), placed, depth=3, boundary=boundary)
        np.testing.assert_array_equal(np.asarray(result), weighted((3,))(padded(x, (3,), boundary)))


@everywhere
def test_pytrees_and_collectives(backend: str) -> None:
    x = np.arange(10.0)
    placed = st.device_put(x, mesh_of((4,), backend))

    def both(block: Any) -> Any:
        middle = block[1:-1]
        return {"mean": middle - st.psum(middle.sum(), "x") / 10, "difference": (block[2:] - block[:-2]) / 2}

    found = st.map_overlap(both, placed, depth=1, boundary="nearest")
    np.testing.assert_allclose(np.asarray(found["mean"]), x - x.mean())
    np.testing.assert_allclose(np.asarray(found["difference"])[1:-1], np.ones(8))


@everywhere
def test_several_arrays_in_other_layouts(backend: str) -> None:
    x, y = np.arange(20.0).reshape(4, 5), np.arange(20.0)[::-1].reshape(4, 5)
    rows = st.device_put(x, st.NamedSharding(mesh_of((3,), backend), P("x")))
    columns = st.device_put(y, st.NamedSharding(mesh_of((3,), backend), P(None, "x")))
    for other in (y, columns):
        result = st.map_overlap(lambda a, b: a[1:-1] * b[2:], rows, other, depth=(1, 0), boundary="periodic")
        assert result.sharding == rows.sharding
        np.testing.assert_array_equal(np.asarray(result), x * np.roll(y, -1, 0))
    with pytest.raises(st.ShapeError, match=r"array 1 has shape \(4,\); wanted \(4, 5\)"):
        st.map_overlap(lambda a, b: a, rows, y[:, 0], depth=1, boundary=0.0)


def test_only_halos_are_sent_and_every_backend_counts_the_same() -> None:
    shape, found = (40, 6), []
    for backend in ("numpy", "checked"):
        placed = st.device_put(np.ones(shape, "float32"), st.NamedSharding(mesh_of((4,), backend), P("x")))
        with st.transfers() as log:
            st.map_overlap(lambda block: block, placed, depth=(2, 1), boundary="nearest")
        found.append({(a, b.id, c.id): n for (a, _, b, c), n in totals(log).items()})
    assert found[0] == found[1]
    assert sum(found[0].values()) == 2 * 3 * 2 * 8 * 4  # Both sides of 3 borders, 2 rows of 6 numbers and both edges.
    mesh = st.AbstractMesh((4,), ("x",))
    x = st.empty(shape, dtype="float32", device=st.NamedSharding(mesh, P("x")))
    report = st.simulate(lambda x: st.map_overlap(lambda b: b, x, depth=(2, 1), boundary="nearest"), x)
    assert report.bytes == sum(found[0].values())
    with st.transfer_guard("disallow"), pytest.raises(st.TransferError, match="map_overlap"):
        st.map_overlap(lambda block: block, placed, depth=(2, 0), boundary=0.0)


def test_inference_does_not_compute() -> None:
    x = st.device_put(np.ones((8, 2), "float32"), mesh_of((4,), "numpy"))
    made = st.eval_shape(lambda x: st.map_overlap(lambda b: b[1:-1] > 1, x, depth=(1, 0), boundary="periodic"), x)
    assert (made.shape, made.dtype, made.sharding) == ((8, 2), np.bool_, x.sharding)


def test_large_arrays_are_copied_by_threads() -> None:
    x = np.random.default_rng(0).random((1500, 1500))
    placed = st.device_put(x, mesh_of((5,), "numpy"))
    result = st.map_overlap(weighted((1, 1)), placed, depth=1, boundary="reflect")
    np.testing.assert_array_equal(np.asarray(result), weighted((1, 1))(padded(x, (1, 1), "reflect")))


def test_hosts_arrays_scalars_and_negative_zero() -> None:
    result = st.map_overlap(lambda block: block[1:-1], [1, 2, 3], depth=1, boundary=0)
    assert result.tolist() == [1, 2, 3]
    assert st.map_overlap(lambda block: block + 1, 5, depth=(), boundary="nearest").item() == 6
    x = st.asarray([1.0], device=st.devices()[0])
    for zero in (0.0, -0.0):
        ends = st.map_overlap(lambda block: block[:1], x, depth=1, boundary=zero)
        assert np.signbit(float(ends[0])) == np.signbit(zero)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"depth": -1}, st.ArgumentError, "depth -1 in dimension 0 is negative"),
        ({"depth": (1, 1)}, st.ArgumentError, "depth has 2 entries, and x has 1 dimension"),
        ({"depth": 6}, st.ShapeError, "depth 6 is larger than dimension 0, which has size 5"),
        ({"depth": 1.5}, st.ArgumentTypeError, "depth is 1.5; wanted an integer"),
        ({"boundary": "wrap"}, st.ArgumentError, "boundary is 'wrap'; wanted one of"),
        ({"boundary": 300}, st.RangeError, "boundary"),
        ({"fn": None}, st.ArgumentTypeError, "fn is a NoneType"),
        ({"fn": lambda block: block[1:]}, st.ShapeError, "fn returned an array of shape"),
        ({"fn": lambda block: "text"}, st.ArgumentTypeError, "the result"),
    ],
)
def test_errors(arguments: Any, error: type[Exception], text: str) -> None:
    x = st.device_put(np.arange(5, dtype="int8"), mesh_of((2,), "numpy"))
    given = {"fn": lambda block: block, "depth": 1, "boundary": "nearest", **arguments}
    fn = given.pop("fn")
    with pytest.raises(error, match=text) as seen:
        st.map_overlap(fn, x, **given)
    assert "map_overlap" in str(seen.value)
    assert x.tolist() == [0, 1, 2, 3, 4]


# -- convolutions ----------------------------------------------------------------------------------


@everywhere
@settings(max_examples=drawn(100, fast=12))
@given(data=draws.data())
def test_convolutions(backend: str, data: Any) -> None:
    n, m = data.draw(draws.integers(1, 40), "n"), data.draw(draws.integers(1, 12), "m")
    kinds = draws.sampled_from(["int64", "float32", "complex64"])
    rng, mesh = np.random.default_rng(n * m), mesh_of((data.draw(draws.sampled_from([1, 3, 8]), "devices"),), backend)
    a, v = [rng.integers(-9, 9, size).astype(data.draw(kinds, "dtype")) for size in (n, m)]
    if a.dtype.kind == "c":
        a = a * (1 + 2j)
    weights = st.device_put(v, mesh) if data.draw(draws.booleans(), "weights are sharded") else v
    mode = data.draw(draws.sampled_from(["full", "same", "valid"]), "mode")
    for name in ("convolve", "correlate"):
        result, wanted = getattr(st, name)(st.device_put(a, mesh), weights, mode), getattr(np, name)(a, v, mode)
        assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(np.asarray(result), wanted, rtol=1e-5)


@everywhere
def test_convolutions_have_no_products_beyond_the_ends(backend: str) -> None:
    """Zeros there would give NaN where the shorter array has NaN or infinite elements.

    Kernels of more than 16 elements are convolved by another algorithm.
    """
    ways = list(itertools.product((2, 5, 20), ("full", "same", "valid")))
    for m, mode in ways if backend in READ_ONLY else strided(ways, 2):
        rng = np.random.default_rng(m)
        for n, count, value in ((m, 1, np.inf), (m + 3, 8, np.inf), (50, 3, np.nan)):
            a, v, mesh = rng.normal(size=n), rng.normal(size=m), mesh_of((count,), backend)
            v[0], v[m // 2] = value, -value
            x, y = st.device_put(a, mesh), st.device_put(v, mesh)
            with np.errstate(invalid="ignore"):
                for function in (np.convolve, np.correlate):
                    np.testing.assert_allclose(np.asarray(function(x, v, mode)), function(a, v, mode), atol=1e-9)
                    np.testing.assert_allclose(np.asarray(function(y, x, mode)), function(v, a, mode), atol=1e-9)


@pytest.mark.parametrize("m", [1, 2, 9, 40])
def test_large_convolutions_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    monkeypatch.setattr(differences, "_BLOCK", 50)
    rng = np.random.default_rng(m)
    for n in (51, 100, 333):
        a, v = rng.normal(size=n) * (1 + 1j), rng.normal(size=m) + 2j
        for count in (1, 3):
            for mode in ("full", "same", "valid"):
                result = st.convolve(st.device_put(a, mesh_of((count,), "numpy")), v, mode)
                np.testing.assert_allclose(np.asarray(result), np.convolve(a, v, mode), rtol=1e-12)
        v[0] = np.inf
        with np.errstate(invalid="ignore"):
            result, wanted = st.convolve(st.device_put(a, mesh_of((1,), "numpy")), v), np.convolve(a, v)
        np.testing.assert_array_equal(np.isnan(np.asarray(result)), np.isnan(wanted))


def test_results_of_partial_sums_are_whole() -> None:
    mesh = mesh_of((4,), "numpy")
    x = st.device_put(np.arange(8.0), st.NamedSharding(mesh, P()))
    x = st.reshard(x, st.NamedSharding(mesh, P(unreduced=set(mesh.axis_names))))
    for result in (st.convolve(x, [1.0], "same"), st.map_overlap(lambda block: block, x, depth=1, boundary=0.0)):
        assert result.sharding.spec == P()
        assert result.tolist() == np.arange(8.0).tolist()


@everywhere
def test_convolutions_of_bools_and_negative_zeros(backend: str) -> None:
    for m, count in itertools.product((1, 3, 20), (1, 4)):
        a, v = np.arange(30) % 4 == 0, np.arange(m) % 3 == 0
        mesh = mesh_of((count,), backend)
        for mode in ("full", "same", "valid"):
            result = st.convolve(st.device_put(a, mesh), v, mode)
            assert result.dtype == np.bool_
            np.testing.assert_array_equal(np.asarray(result), np.convolve(a, v, mode))
        result = np.asarray(st.convolve(st.device_put(np.full(30, -0.0), mesh), np.ones(m)))
        np.testing.assert_array_equal(np.signbit(result), np.signbit(np.convolve(np.full(30, -0.0), np.ones(m))))


@everywhere
@pytest.mark.parametrize("count", [1, 4])
def test_products_of_polynomials_have_no_products_beyond_the_ends(backend: str, count: int) -> None:
    a, v, mesh = np.arange(1.0, 9.0), np.asarray([np.inf, 1.0, np.nan]), mesh_of((count,), backend)
    with np.errstate(invalid="ignore"):
        result, wanted = st.polymul(st.device_put(a, mesh), v), np.polymul(a, v)
    np.testing.assert_array_equal(np.asarray(result), wanted)
    assert np.asarray(np.convolve(st.device_put(a, mesh), np.asarray([np.inf, 1.0]))).tolist() == [*[np.inf] * 8, 8.0]


@pytest.mark.parametrize("dtype", ["f4", "f8", "c16", "i4"])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_convolutions_of_short_shards_have_numpys_bits(count: int, dtype: str) -> None:
    rng = np.random.default_rng(count)
    where = st.NamedSharding(mesh_of((count,), "numpy"), st.P("x"))
    sizes = [(n, m) for n in (5, 7, 11) for m in range(1, n + 1)]
    ways = itertools.product(sizes, ("full", "same", "valid"), ("convolve", "correlate"))
    for (n, m), mode, name in strided(ways, 5, count + ["f4", "f8", "c16", "i4"].index(dtype)):
        a, v = [
            (100 * (rng.normal(size=k) + (1j * rng.normal(size=k) if "c" in dtype else 0))).astype(dtype)
            for k in (n, m)
        ]
        with st.transfers():
            found = np.asarray(getattr(st, name)(st.device_put(a, where), v, mode))
        assert found.tobytes() == getattr(np, name)(a, v, mode).tobytes(), (n, m, mode, name)


def test_a_convolution_sends_only_elements_that_devices_need() -> None:
    a = st.device_put(np.ones(1000), mesh_of((4,), "checked"))
    for mode in ("full", "same", "valid"):
        with st.transfers() as log:
            result = st.convolve(a, np.ones(5), mode)
        assert result.sharding == a.sharding
        moved = sum([n for (name, _, source, _), n in totals(log).items() if source.backend == "checked"])
        size = {"full": 1004, "same": 1000, "valid": 996}[mode]
        before = {"full": 4, "same": 2, "valid": 0}[mode]
        needed = 0
        for k in range(4):  # The elements of a device's windows that are not among its own.
            begin, end = max(k * size // 4 - before, 0), min((k + 1) * size // 4 - before + 4, 1000)
            needed += len(set(range(begin, end)) - set(range(k * 250, (k + 1) * 250)))
        assert moved == needed * 8
        report = st.simulate(
            lambda a, mode=mode: st.convolve(a, np.ones(5), mode),
            st.empty(1000, device=st.NamedSharding(st.AbstractMesh((4,), ("x",)), P("x"))),
        )
        assert report.bytes == log.bytes


def test_a_convolution_sends_halos_and_copies_of_the_weights() -> None:
    a = st.device_put(np.ones(1000), mesh_of((4,), "checked"))
    with st.transfers() as log:
        st.convolve(a, np.ones(5), "same")
    assert log.bytes < 4 * 5 * 8 + 3 * 2 * 4 * 8 + 1000  # Copies of the weights, halos, and rows that change places.


@pytest.mark.parametrize("name", ["convolve", "correlate"])
def test_errors_of_convolutions(name: str) -> None:
    function = getattr(st, name)
    for a, v in (([], [1]), ([1], np.zeros(0)), ([[1]], [1]), ([1], 1)):
        with pytest.raises(st.ShapeError, match=f"{name}: [av] has shape"):
            function(a, v)
    with pytest.raises(st.ArgumentError, match=f"{name}: mode is 'all'"):
        function([1], [1], "all")
