"""`st.jit`: functions that are traced once for each combination of argument types, and then run as programs.

`shardtensor.interpreters.programs` records, rewrites and replays programs. Here, `layouts` has the rewrites that move
fewer bytes and messages (with `deferred_sums`, `stencils`, `common_transfers` and `common_sums`), `groups` chooses what
one kernel computes, `steps` makes their steps, `executable` runs a program and `lowered` prices it, and `api` has the
public functions. `kernel` has the computations of one pass over memory as data, which `blocked` runs on NumPy,
`c_executor` as compiled C and `cuda_executor` as CUDA; `row_schedule` has the passes over rows that both languages
render. `fused` makes kernels of equations, and `window_writes` the memory of writes. `segments` launches several
kernels on GPUs as one of the `graphs` of CUDA. `c_loops` has the loops whose trips C runs, and `c_trips` their trips as
tasks.
"""
