"""The chapters of the array API standard: declarations of its functions.

What NumPy has beyond the standard is in `functions.numpy` and `functions.statistics`.
"""
