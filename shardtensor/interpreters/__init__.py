"""The interpreters: an operator call is executed eagerly, executed on one device of a map, or only inferred.

`eager` is the default interpreter, `on_device` the interpreter inside mapped functions, `infer` that of `st.eval_shape`
and of simulated tensors, `explain` that of `st.explain`, and `recording` the outermost one while a log or a guard is
active; `nan_checks` is around it while `st.debug_nans` is active. Each is a subclass of `shardtensor.core.Interpreter`
and defines `apply`; writes follow from the operator `put` by default. `calls` decides of what kind a call is, and
`nested` is the base of interpreters around another one.

`execution` infers, plans and runs one operator; `views` and `writes` build NumPy's views and ``x[i] = v`` on it, and
`partial_sum_reads` adds the partial sums of unreduced tensors. `programs` records functions and runs them again, in
eager mode for small compositions (`small_results`), and in `jit` by kernels. `control_flow` has loops and branches,
`differentiation` gradients, and `batching` `vmap`. A call enters through `shardtensor.core.bind` and returns tensors or
arrays of a backend.

Maps and the scheduler must not be imported here.
"""
