"""Rewrites of programs that transfer fewer bytes or messages: the passes that `jit` adds.

A pass is a function of a program and a `Setting` that returns a program of the same results (see
`shardtensor.interpreters.programs.passes`). `layout_choice` chooses the layouts with which a program moves fewer bytes,
and adds all passes to the list, in their order. `copies` drops copies of values, `common_transfers` transfers a value
once, `deferred_sums` adds partial sums late, and `common_sums` adds several in one message. `grouping.stencil_writes`
has one more, with its plan.

Kernels and the languages that run them must not be imported here.
"""
