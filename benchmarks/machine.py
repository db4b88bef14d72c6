"""The facts on which figures depend: the machine, the versions, the commit, and what other processes do meanwhile."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import peers
from peers import MISSING, PeerError

ROOT = Path(__file__).parent.parent

IDLE = 0.05
"""The cores that other processes may use on average on a machine that is called idle."""


def describe_environment(packages: Iterable[str]) -> dict[str, str]:
    """Returns the facts on which figures depend: the kind of machine (not its name), the date, and the versions of
    Python and of packages: those that run on this Python, and then the peers, with the NumPy that they use.
    """
    packages = tuple(packages)
    ours = [name for name in packages if name not in peers.LIBRARIES]
    return {
        "CPU": f"{_cpu_model()}, {usable_cores()} cores usable",
        "memory": _memory(),
        "Python": platform.python_version(),
        **{name: _version(name) for name in ours},
        **_peers_versions(tuple([name for name in packages if name not in ours])),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def _peers_versions(names: tuple[str, ...]) -> dict[str, str]:
    """Returns the versions of peers, and of their Python and NumPy; ``unknown`` if their Python cannot be run."""
    if not names:
        return {}
    try:
        found = peers.versions(peers.python(), (*names, "numpy"))
    except PeerError as error:
        print(error, file=sys.stderr)
        found = dict.fromkeys((*names, "Python", "numpy"), "unknown")
    return {"peers' Python": found["Python"], "peers' numpy": found["numpy"]} | {name: found[name] for name in names}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return MISSING


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this operating system
        return os.cpu_count() or 1


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (AttributeError, ValueError):  # not on this operating system
        return "unknown"


def blas_kernel() -> str:
    """Returns a description of NumPy's BLAS in this process, with the kernel that it selected for the CPU."""
    import numpy as np

    built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return f"{built['name']} {built['version']}, kernel unknown (threadpoolctl is not installed)"
    for library in threadpool_info():
        if library["user_api"] == "blas":
            kernel = library.get("architecture", "unknown")
            return f"{library['internal_api']} {library['version']}, kernel {kernel}, {library['num_threads']} threads"
    return f"{built['name']} {built['version']}, kernel unknown"


# -- the code that is measured -----------------------------------------------------------------------------------------


def commit() -> str:
    """Returns the commit of this repository, with a number for what has changed since; ``unknown`` without Git.

    Files with results do not count as changes.
    """
    try:
        head = git("rev-parse", "--short=8", "HEAD")
        changes = git("diff", "HEAD", "--", ".", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}, changed ({hashlib.sha256(changes.encode()).hexdigest()[:6]})" if changes else head


def git(*arguments: str) -> str:
    """Runs Git on this repository and returns what it prints.

    Raises:
        OSError: there is no Git.
        subprocess.CalledProcessError: it fails.
    """
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


# -- other processes ---------------------------------------------------------------------------------------------------


class OtherProcesses:
    """The processor time that is not this process's or its children's, from the moment of creation."""

    def __init__(self) -> None:
        self._begin = _times()

    def cores(self) -> tuple[float, float] | None:
        """Returns how many cores other processes have used on average, and how many the host of a virtual machine.

        Children count as this process's when they have ended and have been waited for. None where the operating system
        (not Linux) does not report it.
        """
        if self._begin is None or (now := _times()) is None:
            return None
        seconds, others, stolen = (b - a for a, b in zip(self._begin, now, strict=True))
        return (max(others, 0.0) / seconds, stolen / seconds) if seconds else (0.0, 0.0)

    def __str__(self) -> str:
        cores = self.cores()
        if cores is None:
            return "unknown"
        others, stolen = cores
        return f"{others:.0%} of a core" + (f", and the host {stolen:.0%}" if stolen > IDLE else "")

    def is_idle(self) -> bool:
        """Whether neither other processes nor the host have used more than `IDLE`, as far as is known."""
        return max(self.cores() or (0.0,)) <= IDLE


def _times() -> tuple[float, float, float] | None:
    """Returns three numbers of seconds: the clock, the processor time of others, and what the host has taken."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = (int(ticks) for ticks in fields[:8])
    tick = 1.0 / os.sysconf("SC_CLK_TCK")
    own = sum(os.times()[:4])
    return time.monotonic(), (user + nice + system + interrupts + soft) * tick - own, stolen * tick
