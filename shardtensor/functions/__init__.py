"""The array API declared: signature, docstring and sharding rule of each operator, one file for each chapter.

A declaration has no body: `shardtensor.core.operator` registers it in ``OPS`` and returns the function that users call.
`shardtensor.core.implements` attaches kernels, data movements (which return a `data_movement.DataMovement`), view specs
and algorithms. An elementwise operator that libraries may lack declares by ``composed=`` how it is composed of others.
A `monoids.Monoid`, which a declaration names by ``combine=``, combines the partial results of shards.

Interpreters must not be imported here: they define what a call means, independently of its declaration.
"""
