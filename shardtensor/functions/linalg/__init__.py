"""Linear algebra: the operators of `shardtensor.linalg`, and the distributed algorithms that factorize and multiply.

`tsqr`, `blocked_qr` and `blocked_factorizations` factorize split matrices by `panels`; `summa` and `ring_product`
multiply them.
"""
