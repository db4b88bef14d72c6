"""Names that people type because other libraries have them, and what to write here: one table for each place.

The main nouns are the tables `MODULES` (names of modules, by module) and `CLASSES` (attributes of objects, by class),
and `KEYWORDS` (names of arguments). A row has the text that an error adds to its message, with code between backticks,
which the message leaves out; the tests run this code.

`shardtensor.hints` imports this module when a look-up has failed, and not before.
"""

from __future__ import annotations

Hints = dict[str, str]


def _each(names: str, text: str) -> Hints:
    """Returns a row for each of several names, which replaces ``{}`` in the text."""
    return {name: text.replace("{}", name) for name in names.split()}


def _chosen(hints: Hints, names: str) -> Hints:
    """Returns some rows of a table."""
    return {name: hints[name] for name in names.split()}


# -- texts of several rows -------------------------------------------------------------------------

_KEY = "random numbers are functions of a key: `key = st.random.key(0)`"
_GPU = 'the devices of GPUs are `st.devices("cupy")`'
_GRADIENTS = "`st.grad` and `st.value_and_grad` differentiate functions; tensors themselves record nothing"
_AXIS_TYPES = (
    "mesh axes have no types: outside of st.shard_map all are explicit, so leave axis_types out: "
    "`st.make_mesh((2, 2), ('x', 'y'))`"
)
_VARYING = (
    "leave it out: outside of maps no array varies over mesh axes; `st.typeof(x)` has the shape, dtype and sharding"
)
_WEAK = "leave it out: dtypes follow NumPy's rules, in which only Python's numbers are weak: `st.result_type(x, 1.5)`"
_REFS = "leave it out: tensors are mutable, so that there are no references: `x[...] = y` writes to one"
_GUARD = "`with st.transfer_guard('disallow'): ...` guards transfers between devices; those of the host are explicit"
_DTYPES = "dtypes are NumPy's: `st.{}`"
_INT, _FLOAT = _DTYPES.replace("{}", "int64"), _DTYPES.replace("{}", "float64")
_LAYOUT = "the layout in memory is not visible here; `st.asarray(x)` makes a tensor"
_RELU, _SIGMOID = "`st.maximum(x, 0)`", "`1 / (1 + st.exp(-x))`"
_LOGSUMEXP = "`np.logaddexp.reduce(x, axis=-1)`"
_SOFTMAX = "`st.exp(x - np.logaddexp.reduce(x, axis=-1, keepdims=True))`"
_LOG_SOFTMAX = "`x - np.logaddexp.reduce(x, axis=-1, keepdims=True)`"
_HOST = "`np.asarray(x)` is the array on the host"
_TEXT = "`st.asarray(np.loadtxt(path))` reads text"
_CSV = "`st.asarray(np.loadtxt(path, delimiter=','))` reads text with commas"
_FRAME = "on the host: `pandas.DataFrame(np.asarray(x))`"
_BATCHES = "`st.data.Batches(x, 2, key=key)` draws batches of the rows of arrays, files and map-style datasets"
_LOSS_SCALE = "`st.optim.dynamic_loss_scaling(st.optim.adam(1e-3))` has the factor of the loss in its state"
_ZERO = "`st.optim.zero(params, axis='x', level=1)` returns layouts of parameters, gradients and state"
_CLIP = "`st.optim.chain(st.optim.clip_by_global_norm(1.0), st.optim.adam(1e-3))`"
_SCHEDULE = "a schedule is any function of the count of steps: `lambda count: st.where(count < 100, 0.1, 0.01)`"
_CROSS_ENTROPY = (
    f"losses are functions of operators: y = {_LOG_SOFTMAX}, and then "
    "`-st.take_along_axis(y, st.asarray([[0], [1], [2], [3]]), axis=-1).mean()`"
)
_ACCUMULATE = "`st.accumulate(st.value_and_grad(f), 4)` calls a gradient for 4 parts of a batch"
_MIXED = "`st.mixed_precision(compute='bfloat16')(f)` computes a loss in another dtype than its parameters have"

# -- modules ---------------------------------------------------------------------------------------

_CREATION = {
    "array": "`st.asarray([1, 2])` makes a tensor; `st.asarray(x, copy=True)` always copies, as numpy.array does",
    **_each("as_tensor from_numpy asanyarray", "`st.asarray([1, 2])` makes a tensor of lists and of arrays"),
    **_each("ascontiguousarray asfortranarray require", _LAYOUT),
    "asnumpy": _HOST,
    **_each("ndarray Array Tensor", "the class of tensors is `st.ShardedTensor`; `st.asarray([1, 2])` makes one"),
    "copy": "`x.copy()`",
    "clone": "`x.copy()`",
    "copyto": "`x[...] = y`",
    **_each(
        "frombuffer fromfile fromiter fromstring memmap", "`np.{}` makes a host array, and `st.asarray` a tensor of it"
    ),
    **_each("loadtxt genfromtxt", _TEXT),
    **_each("read_csv load_csv", _CSV),
    "read_parquet": "`st.asarray(pandas.read_parquet(path))` reads a table of numbers",
    "savetxt": "`np.savetxt(path, x)` writes a tensor, too",
    **_each("matrix asmatrix mat", "tensors of two dimensions are matrices: `st.asarray([[1, 2], [3, 4]])`"),
    "bmat": "`st.block([[x, y], [y, x]])`",
    **_each("rand", "`st.random.uniform(st.random.key(0), (2, 3))`"),
    **_each("randn", "`st.random.normal(st.random.key(0), (2, 3))`"),
    **_each("randint", "`st.random.integers(st.random.key(0), 0, 10, (2, 3))`"),
    **_each("randperm", "`st.random.permutation(st.random.key(0), 10)`"),
    "multinomial": "`st.random.categorical(st.random.key(0), st.log(x))`",
    **_each("manual_seed seed Generator default_rng", _KEY),
    "to_csv": "`np.savetxt(path, x, delimiter=',')`",
    "one_hot": "`st.eye(5)[[0, 3]]`",
    "corr": "`st.corrcoef(x)`",
    "zscore": "`(x - st.mean(x, axis=0)) / st.std(x, axis=0)`",
    "rolling": "`st.lib.stride_tricks.sliding_window_view(x[0], 2).mean(axis=1)`",
    "iota": "`st.arange(3)`",
    "range": "`st.arange(3)`",
}

_DATA_TYPES = {
    **_each("float float_ double", _FLOAT),
    **_each("int int_ long", _INT),
    "single": _DTYPES.replace("{}", "float32"),
    "half": _DTYPES.replace("{}", "float16"),
    "short": _DTYPES.replace("{}", "int16"),
    "bool_": _DTYPES.replace("{}", "bool"),
    **_each("complex cfloat cdouble complex_", _DTYPES.replace("{}", "complex128")),
    "dtype": "dtypes are NumPy's: `np.dtype('float32')`",
    **_each("datetime64 timedelta64", "dtypes are NumPy's: `np.{}`"),
    **_each("issubdtype", "`st.isdtype(x.dtype, 'real floating')`, or `np.issubdtype(x.dtype, np.floating)`"),
    **_each("floating integer inexact number", "`st.isdtype(x.dtype, 'numeric')`, or `np.issubdtype(x.dtype, np.{})`"),
    **_each("is_floating_point", "`st.isdtype(x.dtype, 'real floating')`"),
    **_each("is_tensor", "`isinstance(x, st.ShardedTensor)`"),
    **_each("isscalar iterable", "`np.{}(x)`"),
    **_each(
        "set_default_dtype get_default_dtype", "the default is float64, as in NumPy: `st.zeros(3, dtype='float32')`"
    ),
    "convert_element_type": "`x.astype('float32')`",
    "bitcast_convert_type": "`x.view('int64')`",
    "euler_gamma": "`np.euler_gamma`",
}

_NUMPYS = {
    **_each("shape ndim size", "`x.{}`"),
    "rank": "`x.ndim`",
    "numel": "`x.size`",
    "row_stack": "`st.vstack([x, y])`",
    **_each("r_ c_", "`st.concat([x, y])` and `st.column_stack([x, y])` join arrays"),
    "s_": "`np.s_[1:]`",
    "index_exp": "`np.index_exp[1:]`",
    "trapz": "`st.trapezoid(x)`",
    "in1d": "`st.isin(x.ravel(), y.ravel())`",
    "msort": "`st.sort(x, axis=0)`",
    "product": "`st.prod(x)`",
    "cumproduct": "`st.cumprod(x, axis=0)`",
    "alltrue": "`st.all(x)`",
    "sometrue": "`st.any(x)`",
    "asscalar": "`x[0, 0].item()`",
    "put": "`x.put([0], [1.0])`",
    **_each("may_share_memory shares_memory", "`np.{}(x, y)`"),
    **_each("errstate", "`np.errstate(all='ignore')`"),
    **_each("seterr", "NumPy's settings apply: `np.seterr()`"),
    **_each("set_printoptions get_printoptions", "NumPy's settings apply: `np.get_printoptions()`"),
    **_each("array_repr array2string array_str", "`np.{}(x)`"),
    **_each("ndindex", "`np.ndindex(x.shape)`"),
    **_each("ndenumerate nditer", "elements one by one are slow; on the host: `np.{}(np.asarray(x))`"),
    **_each("vectorize frompyfunc", "`st.smap(f, x)` calls a function of arrays on the shards"),
    **_each("poly1d polynomial", "`st.polyval([1.0, 2.0], x)`, and `st.polyfit(x[0], y[0], 1)`"),
    "ma": "there are no masked arrays: `x.sum(where=x > 0)`, `st.where(x > 0, x, 0)` or `st.nansum(x)`",
}

_TORCHS = {
    "cat": "`st.concat([x, y], axis=0)`",
    "unsqueeze": "`st.expand_dims(x, axis=0)`",
    "permute": "`st.permute_dims(x, (1, 0))`",
    "movedim": "`st.moveaxis(x, 0, 1)`",
    "swapdims": "`st.swapaxes(x, 0, 1)`",
    "view": "`x.reshape(-1)`",
    "flatten": "`st.ravel(x)`",
    "t": "`x.T`",
    **_each("clamp clip_", "`st.clip(x, 0, 1)`"),
    **_each("chunk tensor_split", "`st.array_split(x, 2)`"),
    "unbind": "`st.unstack(x)`",
    **_each("mm bmm mv", "`x @ y`"),
    "mul": "`st.multiply(x, y)`",
    "div": "`st.divide(x, y)`",
    "sub": "`st.subtract(x, y)`",
    "neg": "`st.negative(x)`",
    "rem": "`st.remainder(x, y)`",
    "rsub": "`y - x`",
    "eq": "`st.equal(x, y)`",
    "ne": "`st.not_equal(x, y)`",
    "lt": "`st.less(x, y)`",
    "le": "`st.less_equal(x, y)`",
    "gt": "`st.greater(x, y)`",
    "ge": "`st.greater_equal(x, y)`",
    "rsqrt": "`1 / st.sqrt(x)`",
    **_each("erf erfc lgamma digamma", "`st.smap(scipy.special.erf, x)` calls a function of SciPy on the shards"),
    **_each("gather take_along_dim", "`st.take_along_axis(x, st.argsort(x, axis=0), axis=0)`"),
    **_each("scatter", "`st.put_along_axis(x, st.argsort(x, axis=0), 0.0, axis=0)`"),
    **_each("scatter_add index_add", "`np.add.at(x, [0, 0], 1.0)`"),
    "index_select": "`st.take(x, [0, 1], axis=0)`",
    "masked_select": "`x[x > 0]`",
    "masked_fill": "`st.where(x > 0, 0.0, x)`",
    "repeat_interleave": "`st.repeat(x, 2, axis=0)`",
    "inverse": "`st.linalg.inv(x)`",
    "pinverse": "`st.linalg.pinv(x)`",
    "dist": "`st.linalg.norm(x - y)`",
    "addmm": "`x + x @ y`",
    "lerp": "`x + 0.5 * (y - x)`",
    "histc": "`st.histogram(x, 10)`",
    "top_k": "`st.topk(x, 2)`",
    "relu": _RELU,
    "sigmoid": _SIGMOID,
    "softmax": _SOFTMAX,
    "log_softmax": _LOG_SOFTMAX,
    "logsumexp": _LOGSUMEXP,
    "compile": "`st.jit(f)`",
    "device": "devices are listed: `st.devices()[0]`",
    **_each("cuda get_device", _GPU),
    "backends": "`st.backend_names()`",
    **_each("set_default_device default_device", "`st.set_mesh(mesh)` sets the mesh of new arrays"),
    **_each("no_grad enable_grad set_grad_enabled inference_mode autograd", _GRADIENTS),
    **_each("set_detect_anomaly detect_anomaly", "`st.debug_nans` makes operators raise an error at the first NaN"),
    **_each("autocast amp", _MIXED),
    "GradScaler": _LOSS_SCALE,
    **_each("DataLoader Dataset TensorDataset", _BATCHES),
    **_each("DistributedDataParallel DataParallel", "data parallelism is a layout of batches: `st.P('x')`"),
    **_each("FullyShardedDataParallel fully_shard ZeroRedundancyOptimizer", _ZERO),
    "cross_entropy": _CROSS_ENTROPY,
}

_JAXS = {
    "nn": (
        f"there are no layers, but functions: ReLU is {_RELU}, sigmoid {_SIGMOID}, softmax {_SOFTMAX}; modules of "
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
    **_each("create_device_mesh create_hybrid_device_mesh", "`st.make_mesh((2, 2), ('x', 'y'))`"),
    "visualize_array_sharding": "`st.visualize_sharding(x)`",
    "inspect_array_sharding": "`x.sharding` is known at all times, also under st.jit",
    "multihost_utils": "`st.distributed`",
    "tree_util": "`st.tree.map(f, params)`, `st.tree.leaves(params)` and `st.register_pytree_node`",
    "tree_map": "`st.tree.map(f, params)`",
    **_each(
        "tree_leaves tree_flatten tree_structure", "`st.tree`: `st.tree.flatten(params)`, `st.tree.leaves(params)`"
    ),
    "tree_unflatten": "`st.tree.unflatten(st.tree.structure(params), st.tree.leaves(params))`",
    "config": "`st.set_num_devices(2)` sets the number of logical devices; arrays are float64 by default",
    "debug": "print and breakpoint() work in mapped functions; `st.visualize_sharding(x)` draws a layout",
    **_each("named_scope named_call", "leave it out: tracebacks and st.transfers() name lines of the program"),
    "enable_x64": "leave it out: arrays are float64 by default",
    "profiler": "`st.transfers()` records what is transferred",
    "block_until_ready": "`x.block_until_ready()`; of a tree: `st.tree.map(lambda a: a.block_until_ready(), params)`",
    "make_jaxpr": "`st.jit(f).lower(x).as_text()` is the program of a function",
    "AxisType": _AXIS_TYPES,
    "get_abstract_mesh": "`st.get_mesh()`, also under st.jit",
    "use_abstract_mesh": "`with st.use_mesh(st.make_mesh((4,), ('z',))): ...`, also under st.jit",
    **_each("PositionalSharding GSPMDSharding PmapSharding Sharding", "`st.NamedSharding(mesh, st.P('x'))`"),
    "make_single_device_sharding": "`st.SingleDeviceSharding(st.devices()[0])`",
    "AbstractDevice": "`st.AbstractMesh((2, 2), ('x', 'y'))` has devices that do not exist",
    "ManualAxisType": _VARYING,
    "UnreducedKind": "unreduced values are partial sums: `st.P('x', unreduced={'y'})`",
    "no_collectives": "`with st.transfer_guard('disallow'): ...` makes implicit transfers an error",
    **_each("auto_pcast remove_size_one_mesh_axis_from_type", "leave it out: it is about types of JAX's tracers"),
    "device_put_sharded": "`st.device_put(np.stack([x[0], y[0]]), st.NamedSharding(mesh, st.P('x')))`",
    "device_put_replicated": "`st.device_put(x, st.NamedSharding(mesh, st.P()))`",
    "soft_pmap": "`st.smap(f, x, axes=0)` maps over blocks, one for each device",
    "pdot": (
        "`st.shard_map(lambda x, y: st.psum(x @ y, 'x'), mesh=mesh, in_specs=(st.P(None, 'x'), st.P('x')), "
        "out_specs=st.P())(x, y)`"
    ),
    "live_devices": "the end of one process ends a job; `st.devices()` are all devices",
    "xmap": "`st.shard_map` maps over named axes of a mesh; docs/from_pmap_and_xmap.md shows both",
    "host_count": "`st.process_count()`",
    "host_id": "`st.process_index()`",
    **_each("process_indices host_ids", "`range(st.process_count())`"),
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
    **_each("pure_callback io_callback", "functions run when they are called, so call it: `f(x)`"),
    **_each("effects_barrier create_token optimization_barrier", "leave it out: calls run in the order of the program"),
    **_each("Ref new_ref empty_ref free_ref freeze ref", _REFS),
    "copy_to_host_async": _HOST,
    "ad": f"gradients are values: `st.grad(f)`; {_ACCUMULATE}",
    "ad_checkpoint": "`st.checkpoint_name(x, 'a')` and `st.remat(f)`",
    "custom_remat": "`st.remat(f, policy=st.checkpoint_policies.dots_saveable)`",
    **_each("custom_gradient custom_root custom_linear_solve", "`st.custom_vjp(f)`, or `st.custom_jvp(f)`"),
    "custom_batching": "leave it out: `st.vmap(f)` batches the operators that f calls",
    **_each("linear_transpose fwd_and_bwd", "`st.vjp(f, x)[1]` maps cotangents back"),
    "closure_convert": "leave it out: functions may close over tensors",
    "test_util": "`st.testing.check_grads`",
    "debug_infs": "`with np.errstate(over='raise', divide='raise'): ...`, as for NumPy's functions",
    "default_matmul_precision": "leave it out: products have the precision of their dtype",
    **_each("numpy_dtype_promotion numpy_rank_promotion", "leave it out: promotion is NumPy's"),
    **_each("default_prng_impl threefry_partitionable enable_custom_prng legacy_prng_key debug_key_reuse", _KEY),
    **_each(
        "check_tracer_leaks checking_leaks ensure_compile_time_eval",
        "leave it out: outside of `st.jit(f)` no function is traced",
    ),
    **_each("Inline CompilerEffortLevel", "leave it out: it is an option of XLA"),
    **_each("stages export", "`st.jit(f).lower(x)` is the program of a function"),
    "dlpack": "`st.from_dlpack(np.ones(3))`",
    "ffi": "`st.smap(f, x)` calls any function of arrays on the shards",
    "memory": "`x.sharding.with_memory_kind('pinned_host')`",
    **_each("transfer_guard_device_to_device transfer_guard_device_to_host transfer_guard_host_to_device", _GUARD),
}

_WINDOWS = "`st.lib.stride_tricks.sliding_window_view(x, (2, 2)){}(axis=(-2, -1))`, of which [::2, ::2] is every second"
_MESH_OF_NEW = "`st.set_mesh(mesh)` sets the devices of new arrays; `st.use_mesh(mesh)` is the context manager"

_NXS = {
    "Defn": "its functions are those of the package: `st.jit(f)`, `st.grad(f)`, `st.shard_jit`, `st.num_shards()`",
    "EXLA": "`st.jit(f)` and `st.shard_jit` compile; there is no other compiler to be named",
    "LinAlg": "`st.linalg.inv(cov)`, and the others of st.linalg",
    "Random": "`st.random.normal(st.random.key(0), (2, 3))`, and the others of st.random",
    **_each("defn defnp deftransform", "leave it out: any function of tensors can be compiled: `st.jit(f)`"),
    "jit_apply": "`st.jit(f)(x)`",
    "shard_jit_apply": "`st.shard_jit` returns a function, which is called with the list of lists",
    **_each("debug_expr print_expr", "`st.jit(f).lower(x).as_text()` is the program of a function"),
    "print_value": "`print(x)`",
    "stop_grad": "`st.stop_gradient(x)`",
    "custom_grad": "`st.custom_vjp`",
    **_each("backend_transfer backend_copy", "`st.device_put(x, st.devices()[1])` copies to a device; " + _HOST),
    "backend_deallocate": "leave it out: the memory of a tensor is free when nothing refers to it",
    **_each("global_default_backend with_default_backend", _MESH_OF_NEW),
    "default_backend": "`st.devices()[0].backend` is its name; " + _MESH_OF_NEW,
    "to_batched": "`st.to_batched_list(x, 2, leftover='repeat')`",
    "as_type": "`x.astype('float32')`",
    "bitcast": "`x.view('int64')`",
    "type": "`x.dtype`",
    "bit_size": "`8 * x.nbytes`",
    "byte_size": "`x.nbytes`",
    "flat_size": "`x.size`",
    "to_flat_list": "`x.ravel().tolist()`",
    "to_list": "`x.tolist()`",
    "to_number": "`x[0, 0].item()`",
    "to_binary": "`x.tobytes()`",
    "from_binary": "`st.asarray(np.frombuffer(bytes(8)))`",
    "to_tensor": "`st.asarray([1, 2])`",
    **_each("template to_template", "`st.ShapeDtypeStruct((2, 3), 'float32')`"),
    **_each("serialize deserialize", "`st.save(file, x)` writes a tensor, and `st.load` reads it"),
    "new_axis": "`st.expand_dims(x, axis=0)`",
    "broadcast": "`st.broadcast_to(x, (2, 4, 4))`",
    "reverse": "`st.flip(x)`",
    "slice": "`x[1:3]`",
    "slice_along_axis": "`x[:, 1:3]`",
    "put_slice": "`x[1:3, 1:3] = 0.0`",
    "indexed_put": "`x[[0, 1], [1, 2]] = 0.0`",
    "indexed_add": "`np.add.at(x, ([0, 0], [1, 1]), 1.0)`",
    "make_diagonal": "`st.diag(x[0])`",
    "take_diagonal": "`st.diagonal(x)`",
    "put_diagonal": "`st.fill_diagonal(x, 0.0)`",
    "all_close": "`st.allclose(x, y)`",
    "is_nan": "`st.isnan(x)`",
    "is_infinity": "`st.isinf(x)`",
    "negate": "`st.negative(x)`",
    "phase": "`st.angle(x)`",
    "quotient": "`x // y` rounds down, `st.trunc(x / y)` towards zero",
    "population_count": "`st.bitwise_count(st.arange(3))`",
    "reduce": "`np.add.reduce(x)`, and so with other ufuncs",
    "reduce_max": "`st.max(x)`",
    "reduce_min": "`st.min(x)`",
    "cumulative_max": "`np.maximum.accumulate(x)`",
    "cumulative_min": "`np.minimum.accumulate(x)`",
    "cumulative_product": "`st.cumulative_prod(x, axis=0)`",
    "mode": "`st.unique_counts(x)` counts values",
    "standard_deviation": "`st.std(x)`",
    "variance": "`st.var(x)`",
    "weighted_mean": "`st.average(x, weights=y)`",
    "covariance": "`st.cov(x, rowvar=False, ddof=0)`",
    **{f"window_{name}": _WINDOWS.replace("{}", f".{name}") for name in ("sum", "max", "min", "mean")},
    "window_product": _WINDOWS.replace("{}", ".prod"),
}

_LAXS = {
    **_each("dynamic_slice dynamic_slice_in_dim slice_in_dim", "`x[1:3]`"),
    **_each("dynamic_index_in_dim index_in_dim", "`st.take(x, i, axis=0)`"),
    **_each("dynamic_update_slice dynamic_update_slice_in_dim dynamic_update_index_in_dim", "`x[1:3] = 0.0`"),
    "broadcast_in_dim": "`st.broadcast_to(x, (2, 4, 4))`",
    "broadcasted_iota": "`st.broadcast_to(st.arange(4), (2, 4))`",
    "collapse": "`x.reshape(-1)`",
    "rev": "`st.flip(x, axis=0)`",
    "select_n": "`st.where(x > 0, x, y)`",
    "is_finite": "`st.isfinite(x)`",
    "logistic": _SIGMOID,
    "integer_pow": "`x ** 2`",
    "batch_matmul": "`x @ y`",
    "dot_general": "`st.einsum('ij,jk->ik', x, y)`, or `st.tensordot(x, y, axes=1)`",
    "cumlogsumexp": "`st.logcumsumexp(x, axis=0)`",
    **_each("cummax", "`np.maximum.accumulate(x, axis=0)`"),
    **_each("cummin", "`np.minimum.accumulate(x, axis=0)`"),
    **{f"reduce_{name}": f"`st.{name}(x, axis=0)`" for name in ("sum", "prod")},
    **_each("reduce_and", "`st.all(x > 0, axis=0)`"),
    **_each("reduce_or", "`st.any(x > 0, axis=0)`"),
    "reduce_window": "`st.lib.stride_tricks.sliding_window_view(x, 2, axis=0).max(axis=-1)`",
    "approx_max_k": "`st.topk(x, 2)`",
    "all_gather_invariant": "`st.all_gather`, in st.shard_map",
    "psum_scatter_start": "`st.psum_scatter`, in st.shard_map",
    **_each("psend precv", "`st.ppermute`, in st.shard_map, sends and receives"),
}

_RANDOM = {
    **_each("seed set_state get_state default_rng RandomState Generator PCG64 MT19937 Philox SeedSequence", _KEY),
    "PRNGKey": "`st.random.key(0)`",
    **_each("rand random random_sample ranf sample", "`st.random.uniform(key, (2, 3))`"),
    **_each("randn standard_normal", "`st.random.normal(key, (2, 3))`"),
    **_each("randint random_integers", "`st.random.integers(key, 0, 10, (2, 3))`"),
    "shuffle": "`x[st.random.permutation(key, len(x))]`",
    "permuted": "`x[st.random.permutation(key, len(x))]`",
    "standard_exponential": "`st.random.exponential(key, (2, 3))`",
    "standard_gamma": "`st.random.gamma(key, 2.0, (2, 3))`",
    "lognormal": "`st.exp(st.random.normal(key, (2, 3)))`",
    "gumbel": "`-st.log(st.random.exponential(key, (2, 3)))`",
    "chisquare": "`2 * st.random.gamma(key, 3 / 2, (2, 3))` has 3 degrees of freedom",
    "rademacher": "`2 * st.random.bernoulli(key, 0.5, (2, 3)) - 1`",
    "weibull": "`st.random.exponential(key, (2, 3)) ** (1 / 2.0)` has the shape 2",
    "multinomial": "`st.random.categorical(key, st.log(x))` draws indices",
    "multivariate_normal": "`st.random.normal(key, (10, 4)) @ st.linalg.cholesky(cov).T`",
    "beta": "a / (a + b) of gamma variables: `st.random.gamma(key, 2.0, (2, 3))`",
    "bits": "`st.random.integers(key, 0, 2**32, (2, 3))`",
    **_each("normal_split uniform_split randint_split", "keys are split before: `key, k = st.random.split(key)`"),
    **_each("clone key_data wrap_key_data", "keys are values, which are never used up: `st.random.fold_in(key, 1)`"),
}

_LINALG = {
    "inverse": "`st.linalg.inv(x)`",
    "pinverse": "`st.linalg.pinv(x)`",
    "invert": "`st.linalg.inv(x)`",
    "determinant": "`st.linalg.det(x)`",
    "adjoint": "`st.conj(x.T)`",
    "least_squares": "`st.linalg.lstsq(cov, x)`",
    **_each("solve_triangular triangular_solve lu_solve cho_solve", "`st.linalg.solve(cov, x)`"),
    "cholesky_ex": "`st.linalg.cholesky(cov)`",
    "inv_ex": "`st.linalg.inv(cov)`",
    "vander": "`st.vander([1.0, 2.0])`",
    **_each("einsum", "`st.einsum('ij,jk->ik', x, y)`"),
    **_each("dot kron vdot inner", "`st.{}(x[0], y[0])`"),
}

_TREE = {
    **_each("reduce", "`functools.reduce(f, st.tree.leaves(params))`"),
    **_each("all", "`all(leaf is not None for leaf in st.tree.leaves(params))`"),
    "tree_map": "`st.tree.map(f, params)`",
    "tree_leaves": "`st.tree.leaves(params)`",
    "tree_flatten": "`st.tree.flatten(params)`",
    "tree_unflatten": "`st.tree.unflatten(st.tree.structure(params), st.tree.leaves(params))`",
    "tree_structure": "`st.tree.structure(params)`",
    "register_pytree_node": "`st.register_pytree_node`",
    **_each("map_with_path leaves_with_path flatten_with_path", "leaves have no paths here: `st.tree.leaves(params)`"),
    "transpose": "`st.tree.map(lambda *leaves: leaves, params, params)` makes a tree of tuples of several trees",
}

_DATA = {
    **_each("DataLoader Dataset TensorDataset DataSource IndexSampler DistributedSampler", _BATCHES),
    **_each("random_split Subset", "`st.data.Batches(x[:3], 2, key=key)` has these rows only"),
}

_CHECKPOINTS = {
    "CheckpointManager": "`st.checkpoint.Manager`",
    **_each("Checkpointer StandardCheckpointer PyTreeCheckpointer AsyncCheckpointer", "`st.checkpoint.save`"),
    "checkpoint": "`st.remat(f)` keeps arguments only; the gradient calls the function again",
}

_OPTIMIZERS = {
    "SGD": "`st.optim.sgd(0.1, momentum=0.9)`",
    "Adam": "`st.optim.adam(1e-3)`",
    "AdamW": "`st.optim.adamw(1e-3, weight_decay=0.01)`",
    "Adafactor": "`st.optim.adafactor()`",
    "Muon": "`st.optim.muon(0.02)`",
    "NAdam": "`st.optim.adam(1e-3, nesterov=True)`",
    "nadam": "`st.optim.adam(1e-3, nesterov=True)`",
    "nadamw": "`st.optim.adamw(1e-3, nesterov=True)`",
    "partition": "`st.optim.multi_transform`",
    "lr_scheduler": "learning rates may be schedules, such as `st.optim.cosine_decay_schedule(0.1, 1000)`",
    "Optimizer": "optimizers are pairs of functions, `st.optim.GradientTransformation`",
    "CosineAnnealingLR": "`st.optim.cosine_decay_schedule(0.1, 1000)`",
    **_each("OneCycleLR cosine_onecycle_schedule", "`st.optim.warmup_cosine_decay_schedule(0.0, 0.1, 100, 1000)`"),
    **_each("LinearLR warmup_constant_schedule", "`st.optim.linear_schedule(0.0, 0.1, 100)`"),
    **_each("StepLR ExponentialLR", "`st.optim.exponential_decay(0.1, 100, 0.5, staircase=True)`"),
    "MultiStepLR": "`st.optim.piecewise_constant_schedule(0.1, {100: 0.5})`",
    **_each("LambdaLR join_schedules polynomial_schedule sgdr_schedule Schedule", _SCHEDULE),
    "inject_hyperparams": "a learning rate may be a tensor or a schedule: `st.optim.adamw(st.asarray(1e-3))`",
    **_each("clip_grad_norm_ clip_grad_norm", _CLIP),
    **_each("clip_grad_value_ clip_grad_value", "`st.optim.chain(st.optim.clip(1.0), st.optim.adam(1e-3))`"),
    "MultiSteps": _ACCUMULATE,
    "accumulate": "`st.accumulate`",
    "mixed_precision": "`st.mixed_precision`",
    **_each("GradScaler apply_if_finite", _LOSS_SCALE + ", and skips steps whose gradients are not finite"),
    "ZeroRedundancyOptimizer": _ZERO,
    "named_chain": "`st.optim.chain`",
    "freeze": "`st.optim.multi_transform` with `st.optim.set_to_zero()` for the parameters that stay",
    "incremental_update": "`st.tree.map(lambda new, old: 0.01 * new + 0.99 * old, params, params)`",
    **_each("tree tree_utils", "`st.tree`, and `st.optim.global_norm(params)`"),
    **_each("softmax_cross_entropy softmax_cross_entropy_with_integer_labels losses", _CROSS_ENTROPY),
}

MODULES: dict[str, Hints] = {
    "": {**_CREATION, **_DATA_TYPES, **_NUMPYS, **_TORCHS, **_JAXS, **_LAXS, **_NXS},
    "checkpoint": _CHECKPOINTS,
    "data": _DATA,
    "distributed": _chosen(
        _JAXS, "live_devices ProcessFailureError process_indices reached_preemption_sync_point thread_guard"
    ),
    "linalg": _LINALG,
    "optim": _OPTIMIZERS,
    "random": _RANDOM,
    "sharding": {
        **_chosen(_JAXS, "AxisType get_abstract_mesh use_abstract_mesh"),
        **_chosen(_JAXS, "PositionalSharding GSPMDSharding PmapSharding Sharding make_single_device_sharding"),
        **_chosen(_JAXS, "AbstractDevice ManualAxisType UnreducedKind no_collectives"),
    },
    "tree": _TREE,
}  # fmt: skip
"""What to write in place of names that modules lack; the empty name is that of the package."""

# -- tensors ---------------------------------------------------------------------------------------

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
    **_each("exp_ sqrt_ abs_ log_", "`x[...] = st.exp(x)`"),
    **_each("normal_ uniform_", "`x[...] = st.random.normal(st.random.key(0), x.shape)`"),
    **_each("scatter_ index_add_ scatter_add_", "`np.add.at(x, [0, 0], 1.0)`"),
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
    **_each(_AS_FUNCTIONS, "it is the function `st.{}`"),
    **_each("det eig eigh inv lstsq matrix_power norm pinv qr slogdet svd", "it is the function `st.linalg.{}`"),
    **_each("cholesky solve", "it is the function `st.linalg.{}`"),
    **_chosen(
        MODULES[""],
        "addmm bmm cat chunk clamp clone div eq erf ge gt histc index_add index_select inverse le lerp "
        "log_softmax logsumexp lt masked_fill masked_select mm movedim mul mv ne neg permute relu repeat_interleave "
        "rsqrt scatter scatter_add sigmoid softmax sub swapdims t take_along_dim tensor_split unbind unsqueeze "
        "as_type backend_copy backend_transfer new_axis to_batched to_flat_list to_list to_number",
    ),
    "gather": f"`st.take_along_axis(x, st.argsort(x, axis=0), axis=0)` takes elements; {_HOST}",
    **_IN_PLACE,
    # hosts, devices and dtypes
    **_each("numpy cpu get asnumpy toarray values", _HOST),
    **_each("cuda to", "`x.to_device(st.devices()[0])` transfers it, `x.astype('float32')` casts; " + _GPU),
    **_each("float double half bfloat16", "`x.astype('float64')`"),
    **_each("int long short byte char", "`x.astype('int64')`"),
    "bool": "`x.astype(bool)`",
    "type": "`x.astype('float32')`; its dtype is `x.dtype`",
    "type_as": "`x.astype(y.dtype)`",
    **_each("is_cuda get_device is_cpu platform", "`x.device`, or `x.sharding`"),
    "layout": "`x.sharding`",
    "pin_memory": "`x.reshard(x.sharding.with_memory_kind('pinned_host'))`",
    "is_contiguous": "`x.flags.c_contiguous`",
    "contiguous": "leave it out: the layout in memory is not visible here",
    # shapes
    **_each("dim ndimension", "`x.ndim`"),
    **_each("numel nelement", "`x.size`"),
    "element_size": "`x.itemsize`",
    "stride": "`x.strides`",
    **_each("expand expand_as", "`st.broadcast_to(x, (2, 4, 4))`"),
    **_each("view_as reshape_as", "`x.reshape(y.shape)`"),
    "unfold": "`st.lib.stride_tricks.sliding_window_view(x, 2, axis=0)`",
    **_each("new_zeros", "`st.zeros((2, 3), dtype=x.dtype)`"),
    **_each("new_ones", "`st.ones((2, 3), dtype=x.dtype)`"),
    **_each("new_tensor", "`st.asarray([1, 2])`"),
    # gradients
    "detach": "`st.stop_gradient(x)`",
    **_each("backward grad grad_fn requires_grad requires_grad_ retain_grad register_hook", _GRADIENTS),
    # JAX's and other libraries'
    "addressable_data": "`x.addressable_shards[0].data`",
    **_each("global_shards device_buffer device_buffers unsafe_buffer_pointer data_ptr", "`x.addressable_shards`"),
    "is_deleted": "`x.is_donated`",
    "delete": "`del x` drops it, and donate=True of `st.device_put` gives its memory away",
    "is_ready": "`x.block_until_ready()` waits for the elements",
    "copy_to_host_async": _HOST,
    "on_device_size_in_bytes": "`x.nbytes`",
    **_each("aval weak_type", "`st.typeof(x)`"),
    **_each("apply apply_ map map_", "`st.smap(f, x)` calls a function of arrays on the shards"),
    **_each("compute persist", "leave it out: functions run when they are called"),
    "rechunk": "`x.reshard(st.NamedSharding(mesh, st.P('x')))`",
    "chunks": "`x.sharding.shard_shape(x.shape)`, and `x.addressable_shards`",
    **_each("loc iloc", "`x[0]`"),
    **_each("head", "`x[:5]`"),
    **_each("tail", "`x[-5:]`"),
    **_each("describe groupby plot value_counts rolling corr", _FRAME),
    **_each("fillna isna dropna", "`st.nan_to_num(x)` replaces NaNs, and `st.isnan(x)` finds them"),
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
        **_each("local_hardware_id", "`st.devices()[0].id`"),
        **_each("type", "`st.devices()[0].backend` names the library"),
        "index": "`st.devices()[0].id`",
        **_each("host_id task_id", "`st.devices()[0].process_index`"),
        **_each("memory default_memory addressable_memories", "`x.sharding.memory_kind`, of a tensor"),
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
        **_each("args_info in_avals in_tree out_tree donate_argnums", "`print(st.jit(f).lower(x))`"),
    },
    "Compiled": {
        "as_text": "`st.jit(f).lower(x).as_text('groups')`",
        **_each("cost_analysis memory_analysis", "`st.jit(f).lower(x).cost()`"),
        **_each("input_shardings input_formats", "`st.typeof(x)`"),
        **_each("output_shardings output_formats out_info", "`st.eval_shape(f, x)`"),
    },
    "Mesh": {
        "__enter__": "`st.use_mesh(mesh)` is the context manager: with st.use_mesh(mesh): ...",
        **_each("axis_types auto_axes explicit_axes manual_axes update_axis_types", _AXIS_TYPES),
        **_each("are_all_axes_auto are_all_axes_explicit are_all_axes_manual", _AXIS_TYPES),
        "are_all_axes_explicit_or_manual": _AXIS_TYPES,
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
        **_each("manual_axis_type vma", _VARYING),
        "weak_type": _WEAK,
        "is_ref": _REFS,
    },
}
"""What to write in place of attributes that objects of other libraries have."""

# -- arguments -------------------------------------------------------------------------------------

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
    "requires_grad": f"leave it out: {_GRADIENTS}",
    "order": "leave it out: the layout in memory is not visible here",
    "layout": "leave it out: the layout in memory is not visible here",
    **_each("subok like casting pin_memory memory_format non_blocking", "leave it out: tensors have no such variants"),
    "out": "write the result: `x[...] = st.exp(y)`; NumPy's functions take out=: `np.exp(y, out=x)`",
    "axis_types": _AXIS_TYPES,
    **_each("backend device", "computations follow their operands: `st.device_put(x, st.devices()[0])`"),
    "impl": "leave it out: keys have one implementation",
    "saveable_args": "leave it out: `st.remat(f)` keeps arguments only",
    "src": "leave it out: a tensor has its sharding: `st.device_put(x, st.devices()[0])`",
    "process_index": "`[d for d in st.devices() if d.process_index == 0]`",
    "local_device_ids": "CUDA_VISIBLE_DEVICES chooses GPUs, and `st.set_num_devices(2)` the number of logical devices",
    "cluster_detection_method": "leave it out: the launcher is found by its environment variables",
    "coordinator_bind_address": "leave it out: process 0 binds the port of coordinator_address",
    **_each("slice_index partition_index", "leave it out: devices have a process_index, and no slices"),
    **_each("vma manual_axis_type", _VARYING),
    "weak_type": _WEAK,
    "is_ref": _REFS,
    **_each("donate_argnums", "st.pmap takes donate=True, which gives the memory of its lists of shards away"),
    **_each("axis_size global_arg_shapes", "leave it out: sizes follow from the arguments"),
    "backend": "devices= names the devices: `st.devices('numpy')` are those of a backend",
    "auto": "axis_names= names the axes over which st.shard_map maps",
    **_each("minval maxval low high", "`st.random.uniform(key, (2, 3))` is in [0, 1): write low + (high - low) * it"),
    **_each("loc scale mean std", "`st.random.normal(key, (2, 3))` has mean 0 and variance 1: write loc + scale * it"),
    **_each(
        "allow_pickle mmap_mode",
        "leave it out: pickles are never read, and st.load chooses whether to map a file",
    ),
    **_each("delimiter skiprows usecols", f"text is NumPy's: {_TEXT}"),
    "dtype": "cast the result: `x.astype('float32')`",
    "ndmin": "`st.atleast_2d(x)`",
    "descending": "`st.flip(st.sort(x, axis=-1), axis=-1)`",
    **_each("keep_unused inline compiler_options spmd_axis_name", "leave it out: it is an option of XLA"),
    "approximate": "leave it out: results are exact",
    "betas": "b1= and b2= are two arguments: `st.optim.adam(1e-3, b1=0.9, b2=0.95)`",
    "weight_decay": "`st.optim.chain(st.optim.add_decayed_weights(0.01), st.optim.sgd(0.1))`",
    **_each("foreach fused capturable differentiable", "leave it out: under st.jit a step is one program"),
    "name": "leave it out: operators have no names, and neither have meshes: `st.make_mesh((2, 2))`",
    "names": "leave it out: the dimensions of a tensor have numbers, and no names",
    "collate_fn": "leave it out: batches have the structure of a row, and the batch as dimension 0",
}
"""What to write in place of arguments that no function, or not this one, has under any name."""

POSITIONAL: Hints = {
    **_each("Mesh AbstractMesh make_mesh", _AXIS_TYPES),
    **_each("concat stack vstack hstack dstack column_stack block", "the arrays go in a list: `st.{}([x, y])`"),
    **_each("max min", "`st.{}imum(x, y)` compares two arrays"),
}
"""What to write in place of one argument too many: mostly, how arrays are given to functions that take a list."""
