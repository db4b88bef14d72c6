"""The rule language and `propagate`: results computed by hand, and properties for any rule and any layout."""

from __future__ import annotations

import math
import re
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.host.units import counted
from shardtensor.sharding.rules import (
    Propagated,
    Rule,
    extremum,
    name_sizes,
    normalize_axes,
    parse,
    propagate,
    reduced_axes,
    reduction,
)
from tests.draws import drawn

AXES = {"x": 2, "y": 3, "z": 4, "i": 1}
"""The mesh of every test here: one letter an axis, ``i`` of size 1."""


def split(*dimensions: str) -> tuple[tuple[str, ...], ...]:
    """Chains of axes, a string of letters for each dimension: ``split("xy", "")``."""
    return tuple(tuple(d) for d in dimensions)


def lay_out(
    text: str,
    shapes: Any,
    layouts: Any,
    *,
    weights: Any = None,
    combines: bool = False,
) -> Propagated:
    rule = parse(text, tuple(map(len, shapes)))
    weights = [math.prod(s) for s in shapes] if weights is None else weights
    return propagate(rule, shapes, layouts, weights, AXES, combines=combines)


# -- the language ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ndims", "operands", "result", "whole"),
    [
        ("... -> ...", (0,), [()], (), set()),
        ("... -> ...", (2,), [("...2", "...1")], ("...2", "...1"), set()),
        ("..., ... -> ...", (1, 3), [("...1",), ("...3", "...2", "...1")], ("...3", "...2", "...1"), set()),
        ("d0 d1 -> d1", (2,), [("d0", "d1")], ("d1",), set()),
        ("d0 d1 -> 1 d1", (2,), [("d0", "d1")], ("1", "d1"), set()),
        ("d0 d1! -> d0 d1!", (2,), [("d0", "d1")], ("d0", "d1"), {"d1"}),
        ("d0! -> d0", (1,), [("d0",)], ("d0",), {"d0"}),
        ("d0 -> d0!", (1,), [("d0",)], ("d0",), {"d0"}),
        ("... i k, ... k j -> ... i j", (2, 2), [("i", "k"), ("k", "j")], ("i", "j"), set()),
        (
            "... i k, ... k j -> ... i j",
            (4, 3),
            [("...2", "...1", "i", "k"), ("...1", "k", "j")],
            ("...2", "...1", "i", "j"),
            set(),
        ),
        ("... -> new0 ...", (1,), [("...1",)], ("new0", "...1"), set()),
        ("-> n", (), [], ("n",), set()),
    ],
)
def test_parse(text: str, ndims: Any, operands: Any, result: Any, whole: Any) -> None:
    rule = parse(text, ndims)
    assert isinstance(rule, Rule)
    assert rule.operands == tuple(operands)
    assert rule.result == result
    assert rule.whole == whole


@pytest.mark.parametrize(
    ("text", "ndims", "culprit", "has"),
    [
        ("... i k, ... k j -> ... i j", (1, 2), 0, 1),
        ("... i k, ... k j -> ... i j", (2, 1), 1, 1),
        ("d0 d1 -> d1", (3,), 0, 3),
        ("d0 d1 -> d1", (1,), 0, 1),
        ("d0, d0 -> d0", (1, 0), 1, 0),
    ],
)
def test_parse_refuses_the_wrong_number_of_dimensions(text: str, ndims: Any, culprit: int, has: int) -> None:
    with pytest.raises(st.ShapeError, match=f"{culprit} has {counted(has, 'dimension')}"):
        parse(text, ndims)


# -- by hand ---------------------------------------------------------------------------------------

NONE = None

TABLE = {
    # rule, shapes, layouts -> operands, result, owed
    "one operand keeps its layout": (
        ("... -> ...", [(4, 6)], [split("x", "y")]),
        ([split("x", "y")], split("x", "y"), ""),
    ),
    "several axes on one dimension stay in order": (
        ("... -> ...", [(9, 6)], [split("yx", "")]),
        ([split("yx", "")], split("yx", ""), ""),
    ),
    "0-d": (("... -> ...", [()], [()]), ([()], (), "")),
    "operands agree": (
        ("..., ... -> ...", [(4, 6), (4, 6)], [split("x", "y"), split("x", "y")]),
        ([split("x", "y")] * 2, split("x", "y"), ""),
    ),
    "a replicated operand is cut where it is": (
        ("..., ... -> ...", [(4, 6), (4, 6)], [split("", ""), split("x", "y")]),
        ([split("x", "y")] * 2, split("x", "y"), ""),
    ),
    "what is elsewhere comes to what is here": (
        ("..., ... -> ...", [(4, 6), (4, 6)], [NONE, split("", "y")]),
        ([split("", "y")] * 2, split("", "y"), ""),
    ),
    "different dimensions, different axes": (
        ("..., ... -> ...", [(4, 6), (4, 6)], [split("x", ""), split("", "y")]),
        ([split("x", "y")] * 2, split("x", "y"), ""),
    ),
    "a broadcast dimension of size 1 stays whole": (
        ("..., ... -> ...", [(4, 6), (1, 6)], [split("x", "y"), split("", "")]),
        ([split("x", "y"), split("", "y")], split("x", "y"), ""),
    ),
    "an operand of fewer dimensions is aligned at the right": (
        ("..., ... -> ...", [(4, 6), (6,)], [split("x", "y"), split("")]),
        ([split("x", "y"), split("y")], split("x", "y"), ""),
    ),
    "both sides broadcast": (
        ("..., ... -> ...", [(4, 1), (1, 6)], [split("x", ""), split("", "y")]),
        ([split("x", ""), split("", "y")], split("x", "y"), ""),
    ),
    "a scalar": (
        ("..., ... -> ...", [(4, 6), ()], [split("x", "y"), NONE]),
        ([split("x", "y"), ()], split("x", "y"), ""),
    ),
    "size 1 on both sides is no broadcast": (
        ("..., ... -> ...", [(1, 6), (1, 6)], [split("x", ""), split("", "")]),
        ([split("x", "")] * 2, split("x", ""), ""),
    ),
    "transposed": (
        ("... i j -> ... j i", [(5, 4, 6)], [split("z", "x", "y")]),
        ([split("z", "x", "y")], split("z", "y", "x"), ""),
    ),
    "rows and columns of a product": (
        ("... i k, ... k j -> ... i j", [(4, 8), (8, 6)], [split("x", ""), split("", "y")], True),
        ([split("x", ""), split("", "y")], split("x", "y"), ""),
    ),
    "a contraction leaves partial sums along its axis": (
        ("... i k, ... k j -> ... i j", [(4, 8), (8, 6)], [split("", "x"), split("x", "")], True),
        ([split("", "x"), split("x", "")], split("", ""), "x"),
    ),
    "a contraction cuts the replicated operand": (
        ("... i k, ... k j -> ... i j", [(4, 8), (8, 6)], [split("", "x"), split("", "")], True),
        ([split("", "x"), split("x", "")], split("", ""), "x"),
    ),
    "a contraction split on both sides by different axes, the heavier one's first": (
        ("... i k, ... k j -> ... i j", [(4, 8), (8, 6)], [split("", "x"), split("y", "")], True),
        ([split("", "yx"), split("yx", "")], split("", ""), "yx"),
    ),
    "batches": (
        ("... i k, ... k j -> ... i j", [(3, 4, 8), (3, 8, 6)], [split("x", "", "y"), split("", "", "")], True),
        ([split("x", "", "y"), split("x", "y", "")], split("x", "", ""), "y"),
    ),
    "a product without a monoid is whole where it sums": (
        ("... i k, ... k j -> ... i j", [(1, 8), (8, 1)], [split("", "x"), split("x", "")], False),
        ([split("", ""), split("", "")], split("", ""), ""),
    ),
    "a sum": (
        ("d0 d1 -> d1", [(4, 6)], [split("x", "y")], True),
        ([split("x", "y")], split("y"), "x"),
    ),
    "a sum over several axes leaves partial sums along them, in the order of the chain": (
        ("d0 d1 -> d1", [(4, 6)], [split("zx", "y")], True),
        ([split("zx", "y")], split("y"), "zx"),
    ),
    "a sum of everything": (
        ("d0 d1 -> ", [(4, 6)], [split("x", "y")], True),
        ([split("x", "y")], (), "xy"),
    ),
    "a sum that keeps its dimension": (
        ("d0 d1 -> 1 d1", [(4, 6)], [split("x", "y")], True),
        ([split("x", "y")], split("", "y"), "x"),
    ),
    "axes of size 1 owe nothing": (
        ("d0 d1 -> d1", [(4, 6)], [split("i", "y")], True),
        ([split("i", "y")], split("y"), ""),
    ),
    "axes of size 1 owe nothing, beside others": (
        ("d0 d1 -> d1", [(4, 6)], [split("ix", "")], True),
        ([split("ix", "")], split(""), "x"),
    ),
    "what must be whole gives its axis to another dimension": (
        ("d0 d1! -> d0 d1!", [(4, 6)], [split("", "x")]),
        ([split("x", "")], split("x", ""), ""),
    ),
    "to the largest one": (
        ("a b c! -> a b c!", [(4, 7, 6)], [split("", "", "x")]),
        ([split("", "x", "")], split("", "x", ""), ""),
    ),
    "to the first of the largest ones": (
        ("a b c! -> a b c!", [(7, 7, 6)], [split("", "", "x")]),
        ([split("x", "", "")], split("x", "", ""), ""),
    ),
    "to the largest free one": (
        ("a b c! -> a b c!", [(4, 7, 6)], [split("", "y", "x")]),
        ([split("x", "y", "")], split("x", "y", ""), ""),
    ),
    "two of them to two": (
        ("a b c! -> a b c!", [(4, 7, 6)], [split("", "", "xy")]),
        ([split("y", "x", "")], split("y", "x", ""), ""),
    ),
    "or is gathered where none is free": (
        ("d0 d1! -> d0 d1!", [(4, 6)], [split("y", "x")]),
        ([split("y", "")], split("y", ""), ""),
    ),
    "or is gathered where none has a size to split": (
        ("d0 d1! -> d0 d1!", [(1, 6)], [split("", "x")]),
        ([split("", "")], split("", ""), ""),
    ),
    "or is gathered where it is alone": (
        ("d0! -> d0!", [(6,)], [split("x")]),
        ([split("")], split(""), ""),
    ),
    "a dimension that vanishes without a monoid gives its axis to one that stays": (
        ("d0 d1 -> d1", [(4, 6)], [split("x", "")], False),
        ([split("", "x")], split("x"), ""),
    ),
    "an axis of size 1 moves nowhere": (
        ("d0 d1! -> d0 d1!", [(4, 6)], [split("", "i")]),
        ([split("", "")], split("", ""), ""),
    ),
    "a new dimension is whole": (
        ("... -> new0 ...", [(6,)], [split("x")]),
        ([split("x")], split("", "x"), ""),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_propagate(name: str) -> None:
    (text, shapes, layouts, *combines), (operands, result, partial_axes) = TABLE[name]
    laid = lay_out(text, shapes, layouts, combines=bool(combines and combines[0]))
    assert laid.operands == tuple(operands)
    assert laid.result == result
    assert laid.partial_axes == tuple(partial_axes)


def test_a_result_keeps_the_split_of_a_name_that_is_whole_in_the_operand_only() -> None:
    alone = lay_out("d0! -> d0", [(6,)], [split("x")])
    assert (alone.operands, alone.result, alone.kept) == ((split(""),), split(""), split("x"))
    moved = lay_out("d0 d1! -> d0 d1", [(4, 6)], [split("", "x")])
    assert (moved.result, moved.kept) == (split("x", ""), split("x", ""))
    both = lay_out("d0! -> d0!", [(6,)], [split("x")])
    assert both.kept == split("")


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ([10, 20], split("", "x")),  # the heavier one wins
        ([20, 10], split("x", "")),
        ([10, 10], split("x", "")),  # on a tie the left one does
        ([0, 0], split("x", "")),
    ],
)
def test_conflict_about_an_axis(weights: list[int], wanted: Any) -> None:
    laid = lay_out("..., ... -> ...", [(6, 6), (6, 6)], [split("x", ""), split("", "x")], weights=weights)
    assert laid.operands == (wanted, wanted)
    assert laid.result == wanted


def test_heaviest_of_three_wins() -> None:
    layouts = [split("x", "", ""), split("", "x", ""), split("", "", "x")]
    for heaviest in range(3):
        weights = [5 + 5 * (i == heaviest) for i in range(3)]
        laid = lay_out("..., ..., ... -> ...", [(6, 6, 6)] * 3, layouts, weights=weights)
        assert laid.operands == (layouts[heaviest],) * 3


@pytest.mark.parametrize(("weights", "wanted"), [([9, 8], split("x", "")), ([8, 9], split("", "x"))])
def test_an_axis_is_used_once_in_the_result(weights: list[int], wanted: Any) -> None:
    """The rows of one operand and the columns of the other have the same axis: the smaller operand is gathered."""
    text, shapes, layouts = "... i k, ... k j -> ... i j", [(4, 8), (8, 6)], [split("x", ""), split("", "x")]
    laid = lay_out(text, shapes, layouts, weights=weights, combines=True)
    assert laid.result == wanted
    rows, columns = wanted
    assert laid.operands == ((rows, ()), ((), columns))
    assert laid.partial_axes == ()


@pytest.mark.parametrize(("weights", "wanted"), [([9, 8], "xy"), ([8, 9], "yx"), ([8, 8], "xy")])
def test_one_dimension_split_by_both(weights: list[int], wanted: str) -> None:
    laid = lay_out("..., ... -> ...", [(12,), (12,)], [split("x"), split("y")], weights=weights)
    assert laid.operands == (split(wanted),) * 2
    assert laid.result == split(wanted)


def test_a_contraction_conflicts_with_a_row() -> None:
    """The same axis splits the rows of one operand and the contracted dimension of the other: the larger operand
    decides.
    """
    text, shapes, layouts = "... i k, ... k j -> ... i j", [(4, 8), (8, 6)], [split("x", ""), split("x", "")]
    laid = lay_out(text, shapes, layouts, weights=[2, 1], combines=True)
    assert (laid.operands, laid.partial_axes) == ((split("x", ""), split("", "")), ())
    laid = lay_out(text, shapes, layouts, weights=[1, 2], combines=True)
    assert (laid.operands, laid.partial_axes) == ((split("", "x"), split("x", "")), ("x",))


def test_split_of_size_1_that_broadcasts() -> None:
    """The dimension becomes whole and loses its axis; the other operand is sliced on its devices, or stays."""
    laid = lay_out("..., ... -> ...", [(1, 6), (4, 6)], [split("x", ""), split("", "")])
    assert laid.operands[0][0] == ()
    assert laid.operands[1] == laid.result
    assert sum(chain.count("x") for chain in laid.result) <= 1


def test_result_shapes() -> None:
    assert lay_out("..., ... -> ...", [(4, 1), (6,)], [None, None]).shape == (4, 6)
    assert lay_out("..., ... -> ...", [(4, 1), (0,)], [None, None]).shape == (4, 0)
    assert lay_out("... i k, ... k j -> ... i j", [(2, 4, 8), (8, 6)], [None, None], combines=True).shape == (2, 4, 6)
    assert lay_out("d0 d1 -> 1 d1", [(4, 6)], [None], combines=True).shape == (1, 6)
    assert lay_out("d0 d1 -> ", [(4, 6)], [None], combines=True).shape == ()


# -- sizes -----------------------------------------------------------------------------------------


@hypothesis.given(data=some.data())
def test_broadcasting_as_in_numpy(data: Any) -> None:
    some_shape = some.lists(some.sampled_from([0, 1, 1, 1, 2, 3]), max_size=3).map(tuple)
    shapes = [data.draw(some_shape) for _ in range(data.draw(some.integers(1, 3)))]
    text = f"{', '.join(['...'] * len(shapes))} -> ..."
    try:
        wanted = np.broadcast_shapes(*shapes)
    except ValueError:
        with pytest.raises(st.ShapeError):
            lay_out(text, shapes, [None] * len(shapes))
    else:
        assert lay_out(text, shapes, [None] * len(shapes)).shape == wanted


@pytest.mark.parametrize(
    ("text", "shapes", "sizes"),
    [
        ("..., ... -> ...", [(4, 6), (5, 6)], ("4", "5")),
        ("..., ... -> ...", [(4,), (5, 7)], ("4", "7")),
        ("..., ... -> ...", [(0,), (3,)], ("0", "3")),
        ("... i k, ... k j -> ... i j", [(4, 8), (7, 6)], ("8", "7")),
        ("... i k, ... k j -> ... i j", [(4, 1), (7, 6)], ("1", "7")),  # only `...` broadcasts
        ("... i k, ... k j -> ... i j", [(3, 4, 8), (2, 8, 6)], ("3", "2")),
        ("a, a -> a", [(1,), (2,)], ("1", "2")),
        ("..., ..., ... -> ...", [(1,), (3,), (4,)], ("3", "4")),
    ],
)
def test_sizes_that_do_not_fit_are_named(text: str, shapes: Any, sizes: tuple[str, str]) -> None:
    with pytest.raises(st.ShapeError) as caught:
        lay_out(text, shapes, [None] * len(shapes))
    message = str(caught.value)
    assert re.search(rf"size {sizes[0]} in dimension \d.*\b{sizes[1]} in dimension \d", message)
    culprits = [s for s in shapes if any(size in map(str, s) for size in sizes)]
    for shape in culprits[-2:]:
        assert str(shape) in message


def test_name_sizes() -> None:
    rule = parse("... i k, ... k j -> ... i j", (3, 2))
    assert name_sizes(rule, [(1, 4, 8), (8, 6)]) == {"...1": 1, "i": 4, "k": 8, "j": 6}
    rule = parse("..., ..., ... -> ...", (1, 1, 1))
    assert name_sizes(rule, [(1,), (5,), (1,)]) == {"...1": 5}


# -- any rule, any layout --------------------------------------------------------------------------


@some.composite
def calls(draw: Any) -> tuple[str, list[tuple[int, ...]], list[Any], list[int], bool]:
    """A rule, and operands that fit it."""
    names = ["a", "b", "c", "d", "e"]
    sizes = {n: draw(some.sampled_from([0, 1, 2, 5, 6, 7])) for n in names}
    marks = {n: "!" if draw(some.integers(0, 4)) == 0 else "" for n in names}
    dots = draw(some.lists(some.sampled_from([1, 2, 5, 8]), max_size=2))
    terms, shapes, layouts = [], [], []
    for _ in range(draw(some.integers(1, 3))):
        term = draw(some.lists(some.sampled_from(names), max_size=3, unique=True))
        shape = [sizes[n] for n in term]
        at = draw(some.integers(-1, len(term)))
        if at >= 0:
            tail = dots[draw(some.integers(0, len(dots))) :]
            tail = [1 if draw(some.integers(0, 2)) == 0 else n for n in tail]
            shape[at:at] = tail
            term = [*term[:at], "...", *term[at:]]
        chains: list[tuple[str, ...]] = [()] * len(shape)
        for axis in draw(some.permutations(list(AXES))):
            home = draw(some.integers(-1, len(shape) - 1))
            if home >= 0:
                chains[home] = (*chains[home], axis)
        terms.append(term)
        shapes.append(tuple(shape))
        layouts.append(None if draw(some.integers(0, 5)) == 0 else tuple(chains))
    known = sorted({n for term in terms for n in term if n != "..."})
    result = draw(some.permutations([*known, "..."]))[: draw(some.integers(0, len(known) + 1))]
    result.insert(draw(some.integers(0, len(result))), "1") if draw(some.booleans()) else None

    def write(term: list[str]) -> str:
        return " ".join(n + marks.get(n, "") for n in term)

    text = f"{', '.join(map(write, terms))} -> {write(result)}"
    weights = [draw(some.integers(0, 3)) for _ in terms]
    return text, shapes, layouts, weights, draw(some.booleans())


@pytest.mark.slow
@hypothesis.settings(max_examples=drawn(600))
@hypothesis.given(call=calls())
def test_any_rule_and_any_layout(call: Any) -> None:
    text, shapes, layouts, weights, combines = call
    rule = parse(text, tuple(map(len, shapes)))
    sizes = name_sizes(rule, shapes)
    laid = propagate(rule, shapes, layouts, weights, AXES, combines=combines)

    chains: dict[str, tuple[str, ...]] = {}
    for names, shape, operand in zip(rule.operands, shapes, laid.operands, strict=True):
        assert len(operand) == len(shape)
        used = [axis for chain in operand for axis in chain]
        assert len(used) == len(set(used))  # never twice in one operand
        for name, size, chain in zip(names, shape, operand, strict=True):
            if size != sizes[name]:
                assert chain == ()  # what is broadcast is whole
            else:
                assert chains.setdefault(name, chain) == chain  # a name is split in one way
    used = [axis for chain in laid.result for axis in chain]
    assert len(used) == len(set(used))
    assert len(laid.result) == len(rule.result)
    for name, chain in zip(rule.result, laid.result, strict=True):
        assert chain == chains.get(name, ())
    for name in rule.whole:
        assert chains.get(name, ()) == ()

    gone = [n for n in chains if n not in rule.result]
    partial_axes = [axis for n in gone for axis in chains[n] if AXES[axis] > 1]
    assert sorted(laid.partial_axes) == sorted(partial_axes)
    assert not set(partial_axes) & set(used)  # what is owed is not in the result
    if not combines:
        assert laid.partial_axes == ()
        assert all(chains[n] == () for n in gone)

    # No axis comes from nowhere.
    given_axes = {axis for layout in layouts if layout is not None for chain in layout for axis in chain}
    assert {axis for chain in chains.values() for axis in chain} <= given_axes

    # The operand that would cost most to move stays, but for what must be whole.
    order = sorted(range(len(shapes)), key=lambda i: -weights[i])
    heaviest = next((i for i in order if layouts[i] is not None), None)
    if heaviest is not None:
        whole = set(rule.whole) | ({n for n in sizes if n not in rule.result} if not combines else set())
        for name, size, had in zip(rule.operands[heaviest], shapes[heaviest], layouts[heaviest], strict=True):
            if name not in whole and size == sizes[name]:
                assert chains[name][: len(had)] == had


@hypothesis.settings(max_examples=drawn(300))
@hypothesis.given(call=calls())
def test_propagating_again_changes_nothing(call: Any) -> None:
    """Operands that have the required layout keep it."""
    text, shapes, layouts, weights, combines = call
    rule = parse(text, tuple(map(len, shapes)))
    once = propagate(rule, shapes, layouts, weights, AXES, combines=combines)
    again = propagate(rule, shapes, once.operands, weights, AXES, combines=combines)
    assert again == once


# -- axes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "ndim", "wanted"),
    [
        (1, 3, (1,)),
        (-1, 3, (2,)),
        (-3, 3, (0,)),
        ((2, 0), 3, (2, 0)),
        ((-1, 0), 3, (2, 0)),
        ([1, -1], 3, (1, 2)),
        ((), 3, ()),
        (np.int64(1), 2, (1,)),
        ((np.int8(-1),), 2, (1,)),
    ],
)
def test_normalize_axes(axis: Any, ndim: int, wanted: Any) -> None:
    assert normalize_axes(axis, ndim) == wanted
    assert reduced_axes(axis, ndim) == wanted


@pytest.mark.parametrize("ndim", [0, 3])
def test_no_axis_means_all_axes_to_reductions(ndim: int) -> None:
    assert reduced_axes(None, ndim) == tuple(range(ndim))


@pytest.mark.parametrize(
    ("axis", "ndim", "culprit"),
    [
        (3, 3, "axis 3 is out of range for 3 dimensions"),
        (-4, 3, "axis -4 is out of range for 3 dimensions"),
        (0, 0, "axis 0 is out of range for an array without dimensions"),
        ((0, 5), 3, "axis 5 is out of range"),
        ((1, 1), 3, r"axis 1 occurs twice in \(1, 1\)"),
        ((0, -3), 3, r"axis -3 occurs twice in \(0, -3\)"),
    ],
)
def test_axes_that_are_not_there(axis: Any, ndim: int, culprit: str) -> None:
    with pytest.raises(st.AxisError, match=culprit) as caught:
        normalize_axes(axis, ndim)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, IndexError)


@pytest.mark.parametrize("axis", [None, 1.0, "0", (0, 1.5), (None,), {0}, True, (0, False)], ids=repr)
def test_axes_that_are_no_numbers(axis: Any) -> None:
    with pytest.raises(st.ArgumentTypeError, match="wanted an integer"):
        normalize_axes(axis, 3)


@pytest.mark.parametrize(
    ("shape", "axis", "keepdims", "wanted"),
    [
        ((4, 6), 0, False, "d0 d1 -> d1"),
        ((4, 6), -1, False, "d0 d1 -> d0"),
        ((4, 6), None, False, "d0 d1 -> "),
        ((4, 6), 0, True, "d0 d1 -> 1 d1"),
        ((4, 6), None, True, "d0 d1 -> 1 1"),
        ((4, 6), (), False, "d0 d1 -> d0 d1"),
        ((4, 6, 2), (2, 0), True, "d0 d1 d2 -> 1 d1 1"),
        ((), None, False, " -> "),
    ],
)
@pytest.mark.parametrize("rule", [reduction, extremum])
def test_rules_of_reductions(rule: Any, shape: Any, axis: Any, keepdims: bool, wanted: str) -> None:
    assert rule([shape], axis=axis, keepdims=keepdims).split() == wanted.split()
    parsed = parse(rule([shape], axis=axis, keepdims=keepdims), (len(shape),))
    sizes = [1 if n == "1" else shape[int(n[1:])] for n in parsed.result]
    assert tuple(sizes) == np.sum(np.ones(shape), axis=axis, keepdims=keepdims).shape


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((0,), None),
        ((0,), 0),
        ((0, 3), 0),
        ((3, 0), 1),
        ((3, 0), None),
        ((3, 0), (0, 1)),
        ((2, 0, 3), 1),
        ((0, 0), 0),
        ((0, 2, 0), 2),
    ],
)
def test_extremum_of_nothing(shape: Any, axis: Any) -> None:
    with pytest.raises(ValueError, match=r"zero-size|identity"):
        np.max(np.ones(shape), axis=axis)
    with pytest.raises(st.ShapeError, match="with no elements") as caught:
        extremum([shape], axis=axis)
    assert str(shape) in str(caught.value)
    assert ("along axis" in str(caught.value)) == (axis is not None)
    assert reduction([shape], axis=axis)  # a sum of nothing is 0


@pytest.mark.parametrize(
    ("shape", "axis"), [((0, 3), 1), ((3, 0), 0), ((0, 2, 0), 1), ((2, 0, 3), (0, 2)), ((0, 2), ())]
)
def test_extremum_that_has_no_result_to_give(shape: Any, axis: Any) -> None:
    assert np.max(np.ones(shape), axis=axis).size == 0
    assert extremum([shape], axis=axis) == reduction([shape], axis=axis)
