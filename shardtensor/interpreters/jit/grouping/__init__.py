"""Groups of equations that one kernel computes: which equations join, and the steps that run them.

The main noun is `Group` (`groups`: the equations of one pass over memory). `device_groups` decides what joins on arrays
that are not NumPy's, `kernel_reductions` which reductions join, `window_writes` which writes, and `stencil_writes`
makes a write of slices one exchange of halos. The step of a group is a class of `fused` (host memory), `fused_devices`
(other arrays) or `fused_in_maps` (programs of a map); `fused_alone` has what C computes in loops besides groups.

Groups enter with the program of a step and leave as kernels (`kernels`, `c`, `cuda`). The modules of `jit` beside these
packages must not be imported here.
"""
