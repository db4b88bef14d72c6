"""Kernels and loops in C: text, compiler, libraries on disk, executors."""
