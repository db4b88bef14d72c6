"""Jacobian matrices: the derivatives of `vjp` and `jvp` in all directions at once, by `vmap`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import call
from shardtensor.errors import ArgumentTypeError
from shardtensor.functions.derivatives.cotangents import is_inexact
from shardtensor.interpreters.batching.vmap import vmap
from shardtensor.interpreters.differentiation.grad import argument_numbers, check_function, jvp, vjp
from shardtensor.sharding.spec import P
from shardtensor.tensor.operands import dtype_of
from shardtensor.tensor.pytree import leaves, paths, replaced
from shardtensor.tensor.tensor import ShardedTensor


def jacrev(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Returns a function that computes the Jacobian of ``fun`` by reverse mode: one pass for each element of the
    result, all of them at once.

    It suits functions of which the result has fewer elements than the arguments.

    Args:
        fun: a function. Its arguments and results are pytrees of tensors, host arrays and numbers.
        argnums, has_aux, holomorphic, allow_int: see `grad`.

    Returns:
        A function of the arguments of ``fun``, which returns a pytree of the form of the result, whose leaves are
        pytrees of the form of the argument (or tuples of these): tensors of the shape of the result's leaf followed by
        that of the argument's leaf.

    Raises:
        ArgumentTypeError: see `grad`; a result is not a floating-point number, or is complex without ``holomorphic``.

    >>> st.jacrev(lambda x: x * x)(st.asarray([1.0, 2.0])).tolist()
    [[2.0, 0.0], [0.0, 4.0]]
    """
    check_function("jacrev", fun)

    @functools.wraps(fun)
    def computed(*args: Any, **kwargs: Any) -> Any:
        function, primals = _of_arguments("jacrev", fun, argnums, args, kwargs)
        _check_leaves("jacrev", primals, "argument", allow_int, holomorphic)
        value, pull, *aux = vjp(function, *primals, has_aux=has_aux)
        _check_leaves("jacrev", value, "the result", False, holomorphic)
        blocks = []
        for k, y in enumerate(leaves(value)):

            def row(g: Any, k: int = k) -> Any:
                return pull(replaced(value, [g if i == k else None for i in range(len(leaves(value)))]))

            rows = vmap(row)(_basis(y))
            of_row = [call("reshape", x, (*np.shape(y), *x.shape[1:])) for x in leaves(rows)]
            shaped = replaced(rows, of_row)
            blocks.append(shaped if isinstance(argnums, (tuple, list)) else shaped[0])
        jacobian = replaced(value, blocks)
        return (jacobian, aux[0]) if has_aux else jacobian

    return computed


def jacfwd(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, holomorphic: bool = False
) -> Callable[..., Any]:
    """Returns a function that computes the Jacobian of ``fun`` by forward mode: one direction for each element of the
    arguments, all of them at once.

    It suits functions of which the arguments have fewer elements than the result.

    Args:
        fun, argnums, has_aux, holomorphic: see `jacrev`.

    Returns:
        See `jacrev`.

    Raises:
        ArgumentTypeError: see `jacrev`.

    >>> st.jacfwd(lambda x: x * x)(st.asarray([1.0, 2.0])).tolist()
    [[2.0, 0.0], [0.0, 4.0]]
    """
    check_function("jacfwd", fun)

    @functools.wraps(fun)
    def computed(*args: Any, **kwargs: Any) -> Any:
        function, primals = _of_arguments("jacfwd", fun, argnums, args, kwargs)
        _check_leaves("jacfwd", primals, "argument", False, holomorphic)
        inputs, columns, aux, value = leaves(primals), [], None, None
        zeros = [call("zeros_like", x) if np.ndim(x) else call("zeros", (), dtype=dtype_of(x)) for x in inputs]
        for k, x in enumerate(inputs):

            def column(t: Any, k: int = k) -> Any:
                nonlocal aux, value
                value, tangent, *rest = jvp(
                    function,
                    primals,
                    replaced(primals, [t if i == k else z for i, z in enumerate(zeros)]),
                    has_aux=has_aux,
                )
                aux = rest[0] if rest else None
                return tangent

            tangents = vmap(column, out_axes=-1)(_basis(x))
            columns.append([call("reshape", y, (*y.shape[:-1], *np.shape(x))) for y in leaves(tangents)])
        _check_leaves("jacfwd", value, "the result", False, holomorphic)
        blocks = []
        for parts in zip(*columns, strict=True):
            shaped = replaced(primals, parts)
            blocks.append(shaped if isinstance(argnums, (tuple, list)) else shaped[0])
        result = replaced(value, blocks)
        return (result, aux) if has_aux else result

    return computed


def hessian(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, holomorphic: bool = False
) -> Callable[..., Any]:
    """Returns a function that computes the second derivatives of ``fun``: `jacfwd` of `jacrev`.

    Args:
        fun, argnums, has_aux, holomorphic: see `jacrev`.

    Returns:
        See `jacrev`; a number's second derivatives by one argument are a tensor of its shape twice.

    >>> st.hessian(lambda x: (x**3).sum())(st.asarray([1.0, 2.0])).tolist()
    [[6.0, 0.0], [0.0, 12.0]]
    """
    return jacfwd(jacrev(fun, argnums, has_aux, holomorphic), argnums, has_aux, holomorphic)


def _of_arguments(
    caller: str, fun: Callable[..., Any], argnums: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns ``fun`` as a function of the arguments that are differentiated, and these."""
    numbers = argument_numbers(caller, argnums, len(args))

    def function(*chosen: Any) -> Any:
        every = list(args)
        for n, x in zip(numbers, chosen, strict=True):
            every[n] = x
        return fun(*every, **kwargs)

    return function, tuple([args[n] for n in numbers])


def _check_leaves(caller: str, tree: Any, what: str, allow_int: bool, holomorphic: bool) -> None:
    for path, x in zip(paths(tree, what), leaves(tree), strict=True):
        dtype = dtype_of(x)
        if not is_inexact(dtype) and not allow_int:
            raise ArgumentTypeError(f"{caller}: {path} has dtype {dtype}; wanted floating-point numbers")
        if is_inexact(dtype) and (dtype.kind == "c") != holomorphic:
            wanted = (
                "complex numbers, since holomorphic is true" if holomorphic else "real numbers (or holomorphic=True)"
            )
            raise ArgumentTypeError(f"{caller}: {path} has dtype {dtype}; wanted {wanted}")


def _basis(x: Any) -> Any:
    """Returns for each element of an array, along a first dimension, the array in which it is 1 and others are 0."""
    size = math.prod(np.shape(x))
    where = x.sharding.with_spec(P()) if type(x) is ShardedTensor else None
    return call("reshape", call("eye", size, dtype=dtype_of(x), device=where), (size, *np.shape(x)))
