"""What C computes in loops besides groups: small matrix products, and reductions of other than trailing dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from shardtensor.host import memory_pool
from shardtensor.interpreters.jit.c.c_executor import CompiledKernel, CompiledLoops, Prepared
from shardtensor.interpreters.jit.c.c_loop_library import LOOPS, PRODUCTS
from shardtensor.interpreters.jit.grouping.fused import Fused, reports_errors
from shardtensor.interpreters.jit.grouping.groups import is_on_host
from shardtensor.interpreters.jit.grouping.kernel_reductions import (
    add_reduction,
    axes_of,
    divisor,
    is_reduction,
    reduces_rows,
    reduces_some,
)
from shardtensor.interpreters.jit.kernels.kernel import HostArray, KernelBuilder
from shardtensor.interpreters.programs.program import Equation, Var, kind_of
from shardtensor.tensor.operands import HostAval
from shardtensor.tensor.value import Aval

MOST = 1 << 20
"""The most products of two numbers: BLAS, which has several threads, takes less time for more."""


def is_alone(equation: Equation) -> bool:
    """Whether an equation is one that C computes by itself."""
    return is_product(equation) or reduces_columns(equation)


def alone_of(equation: Equation) -> Fused:
    """Returns the kernel of an equation that C computes by itself."""
    return FusedProduct(equation) if is_product(equation) else FusedReduction(equation)


def is_product(equation: Equation) -> bool:
    """Whether an equation is a small product of matrices or vectors of the host, all of one dtype."""
    if (orders := _orders(equation)) is None:
        return False
    kinds = [kind_of(x) for x in (*equation.operands, equation.results)]
    if not all(isinstance(k, HostAval) or (isinstance(k, Aval) and is_on_host(k)) for k in kinds):
        return False
    x, y, out = kinds
    if not (0 < len(x.shape) < 3 and 0 < len(y.shape) < 3):
        return False
    if equation.op.name == "vecdot" and len(x.shape) + len(y.shape) > 2:
        return False
    alike = len({kind.dtype for kind in kinds}) == 1 and out.dtype.str[1:] in PRODUCTS
    return alike and _products(x, y, orders[1]) <= MOST


Order = Sequence[int | None] | None
"""The dimensions of an operand in the order of `matmul`, with None for a new one; None for an operand as it is."""


def _orders(equation: Equation) -> tuple[Order, Order] | None:
    """Returns the orders of the operands of a product; None if it is not a product of matrices and vectors."""
    if equation.op.name in ("matmul", "vecdot"):
        return (None, None) if all(p in (None, -1) for p in equation.params) else None
    if equation.op.name != "contract":
        return None
    operands, _, result = equation.params[0].partition("->")
    x, y = [term.split() for term in operands.split(",")]
    inner = [name for name in x if name in y]
    if len(x) == len(y) == 1 and not inner:
        return [0, None], [None, 0]
    if len(inner) != 1 or inner[0] in result.split():
        return None
    at = x.index(inner[0]), y.index(inner[0])
    return [*[d for d in range(len(x)) if d != at[0]], at[0]], [at[1], *[d for d in range(len(y)) if d != at[1]]]


def _ordered(x: HostArray, order: Order) -> HostArray:
    if order is None:
        return x
    x = x.transpose([d for d in order if d is not None])
    return x[tuple([None if d is None else slice(None) for d in order])]


def _products(x: Aval | HostAval, y: Aval | HostAval, order: Order) -> int:
    columns = y.shape[1:] if order is None else [y.shape[d] for d in order[1:] if d is not None]
    return math.prod(x.shape) * math.prod(columns)


def reduces_columns(equation: Equation) -> bool:
    """Whether an equation reduces dimensions of an array of the host, and not only trailing ones."""
    if not is_reduction(equation) or equation.writes or type(equation.operands[0]) is not Var:
        return False
    x, out = equation.operands[0].kind, equation.results.kind
    if not isinstance(x, Aval) or not isinstance(out, Aval) or not (is_on_host(x) and is_on_host(out)):
        return False
    return x.size > 0 and reduces_some(equation, x) and not reduces_rows(equation, x)


class FusedTrips(Fused):
    """Stands for the functions that run trips among the kernels of a program."""

    def __init__(self) -> None:
        self.equations = ()
        self.compiled = None
        self.shape = (0,)
        self.kernel = LOOPS  # type: ignore[assignment]


class FusedProduct(Fused):
    """A product, which the functions of loops compute."""

    def __init__(self, equation: Equation) -> None:
        x, y = equation.operands
        self.equations = (equation,)
        self.compiled = None
        orders = _orders(equation)
        assert orders is not None
        self._orders = orders
        self.shape = (_products(kind_of(x), kind_of(y), orders[1]),)
        self.kernel = LOOPS  # type: ignore[assignment]
        self._inputs = [(x.number, None, None) for x in (x, y) if type(x) is Var]

    def pointers(self) -> list[int]:
        """See `Fused`."""
        (equation,) = self.equations
        return [x.number if type(x) is Var else -1 for x in (*equation.operands, equation.results)]

    def prepared(self, values: Any, target: Callable[[Var, Var | None], HostArray]) -> Prepared | None:
        """See `Fused`."""
        (equation,) = self.equations
        loops = cast(CompiledLoops, self.compiled)
        arrays = [values[x.number] if type(x) is Var else x for x in equation.operands]
        x, y = map(_ordered, arrays, self._orders)
        return loops.product(x, y, target(equation.results, None))

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


class FusedReduction(Fused):
    """A reduction of other than trailing dimensions: that of the rows of a transposed array."""

    def __init__(self, equation: Equation) -> None:
        self.equations = (equation,)
        self.compiled = None
        (x,) = equation.operands
        axes = self._axes = axes_of(equation)
        self._order = [*[d for d in range(x.kind.ndim) if d not in axes], *axes]
        self.shape = tuple([x.kind.shape[d] for d in self._order])
        self._inputs = [(x.number, None, None)]
        builder = KernelBuilder(len(self.shape), len(axes))
        value = builder.input(x.kind.dtype.str, (True,) * len(self.shape))
        number = divisor(equation)
        self._numbers = [] if number is None else [number]
        one = None if number is None else builder.input(float)
        builder.output(add_reduction(builder, equation, value, one), per_row=True)
        self.kernel = builder.build()

    def pointers(self) -> list[int]:
        """See `Fused`."""
        (equation,) = self.equations
        return [equation.operands[0].number, *[-1 for _ in self._numbers], equation.results.number]

    def prepared(self, values: Any, target: Callable[[Var, Var | None], HostArray]) -> Prepared | None:
        """See `Fused`."""
        assert isinstance(self.compiled, CompiledKernel)
        return self.compiled.prepared(*self._arrays(values, target(self.equations[0].results, None)))

    def __call__(self, values: Any) -> bool:
        """Computes the reduction; returns whether it did."""
        if not isinstance(self.compiled, CompiledKernel) or reports_errors():
            return False
        result = self.equations[0].results
        out = memory_pool.empty(result.kind.shape, result.kind.dtype)
        self.compiled.run(*self._arrays(self.operands(values), out))
        values[result.number] = self._result(result.kind, out)
        return True

    def _arrays(self, values: Any, out: HostArray) -> tuple[Any, Any, Any]:
        """Returns the arguments of the kernel."""
        x = values[self.equations[0].operands[0].number].transpose(self._order)
        if out.ndim == len(self.shape):
            out = out[tuple([0 if d in self._axes else slice(None) for d in range(out.ndim)])]
        return self.shape, [x, *self._numbers], [out]
