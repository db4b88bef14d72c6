"""Checkpoints that are damaged, or were written to do harm: errors that name the file, and nothing else."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import re
import resource
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.errors import ArgumentError, ShardTensorError
from shardtensor.files.checksums import crc32c
from tests.checkpoint.trees import bits, every_kind, small
from tests.draws import drawn

FILE = "checkpoint.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "every"
    st.checkpoint.save(path, every_kind())
    return path


@pytest.fixture(scope="module")
def saved_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "small"
    st.checkpoint.save(path, small(1))
    return path


@pytest.fixture
def path(saved_small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_small, tmp_path / "x"))


def content_of(path: Path) -> dict[str, Any]:
    return json.loads((path / FILE).read_bytes())


def put_text(path: Path, text: bytes) -> None:
    """Writes a manifest with a valid checksum."""
    assert text.startswith(b'{"crc32c": "'), text[:40]
    text = text[:12] + b"0" * 8 + text[20:]
    (path / FILE).write_bytes(text[:12] + f"{crc32c(text):08x}".encode() + text[20:])


def put(path: Path, content: dict[str, Any]) -> None:
    put_text(path, json.dumps(content).encode())


def test_the_helper_writes_valid_checksums(path: Path) -> None:
    put(path, content_of(path))
    st.checkpoint.verify(path)
    assert bits(st.checkpoint.restore(path)) == bits(small(1))


# -- damage ----------------------------------------------------------------------------------------


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def check_named(error: BaseException, file: Path, path: Path) -> None:
    """The error names the file, and the leaf that it belongs to."""
    text = str(error) + "".join(getattr(error, "__notes__", []))
    assert str(file) in text
    leaf = next((leaf for leaf in ("a/w", "b") if file.is_relative_to(path / leaf)), "")
    assert leaf in text.replace(str(path), "")


def is_needed(file: Path, path: Path) -> bool:
    """Whether `restore` reads the file: all but the metadata of groups."""
    return file not in (path / "zarr.json", path / "a" / "zarr.json")


def flips(path: Path, fast: int) -> Iterator[tuple[Path, int]]:
    """Positions of bits in each file, all of them in the full tier."""
    for file in files_of(path):
        count = file.stat().st_size * 8
        yield from ((file, k) for k in sorted({int(k) for k in np.linspace(0, count - 1, drawn(count, fast=fast))}))


def test_a_flipped_bit_anywhere_is_an_error_that_names_the_file(path: Path) -> None:
    expected = bits(small(1))
    for file, position in flips(path, 24):
        content = bytearray(file.read_bytes())
        content[position // 8] ^= 1 << position % 8
        good = file.read_bytes()
        file.write_bytes(content)
        with pytest.raises(ArgumentError) as caught:
            st.checkpoint.verify(path)
        check_named(caught.value, file, path)
        if is_needed(file, path):
            with pytest.raises(ArgumentError) as caught:
                st.checkpoint.restore(path)
            check_named(caught.value, file, path)
        else:
            assert bits(st.checkpoint.restore(path)) == expected
        file.write_bytes(good)


def test_truncated_missing_and_longer_files(path: Path) -> None:
    for file in files_of(path):
        good = file.read_bytes()
        for content in (None, b"", good[:-1], good[: len(good) // 2], good + b"\0"):
            os.unlink(file)
            if content is not None:
                file.write_bytes(content)
            with pytest.raises(ArgumentError) as caught:
                st.checkpoint.verify(path)
            if file.name != FILE or content is not None:
                check_named(caught.value, file, path)
            if is_needed(file, path) and content != good + b"\0":
                with pytest.raises((ArgumentError, OSError)) as caught:
                    st.checkpoint.restore(path)
                if file.name != FILE or content is not None:
                    check_named(caught.value, file, path)
            file.write_bytes(good)


def test_other_files_folders_and_links_are_found(path: Path) -> None:
    for name in ("x", "a/x", "a/w/c/9", "b/c/zarr.json"):
        (path / name).write_bytes(b"")
        with pytest.raises(ArgumentError, match=f"{re.escape(str(path / name))} is not a file of the checkpoint"):
            st.checkpoint.verify(path)
        os.unlink(path / name)
    for name in ("x", "a/x"):
        (path / name).symlink_to(path.parent)
        with pytest.raises(ArgumentError, match=f"{re.escape(str(path / name))} is not a file of the checkpoint"):
            st.checkpoint.verify(path)
        os.unlink(path / name)
    st.checkpoint.verify(path)


def test_links_in_place_of_files_and_folders_are_not_followed(path: Path, tmp_path: Path) -> None:
    everything = [entry for entry in sorted(path.rglob("*")) if entry != path / FILE]
    for entry in [*everything, path / FILE]:
        moved = tmp_path / "moved"
        entry.rename(moved)
        entry.symlink_to(moved)
        with pytest.raises(ArgumentError, match=r"is a link|not a file"):
            st.checkpoint.verify(path)
        if entry.is_dir() or is_needed(entry, path):
            with pytest.raises(ArgumentError, match="is a link, which is not followed"):
                st.checkpoint.restore(path)
        os.unlink(entry)
        moved.rename(entry)
    st.checkpoint.verify(path)


def test_folders_pipes_and_files_in_each_others_place(path: Path, tmp_path: Path) -> None:
    for entry in sorted(path.rglob("*")):
        moved = tmp_path / "moved"
        entry.rename(moved)
        for make in (os.mkfifo, os.mkdir) if moved.is_file() else (Path.touch,):
            make(entry)
            begin = time.process_time()
            for function in (
                (st.checkpoint.verify, st.checkpoint.restore) if is_needed(entry, path) else (st.checkpoint.verify,)
            ):
                with pytest.raises((ShardTensorError, OSError)) as caught:
                    function(path)
                text = str(caught.value)
                assert str(entry) in text or str(path / FILE) in text, text
            assert time.process_time() - begin < 2
            entry.rmdir() if entry.is_dir() else entry.unlink()
        moved.rename(entry)


# -- manifests with valid checksums ------------------------------------------------------------------

OTHERS: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**64, -(2**63), 10**30, 1.5, float("inf"), float("nan"), "", "x", "/", "..", "../x",
    "/etc/passwd", "a/../../x", "\0", "\ud800", "a" * 300, "1" * 5000, [], [1], [0, 0], [1, 2, 3], [[]], ["x", "y"], [2**62, 2**62],
    [1] * 65, [["x", 1]] * 2, {}, {"a": 1}, {"array": "w"}, {"dict": []}, {"list": [[0, {"none": True}]]}, {"none": None},
    {"name": "numpy.datetime64"}, {"dtype": "uint64", "words": []}, {"dtype": "uint64", "words": [-1]}, {"dtype": "O", "words": ["x"]},
]  # fmt: skip


def paths_in(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path and path != ("crc32c",):
        yield path
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, child in items:
        if not (isinstance(key, int) and key > 5):  # The words of states are alike.
            yield from paths_in(child, (*path, key))


def changed(content: Any, path: tuple[Any, ...], other: Any) -> Any:
    content = copy.deepcopy(content)
    at = content
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = other
    return content


def check_harmless(path: Path, what: object) -> None:
    """Reading either works, or raises an error of the library or the system, quickly and with little memory."""
    for function in (st.checkpoint.restore, st.checkpoint.inspect, st.checkpoint.verify):
        begin = time.process_time()
        try:
            use(function(path))
        except (ShardTensorError, OSError):
            pass
        except BaseException as error:
            error.add_note(f"{function.__name__}: {what}")
            raise
        assert time.process_time() - begin < 5, (function, what)


def use(tree: Any) -> None:
    """Uses what has internal positions: wrong ones would read other memory."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for child in tree:
            use(child)
    elif isinstance(tree, np.random.Generator):
        tree.integers(0, 9, 1000)
        tree.bit_generator.seed_seq.spawn(1)
    elif isinstance(tree, np.random.RandomState):
        tree.randint(0, 9, 1000)
    elif isinstance(tree, random.Random):
        tree.random()


def test_each_entry_of_a_manifest_may_be_anything_else(saved: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "x"))
    content = content_of(path)
    cases = [(where, other) for where in paths_in(content) for other in OTHERS]
    tracemalloc.start()
    for number in np.linspace(0, len(cases) - 1, drawn(4000, fast=20)):
        where, other = cases[int(number)]
        put(path, changed(content, where, other))
        check_harmless(path, (where, other))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40e6
    assert all(entry.name in ("x", "every") for entry in tmp_path.iterdir())


def refused(path: Path, content: dict[str, Any], match: str, *functions: Callable[[Path], Any]) -> None:
    put(path, content)
    for function in functions or (st.checkpoint.restore, st.checkpoint.verify):
        with pytest.raises((ShardTensorError, OSError), match=match):
            function(path)


@pytest.mark.parametrize(
    "name", ["../other", "/etc", "a/../../other", "a//b", "", ".", "\0", "\ud800", "__a", "zarr.json", "a" * 300]
)
def test_names_of_arrays_that_leave_the_checkpoint(name: str, path: Path) -> None:
    content = content_of(path)
    content["arrays"][name] = content["arrays"].pop("b")
    content["tree"]["dict"][1][1] = {"array": name}
    refused(path, content, "not accepted")


@pytest.mark.parametrize("key", ["../../b/c/0", "/etc/passwd", "c/../../b", "", ".", "\0", "\ud800"])
def test_names_of_files_that_leave_the_checkpoint(key: str, path: Path) -> None:
    content = content_of(path)
    content["arrays"]["b"]["files"][key] = [1, "0" * 8]
    refused(path, content, "not accepted")
    del content["arrays"]["b"]["files"][key]
    content["files"][key] = [1, "0" * 8]
    refused(path, content, "not accepted")


def test_deep_trees_and_long_numbers(path: Path) -> None:
    content = content_of(path)
    leaf = b'{"none": true}'
    whole = json.dumps({**content, "tree": "HERE", "arrays": {}}).encode()
    for depth in (40, 64, 65, 400, 900, 100_000):
        for before, after in (
            (b'{"list": [[0, ', b"]]}"),
            (b"[", b"]"),
            (b'{"int": ', b"}"),
            (b'{"generator": {"state": ', b"}}"),
        ):
            put_text(path, whole.replace(b'"HERE"', before * depth + leaf + after * depth))
            check_harmless(path, (depth, before))
    nested = b"[" * 900 + b"]" * 900
    for name in (b'"data_type": "float64"', b'"layout": {"mesh": [["x", 2]]', b'"version": 1', b'"shape": [6]'):
        text = json.dumps(content).encode()
        assert name in text
        put_text(path, text.replace(name, name.partition(b":")[0] + b": " + nested, 1))
        check_harmless(path, name)
    put_text(path, whole.replace(b'"HERE"', b'{"int": ' + b"1" * 100_000 + b"}"))
    check_harmless(path, "digits")


def test_a_later_version_is_refused(path: Path) -> None:
    refused(path, {**content_of(path), "version": 2}, "has version 2 of the format; this version of shardtensor reads")
    refused(path, {**content_of(path), "format": "zip"}, "is not the manifest of a checkpoint")


def with_value(path: Path, record: Any) -> dict[str, Any]:
    content = content_of(path)
    content["tree"]["dict"][2][1] = record
    return content


BROKEN_VALUES = [
    {"pickle": "gASVIwAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAhlY2hvIGhlbGxvlIWULg=="}, {"object": "os.system"}, {"none": True, "int": "0x1"}, {},
    {"int": "ff" * 3 + "g"}, {"int": 5}, {"float": "nan:7ff0000000000000"}, {"float": "nan:0"}, {"float": "x"}, {"float": 1.5}, {"bool": 1},
    {"complex": []}, {"complex": ["1.0"]}, {"text": 5}, {"bytes": "!"}, {"key": []}, {"key": ["0x1"]}, {"key": ["-0x1", "0x0"]},
    {"key": ["0x" + "f" * 40, "0x0"]}, {"scalar": {"data_type": "float32", "attributes": {}, "bytes": "AAA="}},
    {"scalar": {"data_type": "object", "attributes": {}, "bytes": ""}}, {"scalar": {"data_type": "V8", "attributes": {}, "bytes": "AAAAAAAAAAA="}},
]  # fmt: skip


@pytest.mark.parametrize("record", BROKEN_VALUES, ids=lambda record: json.dumps(record)[:40])
def test_values_that_are_none(record: Any, path: Path) -> None:
    put(path, with_value(path, record))
    with pytest.raises(ArgumentError, match="broken"):
        st.checkpoint.restore(path)
    with pytest.raises(ArgumentError, match="broken"):
        st.checkpoint.inspect(path)


def generator(name: str) -> Any:
    from shardtensor.checkpoint.values import written

    return written(np.random.RandomState(3) if name == "old" else np.random.Generator(getattr(np.random, name)(3)))


@pytest.mark.parametrize(
    ("name", "where", "other"),
    [
        *[("MT19937", ("state", "state", "pos"), pos) for pos in (-1, 625, 2**31 - 1, 2**40, None)],
        *[("old", ("state", "pos"), pos) for pos in (-1, 625, 10**6)],
        *[("Philox", ("state", "buffer_pos"), pos) for pos in (-1, 5, -(2**31), "0", [])],
        ("Philox", ("state", "buffer", "words"), [1]), ("Philox", ("state", "buffer", "words"), [1] * 100),
        ("MT19937", ("state", "state", "key", "words"), [1]), ("MT19937", ("state", "state", "key", "words"), [-1] * 624),
        ("MT19937", ("state", "state", "key", "dtype"), "O"), ("SFC64", ("state", "state", "state", "words"), []),
        ("PCG64", ("state", "state", "state"), 2**200), ("PCG64", ("state", "bit_generator"), "BitGenerator"),
        ("PCG64", ("state", "bit_generator"), "MT19937"), ("PCG64", ("state", "bit_generator"), "__builtins__"),
        ("PCG64", ("seeds", "pool_size"), 2**40), ("PCG64", ("seeds", "pool_size"), 2**31),
        ("PCG64", ("seeds", "n_children_spawned"), -1), ("PCG64", ("seeds", "spawn_key"), [-1]), ("PCG64", ("seeds", "entropy"), "x"),
        ("PCG64", ("seeds", "entropy"), -1), ("PCG64", ("seeds", "other"), 1), ("old", ("gauss",), "x"), ("old", ("bit_generator",), "PCG64"),
    ],
)  # fmt: skip
def test_states_of_generators_that_are_none(name: str, where: tuple[str, ...], other: Any, path: Path) -> None:
    """NumPy accepts positions beyond the words of a state, and then reads other memory."""
    record = generator(name)
    put(path, with_value(path, record))
    use(st.checkpoint.restore(path))
    kind = next(iter(record))
    put(path, with_value(path, changed(record, (kind, *where), other)))
    with pytest.raises(ArgumentError, match=rf"checkpoint.json: step: its {kind} .* is broken"):
        st.checkpoint.restore(path)


def test_the_second_number_of_a_random_state_is_kept(tmp_path: Path) -> None:
    """It draws two at once."""
    state = np.random.RandomState(3)
    state.normal()
    st.checkpoint.save(tmp_path / "x", state)
    again = st.checkpoint.restore(tmp_path / "x")
    assert bits(again) == bits(state)
    assert again.normal() == state.normal()


BROKEN_LAYOUTS = [
    {"mesh": [["x", 3]]}, {"mesh": [["x", 2], ["x", 1]]}, {"mesh": []}, {"mesh": [["x", 0]], "devices": []}, {"devices": [0, 0]},
    {"devices": [-1, 0]}, {"devices": [0, 2**31]}, {"devices": [0.0, 1]}, {"devices": []}, {"spec": [["y"]]}, {"spec": [["x"], []]},
    {"memory_kind": "disk"}, {"memory_kind": []}, {"mesh": [["x", 2], *[[f"a{k}", 1] for k in range(70)]]}, {"spec": 5}, {"mesh": {"x": 2}},
    {"mesh": [["x", 2**31], ["y", 2**31]]}, {"mesh": [["x", -2], ["y", -1]]},
]  # fmt: skip


@pytest.mark.parametrize("change", BROKEN_LAYOUTS, ids=lambda change: json.dumps(change)[:40])
def test_layouts_that_are_none(change: Any, path: Path) -> None:
    content = content_of(path)
    content["arrays"]["a/w"]["layout"].update(change)
    for function in (st.checkpoint.restore, st.checkpoint.verify, st.checkpoint.inspect):
        refused(path, content, "checkpoint.json: a/w: its layout .* is broken", function)


@pytest.mark.parametrize(
    "change", [{"devices": [5, 10**6]}, {"backend": "none"}, {"backend": "os.system"}, {"backend": "../x"}], ids=str
)
def test_layouts_on_devices_that_do_not_exist(change: Any, path: Path) -> None:
    content = content_of(path)
    content["arrays"]["a/w"]["layout"].update(change)
    put(path, content)
    assert bits(st.checkpoint.restore(path)) == bits(small(1))


def put_array(path: Path, name: str, shape: list[int], chunk: list[int], inner: list[int]) -> None:
    """Writes metadata of another shape for an array, with valid checksums everywhere."""
    file = path / name / "zarr.json"
    node = json.loads(file.read_bytes())
    node["shape"] = shape
    node["chunk_grid"]["configuration"]["chunk_shape"] = chunk
    node["codecs"][0]["configuration"]["chunk_shape"] = inner
    text = json.dumps(node).encode()
    file.write_bytes(text)
    content = content_of(path)
    row = content["arrays"][name]
    row["shape"] = shape
    row["files"]["zarr.json"] = [len(text), f"{crc32c(text):08x}"]
    if row["layout"]:
        row["layout"]["spec"] = []
    put(path, content)


SHAPES = [
    ([2**40], [6], [3]), ([2**40], [2**40], [3]), ([2**40], [2**40], [2**40]), ([2**59], [1], [1]), ([2**62, 2**62], [6, 1], [3, 1]),
    ([7], [6], [3]), ([60], [60], [3]), ([2**20] * 2, [2**20] * 2, [1, 3]), ([1] * 64, [1] * 64, [1] * 64), ([], [], []),
    ([2] * 50, [1] * 50, [1] * 50),
]  # fmt: skip


@pytest.mark.parametrize("name", ["a/w", "b"])
@pytest.mark.parametrize(("shape", "chunk", "inner"), SHAPES, ids=map(str, range(len(SHAPES))))
def test_shapes_that_the_files_do_not_have(
    name: str, shape: list[int], chunk: list[int], inner: list[int], path: Path
) -> None:
    """Memory is allocated only for elements that files have."""
    put_array(path, name, shape, chunk, inner)
    begin, most = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    for function in (st.checkpoint.restore, st.checkpoint.verify):
        with pytest.raises((ArgumentError, OSError)) as caught:
            function(path)
        text = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert name in text
        assert "memory" not in text
    with contextlib.suppress(ArgumentError):
        st.checkpoint.inspect(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8e6
    assert time.process_time() - begin < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 20_000


def test_arrays_that_the_manifest_and_zarr_describe_differently(path: Path) -> None:
    content = content_of(path)
    content["arrays"]["b"]["data_type"] = "float32"
    refused(path, content, "b/zarr.json is broken: it does not have the shape and dtype of the manifest")
    content = content_of(path)
    content["arrays"]["a/w"]["shape"] = [3, 2]
    refused(path, content, "a/w")


def test_tables_of_checkpoints_have_no_control_characters(path: Path) -> None:
    """A terminal would obey them."""
    content = content_of(path)
    content["tree"]["type"] = "\x1b[2J\ud800"
    content["arrays"]["a/w"]["layout"]["mesh"][0][0] = "\x1b]0;x\x07"
    content["arrays"]["a/w"]["layout"]["spec"] = []
    put(path, content)
    text = str(st.checkpoint.inspect(path))
    assert text.replace("\n", "").isprintable()
    assert "\\x1b[2J\\ud800" in text
