"""`grad` and its relatives, with the signatures of JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import call, hinted, innermost, interpreted_by
from shardtensor.custom_derivatives import is_zero
from shardtensor.errors import ArgumentError, ArgumentTypeError, type_text
from shardtensor.functions.derivatives.cotangents import is_inexact
from shardtensor.interpreters.batching.batcher import Batcher
from shardtensor.interpreters.differentiation import branch_derivatives, loop_derivatives  # noqa: F401 - they attach derivatives
from shardtensor.interpreters.differentiation.backward import or_zeros
from shardtensor.interpreters.differentiation.outside import Outside
from shardtensor.interpreters.differentiation.run import Run, stand_in_of
from shardtensor.interpreters.differentiation.tangents import NeedsTape, like
from shardtensor.interpreters.differentiation.tape import Tape
from shardtensor.interpreters.differentiation.taped_values import kind_of
from shardtensor.interpreters.program_arrays import tensor_here
from shardtensor.tensor.operands import is_data
from shardtensor.tensor.pytree import form_of, leaves, map_leaves, paths
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import of_cotangent, summed


def argument_numbers(caller: str, argnums: Any, count: int) -> tuple[int, ...]:
    """Returns the numbers of the arguments that are differentiated, counted from the first one."""
    positions = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    for n in positions:
        if not isinstance(n, (int, np.integer)) or isinstance(n, bool):
            raise ArgumentTypeError(f"{caller}: argnums is {argnums!r}; wanted an integer, or several in a tuple")
        if not -count <= n < count:
            raise ArgumentError(
                f"{caller}: argnums is {argnums!r}, and the function is called with {count} positional arguments; "
                "arguments that are given by name are not differentiated"
            )
    numbers = [int(n) % count for n in positions]
    for n in numbers:
        if numbers.count(n) > 1:
            raise ArgumentError(f"{caller}: argnums is {argnums!r}, which names argument {n} twice; wanted it once")
    return tuple(numbers)


def check_function(caller: str, fn: Any) -> None:
    """Raises ArgumentTypeError if what is to be differentiated is not a function."""
    if not callable(fn):
        raise ArgumentTypeError(f"{caller}: fun is {type_text(fn)}; wanted a function")


def _scalar(caller: str, run: Run, holomorphic: bool) -> Any:
    """Returns the cotangent of a result that has to be one number: 1."""
    results = leaves(run.value)
    y: Any = results[0] if len(results) == 1 else None
    if len(results) != 1 or results[0] is not run.value or np.shape(y) != ():
        what = f"an array of shape {tuple(y.shape)}" if hasattr(run.value, "shape") else type_text(run.value)
        raise ArgumentTypeError(
            f"{caller}: the function returns {what}; wanted one number, such as the sum of a loss (st.vjp takes any "
            "result, has_aux=True returns others besides it)"
        )
    if not is_data(y) and not isinstance(y, (ShardedTensor, np.generic, bool, int, float, complex)):
        what = "None, as one without a return statement does" if y is None else type_text(y)
        raise ArgumentTypeError(f"{caller}: the function returns {what}; wanted one number, such as the sum of a loss")
    dtype = y.dtype if hasattr(y, "dtype") else np.asarray(y).dtype
    if holomorphic and dtype.kind != "c":
        raise ArgumentTypeError(
            f"{caller}: the function returns dtype {dtype}; wanted complex numbers, since holomorphic is true"
        )
    if not holomorphic and dtype.kind == "c":
        raise ArgumentTypeError(
            f"{caller}: the function returns dtype {dtype}; wanted a real number (holomorphic=True differentiates "
            "holomorphic functions)"
        )
    if not is_inexact(dtype):
        raise ArgumentTypeError(
            f"{caller}: the function returns dtype {dtype}; wanted a floating-point number: counts and comparisons "
            "have no gradient"
        )
    if type(y) is not ShardedTensor and run.tape.was_read:
        raise ArgumentTypeError(
            f"{caller}: the function returns the Python number {y!r:.40}, and has read elements of its arguments as "
            "such numbers, by float(x) or x.item(), which have no gradient; wanted a tensor: use functions of the "
            "library in place of those of math"
        )
    if type(y) is not ShardedTensor:
        return call("ones", (), dtype=dtype)
    return call("ones", (), dtype=dtype, device=summed(y._aval).sharding)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that computes the value of ``fun`` and its gradient.

    Arguments are those of `grad`.

    Returns:
        A function of the arguments of ``fun``, which returns the pair (value, gradient), or with ``has_aux``
        ((value, aux), gradient).

    >>> x = st.asarray([3.0, 4.0])
    >>> value, gradient = st.value_and_grad(lambda x: (x * x).sum())(x)
    >>> float(value), gradient.tolist()
    (25.0, [6.0, 8.0])
    """
    return _value_and_grad("value_and_grad", fun, argnums, has_aux, holomorphic, allow_int)


def _value_and_grad(
    caller: str, fun: Callable[..., Any], argnums: Any, has_aux: bool, holomorphic: bool, allow_int: bool
) -> Callable[..., tuple[Any, Any]]:
    check_function(caller, fun)

    @functools.wraps(fun)
    def computed(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        numbers = argument_numbers(caller, argnums, len(args))
        run = Run(caller, fun, args, kwargs, numbers, has_aux=has_aux, allow_int=allow_int, holomorphic=holomorphic)
        gradients = run.pulled([_scalar(caller, run, holomorphic)], keep=False)
        value = run.shown(run.value)
        value = (value, run.aux) if has_aux else value
        return value, gradients if isinstance(argnums, (tuple, list)) else gradients[0]

    return computed


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Returns a function that computes the gradient of ``fun``.

    The function is called as it is: Python's control flow may depend on values, and tensors may be written in place.
    The gradient of an argument has its shape, dtype and sharding. ``st.jit(st.grad(fun))`` compiles the function and
    its gradient as one program. Complex numbers follow JAX's conventions.

    Args:
        fun: a function that returns one number. Its arguments are pytrees of tensors, host arrays and numbers.
        argnums: the positional argument to be differentiated, or several in a tuple.
        has_aux: whether ``fun`` returns a pair of that number and of other results, which are returned as they are.
        holomorphic: whether ``fun`` is a holomorphic function of complex numbers.
        allow_int: whether integers among the arguments are allowed. Their gradients are host arrays without bytes.

    Returns:
        A function of the arguments of ``fun``, which returns the gradient, or one for each of several ``argnums``; with
        ``has_aux`` the pair of it and of the other results.

    Raises:
        ArgumentTypeError: an argument is not a floating-point number, the result is not one number, or an operator has
            no derivative.
        ConcretizationError: elements of a tensor that depends on the arguments leave the library, by `numpy.asarray`.

    >>> def loss(w, x):
    ...     return (st.tanh(x @ w) ** 2).sum()
    >>> mesh = st.make_mesh((4,), ("data",))
    >>> w, x = st.ones(3), st.ones((8, 3), device=st.NamedSharding(mesh, st.P("data")))
    >>> st.grad(loss)(w, x).shape
    (3,)
    """
    inner = _value_and_grad("grad", fun, argnums, has_aux, holomorphic, allow_int)

    @functools.wraps(fun)
    def computed(*args: Any, **kwargs: Any) -> Any:
        value, gradients = inner(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return computed


@hinted
def vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Returns the value of a function and the function that multiplies cotangents by its Jacobian.

    Args:
        fun: the function.
        *primals: its arguments: pytrees of floating-point tensors, host arrays and numbers.
        has_aux: whether ``fun`` returns a pair of its result and of others.

    Returns:
        The value, and a function that takes a cotangent, of the structure and the shapes of the value, and returns a
        tuple of cotangents of the arguments. It may be called several times. With ``has_aux`` the auxiliary results
        are the third item.

    >>> value, pull = st.vjp(lambda x: x * x, st.asarray([1.0, 2.0]))
    >>> pull(st.asarray([1.0, 10.0]))[0].tolist()
    [2.0, 40.0]
    """
    check_function("vjp", fun)
    run = Run("vjp", fun, primals, {}, range(len(primals)), has_aux=has_aux, allow_int=True)
    value, aux = run.value, run.aux
    result = map_leaves(stand_in_of, value)
    run.value = run.aux = None  # The function below holds what derivatives need, and nothing else.

    def pull(cotangents: Any) -> Any:
        tree = map_leaves(run.tape.adopted, cotangents)
        flat = _checked_tangents("vjp", "the cotangent", tree, "the result", result)
        return run.pulled(flat, keep=True)

    value = run.shown(value)
    return (value, pull, aux) if has_aux else (value, pull)


def _checked_tangents(caller: str, what: str, tangents: Any, of: str, tree: Any) -> list[Any]:
    """Returns the leaves of tangents or cotangents, which must be like those of the values; None for integers."""
    if form_of(tangents) != form_of(tree):
        raise ArgumentTypeError(f"{caller}: {what} and {of} differ in structure; wanted one array for each array")
    flat: list[Any] = []
    for g, y, path in zip(leaves(tangents), leaves(tree), paths(tree, what), strict=True):
        dtype = y.dtype if hasattr(y, "dtype") else np.asarray(y).dtype
        if not is_inexact(dtype) or is_zero(g):
            flat.append(None)
            continue
        if np.shape(g) != np.shape(y):
            raise ArgumentError(f"{caller}: {path} has shape {np.shape(g)}; wanted that of {of}, {np.shape(y)}")
        g = g if type(g) is ShardedTensor else np.asarray(g)
        if g.dtype.kind == "c" and dtype.kind != "c":
            raise ArgumentTypeError(f"{caller}: {path} has dtype {g.dtype}; wanted that of {of}, {dtype}")
        if type(y) is ShardedTensor and (type(g) is not ShardedTensor or g.sharding.mesh != y.sharding.mesh):
            g = call("reshard", g, of_cotangent(y._aval))
        g = g if type(g) is ShardedTensor else call("asarray", g)
        flat.append(g if g.dtype == dtype else call("astype", g, dtype))
    return flat


def jvp(fun: Callable[..., Any], primals: Any, tangents: Any, has_aux: bool = False) -> Any:
    """Returns the value of a function and its derivative in a direction.

    The derivative is computed together with the value, so that no intermediate value is kept for it. A function that
    calls a map with differentiated arguments is called once more, from its beginning, as `linearize` calls it.

    Args:
        fun: the function.
        primals: a tuple of its arguments.
        tangents: the direction: a tuple of the same structure and shapes.
        has_aux: whether ``fun`` returns a pair of its result and of others.

    Returns:
        The value and the derivative; with ``has_aux`` the auxiliary results as third item. The derivative of a tensor
        has its shape, dtype and sharding.

    >>> value, tangent = st.jvp(lambda x: x * x, (st.asarray([1.0, 2.0]),), (st.asarray([1.0, 10.0]),))
    >>> tangent.tolist()
    [2.0, 40.0]
    """
    check_function("jvp", fun)
    for name, tree in (("primals", primals), ("tangents", tangents)):
        if not isinstance(tree, (tuple, list)):
            raise ArgumentTypeError(f"jvp: {name} is {type_text(tree)}; wanted a tuple with one item for each argument")
    args, directions = [map_leaves(tensor_here, tuple(x)) for x in (primals, tangents)]
    directions = _checked_tangents("jvp", "tangents", directions, "primals", args)
    kinds = [None if t is None else kind_of(x) for x, t in zip(leaves(args), directions, strict=True)]
    directions = [None if t is None else like(t, kind) for t, kind in zip(directions, kinds, strict=True)]
    try:
        run = Run("jvp", fun, primals, {}, range(len(primals)), has_aux=has_aux, allow_int=True, tangents=directions)
    except NeedsTape:  # The function calls a map.
        value, push, *aux = linearize(fun, *primals, has_aux=has_aux)
        return (value, push(*tangents), *aux)
    value, tangent = run.shown(run.value), run.shown(run.in_results(run.tangents))
    return (value, tangent, run.aux) if has_aux else (value, tangent)


def linearize(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Returns the value of a function and its derivative as a linear function of a direction.

    The function is called once. What its derivative needs is kept for as long as the linear function exists, which may
    be called with several directions; `jvp` keeps nothing, and is the cheaper one for a single direction.

    Args:
        fun: the function.
        *primals: its arguments: pytrees of floating-point tensors, host arrays and numbers.
        has_aux: whether ``fun`` returns a pair of its result and of others.

    Returns:
        The value, and a function that takes one tangent for each argument, of its structure and shapes, and returns the
        tangent of the value. With ``has_aux`` the auxiliary results are the third item.

    >>> value, push = st.linearize(lambda x: x * x, st.asarray([1.0, 2.0]))
    >>> push(st.asarray([1.0, 10.0])).tolist()
    [2.0, 40.0]
    """
    check_function("linearize", fun)
    run = Run("linearize", fun, primals, {}, range(len(primals)), has_aux=has_aux, allow_int=True)
    has_maps = any(step.op.name == "map_shards" for step in run.tape.steps)

    def push(*tangents: Any) -> Any:
        tree = map_leaves(run.tape.adopted, tangents)
        directions = _checked_tangents("linearize", "tangents", tree, "primals", run.given)
        return run.shown(transposed_twice(run, directions) if has_maps else run.pushed(directions))

    value = run.shown(run.value)
    return (value, push, run.aux) if has_aux else (value, push)


def transposed_twice(run: Run, tangents: Sequence[Any]) -> Any:
    """Returns the same as `Run.pushed`, as the transpose of the function that pulls cotangents back. It serves maps, of
    which the steps before and after the programs belong together.
    """
    results = leaves(run.value)
    known = [k for k, n in enumerate(run.numbers) if n is not None]

    def pulled(*cotangents: Any) -> list[Any]:
        every: list[Any] = [None] * len(results)
        for k, g in zip(known, cotangents, strict=True):
            every[k] = g
        gradients = leaves(run.pulled(every, keep=True))
        return [g for g, t in zip(gradients, tangents, strict=True) if t is not None]

    _, push = vjp(pulled, *[or_zeros(None, kind_of(results[k])) for k in known])
    new_tangents = dict(zip(known, push([t for t in tangents if t is not None]), strict=True))
    return run.in_results([new_tangents.get(k) for k in range(len(results))])


def stop_gradient(x: Any) -> Any:
    """Returns x as a constant: no gradient of it is computed.

    Args:
        x: a pytree. Leaves that are not tensors are returned as they are.

    >>> st.grad(lambda x: (x * st.stop_gradient(x)).sum())(st.asarray([3.0])).tolist()
    [3.0]
    """

    return map_leaves(_constant, x)


def _constant(leaf: Any) -> Any:
    """Returns a leaf without the tapes around the calling function: a copy, since the caller may write it."""
    interpreter: Any = innermost()
    if isinstance(interpreter, Batcher):
        with interpreter.outside():
            primal: Any = interpreter.examples(leaf) if type(leaf) is ShardedTensor else leaf
            constant = _constant(primal)
            if constant is primal:
                return leaf
            return interpreter.value(tensor_here(constant)) if interpreter.differs(leaf) else constant
    if not isinstance(interpreter, (Tape, Outside)):
        return leaf
    tape = interpreter if isinstance(interpreter, Tape) else interpreter.tape
    primal = tape.constant(leaf)
    with interpreted_by(tape.outer):
        constant = _constant(primal)
        if constant is not primal or primal is leaf or type(primal) is not ShardedTensor:
            return constant
        return tape.given(call("copy", primal))
