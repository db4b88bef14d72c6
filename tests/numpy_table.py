"""Generates the page `docs/numpy_functions.md`: how each function of NumPy computes with tensors, measured by one call.

``python -m tests.numpy_table`` writes the page.
"""

from __future__ import annotations

import dataclasses
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import shardtensor as st
from tests.layouts import mesh_of
from tests.numpy_calls import METHODS, MODULES, NO_ARRAYS, Call, Operands, functions_of, words

PAGE = Path(__file__).parents[1] / "docs" / "numpy_functions.md"

DEVICES = 4

SIZES = {"rows": 1 << 14, "side": 33**2}
"""The sizes of the operands: greater than those up to which operands are gathered because messages take longer."""

FEW = {"rows": 384, "side": 256}
"""The sizes for `STEEP`."""

STEEP = frozenset(words(
    "convolve correlate diagflat kron meshgrid outer poly polydiv place roots "  # the square of the size, or more
    "cond eig eigh eigvals eigvalsh matrix_rank pinv svd svdvals"  # the cube, on one device
))  # fmt: skip
"""The functions whose cost grows so fast with the size that they are measured with smaller operands."""

KINDS = {
    "distributed, nothing moves": "computed where the elements are",
    "distributed": "devices exchange elements or partial results; each receives at most its part of the largest operand or result",
    "distributed, more is exchanged": "some device receives more than that, but not all of the largest operand",
    "everything is exchanged": "some device receives as many bytes as all elements that it lacks of the largest operand: part by part, as products of matrices do, or at once where [the function needs it](differences.md#operators-that-may-hold-whole-operands)",
    "creates": "takes no arrays: `st` has the function, which creates its result on the devices",
    "metadata": "shapes, dtypes and plans: no elements are read",
    "on the host": "the call reads the elements to the host; so do `np.c_[…]`, `np.r_[…]` and `np.array([x, y])`: see [Coming from NumPy](from_numpy.md#functions-without-an-operator)",
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


def operands_of(name: str, place: Callable[[Any], Any] = lambda x: x) -> Operands:
    """Returns the operands with which a function is measured."""
    return Operands(place, **(FEW if name in STEEP else SIZES))


def measure(name: str, call: Call) -> Measured:
    """Measures a call with operands that are split by their first dimension over devices with separate memories."""
    mesh = mesh_of((DEVICES,), "checked")
    split = st.NamedSharding(mesh, st.P("x"))
    operands = operands_of(name, lambda x: st.device_put(x, split))
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
        kind = (
            "everything is exchanged" if most >= whole * (DEVICES - 1) / DEVICES else "distributed, more is exchanged"
        )
    return Measured(kind, result)


def leaves(result: Any) -> list[Any]:
    """Returns the items of nested tuples and lists."""
    if isinstance(result, (tuple, list)):
        return [leaf for item in result for leaf in leaves(item)]
    return [result]


def measured(title: str) -> dict[str, Measured]:
    """Measures every function of a module of NumPy, or every attribute of its arrays."""
    if title == ARRAYS:
        return {name: measure(name, call) for name, call in sorted(METHODS.items()) if hasattr(np.ndarray, name)}
    module, calls = MODULES[title]
    return {name: _measured(name, calls) for name in functions_of(module)}


def _measured(name: str, calls: dict[str, Call]) -> Measured:
    if name in NO_ARRAYS:
        creates = name in st.fft.__all__ or (hasattr(st, name) and name not in _OF_DTYPES)
        return Measured("creates" if creates else "NumPy's own")
    return measure(name, calls[name])


ARRAYS = "numpy.ndarray"
TITLES = (*MODULES, ARRAYS)

_OF_DTYPES = ("broadcast_shapes", "isdtype", "promote_types")


def page(sections: Iterable[str]) -> str:
    """Returns the text of the page."""
    introduction = _INTRODUCTION.format(
        version=".".join(np.__version__.split(".")[:2]), devices=DEVICES, steep=", ".join(f"`{name}`" for name in sorted(STEEP)),
        rows=f"{SIZES['rows']:,}", side=f"{SIZES['side']:,}", few=FEW["rows"], few_side=FEW["side"],
    )  # fmt: skip
    parts = [
        f"# NumPy's functions: what each one does here\n\n{_wrapped(introduction)}\n",
        "| kind | what a call does |\n|---|---|",
        *[f"| {kind} | {text} |" for kind, text in KINDS.items()],
        *sections,
    ]
    return "\n".join(parts) + "\n"


def section(title: str, rows: dict[str, Measured]) -> str:
    """Returns the text of a section: the names of each kind, and the errors."""
    parts = [f"\n## {title}\n\n| kind (number) | names |\n|---|---|"]
    for kind in KINDS:
        names = [name for name, row in rows.items() if row.kind == kind]
        if names:
            parts.append(f"| {kind} ({len(names)}) | {', '.join(f'`{name}`' for name in names)} |")
    refused = {name: row.error for name, row in rows.items() if row.kind == "refused"}
    if refused:
        parts.append("\n| refused | error |\n|---|---|")
        parts += [f"| `{name}` | {error.replace('|', '/')} |" for name, error in refused.items()]
    return "\n".join(parts)


def _wrapped(text: str) -> str:
    return "\n\n".join(textwrap.fill(part, 118) for part in text.split("\n\n"))


_INTRODUCTION = """\
This page lists what each function of NumPy {version} does with tensors. `np.f(x)` calls the function of that name in `st`, if there is one. Each kind was measured
by one call, with operands that are split by their first dimension over {devices} devices with separate memories, on which
the counted transfers are those of a cluster.

The operands are matrices of {rows} × 6 float64, vectors of {rows} elements, and square matrices of {side} rows. At these sizes, work and
elements are divided. Smaller operands may be gathered instead, if that takes less time than several messages: by
sorting and set functions up to 64 KiB, and by solvers up to 1,024 rows. Some functions, whose cost grows with the square or the
cube of the size, were called with {few} rows, and matrices of {few_side}: {steep}.

Another layout or size can need fewer transfers or more: `st.transfers` counts them, and `st.explain` names them.

This page is generated: `python -m tests.numpy_table` writes it, and a test measures every call again."""


if __name__ == "__main__":
    PAGE.write_text(page([section(title, measured(title)) for title in TITLES]))
