"""The tests of collectives in mapped functions, whose programs are suspended and resumed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import shardtensor as st
from shardtensor.backend import HostArray
from shardtensor.host.units import counted
from shardtensor.sharding.layout import offsets
from shardtensor.testing.base import Kit

MODES = "Backend.on, capture_modes: programs take turns in a thread, and each resumes with its own device and modes"
OPERANDS = "Backend.to_device, record, wait: in a collective, every program receives the operands of the others"


class CollectiveTests(Kit):
    """Mapped functions on all devices that call collectives."""

    def test_the_device_is_current_again_after_a_collective(self) -> None:
        """A program's device is current again after each collective, and the caller's after the map."""
        seen, before = dict[Any, Any](), self.current()
        st.pmap(lambda x: seen.update({st.current_device(): self.current()}), self._blocks(8), devices=self.devices)

        def program(x: Any) -> Any:
            device = st.current_device()
            assert device is not None
            for _ in range(3):
                self.must(self.current() == seen[device], MODES, f"{self.current()} on {device}")
                st.psum(x, "i")
            return x

        st.pmap(program, self._blocks(8), axis_name="i", devices=self.devices)
        self.must(self.current() == before, MODES, f"{self.current()} after a map, where it was {before}")

    def test_collective_reductions(self) -> None:
        """Sums and extrema of small and large arrays are correct on every device."""
        for size in (1, 8, 1 << 17):
            blocks = [self.numbers(size, first=k + 1) for k in range(len(self.devices))]
            columns = st.pmap(
                lambda x: (st.psum(x, "i"), st.pmax(x, "i"), st.pmin(x, "i")), self._on_each(blocks), axis_name="i"
            )
            answers = [sum(blocks[1:], blocks[0]), np.max(blocks, axis=0), np.min(blocks, axis=0)]
            for results in columns:
                for result, right in zip(results, answers, strict=True):
                    self.same(np.asarray(result), right, OPERANDS, f"psum, pmax, pmin of {counted(size, 'element')}")

    def test_collective_moves(self) -> None:
        """all_gather, psum_scatter, all_to_all and ppermute are correct for blocks of unequal sizes."""
        n = len(self.devices)
        bounds = offsets(4 * n + 1, (n,)).tolist()
        value = self.numbers(4 * n + 1)
        blocks = [value[a:b] for a, b in itertools.pairwise(bounds)]
        turn = [(k, (k + 1) % n) for k in range(n)]

        def program(x: Any) -> Any:
            whole = st.all_gather(x, "i", tiled=True)
            part = st.psum_scatter(whole, "i", tiled=True)
            return whole, part, st.all_to_all(x, "i", 0, 0, tiled=True), st.ppermute(x, "i", turn)

        results = st.pmap(program, self._on_each(blocks), axis_name="i")
        for k, (whole, part, exchanged, turned) in enumerate(results):
            cuts = [offsets(len(b), (n,)).tolist() for b in blocks]
            pieces = [b[c[k] : c[k + 1]] for b, c in zip(blocks, cuts, strict=True)]
            self.same(np.asarray(whole), value, OPERANDS, "all_gather")
            self.same(np.asarray(part), blocks[k] * n, OPERANDS, "psum_scatter")
            self.same(np.asarray(exchanged), np.concatenate(pieces), OPERANDS, "all_to_all")
            self.same(np.asarray(turned), blocks[k - 1], OPERANDS, "ppermute")

    def test_collective_exchange_of_rows(self) -> None:
        """ragged_all_to_all is correct, with offsets and sizes in host arrays, and in arrays that the host reads."""
        n = len(self.devices)
        sizes = np.array([[(i + 2 * k) % 3 for k in range(n)] for i in range(n)])
        begins, places = np.cumsum(sizes, axis=1) - sizes, np.cumsum(sizes, axis=0) - sizes
        value = self.numbers(3 * n)
        numbers = [begins, sizes, places, sizes.T]

        def program(x: Any) -> Any:
            mine = [table[st.axis_index("i")] for table in numbers]
            received = st.ragged_all_to_all(x + x, x, *mine, axis_name="i")
            return received, st.ragged_all_to_all(x + x, x, *map(st.asarray, mine), axis_name="i")

        results = st.pmap(program, self._on_each([value + k for k in range(n)]), axis_name="i")
        for k, pair in enumerate(results):
            right = value + k
            for i in range(n):
                at, begin, size = places[i, k], begins[i, k], sizes[i, k]
                right[at : at + size] = 2 * (value + i)[begin : begin + size]
            for result in pair:
                self.same(np.asarray(result), right, OPERANDS, "ragged_all_to_all")

    def test_operands_of_collectives_may_be_written_afterwards(self) -> None:
        """Writing to the operand of a collective after it does not change the results of other programs."""
        n = len(self.devices)

        def program(x: Any) -> Any:
            mine = self.it.xp.asarray(x, copy=True)
            turned = st.ppermute(mine, "i", [(k, (k + 1) % n) for k in range(n)])
            gathered = st.all_gather(mine, "i")
            mine[...] = self.it.xp.zeros_like(mine)
            return turned, gathered

        blocks = [self.numbers(self.size, first=k + 1) for k in range(n)]
        results = st.pmap(program, self._on_each(blocks), axis_name="i")
        for k, (turned, gathered) in enumerate(results):
            self.same(np.asarray(turned), blocks[k - 1], OPERANDS, "ppermute, after its operand was written")
            self.same(np.asarray(gathered), np.stack(blocks), OPERANDS, "all_gather, after its operands were written")

    def test_successive_collectives(self) -> None:
        """Many successive collectives are correct, with computations queued between them."""
        n = len(self.devices)
        turn = [(k, (k + 1) % n) for k in range(n)]

        def program(x: Any) -> Any:
            for _ in range(self.chain):
                x = st.ppermute(x + x, "i", turn) - st.pmin(x, "i")
            return x

        blocks = [(np.arange(8) % 2 + k).astype(self.dtype) for k in range(n)]
        results = st.pmap(program, self._on_each(blocks), axis_name="i")
        for _ in range(self.chain):
            least = np.min(blocks, axis=0)
            blocks = [blocks[k - 1] + blocks[k - 1] - least for k in range(n)]
        for result, block in zip(results, blocks, strict=True):
            self.same(np.asarray(result), block, OPERANDS, f"{self.chain} collectives in a row")

    def _blocks(self, size: int) -> list[HostArray]:
        return [self.numbers(size, first=k + 1) for k in range(len(self.devices))]

    def _on_each(self, blocks: list[HostArray]) -> list[st.ShardedTensor]:
        return [st.device_put(block, device) for block, device in zip(blocks, self.devices, strict=True)]
