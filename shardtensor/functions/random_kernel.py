"""Philox4x64-10 as one CUDA kernel, in place of the 250 that `shardtensor.host.philox.block` takes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from shardtensor.backend.protocol import Backend, Kernel
from shardtensor.host import philox


def fill_blocks(backend: Backend, key: int, index: Any, draw: int, words: tuple[Any, ...]) -> None:
    """Writes the four words of the blocks of some counters, on the current device of a backend of CUDA.

    Args:
        backend: the backend.
        key: the key.
        index: the first words of the counters, in an array of int64; or that of the first counter, as an integer, where
            they are successive.
        draw: the second word of the counters; the third and the fourth are 0.
        words: four arrays of int64, with an element for each counter.
    """
    keys = [np.uint64(key >> 64 * k & philox.WORD) for k in range(2)]
    first, step = (np.int64(index), 1) if isinstance(index, int) else (index, 0)
    _kernel(backend)(first, np.int64(step), np.int64(draw), *keys, *words)


@functools.lru_cache(16)
def _kernel(backend: Backend) -> Kernel:
    inputs = "int64 index, int64 step, int64 draw, uint64 key0, uint64 key1"
    outputs = "int64 word0, int64 word1, int64 word2, int64 word3"
    return backend.elementwise_kernel(inputs, outputs, OPERATION, name="shardtensor_philox", preamble=PREAMBLE)


PREAMBLE = f"""
static __device__ inline void st_philox(unsigned long long *words, unsigned long long key0, unsigned long long key1) {{
    const unsigned long long factor0 = {philox.MULTIPLIERS[0]:#x}ull, factor1 = {philox.MULTIPLIERS[1]:#x}ull;
    for (int round = 0; round < {philox.ROUNDS}; round++) {{
        const unsigned long long high0 = __umul64hi(words[0], factor0), low0 = words[0] * factor0;
        const unsigned long long high1 = __umul64hi(words[2], factor1), low1 = words[2] * factor1;
        words[0] = high1 ^ words[1] ^ key0;
        words[1] = low1;
        words[2] = high0 ^ words[3] ^ key1;
        words[3] = low0;
        key0 += {philox.WEYL[0]:#x}ull;
        key1 += {philox.WEYL[1]:#x}ull;
    }}
}}
"""

OPERATION = """\
unsigned long long words[4] = {(unsigned long long)(index + step * (long long)i), (unsigned long long)draw, 0, 0};
st_philox(words, key0, key1);
word0 = (long long)words[0];
word1 = (long long)words[1];
word2 = (long long)words[2];
word3 = (long long)words[3];
"""
"""The text of an element, whose number is ``i``."""
