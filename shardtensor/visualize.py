"""What a person looks at: which device holds which part of an array, drawn as text, in a terminal's colors, or as HTML."""

from __future__ import annotations

import colorsys
import functools
import io
import itertools
import math
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from shardtensor.backend import Device
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.sharding import NamedSharding, Shape
from shardtensor.tensor import ShardedTensor

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Range: TypeAlias = tuple[int, int]


def visualize_sharding(
    x: ShardedTensor | Sequence[int],
    sharding: NamedSharding | None = None,
    *,
    file: TextIO | None = None,
    use_color: bool | None = None,
) -> None:
    """Prints which device holds which part of an array: a row of cells for one dimension, a table for two, and for
    more of them a table of the last two for each block of the others. Cells are as wide and as high as their parts are large.

    Args:
        x: a tensor, of which no element is read; or a shape, together with ``sharding``.
        sharding: where an array of that shape would lie.
        file: where to print; without it, ``sys.stdout``.
        use_color: a background color for each part, or none; without it, colors where ``file`` is a terminal that has them.

    Raises:
        ArgumentTypeError: x is neither a tensor nor a shape, or a shape comes without a sharding.
        ArgumentError: a tensor comes with a sharding, though it has its own.
        ShapeError: the shape has a negative size.
        ShardingError: the sharding's spec is longer than the shape.

    >>> st.visualize_sharding((3, 8), st.NamedSharding(st.make_mesh((2, 2), ("x", "y")), st.P("x")))
    ┌──────────────────┐
    │   NUMPY 0,1      │
    └──────────────────┘
    """
    shape, sharding = _layout("visualize_sharding", x, sharding)
    _print(_console(sys.stdout if file is None else file, use_color), shape, sharding)


def text(shape: Sequence[int], sharding: NamedSharding) -> str:
    """What `visualize_sharding` prints where there are no colors, 80 characters wide.

    Args:
        shape: the shape of an array.
        sharding: where it lies.

    Raises:
        ArgumentTypeError, ShapeError, ShardingError: as in `visualize_sharding`.

    >>> from shardtensor.visualize import text
    """
    out = io.StringIO()
    _print(_console(out, use_color=False), *_layout("text", shape, sharding))
    return out.getvalue()


def html(x: ShardedTensor) -> str:
    """A tensor as a fragment of HTML for notebooks: what it is, and a picture of where its parts lie.

    Args:
        x: a tensor. None of its elements is read; it may have been donated.

    Raises:
        ArgumentTypeError: x is something else.

    >>> from shardtensor.visualize import html
    """
    if not isinstance(x, ShardedTensor):
        raise ArgumentTypeError(
            f"html: x is of type {type(x).__name__}; wanted a ShardedTensor, which st.asarray makes of an array"
        )
    sharding = x.sharding
    facts = {
        "shape": x.shape,
        "dtype": x.dtype,
        "sharding": f"{sharding.spec} on {sharding.mesh}",
        "memory": sharding.memory_kind,
        "bytes": _bytes(x.nbytes),
        "bytes per device": _bytes(math.prod(sharding.shard_shape(x.shape)) * x.itemsize),
    }
    ...


# -- arguments ----------------------------------------------------------------------------------------------------


def _layout(who: str, x: object, sharding: object) -> tuple[Shape, NamedSharding]:
    ...
