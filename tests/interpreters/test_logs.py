"""What a log or a guard changes: nothing but that transfers are recorded, or refused."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import core
from shardtensor.communication.transfer_log import announced, recorded_by
from shardtensor.interpreters.eager import EAGER, EagerInterpreter
from shardtensor.interpreters.recording import RECORDING
from tests.interpreters.logged import (
    bits_of,
    differences,
    fixed_programs,
    operand,
    operators,
    outcome,
    programs,
    records_of,
)
from tests.layouts import mesh_of, put

EVERY = fixed_programs()
SOME = ("chain", "views_kept", "elements", "element_kept", "reduced", "offloaded", "joined", "masks", "sets", "psum")


def outermost() -> core.Interpreter:
    return core.outermost()


def test_the_interpreter_is_there_only_while_something_records() -> None:
    assert outermost() is EAGER
    with recorded_by(), announced(), st.transfer_guard("allow"):
        assert outermost() is EAGER
    for context in (st.transfers, lambda: st.transfer_guard("log"), lambda: recorded_by(st.TransferLog())):
        with context(), st.transfers():  # type: ignore[operator]
            assert outermost() is RECORDING
            assert core.innermost() is None
            assert not core.is_executing()
            with core.executing():
                assert core.is_executing()
        assert outermost() is EAGER
    assert core.is_executing()


def test_logs_of_threads_that_overlap() -> None:
    entered, left = threading.Barrier(2), threading.Barrier(2)
    seen: list[int] = []
    x = put(np.arange(8.0), "numpy")

    def one(k: int) -> None:
        for _ in range(50):
            entered.wait()
            with st.transfers() as log:
                x[1:] + 1
                seen.append(log.bytes)
            if k:
                left.wait()
            else:
                left.wait()

    threads = [threading.Thread(target=one, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outermost() is EAGER
    assert min(seen) >= 24


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Lists the operators that are executed."""
    seen: list[str] = []
    apply = EagerInterpreter.apply

    def counting(self: Any, op: Any, operands: Any, params: Any) -> Any:
        seen.append(op.name)
        return apply(self, op, operands, params)

    with monkeypatch.context() as patch:
        patch.setattr(EagerInterpreter, "apply", counting)
        core.set_outermost(None)
        yield seen
    core.set_outermost(None)


def test_a_guard_raises_before_anything_is_computed(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = put(np.arange(12.0), backend), put(np.arange(12.0), backend, start=4)
    before = np.array(x)
    view, index = x[1:], np.array([5, 0])
    refused: dict[str, Callable[[], Any]] = {
        "add": lambda: x + y,
        "setitem": lambda: x.__setitem__(slice(1, None), x[:-1]),
        "iadd": lambda: x.__iadd__(y),
        "view": lambda: view * 2,
        "out": lambda: np.add(view, 1, out=x[:-1]),
        "take": lambda: x[index],
        "assigned": lambda: x.__setitem__(index, y[:2]),
        "concat": lambda: st.concat([x, y]),
        "jit": lambda: st.jit(lambda a, b: a + b)(x, y),
    }
    for name, call in refused.items():
        with counted(monkeypatch) as seen, st.transfer_guard("disallow"), pytest.raises(st.TransferError):
            call()
        assert not set(seen) - {"getitem", "copy"}, name
        np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SOME else [pytest.mark.full]) for n in EVERY])
def test_a_log_changes_no_result(name: str, backend: str) -> None:
    x, y = operand(backend), operand(backend)
    wanted = outcome(lambda: bits_of(EVERY[name](x)))
    with st.transfers() as log:
        found = outcome(lambda: bits_of(EVERY[name](y)))
    assert found == wanted
    assert bits_of(x) == bits_of(y)
    assert log.bytes == sum(r.bytes for r in log)


@pytest.mark.parametrize("name", [n for n in SOME if n not in ("joined", "offloaded", "masks", "sets")])
def test_logs_of_one_memory_and_of_several_are_the_same(name: str) -> None:
    found = []
    for backend in ("numpy", "checked"):
        x = operand(backend)
        with st.transfers() as log:
            outcome(lambda: EVERY[name](x))  # noqa: B023 - it is called at once
        sizes = {key[:-1]: n for key, n in records_of(log).items() if key[-1] == "bytes"}
        found.append({tuple(str(part).replace(backend, "") for part in key): n for key, n in sizes.items()})
    assert found[0] == found[1]


def test_the_interpreter_announces_every_copy_within_a_device(backend: str) -> None:
    """They follow from which tensors share a memory, so that no inference knows them."""
    x = put(np.arange(12.0), backend)
    kept = x.copy()
    with st.transfers() as log:
        x[0] = 1
    assert log.bytes == 0
    assert log.copied > 0
    assert np.array_equal(kept, np.arange(12.0))


def test_calls_of_programs_announce_themselves(backend: str) -> None:
    m = mesh_of((4,), backend)
    x = put(np.arange(8.0), backend)

    def body(part: Any) -> Any:
        with st.transfers() as inside:
            x[1:] * 1
        assert inside.bytes >= 24
        return st.psum(part, "x")

    with st.transfers() as log:
        st.shard_map(body, mesh=m, in_specs=st.P("x"), out_specs=st.P(), check_vma=False)(x)
    assert {r.operator for r in log if r.bytes} == {"getitem", "psum"}


@pytest.mark.full
def test_programs_are_the_same_in_every_run() -> None:
    """The comparison of two versions, here of one with itself."""
    assert not list(differences(programs(8, 0, 1), programs(8, 0, 1)))
    assert not list(differences(operators(1, 0, 20), operators(1, 0, 20)))


def test_a_sort_in_a_program_records_what_it_sends(backend: str) -> None:
    """Its messages follow from elements, so that no inference knows them: here none changes devices."""
    x = put(np.arange(40_000, dtype="float32"), backend)
    sort = st.jit(lambda x: st.sort(x * 2) + 1)
    with st.transfers() as eager:
        wanted = st.sort(x * 2) + 1
    for _ in range(2):
        with st.transfers() as log:
            found = sort(x)
        assert records_of(log) == records_of(eager)
        np.testing.assert_array_equal(found, wanted)
        with st.transfer_guard("disallow"), pytest.raises(st.TransferError):
            sort(x)


def test_a_view_that_is_sorted_in_a_program_is_read_once(backend: str) -> None:
    def f(x: Any) -> Any:
        y = x * 2
        view = y[::-1]
        return st.sort(view, axis=0) + view

    x = operand(backend)
    with st.transfers() as eager:
        f(x)
    traced = st.jit(f)
    for _ in range(2):
        with st.transfers() as log:
            traced(x)
        assert log.bytes <= eager.bytes


def test_an_operator_runs_as_before_when_a_log_has_ended() -> None:
    x = put(np.arange(40_000.0)[::-1] % 977, "numpy")
    before = {name: op.parts.algorithm for name, op in core.OPS.items() if op.parts.announcing}
    wanted = bits_of(st.partition(x, 9))
    with st.transfers():
        for call in (st.sort, st.argsort, lambda x: st.partition(x, 9), st.unique, st.nonzero):
            call(x)
    assert {name: core.OPS[name].algorithm for name in before} == before
    assert bits_of(st.partition(x, 9)) == wanted
