"""The leaves of a tree that a manifest holds itself: numbers, text, None, random keys and the states of generators.

Each is an object of JSON with one entry, the name of its kind. Reading one gives exactly the value that was written, to
the bit, and calls nothing that the text names but the constructors listed here.
"""

from __future__ import annotations

import base64
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shardtensor.errors import ArgumentError, ArgumentTypeError, ShardTensorError, type_text
from shardtensor.files.metadata import Object, brief
from shardtensor.files.zarr_types import dtype_of, name_of
from shardtensor.functions.random.random_keys import Key
from shardtensor.tensor.pytree import hint_to_register

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


class Kind(NamedTuple):
    """How the values of a type are stored.

    Attributes:
        type: the type of the values; those of subclasses are not stored, because they would come back as another type.
        write: returns what JSON stores of a value.
        read: returns the value; it raises one of the errors that the function `read` below catches if there is none.
    """

    type: type
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _float_text(x: float) -> str:
    return repr(x) if x == x else f"nan:{np.float64(x).view(np.uint64):016x}"


def _float_of(text: str) -> float:
    if text.startswith("nan:"):
        x = float(np.uint64(int(text[4:], 16)).view(np.float64))
        if not math.isnan(x):
            raise ValueError(text)
        return x
    return float(text)


def _complex_of(parts: Any) -> complex:
    real, imag = parts
    return complex(_float_of(real), _float_of(imag))


def _base64(x: bytes) -> str:
    return base64.b64encode(x).decode()


def _bytes_of(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _checked(kind: type) -> Callable[[Any], Any]:
    """Returns a function that returns a value of JSON, which has to have a type."""

    def check(x: Any) -> Any:
        if type(x) is not kind:
            raise TypeError(f"{x!r:.40}")
        return x

    return check


def _words(x: Any) -> Any:
    """Returns the state of a bit generator with lists in place of arrays."""
    if isinstance(x, dict):
        return {name: _words(value) for name, value in x.items()}
    if isinstance(x, np.ndarray):
        return {"dtype": x.dtype.name, "words": x.tolist()}
    if isinstance(x, float):  # Of RandomState: the second of two numbers that are drawn at once.
        return _float_text(x)
    return x if isinstance(x, str) else int(x)


def _state_of(x: Any) -> Any:
    if isinstance(x, dict) and x.keys() == {"dtype", "words"}:
        if x["dtype"] not in ("uint32", "uint64"):
            raise ValueError(x["dtype"])
        return np.array(x["words"], x["dtype"])
    return {name: _state_of(value) for name, value in x.items()} if isinstance(x, dict) else x


_LAST_POSITIONS = {"MT19937": 624, "Philox": 4}
"""The positions in the words of states, which NumPy does not check: from others it would read other memory."""


def _check_state(generator: Any, record: Any) -> None:
    """Checks that a bit generator or RandomState has the state that was stored.

    Raises:
        ValueError: it has not, or draws would read memory that is not its own.
    """
    state = generator.get_state(legacy=False) if isinstance(generator, np.random.RandomState) else generator.state
    words = _words(state)
    position = words["buffer_pos"] if "buffer_pos" in words else words["state"].get("pos", 0)
    if words != record or not 0 <= position <= _LAST_POSITIONS.get(words["bit_generator"], 0):
        raise ValueError("it is no state of the generator")


def _written_generator(x: np.random.Generator) -> Any:
    seeds: Any = x.bit_generator.seed_seq
    if type(x.bit_generator).__name__ not in _BIT_GENERATORS or type(seeds) is not np.random.SeedSequence:
        raise ArgumentTypeError(f"a generator of {type(x.bit_generator).__name__}, which is not one of NumPy's")
    entropy = seeds.entropy
    return {
        "state": _words(x.bit_generator.state),
        "seeds": {
            "entropy": entropy if entropy is None or isinstance(entropy, int) else [int(n) for n in entropy],
            "spawn_key": list(seeds.spawn_key), "pool_size": seeds.pool_size,
            "n_children_spawned": seeds.n_children_spawned,
        },
    }  # fmt: skip


def _read_generator(record: Any) -> np.random.Generator:
    name = record["state"]["bit_generator"]
    if name not in _BIT_GENERATORS:
        raise ValueError(name)
    seeds = record["seeds"]
    if type(seeds["pool_size"]) is not int or not 4 <= seeds["pool_size"] <= 1 << 16:  # Its memory.
        raise ValueError(seeds["pool_size"])
    bits = getattr(np.random, name)(np.random.SeedSequence(**seeds))
    bits.state = _state_of(record["state"])
    _check_state(bits, record["state"])
    return np.random.Generator(bits)


def _read_random_state(record: Any) -> np.random.RandomState:
    state = np.random.RandomState(0)
    state.set_state({**_state_of(record), "gauss": _float_of(record["gauss"])})
    _check_state(state, record)
    return state


def _read_python_random(record: Any) -> random.Random:
    version, words, gauss = record
    generator = random.Random(0)
    generator.setstate((version, tuple(words), None if gauss is None else _float_of(gauss)))
    return generator


def _written_python_random(x: random.Random) -> Any:
    version, words, gauss = x.getstate()
    return [version, list(words), None if gauss is None else _float_text(gauss)]


def _read_scalar(record: Any) -> Any:
    dtype = dtype_of(record["data_type"], record["attributes"], "the dtype of a scalar")
    content = _bytes_of(record["bytes"])
    if len(content) != dtype.itemsize:
        raise ValueError("its length is not that of the dtype")
    return np.frombuffer(content, dtype)[0]


def _written_scalar(x: np.generic) -> Any:
    data_type, attributes = name_of(x.dtype)
    return {"data_type": data_type, "attributes": attributes, "bytes": _base64(np.asarray(x).tobytes())}


KINDS = {
    "none": Kind(type(None), lambda x: True, lambda x: None),
    "bool": Kind(bool, bool, _checked(bool)),
    "int": Kind(int, hex, lambda x: int(_checked(str)(x), 16)),  # Python reads long decimal numbers slowly, or not.
    "float": Kind(float, _float_text, _float_of),
    "complex": Kind(
        complex, lambda x: [_float_text(x.real), _float_text(x.imag)], _complex_of
    ),
    "text": Kind(str, str, _checked(str)),
    "bytes": Kind(bytes, _base64, _bytes_of),
    "key": Kind(Key, lambda x: [hex(x.seed), hex(x.stream)], lambda x: Key(int(x[0], 16), int(x[1], 16))),
    "generator": Kind(np.random.Generator, _written_generator, _read_generator),
    "random_state": Kind(
        np.random.RandomState, lambda x: _words(x.get_state(legacy=False)), _read_random_state
    ),
    "python_random": Kind(random.Random, _written_python_random, _read_python_random),
}  # fmt: skip
"""The kinds of values, by the names that manifests have. Scalars of NumPy are `scalar`, whatever their type."""

_OF_TYPE = {kind.type: name for name, kind in KINDS.items()}


def written(x: Any) -> Object:
    """Returns the object of JSON that stores a value.

    Raises:
        ArgumentTypeError: values of its type are not stored.
    """
    if isinstance(x, np.generic):
        return {"scalar": _written_scalar(x)}
    name = _OF_TYPE.get(type(x))
    if name is None:
        raise ArgumentTypeError(
            f"it is {type_text(x)}, which is not stored; wanted a tensor, an array of NumPy, a number, text, bytes, "
            f"None, a key of st.random, or a generator of NumPy or Python{_way_out(x)}"
        )
    return {name: KINDS[name].write(x)}


def _way_out(x: Any) -> str:
    hint = hint_to_register(x)
    if hint:
        return hint
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(x, kind):
            return f"; {kind.__name__}(x) is one"
    return "; st.asarray(x) makes a tensor of it" if hasattr(x, "__dlpack__") or hasattr(x, "__array__") else ""


def read(record: Object, name: str) -> Any:
    """Returns the value that an object of JSON stores.

    Args:
        record: the object.
        name: the leaf, for errors.

    Raises:
        ArgumentError: it is broken.
    """
    ((kind, content),) = record.items()
    try:
        return _read_scalar(content) if kind == "scalar" else KINDS[kind].read(content)
    except (
        ValueError,
        TypeError,
        LookupError,
        OverflowError,
        AttributeError,
        RecursionError,
        ShardTensorError,
    ) as error:
        raise ArgumentError(f"{name}: its {kind} {brief(content)} is broken ({error})") from None


def is_value(record: Object) -> bool:
    """Whether an object of JSON has the form of a value."""
    return len(record) == 1 and next(iter(record)) in (*KINDS, "scalar")


def type_of(record: Object) -> str:
    """Returns the name of the type of the value that an object of JSON stores."""
    ((kind, content),) = record.items()
    return f"scalar of dtype {_dtype_of(content)}" if kind == "scalar" else KINDS[kind].type.__name__


def _dtype_of(content: Any) -> Any:
    """Returns the dtype of a scalar, as text; what the manifest has, if it is broken."""
    try:
        return dtype_of(content["data_type"], content["attributes"], "a scalar")
    except (KeyError, TypeError, ArgumentError, ArgumentTypeError):
        return brief(content)
