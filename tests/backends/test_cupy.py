"""The CuPy backend on the simulated CuPy: it is correct for any order of the GPUs' work, and needs each safeguard.

Each safeguard is removed from its source, and the same program must then fail.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import itertools
import logging
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend import Backend, Device, registry
from shardtensor.communication.array_communicator import ArrayCommunicator
from shardtensor.communication.between_memories import Outgoing
from shardtensor.errors import BackendError
from shardtensor.host import threads
from shardtensor.tensor.pytree import leaves
from shardtensor.tensor.tensor import shard_arrays
from tests import fakecupy
from tests.conftest import Logged
from tests.draws import drawn
from tests.fakecupy import Race, WrongDeviceError, world
from tests.layouts import assert_equal
from tests.pairs import spread
from tests.scripts import new_process, output_of, run_script

pytest.importorskip("array_api_compat", reason="array-api-compat is not installed")

import shardtensor_cupy
from shardtensor_cupy import CuPyBackend, copies, logical_device, nccl

ROOT = Path(__file__).parents[2]
ORDERS: list[dict[str, Any]] = [{"scheduler": "lazy"}, {"scheduler": "eager"}, *[{"seed": n} for n in range(3)]]
_numbers = itertools.count()


class Machine:
    """Simulated GPUs, and a new backend on them: two logical devices on each of two GPUs."""

    def __init__(self, backend: CuPyBackend) -> None:
        self.cupy: Any = backend._cupy
        self.backend = backend
        self.devices = list(backend.devices())

    def mesh(self, *positions: int) -> st.Mesh:
        """Those devices in a row, axis ``d``; without positions all of them."""
        return st.Mesh([self.devices[k] for k in positions] or self.devices, "d")

    def state(self) -> Any:
        """What is current in this thread."""
        cuda = self.cupy.cuda
        count = cuda.runtime.getDeviceCount()
        return cuda.runtime.getDevice(), [cuda.get_current_stream(k).ptr for k in range(count)]

    def used(self) -> list[int]:
        """Returns the bytes in use on each GPU."""
        used = []
        for k in range(self.cupy.cuda.runtime.getDeviceCount()):
            with self.cupy.cuda.Device(k):
                used.append(self.cupy.get_default_memory_pool().used_bytes())
        return used


@contextlib.contextmanager
def machine(count: int = 4, *, name: str | None = None, **config: Any) -> Iterator[Machine]:
    """A machine for the length of a test: nothing may race on it, or be left current."""
    fakecupy.install(**config)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHARDTENSOR_NUM_DEVICES", str(count))
            name = name or f"cupy{next(_numbers)}"  # plans and values know a backend by its name
            made = Machine(type("Double", (CuPyBackend,), {"name": name})())
            patch.delitem(registry._loaded, "cupy", raising=False)  # whose arrays these would be, too
            patch.setitem(registry._loaded, name, made.backend)
            before = made.state()
            yield made
            assert made.state() == before, "what was current before is so again"
            races = list(fakecupy.races)
            assert races == []
    finally:
        fakecupy.uninstall()


@pytest.fixture(params=ORDERS, ids=lambda p: "-".join(map(str, p.values())))
def gpus(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Two GPUs and four devices, in every order."""
    with machine(**request.param) as made:
        yield made


@pytest.fixture
def lazy() -> Iterator[Machine]:
    """The same, where work runs only when a caller waits for it."""
    with machine(scheduler="lazy") as made:
        yield made


def address(x: st.ShardedTensor, k: int = 0) -> int:
    """Where a shard is. No reference is kept."""
    return int(shard_arrays(x)[k].data.ptr)


def numbers(n: int = 24) -> np.ndarray:
    return np.arange(1.0, n + 1)


# -- programs that need the safeguards -------------------------------------------------------------


def moves(m: Machine) -> None:
    """Computes, copies, and computes with the copy: between GPUs, where the first copy runs the self-test of peer
    access, and between devices of one GPU.
    """
    for a, b in ((0, 1), (0, 2), (3, 0), (0, 2), (3, 0)):
        x = st.device_put(numbers(), m.devices[a]) * 2
        assert_equal(st.device_put(x, m.devices[b]) + 1, numbers() * 2 + 1)


def copies_and_writes(m: Machine) -> None:
    """Writes the source in place while its copy is in progress, which must not contain the write. A device of the same
    GPU shares the memory until it is written.
    """
    for b in (1, 2, 2):
        x = st.device_put(numbers(), m.devices[0]) * 2
        place = address(x)
        y = st.device_put(x, m.devices[b])
        shared = m.backend.memory_space(m.devices[0]) == m.backend.memory_space(m.devices[b])
        assert (address(y) == place) == shared
        x += 1
        x[3:] = 0
        assert (address(x) == place) != shared
        assert_equal(y, numbers() * 2)
        assert_equal(x, [3, 5, 7] + [0] * 21)


def drops(m: Machine) -> None:
    """Deletes the source while its copy is in progress, and allocates its memory again."""
    made = []
    for n in range(4):
        for b in (1, 2):
            x = st.device_put(numbers(), m.devices[0]) * n
            made.append((st.device_put(x, m.devices[b]), n))
            del x
            again = [st.zeros(24, device=m.devices[0]) for _ in range(2)]
            del again
    for y, n in made:
        assert_equal(y, numbers() * n)


def turns(m: Machine) -> None:
    """Moves a split from rows to columns: the parts that are sent are not contiguous."""
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        mesh = m.mesh(*order)
        host = numbers(64).reshape(8, 8)
        x = st.device_put(host, st.NamedSharding(mesh, st.P("d"))) + 1
        y = st.reshard(x, st.NamedSharding(mesh, st.P(None, "d")))
        del x
        z = st.zeros((8, 8), device=mesh) + 5
        assert_equal(y * 2, (host + 1) * 2)
        assert_equal(z, np.full((8, 8), 5.0))


def staged(m: Machine) -> None:
    """Copies between GPUs that are not peers, through host memory."""
    made = []
    for n in range(6):
        x = st.device_put(numbers(), m.devices[0]) * n
        made.append(st.device_put(x, m.devices[2]))
        x += 1
        del x
        st.zeros(24, device=m.devices[0])
    m.backend.synchronize(m.devices[0])  # the first half of each is done before the second half of any
    for n, y in enumerate(made):
        assert_equal(y + 1, numbers() * n + 1)


def damaged(m: Machine) -> None:
    """Copies between GPUs that report peer access but whose copies arrive damaged."""
    x = st.device_put(numbers(2000), m.devices[0]) * 3
    assert_equal(st.device_put(x, m.devices[2]), numbers(2000) * 3)
    assert_equal(st.device_put(st.device_put(x, m.devices[1]), m.devices[3]), numbers(2000) * 3)


def offloads(m: Machine) -> None:
    """Copies to pinned memory and back, while the source is deleted or written."""
    mesh = m.mesh()
    away, here = st.NamedSharding(mesh, st.P("d"), memory_kind="pinned_host"), st.NamedSharding(mesh, st.P("d"))
    made = []
    for n in range(4):
        x = st.device_put(numbers(), here) * n
        made.append(st.device_put(x, away))
        if n % 2:
            x += 1
        del x
        again = st.zeros(24, device=mesh) - 7
        back = st.device_put(made[-1], here) + 1
        assert_equal(back, numbers() * n + 1)
        assert_equal(again, np.full(24, -7.0))
    for n, y in enumerate(made):
        assert_equal(y, numbers() * n)


def comes_back(m: Machine) -> None:
    """Replicas share one host copy, which one device makes and all read."""
    mesh = m.mesh()
    x = st.device_put(numbers(), st.NamedSharding(mesh, st.P())) * 3
    away = st.device_put(x, st.NamedSharding(mesh, st.P(), memory_kind="pinned_host"))
    back = st.device_put(away, st.NamedSharding(mesh, st.P()))
    for k in (3, 2, 1, 0):
        assert_equal(m.backend.to_host(shard_arrays(back)[k], m.devices[k]), numbers() * 3)


def comes_and_goes(m: Machine) -> None:
    """Offloaded tensors are deleted immediately after their copy to the device is queued."""
    here = st.NamedSharding(m.mesh(0), st.P())
    made = []
    for n in range(4):
        away = st.device_put(numbers() * n, here.with_memory_kind("pinned_host"))
        made.append(st.device_put(away, here))
        del away
        made.append(
            st.device_put(
                st.device_put(st.zeros(24, device=m.devices[0]) + n, here.with_memory_kind("pinned_host")), here
            )
        )
    for n in range(4):
        assert_equal(made[2 * n], numbers() * n)
        assert_equal(made[2 * n + 1], np.full(24, float(n)))


def offloads_again(m: Machine) -> None:
    """Offloads tensors, some of which are deleted at once, or after their copies to devices of several GPUs are queued:
    later ones may get their memory.
    """
    everywhere = st.NamedSharding(m.mesh(), st.P())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "_REUSED_FROM", 0)
        held, made = [], []
        for n in range(8):
            x = st.device_put(numbers(), everywhere if n % 3 else m.devices[n % 4]) * n
            away = st.device_put(x, x.sharding.with_memory_kind("pinned_host"))
            if n % 2:
                made.append((n, st.device_put(away, x.sharding)))
            if n % 4 == 2:
                held.append((n, away))
            if n == 6:
                m.backend.synchronize(m.devices[0])
            del x, away
        for n, y in held + made:
            assert_equal(y, numbers() * n)


def written_at_once(m: Machine) -> None:
    """Writes a tensor directly after its transfer from or to host memory is queued. The transfer still needs the
    buffer, while other buffers are allocated.
    """
    here = st.NamedSharding(m.mesh(0), st.P())
    away = here.with_memory_kind("pinned_host")
    made, others, x = [], [], st.device_put(numbers(), m.devices[0]) * 1
    for n in range(4):
        y = st.device_put(st.device_put(numbers() * n, away), here)
        y[3:] = n
        z = st.device_put(x, m.devices[2])  # through the host where GPUs are no peers
        z[3:] = n
        st.device_put(x, away)
        x[4:] = n
        made.append((y, z))
        others.append(m.backend.pin(numbers() - 100))
    m.backend.synchronize(m.devices[0])
    for n, (y, z) in enumerate(made):
        assert_equal(y, [n, 2 * n, 3 * n] + [n] * 21)
        assert_equal(z, [1, 2, 3] + [n] * 21)
    for other in others:
        assert other.tolist() == (numbers() - 100).tolist()


def old_memory(m: Machine) -> None:
    """Copies from pinned memory into a block that the device has just used."""
    here = st.NamedSharding(m.mesh(0), st.P())
    away = st.device_put(numbers(), here.with_memory_kind("pinned_host"))
    for _ in range(3):
        x = st.device_put(numbers(), here) * 5
        y = x + 1
        del x
        back = st.device_put(away, here)
        assert_equal(back, numbers())
        assert_equal(y, numbers() * 5 + 1)
        del back, y


def their_stream(m: Machine) -> None:
    """The caller makes arrays on a stream of its own, and reads shards there."""
    cupy = m.cupy
    with cupy.cuda.Device(1):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            a = cupy.arange(24.0) * 3
            x = st.asarray(a) + 1
            a += 1  # the caller's own again
            shard = x.addressable_shards[0].data
            b = shard * 2
            assert_equal(x, np.arange(24.0) * 3 + 1)
            assert b.get().tolist() == ((np.arange(24) * 3 + 1) * 2).tolist()
            assert a.get().tolist() == (np.arange(24) * 3 + 1).tolist()


def null_stream(m: Machine) -> None:
    """Runs code that uses only the null stream beside the library's streams."""
    cupy = m.cupy
    for gpu in (0, 1):
        with cupy.cuda.Device(gpu):
            a = cupy.arange(24.0) * 3
            x = st.asarray(a) + 1
            b = x.addressable_shards[0].data * 2
            y = st.asarray(b) - 1
            assert (y.addressable_shards[0].data + a).get().tolist() == (np.arange(24) * 9 + 1).tolist()


@contextlib.contextmanager
def own_streams(m: Machine) -> Iterator[None]:
    """The caller's own streams are current on all GPUs, set by ``use()``."""
    cuda, streams = m.cupy.cuda, []
    for gpu in (1, 0):
        with cuda.Device(gpu):
            streams.append(cuda.Stream(non_blocking=True).use())
    try:
        yield
    finally:
        for gpu in (1, 0):
            with cuda.Device(gpu):
                cuda.Stream.null.use()


def maps(m: Machine) -> None:
    """Maps functions, one of which fails; the caller's current stream is the same afterwards."""
    parts = st.shard(numbers(), devices=m.devices)

    def fails(x: Any) -> Any:
        raise ZeroDivisionError

    with own_streams(m):
        before = m.state()
        assert st.unshard(st.pmap(lambda x: x + 1, parts)).tolist() == (numbers() + 1).tolist()
        assert m.state() == before
        with pytest.raises(ZeroDivisionError):
            st.pmap(fails, parts)
        assert m.state() == before
        with pytest.raises(ZeroDivisionError), m.backend.on(m.devices[3]):
            raise ZeroDivisionError
        assert m.state() == before


def with_blocks(m: Machine) -> None:
    """The mapped function and its caller each have a ``with`` block: after it the device's stream is current again."""
    cupy = m.cupy
    home = {m.devices[k]: m.backend._logical_devices[m.devices[k]].stream for k in range(4)}

    def work(x: Any) -> Any:
        ours = cupy.cuda.get_current_stream()
        y, z = x * 2, cupy.empty_like(x)
        theirs = cupy.cuda.Stream(non_blocking=True)
        theirs.wait_event(ours.record())
        with theirs:
            cupy.add(y, 1, out=z)
        ours.wait_event(theirs.record())
        assert cupy.cuda.get_current_stream() is ours is home[st.current_device()]
        return z * y

    parts = st.shard(numbers(), devices=m.devices)
    with cupy.cuda.Device(1), cupy.cuda.Stream(non_blocking=True):
        made = st.pmap(work, parts)
        assert_equal(st.unshard(made), (numbers() * 2 + 1) * numbers() * 2)


def leaves_stream(m: Machine) -> None:
    """The mapped function leaves another stream current; the library waits for the work that it has queued there."""
    cupy = m.cupy
    outs = [st.device_put(numbers(), d) for d in m.devices]
    streams = []

    def work(x: Any) -> Any:
        made = cupy.empty_like(x)
        ours = cupy.cuda.get_current_stream()
        streams.append(cupy.cuda.Stream(non_blocking=True).use())
        streams[-1].wait_event(ours.record())
        cupy.multiply(x, 3, out=made)
        return made

    for y in st.pmap(work, outs):
        assert_equal(y + 1, numbers() * 3 + 1)
    for d in m.devices:
        (a,) = shard_arrays(outs[d.id])
        with m.backend.on(d):
            b = work(a)
        with m.backend.on(d):
            b += 1
        assert m.backend.to_host(b, d).tolist() == (numbers() * 3 + 1).tolist()


def memory_of_a_stream(m: Machine) -> None:
    """The mapped function leaves another stream current, and its result is in memory of that stream."""
    cupy, streams = m.cupy, {}  # by devices, since helper threads make some of the calls where the machine is busy

    def work(x: Any) -> Any:
        ours = cupy.cuda.get_current_stream()
        streams[st.current_device()] = stream = cupy.cuda.Stream(non_blocking=True).use()
        stream.wait_event(ours.record())
        return x * 2

    made = st.pmap(work, [st.device_put(numbers(), d) for d in m.devices])
    more = [y + 1 for y in made]
    made.clear()
    for d, stream in streams.items():
        with cupy.cuda.Device(m.backend.dlpack_device(d)[1]), stream:
            cupy.zeros(24)
    for y in more:
        assert_equal(y, numbers() * 2 + 1)


def one_after_the_other(m: Machine) -> None:
    """Each program begins on the stream of its device, whatever the one before it has left current."""
    cupy = m.cupy
    home = {d: m.backend._logical_devices[d].stream for d in m.devices}

    def work(x: Any) -> Any:
        ours = cupy.cuda.get_current_stream()
        assert ours is home[st.current_device()]
        theirs = cupy.cuda.Stream(non_blocking=True).use()
        theirs.wait_event(ours.record())
        return x * 2

    assert_equal(st.unshard(st.pmap(work, st.shard(numbers(), devices=m.devices))), numbers() * 2)


def leaves_device(m: Machine) -> None:
    """The mapped function leaves another GPU current."""
    cupy = m.cupy

    def work(x: Any) -> Any:
        y = x * 2
        cupy.cuda.Device(int(not cupy.cuda.Device().id)).use()
        return y

    parts = st.shard(numbers(), devices=m.devices)
    with own_streams(m):
        before = m.state()
        for d, x in zip(m.devices, parts, strict=True):
            with m.backend.on(d):
                y = work(*shard_arrays(x))
            assert m.state() == before
            assert_equal(x, m.backend.to_host(y, d) / 2)


def nested(m: Machine) -> None:
    """A map within a map on the same device, whose function leaves another stream current."""
    cupy, streams = m.cupy, []

    def inner(x: Any) -> Any:
        streams.append(cupy.cuda.Stream(non_blocking=True).use())
        return 1

    def outer(x: Any) -> Any:
        ours = cupy.cuda.get_current_stream()
        with m.backend.on(st.current_device()):
            inner(x)
        assert cupy.cuda.get_current_stream() is ours
        return x * 2

    assert_equal(st.unshard(st.pmap(outer, st.shard(numbers(), devices=m.devices))), numbers() * 2)


def caller_beside(m: Machine) -> None:
    """The mapped function uses an array that the caller makes on its own stream, and its result is used there."""
    cupy = m.cupy
    with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
        a = cupy.arange(24.0) * 2
        (x,) = st.pmap(lambda x: x + a, [st.device_put(numbers(), m.devices[0])])
        a *= 0
        assert_equal(x, np.arange(24) * 2 + numbers())


def meets(m: Machine) -> None:
    """Programs exchange new arrays, and write to them directly after they have received the others'."""
    n = len(m.devices)
    turn = [(k, (k + 1) % n) for k in range(n)]

    def work(x: Any) -> Any:
        ours = m.cupy.cuda.get_current_stream()
        mine, seen = x * 2, []
        for _ in range(3):
            seen.append((st.ppermute(mine, "i", turn), st.psum(mine, "i"), st.all_gather(mine, "i")))
            assert m.cupy.cuda.get_current_stream() is ours is m.backend._logical_devices[st.current_device()].stream
            mine += 1
        return seen

    blocks = [numbers() + 100 * k for k in range(n)]
    before = m.state()
    made = st.pmap(work, [st.device_put(b, d) for b, d in zip(blocks, m.devices, strict=True)], axis_name="i")
    assert m.state() == before
    for k, seen in enumerate(made):
        for step, (turned, total, gathered) in enumerate(seen):
            now = [b * 2 + step for b in blocks]
            assert_equal(turned, now[k - 1])
            assert_equal(total, np.sum(now, axis=0))
            assert_equal(gathered, np.stack(now))


def sums(m: Machine) -> None:
    """Gathers partial results on one device, and allocates their memory again before the copies run."""
    rows = st.NamedSharding(m.mesh(), st.P("d"))
    for n in range(1, 4):
        host = numbers(60).reshape(15, 4) * n
        x = st.device_put(host, rows) - 7
        made = x.sum(axis=0), x.max(), st.argmax(x, axis=0), st.any(x > 200), st.sum(st.astype(x, "int64"))
        del x
        again = [st.zeros((15, 4), device=rows) - 9 for _ in range(3)]
        host = host - 7
        wanted = host.sum(axis=0), host.max(), host.argmax(axis=0), (host > 200).any(), int(host.sum())
        for found, value in zip(made, wanted, strict=True):
            assert_equal(found, value)
        for y in again:
            assert_equal(y, np.full((15, 4), -9.0))


def collects(m: Machine) -> None:
    """The sources of what is collected are dropped, and their memory is asked for again, before the copies are made."""
    b, here, there = m.backend, m.devices[0], m.devices[2]
    for _ in range(3):
        arrays = []
        for d in (here, there):
            with b.on(d):
                arrays.append(b.xp.add(b.from_host(numbers(), d), 1))
        with b.on(here):
            found = b.collect(arrays, [here, there], here)
        del arrays
        with b.on(there):
            again = b.xp.zeros((24,)) - 9
        with b.on(here):
            np.testing.assert_array_equal(b.to_host(found, here), np.concatenate([numbers() + 1] * 2))
        with b.on(there):
            np.testing.assert_array_equal(b.to_host(again, there), np.full(24, -9))


def exchanges(m: Machine) -> None:
    """Shards go to other GPUs, and the memory of their sources is asked for again before the copies are made."""
    rows, columns, whole = [st.NamedSharding(m.mesh(), spec) for spec in (st.P("d"), st.P(None, "d"), st.P())]
    for n in range(1, 4):
        host = numbers(64).reshape(8, 8) * n
        x = st.device_put(host, rows) - 7
        made = st.reshard(x, columns), st.reshard(x, whole), x[1:] - x[:-1]
        del x
        again = [st.zeros((8, 8), device=rows) - 9 for _ in range(3)]
        for found, value in zip(made, (host - 7, host - 7, np.diff(host, axis=0)), strict=True):
            assert_equal(found, value)
        for y in again:
            assert_equal(y, np.full((8, 8), -9.0))


def products(m: Machine) -> None:
    """Partial products go to another GPU, and their memory is asked for again before the copies are made."""
    rows, whole = [st.NamedSharding(m.mesh(), spec) for spec in (st.P("d"), st.P())]
    for n in range(1, 4):
        host = numbers(60).reshape(15, 4) * n
        x = st.device_put(host, rows)
        made = x.T @ x
        again = [st.zeros((4, 4), device=whole) - 9 for _ in range(3)]
        assert_equal(made, host.T @ host)
        for y in again:
            assert_equal(y, np.full((4, 4), -9.0))


def launches(m: Machine) -> None:
    """Work of the library leaves the current device and stream unchanged, also after an error."""
    x = st.device_put(numbers(), st.NamedSharding(m.mesh(), st.P("d")))
    before = m.state()
    assert_equal(x + x, numbers() * 2)
    assert m.state() == before
    with m.cupy.cuda.Device(1), m.cupy.cuda.Stream(non_blocking=True):
        inside = m.state()
        assert_equal(x * x, numbers() ** 2)
        assert m.state() == inside
        limit = m.cupy.get_default_memory_pool()
        limit.free_all_blocks()
        limit.set_limit(size=1)
        with pytest.raises(st.DeviceMemoryError):
            x + 1
        limit.set_limit(size=0)
        assert m.state() == inside
    assert m.state() == before


PROGRAMS: dict[str, tuple[Callable[[Machine], None], dict[str, Any]]] = {
    f.__name__: (f, config)
    for f, config in [
        (moves, {}), (copies_and_writes, {}), (drops, {}), (turns, {}), (staged, {"peers": [[0, 0], [0, 0]]}),
        (damaged, {"corrupt": {(0, 1)}}), (offloads, {}), (comes_back, {}), (comes_and_goes, {}), (old_memory, {}),
        (offloads_again, {}),
        (their_stream, {}), (null_stream, {}), (maps, {}), (with_blocks, {}), (leaves_stream, {}), (leaves_device, {}),
        (nested, {}), (meets, {}), (one_after_the_other, {}),
        (memory_of_a_stream, {}), (caller_beside, {}), (written_at_once, {"peers": [[0, 0], [0, 0]]}),
        (sums, {}), (collects, {}), (exchanges, {}), (products, {}), (launches, {}),
    ]
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids=lambda p: "-".join(map(str, p.values())))
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, order: dict[str, Any]) -> None:
    program, config = PROGRAMS[name]
    with machine(**config, **order) as m:
        program(m)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 140))
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_in_many_orders(name: str, seed: int) -> None:
    program, config = PROGRAMS[name]
    for gpu_count, count in ((2, 4), (4, 4)):
        with machine(
            count, devices=gpu_count, seed=seed, **({} if gpu_count == 4 and "peers" in config else config)
        ) as m:
            program(m)


# -- the safeguards --------------------------------------------------------------------------------

Launcher, LogicalDevice, Current, Copier, InFlight, Peers = (
    logical_device.Launcher,
    logical_device.LogicalDevice,
    logical_device.Current,
    copies.Copier,
    copies.InFlight,
    copies.Peers,
)


class Safeguard(NamedTuple):
    """A statement of the library without which a program fails.

    Attributes:
        function: the function in which the comment ``safeguard: NAME`` marks the statement.
        program: the program that fails, of `PROGRAMS`.
        instead: statements that take its place, or the condition of an ``if`` or ``while``.
        marker: the name in the comment, if it is another one.
    """

    function: Any
    program: str
    instead: str = "pass"
    marker: str = ""


SAFEGUARDS: dict[str, Safeguard] = {
    "a copy waits for its source": Safeguard(CuPyBackend.wait, "moves"),
    "a writer waits for readers": Safeguard(InFlight.settle, "copies_and_writes"),
    "a writer lets go of readers": Safeguard(CuPyBackend.begin_write, "copies_and_writes"),
    "sources are kept": Safeguard(Copier.d2d, "products"),
    "sources are kept until the copy has arrived": Safeguard(InFlight.prune, "drops", "self._queue"),
    "host buffers are kept when the array is exclusive": Safeguard(
        InFlight.settle, "written_at_once", "flight.array = flight.memory = flight.host = None"
    ),
    "temporaries are kept": Safeguard(Copier.place, "turns"),
    "collected arrays are awaited": Safeguard(Copier.collect, "sums"),
    "collected arrays are kept": Safeguard(Copier.collect, "collects"),
    "exchanged arrays are awaited": Safeguard(Outgoing.wait, "exchanges"),
    "exchanged arrays are kept": Safeguard(Copier._land, "exchanges"),
    "a launch is on its GPU": Safeguard(Launcher.__call__, "launches"),
    "a launch is on its stream": Safeguard(Launcher.__call__, "launches"),
    "a launch restores the GPU": Safeguard(Launcher.__call__, "launches"),
    "a launch restores the stream": Safeguard(Launcher.__call__, "launches"),
    "broadcast arrays are awaited": Safeguard(CuPyBackend.spread, "sums"),
    "sent arrays are contiguous": Safeguard(CuPyBackend.contiguous, "turns", "True"),
    "the GPU is current": Safeguard(Current.__enter__, "moves"),
    "the stream is current": Safeguard(Current.__enter__, "moves"),
    "the GPU is restored": Safeguard(Current.__exit__, "maps"),
    "everything is restored after errors": Safeguard(
        Current.__exit__, "maps", "logical, saved = self._logical, self._saved\nif error is not None: return"
    ),
    "the stream of the caller is restored": Safeguard(Current.__exit__, "maps"),
    "the stream is pushed": Safeguard(
        Current.__enter__, "with_blocks", "logical.stream.use()", marker="the stream is current"
    ),
    "a stream that is left is awaited": Safeguard(Current.__exit__, "leaves_stream"),
    "memory of a stream that is left is copied": Safeguard(CuPyBackend.adopt, "memory_of_a_stream", "False"),
    "a program begins on its GPU": Safeguard(CuPyBackend.is_on, "maps", "return True"),
    "a program begins on its stream": Safeguard(
        CuPyBackend.is_on, "one_after_the_other", "return True", marker="a program begins on its GPU"
    ),
    "a GPU that is left is left": Safeguard(Current.__exit__, "leaves_device"),
    "imported arrays are awaited": Safeguard(CuPyBackend.wait_for_caller, "their_stream"),
    "exported arrays are awaited": Safeguard(CuPyBackend.make_caller_wait, "their_stream"),
    "arrays outside of a function are awaited": Safeguard(
        CuPyBackend.wait_for_caller, "caller_beside", marker="imported arrays are awaited"
    ),
    "arrays that a function has read are written later": Safeguard(
        CuPyBackend.make_caller_wait, "caller_beside", marker="exported arrays are awaited"
    ),
    "streams are blocking": Safeguard(
        LogicalDevice.__init__,
        "null_stream",
        "self.stream = beside.stream if beside else cupy.cuda.Stream(non_blocking=True)",
    ),
    "peers are tested": Safeguard(Peers.reach, "damaged", "self._known[pair] = self.near(source, destination)"),
    "staging: the second half waits": Safeguard(Copier.d2d, "staged"),
    "staging: the buffer is kept": Safeguard(Copier.d2d, "staged"),
    "offload waits for what is computed": Safeguard(Copier.d2h, "offloads"),
    "offload keeps the array": Safeguard(Copier.d2h, "offloads"),
    "onload waits for earlier uses of the memory": Safeguard(Copier.h2d, "old_memory"),
    "onload waits for the offload": Safeguard(Copier.h2d, "comes_back"),
    "onload keeps the buffer": Safeguard(Copier.h2d, "comes_and_goes"),
    "only memory that nothing else holds is reused": Safeguard(
        InFlight.take, "offloads_again", "references([flights[0].host.base]) <= 2"
    ),
    "memory is reused on the stream of its copies only": Safeguard(
        InFlight.take, "offloads_again", "flights[0].host.nbytes != nbytes"
    ),
    "the device waits for the onload": Safeguard(
        CuPyBackend.wait, "comes_and_goes", marker="a copy waits for its source"
    ),
    "shared arrays are read before they are written": Safeguard(ArrayCommunicator.settle, "meets"),
}


def take_out(patch: pytest.MonkeyPatch, function: Any, marker: str, instead: str) -> None:
    """Replaces the statement of a function that a comment marks, at its end or in the line before it."""
    source = textwrap.dedent(inspect.getsource(function))
    comment = re.compile(rf"# safeguard: {re.escape(marker)}$")
    (line,) = [n for n, text in enumerate(source.splitlines(), 1) if comment.search(text)]
    tree = ast.parse(source)
    found = min((x for x in ast.walk(tree) if isinstance(x, ast.stmt) and x.lineno >= line), key=lambda x: x.lineno)
    if isinstance(found, (ast.If, ast.While)):
        found.test = ast.parse(instead, mode="eval").body
    else:
        for parent in ast.walk(tree):
            for _, body in ast.iter_fields(parent):
                if isinstance(body, list) and found in body:
                    body[body.index(found) : body.index(found) + 1] = ast.parse(instead).body
    scope: dict[str, Any] = {}
    exec(compile(tree, function.__code__.co_filename, "exec"), function.__globals__, scope)
    owner = getattr(sys.modules[function.__module__], function.__qualname__.split(".")[0])
    patch.setattr(owner, function.__name__, scope[function.__name__])


FAILURES = (AssertionError, RuntimeError, Race, WrongDeviceError, IndexError)


@pytest.mark.parametrize("name", SAFEGUARDS)
def test_safeguard_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, program, instead, marker = SAFEGUARDS[name]
    take_out(monkeypatch, function, marker or name, instead)
    run, config = PROGRAMS[program]

    def fails(order: dict[str, Any]) -> bool:
        try:
            with machine(**config, **order) as m:
                run(m)
        except FAILURES:
            return True
        return False

    assert any(map(fails, ORDERS)), f"nothing fails without it: {name}"


def test_dropped_copies_to_the_host_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that offloads repeatedly, without waiting, page-locks memory once; what is held keeps its own."""
    monkeypatch.setattr(copies, "_REUSED_FROM", 0)
    allocated: list[Any] = []
    with machine(2, devices=1, scheduler="lazy") as m:
        copier = m.backend._copier
        allocate = copier._pinned
        monkeypatch.setattr(copier, "_pinned", lambda *kind: allocated.append(kind) or allocate(*kind))
        x = st.device_put(numbers(), m.devices[0])
        away = x.sharding.with_memory_kind("pinned_host")
        for n in range(5):
            st.device_put(x * n, away)
        assert len(allocated) == 1
        y = st.device_put((x * 7).reshape(4, 6).astype("int64"), away)  # of another shape and dtype
        assert len(allocated) == 1
        for n in range(5):
            st.device_put(x * n, away)
        assert len(allocated) == 2
        views = [np.asarray(st.device_put(x * n, away)) for n in range(3)]
        for n in range(3):
            st.device_put(x * -n, away)
        for n, view in enumerate(views):
            np.testing.assert_array_equal(view, numbers() * n)
        assert_equal(y, (numbers() * 7).reshape(4, 6).astype("int64"))
        st.device_put(x[:5] * 2, away)
        assert allocated[-1][0] == (5,)


def test_events_are_recorded_again() -> None:
    with machine(8, devices=4, scheduler="eager") as m:
        x = st.device_put(numbers(64).reshape(16, 4), st.NamedSharding(m.mesh(), st.P("d"))) + 1

        def work() -> None:
            assert_equal(x.sum(axis=0), np.asarray(x).sum(axis=0))
            assert_equal(st.argmax(x), 63)
            assert_equal(st.reshard(x, st.NamedSharding(m.mesh(), st.P(None, "d"))) * 2, np.asarray(x) * 2)

        for _ in range(3):
            work()
        known = set(world.world.events)
        for _ in range(5):
            work()
        assert set(world.world.events) == known


ONE_BUFFER: dict[str, Callable[[Any], Any]] = {
    "nonzero": st.nonzero,
    "unique_all": st.unique_all,
    "unique_counts of rows": lambda x: st.unique_counts(x[:, 0]),
    "sort": lambda x: st.sort(x, axis=0),
    "argsort": lambda x: st.argsort(x, axis=0),
    "topk": lambda x: st.topk(x[:, 1], 3),
    "quantile": lambda x: st.quantile(x, 0.3, axis=0),
    "take_along_axis": lambda x: st.take_along_axis(x, st.argsort(x, axis=0), axis=0),
    "rows": lambda x: x[[5, 1, -2, 5]],
    "elements": lambda x: x[[5, 1], [1, 2]],
    "mask": lambda x: x[x > 3],
    "columns": lambda x: x[:, [2, 0]],
    "rows by a tensor": lambda x: x[st.argsort(x[:, 0])],
}


@pytest.mark.parametrize("name", ONE_BUFFER)
def test_in_one_buffer_it_is_as_on_devices_that_exchange_messages(name: str) -> None:
    """A log requires the messages between devices. Without one, the call is that of one device, and the result is the
    same.
    """
    host = np.random.default_rng(3).integers(0, 9, (13, 3)).astype(float)
    with machine(8, devices=1) as m:
        x = st.device_put(host, st.NamedSharding(m.mesh(), st.P("d")))
        with st.transfers():
            wanted = leaves(ONE_BUFFER[name](x))
        found = leaves(ONE_BUFFER[name](x))
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert (one.sharding, one.dtype, one.committed) == (other.sharding, other.dtype, other.committed)
            assert_equal(one, np.asarray(other))
            one += 1  # its memory is its own
        assert_equal(x, host)


def test_collectives_in_with_blocks_raise() -> None:
    """CuPy keeps a stack of streams for each thread, and several programs run in one thread."""
    with machine() as m:
        before = m.state()

        def work(x: Any) -> Any:
            with m.cupy.cuda.Stream(non_blocking=True):
                return st.psum(x, "i")

        parts = [st.device_put(numbers(), d) for d in m.devices]
        with pytest.raises(BackendError, match=r"made another stream current.*leave its `with` block"):
            st.pmap(work, parts, axis_name="i")
        assert m.state() == before
        made = st.pmap(lambda x: st.psum(x, "i"), parts, axis_name="i")
        assert_equal(made[0], numbers() * len(m.devices))


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs of the blocks in which a device has been current."""
    gpus: list[int] = []
    enter = Current.__enter__

    def count(block: Any) -> None:
        gpus.append(block._logical.gpu.id)
        enter(block)

    monkeypatch.setattr(Current, "__enter__", count)
    monkeypatch.setattr(CuPyBackend, "helper_delay", 60.0)
    return gpus


def test_programs_on_one_gpu_share_a_block(entered: list[int]) -> None:
    with machine(8, devices=2) as m:
        parts = st.shard(numbers(), devices=m.devices)
        before = m.state()
        entered.clear()
        made = st.pmap(lambda x: x + 1, parts)
        assert entered == [0, 1]
        assert m.state() == before
        assert_equal(st.unshard(made), numbers() + 1)
    with machine(8, devices=1) as m:
        parts = st.shard(numbers(), devices=m.devices)

        def ends(x: Any) -> Any:
            return st.psum(x * 2, "i") / x

        entered.clear()
        made = st.pmap(ends, parts, axis_name="i")
        assert len(entered) == 2  # that of the programs, also after they were suspended, and that of the sum
        assert_equal(st.unshard(made), np.tile((numbers() * 2).reshape(8, 3).sum(axis=0), 8) / numbers())


def test_an_error_in_a_shared_block_names_the_device_of_its_program() -> None:
    with machine(4, devices=1) as m:
        before = m.state()

        def work(x: Any) -> Any:
            return m.cupy.empty(1 << 40) if st.current_device() == m.devices[2] else x + 1

        with pytest.raises(st.DeviceMemoryError, match=f"no memory is left on {m.devices[2]}") as caught:
            st.pmap(work, st.shard(numbers(), devices=m.devices))
        assert caught.value.__notes__ == [f"pmap: raised for shard 2 on {m.devices[2]}"]
        assert m.state() == before


def test_handlers_of_signals_run_outside_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that arrives in the library's code is handled between programs, on the stream of the caller."""
    with machine(4, devices=1) as m:
        monkeypatch.setattr(CuPyBackend, "helper_delay", 60.0)
        before, states, adopt = m.state(), [], CuPyBackend.adopt

        def interrupted(backend: Any, held: list[Any], shards: Any) -> Any:
            if not states:
                states.append(m.state())
                signal.raise_signal(signal.SIGUSR1)
            return adopt(backend, held, shards)

        monkeypatch.setattr(CuPyBackend, "adopt", interrupted)
        handler = signal.signal(signal.SIGUSR1, lambda *_: states.append((m.state(), st.current_device())))
        try:
            made = st.pmap(lambda x: x + st.psum(1, "i"), st.shard(numbers(), devices=m.devices), axis_name="i")
        finally:
            signal.signal(signal.SIGUSR1, handler)
        assert states[0] != before
        assert states[1:] == [(before, None)]
        assert_equal(st.unshard(made), numbers() + 4)


# -- devices ---------------------------------------------------------------------------------------

RING = [[int({i, j} in ({0, 2}, {2, 1}, {1, 3})) for j in range(4)] for i in range(4)]
ONE_WAY = [[0, 1, 1, 0], [0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 0]]  # 0 reads 1, and 1 does not read 0
PAIRS = [[int(i // 2 == j // 2) for j in range(4)] for i in range(4)]
CROSSED = [[int(i % 2 == j % 2) for j in range(4)] for i in range(4)]


@pytest.mark.parametrize(
    ("peers", "count", "row"),
    [
        (None, 4, [0, 1, 2, 3]),
        ([[0] * 4] * 4, 4, [0, 1, 2, 3]),
        (RING, 4, [0, 2, 1, 3]),
        (ONE_WAY, 4, [0, 2, 1, 3]),
        (PAIRS, 4, [0, 1, 2, 3]),
        (CROSSED, 4, [0, 2, 1, 3]),
        (CROSSED, 8, [0, 1, 4, 5, 2, 3, 6, 7]),
        (RING, 3, [0, 2, 1]),
    ],
)
def test_neighbours_in_a_mesh_are_peers(
    peers: Any, count: int, row: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine(count, devices=4, peers=peers) as m:
        monkeypatch.setattr(registry, "default_backend", lambda: m.backend)
        assert [d.id for d in st.make_mesh((count,), ("x",)).flat] == row
        assert [d.id for d in st.make_mesh((2,), ("x",)).flat] == row[:2]
        x = st.arange(10, device=st.make_mesh((count,), ("x",)))
        assert_equal(x[1:] + x[:-1], np.arange(10)[1:] + np.arange(10)[:-1])


def test_devices_are_assigned_to_gpus_in_blocks() -> None:
    for count, gpu_count, homes in ((5, 2, [0, 0, 0, 1, 1]), (2, 4, [0, 1]), (8, 1, [0] * 8), (3, 3, [0, 1, 2])):
        with machine(count, devices=gpu_count) as m:
            assert [m.backend.dlpack_device(d) for d in m.devices] == [(2, gpu) for gpu in homes]
            assert {d.kind for d in m.devices} == {"Fake GPU"}
            assert_equal(st.arange(7, device=m.mesh()) * 2, np.arange(7) * 2)
            assert m.backend.memory_info(m.devices[0])[1] == 1 << 30
            if count < gpu_count:
                with m.cupy.cuda.Device(3):
                    stranger = m.cupy.arange(3)
                with pytest.raises(BackendError, match="is on GPU 3, which no device of the backend uses"):
                    st.asarray(stranger)


def test_as_many_devices_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fakecupy.install(devices=3)
    try:
        monkeypatch.delenv("SHARDTENSOR_NUM_DEVICES")
        assert [d.id for d in CuPyBackend().devices()] == [0, 1, 2]
    finally:
        fakecupy.uninstall()


def test_devices_on_one_gpu_share_memory(gpus: Machine) -> None:
    x = st.device_put(numbers(), gpus.devices[0])
    y = st.device_put(x, gpus.devices[1])
    both = st.device_put(x, st.NamedSharding(gpus.mesh(0, 1), st.P()))
    assert {address(y), *[address(both, k) for k in range(2)]} == {address(x)}
    y[:] = 0
    assert_equal(x, numbers())
    both[0] = 7
    assert_equal(x, numbers())
    assert address(x) != address(both) == address(both, 1)


def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is launched on the GPUs from now on."""
    simulated, names = importlib.import_module("tests.fakecupy.world").world, []
    launch = simulated.launch

    def listed(name: str, *args: Any, **kwargs: Any) -> Any:
        names.append(name)
        return launch(name, *args, **kwargs)

    monkeypatch.setattr(simulated, "launch", listed)
    return names


def test_operators_on_one_gpu_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(8) as m:
        rows, columns = [st.NamedSharding(m.mesh(0, 1, 2, 3), spec) for spec in (st.P("d"), st.P(None, "d"))]
        host = numbers(70).reshape(10, 7)
        x, y = st.device_put(host, rows), st.device_put(host, columns)
        names = launched(monkeypatch)
        z = x + y
        assert names == ["add"]
        with st.transfers() as log:
            turned = st.reshard(z, columns)
        assert (names, address(turned)) == (["add"], address(z))
        assert z.sharding != turned.sharding
        assert (log.bytes > 0, log.copied) == (True, 0), "what separate memories would send, of which nothing is copied"
        part = z[2:9:3].T
        assert names == ["add"]
        assert_equal(part, (2 * host)[2:9:3].T)
        assert_equal(turned, 2 * host)
        names.clear()
        z += y
        z[3] = 0
        assert len(names) == 2
        host[3] = 0
        assert_equal(z, 3 * host)


def test_operators_on_two_gpus_are_one_launch_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(8, devices=2) as m:
        gpu_of = m.backend.memory_space
        grid = np.array(sorted(m.devices, key=gpu_of), object).reshape(2, 4)
        mesh, host = st.Mesh(grid, ("g", "d")), numbers(70).reshape(10, 7)
        x, y = [st.device_put(host, st.NamedSharding(mesh, spec)) for spec in (st.P(("g", "d")), st.P("g"))]
        names = launched(monkeypatch)
        z, w = x + x, y * 3
        assert names == ["add"] * 2 + ["multiply"] * 2
        with st.transfers() as log:
            turned = st.reshard(z, st.NamedSharding(mesh, st.P("g", "d")))
        assert len(names) == 4, "nothing is copied within a GPU"
        assert (log.bytes > 0, log.copied) == (True, 0)
        assert [address(turned, 4 * n) for n in range(2)] == [address(z, 4 * n) for n in range(2)]
        assert len({address(w, k) for k in range(8)}) == 2, "replicas on one GPU are one"
        place = address(z)
        del turned
        z += x
        z[3] = 0
        assert len(names) == 7, "the row is on one of them"
        assert address(z) == place
        host[3] = 0
        assert_equal(z, 3 * host)


def test_partial_results_on_two_gpus_are_combined_on_each_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product and a variance launch the same kernels on each of the GPUs, then those that combine two results."""
    host = np.random.default_rng(4).random((40, 5))
    for call, most in ((lambda x: x.T @ x, 3), (lambda x: x.var(axis=0), 11)):
        found = []
        for gpu_count in (1, 2):
            with machine(8, devices=gpu_count) as m:
                x = st.device_put(host, m.mesh())
                call(x)
                with monkeypatch.context() as patch:
                    names = launched(patch)
                    call(x)
                found.append(len([name for name in names if "copy" not in name]))
        assert found[0] <= most
        assert found[1] <= 2 * found[0] + 2


@pytest.mark.parametrize(("rows", "count"), [(37, 4), (36, 4), (40, 8), (43, 8), (5, 8)])
def test_bits_depend_on_the_mesh_only(rows: int, count: int) -> None:
    """The same mesh of logical devices, on one GPU, on two and on four."""
    host, found = np.random.default_rng(3).random((rows, 5)).astype(np.float32), set()
    for gpu_count in (1, 2, 4):
        with machine(count, devices=gpu_count) as m:
            x = st.device_put(host, m.mesh())
            results = [x.sum(axis=0), x.var(axis=0), st.cumulative_sum(x, axis=0), x.prod(), st.argmax(x, axis=0)]
            results += [x.std(), x.var(keepdims=True), (x + 1j).var(axis=0), x.T @ x]
            np.testing.assert_allclose(np.asarray(results[-1]), host.T @ host, rtol=1e-5)
            np.testing.assert_allclose(np.asarray(results[5]), host.std(), rtol=1e-5)
            found.add(b"".join([np.asarray(y).tobytes() for y in results]))
    assert len(found) == 1


def test_results_of_another_gpu_raise(gpus: Machine) -> None:
    def astray(x: Any) -> Any:
        with gpus.cupy.cuda.Device(1):
            return gpus.cupy.ones(3)

    with pytest.raises(BackendError, match=r"a mapped function on GPU 0 returned an array of GPU 1; move it") as caught:
        st.pmap(astray, [st.zeros(3, device=gpus.devices[0])])
    assert str(gpus.devices[0]) in str(caught.value.__notes__)


# -- peers -----------------------------------------------------------------------------------------


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Returns the pairs of GPUs between which copies were direct."""
    module, seen = importlib.import_module("tests.fakecupy.memory"), []
    copy = module.device_copy

    def spy(to: Any, src: Any, size: int, s: Any) -> Any:
        seen.append((src.device_id, to.device_id))
        return copy(to, src, size, s)

    monkeypatch.setattr(module, "device_copy", spy)
    return seen


def test_damaged_peers_are_logged_once(logged: Logged) -> None:
    with machine(corrupt={(0, 1)}) as m, logged.at_level(logging.WARNING, "shardtensor"):
        for _ in range(3):
            x = st.device_put(numbers(2000), m.devices[0])
            assert_equal(st.device_put(st.device_put(x, m.devices[2]), m.devices[0]), numbers(2000))
    assert logged.messages == [
        "GPU 1 has peer access to GPU 0, but a test copy arrived damaged; copies go through host memory"
    ]


def test_peers_are_tested_once_for_each_direction(straight: list[tuple[int, int]]) -> None:
    with machine() as m:
        x = st.device_put(numbers(), m.devices[0])
        for _ in range(3):
            st.device_put(x, m.devices[3])
        assert straight == [(0, 1)] * 4  # the test, and the three
        st.device_put(st.device_put(x, m.devices[3]), m.devices[0])
        assert straight[4:] == [(0, 1), (1, 0), (1, 0)]


def self_tests_at_once(patch: pytest.MonkeyPatch, helper_delay: float, locked: bool = True) -> int:
    """Returns how often a pair of GPUs is tested if two threads request the test: the first test continues until a
    second one begins, or for a number of seconds.
    """
    begun, second = list[int](), threading.Event()

    def arrives(peers: Any, source: int, destination: int) -> bool:
        begun.append(threading.get_ident())
        if len(begun) > 1:
            second.set()
        second.wait(helper_delay)
        return True

    patch.setattr(Peers, "_arrives", arrives)
    with machine() as m:
        if not locked:
            m.backend._copier.peers._lock = contextlib.nullcontext()
        answers = list[bool]()
        threads = [
            threading.Thread(target=lambda: answers.append(m.backend._copier.peers.reach(0, 1))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [True, True]
    return len(begun)


def test_peers_are_tested_once_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert self_tests_at_once(monkeypatch, 0.2) == 1
    assert self_tests_at_once(monkeypatch, 60, locked=False) == 2


def test_a_finalizer_may_copy_during_the_test_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = list[bool]()

    def arrives(peers: Any, source: int, destination: int) -> bool:
        if not answers:
            answers.append(True)
            answers.append(peers.reach(source, destination))
        return True

    monkeypatch.setattr(Peers, "_arrives", arrives)
    with machine() as m:
        thread = threading.Thread(target=lambda: answers.append(m.backend._copier.peers.reach(0, 1)), daemon=True)
        thread.start()
        thread.join(20)
    assert answers == [True] * 3


def test_peers_off(monkeypatch: pytest.MonkeyPatch, straight: list[tuple[int, int]]) -> None:
    monkeypatch.setenv("SHARDTENSOR_CUPY_P2P", "off")
    with machine(scheduler="lazy") as m:
        staged(m)
        turns(m)
    assert all(a == b for a, b in straight)


@pytest.mark.parametrize("value", ["on", "", "OFF"])
def test_invalid_settings_of_peers(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDTENSOR_CUPY_P2P", value)
    fakecupy.install()
    try:
        with pytest.raises(BackendError, match=f"SHARDTENSOR_CUPY_P2P is {value!r}; it must be auto or off"):
            CuPyBackend()
    finally:
        fakecupy.uninstall()


# -- maps ------------------------------------------------------------------------------------------


def test_pmap_launches_all_before_it_waits(lazy: Machine) -> None:
    simulated = importlib.import_module("tests.fakecupy.world").world
    parts = st.shard(numbers(), devices=lazy.devices)
    for d in lazy.devices:
        lazy.backend.synchronize(d)
    made = st.pmap(lambda x: (x * 2 + 1).sum(), parts)
    total = st.pmap(lambda x: x - 1, made)
    queues = [simulated.by_ptr[lazy.backend._logical_devices[d].stream.ptr].queue for d in lazy.devices]
    assert all(len(queue) >= 3 for queue in queues)
    assert [y.item() for y in total] == [(np.asarray(p) * 2 + 1).sum() - 1 for p in parts]


def test_blocking_functions_run_in_threads(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    callers, devices = set(), list[Any]()

    def work(x: Any) -> Any:
        y = x + 1
        callers.add(threading.get_ident())
        time.sleep(0.02)
        devices.append(gpus.cupy.cuda.runtime.getDevice())
        return y * float(y.get().sum())

    parts = st.shard(numbers(), devices=gpus.devices)
    made = st.pmap(work, parts)
    assert len(callers) > 1
    assert sorted(devices) == [0, 0, 1, 1]
    for x, y in zip(parts, made, strict=True):
        assert_equal(y, (np.asarray(x) + 1) * (np.asarray(x) + 1).sum())


def test_threads_at_once(gpus: Machine) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(15):
                host = rng.random(16)
                x = st.device_put(host, gpus.mesh())
                y = st.device_put(x, gpus.mesh(*rng.permutation(4).tolist()))
                x += 1
                assert_equal(x[3:] + y[:-3], (host + 1)[3:] + host[:-3])
        except BaseException as error:  # carried out of the thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# -- memory ----------------------------------------------------------------------------------------


def test_writes_are_in_place(gpus: Machine) -> None:
    cupy = gpus.cupy
    mesh = gpus.mesh()
    for make in (lambda: st.arange(24.0, device=mesh), lambda: st.device_put(np.arange(24.0), mesh) + 0):
        x, host = make(), np.arange(24.0)
        places = [address(x, k) for k in range(4)]
        with st.transfers() as log:
            x += 1
            x[3:20:2] = 5
            x[x > 7] *= 2
            x[-1] = 0
        host += 1
        host[3:20:2] = 5
        host[host > 7] *= 2
        host[-1] = 0
        assert [address(x, k) for k in range(4)] == places
        assert_equal(x, host)
    shard = x.addressable_shards[2].data  # It holds the buffer of its GPU.
    x += 1
    assert [address(x, k) == places[k] for k in range(4)] == [True, True, False, False]
    with cupy.cuda.Device(1):
        assert shard.get().tolist() == host[12:18].tolist()
    assert_equal(x, host + 1)


def test_shared_memory_is_copied_before_a_write(gpus: Machine) -> None:
    cupy = gpus.cupy
    for hold in (
        lambda x: x.addressable_shards[0].data[2:4],
        lambda x: cupy.from_dlpack(x),
        lambda x: x.copy(),
        lambda x: st.pmap(lambda a: a, [x]),
        lambda x: st.device_put(x, x.sharding),
    ):
        with cupy.cuda.Device(0):
            x = st.device_put(np.arange(8.0), gpus.devices[0]) + 0
            place = address(x)
            held = hold(x)
            x += 1
            assert address(x) != place, hold
            del held
            place = address(x)
            x += 1
            assert address(x) == place
            assert_equal(x, np.arange(8.0) + 2)


def test_the_writes_of_a_consumer_that_has_released_the_memory_come_first(lazy: Machine) -> None:
    """The writes are queued on the consumer's stream, which is the caller's."""
    cupy = lazy.cupy
    with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
        x = st.device_put(numbers(), lazy.devices[0]) + 0
        theirs = cupy.from_dlpack(x)
        theirs *= 2
        del theirs
        y = x + 1
        x -= 1
    assert_equal(y, numbers() * 2 + 1)
    assert_equal(x, numbers() * 2 - 1)


def test_donated_memory_is_passed_to_the_function(gpus: Machine) -> None:
    x = st.device_put(numbers(), gpus.devices[3]) * 1
    place = address(x)

    def work(a: Any) -> Any:
        a += 1
        return a

    (y,) = st.pmap(work, [x], donate=True)
    assert address(y) == place
    assert_equal(y, numbers() + 1)


def test_pinned_memory_of_the_callers_may_be_written_at_once(gpus: Machine) -> None:
    cupyx = importlib.import_module("cupyx")
    for shape in ((24,), (4, 6)):
        host = cupyx.empty_pinned(shape, "float64")
        made = []
        for n in range(4):
            host[...] = n
            made.append((st.device_put(host, gpus.mesh()), st.device_put(host[::2], gpus.devices[1])))
            host[...] = -1
        del host
        for n, (x, y) in enumerate(made):
            assert_equal(x, np.full(shape, float(n)))
            assert_equal(y, np.full(shape, float(n))[::2])


def random_steps(m: Machine, steps: int, seed: int) -> list[list[int]]:
    """Runs random operators, transfers and writes; returns the bytes in use after some of the steps."""
    rng, mesh = np.random.default_rng(seed), m.mesh()
    shardings = [
        st.NamedSharding(mesh, st.P("d")),
        st.NamedSharding(mesh, st.P(None, "d")),
        st.NamedSharding(mesh, st.P()),
        st.NamedSharding(mesh, st.P("d"), memory_kind="pinned_host"),
    ]
    host = rng.random((12, 8))
    x = st.device_put(host, shardings[0])
    seen = []
    for step in range(steps):
        kind = int(rng.integers(8))
        if kind == 0:
            x, host = x * 0.5 + 1, host * 0.5 + 1
        elif kind == 1:
            x = st.device_put(x, shardings[int(rng.integers(4))])
        elif kind == 2:
            i, j = (int(n) for n in rng.integers(1, 12, 2))
            x[:i] = j
            host[:i] = j
        elif kind == 3:
            x += 1
            host += 1
        elif kind == 4:
            x[x > 2] = 0.25
            host[host > 2] = 0.25
        elif kind == 5:
            x[1:] = x[:-1] + x[1:]
            host[1:] = host[:-1] + host[1:]
        elif kind == 6:
            x, host = x - x.mean(axis=0), host - host.mean(axis=0)
        else:
            y = st.pmap(lambda a: a * 1.5, st.shard(x, devices=m.devices))
            x, host = st.device_put(st.unshard(y), shardings[0]), host * 1.5
            del y
        if step % 100 == 99:
            np.testing.assert_allclose(np.asarray(x), host, rtol=1e-9, atol=1e-9)
            host = np.array(np.asarray(x))
            rest = st.device_put(x, shardings[3])
            del x
            for d in m.devices:
                m.backend.synchronize(d)
                with m.backend.on(d):
                    pass
            seen.append(m.used())
            x = st.device_put(rest, shardings[0])
            del rest
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", [{"scheduler": "random"}, pytest.param({"scheduler": "lazy"}, marks=pytest.mark.full)]
)
def test_memory_does_not_grow(order: dict[str, Any]) -> None:
    with machine(**order) as m:
        seen = random_steps(m, drawn(2000, fast=600), 1)
        assert seen == [[0, 0]] * len(seen)
        for d in m.devices:
            m.backend.synchronize(d)
        m.backend._copier.flights.prune()
        assert len(m.backend._copier.flights) == 0
        assert not m.backend._copier.flights._by_memory
        pool = m.cupy.get_default_memory_pool()
        assert pool.total_bytes() < (8 << 20) + (1 << 18)  # the test of the peers has left two arrays of 4 MiB


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 12))
def test_random_steps_in_many_orders(seed: int) -> None:
    with machine(seed=seed) as m:
        random_steps(m, 500, seed)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read", [lambda x: x.block_until_ready(), np.asarray, float, repr], ids=["wait", "np", "float", "repr"]
)
def test_errors_of_the_gpu_name_the_device(lazy: Machine, read: Callable[[Any], Any]) -> None:
    for d in (lazy.devices[3], lazy.devices[0]):
        x = st.ones((), device=d)
        with lazy.backend.on(d):
            fakecupy.fail()
        y = x + 1
        with pytest.raises(BackendError, match=rf"{d} \(Fake GPU\) failed, in this call or an earlier one: .*launch"):
            read(y)


@pytest.mark.parametrize("read", [lambda x: x.block_until_ready(), np.asarray], ids=["wait", "np"])
def test_errors_of_copies_to_host_memory_name_the_device(lazy: Machine, read: Callable[[Any], Any]) -> None:
    d = lazy.devices[2]
    x = st.ones(4, device=d)
    with lazy.backend.on(d):
        fakecupy.fail()
    y = st.device_put(x + 1, st.SingleDeviceSharding(d, memory_kind="pinned_host"))
    with pytest.raises(BackendError, match=rf"{d} \(Fake GPU\) failed, in this call or an earlier one"):
        read(y)


def test_errors_in_mapped_functions_name_the_device(gpus: Machine) -> None:
    def work(x: Any) -> Any:
        raise gpus.cupy.cuda.runtime.CUDARuntimeError(700)

    with pytest.raises(BackendError, match=rf"{gpus.devices[0]} \(Fake GPU\) failed.*IllegalAddress"):
        st.pmap(work, st.shard(numbers(), devices=gpus.devices))


FEW = [ORDERS[0], *[pytest.param(order, marks=pytest.mark.full) for order in ORDERS[1:]]]  # a full memory asks for gc


@pytest.mark.parametrize("order", FEW)
def test_out_of_memory(order: dict[str, Any]) -> None:
    with machine(memory=1 << 20, **order) as m:
        there = st.NamedSharding(m.mesh(0), st.P())
        x = st.device_put(np.arange(50000.0), there)
        y = x + 1
        for attempt in (
            lambda: x * 2,
            lambda: st.zeros(50000, device=m.devices[1]),
            lambda: st.device_put(np.zeros(50000), m.devices[1]),
            lambda: st.pmap(lambda a: a - 1, [x]),
            lambda y=y: st.concat([x, y]),
        ):
            with pytest.raises(st.DeviceMemoryError) as caught:
                attempt()
            assert isinstance(caught.value, MemoryError)
            message = str(caught.value)
            assert f"{m.devices[0]} (" in message or f"{m.devices[1]} (" in message
            assert "Out of memory allocating " in message
            assert "0.2 of 1.0 MiB" in message.replace("MiB of", "of")
            assert "delete tensors" in message
            del caught
        del attempt
        before = np.asarray(x)
        view = x.addressable_shards[0].data
        with pytest.raises(st.DeviceMemoryError):
            x += 1  # needs a copy
        assert_equal(x, before)
        del view
        x += 1
        assert_equal(x, before + 1)
        assert_equal(y, before + 1)
        del y
        assert_equal(x * 2, (before + 1) * 2)


def at_most_twice(make: Callable[[], Any]) -> Any:
    with contextlib.suppress(st.DeviceMemoryError):
        return make()
    return make()


@pytest.mark.parametrize("order", FEW)
def test_offloading_frees_memory(order: dict[str, Any]) -> None:
    """The memory is freed immediately, or, if the copy is still in progress, at the next allocation."""
    with machine(memory=10 << 20, **order) as m:
        x = st.device_put(np.arange(700000.0), m.devices[0])
        y = st.device_put(x, m.devices[2])
        del x
        z = at_most_twice(lambda: st.zeros(700000, device=m.devices[0]))
        away = st.device_put(z, st.SingleDeviceSharding(m.devices[0], memory_kind="pinned_host"))
        del z
        assert_equal(at_most_twice(lambda: st.ones(700000, device=m.devices[0])), np.ones(700000))
        assert_equal(y, np.arange(700000.0))
        assert_equal(away, np.zeros(700000))


# -- NCCL ------------------------------------------------------------------------------------------


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns, for each reduction requested of NCCL, whether NCCL computed it."""
    seen, ask = list[bool](), nccl.all_reduce
    nccl._communicators.cache_clear()

    def spy(*args: Any) -> Any:
        made = ask(*args)
        seen.append(made is not None)
        return made

    monkeypatch.setattr(shardtensor_cupy, "all_reduce", spy)
    return seen


SUMS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda xp, x: xp.sum(x, axis=0),
    "prod": lambda xp, x: xp.prod(x, axis=0),
    "max": lambda xp, x: xp.max(x, axis=0),
    "min": lambda xp, x: xp.min(x),
    "matmul": lambda xp, x: xp.matmul(x.T, x),
}


INTEGERS = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "int16", "bool"]


@pytest.mark.parametrize(("dtype", "name"), spread(itertools.product([*INTEGERS, "float32", "float64"], SUMS), 3))
def test_reductions_by_nccl(name: str, dtype: str, reductions: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype == "bool" and name == "matmul":
        pytest.skip("NumPy's matmul of bools is no sum")
    host = (np.arange(24).reshape(8, 3) % 5 - (2 if np.dtype(dtype).kind in "if" else 0)).astype(dtype)
    wanted = SUMS[name](np, host)
    for n, (gpu_count, library) in enumerate(((4, True), (2, True), (4, False))):
        if not library:
            monkeypatch.setattr(nccl, "library", lambda: None)
        with machine(devices=gpu_count, **ORDERS[n]) as m:
            x = st.device_put(host, st.NamedSharding(m.mesh(), st.P("d")))
            y = SUMS[name](st, x)
            assert y.dtype == wanted.dtype
            assert_equal(y, wanted)
            for shard in range(4):
                d = m.devices[shard]
                if y.sharding.mesh.size == 4:
                    assert_equal(m.backend.to_host(shard_arrays(y)[shard], d), wanted)
    kind = np.dtype(wanted.dtype)
    wants = kind.kind in "iu" and kind.char in "bBiIlL"
    assert reductions == ([True, True, False] if wants else [False] * len(reductions))
    assert bool(reductions) == (kind.kind in "iu")


def test_nccl_along_one_axis_of_two(reductions: list[bool]) -> None:
    with machine(devices=4) as m:
        mesh = st.Mesh(np.array(m.devices, object).reshape(2, 2), ("x", "y"))
        host = np.arange(48).reshape(8, 6)
        x = st.device_put(host, st.NamedSharding(mesh, st.P("x", "y")))
        assert_equal(st.sum(x, axis=0), host.sum(axis=0))
        assert reductions == [True, True]
        assert_equal(st.sum(x[1:5], axis=1), host[1:5].sum(axis=1))
        assert_equal(st.sum(st.device_put(host[:1], x.sharding)), host[:1].sum())  # some have nothing to say


STRIDED: dict[str, Callable[[Any, Any], Any]] = {
    "reversed": lambda xp, v: v[::-1],
    "every other": lambda xp, v: v[1::2],
    "transposed": lambda xp, v: v.T,
    "a column": lambda xp, v: v[:, 1],
    "broadcast": lambda xp, v: xp.broadcast_to(v[0], v.shape),
}


@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("name", ["psum", "pprod", "pmax", "pmin"])
def test_nccl_receives_contiguous_arrays(name: str, layout: str, reductions: list[bool]) -> None:
    """NCCL takes an address and a count: a strided view must be copied, in any order of its elements in memory."""
    blocks = [np.arange(24).reshape(6, 4) * (3 * k + 1) - 7 for k in range(3)]
    wanted = REDUCERS[name].reduce([STRIDED[layout](np, block) for block in blocks])
    for order in spread(ORDERS, 3, len(layout)):
        reductions.clear()
        with machine(3, devices=3, **order) as m:

            def work(v: Any, m: Machine = m) -> Any:
                return getattr(st, name)(STRIDED[layout](m.cupy, v), "i")

            parts = [st.device_put(block, d) for block, d in zip(blocks, m.devices, strict=True)]
            for made in st.pmap(work, parts, axis_name="i"):
                assert_equal(made, wanted)
        assert reductions == [True]


REDUCERS = {"psum": np.add, "pprod": np.multiply, "pmax": np.maximum, "pmin": np.minimum}


@pytest.mark.parametrize("name", ["sum", "prod", "max", "min"])
def test_reductions_of_transposed_integers(name: str, reductions: list[bool]) -> None:
    host = np.arange(210).reshape(5, 6, 7) % 11 - 5
    with machine(4, devices=4) as m:
        specs = (st.P("d"), st.P(None, "d"), st.P(None, None, "d"))
        calls = itertools.product(specs, itertools.permutations(range(3)), (None, 0, 1, 2))
        for spec, axes, axis in spread(calls, 5, ord(name[1])):
            turned = st.permute_dims(st.device_put(host, st.NamedSharding(m.mesh(), spec)), axes)
            assert_equal(getattr(st, name)(turned, axis=axis), getattr(np, name)(host.transpose(axes), axis=axis))
    assert any(reductions)


def test_reductions_in_threads(reductions: list[bool]) -> None:
    """Two threads must not use a communicator at the same time."""
    with machine(devices=4) as m:
        errors: list[BaseException] = []

        def work(n: int) -> None:
            try:
                for k in range(20):
                    x = st.device_put(np.arange(16) * n + k, m.mesh())
                    assert int(st.sum(x)) == 120 * n + 16 * k
            except BaseException as error:  # carried out of the thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert reductions == [True] * 60


# -- finding it ------------------------------------------------------------------------------------


def python(code: str, *path: Path, **env: str) -> str:
    """Returns the output of a program in a new process, with these directories first on the path."""
    found = os.pathsep.join(filter(None, [*map(str, path), str(ROOT), os.environ.get("PYTHONPATH")]))
    return output_of(new_process("-W", "error", "-c", textwrap.dedent(code), **{"PYTHONPATH": found} | env))


STUB = """
class CUDARuntimeError(RuntimeError):
    status = {status}
def getDeviceCount():
    {body}
import types
cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(
    CUDARuntimeError=CUDARuntimeError, getDeviceCount=getDeviceCount))
__version__ = "14.9"
"""
FAILS = "raise CUDARuntimeError('cudaErrorWhatever: so it is')"
UNUSABLE = {
    "broken": ("raise ImportError('libnvrtc.so.12: cannot open')", r"installed but cannot be imported: .*libnvrtc.*uninstall every cupy package"),
    "old driver": (STUB.format(status=35, body=FAILS), r"CuPy 14\.9 is installed, but there is no NVIDIA driver, or it is older.*so it is"),
    "no GPU": (STUB.format(status=100, body=FAILS), r"the driver sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"),
    "else": (STUB.format(status=999, body=FAILS), r"the CUDA runtime does not start; look at nvidia-smi \(cudaErrorWhatever"),
    "none": (STUB.format(status=0, body="return 0"), r"CuPy 14\.9 is installed, but there is no GPU; look at nvidia-smi"),
}  # fmt: skip


def test_the_reason_why_it_cannot_be_used(tmp_path: Path) -> None:
    for why, (code, _) in UNUSABLE.items():
        (tmp_path / why / "cupy").mkdir(parents=True)
        (tmp_path / why / "cupy" / "__init__.py").write_text(code)
    program = """
        import ctypes, os, re, sys, shardtensor as st
        load = ctypes.CDLL
        ctypes.CDLL = lambda name, *args, **kwargs: None if name == "libcuda.so.1" else load(name, *args, **kwargs)
        sys.path.insert(0, sys.argv[1])
        assert st.devices()[0].backend == "numpy"
        try:
            st.devices("cupy")
        except st.BackendError as error:
            assert re.search(sys.argv[2], str(error), re.S), error
        else:
            raise SystemExit("usable")
    """
    for why, (_, pattern) in UNUSABLE.items():
        output_of(run_script(textwrap.dedent(program), str(tmp_path / why), pattern))


def test_without_a_driver_it_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("raise SystemExit('cupy was imported')")
    program = """
        import ctypes, shardtensor as st
        load = ctypes.CDLL
        def without(name, *args, **kwargs):
            if "cuda" in str(name) or "hip" in str(name):
                raise OSError(f"{name}: cannot open shared object file")
            return load(name, *args, **kwargs)
        ctypes.CDLL = without
        assert st.devices()[0].backend == "numpy"
        try:
            st.devices("cupy")
        except st.BackendError as error:
            assert "CuPy is installed, but there is no NVIDIA driver" in str(error), error
        else:
            raise SystemExit("usable")
    """
    python(program, tmp_path)


def test_the_error_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "cupy" else find(name, *a))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with pytest.raises(BackendError, match=r"CuPy is not installed; `pip install cupy-cuda12x` or `cupy-cuda13x`"):
        CuPyBackend()


def test_cupy_is_not_imported_unless_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("raise SystemExit('cupy was imported')")
    program = """
        import sys, shardtensor as st
        assert "cupy" not in sys.modules
        x = st.arange(5) + 1
        assert x.tolist() == [1, 2, 3, 4, 5] and x.sharding.mesh.flat[0].backend == "numpy"
        assert st.unshard(st.pmap(lambda a: a * 2, st.shard(x))).tolist() == [2, 4, 6, 8, 10]
        assert not {"cupy", "array_api_compat", "shardtensor_cupy"} & set(sys.modules)
    """
    python(program, tmp_path, SHARDTENSOR_BACKEND="numpy")
    python("import sys, shardtensor; assert 'cupy' not in sys.modules", tmp_path)


@pytest.mark.parametrize(("gpu_count", "name"), [(0, "numpy"), (2, "cupy")])
def test_it_is_the_default_where_there_is_a_gpu(gpu_count: int, name: str) -> None:
    program = f"""
        from tests import fakecupy
        fakecupy.install(devices={gpu_count})
        import shardtensor as st
        assert st.devices()[0].backend == {name!r}, st.devices()
        assert (st.arange(7) * 2).tolist() == [0, 2, 4, 6, 8, 10, 12]
        assert {gpu_count} == 0 or [d.id for d in st.devices()] == [0, 1]
    """
    python(program)


def test_the_real_cupy_without_a_gpu() -> None:
    """CuPy's own wheel on a machine without a GPU: it says what is missing, and everything else works."""
    program = """
        import importlib.util, sys
        if importlib.util.find_spec("cupy") is None:
            raise SystemExit(print("skip: CuPy is not installed here"))
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import cupy
        if cupy.is_available():
            raise SystemExit(print("skip: there is a GPU here"))
        import shardtensor as st
        assert st.devices()[0].backend == "numpy"
        try:
            st.devices("cupy")
        except st.BackendError as error:
            print(error)
        else:
            raise SystemExit("usable")
        assert (st.arange(5) + 1).tolist() == [1, 2, 3, 4, 5]
        assert st.unshard(st.pmap(lambda a: a + 1, st.shard(st.arange(3)))).tolist() == [1, 2, 3]
    """
    output = python(program).strip()
    if output.startswith("skip: "):
        pytest.skip(output.removeprefix("skip: "))
    assert "is installed, but there is no NVIDIA driver" in output or "the driver sees no GPU" in output


# -- beside other backends -------------------------------------------------------------------------


def torch_devices() -> list[Device]:
    try:
        return st.devices("torch")
    except BackendError:
        return []


JOINS = ["stack", "concat", "unshard", "add", "matmul"]


@pytest.mark.parametrize("op", JOINS)
def test_operands_of_several_backends(gpus: Machine, op: str) -> None:
    """The result is on the device of the operand that is the most expensive to move; transfers are counted."""
    homes = [gpus.devices[:2], st.devices("numpy")[:2], st.devices("checked")[:2], torch_devices()[:2]]
    for home, other in spread(itertools.permutations(filter(None, homes), 2), 2, JOINS.index(op)):
        large, small = numbers(48).reshape(12, 4), numbers(16).reshape(4, 4)
        if op == "add":
            small = small[0]
        if op == "stack":
            small = large.copy()
        x, y = st.device_put(large, st.Mesh(home, "d")), st.device_put(small, st.Mesh(other, "d"))
        with st.transfers() as log:
            z = getattr(st, op)(x, y) if op in ("add", "matmul") else getattr(st, op)([x, y])
        assert z.devices() == set(home)
        wanted = {"add": np.add, "matmul": np.matmul}.get(op)
        joined = np.stack if op == "stack" else np.concatenate
        assert_equal(z, wanted(large, small) if wanted else joined([large, small]))
        crossed = [r for r in log if r.source.backend != r.destination.backend]
        assert {r.destination.backend for r in crossed} == {home[0].backend}
        assert sum(r.copied for r in crossed) >= (small.nbytes if home[0].backend != "numpy" else 0)


class Toy(Backend):
    """Another library on the same GPUs, which uses the null stream; its arrays are not copied through the host."""

    name = "toy"

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.gpus = [Device("toy", k) for k in range(2)]

    def devices(self) -> list[Device]:
        return self.gpus

    @property
    def xp(self) -> Any:
        return importlib.import_module("array_api_compat.cupy")

    def is_array(self, x: object) -> bool:
        return isinstance(x, self.cupy.ndarray)

    def on(self, device: Device) -> Any:
        return self.cupy.cuda.Device(device.id)

    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        return self.cupy.array(array.get())

    def from_host(self, array: Any, device: Device) -> Any:
        return self.cupy.array(array)

    def to_host(self, array: Any, device: Device) -> Any:
        return array.get()

    def synchronize(self, device: Device) -> None:
        with self.on(device):
            self.cupy.cuda.Device().synchronize()

    def dlpack_device(self, device: Device) -> tuple[int, int]:
        return (2, device.id)


def test_backends_that_share_a_gpu_do_without_the_host(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(gpus.cupy)
    second = type("Second", (CuPyBackend,), {"name": f"second{next(_numbers)}"})()
    monkeypatch.setitem(registry._loaded, "toy", toy)
    monkeypatch.setitem(registry._loaded, second.name, second)

    def refuse(*args: Any) -> Any:
        raise AssertionError("through the host")

    for a, b in ((gpus.backend, toy), (toy, gpus.backend), (gpus.backend, second), (second, gpus.backend)):
        for source in a.devices():
            there = next(d for d in b.devices() if b.dlpack_device(d) == a.dlpack_device(source))
            with pytest.MonkeyPatch.context() as patch:
                x = st.device_put(numbers(), source) * 2
                for backend in (gpus.backend, toy, second):
                    patch.setattr(backend, "from_host", refuse, raising=False)
                    patch.setattr(backend, "to_host", refuse, raising=False)
                with st.transfers() as log:
                    y = st.device_put(x, there)
                    x += 1
                    z = y + 1
                    assert st.concat([y, x]).devices() == {there}
            assert next((r.source, r.destination, r.bytes, r.copied) for r in log) == (source, there, 192, 192)
            assert_equal(z, numbers() * 2 + 1)
            assert_equal(x, numbers() * 2 + 1)
            del x
            assert_equal(y, numbers() * 2)
    far = st.device_put(st.arange(3, device=gpus.devices[0]), toy.gpus[1])  # on another GPU there is no other way
    assert far.tolist() == [0, 1, 2]


def test_arguments_that_the_host_reads_are_ordered_after_the_caller(lazy: Machine) -> None:
    cupy = lazy.cupy
    with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
        counts = cupy.arange(4) * 2
        assert_equal(st.repeat(st.arange(4, device=lazy.devices[0]), counts), np.repeat(np.arange(4), [0, 2, 4, 6]))
