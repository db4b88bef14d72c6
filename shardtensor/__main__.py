"""``python -m shardtensor`` runs the command line, also where the ``shardtensor`` script is not on the path."""

from __future__ import annotations

import sys

from shardtensor.cli import main

if __name__ == "__main__":
    sys.exit(main())
