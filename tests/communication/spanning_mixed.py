"""Calls operators on operands of different meshes, some of which leave out processes: ``spanning_mixed.py FILE EXAMPLES
[NAME...]``. The results are compared with NumPy's. The environment variable ``SPANNING_THRESHOLDS`` may be ``low``, so
that small arrays take the way of large ones (see `tests.sizes`).

Process 0 writes a line for each operator to the file: its name, and how many calls were compared, or the first error.
"""

from __future__ import annotations

import os
import traceback
import warnings
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from hypothesis import strategies as some
from hypothesis.control import BuildContext
from hypothesis.internal.conjecture.data import ConjectureData

from tests.sizes import thresholds

if __name__ == "__main__":
    thresholds.lower(thresholds.drawn(os.environ.get("SPANNING_THRESHOLDS", "none")))

import shardtensor as st
from shardtensor import distributed
from shardtensor.core import OPS
from shardtensor.testing.layouts import specs
from tests.cases import CASES, wanted
from tests.communication.spanning_operators import EXAMPLES, NAMES, PATH, Provider, compared


def mesh(data: Any) -> st.Mesh:
    """Draws a mesh of the devices of some processes, often of one."""
    count = distributed.process_count()
    chosen = data.draw(some.permutations(range(count)))[: data.draw(some.sampled_from([1, 1, 2, count]))]
    devices = [d for k in chosen for d in st.devices() if d.process_index == k]
    if len(devices) > 2 and data.draw(some.booleans()):
        devices = devices[1:]
    return st.make_mesh((len(devices),), ("x",), devices=devices)


def placed(data: Any, array: Any) -> Any:
    there = mesh(data)
    sharding = st.NamedSharding(there, data.draw(specs(there, array.ndim)))
    if array.ndim and data.draw(some.integers(0, 3)) == 0:
        return st.device_put(array[::-1], sharding)[::-1]
    return st.device_put(array, sharding)


def outcome(name: str) -> str:
    """Returns how many calls were compared, or the first error."""
    count, error = 0, ""
    for example in range(int(EXAMPLES)):
        data = ConjectureData(random=Random(f"{name} {example}"), provider=Provider)
        with BuildContext(data, wrapped_test=outcome):
            made = CASES[name](data)
            operands, target = [placed(data, x) for x in made.operands], mesh(data)
            there = st.NamedSharding(target, data.draw(specs(target, made.operands[0].ndim)))
        is_known = True
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                try:
                    if name == "reshard":  # The layout of the case is of local devices.
                        result = st.reshard(operands[0], there)
                    else:
                        result = made.run(OPS[name].dispatch, operands)
                except st.NotAddressableError:  # Only the process of the devices knows the result.
                    is_known = False
                if all(distributed.process_allgather(np.array(is_known))):
                    compared(result, wanted(name, made), None)
                    count += 1
        except st.DistributedError:
            print(name, example, [x.sharding for x in operands if hasattr(x, "sharding")])
            raise
        except Exception as failure:
            where = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(failure.__traceback__)[-3:]]
            error = f"{type(failure).__name__}: {failure} at {' '.join(where)}".replace("\n", " ")[:400]
        errors = [bool(e) for e in distributed.process_allgather(np.array(bool(error)))]
        if any(errors):
            return f"example {example} {[x.sharding for x in operands if hasattr(x, 'sharding')]} {errors} {error}"
    return str(count)


def main() -> None:
    distributed.initialize(timeout=20)
    with Path(PATH if distributed.process_index() == 0 else os.devnull).open("a") as file:
        for name in NAMES or sorted(CASES):
            print(name, outcome(name), file=file, flush=True)
    distributed.shutdown()


if __name__ == "__main__":
    main()
