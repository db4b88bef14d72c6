"""What is true of an operator is said beside its declaration: no other module lists operators by name."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from shardtensor.core import OPS, TAGS
from shardtensor.functions.batching import rule_of
from tests.cases import CASES
from tests.project.test_layers import MODULES, trees

ALLOWED = {
    "backend.remote": "functions of array libraries, of which it infers the shape of the result",
    "functions.statistics.masked_reductions": "the parts of a complex array",
    "functions.building.monoids": "the monoids by name, which are a rule of declarations, and NumPy's ufuncs",
    "functions.ufunc_protocol.ufunc_calls": "NumPy's ufuncs and reductions, by NumPy's names",
    "hint_tables.attribute_names": "names of other libraries",
    "hint_tables.jax_names": "names of other libraries",
    "hint_tables.nx_names": "names of other libraries",
    "hint_tables.torch_names": "names of other libraries",
    "host.blockwise": "NumPy's functions and what they cost",
    "interpreters.execution.cell_reduction": "NumPy's ufuncs and their reductions",
    "interpreters.jit.kernels.numpy_executor": "the functions of nodes of kernels, which are NumPy's",
    "interpreters.jit.c.c_source": "functions of the C library",
    "interpreters.jit.c.c_trips": "rules of C: which arrays need no kernel, and what is copied to where",
    "interpreters.jit.c.compiler": "functions of the C library",
    "interpreters.jit.kernels.expressions": "rules of C and CUDA: the expression of each function",
    "interpreters.jit.grouping.fused_alone": "rules of C: the products that are computed in place of a call of NumPy",
    "interpreters.jit.kernels.kernel": "the functions of nodes of kernels, which are NumPy's",
    "interpreters.jit.grouping.kernel_reductions": "rules of kernels: the steps of each reduction",
    "interpreters.nan_checks": "the functions of array libraries that find NaN and infinities",
    "interpreters.programs.nan_search": "the functions of array libraries that find NaN and infinities",
    "interpreters.programs.traced_values": "advice in errors",
    "tensor.methods": "the methods of NumPy's arrays",
    "functions.numpy.translated_calls": "NumPy's functions, by NumPy's names",
    "functions.numpy.function_table": "NumPy's functions, by NumPy's names",
    "tensor.numpy_protocols": "Python's operators and NumPy's functions",
}
"""The modules that list names that operators have, too, and what these are there."""

RULES = frozenset(("rows", "implements", "special", "transposes"))
"""The functions by which a module declares operators, or their rules."""


@functools.cache
def trees_of_modules() -> dict[str, ast.Module]:
    return {
        name.removeprefix("shardtensor."): trees()[path]
        for name, path in MODULES.items()
        if not name.startswith("shardtensor.testing") and name not in ("shardtensor", "shardtensor.core")
    }


def is_declared(node: ast.AST) -> bool:
    """Whether a node is the declaration of an operator."""
    calls = [d.func if isinstance(d, ast.Call) else d for d in getattr(node, "decorator_list", ())]
    return any(isinstance(f, ast.Name) and f.id in ("operator", "collective") for f in calls)


@functools.cache
def names() -> set[str]:
    """The names of all operators."""
    declared = {node.name for t in trees_of_modules().values() for node in ast.walk(t) if is_declared(node)}  # type: ignore[attr-defined]
    assert set(CASES) <= declared
    return declared


def declares(tree: ast.Module) -> bool:
    """Whether a module declares operators, or rules of some."""
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return bool(called & RULES) or any(is_declared(node) for node in tree.body)


def texts(nodes: Iterator[ast.expr | None] | list[ast.expr]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def compared(node: ast.BoolOp) -> list[str]:
    """The texts with which parts of a condition compare an attribute ``name``."""
    parts = [p for p in node.values if isinstance(p, ast.Compare) and getattr(p.left, "attr", None) == "name"]
    return texts([text for part in parts for text in part.comparators])


def listed(node: ast.AST) -> list[str]:
    """The texts that a node lists."""
    match node:
        case ast.Set() | ast.Tuple() | ast.List():
            return texts(node.elts)
        case ast.Dict():
            return texts(iter(node.keys))
        case ast.BoolOp():
            return compared(node)
        case ast.Call(func=ast.Attribute(attr="split", value=ast.Constant(value=str(text)))):
            return text.split()
        case ast.Call():
            return [
                *texts(node.args),
                *[k.arg for k in node.keywords if k.arg and isinstance(node.func, ast.Attribute)],
            ]
    return []


def lists_of(tree: ast.Module) -> list[str]:
    """The lists of several operators in a module, with their lines."""
    found = []
    for node in ast.walk(tree):
        several = set(listed(node)) & names()
        if len(several) > 1:
            found.append(f"line {node.lineno}: {' '.join(sorted(several))}")  # type: ignore[attr-defined]
    return found


def test_operators_are_listed_by_name_in_no_module_but_those_of_their_declarations_and_rules() -> None:
    """A fact that several operators share is a tag (`shardtensor.core.TAGS`), and a function or a value for each of them
    is a rule, attached by `implements` or a row of its chapter. A new operator changes none of the modules that read them.
    """
    listing = {
        name: lists for name, tree in trees_of_modules().items() if not declares(tree) and (lists := lists_of(tree))
    }
    assert {name: lists for name, lists in listing.items() if name not in ALLOWED} == {}


def test_the_modules_that_may_list_names_do() -> None:
    assert {
        name for name in ALLOWED if declares(trees_of_modules()[name]) or not lists_of(trees_of_modules()[name])
    } == set()


def test_a_list_is_found() -> None:
    for text in (
        "X = frozenset(('exp', 'log'))",
        "X = {'exp': 1, 'log': 2}",
        "X = 'exp log'.split()",
        "if op.name == 'exp' or op.name == 'log': pass",
        "if op.name in ('exp', 'log'): pass",
        "X.update(exp=1, log=2)",
        "f('exp', 'log')",
    ):
        assert lists_of(ast.parse(text)) == ["line 1: exp log"]
    assert lists_of(ast.parse("if op.name == 'exp': pass")) == []


def test_every_tag_is_declared_of_an_operator() -> None:
    keywords = [
        k
        for t in trees_of_modules().values()
        for node in ast.walk(t)
        if isinstance(node, ast.Call)
        for k in node.keywords
    ]
    used = {tag for k in keywords if k.arg == "tags" for tag in texts(getattr(k.value, "elts", []))}
    assert used == set(TAGS)


def test_linear_operators_have_batching_rules() -> None:
    """By these they are called with partial sums."""
    linear = [op for op in OPS.values() if any(tag.startswith("linear") for tag in op.tags)]
    assert len(linear) > 10
    assert [op.name for op in linear if rule_of(op) is None] == []
