"""The derivatives of products: the transposes follow from the rules of the operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import shardtensor.functions.numpy.products  # noqa: F401 - it declares `contract`, which the transposes call
from shardtensor.core import Op, call
from shardtensor.functions.derivatives.cotangents import Call, whole
from shardtensor.functions.derivatives.forms import Cotangents, Derivative, linear, rows, vjp
from shardtensor.functions.derivatives.of_indexing import scattered
from shardtensor.functions.numpy.differences import windows_of_convolution
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import Rule, parse
from shardtensor.tensor.operands import dtype_of, shape_of


class Product(Derivative):
    """The derivative of a sum of products of two operands: each transpose is such a sum, too."""

    def saves(self, op: Any, active: Sequence[bool]) -> Sequence[str]:
        """The other factor of each operand that has a gradient."""
        return [op.operands[1 - k] for k in range(2) if active[k]]

    def transposed(self, g: Any, call: Call) -> Cotangents:
        """Returns the products of the cotangent and of the other factors."""
        rule = rule_of(call.op, call.params, [shape_of(kind) for kind in call.kinds])
        g = whole(g, call.results[0])
        return [_factor(g, call, rule, k) if call.active[k] else None for k in range(2)]

    def pushed(self, tangents: Sequence[Any], call: Call) -> Any:
        """Returns the sum of the products of one tangent and of the other factor."""
        return _of_factors(tangents, call)


def _of_factors(tangents: Sequence[Any], recorded: Call) -> Any:
    (a, b), saved = recorded.op.operands, recorded.saved
    terms = [
        *([] if tangents[0] is None else [recorded.again(tangents[0], saved[b])]),
        *([] if tangents[1] is None else [recorded.again(saved[a], tangents[1])]),
    ]
    return terms[0] if len(terms) == 1 else call("add", *terms)


def rule_of(op: Op, params: Mapping[str, Any], shapes: Sequence[Shape]) -> Rule:
    """Returns the rule of a call, which names the dimensions of the factors and of the result."""
    params = {name: value for name, value in params.items() if name != "layout"}
    text = op.rule(shapes, **params) if callable(op.rule) else op.rule
    return parse(text[0] if isinstance(text, tuple) else text, tuple(map(len, shapes)), op.operands)


def _factor(g: Any, recorded: Call, rule: Rule, k: int) -> Any:
    """Returns the cotangent of factor k."""
    other, kind = recorded.saved[recorded.op.operands[1 - k]], recorded.kinds[k]
    conjugates = recorded.op.name == "vecdot"  # It conjugates its first factor.
    if conjugates and k == 1 and dtype_of(other).kind == "c":
        other = call("conj", other)
    shape, mine = shape_of(kind), rule.operands[k]
    g, of_g = _without_ones(g, rule.result)
    other, of_other = _without_ones(other, rule.operands[1 - k])
    # The sum over dimensions along which the operand was broadcast; it gets them back in the end.
    target = [n for n, size in zip(mine, shape, strict=True) if not (size == 1 and n.startswith("..."))]
    target = [n for n in target if n in of_g or n in of_other]
    g, of_g = _summed(g, of_g, [*target, *of_other])
    other, of_other = _summed(other, of_other, [*target, *of_g])
    both, own = [n for n in target if n in of_g and n in of_other], [n for n in target if n not in of_other]
    theirs = [n for n in target if n not in of_g]
    if [*both, *own, *theirs] != target and [*both, *theirs, *own] == target:
        g, of_g, other, of_other, own, theirs = other, of_other, g, of_g, theirs, own
    order = [*both, *own, *theirs]
    if not of_g or not of_other:
        result, order = g * other, [*of_g, *of_other]
    else:
        label = {n: f"n{i}" for i, n in enumerate(dict.fromkeys([*of_g, *of_other]))}
        terms = [" ".join([label[n] for n in names]) for names in (of_g, of_other, order)]
        fits = order == target and len(target) == len(shape)
        text = f"{terms[0]}, {terms[1]} -> {terms[2]}"
        result = recorded.add_up(k if fits else -1, "contract", g, other, rule=text)
    if order != target:
        result = call("permute_dims", result, tuple([order.index(n) for n in target]))
    if result.ndim != len(shape):
        sizes = dict(zip(target, result.shape, strict=True))
        result = call("reshape", result, tuple([sizes.get(n, 1) for n in mine]))
    if conjugates and k == 0 and result.dtype.kind == "c":
        result = call("conj", result)
    return result if result.shape == shape else call("broadcast_to", result, shape)


def _without_ones(x: Any, names: Sequence[str]) -> tuple[Any, list[str]]:
    """Removes the dimensions of size 1 that may be broadcast."""
    axes = tuple([d for d, n in enumerate(names) if x.shape[d] == 1 and n.startswith("...")])
    if not axes:
        return x, list(names)
    return call("squeeze", x, axis=axes), [n for d, n in enumerate(names) if d not in axes]


def _summed(x: Any, names: list[str], needed: Sequence[str]) -> tuple[Any, list[str]]:
    """Sums over the dimensions that neither the other factor nor the result has."""
    axes = tuple([d for d, n in enumerate(names) if n not in needed])
    return (call("sum", x, axis=axes), [n for n in names if n in needed]) if axes else (x, names)


def _of_diagonal(g: Any, recorded: Call) -> Any:
    names = ("offset", "axis1", "axis2")
    return scattered(g, recorded, lambda places: call("diagonal", places, **{n: recorded.params[n] for n in names}))


def _of_trace(g: Any, recorded: Call) -> Any:
    return _of_diagonal(call("expand_dims", g, axis=-1), recorded)


def _of_cross(g: Any, recorded: Call) -> list[Any]:
    p = recorded.params
    axes = [p["axisa"], p["axisb"], p["axisc"]] if p["axis"] is None else [p["axis"]] * 3
    a, b = [call("moveaxis", recorded.saved[n], axis, -1) for n, axis in zip("ab", axes, strict=False)]
    g = call("moveaxis", whole(g, recorded.results[0]), axes[2], -1)
    cotangents: list[Any] = []
    for k, (x, y) in enumerate(((b, g), (g, a))):
        if not recorded.active[k]:
            cotangents.append(None)
            continue
        product, shape = call("cross", x, y), (a, b)[k].shape
        more = product.ndim - len(shape)
        gone = [d for d in range(product.ndim) if d < more or (shape[d - more] == 1 and product.shape[d] != 1)]
        product = call("sum", product, axis=tuple(gone), keepdims=True) if gone else product
        cotangents.append(call("moveaxis", call("reshape", product, shape), -1, axes[k]))
    return cotangents


_FEW_PRODUCTS = 32
"""The most elements of the shorter array of a convolution of which each has a sum of its own as derivative, for which
no device gets a copy of the longer array.
"""


def _of_convolution(g: Any, recorded: Call) -> list[Any]:
    (n,), (m,) = map(shape_of, recorded.kinds)
    before = windows_of_convolution(n, m, recorded.params["mode"])[1]
    a, v = recorded.saved["a"], recorded.saved["v"]
    g = _of_full_convolution(g, recorded, before)
    of_a = call("convolved", g, call("flip", v), mode="valid") if recorded.active[0] else None
    if not recorded.active[1]:
        return [of_a, None]
    if m > _FEW_PRODUCTS:
        return [of_a, call("convolved", g, call("flip", a), mode="valid")]
    return [of_a, call("stack", [call("sum", g[k : k + n] * a) for k in range(m)])]


def _of_part_of_convolution(g: Any, recorded: Call) -> list[Any]:
    g = _of_full_convolution(g, recorded, recorded.params["before"])
    others = recorded.saved["v"], recorded.saved["a"]
    return [
        call("convolve_part", g, call("flip", x)) if a else None for a, x in zip(recorded.active, others, strict=True)
    ]


def _of_full_convolution(g: Any, recorded: Call, before: int) -> Any:
    """Returns the cotangent of all sums of products of two arrays, given that of some of them."""
    (n,), (m,) = map(shape_of, recorded.kinds)
    g, first = whole(g, recorded.results[0]), m - 1 - before
    return call("pad", g, ((first, n + m - 1 - first - g.shape[0]),))


rows(
    convolved=vjp(_of_convolution, "a", "v", pushed=_of_factors),
    convolve_part=vjp(_of_part_of_convolution, "a", "v", pushed=_of_factors),
    cross=vjp(_of_cross, "a", "b", pushed=_of_factors),
    matmul=Product(),
    contract=Product(),
    tensordot=Product(),
    vecdot=Product(),
    diagonal=linear(_of_diagonal),
    trace=linear(_of_trace),
)
