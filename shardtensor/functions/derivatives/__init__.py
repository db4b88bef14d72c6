"""The derivatives of the operators: one row for each, in modules of chapters that are loaded on use.

A row has the name of the operator (`forms.rows`) and one of the forms in `forms`. A module that declares operators
names the module of their rows: ``_DERIVATIVES = "elementwise"``. An operator that is composed of others needs no row:
its operators have some. Rows call operators only, and know neither tapes nor interpreters.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

from shardtensor.core import Op
from shardtensor.functions.derivatives.forms import ROWS, Derivative

<<<<<<< e04b158c67f0c9e2da5ff343d112908685bdf273
_CHAPTERS = {
    "of_elementwise": (
        "standard.elementwise numpy.ufuncs numpy.number_parts standard.data_types standard.searching numpy.comparisons"
    ),
    "of_reductions": "standard.statistical statistics.nan_reductions",
    "of_products": "standard.linear_algebra numpy.products numpy.differences",
    "of_movement": (
        "standard.manipulation standard.joining placement.transfers placement.conversion numpy.triangles "
        "standard.repetition building.unsplit_lines standard.creation placement.partial_sum_operators numpy.grids "
        "interchange.dlpack_methods placement.names"
    ),
    "of_lists": "placement.shard_lists",
    "of_indexing": "standard.indexing standard.take_along building.scatter statistics.counts",
    "of_linalg": "linalg.equations linalg.decompositions linalg.matrix_functions",
    "of_transforms": "fft.transforms",
    "of_ordering": "standard.sorting standard.sets building.split_search standard.scans",
    "of_order_statistics": "statistics.order_statistics",
    "of_ufunc_methods": "ufunc_protocol.ufunc_methods",
    "of_mathematical": "numpy.mathematical building.special statistics.histograms random.distributions numpy.lines",
    "of_halos": "building.halos",
}
"""The modules of rows, and the modules that declare their operators."""

_MODULES = {f"shardtensor.functions.{name}": rows for rows, names in _CHAPTERS.items() for name in names.split()}

=======
>>>>>>> b2865f57a269ecbdb3e4916810a49a175d44718c

def derivative_of(op: Op) -> Derivative | None:
    """Returns the derivative of an operator; None if it has no row."""
    if op.derivative is not None:
        if type(op.derivative) is str:  # The module that attaches those of its package.
            importlib.import_module(op.derivative)
            op.derivative = None if type(op.derivative) is str else op.derivative
        return op.derivative  # type: ignore[no-any-return]
<<<<<<< e04b158c67f0c9e2da5ff343d112908685bdf273
    if (rows := _MODULES.get(op.dispatch.__module__)) is not None:
        importlib.import_module(f"{__name__}.{rows}")  # Programs need the rows of few chapters.
=======
    rows = getattr(sys.modules[op.dispatch.__module__], "_DERIVATIVES", None)
    if rows is not None:
        importlib.import_module(f"{__name__}.{rows}")
>>>>>>> b2865f57a269ecbdb3e4916810a49a175d44718c
        op.derivative = ROWS.get(op.name)
    return op.derivative


def load_all() -> None:
    """Loads all rows."""
<<<<<<< e04b158c67f0c9e2da5ff343d112908685bdf273
    for rows in _CHAPTERS:
        importlib.import_module(f"{__name__}.{rows}")  # See above.
=======
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
>>>>>>> b2865f57a269ecbdb3e4916810a49a175d44718c
