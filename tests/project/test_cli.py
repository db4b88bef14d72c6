"""The command line: its output, the stream to which it is printed, and the exit status."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys

import numpy as np
import pytest

import shardtensor as st
from shardtensor import cli
from shardtensor.backend import Backend, Device, registry
from tests.scripts import Ended, new_process, output_of, run_script


def command(*arguments: str, **variables: str) -> Ended:
    return new_process("-m", "shardtensor", *arguments, **{"COLUMNS": "200"} | variables)


def rows(text: str) -> dict[str, list[str]]:
    """The cells of a printed table, by the first one of each row."""
    table = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in table}


class Plugin(Backend):
    """A third party's backend with two devices, which report their memory."""

    name = "plugin"
    xp = np

    def devices(self):
        return [Device("plugin", i, kind="A100") for i in range(2)]

    def is_array(self, x):
        return False

    def to_device(self, array, source, destination):
        raise NotImplementedError

    from_host = to_host = to_device

    def memory_info(self, device):
        return (10 - device.id) << 30, 40 << 30


def test_info_lists_every_backend_and_the_default_one(capsys):
    assert cli.main(["info"]) == 0
    table = rows(capsys.readouterr().out)
    assert sorted(name for name in table if name) == st.backend_names()  # what is long goes on below
    default = st.devices()[0].backend
    assert [name for name, cells in table.items() if cells[0] == "yes"] == [default]
    *listed, memory = table["numpy"][1:]
    assert listed == [str(len(st.devices("numpy"))), "cpu"]
    assert re.fullmatch(r"([\d.]+ [MG]iB / [\d.]+ GiB)?", memory)  # Empty where the system does not report it.


def test_info_shows_the_memory_of_devices_that_know_it(monkeypatch, capsys):
    monkeypatch.setitem(registry._loaded, "plugin", Plugin())
    monkeypatch.setattr(cli, "backend_names", lambda: ["plugin"])
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert rows(out)["plugin"] == ["", "2", "A100", "10 GiB / 40 GiB"]
    assert "9 GiB / 40 GiB" in out


def test_info_shows_why_a_backend_is_unavailable(monkeypatch, capsys):
    def absent(name):
        raise st.BackendError("no [driver] found")

    monkeypatch.setattr(cli, "load", absent)
    monkeypatch.setattr(cli, "backend_names", lambda: ["plugin"])
    assert cli.main(["info"]) == 0
    assert rows(capsys.readouterr().out)["plugin"] == ["", "none", "", "no [driver] found"]


@pytest.mark.parametrize("width", [36, 40, 60])
def test_info_breaks_no_word_where_it_is_narrow(monkeypatch, capsys, width):
    reason = "no driver of this device was found (cudaErrorInsufficientDriver); install one"

    def load(name):
        if name == "absent":
            raise st.BackendError(reason)
        return Plugin()

    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(cli, "load", load)
    monkeypatch.setattr(cli, "backend_names", lambda: ["absent", "plugin"])
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    text = " ".join(out.split())
    assert text.startswith(f"absent devices: none {reason} plugin devices: 2 A100 free / total memory: 10 GiB / 40 GiB")


def test_info_names_the_limit_of_the_memory_cache(capsys):
    limit = st.cache_info().limit
    st.set_cache_limit(3 << 30)
    try:
        assert cli.main(["info"]) == 0
    finally:
        st.set_cache_limit(limit)
    out = " ".join(capsys.readouterr().out.split())
    assert "is kept for later results: up to 3 GiB, by default a quarter of the memory that this process may use" in out
    assert "st.free_cache()" in out
    assert "st.set_cache_limit" in out


def test_version():
    finished = command("--version")
    assert (finished.returncode, finished.stdout) == (0, f"shardtensor {st.__version__}\n")


def test_without_a_command_it_prints_help(capsys):
    assert cli.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("usage: shardtensor")
    assert "demo" in printed.err


@pytest.mark.parametrize("line", ["dance", "info --fast", "demo --steps many", "demo --devices"])
def test_unknown_arguments_exit_with_2(line, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    assert ended.value.code == 2
    assert "usage: shardtensor" in capsys.readouterr().err


INVALID = [
    ("SHARDTENSOR_BACKEND", "nonsense", "there is no backend named 'nonsense'"),
    ("SHARDTENSOR_NUM_DEVICES", "0", "SHARDTENSOR_NUM_DEVICES is '0'; wanted an integer from 1 to 65,536"),
    ("SHARDTENSOR_NUM_DEVICES", "eight", "SHARDTENSOR_NUM_DEVICES is 'eight'"),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([("demo", *row) for row in INVALID], id="demo"),
        pytest.param([("info", *row) for row in INVALID], id="info", marks=pytest.mark.full),  # It imports torch.
    ],
)
def test_an_invalid_environment_prints_one_line_and_exits_with_1(cases):
    code = "import runpy; runpy.run_module('shardtensor', run_name='__main__', alter_sys=True)"
    for name, variable, value, reason in cases:
        ended = run_script(code, name, **{variable: value})
        assert (ended.returncode, len(ended.stderr.splitlines())) == (1, 1), (name, value, ended.stderr)
        assert ended.stderr.startswith(f"shardtensor: {reason}"), (name, value)


@pytest.mark.slow
def test_info_names_no_default_where_the_numpy_plugin_is_broken(tmp_path):
    """The backend for tests is not used in its place."""
    for broken in ("shardtensor_numpy", "torch"):  # The import of torch would take a second.
        (tmp_path / f"{broken}.py").write_text("raise OSError('a broken plugin')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    finished = command("info", PYTHONPATH=path, CUDA_VISIBLE_DEVICES="", COLUMNS="200")
    assert finished.returncode == 1
    table = rows(finished.stdout)
    assert [name for name, cells in table.items() if cells[0] == "yes"] == []
    assert "a broken plugin" in table["numpy"][-1]
    assert table["checked"][1].isdigit()
    assert finished.stderr.startswith("shardtensor: no backend can be used: ")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--backend", "nonsense"], "there is no backend named 'nonsense'"),
        (["--devices", "10000"], "10000 devices were requested"),
        (["--devices", "0"], "devices is 0; wanted at least 1"),
        (["--steps", "-1"], "steps is -1; wanted at least 1"),
    ],
)
def test_invalid_options_print_one_line_and_exit_with_1(arguments, reason, capsys):
    assert cli.main(["demo", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("shardtensor: ")
    assert reason in line


def test_an_error_of_the_system_leaves_standard_output_as_it_is(capfd, tmp_path):
    """Also where a program calls the command, and has replaced standard output."""
    path = tmp_path / "program"
    path.write_text("#!/no/such/interpreter\n")
    path.chmod(0o755)
    for output in (contextlib.nullcontext(), contextlib.redirect_stdout(io.StringIO())):
        with output:
            assert cli.main(["launch", "-n", "1", "--engine", "gloo", str(path)]) == 1
    os.write(1, b"still here")
    out, error = capfd.readouterr()
    assert out == "still here"
    assert error == 2 * f"shardtensor: [Errno 2] No such file or directory: '{path}'\n"


def test_a_program_that_is_missing_is_named_once(capsys):
    assert cli.main(["launch", "-n", "2", "--engine", "gloo", "/no/such.py"]) == 1
    assert capsys.readouterr().err == "shardtensor: launch: there is no file '/no/such.py'\n"


def test_demo_takes_its_options(capsys):
    assert cli.main(["demo", "--backend", "checked", "--devices", "2", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 devices of kind cpu: Mesh(d=2; checked:0, checked:1)" in out
    assert "in 2 steps" in out


@pytest.mark.parametrize("value", [None, "8"])
@pytest.mark.parametrize("backend", ["numpy", "nonsense"])
def test_demo_restores_the_environment(monkeypatch, value, backend):
    if value is None:
        monkeypatch.delenv("SHARDTENSOR_NUM_DEVICES", raising=False)
    else:
        monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", value)
    with contextlib.suppress(ImportError):
        import sklearn  # noqa: F401  # It sets variables of OpenMP.
    before = dict(os.environ)
    assert cli.main(["demo", "--steps", "1", "--backend", backend]) == (backend == "nonsense")
    assert dict(os.environ) == before


def test_rich_and_the_demo_are_loaded_on_use():
    code = "import shardtensor.cli, sys; print([m for m in ('rich', 'shardtensor.demo') if m in sys.modules])"
    assert output_of(new_process("-c", code)) == "[]\n"
