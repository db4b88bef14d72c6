"""Copies: values of a program never change, so that an equation can read a value in place of its copy.

Eager mode copies arguments and what derivatives save, since they may be written later. A write in a program makes a new
value of the whole base, and is in place only if nothing else reads the old one.
"""

from __future__ import annotations

import dataclasses

from shardtensor.interpreters.programs.passes import Setting
from shardtensor.interpreters.programs.program import Equation, Program, Var
from shardtensor.interpreters.programs.replay import with_operands
from shardtensor.tensor.value import Aval


def without_copies(program: Program, _: Setting) -> Program:
    """Returns a program without copies of tensors, and without transfers of them to the layout that they have, except
    of views and of what programs of maps and loops read. Outputs stay tensors of their own.
    """
    inside = {v for e in program.equations for inner in e.programs.values() for v in inner.free()}
    kept = {*program.outputs, *program.writes.values()}
    views = {v for e in program.equations if e.op.name == "view" for v in e.makes()}
    computed = {e.results for e in program.equations if type(e.results) is Var} - kept - inside - views
    instead: dict[Var, Var] = {}
    renamed: dict[Var, Var] = {}
    equations = []
    for equation in program.equations:
        e = with_operands(equation, instead) if instead else equation
        source, result = (e.operands[0], e.results) if _is_copy(e) else (None, None)
        if type(source) is not Var or type(result) is not Var or result in inside or source in views:
            equations.append(e)
        elif result not in kept:
            instead[result] = source
        elif source in computed and source not in renamed:
            renamed[source] = result
        else:
            equations.append(e)
    if not instead and not renamed:
        return program
    return dataclasses.replace(program, equations=[_renamed(e, renamed) for e in equations])


def _is_copy(equation: Equation) -> bool:
    """Whether the result of an equation has the elements, the dtype and the layout of its operand."""
    if "same elements" not in equation.op.tags or equation.writes:
        return False
    source, result = equation.operands[0], equation.results
    if type(source) is not Var or not isinstance(source.kind, Aval) or source.kind.unreduced:
        return False
    return bool(source.kind.ndim) and source.kind == result.kind


def _renamed(equation: Equation, names: dict[Var, Var]) -> Equation:
    if not names:
        return equation
    copy = with_operands(equation, names)
    if type(copy.results) is Var and copy.results in names:
        return dataclasses.replace(copy, results=names[copy.results])
    return copy
