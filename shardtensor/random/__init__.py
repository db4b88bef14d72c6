"""Random numbers: pure functions of a key, whose results do not depend on the layout.

`key` makes a key from a seed; `split` and `fold_in` derive independent keys from it. The same key gives the same
numbers on every mesh, backend and number of threads and processes: element i of an array is computed from the bits of
Philox4x64-10 of (key, i), by the device that holds it, and nothing is transferred. Calls with one key repeat (and
correlate with) one another's numbers, so use a new key for each.

Integers, uniform numbers, bools and permutations are the same to the bit. Other distributions use logarithms and other
functions, which libraries round differently: on the numpy backend their numbers are the same on every mesh, too, and
those of other backends agree with them to 4 units in the last place (gamma and truncated normal ones to 8), except that
a rounding error may decide whether a proposal is accepted, with a probability of about 1e-14 for each element.

Inside of mapped functions, a key that the function closes over gives the same numbers on every device, and
``fold_in(key, st.axis_index(name))`` gives each device numbers of its own.

>>> key = st.random.key(7)
>>> st.random.uniform(key, (3,)).tolist()
[0.9007596233153624, 0.7774632149675491, 0.9645182340773455]
>>> first, second = st.random.split(key)
>>> st.random.integers(first, 0, 10, (8,), device=st.make_mesh((2,), ("x",))).tolist()
[2, 9, 6, 7, 3, 2, 2, 0]
"""

# ruff: noqa: I001 - `name as name` marks a public name for type checkers; one statement imports all of a module

import typing as _typing

from shardtensor.exports import exported as _exported
from shardtensor.functions.random.samplers import (
    bernoulli as bernoulli,
    binomial as binomial,
    categorical as categorical,
    choice as choice,
    exponential as exponential,
    gamma as gamma,
    integers as integers,
    normal as normal,
    permutation as permutation,
    poisson as poisson,
    truncated_normal as truncated_normal,
    uniform as uniform,
)
from shardtensor.functions.random.random_keys import Key as Key, fold_in as fold_in, key as key, split as split
from shardtensor.hints import missing as _missing

if not _typing.TYPE_CHECKING:  # Type checkers take the names of the imports.
    __all__ = _exported(globals())

    def __getattr__(name: str) -> _typing.Any:
        raise _missing(__name__, name)

    def __dir__() -> list[str]:
        return __all__
