"""Writes the CUDA text of kernels, from the table of expressions that C has, too.

A kernel without reductions is the operation of an `ElementwiseKernel` of CuPy, which walks over arrays of any strides.

A kernel with reductions is a CUDA function of its own. Each row has the threads of one dimension of a block. They go
over the row once for each stage, which needs the reductions of those before it (a softmax has three: the maximum, the
sum, the results); each thread reduces some of the elements, and a tree in shared memory combines what the threads have.
Few long rows are divided over blocks: for each stage, ``part`` reduces segments and ``join`` the results of a row;
``finish`` writes what each element has. The order of additions depends on the shape only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardtensor.host.fork import cached_property
from shardtensor.interpreters.jit.expressions import C_TYPES, PRELUDE, STEPS, c_expression, has_c, neutral
from shardtensor.interpreters.jit.kernel import Kernel, Node, Value

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
        scalars = frozenset([k for k, given in enumerate(kernel.inputs) if not any(given.varies)])
        return row_source(kernel, 1, 1, scalars).whole
    text = elementwise_source(kernel)
    body = "\n".join([f"    {line}" for line in text.operation.splitlines()])
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
    """Returns the definition of the variable of a node."""
    node = kernel.nodes[value - len(kernel.inputs)]
    dtypes = [kernel.dtype(v) for v in node.operands]
    scalar = node.name == "clip" and not any(any(kernel.varies(v)) for v in node.operands[1:])
    text = c_expression(node, [f"v{v}" for v in node.operands], dtypes, scalar_bounds=scalar)
    return f"const {C_TYPES[node.dtype]} v{value} = {text};"


def _step(node: Node, a: str, b: str) -> str:
    return c_expression(Node(STEPS[node.name], (0, 1), node.dtype), [a, b], [node.dtype] * 2)


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
        reductions: the reductions, in the order of their totals.
        writes_elements: whether an output is written for each element.
    """

    def __init__(self, kernel: Kernel, outer_ndim: int, inner_ndim: int, scalars: frozenset[int]) -> None:
        self.kernel = kernel
        self.key = outer_ndim, inner_ndim, scalars
        self._outer_ndim, self._inner_ndim = outer_ndim, inner_ndim
        self._scalars = scalars
        self._count = len(kernel.inputs)
        self._stage_of = self._stages()
        self.reductions = [v for v in range(self._count, kernel.values) if self._node(v).reduces]
        self.stages = max([self._stage_of[v] for v in self.reductions], default=0)
        self.writes_elements = any(not out.per_row for out in kernel.outputs)

    def _node(self, value: Value) -> Node:
        return self.kernel.nodes[value - self._count]

    def _moves(self, value: Value) -> bool:
        return not self.kernel.is_row(value)

    def _stages(self) -> list[int]:
        """Returns the first stage in which each value can be computed."""
        stages = [0] * self._count
        for node in self.kernel.nodes:
            stages.append(max([stages[v] for v in node.operands]) + node.reduces)
        return stages

    @cached_property
    def whole(self) -> str:
        """The text of ``rows``, which computes whole rows."""
        return self._text({"rows": self._rows()})

    @cached_property
    def divided(self) -> str:
        """The text of the functions for parts of rows: ``part_0`` and ``join_0``, and so on; ``finish``."""
        bodies = {}
        for stage in range(self.stages):
            bodies[f"part_{stage}"] = self._part(stage)
            bodies[f"join_{stage}"] = self._join(stage)
        if self.writes_elements:
            bodies["finish"] = self._finish()
        return self._text(bodies)

    def _text(self, bodies: Mapping[str, Sequence[str]]) -> str:
        functions = [line for name, body in bodies.items() for line in self._function(name, body)]
        trees = {_suffix(self._node(v)): self._node(v) for v in self.reductions}
        lines = [_comment(self.kernel), _prelude("\n".join(functions).replace("st_tree", ""))]
        for name, node in sorted(trees.items()):
            lines.append(_TREE.format(T=C_TYPES[node.dtype], name=name, step=_step(node, "a", "b")))
        return "\n".join([*lines, *functions])

    # -- the functions -----------------------------------------------------------------------------

    def _function(self, name: str, body: Sequence[str]) -> list[str]:
        """Returns a function with the parameters that all of them have."""
        sizes = [f"long long m{d}" for d in range(self._outer_ndim)] + [
            f"long long n{d}" for d in range(self._inner_ndim)
        ]
        arrays = []
        for k in range(self._count):
            if k in self._scalars:
                arrays.append(f"{self._type(k)} v{k}")
            else:
                arrays.append(self._array(f"const char *p{k}", f"p{k}", True))
        for k, out in enumerate(self.kernel.outputs):
            arrays.append(self._array(f"char *y{k}", f"y{k}", not out.per_row))
        given = [f"long long {n}" for n in ("rows", "n", "segments", "length")] + [
            "long long *totals",
            "long long *parts",
        ]
        return [
            f'extern "C" __global__ void {name}({", ".join([*given, *sizes, *arrays])}) {{',
            *_indented(body),
            "}",
            "",
        ]

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
        for stage in range(self.stages):
            lines += self._known_in(stage)
            lines += self._reduced(stage, "x", "n")
            for v in self._reductions(stage):
                lines.append(f"const {self._type(v)} v{v} = {self._total(v, self._tree(v))};")
        lines += self._known_in(self.stages)
        return [*lines, "if (!here) return;", *self._stored("x", "n")]

    def _part(self, stage: int) -> list[str]:
        """The reductions of a stage, for a segment of a row."""
        index = {v: k for k, v in enumerate(self.reductions)}
        lines = [*_SHARED, *_SEGMENT, *self._places(), *self._totals_before(stage), *self._reduced(stage, *_ENDS)]
        for v in self._reductions(stage):
            at = f"parts + blockIdx.x * {len(index)}ll + {index[v]}"
            lines.append(f"const {self._type(v)} t{v} = {self._tree(v)};")
            lines.append(f"if (x == 0) *({self._type(v)} *)({at}) = t{v};")
        return lines

    def _join(self, stage: int) -> list[str]:
        """The reductions of a stage, for a row, and the results if the row has no others."""
        index = {v: k for k, v in enumerate(self.reductions)}
        lines = [*_SHARED, "const long long row = blockIdx.x;"]
        for v in self._reductions(stage):
            kind = self._type(v)
            part = f"*({kind} *)(parts + (row * segments + k) * {len(index)}ll + {index[v]})"
            lines += [
                f"{kind} a{v} = {neutral(self._node(v))};",
                "for (long long k = x; k < segments; k += blockDim.x) {",
                f"    const {kind} b = {part};",
                f"    a{v} = {_step(self._node(v), f'a{v}', 'b')};",
                "}",
                f"const {kind} t{v} = {self._total(v, self._tree(v))};",
                f"if (x == 0) *({kind} *)(totals + row * {len(index)}ll + {index[v]}) = t{v};",
            ]
        if stage < self.stages - 1 or self.writes_elements:
            return lines
        # The thread reads the totals that it has written itself.
        return [
            *lines,
            "if (x != 0) return;",
            *self._places(),
            *self._totals_before(self.stages),
            *self._stored("0", "0"),
        ]

    def _finish(self) -> list[str]:
        """The results of a segment of a row."""
        lines = ["const int x = threadIdx.x;", *_SEGMENT, *self._places(), *self._totals_before(self.stages)]
        return [*lines, *self._stored(*_ENDS, once="begin == 0 && ")]

    # -- their parts -------------------------------------------------------------------------------

    def _type(self, value: Value) -> str:
        return C_TYPES[self.kernel.dtype(value)]

    def _places(self) -> list[str]:
        """Returns the definitions of the addresses of a row in all arrays."""
        lines = _unravelled("row", "m", "r", self._outer_ndim)
        for k in [k for k in range(self._count) if k not in self._scalars]:
            lines.append(f"const char *const q{k} = p{k}{_offset('r', f'p{k}o', self._outer_ndim)};")
        for k, _ in enumerate(self.kernel.outputs):
            lines.append(f"char *const z{k} = y{k}{_offset('r', f'y{k}o', self._outer_ndim)};")
        return lines

    def _known_in(self, stage: int) -> list[str]:
        """Returns the definitions of the values of a row that become known in a stage, but for its reductions."""
        lines = []
        for v in range(self.kernel.values):
            if self._moves(v) or self._stage_of[v] != stage or v in self._scalars:
                continue
            if v < self._count:
                lines.append(f"const {self._type(v)} v{v} = *(const {self._type(v)} *)q{v};")
            elif not self._node(v).reduces:
                lines.append(_definition(self.kernel, v))
        return lines

    def _totals_before(self, stage: int) -> list[str]:
        """Returns the definitions of all values of a row that are known in a stage, reductions by their totals."""
        index = {v: k for k, v in enumerate(self.reductions)}
        lines = []
        for s in range(stage + 1):
            for v in self._reductions(s - 1):
                kind = self._type(v)
                lines.append(f"const {kind} v{v} = *({kind} *)(totals + row * {len(index)}ll + {index[v]});")
            lines += self._known_in(s)
        return lines

    def _reductions(self, stage: int) -> list[Value]:
        """Returns the reductions whose operands are computed in a stage."""
        return [v for v in self.reductions if self._stage_of[v] == stage + 1]

    def _reduced(self, stage: int, begin: str, end: str) -> list[str]:
        """Returns the loop in which a thread reduces its elements."""
        reductions = self._reductions(stage)
        lines = [f"{self._type(v)} a{v} = {neutral(self._node(v))};" for v in reductions]
        body = self._element([self._node(v).operands[0] for v in reductions])
        for v in reductions:
            node = self._node(v)
            x = f"v{node.operands[0]}"
            term = f"({x} * {x})" if node.name == "sum_of_squares" else x
            term = f"({x} != 0)" if node.name in ("any", "all") else term
            body += [f"const {self._type(v)} t{v} = {term};", f"a{v} = {_step(node, f'a{v}', f't{v}')};"]
        return [*lines, *_loop(begin, end, body)]

    def _element(self, wanted: Sequence[Value]) -> list[str]:
        """Returns the definitions of values of one element, and of those from which they are computed."""
        seen: set[Value] = set()
        left = list(wanted)
        while left:
            v = left.pop()
            if self._moves(v) and v not in seen:
                seen.add(v)
                left += self._node(v).operands if v >= self._count else ()
        lines = _unravelled("i", "n", "i", self._inner_ndim)
        for v in sorted(seen):
            if v < self._count:
                at = f"q{v}{_offset('i', f'p{v}i', self._inner_ndim)}"
                lines.append(f"const {self._type(v)} v{v} = *(const {self._type(v)} *)({at});")
            else:
                lines.append(_definition(self.kernel, v))
        return lines

    def _stored(self, begin: str, end: str, once: str = "") -> list[str]:
        """Returns the statements that write the outputs of a row, those of elements from ``begin`` to ``end``."""
        lines = []
        outs = list(enumerate(self.kernel.outputs))
        if self.writes_elements:
            body = self._element([out.value for _, out in outs if not out.per_row])
            for k, out in outs:
                if not out.per_row:
                    at = f"z{k}{_offset('i', f'y{k}i', self._inner_ndim)}"
                    body.append(f"*({self._type(out.value)} *)({at}) = v{out.value};")
            lines += _loop(begin, end, body)
        for k, out in outs:
            if out.per_row:
                lines.append(f"if ({once}x == 0) *({self._type(out.value)} *)z{k} = v{out.value};")
        return lines

    def _tree(self, value: Value) -> str:
        return f"st_tree_{_suffix(self._node(value))}(a{value}, memory)"

    def _total(self, value: Value, combined: str) -> str:
        return f"{combined} / ({self._type(value)})n" if self._node(value).name == "mean" else combined


_SHARED = [f"__shared__ double memory[{MOST_THREADS}];", "const int x = threadIdx.x;"]

_SEGMENT = [
    "const long long row = blockIdx.x / segments, begin = blockIdx.x % segments * length;",
    "const long long end = begin + length < n ? begin + length : n;",
]
_ENDS = ("begin + x", "end")


def _suffix(node: Node) -> str:
    """Returns the end of the name of the function that combines partial results of a reduction."""
    return f"{STEPS[node.name]}_{node.dtype}"


def _loop(begin: str, end: str, body: Sequence[str]) -> list[str]:
    return [f"for (long long i = {begin}; i < {end}; i += blockDim.x) {{", *_indented(body), "}"]


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


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


@functools.lru_cache(1 << 8)
def row_source(kernel: Kernel, outer_ndim: int, inner_ndim: int, scalars: frozenset[int]) -> RowSource:
    """Returns the `RowSource` with these arguments."""
    return RowSource(kernel, outer_ndim, inner_ndim, scalars)
