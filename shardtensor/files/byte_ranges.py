"""The bytes that a box has in a file which holds an array in row-major order, as they are written and read.

A box is one run of contiguous bytes for each of its rows; where it has whole rows, these are one run together.
"""

from __future__ import annotations

import errno
import math
import os

import numpy as np

from shardtensor.files.atomic import naming
from shardtensor.files.checksums import bytes_of
from shardtensor.files.chunk_grids import Box, Shape, size_of, slabs, slices
from shardtensor.files.paths import read_into
from shardtensor.host.summation_order import HostArray

_PAGE = 1 << 12
"""The distance of runs below which the system reads the bytes between them, too."""

_SPAN = 1 << 22
"""The bytes that are read at once where those between runs are read, too."""

_SLAB = 1 << 20
"""The bytes of a part of an array that is read by way of other memory."""


def contiguous_from(shape: Shape, box: Box) -> int:
    """Returns the dimension from which on the elements of a box are contiguous in an array of that shape."""
    first = len(shape)
    while first and box[first - 1] == (0, shape[first - 1]):
        first -= 1
    return max(first - 1, 0)


def runs(shape: Shape, itemsize: int, box: Box) -> tuple[HostArray, int]:
    """Returns the offsets of the runs of a box in an array of that shape, in order, and the bytes of each run."""
    split = contiguous_from(shape, box)
    strides = [math.prod(shape[d + 1 :]) * itemsize for d in range(len(shape))]
    offsets = np.zeros(1, np.int64)
    for (begin, end), stride in zip(box[:split], strides, strict=False):
        offsets = np.add.outer(offsets, np.arange(begin, end) * stride).reshape(-1)
    if box:
        offsets += box[split][0] * strides[split]
    return offsets, size_of(box[split:]) * itemsize


def write_box(descriptor: int, path: str, start: int, shape: Shape, box: Box, elements: HostArray) -> None:
    """Writes the elements of a box.

    Args:
        descriptor: an open file.
        path: its name, for errors.
        start: the offset in the file at which the array begins.
        shape: the shape of the array.
        box: the box.
        elements: its elements.

    Raises:
        OSError: they cannot be written; the error has the name.
    """
    offsets, nbytes = runs(shape, elements.dtype.itemsize, box)
    content = bytes_of(np.ascontiguousarray(elements)).data
    with naming(path):
        for n, offset in enumerate(offsets.tolist()):
            done = 0
            while done < nbytes:
                part = content[n * nbytes + done : (n + 1) * nbytes]
                count = os.pwrite(descriptor, part, start + offset + done)
                if count <= 0:  # POSIX gives no reason for it.
                    raise OSError(errno.EIO, "no bytes could be written")
                done += count


def read_box(descriptor: int, path: str, start: int, shape: Shape, box: Box, out: HostArray) -> None:
    """Reads the elements of a box into an array of its shape: of the file only the bytes of its runs, and those between
    runs where they are in the same page.

    Raises:
        ArgumentError: the file ends before.
        OSError: it cannot be read; the error has the name.
    """
    if out.flags.c_contiguous and not contiguous_from(shape, box):
        offsets, _ = runs(shape, out.dtype.itemsize, box)
        read_into(descriptor, bytes_of(out), start + int(offsets[0]), path)
        return
    for part in slabs(box, out.dtype.itemsize, _SLAB) if out.size else ():
        target: HostArray = out[slices(part, box)]
        memory = target if target.flags.c_contiguous else np.empty(target.shape, target.dtype)
        read_runs(descriptor, path, start, *runs(shape, out.dtype.itemsize, part), bytes_of(memory))
        if memory is not target:
            target[...] = memory


def read_runs(descriptor: int, path: str, start: int, offsets: HostArray, nbytes: int, memory: HostArray) -> None:
    """Reads runs of bytes, and those between runs where they are in the same page.

    Args:
        descriptor: an open file.
        path: its name, for errors.
        start: the offset in the file from which those of the runs count.
        offsets: where the runs begin, in order.
        nbytes: the bytes of each run.
        memory: the array of bytes into which they are read, one after the other.

    Raises:
        ArgumentError: the file ends before.
        OSError: it cannot be read; the error has the name.
    """
    rows = memory.reshape(len(offsets), nbytes)
    if len(offsets) < 2 or offsets[-1] - offsets[0] >= _PAGE * (len(offsets) - 1):
        for row, offset in zip(rows, offsets.tolist(), strict=True):
            read_into(descriptor, row, start + offset, path)
        return
    begin = 0
    while begin < len(offsets):
        end = int(np.searchsorted(offsets, offsets[begin] + _SPAN))
        first = int(offsets[begin])
        span = np.empty(int(offsets[end - 1]) + nbytes - first, np.uint8)
        read_into(descriptor, span, start + first, path)
        windows = np.lib.stride_tricks.sliding_window_view(span, nbytes)
        rows[begin:end] = windows[offsets[begin:end] - first]
        begin = end
