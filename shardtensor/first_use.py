"""Imports on first use: the names that a package offers, and the module of each, without importing these modules.

The names are listed by the import statements of a module, such as `shardtensor.public`, which type checkers and editors
read as any other module, and tools that collect the modules of a program, too. So each name is written once, and the
list is read from cached bytecode, in a fraction of a millisecond.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import InspectLoader


def modules_of_names(table: str) -> dict[str, str]:
    """Returns the names that a module imports, each with the full name of the module from which it does.

    The statements are executed, but import only the modules of which all names are imported.

    Args:
        table: the full name of the module. It has no other statements than ``from module import name as name, …``,
            ``from module import *`` and ``import package.name as name``, of which the module is ``package.name``.

    >>> from shardtensor.first_use import modules_of_names
    >>> modules_of_names("shardtensor.public")["bincount"]
    'shardtensor.functions.counts'
    """
    loader = cast("InspectLoader", importlib.util.find_spec(table).loader)  # type: ignore[union-attr]  # It exists.
    modules: dict[str, str] = {}
    exec(loader.get_code(table), {"__builtins__": {"__import__": _imported}}, modules)  # type: ignore[arg-type]
    del modules["__doc__"]
    return modules


def _imported(module: str, scope: Any, local: Any, names: Sequence[str] | None, level: int) -> SimpleNamespace:
    """Returns what an import statement gets in place of the module: an object of which each name that it imports has the
    name of the module as its value.
    """
    if names == ("*",):
        names = importlib.import_module(module).__all__
    elif names is None:  # `import package.name as name`
        names = (module.rpartition(".")[2],)
    return SimpleNamespace(__all__=names, **dict.fromkeys(names, module))
