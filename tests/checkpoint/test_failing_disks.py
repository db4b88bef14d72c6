"""Saves whose file system is full, read-only, or fails at any operation: an error that names the file, and no harm."""

from __future__ import annotations

import _thread
import errno
import itertools
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import shardtensor as st
from shardtensor.checkpoint import writing
from shardtensor.errors import ArgumentError
from tests.checkpoint.disks import OPERATIONS, Faulty, is_leftover, raises
from tests.checkpoint.trees import bits, small
from tests.communication.test_distributed import launch
from tests.draws import drawn
from tests.scripts import run_script

REMOVALS = ("remove_file", "remove_empty_folder")


@pytest.fixture(scope="module")
def trees() -> list[dict[str, Any]]:
    return [small(k) for k in range(3)]


def leftovers_of(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if is_leftover(name)]


def fails(start: Callable[[], None], waits: bool) -> OSError | None:
    """Returns the error of a save, which is raised once."""
    caught = None
    try:
        start()
        if waits:
            writing.finish()
        else:
            st.checkpoint.wait()
    except OSError as error:
        caught = error
    st.checkpoint.wait()
    return caught


def check_a_failure(disk: Faulty, folder: Path, trees: list[Any], overwrite: bool, waits: bool) -> bool:
    """Saves over the second of two checkpoints, or beside it, and checks what is there; returns whether it failed."""
    first, second = folder / "first", folder / "second"
    st.checkpoint.save(first, trees[0])
    if overwrite:
        st.checkpoint.save(second, trees[1])
    expected = [bits(tree) for tree in trees]
    error = fails(lambda: writing.start(second, trees[2], "checkpoint.save", overwrite=overwrite, disk=disk), waits)
    # What is deleted is renamed before, where that is possible.
    assert (error is None) == all(name == "rename" and path.endswith(".old") for name, path in disk.failed)
    if error is not None:
        assert str(folder) in str(error.filename), repr(error)
        assert "of a file" not in str(error)
    assert bits(st.checkpoint.restore(first)) == expected[0]
    if error is None:
        assert bits(st.checkpoint.restore(second)) == expected[2]
    else:
        is_there = overwrite or os.path.exists(second)
        if is_there:
            st.checkpoint.verify(second)
            assert bits(st.checkpoint.restore(second)) in (expected[1:] if overwrite else expected[2:])
        else:
            with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
                st.checkpoint.restore(second)
    for name in leftovers_of(folder):
        # Where removals fail; or what replaced the old one may not be on the disk.
        is_committed = os.path.exists(second) and name.endswith((".old", ".gone"))
        is_the_checkpoint = not os.path.exists(second) and name.endswith(".old")
        assert {operation for operation, _ in disk.failed} & {*REMOVALS} or is_committed or is_the_checkpoint, (
            name,
            disk.failed,
        )
    st.checkpoint.save(second, trees[1], overwrite=True)
    assert sorted(os.listdir(folder)) == ["first", "second"]
    st.checkpoint.verify(second)
    return bool(disk.failed)


@pytest.mark.parametrize("waits", [True, False], ids=["wait", "background"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_each_operation_of_a_save_fails_once(
    number: int, overwrite: bool, waits: bool, trees: Any, tmp_path: Path
) -> None:
    step = 1 if drawn(2, fast=1) == 2 else 13
    begin = (errno.ENOSPC, errno.EIO, errno.EROFS).index(number) if step > 1 else 0
    for at in itertools.count(begin, step):
        folder = tmp_path / str(at)
        folder.mkdir()
        if not check_a_failure(Faulty(at, raises(number)), folder, trees, overwrite, waits):
            break
    assert at > 50


KINDS = {
    "full": (errno.ENOSPC, ("create", "write", "make_folder")),
    "flushes": (errno.EIO, ("flush",)),
    "closes": (errno.EDQUOT, ("close",)),
    "renames": (errno.EACCES, ("rename",)),
    "removals": (errno.EPERM, REMOVALS),
    "read-only": (errno.EROFS, OPERATIONS),
}


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_operation_fails_and_all_after_it(kind: str, overwrite: bool, trees: Any, tmp_path: Path) -> None:
    number, operations = KINDS[kind]
    step = 1 if drawn(2, fast=1) == 2 else 1 + 8 * (len(operations) > 1)
    for at in itertools.count(0, step):
        folder = tmp_path / str(at)
        folder.mkdir()
        disk = Faulty(at, raises(number), lasts=True, only=operations)
        if not check_a_failure(disk, folder, trees, overwrite, at % 2 > 0):
            break
    assert at > 0 or kind == "removals"


def test_short_writes_are_continued(trees: Any, tmp_path: Path) -> None:
    disk = Faulty(-1, raises(errno.EIO), most=3)
    assert not check_a_failure(disk, tmp_path, trees, False, True)
    assert sum(name == "write" for name, _ in disk.log) > 100
    writing.start(tmp_path / "x", trees[0], "checkpoint.save", disk=Faulty(-1, raises(errno.EIO), most=0))
    with pytest.raises(OSError, match="no bytes could be written") as caught:
        writing.finish()
    assert caught.value.errno == errno.EIO
    assert not (tmp_path / "x").exists()


def test_everything_is_flushed_before_the_folder_is_renamed(trees: Any, tmp_path: Path) -> None:
    disk = Faulty(-1, raises(errno.EIO))
    st.checkpoint.save(tmp_path / "x", trees[1])
    writing.start(tmp_path / "x", trees[0], "checkpoint.save", overwrite=True, disk=disk)
    writing.finish()
    names = [name for name, _ in disk.log]
    moves = [k for k, name in enumerate(names) if name == "rename"]
    made = [path.rstrip("/") for name, path in disk.log if name in ("create", "make_folder")]
    flushed = [path for name, path in disk.log[: moves[0]] if name == "flush"]
    assert {*made} <= {*flushed}
    assert disk.log[moves[1] + 1] == ("flush", str(tmp_path))
    manifest = next(
        k for k, (name, path) in enumerate(disk.log) if name == "create" and path.endswith("checkpoint.json")
    )
    assert not any(name == "create" for name in names[manifest + 1 :])


def test_the_error_of_a_save_in_the_background_is_raised_by_the_next_save_once(trees: Any, tmp_path: Path) -> None:
    for at in (3, 30):
        writing.start(tmp_path / "x", trees[0], "checkpoint.save", disk=Faulty(at, raises(errno.ENOSPC)))
        with pytest.raises(OSError, match="No space left"):
            st.checkpoint.save(tmp_path / "y", trees[0])
        assert os.listdir(tmp_path) == []
        st.checkpoint.save(tmp_path / "y", trees[1])
        assert os.listdir(tmp_path) == ["y"]
        st.checkpoint.save(tmp_path / "y", trees[1], overwrite=True, wait=False)
        st.checkpoint.wait()
        st.checkpoint.save(tmp_path / "gone", trees[1])
        os.system(f"rm -r '{tmp_path}'/*")


AT_EXIT = """
import errno, sys, numpy as np, shardtensor as st
from shardtensor.checkpoint import writing
from tests.checkpoint.disks import Faulty, raises
writing.start(sys.argv[1], {"w": st.arange(6.0)}, "checkpoint.save", disk=Faulty(9, raises(errno.ENOSPC)))
print("end")
"""


def test_the_error_of_a_save_in_the_background_is_printed_at_the_end_of_the_program(tmp_path: Path) -> None:
    ended = run_script(AT_EXIT, str(tmp_path / "x"))
    assert ended.stdout == "end\n"
    assert ended.stderr.count("No space left on device") == 1
    assert str(tmp_path) in ended.stderr
    assert os.listdir(tmp_path) == []


def test_only_checkpoints_and_empty_folders_are_replaced(trees: Any, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.mkdir()
    (path / "thesis").write_bytes(b"text")
    for overwrite, error in ((False, FileExistsError), (True, ArgumentError)):
        with pytest.raises(error):
            st.checkpoint.save(path, trees[0], overwrite=overwrite)
        assert (path / "thesis").read_bytes() == b"text"
    path.rename(tmp_path / "y")
    path.symlink_to(tmp_path / "y")
    with pytest.raises(NotADirectoryError):
        st.checkpoint.save(path, trees[0], overwrite=True)
    path.unlink()
    path.mkdir()
    st.checkpoint.save(path, trees[0], overwrite=True)
    (path / "checkpoint.json").write_bytes(b"")  # It was one, and is damaged.
    st.checkpoint.save(path, trees[1], overwrite=True)
    assert bits(st.checkpoint.restore(path)) == bits(trees[1])
    assert sorted(os.listdir(tmp_path)) == ["x", "y"]


def test_a_thread_that_cannot_be_started(trees: Any, tmp_path: Path) -> None:
    with (
        mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")),
        pytest.raises(RuntimeError),
    ):
        st.checkpoint.save(tmp_path / "x", trees[0], wait=False)
    st.checkpoint.wait()
    assert os.listdir(tmp_path) == []


def test_a_later_thread_that_cannot_be_started(tmp_path: Path) -> None:
    start, count = threading.Thread.start, itertools.count()

    def limited(thread: threading.Thread) -> None:
        if next(count) > 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    def slow(path: str) -> None:
        time.sleep(0.02)

    tree = {str(k): st.ones(3) for k in range(8)}
    with mock.patch.object(threading.Thread, "start", limited):
        writing.start(tmp_path / "x", tree, "checkpoint.save", disk=Faulty(4, slow))
        with pytest.raises(RuntimeError, match="can't start"):
            writing.finish()
    assert os.listdir(tmp_path) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "shardtensor-checkpoint"]


@pytest.mark.parametrize("at", [1, 5, 30, 52])
def test_an_interrupt_while_a_save_is_awaited_leaves_nothing_or_the_checkpoint(
    at: int, trees: Any, tmp_path: Path
) -> None:
    def interrupt(path: str) -> None:
        _thread.interrupt_main()
        time.sleep(0.05)

    def save() -> None:
        writing.start(tmp_path / "x", trees[0], "checkpoint.save", disk=Faulty(at, interrupt))
        writing.finish()
        time.sleep(0.1)

    with pytest.raises(KeyboardInterrupt):
        save()
    st.checkpoint.wait()
    assert os.listdir(tmp_path) in ([], ["x"])
    st.checkpoint.save(tmp_path / "x", trees[1], overwrite=True)
    assert bits(st.checkpoint.restore(tmp_path / "x")) == bits(trees[1])


# -- jobs ------------------------------------------------------------------------------------------

JOBS = str(Path(__file__).with_name("jobs.py"))
FULL = pytest.mark.full


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "processes", "step"),
    [
        ("mpi", 2, 17),
        pytest.param("gloo", 2, 1, marks=FULL),
        pytest.param("mpi", 2, 1, marks=FULL),
        pytest.param("mpi", 3, 3, marks=FULL),
    ],
)
def test_errors_of_one_process_of_a_job(engine: str, processes: int, step: int, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    st.checkpoint.save(tmp_path / "x-alone", small(0))
    status, text = launch(engine, processes, JOBS, "disks", str(folder), str(step), limit=300)
    assert status == 0, text
    assert text.count("done") == processes, text
    assert os.listdir(folder) == ["first"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "process", "when"),
    [
        ("mpi", 1, "middle"),
        ("mpi", 1, "between"),
        *[
            pytest.param(engine, k, when, marks=FULL)
            for engine in ("gloo", "mpi")
            for k in (0, 1)
            for when in ("middle", "late")
        ],
    ],
)
def test_a_process_that_is_stopped_is_an_error_of_the_others(
    engine: str, process: int, when: str, tmp_path: Path
) -> None:
    status, text = launch(engine, 2, JOBS, "stopped", str(tmp_path), str(process), when)
    assert status == 3, text
    assert re.search(rf"error: .*process(es)? {process}\b", text), text
    # It is complete where process 0 went on, after the others had written their files.
    st.checkpoint.save(tmp_path / "second", {"step": 5}, overwrite=True)
    assert os.listdir(tmp_path) == ["second"]
