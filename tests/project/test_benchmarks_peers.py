"""The processes of peers: their Python, what they import, and what becomes of one that fails.

The Python of the peers is a script that runs this Python with a JAX of a few lines.
"""

from __future__ import annotations

import functools
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import peers as programs
from tests.rehearsal import modules_of

CASE_MODULES = (
    "collectives", "cpu_cases", "distributed_cases", "functions", "gpu_cases", "jit_cases", "overhead", "processes",
    "random_numbers", "writes",
)  # fmt: skip
"""The modules with cases of peers."""

CASES = f"""
import os, sys, time
import {", ".join(CASE_MODULES)}
import jax

def loud():
    print("a line of Python")
    os.system("echo a line of another program")
    return "quiet"

def cases():
    return {{
        "modules": lambda: sorted({{name.partition(".")[0] for name in sys.modules}}),
        "variables": lambda: [os.environ.get(name) for name in ("PYTHONPATH", "PEERS", "GIVEN")],
        "jax": lambda: [jax.__file__, jax.device_count()],
        "loud": loud,
        "hang": lambda: time.sleep(600),
        "raise": lambda: 1 / 0,
    }}
"""


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmarks' harness."""
    with modules_of(monkeypatch, "harness") as (module,):
        monkeypatch.delenv(module.peers.VARIABLE, raising=False)
        yield module


def script(path: Path, text: str) -> str:
    """Writes a program of the shell and returns its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def fake(tmp_path: Path) -> str:
    """A Python with JAX 0.99, which is a script: the interpreter is its child."""
    library = tmp_path / "library"
    (library / "jax").mkdir(parents=True)
    (library / "jax" / "__init__.py").write_text("def device_count():\n    return 3\n")
    (library / "jax-0.99.dist-info").mkdir()
    (library / "jax-0.99.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.99.1\n")
    (library / "peer_cases.py").write_text(CASES)
    # -S: without the packages of this Python.
    run = f'PEERS=fake PYTHONPATH={shlex.quote(str(library))} {shlex.quote(sys.executable)} -S "$@"'
    return script(tmp_path / "python", f"{run}\nexit $?")


def test_a_peer_runs_on_its_own_python(harness: Any, fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(harness.peers.VARIABLE, fake)
    monkeypatch.setenv("PYTHONPATH", "/of/this/python")
    with harness.Worker("jax", "peer_cases:cases", {"GIVEN": "given"}) as worker:
        found = set(worker.call("modules"))
        assert set(CASE_MODULES) <= found
        assert not found & {"shardtensor", "shardtensor_numpy", "shardtensor_cupy", "rich", "numpy"}
        path, given = worker.call("variables")[0], worker.call("variables")[1:]
        assert path.endswith("library")
        assert given == ["fake", "given"]
        assert worker.call("jax")[1] == 3
        assert worker.call("loud") == "quiet"
        with pytest.raises(harness.NotMeasured, match="–"):
            worker.call("none of them")
    facts = harness.machine.describe_environment(("numpy", "jax", "torch", "shardtensor"))
    assert (facts["jax"], facts["torch"], facts["peers' numpy"]) == ("0.99.1", "not installed", "not installed")
    assert facts["peers' Python"] == facts["Python"]
    assert facts["numpy"][0].isdigit()


def test_what_a_peer_lacks_does_not_run_on_this_python(
    harness: Any, fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(harness.peers.VARIABLE, fake)
    with harness.Worker("torch", "cpu_cases:torch_cases") as worker:
        worker.restart()
        with pytest.raises(harness.NotMeasured, match=r"^not installed$"):
            worker.call("checksums")
    with pytest.raises(harness.NotMeasured, match=r"^not installed$"):
        harness.import_seconds("torch", str(tmp_path / "bytecode"))
    assert 0 < harness.import_seconds("jax", str(tmp_path / "bytecode")) < 60


def test_the_others_are_measured_beside_a_peer_that_fails(
    harness: Any, fake: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(harness.peers.VARIABLE, fake)
    with harness.Worker("jax", "peer_cases:cases") as worker:
        began = time.perf_counter()
        for case, problem, details in (("hang", "none in 0 s", ""), ("raise", "failed", "ZeroDivisionError")):
            limit = 0.5 if case == "hang" else 60
            samplers = {case: functools.partial(worker.call, case, limit), "other": lambda: 1.0}
            cells = harness.interleave(samplers, 2, "")
            assert cells[case].problem == problem
            assert cells["other"].samples == (1.0, 1.0)
            assert details in capfd.readouterr().err
            worker.restart()
            assert worker.call("loud") == "quiet"
        assert time.perf_counter() - began < 60  # the children of the script have been killed, too


def test_slow_rounds_are_fewer(harness: Any) -> None:
    """A time that is over ends the rounds after the least number of them; without one, all are made."""
    for seconds, rounds in ((0.0, harness.LEAST_ROUNDS), (60.0, 9), (float("inf"), 9)):
        cells = harness.interleave({"case": lambda: 1.0}, 9, "", seconds)
        assert len(cells["case"].samples) == rounds


@pytest.mark.parametrize(
    ("text", "problem", "message"),
    [
        (None, "no Python", "which is not the path or the name of a program; give the path of a Python interpreter"),
        ("echo hello", "failed", r"it answered b'hello\n' instead of JSON"),
        ("echo broken >&2; exit 3", "failed", "jax (peer_cases:cases): broken"),
        ("exec >&-; sleep 600", "failed|none in 0 s", "has not ended in 0.5 s, and was killed"),
        ("sleep 600", "none in 0 s", "has not ended in 0.5 s, and was killed"),
    ],
    ids=["missing", "no Python", "broken", "closed", "silent"],
)
def test_programs_that_are_no_python(
    text: str | None,
    problem: str,
    message: str,
    harness: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(tmp_path / "nowhere") if text is None else script(tmp_path / "python", text)
    monkeypatch.setenv(harness.peers.VARIABLE, path)
    monkeypatch.setattr(harness, "CLOSING_LIMIT", 0.2)
    if "sleep" in (text or ""):
        monkeypatch.setattr(harness.peers, "START_LIMIT", 0.5)
        monkeypatch.setattr(harness, "ANSWER_LIMIT", 0.5)
    with harness.Worker("jax", "peer_cases:cases") as worker, pytest.raises(harness.NotMeasured, match=f"^{problem}$"):
        worker.sample("anything")
    facts = harness.machine.describe_environment(("numpy", "jax"))  # at the end of a run, whose figures are kept
    assert (facts["jax"], facts["peers' Python"]) == ("unknown", "unknown")
    assert message in capsys.readouterr().err
    # A program that is started with it measures nothing.
    with pytest.raises(SystemExit, match="2"):
        harness.arguments("overhead", "", ["--quick"])
    assert "error: " in (printed := capsys.readouterr().err)
    assert path in printed


def test_the_option_is_stronger_than_the_variable(
    harness: Any, fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert harness.peers.python() == sys.executable
    monkeypatch.setenv(harness.peers.VARIABLE, str(tmp_path / "nowhere"))
    harness.arguments("overhead", "", ["--peer-python", fake])
    assert harness.peers.of("jax") == harness.peers.python() == fake
    assert harness.peers.of("numpy") == harness.peers.of("shardtensor") == sys.executable
    # A name is found on the search path, and a path may be relative.
    monkeypatch.setenv("PATH", str(tmp_path))
    harness.arguments("overhead", "", ["--peer-python", "python"])
    assert harness.peers.python() == fake
    monkeypatch.chdir(tmp_path)
    harness.arguments("overhead", "", ["--peer-python", "./python"])
    assert harness.peers.python() == fake


def test_both_versions_are_in_the_table(
    harness: Any, fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(harness.peers.VARIABLE, fake)
    facts = harness.machine.describe_environment(("numpy", "jax", "shardtensor"))
    harness.report(harness.Table("title", facts, (harness.PROJECT,), (), {}), tmp_path, "table")
    text, saved = (tmp_path / "table.txt").read_text(), json.loads((tmp_path / "table.json").read_text())
    for name in ("Python", "shardtensor", "numpy", "peers' Python", "peers' numpy", "jax"):
        assert f"\n{name}: {facts[name]}\n" in text
        assert saved["environment"][name] == facts[name]


def test_the_line_of_versions(fake: str, monkeypatch: pytest.MonkeyPatch, harness: Any) -> None:
    line = harness.peers.run(sys.executable, [harness.peers.__file__], **{harness.peers.VARIABLE: fake}).decode()
    start = f"peers: Python {sys.version.split()[0]} ({fake}): cupynumeric not installed, dask not installed, "
    assert line.startswith(f"{start}jax 0.99.1, mlx ")
    with pytest.raises(harness.PeerError, match=r"status 1, and printed: peers.py: the peers' Python \(--peer-python"):
        harness.peers.run(sys.executable, [harness.peers.__file__], **{harness.peers.VARIABLE: "/nowhere"})


def test_programs_of_the_tests(fake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    peers = programs.peers
    monkeypatch.setenv(peers.VARIABLE, fake)
    programs.require_jax("0.99")
    assert capsys.readouterr().out == f"the peer is JAX 0.99.1, on {fake}\n"
    with pytest.raises(pytest.skip.Exception, match=r"JAX 0\.10 is compared; the Python of the peers has 0\.99\.1"):
        programs.require_jax("0.10")
    program = "import jax, os\nprint('noise')\nfound = {given: [os.environ['XLA_FLAGS'][-1], jax.device_count()]}"
    assert programs.run(program, (1, 2), devices=8) == {(1, 2): ["8", 3]}
    with pytest.raises(peers.PeerError, match=r"(?s)the status 1.*program of a test.*line 2.*ZeroDivisionError"):
        programs.run("x = 1\nfound = x / 0")
    monkeypatch.setattr(programs, "LIMIT", 0.5)
    with pytest.raises(peers.PeerError, match=r"has not ended in 0\.5 s, and was killed"):
        programs.run("import time\ntime.sleep(600)")
