"""Views, which are tensors that alias a part of a base tensor.

The storage of a view consists of a base tensor and a view spec (see `shardtensor.sharding.view_spec`). A view is lazy:
it computes and transfers nothing until its elements are read, and then shows the current value of the base. Where
memory is shared, reading gives a view of the base's buffer; elsewhere the view's shards are brought into its own layout
and cached until the base is written.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import HOST, HostArray
from shardtensor.backend.exclusive_memory import read_only
from shardtensor.backend.registry import backend_of, in_job
from shardtensor.communication.exported_storage import Exported
from shardtensor.communication.gather_scatter import GatherPlan, GatherRequest
from shardtensor.communication.transfer import announce_reading, buffers_of, recorded_reading, whole_array
from shardtensor.communication.transfer_log import announce, record_transfer
from shardtensor.core import Op, Params, call, implements
from shardtensor.functions.standard.indexing import view
from shardtensor.host.blockwise import copied
from shardtensor.interpreters.execution.plan_cache import value_of
from shardtensor.interpreters.views.scalar_elements import ScalarElement, copied_element
from shardtensor.sharding.copy_plan import host_grid
from shardtensor.sharding.index import Index
from shardtensor.sharding.layout import Grid, NamedSharding, Shape
from shardtensor.sharding.spec import Chain, P
from shardtensor.sharding.view_spec import (
    BoxIndex,
    Part,
    ShardedBox,
    ViewSpec,
    located,
    part_dtype,
    part_of,
    part_steps,
)
from shardtensor.tensor.identity import value_identity, with_identity
from shardtensor.tensor.ownership import keep_while_read, lent, storage_of
from shardtensor.tensor.partial_sum_storage import PartialSums
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import (
    ShardedTensor,
    check_not_donated,
    current_storage,
    lacks_elements,
    mark_array,
    shard_arrays,
    tensor,
    without_elements,
    write_state_of,
)
from shardtensor.tensor.value import Aval, aval, on_devices


class View:
    """The storage of a tensor that is a view.

    Attributes:
        base: the base tensor; never a view itself.
        view_spec: the view spec, which determines the elements of the base that the view aliases.
    """

    __slots__ = ("__weakref__", "_cache", "base", "view_spec")

    def __init__(self, base: ShardedTensor, view_spec: ViewSpec) -> None:
        self.base = base
        self.view_spec = view_spec
        self._cache: tuple[int, Any] | None = None  # The version of the base that was read, and the arrays read.

    @property
    def buffers(self) -> Any:
        """See `Storage`: the view of the base's buffer where `is_direct`, otherwise arrays in the view's layout. The
        transfers are recorded.
        """
        if not self.is_direct:
            return self._read()
        announce(self)  # Separate memories would need transfers.
        write_state = self.base._write_state
        self._cache = (write_state.version if write_state else 0, None)
        return (self.now(),)

    @property
    def _is_read(self) -> bool:
        """Whether it has been read since the last write to the base."""
        write_state = self.base._write_state
        return self._cache is not None and self._cache[0] == (write_state.version if write_state else 0)

    @property
    def is_direct(self) -> bool:
        """Whether reading it gives a view of the base's buffer: devices share it, and the backend has such views."""
        value = self.base._aval
        return value.memory is not None and (value.backend.negative_strides or not self.view_spec.reverses)

    def now(self) -> Any:
        """Where `is_direct`, the view of the base's buffer. No transfers are recorded."""
        backend, storage = self.base._aval.backend, current_storage(self.base)
        if type(storage) is Exported:
            return storage.read(lambda array: self.view_spec.of(backend, array))
        with backend.on(self.base._aval.sharding.mesh.flat[0]):
            return self.view_spec.of(backend, row_major(self.base, self.view_spec))

    def announce(self) -> None:
        """Records the transfers that reading the view needs, unless it has been read."""
        if lacks_elements(self.base):
            self._read()
        elif not self._is_read:
            check_not_donated(self.base)
            self.over(stand_in(self.base)).announce()

    def over(self, base: ShardedTensor) -> View:
        """Returns the storage of the view of a new base without elements, which stands for the view: it has been read
        if the view has been.
        """
        handle = View(base, self.view_spec)
        if self._is_read:
            handle._cache = (0, None)
        return handle

    def forget(self) -> None:
        """Drops the cached arrays."""
        self._cache = None

    def _read(self) -> Any:
        """Evaluates the view spec by operators, once for each version of the base, and returns the buffers.

        Where the base has no elements, it returns None; the evaluation then only records the transfers.
        """
        write_state = write_state_of(self.base)
        # The version is read before the value, so it may be older than the value, but never newer.
        version = write_state.version
        cache = self._cache
        if cache is None or cache[0] != version:
            storage = current_storage(self.base)
            with contextlib.nullcontext() if lacks_elements(self.base) else recorded_reading(self):
                cache = (version, self._held(storage) or self._evaluated(storage))
            if type(storage) is Exported:  # Writes of a consumer do not increase the version, so nothing is cached.
                return cache[1]
            key, caches = id(self), write_state.caches
            # A C function, in which no signal handler runs: an error that a handler raises there is lost. It receives
            # the reference as the default.
            caches[key] = weakref.ref(self, functools.partial(caches.pop, key))
            self._cache = cache
        return cache[1]

    def _held(self, storage: Any) -> Any:
        """Returns views of the base's buffers, if these are the view's, so that nothing moves; otherwise None."""
        here = self._here(storage)
        return here and tuple(local_views(here, buffers_of(tensor(self.base._aval, storage)), self.view_spec))

    def _here(self, storage: Any) -> ShardedBox | None:
        """Returns the boxes of the view in the base's buffers, if these are the view's; otherwise None."""
        base, view_spec = self.base._aval, self.view_spec
        if base.memory is not None or base.spans or base.offloaded or base.unreduced or type(storage) is not Storage:
            return None
        if view_spec.reverses and not base.backend.negative_strides:
            return None
        return _of_cells(base, view_spec.boxes, view_spec.chains, view_spec.shape)

    def _evaluated(self, storage: Any) -> Any:
        """Returns the buffers that operators compute; see `_read`."""
        value = evaluate(tensor(on_devices(self.base._aval), storage), self.view_spec)
        if lacks_elements(self.base):
            announce_reading(value)
            return None
        # Each device has its own part of the view.
        return (shard_arrays if self.base._aval.offloaded else buffers_of)(value)

    def to_host(self, index: Any) -> HostArray:
        """Copies the view, or the part selected by a basic index, to host memory, directly from the owning devices.

        Args:
            index: a basic index of the view, or None for the whole view.
        """
        view_spec = self.view_spec if index is None else self.view_spec.at(index)
        x = tensor(self.base._aval, current_storage(self.base))
        if view_spec.size == x.size:
            return read_only(view_spec.of(backend_of(HOST), call("to_host", x)))
        if len(view_spec.boxes) == 1:
            (box,) = view_spec.boxes
            array = box.arranged(np, call("to_host", x, index=Index(box.entries)))
            return read_only(part_of(array, view_spec.part))
        return _picked_to_host(x, view_spec)


def _picked_to_host(x: ShardedTensor, view_spec: ViewSpec) -> HostArray:
    """Gathers the elements of a view that is not a box of the tensor's shape one by one in host memory."""
    if x._aval.spans:
        return read_only(view_spec.of(backend_of(HOST), call("to_host", x)))
    shared = x._aval.backend.on_host

    @functools.cache
    def plan() -> GatherPlan:
        coordinates = np.unravel_index(view_spec.positions.ravel(), x.shape)
        return GatherPlan(x._aval.grid, range(x.ndim), [GatherRequest(HOST, view_spec.size, coordinates, ())])

    record_transfer("to_host", 0, True, lambda: plan().records(x.dtype.itemsize, not shared, "to_host", True))
    if shared:
        return lent(x, view_spec.of(x._aval.backend, whole_array(x)))
    array = plan().run(shard_arrays(x), x.dtype)[0].reshape(view_spec.shape)
    return read_only(part_of(array, view_spec.part))


# -- making views ----------------------------------------------------------------------------------


def reads_buffers(base: Aval, view_spec: ViewSpec) -> bool:
    """Whether reading a view gives views of the buffers of its base, wherever these are."""
    if len(view_spec.boxes) > 1 or (view_spec.reverses and not base.backend.negative_strides):
        return False
    if base.memory is not None:
        return True
    if base.spans or base.offloaded or base.unreduced:
        return False
    return _of_cells(base, view_spec.boxes, view_spec.chains, view_spec.shape) is not None


def copied_scalar(x: ShardedTensor, inferred: tuple[ShardedTensor, ViewSpec, Aval, bool]) -> ShardedTensor:
    """Returns an independent copy of an element of ``x``, or of the scalar ``x``: neither is ever written, so that a
    copy is equivalent to a view.

    Args:
        x: the tensor.
        inferred: the result of `infer_view`.
    """
    base, view_spec, value, is_element = inferred
    if is_element:
        element = copied_element(base, view_spec, value)
        if in_job() and (identity := value_identity(base)):
            element._identity = f"{identity}[{view_spec.offset}]{view_spec.part or ''}"
        return element
    result = mark_array(tensor(value, evaluate(tensor(x._aval, x._storage), view_spec)._storage))
    return with_identity(result, x) if in_job() else result


def infer_view(op: Op, x: ShardedTensor, params: Params) -> tuple[ShardedTensor, ViewSpec, Aval, bool] | None:
    """Returns the base and the view spec of the result of an operator on ``x``, its aval, and whether it is a scalar;
    None where the result is not a view. No elements are read.
    """
    base, view_spec = x._base_and_view()
    identity = None
    if x._aval.ndim:
        identity = _identity(params, _MOST_REPEATED if op.name == "getitem" else sys.maxsize)
    if identity is None:
        inferred = _inferred(op, base._aval, view_spec, not x._aval.ndim and x._is_scalar, params)
    else:
        # The view specs of views that are made again are the same objects, which takes less time to see than equality.
        key = (op, x._aval, identity) if base is x else (op, base._aval, id(view_spec), identity)
        found = _known.get(key)
        if found is None:
            found = view_spec, _inferred(op, base._aval, view_spec, False, params)
            if len(_known) >= _MOST_KNOWN:
                _known.clear()  # in one step, as other threads may do the same
            _known[key] = found
        inferred = found[1]
    return inferred and (base, *inferred)


_known: dict[Any, tuple[ViewSpec, tuple[ViewSpec, Aval, bool] | None]] = {}
"""For an operator on a tensor or a view and its parameters: the view spec of the operand, which exists as long as a key
has its number, and what is inferred.
"""
_MOST_KNOWN = 4096

_MOST_REPEATED = 64
"""The greatest index up to which views are kept: ``x[1:]`` occurs again, but a loop meets each of many rows once."""

_SIMPLE = frozenset([bool, str, type(None), type(Ellipsis)])


def _identity(items: tuple[Any, ...], most: int) -> tuple[Any, ...] | None:
    """Returns types and values of parameters in hashable form; None if one is not a simple value, a slice or a tuple,
    or an integer greater than ``most``.

    Values that are equal, such as 1 and True, may differ in type, and slices have no hash before Python 3.12.
    """
    identity: list[Any] = []
    for x in items:
        kind = type(x)
        if kind is slice or kind is tuple:
            x = _identity(x if kind is tuple else (x.start, x.stop, x.step), most)
            if x is None:
                return None
        elif kind is int:
            if not -most <= x <= most:
                return None
        elif kind not in _SIMPLE:
            return None
        identity += kind, x
    return tuple(identity)


def _inferred(
    op: Op, base: Aval, view_spec: ViewSpec, scalar: bool, params: Params
) -> tuple[ViewSpec, Aval, bool] | None:
    """Returns the view spec of the result of an operator on a view, its aval, and whether it is a scalar; None where it
    is not a view.

    Args:
        op: the operator.
        base: the aval of the base.
        view_spec: that of the operand.
        scalar: whether the operand is one.
        params: the values of the operator's parameters.
    """
    assert op.parts.view_spec is not None
    spec = op.parts.view_spec(view_spec, *params)
    if spec is None or 0 in spec.shape:
        return None
    if isinstance(spec.part, str) and base.dtype.kind != "c":
        if spec.part == "imag":
            return None
        spec = spec.only(None)
    is_element = spec.scalar or (scalar and not spec.shape and "array views" not in op.tags)
    is_linear = not (is_element or scalar or isinstance(spec.part, (np.dtype, tuple)))
    sums = base.sharding.spec.unreduced if is_linear else frozenset()
    return spec, aval_of_view(base, spec.chains, spec.shape, spec.part, sums), is_element


@functools.lru_cache(8192)
def aval_of_view(
    base: Aval, chains: tuple[Chain, ...], shape: Shape, part: Part, unreduced: frozenset[str] = frozenset()
) -> Aval:
    """Returns the aval of a view of a base."""
    spec = P(*chains, unreduced=unreduced, reduced=base.sharding.spec.reduced)
    sharding: NamedSharding = base.sharding.with_spec(spec)
    return aval(shape, part_dtype(base.dtype, part), sharding, base.committed)


@implements(view, "algorithm")
def _view(x: ShardedTensor, view_spec: ViewSpec) -> ShardedTensor:
    return evaluate(x, view_spec)


@implements(view, "infer")
def _infer_view(x: ShardedTensor, view_spec: ViewSpec) -> Aval:
    return aval_of_view(x._aval, view_spec.chains, view_spec.shape, view_spec.part)


def stand_in(x: Any, known: dict[int, ShardedTensor] | None = None) -> Any:
    """Returns a tensor without elements that has the aval of ``x`` and aliases what ``x`` aliases; a donated tensor and
    any other object are returned unchanged.

    Args:
        x: the object.
        known: what stands for tensors, by identity, so that the results alias one another as the tensors do; also a
            tensor without elements then gets another one. By default, such a tensor is returned unchanged.
    """
    if not isinstance(x, ShardedTensor) or (known is None and lacks_elements(x)) or x.is_donated:
        return x
    known = {} if known is None else known
    if id(x) not in known:
        base = x._base_and_view()[0]
        known[id(x)] = _alone(x) if base is x else tensor(x._aval, x._storage.over(stand_in(base, known)))
    return known[id(x)]


def _alone(x: ShardedTensor) -> ShardedTensor:
    """Returns a tensor without elements that stands for a tensor that is not a view."""
    storage = x._storage
    if hasattr(storage, "without_parts"):  # Reading it transfers elements.
        substitute = tensor(x._aval, storage.without_parts())
    else:
        substitute = without_elements(x._aval)
        if type(storage) is PartialSums:
            substitute._storage.stand_for(storage, without_elements)
    return substitute if x._is_scalar else mark_array(substitute)


# -- reading views ---------------------------------------------------------------------------------


def row_major(base: ShardedTensor, view_spec: ViewSpec) -> Any:
    """Returns the buffer of a base where memory is shared, contiguous if the view spec contains a reshape.

    A view of a reshaped array requires row-major order, so a buffer in another order is replaced by a contiguous copy.
    """
    array, backend = whole_array(base, "view"), base._aval.backend
    if len(view_spec.boxes) > 1 and not backend.is_contiguous(array):
        write_state = write_state_of(base)
        with write_state.lock:
            array = whole_array(base, "view")
            if not backend.is_contiguous(array):
                storage = storage_of(base)
                with backend.on(base._aval.sharding.mesh.flat[0]):
                    array = copied(array) if backend.on_host else backend.contiguous(array)
                if storage is not None:
                    keep_while_read(base, storage)
                base._storage = Storage((array,), ([] if backend.memory_of(array) is not None else None,))
    return array


def evaluate(x: ShardedTensor, view_spec: ViewSpec) -> ShardedTensor:
    """Returns the elements of ``x`` that a view spec selects as an independent value, computed by pure operators."""
    for number, box in enumerate(view_spec.boxes):
        if number:
            x = value_of("reshape", x, box.over, None)
        if not box.is_whole:
            x = _boxed(x, box)
    for step in part_steps(view_spec.part):
        x = value_of(step, x) if isinstance(step, str) else value_of("bitcast", x, step)
    return x


def _boxed(x: ShardedTensor, box: BoxIndex) -> ShardedTensor:
    if not box.in_order:
        x = value_of("getitem", x, Index(box.entries))
        x = value_of("permute_dims", x, box.axes)
        return value_of("getitem", x, box.new) if None in box.order else x
    return value_of("getitem", x, box.index)


def operand_shards(x: Any, inferred: bool) -> tuple[Grid, Callable[[], Sequence[Any]]]:
    """Returns the grid that describes how arrays divide the elements of an operand, and a function that returns them.

    The arrays are those of the cells, or, if they are only ``inferred``, the shards. Those of a view are views of its
    base's arrays wherever `locate` finds its elements there, so that the elements are not brought into the view's own
    layout first.
    """
    if not isinstance(x, ShardedTensor):
        array = np.asarray(x)
        return host_grid(array.shape), lambda: (array,)
    storage = x._storage
    base = storage.base if type(storage) is View else x
    grid = base._aval.grid if inferred else base._aval.cells.grid
    if base is not x and (here := locate(grid, storage.view_spec.boxes)):
        return here.grid, lambda: local_views(here, buffers_of(base), storage.view_spec)
    if type(storage) is ScalarElement:
        grid = storage.grid()
        return grid, lambda: storage.parts * (len(grid.devices) // len(storage.parts))
    if inferred:
        announce_reading(x)
    return x._aval.grid if inferred else x._aval.cells.grid, lambda: buffers_of(x)


@functools.lru_cache(1024)
def locate(grid: Grid, boxes: tuple[BoxIndex, ...]) -> ShardedBox | None:
    """Returns the boxes of a view spec within the parts of a grid; see `shardtensor.sharding.view_spec.located`."""
    return located(grid, boxes)


def local_views(here: ShardedBox, arrays: Sequence[Any], view_spec: ViewSpec | None = None) -> list[Any]:
    """Returns, for each device that holds a part of a view, the view of its shard; see `local_view`."""
    return [local_view(here, n, arrays, view_spec) for n in range(len(here.boxes))]


def local_view(here: ShardedBox, n: int, arrays: Sequence[Any], view_spec: ViewSpec | None = None) -> Any:
    """Returns the part of a view that lies in the shard of the n-th device of ``here``.

    It is a view of the shard if the shard is contiguous or the view spec has only one box index, otherwise a copy.

    Args:
        here: the boxes of the view within the shards.
        n: the number of the device in ``here``.
        arrays: all shards of the base.
        view_spec: the view spec; None if it has only one box index and no real or imaginary part is selected.
    """
    array, box, device = arrays[here.positions[n]], here.boxes[n], here.grid.devices[n]
    backend = backend_of(device)
    with backend.on(device):
        if view_spec is None:
            return box.of(backend, array)
        if len(view_spec.boxes) > 1:
            array = backend.xp.reshape(array, box.over)
        return part_of(box.of(backend, array), view_spec.part)


@functools.lru_cache(1024)
def _of_cells(base: Aval, boxes: tuple[BoxIndex, ...], chains: tuple[Chain, ...], shape: Shape) -> ShardedBox | None:
    """Returns the boxes of a view within the cells of its base, if each is a cell of the view; otherwise None."""
    here = locate(base.cells.grid, boxes)
    cells = aval_of_view(base, chains, shape, None).cells
    return here if here is not None and here.grid.same(cells.grid) else None


def snapshot(x: Any, base: ShardedTensor | None = None, value: ShardedTensor | None = None) -> Any:
    """Returns a new handle on the current value of an operand, which later writes to the operand do not change.

    Args:
        x: the operand; anything but a tensor is returned unchanged.
        base: a tensor that is being written, if any.
        value: the old value of ``base``, which replaces it in the snapshot of ``base`` and of its views.
    """
    if not isinstance(x, ShardedTensor):
        return x
    owner, view_spec = x._base_and_view()
    if owner is base and value is not None:
        now = value
    else:
        now = tensor(owner._aval, owner._storage if type(owner._storage) is ScalarElement else current_storage(owner))
    if in_job():
        with_identity(now, owner)
    return now if owner is x else tensor(x._aval, View(now, view_spec))
