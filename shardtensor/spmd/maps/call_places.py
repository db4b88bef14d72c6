"""What follows from the devices of the calls of a map: their interpreters, backends and queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardtensor.backend.device import Device
from shardtensor.backend.protocol import Backend
from shardtensor.backend.registry import backend_of, memory_space
from shardtensor.interpreters.on_device import DeviceInterpreter, on_submesh
from shardtensor.sharding.mesh import Mesh
from shardtensor.spmd.scheduling.device_context import DeviceBlock, block_of


class Places(NamedTuple):
    """What follows from the devices of the calls of a map.

    Attributes:
        submeshes: the devices of each call. Because they are kept, no other mesh gets their identities.
        devices: the devices of each call, in a tuple.
        interpreters: the interpreter of each call; None for a call on several devices.
        applies: their methods ``apply``, likewise.
        blocks: for each call the block in which its device is current; None where programs do not share blocks.
        backends: the backends of the devices.
        stateful: those that have modes.
        simulated: whether one of them has arrays without elements.
        queues: of the devices that can run behind the caller one for each queue, with its backend.
    """

    submeshes: Sequence[Mesh]
    devices: Sequence[tuple[Device, ...]]
    interpreters: Sequence[DeviceInterpreter | None]
    applies: Sequence[Callable[..., Any] | None]
    blocks: Sequence[DeviceBlock | None]
    backends: Sequence[Backend]
    stateful: Sequence[Backend]
    simulated: bool
    queues: Sequence[tuple[Backend, Device]]


_known: dict[tuple[int, ...], Places] = {}
_MOST_KNOWN = 1024


def places_of(submeshes: Sequence[Mesh]) -> Places:
    """Returns what follows from the devices of the calls; by the identities of the meshes, since their hashes are
    functions in Python.
    """
    key = tuple(map(id, submeshes))
    places = _known.get(key)
    if places is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()  # in one step, as other threads may do the same
        places = _known[key] = _made(submeshes)
    return places


def _made(submeshes: Sequence[Mesh]) -> Places:
    devices = dict.fromkeys([device for submesh in submeshes for device in submesh.flat])
    backends = list(dict.fromkeys([backend_of(device) for device in devices]))
    ordered = [b for b in backends if any(getattr(type(b), m) is not getattr(Backend, m) for m in _ORDER)]
    queues: dict[Any, tuple[Backend, Device]] = {}
    for device in devices:
        if (backend := backend_of(device)) in ordered:
            queues.setdefault(device if backend.on_host else (backend, memory_space(device)), (backend, device))
    interpreters = [None if submesh.size > 1 else on_submesh(submesh) for submesh in submeshes]
    blocks = [block_of(here.backend, here.device) if here else None for here in interpreters]
    simulated = any(backend.simulated for backend in backends)
    # The backends of other processes pass the look-up of the method on.
    stateful = [b for b in backends if getattr(b.capture_modes, "__func__", None) is not Backend.capture_modes]
    applies = [None if here is None else here.apply for here in interpreters]
    flat = [submesh.flat for submesh in submeshes]
    waiting = list(queues.values())
    return Places(tuple(submeshes), flat, interpreters, applies, blocks, backends, stateful, simulated, waiting)


_ORDER = ("wait_for_caller", "make_caller_wait")
"""The methods of backends that order a device and its caller; where calls are synchronous, they do nothing."""
