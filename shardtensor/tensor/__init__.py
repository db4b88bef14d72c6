"""The handle, its aval, its storage and ownership, the protocols of Python and NumPy, pytrees. No algorithm.

The main nouns are `ShardedTensor` (a handle on a value), `Aval` (shape, dtype and sharding of a value without its
elements), `Storage` (the arrays of its shards) and `WriteState` (the lock and the version of a tensor that is written).
A call enters through a method of the handle and leaves through `shardtensor.core.bind`.

Nothing that transfers data or computes may be imported here: operators are called by name through `shardtensor.core`,
and so are other functions above this package (`shardtensor.core.ABOVE`).
"""
