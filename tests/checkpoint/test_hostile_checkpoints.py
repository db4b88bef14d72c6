"""Checkpoints that are damaged, or that somebody has written to do harm: errors that name the file, and nothing else."""

from __future__ import annotations

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
        with pytest.raises(ArgumentError, match="is a link|not a file"):
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
            begin = time.monotonic()
            for function in (st.checkpoint.verify, st.checkpoint.restore) if is_needed(entry, path) else (st.checkpoint.verify,):
                with pytest.raises((ShardTensorError, OSError)) as caught:
                    function(path)
                text = str(caught.value)
                assert str(entry) in text or str(path / FILE) in text, text
            assert time.monotonic() - begin < 2
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
        begin = time.monotonic()
        try:
            use(function(path))
        except (ShardTensorError, OSError):
            pass
        except BaseException as error:
            error.add_note(f"{function.__name__}: {what}")
            raise
        assert time.monotonic() - begin < 5, (function, what)


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
    for number in np.linspace(0, len(cases) - 1, drawn(len(cases), fast=400)):
        where, other = cases[int(number)]
        put(path, changed(content, where, other))
        check_harmless(path, (where, other))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40e6
    assert all(entry.name in ("x", "every") for entry in tmp_path.iterdir())
