"""Collectives for mapped functions, with JAX's names: communication of the programs along a named axis.

Each collective takes a pytree of the backend's arrays (or of Python scalars) and returns a pytree of the same form.
Every program along the axis must make the same call; the last program to arrive computes the results of all. Results
are read-only, like the shards that mapped functions receive, where the library can enforce it, because one result may
be shared by all devices of a host. Transfers between devices are counted by `st.transfers`, with the names of the
collective and of the axis.

Reductions combine along a fixed tree; integers keep their dtype, sums and products of bool arrays are integers, NaN is
never lost.

Along several axes, indices are counted in the order in which the axes are named, the first one being the major one; the
indices of `ppermute` and `pshuffle` are counted in mesh order instead, as in JAX.

Several programs share a thread, which switches between them in collectives. Thread-local state of a library therefore
leaks into other programs during a collective, unless the library is the backend's own (see
`shardtensor.backend.Backend.capture_modes`). Leave a ``with`` block that sets such state (``torch.no_grad()`` in
programs on NumPy's arrays) before calling a collective.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, cast

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.protocol import Backend
from shardtensor.communication.communicator import Communicator
from shardtensor.core import OPS, Op, implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, AxisError, ShapeError
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import normalize_axis
from shardtensor.spmd.axes import AxisName, AxisPosition, axis_index, axis_position, axis_size, check_shared
from shardtensor.spmd.manual_types import joins
from shardtensor.spmd.maps.launch import DERIVATIVES
from shardtensor.spmd.rendezvous import Arrays, rendezvous

if TYPE_CHECKING:
    from shardtensor.spmd.maps.map_types import Collective

__all__ = ["axis_index", "axis_size"]  # Declarations add the collectives.

Arguments = ParamSpec("Arguments")
Groups = Sequence[Sequence[int]] | None


def collective(function: Callable[Concatenate[Any, Arguments], Any]) -> Collective[Arguments]:
    """Declares a collective. The communicator of the program defines what it does: it is inferred as it is executed."""
    declared = operator(operands=("x",), trees=("x",), tags=("spmd",))(function)
    implements(declared, "recorded")(functools.partial(recorded_by_library, OPS[function.__name__]))
    implements(declared, "derivative")(DERIVATIVES)
    return cast("Collective[Arguments]", declared)


def recorded_by_library(op: Op, backend: Backend, *arguments: Any) -> Any:
    """Calls a collective of arrays of which the library records a gradient."""
    from shardtensor.spmd.recorded import record  # Few programs need it.

    return record(op, backend, *arguments)


# -- reductions ------------------------------------------------------------------------------------


@joins
@collective
def psum(x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None) -> Any:
    """Sums arrays over a named axis (an all-reduce); every device gets the sum.

    Args:
        x: a pytree of arrays, of the same shapes and dtypes on all devices. The result has the same shapes and dtypes,
            except that the sum of bool arrays is an integer count. The sum of Python scalars is a Python scalar, so
            that ``psum(1, "i")`` is the size of the axis.
        axis_name: the name of an axis of an enclosing map, or a tuple of names.
        axis_index_groups: lists of indices along the axis, each of which is summed separately; every index must occur
            once.

    Raises:
        ShardingError: no enclosing map has such an axis.
        CollectiveError: the programs along the axis do not all make this call, with these shapes and dtypes.

    >>> mesh = st.make_mesh((4,), ("i",))
    >>> f = st.shard_map(lambda x: st.psum(x, "i"), mesh=mesh, in_specs=st.P("i"), out_specs=st.P())
    >>> f(np.arange(8.0)).tolist()
    [12.0, 16.0]
    """


@joins
@collective
def pmean(x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None) -> Any:
    """Averages arrays over a named axis: `psum` divided by the number of devices; every device gets the mean.

    Args:
        x, axis_name, axis_index_groups: see `psum`. The mean of integer and bool arrays is float64.

    Raises:
        ShardingError: no enclosing map has such an axis.
        CollectiveError: the programs along the axis do not all make this call, with these shapes and dtypes.

    >>> st.pmap(lambda x: st.pmean(x, "i"), np.arange(4), axis_name="i").tolist()
    [1.5, 1.5, 1.5, 1.5]
    """


@joins
@collective
def pmax(x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None) -> Any:
    """Takes the elementwise maximum over a named axis; every device gets it. The maximum is NaN where any element is
    NaN.

    NumPy's `maximum` keeps NaN, too. JAX's `pmax` on a CPU drops it: there, pmax of 1, NaN and 3 is 3.

    Args:
        x, axis_name, axis_index_groups: see `psum`.

    Raises:
        ShardingError: no enclosing map has such an axis.
        CollectiveError: the programs along the axis do not all make this call, with these shapes and dtypes.

    >>> st.pmap(lambda x: st.pmax(x, "i"), np.arange(4), axis_name="i").tolist()
    [3, 3, 3, 3]
    """


@joins
@collective
def pmin(x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None) -> Any:
    """Takes the elementwise minimum over a named axis; every device gets it. The minimum is NaN where any element is
    NaN.

    NumPy's `minimum` keeps NaN, too. JAX's `pmin` on a CPU drops it: there, pmin of 1, NaN and 3 is 1.

    Args:
        x, axis_name, axis_index_groups: see `psum`.

    Raises:
        ShardingError: no enclosing map has such an axis.
        CollectiveError: the programs along the axis do not all make this call, with these shapes and dtypes.

    >>> st.pmap(lambda x: st.pmin(x, "i"), np.arange(4), axis_name="i").tolist()
    [0, 0, 0, 0]
    """


@joins
@collective
def pprod(x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None) -> Any:
    """Multiplies arrays elementwise over a named axis; every device gets the product.

    Args:
        x, axis_name, axis_index_groups: see `psum`.

    Raises:
        ShardingError: no enclosing map has such an axis.
        CollectiveError: the programs along the axis do not all make this call, with these shapes and dtypes.

    >>> st.pmap(lambda x: st.pprod(x, "i"), np.arange(1, 5), axis_name="i").tolist()
    [24, 24, 24, 24]
    """


def _reduction(caller: str, ufunc: str, x: Any, axis_name: AxisName, groups: Groups) -> Any:
    at = axis_position(caller, axis_name, groups)

    def body(communicator: Communicator, arrays: Arrays) -> Sequence[Any]:
        if not hasattr(arrays[0], "shape"):
            return [_of_scalars(caller, arrays, ufunc)] * len(arrays)
        if caller == "pmean":
            return communicator.all_reduce(communicator.cast(arrays, "biu", "float64"), ufunc, mean=True)
        counts = communicator.cast(arrays, "b", "int64") if ufunc in ("add", "multiply") else arrays
        return communicator.all_reduce(counts, ufunc)

    return rendezvous(caller, at, x, (), body, alike=True, scalars=True)


for _function, _ufunc in ((psum, "add"), (pmean, "add"), (pmax, "maximum"), (pmin, "minimum"), (pprod, "multiply")):
    implements(_function, "algorithm", "infer")(functools.partial(_reduction, _function.__name__, _ufunc))


def _of_scalars(caller: str, values: Sequence[Any], ufunc: str) -> Any:
    """Reduces Python scalars to one Python scalar."""
    if ufunc == "add":
        total = functools.reduce(lambda a, b: a + b, values, 0)
        return total / len(values) if caller == "pmean" else total
    if ufunc == "multiply":
        return math.prod(values)
    if any(type(value) is complex for value in values):
        return getattr(np, ufunc).reduce(np.asarray(values)).item()
    nan = next((value for value in values if value != value), None)
    return nan if nan is not None else (max if ufunc == "maximum" else min)(values)


@collective
def psum_scatter(
    x: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
) -> Any:
    """Sums arrays over a named axis and leaves each device its part of the sum along one dimension (a reduce-scatter):
    half the work of `psum`.

    Args:
        x: see `psum`.
        axis_name: the name of an axis of an enclosing map, or a tuple of names.
        scatter_dimension: the dimension that is split; negative counts from the end.
        axis_index_groups: see `psum`.
        tiled: True splits the dimension by the split rule, whatever its size (10 over 4 devices: 3, 3, 2, 2). False
            requires its size to be that of the axis, and removes the dimension.

    Raises:
        AxisError: an array has no such dimension.
        ShapeError: not tiled, and the size is not that of the axis.
        ShardingError: no enclosing map has such an axis.
        CollectiveError: the programs along the axis do not all make this call, with these shapes and dtypes.

    >>> st.pmap(lambda x: st.psum_scatter(x, "i", tiled=True), [np.arange(5)] * 2, axis_name="i")[1].tolist()
    [6, 8]
    """


@implements(psum_scatter, "algorithm", "infer")
def _psum_scatter(x: Any, axis_name: AxisName, scatter_dimension: int, axis_index_groups: Groups, tiled: bool) -> Any:
    caller = "psum_scatter"
    at = axis_position(caller, axis_name, axis_index_groups)

    def body(communicator: Communicator, arrays: Arrays) -> Sequence[Any]:
        arrays = communicator.cast(arrays, "b", "int64")
        dimension = _dimension(caller, "scatter_dimension", scatter_dimension, arrays[0].ndim)
        _fits(caller, arrays[0].shape, dimension, at, tiled)
        return communicator.reduce_scatter(arrays, "add", dimension, tiled)

    return rendezvous(caller, at, x, (("scatter_dimension", scatter_dimension), ("tiled", tiled)), body, alike=True)


# -- data movement ---------------------------------------------------------------------------------


@collective
def all_gather(
    x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None, axis: int = 0, tiled: bool = False
) -> Any:
    """Joins the arrays of all devices along a named axis; every device gets all of the result.

    Args:
        x: a pytree of arrays.
        axis_name: the name of an axis of an enclosing map, or a tuple of names.
        axis_index_groups: lists of indices along the axis, each of which is gathered separately; every index must occur
            once.
        axis: the dimension of the result along which the arrays are joined; negative counts from its end.
        tiled: True concatenates the arrays along that dimension, where their sizes may differ; False stacks them along
            a new dimension.

    Raises:
        AxisError: the result has no such dimension.
        ShapeError: the shapes differ along another dimension, or at all where not tiled.
        ShardingError: no enclosing map has such an axis.
        CollectiveError: the programs along the axis do not all make this call.

    >>> f = st.shard_map(lambda x: st.all_gather(x, "i", tiled=True), mesh=st.make_mesh((4,), ("i",)),
    ...                  in_specs=st.P("i"), out_specs=st.P())
    >>> f(np.arange(5)).tolist()
    [0, 1, 2, 3, 4]
    """


@implements(all_gather, "algorithm", "infer")
def _all_gather(x: Any, axis_name: AxisName, axis_index_groups: Groups, axis: int, tiled: bool) -> Any:
    caller = "all_gather"
    at = axis_position(caller, axis_name, axis_index_groups)

    def body(communicator: Communicator, arrays: Arrays) -> Sequence[Any]:
        along = _dimension(caller, "axis", axis, arrays[0].ndim + (not tiled))
        _agree(caller, communicator.devices, [a.shape for a in arrays], along if tiled else None)
        return communicator.all_gather(arrays, along, tiled)

    return rendezvous(caller, at, x, (("axis", axis), ("tiled", tiled)), body)


@collective
def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
) -> Any:
    """Moves a split from one dimension to another: splits every array along ``split_axis``, and gives device i the i-th
    parts of all arrays, joined along ``concat_axis``.

    Args:
        x: a pytree of arrays.
        axis_name: the name of an axis of an enclosing map, or a tuple of names.
        split_axis: the dimension that is split; negative counts from the end.
        concat_axis: the dimension of the result along which the parts are joined.
        axis_index_groups: lists of indices along the axis, each of which exchanges separately; every index must occur
            once.
        tiled: True splits by the split rule and concatenates, whatever the sizes. False requires the size along
            ``split_axis`` to be that of the axis, removes that dimension, and stacks the parts along a new one.

    Raises:
        AxisError: an array, or the result, has no such dimension.
        ShapeError: the sizes do not fit the axis, or the shapes of the arrays do not fit together.
        ShardingError: no enclosing map has such an axis.
        CollectiveError: the programs along the axis do not all make this call.

    >>> f = st.shard_map(lambda x: st.all_to_all(x, "i", 1, 0, tiled=True), mesh=st.make_mesh((2,), ("i",)),
    ...                  in_specs=st.P("i"), out_specs=st.P(None, "i"))
    >>> f(np.arange(6).reshape(2, 3)).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """


@implements(all_to_all, "algorithm", "infer")
def _all_to_all(
    x: Any, axis_name: AxisName, split_axis: int, concat_axis: int, axis_index_groups: Groups, tiled: bool
) -> Any:
    return _exchanged("all_to_all", x, axis_name, split_axis, concat_axis, axis_index_groups, tiled)


@collective
def pswapaxes(x: Any, axis_name: AxisName, axis: int, *, axis_index_groups: Groups = None) -> Any:
    """Swaps a dimension with a named axis: `all_to_all` with ``axis`` for both dimensions, not tiled.

    Args:
        x, axis_name, axis_index_groups: see `all_to_all`.
        axis: the dimension, whose size must be that of the axis.

    Raises:
        AxisError: an array has no such dimension.
        ShapeError: its size is not that of the axis.
        ShardingError: no enclosing map has such an axis.
        CollectiveError: the programs along the axis do not all make this call.

    >>> st.pmap(lambda x: st.pswapaxes(x, "i", 0), np.arange(4).reshape(2, 2), axis_name="i").tolist()
    [[0, 2], [1, 3]]
    """


@implements(pswapaxes, "algorithm", "infer")
def _pswapaxes(x: Any, axis_name: AxisName, axis: int, axis_index_groups: Groups) -> Any:
    return _exchanged("pswapaxes", x, axis_name, axis, axis, axis_index_groups, False)


def _exchanged(
    caller: str, x: Any, axis_name: AxisName, split_axis: int, concat_axis: int, groups: Groups, tiled: bool
) -> Any:
    at = axis_position(caller, axis_name, groups)

    def body(communicator: Communicator, arrays: Arrays) -> Sequence[Any]:
        ndim = arrays[0].ndim
        cut = _dimension(caller, "split_axis", split_axis, ndim)
        join = _dimension(caller, "concat_axis", concat_axis, ndim)
        for array in arrays:
            _fits(caller, array.shape, cut, at, tiled)
        _agree(caller, communicator.devices, [a.shape for a in arrays], join if tiled else None)
        return communicator.all_to_all(arrays, cut, join, tiled)

    details = (("split_axis", split_axis), ("concat_axis", concat_axis), ("tiled", tiled))
    return rendezvous(caller, at, x, details, body)


@collective
def ppermute(x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> Any:
    """Sends arrays between devices along a named axis, by pairs of source and destination.

    Args:
        x: a pytree of arrays; shapes may differ from device to device.
        axis_name: the name of an axis of an enclosing map, or a tuple of names.
        perm: pairs (source index, destination index). A device that is not a destination gets zeros, in the shape of
            its own array. Indices along several axes are counted in mesh order, whatever the order of the names, as in
            JAX (`axis_index` and the other collectives count in the order of the names).

    Raises:
        ArgumentError: an index is out of range, or occurs twice as source or as destination.
        ShardingError: no enclosing map has such an axis.
        CollectiveError: the programs along the axis do not all make this call.

    >>> shift = [(0, 1), (1, 2), (2, 3)]
    >>> st.pmap(lambda x: st.ppermute(x, "i", shift), np.arange(1, 5), axis_name="i").tolist()
    [0, 1, 2, 3]
    """


@implements(ppermute, "algorithm", "infer")
def _ppermute(x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> Any:
    caller = "ppermute"
    at = axis_position(caller, axis_name, in_mesh_order=True)
    check_shared(perm, caller, "perm")
    try:
        pairs = tuple(map(tuple, perm))
        if {*map(type, itertools.chain.from_iterable(pairs))} - {int} or {*map(len, pairs)} - {2}:
            pairs = tuple([(_index(a), _index(b)) for a, b in pairs])
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"{caller}: perm is {perm!r:.80}; wanted pairs (source, destination) of integers"
        ) from None
    return _permuted(caller, at, x, *_permutation(pairs, at.size, at.description))


@functools.lru_cache(64)
def _permutation(
    pairs: tuple[tuple[int, int], ...], size: int, description: str
) -> tuple[tuple[tuple[int, int], ...], list[int | None]]:
    """Returns the checked pairs of `ppermute`, and the source index of each destination (None: no source); cached, so
    that all programs share the same objects.
    """
    for k, end in enumerate(("source", "destination")):
        seen: set[int] = set()
        for pair in pairs:
            if not 0 <= pair[k] < size:
                raise ArgumentError(
                    f"ppermute: perm has the {end} {pair[k]}; axis {description} goes from 0 to {size - 1}"
                )
            if pair[k] in seen:
                raise ArgumentError(f"ppermute: perm has the {end} {pair[k]} twice")
            seen.add(pair[k])
    source_of = {b: a for a, b in pairs}
    return pairs, [source_of.get(k) for k in range(size)]


@collective
def pshuffle(x: Any, axis_name: AxisName, perm: Sequence[int]) -> Any:
    """Permutes arrays along a named axis: device i gets the array of device ``perm[i]``.

    Args:
        x: a pytree of arrays; shapes may differ from device to device.
        axis_name: the name of an axis of an enclosing map, or a tuple of names.
        perm: a permutation of the indices along the axis; along several axes they are counted as in `ppermute`.

    Raises:
        ArgumentError: ``perm`` is not a permutation.
        ShardingError: no enclosing map has such an axis.
        CollectiveError: the programs along the axis do not all make this call.

    >>> st.pmap(lambda x: st.pshuffle(x, "i", [1, 2, 0]), np.array([10, 11, 12]), axis_name="i").tolist()
    [11, 12, 10]
    """


@implements(pshuffle, "algorithm", "infer")
def _pshuffle(x: Any, axis_name: AxisName, perm: Sequence[int]) -> Any:
    caller = "pshuffle"
    at = axis_position(caller, axis_name, in_mesh_order=True)
    check_shared(perm, caller, "perm")
    try:
        sources = [_index(i) for i in perm]
    except TypeError:
        raise ArgumentTypeError(f"{caller}: perm is {perm!r:.80}; wanted a sequence of integers") from None
    if sorted(sources) != list(range(at.size)):
        raise ArgumentError(f"{caller}: perm is {sources!r:.80}; wanted each index from 0 to {at.size - 1} once")
    return _permuted(caller, at, x, tuple(sources), sources)


def _permuted(caller: str, at: AxisPosition, x: Any, perm: Any, sources: Sequence[int | None]) -> Any:
    return rendezvous(
        caller, at, x, (("perm", perm),), lambda communicator, arrays: communicator.permute(arrays, sources)
    )


@joins
@collective
def pbroadcast(x: Any, axis_name: AxisName, source: int) -> Any:
    """Broadcasts the arrays of one device along a named axis; every device gets them.

    Args:
        x: a pytree of arrays.
        axis_name: the name of an axis of an enclosing map, or a tuple of names.
        source: the index of the source device along the axis.

    Raises:
        ArgumentError: ``source`` is not an index of the axis.
        ShardingError: no enclosing map has such an axis.
        CollectiveError: the programs along the axis do not all make this call.

    >>> st.pmap(lambda x: st.pbroadcast(x, "i", 2), np.arange(4), axis_name="i").tolist()
    [2, 2, 2, 2]
    """


@implements(pbroadcast, "algorithm", "infer")
def _pbroadcast(x: Any, axis_name: AxisName, source: int) -> Any:
    caller = "pbroadcast"
    at = axis_position(caller, axis_name)
    try:
        index = _index(source)
    except TypeError:
        raise ArgumentTypeError(f"{caller}: source is {source!r:.80}; wanted an integer") from None
    if not 0 <= index < at.size:
        raise ArgumentError(f"{caller}: source is {index}; axis {at.description} goes from 0 to {at.size - 1}")
    details = (("source", index),)
    return rendezvous(caller, at, x, details, lambda communicator, arrays: communicator.broadcast(arrays, index))


# -- checks ----------------------------------------------------------------------------------------


def _index(x: Any) -> int:
    if isinstance(x, bool) or not hasattr(x, "__index__"):
        raise TypeError
    return int(x.__index__())


def _dimension(caller: str, what: str, axis: int, ndim: int) -> int:
    try:
        _index(axis)
    except TypeError:
        raise ArgumentTypeError(f"{caller}: {what} is {axis!r:.80}; wanted an integer") from None
    try:
        return normalize_axis(axis, ndim)
    except AxisError:
        raise AxisError(f"{caller}: {what} is {axis}, and the array has {counted(ndim, 'dimension')}") from None


def _fits(caller: str, shape: Shape, dimension: int, at: AxisPosition, tiled: bool) -> None:
    """Checks that without ``tiled`` the dimension has one element for each device; raises ShapeError otherwise."""
    if not tiled and shape[dimension] != at.size:
        raise ShapeError(
            f"{caller}: x of shape {shape} has {counted(shape[dimension], 'element')} along dimension {dimension}, and "
            f"axis {at.description} has {counted(at.size, 'device')}; wanted as many, or tiled=True"
        )


def _agree(caller: str, devices: Sequence[Device], shapes: Sequence[Shape], free: int | None) -> None:
    """Checks that the shapes are equal except along dimension ``free``; raises ShapeError otherwise."""
    first = tuple(shapes[0])
    for device, shape in zip(devices, shapes, strict=True):
        if any(a != b and d != free for d, (a, b) in enumerate(zip(shape, first, strict=True))):
            may = "equal shapes, or tiled=True" if free is None else f"shapes that differ along dimension {free} only"
            raise ShapeError(f"{caller}: {devices[0]} has shape {first} and {device} {tuple(shape)}; wanted {may}")
