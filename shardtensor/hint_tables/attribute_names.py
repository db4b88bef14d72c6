"""Attributes of objects in other libraries that objects of this library lack: `CLASSES`."""

from __future__ import annotations

from shardtensor.hint_tables.module_names import MODULES
from shardtensor.hint_tables.rows import AXIS_TYPES, GPU, GRADIENTS, HOST, REFS, VARYING, WEAK, Hints, chosen, each

_FRAME = "on the host: `pandas.DataFrame(np.asarray(x))`"

_AS_FUNCTIONS = (
    "abs absolute acos allclose angle argwhere asin atan atan2 bincount broadcast_to ceil copysign corrcoef cos cosh "
    "count_nonzero cov cross diag diff divide equal exp exp2 expm1 flip fliplr flipud floor "
    "floor_divide fmax fmin fmod greater greater_equal hypot inner isclose isfinite isinf isnan kron less less_equal "
    "log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor matmul maximum median minimum "
    "moveaxis multiply nan_to_num nanmean nanmedian nansum negative not_equal outer permute_dims pow quantile "
    "reciprocal remainder roll rot90 sign sin sinc sinh split sqrt square subtract tan tanh tensordot tile topk "
    "tril triu trunc unique vdot where"
)

_IN_PLACE = {
    "add_": "`x += y`",
    "sub_": "`x -= y`",
    "mul_": "`x *= y`",
    "div_": "`x /= y`",
    "pow_": "`x **= 2`",
    "copy_": "`x[...] = y`",
    "zero_": "`x[...] = 0`",
    "fill_": "`x.fill(0)`",
    "clamp_": "`x[...] = st.clip(x, 0, 1)`",
    "masked_fill_": "`x[x > 0] = 0.0`",
    **each("exp_ sqrt_ abs_ log_", "`x[...] = st.exp(x)`"),
    **each("normal_ uniform_", "`x[...] = st.random.normal(st.random.key(0), x.shape)`"),
    **each("scatter_ index_add_ scatter_add_", "`np.add.at(x, [0, 0], 1.0)`"),
}

_TENSOR: Hints = {
    # NumPy's
    "at": "tensors are mutable; `x[i] = v`, `x[i] += v` and `np.add.at(x, i, v)` write to them",
    "byteswap": "the bytes of elements are in the order of the machine; `np.asarray(x).byteswap()` gives a host array",
    "ctypes": "the elements are in the memories of several devices; `np.asarray(x).ctypes` gives those of a host array",
    "data": "the elements are in the memories of several devices; `x.addressable_shards` has the array of each device",
    "dump": "pickle.dump(x, file) writes a tensor and its sharding, `st.save(file, x)` only the elements",
    "dumps": "`pickle.dumps(x)` returns a tensor and its sharding",
    "getfield": "tensors have no fields; `x.view('int64')` and `x.real` are views of the elements",
    "resize": "the layout of a tensor does not change; `st.resize(x, (2, 3))` returns another one",
    "setfield": "tensors have no fields; `x.view('int64')[...] = 0` and `x.real = 0` write to them",
    "__delitem__": "the size of an array does not change; `st.delete(x, 0, axis=0)` returns another one",
    # functions
    **each(_AS_FUNCTIONS, "it is the function `st.{}`"),
    **each("det eig eigh inv lstsq matrix_power norm pinv qr slogdet svd", "it is the function `st.linalg.{}`"),
    **each("cholesky solve", "it is the function `st.linalg.{}`"),
    **chosen(
        MODULES[""],
        "addmm bmm cat chunk clamp clone div eq erf ge gt histc index_add index_select inverse le lerp "
        "log_softmax logsumexp lt masked_fill masked_select mm movedim mul mv ne neg permute relu repeat_interleave "
        "rsqrt scatter scatter_add sigmoid softmax sub swapdims t take_along_dim tensor_split unbind unsqueeze "
        "as_type backend_copy backend_transfer new_axis to_batched to_flat_list to_list to_number",
    ),
    "gather": f"`st.take_along_axis(x, st.argsort(x, axis=0), axis=0)` takes elements; {HOST}",
    **_IN_PLACE,
    # hosts, devices and dtypes
    **each("numpy cpu get asnumpy toarray values", HOST),
    **each("cuda to", "`x.to_device(st.devices()[0])` transfers it, `x.astype('float32')` casts; " + GPU),
    **each("float double half bfloat16", "`x.astype('float64')`"),
    **each("int long short byte char", "`x.astype('int64')`"),
    "bool": "`x.astype(bool)`",
    "type": "`x.astype('float32')`; its dtype is `x.dtype`",
    "type_as": "`x.astype(y.dtype)`",
    **each("is_cuda get_device is_cpu platform", "`x.device`, or `x.sharding`"),
    "layout": "`x.sharding`",
    "pin_memory": "`x.reshard(x.sharding.with_memory_kind('pinned_host'))`",
    "is_contiguous": "`x.flags.c_contiguous`",
    "contiguous": "leave it out: the layout in memory is not visible here",
    # shapes
    **each("dim ndimension", "`x.ndim`"),
    **each("numel nelement", "`x.size`"),
    "element_size": "`x.itemsize`",
    "stride": "`x.strides`",
    **each("expand expand_as", "`st.broadcast_to(x, (2, 4, 4))`"),
    **each("view_as reshape_as", "`x.reshape(y.shape)`"),
    "unfold": "`st.lib.stride_tricks.sliding_window_view(x, 2, axis=0)`",
    **each("new_zeros", "`st.zeros((2, 3), dtype=x.dtype)`"),
    **each("new_ones", "`st.ones((2, 3), dtype=x.dtype)`"),
    **each("new_tensor", "`st.asarray([1, 2])`"),
    # gradients
    "detach": "`st.stop_gradient(x)`",
    **each("backward grad grad_fn requires_grad requires_grad_ retain_grad register_hook", GRADIENTS),
    # JAX's and other libraries'
    "addressable_data": "`x.addressable_shards[0].data`",
    **each("global_shards device_buffer device_buffers unsafe_buffer_pointer data_ptr", "`x.addressable_shards`"),
    "is_deleted": "`x.is_donated`",
    "delete": "`del x` drops it, and donate=True of `st.device_put` gives its memory away",
    "is_ready": "`x.block_until_ready()` waits for the elements",
    "copy_to_host_async": HOST,
    "on_device_size_in_bytes": "`x.nbytes`",
    **each("aval weak_type", "`st.typeof(x)`"),
    **each("apply apply_ map map_", "`st.smap(f, x)` calls a function of arrays on the shards"),
    **each("compute persist", "leave it out: functions run when they are called"),
    "rechunk": "`x.reshard(st.NamedSharding(mesh, st.P('x')))`",
    "chunks": "`x.sharding.shard_shape(x.shape)`, and `x.addressable_shards`",
    **each("loc iloc", "`x[0]`"),
    **each("head", "`x[:5]`"),
    **each("tail", "`x[-5:]`"),
    **each("describe groupby plot value_counts rolling corr", _FRAME),
    **each("fillna isna dropna", "`st.nan_to_num(x)` replaces NaNs, and `st.isnan(x)` finds them"),
    "to_csv": "`np.savetxt(path, x, delimiter=',')`",
    "save": "`st.save(file, x)`",
    "histogram": "it is the function `st.histogram`",
    "append": "`st.append(x, y, axis=0)`",
}  # fmt: skip

CLASSES: dict[str, Hints] = {
    "ShardedTensor": _TENSOR,
    "Device": {
        "platform": "`st.devices()[0].backend` names the library",
        "client": "`st.devices()[0].backend` names the library",
        "device_kind": "`st.devices()[0].kind`",
        "memory_stats": "`st.memory_info(st.devices()[0])` counts the bytes of tensors",
        **each("local_hardware_id", "`st.devices()[0].id`"),
        **each("type", "`st.devices()[0].backend` names the library"),
        "index": "`st.devices()[0].id`",
        **each("host_id task_id", "`st.devices()[0].process_index`"),
        **each("memory default_memory addressable_memories", "`x.sharding.memory_kind`, of a tensor"),
    },
    "JitFunction": {
        "trace": "`st.jit(f).lower(x)`",
        "eval_shape": "`st.eval_shape(f, x)`",
        "clear_cache": "leave it out: a function that is traced more than 256 times drops its oldest programs",
    },
    "Lowered": {
        "cost_analysis": "`st.jit(f).lower(x).cost()`",
        "out_info": "`st.eval_shape(f, x)`",
        "compiler_ir": "`st.jit(f).lower(x).as_text()`",
        **each("args_info in_avals in_tree out_tree donate_argnums", "`print(st.jit(f).lower(x))`"),
    },
    "Compiled": {
        "as_text": "`st.jit(f).lower(x).as_text('groups')`",
        **each("cost_analysis memory_analysis", "`st.jit(f).lower(x).cost()`"),
        **each("input_shardings input_formats", "`st.typeof(x)`"),
        **each("output_shardings output_formats out_info", "`st.eval_shape(f, x)`"),
    },
    "Mesh": {
        "__enter__": "`st.use_mesh(mesh)` is the context manager: with st.use_mesh(mesh): ...",
        **each("axis_types auto_axes explicit_axes manual_axes update_axis_types", AXIS_TYPES),
        **each("are_all_axes_auto are_all_axes_explicit are_all_axes_manual", AXIS_TYPES),
        "are_all_axes_explicit_or_manual": AXIS_TYPES,
        "abstract_mesh": "`st.AbstractMesh(mesh.axis_sizes, mesh.axis_names)`",
        "local_mesh": "`mesh.local_devices`",
        "empty": "no mesh is empty: `mesh.size`",
        "is_multi_process": "`st.process_count()`",
        "name": "meshes have no names, and their axes have: `list(mesh.shape)`",
        "device_ids": "`[device.id for device in mesh.flat]`",
        "abstract_device": "`mesh.flat[0]`",
        "is_scalar": "`mesh.size == 1`",
        "shape_tuple": "`tuple(mesh.shape.items())`",
        "update": "`st.Mesh(mesh.devices, ('a', 'b'))`",
    },
    "NamedSharding": {
        "update": "`x.sharding.with_spec(st.P())`, or `x.sharding.with_memory_kind('device')`",
        "check_compatible_aval": "every size can be split: `x.sharding.shard_shape((5,))`",
        "has_addressable_devices": "`bool(x.sharding.addressable_devices)`",
        "replicated_axes": "`{*mesh.axis_names} - {*x.sharding.spec.axes}`",
        "addressable_devices_indices_map": "`x.sharding.devices_indices_map(x.shape)`",
    },
    "PartitionSpec": {
        "UNCONSTRAINED": "shardings are always known: `st.P(None)` splits no dimension",
        "partitions": "`tuple(st.P('x', None))`",
        "update": "a spec is written anew: `st.P('x', unreduced={'y'})`",
        "unreduced_kind": "partial sums are the only kind of unreduced values: `st.P('x').unreduced` names their axes",
    },
    "ShapeDtypeStruct": {
        "format": "`st.ShapeDtypeStruct((2, 3), 'float32').sharding`; the layout in memory is not visible here",
        **each("manual_axis_type vma", VARYING),
        "weak_type": WEAK,
        "is_ref": REFS,
    },
}
"""What to write in place of attributes that objects of other libraries have."""
