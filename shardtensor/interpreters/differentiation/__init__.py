"""Gradients: `grad` and its relatives, on a tape over the interpreter that surrounds the call.

A `Tape` is an interpreter. It passes every call to the interpreter around it, be that the eager one, the tracer of a
jit, an inference or another tape, and records those that depend on a differentiated argument. The backward pass
(`backward`) consists of ordinary calls of operators, in the interpreter that is the innermost one when it runs; forward
mode (`tangents`) computes tangents with the values. The derivative of each operator is a row of
`shardtensor.functions.derivatives`; those of loops and branches are in `loop_derivatives` and `branch_derivatives`, on
tapes of their functions (`inner`).

Calls enter by the functions of `grad`, `remat` and `custom`. Nothing here is imported before one of these is used. Maps
must not be imported here: they attach their derivatives from above.
"""
