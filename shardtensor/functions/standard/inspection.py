"""The inspection functions (a chapter of the array API standard): what the namespace offers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.registry import backend_of, devices
from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor.sharding.layout import NamedSharding, as_sharding
from shardtensor.sharding.mesh import Mesh, default_mesh
from shardtensor.tensor.tensor import API_VERSIONS

__array_api_version__ = API_VERSIONS[-1]
"""The version of the array API standard."""

_Group = Device | Mesh | NamedSharding | None


class NamespaceInfo:
    """The properties of the namespace: its devices, its dtypes and its capabilities; see `__array_namespace_info__`."""

    __slots__ = ()

    def capabilities(self) -> dict[str, Any]:
        """Returns the optional capabilities of the standard by name.

        >>> st.__array_namespace_info__().capabilities()["boolean indexing"]
        True
        """
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> Device | Mesh:
        """Returns the devices of tensors that are created without ``device=``: the default mesh, or its only device.

        >>> st.__array_namespace_info__().default_device() == st.zeros(3).device
        True
        """
        mesh = default_mesh()
        return mesh if mesh.size > 1 else mesh.flat[0]

    def devices(self) -> tuple[Device | Mesh, ...]:
        """Returns the default device and each device of the default backend.

        A creation function also accepts any other mesh, and the devices of other backends.
        """
        return tuple(dict.fromkeys((self.default_device(), *devices())))

    def default_dtypes(self, *, device: _Group = None) -> dict[str, np.dtype[Any]]:
        """Returns the default dtype of each kind. It is the same on all devices."""
        _first(device)
        kinds = {"real floating": "float64", "complex floating": "complex128", "integral": "int64", "indexing": "int64"}
        return {kind: np.dtype(name) for kind, name in kinds.items()}

    def dtypes(self, *, device: _Group = None, kind: str | tuple[str, ...] | None = None) -> dict[str, np.dtype[Any]]:
        """Returns the standard's dtypes that arrays on a device can have, by name.

        Args:
            device: a Device, Mesh or NamedSharding; the default mesh by default.
            kind: one of the kinds of `st.isdtype`, or a tuple of them; all kinds by default.

        Raises:
            ArgumentError: there is no such kind.
            ArgumentTypeError: ``device`` is not a device, or ``kind`` is not text.
        """
        backend = backend_of(_first(device))
        known = {name: np.dtype(name) for name in _NAMES if backend.has_dtype(np.dtype(name))}
        if kind is None:
            return known
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not all(isinstance(k, str) for k in kinds):
            raise ArgumentTypeError(f"dtypes: kind is {kind!r}; wanted text or a tuple of texts")
        try:
            return {name: dtype for name, dtype in known.items() if np.isdtype(dtype, kinds)}
        except ValueError as error:
            raise ArgumentError(f"dtypes: {error}") from None


_NAMES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64", "complex64",
    "complex128",
)  # fmt: skip


def _first(device: _Group) -> Device:
    """Returns the first device of a ``device=`` argument."""
    where = default_mesh() if device is None else device
    return as_sharding(where, 1, "__array_namespace_info__").mesh.flat[0]


@functools.cache
def __array_namespace_info__() -> NamespaceInfo:  # noqa: N807 - the standard's name
    """Returns an object that describes the namespace: its devices, dtypes and capabilities.

    >>> st.__array_namespace_info__().dtypes(kind="complex floating")
    {'complex64': dtype('complex64'), 'complex128': dtype('complex128')}
    """
    return NamespaceInfo()
