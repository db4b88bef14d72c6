"""Hostile files: each raises an error of the library, or is loaded as NumPy loads it, before any memory is used."""

from __future__ import annotations

import bz2
import io
import os
import random
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.host import memory_pool
from tests.pairs import spread

A = np.arange(6.0).reshape(2, 3)
DOCUMENTED = (st.ArgumentError, st.ArgumentTypeError, st.DeviceMemoryError)


def npy(
    text: str | bytes, body: bytes = A.tobytes(), version: tuple[int, int] = (1, 0), length: int | None = None
) -> bytes:
    """Returns a .npy file with a header of this text."""
    head = text if isinstance(text, bytes) else text.encode("utf8" if version == (3, 0) else "latin1")
    size = len(head) if length is None else length
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", size) + head + body


def described(descr: str = "'<f8'", fortran: str = "False", shape: str = "(2, 3)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}}}\n"


GOOD = npy(described())

SHAPES = """(-1, 3)|(-2, -3)|(True, 6)|(2.0, 3)|(6,)|6|[2, 3]|None|(2, 3, 0)|(0, 2**62)|(0, 4611686018427387904, 4)|(2, 3, 1)
|(4611686018427387904, 4)|(9223372036854775807,)|(9223372036854775808,)|(1000000000000,)|(1e3,)|('2', 3)|(2, (3,))|()|(2, 4)
|(1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,6)
|(2j, 3)|(nan,)|(-0, 3)|(18446744073709551618, 3)|(4294967296, 4294967296)|(0, -1)|(2, None)|(0,)|{2, 3}|'ab'|2 * (3,)""".replace(
    "\n", ""
).split("|")

DESCRS = r"""'|O'|'O'|object|'<U4'|'|S8'|'|V8'|'V'|[('a', '<f8')]|[('a', '<f4'), ('b', '<f4')]|[('\ud800', '<f8')]|[('a\x00b', '<f8')]
|('<f8', (2,))|('<f8',)|[]|()|{}|{1: 2}|''|'nonsense'|'<f9'|'<f16'|'<f3'|'>f8'|'=f8'|'<i8'|'<M8[s]'|'<M8'|'<M8[nonsense]'|'<m8[7D]'
|'<c16'|'|b1'|'<u8'|None|1|1.5|True|b'<f8'|'f8,f8'|'(2,3)f8'|'<f8' '<f8'|['<f8']|[('a',)]|[('a', 'O')]|'|S0'|'<U0'|'|V0'|[('', '<f8')]|'<e'
|'datetime64'|'<i4\x00'|'<\uff18f'|'a8'|{'names': ['a'], 'formats': ['f8']}|'<f8<f8'|':f8'""".replace("\n", "").split(
    "|'"
)
DESCRS = [d if d.startswith(("'", "[", "(", "{", "N", "1", "T", "b", "o")) else f"'{d}" for d in DESCRS]

TEXTS = {
    "nothing": "",
    "spaces": "   \n",
    "no literal": "open('x')\n",
    "a call": "{'descr': __import__('os').getcwd(), 'fortran_order': False, 'shape': ()}\n",
    "a number": "7\n",
    "a list": "[1, 2]\n",
    "half a dictionary": "{'descr': '<f8', ",
    "deep parentheses": "(" * 9000,
    "deep lists": "[" * 4000 + "]" * 4000,
    "many minus signs": "-" * 9000 + "1",
    "a null character": "{'descr': '<f8'\x00}",
    "a tab and a dedent": "  {\n\t1\n }\n",
    "an unknown key": described()[:-2] + ", 'more': 1}\n",
    "a missing key": "{'descr': '<f8', 'shape': (2, 3)}\n",
    "keys of several types": "{'descr': '<f8', 1: False, 'shape': (2, 3)}\n",
    "keys that are tuples": "{('descr',): '<f8', 'fortran_order': False, 'shape': (2, 3)}\n",
    "keys that are lists": "{['descr']: '<f8'}\n",
    "a key twice": described()[:-2] + ", 'shape': (3, 2)}\n",
    "a key twice, and huge": described()[:-2] + f", 'shape': ({10**12},)}}\n",
    "a long integer of Python 2": described(shape="(2L, 3L)"),
    "a huge number": described(shape=f"({'9' * 5000},)"),
    "a huge power": described(shape="(9**9**9,)"),
    "a set": "{1, 2}\n",
    "an f-string": "f'{1}'\n",
    "a lambda": "lambda: 1\n",
    "no newline": described().rstrip(),
    "much padding": described().rstrip() + " " * 5000 + "\n",
    "too much padding": described().rstrip() + " " * 20000 + "\n",
    "fortran_order is 1": described(fortran="1"),
    "fortran_order is text": described(fortran="'no'"),
    "fortran_order is None": described(fortran="None"),
    "fortran_order": described(fortran="True"),
    "carriage returns": described().replace(" ", "\r\n"),
    "a comment in Python": "# " + described(),
}


def npy_files() -> Iterator[tuple[str, bytes]]:
    yield "an empty file", b""
    for size in (1, 5, 6, 7, 8, 9, 10, 11, 40, len(GOOD) - 49, len(GOOD) - 48, len(GOOD) - 40, len(GOOD) - 1):
        yield f"the first {size} bytes", GOOD[:size]
    for magic in (
        b"\x93NUMPX",
        b"\x92NUMPY",
        b"NUMPY\x93",
        b"\x93numpy",
        b"\x1f\x8b\x08\x00\x00\x00",
        b"\x80\x04K\x01.",
    ):
        yield f"the magic {magic!r}", magic + GOOD[6:]
    for version in ((0, 0), (1, 1), (2, 1), (4, 0), (255, 255)):
        yield f"the version {version}", GOOD[:6] + bytes(version) + GOOD[8:]
    for version in ((2, 0), (3, 0)):
        yield f"a header of version {version}", npy(described(), version=version)
        yield f"a long header of version {version}", npy(described(), version=version, length=2**32 - 1)
        yield f"a header of 2 GiB of version {version}", npy(described(), version=version, length=2**31)
        yield f"a header of version {version} without text", npy("", version=version)
    yield "a header in Latin of version 3", npy(b"{'descr': '\xe9'}", version=(3, 0))
    yield "names of version 3", npy(described("[('\u20ac', '<f8')]"), version=(3, 0))
    for length in (0, 1, 20, 59, 61, 200, 65535):
        yield f"a header of {length} bytes", npy(described(), length=length)
    for name, text in TEXTS.items():
        yield name, npy(text)
    for shape in SHAPES:
        yield f"the shape {shape:.40}", npy(described(shape=shape))
    for descr in DESCRS:
        yield f"the dtype {descr}", npy(described(descr).encode("latin1", "backslashreplace"))
    yield "a long dtype", npy(described(str([(f"field{k}", "<f8") for k in range(300)])))
    yield "a very long dtype", npy(described(str([(f"field{k}", "<f8") for k in range(2500)])))
    yield "bytes after the elements", GOOD + b"more"
    yield "an archive after the elements", GOOD + archive()
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}], object), allow_pickle=True)
    yield "a pickle", pickled.getvalue()


def archive(
    body: bytes = GOOD, name: str = "a.npy", method: int = zipfile.ZIP_STORED, comment: bytes = b"", count: int = 1
) -> bytes:
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w", method) as made:
        warnings.simplefilter("ignore")  # A name that occurs twice.
        for k in range(count):
            made.writestr(zipfile.ZipInfo(name), body if not k else npy(described(), (A + k).tobytes()), method)
        made.comment = comment
    return stream.getvalue()


def changed(whole: bytes, at: int, *new: int) -> bytes:
    """Returns bytes, some of which are replaced; ``at`` may count from the end."""
    at %= len(whole)
    return whole[:at] + bytes(new) + whole[at + len(new) :]


def zip_files() -> Iterator[tuple[str, bytes]]:
    whole = archive()
    end, directory = whole.index(b"PK\x05\x06"), whole.index(b"PK\x01\x02")
    yield "an archive", whole
    yield "an empty archive", archive(count=0)
    yield "an empty archive with a comment", archive(count=0, comment=b"text")
    for size in (4, 20, 30, 35, 60, directory - 1, directory, directory + 10, directory + 46, end, end + 4, end + 21):
        yield f"the first {size} bytes of an archive", whole[:size]
    for at in range(0, 30, 2):
        yield f"byte {at} of a local header", changed(whole, at + 4 if at < 26 else at, 0xFF)
    for at in range(4, 46, 2):
        yield f"bytes {at} of the directory", changed(whole, directory + at, 0xFF, 0xFF)
    for at in range(4, 22, 2):
        yield f"bytes {at} of the end", changed(whole, end + at, 0xFF, 0xFF)
    for size in (24, 20):
        huge = changed(whole, directory + size, 0xF0, 0xFF, 0xFF, 0xFF)
        yield f"4 GiB in the directory at {size}", huge
    both = changed(changed(whole, directory + 24, 0xF0, 0xFF, 0xFF, 0x7F), directory + 20, 0xF0, 0xFF, 0xFF, 0x7F)
    yield "2 GiB of elements in a small archive", both
    for name in (
        "../x.npy",
        "/etc/x.npy",
        "a\\b.npy",
        "a/b/c.npy",
        "",
        ".npy",
        "..",
        "a.txt",
        "\u20ac.npy",
        "x" * 500,
        "a.npy.npy",
    ):
        yield f"a member {name:.20}", archive(name=name)
    yield "a member with a NUL in its name", archive(name="a_b.npy").replace(b"a_b", b"a\0b")
    yield (
        "a member with a broken name",
        changed(archive(name="\u20acb.npy"), 30, 0xFF).replace(b"\xe2\x82\xac", b"\xff\x82\xac"),
    )
    yield "two members of one name", archive(count=2)
    yield "a member that is text", archive(b"text")
    yield "a member without bytes", archive(b"")
    yield "a member with bytes after the elements", archive(GOOD + b"more")
    yield "a member that is an archive", archive(whole)
    yield "a member that is a folder", archive(b"", name="a/")
    for shape in (f"({10**12},)", "(2**40,)", "(7, 3)", "(-1,)", "(0, 4611686018427387904, 4)"):
        for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
            yield f"the shape {shape} by method {method}", archive(npy(described(shape=shape)), method=method)
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        packed = archive(method=method)
        yield f"method {method}", packed
        for at in (36, 45, 60):
            yield f"byte {at} by method {method}", changed(packed, at, packed[at] ^ 0x40)
        claims = packed.index(b"PK\x01\x02") + 24
        yield f"a size that is too large by method {method}", changed(packed, claims, 0, 0, 0, 0x7F)
        yield f"a size that is too small by method {method}", changed(packed, claims, 20, 0, 0, 0)
    for method in (1, 9, 12, 14, 93, 98, 255):
        yield f"the unknown method {method}", changed(changed(whole, directory + 10, method), 8, method)
    yield "an encrypted member", changed(changed(whole, directory + 8, 1), 6, 1)
    yield "a strongly encrypted member", changed(changed(whole, directory + 8, 0x41), 6, 0x41)
    yield "a patched member", changed(changed(whole, directory + 8, 0x20), 6, 0x20)
    yield "a version of the future", changed(whole, directory + 6, 99)
    yield "a comment", archive(comment=b"text PK\x05\x06 and more")
    yield "a comment that is too short", archive(comment=b"0123456789")[:-4]
    yield "bytes after the archive", whole + b"\n" * 100
    yield "bytes before the archive", b"#!/bin/sh\n" + whole
    yield "members that overlap", overlapping()
    yield "a bomb", archive(npy(described(), bytes(4_000_000)), method=zipfile.ZIP_DEFLATED)
    yield "a bomb of text", archive(bytes(4_000_000), method=zipfile.ZIP_DEFLATED)
    yield "a stream of bz2", bz2.compress(GOOD)
    rng = random.Random(4)
    for k in range(40):
        at = rng.randrange(len(whole))
        yield f"a bit at {at}, {k}", changed(whole, at, whole[at] ^ 1 << rng.randrange(8))


def overlapping() -> bytes:
    """Returns an archive with two entries in its directory of one member."""
    whole = archive()
    end, directory = whole.index(b"PK\x05\x06"), whole.index(b"PK\x01\x02")
    entry, close = whole[directory:end], bytearray(whole[end:])
    close[8:12] = b"\2\0\2\0"
    close[12:16] = struct.pack("<I", 2 * len(entry))
    return whole[:end] + entry.replace(b"a.npy", b"b.npy") + bytes(close)


HOSTILE: dict[str, bytes] = {}
for _name, _content in [*npy_files(), *zip_files()]:
    assert _name not in HOSTILE
    HOSTILE[_name] = _content
assert len(HOSTILE) > 300


def arrays_of(read: Callable[..., Any], file: Any) -> dict[str, Any]:
    """Returns all arrays of a file, by their names."""
    found = read(file)
    if not hasattr(found, "files"):
        return {"": np.asarray(found)}
    with found:
        return {name: np.asarray(found[name]) for name in found.files}


@pytest.mark.parametrize("kind", ["path", "stream", "only read"])
def test_hostile_files_are_errors_of_the_library_or_arrays_of_numpy(kind: str, tmp_path: Path) -> None:
    path, wrong, loaded = tmp_path / "x.npy", [], 0
    tracemalloc.start()
    try:
        for name, content in spread(HOSTILE.items(), 1 if kind == "path" else 3, len(kind)):
            path.write_bytes(content)
            file: Any = {"path": path, "stream": io.BytesIO(content), "only read": Slow(content)}[kind]
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = arrays_of(st.load, file)
            except DOCUMENTED as error:
                if not str(error).startswith("load: "):
                    wrong.append((name, "the message", error))
                continue
            except Exception as error:
                wrong.append((name, "the class", error))
                continue
            finally:
                if (peak := tracemalloc.get_traced_memory()[1] - before) > 40_000_000:
                    wrong.append((name, "memory", peak))
            loaded += 1
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    wanted = arrays_of(np.load, io.BytesIO(content))
            except Exception as error:
                wrong.append((name, "NumPy's error", error))
                continue
            for key, x in found.items():
                y = wanted[key]
                if (
                    x.dtype != y.dtype.newbyteorder("=")
                    or x.shape != y.shape
                    or x.tobytes() != y.astype(x.dtype).tobytes()
                ):
                    wrong.append((name, key, x))
    finally:
        tracemalloc.stop()
    assert not wrong
    assert loaded > (20 if kind == "path" else 3)


class Slow:
    """A file with three methods, which reads one byte in three."""

    def __init__(self, content: bytes) -> None:
        self._stream = io.BytesIO(content)
        self.seek, self.tell = self._stream.seek, self._stream.tell

    def read(self, size: int = -1) -> bytes:
        return self._stream.read(size // 3 or size)


def test_each_changed_bit_of_the_elements_in_an_archive_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    for write in (st.savez, st.savez_compressed):
        write(path, a=A)
        whole = path.read_bytes()
        begin = whole.index(b"a.npy") + 5
        for at in range(begin + 20, whole.index(b"PK\x01\x02") - 1, 7):
            path.write_bytes(changed(whole, at, whole[at] ^ 1))
            try:
                with st.load(path) as archive:
                    found = np.asarray(archive["a"])
            except st.ArgumentError as error:
                assert str(error).startswith(f"load: 'a' of {path}")  # noqa: PT017
            else:  # Some bits of compressed files mean nothing.
                assert write is st.savez_compressed
                np.testing.assert_array_equal(found, A)


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npy")
    for path in (tmp_path / "pipe.npy", "/dev/null", "/dev/zero"):
        with pytest.raises(st.ArgumentError, match="is not a regular file"):
            st.load(path)
    with pytest.raises(IsADirectoryError):
        st.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        st.load(tmp_path / "x")


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardtensor.files import array_files

    path, read = tmp_path / "x.npy", array_files.read_header
    np.save(path, np.zeros(100_000))

    def shrinks(*args: Any) -> Any:
        header = read(*args)
        os.truncate(path, 5000)
        return header

    monkeypatch.setattr(array_files, "read_header", shrinks)
    with pytest.raises(st.ArgumentError, match="is truncated: 795128 of 800000 bytes are missing"):
        st.load(path)


def test_a_file_that_does_not_fit_is_an_error_before_memory_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system would give more memory than there is, and end the process that uses it."""
    path, head = tmp_path / "x.npy", npy(described(shape="(33554432,)"), b"")
    path.write_bytes(head)
    os.truncate(path, len(head) + (1 << 28))  # The file has no blocks on the disk.
    monkeypatch.setattr(memory_pool, "memory", lambda: (1 << 27, 1 << 34))
    with pytest.raises(st.DeviceMemoryError, match=r"load: .*x.npy needs 268435456 bytes of host memory"):
        st.load(path)


class _Path(os.PathLike[Any]):
    def __fspath__(self) -> bytes:
        return b"x"


@pytest.mark.parametrize(
    "file",
    [None, 3, 2.5, True, b"x", [], {}, object(), io.StringIO(), _Path(), np.array(1), st, int],
    ids=lambda file: type(file).__name__,
)
def test_objects_that_are_no_files(file: Any) -> None:
    for call in (st.load, lambda f: st.save(f, A), lambda f: st.savez(f, A), lambda f: st.savez_compressed(f, A)):
        with pytest.raises(st.ArgumentTypeError, match=r"file is .*; wanted a path"):
            call(file)
    with pytest.raises(st.ArgumentTypeError, match=r"tofile: file is .*; wanted a path"):
        st.asarray(A).tofile(file)


def test_paths_and_files_that_cannot_be_opened(tmp_path: Path) -> None:
    stream = io.BytesIO()
    stream.close()
    for file in ("a\0b", "\ud800", stream):
        for call in (st.load, lambda f: st.save(f, A), lambda f: st.savez(f, A)):
            with pytest.raises(st.ArgumentError, match="file is "):
                call(file)
    for name in ("a\0b", "\ud800", "x" * 70_000):
        with pytest.raises(st.ArgumentError, match="is the name of an array; wanted text"):
            st.savez(tmp_path / "x.npz", **{name: A})
    assert not list(tmp_path.iterdir())


def test_names_of_archives(tmp_path: Path) -> None:
    st.savez(tmp_path / "x.npz", **{"../x": A, "\u20ac": A, "a.npy": A, "": A})
    with st.load(tmp_path / "x.npz") as found:
        assert set(found) == {"../x", "\u20ac", "a.npy", ""}
        assert "../x" in found
        for name in (None, 0, [], "b"):
            assert name not in found
            with pytest.raises(KeyError, match="an array of the file"):
                _ = found[name]  # type: ignore[index]
    with pytest.raises(st.ArgumentError, match=r"load: '' of .*already closed"):
        _ = found[""]
    st.savez(tmp_path / "x.npz")
    with st.load(tmp_path / "x.npz") as found:
        assert dict(found) == {}
