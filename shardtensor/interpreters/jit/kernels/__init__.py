"""Kernels as data, in no language: expressions, the schedule of rows, operands; and the executor by NumPy.

The main nouns are `Kernel` (elementwise computations and reductions of rows in one pass), the table of `expressions`
(each function in C, of which CUDA's text is made, too) and the schedule of passes over a row (`row_schedule`).
`kernel_operands` checks and broadcasts the arrays of one call, and `numpy_executor` runs any kernel, block by block.

A kernel enters as data and leaves as calls of NumPy. No interpreters may be imported here, and no programs: a kernel
does not depend on the equations that it computes.
"""
