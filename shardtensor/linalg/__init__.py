"""The linear algebra extension of the array API standard, and some more functions of `numpy.linalg`.

Each function's docstring says how the sharding propagates. `shardtensor.functions.linalg.equations` and
`shardtensor.functions.linalg.decompositions` declare the operators; `shardtensor.functions.linalg.matrix_functions` has
the functions that are composed of them.

>>> st.linalg.inv(st.asarray([[2.0, 0.0], [0.0, 4.0]])).tolist()
[[0.5, 0.0], [0.0, 0.25]]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.linalg import LinAlgError

from shardtensor.functions.linalg.decompositions import (
    EighResult,
    EigResult,
    QRResult,
    SlogdetResult,
    SVDResult,
    eig,
    eigh,
    eigvals,
    qr,
    slogdet,
    svd,
)
from shardtensor.functions.linalg.equations import (
    cholesky,
    cond,
    det,
    eigvalsh,
    inv,
    matrix_rank,
    pinv,
    solve,
    svdvals,
    vector_norm,
)
from shardtensor.functions.linalg.matrix_functions import (
    cross,
    diagonal,
    lstsq,
    matrix_norm,
    matrix_power,
    multi_dot,
    norm,
    outer,
    tensorinv,
    tensorsolve,
    trace,
)
from shardtensor.functions.linalg.randomized import randomized_svd
from shardtensor.functions.standard.linear_algebra import matmul, tensordot, vecdot
from shardtensor.functions.standard.manipulation import matrix_transpose
from shardtensor.hints import missing

__all__ = [
    "EigResult", "EighResult", "LinAlgError", "QRResult", "SVDResult", "SlogdetResult", "cholesky", "cond", "cross",
    "det", "diagonal", "eig", "eigh", "eigvals", "eigvalsh", "inv", "lstsq", "matmul", "matrix_norm",
    "matrix_power", "matrix_rank", "matrix_transpose", "multi_dot", "norm", "outer", "pinv", "qr", "randomized_svd",
    "slogdet", "solve", "svd", "svdvals", "tensordot", "tensorinv", "tensorsolve", "trace", "vecdot", "vector_norm",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise missing(__name__, name)
