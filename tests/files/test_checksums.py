"""CRC-32C: all implementations give the numbers of RFC 3720, at all sizes and offsets."""

from __future__ import annotations

import numpy as np
import pytest

from shardtensor.files import checksums
from shardtensor.files.checksums import bytes_of, crc32c, implementations
from tests.draws import drawn

IMPLEMENTATIONS = implementations()

VECTORS = {
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    bytes.fromhex(
        "01c00000000000000000000000000000140000000000040000000014000000182800000000000000" + "02" + "0" * 14
    ): 0xD9963A56,
    b"123456789": 0xE3069283,
    b"": 0,
}
"""RFC 3720, B.4, the check value of the catalogue of CRCs, and nothing."""


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_known_vectors(name: str) -> None:
    for text, value in VECTORS.items():
        assert IMPLEMENTATIONS[name](bytes_of(text), 0) == value


def test_c_is_among_the_implementations_where_there_is_a_compiler() -> None:
    assert ("C" in IMPLEMENTATIONS) == (checksums.find_compiler() is not None)
    assert "NumPy" in IMPLEMENTATIONS


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_sizes_offsets_and_begins(name: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8)
    sizes = [*range(70), 127, 128, 4095, 4096, 12287, 12288, 12289, 24576, 65536, 65537, 100_003, 262_144, 262_145]
    table = checksums._byte_table().tolist()
    state, expected = 0xFFFFFFFF, {}
    for n, byte in enumerate(data[3 : 3 + sizes[-1]].tolist()):
        expected[n] = state ^ 0xFFFFFFFF
        state = table[(state ^ byte) & 255] ^ state >> 8
    expected[sizes[-1]] = state ^ 0xFFFFFFFF
    for n in sizes:
        text = data[3 : 3 + n]
        assert IMPLEMENTATIONS[name](text, 0) == expected[n], n
        head = n // 3
        assert IMPLEMENTATIONS[name](text[head:], expected[head]) == expected[n], n


def test_arrays_of_any_dtype_and_read_only_bytes() -> None:
    x = np.arange(60, dtype=">f8").reshape(3, 4, 5)
    assert crc32c(x) == crc32c(x.tobytes()) == crc32c(memoryview(x.tobytes())) == crc32c(bytearray(x.tobytes()))
    assert crc32c(np.zeros((0, 3))) == 0
    assert crc32c(np.float64(1).reshape(())) == crc32c(np.float64(1).tobytes())


@pytest.mark.parametrize("seed", range(drawn(40, fast=4)))
def test_a_flipped_bit_changes_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, int(rng.integers(1, 50_000)), dtype=np.uint8)
    before = {name: function(data, 0) for name, function in IMPLEMENTATIONS.items()}
    assert len(set(before.values())) == 1
    data[rng.integers(data.size)] ^= 1 << rng.integers(8)
    assert all(function(data, 0) != before[name] for name, function in IMPLEMENTATIONS.items())


def test_without_a_compiler_numpy_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "find_compiler", lambda: None)
    monkeypatch.setattr(checksums.importlib, "import_module", raising)
    assert list(implementations()) == ["NumPy"]


def raising(name: str) -> None:
    raise ImportError(name)
