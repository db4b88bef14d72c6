"""The conformance suite: backends that follow the rules pass, and each violated rule is detected by a test.

The mutants are variants of the backend of `docs/writing_a_backend.md`, whose code is executed unchanged.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
import numpy as np
import pytest

from shardtensor.backend import Device, references, registry
from shardtensor.errors import BackendError
from shardtensor.testing import BackendTests, CheckedBackend, base
from shardtensor.testing.ordering_tests import ORDERED
from tests.cases import CASES
from tests.draws import drawn
from tests.pairs import spread
from tests.scripts import WITHOUT_PLUGINS, new_process, output_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing_a_backend.md").read_text()


def some_operators(start: int) -> Any:
    """Returns the test of a part of the operators in the fast tier: test_operators draws more calls of each."""
    names = spread(sorted(CASES), 3, start)

    @pytest.mark.parametrize("name", names)
    def test_operator(self: BackendTests, name: str) -> None:
        BackendTests.test_operator(self, name)

    return test_operator


class TestNumPy(BackendTests):
    backend = "numpy"
    examples = drawn(5, fast=3)
    test_operator = some_operators(0)


class TestChecked(BackendTests):
    backend = "checked"
    examples = drawn(5, fast=3)
    test_operator = some_operators(1)


class TestCuPy(BackendTests):
    backend = "cupy"
    examples = 2
    test_operator = some_operators(2)

    def current(self) -> Any:
        cuda = sys.modules["cupy"].cuda
        return cuda.runtime.getDevice(), cuda.get_current_stream().ptr


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
class TestTorch(BackendTests):
    backend = "torch"
    examples = 2
    test_operator = some_operators(0)


# -- the page --------------------------------------------------------------------------------------


def files_of_the_page() -> dict[str, str]:
    """The files that its blocks make up, each named in a block's first line."""
    files: dict[str, str] = {}
    for language, block in re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL):
        if language == "toml":
            files["pyproject.toml"] = block
        elif language == "python":
            name, _, code = block.partition("\n")
            files[name.removeprefix("# ")] = files.get(name.removeprefix("# "), "") + "\n" + code
    return files


FILES = files_of_the_page()


def test_the_backend_has_under_100_lines() -> None:
    assert "under 100 lines" in PAGE
    assert sum(bool(line.strip()) for line in FILES["lazy_devices.py"].splitlines()) < 100


def test_the_page_shows_the_failure() -> None:
    assert f"breaks a rule.\n  rule: {ORDERED}\n  found: a copy from lazy:0 to lazy:1: array" in PAGE


CONFTEST = """
from shardtensor.testing import BackendTests

BackendTests.examples = {examples}

def pytest_collection_modifyitems(items):
    operators = [item for item in items if item.originalname == "test_operator"]
    items[:] = [item for item in items if item not in operators] + operators[::{step}]
"""
"""In the fast tier a part of the operators with few examples."""


@pytest.mark.slow
def test_the_page_works(tmp_path: Path) -> None:
    """The project of the page is installed, its example runs, and its backend passes the suite."""
    project, scratch = tmp_path / "project", tmp_path / "scratch"
    project.mkdir()
    for name, text in FILES.items():
        (project / name).write_text(text)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--target"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(scratch), str(project)], check=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith("SHARDTENSOR_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(scratch), os.environ.get("PYTHONPATH")]))
    env |= WITHOUT_PLUGINS
    (project / "lazy_devices.py").unlink()  # the installed module is the one that runs
    (project / "conftest.py").write_text(CONFTEST.format(examples=drawn(20, fast=2), step=drawn(1, fast=40)))
    for command in (["try_lazy.py"], ["-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "test_lazy.py"]):
        command = [sys.executable, *command]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=project)
        assert done.returncode == 0, done.stdout + done.stderr


# -- broken backends -------------------------------------------------------------------------------

lazy: Any = types.ModuleType("lazy_devices")
exec(compile(FILES["lazy_devices.py"], "lazy_devices.py", "exec"), lazy.__dict__)


MUTANTS: list[type[Any]] = []


def mutant(caught_by: str, *arguments: Any, message: str) -> Callable[[type[Any]], type[Any]]:
    """Registers a backend that violates one rule, with the test that detects it, its arguments, and its message."""

    def register(broken: type[Any]) -> type[Any]:
        whole = type(broken.__name__, (broken, lazy.LazyBackend), {"name": f"lazy_{broken.__name__.lower()}"})
        whole.caught_by, whole.message = (caught_by, *arguments), message
        MUTANTS.append(whole)
        return whole

    return register


@mutant("test_copies_are_independent", message="Backend.to_device: an exclusive copy on the destination")
class ToDeviceAliases:
    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        return lazy.Tile(array.memory, destination)


@mutant("test_copies_wait_for_their_source", message="Backend.record and wait")
class ToDeviceCopiesAtOnce:
    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        return lazy.Tile(array.memory.copy(), destination)


@mutant("test_sources_may_be_deleted_at_once", message="the memory of the source is not reused before it has been read")
class SourceIsNotKept:
    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        copy, there = lazy.Tile(np.zeros_like(array.memory), destination), weakref.ref(array)
        self.queues[destination].put(lambda: np.copyto(copy.memory, there().memory if there() else 0))  # type: ignore[attr-defined]
        return copy


@mutant(
    "test_sources_are_not_written_before_they_are_read",
    message="the write is ordered after copies that still read the array",
)
class SoleWhileItIsCopied:
    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        copy, memory = lazy.Tile(np.zeros_like(array.memory), destination), array.memory
        self.queues[destination].put(lambda: np.copyto(copy.memory, memory))  # type: ignore[attr-defined]
        return copy

    def contiguous(self, array: Any) -> Any:
        return array

    def memory_of(self, array: Any) -> int:
        return id(array.memory)


@mutant("test_from_host_copies", message="Backend.from_host: a copy of the host array")
class FromHostAliases:
    def from_host(self, array: Any, device: Device) -> Any:
        return lazy.Tile(np.asarray(array), device)


@mutant("test_from_host_copies", message="Backend.from_host: a copy of the host array")
class FromHostCopiesLater:
    def from_host(self, array: Any, device: Device) -> Any:
        made = lazy.Tile(np.zeros(array.shape, array.dtype), device)
        self.queues[device].put(lambda: np.copyto(made.memory, array))  # type: ignore[attr-defined]
        return made


@mutant("test_reading_waits_for_queued_operations", message="Backend.to_host: the values after they have been computed")
class ToHostDoesNotWait:
    def to_host(self, array: Any, device: Device) -> Any:
        return array.memory.copy()


@mutant("test_host_arrays_do_not_change", message="Backend.to_host: the values after they have been computed")
class ToHostUsesOneBuffer:
    buffer = np.zeros(1 << 20)

    def to_host(self, array: Any, device: Device) -> Any:
        out = self.buffer.view(array.dtype)[: array.memory.size].reshape(array.shape)
        np.copyto(out, lazy.LazyBackend.to_host(self, array, device))
        return out


@mutant("test_copies_wait_for_their_source", message="Backend.record and wait")
class WaitDoesNothing:
    def wait(self, device: Device, token: Any) -> None:
        pass


@mutant("test_copies_wait_for_their_source", message="Backend.record and wait")
class RecordComesTooEarly:
    def record(self, device: Device) -> Any:
        return self.queues[device], self.queues[device].queued - 1  # type: ignore[attr-defined]


@mutant("test_random_traffic", message="Backend.record and wait")
class WaitForgetsEveryThird:
    count = 0

    def wait(self, device: Device, token: Any) -> None:
        self.count += 1
        if self.count % 3:
            lazy.LazyBackend.wait(self, device, token)


@mutant("test_on_nests", message="Backend.on: makes the device current in this thread")
class OnIsNotUndone:
    @contextlib.contextmanager
    def on(self, device: Device) -> Iterator[None]:
        lazy.current.set(self.queues[device])  # type: ignore[attr-defined]
        yield


@mutant("test_on_is_left_after_an_error", RuntimeError, message="Backend.on: makes the device current in this thread")
class OnIsNotUndoneByAnError:
    @contextlib.contextmanager
    def on(self, device: Device) -> Iterator[None]:
        token = lazy.current.set(self.queues[device])  # type: ignore[attr-defined]
        yield
        lazy.current.reset(token)


@mutant("test_on_is_left_after_an_error", ZeroDivisionError, message="Backend.on propagates errors")
class OnHidesErrors:
    @contextlib.contextmanager
    def on(self, device: Device) -> Iterator[None]:
        with contextlib.suppress(ZeroDivisionError), lazy.LazyBackend.on(self, device):
            yield


@mutant("test_current_device_of_each_thread", message="Backend.on: makes the device current in this thread")
class OnIsForAllThreads:
    stack: ClassVar[list[Any]] = []

    @contextlib.contextmanager
    def on(self, device: Device) -> Iterator[None]:
        self.stack.append(self.queues[device])  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self.stack.pop()

    @property
    def xp(self) -> Any:
        lazy.current.set(self.stack[-1] if self.stack else None)
        return lazy.Namespace()


@mutant("test_wait_for_caller", message="Backend.wait_for_caller and make_caller_wait make no device current")
class EnterMakesCurrent:
    def wait_for_caller(self, device: Device) -> None:
        lazy.current.set(self.queues[device])  # type: ignore[attr-defined]


@mutant(
    "test_is_exclusive_detects_holders",
    "a view",
    message="Backend.is_exclusive: True only if no other reference",
)
class ExclusiveAlways:
    def is_exclusive(self, held: list[Any], others: int = 0) -> bool:
        return True


@mutant("test_is_exclusive_detects_holders", "a reshaped view", message="Backend.is_exclusive: True only if no other")
class SoleDoesNotSeeViews:
    def is_exclusive(self, held: list[Any], others: int = 0) -> bool:
        return references(held) <= 1 + others


@mutant("test_memory_of_views", "a view", message="Backend.memory_of: equal for arrays that share memory")
class MemoryOfTheArray:
    def memory_of(self, array: Any) -> int:
        return id(array)


@mutant("test_memory_of_views", "a list", message="Backend.memory_of: equal for arrays that share memory")
class MemoryIsAlwaysNew:
    def memory_of(self, array: Any) -> object:
        return object()


@mutant("test_memory_of_views", "another variable", message="Backend.memory_of: equal for arrays that share memory")
class OneMemory:
    def memory_of(self, array: Any) -> int:
        return 1


@mutant("test_leases", message="Backend.lend: the lease lasts as long as the exported array and whatever is derived")
class LeaseOfTheView:
    def lend(self, array: Any) -> tuple[Any, Any]:
        exported = array[...]
        return exported, weakref.ref(exported)


@mutant("test_aliased_elements_are_not_written", message="Backend.begin_write: no two elements have the same address")
class WritesAliases:
    def memory_of(self, array: Any) -> int:
        return id(array.memory)

    def begin_write(self, array: Any) -> bool:
        array.memory.flags.writeable = True
        return True


@mutant(
    "test_adopted_arrays_are_independent", "another variable", message="Backend.adopt: an array that cannot be written"
)
class AdoptNeverCopies:
    def adopt(self, held: list[Any], shards: Any) -> tuple[Any, bool]:
        return held[0], False


@mutant("test_copies_are_reported", message="adopt returned another array and reports no copy")
class AdoptHidesCopies:
    def adopt(self, held: list[Any], shards: Any) -> tuple[Any, bool]:
        return self.xp.asarray(held[0], copy=True), False  # type: ignore[attr-defined]


@mutant("test_nested_maps_stay_on_their_device", message="an array in a mapped function is on the function's device")
class DeviceOfIsTheFirst:
    def device_of(self, array: Any) -> Device:
        return next(iter(self.queues))  # type: ignore[attr-defined, no-any-return]


@mutant("test_views_share_memory", message="Backend.view is a view")
class ViewCopies:
    def view(self, array: Any, index: Any) -> Any:
        return self.xp.asarray(array[index], copy=True)  # type: ignore[attr-defined]


@mutant("test_views_share_memory", message="Backend.negative_strides")
class NegativeStridesCopy:
    def view(self, array: Any, index: Any) -> Any:
        part = array[index]
        turned = any(s < 0 for s in part.memory.strides)
        return self.xp.asarray(part, copy=True) if turned else part  # type: ignore[attr-defined]


@mutant("test_views_have_numpys_elements", message="Backend.view: the elements at a basic index")
class ViewTakesStepsForPositive:
    def view(self, array: Any, index: Any) -> Any:
        entries = index if isinstance(index, tuple) else (index,)
        return array[tuple([slice(e.start, e.stop, abs(e.step or 1)) if type(e) is slice else e for e in entries])]


@mutant("test_host_round_trip", "int32", message="Backend.dtype_of: the NumPy dtype of the elements")
class DtypeOfIsWrong:
    def dtype_of(self, array: Any) -> Any:
        return np.dtype("float64")


@mutant("test_host_round_trip", "complex128", message="Backend.from_host and to_host: the same values, shape and dtype")
class DtypesAreNarrowed:
    def from_host(self, array: Any, device: Device) -> Any:
        narrow = array.astype("complex64") if array.dtype == "complex128" else array
        return lazy.LazyBackend.from_host(self, narrow, device)


@mutant("test_host_arrays_of_any_layout", "transposed", message="Backend.from_host and to_host: the same values")
class StridesAreIgnored:
    def from_host(self, array: Any, device: Device) -> Any:
        return lazy.LazyBackend.from_host(self, array.ravel(order="K").reshape(array.shape), device)


@mutant("test_contiguous", message="Backend.contiguous: the array itself if it is in row-major order")
class ContiguousDoesNothing:
    def contiguous(self, array: Any) -> Any:
        return array


@mutant("test_is_contiguous", message="Backend.is_contiguous: whether an array is in row-major order")
class AlwaysContiguous:
    def is_contiguous(self, array: Any) -> bool:
        return True


@mutant("test_offload_and_back", message="Backend.offload and onload")
class OffloadDoesNotWait:
    def offload(self, array: Any, device: Device) -> tuple[Any, Any]:
        return array.memory.copy(), None


@mutant("test_pin", message="Backend.pin: a copy of a host array")
class PinAliases:
    def pin(self, host: Any) -> Any:
        return host


@mutant("test_devices_are_values", message="Backend.devices: all devices, in order of their ids")
class DevicesAreOutOfOrder:
    def devices(self) -> list[Device]:
        return list(self.queues)[::-1]  # type: ignore[attr-defined]


@mutant("test_is_array", message="Backend.is_array: NumPy's arrays are the host's")
class TakesHostArrays:
    def is_array(self, x: object) -> bool:
        return type(x) in (lazy.Tile, np.ndarray)


@mutant("test_operator", "exp", message="every operator gives NumPy's result under every sharding")
class OperatorIsWrong:
    class Space(lazy.Namespace):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            return super().__getattr__("exp2" if name == "exp" else name)

    xp = Space()


@mutant("test_namespace", message="after x was written")
class AsarrayDoesNotCopy:
    class Space(lazy.Namespace):  # type: ignore[misc]
        def asarray(self, x: Any, dtype: Any = None, copy: Any = None) -> Any:
            return lazy.run(np.asarray, x, dtype=dtype)

    xp = Space()


made = functools.cache(lambda backend: backend())  # one instance each: the library caches properties of backends


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., BackendTests]:
    """Returns a function that creates a suite for a backend of that class, registered during the test.

    Failures, which are expected, are not simplified.
    """

    monkeypatch.setattr(base, "PROFILE", hypothesis.settings(base.PROFILE, phases=[hypothesis.Phase.generate]))

    def kit(backend: type[Any], **attributes: Any) -> BackendTests:
        monkeypatch.setitem(registry._loaded, backend.name, made(backend))
        return type("TestIt", (BackendTests,), {"backend": backend.name, **attributes})()

    return kit


@pytest.mark.parametrize("broken", MUTANTS, ids=lambda m: m.__name__)
def test_a_violated_rule_is_detected(broken: type[Any], use: Callable[..., BackendTests]) -> None:
    name, *arguments = broken.caught_by
    with pytest.raises(AssertionError, match=re.escape(broken.message)) as caught:
        contextvars.copy_context().run(getattr(use(broken), name), *arguments)
    assert f"backend '{broken.name}' breaks a rule" in str(caught.value)


TENSORS = [
    (AdoptNeverCopies, "test_pmap_results_kept_by_the_function", "mapped functions receive the backend's arrays"),
    (NegativeStridesCopy, "test_writes", "writes to a tensor are visible in its views only"),
    (WaitDoesNothing, "test_reshard", "a tensor has NumPy's elements"),
    (WaitDoesNothing, "test_collective_moves", "every program receives the operands of the others"),
    (WaitDoesNothing, "test_collective_exchange_of_rows", "every program receives the operands of the others"),
    (ViewCopies, "test_writes", "writes to a tensor are visible in its views only"),
]


@pytest.mark.parametrize(("broken", "name", "message"), TENSORS, ids=lambda v: getattr(v, "__name__", None))
def test_a_violated_rule_is_visible_in_tensors(
    broken: type[Any], name: str, message: str, use: Callable[..., BackendTests]
) -> None:
    """Most violations are detected twice: by a test of the rule, and by a test of tensors."""
    with pytest.raises(AssertionError, match=message):
        contextvars.copy_context().run(getattr(use(broken), name))


@pytest.mark.parametrize("call", sorted({m.caught_by for m in MUTANTS}, key=str), ids=str)
def test_the_correct_backend_passes(call: tuple[Any, ...], use: Callable[..., BackendTests]) -> None:
    """The tests that detect the mutants pass for the correct backend."""
    name, *arguments = call
    getattr(use(lazy.LazyBackend), name)(*arguments)


# -- the suite itself ------------------------------------------------------------------------------


class WithoutNextafter(lazy.LazyBackend):  # type: ignore[misc]
    """An operator is missing, and raises an error."""

    class Space(lazy.Namespace):  # type: ignore[misc]
        def nextafter(self, *args: Any, **kwargs: Any) -> Any:
            raise BackendError("nextafter: lazy devices do not have it; use another backend")

    name = "lazy_without_nextafter"
    xp = Space()


def test_unclaimed_operators_raise_and_are_not_wrong(use: Callable[..., BackendTests]) -> None:
    use(WithoutNextafter, unclaimed={"nextafter"}).test_operator("nextafter")
    with pytest.raises(BackendError, match="do not have it"):
        use(WithoutNextafter).test_operator("nextafter")
    with pytest.raises(AssertionError, match=r"`unclaimed` raises a ShardTensorError.*\n.*never raised"):
        use(lazy.LazyBackend, unclaimed={"nextafter"}).test_operator("nextafter")
    wrong = next(m for m in MUTANTS if m.__name__ == "OperatorIsWrong")
    with pytest.raises(AssertionError, match="never returns a wrong result"):
        use(wrong, unclaimed={"exp"}).test_operator("exp")
    with pytest.raises(AssertionError, match=r"names operators.*\n.*nextbefore"):
        use(lazy.LazyBackend, unclaimed={"nextbefore"}).test_unclaimed_operators_exist()


class WithoutDoubles(lazy.LazyBackend):  # type: ignore[misc]
    """Without double precision, like many accelerators."""

    name = "lazy_without_doubles"

    def has_dtype(self, dtype: Any) -> bool:
        return dtype not in ("float64", "complex128")


class OneDevice(lazy.LazyBackend):  # type: ignore[misc]
    """One device."""

    name = "lazy_one_device"

    def __init__(self) -> None:
        super().__init__()
        self.queues = dict([next(iter(self.queues.items()))])


def everything(kit: BackendTests) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The tests of a suite and their arguments, as pytest would run them."""
    for name in dir(kit):
        marks = getattr(getattr(kit, name), "pytestmark", [])
        values = [v for mark in marks if mark.name == "parametrize" for v in mark.args[1]]
        if name.startswith("test_"):
            yield from [(name, (v,)) for v in values] or [(name, ())]


@pytest.mark.parametrize("backend", [WithoutDoubles, OneDevice])
def test_backends_with_fewer_features_pass(backend: type[Any], use: Callable[..., BackendTests]) -> None:
    """Without a dtype, or with only one device, the rest is tested."""
    kit = use(backend, examples=drawn(3, fast=1))
    skipped = []
    for name, arguments in everything(kit):
        try:
            getattr(kit, name)(*arguments)
        except pytest.skip.Exception as reason:
            skipped.append(f"{name}: {reason}")
    wanted = "has no float64" if backend is WithoutDoubles else "this needs two"
    assert any(wanted in s for s in skipped), skipped


def test_changed_state_is_detected(use: Callable[..., BackendTests]) -> None:
    """After each test, the current device and NumPy's error state must be as they were before it."""
    kit = use(lazy.LazyBackend)
    for spoil in (lambda: lazy.current.set(kit.it.queues[kit.devices[0]]), lambda: np.seterr(all="ignore")):  # type: ignore[attr-defined]
        state, before = kit._state(), np.geterr()
        token = lazy.current.set(None)
        spoil()
        assert kit._state() != state
        lazy.current.reset(token)
        np.seterr(**before)


def test_testing_is_imported_without_pytest() -> None:
    """The module contains the entry point of `checked`, which every program loads."""
    code = """
        import sys, shardtensor.testing as kit
        assert not {"pytest", "hypothesis"} & set(sys.modules), "loaded"
        assert kit.CheckedBackend.name == "checked"
        sys.modules["hypothesis"] = None
        try:
            kit.BackendTests
        except ImportError as error:
            assert "pip install pytest hypothesis" in str(error), error
        else:
            raise SystemExit("imported")
    """
    output_of(new_process("-c", textwrap.dedent(code)))


def test_the_checked_backend_orders_devices_through_others() -> None:
    """A device is ordered after all that another one was ordered after when it recorded, even if that one did nothing
    in between.
    """
    backend = CheckedBackend()
    first, second, third = backend.devices()[:3]
    with backend.on(first):
        x = backend.xp.ones(3)
    backend.wait(third, backend.record(second))
    for ordered in (False, True):
        with backend.on(third), contextlib.nullcontext() if ordered else pytest.raises(BackendError, match="no event"):
            copy = backend.to_device(x, first, third)
        backend.wait(second, backend.record(first))
        backend.wait(third, backend.record(second))
    assert copy.view(np.ndarray).tolist() == [1, 1, 1]
    with backend.on(first):
        x[0] = 2
    with backend.on(third), pytest.raises(BackendError, match="no event"):
        backend.to_device(x, first, third)


def test_the_tools_that_need_neither_pytest_nor_hypothesis_work_without_them() -> None:
    code = """
        import sys
        sys.modules.update(pytest=None, hypothesis=None)
        import shardtensor as st
        st.testing.check_grads(st.sin, (st.ones(2),), order=1)
        print(st.testing.CheckedBackend.__name__)
        try:
            st.testing.BackendTests
        except ImportError as error:
            print(str(error).partition(":")[0])
    """
    lines = output_of(new_process("-c", textwrap.dedent(code))).splitlines()
    assert lines == ["CheckedBackend", "BackendTests needs pytest and hypothesis"]
