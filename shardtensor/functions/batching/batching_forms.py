"""The forms of batching rules: what an operator's row declares, so that it can be called once for a batch of examples.

A rule is a function of the call of one example, `Call`, whose batched operands have one more leading dimension, and
returns the results of all examples, with that dimension, too. Rules call operators only, so that they run in every
interpreter, and have derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from shardtensor.core import Op, Operands, bind, call
from shardtensor.sharding.layout import NamedSharding, as_sharding
from shardtensor.sharding.rules import normalize_axis, parse, reduced_axes
from shardtensor.sharding.spec import P
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.pytree import leaves
from shardtensor.tensor.tensor import ShardedTensor


class Call:
    """One call of an operator on values of a batch, in the form that its rule receives.

    Attributes:
        op: the operator.
        operands: its operands; those that are batched have one more leading dimension.
        leaves: the operands; of an operand that is a tree, its leaves.
        batched: for each leaf of the operands, whether it is.
        params: the values of its parameters, by name.
        size: the number of examples.
    """

    __slots__ = ("batched", "leaves", "op", "operands", "params", "size")

    def __init__(self, op: Op, operands: Operands, batched: Sequence[bool], params: dict[str, Any], size: int) -> None:
        self.op = op
        self.operands = operands
        self.leaves = leaves(operands) if op.signature.trees else list(operands)
        self.batched = batched
        self.params = params
        self.size = size

    def shape(self, number: int) -> tuple[int, ...]:
        """Returns the shape of one example of an operand."""
        shape = shape_of(self.leaves[number])
        return shape[1:] if self.batched[number] else shape

    def ndim(self, number: int = 0) -> int:
        """Returns the number of dimensions of one example of an operand."""
        return len(self.shape(number))

    def whole(self, number: int) -> Any:
        """Returns an operand with a leading dimension for the examples, whether it is batched or not."""
        x = self.leaves[number]
        if self.batched[number]:
            return x
        if type(x) is not ShardedTensor:
            x = call("asarray", x, device=self.beside().with_spec(P()))
        return call("broadcast_to", x, (self.size, *shape_of(x)))

    def wide(self, number: int, ndim: int) -> Any:
        """Returns an operand so that it broadcasts with others of which an example has ``ndim`` dimensions: with
        dimensions of size 1 behind the leading one.
        """
        x, shape = self.leaves[number], self.shape(number)
        if not self.batched[number] or len(shape) >= ndim:
            return x
        return call("reshape", x, (self.size, *[1] * (ndim - len(shape)), *shape))

    def layout(self, where: Any, ndim: int) -> NamedSharding:
        """Returns the layout of all examples, given that of one, of ``ndim`` dimensions: the examples stay where they
        are, along the mesh axes that the layout of one leaves.
        """
        one = as_sharding(where, ndim, self.op.error_name)
        chains = one.spec.chains_of(ndim)
        used = {a for chain in chains for a in chain} | one.spec.unreduced | one.spec.reduced
        for x, is_batched in zip(self.leaves, self.batched, strict=True):
            if is_batched and x.sharding.mesh == one.mesh:
                kept = tuple([a for a in x.sharding.spec.chains_of(x.ndim)[0] if a not in used])
                return one.with_spec(one.spec.with_chains((kept, *chains)))
        return one.with_spec(one.spec.with_chains(((), *chains)))

    def beside(self) -> NamedSharding:
        """Returns the layout of an array that a rule makes, of which the examples are where those of an operand are."""
        x = next(x for x, is_batched in zip(self.leaves, self.batched, strict=True) if is_batched)
        layout: NamedSharding = x.sharding
        return layout.with_spec(P(layout.spec.chains_of(x.ndim)[0]))

    def kept(self, result: Any) -> Any:
        """Returns a result with the examples where those of an operand are."""
        here, chains = self.beside(), result.sharding.spec.chains_of(result.ndim)
        used = {a for chain in chains[1:] for a in chain}
        first = tuple([a for a in here.spec.chains_of(1)[0] if a not in used])
        if here.mesh != result.sharding.mesh:
            return result
        return call("reshard", result, here.with_spec(P(first, *chains[1:])))

    def numbers(self) -> Any:
        """Returns the number of each example."""
        return call("arange", self.size, device=self.beside())

    def again(self, *operands: Any, **params: Any) -> Any:
        """Calls the operator with other operands, and with other values of some parameters. The parameter ``device`` is
        that of one example.
        """
        named = {**self.params, **params}
        if named.get("device") is not None:
            named["device"] = self.layout(named["device"], self.ndim())
        return bind(self.op, operands, tuple([named[name] for name in self.op.params]))


Rule = Callable[[Call], Any]


def elementwise(recorded: Call) -> Any:
    """The rule of elementwise operators: the dimensions of the examples are aligned."""
    leaves = recorded.leaves
    ndim = max([recorded.ndim(k) for k in range(len(leaves))])
    return recorded.again(*[recorded.wide(k, ndim) for k in range(len(leaves))])


def over_axes(recorded: Call) -> Any:
    """The rule of reductions over several axes, by default all of them."""
    axes = reduced_axes(recorded.params["axis"], recorded.ndim())
    return recorded.again(*recorded.operands, axis=tuple([a + 1 for a in axes]))


def along(name: str = "axis", *, of_result: int = 0, default: int | None = None) -> Rule:
    """Returns the rule of operators along one axis.

    Args:
        name: the name of the parameter.
        of_result: how many more dimensions the axis counts than the operand has.
        default: the axis in place of None; if there is none, None means that of all elements in row-major order.
    """

    def rule(recorded: Call) -> Any:
        axis = recorded.params[name]
        if axis is None and default is None:
            return _of_all(recorded, name)
        axis = normalize_axis(default if axis is None else axis, recorded.ndim() + of_result)
        return recorded.again(*[recorded.whole(k) for k in range(len(recorded.leaves))], **{name: axis + 1})

    return rule


def _of_all(recorded: Call, name: str) -> Any:
    """Returns the result of an operator along the elements of each example in row-major order."""
    size = [math.prod(recorded.shape(k)) for k in range(len(recorded.leaves))]
    flat = [call("reshape", recorded.whole(k), (recorded.size, n)) for k, n in enumerate(size)]
    result = recorded.again(*flat, **{name: 1})
    if not recorded.params.get("keepdims"):
        return result
    return call("reshape", result, (recorded.size, *[1] * recorded.ndim()))


def stacks(*core: int) -> Rule:
    """Returns the rule of operators of stacks: the last dimensions, ``core`` of each operand, are those of one item,
    and the ones before them are broadcast.
    """

    def rule(recorded: Call) -> Any:
        leaves = recorded.leaves
        loops = max([recorded.ndim(k) - core[k] for k, x in enumerate(leaves) if x is not None])
        return recorded.again(*[x if x is None else recorded.wide(k, loops + core[k]) for k, x in enumerate(leaves)])

    return rule


def product(recorded: Call) -> Any:
    """The rule of sums of products: the examples are one more dimension of the result."""
    import shardtensor.functions.numpy.products  # noqa: F401 - it declares `contract`, which few batches need

    op, params = recorded.op, recorded.params
    shapes = [recorded.shape(0), recorded.shape(1)]
    text = op.rule(shapes, **params) if callable(op.rule) else op.rule
    rule = parse(text[0] if isinstance(text, tuple) else text, tuple(map(len, shapes)), op.operands)
    target = ["batch", *rule.result]
    # Dimensions of size 1 that are broadcast have no place in a contraction: the operand is squeezed.
    terms, factors = [], []
    for k, names in enumerate(rule.operands):
        x, ones = recorded.leaves[k], []
        for d, n in enumerate(names):
            sizes = [s[t.index(n)] for s, t in zip(shapes, rule.operands, strict=True) if n in t]
            if shapes[k][d] == 1 and max(sizes) != 1:
                ones.append(d)
        if ones:
            x = call("squeeze", x, axis=tuple([d + recorded.batched[k] for d in ones]))
        terms.append([*["batch"] * recorded.batched[k], *[n for d, n in enumerate(names) if d not in ones]])
        factors.append(x)
    if op.name == "vecdot" and getattr(factors[0], "dtype", None) is not None and factors[0].dtype.kind == "c":
        factors[0] = call("conj", factors[0])
    if set(target) >= {n for term in terms for n in term}:  # Nothing is added: a product with broadcasting.
        return call("multiply", *[_aligned(x, term, target) for x, term in zip(factors, terms, strict=True)])
    # The order of a contraction: dimensions of both, of the first and of the second factor.
    both = [n for n in target if n in terms[0] and n in terms[1]]
    order = [*both, *[n for n in target if n in terms[0] and n not in both], *[n for n in target if n not in terms[0]]]
    label = {n: f"n{i}" for i, n in enumerate(dict.fromkeys([*terms[0], *terms[1]]))}
    left = ", ".join([" ".join([label[n] for n in term]) for term in terms])
    result = call("contract", *factors, rule=f"{left} -> {' '.join([label[n] for n in order])}")
    return result if order == target else call("permute_dims", result, tuple([order.index(n) for n in target]))


def _aligned(x: Any, names: Sequence[str], target: Sequence[str]) -> Any:
    """Returns an operand with its dimensions in the order of those of the result, and size 1 for others."""
    order = [n for n in target if n in names]
    if order != list(names):
        x = call("permute_dims", x, tuple([names.index(n) for n in order]))
    absent = tuple([d for d, n in enumerate(target) if n not in names])
    return call("expand_dims", x, axis=absent) if absent else x


RULES: dict[str, Rule] = {}
"""The rules by the names of operators. Elementwise operators have the rule `elementwise`."""


def rows(**rules: Rule) -> None:
    """Declares the rules of operators, given by name: their declarations need not be loaded."""
    RULES.update(rules)


def each(names: str, rule: Rule) -> dict[str, Rule]:
    """Returns the same rule for several operators, whose names are separated by blanks."""
    return dict.fromkeys(names.split(), rule)


def rule_of(op: Op) -> Rule | None:
    """Returns the rule of an operator; None if it has none."""
    rule = RULES.get(op.name)
    if rule is None and isinstance(op.rule, str) and set(op.rule.replace("->", "").replace(",", "").split()) == {"..."}:
        return elementwise
    return rule
