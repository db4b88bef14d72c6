"""The simulated CuPy: it computes NumPy's results, runs work late, and detects the faults that it simulates."""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests import fakecupy
from tests.scripts import new_process, output_of

X = np.arange(12, dtype=np.float32).reshape(3, 4) - 4


@pytest.fixture(params=["random", "lazy", "eager"])
def cupy(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The double on two GPUs, with each scheduler; a test that makes a race takes it off the list."""
    yield fakecupy.install(devices=2, scheduler=request.param)
    left = list(fakecupy.races)
    fakecupy.uninstall()
    assert left == []


@pytest.fixture
def lazy() -> Iterator[Any]:
    """The simulated CuPy, where work runs only when a caller waits."""
    yield fakecupy.install(devices=2, scheduler="lazy")
    fakecupy.uninstall()


def streams(cp: Any, *devices: int) -> list[Any]:
    """A non-blocking stream of each device, made current there in this thread."""
    made = []
    for device in devices:
        with cp.cuda.Device(device):
            made.append(cp.cuda.Stream(non_blocking=True).use())
    return made


# -- values ----------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "arithmetic": lambda xp, x: (x * 2 + x - 1) / (x * x + 0.5),
    "mirrored": lambda xp, x: 2 - x + 1 / (x + 0.25) + 2**x,
    "matmul": lambda xp, x: x @ x.T,
    "compare": lambda xp, x: (x > 0) & (x <= 3) | ~(x == 5),
    "unary": lambda xp, x: abs(-x),
    "numpy scalar": lambda xp, x: np.float64(2) * x + np.int8(1),
    "integers": lambda xp, x: x.astype(xp.int32) // 3 % 2 << 1,
    "reductions": lambda xp, x: xp.stack([x.sum(), x.mean(), x.max(), x.min(), x.std(), x.prod()]),
    "axis": lambda xp, x: x.sum(axis=1, keepdims=True) + x.argmax(0),
    "where": lambda xp, x: xp.where(x > 0, x, -x),
    "joining": lambda xp, x: xp.concatenate([x, x[::-1]], axis=0),
    "view chain": lambda xp, x: x.T.reshape(2, 6)[:, ::-2].swapaxes(0, 1).ravel(),
    "expand": lambda xp, x: xp.squeeze(xp.expand_dims(x, 0), axis=0) + xp.broadcast_to(x[0], x.shape),
    "take": lambda xp, x: xp.take(x, xp.asarray([2, 0]), axis=1),
    "advanced": lambda xp, x: x[[2, 0]][:, xp.asarray([1, 1, 3])],
    "two arrays": lambda xp, x: x[xp.asarray([0, 1]), xp.asarray([1, 2])],
    "mask": lambda xp, x: x[x > 0],
    "nonzero": lambda xp, x: xp.nonzero(x)[1],
    "unique": lambda xp, x: xp.unique(x % 3),
    "sort": lambda xp, x: xp.sort(-x, axis=1),
    "cumsum": lambda xp, x: xp.cumsum(x, axis=1),
    "einsum": lambda xp, x: xp.einsum("ij,kj->ik", x, x),
    "tensordot": lambda xp, x: xp.tensordot(x, x, axes=([1], [1])),
    "linalg": lambda xp, x: xp.linalg.solve(x[:, :3] + 9 * xp.eye(3), x[:, 3:]),
    "svd": lambda xp, x: xp.linalg.svd(x, full_matrices=False)[1],
    "fft": lambda xp, x: xp.fft.ifft(xp.fft.fft(x)).real,
    "complex": lambda xp, x: (x + 1j * x).conj().imag,
    "reduce": lambda xp, x: xp.add.reduce(x, axis=1) + xp.maximum.accumulate(x, axis=0)[:, 0],
    "clip": lambda xp, x: xp.clip(x, -1, 2).round(1),
    "full": lambda xp, x: xp.full((2, 2), 7) + xp.zeros_like(x[:2, :2]) + xp.arange(2) + xp.linspace(0, 1, 2),
    "empty": lambda xp, x: xp.concatenate([x[:0], x[:0]]).sum(axis=0),
    "divide by zero": lambda xp, x: x / (x - x),
    "0-d": lambda xp, x: x[1, 2] + x.sum() * 2,
    "numpy's protocol": lambda xp, x: np.sum(np.sin(x), axis=0),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy's own
def test_values_are_numpys(cupy: Any, name: str) -> None:
    expected = CALLS[name](np, X)
    found = CALLS[name](cupy, cupy.asarray(X))
    assert isinstance(found, cupy.ndarray)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found.get(), expected, rtol=1e-5)


def test_writes(cupy: Any) -> None:
    x, y = X.copy(), cupy.asarray(X)
    for a, xp in ((x, np), (y, cupy)):
        a[1] = 7
        a[:, ::2] += 1
        a[a > 6] = -1
        a[xp.asarray([0, 2]), 1] = xp.asarray([5, 6], dtype=a.dtype)
        a *= 2
        xp.add(a, 1, out=a)
        a.T[0] = a[:, 1]
        xp.copyto(a[2], a[0])
    np.testing.assert_array_equal(y.get(), x)
    y.fill(3)
    assert y.tolist() == np.full(X.shape, 3).tolist()
    with pytest.raises(ValueError, match="broadcast"):
        y[:] = cupy.ones(3)
    with pytest.raises(TypeError):
        cupy.add(y, 1j, out=y)


def test_what_is_broadcast_can_be_written(cupy: Any) -> None:
    a = cupy.zeros(3)
    for wide in (cupy.broadcast_to(a, (1, 3)), cupy.broadcast_to(a, (2, 3))):
        assert wide.base is a
        wide += 1
        cupy.broadcast_to(a[1:], (2, 2))[0] = 7
    assert a.tolist()[1:] == [7, 7]


def test_indices_out_of_bounds_wrap(cupy: Any) -> None:
    a = cupy.arange(3)
    assert a[[1, 3]].tolist() == [1, 0]
    a[[1, 3]] = 10
    assert a.tolist() == [10, 10, 2]


def test_keywords_that_cupy_lacks(cupy: Any) -> None:
    x = cupy.asarray(X)
    with pytest.raises(TypeError, match="keyword argument 'where'"):
        cupy.sum(x, where=x > 0)
    with pytest.raises(TypeError, match="keyword argument 'keepdims'"):
        cupy.count_nonzero(x, keepdims=True)


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        *[(f"logical_{name}", ("complex64", "complex64")) for name in ("and", "or", "xor")],
        ("logical_not", ("complex128",)),
        ("logical_or", ("float32", "complex64")),
        ("bitwise_and", ("float32", "int32")),
        ("arctan2", ("complex64", "float32")),
        ("subtract", ("bool", "bool")),
        ("negative", ("bool",)),
        ("floor", ("complex64",)),
    ],
)
def test_dtypes_that_cupy_has_no_loop_for(cupy: Any, name: str, dtypes: tuple[str, ...]) -> None:
    with pytest.raises(TypeError):
        getattr(cupy, name)(*[cupy.ones(3, d) for d in dtypes])


def test_numbers_are_weak_as_in_cupy(cupy: Any) -> None:
    small = cupy.ones(3, cupy.int8)
    assert [(small + s).dtype for s in (1, 2.5, 1j, True)] == ["int8", "float64", "complex128", "int8"]
    assert [(X.dtype, (cupy.asarray(X) * s).dtype) for s in (2, 2.5)] == [("float32", "float32")] * 2
    assert (cupy.asarray(X) * 1j).dtype == "complex64"
    assert (small < 300).tolist() == [True] * 3
    for attempt in (lambda: small + 300, lambda: small < 2**70, lambda: cupy.asarray(X) * 2**70):
        with pytest.raises(OverflowError):
            attempt()
    assert cupy.logical_and(-small, cupy.ones(3, cupy.uint64)).tolist() == [False] * 3  # as its kernel computes it


def test_fused_functions_are_one_launch(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @cupy.fuse
    def both(x: Any, y: Any) -> Any:
        return cupy.add(x, y), cupy.multiply(cupy.maximum(x, y), x)

    @cupy.fuse(kernel_name="thrice")
    def other(x: Any) -> Any:
        return cupy.add(cupy.add(x, x), x)

    a, b = cupy.arange(3, dtype="f4"), cupy.ones((2, 1), "f4")
    names, world = [], fakecupy._world.world
    launch = world.launch
    monkeypatch.setattr(
        world, "launch", lambda name, *args, **kwargs: (names.append(name), launch(name, *args, **kwargs))[1]
    )
    total, product = both(a, b)
    tripled = other(a)
    assert names == ["both", "thrice"]
    assert (total.dtype, total.get().tolist()) == ("f4", [[1, 2, 3]] * 2)
    assert (product.get().tolist(), tripled.get().tolist()) == ([[0, 1, 4]] * 2, [0, 3, 6])
    with pytest.raises(ValueError, match="no name of a kernel"):
        cupy.fuse(lambda x: x)


def test_where_takes_arrays_as_conditions(cupy: Any) -> None:
    assert cupy.where(cupy.asarray([1, 0]), 1, 2.5).tolist() == [1, 2.5]
    with pytest.raises(AttributeError):
        cupy.where(True, cupy.ones(2), 0)
    with pytest.raises(OverflowError):
        cupy.where(cupy.asarray([True]), cupy.ones(1, cupy.int8), 300)


def test_host_arrays_do_not_mix(cupy: Any) -> None:
    a = cupy.asarray(X)
    for attempt in (
        lambda: a + X,
        lambda: X + a,
        lambda: cupy.sum(X),
        lambda: cupy.concatenate([a, X]),
        lambda: np.concatenate([a, X]),
        lambda: np.asarray(a),
    ):
        with pytest.raises(TypeError):
            attempt()
    with pytest.raises(ValueError, match="non-scalar"):
        a[0] = X[0]


def test_conversions(cupy: Any) -> None:
    a = cupy.asarray(3.5)
    assert (float(a), int(a), bool(a), a.item(), complex(a), f"{a:.2f}") == (3.5, 3, True, 3.5, 3.5 + 0j, "3.50")
    assert repr(cupy.arange(3)) == "array([0, 1, 2])"
    with pytest.raises(ValueError, match="ambiguous"):
        bool(cupy.arange(3))
    with pytest.raises(TypeError):
        hash(a)
    assert len(cupy.asarray(X)) == 3
    assert [float(r[0]) for r in cupy.asarray(X)] == X[:, 0].tolist()
    assert cupy.asarray([cupy.ones(2), cupy.zeros(2)]).tolist() == [[1, 1], [0, 0]]


def test_singular_systems_give_nan(cupy: Any) -> None:
    assert np.isnan(cupy.linalg.inv(cupy.zeros((2, 2))).get()).all()


def test_eigenvalues_are_complex(cupy: Any) -> None:
    values, vectors = cupy.linalg.eig(cupy.asarray([[0.0, 1.0], [-1.0, 0.0]]))
    assert values.dtype == vectors.dtype == cupy.linalg.eigvals(cupy.eye(2)).dtype == np.complex128
    assert sorted(values.get().imag) == [-1, 1]


def test_array_api_compat(cupy: Any) -> None:
    import array_api_compat
    import array_api_compat.cupy as xp

    x = xp.asarray(X)
    assert array_api_compat.is_cupy_array(x)
    assert array_api_compat.array_namespace(x) is xp
    with cupy.cuda.Device(1):
        y = xp.asarray([1, 2], device=cupy.cuda.Device(0))
    assert array_api_compat.device(y) == cupy.cuda.Device(0)
    np.testing.assert_array_equal(xp.permute_dims(xp.astype(x, xp.float64), (1, 0)).get(), X.T)
    assert xp.unique_counts(x)[1].sum() == X.size
    assert xp.__array_namespace_info__().devices() == (cupy.cuda.Device(0), cupy.cuda.Device(1))


def test_modules_come_and_go() -> None:
    before = sys.modules.get("cupy")
    fakecupy.install()
    try:
        import cupy
        import cupyx
        from cupy.cuda import Device, nccl, runtime
        from cupy.cuda.device import Device as Same
        from cupy.cuda.memory import OutOfMemoryError

        assert Device is Same
        assert issubclass(OutOfMemoryError, MemoryError)
        assert runtime.getDeviceCount() == 2
        assert cupy.is_available()
        assert hasattr(nccl, "NcclCommunicator")
        assert isinstance(cupyx.zeros_pinned(3), np.ndarray)
    finally:
        fakecupy.uninstall()
    assert sys.modules.get("cupy") is before


def test_machines_nest() -> None:
    outer = fakecupy.install(devices=3)
    try:
        with outer.cuda.Device(2):
            a = outer.ones(3)
            assert fakecupy.install(devices=1) is outer
            assert outer.cuda.runtime.getDevice() == 0
            fakecupy.uninstall()
            assert (a + 1).tolist() == [2, 2, 2]
    finally:
        fakecupy.uninstall()


def test_every_name_is_the_real_ones() -> None:
    """So that nothing can be written against the double that CuPy does not have: no function, keyword or dtype."""
    from tests.fakecupy.loops import LOOPS
    from tests.fakecupy.names import LACKS

    script = (
        "import json, sys\n"
        "import cupy, cupyx, cupy.cuda.memory, cupy.cuda.stream, cupy.cuda.pinned_memory, cupy.cuda.device\n"
        "asked = json.load(sys.stdin)\n"
        "from functools import reduce\n"
        "at = lambda path: reduce(getattr, path.split('.')[1:], {'cupy': cupy, 'cupyx': cupyx}[path.split('.')[0]])\n"
        "import inspect\n"
        "lacks = {f'cupy.{f}': keys.split() for f, keys in asked.pop('lacks').items()}\n"
        "takes = {f: inspect.signature(at(f)).parameters for f in lacks}\n"
        "wrong = [f'{f}({k}=)' for f, keys in lacks.items() for k in keys if k in takes[f]]\n"
        "loops = asked.pop('loops')\n"
        "ufuncs = {f: getattr(cupy, f) for f in loops if f != 'where'}\n"
        "from cupy._sorting.search import _where_ufunc as where\n"
        "known = {f: [t for t in u.types if not set(t) & set('EV')] for f, u in (ufuncs | {'where': where}).items()}\n"
        "wrong += [f'{f}: {known[f]}' for f in loops if known[f] != loops[f]]\n"
        "print(json.dumps(wrong + [p + '.' + n for p, ns in asked.items() for n in ns if not hasattr(at(p), n)]))\n"
    )
    if new_process("-c", "import cupy").returncode:
        pytest.skip("the real CuPy is not importable here")
    libraries = ("cupy.cuda.cublas", "cupy.cuda.nccl")  # which CuPy loads when they are first used
    fakecupy.install()
    try:
        modules = {
            name: [n for n in vars(module) if not n.startswith("_")]
            for name, module in sys.modules.items()
            if name.split(".")[0] in ("cupy", "cupyx") and name not in libraries
        }
        cp = sys.modules["cupy"]
        for name in ("ndarray", "cuda.Stream", "cuda.Event", "cuda.Device", "cuda.MemoryPool", "cuda.MemoryPointer"):
            thing = cp
            for part in name.split("."):
                thing = getattr(thing, part)
            modules[f"cupy.{name}"] = [n for n in dir(thing) if not n.startswith("_")]
    finally:
        fakecupy.uninstall()
    own = {
        "cupy.cuda": {"cublas"},
        "cupy.ndarray": {"describe"},
        "cupy.cuda.MemoryPointer": {"data", "describe", "raw", "take_host", "give_host"},
    }
    asked: dict[str, Any] = {name: sorted(set(names) - own.get(name, set())) for name, names in modules.items()}
    asked["lacks"], asked["loops"] = LACKS, LOOPS
    assert json.loads(output_of(new_process("-c", script, stdin=json.dumps(asked)))) == []


# -- devices ---------------------------------------------------------------------------------------


def test_the_current_device(cupy: Any) -> None:
    Device = cupy.cuda.Device
    with Device(1):
        a = cupy.ones(3)
        with Device(0):
            b = cupy.zeros_like(a)
        c = a + 1
    assert (a.device.id, b.device.id, c.device.id) == (1, 0, 1)
    assert cupy.cuda.runtime.getDevice() == 0
    with pytest.raises(fakecupy.WrongDeviceError, match="current device is 0"):
        a + 1
    with pytest.raises(fakecupy.WrongDeviceError):
        a[[0]]
    with pytest.raises(TypeError):
        hash(Device(0))
    far = Device(99)
    with pytest.raises(fakecupy.CUDARuntimeError, match="invalid device ordinal") as caught, far:
        pass
    assert caught.value.status == 101
    assert Device(1) == Device(1) != Device(0)

    seen: list[int] = []
    with Device(1):
        thread = threading.Thread(target=lambda: seen.append(cupy.cuda.runtime.getDevice()))
        thread.start()
        thread.join()
    assert seen == [0]


def test_no_device() -> None:
    cp = fakecupy.install(devices=0)
    try:
        assert not cp.is_available()
        assert cp.cuda.Device(0).id == 0
        for attempt in (lambda: cp.ones(3), cp.cuda.runtime.getDeviceCount, cp.cuda.Stream, cp.cuda.Device):
            with pytest.raises(cp.cuda.runtime.CUDARuntimeError) as caught:
                attempt()
            assert caught.value.status == 100
    finally:
        fakecupy.uninstall()


def test_moves_between_devices(cupy: Any) -> None:
    a = cupy.asarray(X)
    a.device.synchronize()
    with cupy.cuda.Device(1):
        b = cupy.asarray(a)
        c = a.T.copy()
        with pytest.raises(NotImplementedError):
            cupy.asarray(a[:, ::2])
        d = cupy.empty_like(b)
        d.data.copy_from_device_async(b.data, b.nbytes)
        cupy.copyto(d, a)
    assert b.device.id == 1
    np.testing.assert_array_equal(b.get(), X)
    np.testing.assert_array_equal(c.get(), X.T)
    np.testing.assert_array_equal(d.get(), X)


def test_corrupt_peers(cupy: Any) -> None:
    fakecupy.config().corrupt.add((0, 1))
    a = cupy.arange(100)
    with cupy.cuda.Device(1):
        b = a.copy()
    with cupy.cuda.Device(0):
        c = b.copy()
    assert cupy.cuda.runtime.deviceCanAccessPeer(1, 0) == 1
    assert b.tolist() != list(range(100))
    assert b.tolist() == c.tolist()
    fakecupy.config().peers = [[False, False], [False, False]]
    assert cupy.cuda.runtime.deviceCanAccessPeer(1, 0) == 0
    with cupy.cuda.Device(1):
        assert a.copy().tolist() == list(range(100))  # through the host


# -- streams ---------------------------------------------------------------------------------------


def test_work_runs_late(lazy: Any) -> None:
    import cupyx

    host = cupyx.zeros_pinned(3)
    source = cupyx.zeros_pinned(3)
    a = lazy.asarray(source)
    source[:] = 5  # too early: the copy has not read it yet
    stream = lazy.cuda.get_current_stream()
    (a + 1).get(out=host, blocking=False)
    event = stream.record()
    assert host.tolist() == [0, 0, 0]
    event.synchronize()
    assert host.tolist() == [6, 6, 6]
    assert event.done
    assert stream.done
    pageable = np.zeros(3)
    b = lazy.asarray(pageable)
    pageable[:] = 9  # staged
    assert b.tolist() == [0, 0, 0]


def test_polling_ends(lazy: Any) -> None:
    (s,) = streams(lazy, 0)
    for _ in range(5):
        a = lazy.ones(3)
    event = s.record()
    assert not event.done
    for _ in range(100):
        if event.done:
            break
    assert event.done


def test_null_stream_and_blocking_streams_wait_for_each_other(cupy: Any) -> None:
    a = cupy.ones(3)
    with cupy.cuda.Stream() as s:
        a += 1
    a *= 2
    with s:
        a += 1
    assert a.tolist() == [5, 5, 5]


def test_non_blocking_streams_do_not(cupy: Any) -> None:
    a = cupy.ones(3)
    with cupy.cuda.Stream(non_blocking=True), pytest.raises(fakecupy.Race, match="add on non-blocking"):
        a += 1
    assert len(fakecupy.races) == 1
    fakecupy.races.clear()
    null = cupy.cuda.Stream.null
    with cupy.cuda.Stream(non_blocking=True) as s:
        s.wait_event(null.record())
        a += 1
        null.wait_event(s.record())
    assert a.tolist() == [2, 2, 2]


def test_the_host_orders_too(cupy: Any) -> None:
    a = cupy.ones(3)
    cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as s:
        a += 1
    s.synchronize()
    assert a.tolist() == [2, 2, 2]


def test_copies_between_devices_need_events_both_ways(cupy: Any) -> None:
    s, t = streams(cupy, 0, 1)
    a = cupy.ones(3)
    with cupy.cuda.Device(1), pytest.raises(fakecupy.Race, match="copy between devices"):
        a.copy()
    fakecupy.races.clear()
    event = s.record()
    with cupy.cuda.Device(1):
        t.wait_event(event)
        b = a.copy()
        copied = t.record()
    with pytest.raises(fakecupy.Race, match="writes"):
        a += 1
    fakecupy.races.clear()
    s.wait_event(copied)
    a += 1
    with cupy.cuda.Device(1):
        t.synchronize()
    assert (a.tolist(), b.tolist()) == ([2, 2, 2], [1, 1, 1])


def test_freed_too_early(cupy: Any) -> None:
    s, t = streams(cupy, 0, 1)
    a = cupy.ones(3)
    event = s.record()
    with cupy.cuda.Device(1):
        t.wait_event(event)
        b = a.copy()
        done = t.record()
    del a
    assert len(fakecupy.races) == 1
    assert "freed too early" in fakecupy.races[0]
    fakecupy.races.clear()
    a = cupy.ones(3)
    event = s.record()
    with cupy.cuda.Device(1):
        t.wait_event(event)
        b = a.copy()
        done = t.record()
    s.wait_event(done)
    del a
    with cupy.cuda.Device(1):
        t.synchronize()
        assert b.tolist() == [1, 1, 1]


def test_early_frees_give_wrong_values(lazy: Any) -> None:
    """What the clocks say is also what happens: memory that is freed is overwritten under a copy that still reads."""
    fakecupy.config().raise_races = False
    s, t = streams(lazy, 0, 1)
    a = lazy.ones(3)
    event = s.record()
    with lazy.cuda.Device(1):
        t.wait_event(event)
        b = a.copy()
    del a
    s.synchronize()
    with lazy.cuda.Device(1):
        assert np.isnan(b.get()).all()
    assert len(fakecupy.races) == 1
    fakecupy.races.clear()


def test_streams_of_other_devices(cupy: Any) -> None:
    with cupy.cuda.Device(1):
        s = cupy.cuda.Stream(non_blocking=True)
        event = s.record()
    with pytest.raises(RuntimeError, match="does not match"):
        s.use()
    with pytest.raises(RuntimeError, match="does not match"), s:
        pass
    with pytest.raises(fakecupy.CUDARuntimeError, match="invalid resource handle"):
        s.record()
    cupy.cuda.get_current_stream().wait_event(event)
    event.synchronize()
    assert cupy.cuda.get_current_stream(1) == cupy.cuda.Stream.null
    assert cupy.cuda.Stream.null.device_id == -1
    assert s.device_id == 1
    assert s != cupy.cuda.Stream.null


def test_current_streams_are_of_a_thread(cupy: Any) -> None:
    (s,) = streams(cupy, 0)
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(cupy.cuda.get_current_stream()))
    thread.start()
    thread.join()
    assert seen == [cupy.cuda.Stream.null]
    assert cupy.cuda.get_current_stream() is s
    with cupy.cuda.Stream() as inner:
        assert cupy.cuda.get_current_stream() is inner
    assert cupy.cuda.get_current_stream() is cupy.cuda.Stream.null  # `with` forgets what `use` had set, as CuPy's does


def test_errors_show_at_the_next_wait(cupy: Any) -> None:
    fakecupy.fail(status=700)
    with pytest.raises(fakecupy.CUDARuntimeError, match="illegal memory access") as caught:
        cupy.cuda.Device().synchronize()
    assert caught.value.status == 700
    cupy.cuda.Device().synchronize()


def test_many_threads(cupy: Any) -> None:
    failures: list[BaseException] = []

    def work(device: int) -> None:
        try:
            with cupy.cuda.Device(device):
                cupy.cuda.Stream(non_blocking=True).use()
                for i in range(200):
                    a = cupy.full(8, i)
                    assert ((a + 1) * 2).sum().item() == 16 * (i + 1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# -- memory ----------------------------------------------------------------------------------------


def test_blocks_are_reused_at_once_and_poisoned(cupy: Any) -> None:
    a = cupy.ones(3)
    ptr = a.data.ptr
    a = None
    b = cupy.empty(3)
    assert b.data.ptr == ptr
    assert np.isnan(b.get()).all()
    with cupy.cuda.Stream(non_blocking=True):
        other = cupy.empty(3)
    assert other.data.ptr != ptr  # arenas are of a stream
    v = b[1:]
    b = None
    assert cupy.empty(3).data.ptr != ptr  # the view keeps it


def test_references_are_only_those_that_show(cupy: Any) -> None:
    a = cupy.ones((2, 3))
    counts = sys.getrefcount(a), sys.getrefcount(a.data), sys.getrefcount(a.data.mem)
    for _ in range(20):
        b = a + 1
        a += b
        a[0] = 5
        c = a[[1]], a.sum(), a[a > 1], cupy.sum(a, axis=0), a.copy()
    del b, c
    assert (sys.getrefcount(a), sys.getrefcount(a.data), sys.getrefcount(a.data.mem)) == counts
    assert a.data is a.data
    assert a.data.mem is a.data.mem
    v = a[0]
    assert v.base is a
    assert v[1:].base is a
    assert v.data.mem is a.data.mem
    assert v.data is not a.data
    assert a.reshape(3, 2).data is a.data
    assert a.base is None
    assert a.flags.owndata
    assert not v.flags.owndata


def test_the_pool_counts_and_has_limits(cupy: Any) -> None:
    from cupy.cuda.memory import OutOfMemoryError

    pool = cupy.get_default_memory_pool()
    a = cupy.empty(1000, cupy.uint8)
    assert (pool.used_bytes(), pool.total_bytes(), pool.free_bytes()) == (1024, 1024, 0)
    del a
    assert (pool.used_bytes(), pool.total_bytes(), pool.free_bytes()) == (0, 1024, 1024)
    pool.free_all_blocks()
    assert pool.total_bytes() == 0
    pool.set_limit(size=2048)
    a = cupy.empty(1000, cupy.uint8)
    with pytest.raises(OutOfMemoryError, match=r"Out of memory allocating 1,536 bytes \(allocated so far: 1,024 bytes"):
        cupy.empty(1500, cupy.uint8)
    with cupy.cuda.Device(1):
        assert pool.get_limit() == 0
        cupy.empty(5000)
    pool.set_limit()
    fakecupy.config().memory = 1 << 20
    with pytest.raises(MemoryError):
        cupy.empty(1 << 20)
    free, total = cupy.cuda.runtime.memGetInfo()
    assert (free, total) == ((1 << 20) - 1024, 1 << 20)


def test_pinned_memory_is_reused(lazy: Any) -> None:
    """A host buffer that is deleted while a copy still writes to it may have been reused by then."""
    import cupyx

    a = lazy.ones(3)
    first = cupyx.empty_pinned(3)
    a.get(out=first, blocking=False)
    del first
    second = cupyx.zeros_pinned(3)
    assert lazy.cuda.pinned_memory.is_memory_pinned(second.ctypes.data)
    assert not lazy.cuda.pinned_memory.is_memory_pinned(X.ctypes.data)
    lazy.cuda.get_current_stream().synchronize()
    assert second.tolist() == [1, 1, 1]


def test_finalizers_run_within_the_pinned_pool(cupy: Any) -> None:
    """A collection may begin at any allocation: arrays that die then do not disturb a search through the tables."""
    import cupyx

    class Dies:
        """Garbage that holds an array, and makes the next such garbage when it is collected."""

        def __init__(self, left: int) -> None:
            self.array, self.left, self.cycle = cupyx.empty_pinned(1 + left), left, self

        def __del__(self) -> None:
            if self.left:
                Dies(self.left - 1)

    pool, before = cupy.get_default_pinned_memory_pool(), gc.get_threshold()
    kept = [cupyx.empty_pinned(n) for n in range(1, 200)]
    tuples = [(n, n) for n in range(5000)]  # none is left that could be used again without an allocation
    gc.set_threshold(1)
    try:
        for _ in range(20):
            Dies(200)
            assert cupy.cuda.pinned_memory.is_memory_pinned(kept[-1].ctypes.data)
            assert not cupy.cuda.pinned_memory.is_memory_pinned(X.ctypes.data)
            assert pool.n_free_blocks() >= 0
    finally:
        gc.set_threshold(*before)
    assert len(tuples) == 5000


def test_pools_are_counted_while_other_threads_free(cupy: Any) -> None:
    stop, errors = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            while not stop.is_set():
                arrays = [cupy.empty(n, cupy.uint8) for n in range(1, 2000, 97)]
                cupy.cuda.runtime.memcpyAsync(arrays[0].data.ptr, arrays[1].data.ptr, 1, 3, 0)
                del arrays
                pool.free_all_blocks()
        except BaseException as error:  # carried out of the thread
            errors.append(error)

    pool = cupy.get_default_memory_pool()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(300):
            assert pool.n_free_blocks() >= 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert errors == []


# -- other libraries -------------------------------------------------------------------------------


def test_dlpack(cupy: Any) -> None:
    with cupy.cuda.Device(1):
        a = cupy.arange(6)[1:]
    b = cupy.from_dlpack(a)
    assert b.device.id == 1
    assert b.data.ptr == a.data.ptr
    assert a.__dlpack_device__() == (2, 1)
    assert np.from_dlpack(Host(a)).tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(TypeError, match="CPU arrays"):
        cupy.from_dlpack(np.arange(3))
    with pytest.raises(BufferError):
        a.__dlpack__(dl_device=(2, 0))
    with pytest.raises(NotImplementedError):
        cupy.from_dlpack(a, device=(2, 0))


class Host:
    """What asks an array for a host copy."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(dl_device=(1, 0))


def test_dlpack_orders_the_consumer(cupy: Any) -> None:
    (s,) = streams(cupy, 0)
    a = cupy.ones(3)
    t = cupy.cuda.Stream(non_blocking=True)
    capsule = a.__dlpack__(stream=t.ptr)
    b = cupy.from_dlpack(capsule)
    with t:
        assert (b + 1).tolist() == [2, 2, 2]
    s.synchronize()
    t.synchronize()
    with pytest.raises(ValueError, match="multiple times"):
        cupy.from_dlpack(capsule)


def test_nccl(cupy: Any) -> None:
    from cupy.cuda import nccl

    with pytest.raises(nccl.NcclError, match="Duplicate GPU"):
        nccl.NcclCommunicator.initAll([0, 0])
    comms = nccl.NcclCommunicator.initAll([1, 0])
    handles = streams(cupy, 1, 0)
    sources, sums, gathered = [], [], []
    for comm in comms:
        with cupy.cuda.Device(comm.device_id()):
            sources.append(cupy.arange(4, dtype=cupy.float32) + comm.rank_id())
            sums.append(cupy.empty(4, cupy.float32))
            gathered.append(cupy.empty(8, cupy.float32))
    nccl.groupStart()
    for comm, x, y, z, s in zip(comms, sources, sums, gathered, handles, strict=True):
        comm.allReduce(x.data.ptr, y.data.ptr, 4, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, s.ptr)
        comm.allGather(x.data.ptr, z.data.ptr, 4, nccl.NCCL_FLOAT32, s.ptr)
    nccl.groupEnd()
    for comm, y, z in zip(comms, sums, gathered, strict=True):
        with cupy.cuda.Device(comm.device_id()):
            assert y.tolist() == [1, 3, 5, 7]
            assert z.tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    nccl.groupStart()
    comms[0].bcast(sums[0].data.ptr, 4, nccl.NCCL_FLOAT32, 0, handles[0].ptr)
    with pytest.raises(nccl.NcclError, match="not every rank"):
        nccl.groupEnd()


def test_nccl_reads_addresses(cupy: Any) -> None:
    """It ignores strides: from the first element of a view on, it reads as many elements as requested."""
    from cupy.cuda import nccl

    (comm,) = nccl.NcclCommunicator.initAll([0])

    def reduce(x: Any, y: Any, count: int) -> list[int]:
        comm.allReduce(x.data.ptr, y.data.ptr, count, nccl.NCCL_INT64, nccl.NCCL_SUM, 0)
        return y.tolist()

    x = cupy.arange(6)
    assert reduce(x[1::2], cupy.empty(3, int), 3) == [1, 2, 3]
    assert reduce(x.reshape(2, 3).T, cupy.empty(6, int), 6) == [0, 1, 2, 3, 4, 5]
    for source, target in ((x[::-1], cupy.empty(6, int)), (x, cupy.empty(5, int))):
        with pytest.raises(fakecupy.OutOfBounds, match=r"of 4[08] bytes of device 0"):
            reduce(source, target, 6)
    with cupy.cuda.Device(1):
        far = cupy.empty(6, int)
    with pytest.raises(fakecupy.WrongDeviceError, match="memory of another device"):
        reduce(x, far, 6)


def test_copies_out_of_bounds(cupy: Any) -> None:
    a, b = cupy.arange(6), cupy.empty(6, int)
    for to, source in ((b, a[::-1]), (b[1:], a)):
        with pytest.raises(fakecupy.OutOfBounds):
            to.data.copy_from_device_async(source.data, a.nbytes)
    address = a.data.ptr
    del a, to, source
    with pytest.raises(fakecupy.OutOfBounds):  # freed memory has no bytes that may be read
        cupy.cuda.runtime.memcpyAsync(b.data.ptr, address, 8, 3, 0)


def test_random(cupy: Any) -> None:
    cupy.random.seed(3)
    a = cupy.random.rand(4)
    with cupy.cuda.Device(1):
        cupy.random.seed(3)
        b = cupy.random.rand(4)
    np.testing.assert_array_equal(a.get(), b.get())
    assert cupy.random.default_rng(1).integers(0, 5, size=(2, 2)).shape == (2, 2)


# -- graphs ----------------------------------------------------------------------------------------


@pytest.fixture
def capture(cupy: Any) -> Iterator[Any]:
    """A private stream, which is current, and no capture is left at the end."""
    before = cupy.cuda.get_current_stream()
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.use()
    yield stream
    before.use()
    assert not stream.is_capturing()


def test_a_capture_records_and_a_graph_repeats(cupy: Any, capture: Any) -> None:
    x, y = cupy.asarray(X), cupy.zeros(X.shape, "f4")
    capture.synchronize()
    capture.begin_capture()
    assert capture.is_capturing()
    cupy.multiply(x, 2, out=y)
    cupy.add(y, 1, out=y)
    graph = capture.end_capture()
    np.testing.assert_array_equal(cupy.asnumpy(y), 0 * X)
    graph.launch()
    np.testing.assert_array_equal(cupy.asnumpy(y), 2 * X + 1)
    cupy.add(x, 1, out=x)
    graph.launch(stream=capture)
    np.testing.assert_array_equal(cupy.asnumpy(y), 2 * X + 3)
    assert fakecupy.live_graphs == 1
    del graph
    assert fakecupy.live_graphs == 0


def test_a_graph_keeps_no_memory(cupy: Any, capture: Any) -> None:
    x, y = cupy.asarray(X), cupy.zeros(X.shape, "f4")
    capture.begin_capture()
    cupy.multiply(x, 2, out=y)
    graph = capture.end_capture()
    del x
    with pytest.raises(fakecupy.Race, match="freed memory"):
        graph.launch()
    fakecupy.races.clear()
    x = cupy.asarray(X)  # The same block.
    graph.launch()
    np.testing.assert_array_equal(cupy.asnumpy(y), 2 * X)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda cp, s, x: x @ x.T, NotImplementedError, "cuBLAS"),
        (lambda cp, s, x: cp.linalg.inv(x[:, :3]), NotImplementedError, "cuSOLVER"),
        (lambda cp, s, x: cp.random.random_sample((3,)), NotImplementedError, "cuRAND"),
        (lambda cp, s, x: s.synchronize(), RuntimeError, "StreamCaptureUnsupported"),
        (lambda cp, s, x: s.done, RuntimeError, "StreamCaptureUnsupported"),
        (lambda cp, s, x: cp.cuda.Device(0).synchronize(), RuntimeError, "StreamCaptureUnsupported"),
        (lambda cp, s, x: s.record().synchronize(), RuntimeError, "CapturedEvent"),
        (lambda cp, s, x: s.wait_event(cp.outside), RuntimeError, "StreamCaptureIsolation"),
        (lambda cp, s, x: cp.asnumpy(x), RuntimeError, "D2H"),
        (lambda cp, s, x: cp.asarray(X), RuntimeError, "H2D"),
        (lambda cp, s, x: bool(x[0, 0]), RuntimeError, "D2H"),
        (lambda cp, s, x: cp.nonzero(x), RuntimeError, "StreamCaptureUnsupported"),
        (lambda cp, s, x: s.begin_capture(), RuntimeError, "IllegalState"),
    ],
)
def test_what_a_capture_refuses(call: Any, error: Any, text: str, cupy: Any, capture: Any) -> None:
    x = cupy.asarray(X)
    cupy.outside = cupy.cuda.Event()
    cupy.outside.record(cupy.cuda.Stream.null)
    capture.begin_capture()
    try:
        with pytest.raises(error, match=text):
            call(cupy, capture, x)
    finally:
        valid = not text.startswith(("Stream", "Captured"))
        if valid:
            capture.end_capture()
        else:
            with pytest.raises(RuntimeError, match="invalidated"):
                capture.is_capturing()
            with pytest.raises(fakecupy.CUDARuntimeError, match="StreamCaptureInvalidated"):
                capture.end_capture()
        del cupy.outside


def test_modes_of_capture(cupy: Any, capture: Any) -> None:
    runtime = cupy.cuda.runtime
    for mode in (runtime.streamCaptureModeThreadLocal, runtime.streamCaptureModeGlobal):
        capture.begin_capture(mode)
        with pytest.raises(fakecupy.CUDARuntimeError, match="StreamCaptureUnsupported"):
            cupy.get_default_memory_pool().free_all_blocks()
        with pytest.raises(fakecupy.CUDARuntimeError, match="StreamCaptureInvalidated"):
            capture.end_capture()
    capture.begin_capture(runtime.streamCaptureModeThreadLocal)
    other = threading.Thread(target=cupy.get_default_memory_pool().free_all_blocks)
    other.start()
    other.join()
    capture.end_capture()
    capture.begin_capture()
    cupy.get_default_memory_pool().free_all_blocks()
    capture.end_capture()
    with pytest.raises(RuntimeError, match="legacy"):
        cupy.cuda.Stream.null.begin_capture()
    with pytest.raises(NotImplementedError):
        cupy.cuda.Graph()


def test_the_null_stream_cannot_follow_a_blocking_stream_that_captures(cupy: Any, capture: Any) -> None:
    x = cupy.asarray(X)
    capture.synchronize()
    blocking = cupy.cuda.Stream()
    blocking.begin_capture()
    with cupy.cuda.Stream.null, pytest.raises(fakecupy.CUDARuntimeError, match="StreamCaptureImplicit"):
        x + 1
    with pytest.raises(fakecupy.CUDARuntimeError, match="StreamCaptureInvalidated"):
        blocking.end_capture()
    capture.begin_capture()
    with cupy.cuda.Stream.null:
        y = x + 1  # A stream that is not blocking disturbs nothing.
    capture.end_capture()
    np.testing.assert_array_equal(cupy.asnumpy(y), X + 1)
