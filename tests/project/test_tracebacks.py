"""Tracebacks and warnings of programs: the lines of the user, and none of the library; debuggers have all frames."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import shardtensor as st
from shardtensor import places, tracebacks
from tests.scripts import VARIABLES, WITHOUT_PLUGINS, new_process, output_of, run_script

ERRORS = """
import io, sys, traceback
import numpy as np
import shardtensor as st

x = st.device_put(np.arange(64.0).reshape(8, 8), st.NamedSharding(st.make_mesh((8,), ("d",)), st.P("d")))
CASES = {
    "product": lambda: x @ np.ones((3, 3)),
    "dtype": lambda: x & 1,
    "pmap": lambda: st.pmap(lambda v: v + undefined, x),
    "pmap of NumPy": lambda: st.pmap(np.linalg.inv, st.ones((8, 3, 4))),
    "shard_map": lambda: st.shard_map(lambda v: v @ np.ones((3, 3)), in_specs=st.P("d"), out_specs=st.P("d"))(x),
    "smap": lambda: st.smap(lambda a: a + undefined, x),
    "map in a map": lambda: st.pmap(lambda v: st.smap(lambda w: w + undefined, v), x),
    "jit": lambda: st.jit(lambda a: a @ np.ones((3, 3)))(x),
    "jit of a name": lambda: st.jit(lambda a: a + undefined)(x),
    "index": lambda: x[100],
    "write": lambda: x.__setitem__((slice(None), 3), np.ones(5)),
    "NumPy": lambda: np.linalg.inv(x[:, :3]),
    "axis": lambda: np.sum(x, axis=7),
    "ufunc method": lambda: np.add.reduce(x, axis=9),
    "method": lambda: x.reshape(3, 3),
    "concatenate": lambda: st.concat([x, x[:, :3]], axis=0),
    "device_put": lambda: st.device_put(x, st.P("nope")),
    "creation": lambda: st.ones("a"),
    "einsum": lambda: st.einsum("ij,jk", x, x[:3]),
    "float": lambda: float(x),
    "bool": lambda: bool(x),
    "random": lambda: st.random.normal(3, 4),
    "sort": lambda: st.sort(x, axis=5),
    "solve": lambda: st.linalg.solve(x, np.ones(3)),
    "singular": lambda: st.linalg.inv(st.zeros((4, 4))),
    "mesh": lambda: st.make_mesh((3, 5), ("a",)),
    "astype": lambda: x.astype("nope"),
    "nanmean": lambda: np.nanmean(x, axis=5),
    "fft": lambda: st.fft.fft(x, axis=7),
    "apply_along_axis": lambda: np.apply_along_axis(lambda row: row + undefined, 0, x),
}


def shown(error):
    sys.stderr = io.StringIO()
    try:
        sys.excepthook(type(error), error, error.__traceback__)
        return sys.stderr.getvalue()
    finally:
        sys.stderr = sys.__stderr__
"""
"""Thirty errors, and a function that returns what Python prints of an exception that ends a program."""


def test_thirty_errors_show_only_lines_of_the_program() -> None:
    text = output_of(
        run_script(
            ERRORS
            + """
for name, case in CASES.items():
    try:
        case()
    except Exception as error:
        whole, notes = error.__traceback__, list(getattr(error, "__notes__", ()))
        frames, text = len(traceback.extract_tb(whole)), shown(error)
        assert error.__traceback__ is whole and list(getattr(error, "__notes__", ())) == notes
        files = [line for line in text.splitlines() if line.startswith("  File ")]
        assert all('"<string>"' in line for line in files), (name, text)
        hidden = frames - len(files)
        assert 0 < hidden and f"  [{hidden} frame" in text, (name, text)
        assert str(error).splitlines()[-1] in text.splitlines()[-1 - len(notes)], (name, text)
        assert len(files) == 2 or "undefined" in str(error) or "pmap" in name or "map" in name or name == "jit", text
        print(name, hidden, len(text.splitlines()))
    else:
        raise AssertionError(f"{name} raised nothing")
""",
            **VARIABLES,
        )
    )
    lines = [int(line.split()[-1]) for line in text.splitlines()]
    assert len(lines) == 30
    assert max(lines) <= 9  # The lines of the traceback, the message and notes; there were up to 50.


def test_one_variable_shows_all_frames() -> None:
    script = ERRORS + "try:\n  CASES['product']()\nexcept Exception as e:\n  print(shown(e))"
    text = output_of(run_script(script, **VARIABLES, SHARDTENSOR_TRACEBACK="full"))
    assert "eager.py" in text
    assert "hidden" not in text
    assert "linear_algebra.py" in text  # The declaration of the operator, whose source Python can show.
    assert "@operator(" in text
    assert "<operator" not in text


def test_the_source_of_an_operator_is_its_declaration() -> None:
    assert inspect.getsource(st.matmul).startswith("@operator(")
    assert st.matmul.__code__.co_filename.endswith("linear_algebra.py")


def test_chains_groups_and_frames_of_other_libraries_stay() -> None:
    output_of(
        run_script(
            ERRORS
            + """
import types

other = types.ModuleType("statsmodels")
exec(compile("def fit(f):\\n    return f()", "statsmodels.py", "exec"), vars(other))
try:
    try:
        other.fit(CASES["product"])
    except st.ShapeError as error:
        raise RuntimeError("mine") from error
except RuntimeError as error:
    text = shown(error)
assert "direct cause" in text and "statsmodels.py" in text and "shardtensor/" not in text, text
assert text.count("hidden") == 1 and text.endswith("see them]\\nRuntimeError: mine\\n"), text

try:
    try:
        CASES["product"]()
    except st.ShapeError:
        CASES["index"]()
except IndexError as error:
    text = shown(error)
assert "During handling" in text and "shardtensor/" not in text, text

errors = []
for name in ("product", "index"):
    try:
        CASES[name]()
    except Exception as error:
        errors.append(error)
text = shown(ExceptionGroup("two", errors))
assert "matmul:" in text and "getitem:" in text and "shardtensor/" not in text, text

try:
    1 / 0
except ZeroDivisionError as error:
    text = shown(error)
assert "hidden" not in text
sys.excepthook(None, None, None)  # As Python's own hook does, it accepts that there is no exception.
""",
            **VARIABLES,
        )
    )


def test_threads_and_interactive_sessions() -> None:
    done = new_process(
        "-i", "-c", "import shardtensor as st, threading",
        stdin="thread = threading.Thread(target=lambda: st.ones(3)[5])\nthread.start(); thread.join()\n"
        "st.ones(3)[7]\nimport sys, traceback\nprint('frames', len(traceback.extract_tb(sys.last_traceback)))\n",
    )  # fmt: skip
    assert "index 5 is out of bounds" in done.stderr
    assert "index 7 is out of bounds" in done.stderr
    assert done.stderr.count("hidden; set SHARDTENSOR_TRACEBACK=full") == 2
    assert "eager.py" not in done.stderr
    assert int(done.stdout.split()[-1]) > 5  # `pdb.pm()` has all frames.


TESTS = """
import shardtensor as st

def test_product():
    st.ones((8, 8)) @ st.ones((3, 3))

def test_name():
    st.pmap(lambda v: v + undefined, st.ones((1, 2)))

def test_late_module():
    st.einsum("ij,jk", st.ones((2, 3)), st.ones((4, 5)))
"""


def test_pytest_hides_the_frames(tmp_path: Path) -> None:
    file = tmp_path / "test_program.py"
    file.write_text(TESTS)
    options = ("-p", "no:cacheprovider", "-q", "--rootdir", str(tmp_path), str(file))
    text = new_process("-m", "pytest", *options, cwd=tmp_path, PYTHONPATH="", **WITHOUT_PLUGINS).stdout
    assert "3 failed" in text
    assert re.findall(r"^(\S+\.py):\d+: ", text, re.M) == ["test_program.py"] * 4
    full = new_process("-m", "pytest", *options, cwd=tmp_path, SHARDTENSOR_TRACEBACK="full", **WITHOUT_PLUGINS).stdout
    assert "eager.py" in full
    assert "einsum.py" in full
    commands = (
        "import sys, traceback\np 'frames', len(traceback.extract_tb(sys.last_value.__traceback__))\np __name__\nq\n"
    )
    debugged = new_process("-m", "pytest", "--pdb", *options, cwd=tmp_path, stdin=commands, **WITHOUT_PLUGINS).stdout
    assert int(re.search(r"\('frames', (\d+)\)", debugged)[1]) > 5  # type: ignore[index]
    assert "'test_program'" in debugged  # The debugger starts at the line of the program.


@pytest.mark.skipif(not find_spec("IPython"), reason="needs IPython")
def test_ipython_hides_the_frames() -> None:
    text = output_of(
        new_process(
            "-c",
            """
import sys, traceback
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor")
shell.run_cell("import shardtensor as st")
shell.run_cell("st.ones(3)[7]")
print("=====", len(traceback.extract_tb(sys.last_traceback)))
hidden = [frame.f_locals.get("__tracebackhide__") for frame, _ in traceback.walk_tb(sys.last_traceback)]
assert hidden[-1] and not hidden[1], hidden  # The debugger steps over frames of the library.
shell.run_cell("%tb")
print("=====")
shell.run_cell("st.zeros(3) / 0")
shell.run_cell("1 / 0")
""",
        )
    )
    short, whole, other = text.split("=====")
    assert "index 7 is out of bounds" in short
    assert "hidden" in short
    assert "calls.py" not in short
    assert len(short.splitlines()) <= 12
    assert int(whole.split()[0]) > 5
    assert "calls.py" in whole
    assert "ZeroDivisionError" in other


def test_numpys_warnings_name_the_line_of_the_caller() -> None:
    done = run_script(
        """
import warnings
import numpy as np
import shardtensor as st

warnings.resetwarnings()
x, y = st.ones(8), st.zeros(8)
for _ in range(3):
    x / y  # line 9
x / y  # line 10
np.log(y)  # line 11
st.pmap(lambda v: v / 0.0, x)  # line 12
large = st.ones((1024, 1024))
large / 0  # line 14
warnings.filterwarnings("ignore", module="__main__")
x / y
warnings.filterwarnings("error", "divide by zero", module="__main__")
try:
    x / y
except RuntimeWarning as error:
    print("raised", error)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x / y
print([(w.filename, w.lineno) for w in caught])
warnings.resetwarnings()
warnings.warn("mine")  # line 27
""",
        **VARIABLES,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\S+):(\d+): (\w+)", done.stderr, re.M) == [
        ("<string>", line, kind) for line, kind in
        [(str(k), "RuntimeWarning") for k in (9, 10, 11, 12, 14)] + [("27", "UserWarning")]
    ]  # fmt: skip
    assert done.stdout == "raised divide by zero encountered in divide\n[('<string>', 24)]\n"


def test_resource_warnings_keep_their_source() -> None:
    script = "import shardtensor, tracemalloc, warnings\nwarnings.simplefilter('always')\n"
    done = new_process("-c", script + "tracemalloc.start(5)\nopen('README.md')")
    assert "ResourceWarning: unclosed file" in done.stderr
    assert "Object allocated at" in done.stderr


def test_warnings_of_numpys_functions_and_in_code_without_a_module_name_the_line_of_the_caller() -> None:
    done = run_script(
        """
import warnings
import numpy as np
import shardtensor as st
from numpy.testing import clear_and_catch_warnings

warnings.resetwarnings()
np.nanmedian(st.zeros(3) * np.nan)  # line 8
st.zeros(0).mean()  # line 9
np.mean(np.zeros(0))
exec(compile("x / 0", "<code>", "exec"), {"x": st.zeros(3)})
import shardtensor.interpreters.execution.strategies
with clear_and_catch_warnings(modules=[shardtensor.interpreters.execution.strategies]):
    pass
""",
        **VARIABLES,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(\S+):(\d+): (\w+)", done.stderr, re.M)
    assert ("<string>", "8", "RuntimeWarning") in found
    assert ("<string>", "9", "RuntimeWarning") in found
    assert ("<code>", "1", "RuntimeWarning") in found
    numpys = [file for file, _, _ in found if file.endswith(".py")]
    assert numpys  # Calls with NumPy arrays only keep the place that NumPy gives.
    assert not any("shardtensor" in file for file in numpys)


def test_exceptions_that_take_no_attributes_are_printed() -> None:
    """So are those of threads, and those whose methods raise."""
    text = output_of(
        run_script(
            ERRORS
            + """
import dataclasses, threading

@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    text: str

class Broken(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    @property
    def exceptions(self):
        raise RuntimeError("no group")

def fails(kind):
    st.pmap(lambda v: (_ for _ in ()).throw(kind("mine")), x)

for kind in (Frozen, Broken):
    try:
        fails(kind)
    except Exception as error:
        print(shown(error))
    sys.stderr = io.StringIO()
    thread = threading.Thread(target=fails, args=(kind,), name="third")
    thread.start()
    thread.join()
    print(sys.stderr.getvalue())
    sys.stderr = sys.__stderr__
""",
            **VARIABLES,
        )
    )
    assert text.count("Frozen") >= 2
    assert text.count("Broken") >= 2
    assert text.count("Exception in thread third:") == 2
    assert text.count("hidden; set") == 2  # those of `Frozen`


def test_hooks_of_a_program_are_not_replaced() -> None:
    text = output_of(
        new_process(
            "-c",
            """
import sys, threading, traceback
seen = []
sys.excepthook = lambda kind, error, tb: seen.append(len(traceback.extract_tb(tb)))
threading.excepthook = hook = lambda args: None
import importlib, warnings
import shardtensor as st
assert threading.excepthook is hook
show = warnings._showwarnmsg
importlib.reload(st)
assert warnings._showwarnmsg is show
try:
    st.ones(3)[7]
except IndexError as error:
    sys.excepthook(type(error), error, error.__traceback__)
print(seen[0])
""",
        )
    )
    assert int(text) > 5


def test_the_hook_prints_the_traceback_that_it_is_given() -> None:
    """Interactive interpreters leave their own frames out of it."""
    text = output_of(
        run_script(
            ERRORS
            + """
try:
    CASES["index"]()
except IndexError as error:
    sys.stderr = sys.stdout
    sys.excepthook(type(error), error, error.__traceback__.tb_next)
""",
            **VARIABLES,
        )
    )
    assert [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("  File")] == ["<lambda>"]


def test_only_frames_up_to_that_of_the_user_are_looked_at() -> None:
    """The stacks of traced programs may be deep."""
    frame = sys._getframe()
    assert next(places._of_user(itertools.repeat(frame))) is frame
    code = compile("frame = __import__('sys')._getframe()", "<generated>", "exec")
    scope = {"__name__": "library", "__file__": json.__file__}
    exec(code, scope)
    assert places.user_frame(scope["frame"]) is frame  # type: ignore[arg-type]


def test_a_traceback_without_other_frames_stays_whole() -> None:
    try:
        exec(compile("1 / 0", "inside.py", "exec"), {"__name__": "shardtensor.inside"})
    except ZeroDivisionError as error:
        inside = error.__traceback__.tb_next  # type: ignore[union-attr]
        text = tracebacks.text_of(error, inside)
    assert [hides for _, hides in tracebacks._entries(inside)] == [True]
    assert "inside.py" in text
