"""Random numbers: pure functions of a key, whose results do not depend on the layout.

`key` makes a key from a seed; `split` and `fold_in` derive independent keys from it. The same key gives the same
numbers on every mesh, backend and number of threads and processes: element i of an array is computed from the bits of
Philox4x64-10 of (key, i), by the device that holds it, and nothing is transferred. Calls with one key repeat (and
correlate with) one another's numbers, so use a new key for each.

Integers, uniform numbers, bools and permutations are the same to the bit. Other distributions use logarithms and other
functions that libraries round differently: normal and exponential numbers agree to 4 units in the last place (normal
numbers near 0: to 4 units in the last place of 1), and the others likewise, except that a rounding error decides with a
probability of about 1e-14 for each element whether a proposal is accepted. On one backend all of them are the same on
every mesh, too.

Inside of mapped functions, a key that the function closes over gives the same numbers on every device, and
``fold_in(key, st.axis_index(name))`` gives each device numbers of its own.

>>> key = st.random.key(7)
>>> st.random.uniform(key, (3,)).tolist()
[0.9007596233153624, 0.7774632149675491, 0.9645182340773455]
>>> first, second = st.random.split(key)
>>> st.random.integers(first, 0, 10, (8,), device=st.make_mesh((2,), ("x",))).tolist()
[9, 7, 2, 0, 0, 9, 0, 9]
"""

from shardtensor.functions.random import (
    Key,
    bernoulli,
    binomial,
    categorical,
    choice,
    exponential,
    fold_in,
    gamma,
    integers,
    key,
    normal,
    permutation,
    poisson,
    split,
    truncated_normal,
    uniform,
)

__all__ = [
    "Key",
    "bernoulli",
    "binomial",
    "categorical",
    "choice",
    "exponential",
    "fold_in",
    "gamma",
    "integers",
    "key",
    "normal",
    "permutation",
    "poisson",
    "split",
    "truncated_normal",
    "uniform",
]
