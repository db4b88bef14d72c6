"""The keys of random numbers."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from shardtensor.core import bind, declared, hinted
from shardtensor.errors import ArgumentError, ArgumentTypeError, ConcretizationError, type_text
from shardtensor.functions.building.python_numbers import PYTHON
from shardtensor.host import philox
from shardtensor.tensor.tensor import ShardedTensor

_WORD = 1 << 64
_SPLIT, _FOLDED = 1 << 192, 2 << 192
"""The last words of the counters from which keys are derived. It is 0 for those of elements."""


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """The key of a stream of random bits: an immutable, hashable value of two words of 64 bits.

    `key` makes one from a seed, `split` and `fold_in` derive others from it. In pytrees, a key is a leaf.

    Attributes:
        seed: the first word of Philox's key.
        stream: the second word.

    >>> st.random.key(7)
    Key(7, 0)
    """

    seed: int
    stream: int = 0

    def __post_init__(self) -> None:
        for name in ("seed", "stream"):
            object.__setattr__(self, name, _word(getattr(self, name), "Key", name))

    def __repr__(self) -> str:
        return f"Key({', '.join(str(n) if n < 1 << 32 else f'{n:#018x}' for n in (self.seed, self.stream))})"


class SymbolicKey(Key):
    """A key whose bits are known when a program runs: `st.jit` passes it to the function that it traces.

    Attributes:
        bits: the key as one integer: a traced Python scalar.
    """

    __slots__ = ("bits",)

    def __init__(self, bits: Any) -> None:
        object.__setattr__(self, "bits", bits)

    def __getattr__(self, name: str) -> Any:
        if name in ("seed", "stream"):
            self._raise_unknown(name)
        raise AttributeError(name)

    def __eq__(self, other: object) -> bool:
        self._raise_unknown("__eq__")

    def __hash__(self) -> int:
        self._raise_unknown("__hash__")

    def _raise_unknown(self, member: str) -> NoReturn:
        """Raises the error of a value that leaves the traced function."""
        try:
            operator.index(self.bits)
        except ConcretizationError as error:
            raise ConcretizationError(f"Key.{member}: {str(error).partition(': ')[2]}") from None
        raise AssertionError("the bits of a key of jit are traced")

    def __repr__(self) -> str:
        return "<key of jit>"


class KeyBatch(Key):
    """A key that differs from one example to another of a function that `vmap` calls.

    Attributes:
        keys: the key of each example.
        batcher: the interpreter that calls the function.
    """

    __slots__ = ("batcher", "keys")

    def __init__(self, keys: Sequence[Key], batcher: Any) -> None:
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "batcher", batcher)

    def each(self, derive: Callable[[Key], Key]) -> KeyBatch:
        """Returns a key that is derived from that of each example."""
        return KeyBatch([derive(key) for key in self.keys], self.batcher)

    def __getattr__(self, name: str) -> Any:
        if name in ("seed", "stream"):
            raise ConcretizationError(f"Key.{name}: the key differs from one example of vmap to another")
        raise AttributeError(name)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return "<keys of the examples of vmap>"


def key_of(bits: Any) -> Key:
    """Returns the key with these bits: an integer, or a traced one."""
    return Key(bits % _WORD, bits // _WORD) if type(bits) is int else SymbolicKey(bits)


def derived_bits(number: int, bits: int, counter: int) -> int:
    """Returns the bits of the key that is made of the first two words of a block of a key's stream.

    Args:
        number: the number of the block, from ``counter`` on.
        bits: the key.
        counter: the first counter of keys that are derived by the same function.
    """
    first, second = philox.words(bits, counter + _word(number, "fold_in", "data"), 1).tolist()[:2]
    return int(first % _WORD | second % _WORD << 64)


_DERIVED = declared(derived_bits, operands=("number", "bits", "counter"), error_name="fold_in", tags=("escapes",))
"""`derived_bits` as an operator, which jit records where the key or the number is traced."""

_DERIVED.parts.algorithm = PYTHON[_DERIVED] = derived_bits


def _word(value: Any, caller: str, name: str) -> int:
    """Returns an integer from 0 to 2**64 - 1, given it or an object with ``__index__``.

    Raises:
        ArgumentTypeError, ArgumentError: the value is not such an integer.
    """
    word = integer(value, caller, name)
    if not 0 <= word < _WORD:
        raise ArgumentError(f"{caller}: {name} is {word}; wanted an integer from 0 to 2**64 - 1")
    return word


def integer(value: Any, caller: str, name: str) -> int:
    """Returns the value of an integer or of an object with ``__index__``.

    Raises:
        ArgumentTypeError: the value is neither.
    """
    try:
        return operator.index(value)
    except ConcretizationError:
        raise  # It is a TypeError, too, and states what to do.
    except TypeError:
        raise ArgumentTypeError(f"{caller}: {name} is {type_text(value)}; wanted an integer") from None


def bits_of(key: Any, caller: str) -> Any:
    """Returns a key as one integer; for a key that jit traces, a traced one; for the keys of a batch these."""
    if type(key) is SymbolicKey:
        return key.bits
    if type(key) is KeyBatch:
        return key
    if type(key) is not Key:
        raise ArgumentTypeError(f"{caller}: key is {type_text(key)}; wanted a key, such as st.random.key(0)")
    return key.seed | key.stream << 64


def _keys(key: Any, caller: str, counter: int, count: int) -> list[Key]:
    """Returns keys that are made of the first two words of successive blocks."""
    if type(key) is KeyBatch:
        rows = [_keys(one, caller, counter, count) for one in key.keys]
        return [KeyBatch(same, key.batcher) for same in zip(*rows, strict=True)]
    bits = bits_of(key, caller)
    if type(bits) is not int:
        return [key_of(bind(_DERIVED, (n, bits, counter), ())) for n in range(count)]
    words = philox.words(bits, counter, count).reshape(count, philox.WORDS)
    return [Key(seed, stream) for seed, stream, *_ in words.tolist()]


@hinted
def key(seed: int) -> Key:
    """Returns the key of a seed.

    Args:
        seed: an integer from 0 to 2**64 - 1.

    >>> st.random.key(7) == st.random.key(7), st.random.key(7) == st.random.key(8)
    (True, False)
    """
    return Key(_word(seed, "key", "seed"))


def split(key: Key, num: int = 2) -> list[Key]:
    """Returns independent keys that are derived from a key, which should not be used any more.

    Key i does not depend on ``num``. As an argument of `pmap`, the list gives each call a key of its own.

    Args:
        key: the key.
        num: the number of keys.

    >>> weights, noise = st.random.split(st.random.key(0))
    >>> weights != noise
    True
    """
    count = integer(num, "split", "num")
    if count < 0:
        raise ArgumentError(f"split: num is {count}; wanted at least 0")
    return _keys(key, "split", _SPLIT, count)


def fold_in(key: Key, data: int) -> Key:
    """Returns a key that is derived from a key and a number, such as that of a step or of a device.

    Args:
        key: the key.
        data: an integer from 0 to 2**64 - 1.

    >>> draw = lambda x: x + st.random.integers(st.random.fold_in(st.random.key(0), st.axis_index("i")), 0, 100)
    >>> st.pmap(draw, np.zeros(4, int), axis_name="i").tolist()
    [65, 34, 99, 91]
    """
    if type(key) is KeyBatch:
        return key.each(lambda one: fold_in(one, data))
    bits = bits_of(key, "fold_in")
    number: Any = data
    if type(bits) is not int or type(number) is ShardedTensor:
        return key_of(bind(_DERIVED, (number, bits, _FOLDED), ()))
    return _keys(key, "fold_in", _FOLDED + _word(data, "fold_in", "data"), 1)[0]
