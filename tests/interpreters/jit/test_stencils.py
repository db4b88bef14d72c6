"""Stencils: writes of functions of slices equal NumPy's on every backend, and move the halos only; writes into windows
compute and copy no more elements than they have to.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.host import memory_pool
from shardtensor.interpreters.jit.grouping import groups, window_writes
from tests.layouts import MESHES, array, everywhere, mesh_of


def from_slices(u: Any) -> Any:
    return 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])


def of_copies(u: Any, steps: int = 3) -> Any:
    for _ in range(steps):
        new = u.copy()
        new[1:-1, 1:-1] = from_slices(u)
        u = new
    return u


def in_turns(u: Any, steps: int = 3) -> Any:
    u, new = u.copy(), u.copy()
    for _ in range(steps):
        new[1:-1, 1:-1] = from_slices(u)
        u, new = new, u
    return u


def in_place(u: Any, steps: int = 3) -> Any:
    u = u.copy()
    for _ in range(steps):
        u[1:-1, 1:-1] = from_slices(u)
    return u


FORMS = [of_copies, in_turns, in_place]


@everywhere
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_jacobi_moves_the_halo_rows_only(form: Any, backend: str) -> None:
    mesh, host = mesh_of((8,), backend), array((40, 12), "float32", 1)
    x = st.device_put(host, st.NamedSharding(mesh, st.P("x")))
    traced = st.jit(form)
    with st.transfers() as sent:
        found = traced(x)
    assert sent.bytes == 3 * 14 * 12 * 4 == traced.lower(x).cost().bytes
    assert found.sharding == x.sharding
    np.testing.assert_allclose(np.asarray(found), form(host), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(traced(x)), np.asarray(found))
    with st.transfers() as eager:
        form(x)
    assert eager.bytes > 1.8 * sent.bytes
    assert "stencil" in traced.lower(x).as_text("layouts")


@everywhere
def test_host_arrays_have_no_halo(backend: str) -> None:
    mesh, host = mesh_of((4,), backend), array((30, 6), "float32", 1)
    x = st.device_put(host, st.NamedSharding(mesh, st.P("x")))

    def step(u: Any, added: Any) -> Any:
        new = u.copy()
        new[1:-1] = 0.5 * (u[:-2] + u[2:]) + added
        return new

    for shape in ((28, 6), (6,), (28, 1), (1,), ()):
        added = array(shape, "float32", 2)
        np.testing.assert_array_equal(np.asarray(st.jit(lambda u, a=added: step(u, a))(x)), step(host, added))
        np.testing.assert_array_equal(np.asarray(st.jit(step)(x, added)), step(host, added))


@everywhere
@pytest.mark.parametrize("spec", [(("x", "y"),), ("y", "x"), (None, "x"), ("x",), ()], ids=str)
def test_stencils_on_meshes_of_two_axes(spec: Any, backend: str) -> None:
    mesh = mesh_of((2, 3), backend)
    u, c = array((9, 11), "float64", 1), array((7, 9), "float64", 2)
    sharding = st.NamedSharding(mesh, st.P(*spec))
    x = st.device_put(u, sharding)
    y = st.device_put(c, st.NamedSharding(mesh, st.P("y")))

    def f(u: Any, c: Any, rate: float) -> Any:
        u[1:-1, 1:-1] += rate * (u[2:, :-2] - c) + u[:-2, 2:]
        u[2:, 3:] = np.sqrt(abs(u[:-2, :-3])) if isinstance(u, np.ndarray) else st.sqrt(abs(u[:-2, :-3]))

    with st.transfers() as sent:
        st.jit(f, executor="numpy")(x, y, 0.5)
    eager = st.device_put(u, sharding)
    with st.transfers() as more:
        f(eager, y, 0.5)
    f(u, c, 0.5)
    np.testing.assert_array_equal(np.asarray(x), np.asarray(eager))
    np.testing.assert_allclose(np.asarray(x), u, rtol=1e-12)
    assert sent.bytes <= more.bytes


@everywhere
@pytest.mark.parametrize("n", [1, 3, 9])
def test_short_and_empty_shards(n: int, backend: str) -> None:
    for shape in [s for s in MESHES if len(s) == 1]:
        mesh, host = mesh_of(shape, backend), array((n, 4), "float64", 1)
        x = st.device_put(host, st.NamedSharding(mesh, st.P("x")))

        def f(u: Any) -> Any:
            new = u.copy()
            new[1:] = u[1:] - u[:-1] * 2
            return new

        with st.transfers() as sent:
            found = st.jit(f)(x)
        np.testing.assert_array_equal(np.asarray(found), f(host))
        assert sent.bytes <= 4 * 8 * (n - 1)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_stencils_are_priced_on_devices_that_do_not_exist(form: Any) -> None:
    x = st.zeros((40, 12), dtype="float32", device=st.NamedSharding(st.AbstractMesh((8,), ("x",)), st.P("x")))
    report = st.simulate(st.jit(form), x)
    assert sum(o.bytes for o in report.operators) == 3 * 14 * 12 * 4
    assert st.jit(form).lower(x).cost().bytes == 3 * 14 * 12 * 4


# -- kernels that write into windows ---------------------------------------------------------------


@pytest.fixture
def small_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "LEAST", 1)


@pytest.mark.parametrize("executor", ["numpy", "c"])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_a_step_is_one_kernel(form: Any, executor: str, small_kernels: None) -> None:
    host = array((40, 12), "float64", 1)
    x = st.device_put(host, st.NamedSharding(mesh_of((4,), "numpy"), st.P("x")))
    traced = st.jit(form, executor=executor)
    np.testing.assert_array_equal(np.asarray(traced(x)), form(host))
    assert [len(k.equations) for k in traced.lower(x)._executable.kernels] == [5, 5, 5]
    np.testing.assert_array_equal(np.asarray(x), host)


def test_arrays_are_not_copied_for_a_write(small_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = st.device_put(array((64, 64), "float64", 1), st.NamedSharding(mesh_of((4,), "numpy"), st.P("x")))
    copied: list[Any] = []
    plain = window_writes.copy_rest
    monkeypatch.setattr(window_writes, "copy_rest", lambda out, *args: [copied.append(out), plain(out, *args)])
    st.jit(lambda u: in_turns(u, 6))(x)
    assert len(copied) <= 2  # Later steps write into the values of two steps before.
    copied.clear()
    st.jit(lambda u: in_place(u, 6))(x)
    assert len(copied) == 6  # Each step reads neighbours of the elements that it writes: the border is copied.


def test_the_border_only_is_copied() -> None:
    a = np.arange(60.0).reshape(6, 10)
    out = memory_pool.empty(a.shape, a.dtype)
    out[...] = -1
    box = (st.asarray(a)[2:5, 1:9])._base_and_view()[1]
    window_writes.copy_rest(out, a, box)
    wanted = a.copy()
    wanted[2:5, 1:9] = -1
    np.testing.assert_array_equal(out, wanted)


def test_what_nothing_uses_is_not_computed(small_kernels: None) -> None:
    def f(x: Any) -> Any:
        y = x + 1
        z = x.copy()
        z[1:] = x[1:] * 2 + y[1:]
        return x * 3 + 1

    x = st.asarray(array((5, 6), "float64", 1))
    np.testing.assert_array_equal(np.asarray(st.jit(f)(x)), np.asarray(x) * 3 + 1)
    assert len(st.jit(f).lower(x)._executable.nodes) == 1


@pytest.mark.parametrize("seed", range(3))
def test_writes_of_other_dtypes_and_steps(seed: int, small_kernels: None) -> None:
    draw = random.Random(seed)
    for _ in range(8):
        dtype, given = draw.choice(["float32", "int64", "float64", "complex64"]), draw.choice(["float32", "float64"])
        a, b = array((7, 9), dtype, 1), array((7, 9), given, 2)
        at = draw.choice([np.s_[1:, ::2], np.s_[::-1], np.s_[3], np.s_[:, 4], np.s_[2:3, 1:], np.s_[...], np.s_[5:5]])

        def f(x: Any, y: Any, at: Any = at) -> Any:
            x[at] = (y[at] * 2 + y[at]).astype(x.dtype)
            if x.dtype.kind in "fc":
                x[at] *= y[at] - 1
            return x[at] + 1

        x, y = st.asarray(a), st.asarray(b)
        found = st.jit(f, executor="numpy")(x, y)
        np.testing.assert_array_equal(np.asarray(found), f(a, b))
        np.testing.assert_array_equal(np.asarray(x), a)


@everywhere
def test_a_product_is_updated_by_an_operand_in_another_layout(backend: str) -> None:
    """The base of a write is no part of what its stencil computes, even if nothing else uses it."""
    mesh, host = mesh_of((2, 4), backend), np.arange(14.0).reshape(14, 1)

    def placed(rows: int, *spec: Any) -> st.ShardedTensor:
        return st.device_put(host[:rows], st.NamedSharding(mesh, st.P(*spec)))

    def updated(x: Any, y: Any, factors: Any) -> Any:
        made = x * factors[:7]
        made += y
        return made

    operands = placed(7, "y", "x"), placed(7, None, "x"), placed(14, ("x", "y"))
    found = st.jit(updated, executor="numpy")(*operands)
    np.testing.assert_array_equal(np.asarray(found), host[:7] * host[:7] + host[:7])
