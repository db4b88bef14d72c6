"""`auto_axes` and `explicit_axes`: layouts of results and of arguments, in all modes, and those that JAX gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
import shardtensor.sharding
from shardtensor import P
from tests import peers
from tests.layouts import everywhere, mesh_of

X, Y = np.arange(16.0).reshape(4, 4), np.arange(16.0)[::-1].reshape(4, 4)

CASES: dict[str, Any] = {
    "result": "auto_axes(add)(x, y, out_sharding=P('y'))",
    "factory": "auto_axes(axes='x', out_sharding=P('x', 'y'))(add)(x, y)",
    "tree": "auto_axes(lambda x, y: {'a': x + y, 'b': (x, y)})(x, y, out_sharding={'a': P('x'), 'b': P('y')})",
    "arguments": "explicit_axes(add, axes=('x', 'y'))(x, y, in_sharding=P('x', 'y'))",
    "tuple": "explicit_axes(in_sharding=(P('y'), P('y')))(add)(x, y)",
    "both": "auto_axes(explicit_axes(add, in_sharding=P('y')), out_sharding=P('x'))(x, y)",
}
"""Calls with ``x`` on ``P('x')`` and ``y`` on ``P(None, 'x')``, of a mesh with the axes x and y."""

THEIRS = """
import jax
from jax.sharding import auto_axes, explicit_axes
P = jax.P
jax.config.update("jax_enable_x64", True)
jax.set_mesh(jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2))
cases, x, y = given
add = lambda x, y: x + y
x, y = jax.device_put(x, P("x")), jax.device_put(y, P(None, "x"))
found = {}
for name, case in cases.items():
    leaves = jax.tree.leaves(eval(case))
    found[name] = [(str(jax.typeof(leaf)).partition("(")[2].rstrip(")") or str(jax.typeof(leaf))) for leaf in leaves]
"""


def operands(backend: str) -> tuple[st.Mesh, dict[str, Any]]:
    mesh = st.make_mesh((2, 2), ("x", "y"), devices=mesh_of((4,), backend).flat)
    x, y = (st.device_put(a, st.NamedSharding(mesh, spec)) for a, spec in ((X, P("x")), (Y, P(None, "x"))))
    names = {"auto_axes": st.auto_axes, "explicit_axes": st.explicit_axes, "P": P, "add": lambda x, y: x + y}
    return mesh, {**names, "x": x, "y": y}


def test_results_have_the_layouts_of_jax() -> None:
    peers.require_jax()
    mesh, known = operands("numpy")
    with st.set_mesh(mesh):
        found = {name: [str(st.typeof(x)) for x in st.tree.leaves(eval(case, known))] for name, case in CASES.items()}
    assert found == peers.run(THEIRS, (CASES, X, Y), devices=4)


@everywhere
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_function(name: str, backend: str) -> None:
    mesh, known = operands(backend)

    def called(x: Any, y: Any) -> Any:
        return eval(CASES[name], {**known, "x": x, "y": y})

    with st.set_mesh(mesh):
        eager, found = called(known["x"], known["y"]), st.jit(called)(known["x"], known["y"])
    wanted = {"a": X + Y, "b": (X, Y)} if name == "tree" else X + Y
    for one, other, array in zip(st.tree.leaves(found), st.tree.leaves(eager), st.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, array)
        assert one.sharding == other.sharding


@everywhere
def test_transfers_and_gradients(backend: str) -> None:
    mesh, known = operands(backend)
    x, y = known["x"], known["y"]
    with st.set_mesh(mesh), st.transfer_guard("disallow"):
        placed = st.auto_axes(lambda x: x * x, out_sharding=P(None, "y"))
        assert placed(x).sharding.spec == P(None, "y")
        np.testing.assert_array_equal(st.grad(lambda x: placed(x).sum())(x), 2 * X)
        assert st.grad(lambda x: placed(x).sum())(x).sharding == x.sharding
        assert st.explicit_axes(lambda y: y)(y, in_sharding=P("x", "y")).sharding.spec == P("x", "y")
        assert st.eval_shape(placed, x).sharding.spec == P(None, "y")


def test_the_function_that_is_called() -> None:
    def scale(x: Any, by: float = 2.0, out_sharding: Any = None) -> Any:
        """Its text."""
        return x * by if out_sharding is None else out_sharding

    mesh, known = operands("numpy")
    rows = st.NamedSharding(mesh, P("x"))
    assert st.auto_axes(scale).__doc__ == "Its text."
    assert st.auto_axes(scale)(known["y"], by=3.0, out_sharding=rows).sharding == rows  # A mesh need not be in use.
    assert st.auto_axes(scale, axes="y", out_sharding=rows)(known["y"]).sharding == rows
    assert st.auto_axes(scale, out_sharding=rows)(known["y"], out_sharding=X).tolist() == X.tolist()
    assert st.explicit_axes(scale)(X, by=3.0, in_sharding=rows).sharding == rows
    assert st.explicit_axes(lambda: 3)(in_sharding=rows) == 3
    assert shardtensor.sharding.auto_axes is st.auto_axes
    assert shardtensor.sharding.explicit_axes is st.explicit_axes


ERRORS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "nothing": (lambda f, x: st.auto_axes(f)(x), r"^auto_axes: missing the argument out_sharding; give it in the call"),
    "no place": (lambda f, x: st.explicit_axes(f)(x), r"^explicit_axes: missing the argument in_sharding"),
    "axes": (lambda f, x: st.auto_axes(f, axes=("x", "q"))(x, out_sharding=P()), r"^auto_axes: axes=\('x', 'q'\) names axis 'q'"),
    "an axis": (lambda f, x: st.explicit_axes(f, axes="q")(x, in_sharding=P()), "^explicit_axes: axes='q' names axis 'q'; the mesh "),
    "spec": (lambda f, x: st.auto_axes(f)(x, out_sharding=P("q")), "^auto_axes: P.'q'. names axis 'q'; the mesh in use has"),
    "tree": (lambda f, x: st.auto_axes(f)({"a": x}, out_sharding={"b": P()}), r"^auto_axes: out_sharding has the entries \['b'\], and result"),
    "rank": (lambda f, x: st.explicit_axes(f)(x, x[0], in_sharding=P(None, "x")), r"^explicit_axes: args\[1\]: P\(None, 'x'\) has 2 dim"),
    "no function": (lambda f, x: st.auto_axes(x), "^auto_axes: f is a ShardedTensor; wanted a function"),
    "name": (lambda f, x: st.auto_axes(f, in_sharding=P()), "^auto_axes: got an unexpected keyword argument 'in_sharding'"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    mesh, known = operands("numpy")
    call, message = ERRORS[name]
    with st.set_mesh(mesh), pytest.raises(st.ShardTensorError, match=message):
        call(lambda x, *more: x, known["x"])


def test_errors_of_the_function_stay_as_they_are() -> None:
    _, known = operands("numpy")
    for placed, name in ((st.auto_axes, "out_sharding"), (st.explicit_axes, "in_sharding")):
        with pytest.raises(st.ShapeError, match=r"^reshape: "):
            placed(lambda x: st.reshape(x, (3,)))(known["x"], **{name: known["x"].sharding})
