"""The suite that proves a backend. Importing this loads pytest and hypothesis."""

from __future__ import annotations

from shardtensor.testing.arrays import ArrayTests
from shardtensor.testing.collectives import CollectiveTests
from shardtensor.testing.devices import DeviceTests
from shardtensor.testing.ordering import OrderTests
from shardtensor.testing.ownership import OwnershipTests
from shardtensor.testing.tensors import TensorTests

__all__ = ["BackendTests"]


class BackendTests(DeviceTests, ArrayTests, OrderTests, OwnershipTests, TensorTests, CollectiveTests):
    """What a backend promises, rule by rule: a class of pytest's, to be subclassed. A failure names the rule of
    `shardtensor.backend.Backend` that is broken, and what was found instead.

    Attributes:
        backend: the name of the backend, under which it is installed.
        examples: how many calls of each operator are drawn; other tests draw a few times as many.
        chain: how many operations are queued before somebody looks.
        size: how many elements the arrays have with which this is done; larger ones make slow devices show more.
        unclaimed: operators (see `shardtensor.OPS`) that the backend does not have. They must raise a
            `ShardTensorError` that says so; the tests see that they never give a wrong answer.

    Nothing is assumed of the devices but their protocol, and all dtypes but one of int64, int32, float32 and float64
    may be missing (see `Backend.has_dtype`). With one device alone, what needs two is skipped.

    >>> from shardtensor.testing import BackendTests
    >>> class TestMine(BackendTests):
    ...     backend = "numpy"
    >>> TestMine().test_devices_are_values()
    """
