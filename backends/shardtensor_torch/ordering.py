"""Sorting and searching PyTorch tensors in NumPy's order: NaN is greater than all numbers, and complex numbers are
ordered by their real parts, then by their imaginary parts.

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardtensor_torch.elementwise import resolved, torch

__all__ = ["Ordering"]


class Ordering:
    """The functions of the namespace that order elements."""

    _together: Callable[..., list[Any]]

    def sort(self, x: Any, /, *, axis: int = -1, stable: bool = True) -> Any:
        """See NumPy."""
        if x.dtype.is_complex:
            return torch.take_along_dim(resolved(x), _complex_order(x, axis), axis)
        return torch.sort(x, dim=axis, stable=stable).values

    def argsort(self, x: Any, /, *, axis: int = -1, stable: bool = True) -> Any:
        """See NumPy."""
        return _complex_order(x, axis) if x.dtype.is_complex else torch.argsort(x, dim=axis, stable=stable)

    def searchsorted(self, x1: Any, x2: Any, /, *, side: str = "left") -> Any:
        """See NumPy."""
        x1, x2 = self._together(x1, x2)
        flat, right = x2.reshape(-1), side == "right"
        if x1.dtype.is_complex:
            return _complex_search(x1, flat, right).reshape(x2.shape)
        if x1.dtype in (torch.bool, torch.float16):  # PyTorch searches neither.
            wider = torch.uint8 if x1.dtype is torch.bool else torch.float32
            x1, flat = x1.to(wider), flat.to(wider)
        if not x1.dtype.is_floating_point:
            return torch.searchsorted(x1.contiguous(), flat.contiguous(), right=right).reshape(x2.shape)
        # PyTorch compares with NaN as if it were less than all numbers.
        numbers = x1[: int(torch.count_nonzero(~torch.isnan(x1)))].contiguous()
        positions = torch.searchsorted(numbers, flat.contiguous(), right=right)
        behind = x1.shape[0] if right else numbers.shape[0]
        return torch.where(torch.isnan(flat), behind, positions).reshape(x2.shape)

    def isin(self, x1: Any, x2: Any, /) -> Any:
        """See NumPy."""
        x1, x2 = self._together(x1, x2)
        known = self.sort(x2.reshape(-1), stable=False)
        if not known.shape[0]:
            return torch.zeros_like(x1, dtype=torch.bool)
        at = self.searchsorted(known, x1).clamp(max=known.shape[0] - 1)
        return known[at] == x1


def _complex_order(x: Any, axis: int) -> Any:
    """Returns the indices that sort complex numbers. Numbers with a NaN follow the others: those of which the real part
    is one after those of which only the imaginary part is.
    """
    real, imag = resolved(x).real, resolved(x).imag
    order = torch.argsort(imag, dim=axis, stable=True)
    for key in (real, 2 * torch.isnan(real).to(torch.uint8) + torch.isnan(imag).to(torch.uint8)):
        step = torch.argsort(torch.take_along_dim(key, order, axis), dim=axis, stable=True)
        order = torch.take_along_dim(order, step, axis)
    return order


def _complex_search(x1: Any, x2: Any, right: bool) -> Any:
    """Returns the number of elements of x1, which is sorted, before each of x2: from the order of both together."""
    order = _complex_order(torch.cat([x1, x2] if right else [x2, x1]), -1)
    first = torch.arange(order.shape[0], device=order.device) < (x1.shape[0] if right else x2.shape[0])
    mine = first if right else ~first
    before = torch.empty_like(order)
    before[order] = torch.cumsum(mine[order], 0)
    return before[~mine]
