"""The public names of the package, each written once, with the module that defines it.

Type checkers and editors read these imports. The package itself does not execute them, but takes them as a table (see
`shardtensor.exports`): it imports a module when one of its names is first used. ``import *`` stands for the operators
that a module declares (see `shardtensor.core.operator`), and a module of which all names are imported is not deferred.
"""

# ruff: noqa: F403 - `import *` imports all operators of a module
# ruff: noqa: F401, I001 - `name as name` marks a public name for type checkers; one statement imports all of a module

from ml_dtypes import (
    bfloat16 as bfloat16,
    float8_e3m4 as float8_e3m4,
    float8_e4m3 as float8_e4m3,
    float8_e4m3b11fnuz as float8_e4m3b11fnuz,
    float8_e4m3fn as float8_e4m3fn,
    float8_e4m3fnuz as float8_e4m3fnuz,
    float8_e5m2 as float8_e5m2,
    float8_e5m2fnuz as float8_e5m2fnuz,
)
from numpy import (
    bool as bool,
    complex128 as complex128,
    complex64 as complex64,
    e as e,
    float16 as float16,
    float32 as float32,
    float64 as float64,
    inf as inf,
    int16 as int16,
    int32 as int32,
    int64 as int64,
    int8 as int8,
    nan as nan,
    newaxis as newaxis,
    pi as pi,
    uint16 as uint16,
    uint32 as uint32,
    uint64 as uint64,
    uint8 as uint8,
)

import shardtensor.checkpoint as checkpoint
import shardtensor.checkpoint_policies as checkpoint_policies
import shardtensor.custom_derivatives as custom_derivatives
import shardtensor.data as data
import shardtensor.distributed as distributed
import shardtensor.fft as fft
import shardtensor.lib as lib
import shardtensor.linalg as linalg
import shardtensor.optim as optim
import shardtensor.random as random
import shardtensor.tree as tree
from shardtensor.backend.device import HOST as HOST, Device as Device
from shardtensor.backend.protocol import Backend as Backend, current_device as current_device
from shardtensor.backend.registry import (
    backend_names as backend_names,
    device_count as device_count,
    devices as devices,
    local_device_count as local_device_count,
    local_devices as local_devices,
    num_shards as num_shards,
    set_num_devices as set_num_devices,
)
from shardtensor.communication.simulation import SimulationReport as SimulationReport, simulate as simulate
from shardtensor.communication.transfer_log import (
    Transfer as Transfer,
    TransferLog as TransferLog,
    transfer_guard as transfer_guard,
    transfers as transfers,
)
from shardtensor.declarations import OPS as OPS
from shardtensor.distributed import process_count as process_count, process_index as process_index
from shardtensor.errors import (
    ArgumentError as ArgumentError,
    ArgumentTypeError as ArgumentTypeError,
    AxisError as AxisError,
    BackendError as BackendError,
    CollectiveError as CollectiveError,
    ConcretizationError as ConcretizationError,
    DeviceMemoryError as DeviceMemoryError,
    DistributedError as DistributedError,
    DonatedError as DonatedError,
    ForkError as ForkError,
    IndexingError as IndexingError,
    InterchangeError as InterchangeError,
    NaNError as NaNError,
    NotAddressableError as NotAddressableError,
    RangeError as RangeError,
    ShapeError as ShapeError,
    ShardingError as ShardingError,
    ShardTensorError as ShardTensorError,
    TransferError as TransferError,
)
from shardtensor.functions.numpy.comparisons import (
    allclose as allclose,
    array_equal as array_equal,
    array_equiv as array_equiv,
    common_type as common_type,
    isclose as isclose,
    iscomplex as iscomplex,
    iscomplexobj as iscomplexobj,
    isnat as isnat,
    isneginf as isneginf,
    isposinf as isposinf,
    isreal as isreal,
    isrealobj as isrealobj,
    min_scalar_type as min_scalar_type,
    promote_types as promote_types,
)
from shardtensor.functions.placement.conversion import asarray as asarray
from shardtensor.functions.statistics.counts import bincount as bincount
from shardtensor.functions.standard.creation import (
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
from shardtensor.functions.standard.data_types import (
    astype as astype,
    can_cast as can_cast,
    finfo as finfo,
    iinfo as iinfo,
    isdtype as isdtype,
    result_type as result_type,
)
from shardtensor.functions.numpy.differences import gradient as gradient
from shardtensor.functions.numpy.einsum import einsum as einsum
from shardtensor.functions.standard.elementwise import *
from shardtensor.files.array_files import (
    load as load,
    save as save,
    savez as savez,
    savez_compressed as savez_compressed,
)
from shardtensor.files.safetensors_files import (
    load_safetensors as load_safetensors,
    save_safetensors as save_safetensors,
)
from shardtensor.functions.numpy.grids import (
    fromfunction as fromfunction,
    geomspace as geomspace,
    indices as indices,
    linspace as linspace,
    logspace as logspace,
    meshgrid as meshgrid,
    mgrid as mgrid,
    ogrid as ogrid,
)
from shardtensor.functions.statistics.histograms import (
    digitize as digitize,
    histogram as histogram,
    histogram2d as histogram2d,
    histogram_bin_edges as histogram_bin_edges,
    histogramdd as histogramdd,
)
from shardtensor.functions.numpy.index_arrays import (
    diag_indices as diag_indices,
    diag_indices_from as diag_indices_from,
    ix_ as ix_,
    mask_indices as mask_indices,
    ravel_multi_index as ravel_multi_index,
    tril_indices as tril_indices,
    tril_indices_from as tril_indices_from,
    triu_indices as triu_indices,
    triu_indices_from as triu_indices_from,
    unravel_index as unravel_index,
)
from shardtensor.functions.standard.indexing import take as take
from shardtensor.functions.standard.inspection import (
    __array_api_version__ as __array_api_version__,
    __array_namespace_info__ as __array_namespace_info__,
)
from shardtensor.functions.interchange.dlpack_import import from_dlpack as from_dlpack
from shardtensor.functions.standard.joining import block as block, concat as concat, stack as stack, unshard as unshard
from shardtensor.functions.standard.linear_algebra import *
from shardtensor.functions.numpy.lines import (
    apply_along_axis as apply_along_axis,
    packbits as packbits,
    unpackbits as unpackbits,
)
from shardtensor.functions.standard.manipulation import (
    broadcast_to as broadcast_to,
    expand_dims as expand_dims,
    flip as flip,
    matrix_transpose as matrix_transpose,
    moveaxis as moveaxis,
    permute_dims as permute_dims,
    reshape as reshape,
    roll as roll,
    squeeze as squeeze,
    transpose as transpose,
    unstack as unstack,
)
from shardtensor.functions.numpy.mathematical import (
    angle as angle,
    ediff1d as ediff1d,
    fix as fix,
    i0 as i0,
    interp as interp,
    nan_to_num as nan_to_num,
    real_if_close as real_if_close,
    sinc as sinc,
    sort_complex as sort_complex,
    trapezoid as trapezoid,
    unwrap as unwrap,
)
from shardtensor.functions.placement.global_arrays import (
    make_array_from_callback as make_array_from_callback,
    make_array_from_process_local_data as make_array_from_process_local_data,
    make_array_from_single_device_arrays as make_array_from_single_device_arrays,
)
from shardtensor.functions.placement.names import checkpoint_name as checkpoint_name
from shardtensor.functions.statistics.nan_reductions import (
    nanargmax as nanargmax,
    nanargmin as nanargmin,
    nancumprod as nancumprod,
    nancumsum as nancumsum,
    nanmax as nanmax,
    nanmean as nanmean,
    nanmin as nanmin,
    nanprod as nanprod,
    nanstd as nanstd,
    nansum as nansum,
    nanvar as nanvar,
)
from shardtensor.functions.numpy.number_parts import divmod as divmod, frexp as frexp, modf as modf
from shardtensor.functions.statistics.order_statistics import (
    median as median,
    nanmedian as nanmedian,
    nanpercentile as nanpercentile,
    nanquantile as nanquantile,
    percentile as percentile,
    quantile as quantile,
)
from shardtensor.functions.placement.transfers import (
    device_get as device_get,
    device_put as device_put,
    reshard as reshard,
    with_sharding_constraint as with_sharding_constraint,
)
from shardtensor.functions.placement.placed_functions import auto_axes as auto_axes, explicit_axes as explicit_axes
from shardtensor.functions.numpy.polynomials import (
    poly as poly,
    polyadd as polyadd,
    polyder as polyder,
    polydiv as polydiv,
    polyfit as polyfit,
    polyint as polyint,
    polymul as polymul,
    polysub as polysub,
    polyval as polyval,
    roots as roots,
    vander as vander,
)
from shardtensor.functions.numpy.products import (
    cross as cross,
    diagonal as diagonal,
    dot as dot,
    inner as inner,
    kron as kron,
    outer as outer,
    trace as trace,
)
from shardtensor.functions.numpy.rearrangement import (
    append as append,
    array_split as array_split,
    atleast_1d as atleast_1d,
    atleast_2d as atleast_2d,
    atleast_3d as atleast_3d,
    column_stack as column_stack,
    delete as delete,
    dsplit as dsplit,
    dstack as dstack,
    fliplr as fliplr,
    flipud as flipud,
    hsplit as hsplit,
    hstack as hstack,
    insert as insert,
    ravel as ravel,
    rollaxis as rollaxis,
    rot90 as rot90,
    split as split,
    swapaxes as swapaxes,
    vsplit as vsplit,
    vstack as vstack,
)
from shardtensor.functions.standard.repetition import (
    broadcast_arrays as broadcast_arrays,
    broadcast_shapes as broadcast_shapes,
    pad as pad,
    repeat as repeat,
    resize as resize,
    tile as tile,
)
from shardtensor.functions.standard.scans import (
    cumprod as cumprod,
    cumsum as cumsum,
    cumulative_prod as cumulative_prod,
    cumulative_sum as cumulative_sum,
    diff as diff,
    logcumsumexp as logcumsumexp,
)
from shardtensor.functions.standard.searching import (
    argmax as argmax,
    argmin as argmin,
    argwhere as argwhere,
    count_nonzero as count_nonzero,
    flatnonzero as flatnonzero,
    nonzero as nonzero,
    searchsorted as searchsorted,
    where as where,
)
from shardtensor.functions.numpy.selection import (
    apply_over_axes as apply_over_axes,
    choose as choose,
    compress as compress,
    extract as extract,
    fill_diagonal as fill_diagonal,
    piecewise as piecewise,
    place as place,
    put_along_axis as put_along_axis,
    putmask as putmask,
    select as select,
    trim_zeros as trim_zeros,
)
from shardtensor.functions.numpy.set_operations import (
    intersect1d as intersect1d,
    setdiff1d as setdiff1d,
    setxor1d as setxor1d,
    union1d as union1d,
)
from shardtensor.functions.standard.sets import (
    isin as isin,
    unique as unique,
    unique_all as unique_all,
    unique_counts as unique_counts,
    unique_inverse as unique_inverse,
    unique_values as unique_values,
)
from shardtensor.functions.placement.shard_lists import shard as shard, to_batched_list as to_batched_list
from shardtensor.functions.standard.sorting import (
    argpartition as argpartition,
    argsort as argsort,
    lexsort as lexsort,
    partition as partition,
    sort as sort,
    topk as topk,
)
from shardtensor.functions.standard.statistical import (
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
from shardtensor.functions.statistics.averages import average as average, corrcoef as corrcoef, cov as cov, ptp as ptp
from shardtensor.functions.standard.take_along import take_along_axis as take_along_axis
from shardtensor.functions.numpy.triangles import (
    diag as diag,
    diagflat as diagflat,
    identity as identity,
    tri as tri,
    tril as tril,
    triu as triu,
)
from shardtensor.functions.numpy.ufuncs import (
    bitwise_count as bitwise_count,
    deg2rad as deg2rad,
    degrees as degrees,
    exp2 as exp2,
    fabs as fabs,
    float_power as float_power,
    fmax as fmax,
    fmin as fmin,
    fmod as fmod,
    gcd as gcd,
    heaviside as heaviside,
    lcm as lcm,
    ldexp as ldexp,
    logaddexp2 as logaddexp2,
    matvec as matvec,
    rad2deg as rad2deg,
    radians as radians,
    rint as rint,
    spacing as spacing,
    vdot as vdot,
    vecmat as vecmat,
)
from shardtensor.functions.numpy.windows import (
    bartlett as bartlett,
    blackman as blackman,
    hamming as hamming,
    hanning as hanning,
    kaiser as kaiser,
)
from shardtensor.host.memory_pool import (
    CacheInfo as CacheInfo,
    cache_info as cache_info,
    free_cache as free_cache,
    set_cache_limit as set_cache_limit,
)
from shardtensor.host.threads import num_threads as num_threads, set_num_threads as set_num_threads
from shardtensor.interpreters.batching.vmap import vmap as vmap
from shardtensor.interpreters.batching.jacobians import hessian as hessian, jacfwd as jacfwd, jacrev as jacrev
from shardtensor.interpreters.control_flow import (
    associative_scan as associative_scan,
    cond as cond,
    fori_loop as fori_loop,
    map as map,
    scan as scan,
    switch as switch,
    while_loop as while_loop,
)
from shardtensor.interpreters.differentiation.accumulation import accumulate as accumulate
from shardtensor.interpreters.differentiation.grad import (
    grad as grad,
    jvp as jvp,
    linearize as linearize,
    stop_gradient as stop_gradient,
    value_and_grad as value_and_grad,
    vjp as vjp,
)
from shardtensor.interpreters.differentiation.custom import custom_jvp as custom_jvp, custom_vjp as custom_vjp
from shardtensor.interpreters.differentiation.remat import remat as remat
from shardtensor.interpreters.explain import Explanation as Explanation, explain as explain
from shardtensor.interpreters.infer import ShapeDtypeStruct as ShapeDtypeStruct, eval_shape as eval_shape
from shardtensor.interpreters.nan_checks import debug_nans as debug_nans
from shardtensor.interpreters.jit.jit import disable_jit as disable_jit, jit as jit
from shardtensor.sharding.abstract_mesh import AbstractMesh as AbstractMesh
from shardtensor.sharding.layout import NamedSharding as NamedSharding, SingleDeviceSharding as SingleDeviceSharding
from shardtensor.sharding.mesh import (
    Mesh as Mesh,
    get_mesh as get_mesh,
    make_mesh as make_mesh,
    set_mesh as set_mesh,
    use_mesh as use_mesh,
)
from shardtensor.optim.precision import mixed_precision as mixed_precision
from shardtensor.sharding.spec import P as P, PartitionSpec as PartitionSpec
from shardtensor.pictures.visualize import visualize_sharding as visualize_sharding
from shardtensor.spmd.type_casts import pcast as pcast, pvary as pvary
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
from shardtensor.spmd.ragged_exchange import ragged_all_to_all as ragged_all_to_all
from shardtensor.spmd.maps.pmap import pmap as pmap
from shardtensor.spmd.maps.shard_jit import shard_jit as shard_jit
from shardtensor.spmd.maps.shard_map import shard_map as shard_map
from shardtensor.spmd.maps.smap import smap as smap
from shardtensor.spmd.maps.stencils import convolve as convolve, correlate as correlate, map_overlap as map_overlap
from shardtensor.tensor.array_type import typeof as typeof
from shardtensor.tensor.memory import (
    MemoryInfo as MemoryInfo,
    memory_info as memory_info,
    reset_peak_memory as reset_peak_memory,
)
from shardtensor.tensor.pytree import register_pytree_node as register_pytree_node
from shardtensor.tensor.tensor import Shard as Shard, ShardedTensor as ShardedTensor
