"""Names of JAX and of jax.lax that the package lacks."""

from __future__ import annotations

from shardtensor.hint_tables.rows import ACCUMULATE, AXIS_TYPES, HOST, KEY, REFS, RELU, SIGMOID, SOFTMAX, VARYING, each

_GUARD = "`with st.transfer_guard('disallow'): ...` guards transfers between devices; those of the host are explicit"

JAXS = {
    "nn": (
        f"there are no layers, but functions: ReLU is {RELU}, sigmoid {SIGMOID}, softmax {SOFTMAX}; modules of "
        "torch run in functions that st.pmap maps"
    ),
    "numpy": "its functions are those of the package: `import shardtensor as st` and `st.exp(x)`",
    "scipy": "see st.linalg, st.fft and `st.convolve`; `st.smap(scipy.special.erf, x)` calls a function on the shards",
    "lax": (
        "the collectives are st.psum, st.all_gather, st.ppermute and so on, other functions are NumPy's: `st.exp(x)`; "
        "loops and branches are st.scan, st.fori_loop, st.while_loop, st.cond and st.switch, or Python's"
    ),
    "experimental": (
        "`st.shard_map`, `st.make_mesh((2, 2), ('x', 'y'))` in place of mesh_utils.create_device_mesh, and "
        "`st.distributed` in place of multihost_utils are part of the package"
    ),
    "mesh_utils": "`st.make_mesh((2, 2), ('x', 'y'))` takes the place of create_device_mesh",
    **each("create_device_mesh create_hybrid_device_mesh", "`st.make_mesh((2, 2), ('x', 'y'))`"),
    "visualize_array_sharding": "`st.visualize_sharding(x)`",
    "inspect_array_sharding": "`x.sharding` is known at all times, also under st.jit",
    "multihost_utils": "`st.distributed`",
    "tree_util": "`st.tree.map(f, params)`, `st.tree.leaves(params)` and `st.register_pytree_node`",
    "tree_map": "`st.tree.map(f, params)`",
    **each("tree_leaves tree_flatten tree_structure", "`st.tree`: `st.tree.flatten(params)`, `st.tree.leaves(params)`"),
    "tree_unflatten": "`st.tree.unflatten(st.tree.structure(params), st.tree.leaves(params))`",
    "config": "`st.set_num_devices(2)` sets the number of logical devices; arrays are float64 by default",
    "debug": "print and breakpoint() work in mapped functions; `st.visualize_sharding(x)` draws a layout",
    **each("named_scope named_call", "leave it out: tracebacks and st.transfers() name lines of the program"),
    "enable_x64": "leave it out: arrays are float64 by default",
    "profiler": "`st.transfers()` records what is transferred",
    "block_until_ready": "`x.block_until_ready()`; of a tree: `st.tree.map(lambda a: a.block_until_ready(), params)`",
    "make_jaxpr": "`st.jit(f).lower(x).as_text()` is the program of a function",
    "AxisType": AXIS_TYPES,
    "get_abstract_mesh": "`st.get_mesh()`, also under st.jit",
    "use_abstract_mesh": "`with st.use_mesh(st.make_mesh((4,), ('z',))): ...`, also under st.jit",
    **each("PositionalSharding GSPMDSharding PmapSharding Sharding", "`st.NamedSharding(mesh, st.P('x'))`"),
    "make_single_device_sharding": "`st.SingleDeviceSharding(st.devices()[0])`",
    "AbstractDevice": "`st.AbstractMesh((2, 2), ('x', 'y'))` has devices that do not exist",
    "ManualAxisType": VARYING,
    "UnreducedKind": "unreduced values are partial sums: `st.P('x', unreduced={'y'})`",
    "no_collectives": "`with st.transfer_guard('disallow'): ...` makes implicit transfers an error",
    **each("auto_pcast remove_size_one_mesh_axis_from_type", "leave it out: it is about types of JAX's tracers"),
    "device_put_sharded": "`st.device_put(np.stack([x[0], y[0]]), st.NamedSharding(mesh, st.P('x')))`",
    "device_put_replicated": "`st.device_put(x, st.NamedSharding(mesh, st.P()))`",
    "soft_pmap": "`st.smap(f, x, axes=0)` maps over blocks, one for each device",
    "pdot": (
        "`st.shard_map(lambda x, y: st.psum(x @ y, 'x'), mesh=mesh, in_specs=(st.P(None, 'x'), st.P('x')), "
        "out_specs=st.P())(x, y)`"
    ),
    "xmap": "`st.shard_map` maps over named axes of a mesh; docs/from_pmap_and_xmap.md shows both",
    "host_count": "`st.process_count()`",
    "host_id": "`st.process_index()`",
    **each("process_indices host_ids", "`range(st.process_count())`"),
    "live_devices": (
        "leave it out: a lost process is an error in all others, and the job is started again, on any number of "
        "processes; `st.checkpoint.Manager` has the last step"
    ),
    "live_processes": "leave it out: a lost process is an error in all others",
    "ProcessFailureError": "`st.DistributedError`",
    "reached_preemption_sync_point": (
        "on_sigterm=True of `st.checkpoint.Manager` writes a checkpoint of the same step in all processes"
    ),
    "thread_guard": (
        "leave it out: before each exchange the processes compare their calls, and a call of a second thread meanwhile "
        "is an error; docs/many_processes.md says what is compared"
    ),
    "live_arrays": "`st.memory_info()` counts the bytes of tensors",
    "clear_caches": "`st.free_cache()` frees memory that is kept",
    "jacobian": "`st.jacrev(f)` computes it by rows, `st.jacfwd(f)` by columns",
    **each("pure_callback io_callback", "functions run when they are called, so call it: `f(x)`"),
    **each("effects_barrier create_token optimization_barrier", "leave it out: calls run in the order of the program"),
    **each("Ref new_ref empty_ref free_ref freeze ref", REFS),
    "copy_to_host_async": HOST,
    "ad": f"gradients are values: `st.grad(f)`; {ACCUMULATE}",
    "ad_checkpoint": "`st.checkpoint_name(x, 'a')` and `st.remat(f)`",
    "custom_remat": "`st.remat(f, policy=st.checkpoint_policies.dots_saveable)`",
    **each("custom_gradient custom_root custom_linear_solve", "`st.custom_vjp(f)`, or `st.custom_jvp(f)`"),
    "custom_batching": "leave it out: `st.vmap(f)` batches the operators that f calls",
    **each("linear_transpose fwd_and_bwd", "`st.vjp(f, x)[1]` maps cotangents back"),
    "closure_convert": "leave it out: functions may close over tensors",
    "test_util": "`st.testing.check_grads`",
    "debug_infs": "`with np.errstate(over='raise', divide='raise'): ...`, as for NumPy's functions",
    "default_matmul_precision": "leave it out: products have the precision of their dtype",
    **each("numpy_dtype_promotion numpy_rank_promotion", "leave it out: promotion is NumPy's"),
    **each("default_prng_impl threefry_partitionable enable_custom_prng legacy_prng_key debug_key_reuse", KEY),
    **each(
        "check_tracer_leaks checking_leaks ensure_compile_time_eval",
        "leave it out: outside of `st.jit(f)` no function is traced",
    ),
    **each("Inline CompilerEffortLevel", "leave it out: it is an option of XLA"),
    **each("stages export", "`st.jit(f).lower(x)` is the program of a function"),
    "dlpack": "`st.from_dlpack(np.ones(3))`",
    "ffi": "`st.smap(f, x)` calls any function of arrays on the shards",
    "memory": "`x.sharding.with_memory_kind('pinned_host')`",
    **each("transfer_guard_device_to_device transfer_guard_device_to_host transfer_guard_host_to_device", _GUARD),
}

LAXS = {
    **each("dynamic_slice dynamic_slice_in_dim slice_in_dim", "`x[1:3]`"),
    **each("dynamic_index_in_dim index_in_dim", "`st.take(x, i, axis=0)`"),
    **each("dynamic_update_slice dynamic_update_slice_in_dim dynamic_update_index_in_dim", "`x[1:3] = 0.0`"),
    "broadcast_in_dim": "`st.broadcast_to(x, (2, 4, 4))`",
    "broadcasted_iota": "`st.broadcast_to(st.arange(4), (2, 4))`",
    "collapse": "`x.reshape(-1)`",
    "rev": "`st.flip(x, axis=0)`",
    "select_n": "`st.where(x > 0, x, y)`",
    "is_finite": "`st.isfinite(x)`",
    "logistic": SIGMOID,
    "integer_pow": "`x ** 2`",
    "batch_matmul": "`x @ y`",
    "dot_general": "`st.einsum('ij,jk->ik', x, y)`, or `st.tensordot(x, y, axes=1)`",
    "cumlogsumexp": "`st.logcumsumexp(x, axis=0)`",
    **each("cummax", "`np.maximum.accumulate(x, axis=0)`"),
    **each("cummin", "`np.minimum.accumulate(x, axis=0)`"),
    **{f"reduce_{name}": f"`st.{name}(x, axis=0)`" for name in ("sum", "prod")},
    **each("reduce_and", "`st.all(x > 0, axis=0)`"),
    **each("reduce_or", "`st.any(x > 0, axis=0)`"),
    "reduce_window": "`st.lib.stride_tricks.sliding_window_view(x, 2, axis=0).max(axis=-1)`",
    "approx_max_k": "`st.topk(x, 2)`",
    "all_gather_invariant": "`st.all_gather`, in st.shard_map",
    "psum_scatter_start": "`st.psum_scatter`, in st.shard_map",
    **each("psend precv", "`st.ppermute`, in st.shard_map, sends and receives"),
}
