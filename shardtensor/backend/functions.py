"""`function_of`: an operator as a function of a backend's arrays, which its library has or which is composed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from shardtensor.backend.protocol import Backend, current_device
from shardtensor.core import OPS, Interpreter, Op, Operands, Params, interpreting
from shardtensor.errors import ArgumentTypeError, BackendError


def function_of(backend: Backend, name: str) -> Callable[..., Any]:
    """Returns the function of that name in a backend's namespace, or the composition of the operator if it lacks one.

    Raises:
        BackendError: the namespace has no such function, and no operator of that name is composed of others.
    """
    try:
        function: Callable[..., Any] = getattr(backend.xp, name)
    except AttributeError:
        op = OPS.get(name)
        if op is None or op.parts.composed is None:
            raise BackendError(f"{name}: backend {backend.name!r} has no such function; use another backend") from None
        return functools.partial(_compose, backend, op)
    return function


class _NamespaceInterpreter(Interpreter):
    """The interpreter inside a composition: operators are the functions of a backend's namespace.

    Attributes:
        backend: the backend.
        device: the device of the enclosing mapped function, if any, which is still the current one.
    """

    __slots__ = ("backend", "device")

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.device = current_device()

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Calls the function of ``op`` with arrays of the current device."""
        return function_of(self.backend, op.name)(*operands, **dict(zip(op.params, params, strict=True)))

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> NoReturn:
        """Raises ArgumentTypeError: a composition is a pure function."""
        raise ArgumentTypeError(f"{op.name}: writes into a tensor inside a composition, which has no effects")


def _compose(backend: Backend, op: Op, /, *operands: Any, out: Any = None) -> Any:
    """Computes an operator on arrays of the current device, and Python scalars, by its composition.

    Returns a new array, or ``out``, which may be one of the operands.
    """
    assert op.parts.composed is not None
    xp, dtype = backend.xp, None
    if op.is_ufunc:
        kinds = [type(x) if type(x) in _SCALARS else backend.dtype_of(x) for x in operands]
        dtypes, dtype = _loop(op.name, tuple(kinds))
        operands = tuple([xp.asarray(x, dtype=d) for x, d in zip(operands, dtypes, strict=True)])
    with interpreting(_NamespaceInterpreter(backend)):
        result = op.parts.composed(*operands)
    if out is not None:
        out[...] = xp.asarray(result, dtype=backend.dtype_of(out))
        return out
    return result if dtype is None else xp.asarray(result, dtype=dtype)


_SCALARS = (bool, int, float, complex)

_IN_FLOAT16 = ("spacing",)
"""The ufuncs whose values depend on the precision of the operands, so that float16 is not computed in float32."""


@functools.lru_cache(1024)
def _loop(name: str, kinds: tuple[Any, ...]) -> tuple[list[np.dtype[Any]], np.dtype[Any]]:
    """Returns the dtypes in which a ufunc of NumPy computes on operands of these dtypes (of a Python scalar its type),
    and the dtype of the result. As in NumPy, float16 is computed in float32, except by `_IN_FLOAT16`.

    Raises:
        TypeError: the ufunc does not take these dtypes.
    """
    dtypes = [np.dtype(bool) if kind is bool else kind for kind in kinds]
    *inputs, result = getattr(np, name).resolve_dtypes((*dtypes, None))
    if name not in _IN_FLOAT16:
        inputs = [np.dtype(np.float32) if dtype == np.float16 else dtype for dtype in inputs]
    return inputs, result
