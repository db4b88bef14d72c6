"""Programs of maps, as JAX's pages and Flax, Haiku and GPJax write them, which this library and JAX run.

This module imports nothing of shardtensor: JAX may be on another Python. The argument ``lib`` of each function has the
functions of one of them, by the names of JAX; its ``xp`` is `shardtensor` or ``jax.numpy``.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

Results = Iterator[tuple[str, Any]]


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


# -- pmap ------------------------------------------------------------------------------------------


def maps(lib: Any) -> Results:
    """Maps along one axis, with and without collectives."""
    xp, pmap = lib.xp, lib.pmap
    x, y = drawn(5, 3, 2), drawn(5, 2, 4, seed=1)
    yield "a slice for each device", pmap(lambda v: v**3 - v)(np.arange(7.0))
    yield "two arguments", pmap(xp.matmul)(x, y)
    yield "the values of vmap", lib.vmap(xp.matmul)(x, y)
    yield "an argument that is whole", pmap(lambda v, w: (v - w, w / 2), in_axes=(0, None))(np.arange(8.0), 3.0)
    yield (
        "keywords and pytrees",
        pmap(lambda t, *, b: {"sum": t["a"] + t["c"][0], "b": b})({"a": x, "c": (x[:, ::-1],)}, b=np.arange(5.0)),
    )
    yield "axes", pmap(lambda v, w: v @ w, in_axes=(2, 1), out_axes=1)(drawn(3, 2, 4), drawn(2, 4, 5))
    once = pmap(lambda v: v * v)(np.arange(8.0))
    yield "results are arrays", (once / 2, xp.sin(once), once.sum(), once[3], once.reshape(4, 2), once @ drawn(8, 3))
    yield "a chain", pmap(lambda v: v.mean())(pmap(lambda m: m @ m.T)(drawn(8, 6, 5)))

    share = functools.partial(pmap, axis_name="i")(lambda v: v / lib.psum(v, "i"))
    yield "shares of a sum", share(np.arange(4.0))
    yield "the axis", pmap(lambda v: v + 10 * lib.axis_index("i") + 100 * lib.psum(1, "i"), axis_name="i")(np.arange(6))
    first = pmap(lambda v: v / lib.pmax(v, "i"), axis_name="i", devices=lib.devices[:6])
    last = pmap(lambda v: lib.psum(v**2, "i"), axis_name="i", devices=lib.devices[-2:])
    yield "two groups of devices", (first(1 + np.arange(6.0)), last(np.array([2.0, 3.0])))
    both = pmap(lib.vmap(lambda v: v / lib.psum(v, ("i", "j")), axis_name="j"), axis_name="i")
    yield "a named vmap in a map", both(1 + np.arange(24.0).reshape(8, 3))
    yield "an unnamed vmap in a map", pmap(lib.vmap(lambda v: v @ v))(drawn(8, 3, 2))
    yield "a map in a vmap", lib.vmap(pmap(lambda v: v @ v))(drawn(3, 8, 2))
    yield "jit of a map", lib.jit(lambda v: xp.reshape(pmap(lambda u: u * 2)(v), (-1,)))(drawn(8, 2))
    yield "a map of jit", pmap(lib.jit(lambda v: xp.exp(v).sum()))(drawn(8, 2))

    def loss(w: Any, v: Any) -> Any:
        return (
            pmap(lambda a, b: xp.sin(a @ b) * lib.psum(b.sum(), "i"), axis_name="i", in_axes=(None, 0))(w, v) ** 2
        ).sum()

    yield "a gradient of a map", lib.grad(loss)(drawn(3, 2), drawn(8, 2))
    yield "gradients in a map", pmap(lib.grad(lambda w, v: xp.tanh(w) @ v), in_axes=(None, 0))(drawn(2), drawn(8, 2))
    yield "cells on a ring", cells(lib, 25)


def cells(lib: Any, steps: int) -> Any:
    """Rule 110: 40 cells on 8 devices, which exchange one cell with each neighbour in every step."""
    n = 8
    right, left = ([(i, (i + k) % n) for i in range(n)] for k in (1, -1))

    def step(own: Any) -> Any:
        before, after = lib.ppermute(own[-1:], "i", right), lib.ppermute(own[:1], "i", left)
        wide = lib.xp.concat([before, own, after])
        a, b, c = wide[:-2], wide[1:-1], wide[2:]
        return (b | c) & ~(a & b & c)

    world = np.zeros((n, 5), bool)
    world[-1, -1] = True
    for _ in range(steps):
        world = lib.pmap(step, axis_name="i")(world)
    return world


# -- maps in maps ----------------------------------------------------------------------------------


def grids(lib: Any) -> Results:
    """Programs on a grid of devices; ``lib.grid(f, *names)`` maps along the first dimensions, each of which is named."""
    xp, grid = lib.xp, lib.grid
    x = 1 + np.arange(8.0).reshape(4, 2)
    names = ("rows", "columns")

    def shares(v: Any) -> Any:
        return v / lib.psum(v, "rows"), v / lib.psum(v, "columns"), v / lib.psum(v, ("rows", "columns"))

    def place(v: Any) -> Any:
        at = 10 * lib.axis_index("rows") + lib.axis_index("columns")
        return v * 0 + at + 100 * lib.psum(1, "rows") + 1000 * lib.psum(1, ("rows", "columns"))

    def reduced(v: Any) -> Any:
        return lib.pmax(v, "rows") + lib.pmin(v, "columns"), lib.pmean(v, ("columns", "rows"))

    def gathered(v: Any) -> Any:
        return (
            lib.all_gather(v, "rows"), lib.all_gather(v, "columns"), lib.all_gather(lib.all_gather(v, "columns"), "rows")
        )  # fmt: skip

    def moved(v: Any) -> Any:
        down = lib.ppermute(v, "rows", [(i, (i + 1) % 4) for i in range(4)])
        return down, lib.ppermute(v, "columns", [(0, 1)]), lib.ppermute(down, "columns", [(1, 0), (0, 1)])

    for body in (shares, place, reduced, gathered, moved):
        yield body.__name__, grid(body, *names)(x)
    yield "three levels", grid(lambda v: lib.psum(v, ("a", "c")) + lib.axis_index("b"), "a", "b", "c")(drawn(2, 2, 2))
    yield "a vmap in a grid", grid(lib.vmap(lambda v: v @ v), *names)(drawn(4, 2, 3, 5))
    halves = grid(lambda a, b: lib.psum(a @ b, "columns"), *names)
    a, b = drawn(4, 2, 3, 5), np.broadcast_to(drawn(2, 5, 2, seed=1), (4, 2, 5, 2))
    yield "a product of blocks", halves(a, b)
    exchanged = grid(lambda v: lib.all_to_all(v, "columns", 0, 0), *names)
    yield "blocks change places", exchanged(drawn(4, 2, 2, 3))

    def total(v: Any) -> Any:
        return grid(lambda u: xp.sin(u) * lib.psum(u, "rows"), *names)(v).sum()

    yield "a gradient of a grid", lib.grad(total)(x)


def nests(lib: Any) -> Results:
    """What only maps in maps are: those in functions, and axes of several levels. No JAX after 0.7 runs them."""
    xp, pmap = lib.xp, lib.pmap
    x = 1 + np.arange(8.0).reshape(4, 2)
    inner = pmap(lambda v, w: v * w / lib.psum(v, ("i", "j")), axis_name="j", in_axes=(0, None), out_axes=0)
    yield "in a function", pmap(lambda row, w: inner(row + 1, w).sum() + row, axis_name="i", in_axes=(0, None))(x, 3.0)
    yield (
        "axes of two levels",
        pmap(pmap(lambda v: v @ v, in_axes=1, out_axes=0), in_axes=2, out_axes=1)(drawn(3, 2, 4)),
    )
    yield (
        "a map in a gradient in a map",
        pmap(lambda row: lib.grad(lambda w: (pmap(xp.cos)(w) * xp.tanh(row.sum())).sum())(row))(x),
    )


# -- train states ----------------------------------------------------------------------------------


def states(lib: Any) -> Results:
    """Data-parallel training by states that are stacked copies, one for each device."""
    xp, n = lib.xp, 8

    def copies(tree: Any) -> Any:
        return lib.tree_map(lambda a: lib.put_rows(xp.stack([a] * n)), tree)

    def one_of(tree: Any) -> Any:
        return lib.tree_map(lambda a: a[0], tree)

    def by_device(tree: Any) -> Any:
        return lib.tree_map(lambda a: a.reshape((n, -1, *a.shape[1:])), tree)

    def one_hot(labels: Any, k: Any) -> Any:
        return xp.where(labels[..., None] == xp.arange(k), 1.0, 0.0)

    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(64, 12)), rng.integers(0, 5, 64)
    params = {"hidden": {"w": 0.3 * drawn(12, 6), "b": np.zeros(6)}, "out": {"w": 0.3 * drawn(6, 5, seed=1)}}
    start = {"params": params, "momentum": lib.tree_map(np.zeros_like, params), "step": np.zeros((), np.int64),
             "stats": {"mean": np.zeros(6)}}  # fmt: skip

    def forward(params: Any, image: Any) -> tuple[Any, Any]:
        hidden = image @ params["hidden"]["w"] + params["hidden"]["b"]
        mean = lib.pmean(hidden.mean(axis=0), "batch")  # a layer that normalizes the batch of all devices
        scores = xp.tanh(hidden - mean) @ params["out"]["w"]
        return scores - xp.log(xp.exp(scores).sum(axis=-1, keepdims=True)), mean

    def loss(params: Any, batch: Any) -> tuple[Any, Any]:
        scores, mean = forward(params, batch["image"])
        return -(scores * one_hot(batch["label"], 5)).sum(axis=-1).mean(), (scores, mean)

    @functools.partial(lib.pmap, axis_name="batch")
    def train(state: Any, batch: Any) -> tuple[Any, Any]:
        (value, (scores, mean)), grads = lib.value_and_grad(loss, has_aux=True)(state["params"], batch)
        grads = lib.pmean(grads, "batch")
        momentum = lib.tree_map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        new = {
            "params": lib.tree_map(lambda p, m: p - 0.1 * m, state["params"], momentum), "momentum": momentum,
            "step": state["step"] + 1, "stats": {"mean": 0.9 * state["stats"]["mean"] + 0.1 * mean},
        }  # fmt: skip
        hits = xp.mean(xp.where(xp.argmax(scores, axis=-1) == batch["label"], 1.0, 0.0))
        return new, lib.pmean({"loss": value, "accuracy": hits}, "batch")

    def ahead(batches: Iterable[Any], size: int) -> Iterator[Any]:
        """Puts batches on the devices before they are needed."""
        queue: collections.deque[Any] = collections.deque()
        left = iter(batches)

        def fill(k: Any) -> Any:
            return queue.extend(lib.tree_map(lib.put_rows, by_device(b)) for b in itertools.islice(left, k))

        fill(size)
        while queue:
            yield queue.popleft()
            fill(1)

    state, found = copies(start), []
    yield "shapes of copies", lib.tree_map(lambda a: np.array(a.shape), state)
    yield "shapes of a batch", lib.tree_map(lambda a: np.array(a.shape), by_device({"image": images, "label": labels}))
    for batch in ahead(({"image": images[k : k + 32], "label": labels[k : k + 32]} for k in (0, 32) * 3), 2):
        state, metrics = train(state, batch)
        found.append(one_of(metrics))
    yield "metrics", lib.tree_map(lambda *a: xp.stack(a), *found)
    yield "copies stay equal", lib.tree_map(lambda a: abs(a - a[:1]).max(), state)
    yield "the state of one device", one_of(state)

    @functools.partial(lib.pmap, axis_name="batch")
    def hits(state: Any, batch: Any, mask: Any) -> Any:
        scores, _ = forward(state["params"], batch["image"])
        return lib.psum(((xp.argmax(scores, axis=-1) == batch["label"]) * mask).sum(), "batch")

    rows = {"image": np.pad(images[:50], ((0, 6), (0, 0))), "label": np.pad(labels[:50], (0, 6))}
    yield "a padded batch", hits(state, by_device(rows), by_device(np.arange(56) < 50))


def processes(lib: Any) -> Results:
    """Gaussian processes: hyperparameters of eight starts, one on each device, and predictions over devices."""
    xp = lib.xp
    x = np.linspace(-3, 3, 20)
    y = np.sin(2 * x) + 0.1 * drawn(20)

    def covariance(p: Any, a: Any, b: Any) -> Any:
        return xp.exp(2 * p["scale"]) * xp.exp(-0.5 * ((a[:, None] - b[None, :]) * xp.exp(-p["length"])) ** 2)

    def objective(p: Any, x: Any, y: Any) -> Any:
        k = covariance(p, x, x) + xp.exp(2 * p["noise"]) * xp.eye(20)
        return (
            0.5 * y @ xp.linalg.solve(k, y) + xp.log(xp.diagonal(xp.linalg.cholesky(k))).sum() + 10 * np.log(2 * np.pi)
        )

    def step(p: Any, x: Any, y: Any) -> tuple[Any, Any]:
        value, gradient = lib.value_and_grad(objective)(p, x, y)
        return lib.tree_map(lambda a, g: a - 0.01 * g, p, gradient), value

    starts = {"length": np.linspace(-1, 1, 8), "scale": np.zeros(8), "noise": np.linspace(-2, 0, 8)}
    fit, p, values = lib.pmap(step, in_axes=(0, None, None)), starts, []
    for _ in range(5):
        p, value = fit(p, x, y)
        values.append(value)
    yield "negative likelihoods", xp.stack(values)
    yield "hyperparameters", p
    best = lib.tree_map(lambda a: a[int(xp.argmin(value))], p)

    def predict(p: Any, x: Any, y: Any, at: Any) -> tuple[Any, Any]:
        k, across = covariance(p, x, x) + xp.exp(2 * p["noise"]) * xp.eye(20), covariance(p, at, x)
        return across @ xp.linalg.solve(k, y), xp.exp(2 * p["scale"]) - (across * xp.linalg.solve(k, across.T).T).sum(
            axis=1
        )

    yield (
        "predictions",
        lib.pmap(predict, in_axes=(None, None, None, 0))(best, x, y, np.linspace(-4, 4, 32).reshape(8, 4)),
    )


# -- from pmap to shard_map ------------------------------------------------------------------------


def migrated(lib: Any) -> Results:
    """Pairs of a pmap and of the jit of a shard_map that replaces it, and what is done with results. Since JAX 0.8."""
    xp, spec = lib.xp, lib.P
    line, plane = lib.mesh((8,), ("i",)), lib.mesh((4, 2), ("i", "j"))
    x, w = drawn(8, 6), drawn(6, seed=1)

    def mapped(f: Callable[..., Any], in_specs: Any, out_specs: Any, mesh: Any = line) -> Any:
        return lib.jit(lib.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

    shapes: list[tuple[int, ...]] = []

    def seen(v: Any) -> Any:
        return (shapes.append(v.shape), v * 2)[1]

    yield "a map", (lib.pmap(seen)(x), mapped(seen, spec("i"), spec("i"))(x))
    yield "shapes in the functions", [np.array(s) for s in sorted(set(shapes))]
    by_item = lib.pmap(lambda v, w: xp.dot(v, w), in_axes=(0, None))(x, w)
    by_block = [
        mapped(f, (spec("i"), spec()), spec("i"))(x, w)
        for f in (lambda v, w: xp.dot(v.squeeze(0), w)[None], xp.matmul, lambda v, w: xp.dot(v[0], w)[None])
    ]
    yield "ranks", [by_item, *by_block]
    yield (
        "whole arguments and results",
        (
            lib.pmap(lambda v, w: lib.pmean(v, "i") + w, axis_name="i", in_axes=(0, None), out_axes=None)(x, w),
            mapped(lambda v, w: lib.pmean(v[0], "i") + w, (spec("i"), spec()), spec())(x, w),
        ),
    )
    sums = mapped(lambda v: lib.psum(v, ("i", "j")), spec("i", "j"), spec(), plane)
    yield "two axes", sums(drawn(4, 2, 5))

    y = lib.pmap(lambda v: v + 1)(x)
    mask = np.arange(48).reshape(8, 6) % 3 == 0
    yield "reductions of results", (y.sum(), xp.mean(y, where=mask), xp.max(y, axis=0), xp.reshape(y, (-1,)))
    yield "one result", (y[0], y.addressable_shards[0].data.squeeze(0), lib.device_get(y)[0])

    rows = lib.NamedSharding(line, spec("i"))
    stacked = lib.tree_map(
        lambda *a: lib.device_put(np.stack(a), rows), *({"a": x[k], "b": w[:2] + k} for k in range(8))
    )
    repeated = lib.tree_map(lambda a: lib.device_put(np.stack([a] * 8), rows), {"a": w})
    yield "device_put_sharded and device_put_replicated", (stacked, repeated)


def indexed(lib: Any) -> Results:
    """The first element along dimension 0 of arrays of three layouts."""
    x, line = drawn(8, 16, 4), lib.mesh((8,), ("x",))
    for spec in ((), (None, "x"), ("x",)):
        yield str(spec), lib.device_put(x, lib.NamedSharding(line, lib.P(*spec)))[0]


# -- results ---------------------------------------------------------------------------------------


def values(tree: Any, tree_map: Callable[..., Any]) -> Any:
    """Returns a tree with host arrays of its arrays."""
    return tree_map(lambda a: np.asarray(a, "float64"), tree)


def blocks(x: Any) -> list[list[Any]]:
    """Returns the number of each device of an array, and where its block begins and ends in each dimension."""
    places = x.sharding.devices_indices_map(tuple(x.shape)).items()
    return sorted([d.id, *[list(s.indices(n)[:2]) for s, n in zip(index, x.shape, strict=True)]] for d, index in places)


def layouts(results: Results, leaves: Callable[[Any], list[Any]]) -> dict[str, list[Any]]:
    """Returns the blocks of each array that programs give."""
    return {name: [blocks(a) for a in leaves(tree) if hasattr(a, "sharding")] for name, tree in results}
