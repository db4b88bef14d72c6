"""Sharded tensors over pluggable devices: NumPy-like arrays on many devices, in two worlds and one type. See the README."""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

import shardtensor.eager  # the default interpreter
from shardtensor.backend import (
    HOST,
    Backend,
    Device,
    backend_names,
    current_device,
    device_count,
    devices,
    local_devices,
    num_shards,
)
from shardtensor.core import OPS
from shardtensor.errors import (
    ArgumentError,
    ArgumentTypeError,
    AxisError,
    BackendError,
    DonatedError,
    IndexingError,
    ShapeError,
    ShardingError,
    ShardTensorError,
    TransferError,
)
from shardtensor.functions.creation import (
    arange,
    empty,
    empty_like,
    eye,
    full,
    full_like,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from shardtensor.functions.data_types import astype, result_type
from shardtensor.functions.elementwise import (
    abs,
    acos,
    acosh,
    add,
    asin,
    asinh,
    atan,
    atan2,
    atanh,
    bitwise_and,
    bitwise_invert,
    bitwise_left_shift,
    bitwise_or,
    bitwise_right_shift,
    bitwise_xor,
    ceil,
    clip,
    conj,
    copysign,
    cos,
    cosh,
    divide,
    equal,
    exp,
    expm1,
    floor,
    floor_divide,
    greater,
    greater_equal,
    hypot,
    imag,
    isfinite,
    isinf,
    isnan,
    less,
    less_equal,
    log,
    log1p,
    log2,
    log10,
    logaddexp,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    multiply,
    negative,
    nextafter,
    not_equal,
    positive,
    pow,
    real,
    reciprocal,
    remainder,
    round,
    sign,
    signbit,
    sin,
    sinh,
    sqrt,
    square,
    subtract,
    tan,
    tanh,
    trunc,
)
from shardtensor.functions.linear_algebra import matmul, tensordot, vecdot
from shardtensor.functions.lists import shard, to_batched_list
from shardtensor.functions.manipulation import (
    broadcast_to,
    concat,
    expand_dims,
    flip,
    matrix_transpose,
    moveaxis,
    permute_dims,
    reshape,
    roll,
    squeeze,
    stack,
    unshard,
)
from shardtensor.functions.placement import asarray, device_put, reshard, with_sharding_constraint
from shardtensor.functions.searching import argmax, argmin, where
from shardtensor.functions.statistical import all, any, max, mean, min, prod, std, sum, var
from shardtensor.log import Transfer, TransferLog, transfer_guard, transfers
from shardtensor.sharding import (
    Mesh,
    NamedSharding,
    P,
    PartitionSpec,
    SingleDeviceSharding,
    make_mesh,
    use_mesh,
)
from shardtensor.spmd import pmap, smap
from shardtensor.tensor import Shard, ShardedTensor

if TYPE_CHECKING:
    from shardtensor.visualize import visualize_sharding

__version__ = "0.1.0"

_LOADED_ON_USE = {"visualize_sharding": "shardtensor.visualize"}


def __getattr__(name: str) -> Any:
    if name in _LOADED_ON_USE:
        return getattr(_import_module(_LOADED_ON_USE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
