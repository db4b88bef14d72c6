"""Generated C under AddressSanitizer, which finds reads and writes outside of arrays."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scripts import new_process

GCC = shutil.which("gcc")
LIBRARY = (
    subprocess.run([GCC, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip() if GCC else ""
)

CODE = """
import numpy as np, sys
import shardtensor as st
from shardtensor.interpreters.jit.c import c_executor, temporal_blocking
from shardtensor.interpreters.jit.grouping import groups
from tests.interpreters.jit.test_temporal_blocking import jacobi
from tests.interpreters.jit.random_kernels import assert_same, random_case, reference, spread_kernel
c_executor.LONG, c_executor._ALIGNED, c_executor._LONG_ROW = 0.0, 8, 1
first = int(sys.argv[1])
with np.errstate(all="ignore"):
    for begin in range(first, first + 40, 20):
        cases = [random_case(seed) for seed in range(begin, begin + 20)]
        made = c_executor.compile_kernels([case.kernel for case in cases])
        for case in cases:
            if case.kernel in made:
                outs = case.outputs()
                made[case.kernel].run(case.shape, case.inputs, outs)
                for out, wanted in zip(outs, reference(case), strict=True):
                    assert_same(out, wanted, case)
    for dtype in ("f4", "f8"):
        kernel = spread_kernel(dtype)
        run = c_executor.compile_kernels([kernel])[kernel].run
        for shape in [(1, 1), (3, 65), (2, 4096), (1, 9000 + first % 64)]:
            x = np.ones(shape, dtype)
            x[:, 0] = 0
            run(shape, [x], [np.empty(shape[0], dtype), np.empty(shape, dtype)])
            run(shape, [x[:, ::-1]], [np.empty(shape[0], dtype), x])
groups.LEAST, temporal_blocking.LEAST_BYTES, temporal_blocking.ROWS = 1, 0, 0
c_executor._BAND, c_executor._CHUNK, c_executor._WIDTH = 8, 1e-9, 2
for shape in [(3, 3), (40, 7), (100 + first % 7, 5)]:
    x = np.linspace(0, 1, shape[0] * shape[1]).reshape(shape)
    found = st.jit(lambda u: jacobi(u, 2 + first % 11), executor="c")(st.asarray(x))
    assert np.array_equal(np.asarray(found), jacobi(x.copy(), 2 + first % 11))
print("done")
"""


LOOPS = """
import shardtensor as st
from shardtensor.interpreters.jit import c_trips
from tests.interpreters.jit import test_loops as loops
for chunk in (1, 3):
    c_trips._FIRST, c_trips._NUMBERS, c_trips.CHUNK = chunk, chunk, 0.0
    st.jit(loops.kinds, executor="c")(loops.numbers(64), loops.numbers(loops.N, 64), loops.numbers(16))
for dtype in ("f4", "f8"):
    loops.test_products_of_all_shapes_and_strides(dtype)
print("done")
"""

needs_sanitizer = pytest.mark.skipif(not Path(LIBRARY).is_absolute(), reason="no gcc with AddressSanitizer")


@pytest.mark.full
@needs_sanitizer
@pytest.mark.parametrize("chunk", range(50))
def test_generated_c_stays_inside_of_its_arrays(chunk: int, tmp_path: Path) -> None:
    check(tmp_path, CODE, str(10**6 + 40 * chunk))


@pytest.mark.full
@needs_sanitizer
def test_loops_stay_inside_of_their_arrays(tmp_path: Path) -> None:
    check(tmp_path, LOOPS)


def check(tmp_path: Path, code: str, *arguments: str) -> None:
    variables = {
        "LD_PRELOAD": LIBRARY,
        "ASAN_OPTIONS": "detect_leaks=0",
        "SHARDTENSOR_CC": f"{GCC} -fsanitize=address -fno-omit-frame-pointer",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    done = new_process("-c", code, *arguments, seconds=600, **variables)
    assert done.stdout == "done\n", done.stderr[-4000:]
