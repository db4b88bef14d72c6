"""The passes over the rows of a kernel, as data, and the texts in both languages that have them."""

from __future__ import annotations

from typing import Any

import pytest

from shardtensor.interpreters.jit.c.c_source import c_source
from shardtensor.interpreters.jit.cuda.cuda_source import row_source
from shardtensor.interpreters.jit.kernels.expressions import EXPENSIVE, has_c
from shardtensor.interpreters.jit.kernels.kernel import Kernel, KernelBuilder
from shardtensor.interpreters.jit.kernels.row_schedule import row_schedule
from tests.draws import drawn
from tests.interpreters.jit.random_kernels import random_case, spread_kernel
from tests.interpreters.jit.test_kernels import softmax


def variance(name: str = "") -> Kernel:
    """v0 = x, v1 = the function of it, if there is one; then the mean, the differences and the sum of their squares."""
    k = KernelBuilder(2, 1)
    x = k.input("f4", (True, True))
    y = k.call(name, x) if name else x
    k.output(k.reduce("sum_of_squares", k.call("subtract", y, k.reduce("mean", y))), per_row=True)
    return k.build()


@pytest.mark.parametrize("stores", [True, False])
def test_a_stage_needs_the_reductions_of_those_before(stores: bool) -> None:
    """The values of a softmax are x, the maximum, the difference from it, its exponential, the sum, the quotient."""
    schedule = row_schedule(softmax(), stores=stores)
    assert schedule.totals == (1, 4)
    assert [stage.reductions for stage in schedule.stages] == [(1,), (4,), ()]
    assert [stage.known for stage in schedule.stages] == [(), (1,), (4,)]
    assert [schedule.known(s) for s in range(3)] == [[], [1], [1, 4]]
    assert not schedule.moments


def test_expensive_values_are_stored_for_later_stages_or_computed_again() -> None:
    stored, again = [row_schedule(softmax(), stores=stores) for stores in (True, False)]
    assert stored.stored == (3,)
    assert [stage.needs for stage in stored.stages] == [(0,), (0, 2, 3), (3, 5)]
    assert [stage.loads for stage in stored.stages] == [{0}, {0}, {3}]
    assert again.stored == ()
    assert [stage.needs for stage in again.stages] == [(0,), (0, 2, 3), (0, 2, 3, 5)]
    assert [stage.loads for stage in again.stages] == [{0}] * 3


@pytest.mark.parametrize("stores", [True, False])
def test_a_variance_has_one_stage_with_its_mean(stores: bool) -> None:
    schedule = row_schedule(variance(), stores=stores)
    assert schedule.moments == {3: 1}
    assert [stage.reductions for stage in schedule.stages] == [(1, 3), ()]
    assert [stage.needs for stage in schedule.stages] == [(0,), ()]
    schedule = row_schedule(spread_kernel("f8"), stores=stores)  # With results for each element.
    assert schedule.moments == {4: 2}
    assert [stage.needs for stage in schedule.stages] == [(0, 1), (0, 1, 3, 5)]


def test_the_variance_of_an_expensive_value_reads_it_where_it_is_stored() -> None:
    stored, again = [row_schedule(variance("exp"), stores=stores) for stores in (True, False)]
    assert (stored.moments, stored.stored) == ({}, (1,))
    assert [(stage.needs, stage.loads) for stage in stored.stages] == [((0, 1), {0}), ((1, 3), {1}), ((), set())]
    assert (again.moments, again.stored) == ({4: 2}, ())
    assert [(stage.needs, stage.loads) for stage in again.stages] == [((0, 1), {0}), ((), set())]


def test_only_the_squares_of_differences_from_the_own_mean_are_a_moment() -> None:
    k = KernelBuilder(2, 1)
    x, y = k.input("f4", (True, True)), k.input("f4", (True, True))
    k.output(k.reduce("sum_of_squares", x), per_row=True)
    k.output(k.reduce("sum_of_squares", k.call("subtract", x, k.reduce("mean", y))), per_row=True)
    k.output(k.reduce("sum_of_squares", k.call("subtract", x, k.reduce("max", x))), per_row=True)
    k.output(k.reduce("sum_of_squares", k.call("add", x, k.reduce("mean", x))), per_row=True)
    schedule = row_schedule(k.build(), stores=True)
    assert not schedule.moments
    assert [len(stage.reductions) for stage in schedule.stages] == [4, 3, 0]


def computed(kernel: Kernel, value: int, given: Any) -> set[int]:
    """Returns a value, and those from which it is computed up to values that are given."""
    node = kernel.node(value)
    below = node.operands if node is not None and value not in given else ()
    return {value}.union(*[computed(kernel, v, given) for v in below])


def check_stages(kernel: Kernel, *, stores: bool) -> None:
    """Asserts that each stage has what its reductions, or the results, are computed from."""
    schedule = row_schedule(kernel, stores=stores)
    *reducing, last = schedule.stages
    assert sorted([v for stage in reducing for v in stage.reductions]) == list(schedule.totals)
    assert not last.reductions
    known: set[int] = set()
    kept: set[int] = set()
    for stage in schedule.stages:
        known.update(stage.known)
        wanted = [
            kernel.nodes[v - len(kernel.inputs)].operands[0] for v in stage.reductions if v not in schedule.moments
        ]
        if stage is last:
            wanted = [out.value for out in kernel.outputs if not out.per_row]
        needed = {u for v in wanted for u in computed(kernel, v, known | stage.loads)}
        assert needed - known == set(stage.needs) - known
        assert all(v < len(kernel.inputs) or v in kept for v in stage.loads)
        kept |= {v for v in stage.needs if v in schedule.stored}
    assert all(kernel.nodes[v - len(kernel.inputs)].name in EXPENSIVE for v in schedule.stored)
    assert stores or not schedule.stored
    assert set(range(len(kernel.inputs))) >= {v for v in range(kernel.values) if kernel.is_row(v)} - known


def test_random_schedules_have_what_they_need_in_both_languages() -> None:
    names = ("add", "subtract", "maximum", "sin", "exp", "arctan2")
    cases = [random_case(seed, ("f4", "f8"), names).kernel for seed in range(drawn(1200, fast=200))]
    kernels = [kernel for kernel in cases if kernel.row_ndim]
    stored = 0
    for kernel in kernels:
        check_stages(kernel, stores=True)
        check_stages(kernel, stores=False)
        stored += bool(row_schedule(kernel, stores=True).stored)
        if has_c(kernel):
            stages = len(row_schedule(kernel, stores=True).stages) - 1
            assert c_source([kernel], []).count("        case ") == 2 * stages
            text = row_source(kernel, 1, 1, frozenset()).divided
            stages = len(row_schedule(kernel, stores=False).stages) - 1
            assert text.count("void part_") == text.count("void join_") == stages
    assert len(kernels) > 50
    assert stored > 2
