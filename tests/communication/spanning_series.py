"""Runs several of the programs beside it in one job, or in one process alone: ``spanning_series.py COMMANDS``.

COMMANDS is a list, in JSON, of the path of each program and its arguments. Processes start once for all of them.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from unittest import mock

from shardtensor import distributed
from shardtensor.backend import registry
from shardtensor.testing.checked import CheckedBackend


def main(commands: str) -> None:
    alone = os.environ.get("SHARDTENSOR_ALONE")
    if alone:
        registry.install(CheckedBackend(sharing=int(alone)))
    distributed.initialize(engine="local" if alone else None, timeout=20)
    for path, *arguments in json.loads(commands):
        with mock.patch.multiple(distributed, initialize=lambda **_: None, shutdown=lambda: None):
            sys.argv = [path, *arguments]
            runpy.run_path(path, run_name="__main__")
    distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
