"""The format safetensors: files pass both ways to the library of that name, and broken ones raise errors."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.files import paths, safetensors_files
from tests.layouts import assert_same, everywhere, mesh_of, strided
from tests.scripts import output_of, run_script

A = np.arange(48.0).reshape(8, 6)

DTYPES = [np.dtype(getattr(st, name)) if "float8" in name or name == "bfloat16" else np.dtype(name)
          for name in safetensors_files._NAMES.values()]  # fmt: skip


def array(dtype: Any) -> np.ndarray:
    if np.dtype(dtype).kind == "b":
        return np.arange(12).reshape(3, 4) % 3 == 0
    return np.arange(1, 13).reshape(3, 4).astype(np.float32).astype(dtype)


def test_the_library_reads_all_dtypes(tmp_path: Path, backend: str) -> None:
    library = pytest.importorskip("safetensors")
    arrays = {str(dtype): array(dtype) for dtype in DTYPES}
    for name in [*arrays]:
        arrays[f"{name}, none"] = arrays[name][:0]
    arrays["scalar"] = np.array(3, np.int16)
    on = {
        name: st.device_put(a, mesh_of((2,), backend))
        for name, a in arrays.items()
        if backend == "numpy" or a.dtype in (np.float32, np.int16)
    }
    st.save_safetensors(tmp_path / "x", on, metadata={"format": "np", "größe": "∞"})
    with library.safe_open(tmp_path / "x", framework="np") as file:
        assert file.metadata() == {"format": "np", "größe": "∞"}
        assert {*file.keys()} == {*on}
        for name in on:
            part = file.get_slice(name)
            assert part.get_shape() == [*arrays[name].shape]
            if "float8" not in name:  # NumPy lacks them, and the library does not ask ml_dtypes.
                np.testing.assert_array_equal(file.get_tensor(name), arrays[name], strict=True)
    for name, x in st.load_safetensors(tmp_path / "x", mesh_of((3,), backend)).items():
        assert x.sharding.mesh == mesh_of((3,), backend)
        assert_same(x, arrays[name])
    own = tmp_path / "own"
    pytest.importorskip("safetensors.numpy").save_file({name: arrays[name] for name in on}, own, {"a": "b"})
    for name, x in st.load_safetensors(own).items():
        assert_same(x, arrays[name])
    assert {p.name for p in tmp_path.iterdir()} == {"x", "own"}


def test_a_file_has_the_bytes_of_the_librarys(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    arrays = {"b": A, "a": A[0], "é": A.astype(np.float32), "none": A[:0]}
    library.save_file(arrays, tmp_path / "its")
    st.save_safetensors(tmp_path / "mine", arrays)
    assert (tmp_path / "mine").read_bytes() == (tmp_path / "its").read_bytes()


@everywhere
def test_layouts(backend: str, tmp_path: Path) -> None:
    st.save_safetensors(tmp_path / "x", {"w": A, "b": A[0], "s": np.float64(3)})
    mesh = mesh_of((2, 2), backend)
    names = mesh.axis_names
    columns, rows = st.NamedSharding(mesh, st.P(None, names[1])), st.NamedSharding(mesh, st.P(names[0]))

    def chosen(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        assert dtype == np.float64
        return columns if len(shape) == 2 else mesh.flat[1] if name == "s" else None

    for shardings, expected in (
        (rows.with_spec(st.P()), {}),
        (mesh.flat[0], {}),
        ({"w": columns, "b": rows}, {"w": columns, "b": rows}),
        (chosen, {"w": columns, "s": st.NamedSharding(st.make_mesh((1,), ("d",), devices=[mesh.flat[1]]), st.P())}),
    ):
        loaded = st.load_safetensors(tmp_path / "x", shardings)
        assert_same(loaded["w"], A)
        assert_same(loaded["b"], A[0])
        assert_same(loaded["s"], np.array(3.0))
        for name, sharding in expected.items():
            assert loaded[name].sharding.is_equivalent_to(sharding, loaded[name].ndim)
    with st.use_mesh(mesh):
        assert st.load_safetensors(tmp_path / "x", {"w": st.P(*names)})["w"].sharding == st.NamedSharding(
            mesh, st.P(*names)
        )
    loaded = st.load_safetensors(str(tmp_path / "x"))
    assert loaded["w"].sharding == st.asarray(A).sharding
    assert not loaded["w"].committed
    with st.transfers() as mine, st.transfer_guard("disallow"):
        st.load_safetensors(tmp_path / "x", {"w": columns})
    with st.transfers() as its:
        [st.asarray(a, device=place) for a, place in ((A, columns), (A[0], None), (np.float64(3), None))]
    assert (mine.bytes, {record.operator for record in mine}) == (its.bytes, {"load_safetensors"})
    loaded["w"][0] = 0  # It is no view of the file.
    assert_same(st.load_safetensors(tmp_path / "x")["w"], A)
    with pytest.raises(
        st.ArgumentError,
        match="load_safetensors: shardings has 'v', and the file has no array of this name; it has b, s, w",
    ):
        st.load_safetensors(tmp_path / "x", {"v": columns})
    with pytest.raises(st.ShardingError, match="load_safetensors"):
        st.load_safetensors(tmp_path / "x", columns)


def test_each_memory_is_one_buffer_of_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tall = np.arange(4096 * 64.0, dtype=np.float32).reshape(4096, 64)
    wide = tall.reshape(16, 16384)
    st.save_safetensors(tmp_path / "x", {"tall": tall, "wide": wide})
    reads = list[int]()
    read_into = paths.read_into

    def counted(descriptor: int, memory: Any, *rest: Any) -> None:
        reads.append(memory.size)
        read_into(descriptor, memory, *rest)

    monkeypatch.setattr("shardtensor.files.byte_ranges.read_into", counted)
    mesh = mesh_of((4,), "numpy")
    (axis,) = mesh.axis_names
    for spec in (st.P(axis), st.P(None, axis)):
        x = st.load_safetensors(tmp_path / "x", st.NamedSharding(mesh, spec))
        assert len(x["tall"]._storage.buffers) == 1
        assert_same(x["wide"], wide)
    assert sum(reads) == 2 * (tall.nbytes + wide.nbytes)
    mesh = mesh_of((4,), "checked")
    for name, array, spec in (("tall", tall, st.P(axis)), ("wide", wide, st.P(None, axis)), ("tall", tall, st.P())):
        reads.clear()
        layouts = {"tall": mesh_of((1,), "numpy"), "wide": mesh_of((1,), "numpy"), name: st.NamedSharding(mesh, spec)}
        assert_same(st.load_safetensors(tmp_path / "x", layouts)[name], array)
        assert sum(reads) == tall.nbytes + wide.nbytes


def test_an_index_and_a_folder_lead_to_several_files(tmp_path: Path) -> None:
    st.save_safetensors(tmp_path / "model-1.safetensors", {"a": A, "b": A[0], "unused": A})
    st.save_safetensors(tmp_path / "blob", {"c": A.T})
    (tmp_path / "model-2.safetensors").symlink_to("blob")  # as in the cache of Hugging Face
    index = tmp_path / "model.safetensors.index.json"
    weights = {"a": "model-1.safetensors", "c": "model-2.safetensors", "b": "model-1.safetensors"}
    index.write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": weights}))
    for path in (tmp_path, index):
        loaded = st.load_safetensors(path, {"c": mesh_of((2,), "numpy")})
        assert {*loaded} == {"a", "b", "c"}
        assert_same(loaded["a"], A)
        assert_same(loaded["c"], A.T)
    for content, match in (
        ({"weight_map": {"a": "../x"}}, "broken: 'a' is in '../x'; wanted a file in the same folder"),
        ({"weight_map": {"z": "model-1.safetensors"}}, "lacks 'z', which the index says that it has"),
        ({}, "has no weight_map"),
        ([], "wanted a dict"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(st.ArgumentError, match=f"load_safetensors: .*{match}"):
            st.load_safetensors(tmp_path)
    index.unlink()
    with pytest.raises(st.ArgumentError, match=r"has model-1.safetensors, model-2.safetensors; give the path of one"):
        st.load_safetensors(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    assert {*st.load_safetensors(tmp_path)} == {"a", "b", "unused"}
    (tmp_path / "none").mkdir()
    with pytest.raises(st.ArgumentError, match=r"has no file whose name ends with .safetensors or .safetensors.index"):
        st.load_safetensors(tmp_path / "none")


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE = {
    "empty": (b"", "is not a file in the format"),
    "seven": (b"1234567", "has 7 bytes"),
    "no header": (file_of(b""), "JSON cannot be read"),
    "long header": (file_of({}, length=3), "its header would have 3; wanted at most 2"),
    "huge header": (file_of({}, length=(1 << 64) - 1), "wanted at most 2"),
    "text": (b"hello world, this is text", "is not a file in the format"),
    "list": (file_of([]), "wanted a dict"),
    "not utf-8": (file_of(b'{"\xff": 1}'), "JSON cannot be read"),
    "deep": (file_of(b"[" * 100_000), "JSON cannot be read"),
    "long number": (file_of(b'{"a": ' + b"9" * 10_000 + b"}"), "JSON cannot be read"),
    "twice": (file_of(b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a": 1}'), "a name occurs twice"),
    "twice inside": (file_of(b'{"a": {"dtype": "U8", "dtype": "U8"}}'), "a name occurs twice"),
    "no dict": (file_of({"a": 3}), "'a' of .* is broken: its header has 3"),
    "key missing": (file_of({"a": {"dtype": "F32", "shape": [2]}}, b"12345678"), "is broken"),
    "unknown dtype": (file_of({"a": entry("F4")}, b"12345678"), "has dtype F4, which tensors lack"),
    "dtype is a number": (file_of({"a": entry(7)}, b"12345678"), "is broken"),
    "negative": (file_of({"a": entry(shape=[-2])}, b"12345678"), "is broken"),
    "size is true": (file_of({"a": entry(shape=[True, 2])}, b"12345678"), "is broken"),
    "size is a float": (file_of({"a": entry(shape=[2.0])}, b"12345678"), "is broken"),
    "shape is text": (file_of({"a": entry(shape="2")}, b"12345678"), "is broken"),
    "many dimensions": (file_of({"a": entry(shape=[1] * 65 + [2])}, b"12345678"), "is broken"),
    "too large a size": (file_of({"a": entry(shape=[1 << 63, 0], offsets=[0, 0])}), "is broken"),
    "overflow": (file_of({"a": entry(shape=[1 << 62, 4], offsets=[0, 0])}), "wanted 73786976294838206464 from 0 on"),
    "too few bytes": (file_of({"a": entry()}, b"1234567"), "has the bytes from 0 to 8 of 7"),
    "another size": (file_of({"a": entry(shape=[3])}, b"12345678"), "wanted 12 from 0 on"),
    "reversed": (file_of({"a": entry(offsets=[8, 0])}, b"12345678"), "is broken"),
    "three offsets": (file_of({"a": entry(offsets=[0, 4, 8])}, b"12345678"), "is broken"),
    "hole": (file_of({"a": entry(offsets=[8, 16])}, b"1234567812345678"), "from 0 on"),
    "overlap": (file_of({"a": entry(), "b": entry(offsets=[4, 12])}, b"123456781234"), "'b' has the bytes from 4 to 12"),
    "same bytes": (file_of({"a": entry(), "b": entry()}, b"12345678"), "has the bytes from 0 to 8"),
    "more": (file_of({"a": entry()}, b"123456789"), "1 of its bytes belong to no array"),
    "metadata": (file_of({"__metadata__": {"a": 1}}), "its metadata is"),
    "metadata is text": (file_of({"__metadata__": "a"}), "its metadata is"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_errors(kind: str, tmp_path: Path) -> None:
    content, match = HOSTILE[kind]
    (tmp_path / "x").write_bytes(content)
    error = st.ArgumentTypeError if "dtype F4" in match else st.ArgumentError
    with pytest.raises(error, match=f"^load_safetensors: .*{match}") as caught:
        st.load_safetensors(tmp_path / "x")
    assert str(tmp_path / "x") in str(caught.value)


def test_any_changed_byte_is_an_error_or_leaves_a_file_of_the_format(tmp_path: Path) -> None:
    st.save_safetensors(tmp_path / "x", {"a": A[:2], "b": np.arange(3, dtype=np.int16)}, metadata={"k": "v"})
    content = bytearray((tmp_path / "x").read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    for at in strided(range(length), 11):
        for new in (b'"', b"9", b"\xff", b"[", b"0"):
            (tmp_path / "y").write_bytes(content[:at] + new + content[at + 1 :])
            try:
                loaded = st.load_safetensors(tmp_path / "y")
            except st.ShardTensorError as error:
                assert str(error).startswith("load_safetensors: ")  # noqa: PT017
            else:
                assert sum(x.nbytes for x in loaded.values()) == len(content) - length


def test_a_large_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate(1 << 31)
    with pytest.raises(st.ArgumentError, match="wanted at most 100000000"):
        st.load_safetensors(tmp_path / "x")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        st.load_safetensors(tmp_path / "x")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(st.ArgumentError, match=r"load_safetensors: .*pipe is not a regular file"):
        st.load_safetensors(tmp_path / "pipe")
    for call in (st.load_safetensors, lambda path: st.save_safetensors(path, {})):
        with pytest.raises(
            st.ArgumentTypeError, match=r"wanted (a path as )?text or a pathlib.Path|wanted a path as text"
        ):
            call(3)
        with open(tmp_path / "open", "wb") as file, pytest.raises(st.ArgumentTypeError):
            call(file)
    st.save_safetensors(tmp_path / "x.safetensors", {})
    assert st.load_safetensors(tmp_path / "x.safetensors") == {}
    with pytest.raises(st.ArgumentError, match=r"st.load_safetensors"):
        st.load(tmp_path / "x.safetensors")


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    st.save_safetensors(tmp_path / "x", {"a": np.zeros(100_000)})
    header = safetensors_files._header

    def shrinks(*args: Any) -> Any:
        entries = header(*args)
        os.truncate(tmp_path / "x", 5000)
        return entries

    monkeypatch.setattr(safetensors_files, "_header", shrinks)
    with pytest.raises(st.ArgumentError, match=r"load_safetensors: .*x is truncated"):
        st.load_safetensors(tmp_path / "x")


@pytest.mark.parametrize(
    ("save", "error", "match"),
    [
        (lambda p: st.save_safetensors(p, [A]), TypeError, "tensors is a list; wanted a dict"),
        (
            lambda p: st.save_safetensors(p, {"l": {"w": A}}),
            TypeError,
            "'l' is a dict; wanted an array: .* names such as 'l.w'",
        ),
        (lambda p: st.save_safetensors(p, {3: A}), TypeError, "3 is the name of an array; wanted text"),
        (lambda p: st.save_safetensors(p, {"__metadata__": A}), ValueError, "no arrays of the name '__metadata__'"),
        (lambda p: st.save_safetensors(p, {"\ud800": A}), ValueError, "no arrays of the name"),
        (
            lambda p: st.save_safetensors(p, {"a": A.astype(complex)}),
            TypeError,
            "'a' has dtype complex128, .*view.'float64'",
        ),
        (lambda p: st.save_safetensors(p, {"a": A.astype("m8[s]")}), TypeError, r"timedelta64\[s\].*view.'int64'"),
        (lambda p: st.save_safetensors(p, {"a": A.astype(np.longdouble)}), TypeError, "astype.'float32'"),
        (lambda p: st.save_safetensors(p, {"a": "text"}), TypeError, ": 'a': 'text' is a str"),
        (
            lambda p: st.save_safetensors(p, {}, metadata={"a": 1}),
            TypeError,
            "metadata is {'a': 1}; wanted a dict of texts",
        ),
    ],
)
def test_what_cannot_be_written(
    save: Callable[[Path], Any], error: type[Exception], match: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=f"save_safetensors.*{match}") as caught:
        save(tmp_path / "x")
    assert isinstance(caught.value, st.ShardTensorError)
    assert not (tmp_path / "x").exists()


def test_an_error_leaves_the_old_file_and_other_byte_orders_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    st.save_safetensors(tmp_path / "x", {"a": A.astype(">i4")})
    assert_same(st.load_safetensors(tmp_path / "x")["a"], A.astype("i4"))

    def fails(*args: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(safetensors_files, "write_elements", fails)
    with pytest.raises(OSError, match="full"):
        st.save_safetensors(tmp_path / "x", {"a": A})
    assert st.load_safetensors(tmp_path / "x")["a"].dtype == np.int32
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_small_floats_need_their_library(tmp_path: Path) -> None:
    st.save_safetensors(tmp_path / "x", {"a": st.ones(3, dtype="bfloat16"), "b": A})
    script = f"""
import sys
sys.modules["ml_dtypes"] = None
import shardtensor as st
try:
    st.load_safetensors({str(tmp_path / "x")!r})
except TypeError as error:
    print(error)
"""
    assert "load_safetensors: dtype bfloat16 is defined by the library ml_dtypes" in output_of(run_script(script))
