"""The interpreter that infers the avals of results without elements: `st.eval_shape`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, overload

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.protocol import current_device
from shardtensor.communication.abstract_communicator import on_device
from shardtensor.communication.offload import OffloadedElements
from shardtensor.communication.transfer import announce_reading
from shardtensor.communication.transfer_log import recorded_by
from shardtensor.core import Interpreter, Op, Operands, Params, hinted, interpreting
from shardtensor.errors import ArgumentTypeError, type_text
from shardtensor.hints import explains_attributes
from shardtensor.interpreters.calls import NAMED, CallInterpreter, InferredView, array_operands, raise_named
from shardtensor.interpreters.execution.plan_cache import planned
from shardtensor.interpreters.execution.planning import check_integers
from shardtensor.interpreters.views.scalar_elements import ScalarElement, compute_on_owners, owners_of
from shardtensor.interpreters.views.views import evaluate, stand_in
from shardtensor.interpreters.writes.writes import write
from shardtensor.sharding.layout import NamedSharding, Shape, as_sharding, checked_shape
from shardtensor.sharding.mesh import Mesh, default_mesh
from shardtensor.tensor.array_type import typeof
from shardtensor.tensor.handle import AvalAttributes
from shardtensor.tensor.operands import HostAval, host_aval, is_data, sharded_dtype
from shardtensor.tensor.pytree import map_leaves
from shardtensor.tensor.storage import NoElements
from shardtensor.tensor.tensor import (
    ShardedTensor,
    check_not_donated,
    lacks_elements,
    mark_array,
    tensor,
    without_elements,
)
from shardtensor.tensor.value import Aval, aval


@explains_attributes
class ShapeDtypeStruct(AvalAttributes):
    """The shape, dtype and sharding of a tensor without its elements, as `jax.ShapeDtypeStruct`.

    Attributes:
        shape: the size of each dimension.
        ndim, size: the numbers of dimensions and of elements.
        dtype: the NumPy dtype.
        sharding: the sharding; as an argument, a device, a mesh, a sharding, a `P` on the mesh in use, or None for the
            default mesh.
        committed: whether the tensor is placed explicitly: where the argument ``sharding`` is not None.

    >>> st.ShapeDtypeStruct((4, 2), "float32").dtype
    dtype('float32')
    """

    __slots__ = ("_aval",)

    @hinted
    def __init__(self, shape: Shape, dtype: Any, sharding: Any = None) -> None:
        sizes = checked_shape(shape, "ShapeDtypeStruct")
        target = as_sharding(default_mesh() if sharding is None else sharding, len(sizes), "ShapeDtypeStruct")
        try:
            self._aval = aval(sizes, sharded_dtype(dtype), target, sharding is not None)
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"ShapeDtypeStruct: {error}") from None

    @classmethod
    def like(cls, x: Any) -> ShapeDtypeStruct:
        """Returns the struct of an array: of a tensor with its sharding, of any other array on the default mesh.

        Args:
            x: a tensor, a host or backend array, a scalar, or a `ShapeDtypeStruct`.

        Raises:
            ArgumentTypeError: x is none of these.

        >>> st.ShapeDtypeStruct.like(st.zeros((4, 2), device=st.make_mesh((2,), ("x",))))
        ShapeDtypeStruct(shape=(4, 2), dtype=float64, sharding=P('x'))
        """
        try:
            kind = typeof(x)
        except ArgumentTypeError as error:
            raise ArgumentTypeError(str(error).replace("typeof", "ShapeDtypeStruct.like", 1)) from None
        if kind.sharding is None:
            return cls(kind.shape, kind.dtype)
        return _struct_of(kind.shape, kind.dtype, kind.sharding, x.committed)

    def update(self, **changes: Any) -> ShapeDtypeStruct:
        """Returns the struct with another shape, dtype or sharding. One that is not committed has no sharding of its
        own, so that the result is on the default mesh unless ``sharding`` is given.

        Args:
            **changes: ``shape``, ``dtype`` and ``sharding``, the arguments of the class.

        >>> st.ShapeDtypeStruct((4, 2), "float32").update(dtype="int8")
        ShapeDtypeStruct(shape=(4, 2), dtype=int8, sharding=P('d'))
        """
        sharding = self.sharding if self.committed else None
        return ShapeDtypeStruct(**{"shape": self.shape, "dtype": self.dtype, "sharding": sharding, **changes})

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


class InferInterpreter(CallInterpreter):
    """Infers the aval of every result, and computes no elements. If a log is active, the transfers are recorded that
    the operators would need. Writes check shapes, and record transfers.
    """

    __slots__ = ()

    only_infers = True

    def element(self, op: Op, operands: Operands, params: Params, view: InferredView, /) -> Any:
        """Infers an element, which is sent to other devices when it is first read, or a copy of a scalar."""
        x, (_, view_spec, value, is_element) = stand_in(operands[0]), view
        if not is_element:
            source = x if lacks_elements(x) else without_elements(x._aval)
            storage = evaluate(tensor(source._aval, source._storage), view_spec)._storage
            unsent = type(storage) is ScalarElement
            return mark_array(tensor(value, storage.without_parts()) if unsent else without_elements(value))
        check_not_donated(x)
        base = x._base_and_view()[0]
        if type(base._storage) is OffloadedElements:
            base._storage.announce_element(owners_of(base._aval, view_spec.origin).grid.devices)
        else:
            announce_reading(base)
        return tensor(value, ScalarElement(value, base._aval, view_spec.origin, ()))

    def algorithm(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Infers the result of a distributed algorithm.

        Raises:
            ConcretizationError: the result needs unknown elements: it leaves the library, or its shape depends on them.
        """
        if "escapes" in op.tags:
            if lacks_elements(operands[0]):
                without_elements(operands[0]._aval)._storage.stored()
            return op.parts.algorithm(*operands, *params)  # type: ignore[misc]
        assert op.parts.infer is not None
        operands = stand_ins(op, operands)
        check_not_donated(*operands)
        result = map_leaves(_from_aval, op.parts.infer(*array_operands(op, operands), *params))
        return mark_array(result) if "keeps arrays" in op.tags else result

    def planned(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Infers the result of a plan."""
        operands = stand_ins(op, operands)
        if op.is_ufunc and type(operands[0]) is ShardedTensor and type(operands[0]._storage) is ScalarElement:
            element = compute_on_owners(op, operands)
            if element is not None:
                return element
        plan, operands = planned(op, operands, params)
        if op.is_ufunc:
            check_integers(op, operands)
        return plan.infer(operands)

    def write(self, out: ShardedTensor, op: Op, operands: Operands, params: Params, /) -> None:
        """Checks that the result of ``op`` can be written into ``out``, and records the transfers."""
        try:
            write(stand_in(out), op, stand_ins(op, operands), params, self.apply)
        except NAMED as error:
            raise_named(op, error)

    def mapped(self, submesh: Mesh, /) -> Interpreter:
        """Returns the interpreter of a mapped function on the devices of ``submesh``."""
        return AbstractDeviceInterpreter(submesh.flat[0]) if submesh.size == 1 else INFER


class AbstractDeviceInterpreter(InferInterpreter):
    """The interpreter inside a mapped function on one device, where every array is a tensor without elements.

    Args:
        device: the device on which the function is mapped.
    """

    __slots__ = ("device",)

    def __init__(self, device: Device) -> None:
        self.device = device

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Infers the result of ``op``. Arrays are created on the device. The devices share the inferred results."""
        at = op.params.index("device") if op.creates else None
        if at is not None and params[at] is None and not any(map(lacks_elements, operands)):
            with recorded_by():  # The device creates the array, or converts it.
                return super().apply(op, operands, (*params[:at], self.device, *params[at + 1 :]))
        operands = self._here(operands)
        key: Any = None
        if op.rule and not (op.parts.view_spec or op.parts.composite or op.parts.algorithm or op.creates):
            kinds = [self._kind(x) for x in operands]
            key = None if None in kinds else (op, params, *map(type, params), *kinds)
            try:
                entry = _inferred.get(key)
            except TypeError:  # A parameter is not hashable.
                key = entry = None
            if entry is not None:
                return on_device(entry, self.device)
        result = super().apply(op, operands, params)
        if key is not None and result.ndim and result.device == self.device:
            if len(_inferred) >= _KEPT:
                _inferred.clear()  # in one step, as other threads may do the same
            _inferred[key] = host_aval(result.shape, result.dtype)
        return result

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Checks a write of the result of ``op`` into ``out``."""
        super().write(out, op, self._here(operands), params)

    def _kind(self, x: Any) -> Any:
        """Returns the part of the cache key for one operand: shape and dtype of a tensor, otherwise the type.

        None for a tensor that is 0-d, has elements, was donated or is on other devices, whose result is not cached.
        """
        if type(x) is not ShardedTensor:
            return type(x)
        return (x.shape, x.dtype) if x.ndim and x.device == self.device and type(x._storage) is NoElements else None

    def _here(self, operands: Operands) -> Operands:
        """Replaces host arrays by tensors on this device, as a real device converts them; no transfer is recorded.

        If a tensor among them is on other devices, those on this device follow it: they stand for arrays, and tensors
        of arrays are not committed (see `shardtensor.tensor.operands.as_operand`).
        """
        if not all(x.device == self.device for x in operands if type(x) is ShardedTensor):
            return tuple(map(_uncommitted, operands))
        if not any(isinstance(x, (np.ndarray, np.generic)) for x in operands):
            return operands
        return tuple([on_device(x, self.device) if is_data(x) else x for x in operands])


def _uncommitted(x: Any) -> Any:
    if type(x) is not ShardedTensor or x.sharding.mesh.size > 1 or type(x._storage) is not NoElements:
        return x
    return without_elements(aval(x.shape, x.dtype, x.sharding, False))


_inferred: dict[Any, HostAval] = {}
"""Shapes and dtypes of results by operator, parameters and operand kinds. All devices share them."""

_KEPT = 4096


def _from_aval(x: Any) -> Any:
    return without_elements(x) if isinstance(x, Aval) else x


def stand_ins(op: Op, operands: Operands, known: dict[int, ShardedTensor] | None = None) -> Operands:
    """Returns the operands without elements; pytrees keep the elements that are known, such as those of indices. For
    ``known`` see `stand_in`.
    """
    names, trees = op.operands * len(operands), op.signature.trees
    return tuple([x if name in trees else stand_in(x, known) for name, x in zip(names, operands, strict=False)])


INFER = InferInterpreter()


def inferring() -> contextlib.AbstractContextManager[None]:
    """Makes the inference the innermost interpreter in the context, on the current device inside of a map."""
    device = current_device()
    return interpreting(INFER if device is None else AbstractDeviceInterpreter(device))


@overload
def eval_shape(fn: Callable[..., ShardedTensor], /, *args: Any, **kwargs: Any) -> ShapeDtypeStruct: ...


@overload
def eval_shape(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any: ...


def eval_shape(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Returns the shapes, dtypes and shardings of the results of ``fn(*args, **kwargs)``, without computing elements.

    The function is called once. Every operator infers the layout of its result by the rules that it follows when it
    runs, so these are exactly the shardings of the results. Nothing is transferred, allocated or written.

    Args:
        fn: the function.
        *args: its arguments: pytrees of tensors, host arrays, `ShapeDtypeStruct` and other objects, passed unchanged.
        **kwargs: likewise.

    Returns:
        The result of the function, in which each tensor is replaced by a `ShapeDtypeStruct`.

    Raises:
        ConcretizationError: the function needs elements: ``float(x)``, ``if x``, ``np.asarray(x)``, a mask as an index.
        ArgumentTypeError: ``fn`` is not a function.
        ShardTensorError: an operator does not accept its operands.

    >>> x = st.ShapeDtypeStruct((8, 4), "float32", st.NamedSharding(st.make_mesh((2,), ("d",)), st.P("d")))
    >>> st.eval_shape(lambda x: (x @ x.T).sum(axis=1), x)
    ShapeDtypeStruct(shape=(8,), dtype=float32, sharding=P('d'))
    """
    if not callable(fn):
        raise ArgumentTypeError(f"eval_shape: fn is {type_text(fn)}; wanted a function")
    inputs = arguments((args, kwargs))
    with interpreting(INFER), recorded_by():
        result = fn(*inputs[0], **inputs[1])
    return map_leaves(struct, result)


def arguments(tree: Any) -> Any:
    """Returns a pytree of arguments with tensors without elements in place of tensors and of `ShapeDtypeStruct`. They
    alias one another as the tensors do.
    """
    known: dict[int, ShardedTensor] = {}

    def argument(x: Any) -> Any:
        return mark_array(without_elements(x._aval)) if isinstance(x, ShapeDtypeStruct) else stand_in(x, known)

    return map_leaves(argument, tree)


def struct(x: Any) -> Any:
    """Returns a leaf of a result, as a `ShapeDtypeStruct` if it is a tensor."""
    return _struct_of(x.shape, x.dtype, x.sharding, x.committed) if isinstance(x, ShardedTensor) else x


def _struct_of(shape: Shape, dtype: np.dtype[Any], sharding: NamedSharding, committed: bool) -> ShapeDtypeStruct:
    struct: ShapeDtypeStruct = object.__new__(ShapeDtypeStruct)
    struct._aval = aval(shape, dtype, sharding, committed)
    return struct
