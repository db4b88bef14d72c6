"""The linear algebra extension of the array API standard, and some more functions of `numpy.linalg`.

Each function's docstring says how the sharding propagates. `shardtensor.functions.linalg.equations` and
`shardtensor.functions.linalg.decompositions` declare the operators; `shardtensor.functions.linalg.matrix_functions` has
the functions that are composed of them.

>>> st.linalg.inv(st.asarray([[2.0, 0.0], [0.0, 4.0]])).tolist()
[[0.5, 0.0], [0.0, 0.25]]
"""

# ruff: noqa: I001 - `name as name` marks a public name for type checkers; one statement imports all of a module

import typing as _typing

from numpy.linalg import LinAlgError as LinAlgError

from shardtensor.exports import exported as _exported
from shardtensor.functions.linalg.decompositions import (
    EighResult as EighResult,
    EigResult as EigResult,
    QRResult as QRResult,
    SlogdetResult as SlogdetResult,
    SVDResult as SVDResult,
    eig as eig,
    eigh as eigh,
    eigvals as eigvals,
    qr as qr,
    slogdet as slogdet,
    svd as svd,
)
from shardtensor.functions.linalg.equations import (
    cholesky as cholesky,
    cond as cond,
    det as det,
    eigvalsh as eigvalsh,
    inv as inv,
    matrix_rank as matrix_rank,
    pinv as pinv,
    solve as solve,
    svdvals as svdvals,
    vector_norm as vector_norm,
)
from shardtensor.functions.standard.linear_algebra import matmul as matmul, tensordot as tensordot, vecdot as vecdot
from shardtensor.functions.standard.manipulation import matrix_transpose as matrix_transpose
from shardtensor.functions.linalg.matrix_functions import (
    cross as cross,
    diagonal as diagonal,
    lstsq as lstsq,
    matrix_norm as matrix_norm,
    matrix_power as matrix_power,
    multi_dot as multi_dot,
    norm as norm,
    outer as outer,
    tensorinv as tensorinv,
    tensorsolve as tensorsolve,
    trace as trace,
)
from shardtensor.functions.linalg.randomized import randomized_svd as randomized_svd
from shardtensor.hints import missing as _missing

if not _typing.TYPE_CHECKING:  # Type checkers take the names of the imports.
    __all__ = _exported(globals())

    def __getattr__(name: str) -> _typing.Any:
        raise _missing(__name__, name)

    def __dir__() -> list[str]:
        return __all__
