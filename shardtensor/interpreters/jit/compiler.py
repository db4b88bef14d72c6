"""Compiles C text with the compiler of the system, and keeps the libraries in a private folder on disk.

The compiler is the command in ``SHARDTENSOR_CC``, else the first of ``cc``, ``gcc`` and ``clang`` on the path.
Libraries are kept in ``$XDG_CACHE_HOME/shardtensor/kernels`` (by default in ``~/.cache``), which only the user may
write, under a key of the text, the compiler and its version, the flags, and the features of the CPU. Each file ends
with a digest of its contents, which is checked before the library is loaded: a truncated library is compiled again. If
the folder cannot be used, libraries are compiled for this process only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shardtensor.errors import BackendError, message_of

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

_DIGEST = 32
"""The size in bytes of the digest at the end of a file."""


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
            # In a session of its own, the compiler does not receive the signals of the terminal.
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, start_new_session=True
            )
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
def _compiler(given: str | None, path: str | None) -> Compiler | None:
    reasons = []
    try:
        tried = [shlex.split(given)] if given else [[name] for name in _COMMANDS]
    except ValueError as error:  # Unbalanced quotes.
        tried, reasons = [], [f"SHARDTENSOR_CC is {given!r}: {error}"]
    for command in tried:
        found = shutil.which(command[0], path=path) if command else None
        if found is None:
            reasons.append(f"{' '.join(command) or repr(given)} is not found")
            continue
        try:
            done = subprocess.run(
                [found, *command[1:], "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{found} fails: {message_of(error)}")
            continue
        if not done.returncode:
            return Compiler((found, *command[1:]), done.stdout.decode(errors="replace"))
        reasons.append(f"{found} --version fails with status {done.returncode}")
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


# -- the cache on disk -----------------------------------------------------------------------------


def load(compiler: Compiler, text: str) -> ctypes.CDLL:
    """Returns the library of a text, from the cache if it is there.

    Raises:
        BackendError: the compiler fails, or its library cannot be loaded.
    """
    folder = _cache_folder()
    kept = folder / f"{compiler.key(text)}.so" if folder else None
    if kept is not None and _is_whole(kept):
        try:
            return ctypes.CDLL(str(kept))
        except OSError as error:
            LOG.info("the library %s cannot be loaded (%s) and is compiled again", kept, error)
    try:
        with tempfile.TemporaryDirectory(prefix="shardtensor-") as scratch:
            library = compiler.compile(text, Path(scratch))
            content = library.read_bytes()
            if kept is not None and _keep(kept, content):
                with contextlib.suppress(OSError):  # The file system of the cache may forbid programs.
                    return ctypes.CDLL(str(kept))
            return ctypes.CDLL(str(library))  # It stays loaded when the file is removed.
    except OSError as error:
        raise BackendError(f"jit: no library can be compiled or loaded: {message_of(error)}") from error


def _cache_folder() -> Path | None:
    """Returns the folder of the cache, which is created if necessary; None if it cannot be used."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home) / "shardtensor" / "kernels"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        _say_once(f"kernels are not kept on disk: {message_of(error)}")
        return None
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        _say_once(f"kernels are not kept on disk: other users may write to {folder}")
        return None
    return folder


def _is_whole(path: Path) -> bool:
    """Returns whether a file is a library as `_keep` has written it."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > _DIGEST and hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _keep(path: Path, content: bytes) -> bool:
    """Writes a library into the cache; returns whether that was possible. Other processes see all of it or nothing."""
    try:
        number, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    except OSError as error:
        _say_once(f"kernels are not kept on disk: {message_of(error)}")
        return False
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
        os.chmod(name, 0o700)
        os.replace(name, path)
    except OSError as error:
        _say_once(f"kernels are not kept on disk: {message_of(error)}")
        with contextlib.suppress(OSError):
            os.unlink(name)
        return False
    return True


@functools.lru_cache(64)
def _say_once(message: str) -> None:
    LOG.info("%s", message)
