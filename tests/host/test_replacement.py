"""Files that are written as a whole or not at all, by the functions that write files."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import shutil
import signal
import stat
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.host.replacement import replaced

A = np.arange(6.0)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o755])
def test_a_file_keeps_its_mode(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    st.save(path, A)
    expected = stat.S_IMODE((tmp_path / "x.npy").stat().st_mode)
    (tmp_path / "plain").touch()
    assert expected == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    path.chmod(mode)
    st.save(path, A + 1)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    np.testing.assert_array_equal(np.load(path), A + 1)


def test_a_file_that_only_the_user_reads_is_written_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, change, modes = tmp_path / "x.npy", os.fchmod, []
    st.save(path, A)
    path.chmod(0o600)

    def changed(descriptor: int, mode: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        change(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", changed)
    before = os.umask(0)
    try:
        with replaced(str(path)) as stream:
            modes.append(stat.S_IMODE(os.fstat(stream.fileno()).st_mode))
    finally:
        os.umask(before)
    assert modes == [0o600, 0o600]


def test_a_link_that_is_made_meanwhile_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link = tmp_path / "target", tmp_path / "x.npy"
    target.write_bytes(b"old")
    link.symlink_to(target)
    monkeypatch.setattr(os.path, "islink", lambda path: False)  # As it was when the path was examined.
    with pytest.raises(OSError, match="symbolic links"):
        st.save(link, A)
    monkeypatch.undo()
    assert link.is_symlink()
    assert target.read_bytes() == b"old"


def test_links(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "x.npy"
    (tmp_path / "between").symlink_to("folder/target")
    link.symlink_to("between")
    for k in range(2):  # The target is created, and then replaced.
        st.save(link, A + k)
        assert link.is_symlink()
        assert (tmp_path / "between").is_symlink()
        np.testing.assert_array_equal(np.load(target), A + k)
    os.link(target, tmp_path / "hard")
    st.save(link, A + 2)
    np.testing.assert_array_equal(np.load(tmp_path / "hard"), A + 1)
    np.testing.assert_array_equal(np.load(target), A + 2)
    (tmp_path / "loop.npy").symlink_to("loop.npy")
    with pytest.raises(OSError, match="symbolic links") as raised:
        st.save(tmp_path / "loop.npy", A)
    assert raised.value.errno == errno.ELOOP
    assert len(list(tmp_path.iterdir())) == 5
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["target"]


@pytest.mark.parametrize("letter", ["x", "\u20ac", "\U0001f600"])
def test_names_of_255_bytes(letter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 255 - len(".npy")
    name = letter * (room // len(letter.encode())) + ".npy"
    for _ in range(2):
        st.save(tmp_path / name, A)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    with pytest.raises(OSError, match="name too long"):
        st.save(tmp_path / ("x" + "y" * 255), A)
    monkeypatch.chdir(tmp_path)
    st.save("relative", A)
    assert (tmp_path / "relative.npy").exists()


def test_pipes_devices_and_descriptors(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", bytearray()
    os.mkfifo(pipe)
    for write, load in ((st.save, np.load), (st.savez, lambda s: np.load(s)["arr_0"])):
        reader = threading.Thread(target=lambda: read.extend(pipe.read_bytes()))
        reader.start()
        write(pipe, A)
        reader.join()
        np.testing.assert_array_equal(load(io.BytesIO(read)), A)
        read.clear()
    st.save("/dev/null", A)
    assert not os.path.exists("/dev/null.npy")
    with open(tmp_path / "open", "w+b") as stream:
        st.asarray(A).tofile(f"/dev/fd/{stream.fileno()}")
        assert stream.read() == A.tobytes()
    assert {p.name for p in tmp_path.iterdir()} == {"pipe", "open"}
    (tmp_path / "full.npy").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        st.save(tmp_path / "full.npy", A)


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limits the size of files, as a full disk does. Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("write", [st.save, st.savez, st.savez_compressed])
def test_a_full_disk_leaves_the_old_file(write: Any, tmp_path: Path) -> None:
    path, large = tmp_path / "x.npz", np.random.default_rng(0).random(40_000)
    with replaced(str(path)) as stream:
        stream.write(b"old")
    with files_of_at_most(100_000), pytest.raises(OSError, match="File too large"):
        write(path.with_suffix(".npy") if write is st.save else path, large)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with (
        open(tmp_path / "raw", "wb", buffering=0) as raw,
        files_of_at_most(100_000),
        pytest.raises(OSError, match="large"),
    ):
        write(raw, large)


def test_ctrl_c_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    st.save(path, A)

    def interrupted() -> None:
        with replaced(str(path)) as stream:
            stream.write(b"half")
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    np.testing.assert_array_equal(np.load(path), A)
    assert list(tmp_path.iterdir()) == [path]


def _acl(user: int) -> bytes:
    """Returns an access control list in which a user may read."""
    everyone = 0xFFFFFFFF
    entries = [(1, 6, everyone), (2, 4, user), (4, 4, everyone), (0x10, 4, everyone), (0x20, 0, everyone)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def test_owners_and_access_control_lists(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    st.save(path, A)
    try:
        os.setxattr(tmp_path, "system.posix_acl_default", _acl(1))
        os.setxattr(path, "user.note", b"text")
    except OSError:
        pytest.skip("the file system has no access control lists")
    path.chmod(0o640)
    st.save(path, A)
    assert os.listxattr(path) == ["user.note"]
    os.setxattr(path, "system.posix_acl_access", _acl(2))
    st.save(path, A + 1)
    assert os.getxattr(path, "system.posix_acl_access") == _acl(2)
    st.save(tmp_path / "new.npy", A)
    assert os.getxattr(tmp_path / "new.npy", "system.posix_acl_access") == _acl(1)
    if os.geteuid() == 0:
        os.chown(path, 1234, 2345)
        st.save(path, A)
        assert (path.stat().st_uid, path.stat().st_gid) == (1234, 2345)


@pytest.mark.parametrize("name", ["open", "fchmod"])
def test_the_old_file_is_written_where_there_is_no_other_way(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is forbidden to root, which may run the tests: the calls fail."""
    path, real = tmp_path / "x.npy", getattr(os, name)
    st.save(path, np.zeros(100))
    inode, owner = path.stat().st_ino, path.stat().st_gid

    def forbidden(*args: Any, **named: Any) -> Any:
        if name == "open" and not args[1] & os.O_CREAT:
            return real(*args, **named)
        raise PermissionError(errno.EPERM, "forbidden")

    monkeypatch.setattr(os, name, forbidden)
    st.save(path, A)
    monkeypatch.undo()
    assert (path.stat().st_ino, path.stat().st_gid) == (inode, owner)
    np.testing.assert_array_equal(np.load(path), A)
    assert list(tmp_path.iterdir()) == [path]


def test_errors_name_the_path(tmp_path: Path) -> None:
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(IsADirectoryError):
        st.save(tmp_path / "folder.npy", A)
    with pytest.raises(FileNotFoundError) as raised:
        st.save(tmp_path / "none" / "x.npy", A)
    assert str(tmp_path / "none") in str(raised.value)
    shutil.copy("/bin/sh", tmp_path / "x.npy")
    with subprocess.Popen([tmp_path / "x.npy"], stdin=subprocess.PIPE) as running:
        with pytest.raises(OSError, match="busy") as busy:  # It is running.
            st.save(tmp_path / "x.npy", A)
        running.communicate()
    assert busy.value.filename == str(tmp_path / "x.npy")


def test_the_error_of_a_file_system_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no file can be made, the unfinished one cannot be removed either."""
    real = os.open

    def made(*args: Any, **named: Any) -> int:
        if args[1] & os.O_CREAT:
            read_only(*args)
        return real(*args, **named)

    def read_only(path: Any, *args: Any, **named: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "open", made)
    monkeypatch.setattr(os, "unlink", read_only)
    with pytest.raises(OSError, match="Read-only") as raised:
        st.save(tmp_path / "x.npy", A)
    monkeypatch.undo()
    assert raised.value.filename == str(tmp_path / "x.npy")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes links of others")
def test_links_of_others_in_shared_folders_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux follows none either; but it may be made after the path has been examined."""
    shared, mine, link = tmp_path / "shared", tmp_path / "mine", tmp_path / "shared" / "x.npy"
    shared.mkdir()
    shared.chmod(0o1777)
    link.symlink_to(mine)
    monkeypatch.chdir(shared)
    for path in (link, "x.npy"):
        st.save(path, A)
        mine.unlink()
    os.chown(link, 65534, 65534, follow_symlinks=False)
    for path in (link, "x.npy"):
        with pytest.raises(PermissionError) as raised:
            st.save(path, A)
        assert raised.value.filename == str(path)
    assert not mine.exists()
    shared.chmod(0o777)
    st.save(link, A)
    assert mine.exists()
