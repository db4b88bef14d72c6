"""Device memory: blocks, the objects that own them, pointers into them, and the pools; and pinned host memory."""

from __future__ import annotations

import bisect
import ctypes
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from . import graphs
from . import world as w
from .errors import CUDARuntimeError, OutOfBounds, OutOfMemoryError

UNIT = 512
POISON = 0xFF  # NaN in every floating dtype, -1 in integers


class Block:
    """A block of a GPU's memory, with its last accesses. The pool reuses it after its owner has freed it.

    ``extent`` is the number of bytes that were requested; 0 while it is free.
    """

    __slots__ = ("extent", "pool", "ptr", "raw", "reads", "size", "stream", "write")

    def __init__(self, pool: SingleDeviceMemoryPool, size: int, stream: w.Stream) -> None:
        self.pool, self.size, self.stream = pool, size, stream
        self.extent = 0
        self.raw = np.full(size, POISON, np.uint8)
        self.ptr: int = self.raw.__array_interface__["data"][0]
        self.write: Any = None
        self.reads: dict[Any, Any] = {}

    def describe(self) -> str:
        """Returns a description for the text of a race."""
        return f"{self.size} bytes of device {self.pool.device}"

    @property
    def poison(self) -> Any:
        """A function that overwrites the block, and does not keep it alive."""
        raw = self.raw
        return lambda: raw.fill(POISON)


class BaseMemory:
    """The base of objects that keep memory alive."""

    __slots__ = ("__weakref__", "block", "device_id", "ptr", "size")

    def __init__(self, ptr: int, size: int, device_id: int, block: Block | None) -> None:
        self.ptr, self.size, self.device_id, self.block = ptr, size, device_id, block

    def __int__(self) -> int:
        return self.ptr

    @property
    def device(self) -> Any:
        from .cuda import Device

        return Device(self.device_id)


class Memory(BaseMemory):
    """Memory of no bytes, for arrays without elements."""

    __slots__ = ()

    def __init__(self, size: int = 0) -> None:
        super().__init__(0, size, w.world.current(), None)


class PooledMemory(BaseMemory):
    """A block of the pool. Without references it is free at once, even if queued work still uses it, as in CuPy."""

    __slots__ = ()

    def free(self) -> None:
        """Frees the block early, as CuPy's method does."""
        block, self.block, self.ptr = self.block, None, 0
        if block is not None:
            block.pool.world.free(block)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        block = self.block
        if block is not None and not ending():  # at exit, the machine may not exist any more
            block.pool.world.free(block)


class UnownedMemory(BaseMemory):
    """Memory that belongs to another object, ``owner``."""

    __slots__ = ("_owner",)

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        block = block_at(ptr) if size else None
        super().__init__(ptr, size, block.pool.device if block else max(device_id, 0), block)
        self._owner = owner


def block_at(ptr: int) -> Block:
    """Returns the block that contains an address of device memory.

    Raises:
        CUDARuntimeError: there is none.
    """
    blocks = sorted(w.world.blocks.copy().items())  # a copy, because other threads add and remove blocks
    i = bisect.bisect_right(blocks, ptr, key=lambda item: item[0]) - 1
    if i < 0 or ptr >= blocks[i][0] + blocks[i][1].size:
        raise CUDARuntimeError(1)
    return blocks[i][1]


class MemoryPointer:
    """An address in device memory, which keeps the memory alive."""

    __slots__ = ("__weakref__", "device_id", "mem", "ptr")

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    __radd__ = __add__

    def __sub__(self, offset: int) -> MemoryPointer:
        return self + -offset

    @property
    def device(self) -> Any:
        """The device of the memory."""
        return self.mem.device

    @property
    def data(self) -> MemoryPointer:
        """The pointer itself, so that `World.launch` accepts it in place of an array."""
        return self

    def describe(self) -> str:
        """Returns a description for the text of a race."""
        return f"{self.mem.size} bytes of device {self.device_id}"

    def raw(self, size: int) -> Any:
        """Returns ``size`` bytes from this address on, as a NumPy array.

        Raises:
            OutOfBounds: they exceed the bytes that were requested for the block.
        """
        block = self.mem.block
        if block is None:
            raise CUDARuntimeError(1)
        start = self.ptr - block.ptr
        if start < 0 or start + size > block.extent:
            raise OutOfBounds(f"bytes {start} to {start + size} of {block.extent} bytes of device {self.device_id}")
        return block.raw[start : start + size]

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Any = None) -> None:
        """Queues a copy from any device on ``stream`` (default: the current one), without events."""
        if size > 0:
            device_copy(self, src, size, _resolve(stream))

    def copy_from_device(self, src: MemoryPointer, size: int) -> None:
        """Copies from any device on the null stream, and waits."""
        if size > 0:
            w.world.synchronize(device_copy(self, src, size, w.world.gpus[w.world.current()].null))

    def copy_from_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        """Queues a copy from host memory. Pinned memory is read when the copy runs, other memory at once."""
        if size > 0:
            self.take_host(host_bytes(_address(mem), size), _resolve(stream))

    def copy_from_host(self, mem: Any, size: int) -> None:
        """Copies from host memory on the null stream, and waits."""
        if size > 0:
            w.world.synchronize(self.take_host(host_bytes(_address(mem), size), w.world.gpus[w.world.current()].null))

    def take_host(self, source: tuple[Any, bool], stream: w.Stream) -> w.Stream:
        """Queues a copy from host memory, given as its bytes and whether they are pinned."""
        graphs.check_copy(stream, "H2D")
        data, pinned = source
        values, to = (data if pinned else data.copy()), self.raw(data.size)
        return w.world.launch("copy from host", lambda: np.copyto(to, values), (), (self,), stream)

    def copy_to_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        """Queues a copy to host memory. Pinned memory is written when it runs; for other memory the host waits."""
        if size > 0:
            self.give_host(host_bytes(_address(mem), size), _resolve(stream))

    def copy_to_host(self, mem: Any, size: int) -> None:
        """Copies to host memory on the null stream, and waits."""
        if size > 0:
            s = w.world.gpus[w.world.current()].null
            self.give_host(host_bytes(_address(mem), size), s)
            w.world.synchronize(s)

    def give_host(self, target: tuple[Any, bool], stream: w.Stream) -> None:
        """Queues a copy to host memory, given as its bytes and whether they are pinned."""
        graphs.check_copy(stream, "D2H")
        to, pinned = target
        values = self.raw(to.size)
        w.world.launch("copy to host", lambda: np.copyto(to, values), (self,), (), stream)
        if not pinned:
            w.world.synchronize(stream)

    def copy_from_async(self, mem: Any, size: int, stream: Any = None) -> None:
        """Queues a copy from device or host memory."""
        if isinstance(mem, MemoryPointer):
            self.copy_from_device_async(mem, size, stream)
        else:
            self.copy_from_host_async(mem, size, stream)

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        """Queues an operation that sets ``size`` bytes to ``value``."""
        if size > 0:
            to = self.raw(size)
            w.world.launch("memset", lambda: to.fill(value & 0xFF), (), (self,), _resolve(stream))

    def memset(self, value: int, size: int) -> None:
        """Queues the same operation on the null stream."""
        if size > 0:
            from .cuda import Stream

            self.memset_async(value, size, Stream.null)


def device_copy(to: Any, src: Any, size: int, s: w.Stream) -> w.Stream:
    """Queues a copy between two addresses of device memory. Only such a copy may read memory of another device."""
    target, values = to.raw(size), src.raw(size)
    here, there = to.device_id, src.device_id

    def copy() -> None:
        np.copyto(target, values)

    def copy_wrongly() -> None:
        np.copyto(target, values)
        target[::61] ^= 0x15

    config = w.world.config
    wrong = (there, here) in config.corrupt and config.peer(here, there)
    other = w.world.gpus[there].null if here != there and s.kind is w.NULL else None
    if other is not None:  # a peer copy on the null stream waits for both devices, and both devices wait for it
        w.world.wait(s, w.world.record(other))
    w.world.launch("copy between devices", copy_wrongly if wrong else copy, (src,), (to,), s)
    if other is not None:
        w.world.wait(other, w.world.record(s))
    return s


def _resolve(stream: Any) -> w.Stream:
    found = w.world.stream() if stream is None else w.world.find(stream.ptr)
    if found is None:
        raise CUDARuntimeError(400)
    return found


def _address(mem: Any) -> int:
    return mem if isinstance(mem, int) else mem.value


# -- the device pool -------------------------------------------------------------------------------


class SingleDeviceMemoryPool:
    """The blocks of one device, with an arena of free blocks for each stream."""

    def __init__(self, world: w.World, device: int) -> None:
        self.world, self.device = world, device
        self.total = self.free_size = self.limit = 0
        self.arenas: dict[w.Stream, dict[int, list[Block]]] = {}

    def give_back(self, block: Block) -> None:
        self.arenas.setdefault(block.stream, {}).setdefault(block.size, []).append(block)
        self.free_size += block.size

    def take(self, size: int) -> Block:
        """Returns a block of the current stream's arena, or a new one."""
        world = self.world
        rounded = -(-size // UNIT) * UNIT
        if world.freed:
            world.drain()
        stream = world.stream()
        with world.lock:
            arena = self.arenas.get(stream)
            stack = arena.get(rounded) if arena else None
            block = stack.pop() if stack else None
            if block is not None:
                self.free_size -= rounded
        if block is None:
            self._reserve(rounded)
            block = Block(self, rounded, stream)
            world.blocks[block.ptr] = block
        block.extent = size
        block.write = (stream, stream.seq, "its allocation")
        return block

    def _reserve(self, size: int) -> None:
        graphs.check_unsafe_call()
        if self._reserved(size):
            return
        self.free_all_blocks()
        if self._reserved(size):
            return
        gc.collect()
        self.free_all_blocks()
        if not self._reserved(size):
            raise OutOfMemoryError(size, self.total, self.limit)

    def _reserved(self, size: int) -> bool:
        memory = self.world.config.memory
        with self.world.lock:
            fits = self.total + size <= min(self.limit or memory, memory)
            if fits:
                self.total += size
        return fits

    def free_all_blocks(self, stream: Any = None) -> None:
        graphs.check_unsafe_call()
        world = self.world
        world.drain()
        with world.lock:
            for arena_stream in list(self.arenas) if stream is None else [_resolve(stream)]:
                for blocks in self.arenas.pop(arena_stream, {}).values():
                    for block in blocks:
                        self.total -= block.size
                        self.free_size -= block.size
                        world.blocks.pop(block.ptr, None)


def alloc(size: int) -> MemoryPointer:
    """Allocates memory of the current device for the current stream; its contents are undefined (poison)."""
    world = w.world
    if not size:
        return MemoryPointer(Memory(), 0)
    block = pool_of(world, world.current()).take(size)
    return MemoryPointer(PooledMemory(block.ptr, size, block.pool.device, block), 0)


def pool_of(world: w.World, device: int) -> SingleDeviceMemoryPool:
    gpu = world.gpus[device] if device < len(world.gpus) else None
    if gpu is None:
        raise CUDARuntimeError(101 if world.gpus else 100)
    if gpu.pool is None:
        gpu.pool = SingleDeviceMemoryPool(world, device)
    return gpu.pool


class MemoryPool:
    """The public pool, whose numbers are those of the current device."""

    @staticmethod
    def _pool() -> SingleDeviceMemoryPool:
        w.world.drain()
        return pool_of(w.world, w.world.current())

    def malloc(self, size: int) -> MemoryPointer:
        return alloc(size)

    def used_bytes(self) -> int:
        pool = self._pool()
        return pool.total - pool.free_size

    def free_bytes(self) -> int:
        return self._pool().free_size

    def total_bytes(self) -> int:
        return self._pool().total

    def n_free_blocks(self) -> int:
        arenas = self._pool().arenas.copy()  # a copy, because finalizers and other threads change them
        return sum(len(blocks) for arena in arenas.values() for blocks in arena.copy().values())

    def free_all_blocks(self, stream: Any = None) -> None:
        if stream is None:
            for device in range(len(w.world.gpus)):
                pool_of(w.world, device).free_all_blocks()
        else:
            self._pool().free_all_blocks(stream)

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        if size is not None and fraction is not None:
            raise ValueError("size and fraction cannot be specified at one time")
        if fraction is not None:
            if not 0 <= fraction <= 1:
                raise ValueError(f"memory limit fraction out of range: {fraction}")
            size = int(fraction * w.world.config.memory)
        if (size := size or 0) < 0:
            raise ValueError(f"memory limit size out of range: {size}")
        self._pool().limit = size

    def get_limit(self) -> int:
        return self._pool().limit


# -- pinned memory ---------------------------------------------------------------------------------


class PinnedMemoryPool:
    """A pool of page-locked host memory, which is reused as soon as its array is deleted, even if work still uses it.

    Finalizers and other threads may change the tables at any moment; loops therefore run over copies, which `dict.copy`
    makes atomically.
    """

    def __init__(self) -> None:
        self.used: dict[int, Any] = {}
        self.free: dict[int, list[Any]] = {}

    def malloc(self, size: int) -> Any:
        """Returns an object with the buffer protocol that owns the memory."""
        if not w.world.gpus:
            raise CUDARuntimeError(100)
        rounded = max(-(-size // UNIT) * UNIT, UNIT)
        try:
            raw = self.free.get(rounded, []).pop()
        except IndexError:
            raw = np.full(rounded, POISON, np.uint8)
        ptr: int = raw.__array_interface__["data"][0]
        self.used[ptr] = raw
        owner = (ctypes.c_uint8 * size).from_address(ptr)
        weakref.finalize(owner, self._release, ptr).atexit = False
        return owner

    def _release(self, ptr: int) -> None:
        raw = self.used.pop(ptr)
        raw.fill(POISON)
        self.free.setdefault(raw.size, []).append(raw)

    def find(self, address: int, size: int) -> Any:
        """Returns the bytes at an address if they are pinned, otherwise None."""
        for ptr, raw in self.used.copy().items():
            if ptr <= address and address + size <= ptr + raw.size:
                return raw[address - ptr : address - ptr + size]
        return None

    def n_free_blocks(self) -> int:
        return sum(map(len, self.free.copy().values()))

    def free_all_blocks(self) -> None:
        self.free.clear()


pinned_pool = PinnedMemoryPool()


def alloc_pinned_memory(size: int) -> Any:
    """Allocates page-locked host memory, as an object with the buffer protocol."""
    return pinned_pool.malloc(size)


def is_memory_pinned(data: int) -> bool:
    """Whether an address of the host is page-locked."""
    return pinned_pool.find(data, 1) is not None


def host_bytes(address: int, size: int) -> tuple[Any, bool]:
    """Returns the bytes of host memory at an address, and whether they are pinned."""
    found = pinned_pool.find(address, size)
    if found is not None:
        return found, True
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8), False


def empty_pinned(shape: Any, dtype: Any = float, order: str = "C") -> Any:
    """Returns a NumPy array in pinned memory."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return np.ndarray(shape, dtype, buffer=pinned_pool.malloc(size), order=order)


def zeros_pinned(shape: Any, dtype: Any = float, order: str = "C") -> Any:
    """Returns a NumPy array of zeros in pinned memory."""
    made = empty_pinned(shape, dtype, order)
    made[...] = 0
    return made


def empty_like_pinned(a: Any, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> Any:
    """Returns a NumPy array in pinned memory with the shape and dtype of ``a``."""
    return empty_pinned(a.shape if shape is None else shape, a.dtype if dtype is None else dtype)


def zeros_like_pinned(a: Any, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> Any:
    """Returns a NumPy array of zeros in pinned memory with the shape and dtype of ``a``."""
    made = empty_like_pinned(a, dtype, order, subok, shape)
    made[...] = 0
    return made
