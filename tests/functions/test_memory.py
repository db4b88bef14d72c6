"""Memory: no device holds more than three times its share of the operands and of the result.

The exceptions are operators that declare why they gather.

The measurements use separate memories, and the difference of two sizes, which cancels constants.
"""

from __future__ import annotations

import collections
import gc
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.core import OPS, Op
from shardtensor.functions.algorithms import distinct, requests
from shardtensor.functions.fft import chirp_fft
from shardtensor.functions.linalg import panels
from shardtensor.functions.statistics import histograms
from shardtensor.testing import checked
from tests.cases import CASES
from tests.layouts import mesh_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "differences.md"


class Meter:
    """The bytes that arrays occupy in the memory of each checked device, and the most that they have occupied."""

    def __init__(self) -> None:
        self.live: collections.Counter[Any] = collections.Counter()
        self.most: collections.Counter[Any] = collections.Counter()

    def add(self, memory: Any, nbytes: int) -> None:
        self.live[memory.device] += nbytes
        self.most[memory.device] = max(self.most[memory.device], self.live[memory.device])
        weakref.finalize(memory, self.live.subtract, {memory.device: nbytes})

    def during(self, call: Callable[[], Any]) -> tuple[int, Any]:
        """Returns the most bytes that a device has held in addition during a call, and its result."""
        gc.collect()
        before = collections.Counter(self.live)
        self.most = collections.Counter(before)
        result = call()
        for x in tensors(result):
            assert x.addressable_shards
        return max(self.most[d] - before[d] for d in self.most), result


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meter]:
    made, tagged, known = Meter(), checked._tagged, weakref.WeakSet[Any]()

    def metered(result: Any, parents: Any = ()) -> Any:
        array = tagged(result, parents)
        if isinstance(array, checked.CheckedArray) and array._memory not in known:
            known.add(array._memory)
            made.add(array._memory, checked._owner(array).nbytes)
        return array

    monkeypatch.setattr(checked, "_tagged", metered)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield made


def tensors(result: Any) -> list[st.ShardedTensor]:
    if isinstance(result, tuple | list):
        return [x for item in result for x in tensors(item)]
    return [result] if isinstance(result, st.ShardedTensor) else []


def share(x: st.ShardedTensor) -> int:
    return max(shard.data.nbytes for shard in x.addressable_shards)


def measured(meter: Meter, call: Callable[..., Any], hosts: list[Any], spec: tuple[Any, ...]) -> tuple[int, int]:
    """Returns the bytes that the fullest device held, and its share of the operands and the result."""
    mesh = mesh_of((8,), "checked")
    xs = [st.device_put(host, st.NamedSharding(mesh, st.P(*spec))) for host in hosts]
    held, result = meter.during(lambda: call(*xs))
    operands = sum(map(share, xs))
    return held + operands, operands + sum(map(share, tensors(result)))


def grows_by(
    meter: Meter,
    call: Callable[..., Any],
    hosts: Callable[[int], list[Any]],
    n: int,
    spec: tuple[Any, ...] = ("x",),
) -> float:
    """Returns the growth of what a device holds, divided by that of its share, from n elements to four times as many."""
    small, large = measured(meter, call, hosts(n), spec), measured(meter, call, hosts(4 * n), spec)
    return (large[0] - small[0]) / (large[1] - small[1])


def numbers(*shape: int) -> Any:
    return np.random.default_rng(0).random(shape) + 0.1


def line(n: int) -> list[Any]:
    return [numbers(n)]


def complex_line(n: int) -> list[Any]:
    return [numbers(n) + 0j]


def half_spectrum(n: int) -> list[Any]:
    return [numbers(n + 1) + 0j]


ODD = {1 << 15: 181 * 179, 1 << 17: 361 * 363}


def odd_line(n: int) -> list[Any]:
    return [numbers(ODD[n])]


def odd_half(n: int) -> list[Any]:
    return [numbers(ODD[n] // 2 + 1) + 0j]


def tall(n: int) -> list[Any]:
    return [numbers(n // 4, 4)]


LONG: dict[str, tuple[Callable[..., Any], Callable[[int], list[Any]]]] = {
    "fft": (st.fft.fft, complex_line),
    "ifft": (st.fft.ifft, complex_line),
    "rfft": (st.fft.rfft, line),
    "ihfft": (st.fft.ihfft, line),
    "irfft": (st.fft.irfft, half_spectrum),
    "hfft": (st.fft.hfft, half_spectrum),
    "odd rfft": (st.fft.rfft, odd_line),
    "odd ihfft": (st.fft.ihfft, odd_line),
    "odd irfft": (lambda x: st.fft.irfft(x, 2 * x.size - 1), odd_half),
    "odd hfft": (lambda x: st.fft.hfft(x, 2 * x.size - 1), odd_half),
    "fft2": (st.fft.fft2, lambda n: [numbers(64, n // 64)]),
    "qr": (st.linalg.qr, tall),
    "svd": (lambda x: st.linalg.svd(x, full_matrices=False), tall),
    "svdvals": (st.linalg.svdvals, tall),
    "pinv": (st.linalg.pinv, tall),
    "cond": (st.linalg.cond, tall),
    "cumulative_sum": (st.cumulative_sum, line),
    "add": (lambda x: x + x, line),
    "roll": (lambda x: st.roll(x, 3), line),
}


@pytest.mark.parametrize("name", LONG)
def test_a_device_holds_a_part(name: str, meter: Meter) -> None:
    call, hosts = LONG[name]
    assert grows_by(meter, call, hosts, 1 << 15) <= 3.05


PRIMES = {1 << 15: (1 << 15) + 3, 1 << 17: (1 << 17) + 29}


@pytest.mark.full
@pytest.mark.parametrize("name", ["fft", "rfft", "irfft"])
def test_a_device_holds_a_part_of_lines_without_factors(
    name: str, meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chirp_fft, "PIECE", 1 << 8)
    growth = grows_by(
        meter,
        lambda x: getattr(st.fft, name)(x, n=2 * x.size - 1 if name == "irfft" else x.size),
        lambda n: [(numbers(PRIMES[n] // 2 + 1 if name == "irfft" else PRIMES[n]) + (0 if name == "rfft" else 0j))],
        1 << 15,
    )
    assert growth <= 3.05


def symmetric(n: int) -> Any:
    return np.eye(n) * n + 1


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("cholesky", ("x",)),
        ("slogdet", ("x",)),
        *[
            pytest.param(name, spec, marks=pytest.mark.full)
            for name in ("cholesky", "solve", "inv", "slogdet", "det", "qr")
            for spec in [("x",), (None, "x")]
        ],
    ],
    ids=str,
)
def test_a_device_holds_a_part_of_square_matrices(
    name: str, spec: tuple[Any, ...], meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Panels are narrow, as they are in large matrices."""
    for constant, size in {"GATHERED": 0, "PANEL": 2, "SCRATCH": 1 << 12}.items():
        monkeypatch.setattr(panels, constant, size)

    def call(x: Any) -> Any:
        return st.linalg.solve(x, np.ones(x.shape[0])) if name == "solve" else getattr(st.linalg, name)(x)

    assert grows_by(meter, call, lambda n: [symmetric(n)], 40, spec) <= 3.05


@pytest.mark.parametrize("name", ["hfft", "irfft"])
def test_a_device_holds_a_part_of_real_spectra(name: str, meter: Meter) -> None:
    """Each element becomes a complex number of twice its size."""
    assert grows_by(meter, getattr(st.fft, name), lambda n: [numbers(n + 1)], 1 << 15) <= 3.05


def test_the_meter_sees_a_gather(meter: Meter) -> None:
    assert (
        grows_by(meter, lambda x: st.sum(st.reshard(x, st.NamedSharding(x.sharding.mesh, st.P()))), line, 1 << 12) > 7
    )


OTHERS = {"outer", "tril", "triu", "hfft", "irfft", "quantile", "nanquantile"}
"""Not called with these operands: results that are larger than they are (``tril`` of a vector is a square matrix),
spectra, whose sizes here have no factors (see `LONG`, and the test of real spectra), and quantiles, of which each device
holds all (see `ARGUMENTS`).
"""

SQUARES = {"diag", "diagflat"}
"""The operators whose results have the square of the number of elements of a line, which is therefore shorter."""

ROWS = sorted(
    name
    for name, op in OPS.items()
    if name in CASES
    and not (
        "spmd" in op.tags or op.is_ufunc or op.creates or op.gathers or (op.signature.optional and name != "where")
    )
    and name not in OTHERS
)
KINDS = {"line": lambda n: numbers(n), "rows": lambda n: numbers(n // 4, 4)}


def positions(n: int) -> list[Any]:
    return [numbers(n), np.arange(n)[::-1].copy()]


def table(n: int) -> list[Any]:
    return [numbers(n // 4, 4)]


def integers(n: int) -> list[Any]:
    return [np.arange(n) % 64]


def bits(n: int) -> list[Any]:
    return [np.arange(n, dtype=np.uint8)]


ARGUMENTS: dict[str, tuple[Callable[..., Any], Callable[[int], list[Any]]]] = {
    "astype": (lambda x: st.astype(x, "float32"), line),
    "broadcast_to": (lambda x: st.broadcast_to(x, (2, *x.shape)), line),
    "cross": (lambda x: st.cross(x[:, :3], x[:, 1:]), table),
    "delete": (lambda x: st.delete(x, 3), line),
    "insert": (lambda x: st.insert(x, 3, 1.0), line),
    "getitem": (lambda x: x[1:] + 0, line),
    "index arrays": (lambda x, i: x[i], positions),
    "take": (lambda x, i: st.take(x, i), positions),
    "take_along_axis": (lambda x, i: st.take_along_axis(x, i, axis=0), positions),
    "masks": (lambda x: x[x > 0.5], line),
    "nonzero": (lambda x: st.nonzero(x > 0.5), line),
    "apply_along_axis": (lambda x: st.apply_along_axis(lambda line: line + 1, 1, x), table),
    "packbits": (lambda x: st.packbits(st.reshape(x, (-1, 64)), axis=1), bits),
    "unpackbits": (st.unpackbits, bits),
    "moveaxis": (lambda x: st.moveaxis(x, 0, 1) + 0, table),
    "pad": (lambda x: st.pad(x, 3), line),
    "tile": (lambda x: st.tile(x, 2), line),
    "repeat": (lambda x: st.repeat(x, 2), line),
    "resize": (lambda x: st.resize(x, (2 * x.size,)), line),
    "reshape": (lambda x: st.reshape(x, (4, -1)) + 0, line),
    "reshard": (
        lambda x: st.reshard(x, st.NamedSharding(x.sharding.mesh, st.P(None, "x"))),
        lambda n: [numbers(64, n // 64)],
    ),
    "quantile": (lambda x: st.quantile(x, [0.25, 0.5]), line),
    "percentile": (lambda x: st.percentile(x, 30), line),
    "histogram": (lambda x: st.histogram(x, 10), line),
    "histogram with weights": (lambda x, w: st.histogram(x, 10, weights=w), lambda n: [numbers(n), numbers(n)]),
    "histogram of many bins": (st.histogram, lambda n: [numbers(n), np.sort(numbers(n))]),
    "histogram2d": (lambda x, y: st.histogram2d(x, y, 5), lambda n: [numbers(n), numbers(n)]),
    "histogramdd": (lambda x: st.histogramdd(x, 3), table),
    "digitize": (st.digitize, lambda n: [numbers(n), np.sort(numbers(n))]),
    "topk": (lambda x: st.topk(x, 5), line),
    "tril": (st.tril, table),
    "triu": (st.triu, table),
    "vecmat": (lambda v, x: st.vecmat(v, x), lambda n: [numbers(n // 4), numbers(n // 4, 4)]),
    "bincount": (st.bincount, integers),
    "unique": (st.unique, integers),
    "unique_counts": (st.unique_counts, integers),
    "unique_inverse": (st.unique_inverse, integers),
    "unique_all": (st.unique_all, line),
    "unique of distinct elements": (st.unique, line),
    "first indices": (lambda x: st.unique(x, return_index=True), integers),
    "counts of distinct elements": (st.unique_counts, line),
    "inverse of distinct elements": (st.unique_inverse, line),
    "diff": (st.diff, line),
    "searchsorted": (lambda x, y: st.searchsorted(st.sort(x), y), lambda n: [numbers(n), numbers(n)[::-1].copy()]),
    "isin": (st.isin, lambda n: [numbers(n), numbers(n)[::-1].copy()]),
    "nanmedian": (st.nanmedian, line),
    "nanquantile": (lambda x: st.nanquantile(x, [0.25, 0.5]), line),
    "lexsort": (lambda x, y: st.lexsort((x, y)), lambda n: [numbers(n), numbers(n)]),
    "partition": (lambda x: st.partition(x, 7), line),
    "nanvar": (st.nanvar, line),
    "nancumsum": (st.nancumsum, line),
    "modf": (st.modf, line),
    "convolve": (lambda x: st.convolve(x, np.ones(3)), line),
    "map_overlap": (lambda x: st.map_overlap(lambda b: b, x, depth=1, boundary="nearest"), line),
}


LIMITS = {"nanvar": 3.2}
"""Those that hold more than three times the share, as the documentation says."""


@pytest.fixture
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are short, as they are compared with large arrays."""
    monkeypatch.setattr(requests, "ROUND", 1 << 10)
    monkeypatch.setattr(distinct, "PIECE", 1 << 8)
    monkeypatch.setattr(distinct, "PIECE_ON_DEVICE", 1 << 8)
    monkeypatch.setattr(histograms, "PIECE", 1 << 8)


@pytest.mark.full
@pytest.mark.usefixtures("short_rounds")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_device_holds_a_part_of_operators_with_arguments(name: str, meter: Meter) -> None:
    call, hosts = ARGUMENTS[name]
    assert grows_by(meter, call, hosts, 1 << 15) <= LIMITS.get(name, 3.05)


@pytest.mark.full
@pytest.mark.usefixtures("short_rounds")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ROWS)
def test_a_device_holds_a_part_of_every_operator(name: str, kind: str, meter: Meter) -> None:
    """Every row whose operands can be arrays of one shape, without further arguments."""
    op: Op = OPS[name]

    def call(*xs: Any) -> Any:
        return op.dispatch(list(xs)) if op.signature.variadic else op.dispatch(*xs)

    def hosts(n: int) -> list[Any]:
        return [KINDS[kind](n)] * len(op.operands)

    try:
        growth = grows_by(meter, call, hosts, 1 << (9 if name in SQUARES else 15))
    except (TypeError, ValueError, IndexError) as error:
        pytest.skip(f"takes other arguments: {error}")
    assert growth <= 3.05


def test_the_documentation_lists_what_gathers() -> None:
    """The table is that of the declarations, internal operators under the names in their errors."""
    declared: dict[str, set[str]] = collections.defaultdict(set)
    for op in OPS.values():
        if op.gathers:
            declared[op.gathers].add(op.error_name)
    text = DOCUMENT.read_text().partition("## Operators that may hold whole operands")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", text, re.MULTILINE)
    assert {reason: set(re.findall(r"`(\w+)`", names)) for names, reason in rows} == declared
