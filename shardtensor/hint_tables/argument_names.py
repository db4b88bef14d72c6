"""Arguments in other libraries that functions lack here, have under another name, or take in a list."""

from __future__ import annotations

from shardtensor.hint_tables.rows import AXIS_TYPES, GRADIENTS, REFS, TEXT, VARYING, WEAK, Hints, each

KEYWORDS = {
    "keepdim": "keepdims", "keep_dims": "keepdims",
    "dim": "axis axes axis_name", "dims": "axis axes", "axes": "axis", "axis": "axes axis_name",
    "dim0": "axis1", "dim1": "axis2", "dimension": "axis axes",
    "size": "shape", "sizes": "shape", "newshape": "shape", "new_shape": "shape",
    "a_min": "min", "a_max": "max", "amin": "min", "amax": "max",
    "ddof": "correction", "reps": "repetitions",
    "rcond": "rtol", "tol": "rtol",
    "fill": "fill_value", "value": "fill_value", "steps": "num", "end": "stop",
    "out_shardings": "sharding out_sharding", "shardings": "sharding",
    "sharding": "device out_sharding", "devices": "device", "placement": "device",
    "shape": "axis_sizes", "axis_shapes": "axis_sizes", "mesh_shape": "axis_sizes",
    "names": "axis_names", "mesh_axes": "axis_names",
    "minval": "low lower", "maxval": "high upper", "probs": "p", "alpha": "a",
    "check_rep": "check_vma", "static_args": "static_argnums", "static_broadcasted_argnums": "static_argnums",
    "heartbeat_timeout_seconds": "timeout", "shutdown_timeout_seconds": "timeout",
    "rank": "process_id", "world_size": "num_processes",
    "init_method": "coordinator_address", "donate_args": "donate_argnums",
    "axis_names": "axis_name", "axis_name": "axis_names", "in_axes": "axes", "in_spec": "in_specs",
    "out_spec": "out_specs", "sections": "indices_or_sections", "index": "indices",
    "tensors": "arrays", "num_samples": "shape", "seed": "key", "rng": "key", "generator": "key",
    "lr": "learning_rate", "weight_decay": "weight_decay_rate", "batch_size": "batch", "num_epochs": "epochs",
    "prefetch_factor": "prefetch", "num_workers": "prefetch", "stage": "level", "every_k_schedule": "n",
    "accumulation_steps": "n", "init_scale": "initial_scale", "growth_interval": "period", "growth_factor": "factor",
    "T_max": "decay_steps", "eta_min": "end_value", "compute_dtype": "compute", "param_dtype": "params",
    "output_dtype": "output", "optimizer": "inner", "type": "dtype", "backend": "device",
    "keep_axes": "keepdims", "keep_axis": "keepdims", "client": "backend", "compiler": "backend",
    "in_shardings": "input_shardings in_sharding", "input_shardings": "in_shardings",
}  # fmt: skip
"""The names of arguments in other libraries, and those that an argument may have here: the first one that the function
takes is meant.
"""

ARGUMENTS: Hints = {
    "unbiased": "unbiased=True is correction=1: `st.var(x, correction=1)`",
    "requires_grad": f"leave it out: {GRADIENTS}",
    "order": "leave it out: the layout in memory is not visible here",
    "layout": "leave it out: the layout in memory is not visible here",
    **each("subok like casting pin_memory memory_format non_blocking", "leave it out: tensors have no such variants"),
    "out": "write the result: `x[...] = st.exp(y)`; NumPy's functions take out=: `np.exp(y, out=x)`",
    "axis_types": AXIS_TYPES,
    **each("backend device", "computations follow their operands: `st.device_put(x, st.devices()[0])`"),
    "impl": "leave it out: keys have one implementation",
    "saveable_args": "leave it out: `st.remat(f)` keeps arguments only",
    "src": "leave it out: a tensor has its sharding: `st.device_put(x, st.devices()[0])`",
    "process_index": "`[d for d in st.devices() if d.process_index == 0]`",
    "local_device_ids": "CUDA_VISIBLE_DEVICES chooses GPUs, and `st.set_num_devices(2)` the number of logical devices",
    "cluster_detection_method": "leave it out: the launcher is found by its environment variables",
    "coordinator_bind_address": "leave it out: process 0 binds the port of coordinator_address",
    **each("slice_index partition_index", "leave it out: devices have a process_index, and no slices"),
    **each("vma manual_axis_type", VARYING),
    "weak_type": WEAK,
    "is_ref": REFS,
    **each("donate_argnums", "st.pmap takes donate=True, which gives the memory of its lists of shards away"),
    **each("axis_size global_arg_shapes", "leave it out: sizes follow from the arguments"),
    "backend": "devices= names the devices: `st.devices('numpy')` are those of a backend",
    "auto": "axis_names= names the axes over which st.shard_map maps",
    **each("minval maxval low high", "`st.random.uniform(key, (2, 3))` is in [0, 1): write low + (high - low) * it"),
    **each("loc scale mean std", "`st.random.normal(key, (2, 3))` has mean 0 and variance 1: write loc + scale * it"),
    **each(
        "allow_pickle mmap_mode",
        "leave it out: pickles are never read, and st.load chooses whether to map a file",
    ),
    **each("delimiter skiprows usecols", f"text is NumPy's: {TEXT}"),
    "dtype": "cast the result: `x.astype('float32')`",
    "key.dtype": "leave it out: keys are no arrays: `st.random.key(0)`",
    "ndmin": "`st.atleast_2d(x)`",
    "descending": "`st.flip(st.sort(x, axis=-1), axis=-1)`",
    **each("keep_unused inline compiler_options spmd_axis_name", "leave it out: it is an option of XLA"),
    "approximate": "leave it out: results are exact",
    "betas": "b1= and b2= are two arguments: `st.optim.adam(1e-3, b1=0.9, b2=0.95)`",
    "weight_decay": "`st.optim.chain(st.optim.add_decayed_weights(0.01), st.optim.sgd(0.1))`",
    **each("foreach fused capturable differentiable", "leave it out: under st.jit a step is one program"),
    "name": "leave it out: operators have no names, and neither have meshes: `st.make_mesh((2, 2))`",
    "names": "leave it out: the dimensions of a tensor have numbers, and no names",
    "collate_fn": "leave it out: batches have the structure of a row, and the batch as dimension 0",
}
"""What to write in place of arguments that no function, or not this one, has under any name. The text for one function
has the name of that function before that of the argument: ``key.dtype``.
"""

POSITIONAL: Hints = {
    **each("Mesh AbstractMesh make_mesh", AXIS_TYPES),
    **each("concat stack vstack hstack dstack column_stack block", "the arrays go in a list: `st.{}([x, y])`"),
    **each("max min", "`st.{}imum(x, y)` compares two arrays"),
}
"""What to write in place of one argument too many: mostly, how arrays are given to functions that take a list."""
