"""Engines, also that of `docs/writing_an_engine.md`, pass the conformance suite, and faulty variants of it fail."""

from __future__ import annotations

import gc
import os
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardtensor.communication.engine_protocol import LateError
from shardtensor.communication.mpi_engine import MPIEngine
from shardtensor.launcher import find_mpiexec
from shardtensor.testing import EngineTests
from tests.project.test_docs_pages import program

NO_MPI = "" if find_spec("mpi4py") and find_mpiexec() else "mpi4py or mpiexec is not installed"
NO_GLOO = "" if find_spec("torch") else "torch is not installed"
PAGE = Path(__file__).parents[2] / "docs" / "writing_an_engine.md"


@pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
class TestMPI(EngineTests):
    engine = launcher = "mpi"
    kills_all = True

    test_agree_returns_the_records_of_all_processes_in_order = None
    test_messages_of_any_size_arrive_unchanged = None
    test_every_process_can_broadcast = None

    def test_programs_that_pass_with_three_processes(self) -> None:
        self.passes("agree exchange broadcast", 3)  # One start for the three tests above.


def test_mpi_keeps_the_memory_of_an_operation_that_is_given_up() -> None:
    """MPI may still write there while the process finds out which others are absent."""

    class Never:
        def __call__(self) -> bool:
            return False

    engine: Any = MPIEngine.__new__(MPIEngine)
    engine._mpi, engine._records = mock.Mock(), mock.Mock(Iprobe=lambda *_: False)
    operation = Never()
    alive = weakref.ref(operation)
    with pytest.raises(LateError):
        engine._wait(operation, 0.0)
    del operation
    gc.collect()
    assert alive() is not None
    engine._wait(lambda: True, 0.0)
    gc.collect()
    assert alive() is None


@pytest.mark.full
@pytest.mark.skipif(bool(NO_GLOO), reason=NO_GLOO)
class TestGloo(EngineTests):
    engine = launcher = "gloo"


def install(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the engine of the page for the processes that tests start."""
    (folder / "shared_directory.py").write_text(code.partition("# test_shared_directory.py")[0])
    info = folder / "shared_directory-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shared-directory\nVersion: 1\n")
    entry = "[shardtensor.engines]\nshared-directory = shared_directory:SharedDirectoryEngine\n"
    assert entry.split("\n")[1].partition(" ")[0] in PAGE.read_text()
    (info / "entry_points.txt").write_text(entry)
    path = [str(folder), str(PAGE.parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("SHARED_DIRECTORY", str(folder))


class SharedDirectory(EngineTests):
    engine = "shared-directory"


@pytest.mark.full
class TestSharedDirectory(SharedDirectory):
    @pytest.fixture(autouse=True)
    def _installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        install(tmp_path, program(PAGE.read_text())[0], monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize(
    ("right", "wrong", "test"),
    [
        ("for k in range(self.process_count)]\n\n    def exchange", "for k in reversed(range(self.process_count))]\n\n    def exchange", "agree_returns_the_records_of_all_processes_in_order"),
        ("message[:] = memoryview(self._read(f\"one", "message[1:] = memoryview(self._read(f\"one", "messages_of_any_size_arrive_unchanged"),
        ("if self.process_index == root:", "if self.process_index == 0:", "every_process_can_broadcast"),
        ("raise LateError", "deadline += 60", "a_process_that_does_not_come_is_a_timeout_that_names_it"),
        ('self._write(f"here-{self.process_index}", b"")', "return []", "a_process_that_is_killed_is_an_error_in_the_others"),
        ("os._exit(status)", "os._exit(0)", "abort_ends_the_process_with_the_status"),
    ],
)  # fmt: skip
def test_the_suite_finds(right: str, wrong: str, test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = program(PAGE.read_text())[0]
    assert code.count(right) == 1
    install(tmp_path, code.replace(right, wrong), monkeypatch)
    with pytest.raises(AssertionError):
        getattr(SharedDirectory(), f"test_{test}")()
