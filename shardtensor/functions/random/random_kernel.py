"""Random numbers by CUDA: Philox4x64-10 and the numbers computed from its words in one kernel, or only the words.

Only the words take one kernel, in place of the 250 that `shardtensor.host.philox.block` takes. A kernel that makes the
numbers, too, reads no memory and writes the numbers only. Its expressions are those of
`shardtensor.functions.random.numbers_of_words`, in the same order and precision, so that the numbers have the same
bits, as far as the functions of the libraries have.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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


_STEPS = "".join(
    [
        f"    word *= {factor % 2**64:#x}ull;\n    word ^= (unsigned long long)((long long)word >> 32);\n"
        for factor in philox.MIXING[1:3]
    ]
)

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
static __device__ inline unsigned long long st_mixed(unsigned long long word, unsigned long long number) {{
    word += number * {philox.MIXING[0] % 2**64:#x}ull;
{_STEPS}    return word * {philox.MIXING[3] % 2**64:#x}ull;
}}
static __device__ inline void st_scramble(unsigned long long *a, unsigned long long *b, unsigned long long number) {{
    *b ^= st_mixed(*a, number);
    *a ^= st_mixed(*b, number);
}}
"""
"""The functions `philox.words`, of one block, and `philox.scrambled`."""

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
    per_block = 8 if _NUMBERS[name, char].of_halves else 4
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
    return backend.raw_kernel(text_of(name, char, per_block, wide), _function(name))


def _function(name: str) -> str:
    return f"shardtensor_{name.split()[0]}"


def text_of(name: str, char: str, per_block: int, wide: bool) -> str:
    """Returns the text of the kernel of `write_numbers`.

    Each thread makes the numbers of one block of words, and writes them by stores of 16 bytes where they are aligned.

    Args:
        name: the numbers.
        char: the character of their dtype.
        per_block: how many are made of a block.
        wide: whether the numbers of blocks and elements take 64 bits.
    """
    parameters, body, _ = _NUMBERS[name, char]
    index, number = "unsigned long long" if wide else "unsigned int", _TYPES[char]
    vector = max(1, min(per_block, 16 // np.dtype(char).itemsize))
    return f"""{PREAMBLE}
typedef struct __align__({vector * np.dtype(char).itemsize}) {{ {number} of[{vector}]; }} st_vector;
{_ZIGGURAT if name == "normal" and char == "d" else ""}
extern "C" __global__ void {_function(name)}(
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


def _table(name: str, numbers: Sequence[float]) -> str:
    return f"static __device__ const double {name}[] = {{{', '.join(map(repr, numbers))}}};"


_ZIGGURAT = f"""
{_table("st_ends", normals.ENDS.tolist())}
{_table("st_heights", normals.HEIGHTS.tolist())}
static __device__ inline double st_normal(unsigned long long a, unsigned long long b) {{
    for (int attempt = 0;; attempt++) {{
        const int layer = (int)(a & {normals.LAYERS - 1});
        const double x = ((double)((long long)a >> 11) + 0.5) * (st_ends[layer] * {2.0**-52!r});
        const double size = fabs(x);
        if (size < st_ends[layer + 1]) return x;
        unsigned long long next = a;
        if (!attempt) st_scramble(&next, &b, {philox.SECOND % 2**64:#x}ull);
        const double even = (double)b * {2.0**-64!r} + {2.0**-65!r};
        if (layer) {{
            const double rise = st_heights[layer + 1] - st_heights[layer];
            if (st_heights[layer] + even * rise < exp(size * size * -0.5)) return x;
        }} else {{
            const double end = {normals.END!r}, beyond = end - log(even) / end, distance = beyond - end;
            if ((size - end) * end < exp(distance * distance * -0.5)) return copysign(beyond, x);
        }}
        st_scramble(&a, &b, attempt + 2);
    }}
}}
"""
"""The function ``normal64`` of `shardtensor.functions.random.numbers_of_words`."""

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

# Of the products of words and the number of integers, those whose low words are below `least` are rejected.
_INTEGERS = """
    #pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned long long word = words[k], other = words[k ^ 1];
        if (count) {
            for (int attempt = 1; word * count < least; attempt++) st_scramble(&word, &other, attempt);
            word = __umul64hi(word, count);
        }
        made[k] = (long long)(word + low);
    }
"""

_INTEGERS32 = """
    #pragma unroll
    for (int k = 0; k < 8; k++) {
        unsigned long long word = words[k / 2], other = words[k / 2 ^ 1];
        if (k & 1) word = word << 32 | word >> 32;
        unsigned long long product = (word & 0xFFFFFFFFull) * count;
        for (int attempt = 1; (product & 0xFFFFFFFFull) < least; attempt++) {
            st_scramble(&word, &other, attempt);
            product = (word & 0xFFFFFFFFull) * count;
        }
        made[k] = (long long)((product >> 32) + low);
    }
"""

_BERNOULLI = f"""
    #pragma unroll
    for (int k = 0; k < 4; k++) {{
        const double p = !given ? probability : k >= from && k < to ? given[at + k] : 0.0;
        made[k] = (double)(words[k] >> 11) * {2.0**-53!r} < p;
    }}
"""


class _Made(NamedTuple):
    """Numbers that a kernel makes.

    Attributes:
        parameters: the parameters of the kernel.
        text: the text that makes the numbers of the words of one block.
        of_halves: whether each number is made of half a word.
    """

    parameters: Sequence[str]
    text: str
    of_halves: bool = False


_COUNTS = ("unsigned long long count", "unsigned long long least", "unsigned long long low")
_NUMBERS: dict[tuple[str, str], _Made] = {
    ("uniform", "d"): _Made((), _of_words(f"(double)(word >> 11) * {2.0**-53!r}")),
    ("uniform", "f"): _Made((), _of_halves(f"(float)(half >> 8) * {2.0**-24!r}f"), True),
    ("normal", "d"): _Made((), _of_words("st_normal(word, words[k ^ 1])")),
    ("normal", "f"): _Made((), _NORMAL32, True),
    ("exponential", "d"): _Made((), _of_words(f"0.0 - log((double)word * {2.0**-64!r} + {2.0**-65!r})")),
    ("exponential", "f"): _Made((), _of_halves(f"0.0f - logf((float)half * {2.0**-32!r}f + {2.0**-33!r}f)"), True),
    ("words", "q"): _Made((), _of_words("(long long)word")),
    ("integers", "q"): _Made(_COUNTS, _INTEGERS),
    ("integers of 32 bits", "q"): _Made(_COUNTS, _INTEGERS32, True),
    ("bernoulli", "?"): _Made(("const double *given", "double probability"), _BERNOULLI),
}
"""The numbers that kernels make, by their names and the characters of their dtypes."""
