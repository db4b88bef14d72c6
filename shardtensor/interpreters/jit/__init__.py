"""`st.jit`: functions that are traced once for each combination of argument types, and then run as programs.

`shardtensor.interpreters.programs` records, rewrites and replays programs. Here, `jit` has the public functions and the
cache of programs, `arguments` compares calls, `steps` makes the steps of a program, `executable` runs it, and `lowered`
shows and prices it. They use the packages:

* `rewrites` changes a program so that it transfers fewer bytes; a new pass is a module there.
* `grouping` decides which equations one kernel computes, and makes the step of each group.
* `kernels` has kernels as data, and executes them by NumPy; `c` and `cuda` write and run them in these languages.

A call enters by the function that `jit` returns. These packages must not import the modules beside them, and nothing
here may import maps.
"""
