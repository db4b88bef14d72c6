# ruff: noqa: B023 - functions are called at once
"""Logs and results of many calls, for comparing two versions of the library: a script.

``python -m tests.interpreters.logged FILE PART...`` writes what the calls of some parts record and return; with
``--compare OLD NEW`` it prints the differences of two such files. See `PARTS`.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import threading
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as some

import shardtensor as st
import tests.conftest
from shardtensor.core import OPS
from shardtensor.tensor.pytree import leaves
from tests.cases import CASES, sharded_somehow
from tests.layouts import mesh_of

tests.conftest.pytest_configure()
BACKENDS = ("numpy", "checked", "grouped", "cupy", "torch")

Found = dict[str, Any]


def records_of(log: st.TransferLog) -> Counter[Any]:
    """The number, the bytes and the copied bytes of the transfers by operator, axis, ends and whether explicit."""
    found: Counter[Any] = Counter()
    for r in log:
        key = (r.operator, r.axis, str(r.source), str(r.destination), r.explicit)
        found[(*key, "bytes")] += r.bytes
        found[(*key, "copied")] += r.copied
        if r.bytes:
            found[(*key, "count")] += 1
    return Counter({key: n for key, n in found.items() if n})


def bits_of(result: Any) -> Any:
    """The layouts and the elements of the tensors in a result."""
    made = []
    for x in leaves(result):
        if isinstance(x, st.ShardedTensor):
            bits = np.asarray(x).tobytes() if not x.is_donated else b""
            made.append((x.shape, str(x.dtype), str(x.sharding), x.committed, hashlib.sha1(bits).hexdigest()))
        elif isinstance(x, (np.ndarray, np.generic)):
            made.append((x.shape, str(x.dtype), hashlib.sha1(np.ascontiguousarray(x).tobytes()).hexdigest()))
        else:
            made.append(repr(x)[:200])
    return made


def outcome(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return "result", call()
        except Exception as error:
            return "error", type(error).__name__, str(error)[:300]


def logged(call: Callable[[], Any]) -> Any:
    """The records of a call, the length of its log, and its result, which is read afterwards."""
    with st.transfers() as log:
        found = outcome(call)
    records = records_of(log)
    return records, (found[0], *(bits_of(found[1]) if found[0] == "result" else found[1:]))


def guarded(call: Callable[[], Any]) -> Any:
    """What a call does where implicit transfers are errors."""
    with st.transfer_guard("disallow"):
        found = outcome(call)
    return (found[0], *(bits_of(found[1]) if found[0] == "result" else found[1:]))


# -- operators -------------------------------------------------------------------------------------


def operators(examples: int, part: int, parts: int) -> Found:
    found: Found = {}
    for name in sorted(CASES)[part::parts]:
        made: list[Any] = []

        @hypothesis.seed(zlib.crc32(name.encode()))
        @hypothesis.settings(max_examples=examples, phases=[hypothesis.Phase.generate])
        @hypothesis.given(data=some.data())
        def run(data: Any) -> None:
            backend = data.draw(some.sampled_from(BACKENDS))
            case = CASES[name](data)
            operands = sharded_somehow(data, case, backend)
            function = OPS[name].dispatch
            one = logged(lambda: case.run(function, operands))
            again = logged(lambda: case.run(function, operands))
            refused = guarded(lambda: case.run(function, operands))
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                after = bits_of([x for x in operands if isinstance(x, st.ShardedTensor)])
            made.append((backend, one, again, refused, after))

        run()
        for k, (backend, one, again, refused, after) in enumerate(made):
            key = f"{name}[{k}] {backend}"
            found[f"{key} once"], found[f"{key} again"] = one, again
            found[f"{key} guard"], found[f"{key} after"] = refused, after
    return found


# -- programs of views, writes, masks and swaps ----------------------------------------------------


def _index(rng: Any, shape: tuple[int, ...], advanced: bool, device: Any = None) -> Any:
    entries: list[Any] = []
    arrays = 0
    for n in shape[: int(rng.integers(1, len(shape) + 1))]:
        kind = int(rng.integers(0, 7 if advanced else 5))
        if kind == 0:
            entries.append(int(rng.integers(-n, n)))
        elif kind == 1:
            entries.append(slice(None))
        elif kind == 2:
            entries.append(slice(int(rng.integers(0, n)), None))
        elif kind == 3:
            entries.append(slice(None, None, int(rng.choice([-1, 2, -2]))))
        elif kind == 4:
            a, b = sorted(rng.integers(0, n + 1, 2).tolist())
            entries.append(slice(a, b))
        elif kind == 5 and not arrays:
            arrays += 1
            entries.append(rng.integers(-n, n, int(rng.integers(1, 5))))
        elif kind == 6 and not arrays:
            arrays += 1
            index = rng.integers(0, n, int(rng.integers(1, 4)))
            entries.append(st.asarray(index, device=device if rng.integers(0, 2) else None))
        else:
            entries.append(slice(None))
    return tuple(entries)


def _program(rng: Any, backend: str, observe: Callable[[str, Callable[[], Any]], None]) -> list[Any]:
    def place(value: Any) -> Any:
        shape = [(4,), (2, 2), (8,), (2, 4), (1,)][int(rng.integers(0, 5))]
        mesh = mesh_of(shape, backend)
        names: list[Any] = [*mesh.axis_names]
        rng.shuffle(names)
        spec = [names.pop() if names and rng.integers(0, 3) else None for _ in range(value.ndim)]
        return st.device_put(value, st.NamedSharding(mesh, st.P(*spec)))

    shapes = [(7, 6), (8, 4), (12,), (5, 3, 4), (1, 9)]
    shape = shapes[int(rng.integers(0, len(shapes)))]
    kind = ["float64", "float32", "int64"][int(rng.integers(0, 3))]
    a = [place(np.asarray(rng.integers(-9, 9, shape), kind)) for _ in range(2)]
    views: list[Any] = list(a)
    for number in range(int(rng.integers(4, 12))):
        x = views[int(rng.integers(0, len(views)))]
        y = views[int(rng.integers(0, len(views)))]
        step = int(rng.integers(0, 20))
        fits = x.shape == y.shape
        index = _index(rng, x.shape, False) if x.ndim and x.size else ()
        chosen = _index(rng, x.shape, True, x.sharding.mesh.flat[0]) if x.ndim and x.size else ()
        value = float(rng.integers(-5, 5))
        name = f"{number}:{step}"
        if step in (0, 1):
            made: list[Any] = []
            observe(name, lambda: made.append(x[index]))
            if made and made[0].size:
                views.append(made[0])
        elif step == 2:
            observe(name, lambda: x.__setitem__(index, value))
        elif step == 3:
            observe(name, lambda: x.__setitem__(chosen, value))
        elif step == 4 and fits:
            observe(name, lambda: x.__setitem__(..., y))
        elif step == 5 and fits:
            observe(name, lambda: x.__iadd__(y))
        elif step == 6:
            observe(name, lambda: x[chosen])
        elif step == 7:
            observe(name, lambda: x.__setitem__(x > value, 0))
        elif step == 8:
            observe(name, lambda: x[x > value])
        elif step == 9 and x.ndim and x.size:
            at = tuple([int(rng.integers(0, n)) for n in x.shape])
            observe(name, lambda: float(x[at]))
        elif step == 10 and x.ndim and x.size:
            at, other = (tuple([int(rng.integers(0, n)) for n in x.shape]) for _ in range(2))

            def swap() -> None:
                x[at], x[other] = x[other], x[at]

            observe(name, swap)
        elif step == 11 and x.ndim and x.size:
            at = tuple([int(rng.integers(0, n)) for n in x.shape])

            def more() -> None:
                x[at] += 1

            observe(name, more)
        elif step == 12:
            observe(name, lambda: x + 1)
        elif step == 13:
            observe(name, lambda: x.T.reshape(-1) * 2)
        elif step == 14 and fits:
            observe(name, lambda: np.add(x, y, out=y))
        elif step == 15:
            observe(name, lambda: x.sum())
        elif step == 16 and x.ndim and x.size:
            element = x[tuple([0] * x.ndim)]
            observe(name, lambda: x * element)
            observe(name + "b", lambda: [x - element, y + element * 2])
        elif step == 17:
            observe(name, lambda: np.asarray(x))
        elif step == 18 and x.ndim == 2:
            observe(name, lambda: x.T @ x)
        elif step == 19 and x.ndim:
            observe(name, lambda: [shard.data.shape for shard in x.addressable_shards])
    return views


def programs(count: int, part: int, parts: int) -> Found:
    found: Found = {}
    for seed in range(part, count, parts):
        for backend in BACKENDS:
            for how in (logged, guarded):
                key = f"program {seed} {backend} {how.__name__}"

                def observe(name: str, call: Callable[[], Any], key: str = key, how: Any = how) -> None:
                    found[f"{key} {name}"] = how(call)

                views = _program(np.random.default_rng(seed), backend, observe)
                found[f"{key} end"] = outcome(lambda: bits_of(views))
    return found


# -- fixed programs: maps, collectives, jit, placement, threads ------------------------------------


def operand(backend: str, shape: tuple[int, ...] = (10, 6), spec: Any = None, mesh: tuple[int, ...] = (2, 2)) -> Any:
    """The argument of the fixed programs."""
    m = mesh_of(mesh, backend)
    value = np.arange(float(np.prod(shape))).reshape(shape) % 7 + 1
    return st.device_put(value, st.NamedSharding(m, st.P(*m.axis_names[: len(shape)]) if spec is None else spec))


def _chain(x: Any) -> Any:
    return st.tanh(x * 2 + 1) - x[::-1]


def _rows(x: Any) -> Any:
    return st.exp(x - x.max(axis=1, keepdims=True)).sum(axis=1)


def _stencil(x: Any) -> Any:
    y = x.copy()
    for _ in range(3):
        y[1:-1] = 0.5 * (y[:-2] + y[2:])
    return y


def _step(x: Any) -> Any:
    y = st.zeros_like(x)
    y[1:] = x[:-1] * 2
    y[0] += 1
    y[y.shape[0] // 2, ::2] = 3
    h = st.tanh(y @ x.T)
    return [st.mean(h), st.stack([p.sum(axis=0) for p in st.unstack(h, axis=1)]), h.reshape(-1)[3:], h[2, 1], y]


def _collectives(x: Any, name: str) -> Any:
    def body(b: Any) -> Any:
        total = {
            "psum": lambda: st.psum(b, "x"),
            "pmax": lambda: st.pmax(b, "x"),
            "all_gather": lambda: st.all_gather(b, "x", axis=0, tiled=True),
            "ppermute": lambda: st.ppermute(b, "x", [(0, 0)]),
            "psum_scatter": lambda: st.psum_scatter(b, "x", scatter_dimension=1, tiled=True),
        }[name]()
        return total.sum().reshape(1, 1)

    m = x.sharding.mesh
    x, (x_name, y_name) = st.concat([x, x])[:16] * 1, m.axis_names
    x = st.reshard(st.concat([x, x[:, :2]], axis=1), st.NamedSharding(m, st.P(x_name, y_name)))
    return st.shard_map(body, mesh=m, in_specs=(st.P(x_name, y_name),), out_specs=st.P(x_name, y_name))(x)


def _closing(x: Any) -> Any:
    other = x[1:] * 2
    return st.pmap(lambda b: [b.sum(), np.asarray(other.sum()), float(other[0, 0])], st.shard(x))


def _log_in_map(x: Any) -> Any:
    def body(b: Any) -> Any:
        with st.transfers() as log:
            x[1:] + x[:-1]
        return np.asarray(float(log.bytes > 0))

    return st.pmap(body, st.shard(x, devices=x.sharding.mesh.flat[:1]))


def _in_thread(x: Any) -> Any:
    made: list[Any] = []
    threads = [threading.Thread(target=lambda: made.append(x[1:] + x[:-1])) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    return made


def _two_logs(x: Any) -> Any:
    with st.transfers() as one:
        x[1:] + x[:-1]
        with st.transfers() as two:
            x.T + x.T[::-1]
    return [sorted(map(repr, records_of(one).items())), sorted(map(repr, records_of(two).items()))]


def _guard_inside(x: Any) -> Any:
    before = np.array(x)
    made = outcome(lambda: guarded(lambda: x.__setitem__(slice(1, None), x[:-1])))
    return [repr(made), np.array_equal(before, x)]


def _reduced(x: Any) -> Any:
    m = x.sharding.mesh
    one = st.device_put(x, st.NamedSharding(m, st.P(None, None, unreduced={m.axis_names[0]})))
    other = one * 3
    return [one * 2, other[1:] * 2, one + 1, one + 2, one.sum(), one[1:], one[1:] + 1, np.asarray(one)]


def _offloaded(x: Any) -> Any:
    m = x.sharding
    y = st.device_put(x, st.NamedSharding(m.mesh, m.spec, memory_kind="pinned_host"))
    z = [y + 1, y[1:3] * 1, float(y[0, 0]), np.asarray(y)]
    y[1] = 3
    return [*z, y, st.device_put(y, m)]


def _elements(x: Any) -> Any:
    return [float(x[1, 1]), x[0, 0] + x[1, 1], x[2] * x[0, 1], [float(v) for v in x[:, 0]], x.tolist(), bool(x[0, 0])]


def _element_kept(x: Any) -> Any:
    e = x[3, 2]
    return [x + e, x - e, e * 2, e + x[3, 2]]


def _views_kept(x: Any) -> Any:
    v = x[1:]
    made = [v + 1, v * 2]
    x[0] = 5
    made += [v + 1]
    x[2] = 5
    return [*made, v + 1, v.T + 1, v.reshape(-1) + 1]


def _joined(x: Any) -> Any:
    parts = st.shard(x, devices=x.sharding.mesh)
    made = st.unshard(st.pmap(lambda b: b * 2, parts))
    return [made + 1, made.sum(), made[1:] * 1]


def _masks(x: Any) -> Any:
    y = x.copy()
    y[y > 3] = 0
    y[y[:, 0] > 1] = -1
    z = x[x > 3]
    y[[1, 2]] = x[[3, 4]]
    return [y, z, st.where(x > 2, x, 0), st.nonzero(x), st.unique(x), x[st.asarray([1, 2])], st.take(x, [0, 1], axis=1)]


def _sets(x: Any) -> Any:
    return [
        st.unique(x), st.unique_all(x.astype("int32")), st.nonzero(x - 1), st.argwhere(x > 3), st.isin(x, np.array([1, 2.0])), st.isin(x, x[:2]),
        st.searchsorted(st.sort(x.reshape(-1)), x), st.bincount(x.reshape(-1).astype("int64")), st.intersect1d(x, x[1:]),
        st.count_nonzero(x), st.compress([True, False, True], x, axis=0), st.extract(x > 2, x),
    ]  # fmt: skip


def _numpys(x: Any) -> Any:
    return [
        np.trapezoid(x), st.cov(x), st.nanmean(x, axis=0), st.histogram(x), st.median(x, axis=0), st.sort(x, axis=0),
        st.cumulative_sum(x, axis=0), st.percentile(x, 30), st.interp(x, [0, 5.0], [1.0, 2]), st.pad(x, 2), st.roll(x, 1),
        np.insert(x, 1, 3.0, axis=0), np.delete(x, 1, axis=0), st.repeat(x, 2, axis=0), st.concat([x, x]), st.kron(x, x[:2, :2]),
        st.linalg.qr(x), st.linalg.svd(x), st.fft.fft(x, axis=0), st.linalg.inv(x.T @ x + st.eye(6)), st.diff(x, axis=0),
        st.convolve(x.reshape(-1), [1, 2.0]), st.map_overlap(lambda b: b, x, depth=1, boundary="nearest"),
        np.gradient(x), st.argsort(x), st.linalg.norm(x), st.einsum("ij,kj->ik", x, x), st.tensordot(x, x, axes=((0,), (0,))),
        st.allclose(x, x), st.array_equal(x, x), st.quantile(x, 0.5, axis=0), st.broadcast_to(x[0], (4, 6)), x.T.reshape(-1),
    ]  # fmt: skip


def _numpys_each(k: int) -> Callable[[Any], Any]:
    import ast
    import inspect

    source = ast.parse(inspect.getsource(_numpys)).body[0].body[0].value.elts[k]  # type: ignore[attr-defined]
    return eval(f"lambda x: {ast.unparse(source)}", globals())


def fixed_programs() -> dict[str, Callable[[Any], Any]]:
    made: dict[str, Callable[[Any], Any]] = {
        name[1:]: globals()[name]
        for name in (
            "_chain", "_rows", "_stencil", "_step", "_closing", "_log_in_map", "_in_thread", "_two_logs", "_guard_inside",
            "_reduced", "_offloaded", "_elements", "_element_kept", "_views_kept", "_joined", "_masks", "_sets",
        )
    }  # fmt: skip
    for name in ("psum", "pmax", "all_gather", "ppermute", "psum_scatter"):
        made[name] = lambda x, name=name: _collectives(x, name)
    for k in range(33):
        made[f"numpy {k}"] = _numpys_each(k)
    return made


JITTED = ("chain", "rows", "stencil", "step", "psum", "all_gather", "numpy 1", "numpy 10", "views_kept", "joined")


def fixed(executors: bool, part: int, parts: int) -> Found:
    found: Found = {}
    wanted = list(fixed_programs().items())[part::parts]
    for backend in BACKENDS:
        for name, function in wanted:
            for mesh in ((2, 2), (4, 2), (1, 1)):
                key = f"{name} {backend} {mesh}"
                x = operand(backend, mesh=mesh)
                found[f"{key} logged"] = logged(lambda: function(x))
                found[f"{key} then"] = bits_of(x) if not x.is_donated else ()
                x = operand(backend, mesh=mesh)
                found[f"{key} guarded"] = guarded(lambda: function(x))
                found[f"{key} guarded then"] = bits_of(x)
                x = operand(backend, mesh=mesh)
                found[f"{key} plain"] = outcome(lambda: bits_of(function(x)))
            if name not in JITTED:
                continue
            for executor in ("numpy", "c") if executors else ("numpy",):
                x, traced = operand(backend), st.jit(function, executor=executor)
                for k in range(3):
                    found[f"jit {name} {backend} {executor} {k}"] = logged(lambda: traced(x))
                    found[f"jit {name} {backend} {executor} {k} guarded"] = guarded(lambda: traced(x))
                    found[f"jit {name} {backend} {executor} {k} plain"] = outcome(lambda: bits_of(traced(x)))
    return found


def _long(x: Any) -> dict[str, Callable[[], Any]]:
    """Calls of long arrays, of which algorithms exchange parts whose sizes follow from the elements."""
    flat, rows = x.reshape(-1) * 1, (x * 7.3) % 1
    line, other = (flat * 3.7) % 1, st.sort((flat * 1.3) % 1)
    whole = flat.astype("int64")
    return {
        "sort": lambda: st.sort(line), "sort rows": lambda: st.sort(rows, axis=0), "argsort": lambda: st.argsort(line),
        "stable": lambda: st.argsort(line, stable=True, descending=True), "partition": lambda: st.partition(line, 9),
        "argpartition": lambda: st.argpartition(line, (3, 99)), "median": lambda: st.median(line),
        "median rows": lambda: st.median(rows, axis=0), "quantile": lambda: st.quantile(line, np.array([0.1, 0.9])),
        "nanquantile": lambda: st.nanquantile(line, 0.3), "topk": lambda: st.topk(line, 5), "unique": lambda: st.unique(whole),
        "unique all": lambda: st.unique_all(whole), "searchsorted": lambda: st.searchsorted(other, line),
        "isin": lambda: st.isin(line, other), "take_along": lambda: st.take_along_axis(line, st.argsort(other), axis=0),
        "lexsort": lambda: st.lexsort([whole, line]), "nonzero": lambda: st.nonzero(line > 0.5), "mask": lambda: line[line > 0.5],
        "histogram": lambda: st.histogram(line, 20), "bincount": lambda: st.bincount(whole), "cumsum": lambda: st.cumulative_sum(line),
        "cumsum rows": lambda: st.cumulative_sum(rows, axis=0), "fft": lambda: st.fft.fft(line), "rfft": lambda: st.fft.rfft(rows, axis=0),
        "qr": lambda: st.linalg.qr(rows), "svd": lambda: st.linalg.svdvals(rows), "gram": lambda: rows.T @ rows,
        "wide": lambda: rows @ rows.T, "inv": lambda: st.linalg.inv(rows[:64] + 9 * st.eye(64)), "det": lambda: st.linalg.det(rows[:64]),
        "solve": lambda: st.linalg.solve(rows[:64] + 9 * st.eye(64), rows[64:128]), "sum": lambda: rows.sum(axis=0), "var": lambda: st.var(rows),
        "roll": lambda: st.roll(line, 9999), "flip": lambda: st.flip(line) * 1, "reshape": lambda: rows.reshape(96, -1) + 1,
        "transpose": lambda: (rows.T + rows.T[::-1]), "take": lambda: line[np.arange(0, 30_000, 7)], "interp": lambda: st.interp(line, other[:50], line[:50]),
        "convolve": lambda: st.convolve(line, np.ones(5)), "percentile": lambda: st.percentile(rows, 30, axis=1), "diff": lambda: st.diff(line),
        "intersect": lambda: st.intersect1d(line, other), "concat": lambda: st.concat([line, other]), "outer": lambda: np.multiply.outer(line[:300], other[:300]),
        "setitem": lambda: line.__setitem__(slice(1, None), line[:-1]), "scatter": lambda: line.__setitem__(np.arange(0, 30_000, 7), 3.0),
        "out": lambda: np.add(line, other, out=line), "argmax": lambda: st.argmax(line), "bool": lambda: bool((line > 2).any()),
    }  # fmt: skip


def large(part: int, parts: int) -> Found:
    found: Found = {}
    for backend in BACKENDS:
        for mesh in ((2, 2), (4, 2), (8, 1)):
            for name in list(_long(operand(backend)))[part::parts]:
                key = f"large {name} {backend} {mesh}"
                found[f"{key} logged"] = logged(_long(operand(backend, (600, 64), mesh=mesh))[name])
                found[f"{key} guarded"] = guarded(_long(operand(backend, (600, 64), mesh=mesh))[name])
                plain = _long(operand(backend, (600, 64), mesh=mesh))[name]
                found[f"{key} plain"] = outcome(lambda: bits_of(plain()))
    return found


def simulated(part: int, parts: int) -> Found:
    found: Found = {}
    for name, function in list(fixed_programs().items())[part::parts]:
        m = st.AbstractMesh((2, 2), ("x", "y"))
        for how in ("simulate", "explain", "real"):
            x = operand("numpy") if how == "real" else st.zeros((10, 6), device=st.NamedSharding(m, st.P("x", "y")))

            def run(function: Any = function, x: Any = x, how: str = how) -> Any:
                if how == "simulate":
                    report = st.simulate(function, x, latency=1e-6, bandwidth=1e9)
                    return [report.messages, report.seconds, report.total.sent]
                return str(st.explain(function, x))

            found[f"{how} {name}"] = logged(run)
            if how == "simulate":
                x = st.zeros((10, 6), device=st.NamedSharding(m, st.P("x", "y")))
                with st.transfers() as log:
                    result = outcome(lambda: function(x))
                found[f"abstract {name}"] = records_of(log), result[1:] if result[0] == "error" else ()
    return found


PARTS: dict[str, Callable[[int, int], Found]] = {
    "operators": lambda k, n: operators(4, k, n),
    "operators-long": lambda k, n: operators(25, k, n),
    "programs": lambda k, n: programs(40, k, n),
    "programs-long": lambda k, n: programs(600, k, n),
    "fixed": lambda k, n: fixed(True, k, n),
    "large": large,
    "simulated": simulated,
}


# -- comparison ------------------------------------------------------------------------------------


def differences(old: Found, new: Found) -> Iterator[str]:
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if a == b:
            continue
        if a is None or b is None:
            yield f"{key}: only in {'new' if a is None else 'old'}"
        elif isinstance(a, tuple) and isinstance(a[0], Counter):
            if a[1:] != b[1:]:
                yield f"{key}: result\n    old {a[1:]}\n    new {b[1:]}"
            for kind in ("bytes", "copied", "count"):
                mine = {k: n for k, n in a[0].items() if k[-1] == kind}
                its = {k: n for k, n in b[0].items() if k[-1] == kind}
                if mine != its:
                    lost = {k[:-1]: (n, its.get(k, 0)) for k, n in mine.items() if its.get(k, 0) != n}
                    more = {k[:-1]: (0, n) for k, n in its.items() if k not in mine}
                    yield f"{key}: {kind} (old, new) {list({**lost, **more}.items())[:4]} ... {len(lost)}, {len(more)}"
        else:
            yield f"{key}:\n    old {a}\n    new {b}"


def main() -> None:
    if sys.argv[1] == "--compare":
        pairs = [pickle.loads(Path(name).read_bytes()) for name in sys.argv[2:]]
        lines = list(differences(*pairs))
        print("\n".join(lines))
        print(f"{len(lines)} differences of {len(pairs[0])} observations")
        return
    path, *parts = sys.argv[1:]
    found: Found = {}
    for part in parts:
        name, _, which = part.partition(":")
        k, n = map(int, which.split("/")) if which else (0, 1)
        found |= PARTS[name](k, n)
    Path(path).write_bytes(pickle.dumps(found))
    print(len(found), "observations")


if __name__ == "__main__":
    main()
