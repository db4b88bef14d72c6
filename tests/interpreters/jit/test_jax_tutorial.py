"""The cells of JAX's "Introduction to parallel programming" under `st.jit`: the shardings that they print are JAX's.

https://docs.jax.dev/en/latest/sharded-computation.html
"""

from __future__ import annotations

import functools
import io
import types
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import P
from tests import peers
from tests.interpreters.jit.jax_tutorial import SPECS, activations, explicit_cells, found, layout_of, printed, text_of
from tests.layouts import everywhere, mesh_of

TABLE: dict[str, tuple[tuple[int, ...], P, str]] = {
    "arr": ((1,), P(), "device"),
    "arr_sharded": ((2, 4), P("x", "y"), "device"),
    "arr_host": ((2, 4), P("x", "y"), "pinned_host"),
    "arr_dev": ((2, 4), P("x", "y"), "device"),
    "out_host": ((2, 4), P("x", "y"), "pinned_host"),
    "out_dev": ((2, 4), P("x", "y"), "device"),
    "f_elementwise": ((2, 4), P("x", "y"), "device"),
    "f_contract": ((2, 4), P("y"), "device"),
    "add_arrays": ((2, 4), P("x", "y"), "device"),
    "f_contract over x": ((2, 4), P("x"), "device"),
    "f_contract over x y": ((2, 4), P(("x", "y")), "device"),
    "f_contract_2": ((8,), P("x"), "device"),
    "f_elementwise_sharded": ((8,), P("x"), "device"),
    "sum in shard": ((8,), P("x"), "device"),
    "psum": ((8,), P(), "device"),
    "layer": ((8,), P(), "device"),
    "layer_constrained": ((8,), P(), "device"),
    "layer_sharded": ((8,), P(), "device"),
}
"""For each cell that prints an array: the mesh, the spec, and the memory kind that JAX gives it."""

_CELLS = [*"01234567"]
DRAWN = {
    "arr": [["0"]], "f_contract": [["0,4", "1,5", "2,6", "3,7"]], "f_contract over x": [["0,1,2,3", "4,5,6,7"]], "psum": None,
    **{name: [_CELLS[:4], _CELLS[4:]] for name in ("arr_sharded", "arr_host", "arr_dev", "out_host", "out_dev")},
    **{name: [_CELLS[:4], _CELLS[4:]] for name in ("f_elementwise", "add_arrays")},
    **{name: [_CELLS] for name in ("f_contract over x y", "f_contract_2", "f_elementwise_sharded", "sum in shard")},
    **{name: [[",".join(_CELLS)]] for name in ("layer", "layer_constrained", "layer_sharded")},
}  # fmt: skip
"""The numbers of the devices in each cell of the drawing of what a cell of the tutorial prints."""

LAYERS = {
    "- -": ["- -", "- -", "- -", "- x", "- y", "- y", "- x", "- -"],
    "x -": ["x -", "x -", "x -", "x -", "x y", "x y", "x -", "x -"],
    "y -": ["y -", "y -", "y -", "y x", "y -", "y -", "y x", "y -"],
    "- x": ["- -", "- -", "- -", "- -", "- y", "- y", "- x", "- -"],
    "- y": ["- -", "- -", "- -", "- x", "- -", "- y", "- x", "- -"],
    "x y": ["x -", "x -", "x -", "x -", "x y", "x y", "x -", "x -"],
    "y x": ["y -", "y -", "y -", "y x", "y -", "y -", "y x", "y -"],
    "xy -": ["xy -", "xy -", "xy -", "y x", "xy -", "xy -", "xy -", "xy -"],
}
"""The layouts of what a layer gives for activations in each layout, and weights in those of `SPECS`."""

OTHER_LAYOUTS = {("- x", "- x"), ("- y", "- y"), ("xy -", "- x")}
"""Activations and weights of which the result has another layout than in JAX. The first two need one mesh axis for
different dimensions: here the larger operand stays, and partial results are added; JAX gathers it.
"""


def draw(x: st.ShardedTensor) -> str:
    st.visualize_sharding(x, file=(out := io.StringIO()), use_color=False)
    return out.getvalue()


OURS = SimpleNamespace(
    xp=st, P=P, NamedSharding=st.NamedSharding, device_put=st.device_put, jit=st.jit, psum=st.psum, reshard=st.reshard,
    with_sharding_constraint=st.with_sharding_constraint, shard_map=st.shard_map, use_mesh=st.use_mesh, draw=draw, errors=(),
    spec_of=lambda x: [chain[0] if chain else None for chain in x.sharding.spec.chains],
)  # fmt: skip


@functools.cache
def ours(backend: str) -> Mapping[str, Any]:
    grid, line = mesh_of((2, 4), backend), mesh_of((8,), backend)
    with st.use_mesh(line):  # In the tutorial, arrays that are not placed are on the devices of the mesh.
        return types.MappingProxyType(found(OURS, grid, line, grid, line.flat[0]))


def spec_text(spec: P, ndim: int) -> str:
    return " ".join("".join(chain) or "-" for chain in (*spec.chains, *[()] * ndim)[:ndim])


@everywhere
def test_the_shardings_of_each_cell(backend: str) -> None:
    results = dict(ours(backend))
    assert results.pop("types") == [["x", None], [None, "y"], ["x", "y"]]
    assert results.keys() == TABLE.keys()
    for name, (sizes, spec, kind) in TABLE.items():
        shape = np.shape(results[name][2])
        wanted = st.NamedSharding(mesh_of(sizes, backend), spec).devices_indices_map(shape).items()
        assert results[name][3:] == [spec_text(spec, len(shape)), DRAWN[name]], name
        assert tuple(results[name][:2]) == layout_of(kind, wanted, shape), name


ARR, X = np.arange(32.0).reshape(4, 8), np.arange(32)
RNG = np.random.default_rng(0)
ROW, WEIGHTS, BIAS = RNG.normal(size=(32,)), RNG.normal(size=(32, 4)), RNG.normal(size=(4,))
VALUES = {
    **dict.fromkeys(("arr", "arr_sharded", "arr_host", "arr_dev", "out_host", "out_dev"), ARR),
    **dict.fromkeys(("f_contract", "f_contract over x", "f_contract over x y", "f_contract_2"), ARR.sum(axis=0)),
    **dict.fromkeys(("layer", "layer_constrained", "layer_sharded"), 1 / (1 + np.exp(-(ROW @ WEIGHTS + BIAS)))),
    "f_elementwise": 2 * np.sin(ARR) + 1, "add_arrays": np.arange(4)[:, None] + np.arange(8), "psum": X.sum(),
    "f_elementwise_sharded": 2 * np.sin(X) + 1, "sum in shard": X.reshape(8, 4).sum(axis=1),
}  # fmt: skip
"""The elements of what each cell prints."""


@everywhere
def test_the_values_of_each_cell(backend: str) -> None:
    for name, wanted in VALUES.items():
        np.testing.assert_allclose(ours(backend)[name][2], wanted, rtol=1e-6, err_msg=name)


@everywhere
def test_devices_in_the_order_of_a_torus(backend: str) -> None:
    """The tutorial is drawn with the devices of a TPU, which a mesh can have here, too."""
    devices = st.devices(backend)
    mesh = st.Mesh(np.array([devices[i] for i in (0, 1, 2, 3, 6, 7, 4, 5)], object).reshape(2, 4), ("x", "y"))
    x = st.device_put(ARR, st.NamedSharding(mesh, P("x", "y")))
    rows = st.jit(lambda x: x.sum(axis=0))(x)
    assert printed(OURS, x)[4] == [[*"0123"], [*"6745"]]
    assert [sorted(cell.split(",")) for cell in printed(OURS, rows)[4][0]] == [
        ["0", "6"],
        ["1", "7"],
        ["2", "4"],
        ["3", "5"],
    ]
    line = st.NamedSharding(st.Mesh(mesh.flat, ("x",)), P("x"))
    split = st.jit(lambda x: st.with_sharding_constraint(x.sum(axis=0), line))(x)
    assert printed(OURS, split)[4] == [[*"01236745"]]
    np.testing.assert_array_equal(printed(OURS, split)[2], ARR.sum(axis=0))


@everywhere
def test_a_function_sees_the_block_of_a_device(backend: str) -> None:
    shapes: list[tuple[int, ...]] = []
    seen = st.shard_map(
        lambda x: (shapes.append(x.shape), x * 2)[1], mesh=mesh_of((8,), backend), in_specs=P("x"), out_specs=P("x")
    )
    assert seen(X).shape == (32,)
    assert set(shapes) == {(4,)}


@everywhere
@pytest.mark.parametrize("of_x", SPECS, ids=text_of)
def test_the_layouts_of_a_layer(of_x: tuple[Any, ...], backend: str) -> None:
    assert activations(OURS, mesh_of((2, 4), backend), of_x) == LAYERS[text_of(of_x)]


def explicit(backend: str) -> dict[str, Any]:
    made = explicit_cells(OURS, mesh_of((2, 4), backend), mesh_of((8,), backend))
    return {name: printed(OURS, x) for name, x in made}


@everywhere
def test_cells_of_explicit_shardings_print_the_same(backend: str) -> None:
    """The constraint is over both axes of the mesh of the array: see `f_contract over x y`."""
    automatic = dict(ours(backend))
    automatic["f_contract_2"] = automatic["f_contract over x y"]
    for name, (kind, indices, values, spec, drawn) in explicit(backend).items():
        assert [kind, indices, spec, drawn] == [*automatic[name][:2], *automatic[name][3:]], name
        np.testing.assert_allclose(values, automatic[name][2], rtol=1e-6)  # the tutorial's array is of float32


JAXS = """
import contextlib, importlib.util, io, jax
from types import SimpleNamespace
from tests.interpreters.jit.jax_tutorial import SPECS, activations, explicit_cells, found as found_by, printed, text_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec

def draw(x):
    if importlib.util.find_spec("rich") is None:
        return None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        jax.debug.visualize_array_sharding(x, use_color=False)
    return out.getvalue()

lib = SimpleNamespace(
    xp=jax.numpy, P=PartitionSpec, NamedSharding=NamedSharding, device_put=jax.device_put, jit=jax.jit,
    psum=jax.lax.psum, with_sharding_constraint=jax.lax.with_sharding_constraint, shard_map=jax.shard_map,
    use_mesh=jax.set_mesh, spec_of=lambda x: jax.typeof(x).sharding.spec, reshard=jax.sharding.reshard, draw=draw,
    errors=(Exception,),
)
auto = lambda shape, names: jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
grid, line = ((2, 4), ("x", "y")), ((8,), ("x",))
cells = found_by(lib, auto(*grid), auto(*line), jax.make_mesh(*grid), jax.devices()[0])
explicit = {name: printed(lib, x) for name, x in explicit_cells(lib, jax.make_mesh(*grid), jax.make_mesh(*line))}
found = cells, explicit, *[
    {text_of(spec): activations(lib, mesh, spec) for spec in SPECS} for mesh in (auto(*grid), jax.make_mesh(*grid))]
"""


@pytest.mark.full
def test_the_tables_are_jaxs() -> None:
    """With the kinds of axes that the tutorial needs, and with those of a mesh of JAX by default, which are explicit."""
    peers.require_jax("0.10", "0.12")
    cells, explicitly, layers, explicit_layers = peers.run(JAXS, devices=8)
    mine = dict(ours("numpy"))
    assert cells.keys() == mine.keys()
    assert cells.pop("types") == mine.pop("types")
    for theirs, here in ((cells, mine), (explicitly, explicit("numpy"))):
        assert theirs.keys() == here.keys()
        for name, (kind, indices, values, spec, drawn) in theirs.items():
            assert [kind, indices, spec] == [*here[name][:2], here[name][3]], name
            assert drawn in (None, here[name][4]), name  # JAX draws where rich is installed
            np.testing.assert_allclose(here[name][2], values, rtol=1e-5)
    texts = [text_of(spec) for spec in SPECS]
    for of_x, row in LAYERS.items():
        for of_weights, found_here, automatic, typed in zip(
            texts, row, layers[of_x], explicit_layers[of_x], strict=True
        ):
            if (of_x, of_weights) in OTHER_LAYOUTS:
                assert found_here not in (automatic, typed)
            else:
                assert found_here == automatic, (of_x, of_weights)
                assert typed in (None, found_here), (of_x, of_weights)  # an error of JAX: the layout is ambiguous
    assert sum(typed is not None for row in explicit_layers.values() for typed in row) > 30
