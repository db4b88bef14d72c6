"""Writes of elements and slices without a view spec: they equal all other writes, and are in place."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.interpreters.writes import writes
from shardtensor.tensor.storage import PendingWrite
from tests.layouts import allocated, assert_same, place_of, put

VALUE = np.arange(24).reshape(8, 3)

INDICES: dict[str, Any] = {
    "integers": (3, 1), "negative": (-8, -1), "one integer": 5, "slice": slice(1, 5), "step": (slice(6, 0, -2), 1),
    "all": slice(None), "nothing": slice(5, 5), "no entry": (), "below": (-9, 0), "beyond": (0, 3), "too many": (0, 0, 0),
    "no step": slice(0, 4, 0), "float": 1.5, "float in a slice": slice(0.5), "bool": True, "array": np.array([1, 6]),
    "ellipsis": (..., 1), "new": (None, 2), "numpy's integer": np.int64(2), "text": "a",
}  # fmt: skip

VALUES: dict[str, Any] = {
    "integer": 7, "bool": True, "float": 2.5, "complex": 1 + 2j, "nan": float("nan"), "infinity": float("inf"),
    "large": 300, "larger": 10**30, "negative": -1, "text": "a", "none": None, "list": [1, 2, 3],
    "numpy's scalar": np.float32(2.5), "a 0-d array": np.array(4), "one element": np.array([4]), "row": np.arange(3),
    "rows": np.arange(12).reshape(4, 3), "columns": np.arange(4).reshape(4, 1), "alike": np.arange(24).reshape(8, 3) + 50,
    "in Fortran's order": np.asfortranarray(np.arange(24).reshape(8, 3) + 50), "bytes swapped": np.arange(3, dtype=">i8"),
    "time": np.datetime64(5, "s"),
}  # fmt: skip

DTYPES = ["bool", "int8", "uint8", "int64", "float16", "float64", "complex64", "datetime64[s]"]


def outcome(dtype: str, index: Any, value: Any) -> tuple[Any, Any]:
    """What a write raises, and the tensor after it."""
    x = put(VALUE.astype(dtype), "numpy")
    try:
        x[index] = value.astype(dtype) if isinstance(value, np.ndarray) and value.ndim == 2 else value
    except Exception as error:
        return (type(error), str(error)), np.asarray(x)
    return None, np.asarray(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_direct_writes_do_what_others_do(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = {
        names: outcome(dtype, INDICES[names[0]], VALUES[names[1]]) for names in itertools.product(INDICES, VALUES)
    }
    monkeypatch.setattr(writes, "_write_directly", lambda *_: False)
    for names, (error, elements) in direct.items():
        wanted = outcome(dtype, INDICES[names[0]], VALUES[names[1]])
        assert error == wanted[0], names
        np.testing.assert_array_equal(elements, wanted[1], err_msg=str(names))


@pytest.mark.parametrize("value", [5, np.float32(5), np.full((3, 4), 5.0)], ids=["integer", "scalar", "array"])
def test_only_values_that_fit_are_written_directly(value: Any) -> None:
    x = put(np.zeros((8, 4)), "numpy")
    before = place_of(x.addressable_shards[0].data)
    assert writes._write_directly(x, value, slice(2, 5))
    assert_same(x, np.repeat([0.0, 5.0, 0.0], [8, 12, 12]).reshape(8, 4))
    assert place_of(x.addressable_shards[0].data) == before
    refused = [
        (np.full((3, 4), 5), slice(2, 5)), (np.full(4, 5.0), slice(2, 5)), (st.zeros((3, 4), dtype=int), slice(2, 5)),
        (1, [1]), (1, (0, None)), (1, 9), ([1, 2], 0),
    ]  # fmt: skip
    for other, index in refused:
        assert not writes._write_directly(x, other, index)
    assert not writes._write_directly(x[1:], 1, 0)


def test_exported_memory_is_not_written_directly() -> None:
    x = put(np.zeros((8, 3)), "numpy")
    exported, copy = np.asarray(x), x.copy()
    x[0, 0] = 1
    x[1:3] = np.ones((2, 3))
    assert not exported.any()
    assert not np.asarray(copy).any()
    before = place_of(x.addressable_shards[0].data)
    x[0, 1] = 2
    assert place_of(x.addressable_shards[0].data) == before


def test_direct_writes_show_in_views_and_count_as_writes() -> None:
    x = put(np.zeros((8, 3)), "numpy")
    view = x[2:]
    version = x._write_state.version if x._write_state else 0
    x[2, 0] = 5
    assert view[0, 0].item() == 5
    assert x._write_state is not None
    assert x._write_state.version == version + 1


def test_readers_wait_for_direct_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value is taken out of the handle before others are asked whether they hold it, and until it is written."""
    x = put(np.zeros((8, 3)), "numpy")
    seen: list[Any] = []

    def watched(name: str, function: Any) -> Any:
        return lambda *arguments: (seen.append((name, type(x._storage))), function(*arguments))[1]

    monkeypatch.setattr(writes, "exclusive_arrays", watched("exclusive", writes.exclusive_arrays))
    monkeypatch.setattr(writes.blockwise, "copy_into", watched("copy", writes.blockwise.copy_into))
    x[0, 0] = 1
    assert seen == [("exclusive", PendingWrite), ("copy", PendingWrite)]
    assert x[0, 0].item() == 1


def test_transfers_of_direct_writes_are_recorded() -> None:
    x = put(np.zeros((8, 3)), "numpy")
    with st.transfers() as log:
        x[:] = np.ones((8, 3))
    assert log.bytes == x.nbytes


def test_direct_writes_allocate_nothing() -> None:
    x, value = put(np.zeros((1024, 256)), "numpy"), np.ones((512, 256))
    x[3, 4] = 1
    with allocated("numpy") as peak:
        x[3, 4] = 2
        x[5:517] = value
    assert peak[0] < value.nbytes / 4


def test_a_write_that_fails_leaves_the_tensor_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    x = put(np.zeros((8, 3)), "numpy")

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(writes.blockwise, "copy_into", fail)
    with pytest.raises(MemoryError):
        x[0] = 1
    monkeypatch.undo()
    x[0] = 1
    assert_same(x, np.repeat([1.0, 0.0], [3, 21]).reshape(8, 3))
