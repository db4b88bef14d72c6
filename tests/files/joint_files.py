"""A program of several processes that write and read files together: ``joint_files.py FOLDER [CHECK...]``."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import shardtensor as st
from shardtensor import distributed
from shardtensor.files import array_files, byte_ranges, joint_writes, npy_files
from shardtensor.files.metadata import array_metadata
from shardtensor.files.zarr import ZarrArray, write_array, write_chunk, write_group
from shardtensor.host import replacement

ROWS = np.arange(21.0).reshape(7, 3)
FOLDER = Path(sys.argv[1])


def everything() -> st.Mesh:
    return st.make_mesh((len(st.devices()),), ("x",))


def tensor(array: Any, *spec: Any) -> st.ShardedTensor:
    return st.device_put(array, st.NamedSharding(everything(), st.P(*spec)))


def here() -> int:
    return distributed.process_index()


def files() -> list[str]:
    distributed.sync_global_devices("files")
    names = sorted(os.listdir(FOLDER))
    distributed.sync_global_devices("files")
    return names


def assert_file(name: str, expected: Any) -> None:
    np.testing.assert_array_equal(np.load(FOLDER / name), expected, strict=True)


def arrays_of_all_layouts_are_whole() -> None:
    wide = np.arange(5 * 2 * 6, dtype=np.int16).reshape(5, 2, 6)
    for array, spec in ((ROWS, ("x",)), (ROWS, (None, "x")), (wide, (None, None, "x")), (wide, (None, "x"))):
        x = tensor(array, *spec)
        for block, run in ((1 << 24, 256), (40, 0), (1, 1)):
            with mock.patch.object(npy_files, "_BLOCK", block), mock.patch.object(joint_writes, "_LEAST_RUN", run):
                st.save(FOLDER / "x", x)
            assert_file("x.npy", array)
        assert distributed.process_allgather(st.load(FOLDER / "x.npy", device=x.sharding)).tolist() == array.tolist()
    mesh = st.make_mesh((2, len(st.devices()) // 2), ("a", "b"))
    for spec in (st.P("a"), st.P("b"), st.P(None, "b"), st.P("b", "a")):
        x = st.device_put(ROWS, st.NamedSharding(mesh, spec))
        with mock.patch("shardtensor.files.chunk_grids._LEAST", 1), mock.patch.object(joint_writes, "_ROUND", 50):
            st.save(FOLDER / "x", x)
        assert_file("x.npy", ROWS)
    assert files() == ["x.npy"]


def views_and_partial_sums_are_whole() -> None:
    x = tensor(ROWS, "x")
    for y, expected in (
        (x[1:, ::2], ROWS[1:, ::2]),
        (x.T, ROWS.T),
        (x[2], ROWS[2]),
        (x[6, 1], ROWS[6, 1]),
        (x[:0], ROWS[:0]),
    ):
        np.save(FOLDER / "x.npy", y)
        assert_file("x.npy", expected)
    unreduced = st.sum(x, axis=0, out_sharding=st.NamedSharding(everything(), st.P(unreduced={"x"})))
    st.save(FOLDER / "x.npy", unreduced)
    assert_file("x.npy", ROWS.sum(axis=0))
    x.tofile(FOLDER / "x.npy")
    assert (FOLDER / "x.npy").read_bytes() == ROWS.tobytes()


def each_element_is_written_once() -> None:
    written, pwrite = [], os.pwrite

    def counted(descriptor: int, data: Any, offset: int) -> int:
        written.append((offset, len(data)))
        return pwrite(descriptor, data, offset)

    mesh = st.make_mesh((2, len(st.devices()) // 2), ("a", "b"))
    array = np.arange(64.0).reshape(16, 4)
    x = st.device_put(array, st.NamedSharding(mesh, st.P("a")))
    with mock.patch("shardtensor.files.chunk_grids._LEAST", 1), mock.patch.object(byte_ranges.os, "pwrite", counted):
        st.save(FOLDER / "x.npy", x)
    total = distributed.process_allgather(np.array(sum(size for _, size in written)))
    assert total.sum() == array.nbytes
    assert (total > 0).all()  # Replicas are divided.
    assert_file("x.npy", array)


def archives_are_written_by_one_process() -> None:
    x = tensor(ROWS, "x")
    same = tensor(ROWS[0])
    own = st.asarray(ROWS[1], device=st.local_devices()[0])
    for write in (st.savez, np.savez, st.savez_compressed):
        with mock.patch.object(npy_files, "_BLOCK", 30):
            write(FOLDER / "z", x, same=same, own=own, columns=tensor(ROWS, None, "x"), host=ROWS[2], view=x[1:, 1])
        with np.load(FOLDER / "z.npz") as found:
            expected = {
                "arr_0": ROWS,
                "same": ROWS[0],
                "own": ROWS[1],
                "columns": ROWS,
                "host": ROWS[2],
                "view": ROWS[1:, 1],
            }
            assert {*found} == {*expected}
            for name, array in expected.items():
                np.testing.assert_array_equal(found[name], array, strict=True)
    assert files() == ["x.npy", "z.npz"]


def each_process_reads_its_part_of_any_order() -> None:
    wide = np.arange(40 * 3 * 50.0).reshape(40, 3, 50)
    wanted = [("C", "<c8"), ("F", ">i4"), ("F", "<f8"), ("C", ">f2")]
    for order, dtype in wanted:
        array = np.array(wide, dtype, order=order)
        distributed.sync_global_devices("read")
        if here() == 0:
            np.save(FOLDER / "x.npy", array)
        distributed.sync_global_devices("written")
        for spec in (("x",), (None, None, "x"), (None, "x"), ()):
            x = st.load(FOLDER / "x.npy", device=st.NamedSharding(everything(), st.P(*spec)))
            assert x.dtype == array.dtype.newbyteorder("=")
            np.testing.assert_array_equal(distributed.process_allgather(x), array)
    assert len(st.load(FOLDER / "x.npy").sharding.mesh.flat) == len(st.devices())
    distributed.sync_global_devices("read")
    if here() == 0:
        os.truncate(FOLDER / "x.npy", 3000)
    distributed.sync_global_devices("truncated")
    with pytest.raises(st.ArgumentError, match=r"load: \S*x.npy is truncated"):
        st.load(FOLDER / "x.npy", device=everything())


def weights_are_written_and_read_in_parts() -> None:
    mesh = st.make_mesh((2, len(st.devices()) // 2), ("a", "b"))
    arrays = {"w": ROWS, "b": ROWS[0].astype(np.float32), "host": np.arange(4), "empty": ROWS[:0], "same": ROWS[1]}
    specs = {"w": st.P("a", "b"), "b": st.P("b"), "empty": st.P("a"), "same": st.P()}
    laid = {name: st.device_put(arrays[name], st.NamedSharding(mesh, spec)) for name, spec in specs.items()}
    own = st.asarray(ROWS[2], device=st.local_devices()[0])
    st.save_safetensors(FOLDER / "m", {**laid, "host": arrays["host"], "own": own}, metadata={"a": "b"})
    loaded = st.load_safetensors(
        FOLDER / "m", lambda name, shape, dtype: st.NamedSharding(mesh, specs.get(name, st.P()))
    )
    assert {*loaded} == {*arrays, "own"}
    for name, x in loaded.items():
        np.testing.assert_array_equal(distributed.process_allgather(x), arrays.get(name, ROWS[2]), strict=True)
    assert not loaded["w"].is_fully_addressable
    y = loaded["w"] + laid["w"]
    np.testing.assert_array_equal(distributed.process_allgather(y), 2 * ROWS)
    first = st.make_mesh((len(st.local_devices()),), ("x",), devices=st.devices()[: len(st.local_devices())])
    narrow = st.device_put(ROWS, st.NamedSharding(first, st.P(None, "x")))  # On devices of process 0 only.
    st.save_safetensors(FOLDER / "m", {"narrow": narrow, **laid})
    found = st.load_safetensors(FOLDER / "m", {"narrow": everything()})["narrow"]
    np.testing.assert_array_equal(distributed.process_allgather(found), ROWS)
    wide = np.arange(8 * 4096.0).reshape(8, 4096)
    st.save_safetensors(FOLDER / "m", {"wide": tensor(wide, None, "x")})
    read, preadv = [], os.preadv
    with mock.patch.object(
        os, "preadv", lambda d, memory, *rest: read.append(len(memory[0])) or preadv(d, memory, *rest)
    ):
        x = st.load_safetensors(FOLDER / "m", st.NamedSharding(everything(), st.P(None, "x")))["wide"]
    assert sum(read) < 1000 + wide.nbytes // distributed.process_count()
    np.testing.assert_array_equal(distributed.process_allgather(x), wide)
    with pytest.raises(FileNotFoundError, match="process 0: No such file"):
        st.save_safetensors(FOLDER / "none" / "m", laid)
    assert files() == ["m", "x.npy", "z.npz"]
    if here() == 0:
        (FOLDER / "m").unlink()


def each_process_reads_the_chunks_that_it_needs() -> None:
    array = np.arange(8 * 4096.0).reshape(8, 4096)
    if here() == 0:
        metadata = array_metadata(array.shape, array.dtype, (2, 2048), (2, 1024))
        write_group(f"{FOLDER}/g", {})
        write_array(f"{FOLDER}/g/w", metadata)
        for index in ZarrArray("", metadata).chunks():
            write_chunk(f"{FOLDER}/g/w", metadata, index, [(((0, 8), (0, 4096)), array)])
    distributed.sync_global_devices("written")
    group = st.load(FOLDER / "g", device=st.NamedSharding(everything(), st.P(None, "x")))
    read, preadv = [], os.preadv
    with mock.patch.object(
        os, "preadv", lambda d, memory, *rest: read.append(len(memory[0])) or preadv(d, memory, *rest)
    ):
        x = group["w"]
    assert sum(read) < 1000 + array.nbytes // distributed.process_count()
    np.testing.assert_array_equal(distributed.process_allgather(x), array)
    distributed.sync_global_devices("read")
    if here() == 0:
        shutil.rmtree(FOLDER / "g")


def old_files_keep_their_modes_and_links() -> None:
    if here() == 0:
        (FOLDER / "old.npy").write_bytes(b"old")
        (FOLDER / "old.npy").chmod(0o640)
        (FOLDER / "link.npy").symlink_to("old.npy")
    distributed.sync_global_devices("made")
    st.save(FOLDER / "link.npy", tensor(ROWS, "x"))
    assert (FOLDER / "link.npy").is_symlink()
    assert (FOLDER / "old.npy").stat().st_mode & 0o777 == 0o640
    assert_file("old.npy", ROWS)
    with mock.patch.object(replacement, "_copy_attributes", side_effect=PermissionError):
        st.save(FOLDER / "link.npy", tensor(ROWS + 1, None, "x"))  # The old file itself is written.
    assert_file("old.npy", ROWS + 1)
    assert files() == ["link.npy", "old.npy", "x.npy", "z.npz"]
    if here() == 0:
        (FOLDER / "link.npy").unlink()
        (FOLDER / "old.npy").unlink()


def errors_of_one_process_are_errors_of_all() -> None:
    x = tensor(ROWS, "x")
    st.save(FOLDER / "x.npy", x)
    last = distributed.process_count() - 1

    def full(*args: Any, **kwargs: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fails(process: int, target: Any, name: str, function: Callable[..., Any]) -> Any:
        return (
            mock.patch.object(target, name, function) if here() == process else mock.patch.object(sys, "path", sys.path)
        )

    for save in (lambda: st.save(FOLDER / "x.npy", x + 1), lambda: (x + 1).tofile(FOLDER / "x.npy")):
        for process in {0, last}:
            with (
                pytest.raises(OSError, match=rf"process {process}: No space left on device: '\S*x.npy'") as caught,
                fails(process, byte_ranges.os, "pwrite", full),
            ):
                save()
            assert caught.value.errno == errno.ENOSPC
    with (
        pytest.raises(OSError, match="process 0: No space left on device"),
        fails(0, npy_files._npy, "write_array_header_1_0", full),
    ):
        st.savez(FOLDER / "z.npz", x, x)
    with pytest.raises(OSError, match="process 0: No space left on device"), fails(0, array_files, "_bytes_of", full):
        st.savez(FOLDER / "z.npz", x, x[1:, ::2])  # The processes exchange elements before they write a view.
    with pytest.raises(OSError, match="process 0: No space left on device"), fails(0, replacement.os, "replace", full):
        st.save(FOLDER / "x.npy", x + 1)
    with pytest.raises(FileNotFoundError, match=r"process 0: No such file or directory: '\S*none/x.npy'"):
        st.save(FOLDER / "none" / "x.npy", x)
    with pytest.raises(FileNotFoundError, match=r"process 0: No such file or directory: '\S*none/x.npz'"):
        st.savez(FOLDER / "none" / "x", x)
    with pytest.raises(st.ArgumentError, match="save: /dev/null is no regular file"):
        st.save("/dev/null", x)
    with (
        pytest.raises(
            st.ArgumentError, match=f"save: process {last} does not see the file that process 0 has made for"
        ),
        fails(last, joint_writes, "target_of", lambda path: f"{FOLDER}/other/x.npy"),
    ):
        st.save(FOLDER / "x.npy", x + 1)
    error, match = (
        (ZeroDivisionError, "no") if here() == last else (st.DistributedError, f"save: process {last} has not written")
    )
    with (
        pytest.raises(error, match=match),
        fails(last, joint_writes, "write_box", mock.Mock(side_effect=ZeroDivisionError("no"))),
    ):
        st.save(FOLDER / "x.npy", x + 1)
    for save in (st.save, st.savez, st.savez_compressed, lambda file, x: x.tofile(file)):
        with pytest.raises(
            st.NotAddressableError, match=r"the file is an open one of this process; .*process_allgather"
        ):
            save(io.BytesIO(), x)
    for write in (st.save, st.savez, lambda path, x: st.save_safetensors(path, {"x": x})):
        with pytest.raises(st.ConcretizationError, match="jit traces"):
            st.jit(lambda x, write=write: write(FOLDER / "x.npy", x))(x)
        with pytest.raises(st.NotAddressableError, match="outside of mapped functions"):
            st.shard_map(
                lambda b, write=write: write(FOLDER / "x.npy", x),
                mesh=everything(),
                in_specs=st.P("x"),
                out_specs=st.P("x"),
            )(x)
    donated = tensor(ROWS, "x")
    st.device_put(donated, donated.sharding, donate=True)
    for write in (st.save, st.savez):
        with pytest.raises(st.DonatedError):
            write(FOLDER / "x.npy", donated)
    assert_file("x.npy", ROWS)
    assert files() == ["x.npy", "z.npz"]


def a_killed_process_leaves_the_old_file() -> None:
    """It is no check of the others: it ends the job."""
    st.save(FOLDER / "x.npy", tensor(ROWS, "x"))
    if here():
        joint_writes.write_box = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(st.DistributedError, match="process 1 has ended or cannot be reached"):
        st.save(FOLDER / "x.npy", tensor(ROWS + 1, "x"))
    assert os.listdir(FOLDER) == ["x.npy"]
    assert_file("x.npy", ROWS)
    print("passed")


CHECKS = [
    arrays_of_all_layouts_are_whole, views_and_partial_sums_are_whole, each_element_is_written_once,
    archives_are_written_by_one_process, each_process_reads_its_part_of_any_order, weights_are_written_and_read_in_parts, each_process_reads_the_chunks_that_it_needs, old_files_keep_their_modes_and_links, errors_of_one_process_are_errors_of_all,
]  # fmt: skip

if __name__ == "__main__":
    distributed.initialize(timeout=20)
    for check in [globals()[name] for name in sys.argv[2:]] or CHECKS:
        check()
        print("passed", check.__name__)
    distributed.shutdown()
