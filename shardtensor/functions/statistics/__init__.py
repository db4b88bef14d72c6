"""NumPy's statistics: averages, quantiles, reductions that skip NaN or take ``where``, histograms and counts.

`averages`, `masked_reductions` and `nan_reductions` compose reductions. `order_statistics` declares medians and
quantiles: elements of given ranks (`functions.algorithms.ranks`), between which `quantile_methods` interpolates;
`nan_quantiles` has those of lines that differ in how many elements count. `histograms` and `counts` count values.

A call enters by a public function, and leaves through operators. Interpreters must not be imported here.
"""
