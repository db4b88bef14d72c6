"""`Flags`: what NumPy's array flags say of a tensor."""

from __future__ import annotations

import dataclasses

import numpy as np

from shardtensor.errors import ArgumentError
from shardtensor.sharding.layout import Shape


@dataclasses.dataclass(frozen=True)
class Flags:
    """The flags of a tensor, as `numpy.ndarray.flags`: those of a NumPy array with the same views.

    Attributes:
        c_contiguous, f_contiguous: whether the elements are contiguous in the base in row-major or column-major order.
        owndata: whether the tensor is not a view.
        writeable: whether it can be written; tensors that stand for scalars cannot.
        aligned, writebackifcopy: always true and false.
    """

    c_contiguous: bool
    f_contiguous: bool
    owndata: bool
    writeable: bool
    aligned: bool = True
    writebackifcopy: bool = False

    @property
    def contiguous(self) -> bool:
        """NumPy's other name of ``c_contiguous``."""
        return self.c_contiguous

    @property
    def forc(self) -> bool:
        """Whether the elements are contiguous in either order."""
        return self.c_contiguous or self.f_contiguous

    @property
    def fnc(self) -> bool:
        """Whether the elements are contiguous in column-major order only (`numpy.isfortran`)."""
        return self.f_contiguous and not self.c_contiguous

    def __getitem__(self, name: str) -> bool:
        """Returns a flag by NumPy's name, such as ``"C_CONTIGUOUS"`` or ``"W"``.

        Raises:
            ArgumentError: there is no such flag.
        """
        fields = [field.name for field in dataclasses.fields(self)]
        for field in fields:
            if name in (field.upper(), field[0].upper()):
                return bool(getattr(self, field))
        raise ArgumentError(f"flags: {name!r} is not a flag; wanted one of {', '.join(fields).upper()}")


def flags_of(shape: Shape, strides: tuple[int, ...], owndata: bool, writeable: bool) -> Flags:
    """Returns the flags of a tensor with these strides, in bytes of elements of one byte."""
    flags = np.lib.stride_tricks.as_strided(np.empty(1, np.int8), shape, strides).flags
    return Flags(flags.c_contiguous, flags.f_contiguous, owndata, writeable)
