"""Calls operators on tensors that span processes: ``spanning_operators.py FILE EXAMPLES [NAME...]``.

Process 0 writes a line for each operator to the file: its name, and a hash of the bits of all its results, or the first
error. Jobs with the same number of devices in other numbers of processes must write the same lines.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import traceback
import warnings
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from hypothesis import strategies as some
from hypothesis.control import BuildContext
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.internal.constants_ast import Constants

import shardtensor as st
from shardtensor import distributed
from shardtensor.core import OPS
from shardtensor.tensor.pytree import leaves
from shardtensor.testing.layouts import NAMES as AXES
from shardtensor.testing.layouts import on_host, specs
from tests.cases import CASES, wanted

PATH, EXAMPLES, *NAMES = sys.argv[1:]
ROUNDED = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "exp", "exp2", "expm1", "log",
    "log10", "log1p", "log2", "pow", "sin", "sinh", "tan", "tanh",
)  # fmt: skip
"""Functions that NumPy computes with other last bits where an array is reversed, on CPUs with AVX-512. Reversed views are
views in shared memory, and copies elsewhere.
"""
GROUPED = {"logaddexp"}
"""Ufuncs of ``running`` that round: the backend numpy applies them in NumPy's order, others combine pairs."""
MESHES = [(2,), (3,), (4,), (8,), (2, 2), (2, 3), (4, 2), (3, 1), (2, 2, 2)]


class Provider(HypothesisProvider):
    """Draws numbers that depend only on the seed.

    By default hypothesis also draws constants from the modules that are loaded, and ``hypothesis.given`` takes the time
    into account.
    """

    _local_constants = Constants()


def mesh_of_all(data: Any) -> st.Mesh:
    """Draws a mesh with the first device and the last one, which is of another process, if there are several."""
    known = st.devices()
    shape = data.draw(some.sampled_from([s for s in MESHES if math.prod(s) <= len(known)]))
    count = math.prod(shape)
    inner = data.draw(some.permutations(known[1:-1]))[: count - 2]
    return st.make_mesh(shape, AXES[: len(shape)], devices=data.draw(some.permutations([known[0], known[-1], *inner])))


def placed(data: Any, array: Any, mesh: st.Mesh, first: bool, views: bool) -> Any:
    if not first and data.draw(some.integers(0, 4)) == 0:
        return array
    sharding = st.NamedSharding(mesh, data.draw(specs(mesh, array.ndim)))
    if array.ndim and data.draw(some.integers(0, 3)) == 0 and views:
        return st.device_put(array[::-1], sharding)[::-1]
    return st.device_put(array, sharding)


def compared(result: Any, answer: Any, bits: Any) -> None:
    """Asserts that a result, a pytree of tensors, equals NumPy's, and adds its bits to a hash, if there is one."""
    made, wanted = leaves(result), leaves(answer)
    assert len(made) == len(wanted), f"{len(made)} results instead of {len(wanted)}"
    for one, answer in zip(made, wanted, strict=True):
        x, whole, known = one, one, np.asarray(answer)
        if isinstance(x, st.ShardedTensor) and x.sharding.mesh.size == 1:  # It is in one process.
            x = st.reshard(x, st.make_mesh((len(st.devices()),), ("x",)))
        if isinstance(x, st.ShardedTensor) and distributed.process_count() > 1:
            whole = distributed.process_allgather(x)
        whole = np.asarray(whole)
        assert (whole.shape, whole.dtype) == (known.shape, known.dtype), (whole.shape, whole.dtype, known.dtype)
        parts = np.ascontiguousarray(whole).reshape(-1)
        if parts.dtype.kind in "fc":  # NumPy's loops give NaN any sign: it depends on the number of elements.
            parts = parts.view(parts.real.dtype).copy()
            parts[np.isnan(parts)] = np.nan
        if bits is not None:
            bits.update(parts.tobytes())
        limit = {"float16": 2e-2, "float32": 2e-5, "complex64": 2e-5}.get(str(known.dtype), 1e-11)
        if known.dtype.kind in "fc":
            np.testing.assert_allclose(whole, known, rtol=limit, atol=limit)
        else:
            np.testing.assert_array_equal(whole, known)
        for shard in x.addressable_shards if isinstance(x, st.ShardedTensor) else ():
            np.testing.assert_array_equal(on_host(shard.data, shard.device), whole[shard.index])


def outcome(name: str) -> str:
    """Returns a hash of the results of calls of an operator, or the first error."""
    bits, errors = hashlib.blake2b(digest_size=8), []

    for example in range(int(EXAMPLES)):
        data = ConjectureData(random=Random(f"{name} {example}"), provider=Provider)
        with BuildContext(data, wrapped_test=outcome):
            made, mesh = CASES[name](data), mesh_of_all(data)
            operands = [placed(data, x, mesh, not k, name not in ROUNDED) for k, x in enumerate(made.operands)]
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                same_bits = name != "running" or made.params["ufunc"] not in GROUPED
                compared(made.run(OPS[name].dispatch, operands), wanted(name, made), bits if same_bits else None)
        except st.DistributedError:
            raise
        except Exception as error:
            where = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-3:]]
            errors.append(f"{type(error).__name__}: {error} at {' '.join(where)}".replace("\n", " ")[:400])
        distributed.sync_global_devices(f"{name}: {bool(errors)}")
        if errors:
            break
    return errors[0] if errors else bits.hexdigest()


def main() -> None:
    distributed.initialize(engine=None if "SHARDTENSOR_ALONE" not in os.environ else "local", timeout=20)
    with Path(PATH if distributed.process_index() == 0 else os.devnull).open("a") as file:
        for name in NAMES or sorted(CASES):
            print(name, outcome(name), file=file, flush=True)
    distributed.shutdown()


if __name__ == "__main__":
    main()
