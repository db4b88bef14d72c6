"""The chapters of the array API standard: declarations of its functions.

NumPy's functions beyond the standard are in `functions.numpy` and `functions.statistics`.
"""
