"""The array API declared: signature, docstring and sharding rule of each operator, one file for each chapter.

A declaration has no body: `shardtensor.core.operator` registers it in ``OPS`` and returns the function that users call.
Kernels, monoids (`monoids.Monoid`: how partial results are combined) and data movements (`data_movement.DataMovement`)
are attached with `shardtensor.core.implements`.

Interpreters must not be imported here: what a call means is not known to its declaration.
"""
