"""The metadata of zarr v3: the content of ``zarr.json``, of arrays and groups, written and checked.

Arrays are written with one codec, ``sharding_indexed``: a file for each outer chunk, in it the inner chunks, each
followed by its CRC-32C, and at its end their offsets and sizes with a CRC-32C. An array without dimensions is its
element with a CRC-32C, because zarr-python does not read such shards. Arrays of other programs are read if
their chunks are not compressed: sharded or not, with checksums or not, in either byte order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor.files.chunk_grids import Shape
from shardtensor.files.zarr_types import DType, dtype_of, fill_of, name_of, zero_of
from shardtensor.host.summation_order import HostArray
from shardtensor.host.units import counted

MOST = 1 << 24
"""The bytes that a ``zarr.json`` has at most."""

HOLE = (1 << 64) - 1
"""The offset and the size of an inner chunk that a file does not have."""

DIMENSIONS = 64
"""The dimensions that NumPy's arrays have at most."""

LARGEST = (1 << 63) - 1
"""The largest number of bytes that an array may have, with its padding."""

_ARRAY = {"shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs"}
_OTHER = {"zarr_format", "node_type", "attributes", "dimension_names", "storage_transformers", "consolidated_metadata"}


@dataclass(frozen=True)
class Chain:
    """How numbers become bytes.

    Attributes:
        big: whether the most significant byte is the first one.
        checked: whether a CRC-32C follows.
    """

    big: bool = False
    checked: bool = True


@dataclass(frozen=True)
class ArrayMetadata:
    """The metadata of an array.

    Attributes:
        shape: the shape.
        dtype: the dtype, in the byte order of the machine.
        chunk: the shape of the outer chunks.
        inner: the shape of the inner chunks.
        fill: the element of holes, as an array without dimensions.
        elements: how an inner chunk is stored.
        index: how the offsets and sizes of inner chunks are stored; None where an outer chunk is one inner chunk and
            has no index.
        index_first: whether the index is at the begin of a file.
        prefix: the begin of the keys of chunks.
        separator: what is between the numbers of a key.
        attributes: those of the array.
    """

    shape: Shape
    dtype: DType
    chunk: Shape
    inner: Shape
    fill: HostArray = field(compare=False)
    elements: Chain = Chain()
    index: Chain | None = Chain()
    index_first: bool = False
    prefix: str = "c/"
    separator: str = "/"
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def key(self, index: Shape) -> str:
        """Returns the path of the file of an outer chunk, below the folder of the array."""
        if not index:
            return self.prefix.rstrip("/.") or "0"
        return self.prefix + self.separator.join(map(str, index))

    @property
    def per_chunk(self) -> Shape:
        """The number of inner chunks of an outer one in each dimension."""
        return tuple(c // i for c, i in zip(self.chunk, self.inner, strict=True))

    @property
    def inner_nbytes(self) -> int:
        """The bytes of an inner chunk, without its checksum."""
        return math.prod(self.inner) * self.dtype.itemsize

    @property
    def index_nbytes(self) -> int:
        """The bytes of the index of an outer chunk, with its checksum."""
        return 0 if self.index is None else 16 * math.prod(self.per_chunk) + 4 * self.index.checked


Object = dict[str, Any]
"""An object of JSON."""

GroupMetadata = Object
"""The attributes of a group."""


def array_metadata(
    shape: Shape, dtype: DType, chunk: Shape, inner: Shape, attributes: Mapping[str, Any] | None = None
) -> ArrayMetadata:
    """Returns the metadata of an array that is written, cut as `shardtensor.files.chunk_grids.plan_grid` says.

    Raises:
        ArgumentTypeError: its dtype cannot be stored.
    """
    _, needed = name_of(dtype)
    dtype = dtype.newbyteorder("=")
    fill = fill_of(zero_of(dtype), dtype, "the array")
    index = Chain() if shape else None
    return ArrayMetadata(shape, dtype, chunk, inner, fill, index=index, attributes={**(attributes or {}), **needed})


def text_of_array(metadata: ArrayMetadata) -> bytes:
    """Returns the ``zarr.json`` of an array that is written."""
    data_type, _ = name_of(metadata.dtype)
    one_byte = metadata.dtype.itemsize == 1
    elements = [{"name": "bytes"} if one_byte else _LITTLE, {"name": "crc32c"}]
    sharding = {
        "chunk_shape": metadata.inner, "codecs": elements, "index_codecs": [_LITTLE, {"name": "crc32c"}],
        "index_location": "end",
    }  # fmt: skip
    return _text({
        "zarr_format": 3, "node_type": "array", "shape": metadata.shape, "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": metadata.chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": zero_of(metadata.dtype),
        "codecs": elements if metadata.index is None else [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": dict(metadata.attributes), "storage_transformers": [],
    })  # fmt: skip


def text_of_group(attributes: Mapping[str, Any]) -> bytes:
    """Returns the ``zarr.json`` of a group."""
    return _text({"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)})


_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


def _text(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, allow_nan=False).encode()


# -- reading ---------------------------------------------------------------------------------------


def parse_json(content: bytes, name: str) -> Any:
    """Returns what a text of JSON contains.

    Raises:
        ArgumentError: it is broken, or nested more deeply than Python's parser reads.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError is also that of numbers with too many digits.
        raise ArgumentError(f"{name} is not valid JSON: {type(error).__name__}: {str(error)[:200]}") from None


def parse(content: bytes, name: str) -> ArrayMetadata | GroupMetadata:
    """Returns the metadata in a ``zarr.json``, whose every number has been checked.

    Args:
        content: its text.
        name: its path, for errors.

    Raises:
        ArgumentError: it is broken.
        ArgumentTypeError: it describes what tensors do not have, or codecs that are not read.
    """
    try:
        return _parse(content, name)
    except RecursionError:
        raise ArgumentError(f"{name} is broken: it is nested too deeply") from None


def _parse(content: bytes, name: str) -> ArrayMetadata | GroupMetadata:
    node = _object(parse_json(content, name), "it", name)
    if type(node.get("zarr_format")) is not int or node["zarr_format"] != 3:
        raise ArgumentError(f"{name}: zarr_format is {brief(node.get('zarr_format'))}; wanted 3")
    attributes = _object(node.get("attributes", {}), "attributes", name)
    kind = node.get("node_type")
    if kind not in ("array", "group"):
        raise ArgumentError(f"{name}: node_type is {brief(kind)}; wanted 'array' or 'group'")
    for key, value in node.items():
        known = key in _OTHER or (kind == "array" and key in _ARRAY)
        if not known and not (isinstance(value, dict) and value.get("must_understand") is False):
            raise ArgumentTypeError(f"{name}: its entry {brief(key)} is an extension that is not read")
    if kind == "group":
        return attributes
    if missing := _ARRAY - node.keys():
        raise ArgumentError(f"{name} is broken: it has no {', '.join(sorted(missing))}")
    return _array(node, attributes, name)


def _array(node: dict[str, Any], attributes: dict[str, Any], name: str) -> ArrayMetadata:
    if node.get("storage_transformers"):
        raise ArgumentTypeError(f"{name}: its storage_transformers are an extension that is not read")
    shape = shape_of(node["shape"], "shape", 0, name)
    dtype = dtype_of(node["data_type"], attributes, name)
    grid, settings = _named(node["chunk_grid"], "chunk_grid", name)
    if grid != "regular":
        raise ArgumentTypeError(f"{name}: its chunk_grid is {brief(grid)}; only 'regular' is read")
    chunk = shape_of(settings.get("chunk_shape"), "chunk_shape", 1, name)
    if len(chunk) != len(shape):
        raise ArgumentError(f"{name} is broken: chunks of shape {chunk} of an array of shape {shape}")
    codecs = _codecs(node["codecs"], "codecs", name)
    inner, index, index_first = chunk, None, False
    if [codec for codec, _ in codecs] == ["sharding_indexed"]:
        ((_, settings),) = codecs
        inner = shape_of(settings.get("chunk_shape"), "the chunk_shape of its shards", 1, name)
        if len(inner) != len(chunk) or any(c % i for c, i in zip(chunk, inner, strict=True)):
            raise ArgumentError(f"{name} is broken: inner chunks of shape {inner} in chunks of shape {chunk}")
        codecs = _codecs(settings.get("codecs"), "the codecs of its shards", name)
        index = _chain(_codecs(settings.get("index_codecs"), "index_codecs", name), 8, name)
        location = settings.get("index_location", "end")
        if location not in ("start", "end"):
            raise ArgumentError(f"{name} is broken: its index_location is {brief(location)}")
        index_first = location == "start"
    elements = _chain(codecs, dtype.itemsize, name)
    padded = math.prod(-(-n // c) * c for n, c in zip(shape, chunk, strict=True))
    each = math.prod(max(n, 1) for n in shape)  # A size of zero hides others, which NumPy does not accept.
    per_chunk = math.prod(c // i for c, i in zip(chunk, inner, strict=True))
    if max(padded, each, math.prod(chunk)) * dtype.itemsize > LARGEST or per_chunk * 32 > LARGEST:
        raise ArgumentError(f"{name} is broken: {dtype} of shape {shape} in chunks of {chunk} is too large")
    prefix, separator = _keys(node["chunk_key_encoding"], name)
    fill = fill_of(node["fill_value"], dtype, name)
    return ArrayMetadata(shape, dtype, chunk, inner, fill, elements, index, index_first, prefix, separator, attributes)


def _keys(encoding: Any, name: str) -> tuple[str, str]:
    """Returns the begin of the keys of chunks and their separator."""
    kind, settings = _named(encoding, "chunk_key_encoding", name)
    if kind not in ("default", "v2"):
        raise ArgumentTypeError(f"{name}: its chunk_key_encoding is {brief(kind)}; only 'default' and 'v2' are read")
    separator = settings.get("separator", "/" if kind == "default" else ".")
    if separator not in ("/", "."):
        raise ArgumentError(f"{name} is broken: the separator of its chunk keys is {brief(separator)}")
    return f"c{separator}" if kind == "default" else "", separator


def _chain(codecs: list[tuple[str, dict[str, Any]]], itemsize: int, name: str) -> Chain:
    """Returns the byte order, and whether there are checksums."""
    names = [codec for codec, _ in codecs]
    if names not in (["bytes"], ["bytes", "crc32c"]):
        raise ArgumentTypeError(
            f"{name}: the codecs {brief(names)} are not read, only 'bytes' and 'crc32c', in shards or not; "
            "st.asarray(zarr.open(path)[...]) reads the array with the library zarr"
        )
    endian = codecs[0][1].get("endian", "little" if itemsize == 1 else None)
    if endian not in ("little", "big"):
        raise ArgumentError(f"{name} is broken: the endian of its codec 'bytes' is {brief(endian)}")
    return Chain(endian == "big", len(names) == 2)


def _codecs(value: Any, what: str, name: str) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(value, list) or len(value) > 16:
        raise ArgumentError(f"{name} is broken: {what} is {brief(value)}; wanted a list of codecs")
    return [_named(codec, what, name) for codec in value]


def _named(value: Any, what: str, name: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the configuration of an extension."""
    if isinstance(value, str):
        return value, {}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ArgumentError(f"{name} is broken: {what} has {brief(value)}; wanted an object with a name")
    return value["name"], _object(value.get("configuration", {}), f"the configuration of {what}", name)


def _object(value: Any, what: str, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ArgumentError(f"{name} is broken: {what} is {brief(value)}; wanted an object")
    return value


def shape_of(value: Any, what: str, least: int, name: str) -> Shape:
    """Returns the shape that a list of JSON is.

    Args:
        value: the list.
        what: what it is, for errors.
        least: the smallest size that is accepted.
        name: the name of the file, for errors.

    Raises:
        ArgumentError: it is no list of such sizes.
    """
    sizes = isinstance(value, list) and len(value) <= DIMENSIONS
    if not sizes or not all(type(n) is int and least <= n <= LARGEST for n in value):
        raise ArgumentError(
            f"{name} is broken: {what} is {brief(value)}; wanted at most {DIMENSIONS} integers, from {least}"
        )
    return tuple(value)


def brief(value: Any) -> str:
    """Returns a short text of a value of JSON, which may be large or nested."""
    if isinstance(value, (dict, list)):
        if len(value) > 8 or any(isinstance(v, (dict, list)) for v in value):
            return (
                f"{'an object' if isinstance(value, dict) else 'a list'} of {counted(len(value), 'entry', 'entries')}"
            )
        return "[" + ", ".join(map(brief, value)) + "]"
    text = hex(value) if type(value) is int and value.bit_length() > 200 else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
