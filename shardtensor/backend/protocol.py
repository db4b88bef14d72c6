"""What drives devices: `Device`, and the `Backend` that a plugin implements (`shardtensor.backend.registry` finds
them).

Writing one
-----------
Subclass `Backend`, implement the abstract members, and register it::

    [project.entry-points."shardtensor.backends"]
    mine = "my_package:MyBackend"

The class is instantiated once per process, without arguments. If its devices cannot be used here, raise
`BackendError` in ``__init__`` saying why and what to do; ``shardtensor info`` and ``st.devices("mine")`` show it.
The module that the entry point names is imported to read the class's `priority`: import the array library itself in
``__init__``. `shardtensor.testing.BackendTests` is the suite that proves a backend.

Arrays of a backend are its own; the library touches them through `Backend.xp` and the methods below, always inside
``with backend.on(device)``. Which device an array belongs to is known to the tensor that holds it, never asked of
the array, so that several logical devices may share a physical one. Of the arrays themselves it asks ``shape``,
``ndim``, ``nbytes``, ``real`` and ``imag``, index arrays (of the same backend), and assignment to what slices, index
arrays and masks select.

Devices may work behind the caller's back, each in the order in which it was told. What crosses devices is ordered by
`record` and `wait`; what comes from the caller's own use of the array library, or goes back to it, by `wait_for_caller`
and `make_caller_wait`.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from shardtensor.backend.device import HOST_MEMORY, Device, HostArray
from shardtensor.backend.ownership import FRAME
from shardtensor.core import innermost
from shardtensor.errors import BackendError
from shardtensor.host.limits import count_from_environment, memory, usable_cores
from shardtensor.host.memory_pool import owner_of as owner_of


class Backend(abc.ABC):
    """What a plugin implements to bring devices of one kind.

    Required: `name`, `devices`, `xp`, `is_array`, `to_device`, `from_host`, `to_host`. The rest has defaults that
    hold for memory that is synchronous and private to each device.
    """

    name: str
    """The name under which it is registered."""

    priority: int = 0
    """The default backend is the usable one of highest priority (numpy: 0). One of negative priority (checked, torch)
    is used only where it is named.
    """

    simulated: bool = False
    """Its devices do not exist, and its arrays have no elements: see `shardtensor.backend.abstract`."""

    shared_memory: bool = False
    """All devices share the host's memory and arrays are NumPy's: a tensor is then one buffer cut into views."""

    negative_strides: bool = True
    """What `view` gives for a slice with a negative step is a view, too, through which can be written."""

    pinned_host: bool = False
    """Memory kind ``pinned_host`` is a memory of its own (`offload`, `onload`); else it is but a name."""

    helper_delay: float = 200e-6
    """Seconds that a mapped call may take before it counts as one that blocks, and others start in helper threads."""

    @abc.abstractmethod
    def devices(self) -> Sequence[Device]:
        """All devices, in order of their ids; never empty."""

    @property
    @abc.abstractmethod
    def xp(self) -> Any:
        """The array-API namespace that works on this backend's arrays, on the device that is current.

        It is NumPy's in what the standard leaves open: dtypes are given as NumPy's, Python scalars mix with arrays,
        elementwise functions take ``out=`` (which may be an operand, at the same place), ``asarray`` takes ``copy``.
        """

    @abc.abstractmethod
    def is_array(self, x: object) -> bool:
        """Whether ``x`` is one of this backend's arrays (or array scalars)."""

    @abc.abstractmethod
    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        """A copy of ``array``, which is in row-major order on ``source``, on ``destination``: nobody else's.

        The only call that crosses devices. The caller has ordered ``destination`` after what ``source`` had queued
        (`record`, `wait`), and ``destination`` is current. Where devices work behind the caller's back, the memory of
        ``array`` must neither be given to others nor be `is_exclusive` before it is read.
        """

    @abc.abstractmethod
    def from_host(self, array: HostArray, device: Device) -> Any:
        """A copy of a host array on ``device``, which is current; the host array may be written afterwards."""

    @abc.abstractmethod
    def to_host(self, array: Any, device: Device) -> HostArray:
        """The values of ``array``, which lives on ``device``, as a host array, once they are computed. ``device`` is
        current.
        """

    # -- devices -----------------------------------------------------------------------------------

    def on(self, device: Device) -> AbstractContextManager[object]:
        """Makes ``device`` current in this thread, and what was current before again at the end, also on an error."""
        return contextlib.nullcontext()

    def capture_modes(self) -> Callable[[], None] | None:
        """What sets the library's modes in this thread (whether gradients are recorded, and the like) to what they are
        now; None where it has none. Several programs take turns in a thread: each begins with its caller's modes, and
        finds its own again.

        Raises:
            BackendError: the caller is where a program could not be left and come back to.
        """
        return None

    def adjacent_devices(self, count: int) -> Sequence[Device]:
        """``count`` devices such that neighbours reach one another as fast as can be: what `make_mesh` takes."""
        return self.devices()[:count]

    def memory_info(self, device: Device) -> tuple[int, int] | None:
        """Bytes (free, total) of the memory that ``device`` allocates from; None where nobody knows."""
        return None

    # -- order -------------------------------------------------------------------------------------

    def record(self, device: Device) -> Any:
        """A token for everything queued on ``device`` so far. None where calls are synchronous."""
        return None

    def wait(self, device: Device, token: Any) -> None:  # noqa: B027 - calls that are synchronous are ordered
        """What is queued on ``device`` from now on runs after ``token``."""

    def synchronize(self, device: Device) -> None:  # noqa: B027 - likewise
        """Returns when ``device`` has nothing left to do.

        Raises:
            BackendError: something that was queued failed; it names the device.
        """

    def wait_for_caller(self, device: Device) -> None:  # noqa: B027 - likewise
        """What is queued on ``device`` from now on runs after what the caller has queued by himself."""

    def make_caller_wait(self, device: Device) -> None:  # noqa: B027 - likewise
        """What the caller queues by himself from now on runs after what is queued on ``device``."""

    # -- arrays ------------------------------------------------------------------------------------

    def asarray(self, x: Any) -> Any:
        """An array of this backend from what `is_array` accepts (array scalars become 0-d arrays)."""
        return x

    def dtype_of(self, array: Any) -> np.dtype[Any]:
        """The NumPy dtype of an array's elements."""
        dtype: np.dtype[Any] = np.dtype(array.dtype)
        return dtype

    def has_dtype(self, dtype: np.dtype[Any]) -> bool:
        """Whether there are arrays of that dtype, and operators for them."""
        return True

    def view(self, array: Any, index: Any) -> Any:
        """The elements at a basic index (integers, slices with any step, None, Ellipsis): a view; of no dimensions, or
        an array scalar, where one is left. See `negative_strides`.
        """
        return array[index]

    def contiguous(self, array: Any) -> Any:
        """``array`` in row-major order: itself if it is, else a copy on the current device."""
        return self.xp.reshape(self.xp.reshape(array, (-1,)), array.shape)

    def is_contiguous(self, array: Any) -> bool:
        """Whether ``array`` is in row-major order, so that in another shape it is a view."""
        return bool(array.flags.c_contiguous)

    def device_of(self, array: Any) -> Device:
        """Where an array that comes from outside lives, as far as the array itself can tell. Of devices that share its
        memory, the one that the mapped function around this call runs on, else the first one.
        """
        here = current_device()
        return here if here is not None and here in self.devices() else self.devices()[0]

    def export(self, array: Any) -> Any:
        """The view of a shard that a user may hold: read-only where the library can enforce it."""
        return array

    def adopt(self, result: Any, shards: Sequence[Any]) -> tuple[Any, bool]:
        """An array that nobody outside can write, from one that a mapped function returned; and whether it is a copy.

        ``shards`` are the arrays that the function was given. The caller holds one reference to ``result``, and its
        device is current.
        """
        return self.xp.asarray(result, copy=True), True

    def is_exclusive(self, array: Any, holders: int) -> bool:
        """Whether nothing reaches the memory of ``array`` but the ``holders`` references that the caller knows of (its
        variables included, see `references`), and no two of its elements share a place. It is then made writable. Its
        device is current. False is always right: what is not alone is copied before it is written.
        """
        return False

    def release(self, array: Any, holders: int = 1) -> tuple[Any, bool]:
        """An array that its only holder may write, from one that was given up; and whether it is a copy."""
        if self.is_exclusive(array, holders + FRAME):
            return array, False
        return self.contiguous(self.xp.asarray(array, copy=True)), True

    # -- other memories and libraries --------------------------------------------------------------

    def offload(self, array: Any, device: Device) -> tuple[Any, Any]:
        """A copy of an array of ``device`` in host memory that the device copies fast from, and a token for when it is
        complete (`settle`; None if it is). The device need not wait for it, nor the caller.
        """
        return self.to_host(array, device), None

    def pin(self, host: HostArray) -> Any:
        """A copy of a host array in the memory that `offload` copies to."""
        return np.array(host, order="C")

    def onload(self, host: Any, device: Device, after: Any) -> tuple[Any, Any]:
        """The way back from what `offload` or `pin` gave, once the token ``after`` is reached: an array of ``device``,
        which is current, and a token after which the device may use it (`wait`; None if it may).
        """
        return self.from_host(host, device), None

    def settle(self, token: Any) -> None:  # noqa: B027 - likewise
        """Returns when what the token of `offload` stands for is done."""

    def to_dlpack(self, array: Any) -> Any:
        """What another library takes by DLPack; its device is current."""
        return array

    def dlpack_device(self, device: Device) -> tuple[int, int]:
        """The DLPack device type and number of the memory that ``device`` allocates from."""
        return HOST_MEMORY

    def from_dlpack(self, x: Any, device: Device) -> Any:
        """An array on ``device``, which is current, that shares the memory of ``x`` (an object with ``__dlpack__`` in
        the memory that `dlpack_device` names), ordered after what its producer has queued.
        """
        return self.xp.from_dlpack(x)

    def all_reduce(self, arrays: Sequence[Any], devices: Sequence[Device], operator: str) -> list[Any] | None:
        """The sum, product, maximum or minimum (``operator`` is ``"add"``, ``"multiply"``, ``"maximum"`` or
        ``"minimum"``) of integer arrays of equal shapes, one on each device, on all of them; by a library that does so
        faster than copies and additions. None where there is none.
        """
        return None


def function_of(backend: Backend, name: str) -> Callable[..., Any]:
    """An operator's function in a backend's namespace.

    Raises:
        BackendError: it has none.
    """
    try:
        function: Callable[..., Any] = getattr(backend.xp, name)
    except AttributeError:
        raise BackendError(f"{name}: backend {backend.name!r} has no such function; use another backend") from None
    return function


def current_device() -> Device | None:
    """The device that the mapped function around this call runs on, or None outside of one."""
    device: Device | None = getattr(innermost(), "device", None)
    return device


def host_memory() -> tuple[int, int] | None:
    """Bytes (free, total) of the host's memory, as far as this process can get it; None where nobody says."""
    return memory()


MOST_DEVICES = 1 << 16
"""As many logical devices a backend has at most: each is an object. An `AbstractMesh` may have more."""


def requested_devices() -> int | None:
    """How many logical devices ``SHARDTENSOR_NUM_DEVICES`` asks for; None where it is not set.

    Raises:
        BackendError: it is no whole number from 1 to `MOST_DEVICES`.
    """
    return count_from_environment("SHARDTENSOR_NUM_DEVICES", MOST_DEVICES)


def logical_device_count(default: int | None = None) -> int:
    """How many devices a backend with logical devices offers: ``SHARDTENSOR_NUM_DEVICES``, else ``default``, else the
    usable cores.

    Raises:
        BackendError: the variable is no whole number from 1 to `MOST_DEVICES`.
    """
    return requested_devices() or (usable_cores() if default is None else default)
