"""Kernels of the user's, `ElementwiseKernel` and `RawKernel`: the host's C compiler compiles their text.

A text may use what C and CUDA have in common, the indices of blocks and threads, shared memory and barriers: each
thread of a block is a coroutine, which another follows at a barrier. Where CUDA would read whatever lies behind an
argument of another kind, the double raises.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import keyword
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from . import launch
from . import world as w
from .errors import CUDARuntimeError

_FLAGS = (
    "-O0", "-fwrapv", "-fno-math-errno", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-w",
    "-nostdlib",  # What it calls of the C library is in this process; linking takes less than half as long.
)  # fmt: skip
_OPTIONS = ("--fmad=false", "--std=c++17")
_C = {
    "bool": "bool", "int8": "signed char", "uint8": "unsigned char", "int16": "short", "uint16": "unsigned short",
    "int32": "int", "uint32": "unsigned int", "int64": "long long", "uint64": "unsigned long long",
    "float32": "float", "float64": "double",
}  # fmt: skip
_NUMPY = {c: np.dtype(name) for name, c in _C.items()}

_HEAD = """
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#ifdef __FLT16_MANT_DIG__
typedef _Float16 float16;
#endif
#define __global__
#define __device__
#define __shared__ static
#define __align__(size) __attribute__((aligned(size)))
typedef struct { unsigned int x, y, z; } dim3;
static dim3 threadIdx, blockIdx, blockDim, gridDim;
static float __int_as_float(int bits) { float x; memcpy(&x, &bits, sizeof x); return x; }
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}
#define atomicAdd(place, number) (*(place) += (number))  /* One thread runs at a time. */
static void __syncthreads(void);
static void __threadfence(void) {}
#define __ldcg(p) (*(p))
static unsigned int atomicInc(unsigned int *p, unsigned int most) {
    const unsigned int before = *p;
    *p = before >= most ? 0 : before + 1;
    return before;
}
"""

_THREADS = """
typedef struct { ucontext_t context; dim3 index; bool ended; long long barriers; } Thread;
static Thread *threads, *running;
static ucontext_t between;
static void **arguments;
static void body(void);
static void thread_body(void) { body(); running->ended = true; }
static void __syncthreads(void) { running->barriers++; swapcontext(&running->context, &between); }

/* Returns 1 where a thread misses a barrier at which others wait. */
int run(const unsigned int *sizes, void **args) {
    enum { STACK = 1 << 14 };
    const unsigned int count = sizes[3] * sizes[4] * sizes[5];
    int missed = 0;
    gridDim = (dim3){sizes[0], sizes[1], sizes[2]};
    blockDim = (dim3){sizes[3], sizes[4], sizes[5]};
    arguments = args;
    threads = malloc(count * sizeof(Thread));
    char *const stacks = malloc((size_t)count * STACK);
    for (unsigned long long b = 0; b < (unsigned long long)sizes[0] * sizes[1] * sizes[2] && !missed; b++) {
        blockIdx = (dim3){b % sizes[0], b / sizes[0] % sizes[1], b / sizes[0] / sizes[1]};
        for (unsigned int t = 0; t < count; t++) {
            Thread *const made = threads + t;
            getcontext(&made->context);
            made->context.uc_stack.ss_sp = stacks + (size_t)t * STACK;
            made->context.uc_stack.ss_size = STACK;
            made->context.uc_link = &between;
            made->index = (dim3){t % sizes[3], t / sizes[3] % sizes[4], t / sizes[3] / sizes[4]};
            made->ended = false;
            made->barriers = 0;
            makecontext(&made->context, thread_body, 0);
        }
        for (unsigned int left = count; left && !missed;) {
            left = 0;
            for (unsigned int k = 0; k < count; k++) {
                running = threads + (count - 1 - k);  /* Last ones first: order is not to be relied upon. */
                if (running->ended) continue;
                threadIdx = running->index;
                swapcontext(&between, &running->context);
                left += !running->ended;
            }
            for (unsigned int t = 0; t < count; t++) missed |= threads[t].barriers != threads[0].barriers;
        }
    }
    free(stacks);
    free(threads);
    return missed;
}
"""


class CompileException(Exception):
    """What NVRTC raises for a text that is none."""


@functools.lru_cache(1 << 12)
def _library(text: str) -> ctypes.CDLL:
    command = os.environ.get("SHARDTENSOR_CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if command is None:
        raise RuntimeError("the double has no C compiler in place of NVRTC")
    with tempfile.TemporaryDirectory(prefix="fakecupy-") as folder:
        source, made = Path(folder) / "kernel.c", Path(folder) / "kernel.so"
        source.write_text(text)
        done = subprocess.run(
            [*command.split(), *_FLAGS, "-o", str(made), str(source), "-lm", "-lgcc"], capture_output=True, text=True
        )
        if done.returncode:
            raise CompileException(f"{done.stderr}\n{text}")
        return ctypes.CDLL(str(made))


def _check(name: str, options: Any) -> None:
    if not name.isidentifier():
        raise ValueError(f'Invalid kernel name: "{name}"')
    if not isinstance(options, tuple) or not all(isinstance(o, str) for o in options):
        raise TypeError(f"options is {options!r}; wanted a tuple of texts")
    if set(options) - set(_OPTIONS):
        raise RuntimeError(f"nvrtc: error: invalid value for --gpu-architecture or option: {options}")


class _Parameter:
    """One of an `ElementwiseKernel`."""

    def __init__(self, text: str) -> None:
        words = text.split()
        if len(words) < 2:
            raise Exception(f"Syntax error: {text}")
        if len(words) > 2 or len(words[0]) == 1:
            raise NotImplementedError(f"the double has neither keywords nor types that are deduced: {text}")
        self.dtype, self.name = np.dtype(words[0]), words[1]
        self.type = _C[self.dtype.name]
        if not self.name.isidentifier() or keyword.iskeyword(self.name) or self.name.startswith("_"):
            raise ValueError(f"{self.name!r} cannot be the name of a parameter")


class ElementwiseKernel:
    """CuPy's: it broadcasts its arguments."""

    def __init__(
        self, in_params: str, out_params: str, operation: str, name: str = "kernel", reduce_dims: bool = True,
        preamble: str = "", no_return: bool = False, return_tuple: bool = False, *, options: Any = (),
    ) -> None:  # fmt: skip
        _check(name, options)
        self.in_params, self.out_params = [
            [_Parameter(p) for p in text.split(",")] if text else [] for text in (in_params, out_params)
        ]
        self.nin, self.nout = len(self.in_params), len(self.out_params)
        self.params = [*self.in_params, *self.out_params]
        names = [p.name for p in self.params]
        if "i" in names:
            raise ValueError("Can not use 'i' as a parameter name")
        if len(set(names)) < len(names):
            raise ValueError(f"a name is used twice: {names}")
        self.operation, self.name, self.preamble = operation, name, preamble
        self.no_return, self.return_tuple = no_return, return_tuple

    def _text(self) -> str:
        loads = [f"const {p.type} {p.name} = *(const {p.type} *)q[{k}];" for k, p in enumerate(self.in_params)]
        outs = [f"{p.type} {p.name};" for p in self.out_params]
        stores = [f"*({p.type} *)q[{k}] = {p.name};" for k, p in enumerate(self.out_params, self.nin)]
        count = len(self.params)
        return f"""{_HEAD}
static void __syncthreads(void) {{}}
{self.preamble}
void run(long long ndim, const long long *shape, const long long *strides, char *const *p) {{
    long long size = 1;
    for (int d = 0; d < ndim; d++) size *= shape[d];
    for (long long i = 0; i < size; i++) {{
        char *q[{count}];
        for (int k = 0; k < {count}; k++) {{
            long long left = i;
            q[k] = p[k];
            for (long long d = ndim - 1; d >= 0; d--) {{
                q[k] += left % shape[d] * strides[k * ndim + d];
                left /= shape[d];
            }}
        }}
        {" ".join([*loads, *outs])}
        {self.operation};
        {" ".join(stores)}
    }}
}}
"""

    def __call__(self, *args: Any, size: int = -1) -> Any:
        if len(args) not in (self.nin, len(self.params)):
            raise TypeError(
                f"Wrong number of arguments for {self.name!r}. It must be either {self.nin} or {len(self.params)} "
                f"(with outputs), but given {len(args)}."
            )
        device = w.world.current()
        arrays = [x for x in args if isinstance(x, launch._array)]
        for x in arrays:
            launch.check(x, device)
        for x, p in zip(args, self.params, strict=False):
            if isinstance(x, launch._array):
                if x.dtype != p.dtype:
                    raise TypeError(f"Type is mismatched. {p.name} {x.dtype} {p.dtype}")
            elif type(x) not in (bool, int, float) and not isinstance(x, np.generic):
                raise TypeError(f"Unsupported type {type(x)}")
        shape = np.broadcast_shapes(*[x.shape for x in arrays])
        outs = list(args[self.nin :]) or [launch.empty(shape, p.dtype) for p in self.out_params]
        for out in outs:
            if not isinstance(out, launch._array):
                raise TypeError("Output arguments type must be cupy.ndarray")
            if out.shape != shape:
                raise ValueError("Out shape is mismatched")
        result = None if self.no_return else outs[0] if self.nout == 1 and not self.return_tuple else tuple(outs)
        if 0 in shape:
            return result
        raws = [
            x._a if isinstance(x, launch._array) else np.asarray(p.dtype.type(x))
            for x, p in zip(args, self.params, strict=False)
        ]
        raws = [np.broadcast_to(x, shape) for x in [*raws[: self.nin], *[out._a for out in outs]]]
        function = _library(self._text()).run
        strides = (ctypes.c_longlong * (len(raws) * len(shape)))(*itertools.chain(*[x.strides for x in raws]))
        sizes = (ctypes.c_longlong * len(shape))(*shape)

        def run() -> None:
            function(ctypes.c_longlong(len(shape)), sizes, strides, (ctypes.c_void_p * len(raws))(*map(_address, raws)))

        reads = [x for x in args[: self.nin] if isinstance(x, launch._array)]
        w.world.launch(self.name, run, reads, outs)
        return result


class RawKernel:
    """CuPy's: a function of a text in CUDA, of blocks and threads."""

    def __init__(self, code: str, name: str, options: Any = (), backend: str = "nvrtc") -> None:
        _check(name, options)
        self.code, self.name = code, name
        found = re.search(rf"__global__\s+void\s+{name}\s*\(([^)]*)\)", code)
        if found is None:
            raise RuntimeError(f"CUDA_ERROR_NOT_FOUND: named symbol not found: {name}")
        self._types = [re.sub(r"\w+\s*$", "", p).strip() for p in found.group(1).split(",")]

    def _text(self) -> str:
        values = ", ".join([f"*({kind} *)arguments[{k}]" for k, kind in enumerate(self._types)])
        code = re.sub(r'extern "C"|#include <cupy/.*>', "", self.code)
        return f"{_HEAD}{code}{_THREADS}static void body(void) {{ {self.name}({values}); }}\n"

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        if not all(isinstance(x, tuple) for x in (grid, block, args)):
            raise TypeError("grid, block and args are tuples")
        sizes = [*grid, *[1] * (3 - len(grid)), *block, *[1] * (3 - len(block))]
        if not all(1 <= n < 1 << 31 for n in sizes) or np.prod(sizes[3:]) > 1024:
            raise CUDARuntimeError(9)  # an invalid configuration
        if len(args) != len(self._types):
            raise TypeError(f"{self.name} takes {len(self._types)} arguments, {len(args)} are given")
        device = w.world.current()
        reads, writes = [], []
        values: list[tuple[bool, Any]] = []  # whether it is an array, and NumPy's
        for x, kind in zip(args, self._types, strict=True):
            if isinstance(x, launch._array):
                launch.check(x, device)
                if not kind.endswith("*"):
                    raise TypeError(f"{self.name}: an array is given for a parameter of type {kind}")
                (reads if kind.startswith("const") else writes).append(x)
                values.append((True, x._a))
            else:
                values.append((False, _number(x, kind, self.name)))
        function = _library(self._text()).run
        where = (ctypes.c_uint * 6)(*sizes)

        def run() -> None:
            held = [np.array(_address(v), np.uint64) if is_array else v for is_array, v in values]
            places = (ctypes.c_void_p * len(held))(*map(_address, held))
            if function(where, places):
                raise RuntimeError(f"{self.name}: a thread misses a barrier at which others wait")

        w.world.launch(self.name, run, reads, writes)


def _address(x: Any) -> int:
    return int(x.__array_interface__["data"][0])


def _number(x: Any, kind: str, name: str) -> Any:
    """The value of a parameter that is no array; 0 stands for no array."""
    x = np.int64(x) if type(x) is int else np.float64(x) if type(x) is float else x
    if not isinstance(x, np.generic):
        raise TypeError(f"Unsupported type {type(x)}")
    if kind.endswith("*") and x.dtype == np.int64 and x == 0:
        return np.array(0, np.int64)
    if _NUMPY.get(kind) != x.dtype:
        raise TypeError(f"{name}: {x.dtype} is given for a parameter of type {kind}")
    return np.array(x)
