"""Random numbers by CUDA: Philox4x64-10 and the numbers computed from its words in one kernel, or only the words.

Only the words take one kernel, in place of the 250 that `shardtensor.host.philox.block` takes. A kernel that makes the
numbers, too, reads no memory and writes the numbers only. Its expressions are those of
`shardtensor.functions.random.distributions`, in the same order and precision, so that the numbers have the same bits,
as far as the functions of the libraries have.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.protocol import Backend, Kernel, RawKernel
from shardtensor.host import normals, philox


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


# -- numbers ---------------------------------------------------------------------------------------

_THREADS = 256
"""The number of threads of a block of CUDA."""

_NARROW = 1 << 32
"""The number of elements from which on their positions take 64 bits."""

_TYPES = {"?": "bool", "f": "float", "d": "double", "q": "long long"}
"""The types of the elements of results, by the characters of their dtypes."""


def makes(name: str, dtype: np.dtype[Any]) -> bool:
    """Returns whether `write_numbers` has the numbers ``name`` of a dtype."""
    return (name, _char(dtype)) in _NUMBERS


def write_numbers(
    backend: Backend, name: str, key: int, out: Any, starts: Any, length: int, parameters: Sequence[Any]
) -> None:
    """Writes random numbers to an array, on the current device of a backend of CUDA, by one launch.

    Args:
        backend: the backend.
        name: the numbers: see `makes`.
        key: the key.
        out: the array, which is contiguous and has elements.
        starts: the index of the first element of each run, in an array of int64; or of the only run, as an integer.
        length: the number of elements of each run.
        parameters: those of the numbers.
    """
    char = _char(out.dtype)
    per_block = 4 if out.dtype.itemsize == 8 or char == "?" else 8
    alone = isinstance(starts, int)
    if alone:
        runs, blocks = 1, -(-(starts % per_block + length) // per_block)
    else:
        runs, blocks = (
            starts.shape[0],
            (length + per_block - 2) // per_block + 1,
        )  # as many as the most that one touches
    threads = runs * blocks
    wide = (threads + _THREADS) * per_block >= _NARROW
    index: Any = np.uint64 if wide else np.uint32
    numbers = [np.int64(0), np.int64(starts)] if alone else [starts, np.int64(0)]
    numbers += [index(n) for n in (threads, blocks, length)]
    numbers += [np.uint64(key >> 64 * k & philox.WORD) for k in range(2)]
    launch = _numbers(backend, name, char, per_block, wide)
    launch(-(-threads // _THREADS), (_THREADS, 1, 1), [out, *numbers, *parameters])


def _char(dtype: np.dtype[Any]) -> str:
    return "q" if dtype == np.int64 else dtype.char  # On some systems, its character is that of C's long.


@functools.lru_cache(64)
def _numbers(backend: Backend, name: str, char: str, per_block: int, wide: bool) -> RawKernel:
    return backend.raw_kernel(text_of(name, char, per_block, wide), f"shardtensor_{name}")


def text_of(name: str, char: str, per_block: int, wide: bool) -> str:
    """Returns the text of the kernel of `write_numbers`.

    Each thread makes the numbers of one block of words, and writes them by stores of 16 bytes where they are aligned.

    Args:
        name: the numbers.
        char: the character of their dtype.
        per_block: how many are made of a block.
        wide: whether the numbers of blocks and elements take 64 bits.
    """
    parameters, body = _NUMBERS[name, char]
    index, number = "unsigned long long" if wide else "unsigned int", _TYPES[char]
    vector = max(1, min(per_block, 16 // np.dtype(char).itemsize))
    return f"""{PREAMBLE}
typedef struct __align__({vector * np.dtype(char).itemsize}) {{ {number} of[{vector}]; }} st_vector;
{_FUNCTIONS if name == "normal" and char == "d" else ""}
extern "C" __global__ void shardtensor_{name}(
    {number} *out, const long long *starts, long long first, {index} threads, {index} blocks, {index} length,
    unsigned long long key0, unsigned long long key1{"".join([f", {p}" for p in parameters])}
) {{
    const {index} thread = ({index})blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= threads) return;
    const {index} run = starts ? thread / blocks : 0, block = thread - run * blocks, begin = block * {per_block};
    const long long start = starts ? starts[run] : first;
    const unsigned int skip = (unsigned int)start & {per_block - 1};
    const long long counter = (start >> {per_block.bit_length() - 1}) + block;
    const unsigned int from = begin ? 0 : skip;
    const unsigned int to = begin + {per_block} <= length + skip ? {per_block} : (int)(length + skip - begin);
    if ((int)to <= (int)from) return;
    unsigned long long words[4] = {{(unsigned long long)counter, 0, 0, 0}};
    st_philox(words, key0, key1);
    const long long at = (long long)(run * length + begin) - skip;
    {number} made[{per_block}];
{body.strip(chr(10))}
    {number} *const target = out + at;
    if (to - from == {per_block} && !((unsigned long long)target & {vector * np.dtype(char).itemsize - 1})) {{
        #pragma unroll
        for (int k = 0; k < {per_block // vector}; k++) {{
            st_vector several;
            #pragma unroll
            for (int j = 0; j < {vector}; j++) several.of[j] = made[k * {vector} + j];
            ((st_vector *)target)[k] = several;
        }}
    }} else {{
        #pragma unroll
        for (int k = 0; k < {per_block}; k++) if (k >= from && k < to) target[k] = made[k];
    }}
}}
"""


def _of_words(expression: str) -> str:
    """Returns the text that makes a number of each ``word``."""
    return f"""
    #pragma unroll
    for (int k = 0; k < 4; k++) {{
        const unsigned long long word = words[k];
        made[k] = {expression};
    }}
"""


def _of_halves(expression: str) -> str:
    """Returns the text that makes a number of each ``half`` of a word, of the lower one first."""
    return f"""
    #pragma unroll
    for (int k = 0; k < 8; k++) {{
        const unsigned int half = (unsigned int)(words[k / 2] >> (k % 2 * 32));
        made[k] = {expression};
    }}
"""


def _polynomial(coefficients: Sequence[float], x: str) -> str:
    text = f"{coefficients[-1]!r} * {x}"
    for c in coefficients[-2:0:-1]:
        text = f"({text} + {c!r}) * {x}"
    return f"{text} + {coefficients[0]!r}"


_FUNCTIONS = f"""
static __device__ inline double st_positive(unsigned long long word) {{
    return (double)word * {2.0**-64!r} + {2.0**-65!r};
}}
static __device__ inline double st_even(double x) {{ return {_polynomial(normals.SERIES[:, 0].tolist(), "x")}; }}
static __device__ inline double st_odd(double x) {{ return {_polynomial(normals.SERIES[:, 1].tolist(), "x")}; }}
"""
"""The functions ``_positive`` and ``_polynomials`` of `shardtensor.functions.random.distributions`."""

_NORMAL = """
    #pragma unroll
    for (int k = 0; k < 4; k += 2) {
        const unsigned long long word = words[k + 1];
        const double radius = sqrt(0.0 - log(st_positive(words[k])));
        const double t = ((double)((long long)(word << 2) >> 12) + 0.5) * STEP;
        const double even = st_even(t * t), odd = st_odd(t * t) * t;
        made[k] = copysign((even - odd) * radius, word >> 63 ? -1.0 : 1.0);
        made[k + 1] = copysign((even + odd) * radius, word >> 62 & 1 ? -1.0 : 1.0);
    }
""".replace("STEP", repr(2.0**-51))

_NORMAL32 = f"""
    #pragma unroll
    for (int k = 0; k < 8; k += 2) {{
        const unsigned int low = (unsigned int)words[k / 2], high = (unsigned int)(words[k / 2] >> 32);
        const float radius = sqrtf(logf((float)low * {2.0**-32!r}f + {2.0**-33!r}f) * -2.0f);
        const float angle = (float)(high >> 8) * {2.0**-24!r}f * (float){2 * math.pi!r};
        made[k] = radius * cosf(angle);
        made[k + 1] = radius * sinf(angle);
    }}
"""

# Of the products of words and the number of integers, those whose low words are below `least` are rejected. An element
# is redrawn of blocks of its own, the number of the first of which is 2.
_INTEGERS = """
    #pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned long long word = words[k];
        if (count) {
            for (unsigned long long attempt = 2; word * count < least; attempt++) {
                unsigned long long own[4] = {(unsigned long long)(start - skip + begin + k), attempt, 0, 0};
                st_philox(own, key0, key1);
                word = own[0];
            }
            word = __umul64hi(word, count);
        }
        made[k] = (long long)(word + low);
    }
"""

_BERNOULLI = f"""
    #pragma unroll
    for (int k = 0; k < 4; k++) {{
        const double p = !given ? probability : k >= from && k < to ? given[at + k] : 0.0;
        made[k] = (double)(words[k] >> 11) * {2.0**-53!r} < p;
    }}
"""

_NUMBERS: dict[tuple[str, str], tuple[Sequence[str], str]] = {
    ("uniform", "d"): ((), _of_words(f"(double)(word >> 11) * {2.0**-53!r}")),
    ("uniform", "f"): ((), _of_halves(f"(float)(half >> 8) * {2.0**-24!r}f")),
    ("normal", "d"): ((), _NORMAL),
    ("normal", "f"): ((), _NORMAL32),
    ("exponential", "d"): ((), _of_words(f"0.0 - log((double)word * {2.0**-64!r} + {2.0**-65!r})")),
    ("exponential", "f"): ((), _of_halves(f"0.0f - logf((float)half * {2.0**-32!r}f + {2.0**-33!r}f)")),
    ("words", "q"): ((), _of_words("(long long)word")),
    ("integers", "q"): (("unsigned long long count", "unsigned long long least", "unsigned long long low"), _INTEGERS),
    ("bernoulli", "?"): (("const double *given", "double probability"), _BERNOULLI),
}
"""The parameters of the numbers, and the text that makes them of words, by their names and the characters of dtypes."""
