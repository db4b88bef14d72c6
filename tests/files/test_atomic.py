"""Files and folders appear as a whole or not at all, whichever operation fails; leftovers are found and removed."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardtensor.files.atomic import (
    Disk,
    commit_folder,
    find_folder,
    leftovers,
    make_folder,
    name_beside,
    new_folder,
    recover,
    remove_folder,
    remove_leftovers,
    replace_file,
    write_file,
)
from tests.checkpoint.disks import is_leftover


class Killed(BaseException):
    """The process ends here."""


OPERATIONS = ("create", "write", "flush", "close", "make_folder", "rename", "remove_file", "remove_empty_folder")


class Failing(Disk):
    """The k-th operation fails, and none is done afterwards if it is that the process ends."""

    def __init__(self, at: int, error: Callable[[], BaseException]) -> None:
        self.left, self.error, self.done = at, error, []

    def _count(self, name: str) -> None:
        if self.error is Killed and self.left < 0:
            raise Killed
        self.left -= 1
        if self.left == -1:
            raise self.error()
        self.done.append(name)


for operation in OPERATIONS:

    def run(self: Failing, *args: object, name: str = operation) -> object:
        if name == "close":
            os.close(args[0])
            self._count(name)
            return None
        self._count(name)
        if name == "write":  # Short writes are continued.
            return os.write(args[0], args[1][:3])
        return getattr(Disk, name)(self, *args)

    setattr(Failing, operation, run)


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def names_one_below(error: BaseException, folder: Path) -> None:
    assert error.__class__ is Killed or str(folder) in str(error.filename)


NEW = {"a/b": b"new 1", "c": b"new 22"}
OLD = {"c": b"old"}


def save(path: str, disk: Disk) -> None:
    recover(path, disk)
    new = new_folder(path, disk)
    make_folder(f"{new}/a", disk)
    for name, content in NEW.items():
        write_file(f"{new}/{name}", [content[:2], content[2:]], disk)
    commit_folder(new, path, overwrite=True, disk=disk)


def put_old(path: Path) -> None:
    path.mkdir()
    (path / "c").write_bytes(OLD["c"])


@pytest.mark.parametrize("error", [no_space, Killed], ids=["error", "killed"])
@pytest.mark.parametrize("replaces", [False, True])
def test_each_operation_of_a_save_may_fail(error: Callable[[], BaseException], replaces: bool, tmp_path: Path) -> None:
    for at in itertools.count():
        folder = tmp_path / str(at)
        folder.mkdir()
        path = folder / "x"
        if replaces:
            put_old(path)
        disk = Failing(at, error)
        try:
            save(str(path), disk)
        except (OSError, Killed) as raised:
            names_one_below(raised, folder)
        else:
            assert contents(folder) == {f"x/{name}": content for name, content in NEW.items()}
            if disk.left >= 0:
                break
            assert replaces  # What is deleted is renamed before, where that is possible.
            continue
        taken = find_folder(str(path))
        assert (taken and contents(Path(taken))) in ((OLD, NEW) if replaces else (None, NEW))
        before = taken and contents(Path(taken))
        recover(str(path))
        assert leftovers(str(path)) == []
        assert (contents(path) if path.exists() else None) == before
        save(str(path), Disk())
        assert contents(folder) == {f"x/{name}": content for name, content in NEW.items()}
    assert at >= 17


@pytest.mark.parametrize("error", [no_space, Killed], ids=["error", "killed"])
def test_each_operation_of_a_removal_may_fail(error: Callable[[], BaseException], tmp_path: Path) -> None:
    for at in itertools.count():
        path = tmp_path / str(at)
        save(str(path), Disk())
        (path / "link").symlink_to(tmp_path)
        (path / "a" / "broken").symlink_to("nothing")
        disk = Failing(at, error)
        try:
            remove_folder(str(path), disk)
        except (OSError, Killed) as raised:
            names_one_below(raised, tmp_path)
        else:
            break
        assert not path.exists() or NEW.items() <= contents(path).items()
        remove_leftovers(str(path))
        assert leftovers(str(path)) == []
    assert at > 6
    assert not path.exists()


@pytest.mark.parametrize("error", [no_space, Killed], ids=["error", "killed"])
def test_each_operation_of_a_file_may_fail(error: Callable[[], BaseException], tmp_path: Path) -> None:
    for at in itertools.count():
        path = tmp_path / str(at)
        path.write_bytes(b"old")
        disk = Failing(at, error)
        try:
            assert replace_file(str(path), [b"n", b"", b"ew and longer"], disk) == 14
        except (OSError, Killed):
            renamed = "rename" in disk.done
            assert path.read_bytes() == (b"new and longer" if renamed else b"old")
            if error is no_space:
                assert leftovers(str(path)) == []
            remove_leftovers(str(path))
        else:
            break
    assert path.read_bytes() == b"new and longer"
    assert disk.done == ["create", *["write"] * 6, "flush", "close", "rename", "flush"]


def test_a_file_that_exists_is_not_overwritten_and_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError) as caught:
        write_file(str(path), [b"new"])
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"


def test_a_folder_that_exists_is_replaced_only_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "x"
    put_old(path)
    new = new_folder(str(path))
    with pytest.raises(FileExistsError, match="overwrite=True"):
        commit_folder(new, str(path))
    assert contents(path) == OLD
    assert leftovers(str(path)) == [new]
    commit_folder(new, str(path), overwrite=True)
    assert contents(tmp_path) == {}


def test_links_are_replaced_and_removed_and_their_targets_are_not(tmp_path: Path) -> None:
    target = tmp_path / "target"
    put_old(target)
    for name in ("a", "b", "c"):
        (tmp_path / name).symlink_to(target)
    commit_folder(new_folder(str(tmp_path / "a")), str(tmp_path / "a"), overwrite=True)
    remove_folder(str(tmp_path / "b"))
    os.rename(tmp_path / "c", name_beside(str(tmp_path / "c"), "gone"))
    remove_leftovers(str(tmp_path / "c"))
    assert contents(target) == OLD
    assert sorted(os.listdir(tmp_path)) == ["a", "target"]


def test_an_error_that_cannot_be_cleaned_says_so(tmp_path: Path) -> None:
    class Broken(Failing):
        def remove_file(self, path: str) -> None:
            raise OSError(errno.EROFS, "Read-only file system", path)

    with pytest.raises(OSError, match="No space") as caught:
        write_file(str(tmp_path / "x"), [b"abc"], Broken(1, no_space))
    assert "could not be removed" in caught.value.__notes__[0]


def test_names_beside_others_are_recognized_and_no_others_are(tmp_path: Path) -> None:
    for name in ("x", "step_10", ".hidden", "a.b.new", "ü" * 120, "x" * 255, "a\nb", os.fsdecode(b"\xff")):
        path = str(tmp_path / name)
        beside = new_folder(path)
        assert is_leftover(os.path.basename(beside))
        assert leftovers(path) == [beside]
        assert leftovers(path, "old") == []
        os.rmdir(beside)
    put_old(tmp_path / "x")
    for name in (".x.new", ".x.123.old", "x.old", "..x"):
        (tmp_path / name).mkdir()
        assert not is_leftover(name)
    os.mkdir(name_beside(str(tmp_path / "xy"), "new"))
    assert leftovers(str(tmp_path / "x")) == []
    assert find_folder(str(tmp_path / "y")) is None
    assert find_folder(str(tmp_path / "none" / "y")) is None


def test_of_folders_that_were_moved_aside_the_newest_is_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    for number in range(2):
        old = name_beside(path, "old")
        os.mkdir(old)
        os.utime(old, ns=(number, number))
    assert find_folder(path) == old
    recover(path)
    assert os.listdir(tmp_path) == ["x"]


def test_paths_relative_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save("x", Disk())
    assert find_folder("x") == "x"
    remove_folder("x")
    replace_file("y", [b"1"])
    assert os.listdir() == ["y"]
