"""Runs random programs on tensors that span processes: ``spanning_programs.py FILE PROGRAMS``.

PROGRAMS is a file with lists of lines (see `tests.interpreters.test_state`). Process 0 writes a line to FILE for each
program: a hash of the bits of all tensors after every line, and of the errors. Jobs with the same number of devices in
other numbers of processes must write the same lines.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shardtensor as st
from shardtensor import distributed
from shardtensor.backend import registry
from shardtensor.testing.checked import CheckedBackend

ERRORS = (IndexError, ValueError, TypeError, OverflowError, NameError)
AXES = ("x", "y", "z")


def layout(shape: tuple[int, ...], where: int | list[int], spec: st.P, _: object = None) -> st.NamedSharding:
    """Returns a layout over devices of several processes: the first device, the last one, and others."""
    known = st.devices()
    size = math.prod(shape)
    if not 2 <= size <= len(known):
        shape, size = (len(known),), len(known)
        spec = st.P(*[tuple(axis for axis in chain if axis == "x") for chain in spec.chains])
    turn = where if isinstance(where, int) else where[0]
    inner = known[1:-1][turn:] + known[1:-1][:turn]
    ends = (inner[: size - 2], known[:1], known[-1:]) if turn % 2 else (known[:1], inner[: size - 2], known[-1:])
    return st.NamedSharding(st.make_mesh(shape, AXES[: len(shape)], devices=[d for some in ends for d in some]), spec)


def whole(x: Any) -> np.ndarray:
    """Returns all elements of a tensor or of a value that was read from one, as a host array."""
    if isinstance(x, st.ShardedTensor) and not x.is_fully_addressable:
        return np.asarray(distributed.process_allgather(x))
    return np.asarray(x)


JITTED: dict[str, Callable[..., Any]] = {
    "affine": lambda xp, x: 2 * x + 1,
    "centered": lambda xp, x: x - xp.max(x, axis=0, keepdims=True),
    "gram": lambda xp, x: xp.sum(x * x, axis=-1) - 1,
    "turned": lambda xp, x: xp.where(x[::-1] > 0, x, -x) + xp.roll(x, 1, axis=0),
}
"""Functions that are compiled."""


def over_all(function: Callable[..., Any], x: Any, out: st.P) -> Any:
    """Maps a function over the blocks of rows on all devices."""
    mesh = st.make_mesh((len(st.devices()),), ("x",))
    return st.shard_map(function, mesh=mesh, in_specs=st.P("x"), out_specs=out, check_vma=False)(x)


MAPPED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "psum": (lambda a: a.sum(axis=0), lambda x: over_all(lambda b: st.psum(b.sum(axis=0), "x"), x, st.P())),
    "pmax": (lambda a: a.max(), lambda x: over_all(lambda b: st.pmax(b.max(initial=-100), "x"), x, st.P())),
    "all_gather": (lambda a: a * 2, lambda x: over_all(lambda b: st.all_gather(b * 2, "x", tiled=True), x, st.P())),
    "psum_scatter": (
        lambda a: np.sum(a, axis=0),
        lambda x: over_all(
            lambda b: st.psum_scatter(b.sum(axis=0), "x", scatter_dimension=0, tiled=True), x, st.P("x")
        ),
    ),
}
"""Maps with collectives: what NumPy computes, and the map."""


def wide_names(is_plain: bool) -> dict[str, Any]:
    """Returns the names of compiled functions, maps, random numbers and placed reductions."""

    def drawn(kind: str, seed: int, shape: tuple[int, ...], where: Any) -> Any:
        made = getattr(st.random, kind)(st.random.key(seed), shape, device=st.local_devices()[0] if is_plain else where)
        return np.asarray(made) if is_plain else made

    def placed(name: str, x: Any, axis: int, where: Any) -> Any:
        if is_plain:
            return getattr(np, name)(x, axis=axis)
        spec = st.P(*where.spec.chains_of(len(where.spec))[: x.ndim - 1])
        return getattr(st, name)(x, axis=axis, out_sharding=st.NamedSharding(where.mesh, spec))

    jitted = {name: st.jit(functools.partial(f, st)) for name, f in JITTED.items()}
    return {
        "drawn": drawn,
        "placed": placed,
        "jitted": lambda name, x: JITTED[name](np, x) if is_plain else jitted[name](x),
        "over": lambda name, x: MAPPED[name][0 if is_plain else 1](x),
    }


def array(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    from tests.layouts import array  # Imported late: the module uses devices, which exist once processes are connected.

    return array(shape, dtype, seed)


def names() -> dict[str, Any]:
    """Returns the names that programs use, with their values."""
    return {
        "xp": st, "np": np, "array": array, "P": st.P, "put": st.device_put, "reshard": st.reshard, "layout": layout,
        "spread": st.broadcast_to, "zeros": lambda shape, dtype, where: st.zeros(shape, dtype=dtype, device=where),
        "apart": lambda x: x, "share": lambda x: st.device_put(x, x.sharding, may_alias=True), "host": whole,
        "copied": lambda x: x.copy(), "shallow": copy.copy, "pickled": lambda x: x.copy(), "shards": lambda x: 0,
        "donated": functools.partial(st.reshard, donate=True), **wide_names(False),
    }  # fmt: skip


def outcome(lines: list[str]) -> str:
    """Returns a hash of all tensors after every line."""
    space, bits = names(), hashlib.blake2b(digest_size=8)
    for number, line in enumerate(lines):
        try:
            exec(line, space)
        except ERRORS as error:
            bits.update(f"{number} {type(error).__name__}".encode())
        for name in sorted(name for name in space if name[1:].isdigit()):
            if not getattr(space[name], "is_donated", False):
                found = whole(space[name])
                bits.update(f"{number} {name} {found.dtype} {found.shape}".encode())
                bits.update(np.ascontiguousarray(found).tobytes())
        if os.environ.get("VERBOSE"):
            print(number, line, bits.hexdigest())
    return bits.hexdigest()


def main(path: str, programs: str) -> None:
    alone = os.environ.get("SHARDTENSOR_ALONE")
    if alone:
        registry.install(CheckedBackend(sharing=int(alone)))
    distributed.initialize(engine="local" if alone else None, timeout=20)
    with Path(path if distributed.process_index() == 0 else os.devnull).open("a") as file:
        for number, lines in enumerate(json.loads(Path(programs).read_text())):
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                print(number, outcome(lines), file=file, flush=True)
    distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
