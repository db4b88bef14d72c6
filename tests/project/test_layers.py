"""The layers: packages import from lower ones only, without cycles; plugins import the protocol; imports are cheap."""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import io
import itertools
import json
import re
import sys
import tokenize
import wave
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import shardtensor as st
import shardtensor.functions.building.scatter
import shardtensor.functions.building.special
import shardtensor.functions.ufunc_protocol.ufunc_methods
import shardtensor.random
from shardtensor.backend.small_floats import SMALL_FLOATS
from shardtensor.core import ABOVE, OPS
from shardtensor.exports import modules_of_names
from tests.scripts import ROOT, new_process, output_of

PACKAGE = ROOT / "shardtensor"

LAYERS = [
    "errors", "exports", "hint_tables", "hints", "places", "tracebacks", "signatures", "sequences", "declarations", "dispatchers", "core", "host", "backend", "sharding", "tensor", "communication", "functions", "fft", "lib", "linalg", "random", "tree", "checkpoint_policies", "custom_derivatives", "einops", "distributed", "interpreters", "spmd", "pictures", "files", "checkpoint", "optim", "data", "public", "",
    "engine", "job_output", "launcher", "demo", "testing", "cli", "__main__",
]  # fmt: skip
"""From the lowest to the highest; the empty name is the package itself."""

NAMED_ELSEWHERE = {
    "shardtensor": "the table of its public names, `shardtensor.public`",
    "shardtensor.core": "the table that the package fills: `ABOVE.modules`",
    "shardtensor.declarations": "the table that the package fills: `OPS.chapters`",
    "shardtensor.exports": "the tables of public names, of modules of which all names are public",
    "shardtensor.functions.derivatives": "a package above gives the module of its derivatives with its operators",
    "shardtensor.interpreters.batching.batcher": "a package above gives the module of its rules with its operators",
    "shardtensor.testing": "the table of its public names, `shardtensor.testing.public`",
}
"""Modules that import modules whose names they do not contain, and what gives the names."""

FOR_TYPES = {f"shardtensor.tensor.{m}": {"shardtensor.tensor.tensor"} for m in ("methods", "numpy_protocols")}
"""Imports for type checkers only: the type that operators and methods return is declared above them."""


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """The code of all modules, for the tests that look at it: parsed once in a process.

    Collections of garbage would go through these millions of objects again and again.
    """
    gc.disable()
    try:
        return {path: ast.parse(path.read_text()) for path in MODULES.values()}
    finally:
        gc.freeze()
        gc.enable()


def layer_of(module: str) -> int:
    return LAYERS.index(module.partition(".")[2].partition(".")[0])


@functools.cache
def imports_of(path: Path) -> set[str]:
    """The modules of the package that a file imports, anywhere, for types too."""
    return imported_by(trees().get(path) or ast.parse(path.read_text()), module_of(path))


def imported_by(tree: ast.Module, name: str) -> set[str]:
    """The modules of the package that the code of a module imports: by statements, or by names as texts."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {module if module in MODULES else node.module for module in modules}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    found |= {module for module in loaded_by(tree, name).values() if module}
    return {module for module in found if module.split(".")[0] == "shardtensor"}


def loaded_by(tree: ast.Module, name: str) -> dict[int, str | None]:
    """The modules that calls of `importlib.import_module` load, by line; None where the text is not in the module.

    Of a name that begins with a text, it is the package that this names, because it may be any module of the package.
    """
    constants = {"__name__": name} | {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def text(node: ast.expr) -> str | None:
        node = node.value if isinstance(node, ast.FormattedValue) else node
        value = node.value if isinstance(node, ast.Constant) else constants.get(getattr(node, "id", ""))
        return value if isinstance(value, str) else None

    found = {}
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if getattr(called, "attr", getattr(called, "id", "")) in ("import_module", "__import__"):
            (argument, *_) = node.args
            if isinstance(argument, ast.JoinedStr):
                texts = list(map(text, argument.values))
                begin = "".join(itertools.takewhile(bool, texts))
                found[node.lineno] = (begin if all(texts) else begin.rpartition(".")[0]) or None
            else:
                found[node.lineno] = text(argument)
    return found


def test_packages_import_only_from_those_before_them() -> None:
    upward = {
        (module, other)
        for module, path in MODULES.items()
        for other in imports_of(path)
        if layer_of(other) > layer_of(module)
    }
    assert upward == set()


def test_no_modules_import_each_other_in_a_cycle() -> None:
    graph = {m: imports_of(path) - FOR_TYPES.get(m, set()) - {m} for m, path in MODULES.items()}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


def test_imports_by_names_as_texts_count() -> None:
    source = """
NAME = "shardtensor.files.array_files"

def load(x, name):
    import shardtensor.linalg
    importlib.import_module("shardtensor.fft")
    _importlib.import_module(NAME)
    import_module(f"shardtensor.random.{x}")
    import_module(f"{__name__}.rows.{x}")
    importlib.import_module("torch")
"""
    assert imported_by(ast.parse(source), "shardtensor.tree") == {
        f"shardtensor.{name}" for name in ("linalg", "fft", "files.array_files", "random", "tree.rows")
    }
    unknown = "importlib.import_module(table[name])\nimport_module(f'{name}.fft')\n__import__(name)"
    assert loaded_by(ast.parse(unknown), "shardtensor.tree") == {1: None, 2: None, 3: None}


def test_modules_import_only_modules_that_they_name() -> None:
    sources = {module: path.read_text() for module, path in MODULES.items()}
    unknown = {
        module
        for module, source in sources.items()
        if re.search(r"\b(import_module|__import__)\(", source)
        and None in loaded_by(trees()[MODULES[module]], module).values()
    }
    assert unknown == NAMED_ELSEWHERE.keys()


def test_functions_above_are_called_by_names_of_which_the_package_gives_the_modules() -> None:
    for name, module in ABOVE.modules.items():
        assert callable(getattr(importlib.import_module(module), name)), name
    called: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for name in re.findall(r"\bABOVE\[\"(\w+)\"\]\(", path.read_text()):
            called.setdefault(name, set()).add(module)
    assert called.keys() == {*ABOVE.modules, *ABOVE}
    above = {name: module for name, module in ABOVE.modules.items() for m in called[name] if imports_up(m, module)}
    assert above == ABOVE.modules


def imports_up(module: str, other: str) -> bool:
    """Whether a module may not import another one: it is in a layer above, or imports the module."""
    return layer_of(other) > layer_of(module) or module in needed_by(other)


@functools.cache
def needed_by(module: str) -> set[str]:
    """The modules that an import of a module imports, directly or not."""
    needed, new = set(), {module}
    while new:
        needed |= new
        new = set().union(*[imports_of(MODULES[name]) for name in new]) - needed
    return needed


def test_every_import_in_a_function_has_a_reason() -> None:
    """A comment in its line, or in the one before it or before the imports that it follows, says why it is not at the
    top of the module: the time that it takes, a cycle, or a library that may be missing.
    """
    missing = [
        f"{path.relative_to(ROOT)}:{line}"
        for module, path in MODULES.items()
        for line in late_imports_without_reason(path.read_text(), module)
    ]
    assert missing == []


def late_imports_without_reason(source: str, name: str) -> list[int]:
    """The lines of imports in functions, of modules of the package also by their names, that have no comment."""
    if not re.search(r"^ +(from|import) |import_module\(", source, re.MULTILINE):
        return []
    tree = ast.parse(source)
    named = {line for line, module in loaded_by(tree, name).items() if str(module).split(".")[0] == "shardtensor"}
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    imports = {
        node.lineno: node.end_lineno or node.lineno
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (isinstance(node, ast.stmt) and node.lineno in named)
    }
    missing, explained = [], lines_with_reasons(source) if imports else set()
    for first, last in sorted(imports.items()):
        if explained.isdisjoint((first - 1, first, last)):
            missing.append(first)
        else:
            explained.add(last)  # for the import that follows
    return missing


def lines_with_reasons(source: str) -> set[int]:
    """The lines with comments, other than those that only tell a tool to ignore something."""
    comments = {
        token.start[0]: re.sub(r"# (noqa|type): ?[\w\[\], -]*?(?= - |  #|$)", "", token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {line for line, text in comments.items() if len(re.findall(r"\w+", text)) > 1}


def test_which_comments_are_reasons() -> None:
    source = """
def f():
    import a
    import b  # Few programs need it.
    import c

    # It takes long.
    from d import (
        e,
    )

    import g  # noqa: F401 - it declares operators

    import h  # noqa: F401
    import i  # type: ignore[import-untyped]
    importlib.import_module("shardtensor.fft")
    import_module("torch")
"""
    assert late_imports_without_reason(source, "shardtensor.tree") == [3, 14, 15, 16]


def test_execution_does_not_depend_on_whether_transfers_are_recorded() -> None:
    """Outside of the communication and of the interpreter that records, only inferences ask; see architecture.md."""
    found = set()
    for module, path in MODULES.items():
        if module.startswith("shardtensor.communication.") or module == "shardtensor.interpreters.recording":
            continue
        source = path.read_text()
        for function in ast.walk(ast.parse(source)) if "is_recording" in source else ():
            if not isinstance(function, ast.FunctionDef) or "infer" in function.name:
                continue
            if any(isinstance(node, ast.Name) and node.id == "is_recording" for node in ast.walk(function)):
                found.add(f"{module}.{function.name}")
    assert found == set()


def test_every_layer_exists() -> None:
    assert {module.partition(".")[2].partition(".")[0] for module in MODULES} == set(LAYERS)


def test_the_architecture_says_what_every_layer_does() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().partition("| package |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = [name.partition(".")[0] for name in re.findall(r"`(\w+)(?:\.py|/)`", " ".join(cells))]
    assert sorted(named) == sorted({*LAYERS} - {"", "__main__"})


def test_plugins_see_only_the_protocol() -> None:
    found = {path: imports_of(path) for path in (ROOT / "backends").rglob("*.py")}
    assert found
    allowed = {"shardtensor.backend", "shardtensor.engine", "shardtensor.errors"}
    assert {path: imported - allowed for path, imported in found.items() if imported - allowed} == {}


def names_of_imports(path: Path) -> set[str]:
    """The modules that a file imports, or from which it imports names; also by their names: ``import_module("...")``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            found.add(ast.literal_eval(node.args[0]))
    return found


def test_the_faster_cupy_does_not_know_the_library() -> None:
    """The kernels of the CuPy backend import NumPy, array-api-compat and each other; the driver passes CuPy to them."""
    own = "shardtensor_cupy.kernels"
    folder = ROOT / "backends" / "shardtensor_cupy" / "kernels"
    found = {(path.stem, name) for path in folder.rglob("*.py") for name in names_of_imports(path)}
    assert ("casts", f"{own}.elementwise_kernel") in found
    known = {*sys.stdlib_module_names, "numpy", "array_api_compat"}
    strange = {(module, name) for module, name in found if not f"{name}.".startswith(f"{own}.")}
    assert {(module, name) for module, name in strange if name.partition(".")[0] not in known} == set()


@pytest.mark.parametrize("name", ["rules", "copy_plan", "layout", "mesh", "spec", "index"])
def test_the_arithmetic_of_layouts_touches_no_array(name: str) -> None:
    assert ".xp" not in (PACKAGE / "sharding" / f"{name}.py").read_text()


# -- public names ----------------------------------------------------------------------------------


def test_the_package_shows_its_public_names_only() -> None:
    assert dir(st) == sorted(st.__all__)
    assert dir(st.distributed) == sorted(st.distributed.__all__)
    assert all(hasattr(st, name) for name in st.__all__)


def test_every_operator_is_exported_or_declared_as_internal() -> None:
    """Users reach internal operators through methods, protocols and other operators only."""
    public = {*st.__all__, *st.linalg.__all__, *st.fft.__all__, *st.random.__all__}
    advice = 'add a line to shardtensor/public.py, or declare the operator with tags=("internal",)'
    assert set(OPS) - public == {name for name, op in OPS.items() if "internal" in op.tags}, advice


@pytest.mark.parametrize("package", ["shardtensor", "shardtensor.testing"])
def test_every_public_name_is_written_once_in_a_module_of_imports(package: str) -> None:
    """Type checkers read that module, and it can be imported, too: a name that is not where it says raises an error."""
    path = MODULES[f"{package}.public"]
    written = [alias.asname for node in ast.parse(path.read_text()).body for alias in getattr(node, "names", ())]
    assert [name for name, count in Counter(written).items() if count > 1 and name] == []
    public, module = importlib.import_module(f"{package}.public"), importlib.import_module(package)
    names = {*modules_of_names(f"{package}.public")}
    assert names == {*module.__all__, *SMALL_FLOATS} - {"__version__"} if module is st else {*module.__all__}
    for name in names:
        assert getattr(module, name) is getattr(public, name), name


def test_imports_are_only_noted_where_names_are_listed(tmp_path: Path) -> None:
    lines = ["import a.b as b", "from a.b import c as c, d as d", "from wave import *", "from missing import x as x"]
    (tmp_path / "listed.py").write_text("\n".join(['"""A docstring."""', *lines]))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from shardtensor.exports import modules_of_names as f;"
    found = output_of(new_process("-c", code + "print(f('listed'), 'listed' in sys.modules)"))
    expected = {"b": "a.b", "c": "a.b", "d": "a.b", **dict.fromkeys(wave.__all__, "wave"), "x": "missing"}
    assert found == f"{expected} False\n"


def test_an_operator_of_a_module_that_is_not_imported_yet_is_found() -> None:
    code = "import sys, numpy as np, shardtensor as st; x = st.asarray([3, 1]); m = 'shardtensor.functions.standard.sorting'; "
    code += "assert not {*st.OPS.chapters.values()} & {*sys.modules}; assert m in st.OPS.chapters.values(); x.sort(); assert m in sys.modules; print(np.vstack([x, x]).tolist())"
    assert output_of(new_process("-c", code)) == "[[1, 3], [1, 3]]\n"


def test_functions_above_are_loaded_by_their_first_call(tmp_path: Path) -> None:
    code = f"""
import sys
import numpy as np
import shardtensor as st
from shardtensor.core import ABOVE

x, y = st.arange(3), st.arange(3, device=st.devices()[0])
print(set(ABOVE), np.add(x, 1).tolist(), set(ABOVE))
print(x.__array_namespace__() is st, next(iter(x)).item(), x.cumsum().tolist(), y.__dlpack_device__())
print(np.from_dlpack(y).tolist(), np.concatenate([x, x]).tolist(), np.linalg.norm(st.asarray([3.0, 4.0])).item())
np.subtract(x, 1, out=x)
x.tofile({str(tmp_path / "x")!r})
print(x.tolist(), np.fromfile({str(tmp_path / "x")!r}, x.dtype).tolist(), "compiled" in ABOVE, "described" in ABOVE)
print(repr(y), "described" in ABOVE)
"""
    assert output_of(new_process("-c", code)).splitlines() == [
        "{'array_namespace'} [1, 2, 3] {'array_namespace'}",
        "True 0 [0, 1, 3] (1, 0)",
        "[0, 1, 2] [0, 1, 2, 0, 1, 2] 5.0",
        "[-1, 0, 1] [-1, 0, 1] False False",
        "ShardedTensor([0, 1, 2], device=numpy:0) True",
    ]


def test_chapters_that_are_imported_as_a_whole_define_operators_only() -> None:
    """A type checker treats all names that `import *` finds as public; at runtime these are the operators."""
    chapters = re.findall(r"^from (\S+) import \*$", (PACKAGE / "public.py").read_text(), re.MULTILINE)
    assert "shardtensor.functions.standard.elementwise" in chapters
    for chapter in chapters:
        defined = {name for name in names_of(ast.parse(MODULES[chapter].read_text())) if not name.startswith("_")}
        assert defined == set(sys.modules[chapter].__all__), chapter
        assert defined <= set(OPS), chapter


def names_of(tree: ast.Module) -> Iterator[str]:
    """The names that the statements of a module define, without those that it imports."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                yield target.id


# -- what an import does ---------------------------------------------------------------------------


def test_import_loads_only_numpy_and_itself() -> None:
    code = (
        "import sys, threading, json, numpy; before = set(sys.modules); import shardtensor, shardtensor.backend.registry as b;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before};"
        "print(json.dumps([sorted(new - set(sys.stdlib_module_names)), threading.active_count(), sorted(b._loaded)]))"
    )
    new, threads, loaded = json.loads(output_of(new_process("-c", code)))
    assert set(new) <= {"numpy", "shardtensor"}  # parts of NumPy that it loads on use
    assert threads == 1
    assert loaded == []


@pytest.mark.slow
def test_import_takes_less_than_twice_numpys(tmp_path: Path) -> None:
    """The least processor time of several new processes is compared, with compiled bytecode for both, because the
    machine may be busy.
    """

    def least(modules: tuple[str, ...], count: int) -> list[float]:
        times: dict[str, list[float]] = {module: [] for module in modules}
        for _ in range(count):
            for module, seen in times.items():
                code = f"import time; t = time.process_time(); import {module}; print(time.process_time() - t)"
                seen.append(float(output_of(new_process("-c", code, PYTHONPYCACHEPREFIX=str(tmp_path)))))
        return [min(seen) for seen in times.values()]

    least(("numpy", "shardtensor"), 1)  # It writes the bytecode.
    ratios = []
    while len(ratios) < 12 and (not ratios or ratios[-1] >= 2):  # Other tests slow down some rounds.
        numpys, ours = least(("numpy", "shardtensor"), 3)
        ratios.append(ours / numpys)
    assert ratios[-1] < 2, ratios
