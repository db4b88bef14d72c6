"""Arrays, meshes and layouts that the tests draw, comparisons with NumPy, and measurements of memory.

Most of the names are imported from the kit `shardtensor.testing`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import math
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend.registry import load
from shardtensor.host import memory_pool
from shardtensor.interpreters.execution import plan_cache, strategies
from shardtensor.tensor.tensor import shard_arrays
from shardtensor.testing.layouts import (
    DTYPES,
    FLOATS,
    MESHES,
    NAMES,
    SIZES,
    all_specs,
    array,
    assert_same,
    broadcastable,
    mesh_of,
    meshes,
    on_host,
    placed,
    shapes,
    specs,
)
from tests import draws
from tests.conftest import NO_GPU, NO_TORCH

Item = TypeVar("Item")

__all__ = [
    "DTYPES",
    "FLOATS",
    "MESHES",
    "NAMES",
    "READ_ONLY",
    "SIZES",
    "USABLE",
    "all_specs",
    "allocated",
    "array",
    "assert_close",
    "assert_equal",
    "assert_rounded",
    "assert_same",
    "broadcastable",
    "everywhere",
    "in_use",
    "mesh_of",
    "meshes",
    "on_host",
    "place_of",
    "placed",
    "put",
    "shapes",
    "specs",
    "strided",
    "values_of",
]

everywhere = pytest.mark.parametrize("backend", ["numpy", "checked", "cupy", "torch"], indirect=True)
"""Runs a test on every backend; in the fast tier its cases take turns on all four, if it has other parameters."""

THREADS_INHERIT = getattr(sys.flags, "thread_inherit_context", False)
"""Whether a new thread has the context variables of the one that starts it, as by default where there is no GIL."""

READ_ONLY = ("numpy", "checked")
"""The backends whose shards are read-only for mapped functions; arrays of other libraries are always writable."""

USABLE = (*READ_ONLY, "cupy", *(() if NO_TORCH else ("torch",)))
"""The backends that a test can draw."""


def strided(items: Iterable[Item], step: int, first: int = 0) -> Sequence[Item]:
    """Returns all items in the full tier, else every ``step``-th one.

    Args:
        items: the items.
        step: the distance of two items in the fast tier.
        first: the number of a case, which determines the first item, so that ``step`` cases have all items.
    """
    return list(items) if draws.all_of_them else list(items)[first % step :: step]


def values_of(x: Any) -> np.ndarray:
    """Returns a copy in host memory of a tensor, a host array, or an array of any backend.

    Waits until all work that is queued on the devices has run.
    """
    if isinstance(x, (st.ShardedTensor, np.ndarray, np.generic, memoryview)):
        return np.array(x)
    backend = next(b for b in map(load, ("cupy", "torch")) if b.is_array(x))
    for device in backend.devices():
        backend.synchronize(device)
    return on_host(x, backend.device_of(x))


def place_of(x: Any) -> int:
    """Returns the address of an array of any backend."""
    if hasattr(x, "__array_interface__"):
        return int(x.__array_interface__["data"][0])
    return int(x.data_ptr() if hasattr(x, "data_ptr") else x.data.ptr)


def put(
    value: Any, backend: str, mesh: tuple[int, ...] = (4,), spec: st.P | None = None, start: int = 0
) -> st.ShardedTensor:
    """Places a host array on a mesh of a backend's devices from index ``start`` on.

    Its first dimension is split over the first axis of the mesh, unless ``spec`` says otherwise.
    """
    value = np.asarray(value)
    spec = (st.P("x") if value.ndim else st.P()) if spec is None else spec
    return st.device_put(value, st.NamedSharding(mesh_of(mesh, backend, start), spec))


def buffers(*tensors: st.ShardedTensor) -> int:
    """The number of memories of the backend "grouped" that the shards of tensors are in."""
    return len({load("grouped").memory_of(array) for x in tensors for array in shard_arrays(x)})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses warnings and floating-point errors."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def assert_equal(found: Any, wanted: Any) -> None:
    """Asserts that an array or a tensor has the elements of another, and its shape and dtype.

    Python's numbers and lists have no dtype, and a number stands for any shape. `assert_same` looks at the shards, too.
    """
    strict = not isinstance(wanted, (bool, int, float, complex, list))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted), strict=strict)


def assert_rounded(found: Any, wanted: Any, dtype: Any = st.bfloat16) -> None:
    """Asserts that an array or a tensor has a small dtype, and the elements of another, rounded to that dtype."""
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found).astype(float), np.asarray(wanted).astype(dtype).astype(float))


def assert_close(found: Any, wanted: Any, exact: bool) -> None:
    """Asserts that an array has the shape, dtype and elements of another.

    Floating-point numbers may differ by the errors of another order of additions, unless ``exact``.
    """
    wanted = np.asarray(wanted)
    if exact or wanted.dtype.kind in "biu":
        assert_equal(found, wanted)
    else:
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        limit = {"float16": 2e-2, "float32": 2e-5, "complex64": 2e-5}.get(str(wanted.dtype), 1e-11)
        np.testing.assert_allclose(found, wanted, rtol=limit, atol=limit)


@contextlib.contextmanager
def cut(module: Any, **sizes: Any) -> Iterator[None]:
    """Sets the block sizes of a module, so that small arrays have many blocks, and pools the memory of all arrays.

    A context manager.

    Args:
        module: the module.
        sizes: new values of the module's constants.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(module, name, size)
        for other in (memory_pool, strategies):
            patch.setattr(other, "POOLED_FROM", 1)
        patch.setattr(plan_cache, "_cached_plan", functools.lru_cache(plan_cache._cached_plan.__wrapped__))
        yield


@contextlib.contextmanager
def allocated(backend: str) -> Iterator[list[int]]:
    """Measures the peak of a backend's memory, in bytes beyond those in use at the start.

    A context manager; its value is a list, to which the number is appended on exit. For PyTorch on the host it is the
    sum of all allocations, whether they were freed or not.
    """
    peak: list[int] = []
    if backend == "cupy":
        memory_pool = importlib.import_module("cupy").get_default_memory_pool()
        before = sum(_pools(memory_pool))
        yield peak
        peak.append(sum(_pools(memory_pool, free=False)) - before)
    elif backend == "torch":
        with _counted() as peak:
            yield peak
    else:
        tracemalloc.start()
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


def in_use(backend: str) -> int:
    """Returns the bytes of a backend's memory that are in use, after emptying caches and waiting for its devices.

    If tracemalloc runs, the bytes of Python's objects are added (not for the simulated CuPy, whose own records would
    count).
    """
    for device in load(backend).devices():
        load(backend).synchronize(device)
    st.free_cache()
    total = 0 if backend == "cupy" and NO_GPU else tracemalloc.get_traced_memory()[0]
    if backend in READ_ONLY:
        return total
    if backend == "cupy":
        cupy = importlib.import_module("cupy")
        memory_pool = cupy.get_default_memory_pool()
        for device in range(cupy.cuda.runtime.getDeviceCount()):
            with cupy.cuda.Device(device):
                total += int(memory_pool.used_bytes())
        return total
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        return total + sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))
    storages = [x.untyped_storage() for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return total + sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _pools(memory_pool: Any, free: bool = True) -> list[int]:
    """Returns the bytes in CuPy's pool on each GPU, after freeing unused blocks if ``free``."""
    cuda, sizes = importlib.import_module("cupy").cuda, []
    for device in range(cuda.runtime.getDeviceCount()):
        with cuda.Device(device):
            if free:
                memory_pool.free_all_blocks()
            sizes.append(int(memory_pool.total_bytes()))
    return sizes


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """Measures the bytes that PyTorch's operators allocate: on GPUs PyTorch's own peak, on the host the sum.

    On the host, the memory of each result that is not an operand's memory is counted.
    """
    torch, peak = importlib.import_module("torch"), []
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        before = sum(map(torch.cuda.memory_allocated, devices))
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.append(sum(map(torch.cuda.max_memory_allocated, devices)) - before)
        return
    total = [0]

    def memory(x: Any) -> dict[int, int]:
        flat = importlib.import_module("torch.utils._pytree").tree_leaves(x)
        storages = [t.untyped_storage() for t in flat if isinstance(t, torch.Tensor)]
        return {s.data_ptr(): s.nbytes() for s in storages}

    class Watch(importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            operands = memory([args, kwargs])
            total[0] += sum(n for address, n in memory(result).items() if address not in operands)
            return result

    with Watch():
        yield peak
    peak.append(total[0])


def by_tree(merge: Callable[[Any, Any], Any], values: Sequence[Any], sizes: Sequence[int] = ()) -> Any:
    """Combines values along the tree in which the library combines partial results.

    The left subtree of n positions has the largest power of two below n. Values of several axes are in row-major order,
    and the last axis is combined first.
    """
    if len(sizes) > 1:
        inner = math.prod(sizes[1:])
        values = [by_tree(merge, values[i : i + inner], sizes[1:]) for i in range(0, len(values), inner)]
    if len(values) == 1:
        return values[0]
    half = 1 << ((len(values) - 1).bit_length() - 1)
    return merge(by_tree(merge, values[:half]), by_tree(merge, values[half:]))
