"""Every way to start a program of several processes: one or several on a host, by hand or by a launcher.

What a cluster would do is done by the tests: a `srun`, an `ssh` and the pods of a Job are processes of this host, with the
variables that the real ones set. The scripts and the Job are those of the page.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from shardtensor.launcher import find_mpiexec, free_port
from tests.communication.test_engines import NO_GLOO, NO_MPI

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "many_processes.md").read_text()
COUNT = 4
LIMIT = 120.0

PROGRAM = """
import sys
import numpy as np
import shardtensor as st

where = sys.argv[1:]
st.distributed.initialize(*where[:1], *map(int, where[1:]))
k, n = st.distributed.process_index(), st.distributed.process_count()
assert st.distributed.process_allgather(k).tolist() == list(range(n))
x = st.device_put(np.arange(10.0), st.NamedSharding(st.Mesh(st.devices(), ("x",)), st.P("x")))
print(f"process {k} of {n}: {st.device_count()} devices, {float(x.sum())}", flush=True)
st.distributed.shutdown()
"""
needs_gloo = pytest.mark.skipif(bool(NO_GLOO), reason=NO_GLOO)
pytestmark = pytest.mark.full


def environ(**variables: str) -> dict[str, str]:
    """The variables of a process that no launcher has started, and others."""
    foreign = ("SHARDTENSOR", "SLURM", "PMI", "HYDI", "OMPI", "RANK", "WORLD_SIZE", "MASTER", "JOB_COMPLETION")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, "SHARDTENSOR_NUM_DEVICES": "2", **variables}


def outputs(commands: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]]) -> list[str]:
    """The lines that processes print, which are started at the same time and must succeed."""
    running = [
        subprocess.Popen(command, env=environ(**own), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, own in zip(commands, variables, strict=True)
    ]
    texts, late = [], False
    for process in running:
        try:
            text, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            (text, _), late = process.communicate(), True
        texts.append(text)
    assert not late, texts
    assert [process.returncode for process in running] == [0] * len(running), texts
    return sorted(line for text in texts for line in text.splitlines() if line.startswith("process "))


def lines(count: int = COUNT) -> list[str]:
    return [f"process {k} of {count}: {2 * count} devices, 45.0" for k in range(count)]


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return str(path)


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@needs_gloo
def test_by_hand_with_three_arguments(program: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    commands = [[sys.executable, program, address, str(COUNT), str(k)] for k in range(COUNT)]
    assert outputs(commands, [{}] * COUNT) == lines()


@needs_gloo
def test_by_hand_with_variables(program: str) -> None:
    given = {"SHARDTENSOR_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "SHARDTENSOR_NUM_PROCESSES": str(COUNT)}
    own = [given | {"SHARDTENSOR_PROCESS_ID": str(k)} for k in range(COUNT)]
    assert outputs([[sys.executable, program]] * COUNT, own) == lines()


@needs_gloo
def test_by_ssh_on_each_host(program: str, tmp_path: Path) -> None:
    """The shell of another host has no variables of this one: the program gets the three numbers as arguments."""
    executable(tmp_path / "ssh", f'#!/bin/sh\nshift\nexec env -i PATH="$PATH" HOME="$HOME" sh -c "cd {ROOT} && $*"\n')
    address, path = f"127.0.0.1:{free_port()}", f"PYTHONPATH={environ()['PYTHONPATH']} SHARDTENSOR_NUM_DEVICES=2"
    commands = [
        [str(tmp_path / "ssh"), f"host{k}", f"{path} {sys.executable} {program} {address} 2 {k}"] for k in range(2)
    ]
    assert outputs(commands, [{}] * 2) == lines(2)


SRUN = """#!{python}
# Starts the tasks of a job of two nodes, all of them on this host, with the variables that Slurm gives to each.
import os, subprocess, sys
count, each = {count}, 2
tasks = [
    subprocess.Popen(sys.argv[1:], env={{
        **os.environ, "SLURM_PROCID": str(k), "SLURM_LOCALID": str(k % each), "SLURM_NODEID": str(k // each),
        "SLURM_STEP_NUM_TASKS": str(count), "SLURM_NTASKS": str(count), "SLURM_STEP_NODELIST": {nodes!r},
        "SLURM_JOB_ID": "{number}",
    }})
    for k in range(count)
]
sys.exit(max(task.wait() for task in tasks))
"""


def job_number() -> int:
    """The number of a job of Slurm whose port is free: see `launchers`."""
    for number in range(os.getpid() % 40_000, 40_000):
        with socket.socket() as server:
            if server.connect_ex(("127.0.0.1", 20_000 + number)):
                return number
    raise OSError("no port is free")


@needs_gloo
@pytest.mark.parametrize("nodes", ["localhost", "127.0.0.[1-2]"])
def test_by_the_script_for_slurm(nodes: str, program: str, tmp_path: Path) -> None:
    """Two tasks on each of two nodes, without MPI: the list of nodes has the host of process 0."""
    (script,) = [block for block in re.findall(r"^```shell\n(.*?)^```", PAGE, re.M | re.S) if "#SBATCH" in block]
    assert "--nodes=2 --ntasks-per-node=2" in script
    executable(tmp_path / "srun", SRUN.format(python=sys.executable, count=COUNT, nodes=nodes, number=job_number()))
    executable(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "job.sh").write_text(script)
    hidden = tmp_path / "without_mpi"  # as where mpi4py is not installed
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'mpi4py' else find(name, *a)\n"
    )
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": f"{hidden}:{environ()['PYTHONPATH']}"}
    ended = subprocess.run(
        ["sh", "job.sh"], env=environ(**own), cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(ended.stdout.splitlines()) == lines()


@pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
def test_by_srun_with_mpi(program: str) -> None:
    """`srun --mpi=pmi2` sets the variables of PMI and those of Slurm, which agree."""
    mpiexec = find_mpiexec()
    assert mpiexec
    shell = f"SLURM_PROCID=$PMI_RANK SLURM_STEP_NUM_TASKS=$PMI_SIZE SLURM_STEP_NODELIST=h[1-2] exec {sys.executable} {program}"
    assert outputs([[mpiexec, "-n", str(COUNT), "sh", "-c", shell]], [{}]) == lines()


@pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
def test_by_mpiexec(program: str) -> None:
    mpiexec = find_mpiexec()
    assert mpiexec
    assert outputs([[mpiexec, "-n", str(COUNT), sys.executable, program]], [{}]) == lines()


@needs_gloo
def test_by_the_job_of_kubernetes(program: str) -> None:
    """Each pod of the Job of the page has its number, and the variables of the container."""
    (job,) = [block for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S) if "kind: Job" in block]
    count = int(re.findall(r"completions: (\d+)", job)[0])
    assert re.findall(r"parallelism: (\d+)", job) == [str(count)]  # all pods at the same time
    assert "completionMode: Indexed" in job
    variables = dict(re.findall(r"\{name: (\w+), value: \"(.*?)\"\}", job))
    name, subdomain = re.findall(r"metadata: \{name: (\w+)\}", job) + re.findall(r"subdomain: (\w+)", job)
    address, port = variables["SHARDTENSOR_COORDINATOR_ADDRESS"].split(":")
    assert address == f"{name}-0.{subdomain}"  # the name of the first pod of an indexed Job in its service
    assert port.isdigit()
    variables["SHARDTENSOR_COORDINATOR_ADDRESS"] = f"127.0.0.1:{free_port()}"
    (command,) = re.findall(r"command: \[(.*?)\]", job)
    assert command == '"python", "train.py"'
    own = [variables | {"JOB_COMPLETION_INDEX": str(k)} for k in range(count)]
    assert outputs([[sys.executable, program]] * count, own) == lines(count)


@needs_gloo
def test_by_torchrun(program: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program]
    assert outputs([command], [{"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}]) == lines(2)


@needs_gloo
def test_by_torchrun_on_two_hosts(program: str) -> None:
    """Two hosts of two processes: torchrun is called on each of them."""
    options = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    commands = [
        [sys.executable, "-m", "torch.distributed.run", *options, f"--node-rank={k}", program] for k in range(2)
    ]
    assert outputs(commands, [{"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}] * 2) == lines()


def test_by_shardtensor_launch(program: str) -> None:
    command = [sys.executable, "-m", "shardtensor", "launch", "-n", str(COUNT), program]
    ended = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=LIMIT, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(line.split("] ")[1] for line in ended.stdout.splitlines()) == lines()


def test_one_call_of_a_program_is_one_process(program: str, tmp_path: Path) -> None:
    """A program that is called once runs in one process."""
    code = "import shardtensor as st; print(st.process_count(), st.process_index(), st.device_count())"
    ended = subprocess.run([sys.executable, "-c", code], env=environ(), capture_output=True, text=True, check=True)
    assert ended.stdout == "1 0 2\n"
    alone = subprocess.run([sys.executable, program], env=environ(), capture_output=True, text=True, check=False)
    assert alone.returncode == 1
    assert "this process was not started by a known launcher" in alone.stderr
    assert "initialize('10.0.0.1:8476', num_processes=4, process_id=2)" in alone.stderr


NODES = """
import numpy as np
import shardtensor as st
from mpi4py import MPI

st.distributed.initialize()
k, n = st.distributed.process_index(), st.distributed.process_count()
grid = np.array(st.devices()).reshape(n, 2)
f = lambda v: (st.psum(v, "cores"), st.psum(v, ("nodes", "cores")), st.axis_index("nodes") + 0 * v)
x = np.arange(2.0 * n).reshape(n, 2)
own, total, node = st.pmap(st.pmap(f, axis_name="cores"), axis_name="nodes", devices=grid)(x)
here = lambda t: [float(s.data.ravel()[0]) for s in t.addressable_shards]
mine = float(x[k].sum())
assert here(own) == [mine] * 2 and here(node) == [k] * 2
assert here(total) == [MPI.COMM_WORLD.allreduce(mine)] * 2 == [x.sum()] * 2
many = st.pmap(st.pmap(st.vmap(lambda v: v @ v)), devices=grid)(np.ones((n, 2, 5, 3)))
assert st.distributed.process_allgather(many).tolist() == np.full((n, 2, 5), 3.0).tolist()
print(f"process {k} of {n}: {st.device_count()} devices, 45.0", flush=True)
st.distributed.shutdown()
"""


@pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
def test_a_map_in_a_map_over_the_cores_of_several_nodes(tmp_path: Path) -> None:
    """The outer map is over the nodes, as the processes of mpi4py are, the inner one over the cores of each."""
    (tmp_path / "nodes.py").write_text(NODES)
    mpiexec = find_mpiexec()
    assert mpiexec
    assert outputs([[mpiexec, "-n", "3", sys.executable, str(tmp_path / "nodes.py")]], [{}]) == lines(3)
