"""What JAX's page about xmap did with named axes, written with specs, and what JAX 0.4 gives for it.

A name of xmap is here an axis of the mesh, if it had resources, and otherwise a dimension or `st.vmap`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import P
from tests import peers
from tests.layouts import everywhere, mesh_of, values_of


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


IMAGES, W1, W2 = drawn(32, 20), drawn(20, 16, seed=1), drawn(16, 5, seed=2)
LABELS = np.arange(32) % 5
LEFT, RIGHT = drawn(7, 3, 3), drawn(5, 3, 2, seed=1)
MANY, MATRIX = drawn(16, 5, 8), drawn(8, 9, seed=1)
ROWS, COLUMNS = drawn(24, 7), drawn(7, 10, seed=1)
SHAPES = drawn(2, 2, 1, 1), drawn(2, 1, 3, 1, seed=1), drawn(2, 1, 1, 5, seed=2)


def assert_values(found: Any, wanted: Any) -> None:
    assert np.shape(found) == np.shape(wanted)
    np.testing.assert_allclose(values_of(found), wanted, 1e-10, 1e-12)


def loss_of_all(w1: Any, w2: Any, images: Any, labels: Any) -> Any:
    """The loss of a perceptron, in the form in which one device computes it."""
    scores = st.maximum(images @ w1, 0) @ w2
    scores = scores - st.log(st.exp(scores).sum(axis=1, keepdims=True))
    return -(scores * (labels[:, None] == st.arange(5))).sum(axis=1).mean()


def numpys_loss() -> float:
    scores = np.maximum(IMAGES @ W1, 0) @ W2
    return float(-(scores - np.log(np.exp(scores).sum(axis=1, keepdims=True)))[np.arange(32), LABELS].mean())


PLACES: dict[str, tuple[tuple[int, ...], dict[str, str]]] = {
    "one device": ((1,), {}),
    "the batch": ((8,), {"batch": "x"}),
    "the hidden layer": ((8,), {"hidden": "x"}),
    "both": ((4, 2), {"batch": "x", "hidden": "y"}),
    "both, the other way": ((2, 4), {"batch": "y", "hidden": "x"}),
}
"""Meshes, and the axis that each name of the loss has: the axis_resources of xmap."""


def specs_of(places: dict[str, str]) -> tuple[P, ...]:
    batch, hidden = places.get("batch"), places.get("hidden")
    return P(None, hidden), P(hidden), P(batch), P(batch)


@everywhere
@pytest.mark.parametrize("where", PLACES)
def test_a_loss_is_placed_without_changing_its_function(where: str, backend: str) -> None:
    sizes, places = PLACES[where]
    mesh = mesh_of(sizes, backend)
    arguments = [
        st.device_put(x, st.NamedSharding(mesh, spec))
        for x, spec in zip((W1, W2, IMAGES, LABELS), specs_of(places), strict=True)
    ]
    with st.transfer_guard("log"):
        loss, compiled = loss_of_all(*arguments), st.jit(loss_of_all)(*arguments)
    assert_values(loss, numpys_loss())
    assert_values(compiled, numpys_loss())


@everywhere
@pytest.mark.parametrize("where", [where for where in PLACES if where != "one device"])
def test_a_loss_by_collectives_over_names(where: str, backend: str) -> None:
    sizes, places = PLACES[where]
    batch, hidden = ((places[name],) if name in places else () for name in ("batch", "hidden"))

    def loss(w1: Any, w2: Any, images: Any, labels: Any) -> Any:
        scores = st.psum(st.maximum(images @ w1, 0) @ w2, hidden)
        scores = scores - st.log(st.exp(scores).sum(axis=1, keepdims=True))
        return -st.pmean((scores * (labels[:, None] == st.arange(5))).sum(axis=1).mean(), batch)

    mapped = st.shard_map(loss, mesh=mesh_of(sizes, backend), in_specs=specs_of(places), out_specs=P())
    assert_values(mapped(W1, W2, IMAGES, LABELS), numpys_loss())


@everywhere
def test_a_name_moves_to_another_dimension(backend: str) -> None:
    mesh = mesh_of((8,), backend)
    moved = st.shard_map(lambda x: x.T, mesh=mesh, in_specs=P("x"), out_specs=P(None, "x"))(ROWS)
    assert_values(moved, ROWS.T)
    assert moved.sharding.spec == P(None, "x")
    assert_values(st.vmap(lambda row: row, in_axes=0, out_axes=1)(ROWS), ROWS.T)


def test_a_name_has_one_size() -> None:
    five, seven = np.arange(5.0), np.arange(7.0)
    with pytest.raises(st.ShapeError, match=r"has 7 examples along axis 0, and .* has 5; wanted equal sizes"):
        st.vmap(lambda x, y: x * y)(five, seven)
    with pytest.raises(ValueError, match=r"einsum: .*'?i'? "):
        st.einsum("i,i->i", five, seven)
    with pytest.raises(ValueError, match="could not be broadcast"):
        st.shard_map(lambda x, y: x * y, mesh=mesh_of((2,), "numpy"), in_specs=P("x"), out_specs=P("x"))(five, seven)


def solved(backend: str) -> dict[str, Any]:
    """Functions that know no names, of pairs of equal numbers and of all pairs."""
    mesh = mesh_of((4, 2), backend)
    left = st.device_put(LEFT, st.NamedSharding(mesh, P("x")))
    right = st.device_put(RIGHT, st.NamedSharding(mesh, P("y")))
    every = st.vmap(st.vmap(st.linalg.solve, in_axes=(None, 0)), in_axes=(0, None))
    return {"pairs": st.vmap(st.linalg.solve)(left[:5], right), "all pairs": every(left, right)}


def named(backend: str) -> dict[str, Any]:
    """Functions along named axes, each of which is an axis of a mesh."""
    cube, plane, line = mesh_of((2, 2, 2), backend), mesh_of((2, 4), backend), mesh_of((8,), backend)
    names = cube.axis_names

    @st.shard_map(mesh=cube, in_specs=tuple(P(name) for name in names), out_specs=P(*names))
    def broadcast(x: Any, y: Any, z: Any) -> Any:
        return (x[:, None, None] + y[None, :, None]) * (y[None, :, None] + z[None, None])

    @st.shard_map(mesh=plane, in_specs=(P("x"), P(None, "y")), out_specs=P())
    def reduced(x: Any, y: Any) -> Any:
        return st.psum((x[:, None, None] + y).sum(), ("x", "y"))

    @st.shard_map(mesh=plane, in_specs=(P("x", None, "y"), P("y")), out_specs=P("x"))
    def contracted(x: Any, y: Any) -> Any:
        return st.psum(st.einsum("bnk,km->bnm", x, y), "y")

    @st.shard_map(mesh=line, in_specs=P("x"), out_specs=P("x"))
    def shuffled(x: Any) -> Any:
        return st.pshuffle(x, "x", [*reversed(range(8))])

    @st.shard_map(mesh=plane, in_specs=(P("x"), P(None, "y")), out_specs=P("x", "y"))
    def products(x: Any, y: Any) -> Any:
        return x @ y

    @st.shard_map(mesh=line, in_specs=(P("x"), P("x")), out_specs=P())
    def two_on_one(x: Any, y: Any) -> Any:
        return st.psum(x.sum() + (y**2).sum(), "x")

    @st.shard_map(mesh=plane, in_specs=P("x", "y"), out_specs=P("x", "y"))
    def collected(x: Any) -> Any:
        whole = st.all_gather(x, "x", tiled=True).sum() + 10 * st.psum(x, ("x", "y")) + st.pmax(x, "y")
        ring = st.ppermute(x, "y", [(k, (k + 1) % 4) for k in range(4)])
        return whole + 100 * ring + st.axis_index("x") + 7 * st.axis_index("y") + 50 * st.psum(1, "y")

    return {
        "broadcast": broadcast(*SHAPES), "reduced": reduced(np.arange(2.0), np.arange(20.0).reshape(5, 4)),
        "contracted": contracted(MANY, MATRIX), "shuffled": shuffled(np.arange(8.0)), "products": products(ROWS, COLUMNS),
        "two on one": two_on_one(np.arange(8.0), np.arange(16.0)), "collected": collected(np.arange(8.0).reshape(2, 4)),
    }  # fmt: skip


def numpys() -> dict[str, Any]:
    x, y, z = SHAPES[0][:, None, None], SHAPES[1][None, :, None], SHAPES[2][None, None]
    grid = np.arange(8.0).reshape(2, 4)
    collected = (
        grid.sum(axis=0) + 10 * grid.sum() + grid.max(axis=1, keepdims=True) + 100 * np.roll(grid, 1, axis=1)
        + np.arange(2)[:, None] + 7 * np.arange(4) + 200
    )  # fmt: skip
    return {
        "pairs": np.linalg.solve(LEFT[:5], RIGHT), "all pairs": np.linalg.solve(LEFT[:, None], RIGHT),
        "broadcast": (x + y) * (y + z), "reduced": (np.arange(2.0)[:, None, None] + np.arange(20.0).reshape(5, 4)).sum(),
        "contracted": np.einsum("bnk,km->bnm", MANY, MATRIX), "shuffled": np.arange(8.0)[::-1], "products": ROWS @ COLUMNS,
        "two on one": np.arange(8.0).sum() + (np.arange(16.0) ** 2).sum(), "collected": collected,
    }  # fmt: skip


@everywhere
@pytest.mark.parametrize("programs", [solved, named])
def test_functions_of_named_axes(programs: Callable[[str], dict[str, Any]], backend: str) -> None:
    for name, found in programs(backend).items():
        assert_values(found, numpys()[name])


@everywhere
@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (8, 1), (1, 8)])
def test_places_never_change_the_result(sizes: tuple[int, int], backend: str) -> None:
    """Whichever axes of whichever mesh the names have, in whichever order the devices are."""
    devices = st.devices(backend)
    for order in (slice(None), slice(None, None, -1)):
        mesh = st.Mesh(np.array(devices[order], object).reshape(sizes), ("x", "y"))
        for left, right in (("x", "y"), ("y", "x"), (None, "x"), (("y", "x"), None), (None, None)):
            product = st.shard_map(
                lambda a, b: a @ b, mesh=mesh, in_specs=(P(left), P(None, right)), out_specs=P(left, right)
            )
            assert_values(product(ROWS, COLUMNS), ROWS @ COLUMNS)


WHERE: dict[P, tuple[int, int]] = {P(): (1, 1), P("x"): (2, 1), P("x", None): (2, 1), P("x", "y"): (2, 3)}
"""Specs of a matrix, and the number of its different parts along each axis of a mesh of 2 × 3 devices."""


@pytest.mark.parametrize("spec", WHERE)
def test_an_array_is_split_along_the_axes_that_its_spec_names(spec: P) -> None:
    mesh = mesh_of((2, 3), "numpy")
    sharding, (n, m) = st.NamedSharding(mesh, spec), WHERE[spec]
    places = sharding.devices_indices_map((8, 12))
    assert sharding.is_fully_replicated == (n == m == 1)
    for i, j in itertools.product(range(2), range(3)):
        rows, columns = (s.indices(size)[:2] for s, size in zip(places[mesh.devices[i, j]], (8, 12), strict=True))
        assert rows == ((4 * i, 4 * i + 4) if n == 2 else (0, 8))
        assert columns == ((4 * j, 4 * j + 4) if m == 3 else (0, 12))


def test_errors_of_names() -> None:
    mesh = mesh_of((2, 4), "numpy")
    body = lambda x: st.psum(x, "z")  # noqa: E731
    with pytest.raises(
        st.ShardingError, match=r"in_specs has P\('z'\), which names axis 'z'; the mesh has \('x', 'y'\)"
    ):
        st.shard_map(body, mesh=mesh, in_specs=P("z"), out_specs=P())(ROWS)
    with pytest.raises(st.ShardingError, match="no axis is called 'z' here; the maps around this call bind 'x', 'y'"):
        st.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P())(ROWS)
    with pytest.raises(st.ShardingError, match="axis 'x' occurs twice"):
        P("x", "x")
    with pytest.raises(st.ShardingError, match="psum: there is no mapped function around this call"):
        st.psum(ROWS, "x")
    with pytest.raises(AttributeError, match=r"'xmap': st\.shard_map maps over named axes of a mesh"):
        st.xmap


# -- beside JAX ------------------------------------------------------------------------------------

JAXS = """
import jax, warnings
warnings.simplefilter("ignore")
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, numpy as np
from jax import lax
from jax.experimental.maps import xmap
from jax.sharding import Mesh
g = given
found = {}

def loss(w1, w2, image, label):
    scores = lax.pdot(jnp.maximum(lax.pdot(image, w1, "inputs"), 0), w2, "hidden")
    scores -= jnp.log(lax.psum(jnp.exp(scores), "classes"))
    hit = jnp.where(label == lax.axis_index("classes"), 1.0, 0.0)
    return -lax.pmean(lax.psum(scores * hit, "classes"), "batch")

axes = [["inputs", "hidden"], ["hidden", "classes"], ["batch", "inputs"], ["batch"]]
for where, (sizes, places) in g["places"].items():
    devices = np.array(jax.devices()[:np.prod(sizes)]).reshape(sizes)
    with Mesh(devices, ("x", "y")[:len(sizes)]):
        found[where] = xmap(loss, in_axes=axes, out_axes=[...], axis_resources=places)(*g["loss"])

def mapped(f, in_axes, out_axes, sizes=(8,), **places):
    def call(*args):
        with Mesh(np.array(jax.devices()).reshape(sizes), ("x", "y", "z")[:len(sizes)]):
            return xmap(f, in_axes=in_axes, out_axes=out_axes, axis_resources=places)(*args)
    return call

left, right = g["solve"]
solve = jnp.linalg.solve
found["pairs"] = mapped(solve, (["b", ...], ["b", ...]), ["b", ...])(left[:5], right)
found["all pairs"] = mapped(solve, (["a", ...], ["b", ...]), ["a", "b", ...])(left, right)
found["broadcast"] = mapped(lambda x, y, z: (x + y) * (y + z), (["a", ...], ["b", ...], ["c", ...]),
                            ["a", "b", "c", ...], (2, 2, 2), a="x", b="y", c="z")(*g["shapes"])
found["reduced"] = mapped(lambda x, y: jnp.sum(x + y, axis=(0, "a", "b")), ({0: "a"}, {1: "b"}), {}, (2, 4), a="x", b="y")(
    np.arange(2.0), np.arange(20.0).reshape(5, 4))
found["contracted"] = mapped(lambda x, y: jnp.sum(x * y, axis="k"), ({0: "b", 2: "k"}, ["k", "m", ...]), {0: "b", 2: "m"},
                             (2, 4), b="x", k="y")(*g["contracted"])
found["shuffled"] = mapped(lambda x: lax.pshuffle(x, "i", [*reversed(range(8))]), ["i", ...], ["i", ...], i="x")(np.arange(8.0))
found["products"] = mapped(jnp.vdot, ({0: "a"}, {1: "b"}), ["a", "b", ...], (2, 4), a="x")(*g["products"])
found["two on one"] = mapped(lambda x, y: jnp.sum(x, axis="a") + jnp.sum(y**2, axis="b"), (["a", ...], ["b", ...]), [...],
                             a="x", b="x")(np.arange(8.0), np.arange(16.0))

def collected(x):
    whole = lax.all_gather(x, "a").sum() + 10 * lax.psum(x, ("a", "b")) + lax.pmax(x, "b")
    ring = lax.ppermute(x, "b", [(k, (k + 1) % 4) for k in range(4)])
    return whole + 100 * ring + lax.axis_index("a") + 7 * lax.axis_index("b") + 50 * lax.psum(1, "b")

found["collected"] = mapped(collected, ["a", "b"], ["a", "b"], (2, 4), a="x", b="y")(np.arange(8.0).reshape(2, 4))
errors = []
for call in (
    lambda: mapped(lambda x, y: x * y, (["i"], ["i"]), ["i"])(np.arange(5), np.arange(7)),
    lambda: mapped(lambda x: x, ["i"], ["i"], i="q")(np.arange(8)),
    lambda: mapped(lambda x: lax.psum(x, "j"), ["i"], ["i"])(np.arange(8)),
):
    try:
        call()
    except Exception as error:
        errors.append(type(error).__name__)
found = jax.tree_util.tree_map(np.asarray, found), errors
"""


@pytest.mark.full
def test_xmap_gave_the_same() -> None:
    peers.require_jax("0.4")
    given = {
        "places": PLACES, "loss": (W1, W2, IMAGES, LABELS), "solve": (LEFT, RIGHT), "shapes": SHAPES,
        "contracted": (MANY, MATRIX), "products": (ROWS, COLUMNS),
    }  # fmt: skip
    theirs, errors = peers.run(JAXS, given, devices=8)
    mine = {where: numpys_loss() for where in PLACES} | solved("numpy") | named("numpy")
    assert theirs.keys() == mine.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(values_of(np.asarray(mine[name])), value, 1e-9, 1e-9, err_msg=name)
    assert len(errors) == 3, errors
