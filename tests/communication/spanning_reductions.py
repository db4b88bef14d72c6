"""Reduces tensors that span processes, in short blocks: ``spanning_reductions.py FILE STEP``.

Process 0 writes a line for every STEP-th call to the file: its name, and a hash of the bits of the result. Jobs with the same
number of devices in other numbers of processes must write the same lines.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import shardtensor as st
from shardtensor import P, distributed
from shardtensor.interpreters.execution import blocked_reduction, plan_cache

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": st.sum, "mean": st.mean, "var": st.var, "std": st.std, "prod": st.prod, "max": st.max, "norm": st.linalg.vector_norm,
}  # fmt: skip
SHAPES = [(1003,), (90, 83), (300, 9), (9, 300), (20, 9, 31), (11, 1, 60)]


def layouts(ndim: int) -> Iterator[st.NamedSharding]:
    """Yields every way to split one or two dimensions over all devices."""
    count = len(st.devices())
    line = st.make_mesh((count,), ("d",))
    yield from (st.NamedSharding(line, P(*[None] * d, "d")) for d in range(ndim))
    if count % 2 == 0:
        table = st.make_mesh((2, count // 2), ("a", "b"))
        for first, second in itertools.permutations(range(ndim), 2):
            entries: list[Any] = [None] * ndim
            entries[first], entries[second] = "a", "b"
            yield st.NamedSharding(table, P(*entries))


def calls() -> Iterator[tuple[str, Callable[[], st.ShardedTensor]]]:
    """Yields the name of each call and the call."""
    numbers = np.random.default_rng(0)
    for shape, dtype in itertools.product(SHAPES, ("float32", "complex128")):
        whole = (numbers.normal(size=shape) + 1j * numbers.normal(size=shape)).astype("complex128")
        whole = whole if dtype[0] == "c" else whole.real.astype(dtype)
        for sharding in layouts(len(shape)):
            x = distributed.make_array_from_callback(shape, sharding, lambda index, whole=whole: whole[index])
            axes: list[Any] = [None, *range(len(shape)), *([(0, 2), (1, 2)] if len(shape) == 3 else [])]
            for (name, function), axis in itertools.product(FUNCTIONS.items(), axes):
                if (dtype[0] == "c" and name == "max") or (name == "norm" and isinstance(axis, tuple)):
                    continue
                for what, operand in (("x", x), ("x.T", x.T)):
                    call = functools.partial(function, operand, axis=axis)
                    yield f"{name} of {what}: {dtype} {shape} {sharding.spec} axis={axis}", call


def main() -> None:
    distributed.initialize(engine=None if "SHARDTENSOR_ALONE" not in os.environ else "local", timeout=20)
    found = []
    for block in (1 << 9, blocked_reduction._BLOCK):
        # What is longer than a block is computed in blocks. In the second round, nothing is.
        with mock.patch.multiple(blocked_reduction, _BLOCK=block, _CACHED=block // 2, _WIDTH=1 << 5):
            plan_cache._cached_plan.cache_clear()
            for name, call in itertools.islice(calls(), 0, None, int(sys.argv[2])):
                result = call()
                whole = distributed.process_allgather(result) if distributed.process_count() > 1 else np.asarray(result)
                found.append(f"{block} {name}".replace(" ", "_") + f" {hashlib.md5(whole.tobytes()).hexdigest()}")
        plan_cache._cached_plan.cache_clear()
    if distributed.process_index() == 0:
        Path(sys.argv[1]).write_text("\n".join(found) + "\n")
    distributed.shutdown()


if __name__ == "__main__":
    main()
