"""The Python on which the benchmarks and the tests run the peers, which are other libraries, each in its own process.

It is the one that the option ``--peer-python`` of a benchmark names, or else the environment variable
``SHARDTENSOR_PEER_PYTHON``, or else the Python of this process. Modules with cases of peers import only what every
Python has: this module needs the standard library alone.

Run as a program, this file prints which Python it is, and which versions of the peers it has.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

VARIABLE = "SHARDTENSOR_PEER_PYTHON"
OPTION = "--peer-python"

LIBRARIES = (
    "dask", "jax", "mlx", "numba", "orbax", "safetensors", "scipy", "tensorstore", "tinygrad", "torch", "zarr",
)  # fmt: skip
"""The peers. NumPy, CuPy and mpi4py, with which shardtensor computes, run on the same Python as shardtensor."""

START_LIMIT = 60.0
"""The seconds in which a Python has to start and to report versions."""

# Values for another machine can halve the speed of NumPy's matrix product.
_TUNING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")

# With these, another Python would import the packages of this one.
_PATHS = ("PYTHONHOME", "PYTHONPATH")

_VERSIONS = """
import importlib.metadata, importlib.util, json, platform, sys

def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed" if importlib.util.find_spec(name) is None else "of unknown version"

found = {"Python": platform.python_version()} | {name: version(name) for name in sys.argv[1:]}
print(json.dumps(found))
"""

MISSING = "not installed"


class PeerError(Exception):
    """The peers' Python cannot be run, or a program has failed on it; the message says how."""


def python() -> str:
    """Returns the path of the peers' Python.

    Raises:
        PeerError: the option or the environment variable names no program.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return sys.executable
    found = shutil.which(os.path.expanduser(named))
    if found is None:
        raise PeerError(
            f"the peers' Python ({OPTION}, or the environment variable {VARIABLE}) is {named!r}, which is not the path "
            "or the name of a program; give the path of a Python interpreter"
        )
    return os.path.abspath(found)


def of(package: str) -> str:
    """Returns the path of the Python on which a package runs: the peers' for a peer, otherwise that of this process."""
    return python() if package in LIBRARIES else sys.executable


def environment(path: str, **changes: str) -> dict[str, str]:
    """Returns the environment variables for a process on the Python ``path``: this process's with ``changes``."""
    hidden = _TUNING if path == sys.executable else (*_TUNING, *_PATHS)
    return {name: value for name, value in os.environ.items() if name not in hidden} | changes


def start(path: str, arguments: Sequence[str], environ: Mapping[str, str], errors: int) -> subprocess.Popen[bytes]:
    """Starts the Python ``path`` with these arguments, as the leader of a session of its own: see `kill`.

    Raises:
        PeerError: it cannot be run.
    """
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            [path, *arguments], env=environ, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True
        )
    except OSError as error:
        raise PeerError(f"{path} cannot be run as a Python interpreter: {error.strerror}") from error


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and those that it has started: a Python may be a script that starts another program."""
    if process.returncode is None:  # until it has been waited for, no other process has its number
        os.killpg(process.pid, signal.SIGKILL)


def run(path: str, arguments: Sequence[str], given: bytes = b"", limit: float = 60.0, **changes: str) -> bytes:
    """Runs the Python ``path`` and returns what it writes to its standard output.

    Args:
        path: the path of the interpreter.
        arguments: the arguments of the interpreter.
        given: its standard input.
        limit: the seconds after which the process is killed.
        changes: environment variables.

    Raises:
        PeerError: the process cannot be started, has been killed, or its exit status is not 0.
    """
    with start(path, arguments, environment(path, **changes), subprocess.PIPE) as process:
        try:
            output, errors = process.communicate(given, limit)
        except subprocess.TimeoutExpired:
            raise PeerError(f"{path} has not ended in {limit:g} s, and was killed") from None
        finally:
            kill(process)  # which does nothing after an end that communicate has seen
    if process.returncode:
        text = errors.decode(errors="replace").strip()
        raise PeerError(f"{path} has ended with the status {process.returncode}, and printed: {text[-4000:]}")
    return output


@functools.cache
def versions(path: str, packages: tuple[str, ...]) -> Mapping[str, str]:
    """Returns the version of the Python ``path``, under ``"Python"``, and of packages on it, or `MISSING`.

    Raises:
        PeerError: it cannot be run, or is no Python.
    """
    output = run(path, ["-c", _VERSIONS, *packages], limit=START_LIMIT)
    try:
        return dict(json.loads(output.splitlines()[-1]))
    except (ValueError, IndexError):
        raise PeerError(f"{path} is not a Python interpreter: its answer to a program is {output[:200]!r}") from None


def is_installed(package: str) -> bool:
    """Whether the Python on which a package runs has it; the package is not imported.

    Raises:
        PeerError: this Python cannot be run.
    """
    path = of(package)
    if path == sys.executable:
        return importlib.util.find_spec(package) is not None
    return versions(path, (package,))[package] != MISSING


if __name__ == "__main__":
    try:
        found = dict(versions(python(), LIBRARIES))
    except PeerError as reason:
        sys.exit(f"peers.py: {reason}")
    print(f"peers: Python {found.pop('Python')} ({python()}): {', '.join(f'{n} {v}' for n, v in found.items())}")
