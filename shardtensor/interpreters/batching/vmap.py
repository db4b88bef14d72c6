"""`vmap`, with the signature of JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import shardtensor.interpreters.batching.batched_collectives
import shardtensor.interpreters.batching.batched_loops  # noqa: F401 - both extend the batcher
from shardtensor.core import call, hinted, interpreting
from shardtensor.errors import ArgumentError, ArgumentTypeError, AxisError, ShapeError, type_text
from shardtensor.functions.random.random_keys import Key, KeyBatch
from shardtensor.host.units import counted
from shardtensor.interpreters.batching.batcher import Batcher, for_all
from shardtensor.interpreters.program_arrays import tensor_here
from shardtensor.sharding.rules import normalize_axis
from shardtensor.tensor.operands import is_data
from shardtensor.tensor.pytree import leaves, paths, replaced, spread
from shardtensor.tensor.tensor import ShardedTensor


@hinted
def vmap(
    fun: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: str | None = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
) -> Callable[..., Any]:
    """Returns a function of a batch, which calls ``fun``, a function of one example, once for all examples.

    Every operator runs once, with one more dimension. The layout of the batch stays on it: if the mapped dimension is
    split over devices, so are the results, and nothing is gathered. ``fun`` may write its arguments and tensors that it
    makes in place. It must not read the elements of an example: conditions are `st.where` or `st.cond`.

    Args:
        fun: a function of one example. Its arguments and results are pytrees of tensors, host arrays and numbers.
        in_axes: the dimension of the examples in each argument: an integer; None for an argument that is the same for
            all examples; or a sequence with an entry for each argument, which is a prefix tree of these. Keyword
            arguments are mapped along dimension 0.
        out_axes: the dimension of the examples in the results: an integer, None for a result that is the same for all
            examples, or a prefix tree of these.
        axis_name: a name of the dimension, for collectives.
        axis_size: the number of examples, needed if no argument is mapped.
        spmd_axis_name: accepted as in JAX, and not needed: the layout of the batch follows from that of the arguments.

    Returns:
        A function of the same arguments, each with one more dimension where ``in_axes`` is not None.

    Raises:
        ArgumentError: ``in_axes`` or ``out_axes`` does not fit; no argument is mapped.
        ShapeError: mapped dimensions differ in size.
        ConcretizationError: ``fun`` reads the elements of an example.

    >>> x = st.reshape(st.arange(6.0), (3, 2))
    >>> st.vmap(lambda row: (row * row).sum())(x).tolist()
    [1.0, 13.0, 41.0]
    >>> st.vmap(lambda row, scale: row * scale, in_axes=(0, None), out_axes=1)(x, 2).shape
    (2, 3)
    """
    if not callable(fun):
        raise ArgumentTypeError(f"vmap: fun is {type_text(fun)}; wanted a function")

    @functools.wraps(fun)
    def computed(*args: Any, **kwargs: Any) -> Any:
        prefix = tuple(in_axes) if isinstance(in_axes, list) else in_axes
        each = prefix if isinstance(prefix, tuple) and len(prefix) == len(args) else [prefix] * len(args)
        args = tuple(map(_with_keys, args, each))
        axes = _axes_of(prefix, args, kwargs)
        arg_leaves = leaves((args, kwargs))
        names = [*paths(args, "arguments"), *[p for k, v in kwargs.items() for p in paths(v, k)]]
        moved = [_leading(x, axis, name) for x, axis, name in zip(arg_leaves, axes, names, strict=True)]
        batcher = Batcher(_size(moved, axes, names, axis_size), axis_name)
        boxed = [x if axis is None else _boxed(batcher, x) for x, axis in zip(moved, axes, strict=True)]
        called, named = replaced((args, kwargs), boxed)
        try:
            with interpreting(batcher):
                result = fun(*called, **named)
            results = leaves(result)
            covering = spread(out_axes, result, "vmap: out_axes", "the result")
            where = zip(results, covering, paths(result, "the result"), strict=True)
            mapped = [x for x, axis in zip(moved, axes, strict=True) if axis is not None and type(x) is ShardedTensor]
            known = {id(x): x for x in mapped}
            return replaced(result, [batcher.shown(_result(batcher, y, axis, name, known)) for y, axis, name in where])
        finally:
            batcher.ended = True

    return computed


class _Keys:
    """The keys of all examples, in place of the list of them: a leaf.

    Attributes:
        keys: the keys.
        shape: their number.
    """

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = keys
        self.shape = (len(keys),)


def _with_keys(tree: Any, prefix: Any) -> Any:
    """Returns a tree in which lists of keys that are mapped, such as `split` returns, are leaves."""
    if not isinstance(tree, (list, tuple, dict)) or prefix is None:
        return tree
    if isinstance(tree, dict):
        covering = prefix if isinstance(prefix, dict) else dict.fromkeys(tree, prefix)
        return {name: _with_keys(x, covering.get(name)) for name, x in tree.items()}
    if not isinstance(prefix, (list, tuple)) and (keys := leaves(tree)) and all(isinstance(x, Key) for x in keys):
        return _columns(tree)
    each = prefix if isinstance(prefix, (list, tuple)) and len(prefix) == len(tree) else [prefix] * len(tree)
    items = [_with_keys(x, one) for x, one in zip(tree, each, strict=True)]
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


def _columns(tree: Any) -> Any:
    """Returns the keys of all examples, given a list of keys, or of lists of them, for each."""
    if isinstance(tree[0], Key):
        return _Keys(tree)
    return [_columns(column) for column in zip(*tree, strict=True)]


def _boxed(batcher: Batcher, x: Any) -> Any:
    return KeyBatch(x.keys, batcher) if type(x) is _Keys else batcher.value(x)


def _axes_of(prefix: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | None]:
    """Returns the dimension of the examples in each leaf of the arguments; None for those that are not mapped."""
    if isinstance(prefix, tuple) and len(prefix) != len(args):
        raise ArgumentError(
            f"vmap: in_axes has {counted(len(prefix), 'entry', 'entries')}, and the function is called with "
            f"{counted(len(args), 'positional argument')}; wanted an entry for each, or one for all"
        )
    axes = spread(prefix, args, "vmap: in_axes", "the arguments") if args else []
    axes += [0] * len(leaves(kwargs))
    axes = [None if x is None else axis for x, axis in zip(leaves((args, kwargs)), axes, strict=True)]
    for axis in axes:
        if axis is not None and (not isinstance(axis, (int, np.integer)) or isinstance(axis, bool)):
            raise ArgumentTypeError(f"vmap: in_axes has {type_text(axis)}; wanted integers and None")
    return axes


def _leading(x: Any, axis: int | None, name: str) -> Any:
    """Returns an argument with the dimension of the examples as the first one."""
    if axis is None or type(x) is _Keys:
        return x
    if isinstance(x, Key):
        raise ArgumentTypeError(
            f"vmap: {name} is a Key; wanted a list with one for each example, st.random.split(key, n), or None for it "
            "in in_axes"
        )
    x = tensor_here(x)
    if type(x) is not ShardedTensor:
        if not is_data(x) and not isinstance(x, (np.ndarray, np.generic, bool, int, float, complex)):
            raise ArgumentTypeError(f"vmap: {name} is {type_text(x)}; wanted an array, or None for it in in_axes")
        x = tensor_here(call("asarray", x))
    if not x.ndim:
        raise ShapeError(f"vmap: {name} has no dimension to map; give None for it in in_axes")
    at = _axis(axis, x.ndim, name)
    return call("moveaxis", x, at, 0) if at else x


def _axis(axis: int, ndim: int, name: str) -> int:
    """Returns an axis counted from the start.

    Raises:
        AxisError: there is no such axis.
    """
    try:
        return normalize_axis(axis, ndim)
    except AxisError as error:
        raise AxisError(f"vmap: {name}: {error}") from None


def _size(arrays: list[Any], axes: list[int | None], names: list[str], axis_size: int | None) -> int:
    """Returns the number of examples."""
    if axis_size is not None and (type(axis_size) is bool or not isinstance(axis_size, (int, np.integer))):
        raise ArgumentTypeError(f"vmap: axis_size is {type_text(axis_size)}; wanted an integer")
    if axis_size is not None and axis_size < 0:
        raise ArgumentError(f"vmap: axis_size is {axis_size}; wanted the number of examples")
    size, where = axis_size, "axis_size"
    for x, axis, name in zip(arrays, axes, names, strict=True):
        if axis is None:
            continue
        if size is None:
            size, where = x.shape[0], name
        elif x.shape[0] != size:
            raise ShapeError(
                f"vmap: {name} has {x.shape[0]} examples along axis {axis}, and {where} has {size}; wanted equal sizes"
            )
    if size is None:
        raise ArgumentError("vmap: no argument is mapped; give axis_size=, or an axis of one argument in in_axes")
    return size


def _result(batcher: Batcher, y: Any, axis: Any, name: str, known: dict[int, ShardedTensor]) -> Any:
    """Returns the results of all examples, with their dimension at ``axis``, where the examples of the arguments are.

    Args:
        batcher: the batcher.
        y: the result.
        axis: where the dimension of the examples has to be.
        name: the name of the result.
        known: by identity, the tensors that other handles can write: the arguments, and results before this one.
    """
    if type(y) is KeyBatch and y.batcher is batcher:
        return list(y.keys)
    is_batched = batcher.batched(y) is not None
    if axis is None:
        if is_batched:
            raise ArgumentError(
                f"vmap: {name} differs from one example to another, and out_axes is None for it; wanted an axis"
            )
        return y
    if y is None:
        return None
    if is_batched:
        every = batcher.examples(y)
        if id(every) in known or hasattr(every._storage, "view_spec"):
            every = call("copy", every)
    else:
        one = y if type(y) is ShardedTensor else call("asarray", y)
        like = next(iter(known.values()), None)
        if like is None:
            every = call("broadcast_to", one, (batcher.size, *one.shape))
        else:
            every = call("copy", for_all(one, batcher.size, like._aval, "vmap"))
    known[id(every)] = every
    at = _axis(axis, every.ndim, name)
    return call("moveaxis", every, 0, at) if at else every
