"""Compiles C text with the compiler of the system, and loads the libraries.

The compiler is the command in ``SHARDTENSOR_CC``, else the first of ``cc``, ``gcc`` and ``clang`` on the path. Its
libraries are kept on disk (see `shardtensor.interpreters.jit.c.kernel_files`) under a key of the text, the compiler and
its version, the flags, and the features of the CPU.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import itertools
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtensor.errors import BackendError, message_of
from shardtensor.host.fork import in_children, lock
from shardtensor.host.signals import Interrupts
from shardtensor.host.trusted_paths import distrust
from shardtensor.interpreters.jit.c.kernel_files import find_kernels

LOG = logging.getLogger("shardtensor.jit")

_COMMANDS = ("cc", "gcc", "clang")

FLAGS = (
    "-O2", "-ftree-vectorize", "-fvect-cost-model", "-march=native", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=off", "-fno-strict-aliasing", "-fopenmp-simd", "-shared", "-fPIC", "-w",
)  # fmt: skip
"""No flag changes the values that C defines, except that floating-point flags are not kept. The first three give code
that is as fast as that of ``-O3``, in half of the compiler's time.
"""

_TIMEOUT = 300
"""The seconds after which a compilation has failed."""

_POLL = 0.05
"""The seconds after which the main thread looks for signals while it waits for a compiler."""


@dataclass(frozen=True)
class Compiler:
    """A command that compiles C.

    Attributes:
        command: the command with its first arguments.
        version: what it answers to ``--version``.
    """

    command: tuple[str, ...]
    version: str

    def key(self, text: str) -> str:
        """Returns the name under which the library of a text is kept."""
        parts = (text, *self.command, self.version, *FLAGS, *_cpu())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def compile(self, text: str, folder: Path) -> Path:
        """Compiles a text into a library in ``folder``, and returns its path.

        Raises:
            BackendError: the compiler fails.
        """
        source, library = folder / "kernels.c", folder / "kernels.so"
        source.write_text(text, "utf-8")
        command = [*self.command, *FLAGS, "-o", str(library), str(source), "-lm"]
        try:
            # The compiler leaves its own temporary files if it is killed, which are removed with the folder.
            done = _run(command, env={**os.environ, "TMPDIR": str(folder)})
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BackendError(f"jit: the compiler {self.command[0]} fails: {message_of(error)}") from error
        if done.returncode or not library.exists():
            said = done.stderr.decode(errors="replace").strip()[-2000:]
            raise BackendError(f"jit: the compiler {self.command[0]} fails with status {done.returncode}: {said}")
        return library


def find_compiler() -> Compiler | None:
    """Returns the compiler of the system; None if there is none, for which the log gives the reason once."""
    return _compiler(os.environ.get("SHARDTENSOR_CC"), os.environ.get("PATH"))


@functools.lru_cache(8)
def _compiler(setting: str | None, path: str | None) -> Compiler | None:
    reasons = []
    # A relative entry would run a program that the owner of the current folder has put there.
    path = os.pathsep.join(filter(os.path.isabs, (os.defpath if path is None else path).split(os.pathsep)))
    try:
        tried = [shlex.split(setting)] if setting else [[name] for name in _COMMANDS]
    except ValueError as error:  # Unbalanced quotes.
        tried, reasons = [], [f"SHARDTENSOR_CC is {setting!r}: {error}"]
    for command in tried:
        program = shutil.which(command[0], path=path) if command else None
        if program is None:
            reasons.append(f"{' '.join(command) or repr(setting)} is not found")
            continue
        try:
            done = _run([program, *command[1:], "--version"])
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{program} fails: {message_of(error)}")
            continue
        if not done.returncode:
            return Compiler((program, *command[1:]), done.stdout.decode(errors="replace"))
        reasons.append(f"{program} --version fails with status {done.returncode}")
    LOG.info("no C compiler: %s; kernels run on NumPy (set SHARDTENSOR_CC to choose a compiler)", "; ".join(reasons))
    return None


@functools.cache
def _cpu() -> tuple[str, ...]:
    """Returns the architecture and the features of the CPU, for which ``-march=native`` compiles."""
    features: set[str] = set()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features", "model name"):
            features.add(value.strip())
    return platform.system(), platform.machine(), platform.processor(), *sorted(features)


@functools.cache
def vectorized_functions() -> frozenset[str]:
    """Returns the names of the mathematical functions that the C library has for vectors, too (glibc's libmvec)."""
    try:
        library = ctypes.CDLL("libmvec.so.1")
    except OSError:
        return frozenset()
    names = set()
    for name in _VECTOR_CANDIDATES:
        arguments = "vv" if name in ("pow", "atan2", "hypot") else "v"
        for suffix, lanes in (("f", 4), ("", 2)):
            if hasattr(library, f"_ZGVbN{lanes}{arguments}_{name}{suffix}"):
                names.add(name + suffix)
    return frozenset(names)


_VECTOR_CANDIDATES = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh",
    "cosh", "tanh", "asinh", "acosh", "atanh", "cbrt", "pow", "atan2", "hypot",
)  # fmt: skip


# -- processes -------------------------------------------------------------------------------------

_running: set[subprocess.Popen[bytes]] = set()
"""The processes of compilers that threads wait for."""

_starting = lock()
"""Held while a compiler is started: the interpreter could end before the process that it has started is known."""


def _run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Runs a command, and ends all of its processes.

    Raises:
        OSError: the command cannot be started.
        subprocess.TimeoutExpired: it takes too long.
        BaseException: the handler of a signal raised it.
    """
    deadline = time.monotonic() + _TIMEOUT
    with Interrupts() as interrupts:
        with _starting:
            # In a session of its own, the compiler does not receive the signals of the terminal.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, **options,
            )  # fmt: skip
            _running.add(process)
        try:
            while True:
                interrupts.deliver()
                try:
                    out, errors = process.communicate(timeout=_POLL)
                except subprocess.TimeoutExpired:
                    if time.monotonic() > deadline:
                        raise subprocess.TimeoutExpired(command, _TIMEOUT) from None
                else:
                    return subprocess.CompletedProcess(command, process.returncode, out, errors)
        except BaseException:  # Whatever it is, such as Ctrl-C, it is raised again once no process is left.
            _kill(process)
            process.communicate()
            raise
        finally:
            _running.discard(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the processes of a compiler: ``cc`` starts others, which would outlive it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # It has ended.
        os.killpg(process.pid, signal.SIGKILL)


@atexit.register
def _kill_all() -> None:
    """Kills the compilers for which threads in the background wait, which end with the interpreter."""
    with _starting:
        for process in list(_running):
            _kill(process)


@in_children
def _forget() -> None:
    """Forgets the compilers of the parent in the child of a fork."""
    _running.clear()


# -- libraries -------------------------------------------------------------------------------------

_numbers = itertools.count()


def load(compiler: Compiler, text: str, functions: Sequence[str]) -> ctypes.CDLL:
    """Returns the library of a text, from the disk if it is there.

    Args:
        compiler: the compiler.
        text: the text.
        functions: the names of the functions that the library has.

    Raises:
        BackendError: the compiler fails, or its library cannot be loaded.
    """
    kernels, key = find_kernels(), compiler.key(text)
    if kernels is not None and (content := kernels.read(key)) is not None:
        try:
            return _loaded(content, functions)
        except OSError as error:
            LOG.info("the library %s cannot be loaded (%s) and is compiled again", key, message_of(error))
    try:
        # The handlers of signals run where the compiler is waited for, so that no file is left.
        with Interrupts(), _scratch() as scratch:
            content = compiler.compile(text, scratch).read_bytes()
            loaded = _loaded(content, functions)
            if kernels is not None:
                kernels.keep(key, content)
            return loaded
    except OSError as error:
        raise BackendError(f"jit: no library can be compiled or loaded: {message_of(error)}") from error


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Makes a folder for temporary files, which is removed at the end of the context.

    Raises:
        BackendError: other users can replace the folder.
    """
    with tempfile.TemporaryDirectory(prefix="shardtensor-") as folder:
        if (reason := distrust(folder)) is not None:
            raise BackendError(
                f"jit: the folder for temporary files, {tempfile.gettempdir()}, cannot be trusted: {reason}; set "
                "TMPDIR to a folder in which no other user can replace files"
            )
        yield Path(folder)


def _loaded(content: bytes, functions: Sequence[str]) -> ctypes.CDLL:
    """Loads a library from its bytes, which have been checked.

    Raises:
        OSError: the library cannot be loaded, or it lacks a function.
        BackendError: other users can replace temporary files.
    """
    try:
        library = _loaded_from_memory(content)
    except (AttributeError, OSError):  # Pythons for old C libraries lack memfd_create; sandboxes forbid it or /proc.
        with _scratch() as folder:
            path = folder / "kernels.so"
            path.write_bytes(content)
            library = ctypes.CDLL(str(path))  # It stays loaded when the file is removed.
    if missing := [name for name in functions if not hasattr(library, name)]:
        raise OSError(f"it has no function {missing[0]}")
    return library


def _loaded_from_memory(content: bytes) -> ctypes.CDLL:
    """Loads a library from memory, because file systems may forbid programs."""
    number = os.memfd_create("shardtensor-kernels")
    try:
        with os.fdopen(number, "wb", closefd=False) as file:
            file.write(content)
        # A path that has been loaded before would give that library again, and numbers of files are reused.
        unique = f"{next(_numbers):b}".replace("0", "./").replace("1", ".//")
        return ctypes.CDLL(f"/proc/self/fd/{unique}{number}")
    finally:
        os.close(number)
