"""The layers: packages import from lower ones only, without cycles; plugins import the protocol; imports are cheap."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import shardtensor as st
import shardtensor.functions.building.scatter
import shardtensor.functions.building.special
import shardtensor.functions.ufunc_protocol.ufunc_methods
import shardtensor.random
from shardtensor.core import OPS
from tests.scripts import ROOT, new_process, output_of

PACKAGE = ROOT / "shardtensor"

LAYERS = [
    "errors", "hint_tables", "hints", "places", "tracebacks", "signatures", "sequences", "core", "host", "backend", "sharding", "tensor", "communication", "functions", "fft", "lib", "linalg", "random", "tree", "checkpoint_policies", "einops", "distributed", "interpreters", "spmd", "",
    "engine", "job_output", "launcher", "demo", "testing", "cli", "__main__",
]  # fmt: skip
"""From the lowest to the highest; the empty name is the package itself."""

LATE = {"shardtensor.sharding.visualize", "shardtensor.sharding.html", "shardtensor.demo"}
"""Modules that are loaded on use, by functions of modules below them."""

FOR_TYPES = {f"shardtensor.tensor.{m}": {"shardtensor.tensor.tensor"} for m in ("methods", "numpy_protocols")}
"""Imports for type checkers only: the type that operators and methods return is declared above them."""


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer_of(module: str) -> int:
    return LAYERS.index(module.partition(".")[2].partition(".")[0])


@functools.cache
def imports_of(path: Path) -> set[str]:
    """The modules of the package that a file imports, anywhere, for types too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "shardtensor":
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                found.add(module if module in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "shardtensor"}
    return found


def test_packages_import_only_from_those_before_them() -> None:
    upward = {
        (module, other)
        for module, path in MODULES.items()
        for other in imports_of(path) - LATE
        if layer_of(other) > layer_of(module)
    }
    assert upward == set()


def test_no_modules_import_each_other_in_a_cycle() -> None:
    graph = {m: imports_of(path) - LATE - FOR_TYPES.get(m, set()) - {m} for m, path in MODULES.items()}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


def test_execution_does_not_depend_on_whether_transfers_are_recorded() -> None:
    """Outside of the communication and of the interpreter that records, only inferences ask; see architecture.md."""
    found = set()
    for module, path in MODULES.items():
        if module.startswith("shardtensor.communication.") or module == "shardtensor.interpreters.recording":
            continue
        for function in ast.walk(ast.parse(path.read_text())):
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
    allowed = {"shardtensor.backend", "shardtensor.errors"}
    assert {path: imported - allowed for path, imported in found.items() if imported - allowed} == {}


@pytest.mark.parametrize("name", ["rules", "copy_plan", "layout", "mesh", "spec", "index"])
def test_the_arithmetic_of_layouts_touches_no_array(name: str) -> None:
    assert ".xp" not in (PACKAGE / "sharding" / f"{name}.py").read_text()


# -- public names ----------------------------------------------------------------------------------


def test_the_package_shows_its_public_names_only() -> None:
    assert dir(st) == sorted(st.__all__)
    assert dir(st.distributed) == sorted(st.distributed.__all__)
    assert all(hasattr(st, name) for name in st.__all__)


def test_every_operator_is_exported_or_listed_here() -> None:
    """Operators that users reach through methods and protocols only."""
    internal = {"assemble", "dlpack_device", "gather", "getitem", "setitem", "to_dlpack", "to_host", "transfer_to"}
    internal |= {
        "copy",
        "put",
        "scatter_add",
        "take_rows",
        "rows_at",
        "split_over",
        "unsqueeze",
        "view",
        "check_equal",
        "map_shards",
        "contract",
    }
    internal |= {"branch", "conditional_loop", "counted_loop", "name"}
    internal |= {"add_partials", "partial_sums", "place_result"}
    internal |= {"with_halos", "with_windows", "convolve_part", "coordinate", "spanned"}
    internal |= {"accumulated", "bitcast", "exponent", "fold", "mantissa", "running", "segments", "updated"}
    internal |= {"counts_between", "counts_of_integers", "take_along_split", "elements_of_ranks", "between", "words"}
    internal |= {"nan_quantiles", "searchsorted_split", "isin_sorted", "padded", "central_differences"}
    internal |= {"interpolated", "mapped_lines", "lines_applied", "packed", "unpacked", "convolved"}
    internal |= {"bessel_i1", "gamma_slope", "lines_copied", "mills_ratio"}
    internal |= {"chirp_filter", "fft_added", "fft_chirped", "fft_columns", "fft_of_real", "fft_packed"}
    internal |= {"fft_real_columns"}
    internal |= {"fft_rotated", "fft_to_real", "fft_transposed", "fft_unpacked", "tall_qr", "tall_r"}
    internal |= {"blocked_cholesky", "blocked_inv", "blocked_slogdet", "blocked_solve", "blocked_qr"}
    internal |= {"least_squares", "draws_of_examples", "scatter_add_each"}
    assert set(OPS) - {*st.__all__, *st.linalg.__all__, *st.fft.__all__, *st.random.__all__} == internal


def test_modules_that_are_imported_on_use_have_the_names_that_type_checkers_see() -> None:
    (block,) = [
        node
        for node in ast.parse((PACKAGE / "__init__.py").read_text()).body
        if isinstance(node, ast.If) and node.orelse
    ]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom) and "." in str(node.module)]
    seen = {alias.name: node.module for node in imports for alias in node.names} | {"visualize_sharding": None}
    assert seen == {**OPS.chapters, "visualize_sharding": None}
    for name, module in OPS.chapters.items():
        assert getattr(st, name) is getattr(importlib.import_module(module), name)


def test_an_operator_of_a_module_that_is_not_imported_yet_is_found() -> None:
    code = "import sys, numpy as np, shardtensor as st; x = st.asarray([3, 1]); m = 'shardtensor.functions.standard.sorting'; "
    code += "assert m not in sys.modules; x.sort(); assert m in sys.modules; print(np.vstack([x, x]).tolist())"
    assert output_of(new_process("-c", code)) == "[[1, 3], [1, 3]]\n"


def test_chapters_that_are_imported_as_a_whole_define_operators_only() -> None:
    """A type checker treats all names that `import *` finds as public; at runtime these are the operators."""
    chapters = re.findall(r"^from (\S+) import \*$", (PACKAGE / "__init__.py").read_text(), re.MULTILINE)
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
