"""Calls of NumPy's ufuncs and of their methods with tensors: what ``__array_ufunc__`` does.

`ufunc_calls` translates a call to an operator with the options ``out``, ``where``, ``dtype`` and ``casting``;
`ufunc_methods` declares ``reduce``, ``accumulate``, ``reduceat``, ``at`` and ``outer`` of ufuncs for which no operator
computes them. A call enters through `shardtensor.core.ABOVE` from the handle, and leaves through an operator.
Interpreters must not be imported here.
"""
