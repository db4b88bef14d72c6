"""`shard_map`: runs a function on each device's block of sharded arrays."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Unpack, overload

from shardtensor.core import hinted
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError, ShardingError, type_text
from shardtensor.functions.placement.partial_sum_operators import partial_sums
from shardtensor.functions.placement.shard_lists import split_over
from shardtensor.functions.placement.transfers import ensure_sharding
from shardtensor.hints import similar
from shardtensor.host.units import counted
from shardtensor.sharding.layout import NamedSharding
from shardtensor.sharding.mesh import Mesh, default_mesh, groups_along, mesh_in_use, submesh, submeshes_along
from shardtensor.sharding.spec import Chain, P, PartitionSpec
from shardtensor.spmd.manual_types import WithSpecs
from shardtensor.spmd.maps.launch import MappedArgument, Unmapped, argument_array, map_shards
from shardtensor.spmd.maps.outputs import joined, same_forms
from shardtensor.spmd.scheduling.mapped_program import around
from shardtensor.tensor.array_type import typeof
from shardtensor.tensor.operands import is_data
from shardtensor.tensor.pytree import leaves, paths, replaced, spread
from shardtensor.tensor.tensor import SCALARS, ShardedTensor

_OWN = "the specs of the arguments"
"""The default of ``in_specs``."""
if TYPE_CHECKING:
    from shardtensor.spmd.maps.map_types import Anything, Array, ShardMapDecorator, ShardMapOptions

Arguments = ParamSpec("Arguments")


@overload
def shard_map(
    f: Callable[Arguments, ShardedTensor], /, **options: Unpack[ShardMapOptions]
) -> Callable[Arguments, ShardedTensor]: ...


@overload
def shard_map(f: Callable[..., Array], /, **options: Unpack[ShardMapOptions]) -> Callable[..., ShardedTensor]: ...


@overload
def shard_map(f: None = None, /, **options: Unpack[ShardMapOptions]) -> ShardMapDecorator: ...


@overload
def shard_map(f: Callable[..., Anything], /, **options: Unpack[ShardMapOptions]) -> Callable[..., Any]: ...


@hinted
def shard_map(
    f: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh | None = None,
    out_specs: Any,
    in_specs: Any = _OWN,
    axis_names: Sequence[str] | set[str] | frozenset[str] | None = None,
    check_vma: bool = True,
    strict_specs: bool = False,
) -> Any:
    """Returns a function that calls ``f`` for every device of a mesh, concurrently, with the device's blocks of the
    arguments.

    It corresponds to `jax.shard_map`: blocks keep the rank of the arrays, and collectives (`st.psum`, …) run along the
    axes of the mesh. Sizes need not be divisible: blocks follow the split rule, so their sizes may differ by one, and
    they may be empty. ``f`` may be any Python function. It is called, not traced, and must not hold a lock while it
    calls a collective or a map (`pmap` says how calls share threads). Without ``f``, a decorator is returned.

    Args:
        f: the function.
        mesh: the devices; by default, the mesh in use (see `set_mesh`).
        out_specs: the dimensions along which the blocks of the results are concatenated: a `P`, or a pytree of them, in
            the form of the results or of a prefix of it. A `P` declares that a result is equal along the mapped axes
            that it does not name, which is checked.
        in_specs: the layout of each argument, in the same forms; None for an argument that is passed unchanged.
            Arguments in another layout are resharded. By default, each tensor keeps its own spec, other arrays and
            scalars are replicated, and any other object is passed unchanged.
        axis_names: the mapped mesh axes; by default, or if there are none, all of them. ``f`` is called once for each
            position along these, with tensors over the devices along the other axes, whose split along those axes is
            kept (partial sums along them are added); a `shard_map` over the other axes inside of ``f`` runs on single
            devices.
        check_vma: False skips the check that results are equal where ``out_specs`` declares it; if they differ, the
            elements of the tensor are undefined. (The check compares on the devices, and waits for them.)

    Returns:
        A function of as many arguments as ``in_specs`` describes, or of any number without it. Its results are tensors
        on the mesh in the layout of ``out_specs``; nothing is transferred where the sizes of the blocks follow the
        split rule, otherwise rows are rebalanced.

    Raises:
        ShardingError: a spec names an axis that the mesh does not have, or that is not mapped; an axis is mapped by an
            enclosing map.
        ArgumentError: specs do not match the form of the arguments or results.
        ArgumentTypeError: ``f``, ``mesh``, a spec, or an argument is of the wrong type.
        ShapeError: blocks do not fit together; a result that is declared to be equal differs.
        CollectiveError: a deadlock: the message names each device and the call in which it waits.
        RecursionError: maps that call each other without end: the frames of all of them count.
        Exception: an error that ``f`` raises, with a note of the shard and the device.

    >>> mesh = st.make_mesh((4,), ("x",))
    >>> @st.shard_map(mesh=mesh, in_specs=(st.P("x"), st.P()), out_specs=(st.P("x"), st.P()))
    ... def scaled(block, by):
    ...     return block * by, st.psum(block.sum(), "x")
    >>> x, total = scaled(np.arange(6), 10)
    >>> x.tolist(), x.sharding.spec, total.item()
    ([0, 10, 20, 30, 40, 50], P('x'), 15)
    """
    if f is None:
        return functools.partial(
            shard_map,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axis_names,
            check_vma=check_vma,
            strict_specs=strict_specs,
        )
    if not callable(f):
        raise ArgumentTypeError(f"shard_map: f is {type_text(f)}; wanted a function")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentTypeError(f"shard_map: mesh is {type_text(mesh)}; wanted a Mesh (see st.make_mesh)")
    if in_specs is not _OWN:
        _check_specs(in_specs, "in_specs", "an argument that is passed unchanged")
    _check_specs(out_specs, "out_specs", "a result that is None")
    names = _mapped_names(axis_names)

    @functools.lru_cache(_KEPT)
    def calls_on(here: Mesh, over: Chain) -> _Calls:
        for what, specs in (("in_specs", None if in_specs is _OWN else in_specs), ("out_specs", out_specs)):
            for spec in leaves(specs):
                _check_axes(spec, here, over, what, mesh is not None)
        return _calls_of(here, over)

    @functools.wraps(f)
    def mapped(*args: Any) -> Any:
        calls = calls_on(*_mesh_here(mesh or default_mesh(), names, mesh is not None))
        return _run(f, args, calls, in_specs, out_specs, check_vma, strict_specs)

    return mapped


_KEPT = 64
"""The number of meshes for which a mapped function keeps its calls."""


class _Calls(NamedTuple):
    """The calls of a mapped function on a mesh.

    Attributes:
        mesh: all devices.
        over: the mapped axes.
        submeshes: the devices of each call.
        names, sizes: the mapped axes in the order of the mesh, and their sizes.
    """

    mesh: Mesh
    over: Chain
    submeshes: Sequence[Mesh]
    names: Sequence[str]
    sizes: Sequence[int]


def _calls_of(mesh: Mesh, over: Chain) -> _Calls:
    rest = tuple([name for name in mesh.axis_names if name not in over])
    names = [name for name in mesh.axis_names if name in over]
    submeshes = [submesh for _, submesh in submeshes_along(mesh, rest)]
    return _Calls(mesh, over, submeshes, names, [mesh.shape[name] for name in names])


def _mapped_names(axis_names: Any) -> Chain | None:
    if axis_names is None or isinstance(axis_names, str):
        return None if axis_names is None else (axis_names,)
    if not isinstance(axis_names, (tuple, list, set, frozenset)):
        kind = type_text(axis_names)
        raise ArgumentTypeError(f"shard_map: axis_names is {kind}; wanted a set of names of mesh axes")
    return tuple(axis_names) or None  # As in JAX, no names are all of them.


def _run(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    calls: _Calls,
    in_specs: Any,
    out_specs: Any,
    check: bool,
    strict: bool,
) -> Any:
    mesh, over, submeshes, names, sizes = calls
    own = in_specs is _OWN
    prefix = [None] * len(args) if own else _prefix(in_specs, args)
    columns, rows = [], []
    for i, (argument, spec) in enumerate(zip(args, prefix, strict=True)):
        what = f"argument {i}"
        specs = (
            _own_specs(argument, mesh, over, what) if own else spread(spec, argument, f"shard_map: in_specs[{i}]", what)
        )
        columns.append(_column(argument, specs, mesh, over, what, strict))
        rows.append(specs)
    function = WithSpecs(f)
    function.specs = rows
    results = map_shards(columns, function, submeshes, submeshes, "shard_map", names, sizes)

    same_forms(results, "shard_map")

    def outs(tree: Any) -> list[PartitionSpec | None]:
        return spread(out_specs, tree, "shard_map: out_specs", "the result")

    return joined(results, outs, mesh, over, "shard_map", check=check)


def _own_specs(argument: Any, mesh: Mesh, over: Chain, what: str) -> list[PartitionSpec | None]:
    """Returns the spec of each leaf of an argument along the mapped axes; None for a leaf that is passed unchanged."""
    specs: list[PartitionSpec | None] = []
    for leaf, path in zip(leaves(argument), paths(argument, what), strict=True):
        if not isinstance(leaf, ShardedTensor):
            specs.append(P() if type(leaf) in SCALARS or is_data(leaf) else None)
            continue
        chains = leaf.sharding.spec.chains
        if missing := [axis for chain in chains for axis in chain if axis not in mesh.shape]:
            raise ShardingError(
                f"shard_map: {path} is split over axis {missing[0]!r} of {leaf.sharding.mesh!r}, and the map is over "
                f"{mesh!r}; give in_specs, or mesh=, or reshard it first"
            )
        mapped = [tuple([axis for axis in chain if axis in over]) for chain in chains]
        spec = leaf.sharding.spec
        specs.append(P(*mapped, unreduced=spec.unreduced.intersection(over), reduced=spec.reduced.intersection(over)))
    return specs


def _column(argument: Any, specs: Sequence[Any], mesh: Mesh, over: Chain, what: str, strict: bool) -> MappedArgument:
    """Returns an argument for all calls: its blocks, or the argument itself where no leaf is an array to be split."""
    if type(argument) is ShardedTensor and specs[0] is not None:  # The common case takes no traversal.
        return MappedArgument(_blocks(argument, specs[0], mesh, over, what, strict), True)
    rows: list[list[ShardedTensor] | None] = []
    values = leaves(argument)
    for leaf, spec, path in zip(values, specs, paths(argument, what), strict=True):
        # Python scalars stay weakly typed.
        whole = spec is None or (type(leaf) in SCALARS and not spec.chains and not spec.unreduced)
        rows.append(None if whole else _blocks(leaf, spec, mesh, over, path, strict))
    count = max([len(row) for row in rows if row is not None], default=0)
    same = [() if spec is None else (leaf,) for leaf, spec in zip(values, specs, strict=True)]
    if not count:
        return MappedArgument(Unmapped(argument, tuple(itertools.chain.from_iterable(same))), False)
    held = [
        [Unmapped(leaf, own)] * count if row is None else row for leaf, row, own in zip(values, rows, same, strict=True)
    ]
    return MappedArgument([replaced(argument, parts) for parts in zip(*held, strict=True)], True)


def _blocks(leaf: Any, spec: PartitionSpec, mesh: Mesh, over: Chain, path: str, strict: bool) -> list[ShardedTensor]:
    array = argument_array(leaf, f"shard_map: {path}", "None in in_specs to pass it unchanged")
    if len(spec) > array.ndim:
        raise ShapeError(
            f"shard_map: {path} has shape {array.shape}, and {spec} has entries for {counted(len(spec), 'dimension')}"
        )
    if isinstance(array, ShardedTensor) and len(over) < len(mesh.axis_names) and array.sharding.mesh == mesh:
        # The split along unmapped axes is kept.
        own = array.sharding.spec.chains_of(array.ndim)
        kept = [[axis for axis in chain if axis not in over] for chain in own]
        chains = zip(spec.chains_of(array.ndim), kept, strict=True)
        spec = spec.with_chains([(*chain, *rest) for chain, rest in chains])
    sharding = _sharding(mesh, spec)
    if strict and isinstance(array, ShardedTensor) and not array.sharding.is_equivalent_to(sharding, array.ndim):
        raise ShardingError(
            f"shard_map: {path} is in the layout {typeof(array)}, and in_specs has {spec}, with strict_specs=True; "
            "st.reshard transfers it, and without in_specs each argument keeps its layout"
        )
    placed = ensure_sharding(array, sharding, "shard_map")
    return split_over(partial_sums(placed), over, drop=0) if spec.unreduced else split_over(placed, over)


_sharding = functools.lru_cache(1024)(NamedSharding)


def _prefix(in_specs: Any, args: tuple[Any, ...]) -> Sequence[Any]:
    """Returns the specs of each argument."""
    if in_specs is None or isinstance(in_specs, PartitionSpec):
        return [in_specs] * len(args)
    if not isinstance(in_specs, (tuple, list)):
        kind = type_text(in_specs)
        raise ArgumentTypeError(f"shard_map: in_specs is {kind}; wanted a tuple with an entry for each argument")
    if len(in_specs) != len(args):
        counts = f"{counted(len(in_specs), 'entry', 'entries')} for {counted(len(args), 'argument')}"
        raise ArgumentError(f"shard_map: in_specs has {counts}; wanted one for each, or one for all")
    return in_specs


def _mesh_here(mesh: Mesh, axis_names: Chain | None, is_given: bool) -> tuple[Mesh, Chain]:
    """Returns the part of the mesh that belongs to the calling program, and the axes to map."""
    program = around()
    if program is not None:
        bound = [name for name in mesh.axis_names if name in program.run.axes]
        own = program.devices
        if bound and set(own) <= set(mesh.flat):
            mesh = _part(mesh, tuple(bound), own)
    over = mesh.axis_names if axis_names is None else axis_names
    for name in over:
        if name not in mesh.shape:
            taken = program is not None and name in program.run.axes
            why = "it is mapped by a map around this one" if taken else _axes_of(mesh, is_given)
            raise ShardingError(f"shard_map: axis_names has {name!r}; {why}")
    return mesh, over


def _part(mesh: Mesh, bound: Chain, own: Sequence[Any]) -> Mesh:
    """Returns the devices of a mesh that a program has, as a mesh of the axes that are not mapped yet."""
    rest = tuple([name for name in mesh.axis_names if name not in bound])
    if not rest:
        raise ShardingError(f"shard_map: every axis of {mesh!r} is mapped by a map around this one")
    group = next((g for g in groups_along(mesh, rest) if {mesh.flat[k] for k in g} == set(own)), None)
    if group is None:
        raise ShardingError(
            f"shard_map: the map around this one has not mapped {bound} of {mesh!r}, but axes of another mesh"
        )
    return submesh(mesh, group, rest)


def _check_specs(specs: Any, what: str, nothing: str) -> None:
    for spec in leaves(specs):
        if spec is not None and not isinstance(spec, PartitionSpec):
            raise ArgumentTypeError(
                f"shard_map: {what} has {type_text(spec)} in it, {spec!r:.60}; wanted P, such as P('x', None), "
                f"or None for {nothing}"
            )


def _axes_of(mesh: Mesh, is_given: bool) -> str:
    """Returns the part of an error that names the axes of the mesh, and says which mesh that is."""
    if is_given:
        return f"the mesh has {mesh.axis_names}"
    if mesh_in_use() is not None:
        return f"no mesh is given, and the mesh in use has {mesh.axis_names}"
    return f"no mesh is given or set (mesh=, st.set_mesh), and the default one has {mesh.axis_names}"


def _check_axes(spec: PartitionSpec | None, mesh: Mesh, over: Chain, what: str, is_given: bool) -> None:
    for axis in () if spec is None else spec.axes:
        if axis not in over:
            why = f"the map is over {over}" if axis in mesh.shape else _axes_of(mesh, is_given)
            raise ShardingError(f"shard_map: {what} has {spec}, which names axis {axis!r}; {why}{similar(axis, over)}")
