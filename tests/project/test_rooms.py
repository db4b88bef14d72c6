"""The rooms: names and sizes of modules, the charters of packages, and the paths that pages and docstrings name."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections import Counter, defaultdict

from tests.project.test_layers import MODULES, imports_of
from tests.scripts import ROOT

PACKAGES = {name: path for name, path in MODULES.items() if path.name == "__init__.py"}
FILES = {name: path for name, path in MODULES.items() if name not in PACKAGES}

SAME_NAMES = {
    "distributed": "`st.distributed`, and the decorator of algorithms, whose path the pages show to users",
    "public": "`shardtensor` and `shardtensor.testing` each write their public names once",
}
"""The names that several modules have, and why."""

SMALL = {
    "shardtensor.__main__": "Python runs it: `python -m shardtensor`",
    "shardtensor.communication.local_engine": "an entry point names it",
    "shardtensor.engine": "a public module, which the authors of engines import",
    "shardtensor.files.ahead": "threads, of which the formats know nothing",
    "shardtensor.functions.batching.batched_drawing": "the rows of one subject, as those of indexing and searching are",
    "shardtensor.functions.placement.names": "an operator; the public module of policies shows policies only",
    "shardtensor.interpreters.partial_sum_reads": "it runs plans, which `execution.linear` is a part of: a cycle else",
    "shardtensor.spmd.scheduling.breakpoints": "it replaces a hook of Python, and knows nothing of the scheduler",
    "shardtensor.spmd.scheduling.helper_delays": "a memory between maps, which knows nothing of the scheduler",
    "shardtensor.tensor.flat": "a class that users get, as `flags` is: no method of tensors",
    "shardtensor.testing.public": "the public names, which are imported on first use",
    "shardtensor.testing.suite": "it is imported on first use, because it loads pytest and hypothesis",
}
"""The modules of less than 60 lines that at most one other module imports, and why they are modules."""

EXCLUDED = {
    "interpreters.execution": ["interpreters"],
    "interpreters.jit.c": ["interpreters.jit."],
    "interpreters.jit.cuda": ["interpreters.jit."],
    "interpreters.jit.grouping": ["interpreters.jit."],
    "interpreters.jit.kernels": ["interpreters", "interpreters.jit."],
    "interpreters.jit.rewrites": ["interpreters.jit.", "interpreters.jit.c", "interpreters.jit.cuda", "interpreters.jit.kernels"],
    "interpreters.programs": ["interpreters.batching", "interpreters.differentiation", "interpreters.jit"],
    "interpreters.views": ["interpreters"],
    "interpreters.writes": ["interpreters"],
    "interpreters.control_flow": ["interpreters.batching", "interpreters.differentiation"],
    "functions.fft": ["functions"],
    "pictures": ["interpreters", "spmd"],
    "spmd.maps": ["interpreters.batching", "interpreters.differentiation"],
    "spmd.scheduling": ["functions", "interpreters"],
}  # fmt: skip
"""For each package what it must not import, as its docstring says: packages and, with a dot, their own modules only."""

ALLOWED = {
    "functions.fft": ["functions.standard"],
    "interpreters.views": ["interpreters.execution"],
    "interpreters.writes": ["interpreters.execution", "interpreters.views"],
}
"""The exceptions to `EXCLUDED`."""


@functools.cache
def importers() -> dict[str, set[str]]:
    """The modules that import each module."""
    found = defaultdict(set)
    for module, path in MODULES.items():
        for other in imports_of(path) - {module}:
            found[other].add(module)
    return found


def test_no_two_modules_share_a_name() -> None:
    """A traceback and a search by name lead to one module."""
    counts = Counter(path.stem for path in FILES.values())
    assert {name for name, count in counts.items() if count > 1} == SAME_NAMES.keys()


def test_small_modules_have_several_importers_or_a_reason() -> None:
    sizes = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    advice = "move it into the module that imports it, or add the reason why it is one to SMALL"
    assert {name for name, size in sizes.items() if size < 60 and len(importers()[name]) < 2} == SMALL.keys(), advice


def test_no_folder_has_more_than_24_modules() -> None:
    counts = Counter(path.parent for path in FILES.values())
    assert {str(folder): count for folder, count in counts.items() if count > 24} == {}


def test_packages_of_several_modules_have_charters() -> None:
    """The docstring of a package is more than a title, and says what must not be imported."""
    counts = Counter(path.parent for path in FILES.values())
    docstrings = {
        package: ast.get_docstring(ast.parse(path.read_text())) or ""
        for package, path in PACKAGES.items()
        if counts[path.parent] > 3 and package != "shardtensor"  # whose docstring is for users
    }
    short = {package for package, text in docstrings.items() if len(text.split()) < 40 or "import" not in text.lower()}
    assert short == set()


def test_the_architecture_names_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert {name for name, path in PACKAGES.items() if f"`{path.parent.name}/`" not in page} == {"shardtensor"}


def is_in(module: str, package: str) -> bool:
    """Whether a module is in a package; with a dot at its end, whether it is there itself, in no package of it."""
    if package.endswith("."):
        return module in FILES and module.rpartition(".")[0] == f"shardtensor.{package[:-1]}"
    return f"{module}.".startswith(f"shardtensor.{package}.")


def test_packages_import_nothing_that_their_docstrings_exclude() -> None:
    assert {f"shardtensor.{name}" for name in EXCLUDED} <= PACKAGES.keys()
    found = {
        (module, other)
        for package, excluded in EXCLUDED.items()
        for module, path in MODULES.items()
        if is_in(module, package)
        for other in imports_of(path)
        if any(is_in(other, name) for name in excluded)
        if not any(is_in(other, name) for name in (package, *ALLOWED.get(package, ())))
    }
    assert found == set()


# -- names in texts --------------------------------------------------------------------------------

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "benchmarks" / "README.md"]

NO_MODULES = {"shardtensor.backends", "shardtensor.engines", "shardtensor.numpy"}
"""Names that texts use for something else: groups of entry points, and the module that users of JAX would look for."""

NO_FILES = {"benchmarks/results/gpu.txt"}
"""Files that a command of a page writes."""

NOT_OF_MODULES = {("shardtensor/hint_tables/attribute_names.py", f"mesh.{name}") for name in ("local_devices", "size")}
"""Attributes of a mesh, which begin as those of the module `mesh` do."""

FOLDERS = [ROOT, *[ROOT / name for name in ("shardtensor", "backends", "docs", "benchmarks")]]
"""Paths on pages are relative to one of these, or the last parts of that of a module."""


@functools.cache
def texts() -> dict[str, str]:
    """The pages, and the sources of the library and its plugins, by their paths."""
    sources = [path for folder in ("shardtensor", "backends") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in [*PAGES, *sources]}


@functools.cache
def exists(name: str) -> bool:
    """Whether a dotted name is that of a module, or of an attribute of one."""
    parts = name.split(".")
    count = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in MODULES)
    value = importlib.import_module(".".join(parts[:count]))
    for part in parts[count:]:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def test_the_modules_that_texts_name_exist() -> None:
    """Names such as `shardtensor.core.bind`; and those that begin with a module, such as `plan_cache.planned`."""
    named = {
        (path, name) for path, text in texts().items() for name in re.findall(r"(?<![\w./])shardtensor(?:\.\w+)+", text)
    }
    missing = {(path, name) for path, name in named if name not in NO_MODULES and not exists(name)}
    others = {"numpy", "einops", "random", "fft", "linalg", "tree"}  # other libraries, and `np.fft`
    for path, text in texts().items():
        for name in re.findall(r"(?<!`)`([a-z_]+(?:\.\w+)+)`(?!`)", text) if path.endswith(".py") else ():
            first, _, rest = name.partition(".")
            modules = [module for module in MODULES if module.rpartition(".")[2] == first and first not in others]
            if modules and not any(exists(f"{module}.{rest}") for module in modules) and path.startswith("shardtensor"):
                missing.add((path, name))
    assert missing == NOT_OF_MODULES


def test_the_files_that_pages_name_exist() -> None:
    """Paths in code, such as `shardtensor/core.py`, `spmd/maps/` or, on the pages for developers, `recording.py`."""
    modules = [f"/{path.relative_to(ROOT)}" for path in MODULES.values()]
    modules += [path.removesuffix("__init__.py") for path in modules if path.endswith("__init__.py")]
    missing = set()
    for page in PAGES:
        developers = page.stem in ("architecture", "contributing") or page.stem.startswith("adding_")
        for name in re.findall(r"`([\w/.]*\w(?:\.py|/))`", page.read_text()):
            is_there = any((folder / name).exists() for folder in FOLDERS) if "/" in name else not developers
            if not is_there and not any(path.endswith(f"/{name}") for path in modules):
                missing.add((page.name, name))
    for path, text in texts().items():
        for name in re.findall(r"(?<![\w./:])(?:shardtensor|tests|benchmarks|docs|backends)/[\w./]*\w", text):
            if name not in NO_FILES and not (ROOT / name).exists():
                missing.add((path, name))
    assert missing == set()


def test_the_docstrings_of_packages_name_what_exists() -> None:
    defined = {name.rpartition(".")[2] for name in MODULES}
    for path in MODULES.values():
        text = path.read_text()
        defined.update(re.findall(r"^ *(?:class|def) (\w+)", text, re.MULTILINE))
        defined.update(re.findall(r"^(\w+)(?: =|:)", text, re.MULTILINE))
    missing = {
        (package, name)
        for package, path in PACKAGES.items()
        for name in re.findall(r"(?<!`)`([\w.]+)`(?!`)", ast.get_docstring(ast.parse(path.read_text())) or "")
        if name.partition(".")[0] not in ("shardtensor", "st", "numpy", "jax") and not {*name.split(".")} <= defined
    }
    assert missing == set()
