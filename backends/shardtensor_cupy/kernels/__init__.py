"""A faster CuPy: the array API on CuPy's arrays with NumPy's semantics, by own kernels where CuPy's are slow.

The main nouns are `Namespace` (the functions, in `cupy_namespace`) and `ElementwiseKernel`, of which most kernels are
made. The driver beside this package, `shardtensor_cupy`, passes the module cupy to them, and calls them while a GPU and
a stream are current: they know no devices and no tensors. Nothing of shardtensor must be imported here.

Each kind of kernel has a module: `large_ufuncs`, `casts`, `large_reductions` (and `reduction_kernels`, their texts),
`line_scans`, `line_sort`, `searches`, `number_sequences` and `bfloat16_products`. The namespace is built in steps that
choose between them and CuPy's functions: `array_functions`, then `reducing_functions` and `ordering_functions`.
"""
