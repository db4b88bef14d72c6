"""Runs the programs of `shardtensor.testing.engines` on the simulated CuPy, where each process has its own GPU."""

import os
import sys

from shardtensor.backend.protocol import hardware_shares
from shardtensor.testing import engines
from tests import fakecupy

fakecupy.install(devices=4)
hardware_shares["cupy"] = [int(os.environ.get("PMI_RANK") or os.environ["SHARDTENSOR_PROCESS_ID"])]
engines.main(*sys.argv[1:])
