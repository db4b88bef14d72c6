"""Placement: creating tensors from arrays, transferring them between devices, and reading them on the host.

These are explicit transfers, which `transfer_guard` permits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.backend.exclusive_memory import lend
from shardtensor.backend.registry import array_backend
from shardtensor.communication import transfer
from shardtensor.communication.exported_storage import Exported
from shardtensor.communication.messages import copied
from shardtensor.communication.offload import (
    OffloadedElements,
    OffloadedStorage,
    memory_kind_transfers,
    offloaded,
    pinned,
)
from shardtensor.communication.transfer_log import is_recording, record_transfer
from shardtensor.core import hinted, implements, named, operator
from shardtensor.errors import ArgumentError, BackendError
from shardtensor.functions.placement.partial_sum_operators import infer_unreduced, partial_sums_to, unreduced
from shardtensor.sharding.index import Index, canonical, to_numpy
from shardtensor.sharding.layout import NamedSharding, Where, as_sharding
from shardtensor.sharding.mesh import default_mesh
from shardtensor.tensor.operands import as_operand, host_array, host_aval, located, no_array
from shardtensor.tensor.ownership import lease, lent
from shardtensor.tensor.partial_sum_storage import PartialSums
from shardtensor.tensor.pytree import LEAF_TYPES, children_of, leaves, map_leaves, map_with_prefix, paths, replaced
from shardtensor.tensor.storage import DeferredStorage, Storage
from shardtensor.tensor.tensor import (
    ArrayLike,
    ShardedTensor,
    check_not_donated,
    current_storage,
    lacks_elements,
    mark_array,
    mark_donated,
    tensor,
    tensor_of,
    without_elements,
)
from shardtensor.tensor.value import Aval, aval, whole_of

_DERIVATIVES = "of_movement"

_Key = TypeVar("_Key")
_Leaf = TypeVar("_Leaf", bound=ArrayLike)
# mypy tells no type variables apart in overloads for arguments that contain Any (see
# `shardtensor.spmd.maps.map_types`).
_Array = TypeVar("_Array", ShardedTensor, HostArray, ArrayLike)
_Tree = TypeVar("_Tree")


# -- pytrees ---------------------------------------------------------------------------------------


def put_leaves(
    tree: Any,
    shardings: Any,
    caller: str,
    what: str,
    *,
    of: str = "x",
    default: bool = False,
    donate: bool = False,
    may_alias: bool | None = None,
) -> Any:
    """Returns a pytree with its arrays in the shardings of a prefix tree. None among its leaves stays None.

    All arguments are checked before the first leaf is transferred, so that an error about one donates none.

    Args:
        tree: the pytree.
        shardings: the prefix tree of shardings.
        caller: the function that errors name.
        what: the name of its argument ``shardings``.
        of: the name of the pytree in errors.
        default: whether host arrays that get no sharding are put on the default mesh; other leaves that get none are
            returned as they are.
        donate, may_alias: see `reshard`.
    """

    def checked(leaf: Any, where: Any) -> Callable[[], Any]:
        if leaf is None or (where is None and (isinstance(leaf, ShardedTensor) or not default)):
            return lambda: leaf
        array = leaf if isinstance(leaf, ShardedTensor) else host_array(leaf, caller)
        check_not_donated(array)
        target = as_sharding(default_mesh() if where is None else where, array.ndim, caller)
        committed = where is not None
        return functools.partial(
            transfer_to, array, target, caller, committed=committed, donate=donate, may_alias=may_alias
        )

    puts = map_with_prefix(checked, tree, shardings, caller, what, of)
    return replaced(tree, [put() for put in puts])


def _is_tree(x: Any) -> bool:
    return type(x) not in LEAF_TYPES and children_of(x) is not None


# -- transfers -------------------------------------------------------------------------------------


@overload
def reshard(
    x: ArrayLike, /, sharding: Where, *, donate: bool = False, may_alias: bool | None = None
) -> ShardedTensor: ...


@overload
def reshard(x: Any, /, sharding: Any, *, donate: bool = False, may_alias: bool | None = None) -> Any: ...


@operator(tags=("any dtype", "keeps arrays"))
def reshard(x: Any, /, sharding: Any, *, donate: bool = False, may_alias: bool | None = None) -> Any:
    """Transfers x, an array or a pytree of arrays, to another sharding, on the same or on other devices.

    The result is an independent tensor with x's shape, dtype and elements, or a pytree of the same structure with a
    tensor for each array. Each device receives, once, exactly the elements that it must hold and does not hold yet.

    Args:
        x: a tensor, a host array, or a pytree of them, in which None stays None.
        sharding: the sharding of the result; a Device, a Mesh or a bare P has the same meaning as ``device=`` in
            creation functions. For a pytree, one for all arrays or a prefix tree of shardings: it has the structure of
            the pytree, except that a sharding may stand for a whole subtree, and None leaves it as it is.
        donate: whether x's memory is given away: using x afterwards raises DonatedError.
        may_alias: whether the result may share memory with x. None permits it for a tensor (writes to either are never
            visible in the other) and not for a host array; False always copies.

    Raises:
        ShardingError: the spec has more dimensions than x.
        ArgumentError: both ``donate`` and ``may_alias`` are true, or ``donate`` is and x is a host array or has a
            tensor twice, or a tensor and a view of it; the structures of the pytrees differ.
        ArgumentTypeError: ``sharding`` is neither a Device nor a Mesh nor a NamedSharding nor a P.

    >>> mesh = st.make_mesh((4,), ("x",))
    >>> x = st.reshard(st.ones((8, 4)), st.NamedSharding(mesh, st.P("x")))
    >>> st.reshard(x, st.NamedSharding(mesh, st.P(None, "x"))).addressable_shards[0].data.shape
    (8, 1)
    """


@implements(reshard, "composite")
def _reshard(x: Any, sharding: Any, donate: bool, may_alias: bool | None) -> Any:
    if donate:
        check_donated(x, "reshard")
    if _is_tree(x):
        return put_leaves(x, sharding, "reshard", "sharding", donate=donate, may_alias=may_alias)
    if x is None:
        raise no_array("reshard")
    x = as_operand(x, "reshard")
    # NumPy's ndim would call the function for tensors, which takes longer than a transfer that copies nothing.
    target = as_sharding(sharding, getattr(x, "ndim", 0), "reshard")
    return transfer_to(x, target, "reshard", donate=donate, may_alias=may_alias)


@operator(
    error_name="device_put",
    tags=(
        "any dtype",
        "exact",
        "internal",
        "keeps arrays",
        "reads no host arrays",
        "same elements",
        "takes partial sums",
    ),
)
def transfer_to(
    x: ArrayLike,
    /,
    sharding: NamedSharding,
    caller: str,
    *,
    committed: bool = True,
    donate: bool = False,
    may_alias: bool | None = None,
) -> ShardedTensor:
    """Transfers x to another sharding as `reshard` does, for the function ``caller``, which errors and records name.

    >>> from shardtensor.functions.placement.transfers import transfer_to
    >>> transfer_to(np.arange(3), st.zeros(3).sharding, "device_put", committed=False).committed
    False
    """


@implements(transfer_to, "infer")
def infer_transfer(
    x: Any,
    sharding: NamedSharding,
    caller: str,
    committed: bool = True,
    donate: bool = False,
    may_alias: bool | None = None,
) -> Aval:
    """Returns the aval of the result of `transfer_to`, and records the transfers if a log is active."""
    check_not_donated(x)
    x = x if isinstance(x, ShardedTensor) else located(np.asarray(x))
    if sharding.spec.unreduced or (isinstance(x, ShardedTensor) and x._aval.unreduced):
        value = partial_sums_to(x, sharding, caller, committed, infer_unreduced)._aval
        if donate and lacks_elements(x):
            mark_donated(x, caller)
        return value
    value, move = _checked(x, sharding, caller, committed, donate, may_alias)
    if not (move.stays and type(getattr(x, "_storage", None)) is OffloadedElements):
        transfer.announce_reading(x)
    _announce_memory_kind(x, value, caller)
    _infer_messages(value, move, caller, isinstance(x, ShardedTensor) if may_alias is None else may_alias)
    if donate and lacks_elements(x):  # A tensor with elements, which the function closes over, keeps its memory.
        mark_donated(x, caller)
    return value


def _checked(
    x: Any, target: NamedSharding, caller: str, committed: bool, donate: bool, may_alias: bool | None
) -> tuple[Aval, transfer.OperandTransfer]:
    """Returns the aval of a tensor or a host array in another sharding, and its transfer, after all checks."""
    if donate and may_alias:
        raise ArgumentError(f"{caller}: donate=True gives the memory away and may_alias=True shares it; choose one")
    try:
        value = aval(x.shape, x.dtype, target, committed)
    except BackendError as error:
        raise BackendError(f"{caller}: {error}") from None
    kind = x._aval if isinstance(x, ShardedTensor) else host_aval(x.shape, x.dtype)
    return value, transfer.operand_transfer(kind, target)


def _infer_messages(value: Aval, move: transfer.OperandTransfer, caller: str, may_alias: bool) -> None:
    """Records a transfer, if a log is active."""
    if value.backend.simulated or value.memory is None:
        move.infer(caller, explicit=True)
        return
    here = move.source.memory == value.memory
    copies = not (may_alias and here)
    if is_recording() and (copies or not move.stays):
        # Separate memories would send each transfer, but one buffer is copied: ``copying`` records these bytes.
        itemsize, movement = move.source.dtype.itemsize, move.movement
        nbytes = min(value.nbytes, movement.size * itemsize) if not here else value.nbytes if copies else 0
        record_transfer(caller, 0, True, lambda: movement.records(itemsize, False, caller, True).copying(nbytes))


def _announce_memory_kind(x: Any, value: Aval, caller: str) -> None:
    """Records the transfer between device memory and host memory, if a tensor changes its memory kind."""
    kind = value.sharding.memory_kind
    if isinstance(x, ShardedTensor) and x.sharding.memory_kind != kind:
        changed = functools.partial(memory_kind_transfers, value, on=kind == "device", explicit=True, caller=caller)
        record_transfer(caller, 0, True, changed)


@implements(transfer_to, "algorithm")
def reshard_to(
    x: Any,
    target: NamedSharding,
    caller: str,
    committed: bool = True,
    donate: bool = False,
    may_alias: bool | None = None,
) -> ShardedTensor:
    """Implements `transfer_to`."""
    host = not isinstance(x, ShardedTensor)
    x = located(np.asarray(x)) if host else x
    if target.spec.unreduced or (not host and x._aval.unreduced):
        result = partial_sums_to(x, target, caller, committed, unreduced)
        if donate and not host:
            mark_donated(x, caller)
        return mark_array(result)
    value, move = _checked(x, target, caller, committed, donate, may_alias)
    if value.backend.simulated:
        return mark_array(without_elements(infer_transfer(x, target, caller, committed, donate, None)))
    # By default a host array is copied, because the caller may write to it.
    shares = not host if may_alias is None else may_alias
    storage = (_put_separate if value.memory is None else _put_shared)(x, value, move, caller, shares)
    if donate and not host:  # The memory of a host array remains its owner's.
        mark_donated(x, caller)
    return mark_array(tensor(value, storage))


def check_donated(tree: Any, caller: str, name: str = "x", others: Any = ()) -> None:
    """Checks that the memory of the arrays in a pytree can be donated: that none is a host array, whose memory remains
    its owner's, and that none is there twice, itself or in a view of it.

    Args:
        tree: the pytree.
        caller: the function that errors name.
        name: the name of the pytree in errors.
        others: a pytree of the arguments that are not donated, but read by the same call.

    Raises:
        ArgumentError: a leaf is a host array; two leaves are one tensor, or a tensor and a view of it.
    """
    donated: dict[int, str] = {}
    for path, leaf in zip(paths(tree, name), leaves(tree), strict=True):
        if isinstance(leaf, np.ndarray):
            raise ArgumentError(
                f"{caller}: donate=True gives away the memory of tensors, and there is a host array of shape "
                f"{leaf.shape}, whose memory remains its owner's; leave out donate, or make a tensor of the array "
                "first (st.asarray, st.device_put)"
            )
        if isinstance(leaf, ShardedTensor) and donated.setdefault(id(leaf), path) != path:
            raise _donated_twice(caller, f"{path} is the same tensor as {donated[id(leaf)]}")
    for path, leaf in zip((*paths(tree, name), *paths(others, "")), (*leaves(tree), *leaves(others)), strict=True):
        if isinstance(leaf, ShardedTensor):
            what = path or "another argument"
            # A donated view leaves the memory to its base, so that two views of one tensor may be donated.
            if id(leaf.base) in donated:
                raise _donated_twice(caller, f"{what} is a view of {donated[id(leaf.base)]}")
            if donated.get(id(leaf), path) != path:
                raise _donated_twice(caller, f"{what} is the same tensor as {donated[id(leaf)]}")


def _donated_twice(caller: str, reason: str) -> ArgumentError:
    return ArgumentError(
        f"{caller}: donate=True gives the memory of each tensor away once, and {reason}; leave out donate, or give a "
        "copy"
    )


def ensure_sharding(x: Any, target: NamedSharding, caller: str) -> ShardedTensor:
    """Returns x with the sharding ``target``, for reading: x itself if it has that sharding already."""
    if isinstance(x, ShardedTensor) and x.sharding == target:
        return x
    return transfer_to(x, target, caller)


def _put_shared(
    x: Any, value: Aval, move: transfer.OperandTransfer, caller: str, may_alias: bool
) -> Storage | DeferredStorage:
    """Returns the storage for devices that share one memory: x's buffer if it may be shared, otherwise a copy of it."""
    storage, here = getattr(x, "_storage", None), move.source.memory == value.memory
    if isinstance(storage, OffloadedStorage) and move.stays:
        return storage.coming()
    copies = not (may_alias and here)
    (whole,) = move.buffers(x, caller, explicit=True)
    if here and copies:
        whole = copied(whole, value.sharding.mesh.flat[0])
    elif here and not isinstance(x, ShardedTensor):
        whole = whole.view()  # The flag of the caller's array must not change.
        whole.flags.writeable = False
    return Storage((whole_of(whole, value),))


def _put_separate(
    x: Any, value: Aval, move: transfer.OperandTransfer, caller: str, may_alias: bool
) -> Storage | DeferredStorage:
    """Returns the storage for devices with separate memories: arrays that are on their device already are shared if
    they may be, otherwise copied.
    """
    storage = getattr(x, "_storage", None)
    if isinstance(storage, OffloadedStorage) and move.stays:  # Sharing is safe, as a write replaces this storage.
        return storage if value.offloaded else storage.coming()
    if value.offloaded and not isinstance(x, ShardedTensor):
        return pinned(value, np.asarray(x))
    if value.offloaded:  # The copies to host memory read the shards where they are.
        return offloaded(value, move.shards(x, caller, explicit=True))
    arrays = move.buffers(x, caller, explicit=True)
    if not may_alias and (value.spans or isinstance(x, ShardedTensor)):
        devices = move.cells.grid.devices
        arrays = [copied(a, devices[n]) if move.keeps(n) else a for n, a in enumerate(arrays)]
    return offloaded(value, arrays)


@overload
def device_put(
    x: _Array, device: Where | None = None, *, donate: bool = False, may_alias: bool | None = None
) -> ShardedTensor: ...


@overload
def device_put(
    x: list[_Leaf], device: Any = None, *, donate: bool = False, may_alias: bool | None = None
) -> list[ShardedTensor]: ...


@overload
def device_put(
    x: dict[_Key, _Leaf], device: Any = None, *, donate: bool = False, may_alias: bool | None = None
) -> dict[_Key, ShardedTensor]: ...


@overload
def device_put(x: _Tree, device: Any = None, *, donate: bool = False, may_alias: bool | None = None) -> Any: ...


@hinted
def device_put(x: Any, device: Any = None, *, donate: bool = False, may_alias: bool | None = None) -> Any:
    """Transfers x, an array or a pytree of arrays, to a device, a mesh or a sharding.

    Returns a tensor with the shape and dtype of x, or a pytree of the same structure with a tensor for each leaf. Each
    leaf is transferred as by `reshard`. The results are independent tensors.

    Args:
        x: a tensor, a host array, a scalar, or a pytree of them, in which None stays None.
        device: a Device, Mesh, NamedSharding or P (see `shardtensor.functions.standard.creation`); None returns tensors
            as they are and shards other leaves over the default mesh. For a pytree, one for all leaves or a prefix tree
            of them, as in `reshard`.
        donate, may_alias: see `reshard`.

    Raises:
        ShardingError: the spec has more dimensions than an array.
        ArgumentError: both ``donate`` and ``may_alias`` are true, or ``donate`` is and x contains a host array, a
            tensor twice, or a tensor and a view of it; the structures of the pytrees differ.
        ArgumentTypeError: ``device`` is neither a Device nor a Mesh nor a NamedSharding nor a P, or a leaf is not an
            array.

    >>> st.device_put(np.arange(3), st.devices()[1]).device
    Device('numpy:1')
    >>> mesh = st.make_mesh((4,), ("x",))
    >>> params = {"w": np.ones((8, 4)), "b": np.zeros(4)}
    >>> shardings = {"w": st.NamedSharding(mesh, st.P("x")), "b": st.NamedSharding(mesh, st.P())}
    >>> st.device_put(params, shardings)["w"].sharding.spec
    P('x')
    """
    if donate:
        check_donated(x, "device_put")
    if _is_tree(x):
        return put_leaves(x, device, "device_put", "device", default=True, donate=donate, may_alias=may_alias)
    if isinstance(x, ShardedTensor) and device is None:
        return x
    array = x if isinstance(x, ShardedTensor) else host_array(x, "device_put")
    target = as_sharding(default_mesh() if device is None else device, array.ndim, "device_put")
    return transfer_to(array, target, "device_put", committed=device is not None, donate=donate, may_alias=may_alias)


@overload
def device_get(x: ShardedTensor | HostArray) -> HostArray: ...


@overload
def device_get(x: list[ShardedTensor]) -> list[HostArray]: ...


@overload
def device_get(x: dict[_Key, ShardedTensor]) -> dict[_Key, HostArray]: ...


@overload
def device_get(x: Any) -> Any: ...


def device_get(x: Any) -> Any:
    """Returns x, an array or a pytree of arrays, with each tensor in it as a host array, as ``numpy.asarray`` returns
    it. Other leaves are returned as they are.

    >>> st.device_get({"w": st.arange(3), "steps": 2})
    {'w': array([0, 1, 2]), 'steps': 2}
    """

    def one(leaf: Any) -> Any:
        is_array = isinstance(leaf, ShardedTensor) or array_backend(leaf) is not None
        return np.asarray(as_operand(leaf, "device_get")) if is_array else leaf

    return map_leaves(one, x)


@operator(tags=("any dtype", "exact", "internal", "same elements", "takes partial sums"))
def copy(x: ArrayLike, /) -> ShardedTensor:
    """Returns an independent tensor with the value of x; memory is copied only when one of the two is written.

    >>> from shardtensor.functions.placement.transfers import copy
    >>> copy(st.arange(3)).tolist()
    [0, 1, 2]
    """


@implements(copy, "kernel")
def _copy_on_device(xp: Any, context: None, x: Any) -> Any:
    return xp.asarray(x, copy=True)


@implements(copy, "infer")
def _infer_copy(x: ShardedTensor) -> ShardedTensor:
    if type(x._storage) is not OffloadedElements and not x._aval.unreduced:  # Partial sums are shared as they are.
        transfer.announce_reading(x)
    result = without_elements(x._aval)
    return result if x._is_scalar else mark_array(result)


@implements(copy, "algorithm")
def _copy(x: ShardedTensor) -> ShardedTensor:
    storage = x._storage
    if isinstance(storage, DeferredStorage):
        storage = storage.shared()
    if type(storage) is Storage:
        result = tensor_of(x._aval, storage.buffers)
    else:
        result = tensor(x._aval, reshard_to(x, x.sharding, "copy", may_alias=False)._storage)
    return result if x._is_scalar else mark_array(result)


@overload
def with_sharding_constraint(x: ArrayLike, sharding: Where) -> ShardedTensor: ...


@overload
def with_sharding_constraint(x: Any, sharding: Any) -> Any: ...


@named
def with_sharding_constraint(x: Any, sharding: Any) -> Any:
    """Returns x, an array or a pytree of arrays, with the given sharding, or a prefix tree of them: in eager mode by
    `reshard`, under jit as a constraint on an intermediate.

    Shape, dtype, elements and errors are those of `reshard`.

    >>> mesh = st.make_mesh((4,), ("x",))
    >>> st.with_sharding_constraint(st.ones((8, 4)), st.NamedSharding(mesh, st.P(None, "x"))).sharding.spec
    P(None, 'x')
    """
    return reshard(x, sharding)


@operator(error_name="asarray", tags=("any dtype", "escapes", "internal", "takes partial sums"))
def to_host(x: ArrayLike, /, index: Any = None) -> HostArray:
    """Returns a tensor x, or ``x[index]`` for a basic index, as a read-only NumPy array of x's dtype.

    The array shares x's memory where possible. Only devices that hold elements of ``x[index]`` send them, and the
    transfer is counted as explicit. An x that is not a tensor is converted by `numpy.asarray`; ``index`` is then
    ignored.

    >>> from shardtensor.functions.placement.transfers import to_host
    >>> to_host(st.arange(5), index=slice(3, None))
    array([3, 4])
    """


@implements(to_host, "algorithm")
def _to_host(x: Any, index: Any) -> HostArray:
    if not isinstance(x, ShardedTensor):
        return np.asarray(x)
    value = x._aval
    at = canonical(index, x.shape) if index is not None and type(index) is not Index else index
    storage = x._storage
    if type(storage) is not Storage and hasattr(storage, "to_host"):
        if value.spans and type(storage) is PartialSums and storage.memory is None:
            raise transfer.not_addressable("to_host", "the partial sums of an unreduced tensor in other processes")
        return storage.to_host(at)  # type: ignore[no-any-return]
    if value.spans:
        return lent(x, transfer.read_here(x, "to_host", at))
    shared = value.backend.on_host

    def records() -> Any:
        return transfer.to_host_movement(value, at).records(value.dtype.itemsize, not shared, "to_host", True)

    record_transfer("to_host", 0, True, records)
    if not shared:
        return lent(x, transfer.read(x, at))
    if type(storage) is not Storage:
        storage = current_storage(x)
        if type(storage) is Exported:
            return lent(x, storage.read(lambda array: array if at is None else array[to_numpy(at)]))
    if type(storage) is Storage and len(storage.buffers) == 1:
        (whole,) = storage.buffers
        exported, its_lease = lend(whole if at is None else whole[to_numpy(at)])
        lease(storage, its_lease)  # Another thread may have replaced that of the tensor since.
        return exported
    whole = transfer.whole_array(x, "to_host")
    return lent(x, whole if at is None else np.asarray(whole[to_numpy(at)]))
