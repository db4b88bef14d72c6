"""Sharded tensors: NumPy-like arrays distributed over many devices of pluggable backends. See the README."""

# ruff: noqa: I001 - `name as name` marks a public name for type checkers; one statement imports all those of a module
# ruff: noqa: F403 - `import *` imports the operators that a module declares: see `shardtensor.core.operator`

import importlib as _importlib
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
from shardtensor.functions.creation import *
from shardtensor.functions.data_types import astype as astype, result_type as result_type
from shardtensor.functions.elementwise import *
from shardtensor.functions.interchange import from_dlpack as from_dlpack
from shardtensor.functions.joining import concat as concat, stack as stack, unshard as unshard
from shardtensor.functions.linear_algebra import *
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
from shardtensor.functions.scans import cumulative_prod as cumulative_prod, cumulative_sum as cumulative_sum
from shardtensor.functions.searching import *
from shardtensor.functions.shard_lists import shard as shard, to_batched_list as to_batched_list
from shardtensor.functions.statistical import *
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

__version__ = "0.1.0"

__all__ = sorted(
    ["__version__", "random", "visualize_sharding"]
    + [name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _types.ModuleType)]
)

if _typing.TYPE_CHECKING:
    from shardtensor import random as random
    from shardtensor.sharding.visualize import visualize_sharding as visualize_sharding
else:  # Type checkers would take a `__getattr__` for a definition of every name.

    def __getattr__(name: str) -> _typing.Any:
        if name == "visualize_sharding":  # It is imported on first use, since most programs draw nothing.
            from shardtensor.sharding.visualize import visualize_sharding

            return visualize_sharding
        if name == "random":  # So is an extension.
            return _importlib.import_module(f"shardtensor.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
