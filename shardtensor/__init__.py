"""Sharded tensors: NumPy-like arrays distributed over many devices of pluggable backends. See the README."""

# ruff: noqa: I001 - `name as name` marks a public name for type checkers; one statement imports all those of a module
# ruff: noqa: F403 - `import *` imports the operators that a module declares: see `shardtensor.core.operator`

import importlib as _importlib
import os as _os
import sys as _sys
import types as _types
import typing as _typing

if _os.name == "nt":  # Its parts that are imported on first use would fail one by one, by modules that Windows lacks.
    raise ImportError("shardtensor needs Linux, and this is Python for Windows; use one in WSL2, which is Linux")

from numpy import (
    bool as bool,
    complex64 as complex64,
    complex128 as complex128,
    e as e,
    float16 as float16,
    float32 as float32,
    float64 as float64,
    inf as inf,
    int8 as int8,
    int16 as int16,
    int32 as int32,
    int64 as int64,
    nan as nan,
    newaxis as newaxis,
    pi as pi,
    uint8 as uint8,
    uint16 as uint16,
    uint32 as uint32,
    uint64 as uint64,
)

import shardtensor.interpreters.eager
import shardtensor.interpreters.partial_sum_reads  # noqa: F401 - reading an unreduced tensor adds its partial sums
from shardtensor.signatures import without_quotes as _without_quotes
from shardtensor.backend.device import HOST as HOST, Device as Device
from shardtensor.backend.protocol import Backend as Backend, current_device as current_device
from shardtensor.backend.registry import (
    after_loading as _after_loading,
    backend_names as backend_names,
    device_count as device_count,
    devices as devices,
    local_device_count as local_device_count,
    local_devices as local_devices,
    num_shards as num_shards,
    set_num_devices as set_num_devices,
)
from shardtensor.backend.small_floats import SMALL_FLOATS as _SMALL_FLOATS, small_float as _small_float
from shardtensor.communication.between_processes.forgotten import remind as _remind
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
    DistributedError as DistributedError,
    DonatedError as DonatedError,
    ForkError as ForkError,
    IndexingError as IndexingError,
    InterchangeError as InterchangeError,
    NotAddressableError as NotAddressableError,
    RangeError as RangeError,
    ShapeError as ShapeError,
    ShardingError as ShardingError,
    ShardTensorError as ShardTensorError,
    TransferError as TransferError,
)
from shardtensor.functions.standard.creation import *
from shardtensor.functions.standard.data_types import (
    astype as astype,
    can_cast as can_cast,
    finfo as finfo,
    iinfo as iinfo,
    isdtype as isdtype,
    result_type as result_type,
)
from shardtensor.functions.standard.elementwise import *
from shardtensor.functions.standard.indexing import take as take
from shardtensor.functions.standard.joining import concat as concat, stack as stack, unshard as unshard
from shardtensor.functions.standard.linear_algebra import *
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
from shardtensor.functions.placement.conversion import asarray as asarray
from shardtensor.functions.placement.transfers import (
    device_get as device_get,
    device_put as device_put,
    reshard as reshard,
    with_sharding_constraint as with_sharding_constraint,
)
from shardtensor.functions.placement.shard_lists import shard as shard, to_batched_list as to_batched_list
from shardtensor.functions.standard.statistical import *
from shardtensor.hints import explain_imports as _explain_imports, missing as _missing
from shardtensor.host.memory_pool import (
    CacheInfo as CacheInfo,
    cache_info as cache_info,
    free_cache as free_cache,
    set_cache_limit as set_cache_limit,
)
from shardtensor.host.threads import num_threads as num_threads, set_num_threads as set_num_threads
from shardtensor.interpreters import recording as _recording  # noqa: F401 - it observes the logs
from shardtensor.interpreters.infer import ShapeDtypeStruct as ShapeDtypeStruct, eval_shape as eval_shape
from shardtensor.sharding.abstract_mesh import AbstractMesh as AbstractMesh
from shardtensor.sharding.layout import NamedSharding as NamedSharding, SingleDeviceSharding as SingleDeviceSharding
from shardtensor.sharding.mesh import (
    Mesh as Mesh,
    get_mesh as get_mesh,
    make_mesh as make_mesh,
    set_mesh as set_mesh,
    use_mesh as use_mesh,
)
from shardtensor.sharding.spec import P as P, PartitionSpec as PartitionSpec
from shardtensor.tensor.numpy_functions import NUMPY_NAMES as _NUMPY_NAMES
from shardtensor.tensor.array_type import typeof as typeof
from shardtensor.tensor.pytree import register_pytree_node as register_pytree_node
from shardtensor.tensor.tensor import Shard as Shard, ShardedTensor as ShardedTensor
from shardtensor.tracebacks import hide_from_pytest as _hide_from_pytest, install as _install_hooks

__version__ = "0.2.0"
"""The version of the library."""

_CHAPTERS = {
    "communication.simulation": "SimulationReport simulate",
    "distributed": "process_count process_index",
    "functions.comparisons": (
        "allclose array_equal array_equiv common_type isclose iscomplex iscomplexobj isnat isneginf isposinf isreal "
        "isrealobj min_scalar_type promote_types"
    ),
    "functions.counts": "bincount",
    "functions.differences": "gradient",
    "functions.einsum": "einsum",
    "functions.files": "load save savez savez_compressed",
    "functions.grids": "fromfunction geomspace indices linspace logspace meshgrid mgrid ogrid",
    "functions.histograms": "digitize histogram histogram2d histogram_bin_edges histogramdd",
    "functions.index_arrays": (
        "diag_indices diag_indices_from ix_ mask_indices ravel_multi_index tril_indices tril_indices_from "
        "triu_indices triu_indices_from unravel_index"
    ),
    "functions.inspection": "__array_api_version__ __array_namespace_info__",
    "functions.interchange": "from_dlpack",
    "functions.joining": "block",
    "functions.lines": "apply_along_axis packbits unpackbits",
    "functions.mathematical": "angle ediff1d fix i0 interp nan_to_num real_if_close sinc sort_complex trapezoid unwrap",
    "functions.nan_reductions": (
        "nanargmax nanargmin nancumprod nancumsum nanmax nanmean nanmin nanprod nanstd nansum nanvar"
    ),
    "functions.names": "checkpoint_name",
    "functions.number_parts": "divmod frexp modf",
    "functions.order_statistics": "median nanmedian nanpercentile nanquantile percentile quantile",
    "functions.polynomials": "poly polyadd polyder polydiv polyfit polyint polymul polysub polyval roots vander",
    "functions.products": "cross diagonal dot inner kron outer trace",
    "functions.rearrangement": (
        "append array_split atleast_1d atleast_2d atleast_3d column_stack delete dsplit dstack fliplr flipud hsplit "
        "hstack insert ravel rollaxis rot90 split swapaxes vsplit vstack"
    ),
    "functions.repetition": "broadcast_arrays broadcast_shapes pad repeat resize tile",
    "functions.scans": "cumprod cumsum cumulative_prod cumulative_sum diff logcumsumexp",
    "functions.searching": "argmax argmin argwhere count_nonzero flatnonzero nonzero searchsorted where",
    "functions.selection": (
        "apply_over_axes choose compress extract fill_diagonal piecewise place put_along_axis putmask select trim_zeros"
    ),
    "functions.set_operations": "intersect1d setdiff1d setxor1d union1d",
    "functions.sets": "isin unique unique_all unique_counts unique_inverse unique_values",
    "functions.sorting": "argpartition argsort lexsort partition sort topk",
    "functions.statistics": "average corrcoef cov ptp",
    "functions.take_along": "take_along_axis",
    "functions.triangles": "diag diagflat identity tri tril triu",
    "functions.ufuncs": (
        "bitwise_count deg2rad degrees exp2 fabs float_power fmax fmin fmod gcd heaviside lcm ldexp logaddexp2 matvec "
        "rad2deg radians rint spacing vdot vecmat"
    ),
    "functions.windows": "bartlett blackman hamming hanning kaiser",
    "interpreters.batching.api": "vmap",
    "interpreters.batching.jacobians": "hessian jacfwd jacrev",
    "interpreters.control_flow": "associative_scan cond fori_loop map scan switch while_loop",
    "interpreters.differentiation.custom": "custom_jvp custom_vjp",
    "interpreters.differentiation.api": "grad jvp linearize stop_gradient value_and_grad vjp",
    "interpreters.differentiation.remat": "remat",
    "interpreters.explain": "Explanation explain",
    "interpreters.jit.api": "disable_jit jit",
    "spmd.collectives": (
        "all_gather all_to_all axis_index axis_size pbroadcast pmax pmean pmin ppermute pprod pshuffle psum "
        "psum_scatter pswapaxes"
    ),
    "spmd.pmap": "pmap",
    "spmd.shard_map": "shard_map",
    "spmd.smap": "smap",
    "spmd.stencils": "convolve correlate map_overlap",
    "tensor.memory": "MemoryInfo memory_info reset_peak_memory",
}
"""The modules that are imported when one of their public names is first used."""

OPS.chapters.update({name: f"shardtensor.{module}" for module, names in _CHAPTERS.items() for name in names.split()})

_EXTENSIONS = ("checkpoint_policies", "distributed", "fft", "lib", "linalg", "random", "tree")
"""The modules that are imported on first use."""

_loaded = [name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _types.ModuleType)]
for _name in _loaded:
    _without_quotes(globals()[_name])

__all__ = sorted(["__version__", "visualize_sharding", *_EXTENSIONS, *OPS.chapters, *_loaded])


def _register_with_einops() -> None:
    """Makes tensors known to einops if the program has imported it by the time that it uses devices."""
    if "einops" in _sys.modules:
        _importlib.import_module("shardtensor.einops").register()


_install_hooks()
_explain_imports()
_after_loading.append(_register_with_einops)
_after_loading.append(_remind)

if _typing.TYPE_CHECKING:
    from shardtensor import (
        checkpoint_policies as checkpoint_policies,
        distributed as distributed,
        fft as fft,
        lib as lib,
        linalg as linalg,
        random as random,
        tree as tree,
    )
    from shardtensor.communication.simulation import (
        SimulationReport as SimulationReport,
        simulate as simulate,
    )
    from shardtensor.distributed import process_count as process_count, process_index as process_index
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
    from shardtensor.functions.statistics.counts import bincount as bincount
    from shardtensor.functions.numpy.differences import (
        gradient as gradient,
    )
    from shardtensor.functions.numpy.einsum import (
        einsum as einsum,
    )
    from shardtensor.functions.interchange.files import (
        load as load,
        save as save,
        savez as savez,
        savez_compressed as savez_compressed,
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
    from shardtensor.functions.standard.inspection import (
        __array_api_version__ as __array_api_version__,
        __array_namespace_info__ as __array_namespace_info__,
    )
    from shardtensor.functions.interchange.dlpack_import import from_dlpack as from_dlpack
    from shardtensor.functions.standard.joining import (
        block as block,
    )
    from shardtensor.functions.numpy.lines import (
        apply_along_axis as apply_along_axis,
        packbits as packbits,
        unpackbits as unpackbits,
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
    from shardtensor.functions.placement.names import checkpoint_name as checkpoint_name
    from shardtensor.functions.numpy.number_parts import (
        divmod as divmod,
        frexp as frexp,
        modf as modf,
    )
    from shardtensor.functions.statistics.order_statistics import (
        median as median,
        nanmedian as nanmedian,
        nanpercentile as nanpercentile,
        nanquantile as nanquantile,
        percentile as percentile,
        quantile as quantile,
    )
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
    from shardtensor.functions.standard.sorting import (
        argpartition as argpartition,
        argsort as argsort,
        lexsort as lexsort,
        partition as partition,
        sort as sort,
        topk as topk,
    )
    from shardtensor.functions.statistics.averages import (
        average as average,
        corrcoef as corrcoef,
        cov as cov,
        ptp as ptp,
    )
    from shardtensor.functions.standard.take_along import (
        take_along_axis as take_along_axis,
    )
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
    from shardtensor.interpreters.batching.vmap import vmap as vmap
    from shardtensor.interpreters.batching.jacobians import (
        hessian as hessian,
        jacfwd as jacfwd,
        jacrev as jacrev,
    )
    from shardtensor.interpreters.differentiation.grad import (
        grad as grad,
        jvp as jvp,
        linearize as linearize,
        stop_gradient as stop_gradient,
        value_and_grad as value_and_grad,
        vjp as vjp,
    )
    from shardtensor.interpreters.differentiation.custom import (
        custom_jvp as custom_jvp,
        custom_vjp as custom_vjp,
    )
    from shardtensor.interpreters.differentiation.remat import remat as remat
    from shardtensor.interpreters.jit.jit import (
        disable_jit as disable_jit,
        jit as jit,
    )
    from shardtensor.interpreters.control_flow import (
        associative_scan as associative_scan,
        cond as cond,
        fori_loop as fori_loop,
        map as map,
        scan as scan,
        switch as switch,
        while_loop as while_loop,
    )
    from shardtensor.interpreters.explain import (
        Explanation as Explanation,
        explain as explain,
    )
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
    from shardtensor.spmd.maps.pmap import pmap as pmap
    from shardtensor.spmd.maps.shard_map import shard_map as shard_map
    from shardtensor.spmd.maps.smap import smap as smap
    from shardtensor.spmd.maps.stencils import (
        convolve as convolve,
        correlate as correlate,
        map_overlap as map_overlap,
    )
    from shardtensor.tensor.memory import (
        MemoryInfo as MemoryInfo,
        memory_info as memory_info,
        reset_peak_memory as reset_peak_memory,
    )
    from shardtensor.sharding.visualize import visualize_sharding as visualize_sharding
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
else:  # Type checkers would take a `__getattr__` for a definition of every name.

    def __getattr__(name: str) -> _typing.Any:
        if name == "visualize_sharding":  # It is imported on first use, since most programs draw nothing.
            from shardtensor.sharding.visualize import visualize_sharding

            return _without_quotes(visualize_sharding)
        if name in _SMALL_FLOATS:
            return _small_float(name).type
        if name in _NUMPY_NAMES:
            return globals()[_NUMPY_NAMES[name]]
        if name in OPS.chapters:
            module = _importlib.import_module(OPS.chapters[name])
            _hide_from_pytest(module)
            value = globals()[name] = _without_quotes(getattr(module, name))
            return value
        if name in _EXTENSIONS or name == "testing":
            module = _importlib.import_module(f"shardtensor.{name}")
            _hide_from_pytest(module)
            return _without_quotes(module)
        raise _missing(__name__, name)


def __dir__() -> list[str]:
    return __all__
