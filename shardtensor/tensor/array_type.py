"""`typeof`: the shape, dtype and sharding of an array, in the notation of JAX's array types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardtensor.backend.registry import array_backend
from shardtensor.errors import ArgumentTypeError, type_text
from shardtensor.sharding.layout import NamedSharding, Shape
from shardtensor.sharding.spec import Chain


@dataclass(frozen=True, slots=True, repr=False)
class ArrayType:
    """The type of an array: shape, dtype and sharding. Types are equal if these are.

    Attributes:
        shape: the size of each dimension.
        dtype: the NumPy dtype of the elements.
        sharding: the sharding of a tensor; None for any other array.
    """

    shape: Shape
    dtype: np.dtype[Any]
    sharding: NamedSharding | None

    def _marks(self) -> str:
        """Returns the mesh axes along which an array is unreduced or reduced, in the order of the mesh."""
        if self.sharding is None:
            return ""
        spec, names = self.sharding.spec, self.sharding.mesh.axis_names
        marks = [(letter, [n for n in names if n in axes]) for letter, axes in (("U", spec.unreduced), ("R", spec.reduced))]
        parts = [f"{letter}:{axes[0] if len(axes) == 1 else f'({chr(44).join(axes)})'}" for letter, axes in marks if axes]
        return f"{{{', '.join(parts)}}}" if parts else ""

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __repr__(self) -> str:
        sharding = self.sharding
        chains = ((),) * self.ndim if sharding is None else sharding.spec.chains_of(self.ndim)
        sizes = ",".join([_dimension(n, chain) for n, chain in zip(self.shape, chains, strict=True)])
        memory = "" if sharding is None or sharding.memory_kind == "device" else "<host>"
        return f"{self.dtype}{memory}[{sizes}]{self._marks()}"


def _dimension(size: int, chain: Chain) -> str:
    axes = chain[0] if len(chain) == 1 else f"({','.join(chain)})"
    return f"{size}@{axes}" if chain else str(size)


def typeof(x: Any) -> ArrayType:
    """Returns the type of an array: an object with its ``shape``, ``dtype`` and ``sharding``.

    It is printed as `jax.typeof` prints it: the dtype, and the size of each dimension with the mesh axes that split it.
    A tensor that is offloaded to host memory is marked by ``<host>``, one that consists of partial sums along mesh axis
    X by ``{U:X}``. No elements are read or transferred.

    Args:
        x: a tensor, a host or backend array, a scalar, or a `ShapeDtypeStruct`. Only the first and the last have a
            sharding.

    Raises:
        ArgumentTypeError: x is none of these.

    >>> with st.set_mesh(st.make_mesh((2, 4), ("X", "Y"))):
    ...     x = st.zeros((8, 4), dtype="float32", device=st.P("X", "Y"))
    >>> st.typeof(x), st.typeof(x.sum(axis=0)), st.typeof(np.ones(3))
    (float32[8@X,4@Y], float32[4@Y], float64[3])
    """
    if isinstance(x, (bool, int, float, complex)):
        x = np.asarray(x)
    backend = None if isinstance(x, np.ndarray) else array_backend(x)
    if backend is not None:
        return ArrayType(tuple(x.shape), backend.dtype_of(x), None)
    sharding = getattr(x, "sharding", None)
    if not isinstance(x, (np.ndarray, np.generic)) and not isinstance(sharding, NamedSharding):
        raise ArgumentTypeError(f"typeof: x is {type_text(x)}; wanted a tensor, an array or a scalar")
    return ArrayType(x.shape, x.dtype, sharding)
