"""The arguments of a traced function: which of them are traced, what they share, and what calls are compared by."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.registry import array_backend
from shardtensor.backend.small_floats import is_element
from shardtensor.errors import ArgumentError, ArgumentTypeError, type_text
from shardtensor.functions.random.random_keys import Key, bits_of
from shardtensor.host.units import counted
from shardtensor.interpreters.programs.program import exact_key
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.operands import as_operand, host_aval
from shardtensor.tensor.pytree import form_of, hint_to_register, leaves, paths
from shardtensor.tensor.storage import Donated, Storage
from shardtensor.tensor.tensor import SCALARS, ShardedTensor


@dataclasses.dataclass(slots=True)
class Leaf:
    """A leaf of the arguments.

    Attributes:
        unit: the number of the input that it is, or that it is a view of; None for a static leaf.
        view_spec: for a view of an input, its view spec.
    """

    unit: int | None
    view_spec: ViewSpec | None = None


@dataclasses.dataclass(slots=True)
class Call:
    """The arguments of one call, in a form that calls are compared by.

    Attributes:
        key: what the program of the call depends on.
        units: the inputs of the program: tensors, host arrays and Python scalars. Leaves that are, or are views of, one
            tensor that another leaf or the function has as well are one input, the base.
        leaves: for each leaf, which input it is.
    """

    key: tuple[Any, ...]
    units: list[Any]
    leaves: Sequence[Leaf]


class Signature:
    """The arguments of a function by number and name.

    Attributes:
        static_names: the names of static arguments.
        static_numbers: the positions of static arguments.
    """

    def __init__(self, fn: Callable[..., Any], numbers: Any, names: Any, what: str) -> None:
        self.numbers = frozenset(_integers(numbers, f"{what}_argnums"))
        self.names = frozenset([names] if isinstance(names, str) else names or ())
        for name in self.names:
            if not isinstance(name, str):
                raise ArgumentTypeError(f"jit: {what}_argnames has {name!r:.60}; wanted names")
        if not (self.numbers or self.names):
            return
        try:
            arguments = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):
            return
        positional = [a.name for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
        several = {a.kind for a in arguments}
        count = len(positional)
        for n in self.numbers:
            if not -count <= n < count and inspect.Parameter.VAR_POSITIONAL not in several:
                raise ArgumentError(
                    f"jit: {what}_argnums has {n}, and the function has {counted(count, 'positional argument')}"
                )
        for name in self.names:
            if name not in [a.name for a in arguments] and inspect.Parameter.VAR_KEYWORD not in several:
                raise ArgumentError(f"jit: {what}_argnames has {name!r}, and the function has no such argument")
        numbers = {n % count if -count <= n < count else n for n in self.numbers}
        self.numbers = frozenset(numbers | {k for k, name in enumerate(positional) if name in self.names})
        self.names = self.names | {positional[n] for n in numbers if n < count}

    def __bool__(self) -> bool:
        return bool(self.numbers or self.names)

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[tuple[int | str, Any]], list[Any], dict[str, Any]]:
        """Returns the arguments that it names, each with its number or name, and the others."""
        mine: list[tuple[int | str, Any]] = [(n, x) for n, x in enumerate(args) if n in self.numbers]
        mine += [(name, x) for name, x in sorted(kwargs.items()) if name in self.names]
        others = [x for n, x in enumerate(args) if n not in self.numbers]
        return mine, others, {name: x for name, x in kwargs.items() if name not in self.names}


def _integers(numbers: Any, what: str) -> Sequence[int]:
    integers = () if numbers is None else (numbers,) if isinstance(numbers, int) else tuple(numbers)
    for n in integers:
        if not isinstance(n, int) or isinstance(n, bool):
            raise ArgumentTypeError(f"jit: {what} has {n!r:.60}; wanted integers")
    return integers


def joined(mine: Sequence[tuple[int | str, Any]], others: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Returns the positional and the named arguments of which `Signature.split` gave the parts."""
    at = {n: x for n, x in mine if isinstance(n, int)}
    rest = iter(others)
    args = [at[n] if n in at else next(rest) for n in range(len(at) + len(others))]
    return args, {**named, **{n: x for n, x in mine if isinstance(n, str)}}


def copied_by(x: Any) -> Sequence[str]:
    """Returns the tags of operators that copy a leaf, a view, where they return a view of a new array of its shape."""
    view_spec = getattr(getattr(x, "_storage", None), "view_spec", None)
    if view_spec is None or view_spec.is_contiguous:
        return ()
    return ("view if contiguous",) if view_spec.is_straight else ("view if contiguous", "view if straight")


def call_of(values: list[Any], captured: Mapping[int, Any], by_window: bool) -> Call:
    """Returns leaves of arguments as a `Call`. Arrays of backends among them become tensors, and random keys integers,
    in ``values`` itself.

    Args:
        values: the leaves.
        captured: the tensors that the function closes over, by identity.
        by_window: whether a leaf that operators copy (see `copied_by`) is an input of its own, or a view of its base.

    Raises:
        DonatedError: the memory of a tensor was donated.
        NotHashable: a leaf is neither an array nor a scalar, and is not hashable.
    """
    kinds: list[Any] = []
    bases: list[Any] = []
    plain, windows = True, False
    for k, x in enumerate(values):
        kind = type(x)
        if kind is ShardedTensor:
            storage = x._storage
            base = x
            if type(storage) is not Storage:
                base = getattr(storage, "base", x)
                if type(base._storage) is Donated:
                    base._storage.stored()
            bases.append((k, base))
            value = x._aval
            kinds.append(value if value.ndim else (value, x._is_scalar))
            if base is not x and (tags := copied_by(x)):
                kinds[k] = value, tags
                windows = windows or by_window
        elif kind in SCALARS:
            kinds.append(kind)
        elif kind is np.ndarray and is_element(x.dtype):
            kinds.append(host_aval(x.shape, x.dtype))
        elif isinstance(x, np.generic) and is_element(x.dtype):
            kinds.append((host_aval((), x.dtype), np.generic))
        elif isinstance(x, np.ndarray) and is_element(x.dtype):
            kinds.append((host_aval(x.shape, x.dtype), kind))
        elif kind is Key:
            values[k] = bits_of(x, "jit")
            kinds.append(Key)
        elif array_backend(x) is not None:
            values[k] = as_operand(x, "jit")
            return call_of(values, captured, by_window)
        else:
            kinds.append(_Static(x))
            plain = False
    if len(bases) > 1 or captured or windows:
        identities = [id(base) for _, base in bases]
        if windows or len(set(identities)) < len(identities) or not captured.keys().isdisjoint(identities):
            return _aliased(values, kinds, bases, Counter(identities), captured, by_window)
    units = values if plain else [x for x, kind in zip(values, kinds, strict=True) if type(kind) is not _Static]
    return Call(tuple(kinds), units, ())


def plain_leaves(call: Call) -> Sequence[Leaf]:
    """Returns for each leaf which input it is."""
    if call.leaves:
        return call.leaves
    inputs, count = [], 0
    for kind in call.key:
        static = type(kind) is _Static
        inputs.append(Leaf(None if static else count))
        count += not static
    return inputs


def _aliased(
    values: Sequence[Any],
    kinds: list[Any],
    bases: Sequence[Any],
    counts: Mapping[int, int],
    captured: Mapping[int, Any],
    by_window: bool,
) -> Call:
    """Returns the call where several leaves have one base, a leaf and the function do, or views are not inputs."""
    shared = {
        k: base
        for k, base in bases
        if counts[id(base)] > 1 or id(base) in captured or (by_window and copied_by(values[k]))
    }
    units: list[Any] = []
    where: list[Leaf] = []
    numbers: dict[int, int] = {}
    for k, x in enumerate(values):
        if type(kinds[k]) is _Static:
            where.append(Leaf(None))
            continue
        base = shared.get(k)
        if base is None:
            where.append(Leaf(len(units)))
            units.append(x)
            continue
        if id(base) not in numbers:
            numbers[id(base)] = len(units)
            units.append(base)
        view_spec = None if base is x else x._storage.view_spec
        where.append(Leaf(numbers[id(base)], view_spec))
        window = None if view_spec is None else (view_spec.boxes, view_spec.part, view_spec.chains)
        closed = list(captured).index(id(base)) if id(base) in captured else -1
        kinds[k] = (kinds[k], base._aval, numbers[id(base)], window, closed)
    return Call(tuple(kinds), units, where)


class _Static:
    """A leaf that is not an array: equal if type and value are, and numbers to the bit (see `exact_key`)."""

    __slots__ = ("_hash", "_key")

    def __init__(self, value: Any) -> None:
        self._key = exact_key(value)
        try:
            self._hash = hash(self._key)
        except TypeError:
            raise NotHashable(value) from None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return type(other) is _Static and bool(other._key == self._key)


class NotHashable(TypeError):
    """A static leaf is not hashable; its only argument is the leaf."""


def static_key(mine: Sequence[tuple[int | str, Any]]) -> tuple[Any, ...]:
    """Returns what static arguments are compared by.

    Raises:
        ArgumentTypeError: one is not hashable.
    """
    key = []
    for name, x in mine:
        try:
            key.append((name, _Static(x)))
        except NotHashable:
            raise ArgumentTypeError(
                f"jit: the static argument {name!r} is {type_text(x)}, which is not hashable; give a tuple "
                "instead of a list, or let it be traced"
            ) from None
    return tuple(key)


def not_hashable(error: NotHashable, values: Sequence[Any], names: Sequence[str]) -> ArgumentTypeError:
    """Returns the error of a call with leaves of which one is not hashable, which names the argument.

    Args:
        error: the error of `call_of`.
        values: the leaves.
        names: their access paths.
    """
    x = error.args[0]
    at = next(k for k, leaf in enumerate(values) if leaf is x)
    return ArgumentTypeError(
        f"jit: the argument {names[at]} is {type_text(x)}, which is neither an array nor hashable; give "
        f"arrays, scalars, or objects that can be hashed{hint_to_register(x)}"
    )


def argument_names(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Returns the access path of each leaf of the arguments: ``params['w'][0]``."""
    try:
        arguments = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        arguments = ()  # type: ignore[assignment]
    positional = [a.name for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    rest = next((a.name for a in arguments if a.kind is a.VAR_POSITIONAL), "argument")
    names: list[str] = []
    for k, x in enumerate(args):
        root = positional[k] if k < len(positional) else f"{rest}[{k - len(positional)}]"
        names += paths(x, root)
    for name in sorted(kwargs):
        names += paths(kwargs[name], name)
    return names


def flattened(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Returns the leaves of arguments and their structure."""
    if not kwargs:
        for x in args:
            kind = type(x)
            if kind is not ShardedTensor and kind not in SCALARS and kind is not np.ndarray:
                break
        else:
            return list(args), len(args)
    tree = (tuple(args), dict(kwargs))
    return leaves(tree), form_of(tree)
