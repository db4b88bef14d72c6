"""`st.jit`: tracing, tracing again, values that escape from a trace, and writes."""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import threading
import types
import weakref
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.errors import LinearAlgebraError
from shardtensor.interpreters.jit import executable
from shardtensor.interpreters.programs.program import Equation, vars_of
from tests.interpreters.jit.test_operators import agrees
from tests.interpreters.test_infer import split
from tests.layouts import everywhere, mesh_of


class Counted:
    """A function under jit that counts how often it is traced."""

    def __init__(self, fn: Any, **options: Any) -> None:
        self.traces = 0

        @functools.wraps(fn)
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.traces += 1
            return fn(*args, **kwargs)

        self.fn = st.jit(counting, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


# -- what traces again -----------------------------------------------------------------------------


def test_equal_types_are_traced_once() -> None:
    f = Counted(lambda x, a: x * a + 1)
    x = st.arange(6, dtype="float32")
    assert f(x, 2).tolist() == (np.arange(6) * 2 + 1).tolist()
    assert f(x + 1, 3).tolist() == (np.arange(1, 7) * 3 + 1).tolist()
    assert f.traces == 1
    assert f(x, 2.0).dtype == "float32"
    assert f.traces == 2


@pytest.mark.parametrize("other", ["shape", "dtype", "sharding", "static", "mesh", "aliasing", "scalar"])
def test_other_types_are_traced_again(other: str) -> None:
    f = Counted(lambda x, y, name: x + y)
    mesh = mesh_of((4,), "numpy")
    x, y = (st.device_put(np.ones(8), st.NamedSharding(mesh, st.P("x"))) for _ in range(2))
    f(x, y, "a")
    match other:
        case "shape":
            f(x[:4].copy(), y[:4].copy(), "a")
        case "dtype":
            f(x.astype("int8"), y, "a")
        case "sharding":
            f(st.device_put(x, mesh.flat[0]), y, "a")
        case "static":
            f(x, y, "b")
        case "mesh":
            with st.use_mesh(mesh):
                f(x, y, "a")
        case "aliasing":
            f(x, x, "a")
        case "scalar":
            f(x, 1, "a")
    assert f.traces == 2
    f(x, y, "a")
    assert f.traces == 2


def test_one_trace_for_all_threads() -> None:
    f = Counted(lambda x: (x + 1).sum())
    xs = [st.full(10, k) for k in range(4)]
    found: list[Any] = []

    def work() -> None:
        for k in range(200):
            assert float(f(xs[k % 4])) == 10 * (k % 4 + 1)
        found.append(None)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (len(found), f.traces) == (8, 1)


def test_programs_are_bounded_and_end_with_the_function() -> None:
    big = st.ones(100)

    def fn(x: Any, n: int) -> Any:
        return x * big.sum() * n

    f = st.jit(fn, static_argnums=1)
    for n in range(300):
        f(st.ones(2), n)
    assert len(f._cache.programs) <= 256
    gone = weakref.ref(fn)
    del f, fn
    gc.collect()
    assert gone() is None


def test_functions_jit_of_one_function_share_programs() -> None:
    traces = []

    def fn(x: Any) -> Any:
        traces.append(x)
        return x + 1

    for _ in range(3):
        st.jit(fn)(st.ones(3))
    assert len(traces) == 1
    other = functools.wraps(fn)(lambda x: fn(x) * 2)
    assert st.jit(other)(st.ones(3)).tolist() == [4.0] * 3


def test_a_class_with_methods_under_jit_ends() -> None:
    class Model:
        @st.jit
        def call(self, x: Any) -> Any:
            return x + 1

    Model().call(st.ones(2))
    gone = weakref.ref(Model)
    del Model
    gc.collect()
    assert gone() is None


# -- arguments -------------------------------------------------------------------------------------


@everywhere
def test_trees_closures_methods_and_nested_functions(backend: str) -> None:
    scale = split(backend, (6,))

    class Model:
        def __init__(self) -> None:
            self.w = split(backend, (6, 4))

        @st.jit
        def __call__(self, x: Any) -> Any:
            return st.tanh(x @ self.w)

    @st.jit
    def inner(x: Any) -> Any:
        return x * scale

    model = Model()
    x = split(backend)
    np.testing.assert_array_equal(model(x), st.tanh(x @ model.w))
    np.testing.assert_array_equal(model(x), st.tanh(x @ model.w))
    agrees(lambda tree: {"a": inner(tree["x"]) + tree["n"], "b": [tree["y"][0], None]}, {"x": x, "y": [x], "n": 2})
    agrees(functools.partial(lambda k, a: a * k, 3), x)
    agrees(lambda *xs, **more: sum(xs) + more.get("z", 0), x, x + 1)


def test_options_alone_make_a_decorator() -> None:
    @st.jit(donate_argnums=0)
    def doubled(x: Any) -> Any:
        """Doubles."""
        return x * 2

    x = st.ones(4)
    assert doubled(x).tolist() == [2.0] * 4
    assert x.is_donated
    assert doubled.__doc__ == "Doubles."
    assert st.jit()(lambda x: x + 1)(st.ones(2)).tolist() == [2.0, 2.0]


def test_keyword_arguments_and_statics() -> None:
    f = Counted(lambda x, *, axis, scale=1.0: x.sum(axis=axis) * scale, static_argnames="axis")
    x = st.ones((4, 6))
    assert f(x, axis=0).shape == (6,)
    assert f(x, axis=1, scale=2.0).tolist() == [12.0] * 4
    assert f(x, axis=1, scale=3.0).tolist() == [18.0] * 4
    assert f.traces == 2
    with pytest.raises(st.ArgumentTypeError, match=r"'axis'.*list.*not hashable"):
        f(x, axis=[0])
    with pytest.raises(st.ArgumentTypeError, match=r"argument x\['a'\] is a set"):
        st.jit(lambda x: x)({"a": {1}})
    with pytest.raises(st.ArgumentError, match="no such argument"):
        st.jit(lambda x: x, static_argnames="y")
    with pytest.raises(st.ArgumentError, match="static_argnums has 3"):
        st.jit(lambda x: x, static_argnums=3)
    with pytest.raises(st.ArgumentTypeError, match="wanted a function"):
        st.jit(3)  # type: ignore[arg-type]


def test_statics_are_compared_to_the_bit() -> None:
    f = Counted(lambda x, k: x * (k[0] if isinstance(k, tuple) else k), static_argnums=1)
    x = st.ones(3, dtype="int32")
    statics = (0.0, -0.0, False, 0, 0j, np.float32(-0.0), (0.0,), (-0.0,), (False,), (0,), float("nan"))
    for k in statics:
        number = k[0] if isinstance(k, tuple) else k
        found, wanted = f(x, k), np.ones(3, "int32") * number
        assert found.dtype == wanted.dtype
        assert np.asarray(found).tobytes() == wanted.tobytes()
    f(x, float("nan"))
    assert f.traces == len(statics)


@everywhere
def test_python_scalars_are_weak(backend: str) -> None:
    x = split(backend)
    f = agrees(lambda x, a, n: (x * (a * 2 + 1) - n // 2, x * -a, a < n), x, 0.25, 7)
    assert f(x, 0.5, 4)[0].dtype == "float32"
    assert f(x, 0.5, 4)[2] is True


@everywhere
def test_host_arrays_are_put_where_the_rule_asks_for_them(backend: str) -> None:
    x = split(backend)
    host = np.arange(6, dtype="float32")
    f = agrees(lambda x, h: (x + h, x * h[1:2], h), x, host)
    assert f(x, host)[2] is host
    with st.transfers() as mine:
        st.jit(lambda x, h: x + h)(x, host)
    with st.transfers() as eager:
        x + host
    assert mine.bytes == eager.bytes
    agrees(lambda x, h: st.take(x, h, axis=0), x, np.array([3, 1]))


# -- writes ----------------------------------------------------------------------------------------


@everywhere
def test_arguments_that_are_views_are_reshaped_as_numpy_does(backend: str) -> None:
    """A reshape of a view may be a copy, to which a write does not show; where none shows, no view is traced again."""

    def written(x: Any) -> Any:
        y = x.reshape(-1)
        y[::2] = 9
        return y

    plain = np.arange(20.0).reshape(4, 5)
    x = st.device_put(plain, mesh_of((2,), backend))
    for at in (np.s_[:, 1:3], np.s_[:, 2:4], np.s_[1:3], np.s_[::-1]):
        traced = Counted(written)
        for _ in range(2):
            wanted, found = written(plain[at]), traced(x[at])
            np.testing.assert_array_equal(found, wanted)
            np.testing.assert_array_equal(x, plain)
    flat = st.jit(lambda x: x.reshape(-1))
    for at in (np.s_[1:3], np.s_[:, 1:3], np.s_[:, ::-1], np.s_[::2]):
        flat(x[at])[...] = 7
        plain[at].reshape(-1)[...] = 7
        np.testing.assert_array_equal(x, plain)
    read = Counted(lambda x: x.reshape(-1) * 2)
    for k in range(3):
        np.testing.assert_array_equal(read(x[:, k : k + 2]), plain[:, k : k + 2].reshape(-1) * 2)
    assert read.traces == 1


@everywhere
def test_arguments_that_alias_one_another(backend: str) -> None:
    def f(a: Any, b: Any) -> Any:
        a += 1
        b[...] = b * 2
        a[:1] = -1
        return a + 0, b + 0

    traced = st.jit(f)
    for make in (
        lambda x: (x, x),
        lambda x: (x[:-1], x[1:]),
        lambda x: (x[1:], x[:-1]),
        lambda x: (x[::2], x[1::2]),
        lambda x: (x[:5], x[:5]),
        lambda x: (x[2:4], x[2:4].copy()),
        lambda x: (x, x.copy()),
    ):
        mine, its = split(backend), split(backend)
        wanted, found = f(*make(mine)), traced(*make(its))
        np.testing.assert_array_equal(its, mine)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


@everywhere
def test_captured_tensors_are_read_and_written_at_each_call(backend: str) -> None:
    total = split(backend, (6,))
    row = total[2:4]

    def f(x: Any) -> Any:
        total[...] = total + x.sum(axis=0)
        row[0] += 1
        return total[1:] * 1, total, row

    g = st.jit(f)
    x = split(backend)
    for _ in range(3):
        before = np.asarray(total).copy()
        found = [np.array(a) for a in g(x)]
        after = np.asarray(total).copy()
        total[...] = before
        for a, b in zip(found, f(x), strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(total, after)
    assert g(x)[1] is total


@everywhere
def test_an_argument_that_the_function_also_closes_over(backend: str) -> None:
    known = split(backend, (6,))

    def f(x: Any) -> Any:
        x += 1
        return known * 2

    g = Counted(f)
    other = split(backend, (6,))
    wanted = np.asarray(known) * 2
    np.testing.assert_array_equal(g(other), wanted)
    np.testing.assert_array_equal(g(known), wanted + 2)
    np.testing.assert_array_equal(g(other), wanted + 2)
    part = known[1:]
    np.testing.assert_array_equal(g(part), np.asarray(known) * 2)
    traces = g.traces
    g(known)
    g(other)
    assert g.traces == traces


@pytest.mark.parametrize(("escape", "caller"), [
    (lambda x, i: 1 if x.sum() > 0 else 2, "bool"),
    (lambda x, i: float(x.sum()), "float"),
    (lambda x, i: x[0, 0].item(), "item"),
    (lambda x, i: x.tolist(), "tolist"),
    (lambda x, i: range(i), "index"),
    (lambda x, i: np.asarray(x), "asarray"),
    (lambda x, i: x[i], "index"),
    (lambda x, i: x[:i], "index"),
    (lambda x, i: st.random.key(i), "index"),
])  # fmt: skip
def test_errors_name_the_call_that_needs_elements(escape: Any, caller: str, backend: str) -> None:
    with pytest.raises(st.ConcretizationError, match=f"^{caller}: needs the elements of a tensor, and jit traces"):
        st.jit(escape)(split(backend), 1)


def test_an_error_leaves_the_arguments_as_they_were(backend: str) -> None:
    if backend == "cupy":
        pytest.skip("CuPy's inverse of a singular matrix is NaN, and no error")

    def f(x: Any, y: Any) -> None:
        x += 1
        y[...] = st.linalg.inv(y)

    x, y = split(backend), st.device_put(np.zeros((3, 3)), st.devices(backend)[0])
    before = np.array(x)
    with pytest.raises(LinearAlgebraError, match="inv") as caught:
        st.jit(f)(x, y)
    assert any("jit: in f, at" in note and "test_jit" in note for note in caught.value.__notes__)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(y, np.zeros((3, 3)))


def test_results_are_independent_of_the_arguments(backend: str) -> None:
    f = st.jit(lambda x: (x.copy(), st.asarray(x), x[1:], x + 0, x.astype(x.dtype)))
    x = split(backend)
    before = np.array(x)
    copied, itself, view, made, cast = f(x)
    x += 1
    np.testing.assert_array_equal(copied, before)
    assert itself is x
    np.testing.assert_array_equal(view, before[1:] + 1)
    view[0] = 7
    assert np.asarray(x)[1, 0] == 7
    made += 5
    cast[...] = 0
    np.testing.assert_array_equal(copied, before)


def test_threads_lose_no_write(backend: str) -> None:
    total = st.device_put(np.zeros(4), st.devices(backend)[0])

    @st.jit
    def add(x: Any) -> None:
        x += 1

    add(total)
    threads = [threading.Thread(target=lambda: [add(total) for _ in range(50)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert np.asarray(total).tolist() == [201.0] * 4


# -- donation and shardings ------------------------------------------------------------------------


def test_donated_arguments(backend: str) -> None:
    f = st.jit(lambda x, y: (x + y, x), donate_argnums=0)
    x, y = split(backend), split(backend)
    before = np.array(x)
    total, same = f(x, y)
    np.testing.assert_array_equal(total, before * 2)
    np.testing.assert_array_equal(same, before)
    with pytest.raises(st.DonatedError):
        x + 1
    with pytest.raises(st.DonatedError):
        f(x, y)
    with pytest.raises(st.ArgumentError, match="donated"):
        f(y, y)


@pytest.mark.parametrize("donated", [(), (0,)])
def test_views_of_a_donated_argument_are_views_of_one_tensor(donated: tuple[int, ...], backend: str) -> None:
    x, y, z = st.jit(lambda x: (x, x[1:], x[:-1]), donate_argnums=donated)(split(backend))
    x[1] = 77
    assert y[0].tolist() == z[1].tolist() == [77] * 6


@pytest.mark.parametrize("donated", [(), (0,)])
def test_memory_of_donated_arguments_is_free_after_the_last_step_that_reads_it(donated: tuple[int, ...]) -> None:
    size, count = 1 << 12, 10
    layout = st.NamedSharding(st.make_mesh((2,), ("x",), devices=st.devices("checked")[:2]), st.P())
    device = layout.mesh.devices.flat[1]
    f = st.jit(lambda xs: [st.sort(x) for x in xs], donate_argnums=donated)
    for _ in range(2):  # The first call traces.
        xs = [st.ones(size, device=layout) for _ in range(count)]
        st.reset_peak_memory()
        before = st.memory_info()[device].bytes_in_use
        ys = f(xs)
        grown = st.memory_info()[device].peak_bytes_in_use - before
        del xs, ys
    st.reset_peak_memory(measure=False)
    assert (grown < 4 * 8 * size) == bool(donated)


def test_after_an_error_donated_arguments_are_gone(backend: str) -> None:
    f = st.jit(lambda x: 1 / x, donate_argnums=0, executor="numpy")
    x = split(backend) * 0
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        f(x)
    with pytest.raises(st.DonatedError):
        x + 1


@everywhere
def test_shardings(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    rows, columns = (st.NamedSharding(mesh, s) for s in (st.P("x"), st.P(None, "y")))
    f = st.jit(
        lambda x, w: {"y": x @ w, "s": x.sum()}, in_shardings=(rows, None), out_shardings={"y": columns, "s": None}
    )
    x, w = split(backend), split(backend, (6, 4))
    found = f(x, w)
    assert found["y"].sharding == columns
    np.testing.assert_array_equal(found["y"], st.reshard(st.reshard(x, rows) @ w, columns))
    with st.set_mesh(mesh):
        assert st.jit(lambda x: x * 2, out_shardings=st.P("y"))(x).sharding.spec == st.P("y")
    with pytest.raises(st.ArgumentError, match="out_shardings"):
        st.jit(lambda x: x, out_shardings=(rows, rows))(x)
    g = st.jit(lambda x: st.with_sharding_constraint(x, columns) + 1)
    assert g(x).sharding == columns
    assert "transfer_to" in g.lower(x).as_text()


# -- escapes ---------------------------------------------------------------------------------------

ADVICE = {
    "if": "st.where or st.cond in place of a branch, st.while_loop .* make the argument static .static_argnames.",
    "float": "Leave it a tensor, .* make the argument static .static_argnames.",
    "asarray": "Use the functions of shardtensor in place of those that need host arrays",
    "a function of NumPy": "Use the functions of shardtensor in place of those that need host arrays",
    "mask": "The shape of the result depends on them: use st.where",
    "nonzero": "The shape of the result depends on them: use st.where",
    "iteration": "static .static_argnames. if it is a size, use st.fori_loop for a number of iterations",
    "shape": "Sizes must be known: make the argument static .static_argnames.",
}

ESCAPES = {
    "if": lambda x, n: 1 if x.sum() > 0 else 2,
    "float": lambda x, n: float(x[0, 0]),
    "asarray": lambda x, n: np.asarray(x),
    "a function of NumPy": lambda x, n: np.asarray_chkfinite(x),
    "mask": lambda x, n: x[x > 0],
    "nonzero": lambda x, n: st.nonzero(x),
    "iteration": lambda x, n: list(range(n)) or x,
    "shards": lambda x, n: x.addressable_shards,
    "shape": lambda x, n: st.zeros(n),
    "map": lambda x, n: st.pmap(lambda a: float(a.sum()), st.shard(x)),
}


@pytest.mark.parametrize("name", list(ESCAPES))
def test_escapes_name_the_line_the_argument_and_the_way_out(name: str, backend: str) -> None:
    f = st.jit(ESCAPES[name])
    with pytest.raises(
        st.ConcretizationError, match=r"test_jit\.py:\d+.*depend on (x|n|x, n)\. .*" + ADVICE.get(name, "")
    ):
        f(split(backend), 3)
    with st.disable_jit():
        f(split(backend), 3)
        with st.disable_jit(False), pytest.raises(st.ConcretizationError):
            f(split(backend), 3)


def test_a_traced_value_that_leaves_the_function(backend: str) -> None:
    kept: list[Any] = []

    @st.jit
    def leaks(x: Any) -> Any:
        kept.append(x + 1)
        return x

    leaks(split(backend))
    for use in (
        lambda x: x + 1,
        np.asarray,
        lambda x: float(x[0, 0]),
        lambda x: x.copy(),
        lambda x: st.sort(x, axis=0),
        st.jit(lambda x: x + kept[0]),
    ):
        with pytest.raises(st.ConcretizationError, match=r"left the function leaks \(.*test_jit\.py:\d+\)"):
            use(kept[0])


def test_asarray_of_an_argument_that_is_a_host_array_is_a_tensor_of_its_own() -> None:
    def f(host: Any, number: Any) -> Any:
        x = st.asarray(host)
        x[0] = number
        return x, host, st.asarray(number)

    host = np.arange(3.0)
    x, same, number = st.jit(f)(host, 5.0)
    assert (x.tolist(), np.asarray(same).tolist(), number.tolist()) == ([5, 1, 2], [0, 1, 2], 5)
    assert x.sharding == st.asarray(host).sharding
    assert host.tolist() == [0, 1, 2]


def test_a_host_array_that_is_written(backend: str) -> None:
    def f(h: Any) -> None:
        h[0] = 1

    with pytest.raises(st.ConcretizationError, match="h is a host array, which jit does not write"):
        st.jit(f)(np.zeros(3))


def test_results_that_are_no_tensors() -> None:
    assert st.jit(lambda x: ("a", 3, None, np.float32(2)))(st.ones(1)) == ("a", 3, None, np.float32(2))
    first = st.jit(lambda x: np.arange(3))
    assert first(st.ones(1)) is not first(st.ones(1))
    mixed = st.jit(lambda x: (x.sharding, Color.RED, Frozen(3)))
    assert mixed(st.ones(1)) == (st.ones(1).sharding, Color.RED, Frozen(3))


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda x: {1}, "set"),
        (lambda x: x.flat, "Flat"),
        (lambda x: (row * 2 for row in x), "generator"),
        (lambda x: lambda: x, "function"),
        (lambda x: x.sum, "method"),
        (lambda x: [x].append, "builtin_function_or_method"),
        (weakref.ref, "ReferenceType"),
        (lambda x: Frozen(x), "Frozen"),
        (lambda x: types.SimpleNamespace(x=x), "SimpleNamespace"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_results_that_can_change_or_hold_tracers_are_errors(fn: Any, kind: str) -> None:
    with pytest.raises(
        st.ArgumentTypeError, match=rf"the result\[1\] is a {kind}, which is not a tensor and can change"
    ):
        st.jit(lambda x: (x, fn(x)))(st.ones(3))


# -- programs --------------------------------------------------------------------------------------


def test_programs_are_printed_and_compared() -> None:
    mesh = mesh_of((2,), "numpy")
    x = st.ShapeDtypeStruct((4, 3), "float32", st.NamedSharding(mesh, st.P("x")))

    def f(x: Any, a: float) -> Any:
        y = x[1:, ::2] * a
        y[0] = 1
        return y.sum(axis=1), y.T

    lowered = st.jit(f).lower(x, 2.0)
    assert (
        lowered.as_text()
        == """\
{ lambda v0:f4[4,3]P('x'), v1:float .
  v2:f4[3,2]P('x') = view[1:4, 0:4:2] v0
  v3:f4[3,2]P('x') = multiply v2 v1
  v4:f4[3,2]P('x') = put[0, 0:2] v3 1
  v5:f4[3]P('x') = sum(axis=1, keepdims=False) v4
  in (v5, v4) }"""
    )
    assert "getitem: 8 bytes" in lowered.as_text("layouts")
    for shown in (lowered, lowered.cost()):
        assert ET.fromstring(shown._repr_html_()).text == str(shown)
    assert lowered.program == st.jit(f).lower(x, 2.0).program
    assert lowered.program != st.jit(f).lower(x, 2).program
    cost = lowered.cost()
    assert (cost.bytes, cost.kernels, cost.executor) == (8, 3, "numpy")
    with pytest.raises(st.ArgumentError, match="stage"):
        lowered.as_text("llvm")
    y = st.device_put(np.ones((4, 3), "float32"), x.sharding)
    np.testing.assert_array_equal(lowered.compile()(y, 2.0)[0], f(y, 2.0)[0])
    with pytest.raises(st.ArgumentTypeError, match="compiled for other arguments"):
        lowered.compile()(y[1:], 2.0)


def test_simulated_costs_are_those_of_calls(backend: str) -> None:
    def f(x: Any, w: Any) -> Any:
        return st.tanh(x[1:] @ w).sum(axis=0)

    mesh = st.AbstractMesh((2, 2), ("x", "y"))
    x, w = (
        st.zeros(shape, dtype="float32", device=st.NamedSharding(mesh, st.P("x", "y"))) for shape in ((10, 6), (6, 4))
    )
    report, eager = st.simulate(st.jit(f), x, w), st.simulate(f, x, w)
    assert str(report) == str(eager)
    given = split(backend), split(backend, (6, 4))
    with st.transfers() as log:
        st.jit(f)(*given)
    assert st.jit(f).lower(*given).cost().bytes == log.bytes == sum(o.bytes for o in report.operators)
    assert st.eval_shape(st.jit(f), x, w).shape == (4,)


# -- layouts ---------------------------------------------------------------------------------------


@everywhere
def test_partial_sums_of_a_split_result_are_scattered(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    rows, replicated = st.NamedSharding(mesh, st.P("x")), st.NamedSharding(mesh, st.P())
    x = st.device_put(np.arange(80, dtype="float32").reshape(8, 10), rows)
    f = lambda x: (x.T @ x, (x * 2).sum(axis=0))  # noqa: E731

    def placed(x: Any) -> Any:
        return [st.with_sharding_constraint(y, rows) for y in f(x)]

    traced = st.jit(f, out_shardings=rows)
    with st.transfers() as eager:
        wanted = placed(x)
    with st.transfers() as sent:
        found = traced(x)
    for a, b in zip(found, wanted, strict=True):
        assert a.sharding == b.sharding == rows
        np.testing.assert_array_equal(a, b)
    assert sent.bytes == traced.lower(x).cost().bytes < eager.bytes
    assert st.jit(f, out_shardings=replicated).lower(x).cost().bytes == eager.bytes


# -- compiled kernels ------------------------------------------------------------------------------


def test_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    x = st.asarray(np.linspace(-3, 3, 1 << 15).reshape(64, 512))

    def f(x: Any, a: float) -> Any:
        e = st.exp(x * a - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True), st.where(x > 0, x + 1, -x) * 2

    g = st.jit(f, executor="c")
    lowered = g.lower(x, 0.5)
    assert "exp" in lowered.as_text("c")
    assert lowered.as_text("groups").count("one kernel:") == 2
    for a in (0.5, 2.0):
        (soft, sides), (wanted, exact) = g(x, a), f(x, a)
        np.testing.assert_allclose(soft, wanted, rtol=1e-14)
        np.testing.assert_array_equal(sides, exact)
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        g(x * 1000, 2.0)
    waiting = st.jit(f).lower(x, 0.5)
    assert waiting.cost().executor == "numpy"
    waiting.compile()
    assert waiting.cost().executor == "c"
    np.testing.assert_array_equal(st.jit(f, executor="numpy")(x, 0.5)[0], f(x, 0.5)[0])
    assert st.jit(f, executor="numpy").lower(x, 0.5).compile()(x, 0.5)[0].shape == x.shape
    monkeypatch.setattr(executable, "compile_kernels", no_compiler)
    with pytest.raises(st.BackendError, match="no C compiler"):
        st.jit(lambda x: (x + 1) * 2, executor="c")(x)
    without = st.jit(lambda x: (x + 1) * 2).lower(x).compile()
    np.testing.assert_array_equal(without(x), (x + 1) * 2)
    with pytest.raises(st.ArgumentError, match="executor"):
        st.jit(f, executor="cuda")


def no_compiler(kernels: Any) -> Any:
    raise st.BackendError("jit: there is no C compiler")


# -- the time to prepare a program -----------------------------------------------------------------


@pytest.mark.parametrize("size", [64, 1 << 15])
@pytest.mark.parametrize("executor", ["numpy", None])
def test_the_work_to_prepare_a_program_grows_with_its_length_only(
    size: int, executor: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes, views, kernels and arithmetic: each pass looks at each equation a few times."""
    looks = 0

    def counting(method: Any) -> Any:
        def count(equation: Equation) -> Any:
            nonlocal looks
            looks += 1
            return method(equation)

        return count

    monkeypatch.setattr(Equation, "makes", counting(Equation.makes))
    monkeypatch.setattr(Equation, "reads", counting(Equation.reads))

    def looks_of(trips: int) -> float:
        nonlocal looks

        def relax(u: Any) -> Any:
            for _ in range(trips):
                u[1:-1] = 0.5 * (u[2:] + st.sqrt(u[:-2]))
            return u * 2

        looks = 0
        program = st.jit(relax, executor=executor).lower(st.ones(size)).program
        return looks / len(program.equations)

    few, many = looks_of(10), looks_of(80)
    assert many < few * 1.2 < 40


def test_what_an_equation_reads_is_each_value_once() -> None:
    def f(x: Any, y: Any) -> Any:
        return st.where(x > 0, st.concat([x, y, x]).sum(), x * x)

    program = st.jit(f).lower(st.ones(4), st.ones(4)).program
    for equation in program.equations:
        assert list(equation.reads()) == list(dict.fromkeys(vars_of(equation.operands)))
        assert list(dataclasses.replace(equation, operands=(program.inputs[1],)).reads()) == [program.inputs[1]]
