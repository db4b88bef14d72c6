"""The limits of the host: cores and memory as control groups restrict them; and the memory pool of large results."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import os
import platform
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.backend.registry import load
from shardtensor.errors import ArgumentError, DeviceMemoryError
from shardtensor.host import limits, memory_pool
from shardtensor.interpreters.execution import plan_cache, strategies
from tests.draws import all_of_them, drawn
from tests.layouts import array, mesh_of, place_of
from tests.scripts import VARIABLES, new_process, output_of
from tests.spmd.test_scheduler import (
    hard_end,  # noqa: F401 - the first one works by being here
    in_time,
    scripted,
)

Kernel = Callable[..., None]

# -- control groups --------------------------------------------------------------------------------

FREE, TOTAL = 6 << 30, 16 << 30
MEMINFO = f"MemTotal: {TOTAL >> 10} kB\nMemFree: 1024 kB\nMemAvailable: {FREE >> 10} kB\nHugePages_Total:   0\n"
NO_LIMIT = 0x7FFFFFFFFFFFF000
"""What version 1 writes for none."""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """Returns a function that replaces the kernel's files by texts, by path; control groups have paths relative to
    their root.
    """

    def forget() -> None:
        limits._granted_cores.cache_clear()
        limits._limited_memory.cache_clear()

    def says(files: dict[str, Any], cores: int = 16) -> None:
        texts = {os.path.join(limits._GROUPS, path): str(text) for path, text in files.items()}
        monkeypatch.setattr(limits, "_read", lambda path: texts.get(str(path), ""))
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        forget()

    forget()
    yield says
    monkeypatch.undo()
    forget()


def two(path: str = "/", **files: Any) -> dict[str, Any]:
    """A process in a group of version 2."""
    return {"/proc/self/cgroup": f"0::{path}", "/proc/meminfo": MEMINFO, **files}


def one(path: str = "/", **files: Any) -> dict[str, Any]:
    """A process in a group of version 1, beside those that Linux always writes."""
    lines = [f"9:name=systemd:{path}", f"4:memory:{path}", "3:cpuset:/", f"2:cpu,cpuacct:{path}", "0::/"]
    return {"/proc/self/cgroup": "\n".join(lines), "/proc/meminfo": MEMINFO, **files}


def quota(folder: str, quota: Any, period: Any = 100000) -> dict[str, Any]:
    """The files in which version 1 limits cores."""
    return {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": period}


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, 16),
        (two(), 16),
        (two(**{"cpu.max": "400000 100000"}), 4),
        (two(**{"cpu.max": "350000 100000"}), 4),  # part of a core counts as one
        (two(**{"cpu.max": "301 100"}), 4),
        (two(**{"cpu.max": "50000 100000"}), 1),
        (two(**{"cpu.max": "0 100000"}), 1),
        (two(**{"cpu.max": "max 100000"}), 16),
        (two(**{"cpu.max": "6400000 100000"}), 16),  # more than the process may run on
        (two(**{"cpu.max": "400000 0"}), 16),
        (two(**{"cpu.max": "400000"}), 16),
        (two(**{"cpu.max": "what else"}), 16),
        (two("/a/b", **{"a/b/cpu.max": "500000 100000"}), 5),
        (two("/a/b", **{"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000", "cpu.max": "900000 100000"}), 3),
        (two("/a/b", **{"a/b/cpu.max": "200000 100000", "a/cpu.max": "300000 100000"}), 2),
        (two("/a/b", **{"a/b/cpu.max": "700000 100000", "cpu.max": "600000 100000"}), 6),
        (two("/a/b", **{"a/c/cpu.max": "100000 100000", "b/cpu.max": "100000 100000"}), 16),  # of others
        (one(), 16),
        (one(**quota("cpu", 250000)), 3),
        (one(**quota("cpu", -1)), 16),
        (one(**quota("cpu", 20000, 50000)), 1),
        (one(**quota("cpu", 200000, 50000)), 4),
        (one("/docker/x", **quota("cpu", 200000), **quota("cpu/docker/x", -1)), 2),
        (one("/docker/x", **quota("cpu", -1), **quota("cpu/docker", 500000), **quota("cpu/docker/x", 900000)), 5),
        (one("/docker/x", **quota("cpuacct/docker/x", 300000)), 3),  # mounted under its second name
        (one("/docker/x", **quota("memory/docker/x", 300000), **quota("cpuset", 100000)), 3),
    ],
)  # fmt: skip
def test_cores(kernel: Kernel, files: dict[str, Any], wanted: int) -> None:
    if "memory/docker/x/cpu.cfs_quota_us" in files:
        wanted = 1  # wherever a limit is written, it is one
    kernel(files)
    assert limits.usable_cores() == wanted


def test_cores_of_the_affinity_mask(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel(two(**{"cpu.max": "400000 100000"}), cores=3)
    assert limits.usable_cores() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})  # masks change, and are asked each time
    assert limits.usable_cores() == 1


def test_cores_without_a_mask(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel({})
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert limits.usable_cores() == 12
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert limits.usable_cores() == 1
    kernel(two(**{"cpu.max": "400000 100000"}))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert limits.usable_cores() == 1


GIB = 1 << 30


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, None),
        ({"/proc/self/cgroup": "0::/", "memory.max": GIB, "memory.current": 0}, None),
        ({"/proc/meminfo": "MemTotal: 1024 kB"}, None),
        (two(), (FREE, TOTAL)),
        (two(**{"/proc/meminfo": MEMINFO + f"SwapTotal: {GIB >> 9} kB\nSwapFree: {GIB >> 10} kB"}), (FREE + GIB, TOTAL + 2 * GIB)),
        (two(**{"memory.max": "max", "memory.current": GIB}), (FREE, TOTAL)),
        (two(**{"memory.max": 4 * GIB, "memory.current": GIB}), (3 * GIB, 4 * GIB)),
        (two(**{"memory.max": 12 * GIB, "memory.current": GIB}), (FREE, 12 * GIB)),
        (two(**{"memory.max": 64 * GIB, "memory.current": GIB}), (FREE, TOTAL)),
        (two(**{"memory.max": 4 * GIB, "memory.current": 3 * GIB, "memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7"}),
         (2 * GIB, 4 * GIB)),
        (two(**{"memory.max": GIB, "memory.current": 2 * GIB}), (0, GIB)),  # it has been lowered
        (two(**{"memory.max": GIB}), (FREE, TOTAL)),  # the usage is unknown
        (two("/a/b", **{"a/b/memory.max": 5 * GIB, "a/b/memory.current": GIB, "a/memory.max": 7 * GIB, "a/memory.current": 6 * GIB}),
         (GIB, 5 * GIB)),
        (two("/a/b", **{"a/b/memory.max": "max", "memory.max": 3 * GIB, "memory.current": GIB}), (2 * GIB, 3 * GIB)),
        (one(**{"memory/memory.limit_in_bytes": NO_LIMIT, "memory/memory.usage_in_bytes": GIB}), (FREE, TOTAL)),
        (one(**{"memory/memory.limit_in_bytes": 2 * GIB, "memory/memory.usage_in_bytes": GIB}), (GIB, 2 * GIB)),
        (one("/docker/x", **{"memory/docker/x/memory.limit_in_bytes": NO_LIMIT, "memory/docker/x/memory.usage_in_bytes": GIB,
                             "memory/memory.limit_in_bytes": 4 * GIB, "memory/memory.usage_in_bytes": GIB,
                             "memory/memory.stat": f"cache 3\ninactive_file {GIB // 2}"}), (3 * GIB + GIB // 2, 4 * GIB)),
    ],
)  # fmt: skip
def test_memory(kernel: Kernel, files: dict[str, Any], wanted: tuple[int, int] | None) -> None:
    kernel(files)
    assert limits.memory() == wanted
    assert memory_pool.Pool().limit == (wanted[1] // 4 if wanted else 1 << 30)


def test_limits_are_cached_and_usage_is_not(kernel: Kernel) -> None:
    kernel(two(**{"memory.max": 4 * GIB, "memory.current": GIB}))
    assert limits.memory() == (3 * GIB, 4 * GIB)
    read = limits._read
    limits._read = lambda path: "2147483648" if str(path).endswith("current") else read(path)
    assert limits.memory() == (2 * GIB, 4 * GIB)


def test_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("4 5\n")
    assert limits._read(tmp_path / "file") == "4 5"
    assert limits._read(tmp_path / "not") == ""
    assert limits._read(tmp_path) == ""


def test_this_host() -> None:
    assert limits.usable_cores() >= 1
    found = limits.memory()
    if Path("/proc/meminfo").exists():
        assert found is not None
        free, total = found
        assert 0 < free <= total
        assert load("numpy").memory_info(st.devices("numpy")[0]) is not None


# -- memory that is used again ---------------------------------------------------------------------

LARGE = 1 << 17
"""Elements of float64 that make a MiB."""


@pytest.fixture
def kept() -> Iterator[None]:
    """Empties the cache of memory, and sets its limit to 1 GiB."""
    gc.collect()
    limit = st.cache_info().limit
    st.free_cache()
    st.set_cache_limit(1 << 30)
    yield
    st.set_cache_limit(limit)
    st.free_cache()


@pytest.fixture
def small(kept: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The same, and results of this many bytes are large."""
    plan_cache._cached_plan.cache_clear()
    for module in (memory_pool, strategies):
        monkeypatch.setattr(module, "POOLED_FROM", 1 << 12)
    yield 1 << 12
    plan_cache._cached_plan.cache_clear()


def used() -> int:
    return st.cache_info().used


def change(before: st.CacheInfo) -> tuple[int, ...]:
    """Returns the changes of the counters, except for the limit."""
    return tuple(b - a for name, a, b in zip(before._fields, before, st.cache_info(), strict=True) if name != "limit")


def numbered(k: int, size: int = LARGE) -> st.ShardedTensor:
    """A large result of an operator, filled with a number."""
    return st.add(np.full(size, k - 1.0), 1)


def interval(x: Any) -> tuple[int, int]:
    lead = x.__array_interface__["data"][0]
    return lead, lead + x.nbytes


def test_memory_is_reused(kept: None) -> None:
    x = np.full(LARGE, 2.0)
    y = st.asarray(x)
    before = st.cache_info()
    z = y + 1
    assert change(before) == (1 << 20, 0, 0, 1)
    place = place_of(np.asarray(z))
    del z
    assert change(before) == (0, 1 << 20, 0, 1)
    z = y * 3
    assert place_of(np.asarray(z)) == place
    assert change(before) == (1 << 20, 0, 1, 1)
    np.testing.assert_array_equal(np.asarray(z), x * 3)
    w = y - 1
    assert change(before) == (2 << 20, 0, 1, 2)
    np.testing.assert_array_equal(np.asarray(z), x * 3)


def test_small_results_and_objects_are_allocated_by_numpy(kept: None) -> None:
    before = st.cache_info()
    arrays = [
        memory_pool.empty((memory_pool.POOLED_FROM // 8 - 1,), np.float64),
        memory_pool.empty((memory_pool.POOLED_FROM,), object),
        memory_pool.empty((0, 9), "f4"),
    ]
    assert change(before) == (0, 0, 0, 0)
    assert [a.shape for a in arrays] == [((1 << 16) - 1,), (1 << 19,), (0, 9)]
    assert memory_pool.empty((memory_pool.POOLED_FROM // 8,), np.float64).base is not None
    assert change(before) == (0, 1 << 19, 0, 1)


PAGES = """
import resource
import shardtensor as st

key = st.random.key(0)
st.random.integers(key, 0, 10, (1 << 20,))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
st.random.integers(key, 0, 10, (1 << 20,))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep free memory by other rules")
def test_temporary_arrays_reuse_pages() -> None:
    """New pages of arrays that are too small for the pool would take longer than the functions that fill them."""
    done = new_process("-W", "error", "-c", PAGES, **VARIABLES, SHARDTENSOR_NUM_THREADS="1")
    assert int(output_of(done)) < 1000, "pages of 4 KiB for 8 MiB of numbers"


PAGES_OF_PROGRAMS = """
import resource
import numpy as np
from shardtensor.host import memory_pool

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        temporary = [np.ones(1 << 23, np.uint8) for _ in range(3)]
        del temporary
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(new_pages(), new_pages())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep free memory by other rules")
def test_temporary_arrays_of_programs_keep_their_pages() -> None:
    """Three arrays of 8 MiB have 12 pages, if all are huge, and otherwise 6,144."""
    _, again = output_of(new_process("-c", PAGES_OF_PROGRAMS)).split()
    assert int(again) < 12


ALIASES: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda x: x,
    "view": lambda x: x[5:70],
    "reversed": lambda x: x[::-3],
    "reshaped": lambda x: st.reshape(x, (-1, 8)),
    "transposed": lambda x: st.reshape(x, (-1, 8)).T,
    "view of a view": lambda x: st.reshape(x, (-1, 8))[3:].T[2:, ::2],
    "value of the same buffer": lambda x: st.reshard(x, st.NamedSharding(mesh_of((4,), backend="numpy"), st.P("x"))),
    "shard": lambda x: x.addressable_shards[-1],
    "part of a list": lambda x: x.shard()[0],
    "export": np.asarray,
    "view of an export": lambda x: np.asarray(x)[7:9],
    "other dtype": lambda x: np.asarray(x).view(np.uint8)[3::2],
    "one element": lambda x: np.asarray(x)[9:10].reshape(()),
    "broadcast": lambda x: np.broadcast_to(np.asarray(x), (2, x.size)),
    "strides": lambda x: np.lib.stride_tricks.as_strided(np.asarray(x), (3,), (16,)),
    "subclass": lambda x: np.asarray(x).view(np.recarray),
    "memoryview": lambda x: memoryview(np.asarray(x))[3:],
    "array of a memoryview": lambda x: np.asarray(memoryview(np.asarray(x))),
    "buffer": lambda x: np.frombuffer(np.asarray(x), np.uint8),
    "iterator": lambda x: np.asarray(x).flat,
    "dlpack": lambda x: np.from_dlpack(x.addressable_shards[0].data),
    "dlpack of one device": lambda x: np.from_dlpack(st.device_put(x, st.devices()[0], may_alias=True), copy=False),
    "dlpack of a view": lambda x: np.from_dlpack(st.device_put(x, st.devices()[0], may_alias=True)[6:], copy=False),
    "torch": lambda x: quietly(lambda: importlib.import_module("torch").from_numpy(np.asarray(x))),
    "view in torch": lambda x: quietly(lambda: importlib.import_module("torch").from_numpy(np.asarray(x)))[8:].view(-1, 4),
    "base": lambda x: np.asarray(x)[1:].base,
    "lease": lambda x: np.asarray(x)[1:].base.base,
    "bytes of the lease": lambda x: lease_of(np.asarray(x))[32:],
    "array of the lease": lambda x: np.asarray(lease_of(np.asarray(x))[32:]),
}  # fmt: skip


def quietly(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch does not like arrays that cannot be written
        return call()


def lease_of(x: Any) -> Any:
    while type(x) is not memory_pool.Lease:
        x = x.obj if type(x) is memoryview else x.base
    return x


def values(alias: Any) -> np.ndarray:
    if isinstance(alias, st.Shard):
        alias = alias.data
    return np.array(
        alias.copy() if isinstance(alias, np.flatiter) else alias.tolist() if hasattr(alias, "data_ptr") else alias
    )


@pytest.mark.parametrize("name", ALIASES)
def test_memory_is_not_reused_while_an_alias_exists(name: str, kept: None) -> None:
    if "torch" in name:
        pytest.importorskip("torch")
    before = st.cache_info()
    x = numbered(7)
    alias = ALIASES[name](x)
    wanted = values(alias)
    here = interval(np.asarray(x))
    del x
    assert change(before)[:2] == (1 << 20, 0)
    others = [numbered(k) for k in range(4)]
    assert all(interval(np.asarray(o)) != here for o in others)
    np.testing.assert_array_equal(values(alias), wanted)
    others.clear()
    del alias
    assert change(before)[0] == 0
    others = [numbered(k) for k in range(5)]
    assert here in [interval(np.asarray(o)) for o in others]


def test_weak_references_do_not_keep_memory(kept: None) -> None:
    x = np.asarray(numbered(3))
    seen = [weakref.ref(y) for y in (x, x.base, lease_of(x))]
    del x
    assert [ref() for ref in seen] == [None] * 3
    assert st.cache_info().cached == 1 << 20


class Holders(stateful.RuleBasedStateMachine):
    """Arrays from a pool, each filled with a different number, and views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = memory_pool.Pool()
        self.pool.limit = 1 << 16
        self.given, memory_pool._pool = memory_pool._pool, self.pool
        self.arrays: list[tuple[np.ndarray, int, int]] = []
        self.numbers = itertools.count(1)
        self.requests = 0

    def teardown(self) -> None:
        self.arrays.clear()
        assert self.pool.info().used == 0
        memory_pool._pool = self.given

    @stateful.rule(size=some.integers(1 << 9, 1 << 13), dtype=some.sampled_from(["u1", "i4", "f8", "c16"]))
    def allocate(self, size: int, dtype: str) -> None:
        x = self.pool.empty((size // 4, 4), np.dtype(dtype))
        self.requests += x.nbytes >= memory_pool.POOLED_FROM
        number = next(self.numbers) % 251
        x[...] = number
        self.arrays.append((x, number, id(x.base)))

    @stateful.precondition(lambda self: self.arrays)
    @stateful.rule(data=some.data())
    def drop(self, data: Any) -> None:
        del self.arrays[data.draw(some.integers(0, len(self.arrays) - 1))]

    @stateful.precondition(lambda self: self.arrays)
    @stateful.rule(
        data=some.data(),
        index=some.sampled_from([np.s_[3:], np.s_[::-2], np.s_[:, 1], np.s_[0], np.s_[...]]),
        replace=some.booleans(),
    )
    def view(self, data: Any, index: Any, replace: bool) -> None:
        k = data.draw(some.integers(0, len(self.arrays) - 1))
        x, number, owner = self.arrays[k]
        if x.ndim == 2 and len(x) > 3:
            self.arrays[k : k + replace] = [(x[index], number, owner)]

    @stateful.rule()
    def free(self) -> None:
        self.pool.free()
        assert self.pool.info().cached == 0

    @stateful.rule(nbytes=some.sampled_from([0, 1 << 13, 1 << 15, 1 << 18]))
    def limit(self, nbytes: int) -> None:
        self.pool.limit = nbytes

    @stateful.invariant()
    def arrays_do_not_share_memory(self) -> None:
        for x, number, _ in self.arrays:
            assert (x == number).all()

    @stateful.invariant()
    def the_books_are_right(self) -> None:
        info = self.pool.info()
        assert info.used == sum({owner: capacity_of(x) for x, _, owner in self.arrays}.values())
        assert info.cached == sum(c * len(waiting) for c, waiting in self.pool._idle.items()) <= info.limit
        assert info.hits + info.misses == self.requests


def capacity_of(x: np.ndarray) -> int:
    with contextlib.suppress(AttributeError):
        return int(lease_of(x).size)
    return 0


def test_arrays_in_use_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pool, "POOLED_FROM", 1 << 12)
    stateful.run_state_machine_as_test(
        Holders, settings=hypothesis.settings(max_examples=drawn(60), stateful_step_count=40)
    )


@hypothesis.given(nbytes=some.integers(1 << 19, 1 << 40))
def test_capacities_waste_at_most_an_eighth(nbytes: int) -> None:
    capacity = memory_pool._capacity(nbytes)
    assert nbytes <= capacity <= nbytes * 9 / 8
    assert capacity % 4096 == 0
    assert memory_pool._capacity(capacity) == capacity


def test_there_are_eight_capacities_for_each_power_of_two() -> None:
    assert len({memory_pool._capacity(n) for n in range((1 << 20) + 1, (1 << 21) + 1, 4096)}) == 8
    assert len({memory_pool._capacity(n) for n in range((1 << 20) + 1, (1 << 21) + 1, 4096)} & {1 << 20, 1 << 21}) == 1


@pytest.mark.parametrize("shape", [(1 << 20,), ((1 << 19) + 1,), (777, 1001), (3, 5, 7, 20000)])
@pytest.mark.parametrize("dtype", ["bool", "int8", "float32", "complex128"])
def test_buffers_begin_at_lines(shape: tuple[int, ...], dtype: str, kept: None) -> None:
    arrays = [memory_pool.empty(shape, dtype) for _ in range(3)]
    for x in arrays:
        if x.nbytes >= memory_pool.POOLED_FROM:
            assert place_of(x) % 64 == 0
        assert (x.shape, x.dtype) == (shape, np.dtype(dtype))
        assert x.flags.c_contiguous
        assert x.flags.writeable
        assert x.flags.aligned


def test_the_limit(kept: None) -> None:
    st.set_cache_limit(3 << 20)
    before = st.cache_info()
    assert before.limit == 3 << 20
    arrays = [memory_pool.empty((1 << 20,), np.uint8) for _ in range(5)]
    arrays.clear()
    assert change(before) == (0, 3 << 20, 0, 5)
    st.set_cache_limit(2 << 20)
    assert change(before) == (0, 2 << 20, 0, 5)
    large = memory_pool.empty((4 << 20,), np.uint8)
    del large  # which is more than may wait
    assert change(before) == (0, 2 << 20, 0, 6)
    st.set_cache_limit(0)
    assert change(before) == (0, 0, 0, 6)
    del (arrays := [memory_pool.empty((1 << 20,), np.uint8)])[:]
    assert change(before) == (0, 0, 0, 7)
    st.set_cache_limit(1 << 20)
    del (arrays := [memory_pool.empty((1 << 20,), np.uint8)])[:]
    assert change(before) == (0, 1 << 20, 0, 8)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, SystemExit])
@pytest.mark.parametrize("handler", ["python", "default", "ignore"])
def test_an_exception_while_memory_is_taken_back_is_not_lost(
    error: type[BaseException], handler: str, kept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python itself only prints an exception that a finalizer raises, such as one of a signal handler."""

    def interrupt(limit: int) -> None:
        monkeypatch.undo()
        raise made

    def drop() -> None:
        held.clear()
        done.append(1)
        for _ in range(10):
            done.append(2)

    made = error("the handler's")
    handlers = {"python": signal.default_int_handler, "default": signal.SIG_DFL, "ignore": signal.SIG_IGN}
    original = signal.signal(signal.SIGINT, handlers[handler])
    try:
        for _ in range(3):
            done: list[int] = []
            held = [memory_pool.empty((1 << 20,), np.uint8)]
            before = st.cache_info().used
            monkeypatch.setattr(memory_pool._pool, "_shrink", interrupt)
            with pytest.raises(error) as caught:
                drop()
            assert caught.value is made
            assert len(done) <= 1
            assert st.cache_info().used == before - (1 << 20)
            assert signal.getsignal(signal.SIGINT) == handlers[handler]
    finally:
        signal.signal(signal.SIGINT, original)


def test_free_cache(kept: None) -> None:
    x = numbered(4)
    y = numbered(5)
    del y
    assert st.cache_info().cached == 1 << 20
    st.free_cache()
    assert st.cache_info().cached == 0
    st.free_cache()
    np.testing.assert_array_equal(np.asarray(x), np.full(LARGE, 4.0))
    del x
    assert st.cache_info().cached == 1 << 20


def test_freed_memory_is_returned_to_the_system(kept: None) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("the memory usage is unknown")
    x = memory_pool.empty((128 << 20,), np.uint8)
    x[:] = 1
    before = resident()
    del x
    assert resident() > before - (8 << 20)
    st.free_cache()
    assert resident() < before - (100 << 20)


@pytest.mark.parametrize("nbytes", [-1, 1.5, 2.0, "1", None, float("inf"), [3]])
def test_bad_limits(nbytes: Any) -> None:
    before = st.cache_info()
    with pytest.raises(ArgumentError, match=r"^set_cache_limit: nbytes is .*; wanted an integer, 0 or more"):
        st.set_cache_limit(nbytes)
    assert st.cache_info() == before


def test_least_recently_used_capacities_are_freed_first(kept: None) -> None:
    for size in (1, 2, 3):
        memory_pool.empty((size << 20,), np.uint8)
    memory_pool.empty((1 << 20,), np.uint8)  # wanted again
    assert st.cache_info().cached == 6 << 20
    st.set_cache_limit(4 << 20)
    before = st.cache_info()
    held = [memory_pool.empty((size << 20,), np.uint8) for size in (1, 3)]
    assert change(before) == (4 << 20, -4 << 20, 2, 0)
    held.append(memory_pool.empty((2 << 20,), np.uint8))
    assert change(before) == (6 << 20, -4 << 20, 2, 1)
    while held:
        held.pop()  # 2 and 3 MiB, of which only one may wait, and then 1
    assert change(before) == (0, 0, 2, 1)
    held = [memory_pool.empty((size << 20,), np.uint8) for size in (1, 3, 2)]
    assert change(before)[2:] == (4, 2)


def test_threads(kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pool, "POOLED_FROM", 1 << 12)
    before = st.cache_info()
    st.set_cache_limit(1 << 16)
    wrong: list[Any] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        held: list[tuple[np.ndarray, int]] = []
        start.wait()
        for turn in range(600):
            x = memory_pool.empty((int(random.integers(1 << 12, 1 << 14)),), np.uint8)
            x[:] = (number + turn * 8) % 256
            held.append((x, (number + turn * 8) % 256))
            if len(held) > 5:
                y, value = held.pop(int(random.integers(5)))
                if not (y == value).all():
                    wrong.append((number, turn))
            if not turn % 100:
                st.free_cache()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert used() == before.used
    info = st.cache_info()
    assert info.hits + info.misses - before.hits - before.misses == 8 * 600
    assert info.cached == sum(c * len(waiting) for c, waiting in memory_pool._pool._idle.items()) <= 1 << 16
    st.free_cache()
    assert st.cache_info().cached == 0


def test_cycles_are_collected(kept: None) -> None:
    before = st.cache_info()
    gc.disable()
    try:
        for k in range(3):
            cycle: list[Any] = [numbered(k)]
            cycle.append(cycle)
        del cycle
        assert change(before)[0] == 3 << 20
        gc.collect()
        assert change(before)[0] == 0
    finally:
        gc.enable()


def test_operators_leave_no_cycles(kept: None) -> None:
    before = st.cache_info()
    x = numbered(2)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(st.ShapeError):
            st.add(x * 2, st.ones(3))
        with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
            x / st.zeros(LARGE)
        y = st.sum(st.reshape(st.sqrt(x * 2) - x[::-1], (-1, 64)), axis=0)
        x += st.ones(LARGE)
        x[3:] -= x[:-3]
        del x, y
        assert change(before)[0] == 0
    finally:
        gc.enable()


# At any line of the pool's own code the same thread may be interrupted (by a signal's handler, by the collector), and
# what it drops there gives memory back.


def lines_of_the_pool(here: Callable[[int], None], call: Callable[[], Any]) -> int:
    """Calls ``here`` before every line that ``call`` executes in the pool; returns the number of lines."""
    counts = itertools.count(1)
    last = 0

    def in_line(frame: Any, event: str, _: Any) -> Any:
        nonlocal last
        if event == "line":
            last = next(counts)
            here(last)
        return in_line

    def trace(frame: Any, event: str, _: Any) -> Any:
        return in_line if frame.f_code.co_filename == memory_pool.__file__ else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return last


def repaired(before: int) -> None:
    """Restores the state that a failed test has damaged, for the tests that follow."""
    memory_pool._pool._idle.clear()
    memory_pool._pool._cached, memory_pool._pool._used = 0, before


def situations() -> dict[str, Callable[[], Callable[[], Any]]]:
    """Yields paths through the pool: what is done first, and what is checked."""

    def arrays(*sizes: int) -> list[Any]:
        return [memory_pool.empty((n << 20,), np.uint8) for n in sizes]

    def hit(waiting: int) -> Callable[[], Any]:
        arrays(*[1] * waiting).clear()
        return lambda: arrays(1)

    def back(*waiting: int) -> Callable[[], Any]:
        held = arrays(*waiting, 1)
        del held[:-1]
        return held.clear

    def full() -> Callable[[], Any]:
        held = arrays(1, 1, 2, 1)
        del held[:-1]
        st.set_cache_limit(4 << 20)
        return held.clear

    def freed() -> Callable[[], Any]:
        arrays(1, 1, 2).clear()
        return st.free_cache

    return {
        "miss": lambda: hit(0), "last hit": lambda: hit(1), "hit": lambda: hit(2), "first back": lambda: back(),
        "back": lambda: back(1, 1), "full": full, "freed": freed,
    }  # fmt: skip


def at_every_line(at: Callable[[int], int], before: int) -> None:
    """Interrupts at the first line, at the second, and so on, until there are no more; ``at`` returns the number of
    lines.
    """
    line = 1
    try:
        while at(line) >= line:
            line += 1
    except BaseException:
        repaired(before)
        raise
    assert line > 1


@pytest.mark.parametrize("name", ["miss", "last hit", "hit", "first back", "back", "full", "freed"])
def test_deallocation_at_every_line(name: str, kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda error: errors.append(error.exc_value))  # what `__del__` raises
    errors: list[Any] = []
    before = used()

    def at(line: int) -> int:
        st.set_cache_limit(1 << 30)
        victims = [memory_pool.empty((1 << 20,), np.uint8) for _ in range(3)]
        call = situations()[name]()
        if name == "full":
            st.set_cache_limit(4 << 20)
        found: list[Any] = []
        count = lines_of_the_pool(lambda n: victims.clear() if n == line else None, lambda: found.append(call()))
        victims.clear()
        found.clear()
        assert not errors
        info = st.cache_info()
        assert info.used == before
        assert info.cached == sum(c * len(waiting) for c, waiting in memory_pool._pool._idle.items()) <= info.limit
        st.free_cache()
        assert st.cache_info().cached == 0
        return count

    at_every_line(at, before)


@pytest.mark.parametrize("name", ["miss", "last hit", "hit", "freed"])
def test_ctrl_c_at_every_line(name: str, kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = used()

    def at(line: int) -> int:
        call = situations()[name]()
        last = 0

        def here(n: int) -> None:
            nonlocal last
            last = n
            if n == line:
                signal.raise_signal(signal.SIGINT)

        found: list[Any] = []
        with contextlib.suppress(KeyboardInterrupt):
            lines_of_the_pool(here, lambda: found.append(call()))
        found.clear()
        info = st.cache_info()
        assert info.used == before
        assert info.cached == sum(c * len(waiting) for c, waiting in memory_pool._pool._idle.items())
        st.free_cache()
        assert st.cache_info().cached == 0
        return last

    at_every_line(at, before)


def test_fork(kept: None) -> None:
    scripted(
        """
        x = st.ones(1 << 17) * 5
        y = np.asarray(st.ones(1 << 17) * 6)
        z = st.ones(1 << 17) * 7
        del z
        info = st.cache_info()
        if not (child := os.fork()):
            import sys
            with_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
            assert st.cache_info() == (info if with_gil else info._replace(used=0, cached=0))
            made = [st.ones(1 << 17) * k for k in range(8)]
            x += 1
            assert (np.asarray(x) == 6).all() and (y == 6).all()
            assert all((np.asarray(m) == k).all() for k, m in enumerate(made))
            del made, x, y
            st.free_cache()
            assert st.cache_info().used == 0, st.cache_info()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert (np.asarray(x) == 5).all() and (y == 6).all()
        assert st.cache_info() == info
        """
    )


def test_fork_while_others_allocate() -> None:
    scripted(
        f"        TURNS = {drawn(20, fast=8)}"
        """
        import threading
        st.set_num_threads(3)
        st.sum(st.ones(1 << 18) + 1)  # which imports, and a fork meanwhile is no child's play
        end = threading.Event()
        def work():
            x = st.ones(1 << 17)
            while not end.is_set():
                x + 1
        threads = [threading.Thread(target=work) for _ in range(3)]
        for t in threads: t.start()
        try:
            for turn in range(TURNS):
                if not (child := os.fork()):
                    ok = float(st.sum(st.ones(1 << 18) + 1)) == 2 << 18
                    os._exit(0 if ok else 1)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            end.set()
            for t in threads: t.join()
        """
    )  # fmt: skip


def test_fork_in_the_middle() -> None:
    """The fork happens while another thread is at each of the pool's lines."""
    output = scripted(
        f"        STEP = {1 if all_of_them else 2}"
        """
        import sys, threading, time
        from shardtensor.host import memory_pool as pool

        def other(line):  # works with the pool, and pauses there
            count = 0
            def in_line(frame, event, _):
                nonlocal count
                count += 1
                if count == line:
                    there.set()
                    time.sleep(0.01)
                return in_line

            def call():
                x = pool.empty((1 << 20,), np.uint8)
                y = pool.empty((1 << 20,), np.uint8)
                del x, y

            call()
            sys.settrace(lambda frame, *_: in_line if frame.f_code.co_filename == pool.__file__ else None)
            call()
            sys.settrace(None)
            if count < line:
                over.append(line)
            there.set()

        over, codes, line = [], set(), 0
        while not over:
            line += STEP
            there = threading.Event()
            thread = threading.Thread(target=other, args=(line,))
            thread.start()
            there.wait()
            if not (child := os.fork()):
                code = 1
                try:
                    st.free_cache()
                    x = pool.empty((1 << 20,), np.uint8)
                    del x
                    st.free_cache()
                    code = 0
                except StopIteration:
                    code = 2
                finally:
                    os._exit(code)
            codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            thread.join()
        print(line > 20, codes)
        """
    )
    assert output == "True {0}\n"


def test_the_end_of_the_interpreter() -> None:
    scripted(
        """
        import atexit, gc, sys, threading
        gc.unfreeze()
        x = st.ones(1 << 17) + 1
        np.kept = st.ones(1 << 17) + 2
        sys.kept = np.asarray(st.ones(1 << 17) + 3)
        threading.kept = [st.ones(1 << 17)[2:] + 4]
        threading.kept.append(threading.kept)
        atexit.register(lambda: x + np.kept)
        """
    )


# -- memory that is not there ----------------------------------------------------------------------


@pytest.fixture
def poor(kept: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Returns a function that makes the host report a number of free bytes, of a GiB; every large result reads it."""
    monkeypatch.setattr(memory_pool, "_CHECKED_FROM", 1 << 19)
    return lambda free: monkeypatch.setattr(memory_pool, "memory", lambda: (free, 1 << 30))


LACKS = r"needs 2 MiB of host memory, and 1\.5 MiB of 1 GiB are free; delete arrays, or work on smaller parts"
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "exp": lambda x, y: st.exp(y),
    "where": lambda x, y: st.where(x > 0, x, y),
    "astype": lambda x, y: x.astype("int64"),
    "concat": lambda x, y: st.concat([x[:LARGE], y[:LARGE]]),
    "stack": lambda x, y: st.stack([x[:LARGE], y[:LARGE]]),
    "sum": lambda x, y: st.sum(st.broadcast_to(x, (5, 2 * LARGE)), axis=0),
    "matmul": lambda x, y: st.broadcast_to(x, (2, 2 * LARGE)).T @ np.ones((2, 1)),
    "ones": lambda x, y: st.ones(2 * LARGE),
    "full_like": lambda x, y: st.full_like(x, 5),
    "arange": lambda x, y: st.arange(2.0 * LARGE),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_results_that_do_not_fit(name: str, poor: Callable[[int], None]) -> None:
    x, y, call = st.asarray(np.arange(2.0 * LARGE)), st.ones(2 * LARGE), CALLS[name]
    wanted = np.array(call(x, y))
    gc.collect()
    st.free_cache()
    before = used()
    poor(3 << 19)
    with pytest.raises(DeviceMemoryError, match=rf"^{name}: the result {LACKS}$"):
        call(x, y)
    assert used() == before
    poor(1 << 30)
    np.testing.assert_array_equal(np.asarray(call(x, y)), wanted)


def test_cached_memory_is_freed_for_large_results(poor: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(1)
    assert st.cache_info().cached == 1 << 20
    monkeypatch.setattr(memory_pool, "memory", lambda: ((3 << 19) + (1 << 20) * (not st.cache_info().cached), 1 << 30))
    x = memory_pool.empty((2 << 20,), np.uint8)
    assert st.cache_info().cached == 0
    del x
    assert st.cache_info().cached == 2 << 20
    memory_pool.empty((2 << 20,), np.uint8)  # needs no new memory
    with pytest.raises(DeviceMemoryError, match=r"needs 3 MiB of host memory, and 2\.5 MiB of 1 GiB are free"):
        memory_pool.empty((3 << 20,), np.uint8)


HUGE: dict[str, Callable[[Any, st.Mesh], Any]] = {
    "zeros": lambda x, m: st.zeros((1 << 40, 1 << 40), device=m),
    "full": lambda x, m: st.full((1 << 40, 0, 1 << 40), 7, device=m),
    "arange": lambda x, m: st.arange(1 << 62, device=m),
    "linspace": lambda x, m: st.linspace(0, 1, 1 << 62, device=m),
    "eye": lambda x, m: st.eye(1 << 40, device=m),
    "broadcast_to": lambda x, m: st.broadcast_to(x, (1 << 40, 1 << 40, 4)),
    "repeat": lambda x, m: st.repeat(x, 1 << 60),
    "tile": lambda x, m: st.tile(x, (1 << 40, 1 << 40)),
    "resize": lambda x, m: st.resize(x, (1 << 40, 1 << 40)),
    "pad": lambda x, m: st.pad(x, 1 << 61),
    "vander": lambda x, m: st.vander(x, 1 << 62),
    "bincount": lambda x, m: st.bincount(x, minlength=1 << 62),
    "uniform": lambda x, m: st.random.uniform(st.random.key(0), (1 << 40, 1 << 40), device=m),
}
"""Results of more bytes than addresses reach."""


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", HUGE)
def test_results_that_no_machine_has_memory_for(name: str, jit: bool, backend: str) -> None:
    """Libraries say only that an iterator is too large, or that there is no memory. Inference has no elements."""
    mesh = mesh_of((2,), backend)
    x = st.device_put(np.arange(4), mesh)
    run = functools.partial(HUGE[name], m=mesh)
    if jit and name == "bincount":
        pytest.skip("needs the elements of x")
    names = f"({name}|broadcast_to)" if jit else name  # Programs consist of the operators that the others call.
    with pytest.raises(DeviceMemoryError, match=rf"^{names}: the result needs \d+ EiB.*of shape \(\d+.*smaller parts"):
        (st.jit(run) if jit else run)(x)


def test_huge_results_are_inferred_and_refused_in_maps() -> None:
    shape = (1 << 40, 1 << 40)
    assert st.eval_shape(lambda: st.zeros(shape)).shape == shape
    assert st.zeros(shape, device=st.AbstractMesh((2,), ("x",))).shape == shape
    for make in (lambda x: st.zeros(shape), lambda x: st.broadcast_to(x, (*shape, 1))):
        with pytest.raises(DeviceMemoryError, match=r"(zeros|broadcast_to): the result needs .* EiB"):
            st.pmap(make, [np.zeros(1)] * 2)


@pytest.mark.parametrize("size", [1 << 63, 1 << 70])
def test_sizes_beyond_64_bits(size: int) -> None:
    for make in (st.zeros, lambda n: st.broadcast_to(1.0, n), lambda n: st.arange(float(n)), lambda n: st.pad([1], n)):
        with pytest.raises(st.ShapeError, match="for which no machine has memory"):
            make(size)


def test_results_larger_than_the_host() -> None:
    if limits.memory() is None:
        pytest.skip("the amount of memory is unknown")
    before = used()
    x = st.ones((1 << 20, 1))
    with pytest.raises(DeviceMemoryError, match=r"^add: the result needs 8 TiB of host memory, and .* are free"):
        x + st.ones((1, 1 << 20))
    with pytest.raises(DeviceMemoryError, match=r"^ones: the result needs 8 EiB"):
        st.ones((1 << 40, 1 << 20))
    with pytest.raises(DeviceMemoryError, match=r"^multiply: the result needs 8 TiB"):
        np.multiply(x, x.T)
    del x
    gc.collect()
    assert used() == before
    assert float(st.sum(st.ones(9) + 1)) == 18


def raising(monkeypatch: pytest.MonkeyPatch, name: str, text: str = "Unable to allocate 9 GiB") -> None:
    """Makes NumPy's function of that name raise a MemoryError."""

    def lacks(*args: Any, **options: Any) -> Any:
        raise MemoryError(*[text] * bool(text))

    monkeypatch.setattr(np, name, lacks)
    plan_cache._cached_plan.cache_clear()


LACKING: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "add": ("add", lambda x: x + x),
    "sin": ("sin", lambda x: st.sin(x)),
    "sum": ("sum", lambda x: st.sum(x)),
    "matmul": ("matmul", lambda x: x @ x),
}  # fmt: skip


@pytest.mark.parametrize("name", LACKING)
@pytest.mark.parametrize("size", [10, LARGE])
def test_memory_errors_of_libraries(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    function, call = LACKING[name]
    x = st.asarray(np.arange(float(size)))
    wanted = np.asarray(call(x))
    with monkeypatch.context() as patch:
        raising(patch, function)
        with pytest.raises(
            DeviceMemoryError, match=rf"^{name}: Unable to allocate 9 GiB; .* of host memory are free; delete"
        ) as caught:
            call(x)
        assert isinstance(caught.value, MemoryError)
        raising(patch, function, "")
        with pytest.raises(DeviceMemoryError, match=rf"^{name}: there is no memory left; "):
            call(x)
        patch.setattr(memory_pool, "memory", lambda: None)
        with pytest.raises(
            DeviceMemoryError, match=rf"^{name}: there is no memory left; delete arrays, or work on smaller parts$"
        ):
            call(x)
    plan_cache._cached_plan.cache_clear()
    np.testing.assert_array_equal(np.asarray(call(x)), wanted)
    np.testing.assert_array_equal(np.asarray(x), np.arange(float(size)))


ADD, SUM = np.add, np.sum
WRITES: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "out": ("add", lambda x, y: ADD(y, y, out=x)),
    "out of itself": ("add", lambda x, y: ADD(x, y, out=x)),
    "part": ("add", lambda x, y: ADD(y[1:], y[1:], out=x[1:])),
    "inplace": ("add", lambda x, y: x.__iadd__(y)),
    "overlap": ("add", lambda x, y: x[1:].__iadd__(x[:-1])),
    "function": ("sum", lambda x, y: SUM(st.stack([y, y]), axis=0, out=x)),
}


@pytest.mark.parametrize("exclusive", [True, False], ids=["exclusive", "shared"])
@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("name", WRITES)
def test_memory_errors_in_writes(name: str, size: int, exclusive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    function, write = WRITES[name]
    x, y = st.asarray(np.arange(float(size))) * 1, st.ones(size)
    other = None if exclusive else np.asarray(x)
    with monkeypatch.context() as patch:
        raising(patch, function)
        with pytest.raises(DeviceMemoryError, match=rf"^{function}: Unable to allocate"):
            write(x, y)
    plan_cache._cached_plan.cache_clear()
    np.testing.assert_array_equal(np.asarray(x), np.arange(float(size)))
    wanted = np.arange(float(size))
    write(wanted, np.ones(size))
    write(x, y)
    np.testing.assert_array_equal(np.asarray(x), wanted)
    if other is not None:
        np.testing.assert_array_equal(other, np.arange(float(size)))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("setitem", lambda x: x.__setitem__(slice(1, None), x[:-1])),
        ("setitem", lambda x: x.__setitem__(slice(None, 5), 7.0)),
        ("add", lambda x: x[1:].__iadd__(1)),
        ("add", lambda x: x.__iadd__(1)),
        ("add", lambda x: np.add(x[::-1], 1, out=x)),
    ],
)
def test_writes_without_memory_for_a_copy(name: str, write: Any, poor: Callable[[int], None]) -> None:
    """The target is shared, so that a write needs memory for a copy, which is not available."""
    x = st.asarray(np.arange(2.0 * LARGE)) * 1
    export = np.asarray(x)
    st.free_cache()
    poor(1 << 19)
    with pytest.raises(DeviceMemoryError, match="host memory"):
        write(x)
    np.testing.assert_array_equal(np.asarray(x), np.arange(2.0 * LARGE))
    poor(1 << 30)
    wanted = np.arange(2.0 * LARGE)
    write(x)
    write(wanted)
    np.testing.assert_array_equal(np.asarray(x), wanted)
    np.testing.assert_array_equal(export, np.arange(2.0 * LARGE))


# -- in place --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [50, LARGE, LARGE + 3])
def test_exclusive_memory_is_written_in_place(size: int, kept: None) -> None:
    x = st.asarray(np.arange(float(size))) * 1
    place, before = place_of(np.asarray(x)), st.cache_info()
    x += 1
    x *= st.ones(size)
    x[3:] -= 2
    np.add(x, 1, out=x)
    x[...] = x[::-1]
    assert place_of(np.asarray(x)) == place
    assert change(before)[0] == 0
    wanted = np.arange(float(size)) + 1
    wanted[3:] -= 2
    np.testing.assert_array_equal(np.asarray(x), (wanted + 1)[::-1])


# It is not known whether user code holds the buffer below an export, to which chains of `base` and `obj` lead.
@pytest.mark.parametrize(
    "name", [n for n in ALIASES if n not in ("tensor", "bytes of the lease", "array of the lease")]
)
@pytest.mark.parametrize("size", [80, LARGE])
def test_shared_memory_is_not_written(name: str, size: int, kept: None) -> None:
    if "torch" in name:
        pytest.importorskip("torch")
    if "lease" in name and size < LARGE:
        pytest.skip("it is not exported")
    x = numbered(7, size)
    alias = ALIASES[name](x)
    mine = isinstance(alias, st.ShardedTensor) and type(alias._storage).__name__ == "View"
    wanted = values(alias)
    x += 1
    np.testing.assert_array_equal(values(alias), wanted + mine)
    np.testing.assert_array_equal(np.asarray(x), np.full(size, 8.0))
    del alias
    place = place_of(np.asarray(x))
    x += 1
    assert place_of(np.asarray(x)) == place


# -- flat ------------------------------------------------------------------------------------------


def random_work(count: int, seed: int) -> None:
    """Operators on a few tensors that are drawn, each beside NumPy's."""
    random = np.random.default_rng(seed)
    sizes = [(16, 16), (64, 64), (96, 128)]
    xs: list[Any] = []
    ys: list[Any] = []
    for _ in range(6):
        y = array(sizes[random.integers(3)], "float64", int(random.integers(99)))
        xs.append(st.device_put(y, st.NamedSharding(mesh_of((4,), backend="numpy"), st.P("x"))))
        ys.append(y.copy())
    for turn in range(count):
        i, j, kind = random.integers(6), random.integers(6), random.integers(12)
        same = xs[i].shape == xs[j].shape
        if kind < 3 and same:
            xs[i], ys[i] = xs[i] / 2 + xs[j] / 2, ys[i] / 2 + ys[j] / 2
        elif kind == 3 and same:
            xs[i] -= xs[j] / 4
            ys[i] = ys[i] - ys[j] / 4
        elif kind == 4:
            xs[i], ys[i] = st.sin(xs[i]), np.sin(ys[i])
        elif kind == 5:
            row, low = int(random.integers(len(ys[i]))), int(random.integers(len(ys[i])))
            xs[i][low:] = xs[i][row]
            ys[i][low:] = ys[i][row].copy()
        elif kind == 6:
            shape = sizes[random.integers(3)]
            xs[i], ys[i] = st.full(shape, float(turn % 9)), np.full(shape, float(turn % 9))
        elif kind == 7:
            assert np.isclose(float(st.sum(xs[i])), ys[i].sum(), rtol=1e-9, atol=1e-6)
        elif kind == 8:
            xs[i], ys[i] = st.where(xs[i].T > 0, xs[i].T, -1.0).T, np.where(ys[i] > 0, ys[i], -1.0)
        elif kind == 9:
            with contextlib.suppress(st.ShapeError, ValueError):
                xs[i] @ xs[j]
        elif kind == 10:
            xs[i], ys[i] = st.concat([xs[i][1:], xs[i][:1]]), np.roll(ys[i], -1, axis=0)
        elif kind == 11:
            xs[i], ys[i] = xs[i].copy(), ys[i].copy()
        if not turn % 50:
            for x, y in zip(xs, ys, strict=True):
                np.testing.assert_allclose(np.asarray(x), y, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_ten_thousand_operators_leak_nothing(small: int) -> None:
    random_work(100, 1)  # what is asked once only
    gc.collect()
    before = st.cache_info()
    random_work(drawn(10_000, fast=3000), 2)
    gc.collect()
    info = st.cache_info()
    assert info.used == before.used
    assert info.hits - before.hits > 5 * (info.misses - before.misses)
    assert info.cached == sum(c * len(waiting) for c, waiting in memory_pool._pool._idle.items()) < 4 << 20


def test_maps_leak_nothing(small: int) -> None:
    before = used()
    for _ in range(5):
        made = in_time(
            lambda: st.pmap(
                lambda x: st.psum(x * 2, "i") + 1, [np.full(4096, float(k)) for k in range(8)], axis_name="i"
            )
        )
        np.testing.assert_array_equal(np.asarray(made[3]), np.full(4096, 57.0))
        del made
    gc.collect()
    assert used() == before
