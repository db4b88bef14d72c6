"""Small matrix products of the functions of loops, which C computes as one more kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from shardtensor.host import memory_pool
from shardtensor.interpreters.jit.c_executor import CompiledProducts, Prepared
from shardtensor.interpreters.jit.c_products import FUNCTIONS, PRODUCTS
from shardtensor.interpreters.jit.fused import Fused, reports_errors
from shardtensor.interpreters.jit.groups import is_on_host
from shardtensor.interpreters.jit.kernel import HostArray
from shardtensor.interpreters.programs.program import Equation, Var, kind_of
from shardtensor.tensor.operands import HostAval
from shardtensor.tensor.value import Aval

MOST = 1 << 20
"""The most products of two numbers: BLAS, which has several threads, takes less time for more."""


def is_product(equation: Equation) -> bool:
    """Whether an equation is a small product of matrices or vectors of the host, all of one dtype."""
    if equation.op.name not in ("matmul", "vecdot") or any(p not in (None, -1) for p in equation.params):
        return False
    kinds = [kind_of(x) for x in (*equation.operands, equation.results)]
    if not all(isinstance(k, HostAval) or (isinstance(k, Aval) and is_on_host(k)) for k in kinds):
        return False
    x, y, out = kinds
    if not (0 < len(x.shape) < 3 and 0 < len(y.shape) < 3):
        return False
    if equation.op.name == "vecdot" and len(x.shape) + len(y.shape) > 2:
        return False
    alike = len({kind.dtype for kind in kinds}) == 1 and out.dtype.str[1:] in FUNCTIONS
    return alike and _products(x, y) <= MOST


def _products(x: Aval | HostAval, y: Aval | HostAval) -> int:
    return math.prod(x.shape) * math.prod(y.shape[1:])


class FusedProduct(Fused):
    """A product. Its kernel stands for those of all products."""

    def __init__(self, equation: Equation) -> None:
        x, y = equation.operands
        self.equations = (equation,)
        self.compiled = None
        self.shape = (_products(kind_of(x), kind_of(y)),)
        self.kernel = PRODUCTS  # type: ignore[assignment]
        self._inputs = [(x.number, None, None) for x in (x, y) if type(x) is Var]

    def pointers(self) -> list[int]:
        """See `Fused`."""
        (equation,) = self.equations
        return [x.number if type(x) is Var else -1 for x in (*equation.operands, equation.results)]

    def prepared(self, values: Any, target: Callable[[Var, Var | None], HostArray]) -> Prepared | None:
        """See `Fused`."""
        (equation,) = self.equations
        products = cast(CompiledProducts, self.compiled)
        x, y = [values[x.number] if type(x) is Var else x for x in equation.operands]
        return products.prepared(x, y, target(equation.results, None))

    def __call__(self, values: Any) -> bool:
        """Computes the product; returns whether it did."""
        if self.compiled is None or reports_errors():
            return False
        (equation,) = self.equations
        kind = equation.results.kind
        arrays = self.operands(values)
        out = memory_pool.empty(kind.shape, kind.dtype)
        call = self.prepared(arrays, lambda *_: out)
        if call is None:
            return False
        call()
        values[equation.results.number] = self._result(kind, out)
        return True
