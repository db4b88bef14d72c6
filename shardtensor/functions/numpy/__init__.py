"""NumPy's functions beyond the standard, and how a call of any of NumPy's functions becomes one of this library.

`function_table` has NumPy's names, and the functions that are not operators of the same arguments; `translated_calls`
finds the function for a call such as ``np.concatenate([x, y])``, and translates its arguments. Such a call enters from
the handle, through `shardtensor.core.ABOVE`, and leaves through the function of the public API.

All other modules are declarations and compositions of operators, by subject: `ufuncs`, `einsum`, `polynomials` and so
on. `functions.statistics` has reductions that skip NaN, quantiles and histograms. Interpreters must not be imported
here.
"""
