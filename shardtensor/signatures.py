"""The annotations of public functions, as `help` shows them.

The annotations of a module with ``from __future__ import annotations`` are texts, which `help` shows in quotes before
Python 3.14. Evaluating them would import what is needed for type checkers only, and take time.
"""

from __future__ import annotations

import types
from typing import Any, TypeVar

Public = TypeVar("Public")


class _Annotation(str):
    """The text of an annotation, of which the ``repr`` has no quotes."""

    __slots__ = ()
    __repr__ = str.__str__


class _Annotations(dict[str, _Annotation]):
    """The annotations by their texts: a few hundred texts annotate all functions."""

    def __missing__(self, text: str) -> _Annotation:
        annotation = self[text] = _Annotation(text)
        return annotation


_ANNOTATIONS = _Annotations()


def without_quotes(public: Public) -> Public:
    """Returns a function, a class or a module after making the annotations of its functions texts without quotes.

    >>> import inspect
    >>> str(inspect.signature(st.device_count))
    '(backend: str | None = None) -> int'
    """
    if isinstance(public, types.ModuleType):
        for name in {*getattr(public, "__all__", ())} & {*vars(public)}:  # Others are imported on first use.
            without_quotes(vars(public)[name])
    elif isinstance(public, type):
        for base in public.__mro__:
            if base.__module__.startswith("shardtensor."):
                for value in vars(base).values():
                    if type(value) in _METHODS:
                        _replace(value)
    else:
        _replace(public)
    return public


_METHODS = (types.FunctionType, classmethod, staticmethod)


def _replace(function: Any) -> None:
    """Replaces the annotations of a function, which those that wrap it share."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    annotations = function.__annotations__ if type(function) is types.FunctionType else {}
    for name, annotation in annotations.items():
        if type(annotation) is str:
            annotations[name] = _ANNOTATIONS[annotation]
