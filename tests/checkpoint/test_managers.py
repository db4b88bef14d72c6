"""`Manager`: which folders are checkpoints, which are kept, the end by SIGTERM, and readers beside a writer."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.checkpoint import manifest
from shardtensor.checkpoint.manager import Manager
from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor.files.atomic import DISK, name_beside
from tests.checkpoint.disks import Faulty, is_leftover, raises
from tests.checkpoint.trees import bits, small
from tests.communication.test_distributed import launch
from tests.draws import drawn
from tests.scripts import ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    with Manager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, small(step))
    return tmp_path / "run"


def test_incomplete_broken_and_foreign_folders_are_no_steps(folder: Path) -> None:
    (folder / "00000003").mkdir()
    (folder / "00000004").write_bytes(b"x")
    (folder / "00000005").mkdir()
    (folder / "00000005" / "checkpoint.json").write_bytes(b"{}")
    (folder / "00000006").symlink_to("nothing")
    os.mkdir(name_beside(str(folder / "00000007"), "new"))
    for name in (
        "7",
        "0000007",
        "000000007",
        "٠٠٠٠٠٠٠٧",
        "00000007x",
        "-0000007",
        "９" * 8,
        "9" * 200,
        "step_7",
        ".tmp",
    ):
        os.symlink(folder / "00000002", folder / name)
    manager = Manager(folder, keep=1)
    assert manager.steps() == [1, 2]
    assert manager.latest() == 2
    assert bits(manager.restore()) == bits(small(2))
    before = {name for name in os.listdir(folder) if not is_leftover(name)}
    manager.save(8, small(8))
    manager.wait()
    assert manager.steps() == [8]
    assert {*os.listdir(folder)} == before - {"00000001", "00000002"} | {"00000008"}
    with pytest.raises(FileExistsError, match="the checkpoint exists"):
        manager.save(3, small(3))  # What is there may belong to another program.


def test_which_steps_are_kept(tmp_path: Path) -> None:
    with Manager(tmp_path / "a", keep=2, keep_every=4) as manager:
        saved = [step for step in range(11) if manager.save(step, small(step))]
    assert saved == [*range(11)]
    assert manager.steps() == [0, 4, 8, 9, 10]
    with Manager(tmp_path / "b", every=3) as manager:
        assert [step for step in range(11) if manager.save(step, small(step))] == [0, 3, 6, 9]
    assert manager.steps() == [0, 3, 6, 9]


def test_the_checkpoint_that_was_just_written_is_kept(tmp_path: Path) -> None:
    """A program goes back to an earlier step, and saves from there on."""
    with Manager(tmp_path / "a", keep=1) as manager:
        for step in (10, 5, 6):
            manager.save(step, small(step))
            manager.wait()
            assert step in manager.steps()
    assert manager.steps() == [6, 10]


def test_steps_that_are_missing_or_exist(folder: Path) -> None:
    manager = Manager(folder)
    with pytest.raises(FileNotFoundError, match=r"checkpoint.Manager.restore: there is no checkpoint: .*00000003"):
        manager.restore(3)
    with pytest.raises(FileExistsError, match="the checkpoint exists"):
        manager.save(2, small(9))
    assert bits(manager.restore(2)) == bits(small(2))
    for step in (-1, 10**15, 10**30):
        with pytest.raises(ArgumentError, match="step is"):
            manager.save(step, {})
    for step in (1.0, "1", None):
        with pytest.raises(ArgumentTypeError, match="wanted an integer"):
            manager.save(step, {})
    assert manager.save(np.int64(3), small(3))
    manager.wait()
    assert manager.steps() == [1, 2, 3]
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint yet; latest\(\) is None .*other"):
        Manager(folder.parent / "other").restore()


def test_leftovers_of_failed_saves_and_deletions_are_removed_by_the_next_save(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Manager(folder, keep=2)
    manager.save(3, small(3))
    manager.wait()
    assert manager.steps() == [2, 3]
    disk = Faulty(0, raises(errno.EPERM), lasts=True, only=("remove_file",))
    for name in ("create", "write", "flush", "close", "make_folder", "rename", "remove_file", "remove_empty_folder"):
        monkeypatch.setattr(DISK, name, getattr(disk, name), raising=False)
    manager.save(4, small(4))
    with pytest.raises(OSError, match="not permitted") as caught:  # Of the deletion.
        manager.save(5, small(5))
    assert str(folder) in caught.value.filename
    monkeypatch.undo()
    assert manager.steps() == [3, 4]
    assert any(map(is_leftover, os.listdir(folder)))
    manager.save(5, small(5))
    manager.wait()
    assert sorted(os.listdir(folder)) == ["00000004", "00000005"]


def test_a_moved_checkpoint_is_taken_and_put_back(folder: Path) -> None:
    os.rename(folder / "00000002", name_beside(str(folder / "00000002"), "old"))
    manager = Manager(folder)
    assert manager.steps() == [1, 2]
    assert bits(manager.restore()) == bits(small(2))
    manager.save(3, small(3))
    manager.wait()
    assert sorted(os.listdir(folder)) == ["00000001", "00000002", "00000003"]


def save_and_fail(manager: Manager, steps: range, error: BaseException) -> None:
    with manager:
        for step in steps:
            manager.save(step, small(step))
        raise error


def test_errors_inside_the_with_block(tmp_path: Path) -> None:
    manager = Manager(tmp_path / "a")
    with pytest.raises(ZeroDivisionError):
        save_and_fail(manager, range(1, 2), ZeroDivisionError())
    assert manager.steps() == [1]
    full = raises(errno.ENOSPC)
    disk = Faulty(0, lambda path: full(path) if "00000004" in path else None, lasts=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DISK, "create", disk.create, raising=False)
        patch.setattr(DISK, "write", disk.write, raising=False)
        with pytest.raises(KeyboardInterrupt) as caught:
            save_and_fail(manager, range(2, 5), KeyboardInterrupt())
    assert any("checkpoint in the background has failed, too: " in note for note in caught.value.__notes__)
    assert manager.steps() == [1, 2, 3]
    assert not any(map(is_leftover, os.listdir(tmp_path / "a")))
    st.checkpoint.wait()  # The error is raised once.
    before = signal.getsignal(signal.SIGTERM)
    manager = Manager(tmp_path / "a", on_sigterm=True)
    assert signal.getsignal(signal.SIGTERM) != before
    with pytest.raises(ZeroDivisionError):
        save_and_fail(manager, range(0), ZeroDivisionError())
    assert signal.getsignal(signal.SIGTERM) == before


TERMINATED = """
import os, signal, sys, numpy as np, shardtensor as st
with st.checkpoint.Manager(sys.argv[1], every=1000, on_sigterm=True) as manager:
    for step in range(1, 10**6):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if sys.argv[2] == "late" and step == 4:
            break
        if sys.argv[2] == "late":
            continue
        manager.save(step, {"w": np.full(3, step)})
        print(step, flush=True)
print("after")
"""


@pytest.mark.parametrize("when", ["before", "late"])
def test_a_program_that_is_told_to_end_saves_its_step_and_ends_by_the_signal(when: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TERMINATED, str(tmp_path / "a"), when]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert ended.stdout == ("1\n2\n" if when == "before" else "")
    if when == "before":
        assert Manager(tmp_path / "a").restore(3)["w"].tolist() == [3, 3, 3]
    else:
        assert Manager(tmp_path / "a").steps() == []


def test_handlers_of_several_managers_and_blocks(tmp_path: Path) -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        first, second = (Manager(tmp_path / name, on_sigterm=True) for name in "ab")
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(told) == 1  # What the first one had replaced is called, although it ended before the second one.
        for number in (2, 3):
            with first:
                os.kill(os.getpid(), signal.SIGTERM)
                assert len(told) == number - 1
                first.save(number, {})
                assert len(told) == number
        assert first.steps() == [2, 3]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["mpi", pytest.param("gloo", marks=pytest.mark.full)])
def test_all_processes_save_the_step_if_one_is_told_to_end(engine: str, tmp_path: Path) -> None:
    status, text = launch(engine, 2, str(Path(__file__).with_name("jobs.py")), "sigterm", str(tmp_path))
    assert status == 128 + signal.SIGTERM, text
    assert "not ended" not in text
    manager = Manager(tmp_path / "run")
    assert manager.steps() == [4]
    assert manager.restore()["x"].tolist() == [4.0 + k for k in range(8)]


# -- readers and a writer --------------------------------------------------------------------------

WRITER = """
import itertools, os, sys, numpy as np, shardtensor as st
st.set_num_devices(2)
mesh = st.make_mesh((2,), ("x",))
manager = st.checkpoint.Manager(sys.argv[1] + "/run", keep=1)
for step in itertools.count(1):
    w = st.device_put(np.full((2, 500), float(step)), st.NamedSharding(mesh, st.P("x")))
    tree = {"step": step, "w": w, "v": [w + k for k in range(4)], "host": np.full(9, step)}
    st.checkpoint.save(sys.argv[1] + "/same", tree, overwrite=True)
    manager.save(step, tree)
    if step == 1:
        print("ready", flush=True)
"""


def check_whole(tree: Any) -> int:
    step = tree["step"]
    assert np.all(np.asarray(tree["w"]) == step)
    assert np.all(tree["host"] == step)
    assert all(np.all(np.asarray(v) == step + k) for k, v in enumerate(tree["v"]))
    return step


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Path]:
    """A folder in which another program overwrites checkpoints all the time."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            yield tmp_path
            assert writer.poll() is None
        finally:
            writer.kill()


def test_readers_beside_a_writer_see_whole_checkpoints(written: Path) -> None:
    manager, seen = Manager(written / "run"), set[int]()
    while not manager.steps():
        time.sleep(0.01)
    end = time.monotonic() + drawn(30, fast=1)
    last = 0
    while time.monotonic() < end:
        same = check_whole(st.checkpoint.restore(written / "same"))
        latest = check_whole(manager.restore())
        st.checkpoint.verify(written / "same")
        assert st.checkpoint.inspect(written / "same").tree["step"] >= same >= last
        seen |= {last := same, latest}
        assert manager.steps()
    assert len(seen) > 3


def test_a_checkpoint_that_is_replaced_all_the_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count()
    monkeypatch.setattr(manifest, "state_of", lambda path: next(count))
    for function in (st.checkpoint.restore, st.checkpoint.inspect, st.checkpoint.verify):
        with pytest.raises(ArgumentError, match=rf"{function.__name__}: .*00000002 was replaced 50 times while it was"):
            function(folder / "00000002")


@pytest.mark.full
@pytest.mark.parametrize("engine", ["mpi", "gloo"])
def test_jobs_beside_a_writer_see_whole_checkpoints(engine: str, written: Path) -> None:
    status, text = launch(engine, 2, str(Path(__file__).with_name("jobs.py")), "readers", str(written), "10")
    assert status == 0, text
    assert text.count("done") == 2
