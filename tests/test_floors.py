"""Each module imports only from lower floors, wherever in the file; and the package imports lightly."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardtensor"

FLOORS = {
    "errors": -4, "host": -3, "interrupts": -2, "blas": -2, "pool": -1, "core": 0, "passes": 0, "trees": 0, "team": -1, "programs": 2, "world": 3,
    "backend": 1, "plugins": 2, "traffic": 2, "log": 3, "mesh": 3, "memories": 4, "sharding": 4,
    "rules": 5, "monoids": 5, "planner": 5, "collectives": 5, "value": 5,
    "protocols": 5, "indices": 6, "windows": 7, "tensor": 7, "operands": 8, "transfer": 9,
    "parking": 10, "exports": 8, "phantom": 4, "schedules": 6, "imagined": 10, "simulation": 23,
    "functions": 11, "picking": 11,
    "blocks": 12, "work": 12, "folds": 6, "plans": 13, "running": 14, "views": 15, "selection": 16, "edits": 17, "writes": 18,
    "named_axes": 5, "nesting": 6, "exchange": 10, "meetings": 11, "parallel": 12,
    "eager": 19, "on_phantom": 20, "spmd": 21, "outcomes": 20, "split_map": 22, "device_map": 22, "block_map": 22, "visualize": 23, "": 24, "demo": 25, "testing": 25,
    "cli": 26, "__main__": 27,
}  # fmt: skip

# Within a floor modules may look at one another, as long as they form no circle.
FUNCTIONS = [
    "elementwise", "statistical", "searching", "linear_algebra", "data_types", "manipulation", "creation", "indexing", "joining",
    "placement", "lists", "interchange",
]  # fmt: skip
TESTING = [
    "checked",
    "layouts",
    "cases",
    "kit",
    "devices",
    "arrays",
    "order",
    "ownership",
    "tensors",
    "collectives",
    "suite",
    "",
]
ROOMS = {"functions": FUNCTIONS, "testing": TESTING}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> list[tuple[str, bool]]:
    """The modules of the package that a file imports, and whether inside of a function or for types only."""
    tree = ast.parse(path.read_text())
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "shardtensor":
            inner = node.module.partition(".")[2]
            names = [inner] if inner else [a.name for a in node.names if (PACKAGE / f"{a.name}.py").exists()] or [""]
            found += [(n, id(node) in late) for n in names]
        elif isinstance(node, ast.Import):
            found += [
                (a.name.partition(".")[2], id(node) in late)
                for a in node.names
                if a.name.split(".")[0] == "shardtensor"
            ]
    return found


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_come_from_lower_floors(path: Path) -> None:
    name = name_of(path)
    floor = FLOORS[name.split(".")[0]]
    for other, late in imports_of(path):
        if late and other.split(".")[0] in ("visualize", "demo"):
            continue  # what draws is loaded when something is drawn
        room, mine = name.partition(".")[0], name.partition(".")[2]
        if room in ROOMS and other.startswith(f"{room}."):
            theirs = other.partition(".")[2]
            assert ROOMS[room].index(theirs) < ROOMS[room].index(mine), (name, other)
        else:
            assert FLOORS[other.split(".")[0]] < floor, (name, other)


def test_the_floors_are_all_there() -> None:
    assert {name_of(p).split(".")[0] for p in MODULES} == set(FLOORS)
    for room, names in ROOMS.items():
        assert {name_of(p).partition(".")[2] for p in MODULES if name_of(p).startswith(f"{room}.")} == set(names) - {""}


@pytest.mark.parametrize("path", sorted((ROOT / "backends").rglob("*.py")), ids=str)
def test_plugins_know_the_lowest_floor_alone(path: Path) -> None:
    assert {other for other, _ in imports_of(path)} <= {"backend", "errors"}


def test_pure_modules_touch_no_backend() -> None:
    for name in ("rules", "planner", "sharding", "mesh"):
        text = (PACKAGE / f"{name}.py").read_text()
        assert ".xp" not in text, name


def run(code: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("SHARDTENSOR")}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout


def test_import_loads_numpy_and_itself_alone() -> None:
    code = (
        "import sys, threading, json, numpy; before = set(sys.modules); import shardtensor, shardtensor.plugins as b;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before};"
        "print(json.dumps([sorted(new - set(sys.stdlib_module_names)), threading.active_count(), sorted(b._loaded)]))"
    )
    new, threads, loaded = json.loads(run(code))
    assert set(new) <= {"numpy", "shardtensor"}  # parts of NumPy that it loads on use
    assert threads == 1
    assert loaded == []


def test_import_takes_less_than_twice_numpys(tmp_path: Path) -> None:
    """Medians of fresh processes, in turn, with compiled bytecode for both."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE",)}
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    times: dict[str, list[float]] = {"numpy": [], "shardtensor": []}
    for i in range(8):
        for module, seen in times.items():
            code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
            out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
            if i:  # the first of each writes the bytecode
                seen.append(float(out.stdout))
    assert min(times["shardtensor"]) < 2 * min(times["numpy"])
