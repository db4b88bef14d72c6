"""A program of several processes, in which the file system of one fails, or one is stopped or told to end."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from unittest import mock

import numpy as np

import shardtensor as st
from shardtensor import distributed
from shardtensor.checkpoint import writing
from shardtensor.checkpoint.saving import Save
from shardtensor.checkpoint.together import JobPart
from shardtensor.errors import ArgumentError, DistributedError
from shardtensor.files.atomic import DISK
from tests.checkpoint.disks import Faulty, is_leftover, raises
from tests.checkpoint.trees import bits

FOLDER = sys.argv[2]
PATH = f"{FOLDER}/second"


def tree(step: int) -> dict[str, object]:
    mesh = st.make_mesh((st.device_count(),), ("x",))
    x = st.device_put(np.arange(8.0) + step, st.NamedSharding(mesh, st.P("x")))
    return {"x": x, "host": np.full(3, step), "step": step}


def error_of(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except (OSError, DistributedError, ArgumentError) as error:
        return error
    raise AssertionError("no error")


def alike() -> None:
    """Waits for the others."""
    distributed.sync_global_devices("alike")


def check_state(step: int | None) -> None:
    """The first checkpoint is whole, and the second is that of a step; nothing else is there."""
    alike()
    assert whole(f"{FOLDER}/first") == 0
    assert sorted(os.listdir(FOLDER)) == ["first", *(["second"] if step is not None else [])], os.listdir(FOLDER)
    if step is not None:
        assert whole(PATH) == step
        if HERE == 0:
            st.checkpoint.verify(PATH)
    alike()


def whole(path: str) -> int:
    restored = st.checkpoint.restore(path)
    step = restored["step"]
    pieces = [np.asarray(shard.data).tolist() for shard in restored["x"].addressable_shards]
    expected = [np.asarray(shard.data).tolist() for shard in tree(step)["x"].addressable_shards]
    assert pieces == expected
    assert restored["host"].tolist() == [step] * 3
    return int(step)


def fail(process: int, at: int, number: int, background: bool, overwrite: bool) -> bool:
    """Saves with a disk that fails in one process; returns whether it did."""
    disk = Faulty(at, raises(number)) if process == HERE else DISK
    writing.start(PATH, tree(7), "checkpoint.save", overwrite=overwrite, disk=disk)
    error = None
    try:
        if background:
            st.checkpoint.save(f"{FOLDER}/third", tree(8))
        else:
            st.checkpoint.wait()
    except (OSError, DistributedError) as raised:
        error = raised
    if isinstance(error, OSError):
        assert process == HERE
        assert FOLDER in error.filename
    elif error is not None:
        assert process != HERE
        assert all(part in str(error) for part in (f"process {process} failed: ", os.strerror(number), f"'{FOLDER}"))
    elif background:
        alike()
        if HERE == 0:
            os.system(f"rm -r {FOLDER}/third")
    alike()
    st.checkpoint.wait()  # It is raised once.
    assert not any(map(is_leftover, os.listdir(FOLDER))) or overwrite, os.listdir(FOLDER)
    st.checkpoint.save(PATH, tree(9), overwrite=True)
    check_state(9)
    if not overwrite and HERE == 0:
        os.system(f"rm -r {PATH}")
    alike()
    return error is not None


def disks(step: int) -> None:
    """Each operation of each process fails."""
    total = 0
    st.checkpoint.save(f"{FOLDER}/first", tree(0))
    for process in range(COUNT):
        for overwrite in (False, True):
            for turn in itertools.count():
                at = (process == 0) + turn * step  # First, process 0 makes the folder: see `early`.
                failed = fail(process, at, (errno.ENOSPC, errno.EIO)[turn % 2], turn % 2 > 0, overwrite)
                if not distributed.process_allgather(np.array([failed]), tiled=True).any():
                    break
                total += 1
        if HERE == 0:
            os.system(f"rm -r {PATH}")
        alike()
    check_state(None)
    print("positions", total)


def others() -> None:
    """What else processes do differently, and errors before anything is written."""
    with mock.patch("os.path.isdir", return_value=not HERE):
        error = error_of(lambda: st.checkpoint.save(PATH, tree(1)))
    assert "does not see the folder" in str(error)
    assert HERE or "process 1 failed" in str(error)
    check_state(None)
    error = error_of(lambda: st.checkpoint.save(f"{PATH}{HERE}", tree(1)))
    assert f"{PATH}0" in str(error)
    assert f"{PATH}1" in str(error)
    check_state(None)
    error = error_of(lambda: st.checkpoint.save(PATH, {**tree(1), "host": np.full(3, HERE)}))
    assert "process 0 has the leaf host" in str(error), error
    check_state(None)


def apart() -> None:
    """Process 1 writes to another disk, on which the folder exists, too."""
    with mock.patch.object(Save, "_list_of", lambda self, process: f"{FOLDER}/../apart{process}.{HERE}"):
        error = error_of(lambda: st.checkpoint.save(PATH, tree(1), timeout=2))
    assert "process 0 does not see" in str(error)
    assert "which process 1 has written: the processes need a file system" in str(error)
    assert HERE == 0 or "process 0 failed" in str(error)
    check_state(None)


def early() -> None:
    """Process 0 cannot make the folder."""
    disk = Faulty(0, raises(errno.EROFS)) if not HERE else DISK
    error = error_of(lambda: writing.start(PATH, tree(1), "checkpoint.save", disk=disk))
    assert "Read-only file system" in str(error)
    assert isinstance(error, OSError) == (not HERE)
    check_state(None)


def names() -> None:
    """Keys like the names of the files of a checkpoint."""
    keys = (".files.1", "__files.1", "checkpoint.json", "zarr.json", "Checkpoint.JSON", "c", ".x." + "0" * 32 + ".old")
    given = {key: np.full(2, k) for k, key in enumerate(keys)}
    st.checkpoint.save(PATH, given)
    assert bits(st.checkpoint.restore(PATH)) == bits(given)
    alike()
    if not HERE:
        st.checkpoint.verify(PATH)
        os.system(f"rm -r {PATH}")
    alike()


def alone() -> None:
    """A program without a job has saved it, on as many devices as one process has: all processes get parts of it."""
    restored = st.checkpoint.restore(f"{FOLDER}-alone")
    assert len(restored["a"]["w"].sharding.mesh.flat) == st.device_count()
    total = restored["a"]["w"].sum()
    assert float(distributed.process_allgather(total)) == 15.0
    assert restored["b"].tolist() == [0] * 3
    st.checkpoint.save(PATH, restored)
    if not HERE:
        os.system(f"rm -r {PATH}")
    alike()


def ends(how: str) -> None:
    """The job ends before a save in the background is complete."""
    for backend in ("checked", "torch") if how == "exit" else ("checked",):  # The import of torch takes seconds.
        local = st.local_devices(backend)
        split = st.NamedSharding(st.make_mesh((2,), ("y",), devices=local[:2]), st.P("y"))
        given = {
            "one": st.asarray(np.arange(6.0).reshape(2, 3), device=local[0]),
            "two": st.device_put(np.ones(5), split),
        }
        st.checkpoint.save(PATH, given, overwrite=True)
        assert bits(st.checkpoint.restore(PATH)) == bits(given)
    alike()
    with mock.patch.object(DISK, "flush", side_effect=lambda descriptor: time.sleep(0.05)):
        st.checkpoint.save(f"{FOLDER}/last", tree(3), wait=False)
        if how == "shutdown":
            distributed.shutdown()
            assert os.listdir(f"{FOLDER}/last")


def managers() -> None:
    """A save in the background fails in process 1, and is reported at the same call in all processes."""
    folder = f"{FOLDER}/run"
    for signals in (False, True):
        disk = Faulty(0, raises(errno.ENOSPC), only=("create",)) if HERE else DISK
        manager = st.checkpoint.Manager(folder, every=3, on_sigterm=signals)
        with mock.patch.object(DISK, "create", disk.create), mock.patch.object(DISK, "write", disk.write):
            manager.save(3, tree(3))
            time.sleep(0.1)
            for step in (4, 5):
                assert not manager.save(step, tree(step))
                alike()
            error = error_of(lambda: manager.save(6, tree(6)))  # noqa: B023
        assert "No space" in str(error)
        assert manager.steps() == []
        manager.save(6, tree(6))
        manager.wait()
        assert manager.steps() == [6]
        assert whole(f"{folder}/00000006") == 6
        alike()
        if not HERE:
            os.system(f"rm -r {folder}")
        alike()
        manager.__exit__(None, None, None)


def sigterm() -> None:
    """Only process 1 is told to end."""
    manager = st.checkpoint.Manager(f"{FOLDER}/run", every=1000, on_sigterm=True)
    for step in range(1, 100):
        if step == 4 and HERE:
            os.kill(os.getpid(), signal.SIGTERM)
        manager.save(step, tree(step))
    print("not ended")


def readers(seconds: float) -> None:
    """Restores together what another program overwrites all the time."""
    begin, seen = time.monotonic(), set()
    is_over = False
    while not is_over:
        restored = st.checkpoint.restore(f"{FOLDER}/same")
        step = restored["step"]
        for name, more in (("w", 0), ("host", 0), *[(k, k) for k in range(4)]):
            x = restored["v"][name] if isinstance(name, int) else restored[name]
            parts = [x] if isinstance(x, np.ndarray) else [shard.data for shard in x.addressable_shards]
            assert all(np.all(np.asarray(part) == step + more) for part in parts)
        distributed.assert_equal(np.array([step]))
        seen.add(step)
        is_over = bool(distributed.process_allgather(np.array([time.monotonic() > begin + seconds])).any())
    assert len(seen) > 3, seen
    print("done")


def stop(_: object = None) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)  # Another thread may take the signal, and this one runs on for a moment.


whole_gather = JobPart.gather


def gather(self: JobPart, what: str, text: str) -> list[str]:
    """Stops process 1 when process 0 has made the folder."""
    if what == "name of the folder" and HERE:
        stop()
    return whole_gather(self, what, text)


def stopped(process: int, when: str) -> None:
    """A process stops, in the middle of a save or before it. In the end, the others let it go on."""
    numbers = [int(n) for n in distributed.process_allgather(np.array([os.getpid()]), tiled=True)]
    if process == HERE:
        if when == "late":
            stop()
        disk = Faulty(4, stop) if when == "middle" else DISK
    else:
        disk = DISK
    begin = time.monotonic()
    try:
        with mock.patch.object(JobPart, "gather", gather) if when == "between" else contextlib.nullcontext():
            writing.start(PATH, tree(1), "checkpoint.save", timeout=1, disk=disk)
            st.checkpoint.wait()
    except DistributedError as error:
        assert time.monotonic() - begin < 10
        print(f"error: {' '.join(str(error).split())}", flush=True)
        assert HERE or os.listdir(FOLDER) == [], os.listdir(FOLDER)
    if process != HERE:  # Launchers may wait long for a process that is stopped.
        os.kill(numbers[process], signal.SIGCONT)
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1] == "ends":
        st.checkpoint.save(f"{FOLDER}/{os.getpid()}", 1)  # Before the job begins.
    distributed.initialize(timeout=20)
    HERE, COUNT = distributed.process_index(), distributed.process_count()
    if sys.argv[1] == "disks":
        disks(int(sys.argv[3]))
        others()
        apart()
        early()
        names()
        alone()
        managers()
        print("done")
    elif sys.argv[1] == "ends":
        ends(sys.argv[3])
    elif sys.argv[1] == "stopped":
        stopped(int(sys.argv[3]), sys.argv[4])
    elif sys.argv[1] == "readers":
        readers(float(sys.argv[3]))
    else:
        sigterm()
