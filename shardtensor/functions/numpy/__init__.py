"""NumPy's functions and ufuncs of tensors: how a call of one becomes a call of a function of this library.

`function_table` has NumPy's names, and the functions that are no operators of the same arguments; `translated_calls`
finds the function for a call, and translates its arguments. A call enters from the handle, through
`shardtensor.core.ABOVE`, and leaves through the function of the public API.
"""
