"""The batching rules of random numbers: an example draws the same numbers as a call with its key."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardtensor.core import call
from shardtensor.functions.batching.batching_forms import Call, each, rows
from shardtensor.functions.random.random_examples import draws_of_examples
from shardtensor.functions.random.random_keys import bits_of


def _bits(recorded: Call) -> list[Any]:
    """Returns the key of each example, as operators take it."""
    key = recorded.operands[recorded.op.operands.index("key")]
    if not recorded.batched[recorded.op.operands.index("key")]:
        return [key] * recorded.size
    return [bits_of(k, recorded.op.error_name) for k in key.keys]


def _drawn(recorded: Call) -> Any:
    op, bits = recorded.op, _bits(recorded)
    at = op.operands.index("key")
    numbers = recorded.operands[at + 1 :]
    params = {name: value for name, value in recorded.params.items() if name != "device"}
    shape, ndim = params.get("shape"), max([recorded.ndim(k) for k in range(at)], default=0)
    parameters = [recorded.wide(k, ndim) if recorded.batched[k] else recorded.operands[k] for k in range(at)]
    if shape is None:
        shape = np.broadcast_shapes(*[recorded.shape(k) for k in range(at)])
    parameters = [call("broadcast_to", x, (recorded.size, *shape)) for x in parameters]
    if all(type(b) is int for b in bits):
        words = np.array([[b % 2**64, b >> 64] for b in bits], np.uint64).reshape(len(bits), 2).view(np.int64)
        pairs = tuple(params.items())
        draws = draws_of_examples([words, *parameters], op.name, tuple(shape), numbers, pairs, params["dtype"])
        device = recorded.params.get("device")
        return draws if device is None else call("reshard", draws, recorded.layout(device, len(shape)))
    # Keys that a program of jit takes have bits when it runs: each is an operand of its own.
    return call("stack", [recorded.again(*[x[k] for x in parameters], b, *numbers) for k, b in enumerate(bits)], axis=0)


def _of_two_batches(recorded: Call) -> Any:
    """The examples of a batch of batches are those of one."""
    n = recorded.shape(0)[0]
    shape = (recorded.size * n, *recorded.params["shape"])
    words = call("reshape", recorded.whole(0), (recorded.size * n, 2))
    arrays = [call("reshape", recorded.whole(k), shape) for k in range(1, len(recorded.leaves))]
    return call("reshape", recorded.again(words, *arrays), (recorded.size, n, *shape[1:]))


rows(draws_of_examples=_of_two_batches)
rows(**each("uniform normal exponential integers permutation words drawn", _drawn))
rows(**each("bernoulli categorical gamma poisson binomial truncated_normal", _drawn))
