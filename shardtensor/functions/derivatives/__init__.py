"""The derivatives of the operators: one row for each, in modules of chapters that are loaded on use.

A row has the name of the operator (`forms.rows`) and one of the forms in `forms`. An operator that is composed of
others needs no row: its operators have some. Rows call operators only, and know neither tapes nor interpreters.
"""

from __future__ import annotations

import importlib

from shardtensor.core import Op
from shardtensor.functions.derivatives.forms import ROWS, Derivative

_CHAPTERS = {
    "elementwise": "elementwise ufuncs number_parts data_types searching comparisons",
    "reductions": "statistical nan_reductions",
    "products": "linear_algebra products differences",
    "movement": (
        "manipulation joining placement conversion triangles repetition unsplit_lines creation partial_sums grids "
        "dlpack_methods names"
    ),
    "lists": "shard_lists",
    "indexing": "indexing take_along scatter counts",
    "linalg": "linalg decompositions matrix_functions",
    "fourier": "fft",
    "ordering": "sorting sets split_search scans",
    "order_statistics": "order_statistics",
    "ufunc_methods": "ufunc_methods",
    "mathematical": "mathematical special histograms distributions lines",
    "halos": "halos",
}
"""The modules of rows, and the modules that declare their operators."""

_MODULES = {f"shardtensor.functions.{name}": rows for rows, names in _CHAPTERS.items() for name in names.split()}


def derivative_of(op: Op) -> Derivative | None:
    """Returns the derivative of an operator; None if it has no row."""
    if op.parts.derivative is not None:
        if type(op.parts.derivative) is str:  # The module that attaches those of its package.
            importlib.import_module(op.parts.derivative)
            op.parts.derivative = None if type(op.parts.derivative) is str else op.parts.derivative
        return op.parts.derivative  # type: ignore[no-any-return]
    if (rows := _MODULES.get(op.dispatch.__module__)) is not None:
        importlib.import_module(f"{__name__}.{rows}")
        op.parts.derivative = ROWS.get(op.name)
    return op.parts.derivative


def load_all() -> None:
    """Loads all rows."""
    for rows in _CHAPTERS:
        importlib.import_module(f"{__name__}.{rows}")
