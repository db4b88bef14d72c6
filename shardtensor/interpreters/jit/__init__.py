"""Programs traced from Python functions, and the kernels that run parts of them on the arrays of one device."""
