"""The part of NumPy's `numpy.lib` that libraries call for arrays of any namespace: sliding windows.

A call enters a function of `stride_tricks`, which is composed of operators. Nothing below the public API may import it.

>>> st.lib.stride_tricks.sliding_window_view(st.arange(4), 2).tolist()
[[0, 1], [1, 2], [2, 3]]
"""

from shardtensor.lib import stride_tricks as stride_tricks

__all__ = ["stride_tricks"]
