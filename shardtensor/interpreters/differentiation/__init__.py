"""Gradients: `grad` and its relatives, on a tape over the interpreter that surrounds the call.

A `tape.Tape` is an interpreter. It passes every call to the interpreter around it, be that the eager one, the tracer of
a jit, an inference or another tape, and records those that depend on a differentiated argument. The backward pass
(`cotangents`) consists of ordinary calls of operators, in the interpreter that is the innermost one when it runs. The
derivative of each operator is a row of `shardtensor.functions.derivatives`.

Calls enter by the functions of `api`. Nothing here is imported before one of these is used.
"""
