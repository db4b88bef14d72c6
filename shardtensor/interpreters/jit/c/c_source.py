"""Writes the C text of kernels.

A kernel becomes a function ``int kernel_0(const long long *geometry, char *const *pointers, long long begin, long long
end)``, which computes the elements (the rows, if it reduces) from ``begin`` to ``end`` of the loop in row-major order,
and returns whether memory for intermediate results was missing. ``pointers`` are those of the inputs and the outputs;
the geometry consists of the number of loop dimensions, the number of those that make a row, the shape, and the strides
of each array in bytes.

The function walks over lines, and a body computes one line, in which each array is either contiguous or one element. An
array with another stride is packed into contiguous scratch memory first, a part of the line at a time. The loops of the
body carry ``omp simd``, which is right also where an output is an input: elements are computed independently.

A kernel with reductions computes a row in the stages of its `row_schedule`, with memory for stored values. Elements are
combined in `LANES` partial results, then by a tree, and segments of `SEGMENT` elements along a binary counter, so that
the order of additions depends on neither the CPU nor the number of threads. A short row has fewer lanes: those that the
tree would add to others hold nothing but neutral elements. The squares of a variance are added while a segment is in
the cache, relative to its own mean. ``kernel_0_part`` computes a part of one long contiguous row: in step 2 s some
segments of stage s, in step 2 s + 1 the totals of all segments, in the last step the results of some elements.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from shardtensor.interpreters.jit.c.c_driver import DRIVER, HEAD
from shardtensor.interpreters.jit.kernels.expressions import (
    C_TYPES,
    EXPENSIVE,
    PRELUDE,
    STEPS,
    definition,
    has_c,
    indented,
    library_functions,
    mask_type,
    neutral,
    plain_extremum,
    step,
    step_name,
    term,
)
from shardtensor.interpreters.jit.kernels.kernel import Kernel, Node, Value
from shardtensor.interpreters.jit.kernels.row_schedule import Stage, needs, row_schedule

LANES = 64
"""The most partial results of a reduction within a segment."""

SEGMENT = 1 << 12
"""The number of elements of a segment of a row."""

_LONG = 4
"""The number of elements of a lane from which on lanes are in registers, into and from which they are copied."""

_SHORT = 8
"""The number of values up to which the computation of an element is short: loops over such elements are unrolled."""


def c_source(kernels: Sequence[Kernel], vectorized: Iterable[str]) -> str:
    """Returns the text of a library with the functions ``kernel_0``, ``kernel_1``, … for kernels that `has_c`.

    Args:
        kernels: the kernels.
        vectorized: the functions of the mathematical library that exist in forms for vectors.
    """
    assert all(has_c(kernel) for kernel in kernels)
    used = set().union(*[library_functions(kernel) for kernel in kernels]) & set(vectorized)
    lines = []
    for name in sorted(used):
        kind = "float" if name.endswith("f") else "double"
        arguments = ", ".join([kind] * (2 if name.rstrip("f") in ("pow", "atan2", "hypot") else 1))
        lines.append(f'__attribute__((simd("notinbranch"))) {kind} {name}({arguments});')
    bodies = [
        _Rows(k, kernel).text() if kernel.row_ndim else _Lines(k, kernel).text() for k, kernel in enumerate(kernels)
    ]
    return "\n".join(
        [HEAD, *lines, PRELUDE, f"enum {{ ST_SEGMENT = {SEGMENT} }};", DRIVER, *_combining(kernels), *bodies]
    )


class _Body(abc.ABC):
    """The text of one kernel.

    Args:
        number: of the kernel in the library.
        kernel: the kernel.
    """

    def __init__(self, number: int, kernel: Kernel) -> None:
        self.name = f"kernel_{number}"
        self.kernel = kernel
        self.inputs = len(kernel.inputs)

    @abc.abstractmethod
    def moves(self, value: Value) -> bool:
        """Returns whether the elements of a value differ within a line (or row)."""

    def type(self, value: Value) -> str:
        """Returns the C type of a value."""
        return C_TYPES[self.kernel.dtype(value)]

    def memory_type(self, value: Value) -> str:
        """Returns the C type of a value in arrays."""
        dtype = self.kernel.dtype(value)
        return "unsigned char" if dtype == "b1" else C_TYPES[dtype]

    def load(self, value: Value, at: str) -> str:
        """Returns the definition of the variable of an input, or of a value in scratch memory."""
        test = " != 0" if self.kernel.dtype(value) == "b1" else ""
        pointer = f"x{value}" if value < self.inputs else f"w{value}"
        return f"const {self.type(value)} v{value} = {pointer}[{at}]{test};"

    def define(self, value: Value) -> str:
        """Returns the definition of the variable of a node."""
        return definition(self.kernel, value, self.moves)

    def pointers(self) -> list[str]:
        """Returns the definitions of the pointers to inputs and outputs, and of inputs that do not move."""
        lines = []
        for v in range(self.inputs):
            lines.append(f"const {self.memory_type(v)} *const x{v} = (const {self.memory_type(v)} *)p[{v}];")
            if not self.moves(v):
                lines.append(self.load(v, "0"))
        for k, out in enumerate(self.kernel.outputs):
            kind = self.memory_type(out.value)
            lines.append(f"{kind} *const y{k} = ({kind} *)p[{self.inputs + k}];")
        return lines

    def tables(self, moving: Sequence[bool]) -> list[str]:
        """Returns the definitions of the tables that the driver reads."""
        values = [*range(self.inputs), *[out.value for out in self.kernel.outputs]]
        sizes = ", ".join([self.kernel.dtype(v)[1] for v in values])
        moves = ", ".join([str(int(m)) for m in moving])
        return [
            f"static const unsigned char {self.name}_sizes[] = {{{sizes}}};",
            f"static const unsigned char {self.name}_moves[] = {{{moves}}};",
        ]

    def comment(self) -> str:
        """Returns the kernel as a comment."""
        return f"/* {self.kernel} */"


class _Lines(_Body):
    """The text of a kernel without reductions."""

    def moves(self, value: Value) -> bool:
        return bool(self.kernel.ndim) and self.kernel.varies(value)[-1]

    def text(self) -> str:
        """Returns the text."""
        nodes = range(self.inputs, self.kernel.values)
        stores = [f"y{k}[i] = v{out.value};" for k, out in enumerate(self.kernel.outputs)]
        loop = [self.load(v, "i") for v in range(self.inputs) if self.moves(v)]
        loop += [self.define(v) for v in nodes if self.moves(v)]
        count = self.inputs + len(self.kernel.outputs)
        moving = [self.moves(v) for v in range(self.inputs)] + [True] * len(self.kernel.outputs)
        return "\n".join(
            [
                self.comment(),
                *self.tables(moving),
                f"void {self.name}_line(long long n, char *const *p) {{",
                *indented([*self.pointers(), *[self.define(v) for v in nodes if not self.moves(v)]]),
                "    #pragma omp simd",
                "    for (long long i = 0; i < n; i++) {",
                *indented(indented([*loop, *stores])),
                "    }",
                "}",
                f"int {self.name}(const long long *g, char *const *p, long long begin, long long end) {{",
                f"    st_lines({self.name}_line, {count}, {self.inputs}, {self.name}_sizes, {self.name}_moves, g, p, "
                "begin, end);",
                "    return 0;",
                "}",
            ]
        )


class _Rows(_Body):
    """The text of a kernel with reductions."""

    def __init__(self, number: int, kernel: Kernel) -> None:
        super().__init__(number, kernel)
        self._schedule = row_schedule(kernel, stores=True)
        self._total = {v: k for k, v in enumerate(self._schedule.totals)}

    def moves(self, value: Value) -> bool:
        return not self.kernel.is_row(value)

    def _node(self, value: Value) -> Node:
        return self.kernel.nodes[value - self.inputs]

    def text(self) -> str:
        """Returns the text."""
        name, steps = self.name, len(self._schedule.stages) - 1
        moving = [self.moves(v) for v in range(self.inputs)] + [not out.per_row for out in self.kernel.outputs]
        lines = [self.comment(), *self.tables(moving)]
        for s in range(steps):
            lines += self._stage(s)
        lines += [f"static ST_APART void {name}_finish(ST_ROW) {{", *indented(self._finish()), "}"]
        lines += [f"static void {name}_step(int step, ST_ROW) {{", "    switch (step) {"]
        for s in range(steps):
            lines.append(f"        case {2 * s}: {name}_stage{s}(ST_ROW_ARGUMENTS); break;")
            lines.append(f"        case {2 * s + 1}: {name}_join{s}(ST_ROW_ARGUMENTS); break;")
        lines += [f"        default: {name}_finish(ST_ROW_ARGUMENTS);", "    }", "}"]
        table = f"{len(moving)}, {self.inputs}, {name}_sizes, {name}_moves"
        stored, reductions = len(self._schedule.stored), len(self._total)
        return "\n".join(
            [
                *lines,
                f"int {name}(const long long *g, char *const *p, long long begin, long long end) {{",
                f"    return st_rows({name}_step, {2 * steps}, {table}, {stored}, {reductions}, g, p, begin, end);",
                "}",
                f"void {name}_part(int step, long long n, char *const *p, char *scratch, long long *totals, "
                "long long *parts, long long begin, long long end) {",
                f"    {name}_step(step, n, p, scratch, ST_ROOM(n), totals, parts, begin, end);",
                "}",
            ]
        )

    def _known(self, s: int) -> list[str]:
        """Returns the definitions of pointers and of values that do not move, as far as a stage knows them."""
        lines = self.pointers()
        for k, v in enumerate(self._schedule.stored):
            kind = self.memory_type(v)
            lines.append(f"{kind} *const w{v} = ({kind} *)(scratch + {k} * room);")
        for v in self._schedule.known(s):
            if v in self._total:
                lines.append(f"const {self.type(v)} v{v} = *(const {self.type(v)} *)(totals + {self._total[v]});")
            elif v >= self.inputs:
                lines.append(self.define(v))
        return lines

    def _finish(self) -> list[str]:
        lines = self._known(len(self._schedule.stages) - 1)
        outs = list(enumerate(self.kernel.outputs))
        stores = [f"y{k}[i] = v{out.value};" for k, out in outs if not out.per_row]
        if stores:
            element = indented([*self._element(self._schedule.stages[-1]), *stores])
            lines += ["#pragma omp simd", "for (long long i = begin; i < end; i++) {", *element, "}"]
        return lines + [f"if (begin == 0) *y{k} = v{out.value};" for k, out in outs if out.per_row]

    def _element(self, stage: Stage) -> list[str]:
        """Returns the statements for one element of a stage, that of index i."""
        lines = []
        for v in stage.needs:
            lines.append(self.load(v, "i") if v in stage.loads else self.define(v))
            if v in self._schedule.stored and v not in stage.loads:
                lines.append(f"w{v}[i] = v{v};")
        return lines

    def _stage(self, s: int) -> list[str]:
        """Returns the function of a stage, which reduces segments from ``begin`` to ``end``, and that which joins the
        segments.
        """
        stage = self._schedule.stages[s]
        lanes, ends, joins = list[_Lanes](), [], []
        first_read = stage.loads.difference(*[before.needs for before in self._schedule.stages[:s]])
        part = {v: f"parts + {k} * segments" for k, v in enumerate(stage.reductions)}
        for v in stage.reductions:
            if v in self._schedule.moments:
                ends += self._end_of_moment(v, part)
                joins += self._join_of_moment(v, part)
                continue
            node, kind = self._node(v), self.type(v)
            lanes.append(_Lanes(f"a{v}", kind, node, term(node, f"v{node.operands[0]}")))
            ends.append(f"*({kind} *)({part[v]} + k) = st_tree_{step_name(node)}(a{v}, width);")
            empty = "0" if STEPS[node.name] == "add" else neutral(node)
            total = f"segments ? st_join_{step_name(node)}({part[v]}, segments) : {empty}"
            total = f"({total}) / ({kind})n" if node.name == "mean" else total
            joins.append(f"*({kind} *)(totals + {self._total[v]}) = {total};")
        inputs = sorted([v for v in first_read if v < self.inputs])
        return [
            f"static ST_APART void {self.name}_stage{s}(ST_ROW) {{",
            *indented(self._known(s)),
            f"    const long long segments = (n + {SEGMENT - 1}) / {SEGMENT};",
            "    for (long long k = begin; k < end; k++) {",
            f"        const long long stop = n < (k + 1) * {SEGMENT} ? n : (k + 1) * {SEGMENT};",
            f"        const int width = st_width(stop - k * {SEGMENT}, {LANES});",
            *indented(_reduced(self._element(stage), lanes, inputs, self._is_short(stage.needs, stage.loads)), 2),
            *indented(ends, 2),
            "    }",
            "}",
            f"static ST_APART void {self.name}_join{s}(ST_ROW) {{",
            f"    const long long segments = (n + {SEGMENT - 1}) / {SEGMENT};",
            *indented(joins),
            "}",
        ]

    def _is_short(self, values: Sequence[Value], loads: Collection[Value]) -> bool:
        """Returns whether values of each element, of which some are read and the others computed, take few
        instructions. None of them is stored then: those that are stored are expensive.
        """
        nodes = [self._node(v) for v in values if v not in loads]
        return len(values) <= _SHORT and EXPENSIVE.isdisjoint([node.name for node in nodes])

    def _end_of_moment(self, v: Value, part: Mapping[Value, str]) -> list[str]:
        """Returns the statements that add the squares of a segment's deviations from its own mean."""
        mean, kind = self._schedule.moments[v], self.type(v)
        (x,) = self._node(mean).operands
        values = needs(self.kernel, [x])
        loads = [u for u in values if u < self.inputs]
        lines = [self.load(u, "i") if u in loads else self.define(u) for u in values]
        squares = _Lanes("a", kind, self._node(mean), "d * d")
        return [
            "{",
            f"    const {kind} c = *(const {kind} *)({part[mean]} + k) / ({kind})(stop - k * {SEGMENT});",
            *indented(_reduced([*lines, f"const {kind} d = v{x} - c;"], [squares], (), self._is_short(values, loads))),
            f"    *({kind} *)({part[v]} + k) = st_tree_{step_name(self._node(v))}(a, width);",
            "}",
        ]

    def _join_of_moment(self, v: Value, part: Mapping[Value, str]) -> list[str]:
        """Returns the statements that add the segments' sums of squares, each moved to the mean of the whole row (Chan,
        Golub & LeVeque, 1979).
        """
        mean, kind, name = self._schedule.moments[v], self.type(v), step_name(self._node(v))
        return [
            "for (long long k = 0; k < segments; k++) {",
            f"    const {kind} count = ({kind})(k < segments - 1 ? {SEGMENT} : n - k * {SEGMENT});",
            f"    const {kind} d = *(const {kind} *)({part[mean]} + k) / count"
            f" - *(const {kind} *)(totals + {self._total[mean]});",
            f"    *({kind} *)({part[v]} + k) += count * (d * d);",
            "}",
            f"*({kind} *)(totals + {self._total[v]}) = segments ? st_join_{name}({part[v]}, segments) : 0;",
        ]


class _Lanes(NamedTuple):
    """The partial results of a reduction within a segment.

    Attributes:
        name: the name of their array.
        kind: their C type.
        node: the reduction.
        term: the expression of what they combine.
    """

    name: str
    kind: str
    node: Node
    term: str

    def array(self, name: str, width: str) -> list[str]:
        """Returns the definition of an array of so many lanes."""
        return [
            f"{self.kind} {name}[{LANES}];",
            f"for (int j = 0; j < {width}; j++) {name}[j] = {neutral(self.node)};",
        ]

    def step(self, name: str) -> list[str]:
        """Returns the statements that combine the term of an element with its lane in an array."""
        return [
            f"const {self.kind} t{name} = {self.term};",
            f"{name}[j] = {step(self.node, f'{name}[j]', f't{name}')};",
        ]

    def plain_step(self, name: str) -> list[str]:
        """Returns the statements that do so where the term is not NaN, and otherwise note the lane in ``nans``."""
        plain = plain_extremum(self.node, f"{name}[j]", f"t{name}")
        if not plain:
            return self.step(name)
        return [
            f"const {self.kind} t{name} = {self.term};",
            f"{name}[j] = {plain};",
            f"nans_{name}[j] |= t{name} != t{name};",
        ]


def _reduced(element: Sequence[str], lanes: Sequence[_Lanes], read: Iterable[Value], is_short: bool) -> list[str]:
    """Returns the statements that reduce a segment into lanes.

    Args:
        element: the statements for one element, that of index i in the lane of index j.
        lanes: the lanes of each reduction.
        read: the inputs that are read first, which are prefetched.
        is_short: whether an element takes few instructions, so that the lanes are in registers and loops are unrolled.
    """
    begin = f"k * {SEGMENT}"
    arrays = [line for one in lanes for line in one.array(one.name, "width")]
    steps = [*element, *[line for one in lanes for line in one.step(one.name)]]
    if not is_short or not lanes:
        return [*arrays, *_over_segment(steps, begin, read)]
    return [*arrays, f"long long left = {begin};", *_in_registers(element, lanes, read), *_over_segment(steps, "left")]


def _in_registers(element: Sequence[str], lanes: Sequence[_Lanes], read: Iterable[Value]) -> list[str]:
    """Returns the statements that reduce the elements of a segment from ``left`` on, as many as fill all lanes. An
    extremum is that of numbers, which takes half of the instructions: if there is a NaN, all elements are left.
    """
    copies = [(one, f"r{one.name}") for one in lanes]
    extrema = {name: mask_type(one.kind) for one, name in copies if plain_extremum(one.node, "", "")}
    found = " | ".join([f"nans_{name}[j]" for name in extrema])
    plain = [
        f"if (stop - left >= {_LONG * LANES}) {{",
        # Nothing else has the addresses of these arrays: the compiler keeps them in registers.
        *indented([line for one, name in copies for line in one.array(name, str(LANES))]),
        *[f"    {kind} nans_{name}[{LANES}] = {{0}};" for name, kind in extrema.items()],
        f"    for (; stop - left >= {LANES}; left += {LANES}) {{",
        *[f"        ST_PREFETCH(x{v} + left, {LANES});" for v in read],
        '        _Pragma("GCC unroll 16")',
        f"        for (int j = 0; j < {LANES}; j++) {{",
        *indented(["const long long i = left + j;", *element], 3),
        *indented([line for one, name in copies for line in one.plain_step(name)], 3),
        "        }",
        "    }",
    ]
    assigned = [f"{one.name}[j] = {name}[j];" for one, name in copies]
    if not extrema:
        return [*plain, f"    for (int j = 0; j < {LANES}; j++) {{ {' '.join(assigned)} }}", "}"]
    return [
        *plain,
        "    int nans = 0;",
        f"    for (int j = 0; j < {LANES}; j++) nans |= {found};",
        f"    if (nans) left = k * {SEGMENT};",
        f"    else for (int j = 0; j < {LANES}; j++) {{ {' '.join(assigned)} }}",
        "}",
    ]


def _over_segment(element: Iterable[str], begin: str, read: Iterable[Value] = ()) -> list[str]:
    """Returns the loop over the elements of a segment from ``begin`` on, and in each lane; inputs that are read first
    are prefetched.
    """
    prefetches = [f"        ST_PREFETCH(x{v} + first, {LANES});" for v in read]
    return [
        f"for (long long first = {begin}; first < stop; first += {LANES}) {{",
        f"    const int m = stop - first < {LANES} ? (int)(stop - first) : {LANES};",
        *([f"    if (m == {LANES}) {{", *prefetches, "    }"] if prefetches else []),
        "    #pragma omp simd",
        "    for (int j = 0; j < m; j++) {",
        *indented(["const long long i = first + j;", *element], 2),
        "    }",
        "}",
    ]


def _combining(kernels: Sequence[Kernel]) -> list[str]:
    """Returns the functions that combine the partial results of the kernels' reductions."""
    nodes = {step_name(node): node for kernel in kernels for node in kernel.nodes if node.reduces}
    return [
        f"ST_COMBINING({name}, {C_TYPES[node.dtype]}, {step(node, 'a', 'b')})" for name, node in sorted(nodes.items())
    ]
