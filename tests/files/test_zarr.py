"""Arrays of zarr v3: what is written is read, also by other libraries, and the other way round; damage is an error."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardtensor.backend.small_floats import SMALL_FLOATS, small_float
from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor.files.checksums import crc32c
from shardtensor.files.chunk_grids import Box, plan_grid
from shardtensor.files.metadata import array_metadata
from shardtensor.files.zarr import ZarrArray, children, open_child, open_node, write_array, write_chunk, write_group
from tests.draws import drawn

DTYPES = [
    "bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "g", "G", "M8[s]", "M8[10ns]",
    "m8[D]", "m8", *SMALL_FLOATS,
]  # fmt: skip


def dtype_named(name: str) -> np.dtype[Any]:
    return small_float(name) if name in SMALL_FLOATS else np.dtype(name)


def elements(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 0) -> np.ndarray[Any, Any]:
    """Any bits, but those of a bool."""
    rng = np.random.default_rng(seed)
    count = math.prod(shape)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "fc" and dtype.itemsize in (12, 16, 24, 32):
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype).reshape(shape)


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


def write(folder: Path, x: np.ndarray[Any, Any], chunk: tuple[int, ...], inner: tuple[int, ...]) -> list[Any]:
    metadata = array_metadata(x.shape, x.dtype, chunk, inner, {"of": "tests"})
    files = [write_array(str(folder), metadata)]
    box = whole(x.shape)
    for index in ZarrArray(str(folder), metadata).chunks():
        files.append(write_chunk(str(folder), metadata, index, [(box, x)]))
    return files


def opened(folder: Path) -> ZarrArray:
    array = open_node(str(folder))
    assert isinstance(array, ZarrArray)
    return array


def same_bits(x: Any, y: Any) -> bool:
    x, y = np.asarray(x), np.asarray(y)
    return bool(x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes())


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    ("shape", "chunk", "inner"),
    [((5, 7), (4, 6), (2, 3)), ((), (), ()), ((0, 3), (1, 3), (1, 3)), ((13,), (13,), (13,)), ((3, 2, 5), (2, 2, 6), (1, 2, 3))],
)  # fmt: skip
def test_every_dtype_comes_back(
    name: str, shape: tuple[int, ...], chunk: tuple[int, ...], inner: tuple[int, ...], tmp_path: Path
) -> None:
    x = elements(shape, dtype_named(name))
    files = write(tmp_path / "x", x, chunk, inner)
    array = opened(tmp_path / "x")
    assert same_bits(array.read(), x)
    assert array.metadata.attributes["of"] == "tests"
    for file in files:
        content = (tmp_path / "x" / file.key).read_bytes()
        assert len(content) == file.nbytes
        assert file.key != "zarr.json" or crc32c(content) == file.crc32c
    known = dataclasses.replace(array, sums={file.key: file.crc32c for file in files})
    assert same_bits(known.read(), x)
    other = dataclasses.replace(array, sums={file.key: file.crc32c ^ 1 for file in files})
    for index in array.chunks():
        known.verify(index)
        with pytest.raises(ArgumentError, match="it is not the file that was written"):
            other.verify(index)


@pytest.mark.parametrize("seed", range(drawn(200, fast=20)))
def test_any_box_of_arrays_written_by_several_owners(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    nd = int(rng.integers(1, 4))
    shape = tuple(rng.integers(1, 12, nd).tolist())
    x = elements(shape, np.dtype("f4"), seed)
    cuts = [sorted({0, n, *rng.integers(0, n + 1, 2).tolist()}) for n in shape]
    held = list(itertools.product(*(itertools.pairwise(c) for c in cuts)))
    grid = plan_grid(shape, 1 << 21, held, seed)
    metadata = array_metadata(shape, x.dtype, grid.chunk, grid.inner)
    write_array(str(tmp_path), metadata)
    for index, pieces in grid.pieces.items():
        own = [(p.box, np.copy(x[tuple(slice(*b) for b in p.box)])) for p in pieces]
        write_chunk(str(tmp_path), metadata, index, own)
    array = opened(tmp_path)
    for _ in range(5):
        box = tuple(tuple(sorted(rng.integers(0, n + 1, 2).tolist())) for n in shape)
        out = np.empty([e - b for b, e in box], "f4")
        part = x[tuple(slice(*b) for b in box)]
        assert same_bits(array.read(box), part)
        assert array.read(box, out) is out
        assert same_bits(out, part)


def test_inner_chunks_that_are_contiguous_are_neither_copied_on_write_nor_on_read(tmp_path: Path) -> None:
    x = np.zeros((64, 1 << 16), np.float32)
    out = np.empty_like(x)
    tracemalloc.start()
    write(tmp_path, x, (64, 1 << 16), (16, 1 << 16))
    opened(tmp_path).read(out=out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * x.nbytes / 4


def test_pieces_that_lack_elements_leave_no_file(tmp_path: Path) -> None:
    metadata = array_metadata((4,), np.dtype("f4"), (4,), (2,))
    for boxes in ([(0, 3)], [], [(0, 2), (1, 3)], [(0, 4), (0, 4)], [(0, 3), (2, 4)]):
        with pytest.raises(ArgumentError, match="each element of"):
            write_chunk(str(tmp_path), metadata, (0,), [((b,), np.zeros(b[1] - b[0], "f4")) for b in boxes])
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_groups(tmp_path: Path) -> None:
    write_group(str(tmp_path), {"step": 3})
    write_group(str(tmp_path / "a"), {})
    x = np.arange(6.0)
    write(tmp_path / "a" / "x", x, (3,), (3,))
    write(tmp_path / "b", x, (6,), (2,))
    (tmp_path / "link").symlink_to(tmp_path / "b")
    assert open_node(str(tmp_path)) == {"step": 3}
    assert children(str(tmp_path)) == ["a", "b"]
    child = open_child(str(tmp_path), "a/x")
    assert isinstance(child, ZarrArray)
    assert same_bits(child.read(), x)
    for path in ("../a", "a/../b", "/a", "a//x", ".", "", "a\0", "link", "__a", "zarr.json", "x" * 300):
        with pytest.raises(ArgumentError):
            open_child(str(tmp_path), path)


@pytest.mark.parametrize("seed", range(drawn(200, fast=20)))
def test_a_flipped_bit_of_a_chunk_is_an_error_that_names_the_file(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    write(tmp_path, elements((5, 6), np.dtype("f4")), (4, 6), (2, 3))
    file = tmp_path / "c" / str(rng.integers(2)) / "0"
    content = bytearray(file.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    file.write_bytes(content)
    array = opened(tmp_path)
    index = (int(file.parent.name), 0)
    for read in (array.read, lambda: array.verify(index)):
        with pytest.raises(ArgumentError) as caught:
            read()
        assert str(file) in str(caught.value)


def test_truncated_missing_and_linked_files(tmp_path: Path) -> None:
    x = np.arange(40, dtype="i4").reshape(8, 5)
    write(tmp_path, x, (4, 5), (2, 5))
    array = opened(tmp_path)
    file = tmp_path / "c" / "1" / "0"
    content = file.read_bytes()
    for size in (0, 3, 35, 36, 60, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(ArgumentError, match=str(file)):
            array.read()
        assert same_bits(array.read(((0, 4), (0, 5))), x[:4])
    file.unlink()
    with pytest.raises(ArgumentError, match="is missing"):
        array.read()
    assert array.read(filled=True)[4:].any() == 0
    (tmp_path / "other").write_bytes(content)
    file.symlink_to(tmp_path / "other")
    with pytest.raises(ArgumentError, match="is a link"):
        array.read()
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ArgumentError, match="not a regular file"):
        array.read()


GOOD: dict[str, Any] = {
    "zarr_format": 3, "node_type": "array", "shape": [4, 4], "data_type": "float32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 4]}},
    "chunk_key_encoding": {"name": "default"}, "fill_value": 0.0,
    "codecs": [{"name": "sharding_indexed", "configuration": {
        "chunk_shape": [1, 4], "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, "crc32c"],
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]}}],
}  # fmt: skip


def grid_of(chunk: Any, name: Any = "regular") -> Any:
    return {"name": name, "configuration": {"chunk_shape": chunk}}


def shard_of(inner: Any, codecs: Any = None, index: Any = None, **others: Any) -> Any:
    first = GOOD["codecs"][0]["configuration"]
    settings = {
        "chunk_shape": inner,
        "codecs": codecs or first["codecs"],
        "index_codecs": index or first["index_codecs"],
    }
    return [{"name": "sharding_indexed", "configuration": settings | others}]


HOSTILE: list[dict[str, Any]] = [
    *({"shape": s} for s in (None, 4, [4], [4, -4], [4, True], [4, 4.0], ["4", 4], [1 << 62, 1 << 62], [0, 1 << 63],
                             [1 << 70, 4], [1] * 65, [[4], 4], [1 << 62, 0])),
    *({"chunk_grid": g} for g in (None, "regular", grid_of([2]), grid_of([0, 4]), grid_of([-2, 4]), grid_of([3, 4], "x"),
                                  grid_of([1 << 62, 1 << 62]), grid_of([1 << 62, 4]), grid_of(None), {"name": 3}, [])),
    *({"codecs": c} for c in (None, [], {}, ["zstd"], ["bytes"], ["bytes", "zstd"], ["crc32c"], [3], [[]], ["bytes"] * 99,
                              shard_of([2, 3]), shard_of([0, 4]), shard_of([1]), shard_of([1, 4], ["zstd"]),
                              shard_of([1, 4], shard_of([1, 4])), shard_of([1, 4], index=["crc32c"]),
                              shard_of([1, 4], index_location="middle"), shard_of([4, 8]),
                              [{"name": "bytes", "configuration": {"endian": "middle"}}],
                              [{"name": "bytes", "configuration": []}])),
    *({"data_type": d} for d in (None, "O", "object", "string", "|S8", "r128", "int4", {"name": "struct"}, 3, [],
                                 {"name": "numpy.datetime64"}, {"name": "numpy.datetime64", "configuration": {"unit": "s; x", "scale_factor": 1}},
                                 {"name": "numpy.datetime64", "configuration": {"unit": "s", "scale_factor": 0}})),
    *({"fill_value": f} for f in (None, "x", [], {}, True, "0x1", "0x" + "f" * 99, [0, 0])),
    *({"chunk_key_encoding": k} for k in (None, "x", {"name": "default", "configuration": {"separator": "../"}}, {})),
    {"zarr_format": 2}, {"zarr_format": True}, {"node_type": "x"}, {"attributes": []}, {"surprise": 1},
    {"surprise": {"must_understand": True}}, {"storage_transformers": [1]},
]  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_metadata(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_text(json.dumps(GOOD | change))
    with pytest.raises((ArgumentError, ArgumentTypeError), match=r"zarr\.json") as caught:
        open_node(str(tmp_path))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("seed", range(drawn(3000, fast=100)))
def test_metadata_with_changed_bytes_is_read_or_refused(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    write(tmp_path, np.arange(20.0).reshape(4, 5), (2, 5), (1, 5))
    text = bytearray((tmp_path / "zarr.json").read_bytes())
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(len(text)))
        text[at : at + int(rng.integers(0, 3))] = rng.choice(list(b'0123456789{}[],:"-.e')).tobytes()[:1]
    (tmp_path / "zarr.json").write_bytes(text)
    with contextlib.suppress(ArgumentError, ArgumentTypeError):
        node = open_node(str(tmp_path))
        if isinstance(node, ZarrArray):
            node.read()


def test_metadata_that_is_no_json_too_large_nested_or_a_link(tmp_path: Path) -> None:
    file = tmp_path / "zarr.json"
    for text in ("", "{", "[]", "3", "[" * 200_000, '{"a":' * 200_000, "1" * 5000, '{"zarr_format": 3}', "\xff"):
        file.write_text(text, "latin1")
        with pytest.raises(ArgumentError, match=r"zarr\.json"):
            open_node(str(tmp_path))
    with open(file, "wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ArgumentError, match="wanted at most"):
        open_node(str(tmp_path))
    file.unlink()
    (tmp_path / "x").write_text(json.dumps(GOOD))
    file.symlink_to("x")
    with pytest.raises(ArgumentError, match="is a link"):
        open_node(str(tmp_path))
    (tmp_path / "ok").mkdir()
    (tmp_path / "ok" / "zarr.json").write_text(json.dumps(GOOD | {"extension": {"must_understand": False}}))
    assert opened(tmp_path / "ok").metadata.shape == (4, 4)


def test_sizes_that_lie_need_no_memory(tmp_path: Path) -> None:
    large = 1 << 36
    cases = [
        {"shape": [large], "chunk_grid": grid_of([large]), "codecs": shard_of([large])},
        {"shape": [large], "chunk_grid": grid_of([large]), "codecs": shard_of([1])},
        {"shape": [large], "chunk_grid": grid_of([1]), "codecs": shard_of([1])},
    ]
    tracemalloc.start()
    for number, change in enumerate(cases):
        folder = tmp_path / str(number)
        (folder / "c").mkdir(parents=True)
        (folder / "zarr.json").write_text(json.dumps(GOOD | change))
        (folder / "c" / "0").write_bytes(bytes(100))
        with pytest.raises(ArgumentError, match=r"c/0 is (truncated|damaged)|c/1 is missing"):
            opened(folder).read()
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


# -- other libraries -------------------------------------------------------------------------------

SHAPES = [((5, 7), (4, 6), (2, 3)), ((0, 3), (1, 3), (1, 3)), ((), (), ()), ((13,), (13,), (13,))]


@pytest.mark.parametrize("name", [d for d in DTYPES if d not in ("g", "G", *SMALL_FLOATS)])
def test_zarr_python_reads_and_writes_what_we_do(name: str, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    for number, (shape, chunk, inner) in enumerate(SHAPES):
        x = elements(shape, dtype_named(name), number)
        write(tmp_path / f"{number}", x, chunk, inner)
        assert same_bits(zarr.open_array(tmp_path / f"{number}", mode="r")[...], x)
        for shards in (chunk, None) if shape else (None,):
            path = tmp_path / f"{number}_{shards is None}"
            theirs = zarr.create_array(path, shape=shape, dtype=x.dtype, chunks=inner, shards=shards, compressors=None)
            theirs[...] = x
            assert same_bits(opened(path).read(filled=True), x)


@pytest.mark.parametrize("name", ["bool", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16", *SMALL_FLOATS])
def test_tensorstore_reads_and_writes_what_we_do(name: str, tmp_path: Path) -> None:
    ts = pytest.importorskip("tensorstore")
    dtype = dtype_named(name)
    if dtype.name == "float8_e4m3":
        pytest.skip("tensorstore 0.1.86 does not know it")
    for number, (shape, chunk, inner) in enumerate(SHAPES):
        x = elements(shape, dtype, number)
        write(tmp_path / f"{number}", x, chunk, inner)
        store = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / f"{number}")}}
        assert same_bits(ts.open(store).result().read().result(), x)
        for endian in ("little", "big"):
            path = tmp_path / f"{number}_{endian}"
            sharding = {
                "chunk_shape": inner, "index_location": "start",
                "codecs": [{"name": "bytes", "configuration": {"endian": endian}}, {"name": "crc32c"}],
                "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            }  # fmt: skip
            metadata = {
                "chunk_grid": grid_of(chunk), "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
                "chunk_key_encoding": {"name": "v2"},
            }  # fmt: skip
            store = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}, "metadata": metadata}
            theirs = ts.open(store, dtype=ts.dtype(dtype), shape=shape, create=True).result()
            theirs[...] = x
            assert same_bits(opened(path).read(filled=True), x)


@pytest.mark.parametrize("name", ["g", "G"])
def test_other_libraries_open_a_longdouble_as_bytes(name: str, tmp_path: Path) -> None:
    ts = pytest.importorskip("tensorstore")
    x = elements((5,), np.dtype(name))
    write(tmp_path, x, (4,), (2,))
    store = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path)}}
    theirs = ts.open(store).result()
    assert (theirs.shape, theirs.dtype.name) == ((5, x.dtype.itemsize), "byte")


def test_a_longdouble_of_another_machine_is_refused(tmp_path: Path) -> None:
    write(tmp_path, elements((5,), np.dtype("g")), (4,), (2,))
    node = json.loads((tmp_path / "zarr.json").read_text())
    node["attributes"]["shardtensor_raw"]["mantissa"] += 1
    (tmp_path / "zarr.json").write_text(json.dumps(node))
    with pytest.raises(ArgumentTypeError, match="a format that this machine does not have"):
        open_node(str(tmp_path))


def test_other_libraries_see_a_flipped_bit(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    write(tmp_path, np.arange(8.0), (8,), (4,))
    file = tmp_path / "c" / "0"
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        zarr.open_array(tmp_path, mode="r")[...]
