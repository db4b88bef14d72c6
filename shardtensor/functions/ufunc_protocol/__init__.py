"""Calls of NumPy's ufuncs and of their methods with tensors: what ``__array_ufunc__`` does."""
