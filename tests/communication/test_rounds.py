"""The rounds of an exchange: every element is in one packet, and no process has more bytes in packets than allowed."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as some

from shardtensor.backend.device import HOST
from shardtensor.communication.between_processes.freight import Freight
from shardtensor.communication.between_processes.rounds import Parcel, boxes, rounds
from tests.layouts import shapes

DTYPES = [np.dtype(code) for code in ("?", "i2", "f4", "f8", "c16", "M8[s]")]


@hypothesis.given(shape=shapes(0, 4), most=some.integers(1, 50))
def test_boxes_make_up_an_array(shape: tuple[int, ...], most: int) -> None:
    counts, last = np.zeros(shape, int), -1
    numbers = np.arange(counts.size).reshape(shape)
    for box, inner in boxes(shape, most):
        index: Any = (*box, ...)
        counts[index] += 1
        assert counts[index].shape == inner
        assert counts[index].size <= most or not counts.size
        if counts[index].size:
            assert numbers[index].min() > last, "in row-major order"
            last = numbers[index].max()
    assert np.all(counts == 1)


@hypothesis.given(data=some.data(), most=some.integers(64, 2000))
def test_packets_are_limited_and_have_every_byte_once(data: Any, most: int) -> None:
    ends = some.tuples(some.integers(0, 3), some.integers(0, 3)).filter(lambda pair: pair[0] != pair[1])
    drawn = data.draw(some.lists(some.tuples(ends, shapes(0, 3), some.sampled_from(DTYPES)), min_size=1, max_size=8))
    parcels = tuple([Parcel(*pair, shape, dtype) for pair, shape, dtype in drawn])
    made, found = rounds(parcels, most), [0] * len(parcels)
    for packets in made.packets:
        assert len({(m.sender, m.receiver) for m in packets}) == len(packets)
        for process in range(4):
            assert sum(m.nbytes for m in packets if process in (m.sender, m.receiver)) <= most
        for packet in packets:
            end = 0
            for part in packet.parts:
                parcel = parcels[part.number]
                assert (packet.sender, packet.receiver) == parcel[:2]
                assert part.begin >= end
                assert part.begin % parcel.dtype.itemsize == 0
                end = part.end
                found[part.number] += part.end - part.begin
            assert end == packet.nbytes
    assert found == [int(np.prod(p.shape, dtype=int)) * p.dtype.itemsize for p in parcels]


@hypothesis.given(
    wanted=some.lists(some.tuples(some.integers(1, 3), some.integers(0, 2)), min_size=1, max_size=8, unique=True),
    most=some.integers(64, 400),
)
@hypothesis.example(wanted=[(1, 0), (1, 1), (2, 1)], most=60)
def test_an_array_that_several_processes_receive_is_packed_for_each(wanted: list[tuple[int, int]], most: int) -> None:
    arrays = [np.arange(size, dtype=np.uint8) for size in (10, 40, 100)]
    parcels = [Parcel(0, receiver, arrays[n].shape, arrays[n].dtype) for receiver, n in wanted]
    freight = Freight(parcels, [(arrays[n], HOST, HOST) for _, n in wanted], [None] * len(wanted))
    arrived = [np.full_like(arrays[n], 255) for _, n in wanted]
    for packets in rounds(tuple(parcels), most).packets:
        outgoing, incoming = next(freight._round(packets))
        assert not incoming
        for packet in packets:
            for part in packet.parts:
                arrived[part.number][part.box or ...] = outgoing[packet.receiver][part.begin : part.end]
    for (_, n), found in zip(wanted, arrived, strict=True):
        np.testing.assert_array_equal(found, arrays[n])
