"""Test cases of the operators that order and select elements of lines. Importing this module registers them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as some

from shardtensor.testing.cases import Case, case, seed
from shardtensor.testing.layouts import array, shapes


@case("take_along_split")
def _take_along_split(data: Any) -> Case:
    x = array(data.draw(shapes(1)), data.draw(some.sampled_from(["int32", "float64"])), seed(data))
    axis = data.draw(some.integers(0, x.ndim - 1))
    shape, n = list(x.shape), x.shape[axis]
    shape[axis] = data.draw(some.integers(0, 9)) if n else 0
    indices = np.random.default_rng(seed(data)).integers(-max(n, 1), max(n, 1), shape)
    return Case([x, indices], params={"axis": axis}, answer=np.take_along_axis(x, indices, axis))
