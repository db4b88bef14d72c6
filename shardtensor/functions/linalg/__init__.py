"""Linear algebra: the operators of `shardtensor.linalg`, and the distributed algorithms that factorize and multiply.

`equations` and `decompositions` declare the operators, `matrix_functions` composes others of them, and `randomized` has
singular values by random vectors. `tsqr` factorizes tall matrices whose rows are split, `blocked_qr` other matrices,
and `blocked_factorizations` square ones: panel by panel (`panels`), with the kernels of `elimination`. `summa` and
`ring_product` multiply split operands; whether a product takes one of them is decided in
`shardtensor.interpreters.execution.product_layouts`.

A call enters by an operator, or by its algorithm with one array for each device. Interpreters must not be imported
here.
"""
