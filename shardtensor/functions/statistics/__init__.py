"""NumPy's statistics: averages, quantiles, reductions that skip NaN or take ``where``, histograms and counts."""
