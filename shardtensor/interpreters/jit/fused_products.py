"""Small matrix products of the functions of loops, which C computes as one more kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from shardtensor.host import memory_pool
from shardtensor.interpreters.jit.c_executor import CompiledProducts, Prepared
from shardtensor.interpreters.jit.c_products import FUNCTIONS, PRODUCTS
from shardtensor.interpreters.jit.fused import Fused, reports_errors
from shardtensor.interpreters.jit.groups import is_on_host
from shardtensor.interpreters.jit.kernel import HostArray
from shardtensor.interpreters.programs.program import Equation, Var
from shardtensor.tensor.value import Aval

MOST = 1 << 18
"""The most products of two numbers: BLAS, which has several threads, takes less time for more."""


def is_product(equation: Equation) -> bool:
    """Whether an equation is a small product of matrices or vectors of the host, all of one dtype."""
    if equation.op.name != "matmul" or any(p is not None for p in equation.params):
        return False
    kinds = [getattr(x, "kind", None) for x in (*equation.operands, equation.results)]
    if not all(isinstance(kind, Aval) and is_on_host(kind) and kind.ndim < 3 for kind in kinds):
        return False
    x, y, out = kinds
    alike = len({kind.dtype for kind in kinds}) == 1 and out.dtype.str[1:] in FUNCTIONS
    return alike and _products(x, y) <= MOST


def _products(x: Aval, y: Aval) -> int:
    return math.prod(x.shape) * math.prod(y.shape[1:])


class FusedProduct(Fused):
    """A product. Its kernel stands for those of all products."""

    def __init__(self, equation: Equation) -> None:
        x, y = equation.operands
        self.equations = (equation,)
        self.compiled = None
        self.shape = (_products(x.kind, y.kind),)
        self.kernel = PRODUCTS  # type: ignore[assignment]

    def pointers(self) -> list[int]:
        """See `Fused`."""
        (equation,) = self.equations
        return [v.number for v in (*equation.operands, equation.results)]

    def prepared(self, values: Any, target: Callable[[Var, Var | None], HostArray]) -> Prepared | None:
        """See `Fused`."""
        (equation,) = self.equations
        assert isinstance(self.compiled, CompiledProducts)
        return self.compiled.prepared(*[values[x.number] for x in equation.operands], target(equation.results, None))

    def __call__(self, values: Any) -> bool:
        """Computes the product; returns whether it did."""
        if self.compiled is None or reports_errors():
            return False
        (equation,) = self.equations
        kind = equation.results.kind
        arrays = {x.number: self.buffer_of(values[x.number], "jit") for x in equation.operands}
        out = memory_pool.empty(kind.shape, kind.dtype)
        call = self.prepared(arrays, lambda *_: out)
        if call is None:
            return False
        call()
        values[equation.results.number] = self._result(kind, out)
        return True
