"""Items that another thread computes: their order, errors on both sides, and the end of the thread."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardtensor.files.ahead import HELD, ahead
from shardtensor.files.atomic import Disk
from shardtensor.files.metadata import array_metadata
from shardtensor.files.zarr import ZarrArray, write_array, write_chunk


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "shardtensor-ahead"]


def test_order_and_the_number_that_exist() -> None:
    used, most = 0, 0

    def numbers() -> Iterator[int]:
        nonlocal most
        for n in range(100):
            most = max(most, n + 1 - used)
            yield n

    with ahead(numbers()) as items:
        for n in items:
            assert n == used
            used += 1
    assert used == 100
    assert most <= HELD + 1  # `used` counts an item when its use ends.


@pytest.mark.parametrize("at", [0, 1, 5])
def test_errors_of_the_computation_are_raised_where_the_item_would_be(at: int) -> None:
    def numbers() -> Iterator[int]:
        yield from range(at)
        raise ValueError("computed")

    items: list[int] = []
    with pytest.raises(ValueError, match="computed"), ahead(numbers()) as computed:
        items.extend(computed)
    assert items == list(range(at))


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_block_that_ends_early_ends_the_thread(at: int) -> None:
    closed = []

    def numbers() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            closed.append(True)

    def interrupted(n: int) -> None:
        if n == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ahead(numbers()) as items:
        any(map(interrupted, items))
    with ahead(numbers()):
        pass
    assert closed == [True, True]


def test_a_large_chunk_of_which_a_write_fails(tmp_path: Path) -> None:
    class Full(Disk):
        left = 5

        def write(self, descriptor: int, data: memoryview) -> int:
            self.left -= 1
            if not self.left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(descriptor, data)

    x = np.arange(1 << 21, dtype="i4").reshape(1 << 10, -1)
    metadata = array_metadata(x.shape, x.dtype, x.shape, (512, 512))
    pieces = [(((0, 300), (0, 2048)), x[:300]), (((300, 1024), (0, 2048)), x[300:])]
    with pytest.raises(OSError, match="No space") as caught:
        write_chunk(str(tmp_path), metadata, (0, 0), pieces, Full())
    assert caught.value.filename == str(tmp_path / "c" / "0" / "0")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    write_array(str(tmp_path), metadata)
    write_chunk(str(tmp_path), metadata, (0, 0), pieces)
    assert np.array_equal(ZarrArray(str(tmp_path), metadata).read(), x)
