"""The names that packages export: each is written once, in an import statement ``from module import name as name``.

For names that are imported on first use, these statements are a module of their own, such as `shardtensor.public`, of
which the package takes the names and the modules without importing them. Type checkers and editors read it as any other
module, and tools that collect the modules of a program, too. Python caches its bytecode, so that this takes a fraction
of a millisecond.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import InspectLoader


def modules_of_names(table: str) -> dict[str, str]:
    """Returns the names that a module imports, each with the full name of the module from which it does.

    The statements are executed, but import only the modules of which all names are imported.

    Args:
        table: the full name of the module. It has no other statements than ``from module import name as name, …``,
            ``from module import *`` and ``import package.name as name``, of which the module is ``package.name``.

    >>> from shardtensor.exports import modules_of_names
    >>> modules_of_names("shardtensor.public")["bincount"]
    'shardtensor.functions.statistics.counts'
    """
    loader = cast("InspectLoader", importlib.util.find_spec(table).loader)  # type: ignore[union-attr]  # It exists.
    modules: dict[str, str] = {}
    exec(loader.get_code(table), {"__builtins__": {"__import__": _imported}}, modules)  # type: ignore[arg-type]
    del modules["__doc__"]
    return modules


def _imported(module: str, scope: Any, local: Any, names: Sequence[str] | None, level: int) -> SimpleNamespace:
    """Returns what an import statement gets in place of the module: an object on which each name that it imports is the
    name of the module.
    """
    if names == ("*",):
        names = importlib.import_module(module).__all__
    elif names is None:  # `import package.name as name`
        names = (module.rpartition(".")[2],)
    return SimpleNamespace(__all__=names, **dict.fromkeys(names, module))


def exported(scope: Mapping[str, Any]) -> list[str]:
    """Returns the names that a module exports, as its ``__all__``, in alphabetic order: those that do not begin with an
    underscore, except those of modules.

    Args:
        scope: the global variables of the module, which imports what it does not export under names with underscores.
    """
    return sorted(name for name, value in scope.items() if name[0] != "_" and not isinstance(value, ModuleType))
