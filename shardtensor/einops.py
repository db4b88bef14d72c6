"""The main API of einops on tensors: `einops.rearrange`, `reduce`, `repeat`, `pack`, `unpack`, `einsum` and layers.

The main API finds the functions of an array type in subclasses of its `AbstractBackend`; `register` defines the one for
tensors. It is called when a backend of devices is first used, if einops has been imported by then; a program that
imports einops later calls it itself. `einops.array_api` needs no registration.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.functions.numpy.einsum import einsum
from shardtensor.functions.placement.conversion import asarray
from shardtensor.functions.standard.creation import arange
from shardtensor.functions.standard.joining import concat, stack
from shardtensor.functions.standard.manipulation import expand_dims
from shardtensor.functions.standard.repetition import tile
from shardtensor.tensor.tensor import ShardedTensor

__all__ = ["register"]


class _Functions:
    """The functions of einops' backend that tensors do not have as methods."""

    framework_name = "shardtensor"

    def is_appropriate_type(self, tensor: object) -> bool:
        return isinstance(tensor, ShardedTensor)

    def from_numpy(self, x: np.ndarray[Any, Any]) -> ShardedTensor:
        return asarray(x)

    def to_numpy(self, x: ShardedTensor) -> np.ndarray[Any, Any]:
        return np.asarray(x)

    def arange(self, start: int, stop: int) -> ShardedTensor:
        return arange(start, stop)

    def stack_on_zeroth_dimension(self, tensors: list[ShardedTensor]) -> ShardedTensor:
        return stack(tensors)

    def concat(self, tensors: list[ShardedTensor], axis: int) -> ShardedTensor:
        return concat(tensors, axis=axis)

    def add_axis(self, x: ShardedTensor, new_position: int) -> ShardedTensor:
        return expand_dims(x, axis=new_position)

    def tile(self, x: ShardedTensor, repeats: Sequence[int]) -> ShardedTensor:
        return tile(x, tuple(repeats))

    def is_float_type(self, x: ShardedTensor) -> bool:
        return x.dtype.kind in "fc"

    def einsum(self, pattern: str, *x: ShardedTensor) -> ShardedTensor:
        return einsum(pattern, *x)


@functools.cache
def register() -> type:
    """Defines the class that einops finds among the subclasses of its `AbstractBackend`, at the first call.

    Raises:
        ImportError: einops is not installed.
    """
    abstract = importlib.import_module("einops._backends").AbstractBackend
    return types.new_class("ShardTensorBackend", (_Functions, abstract))
