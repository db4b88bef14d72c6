"""Drawing random numbers for the elements of a shard, each from the bits of its global index.

Element i of an array, in row-major order, gets its number from blocks of Philox4x64-10 (see `shardtensor.host.philox`)
under the caller's key, whose counters have these words:

* i // n, 0, 0, 0 where the numbers of n successive elements are made of one block (`Elements.packed`);
* i, k, 0, 0 with k > 0 where an element has a block of its own for attempt k of a rejection method
  (`Elements.accepted`).

The numbers therefore do not depend on the mesh, the layout, the backend or the number of threads and processes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.registry import array_backend
from shardtensor.errors import BackendError
from shardtensor.functions.random.random_kernel import fill_blocks, makes, write_numbers
from shardtensor.host import memory_pool, philox
from shardtensor.host.threads import each
from shardtensor.sharding.shard_context import ShardContext

_HOST_PIECE = 12 << 10
"""Elements that a thread of the host draws at once, a multiple of those of a block. Temporary arrays then stay in a
core's cache, and below the 128 KiB from which the C library may ask the system for memory each time.
"""

_PIECE = 1 << 22
"""Elements that a device draws at once, which bounds the memory of temporary arrays."""

Sample = Callable[..., Any]
"""``sample(elements, *parameters)`` returns the numbers of some elements as a flat array. The parameters are flat
arrays of float64, with one element for each."""


class Elements:
    """Elements whose numbers are drawn at once: runs of successive elements, all of the same length.

    Attributes:
        xp: the namespace of the backend.
        key: the key.
        starts: the index of the first element of each run, in an array of int64; or of the only run, as an integer.
        length: the number of elements of each run.
    """

    __slots__ = ("key", "length", "starts", "xp")

    def __init__(self, xp: Any, key: int, starts: Any, length: int) -> None:
        self.xp = xp
        self.key = key
        self.starts = starts
        self.length = length

    @property
    def indices(self) -> Any:
        """The index of each element, as a flat array of int64."""
        if isinstance(self.starts, int):
            return self.xp.arange(self.starts, self.starts + self.length, dtype=np.int64)
        return self._grid(self.starts, self.length)

    def packed(self, count: int, transform: Callable[[Any, Any], Any]) -> Any:
        """Returns the numbers of all elements, where one block gives those of ``count`` successive elements.

        Args:
            count: the number of elements of a block, a power of two.
            transform: ``transform(xp, words)`` returns ``count`` numbers for every four words of a flat array of int64.
        """
        if isinstance(self.starts, int):
            first, skip = divmod(self.starts, count)
            blocks = (skip + self.length + count - 1) // count
            return transform(self.xp, self._words(first, blocks))[skip : skip + self.length]
        blocks = (self.length + count - 2) // count + 1  # as many as the most that a run touches
        firsts = self.starts >> (count.bit_length() - 1)
        numbers = transform(self.xp, self._words(self._grid(firsts, blocks), self.starts.shape[0] * blocks))
        rows = self.xp.arange(self.starts.shape[0], dtype=np.int64) * (blocks * count)
        return numbers[self._grid(rows + (self.starts & (count - 1)), self.length)]

    def accepted(
        self, propose: Callable[..., tuple[Any, Any]], *parameters: Any, proposed: tuple[Any, Any] | None = None
    ) -> Any:
        """Returns the number of each element by a rejection method: the first of its proposals that is accepted.

        Args:
            propose: ``propose(xp, words, *parameters)`` returns the proposals, and whether they are accepted. ``words``
                are four arrays of int64, the words of the block of each element.
            *parameters: flat arrays.
            proposed: the first proposals, if they are made of other words.
        """
        values, accepted = proposed or propose(self.xp, self._blocks(1), *parameters)
        left = self._places(~accepted)
        for attempt in range(2, _ATTEMPTS):
            if not left.shape[0]:
                return values
            words = self._blocks(attempt, left)
            values[left], accepted = propose(self.xp, words, *[p[left] for p in parameters])
            left = left[self._places(~accepted)]
        raise BackendError("nonzero() of the backend's namespace does not wait for the elements of its operand")

    def _places(self, mask: Any) -> Any:
        return self.xp.nonzero(mask)[0]

    def _grid(self, starts: Any, length: int) -> Any:
        """Returns ``starts[i] + j`` for every i and every j below ``length``, as a flat array."""
        return self.xp.reshape(starts[:, None] + self.xp.arange(length, dtype=np.int64), (-1,))

    def _words(self, index: Any, count: int) -> Any:
        """Returns the words of blocks, as a flat array of int64; see `_rows`."""
        if self.xp is np and isinstance(index, int):  # Its generator is faster by far, see `_RATIO`.
            return philox.words(self.key, index, count).view(np.int64)
        rows = self._rows(index, count, 0)
        if rows is None:
            if isinstance(index, int):
                index = self.xp.arange(index, index + count, dtype=np.int64)
            rows = self.xp.stack(philox.block(self.xp, self.key, index, 0), axis=-1)
        return self.xp.reshape(rows, (-1,))

    def _blocks(self, attempt: int, places: Any = None) -> Any:
        """Returns the four words of the own block of each element, or of the elements at some places."""
        count = self.length if places is None else places.shape[0]
        if self.xp is np and isinstance(self.starts, int) and count * _RATIO > self.length:
            words = philox.words(self.key, self.starts + (attempt << 64), self.length).view(np.int64)
            words = words.reshape(self.length, philox.WORDS)
            return (words if places is None else words[places]).T
        index = self.indices if places is None else self.indices[places]
        rows = self._rows(index, index.shape[0], attempt)
        return philox.block(self.xp, self.key, index, attempt) if rows is None else rows.T

    def _rows(self, index: Any, count: int, attempt: int) -> Any:
        """Returns the words of blocks, in one row for each, by a kernel of CUDA; None on backends without.

        Args:
            index: the first words of the counters, as a flat array of int64; or that of the first one, as an integer,
                where they are successive.
            count: the number of blocks.
            attempt: the second word of the counters.
        """
        if self.xp is np:
            return None
        rows = self.xp.empty((count, philox.WORDS), dtype=np.int64)
        backend = array_backend(rows)
        if backend is None or backend.kernel_language != "cuda":
            return None
        words = tuple([rows[:, k] for k in range(philox.WORDS)])
        fill_blocks(backend, self.key, index, attempt, words)
        return rows


_ATTEMPTS = 200
"""A number of attempts that no element needs: of all methods, less than two thirds of the proposals are rejected."""

_RATIO = 32
"""How many times faster NumPy's own generator computes a block of a run than `shardtensor.host.philox.block` does."""


_NO_ERRORS = contextlib.nullcontext()
"""The context of computations without parameters, which cause no floating-point errors."""


def fill(
    xp: Any,
    context: ShardContext,
    key: int,
    sample: Sample,
    *parameters: Any,
    kernel: tuple[str, Sequence[Any]] | None = None,
) -> Any:
    """Returns the numbers of a device's shard.

    Args:
        xp: the namespace of the backend.
        context: the boxes of the shards.
        key: the key.
        sample: see `Sample`. Its result is cast to the dtype of the context.
        *parameters: arrays of the shape of the shard, or scalars.
        kernel: the kernel that makes the same numbers on devices with CUDA, and its parameters beside ``parameters``;
            see `shardtensor.functions.random.random_kernel.write_numbers`.
    """
    shape, dtype = context.local_shape, context.dtype
    if xp is not np and kernel is not None and makes(kernel[0], dtype):
        backend = array_backend(xp.empty((0,), dtype=dtype))  # Other backends need no memory here.
        if backend is not None and backend.kernel_language == "cuda":
            out = xp.empty(shape, dtype=dtype)
            if math.prod(shape):
                numbers = [number for p in parameters for number in _kernel_parameters(xp, p)]
                write_numbers(backend, kernel[0], key, out, *_runs(xp, context), [*numbers, *kernel[1]])
            return out
    arguments = [xp.reshape(p, (-1,)) if hasattr(p, "shape") else p for p in parameters]
    size = math.prod(shape)

    def draw(elements: Elements, begin: int, end: int) -> Any:
        return sample(elements, *[_flat(xp, p, begin, end) for p in arguments])

    if xp is not np or shape != context.shape:
        with np.errstate(all="ignore"):
            parts = [xp.asarray(draw(*piece), dtype=dtype) for piece in _pieces(xp, context, key)]
        flat = xp.empty((0,), dtype=dtype) if not parts else parts[0] if len(parts) == 1 else xp.concat(parts)
        return xp.reshape(flat, shape)
    out = memory_pool.empty(shape, dtype)
    target = out.reshape(-1)

    def work(k: int) -> None:
        begin, end = k * _HOST_PIECE, min((k + 1) * _HOST_PIECE, size)
        target[begin:end] = draw(Elements(np, key, begin, end - begin), begin, end)

    with np.errstate(all="ignore") if arguments else _NO_ERRORS:
        if size <= _HOST_PIECE:
            work(0)
        else:
            each(work, -(-size // _HOST_PIECE))
    return out


def _flat(xp: Any, parameter: Any, begin: int, end: int) -> Any:
    """Returns a parameter of the elements from ``begin`` to ``end`` as a flat array of float64."""
    if hasattr(parameter, "shape"):
        return xp.asarray(parameter[begin:end], dtype=np.float64)
    return xp.full((end - begin,), float(parameter), dtype=np.float64)


def _kernel_parameters(xp: Any, parameter: Any) -> tuple[Any, Any]:
    """Returns a parameter as two of a kernel: a flat array of float64, or 0, and a number for all elements."""
    if not hasattr(parameter, "shape"):
        return np.int64(0), np.float64(parameter)
    flat = xp.reshape(parameter, (-1,))
    return xp.asarray(flat, dtype=np.float64), np.float64(0)


def _layout(context: ShardContext) -> tuple[int, list[int], int, int]:
    """Returns how the elements of a shard lie in the array, in row-major order: as runs of successive elements.

    The dimensions from the last one that is split on are contiguous, so that the runs have their size.

    Returns:
        That last dimension, the strides of the array, the index of the first element, and the length of each run.
    """
    box, shape = context.box, context.shape
    last = max((d for d, ends in enumerate(box) if ends != (0, shape[d])), default=0)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    origin = sum(begin * stride for (begin, _), stride in zip(box, strides, strict=True))
    return last, strides, origin, math.prod(context.local_shape[last:])


def _runs(xp: Any, context: ShardContext) -> tuple[Any, int]:
    """Returns the index of the first element of each run of a shard, in an array of int64, or of the only run, as an
    integer; and the number of elements of each.
    """
    last, strides, origin, length = _layout(context)
    if math.prod(context.local_shape[:last]) == 1:
        return origin, length
    starts = xp.asarray([origin], dtype=np.int64)
    for d in range(last):
        steps = xp.arange(context.local_shape[d], dtype=np.int64) * strides[d]
        starts = xp.reshape(starts[:, None] + steps, (-1,))
    return starts, length


def _pieces(xp: Any, context: ShardContext, key: int) -> Iterator[tuple[Elements, int, int]]:
    """Yields the elements of a shard in pieces, with the begin and the end of each in the flat shard."""
    if math.prod(context.local_shape) == 0:
        return
    last, strides, origin, length = _layout(context)
    runs = math.prod(context.local_shape[:last])
    if runs == 1 or length >= _PIECE:
        for k, run in enumerate(np.ndindex(*context.local_shape[:last])):
            start = origin + sum(i * stride for i, stride in zip(run, strides, strict=False))
            for begin in range(0, length, _PIECE):
                count = min(_PIECE, length - begin)
                at = k * length + begin
                yield Elements(xp, key, start + begin, count), at, at + count
        return
    starts, _ = _runs(xp, context)
    step = _PIECE // length
    for k in range(0, runs, step):
        some = starts[k : k + step]
        yield Elements(xp, key, some, length), k * length, (k + some.shape[0]) * length
