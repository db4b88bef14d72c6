"""Meshes and tensors that span processes: programs in several processes, and the bits of their results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardtensor import launcher
from tests.cases import CASES
from tests.communication.spanning_programs import JITTED, MAPPED, wide_names
from tests.communication.test_distributed import FULL, launch
from tests.communication.test_engines import NO_MPI
from tests.conftest import NO_GPU, NO_TORCH
from tests.draws import drawn
from tests.interpreters.test_state import Author, Dice, Program, quietly

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "many_processes.md"
CHECKS, OPERATORS = str(HERE / "spanning.py"), str(HERE / "spanning_operators.py")
PROGRAMS, MAPS = str(HERE / "spanning_programs.py"), str(HERE / "spanning_maps.py")
REDUCTIONS, SERIES = str(HERE / "spanning_reductions.py"), str(HERE / "spanning_series.py")
GRADIENTS = str(HERE / "spanning_gradients.py")
TRAFFIC, NOTEBOOKS = str(HERE / "spanning_traffic.py"), str(HERE / "spanning_notebooks.py")

SLICE = ["add", "argmax", "cumulative_sum", "getitem", "matmul", "reshape", "reshard", "sort", "sum", "take", "where"]
"""Operators of every kind: elementwise, reductions, products, movements, algorithms."""

COLLECTIVES = ["setitem", "psum", "all_gather"]
"""Writes and collectives, of which the bytes are compared, too."""

JOBS = [
    pytest.param("mpi", 2, 4, marks=FULL),
    pytest.param("mpi", 3, 1, marks=FULL),
    pytest.param("gloo", 2, 2, marks=FULL),
    pytest.param("gloo", 4, 1, marks=FULL),
]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, count: int) -> int:
    """The number of devices of each process."""
    monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", str(count))
    return count


@pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
def test_the_error_of_the_page_is_printed_as_it_says(tmp_path: Path) -> None:
    """The lines that stand for dots are those of the library."""
    page = PAGE.read_text()
    (code,) = [c for c in re.findall(r"^```py\n(.*?)^```", page, re.M | re.S) if "# km.py" in c]
    (printed,) = [c for c in re.findall(r"^```console\n(.*?)^```", page, re.M | re.S) if "km.py:9" in c]
    program, lines = tmp_path / "km.py", list[str]()
    program.write_text(code)
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]))}
    command = [sys.executable, str(program)]
    assert launcher.launch(command, 4, "mpi", timeout=60, environ=environ, output=lines.append) == 1
    found = iter(line.replace(f"{tmp_path}/", "") for line in lines)
    for line in printed.splitlines():
        assert line == "..." or line in found, (line, lines)


@pytest.mark.parametrize(("engine", "processes", "count"), JOBS)
def test_tensors_span_processes(engine: str, processes: int, devices: int) -> None:
    status, text = launch(engine, processes, CHECKS, limit=120)
    assert status == 0, text
    assert text.count("passed") == processes * text.count("[0] passed")


@pytest.mark.full
@pytest.mark.parametrize("count", [2])
@pytest.mark.parametrize("backend", ["checked", "cupy", "torch"])
def test_tensors_of_separate_memories_span_processes(
    backend: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "torch" and NO_TORCH:
        pytest.skip(NO_TORCH)
    monkeypatch.setenv("SHARDTENSOR_BACKEND", backend)
    if backend == "cupy" and NO_GPU:
        monkeypatch.setenv("CUPY_DOUBLE", "2")
    status, text = launch("mpi", 2, CHECKS, limit=120)
    assert status == 0, text


def trained(engine: str, processes: int, path: Path) -> set[str]:
    """The loss and a hash of the weights, as each process prints them that runs the example of the page."""
    status, text = launch(engine, processes, str(path), limit=60)
    assert status == 0, text
    lines = sorted(line.split("] ")[1] for line in text.splitlines())
    assert len(lines) == 2 * processes
    return set(lines)


@pytest.mark.parametrize(
    ("engine", "processes"),
    [("mpi", 2), pytest.param("mpi", 4, marks=FULL), pytest.param("gloo", 4, marks=FULL)],
)
def test_training_has_the_bits_of_one_process(
    engine: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = [c for c in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S) if "load_digits" in c]
    program = tmp_path / "digits.py"
    code = code.replace('engine="local"', "")
    program.write_text(
        f"import numpy as np\nimport shardtensor as st\nimport zlib\n{code}print(zlib.crc32(np.asarray(weights)))"
    )
    devices = 4
    found = []
    for count in (processes, 1):
        monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", str(devices // count))
        found.append(trained(engine, count, program))
    assert found[0] == found[1]
    assert "0.7296" in found[0]


@pytest.mark.parametrize(
    ("engine", "processes", "count"),
    [("mpi", 2, 2), pytest.param("mpi", 4, 1, marks=FULL), pytest.param("gloo", 2, 2, marks=FULL)],
)
def test_a_transformer_block_has_the_losses_of_numpy(engine: str, processes: int, devices: int, tmp_path: Path) -> None:
    (code,) = [
        c for c in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S) if "# transformer.py" in c
    ]
    program = tmp_path / "transformer.py"
    code = code.replace('engine="local"', "")
    program.write_text(f"import numpy as np\nimport shardtensor as st\n{code}")
    status, text = launch(engine, processes, str(program), limit=60)
    assert status == 0, text
    assert text.count("4.4169 2.1766 True") == processes
    assert text.count("True") == 2 * processes


def lines_of(path: Path) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in path.read_text().splitlines())


def alone(
    program: str, path: Path, *arguments: str, devices: int, sharing: int = 1, backend: str = "checked"
) -> dict[str, str]:
    """Returns the output of a program in one process that has all devices, as many of which share a memory; all of them
    do on the backend numpy.
    """
    run_alone(program, str(path), *arguments, devices=devices, sharing=sharing, backend=backend)
    return lines_of(path)


def run_alone(program: str, *arguments: str, devices: int, sharing: int, backend: str) -> None:
    """Runs a program in one process that has all devices."""
    environ = {**os.environ, "SHARDTENSOR_ALONE": str(sharing), "SHARDTENSOR_NUM_DEVICES": str(devices)}
    environ |= {"SHARDTENSOR_BACKEND": backend, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, program, *arguments], env=environ, check=True)


def assert_hashes(found: dict[str, str]) -> None:
    """Asserts that there are hashes, and no errors in their place."""
    errors = [f"{name}: {line}" for name, line in found.items() if len(line) != 16]
    assert not errors


def assert_simulated(path: Path, examples: int) -> None:
    """Asserts that all lines say how many calls were compared, and no difference, and that most calls were."""
    found = [line.rpartition(" ") for line in path.read_text().splitlines()]
    assert not [line for *line, compared in found if not compared.isdecimal()]
    assert sum(int(compared) for *_, compared in found) > examples * len(found) * 3 // 4


def test_programs_in_two_processes_have_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small versions of the tests below, in one job, and in one process alone for each kind of memory."""
    monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", "4")
    (tmp_path / "programs.json").write_text(
        json.dumps([made for author in (SpanningAuthor, WideAuthor) for made in programs(range(1), 28, author)])
    )
    arguments = {
        "operators": ["1", *SLICE], "programs": [str(tmp_path / "programs.json")],
        "reductions": ["61"], "traffic": ["2", *SLICE, *COLLECTIVES], "loops": ["8"], "gradients": [],
    }  # fmt: skip

    def writing(folder: str, *names: str) -> list[list[str]]:
        (tmp_path / folder).mkdir()
        return [[str(HERE / f"spanning_{n}.py"), str(tmp_path / folder / n), *arguments[n]] for n in names]

    commands = [[CHECKS], *writing("spanning", *arguments), [MAPS, "0", "6"]]
    status, text = launch("mpi", 2, SERIES, json.dumps(commands), limit=200)
    assert status == 0, text
    assert text.count("passed") == 2 * text.count("[0] passed") > 0
    found = {name: lines_of(tmp_path / "spanning" / name) for name in arguments}
    assert_hashes(found["operators"])
    assert_simulated(tmp_path / "spanning" / "traffic", 2)
    assert_hashes(found["loops"])
    assert len(found["reductions"]) > 100
    assert len(found["programs"]) == 2
    for backend, sharing, *names in (
        ("checked", 1, "operators"), ("numpy", 1, "operators", "reductions", "gradients"), ("checked", 4, "programs", "loops"),
    ):  # fmt: skip
        folder = f"{backend}-{sharing}"
        run_alone(SERIES, json.dumps(writing(folder, *names)), devices=8, sharing=sharing, backend=backend)
        for name in names:
            wanted = lines_of(tmp_path / folder / name)
            assert {
                key: (found[name].get(key), line) for key, line in wanted.items() if found[name].get(key) != line
            } == {}
            assert len(wanted) == len(found[name])


@pytest.mark.parametrize(
    ("processes", "count", "examples", "names"),
    [
        pytest.param(2, 4, 2, SLICE, id="slice", marks=FULL),
        pytest.param(2, 4, 10, sorted(CASES), id="all-2x4", marks=FULL),
        pytest.param(3, 1, 10, sorted(CASES), id="all-3x1", marks=FULL),
    ],
)
def test_operators_have_the_bits_of_one_process(
    processes: int, devices: int, examples: int, names: list[str], tmp_path: Path
) -> None:
    spanning = tmp_path / "spanning.txt"
    status, text = launch("mpi", processes, OPERATORS, str(spanning), str(examples), *names, limit=900)
    assert status == 0, text
    found = lines_of(spanning)
    assert_hashes(found)
    for backend in ("checked", "numpy"):
        path, every = tmp_path / f"{backend}.txt", processes * devices
        assert found == alone(OPERATORS, path, str(examples), *names, devices=every, backend=backend)


@pytest.mark.parametrize(
    ("processes", "count", "step"),
    [
        pytest.param(2, 4, 23, id="slice", marks=FULL),
        pytest.param(2, 4, 1, id="all-2x4", marks=FULL),
        pytest.param(4, 2, 5, id="all-4x2", marks=FULL),
        pytest.param(3, 1, 2, id="all-3x1", marks=FULL),
    ],
)
def test_reductions_have_the_bits_of_one_process(processes: int, devices: int, step: int, tmp_path: Path) -> None:
    spanning = tmp_path / "spanning.txt"
    status, text = launch("mpi", processes, REDUCTIONS, str(spanning), str(step), limit=300)
    assert status == 0, text
    found, every = lines_of(spanning), processes * devices
    wanted = alone(REDUCTIONS, tmp_path / "alone.txt", str(step), devices=every, backend="numpy")
    assert len(found) > 300
    assert [name for name in wanted if found.get(name) != wanted[name]] == []


@pytest.mark.parametrize(
    ("engine", "processes", "count"),
    [pytest.param("mpi", 4, 2, marks=FULL), pytest.param("gloo", 2, 4, marks=FULL)],
)
def test_gradients_have_the_bits_of_one_process(engine: str, processes: int, devices: int, tmp_path: Path) -> None:
    spanning = tmp_path / "spanning.txt"
    status, text = launch(engine, processes, GRADIENTS, str(spanning), limit=120)
    assert status == 0, text
    wanted = alone(GRADIENTS, tmp_path / "alone.txt", devices=processes * devices, backend="numpy")
    assert lines_of(spanning) == wanted
    assert len(wanted) == 12


@pytest.mark.parametrize(
    ("processes", "count", "examples", "names"),
    [
        pytest.param(2, 4, 2, [*SLICE, *COLLECTIVES], id="slice", marks=FULL),
        pytest.param(2, 4, 12, [], id="all-2x4", marks=FULL),
        pytest.param(4, 2, 6, [], id="all-4x2", marks=FULL),
        pytest.param(3, 1, 12, [], id="all-3x1", marks=FULL),
    ],
)
def test_simulated_bytes_are_those_that_the_engine_counts(
    processes: int, devices: int, examples: int, names: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "traffic.txt"
    status, text = launch("mpi", processes, TRAFFIC, str(path), str(examples), *names, limit=900)
    assert status == 0, text
    assert_simulated(path, examples)


@pytest.mark.parametrize(
    ("processes", "count", "name"),
    [
        pytest.param(n, count, book.stem, marks=FULL)
        for n, count in ((2, 4), (3, 1))
        for book in sorted((HERE.parents[1] / "notebooks").glob("*.ipynb"))
        if n != 3 or book.stem not in ("01_sharding", "06_gpt")  # Their meshes have eight devices.
    ],
)
def test_notebooks_have_the_bits_of_one_process(processes: int, devices: int, name: str, tmp_path: Path) -> None:
    spanning = tmp_path / "spanning.txt"
    status, text = launch("mpi", processes, NOTEBOOKS, str(spanning), name, limit=200)
    assert status == 0, text
    found = lines_of(spanning)
    assert len(found) >= 5
    assert found == alone(NOTEBOOKS, tmp_path / "alone.txt", name, devices=processes * devices, sharing=devices)


class SpanningAuthor(Author):
    """Writes programs without lists of shards, which are of one process."""

    def mapped(self, name: str) -> str:
        return self.shared(name)

    def shared(self, name: str) -> str:
        while "pieces(" in (line := super().shared(name)):
            pass
        return line


class WideAuthor(SpanningAuthor):
    """Writes programs with algorithms, compiled functions, maps, random numbers and placed reductions, too."""

    def line(self) -> str:
        self.all = self.program.handles
        suited = [name for name in self.all if self.suits(self.plain[name])]
        if self.once_in(12) or not suited or self.once_in(2):
            return super().line()
        name = self.pick(suited)
        return f"c{next(self.numbers)} = {self.pick(self.wide(name, self.plain[name]))}"

    @staticmethod
    def suits(x: Any) -> bool:
        """Whether the algorithms take an array, and no digits of it cancel."""
        return bool(x.ndim and x.size and x.dtype.kind in "if" and np.all(np.abs(x) < 30))

    def wide(self, name: str, x: Any) -> list[str]:
        shape = tuple(self.whole(0, 7) for _ in range(self.whole(1, 3)))
        kind = self.pick(["uniform", "normal"])
        ways = [f"drawn('{kind}', {self.whole(0, 99)}, {shape}, {self.layout(len(shape))})"]
        axis = self.whole(-x.ndim, x.ndim - 1)
        n, how = x.shape[axis], f"axis={axis}"
        picked = [self.whole(-n, n - 1) for _ in range(self.whole(1, 5))]
        value = f"{name}.astype('float64')"
        ways += [
            f"xp.sort({name}, {how})", f"xp.argsort({name}, {how}, stable=True)", f"xp.cumulative_sum({name}, {how})",
            f"xp.unique({name})", f"xp.unique({name}, return_counts=True)[1]", f"xp.nonzero({name})[0]",
            f"xp.take({name}, np.array({picked}), {how})", f"xp.diff({name}, {how})",
            f"xp.take_along_axis({name}, xp.argsort({name}, {how}), {how})", f"xp.median({name}, {how})",
            f"xp.quantile({value}, 0.3, {how})", f"xp.repeat({name}, 3, {how})", f"xp.tile({name}, 2)",
            f"xp.count_nonzero({name}, {how})", f"xp.outer({name}.ravel()[:5], {name}.ravel()[-4:])",
            f"xp.searchsorted(xp.sort({name}.ravel()), {name}.ravel()[:7])", f"xp.fft.fft({value}, {how})",
            f"xp.fft.rfft({value}, {how})", f"xp.linalg.vector_norm({value}, {how})",
        ]  # fmt: skip
        if x.ndim > 1:
            m = x.shape[-1]
            gram = f"({value}.mT @ {value} + 30 * np.eye({m}))"
            ways += [
                f"xp.triu({name})", f"xp.linalg.cholesky({gram})",
                f"xp.linalg.inv({gram})", f"xp.linalg.det({gram})", f"xp.linalg.svdvals({value})",
            ]  # fmt: skip
        rows = value if x.ndim > 1 else f"xp.reshape({value}, (-1, 1))"
        ways += [f"jitted('{self.pick(list(JITTED))}', {rows})", f"over('{self.pick(list(MAPPED))}', {rows})"] * 4
        name = self.pick(["sum", "mean", "std", "argmax", "max"])
        ways += [f"placed('{name}', {rows}, {self.pick([0, -1])}, {self.layout(max(x.ndim - 1, 1))})"] * 4
        return ways


def programs(seeds: range, length: int, kind: type[Author] = SpanningAuthor) -> list[list[str]]:
    """The lines of random programs: views, writes, reshards, reductions."""
    found = []
    for seed in seeds:
        program = Program(watched=False, gap=4, backends=("checked",))
        program.plain |= wide_names(True)
        program.tensors["checked"] |= wide_names(False)
        author = kind(Dice(seed), program)
        with quietly():
            for _ in range(length):
                program.run(author.line())
        found.append(program.lines)
    return found


@pytest.mark.parametrize(
    ("processes", "count", "seeds", "authors"),
    [
        pytest.param(2, 4, range(2), [SpanningAuthor, WideAuthor], id="few-2x4", marks=FULL),
        pytest.param(2, 4, range(100, 200), [SpanningAuthor], id="many-2x4", marks=FULL),
        pytest.param(3, 1, range(100, 200), [SpanningAuthor], id="many-3x1", marks=FULL),
        pytest.param(2, 4, range(100, 200), [WideAuthor], id="many-wide-2x4", marks=FULL),
        pytest.param(4, 2, range(200, 250), [WideAuthor], id="many-wide-4x2", marks=FULL),
    ],
)
def test_random_programs_have_the_bits_of_one_process(
    processes: int, devices: int, seeds: range, authors: list[type[Author]], tmp_path: Path
) -> None:
    lines, spanning = tmp_path / "programs.json", tmp_path / "spanning.txt"
    lines.write_text(json.dumps([made for author in authors for made in programs(seeds, drawn(40, fast=28), author)]))
    status, text = launch("mpi", processes, PROGRAMS, str(spanning), str(lines), limit=900)
    assert status == 0, text
    found = lines_of(spanning)
    assert len(found) == len(seeds) * len(authors)
    assert found == alone(PROGRAMS, tmp_path / "alone.txt", str(lines), devices=processes * devices, sharing=devices)


@pytest.mark.parametrize(
    ("engine", "processes", "count", "seeds"),
    [
        pytest.param("mpi", 2, 4, (0, 10), id="few-2x4", marks=FULL),
        pytest.param("mpi", 2, 4, (100, 300), id="many-2x4", marks=FULL),
        pytest.param("mpi", 3, 1, (100, 300), id="many-3x1", marks=FULL),
        pytest.param("gloo", 4, 2, (100, 130), id="gloo-4x2", marks=FULL),
    ],
)
def test_random_programs_with_collectives(engine: str, processes: int, devices: int, seeds: tuple[int, int]) -> None:
    status, text = launch(engine, processes, MAPS, *map(str, seeds), limit=900)
    assert status == 0, text
