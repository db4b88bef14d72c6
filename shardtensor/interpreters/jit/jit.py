"""`jit`: traces a function once for each combination of argument types, and runs the program."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

import numpy as np

from shardtensor.core import call, hinted, innermost
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShardTensorError, type_text
from shardtensor.functions.random.random_keys import Key, SymbolicKey, key_of
from shardtensor.hints import explains_attributes
from shardtensor.host import fork
from shardtensor.interpreters.infer import ShapeDtypeStruct
from shardtensor.interpreters.jit.arguments import (
    Call,
    NotHashable,
    Signature,
    argument_names,
    call_of,
    copied_by,
    flattened,
    joined,
    not_hashable,
    plain_leaves,
    static_key,
)
from shardtensor.interpreters.jit.executable import Executable, Output
from shardtensor.interpreters.jit.lowered import Lowered
from shardtensor.interpreters.programs.compositions import program_of
from shardtensor.interpreters.programs.program import Program, Var
from shardtensor.interpreters.programs.trace import Tracer, tracing
from shardtensor.interpreters.programs.traced_values import Trace, Traced
from shardtensor.interpreters.views.views import View
from shardtensor.sharding.layout import as_sharding
from shardtensor.sharding.mesh import default_mesh
from shardtensor.tensor.operands import host_aval
from shardtensor.tensor.pytree import hint_to_register, leaves, map_leaves, map_with_prefix, paths, replaced
from shardtensor.tensor.tensor import SCALARS, ShardedTensor, tensor, without_elements

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_KEPT = 256
"""The number of programs that are kept for one function."""

_disabled: ContextVar[bool] = ContextVar("shardtensor_jit_disabled", default=False)


@contextlib.contextmanager
def disable_jit(disable: bool = True) -> Iterator[None]:
    """Runs functions that `jit` returned as they are, without tracing, while the ``with`` block runs in this thread.

    In them, every operator is executed when it is called, so that a debugger, ``print`` and ``float`` see elements.

    Args:
        disable: False traces functions in the block, also where it is in another one.

    >>> halved = st.jit(lambda x: x / 2 if float(x.sum()) > 1 else x)
    >>> with st.disable_jit():
    ...     halved(st.arange(3)).tolist()
    [0.0, 0.5, 1.0]
    """
    token = _disabled.set(bool(disable))
    try:
        yield
    finally:
        _disabled.reset(token)


class _Cache:
    """The programs of a function with certain options.

    Attributes:
        programs: the traced functions by key.
        captured: the tensors that the function closes over, by identity.
        by_window: whether the function reshapes arguments and writes or returns views, so that its results depend on
            the strides of arguments that are views.
        lock: held while the function is traced.
    """

    def __init__(self) -> None:
        self.programs: dict[Any, Executable] = {}
        self.captured: dict[int, ShardedTensor] = {}
        self.by_window = False
        self.lock = fork.lock()


@explains_attributes
class JitFunction(Generic[Arguments, Result]):
    """A function that is traced and then run as a program; `jit` returns it."""

    def __init__(
        self,
        fn: Callable[Arguments, Result],
        in_shardings: Any,
        out_shardings: Any,
        static: Signature,
        donated: Signature,
        executor: str | None,
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._in_shardings = in_shardings
        self._out_shardings = out_shardings
        self._static = static
        self._has_static = bool(static)
        self._donated = donated
        self._executor = executor
        self._cache = _cache_of(
            fn, (in_shardings, out_shardings, executor, *[(s.numbers, s.names) for s in (static, donated)])
        )

    def __repr__(self) -> str:
        return f"<jit of {_name_of(self._fn)}>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Returns the result of the function, which is traced if no call with such arguments has been."""
        if innermost() is not None or _disabled.get():
            return self._inline(args, kwargs)  # type: ignore[no-any-return]
        arguments, executable = self._executable_of(args, kwargs)
        return executable(arguments.units)  # type: ignore[no-any-return]

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces the function for these arguments, of which `ShapeDtypeStruct` may stand for tensors, and returns the
        program without running it.
        """
        shapes = map_leaves(_from_struct, (list(args), kwargs))
        arguments, executable = self._executable_of(shapes[0], shapes[1])
        return Lowered(executable, arguments.units, functools.partial(self._units_of, arguments))

    def _units_of(self, lowered: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Returns the inputs of a call for the program that was made for another one.

        Raises:
            ArgumentTypeError: the arguments are of other types.
        """
        arguments, _ = self._call(args, kwargs)
        if arguments.key != lowered.key:
            raise ArgumentTypeError(
                f"jit: {_name_of(self._fn)} was compiled for other arguments: shapes, dtypes, shardings, statics and "
                "the structure must be the same; call the function that jit returned, which traces for each"
            )
        return arguments.units

    # -- calls ---------------------------------------------------------------------------------------

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, Any]:
        """Returns the arguments as a `Call`, and the static ones with the structure of the others."""
        mine: Sequence[tuple[int | str, Any]] = ()
        if self._has_static:
            mine, args, kwargs = self._static.split(args, kwargs)
        values, form = flattened(args, kwargs)
        cache = self._cache
        try:
            arguments = call_of(values, cache.captured, cache.by_window)
        except NotHashable as error:
            raise not_hashable(error, values, self._names(mine, args, kwargs)) from None
        return arguments, (form, static_key(mine) if mine else ())

    def _executable_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, Executable]:
        """Returns the arguments of a call and its traced function."""
        arguments, more = self._call(args, kwargs)
        executable = self._cache.programs.get((arguments.key, more, default_mesh()))
        if executable is None:
            return self._traced(args, kwargs)
        return arguments, executable

    def _traced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, Executable]:
        """Traces the function, unless another thread has done so."""
        cache = self._cache
        with cache.lock:
            while True:
                arguments, more = self._call(args, kwargs)
                key = arguments.key, more, default_mesh()
                executable = cache.programs.get(key)
                if executable is not None:
                    return arguments, executable
                traced = self._trace(arguments, args, kwargs)
                if traced is not None:
                    break
            if len(cache.programs) >= _KEPT:
                cache.programs.pop(next(iter(cache.programs)))
            cache.programs[key] = traced
            return arguments, traced

    def _inline(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the function itself: jit is disabled, or an interpreter around it sees what it does."""
        args = self._placed(args)
        return self._out(self._fn(*args, **kwargs))

    # -- tracing -------------------------------------------------------------------------------------

    def _trace(self, arguments: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Executable | None:
        """Returns the traced function; None if a tensor that it closes over is among the arguments, or if the strides
        of an argument matter, which was not known when the call was looked up.
        """
        mine: Sequence[tuple[int | str, Any]] = ()
        if self._static:
            mine, args, kwargs = self._static.split(args, kwargs)
        names = self._names(mine, args, kwargs)
        where = plain_leaves(arguments)
        of_units = [
            next(n for n, leaf in zip(names, where, strict=True) if leaf.unit == k) for k in range(len(arguments.units))
        ]
        trace = Trace(_name_of(self._fn), _line_of(self._fn), of_units)
        tracer = Tracer(trace)
        inputs = [tracer.traced_input(x, 1 << k) for k, x in enumerate(arguments.units)]
        variables = [x._storage.value for x in inputs]
        for unit, x in zip(arguments.units, inputs, strict=True):
            if id(unit) in self._cache.captured:
                trace.roots[id(unit)] = x
            if tags := copied_by(unit):
                trace.copied[id(x)] = tags
        tree = (tuple(args), dict(kwargs))
        traced_leaves = [
            x if leaf.unit is None else _leaf(inputs[leaf.unit], leaf.view_spec, x)
            for x, leaf in zip(leaves(tree), where, strict=True)
        ]
        traced_args, traced_kwargs = replaced(tree, traced_leaves)
        every, named = joined(mine, traced_args, traced_kwargs)
        donated = self._donated_units(arguments, args, kwargs, where)
        with tracing(tracer):
            placed = self._placed(every)
            result = self._out(self._fn(*placed, **named))
            outputs = self._outputs(tracer, inputs, arguments.units, result, donated)
        bases = {id(getattr(x._storage, "base", x)) for x in arguments.units if isinstance(x, ShardedTensor)}
        unknown = [c.source for k, c in trace.captured.items() if k not in self._cache.captured]
        self._cache.captured.update({id(x): x for x in unknown})
        if any(id(x) in bases for x in unknown):
            return None
        views = any(o.view_spec is not None or o.value in trace.copies for o in outputs)
        if trace.copies_argument and (views or any(e.writes for e in tracer.equations)):
            self._cache.by_window = True
            return None
        captured = list(trace.captured.values())
        finals = {v: x._storage.value for v, x in zip(variables, inputs, strict=True)}
        finals |= {c.value: c.now.value for c in captured}
        arrays = {v for v, x in zip(variables, arguments.units, strict=True) if isinstance(x, ShardedTensor)}
        arrays |= {c.value for c in captured}
        program = Program(
            variables,
            [c.value for c in captured],
            tracer.equations,
            [o.value for o in outputs if o.value is not None],
            {before: after for before, after in finals.items() if before is not after and before in arrays},
        )
        single = len(outputs) == 1 and leaves(result)[0] is result
        form = None if single else map_leaves(lambda _: None, result)
        sources = [c.source for c in captured]
        return Executable(trace.name, program, sources, outputs, form, donated, self._executor)

    def _outputs(
        self, tracer: Tracer, inputs: Sequence[Any], units: Sequence[Any], result: Any, donated: Sequence[int]
    ) -> list[Output]:
        """Returns the leaves of the result: arguments and views of them, values of the program, and constants."""
        numbers = {id(x): k for k, x in enumerate(inputs) if k not in donated}
        outputs = []
        for path, x in zip(paths(result, "the result"), leaves(result), strict=True):
            if type(x) is SymbolicKey:
                outputs.append(Output(tracer._read(x.bits).value, makes=key_of))
                continue
            if not isinstance(x, ShardedTensor):
                outputs.append(_constant(path, x))
                continue
            base, view_spec = x._base_and_view()
            spec = None if base is x else view_spec
            base = tracer.trace.roots.get(id(base), base)
            if id(base) in numbers:
                k = numbers[id(base)]
                outputs.append(Output(None, k, spec, _window(units[k], x, spec)))
            elif type(base._storage) is not Traced:
                tracer._state(base)
                at = list(tracer.trace.captured).index(id(base))
                outputs.append(Output(None, len(inputs) + at, spec, x._aval))
            else:
                outputs.append(Output(base._storage.value, -1, spec, x._aval))
        return outputs

    def _donated_units(
        self, arguments: Call, args: Sequence[Any], kwargs: Mapping[str, Any], where: Sequence[Any]
    ) -> list[int]:
        if not self._donated:
            return []
        marks: list[bool] = []
        for n, x in enumerate(args):
            marks += [n in self._donated.numbers] * len(leaves(x))
        for name in sorted(kwargs):
            marks += [name in self._donated.names] * len(leaves(kwargs[name]))
        units = [leaf.unit for leaf, mark in zip(where, marks, strict=True) if mark and leaf.unit is not None]
        used = [leaf.unit for leaf in where]
        for k in units:
            if used.count(k) > 1 or id(arguments.units[k]) in self._cache.captured:
                raise ArgumentError(
                    f"jit: an argument of {_name_of(self._fn)} is donated, and another argument or the function itself "
                    "has the same tensor or a view of it; do not donate it, or give a copy"
                )
        return units

    def _names(self, mine: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """Returns the access path of each leaf of the arguments that are not static."""
        numbers = [n for n, _ in mine if isinstance(n, int)]
        every, _ = joined([(n, None) for n in numbers], args, {})
        names = argument_names(self._fn, every, kwargs)
        taken = []
        at = 0
        for n, x in enumerate(every):
            count = len(leaves(x))
            taken += [] if n in numbers else names[at : at + count]
            at += count
        return taken + names[at:]

    # -- shardings -----------------------------------------------------------------------------------

    def _placed(self, args: Sequence[Any]) -> Sequence[Any]:
        """Returns the positional arguments in the layouts of ``in_shardings``."""
        if self._in_shardings is None:
            return args
        kept = [n for n in range(len(args)) if n not in self._static.numbers]
        tree = tuple([args[n] for n in kept])
        shardings = self._in_shardings
        shardings = tuple(shardings) if isinstance(shardings, list) else shardings
        placed = replaced(tree, _resharded(tree, shardings, "in_shardings", "args"))
        arguments = list(args)
        for n, x in zip(kept, placed, strict=True):
            arguments[n] = x
        return arguments

    def _out(self, result: Any) -> Any:
        """Returns the result in the layouts of ``out_shardings``."""
        if self._out_shardings is None:
            return result
        return replaced(result, _resharded(result, self._out_shardings, "out_shardings", "the result"))


def _resharded(tree: Any, shardings: Any, what: str, of: str) -> list[Any]:
    """Returns the leaves of a pytree in the shardings that a prefix tree gives, where it gives one."""

    def place(x: Any, sharding: Any) -> Any:
        if sharding is None or not isinstance(x, (ShardedTensor, np.ndarray)):
            return x
        target = as_sharding(sharding, x.ndim, f"jit: {what}")
        same = isinstance(x, ShardedTensor) and x.sharding == target
        return x if same else call("reshard", x, target)

    return map_with_prefix(place, tree, shardings, "jit", what, of)


def _leaf(x: Any, view_spec: Any, argument: Any) -> Any:
    """Returns the traced argument for a leaf: the traced input itself, or a view of it."""
    if type(argument) is Key:
        return SymbolicKey(x)
    return x if view_spec is None else tensor(argument._aval, View(x, view_spec))


def _window(unit: Any, x: ShardedTensor, view_spec: Any) -> Any:
    """Returns the aval of a view of an input; for one of a host array, an aval of a host array."""
    if view_spec is None or isinstance(unit, ShardedTensor):
        return x._aval
    return host_aval(x.shape, x.dtype)


def _constant(path: str, x: Any) -> Output:
    """Returns a leaf of the result that is not a tensor."""
    if isinstance(x, np.ndarray):
        array = x.copy()
        return Output(constant=array.copy)
    if (
        x is not None
        and type(x) not in SCALARS
        and not isinstance(x, (str, bytes, np.generic, type))
        and not _is_constant(x)
    ):
        raise ArgumentTypeError(
            f"jit: {path} is {type_text(x)}, which is not a tensor and can change; return tensors, numbers, text, "
            f"or containers of them{hint_to_register(x)}"
        )
    return Output(constant=lambda: x)


def _is_constant(x: Any) -> bool:
    """Tells whether an object can neither change nor hold tracers, which cannot be hashed, as far as its hash tells."""
    # Methods, weak references and objects that are equal to themselves only may hold tracers, and have a hash.
    hashes: Any = type(x).__hash__
    if callable(x) or hashes is None or hashes is object.__hash__:
        return False
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _from_struct(x: Any) -> Any:
    return without_elements(x._aval) if isinstance(x, ShapeDtypeStruct) else x


_ATTRIBUTE = "__shardtensor_jit__"
"""The attribute of a function that has its caches, which end with it: the garbage collector sees the cycle."""


class _Caches(dict[Any, _Cache]):
    """The caches of one function, by options. Functions that wrap it copy its attributes, and have other caches.

    Attributes:
        owner: a weak reference to the function.
    """

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.owner = weakref.ref(owner)


def _cache_of(fn: Any, options: Any) -> _Cache:
    """Returns the cache that functions jit of one function with equal options share."""
    try:
        hash(options)
        caches: _Caches | None = vars(fn).get(_ATTRIBUTE)
        if caches is None or caches.owner() is not fn:
            caches = _Caches(fn)
            setattr(fn, _ATTRIBUTE, caches)
    except (TypeError, AttributeError):  # It has no attributes, as bound methods and functions in C.
        return _Cache()
    return caches.setdefault(options, _Cache())


def _name_of(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__name__", type(fn).__name__))


def _line_of(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    code = getattr(fn, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else type(fn).__name__


def compiled(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], arrays: Sequence[Any]
) -> Callable[[Sequence[Any]], Any] | None:
    """Returns a composition of operators as a function of its arrays, which kernels compute; None if it has no program
    (see `shardtensor.interpreters.programs.compositions.program_of`). The function returns NotImplemented where the
    composition has to run: jit is disabled, or there is an error, which the composition raises in its own name.

    On the host, NumPy's functions compute the kernels, with the bits of eager mode.
    """
    composition = program_of(function, args, kwargs, arrays)
    if composition is None:
        return None
    program, result = composition
    form = None if type(result) is Var else map_leaves(lambda _: None, result)
    on_host = all(kind.backend.on_host for kind in program.avals())
    outputs, executor = [Output(v) for v in program.outputs], "numpy" if on_host else None
    executable = Executable(_name_of(function), program, (), outputs, form, (), executor)

    def run(arrays: Sequence[Any]) -> Any:
        if _disabled.get():
            return NotImplemented
        try:
            return executable(arrays)
        except ShardTensorError:
            return NotImplemented

    return run


class JitOptions(TypedDict, total=False):
    """The options of `jit`."""

    in_shardings: Any
    out_shardings: Any
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    executor: str | None


class JitDecorator(Protocol):
    """The type of a call of `jit` without a function."""

    def __call__(self, fn: Callable[Arguments, Result], /) -> JitFunction[Arguments, Result]:
        """Returns the function that runs the program of ``fn``."""


@overload
def jit(fn: Callable[Arguments, Result], /, **options: Unpack[JitOptions]) -> JitFunction[Arguments, Result]: ...


@overload
def jit(fn: None = None, /, **options: Unpack[JitOptions]) -> JitDecorator: ...


@hinted
def jit(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    executor: str | None = None,
) -> Any:
    """Returns a function with the results of ``fn`` that traces it once and then runs its program.

    Tensors, host arrays and Python scalars among the leaves of the arguments are traced; everything else is static. The
    function is traced again for other shapes, dtypes, shardings, statics, default meshes, or another aliasing of its
    arguments, and not for other elements or numbers. Results, their layouts, and writes to arguments and to tensors
    that the function closes over are those of ``fn``. The writes are visible after the call: all of them, or none if
    the call raises an error.

    Args:
        fn: the function. It is called while it is traced, with tensors that have no elements. Without it, a decorator
            is returned: ``@st.jit(donate_argnums=0)``.
        in_shardings: the layouts into which positional arguments are transferred first: a device, a mesh, a sharding, a
            `P` on the mesh in use or None, or a prefix pytree of these.
        out_shardings: likewise for the result.
        static_argnums, static_argnames: the arguments that are static, although they are numbers or arrays; they must
            be hashable.
        donate_argnums, donate_argnames: the arguments whose memory is given away, also if the program then raises an
            error: using them after the call raises DonatedError.
        executor: what computes chains of elementwise functions, and reductions of rows: ``"numpy"``, NumPy's functions
            block by block (on other backends operators one by one), with the bits of eager mode; ``"c"``, compiled C
            (on GPUs CUDA), within a few ulp for functions such as `exp`, and without floating-point warnings; None, on
            GPUs CUDA, else NumPy, and for large arrays C as soon as it has been compiled in the background.

    Raises:
        BackendError: ``executor="c"``, and there is no C compiler, or it fails.
        ArgumentTypeError: ``fn`` is not a function; at a call: a static argument is not hashable.
        ArgumentError: a number or name is not that of an argument; at a call: a donated tensor is given twice, or
            shardings do not have the structure of the arguments or of the result.
        ConcretizationError: at the first call: ``fn`` needs elements of a traced array.

    >>> @st.jit
    ... def step(w, x, rate):
    ...     w -= rate * (x * w).sum()
    ...     return w
    >>> step(st.ones(3), st.arange(3), 0.5).tolist()
    [-0.5, -0.5, -0.5]
    >>> print(step.lower(st.ones(3), st.arange(3), 0.5).as_text())
    { lambda v0:f8[3]P('d'), v1:i8[3]P('d'), v2:float .
      v3:f8[3]P('d') = multiply v1 v0
      v4:f8[]P() = sum(keepdims=False) v3
      v5:f8[]P() = multiply v2 v4
      v6:f8[3]P('d') = put[0:3] subtract v0 v0 v5
      in () v0 := v6 }
    """
    if fn is None:
        return functools.partial(
            jit, in_shardings=in_shardings, out_shardings=out_shardings, static_argnums=static_argnums,
            static_argnames=static_argnames, donate_argnums=donate_argnums, donate_argnames=donate_argnames,
            executor=executor,
        )  # fmt: skip
    if not callable(fn):
        raise ArgumentTypeError(f"jit: fn is {type_text(fn)}; wanted a function")
    if executor not in (None, "numpy", "c"):
        raise ArgumentError(f'jit: executor is {executor!r}; wanted "numpy", "c" or None')
    return JitFunction(
        fn,
        in_shardings,
        out_shardings,
        Signature(fn, static_argnums, static_argnames, "static"),
        Signature(fn, donate_argnums, donate_argnames, "donate"),
        executor,
    )
