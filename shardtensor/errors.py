"""The handful of errors: each is the builtin one that a NumPy user expects, and one of ours."""

from __future__ import annotations


class ShardTensorError(Exception):
    """Base class of every error that this library raises on purpose."""


class ShapeError(ShardTensorError, ValueError):
    """Shapes or sizes do not fit one another."""


class AxisError(ShardTensorError, ValueError, IndexError):
    """An axis that the array does not have (like NumPy's, both a ValueError and an IndexError)."""


class ArgumentError(ShardTensorError, ValueError):
    """A value that a function does not take."""


class ArgumentTypeError(ShardTensorError, TypeError):
    """An object of a kind that a function does not take."""


class RangeError(ShardTensorError, OverflowError):
    """A number that the dtype of the elements cannot hold."""


class IndexingError(ShardTensorError, IndexError):
    """An index out of bounds, or of a form that cannot index."""


class ShardingError(ShardTensorError, ValueError):
    """A mesh, spec, sharding or device that cannot be, or that does not fit the array."""


class BackendError(ShardTensorError, RuntimeError):
    """A backend or device that is missing, broken or used against its rules."""


class DeviceMemoryError(ShardTensorError, MemoryError):
    """A device's memory is full; what was there before is still there."""


class InterchangeError(ShardTensorError, BufferError):
    """Memory that cannot be shared with another library as it was asked for."""


class TransferError(ShardTensorError, RuntimeError):
    """An implicit move of bytes under ``transfer_guard("disallow")``."""


class DonatedError(ShardTensorError, RuntimeError):
    """A tensor that is used after its memory was given away with ``donate=True``."""


class CollectiveError(ShardTensorError, RuntimeError):
    """Devices that wait for one another in vain: they call different things, or one of them failed or left.

    Attributes:
        told: whether it tells a device of what another one did.
    """

    secondary = False
