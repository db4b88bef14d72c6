"""The process in which the cases of one library are measured; `harness.Worker` starts it, and sends it requests.

``python worker.py PACKAGE MODULE:FUNCTION WARM_UP``. It writes one line first: the names of the cases, or null if the
package is not installed. Then it reads one request per line and writes one answer per line. All lines are JSON. The
process may be on another Python than shardtensor, so that this module needs the standard library alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
import timeit
from collections.abc import Callable, Mapping
from typing import Any

SAMPLE_SECONDS = 5e-3
"""The least duration of a sample: far above the resolution of the clock and the cost of refilling caches that other
processes have evicted, but short enough that load on the machine affects few samples.
"""


def main(package: str, cases: str, warm_up: float) -> None:
    """Makes the cases and answers requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output that a library prints must not be read as an answer
    if importlib.util.find_spec(package) is None:
        print("null", file=answers, flush=True)
        return
    module, _, function = cases.partition(":")
    by_name: Mapping[str, Callable[[], Any]] = getattr(importlib.import_module(module), function)()
    counts: dict[str, int] = {}

    def sample(name: str) -> float:
        timer = timeit.Timer(by_name[name])
        calls = counts.get(name) or counts.setdefault(name, _calls_per_sample(timer))
        until = time.perf_counter() + warm_up
        timer.timeit(calls // 10 + 1)  # refills caches that other processes have evicted
        while time.perf_counter() < until:
            timer.timeit(1)
        return timer.timeit(calls) / calls

    verbs: dict[str, Callable[[str], Any]] = {"sample": sample, "call": lambda name: by_name[name]()}
    print(json.dumps(list(by_name)), file=answers, flush=True)
    for line in sys.stdin:
        verb, name = json.loads(line)
        print(json.dumps(verbs[verb](name)), file=answers, flush=True)


def _calls_per_sample(timer: timeit.Timer) -> int:
    """Returns a number of calls that take at least `SAMPLE_SECONDS`."""
    timer.timeit(1)  # the first call may compile
    calls = 1
    while timer.timeit(calls) < SAMPLE_SECONDS:
        calls *= 2
    return calls


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
