"""Boxes that several threads read, by C and by NumPy, on both sides of all sizes: their elements, errors and memory."""

from __future__ import annotations

import errno
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.errors import ArgumentError
from shardtensor.files import atomic, box_reader, paths, row_reads, zarr
from shardtensor.files.chunk_grids import Box, chunks_of, count_of_chunks
from shardtensor.files.metadata import Chain, array_metadata
from shardtensor.files.zarr import ZarrArray, write_array, write_chunk
from tests.draws import drawn

LOW: dict[Any, dict[str, int]] = {
    atomic: {"_BEGUN": 16, "_BLOCK": 24}, box_reader: {"_OPEN": 2, "_TASK": 64, "_SLAB": 48}, row_reads: {"_CACHED": 44},
    paths: {"_BLOCK": 20}, zarr: {"_AHEAD": 1, "_SLAB": 48},
}  # fmt: skip


@pytest.fixture(params=["C", "NumPy"])
def reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "NumPy":
        monkeypatch.setattr(row_reads, "_compiled", lambda: None)
    elif row_reads.find_compiler() is None:
        pytest.skip("there is no C compiler")
    return str(request.param)


@pytest.fixture(params=["none", "low"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in LOW.items() if request.param == "low" else ():
        for name, value in names.items():
            assert isinstance(getattr(module, name), int)
            monkeypatch.setattr(module, name, value)


def stored(folder: Path, x: np.ndarray[Any, Any], chunk: tuple[int, ...], inner: tuple[int, ...]) -> ZarrArray:
    metadata = array_metadata(x.shape, x.dtype, chunk, inner)
    write_array(str(folder), metadata)
    array = ZarrArray(str(folder), metadata)
    for index in array.chunks():
        write_chunk(str(folder), metadata, index, [(tuple((0, n) for n in x.shape), x)])
    return array


def part_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(b, e) for b, e in box)


@pytest.mark.parametrize("seed", range(drawn(300, fast=12)))
@pytest.mark.usefixtures("reads", "sizes")
def test_boxes_into_memory_of_any_strides(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    nd = int(rng.integers(1, 5))
    inner = tuple(rng.integers(1, 7, nd).tolist())
    chunk = tuple((n * rng.integers(1, 4)).item() for n in inner)
    shape = tuple((n * rng.integers(1, 3) - rng.integers(n)).item() for n in chunk)
    dtype = np.dtype(str(rng.choice(["u1", "i2", "f4", "c16"])))
    x = rng.integers(0, 100, shape).astype(dtype)
    array = stored(tmp_path, x, chunk, inner)
    for index in array.chunks():
        array.verify(index)
    for _ in range(4):
        box = tuple(tuple(sorted(rng.integers(0, n + 1, 2).tolist())) for n in shape)
        counts = [e - b for b, e in box]
        order = rng.permutation(nd)
        memory = np.full([2 * counts[k] + 1 for k in order], 101, dtype).transpose(np.argsort(order))
        steps = rng.choice([1, 1, 2, -1], nd)
        index = tuple(
            slice(0, n) if s == 1 else slice(1, 2 * n, 2) if s == 2 else slice(n, 0, -1)
            for n, s in zip(counts, steps, strict=True)
        )
        out = memory[index]
        assert array.read(box, out) is out
        assert np.array_equal(out, x[part_of(box)])
        out[...] = 101
        assert (memory == 101).all()  # Nothing was written beside it.
        assert np.array_equal(array.read(box), x[part_of(box)])


@pytest.mark.usefixtures("reads", "sizes")
def test_damage_of_any_inner_chunk_is_the_error_of_its_file(tmp_path: Path) -> None:
    x = np.arange(12 * 10, dtype="f8").reshape(12, 10)
    array = stored(tmp_path, x, (4, 10), (2, 5))
    for number, position in enumerate(np.ndindex(2, 2)):
        file = tmp_path / "c" / "1" / "0"
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[number * 84 + 17] ^= 4
        file.write_bytes(damaged)
        with pytest.raises(ArgumentError, match=rf"c/1/0 is damaged: inner chunk \({position[0]}, {position[1]}\)"):
            array.read()
        box = ((0, 6), (0, 5)) if position != (0, 0) else ((6, 12), (5, 10))
        assert position[0] == 0 or np.array_equal(array.read(box), x[part_of(box)])  # It is not read.
        file.write_bytes(content)
    assert np.array_equal(array.read(), x)


@pytest.mark.usefixtures("reads")
def test_an_error_of_the_system_has_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros((64, 1 << 16), np.float32)
    array = stored(tmp_path, x, (16, 1 << 16), (16, 1 << 15))
    last, before = os.stat(tmp_path / "c" / "3" / "0"), threading.active_count()

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        if os.fstat(descriptor).st_ino == last.st_ino:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    preadv: Callable[..., int] = os.preadv
    monkeypatch.setattr(os, "preadv", failing)
    with st.set_num_threads(3), pytest.raises(OSError, match="Input/output") as caught:
        array.read()
    assert caught.value.filename == str(tmp_path / "c" / "3" / "0")
    assert threading.active_count() <= before + 2  # Those of the pool wait for other work.
    assert not [name for name in os.listdir("/proc/self/fd") if name_of(name).startswith(str(tmp_path))]


def name_of(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # That of the list itself.
        return ""


def test_what_c_cannot_read_python_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(1000.0).reshape(10, 100)
    array = stored(tmp_path, x, (10, 100), (10, 50))
    monkeypatch.setattr(row_reads, "_compiled", lambda: lambda *_: 3)  # A signal has come.
    assert np.array_equal(array.read(), x)


@pytest.mark.usefixtures("reads")
def test_the_memory_beside_the_result_is_a_slab_for_each_thread(tmp_path: Path) -> None:
    x = np.ones((1 << 11, 1 << 12), np.float32)
    array = stored(tmp_path, x, x.shape, (1 << 11, 1 << 10))
    for out in (np.empty(x.shape, x.dtype), np.empty(x.shape[::-1], x.dtype).T):
        tracemalloc.start()
        with st.set_num_threads(2):
            array.read(out=out)
        assert tracemalloc.get_traced_memory()[1] < 2.2 * box_reader._SLAB
        tracemalloc.stop()
        assert out.all()


def test_without_checksums_and_in_the_other_byte_order(tmp_path: Path) -> None:
    x = np.arange(240, dtype="i4").reshape(12, 20)
    metadata = array_metadata(x.shape, x.dtype, (6, 20), (6, 20))
    for chain in (Chain(big=True, checked=False), Chain(big=False, checked=False)):
        array = ZarrArray(str(tmp_path), metadata.__class__(**{**vars(metadata), "elements": chain, "index": None}))
        for k in range(2):
            (tmp_path / "c" / str(k)).mkdir(parents=True, exist_ok=True)
            rows = x[6 * k : 6 * k + 6].astype(">i4" if chain.big else "<i4")
            (tmp_path / "c" / str(k) / "0").write_bytes(rows.tobytes())
        assert np.array_equal(array.read(), x)
        assert np.array_equal(array.read(((3, 9), (4, 5))), x[3:9, 4:5])


def test_read_only_memory_is_refused(tmp_path: Path) -> None:
    array = stored(tmp_path, np.arange(6.0), (6,), (3,))
    out = np.zeros(6)
    out.flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        array.read(out=out)


@pytest.mark.parametrize("seed", range(drawn(100, fast=10)))
def test_chunks_by_their_numbers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nd = int(rng.integers(0, 4))
    box = tuple(tuple(sorted(rng.integers(0, 30, 2).tolist())) for _ in range(nd))
    chunk = tuple(rng.integers(1, 9, nd).tolist())
    everything = list(chunks_of(box, chunk))
    assert len(everything) == count_of_chunks(box, chunk)
    first, last = sorted(rng.integers(0, len(everything) + 1, 2).tolist())
    assert list(chunks_of(box, chunk, range(first, last))) == everything[first:last]


def test_the_disk_begins_to_work_before_a_file_ends(tmp_path: Path) -> None:
    class Watched(atomic.Disk):
        def __init__(self) -> None:
            self.calls: list[tuple[str, int, int]] = []

        def begin_flush(self, descriptor: int, offset: int, nbytes: int) -> None:
            self.calls.append(("begin", offset, nbytes))
            super().begin_flush(descriptor, offset, nbytes)

        def flush(self, descriptor: int) -> None:
            self.calls.append(("flush", 0, 0))
            super().flush(descriptor)

    disk, piece = Watched(), bytes(3 << 20)
    assert atomic.write_file(str(tmp_path / "x"), [piece] * 5, disk) == 15 << 20
    assert disk.calls == [("begin", 0, 6 << 20), ("begin", 6 << 20, 6 << 20), ("flush", 0, 0)]
    disk = Watched()
    atomic.write_file(str(tmp_path / "y"), [piece], disk)
    assert disk.calls == [("flush", 0, 0)]
