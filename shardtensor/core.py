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
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import CodeType
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import numpy as np

from shardtensor.errors import ArgumentError, ArgumentTypeError, DistributedError, ShardTensorError, type_text
from shardtensor.hints import wrong_arguments
from shardtensor.sequences import as_tuple
from shardtensor.signatures import without_quotes
from shardtensor.tracebacks import GENERATED

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Body = TypeVar("Body", bound=Callable[..., Any])

Function = Callable[..., Any]
Operands = tuple[Any, ...]
Params = tuple[Any, ...]


TAGS: dict[str, str] = {}
"""What a tag of operators says, by tag: each is true of its operators and read by a module that does not name them."""


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Op:
    """The declaration of an operator and its implementations.

    Attributes:
        name: the public name.
        error_name: the name that error messages begin with: for an internal operator, the public operator that it
            implements.
        operands: the names of the array arguments, in order; one name if the operator takes a sequence of arrays. The
            declaration names them, except where they are the first arguments, as many as the rule has operands (one
            if the rule is no string).
        optional: the names of the operands that may be None, which is their default.
        params: the names of the other arguments, in order. `bind` receives their values, defaults included.
        iterable: the names of the params that are annotated as Iterable: `bind` receives the items of an iterator in a
            tuple. Other params may be sequences, but no iterators, which the first use would exhaust.
        options: the names of keyword arguments that the operator itself lacks. A call in which one of them differs from
            its default is that of `extended`, a composition of operators; rules, kernels and plans never see them.
        positional: the number of arguments that can be passed by position.
        variadic: whether the operator takes a sequence of arrays, as one argument or as ``*arrays``.
        dispatch: the function that users call.
        rule: how the dimensions of the operands correspond to those of the result (see `shardtensor.sharding.rules`);
            for an operator that creates arrays, a function that returns the shape and dtype of the result; None for an
            operator with a `movement`, `composite` or `algorithm` that determines the layout itself.
        combine: the name of the monoid (see `shardtensor.functions.building.monoids`) that combines the partial results
            of shards where a sharded dimension is reduced.
        kernel: the implementation on the arrays of one device, ``kernel(xp, context, *arrays, **params)``; None means
            the function of the same name in the backend's namespace.
        movement: for operators that only move elements: ``movement(avals, mesh, **params)`` returns a
            `shardtensor.functions.building.data_movement.DataMovement`.
        composed: for elementwise operators of arrays only, without other parameters, that libraries may lack: a
            function of the operands that composes the result, a new array, of other operators. It is used on the arrays
            of one device wherever the backend's namespace has no function of the operator's name. If NumPy has a ufunc
            of that name, the operands are first cast to the dtypes in which that computes, and the result to its dtype.
        composite: for operators that are composed of other operators: a function of the operator's own arguments. It
            returns NotImplemented for arguments with which the operator has to run itself.
        extended: for operators with options: a function of the operator's own arguments and, by name, of the options.
        small: for composed operators that return independent tensors: the function of the operator's own arguments that
            computes the results from whole host arrays, or returns NotImplemented. It is used for small results, for
            which the calls of other operators would take much longer.
        algorithm: for operators with a distributed algorithm instead of a plan made from the rule:
            ``algorithm(*operands, *params)``.
        announcing: for operators with an algorithm whose transfers follow from elements: the algorithm that records
            them as it runs, in place of ``algorithm`` where they are recorded.
        infer: for operators with an algorithm: ``infer(*operands, *params)`` returns the result, with each tensor
            without elements or its aval in its place, and records the transfers if a log is active. The plan of any
            other operator does both.
        view_spec: for operators that return a view in NumPy: ``view_spec(spec, *params)`` returns the view spec of the
            result, given that of the operand (see `shardtensor.sharding.view_spec`), or None where the result is a
            copy.
        blockwise: for elementwise operators that are no ufuncs: the function of the same operands and parameters that
            computes blocks of host arrays (see `shardtensor.host.blockwise`); for reductions and products, the kernel
            of blocks, where it is not that of shards.
        recorded: for collectives: ``recorded(backend, operand, *params)`` is called in place of ``algorithm`` in a
            mapped function where the array library records a gradient of an array in the operand.
        derivative: how the operator is differentiated (see `shardtensor.functions.derivatives.forms`); None for an
            operator that is composed of others, whose derivatives are used, and before the row is loaded.
        batching: for operators of packages that batching does not know: the name of the module that says how `vmap`
            calls them.
        dtype: the dtype of the result: a dtype, or a function of the operands, with one element each, and of the params
            that returns an array of it. None: that of NumPy's function of the same name; for an operator with a kernel
            and no monoid, that of the first array.
        blocks: whether an operator with a monoid may compute long operands of the host block by block.
        product: whether the operator is a sum of products of its two operands, so that it is the sum of the results for
            parts of a contracted dimension, wherever these are.
        ufunc: the name of the function that NumPy's floating-point errors name.
        is_ufunc: whether the operator is elementwise and NumPy has a ufunc of the same name.
        lists_only: whether an array is rejected as the sequence of arrays, since its rows would be taken as the items.
        creates: whether the operator creates arrays on the device or sharding given by its parameter ``device``.
        prototype: for an operator that creates arrays: whether its first operand gives the shape, dtype and layout, and
            its elements are not read.
        keeps_arrays: whether a 0-d result is an array, as in NumPy; the 0-d results of other operators are scalars, and
            so is what a plan makes of scalars.
        array_views: whether a view of a scalar is an array, as ``x[...]`` is in NumPy.
        fails_late: the kinds of dtype (NumPy's letters) for which the kernel can raise an error after it has written a
            part of its result.
        assigns: whether the operator is the functional form of the assignment ``x[index] = value``.
        escapes: whether the call needs elements: the result leaves the library (a host array, a capsule), or its shape
            depends on them.
        trees: the names of the operands that are pytrees of arrays and other objects, such as indices.
        gathers: the reason why devices may hold whole operands that are split, where the operator needs a whole
            dimension and no other one can take the split; empty for operators of which no device holds more than three
            times its share of the operands and of the result, and a constant.
        spmd: whether the operator is a map, a collective, a loop or a branch: it runs functions, or in functions, of
            which errors pass unchanged.
        functions: the names of the params that are functions of tensors, or tuples of functions, which a loop or a
            branch calls: a program has a program for each of them.
        placeable: whether the signature has ``out_sharding``, which is no parameter of the operator: a call that gives
            it is one of `place_result`.
        tags: what else is true of the operator (see `TAGS`).
    """

    function: dataclasses.InitVar[Function]
    rule: Any = None
    _: dataclasses.KW_ONLY
    operands: tuple[str, ...] = None  # type: ignore[assignment]  # See `__post_init__`.
    variadic: bool = False
    composed: Function | None = None
    combine: str | None = None
    error_name: str = ""
    lists_only: bool = False
    prototype: bool = False
    keeps_arrays: bool = False
    array_views: bool = False
    fails_late: str = ""
    assigns: bool = False
    escapes: bool = False
    trees: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    gathers: str = ""
    spmd: bool = False
    functions: tuple[str, ...] = ()
    dtype: Any = None
    blocks: bool = True
    product: bool = False
    ufunc: str = ""
    tags: frozenset[str] = frozenset()
    kernel: Function | None = dataclasses.field(default=None, init=False)
    movement: Function | None = dataclasses.field(default=None, init=False)
    composite: Function | None = dataclasses.field(default=None, init=False)
    extended: Function | None = dataclasses.field(default=None, init=False)
    small: Function | None = dataclasses.field(default=None, init=False)
    algorithm: Function | None = dataclasses.field(default=None, init=False)
    announcing: Function | None = dataclasses.field(default=None, init=False)
    infer: Function | None = dataclasses.field(default=None, init=False)
    view_spec: Function | None = dataclasses.field(default=None, init=False)
    blockwise: Function | None = dataclasses.field(default=None, init=False)
    recorded: Function | None = dataclasses.field(default=None, init=False)
    derivative: Any = dataclasses.field(default=None, init=False)
    batching: str | None = dataclasses.field(default=None, init=False)
    name: str = dataclasses.field(init=False)
    optional: tuple[str, ...] = dataclasses.field(init=False)
    params: tuple[str, ...] = dataclasses.field(init=False)
    iterable: tuple[str, ...] = dataclasses.field(init=False)
    positional: int = dataclasses.field(init=False)
    is_ufunc: bool = dataclasses.field(init=False)
    creates: bool = dataclasses.field(init=False)
    dispatch: Function = dataclasses.field(init=False)
    placeable: bool = dataclasses.field(init=False)
    _placed: Op | None = dataclasses.field(default=None, init=False)
    _split: Function | None = dataclasses.field(default=None, init=False)

    def __post_init__(self, function: Function) -> None:
        self.name = function.__name__
        self.error_name = self.error_name or self.name
        self.ufunc = self.ufunc or self.name
        self.tags = frozenset(self.tags)
        if unknown := self.tags - TAGS.keys():
            raise ArgumentError(f"operator: {self.name} has the tag {min(unknown)!r}; wanted one of {sorted(TAGS)}")
        signature = inspect.signature(without_quotes(function))
        arguments = signature.parameters
        if self.operands is None:
            count = self.rule.partition("->")[0].count(",") + 1 if isinstance(self.rule, str) else 1
            self.operands = tuple(arguments)[:count]
        self.optional = tuple(n for n in self.operands if arguments[n].default is None)
        self.params = tuple(n for n in arguments if n not in (*self.operands, *self.options, "out_sharding"))
        self.iterable = tuple(n for n in self.params if "Iterable" in str(arguments[n].annotation))
        self.positional = sum(a.kind is not a.KEYWORD_ONLY for a in arguments.values())
        elementwise = self.rule in ("... -> ...", "..., ... -> ...")
        self.is_ufunc = elementwise and isinstance(getattr(np, self.name, None), np.ufunc)
        self.creates = "device" in self.params and not isinstance(self.rule, str)
        dispatch = _dispatcher(self, function.__code__, list(arguments.values()))
        self.dispatch = functools.update_wrapper(dispatch, function)  # Editors find the declaration by __wrapped__.
        self.dispatch.__signature__ = signature  # type: ignore[attr-defined]
        self.placeable = "out_sharding" in arguments

    def split(self, *args: Any, **kwargs: Any) -> tuple[Operands, Params]:
        """Returns the operands and the params of a call with these arguments."""
        if self._split is None:  # Compiled at the first use: for all operators, it takes 5 % of the import.
            arguments = list(inspect.signature(self.dispatch).parameters.values())
            result = ", ".join(_operands_and_params(self))
            self._split = _compiled(self, self.dispatch.__code__, arguments, result)
        found: tuple[Operands, Params] = self._split(*args, **kwargs)
        return found

    @property
    def placed(self) -> Op | None:
        """The operator with the further parameter ``layout``, by which its plan combines partial results directly into
        that layout where it can; None if it has no monoid or its signature no ``out_sharding``.
        """
        if self._placed is None and self.combine and self.placeable:
            params = (*self.params, "layout")
            self._placed = self.changed(params=params, composite=None, small=None, placeable=False)
        return self._placed

    def changed(self, **changes: Any) -> Op:
        """Returns a copy with other values of some attributes. It is not in `OPS`."""
        made: Op = object.__new__(Op)
        for field in dataclasses.fields(self):
            setattr(made, field.name, changes.get(field.name, getattr(self, field.name)))
        return made

    def __repr__(self) -> str:
        return f"<operator {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (lookup, (self.name,)) if OPS.get(self.name) is self else (_lookup_placed, (self.name,))


class OperatorTable(dict[str, Op]):
    """The declared operators by name.

    Attributes:
        chapters: the modules that are imported when one of their names is first looked up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.chapters: dict[str, str] = {}

    def __missing__(self, name: str) -> Op:
        op: Op | None = self.get(name)
        if op is None:
            raise KeyError(name)
        return op

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the operator with the given name, or the default if there is none."""
        op = super().get(name)
        if op is None and name in self.chapters:
            importlib.import_module(self.chapters[name])
            op = super().get(name)
        return default if op is None else op


OPS = OperatorTable()
"""Every operator by name. Tests of all operators iterate over this table, after importing all chapters."""


def lookup(name: str) -> Op:
    """Returns the operator with the given name."""
    return OPS[name]


def _lookup_placed(name: str) -> Op | None:
    return lookup(name).placed


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
        operand that is not given; those in ``op.trees`` are pytrees.
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

    def run(self, program: Any, given: Any, /) -> Any:
        """Runs a program of many operators on its inputs as one call, by its method ``execute``. Its method ``infer``
        infers it.
        """
        return program.execute(given)

    def mapped(self, submesh: Any, /) -> Interpreter:
        """Returns the interpreter of a mapped function on the devices of ``submesh``, whose arrays have no elements.

        It is called by the inference of a map (see `shardtensor.spmd.maps.launch.map_shards`), once for each program.
        """
        return self


# The contexts hold the bound methods `apply`: a call of an operator looks up one attribute less.
_innermost: ContextVar[Callable[..., Any] | None] = ContextVar("shardtensor_interpreter", default=None)
_outermost: Callable[..., Any]
_default: Interpreter | None = None


def set_default_interpreter(interpreter: Interpreter) -> None:
    """Sets the interpreter of calls outside of all other interpreters. The module of the eager interpreter calls it."""
    global _default
    _default = interpreter
    set_outermost(None)


def set_outermost(interpreter: Interpreter | None) -> None:
    """Puts an interpreter around the default one, in all contexts; None removes it."""
    global _outermost
    _outermost = (interpreter or _default).apply  # type: ignore[union-attr]


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
    found: Interpreter | None = apply and apply.__self__  # type: ignore[attr-defined]
    return None if found is _default else found


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
    """Declares an operator; see the module's docstring for an example, and `Op` for the rule and the properties.

    The declaration adds the operator to ``__all__`` of its module, so that ``import *`` imports the operators only.

    Raises:
        ArgumentError: there is an operator of that name.
    """

    def declare(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        if function.__name__ in OPS:
            raise ArgumentError(f"operator: {function.__name__} is declared already; wanted another name")
        op = OPS[function.__name__] = Op(function, rule, **properties)
        if function.__qualname__ == op.name:
            scope = function.__globals__
            scope["__all__"] = [*scope.get("__all__", ()), op.name]
        return cast("Callable[Arguments, Result]", op.dispatch)

    return declare


def implements(function: Function, *parts: str) -> Callable[[Body], Body]:
    """Attaches the decorated function to a declared operator as its ``kernel``, ``movement``, ``composite``,
    ``extended``, ``small``, ``algorithm``, ``announcing``, ``infer``, ``view_spec`` or ``blockwise``, or as several
    of these.
    """

    def attach(body: Body) -> Body:
        for part in parts:
            setattr(OPS[function.__name__], part, body)
        return body

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
        fused: whether it is one kernel on GPUs: it is elementwise, and its operators are arithmetic and comparisons, so
            that a kernel has their bits; it reads no elements.
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
    """Declares that the error of a call with arguments that the function does not take says which ones it takes, and
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
    if text := wrong_arguments(function.__name__, parameters, args, kwargs):
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
        composed = op.composite and not op.spmd and not calls_others and name != op.error_name and name in OPS
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


def _dispatcher(op: Op, declaration: CodeType, arguments: Sequence[inspect.Parameter]) -> Function:
    """Makes the function that users call."""
    operands, params = _operands_and_params(op)
    result = f"_bind(_op, {operands}, {params})"
    named = "".join([f", {n}={n}" for n in op.options])
    given = " or ".join([f"{n} is not _default_{n}" for n in op.options])
    if op.options:  # Comparing them with their defaults costs the calls without options a few nanoseconds.
        result = f"_extended(_op, {operands}, {params}{named}) if {given} else {result}"
    if "out_sharding" in [a.name for a in arguments]:
        result = (
            f"({result}) if out_sharding is None else "
            f"_place(_op, {operands}, {params}, out_sharding, {given or False}{named})"
        )
    # All arguments have a default, so that `_refuse` raises the error for a call that lacks some.
    required = [a.name for a in arguments if a.default is a.empty and a.kind is not a.VAR_POSITIONAL]
    only_by_position = [a.name for a in arguments if a.kind is a.POSITIONAL_ONLY and a.name in required]
    checked = [n for n in required if n not in only_by_position[:-1]]  # A call that gives the last one gives all.
    more = "()" if any(a.kind is a.VAR_POSITIONAL for a in arguments) else "_more"
    wrong = " or ".join(["_others", more, *[f"{n} is _REQUIRED" for n in checked]])
    result = f"_refuse(_op, {more}, _others, locals()) if {wrong} else {result}"
    return _compiled(op, declaration, arguments, result, takes_all=True)


class _Required:
    """Stands for an argument that is not given."""


_REQUIRED = _Required()


def _refuse(op: Op, more: Operands, others: dict[str, Any], values: dict[str, Any]) -> NoReturn:
    """Raises the error for arguments that an operator does not take, or lacks.

    Args:
        op: the operator.
        more: the positional arguments beyond those that it takes.
        others: the keyword arguments that it does not take.
        values: the values of its arguments.
    """
    parameters = inspect.signature(op.dispatch).parameters
    required = [n for n, a in parameters.items() if a.default is a.empty and a.kind is not a.VAR_POSITIONAL]
    given = {n: values[n] for n in required if values[n] is not _REQUIRED}
    args = [given.pop(n) for n in list(given) if parameters[n].kind is inspect.Parameter.POSITIONAL_ONLY]
    if more:
        args, given = [None] * op.positional + list(more), {}
    raise ArgumentTypeError(wrong_arguments(op.error_name, parameters, args, others | given))


def _operands_and_params(op: Op) -> tuple[str, str]:
    """Returns the sources of the tuples of operands and of parameters of a call."""
    operands = f"_several(_op, {op.operands[0]})" if op.variadic else f"({''.join(n + ', ' for n in op.operands)})"
    return operands, f"({''.join((_taken if n in op.iterable else str)(n) + ', ' for n in op.params)})"


def _taken(name: str) -> str:
    """Returns the source of a parameter that may be an iterator: rules, kernels and caches get a tuple of its items."""
    return f"_as_tuple({name})"


def _compiled(
    op: Op, declaration: CodeType, arguments: Sequence[inspect.Parameter], result: str, takes_all: bool = False
) -> Function:
    """Returns a function with the signature of the operator whose result is an expression, given as source.

    The function is compiled from the declared signature, so that Python binds arguments and defaults, which is ten
    times faster than `inspect.Signature.bind`; if it ``takes_all`` arguments, the others are ``_more`` and ``_others``.
    In tracebacks its line is that of the declaration.
    """
    scope: dict[str, Any] = {
        **GENERATED,
        "_as_tuple": as_tuple,
        "_bind": bind,
        "_extended": _extended,
        "_op": op,
        "_place": _place,
        "_refuse": _refuse,
        "_REQUIRED": _REQUIRED,
        "_several": _several,
    }
    scope |= {f"_default_{a.name}": a.default for a in arguments if a.default is not a.empty}
    header = _header(arguments, "*_more", "=_REQUIRED") + ", **_others" if takes_all else _header(arguments)
    # Beyond the end of a line of the declaration, tracebacks mark no columns.
    exec(_code(f"def _function({header}): return {' ' * 120}{result}"), scope)
    function: Function = scope["_function"]
    function.__code__ = function.__code__.replace(
        co_name=op.name, co_filename=declaration.co_filename, co_firstlineno=declaration.co_firstlineno
    )
    return function


@functools.cache  # Many operators have the same signature, and compiling takes most of the time of a declaration.
def _code(source: str) -> Any:
    return compile(source, "<operator>", "exec")


def _extended(op: Op, operands: Operands, params: Params, /, **options: Any) -> Any:
    """Calls an operator with options; errors are raised in its name."""
    assert op.extended is not None
    try:
        return op.extended(*operands, *params, **options)
    except ShardTensorError as error:
        raise_in_the_name_of(op, error)


def _place(op: Op, operands: Operands, params: Params, sharding: Any, has_options: bool, /, **options: Any) -> Any:
    """Calls an operator whose result gets the sharding that its argument ``out_sharding`` gives."""
    if has_options:  # The result is composed of several operators, so that it is transferred afterwards.
        return call("reshard", _extended(op, operands, params, **options), sharding)
    return call("place_result", operands, op=op, params=params, sharding=sharding)


def _header(arguments: Sequence[inspect.Parameter], star: str = "*", required: str = "") -> str:
    """Returns the arguments of a signature as source, with the defaults as variables, ``star`` behind those that are
    given by position, and ``required`` behind the name of each that has no default.
    """
    kinds = [a.kind for a in arguments]
    parts = [
        f"*{a.name}" if a.kind is a.VAR_POSITIONAL
        else f"{a.name}{required}" if a.default is a.empty
        else f"{a.name}=_default_{a.name}"
        for a in arguments
    ]  # fmt: skip
    positional = kinds.count(inspect.Parameter.POSITIONAL_ONLY)
    by_name = kinds.count(inspect.Parameter.KEYWORD_ONLY)
    if inspect.Parameter.VAR_POSITIONAL not in kinds and (by_name or star != "*"):
        parts.insert(len(parts) - by_name, star)
    if positional:
        parts.insert(positional, "/")
    return ", ".join(parts)


def _several(op: Op, arrays: Any) -> Operands:
    """Returns the operands of an operator that takes a sequence of arrays.

    Raises:
        ArgumentTypeError: ``arrays`` is not iterable, or it is an array and the operator accepts only lists.
    """
    if op.lists_only and hasattr(arrays, "shape"):
        raise ArgumentTypeError(
            f"{op.error_name}: {op.operands[0]} is one array of shape {tuple(arrays.shape)}, which is whole as it is; "
            "wanted the list that st.shard or st.pmap returned (st.concat joins the rows of an array)"
        )
    try:
        items = iter(arrays)
    except TypeError:
        kind = type_text(arrays)
        raise ArgumentTypeError(f"{op.error_name}: {op.operands[0]} is {kind}; wanted a list of arrays") from None
    found = tuple(items)
    for k, item in enumerate(found):
        if item is None:
            raise ArgumentTypeError(
                f"{op.error_name}: {op.operands[0]}[{k}] is None; wanted a tensor, an array or a scalar in its place"
            )
    return found
