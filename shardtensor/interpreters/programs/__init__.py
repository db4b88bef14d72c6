"""Programs: what functions do to tensors, recorded once and run again.

`program` has the programs as data and `trace` records them. `passes` is the list of rewrites, which a program passes
before it runs, on every memory. `replay` runs and infers a program one equation after another, `whole_buffers` runs a
small one on whole buffers of the host, `nan_search` looks for the equation that makes a NaN, and `compositions` records
the compositions of operators that eager mode runs in this way. Kernels, which compute several equations at once, are
those of `shardtensor.interpreters.jit`, which, like tapes and batchers, must not be imported here.

The eager interpreter loads this package on first use, so it must not be imported here.
"""
