"""Elementwise kernels whose threads read and write several elements at once.

CuPy's own elementwise kernels have one element for each thread and blocks of 128 threads, which keeps too few bytes in
flight: on an H200 they reach 0.6 of the bandwidth of its memory, and these all of it.

Where elements follow each other along the last dimension, a thread accesses a pack of up to 16 bytes of each array by
one instruction; arrays of other strides are accessed element by element. Dimensions that are one in the memory of all
arrays are merged first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["TYPES", "ElementwiseKernel", "merged_dimensions"]

TYPES = {
    "bool": "bool", "int8": "signed char", "uint8": "unsigned char", "int16": "short", "uint16": "unsigned short",
    "int32": "int", "uint32": "unsigned int", "int64": "long long", "uint64": "unsigned long long",
    "float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double",
    "complex64": "complex<float>", "complex128": "complex<double>",
}  # fmt: skip
"""The type of each dtype in a kernel; CuPy's headers define those of small floats and of complex numbers."""

_THREADS = 256
"""The number of threads of a block."""

_PACK = 16
"""The maximum number of bytes that one instruction reads or writes."""

_MOST = 8
"""The maximum number of elements of a pack, each of which has the operation once in the text."""

_REGISTERS = 512
"""The maximum number of bytes of all packs of a thread."""

_SINGLY = 4
"""The number of elements of a thread where they are accessed one by one."""

_LAYOUTS = 64
"""The number of shapes, strides and alignments that a kernel keeps."""


class _Parameter(NamedTuple):
    dtype: np.dtype[Any]
    name: str

    @property
    def type(self) -> str:
        return TYPES[self.dtype.name]


def _parameters(text: str) -> list[_Parameter]:
    return [_Parameter(np.dtype(dtype), name) for dtype, name in map(str.split, text.split(",") if text else ())]


class ElementwiseKernel:
    """A kernel that computes elements of its outputs from those of its inputs.

    Args:
        cupy: the module.
        inputs, outputs: the dtype and the name of each, such as ``"float32 x, int64 n"``.
        operation: statements that assign to the outputs, whose number in row-major order is ``i``.
        name: the name of the kernel.
        preamble: the text before the kernel.
        options: those of the compiler.
    """

    def __init__(
        self, cupy: Any, inputs: str, outputs: str, operation: str, name: str, preamble: str, options: tuple[str, ...]
    ) -> None:
        self._array: Any = cupy.ndarray
        self._compile = cupy.RawKernel
        self._inputs = len(_parameters(inputs))
        self._parameters = [*_parameters(inputs), *_parameters(outputs)]
        self._operation, self._name, self._preamble, self._options = operation, name, preamble, options
        self._kernels: dict[str, Any] = {}
        self._launches: dict[Hashable, Callable[[Sequence[Any]], None]] = {}

    def __call__(self, *operands: Any) -> None:
        """Runs the kernel on the current device.

        Args:
            *operands: arrays and numbers for the inputs, which broadcast to the shape of the outputs, and arrays for
                the outputs. No output shares memory with an input, unless both are the same array.
        """
        array = self._array
        key = tuple([(x.shape, x.strides, x.data.ptr % _PACK) if isinstance(x, array) else None for x in operands])
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= _LAYOUTS:
                self._launches.clear()
            launch = self._launches[key] = self._launch(operands)
        launch(operands)

    def _launch(self, operands: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
        """Returns what launches the kernel for operands of these layouts."""
        is_array = [isinstance(x, self._array) for x in operands]
        layout = _Layout(self._parameters, operands, is_array)
        if not layout.size:
            return lambda operands: None
        text = self._text(layout)
        kernel = self._kernels.get(text)
        if kernel is None:
            kernel = self._kernels[text] = self._compile(text, self._name, options=self._options)
        grid, block, sizes = (layout.blocks,), (_THREADS,), layout.sizes
        layouts = [(p.dtype.type, s) for p, s in zip(self._parameters, layout.strides, strict=True)]

        def launch(operands: Sequence[Any]) -> None:
            arguments = list(sizes)
            for x, (dtype, strides) in zip(operands, layouts, strict=True):
                arguments.append(dtype(x) if strides is None else x)
                if strides:
                    arguments += strides
            kernel(grid, block, tuple(arguments))

        return launch

    # -- the text ----------------------------------------------------------------------------------

    def _text(self, layout: _Layout) -> str:
        parameters = ["long long st_size", *[f"long long st_n{d}" for d in range(layout.ndim)]]
        for k, (p, strides) in enumerate(zip(self._parameters, layout.strides, strict=True)):
            if strides is None:
                parameters.append(f"{p.type} {p.name}")
            else:
                parameters.append(f"{'const ' if k < self._inputs else ''}char *st_p{k}")
                parameters += [f"long long st_p{k}_{d}" for d in range(len(strides))]
        body = self._packs(layout) if layout.pack else self._elements(layout)
        lines = [
            self._preamble,
            f'extern "C" __global__ void {self._name}({", ".join(parameters)}) {{',
            *[f"    {line}" for line in body],
            "}",
        ]
        return "\n".join(lines)

    def _packs(self, layout: _Layout) -> list[str]:
        """One pack of successive elements for each thread."""
        n, index, flat = layout.pack, layout.index, not layout.ndim
        lines = [
            f"const {index} st_begin = (({index})blockIdx.x * {_THREADS} + threadIdx.x) * {n};",
            "if (st_begin >= st_size) return;",
        ]
        if flat:  # Otherwise the last dimension is a number of whole packs.
            lines.append(f"const int st_count = st_size - st_begin < {n} ? (int)(st_size - st_begin) : {n};")
        lines += _unravelled("st_begin", index, layout.ndim)
        loads, stores, reads, writes = [], [], [], []
        for k, (p, strides) in enumerate(zip(self._parameters, layout.strides, strict=True)):
            if strides is None:
                continue
            at, repeats = self._place(k, layout), layout.repeats[k]
            constant = "const " if k < self._inputs else ""
            if repeats:
                loads.append(f"const {p.type} {p.name} = *(const {p.type} *)({at});")
                continue
            kind = f"st_pack{p.dtype.itemsize}_{k}"
            loads.append(
                f"typedef struct __attribute__((aligned({n * p.dtype.itemsize}))) {{ {p.type} v[{n}]; }} {kind};"
            )
            loads += [f"{constant}char *const st_q{k} = {at};", f"{kind} st_v{k};"]
            if k < self._inputs:
                load = f"st_v{k} = *(const {kind} *)st_q{k};"
                one = f"st_v{k}.v[st_k] = ((const {p.type} *)st_q{k})[st_k < st_count ? st_k : 0];"
                loads += _tail(load, one, n) if flat else [load]
                reads.append(f"const {p.type} {p.name} = st_v{k}.v[st_k];")
            else:
                store = f"*({kind} *)st_q{k} = st_v{k};"
                one = f"if (st_k < st_count) (({p.type} *)st_q{k})[st_k] = st_v{k}.v[st_k];"
                stores += _tail(store, one, n) if flat else [store]
                reads.append(f"{p.type} {p.name};")
                writes.append(f"st_v{k}.v[st_k] = {p.name};")
        return [
            *lines,
            *loads,
            "#pragma unroll",
            f"for (int st_k = 0; st_k < {n}; st_k++) {{",
            *[f"    {line}" for line in (*reads, f"const {index} i = st_begin + st_k;", *self._statements(), *writes)],
            "}",
            *stores,
        ]

    def _elements(self, layout: _Layout) -> list[str]:
        """Some elements for each thread. They are read first, so that their reads do not wait for writes."""
        index = layout.index
        places, loads, reads, writes = [], [], [], []
        arrays: list[str] = []
        for k, (p, strides) in enumerate(zip(self._parameters, layout.strides, strict=True)):
            if strides is None:
                continue
            at = self._place(k, layout)
            if k < self._inputs:
                arrays.append(f"{p.type} st_v{k}[{_SINGLY}];")
                loads.append(f"st_v{k}[st_k] = *(const {p.type} *)({at});")
                reads.append(f"const {p.type} {p.name} = st_v{k}[st_k];")
            else:
                reads.append(f"{p.type} {p.name};")
                writes.append(f"*({p.type} *)({at}) = {p.name};")
        places = [
            f"const {index} i = ({index})blockIdx.x * {_SINGLY * _THREADS} + st_k * {_THREADS} + threadIdx.x;",
            "if (i >= st_size) break;",
            *_unravelled("i", index, layout.ndim),
        ]
        loop = f"for (int st_k = 0; st_k < {_SINGLY}; st_k++) {{"
        return [
            *arrays,
            "#pragma unroll",
            loop,
            *[f"    {line}" for line in (*places, *loads)],
            "}",
            "#pragma unroll",
            loop,
            *[f"    {line}" for line in (*places, *reads, *self._statements(), *writes)],
            "}",
        ]

    def _statements(self) -> list[str]:
        return [*self._operation.splitlines(), ";"]

    def _place(self, k: int, layout: _Layout) -> str:
        """Returns the address of the first element of a pack, or of an element."""
        strides = layout.strides[k] or ()
        at = "".join([f" + st_i{d} * st_p{k}_{d}" for d in range(len(strides))])
        if layout.pack and not layout.repeats[k]:
            last = "st_begin" if not layout.ndim else f"st_i{layout.ndim - 1}"
            at += f" + (long long){last} * {self._parameters[k].dtype.itemsize}"
        return f"st_p{k}{at}"


class _Layout:
    """How a kernel walks over operands of certain shapes, strides and alignments.

    Attributes:
        size: the number of elements of an output.
        pack: the number of elements that a thread accesses at once, or 0 where it accesses them one by one.
        ndim: the number of dimensions along which an index is taken apart; 0 for packs in one dimension.
        blocks: the number of blocks.
        sizes: the first arguments: the number of elements, and the sizes of the dimensions.
        strides: the strides of each array along the dimensions, except for the last one in packs; None for numbers.
        repeats: whether an array has the same element along the last dimension.
        index: the type of indices.
    """

    def __init__(self, parameters: Sequence[_Parameter], operands: Sequence[Any], is_array: Sequence[bool]) -> None:
        arrays = [x for x, yes in zip(operands, is_array, strict=True) if yes]
        dtypes = [p.dtype for p, yes in zip(parameters, is_array, strict=True) if yes]
        shape = np.broadcast_shapes(*[x.shape for x in arrays])
        columns = merged_dimensions(shape, arrays) or [(1, [0] * len(arrays))]
        self.size = math.prod(shape)
        n, last = columns[-1]
        follow = [n == 1 or s == dtype.itemsize for s, dtype in zip(last, dtypes, strict=True)]
        pack = _pack(dtypes)
        in_packs = all(
            repeat or (yes and _is_aligned(x, columns, k, pack * dtypes[k].itemsize))
            for k, (x, yes, repeat) in enumerate(zip(arrays, follow, [s == 0 and n > 1 for s in last], strict=True))
        )
        self.pack = pack if in_packs and (len(columns) == 1 or n % pack == 0) else 0
        self.ndim = 0 if self.pack and len(columns) == 1 else len(columns)
        self.index = "unsigned int" if self.size < 1 << 30 else "long long"
        self.blocks = -(-self.size // (_THREADS * (self.pack or _SINGLY)))
        self.sizes = [np.int64(size) for size in (self.size, *[m for m, _ in columns][: self.ndim])]
        walked = columns[:-1] if self.pack else columns
        strides = iter([[np.int64(column[k]) for _, column in walked] for k in range(len(arrays))])
        repeats = iter([s == 0 and n > 1 for s in last])
        self.strides = [next(strides) if yes else None for yes in is_array]
        self.repeats = [next(repeats) if yes else False for yes in is_array]


def merged_dimensions(shape: Sequence[int], arrays: Sequence[Any]) -> list[tuple[int, list[int]]]:
    """Returns size and strides of each dimension in a loop over arrays that broadcast to a shape, where a stride is 0
    along which an array repeats its elements; dimensions are merged that are one in the memory of all arrays.
    """
    strides = [
        [0] * (len(shape) - x.ndim) + [0 if n == 1 else stride for n, stride in zip(x.shape, x.strides, strict=True)]
        for x in arrays
    ]
    columns: list[tuple[int, list[int]]] = []
    for d, n in enumerate(shape):
        column = [own[d] for own in strides]
        if columns and all(s == t * n for s, t in zip(columns[-1][1], column, strict=True)):
            columns[-1] = columns[-1][0] * n, column
        elif columns and columns[-1][0] == 1:
            columns[-1] = n, column
        elif n != 1 or not columns:
            columns.append((n, column))
    return columns


def _pack(dtypes: Sequence[np.dtype[Any]]) -> int:
    """Returns the number of elements of a pack for arrays of these dtypes."""
    pack = min(max(_PACK // max(dtype.itemsize for dtype in dtypes), 1), _MOST)
    while pack > 1 and pack * sum(dtype.itemsize for dtype in dtypes) > _REGISTERS:
        pack //= 2
    return pack


def _is_aligned(x: Any, columns: Sequence[tuple[int, list[int]]], k: int, nbytes: int) -> bool:
    """Whether all packs of the array number k begin at multiples of a number of bytes."""
    return x.data.ptr % nbytes == 0 and not any(column[k] % nbytes for _, column in columns[:-1])


def _tail(whole: str, one: str, n: int) -> list[str]:
    """Returns the access to a pack, which the end of the arrays may cut off."""
    return [f"if (st_count == {n}) {whole}", f"else for (int st_k = 0; st_k < {n}; st_k++) {one}"]


def _unravelled(index: str, kind: str, ndim: int) -> list[str]:
    """Returns the definitions of the indices along dimensions, of an index into all of them in row-major order."""
    lines, left = [], index
    for d in reversed(range(1, ndim)):
        lines.append(f"const {kind} st_l{d} = {left} / ({kind})st_n{d}, st_i{d} = {left} - st_l{d} * ({kind})st_n{d};")
        left = f"st_l{d}"
    return [*lines, f"const {kind} st_i0 = {left};"] if ndim else []
