"""Devices, the registry of backends, and the protocol, on the checked backend, on numpy, and on a third party's."""

from __future__ import annotations

import array as arrays_of_python
import dataclasses
import importlib.metadata
import inspect
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend import HOST, Backend, Device, protocol, registry
from shardtensor.backend.job import ProcessBackend
from shardtensor.backend.protocol import requested_devices
from shardtensor.backend.registry import load
from shardtensor.testing import CheckedArray
from tests.conftest import NO_GPU
from tests.scripts import new_process, output_of, run_script

# -- devices ---------------------------------------------------------------------------------------


def test_device_is_a_frozen_value() -> None:
    device = Device("numpy", 3)
    assert (device.backend, device.id, device.process_index, device.kind) == ("numpy", 3, 0, "cpu")
    assert device == Device("numpy", 3, 0, "cpu")
    assert hash(device) == hash(Device("numpy", 3))
    others = [Device("numpy", 2), Device("checked", 3), Device("numpy", 3, 1)]
    assert device not in others
    assert len({device, Device("numpy", 3), Device("numpy", 3, 0, "A100"), *others}) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.id = 4  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        device.other = 4  # type: ignore[attr-defined]
    assert device.id == 3


def test_device_as_text() -> None:
    assert str(Device("numpy", 3)) == "numpy:3"
    assert repr(Device("numpy", 3, 1, "gpu")) == "Device('numpy:3')"
    assert str(HOST) == "host"
    assert f"{Device('cupy', 10)}" == "cupy:10"


def test_devices_are_ordered() -> None:
    devices = [Device("numpy", 10), Device("numpy", 9), Device("checked", 11), Device("numpy", 9, 1)]
    assert sorted(devices) == [devices[2], devices[1], devices[3], devices[0]]
    assert Device("numpy", 2) < Device("numpy", 10)


def test_device_can_be_pickled(backend: str) -> None:
    for device in st.devices(backend):
        again = pickle.loads(pickle.dumps(device))
        assert again == device
        assert hash(again) == hash(device)


# -- finding and loading ---------------------------------------------------------------------------


def printed(code: str, **variables: str) -> Any:
    return json.loads(output_of(run_script(textwrap.dedent(code), **variables)))


def test_names() -> None:
    assert {"numpy", "checked"} <= set(st.backend_names())
    assert st.backend_names() == sorted(st.backend_names())
    assert "host" not in st.backend_names()


def test_loaded_once(backend: str) -> None:
    assert load(backend) is load(backend)
    assert load(backend).name == backend
    assert registry.backend_of(st.devices(backend)[0]) is load(backend)
    assert list(load(backend).devices()) == st.devices(backend)


@pytest.mark.parametrize("name", ["nonsense", "", "NumPy", "host"])
def test_unknown_name_lists_the_installed(name: str) -> None:
    """`host` is the device of host arrays and not a backend: no tensor can be placed there."""
    with pytest.raises(st.ArgumentError, match=rf"no backend named {name!r}.*'checked', .*'numpy'"):
        load(name)


def test_the_host_device_holds_no_tensors() -> None:
    with pytest.raises(st.ShardTensorError, match="host"):
        st.device_put(np.arange(3), HOST)


COUNTS = """
    import json, shardtensor as st
    print(json.dumps([st.device_count(b) for b in (None, "numpy", "checked")]))
"""


def test_number_of_devices() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert printed(COUNTS, SHARDTENSOR_NUM_DEVICES="3") == [3, 3, 3]
    assert printed(COUNTS, SHARDTENSOR_BACKEND="numpy") == [cores] * 3


def test_a_program_sets_the_number_of_devices() -> None:
    """The call precedes the first use of a backend, and sets one backend or all. It takes precedence over the variable,
    also over an invalid one.
    """
    code = """
        import json, shardtensor as st
        st.set_num_devices(5)
        st.set_num_devices(2, "checked")
        counts = [st.device_count(b) for b in (None, "numpy", "checked")]
        st.set_num_devices(5), st.set_num_devices(2, backend="checked")
        arrays = [st.ones(3, device=st.devices(b)[0]) for b in ("numpy", "checked")]
        def error(*arguments):
            try:
                st.set_num_devices(*arguments)
            except st.BackendError as e:
                return str(e)
        print(json.dumps([counts, error(8), error(8, "numpy"), error(8, "checked"), st.device_count()]))
    """
    for number in ("3", "eight"):
        counts, *errors, left = printed(code, SHARDTENSOR_NUM_DEVICES=number, SHARDTENSOR_BACKEND="numpy")
        assert (counts, left) == ([5, 5, 2], 5)
        for message, name, count in zip(errors, ("numpy", "numpy", "checked"), (5, 5, 2), strict=True):
            assert message.startswith(f"set_num_devices: backend {name!r} is in use already, with {count} devices")
            assert "start of the program" in message
            assert "restart the kernel" in message


def test_devices_that_were_only_counted_do_not_fix_their_number() -> None:
    """A call that fails because there are too few devices names the remedy, which must be possible."""
    code = """
        import json, shardtensor as st
        counts = [st.device_count(), len(st.devices()), st.local_device_count("checked")]
        first = st.devices()[0]
        try:
            st.make_mesh((4, 2), ("x", "y"))
        except st.ShardingError:
            st.set_num_devices(8)
        mesh = st.make_mesh((4, 2), ("x", "y"))
        counts += [st.device_count(), st.device_count("checked"), st.ones(8).sharding.mesh.size]
        counts += [st.ones(8, device=first).sum().item(), first == mesh.flat[0]]
        st.set_num_devices(3, "checked")
        counts += [st.device_count("checked")]
        try:
            st.set_num_devices(9)
        except st.BackendError as e:
            print(json.dumps([counts, str(e)]))
    """
    counts, error = printed(code, SHARDTENSOR_NUM_DEVICES="2", SHARDTENSOR_BACKEND="numpy")
    assert counts == [2, 2, 2, 8, 8, 8, 8.0, True, 3]
    assert "'numpy' is in use already, with 8 devices" in error


@pytest.mark.parametrize("given", [0, -1, 2.0, True, None, "8", 65537])
def test_numbers_of_devices_that_a_program_cannot_set(given: Any) -> None:
    with pytest.raises(st.ArgumentError, match=r"^set_num_devices: n is .*; wanted an integer from 1 to 65,536"):
        st.set_num_devices(given)
    with pytest.raises(st.ArgumentError, match=r"^set_num_devices: there is no backend named 'nonsense'; installed"):
        st.set_num_devices(4, "nonsense")


def test_a_mesh_of_too_many_devices_names_the_call_to_make_first() -> None:
    code = """
        import json, shardtensor as st
        try:
            st.make_mesh((2, 99), ("x", "y"))
        except st.ShardingError as e:
            print(json.dumps(str(e)))
    """
    assert "call st.set_num_devices(198) before the first mesh or array" in printed(code)


WRONG_NUMBERS = ["0", "abc", "", " ", "-1", "2.5", "²", " 8", "1e3", "65537", "99999999999", "9" * 5000]


@pytest.mark.parametrize("given", WRONG_NUMBERS, ids=lambda given: repr(given)[:14])
def test_invalid_numbers(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", given)
    with pytest.raises(st.BackendError, match=r"^SHARDTENSOR_NUM_DEVICES is .*; wanted an integer from 1 to 65,536"):
        requested_devices()


def test_invalid_numbers_of_devices() -> None:
    """The error is the same with and without a backend's name, and is raised before a plugin is imported."""
    code = """
        import json, sys, shardtensor as st
        def error(call):
            try:
                call()
            except st.BackendError as e:
                return str(e)
        calls = [lambda: st.devices("numpy"), lambda: st.devices("torch"), st.devices, lambda: st.zeros(3)]
        print(json.dumps([[error(call) for call in calls], [m for m in sys.modules if m.startswith("shardtensor_")]]))
    """
    invalid = ["0", "abc", "²", "99999999999", "9" * 5000]
    for given in invalid:
        messages, plugins = printed(code, SHARDTENSOR_NUM_DEVICES=given)
        shown = repr(given) if len(given) < 60 else "'999"
        for message in messages:
            assert message.removeprefix("zeros: ").startswith(f"SHARDTENSOR_NUM_DEVICES is {shown}")
            assert "; wanted an integer from 1 to 65,536" in message
            assert len(message) < 200
        assert plugins == []


def test_the_maximum_number_of_devices() -> None:
    assert printed(COUNTS, SHARDTENSOR_NUM_DEVICES="0065536") == [1 << 16] * 3


def test_an_invalid_number_is_not_an_error_of_the_backend() -> None:
    code = """
        import json, shardtensor as st
        try:
            st.devices()
        except st.BackendError as e:
            print(json.dumps(str(e)))
    """
    message = printed(code, SHARDTENSOR_NUM_DEVICES="eight", SHARDTENSOR_BACKEND="numpy")
    assert message.startswith("SHARDTENSOR_NUM_DEVICES is 'eight'")
    assert "SHARDTENSOR_BACKEND" not in message


@pytest.mark.slow
def test_variable_chooses_the_default_backend() -> None:
    code = """
        import json, numpy as np, shardtensor as st
        x = st.zeros((4, 2)) + 1
        kind = type(x.addressable_shards[0].data).__name__
        names = [d.backend for d in (st.devices()[0], x.sharding.mesh.flat[0], st.devices("numpy")[0])]
        print(json.dumps([*names, kind, float(st.sum(x))]))
    """
    kinds = {"checked": "CheckedArray", "numpy": "ndarray"}
    for name, kind in kinds.items():
        found = printed(code, SHARDTENSOR_BACKEND=name, SHARDTENSOR_NUM_DEVICES="3")
        assert found == [name, name, "numpy", kind, 8.0]
    for variables in ({}, {"SHARDTENSOR_BACKEND": ""}):
        assert printed(code, **variables)[0] == ("numpy" if NO_GPU else "cupy")


def test_variable_that_names_no_backend() -> None:
    """Importing works, and so does a backend that is named; the default backend is an error that names the variable."""
    code = """
        import json, shardtensor as st
        fine = st.device_count("numpy")
        try:
            st.zeros(3)
        except st.ShardTensorError as e:
            print(json.dumps([fine, type(e).__name__, str(e)]))
    """
    fine, kind, message = printed(code, SHARDTENSOR_BACKEND="nonsense", SHARDTENSOR_NUM_DEVICES="2")
    assert fine == 2
    assert kind in ("ArgumentError", "BackendError")
    assert "'nonsense'" in message
    assert "'checked'" in message
    assert "'numpy'" in message
    assert "SHARDTENSOR_BACKEND" in message


class Stub(Backend):
    """The base of the plugins below."""

    name = "stub"
    xp = np  # type: ignore[assignment]

    def devices(self) -> list[Device]:
        return [Device(self.name, i) for i in range(2)]

    def is_array(self, x: object) -> bool:
        return False

    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        return np.array(array)

    def from_host(self, array: Any, device: Device) -> Any:
        return np.array(array)

    def to_host(self, array: Any, device: Device) -> Any:
        return np.array(array)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Installs a module as a further plugin, for the duration of a test."""
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    monkeypatch.syspath_prepend(str(tmp_path))
    points = dict(registry._entry_points())
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    modules = []

    def add(name: str, text: str, value: str | None = None) -> None:
        module = f"plugin_{name}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(text))
        modules.append(module)
        points[name] = importlib.metadata.EntryPoint(name, value or f"{module}:It", registry.ENTRY_POINTS)

    yield add
    for module in modules:
        sys.modules.pop(module, None)


STUB = """
    from tests.backend.test_protocol import Stub
    class It(Stub):
        name = {name!r}
"""

BROKEN = {
    "raises": ("raise OSError('driver 12 is too old')", "driver 12 is too old"),
    "lacks": ("import module_that_is_not_there", "module_that_is_not_there"),
    "syntax": ("class It(", "SyntaxError"),
    "nothing": ("", "It"),
    "starts": (
        "from shardtensor.backend import Backend\nclass It(Backend):\n    name = devices = xp = is_array = to_device = from_host = to_host = None\n    def __init__(self):\n        raise ValueError('no licence')",
        "no licence",
    ),
    "abstract": ("from shardtensor.backend import Backend\nclass It(Backend):\n    name = 'abstract'", "to_device"),
    "stranger": ("class It:\n    name = 'stranger'", "Backend"),
    "number": ("It = 3", "not a subclass"),
    "exits": ("raise SystemExit(3)", r"does not start: SystemExit: 3"),
    "deviceless": (
        "from tests.backend.test_protocol import Stub\nclass It(Stub):\n    name = 'deviceless'\n"
        "    def devices(self):\n        return []",
        "has no devices; it must have",
    ),
    **{
        name: (
            "from shardtensor.backend import Device\nfrom tests.backend.test_protocol import Stub\n"
            f"class It(Stub):\n    name = {name!r}\n    def devices(self):\n        return {devices}",
            reason,
        )
        for name, devices, reason in [
            ("silent", "None", r"devices\(\) returned a NoneType; wanted a list or a tuple of devices"),
            ("flowing", "(Device('flowing', k) for k in range(2))", "returned a generator; wanted a list"),
            ("twofold", "[Device('twofold', k) for k in (0, 1, 0)]", r"devices\(\) has twofold:0 twice"),
            ("numbered", "[0, 1]", r"devices\(\)\[0\] is 0; wanted Device\('numbered', an id\)"),
            ("foreign", "[Device('numpy', 0)]", r"devices\(\)\[0\] is Device\('numpy:0'\); wanted"),
        ]
    },
    "uncounted": (
        "from tests.backend.test_protocol import Stub\nclass It(Stub):\n    name = 'uncounted'\n"
        "    def devices(self):\n        raise RuntimeError('the driver hangs')",
        "the driver hangs",
    ),
    "nameless": (
        "from shardtensor.backend import Backend\nclass It(Backend):\n    xp = None\n"
        "    devices = is_array = to_device = from_host = to_host = lambda self, *given: None",
        "name",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_error_of_a_broken_plugin(name: str, install: Callable[..., None]) -> None:
    text, reason = BROKEN[name]
    install(name, text)
    for _ in range(2):  # nothing half-made is kept
        with pytest.raises(st.BackendError, match=rf"{name!r}[\s\S]*{reason}"):
            st.devices(name)
    assert name in registry.backend_names()
    assert name not in registry._loaded


def test_a_plugin_whose_number_of_devices_is_fixed(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number for all backends, like the variable, is not binding; a number for one backend is."""
    monkeypatch.setattr(protocol, "device_counts", {})
    monkeypatch.setattr(registry, "device_counts", protocol.device_counts)
    install("fixed", STUB.format(name="fixed"))
    st.set_num_devices(3, "fixed")
    with pytest.raises(st.BackendError, match=r"'fixed' has 2 devices, and cannot have 3, .*st\.set_num_devices"):
        st.devices("fixed")
    st.set_num_devices(2, "fixed")
    assert st.device_count("fixed") == 2


def test_plugin_whose_module_is_missing(install: Callable[..., None]) -> None:
    install("gone", "", value="module_that_is_not_there:It")
    with pytest.raises(st.BackendError, match=r"'gone'.*module_that_is_not_there"):
        load("gone")


def test_plugin_with_another_name(install: Callable[..., None]) -> None:
    install("mine", STUB.format(name="yours"))
    with pytest.raises(st.BackendError, match=r"'mine'.*'yours'"):
        load("mine")
    assert "yours" not in registry._loaded


def test_the_error_of_an_unusable_plugin(install: Callable[..., None]) -> None:
    install(
        "absent",
        """
        from shardtensor.backend import Backend
        from shardtensor.errors import BackendError
        class It(Backend):
            name = devices = xp = is_array = to_device = from_host = to_host = None
            def __init__(self):
                raise BackendError("absent: there is no such device; plug one in")
        """,
    )
    with pytest.raises(st.BackendError, match=r"^absent: there is no such device; plug one in$"):
        load("absent")


def test_default_is_the_usable_one_of_highest_priority(install: Callable[..., None]) -> None:
    default = registry.default_backend.__wrapped__
    del registry._entry_points()["cupy"]  # its is higher, and it may be usable
    install("broken", "raise OSError('broken')")
    assert default().name == "numpy"  # checked's is lower, and the broken one is no candidate
    install("better", STUB.format(name="better") + "    priority = 7\n")
    assert default().name == "better"


def test_backends_of_negative_priority_are_never_the_default(install: Callable[..., None]) -> None:
    """They are for tests, or no automatic choice of them is sound: not even a broken numpy plugin makes one the
    default.
    """
    for name in list(registry._entry_points()):
        if name != "checked":
            del registry._entry_points()[name]
    install("numpy", "raise OSError('a broken plugin')")
    loaded = dict(registry._loaded)
    registry._loaded.pop("numpy")
    try:
        with pytest.raises(st.BackendError) as caught:
            registry.default_backend.__wrapped__()
    finally:
        registry._loaded.update(loaded)
    assert "checked: used only if SHARDTENSOR_BACKEND names it" in str(caught.value)
    assert "numpy: backend 'numpy' is installed but does not start: OSError: a broken plugin" in str(caught.value)


def test_default_by_variable(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("chosen", STUB.format(name="chosen") + "    priority = -7\n")
    monkeypatch.setenv("SHARDTENSOR_BACKEND", "chosen")
    assert registry.default_backend.__wrapped__().name == "chosen"


def test_the_error_if_no_backend_is_usable(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("broken", "raise OSError('driver 12 is too old')")
    points = {"broken": registry._entry_points()["broken"]}
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    with pytest.raises(st.BackendError, match=r"no backend can be used.*'broken'"):
        registry.default_backend.__wrapped__()


def test_threads_load_a_plugin_once(install: Callable[..., None]) -> None:
    install(
        "slow",
        STUB.format(name="slow")
        + """
        started = []
        def __init__(self):
            import time
            self.started.append(1)
            time.sleep(0.05)
    """,
    )
    found: list[Backend] = []
    threads = [threading.Thread(target=lambda: found.append(load("slow"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(b) for b in found}) == 1
    assert found[0].started == [1]  # type: ignore[attr-defined]


def test_two_plugins_with_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        importlib.metadata.EntryPoint(name, value, registry.ENTRY_POINTS)
        for name, value in [("numpy", "a:A"), ("twice", "one:It"), ("twice", "two:It")]
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    registry._entry_points.cache_clear()
    try:
        with pytest.raises(st.BackendError, match=r"'twice'.*one:It.*two:It"):
            load("twice")
        del points[2]
        points.append(points[1])  # the same one, found twice, is one
        registry._entry_points.cache_clear()
        registry._rivals.clear()
        assert sorted(registry._entry_points()) == ["numpy", "twice"]
        assert not registry._rivals
    finally:
        registry._entry_points.cache_clear()
        registry._rivals.clear()


def test_devices_that_do_not_exist_or_are_of_several_backends() -> None:
    with pytest.raises(st.BackendError, match=r"device_put: there is no device numpy:99; .* from 0 to 7"):
        st.device_put(np.arange(3), Device("numpy", 99))
    mixed = st.Mesh([st.devices("numpy")[0], st.devices("checked")[0]], ("x",))
    for use in (lambda: st.zeros(4, device=mixed), lambda: st.device_put(np.ones(4), mixed)):
        with pytest.raises(st.BackendError, match=r"belong to the backends \['checked', 'numpy'\]"):
            use()
    with pytest.raises(st.ShardTensorError, match="there is no backend named 'nonsense'"):
        st.zeros(3, device=Device("nonsense", 0))


# -- a plugin of a third party, installed ----------------------------------------------------------

PROJECT = """
    [build-system]
    requires = ["hatchling"]
    build-backend = "hatchling.build"

    [project]
    name = "pebble-devices"
    version = "1.0"

    [project.entry-points."shardtensor.backends"]
    pebble = "pebble_devices:PebbleBackend"
"""

PLUGIN = '''
    """Three devices with separate memories, as far as the library can tell, with only the required methods."""

    import numpy as np
    from shardtensor.backend import Backend, Device


    class Pebble(np.ndarray):
        pass


    def mark(x):
        if isinstance(x, (tuple, list)):
            return type(x)(map(mark, x))
        return np.asarray(x).view(Pebble) if isinstance(x, (np.ndarray, np.generic)) else x


    class Namespace:
        def __getattr__(self, name):
            attribute = getattr(np, name)
            if isinstance(attribute, type) or not callable(attribute):
                return attribute
            return lambda *args, **kwargs: mark(attribute(*args, **kwargs))


    class PebbleBackend(Backend):
        name = "pebble"
        xp = Namespace()
        crossings = []

        def devices(self):
            return [Device("pebble", i, kind="stone") for i in range(3)]

        def is_array(self, x):
            return type(x) is Pebble

        def to_device(self, array, source, destination):
            self.crossings.append((source.id, destination.id))
            return mark(np.array(array))

        def from_host(self, array, device):
            assert type(array) is np.ndarray
            return mark(np.array(array))

        def to_host(self, array, device):
            assert type(array) is Pebble
            return np.array(array)
'''


@pytest.fixture(scope="module")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The PYTHONPATH with which the plugin is installed."""
    project, scratch = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("scratch")
    (project / "pyproject.toml").write_text(textwrap.dedent(PROJECT))
    (project / "pebble_devices.py").write_text(textwrap.dedent(PLUGIN))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--target"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(scratch), str(project)], check=True)
    return os.pathsep.join(filter(None, [str(scratch), os.environ.get("PYTHONPATH")]))


THIRD_PARTY = {
    "is found": """
        assert {"checked", "numpy", "pebble"} <= set(st.backend_names()), st.backend_names()
        devices = st.devices("pebble")
        assert [str(d) for d in devices] == ["pebble:0", "pebble:1", "pebble:2"]
        assert devices[0].kind == "stone"
        assert st.num_shards("pebble") == 3
        assert load("pebble").memory_info(devices[0]) is None
    """,
    "computes": """
        for spec in [("x",), (None, "x"), ()]:
            x = placed(a, *spec)
            assert all(type(s.data).__name__ == "Pebble" for s in x.addressable_shards)
            same(st.sum(x), a.sum())
            same(st.sum(x, axis=0), a.sum(0))
            same(st.mean(x, axis=1, keepdims=True), a.mean(1, keepdims=True))
            same(st.argmax(x, axis=0), a.argmax(0))
            same(x * 2 + 1, a * 2 + 1)
            same(x[1:, ::-2], a[1:, ::-2])
            same(st.reshape(x, (7, 5)), a.reshape(7, 5))
            for other in [("x",), (None, "x"), ()]:
                same(x @ placed(a.T.copy(), *other), a @ a.T)
        x = placed(a, "x")
        assert (x @ x.T).sharding.mesh == mesh
    """,
    "transfers": """
        crossings = load("pebble").crossings
        x = placed(a, "x")
        crossings.clear()
        with st.transfers() as log:
            y = st.reshard(x, st.NamedSharding(mesh, st.P(None, "x")))
        same(y, a)
        assert sorted(crossings) == [(i, j) for i in range(3) for j in range(3) if i != j], crossings
        kept = 2 * 3 + 2 * 2 + 1 * 2
        assert log.bytes == log.copied == (35 - kept) * 8, (log.bytes, log.copied)
        crossings.clear()
        same(st.reshard(y, st.NamedSharding(mesh, st.P(None, "x"))), a)
        assert not crossings
    """,
    "maps": """
        parts = st.shard(a, devices=st.devices("pebble"))
        seen = []
        def square(x):
            seen.append((type(x).__name__, str(st.current_device()), type(st.sum(x)).__name__))
            return x * x
        squares = st.pmap(square, parts)
        assert sorted(seen) == [("Pebble", f"pebble:{i}", "Pebble") for i in range(3)], seen
        assert [s.device for s in squares] == st.devices("pebble")
        same(st.concat(squares), a * a)
        roots = st.pmap(np.sqrt, squares, donate=True)
        same(st.unshard(roots), a)
        same(st.smap(lambda x: x + 1, a, axes=0, devices=st.devices("pebble")), a + 1)
    """,
    "mixes with others": """
        here, there = placed(a, "x"), placed(a + 1, "x", mesh=st.make_mesh((4,), ("x",), devices=st.devices("numpy")))
        for x, y in [(here, there), (there, here)]:
            z = x + y
            assert z.sharding.mesh == x.sharding.mesh  # of equal weight: the left one's
            same(z, a + a + 1)
        same(here + a, 2 * a)
        same(a + there, 2 * a + 1)
        same(here @ np.ones(7), a @ np.ones(7))
        same(st.concat([here, there]), np.concatenate([a, a + 1]))
        same(st.device_put(here, st.devices("checked")[1]), a)
        same(st.device_put(st.device_put(a, st.devices("checked")[1]), mesh), a)
        small = placed(np.ones(7), mesh=st.make_mesh((2,), ("x",), devices=st.devices("numpy")))
        assert (small + here).sharding.mesh == mesh  # what costs most to move stays
        raw = load("pebble").from_host(a, st.devices("pebble")[0])
        same(here - raw, 0 * a)
        same(st.asarray(raw), a)
    """,
}
"""What the plugin is tested with."""


def test_third_party_backend(third_party: str) -> None:
    """Each program runs in a process of its own, which begins after the library was imported."""
    head = """
        import os, sys, numpy as np, shardtensor as st
        from shardtensor.backend.registry import load
        def same(x, wanted):
            np.testing.assert_array_equal(np.asarray(x), wanted)
        def placed(value, *spec, mesh=None):
            return st.device_put(value, st.NamedSharding(mesh or globals()["mesh"], st.P(*spec)))
        a = np.arange(35.0).reshape(5, 7)
    """
    programs = {name: textwrap.dedent(code) for name, code in THIRD_PARTY.items()}
    each = f"""
failures = []
for name, code in {programs!r}.items():
    if not (child := os.fork()):
        mesh = st.Mesh(st.devices("pebble"), ("x",))
        exec(compile(code, name, "exec"))
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failures.append(name)
sys.exit(f"failed: {{failures}}" if failures else 0)
"""
    code = textwrap.dedent(head) + each
    output_of(new_process("-W", "error", "-c", code, PYTHONPATH=third_party, SHARDTENSOR_NUM_DEVICES="4"))


# -- checked: what real devices forbid raises ------------------------------------------------------


@pytest.fixture
def checked() -> Backend:
    return load("checked")


def made(checked: Backend, number: int, value: Any = (3.0, 1.0, 2.0)) -> Any:
    """An array in the memory of a device."""
    device = checked.devices()[number]
    with checked.on(device):
        return checked.from_host(np.array(value), device)


TOUCHES: dict[str, Callable[[Any], Any]] = {
    "a + 1": lambda a: a + 1,
    "1 - a": lambda a: 1 - a,
    "-a": lambda a: -a,
    "a < 2": lambda a: a < 2,
    "a @ a": lambda a: a @ a,
    "a += 1": lambda a: a.__iadd__(1),
    "a[0]": lambda a: a[0],
    "a[1:]": lambda a: a[1:],
    "a[0] = 1": lambda a: a.__setitem__(0, 1),
    "np.sum(a)": lambda a: np.sum(a),
    "np.sort(a)": lambda a: np.sort(a),
    "np.concat([a])": lambda a: np.concatenate([a]),
    "np.add.reduce(a)": lambda a: np.add.reduce(a),
    "np.where(a > 0, a, 0)": lambda a: np.where(a, a, 0),
    "np.linalg.norm(a)": lambda a: np.linalg.norm(a),
    "xp.sum(a)": lambda a: load("checked").xp.sum(a),
    "xp.ones(3)": lambda a: load("checked").xp.ones(3),
    "xp.asarray(host)": lambda a: load("checked").xp.asarray(np.ones(3)),
    "a.sum()": lambda a: a.sum(),
    "a.mean()": lambda a: a.mean(),
    "a.max()": lambda a: a.max(),
    "a.argmax()": lambda a: a.argmax(),
    "a.dot(a)": lambda a: a.dot(a),
    "a.astype(int)": lambda a: a.astype(int),
    "a.copy()": lambda a: a.copy(),
    "a.cumsum()": lambda a: a.cumsum(),
    "a.round()": lambda a: a.round(),
    "a.clip(0, 1)": lambda a: a.clip(0, 1),
    "a.take([0])": lambda a: a.take([0]),
    "a.fill(0)": lambda a: a.fill(0),
    "a.sort()": lambda a: a.sort(),
    "float(a[0])": lambda a: float(a[0]),
    "list(a)": lambda a: list(a),
    "from_host": lambda a: load("checked").from_host(np.ones(3), load("checked").devices()[0]),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_checked_access_outside_of_on(touch: str, checked: Backend) -> None:
    a = made(checked, 0)
    with checked.on(checked.devices()[0]):
        TOUCHES[touch](made(checked, 0))  # fine here
    with pytest.raises(st.BackendError, match="no checked device is current"):
        TOUCHES[touch](a)
    np.testing.assert_array_equal(checked.to_host(a, checked.devices()[0]), [3, 1, 2])


@pytest.mark.parametrize("touch", [t for t in TOUCHES if not t.startswith("xp.ones") and "host" not in t])
def test_checked_access_on_another_device(touch: str, checked: Backend) -> None:
    a = made(checked, 0)
    with checked.on(checked.devices()[1]), pytest.raises(st.BackendError, match=r"checked:0.*checked:1 is current"):
        TOUCHES[touch](a)
    np.testing.assert_array_equal(checked.to_host(a, checked.devices()[0]), [3, 1, 2])


MIXTURES: dict[str, Callable[[Any, Any], Any]] = {
    "a + b": lambda a, b: a + b,
    "b + a": lambda a, b: b + a,
    "a @ b": lambda a, b: a @ b,
    "a == b": lambda a, b: a == b,
    "a += b": lambda a, b: a.__iadd__(b),
    "a[:] = b": lambda a, b: a.__setitem__(slice(None), b),
    "a[b]": lambda a, b: a[b],
    "np.add(a, 1, out=b)": lambda a, b: np.add(a, 1, out=b),
    "np.add(a, a, where=b)": lambda a, b: np.add(a, a, where=b),
    "np.concatenate": lambda a, b: np.concatenate([a, b]),
    "np.stack": lambda a, b: np.stack((b, a)),
    "np.where": lambda a, b: np.where(a > 0, a, b),
    "np.dot": lambda a, b: np.dot(a, b),
    "np.einsum": lambda a, b: np.einsum("i,i", a, b),
    "xp.add": lambda a, b: load("checked").xp.add(a, b),
    "xp.matmul": lambda a, b: load("checked").xp.matmul(a, b),
    "xp.concat": lambda a, b: load("checked").xp.concat([a, b]),
    "xp.clip(min=)": lambda a, b: load("checked").xp.clip(a, min=b),
    "a.dot(b)": lambda a, b: a.dot(b),
    "a.clip(b)": lambda a, b: a.clip(b),
    "a.take(b)": lambda a, b: a.take(b),
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_checked_mixing_devices(mixture: str, checked: Backend) -> None:
    a, b = made(checked, 0), made(checked, 1, (2, 0, 1))
    with checked.on(checked.devices()[0]), pytest.raises(st.BackendError, match=r"checked:1.*checked:0 is current"):
        MIXTURES[mixture](a, b)
    np.testing.assert_array_equal(checked.to_host(a, checked.devices()[0]), [3, 1, 2])
    np.testing.assert_array_equal(checked.to_host(b, checked.devices()[1]), [2, 0, 1])


@pytest.mark.parametrize("mixture", MIXTURES)
def test_checked_mixing_in_host_arrays(mixture: str, checked: Backend) -> None:
    a, host = made(checked, 0), np.array([2, 0, 1])
    with checked.on(checked.devices()[0]), pytest.raises(st.ArgumentTypeError, match=r"host array.*checked:0"):
        MIXTURES[mixture](a, host)
    np.testing.assert_array_equal(checked.to_host(a, checked.devices()[0]), [3, 1, 2])
    np.testing.assert_array_equal(host, [2, 0, 1])


def test_checked_on_its_own_device(checked: Backend) -> None:
    device = checked.devices()[2]
    a = made(checked, 2)
    xp = checked.xp
    with checked.on(device):
        found = [
            a + np.float64(1),
            xp.sum(a),
            a[1:],
            np.stack([a, a]),
            a.sum(),
            xp.asarray(np.ones(2)),
            xp.zeros((2, 2)),
        ]
        a[0] = 7
        a += 1
    for x in found:
        assert type(x) is CheckedArray
        assert checked.is_array(x)
        assert checked.device_of(x) == device
    assert not checked.is_array(np.ones(3))
    np.testing.assert_array_equal(checked.to_host(a, device), [8, 2, 3])


def test_checked_on_nests_and_restores(checked: Backend) -> None:
    first, second = checked.devices()[:2]
    a, b = made(checked, 0), made(checked, 1)

    def fail() -> None:
        with checked.on(second):
            _ = b + 1
            raise ZeroDivisionError

    with checked.on(first):
        _ = a + 1
        with pytest.raises(ZeroDivisionError):
            fail()
        _ = a + 1
        with pytest.raises(st.BackendError, match="checked:1"):
            _ = b + 1
    with pytest.raises(st.BackendError, match="no checked device is current"):
        _ = a + 1


def order(checked: Backend, before: int, after: int) -> None:
    devices = checked.devices()
    checked.wait(devices[after], checked.record(devices[before]))


def cross(checked: Backend, a: Any, source: int, destination: int) -> Any:
    devices = checked.devices()
    with checked.on(devices[destination]):
        return checked.to_device(a, devices[source], devices[destination])


def test_checked_copies_need_an_event(checked: Backend) -> None:
    a = made(checked, 0)
    with pytest.raises(
        st.BackendError, match=r"no event orders checked:1 after the last write of checked:0.*`record` and `wait`"
    ):
        cross(checked, a, 0, 1)
    order(checked, 0, 1)
    b = cross(checked, a, 0, 1)
    assert checked.device_of(b) == checked.devices()[1]
    np.testing.assert_array_equal(checked.to_host(b, checked.devices()[1]), [3, 1, 2])
    assert not np.shares_memory(np.asarray(a), np.asarray(b))
    cross(checked, a, 0, 0)  # its own device knows
    with pytest.raises(st.BackendError, match="`record` and `wait`"):
        cross(checked, a, 0, 2)  # the other one does not


def test_checked_event_covers_earlier_work_only(checked: Backend) -> None:
    """An event orders what was queued when it was recorded, and nothing after."""
    early = made(checked, 0)
    order(checked, 0, 1)
    late = made(checked, 0)
    cross(checked, early, 0, 1)
    with pytest.raises(st.BackendError, match="`record` and `wait`"):
        cross(checked, late, 0, 1)


def test_checked_event_in_the_other_direction(checked: Backend) -> None:
    a = made(checked, 0)
    made(checked, 1)
    order(checked, 1, 0)
    with pytest.raises(st.BackendError, match="`record` and `wait`"):
        cross(checked, a, 0, 1)


def test_checked_events_are_transitive(checked: Backend) -> None:
    """Device 2 waits for device 1, which has waited for device 0: device 2 is ordered after both."""
    a = made(checked, 0)
    order(checked, 0, 1)
    order(checked, 1, 2)
    np.testing.assert_array_equal(checked.to_host(cross(checked, a, 0, 2), checked.devices()[2]), [3, 1, 2])


WRITES: dict[str, Callable[[Any], Any]] = {
    "a[0] = 5": lambda a: a.__setitem__(0, 5),
    "a += 1": lambda a: a.__iadd__(1),
    "np.add(a, 1, out=a)": lambda a: np.add(a, 1, out=a),
    "a[1:][...] = 5": lambda a: a[1:].__setitem__(..., 5),
    "a[1:] += 1": lambda a: a[1:].__iadd__(1),
    "np.copyto(a, 5)": lambda a: np.copyto(a, 5),
    "xp.multiply(a, 2, out=a)": lambda a: load("checked").xp.multiply(a, 2, out=a),
    "a.fill(0)": lambda a: a.fill(0),
    "a.sort()": lambda a: a.sort(),
}


@pytest.mark.parametrize("write", WRITES)
def test_checked_later_writes_need_another_event(write: str, checked: Backend) -> None:
    a = made(checked, 0)
    order(checked, 0, 1)
    with checked.on(checked.devices()[0]):
        WRITES[write](a)
    with pytest.raises(st.BackendError, match="`record` and `wait`"):
        cross(checked, a, 0, 1)
    order(checked, 0, 1)
    cross(checked, a, 0, 1)


def test_checked_copies_name_source_and_destination(checked: Backend) -> None:
    a, devices = made(checked, 0), checked.devices()
    with checked.on(devices[1]), pytest.raises(st.BackendError, match=r"in the memory of checked:0, not of checked:2"):
        checked.to_device(a, devices[2], devices[1])
    with checked.on(devices[0]), pytest.raises(st.BackendError, match=r"checked:0 is current.*to checked:1"):
        checked.to_device(a, devices[0], devices[1])
    with pytest.raises(st.BackendError, match="no checked device is current"):
        checked.to_device(a, devices[0], devices[1])
    with checked.on(devices[0]), pytest.raises(st.BackendError, match=r"checked:0 is current.*to checked:1"):
        checked.from_host(np.ones(3), devices[1])
    with pytest.raises(st.BackendError, match=r"in the memory of checked:0, not of checked:1"):
        checked.to_host(a, devices[1])


@pytest.mark.parametrize("write", WRITES)
def test_checked_shards_are_read_only(write: str, checked: Backend) -> None:
    x = st.device_put(np.array([3.0, 1, 2, 4, 5]), st.make_mesh((2,), ("x",), devices=checked.devices()))
    for shard in x.addressable_shards:
        with checked.on(shard.device), pytest.raises(ValueError, match="read-only"):
            WRITES[write](shard.data)
    np.testing.assert_array_equal(np.asarray(x), [3, 1, 2, 4, 5])
    parts = st.shard(x, devices=list(checked.devices()[:2]))
    with pytest.raises(ValueError, match="read-only"):
        st.pmap(WRITES[write], parts)
    np.testing.assert_array_equal(np.asarray(st.concat(parts)), [3, 1, 2, 4, 5])


def test_checked_export_leaves_the_array_writable(checked: Backend) -> None:
    a = made(checked, 0)
    seen = checked.export(a)
    with checked.on(checked.devices()[0]):
        a[0] = 9
        np.testing.assert_array_equal(np.asarray(seen), [9, 1, 2])
        with pytest.raises(ValueError, match="read-only"):
            seen[0] = 5


def test_checked_library_orders_its_copies() -> None:
    """The parts were computed on other devices just before: each copy between devices is ordered by an event."""
    devices = st.devices("checked")
    left = st.pmap(lambda a: a + 1, st.shard(np.arange(10.0), devices=devices[:4]))
    right = st.pmap(lambda a: a * 2, st.shard(np.arange(10.0), devices=devices[3::-1]))
    both = st.pmap(lambda a, b: a + b, left, right)
    np.testing.assert_array_equal(np.asarray(st.concat(both)), np.arange(10) * 3 + 1)
    x = st.device_put(np.arange(12.0).reshape(3, 4), st.make_mesh((3,), ("x",), devices=devices))
    for _ in range(3):
        x = (x + 1) @ st.reshard(x + 1, devices[7]).T @ x
        x = x / st.sum(x)
    assert abs(float(st.sum(x)) - 1) < 1e-12


# -- numpy: what its docstrings say ----------------------------------------------------------------


@pytest.fixture
def host() -> Backend:
    return load("numpy")


def test_numpy_adopts_a_fresh_array(host: Backend) -> None:
    held = [np.arange(3.0)]
    address = held[0].ctypes.data
    result, copied = host.adopt(held, ())
    assert not copied
    assert result is held[0]
    assert result.ctypes.data == address


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "slice": lambda a: a[2:9],
    "transpose": lambda a: a.reshape(3, 4).T,
    "view of a view": lambda a: a.reshape(3, 4)[1:].T[::-1],
}


@pytest.mark.parametrize("view", VIEWS)
def test_numpy_adopts_a_view_of_a_fresh_array(view: str, host: Backend) -> None:
    held = [VIEWS[view](np.arange(12.0))]
    address = held[0].ctypes.data
    result, copied = host.adopt(held, ())
    assert not copied
    assert result.ctypes.data == address


HOLDERS: dict[str, Callable[[np.ndarray], tuple[np.ndarray, Any]]] = {
    "the array": lambda a: (a, a),
    "a list with it": lambda a: (a, [a]),
    "a view of it": lambda a: (a, a[1:]),
    "a memoryview of it": lambda a: (a, memoryview(a)),  # type: ignore[arg-type]
    "what it is a view of": lambda a: (a[1:], a),
    "another view of what it is a view of": lambda a: (a[1:], a[:2]),
    "a reshaped view": lambda a: (a.reshape(2, 2), a.reshape(-1)),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_numpy_copies_arrays_with_other_holders(holder: str, host: Backend) -> None:
    array, held = HOLDERS[holder](np.arange(4.0))
    before = array.copy()
    result, copied = host.adopt([array], ())
    assert copied
    assert not np.shares_memory(result, array)
    array[...] = -1
    np.testing.assert_array_equal(result, before)
    del held


def test_numpy_adopts_views_of_shards(host: Backend) -> None:
    shard = np.arange(6.0)
    shard.flags.writeable = False
    part = shard[2:5]
    for array in (host.export(part), part[::-1], shard.reshape(2, 3), shard):
        result, copied = host.adopt([array], [part])
        assert not copied
        assert result is array
    writable = np.arange(6.0)
    result, copied = host.adopt([writable[1:]], [writable[:3]])  # the base can be written
    assert copied
    assert not np.shares_memory(result, writable)
    other = np.arange(6.0)
    view = other[2:]
    view.flags.writeable = False  # read-only, but no view of a shard
    result, copied = host.adopt([view], [part])
    assert copied
    assert not np.shares_memory(result, other)


FOREIGN: dict[str, Callable[[], tuple[Any, np.ndarray]]] = {
    "bytearray": lambda: (lambda b: (b, np.frombuffer(b, np.uint8)))(bytearray(4)),
    "array.array": lambda: (lambda b: (b, np.asarray(b)))(arrays_of_python.array("d", [0, 0, 0])),
    "memoryview": lambda: (lambda b: (b, np.asarray(memoryview(b))))(bytearray(4)),
    "slice of a bytearray's": lambda: (lambda b: (b, np.frombuffer(b, np.uint8)[1:]))(bytearray(4)),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_numpy_copies_foreign_buffers(kind: str, host: Backend) -> None:
    owner, array = FOREIGN[kind]()
    result, copied = host.adopt([array], ())
    assert copied
    assert type(result) is np.ndarray
    for i in range(len(owner)):
        owner[i] = 1
    assert not result.any()


def test_numpy_copies_mapped_files(host: Backend, tmp_path: Path) -> None:
    array = np.memmap(tmp_path / "file", dtype="f8", mode="w+", shape=(4,))
    result, copied = host.adopt([array], ())
    assert copied
    assert type(result) is np.ndarray
    array[:] = 1
    assert not result.any()
    plain = np.asarray(array)
    result, copied = host.adopt([plain], ())
    assert copied
    assert not np.shares_memory(result, array)


def test_numpy_copies_subclasses(host: Backend) -> None:
    class Sub(np.ndarray):
        pass

    result, copied = host.adopt([np.arange(3.0).view(Sub)], ())
    assert copied
    assert type(result) is np.ndarray
    np.testing.assert_array_equal(result, [0, 1, 2])


@pytest.mark.parametrize("view", VIEWS)
def test_numpy_makes_exclusive_arrays_writable(view: str, host: Backend) -> None:
    for make in (lambda: np.arange(3.0), lambda: np.ascontiguousarray(VIEWS[view](np.arange(12.0)))[:]):
        held = [make()]
        held[0].flags.writeable = False
        address = held[0].ctypes.data
        assert host.is_exclusive(held)
        assert host.begin_write(held[0])
        assert held[0].ctypes.data == address
        held[0][...] = 7
        assert (held[0] == 7).all()


def test_numpy_does_not_write_to_aliased_elements(host: Backend) -> None:
    array = np.broadcast_to(np.arange(3.0), (4, 3))
    assert not host.begin_write(array)
    assert not array.flags.writeable


@pytest.mark.parametrize("holder", [h for h in HOLDERS if "reshaped" not in h])
def test_numpy_arrays_with_other_holders_are_not_exclusive(holder: str, host: Backend) -> None:
    array, other = HOLDERS[holder](np.arange(4.0))
    array.flags.writeable = False
    held = [array]
    del array
    assert not host.is_exclusive(held)
    assert not held[0].flags.writeable
    del other


def test_numpy_transfers_are_copies(host: Backend) -> None:
    first, second = host.devices()[:2]
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    for made_of_it in (host.to_device(array, first, second), host.from_host(array, first)):
        assert not np.shares_memory(made_of_it, array)
        assert made_of_it.flags.c_contiguous
        np.testing.assert_array_equal(made_of_it, array)
    for view in (host.export(array), host.to_host(array, first)):
        assert np.shares_memory(view, array)
        assert not view.flags.writeable
        assert array.flags.writeable


def copied_by(function: Callable[..., Any], parts: Any, **options: Any) -> tuple[list[Any], int]:
    with st.transfers() as log:
        out = st.pmap(function, parts, **options)
    assert log.bytes == 0
    return out, log.copied


KEPT: list[Any] = []


def keep(x: np.ndarray) -> np.ndarray:
    KEPT.append(x)
    return x


MAPPED: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "a fresh array": (lambda x: x + 1, False),
    "a fresh array with a name": (lambda x: [y := x + 1, y.sum()][0], False),
    "a view of a fresh array": (lambda x: (x + 1)[1:], False),
    "a transposed fresh array": (lambda x: np.outer(x, x).T, False),
    "the shard": (lambda x: x, False),
    "a view of the shard": (lambda x: x[::-1], False),
    "a reshaped view of the shard": (lambda x: x.reshape(2, 2).T, False),
    "an array that is kept": (lambda x: keep(x + 1), True),
    "an array of which a view is kept": (lambda x: [y := x + 1, keep(y[1:])][0], True),
    "a view of an array that is kept": (lambda x: keep(x + 1)[1:], True),
    "a foreign buffer": (lambda x: np.frombuffer(bytearray(32)), True),
}


@pytest.mark.parametrize("what", MAPPED)
def test_numpy_results_of_maps(what: str) -> None:
    """The same through the library: adopted arrays are not copied, and writes of other holders are not visible."""
    function, copies = MAPPED[what]
    KEPT.clear()
    parts = st.shard(np.arange(12.0), devices=st.devices("numpy")[:3])
    wanted = [np.array(function(np.asarray(p))) for p in parts]
    KEPT.clear()
    out, copied = copied_by(function, parts)
    assert copied == (sum(w.nbytes for w in wanted) if copies else 0)
    for x in KEPT:
        x[...] = -1
    for found, right in zip(out, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(found), right)
    KEPT.clear()


EXCLUSIVE: dict[str, Callable[[list[Device]], list[st.ShardedTensor]]] = {
    "results of a map": lambda devices: st.pmap(lambda x: x + 1, st.shard(np.arange(12.0), devices=devices)),
    "one result of a map": lambda devices: st.pmap(lambda x: x + 1, [st.device_put(np.arange(4.0), devices[0])]),
    "put there": lambda devices: [st.device_put(np.arange(4.0) + i, d) for i, d in enumerate(devices)],
    "created there": lambda devices: [st.ones((2, 3), device=d) for d in devices],
    "computed there": lambda devices: [st.device_put(np.arange(4.0), d) * 2 for d in devices],
}


@pytest.mark.parametrize("how", EXCLUSIVE)
def test_numpy_donates_exclusive_arrays(how: str) -> None:
    """The function writes in place. Copies are counted, since an address may be reused by chance."""
    parts = EXCLUSIVE[how](st.devices("numpy")[:3])
    values = [np.array(p) for p in parts]
    addresses = [p.addressable_shards[0].data.ctypes.data for p in parts]
    seen = []

    def double(x: np.ndarray) -> np.ndarray:
        seen.append(x.ctypes.data)
        x *= 2
        return x

    out, copied = copied_by(double, parts, donate=True)
    assert copied == 0
    assert sorted(seen) == sorted(addresses)
    assert [p.addressable_shards[0].data.ctypes.data for p in out] == addresses
    for found, value in zip(out, values, strict=True):
        np.testing.assert_array_equal(np.asarray(found), value * 2)
    assert all(p.is_donated for p in parts)


def test_numpy_donates_copies_of_shared_arrays() -> None:
    whole = st.device_put(np.arange(12.0), st.make_mesh((3,), ("x",)))
    parts = st.shard(whole, devices=st.devices("numpy")[:3])  # views of one buffer

    def zero(x: np.ndarray) -> np.ndarray:
        x[...] = 0
        return x

    out, copied = copied_by(zero, parts, donate=True)
    assert copied == 12 * 8
    np.testing.assert_array_equal(np.asarray(whole), np.arange(12))
    assert not np.asarray(st.concat(out)).any()


# -- what all backends inherit ---------------------------------------------------------------------


def test_current_device(backend: str) -> None:
    devices = st.devices(backend)

    def inner(_: Any) -> str:
        return str(st.current_device())

    def outer(_: Any) -> list[Any]:
        before = str(st.current_device())
        within = st.pmap(inner, st.shard(np.arange(2), devices=devices[6:]))
        return [before, within, str(st.current_device())]

    assert st.current_device() is None
    seen = st.pmap(outer, st.shard(np.arange(6), devices=devices[:3]))
    assert seen == [[str(d), [str(e) for e in devices[6:]], str(d)] for d in devices[:3]]
    assert st.current_device() is None


def test_current_device_after_an_error(backend: str) -> None:
    def fail(_: Any) -> None:
        assert st.current_device() is not None
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        st.pmap(fail, st.shard(np.arange(6), devices=st.devices(backend)[:3]))
    assert st.current_device() is None


def test_defaults_of_a_backend() -> None:
    stub, array = Stub(), np.arange(3.0)
    device = stub.devices()[0]
    with stub.on(device):
        pass
    assert stub.record(device) is None
    assert stub.wait(device, None) is None
    assert stub.synchronize(device) is None
    assert stub.memory_info(device) is None
    assert stub.device_of(array) == device
    assert stub.export(array) is array
    assert stub.asarray(array) is array
    assert (stub.priority, stub.on_host) == (0, False)
    assert not stub.is_exclusive([np.zeros(3)])
    assert stub.memory_of(array) is None
    assert stub.begin_write(array)
    assert stub.lend(array) == (array, None)
    result, copied = stub.adopt([array], ())
    assert copied
    assert not np.shares_memory(result, array)
    with pytest.raises(TypeError, match="abstract"):
        Backend()  # type: ignore[abstract]


def test_each_thread_has_its_own_current_device(checked: Backend) -> None:
    a, b = made(checked, 0), made(checked, 1)
    errors: list[BaseException] = []

    def work(number: int, x: Any) -> None:
        try:
            for _ in range(20):
                with checked.on(checked.devices()[number]):
                    x = x + 1
                    time.sleep(0.0005)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=args) for args in ((0, a), (1, b))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_checked_rejects_reading_elements_that_are_written(checked: Backend) -> None:
    """NumPy would copy the operand first; devices read and write at the same time."""
    a = made(checked, 0)
    with checked.on(checked.devices()[0]):
        before = np.array(a.view(np.ndarray))
        for write in (
            lambda: checked.xp.add(a[1:], a[:-1], out=a[1:]),
            lambda: a.__setitem__(slice(1, None), a[:-1]),
            lambda: a.__setitem__(checked.xp.asarray([0, 1]), a[1:]),
            lambda: np.multiply(a, a[::-1], out=a),
        ):
            with pytest.raises(st.BackendError, match="reads elements of an array that it writes"):
                write()
        np.testing.assert_array_equal(a.view(np.ndarray), before)
        checked.xp.add(a, a, out=a)  # element for element
        a[:1] = a[1:2]  # elsewhere
        assert a.view(np.ndarray)[0] == 2 * before[1]


def test_a_backend_in_a_job_of_processes_translates_the_devices_of_every_method() -> None:
    """A plugin and a job number the same devices differently."""
    takes_devices = {
        name
        for name, method in vars(Backend).items()
        if inspect.isfunction(method)
        and any("Device" in str(p.annotation) for p in inspect.signature(method).parameters.values())
    }
    assert takes_devices
    assert takes_devices <= vars(ProcessBackend).keys()


@pytest.mark.parametrize(
    ("language", "method", "arguments"), [("c", "host_view", 1), ("cuda", "elementwise_kernel", 5), ("cuda", "raw_kernel", 2)]
)  # fmt: skip
def test_a_backend_that_names_a_language_without_its_methods(language: str, method: str, arguments: int) -> None:
    kind: Any = type("Incomplete", (Backend,), {"name": "incomplete", "kernel_language": language})
    kind.__abstractmethods__ = frozenset()
    with pytest.raises(
        st.BackendError, match=f"incomplete: kernel_language is '{language}', .* needs {method}; define"
    ):
        getattr(kind(), method)(*[""] * arguments)
