"""The cost of checkpoints: writing until the disk has all of them, reading, and reading for another layout.

``python benchmarks/checkpoint.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read the table. The
files are in the folder for temporary files (``TMPDIR``), whose file system is measured.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import machine
import tables
from harness import DEVICES, PROJECT, Case
from tables import Row, Table, Target

PLAIN = "plain files"
TENSORSTORE, ZARR, SAFETENSORS, TORCH, ORBAX = "tensorstore", "zarr-python", "safetensors", "PyTorch DCP", "Orbax"

WRITE = Row("write", "write and flush", (Target(1 / 0.9, PLAIN),))
READ = Row("read", "read, page cache", (Target(1 / 0.9, PLAIN),))
RESHARD = Row("reshard", "read rows as columns")
TOUCHED = Row("touched", "… bytes read / needed", (Target(1.3),), "×")
ROWS = (WRITE, READ, RESHARD, TOUCHED)

# The environment variables by which a worker gets its folder and the size of the array in MiB.
FOLDER, SIZE = "CHECKPOINT_FOLDER", "CHECKPOINT_MIB"

Box = tuple[tuple[int, int], tuple[int, int]]


# -- the cases, each function in a process of its own ----------------------------------------------


class Data:
    """A square array of float32 and its parts; the same for all libraries.

    Attributes:
        x: the array.
        rows: the boxes of the shards.
        columns: those of the other layout.
    """

    def __init__(self) -> None:
        import numpy as np

        n = round((int(os.environ[SIZE]) * 2**18) ** 0.5) // DEVICES * DEVICES
        self.x = np.random.default_rng(0).random((n, n), np.float32)
        bounds = list(itertools.pairwise(range(0, n + 1, n // DEVICES)))
        self.rows: list[Box] = [(both, (0, n)) for both in bounds]
        self.columns: list[Box] = [((0, n), both) for both in bounds]

    def shards(self) -> list[Any]:
        """Returns the shards."""
        return [self.x[begin:end] for (begin, end), _ in self.rows]

    def empty(self, boxes: Sequence[Box]) -> list[Any]:
        """Returns new memory for each box."""
        import numpy as np

        return [np.empty([end - begin for begin, end in box], self.x.dtype) for box in boxes]


def cases(
    data: Data,
    save: Callable[[str], Any],
    read: Callable[[str, Sequence[Box]], list[Any]],
    layouts: Sequence[str] = ("read", "reshard"),
) -> dict[str, Case]:
    """Returns the cases of a library, which measure themselves: they prepare files before they look at the clock.

    Args:
        data: the array.
        save: a function that writes it to a path that does not exist.
        read: a function that returns the elements of boxes from there, in new memory.
        layouts: the names of the cases of `read` that the library has.
    """
    boxes = {name: {"read": data.rows, "reshard": data.columns}[name] for name in layouts}
    root = os.environ[FOLDER]

    def write() -> float:
        path = os.path.join(root, "written")
        _remove(path)
        os.sync()
        begin = time.perf_counter()
        save(path)
        _flush(path)
        return time.perf_counter() - begin

    @functools.cache
    def kept() -> str:
        import numpy as np

        path = os.path.join(root, "kept")
        save(path)
        for name in layouts:
            for box, part in zip(boxes[name], read(path, boxes[name]), strict=True):
                (a, b), (c, d) = box
                assert np.array_equal(np.asarray(part), data.x[a:b, c:d])
        return path

    def reading(name: str) -> float:
        path = kept()
        begin = time.perf_counter()
        parts = read(path, boxes[name])
        seconds = time.perf_counter() - begin
        del parts  # Freeing memory takes time, too.
        return seconds

    def touched() -> float | None:
        before = _bytes_read()
        reading("reshard")
        after = _bytes_read()
        share = None if before is None or after is None else (after - before) / data.x.nbytes
        return None if share is None or share < 1 else share  # Bytes of files that are mapped are not counted.

    found: dict[str, Case] = {"write": write} | {name: functools.partial(reading, name) for name in layouts}
    return found | ({"touched": lambda: {"touched": touched()}} if "reshard" in layouts else {})


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _flush(path: str) -> None:
    """Waits until the disk has all files of a path, which takes no time where the library has waited."""
    for name in [path, *map(str, Path(path).rglob("*"))]:
        descriptor = os.open(name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _bytes_read() -> int | None:
    """Returns the bytes that this process has read from files; None if the system does not count them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return int(dict(line.split(": ") for line in lines)["rchar"])


def shardtensor_cases() -> dict[str, Case]:
    """Returns the cases of shardtensor: a tensor over logical devices, which share the memory of the host."""
    import shardtensor as st

    st.set_num_devices(DEVICES)
    data = Data()
    mesh = st.make_mesh((DEVICES,), ("d",))
    rows, columns = (st.NamedSharding(mesh, spec) for spec in (st.P("d"), st.P(None, "d")))
    x = st.device_put(data.x, rows)

    def save(path: str) -> None:
        st.checkpoint.save(path, {"x": x})

    def read(path: str, boxes: Sequence[Box]) -> list[Any]:
        found = st.checkpoint.restore(path, {"x": rows if boxes == data.rows else columns})["x"]
        return [shard.data for shard in found.addressable_shards]

    return cases(data, save, read)


def plain_cases() -> dict[str, Case]:
    """Returns the cases of bytes in files, without checksums: what the system takes. Columns are read by a map."""
    import numpy as np

    data = Data()

    def save(path: str) -> None:
        os.mkdir(path)
        for number, shard in enumerate(data.shards()):
            with open(f"{path}/{number}", "xb", buffering=0) as file:
                view, done = memoryview(shard).cast("B"), 0
                while done < len(view):
                    done += file.write(view[done:])
                os.fsync(file.fileno())

    def read(path: str, boxes: Sequence[Box]) -> list[Any]:
        parts = data.empty(boxes)
        if boxes == data.rows:
            for number, part in enumerate(parts):
                with open(f"{path}/{number}", "rb", buffering=0) as file:
                    view, done = memoryview(part).cast("B"), 0
                    while done < len(view):
                        done += file.readinto(view[done:])
            return parts
        for number, ((begin, end), (_, width)) in enumerate(data.rows):
            stored = np.memmap(f"{path}/{number}", data.x.dtype, "r", shape=(end - begin, width))
            for part, (_, (first, last)) in zip(parts, boxes, strict=True):
                part[begin:end] = stored[:, first:last]
        return parts

    return cases(data, save, read)


def _inner(data: Data) -> tuple[int, int]:
    """Returns the shape of inner chunks of 4 MiB, or of less in small arrays."""
    n = min(1024, len(data.x) // DEVICES)
    return n, n


def tensorstore_cases() -> dict[str, Case]:
    """Returns the cases of tensorstore's driver for zarr v3, with the same chunks and checksums."""
    import tensorstore as ts

    data = Data()
    little = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {"chunk_shape": _inner(data), "codecs": little, "index_codecs": little}
    chunk = {"chunk_shape": data.shards()[0].shape}
    metadata = {
        "chunk_grid": {"name": "regular", "configuration": chunk},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }

    def opened(path: str, **options: Any) -> Any:
        store = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
        return ts.open(store | options.pop("more", {}), **options).result()

    def save(path: str) -> None:
        dtype = ts.dtype(data.x.dtype)
        array = opened(path, more={"metadata": metadata}, dtype=dtype, shape=data.x.shape, create=True)
        writes = [
            array[a:b, c:d].write(shard) for ((a, b), (c, d)), shard in zip(data.rows, data.shards(), strict=True)
        ]
        for write in writes:
            write.result()

    def read(path: str, boxes: Sequence[Box]) -> list[Any]:
        array = opened(path)
        reads = [array[a:b, c:d].read() for (a, b), (c, d) in boxes]
        return [result.result() for result in reads]

    return cases(data, save, read)


def zarr_cases() -> dict[str, Case]:
    """Returns the cases of zarr-python, with the same chunks and checksums."""
    import zarr

    data = Data()

    def save(path: str) -> None:
        array = zarr.create_array(
            path, shape=data.x.shape, dtype=data.x.dtype, chunks=_inner(data), shards=data.shards()[0].shape,
            compressors=zarr.codecs.Crc32cCodec(),
        )  # fmt: skip
        for ((a, b), (c, d)), shard in zip(data.rows, data.shards(), strict=True):
            array[a:b, c:d] = shard

    def read(path: str, boxes: Sequence[Box]) -> list[Any]:
        array = zarr.open_array(path, mode="r")
        return [array[a:b, c:d] for (a, b), (c, d) in boxes]

    return cases(data, save, read)


def safetensors_cases() -> dict[str, Case]:
    """Returns the cases of safetensors: one file with an array for each shard, without checksums."""
    import numpy as np
    from safetensors import safe_open
    from safetensors.numpy import save_file

    data = Data()
    names = [str(number) for number in range(DEVICES)]

    def save(path: str) -> None:
        save_file(dict(zip(names, data.shards(), strict=True)), path)

    def read(path: str, boxes: Sequence[Box]) -> list[Any]:
        with safe_open(path, "np") as file:
            if boxes == data.rows:
                return [file.get_tensor(name) for name in names]
            return [np.concatenate([file.get_slice(name)[:, c:d] for name in names]) for _, (c, d) in boxes]

    return cases(data, save, read)


def torch_cases() -> dict[str, Case]:
    """Returns the cases of PyTorch's distributed checkpoints in one process: a tensor for each shard, without
    checksums. Other layouts need as many processes as shards.
    """
    import torch
    from torch.distributed import checkpoint

    data = Data()
    shards = {str(number): torch.from_numpy(shard) for number, shard in enumerate(data.shards())}

    def save(path: str) -> None:
        checkpoint.save(shards, storage_writer=checkpoint.FileSystemWriter(path, thread_count=2), no_dist=True)

    def read(path: str, boxes: Sequence[Box]) -> list[Any]:
        parts = {str(number): torch.from_numpy(part) for number, part in enumerate(data.empty(boxes))}
        checkpoint.load(parts, checkpoint_id=path, no_dist=True)
        return [part.numpy() for part in parts.values()]

    return cases(data, save, read, ("read",))


def orbax_cases() -> dict[str, Case]:
    """Returns the cases of Orbax: an array over virtual devices of JAX."""
    import jax
    import orbax.checkpoint as orbax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    data = Data()
    mesh = Mesh(jax.devices(), ("d",))
    layouts = {
        "rows": NamedSharding(mesh, PartitionSpec("d")),
        "columns": NamedSharding(mesh, PartitionSpec(None, "d")),
    }
    x = jax.device_put(data.x, layouts["rows"])
    checkpointer = orbax.StandardCheckpointer()

    def save(path: str) -> None:
        checkpointer.save(path, {"x": x})
        checkpointer.wait_until_finished()

    def read(path: str, boxes: Sequence[Box]) -> list[Any]:
        layout = layouts["rows" if boxes == data.rows else "columns"]
        target = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)}
        array = jax.block_until_ready(checkpointer.restore(path, target)["x"])
        parts = {
            (shard.index[0].start or 0, shard.index[1].start or 0): shard.data for shard in array.addressable_shards
        }
        return [parts[a, c] for (a, _), (c, _) in boxes]

    return cases(data, save, read)


# -- the run ---------------------------------------------------------------------------------------

LIBRARIES: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    PROJECT: ("shardtensor", "shardtensor_cases", harness.logical_devices(DEVICES)),
    PLAIN: ("numpy", "plain_cases", {}),
    TENSORSTORE: ("tensorstore", "tensorstore_cases", {}),
    ZARR: ("zarr", "zarr_cases", {}),
    SAFETENSORS: ("safetensors", "safetensors_cases", {}),
    TORCH: ("torch", "torch_cases", {}),
    ORBAX: ("orbax", "orbax_cases", harness.virtual_devices(DEVICES)),
}
"""The package, the function of the cases, and environment variables of each column."""


@dataclass(frozen=True)
class Effort:
    """The number of rounds, and the size of the array in MiB."""

    rounds: int = 15
    size: int = 256


QUICK = Effort(rounds=2)


def measure(effort: Effort) -> Table:
    """Measures the whole table."""
    with tempfile.TemporaryDirectory() as folder:
        columns = {}
        for number, (column, (package, function, variables)) in enumerate(LIBRARIES.items()):
            own = {FOLDER: os.path.join(folder, str(number)), SIZE: str(effort.size)}
            os.mkdir(own[FOLDER])
            columns[column] = (package, f"checkpoint:{function}", {**variables, **own})
        with harness.start_workers(columns) as workers:
            return measure_with(effort, workers)


def measure_with(effort: Effort, workers: Mapping[str, Any]) -> Table:
    """Measures the whole table with these workers."""
    packages = ("numpy", "tensorstore", "zarr", "safetensors", "jax", "torch", "orbax", "shardtensor")
    environment = machine.describe_environment(packages) | {
        "checksums": "of each inner chunk: shardtensor, tensorstore, zarr-python; of none: plain files, safetensors, "
        "PyTorch; Orbax has its own format",
        "rounds": str(effort.rounds),
    }
    cells: tables.Cells = {}
    for row in (WRITE, READ, RESHARD):
        samplers = {(row.name, column): functools.partial(workers[column].call, row.name) for column in workers}
        harness.interleave(samplers, 1, f"{row.title}, once before")
        cells |= harness.interleave(samplers, effort.rounds, row.title)
    for column, worker in workers.items():
        cells |= harness.call_once(worker, column, TOUCHED.name, (TOUCHED.name,))
    title = f"Checkpoints: float32, {effort.size} MiB in {DEVICES} shards of rows, one process"
    return Table(title, environment, tuple(workers), ROWS, cells, (PLAIN,))


if __name__ == "__main__":
    harness.run("checkpoint", "The cost of checkpoints.", measure, Effort(), QUICK)
