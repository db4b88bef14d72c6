"""The batcher: the interpreter of a function that `vmap` calls once for all examples."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from shardtensor.core import (
    OPS,
    Op,
    Operands,
    Params,
    bind_by,
    bind_into,
    call,
)
from shardtensor.errors import ArgumentError, ArgumentTypeError, ConcretizationError, ShardTensorError
from shardtensor.functions.batching import Call, rule_of
from shardtensor.functions.random.random_keys import KeyBatch
from shardtensor.interpreters.batching.batched_values import LEAVES, LEFT, Batched, viewed
from shardtensor.interpreters.calls import CallInterpreter, InferredView, raise_named
from shardtensor.interpreters.nested import Nested
from shardtensor.interpreters.program_arrays import adopted, exported
from shardtensor.interpreters.writes.write_ops import is_view
from shardtensor.sharding.index import canonical
from shardtensor.sharding.layout import NamedSharding
from shardtensor.sharding.spec import P
from shardtensor.tensor.pytree import leaves, map_leaves, replaced
from shardtensor.tensor.tensor import ShardedTensor, mark_array, tensor
from shardtensor.tensor.value import Aval, aval, summed

Special = Callable[[Any, Op, Operands, dict[str, Any]], Any]

SPECIAL: dict[str, Special] = {}
"""The functions that call loops, branches and collectives for all examples, by the names of these: they need the
batcher, which rules do not know.
"""


def special(**functions: Special) -> None:
    """Declares the functions that call operators, given by name, for all examples."""
    SPECIAL.update(functions)


class Batcher(Nested, CallInterpreter):
    """Calls operators once for all examples of a batch, by the interpreter around it.

    Attributes:
        size: the number of examples.
        axis_name: the name of their dimension, for collectives; or None.
        ended: whether the function has returned.
    """

    def __init__(self, size: int, axis_name: str | None = None) -> None:
        super().__init__()
        self.size = size
        self.axis_name = axis_name
        self.ended = False
        self._made: weakref.WeakValueDictionary[int, ShardedTensor] = weakref.WeakValueDictionary()

    # -- values --------------------------------------------------------------------------------------

    def boxed(self, tree: Any, flags: Sequence[bool]) -> Any:
        """Returns a tree of values of all examples as values of one, where the flags are true."""
        return replaced(tree, [self.value(x) if f else x for x, f in zip(leaves(tree), flags, strict=True)])

    def value(self, primal: ShardedTensor) -> ShardedTensor:
        """Returns one example of a tensor, for all of them."""
        example = tensor(_example(primal._aval), Batched(self, primal))
        return mark_array(example) if example.ndim else example

    def batched(self, x: Any) -> Batched | None:
        """Returns the value of this batcher that a tensor, or the base of a view, has; None if it is the same for all
        examples.

        Raises:
            ConcretizationError: the tensor has left another function.
        """
        if type(x) is not ShardedTensor:
            return None
        storage = getattr(x._storage, "base", x)._storage
        if type(storage) is not Batched:
            return None
        if storage.batcher.ended:
            raise ConcretizationError(LEFT)
        return storage if storage.batcher is self else None

    def examples(self, x: Any) -> Any:
        """Returns the values of all examples, with one more dimension; an operand that is the same for all unchanged.
        It is called where the interpreter around the batcher is the innermost one.
        """
        batch = self.batched(x)
        if batch is None:
            return x if self.in_program is None else adopted(self.in_program, x)
        if not hasattr(x._storage, "view_spec"):
            return batch.primal
        return viewed(batch.primal, x._base_and_view()[1])

    def shown(self, x: Any) -> Any:
        """Returns a result as the caller gets it: in a program of a map as an array of its device."""
        return x if self.in_program is None else exported(self.in_program, x)

    # -- calls ---------------------------------------------------------------------------------------

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Calls an operator once for all examples."""
        if "spmd" in op.tags and "axis_name" in op.params:
            return self._collective(op, operands, params)
        if op.name == "getitem" and self._has_batched(params):
            op, operands, params = OPS["gather"], (*operands, *params), ()
        elif not (op.signature.functions or self._has_batched((*operands, *(params if op.parts.composite else ())))):
            result = bind_by(self.outer, op, operands, params)
            operand_ids = set(map(id, leaves(operands)))
            for y in leaves(result):
                if type(y) is ShardedTensor and id(y) not in operand_ids:  # `asarray` may return its operand.
                    self._made[id(y)] = y
            return result
        if "escapes" in op.tags:
            raise ConcretizationError(f"{op.error_name}: the elements of one example are read, {LEAVES}")
        return super().apply(op, operands, params)

    def _collective(self, op: Op, operands: Operands, params: Params) -> Any:
        """Calls a collective, of which the axis may be that of the examples."""
        named = dict(zip(op.params, params, strict=True))
        if not self._has_batched(operands) and self.axis_name not in names_of(named["axis_name"]):
            return bind_by(self.outer, op, operands, params)
        _load_batching(op)
        try:
            return SPECIAL[op.name](self, op, operands, named)
        except ShardTensorError as error:
            raise_named(op, error)

    def index(self) -> ShardedTensor:
        """Returns the number of each example."""
        with self.outside():
            return self.value(call("arange", self.size))

    def _has_batched(self, tree: Any) -> bool:
        return any(map(self.differs, leaves(tree)))

    def differs(self, x: Any) -> bool:
        """Whether an operand differs from one example to another."""
        return x.batcher is self if type(x) is KeyBatch else self.batched(x) is not None

    def element(self, op: Op, operands: Operands, params: Params, view: InferredView, /) -> Any:
        """Returns an element of each example."""
        base, view_spec, *_ = view
        with self.outside():
            return self.value(call("copy", viewed(self.batched(base).primal, view_spec)))  # type: ignore[union-attr]

    def composed(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Calls the operators of a composition, unless it has a rule itself: then that runs for all examples."""
        # Of an index, the composition tells whether it has arrays: then it is that of another operator, `gather`.
        has_rule = op.name != "getitem" and rule_of(op) is not None and not self._has_batched(params)
        return NotImplemented if has_rule else super().composed(op, operands, params)

    def planned(self, op: Op, operands: Operands, params: Params, *_: Any) -> Any:
        """Calls an operator once for all examples, by its rule.

        Raises:
            ArgumentTypeError: it has none.
        """
        _load_batching(op)
        if op.name in SPECIAL:
            with self.outside():
                return SPECIAL[op.name](self, op, operands, dict(zip(op.params, params, strict=True)))
        rule = rule_of(op)
        if rule is None:
            raise ArgumentTypeError(
                f"{op.error_name}: vmap cannot call it for all examples at once; call the function for each example, "
                "st.stack([f(row) for row in x]), or for the parts of split arrays, by st.smap"
            )
        if not op.signature.trees:
            operands = tuple([self._one(x) for x in operands])
        is_batched = list(map(self.differs, leaves(operands) if op.signature.trees else operands))
        with self.outside():
            primals = map_leaves(self.examples, operands) if op.signature.trees else tuple(map(self.examples, operands))
            result = rule(Call(op, primals, is_batched, dict(zip(op.params, params, strict=True)), self.size))
        return map_leaves(lambda y: self.value(y) if type(y) is ShardedTensor else y, result)

    algorithm = planned

    def _one(self, x: Any) -> Any:
        """Returns an operand; nested lists of batched values as one array."""
        is_list = isinstance(x, (list, tuple)) and self._has_batched(x)
        return self.apply(OPS["asarray"], (x,), (None, None, None)) if is_list else x

    # -- writes --------------------------------------------------------------------------------------

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Writes one example of a tensor, for all of them.

        Raises:
            ArgumentError: the tensor is the same for all examples, and the function has not made it.
        """
        base = out._base_and_view()[0]
        if self.batched(base) is None:
            if not self._has_batched(operands):
                with self.outside():
                    bind_into(out, op, operands, params)
                return
            self._spread(base, op, next(batch for x in leaves(operands) if (batch := self.batched(x)) is not None))
        base, view_spec = out._base_and_view()
        if "assigns" in op.tags:
            value, index = operands[1], operands[2]
            at = None if self._has_batched(index) else canonical(index, view_spec.shape)
            if at is None:
                value = self.planned(OPS["setitem"], (out, value, index), ())
            elif is_view(value, base, view_spec.at(at)):
                return  # Python ends ``x[i] += v`` with ``x[i] = x[i]``.
            else:
                view_spec = view_spec.at(at)
        else:
            value = self.apply(op, operands, params)
        ndim = len(view_spec.shape)
        is_batched = self.batched(value) is not None
        with self.outside():
            target = viewed(self.batched(base).primal, view_spec)  # type: ignore[union-attr]
            examples = self.examples(value)
            if is_batched and examples.ndim - 1 < ndim:
                examples = call(
                    "reshape", examples, (self.size, *[1] * (ndim + 1 - examples.ndim), *examples.shape[1:])
                )
            bind_into(target, OPS["setitem"], (target, examples, ...), ())

    def _spread(self, base: ShardedTensor, op: Op, like: Batched) -> None:
        """Gives each example an own value of a tensor that the function has made, in the layout of another batch."""
        if self._made.get(id(base)) is not base:
            raise ArgumentError(
                f"{op.error_name}: a tensor that is the same for all examples is written, with values that differ from "
                "one to another; pass it with in_axes=0, or write a tensor that the function has made"
            )
        with self.outside():
            moved = for_all(tensor(base._aval, base._storage), self.size, like.primal._aval, op.error_name)
            primal = mark_array(call("copy", moved))
        base._storage, base._aval = Batched(self, primal), _example(primal._aval)


def _load_batching(op: Op) -> None:
    if op.parts.batching is not None:
        importlib.import_module(op.parts.batching)


def names_of(axis_name: Any) -> tuple[Any, ...]:
    """Returns the names of the axes of a collective, which is given one or several."""
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def for_all(one: ShardedTensor, size: int, like: Aval, caller: str) -> Any:
    """Returns a value that is the same for all examples once for each of them, in the layout of another batch. It is
    committed if the value is, as one example would be: the first carry of a loop may follow what the loop computes.
    """
    target = with_examples(one._aval, like)
    chains = target.spec.chains_of(one.ndim + 1)[1:]
    moved = call("transfer_to", one, target.with_spec(P(*chains)), caller, committed=one.committed)
    wide = call("broadcast_to", moved, (size, *one.shape))
    return call("transfer_to", wide, target, caller, committed=one.committed)


def with_examples(one: Aval, like: Aval) -> NamedSharding:
    """Returns the layout of a batch of values, of which the examples are on the devices of those of another batch."""
    here = summed(one).sharding
    if here.mesh == like.sharding.mesh:
        chains = here.spec.chains_of(one.ndim)
    elif not one.committed or here.spec == P():
        chains = ((),) * one.ndim
    else:  # The tensor is split over other devices, on which it stays.
        return here.with_spec(P(None, *here.spec.chains_of(one.ndim)))
    used = {axis for chain in chains for axis in chain}
    kept = tuple([axis for axis in like.sharding.spec.chains_of(like.ndim)[0] if axis not in used])
    return like.sharding.with_spec(P(kept, *chains))


def _example(value: Aval) -> Aval:
    """Returns the aval of one example."""
    value = summed(value) if value.unreduced else value
    chains = value.sharding.spec.chains_of(value.ndim)
    return aval(value.shape[1:], value.dtype, value.sharding.with_spec(P(*chains[1:])), value.committed)
