"""Functions of one example that are called once for a batch of them: `vmap`.

A batcher is an interpreter whose values have one more leading dimension, along which the examples are. It calls every
operator once for all of them, by the interpreter around it, and so works in eager mode, under jit, on a tape and where
results are only inferred. The layout of the batch is that of the leading dimension: a batch that is split over devices
stays split.
"""
