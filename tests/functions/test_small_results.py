"""Small results that NumPy computes from whole arrays equal those of compositions, in bits and layouts."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.core import OPS, composition, recorded
from shardtensor.errors import AxisError
from shardtensor.interpreters import small_results
from shardtensor.interpreters.programs.whole_buffers import BufferProgram
from tests.draws import drawn
from tests.layouts import mesh_of, meshes, specs
from tests.numpy_calls import FFT, LINALG, MAIN, Operands
from tests.numpy_table import leaves

_MADE_BY = composition(lambda: None)(lambda: None).__code__  # type: ignore[attr-defined]


def _is_declared(module: Any, name: str) -> bool:
    function = getattr(module, name, None)
    op = OPS.get(name)
    return getattr(function, "__code__", None) is _MADE_BY or bool(op and op.dispatch is function and op.parts.small)


CALLS: dict[str, Callable[[Any], Any]] = {
    **{name: call for name, call in MAIN.items() if _is_declared(st, name)},
    **{f"fft.{name}": call for name, call in FFT.items() if _is_declared(st.fft, name)},
    "linspace": MAIN["linspace"], "logspace": MAIN["logspace"], "geomspace": MAIN["geomspace"],
    **{name: MAIN[name] for name in ("cov", "corrcoef", "polyfit")},
    **{f"linalg.{name}": LINALG[name] for name in ("lstsq", "tensorinv", "tensorsolve")},
    "cov, complex": lambda o: np.cov(o.c, o.x, ddof=0),
    "corrcoef, complex": lambda o: np.corrcoef(o.c),
    "nanvar, rows": lambda o: np.nanvar(o.f, axis=1, ddof=1, keepdims=True),
    "nanstd, all": lambda o: np.nanstd(o.f),
    "nancumsum, flat": lambda o: np.nancumsum(o.f),
    "trapezoid, points": lambda o: np.trapezoid(o.v, o.s),
    "choose, clip": lambda o: np.choose(o.k, [o.v, o.w], mode="clip"),
    "convolve, same": lambda o: np.convolve(o.s[:5], o.v, "same"),
    "correlate, full": lambda o: np.correlate(o.g, o.g[:4], "full"),
    "correlate, longer second": lambda o: np.correlate(o.g[:3], o.g, "same"),
    "cumulative_sum of integers": lambda o: np.cumulative_sum(o.n, axis=0, include_initial=True),
    "cumulative_prod of bools": lambda o: np.cumulative_prod(o.b, axis=1, dtype=np.int8),
    "cumsum": lambda o: np.cumsum(o.u),
    "gradient, two axes": lambda o: np.gradient(o.x, 0.1, o.v[: o.x.shape[1]], edge_order=2),
    "histogram, integers": lambda o: np.histogram(o.n, 7, (0, 5)),
    "histogram, density": lambda o: np.histogram(o.x, [-1.0, 0.0, 0.5, 2.0], density=True),
    "histogram, weights": lambda o: np.histogram(o.v, 4, weights=o.w),
    "histogram2d, weights": lambda o: np.histogram2d(o.v, o.w, 3, weights=o.w),
    "isclose, NaN": lambda o: np.isclose(o.f, o.f, equal_nan=True),
    "median of NaN": lambda o: np.median(o.f, axis=1, keepdims=True),
    "nanquantile of two dimensions": lambda o: np.nanquantile(o.f, np.array([[0.25, 0.5], [0.75, 1.0]]), axis=0),
    "percentile, lower": lambda o: np.percentile(o.n, [10, 20], axis=1, method="lower"),
    "take of rows": lambda o: np.take(o.x, o.k[:3] % 2, axis=0),
}  # fmt: skip


def computed(call: Callable[[Any], Any], operands: Any) -> list[Any] | type[Exception]:
    """The results of a call, or the class of its error."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return leaves(call(operands))
        except (ArithmeticError, IndexError, TypeError, ValueError) as error:
            return type(error)


def assert_same_outcome(found: Any, wanted: Any, *, to_the_bit: bool = True) -> None:
    if not isinstance(wanted, list):
        assert found is wanted
        return
    assert isinstance(found, list)
    for x, y in zip(found, wanted, strict=True):
        if not isinstance(y, st.ShardedTensor):  # the rank of lstsq; what poly and roots return for no elements
            assert type(x) is type(y)
            np.testing.assert_array_equal(x, y)
            continue
        assert (x._aval, x._is_scalar) == (y._aval, y._is_scalar)
        if to_the_bit:
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
        else:
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-12)


@pytest.mark.parametrize("backend", ["numpy", "checked"], indirect=True)
def test_elements_and_layouts_are_those_of_the_composition(backend: str) -> None:
    @hypothesis.settings(max_examples=drawn(120) if backend == "numpy" else drawn(20, fast=10))
    @hypothesis.given(name=some.sampled_from(sorted(CALLS)), data=some.data())
    def run(name: str, data: Any) -> None:
        check_composition(name, data, backend)

    run()


@pytest.mark.full
@pytest.mark.parametrize("name", CALLS)
def test_every_composition(name: str) -> None:
    @hypothesis.settings(max_examples=drawn(25))
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        check_composition(name, data, "numpy")

    run()


def check_composition(name: str, data: Any, backend: str) -> None:
    rows, columns = data.draw(some.integers(0, 40), "rows"), data.draw(some.integers(0, 6), "columns")
    mesh, narrow = data.draw(meshes(backend), "mesh"), data.draw(some.booleans(), "narrow")

    def place(x: np.ndarray) -> st.ShardedTensor:
        small = {"f": "f4", "c": "c8", "i": "i2"}.get(x.dtype.kind) if narrow else None
        return st.device_put(x.astype(small or x.dtype), st.NamedSharding(mesh, data.draw(specs(mesh, x.ndim))))

    operands = Operands(place, rows=rows, columns=columns)
    placed = {n: place(x) for n, x in operands._arrays.items()}
    kept = {n: np.array(x) for n, x in placed.items()}
    view = type("Placed", (), placed)
    with st.transfers():  # They are counted, so that the composition runs.
        wanted = computed(CALLS[name], view)
    for _ in range(3):  # The layout is inferred at the second call.
        assert_same_outcome(computed(CALLS[name], view), wanted)
    for n, x in placed.items():
        np.testing.assert_array_equal(np.asarray(x), kept[n])


def test_one_call_of_numpy_computes_repeated_small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    x = st.device_put(np.linspace(0, 1, 24).reshape(8, 3), mesh_of((4,), "numpy"))
    hosts: list[Any] = []
    known = small_results._computed
    monkeypatch.setattr(small_results, "_computed", lambda host, *rest: hosts.append(host) or known(host, *rest))
    for atol in (0.1, 0.1, 0.1, 0.2):
        st.isclose(x, 0.5, atol=atol)
    assert hosts == [np.isclose] * 2  # Neither at the first call, nor for another number.
    for _ in range(2):
        st.percentile(x, 20)
    assert len(hosts) == 3
    st.isclose(np.ones(3), 0.5)  # Host arrays have no layout.
    st.choose(st.asarray([0, 1]), [x[0, :2], x[1, :2]])
    with st.transfers():  # The composition runs, and calls the operator quantile.
        st.percentile(x, 20)
    assert len(hosts) == 4
    large = st.zeros((1 << 15,))
    for _ in range(3):
        st.isclose(large, 1.0)
    assert len(hosts) == 4


def test_recorded_operators_run_again_for_other_elements() -> None:
    mesh = mesh_of((3,), "numpy")
    rng = np.random.default_rng(0)
    for _ in range(4):
        x, y = rng.normal(size=(2, 10, 4))
        x[0, 0] = np.nan
        a, b = st.device_put(x, mesh), st.device_put(y, mesh)
        np.testing.assert_allclose(st.nanvar(a, axis=0), np.nanvar(x, axis=0))
        np.testing.assert_allclose(st.cov(b.T, a.T), np.cov(y.T, x.T))
        np.testing.assert_allclose(st.linalg.lstsq(b, b[:, 0])[0], np.linalg.lstsq(y, y[:, 0])[0], atol=1e-12)
    assert any(isinstance(layout, BufferProgram) for layout in small_results._layouts.values())


def test_results_of_recorded_operators_share_no_memory() -> None:
    mesh = mesh_of((3,), "numpy")

    @composition(recorded)
    def changed(x: Any) -> Any:
        return st.matrix_transpose(x + 1), st.asarray([1.0, 2.0])

    @composition(recorded)
    def viewed(x: Any) -> Any:
        return st.matrix_transpose(x)

    x = st.device_put(np.ones((4, 4)), mesh)
    for _ in range(4):
        first, second = changed(x)
        first += 1
        second += 1
        assert first.tolist() == [[3.0] * 4] * 4
        assert second.tolist() == [2.0, 3.0]
        y = viewed(x)
        y[0, 1] = 5
        assert x[1, 0] == 5
        x[1, 0] = 1


def test_sums_and_derivatives_are_rounded_alike_in_every_call() -> None:
    """Neither the order of sums nor the dtype of coordinates depends on how often a function was called."""
    rng = np.random.default_rng(3)
    mesh = mesh_of((4,), "numpy")
    v, w = [st.device_put(rng.normal(size=97), mesh) for _ in range(2)]
    calls: list[Callable[[], Any]] = [
        lambda: np.histogram2d(v, w, 3, weights=w)[0],
        lambda: np.histogramdd([v, w], 3, None, None, w)[0],
        lambda: np.histogramdd([v, w], 3, density=True)[0],
    ]
    for dtype in ("f2", "f4", "f8"):
        x = v.astype(dtype)
        for h in (0.3, np.float64(0.3), np.cumsum(rng.random(97)), np.linspace(0, 3, 97).astype("f2")):
            calls += [lambda x=x, h=h, order=order: np.gradient(x, h, edge_order=order) for order in (1, 2)]
    for call in calls:
        with st.transfers():  # They are counted, so that the composition runs.
            wanted = call()
        for _ in range(3):
            assert_same_outcome([call()], [wanted])


def test_operands_are_not_written(backend: str) -> None:
    """NumPy writes to an operand: the call is that of the composition, which writes to the tensor."""
    x = st.device_put(np.array([1.0, np.nan, 3.0]), mesh_of((2,), backend))
    for _ in range(3):
        y = x.copy()
        assert np.nan_to_num(y, copy=False) is y
        assert y.tolist() == [1, 0, 3]
        out = st.zeros(2, device=x.sharding.mesh)
        assert np.choose([1, 0], [x[:2], x[1:]], out=out) is out
        assert out.tolist()[0] != out.tolist()[0]


def test_signatures_are_those_of_the_functions() -> None:
    assert list(inspect.signature(st.isclose).parameters) == ["a", "b", "rtol", "atol", "equal_nan"]
    assert st.isclose.__doc__
    assert st.isclose.__name__ == "isclose"


def test_errors_begin_with_the_name_of_a_function(backend: str) -> None:
    x = st.device_put(np.ones((4, 3)), mesh_of((2,), backend))
    calls: dict[str, Callable[[], Any]] = {
        "trapezoid": lambda: st.trapezoid(x, axis=5),
        "unwrap": lambda: st.unwrap(x, axis=5),
        "average": lambda: st.average(x, axis=5),
        "fftn": lambda: st.fft.fft2(x, axes=(0, 5)),
        "fftshift": lambda: st.fft.fftshift(x, 5),
        "put_along_axis": lambda: st.put_along_axis(x, np.zeros((1, 1), int), 1, 5),
        "norm": lambda: st.linalg.norm(x, axis=5),
    }
    for name, call in calls.items():
        with pytest.raises(AxisError, match=f"^{name}: axis 5 is out of range"):
            call()


def test_errors_do_not_name_operators_of_which_a_function_is_composed(backend: str) -> None:
    x = st.device_put(np.ones((4, 3)), mesh_of((2,), backend))
    text: Any = "a"
    calls: dict[str, Callable[[], Any]] = {
        "cov: y has 2 observations; wanted as many as m has, 3": lambda: st.cov(x, np.ones((1, 2))),
        "cov: dtype <U3": lambda: st.cov(x, dtype="U3"),
        "place: mask has shape (5,); wanted 12 elements": lambda: st.place(x, np.ones(5, bool), 1),
        "place: dtype <U1": lambda: st.place(x, x > 3, [text]),
        "place: arr is a list; wanted a tensor": lambda: st.place([1, 2], [True, False], 1),  # type: ignore[arg-type]
        "putmask: a is a list; wanted a tensor": lambda: st.putmask([1], [True], 1),  # type: ignore[arg-type]
        "putmask: 'a' is a str": lambda: st.putmask(x, x > 3, text),
        "fill_diagonal: a is an int; wanted a tensor": lambda: st.fill_diagonal(3, 1),  # type: ignore[arg-type]
        "put_along_axis: arr is a list": lambda: st.put_along_axis([1], [0], 1, 0),  # type: ignore[arg-type]
        "put: index 12 is out of bounds for 12 elements": lambda: x.put([0, 12], 1),
        "put: indices have dtype complex128": lambda: x.put([1j], 1),
        "put: value 1j": lambda: x.put([1], 1j),
        "put: 'a' is a str": lambda: x.put([1], text),
        "linspace: dtype <U3": lambda: np.linspace(x, 3, dtype="U3"),
        "take: index 7 is out of bounds for axis 1 with size 3": lambda: st.take(x, [7], axis=1),
        "apply_along_axis: axis 5": lambda: st.apply_along_axis(np.sum, 5, x),
        "matmul: ": lambda: st.apply_along_axis(lambda line: st.matmul(line, line[:1]), 0, x),
    }
    for message, call in calls.items():
        for log in (contextlib.nullcontext(), st.transfers()):
            with log, pytest.raises(st.ShardTensorError, match=f"^{re.escape(message)}"):
                call()


@composition(recorded)
def _scaled(x: Any, factor: Any) -> Any:
    return st.multiply(x, factor)


def test_recorded_operators_distinguish_zeros_of_both_signs() -> None:
    ones = np.ones(3)
    for _ in range(4):
        for factor in (0.0, -0.0, np.float32(0), np.float32(-0.0), complex(0.0, 1.0), complex(-0.0, 1.0)):
            found, wanted = np.asarray(_scaled(st.asarray(ones), factor)), ones * factor
            np.testing.assert_array_equal(np.signbit(found.real), np.signbit(wanted.real), f"{factor!r}")


@composition(recorded)
def _of_several_kinds(x: Any, y: Any) -> Any:
    """Steps on buffers and on tensors: views, sums of arrays in both orders, an algorithm, and a 0-d array."""
    turned = st.multiply(st.matrix_transpose(x), 2)  # Its buffer is in column-major order.
    ordered = st.sort(turned, axis=0)
    total = st.sum(turned, axis=1)
    return total, st.matmul(st.cumulative_sum(x, axis=0)[1:], ordered), st.asarray(st.max(total)), st.add(y, st.mean(x))


def test_recorded_operators_are_those_of_the_composition(backend: str) -> None:
    mesh = mesh_of((3,), backend)
    for shape in ((7, 5), (6, 6), (2, 3)):
        for spec in (st.P("x"), st.P(None, "x"), st.P()):
            x, y = [np.random.default_rng(k).normal(size=shape[k:]) for k in (0, 1)]
            given = [st.device_put(x, st.NamedSharding(mesh, spec)), st.device_put(y, mesh)]
            with st.transfers():
                wanted = list(_of_several_kinds(*given))
            for _ in range(4):  # CuPy's sums depend on the order of the dimensions in memory.
                assert_same_outcome(list(_of_several_kinds(*given)), wanted, to_the_bit=backend != "cupy")
            found = _of_several_kinds(*given)
            found[2][...] = 3  # It is an array.
            assert found[2].tolist() == 3


def test_views_of_recorded_results_are_no_scalars() -> None:
    x = st.device_put(np.array([1.0, 2.0, 4.0]), mesh_of((2,), "numpy"))
    for _ in range(3):
        found = st.cov(x)
        found[...] = 5
        assert found.tolist() == 5


def test_small_floats_are_promoted_alike_in_every_call() -> None:
    pytest.importorskip("ml_dtypes")
    x = st.device_put(np.array([1.5469, 9, -0.0188, 20]).astype(st.bfloat16), mesh_of((2,), "numpy"))
    for call in (np.polyint, np.unwrap):
        with st.transfers():  # They are counted, so that the composition runs.
            wanted = call(x)
        for _ in range(3):
            assert_same_outcome([call(x)], [wanted])


def test_an_array_of_zeros_has_nothing_left_along_any_axis_that_is_trimmed(backend: str) -> None:
    if np.lib.NumpyVersion(np.__version__) < "2.2.0":
        pytest.skip("this NumPy trims arrays of one dimension only")
    for shape in ((3, 4), (3, 0)):
        a = np.zeros(shape)
        x = st.asarray(a, device=mesh_of((2,), backend))
        for trim in ("fb", "f", "b"):
            for axis in (None, 0, 1, (0, 1)):
                wanted = np.trim_zeros(a, trim, axis=axis).shape
                assert st.trim_zeros(x, trim, axis=axis).shape == wanted
                with st.transfers():
                    assert st.trim_zeros(x, trim, axis=axis).shape == wanted


def test_large_elementwise_compositions_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their results and their warnings are those of the operators one by one, and NumPy's."""
    monkeypatch.setattr(small_results, "_LARGE_BYTES", 0)
    host = np.array([[1.5, -2.0, 0.0], [np.nan, np.inf, -np.inf], [-0.0, 1e300, 3.0]])
    x, y = [st.device_put(z, mesh_of((2,), "numpy")) for z in (host, host[:, ::-1].copy())]
    calls: list[Callable[[Any, Any], Any]] = [
        lambda a, b: np.isclose(a, b),
        lambda a, b: np.isclose(a, b, equal_nan=True),
        lambda a, b: np.nan_to_num(a, nan=7.0),
        lambda a, b: np.nan_to_num(a, posinf=-1.0, neginf=2.0),
        lambda a, b: np.isposinf(a),
        lambda a, b: np.isneginf(b),
        lambda a, b: np.nansum(np.minimum(a, 5), axis=1),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in calls:
            for _ in range(3):
                np.testing.assert_array_equal(np.asarray(call(x, y)), call(host, np.asarray(y)), strict=True)
