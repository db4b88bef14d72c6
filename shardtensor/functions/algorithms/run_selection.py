"""Selection of the least elements of sorted runs, one run on each device.

The order of elements is that of their values; equal ones are ordered by their devices, then by their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards
from shardtensor.sharding.layout import offsets

CANDIDATES = 256
"""The number of candidates that a device sends for each rank in one round."""

_INT = np.dtype("int64")


def rounds(sizes: Sequence[int]) -> int:
    """Returns the number of rounds of `cuts` for runs of these sizes.

    A round leaves at most three of `CANDIDATES` elements, and one. It is the last if every element is a candidate.
    """
    left, longest, count = sum(sizes), max(sizes), 1
    while min(left, longest) > CANDIDATES:
        left = 3 * left // CANDIDATES + 1
        count += 1
    return count


def cuts(comm: MeshCommunicator, runs: Shards, sizes: Sequence[int], ranks: Sequence[Sequence[int]]) -> Shards:
    """Returns for each rank r how many elements of each device's run are among the r least ones.

    The ranks are divided over the devices. In each round, every device sends `CANDIDATES` elements of its run for each
    rank, evenly spaced in the window in which the run is cut. The device of the rank merges them: a candidate bounds
    the number of elements that precede it, up to the distance of the candidates. That narrows all windows to those of
    the candidates that may be next to the cut (multisequence selection: Varman et al., "Merging multiple lists on
    hierarchical-memory multiprocessors", 1991). Each device of P sends for each rank of another device in each round
    `CANDIDATES` elements, and each device of a rank sends 16 bytes to each other device, so that R ranks take
    ``R * (P - 1) * rounds(sizes) * (CANDIDATES * itemsize + 16)`` bytes.

    Args:
        comm: the communicator of the devices.
        runs: arrays of one dimension, in ascending order.
        sizes: their sizes, in the order of the devices of a group.
        ranks: for each device of the mesh the ranks, the same for all devices of a group.

    Returns:
        For each device an array of int64 with an item for each rank.
    """
    count, size = len(ranks[0]), comm.size
    ends = offsets(count, (size,)).tolist()
    targets = [row[ends[k] : ends[k + 1]] for k, row in zip(comm.index, ranks, strict=True)]
    at = runs.map(_at_first, [[sizes[k]] for k in comm.index], [count] * len(comm.index), shape=lambda _: (2, count, 1),
                  dtype=_INT)  # fmt: skip
    windows = runs.map(_windows_at_first, [sizes] * len(comm.index), targets, shape=lambda _: (2, 0, size), dtype=_INT)
    for _ in range(rounds(sizes)):
        sent = runs.map(_candidates, at.arrays, shape=lambda _: (count, CANDIDATES), dtype=runs.value.dtype)
        received = comm.all_to_all(sent, 0, 1)
        windows = received.map(_narrowed, windows.arrays, targets, shape=lambda shape: (2, shape[0], size), dtype=_INT)
        at = comm.all_to_all(windows, 2, 1)
    return at.map(lambda xp, a: xp.reshape(a[0], (-1,)), shape=lambda _: (count,), dtype=_INT)


def _at_first(xp: Any, run: Any, sizes: Sequence[int], count: int) -> Any:
    """Returns the begins and widths of the windows of one run, one for each rank."""
    return xp.stack([xp.zeros((count, 1), dtype=_INT), xp.full((count, 1), sizes[0], dtype=_INT)])


def _windows_at_first(xp: Any, run: Any, sizes: Sequence[int], ranks: Sequence[int]) -> Any:
    """Returns the begins and widths of the windows of all runs, for each rank of the device."""
    widths = xp.asarray([list(sizes)] * len(ranks), dtype=_INT)
    widths = xp.reshape(widths, (len(ranks), len(sizes)))
    return xp.stack([xp.zeros_like(widths), widths])


def _counts(xp: Any, widths: Any) -> Any:
    """Returns how many elements of windows precede the end of each candidate, from none to all of them."""
    steps = xp.arange(CANDIDATES + 1, dtype=_INT)
    spaced = xp.add(xp.multiply(widths[..., None], steps), CANDIDATES - 1)
    return xp.floor_divide(spaced, CANDIDATES)


def _candidates(xp: Any, run: Any, at: Any) -> Any:
    begins, widths = at[0, :, 0], at[1, :, 0]
    if not run.shape[0]:
        return xp.zeros((begins.shape[0], CANDIDATES), dtype=run.dtype)
    ends = xp.add(begins[:, None], _counts(xp, widths)[:, 1:])
    return run[xp.clip(xp.subtract(ends, 1), 0, run.shape[0] - 1)]


def _narrowed(xp: Any, candidates: Any, windows: Any, ranks: Sequence[int]) -> Any:
    """Returns the begins and widths of narrower windows, in which the runs are cut."""
    begins, widths = windows[0], windows[1]
    shape = (len(ranks), begins.shape[1], CANDIDATES)
    # Of a run, at least `least` elements and at most `most` are in front of the cut behind its first i candidates.
    least = _counts(xp, widths)
    next_ones = xp.maximum(xp.subtract(least[..., 1:], 1), least[..., :-1])
    most = xp.concat([next_ones, least[..., -1:]], axis=-1)
    order = xp.argsort(candidates, axis=-1, stable=True)
    places = xp.reshape(xp.argsort(order, axis=-1, stable=True), shape)
    targets = xp.subtract(xp.asarray(list(ranks), dtype=_INT), xp.sum(begins, axis=1))[:, None]
    ends = []
    for bound in (most, least):  # The candidates that are in front of the cut, and those that may be.
        steps = xp.reshape(xp.subtract(bound[..., 1:], bound[..., :-1]), candidates.shape)
        totals = xp.cumsum(xp.take_along_axis(steps, order, axis=-1), axis=-1)
        totals = xp.add(totals, xp.sum(bound[..., 0], axis=1)[:, None])
        in_front = xp.sum(xp.astype(xp.less_equal(totals, targets), _INT), axis=1)
        chosen = xp.sum(xp.astype(xp.less(places, in_front[:, None, None]), _INT), axis=2)[..., None]
        ends.append(xp.take_along_axis(least if bound is most else most, chosen, axis=-1)[..., 0])
    return xp.stack([xp.add(begins, ends[0]), xp.subtract(ends[1], ends[0])])
