"""Shared by the tests that compare with JAX: programs on the Python of the peers, as in `benchmarks/peers.py`.

JAX is not imported by the tests themselves, except where arrays are handed over to it: it takes seconds and hundreds of
MB in each process, and the version that is compared may need another Python.
"""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LIMIT = 300.0
"""The seconds after which a program is killed."""


def _load() -> ModuleType:
    """Loads the benchmarks' module, under a name of its own: their folder is not on the search path of the tests."""
    spec = importlib.util.spec_from_file_location("tests._benchmarks_peers", ROOT / "benchmarks" / "peers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peers = _load()

_START = """
import os, pickle, sys
sys.path.insert(0, sys.argv[2])
program, given = pickle.load(sys.stdin.buffer)
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # what JAX prints must not be read as the result
names = {"given": given}
exec(compile(program, sys.argv[1], "exec"), names)
with answers:
    pickle.dump(names["found"], answers)
"""


def require_jax(*series: str) -> None:
    """Skips the test if JAX is not installed on the Python of the peers, in one of these series if there are any.

    Prints the version that is compared, for the report of a failure and for ``-rP``.
    """
    path = peers.python()
    found = peers.versions(path, ("jax",))["jax"]
    print(f"the peer is JAX {found}, on {path}")
    if found == peers.MISSING:
        pytest.skip(f"JAX is not installed on the Python of the peers, {path}")
    if series and not found.startswith(tuple(f"{s}." for s in series)):
        pytest.skip(f"JAX {' or '.join(series)} is compared; the Python of the peers has {found}")


def run(program: str, given: Any = None, devices: int = 1) -> Any:
    """Runs a program on the Python of the peers, with so many CPU devices of JAX.

    It can import modules of the tests that import nothing of shardtensor.

    Args:
        program: the source code; it finds ``given``, and defines ``found``, the result. Both are pickled.
        given: what the program gets.
        devices: the number of JAX's devices.
    """
    changes = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    arguments = ["-c", _START, "program of a test", str(ROOT)]
    return pickle.loads(peers.run(peers.python(), arguments, pickle.dumps((program, given)), LIMIT, **changes))
