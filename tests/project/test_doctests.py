"""Every example in a docstring prints the output that is shown, and every public name has an example."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import numpy as np
import pytest
import shardtensor_numpy

import shardtensor as st
from shardtensor.backend import protocol, registry
from shardtensor.core import OPS

NAMES = [m.name for m in pkgutil.walk_packages(st.__path__, "shardtensor.") if not m.name.endswith("__main__")]
MODULES = [importlib.import_module(n) for n in NAMES] + [shardtensor_numpy]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_examples(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        protocol, "device_counts", {}
    )  # the example of `set_num_devices` sets no number for other tests
    monkeypatch.setattr(registry, "device_counts", protocol.device_counts)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags)
    finder = doctest.DocTestFinder()
    tests = finder.find(module, module.__name__, extraglobs={"st": st, "np": np})
    # Operators are compiled: doctest does not see that they belong to the module.
    for name, op in OPS.items():
        if op.dispatch.__module__ == module.__name__:
            parser = doctest.DocTestParser()
            tests.append(parser.get_doctest(inspect.getdoc(op.dispatch) or "", {"st": st, "np": np}, name, None, 0))
    for test in filter(lambda test: test.examples, tests):  # A run of no example takes a millisecond, too.
        result = runner.run(test)
        assert result.failed == 0, f"{test.name}: see the output"


NEED_NO_EXAMPLE = {
    "HOST", "OPS", "Backend", "P", "Shard", "Transfer", "TransferLog", "local_devices", "device_count", "current_device",
}  # fmt: skip


def documented(name: str) -> bool:
    """Whether a public name has a docstring, and an example if it needs one."""
    thing = getattr(st, name)
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return bool(thing.__doc__)
    if name in ("HOST", "OPS") or thing is getattr(np, name, ()):  # dtypes and constants
        return True
    text = inspect.getdoc(thing) or ""
    return bool(text) and (name in NEED_NO_EXAMPLE or ">>>" in text)


def test_public_names_are_documented() -> None:
    assert [name for name in st.__all__ if not name.startswith("_") and not documented(name)] == []
