"""NumPy's functions beyond the standard: declarations, and compositions of operators.

`functions.statistics` has reductions that skip NaN, quantiles and histograms.
"""
