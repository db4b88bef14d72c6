"""Passes: a rewrite in the list is applied to every program, on every memory, before it runs."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.core import composition, recorded
from shardtensor.interpreters.programs import passes
from shardtensor.interpreters.programs.compositions import on_buffers
from shardtensor.interpreters.programs.program import Program
from tests.layouts import mesh_of
from tests.scripts import ROOT

(REWRITE,) = re.findall(
    r"```py\n(import dataclasses.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL
)
"""The rewrite in `docs/architecture.md`: it removes -(-x)."""


@pytest.fixture
def rewriting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PASSES", [*passes.PASSES])
    exec(REWRITE, {})


def doubly_negated(x: Any) -> Any:
    return st.negative(st.negative(x)) + 1


@pytest.mark.usefixtures("rewriting")
def test_a_pass_rewrites_programs_on_every_memory_and_their_text_shows_it(backend: str) -> None:
    x = st.device_put(np.arange(12.0).reshape(4, 3), st.NamedSharding(mesh_of((4,), backend), st.P("x")))
    lowered = st.jit(doubly_negated).lower(x)
    for stage in ("program", "layouts", "groups"):
        assert "add" in lowered.as_text(stage)
        assert "negative" not in lowered.as_text(stage)
    assert lowered.cost().kernels == 1
    np.testing.assert_array_equal(np.asarray(st.jit(doubly_negated)(x)), np.arange(1.0, 13).reshape(4, 3))


@pytest.mark.usefixtures("rewriting")
def test_a_pass_rewrites_small_compositions() -> None:
    x = st.device_put(np.arange(6.0), st.NamedSharding(mesh_of((2,), "numpy"), st.P("x")))
    program = on_buffers(doubly_negated, (x,), {}, [x])
    assert program is not None
    assert [len(steps) for _, steps in program._groups] == [1]
    composed = composition(recorded)(doubly_negated)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(composed(x)), np.arange(1.0, 7))


@pytest.mark.usefixtures("rewriting")
def test_the_rewrite_of_the_page_keeps_writes_host_arrays_and_results() -> None:
    def f(x: Any, host: Any) -> Any:
        y, negative = -x, st.negative
        np.negative(y[1:], out=y[1:])
        np.negative(y[1:], out=y[1:])
        four, twice = negative(negative(negative(negative(x)))), negative(negative(host))
        return y, four, negative(host), twice + 1, negative(negative(x))

    x, host = st.device_put(np.arange(6.0), mesh_of((2,), "numpy")), np.arange(6.0)
    for made, wanted in zip(st.jit(f)(x, host), f(x, host), strict=True):
        np.testing.assert_array_equal(np.asarray(made), np.asarray(wanted))


def test_an_error_names_the_pass_that_raised_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(program: Program, setting: passes.Setting) -> Program:
        raise LookupError("no rule")

    monkeypatch.setattr(passes, "PASSES", [("failing", failing)])
    with pytest.raises(LookupError, match="no rule") as error:
        st.jit(doubly_negated)(st.ones(3))
    assert error.value.__notes__[0] == "in the rewrite of programs 'failing'"


def test_passes_that_save_transfers_run_where_elements_move(backend: str) -> None:
    """Where devices share one memory, the bits of a result are those of eager mode, and its log saves the bytes."""
    x = st.device_put(np.ones((8, 4)), st.NamedSharding(mesh_of((4,), backend), st.P("x")))
    scattered = st.NamedSharding(x.sharding.mesh, st.P("x"))
    lowered = st.jit(lambda x: st.reshard(x.sum(axis=0), scattered)).lower(x)
    moves = not passes.is_on_one_memory(lowered.program)
    assert ("layout=" in lowered.as_text()) == moves
    assert "layout=" in lowered.as_text("layouts")


def test_numbers_of_values_that_a_pass_adds_are_free() -> None:
    x = st.device_put(np.ones(4), mesh_of((2,), "numpy"))
    program = st.jit(lambda x: st.smap(lambda a: a * 2 + 1, x, devices=x.sharding.mesh) + 1).lower(x).program
    inner = [v for e in program.equations for p in e.programs.values() for v in p.made()]
    assert inner
    assert program.next_number() > max(v.number for v in (*program.inputs, *program.made(), *inner))
