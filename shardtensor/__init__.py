"""Sharded tensors: NumPy-like arrays distributed over many devices of pluggable backends. See the README."""

# ruff: noqa: I001 - `name as name` marks a public name for type checkers; one statement imports all those of a module

import types as _types
import typing as _typing

import shardtensor.interpreters.eager  # noqa: F401 - the default interpreter enters
from shardtensor.backend.device import HOST as HOST, Device as Device
from shardtensor.backend.protocol import Backend as Backend, current_device as current_device
from shardtensor.backend.registry import (
    backend_names as backend_names,
    device_count as device_count,
    devices as devices,
    local_devices as local_devices,
    num_shards as num_shards,
)
from shardtensor.communication.simulation import SimulationReport as SimulationReport, simulate as simulate
from shardtensor.communication.transfer_log import (
    Transfer as Transfer,
    TransferLog as TransferLog,
    transfer_guard as transfer_guard,
    transfers as transfers,
)
from shardtensor.core import OPS as OPS
from shardtensor.errors import (
    ArgumentError as ArgumentError,
    ArgumentTypeError as ArgumentTypeError,
    AxisError as AxisError,
    BackendError as BackendError,
    CollectiveError as CollectiveError,
    ConcretizationError as ConcretizationError,
    DeviceMemoryError as DeviceMemoryError,
    DonatedError as DonatedError,
    IndexingError as IndexingError,
    InterchangeError as InterchangeError,
    RangeError as RangeError,
    ShapeError as ShapeError,
    ShardingError as ShardingError,
    ShardTensorError as ShardTensorError,
    TransferError as TransferError,
)
from shardtensor.functions.creation import (
    arange as arange,
    empty as empty,
    empty_like as empty_like,
    eye as eye,
    full as full,
    full_like as full_like,
    ones as ones,
    ones_like as ones_like,
    zeros as zeros,
    zeros_like as zeros_like,
)
from shardtensor.functions.data_types import astype as astype, result_type as result_type
from shardtensor.functions.elementwise import (
    abs as abs,
    acos as acos,
    acosh as acosh,
    add as add,
    asin as asin,
    asinh as asinh,
    atan as atan,
    atan2 as atan2,
    atanh as atanh,
    bitwise_and as bitwise_and,
    bitwise_invert as bitwise_invert,
    bitwise_left_shift as bitwise_left_shift,
    bitwise_or as bitwise_or,
    bitwise_right_shift as bitwise_right_shift,
    bitwise_xor as bitwise_xor,
    ceil as ceil,
    clip as clip,
    conj as conj,
    copysign as copysign,
    cos as cos,
    cosh as cosh,
    divide as divide,
    equal as equal,
    exp as exp,
    expm1 as expm1,
    floor as floor,
    floor_divide as floor_divide,
    greater as greater,
    greater_equal as greater_equal,
    hypot as hypot,
    imag as imag,
    isfinite as isfinite,
    isinf as isinf,
    isnan as isnan,
    less as less,
    less_equal as less_equal,
    log as log,
    log1p as log1p,
    log2 as log2,
    log10 as log10,
    logaddexp as logaddexp,
    logical_and as logical_and,
    logical_not as logical_not,
    logical_or as logical_or,
    logical_xor as logical_xor,
    maximum as maximum,
    minimum as minimum,
    multiply as multiply,
    negative as negative,
    nextafter as nextafter,
    not_equal as not_equal,
    positive as positive,
    pow as pow,
    real as real,
    reciprocal as reciprocal,
    remainder as remainder,
    round as round,
    sign as sign,
    signbit as signbit,
    sin as sin,
    sinh as sinh,
    sqrt as sqrt,
    square as square,
    subtract as subtract,
    tan as tan,
    tanh as tanh,
    trunc as trunc,
)
from shardtensor.functions.interchange import from_dlpack as from_dlpack
from shardtensor.functions.joining import concat as concat, stack as stack, unshard as unshard
from shardtensor.functions.linear_algebra import matmul as matmul, tensordot as tensordot, vecdot as vecdot
from shardtensor.functions.manipulation import (
    broadcast_to as broadcast_to,
    expand_dims as expand_dims,
    flip as flip,
    matrix_transpose as matrix_transpose,
    moveaxis as moveaxis,
    permute_dims as permute_dims,
    reshape as reshape,
    roll as roll,
    squeeze as squeeze,
    unstack as unstack,
)
from shardtensor.functions.placement import (
    asarray as asarray,
    device_put as device_put,
    reshard as reshard,
    with_sharding_constraint as with_sharding_constraint,
)
from shardtensor.functions.searching import argmax as argmax, argmin as argmin, where as where
from shardtensor.functions.shard_lists import shard as shard, to_batched_list as to_batched_list
from shardtensor.functions.statistical import (
    all as all,
    any as any,
    max as max,
    mean as mean,
    min as min,
    prod as prod,
    std as std,
    sum as sum,
    var as var,
)
from shardtensor.host.memory_pool import (
    CacheInfo as CacheInfo,
    cache_info as cache_info,
    free_cache as free_cache,
    set_cache_limit as set_cache_limit,
)
from shardtensor.host.threads import num_threads as num_threads, set_num_threads as set_num_threads
from shardtensor.interpreters.explain import Explanation as Explanation, explain as explain
from shardtensor.interpreters.infer import ShapeDtypeStruct as ShapeDtypeStruct, eval_shape as eval_shape
from shardtensor.sharding.abstract_mesh import AbstractMesh as AbstractMesh
from shardtensor.sharding.layout import NamedSharding as NamedSharding, SingleDeviceSharding as SingleDeviceSharding
from shardtensor.sharding.mesh import Mesh as Mesh, make_mesh as make_mesh, use_mesh as use_mesh
from shardtensor.sharding.spec import P as P, PartitionSpec as PartitionSpec
from shardtensor.spmd.collectives import (
    all_gather as all_gather,
    all_to_all as all_to_all,
    axis_index as axis_index,
    axis_size as axis_size,
    pbroadcast as pbroadcast,
    pmax as pmax,
    pmean as pmean,
    pmin as pmin,
    ppermute as ppermute,
    pprod as pprod,
    pshuffle as pshuffle,
    psum as psum,
    psum_scatter as psum_scatter,
    pswapaxes as pswapaxes,
)
from shardtensor.spmd.pmap import pmap as pmap
from shardtensor.spmd.shard_map import shard_map as shard_map
from shardtensor.spmd.smap import smap as smap
from shardtensor.tensor.tensor import Shard as Shard, ShardedTensor as ShardedTensor

if _typing.TYPE_CHECKING:
    from shardtensor.sharding.visualize import visualize_sharding as visualize_sharding

__version__ = "0.1.0"

__all__ = sorted(
    ["__version__", "visualize_sharding"]
    + [name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _types.ModuleType)]
)


def __getattr__(name: str) -> _typing.Any:
    if name == "visualize_sharding":  # It is imported on first use, since most programs draw nothing.
        from shardtensor.sharding.visualize import visualize_sharding

        return visualize_sharding
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
