"""A job that compares the losses of docs/examples/gpt.py in a layout, the argument, with those of PyTorch."""

from __future__ import annotations

import sys

import shardtensor as st
from tests.examples.training import LAYOUTS, check, losses

if __name__ == "__main__":
    st.set_num_devices(2)
    st.distributed.initialize()
    for optimizer, dtype in (("sgd", "float64"), ("adamw", "float32")):
        found = losses(optimizer, dtype, *LAYOUTS[sys.argv[1]])
        if st.process_index() == 0:  # The others would use its cores.
            check(found, optimizer, dtype)
