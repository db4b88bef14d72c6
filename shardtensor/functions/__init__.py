"""The array API declared: signature, docstring and sharding rule of each operator, and what declarations consist of.

A declaration has no body: `shardtensor.core.operator` registers it in ``OPS`` and returns the function that users call.
`shardtensor.core.implements` attaches kernels, data movements (which return a `DataMovement`), view specs and
algorithms. An elementwise operator that libraries may lack declares by ``composed=`` how it is composed of others. A
`Monoid`, which a declaration names by ``combine=``, combines the partial results of shards.

Declarations are in `standard` (the chapters of the array API standard), `numpy` and `statistics` (what NumPy has beyond
it), `linalg`, `fft` and `random` (the public modules of these names), `placement` and `interchange` (arrays that enter,
move and leave) and `ufunc_protocol` (NumPy's ufuncs of tensors). `building` and `algorithms` have what these use, and
`derivatives` and `batching` one row for each operator.

Interpreters must not be imported here: they define what a call means, independently of its declaration.
"""
