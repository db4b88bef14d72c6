"""Meshes that leave out processes: transfers between them, what runs where, and faults of a process without a part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cases import CASES
from tests.communication.test_distributed import FULL, launch
from tests.communication.test_engines import NO_GLOO, NO_MPI
from tests.communication.test_spanning import PAGE, lines_of
from tests.conftest import NO_GPU, NO_TORCH

HERE = Path(__file__).parent
CHECKS, MIXED, FAULTS = (str(HERE / f"{name}.py") for name in ("spanning_meshes", "spanning_mixed", "mesh_faults"))
MAPS, GRADIENTS = (str(HERE / f"{name}.py") for name in ("spanning_maps", "spanning_map_gradients"))

SLICE = ["add", "concat", "getitem", "inv", "isin_sorted", "matmul", "setitem", "stack", "sum"]
"""Operators of every kind, and those of which a process that has all of one operand could take another way."""


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, count: int) -> int:
    """The number of devices of each process."""
    monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", str(count))
    return count


@pytest.mark.parametrize(
    ("engine", "processes", "count", "step"),
    [
        pytest.param("mpi", 3, 2, 1, marks=FULL),
        pytest.param("mpi", 4, 1, 1, marks=FULL),
        pytest.param("gloo", 3, 1, 1, marks=FULL),
        pytest.param("gloo", 4, 2, 3, marks=FULL),
    ],
)
def test_meshes_leave_out_processes(
    engine: str, processes: int, devices: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPANNING_STEP", str(step))
    status, text = launch(engine, processes, CHECKS, limit=200)
    assert status == 0, text
    assert text.count("passed") == processes * text.count("[0] passed") > 0


@pytest.mark.parametrize("count", [2])
def test_compiled_functions_on_the_devices_of_one_process(devices: int) -> None:
    status, text = launch("mpi", 2, CHECKS, "compiled_functions_on_the_devices_of_one_process")
    assert status == 0, text
    assert text.count("passed") == 2


@pytest.mark.full
@pytest.mark.parametrize("count", [2])
@pytest.mark.parametrize(("backend", "engine"), [("checked", ""), ("torch", ""), ("cupy", ""), ("cupy", "nccl")])
def test_meshes_of_separate_memories(backend: str, engine: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "torch" and NO_TORCH:
        pytest.skip(NO_TORCH)
    if backend == "cupy":
        use_double(3, engine, monkeypatch)
    monkeypatch.setenv("SHARDTENSOR_BACKEND", backend)
    monkeypatch.setenv("SPANNING_STEP", "3")
    status, text = launch("mpi", 3, CHECKS, limit=200)
    assert status == 0, text


@pytest.mark.parametrize(("count", "engine"), [(2, ""), pytest.param(2, "nccl", marks=FULL)])
def test_offloaded_tensors_go_to_other_processes(devices: int, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From devices that share a GPU to such devices in another process."""
    use_double(2, engine, monkeypatch)
    status, text = launch("mpi", 2, CHECKS, "trees_memory_kinds_and_donation")
    assert status == 0, text


def use_double(processes: int, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the processes of a test use the simulated CuPy, each its own GPU."""
    if not NO_GPU:
        pytest.skip("the double of CuPy is used where there is no GPU")
    monkeypatch.setenv("SHARDTENSOR_BACKEND", "cupy")
    monkeypatch.setenv("CUPY_DOUBLE", str(processes))
    if engine:
        monkeypatch.setenv("SPANNING_ENGINE", engine)


@pytest.mark.parametrize(
    ("processes", "count", "backend", "thresholds", "examples", "names"),
    [
        pytest.param(3, 2, "numpy", "low", 3, SLICE, id="slice", marks=FULL),
        pytest.param(3, 2, "numpy", "none", 20, sorted(CASES), id="all", marks=FULL),
        pytest.param(3, 2, "numpy", "low", 20, sorted(CASES), id="all-low", marks=FULL),
        pytest.param(4, 1, "numpy", "low", 10, sorted(CASES), id="all-low-4x1", marks=FULL),
        pytest.param(2, 2, "checked", "low", 10, sorted(CASES), id="all-low-checked", marks=FULL),
    ],
)
def test_operands_on_different_meshes(
    processes: int, devices: int, backend: str, thresholds: str, examples: int, names: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also where small arrays take the way of large ones."""
    monkeypatch.setenv("SHARDTENSOR_BACKEND", backend)
    monkeypatch.setenv("SPANNING_THRESHOLDS", thresholds)
    status, text = launch("mpi", processes, MIXED, str(tmp_path / "lines"), str(examples), *names, limit=900)
    assert status == 0, text
    found = lines_of(tmp_path / "lines")
    assert {name: line for name, line in found.items() if not line.isdecimal()} == {}
    assert list(found) == names
    assert sum(map(int, found.values())) > examples * len(names) * 3 // 4


@pytest.mark.full
@pytest.mark.parametrize(("processes", "count", "some"), [(3, 2, 2), (4, 1, 3), (4, 2, 2)])
def test_random_programs_in_maps_of_some_processes(processes: int, devices: int, some: int) -> None:
    status, text = launch("mpi", processes, MAPS, "100", "200", str(some), limit=300)
    assert status == 0, text


@pytest.mark.full
@pytest.mark.parametrize("count", [2])
def test_gradients_of_maps_of_some_processes_have_the_bits_of_one_process(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, text = launch("mpi", 3, GRADIENTS, "2", limit=100)
    assert status == 0, text
    found = [{line.split("] ")[1] for line in text.splitlines() if line.startswith(f"[{k}]")} for k in range(3)]
    monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", "4")
    status, text = launch("mpi", 1, GRADIENTS)
    assert status == 0, text
    assert [*found] == [{line.split("] ")[1] for line in text.splitlines()}] * 3
    assert len(found[0]) >= 10


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ("raises", r"process 2 failed at \S*mesh_faults\.py:\d+, and the others did not: .*; ValueError: no such file"),
        ("skips", r"different arguments: process 2: .* from process 1 to process 0; processes 0, 1: .* to process 1"),
        ("only_where_the_devices_are", r"process 0 failed .*, and the others did not: .*; FloatingPointError: divide"),
        (
            "closes_over_what_is_differentiated",
            r"process 2 .*ArgumentError.*closes over values that are differentiated",
        ),
        pytest.param("returns_an_object", r".*wanted lists, tuples, named tuples of a module, and dicts", marks=FULL),
        pytest.param("exits", r"process 2 has ended without an exception, and processes 0, 1 are at", marks=FULL),
        pytest.param("sends_elsewhere", r"different arguments: process 2: .* to process 2", marks=FULL),
        pytest.param("computes_something_else", r"process 2: multiply before \S* device_put", marks=FULL),
        pytest.param("reads", r"process 2: \S* sum; processes 0, 1: \S* transfer", marks=FULL),
        pytest.param("stopped", r"process 2 did not reach \S*mesh_faults\.py:\d+ device_put within 3 s", marks=FULL),
        pytest.param("killed", r"process 2 has ended or cannot be reached", marks=FULL),
    ],
)
@pytest.mark.parametrize("count", [1])
def test_faults_where_a_process_has_no_part_of_a_transfer(event: str, message: str, devices: int) -> None:
    """They are errors in all processes, also of the one whose devices no transfer concerns."""
    engine = "gloo" if NO_MPI or event == "killed" else "mpi"
    if engine == "gloo" and NO_GLOO:
        pytest.skip(NO_GLOO)
    status, text = launch(engine, 3, FAULTS, event)
    assert status != 0
    assert "done" not in text
    wanted = range(2) if event in ("stopped", "killed") else range(3)
    for k in wanted:
        assert re.search(rf"^\[{k}\] \S*DistributedError: .*{message}", text, re.M), text


@pytest.mark.parametrize(
    ("engine", "processes"),
    [("mpi", 2), pytest.param("mpi", 4, marks=FULL), pytest.param("gloo", 4, marks=FULL)],
)
def test_stages_of_a_pipeline_have_the_bits_of_one_process(
    engine: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = [c for c in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S) if "# pipeline.py" in c]
    ends = "import zlib\nfor w in weights:\n    print(zlib.crc32(np.asarray(st.device_put(w, everywhere))))\n"
    program, found = tmp_path / "pipeline.py", []
    program.write_text(code.replace('engine="local"', "").replace("st.distributed.shutdown()", ends))
    for count in (processes, 1):
        monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", str(4 // count))
        status, text = launch(engine, count, str(program), limit=60)
        assert status == 0, text
        lines = [line.split("] ")[1] for line in text.splitlines()]
        found.append(set(lines))
        assert len(lines) == count * len(found[-1])
    assert found[0] == found[1]
    assert {"0.6482 0.5887"} < found[0]
