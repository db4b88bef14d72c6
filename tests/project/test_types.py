"""The types of the public functions for type checkers and editors: strict programs see tensors, never Any."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import shutil
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jedi
import pytest

import shardtensor as st
from tests.project import typed_program
from tests.project.test_declarations import ELEMENTWISE, ROW
from tests.scripts import new_process

PACKAGE = Path(st.__file__).parent
ROOT, BACKENDS = PACKAGE.parent, PACKAGE.parent / "backends"
PROGRAM = Path(typed_program.__file__)

REVEALED = {
    # expression: its type, without the names of modules
    "x + 1": "ShardedTensor",
    "1 + x": "ShardedTensor",
    "x @ x": "ShardedTensor",
    "x > 1": "ShardedTensor",
    "x == x": "ShardedTensor",
    "x.sum()": "ShardedTensor",
    "round(x.mean(), 2)": "float",
    "st.device_put(np.ones(3))": "ShardedTensor",
    "st.device_put([np.ones(3)])": "list[ShardedTensor]",
    "st.device_put((x, {'a': x}))": "Any",
    "st.device_put([x], [st.P()])": "list[ShardedTensor]",
    "st.reshard(x, st.P())": "ShardedTensor",
    "st.with_sharding_constraint(x, st.P())": "ShardedTensor",
    "st.reshard({'a': x}, {'a': st.P()})": "Any",
    "st.pmap(total, [x])": "list[ShardedTensor]",
    "st.pmap(st.exp, x, axis_name='i')": "ShardedTensor",
    "st.pmap(total, x)": "ShardedTensor",
    "st.pmap(both, x)": "Any",
    "st.pmap(lambda x: x, [x])": "Any",
    "st.device_put(bare)": "ShardedTensor",
    "st.pmap(twice, [x])": "list[ShardedTensor]",
    "st.pmap(twice, x)": "ShardedTensor",
    "st.pmap(twice, bare)": "ShardedTensor",
    "st.pmap(twice, x, 3)": "ShardedTensor",
    "st.pmap(twice)([x])": "list[ShardedTensor]",
    "st.pmap(twice, axis_name='i')(bare)": "ShardedTensor",
    "st.pmap(pair, [x])": "Any",
    "st.pmap(unknown, [x])": "Any",
    "st.smap(twice, x)": "ShardedTensor",
    "st.smap(unknown, x)": "Any",
    "st.map_overlap(twice, x, depth=1, boundary=0)": "ShardedTensor",
    "of_bare(x)": "ShardedTensor",
    "st.shard_map(twice, in_specs=st.P('i'), out_specs=st.P('i'))": "def (*Any, **Any) -> ShardedTensor",
    "st.shard_map(unknown, in_specs=st.P('i'), out_specs=st.P('i'))": "def (*Any, **Any) -> Any",
    "st.smap(total, x, axes=[0])": "ShardedTensor",
    "st.psum(np.ones(3), 'i')": "ndarray[tuple[Any, ...], dtype[Any]]",
    "st.psum(1, 'i')": "int",
    "st.all_gather({'a': 1.5}, 'i', tiled=True)": "dict[str, float]",
    "of_block": "def (*Any, **Any) -> ShardedTensor",
    "of_tensor": "def (x: ShardedTensor, *, by: int =) -> ShardedTensor",
    "st.shard_map(both, in_specs=st.P('i'), out_specs=st.P('i'))": "def (*Any, **Any) -> Any",
}

MISTAKES = {
    # statement: the code of the error
    "of_tensor('text')": "arg-type",
    "of_tensor(x, times=2)": "call-arg",
    "st.psum(x, 'i', axis=0)": "call-overload",
    "st.pmap(total, x, axis_names='i')": "call-overload",
    "st.sum(x, axes=0)": "call-arg",
    "st.arrange(3)": "attr-defined",
}

USER = """
from typing import Any

import numpy as np
import numpy.typing as npt
import shardtensor as st

x = st.arange(4.0)

@st.shard_map(in_specs=st.P("i"), out_specs=st.P("i"))
def of_block(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return st.psum(x, "i")

@st.shard_map(in_specs=st.P("i"), out_specs=st.P("i"))
def of_tensor(x: st.ShardedTensor, *, by: int = 1) -> st.ShardedTensor:
    return x * by

def total(x: npt.NDArray[np.float64]) -> np.float64:
    return np.float64(x.max())

def both(x: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], np.float64]:
    return x, total(x)

bare: np.ndarray = np.ones(3)

def twice(x: np.ndarray) -> np.ndarray:
    return x * 2

def pair(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x, x

def unknown(x: Any) -> Any:
    return x

@st.shard_map(in_specs=st.P("i"), out_specs=st.P("i"))
def of_bare(x: np.ndarray) -> np.ndarray:
    return x
"""


NEW_OPERATOR = {
    # statement of a program that uses the operator `softsign`, which the library does not have: what mypy says
    "reveal_type(st.softsign(st.ones(3)))": 'note: Revealed type is "shardtensor.tensor.tensor.ShardedTensor"',
    "st.softsign(st.ones(3), 1)": 'error: Too many arguments for "softsign"  [call-arg]',
    "st.softsing(st.ones(3))": 'error: Module has no attribute "softsing"; maybe "softsign"?  [attr-defined]',
    "st.np": 'error: Module has no attribute "np"  [attr-defined]',
}


def lines_of_mypy(folder: Path, programs: dict[str, list[str]]) -> list[tuple[str, str, str]]:
    """Returns the path, the line of code and the text of each line that mypy prints, with the project's configuration.

    It reads a copy of the library that declares the operator `softsign` as the documentation does.
    """
    for package in (PACKAGE, BACKENDS):
        shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / ELEMENTWISE.relative_to(ROOT)).open("a") as file:
        file.write(f"\n\n{ROW}")
    shutil.copy2(ROOT / "pyproject.toml", folder)
    shutil.copy2(PROGRAM, folder)
    for name, lines in programs.items():
        (folder / name).write_text("\n".join(lines))
    files = [PACKAGE.name, BACKENDS.name, PROGRAM.name, *programs]
    cache = str(ROOT / ".mypy_cache" / "tests")
    done = new_process("-m", "mypy", "--no-pretty", "--cache-dir", cache, *files, cwd=folder)
    found = re.findall(r"^(.*?):(\d+): (.*)$", done.stdout, re.MULTILINE)
    assert len(found) == len(done.stdout.splitlines()) - 1, done.stdout + done.stderr
    return [(path, (folder / path).read_text().splitlines()[int(line) - 1], text) for path, line, text in found]


def uses_of_names(module: types.ModuleType) -> list[str]:
    """A program that uses each public name of a module as an attribute, by its import and, but for modules, by ``*``."""
    path, names = module.__name__, module.__all__
    by_star = [name for name in names if name[0] != "_" and not inspect.ismodule(getattr(module, name))]
    imports = [f"import {path} as module", f"from {path} import *", *[f"from {path} import {n} as _{n}" for n in names]]
    return [*imports, *[f"module.{name}" for name in names], *by_star]


@pytest.mark.slow
def test_mypy_finds_no_mistakes_but_those_of_users_and_sees_tensors(tmp_path: Path) -> None:
    """One run checks all, because each reads NumPy and the library: the library itself, a strict program that calls every
    public function, the types of expressions, mistakes, and the use of an operator that was declared in one place.
    """
    user = [*USER.splitlines(), *[f"reveal_type({expression})" for expression in REVEALED], *MISTAKES]
    programs = {"user.py": user, "extended.py": ["import shardtensor as st", *NEW_OPERATOR]}
    for module in (st, st.distributed, st.fft, st.linalg, st.random, st.testing):
        programs[f"names_of_{module.__name__.rpartition('.')[2]}.py"] = uses_of_names(module)
    revealed, errors, extended, others = {}, {}, {}, []
    for path, source, text in lines_of_mypy(tmp_path, programs):
        if path == "extended.py":
            extended[source] = text
        elif path != "user.py":
            others.append((path, source, text))
        elif found := re.fullmatch(r'note: Revealed type is "(.*)"', text):
            revealed[source.removeprefix("reveal_type(")[:-1]] = re.sub(r"\b[\w.]+\.(?=\w)", "", found[1])
        elif text.startswith("error: "):
            errors.setdefault(source, text.rpartition("[")[2].rstrip("]"))
    assert (others, revealed, errors, extended) == ([], REVEALED, MISTAKES, NEW_OPERATOR)


VARY = {
    "atleast_1d", "atleast_2d", "atleast_3d", "average", "fromfunction", "indices", "intersect1d", "polyfit", "unique",
    "checkpoint_name", "grad", "hessian", "jacfwd", "jacrev", "jvp", "linearize", "remat", "stop_gradient",
    "accumulate", "jit", "mixed_precision", "value_and_grad", "vjp", "vmap",
}  # fmt: skip
"""Functions that return one tensor or several, depending on the number or the values of their arguments, and those that
return what other functions do.
"""


def test_public_functions_are_in_the_strict_program_or_return_a_type() -> None:
    used = {
        node.attr
        for node in ast.walk(ast.parse(PROGRAM.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "st"
    }
    functions = {name for name in st.__all__ if inspect.isfunction(getattr(st, name))}
    untyped = {
        name for name in functions - used if "Any" in str(inspect.signature(getattr(st, name)).return_annotation)
    }
    assert untyped == VARY
    assert {"sum", "matmul", "pmap", "smap", "shard_map", "map_overlap", "psum", "device_put"} <= used


def matches(value: Any, kind: Any) -> bool:
    """Whether a value has the type that the program asserts."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(matches(item, arguments[0]) for item in value)
    if origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        return len(value) == len(kinds) and all(map(matches, value, kinds))
    if origin is dict:
        return isinstance(value, dict) and all(matches(item, arguments[1]) for item in value.values())
    return isinstance(value, kind)


def test_the_values_have_the_types_that_the_strict_program_asserts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def assert_type(value: Any, kind: Any) -> Any:
        assert matches(value, kind), f"{type(value)} is not {kind}"
        seen.append(kind)
        return value

    monkeypatch.setattr(typing, "assert_type", assert_type)
    typed_program.main()
    assert len(seen) > 150


@pytest.mark.parametrize(
    "expression", ["(x + 1)", "x.sum()", "(x @ x)", "x.T", "x[1:]", "st.sum(x)", "st.device_put(x)", "(x + 1).mean()"]
)
@pytest.mark.parametrize("live", [True, False], ids=["of values", "of source"])
def test_editors_complete_the_methods_of_results(expression: str, live: bool) -> None:
    code = f"{expression}.resh"
    if live:
        completions = jedi.Interpreter(code, [{"st": st, "x": st.arange(4.0)}]).complete()
    else:
        completions = jedi.Script(f"import shardtensor as st\nx = st.arange(4.0)\n{code}").complete()
    assert [completion.name for completion in completions] == ["reshape", "reshard"]


def test_completion_shows_the_public_names_only() -> None:
    names = {completion.name for completion in jedi.Interpreter("st.", [{"st": st}]).complete()}
    assert {name for name in names if not name.startswith("__")} == {n for n in st.__all__ if not n.startswith("__")}


def public_functions() -> Iterator[tuple[str, Any]]:
    """Yields the public functions, and the methods of the public classes, with their names."""
    for name in st.__all__:
        value = getattr(st, name)
        within = value.__all__ if inspect.ismodule(value) else dir(value) if inspect.isclass(value) else ()
        for full, found in [(name, value), *[(f"{name}.{n}", getattr(value, n, None)) for n in within]]:
            if inspect.isroutine(found) and (getattr(found, "__module__", None) or "").startswith("shardtensor."):
                yield full, found


def test_help_shows_annotations_without_quotes() -> None:
    seen = set()
    for name, function in public_functions():
        signature = inspect.signature(function)
        annotations = [signature.return_annotation, *[p.annotation for p in signature.parameters.values()]]
        shown = [inspect.formatannotation(text) for text in annotations if text is not signature.empty]
        assert not [text for text in shown if text[0] in "'\""], name
        seen.add(name)
    assert {"sum", "pmap", "einsum", "linalg.norm", "random.normal", "ShardedTensor.reshape", "Backend.to_host"} <= seen
    assert "sum(x: ArrayLike, /, axis: _Axis = None" in pydoc.plain(pydoc.render_doc(st.sum))
    assert typing.get_type_hints(st.device_count) == {"backend": str | None, "return": int}


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(inspect.getfile(st)).parent / "py.typed").is_file()
