"""A strictly typed program that calls every public function; `test_types` checks its types and runs it.

For a type checker, `typing.assert_type` is an error if the type differs, also if it is Any. When the test runs the
program, it replaces `assert_type` by a function that checks that the values have these types.
"""

from __future__ import annotations

import io
import typing
from typing import TypeAlias

import numpy as np

import shardtensor as st

Block: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Tensors: TypeAlias = list[st.ShardedTensor]
"""The types of the shards that mapped functions receive, and of lists of shards."""


def creation(mesh: st.Mesh) -> None:
    """Creates arrays, and asks for devices."""
    x = st.zeros((4, 4), device=mesh)
    for made in (st.ones((4,)), st.empty(3), st.full((2, 2), 7), st.arange(4, dtype="float32"), st.eye(3, k=1)):
        typing.assert_type(made, st.ShardedTensor)
    for made in (st.asarray([1, 2]), st.from_dlpack(np.ones(3))):
        typing.assert_type(made, st.ShardedTensor)
    for made in (st.zeros_like(x), st.ones_like(x), st.empty_like(x), st.full_like(x, 7.0)):
        typing.assert_type(made, st.ShardedTensor)
    typing.assert_type(st.devices() + st.local_devices(), list[st.Device])
    typing.assert_type(st.device_count() + st.num_shards() + st.num_threads(), int)
    typing.assert_type((st.backend_names(), st.current_device()), tuple[list[str], st.Device | None])
    typing.assert_type(st.cache_info(), st.CacheInfo)
    st.set_cache_limit(st.cache_info().limit)
    st.reset_peak_memory(measure=False)
    typing.assert_type(st.memory_info(), dict[st.Device, st.MemoryInfo])
    typing.assert_type(st.memory_info(st.devices()[0]), st.MemoryInfo)
    st.set_num_threads(st.num_threads())
    st.free_cache()


def elementwise(x: st.ShardedTensor, n: st.ShardedTensor) -> None:
    """Applies every elementwise function, and the operators of Python, to floats ``x`` and integers ``n``."""
    for function in (
        st.abs, st.acos, st.acosh, st.asin, st.asinh, st.atan, st.atanh, st.cbrt, st.ceil, st.conj, st.cos, st.cosh,
        st.exp, st.expm1, st.floor, st.imag, st.isfinite, st.isinf, st.isnan, st.log, st.log10, st.log1p, st.log2,
        st.logical_not, st.negative, st.positive, st.real, st.reciprocal, st.round, st.sign, st.signbit, st.sin,
        st.sinh, st.sqrt, st.square, st.tan, st.tanh, st.trunc,
    ):  # fmt: skip
        typing.assert_type(function(x), st.ShardedTensor)
    for binary in (
        st.add, st.atan2, st.copysign, st.divide, st.equal, st.floor_divide, st.greater, st.greater_equal, st.hypot,
        st.less, st.less_equal, st.logaddexp, st.logical_and, st.logical_or, st.logical_xor, st.maximum, st.minimum,
        st.multiply, st.nextafter, st.not_equal, st.pow, st.remainder, st.subtract,
    ):  # fmt: skip
        typing.assert_type(binary(x, 2.0), st.ShardedTensor)
    for bits in (st.bitwise_and, st.bitwise_or, st.bitwise_xor, st.bitwise_left_shift, st.bitwise_right_shift):
        typing.assert_type(bits(st.bitwise_invert(n), 1), st.ShardedTensor)
    typing.assert_type(st.clip(st.where(x > 1, x, 0.0), 0, 1), st.ShardedTensor)
    for made in (x + 1, 1 - x, x * x, x / 2, x // 2, x % 2, x**2, 2**n, n & 1, n | 1, n ^ 1, n << 1, n >> 1, ~n):
        typing.assert_type(made, st.ShardedTensor)
    for made in (x == x, x != 1, x < 1, x <= x, x > 1, x >= 1, -x, +x, abs(x), x @ x, x[0], x.T, *divmod(x, 2)):
        typing.assert_type(made, st.ShardedTensor)
    x += 1
    n <<= 1
    typing.assert_type((x, n), tuple[st.ShardedTensor, st.ShardedTensor])


def whole(x: st.ShardedTensor) -> None:
    """Reduces, orders, joins and rearranges a square matrix."""
    for reduction in (st.all, st.any, st.max, st.mean, st.min, st.prod, st.std, st.sum, st.var):
        typing.assert_type(reduction(x, axis=0), st.ShardedTensor)
    for made in (st.argmax(x), st.argmin(x, axis=1), st.cumulative_sum(x, axis=0), st.cumulative_prod(x, axis=1)):
        typing.assert_type(made, st.ShardedTensor)
    for made in (x.sum(), x.prod(axis=0), x.mean(), x.max(), x.min(), x.var(), x.std(), x.any(), x.all(), x.argmax()):
        typing.assert_type(made, st.ShardedTensor)
    for made in (
        x.argmin(),
        x.clip(0, 1),
        x.squeeze(),
        x.round(),
        x.conj(),
        x.reshape(-1),
        x.astype("int8"),
        x.ravel(),
    ):
        typing.assert_type(made, st.ShardedTensor)
    for made in (st.matmul(x, x), st.vecdot(x, x), st.tensordot(x, x), st.matrix_transpose(x), st.astype(x, "int8")):
        typing.assert_type(made, st.ShardedTensor)
    for made in (st.permute_dims(x, (1, 0)), st.moveaxis(x, 0, 1), st.flip(x), st.roll(x, 1), st.reshape(x, (-1,))):
        typing.assert_type(made, st.ShardedTensor)
    for made in (st.squeeze(st.expand_dims(x)), st.broadcast_to(x[0], (2, 4)), st.concat([x, x]), *st.unstack(x)):
        typing.assert_type(made, st.ShardedTensor)
    typing.assert_type((round(x.mean()), round(x.mean(), 2)), tuple[int, float])
    typing.assert_type(f"{float(x.mean()):.2f}", str)
    typing.assert_type(np.can_cast(st.result_type(x, "int8"), "float64"), bool)
    typing.assert_type(np.can_cast(st.promote_types("int8", st.min_scalar_type(3)), "float64"), bool)


def placement(x: st.ShardedTensor, mesh: st.Mesh) -> None:
    """Transfers a tensor, and looks at the transfers."""
    split = st.NamedSharding(mesh, st.P(None, "i"))
    for made in (st.device_put(x, split), st.reshard(x, split), st.with_sharding_constraint(x, split)):
        typing.assert_type(made, st.ShardedTensor)
    typing.assert_type(st.device_put({"weights": np.ones(3)}), dict[str, st.ShardedTensor])
    typing.assert_type(st.device_put([x, x], mesh), Tensors)
    typing.assert_type(st.device_get({"weights": x})["weights"].ndim, int)
    typing.assert_type(st.make_array_from_process_local_data(split, np.ones((2, 4)), (2, 4)), st.ShardedTensor)
    typing.assert_type(st.auto_axes(st.tanh)(x, out_sharding=split), st.ShardedTensor)
    typing.assert_type(st.explicit_axes(axes="i", in_sharding=split)(st.tanh)(x), st.ShardedTensor)
    typing.assert_type(st.ShapeDtypeStruct.like(x).update(dtype="int8"), st.ShapeDtypeStruct)
    with st.use_mesh(mesh) as used, st.transfer_guard("allow"), st.transfers() as log:
        typing.assert_type((used, log, log.bytes), tuple[st.Mesh, st.TransferLog, int])
        st.visualize_sharding(x, file=io.StringIO())
    with st.set_mesh(mesh):
        typing.assert_type((st.get_mesh(), st.typeof(x).shape), tuple[st.Mesh, tuple[int, ...]])
    typing.assert_type(st.explain(st.tanh, x), st.Explanation)
    typing.assert_type(st.eval_shape(st.tanh, x), st.ShapeDtypeStruct)
    there = st.zeros((8,), device=st.AbstractMesh((4,), ("x",)))
    typing.assert_type(st.simulate(st.tanh, there), st.SimulationReport)


def collective(x: Block) -> Block:
    """Calls every collective along the axis ``i``, of two devices."""
    for total in (st.psum(x, "i"), st.pmean(x, "i"), st.pmax(x, "i"), st.pmin(x, "i"), st.pprod(x, "i")):
        x = x + total
    x = x + st.ppermute(x, "i", [(0, 1), (1, 0)]) + st.pshuffle(x, "i", [1, 0]) + st.pbroadcast(x, "i", 0)
    x = x + st.all_gather(x, "i").sum(0) + st.psum_scatter(st.all_gather(x, "i"), "i")
    x = x + st.all_to_all(x, "i", 0, 0, tiled=True) + st.pswapaxes(st.all_gather(x, "i"), "i", 0).sum(0)
    none = np.zeros(2, int)
    x = x + st.ragged_all_to_all(x, x, none, none, none, none, axis_name="i")
    typing.assert_type((st.axis_index("i"), st.axis_size("i"), st.psum(1, "i")), tuple[int, int, int])
    typing.assert_type(st.psum([1.0], "i"), list[float])
    return x + st.pcast(x, "i", to="unreduced") + st.pvary(st.psum(x, "i"), "i")


def double(x: st.ShardedTensor, *, by: float = 2.0) -> st.ShardedTensor:
    """Is written for tensors, and for the arrays of one device."""
    return x * by


def maps(x: st.ShardedTensor, mesh: st.Mesh) -> None:
    """Maps functions over shards and over arrays."""
    shards = st.shard(x, devices=mesh)
    typing.assert_type(shards + st.to_batched_list(x, 2), Tensors)
    typing.assert_type(st.pmap(st.sqrt, shards), Tensors)
    typing.assert_type(st.pmap(collective, [np.ones(2), np.ones(2)], axis_name="i"), Tensors)
    typing.assert_type(st.pmap(collective, x[:2], axis_name="i"), st.ShardedTensor)
    typing.assert_type(st.pmap(st.sqrt)(shards), Tensors)
    typing.assert_type(st.pmap(st.pmap(st.sqrt))(x[:2, :2]), st.ShardedTensor)
    typing.assert_type(st.smap(st.sqrt, x, axes=[0]), st.ShardedTensor)
    typing.assert_type(st.unshard(shards) + st.stack(shards)[0, 0], st.ShardedTensor)
    typing.assert_type(st.map_overlap(double, x, depth=1, boundary="nearest"), st.ShardedTensor)
    typing.assert_type(st.convolve(x[0], np.ones(2), "same"), st.ShardedTensor)
    mapped = st.shard_map(collective, mesh=mesh, in_specs=st.P("i"), out_specs=st.P("i"))
    typing.assert_type(mapped(x), st.ShardedTensor)
    decorated = st.shard_map(mesh=mesh, in_specs=st.P("i"), out_specs=st.P("i"))(double)
    typing.assert_type(decorated(x), st.ShardedTensor)
    compiled = st.shard_jit(double, mesh, input_shardings=[{0: [0]}])
    typing.assert_type(compiled([[part] for part in shards]), Tensors)


def loops(x: st.ShardedTensor) -> None:
    """Calls the functions of loops and branches."""
    pair = st.scan(lambda total, row: (total + row, row.sum()), x[0], x)
    typing.assert_type(pair, tuple[st.ShardedTensor, st.ShardedTensor])
    typing.assert_type(st.fori_loop(0, 3, lambda i, y: y + i, x), st.ShardedTensor)
    typing.assert_type(st.while_loop(lambda y: y.sum() < 9, lambda y: y + 1, x), st.ShardedTensor)
    typing.assert_type(st.map(lambda row: row + 1, x), st.ShardedTensor)
    typing.assert_type(st.associative_scan(lambda a, b: a + b, x), st.ShardedTensor)
    typing.assert_type(st.cond(x.sum() > 0, double, double, x) + st.switch(1, [double, double], x), st.ShardedTensor)


@st.custom_vjp
def clipped(x: st.ShardedTensor) -> st.ShardedTensor:
    """Clips its gradient."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (st.clip(g, -1, 1),))


@st.custom_jvp
def cubed(x: st.ShardedTensor, scale: float = 1.0) -> st.ShardedTensor:
    """Has a derivative of its own."""
    return x**3 * scale


@cubed.defjvp
def cubed_jvp(
    primals: tuple[st.ShardedTensor, float], tangents: tuple[st.ShardedTensor, float]
) -> tuple[st.ShardedTensor, st.ShardedTensor]:
    """Returns the value and the tangent."""
    (x, scale), (t, _) = primals, tangents
    return cubed(x, scale), 3 * x**2 * t * scale


def gradients(x: st.ShardedTensor) -> None:
    """Calls functions with derivatives of their own."""
    typing.assert_type(clipped(x) + cubed(x, scale=2.0), st.ShardedTensor)


def as_numpys_arrays(x: st.ShardedTensor) -> None:
    """Uses attributes and methods of NumPy's arrays, functions of several results, options and files."""
    for made in (x.view("int64"), x.dot(x), x.trace(), x.diagonal(), x.argpartition(1), x[:1].copy(), x.astype("int8")):
        typing.assert_type(made, st.ShardedTensor)
    for made in (*st.modf(x), *st.frexp(x), *st.divmod(x, 0.5), st.max(x, where=x > 0, initial=0.0)):
        typing.assert_type(made, st.ShardedTensor)
    typing.assert_type((x.strides, x.flags.c_contiguous), tuple[tuple[int, ...], bool])
    for write in (st.save, st.savez, st.savez_compressed):
        stream = io.BytesIO()
        write(stream, x)
        stream.seek(0)
        loaded = st.load(stream)
        typing.assert_type(loaded if isinstance(loaded, st.ShardedTensor) else loaded["arr_0"], st.ShardedTensor)


def main() -> None:
    """Runs everything on two devices."""
    mesh = st.make_mesh((2,), ("i",), devices=st.devices("numpy"))
    x = st.reshape(st.arange(16.0, device=mesh), (4, 4)) / 16
    creation(mesh)
    with np.errstate(all="ignore"):  # The domains of some functions do not contain the elements of x.
        elementwise(x.copy(), st.ones((4, 4), dtype="int64", device=mesh))
    whole(x)
    placement(x, mesh)
    maps(x, mesh)
    loops(x)
    gradients(x)
    as_numpys_arrays(x)
