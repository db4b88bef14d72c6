"""The derivatives of the operators: one row for each, in modules of chapters that are loaded on use.

A row has the name of the operator (`forms.rows`) and one of the forms in `forms`. A module that declares operators
names the module of their rows: ``_DERIVATIVES = "of_elementwise"``. An operator that is composed of others needs no
row: its operators have some. `cotangents` has what rows do with the cotangents that they get.

The derivative of an operator is decided here; when it is called is decided in
`shardtensor.interpreters.differentiation`, which calls `derivative_of`. Rows call operators only: tapes and
interpreters must not be imported here.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

from shardtensor.core import Op
from shardtensor.functions.derivatives.forms import ROWS, Derivative


def derivative_of(op: Op) -> Derivative | None:
    """Returns the derivative of an operator; None if it has no row."""
    if op.parts.derivative is not None:
        if type(op.parts.derivative) is str:  # The module that attaches those of its package, which is above this one.
            importlib.import_module(op.parts.derivative)
            op.parts.derivative = None if type(op.parts.derivative) is str else op.parts.derivative
        return op.parts.derivative  # type: ignore[no-any-return]
    rows = getattr(sys.modules[op.dispatch.__module__], "_DERIVATIVES", None)
    if rows is not None:  # Programs without gradients do without them.
        importlib.import_module(f"{__name__}.{rows}")
        op.parts.derivative = ROWS.get(op.name)
    return op.parts.derivative


def load_all() -> None:
    """Loads all rows."""
    for module in pkgutil.iter_modules(__path__):  # Tests need all of them.
        importlib.import_module(f"{__name__}.{module.name}")
