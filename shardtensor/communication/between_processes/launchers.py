"""How this process was started: what launchers leave in the environment, and which engine belongs to it."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from shardtensor.communication.engine_protocol import Engine, Launch
from shardtensor.errors import ArgumentError, BackendError

ENTRY_POINTS = "shardtensor.engines"


class _Launcher(NamedTuple):
    """The variables that a launcher sets: the number of the process, and of all processes."""

    kind: str
    name: str
    index_variable: str
    count_variable: str


_LAUNCHERS = (
    _Launcher("address", "SHARDTENSOR_PROCESS_ID", "SHARDTENSOR_PROCESS_ID", "SHARDTENSOR_NUM_PROCESSES"),
    _Launcher("address", "a Kubernetes indexed Job", "JOB_COMPLETION_INDEX", "SHARDTENSOR_NUM_PROCESSES"),
    _Launcher("mpi", "Open MPI's launcher", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    _Launcher("mpi", "the launcher of MPI", "PMI_RANK", "PMI_SIZE"),
    _Launcher("torchrun", "torchrun", "RANK", "WORLD_SIZE"),
    _Launcher("slurm", "Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)

_SLURM_PORTS = range(20_000, 60_000)


def found_launches(environ: Mapping[str, str]) -> dict[str, Launch]:
    """Returns the launch of this process by each kind of launcher: ``address``, ``mpi``, ``torchrun``, ``slurm``."""
    launches: dict[str, Launch] = {}
    for kind, name, index, count in _LAUNCHERS:
        if kind not in launches and index in environ and count in environ:
            numbers = _number(environ, index), _number(environ, count)
            launches[kind] = Launch(*numbers, _address(kind, environ), name)
    return launches


def engine_and_launch(
    name: str | None, address: str | None, num_processes: int | None, process_id: int | None
) -> tuple[type[Engine], Launch | None]:
    """Returns the class of the engine to use, and what is known of this process.

    Args:
        name: the name of the engine; None to choose the one of the launcher.
        address, num_processes, process_id: see `shardtensor.distributed.initialize`.

    Raises:
        ArgumentError: the arguments contradict each other or the environment, or there are several launchers.
        BackendError: the engine is not installed.
    """
    explicit = _given(address, num_processes, process_id)
    if explicit is not None:
        return load_engine(name or "gloo"), explicit
    launches = found_launches(os.environ)
    engine = load_engine(name) if name else None
    if engine is not None:
        launches = {kind: launch for kind, launch in launches.items() if kind in engine.launchers}
    if not launches:
        if engine is None:
            raise ArgumentError(_not_started(os.environ))
        return engine, None
    if len({launch[:2] for launch in launches.values()}) > 1:
        several = " and ".join(
            f"{x.source} (process {x.process_index} of {x.process_count})" for x in launches.values()
        )
        raise ArgumentError(f"the environment has the variables of {several}; pass engine= to choose one")
    launch = next(iter(launches.values()))
    return engine or default_engine(launch), launch


def default_engine(launch: Launch | None) -> type[Engine]:
    """Returns the class of the engine that belongs to the launcher of a process; that of MPI if there is no launch."""
    kinds = {launcher.name: launcher.kind for launcher in _LAUNCHERS}
    kind = kinds.get(launch.source, "address") if launch else "mpi"
    has_mpi = importlib.util.find_spec("mpi4py") is not None
    return load_engine("mpi" if kind == "mpi" or (kind == "slurm" and has_mpi) else "gloo")


def load_engine(name: str) -> type[Engine]:
    """Returns the class of the engine of that name.

    Raises:
        ArgumentError: none of that name is installed.
        BackendError: its library is missing, or it is not an engine.
    """
    from importlib.metadata import entry_points  # Programs of one process do not need it.

    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in points:
        raise ArgumentError(f"there is no engine named {name!r}; installed are {sorted(points)}")
    engine = points[name].load()
    if not (isinstance(engine, type) and issubclass(engine, Engine)):
        raise BackendError(f"engine {name!r}: {points[name].value} is not a subclass of shardtensor.engine.Engine")
    return engine


def _given(address: str | None, num_processes: int | None, process_id: int | None) -> Launch | None:
    """Returns what the arguments say of this process; None if there are none."""
    arguments = {"coordinator_address": address, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in arguments.items() if value is None]
    if len(missing) == len(arguments):
        return None
    if missing:
        raise ArgumentError(f"{', '.join(missing)} missing; give all of {', '.join(arguments)}, or none of them")
    assert address is not None
    assert num_processes is not None
    assert process_id is not None
    if num_processes < 1:
        raise ArgumentError(f"num_processes is {num_processes}; it must be at least 1")
    return Launch(process_id, num_processes, address, "the call")


def _not_started(environ: Mapping[str, str]) -> str:
    """Returns the message of an error where no launcher is found."""
    names = [f"SHARDTENSOR_{name}" for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")]
    if set_here := [name for name in names if name in environ]:
        missing = [name for name in names if name not in environ]
        return f"{' and '.join(set_here)} {'is' if len(set_here) == 1 else 'are'} set, but not {' and '.join(missing)}"
    return (
        "this process was not started by a known launcher; start the program by mpiexec, srun, torchrun or "
        "`shardtensor launch`, pass three arguments, such as initialize('10.0.0.1:8476', num_processes=4, "
        'process_id=2), or pass engine="local" for a single process'
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ArgumentError(f"the environment variable {name} is {environ[name]!r}; wanted an integer") from None


def _address(kind: str, environ: Mapping[str, str]) -> str | None:
    """Returns the address of process 0 in the environment of a launcher."""
    if kind == "address":
        return environ.get("SHARDTENSOR_COORDINATOR_ADDRESS")
    if kind == "torchrun" and "MASTER_ADDR" in environ:
        return f"{environ['MASTER_ADDR']}:{environ.get('MASTER_PORT', '29500')}"
    if kind == "slurm" and "SLURM_STEP_NODELIST" in environ:
        # The port follows from the number of the job, so that two jobs on one host have different ones.
        number = _number(environ, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environ else 0
        return f"{first_host(environ['SLURM_STEP_NODELIST'])}:{_SLURM_PORTS[number % len(_SLURM_PORTS)]}"
    return None


def first_host(nodes: str) -> str:
    """Returns the first host of a list in Slurm's notation: ``node07`` for ``node[07-09,12],gpu3``."""
    prefix, number, suffix = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^,]*)", nodes).groups("")  # type: ignore[union-attr]
    return f"{prefix}{number}{suffix}"
