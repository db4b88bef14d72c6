"""`ShardedTensor`: a handle on an immutable value whose shards are on many devices.

No algorithm is defined here: the methods of a tensor call operators by name, through `call`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from shardtensor.backend.device import Device, HostArray
from shardtensor.core import OPS, bind_into, call
from shardtensor.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConcretizationError,
    ShapeError,
    ShardTensorError,
)
from shardtensor.host.fork import in_children
from shardtensor.sharding.layout import NamedSharding, Shape, Where, on_existing_devices
from shardtensor.sharding.mesh import Mesh
from shardtensor.sharding.view_spec import ViewSpec, whole_view_spec
from shardtensor.tensor.display import described, few_values, printed
from shardtensor.tensor.flat import Flat
from shardtensor.tensor.numpy_protocols import Operators, from_lists
from shardtensor.tensor.ownership import READS, export, hold, is_shared, keep_while_read, reading, storage_of
from shardtensor.tensor.pytree import LEAF_TYPES
from shardtensor.tensor.storage import Donated, NoElements, PendingWrite, Storage, WriteState
from shardtensor.tensor.value import Aval, aval


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor on one device.

    Attributes:
        device: the device that holds the part.
        index: the index of the part in the tensor: ``x[index]``.
        replica_id: 0 for the first device in mesh order that holds this part, 1 for the next, ...
        data: the elements, an array of the backend; it must not be written to.
    """

    device: Device
    index: tuple[slice, ...]
    replica_id: int
    data: Any


class ShardedTensor(Operators):
    """A NumPy-like array sharded over many devices.

    Tensors are created by `st.asarray`, `st.zeros`, `st.device_put` and similar functions, and by every operator;
    calling the class raises an error. Operators return new tensors, whose sharding follows from the operands' by the
    operator's rule. Indexing, ``T``, ``reshape`` and whatever else returns a view in NumPy return views: writing to a
    view writes to its base, and reading it sees the base's current value. Writes (``x[i] = v``, ``x += y``, ``out=x``)
    keep sharding and dtype, and are visible only through the tensor and its views.

    Tensors, meshes, shardings and devices can be pickled. A tensor is loaded onto the devices that it had, which are
    identified by backend and number. If one of them does not exist in the loading process, the tensor is loaded onto
    the default mesh (see `st.use_mesh`) instead, and a warning is logged: with its spec if the mesh has the axes that
    the spec names, otherwise split along its first dimension. A tensor of one device is loaded onto one device.

    >>> x = st.arange(6, device=st.make_mesh((3,), ("x",)))
    >>> x + 1
    ShardedTensor(shape=(6,), dtype=int64, sharding=P('x') on Mesh(x=3; numpy:0..2))
    [1 2 3 4 5 6]
    """

    __slots__ = ("__weakref__", "_aval", "_storage", "_write_state")

    _aval: Aval
    _storage: Any  # a Storage, a DeferredStorage, or the View of another tensor
    _write_state: WriteState | None

    def __init__(self) -> None:
        raise ArgumentTypeError("ShardedTensor: not made by calling the class; use st.asarray or st.device_put")

    # -- attributes --------------------------------------------------------------------------------

    @property
    def shape(self) -> Shape:
        """The size of each dimension."""
        return self._aval.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of the elements."""
        return self._aval.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._aval.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._aval.size

    @property
    def nbytes(self) -> int:
        """The bytes of the elements; replicated elements count once."""
        return self._aval.nbytes

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return self._aval.dtype.itemsize

    @property
    def sharding(self) -> NamedSharding:
        """The `st.NamedSharding`, which determines the index of every device's shard."""
        return self._aval.sharding

    @property
    def device(self) -> Device | Mesh:
        """The group of devices that hold the tensor, never its layout: the mesh, or the device if there is only one."""
        mesh = self._aval.sharding.mesh
        return mesh if mesh.size > 1 else mesh.flat[0]

    @property
    def committed(self) -> bool:
        """Whether the tensor was placed explicitly; other tensors are transferred to operands that were.

        A tensor created without ``device=`` is not committed.
        """
        return self._aval.committed

    def devices(self) -> set[Device]:
        """The set of devices that hold a part of the tensor."""
        return self._aval.sharding.device_set

    @property
    def is_donated(self) -> bool:
        """Whether the memory of the tensor was donated by ``donate=True``."""
        storage = self._storage
        return isinstance(getattr(storage, "base", self)._storage, Donated)

    @property
    def addressable_shards(self) -> list[Shard]:
        """The shards that this process holds, in mesh order: a list of `Shard`.

        >>> [s.data.tolist() for s in st.arange(5, device=st.make_mesh((2,), ("x",))).addressable_shards]
        [[0, 1, 2], [3, 4]]
        """
        backend, grid = self._aval.backend, self._aval.grid
        counts: dict[int, Iterator[int]] = defaultdict(itertools.count)
        replicas = [next(counts[number]) for number in grid.linear_parts().tolist()]
        offloaded = getattr(self._storage, "shards", None)
        with reading((self,)):
            arrays = (
                [export(self, a, k) for k, a in enumerate(shard_arrays(self))] if offloaded is None else offloaded()
            )
        for device in grid.devices:
            backend.make_caller_wait(device)
        return list(map(Shard, grid.devices, grid.indices, replicas, arrays))

    def block_until_ready(self) -> ShardedTensor:
        """Waits until the elements are computed, and returns the tensor."""
        storage = self._storage
        if hasattr(storage, "settle"):
            storage.settle()
        else:
            shard_arrays(self)  # The arrays of a view are computed when they are read.
        for device in self._aval.sharding.mesh.flat:
            self._aval.backend.synchronize(device)
        return self

    # -- transfers and conversions -----------------------------------------------------------------

    def to_device(self, device: Where, /, *, stream: None = None) -> ShardedTensor:
        """Returns the same elements on a device, on a mesh or in a sharding: see `st.device_put`."""
        if stream is not None:
            raise ArgumentError("to_device: stream must be None; each device has its own")
        return call("reshard", self, sharding=device)  # type: ignore[no-any-return]

    def reshard(self, sharding: Where) -> ShardedTensor:
        """Returns the same elements in another sharding: see `st.reshard`."""
        return call("reshard", self, sharding=sharding)  # type: ignore[no-any-return]

    def shard(self, axis: int = 0, *, devices: Sequence[Device] | None = None) -> list[ShardedTensor]:
        """Splits the tensor into a list of single-device tensors: see `st.shard`."""
        return call("shard", self, axis=axis, devices=devices)  # type: ignore[no-any-return]

    def to_batched_list(self, batch_size: int, *, leftover: str = "keep") -> list[ShardedTensor]:
        """Splits the tensor into a list of batches of rows: see `st.to_batched_list`."""
        return call("to_batched_list", self, batch_size=batch_size, leftover=leftover)  # type: ignore[no-any-return]

    def __array__(self, dtype: npt.DTypeLike | None = None, *, copy: bool | None = None) -> HostArray:
        array: HostArray = call("to_host", self)
        if dtype is None or array.dtype == np.dtype(dtype):
            return array.copy() if copy else array
        if copy is False:
            raise ShapeError(
                f"np.asarray: copy=False and dtype={np.dtype(dtype)} of a {self.dtype} tensor needs a copy"
            )
        return array.astype(dtype)

    def __array_namespace__(self, /, *, api_version: str | None = None) -> Any:
        """Returns the module `shardtensor`, the namespace of the array API standard.

        Raises:
            ArgumentError: the standard has no such version, or this package does not implement it.
        """
        if api_version not in (None, *API_VERSIONS):
            raise ArgumentError(f"__array_namespace__: api_version={api_version!r}; wanted {', '.join(API_VERSIONS)}")
        return importlib.import_module(__name__.partition(".")[0])

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        return call("to_dlpack", self, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return call("dlpack_device", self)  # type: ignore[no-any-return]

    def tobytes(self, order: str = "C") -> bytes:
        """Returns the bytes of the elements, in row-major order or, for ``order="F"``, in column-major order."""
        return np.asarray(self).tobytes("F" if self._is_column_major(order, "tobytes") else "C")

    def to_numpy(self) -> HostArray:
        """Returns the whole tensor as a host array: `numpy.asarray` as a method, which matplotlib calls."""
        return np.asarray(self)

    def tolist(self) -> Any:
        """Returns the elements as nested Python lists; of a 0-d tensor, a Python scalar."""
        return np.asarray(self).tolist()

    def item(self) -> Any:
        """Returns the only element as a Python scalar.

        Raises:
            ShapeError: the tensor does not have exactly one element.
        """
        return self._only_element("item").item()

    def __bool__(self) -> bool:
        hint = " (x.any() and x.all() are true or false)"
        return bool(self._only_element("bool", hint).reshape(())[()])

    def _only_element(self, caller: str, hint: str = "") -> HostArray:
        if self.size != 1:
            raise ShapeError(
                f"{caller}: the tensor has {self.size} elements, shape {self.shape}; wanted exactly one{hint}"
            )
        return np.asarray(self)

    def __int__(self) -> int:
        return int(self._scalar("int"))

    def __float__(self) -> float:
        return float(self._scalar("float"))

    def __complex__(self) -> complex:
        return complex(self._scalar("complex"))

    @overload
    def __round__(self) -> int: ...

    @overload
    def __round__(self, ndigits: int) -> float: ...

    def __round__(self, ndigits: int | None = None) -> float:
        number: float = round(self._scalar("round").item(), ndigits)
        return number

    def __trunc__(self) -> int:
        number: int = math.trunc(self._scalar("trunc").item())
        return number

    def __floor__(self) -> int:
        number: int = math.floor(self._scalar("floor").item())
        return number

    def __ceil__(self) -> int:
        number: int = math.ceil(self._scalar("ceil").item())
        return number

    def __index__(self) -> int:
        if self.ndim or self.dtype.kind not in "iu":
            given = f"a tensor of shape {self.shape} and dtype {self.dtype}"
            raise ArgumentTypeError(f"index: {given} is no index; wanted an integer one without dimensions")
        return int(self._scalar("index"))

    def _scalar(self, caller: str) -> Any:
        """Returns the element of a 0-d tensor. Other tensors raise an error, as in NumPy and the array API standard."""
        if self.ndim:
            raise ArgumentTypeError(
                f"{caller}: the tensor has shape {self.shape}; wanted one without dimensions (x.item() converts the "
                "only element of any shape)"
            )
        return np.asarray(self)[()]

    # -- elements and views ------------------------------------------------------------------------

    def __len__(self) -> int:
        if not self.ndim:
            raise ArgumentTypeError("len: the tensor has no dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[ShardedTensor]:
        if not self.ndim:
            raise ArgumentTypeError("iter: the tensor has no dimensions")
        return (self[i] for i in range(self.shape[0]))

    def __getitem__(self, index: Any) -> ShardedTensor:
        return call("getitem", self, index)  # type: ignore[no-any-return]

    def __setitem__(self, index: Any, value: Any) -> None:
        bind_into(self, OPS["setitem"], (self, value, index), ())

    @property
    def real(self) -> ShardedTensor:
        """The real part, as a view."""
        return call("real", self)  # type: ignore[no-any-return]

    @real.setter
    def real(self, value: Any) -> None:
        (self if self.dtype.kind != "c" or self._is_scalar else self.real)[...] = value

    @property
    def imag(self) -> ShardedTensor:
        """The imaginary part; a view if the dtype is complex."""
        return call("imag", self)  # type: ignore[no-any-return]

    @imag.setter
    def imag(self, value: Any) -> None:
        if self.dtype.kind != "c":
            raise ArgumentTypeError(f"imag: a tensor of {self.dtype} has no imaginary part to write to")
        (self if self._is_scalar else self.imag)[...] = value

    def fill(self, value: Any) -> None:
        """Writes a scalar to every element."""
        self[...] = value

    @property
    def T(self) -> ShardedTensor:  # noqa: N802 - the standard's name
        """The transpose, with all dimensions in reverse order, as a view."""
        return call("permute_dims", self, tuple(range(self.ndim))[::-1])  # type: ignore[no-any-return]

    @property
    def mT(self) -> ShardedTensor:  # noqa: N802 - the standard's name
        """The transpose of the last two dimensions, as a view."""
        return call("matrix_transpose", self)  # type: ignore[no-any-return]

    def transpose(self, *axes: Any) -> ShardedTensor:
        """Returns a view with the dimensions in the order ``axes``; in reverse order if none are given."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], SupportsIndex) else axes
        return self.T if order is None or not len(order) else call("permute_dims", self, tuple(order))

    def swapaxes(self, axis1: int, axis2: int, /) -> ShardedTensor:
        """Returns a view with two dimensions exchanged: see `st.swapaxes`."""
        return call("swapaxes", self, axis1, axis2)  # type: ignore[no-any-return]

    def ravel(self, order: str = "C") -> ShardedTensor:
        """Returns the elements in one dimension: a view if they are contiguous in that order, otherwise a copy. See
        `st.ravel`.
        """
        x = self.T if self._is_column_major(order, "ravel") else self
        flat = call("reshape", x, shape=(-1,))
        view_spec = getattr(flat._storage, "view_spec", None)
        straight = view_spec is None or flat.size == 1 or (view_spec.strides == (1,) and not view_spec.part)
        return flat if straight else x.flatten()

    def flatten(self, order: str = "C") -> ShardedTensor:
        """Returns a copy of the elements in one dimension, in row-major order or, for ``order="F"``, column-major."""
        x = self.T if self._is_column_major(order, "flatten") else self
        return call("reshape", x, shape=(-1,), copy=True)  # type: ignore[no-any-return]

    @staticmethod
    def _is_column_major(order: str, caller: str) -> bool:
        """Whether an ``order=`` argument means column-major order.

        Raises:
            ArgumentError: it is none of NumPy's orders.
        """
        if order not in ("C", "F", "A", "K"):
            raise ArgumentError(f"{caller}: order is {order!r}; wanted 'C', 'F', 'A' or 'K'")
        return order == "F"

    @property
    def flat(self) -> Flat:
        """The elements in row-major order, to iterate over and to index; ``x.flat[i] = v`` writes to the tensor."""
        return Flat(self)

    @flat.setter
    def flat(self, value: Any) -> None:
        given = from_lists(value, "flat") if isinstance(value, (list, tuple)) else value
        self[...] = call("resize", given, self.shape)

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> ShardedTensor:
        """Returns the elements in another shape, read and placed in row-major order, or in column-major order for
        ``order="F"``: see `st.reshape`.
        """
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], SupportsIndex) else shape
        if self._is_column_major(order, "reshape"):
            return call("reshape", self.T, shape=tuple(sizes)[::-1], copy=copy).T  # type: ignore[no-any-return]
        return call("reshape", self, shape=sizes, copy=copy)  # type: ignore[no-any-return]

    def astype(self, dtype: npt.DTypeLike, order: str = "K", *, copy: bool = True) -> ShardedTensor:
        """Returns the elements in another dtype: see `st.astype`. ``order``, the layout in memory, has no effect."""
        self._is_column_major(order, "astype")
        return call("astype", self, dtype, copy=copy)  # type: ignore[no-any-return]

    # -- copies ------------------------------------------------------------------------------------

    def copy(self, order: str = "C") -> ShardedTensor:
        """Returns an independent tensor with the same value; memory is copied only when one of the two is written.

        ``order``, the layout in memory, has no effect.

        The copy of a value that NumPy would return as a scalar, such as the sum of all elements, cannot be written
        either.
        """
        self._is_column_major(order, "copy")
        return call("copy", self)  # type: ignore[no-any-return]

    def __copy__(self) -> ShardedTensor:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        scalar = self._is_scalar
        return _unpickle, (np.ascontiguousarray(self), self.shape, self.sharding, self.committed, scalar)

    # -- writes ------------------------------------------------------------------------------------

    def _base_and_view(self) -> tuple[ShardedTensor, ViewSpec]:
        """Returns the base, which is the tensor itself if it is not a view, and the view spec of the tensor on it."""
        storage = self._storage
        if type(storage) is not Storage:
            if hasattr(storage, "view_spec"):
                return storage.base, storage.view_spec
            if type(storage) is Donated:
                storage.stored()
        return self, _view_spec_of(self._aval)

    def _bind(
        self,
        compute: Callable[[], Any],
        put: Callable[[tuple[Any, Any], tuple[ViewSpec]], ShardedTensor],
    ) -> None:
        """Binds the base to the tensor ``put((base, compute()), (view_spec,))``, which has the base's aval. If another
        thread has written the base in the meantime, both are called again: no lock is held while they run.

        Raises:
            ArgumentTypeError: the tensor is one element of another one.
            ConcretizationError: only the new value has no elements.
        """
        self._make_writable()
        base, view_spec = self._base_and_view()
        write_state = write_state_of(base)
        while True:
            with write_state.lock:
                version = write_state.version
            new = put((base, compute()), (view_spec,))
            if lacks_elements(new) and not lacks_elements(base):
                raise ConcretizationError(
                    "a tensor that the function closes over is written, and its new elements are not known; give it as "
                    "an argument"
                )
            with write_state.lock:
                if write_state.version == version:
                    write_state.forget()
                    write_state.version += 1
                    if READS and (storage := storage_of(base)):
                        keep_while_read(base, storage)
                    base._storage = new._storage
                    return

    def _make_writable(self) -> None:
        """Makes a scalar that an operator computed an array before it is written, as the array API standard has it.

        Its storage may be shared with copies of the scalar, which no write is recorded for, so it gets its own.

        Raises:
            ArgumentTypeError: the tensor is an element of another one, which the write would not reach.
        """
        if not self._is_scalar:
            return
        if hasattr(self._storage, "origin"):
            raise ArgumentTypeError(
                "one element of a tensor is a scalar, which cannot be written; x[index] = value writes the element, "
                "x[index, ...] is a view of it, and st.asarray(x[index], copy=True) is an array"
            )
        self._storage = call("asarray", self, copy=True)._storage
        mark_array(self)

    # -- display -----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return described(self)

    def __str__(self) -> str:
        return printed(self)

    def _repr_html_(self) -> str:
        from shardtensor.sharding.html import tensor_html

        return tensor_html(self, few_values(self))


LEAF_TYPES.add(ShardedTensor)

ArrayLike: TypeAlias = ShardedTensor | HostArray | np.generic | bool | int | float | complex
"""The operands that operators accept.

These are tensors; host arrays and NumPy scalars, which are put into the layout that the operator's rule requires;
Python scalars, which stay scalars and do not promote a dtype; and arrays of a backend.
"""

API_VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", "2025.12")
"""The versions of the array API standard that the package implements; the last one contains the others."""

SCALARS = frozenset((bool, int, float, complex))


def tensor(value: Aval, storage: Any) -> ShardedTensor:
    """Creates a handle on a value, from its aval and its storage."""
    x = _new(ShardedTensor)
    x._aval = value
    x._storage = storage
    x._write_state = None
    return x


def without_elements(value: Aval) -> ShardedTensor:
    """Returns a tensor of which only the aval is known."""
    return tensor(value, NoElements(_SIMULATED if value.backend.simulated else _INFERRED))


_SIMULATED = "simulated tensors have no elements; pass such values as Python scalars or host arrays"
_INFERRED = "eval_shape knows only its shape, dtype and sharding; compute it outside of the function"


def lacks_elements(x: Any) -> bool:
    """Whether an operand is a tensor of which only the aval is known, or a view of one."""
    if type(x) is not ShardedTensor:
        return False
    storage = getattr(x._storage, "base", x)._storage
    return type(storage) is NoElements or getattr(storage, "parts", None) == ()


def write_state_of(x: ShardedTensor) -> WriteState:
    """Returns the `WriteState` of a tensor, which is created on first use."""
    if x._write_state is None:
        with _making_write_states:
            x._write_state = x._write_state or WriteState()
    return x._write_state


_making_write_states = threading.Lock()


@in_children
def _unlock() -> None:
    global _making_write_states
    _making_write_states = threading.Lock()


def mark_array(x: ShardedTensor) -> ShardedTensor:
    """Marks a 0-d tensor as an array, not one of NumPy's scalars, and returns it; other tensors are unchanged."""
    if not x._aval.ndim:
        write_state_of(x)
    return x


def mark_donated(x: ShardedTensor, caller: str) -> None:
    """Replaces the storage of a tensor by `Donated`, for ``donate=True`` of the function ``caller``."""
    write_state = write_state_of(x)
    with write_state.lock:
        write_state.forget()
        write_state.version += 1
        storage = storage_of(x)
        shared = storage is None or storage is not x._storage or is_shared(storage)  # A view leaves its base as it is.
        x._storage = Donated(caller, not shared)
        if shared:  # Operators in other threads may still read the memory.
            hold(storage)


def check_not_donated(*operands: Any) -> None:
    """Raises DonatedError if the memory of a tensor among the operands was donated."""
    for x in operands:
        if type(x) is ShardedTensor and x.is_donated:
            shard_arrays(x)  # This raises the DonatedError.


@functools.lru_cache(8192)
def _view_spec_of(value: Aval) -> ViewSpec:
    return whole_view_spec(value.shape, value.sharding.spec.chains_of(value.ndim))


_new: Callable[[type[ShardedTensor]], ShardedTensor] = object.__new__


def shard_arrays(x: ShardedTensor) -> tuple[Any, ...]:
    """Returns the backend's array of each device, in mesh order."""
    storage = x._storage
    arrays = storage.arrays
    if arrays is not None:
        return arrays  # type: ignore[no-any-return]
    whole, grid = storage.array, x._aval.grid
    if not x.ndim or len(grid.devices) == 1:
        return (whole,) * len(grid.devices)
    return tuple([whole[index] for index in grid.indices])


def current_storage(x: ShardedTensor) -> Any:
    """Returns the storage of a tensor, after writes in progress have ended.

    Raises:
        DonatedError: the tensor was donated.
    """
    storage = x._storage
    return storage.stored() if type(storage) in (PendingWrite, Donated) else storage


def _unpickle(
    data: HostArray, shape: Shape, sharding: NamedSharding, committed: bool, scalar: bool = False
) -> ShardedTensor:
    """Creates a tensor from what `__reduce__` returns; pickles of earlier versions lack ``scalar``.

    The tensor is not committed if it is loaded onto other devices than it had, because no caller chose those.
    """
    target = on_existing_devices(sharding, len(shape))
    try:
        x = call("reshard", data.reshape(shape), sharding=target)
    except ShardTensorError as error:
        raise type(error)(
            f"unpickle: a tensor that was pickled on {sharding.mesh!r} does not load on {target.mesh!r}: {error}. "
            "Load it within `with st.use_mesh(mesh):`, with a mesh of another backend"
        ) from None
    made = tensor(aval(x.shape, x.dtype, target, committed and target == sharding), x._storage)
    return made if scalar else mark_array(made)
