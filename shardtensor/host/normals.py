"""The tables of the ziggurat of the standard normal distribution (Marsaglia & Tsang, 2000).

The area below ``exp(-x**2 / 2)``, x >= 0, is covered by layers of equal areas, one upon the other. Layer 0 consists of
a rectangle up to `END` and of the area below an exponential function beyond it, which is nowhere below the
distribution; each other layer is a rectangle. `shardtensor.functions.random.distributions` draws from them.
"""

from __future__ import annotations

import math

import numpy as np

LAYERS = 256
END = 3.655420419026942
"""The number up to which layer 0 is a rectangle: that for which as many layers end at the top of the distribution."""


def _ends() -> list[float]:
    area = math.exp(-END * END / 2) * (END + 1 / END)
    ends = [END + 1 / END, END]
    while len(ends) < LAYERS:
        ends.append(math.sqrt(-2 * math.log(area / ends[-1] + math.exp(-ends[-1] * ends[-1] / 2))))
    return [*ends, 0.0]


ENDS = np.array(_ends())
"""The end of each layer, and 0. The first is that of a rectangle with the area of layer 0 and the height of its own."""

HEIGHTS = np.array([0.0, *[math.exp(-x * x / 2) for x in ENDS[1:].tolist()]])
"""The lower edge of each layer, and the upper edge of the last one."""
