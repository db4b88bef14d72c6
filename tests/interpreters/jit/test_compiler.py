"""The compiler and the cache on disk: after every fault the result is correct, and one line is logged."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.errors import BackendError
from shardtensor.interpreters.jit.c import c_executor, compiler, kernel_files
from shardtensor.interpreters.jit.c.c_source import c_source
from shardtensor.interpreters.jit.kernels.kernel import KernelBuilder
from tests.draws import drawn
from tests.interpreters.jit.random_kernels import assert_same
from tests.interpreters.jit.sums import plus, run
from tests.spmd.test_scheduler import in_time
from tests.timing import within

pytestmark = pytest.mark.skipif(compiler.find_compiler() is None, reason="no C compiler")

CODE = """
import json, os, sys
import numpy as np
from shardtensor.interpreters.jit.c import c_executor, compiler, kernel_files
from tests.interpreters.jit.sums import plus, run
import logging
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
print(json.dumps(run(plus(7))))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel_files._say_once.cache_clear()
    return tmp_path


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What is logged from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    compiler.LOG.addHandler(handler)
    level = compiler.LOG.level
    compiler.LOG.setLevel(logging.INFO)
    yield lines
    compiler.LOG.removeHandler(handler)
    compiler.LOG.setLevel(level)


def kept(home: Path) -> list[Path]:
    return sorted((home / "shardtensor" / "kernels").glob("*.so"))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are compiled from now on."""
    texts: list[str] = []
    compile = compiler.Compiler.compile

    def count(self: compiler.Compiler, text: str, folder: Path) -> Path:
        texts.append(text)
        return compile(self, text, folder)

    monkeypatch.setattr(compiler.Compiler, "compile", count)
    return texts


def test_a_library_is_compiled_once_and_then_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = counted(monkeypatch)
    assert run(plus(1)) == run(plus(1)) == 2
    assert len(texts) == 1
    (path,) = kept(home)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert run(plus(2)) == 3
    assert len(texts) == len(kept(home)) == 2


def test_libraries_of_other_texts_compilers_and_cpus_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    one = compiler.Compiler(("cc",), "1")
    assert one.key("a") != one.key("b")
    assert one.key("a") != compiler.Compiler(("cc",), "2").key("a")
    assert one.key("a") != compiler.Compiler(("cc", "-m32"), "1").key("a")
    key = one.key("a")
    monkeypatch.setattr(compiler, "_cpu", lambda: ("another",))
    assert one.key("a") != key


@pytest.mark.parametrize(
    "size", [pytest.param(0, marks=pytest.mark.full), 1000, pytest.param(-1, marks=pytest.mark.full)]
)
def test_a_truncated_library_is_compiled_again(size: int, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from tests.interpreters.jit.sums import plus, run; assert run(plus(3)) == 4"
    subprocess.run([sys.executable, "-c", code], check=True)  # This process must not have loaded the library.
    (path,) = kept(home)
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    texts = counted(monkeypatch)
    assert run(plus(3)) == 4
    assert len(texts) == 1
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert path.stat().st_size == len(whole)


def test_something_that_is_no_library_is_compiled_again(home: Path, messages: list[str]) -> None:
    kernels, key = written(4, b"no library")
    assert run(plus(4)) == 5
    assert [m for m in messages if "cannot be loaded" in m]
    assert (kernels.read(key) or b"")[:4] == b"\x7fELF"


def test_a_library_without_the_functions_is_compiled_again(home: Path, messages: list[str]) -> None:
    found = compiler.find_compiler()
    assert found is not None
    content = found.compile("int another(void) { return 1; }", home).read_bytes()
    kernels, key = written(4, content)
    assert run(plus(4)) == 5
    assert [m for m in messages if "it has no function kernel_0" in m]
    assert kernels.read(key) != content


def test_a_library_under_another_name_is_compiled_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(plus(2))
    (path,) = kept(home)
    content = path.read_bytes()
    kernels, key = written(4, b"")
    (kernels.folder / f"{key}.so").write_bytes(content)
    texts = counted(monkeypatch)
    assert run(plus(4)) == 5
    assert len(texts) == 1


def written(count: int, content: bytes) -> tuple[kernel_files.Kernels, str]:
    """Keeps other bytes in place of the library of `plus`; returns the folder and the key."""
    kernels, found = kernel_files.find_kernels(), compiler.find_compiler()
    assert kernels is not None
    assert found is not None
    key = found.key(c_source([plus(count)], compiler.vectorized_functions()))
    kernels.keep(key, content)
    return kernels, key


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "link", "device", "of others", "written by others"])
def test_what_only_the_user_has_written_is_read(
    kind: str, home: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, key = written(4, b"content")
    path, away = kernels.folder / f"{key}.so", home / "away"
    if kind in ("device", "of others") and os.geteuid():
        pytest.skip("only root makes devices and files of others")
    if kind in ("of others", "written by others"):
        os.chown(path, 65534 if kind == "of others" else -1, -1)
        path.chmod(0o666 if kind == "written by others" else 0o644)
    else:
        path.rename(away)
        monkeypatch.chdir(kernels.folder)  # The paths of sockets are short.
        with socket.socket(socket.AF_UNIX) as made:
            {
                "pipe": lambda: os.mkfifo(path),
                "folder": path.mkdir,
                "socket": lambda: made.bind(path.name[-8:]),
                "link": lambda: path.symlink_to(away),
                "device": lambda: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5)),
            }[kind]()
        if kind == "socket":
            os.rename(path.name[-8:], path)
    assert in_time(lambda: kernels.read(key), 5) is None
    assert len([m for m in messages if str(path) in m]) == 1
    assert run(plus(4)) == 5
    assert (kind == "folder") == (kernels.read(key) is None), "all but a folder are replaced"
    assert kind != "link" or away.read_bytes()[:7] == b"content"


def test_the_loaded_bytes_are_those_that_were_checked(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(plus(4))
    (path,) = kept(home)
    read = kernel_files._read

    def exchanged(path: Path) -> bytes:
        content = read(path)
        path.write_bytes(b"exchanged after the check")
        return content

    monkeypatch.setattr(kernel_files, "_read", exchanged)
    texts = counted(monkeypatch)
    assert run(plus(4)) == 5
    assert not texts


@pytest.mark.parametrize("kind", ["missing", "forbidden", "no /proc"])
def test_libraries_are_loaded_without_files_in_memory(
    kind: str, home: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pythons that are built for old C libraries have no `os.memfd_create`, and sandboxes forbid it."""

    def forbidden(*args: Any) -> Any:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    load = ctypes.CDLL
    if kind == "missing":
        monkeypatch.delattr(os, "memfd_create")
    elif kind == "forbidden":
        monkeypatch.setattr(os, "memfd_create", forbidden)
    else:
        monkeypatch.setattr(ctypes, "CDLL", lambda path: forbidden() if path.startswith("/proc") else load(path))
    temporary = home / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    texts = counted(monkeypatch)
    assert run(plus(4)) == run(plus(4)) == 5
    assert run(plus(5)) == 6
    assert len(texts) == 2
    assert not messages
    assert not list(temporary.iterdir())


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="the superuser may write everywhere")
def test_a_cache_that_is_read_only_is_not_used(home: Path, messages: list[str]) -> None:
    folder = home / "shardtensor" / "kernels"
    folder.mkdir(parents=True, mode=0o500)
    assert run(plus(5)) == run(plus(5)) == 6
    assert len([m for m in messages if "not kept on disk" in m]) == 1


def test_a_cache_that_cannot_be_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    kernel_files._say_once.cache_clear()
    assert run(plus(5)) == run(plus(5)) == 6
    assert len([m for m in messages if "not kept on disk" in m]) == 1


def test_a_full_cache_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert run(plus(6)) == run(plus(6)) == 7
    assert not list((home / "shardtensor" / "kernels").iterdir())
    assert len([m for m in messages if "No space left" in m]) == 1


@pytest.mark.parametrize("umask", [0o022, 0o002])
def test_missing_folders_are_made_for_the_user_only(
    umask: int, home: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "a" / "b"))
    before = os.umask(umask)
    try:
        found = kernel_files.find_kernels()
    finally:
        os.umask(before)
    assert found is not None
    assert not messages
    assert [stat.S_IMODE(p.stat().st_mode) for p in (found.folder, *found.folder.parents[:3])] == [0o700] * 4


@pytest.mark.parametrize("where", ["shardtensor/kernels", "shardtensor", ".", ".."])
def test_a_cache_that_others_may_write_is_not_used(
    where: str, home: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    folder = home / "shardtensor" / "kernels"
    folder.mkdir(parents=True)
    if where == "..":
        home = home / "home"
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        folder = home / "shardtensor" / "kernels"
        folder.mkdir(parents=True)
    (home / where).chmod(0o777)
    assert run(plus(5)) == run(plus(5)) == 6
    assert not list(folder.iterdir())
    assert len(messages) == 1
    assert "other users may write to" in messages[0]


def test_relative_paths_of_caches_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = kernel_files.find_kernels()
    assert found is not None
    assert found.folder == tmp_path / "home/.cache/shardtensor/kernels"
    monkeypatch.setenv("HOME", "home")
    assert kernel_files.find_kernels() is None
    assert [m for m in messages if "is not an absolute path" in m]
    assert not (tmp_path / "cache").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root makes files of others")
def test_the_home_of_another_user_is_not_written(home: Path, messages: list[str]) -> None:
    """As with sudo, which keeps HOME."""
    os.chown(home, 65534, 65534)
    assert run(plus(5)) == 6
    assert not list(home.iterdir())
    assert [m for m in messages if "belongs to another user" in m]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root makes files of others")
def test_root_runs_no_library_of_another_user(home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The other user owns a parent of the folder, which itself belongs to root, and can replace the folder."""
    theirs = tmp_path_factory.mktemp("theirs")
    ours = theirs / "shardtensor" / "kernels"
    ours.mkdir(parents=True, mode=0o700)
    os.chown(theirs, 65534, 65534)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(theirs))
        assert kernel_files.find_kernels() is None
        (home / "link").symlink_to(theirs)
        patch.setenv("XDG_CACHE_HOME", str(home / "link"))
        assert kernel_files.find_kernels() is None
        os.chown(theirs, 0, 0)
        assert kernel_files.find_kernels() is not None
        os.chown(home / "link", 65534, 65534, follow_symlinks=False)
        assert kernel_files.find_kernels() is None


def test_temporary_folders_have_to_be_trusted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = home / "tmp"
    hostile.mkdir()
    hostile.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(hostile))
    with pytest.raises(BackendError, match=r"other users may write to .*; set TMPDIR"):
        run(plus(5))
    hostile.chmod(0o1777)
    assert run(plus(5)) == 6
    assert not list(hostile.iterdir())


def test_compilers_of_the_current_folder_are_not_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = home / "cc"
    script.write_text("#!/bin/sh\ntouch run\n")
    script.chmod(0o700)
    monkeypatch.chdir(home)
    monkeypatch.delenv("SHARDTENSOR_CC", raising=False)
    for path in ("", ".", ":", "./"):
        monkeypatch.setenv("PATH", path)
        assert compiler.find_compiler() is None
    assert not (home / "run").exists()


# -- bounds ------------------------------------------------------------------------------------------


def aged(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_libraries_that_are_not_used_are_removed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernel_files.find_kernels()
    assert kernels is not None
    monkeypatch.setattr(kernel_files, "MOST_BYTES", 4 * (100 + 32))
    for k in range(6):
        kernels.keep(str(k), bytes(100))
        aged(kernels.folder / f"{k}.so", 100 - k)
        if k >= 3:
            assert kernels.read("0") is not None  # It is used, and has a new time.
    assert [p.stem for p in kept(home)] == ["0", "3", "4", "5"]
    for k in (3, 4):  # The bound of the bytes removes one of them only.
        aged(kernels.folder / f"{k}.so", kernel_files.MOST_SECONDS + 9)
    for name, age in (("killed.tmp", 1e4), ("written.tmp", 1), ("other.txt", 1e9)):
        (kernels.folder / name).touch()
        aged(kernels.folder / name, age)
    (kernels.folder / "folder.so").mkdir()
    kernels.keep("6", bytes(100))
    assert {p.name for p in kernels.folder.iterdir()} == {
        "0.so", "5.so", "6.so", "folder.so", "other.txt", "written.tmp"
    }  # fmt: skip
    kernels.keep("large", bytes(10000))
    assert [p.stem for p in kept(home) if p.is_file()] == ["large"]


WRITES = """
import sys
from shardtensor.interpreters.jit.c import kernel_files
kernel_files.MOST_BYTES = 5 * (1000 + 32)
kernels = kernel_files.find_kernels()
for k in range(COUNT):
    key = str(k % 9)
    kernels.keep(key, key.encode() * 1000)
    for other in range(9):
        content = kernels.read(str(other))
        assert content is None or content == str(other).encode() * 1000
"""


def test_processes_write_and_remove_at_the_same_time(home: Path) -> None:
    both = [
        subprocess.Popen(
            [sys.executable, "-c", f"COUNT = {drawn(300, fast=120)}\nimport logging; logging.basicConfig(level=20)\n{WRITES}"],
            env={**os.environ, "XDG_CACHE_HOME": str(home)}, stderr=subprocess.PIPE, text=True,
        ) for _ in range(2)
    ]  # fmt: skip
    for process in both:
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == 0
    assert 1 <= len(kept(home)) <= 5
    assert not list((home / "shardtensor" / "kernels").glob("*.tmp"))


# -- processes of the compiler -----------------------------------------------------------------------

CHILDREN = """#!/bin/sh
[ "$1" = --version ] && exit 0
sleep 1000 &
echo $! >> "{pids}"
touch "$TMPDIR/left"
wait
"""


def alive(pid: int) -> bool:
    """Whether a process exists that has not ended; one that nothing has waited for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def slow_compiler(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler whose child sleeps; returns the file with the number of the child."""
    script, pids = home / "cc", home / "pids"
    script.write_text(CHILDREN.format(pids=pids))
    script.chmod(0o700)
    monkeypatch.setenv("SHARDTENSOR_CC", str(script))
    (home / "tmp").mkdir(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(home / "tmp"))
    return pids


def eventually(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 20
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def number_in(pids: Path) -> int:
    return int(eventually(lambda: pids.exists() and pids.read_text().split())[0])


def test_an_interrupt_ends_all_processes_of_the_compiler(slow_compiler: Path, home: Path) -> None:
    def interrupt() -> None:
        number_in(slow_compiler)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(plus(5))
    thread.join()
    child = number_in(slow_compiler)
    eventually(lambda: not alive(child))
    assert not list((home / "tmp").iterdir())
    assert not compiler._running


def test_a_compilation_that_takes_too_long_ends_all_processes(
    slow_compiler: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.find_compiler()
    monkeypatch.setattr(compiler, "_TIMEOUT", 0.3)
    with pytest.raises(BackendError, match="timed out"):
        run(plus(5))
    child = number_in(slow_compiler)
    eventually(lambda: not alive(child))
    assert not list((home / "tmp").iterdir())


def test_compilers_in_the_background_end_with_the_interpreter(slow_compiler: Path, home: Path) -> None:
    code = """
import pathlib, time
from shardtensor.interpreters.jit import c_executor
from tests.interpreters.jit.sums import plus
c_executor.submit([plus(3)])
while not ((pids := pathlib.Path(%r)).exists() and pids.read_text().split()):
    time.sleep(0.01)
"""
    environment = {**os.environ, "TMPDIR": str(home / "tmp")}
    # Also where the thread has started the compiler, and is slow to note it.
    slow = "import subprocess, time; start = subprocess.Popen.__init__\n"
    slow += "subprocess.Popen.__init__ = lambda *args, **options: (start(*args, **options), time.sleep(1))[0]\n"
    for first in ("", slow):
        slow_compiler.unlink(missing_ok=True)
        command = [sys.executable, "-c", first + code % str(slow_compiler)]
        subprocess.run(command, env=environment, check=True, timeout=60)
        child = number_in(slow_compiler)
        eventually(lambda child=child: not alive(child))
        assert not list((home / "tmp").iterdir())


# -- limits ------------------------------------------------------------------------------------------


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("executor", [None, "c"])
def test_programs_run_where_no_thread_can_be_started(
    executor: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c_executor, "_known", {})
    x = st.asarray(np.arange(float(1 << 20)))
    f = st.jit(lambda x: (st.sin(x) + 1, st.cos(x[::2]) * 2, x[1:] - x[:-1], st.exp(-x).sum()), executor=executor)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    for _ in range(2):
        first, *_ = f(x)
    np.testing.assert_allclose(np.asarray(first), np.sin(np.arange(float(1 << 20))) + 1, atol=1e-9)
    assert kept(home)


def test_an_interrupt_where_no_thread_can_be_started(slow_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler, "_run", interrupt)
    compiler._compiler.cache_clear()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(KeyboardInterrupt):
        c_executor.submit([plus(11)])


def test_two_processes_at_once_compile_or_read_the_same_library(home: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(home)}
    both = [
        subprocess.Popen([sys.executable, "-c", CODE], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in both:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
        assert json.loads(out) == 8
        assert not errors, errors.decode()
    assert len(kept(home)) == 1
    assert [p.suffix for p in (home / "shardtensor" / "kernels").iterdir()] == [".so"]


@pytest.mark.parametrize("command", ["no-such-compiler", "false", "", "'"])
def test_without_a_compiler_the_log_says_so_once(
    command: str, home: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.setenv("SHARDTENSOR_CC", command)
    if not command:
        monkeypatch.setenv("PATH", str(home))
    compiler._compiler.cache_clear()
    for _ in range(2):
        with pytest.raises(BackendError, match="SHARDTENSOR_CC"):
            run(plus(5))
    assert len([m for m in messages if "no C compiler" in m]) == 1


def test_a_compiler_that_fails_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = home / "cc"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho broken >&2\nexit 3\n')
    script.chmod(0o700)
    monkeypatch.setenv("SHARDTENSOR_CC", str(script))
    with pytest.raises(BackendError, match="status 3: broken"):
        run(plus(5))


def test_the_compiler_can_be_chosen_with_arguments(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDTENSOR_CC", f"{shutil.which('cc') or shutil.which('gcc')} -g0")
    found = compiler.find_compiler()
    assert found is not None
    assert found.command[1:] == ("-g0",)
    assert run(plus(5)) == 6


def test_compilation_in_the_background_gives_the_kernels_or_the_error(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = plus(8)
    c_executor._known.pop(kernel, None)
    made = c_executor.submit([kernel]).result(timeout=120)
    out = np.empty(3, "f4")
    made[kernel].run((3,), [np.ones(3, "f4")], [out])
    assert_same(out, np.full(3, 9, "f4"))
    monkeypatch.setenv("SHARDTENSOR_CC", "no-such-compiler")
    c_executor._known.pop(kernel, None)
    with pytest.raises(BackendError):
        c_executor.submit([kernel]).result(timeout=120)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_kernels_run_in_the_child_of_a_fork(home: Path) -> None:
    kernel = plus(9)
    assert run(kernel) == 10
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if run(kernel) == 10 and run(plus(10)) == 11 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_interrupt_ends_a_long_kernel_and_leaves_the_operands(home: Path) -> None:
    k = KernelBuilder(1)
    x = value = k.input("f8", (True,))
    for _ in range(40):
        value = k.call("sin", value)
    k.output(value)
    kernel = k.build()
    compiled = c_executor.compile_kernels([kernel])[kernel]
    a = np.full(1 << 24, 0.5)
    out = np.empty_like(a)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    with within(5):
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            compiled.run(a.shape, [a], [out])
    assert (a == 0.5).all()
