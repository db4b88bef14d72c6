"""The interpreter that infers the avals of results without elements: `st.eval_shape`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from shardtensor.core import Interpreter, Op, Operands, Params, interpreting
from shardtensor.errors import ConcretizationError, ShardTensorError
from shardtensor.interpreters.eager import EAGER, raise_named
from shardtensor.interpreters.execution.plan_cache import planned
from shardtensor.interpreters.execution.planning import are_scalars
from shardtensor.interpreters.mutation.views import View, base_and_view, infer_view
from shardtensor.interpreters.mutation.writes import (
    check_assignment,
    check_result,
    check_writable,
    checked_update,
    computes_in_place,
)
from shardtensor.sharding.layout import NamedSharding, Shape, as_sharding, checked_shape
from shardtensor.sharding.mesh import default_mesh
from shardtensor.tensor.operands import as_operand, sharded_dtype
from shardtensor.tensor.pytree import map_leaves
from shardtensor.tensor.storage import DeferredStorage
from shardtensor.tensor.tensor import ShardedTensor, mark_array, tensor
from shardtensor.tensor.value import Aval, aval


class ShapeDtypeStruct:
    """The shape, dtype and sharding of a tensor without its elements, as `jax.ShapeDtypeStruct`.

    Attributes:
        shape: the size of each dimension.
        dtype: the NumPy dtype.
        sharding: the sharding; as an argument, a device, a mesh or a sharding, or None for the default mesh.
        committed: whether the tensor is placed explicitly: where the argument ``sharding`` is not None.

    >>> st.ShapeDtypeStruct((4, 2), "float32").dtype
    dtype('float32')
    """

    __slots__ = ("_aval",)

    def __init__(self, shape: Shape, dtype: Any, sharding: Any = None) -> None:
        sizes = checked_shape(shape, "ShapeDtypeStruct")
        target = as_sharding(default_mesh() if sharding is None else sharding, len(sizes), "ShapeDtypeStruct")
        self._aval = aval(sizes, sharded_dtype(dtype), target, sharding is not None)

    @property
    def shape(self) -> Shape:
        """The size of each dimension."""
        return self._aval.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype."""
        return self._aval.dtype

    @property
    def sharding(self) -> NamedSharding:
        """The sharding."""
        return self._aval.sharding

    @property
    def committed(self) -> bool:
        """Whether the tensor is placed explicitly."""
        return self._aval.committed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShapeDtypeStruct) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __reduce__(self) -> tuple[Any, ...]:
        return _struct_of, self._fields()

    def _fields(self) -> tuple[Shape, np.dtype[Any], NamedSharding, bool]:
        return self.shape, self.dtype, self.sharding, self.committed

    def __repr__(self) -> str:
        return f"ShapeDtypeStruct(shape={self.shape}, dtype={self.dtype}, sharding={self.sharding.spec})"


class UnknownElements(DeferredStorage):
    """The storage of a tensor of which only the aval is known."""

    __slots__ = ()

    def stored(self) -> NoReturn:
        """Raises ConcretizationError."""
        raise ConcretizationError(
            "needs the elements of a tensor, and eval_shape knows only its shape, dtype and sharding; compute it "
            "outside of the function"
        )


_UNKNOWN = UnknownElements()


class InferInterpreter(Interpreter):
    """Infers the aval of every result, and computes no elements. Writes check shapes and change nothing."""

    __slots__ = ()

    runs_maps = False

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Returns the result of ``op`` as a tensor without elements.

        Raises:
            ConcretizationError: the result needs unknown elements: it leaves the library, or its shape depends on them.
            ShardTensorError: the operator does not accept the operands or parameters.
        """
        if op.escapes and not _is_unknown(operands[0]):
            return EAGER.apply(op, operands, params)
        try:
            if op.escapes:
                _UNKNOWN.stored()
            if op.view_spec and type(operands[0]) is ShardedTensor:
                view = infer_view(op, operands[0], params)
                if view is not None:
                    base, view_spec, value, is_element = view
                    if is_element:
                        return _result(value)
                    if operands[0]._is_scalar:
                        return mark_array(_result(value))
                    return tensor(value, View(base, view_spec))
            if op.composite:
                result = op.composite(*(operands if not op.variadic else (operands,)), *params)
                if result is not NotImplemented:
                    return result
            if op.algorithm:
                operands = tuple([as_operand(x, op.name) for x in operands])
                if not op.infer:
                    return op.algorithm(*operands, *params)
                found = op.infer(*operands, *params)
                if isinstance(found, list):
                    return [_result(value) for value in found]
                return mark_array(_result(found)) if op.keeps_arrays else _result(found)
            plan, operands = planned(op, operands, params)
            is_array = op.creates or (op.keeps_arrays and not are_scalars(operands))
            return mark_array(_result(plan.result)) if is_array else _result(plan.result)
        except (ShardTensorError, OverflowError) as error:
            raise_named(op, error)

    def write(self, out: ShardedTensor, op: Op, operands: Operands, params: Params, /) -> None:
        """Checks that the result of ``op`` could be written into ``out``."""
        try:
            check_writable(out)
            if op.assigns:
                check_assignment(out, operands[1], params[0])
            elif computes_in_place(op, out):
                checked_update(op, operands, out)
            else:
                check_result(op, self.apply(op, operands, params), out)
        except (ShardTensorError, OverflowError) as error:
            raise_named(op, error)


def _is_unknown(x: Any) -> bool:
    return isinstance(x, ShardedTensor) and getattr(x._storage, "base", x)._storage is _UNKNOWN


def _result(value: Aval) -> ShardedTensor:
    return tensor(value, _UNKNOWN)


def eval_shape(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Returns the shapes, dtypes and shardings of the results of ``fn(*args, **kwargs)``, without computing elements.

    The function is called once. Every operator infers the layout of its result by the rules that it follows when it
    runs, so that results have exactly these shardings; nothing is transferred, allocated or written.

    Args:
        fn: the function.
        *args: its arguments: pytrees of tensors, host arrays, `ShapeDtypeStruct` and other objects, passed unchanged.
        **kwargs: likewise.

    Returns:
        The result of the function, with a `ShapeDtypeStruct` in place of each tensor.

    Raises:
        ConcretizationError: the function needs elements: ``float(x)``, ``if x``, ``np.asarray(x)``, a mask as an index,
            a map over devices.
        ShardTensorError: an operator does not accept its operands.

    >>> x = st.ShapeDtypeStruct((8, 4), "float32", st.NamedSharding(st.make_mesh((2,), ("d",)), st.P("d")))
    >>> st.eval_shape(lambda x: (x @ x.T).sum(axis=1), x)
    ShapeDtypeStruct(shape=(8,), dtype=float32, sharding=P('d'))
    """
    given = map_leaves(_without_elements, (args, kwargs))
    with interpreting(_INFER):
        result = fn(*given[0], **given[1])
    return map_leaves(_struct, result)


_INFER = InferInterpreter()


def _without_elements(x: Any) -> Any:
    if isinstance(x, ShapeDtypeStruct):
        return mark_array(_result(x._aval))
    if not isinstance(x, ShardedTensor):
        return x
    base, view_spec = base_and_view(x)
    if base is not x:
        return tensor(x._aval, View(_result(base._aval), view_spec))
    return _result(x._aval) if x._is_scalar else mark_array(_result(x._aval))


def _struct(x: Any) -> Any:
    return _struct_of(x.shape, x.dtype, x.sharding, x.committed) if isinstance(x, ShardedTensor) else x


def _struct_of(shape: Shape, dtype: np.dtype[Any], sharding: NamedSharding, committed: bool) -> ShapeDtypeStruct:
    found: ShapeDtypeStruct = object.__new__(ShapeDtypeStruct)
    found._aval = aval(shape, dtype, sharding, committed)
    return found
