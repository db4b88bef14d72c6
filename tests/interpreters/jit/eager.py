"""The comparison of programs under jit with eager mode."""

from __future__ import annotations

from typing import Any

import numpy as np

import shardtensor as st
from shardtensor.tensor.pytree import leaves


def check_under_jit(
    f: Any, *args: Any, executor: str | None, rtol: float = 1e-12, atol: float = 0.0
) -> tuple[st.TransferLog, st.TransferLog]:
    """Checks that a program has the results of eager mode when it is recorded and later, and transfers no more.

    On NumPy results have the same bits.

    Args:
        f: the program, whose results are tensors.
        args: its arguments.
        executor: runs the kernels.
        rtol: the largest relative error on other executors.
        atol: the largest absolute error on other executors.

    Returns:
        The transfers of the program, and those of eager mode.
    """
    traced = st.jit(f, executor=executor)
    with st.transfers() as eager:
        wanted = leaves(f(*args))
    for _ in range(2):
        with st.transfers() as sent:
            found = leaves(traced(*args))
        for a, b in zip(found, wanted, strict=True):
            assert (a.sharding, a.committed, a._is_scalar, a.dtype) == (b.sharding, b.committed, b._is_scalar, b.dtype)
            if executor == "numpy":
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
            else:
                np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)
        assert sent.bytes == traced.lower(*args).cost().bytes <= eager.bytes
    return sent, eager
