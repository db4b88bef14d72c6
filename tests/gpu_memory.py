"""Runs the library's own CUDA kernels under compute-sanitizer, each array in an allocation of its own.

    python -m tests.gpu_memory [memcheck|racecheck|initcheck|synccheck]

The kernels for large arrays run on small ones of odd sizes. Without CuPy's pool, an access beyond the end of an array is
an access beyond an allocation, which the tool reports. The exit status is 0 if it reports nothing and all values are
NumPy's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

TOOL = "compute-sanitizer"


def calls(st: Any, where: Any) -> dict[str, tuple[Callable[[Any], Any], bool]]:
    """Returns functions of a namespace, `np` or `st`, by name, and whether they have to be equal to the bit."""
    rng = np.random.default_rng(0)
    arrays = {n: rng.normal(size=n).astype("f4") for n in (1, 3, 5, 255, 1027, 4099)}
    table = rng.normal(size=(37, 53)).astype("f4")
    index, mask = rng.integers(-37, 37, 101), rng.random(37) > 0.5

    def on(xp: Any, x: Any) -> Any:
        return x.copy() if xp is np else st.device_put(x, where)

    def compiled(xp: Any, function: Callable[..., Any], *args: Any) -> Any:
        if xp is np:
            return function(*args)
        traced = st.jit(function)
        return [traced(*args) for _ in range(4)][-1]  # The third call of a graph's launches captures them.

    made: dict[str, tuple[Callable[[Any], Any], bool]] = {}
    for n, x in arrays.items():
        made[f"add {n}"] = (lambda xp, x=x: on(xp, x) + on(xp, x[::-1]), True)
        made[f"compare {n}"] = (lambda xp, x=x: on(xp, x) > 0.5, True)
        made[f"double {n}"] = (lambda xp, x=x: on(xp, x.astype("f8")) * 2 - on(xp, x), True)
        made[f"shifted {n}"] = (lambda xp, x=x: on(xp, x)[1:] - on(xp, x)[:-1], True)
        made[f"chain {n}"] = (
            lambda xp, x=x: compiled(xp, lambda a: xp.exp(-a * a) + xp.sqrt(abs(a)), on(xp, x)),
            False,
        )
        for name in ("sum", "mean", "var", "max"):
            made[f"{name} {n}"] = (lambda xp, x=x, name=name: getattr(xp, name)(on(xp, x)), False)
    for name in ("sum", "mean", "var", "std", "max"):
        for axis in (0, 1, None):
            made[f"{name} along {axis}"] = (
                lambda xp, name=name, axis=axis: getattr(xp, name)(on(xp, table), axis=axis),
                False,
            )
    made["columns"] = (lambda xp: on(xp, table) - on(xp, table)[:, :1], True)
    made["rows"] = (lambda xp: on(xp, table) * on(xp, table)[:1], True)
    made["transposed"] = (lambda xp: on(xp, table).T + 1, True)
    made["copy of the transpose"] = (lambda xp: on(xp, table).T.copy(), True)
    made["softmax"] = (
        lambda xp: compiled(
            xp, lambda a: xp.exp(a - a.max(axis=1, keepdims=True)) / xp.exp(a).sum(axis=1, keepdims=True), on(xp, table)
        ),
        False,
    )
    made["index"] = (lambda xp: on(xp, table)[on(xp, index)], True)
    made["mask"] = (lambda xp: on(xp, table)[on(xp, mask)], True)
    made["sort"] = (lambda xp: xp.sort(on(xp, table), axis=0), True)
    made["cumulative sum"] = (lambda xp: xp.cumsum(on(xp, table), axis=1), False)

    def written(xp: Any) -> Any:
        x = on(xp, table)
        x[on(xp, index)] = on(xp, np.arange(101 * 53.0).reshape(101, 53).astype("f4"))
        return x

    made["write"] = (written, True)
    return made


def check() -> None:
    """Runs all kernels and compares their results with NumPy's; random numbers with those of the host.

    Raises:
        AssertionError: a value is another one.
    """
    import cupy
    from shardtensor_cupy.kernels import large_ufuncs

    import shardtensor as st

    cupy.cuda.set_allocator(None)
    large_ufuncs.LARGE = 1
    for count in (1, 8):
        where = st.NamedSharding(st.make_mesh((count,), ("d",), devices=st.devices("cupy")[:count]), st.P("d"))
        for name, (call, exact) in calls(st, where).items():
            wanted, found = np.asarray(call(np)), np.asarray(call(st))
            limit = 0 if exact else 2e-5
            np.testing.assert_allclose(found, wanted, rtol=limit, atol=limit, err_msg=f"{name} on {count}")
        for draw in (st.random.uniform, st.random.normal):
            for dtype in ("float32", "float64"):
                pair = [
                    draw(st.random.key(7), (3, 129), dtype=dtype, device=d) for d in (where, st.devices("numpy")[0])
                ]
                np.testing.assert_allclose(*map(np.asarray, pair), rtol=1e-5, atol=1e-5)
    print("all values are NumPy's")


def main(argv: list[str]) -> int:
    """Runs the program under the tool, and returns the exit status."""
    if argv[:1] == ["--inside"]:
        check()
        return 0
    if shutil.which(TOOL) is None:
        print(f"{TOOL} is not on the PATH: only values are compared", file=sys.stderr)
        check()
        return 0
    command = [TOOL, "--tool", argv[0] if argv else "memcheck", "--error-exitcode", "1"]
    environment = os.environ | {"SHARDTENSOR_NUM_DEVICES": "8"}
    return subprocess.call([*command, sys.executable, "-m", "tests.gpu_memory", "--inside"], env=environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
