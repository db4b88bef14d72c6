"""Programs: what a function does to tensors, as data.

A program is pure: each of its values is computed once and never changes. A write in the traced function is an equation
whose result is the new value of the whole base. Nothing is fused and nothing is scheduled, so that interpreters that
compute gradients or map over an axis can read the same program.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardtensor.core import Op
from shardtensor.functions.random.random_keys import SymbolicKey, key_of
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.operands import HostAval, host_aval
from shardtensor.tensor.pytree import LEAF_TYPES, leaves, map_leaves
from shardtensor.tensor.value import Aval

ValueKind = Aval | HostAval | type
"""What a program knows of a value: the aval of a tensor or of a host array, or the type of a Python scalar, which is
weak: it does not promote a dtype.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Var:
    """A value of a program.

    Attributes:
        number: its number, unique in the program and in the programs of maps in it.
        kind: its aval, or the type of a Python scalar.
    """

    number: int
    kind: ValueKind

    def __hash__(self) -> int:
        return self.number  # Values are looked up more often than anything else while a program is prepared.

    def __str__(self) -> str:
        return f"v{self.number}"

    @property
    def typed(self) -> str:
        """The name with dtype, shape and spec: ``v0:f4[12,10]P('x')``."""
        return f"{self}:{kind_text(self.kind)}"


LEAF_TYPES.add(Var)


def kind_text(kind: ValueKind) -> str:
    """Returns dtype, shape and spec of a value as text: ``f4[12,10]P('x')``."""
    if isinstance(kind, type):
        return kind.__name__
    sizes = ",".join(map(str, kind.shape))
    where = kind.sharding.spec if isinstance(kind, Aval) else "host"
    return f"{kind.dtype.str.lstrip('<>|=')}[{sizes}]{where}"


@dataclasses.dataclass(eq=False, slots=True)
class Equation:
    """One call of an operator.

    Attributes:
        op: the operator.
        operands: its operands, a tuple of pytrees with a `Var` for each value and constants. If ``into`` is given, the
            base that is written precedes them.
        params: the values of its other parameters; for a view, none: ``into`` has the view spec.
        results: the result: a pytree with a `Var` for each value.
        into: for a view, the elements that it selects. For a write, those that the result of the operator replaces: the
            equation's result is the new value of the whole base. None for any other operator.
        window: for a view or a write, the aval of these elements; otherwise None.
        writes: whether it is a write.
        programs: for a map, the program of each call by number; for a loop or a branch, the program of each function.
            Their operands may be values of this program.
        source: file and line of the call.
        ignored: the floating-point errors that the function ignores there, as items of the arguments of `np.errstate`.
        adds_gradients: whether it adds gradients, of which eager mode adds the partial sums before it reduces them.
    """

    op: Op
    operands: tuple[Any, ...]
    params: tuple[Any, ...]
    results: Any
    into: ViewSpec | None = None
    window: Aval | HostAval | None = None
    writes: bool = False
    programs: Mapping[int, Program] = dataclasses.field(default_factory=dict)
    source: str = ""
    ignored: tuple[tuple[str, Any], ...] = ()
    adds_gradients: bool = False
    _reads: Sequence[Var] | None = dataclasses.field(default=None, init=False, repr=False)

    def reads(self) -> Sequence[Var]:
        """Returns the values that it reads, those that programs of a map take from outside included, each once."""
        if self._reads is None:  # Each pass asks for them, and they never change.
            values = dict.fromkeys(vars_of(self.operands))
            for program in self.programs.values():
                values.update(dict.fromkeys(program.free()))
            self._reads = tuple(values)
        return self._reads

    def makes(self) -> list[Var]:
        """Returns the values that it computes."""
        return vars_of(self.results)

    def lines(self) -> Iterator[str]:
        """Yields the lines of the printed form."""
        results = " ".join([v.typed for v in self.makes()]) or "()"
        operands = [x for x in self.operands if x is not Ellipsis]
        yield f"{results} = {self._called()} {' '.join(map(_text, operands))}".rstrip()
        inside = sorted(self.programs.items())
        if not self.op.signature.functions:
            inside = inside[:1]  # The calls of a map are mostly alike.
        for number, program in inside:
            yield from (f"    {number}: {line}" for line in program.lines())

    def _called(self) -> str:
        keywords = [
            f"{name}={_text(value)}"
            for name, value in zip(self.op.params, self.params, strict=False)
            if not callable(value) and value is not None and not (self.into and name == "view_spec")
        ]
        name = self.op.name + (f"({', '.join(keywords)})" if keywords else "")
        if self.into is None:
            return name
        window = f"[{window_text(self.into)}]"
        return f"put{window}" + ("" if "assigns" in self.op.tags else f" {name}") if self.writes else f"{name}{window}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def key(self) -> Any:
        """What equations are compared by: everything but their source."""
        inner = tuple((n, p.key()) for n, p in self.programs.items())
        params = tuple([_comparable(p) for p in self.params])
        return self.op.name, _comparable(self.operands), params, _comparable(self.results), _window(self.into), inner


_ADDRESS = re.compile(" at 0x[0-9a-f]+")


@dataclasses.dataclass(eq=False, slots=True)
class Program:
    """A traced function.

    Attributes:
        inputs: a value for each array and Python scalar among the arguments.
        captured: the values of tensors that the function closes over.
        equations: the calls of operators, in order.
        outputs: the values that are returned.
        writes: for each written input, its value and the value that it has after the call.
        positions: for the program of a call in a map, or of a function, the leaves of the arguments that are inputs.
        result: for such a program, its result: a pytree with a `Var` for each value.
    """

    inputs: Sequence[Var]
    captured: Sequence[Var]
    equations: Sequence[Equation]
    outputs: Sequence[Var]
    writes: Mapping[Var, Var] = dataclasses.field(default_factory=dict)
    positions: Sequence[int] = ()
    result: Any = None

    def free(self) -> list[Var]:
        """Returns the values that the program reads and neither gets nor computes: those of the program around it."""
        known = {*self.inputs, *self.captured}
        values: dict[Var, None] = {}
        for equation in self.equations:
            values.update(dict.fromkeys([v for v in equation.reads() if v not in known]))
            known.update(equation.makes())
        values.update(dict.fromkeys([v for v in self.outputs if v not in known]))
        return list(values)

    def made(self) -> list[Var]:
        """Returns the values that its equations compute."""
        return [v for equation in self.equations for v in equation.makes()]

    def avals(self) -> list[Aval]:
        """Returns the kinds of its values that are tensors."""
        kinds = [v.kind for v in (*self.inputs, *self.captured, *self.made())]
        return [kind for kind in kinds if isinstance(kind, Aval)]

    def makers(self) -> dict[Var, int]:
        """Returns the number of the equation of each value that is its only result."""
        return {e.results: k for k, e in enumerate(self.equations) if type(e.results) is Var}

    def users(self) -> dict[Var, list[int]]:
        """Returns the numbers of the equations that read each value, and -1 for an output or a write."""
        numbers: dict[Var, list[int]] = {v: [-1] for v in (*self.outputs, *self.writes.values())}
        for k, equation in enumerate(self.equations):
            for v in equation.reads():
                numbers.setdefault(v, []).append(k)
        return numbers

    def next_number(self) -> int:
        """Returns the first number that no value has, in programs of maps neither."""
        inner = [p.next_number() for equation in self.equations for p in equation.programs.values()]
        return max([v.number + 1 for v in (*self.inputs, *self.captured, *self.made())] + inner, default=0)

    def lines(self) -> Iterator[str]:
        """Yields the lines of the printed form."""
        inputs = ", ".join([v.typed for v in self.inputs])
        closed = "; " + ", ".join([v.typed for v in self.captured]) if self.captured else ""
        yield f"{{ lambda {inputs}{closed} ."
        for equation in self.equations:
            yield from (f"  {line}" for line in equation.lines())
        written = "".join([f" {before} := {after}" for before, after in self.writes.items()])
        yield f"  in ({', '.join(map(str, self.outputs))}){written} }}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def checksum(self) -> int:
        """Returns a checksum of what is the same in all processes that trace the program: not of the programs of maps,
        of which each process has its own, nor of the comparisons of their results in each process, and not of places in
        memory.
        """
        import zlib  # Programs of one process do not need it.

        ends = *self.inputs, *self.captured, *self.outputs, *itertools.chain(*self.writes.items())
        crc = zlib.crc32(" ".join([v.typed for v in ends]).encode())
        for equation in self.equations:
            if equation.op.name == "check_equal":
                continue
            crc = zlib.crc32(_ADDRESS.sub("", next(equation.lines())).encode(), crc)
            for constant in leaves((equation.operands, equation.params)):
                if isinstance(constant, np.ndarray) and not constant.dtype.hasobject:
                    crc = zlib.crc32(constant.tobytes(), crc)
        return crc

    def key(self) -> Any:
        """What programs are compared by."""
        return (
            tuple(self.inputs),
            tuple(self.captured),
            tuple([e.key() for e in self.equations]),
            tuple(self.outputs),
            tuple(self.writes.items()),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash((tuple(self.inputs), tuple(self.outputs), len(self.equations)))


def kind_of(operand: Any) -> Any:
    """Returns what is known of an operand before a call: its aval, also of an array that is a constant, or the type of
    a Python scalar or of another constant.
    """
    if type(operand) is Var:
        return operand.kind
    if isinstance(operand, (np.ndarray, np.generic)):
        return host_aval(operand.shape, operand.dtype)
    return type(operand)


def shape_of(v: Var) -> Shape:
    """Returns the shape of a value; a Python scalar has no dimensions."""
    return () if isinstance(v.kind, type) else v.kind.shape


def vars_of(tree: Any) -> list[Var]:
    """Returns the values in a pytree, from left to right, also those of keys."""
    if type(tree) is Var:
        return [tree]
    if type(tree) is tuple and LEAF_TYPES.issuperset(map(type, tree)):
        return [x for x in tree if type(x) is Var]
    tree_leaves = [x.bits if type(x) is SymbolicKey else x for x in leaves(tree)]
    return [x for x in tree_leaves if type(x) is Var]


def replace_vars(tree: Any, values: Any) -> Any:
    """Returns a pytree with ``values[v.number]`` in place of each value v, and the key of that in place of its key."""

    def replace(x: Any) -> Any:
        if type(x) is SymbolicKey:
            return key_of(values[x.bits.number])
        return values[x.number] if type(x) is Var else x

    return map_leaves(replace, tree)


def window_text(view_spec: ViewSpec) -> str:
    """Returns the elements that a view spec selects as an index: ``1:9, ::2``."""
    chain = [", ".join([_entry_text(e) for e in box.entries]) for box in view_spec.boxes]
    turned = [
        f" -> {box.order}" if box.order != tuple([d for d, e in enumerate(box.entries) if type(e) is not int]) else ""
        for box in view_spec.boxes
    ]
    parts = [entries + order for entries, order in zip(chain, turned, strict=True)]
    shapes = [f" as {box.over}: " if k else "" for k, box in enumerate(view_spec.boxes)]
    part = "" if view_spec.part is None else f" .{view_spec.part}"
    return "".join([shape + text for shape, text in zip(shapes, parts, strict=True)]) + part


def _entry_text(entry: Any) -> str:
    if type(entry) is int:
        return str(entry)
    begin, count, step = entry
    return f"{begin}:{begin + count * step}" + ("" if step == 1 else f":{step}")


def _window(view_spec: ViewSpec | None) -> Any:
    return None if view_spec is None else (view_spec.boxes, view_spec.part, view_spec.chains)


def _text(x: Any) -> str:
    if type(x) is SymbolicKey:
        return f"key({x.bits})"
    if isinstance(x, (list, tuple)):
        return f"({', '.join(map(_text, x))})"
    if isinstance(x, np.ndarray):
        return f"{x.dtype}{list(x.shape)}"
    return str(x) if isinstance(x, (Var, int, float, complex, np.generic)) else f"{x!r:.40}"


def _comparable(x: Any) -> Any:
    if isinstance(x, ViewSpec):
        return _window(x)
    if isinstance(x, np.ndarray):
        return x.dtype.str, x.shape, x.tobytes()
    if isinstance(x, (list, tuple)):
        return tuple([_comparable(v) for v in x])
    if type(x) is SymbolicKey:
        return SymbolicKey, x.bits
    return exact_key(x) if isinstance(x, (bool, int, float, complex)) else x


def exact_key(x: Any) -> Any:
    """Returns what a constant is compared by. Numbers that are equal, such as 0.0, -0.0 and False, also in tuples, are
    different constants, and a NaN is the same as another one.
    """
    if isinstance(x, tuple):
        return type(x), tuple([exact_key(v) for v in x])
    if isinstance(x, frozenset):
        return type(x), frozenset([exact_key(v) for v in x])
    if isinstance(x, np.generic):
        return type(x), x.dtype.str, x.tobytes()
    if isinstance(x, complex):
        return type(x), x.real.hex(), x.imag.hex()
    return type(x), x.hex() if isinstance(x, float) else x
