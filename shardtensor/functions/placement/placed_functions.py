"""Decorators that place the results or the arguments of a function: `auto_axes` and `explicit_axes`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from shardtensor.core import hinted
from shardtensor.errors import ArgumentTypeError, ShardingError, type_text
from shardtensor.functions.placement.transfers import put_leaves
from shardtensor.sequences import as_tuple
from shardtensor.sharding.layout import NamedSharding
from shardtensor.sharding.mesh import default_mesh
from shardtensor.tensor.pytree import leaves

Result = TypeVar("Result")
Function = Callable[..., Result]
Axes = str | Sequence[str] | None


@overload
def auto_axes(f: Function[Result], /, *, axes: Axes = None, out_sharding: Any = None) -> Function[Result]: ...


@overload
def auto_axes(
    f: None = None, /, *, axes: Axes = None, out_sharding: Any = None
) -> Callable[[Function[Result]], Function[Result]]: ...


@hinted
def auto_axes(f: Function[Any] | None = None, /, *, axes: Axes = None, out_sharding: Any = None) -> Any:
    """Returns the function with one more argument, ``out_sharding=``, the sharding of its result.

    The arguments are those of `jax.sharding.auto_axes`, in which the compiler chooses all layouts inside the function.
    Here they follow from the rules of the operators, inside as outside, and the result is transferred as by `reshard`.

    Args:
        f: the function; without it, a decorator is returned.
        axes: the mesh axes that JAX's compiler would choose layouts for. They are only checked: all operators follow
            rules.
        out_sharding: the sharding, or a prefix tree of shardings, of the result of every call, which then takes no such
            argument. A `P` is on the mesh in use.

    Raises:
        ShardingError: ``axes`` has a name that the mesh of ``out_sharding``, or the mesh in use, does not have.
        ArgumentTypeError: ``f`` is not a function, or is called without ``out_sharding``.

    >>> @st.auto_axes
    ... def add(x, y):
    ...     return x + y
    >>> with st.set_mesh(st.make_mesh((2, 2), ("x", "y"))):
    ...     x, y = st.ones((4, 4), device=st.P("x")), st.ones((4, 4), device=st.P(None, "x"))
    ...     st.typeof(add(x, y, out_sharding=st.P("x", "y")))
    float64[4@x,4@y]
    """
    if f is None:
        return functools.partial(auto_axes, axes=axes, out_sharding=out_sharding)
    if not callable(f):
        raise ArgumentTypeError(f"auto_axes: f is {type_text(f)}; wanted a function")
    axes = as_tuple(axes)

    @functools.wraps(f)
    def placed(*args: Any, **kwargs: Any) -> Any:
        wanted = _taken("auto_axes", "out_sharding", out_sharding, kwargs)
        _check_axes("auto_axes", axes, wanted)
        return put_leaves(f(*args, **kwargs), wanted, "auto_axes", "out_sharding", of="result")

    return placed


@overload
def explicit_axes(f: Function[Result], /, *, axes: Axes = None, in_sharding: Any = None) -> Function[Result]: ...


@overload
def explicit_axes(
    f: None = None, /, *, axes: Axes = None, in_sharding: Any = None
) -> Callable[[Function[Result]], Function[Result]]: ...


@hinted
def explicit_axes(f: Function[Any] | None = None, /, *, axes: Axes = None, in_sharding: Any = None) -> Any:
    """Returns the function with one more argument, ``in_sharding=``, the sharding of its positional arguments.

    The arguments are those of `jax.sharding.explicit_axes`, which makes layouts visible inside the function, as they
    always are here: the positional arguments are transferred as by `reshard`, and the function is called.

    Args:
        f: the function; without it, a decorator is returned.
        axes: the mesh axes that become explicit in JAX. They are only checked: all axes are explicit outside of maps.
        in_sharding: the sharding of all positional arguments, or a prefix tree of shardings of the tuple of them, of
            every call, which then takes no such argument. A `P` is on the mesh in use.

    Raises:
        ShardingError: ``axes`` has a name that the mesh of ``in_sharding``, or the mesh in use, does not have.
        ArgumentTypeError: ``f`` is not a function, or is called without ``in_sharding``.

    >>> with st.set_mesh(st.make_mesh((2, 2), ("x", "y"))):
    ...     st.typeof(st.explicit_axes(st.exp)(np.ones((4, 4)), in_sharding=st.P("x", "y")))
    float64[4@x,4@y]
    """
    if f is None:
        return functools.partial(explicit_axes, axes=axes, in_sharding=in_sharding)
    if not callable(f):
        raise ArgumentTypeError(f"explicit_axes: f is {type_text(f)}; wanted a function")
    axes = as_tuple(axes)

    @functools.wraps(f)
    def placed(*args: Any, **kwargs: Any) -> Any:
        wanted = _taken("explicit_axes", "in_sharding", in_sharding, kwargs)
        _check_axes("explicit_axes", axes, wanted)
        return f(*put_leaves(args, wanted, "explicit_axes", "in_sharding", of="args"), **kwargs)

    return placed


def _taken(caller: str, name: str, default: Any, kwargs: dict[str, Any]) -> Any:
    """Returns the shardings of a call: those of the decorator, or those that are taken from the keyword arguments."""
    if default is not None:
        return default
    if name not in kwargs:
        raise ArgumentTypeError(f"{caller}: missing the argument {name}; give it in the call, or by {caller}({name}=…)")
    return kwargs.pop(name)


def _check_axes(caller: str, axes: Axes, shardings: Any) -> None:
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    mesh = next((s.mesh for s in leaves(shardings) if isinstance(s, NamedSharding)), None) or default_mesh()
    for name in names:
        if name not in mesh.shape:
            raise ShardingError(f"{caller}: axes={axes!r} names axis {name!r}; the mesh has {mesh.axis_names}")
