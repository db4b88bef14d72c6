"""The values of a tape: the storages of tensors that depend on differentiated arguments."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

from shardtensor.errors import ConcretizationError
from shardtensor.tensor.storage import NoElements
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements


class Taped(NoElements):
    """The storage of a value that depends on a differentiated argument.

    Attributes:
        tape: the tape.
        number: the number of the value on the tape.
        primal: the value as the interpreter around the tape has it: a tensor, or a Python scalar. No other object has
            this handle, so that a write may change it; then it is None, since this value exists no longer.
        tangent: its derivative in the direction of forward mode, which is never written; None for zeros.
        is_saved: whether a derivative needs the value.
        viewed: a weak reference to the value of which it is a view, if it is one. A strong one would keep the memory of
            both until the garbage collector runs.
        views: the views of it that have been read, by their boxes and parts.
        source: the value from which a gather has made it.
    """

    __slots__ = ("__weakref__", "is_saved", "number", "primal", "source", "tangent", "tape", "viewed", "views")

    def __init__(self, tape: Any, primal: Any, viewed: Taped | None = None) -> None:
        self.tape = tape
        self.primal = primal
        self.number: int = tape.next_number
        tape.next_number = self.number + 1
        self.tangent: Any = None
        self.is_saved = False
        self.viewed = None if viewed is None else weakref.ref(viewed)
        self.views: dict[Any, Taped] | None = None
        self.source: Taped | None = None

    def save(self) -> None:
        """Notes that a derivative needs the value, and hence that of which it is a view."""
        self.is_saved = True
        if self.viewed is not None and (base := self.viewed()) is not None:
            base.save()

    def exists(self) -> bool:
        """Whether no write has changed the value, or that of which it is a view."""
        if self.primal is None:
            return False
        return self.viewed is None or ((base := self.viewed()) is not None and base.exists())

    def share(self) -> None:
        """See `NoElements`: a value that is saved is never written in place."""
        self.save()

    def stored(self) -> NoReturn:
        """Raises ConcretizationError: elements are read through operators, which the tape sees."""
        raise ConcretizationError(LEFT if self.tape.ended else f"a part of a tensor is read, {LEAVES}")

    def is_lacking(self) -> bool:
        """Whether the elements are unknown to the interpreter around the tape.

        Raises:
            ConcretizationError: the tensor has left the function.
        """
        if self.tape.ended:
            raise ConcretizationError(LEFT)
        return lacks_elements(self.primal)

    def settle(self) -> None:
        """Waits until the elements are computed."""
        if type(self.primal) is ShardedTensor:
            self.primal.block_until_ready()

    def shown(self, x: ShardedTensor) -> Any:
        """Returns the tensor or view ``x`` of this storage as it is printed: without the tape."""
        return x if self.tape.ended else _shown(self.tape.constant(x))


def _shown(x: Any) -> Any:
    storage = getattr(x._storage, "base", x)._storage if type(x) is ShardedTensor else None
    return storage.shown(x) if type(storage) is Taped else x


LEAVES = (
    "and a differentiated function depends on it, so that its gradient would be lost; use the functions of "
    "shardtensor, st.custom_vjp around other code, or st.stop_gradient(x) where no gradient is wanted"
)
LEFT = (
    "a tensor left a differentiated function, by a global variable, a container or an object, and is used after that; "
    "return it from the function (has_aux=True), or keep st.stop_gradient(x)"
)


def number_of(state: Taped | None) -> int | None:
    """Returns the number of a value; None for None."""
    return None if state is None else state.number


def kind_of(x: Any) -> Any:
    """Returns the aval of a tensor; any other object unchanged."""
    return x._aval if type(x) is ShardedTensor else x
