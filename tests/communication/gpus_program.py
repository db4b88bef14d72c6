"""A program on the simulated CuPy that prints which of two GPUs its process uses, and sums over all processes."""

import numpy as np

import shardtensor as st
from shardtensor import distributed
from shardtensor.backend.registry import memory_space
from tests import fakecupy

fakecupy.install()
distributed.initialize(timeout=20)
print("GPUs", sorted({memory_space(device)[1] for device in st.local_devices()}))
x = st.asarray(np.arange(10.0), device=st.make_mesh((st.device_count(),), ("x",)))
assert float((x + 1).sum()) == 55
distributed.shutdown()
