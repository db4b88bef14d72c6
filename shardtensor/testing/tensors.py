"""The tests of tensors on the backend's devices: every operator under many shardings, writes, mapped functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
import shardtensor.testing.linear_algebra_cases  # It adds its cases.
import shardtensor.testing.manipulation_cases
import shardtensor.testing.numpy_cases
from shardtensor.backend import HostArray
from shardtensor.core import OPS
from shardtensor.errors import ShardTensorError
from shardtensor.host.units import counted
from shardtensor.testing import (  # noqa: F401 - they register their cases
    manipulation_cases,
    sorting_cases,
    statistical_cases,
    ufunc_cases,
)
from shardtensor.testing.base import Kit
from shardtensor.testing.cases import CASES, check, sharded_somehow, wanted
from shardtensor.testing.indexing_cases import array_indices, indices
from shardtensor.testing.layouts import all_specs, assert_same, mesh_of, meshes, shapes, specs

OPERATORS = "every operator gives NumPy's result under every sharding"
ELEMENTS = "a tensor has NumPy's elements, and each device the part that the sharding assigns to it"
UNCLAIMED = "an operator in `unclaimed` raises a ShardTensorError, and never returns a wrong result"
WRITES = "writes to a tensor are visible in its views only, as in NumPy"
STAYS = "Backend.device_of: an array in a mapped function is on the function's device"
MAPPED = "mapped functions receive the backend's arrays with their device current, and their results stay on it"


class TensorTests(Kit):
    """Tensors on the backend's devices behave as NumPy arrays."""

    # -- operators ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", sorted(CASES))
    def test_operator(self, name: str) -> None:
        """An operator gives NumPy's result under drawn shardings, mixed with host arrays and unplaced tensors."""
        refused: list[str] = []

        def one(data: Any) -> None:
            example = CASES[name](data)
            try:
                check(name, example, sharded_somehow(data, example, self.backend))
            except ShardTensorError as error:
                if not self._lacks([*example.operands, wanted(name, example)]):
                    refused.append(f"{type(error).__name__}: {error}")
                    if name not in self.unclaimed:
                        raise
            except AssertionError as error:
                self.must(False, UNCLAIMED if name in self.unclaimed else OPERATORS, f"{name}: {error}")

        self.sweep(one)
        if name in self.unclaimed:
            self.must(bool(refused), UNCLAIMED, f"{name} never raised; remove it from the list if it works")

    def test_unclaimed_operators_exist(self) -> None:
        """Every name in `unclaimed` is an operator, so that a misspelled name is detected."""
        unknown = sorted(set(self.unclaimed) - set(OPS))
        self.must(not unknown, "`unclaimed` names operators (see shardtensor.OPS)", unknown)

    @pytest.mark.parametrize("name", ["zeros", "ones", "full", "arange", "eye", "linspace"])
    def test_creation(self, name: str) -> None:
        """Creation functions give NumPy's result under every spec of a mesh."""
        arguments: dict[str, tuple[Any, ...]] = {
            "full": ((5, 3), 7), "arange": (11,), "eye": (5, 3), "linspace": (0, 5, 11),
        }  # fmt: skip
        args = arguments.get(name, ((5, 3),))
        right = getattr(np, name)(*args, dtype=self.dtype)
        mesh = mesh_of((len(self.devices),), self.backend)
        for spec in all_specs(mesh, right.ndim):
            result = getattr(st, name)(*args, dtype=self.dtype, device=st.NamedSharding(mesh, spec))
            self._is(result, right, f"{name} under {spec}")

    def test_reshard(self) -> None:
        """`reshard` preserves elements between shardings, between devices, and from and to another backend."""

        def one(data: Any) -> None:
            shape = data.draw(shapes())
            host = self.numbers(int(np.prod(shape))).reshape(shape)
            x = self._placed(data, host)
            self._is(x, host)
            for _ in range(3):
                mesh = data.draw(meshes(data.draw(some.sampled_from([self.backend, self.backend, "numpy"]))))
                x = st.reshard(x, st.NamedSharding(mesh, data.draw(specs(mesh, host.ndim))))
                self._is(x, host)

        self.sweep(one, 2 * self.examples)

    def test_arrays_made_by_the_user(self) -> None:
        """The backend's own arrays are accepted as operands, and later writes to them do not affect tensors."""
        device, host = self.devices[0], self.numbers(6)
        raw = self.put(host, device)
        x = st.asarray(raw) if not self.it.on_host else st.device_put(raw, device)
        y = st.device_put(host, device) + raw
        self.write(raw, 0, device)
        self._is(x, host)
        self._is(y, host + host)

    def test_errors_change_nothing(self) -> None:
        """Invalid calls raise a ShardTensorError and leave operands and later calls unaffected."""
        mesh = mesh_of((len(self.devices),), self.backend)
        x = st.device_put(self.numbers(10), mesh)
        bad: dict[str, Callable[[], Any]] = {
            "shapes": lambda: x + np.ones(7, self.dtype),
            "axis": lambda: st.sum(x, axis=3),
            "index": lambda: x[99],
            "assignment": lambda: x.__setitem__(slice(0, 3), np.ones(5, self.dtype)),
            "reshape": lambda: st.reshape(x, (3, 7)),
        }
        for call in bad.values():
            with pytest.raises(ShardTensorError):
                call()
            self._is(x + 1, self.numbers(10) + 1)

    # -- writes ------------------------------------------------------------------------------------

    def test_writes(self) -> None:
        """Assignments, in-place operators and ``out=`` on tensors, views and copies agree with NumPy."""
        self.sweep(lambda data: _Writes(self, data).run(5), 4 * self.examples)

    def test_earlier_values_do_not_change(self) -> None:
        """Tensors derived from a tensor before a write keep their values, even if they share memory internally."""
        mesh = mesh_of((len(self.devices),), self.backend)
        host = self.numbers(12)
        makers: dict[str, Callable[[Any], Any]] = {
            "copy": lambda x: x.copy(),
            "device_put": lambda x: st.device_put(x, mesh),
            "reshard": lambda x: st.reshard(x, st.NamedSharding(mesh, st.P())),
            "shard": lambda x: st.concat(st.shard(x, devices=mesh)),
            "pmap": lambda x: st.concat(st.pmap(lambda a: a, st.shard(x, devices=mesh))),
            "shards": lambda x: st.asarray(x.addressable_shards[0].data, copy=True),
            "host": lambda x: st.asarray(np.asarray(x)),
        }
        for name, make in makers.items():
            x = st.device_put(host, mesh)
            before = make(x)
            right = np.array(before)
            x += 1
            x[2:5] = 0
            x[::-2] = 1
            self.same(np.asarray(before), right, WRITES, f"{name} of a tensor that was written afterwards")

    # -- mapped functions --------------------------------------------------------------------------

    def test_pmap_chained(self) -> None:
        """Passing the results of one map to the next on the same devices transfers nothing."""
        host = self.numbers(4 * len(self.devices) + 1)
        parts = st.shard(host, devices=list(self.devices))
        with st.transfers() as log:
            for _ in range(3):
                parts = st.pmap(lambda a: a * 2 + 1, parts)
                host = host * 2 + np.asarray(1, host.dtype)
        self.must(log.bytes == 0, MAPPED, f"{counted(log.bytes, 'byte')} crossed devices between maps")
        self.must([p.device for p in parts] == list(self.devices), MAPPED, [p.device for p in parts])
        self._is(st.unshard(parts), host)

    def test_pmap_runs_any_function(self) -> None:
        """A mapped function gets the backend's arrays, can call this library, and can return any pytree."""
        seen: list[bool] = []

        def work(a: Any, whole: Any, factor: int) -> Any:
            device = st.current_device()
            seen.append(self.it.is_array(a) and self.it.is_array(st.add(a, 1)) and self.it.is_array(st.ones(2)))
            twice = st.multiply(a, factor)
            return {"device": str(device), "sum": st.sum(whole), "twice": twice, "host": np.arange(3)}

        parts = st.shard(self.numbers(9), devices=list(self.devices))
        results = st.pmap(lambda a: work(a, a, 2), parts)
        self.must(all(seen) and len(seen) == len(parts), MAPPED, f"is_array of arguments and results: {seen}")
        for device, part, one in zip(self.devices, parts, results, strict=True):
            self.must(one["device"] == str(device), MAPPED, f"current_device() is {one['device']} on {device}")
            self.same(np.asarray(one["twice"]), np.asarray(part) * 2, MAPPED)
            self.same(np.asarray(one["host"]), np.arange(3), MAPPED, "a returned host array")
            self.must(float(one["sum"]) == float(np.asarray(part).sum()), MAPPED, one["sum"])
        self.must(st.current_device() is None, MAPPED, f"current_device() is {st.current_device()} afterwards")

    def test_pmap_results_kept_by_the_function(self) -> None:
        """A mapped function that keeps its results and writes to them later does not change the tensors."""
        kept: dict[Any, Any] = {}  # By device, because calls in several threads run in any order.

        def keep(a: Any) -> Any:
            result = self.it.xp.add(a, 1)
            kept[st.current_device()] = result
            return result

        parts = st.shard(self.numbers(9), devices=list(self.devices))
        results = st.pmap(keep, parts)
        self.must(kept.keys() == set(self.devices), STAYS, f"calls on {list(kept)}")
        for device, array in kept.items():
            if array.shape[0]:
                self.write(array, 0, device)
        self.same(
            np.asarray(st.unshard(results)),
            self.numbers(9) + 1,
            MAPPED,
            "results, after the function wrote to its arrays",
        )

    def test_nested_maps_stay_on_their_device(self) -> None:
        """Inside a mapped function, `pmap`, `shard`, `device_put` and `smap` stay on its device."""

        def body(a: Any) -> Any:
            parts = [*st.pmap(lambda v: v, [a, a]), *st.shard(a), st.device_put(a)]
            return [*parts, st.pmap(lambda v: v, st.reshape(a, (1, -1))), st.smap(lambda v: v, a, axes=[0])]

        results = st.pmap(body, st.shard(self.numbers(9), devices=list(self.devices)))
        devices = [[x.device for x in one] for one in results]
        self.must(devices == [[device] * 6 for device in self.devices], STAYS, f"tensors on {devices}")

    def test_pmap_donates(self) -> None:
        """A mapped function can write to donated arrays, without effect on other tensors."""

        def zero(a: Any) -> Any:
            a[:] = 0
            return a

        whole = st.device_put(self.numbers(9), mesh_of((len(self.devices),), self.backend))
        fresh = st.pmap(lambda a: self.it.xp.add(a, 1), st.shard(whole, devices=list(self.devices)))
        for parts in (st.shard(whole, devices=list(self.devices)), fresh):
            results = st.pmap(zero, parts, donate=True)
            self.must(
                not np.asarray(st.unshard(results)).any(), MAPPED, "writes of a function to donated arrays are lost"
            )
            self.must(all(p.is_donated for p in parts), MAPPED, "donated tensors can still be used")
        self.same(np.asarray(whole), self.numbers(9), MAPPED, "a tensor whose shards were donated")

    def test_pmap_errors(self) -> None:
        """An error in a mapped function propagates with a note that names the device, and the state is restored."""
        before = self.current()

        def fail(a: Any) -> Any:
            if st.current_device() == self.devices[-1]:
                raise ZeroDivisionError("on purpose")
            return a

        parts = st.shard(self.numbers(9), devices=list(self.devices))
        with pytest.raises(ZeroDivisionError) as caught:
            st.pmap(fail, parts)
        notes = getattr(caught.value, "__notes__", [])
        self.must(any(str(self.devices[-1]) in n for n in notes), "errors of mapped functions name the device", notes)
        self.must(st.current_device() is None and self.current() == before, MAPPED, "a device is still current")
        self.same(np.asarray(st.unshard(parts)), self.numbers(9), MAPPED, "the shards, after an error")

    # -- helpers ---------------------------------------------------------------------------------------

    def _placed(self, data: Any, host: HostArray) -> Any:
        mesh = data.draw(meshes(self.backend))
        return st.device_put(host, st.NamedSharding(mesh, data.draw(specs(mesh, host.ndim))))

    def _is(self, x: Any, answer: HostArray, where: str = "") -> None:
        """Asserts that a tensor has these elements, and each device the part that its sharding assigns to it."""
        try:
            assert_same(x, answer, exact=True)
        except AssertionError as error:
            self.must(False, ELEMENTS, f"{where} {error}")

    def _lacks(self, arrays: list[Any]) -> bool:
        """Whether the dtype of any of the arrays is missing from the backend."""
        return any(not self.it.has_dtype(np.asarray(x).dtype) for x in arrays)


class _Writes:
    """Pairs of a tensor and a NumPy array, with views and copies of both, to which the same writes are applied."""

    def __init__(self, kit: TensorTests, data: Any) -> None:
        self.kit = kit
        self.data = data
        shape = data.draw(shapes(1))
        host = kit.numbers(int(np.prod(shape))).reshape(shape)
        self.both: list[tuple[Any, HostArray]] = [(kit._placed(data, host), host.copy())]
        self.done: list[str] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            action = self.data.draw(
                some.sampled_from([self.look, self.keep, self.assign, self.assign, self.add, self.out])
            )
            x, right = self.both[self.data.draw(some.integers(0, len(self.both) - 1))]
            action(x, right)
            for tensor, host in self.both:
                self.kit.same(np.asarray(tensor), host, WRITES, "after " + "; ".join(self.done))

    def look(self, x: Any, right: HostArray) -> None:
        index = self.data.draw(indices(right.shape))
        if right[index].ndim:
            self.both.append((x[index], right[index]))
            self.done.append(f"a view [{index!r}]")

    def keep(self, x: Any, right: HostArray) -> None:
        self.both.append((x.copy(), right.copy()))
        self.done.append("a copy")

    def assign(self, x: Any, right: HostArray) -> None:
        kind = self.data.draw(some.sampled_from(["basic", "arrays", "mask"]))
        index = self.data.draw({"basic": indices, "arrays": array_indices}.get(kind, indices)(right.shape))
        if kind == "mask":
            index = right > self.data.draw(some.integers(0, 97))
        try:
            count = right[index].size
        except IndexError:  # The index arrays do not broadcast together.
            return
        if kind == "arrays" and np.unique(np.arange(right.size).reshape(right.shape)[index]).size < count:
            return  # Repeated indices are tested with the operator.
        value: Any = self.data.draw(some.integers(0, 90))
        if kind == "basic" and self.data.draw(some.booleans()):
            value = self.kit.numbers(count, first=value).reshape(right[index].shape)
        x[index] = value
        right[index] = value
        self.done.append(f"[{index!r}] = {value!r:.60}")

    def add(self, x: Any, right: HostArray) -> None:
        n = self.data.draw(some.integers(1, 5))
        x += n
        right += np.asarray(n, right.dtype)
        self.done.append(f"+= {n}")

    def out(self, x: Any, right: HostArray) -> None:
        np.multiply(x, 2, out=x)
        np.multiply(right, 2, out=right)
        self.done.append("multiply(x, 2, out=x)")
