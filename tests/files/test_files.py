"""NumPy's files: NumPy reads the files of `save`, `load` reads NumPy's files, and broken files raise errors."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.files import array_files, npy_files
from tests.draws import drawn
from tests.layouts import DTYPES, array, assert_same, everywhere, mesh_of, meshes, shapes, specs

A = np.arange(30.0).reshape(6, 5)


@everywhere
@hypothesis.settings(max_examples=drawn(15))
@hypothesis.given(data=some.data())
def test_arrays_pass_both_ways(tmp_path_factory: Any, backend: str, data: Any) -> None:
    path = tmp_path_factory.mktemp("files") / "x.npy"
    a = array(data.draw(shapes()), data.draw(some.sampled_from(DTYPES)), 3)
    mesh = data.draw(meshes(backend))
    place = st.NamedSharding(mesh, data.draw(specs(mesh, a.ndim)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(npy_files, "_BLOCK", data.draw(some.sampled_from([1, 40, 1 << 24])))
        st.save(path, st.device_put(a, place))
    np.testing.assert_array_equal(np.load(path), a, strict=True)
    np.save(path, np.array(a, order=data.draw(some.sampled_from("CF"))))
    found = st.load(path, device=place)
    assert isinstance(found, st.ShardedTensor)
    assert found.sharding == place
    assert_same(found, a)


def test_numpys_functions_write_tensors(tmp_path: Path, backend: str) -> None:
    x = st.device_put(A, mesh_of((4,), backend))
    np.save(tmp_path / "x", x[1:, ::2])
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), A[1:, ::2])
    for write in (np.savez, np.savez_compressed, st.savez, st.savez_compressed):
        write(tmp_path / "z", x, b=x.T, host=A[0], number=3)
        with np.load(tmp_path / "z.npz") as found:
            np.testing.assert_array_equal(found["arr_0"], A)
            np.testing.assert_array_equal(found["b"], A.T)
        with st.load(tmp_path / "z.npz", device=x.device) as mine:
            assert sorted(mine) == ["arr_0", "b", "host", "number"]
            assert len(mine) == 4
            assert mine["arr_0"].device == x.device
            assert_same(mine["b"], A.T)
            assert_same(mine["number"], np.array(3))
            with pytest.raises(KeyError, match="'c' is not an array of the file; it has arr_0"):
                _ = mine["c"]
    assert {p.name for p in tmp_path.iterdir()} == {"x.npy", "z.npz"}


def test_open_files(tmp_path: Path) -> None:
    stream = io.BytesIO()
    st.save(stream, st.asarray(A))
    st.save(stream, [[1, 2], [3, 4]])
    stream.seek(0)
    np.testing.assert_array_equal(np.asarray(st.load(stream)), A)
    assert st.load(stream).tolist() == [[1, 2], [3, 4]]
    stream = io.BytesIO()
    st.savez(stream, a=st.asarray(A))
    stream.seek(0)
    np.testing.assert_array_equal(np.asarray(st.load(stream)["a"]), A)


def test_an_open_archive_names_its_arrays_as_numpys(tmp_path: Path) -> None:
    for names in ("a", "abcde", "abcdef"):
        np.savez(tmp_path / "x.npz", **dict.fromkeys(names, np.ones(2)))
        with st.load(tmp_path / "x.npz") as mine, np.load(tmp_path / "x.npz") as numpys:
            assert repr(mine) == repr(numpys)


def test_bytes_in_another_order_are_converted(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", A.astype(">f4"))
    found = st.load(tmp_path / "x.npy")
    assert found.dtype == np.dtype("float32")
    np.testing.assert_array_equal(np.asarray(found), A)


def test_loaded_tensors_are_independent_of_the_file(tmp_path: Path, backend: str) -> None:
    np.save(tmp_path / "x.npy", A)
    x = st.load(tmp_path / "x.npy", device=mesh_of((2,), backend))
    x += 1
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), A)
    st.save(tmp_path / "x.npy", x)
    assert_same(x, A + 1)
    y = st.load(tmp_path / "x.npy")
    assert not y.committed
    (tmp_path / "x.npy").unlink()
    assert_same(y, A + 1)


class _Fails(st.ShardTensorError):
    pass


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.npy"
    st.save(path, st.asarray(A))

    def fails(stream: Any, x: Any) -> None:
        stream.write(b"half")
        raise _Fails("stopped")

    monkeypatch.setattr(array_files, "write_elements", fails)
    with pytest.raises(_Fails):
        st.save(path, st.asarray(A + 1))
    np.testing.assert_array_equal(np.load(path), A)
    assert list(tmp_path.iterdir()) == [path]


def test_threads_that_write_one_path_leave_one_of_the_files(tmp_path: Path) -> None:
    arrays = [st.full((50,), k) for k in range(6)]
    threads = [threading.Thread(target=st.save, args=(tmp_path / "x.npy", x)) for x in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(np.load(tmp_path / "x.npy"))) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_broken_files_are_errors_that_name_them(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, A)
    whole = path.read_bytes()
    for broken, words in (
        (whole[:-8], "x.npy is truncated: it has 360 bytes, too few for float64 of shape"),
        (whole[:20], "x.npy is not a .npy or .npz file, or a broken one"),
        (b"text", "x.npy is not a .npy or .npz file"),
        (b"", "x.npy is not a .npy or .npz file"),
        (b"PK\x03\x04 no archive", "x.npy is broken or of an unknown kind"),
    ):
        path.write_bytes(broken)
        with pytest.raises(st.ArgumentError, match=words):
            st.load(path)
    with pytest.raises(st.ArgumentError, match="file is truncated: it has 360 bytes, too few for float64"):
        st.load(io.BytesIO(whole[:-8]))
    with pytest.raises(FileNotFoundError):
        st.load(tmp_path / "missing.npy")
    np.save(path, np.array([object()]), allow_pickle=True)
    with pytest.raises(st.ArgumentTypeError, match=r"dtype object cannot be sharded.*pickles are not read"):
        st.load(path)
    np.save(path, np.array(["text"]))
    with pytest.raises(st.ArgumentTypeError, match="dtype <U4 cannot be sharded"):
        st.load(path)


def test_objects_and_names_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(
        st.ArgumentTypeError, match=r"save: dtype object .*pickles, which store objects, are not written"
    ):
        st.save(tmp_path / "x.npy", np.array([object()]))
    with pytest.raises(st.ArgumentTypeError, match=r"save: .* is a set"):
        st.save(tmp_path / "x.npy", {1})  # type: ignore[arg-type]
    with pytest.raises(st.ArgumentError, match="savez: arr_0 is the name"):
        st.savez(tmp_path / "x.npz", A, arr_0=A)
    assert not list(tmp_path.iterdir())


def test_writing_holds_no_second_copy(tmp_path: Path) -> None:
    """What a write of 8 MB allocates on the host, where the devices have memories of their own."""
    import tracemalloc

    x = st.zeros((1000, 1000), device=mesh_of((4,), "checked"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(npy_files, "_BLOCK", 1 << 18)
        tracemalloc.start()
        try:
            st.save(tmp_path / "x.npy", x)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 4 << 20
    assert (tmp_path / "x.npy").stat().st_size == 8_000_128
