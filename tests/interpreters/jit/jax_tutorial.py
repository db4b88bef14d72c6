"""The cells of JAX's "Introduction to parallel programming", which this library and JAX run.

https://docs.jax.dev/en/latest/sharded-computation.html. This module imports nothing of shardtensor: JAX may be on another
Python.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


def cells(lib: Any, grid: Any, line: Any, typed: Any, device: Any) -> Iterator[tuple[str, Any]]:
    """Yields what each cell prints: arrays, and the specs that are known while a function is traced.

    Args:
        lib: the functions of this library or of JAX by the names of the tutorial.
        grid, line: a mesh of 2 × 4 devices with the axes x and y, and one of 8 with the axis x.
        typed: the mesh of explicit shardings, with which the types of arrays have their layouts.
        device: the first device.
    """
    xp, spec = lib.xp, lib.P
    arr = lib.device_put(xp.reshape(xp.arange(32.0, dtype="float32"), (4, 8)), device)
    yield "arr", arr
    sharding = lib.NamedSharding(grid, spec("x", "y"))
    arr_sharded = lib.device_put(arr, sharding)
    yield "arr_sharded", arr_sharded

    s_host = lib.NamedSharding(grid, spec("x", "y"), memory_kind="pinned_host")
    s_dev = s_host.with_memory_kind("device")
    arr_host = lib.device_put(arr, s_host)
    yield "arr_host", arr_host
    yield "arr_dev", lib.device_put(arr, s_dev)
    yield "out_host", lib.jit(lambda x: x, out_shardings=s_host)(arr_sharded)
    yield "out_dev", lib.jit(lambda x: x, out_shardings=s_dev)(arr_host)

    f_elementwise = lib.jit(lambda x: 2 * xp.sin(x) + 1)
    yield "f_elementwise", f_elementwise(arr_sharded)
    f_contract = lambda x: x.sum(axis=0)  # noqa: E731
    yield "f_contract", lib.jit(f_contract)(arr_sharded)

    known: list[list[Any]] = []

    def add_arrays(x: Any, y: Any) -> Any:
        answer = x + y
        known.extend([*lib.spec_of(a), None, None][:2] for a in (x, y, answer))
        return answer

    with lib.use_mesh(typed):
        arg0 = lib.device_put(xp.reshape(xp.arange(4), (4, 1)), lib.NamedSharding(typed, spec("x", None)))
        arg1 = lib.device_put(xp.reshape(xp.arange(8), (1, 8)), lib.NamedSharding(typed, spec(None, "y")))
        yield "add_arrays", lib.jit(add_arrays)(arg0, arg1)
    yield "types", known

    for axes in ("x", ("x", "y")):  # on the mesh of the array, over one axis or over both
        over = lib.NamedSharding(grid, spec(axes))
        split = lib.jit(lambda x, over=over: lib.with_sharding_constraint(f_contract(x), over))
        yield f"f_contract over {' '.join(axes)}", split(arr_sharded)

    def f_contract_2(x: Any) -> Any:
        return lib.with_sharding_constraint(f_contract(x), lib.NamedSharding(line, spec("x")))

    by_line = lib.device_put(arr, lib.NamedSharding(line, spec(None, "x")))
    yield "f_contract_2", lib.jit(f_contract_2)(by_line)

    def mapped(f: Callable[..., Any], out_spec: Any, *in_specs: Any) -> Any:
        return lib.jit(lib.shard_map(f, mesh=line, in_specs=in_specs or (spec("x"),), out_specs=out_spec))

    x = xp.arange(32)
    yield "f_elementwise_sharded", mapped(lambda x: 2 * xp.sin(x) + 1, spec("x"))(x)
    yield "sum in shard", mapped(lambda x: xp.sum(x, keepdims=True), spec("x"))(x)
    yield "psum", mapped(lambda x: lib.psum(xp.sum(x), "x"), spec())(x)

    def layer(x: Any, weights: Any, bias: Any) -> Any:
        return 1 / (1 + xp.exp(-(x @ weights + bias)))

    def layer_constrained(x: Any, weights: Any, bias: Any) -> Any:
        x, weights = (lib.with_sharding_constraint(a, by_rows) for a in (x, weights))
        return layer(x, weights, bias)

    def layer_sharded(x: Any, weights: Any, bias: Any) -> Any:
        return 1 / (1 + xp.exp(-(lib.psum(x @ weights, "x") + bias)))

    by_rows = lib.NamedSharding(line, spec("x"))
    rng = np.random.default_rng(0)
    x, weights, bias = rng.normal(size=(32,)), rng.normal(size=(32, 4)), rng.normal(size=(4,))
    x_sharded, weights_sharded = lib.device_put(x, by_rows), lib.device_put(weights, by_rows)
    yield "layer", lib.jit(layer)(x_sharded, weights_sharded, bias)
    yield "layer_constrained", lib.jit(layer_constrained)(x, weights, bias)
    yield "layer_sharded", mapped(layer_sharded, spec(), spec("x"), spec("x", None), spec())(x, weights, bias)


def explicit_cells(lib: Any, grid: Any, line: Any) -> Iterator[tuple[str, Any]]:
    """Yields what the cells print that are written in another way where shardings are types, as on the meshes that
    ``jax.make_mesh`` makes by default: arguments have the layouts of ``in_specs``, products and functions say the layout
    of the result, and constraints are calls of ``reshard``.
    """
    xp, spec = lib.xp, lib.P
    arr_sharded = lib.device_put(np.arange(32.0).reshape(4, 8), lib.NamedSharding(grid, spec("x", "y")))
    with lib.use_mesh(grid):
        yield "f_elementwise", lib.jit(lambda x: 2 * xp.sin(x) + 1)(arr_sharded)
        yield "f_contract", lib.jit(lambda x: x.sum(axis=0))(arr_sharded)
        yield "f_contract_2", lib.jit(lambda x: lib.reshard(x.sum(axis=0), spec(("x", "y"))))(arr_sharded)
    by_rows = lib.NamedSharding(line, spec("x"))

    def mapped(f: Callable[..., Any], out_specs: Any, *arguments: Any) -> Any:
        in_specs = tuple(spec(*["x"] * (a.shape != (4,))) for a in arguments)
        arguments = tuple(
            lib.device_put(a, lib.NamedSharding(line, s)) for a, s in zip(arguments, in_specs, strict=True)
        )
        return lib.jit(lib.shard_map(f, mesh=line, in_specs=in_specs, out_specs=out_specs))(*arguments)

    x = np.arange(32)
    yield "f_elementwise_sharded", mapped(lambda x: 2 * xp.sin(x) + 1, spec("x"), x)
    yield "sum in shard", mapped(lambda x: xp.sum(x, keepdims=True), spec("x"), x)
    yield "psum", mapped(lambda x: lib.psum(xp.sum(x), "x"), spec(), x)

    rng = np.random.default_rng(0)
    x, weights, bias = rng.normal(size=(32,)), rng.normal(size=(32, 4)), rng.normal(size=(4,))
    with lib.use_mesh(line):
        layer = lib.jit(lambda x, w, b: 1 / (1 + xp.exp(-(xp.matmul(x, w, out_sharding=spec()) + b))))
        yield "layer", layer(lib.device_put(x, by_rows), lib.device_put(weights, by_rows), bias)
        placed = lib.jit(lambda x, w, b: layer(lib.reshard(x, spec("x")), lib.reshard(w, spec("x")), b))
        yield "layer_constrained", placed(x, weights, bias)
    yield (
        "layer_sharded",
        mapped(lambda x, w, b: 1 / (1 + xp.exp(-(lib.psum(x @ w, "x") + b))), spec(), x, weights, bias),
    )


SPECS: tuple[tuple[Any, ...], ...] = (
    (), ("x",), ("y",), (None, "x"), (None, "y"), ("x", "y"), ("y", "x"), (("x", "y"),)
)  # fmt: skip
"""Layouts of a batch of activations, and of weights."""


def activations(lib: Any, grid: Any, of_x: tuple[Any, ...]) -> list[str | None]:
    """Returns the specs of what a layer gives for activations in a layout and weights in each; None where it is an error."""
    xp = lib.xp
    layer = lib.jit(lambda x, weights, bias: 1 / (1 + xp.exp(-(x @ weights + bias))))
    found: list[str | None] = []
    for of_weights in SPECS:
        x, weights = (
            lib.device_put(np.ones(shape), lib.NamedSharding(grid, lib.P(*spec)))
            for shape, spec in (((16, 8), of_x), ((8, 8), of_weights))
        )
        try:
            found.append(spec_names(layer(x, weights, np.ones(8))))
        except lib.errors:
            found.append(None)
    return found


def text_of(spec: tuple[Any, ...]) -> str:
    """Returns a spec as text, such as ``x -`` or ``xy -``."""
    return " ".join("".join(entry or "-") for entry in (*spec, None, None)[:2])


def spec_names(x: Any) -> str:
    """Returns the spec of an array as text: the names of the axes that split each dimension; those of one device have none."""
    entries = getattr(x.sharding, "spec", None) or ()
    return " ".join("".join(entry or "-") for entry in (*entries, *[None] * len(x.shape))[: len(x.shape)])


def drawn_devices(text: str, ndim: int) -> list[list[str]]:
    """Returns the numbers of the devices in each cell of a drawing of a layout; a long vector has several lines."""
    lines = [re.findall(r"[A-Z]+ (\d[\d,]*)", line) for line in text.splitlines()]
    return [line for line in lines if line] if ndim > 1 else [[*itertools.chain(*lines)]]


Layout = tuple[str, list[Any]]
"""A memory kind, and for each device the first and the last index of its part in each dimension."""


def layout_of(kind: str, indices: Any, shape: Any) -> Layout:
    rows = sorted([d.id, *[list(s.indices(n)[:2]) for s, n in zip(index, shape, strict=True)]] for d, index in indices)
    return kind, rows


def found(lib: Any, *places: Any) -> dict[str, Any]:
    """What a library prints: the memory kind, the part of each device, the values, the spec, and the cells of a drawing.

    Drawings are None where the library cannot draw.
    """
    return {name: x if name == "types" else printed(lib, x) for name, x in cells(lib, *places)}


def printed(lib: Any, x: Any) -> list[Any]:
    indices = x.sharding.devices_indices_map(tuple(x.shape)).items()
    values = np.asarray(x, "float64").tolist()
    text = lib.draw(x) if x.shape else None  # of a scalar there is no drawing
    drawn = None if text is None else drawn_devices(text, len(x.shape))
    return [*layout_of(x.sharding.memory_kind, indices, x.shape), values, spec_names(x), drawn]
