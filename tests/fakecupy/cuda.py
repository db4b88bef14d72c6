"""The module ``cupy.cuda``: devices, streams, events, and the functions of the CUDA runtime that they call."""

from __future__ import annotations

from typing import Any

from . import graphs, memory
from . import world as w
from .errors import CUDARuntimeError

# -- cupy.cuda.runtime -----------------------------------------------------------------------------


def get_device_count() -> int:
    if not w.world.gpus:
        raise CUDARuntimeError(100)
    return len(w.world.gpus)


def get_device() -> int:
    get_device_count()
    return w.world.current()


def set_device(device: int) -> None:
    w.world.tls.device = _valid(device)


def _valid(device: int) -> int:
    if not 0 <= device < get_device_count():
        raise CUDARuntimeError(101)
    return device


def can_access_peer(device: int, peer: int) -> int:
    return int(w.world.config.peer(_valid(device), _valid(peer)))


def get_device_properties(device: int) -> dict[str, Any]:
    _valid(device)
    return {
        "name": b"Fake GPU",
        "totalGlobalMem": w.world.config.memory,
        "major": 9,
        "minor": 0,
        "multiProcessorCount": 1,
        "pciBusID": device,
        "pciDeviceID": 0,
        "pciDomainID": 0,
    }


def pci_bus_id(device: int) -> str:
    return f"0000:{_valid(device):02X}:00.0"


def mem_get_info() -> tuple[int, int]:
    pool = memory.MemoryPool._pool()
    return w.world.config.memory - pool.total, w.world.config.memory


def device_synchronize() -> None:
    w.world.synchronize_device(get_device())


def _stream(ptr: int) -> w.Stream:
    get_device_count()
    found = w.world.find(ptr)
    if found is None:
        raise CUDARuntimeError(400)
    return found


def stream_create(flags: int, priority: int = 0) -> int:
    get_device_count()
    return w.world.create_stream(w.NON_BLOCKING if flags & 1 else w.BLOCKING).ptr


def stream_synchronize(ptr: int) -> None:
    w.world.synchronize(_stream(ptr))


def stream_query(ptr: int) -> int:
    s = _stream(ptr)
    if s.capture is not None:
        s.capture.refuse()
    return 0 if w.world.reached(s, s.seq, dict(s.clock)) else 600


def stream_wait_event(ptr: int, event: int, flags: int = 0) -> None:
    _, point = _event(event)
    if point is not None:
        w.world.wait(_stream(ptr), point)


def stream_get_flags(ptr: int) -> int:
    return int(_stream(ptr).kind is w.NON_BLOCKING)


def event_create(flags: int = 0) -> int:
    device = get_device()
    ptr = w.world.handle()
    w.world.events[ptr] = (device, None)
    return ptr


def event_destroy(ptr: int) -> None:
    w.world.events.pop(ptr, None)


def _event(ptr: int) -> tuple[int, w.Recorded | None]:
    if ptr not in w.world.events:
        raise CUDARuntimeError(400)
    return w.world.events[ptr]


def event_record(event: int, ptr: int) -> None:
    device, _ = _event(event)
    s = _stream(ptr)
    if s.device != device:  # CUDA records an event only on streams of the device that was current at its creation
        raise CUDARuntimeError(400)
    w.world.events[event] = (device, w.world.record(s))


def event_query(event: int) -> int:
    _, point = _event(event)
    if point is not None and point.capture is not None:
        point.capture.refuse(907)
    return 0 if point is None or w.world.reached(point.stream, point.seq, point.clock) else 600


def event_synchronize(event: int) -> None:
    _, point = _event(event)
    if point is not None:
        w.world.synchronize_point(point)


def memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    memory.device_copy(_pointer(dst), _pointer(src), size, _stream(stream))


def memcpy_peer_async(dst: int, dst_device: int, src: int, src_device: int, size: int, stream: int) -> None:
    memcpy_async(dst, src, size, 3, stream)


def _pointer(ptr: int) -> memory.MemoryPointer:
    return memory.MemoryPointer(memory.UnownedMemory(ptr, 1, None), 0)


RUNTIME = {
    "CUDARuntimeError": CUDARuntimeError,
    "getDeviceCount": get_device_count,
    "getDevice": get_device,
    "setDevice": set_device,
    "deviceCanAccessPeer": can_access_peer,
    "deviceSynchronize": device_synchronize,
    "deviceGetPCIBusId": pci_bus_id,
    "getDeviceProperties": get_device_properties,
    "memGetInfo": mem_get_info,
    "memcpyAsync": memcpy_async,
    "memcpyPeerAsync": memcpy_peer_async,
    "runtimeGetVersion": lambda: 12090,
    "driverGetVersion": lambda: 12090,
    "streamCreateWithFlags": stream_create,
    "streamCreateWithPriority": stream_create,
    "streamDestroy": lambda ptr: w.world.destroy_stream(ptr),
    "streamSynchronize": stream_synchronize,
    "streamQuery": stream_query,
    "streamWaitEvent": stream_wait_event,
    "streamGetFlags": stream_get_flags,
    "eventCreateWithFlags": event_create,
    "eventDestroy": event_destroy,
    "eventRecord": event_record,
    "eventQuery": event_query,
    "eventSynchronize": event_synchronize,
    "streamDefault": 0,
    "streamNonBlocking": 1,
    "streamLegacy": 1,
    "streamPerThread": 2,
    "eventDefault": 0,
    "eventBlockingSync": 1,
    "eventDisableTiming": 2,
    "eventInterprocess": 4,
    "memcpyHostToHost": 0,
    "memcpyHostToDevice": 1,
    "memcpyDeviceToHost": 2,
    "memcpyDeviceToDevice": 3,
    "memcpyDefault": 4,
    "streamCaptureModeGlobal": graphs.GLOBAL,
    "streamCaptureModeThreadLocal": graphs.THREAD_LOCAL,
    "streamCaptureModeRelaxed": graphs.RELAXED,
    "is_hip": False,
}


# -- cupy.cuda -------------------------------------------------------------------------------------


class Device:
    """A GPU with a number; a context manager in which it is the current device of this thread."""

    __slots__ = ("id",)
    __hash__ = None  # type: ignore[assignment]  # as CuPy's

    def __init__(self, device: Any = None) -> None:
        self.id = get_device() if device is None else int(device)

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> Any:
        return self.id == other.id if isinstance(other, Device) else NotImplemented

    def __lt__(self, other: object) -> Any:
        return self.id < other.id if isinstance(other, Device) else NotImplemented

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __enter__(self) -> Device:
        tls = w.world.tls
        before = get_device()
        stack = getattr(tls, "stack", None)
        if stack is None:
            stack = tls.stack = []
        stack.append(before)
        if self.id != before:
            try:
                set_device(self.id)
            except CUDARuntimeError:
                stack.pop()
                raise
        return self

    def __exit__(self, *args: object) -> None:
        set_device(w.world.tls.stack.pop())

    def use(self) -> Device:
        """Makes the device current, beyond any ``with``."""
        set_device(self.id)
        return self

    def synchronize(self) -> None:
        """Waits for all streams of the device."""
        w.world.synchronize_device(_valid(self.id))

    @property
    def compute_capability(self) -> str:
        _valid(self.id)
        return "90"

    @property
    def pci_bus_id(self) -> str:
        return pci_bus_id(self.id)

    @property
    def mem_info(self) -> tuple[int, int]:
        with self:
            return mem_get_info()


def _current_streams() -> list[Any]:
    """Returns the current stream of each device in this thread."""
    tls = w.world.tls
    streams = getattr(tls, "streams", None)
    if streams is None:
        streams = tls.streams = [Stream.null] * get_device_count()
        tls.stream_stacks = [[Stream.null] for _ in streams]
        tls.entered = []
    return streams


def get_current_stream(device_id: int = -1) -> Any:
    """Returns the current stream of a device (default: the current one) in this thread."""
    return _current_streams()[get_device() if device_id == -1 else device_id]


def _match(device: int) -> int:
    current = get_device()
    if device not in (-1, current):
        raise RuntimeError(
            f"The device that the stream is created on ({device}) does not match with the current device ({current})"
        )
    return current


class Event:
    """A position in a stream, created on the current device."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.ptr = 0
        if interprocess and not disable_timing:
            raise ValueError("Timing must be disabled for interprocess events")
        self._world = w.world
        self.ptr = event_create(block | disable_timing << 1)

    def __del__(self) -> None:
        if self.ptr:
            self._world.events.pop(self.ptr, None)

    @property
    def done(self) -> bool:
        """Whether the stream has reached the position."""
        return event_query(self.ptr) == 0

    def record(self, stream: Any = None) -> None:
        """Records the present position of ``stream`` (default: the current one)."""
        event_record(self.ptr, (get_current_stream() if stream is None else stream).ptr)

    def synchronize(self) -> None:
        """Makes the host wait for the event."""
        event_synchronize(self.ptr)


class _BaseStream:
    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr, self.device_id = ptr, device_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BaseStream) and self.ptr == other.ptr  # two devices' null streams are equal

    def __hash__(self) -> int:
        return self.ptr

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ptr} (device {self.device_id})>"

    def __enter__(self) -> Any:
        device = _match(self.device_id)
        streams, tls = _current_streams(), w.world.tls
        tls.stream_stacks[device].append(self)
        tls.entered.append(device)
        streams[device] = self
        return self

    def __exit__(self, *args: object) -> None:
        tls = w.world.tls
        device = tls.entered.pop()
        tls.stream_stacks[device].pop()
        _current_streams()[device] = tls.stream_stacks[device][-1]

    def use(self) -> Any:
        """Makes the stream the current one of the current device, beyond any ``with``."""
        device = _match(self.device_id)
        _current_streams()[device] = self
        return self

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    @property
    def done(self) -> bool:
        """Whether all work of the stream has run."""
        return stream_query(self.ptr) == 0

    @property
    def is_non_blocking(self) -> bool:
        return bool(stream_get_flags(self.ptr))

    def synchronize(self) -> None:
        """Makes the host wait for all work of the stream."""
        stream_synchronize(self.ptr)

    def record(self, event: Any = None) -> Any:
        """Records an event. A new one is created on the current device, which must then be the stream's."""
        if event is None:
            event = Event()
        event_record(event.ptr, self.ptr)
        return event

    def wait_event(self, event: Any) -> None:
        """Orders all work that is queued from now on after the event."""
        stream_wait_event(self.ptr, event.ptr)

    def begin_capture(self, mode: int | None = None) -> None:
        """Records what is queued from now on, in place of running it."""
        if self.ptr in (0, 1):
            raise RuntimeError("cannot capture on the default (legacy) stream")
        graphs.begin(_stream(self.ptr), graphs.RELAXED if mode is None else mode)

    def end_capture(self) -> graphs.Graph:
        """Ends the capture, and returns what was recorded."""
        return graphs.end(_stream(self.ptr))

    def is_capturing(self) -> bool:
        """Whether what is queued is recorded."""
        return graphs.is_capturing(_stream(self.ptr))

    def launch_host_func(self, callback: Any, arg: Any) -> None:
        """Queues a call of a Python function."""
        w.world.launch("host function", lambda: callback(arg), (), (), _stream(self.ptr))


class Stream(_BaseStream):
    """A new stream of the current device, or its null stream."""

    null: Any = None
    ptds: Any = None

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        self._world = w.world
        if null or ptds:
            super().__init__(0 if null else 2, -1)
        else:
            super().__init__(0, -1)
            self.ptr = stream_create(int(non_blocking))
            self.device_id = get_device()

    def __del__(self) -> None:
        if self.ptr > 15:
            self._world.destroy_stream(self.ptr)


class ExternalStream(_BaseStream):
    """A stream that is given by its handle only."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        super().__init__(ptr, device_id)


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)


def is_available() -> bool:
    return bool(w.world.gpus)
