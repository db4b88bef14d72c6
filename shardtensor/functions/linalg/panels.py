"""Panels: columns of matrices that one device holds, factorized there and sent to the devices with columns behind them.

The matrices are split by columns. Kernels of `shardtensor.functions.linalg.blocked_factorizations` and `blocked_qr` use
these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardtensor.functions.algorithms.shards import MeshCommunicator
from shardtensor.functions.linalg.tsqr import is_factorized, splits_matrices
from shardtensor.sharding.layout import NamedSharding, Shape
from shardtensor.sharding.spec import P
from shardtensor.tensor.value import Aval

Along = Callable[[int], MeshCommunicator]

GATHERED = 1 << 10
"""Rows up to which matrices are gathered: LAPACK takes less time than the messages, and 16 MiB of memory."""

PANEL = 128
"""Columns of a panel, whose update is a product of matrices that takes far more time than to send the panel."""

SCRATCH = 1 << 24
"""Bytes of the columns that are updated together."""


def is_large(x: Any) -> bool:
    """Whether x is a tensor of matrices with more than 1,024² elements that are split, and no other dimension can take
    the split.
    """
    return is_factorized(x) and math.prod(x.shape[-2:]) > GATHERED**2 and splits_matrices(x)


class Panel(NamedTuple):
    """Columns that one device holds.

    Attributes:
        begin, end: the numbers of the columns.
        owner: the position of the device along the mesh axes that split the columns.
        first: the number of the first column of the device.
    """

    begin: int
    end: int
    owner: int
    first: int

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.end - self.begin

    @property
    def local(self) -> slice:
        """The columns in the array of the device."""
        return slice(self.begin - self.first, self.end - self.first)


def panels(value: Aval) -> list[Panel]:
    """Returns the panels of matrices that are split by columns.

    >>> from shardtensor.functions.linalg.panels import panels
    >>> x = st.zeros((300, 300), device=st.NamedSharding(st.make_mesh((2,), ("x",)), st.P(None, "x")))
    >>> [(p.begin, p.end, p.owner) for p in panels(x._aval)]
    [(0, 128, 0), (128, 150, 0), (150, 278, 1), (278, 300, 1)]
    """
    bounds = itertools.pairwise(value.grid.offsets[-1].tolist())
    return [
        Panel(begin, min(begin + PANEL, last), owner, first)
        for owner, (first, last) in enumerate(bounds)
        for begin in range(first, last, PANEL)
    ]


def by_columns(x: Aval, **params: Any) -> list[NamedSharding]:
    """Returns the sharding that splits the columns by all mesh axes that split the matrices."""
    *stack, rows, columns = x.sharding.spec.chains_of(x.ndim)
    return [x.sharding.with_spec(P(*stack, (), (*columns, *rows)))]


def chunks(x: Any, first: int) -> Iterator[slice]:
    """Yields the columns of an array from the first one on, as many together as the scratch memory takes."""
    step = max(SCRATCH * x.shape[-1] // max(math.prod(x.shape) * 16, 1), 1)
    for start in range(min(max(first, 0), x.shape[-1]), x.shape[-1] if math.prod(x.shape) else 0, step):
        yield slice(start, min(start + step, x.shape[-1]))


# -- arguments of kernels for each device, and shapes of what they return --------------------------


def owns(comm: MeshCommunicator, panel: Panel) -> list[bool]:
    """Returns for each device whether it holds the panel."""
    return [k == panel.owner for k in comm.index]


def begins(value: Aval) -> list[int]:
    """Returns the number of the first column of each device."""
    grid = value.grid
    return [int(grid.offsets[-1][k]) for k in grid.parts[:, -1].tolist()]


def same(shape: Shape) -> Shape:
    """Returns the shape."""
    return shape


def rows_of(rows: int, columns: int) -> Callable[[Shape], Shape]:
    """Returns a function that replaces the last two sizes."""
    return lambda shape: (*shape[:-2], rows, columns)
