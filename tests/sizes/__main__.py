"""Runs every function, or random programs, with changed thresholds, and prints what is not NumPy's.

``python -m tests.sizes calls low numpy 0 5`` runs each function five times with all thresholds low, and
``python -m tests.sizes programs 17 numpy,checked 0 1000`` a thousand programs with thresholds that are drawn by 17; with
``c`` at the end, the kernels of jit are compiled, which takes most of the time then. What is drawn depends on these
numbers only, without the bookkeeping of hypothesis, so that very many run.
"""

from __future__ import annotations

import sys

from tests.sizes import thresholds

if __name__ == "__main__":  # Before the library is imported.
    kind, setting, backends, first, count, executor = (*sys.argv[1:], "numpy")[:6]
    thresholds.lower(thresholds.drawn(setting))

    from tests import conftest  # noqa: F401 - installs the simulated CuPy
    from tests.sizes.calls import run_calls
    from tests.sizes.programs import run_programs

    run = {"calls": run_calls, "programs": run_programs}[kind]
    status = 0
    for line in run(backends.split(","), int(first), int(count), executor):
        status = 1
        print(line[:1500], flush=True)
    sys.exit(status)
