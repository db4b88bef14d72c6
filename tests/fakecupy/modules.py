"""Builds the simulated modules ``cupy``, ``cupyx`` and their submodules."""

from __future__ import annotations

import functools
import importlib.machinery
import types
from typing import Any

import numpy as np

from . import creation, cublas, cuda, graphs, kernels, launch, memory, names, nccl, rng, search
from .array import namespace, ndarray
from .errors import OutOfMemoryError


def _module(name: str, contents: dict[str, Any], package: bool = False) -> types.ModuleType:
    made = types.ModuleType(name, "A test double.")
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=package)
    if package:
        made.__path__ = []
    made.__dict__.update(contents)
    return made


def _through(caller: Any, name: str, function: Any, of: str = "") -> Any:
    lacks = frozenset(names.LACKS.get(of + name, "").split())

    def run(*args: Any, **kwargs: Any) -> Any:
        for key in kwargs:
            if key in lacks:
                raise TypeError(f"{name}() got an unexpected keyword argument {key!r}")
        return caller(name, function, args, kwargs)

    run.__name__ = name
    return run


def _attribute(function: Any) -> Any:
    """Returns a function that reads properties of arrays, but no elements, from NumPy's views."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        return function(*[a._a if isinstance(a, ndarray) else a for a in args], **kwargs)

    ask.__name__ = function.__name__
    return ask


def _functions() -> dict[str, Any]:
    made: dict[str, Any] = {name: getattr(np, name) for name in names.HOST}
    made |= {name: launch.Ufunc(getattr(np, name)) for name in names.UFUNCS}
    for group, caller in (
        (names.GENERIC, launch.call),
        (names.VIEWS, launch.call_view),
        (names.SYNCHRONOUS, launch.call_now),
        (names.IN_PLACE, launch.call_in_place),
    ):
        made |= {name: _through(caller, name, getattr(np, name)) for name in group if hasattr(np, name)}
    made |= {name: _attribute(getattr(np, name)) for name in names.ATTRIBUTES}
    made |= {name: creation.on_host(name) for name in names.CREATION}
    made |= creation.NAMES | search.NAMES
    made |= {alias: made[name] for alias, name in names.ALIASES.items()}
    made["bool"] = np.bool_
    return made


_memory_pool, _pinned_pool = memory.MemoryPool(), memory.pinned_pool


@functools.cache  # once, because other libraries cache the namespace of a class of arrays
def build() -> dict[str, types.ModuleType]:
    """Returns all modules by their names in `sys.modules`."""
    made: dict[str, types.ModuleType] = {}

    def add(name: str, contents: dict[str, Any], package: bool = False) -> types.ModuleType:
        made[name] = _module(name, contents, package)
        return made[name]

    functions = _functions()
    linalg = add("cupy.linalg", {n: _through(launch.call, n, getattr(np.linalg, n), "linalg.") for n in names.LINALG})
    for name in ("eig", "eigvals"):
        linalg.__dict__[name] = _through(launch.call, name, _complex(getattr(np.linalg, name)))
    linalg.__dict__["LinAlgError"] = np.linalg.LinAlgError
    linalg.__dict__["annotations"] = None  # the real module has this name, too, and array_api_compat removes it
    linalg.__dict__["__all__"] = [*names.LINALG, "LinAlgError"]
    fft = add("cupy.fft", {n: _through(launch.call, n, getattr(np.fft, n), "fft.") for n in names.FFT})
    for name in names.FFT_CREATION:
        fft.__dict__[name] = _fft_creation(name)
    random = add("cupy.random", rng.NAMES)
    runtime = add("cupy.cuda.runtime", cuda.RUNTIME | cublas.RUNTIME)
    add("cupy.cuda.nccl", nccl.NAMES)  # an attribute of cupy.cuda only after its import, like the real module
    parts = {
        "cublas": add("cupy.cuda.cublas", cublas.NAMES),
        "device": add("cupy.cuda.device", {"Device": cuda.Device, "get_cublas_handle": cublas.get_cublas_handle}),
        "stream": add("cupy.cuda.stream", {n: getattr(cuda, n) for n in _STREAM}),
        "memory": add("cupy.cuda.memory", {**{n: getattr(memory, n) for n in _MEMORY}, **_ERRORS}),
        "pinned_memory": add("cupy.cuda.pinned_memory", {n: getattr(memory, n) for n in _PINNED_MEMORY}),
        "runtime": runtime,
    }
    contents = {
        **{n: getattr(cuda, n) for n in (*_STREAM, "Device", "is_available")},
        **{n: getattr(memory, n) for n in ("MemoryPool", "MemoryPointer", "PinnedMemoryPool", "alloc")},
        **parts,
        "Graph": graphs.Graph,
        "UnownedMemory": memory.UnownedMemory,
        "alloc_pinned_memory": memory.alloc_pinned_memory,
        "get_device_id": cuda.get_device,
    }
    cuda_module = add("cupy.cuda", contents, package=True)
    own = {
        **functions,
        "ndarray": ndarray,
        "ufunc": launch.Ufunc,
        "ElementwiseKernel": kernels.ElementwiseKernel,
        "RawKernel": kernels.RawKernel,
        "fuse": launch.fuse,
        "cuda": cuda_module,
        "linalg": linalg,
        "fft": fft,
        "random": random,
        "is_available": cuda.is_available,
        "get_default_memory_pool": lambda: _memory_pool,
        "get_default_pinned_memory_pool": lambda: _pinned_pool,
        "exceptions": add("cupy.exceptions", {n: getattr(np.exceptions, n) for n in ("AxisError", "ComplexWarning")}),
        "__version__": "14.2.0",
    }
    cupy = add("cupy", own, package=True)
    add("cupyx", {n: getattr(memory, n) for n in _PINNED}, package=True)
    namespace.clear()
    namespace.update(functions, cupy=cupy)
    return made


def _complex(function: Any) -> Any:
    """Returns a function with complex results, also for real eigenvalues: CuPy allocates before it computes them."""

    def run(a: Any) -> Any:
        result = function(a)
        dtype = np.result_type(a, np.complex64)
        return tuple(x.astype(dtype) for x in result) if isinstance(result, tuple) else result.astype(dtype)

    run.__module__ = "numpy.linalg"
    return run


def _fft_creation(name: str) -> Any:
    function = getattr(np.fft, name)
    return lambda n, d=1.0: launch.from_host(function(n, d))


_STREAM = ("Stream", "ExternalStream", "Event", "get_current_stream")
_MEMORY = ("BaseMemory", "Memory", "MemoryPointer", "MemoryPool", "PooledMemory", "UnownedMemory", "alloc")
_PINNED_MEMORY = ("PinnedMemoryPool", "alloc_pinned_memory", "is_memory_pinned")
_ERRORS = {"OutOfMemoryError": OutOfMemoryError}
_PINNED = ("empty_pinned", "zeros_pinned", "empty_like_pinned", "zeros_like_pinned")
