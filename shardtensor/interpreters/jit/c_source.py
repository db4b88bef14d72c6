"""Writes the C text of kernels.

A kernel becomes a function ``int kernel_0(const long long *geometry, char *const *pointers, long long begin, long long
end)``, which computes the elements (the rows, if it reduces) from ``begin`` to ``end`` of the loop in row-major order,
and returns whether memory for intermediate results was missing. ``pointers`` are those of the inputs and the outputs;
the geometry consists of the number of loop dimensions, the number of those that make a row, the shape, and the strides
of each array in bytes.

The function walks over lines, and a body computes one line, in which each array is either contiguous or one element. An
array with another stride is packed into contiguous scratch memory first, a part of the line at a time. The loops of the
body carry ``omp simd``, which is right also where an output is an input: elements are computed independently.

A kernel with reductions computes a row in stages, each of which needs the reductions of those before it. Expensive
functions are stored for later stages, and others are computed again. Elements are combined in `LANES` partial results,
then by a tree, and segments of `SEGMENT` elements along a binary counter, so that the order of additions depends on
neither the CPU nor the number of threads. A short row has fewer lanes: those that the tree would add to others hold
nothing but neutral elements. The squares of a variance are added while a segment is in the cache, relative to its own
mean. ``kernel_0_part`` computes a part of one long contiguous row: in step 2 s some segments of stage s, in step
2 s + 1 the totals of all segments, in the last step the results of some elements.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardtensor.interpreters.jit.c_driver import DRIVER, HEAD
from shardtensor.interpreters.jit.expressions import (
    C_TYPES,
    EXPENSIVE,
    PRELUDE,
    STEPS,
    c_expression,
    has_c,
    library_functions,
    neutral,
)
from shardtensor.interpreters.jit.kernel import Kernel, Node, Value

LANES = 64
"""The most partial results of a reduction within a segment."""

SEGMENT = 1 << 12
"""The number of elements of a segment of a row."""


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


class RowParts(NamedTuple):
    """What ``kernel_0_part`` needs to compute a row.

    Attributes:
        steps: the number of steps.
        stored: the number of values that are stored for every element, in 8 bytes each (see ``ST_ROOM``).
        reductions: the number of reductions.
    """

    steps: int
    stored: int
    reductions: int


def row_parts(kernel: Kernel) -> RowParts:
    """Returns what a row of a kernel with rows is computed from."""
    return _Rows(0, kernel).parts()


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
        node = self.kernel.nodes[value - self.inputs]
        dtypes = [self.kernel.dtype(v) for v in node.operands]
        scalar = node.name == "clip" and not any(self.moves(v) for v in node.operands[1:])
        text = c_expression(node, [f"v{v}" for v in node.operands], dtypes, scalar_bounds=scalar)
        return f"const {self.type(value)} v{value} = {text};"

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
                *_indented([*self.pointers(), *[self.define(v) for v in nodes if not self.moves(v)]]),
                "    #pragma omp simd",
                "    for (long long i = 0; i < n; i++) {",
                *_indented(_indented([*loop, *stores])),
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
        self._moments = dict(self._find_moments())
        self._stage_of = self._stages()
        self._count = 1 + max(self._stage_of)
        self._stored: dict[Value, int] = {}
        self._known: list[set[Value]] = []
        self._needed = [self._needs(s) for s in range(self._count)]

    def moves(self, value: Value) -> bool:
        return not self.kernel.is_row(value)

    def _find_moments(self) -> Iterator[tuple[Value, _Moment]]:
        """Yields the sums of squares of ``x - mean(x)``, which are computed together with the mean: a variance then
        reads its operand once. If x takes long to compute, it is stored and read twice.
        """
        for v, node in enumerate(self.kernel.nodes, self.inputs):
            difference = self.kernel.node(node.operands[0])
            if node.name != "sum_of_squares" or difference is None or difference.name != "subtract":
                continue
            x, mean = difference.operands
            found = self.kernel.node(mean)
            if found is not None and found.reduces and found.name == "mean" and found.operands == (x,):
                closure = self._closure(x)
                if all((n := self.kernel.node(u)) is None or n.name not in EXPENSIVE for u in closure):
                    yield v, _Moment(x, mean, closure)

    def _closure(self, value: Value) -> list[Value]:
        """Returns the values that differ within a row and from which a value is computed, itself included, in order."""
        seen: set[Value] = set()
        wanted = [value]
        while wanted:
            v = wanted.pop()
            if v not in seen and self.moves(v):
                seen.add(v)
                node = self.kernel.node(v)
                wanted += node.operands if node is not None else ()
        return sorted(seen)

    def _stages(self) -> list[int]:
        """Returns the first stage in which each value can be computed."""
        stages = [0] * self.inputs
        for v, node in enumerate(self.kernel.nodes, self.inputs):
            moment = self._moments.get(v)
            first = max([stages[u] for u in node.operands]) + node.reduces
            stages.append(stages[moment.mean] if moment else first)
        return stages

    def _reductions(self, stage: int) -> list[tuple[Value, Node]]:
        """Returns the reductions whose operands are computed in a stage."""
        nodes = enumerate(self.kernel.nodes, self.inputs)
        return [(v, node) for v, node in nodes if node.reduces and self._stage_of[v] == stage + 1]

    def _needs(self, stage: int) -> list[Value]:
        """Returns the values that a stage computes or loads for each element, in order. Expensive ones that an earlier
        stage has computed are entered into `_stored`.
        """
        wanted = [node.operands[0] for v, node in self._reductions(stage) if v not in self._moments]
        if stage == self._count - 1:
            wanted += [out.value for out in self.kernel.outputs if not out.per_row and self.moves(out.value)]
        seen: set[Value] = set()
        while wanted:
            v = wanted.pop()
            node = self.kernel.node(v)
            if v in seen or not self.moves(v):
                continue
            seen.add(v)
            if node is None:
                continue
            earlier = [s for s, known in enumerate(self._known) if v in known]
            if earlier and node.name in EXPENSIVE:
                self._stored.setdefault(v, earlier[0])
            else:
                wanted += node.operands
        self._known.append(seen)
        return sorted(seen)

    def text(self) -> str:
        """Returns the text."""
        name, steps = self.name, self._count - 1
        moving = [self.moves(v) for v in range(self.inputs)] + [not out.per_row for out in self.kernel.outputs]
        lines = [self.comment(), *self.tables(moving)]
        for stage in range(steps):
            lines += self._stage(stage)
        lines += [f"static ST_APART void {name}_finish(ST_ROW) {{", *_indented(self._finish()), "}"]
        lines += [f"static void {name}_step(int step, ST_ROW) {{", "    switch (step) {"]
        for s in range(steps):
            lines.append(f"        case {2 * s}: {name}_stage{s}(ST_ROW_ARGUMENTS); break;")
            lines.append(f"        case {2 * s + 1}: {name}_join{s}(ST_ROW_ARGUMENTS); break;")
        lines += [f"        default: {name}_finish(ST_ROW_ARGUMENTS);", "    }", "}"]
        table = f"{len(moving)}, {self.inputs}, {name}_sizes, {name}_moves"
        reductions = len(self._totals)
        return "\n".join(
            [
                *lines,
                f"int {name}(const long long *g, char *const *p, long long begin, long long end) {{",
                f"    return st_rows({name}_step, {2 * steps}, {table}, {len(self._stored)}, {reductions}, g, p, "
                "begin, end);",
                "}",
                f"void {name}_part(int step, long long n, char *const *p, char *scratch, long long *totals, "
                "long long *parts, long long begin, long long end) {",
                f"    {name}_step(step, n, p, scratch, ST_ROOM(n), totals, parts, begin, end);",
                "}",
            ]
        )

    def parts(self) -> RowParts:
        """Returns what a row is computed from."""
        return RowParts(2 * (self._count - 1) + 1, len(self._stored), len(self._totals))

    @property
    def _totals(self) -> list[Value]:
        """The reductions, in the order of their totals."""
        return [v for v, node in enumerate(self.kernel.nodes, self.inputs) if node.reduces]

    def _known_in(self, stage: int) -> list[str]:
        """Returns the definitions of pointers and of values that do not move, as far as a stage knows them."""
        lines = self.pointers()
        for k, v in enumerate(self._stored):
            kind = self.memory_type(v)
            lines.append(f"{kind} *const w{v} = ({kind} *)(scratch + {k} * room);")
        for v, node in enumerate(self.kernel.nodes, self.inputs):
            if not self.moves(v) and self._stage_of[v] <= stage:
                total = f"*(const {self.type(v)} *)(totals + {self._totals.index(v)})" if node.reduces else ""
                lines.append(f"const {self.type(v)} v{v} = {total};" if node.reduces else self.define(v))
        return lines

    def _finish(self) -> list[str]:
        outs = list(enumerate(self.kernel.outputs))
        lines = self._known_in(self._count - 1)
        if any(not out.per_row for _, out in outs):
            element = _indented(self._element(self._count - 1))
            lines += ["#pragma omp simd", "for (long long i = begin; i < end; i++) {", *element, "}"]
        return lines + [f"if (begin == 0) *y{k} = v{out.value};" for k, out in outs if out.per_row]

    def _element(self, stage: int) -> list[str]:
        """Returns the statements for one element of a stage, that of index i."""
        lines = []
        for v in self._needed[stage]:
            loaded = v < self.inputs or self._stored.get(v, stage) < stage
            lines.append(self.load(v, "i") if loaded else self.define(v))
            if self._stored.get(v) == stage:
                lines.append(f"w{v}[i] = v{v};")
        if stage == self._count - 1:
            outs = enumerate(self.kernel.outputs)
            lines += [f"y{k}[i] = v{out.value};" for k, out in outs if not out.per_row]
        return lines

    def _stage(self, stage: int) -> list[str]:
        """Returns the function of a stage, which reduces segments from ``begin`` to ``end``, and that which joins the
        segments.
        """
        lanes, ends, joins = [], [], []
        element = self._element(stage)
        first_read = set(self._needed[stage]).difference(*self._needed[:stage])
        places = {v: k for k, (v, _) in enumerate(self._reductions(stage))}
        for k, (v, node) in enumerate(self._reductions(stage)):
            kind, name = C_TYPES[node.dtype], _suffix(node)
            if v in self._moments:
                ends += self._end_of_moment(v, places)
                joins += self._join_of_moment(v, places)
                continue
            (x,) = [f"v{u}" for u in node.operands]
            term = f"({x} * {x})" if node.name == "sum_of_squares" else x
            term = f"({x} != 0)" if node.name in ("any", "all") else term
            lanes += [f"{kind} a{v}[{LANES}];", f"for (int j = 0; j < width; j++) a{v}[j] = {neutral(node)};"]
            element += [f"const {kind} t{v} = {term};", f"a{v}[j] = {_step(node, f'a{v}[j]', f't{v}')};"]
            ends.append(f"*({kind} *)(parts + {k} * segments + k) = st_tree_{name}(a{v}, width);")
            empty = "0" if STEPS[node.name] == "add" else neutral(node)
            total = f"segments ? st_join_{name}(parts + {k} * segments, segments) : {empty}"
            total = f"({total}) / ({kind})n" if node.name == "mean" else total
            joins.append(f"*({kind} *)(totals + {self._totals.index(v)}) = {total};")
        return [
            f"static ST_APART void {self.name}_stage{stage}(ST_ROW) {{",
            *_indented(self._known_in(stage)),
            f"    const long long segments = (n + {SEGMENT - 1}) / {SEGMENT};",
            "    for (long long k = begin; k < end; k++) {",
            f"        const long long stop = n < (k + 1) * {SEGMENT} ? n : (k + 1) * {SEGMENT};",
            f"        const int width = st_width(stop - k * {SEGMENT}, {LANES});",
            *_indented(lanes, 2),
            f"        for (long long first = k * {SEGMENT}; first < stop; first += {LANES}) {{",
            f"            const int m = stop - first < {LANES} ? (int)(stop - first) : {LANES};",
            f"            if (m == {LANES}) {{",
            *[f"                ST_PREFETCH(x{v} + first, {LANES});" for v in sorted(first_read) if v < self.inputs],
            "            }",
            "            #pragma omp simd",
            "            for (int j = 0; j < m; j++) {",
            *_indented(["const long long i = first + j;", *element], 4),
            "            }",
            "        }",
            *_indented(ends, 2),
            "    }",
            "}",
            f"static ST_APART void {self.name}_join{stage}(ST_ROW) {{",
            f"    const long long segments = (n + {SEGMENT - 1}) / {SEGMENT};",
            *_indented(joins),
            "}",
        ]

    def _end_of_moment(self, v: Value, places: Mapping[Value, int]) -> list[str]:
        """Returns the statements that add the squares of a segment's deviations from its own mean."""
        moment, kind = self._moments[v], self.type(v)
        lines = [self.load(u, "i") if u < self.inputs else self.define(u) for u in moment.closure]
        return [
            "{",
            f"    const {kind} c = *(const {kind} *)(parts + {places[moment.mean]} * segments + k)"
            f" / ({kind})(stop - k * {SEGMENT});",
            f"    {kind} a[{LANES}];",
            "    for (int j = 0; j < width; j++) a[j] = -0.0;",
            f"    for (long long first = k * {SEGMENT}; first < stop; first += {LANES}) {{",
            f"        const int m = stop - first < {LANES} ? (int)(stop - first) : {LANES};",
            "        #pragma omp simd",
            "        for (int j = 0; j < m; j++) {",
            *_indented(["const long long i = first + j;", *lines], 3),
            f"            const {kind} d = v{moment.x} - c;",
            "            a[j] = a[j] + d * d;",
            "        }",
            "    }",
            f"    *({kind} *)(parts + {places[v]} * segments + k) = "
            f"st_tree_{_suffix(self.kernel.nodes[v - self.inputs])}(a, width);",
            "}",
        ]

    def _join_of_moment(self, v: Value, places: Mapping[Value, int]) -> list[str]:
        """Returns the statements that add the segments' sums of squares, each moved to the mean of the whole row (Chan,
        Golub & LeVeque, 1979).
        """
        moment, kind = self._moments[v], self.type(v)
        own, suffix = places[v], _suffix(self.kernel.nodes[v - self.inputs])
        return [
            "for (long long k = 0; k < segments; k++) {",
            f"    const {kind} count = ({kind})(k < segments - 1 ? {SEGMENT} : n - k * {SEGMENT});",
            f"    const {kind} d = *(const {kind} *)(parts + {places[moment.mean]} * segments + k) / count"
            f" - *(const {kind} *)(totals + {self._totals.index(moment.mean)});",
            f"    *({kind} *)(parts + {own} * segments + k) += count * (d * d);",
            "}",
            f"*({kind} *)(totals + {self._totals.index(v)}) = "
            f"segments ? st_join_{suffix}(parts + {own} * segments, segments) : 0;",
        ]


class _Moment(NamedTuple):
    """A sum of squares that is computed together with a mean.

    Attributes:
        x: the value whose deviations are squared.
        mean: its mean.
        closure: the values from which x is computed, itself included.
    """

    x: Value
    mean: Value
    closure: list[Value]


def _step(node: Node, a: str, b: str) -> str:
    """Returns the expression that combines two partial results of a reduction."""
    return c_expression(Node(STEPS[node.name], (0, 1), node.dtype), [a, b], [node.dtype] * 2)


def _suffix(node: Node) -> str:
    """Returns the suffix of the functions that combine partial results of a reduction."""
    return f"{STEPS[node.name]}_{node.dtype}"


def _combining(kernels: Sequence[Kernel]) -> list[str]:
    """Returns the functions that combine the partial results of the kernels' reductions."""
    nodes = {_suffix(node): node for kernel in kernels for node in kernel.nodes if node.reduces}
    return [
        f"ST_COMBINING({name}, {C_TYPES[node.dtype]}, {_step(node, 'a', 'b')})" for name, node in sorted(nodes.items())
    ]


def _indented(lines: Iterable[str], times: int = 1) -> list[str]:
    return [" " * 4 * times + line for line in lines]
