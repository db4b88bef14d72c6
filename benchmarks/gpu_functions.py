"""Functions of large arrays on one GPU, beside the same expressions of bare CuPy.

``python benchmarks/gpu_functions.py [--quick] [--out DIR] [--label LABEL]``; docs/gpus.md says how to read it.

Each expression is evaluated with the names of `shardtensor`, and with those of `cupy`. Arrays have 16 Mi elements, most
of them float32, unless the names say otherwise.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import harness
import machine
from gpu_cases import describe_gpus, synchronize_all, timed
from harness import PROJECT, NotMeasured
from tables import Row, Table

CUPY = "CuPy"
TITLE = "Functions on one GPU: x, y, h (4096²), w (16 × 1024²), v (4 Mi × 4) float32, d float64, k integers, m a mask"

EXPRESSIONS = """
x + y; sin(x); x ** 2; x > 0.5; where(m, x, y); clip(x, 0.2, 0.8); x.astype('float64'); x.copy(); x % y; k // 7
abs(c); c * c; h + h[0]; h - h[:, :1]; h.T + h; h.T.copy(); h[:, 1:] - h[:, :-1]; x[1:] - x[:-1]
x.sum(); x.mean(); x.var(); x.max(); x.argmax(); m.any(); k.sum(); count_nonzero(m); d.var(); linalg.norm(x)
h.sum(axis=0); h.sum(axis=1); h.var(axis=0); h.var(axis=1); h.max(axis=0); w.sum(axis=1); v.sum(axis=0); v.sum(axis=1)
nansum(x); nanmean(x); nanvar(x); average(x, weights=y); median(x); quantile(x, 0.3); percentile(h, 30, axis=1)
cumsum(x); cumsum(h, axis=0); cumsum(h, axis=1); diff(x); sort(x); argsort(x); sort(h, axis=1); partition(x, 100)
unique(k); bincount(k); histogram(x, bins=50); digitize(x, t[::1024]); searchsorted(t, x); isin(k, k[:1000])
interp(x, t, t); nonzero(m); x[m]; x[i]; take(x, i); concat([x, y]); stack([x, y]); roll(x, 3); repeat(x, 2); pad(h, 1)
tril(h); gradient(x); convolve(x, e); correlate(x, e); cov(h[:256]); corrcoef(h[:256]); outer(x[:4096], y[:4096])
s @ s; h @ h[0]; w @ w; linalg.inv(s); linalg.qr(s); fft.fft(c); fft.rfft(x); fft.fft2(h); fft.fftshift(h)
"""


def expressions() -> list[str]:
    """Returns the expressions."""
    return [part.strip() for part in EXPRESSIONS.replace("\n", ";").split(";") if part.strip()]


def arrays(size: int) -> dict[str, Any]:
    """Returns the operands, as arrays of CuPy, with so many elements; the smaller ones in proportion."""
    import cupy

    rng, side = cupy.random.default_rng(0), int(size**0.5)
    random = functools.partial(rng.random, dtype="float32")
    return {
        "x": random(size),
        "y": random(size) + cupy.float32(0.5),
        "h": random((side, side)),
        "w": random((16, side // 4, side // 4)),
        "v": random((size // 4, 4)),
        "s": random((side // 2, side // 2)),
        "d": rng.random(size // 2),
        "k": rng.integers(0, 1000, size, dtype="int32"),
        "m": random(size) > 0.5,
        "c": random(size // 2) + cupy.complex64(1j),
        "i": rng.integers(0, size, size // 4),
        "e": cupy.ones(9, "float32") / cupy.float32(9),
        "t": cupy.sort(random(size >> 4)),
    }


def cases(size: int) -> dict[str, dict[str, Callable[[], float]]]:
    """Returns for each library the cases by expression, each of which returns the seconds of a call."""
    import cupy

    import shardtensor as st

    wait, given = functools.partial(synchronize_all, cupy), arrays(size)
    device = st.devices("cupy")[0]
    operands = {PROJECT: {name: st.device_put(st.asarray(x), device) for name, x in given.items()}, CUPY: given}
    modules = {PROJECT: st, CUPY: cupy}

    def measured(column: str, expression: str) -> float:
        module = modules[column]
        names = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
        call = eval(f"lambda: {expression}", names | operands[column])
        try:
            return timed(call, 3, wait)
        except Exception as error:
            print(f"{column}: {expression}: {error!r}", file=sys.stderr)
            raise NotMeasured("failed") from error

    return {column: {text: functools.partial(measured, column, text) for text in expressions()} for column in modules}


def measure(rounds: int, size: int) -> Table:
    """Measures the whole table."""
    import cupy

    environment = machine.describe_environment(("shardtensor", "numpy")) | describe_gpus(cupy) | {"rounds": str(rounds)}
    made: Mapping[str, Mapping[str, Callable[[], float]]] = cases(size)
    samplers = {(text, column): case for column, own in made.items() for text, case in own.items()}
    rows = tuple([Row(text, text) for text in expressions()])
    return Table(TITLE, environment, tuple(made), rows, harness.interleave(samplers, rounds, "on the GPU"))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program: measures if there is a GPU, and otherwise exits with a message."""
    options = harness.arguments("gpu_functions", "Functions of large arrays on a GPU.", argv)
    from shardtensor_cupy.discovery import usable_cupy

    from shardtensor.errors import BackendError

    try:
        usable_cupy()
    except BackendError as error:
        sys.exit(f"gpu_functions.py: there is no usable GPU: {error}")
    table = measure(2 if options.quick else 7, 1 << 24)
    harness.report(table, options.out, harness.labelled("gpu_functions", options.label))


if __name__ == "__main__":
    main()
