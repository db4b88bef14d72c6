"""One call of a function that is differentiated, and what its derivatives give in the structure of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import call, interpreting
from shardtensor.errors import ArgumentError, ArgumentTypeError, type_text
from shardtensor.functions.derivatives.cotangents import FLOAT0, is_inexact
from shardtensor.interpreters.differentiation.backward import or_zeros
from shardtensor.interpreters.differentiation.left_sums import left_sums
from shardtensor.interpreters.differentiation.tangents import Forward, like, pushed_forward
from shardtensor.interpreters.differentiation.tape import Tape
from shardtensor.interpreters.differentiation.taped_values import kind_of, number_of
from shardtensor.tensor.operands import dtype_of, is_data
from shardtensor.tensor.pytree import hint_to_register, leaves, map_leaves, paths, replaced
from shardtensor.tensor.tensor import ShardedTensor, check_not_donated, without_elements
from shardtensor.tensor.value import Aval, summed


class Run:
    """One call of a function on a tape.

    Attributes:
        value: the result, without the tape; in a program of a map, tensors stand for the arrays of its device.
        aux: the auxiliary result, as the caller gets it.
        numbers: for each leaf of the result the number of its value; None if it depends on no differentiated argument.
        given: what stands for the arguments that are differentiated.
        tangents: the tangents of the leaves of the result, if those of the leaves of the arguments are given.
    """

    def __init__(
        self,
        caller: str,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        argnums: Sequence[int],
        *,
        has_aux: bool,
        allow_int: bool = False,
        holomorphic: bool = False,
        tangents: Sequence[Any] | None = None,
    ) -> None:
        self.caller = caller
        self.tape = Tape() if tangents is None else Forward()
        arguments = tuple([args[n] for n in argnums])
        self.given = map_leaves(stand_in_of, arguments)
        names = [path for n in argnums for path in paths(args[n], f"argument {n}")]
        arg_leaves = leaves(arguments)
        adopted = list(map(self.tape.adopted, arg_leaves))
        primals = [_primal(caller, name, x, allow_int, holomorphic) for name, x in zip(names, adopted, strict=True)]
        boxes = [x if x is None else self.tape.variable(x) for x in primals]
        self._inputs = [None if b is None else (b._storage.number, kind_of(b._storage.primal)) for b in boxes]
        for b, t in zip(boxes, tangents or (), strict=tangents is not None):
            if b is not None and t is not None:
                b._storage.tangent = t
        before = [None if b is None else b._storage for b in boxes]
        every = list(args)
        boxed = replaced(arguments, [x if b is None else b for x, b in zip(arg_leaves, boxes, strict=True)])
        for n, x in zip(argnums, boxed, strict=True):
            every[n] = x
        sources = {id(b): _base(x) for x, b in zip(arg_leaves, boxes, strict=True) if b is not None}
        self.tape.check_write = functools.partial(_check_write, caller, (args, kwargs), sources)
        try:
            with interpreting(self.tape):
                result = fn(*every, **kwargs)
            self._take(result, has_aux)
        finally:
            self.tape.end()
            for x, b, storage in zip(arg_leaves, boxes, before, strict=True):
                if isinstance(x, (ShardedTensor, np.ndarray)) and b is not None and b._storage is not storage:
                    x[...] = self.tape.constant(b)  # The function has written an argument.

    def _take(self, result: Any, has_aux: bool) -> None:
        """Takes the result of the function from the tape, which has not ended yet: a tensor of the result may be one
        from outside that the function has written.
        """
        self.aux = None
        if has_aux:
            if type(result) is not tuple or len(result) != 2:
                raise ArgumentTypeError(
                    f"{self.caller}: the function returns {type_text(result)}; wanted the pair (result, aux), since "
                    "has_aux is true"
                )
            result, self.aux = result[0], self.shown(map_leaves(self.tape.result, result[1]))
        if isinstance(self.tape, Forward):
            self.tangents = list(map(self.tape.tangent, leaves(result)))
        self.numbers = [number_of(s) for s in map(self.tape.active, leaves(result))]
        self.value = map_leaves(self.tape.result, result)

    def shown(self, tree: Any) -> Any:
        """Returns results as the caller gets them: in a program of a map as arrays of its device."""
        return map_leaves(self.tape.given, tree) if self.tape.in_program else tree

    def pulled(self, cotangents: Sequence[Any], *, keep: bool) -> Any:
        """Returns the gradients of the arguments, given cotangents of the leaves of the result."""
        start: dict[int, list[Any]] = {}
        for n, g in zip(self.numbers, cotangents, strict=True):
            if n is not None and g is not None:
                start.setdefault(n, []).append(g)
        inputs = [x for x in self._inputs if x is not None]
        remaining = iter(self.tape.pull(start, inputs, keep=keep, left=None if keep else left_sums()))
        gradients = [
            _no_gradient(x) if i is None else or_zeros(next(remaining), i[1])
            for x, i in zip(leaves(self.given), self._inputs, strict=True)
        ]
        return self.shown(replaced(self.given, gradients))

    def pushed(self, tangents: Sequence[Any]) -> Any:
        """Returns the tangents of the results, given those of the leaves of the arguments."""
        start = {
            i[0]: like(t, i[1]) for i, t in zip(self._inputs, tangents, strict=True) if i is not None and t is not None
        }
        return self.in_results(pushed_forward(self.tape.steps, start, self.numbers))

    def in_results(self, tangents: Sequence[Any]) -> Any:
        """Returns tangents of the leaves of the results in their structure, with zeros in place of None."""
        new_leaves = []
        for y, t in zip(leaves(self.value), tangents, strict=True):
            kind = kind_of(y)
            kind = summed(kind) if isinstance(kind, Aval) else kind  # Tangents have no layouts of cotangents.
            is_number = hasattr(y, "dtype") or isinstance(y, (float, complex))
            new_leaves.append(or_zeros(t, kind) if is_number and is_inexact(dtype_of(kind)) else _no_gradient(y))
        return replaced(self.value, new_leaves)


def stand_in_of(x: Any) -> Any:
    """Returns a leaf that stands for another one, whose memory it does not hold."""
    return without_elements(x._aval) if type(x) is ShardedTensor else x


def _base(x: Any) -> Any:
    return x._base_and_view()[0] if type(x) is ShardedTensor else x


def _check_write(caller: str, arguments: Any, sources: dict[int, Any], base: ShardedTensor) -> None:
    """Raises ArgumentError if a tensor that is written is a differentiated argument, and shares its elements with
    another argument: the function gets copies of those that are differentiated, of which a write would change one only.

    Args:
        caller: the public function.
        arguments: all arguments.
        sources: the differentiated arguments, or those of which they are views, by the identities of the copies.
        base: the tensor that is written: such a copy, or a tensor from outside.
    """
    written = sources.get(id(base), base)
    if not any(x is written for x in sources.values()) or not isinstance(written, (ShardedTensor, np.ndarray)):
        return
    args, kwargs = arguments
    trees = [(f"argument {n}", x) for n, x in enumerate(args)] + [(f"argument {n}", x) for n, x in kwargs.items()]
    same = [
        path
        for name, x in trees
        for path, leaf in zip(paths(x, name), leaves(x), strict=True)
        if _base(leaf) is written
    ]
    if len(same) > 1:
        raise ArgumentError(
            f"{caller}: the function writes {same[0]}, which shares its elements with {same[1]}, and a gradient takes "
            "arguments for independent ones; give a copy of one of them"
        )


def _no_gradient(x: Any) -> Any:
    return None if x is None else np.zeros(np.shape(x), FLOAT0)


def _primal(caller: str, name: str, x: Any, allow_int: bool, holomorphic: bool) -> Any:
    """Returns a copy of an argument that the tape may hold; None for one without a gradient."""
    if x is None:
        return None
    if type(x) in (float, complex):
        kind: Any = np.asarray(x).dtype
    elif isinstance(x, (ShardedTensor, np.ndarray, np.generic, bool, int)) or is_data(x):
        check_not_donated(x)
        x = x if type(x) is ShardedTensor or isinstance(x, (bool, int)) else call("asarray", x, copy=True)
        kind = x.dtype if type(x) is ShardedTensor else np.asarray(x).dtype
    else:
        raise ArgumentTypeError(
            f"{caller}: {name} is {type_text(x)}; wanted arrays and numbers (argnums= chooses the arguments)"
            f"{hint_to_register(x)}"
        )
    if not is_inexact(kind):
        if allow_int:
            return None
        raise ArgumentTypeError(
            f"{caller}: {name} has dtype {kind}, which has no gradient; wanted floating-point numbers (argnums= "
            "chooses the arguments, of which others may hold integers; allow_int=True gives integers a gradient "
            "without elements)"
        )
    if holomorphic and kind.kind != "c":
        raise ArgumentTypeError(f"{caller}: {name} has dtype {kind}; wanted complex numbers, since holomorphic is true")
    return call("copy", x) if type(x) is ShardedTensor else x
