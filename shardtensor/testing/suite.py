"""The conformance suite for backends. Importing this module loads pytest and hypothesis."""

from __future__ import annotations

from shardtensor.testing.arrays import ArrayTests
from shardtensor.testing.collective_tests import CollectiveTests
from shardtensor.testing.devices import DeviceTests
from shardtensor.testing.ordering_tests import OrderTests
from shardtensor.testing.ownership_tests import OwnershipTests
from shardtensor.testing.tensors import TensorTests

__all__ = ["BackendTests"]


class BackendTests(DeviceTests, ArrayTests, OrderTests, OwnershipTests, TensorTests, CollectiveTests):
    """The conformance tests of a backend: a pytest class, to be subclassed.

    A failure names the rule of `shardtensor.backend.Backend` that is violated, and the values found.

    Attributes:
        backend: the name under which the backend is registered.
        examples: the number of calls drawn for each operator; other tests draw a few times as many.
        chain: the number of operations queued before a result is read.
        size: the number of elements of the arrays in these operations. Larger arrays increase the chance of detecting
            missing synchronization on slow devices.
        unclaimed: the operators (see `shardtensor.OPS`) that the backend does not implement. They must raise a
            `ShardTensorError`; the tests check that they never return a wrong result.

    The tests assume only the `Backend` protocol. The backend must have at least one of the dtypes int64, int32,
    float32 and float64; all others may be missing (see `Backend.has_dtype`). Tests that need two devices are skipped
    if there is only one.

    >>> from shardtensor.testing import BackendTests
    >>> class TestMine(BackendTests):
    ...     backend = "numpy"
    >>> TestMine().test_devices_are_values()
    """
