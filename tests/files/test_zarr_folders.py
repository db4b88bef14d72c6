"""`st.load` of folders in the format zarr v3: arrays are tensors, groups are mappings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.files import paths, zarr_folders
from shardtensor.files.zarr import write_group
from tests.files.test_zarr import write
from tests.layouts import assert_same, everywhere, mesh_of

A = np.arange(48.0).reshape(8, 6)


@everywhere
def test_an_array_is_a_tensor_in_any_layout(backend: str, tmp_path: Path) -> None:
    write(tmp_path / "x", A, (4, 3), (2, 3))
    write(tmp_path / "0", A[2, 2:3].reshape(()), (), ())
    mesh = mesh_of((2, 2), backend)
    for spec in (st.P(mesh.axis_names[0]), st.P(None, mesh.axis_names[1]), st.P(*mesh.axis_names), st.P()):
        x = st.load(tmp_path / "x", device=st.NamedSharding(mesh, spec))
        assert isinstance(x, st.ShardedTensor)
        assert x.sharding.spec == spec
        assert_same(x, A)
    zero = st.load(tmp_path / "0", device=mesh.flat[1])
    assert isinstance(zero, st.ShardedTensor)
    assert_same(zero, A[2, 2])
    y = st.load(str(tmp_path / "x"))
    assert isinstance(y, st.ShardedTensor)
    assert (y.sharding, y.committed) == (st.asarray(A).sharding, False)


def test_devices_get_the_chunks_that_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x", A, (4, 3), (2, 3))
    names = list[str]()

    def counted(descriptor: int, memory: Any, offset: int, path: str) -> None:
        names.append(f"{Path(path).parent.name}/{Path(path).name}")
        paths.read_into(descriptor, memory, offset, path)

    monkeypatch.setattr("shardtensor.files.box_reader.is_available", lambda: False)  # C reads as much.
    monkeypatch.setattr("shardtensor.files.box_reader.read_into", counted)
    mesh = mesh_of((2,), "checked")
    x = st.load(tmp_path / "x", device=st.NamedSharding(mesh, st.P(None, mesh.axis_names[0])))
    assert isinstance(x, st.ShardedTensor)
    assert names == sorted(names, key=lambda name: name[-1])
    assert {*names} == {"0/0", "1/0", "0/1", "1/1"}
    whole = st.load(tmp_path / "x", device=mesh_of((4,), "numpy"))
    assert isinstance(whole, st.ShardedTensor)
    assert len(whole._storage.buffers) == 1


def test_a_group_is_a_mapping(tmp_path: Path, backend: str) -> None:
    write_group(str(tmp_path / "g"), {"of": "tests"})
    write(tmp_path / "g" / "w", A, (8, 6), (8, 6))
    write_group(str(tmp_path / "g" / "inner"), {})
    write(tmp_path / "g" / "inner" / "b", A[0].astype(np.float32), (4,), (2,))
    (tmp_path / "g" / "link").symlink_to("w")
    write(tmp_path / "g" / "broken", A[0], (4,), (2,))
    (tmp_path / "g" / "broken" / "zarr.json").write_text("{")
    with st.load(tmp_path / "g", device=mesh_of((2,), backend)) as group:
        assert isinstance(group, zarr_folders.ZarrGroup)
        names = ["broken", "inner/b", "w"]
        assert (group.attrs, group.files, [*group], len(group), "w" in group, "inner" in group) == (
            {"of": "tests"}, names, names, 3, True, False,
        )  # fmt: skip
        assert repr(group) == f"ZarrGroup '{tmp_path}/g' with keys: broken, inner/b, w"
        assert group["w"].sharding.mesh == mesh_of((2,), backend)
        assert_same(group["w"], A)
        assert_same(group["inner/b"], A[0].astype(np.float32))
    for name in ("z", "link", "..", "", "inner"):
        with pytest.raises(KeyError, match=r"is not an array of the folder; it has broken, inner/b, w"):
            group[name]
    with pytest.raises(st.ArgumentError, match=r"^load: \S*broken/zarr.json is not valid JSON"):
        group["broken"]
    (tmp_path / "g" / "w" / "zarr.json").write_bytes((tmp_path / "g" / "zarr.json").read_bytes())
    with pytest.raises(st.ArgumentError, match=r"^load: \S*g/w has become a group since it was opened"):
        group["w"]


def test_holes_have_the_value_of_the_metadata(tmp_path: Path) -> None:
    write(tmp_path / "x", A, (4, 3), (2, 3))
    content = json.loads((tmp_path / "x" / "zarr.json").read_text())
    (tmp_path / "x" / "zarr.json").write_text(json.dumps(content | {"fill_value": 7.0}))
    (tmp_path / "x" / "c" / "1" / "0").unlink()
    expected = A.copy()
    expected[4:, :3] = 7
    assert_same(st.load(tmp_path / "x"), expected)


def test_errors_name_the_function_and_the_file(tmp_path: Path) -> None:
    write(tmp_path / "x", A, (4, 3), (2, 3))
    with open(tmp_path / "x" / "c" / "0" / "1", "r+b") as file:
        file.write(b"\0\1")
    with pytest.raises(st.ArgumentError, match=r"^load: \S*x/c/0/1 is damaged"):
        st.load(tmp_path / "x")
    content = json.loads((tmp_path / "x" / "zarr.json").read_text())
    (tmp_path / "x" / "zarr.json").write_text(
        json.dumps(content | {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "gzip"}]})
    )
    with pytest.raises(st.ArgumentTypeError, match=r"^load: \S*zarr.json: the codecs .*gzip.* are not read"):
        st.load(tmp_path / "x")
    (tmp_path / "x" / "zarr.json").write_text("{")
    with pytest.raises(st.ArgumentError, match=r"^load: \S*zarr.json is not valid JSON"):
        st.load(tmp_path / "x")
    (tmp_path / "x" / "zarr.json").unlink()
    with pytest.raises(IsADirectoryError, match=r"load: a folder without zarr.json; wanted a file, or an array .*/x'$"):
        st.load(tmp_path / "x")
    (tmp_path / "x" / ".zarray").write_text("{}")
    with pytest.raises(IsADirectoryError, match=r"load: a folder in the format zarr v2"):
        st.load(tmp_path / "x")
    (tmp_path / "x" / "zarr.json").symlink_to(tmp_path / "y")
    with pytest.raises(st.ArgumentError, match=r"^load: .*is a link, which is not followed"):
        st.load(tmp_path / "x")


def test_memory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "x", A[:0], (1, 6), (1, 6))
    content = json.loads((tmp_path / "x" / "zarr.json").read_text())
    (tmp_path / "x" / "zarr.json").write_text(json.dumps(content | {"shape": [1 << 40, 6]}))
    with pytest.raises(st.DeviceMemoryError, match=r"^load: "):
        st.load(tmp_path / "x")
