"""`simulate`: the messages that a function would send on devices that do not exist, and the time they would take."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.backend.abstract import NAME
from shardtensor.communication.schedules import Block, Collective, Listed, Schedule, by_id, device_of
from shardtensor.communication.transfer_log import (
    UNKNOWN_TRIPS,
    Recorded,
    Transfer,
    TransferRecords,
    html_table,
    opened,
    table,
)
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShardingError, type_text
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Ints
from shardtensor.sharding.mesh import Mesh, default_mesh, use_mesh
from shardtensor.tensor.pytree import leaves, map_leaves
from shardtensor.tensor.tensor import ShardedTensor

Links = float | Mapping[str, float] | None
"""A number for all links, or one for each mesh axis along which two devices differ."""


def simulate(
    fn: Callable[..., Any],
    *args: Any,
    latency: Links = None,
    bandwidth: Links = None,
    mesh: Mesh | None = None,
    trips: int = 1,
) -> SimulationReport:
    """Simulates ``fn(*args)`` on devices that do not exist, and reports the messages that it would send.

    For tensors on an `AbstractMesh`, layouts are propagated, and transfers are planned and counted, as for any other
    tensors. No elements are allocated, computed or moved. `shard_map`, `pmap`, `smap` and the collectives work, too:
    mapped functions receive tensors on one device.

    Args:
        fn: the function. It may return any object.
        *args: its arguments, pytrees of tensors on an `AbstractMesh` and of other objects. Only the shapes and dtypes
            of host arrays are used; they count as transferred from the host.
        latency: seconds from the sending of a message to the arrival of its first byte: α. A number for all links, or a
            dict by mesh axis for a network of several levels: the slowest of the axes along which two devices differ
            determines the time.
        bandwidth: bytes per second, likewise: 1/β. With both, the report has times.
        mesh: the devices, whose axes the dicts name; by default the mesh of the first simulated tensor in ``args``,
            otherwise the default mesh. It is the default mesh while ``fn`` runs.
        trips: the number of trips of each loop whose number depends on elements (`while_loop`, and `fori_loop` with
            such bounds).

    Raises:
        ShardingError: the mesh has devices that exist, or no mesh is known.
        ArgumentTypeError: an argument contains a tensor with elements; ``fn`` reads elements, or is not callable; or a
            latency or bandwidth is not a number.
        ArgumentError: only one of latency and bandwidth is given; a dict lacks an axis of the mesh or has another one;
            a latency is negative, a bandwidth not positive, or either infinite; or the number of trips is negative.

    The schedules are those that the backends execute. The phases of a schedule follow one another; within a phase, a
    device sends its messages one after the other, and receives at the same time. The time of a phase is that of its
    slowest device.

    >>> mesh = st.AbstractMesh((4096,), ("x",))
    >>> x = st.zeros((8192, 1000), dtype="float32", device=st.NamedSharding(mesh, st.P("x")))
    >>> report = st.simulate(lambda x: x[1:] - x[:-1], x, latency=1e-6, bandwidth=1e9)
    >>> report.operators[0].sent, report.operators[0].rounds
    (4000, 1)
    """
    if not callable(fn):
        raise ArgumentTypeError(f"simulate: fn is {type_text(fn)}; wanted a function")
    if operator.index(trips) < 0:
        raise ArgumentError(f"simulate: trips is {trips}; wanted a number from 0 on")
    network = _Network(_mesh_for(args, mesh), latency, bandwidth)
    steps = _Steps(network)
    token = UNKNOWN_TRIPS.set(trips)
    try:
        with opened(steps), use_mesh(network.mesh):
            result = fn(*args)
    finally:
        UNKNOWN_TRIPS.reset(token)
    return SimulationReport(network, steps.found, result)


def _mesh_for(args: Any, explicit: Mesh | None) -> Mesh:
    """Returns the mesh whose devices are simulated: the given one, that of the first tensor, or the default mesh."""
    if explicit is not None and not isinstance(explicit, Mesh):
        raise ArgumentTypeError(f"simulate: mesh is {type_text(explicit)}; wanted an AbstractMesh")
    tensors = [x for x in leaves(args) if isinstance(x, ShardedTensor)]
    for x in tensors:
        if not x._aval.backend.simulated:
            raise ArgumentTypeError(
                f"simulate: there is a tensor on {x.device!r} among the arguments, which has elements; give a "
                "simulated one, such as st.empty_like(x, device=st.NamedSharding(st.AbstractMesh(...), spec))"
            )
    mesh = explicit or next((x.sharding.mesh for x in tensors), None) or default_mesh()
    if mesh.flat[0].backend != NAME:
        what = f"{mesh!r} has devices that exist" if explicit else "there is no simulated tensor among the arguments"
        raise ShardingError(f"simulate: {what}; wanted tensors on a st.AbstractMesh, or one as mesh=")
    return mesh


# -- the network -----------------------------------------------------------------------------------


class _Network:
    """The devices of a mesh, and the latency and bandwidth of their links.

    Attributes:
        mesh: the devices.
        links: dimension, latency and seconds per byte of each mesh axis; of the axes along which two devices differ,
            the slowest determines the time. None if latency and bandwidth were not given.
    """

    def __init__(self, mesh: Mesh, latency: Links, bandwidth: Links) -> None:
        self.mesh = mesh
        self.size = mesh.size
        if (latency is None) != (bandwidth is None):
            there, missing = ("latency", "bandwidth") if bandwidth is None else ("bandwidth", "latency")
            raise ArgumentError(f"simulate: {there} is given and {missing} is not; give both, or neither")
        self.links: list[tuple[int, float, float]] | None = None
        if latency is not None and bandwidth is not None:
            delays, rates = self._by_axis(latency, "latency"), self._by_axis(bandwidth, "bandwidth")
            self.links = [(d, delays[name], 1 / rates[name]) for d, name in enumerate(mesh.axis_names) if name in rates]
            if len({link[1:] for link in self.links}) == 1:  # equal links need no coordinates
                self.links = [(-1, *self.links[0][1:])]
        self._coordinates = mesh.coordinates
        self._position = by_id(mesh.flat, np.arange(self.size))

    def _by_axis(self, links: Any, what: str) -> dict[str, float]:
        shape = self.mesh.shape
        if isinstance(links, Mapping):
            for name in links:
                if name not in shape:
                    raise ArgumentError(
                        f"simulate: {what} has an entry for axis {name!r}; the mesh has {self.mesh.axis_names}"
                    )
            for name, n in shape.items():
                if n > 1 and name not in links:
                    raise ArgumentError(
                        f"simulate: {what} has no entry for axis {name!r}; wanted one for each axis of {self.mesh!r}"
                    )
            figures = dict(links)
        else:
            figures = dict.fromkeys(shape, links)
        for figure in figures.values():
            real = isinstance(figure, (int, float, np.number)) and not isinstance(figure, bool)
            if not real or not (figure >= 0 and (what == "latency" or figure > 0)) or math.isinf(figure):
                kind = ArgumentError if real else ArgumentTypeError
                least = "0 or more" if what == "latency" else "above 0"
                raise kind(f"simulate: {what} is {links!r:.60}; wanted a finite number, {least}, or a dict by axis")
        return {name: float(figure) for name, figure in figures.items()}

    def positions(self, ids: Ints) -> Ints:
        """Returns the positions of devices in the mesh; the position of devices that exist is the mesh's size.

        Raises:
            ShardingError: a device is not in the mesh.
        """
        positions = self._position(ids)
        for device in map(device_of, np.unique(ids[positions < 0]).tolist()):
            if device.backend == NAME:
                raise ShardingError(
                    f"simulate: device {device} is not in {self.mesh!r}; give mesh=, one with all devices"
                )
        return np.where(positions < 0, self.size, positions)

    def times(self, sources: Ints, destinations: Ints, sizes: Ints) -> Any:
        """Returns the seconds that each message takes."""
        assert self.links is not None
        slowest: Any = 0.0
        for d, latency, per_byte in self.links:
            time = latency + sizes * per_byte
            if d >= 0:
                along = self._coordinates[:, d]
                time = np.where(along[sources] != along[destinations], time, 0.0)
            slowest = time if len(self.links) == 1 else np.maximum(slowest, time)
        return slowest


# -- traffic ---------------------------------------------------------------------------------------


class Traffic:
    """The messages of one call of an operator, or of all its calls.

    Attributes:
        operator: the name of the operator.
        axis: for a collective, the mesh axes that it runs along, as named in its call; otherwise empty.
        calls: the number of calls that sent a message.
        messages: the number of messages; everything that a device sends to another in one phase is one message.
        bytes: the bytes of all messages.
        sent, received: the bytes of the device that sends (receives) most.
        link: the most bytes that any device sends to another in one call.
        rounds: the number of steps, if in each step a device sends at most one message and receives at most one.
        from_host, to_host: the bytes transferred from and to the host, which the other counts exclude.
        seconds: the time of the calls, one after the other; None if latency and bandwidth are not known.
    """

    def __init__(self, operator: str, axis: str, size: int) -> None:
        self.operator = operator
        self.axis = axis
        self.calls = self.messages = self.bytes = self.link = self.rounds = self.from_host = self.to_host = 0
        self.seconds: float | None = None
        self._ends = np.zeros((2, size), np.int64)

    @property
    def sent(self) -> int:
        """See `Traffic`."""
        return int(self._ends[0].max())

    @property
    def received(self) -> int:
        """See `Traffic`."""
        return int(self._ends[1].max())

    def by_device(self) -> npt.NDArray[np.int64]:
        """Returns the bytes that each device sends and receives: an array of shape (2, devices)."""
        return self._ends.copy()

    def _add(self, other: Traffic) -> None:
        """Adds the traffic of a later call."""
        for name in ("calls", "messages", "bytes", "rounds", "from_host", "to_host"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.link = max(self.link, other.link)
        if other.seconds is not None:
            self.seconds = (self.seconds or 0.0) + other.seconds
        self._ends += other._ends

    def _run(self, schedule: Schedule, network: _Network) -> None:
        """Adds the traffic of a schedule that runs at the same time."""
        rounds, seconds = 0, 0.0
        for phase in schedule.phases():
            counts = np.zeros((2, network.size), np.int64)
            times = np.zeros((2, network.size))
            for block in phase:
                self._count(block, network, counts, times)
            rounds += int(counts.max())
            seconds += float(times.max())
        self.rounds = max(self.rounds, rounds)
        if network.links is not None:
            self.seconds = max(self.seconds or 0.0, seconds)

    def _count(self, block: Block, network: _Network, counts: Ints, times: Any) -> None:
        sources, destinations = network.positions(block.sources), network.positions(block.destinations)
        real = (sources != destinations) & (block.sizes > 0)
        if (block.sources < 0).any() or (block.destinations < 0).any():
            sizes = np.where(real, block.sizes, 0)
            self.from_host += int(sizes[np.broadcast_to(sources == network.size, sizes.shape)].sum())
            self.to_host += int(sizes[np.broadcast_to(destinations == network.size, sizes.shape)].sum())
            real &= (sources < network.size) & (destinations < network.size)
            sources, destinations = sources % network.size, destinations % network.size  # 0 is added there
        sizes = np.where(real, block.sizes, 0)
        self.messages += int(np.count_nonzero(real))
        self.bytes += int(sizes.sum())
        self.link = max(self.link, int(sizes.max(initial=0)))
        _sum(self._ends, sources, destinations, sizes)
        _sum(counts, sources, destinations, real)
        if network.links is not None:
            _sum(times, sources, destinations, np.where(real, network.times(sources, destinations, sizes), 0.0))


def _traffic(step: list[Schedule], network: _Network) -> Traffic:
    """Returns the traffic of a step: of schedules that run at the same time."""
    traffic = Traffic(step[0].operator, step[0].axis, network.size)
    for schedule in step:
        for part in schedule.parts():
            traffic._run(part, network)
    traffic.calls = 1
    return traffic


def _sum(ends: Any, sources: Ints, destinations: Ints, figures: Any) -> None:
    """Adds the figures of messages to the totals of their sources (row 0) and destinations (row 1)."""
    for row, where in zip(ends, (sources, destinations), strict=True):
        at = np.broadcast_to(where, np.broadcast_shapes(where.shape, (1,) * figures.ndim))
        spread = tuple(d for d in range(figures.ndim) if at.shape[d] != figures.shape[d])
        totals = figures.sum(axis=spread) if spread else figures
        row += np.bincount(at.ravel(), totals.ravel(), len(row)).astype(row.dtype)  # floats, exact below 2**53


class _Steps:
    """The `TransferListener` of a simulation, which collects the schedules of the calls, in order."""

    def __init__(self, network: _Network) -> None:
        self._network = network
        self.found: list[list[Schedule]] = []
        self._collectives: dict[tuple[str, str, int], list[Schedule]] = {}
        self._counts: dict[tuple[str, str], Ints] = {}

    def record(self, records: Callable[[], Iterable[Transfer]], cached: Callable[[], Recorded]) -> None:
        """See `shardtensor.communication.transfer_log.TransferListener`."""
        if isinstance(records, Collective) and records.axis:
            self._add_collective(records)
        elif isinstance(records, Schedule):
            self.found.append([records])
        else:
            mine = [r for r in cached() if r.bytes and NAME in (r.source.backend, r.destination.backend)]
            if mine:
                self.found.append([Listed(mine, records if isinstance(records, TransferRecords) else None)])

    def _add_collective(self, schedule: Collective) -> None:
        """Adds a collective of one group to the step of the other groups' k-th calls of the same collective.

        Groups along an axis run their k-th calls at the same time.
        """
        kind = (schedule.operator, schedule.axis)
        counts = self._counts.setdefault(kind, np.zeros(self._network.size, np.int64))
        members = self._network.positions(schedule.members)
        number = int(counts[members].max())
        counts[members] = number + 1
        step = self._collectives.setdefault((*kind, number), [])
        if not step:
            self.found.append(step)
        step.append(schedule)


# -- the report ------------------------------------------------------------------------------------


class SimulationReport:
    """The messages, bytes and times that `simulate` computed. It prints as a table.

    Attributes:
        mesh: the devices.
        steps: a `Traffic` for each call that sent a message, in order. The calls of one collective by several groups of
            devices are one step.
        operators: the sum of the steps for each operator, and for each axis of a collective; ``link`` is that of one
            call.
        total: the sum of all steps.
        messages: the number of messages in the total.
        bytes: the bytes of all messages.
        rounds: the rounds of all schedules, one after the other.
        seconds: the time of all schedules, one after the other; None if latency and bandwidth are not known.
        result: what the function returned; tensors in it have no elements.
        shardings: a pytree in the form of the result with the `NamedSharding` of each tensor, and None for other
            leaves.

    >>> mesh = st.AbstractMesh((64,), ("x",))
    >>> x = st.zeros((2**20,), dtype="float32", device=mesh)
    >>> print(st.simulate(lambda x: (x - x.mean()) / x.std(), x))
    AbstractMesh(x=64)
    operator  calls  messages  bytes  sent  received  link  rounds
    ──────────────────────────────────────────────────────────────
    mean          1       126    504    24        24     4      12
    std           1       126    756    28        48     8      12
    ──────────────────────────────────────────────────────────────
    total         2       252  1,260    52        72     8      24
    """

    def __init__(self, network: _Network, steps: Sequence[list[Schedule]], result: Any) -> None:
        self.mesh = network.mesh
        self.result = result
        self.shardings = map_leaves(lambda x: x.sharding if isinstance(x, ShardedTensor) else None, result)
        self._network = network
        self._schedules: dict[Any, tuple[Schedule, int]] = {}  # by key, with the number of calls
        self.steps: list[Traffic] = []
        self.total = Traffic("total", "", network.size)
        rows: dict[tuple[str, str], Traffic] = {}
        known: dict[Any, Traffic] = {}
        for step in steps:
            key = tuple([schedule.key for schedule in step])
            if key not in known:
                known[key] = _traffic(step, network)
            traffic = known[key]
            for schedule in step:
                self._schedules[schedule.key] = schedule, self._schedules.get(schedule.key, (schedule, 0))[1] + 1
            if not traffic.messages and not traffic.from_host and not traffic.to_host:
                continue
            self.steps.append(traffic)
            kind = traffic.operator, traffic.axis
            if kind not in rows:
                rows[kind] = Traffic(*kind, network.size)
            rows[kind]._add(traffic)
            self.total._add(traffic)
        self.operators = list(rows.values())
        if network.links is not None:
            self.total.seconds = self.total.seconds or 0.0
        self.messages, self.bytes, self.rounds = self.total.messages, self.total.bytes, self.total.rounds
        self.seconds = self.total.seconds

    def link_bytes(self) -> npt.NDArray[np.int64]:
        """Returns the bytes from each device to each other device, in mesh order: an array of shape (n, n).

        The array is created by each call: for 4096 devices it takes 134 MB.

        >>> mesh = st.AbstractMesh((4,), ("x",))
        >>> st.simulate(lambda x: x[1:] + 1, st.zeros((8, 1), dtype="int8", device=mesh)).link_bytes()
        array([[0, 0, 0, 0],
               [1, 0, 0, 0],
               [0, 1, 0, 0],
               [0, 0, 1, 0]])
        """
        n = self.mesh.size
        table = np.zeros((n + 1) * n + n, np.int64)  # including positions of the host
        for schedule, calls in self._schedules.values():
            for phase in schedule.phases():
                for block in phase:
                    sources, destinations = map(self._network.positions, block[:2])
                    at, sizes = np.broadcast_arrays(sources * n + destinations, block.sizes)
                    devices = np.broadcast_to((sources < n) & (destinations < n) & (sources != destinations), at.shape)
                    np.add.at(table, at[devices], sizes[devices] * calls)
        return table[: n * n].reshape(n, n)

    def process_bytes(self) -> npt.NDArray[np.int64]:
        """Returns the bytes that each process sends to each other one: an array of shape (p, p) for p processes.

        Processes send less than their devices: the devices of a process share its memory, so that elements that several
        of them lack are sent once. These are the bytes of arrays; the headers of exchanges do not count.

        >>> mesh = st.AbstractMesh((2, 4), ("host", "gpu"), processes=2)
        >>> x = st.zeros((8, 100), device=st.NamedSharding(mesh, st.P(("host", "gpu"))))
        >>> report = st.simulate(lambda x: st.reshard(x, st.NamedSharding(mesh, st.P())), x)
        >>> report.process_bytes()
        array([[   0, 3200],
               [3200,    0]])
        """
        # Few programs need it.
        from shardtensor.communication.between_processes.process_traffic import between_processes

        processes = [d.process_index for d in self.mesh.flat]
        count, processes_of = max(processes) + 1, by_id(self.mesh.flat, processes)
        table = np.zeros((count, count), np.int64)
        for schedule, calls in self._schedules.values():
            table += between_processes(schedule, processes_of, count) * calls
        return table

    def __repr__(self) -> str:
        return f"SimulationReport({counted(self.messages, 'message')}, {counted(self.bytes, 'byte')} on {self.mesh!r})"

    def __str__(self) -> str:
        return "\n".join([repr(self.mesh), *table(self._rows())])

    def _repr_html_(self) -> str:
        return f"<div>{escape(repr(self.mesh))}</div>{html_table(self._rows())}"

    def _rows(self) -> list[list[str]]:
        """Returns the cells of the table: the titles, a line for each operator, and the total."""
        return [_TITLES, *[_row(traffic) for traffic in (*self.operators, self.total)]]


_TITLES = ["operator", "axis", "calls", "messages", "bytes", "sent", "received", "link", "rounds", "host", "seconds"]


def _row(t: Traffic) -> list[str]:
    """Returns the cells of one line of the table."""
    figures = (t.calls, t.messages, t.bytes, t.sent, t.received, t.link, t.rounds)
    host = t.from_host + t.to_host
    seconds = "" if t.seconds is None else f"{t.seconds:.4g}"
    return [t.operator, t.axis, *[f"{n:,}" for n in figures], f"{host:,}" if host else "", seconds]
