"""`st.jit`: functions that are traced once for each combination of argument types, and then run as programs.

`program` has the programs as data, `trace` records them, `layouts` makes them move fewer bytes and messages (by
`deferred_sums`, `stencils`, `common_transfers` and `common_sums`), `groups` chooses what one kernel computes, `replay`
runs and prices them, and `api` has the public functions. `kernel` has the computations of one pass over memory as data,
which `blocked` runs on NumPy and `c_executor` as compiled C; `fused` makes them of equations, and `window_writes` the
memory of writes. `c_loops` has the loops whose trips C runs, and `c_trips` their trips as tasks.
"""
