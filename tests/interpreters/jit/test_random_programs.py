"""Random programs with views, writes, reductions, reshards and aliasing: jit equals eager mode to the bit, moves the
same bytes, and agrees with NumPy.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.interpreters.jit.grouping import groups
from tests.draws import drawn
from tests.interpreters.jit.random_programs import STEPS, run_seeds, run_step
from tests.interpreters.test_infer import totals
from tests.layouts import MESHES, array, mesh_of, specs


@pytest.mark.parametrize("fuses", [False, True], ids=["one by one", "fused"])
@pytest.mark.parametrize("examples", [drawn(40, fast=8), pytest.param(3000, marks=pytest.mark.full)])
def test_drawn_programs(examples: int, fuses: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "LEAST", 1 if fuses else 1 << 30)

    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        mesh = mesh_of(data.draw(some.sampled_from(MESHES)), backend)
        shape = data.draw(some.sampled_from([(5, 5), (4, 3), (8, 2), (1, 6), (7, 1)]))
        shardings = [st.NamedSharding(mesh, data.draw(specs(mesh, 2))) for _ in range(3)]
        count = some.integers(0, 30)
        program = data.draw(
            some.lists(some.tuples(some.sampled_from(STEPS), count, count, count), min_size=1, max_size=10)
        )
        alias = data.draw(some.sampled_from(["none", "same", "shifted", "view"]))

        def made(xp: Any) -> tuple[Any, Any, Any]:
            x, y = array(shape, "float64", 1), array(shape, "float64", 2)
            if xp is st:
                x, y = (st.device_put(a, s) for a, s in zip((x, y), shardings, strict=False))
            a, b = {"none": (x, y), "same": (x, x), "shifted": (x[:-1], x[1:]), "view": (x.T, x)}[alias]
            return (a, b), x, y

        def f(xp: Any, a: Any, b: Any) -> Any:
            values = [a, b]
            placed = (lambda x, n: st.reshard(x, shardings[n % 3])) if xp is st else (lambda x, n: x.copy())
            for step in program:
                run_step(xp, values, step, placed)
            return values[2:]

        answers = []
        for call, xp in ((f, np), (f, st), (st.jit(lambda a, b: f(st, a, b), executor="numpy"), None)):
            args, *bases = made(st if xp is None else xp)
            with np.errstate(all="ignore"), st.transfers() as log:
                try:
                    found = call(*args) if xp is None else call(xp, *args)
                except (ValueError, IndexError) as error:
                    found = type(error)
            if xp is None and fuses and isinstance(found, list):  # A recorded call does not fuse.
                args, *bases = made(st)
                with np.errstate(all="ignore"):
                    found = call(*args)
            answers.append((found, bases, log))
        (plain, bases, _), (eager, mine, sent), (traced, its, moved) = answers
        if isinstance(eager, type) or isinstance(plain, type):
            assert isinstance(traced, type) or isinstance(plain, type)
            return
        for a, b in zip([*eager, *mine], [*traced, *its], strict=True):
            assert a.sharding == b.sharding
            np.testing.assert_array_equal(np.asarray(b), np.asarray(a))
        for a, b in zip([*plain, *bases], [*traced, *its], strict=True):
            np.testing.assert_allclose(np.asarray(b), a, rtol=1e-6, atol=1e-8 * (1 + np.abs(a).max(initial=0)))
        assert sum(totals(moved).values()) <= sum(totals(sent).values())

    run()


def test_random_programs() -> None:
    run_seeds("numpy", 0, 40)


@pytest.mark.full
@pytest.mark.parametrize("part", range(50))
def test_a_hundred_thousand_random_programs(part: int) -> None:
    run_seeds("numpy", 2000 * part, 2000)


def test_programs_move_no_more_bytes_than_eager_mode() -> None:
    run_seeds(None, 0, 20, every=1)


@pytest.mark.full
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_programs_move_no_more_bytes_than_eager_mode(part: int) -> None:
    run_seeds(None, 500 * part, 500, every=1)


def test_random_programs_in_c() -> None:
    run_seeds("c", 0, 3)


@pytest.mark.full
@pytest.mark.parametrize("part", range(20))
def test_three_thousand_random_programs_in_c(part: int) -> None:
    run_seeds("c", 150 * part, 150)
