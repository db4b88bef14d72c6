"""Arguments that are sequences of numbers or of arrays: what reads them several times must not get an iterator."""

from __future__ import annotations

from typing import Any

from shardtensor.errors import ArgumentTypeError, type_text


def is_iterator(argument: Any) -> bool:
    """Whether an argument can be read only once: ``isinstance(argument, Iterator)`` takes ten times as long."""
    return hasattr(argument, "__next__")


def check_no_iterator(argument: Any, name: str) -> None:
    """Raises ArgumentTypeError if an argument, which is read several times, is an iterator, as NumPy does."""
    if is_iterator(argument):
        raise ArgumentTypeError(
            f"{name} is {type_text(argument)}, which can be read only once; wanted an integer, a list or a tuple"
        )


def as_list(argument: Any, name: str) -> list[Any]:
    """Returns the items of a sequence of arrays or of other arguments.

    Raises:
        ArgumentTypeError: ``argument`` is not iterable, or an iterator; the message calls it ``name``.
    """
    if is_iterator(argument) or not hasattr(argument, "__len__"):
        kind = type_text(argument)
        raise ArgumentTypeError(f"{name} is {kind}; wanted a list or a tuple, such as list(…) of an iterator")
    return list(argument)


def as_tuple(argument: Any) -> Any:
    """Returns an argument that may be an iterator: the items of one in a tuple, anything else unchanged."""
    return tuple(argument) if is_iterator(argument) else argument
