"""`Backend`: the protocol that plugins implement to drive devices. `shardtensor.backend.registry` finds the plugins.

Writing a backend
-----------------
Subclass `Backend`, implement the abstract members, and register it::

    [project.entry-points."shardtensor.backends"]
    mine = "my_package:MyBackend"

The class is instantiated once per process, without arguments. If its devices cannot be used on this machine,
``__init__`` raises a `BackendError` with the reason and the remedy; ``shardtensor info`` and ``st.devices("mine")``
show the message. The module that the entry point names is imported only to read the class's `priority`, so import the
array library itself in ``__init__``. `shardtensor.testing.BackendTests` is the conformance suite for backends.

A backend has its own array type. The library accesses arrays only through `Backend.xp` and the methods below, always
inside ``with backend.on(device)``. The tensor that holds an array records its device; the array is never queried for
it, so that several logical devices may share a physical one. Arrays themselves must have ``shape``, ``ndim``,
``nbytes``, ``real`` and ``imag``, and support indexing with index arrays (of the same backend) and assignment to
elements selected by slices, index arrays and masks.

Devices may execute asynchronously, each in the order of its queue. `record` and `wait` order operations across devices;
`wait_for_caller` and `make_caller_wait` order them with respect to the caller's own use of the array library.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeAlias

import numpy as np

from shardtensor.backend.device import HOST_MEMORY, Device, HostArray
from shardtensor.backend.exclusive_memory import make_writable, memory_of
from shardtensor.core import innermost
from shardtensor.errors import BackendError
from shardtensor.host.limits import count_from_environment, usable_cores

_NO_CONTEXT = contextlib.nullcontext()

Launch: TypeAlias = Callable[[Iterable[Callable[..., Any]], Iterable[Sequence[Any]]], list[Any]]
"""Calls one function on each of some devices, with a row of arguments; returns the results. See `Backend.launcher`."""

Kernel: TypeAlias = Callable[..., None]
"""A kernel of `Backend.elementwise_kernel`."""

RawKernel: TypeAlias = Callable[[int, tuple[int, int, int], Sequence[Any]], None]
"""A kernel of `Backend.raw_kernel`."""


class Backend(abc.ABC):
    """The base class of backends: a plugin subclasses it to provide devices of one kind.

    Required: `name`, `devices`, `xp`, `is_array`, `to_device`, `from_host`, `to_host`. All other members have defaults
    that are correct for devices that execute synchronously and have private memory.
    """

    name: str
    """The name of the entry point under which the backend is registered."""

    priority: int = 0
    """The default backend is the usable one of highest priority (numpy: 0). A backend of negative priority (checked,
    torch) is used only where its name is given.
    """

    simulated: bool = False
    """Whether its devices do not exist and its arrays have no elements; see `shardtensor.backend.abstract`."""

    on_host: bool = False
    """Whether arrays are NumPy's, in the host's memory, which all devices then share (see `memory_space`): the threads
    and the memory pool of the library work for them.
    """

    negative_strides: bool = True
    """Whether `view` returns a writable view also for slices with a negative step."""

    pinned_host: bool = False
    """Whether the memory kind ``pinned_host`` is a separate memory (`offload`, `onload`); else it is only a label."""

    kernel_language: str | None = None
    """The language of the kernels that `st.jit` compiles for arrays that are not `on_host`: ``"c"`` for arrays in the
    memory of the host (`host_view`), ``"cuda"`` (`elementwise_kernel`, `raw_kernel`), or None, where operators run one
    by one.
    """

    captures: bool = False
    """Whether `capture` may return graphs of launches, for backends whose `kernel_language` is CUDA."""

    multiplies_bfloat16: bool = False
    """Whether `product_of_bfloat16` computes large products faster than the namespace does in float32."""

    helper_delay: float = 200e-6
    """Seconds after which a call of a mapped function counts as blocking and other calls start in helper threads."""

    @abc.abstractmethod
    def devices(self) -> Sequence[Device]:
        """Returns all devices in order of their ids; never empty."""

    @property
    @abc.abstractmethod
    def xp(self) -> Any:
        """The array-API namespace for this backend's arrays; its functions run on the current device.

        Where the standard leaves a choice, it behaves like NumPy: dtypes are NumPy dtypes, Python scalars mix with
        arrays, elementwise functions accept ``out=`` (which may be one of the operands, for computing in place), and
        ``asarray`` accepts ``copy``. Where devices execute asynchronously, ``bool(array)`` and ``nonzero`` wait for the
        elements.
        """

    @abc.abstractmethod
    def is_array(self, x: object) -> bool:
        """Whether ``x`` is one of this backend's arrays (or array scalars)."""

    @abc.abstractmethod
    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        """Returns an exclusive copy of ``array`` on ``destination``; ``array`` is in row-major order on ``source``.

        This is the only method that transfers data between devices. ``destination`` is current, and the caller has
        ordered it after all operations that ``source`` had queued (`record`, `wait`). If devices execute
        asynchronously, the memory of ``array`` must not be reused before the copy has read it, and `begin_write` orders
        a write to it after the copy.
        """

    @abc.abstractmethod
    def from_host(self, array: HostArray, device: Device) -> Any:
        """Returns a copy of a host array on ``device``, which is current; the host array may be written afterwards."""

    @abc.abstractmethod
    def to_host(self, array: Any, device: Device) -> HostArray:
        """Returns the elements of ``array``, an array of ``device``, as a host array, after they have been computed.
        ``device`` is current.
        """

    # -- devices -----------------------------------------------------------------------------------

    shares_blocks = False  # See `is_on`.

    def on(self, device: Device) -> AbstractContextManager[object]:
        """Makes ``device`` current in this thread inside the ``with`` block; afterwards, also after an exception, the
        previous device is current again.
        """
        return _NO_CONTEXT

    def is_on(self, device: Device) -> bool:
        """Whether the state of this thread is that inside of ``on(device)``, in the block of this or of another device.

        A backend without modes can define it and set ``shares_blocks``, if its blocks change the thread's state and no
        context variables. The programs of a thread then share one block as long as it is true.
        """
        return False

    def launcher(self, devices: Sequence[Device]) -> Launch:
        """Returns ``launch(functions, rows)``, which calls one function on each of ``devices`` and returns the results.

        Each function gets a row of arguments.

        Each device is current during its call, as in `on`. The functions are the library's own, which change neither
        the device nor anything else that is current, so that an implementation need not restore it after each of them.
        """

        def launch(functions: Iterable[Callable[..., Any]], rows: Iterable[Sequence[Any]]) -> list[Any]:
            results = []
            for device, function, row in zip(devices, functions, rows, strict=True):
                with self.on(device):
                    results.append(function(*row))
            return results

        return launch

    def allocates(self, name: str) -> bool:
        """Whether the function of `xp` of that name returns only arrays with memory of their own."""
        return False

    def fuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of arrays that calls elementwise functions of `xp` only, as one that runs as a single
        kernel, with the same results bit for bit; or the function itself, as by default, if the library has no such
        kernels.

        The function does not add to a product, since compilers contract that to one operation, which rounds once.
        """
        return function

    def adds_everywhere(self, shape: Sequence[int], axes: Sequence[int], dtype: np.dtype[Any]) -> bool:
        """Whether sums, means and variances of arrays of a shape along ``axes`` run on all of a device, however few
        elements remain, in an order that depends neither on strides nor on dimensions before the first reduced one.
        """
        return False

    def capture_modes(self) -> Callable[[], None] | None:
        """Returns a function that restores the array library's modes of this thread (such as whether gradients are
        recorded) to their present values; None if the library has no modes.

        Several programs take turns in one thread: each starts with the modes of its caller, and resumes with its own.

        Raises:
            BackendError: a program cannot be suspended here, inside a context of the library that cannot be resumed.
        """
        return None

    def adjacent_devices(self, count: int) -> Sequence[Device]:
        """Returns ``count`` devices, ordered so that neighbours have the fastest links; `make_mesh` uses it."""
        return self.devices()[:count]

    def memory_space(self, device: Device) -> Hashable:
        """Identifies the memory that ``device`` allocates from: equal for devices that share a memory and a queue, so
        that each computes on the others' arrays as on its own, without a copy or an event.

        Where the shards in one memory make up a box of the tensor, this box is one array, of which the shards are
        views; of a tensor whose devices all share a memory it is the whole. By default each device has a memory of its
        own, and all devices on the host share one.
        """
        return HOST_MEMORY if self.on_host else device

    @classmethod
    def hardware(cls) -> Sequence[str]:
        """Returns a name for each physical device that processes must not share by accident, such as a GPU, in the
        order of their numbers: the same in all processes that see it, and in no other process. It is called before the
        backend is instantiated, and allocates nothing on a device.

        Where several processes of a host see the same ones, each uses those that `own_hardware` returns.

        Raises:
            BackendError: the devices cannot be used on this machine.
        """
        return ()

    def memory_info(self, device: Device) -> tuple[int, int] | None:
        """Returns the bytes (free, total) of the memory that ``device`` allocates from; None if they are unknown."""
        return None

    # -- order -------------------------------------------------------------------------------------

    def record(self, device: Device) -> Any:
        """Returns a token for all operations queued on ``device`` so far; None if calls are synchronous."""
        return None

    def wait(self, device: Device, token: Any) -> None:  # noqa: B027 - calls that are synchronous are ordered
        """Orders all operations queued on ``device`` from now on after ``token``; does not block the caller."""

    def synchronize(self, device: Device) -> None:  # noqa: B027 - likewise
        """Blocks until all operations queued on ``device`` are complete.

        Raises:
            BackendError: a queued operation failed; the message names the device.
        """

    def wait_for_caller(self, device: Device) -> None:  # noqa: B027 - likewise
        """Orders all operations queued on ``device`` from now on after those that the caller has queued directly in the
        array library.
        """

    def make_caller_wait(self, device: Device) -> None:  # noqa: B027 - likewise
        """Orders all operations that the caller queues directly in the array library from now on after those queued on
        ``device``.
        """

    # -- small arrays of several devices -----------------------------------------------------------

    def collect(self, arrays: Sequence[Any], sources: Sequence[Device], destination: Device) -> Any:
        """Returns the arrays of several devices concatenated along their first dimension on another device, which is
        current; they are in row-major order.
        """
        here, parts = self.memory_space(destination), []
        for array, source in zip(arrays, sources, strict=True):
            if self.memory_space(source) != here:
                self.wait(destination, self.record(source))
                array = self.to_device(array, source, destination)
            parts.append(array)
        return self.xp.concat(parts)

    def spread(self, array: Any, source: Device, destinations: Sequence[Device]) -> list[Any]:
        """Returns a copy on each of the other devices of an array in row-major order, as `to_device` does."""
        token, copies = self.record(source), []
        for destination in destinations:
            self.wait(destination, token)
            with self.on(destination):
                copies.append(self.to_device(array, source, destination))
        return copies

    def place(self, arrays: Sequence[Any], sources: Sequence[Device], outs: Sequence[Any], destination: Device) -> None:
        """Copies arrays in row-major order into views of arrays on another device, which is current and ordered after
        the sources. They broadcast to the shapes of the views.
        """
        for array, source, out in zip(arrays, sources, outs, strict=True):
            out[...] = self.to_device(array, source, destination)

    # -- arrays ------------------------------------------------------------------------------------

    def asarray(self, x: Any) -> Any:
        """Returns ``x``, which `is_array` accepts, as an array of this backend; array scalars become 0-d arrays."""
        return x

    def contribution(self, x: Any) -> Any:
        """Returns ``x``, which `is_array` accepts, as a collective takes it: what `asarray` returns.

        Raises:
            BackendError: ``x`` carries state that the collective would drop, such as a gradient that is recorded.
        """
        return self.asarray(x)

    # -- gradients of the library ------------------------------------------------------------------

    records: type | None = None
    """The class of arrays, if the library records gradients of them: by `is_recorded`, `record_call` and `vjp`."""

    def is_recorded(self, leaves: Sequence[Any]) -> bool:
        """Whether the array library records a gradient of one of ``leaves``, which need not be arrays of this backend.

        Collectives are then called by `record_call`.
        """
        return False

    def record_call(
        self,
        function: Callable[..., Sequence[Any]],
        transpose: Callable[..., Mapping[int, Any]],
        leaves: Sequence[Any],
        *,
        number: int,
        saves: bool,
    ) -> Sequence[Any]:
        """Returns ``function(*leaves)``, of which the library records the gradient.

        Args:
            function: takes arrays, of which the library records nothing, and other leaves as they are; returns a result
                for each of them. It may suspend the program.
            transpose: ``transpose(cotangents, shapes, leaves, results)`` returns the cotangents of those leaves of
                which a gradient is wanted, given those of their results; both are dicts by the numbers of the leaves.
                ``shapes`` are those of the arrays in ``leaves``. It may suspend the program, too, which the library's
                backward pass may not permit: then that has to run in `beside_program`.
            leaves: the arguments.
            number: how many calls the program has recorded before. The backward pass has to take calls that it can
                take in any order in the order of their numbers, the greatest first, so that all programs agree.
            saves: whether ``transpose`` needs the elements of the leaves and of the results.
        """
        raise self._lacks("record_call")

    def vjp(self, function: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Any, Callable[..., Sequence[Any]]]:
        """Returns the result of a function and the function that multiplies cotangents by its Jacobian, both computed
        by the library's own differentiation: for functions that call the library directly.

        Args:
            function: takes the arrays, and returns a list of arrays and other objects.
            arrays: the arguments: arrays of this backend.

        Returns:
            The list of results, which have no gradients of the library, and ``pull(cotangents)``, which takes a
            cotangent, or None for zero, for each of the results, and returns one for each of ``arrays``, None for those
            that have none. It is called in a program at the same position of the same axes, once, unless each call but
            the last is ``pull(cotangents, True)``. Complex numbers follow JAX's conventions. Collectives in the
            function have the transposes with which all programs together compute the gradient of the sum of their
            products of results and cotangents.
        """
        raise self._lacks("vjp")

    def dtype_of(self, array: Any) -> np.dtype[Any]:
        """Returns the NumPy dtype of an array's elements."""
        dtype: np.dtype[Any] = np.dtype(array.dtype)
        return dtype

    def has_dtype(self, dtype: np.dtype[Any]) -> bool:
        """Whether arrays can have this dtype, and the operators support it."""
        return True

    def view(self, array: Any, index: Any) -> Any:
        """Returns the view of ``array`` at a basic index (integers, slices with any step, None, Ellipsis).

        A result without dimensions is a 0-d array or an array scalar. See also `negative_strides`.
        """
        return array[index]

    def fill_where(self, out: Any, mask: Any, value: Any) -> None:
        """Writes a scalar to the elements of ``out``, whose device is current, where a mask of its shape is true."""
        out[mask] = value

    def store(self, out: Any, index: Any, array: Any) -> None:
        """Writes an array to the elements of ``out``, whose device is current, that a basic index selects."""
        out[index] = array

    def contiguous(self, array: Any) -> Any:
        """Returns ``array`` in row-major order: itself if it is contiguous, else a copy on the current device."""
        return self.xp.reshape(self.xp.reshape(array, (-1,)), array.shape)

    def is_contiguous(self, array: Any) -> bool:
        """Whether ``array`` is contiguous in row-major order, so that reshaping it gives a view."""
        return bool(array.flags.c_contiguous)

    def device_of(self, array: Any) -> Device:
        """Returns the device of an array that was created outside the library, as far as the array determines it.

        Among devices that share its memory, that is the device on which the enclosing mapped function runs, else the
        first one.
        """
        here = current_device()
        return here if here is not None and here in self.devices() else self.devices()[0]

    def export(self, array: Any) -> Any:
        """Returns the view of a shard that is handed to users: read-only where the array library can enforce it."""
        return array

    def lend(self, array: Any) -> tuple[Any, Callable[[], object] | None]:
        """Returns what `export` does, and its lease: a function that returns None as soon as neither the exported array
        nor anything derived from it exists.

        The function is called at any time, in any thread; a weak reference is one. The memory is then written in place
        again. Where it is None, as it is by default, the memory is copied before the next write.
        """
        return self.export(array), None

    def owns(self, array: Any) -> bool:
        """Whether an array that user code made or received is neither a view nor what `export` or `lend` returned.

        False, the default, is always correct.
        """
        return False

    def adopt(self, held: list[Any], shards: Sequence[Any]) -> tuple[Any, bool]:
        """Converts an array that a mapped function returned into one that cannot be written from outside.

        Args:
            held: a list with the array, as in `is_exclusive`; its device is current.
            shards: the arrays that were passed to the function, to which nothing writes while the array exists.

        Returns:
            The array, and whether it is a copy. Without a copy, it is exclusive or shares the memory of a shard.
        """
        return self.xp.asarray(held[0], copy=True), True

    def is_exclusive(self, held: list[Any], others: int = 0) -> bool:
        """Whether the memory of an array that user code made can be reached only through the list that holds it.

        The library asks this about arrays that it receives: the result of a mapped function, or a donated array. False
        is always a correct answer: the array is copied then. Of its own arrays the library knows which it has handed
        out (see `memory_of` and `lend`).

        Args:
            held: a list with the array as its only item, to which the caller has no other reference: how a variable
                counts depends on the version of Python. Its device is current.
            others: the number of further references to the array, in containers or attributes, that the caller knows
                of.
        """
        return False

    def memory_of(self, array: Any) -> Hashable | None:
        """Identifies the memory of an array: equal for all arrays that share it, as long as one of them exists.

        None if something else than the library and its users may write to the memory, or if it is unknown: such arrays
        are copied before they are written. The default knows the memory of NumPy's arrays.
        """
        return memory_of(array) if self.on_host else None

    def is_whole(self, view: Any, array: Any) -> bool:
        """Whether a view has all elements of an array, in the same order. The default knows NumPy's arrays."""
        return self.on_host and (view.shape, view.strides, view.dtype) == (array.shape, array.strides, array.dtype)

    def begin_write(self, array: Any) -> bool:
        """Prepares an array, whose memory nothing else holds, for a write in place; its device is current.

        An implementation makes the array writable, and orders the device after other devices that still read it. False
        if the array cannot be written, or two of its elements have the same address. The default tests NumPy's arrays.
        """
        return not self.on_host or (bool(array.flags.forc) and make_writable(array))

    # -- other memories and libraries --------------------------------------------------------------

    def offload(self, array: Any, device: Device) -> tuple[Any, Any]:
        """Copies an array of ``device`` to pinned host memory, from which the device copies fast.

        Neither the device nor the caller has to wait for the copy.

        Returns:
            The copy, and a token for its completion (see `settle`); the token is None if the copy is complete.
        """
        return self.to_host(array, device), None

    def pin(self, host: HostArray) -> Any:
        """Returns a copy of a host array in the memory that `offload` copies to."""
        return np.array(host, order="C")

    def onload(self, host: Any, device: Device, after: Any) -> tuple[Any, Any]:
        """Copies the result of `offload` or `pin` to ``device``, which is current, after the token ``after``.

        Returns:
            The array, and a token after which the device may use it (see `wait`); the token is None if the device may
            use the array at once.
        """
        return self.from_host(host, device), None

    def settle(self, token: Any) -> None:  # noqa: B027 - likewise
        """Blocks until the copy to which a token of `offload` belongs is complete."""

    def to_dlpack(self, array: Any) -> Any:
        """Returns the object with ``__dlpack__`` that exports ``array`` to another library; its device is current."""
        return array

    def dlpack_device(self, device: Device) -> tuple[int, int]:
        """Returns the DLPack device type and device id of the memory that ``device`` allocates from."""
        return HOST_MEMORY

    def from_dlpack(self, x: Any, device: Device) -> Any:
        """Returns an array on ``device``, which is current, that shares the memory of ``x``.

        ``x`` is an object with ``__dlpack__`` in the memory that `dlpack_device` names. The array is ordered after the
        operations that the producer of ``x`` has queued.
        """
        return self.xp.from_dlpack(x)

    # -- kernels of jit ----------------------------------------------------------------------------

    def host_view(self, array: Any) -> HostArray:
        """Returns a writable NumPy array with the memory of ``array``, for backends whose `kernel_language` is C."""
        raise self._lacks("host_view")

    def elementwise_kernel(self, inputs: str, outputs: str, operation: str, name: str, preamble: str) -> Kernel:
        """Returns a CUDA kernel for all elements of arrays, for backends whose `kernel_language` is CUDA.

        It is called on the current device with inputs, which are arrays of any strides that broadcast or numbers, and
        the arrays for the outputs, and returns at once. Floating-point operations are not contracted.

        Args:
            inputs, outputs: dtypes and names, such as ``"float32 x, int64 n"``.
            operation: the statements that compute one element of the outputs.
            name: the name of the kernel.
            preamble: definitions before the kernel.
        """
        raise self._lacks("elementwise_kernel")

    def raw_kernel(self, text: str, name: str) -> RawKernel:
        """Returns the function ``name`` of a CUDA text, for backends whose `kernel_language` is CUDA.

        It is called on the current device with the number of blocks, the numbers of threads of a block along its three
        dimensions, and the arguments: arrays, of which it gets the address, and NumPy numbers; it returns at once.
        """
        raise self._lacks("raw_kernel")

    def product_of_bfloat16(self, x1: Any, x2: Any, dtype: np.dtype[Any]) -> Any:
        """Returns the matrix product of arrays of bfloat16 of two or more dimensions, for backends that
        `multiplies_bfloat16`.

        Args:
            x1, x2: the arrays, on the current device; their leading dimensions broadcast.
            dtype: bfloat16 or float32, to which the sums, computed in float32, are rounded once.
        """
        raise BackendError(f"backend {self.name}: multiplies_bfloat16 needs product_of_bfloat16; define this method")

    def arrays_in(self, block: Any, parts: Sequence[tuple[int, tuple[int, ...], np.dtype[Any]]]) -> list[Any]:
        """Returns arrays in the memory of another one, for backends that capture graphs (`captures`).

        Args:
            block: a contiguous array of bytes.
            parts: the first byte, the shape and the dtype of each array, which is contiguous.
        """
        raise self._lacks("arrays_in")

    def address_of(self, array: Any) -> tuple[int, tuple[int, ...]]:
        """Returns the address and the strides of an array, for backends that capture graphs (`captures`)."""
        raise self._lacks("address_of")

    def capture(self, launch: Callable[[], None]) -> Callable[[], None] | None:
        """Returns a function that launches on the current device what ``launch`` launches, as one graph.

        ``launch`` launches kernels that have run before with arguments of the same kinds, and allocates nothing. Here,
        they are recorded and do not run. The graph has the addresses of their arrays and the numbers that they are
        given, and holds no memory: the caller launches it only while arrays of the same shapes are at all of these
        addresses, and in one thread at a time.

        Returns:
            The function; None, as by default, if there is no graph, so that the caller launches the kernels.
        """
        return None

    def _lacks(self, method: str) -> BackendError:
        return BackendError(
            f"backend {self.name}: kernel_language is {self.kernel_language!r}, for which jit needs {method}; define "
            "this method, or set kernel_language to None"
        )

    def all_reduce(self, arrays: Sequence[Any], devices: Sequence[Device], operator: str) -> list[Any] | None:
        """Reduces integer arrays of equal shapes, one on each device, and returns the result on every device.

        Backends implement it with a collectives library that is faster than copies and additions.

        Args:
            arrays: the operands, one for each device.
            devices: their devices.
            operator: the reduction: ``"add"``, ``"multiply"``, ``"maximum"`` or ``"minimum"``.

        Returns:
            The results in the order of ``devices``, or None if there is no such library.
        """
        return None


def current_device() -> Device | None:
    """Returns the device on which the enclosing mapped function runs; None outside of mapped functions."""
    device: Device | None = getattr(innermost(), "device", None)
    return device


Beside: TypeAlias = Callable[[Callable[[], Any]], Any]

_beside: Beside | None = None


def call_beside_by(beside: Beside) -> None:
    """Sets what `beside_program` does; the package of maps calls it."""
    global _beside
    _beside = beside


def beside_program(function: Callable[[], Any]) -> Any:
    """Calls a function of an array library that calls collectives from where a program cannot be suspended, such as
    from a C++ function that keeps state of the thread. Returns its result.

    The function runs in a thread of its own, with a copy of the context of the program, which waits and makes the
    collective calls. Outside of programs, and in such a thread, it is called directly.
    """
    return function() if _beside is None else _beside(function)


MOST_DEVICES = 1 << 16
"""The maximal number of logical devices of a backend: each is an object. An `AbstractMesh` may have more."""


device_counts: dict[str | None, int] = {}
"""The numbers that `st.set_num_devices` set: that of a backend by its name, and by None that of all others."""

hardware_shares: dict[str, list[int]] = {}
"""The numbers of the physical devices that this process uses, by backend, where processes divide them."""

starting: ContextVar[str | None] = ContextVar("shardtensor_starting", default=None)
"""The name of the backend that is being instantiated, so that a plugin need not give it to `logical_device_count`."""


def requested_devices() -> int | None:
    """Returns the number of logical devices that the program requests for the backend that is being instantiated: the
    number set by `st.set_num_devices`, else ``SHARDTENSOR_NUM_DEVICES``; None if neither is set.

    Raises:
        BackendError: the variable is used and is not an integer from 1 to `MOST_DEVICES`.
    """
    number = device_counts.get(starting.get()) or device_counts.get(None)
    return number or count_from_environment("SHARDTENSOR_NUM_DEVICES", MOST_DEVICES)


def own_hardware(count: int) -> list[int]:
    """Returns the numbers of the physical devices that this process uses, of ``count`` that it sees: of those that it
    shares with other processes of a job, its part. Backends call it in ``__init__``; see `Backend.hardware`.
    """
    return hardware_shares.get(starting.get() or "", list(range(count)))


def logical_device_count(default: int | None = None) -> int:
    """Returns the number of logical devices that a backend offers: the number set by `st.set_num_devices`, else
    ``SHARDTENSOR_NUM_DEVICES``, else ``default``, else the number of usable cores. Backends call it in ``__init__``.
    Raises BackendError as `requested_devices`.
    """
    return requested_devices() or (usable_cores() if default is None else default)
