"""The module ``cupy.cuda.nccl``.

Communicators of the devices of one process have collectives, each as one operation on each stream. Communicators of
several processes send and receive: what a group sends is one operation, and what it receives another one, which its
stream begins when all messages have come. What a stream does before a message is sent runs without the host.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import numpy as np

from . import cuda, memory
from . import world as w
from .errors import NcclError, WrongDeviceError
from .nccl_links import ID, Links, unique_id

DTYPES = {
    0: np.int8,
    1: np.uint8,
    2: np.int32,
    3: np.uint32,
    4: np.int64,
    5: np.uint64,
    6: np.float16,
    7: np.float32,
    8: np.float64,
}
CONSTANTS = {f"NCCL_{np.dtype(dtype).name.upper()}": number for number, dtype in DTYPES.items()}
CONSTANTS |= {"NCCL_CHAR": 0, "NCCL_INT": 2, "NCCL_HALF": 6, "NCCL_FLOAT": 7, "NCCL_DOUBLE": 8}
CONSTANTS |= {"NCCL_SUM": 0, "NCCL_PROD": 1, "NCCL_MAX": 2, "NCCL_MIN": 3, "NCCL_AVG": 4}
_OPERATIONS = {0: np.add, 1: np.multiply, 2: np.maximum, 3: np.minimum, 4: np.add}

_local = threading.local()


def groupStart() -> None:
    """Starts a group: the calls until the matching end are queued together."""
    _local.depth = getattr(_local, "depth", 0) + 1
    _local.calls = getattr(_local, "calls", [])


def groupEnd() -> None:
    """Ends a group and queues its calls, which every rank must have made.

    Raises:
        NcclError: no group was started, or the ranks have made different calls.
    """
    if not getattr(_local, "depth", 0):
        raise NcclError(5, "no group was started")
    _local.depth -= 1
    if not _local.depth:
        calls, _local.calls = _local.calls, []
        _queue(calls)


def _queue(calls: list[Any]) -> None:
    """Matches the calls of the ranks of each clique in order, and queues each collective as one operation."""
    cliques: dict[int, dict[int, list[Any]]] = {}
    messages: dict[Any, list[Any]] = {}
    for call in calls:
        if isinstance(call[0].links, Links):
            messages.setdefault(call[0], []).append(call)
    for communicator, together in messages.items():
        _exchange(communicator, together)
    for call in calls:
        if call[0] in messages:
            continue
        cliques.setdefault(id(call[0].clique), {}).setdefault(call[0].rank, []).append(call)
    for ranks in cliques.values():
        some = next(iter(ranks.values()))[0][0]
        if sorted(ranks) != list(range(len(some.clique))) or len({len(c) for c in ranks.values()}) > 1:
            raise NcclError(5, "not every rank has made the call; on GPUs this is a deadlock")
        for together in zip(*(ranks[r] for r in sorted(ranks)), strict=True):
            if len({call[1] for call in together}) > 1:
                raise NcclError(5, f"the ranks make different calls: {together[0][1]} and others")
            _collective(together[0][1], [call[2:] for call in together])


def _collective(kind: Any, ranks: list[Any]) -> None:
    """Queues a collective on the first rank's stream, before and after which all ranks' streams wait for each other.

    Like the real library it receives addresses and a count, and accesses that many elements from the addresses on.
    """
    name, count, datatype, op, root = kind
    dtype = np.dtype(DTYPES[datatype])
    n = len(ranks)
    world = w.world
    sizes = {"allGather": (count, count * n), "reduceScatter": (count * n, count)}.get(name, (count, count))
    sources = [memory.MemoryPointer(memory.UnownedMemory(r[0], 1, None), 0) for r in ranks]
    targets = [memory.MemoryPointer(memory.UnownedMemory(r[1], 1, None), 0) for r in ranks]
    ins = [p.raw(sizes[0] * dtype.itemsize).view(dtype) for p in sources]
    outs = [p.raw(sizes[1] * dtype.itemsize).view(dtype) for p in targets]
    streams = [r[2] for r in ranks]
    for k, s in enumerate(streams):
        if not sources[k].device_id == targets[k].device_id == s.device:
            raise WrongDeviceError(f"{name}: rank {k} on device {s.device} received memory of another device")
    for s in streams[1:]:
        world.wait(streams[0], world.record(s))

    def run() -> None:
        if name in ("broadcast", "bcast"):
            values = [ins[root].copy()] * n
        elif name == "allGather":
            values = [np.concatenate(ins)] * n
        else:
            total = _OPERATIONS[op].reduce(np.stack(ins), axis=0, dtype=dtype)
            total = (total / n).astype(dtype) if op == 4 else total
            values = np.split(total, n) if name == "reduceScatter" else [total] * n
        for i, (to, value) in enumerate(zip(outs, values, strict=True)):
            if name != "reduce" or i == root:
                to[...] = value

    written = [targets[root]] if name == "reduce" else targets
    world.launch(name, run, sources, written, streams[0])
    for s in streams[1:]:
        world.wait(s, world.record(streams[0]))


def _exchange(communicator: NcclCommunicator, calls: list[Any]) -> None:
    """Queues the messages of a group, and begins to run what is queued before them."""
    world, links, stream = w.world, communicator.links, calls[0][4]
    if any(call[4] is not stream for call in calls):
        raise NcclError(5, "the messages of a group are on several streams, which the double does not model")
    sent, received = [], []
    for _, (name, count, datatype, _, peer), send, recv, _ in calls:
        pointer = memory.MemoryPointer(memory.UnownedMemory(send or recv, 1, None), 0)
        if pointer.device_id != stream.device:
            raise WrongDeviceError(f"{name}: device {stream.device} received memory of another device")
        nbytes = count * np.dtype(DTYPES[datatype]).itemsize
        (sent if name == "send" else received).append((peer, pointer, pointer.raw(nbytes)))
    out = [(peer, raw) for peer, _, raw in sent]
    into = [(peer, raw) for peer, _, raw in received]

    def send_all() -> None:
        for peer, raw in out:
            links.send(peer, raw.tobytes())

    world.launch("ncclSend", send_all, [pointer for _, pointer, _ in sent], [], stream)
    world.run_alone(stream)
    if not into:
        return
    arrival, messages = world.expect(stream), list[Any]()

    def receive_all() -> None:
        messages.extend(links.receive(peer, len(raw)) for peer, raw in into)
        world.arrived(arrival)

    def write_all() -> None:
        for (_, raw), message in zip(into, messages, strict=True):
            if message is not None:
                raw[...] = np.frombuffer(message, np.uint8)

    communicator.receive(receive_all)
    world.launch("ncclRecv", write_all, [], [pointer for _, pointer, _ in received], stream)


class NcclCommunicator:
    """A device of a clique, or of several processes."""

    def __init__(self, ndev: int, commId: tuple[int, ...], rank: int) -> None:
        assert len(commId) == ID
        self.rank, self.device, self.clique = rank, w.world.current(), [self] * ndev
        self.links = Links(ndev, commId, rank)
        self._receiving: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()

    def receive(self, function: Any) -> None:
        """Calls a function that waits for messages, after those before."""
        self._receiving.put(function)

    def _receive(self) -> None:
        while True:
            self._receiving.get()()

    @staticmethod
    def initAll(devices: int | list[int]) -> list[NcclCommunicator]:
        """Returns a communicator for each device."""
        if not isinstance(devices, (int, list)):
            raise ValueError('"devices" should be an int or a list of int.')
        devices = list(range(devices)) if isinstance(devices, int) else devices
        if len(set(devices)) < len(devices):
            raise NcclError(5, "Duplicate GPU detected")
        if any(not 0 <= d < cuda.get_device_count() for d in devices):
            raise NcclError(4)
        clique: list[NcclCommunicator] = []
        for rank, device in enumerate(devices):
            made = object.__new__(NcclCommunicator)
            made.clique, made.rank, made.device = clique, rank, device
            clique.append(made)
        return list(clique)

    links: Any = None
    clique: list[NcclCommunicator]
    rank: int
    device: int

    def device_id(self) -> int:
        return self.device

    def rank_id(self) -> int:
        return self.rank

    def size(self) -> int:
        return len(self.clique)

    def destroy(self) -> None:
        self.clique = []
        if self.links is not None:
            self.links.close(abort=False)

    def abort(self) -> None:
        self.clique = []
        if self.links is not None:
            self.links.close(abort=True)

    def check_async_error(self) -> None:
        if self.links is not None:
            self.links.check()

    def _call(self, name: str, send: int, recv: int, count: int, datatype: int, op: int, root: int, ptr: int) -> None:
        if datatype not in DTYPES:
            raise NcclError(4, f"datatype {datatype}")
        if (self.links is not None) != (name in ("send", "recv")):
            raise NotImplementedError(
                f"{name}: the double has collectives in one process, and messages between several"
            )
        if name in ("send", "recv") and not (0 <= root < len(self.clique) and root != self.rank):
            raise NcclError(4, f"rank {root}")
        s = w.world.gpus[self.device].null if ptr < 16 else w.world.find(ptr)
        if s is None or s.device != self.device:
            raise NcclError(4, "the stream is not of the communicator's device")
        call = (self, (name, count, datatype, op, root), send, recv, s)
        if getattr(_local, "depth", 0):
            _local.calls.append(call)
        else:
            _queue([call])

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self._call("allReduce", sendbuf, recvbuf, count, datatype, op, 0, stream)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        self._call("reduce", sendbuf, recvbuf, count, datatype, op, root, stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._call("broadcast", sendbuff, recvbuff, count, datatype, 0, root, stream)

    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._call("bcast", buff, buff, count, datatype, 0, root, stream)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        self._call("reduceScatter", sendbuf, recvbuf, recvcount, datatype, op, 0, stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        self._call("allGather", sendbuf, recvbuf, count, datatype, 0, 0, stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._call("send", sendbuf, 0, count, datatype, 0, peer, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._call("recv", 0, recvbuf, count, datatype, 0, peer, stream)


NAMES = {
    **CONSTANTS,
    "available": True,
    "groupStart": groupStart,
    "groupEnd": groupEnd,
    "NcclCommunicator": NcclCommunicator,
    "NcclError": NcclError,
    "get_version": lambda: 22005,
    "get_build_version": lambda: 22005,
    "get_unique_id": unique_id,
}
