"""Arguments of `ragged_all_to_all` for all devices, and NumPy's answers. It uses no device, so that programs of several
processes can import it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Rows = list[tuple[int, int, int, int]]
"""For each slice of a device the position of the receiver, the first row, where it goes, and the number of rows."""


class Exchange(NamedTuple):
    """The arguments of all devices that exchange rows, as host arrays."""

    operands: list[np.ndarray]
    outputs: list[np.ndarray]
    begins: list[np.ndarray]
    sizes: list[np.ndarray]
    places: list[np.ndarray]
    expected: list[np.ndarray]

    def of(self, k: int) -> list[np.ndarray]:
        return [column[k] for column in self]

    def slices(self, i: int) -> Rows:
        each = len(self.begins[i]) // len(self.begins)
        rows = zip(self.begins[i].tolist(), self.places[i].tolist(), self.sizes[i].tolist(), strict=True)
        return [(j // each, *row) for j, row in enumerate(rows)]

    def answer(self) -> list[np.ndarray]:
        """What each device gets."""
        results = [x.copy() for x in self.outputs]
        for i, operand in enumerate(self.operands):
            for k, begin, at, n in self.slices(i):
                results[k][at : at + n] = operand[begin : begin + n]
        return results

    def returned(self, cotangents: Sequence[np.ndarray], into: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What each device gets by the transpose."""
        results = [x.copy() for x in into]
        for i in range(len(results)):
            for k, begin, at, n in self.slices(i):
                results[i][begin : begin + n] += cotangents[k][at : at + n]
        return results

    def sent(self) -> dict[tuple[int, int], int]:
        """The bytes from each device to each other."""
        found: dict[tuple[int, int], int] = {}
        for i, operand in enumerate(self.operands):
            for k, *_, n in self.slices(i):
                if n and i != k:
                    found[i, k] = found.get((i, k), 0) + operand[:1].nbytes // max(len(operand[:1]), 1) * n
        return {pair: nbytes for pair, nbytes in found.items() if nbytes}


def exchange_of(
    count: int, each: int, tail: tuple[int, ...], dtype: str, numbers: str, draw: Callable[[int, int], int]
) -> Exchange:
    """Returns arguments of ``count`` devices with ``each`` slices for each of them; ``draw(a, b)`` is from a to b."""
    lengths = [draw(0, 6) for _ in range(count)]
    sizes = np.array([[draw(0, lengths[i]) for _ in range(count * each)] for i in range(count)])
    begins = np.array([[draw(0, lengths[i] - n) if n else draw(-9, 99) for n in sizes[i]] for i in range(count)])
    places, rooms = np.zeros_like(sizes), []
    for k in range(count):
        slices = [(i, k * each + j) for i in range(count) for j in range(each)]
        room = draw(0, 2)
        for at in sorted(slices, key=lambda _: draw(0, 99)):
            places[at] = room if sizes[at] else draw(-9, 99)
            room += sizes[at] + (draw(0, 1) if sizes[at] else 0)
        rooms.append(room)
    expected = sizes.reshape(count, count, each).transpose(1, 0, 2).reshape(count, -1)
    return Exchange(
        [_values((n, *tail), dtype, k) for k, n in enumerate(lengths)],
        [_values((n, *tail), dtype, 20 + k) for k, n in enumerate(rooms)],
        *[[row.astype(numbers) for row in table] for table in (begins, sizes, places, expected)],
    )


def some_exchange(
    seed: int, count: int, each: int = 1, tail: tuple[int, ...] = (3,), dtype: str = "float64"
) -> Exchange:
    rng = np.random.default_rng(seed)
    return exchange_of(count, each, tail, dtype, "int32", lambda a, b: int(rng.integers(a, b + 1)))


def even_exchange(count: int, each: int = 1, rows: int = 6, room: int = 20, seed: int = 0) -> Exchange:
    """Arguments of equal shapes on all devices, of which the slices of one do not overlap."""
    rng = np.random.default_rng(seed)
    sizes = np.array([np.diff([0, *np.sort(rng.integers(0, rows + 1, count * each))]) for _ in range(count)])
    begins = np.cumsum(sizes, axis=1) - sizes
    expected = sizes.reshape(count, count, each).transpose(1, 0, 2).reshape(count, -1)
    ends = np.cumsum(expected, axis=1) - expected + 1
    places = ends.reshape(count, count, each).transpose(1, 0, 2).reshape(count, -1)
    return Exchange(
        [rng.standard_normal((rows, 3)) for _ in range(count)],
        [rng.standard_normal((room, 3)) for _ in range(count)],
        *[[*table.astype("int32")] for table in (begins, sizes, places, expected)],
    )


def _values(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)
