"""CuPy with NumPy's semantics, and with kernels for large arrays that reach the bandwidth of a GPU's memory."""
