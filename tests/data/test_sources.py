"""Sources of every kind have the same batches, are read once for a batch, and wrong ones are errors."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shardtensor as st
from tests.conftest import NO_TORCH

ROWS, KEY = 37, st.random.key(3)
X = np.arange(ROWS * 6, dtype="f4").reshape(ROWS, 2, 3)
Y = np.arange(ROWS) % 5


class Items:
    """A map-style dataset, which counts how often it is read."""

    def __init__(self, x: Any = X, y: Any = Y) -> None:
        self.x, self.y, self.asked = x, y, list[int]()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, n: int) -> Any:
        assert type(n) is int
        self.asked.append(n)
        return {"x": self.x[n], "y": self.y[n]}


class ManyItems(Items):
    def __getitems__(self, rows: list[int]) -> Any:
        self.asked.append(len(rows))
        assert rows == sorted(rows)
        return [{"x": self.x[n], "y": self.y[n]} for n in rows]


class Slow:
    """An array of another library: it takes slices and ascending arrays of indices only, as those of HDF5 do."""

    def __init__(self, x: np.ndarray[Any, Any]) -> None:
        self.x, self.shape, self.dtype = x, x.shape, x.dtype

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> Any:
        assert type(index) is slice or (index.ndim == 1 and (np.diff(index) > 0).all()), index
        return self.x[index]


def memory_map(folder: Path) -> Any:
    np.save(folder / "map.npy", X)
    return np.load(folder / "map.npy", mmap_mode="r")


def npy(folder: Path, x: Any = X) -> str:
    np.save(folder / "x.npy", x)
    return str(folder / "x.npy")


def folder_of(folder: Path, tree: Any) -> Path:
    st.checkpoint.save(folder / "saved", tree)
    return folder / "saved"


ONE: dict[str, Callable[[Path], Any]] = {
    "array": lambda folder: X,
    "view": lambda folder: np.repeat(X, 2, axis=0)[::2],
    "other bytes": lambda folder: X.astype(">f4"),
    "columns first": lambda folder: np.asfortranarray(X),
    "memory map": memory_map,
    "tensor": lambda folder: st.asarray(X),
    "replicated tensor": lambda folder: st.device_put(X, st.NamedSharding(st.make_mesh((4,), ("a",)), st.P())),
    "array of another library": lambda folder: Slow(X),
    "torch tensor": lambda folder: torch_tensor(X),
    ".npy": npy,
    ".npy as a path": lambda folder: Path(npy(folder)),
    ".npy of other bytes": lambda folder: npy(folder, X.astype(">f4")),
    ".npy with columns first": lambda folder: npy(folder, np.asfortranarray(X)),
}
"""Sources that have the rows of X."""


def saved(folder: Path) -> Path:
    np.savez(folder / "both.npz", x=X, y=Y)
    return folder / "both.npz"


def weights(folder: Path) -> str:
    st.save_safetensors(path := str(folder / "both.safetensors"), {"x": X, "y": Y})
    return path


BOTH: dict[str, Callable[[Path], Any]] = {
    "arrays": lambda folder: {"x": X, "y": Y},
    "tensor and array": lambda folder: {"x": st.asarray(X), "y": Y},
    "file and tensor": lambda folder: {"x": npy(folder), "y": st.asarray(Y)},
    "items": lambda folder: Items(),
    "many items": lambda folder: ManyItems(),
    "torch items": lambda folder: Items(*map(torch_tensor, (X, Y))),
    ".npz": saved,
    "open .npz": lambda folder: st.load(saved(folder)),
    "safetensors": weights,
    "zarr": lambda folder: folder_of(folder, {"x": st.asarray(X), "y": st.asarray(Y)}),
}
"""Sources that have the rows of X and Y."""


def torch_tensor(x: Any) -> Any:
    if NO_TORCH:
        pytest.skip(NO_TORCH)
    import torch  # It may be missing.

    return torch.from_numpy(x)


def batches(source: Any, **options: Any) -> list[Any]:
    with st.data.Batches(source, 8, **{"key": KEY, "epochs": 2, **options}) as found:
        return list(found)


def arrays(tree: Any) -> Any:
    return st.tree.map(np.asarray, tree)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", ONE)
def test_sources_of_one_array(kind: str, shuffle: bool, tmp_path: Path) -> None:
    found = batches(ONE[kind](tmp_path), shuffle=shuffle)
    numbers = batches(np.arange(ROWS), shuffle=shuffle)
    assert [len(one) for one in found] == [8, 8, 8, 8, 5] * 2
    for one, rows in zip(found, numbers, strict=True):
        assert (one.dtype, np.asarray(one).tobytes()) == (X.dtype, X[np.asarray(rows)].tobytes())
    assert shuffle or np.array_equal(np.concatenate(list(map(np.asarray, numbers)))[:ROWS], np.arange(ROWS))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", BOTH)
def test_sources_of_two_arrays(kind: str, shuffle: bool, tmp_path: Path) -> None:
    for one, rows in zip(batches(BOTH[kind](tmp_path), shuffle=shuffle), batches(np.arange(ROWS), shuffle=shuffle), strict=True):  # fmt: skip
        assert type(one) is dict
        assert np.array_equal(one["x"], X[np.asarray(rows)])
        assert np.array_equal(one["y"], Y[np.asarray(rows)])


def test_a_zarr_array_of_several_chunks(tmp_path: Path) -> None:
    """Each chunk is read once for a batch, also where rows of it lie apart."""
    x = np.arange(1 << 20, dtype="f8").reshape(-1, 16)
    st.checkpoint.save(tmp_path / "x", {"x": st.asarray(x)})
    with st.data.Batches(tmp_path / "x", 1000, key=KEY, epochs=1) as found:
        rows = st.data.Batches(np.arange(len(x)), 1000, key=KEY, epochs=1)
        for one, numbers in zip(found, rows, strict=True):
            assert np.array_equal(one["x"], x[np.asarray(numbers)])


@pytest.mark.parametrize("dtype", [bool, "i1", "u8", "f2", "c16", "M8[s]", ml_dtypes.bfloat16])
def test_dtypes(dtype: Any, tmp_path: Path) -> None:
    x = np.arange(40).astype(dtype)
    assert np.concatenate(list(map(np.asarray, batches(x, shuffle=False)))).tobytes() == np.tile(x, 2).tobytes()
    assert batches(x)[0].dtype == x.dtype


def test_structures_of_batches() -> None:
    point = collections.namedtuple("point", "a b")
    found = batches(point(X, [Y, {"z": Y + 1}]))[0]
    assert type(found) is point
    assert np.array_equal(found.b[1]["z"], np.asarray(found.b[0]) + 1)
    nested = batches((Items(), Y))[0]
    assert np.array_equal(nested[0]["y"], nested[1])


def test_an_object_is_read_once_for_a_batch_by_ascending_rows() -> None:
    one, many = Items(), ManyItems()
    for source in (one, many):
        batches(source, epochs=1, prefetch=0)
        assert source.asked[0] == 0
    assert many.asked[1:] == [8, 8, 8, 8, 5]
    for start in range(1, ROWS, 8):
        assert (np.diff(one.asked[start : start + 8]) > 0).all()
    assert sorted(one.asked[1:]) == list(range(ROWS))


class Odd(Items):
    def __init__(self, item: Any) -> None:
        super().__init__()
        self.item = item

    def __getitem__(self, n: int) -> Any:
        return super().__getitem__(n) if n != 20 else self.item


class Few(ManyItems):
    def __getitems__(self, rows: list[int]) -> Any:
        return super().__getitems__(rows)[1:]


@pytest.mark.parametrize(("source", "message"), [
    (Odd({"x": X[0]}), r"row 20 is {'x'.*; wanted the structure of row 0"),
    (Odd({"x": X[0, :1], "y": 1}), r"row 20 has shape \(1, 3\) and dtype float32; wanted those of row 0, \(2, 3\)"),
    (Odd({"x": X[0], "y": 0.5}), r"row 20 has shape \(\) and dtype float64; wanted those of row 0, \(\) and int64"),
    (Few(), r"__getitems__ returned 7 items for 8 rows"),
])  # fmt: skip
def test_items_that_differ_are_errors(source: Any, message: str) -> None:
    with pytest.raises(
        st.ArgumentError, match=rf"(?s)^data.Batches: the source raised an error at step \d, .*{message}"
    ):
        batches(source)


@pytest.mark.parametrize(("source", "kind", "message"), [
    ({"x": X, "y": Y[:-1]}, st.ArgumentError, r"same number of rows: source\['x'\] has 37, source\['y'\] has 36$"),
    ((X, Items(X[:3])), st.ArgumentError, r"source\[0\] has 37, source\[1\] has 3$"),
    (X[:0], st.ArgumentError, r"source: it has no rows: its shape is \(0, 2, 3\)$"),
    ((X, np.array(3)), st.ArgumentError, r"source\[1\]: it has no rows: its shape is \(\)$"),
    (Items(X[:0]), st.ArgumentError, r"source: it has no rows: its length is 0$"),
    ({}, st.ArgumentError, r"same number of rows: there is none$"),
    ([1, 2], st.ArgumentTypeError, r"source\[0\]: it is an int; wanted an array, a tensor, a path, or an object with"),
    ((n for n in range(3)), st.ArgumentTypeError, r"source: it is a generator; wanted"),
    (np.array(["a", "b"]), st.ArgumentTypeError, r"source: dtype <U1 cannot be sharded"),
    (np.array([None, 1]), st.ArgumentTypeError, r"source: dtype object cannot be sharded"),
])  # fmt: skip
def test_wrong_sources_are_errors(source: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"^data.Batches: .*{message}"):
        st.data.Batches(source, 1, key=KEY)


def test_tables_with_labels_are_errors() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(st.ArgumentTypeError, match=r"^data.Batches: source: it is a Series, .*; write x.to_numpy\(\)$"):
        st.data.Batches(pandas.Series([1, 2], index=[5, 6]), 1, key=KEY)


def test_wrong_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        st.data.Batches(tmp_path / "x.npy", 1, key=KEY)
    (tmp_path / "x.npy").write_bytes(b"text")
    with pytest.raises(st.ArgumentError, match=r"^data.Batches: source\['a'\]: \S*x.npy is not a .npy or .npz file"):
        st.data.Batches({"a": tmp_path / "x.npy"}, 1, key=KEY)
    path = npy(tmp_path)
    found = st.data.Batches(path, 8, shuffle=False, prefetch=0)
    with open(path, "r+b") as file:
        file.truncate(128 + 9 * 24)
    assert np.array_equal(next(found), X[:8])
    with pytest.raises(st.ArgumentError, match=r"at step 1, for the rows 8, 9, 10, .*x.npy is truncated"):
        next(found)


def test_a_mapping_of_arrays_is_a_tree() -> None:
    class Lazy(Mapping[str, Any]):
        def __getitem__(self, name: str) -> Any:
            return {"x": X, "y": Y}[name]

        def __iter__(self) -> Any:
            return iter("xy")

        def __len__(self) -> int:
            return 2

    assert batches(Lazy())[0].keys() == {"x", "y"}
