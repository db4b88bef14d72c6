"""Writes the CUDA text of kernels, from the table of expressions that C has, too.

A kernel without reductions is the operation of an `ElementwiseKernel` of CuPy, which walks over arrays of any strides.

A kernel with reductions is a CUDA function of its own. Each row has the threads of one dimension of a block. They go
over the row once for each stage of its `row_schedule`; each thread reduces some of the elements, and a tree in shared
memory combines what the threads have.
Few long rows are divided over blocks: for each stage, ``part`` reduces segments and ``join`` the results of a row;
``finish`` writes what each element has. The order of additions depends on the shape only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardtensor.host.fork import cached_property
from shardtensor.interpreters.jit.kernels.expressions import (
    C_TYPES,
    PRELUDE,
    definition,
    has_c,
    indented,
    neutral,
    step,
    step_name,
    term,
)
from shardtensor.interpreters.jit.kernels.kernel import Kernel, Node, Value
from shardtensor.interpreters.jit.kernels.row_schedule import Stage, row_schedule

MOST_THREADS = 512
"""The maximum number of threads of a block, each of which has 8 bytes of shared memory."""

HEAD = """\
#define ST_FUNCTION static __device__ inline
#define ST_INFINITY __int_as_float(0x7f800000)
"""

_DIFFERENT = {("floor_divide", "f"), ("remainder", "f"), ("mod", "f")}
"""The functions of floats whose results on GPUs are CuPy's in eager mode, and not NumPy's (see docs/gpus.md)."""


def has_cuda(kernel: Kernel) -> bool:
    """Returns whether every value of a kernel has a C type, and every node an expression in CUDA."""
    return has_c(kernel) and not any(
        (node.name, kernel.dtype(node.operands[0])[0]) in _DIFFERENT for node in kernel.nodes
    )


def cuda_source(kernel: Kernel) -> str:
    """Returns the text of a kernel, to be read: what CuPy makes of an elementwise one depends on the arrays."""
    if kernel.row_ndim:
        scalars = frozenset([k for k, operand in enumerate(kernel.inputs) if not any(operand.varies)])
        return row_source(kernel, 1, 1, scalars).whole
    text = elementwise_source(kernel)
    body = "\n".join(indented(text.operation.splitlines()))
    return f"{_comment(kernel)}\nElementwiseKernel({text.inputs} -> {text.outputs}) {{\n{body}\n}}"


class ElementwiseSource(NamedTuple):
    """The arguments of `shardtensor.backend.Backend.elementwise_kernel`."""

    inputs: str
    outputs: str
    operation: str
    preamble: str


def elementwise_source(kernel: Kernel) -> ElementwiseSource:
    """Returns the text of a kernel without reductions."""
    count = len(kernel.inputs)
    inputs = ", ".join([f"{_name(v.dtype)} v{k}" for k, v in enumerate(kernel.inputs)])
    outputs = ", ".join([f"{_name(kernel.dtype(out.value))} y{k}" for k, out in enumerate(kernel.outputs)])
    lines = [_definition(kernel, v) for v in range(count, kernel.values)]
    lines += [f"y{k} = v{out.value};" for k, out in enumerate(kernel.outputs)]
    operation = "\n".join(lines)
    return ElementwiseSource(inputs, outputs, operation, _prelude(operation))


def _name(dtype: str) -> str:
    return np.dtype(dtype).name


def _comment(kernel: Kernel) -> str:
    return f"/* {kernel} */"


def _definition(kernel: Kernel, value: Value) -> str:
    return definition(kernel, value, lambda v: any(kernel.varies(v)))


def _prelude(text: str) -> str:
    """Returns the definitions that a text needs."""
    functions = PRELUDE.replace("#define ST_INFINITY (1.0f / 0.0f)\n", "")
    return f"{HEAD}{functions if 'st_' in text else ''}" if re.search("ST_|st_", text) else ""


_TREE = """
/* Combines a value of each thread of a row along a binary tree. The first barrier awaits the readers of an earlier
   tree. */
static __device__ {T} st_tree_{name}({T} mine, double *memory) {{
    {T} *const shared = ({T} *)(memory + threadIdx.y * blockDim.x);
    const int x = threadIdx.x;
    __syncthreads();
    shared[x] = mine;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {{
        __syncthreads();
        if (x < half) {{
            const {T} a = shared[x], b = shared[x + half];
            shared[x] = {step};
        }}
    }}
    __syncthreads();
    return shared[0];
}}
"""


_MOMENT = """
/* What a thread knows of its elements: how many there are, the mean of those before the current run, the sum of the
   differences of the run from it, and the sum of the squares of all from it. A run has at most four times as many
   elements as those before it, so that the squares have about the size of those of the differences from their own mean,
   and few digits cancel. The first run has one element. */
typedef struct {{ long long count; {T} mean, sum, squares; }} st_moment_{name};
static __device__ inline void st_moment_add_{name}(st_moment_{name} *m, {T} x) {{
    const {T} difference = x - m->mean;
    m->count++;
    m->sum += difference;
    m->squares += difference * difference;
}}
static __device__ inline void st_moment_end_run_{name}(st_moment_{name} *m) {{
    const {T} by = m->sum / ({T})m->count;
    m->mean += by;
    m->squares = m->count > 1 ? m->squares - by * m->sum : 0;
    m->sum = 0;
}}
static __device__ inline {T} st_moment_squares_{name}(st_moment_{name} m, {T} mean) {{
    const {T} by = m.mean - mean;
    return m.squares + by * (({T})m.count * by);
}}
"""


class RowSource:
    """The text of a kernel with reductions.

    Args:
        kernel: the kernel.
        outer_ndim: the number of dimensions of the loop before the rows, after merging.
        inner_ndim: the number of dimensions of a row, after merging.
        scalars: the inputs that are numbers, not arrays.

    Attributes:
        key: what texts of the kernel differ by.
        stages: the number of stages that reduce.
        writes_elements: whether an output is written for each element.
    """

    def __init__(self, kernel: Kernel, outer_ndim: int, inner_ndim: int, scalars: frozenset[int]) -> None:
        self.kernel = kernel
        self.key = outer_ndim, inner_ndim, scalars
        self._outer_ndim, self._inner_ndim = outer_ndim, inner_ndim
        self._scalars = scalars
        self._count = len(kernel.inputs)
        self._schedule = row_schedule(kernel, stores=False)
        self._total = {v: k for k, v in enumerate(self._schedule.totals)}
        self.stages = len(self._schedule.stages) - 1
        self.writes_elements = any(not out.per_row for out in kernel.outputs)

    def _node(self, value: Value) -> Node:
        return self.kernel.nodes[value - self._count]

    @cached_property
    def whole(self) -> str:
        """The text of ``rows``, which computes whole rows."""
        return self._text({"rows": self._rows()})

    @cached_property
    def divided(self) -> str:
        """The text of the functions for parts of rows: ``part_0`` and ``join_0``, and so on; ``finish``."""
        bodies: dict[str, list[str]] = {}
        for s in range(self.stages):
            bodies |= {f"part_{s}": self._part(s), f"join_{s}": self._join(s)}
        if self.writes_elements:
            bodies["finish"] = self._finish()
        return self._text(bodies)

    def _text(self, bodies: Mapping[str, Sequence[str]]) -> str:
        functions = [line for name, body in bodies.items() for line in self._function(name, body)]
        trees = {step_name(self._node(v)): self._node(v) for v in self._total}
        lines = [_comment(self.kernel), _prelude(re.sub("st_tree|st_moment", "", "\n".join(functions)))]
        for name, node in sorted(trees.items()):
            lines.append(_TREE.format(T=C_TYPES[node.dtype], name=name, step=step(node, "a", "b")))
        for dtype in sorted({self.kernel.dtype(v) for v in self._schedule.moments}):
            lines.append(_MOMENT.format(T=C_TYPES[dtype], name=dtype))
        return "\n".join([*lines, *functions])

    # -- the functions -----------------------------------------------------------------------------

    def _function(self, name: str, body: Sequence[str]) -> list[str]:
        """Returns a function with the parameters that all of them have."""
        sizes = [f"m{d}" for d in range(self._outer_ndim)] + [f"n{d}" for d in range(self._inner_ndim)]
        parameters = [f"long long {name}" for name in ("rows", "n", "segments", "length", "*totals", "*parts", *sizes)]
        for k in range(self._count):
            scalar = k in self._scalars
            parameters.append(f"{self._type(k)} v{k}" if scalar else self._array(f"const char *p{k}", f"p{k}", True))
        for k, out in enumerate(self.kernel.outputs):
            parameters.append(self._array(f"char *y{k}", f"y{k}", not out.per_row))
        return [f'extern "C" __global__ void {name}({", ".join(parameters)}) {{', *indented(body), "}", ""]

    def _array(self, pointer: str, name: str, inner: bool) -> str:
        strides = [f"{name}o{d}" for d in range(self._outer_ndim)]
        strides += [f"{name}i{d}" for d in range(self._inner_ndim)] if inner else []
        return ", ".join([pointer, *[f"long long {s}" for s in strides]])

    def _rows(self) -> list[str]:
        """One row for all threads of the first dimension of a block."""
        lines = [
            *_SHARED,
            "const long long at = (long long)blockIdx.x * blockDim.y + threadIdx.y;",
            "const bool here = at < rows;",
            "const long long row = here ? at : rows - 1;  /* No thread may miss a barrier. */",
            *self._places(),
        ]
        for stage in self._schedule.stages[:-1]:
            lines += self._known(stage.known, self._computed)
            lines += self._reduced(stage, "x", "n")
        lines += self._known(self._schedule.stages[-1].known, self._computed)
        return [*lines, "if (!here) return;", *self._written("x", "n")]

    def _part(self, s: int) -> list[str]:
        """The reductions of a stage, for a segment of a row."""
        stage = self._schedule.stages[s]
        lines = [*_SHARED, *_SEGMENT, *self._places(), *self._known(self._schedule.known(s), self._read)]
        lines += self._reduced(stage, *_ENDS)
        for v in stage.reductions:
            kind, mean = self._type(v), self._schedule.moments.get(v)
            lines.append(f"const {kind} t{v} = {self._tree(v, f't{mean} / ({kind})(end - begin)')};")
            lines.append(f"if (x == 0) {self._of_part(v, 'blockIdx.x')} = t{v};")
        return lines

    def _join(self, s: int) -> list[str]:
        """The reductions of a stage, for a row, and the results if the row has no others."""
        lines = [*_SHARED, "const long long row = blockIdx.x;"]
        for v in self._schedule.stages[s].reductions:
            kind, node, mean = self._type(v), self._node(v), self._schedule.moments.get(v)
            part = [f"const {kind} b = {self._of_part(v)};"]
            if mean is not None:
                # The squares of each segment are moved to the mean of the row (Chan, Golub & LeVeque, 1979).
                part = [
                    f"const {kind} count = ({kind})(k < segments - 1 ? length : n - k * length);",
                    f"const {kind} d = {self._of_part(mean)} / count - t{mean};",
                    f"const {kind} b = {self._of_part(v)} + count * (d * d);",
                ]
            lines += [
                f"{kind} a{v} = {neutral(node)};",
                "for (long long k = x; k < segments; k += blockDim.x) {",
                *indented([*part, f"a{v} = {step(node, f'a{v}', 'b')};"]),
                "}",
                f"const {kind} t{v} = st_tree_{step_name(node)}(a{v}, memory){self._divided(v)};",
                f"if (x == 0) {self._read(v)} = t{v};",
            ]
        if s < self.stages - 1 or self.writes_elements:
            return lines
        # The thread reads the totals that it has written itself.
        known = self._known(self._schedule.known(self.stages), self._read)
        return [*lines, "if (x != 0) return;", *self._places(), *known, *self._written("0", "0")]

    def _finish(self) -> list[str]:
        """The results of a segment of a row."""
        known = self._known(self._schedule.known(self.stages), self._read)
        lines = ["const int x = threadIdx.x;", *_SEGMENT, *self._places(), *known]
        return [*lines, *self._written(*_ENDS, once="begin == 0 && ")]

    # -- their parts -------------------------------------------------------------------------------

    def _type(self, value: Value) -> str:
        return C_TYPES[self.kernel.dtype(value)]

    def _places(self) -> list[str]:
        """Returns the definitions of the addresses of a row in all arrays."""
        lines = _unravelled("row", "m", "r", self._outer_ndim)
        for k in range(self._count):
            if k not in self._scalars:
                lines.append(f"const char *const q{k} = p{k}{_offset('r', f'p{k}o', self._outer_ndim)};")
        for k, _ in enumerate(self.kernel.outputs):
            lines.append(f"char *const z{k} = y{k}{_offset('r', f'y{k}o', self._outer_ndim)};")
        return lines

    def _known(self, values: Sequence[Value], total: Callable[[Value], str]) -> list[str]:
        """Returns the definitions of values of a row; ``total`` has the expressions of reductions."""
        lines = []
        for v in values:
            if v >= self._count and v not in self._total:
                lines.append(_definition(self.kernel, v))
            elif v not in self._scalars:
                text = total(v) if v in self._total else f"*(const {self._type(v)} *)q{v}"
                lines.append(f"const {self._type(v)} v{v} = {text};")
        return lines

    def _computed(self, value: Value) -> str:
        """Returns the total of what the threads of a row have."""
        return self._tree(value, f"v{self._schedule.moments.get(value)}") + self._divided(value)

    def _read(self, value: Value) -> str:
        """Returns the total that an earlier function has written."""
        return f"*({self._type(value)} *)(totals + row * {len(self._total)}ll + {self._total[value]})"

    def _of_part(self, value: Value, part: str = "(row * segments + k)") -> str:
        """Returns the partial result of a segment."""
        return f"*({self._type(value)} *)(parts + {part} * {len(self._total)}ll + {self._total[value]})"

    def _tree(self, value: Value, mean: str) -> str:
        """Returns what the threads have, combined; the squares of a moment are those of the differences from a mean."""
        node, mine = self._node(value), f"a{value}"
        if value in self._schedule.moments:
            mine = f"st_moment_squares_{node.dtype}({mine}, {mean})"
        return f"st_tree_{step_name(node)}({mine}, memory)"

    def _divided(self, value: Value) -> str:
        return f" / ({self._type(value)})n" if self._node(value).name == "mean" else ""

    def _reduced(self, stage: Stage, begin: str, end: str) -> list[str]:
        """Returns the loop in which a thread reduces its elements; with moments, that over their runs."""
        lines, body = [], self._element(stage)
        moments = [v for v in stage.reductions if v in self._schedule.moments]
        for v in stage.reductions:
            node = self._node(v)
            if v in moments:
                (x,) = self._node(self._schedule.moments[v]).operands
                lines.append(f"st_moment_{node.dtype} a{v} = {{0, 0, 0, 0}};")
                body.append(f"st_moment_add_{node.dtype}(&a{v}, v{x});")
                continue
            lines.append(f"{self._type(v)} a{v} = {neutral(node)};")
            body.append(f"const {self._type(v)} t{v} = {term(node, f'v{node.operands[0]}')};")
            body.append(f"a{v} = {step(node, f'a{v}', f't{v}')};")
        if not moments:
            return [*lines, *_loop(begin, end, body)]
        return [
            *lines,
            f"for (long long i = {begin}; i < {end};) {{",
            f"    const long long most = i + (1 + 4 * a{moments[0]}.count) * blockDim.x;",
            f"    const long long stop = most < {end} ? most : {end};",
            "    #pragma unroll 4",
            "    for (; i < stop; i += blockDim.x) {",
            *indented(body, 2),
            "    }",
            *[f"    st_moment_end_run_{self._node(v).dtype}(&a{v});" for v in moments],
            "}",
        ]

    def _element(self, stage: Stage) -> list[str]:
        """Returns the definitions of the values of one element."""
        lines = _unravelled("i", "n", "i", self._inner_ndim)
        for v in stage.needs:
            if v in stage.loads:
                at = f"q{v}{_offset('i', f'p{v}i', self._inner_ndim)}"
                lines.append(f"const {self._type(v)} v{v} = *(const {self._type(v)} *)({at});")
            else:
                lines.append(_definition(self.kernel, v))
        return lines

    def _written(self, begin: str, end: str, once: str = "") -> list[str]:
        """Returns the statements that write the outputs of a row, those of elements from ``begin`` to ``end``."""
        elements, rows = [], []
        for k, out in enumerate(self.kernel.outputs):
            kind, at = self._type(out.value), f"z{k}{_offset('i', f'y{k}i', self._inner_ndim)}"
            if out.per_row:
                rows.append(f"if ({once}x == 0) *({kind} *)z{k} = v{out.value};")
            else:
                elements.append(f"*({kind} *)({at}) = v{out.value};")
        loop = _loop(begin, end, [*self._element(self._schedule.stages[-1]), *elements]) if elements else []
        return [*loop, *rows]


_SHARED = [f"__shared__ double memory[{MOST_THREADS}];", "const int x = threadIdx.x;"]

_SEGMENT = [
    "const long long row = blockIdx.x / segments, begin = blockIdx.x % segments * length;",
    "const long long end = begin + length < n ? begin + length : n;",
]
_ENDS = ("begin + x", "end")


def _loop(begin: str, end: str, body: Sequence[str]) -> list[str]:
    return [f"for (long long i = {begin}; i < {end}; i += blockDim.x) {{", *indented(body), "}"]


def _unravelled(index: str, sizes: str, names: str, ndim: int) -> list[str]:
    """Returns the definitions of the indices along dimensions, of an index into all of them in row-major order."""
    if ndim < 2:
        return [f"const long long {names}0 = {index};"] if ndim else []
    lines, left = [], index
    for d in reversed(range(1, ndim)):
        lines.append(f"const long long {names}{d} = {left} % {sizes}{d}, {names}_{d} = {left} / {sizes}{d};")
        left = f"{names}_{d}"
    return [*lines, f"const long long {names}0 = {left};"]


def _offset(index: str, strides: str, ndim: int) -> str:
    return "".join([f" + {index}{d} * {strides}{d}" for d in range(ndim)])


row_source = functools.lru_cache(1 << 8)(RowSource)
"""Returns the `RowSource` with the same arguments."""
