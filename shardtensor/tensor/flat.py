"""`Flat`: the elements of a tensor in row-major order, for ``x.flat``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shardtensor.errors import IndexingError


class Flat:
    """The elements of a tensor in row-major order, as `numpy.flatiter`: to iterate over, to read by an index, and to
    assign to, which writes to the tensor.

    Args:
        x: the tensor.
    """

    __slots__ = ("_x",)

    def __init__(self, x: Any) -> None:
        self._x = x

    def __len__(self) -> int:
        return int(self._x.size)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._x.ravel())

    def __getitem__(self, index: Any) -> Any:
        elements = self._x.ravel()[index]
        return elements.copy() if elements.ndim else elements

    def __setitem__(self, index: Any, value: Any) -> None:
        places = range(len(self))
        try:
            if isinstance(index, slice):
                chosen = places[index]
                positions = np.arange(chosen.start, chosen.stop, chosen.step)
            elif isinstance(index, (int, np.integer)):
                positions = np.asarray(places[index])
            else:
                positions = np.arange(len(self))[index]
        except IndexError as error:
            raise IndexingError(f"flat: {error}") from None
        if positions.ndim:
            self._x.put(positions, value)  # NumPy repeats the values here, too.
        else:
            self._x[np.unravel_index(positions, self._x.shape)] = value

    def copy(self) -> Any:
        """Returns the elements as a 1-d tensor."""
        return self._x.flatten()

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> Any:
        return self._x.ravel().__array__(dtype, copy=copy)
