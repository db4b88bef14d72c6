"""`debug_nans`: the interpreters that look for NaN in the results of operators, and raise an error at the first one.

`NaNChecks` is around the interpreters that execute, while the mode is on in any context; `ProgramChecks` is around that
of the device in the programs of maps. Neither looks at what an operator calls itself: a function such as `st.nanmean`
may compute a NaN that its result does not have. The transposes of operators are such calls, too.

A program of `jit` runs as it is. If a result of it has a NaN, its equations are run again one by one, as they were
traced: see `shardtensor.interpreters.programs.nan_search`.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from shardtensor.core import Function, Interpreter, Op, Operands, Params, innermost, interpreting, set_outermost
from shardtensor.errors import ArgumentTypeError, NaNError, type_text
from shardtensor.functions.derivatives.cotangents import Into
from shardtensor.interpreters.eager import EAGER
from shardtensor.interpreters.nested import Nested, innermost_of
from shardtensor.interpreters.program_arrays import program_of
from shardtensor.interpreters.programs.nan_search import (
    calls_functions,
    first_nan,
    found_in_program,
    moves,
    nan_text,
    transpose_text,
)
from shardtensor.interpreters.recording import RECORDING
from shardtensor.interpreters.views.views import snapshot
from shardtensor.places import user_place
from shardtensor.tensor.operands import is_data
from shardtensor.tensor.pytree import leaves
from shardtensor.tensor.tensor import SCALARS, ShardedTensor

_here: ContextVar[bool | None] = ContextVar("shardtensor_debug_nans", default=None)
"""Whether results are checked in this context; None where the setting of the process applies."""

_settings: list[debug_nans] = []  # The last of these settings applies to the whole process.
_KEPT = 64
"""The maximum length of `_settings`, which would otherwise grow with every call."""

_blocks: set[object] = set()  # one object for each `with` block that checks


class debug_nans:  # noqa: N801 - used like a function
    """Makes every operator raise `NaNError`, a `FloatingPointError`, if its result has a NaN.

    The error names the operator, the line of the program, the index and the device of the first NaN, and the types of
    the operands. A function of `st.jit` is run as usual; if a result has a NaN, its operators are run again one by one,
    to find the first of those from which the NaN comes. In a backward pass, the error names the operator of which the
    transpose has made the NaN, and the line that called it. In a mapped function, it is raised in the program of the
    device; a NaN of functions of NumPy, which the library does not see, is found in what the program returns.

    A call sets the mode for the whole process. As a context manager, it sets the mode inside the ``with``, in this
    thread and in the maps that it starts, and takes precedence there. Each check reads all elements of a result, and
    waits for the device: use it to find a NaN only. While it is off, it costs nothing.

    Operators that move elements or make them as told, such as `st.asarray`, `st.full` or `x[1:]`, may have NaN in their
    results. A write such as ``x += y`` has been done when its error is raised, except in a function of `st.jit`: after
    an error none of its writes is visible, and no argument has been donated.

    Args:
        enabled: whether results are checked.

    Raises:
        ArgumentTypeError: ``enabled`` is not a bool.

    >>> x = st.asarray([4.0, 1.0, 0.0], device=st.make_mesh((3,), ("x",)))
    >>> with st.debug_nans(), np.errstate(all="ignore"):
    ...     y = x * np.inf
    Traceback (most recent call last):
    shardtensor.errors.NaNError: multiply: the result has a NaN at index (2,) on numpy:2, ...
    """

    def __init__(self, enabled: bool = True) -> None:
        if not isinstance(enabled, (bool, np.bool)):
            raise ArgumentTypeError(f"debug_nans: enabled is {type_text(enabled)}; wanted True or False")
        self.enabled = bool(enabled)
        self._tokens: list[Any] = []
        _settings.append(self)
        del _settings[:-_KEPT]
        _switch()

    def __enter__(self) -> None:
        with contextlib.suppress(ValueError):  # A context manager does not set the mode for the process.
            _settings.remove(self)
        block = object()
        if self.enabled:
            _blocks.add(block)
        self._tokens.append((_here.set(self.enabled), block))
        _switch()

    def __exit__(self, *error: object) -> None:
        token, block = self._tokens.pop()
        _here.reset(token)
        _blocks.discard(block)
        _switch()


def _is_on_everywhere() -> bool:
    last = _settings[-1:]  # in one step: another thread may remove it
    return bool(last) and last[0].enabled


def _is_on() -> bool:
    here = _here.get()
    return _is_on_everywhere() if here is None else here


def _switch() -> None:
    """Puts the interpreter around the others if the mode is on in any context, and otherwise removes it."""
    while True:  # Another thread may have changed the mode in the meantime.
        is_on = bool(_blocks) or _is_on_everywhere()
        set_outermost(CHECKS if is_on else None, 1)
        if is_on == (bool(_blocks) or _is_on_everywhere()):
            return


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    token = _here.set(False)
    try:
        yield
    finally:
        _here.reset(token)


class Checks(Interpreter):
    """Calls the interpreter around which it is, and checks the results."""

    @abc.abstractmethod
    def inner(self) -> Interpreter:
        """Returns the interpreter of the calls."""

    @abc.abstractmethod
    def unchecked(self) -> contextlib.AbstractContextManager[None]:
        """Makes a context in which the results of operators are not checked."""

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Returns the result of ``op``.

        Raises:
            NaNError: the result has a NaN.
            ShardTensorError: the operator failed.
        """
        if calls_functions(op):  # The results of the operators that these call are checked.
            return self.inner().apply(op, operands, _checking(op, params))
        with self.unchecked():
            result = self.inner().apply(op, operands, params)
            if not moves(op, operands, result):
                self._check(op.error_name, result, op.operands * (len(operands) or 1), operands)
        return result

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Writes the result of ``op`` into ``out``.

        Raises:
            NaNError: the elements that have been written have a NaN.
            ShardTensorError: the operator failed.
        """
        with self.unchecked():
            self.inner().write(out, op, operands, params)
            if not moves(op, operands, out):
                base = _base(out)
                others = [None if _base(x) is base else x for x in operands]  # The old elements exist no longer.
                self._check(op.error_name, out, op.operands * (len(operands) or 1), others)

    def compose(self, function: Function, host: Function, fused: bool, args: Any, kwargs: Any, /) -> Any:
        """Calls a function that is composed of operators, and checks its result only."""
        with self.unchecked():
            result = self.inner().compose(function, host, fused, args, kwargs)
            self._check(function.__name__, result, [f"argument {n}" for n in range(len(args))], args)
        return result

    def transpose(self, step: Any, /) -> Function:
        """Returns the transpose of a recorded call, which raises NaNError if a cotangent has a NaN."""
        transposed = self.inner().transpose(step)
        if step.derivative.calls_functions or calls_functions(step.op):
            return transposed
        return functools.partial(self._transpose, transposed)

    def _transpose(self, transposed: Function, g: Any, step: Any) -> Any:
        cotangents = g if isinstance(g, list) else [g]
        given = [at for test in ("isnan", "isinf") for x in cotangents if (at := first_nan(x, test))]
        with self.unchecked():
            result = transposed(g, step)
            for name, x in zip(step.op.operands * len(result), result, strict=False):
                if at := first_nan(x.g if type(x) is Into else x):
                    raise NaNError(transpose_text(step, name, at, next(iter(given), None), _line()))
        return result

    def line_of_call(self) -> str:
        """See `Interpreter`."""
        return _line()

    def _check(self, name: str, result: Any, names: Sequence[str], operands: Sequence[Any]) -> None:
        for x in (result,) if type(result) is ShardedTensor else leaves(result):
            if at := first_nan(x):
                arrays = [
                    (n, y)
                    for n, y in zip(names, operands, strict=False)
                    if isinstance(y, (ShardedTensor, *SCALARS)) or is_data(y)
                ]
                raise NaNError(nan_text(name, at, _line(), x, arrays))


class NaNChecks(Checks):
    """Is around the interpreters that execute, in all contexts; it checks results in those in which the mode is on."""

    __slots__ = ()

    def inner(self) -> Interpreter:
        """See `Checks`."""
        return RECORDING

    def unchecked(self) -> contextlib.AbstractContextManager[None]:
        """See `Checks`."""
        return _unchecked()

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """See `Checks`."""
        if not _is_on():
            return RECORDING.apply(op, operands, params)
        try:
            return super().apply(op, operands, params)
        except NaNError as error:
            EAGER.note_error(op, operands, params, error)
            raise

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """See `Checks`."""
        if not _is_on():
            return RECORDING.write(out, op, operands, params)
        try:
            return super().write(out, op, operands, params)
        except NaNError as error:
            EAGER.note_error(op, (out, *operands), params, error)
            raise

    def compose(self, function: Function, host: Function, fused: bool, args: Any, kwargs: Any, /) -> Any:
        """See `Checks`."""
        if not _is_on():
            return RECORDING.compose(function, host, fused, args, kwargs)
        return super().compose(function, host, fused, args, kwargs)

    def transpose(self, step: Any, /) -> Function:
        """See `Checks`."""
        return super().transpose(step) if _is_on() else RECORDING.transpose(step)

    def line_of_call(self) -> str:
        """See `Interpreter`."""
        return _line() if _is_on() else ""

    def run(self, program: Any, inputs: Any, /) -> Any:
        """Runs a program, and looks for the operator that made a NaN of its results."""
        if not _is_on():
            return RECORDING.run(program, inputs)
        with _unchecked():
            # A run takes the memory of donated inputs, which the search needs.
            values = RECORDING.run(program, [snapshot(x) for x in inputs])
            if text := found_in_program(program, values, inputs):
                raise NaNError(text)
        return values


class ProgramChecks(Checks, Nested):
    """Is around the interpreter of the device in a program of a map."""

    def inner(self) -> Interpreter:
        """See `Checks`."""
        interpreter: Interpreter = innermost_of(self.outer)
        return interpreter

    @contextlib.contextmanager
    def unchecked(self) -> Iterator[None]:
        """See `Checks`."""
        with self.outside(), _unchecked():  # The interpreter of the device calls the outermost one, too.
            yield

    line_of_call = Checks.line_of_call


def _checking(op: Op, params: Params) -> Params:
    """Returns the parameters of a map, with a function that checks what it calls and returns; of other operators, the
    parameters as they are.
    """
    if op.name != "map_shards":
        return params
    named = dict(zip(op.params, params, strict=True))
    named["fn"] = functools.partial(_checked_call, named["fn"], named["caller"])
    return tuple(named.values())


def _checked_call(fn: Callable[..., Any], caller: str, *args: Any) -> Any:
    """Calls a mapped function in a program, and checks its result."""
    if program_of(innermost()) is None or not _is_on():  # Programs on several devices have tensors.
        return fn(*args)
    with interpreting(ProgramChecks()):
        result = fn(*args)
    for x in leaves(result):
        if at := first_nan(x):
            name = getattr(fn, "__name__", "")
            code = getattr(fn, "__code__", None)
            line = f" {name} ({code.co_filename}:{code.co_firstlineno})" if code else ""
            raise NaNError(
                f"{caller}: the function{line} has returned a shard that has {at} (counted in the shard). Functions of "
                "NumPy that it calls are not checked: np.errstate(all='raise') finds the line"
            )
    return result


def _base(x: Any) -> Any:
    return x._base_and_view()[0] if type(x) is ShardedTensor else x


def _line() -> str:
    return str(user_place() or "no line of Python")


CHECKS = NaNChecks()
