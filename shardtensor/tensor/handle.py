"""`Handle`: the base class of tensors, with the attributes that follow from the aval."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.sharding.layout import NamedSharding, Shape
from shardtensor.sharding.mesh import Mesh
from shardtensor.tensor.identity import Identity
from shardtensor.tensor.storage import Donated, WriteState
from shardtensor.tensor.value import Aval


class AvalAttributes:
    """The attributes that a tensor and a `ShapeDtypeStruct` read from their aval."""

    __slots__ = ()

    _aval: Aval

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
    def sharding(self) -> NamedSharding:
        """The `st.NamedSharding`, which determines the index of every device's shard."""
        return self._aval.sharding

    @property
    def committed(self) -> bool:
        """Whether the tensor was placed explicitly; other tensors are transferred to operands that were.

        A tensor created without ``device=`` is not committed.
        """
        return self._aval.committed


class Handle(AvalAttributes):
    """A handle on an immutable value: its aval, its storage, the state of its writes and, in jobs of several processes,
    its identity.
    """

    __slots__ = ("__weakref__", "_aval", "_identity", "_storage", "_write_state")

    _storage: Any  # a Storage, a DeferredStorage, or the View of another tensor
    _write_state: WriteState | None
    _identity: Identity  # See `shardtensor.tensor.identity`; not set where no other process needs it.

    @property
    def nbytes(self) -> int:
        """The bytes of the elements; replicated elements count once."""
        return self._aval.nbytes

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return self._aval.dtype.itemsize

    @property
    def device(self) -> Device | Mesh:
        """The group of devices that hold the tensor, never its layout: the mesh, or the device if there is only one."""
        mesh = self._aval.sharding.mesh
        return mesh if mesh.size > 1 else mesh.flat[0]

    def devices(self) -> set[Device]:
        """The set of devices that hold a part of the tensor."""
        return self._aval.sharding.device_set

    @property
    def is_donated(self) -> bool:
        """Whether the memory of the tensor was donated by ``donate=True``."""
        storage = self._storage
        return isinstance(getattr(storage, "base", self)._storage, Donated)

    @property
    def _is_scalar(self) -> bool:
        """Whether NumPy would return this value as an immutable scalar instead of a 0-d array.

        This holds for the 0-d results of operators and of full indices. Created tensors, transferred tensors and views
        are arrays.
        """
        return not self._aval.ndim and self._write_state is None and not hasattr(self._storage, "base")
