"""Kernels in CUDA: their text, their launches, and graphs of several launches.

`cuda_source` writes the text, from the table of expressions that C has, too, and `cuda_executor` launches a kernel on
the arrays of one device. A `Segment` (`segments`) is a run of kernels of a program, whose launches are one launch of a
CUDA graph where they recur; `graphs` has its graphs and the memory between its kernels.

A kernel enters from `grouping`, a segment from the steps of a program; both leave through the backend. No array library
is imported here, nor the modules of `jit` beside these packages.
"""
