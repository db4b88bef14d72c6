"""Functions of one example that are called once for a batch of them: `vmap`.

A `Batcher` is an interpreter whose values have one more leading dimension, along which the examples are
(`batched_values`). It calls every operator once for all of them, by the interpreter around it, and so works in eager
mode, under jit, on a tape and where results are only inferred. The layout of the batch is that of the leading
dimension: a batch that is split over devices stays split.

A call enters in `vmap` or `jacobians`, and leaves through the rule of each operator (`shardtensor.functions.batching`);
`batched_loops` and `batched_collectives` have those of loops and collectives. Maps must not be imported here: they give
`vmap` their own rule.
"""
