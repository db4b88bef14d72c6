"""The tests. They keep compiled code on disk, also where the environment says otherwise: else each of the hundreds of
processes that they start would compile the library, and each worker of pytest-xdist would rewrite all assertions.
"""

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
