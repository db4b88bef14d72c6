"""The compiler and the cache on disk: after every fault the result is correct, and one line is logged."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardtensor.errors import BackendError
from shardtensor.interpreters.jit import c_executor, compiler
from shardtensor.interpreters.jit.c_source import c_source
from shardtensor.interpreters.jit.kernel import Kernel, KernelBuilder
from tests.interpreters.jit.random_kernels import assert_same

pytestmark = pytest.mark.skipif(compiler.find_compiler() is None, reason="no C compiler")

CODE = """
import json, os, sys
import numpy as np
from shardtensor.interpreters.jit import c_executor, compiler
from tests.interpreters.jit.test_compiler import plus, run
import logging
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
print(json.dumps(run(plus(7))))
"""


def plus(count: int) -> Kernel:
    """x + x + x …"""
    k = KernelBuilder(1)
    x = value = k.input("f4", (True,))
    for _ in range(count):
        value = k.call("add", value, x)
    k.output(value)
    return k.build()


def run(kernel: Kernel) -> float:
    """Compiles a kernel anew, as a new process would, and runs it on ones."""
    c_executor._known.pop(kernel, None)
    out = np.empty(3, "f4")
    c_executor.compile_kernels([kernel])[kernel].run((3,), [np.ones(3, "f4")], [out])
    return float(out[1])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler._say_once.cache_clear()
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
    code = "from tests.interpreters.jit.test_compiler import plus, run; assert run(plus(3)) == 4"
    subprocess.run([sys.executable, "-c", code], check=True)  # This process must not have loaded the library.
    (path,) = kept(home)
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    texts = counted(monkeypatch)
    assert run(plus(3)) == 4
    assert len(texts) == 1
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert compiler._is_whole(path)


def test_something_that_is_no_library_is_compiled_again(home: Path, messages: list[str]) -> None:
    folder, found = compiler._cache_folder(), compiler.find_compiler()
    assert folder is not None
    assert found is not None
    path = folder / f"{found.key(c_source([plus(4)], compiler.vectorized_functions()))}.so"
    path.write_bytes(b"no library" + hashlib.sha256(b"no library").digest())
    assert run(plus(4)) == 5
    assert [m for m in messages if "cannot be loaded" in m]
    assert path.read_bytes()[:4] == b"\x7fELF"


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
    compiler._say_once.cache_clear()
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


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files")
def test_a_cache_that_others_may_write_is_not_used(home: Path, messages: list[str]) -> None:
    folder = home / "shardtensor" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert run(plus(5)) == 6
    assert not list(folder.iterdir())
    assert any("other users may write" in m for m in messages)


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
    begin = time.perf_counter()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        compiled.run(a.shape, [a], [out])
    assert time.perf_counter() - begin < 5
    assert (a == 0.5).all()
