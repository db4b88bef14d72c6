"""The engine over NCCL, on the simulated CuPy, whose NCCL connects processes by sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtensor.testing import EngineTests
from tests.communication.test_distributed import FULL, launch
from tests.communication.test_engines import NO_GLOO, NO_MPI
from tests.conftest import NO_GPU

pytestmark = pytest.mark.skipif(not NO_GPU, reason="the double of CuPy is used where there is no GPU")

HERE = Path(__file__).parent
CHECKS = str(HERE / "spanning.py")


class Nccl(EngineTests):
    engine = "nccl"
    module = "tests.communication.nccl_program"


@pytest.mark.full
@pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
class TestOverMPI(Nccl):
    launcher = "mpi"
    kills_all = True


@pytest.mark.full
@pytest.mark.skipif(bool(NO_GLOO), reason=NO_GLOO)
class TestOverGloo(Nccl):
    launcher = "gloo"


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which each process has a GPU of the double, with two logical devices."""
    monkeypatch.setenv("SHARDTENSOR_BACKEND", "cupy")
    monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", "2")
    return monkeypatch


MOVES = (
    "transfers_move_what_is_needed", "values_that_repeat_are_sent_once", "reductions_and_products",
    "algorithms_whose_parts_differ", "meshes_may_leave_out_processes", "maps_and_their_collectives",
    "rows_of_any_numbers_are_exchanged", "stencils_exchange_halos",
)  # fmt: skip
"""Checks in which each process sends to several others."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "processes", "checks"), [("mpi", 2, ()), ("gloo", 2, ()), ("mpi", 3, MOVES), ("mpi", 4, MOVES)]
)
def test_tensors_span_gpus(launcher: str, processes: int, checks: tuple[str, ...], on_gpus: pytest.MonkeyPatch) -> None:
    """The checks of what spans processes."""
    on_gpus.setenv("CUPY_DOUBLE", str(processes))
    on_gpus.setenv("SPANNING_ENGINE", "nccl")
    status, text = launch(launcher, processes, CHECKS, *checks, limit=240)
    assert status == 0, text
    assert text.count("passed") == processes * text.count("[0] passed") >= processes * len(checks)


LATE = "refused arrays that other processes have sent have not arrived within 2 s; restart all processes"
UNHANDLED = "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error"
FAULTS = {
    "none": ["[0] read 90.0", "[1] read 90.0"],
    "busy": ["[0] read 90.0", "[1] read 90.0"],
    "busy_at_the_end": ["[0] read 90.0", "[1] read 90.0"],
    "unsigned": ["[0] read 90.0", "[1] read 90.0"],
    "connects_late": ["[0] read 90.0", "[1] read 90.0"],
    "sends_nothing": [f"[0] {LATE}", "process 0 failed at", LATE.removeprefix("refused ").removesuffix("; restart all processes")],
    "sends_less": [f"[0] {LATE}"],
    "abort_hangs": [f"[0] {LATE}"],
    "disconnects": ["[0] refused arrays that other processes have sent have not arrived: NCCL: error 6"],
    "disconnects_before_an_exchange": ["[0] refused arrays that other processes have sent have not arrived: NCCL: error 6"],
    "group_fails": [f"[1] refused NCCL has failed: {UNHANDLED}", "[0] refused process 1 failed at", f"NCCL has failed: {UNHANDLED}"],
    "interrupted": ["HandlerError: of the handler", "[0] refused process 1 failed at"],
    "stays_away": ["[0] refused", "did not reach", "[0] still here 3.0 135.0"],
    "lags": ["[0] refused", "did not reach", "[0] still here 3.0 135.0", "[0] came later 90.0"],
    "group_hangs": ["[0] refused", "arrays that other processes have sent have not arrived within 2 s"],
    "tells_while_another_reads": ["[0] refused process 1 failed", "MemoryError: no memory"],
    "is_not_read": ["[0] refused arrays that other processes have sent have not arrived within 2 s"],
    "several": ["engine 'nccl' needs one GPU for each process, and process 0 has 2"],
    "shared": ["engine 'nccl': processes 0 and 1 use the same GPU"],
    "no_library": ["engine 'nccl': CuPy finds no library of NCCL"],
    "old_library": ["engine 'nccl' needs NCCL 2.19 or newer, and finds version 21805"],
    "does_not_start": ["engine 'nccl': process 0 cannot start NCCL; set NCCL_DEBUG=INFO"],
    "does_not_connect": [f"engine 'nccl': process 1 cannot connect its GPU to the others: {UNHANDLED}"],
    "other_backend": ["engine 'nccl' sends arrays between devices of backend 'cupy', and the default backend is 'numpy'"],
}  # fmt: skip
"""What is printed, by the fault; see `nccl_faults`."""

PASS = {"none", "busy", "busy_at_the_end", "unsigned", "connects_late"}
"""Faults that a program gets over."""

FAST = {"sends_nothing"}  # Before the fault, the program exchanges and reads elements.


@pytest.mark.parametrize("fault", [pytest.param(f, marks=() if f in FAST else FULL) for f in FAULTS])
def test_faults(fault: str, on_gpus: pytest.MonkeyPatch) -> None:
    if fault == "shared":
        on_gpus.setenv("SHARDTENSOR_SHARE_GPUS", "1")
        on_gpus.setenv("SHARDTENSOR_NUM_DEVICES", "1")
    if fault == "other_backend":
        on_gpus.setenv("SHARDTENSOR_BACKEND", "numpy")
    status, text = launch("mpi", 2, str(HERE / "nccl_faults.py"), fault)
    assert (status == 0) == (fault in PASS), text
    assert [line for line in FAULTS[fault] if line not in text] == [], text
