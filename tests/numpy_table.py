"""Generates the page `docs/numpy_functions.md`: how each function of NumPy computes with tensors, measured by one call.

``python -m tests.numpy_table`` writes the page.
"""

from __future__ import annotations

import dataclasses
import textwrap
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import shardtensor as st
from shardtensor.functions.algorithms.sample_sort import GATHERED
from tests.layouts import mesh_of
from tests.numpy_calls import METHODS, MODULES, NO_ARRAYS, Call, Operands, functions_of

PAGE = Path(__file__).parents[1] / "docs" / "numpy_functions.md"

DEVICES = 4

KINDS = {
    "distributed, nothing moves": "computed where the elements are",
    "distributed": "devices exchange elements or partial results; each receives at most its part of the largest operand or result",
    "distributed, more is exchanged": "some device receives more than that, but not all of the largest operand",
    "gathers": "some device receives all elements that it lacks of the largest operand",
    "creates": "takes no arrays: `st` has the function, which creates its result on the devices",
    "metadata": "shapes, dtypes and plans: no elements are read",
    "on the host": "the call reads the elements to the host",
    "NumPy's own": "takes no arrays: settings, files, dtypes and text",
    "refused": "an error says what to do instead",
}
"""The kinds of calls, in the order of the tables, with their explanations."""


@dataclasses.dataclass
class Measured:
    """The measurement of a call.

    Attributes:
        kind: one of `KINDS`.
        result: the result of the call.
        error: the text of the error if the call raised one.
    """

    kind: str
    result: Any = None
    error: str = ""


def measure(call: Call) -> Measured:
    """Measures a call with operands that are split by their first dimension over devices with separate memories."""
    mesh = mesh_of((DEVICES,), "checked")
    split = st.NamedSharding(mesh, st.P("x"))
    operands = Operands(lambda x: st.device_put(x, split))
    with warnings.catch_warnings(), np.errstate(all="ignore"), st.transfers() as log:
        warnings.simplefilter("ignore")
        try:
            result = call(operands)
            for leaf in leaves(result):
                if isinstance(leaf, st.ShardedTensor):
                    leaf.copy()  # For a view, this makes the transfers of reading it.
        except (AttributeError, TypeError, st.ShardTensorError) as error:
            known = isinstance(error, st.ShardTensorError)
            return Measured("refused", error=str(error) if known else f"{error}; np.asarray(x) has it")
    received: Counter[Any] = Counter()
    for record in log:
        if record.operator != "device_put":
            received[record.destination] += record.bytes
    read, most = received.pop(st.HOST, 0), max(received.values(), default=0)
    made = sum(leaf.nbytes for leaf in leaves(result) if isinstance(leaf, st.ShardedTensor))
    whole = max([x.nbytes for x in operands.used.values()], default=0)
    if not made and not most:
        kind = "on the host" if read else "metadata"
    elif not most:
        kind = "distributed, nothing moves"
    elif most <= max(whole, made) / DEVICES:
        kind = "distributed"
    else:
        kind = "gathers" if most >= whole * (DEVICES - 1) / DEVICES else "distributed, more is exchanged"
    return Measured(kind, result)


def leaves(result: Any) -> list[Any]:
    """Returns the items of nested tuples and lists."""
    if isinstance(result, (tuple, list)):
        return [leaf for item in result for leaf in leaves(item)]
    return [result]


def measure_all() -> dict[str, dict[str, Measured]]:
    """Measures every function of NumPy's modules, and every attribute of its arrays."""
    made = {
        title: {name: _measured(name, calls) for name in functions_of(module)}
        for title, (module, calls) in MODULES.items()
    }
    methods = {name: measure(call) for name, call in METHODS.items() if hasattr(np.ndarray, name)}
    return {**made, "numpy.ndarray": dict(sorted(methods.items()))}


def _measured(name: str, calls: dict[str, Call]) -> Measured:
    if name in NO_ARRAYS:
        creates = name in st.fft.__all__ or (hasattr(st, name) and name not in _OF_DTYPES)
        return Measured("creates" if creates else "NumPy's own")
    return measure(calls[name])


_OF_DTYPES = ("broadcast_shapes", "isdtype", "promote_types")


def page(found: dict[str, dict[str, Measured]]) -> str:
    """Returns the text of the page."""
    version = ".".join(np.__version__.split(".")[:2])
    introduction = _INTRODUCTION.format(version=version, devices=DEVICES, gathered=GATHERED // 1024)
    parts = [
        f"# NumPy's functions: what each one does here\n\n{_wrapped(introduction)}\n",
        "| kind | what a call does |\n|---|---|",
        *[f"| {kind} | {words} |" for kind, words in KINDS.items()],
    ]
    for title, rows in found.items():
        counts = Counter(row.kind for row in rows.values())
        parts.append(f"\n## {title}\n\n| kind | number | names |\n|---|--:|---|")
        for kind in KINDS:
            names = [name for name, row in rows.items() if row.kind == kind]
            if names:
                parts.append(f"| {kind} | {counts[kind]} | {', '.join(f'`{name}`' for name in names)} |")
        refused = {name: row.error for name, row in rows.items() if row.kind == "refused"}
        if refused:
            parts.append("\n| refused | error |\n|---|---|")
            parts += [f"| `{name}` | {error.replace('|', '/')} |" for name, error in refused.items()]
    return "\n".join(parts) + "\n"


def _wrapped(text: str) -> str:
    return "\n\n".join(textwrap.fill(part, 118) for part in text.split("\n\n"))


_INTRODUCTION = """\
What each function of NumPy {version} does with tensors: `np.f(x)` calls the function of that name in `st` where there is one. Each kind was measured
by one call, with operands that are split by their first dimension over {devices} devices with separate memories, on which
the counted transfers are those of a cluster. Another layout or size can need fewer transfers or more: `st.transfers`
counts them, and `st.explain` names them. (Functions that sort, and those of sets, gather small operands like these, of up to {gathered} KiB,
and exchange parts of larger ones.)

This page is generated: `python -m tests.numpy_table` writes it, and a test measures every call again."""


if __name__ == "__main__":
    PAGE.write_text(page(measure_all()))
