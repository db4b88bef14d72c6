"""`typeof`: the shape, dtype and sharding of an array, in the notation of JAX's array types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardtensor.backend.registry import array_backend
from shardtensor.core import ABOVE
from shardtensor.errors import ArgumentTypeError, type_text
from shardtensor.sharding.layout import NamedSharding, Shape
from shardtensor.sharding.spec import Chain, P


@dataclass(frozen=True, slots=True)
class ManualAxisType:
    """How the arrays that the calls of a mapped function hold are related, along the axes of the map.

    Attributes:
        varying: the axes along which they may differ.
        unreduced: the axes along which they are partial sums, of which the value is the sum.
        reduced: the axes along which they are equal, and their gradients are partial sums.
        order: the axes of the map, in the order in which types are printed.
    """

    varying: frozenset[str] = frozenset()
    unreduced: frozenset[str] = frozenset()
    reduced: frozenset[str] = frozenset()
    order: Chain = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class ArrayType:
    """The type of an array: shape, dtype, sharding and, in a mapped function, what is known of the arrays of other
    calls. Types are equal if these are.

    Attributes:
        shape: the size of each dimension.
        dtype: the NumPy dtype of the elements.
        sharding: the sharding of a tensor; None for any other array.
        manual_axis_type: the `ManualAxisType`; empty outside of mapped functions.
    """

    shape: Shape
    dtype: np.dtype[Any]
    sharding: NamedSharding | None
    manual_axis_type: ManualAxisType = ManualAxisType()

    def _marks(self) -> str:
        """Returns the axes along which arrays vary, are unreduced or are reduced, as JAX prints them."""
        manual, spec = self.manual_axis_type, P() if self.sharding is None else self.sharding.spec
        names = dict.fromkeys([*manual.order, *(self.sharding.mesh.axis_names if self.sharding else ())])
        marks = []
        for letter, axes in (
            ("V", manual.varying),
            ("U", manual.unreduced | spec.unreduced),
            ("R", manual.reduced | spec.reduced),
        ):
            found = [name for name in names if name in axes]
            if found:
                marks.append(f"{letter}:{found[0] if len(found) == 1 else '(' + ','.join(found) + ')'}")
        return f"{{{', '.join(marks)}}}" if marks else ""

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
    X by ``{U:X}``, and one whose gradient does by ``{R:X}``. No elements are read or transferred.

    In a mapped function, ``manual_axis_type`` has the axes of the map along which the arrays of the calls may differ
    (``{V:x}``), are partial sums (``{U:x}``), or are equal and have unreduced gradients (``{R:x}``). It is known of the
    arguments, and of the results of the collectives that reduce, of `pbroadcast` and of `pcast`. Any other array may
    differ along all axes: a function of NumPy on an array that is equal everywhere returns one of which that is not
    known. Numbers of Python have no marks.

    Args:
        x: a tensor, a host or backend array, a scalar, or a `ShapeDtypeStruct`. Only the first and the last have a
            sharding.

    Raises:
        ArgumentTypeError: x is none of these.

    >>> with st.set_mesh(st.make_mesh((2, 4), ("X", "Y"))):
    ...     x = st.zeros((8, 4), dtype="float32", device=st.P("X", "Y"))
    >>> st.typeof(x), st.typeof(x.sum(axis=0)), st.typeof(np.ones(3))
    (float32[8@X,4@Y], float32[4@Y], float64[3])
    >>> types = {}
    >>> @st.shard_map(mesh=x.sharding.mesh, out_specs=st.P("X"))
    ... def total(block):
    ...     y = st.psum(block, "Y")
    ...     types["block"], types["total"] = st.typeof(block), st.typeof(y)
    ...     return y
    >>> y = total(x)
    >>> types
    {'block': float32[4,1]{V:(X,Y)}, 'total': float32[4,1]{V:X}}
    """
    manual: ManualAxisType = ABOVE["manual_axis_type"](x)
    if isinstance(x, (bool, int, float, complex)):
        x = np.asarray(x)
    backend = None if isinstance(x, np.ndarray) else array_backend(x)
    if backend is not None:
        return ArrayType(tuple(x.shape), backend.dtype_of(x), None, manual)
    sharding = getattr(x, "sharding", None)
    if not isinstance(x, (np.ndarray, np.generic)) and not isinstance(sharding, NamedSharding):
        raise ArgumentTypeError(f"typeof: x is {type_text(x)}; wanted a tensor, an array or a scalar")
    return ArrayType(x.shape, x.dtype, sharding, manual)
