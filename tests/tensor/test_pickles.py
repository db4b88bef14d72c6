"""Pickles of tensors, shardings, meshes and devices, also loaded where other devices exist."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.tensor.tensor import _unpickle
from tests.conftest import Logged
from tests.layouts import assert_same, everywhere, mesh_of
from tests.scripts import new_process, output_of

VALUE = np.arange(30.0).reshape(10, 3)


class Pickled:
    """What loads as a tensor that was pickled in that sharding, whose devices need not exist here."""

    def __init__(self, value: np.ndarray, sharding: st.NamedSharding) -> None:
        self.made_of = (value, value.shape, sharding, True)

    def __reduce__(self) -> Any:
        return _unpickle, self.made_of


def again(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


def absent(*sizes: int, names: str = "xyz", backend: str = "absent") -> st.Mesh:
    """A mesh of devices that no backend here has."""
    devices = np.array([st.Device(backend, 100 + i) for i in range(int(np.prod(sizes)))], dtype=object)
    return st.Mesh(devices.reshape(sizes), tuple(names[: len(sizes)]))


# -- devices are what backend, number and process say -------------------------------------------------


def test_the_kind_of_a_device_describes_it_and_is_not_compared() -> None:
    here = st.devices()[1]
    there = dataclasses.replace(here, kind="NVIDIA A100")
    assert there == here
    assert hash(there) == hash(here)
    assert not there < here
    assert not here < there
    assert (again(there), again(there).kind) == (here, "NVIDIA A100")
    assert st.Device("numpy", 1, 1) != here
    assert str(there) == "numpy:1"


@everywhere
def test_what_was_pickled_on_another_model_of_gpu_loads(backend: str) -> None:
    ours = mesh_of((4,), backend)
    theirs = st.Mesh([dataclasses.replace(d, kind="NVIDIA A100") for d in ours.flat], "x")
    sharding = st.NamedSharding(theirs, st.P("x"))
    x = again(Pickled(VALUE, sharding))
    assert_same(x, VALUE, exact=True)
    assert x.sharding == sharding
    assert x.committed
    assert {d.kind for d in again(theirs).flat} == {d.kind for d in ours.flat}
    assert {d.kind for d in again(sharding).mesh.flat} == {d.kind for d in ours.flat}
    assert_same(x + st.ones((10, 3), device=ours), VALUE + 1)
    assert_same(st.device_put(VALUE, theirs), VALUE)


# -- devices that do not exist ------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("where", ["absent", "numpy"])  # no such backend; a backend with fewer devices
def test_tensors_of_devices_that_do_not_exist_load_on_the_default_mesh(
    where: str, backend: str, logged: Logged
) -> None:
    there = absent(2, 3, backend=where)
    mesh = mesh_of((3,), backend)
    with st.use_mesh(mesh), logged.at_level(logging.WARNING, "shardtensor"):
        kept = again(Pickled(VALUE, st.NamedSharding(there, st.P(None, "x"))))
        split = again(Pickled(VALUE, st.NamedSharding(there, st.P("x", "y"))))
        scalar = again(Pickled(np.array(3.0), st.NamedSharding(there, st.P())))
        away = again(Pickled(VALUE, st.NamedSharding(there, st.P("x"), memory_kind="pinned_host")))
    assert kept.sharding == st.NamedSharding(mesh, st.P(None, "x"))
    assert split.sharding == st.NamedSharding(mesh, st.P("x"))  # as device=mesh: the default mesh has no axis y
    assert scalar.sharding == st.NamedSharding(mesh, st.P())
    assert away.sharding == st.NamedSharding(mesh, st.P("x"), memory_kind="pinned_host")
    for x in (kept, split, away):
        np.testing.assert_array_equal(np.asarray(x), VALUE)
        assert not x.committed  # nothing asked for that place
    assert float(scalar) == 3
    placed = st.ones((10, 3), device=st.devices("checked")[5])
    assert (split + placed).device == placed.device
    (first, *_) = logged.messages
    assert first.startswith(f"unpickle: tensors of Mesh(x=2, y=3; {where}:100..105) ")
    assert f" are loaded on Mesh(x=3; {backend}:0..2): there is no " in first


def test_it_is_logged_once(logged: Logged) -> None:
    sharding = st.NamedSharding(absent(5, names="q"), st.P("q"))
    with logged.at_level(logging.WARNING, "shardtensor"):
        for _ in range(3):
            again(Pickled(VALUE, sharding))
    assert len(logged.messages) == 1


def test_the_tensors_of_a_list_stay_on_devices_of_their_own() -> None:
    there = [st.SingleDeviceSharding(st.Device("numpy", 8 + i)) for i in range(8)]
    with st.use_mesh(mesh_of((3,), "numpy", 2)):
        parts = again([Pickled(VALUE[:2], sharding) for sharding in there])
    assert [str(p.device) for p in parts] == [f"numpy:{2 + (8 + i) % 3}" for i in range(8)]


def test_a_default_mesh_that_does_not_take_them() -> None:
    pytest.importorskip("torch")
    pickled = pickle.dumps(Pickled(VALUE.astype("uint16"), st.NamedSharding(absent(2), st.P("x"))))
    with (
        st.use_mesh(mesh_of((2,), "torch")),
        pytest.raises(
            st.ArgumentTypeError,
            match=r"^unpickle: a tensor that was pickled on Mesh\(x=2; absent:100, absent:101\) does not load on "
            r"Mesh\(x=2; torch:0, torch:1\): .*no arrays of uint16.*st\.use_mesh\(mesh\)",
        ),
    ):
        pickle.loads(pickled)
    assert pickle.loads(pickled).dtype == "uint16"


def test_meshes_and_shardings_of_such_devices_are_values() -> None:
    for mesh in (absent(2, 3), absent(2, 3, backend="numpy")):
        sharding = st.NamedSharding(mesh, st.P("x", "y"))
        assert again(mesh) == mesh
        assert again(sharding) == sharding
        assert [again(d) for d in mesh.flat] == list(mesh.flat)
        assert again(sharding).shard_shape((10, 3)) == (5, 1)
    with pytest.raises(st.ArgumentError, match="no backend named 'absent'"):
        st.device_put(VALUE, again(absent(2)))
    with pytest.raises(
        st.BackendError, match=r"no device numpy:100; backend 'numpy' has 8.*SHARDTENSOR_NUM_DEVICES=102"
    ):
        st.device_put(VALUE, again(absent(2, backend="numpy")))


# -- another process ----------------------------------------------------------------------------------

LOAD = """
import json, pickle, sys
import numpy as np
import shardtensor as st

loaded = pickle.load(sys.stdin.buffer)
def shown(x):
    return [shown(item) for item in x] if isinstance(x, list) else [repr(x.sharding), x.committed, x.tolist()]
try:
    st.device_put(np.zeros(8), loaded.pop("mesh"))
except st.BackendError as error:
    said = str(error)
assert "cupy" not in sys.modules and "torch" not in sys.modules
print(json.dumps({name: shown(x) for name, x in loaded.items()} | {"said": said}))
"""


def test_tensors_of_eight_devices_load_on_two(backend: str) -> None:
    if backend not in ("numpy", "checked"):
        pytest.skip("the double of CuPy is not there in another process, and torch's devices are those of the host")
    mesh = st.Mesh(np.array(st.devices(backend)).reshape(4, 2), ("x", "y"))
    x = st.device_put(VALUE, st.NamedSharding(mesh, st.P("x", "y")))
    pickled = {
        "tensor": x,
        "view": x[2:5],
        "element": x.sum(),
        "few": st.device_put(VALUE, st.make_mesh((2,), ("x",), devices=st.devices(backend))),
        "list": st.shard(st.arange(8, device=mesh), devices=mesh),
        "offloaded": st.device_put(VALUE, st.NamedSharding(mesh, st.P("x"), memory_kind="pinned_host")),
        "mesh": mesh,
    }
    shardings = [x.sharding for x in (pickled["tensor"], pickled["element"], pickled["offloaded"])]
    assert len(set(shardings)) == 3
    variables = {"SHARDTENSOR_NUM_DEVICES": "2", "SHARDTENSOR_BACKEND": backend}
    done = new_process("-c", LOAD, stdin=pickle.dumps(pickled), **variables)
    here = f"NamedSharding(Mesh(d=2; {backend}:0, {backend}:1), P('d'))"
    found = json.loads(output_of(done))
    assert found["tensor"] == [here, False, VALUE.tolist()]
    assert found["view"] == [here, False, VALUE[2:5].tolist()]
    assert found["element"][2] == VALUE.sum()
    assert found["few"] == [here.replace("d=2", "x=2").replace("'d'", "'x'"), True, VALUE.tolist()]
    assert [part[2] for part in found["list"]] == [[i] for i in range(8)]
    assert [f"{backend}:{i % 2})" in part[0] for i, part in enumerate(found["list"])] == [True] * 8
    assert found["offloaded"] == [here[:-1] + ", memory_kind='pinned_host')", False, VALUE.tolist()]
    assert found["said"].endswith(
        f"there is no device {backend}:2; backend '{backend}' has 2, from 0 to 1; use other devices, or call "
        "st.set_num_devices(8) before the first mesh or array (the devices are logical; in a notebook, after a restart "
        "of the kernel), or set SHARDTENSOR_NUM_DEVICES=8"
    )
    assert (
        done.stderr.count("unpickle: tensors of ") == 1 + 1 + 1 + 6
    )  # once for each sharding whose devices are not there
