"""The calls and errors of which processes compare a hash, in a job of one process."""

from __future__ import annotations

import pytest

from shardtensor.communication.agreement import _DETAIL, Agreement
from shardtensor.communication.local_engine import LocalEngine
from shardtensor.errors import DistributedError


def compared(agreement: Agreement) -> list[str]:
    """Returns the calls and errors that the last exchange has compared, without the messages of the errors."""
    return [text.partition(_DETAIL)[0] for _, _, text in agreement._last_calls()]


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
