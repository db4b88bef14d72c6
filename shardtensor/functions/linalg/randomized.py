"""Randomized linear algebra: singular values of large matrices from products with few random vectors."""

from __future__ import annotations

import numpy as np

from shardtensor.backend.small_floats import is_small_float
from shardtensor.core import call, named
from shardtensor.errors import ArgumentError
from shardtensor.functions.linalg.decompositions import SVDResult, qr, svd
from shardtensor.functions.linalg.equations import check_matrices, lapack_dtype
from shardtensor.functions.random.random_keys import Key
from shardtensor.functions.random.samplers import normal
from shardtensor.functions.standard.data_types import astype
from shardtensor.functions.standard.elementwise import conj
from shardtensor.functions.standard.linear_algebra import matmul
from shardtensor.functions.standard.manipulation import matrix_transpose
from shardtensor.sharding.spec import P
from shardtensor.tensor.operands import dtype_of, integer_from
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor


@named
def randomized_svd(x: ArrayLike, n_components: int, *, n_oversamples: int = 10, n_iter: int = 4, key: Key) -> SVDResult:
    """Computes the greatest singular values of matrices and their vectors, from products with random vectors.

    Matrices whose rows or columns are split are not gathered: a basis of the range is orthogonalized as `qr` does it
    (by TSQR where it is split), and of a device only products with ``n_components + n_oversamples`` vectors are sent.
    U is split as the rows of x, and Vh as its columns, where a decomposition keeps the split (see `svd`). Results
    depend on the key; they have the same bits on the same mesh.

    The error is that of the best approximation of this rank, up to a factor that tends to 1 with each iteration where
    the following singular values are smaller. Source: Halko, Martinsson & Tropp, "Finding structure with randomness"
    (2011), algorithms 4.4 and 5.1. Names of the arguments are those of scikit-learn.

    Args:
        x: a tensor or an array of shape (..., m, n).
        n_components: the number of singular values, from 1 to min(m, n).
        n_oversamples: how many more vectors are used.
        n_iter: how often x and its adjoint are multiplied with the basis. More are needed where singular values
            decrease slowly.
        key: a key of `shardtensor.random`.

    Returns:
        U of shape (..., m, k), the singular values in descending order (..., k), and Vh (..., k, n), for k components.

    Raises:
        LinAlgError: x has less than two dimensions.
        ArgumentError: ``n_components`` is out of bounds, or another number is negative.

    >>> x = st.asarray([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
    >>> st.linalg.randomized_svd(x, 1, key=st.random.key(0)).S.round(6).tolist()
    [4.0]
    """
    a = x if isinstance(x, ShardedTensor) else call("asarray", x)
    check_matrices("x", a.shape)
    columns, least = a.shape[-1], min(a.shape[-2:])
    count = integer_from(1, n_components, "randomized_svd: n_components")
    if count > least:
        raise ArgumentError(f"randomized_svd: n_components is {count}; wanted at most {least}, the smaller side of x")
    more = integer_from(0, n_oversamples, "randomized_svd: n_oversamples")
    steps = integer_from(0, n_iter, "randomized_svd: n_iter")
    if is_small_float(a.dtype):  # Operators compute in float32, too.
        result = randomized_svd(astype(a, np.float32), count, n_oversamples=more, n_iter=steps, key=key)
        return SVDResult(*[astype(part, a.dtype) for part in result])
    dtype = lapack_dtype(dtype_of(a))
    a = a if a.dtype == dtype else astype(a, dtype)
    along = a.sharding.spec.chains_of(a.ndim)[-1]
    vectors = normal(
        key,
        (columns, min(count + more, least)),
        dtype=np.zeros(0, dtype).real.dtype,
        device=a.sharding.with_spec(P(along)),
    )
    adjoint = conj(matrix_transpose(a)) if dtype.kind == "c" else matrix_transpose(a)
    basis = qr(matmul(a, vectors)).Q
    for _ in range(steps):
        basis = qr(matmul(a, qr(matmul(adjoint, basis)).Q)).Q
    small = matmul(conj(matrix_transpose(basis)), a)
    left, values, right = svd(small, full_matrices=False)
    first = slice(count)
    return SVDResult(
        matmul(basis, call("getitem", left, (..., first))),
        call("copy", call("getitem", values, (..., first))),
        call("copy", call("getitem", right, (..., first, slice(None)))),
    )
