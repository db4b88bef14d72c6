"""Kernels as data, in no language: expressions, the schedule of rows, operands; and the executor by NumPy."""
