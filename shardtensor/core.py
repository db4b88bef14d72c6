"""Operator declarations and dispatch: operators are declared and registered in `OPS`, and `bind` dispatches every call.

A declaration is a function with a signature and a docstring, but no body::

    @operator("... i k, ... k j -> ... i j", combine="sum")
    def matmul(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor: ...

The decorator registers the operator and returns the function that users call. It has the declared signature, and its
body is the call ``bind(op, operands, params)``, which passes the call to the innermost interpreter. The interpreter
defines what the call means: execute the operator on sharded tensors (`shardtensor.interpreters.eager`), execute it on
one device inside a mapped function (`shardtensor.interpreters.on_device`), or infer only the result's aval
(`shardtensor.interpreters.infer`).
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import numpy as np

from shardtensor.declarations import OPS as OPS
from shardtensor.declarations import TAGS as TAGS
from shardtensor.declarations import Function as Function
from shardtensor.declarations import Op as Op
from shardtensor.declarations import Operands as Operands
from shardtensor.declarations import Params as Params
from shardtensor.declarations import Parts, signature_of
from shardtensor.dispatchers import dispatcher
from shardtensor.errors import ArgumentError, ArgumentTypeError, DistributedError, ShardTensorError
from shardtensor.hints import wrong_arguments
from shardtensor.signatures import without_quotes

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Body = TypeVar("Body", bound=Callable[..., Any])
Part = TypeVar("Part")


class FunctionsAbove(dict[str, Function]):
    """Functions that packages call in packages above them, by name: ``ABOVE["write_elements"](file, x)``.

    Attributes:
        modules: the modules of the functions, which are imported when one of their functions is first called. The
            package itself gives them: those below know only the names of the functions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[str, str] = {}

    def __missing__(self, name: str) -> Function:
        function: Function = getattr(importlib.import_module(self.modules[name]), name)
        self[name] = function
        return function


ABOVE = FunctionsAbove()


class Interpreter(abc.ABC):
    """Defines what calls of operators mean. Interpreters form a stack, of which the innermost one gets every call.

    Attributes:
        only_infers: whether no result ever gets elements, neither now nor when a program runs later, so that a function
            may take any numbers for elements that determine no shape, dtype or sharding.
    """

    __slots__ = ()

    only_infers = False

    @abc.abstractmethod
    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Returns the result of ``op``. Operands are tensors, host or backend arrays, scalars, or None for an optional
        operand that is not given; those in ``op.signature.trees`` are pytrees.
        """

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Writes the result of ``op`` into the tensor ``out``: ``x[i] = v`` (the operator `setitem`), ``x += y`` and
        ``out=``.

        By default the result is computed by `apply`, and so is the new value of the base of ``out``: by the operator
        `put`, from the base, the result and the view spec of ``out``.
        """
        out._bind(lambda: self.apply(op, operands, params), lambda *call: self.apply(OPS["put"], *call))

    def compose(self, function: Function, host: Function, fused: bool, args: Any, kwargs: Any, /) -> Any:
        """Calls a function that is composed of operators (see `composition`). By default it calls each of them."""
        return function(*args, **kwargs)

    def run(self, program: Any, inputs: Any, /) -> Any:
        """Runs a program of many operators on its inputs as one call, by its method ``execute``. Its method ``infer``
        infers it.
        """
        return program.execute(inputs)

    def transpose(self, step: Any, /) -> Function:
        """Returns the function that computes the cotangents of the operands of a recorded call (`Step`), given those of
        its results and the call. It is that of the derivative itself, which frees cotangents as soon as it can.
        """
        transposed: Function = step.derivative.transposed
        return transposed

    def line_of_call(self) -> str:
        """Returns the line of the user's program that makes the current call, which errors of its derivative name; ""
        where none does.
        """
        return ""

    def mapped(self, submesh: Any, /) -> Interpreter:
        """Returns the interpreter of a mapped function on the devices of ``submesh``, whose arrays have no elements.

        It is called by the inference of a map (see `shardtensor.spmd.maps.launch.map_shards`), once for each program.
        """
        return self


# The contexts hold the bound methods `apply`: a call of an operator looks up one attribute less.
_innermost: ContextVar[Callable[..., Any] | None] = ContextVar("shardtensor_interpreter", default=None)
_outermost: Callable[..., Any]
_default: Interpreter | None = None
_around: dict[int, Interpreter] = {}  # by level


def set_default_interpreter(interpreter: Interpreter) -> None:
    """Sets the interpreter of calls outside of all other interpreters. The module of the eager interpreter calls it."""
    global _default
    _default = interpreter
    set_outermost(None)


def set_outermost(interpreter: Interpreter | None, level: int = 0) -> None:
    """Puts an interpreter around the default one, and around those of lower levels, in all contexts; None removes the
    one of the level.
    """
    global _outermost
    _around.pop(level, None)
    if interpreter is not None:
        _around[level] = interpreter
    top = None
    while top is not (top := _top()):  # Another thread may have changed another level in the meantime.
        _outermost = top.apply


def _top() -> Interpreter:
    around = dict(_around)  # in one step
    return around[max(around)] if around else default_interpreter()


@contextlib.contextmanager
def interpreting(interpreter: Interpreter) -> Iterator[None]:
    """Makes ``interpreter`` the innermost one in the context."""
    token = _innermost.set(interpreter.apply)
    try:
        yield
    finally:
        _innermost.reset(token)


@contextlib.contextmanager
def executing() -> Iterator[None]:
    """Makes the default interpreter the innermost one in the context, unless there is another one."""
    token = _innermost.set(_innermost.get() or _default.apply)  # type: ignore[union-attr]
    try:
        yield
    finally:
        _innermost.reset(token)


interpret_by = _innermost.set
"""Makes an interpreter, given by its method ``apply``, the only one for the rest of this context, which is that of a
program; None means the default interpreter.
"""


def innermost() -> Interpreter | None:
    """Returns the innermost interpreter of this context, or None if it is the default interpreter, or the one around
    that.
    """
    apply = _innermost.get()
    interpreter: Interpreter | None = apply and apply.__self__  # type: ignore[attr-defined]
    return None if interpreter is _default else interpreter


def is_executing() -> bool:
    """Whether the default interpreter executes the calls of this context, and no other one infers or records them, so
    that a result may be computed in another way than by the operators.
    """
    return (_innermost.get() or _outermost).__self__ is _default  # type: ignore[attr-defined]


def default_interpreter() -> Interpreter:
    """Returns the interpreter that executes calls, which only modules below its own need to ask for."""
    assert _default is not None
    return _default


def outermost() -> Interpreter:
    """Returns the interpreter of calls outside of all others."""
    return _outermost.__self__  # type: ignore[attr-defined,no-any-return]


def bind(op: Op, operands: Operands, params: Params) -> Any:
    """Passes one call of an operator to the innermost interpreter and returns the result."""
    return (_innermost.get() or _outermost)(op, operands, params)


def bind_by(apply: Callable[..., Any] | None, op: Op, operands: Operands, params: Params) -> Any:
    """Passes one call to an interpreter, given by its method ``apply``, which is the innermost one meanwhile.

    None means the outermost interpreter, whichever that is now.
    """
    token = _innermost.set(apply)
    try:
        return (apply or _outermost)(op, operands, params)
    finally:
        _innermost.reset(token)


@contextlib.contextmanager
def interpreted_by(apply: Callable[..., Any] | None) -> Iterator[None]:
    """Makes an interpreter, given as in `bind_by`, the innermost one in the context."""
    token = _innermost.set(apply)
    try:
        yield
    finally:
        _innermost.reset(token)


def bind_into(out: Any, op: Op, operands: Operands, params: Params) -> None:
    """Passes one call whose result is written into the tensor ``out`` to the innermost interpreter."""
    (_innermost.get() or _outermost).__self__.write(out, op, operands, params)  # type: ignore[attr-defined]


def execute(op: Op, operands: Operands, params: Params) -> Any:
    """Passes one call of an operator to the default interpreter, whichever is the innermost one: for storages, which
    compute their elements when they are read.
    """
    return _outermost(op, operands, params)


def call(name: str, *operands: Any, **params: Any) -> Any:
    """Calls the operator with the given name: for packages that are imported before the declarations."""
    return OPS[name].dispatch(*operands, **params)


def operator(
    rule: Any = None, **properties: Any
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Declares an operator; see the module's docstring for an example, and `declared` for the arguments.

    The declaration adds the operator to ``__all__`` of its module, so that ``import *`` imports the operators only.

    Raises:
        ArgumentError: there is an operator of that name, or a tag is unknown.
    """

    def declare(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        if function.__name__ in OPS:
            raise ArgumentError(f"operator: {function.__name__} is declared already; wanted another name")
        op = OPS[function.__name__] = declared(function, rule, **properties)
        if function.__qualname__ == op.name:
            scope = function.__globals__
            scope["__all__"] = [*scope.get("__all__", ()), op.name]
        return cast("Callable[Arguments, Result]", op.dispatch)

    return declare


def declared(
    function: Function,
    rule: Any = None,
    *,
    operands: Sequence[str] | None = None,
    variadic: bool = False,
    options: Sequence[str] = (),
    trees: Sequence[str] = (),
    functions: Sequence[str] = (),
    composed: Function | None = None,
    **properties: Any,
) -> Op:
    """Returns the declaration of an operator, which is not in `OPS`.

    Args:
        function: the function without a body.
        rule: see `shardtensor.declarations.Op`.
        operands: the names of the operands; by default those of the first arguments, as many as the rule has operands
            (one if the rule is not a string).
        variadic: see `shardtensor.declarations.Signature`.
        options: see `shardtensor.declarations.Signature`.
        trees: see `shardtensor.declarations.Signature`.
        functions: see `shardtensor.declarations.Signature`.
        composed: see `shardtensor.declarations.Parts`.
        properties: ``combine``, ``dtype``, ``error_name``, ``ufunc``, ``gathers`` and ``tags``: see
            `shardtensor.declarations.Op`.

    Raises:
        ArgumentError: there is no such tag.
    """
    public = inspect.signature(without_quotes(function))
    signature = signature_of(public.parameters, rule, operands, variadic, options, trees, functions)
    op = Op(function.__name__, signature, rule, parts=Parts(composed=composed), **properties)
    calls = {"_bind": bind, "_extended": _extended, "_place": _place}
    dispatch = dispatcher(op, function.__code__, public.parameters, calls)
    op.dispatch = functools.update_wrapper(dispatch, function)  # Editors find the declaration by __wrapped__.
    op.dispatch.__signature__ = public  # type: ignore[attr-defined]
    return op


def implements(function: Function, *kinds: str) -> Callable[[Part], Part]:
    """Attaches a part to a declared operator: the decorated function, or another object for kinds that are not
    functions.

    Args:
        function: the function that declares the operator.
        kinds: the kinds of part that it is, such as ``"kernel"``: attributes of `shardtensor.declarations.Parts`.

    Raises:
        ArgumentError: there is no such kind.
    """
    if unknown := set(kinds) - {*Parts.__slots__}:
        name, every = function.__name__, ", ".join(Parts.__slots__)
        raise ArgumentError(f"implements: {name} has no part {min(unknown)!r}; wanted one of {every}")

    def attach(part: Part) -> Part:
        for kind in kinds:
            setattr(OPS[function.__name__].parts, kind, part)
        return part

    return attach


def recorded(*args: Any, **kwargs: Any) -> Any:
    """Stands for the function of whole host arrays of a composition of which there is none with the same bits: the
    plans of its operators are run again (see `shardtensor.interpreters.programs.compositions`).

    The composition must not do anything but call operators that follow from the avals of its operands: it neither
    writes, nor warns, nor reads elements if there are some.
    """
    return NotImplemented


def composition(host: Function | None = None, error_name: str = "", *, fused: bool = False) -> Callable[[Body], Body]:
    """Declares that the decorated function is composed of operators, and what computes it on whole host arrays.

    Eager mode may compute small results by one call of ``host``, since the calls of all operators would take much
    longer (see `shardtensor.interpreters.small_results`).

    Args:
        host: takes the arguments of the function, with NumPy arrays in place of tensors, and returns arrays of the same
            bits as the composition, or NotImplemented; by default NumPy's function of the same name; or `recorded`.
        error_name: the name that errors begin with; by default that of the function.
        fused: whether it is one kernel on GPUs, and for large arrays of the host: it is elementwise, and its operators
            are arithmetic and comparisons, so that a kernel has their bits; it reads no elements.
    """

    def declare(function: Body) -> Body:
        whole = host or getattr(np, function.__name__)
        name = error_name or function.__name__

        @functools.wraps(function)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            try:
                return (_innermost.get() or _outermost).__self__.compose(  # type: ignore[attr-defined]
                    function, whole, fused, args, kwargs
                )
            except ShardTensorError as error:
                _raise_named(name, error)
            except TypeError:
                _explain_arguments(function, args, kwargs)
                raise

        return cast("Body", dispatch)

    return declare


def hinted(function: Body, name: str = "") -> Body:
    """Declares that the error of a call with arguments that the function does not take names those that it takes, and
    what to write in place of those of other libraries, as errors of operators do; see `named` for ``name``.
    """

    @functools.wraps(function)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ShardTensorError as error:
            if name:
                _raise_named(name, error)
            raise
        except TypeError:
            _explain_arguments(function, args, kwargs)
            raise

    return cast("Body", dispatch)


def named(function: Body) -> Body:
    """Declares a function as `hinted`, of which errors begin with its name in place of those of the operators that it
    calls, as errors of a `composition` do. It is not meant for functions that call functions of the user.
    """
    return hinted(function, function.__name__)


def _explain_arguments(function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raises an error with a hint if the function cannot be called with these arguments, whatever they are."""
    parameters = dict(inspect.signature(function).parameters)
    if parameters.pop("self", None):
        args = args[1:]
    *_, cls, name = f".{function.__qualname__}".split(".")
    if text := wrong_arguments(cls if name == "__init__" else name, parameters, args, kwargs):
        raise ArgumentTypeError(text) from None


def _raise_named(name: str, error: ShardTensorError) -> NoReturn:
    """Raises the error with the name in front of the message, in place of that of an operator. A private name is not
    added, nor is any to a message that begins with the name of another function.
    """
    text = str(error)
    inner, _, rest = text.partition(":")
    try:
        if isinstance(error, DistributedError):  # Its message is that of all processes.
            raise error
        if not name.startswith("_") and inner != name and inner in OPS:
            text = rest.strip()
        elif name.startswith("_") or all(part.isidentifier() for part in inner.split(".")):
            raise error
        # It stays the same exception, whose traceback and context show where it comes from.
        error.args = (f"{name}: {text}",)
        raise error
    finally:
        del error  # The reference cycle of the error and this frame would keep the operands alive.


def raise_in_the_name_of(op: Op, error: ShardTensorError) -> NoReturn:
    """Raises the error, with the operator's name in front of the message unless the message begins with the name of a
    function already. The names of an internal operator and of an operator of which this one is composed are replaced.
    """
    text = str(error)
    name, _, rest = text.partition(":")
    try:
        internal = name == op.name and name != op.error_name
        # `place_result` is called with the operator that the user called.
        # `lines_applied` calls a function of the user, whose errors are its own.
        calls_others = "op" in op.params or "function" in op.params
        is_composed = op.parts.composite and "spmd" not in op.tags and not calls_others
        composed = is_composed and name != op.error_name and name in OPS
        if isinstance(error, DistributedError):  # See above.
            raise error
        if internal or composed:
            text = rest.strip()
        elif name.isidentifier():
            raise error
        error.args = (f"{op.error_name}: {text}",)
        raise error
    finally:
        del error  # The reference cycle of the error and this frame would keep the operands alive.


def _extended(op: Op, operands: Operands, params: Params, /, **options: Any) -> Any:
    """Calls an operator with options; errors are raised in its name."""
    assert op.parts.extended is not None
    try:
        return op.parts.extended(*operands, *params, **options)
    except ShardTensorError as error:
        raise_in_the_name_of(op, error)


def _place(op: Op, operands: Operands, params: Params, sharding: Any, has_options: bool, /, **options: Any) -> Any:
    """Calls an operator whose result gets the sharding that its argument ``out_sharding`` gives."""
    if has_options:  # The result is composed of several operators, so that it is transferred afterwards.
        return call("reshard", _extended(op, operands, params, **options), sharding)
    return call("place_result", operands, op=op, params=params, sharding=sharding)
