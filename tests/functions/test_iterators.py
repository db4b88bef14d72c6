"""Iterators in place of sequences: a function takes one once, as the list of its items, or refuses it. A function that
read an iterator twice would find nothing the second time.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.tensor.pytree import leaves
from tests.layouts import assert_equal, mesh_of, strided

X = np.arange(6.0).reshape(2, 3)
V = np.array([4.0, 1.0, 3.0, 2.0, 6.0, 5.0])
M = np.arange(4.0).reshape(2, 2) + np.eye(2)
I = np.array([1, 0, 1])  # noqa: E741

KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "generator": lambda items: (item for item in items),
    "map": lambda items: map(copy.copy, items),
    "reversed": lambda items: reversed(list(reversed(items))),
    "keys": lambda items: dict.fromkeys(items).keys(),
    "values": lambda items: dict(enumerate(items)).values(),
    "zip": lambda items: zip(*zip(*items, strict=True), strict=True),
}
"""Iterators over the items of a list, and views of dicts."""

Call = Callable[[Any, Callable[[], Any]], Any]
"""A call with the tensors x, v, m and i, and a function that makes the iterator."""


def along(name: str, module: Any = st, operand: str = "x", *args: Any, **params: Any) -> tuple[list[Any], Call]:
    """Returns the call of a function that takes axes."""
    axis = [0, 1] if operand == "x" else [0]
    return axis, lambda a, make: getattr(module, name)(getattr(a, operand), *args, axis=make(), **params)


def product(a: Any, b: Any) -> Any:
    return (a * b * b).sum()


def derivative(name: str) -> tuple[list[Any], Call]:
    """Returns the call of a function that takes the numbers of the arguments to be differentiated."""
    return [0, 1], lambda a, make: getattr(st, name)(product, argnums=make())(a.v, a.v + 1)


def power(x: Any, n: Any) -> Any:
    return x**n


def with_rule(name: str, **params: Any) -> Any:
    """Returns the gradient of a function with a rule, which has an argument that is not differentiated."""
    f = getattr(st, name)(power, **params)
    if name == "custom_vjp":
        f.defvjp(lambda x, n: (x**n, x), lambda n, x, g: (g * n * x ** (n - 1),))
    else:
        f.defjvp(lambda n, xs, ts: (xs[0] ** n, ts[0] * n * xs[0] ** (n - 1)))
    return f


def rule(name: str, parameter: str) -> tuple[list[Any], Call]:
    items = [1] if parameter.endswith("nums") else ["n"]
    return items, lambda a, make: st.grad(lambda x: with_rule(name, **{parameter: make()})(x, 3).sum())(a.v + 1)


def shaped(name: str, *args: Any, **params: Any) -> tuple[list[Any], Call]:
    """Returns the call of a function that takes a shape after other arguments."""
    return [2, 3], lambda a, make: getattr(st, name)(*args, shape=make(), **params)


def drawn(name: str, *args: Any, **params: Any) -> tuple[list[Any], Call]:
    """Returns the call of a function of `st.random` that takes a shape."""
    return [2, 3], lambda a, make: getattr(st.random, name)(st.random.key(1), *args, shape=make(), **params)


def joined(name: str, module: Any = st) -> tuple[list[Any], Call]:
    """Returns the call of a function that takes a list of arrays."""
    return ["x", "x"], lambda a, make: getattr(module, name)(_tensors(a, make()))


def _tensors(a: Any, names: Any) -> Any:
    """Returns an iterator of the kind of another one, over the tensors of these names."""
    if isinstance(names, type({}.keys())):
        return {n: getattr(a, n) for n in names}.values()
    if isinstance(names, list):
        return [getattr(a, n) for n in names]
    return (getattr(a, n) for n in names)


def split(name: str) -> tuple[list[Any], Call]:
    """Returns the call of a function that takes indices to split at."""
    return [1, 2], lambda a, make: getattr(st, name)(a.c, make())


def transformed(name: str, param: str) -> tuple[list[Any], Call]:
    """Returns the call of a Fourier transform that takes lengths or axes."""
    given = {"s": [2, 3], "axes": [0, 1]}[param]
    return given, lambda a, make: getattr(st.fft, name)(
        a.x, **{param: make()}, **({} if param == "axes" else {"axes": (0, 1)})
    )


def grouped(name: str, *args: Any, **params: Any) -> tuple[list[Any], Call]:
    """Returns the call of a collective that takes groups of indices."""
    return [[0, 1]], lambda a, make: mapped(
        a, lambda x, given: getattr(st, name)(x, "x", *args, axis_index_groups=given, **params), make
    )


def named(name: str, *args: Any, **params: Any) -> tuple[list[Any], Call]:
    """Returns the call of a collective along several axes."""
    return ["x", "y"], lambda a, make: mapped(
        a, lambda x, given: getattr(st, name)(x, given, *args, **params), make, (2, 2)
    )


def exchanged(x: Any, count: int, **params: Any) -> Any:
    """Calls `ragged_all_to_all` with empty slices."""
    none = np.zeros(count, int)
    return st.ragged_all_to_all(x, x, none, none, none, none, **params)


def mapped(a: Any, call: Callable[[Any, Any], Any], make: Callable[[], Any], shape: tuple[int, ...] = (2,)) -> Any:
    """Returns the result of a map in which each program makes a call with an iterator."""
    spec = st.P(("x", "y")[: len(shape)])
    run = st.shard_map(
        lambda x: call(x, make()), mesh=mesh_of(shape, "numpy"), in_specs=spec, out_specs=spec, check_vma=False
    )
    return run(a.q)


def compiled(argument: str) -> tuple[list[Any], Call]:
    """Returns the call of a function compiled with an argument of `jit`."""
    items = ["x", "n"] if argument.endswith("names") else [0, 1]

    def call(a: Any, make: Callable[[], Any]) -> Any:
        f = st.jit(lambda x, n: x + n, **{argument: make()})
        return f(a.v + 0, a.v + 1) if argument.startswith("donate") else [f(2, 3), f(2, 3)]

    return items, call


def from_parts(prefix: str) -> dict[str, tuple[list[Any], Call]]:
    """The functions that make a tensor of parts, which the package has, and `st.distributed`."""
    place = st.distributed if prefix else st
    return {
        f"{prefix}make_array_from_callback.shape": (
            [4],
            lambda a, make: place.make_array_from_callback(make(), _layout(), lambda i: np.arange(4.0)[i]),
        ),
        f"{prefix}make_array_from_process_local_data.global_shape": (
            [4],
            lambda a, make: place.make_array_from_process_local_data(_layout(), np.arange(4.0), make()),
        ),
        f"{prefix}make_array_from_single_device_arrays.shape": (
            [4],
            lambda a, make: place.make_array_from_single_device_arrays(make(), _layout(), _parts()),
        ),
        f"{prefix}make_array_from_single_device_arrays.arrays": (
            [0, 1],
            lambda a, make: place.make_array_from_single_device_arrays((4,), _layout(), _as_kind(make(), _parts())),
        ),
    }


CASES: dict[str, tuple[list[Any], Call]] = {
    # Derivatives.
    **{f"{name}.argnums": derivative(name) for name in ("grad", "value_and_grad", "jacrev", "jacfwd", "hessian")},
    **{
        f"{name}.{parameter}": rule(name, parameter)
        for name in ("custom_vjp", "custom_jvp")
        for parameter in ("nondiff_argnums", "nondiff_argnames")
    },
    "accumulate.batch_argnums": (
        [1],
        lambda a, make: st.accumulate(st.grad(lambda w, x: (w * x).sum()), 2, batch_argnums=make())(a.v, a.v),
    ),
    "remat.static_argnums": (
        [1],
        lambda a, make: st.grad(lambda x: st.remat(power, static_argnums=make())(x, 2).sum())(a.v),
    ),
    "remat.static_argnames": (
        ["n"],
        lambda a, make: st.grad(lambda x: st.remat(power, static_argnames=make())(x, n=2).sum())(a.v),
    ),
    # Axes.
    **{
        f"{name}.axis": along(name)
        for name in [
            "all",
            "any",
            "average",
            "count_nonzero",
            "flip",
            "max",
            "mean",
            "median",
            "min",
            "nanmax",
            "nanmean",
            "nanmedian",
            "nanmin",
            "nanprod",
            "nanstd",
            "nansum",
            "nanvar",
            "prod",
            "ptp",
            "std",
            "sum",
            "trim_zeros",
            "var",
        ]
    },
    **{f"{n}.axis": along(n, st, "x", 0.5) for n in ("quantile", "nanquantile", "percentile", "nanpercentile")},
    "switch.branches": ([st.sum, st.max], lambda a, make: st.switch(1, make(), a.x)),
    "gradient.axis": ([0, 1], lambda a, make: st.gradient(a.x, axis=make())),
    "linalg.norm.axis": along("norm", st.linalg),
    "linalg.vector_norm.axis": along("vector_norm", st.linalg),
    "expand_dims.axis": ([0, 1], lambda a, make: st.expand_dims(a.x, make())),
    "squeeze.axis": ([0], lambda a, make: st.squeeze(a.x[None], make())),
    "apply_over_axes.axes": ([0, 1], lambda a, make: st.apply_over_axes(st.sum, a.x, make())),
    "moveaxis.source": ([0, 1], lambda a, make: st.moveaxis(a.x, make(), (1, 0))),
    "moveaxis.destination": ([1, 0], lambda a, make: st.moveaxis(a.x, (0, 1), make())),
    "permute_dims.axes": ([1, 0], lambda a, make: st.permute_dims(a.x, make())),
    "transpose.axes": ([1, 0], lambda a, make: st.transpose(a.x, make())),
    "roll.shift": ([1, 2], lambda a, make: st.roll(a.x, make(), (0, 1))),
    "roll.axis": ([0, 1], lambda a, make: st.roll(a.x, (1, 2), make())),
    "rot90.axes": ([0, 1], lambda a, make: st.rot90(a.x, 1, make())),
    "tensordot.axes": ([[0], [0]], lambda a, make: st.tensordot(a.x, a.x, axes=make())),
    "tensordot.axes[0]": ([0], lambda a, make: st.tensordot(a.x, a.x, axes=(make(), make()))),
    "linalg.tensordot.axes": ([[0], [0]], lambda a, make: st.linalg.tensordot(a.x, a.x, axes=make())),
    "linalg.tensorsolve.axes": ([0], lambda a, make: st.linalg.tensorsolve(a.m, a.m[0], make())),
    "fft.fftshift.axes": ([0, 1], lambda a, make: st.fft.fftshift(a.x, make())),
    "fft.ifftshift.axes": ([0, 1], lambda a, make: st.fft.ifftshift(a.x, make())),
    **{
        f"fft.{name}.{param}": transformed(name, param)
        for name in ["fft2", "fftn", "ifft2", "ifftn", "irfft2", "irfftn", "rfft2", "rfftn"]
        for param in ("s", "axes")
    },
    # Shapes.
    **{f"{name}.shape": shaped(name) for name in ("empty", "ones", "zeros")},
    "full.shape": ([2, 3], lambda a, make: st.full(make(), 7)),
    "fromfunction.shape": ([2, 3], lambda a, make: st.fromfunction(lambda i, j: i + j, make())),
    "indices.dimensions": ([2, 3], lambda a, make: st.indices(make())),
    "reshape.shape": ([3, 2], lambda a, make: st.reshape(a.x, make())),
    "resize.new_shape": ([3, 4], lambda a, make: st.resize(a.x, make())),
    "broadcast_to.shape": ([2, 2, 3], lambda a, make: st.broadcast_to(a.x, make())),
    "broadcast_shapes.shapes": ([2, 3], lambda a, make: st.broadcast_shapes(make(), (1, 3))),
    "tile.repetitions": ([2, 3], lambda a, make: st.tile(a.x, make())),
    "unravel_index.shape": ([2, 3], lambda a, make: st.unravel_index(a.i, make())),
    "ravel_multi_index.dims": ([2, 3], lambda a, make: st.ravel_multi_index((a.i, a.i), make())),
    "ravel_multi_index.mode": (["wrap", "clip"], lambda a, make: st.ravel_multi_index((a.i, a.i), (2, 3), make())),
    "random.bernoulli.shape": drawn("bernoulli", 0.5),
    "random.binomial.shape": drawn("binomial", 5, 0.5),
    "random.categorical.shape": ([3], lambda a, make: st.random.categorical(st.random.key(1), a.v, shape=make())),
    "random.choice.shape": drawn("choice", 5),
    "random.exponential.shape": drawn("exponential"),
    "random.gamma.shape": drawn("gamma", 2.0),
    "random.integers.shape": drawn("integers", low=0, high=5),
    "random.normal.shape": drawn("normal"),
    "random.poisson.shape": drawn("poisson", 2.0),
    "random.truncated_normal.shape": drawn("truncated_normal", -1.0, 1.0),
    "random.uniform.shape": drawn("uniform"),
    # Lists of arrays.
    **{
        f"{name}.{param}": joined(name)
        for name, param in [
            ("column_stack", "tup"),
            ("concat", "arrays"),
            ("dstack", "tup"),
            ("hstack", "tup"),
            ("stack", "arrays"),
            ("vstack", "tup"),
            ("block", "arrays"),
        ]
    },
    "unshard.arrays": (["x", "x"], lambda a, make: st.unshard(_tensors(a, make()))),
    "lexsort.keys": (["v", "w"], lambda a, make: st.lexsort(_tensors(a, make()))),
    "linalg.multi_dot.arrays": (["m", "m", "m"], lambda a, make: st.linalg.multi_dot(_tensors(a, make()))),
    "ravel_multi_index.multi_index": (["i", "i"], lambda a, make: st.ravel_multi_index(_tensors(a, make()), (2, 3))),
    "select.condlist": (["b", "b"], lambda a, make: st.select(_tensors(a, make()), [a.v, a.w])),
    "select.choicelist": (["v", "w"], lambda a, make: st.select([a.b, a.b], _tensors(a, make()))),
    "choose.choices": (["i", "i"], lambda a, make: st.choose(a.i, _tensors(a, make()))),
    "piecewise.condlist": (["b", "b"], lambda a, make: st.piecewise(a.v, _tensors(a, make()), [1, 2])),
    "piecewise.funclist": ([1, 2], lambda a, make: st.piecewise(a.v, [a.v > 3, a.v < 2], make())),
    "histogramdd.sample": (["v", "w"], lambda a, make: st.histogramdd(_tensors(a, make()), 2)),
    "poly.seq_of_zeros": ([1.0, 2.0], lambda a, make: st.poly(make())),
    "einsum.operands": ([0, 1], lambda a, make: st.einsum(a.x, make(), make())),
    "einsum.optimize": (["einsum_path", [0, 1]], lambda a, make: st.einsum("ij,jk", a.m, a.m, optimize=make())),
    # Indices, widths and edges.
    **{f"{name}.indices_or_sections": split(name) for name in ["array_split", "dsplit", "hsplit", "split", "vsplit"]},
    "argpartition.kth": ([2], lambda a, make: st.argpartition(a.v, make())),
    "partition.kth": ([2], lambda a, make: st.partition(a.v, make())),
    "pad.pad_width": ([(1, 2), (0, 1)], lambda a, make: st.pad(a.x, make())),
    "pad.pad_width[0]": ([1, 2], lambda a, make: st.pad(a.v, [make()])),
    "pad.constant_values": ([(1, 2), (3, 4)], lambda a, make: st.pad(a.x, 1, constant_values=make())),
    "pad.end_values": ([(1, 2), (3, 4)], lambda a, make: st.pad(a.x, 1, "linear_ramp", end_values=make())),
    "pad.stat_length": ([(1, 2), (2, 1)], lambda a, make: st.pad(a.x, 1, "mean", stat_length=make())),
    "take.indices": ([1, 0], lambda a, make: st.take(a.v, make())),
    "delete.obj": ([1, 0], lambda a, make: st.delete(a.v, make())),
    "insert.obj": ([1, 0], lambda a, make: st.insert(a.v, make(), 7.0)),
    "repeat.repeats": ([1, 2], lambda a, make: st.repeat(a.x, make(), axis=0)),
    "histogram.bins": ([0.0, 2.0, 7.0], lambda a, make: st.histogram(a.v, make())),
    "histogram.range": ([0.0, 7.0], lambda a, make: st.histogram(a.v, 3, make())),
    "histogram_bin_edges.bins": ([0.0, 2.0, 7.0], lambda a, make: st.histogram_bin_edges(a.v, make())),
    "histogram_bin_edges.range": ([0.0, 7.0], lambda a, make: st.histogram_bin_edges(a.v, 3, make())),
    "histogram2d.bins": ([2, 3], lambda a, make: st.histogram2d(a.v, a.w, make())),
    "histogram2d.range": ([(0, 7), (0, 8)], lambda a, make: st.histogram2d(a.v, a.w, 2, make())),
    "histogramdd.bins": ([2, 3], lambda a, make: st.histogramdd(a.m, make())),
    "histogramdd.range": ([(0, 7), (0, 8)], lambda a, make: st.histogramdd(a.m, 2, make())),
    "polyint.k": ([1, 2], lambda a, make: st.polyint(a.v, 2, make())),
    "ix_.args": ([1, 0], lambda a, make: a.m[st.ix_(make(), [0, 1])]),
    "meshgrid.arrays": ([1, 0], lambda a, make: st.meshgrid(_listed(make()), a.v)),
    "map_overlap.depth": ([1, 0], lambda a, make: st.map_overlap(lambda x: x, a.x, depth=make(), boundary="nearest")),
    "searchsorted.sorter": ([1, 0], lambda a, make: st.searchsorted(a.m[0], a.v, sorter=make())),
    "isdtype.kind": (["integral", "bool"], lambda a, make: st.isdtype(np.dtype("i4"), make())),
    # Meshes and layouts.
    "Mesh.devices": (["d0", "d1"], lambda a, make: st.Mesh(_devices(make()), "x")),
    "Mesh.axis_names": (["x", "y"], lambda a, make: st.Mesh(np.reshape(_two(), (2, 1)), make())),
    "AbstractMesh.axis_sizes": ([2, 3], lambda a, make: st.AbstractMesh(make(), ("x", "y"))),
    "AbstractMesh.axis_names": (["x", "y"], lambda a, make: st.AbstractMesh((2, 3), make())),
    "make_mesh.axis_sizes": ([2, 1], lambda a, make: st.make_mesh(make(), ("x", "y"))),
    "make_mesh.axis_names": (["x", "y"], lambda a, make: st.make_mesh((2, 1), make())),
    "make_mesh.devices": (["d0", "d1"], lambda a, make: st.make_mesh((2,), ("x",), devices=_devices(make()))),
    "P.parts": (["x", "y"], lambda a, make: st.P(make())),
    "PartitionSpec.parts": (["x", "y"], lambda a, make: st.P(None, make())),
    "PartitionSpec.unreduced": (["x", "y"], lambda a, make: st.P(unreduced=make())),
    "P.unreduced": (["x", "y"], lambda a, make: st.P(unreduced=make())),
    "ShapeDtypeStruct.shape": ([2, 3], lambda a, make: st.ShapeDtypeStruct(make(), "f4").shape),
    "shard.devices": (["d0", "d1"], lambda a, make: st.shard(a.v, devices=_devices(make()))),
    "visualize_sharding.x": ([4], lambda a, make: st.visualize_sharding(make(), _layout())),
    # Maps and collectives.
    "shard_map.axis_names": (["x"], lambda a, make: _shard_map(a, axis_names=make())),
    "shard_map.in_specs": ([st.P("x")], lambda a, make: _shard_map(a, in_specs=make())),
    "shard_map.out_specs": ([st.P("x"), st.P("x")], lambda a, make: _shard_map(a, two=True, out_specs=make())),
    "shard_jit.input_shardings": (
        ["x"],
        lambda a, make: st.shard_jit(lambda x: x + 1, mesh_of((2,), "numpy"), input_shardings=[{0: make()}])(
            [[a.v]] * 2
        ),
    ),
    "pmap.in_axes": ([0, 0], lambda a, make: _pmap(a, in_axes=make())),
    "pmap.out_axes": ([0, 0], lambda a, make: _pmap(a, two=True, out_axes=make())),
    "pmap.static_argnums": ([1], lambda a, make: _pmap(a, static_argnums=make(), y=3)),
    "pmap.devices": (["d0", "d1"], lambda a, make: _pmap(a, devices=_devices(make()))),
    "smap.axes": ([0, 0], lambda a, make: st.smap(lambda x, y: x + y, a.x, a.x, axes=make())),
    "smap.out_axes": ([0], lambda a, make: st.smap(lambda x: x, a.x, axes=[0], out_axes=make())),
    "smap.devices": (["d0", "d1"], lambda a, make: st.smap(lambda x: x, a.x, devices=_devices(make()))),
    "smap.axis_name": (["x"], lambda a, make: st.smap(lambda x: x + st.axis_index("x"), a.x, axis_name=make())),
    "ppermute.perm": ([(0, 1), (1, 0)], lambda a, make: mapped(a, lambda x, p: st.ppermute(x, "x", p), make)),
    "ppermute.perm[0]": ([1, 0], lambda a, make: mapped(a, lambda x, p: st.ppermute(x, "x", [p, (0, 1)]), make)),
    "pshuffle.perm": ([1, 0], lambda a, make: mapped(a, lambda x, p: st.pshuffle(x, "x", p), make)),
    **{f"{name}.axis_index_groups": grouped(name) for name in ("all_gather", "pmax", "pmean", "pmin", "pprod", "psum")},
    "psum.axis_index_groups[0]": (
        [0, 1],
        lambda a, make: mapped(a, lambda x, g: st.psum(x, "x", axis_index_groups=[g]), make),
    ),
    "all_to_all.axis_index_groups": grouped("all_to_all", 0, 0, tiled=True),
    "psum_scatter.axis_index_groups": grouped("psum_scatter", tiled=True),
    "pswapaxes.axis_index_groups": grouped("pswapaxes", 0),
    **{f"{name}.axis_name": named(name) for name in ("pmax", "pmean", "pmin", "pprod", "psum")},
    "pcast.axis_name": named("pcast", to="unreduced"),
    "pvary.axis_name": named("pvary"),
    "all_gather.axis_name": named("all_gather", tiled=True),
    "all_to_all.axis_name": named("all_to_all", 0, 0, tiled=True),
    "psum_scatter.axis_name": named("psum_scatter", tiled=True),
    "ragged_all_to_all.axis_index_groups": (
        [[0, 1]],
        lambda a, make: mapped(a, lambda x, given: exchanged(x, 2, axis_name="x", axis_index_groups=given), make),
    ),
    "ragged_all_to_all.axis_name": (
        ["x", "y"],
        lambda a, make: mapped(a, lambda x, given: exchanged(x, 4, axis_name=given), make, (2, 2)),
    ),
    "pswapaxes.axis_name": (
        ["x", "y"],
        lambda a, make: mapped(a, lambda x, n: st.pswapaxes(st.concat([x] * 4), n, 0), make, (2, 2)),
    ),
    "pbroadcast.axis_name": named("pbroadcast", 0),
    "ppermute.axis_name": named("ppermute", [(0, 1)]),
    "pshuffle.axis_name": named("pshuffle", [1, 0, 2, 3]),
    "axis_index.axis_name": (["x", "y"], lambda a, make: mapped(a, lambda x, n: x + st.axis_index(n), make, (2, 2))),
    "axis_size.axis_name": (["x", "y"], lambda a, make: mapped(a, lambda x, n: x + st.axis_size(n), make, (2, 2))),
    # Programs.
    **{
        f"jit.{argument}": compiled(argument)
        for argument in ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    },
    **from_parts(""),
    **from_parts("distributed."),
    "auto_axes.axes": (["x"], lambda a, make: st.auto_axes(st.exp, axes=make(), out_sharding=_layout())(a.v[:4])),
    "explicit_axes.axes": (
        ["x"],
        lambda a, make: st.explicit_axes(st.exp, axes=make(), in_sharding=_layout())(a.v[:4]),
    ),
    # Methods.
    "ShardedTensor.reshape": ([3, 2], lambda a, make: a.x.reshape(make())),
    "ShardedTensor.transpose": ([1, 0], lambda a, make: a.x.transpose(make())),
    "ShardedTensor.sum": ([0, 1], lambda a, make: a.x.sum(axis=make())),
    "ShardedTensor.squeeze": ([0], lambda a, make: a.x[None].squeeze(axis=make())),
    "ShardedTensor.take": ([1, 0], lambda a, make: a.v.take(make())),
    "ShardedTensor.repeat": ([1, 2], lambda a, make: a.x.repeat(make(), axis=0)),
    "ShardedTensor.choose": (["i", "i"], lambda a, make: a.i.choose(_tensors(a, make()))),
    "ShardedTensor.partition": ([2], lambda a, make: _partitioned(a.v + 0, make())),
    "ShardedTensor.__getitem__": ([1, 0], lambda a, make: a.v[make()]),
    "ShardedTensor.__setitem__": ([1, 0], lambda a, make: _written(a.v + 0, make())),
    "ufunc.reduce.axis": ([0, 1], lambda a, make: np.add.reduce(a.x, axis=make())),
    "ufunc.reduceat.indices": ([0, 1], lambda a, make: np.add.reduceat(a.v, make())),
    "ufunc.at.indices": ([0, 1], lambda a, make: _added(a.v + 0, make())),
    "lib.stride_tricks.sliding_window_view.window_shape": (
        [1, 2],
        lambda a, make: st.lib.stride_tricks.sliding_window_view(a.x, make()),
    ),
}
"""The calls by the function and the parameter that takes a sequence."""


def _listed(given: Any) -> Any:
    return np.asarray(given) if isinstance(given, list) else given


def _two() -> list[st.Device]:
    return st.devices("numpy")[:2]


def _layout() -> st.NamedSharding:
    return st.NamedSharding(st.Mesh(_two(), "x"), st.P("x"))


def _parts() -> list[st.ShardedTensor]:
    return [st.device_put(np.arange(2.0) + 2 * k, device) for k, device in enumerate(_two())]


def _as_kind(given: Any, items: list[Any]) -> Any:
    return [items[k] for k in given] if isinstance(given, list) else (items[k] for k in given)


def _devices(given: Any) -> Any:
    return _as_kind([int(n[1]) for n in given] if isinstance(given, list) else (int(n[1]) for n in given), _two())


def _partitioned(x: Any, kth: Any) -> Any:
    x.partition(kth)
    return x


def _written(x: Any, index: Any) -> Any:
    x[index] = 7
    return x


def _added(x: Any, index: Any) -> Any:
    np.add.at(x, index, 7)
    return x


def _shard_map(a: Any, two: bool = False, **given: Any) -> Any:
    options = {"in_specs": st.P("x"), "out_specs": st.P("x"), **given}
    f = (lambda x: (x, x + 1)) if two else (lambda x: x + 1)
    return st.shard_map(f, mesh=mesh_of((2,), "numpy"), **options)(a.v)


def _pmap(a: Any, two: bool = False, y: Any = None, **given: Any) -> Any:
    f = st.pmap((lambda x, y: (x, x + y)) if two else (lambda x, y: x + y), **given)
    return f(a.x, a.x if y is None else y)


def tensors() -> dict[str, Any]:
    """Returns the operands of the calls."""
    arrays = {
        "x": X, "v": V, "w": V[::-1].copy(), "m": M, "i": I, "b": V > 3, "q": np.arange(8.0).reshape(4, 2),
        "c": np.arange(27.0).reshape(3, 3, 3),
    }  # fmt: skip
    return {name: st.device_put(array, mesh_of((2,), "numpy")) for name, array in arrays.items()}


def outcome(name: str, kind: str | None, jit: bool) -> Any:
    """Returns the results of two calls with iterators, or with the list if the kind is None; or the error."""
    items, call = CASES[name]

    def run(given: dict[str, Any]) -> Any:
        return call(types.SimpleNamespace(**given), lambda: items if kind is None else KINDS[kind](items))

    f, found = st.jit(run) if jit else run, []
    for _ in range(2):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(f(tensors()))
        except Exception as error:
            found.append(error)
    return found


def possible(name: str, kind: str) -> bool:
    """Whether there is an iterator of that kind over these items."""
    items = CASES[name][0]
    if kind == "zip":
        return all(isinstance(item, (list, tuple)) and len(item) == 2 for item in items)
    return kind != "keys" or (not any(isinstance(x, list) for x in items) and len(set(items)) == len(items))


def check(found: Any, wanted: Any) -> None:
    """Asserts that the result of an iterator is that of the list, or an error of the library.

    Under jit, and where the list is an error too, such as a list of positions of `partition`, both are errors.
    """
    if isinstance(found, st.ShardTensorError):
        assert "nothing to" not in str(found), "the iterator was used up before it was read"
        return
    assert not isinstance(found, Exception), repr(found)
    assert not isinstance(wanted, Exception), f"{found!r}, although the list is {wanted!r}"
    pairs = zip(leaves(found), leaves(wanted), strict=True)
    for x, y in pairs:
        if isinstance(y, (st.ShardedTensor, np.ndarray)):
            assert_equal(x, y)
        else:
            assert x == y


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", CASES)
def test_an_iterator_is_the_list_of_its_items_or_refused(name: str, jit: bool) -> None:
    wanted = outcome(name, None, jit)
    for kind in strided([kind for kind in KINDS if possible(name, kind)], 3, list(CASES).index(name) + jit):
        for found, of_list in zip(outcome(name, kind, jit), wanted, strict=True):
            if name != "empty.shape":  # Its elements are arbitrary.
                check(found, of_list)


NO_SEQUENCE = frozenset([
    "Explanation.calls", "NamedSharding.spec", "Shard.index", "SimulationReport.steps",
    "distributed.processes_of.devices",
])  # fmt: skip
"""What users do not call, or is no sequence."""

LIBRARY = {"": st, "linalg.": st.linalg, "fft.": st.fft, "random.": st.random, "distributed.": st.distributed}
SEQUENCES = re.compile(r"Sequence|Iterable|Shape|tuple|list\[|_Axis|Axes|AxisName|Groups")


def sequence_parameters() -> set[str]:
    """Returns the parameters of public functions whose annotations have sequences."""
    found = set()
    for prefix, module in LIBRARY.items():
        for name in getattr(module, "__all__", dir(module)):
            function = getattr(module, name)
            if not str(getattr(function, "__module__", "")).startswith("shardtensor") or name[0] == "_":
                continue
            if not callable(function) or (isinstance(function, type) and issubclass(function, BaseException)):
                continue
            for parameter in inspect.signature(function).parameters.values():
                annotation = str(parameter.annotation)
                if SEQUENCES.search(annotation) and not annotation.startswith("Callable"):
                    found.add(f"{prefix}{name}.{parameter.name}")
    return found


def test_no_function_that_takes_a_sequence_is_missing() -> None:
    assert sequence_parameters() - NO_SEQUENCE <= set(CASES)


def test_an_iterator_that_programs_share_is_refused() -> None:
    """The first program would leave nothing to the others, and the next call would find nothing at all."""
    mesh, x = mesh_of((2,), "numpy"), np.arange(4.0)
    calls: list[tuple[Any, Callable[[Any, Any], Any]]] = [
        (zip([0, 1], [1, 0], strict=True), lambda x, given: st.ppermute(x, "x", given)),
        (iter([1, 0]), lambda x, given: st.pshuffle(x, "x", given)),
        (iter([[0, 1]]), lambda x, given: st.psum(x, "x", axis_index_groups=given)),
        ([iter([0, 1])], lambda x, given: st.all_gather(x, "x", axis_index_groups=given, tiled=True)),
    ]
    for given, call in calls:
        run = st.shard_map(functools.partial(call, given=given), mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))
        for f in (run, run, st.jit(run)):
            with pytest.raises(st.ArgumentTypeError, match="read only once; wanted lists"):
                f(x)


def test_a_program_keeps_the_lists_of_its_trace() -> None:
    mesh, x = mesh_of((2,), "numpy"), np.arange(4.0)
    perm, groups = [(0, 1), (1, 0)], [[0, 1]]

    def run(x: Any) -> Any:
        return st.ppermute(x, "x", perm) + st.psum(x, "x", axis_index_groups=groups)

    f = st.jit(st.shard_map(run, mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x")))
    wanted = f(x).tolist()
    perm[:], groups[:] = [(0, 0), (1, 1)], [[0], [1]]
    assert f(x).tolist() == wanted


def test_long_operands_take_an_iterator_once() -> None:
    """The functions of small host arrays, which NumPy computes, do not use up what the others then read."""
    host = np.arange(300_000.0).reshape(300, 1000)
    x = st.device_put(host, mesh_of((2,), "numpy"))
    for f in (
        lambda x, pair: np.tile(x, pair(1, 2)),
        lambda x, pair: np.broadcast_to(x, pair(300, 1000)),
        lambda x, pair: np.flip(x, pair(0, 1)),
        lambda x, pair: np.roll(x, (1, 2), pair(0, 1)),
        lambda x, pair: np.moveaxis(x, pair(0, 1), pair(1, 0)),
        lambda x, pair: np.rot90(x, 1, pair(1, 0)),
        lambda x, pair: np.median(x, axis=pair(0, 1)),
        lambda x, pair: np.quantile(x, 0.5, axis=pair(0, 1)),
        lambda x, pair: np.gradient(x, axis=pair(0, 1))[1],
        lambda x, pair: np.histogram(x, 3, pair(0, 9))[0],
        lambda x, pair: np.average(x, axis=pair(0, 1)),
        lambda x, pair: np.tensordot(x, x, pair((0,), (0,))).shape,
    ):
        assert_equal(f(x, lambda *items: iter(items)), f(host, lambda *items: items))
