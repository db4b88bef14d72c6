"""Arguments that are sequences of numbers or of arrays: what reads them several times must not get an iterator."""

from __future__ import annotations

from typing import Any

from shardtensor.errors import ArgumentTypeError, type_text


def is_iterator(given: Any) -> bool:
    """Whether an argument can be read only once: ``isinstance(given, Iterator)`` takes ten times as long."""
    return hasattr(given, "__next__")


def check_no_iterator(given: Any, name: str) -> None:
    """Raises ArgumentTypeError if an argument, which is read several times, is an iterator, as NumPy does."""
    if is_iterator(given):
        raise ArgumentTypeError(
            f"{name} is {type_text(given)}, which can be read only once; wanted an integer, a list or a tuple"
        )


def as_list(given: Any, name: str) -> list[Any]:
    """Returns the items of a sequence of arrays or of other arguments.

    Raises:
        ArgumentTypeError: ``given`` is not iterable, or an iterator; the message calls it ``name``.
    """
    if is_iterator(given) or not hasattr(given, "__len__"):
        kind = type_text(given)
        raise ArgumentTypeError(f"{name} is {kind}; wanted a list or a tuple, such as list(…) of an iterator")
    return list(given)


def as_tuple(given: Any) -> Any:
    """Returns an argument that may be an iterator: the items of one in a tuple, anything else unchanged."""
    return tuple(given) if is_iterator(given) else given
