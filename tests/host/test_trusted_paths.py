"""Paths that no other user can replace; `tests/interpreters/jit/test_compiler.py` has those of the compiler."""

from __future__ import annotations

import grp
import os
import pwd
import struct
from pathlib import Path

import pytest

from shardtensor.host.trusted_paths import distrust
from tests.scripts import new_process

ROOT = Path(__file__).parents[2]


def test_the_private_group_of_the_user_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the umask is 002, home folders and ~/.cache belong to such a group, which may write to them."""
    user = pwd.getpwuid(os.geteuid())
    parent, folder = tmp_path / "a", tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    parent.chmod(0o775)
    os.chown(parent, -1, user.pw_gid)

    def group(name: str, *members: str) -> None:
        made = grp.struct_group((name, "x", user.pw_gid, list(members)))
        monkeypatch.setattr(grp, "getgrgid", lambda number: made)

    for members in ((), (user.pw_name,)):
        group(user.pw_name, *members)
        assert distrust(str(folder)) is None
    refused = f"other users may write to {parent}"
    group(user.pw_name, "another")
    assert distrust(str(folder)) == refused
    group("project")
    assert distrust(str(folder)) == refused
    group(user.pw_name)
    parent.chmod(0o777)
    assert distrust(str(folder)) == refused
    try:
        everyone = 0xFFFFFFFF
        entries = [(1, 7, everyone), (2, 7, 1), (4, 5, everyone), (0x10, 7, everyone), (0x20, 5, everyone)]
        listed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
        os.setxattr(parent, "system.posix_acl_access", listed)
    except OSError:
        return  # The file system has no access control lists.
    assert distrust(str(folder)) == refused, "user 1 may write"


def test_the_folder_itself_belongs_to_the_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders with the sticky bit, and those of root, are trusted on the way only."""
    tmp_path.chmod(0o1777)
    assert distrust(str(tmp_path)) == f"other users may write to {tmp_path}"
    assert distrust(str(tmp_path / "inner"), create=True) is None
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert "belongs to another user" in str(distrust("/"))


def test_users_and_groups_without_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run programs under any number."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    (tmp_path / "a").mkdir()
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert distrust(str(tmp_path / "a")) is None
    tmp_path.chmod(0o775)
    assert distrust(str(tmp_path / "a")) == f"other users may write to {tmp_path}"


ALONE = """
import ctypes, os, sys, tempfile
from shardtensor.host.trusted_paths import distrust
if not os.geteuid():
    os.setgid(12345)
    os.setuid(12345)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: otherwise the files in /proc/self belong to root.
user = os.geteuid()
if ctypes.CDLL(None).unshare(0x10000000):  # CLONE_NEWUSER
    sys.exit(3)
with open("/proc/self/uid_map", "w") as file:
    file.write(f"{user} {user} 1")
assert os.geteuid() == user != os.stat("/").st_uid != 0
with tempfile.TemporaryDirectory(dir="/tmp") as folder:
    print(distrust(folder))
    os.chmod(folder, 0o777)
    print(distrust(folder + "/inner", create=True))
"""


def test_a_name_space_of_one_user() -> None:
    """As in Apptainer without privileges: the files of root belong to the number of unknown users."""
    done = new_process("-c", ALONE)
    if done.returncode == 3:
        pytest.skip("users may not make name spaces")
    assert done.stdout.split("\n", 1)[0] == "None", done.stdout + done.stderr
    assert "other users may write to" in done.stdout
