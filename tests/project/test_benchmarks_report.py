"""The run of all benchmarks, and the page of their figures."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rehearsal import modules_of


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The run, and the page."""
    with modules_of(monkeypatch, "run", "report") as (run, report):
        monkeypatch.delenv(run.harness.AGAINST, raising=False)
        yield run, report


def save(run: Any, folder: Path, name: str, **facts: str) -> None:
    """Saves a table in which one row is ahead, one is behind, one misses its target, and one has no peer."""
    tables = sys.modules["tables"]
    figures = {
        ("ahead", "ours"): 1.0, ("ahead", "NumPy"): 4.0, ("ahead", "JAX"): 2.0, ("ahead", "limit"): 0.5,
        ("behind", "ours"): 30e-6, ("behind", "NumPy"): 10e-6, ("behind", "at abc"): 60e-6,
        ("missed", "ours"): 1.0, ("missed", "NumPy"): 1.0, ("missed", "at abc"): 1.0,
        ("single", "ours"): 3.0,
    }  # fmt: skip
    cells = {key: tables.Cell(tuple([figure * (1 + i / 1000) for i in range(5)])) for key, figure in figures.items()}
    targets = (tables.Target(0.5, tables.Best("best peer", ("NumPy", "JAX"))),)
    rows = (
        tables.Row("ahead", "x | y", targets), tables.Row("behind", "small"),
        tables.Row("missed", "large", targets), tables.Row("single", "alone", (tables.Target(1.0),), "MiB"),
    )  # fmt: skip
    columns = ("ours", "limit", "NumPy", "JAX")
    table = tables.Table("A title", {"commit": "abc", "CPU": "a CPU", **facts}, columns, rows, cells, ("limit",))
    run.harness.report(table, folder, name)


def test_the_page_names_the_rows_behind_first(modules: tuple[Any, Any], tmp_path: Path) -> None:
    run, report = modules
    save(run, tmp_path, "first")
    save(run, tmp_path, "second", commit="def")
    report.write(tmp_path, ("first", "second", "third"))
    text = (tmp_path / report.PAGE).read_text("utf-8")
    assert "**Targets:** 2 of 6 are met (33%)" in text
    assert "abc, def. The tables are not of one commit." in text
    long, short = text.split("## Farthest behind: ")[1:3]
    assert "small" not in long
    assert "| [small](#first) | 30.1 µs | 10.0 µs (NumPy) | **3.00×** |" in short
    section = text.split("## first")[1].split("## second")[0]
    behind, ahead = section.split("**Behind**")[1].split("**Ahead")
    assert "| small | 30.1 µs" in behind
    assert "**missed**" in behind.split("| large |")[1].split("\n")[0]
    assert "| alone | 3.01 MiB | – | – | ≤ 1 MiB **missed** |" in behind
    assert "| x &#124; y | 1.00 s | 2.00 s (JAX) | 0.50× | ≤ 0.5 × best peer met |" in ahead  # the limit is no peer
    assert "**Not measured yet for this page:** third." in text
    assert "Changes since" not in text


def test_changes_since_a_commit(modules: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, report = modules
    monkeypatch.setenv(run.harness.AGAINST, str(tmp_path / "abc"))
    save(run, tmp_path, "table")
    assert json.loads((tmp_path / "table.json").read_text())["columns"][:2] == ["ours", "at abc"]
    report.write(tmp_path, ("table",))
    changes = (tmp_path / report.PAGE).read_text("utf-8").split("## Changes since abc")[1].split("\n## ")[0]
    assert "| [small](#table) | 60.1 µs | 30.1 µs | 0.50× |" in changes
    assert "large" not in changes  # both figures are equal


def test_pictures_are_equal_for_equal_figures(modules: tuple[Any, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run, report = modules
    save(run, tmp_path, "table")
    pictures = []
    for _ in range(2):
        report.write(tmp_path, ("table",))
        pictures.append((tmp_path / "table.svg").read_bytes())
    assert pictures[0] == pictures[1]
    assert "![A title](table.svg)" in (tmp_path / report.PAGE).read_text("utf-8")


SCRIPT = """
import sys
sys.path[:0] = [{folder!r}, {tests!r}]
import harness, machine, tables
from pathlib import Path
facts = {{"commit": machine.commit()}}
with open({log!r}, "a") as log:
    print("measured", file=log)
harness.report(tables.Table("title", facts, ("ours",), (), {{}}), Path(sys.argv[2]), "good")
"""


SLOW = """
import sys, time
sys.path.insert(0, {folder!r})
import harness
harness.arguments("slow", "", [])
with harness.start_workers({{"ours": ("json", "builtins:dict", {{}})}}) as workers:
    process = workers["ours"]._process
    try:
        time.sleep(600)
    finally:
        harness.peers.kill(process)
        process.wait()
        with open({log!r}, "w") as log:
            log.write("the worker has ended")
"""


def test_a_run_goes_on_where_it_was_stopped(
    modules: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, report = modules
    log = tmp_path / "log"
    folder = str(Path(run.__file__).parent)
    (tmp_path / "good.py").write_text(SCRIPT.format(folder=folder, tests=str(tmp_path), log=str(log)))
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "slow.py").write_text(SLOW.format(folder=folder, log=str(tmp_path / "ended")))
    names = ("good", "bad", "slow")
    monkeypatch.setattr(run, "BENCHMARKS", tuple([run.Benchmark(str(tmp_path / name), (name,)) for name in names]))
    monkeypatch.setattr(run, "TABLES", names)
    monkeypatch.setattr(run, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(run, "LIMIT", 60.0)
    out = ["--out", str(tmp_path / "out")]
    assert run.main([str(tmp_path / "good"), str(tmp_path / "bad"), *out]) == 1
    assert "ended with the status 3" in capfd.readouterr().err
    monkeypatch.setattr(run, "LIMIT", 5.0)
    began = time.perf_counter()
    assert run.main([str(tmp_path / "good"), str(tmp_path / "slow"), *out]) == 1
    assert time.perf_counter() - began < 60
    printed = capfd.readouterr().err
    assert "measured already" in printed
    assert "stopped after" in printed
    assert log.read_text().count("measured") == 1
    assert (tmp_path / "ended").read_text() == "the worker has ended"
    assert (tmp_path / "out" / report.PAGE).exists()


@pytest.mark.parametrize(
    "argv", [["nothing"], ["--quick"], ["--label", "mine", "--out", "somewhere"]], ids=["name", "quick", "label"]
)
def test_arguments_that_are_errors(
    modules: tuple[Any, Any], argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        modules[0].main(argv)
    expected = {"nothing": "there is no benchmark 'nothing'", "--quick": "give --out DIR", "--label": "use --out DIR"}
    assert expected[argv[0]] in capsys.readouterr().err


def test_every_script_is_run(modules: tuple[Any, Any]) -> None:
    run, _ = modules
    folder = Path(run.__file__).parent
    scripts = {path.stem for path in folder.glob("*.py") if "harness.report(" in path.read_text("utf-8")}
    scripts |= {path.stem for path in folder.glob("*.py") if "harness.run(" in path.read_text("utf-8")}
    assert {benchmark.name for benchmark in run.BENCHMARKS} == scripts - {"gpu", "gpu_functions"}


def test_names_of_other_modules_exist(modules: tuple[Any, Any]) -> None:
    """Few of the scripts run here in full, and none with a GPU."""
    paths = list(Path(modules[0].__file__).parent.glob("*.py"))
    found = {path.stem: importlib.import_module(path.stem) for path in paths}
    missing = [
        f"{path.name}:{node.lineno}: {node.value.id}.{node.attr}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if isinstance(found[path.stem].__dict__.get(node.value.id), types.ModuleType)
        if node.value.id in found and not hasattr(found[node.value.id], node.attr)
    ]
    assert not missing


def test_the_cases_of_another_commit(modules: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = modules
    other = tmp_path / "abc" / "backends"
    other.mkdir(parents=True)
    (other / "cases_of_another.py").write_text("def cases():\n    return {'where': lambda: __file__}\n")
    monkeypatch.setenv(run.harness.AGAINST, str(tmp_path / "abc"))
    columns = {"ours": ("json", "cases_of_another:cases", {}), "NumPy": ("json", "builtins:dict", {})}
    with run.harness.start_workers({"ours": columns["ours"]}) as workers:
        assert list(workers) == ["ours", "at abc"]
        assert workers["at abc"].call("where") == str(other / "cases_of_another.py")
        with pytest.raises(run.harness.NotMeasured):  # the module is in the other checkout only
            workers["ours"].call("where")


def test_the_checkout_of_a_commit_is_removed(modules: tuple[Any, Any]) -> None:
    run, _ = modules
    if run.machine.commit() == "unknown":
        pytest.skip("this is no Git repository")
    with run.checkout("HEAD") as name:
        path = Path(run.os.environ[run.harness.AGAINST])
        assert path.name == name
        assert (path / "benchmarks").is_dir()
    assert not path.exists()
    assert run.harness.AGAINST not in run.os.environ
    with pytest.raises(subprocess.CalledProcessError), run.checkout("no such commit"):
        pass


def test_other_processes(modules: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = modules[0].machine
    times = iter([(0.0, 5.0, 1.0), *[(10.0, 5.2, 1.0)] * 3, *[(10.0, 7.0, 2.0)] * 3])
    monkeypatch.setattr(machine, "_times", lambda: next(times))
    others = machine.OtherProcesses()
    assert others.cores() == pytest.approx((0.02, 0.0))
    assert (str(others), others.is_idle()) == ("2% of a core", True)
    assert others.cores() == pytest.approx((0.2, 0.1))
    assert (str(others), others.is_idle()) == ("20% of a core, and the host 10%", False)
    monkeypatch.setattr(machine, "_times", lambda: None)
    others = machine.OtherProcesses()
    assert (str(others), others.is_idle()) == ("unknown", True)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not report processor time")
def test_processes_that_are_no_children_are_seen(modules: tuple[Any, Any]) -> None:
    machine = modules[0].machine
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        before = machine._times()
        assert process.stdout is not None
        process.stdout.readline()
        after = machine._times()
        process.communicate(b"\n")
    assert after[1] - before[1] > 0.2  # a child that has not ended yet counts as another process
