"""What is declared of operators: `Op`, its `Signature`, the `Parts` that implement it, its `TAGS`, and the table `OPS`.

A declaration is data. `shardtensor.core` makes it of a function and calls it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardtensor.errors import ArgumentError

Function = Callable[..., Any]
Operands = tuple[Any, ...]
Params = tuple[Any, ...]


TAGS: dict[str, str] = {
    "any dtype": "It moves elements of any dtype, or casts them, so that bfloat16 and float8 need no cast around it.",
    "array views": "A view of a scalar is an array, as ``x[...]`` is in NumPy.",
    "assigns": "It is the functional form of the assignment ``x[index] = value``.",
    "escapes": (
        "The call needs elements: the result leaves the library (a host array, a capsule), or its shape depends on "
        "them."
    ),
    "exact": "It is linear and rounds no element: the sum of its results has the bits of the result of the sum.",
    "fails late": "Of integers, the kernel can raise an error after it has written a part of its result.",
    "in kernels": "Kernels of programs compute it like a ufunc, which NumPy does not have.",
    "internal": "Users reach it through methods, protocols and other operators only.",
    "keeps arrays": (
        "A 0-d result is an array, as in NumPy; the 0-d results of other operators are scalars, and so is what a plan "
        "makes of scalars."
    ),
    "linear": "It is linear in all of its operands together, and has a batching rule, as the next three.",
    "linear in each": "It is linear in each of its two operands: a product.",
    "linear in the first": "It is linear in the first operand: a quotient.",
    "linear in the others": "It is linear in all operands but the first, together: a selection.",
    "lists only": "An array is rejected as the sequence of arrays, since its rows would be taken as the items.",
    "loop": "It is a loop: it calls its functions again and again, from a first carry, its first operand.",
    "product": (
        "It is a sum of products of its two operands, so that it is the sum of the results for parts of a contracted "
        "dimension, wherever these are."
    ),
    "many kernels": (
        "It has a monoid, and partial results take so many kernels that the first device computes those of few bytes."
    ),
    "prototype": "Its first operand gives the shape, dtype and layout of the result, and none of the elements.",
    "reads no host arrays": "Its algorithm has an inference that reads no element of a host array.",
    "same elements": "The result has the elements of the operand at the same places, in the same or in another layout.",
    "spmd": (
        "It is a map, a collective, a loop or a branch: it runs functions, or in functions, of which errors pass "
        "unchanged."
    ),
    "takes partial sums": "Its algorithm takes unreduced tensors as they are, and the result can be unreduced.",
    "unblocked": "It has a monoid, but never computes long operands of the host block by block.",
    "view if contiguous": "The result is a view where the elements of the operand are contiguous, and else a copy.",
    "view if straight": "The result is a view where the operand's elements have one stride, and else may be a copy.",
}
"""What a tag of operators says, by tag: each is true of its operators and read by a module that does not name them."""


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Signature:
    """The arguments of an operator.

    Attributes:
        operands: the names of the array arguments, in order; one name if the operator takes a sequence of arrays.
        params: the names of the other arguments, in order. `bind` receives their values, defaults included, and the
            items of an iterator in a tuple if the annotation is Iterable. Other params may be sequences, but no
            iterators, which the first use would exhaust.
        optional: the names of the operands that may be None, which is their default.
        options: the names of keyword arguments that the operator itself lacks. A call in which one of them differs from
            its default is that of the part ``extended``, a composition of operators; rules, kernels and plans never see
            them.
        variadic: whether the operator takes a sequence of arrays, as one argument or as ``*arrays``.
        trees: the names of the operands that are pytrees of arrays and other objects, such as indices.
        functions: the names of the params that are functions of tensors, or tuples of functions, which a loop or a
            branch calls: a program has a program for each of them.
        placeable: whether there is ``out_sharding``, which is not a parameter of the operator: a call that gives it is
            one of `place_result`.
    """

    operands: tuple[str, ...]
    params: tuple[str, ...]
    optional: tuple[str, ...]
    options: tuple[str, ...]
    variadic: bool
    trees: tuple[str, ...]
    functions: tuple[str, ...]
    placeable: bool

    def changed(self, **changes: Any) -> Signature:
        """Returns a copy with other values of some attributes."""
        return dataclasses.replace(self, **changes)


def signature_of(
    arguments: Mapping[str, inspect.Parameter],
    rule: Any,
    operands: Sequence[str] | None,
    variadic: bool,
    options: Sequence[str],
    trees: Sequence[str],
    functions: Sequence[str],
) -> Signature:
    """Derives a signature from the arguments of the declared function, by name, and from what the declaration says of
    them (see `shardtensor.core.declared`).
    """
    if operands is None:
        operands = tuple(arguments)[: rule.partition("->")[0].count(",") + 1 if isinstance(rule, str) else 1]
    return Signature(
        operands=tuple(operands),
        params=tuple([n for n in arguments if n not in (*operands, *options, "out_sharding")]),
        optional=tuple([n for n in operands if arguments[n].default is None]),
        options=tuple(options),
        variadic=variadic,
        trees=tuple(trees),
        functions=tuple(functions),
        placeable="out_sharding" in arguments,
    )


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Parts:
    """What `shardtensor.core.implements` attaches to an operator beside its declaration, by kind; None where an
    operator needs nothing of that kind.

    Attributes:
        kernel: the implementation on the arrays of one device, ``kernel(xp, context, *arrays, **params)``; None means
            the function of the same name in the backend's namespace.
        movement: for operators that only move elements: ``movement(avals, mesh, **params)`` returns a
            `shardtensor.functions.building.data_movement.DataMovement`.
        composed: for elementwise operators of arrays only, without other parameters, that libraries may lack: a
            function of the operands that composes the result, a new array, of other operators. It is used on the arrays
            of one device wherever the backend's namespace has no function of the operator's name. If NumPy has a ufunc
            of that name, the operands are first cast to the dtypes in which that computes, and the result to its dtype.
        composite: for operators that are composed of other operators: a function of the operator's own arguments. It
            returns NotImplemented for arguments with which the operator has to run itself.
        extended: for operators with options: a function of the operator's own arguments and, by name, of the options.
        small: for composed operators that return independent tensors: the function of the operator's own arguments that
            computes the results from whole host arrays, or returns NotImplemented. It is used for small results, for
            which the calls of other operators would take much longer.
        algorithm: for operators with a distributed algorithm instead of a plan made from the rule:
            ``algorithm(*operands, *params)``.
        announcing: for operators with an algorithm whose transfers follow from elements: the algorithm that records
            them as it runs, in place of ``algorithm`` where they are recorded.
        infer: for operators with an algorithm: ``infer(*operands, *params)`` returns the result, with each tensor
            without elements or its aval in its place, and records the transfers if a log is active. The plan of any
            other operator does both.
        view_spec: for operators that return a view in NumPy: ``view_spec(spec, *params)`` returns the view spec of the
            result, given that of the operand (see `shardtensor.sharding.view_spec`), or None where the result is a
            copy.
        blockwise: for elementwise operators that are not ufuncs: the function of the same operands and parameters that
            computes blocks of host arrays (see `shardtensor.host.blockwise`); for reductions and products, the kernel
            of blocks, where it is not that of shards.
        recorded: for collectives: ``recorded(backend, *operands, *params)`` is called in place of ``algorithm`` in a
            mapped function where the array library records a gradient of an array in the operands.
        derivative: how the operator is differentiated (see `shardtensor.functions.derivatives.forms`), or the name of
            the module that attaches it; None for an operator that is composed of others, whose derivatives are used,
            and before the row is loaded.
        batching: for operators of packages that batching does not know: the name of the module that says how `vmap`
            calls them.
    """

    kernel: Function | None = None
    movement: Function | None = None
    composed: Function | None = None
    composite: Function | None = None
    extended: Function | None = None
    small: Function | None = None
    algorithm: Function | None = None
    announcing: Function | None = None
    infer: Function | None = None
    view_spec: Function | None = None
    blockwise: Function | None = None
    recorded: Function | None = None
    derivative: Any = None
    batching: str | None = None

    def changed(self, **parts: Any) -> Parts:
        """Returns a copy in which some parts are others."""
        return dataclasses.replace(self, **parts)


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Op:
    """The declaration of an operator.

    Attributes:
        name: the public name.
        signature: its arguments.
        rule: how the dimensions of the operands correspond to those of the result (see `shardtensor.sharding.rules`);
            for an operator that creates arrays, a function that returns the shape and dtype of the result; None for an
            operator with a part ``movement``, ``composite`` or ``algorithm`` that determines the layout itself.
        combine: the name of the monoid (see `shardtensor.functions.building.monoids`) that combines the partial results
            of shards where a sharded dimension is reduced.
        dtype: the dtype of the result: a dtype, or a function of the operands, with one element each, and of the params
            that returns an array of it. None: that of NumPy's function of the same name; for an operator with a kernel
            and no monoid, that of the first array.
        error_name: the name that error messages begin with: for an internal operator, the public operator that it
            implements.
        ufunc: the name of the function that NumPy's floating-point errors name.
        gathers: the reason why devices may hold whole operands that are split, where the operator needs a whole
            dimension and no other one can take the split; empty for operators of which no device holds more than three
            times its share of the operands and of the result, and a constant.
        tags: what else is true of the operator (see `TAGS`).
        parts: what implements the operator.
        dispatch: the function that users call.
        operands: the names of the operands, as in the signature: every call reads them.
        params: the names of the params, likewise.
        is_ufunc: whether the operator is elementwise and NumPy has a ufunc of the same name.
        creates: whether the operator creates arrays on the device or sharding given by its parameter ``device``.
    """

    name: str
    signature: Signature
    rule: Any = None
    _: dataclasses.KW_ONLY
    combine: str | None = None
    dtype: Any = None
    error_name: str = ""
    ufunc: str = ""
    gathers: str = ""
    tags: frozenset[str] = frozenset()
    parts: Parts = dataclasses.field(default_factory=Parts)
    dispatch: Function = dataclasses.field(init=False)
    operands: tuple[str, ...] = dataclasses.field(init=False)
    params: tuple[str, ...] = dataclasses.field(init=False)
    is_ufunc: bool = dataclasses.field(init=False)
    creates: bool = dataclasses.field(init=False)
    _placed: Op | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        self.error_name = self.error_name or self.name
        self.ufunc = self.ufunc or self.name
        self.tags = frozenset(self.tags)
        if unknown := self.tags - TAGS.keys():
            raise ArgumentError(f"operator: {self.name} has the tag {min(unknown)!r}; wanted one of {sorted(TAGS)}")
        self.operands, self.params = self.signature.operands, self.signature.params
        elementwise = self.rule in ("... -> ...", "..., ... -> ...")
        self.is_ufunc = elementwise and isinstance(getattr(np, self.name, None), np.ufunc)
        self.creates = "device" in self.params and not isinstance(self.rule, str)

    @property
    def placed(self) -> Op | None:
        """The operator with the further parameter ``layout``, by which its plan combines partial results directly into
        that layout where it can; None if it has no monoid or its signature no ``out_sharding``.
        """
        if self._placed is None and self.combine and self.signature.placeable:
            signature = self.signature.changed(params=(*self.params, "layout"), placeable=False)
            self._placed = self.changed(signature=signature, parts=self.parts.changed(composite=None, small=None))
        return self._placed

    def changed(self, **changes: Any) -> Op:
        """Returns a copy with other values of some attributes. It is not in `OPS`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
        copy = Op(**values | changes)
        copy.dispatch = self.dispatch
        return copy

    def __repr__(self) -> str:
        return f"<operator {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (lookup, (self.name,)) if OPS.get(self.name) is self else (_lookup_placed, (self.name,))


class OperatorTable(dict[str, Op]):
    """The declared operators by name.

    Attributes:
        chapters: the modules that are imported when one of their names is first looked up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.chapters: dict[str, str] = {}

    def __missing__(self, name: str) -> Op:
        op: Op | None = self.get(name)
        if op is None:
            raise KeyError(name)
        return op

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the operator with the given name, or the default if there is none."""
        op = super().get(name)
        if op is None and name in self.chapters:
            importlib.import_module(self.chapters[name])
            op = super().get(name)
        return default if op is None else op


OPS = OperatorTable()
"""Every operator by name. Tests of all operators iterate over this table, after importing all chapters."""


def lookup(name: str) -> Op:
    """Returns the operator with the given name."""
    return OPS[name]


def _lookup_placed(name: str) -> Op | None:
    return lookup(name).placed
