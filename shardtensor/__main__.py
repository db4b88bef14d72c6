"""``python -m shardtensor``: the command line without the script on the path."""

from __future__ import annotations

import sys

from shardtensor.cli import main

if __name__ == "__main__":
    sys.exit(main())
