"""Where a NaN comes from: the first one of an array, and the equation of a program that made it.

The equations are run one by one, as they were traced, without kernels and other rewrites. From a result that has a NaN,
the search goes back along operands that have one, so that a NaN that a selection leaves out is not reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.protocol import current_device
from shardtensor.backend.registry import array_backend, backend_of, is_remote
from shardtensor.communication.between_processes.processes import gather_texts
from shardtensor.core import Interpreter, Op, call, default_interpreter
from shardtensor.functions.derivatives.cotangents import is_inexact
from shardtensor.interpreters.programs.program import Equation, Program, Var, vars_of
from shardtensor.interpreters.programs.replay import (
    BOUND,
    Step,
    Values,
    dropped_after,
    functions_step,
    is_in_place,
    last_uses,
    map_step,
    step_of,
)
from shardtensor.tensor.array_type import typeof
from shardtensor.tensor.ownership import reading
from shardtensor.tensor.pytree import leaves
from shardtensor.tensor.tensor import SCALARS, ShardedTensor, lacks_elements, shard_arrays


def calls_functions(op: Op) -> bool:
    """Whether an operator is a loop, a branch or a map: it calls functions, of which the operators are checked."""
    return bool(op.signature.functions) or ("spmd" in op.tags and "fn" in op.params)


def moves(op: Op, operands: Sequence[Any], result: Any) -> bool:
    """Whether a NaN of a result is none that the operator has computed: it moves elements, or makes them as told."""
    if op.parts.view_spec or op.creates or "escapes" in op.tags or "assigns" in op.tags:
        return True
    if "any dtype" not in op.tags:
        return False
    dtypes = {x.dtype for x in leaves((operands[:1], result)) if hasattr(x, "dtype")}
    return len(dtypes) < 2 or first_nan(operands[0]) is not None  # A cast may make a NaN, such as of inf to float8.


# -- arrays ----------------------------------------------------------------------------------------


_TESTS = {"isnan": "a NaN", "isinf": "an infinity"}


def first_nan(x: Any, test: str = "isnan") -> str | None:
    """Returns where the first NaN of an array is: ``a NaN at index (2,) on numpy:2``; None if it has none, or if other
    processes hold its elements. With the test ``"isinf"``, it is the first infinity.
    """
    if type(x) is not ShardedTensor:
        return _first_of_array(x, test)
    if not is_inexact(x.dtype) or lacks_elements(x):
        return None
    if x._aval.unreduced:
        x = call("partial_sums", x)
    for device, index, array in _shards(x):
        if (at := _first_in(array, device, test)) is not None:
            place = tuple([n + (s.start or 0) for n, s in zip(at, index, strict=True)])
            return _place_text(test, place, device)
    return None


def _place_text(test: str, at: tuple[int, ...], device: Device | None) -> str:
    index = f" at index {at}" if at else ""
    return f"{_TESTS[test]}{index}" if device is None else f"{_TESTS[test]}{index} on {device}"


def _shards(x: ShardedTensor) -> Iterable[tuple[Device, Any, Any]]:
    """Yields device, index and array of each shard that this process holds."""
    if getattr(x._storage, "shards", None) is not None:  # It is offloaded.
        for s in x.addressable_shards:
            yield s.device, s.index, s.data
        return
    grid = x._aval.grid
    with reading((x,)):
        for device, index, array in zip(grid.devices, grid.indices, shard_arrays(x), strict=True):
            if not is_remote(device):
                yield device, index, array


def _first_in(array: Any, device: Device, test: str) -> tuple[int, ...] | None:
    backend = backend_of(device)
    xp = np if isinstance(array, np.ndarray) else backend.xp  # Shards of offloaded tensors are in host memory.
    with backend.on(device):
        mask = getattr(xp, test)(array)
        if not bool(xp.any(mask)):
            return None
        host = np.asarray(mask if xp is np else backend.to_host(mask, device))
    return tuple(map(int, np.argwhere(host)[0]))


def _first_of_array(x: Any, test: str) -> str | None:
    """See `first_nan`: of a host array or a scalar, or, in a program of a map, of an array of its device."""
    device, backend = current_device(), array_backend(x)
    if backend is not None:
        at = _first_in(x, device, test) if device is not None and is_inexact(backend.dtype_of(x)) else None
    elif isinstance(x, (float, complex, np.ndarray, np.generic)) and is_inexact(np.asarray(x).dtype):
        found = np.argwhere(getattr(np, test)(x))
        at = tuple(map(int, found[0])) if len(found) else None
    else:
        return None
    return None if at is None else _place_text(test, at, device)


def nan_text(name: str, at: str, line: str, result: Any, operands: Sequence[tuple[str, Any]]) -> str:
    """Returns the message for a result of an operator.

    Args:
        name: the operator.
        at: where the first NaN is.
        line: the line that called the operator.
        result: the result, of which the message has the type.
        operands: names and values of the operands that are arrays or numbers.
    """
    kinds = [f"{n} {x if type(x) in SCALARS else typeof(x)}" for n, x in operands]
    before = next((f"{n} has {where} already" for n, x in operands if (where := first_nan(x))), None)
    infinite = next((f"{n} has {where}" for n, x in operands if (where := first_nan(x, "isinf"))), "no operand has one")
    given = f" of {', '.join(kinds)}" if kinds else ""
    return f"{name}: the result has {at}, at {line}: {typeof(result)}{given}; {before or infinite}. {_ADVICE}"


def transpose_text(step: Any, name: str, at: str, given: str | None, line: str) -> str:
    """Returns the message for a cotangent that the transpose of a recorded call has returned.

    Args:
        step: the call.
        name: the operand.
        at: where the first NaN is.
        given: the first NaN or infinity of the cotangents of the results; None if they have none.
        line: the line that called the backward pass.
    """
    operator = step.op.error_name
    called = f"at {step.line}" if step.line else f"in the gradient at {line}"
    return (
        f"{operator}: in the backward pass, the cotangent of {name} has {at}; {operator} is called {called}; the "
        f"cotangent of its result has {given or 'neither NaN nor infinity'}. {_ADVICE}"
    )


_ADVICE = (
    "Look at the operands there; st.where(condition, x, 1) before the call replaces those for which the function or "
    "its derivative is not defined"
)


# -- programs --------------------------------------------------------------------------------------


def found_in_program(executable: Any, values: Values, inputs: Sequence[Any]) -> str | None:
    """Returns the message for a program of `jit` that has run; None if none of its equations has computed a NaN that is
    in its results.

    Args:
        executable: the `shardtensor.interpreters.jit.executable.Executable`.
        values: its values after the call, by number.
        inputs: the values of its inputs, and of the tensors that the function closes over.
    """
    program: Program = executable.traced
    given = {*program.inputs, *program.captured}
    ends = [v for v in dict.fromkeys([*program.outputs, *program.writes.values()]) if v not in given]
    nans = {v.number: at for v in ends if (at := first_nan(values[v.number]))}
    if executable.is_common:
        nans = _of_all_processes(nans)
    bad = [v for v in ends if v.number in nans]
    if not bad:
        return None
    search = _Search(program, inputs, executable.is_common)
    found = search.origin(bad)
    if found is not None:
        return f"{found}; it is called in {executable.name}, a function of jit. {_ADVICE}"
    if any(v in search.nans for v in bad):
        return None  # Its inputs have it, and it has moved the elements.
    return (
        f"jit: a result of {executable.name} has {nans[bad[0].number]}, and its operators, run again one "
        "by one, give none: kernels may round or add in another way; st.disable_jit() calls the function itself"
    )


def _of_all_processes(texts: Mapping[int, str]) -> dict[int, str]:
    """Returns the texts that any process has for numbers. All processes then decide alike, and make the same calls."""
    found: dict[int, str] = {}
    for row in gather_texts("debug_nans", json.dumps(texts)):
        found = {int(number): text for number, text in json.loads(row).items()} | found
    return found


class _Search:
    """Runs the equations of a program one by one.

    Args:
        program: the program.
        inputs: see `found_in_program`.
        is_common: whether several processes run it.

    Attributes:
        nans: where the first NaN of each value that has one is.
        infinities: likewise for infinities.
    """

    def __init__(self, program: Program, inputs: Sequence[Any], is_common: bool) -> None:
        self.program = program
        sources = [*program.inputs, *program.captured]
        self.nans: dict[Var, str] = {}
        self.infinities: dict[Var, str] = {}
        self._inside: dict[int, str] = {}
        values: Values = [None] * (program.next_number() + 1)
        for v, x in zip(sources, inputs, strict=True):
            values[v.number] = x
        self._look_at(sources, values)
        steps = _steps(program, default_interpreter(), self._note)
        for k, (equation, step) in enumerate(zip(program.equations, steps, strict=True)):
            self._at = k
            with np.errstate(all="ignore"):
                step(values)
            self._look_at(equation.makes(), values)
        if is_common:
            self._inside = _of_all_processes(self._inside)
            every = {v.number: v for v in [*sources, *[v for e in program.equations for v in e.makes()]]}
            for found in (self.nans, self.infinities):
                everywhere = _of_all_processes({v.number: at for v, at in found.items()})
                found |= {every[number]: at for number, at in everywhere.items()}

    def _look_at(self, new: Sequence[Var], values: Values) -> None:
        for found, test in ((self.nans, "isnan"), (self.infinities, "isinf")):
            found |= {v: at for v in new if (at := first_nan(values[v.number], test))}

    def _note(self, text: str) -> None:
        """Notes the message for an equation of a loop, a branch or a map, of which only the first is reported."""
        self._inside.setdefault(self._at, text)

    def origin(self, bad: Sequence[Var]) -> str | None:
        """Returns the message for the first equation that computed a NaN from which those of values come."""
        makers = {v: k for k, e in enumerate(self.program.equations) for v in e.makes()}
        origins: set[int] = set()
        passed: set[int] = set()
        remaining, known = [v for v in bad if v in self.nans], set(bad)
        while remaining:
            if (k := makers.get(remaining.pop())) is None:
                continue
            equation = self.program.equations[k]
            before = [v for v in equation.reads() if v in self.nans]
            if not _moves(equation):
                (passed if before else origins).add(k)
            remaining += [v for v in before if v not in known]
            known.update(before)
        if not origins and not passed:
            return None
        k = min(origins or passed)
        if k in self._inside:
            return self._inside[k]
        equation = self.program.equations[k]
        result = next(v for v in equation.makes() if v in self.nans)
        nans, infinities = [[found.get(v) for v in equation.reads()] for found in (self.nans, self.infinities)]
        return _equation_text(equation, self.nans[result], _before(nans, infinities))


def _steps(program: Program, interpreter: Interpreter, note: Callable[[str], None]) -> list[Step]:
    """Returns the steps of a program, of which those of loops, branches and maps note the messages for the equations in
    them that compute a NaN.
    """

    def body(inner: Interpreter) -> Callable[[Program], Sequence[Step]]:
        return lambda inside: [
            _noting(e, step, note) for e, step in zip(inside.equations, _steps(inside, inner, note), strict=True)
        ]

    new_steps = []
    nodes = [(e,) for e in program.equations]
    dropped, made = dropped_after(last_uses(program, nodes), nodes), set(program.made())
    for e, dead in zip(program.equations, dropped, strict=False):
        mine = {v.number for v in e.makes()}
        dead = tuple([n for n in dead if n not in mine])  # Results that nothing uses are looked at, too.
        if e.op.signature.functions:
            new_steps.append(functions_step(e, interpreter, dead, body(interpreter)))
        elif e.programs:
            new_steps.append(map_step(e, interpreter, dead, body(BOUND)))
        else:
            new_steps.append(step_of(e, program, interpreter, dead, is_in_place(e, made, dead)))
    return new_steps


def _noting(equation: Equation, step: Step, note: Callable[[str], None]) -> Step:
    if equation.programs or _moves(equation):
        return step
    results, operands = equation.makes(), [v.number for v in equation.reads()]

    def noting(values: Values) -> None:
        given = [values[n] for n in operands]
        before = _before(map(first_nan, given), [first_nan(x, "isinf") for x in given])
        del given  # The step drops operands, or writes its result into them.
        step(values)
        for v in results:
            if at := first_nan(values[v.number]):
                note(_equation_text(equation, at, before))

    return noting


def _moves(equation: Equation) -> bool:
    kinds = [v.kind for v in vars_of(equation.operands)]
    return equation.op.name == "view" or moves(equation.op, kinds, [v.kind for v in equation.makes()])


def _before(nans: Iterable[str | None], infinities: Iterable[str | None]) -> str:
    """Returns which operand has a NaN or an infinity already, given where the first ones of each operand are."""
    if nan := next(filter(None, nans), None):
        return f"an operand has {nan} already"
    infinity = next(filter(None, infinities), None)
    return f"an operand has {infinity}" if infinity else "no operand has one"


def _equation_text(equation: Equation, at: str, before: str) -> str:
    operands = ", ".join([v.typed.partition(":")[2] for v in vars_of(equation.operands)])
    kind = equation.makes()[0].typed.partition(":")[2]
    return f"{equation.op.error_name}: the result has {at}, at {equation.source}: {kind} of {operands}; {before}"
