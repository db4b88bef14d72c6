"""A job that compares the losses of docs/examples/gpt.py in a layout, the argument, with those of PyTorch."""

from __future__ import annotations

import sys

import shardtensor as st
from tests.examples.training import LAYOUTS, OPTIMIZERS, check, losses

if __name__ == "__main__":
    st.set_num_devices(2)
    st.distributed.initialize()
    for optimizer in OPTIMIZERS:
        for dtype in ("float64", "float32"):
            check(losses(optimizer, dtype, *LAYOUTS[sys.argv[1]]), optimizer, dtype)
