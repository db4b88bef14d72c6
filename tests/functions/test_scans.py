"""Cumulative sums, products and other scans, computed by distributed algorithms, on every kind of memory."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor import P
from shardtensor.functions.algorithms.first_device import GATHERED
from tests.draws import drawn
from tests.interpreters.test_infer import totals
from tests.layouts import everywhere, mesh_of
from tests.scripts import new_process, output_of

SPECS = [
    ((9, 5), P("x"), 0), ((9, 5), P("x", "y"), 1), ((7, 600), P(None, ("y", "x")), 1), ((7, 1200), P(None, "x"), 1),
    ((7, 6000), P(None, ("y", "x")), 1), ((3,), P(("x", "y")), 0), ((0, 4), P("x"), 0),
]  # fmt: skip


SCANS: dict[str, Any] = {
    "cumulative_sum": st.cumulative_sum,
    "cumulative_prod": st.cumulative_prod,
    "logcumsumexp": st.logcumsumexp,
    "maximum.accumulate": np.maximum.accumulate,
}


@pytest.mark.parametrize(("shape", "spec", "axis"), SPECS)
@pytest.mark.parametrize("name", SCANS)
def test_bits_and_bytes_depend_on_the_mesh_only(name: str, shape: Any, spec: Any, axis: int) -> None:
    x, scan = np.random.default_rng(0).uniform(0.5, 1.5, shape).astype("float32"), SCANS[name]
    found = []
    for backend in ("numpy", "checked"):
        placed = st.device_put(x, st.NamedSharding(mesh_of((2, 3), backend), spec))
        with st.transfers() as log:
            result = scan(placed, axis=axis)
        assert result.sharding == placed.sharding
        sent = {(a, b.id, c.id): n for (a, _, b, c), n in totals(log).items()}
        found.append((np.asarray(result), sent))
    (one, sent), (other, sent_too) = found
    assert sent == sent_too
    if name == "logcumsumexp":  # NumPy's has another order than that of libraries without a loop for it.
        np.testing.assert_allclose(one, other, rtol=1e-6)
    else:
        assert one.tobytes() == other.tobytes()
    mesh = st.AbstractMesh((2, 3), ("x", "y"))
    given = st.empty(shape, dtype="float32", device=st.NamedSharding(mesh, spec))
    report = st.simulate(lambda: scan(given, axis=axis), mesh=mesh)
    assert report.bytes == sum(found[0][1].values())


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "int8", "float64"])
def test_up_to_64_kib_the_first_device_computes_all_sums(dtype: str, devices: int) -> None:
    """The same bits, in messages of which there are fewer: what the others have, and their parts of the result."""
    rows = st.NamedSharding(mesh_of((devices,), "checked"), P("x"))
    count = GATHERED // np.dtype(dtype).itemsize // 24 * 24
    x = np.random.default_rng(0).integers(-9, 9, count + 24 * devices).astype(dtype) / np.dtype(dtype).type(7)
    x = x.astype(dtype)
    few, more = (st.device_put(part, rows) for part in (x[:count], x))
    assert few.nbytes <= GATHERED < more.nbytes
    with st.transfers() as log:
        result = st.cumulative_sum(few)
    itemsize = few.dtype.itemsize + result.dtype.itemsize
    assert log.bytes == st.explain(st.cumulative_sum, few).bytes == count * (devices - 1) // devices * itemsize
    assert set(map(sharers_of, totals(log))) == {0}
    own = st.device_put(x[:count], st.NamedSharding(mesh_of((devices,), "numpy"), P("x")))
    assert np.asarray(result).tobytes() == np.asarray(st.cumulative_sum(own)).tobytes()
    with st.transfers() as log:
        result = st.cumulative_sum(more)
    assert log.bytes == devices * (devices - 1) * result.dtype.itemsize


def sharers_of(message: tuple[Any, ...]) -> int:
    """Returns the lesser number of the two devices of a message: 0 if one of them is the first device."""
    return min(message[2].id, message[3].id)


def test_a_split_dimension_sends_one_slice_for_each_pair_of_devices() -> None:
    mesh = st.AbstractMesh((4096,), ("x",))
    x = st.empty((1 << 20, 8), dtype="float32", device=st.NamedSharding(mesh, P("x")))
    assert st.simulate(lambda x: st.cumulative_sum(x, axis=0), x).bytes == 4096 * 4095 * 8 * 4
    assert st.simulate(lambda x: st.cumulative_sum(x, axis=1), x).bytes == 0


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int8", "bool"])
@pytest.mark.parametrize("name", ["cumulative_sum", "cumulative_prod"])
def test_small_operands_get_the_bits_of_the_algorithm(name: str, dtype: str) -> None:
    """Where devices share the host's memory, all shards of a small operand are computed at once."""

    @hypothesis.settings(max_examples=drawn(80))
    @hypothesis.given(
        shape=some.lists(some.sampled_from([0, 1, 2, 3, 5, 8, 13, 40]), min_size=1, max_size=3),
        grid=some.sampled_from([(1,), (2,), (3,), (8,), (2, 3)]),
        data=some.data(),
    )
    def run(shape: list[int], grid: tuple[int, ...], data: Any) -> None:
        mesh = mesh_of(grid, "numpy")
        split, axis = [data.draw(some.integers(0, len(shape) - 1)) for _ in range(2)]
        names = data.draw(some.permutations(mesh.axis_names))
        spec = P(*[None] * split, tuple(names[: data.draw(some.integers(1, len(names)))]))
        rng = np.random.default_rng(len(shape))
        x = (rng.normal(size=shape) * 10 ** rng.uniform(-2, 2, shape)).astype(dtype)
        placed = st.device_put(x, st.NamedSharding(mesh, spec))
        with np.errstate(all="ignore"):
            small = getattr(st, name)(placed, axis=axis)
            with st.transfers():
                general = getattr(st, name)(placed, axis=axis)
        assert (small.dtype, small.sharding) == (general.dtype, general.sharding)
        assert np.asarray(small).tobytes() == np.asarray(general).tobytes()

    run()


ACCUMULATED = {
    "logaddexp": "fi", "logaddexp2": "f", "hypot": "fi", "maximum": "fib", "minimum": "fib", "fmax": "f", "fmin": "f",
    "logical_and": "fib", "logical_or": "fib", "logical_xor": "fib", "bitwise_and": "ib", "bitwise_or": "i",
    "bitwise_xor": "ib", "gcd": "i",
}  # fmt: skip


@everywhere
@pytest.mark.parametrize("name", ACCUMULATED)
def test_associative_ufuncs_accumulate_along_split_dimensions(backend: str, name: str) -> None:
    """As in NumPy, in the sharding of the operand, and without gathering: only totals of parts are sent."""
    ufunc, rng, mesh = getattr(np, name), np.random.default_rng(0), mesh_of((2, 3), backend)
    operands = {
        "f": lambda s: rng.normal(size=s),
        "i": lambda s: rng.integers(-8, 9, s),
        "b": lambda s: rng.random(s) > 0.5,
    }
    for kind in ACCUMULATED[name]:
        for shape, spec in [((23,), P(("x", "y"))), ((3,), P("y")), ((5, 7), P("x", "y")), ((0, 4), P("x"))]:
            x = operands[kind](shape)
            if kind == "f" and name not in ("logaddexp", "logaddexp2", "hypot"):
                x[x > 1] = np.nan
            placed, expected = st.device_put(x, st.NamedSharding(mesh, spec)), ufunc.accumulate(x)
            found = ufunc.accumulate(placed)
            assert (found.dtype, found.sharding) == (expected.dtype, placed.sharding)
            np.testing.assert_allclose(found, expected, rtol=1e-14)


@everywhere
@pytest.mark.parametrize("name", ["maximum", "logaddexp"])
def test_parts_without_elements_are_between_others(backend: str, name: str) -> None:
    """Two elements are divided over y first, so that the second and the fourth part have none."""
    ufunc, mesh = getattr(np, name), mesh_of((2, 2), backend)
    for shape, spec, axis in (((2,), P(("y", "x")), 0), ((3, 2), P(None, ("y", "x")), 1), ((0,), P("x"), 0)):
        x = np.random.default_rng(0).normal(size=shape) - 10
        found = ufunc.accumulate(st.device_put(x, st.NamedSharding(mesh, spec)), axis=axis)
        np.testing.assert_allclose(np.asarray(found), ufunc.accumulate(x, axis=axis), rtol=1e-12)


@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize("name", ["logcumsumexp", "maximum.accumulate"])
def test_only_totals_are_sent(name: str, devices: int) -> None:
    x = np.random.default_rng(0).normal(size=3 * GATHERED // 8)
    placed = st.device_put(x, st.NamedSharding(mesh_of((devices,), "checked"), P("x")))
    with st.transfers() as log:
        found = SCANS[name](placed)
    ufunc = np.logaddexp if name == "logcumsumexp" else np.maximum
    np.testing.assert_allclose(found, ufunc.accumulate(x), rtol=1e-14)
    assert log.bytes == devices * (devices - 1) * 8


def test_logcumsumexp_does_not_overflow() -> None:
    x = np.array([1000.0, 1000.0, -np.inf, 1001.0, np.nan])
    with np.errstate(invalid="ignore"):  # NumPy's logaddexp warns of NaN, too.
        found = st.logcumsumexp(st.device_put(x, st.NamedSharding(mesh_of((3,), "checked"), P("x"))))
    np.testing.assert_allclose(found, [1000, 1000 + np.log(2), 1000 + np.log(2), 1001 + np.log1p(2 / np.e), np.nan])
    assert st.logcumsumexp(st.asarray([-np.inf, -np.inf])).tolist() == [-np.inf, -np.inf]
    assert st.logcumsumexp(st.asarray(2.0)).tolist() == [2.0]
    assert st.logcumsumexp(st.asarray([1, 2])).dtype == np.float64
    with pytest.raises(st.AxisError):
        st.logcumsumexp(st.ones((2, 2)))
    with pytest.raises(TypeError, match="logaddexp"):
        st.logcumsumexp(st.ones(2, dtype="complex128"))


def test_logcumsumexp_is_the_first_function_that_is_called() -> None:
    """What it calls is declared in another module, which nothing else has imported."""
    code = "import shardtensor as st; print(st.logcumsumexp(st.zeros(2))[0].item())"
    assert output_of(new_process("-c", code)) == "0.0\n"


@everywhere
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_of_negative_zeros_are_negative_zeros(backend: str, dtype: str) -> None:
    host = np.array([[-0.0, -0.0, 0.0], [-0.0, 0.0, -0.0], [-0.0, 1.0, -1.0], [-0.0, -0.0, -0.0]], dtype)
    for axis, spec in ((0, P(None, "x")), (1, P("x"))):
        x = st.device_put(host, st.NamedSharding(mesh_of((2,), backend), spec))
        found, wanted = np.asarray(st.cumulative_sum(x, axis=axis)), np.cumsum(host, axis=axis)
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


@everywhere
def test_inside_of_maps(backend: str) -> None:
    x = np.arange(12.0).reshape(6, 2)
    parts = st.shard(x, devices=st.devices(backend)[:3])
    found = st.unshard(st.pmap(lambda b: st.cumulative_sum(b, axis=0, include_initial=True)[1:], parts))
    np.testing.assert_array_equal(found, np.concatenate([np.cumsum(b, axis=0) for b in np.split(x, 3)]))
    found = st.unshard(st.pmap(lambda b: st.logcumsumexp(b, axis=0), parts))
    np.testing.assert_allclose(found, np.concatenate([np.logaddexp.accumulate(b, axis=0) for b in np.split(x, 3)]))


@pytest.mark.parametrize("shape", [(4, 700), (700, 4), (3, 2, 600), (1, 5), (5, 1), (0, 4), (4, 0)])
def test_long_and_short_rows(shape: Any) -> None:
    x = np.random.default_rng(1).integers(-5, 5, shape)
    for axis in range(len(shape)):
        for axes in range(len(shape)):
            placed = st.device_put(x, st.NamedSharding(mesh_of((3,), "numpy"), P(*[None] * axes, "x")))
            np.testing.assert_array_equal(st.cumulative_sum(placed, axis=axis), np.cumsum(x, axis=axis))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("backend", ["numpy", "checked"])
def test_floating_point_errors_are_reported_once(backend: str, axis: int) -> None:
    x = st.device_put(np.full((600, 700), 1e30, "float32"), st.NamedSharding(mesh_of((4,), backend), P(None, "x")))
    with np.errstate(over="warn"), pytest.warns(RuntimeWarning) as seen:
        st.cumulative_prod(x, axis=axis)
    assert [str(w.message) for w in seen] == ["overflow encountered in accumulate"]
    with np.errstate(over="raise"), pytest.raises(FloatingPointError, match="overflow encountered in accumulate"):
        st.cumulative_prod(x, axis=axis)


def test_arguments() -> None:
    with pytest.raises(st.AxisError, match="cumulative_sum: axis is None, and x has 2 dimensions"):
        st.cumulative_sum(st.ones((2, 2)))
    with pytest.raises(st.AxisError, match="cumulative_prod"):
        st.cumulative_prod(st.ones(3), axis=1)
    assert st.cumulative_sum(np.array([True, True])).dtype == np.int64
    assert st.cumulative_sum(st.ones(3, dtype="int8"), dtype="float32").dtype == np.float32
    assert not st.cumulative_sum(np.ones(3)).committed
