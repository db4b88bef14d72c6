"""Python's operators and NumPy's protocols on tensors.

Each operator of Python, and each ufunc of NumPy, that is applied to a tensor calls the corresponding operator in `OPS`.
All other calls of NumPy are those of ``call_ufunc`` and ``call_numpy``, which are above this package (see `ABOVE`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from shardtensor.backend.registry import array_backend
from shardtensor.core import ABOVE, OPS, bind_into, call
from shardtensor.errors import ArgumentTypeError
from shardtensor.tensor.handle import Handle
from shardtensor.tensor.nested_lists import from_lists

if TYPE_CHECKING:
    from shardtensor.tensor.tensor import ShardedTensor


UFUNC_NAMES: dict[np.ufunc, str] = {}
"""The operator of each of NumPy's ufuncs, to which the table of NumPy's names adds the rows. A ufunc is not recognized
by its name: Numba's ``vectorize`` names ufuncs after functions of its users.
"""


def _is_list(x: object) -> bool:
    return isinstance(x, (list, tuple))


def _operand(x: Any, caller: str) -> Any:
    """Returns an operand of Python's operators, with lists converted to host arrays as NumPy's arrays do.

    Any other object gives NotImplemented, so that Python tries the reflected method of the other operand.
    """
    if isinstance(x, _OPERANDS) or array_backend(x) is not None:
        return x
    return from_lists(x, caller) if isinstance(x, (list, tuple)) else NotImplemented


def _binary(name: str) -> tuple[Callable[[Any, Any], ShardedTensor], Callable[[Any, Any], ShardedTensor]]:
    """Returns the methods for ``self ⊕ other`` and for ``other ⊕ self``."""

    def method(self: Any, other: Any) -> ShardedTensor:
        x = _operand(other, name)
        return x if x is NotImplemented else call(name, self, x)

    def reflected(self: Any, other: Any) -> ShardedTensor:
        x = _operand(other, name)
        return x if x is NotImplemented else call(name, x, self)

    return method, reflected


def _comparison(name: str) -> Callable[[Any, Any], ShardedTensor]:
    """Returns the method for ``==`` or ``!=``: elements of which NumPy compares no dtypes, such as numbers and times,
    are unequal.
    """

    def method(self: Any, other: Any) -> ShardedTensor:
        x = _operand(other, name)
        if x is NotImplemented:
            return x  # type: ignore[no-any-return]
        try:
            return call(name, self, x)  # type: ignore[no-any-return]
        except ArgumentTypeError:
            kinds = [self.dtype.kind, getattr(x, "dtype", np.dtype(type(x))).kind]
            if len({*kinds} & {"m", "M"}) == 0 or kinds[0] == kinds[1]:
                raise
        same, function = ("zeros_like", "logical_or") if name == "equal" else ("ones_like", "logical_and")
        either = [call(same, a, dtype=bool) if hasattr(a, "shape") else name != "equal" for a in (self, x)]
        return call(function, *either)  # type: ignore[no-any-return]

    return method


def _in_place(name: str) -> Callable[[Any, Any], ShardedTensor]:
    """Returns the method for ``self ⊕= other``."""

    def method(self: Any, other: Any) -> ShardedTensor:
        x = _operand(other, name)
        if x is NotImplemented:
            return x  # type: ignore[no-any-return]
        if self._is_scalar:
            return call(name, self, x)  # type: ignore[no-any-return]
        bind_into(self, OPS[name], (self, x), ())
        return self  # type: ignore[no-any-return]

    return method


_POWERS = {2: "square", 0.5: "sqrt", -1: "reciprocal"}
"""The functions that NumPy's operator ``**`` calls for these exponents. Powers take 4 to 20 times as long."""


def _function_of_power(x: Any, exponent: Any) -> str | None:
    """Returns the function of one operand that ``x ** exponent`` is, as in NumPy; None for other powers."""
    if type(exponent) not in (int, float) or (name := _POWERS.get(exponent)) is None:
        return None
    kind = x.dtype.kind
    return name if kind in "fc" or (kind in "iub" and type(exponent) is int and exponent == 2) else None


def _pow(self: Any, other: Any) -> ShardedTensor:
    """Returns the tensor of ``self ** other``."""
    name = _function_of_power(self, other)
    return _power[0](self, other) if name is None else call(name, self)


def _ipow(self: Any, other: Any) -> ShardedTensor:
    """Computes ``self **= other``."""
    name = _function_of_power(self, other)
    if name is None or self._is_scalar:
        return _in_place("pow")(self, other)
    bind_into(self, OPS[name], (self,), ())
    return self  # type: ignore[no-any-return]


_power = _binary("pow")


def _unary(name: str) -> Callable[[Any], ShardedTensor]:
    def method(self: Any) -> ShardedTensor:
        return call(name, self)  # type: ignore[no-any-return]

    return method


class Operators(Handle):
    """The base class of tensors that implements Python's operators and NumPy's protocols."""

    __slots__ = ()

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs:
            op = OPS.get(UFUNC_NAMES.get(ufunc, ""))
            if op is not None and len(op.operands) == len(inputs) and not any(map(_is_list, inputs)):
                return op.dispatch(*inputs)
        return ABOVE["call_ufunc"](ufunc, method, inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return ABOVE["call_numpy"](func, args, kwargs)

    __hash__ = None  # type: ignore[assignment]  # equality is elementwise

    __abs__, __neg__, __pos__, __invert__ = map(_unary, ("abs", "negative", "positive", "bitwise_invert"))
    __add__, __radd__ = _binary("add")
    __sub__, __rsub__ = _binary("subtract")
    __mul__, __rmul__ = _binary("multiply")
    __truediv__, __rtruediv__ = _binary("divide")
    __floordiv__, __rfloordiv__ = _binary("floor_divide")
    __mod__, __rmod__ = _binary("remainder")
    __pow__, __rpow__ = _pow, _power[1]
    __matmul__, __rmatmul__ = _binary("matmul")
    __and__, __rand__ = _binary("bitwise_and")
    __or__, __ror__ = _binary("bitwise_or")
    __xor__, __rxor__ = _binary("bitwise_xor")
    __lshift__, __rlshift__ = _binary("bitwise_left_shift")
    __rshift__, __rrshift__ = _binary("bitwise_right_shift")
    __eq__, __ne__ = _comparison("equal"), _comparison("not_equal")  # type: ignore[assignment]
    __lt__, __le__ = _binary("less")[0], _binary("less_equal")[0]
    __gt__, __ge__ = _binary("greater")[0], _binary("greater_equal")[0]

    def __divmod__(self, other: Any) -> tuple[ShardedTensor, ShardedTensor]:
        return (self // other, self % other)

    def __rdivmod__(self, other: Any) -> tuple[ShardedTensor, ShardedTensor]:
        return (other // self, other % self)

    __iadd__, __isub__, __imul__ = map(_in_place, ("add", "subtract", "multiply"))
    __itruediv__, __ifloordiv__, __imod__ = map(_in_place, ("divide", "floor_divide", "remainder"))
    __ipow__, __imatmul__ = _ipow, _in_place("matmul")
    __iand__, __ior__, __ixor__ = map(_in_place, ("bitwise_and", "bitwise_or", "bitwise_xor"))
    __ilshift__, __irshift__ = map(_in_place, ("bitwise_left_shift", "bitwise_right_shift"))


_OPERANDS = (Operators, np.ndarray, np.generic, bool, int, float, complex)
"""The types of operands of Python's operators, besides arrays of backends."""
