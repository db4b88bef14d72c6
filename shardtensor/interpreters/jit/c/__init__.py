"""Kernels and loops in C: text, compiler, libraries on disk, executors.

`c_source` writes the text of a kernel, around which `c_driver` has the walk over strided arrays; `compiler` compiles
it, `kernel_files` keeps the libraries on disk, and `c_executor` calls them. `c_loops` decides which loops C runs
without Python in between, `c_trips` makes tasks of their trips, `c_loop_library` runs these, and `temporal_blocking`
takes several steps of a loop while rows are in the caches.

A kernel or a loop enters from `grouping` or from the steps of a program, and leaves as a call of a library. The modules
of `jit` beside these packages must not be imported here.
"""
