"""Ownership under random sequences of steps: after each step, everything that writes must not change is compared."""

from __future__ import annotations

import gc
import random
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.tensor import ownership
from tests.backend.holders import VALUE, leak, seen, shard_data
from tests.layouts import USABLE, everywhere, mesh_of, put

CHECKED_EVERY = 12
"""After so many steps all tensors and exports are compared; after each step those it touched, and some export."""


@pytest.fixture(autouse=True)
def quick_collections() -> Iterator[None]:
    """Makes garbage collections fast and frequent. Objects that exist before the test are excluded, since collecting
    them took four fifths of the time; collections may begin inside of the library's functions, too.
    """
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(211, 3, 3)
    yield
    gc.set_threshold(*before)


class Machine:
    """Random writes, copies, views, exports, transfers, maps, deletions and garbage collections.

    Attributes:
        tensors: tensors, each with the NumPy array that it must equal; views of a tensor are views of its array.
        exports: what has left the library, each with what it must show for good.
        log: the last steps.
    """

    def __init__(self, backend: str, seed: int, tensors: list[tuple[Any, np.ndarray]]) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.backend = backend
        self.tensors = tensors
        self.exports: list[tuple[list[Any], list[Any]]] = []
        self.log: deque[str] = deque(maxlen=40)
        often = [self.write, self.write_part, self.write_elements, self.share, self.export, self.drop]
        self.steps = [
            *often, *often, self.view, self.view, self.alias, self.compute, self.compute, self.map, self.donate,
            self.leak, self.move, self.drop_export, self.drop_in_a_cycle, self.drop_in_a_thread, self.collect,
        ]  # fmt: skip

    def run(self, steps: int) -> None:
        done = 0
        try:
            for done in range(1, steps + 1):
                touched = self.random.choice(self.steps)()
                self.compare(
                    [] if touched is None else [touched], self.random.sample(self.exports, len(self.exports) > 0)
                )
                if done % CHECKED_EVERY == 0 or done == steps:
                    self.compare(self.tensors, self.exports)
        except BaseException as error:
            error.add_note(f"{self.backend}, seed {self.seed}, step {done}; the last steps: " + "; ".join(self.log))
            raise

    def compare(self, tensors: list[tuple[Any, np.ndarray]], exports: list[tuple[list[Any], list[Any]]]) -> None:
        for x, wanted in tensors:
            assert np.array_equal(np.asarray(x), wanted), (np.asarray(x), wanted)
        for held, shown in exports:
            for a, b in zip(seen(held), shown, strict=True):
                assert np.array_equal(a, b), (a, b)

    def note(self, text: str) -> None:
        self.log.append(text)

    def pick(self) -> int:
        return self.random.randrange(len(self.tensors))

    def keep(self, x: Any, wanted: np.ndarray) -> tuple[Any, np.ndarray]:
        if len(self.tensors) > 7:
            self.tensors.pop(self.pick())
        self.tensors.append((x, wanted))
        return x, wanted

    # -- writes --

    def write(self) -> tuple[Any, np.ndarray]:
        i, j = self.pick(), self.pick()
        (x, wanted), (y, other) = self.tensors[i], self.tensors[j]
        if x.shape != y.shape or self.random.random() < 0.5:
            self.note(f"{i} += 1")
            x += 1
            wanted += 1
        elif self.random.random() < 0.5:
            self.note(f"{i}[...] = {j}")
            x[...] = y
            wanted[...] = other.copy()
        else:
            self.note(f"add({i}, {j}, out={i})")
            np.add(x, y, out=x)
            wanted[...] = wanted + other
            x %= 101
            wanted %= 101
        return x, wanted

    def write_part(self) -> tuple[Any, np.ndarray]:
        i = self.pick()
        x, wanted = self.tensors[i]
        k, n = self.random.randrange(x.shape[0]), self.random.randrange(100)
        index = self.random.choice([slice(k, None), (k, 1), slice(k, k + 2), (slice(None, None, 2), 1)])
        value = self.random.choice([n, np.full_like(wanted[index], n)])
        self.note(f"{i}[{index}] = {'array' if np.ndim(value) else 'scalar'} of {n}")
        x[index] = value
        wanted[index] = value
        return x, wanted

    def write_elements(self) -> tuple[Any, np.ndarray]:
        i = self.pick()
        x, wanted = self.tensors[i]
        n = self.random.randrange(100)
        if self.random.random() < 0.5:
            self.note(f"{i}[{i} > {n}] = {n}")
            x[x > n] = n
            wanted[wanted > n] = n
        else:
            rows = sorted({0, n % x.shape[0]})
            self.note(f"{i}[{rows}] = {n}")
            x[rows] = n
            wanted[rows] = n
        return x, wanted

    # -- tensors that may share memory --

    def share(self) -> tuple[Any, np.ndarray]:
        i = self.pick()
        x, wanted = self.tensors[i]
        ways = {
            "copy": lambda: x.copy(),
            "device_put": lambda: st.device_put(x, x.sharding),
            "reshape": lambda: st.reshape(x, x.shape, copy=True),
            "shards, joined": lambda: st.unshard(st.shard(x, devices=x.sharding.mesh)),
        }
        way = self.random.choice(list(ways))
        self.note(f"{way} of {i}")
        return self.keep(ways[way](), wanted.copy())

    def view(self) -> tuple[Any, np.ndarray] | None:
        i = self.pick()
        x, wanted = self.tensors[i]
        if x.shape[0] < 3:
            return None
        self.note(f"{i}[1:]")
        return self.keep(x[1:], wanted[1:])

    def alias(self) -> tuple[Any, np.ndarray]:
        """A tensor may share the memory of a host array, which no write changes."""
        host = np.full((8, 3), float(self.random.randrange(100)))
        self.note("a host array, shared")
        self.exports.append(([host], [host.copy()]))
        sharding = st.NamedSharding(mesh_of((4,), self.backend), st.P("x"))
        x = st.device_put(host, sharding, may_alias=True)
        self.limit_exports()
        return self.keep(x, host.copy())

    def compute(self) -> tuple[Any, np.ndarray]:
        i = self.pick()
        x, wanted = self.tensors[i]
        self.note(f"{i} * 2 % 101")
        return self.keep(x * 2 % 101, wanted * 2 % 101)

    def map(self) -> tuple[Any, np.ndarray]:
        i, k = self.pick(), self.random.randrange(2)
        x, wanted = self.tensors[i]
        self.note(f"pmap(p + {k}) of {i}")
        functions = [lambda p: p, lambda p: p + 1]
        parts = st.pmap(functions[k], st.shard(x, devices=x.sharding.mesh))
        return self.keep(st.unshard(parts), wanted + k)

    def donate(self) -> tuple[Any, np.ndarray]:
        """The memory of shards is given away, which others may share."""
        i = self.pick()
        x, wanted = self.tensors.pop(i) if len(self.tensors) > 2 else self.tensors[i]
        self.note(f"donate {i}")
        parts, mesh = st.shard(x, devices=x.sharding.mesh), x.sharding.mesh
        del x

        def add(p: Any) -> Any:
            p += 1
            return p

        given = st.pmap(add, parts, donate=True)
        del parts, mesh
        return self.keep(st.unshard(given), wanted + 1)

    def move(self) -> tuple[Any, np.ndarray]:
        i, n = self.pick(), self.random.choice([1, 2, 4])
        x, wanted = self.tensors[i]
        self.note(f"{i} to {n} devices")
        mesh = mesh_of((n,), self.backend)
        return self.keep(st.device_put(x, st.NamedSharding(mesh, st.P("x"))), wanted.copy())

    # -- exports --

    def export(self) -> None:
        i = self.pick()
        x, _ = self.tensors[i]
        ways = {
            "asarray": lambda: [np.asarray(x)],
            "shard.data": lambda: shard_data(x),
            "asarray of [1:]": lambda: [np.asarray(x[1:])],
            "asarray, [1:]": lambda: [np.asarray(x)[1:]],
        }
        if len(x.sharding.mesh.flat) == 1 and self.backend in ("numpy", "torch"):
            ways["DLPack"] = lambda: [np.from_dlpack(x)]
        way = self.random.choice(list(ways))
        self.note(f"{way} of {i}")
        held = ways[way]()
        self.exports.append((held, seen(held)))
        self.limit_exports()

    def leak(self) -> None:
        i = self.pick()
        self.note(f"leak the arguments of a map of {i}")
        held = leak(self.tensors[i][0])
        self.exports.append((held, seen(held)))
        self.limit_exports()

    def limit_exports(self) -> None:
        if len(self.exports) > 6:
            self.drop_export()

    # -- ends --

    def drop(self) -> None:
        if len(self.tensors) > 2:
            i = self.pick()
            self.note(f"drop {i}")
            self.tensors.pop(i)

    def take_export(self) -> list[Any]:
        return self.exports.pop(self.random.randrange(len(self.exports)))[0] if self.exports else []

    def drop_export(self) -> None:
        self.note("drop an export")
        self.take_export()

    def drop_in_a_cycle(self) -> None:
        self.note("drop an export in a cycle")
        ring = self.take_export()
        ring.append(ring)

    def drop_in_a_thread(self) -> None:
        self.note("drop an export in a thread")
        thread = threading.Thread(target=self.take_export().clear)
        thread.start()
        thread.join()

    def collect(self) -> None:
        self.note("collect")
        gc.collect()


def run_machines(backend: str, steps: int, seeds: range, threads: int = 1) -> None:
    """Runs machines at once, which begin with copies of the same tensors: at first they share all memory."""
    first = [put(VALUE + k, backend) for k in range(2)]
    machines = [Machine(backend, seed, [(x.copy(), VALUE + k) for k, x in enumerate(first)]) for seed in seeds]
    del first
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(machine.run, steps) for machine in machines]:
            done.result()
    assert not ownership.READS


@everywhere
@pytest.mark.parametrize("seed", range(3))
def test_state_machine(seed: int, backend: str) -> None:
    run_machines(backend, 100, range(seed, seed + 1))


@pytest.mark.parametrize("backend", ["numpy", "checked", "torch"], indirect=True)
def test_state_machine_in_threads(backend: str) -> None:
    run_machines(backend, 40, range(8), threads=8)


@pytest.mark.full
@pytest.mark.parametrize("backend", USABLE)
@pytest.mark.parametrize("part", range(10))
def test_state_machine_for_long(part: int, backend: str) -> None:
    """A million steps on NumPy's memory, two hundred thousand on each of the others."""
    run_machines(backend, 10_000 if backend == "numpy" else 2_000, range(10 * part, 10 * part + 10))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["numpy", "checked", "torch"], indirect=True)
def test_state_machine_in_threads_for_long(backend: str) -> None:
    run_machines(backend, 5_000, range(8), threads=8)
