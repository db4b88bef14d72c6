"""The calls and errors of which processes compare a hash, in a job of one process; and what they say of a difference."""

from __future__ import annotations

import hashlib
import pickle
import re
import threading
from typing import Any, ClassVar

import pytest

from shardtensor.communication.between_processes.agreement import Agreement
from shardtensor.communication.between_processes.difference import (
    DETAIL,
    Header,
    Report,
    State,
    difference,
    numbers_text,
    processes_text,
)
from shardtensor.communication.engine_protocol import LateError, LostError
from shardtensor.communication.local_engine import LocalEngine
from shardtensor.errors import DistributedError


def compared(agreement: Agreement) -> list[str]:
    """Returns the calls and errors that the last exchange has compared, without the messages of the errors."""
    return [text.partition(DETAIL)[0] for _, _, text in agreement._last_calls()]


def test_errors_are_compared_in_the_order_of_the_calls() -> None:
    agreement = Agreement(LocalEngine(), 20)
    agreement.note("exp(x)")
    agreement.note_error("log(x)", FloatingPointError("divide by zero"))
    agreement.note("sum(x)")
    agreement.note_error("x[9]", IndexError("out of bounds"))
    agreement.synchronize("end")
    assert compared(agreement) == ["exp(x)", "FloatingPointError in log(x)", "sum(x)", "IndexError in x[9]", "end"]


def test_an_error_beside_a_call_of_another_thread_is_compared_after_that_call() -> None:
    agreement = Agreement(LocalEngine(), 20)
    with agreement._exclusive("sum(x)"):
        agreement._agree("sum(x)")
        agreement.note_error("log(x)", FloatingPointError("divide by zero"))
        with pytest.raises(DistributedError, match="another thread is in a call"):
            agreement.note("exp(x)")
    agreement.synchronize("end")
    assert compared(agreement) == ["sum(x)", "FloatingPointError in log(x)", "end"]


@pytest.mark.parametrize("several", [Agreement.settled, Agreement.accompanied])
def test_calls_of_other_threads_between_the_exchanges_of_a_call_are_refused(several: Any) -> None:
    """In such a call, processes send messages without comparing what they send: another thread's would be taken for it."""
    agreement, errors = Agreement(LocalEngine(), 20), []

    def other() -> None:
        for call in (agreement.note, lambda call: agreement.exchange(call, {}, {})):
            with pytest.raises(DistributedError, match=r"^exp\(x\): another thread is in a call") as caught:
                call("exp(x)")
            errors.append(caught.value)

    def in_another_thread() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with several(agreement, "psum"):
        agreement.exchange("psum", {}, {})
        in_another_thread()
        agreement.exchange("psum", {}, {})
    assert len(errors) == 2
    with pytest.raises(ZeroDivisionError), several(agreement, "psum"):
        raise ZeroDivisionError
    thread = threading.Thread(target=agreement.note, args=("log(x)",))
    thread.start()
    thread.join()
    agreement.synchronize("end")
    assert compared(agreement)[-2:] == ["log(x)", "end"]
    assert "exp(x)" not in compared(agreement)


# -- what differs ----------------------------------------------------------------------------------

SUM, MEAN = "sum(float64[8] P('x') #5, None)", "mean(float64[8] P('x') #5, None)"


def reported(*processes: tuple[str, list[str]], states: str = "", failure: str = "", cut: int = 0) -> tuple[str, str]:
    """The message and the details where these processes are at places, and have made calls after a common one. The
    letter R, F or E in ``states`` stands for a process that runs, has failed or has ended.
    """
    headers, reports = [], []
    for (where, calls), state in zip(processes, states or "R" * len(processes), strict=True):
        place, _, function = where.partition(" ")
        found, digest = {}, b""
        for n, call in enumerate(["initialize", *calls], 1):
            digest = hashlib.blake2b(digest + call.partition(DETAIL)[0].encode(), digest_size=4).digest()
            found[n] = (digest.hex(), call)
        headers.append(Header(3, len(found), digest, {"R": State.RUNNING, "F": State.FAILED, "E": State.ENDED}[state]))
        kept = {n: call for n, call in found.items() if n > cut}
        packed = Report(failure if state == "F" else "", place, function, kept).packed()
        reports.append(Report.unpacked(packed))
    return difference(headers, reports)


def test_calls_that_differ_are_named_with_their_places() -> None:
    message, details = reported(
        *[("a.py:20 mean", [MEAN, "mean: 8 bytes (6adc)"])] * 2, ("a.py:22 sum", [SUM, "sum: 8 bytes"])
    )
    assert message == "the processes make different calls: process 2: a.py:22 sum; processes 0-1: a.py:20 mean"
    assert details == f"call 2 is {SUM} in process 2, and {MEAN} in processes 0-1"


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (("gather(float64[3])", "gather(float64[4])"), "the processes call gather with different arguments: process 0: a.py:1 gather(float64[3]); process 1: a.py:2 gather(float64[4])"),
        ((SUM, SUM.replace("5", "derived(3, 4) after 2 writes")), "the processes pass different tensors to sum: process 0: a.py:1 sum; process 1: a.py:2 sum"),
        (("add(#3, host array int64[2] with checksum 12345678)", "add(#3, host array int64[2] with checksum 12345679)"), "the processes have host arrays with different elements: process 0: a.py:1 add; process 1: a.py:2 add"),
        (("exp(#3, 1)", "log(#3, 1)"), "the processes make different calls: process 0: exp before a.py:1 sum; process 1: log before a.py:2 sum"),
    ],
)  # fmt: skip
def test_differences_are_reported_without_numbers_and_checksums(calls: tuple[str, str], message: str) -> None:
    function = "sum" if "exp" in calls[0] else calls[0].partition("(")[0]
    assert (
        reported(*[(f"a.py:{k} {function}", [call, f"{function}: 8 bytes"]) for k, call in enumerate(calls, 1)])[0]
        == message
    )


def test_processes_that_have_failed_or_ended_are_named_and_the_places_of_the_others() -> None:
    others = [("a.py:20 mean", [MEAN]), ("a.py:20 mean", [MEAN])]
    at = "processes 0-1 are at a.py:20 mean"
    failed, _ = reported(*others, ("a.py:22", []), states="RRF", failure="ValueError: no rows")
    assert failed == f"process 2 failed at a.py:22, and the others did not: {at}; ValueError: no rows"
    ended, details = reported(*others, ("", []), states="RRE")
    assert ended == f"process 2 has ended without an exception, and {at}; all processes have to make the same calls"
    assert details == f"process 2 has ended after call 1; call 2 is {MEAN} in processes 0-1"
    alone, _ = reported(*others, ("a.py:23 mean", [f"ValueError in log{DETAIL}a.py:21{DETAIL}no", MEAN]))
    assert alone == f"process 2 raised ValueError in log at a.py:21, and the others did not: {at}; no"
    more, _ = reported(*[("", [MEAN])] * 2, ("", [MEAN, "exp(1)"]), states="EEE")
    assert more == (
        "the processes make different calls: process 2: exp before it ended; processes 0-1: nothing before it ended"
    )
    everywhere, _ = reported(*[("a.py:22", [])] * 2, states="FF", failure="ValueError: no rows")
    assert everywhere == "processes 0-1 failed at a.py:22: ValueError: no rows"


def test_a_difference_before_the_calls_that_are_kept() -> None:
    message, details = reported(("a.py:9 sum", ["exp(1)", SUM]), ("a.py:9 sum", ["log(1)", SUM]), cut=2)
    assert message == "the processes have made different calls some time ago; processes 0-1 are at a.py:9 sum"
    assert details == "the calls differ in call 3, or before it"


def test_names_of_processes() -> None:
    assert [numbers_text(ks) for ks in ([3, 2, 0], [1], [0, 1], [4, 2, 0])] == ["0, 2-3", "1", "0-1", "0, 2, 4"]
    assert (processes_text([3]), processes_text([0, 1, 3])) == ("process 3", "processes 0-1, 3")


def test_an_error_of_the_job_has_details_and_keeps_them_in_a_pickle() -> None:
    error = pickle.loads(pickle.dumps(DistributedError("a", "b")))
    assert (str(error), error.details, DistributedError("a").details) == ("a", "b", "")


class Told(LocalEngine):
    """An engine that loses another process, which has told why or has not."""

    told: ClassVar[dict[int, str]] = {}
    lost: ClassVar[list[int]] = []
    error: ClassVar[type[Exception]] = LostError

    def agree(self, record: bytes, deadline: float) -> list[bytes]:
        raise self.error

    def notices(self) -> dict[int, str]:
        return self.told

    def absent(self) -> list[int]:
        return self.lost


@pytest.mark.parametrize(
    ("told", "lost", "error", "message"),
    [
        ({1: f"a.py:3{DETAIL}KeyboardInterrupt"}, [], LostError, "process 1 failed at a.py:3, in an exchange: KeyboardInterrupt"),
        ({1: f"{DETAIL}ValueError: no"}, [2], LateError, "process 1 failed, in an exchange: ValueError: no"),
        ({}, [1, 2, 4], LostError, "processes 1-2, 4 have ended or cannot be reached (killed, or the host is down)"),
        ({}, [], LostError, "another process has ended or cannot be reached (killed, or the host is down)"),
        ({}, [3], LateError, "process 3 did not reach HERE sync_global_devices within 20 s"),
    ],
)  # fmt: skip
def test_a_process_that_is_lost_in_an_exchange(
    told: dict[int, str], lost: list[int], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("told", told), ("lost", lost), ("error", error)):
        monkeypatch.setattr(Told, name, value)
    agreement = Agreement(Told(), 20)
    with pytest.raises(DistributedError) as raised:
        agreement.synchronize("sync_global_devices('a')")
    assert re.sub(r"\S*test_agreement.py:\d+", "HERE", str(raised.value)) == message
    assert raised.value.details.startswith("process 0, call 1, sync_global_devices('a'): ")
