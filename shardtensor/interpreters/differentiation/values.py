"""The values of a tape: the storages of tensors that depend on differentiated arguments."""

from __future__ import annotations

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
        is_saved: whether a derivative needs the value.
        viewed: the value of which it is a view.
        views: the views of it that have been read, by their boxes and parts.
    """

    __slots__ = ("is_saved", "number", "primal", "tape", "viewed", "views")

    def __init__(self, tape: Any, primal: Any, viewed: Taped | None = None) -> None:
        self.tape = tape
        self.primal = primal
        self.number = tape.new_number()
        self.is_saved = False
        self.viewed = viewed
        self.views: dict[Any, Taped] | None = None

    def save(self) -> None:
        """Notes that a derivative needs the value, and hence that of which it is a view."""
        self.is_saved = True
        if self.viewed is not None:
            self.viewed.save()

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
    "shardtensor, or st.stop_gradient(x) where no gradient is wanted"
)
LEFT = (
    "a tensor left a differentiated function, by a global variable, a container or an object, and is used after that; "
    "return it from the function (has_aux=True), or keep st.stop_gradient(x)"
)


def number_of(state: Taped | None) -> int | None:
    """Returns the number of a value; None for None."""
    return None if state is None else state.number
