"""The exception classes. Each is a `ShardTensorError` and also a subclass of the builtin exception that NumPy users
expect.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class ShardTensorError(Exception):
    """Base class of every exception that shardtensor raises deliberately."""


class ShapeError(ShardTensorError, ValueError):
    """Shapes or sizes are incompatible with one another."""


class AxisError(ShardTensorError, ValueError, IndexError):
    """An axis is out of bounds for the array (like NumPy's AxisError, both a ValueError and an IndexError)."""


class LinearAlgebraError(ShardTensorError, np.linalg.LinAlgError):
    """A matrix is singular, or a decomposition does not exist or did not converge (a `numpy.linalg.LinAlgError`)."""


class ArgumentError(ShardTensorError, ValueError):
    """An argument has a value that the function does not accept."""


class ArgumentTypeError(ShardTensorError, TypeError):
    """An argument has a type that the function does not accept."""


class RangeError(ShardTensorError, OverflowError):
    """A Python number is out of range for the dtype of the elements."""


class IndexingError(ShardTensorError, IndexError):
    """An index is out of bounds, or is not a valid index."""


class ShardingError(ShardTensorError, ValueError):
    """A mesh, spec, sharding or device is invalid, or incompatible with the array."""


class BackendError(ShardTensorError, RuntimeError):
    """A backend or device is missing, broken, or used incorrectly."""


class DeviceMemoryError(ShardTensorError, MemoryError):
    """The memory of a device is full. Existing values stay valid."""


class InterchangeError(ShardTensorError, BufferError):
    """Memory cannot be shared with another library in the requested form."""


class ConcretizationError(ShardTensorError, TypeError):
    """The elements of a tensor are needed where only its shape, dtype and sharding are known.

    Attributes:
        message_for: returns the message for the name of the call that needs them; None if it is the same for all.
    """

    message_for: Callable[[str], str] | None = None


class NaNError(ShardTensorError, FloatingPointError):
    """An operator has returned a NaN while `shardtensor.debug_nans` is on."""


class TransferError(ShardTensorError, RuntimeError):
    """An operator would transfer bytes implicitly under ``transfer_guard("disallow")``."""


class DonatedError(ShardTensorError, RuntimeError):
    """A tensor is used after its memory was donated (``donate=True``, or ``donate_argnums`` of `shardtensor.jit`)."""


class CollectiveError(ShardTensorError, RuntimeError):
    """A collective cannot complete: the devices are in a deadlock, call different collectives, or one of them failed or
    returned before the collective.

    Attributes:
        secondary: whether the error only informs this device of a failure on another device.
    """

    secondary = False


class DistributedError(ShardTensorError, RuntimeError):
    """The processes of a job do not call the same functions, or one of them has failed, ended or not come in time.

    Afterwards the processes cannot exchange anything more: all of them have to be restarted. The message, which is the
    same in all processes wherever they know the same, names the place in the user's program of each of them.

    Attributes:
        details: the number of the call in this process, and what differs, with the identities of tensors and checksums.
    """

    def __init__(self, message: str = "", details: str = "") -> None:
        super().__init__(message)
        self.details = details


class ForkError(ShardTensorError, RuntimeError):
    """The child of a fork uses what another thread of its parent was changing at the moment of the fork."""


class NotAddressableError(ShardTensorError, RuntimeError):
    """Elements of a tensor are read in a process that does not hold them."""


def type_text(x: object) -> str:
    """Returns the name of an object's type with its article, for messages: ``a list``, ``an int``."""
    name = type(x).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def message_of(error: BaseException) -> str:
    """Returns the class and the message of an exception of other code, as ``ValueError: message``. The ``__str__`` of
    such an exception may itself raise an error, whose class is given instead.
    """
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception as failure:
        return f"{kind} (its message raises {type(failure).__name__})"
    return f"{kind}: {text}" if text else kind
