"""The names of `shardtensor.testing`, which are imported on first use (see `shardtensor.exports`)."""

from shardtensor.testing.checked import CheckedArray as CheckedArray
from shardtensor.testing.checked import CheckedBackend as CheckedBackend
from shardtensor.testing.engines import EngineTests as EngineTests
from shardtensor.testing.gradients import check_grads as check_grads
from shardtensor.testing.suite import BackendTests as BackendTests
