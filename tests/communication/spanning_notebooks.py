"""A program that runs the code of a notebook on tensors that span processes: ``spanning_notebooks.py FILE NOTEBOOK``.

Process 0 writes a line for each cell to the file: its number, and a hash of the bits of all arrays that have names after
it. Jobs with as many devices in other numbers of processes have to write the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import shardtensor as st
from shardtensor import distributed
from shardtensor.backend import registry
from shardtensor.tensor.pytree import leaves
from shardtensor.testing.checked import CheckedBackend
from tests.communication.spanning_programs import whole

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"

ELSEWHERE: dict[str, set[int]] = {
    "01_sharding": {3, 5, 6, 8, 9, 11, 21},  # lists of shards, which are of one process
    "02_writing": {5, 11},  # elements and addresses of arrays of another process
    "03_parallel_tutorial": {31},  # a program without the collective of the others: it is an error of another text
    "04_training": {13, 15, 29, 31},  # lists of shards; shards of other processes; PyTorch's devices
    "05_patterns": {19},  # lists of shards
    "06_gpt": {13},  # a folder of this process for checkpoints
}
"""The cells that are about one process."""

INSTEAD = {
    "04_training": {
        7: "n = st.device_count()",
        9: "RATE, STEPS = 0.5, 30",
        11: "alone = st.devices()[0]\nrows_alone, targets_alone = st.device_put((rows, targets), alone)",
    },
}
"""What is left of other cells about lists of shards."""

SEVERAL = {"03_parallel_tutorial": {29, 47}}
"""The cells that need eight devices, or several in each process: otherwise only the next exchange compares results."""

OF_PRODUCTS = {"03_parallel_tutorial": {43}, "04_training": {5, 25, 27}, "06_gpt": {9, 11}}
"""The cells with products of matrices whose rows are split: a process multiplies its rows, and the bits of some BLAS
libraries on some processors depend on how many these are (see docs/many_processes.md).
"""


def has_bits_of_parts() -> bool:
    """Whether the product of some rows has the bits of these rows in the product of all."""
    left, right = np.random.default_rng(0).normal(size=(1797, 32)), np.random.default_rng(1).normal(size=(32, 10))
    parts = [np.concatenate([rows @ right for rows in np.array_split(left, n)]) for n in (2, 3, 4)]
    return all(np.array_equal(left @ right, part) for part in parts)


def gathered(x: Any) -> Any:
    """Returns the elements of an array in all processes, also of one that is in some of them."""
    if isinstance(x, st.ShardedTensor) and x.sharding.mesh.size < st.device_count():
        x = st.reshard(x, st.make_mesh((st.device_count(),), ("all",)))
    return whole(x)


class Gathering:
    """NumPy, of which `asarray` and `array` gather tensors that span processes; `array`, those of a list, too."""

    @staticmethod
    def asarray(x: Any, *args: Any, **params: Any) -> Any:
        return np.asarray(gathered(x), *args, **params)

    @staticmethod
    def array(x: Any, *args: Any, **params: Any) -> Any:
        return np.array([gathered(one) for one in x] if isinstance(x, list) else x, *args, **params)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def cells(name: str) -> list[tuple[int, str]]:
    """The code of the cells that run, for the devices of this job, with their numbers."""
    book, count = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text()), st.device_count()
    skipped, lines = ELSEWHERE[name], r"^(import numpy as np|st\.set_num_devices.*)$"
    if not has_bits_of_parts():
        skipped = skipped | OF_PRODUCTS.get(name, set())
    ours = {"for count in (1, 2, 4, 8)": f"for count in ({count},)", "runs[8]": f"runs[{count}]"}
    if count != 8:
        skipped, lines = skipped | SEVERAL.get(name, set()), f"{lines}|^assert .*(bytes|sent|8).*$"
        meshes = {"(8,)": f"({count},)", "(4, 2)": f"({count}, 1)", "(2, 4)": f"(1, {count})"}
        ours[":1760"] = f":{220 * count}"
        ours |= {f"make_mesh({mesh}": f"make_mesh({other}" for mesh, other in meshes.items()}
    found = []
    for number, cell in enumerate(book["cells"]):
        if cell["cell_type"] == "code" and number not in skipped:
            code = INSTEAD.get(name, {}).get(number) or re.sub(lines, "", "".join(cell["source"]), flags=re.MULTILINE)
            for theirs, instead in ours.items():
                code = code.replace(theirs, instead)
            found.append((number, code))
    return found


def digest(space: dict[str, Any]) -> str:
    """Returns a hash of the arrays and numbers that have names."""
    bits = hashlib.blake2b(digest_size=8)
    for name in sorted(name for name in space if not name.startswith("_")):
        for leaf in leaves(space[name]):
            if isinstance(leaf, (st.ShardedTensor, np.ndarray, float)) and not getattr(leaf, "is_donated", False):
                found = gathered(leaf)
                bits.update(f"{name} {found.dtype} {found.shape}".encode())
                bits.update(np.ascontiguousarray(found).tobytes())
    return bits.hexdigest()


def main(path: str, name: str) -> None:
    alone = os.environ.get("SHARDTENSOR_ALONE")
    if alone:
        registry.install(CheckedBackend(sharing=int(alone)))
    distributed.initialize(engine="local" if alone else None, timeout=20)
    space: dict[str, Any] = {"np": Gathering(), "__name__": "notebook"}
    with Path(path if distributed.process_index() == 0 else os.devnull).open("a") as file:
        for number, code in cells(name):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(code, f"{name}, cell {number}", "exec"), space)
            print(number, digest(space), file=file, flush=True)
    distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
