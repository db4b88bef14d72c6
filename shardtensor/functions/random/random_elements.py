"""Drawing random numbers for the elements of a shard, each from the bits of its global index.

Element i of an array, in row-major order, gets its number from blocks of Philox4x64-10 (see `shardtensor.host.philox`)
under the caller's key, whose counters have these words:

* i // n, 0, 0, 0 where the numbers of n successive elements are made of one block (`Elements.packed`);
* i // 2, 1, 0, 0 where an element has two words for the proposals of a rejection method (`Elements.accepted`).

Where proposals are rejected, which is rare, the words of the next ones are computed from those of the element and its
neighbour in the block (`shardtensor.host.philox.scrambled`).

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
from shardtensor.host.threads import each, num_threads
from shardtensor.sharding.shard_context import ShardContext

_HOST_PIECE = 16 << 10
"""The least number of elements that a thread of the host draws at once, a multiple of those of a block."""

_HOST_PIECES = 4
"""How many times as many it draws at most, so that temporary arrays stay in a core's cache. The proposals that are not
accepted are so few that their functions take the time of their calls, which larger pieces have less often.
"""

_PIECE = 1 << 22
"""Elements that a device draws at once, which bounds the memory of temporary arrays."""

Sample = Callable[..., Any]
"""``sample(elements, *parameters)`` returns the numbers of some elements as a flat array. The parameters are flat
arrays of float64, with one element for each, or with one for all."""


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

    def packed(self, count: int, transform: Callable[[Any, Any], Any], *, stream: int = 0) -> Any:
        """Returns the numbers of all elements, where one block gives those of ``count`` successive elements.

        Args:
            count: the number of elements of a block, a power of two.
            transform: ``transform(xp, words)`` returns ``count`` numbers, or rows of a matrix, for every four words of
                a flat array of int64.
            stream: the second word of the counters.
        """
        if isinstance(self.starts, int):
            first, skip = divmod(self.starts, count)
            blocks = (skip + self.length + count - 1) // count
            return transform(self.xp, self._words(first, blocks, stream))[skip : skip + self.length]
        blocks = (self.length + count - 2) // count + 1  # as many as the most that a run touches
        firsts = self._grid(self.starts >> (count.bit_length() - 1), blocks)
        numbers = transform(self.xp, self._words(firsts, self.starts.shape[0] * blocks, stream))
        rows = self.xp.arange(self.starts.shape[0], dtype=np.int64) * (blocks * count)
        return numbers[self._grid(rows + (self.starts & (count - 1)), self.length)]

    def accepted(
        self,
        propose: Callable[..., tuple[Any, Any]],
        *parameters: Any,
        quickly: Callable[..., tuple[Any, Any]] | None = None,
    ) -> Any:
        """Returns the number of each element by a rejection method: the first of its proposals that is accepted.

        Args:
            propose: ``propose(xp, a, b, *parameters)`` returns the proposals, and whether they are accepted. ``a`` and
                ``b`` are words of each element, in arrays of int64.
            *parameters: flat arrays with an element for each, or of one element.
            quickly: the same, but does not accept all proposals that are accepted.
        """
        xp = self.xp
        pairs = self.packed(2, lambda xp, words: xp.reshape(words, (-1, 2)), stream=1)
        a, b = pairs[:, 0], pairs[:, 1]
        values, accepted = (quickly or propose)(xp, a, b, *parameters)
        left = places(xp, ~accepted)
        if not left.shape[0]:
            return values
        a, b = a[left], b[left]
        if quickly is None:
            a, b = philox.scrambled(xp, a, b, 1)
        return redrawn(xp, values, left, a, b, lambda a, b, left: propose(xp, a, b, *[at(p, left) for p in parameters]))

    def _grid(self, starts: Any, length: int) -> Any:
        """Returns ``starts[i] + j`` for every i and every j below ``length``, as a flat array."""
        return self.xp.reshape(starts[:, None] + self.xp.arange(length, dtype=np.int64), (-1,))

    def _words(self, index: Any, count: int, stream: int) -> Any:
        """Returns the words of blocks, as a flat array of int64.

        Args:
            index: the first words of the counters, as a flat array of int64; or that of the first one, as an integer,
                where they are successive.
            count: the number of blocks.
            stream: the second word of the counters.
        """
        xp = self.xp
        if xp is np and isinstance(index, int):  # Its generator is faster by far.
            return philox.words(self.key, index + (stream << 64), count).view(np.int64)
        rows = xp.empty((count, philox.WORDS), dtype=np.int64)
        backend = None if xp is np else array_backend(rows)
        if backend is None or backend.kernel_language != "cuda":
            if isinstance(index, int):
                index = xp.arange(index, index + count, dtype=np.int64)
            rows = xp.stack(philox.block(xp, self.key, index, stream), axis=-1)
        else:
            fill_blocks(backend, self.key, index, stream, tuple([rows[:, k] for k in range(philox.WORDS)]))
        return xp.reshape(rows, (-1,))


def redrawn(
    xp: Any, values: Any, left: Any, a: Any, b: Any, propose: Callable[[Any, Any, Any], tuple[Any, Any]]
) -> Any:
    """Returns ``values`` with other numbers in some places: in each the first proposal that is accepted.

    Args:
        xp: the namespace.
        values: a flat array, which is overwritten.
        left: the indices of those places.
        a, b: two words for each place, from which `philox.scrambled` makes those of further proposals.
        propose: ``propose(a, b, left)`` returns the proposals of pairs of words for some places, and whether they are
            accepted.
    """
    for attempt in range(1, _ATTEMPTS):
        if not left.shape[0]:
            return values
        if attempt > 1:
            a, b = philox.scrambled(xp, a, b, attempt)
        values[left], accepted = propose(a, b, left)
        again = places(xp, ~accepted)
        left, a, b = left[again], a[again], b[again]
    raise BackendError("nonzero() of the backend's namespace does not wait for the elements of its operand")


def places(xp: Any, mask: Any) -> Any:
    """Returns the indices at which a flat array is true."""
    return xp.nonzero(mask)[0]


def at(parameter: Any, indices: Any) -> Any:
    """Returns the elements of a parameter at some indices: itself where it is one number for all elements."""
    return parameter if parameter.shape[0] == 1 else parameter[indices]


_ATTEMPTS = 200
"""A number of attempts that no element needs: of all methods, less than two thirds of the proposals are rejected."""

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
    arguments = [_argument(xp, p) for p in parameters]
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

    piece = _HOST_PIECE
    if size > piece:
        piece *= min(max(size // (_HOST_PIECE * num_threads()), 1), _HOST_PIECES)

    def work(k: int) -> None:
        begin, end = k * piece, min((k + 1) * piece, size)
        target[begin:end] = draw(Elements(np, key, begin, end - begin), begin, end)

    with np.errstate(all="ignore") if arguments else _NO_ERRORS:
        if size <= piece:
            work(0)
        else:
            each(work, -(-size // piece))
    return out


def _argument(xp: Any, parameter: Any) -> Any:
    """Returns a parameter as a flat array: of one element of float64 if it is a number."""
    if hasattr(parameter, "shape"):
        return xp.reshape(parameter, (-1,))
    return xp.full((1,), float(parameter), dtype=np.float64)


def _flat(xp: Any, parameter: Any, begin: int, end: int) -> Any:
    """Returns a parameter of the elements from ``begin`` to ``end`` as a flat array of float64."""
    if parameter.shape[0] == 1:
        return xp.asarray(parameter, dtype=np.float64)
    return xp.asarray(parameter[begin:end], dtype=np.float64)


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
