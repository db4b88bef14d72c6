"""NumPy's functions beyond the standard: declarations, and compositions of operators; and how a call of any of NumPy's
functions with tensors becomes a call of a function of this library.

`function_table` has NumPy's names, and the functions that are not operators of the same arguments; `translated_calls`
finds the function for a call, and translates its arguments. A call enters from the handle, through
`shardtensor.core.ABOVE`, and leaves through the function of the public API. `functions.statistics` has reductions that
skip NaN, quantiles and histograms.
"""
