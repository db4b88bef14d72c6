"""`st.debug_nans`: the operator, the line and the element of the first NaN, wherever operators run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import core
from shardtensor.interpreters.eager import EAGER
from shardtensor.interpreters.nan_checks import CHECKS
from shardtensor.interpreters.recording import RECORDING
from tests.layouts import mesh_of, put


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Functions of NumPy warn of what they compute."""
    with np.errstate(all="ignore"):
        yield


def values(backend: str) -> Any:
    """-3, -2, …, 12 on eight devices: the first NaN of the logarithm is that of -3."""
    return put(np.arange(16.0) - 3, backend)


def error_of(call: Callable[[], Any]) -> str:
    with st.debug_nans(), pytest.raises(st.NaNError) as caught:
        call()
    assert isinstance(caught.value, FloatingPointError)
    return str(caught.value)


def here(offset: int = 0) -> str:
    """The file and the line of the caller, as errors name them."""
    return f"test_debug_nans.py:{sys._getframe(1).f_lineno + offset}"


# -- operators -------------------------------------------------------------------------------------


def test_an_error_names_operator_line_index_device_and_operands(backend: str) -> None:
    x = values(backend)
    text = error_of(lambda: st.log(x - 4))
    assert text.startswith(f"log: the result has a NaN at index (0,) on {backend}:0, at ")
    assert here(-2) + ": " in text
    assert f"{st.typeof(x)} of x {st.typeof(x)}; no operand has one" in text
    assert "st.where" in text


def test_the_index_is_that_of_the_whole_and_the_device_holds_it(backend: str) -> None:
    mesh = mesh_of((2, 4), backend)
    x = np.ones((4, 8))
    x[3, 6] = -1
    y = st.device_put(x, st.NamedSharding(mesh, st.P(*mesh.axis_names)))
    assert f"at index (3, 6) on {mesh.devices[1, 3]}, at" in error_of(lambda: np.log(y))
    replicated = st.device_put(x, st.NamedSharding(mesh, st.P()))
    assert f"at index (3, 6) on {mesh.devices[0, 0]}, at" in error_of(lambda: np.log(replicated))


def test_operands_that_have_a_nan_or_an_infinity_are_named(backend: str) -> None:
    x = put(np.array([1.0, np.nan, np.inf]), backend)
    assert f"x1 has a NaN at index (1,) on {x.sharding.mesh.flat[1]} already" in error_of(lambda: x + 1)
    assert "x2 nan; x2 has a NaN already" in error_of(lambda: x[2:] * float("nan"))
    assert "x1 has an infinity at index (0,)" in error_of(lambda: x[2:] * 0)


@pytest.mark.parametrize("dtype", ["float32", "complex128", st.bfloat16])
def test_dtypes(dtype: Any) -> None:
    x = st.asarray(np.array([1, np.inf]), dtype=dtype)
    assert "at index (1,) on numpy:1" in error_of(lambda: x - x)


def test_a_cast_can_make_a_nan() -> None:
    assert "astype: the result has a NaN" in error_of(lambda: st.asarray([1e10]).astype(st.float8_e4m3fn))


def test_no_error_without_a_nan_that_an_operator_computes(backend: str) -> None:
    x = put(np.array([1.0, np.nan, 4.0, np.inf]), backend)
    with st.debug_nans():
        st.full((4,), np.nan), st.empty(8), st.asarray(np.array([np.nan])), st.zeros(3) / 1
        assert np.isnan(x[1:]).tolist() == [True, False, False]  # views, and results that are bools
        assert st.nan_to_num(x[:3]).tolist() == [1, 0, 4]
        assert st.nanmean(x[:3]) == 2.5
        assert st.where(np.isnan(x), 0, x)[1] == 0
        assert (st.arange(4) // 2).tolist() == [0, 0, 1, 1]
        assert (st.asarray([np.inf, 1.0]) * 2)[0] == np.inf
        y = x.copy()
        y[0] = np.nan
        assert np.isnan(y.reshape(2, 2).T[0, 0])
        assert float(st.sum(st.asarray([]))) == 0


def test_writes_in_place(backend: str) -> None:
    x, infinite = put(np.ones(8), backend), put(np.full(8, np.inf), backend)

    def update() -> None:
        x[3:] -= infinite[3:]
        x[2:] += infinite[2:]

    text = error_of(update)
    assert text.startswith("add: the result has a NaN at index (1,)")
    assert here(-4) in text
    assert "x2 has an infinity" in text
    assert error_of(lambda: np.subtract(infinite, np.inf, out=x)).startswith("subtract: the result has a NaN")


def test_functions_that_are_composed_are_named() -> None:
    x = st.asarray([np.inf, 1.0])
    assert error_of(lambda: st.std(x)).startswith("std: the result has a NaN")
    assert error_of(lambda: st.trapezoid(st.asarray([np.inf, -np.inf]))).startswith("trapezoid: the result has a NaN")


def test_a_log_is_recorded_and_a_guard_applies() -> None:
    x = st.ones(8, device=mesh_of((8,), "numpy"))
    with st.transfers() as without:
        x[1:] + x[:-1]
    with st.debug_nans(), st.transfers() as log:
        x[1:] + x[:-1]
    assert log.bytes == without.bytes > 0
    with st.debug_nans(), st.transfer_guard("disallow"), pytest.raises(st.TransferError):
        x[1:] + x[:-1]


# -- programs --------------------------------------------------------------------------------------


def test_jit_names_the_operator_and_the_line_in_the_function(backend: str) -> None:
    x = values(backend)

    @st.jit
    def f(x: Any) -> Any:
        masked = st.where(x > 0, st.log(x), 0)  # This NaN does not reach a result.
        return (masked + 1) * 2, st.sqrt(x - 5) + masked

    f(x)
    text = error_of(lambda: f(x))
    assert text.startswith(f"sqrt: the result has a NaN at index (0,) on {backend}:0, at ")
    assert here(-5) in text
    assert "it is called in f, a function of jit" in text
    with st.debug_nans():
        assert st.jit(lambda x: st.where(x > 0, st.log(x), 0))(x)[0] == 0
        assert np.isnan(st.jit(lambda x: x[::-1])(put(np.array([np.nan, 1]), backend))[1])
    assert "an operand has a NaN at index (0,)" in error_of(
        lambda: st.jit(lambda x: x[::-1] + 1)(put(np.array([np.nan, 1]), backend)[::-1])
    )


def test_offloaded_tensors(backend: str) -> None:
    x = values(backend)
    waiting = st.device_put(x, x.sharding.with_memory_kind("pinned_host"))
    for f in (st.log, st.jit(st.log)):
        text = error_of(lambda f=f: f(waiting))
        assert text.startswith("log: the result has a NaN at index ")
    with st.debug_nans():
        assert np.array_equal(waiting + 1, np.asarray(x) + 1)
        st.jit(lambda x: (x, x + 1), donate_argnums=0)(waiting)


@pytest.mark.parametrize("executor", ["numpy", "c", None])
def test_executors(executor: str | None) -> None:
    f = st.jit(lambda x: (st.log(x) + 1).sum(), executor=executor)
    assert error_of(lambda: f(values("numpy"))).startswith("log: ")


def test_after_an_error_of_jit_nothing_is_written_or_donated(backend: str) -> None:
    x = values(backend)

    def write(x: Any) -> Any:
        x[2:4] = st.log(x[:2])
        x += 1
        return x.sum()

    before = np.array(x)
    assert error_of(lambda: st.jit(write)(x)).startswith("log: ")
    assert error_of(lambda: st.jit(lambda a: st.log(a), donate_argnums=0)(x)).startswith("log: ")
    assert np.array_equal(x, before)
    with st.debug_nans():
        st.jit(lambda a: st.abs(a) + 1, donate_argnums=0)(x)
    with pytest.raises(st.DonatedError):
        x + 1


@pytest.mark.parametrize("is_jit", [False, True])
def test_loops_and_branches(backend: str, is_jit: bool) -> None:
    x, jit = values(backend), st.jit if is_jit else lambda f: f
    programs = {
        "sqrt": lambda x: st.fori_loop(0, 30, lambda i, v: st.sqrt(v - 1), st.abs(x) + 20),
        "log": lambda x: st.cond(x.sum() > 0, lambda v: st.log(v), lambda v: v, x),
        "arccos": lambda x: st.scan(lambda c, v: (c + 1, st.acos(v)), 0, x),
        "divide": lambda x: st.while_loop(lambda v: v[0] > -5, lambda v: v - 1 + (v * 0) / (v[4:5] - 1), x)[0],
    }
    for name, fn in programs.items():
        text = error_of(lambda fn=fn: jit(fn)(x))  # type: ignore[misc]
        assert text.startswith(("acos", "arccos")) if name == "arccos" else text.startswith(f"{name}: "), text
        assert "test_debug_nans.py:" in text


def test_operands_of_operators_in_loops_and_maps_are_named() -> None:
    x, nan = values("numpy"), put(np.full(8, np.nan), "numpy")

    def doubled(x: Any) -> Any:
        return st.fori_loop(0, 3, lambda i, v: v * 2, x)

    assert "an operand has a NaN at index (0,) on numpy:0 already" in error_of(lambda: st.jit(doubled)(nan))
    spec = x.sharding.spec
    mapped = st.shard_map(lambda v: v * 2, mesh=x.sharding.mesh, in_specs=spec, out_specs=spec)
    assert "an operand has a NaN at index (0,)" in error_of(lambda: st.jit(mapped)(nan))
    text = error_of(lambda: st.jit(lambda x: st.fori_loop(0, 3, lambda i, v: v - v * np.inf, st.abs(x) + 1))(x))
    assert text.startswith("subtract: ")
    assert "an operand has an infinity at index (0,)" in text
    assert "no operand has one" in error_of(lambda: st.jit(lambda x: st.fori_loop(0, 3, lambda i, v: st.log(v), x))(x))


# -- gradients -------------------------------------------------------------------------------------


def norm(x: Any) -> Any:
    return st.sqrt(st.sum(x * x))


NORM = here(-3)


@pytest.mark.parametrize("is_jit", [False, True])
def test_a_backward_pass_names_the_operator_and_its_line(backend: str, is_jit: bool) -> None:
    x = put(np.zeros(8), backend)
    gradient = st.jit(st.grad(norm)) if is_jit else st.grad(norm)
    text = error_of(lambda: gradient(x))
    assert text.startswith("multiply: ")
    assert "in the backward pass" in text
    assert NORM in text
    assert ("an operand has an infinity at index" if is_jit else "the cotangent of its result has an infinity") in text
    if not is_jit:
        assert "the cotangent of x1 has a NaN at index (0,)" in text


def test_the_forward_pass_and_other_derivatives() -> None:
    x = values("numpy")
    assert error_of(lambda: st.grad(lambda x: st.log(x).sum())(x)).startswith("log: the result has a NaN")
    assert error_of(lambda: st.vmap(st.log)(x)).startswith("log: ")
    assert "NaN" in error_of(lambda: st.jvp(norm, (st.zeros(4),), (st.ones(4),)))
    assert "NaN" in error_of(lambda: st.hessian(norm)(st.zeros(4)))
    assert "multiply: in the backward pass" in error_of(lambda: st.grad(st.remat(norm))(st.zeros(4)))


def test_a_rule_of_the_user_is_named() -> None:
    @st.custom_vjp
    def f(x: Any) -> Any:
        return x * 2

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g * st.nan,))
    text = error_of(lambda: st.grad(lambda x: f(x).sum())(st.ones(3)))
    assert text.startswith("multiply: the result has a NaN")
    assert here(-3) in text


# -- maps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_jit", [False, True])
def test_maps_raise_in_the_program_of_the_device(backend: str, is_jit: bool) -> None:
    mesh, jit = mesh_of((4,), backend), st.jit if is_jit else lambda f: f
    x = st.device_put(np.array([1.0, 2, 3, 4, 5, -6, 7, 8]), st.NamedSharding(mesh, st.P(mesh.axis_names[0])))

    def program(part: Any) -> Any:
        return st.psum(st.log(part).sum(), mesh.axis_names[0])

    line = here(-2)
    mapped = jit(st.shard_map(program, mesh=mesh, in_specs=st.P(mesh.axis_names[0]), out_specs=st.P()))
    text = error_of(lambda: mapped(x))
    assert text.startswith(f"log: the result has a NaN at index (1,) on {mesh.flat[2]}")
    assert line in text


def test_pmap_names_the_shard() -> None:
    def f(part: Any) -> Any:
        return np.log(part)

    with st.debug_nans(), pytest.raises(st.NaNError) as caught:
        st.pmap(f, np.array([1.0, 2.0, -1.0]))
    assert str(caught.value).startswith("pmap: the function f (")
    assert "has returned a shard that has a NaN on numpy:2" in str(caught.value)
    assert caught.value.__notes__ == ["pmap: raised for shard 2 on numpy:2"]
    assert error_of(lambda: st.pmap(lambda x: st.psum(x, "i"), np.array([np.inf, -np.inf]), axis_name="i")).startswith(
        "psum: the result has a NaN"
    )
    with st.debug_nans():  # as in eager mode, only results count
        assert st.pmap(lambda x: np.nansum(x * np.nan), np.ones(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("is_jit", [False, True])
def test_gradients_in_and_of_maps(is_jit: bool) -> None:
    mesh, jit = mesh_of((4,), "numpy"), st.jit if is_jit else lambda f: f
    (axis,) = mesh.axis_names
    x = st.zeros(8, device=st.NamedSharding(mesh, st.P(axis)))
    total = st.shard_map(lambda p: st.psum(norm(p), axis), mesh=mesh, in_specs=st.P(axis), out_specs=st.P())
    of = error_of(lambda: jit(st.grad(lambda x: total(x)))(x))
    inside = st.shard_map(st.grad(norm), mesh=mesh, in_specs=st.P(axis), out_specs=st.P(axis))
    for text in (of, error_of(lambda: jit(inside)(x))):
        assert text.startswith("multiply: ")
        assert "in the backward pass" in text
        assert NORM in text


# -- the mode --------------------------------------------------------------------------------------


def is_on() -> bool:
    try:
        st.log(st.asarray([-1.0]))
    except st.NaNError:
        return True
    return False


def test_contexts_nest_and_are_left_after_errors() -> None:
    mode = st.debug_nans
    with mode():
        assert is_on()
        with mode(False):
            assert not is_on()
            with mode():
                assert is_on()
            assert not is_on()
        assert is_on()
        with pytest.raises(ZeroDivisionError), mode(False):
            raise ZeroDivisionError
        assert is_on()
    assert not is_on()
    again = st.debug_nans()
    for _ in range(2):
        with again, again:
            assert is_on()
        assert not is_on()
    assert core.outermost() is EAGER


def test_a_call_sets_the_mode_of_the_process() -> None:
    st.debug_nans(True)
    try:
        assert is_on()
        assert in_thread(is_on)
        with st.debug_nans(False):
            assert not is_on()
            assert in_thread(is_on)
    finally:
        st.debug_nans(False)
    assert not is_on()
    assert core.outermost() is EAGER


def in_thread(call: Callable[[], bool]) -> bool:
    seen: list[bool] = []
    errors = np.geterr()

    def run() -> None:
        with np.errstate(**errors):
            seen.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen[0]


def test_other_threads_have_modes_of_their_own() -> None:
    with st.debug_nans(), st.transfers():
        assert core.outermost() is CHECKS
        assert not in_thread(is_on)
    assert core.outermost() is EAGER
    entered, left = threading.Barrier(2), threading.Barrier(2)
    seen: list[tuple[bool, bool]] = []

    def other() -> None:
        with np.errstate(all="ignore"), st.debug_nans():
            entered.wait()
            left.wait()
            seen.append((is_on(), core.outermost() is CHECKS))

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    with st.transfers():
        assert not is_on()
    assert not is_on()
    left.wait()
    thread.join()
    assert seen == [(True, True)]
    assert core.outermost() is EAGER


def test_the_levels_of_interpreters() -> None:
    with st.transfers():
        assert core.outermost() is RECORDING
        with st.debug_nans():
            assert core.outermost() is CHECKS
        assert core.outermost() is RECORDING


def test_what_is_no_bool_is_an_error() -> None:
    with pytest.raises(st.ArgumentTypeError, match="debug_nans: enabled is a str; wanted True or False"):
        st.debug_nans("on")  # type: ignore[arg-type]
    assert core.outermost() is EAGER


def test_it_costs_nothing_while_it_is_off() -> None:
    x = st.ones(16)
    with st.debug_nans():
        x + x
    assert core._outermost == EAGER.apply  # Calls take the same way as before.
