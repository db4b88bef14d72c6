"""Cheaper stencils: writes of functions of slices, for which each device receives one block of every tensor.

A write becomes a stencil (see `shardtensor.interpreters.jit.grouping.stencil_writes`) only where that moves fewer bytes
than the transfers of eager mode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.interpreters.jit.grouping.stencil_writes import StencilPlan, stencils_in
from shardtensor.interpreters.programs.passes import Setting
from shardtensor.interpreters.programs.program import Equation, Program, Var
from shardtensor.interpreters.programs.replay import bytes_of


def with_stencils(program: Program, _: Setting) -> Program:
    """Returns a program in which the writes that move fewer bytes as stencils are stencils."""
    equations: dict[int, Equation] = dict(enumerate(program.equations))
    changes = 0
    known: dict[Any, bool] = {}
    views = {e.results: e for e in program.equations if e.op.name == "view" and type(e.results) is Var}
    for k, inside, stencil in stencils_in(program):
        eager = [program.equations[i] for i in (*inside, k)]
        read = [views[v] for v in dict.fromkeys([v for e in eager for v in e.reads()]) if v in views]
        key = _form_of([*read, *eager])
        if key not in known:
            known[key] = StencilPlan(stencil, program).size < bytes_of([*read, *eager])
        if known[key]:
            equations[k] = stencil
            changes += 1
            for i in inside:
                del equations[i]
    return dataclasses.replace(program, equations=list(equations.values())) if changes else program


def _form_of(equations: Sequence[Equation]) -> Any:
    """Returns what the transfers of equations depend on, which is equal for the steps of a loop."""
    numbers: dict[Var, int] = {}

    def form(x: Any) -> Any:
        if type(x) is Var:
            return numbers.setdefault(x, len(numbers)), x.kind
        return id(x) if isinstance(x, np.ndarray) else (type(x), x)

    forms = []
    for e in equations:
        where = e.params if e.into is None else (e.into.boxes, e.into.chains)
        forms.append((e.op.name, where, e.writes, form(e.results), *map(form, e.operands)))
    return tuple(forms)
