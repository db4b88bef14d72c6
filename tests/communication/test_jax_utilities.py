"""The utilities of a job of several processes give what those of JAX give, in a job of JAX of as many processes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardtensor.launcher import free_port
from tests import peers
from tests.communication import jax_utilities
from tests.communication.test_distributed import ENGINES, launch

JAXS = """
import jax, numpy
from types import SimpleNamespace
from jax.experimental import multihost_utils as utilities
from tests.communication import jax_utilities
port, own = given
jax.config.update("jax_enable_x64", True)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, own)
names = "broadcast_one_to_all sync_global_devices process_allgather assert_equal host_local_array_to_global_array"
spec = jax.sharding.PartitionSpec
lib = SimpleNamespace(
    **{name: getattr(utilities, name) for name in f"{names} global_array_to_host_local_array".split()},
    process_index=jax.process_index, process_count=jax.process_count, devices=jax.devices, local_devices=jax.local_devices,
    P=spec, NamedSharding=jax.sharding.NamedSharding, jit=jax.jit, psum=jax.lax.psum,
    mesh=lambda shape, names: jax.sharding.Mesh(numpy.array(jax.devices()).reshape(shape), names),
    make_array_from_process_local_data=jax.make_array_from_process_local_data, shards=jax_utilities.shards,
    make_array_from_callback=jax.make_array_from_callback, pmap_local=lambda f, x: jax.pmap(f, axis_name="i")(x),
)
found = {name: jax_utilities.as_json(value) for name, value in jax_utilities.utilities(lib)}
"""


def job(engine: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each of two processes of two devices finds."""
    monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", "2")
    status, text = launch(engine, 2, str(Path(jax_utilities.__file__)), str(folder))
    assert status == 0, text
    return [json.loads((folder / f"{k}.json").read_text()) for k in range(2)]


@pytest.mark.full
def test_utilities_of_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = job("mpi", tmp_path, monkeypatch)
    assert (first["processes"], second["processes"]) == ([0, 2, 4, 2], [1, 2, 4, 2])
    assert first["devices"] == second["devices"] == [0, 0, 1, 1]
    parts = [np.arange(4.0) * k + k for k in range(2)]
    assert first["broadcast"] == second["broadcast"] == {"w": [[0, 1, 2], [3, 4, 5]], "b": [0, [0, 1]]}
    assert first["broadcast from the last"] == second["broadcast from the last"]
    assert second["broadcast from the last"] == {"w": [[0, 2, 4], [6, 8, 10]], "b": [1, [1, 2]]}
    for found, part in zip((first, second), parts, strict=True):
        assert found["unequal: a number"] is found["unequal: a leaf"] is True
        for name in ("split over devices", "split over hosts", "split over both"):
            assert found[name][:2] == [[8], False]
            assert found[f"{name}: all of it"] == np.concatenate(parts).tolist()
            assert found[f"{name}: of this host"] == part.tolist()
        assert found["split over hosts"][2][1] == found["split over hosts"][3][1] == part.tolist()
        assert found["split over devices"][2][1] == part[:2].tolist()
        assert found["equal everywhere"] == [[4], True, [0, 1, 2, 3]]
    assert (first["a map of local slices"], second["a map of local slices"]) == ([6, 7], [8, 9])


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_jax_gives_the_same(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers.require_jax("0.10", "0.12")
    mine, port = job(engine, tmp_path, monkeypatch), free_port()
    with ThreadPoolExecutor(2) as pool:
        theirs = list(pool.map(lambda own: peers.run(JAXS, (port, own), devices=2), range(2)))
    for here, there in zip(mine, theirs, strict=True):
        assert here.keys() == there.keys()
        assert {name: (value, there[name]) for name, value in here.items() if value != there[name]} == {}
