"""The list API of the proposal for Nx (elixir-nx/nx#645): one test for each thing that it describes or asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.layouts import array, assert_same, values_of


@pytest.fixture
def row(backend: str) -> list[st.Device]:
    """Four devices of a backend."""
    return st.devices(backend)[:4]


def devices_of(items: list[Any]) -> list[Any]:
    assert all(isinstance(x, st.ShardedTensor) for x in items)
    return [x.device for x in items]


# -- arguments -------------------------------------------------------------------------------------


def test_an_array_is_split_into_as_many_parts_as_there_are_devices(backend: str) -> None:
    """The map splits its argument itself, by the number of devices; here rows that it does not divide."""
    value, seen = array((20, 2), "float64", 1), []

    def double(part: Any) -> Any:
        seen.append((st.current_device(), part.shape))
        return part * 2

    with st.use_mesh(st.make_mesh((-1,), devices=st.devices(backend))):
        result = st.smap(double, value)
    count = st.num_shards(backend)
    sizes = [len(part) for part in np.array_split(value, count)]
    assert sorted(seen, key=lambda call: call[0].id) == [
        (d, (n, 2)) for d, n in zip(st.devices(backend), sizes, strict=True)
    ]
    assert_same(result, value * 2)


def test_the_sharded_axes_can_be_chosen(row: list[st.Device]) -> None:
    """The first argument is split along its axis 2, the second along its axis 0."""
    x, y, seen = array((2, 3, 10), "float64", 1), array((10,), "float64", 2), []

    def product(x: Any, y: Any) -> Any:
        seen.append((x.shape, y.shape))
        return x * y

    assert_same(st.smap(product, x, y, axes=[2, 0], devices=row), x * y)
    assert sorted(seen) == [((2, 3, n), (n,)) for n in (2, 2, 3, 3)]


def test_lists_of_sharded_tensors_are_arguments(row: list[st.Device]) -> None:
    """Tensors that are sharded already, in a list for each argument or in a list of lists, go to the calls as they are."""
    x, y = array((10, 2), "float64", 1), array((10, 2), "float64", 2)
    xs, ys = st.shard(x, devices=row), st.shard(y, devices=row)
    mesh = st.make_mesh((4,), devices=row)
    args = [list(pair) for pair in zip(xs, ys, strict=True)]
    with st.transfers() as log, st.transfer_guard("disallow"):
        by_argument = st.pmap(lambda a, b: a + b, xs, ys)
        by_call = st.pmap(lambda a, b: a + b, *map(list, zip(*args, strict=True)))
        compiled = st.shard_jit(lambda a, b: a + b, mesh, input_shardings=[{0: [0]}, {0: [0]}])(args)
    assert log.bytes == 0
    for parts in (by_argument, by_call, compiled):
        assert devices_of(parts) == row
        assert_same(st.unshard(parts), x + y)


@pytest.mark.parametrize(("leftover", "count"), [("keep", 4), ("repeat", 4), ("discard", 3)])
def test_a_tensor_becomes_a_list_of_batches(leftover: str, count: int, backend: str) -> None:
    row, value = st.devices(backend)[:4], array((10, 2), "float64", 1)
    batches = st.to_batched_list(st.device_put(value, row[0]), 3, leftover=leftover)
    rows = {"keep": [*range(10)], "repeat": [*range(10), 0, 1], "discard": [*range(9)]}[leftover]
    sums = st.pmap(lambda batch: batch.sum(axis=0), batches, devices=row)
    assert devices_of(sums) == row[:count]
    for total, begin in zip(sums, range(0, 12, 3), strict=False):
        assert_same(total, value[rows[begin : begin + 3]].sum(axis=0))


def test_an_array_becomes_a_list_of_shards(row: list[st.Device]) -> None:
    """One for each device, on that device, along any axis."""
    value = array((3, 10), "float64", 1)
    for axis in (0, 1, -1):
        shards = st.shard(value, axis, devices=row)
        assert devices_of(shards) == row
        for part, wanted in zip(shards, np.array_split(value, 4, axis=axis), strict=True):
            assert_same(part, wanted, exact=True)
    assert len(st.shard(np.ones(3))) == len(st.devices()) == st.num_shards()


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4, 9])
def test_the_list_of_results_is_as_long_as_that_of_inputs(count: int, backend: str) -> None:
    row = st.devices(backend)[:4]
    results = st.pmap(lambda x: x + 1, [np.full(2, k) for k in range(count)], devices=row)
    assert isinstance(results, list)
    assert [x.tolist() for x in results] == [[k + 1] * 2 for k in range(count)]
    assert {*devices_of(results)} == {*row[:count]}


def test_inputs_and_results_stay_on_their_devices(row: list[st.Device]) -> None:
    value, seen = array((4, 3), "float64", 1), {}

    def f(part: Any) -> Any:
        seen[st.current_device()] = values_of(part)
        return part + 1

    shards = st.shard(value, devices=row)
    results = st.pmap(f, shards)
    assert devices_of(shards) == devices_of(results) == row
    for k, device in enumerate(row):
        assert np.array_equal(seen[device], value[k : k + 1])
        assert_same(shards[k], value[k : k + 1], exact=True)  # It can be used again.


def test_maps_are_chained_with_a_further_list(row: list[st.Device]) -> None:
    """The second map takes the results of the first one and another list of inputs: no element is sent."""
    x, y = array((10, 2), "float64", 1), array((10, 2), "float64", 2)
    xs, ys = st.shard(x, devices=row), st.shard(y, devices=row)
    with st.transfers() as log, st.transfer_guard("disallow"):
        first = st.pmap(lambda a: a * 3, xs)
        second = st.pmap(lambda a, b: a - b, first, ys)
        third = st.pmap(lambda a: a.sum(axis=0), second)
    assert log.bytes == 0
    assert devices_of(first) == devices_of(second) == devices_of(third) == row
    assert_same(st.stack(third), np.stack([part.sum(axis=0) for part in np.array_split(x * 3 - y, 4)]))


def test_stack_puts_the_results_together(row: list[st.Device]) -> None:
    """It transfers what it needs by itself, and nothing where each device keeps its own row of the result."""
    results = st.pmap(lambda k: st.full((3,), k), [0, 1, 2, 3], devices=row)
    with st.transfers() as log:
        whole = st.stack(results)
        columns = st.stack(results, axis=1)
    assert log.bytes == 0
    assert [shard.device for shard in whole.addressable_shards] == row
    assert_same(whole, np.repeat(np.arange(4), 3).reshape(4, 3))
    assert_same(columns, np.repeat(np.arange(4), 3).reshape(4, 3).T)
    with st.transfers() as log:
        there = st.device_put(whole, row[2])
    assert log.bytes == 3 * 3 * 8  # The rows of the three other devices.
    assert there.device == row[2]
    assert_same(there, np.asarray(whole))


def test_stack_after_explicit_transfers(row: list[st.Device]) -> None:
    """All parts are first brought to one device, which stacks them."""
    results = st.pmap(lambda k: st.full((3,), k), [0, 1, 2, 3], devices=row)
    with st.transfers() as log:
        moved = [part.to_device(row[0]) for part in results]
    assert log.bytes == 3 * 3 * 8
    assert devices_of(moved) == [row[0]] * 4
    with st.transfer_guard("disallow"):
        whole = st.stack(moved)
    assert whole.device == row[0]
    assert_same(whole, np.repeat(np.arange(4), 3).reshape(4, 3))


def test_stack_transfers_across_backends() -> None:
    """Parts of several backends go to the one whose parts are most expensive to move."""
    checked, numpy = st.devices("checked"), st.devices("numpy")
    large = [st.device_put(np.arange(4.0) + k, checked[k]) for k in range(3)]
    with st.transfers() as log:
        whole = st.stack([*large, st.device_put(np.arange(4.0) + 3, numpy[0])])
    assert log.bytes > 0
    assert {device.backend for device in whole.devices()} == {"checked"}
    assert_same(whole, np.arange(4.0) + np.arange(4)[:, None])


def test_one_tensor_spans_the_devices(row: list[st.Device]) -> None:
    """The other form of a result: one tensor that knows on which devices it is, looks like one array, and transfers."""
    value = array((10, 2), "float64", 1)
    x = st.unshard(st.pmap(lambda a: a * 2, st.shard(value, devices=row)))
    assert (x.shape, x.devices()) == ((10, 2), {*row})
    assert [(s.device, s.index[0].start) for s in x.addressable_shards] == list(zip(row, [0, 3, 6, 8], strict=True))
    assert np.array_equal(np.asarray(x), value * 2)
    assert_same(x - st.device_put(value, row[3]), value)  # An operand on one of the devices.
    assert_same(x[4], value[4] * 2)


def test_the_number_of_shards_that_are_supported(backend: str) -> None:
    count = st.num_shards(backend)
    assert count == len(st.devices(backend)) == st.local_device_count(backend)
    assert len(st.shard(np.arange(3), devices=st.devices(backend))) == count
    assert st.num_shards() == len(st.pmap(lambda x: x, st.shard(np.arange(20))))


def test_smap_splits_and_is_built_on_pmap(row: list[st.Device]) -> None:
    """It is `shard`, `pmap` and `unshard` in one, with the same calls, layout and transfers."""
    value, calls = array((10, 2), "float64", 1), []

    def f(part: Any) -> Any:
        calls.append((st.current_device(), values_of(part).tolist()))
        return part * len(part)

    with st.transfers() as by_smap:
        once = st.smap(f, value, devices=row)
    of_smap = sorted(calls, key=lambda call: call[0].id)
    calls.clear()
    with st.transfers() as by_steps:
        steps = st.unshard(st.pmap(f, st.shard(value, devices=row)))
    assert sorted(calls, key=lambda call: call[0].id) == of_smap
    assert [s.device for s in once.addressable_shards] == [s.device for s in steps.addressable_shards] == row
    assert by_smap.bytes == by_steps.bytes
    assert_same(once, np.asarray(steps), exact=True)


# -- uses ------------------------------------------------------------------------------------------


def problem() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3))
    return x, x @ np.array([1.0, -2.0, 3.0])


def loss(w: Any, x: Any, y: Any) -> Any:
    return ((x @ w - y) ** 2).mean()


def test_data_parallelism_with_replicas_of_the_model(row: list[st.Device]) -> None:
    """A replica on each device takes a step with the mean of all gradients; replicas stay equal, and where they are."""
    x, y = problem()
    xs, ys = st.shard(x, devices=row), st.shard(y, devices=row)
    replicas = [st.device_put(np.zeros(3), device) for device in row]

    def step(w: Any, x: Any, y: Any) -> Any:
        return w - 0.1 * st.pmean(st.grad(loss)(w, x, y), "replicas")

    with st.transfers() as log:
        for _ in range(60):
            replicas = st.pmap(step, replicas, xs, ys, axis_name="replicas")
    assert {record.operator for record in log if record.bytes} == {"pmean"}
    assert devices_of(replicas) == row
    wanted = np.zeros(3)
    for _ in range(60):
        wanted = wanted - 0.1 * 2 / 40 * x.T @ (x @ wanted - y)
    for replica in replicas:
        assert_same(replica, wanted)
        assert np.array_equal(np.asarray(replica), np.asarray(replicas[0]))


def test_data_parallelism_by_the_compiled_function_of_whole_arrays(row: list[st.Device]) -> None:
    """The same with lists, where the function is written for the whole batch."""
    x, y = problem()
    mesh = st.make_mesh((4,), devices=row)
    step = st.shard_jit(
        lambda w, x, y: w - 0.1 * st.grad(loss)(w, x, y), mesh, input_shardings=[{}, {0: [0]}, {0: [0]}]
    )
    batches = list(zip(st.shard(x, devices=row), st.shard(y, devices=row), strict=True))
    replicas = [st.device_put(np.zeros(3), device) for device in row]
    for _ in range(60):
        replicas = step([[w, *batch] for w, batch in zip(replicas, batches, strict=True)])
    assert devices_of(replicas) == row
    wanted = np.zeros(3)
    for _ in range(60):
        wanted = wanted - 0.1 * 2 / 40 * x.T @ (x @ wanted - y)
    for replica in replicas:
        assert_same(replica, wanted)


def test_the_state_of_the_optimizer_is_sharded(row: list[st.Device]) -> None:
    """Each device keeps a part of the momentum and updates the part of the parameters that belongs to it."""
    x, y = problem()
    xs, ys = st.shard(x, devices=row), st.shard(y, devices=row)
    replicas = [st.device_put(np.zeros(3), device) for device in row]
    momenta = st.shard(np.zeros(3), devices=row)

    def step(w: Any, momentum: Any, x: Any, y: Any) -> Any:
        g = st.pmean(st.grad(loss)(w, x, y), "i")
        k = st.axis_index("i")
        momentum = 0.5 * momentum + g[k : k + len(momentum)]
        return st.all_gather(w[k : k + len(momentum)] - 0.1 * momentum, "i", tiled=True), momentum

    for _ in range(40):
        pairs = st.pmap(step, replicas, momenta, xs, ys, axis_name="i")
        replicas, momenta = [w for w, _ in pairs], [m for _, m in pairs]
    assert [m.shape for m in momenta] == [(1,), (1,), (1,), (0,)]
    assert devices_of(replicas) == devices_of(momenta) == row
    wanted, momentum = np.zeros(3), np.zeros(3)
    for _ in range(40):
        momentum = 0.5 * momentum + 2 / 40 * x.T @ (x @ wanted - y)
        wanted = wanted - 0.1 * momentum
    for replica in replicas:
        assert_same(replica, wanted)


def test_layouts_of_an_optimizer_shard_its_state(row: list[st.Device]) -> None:
    """The same by layouts of whole arrays: the moments have a part on each device, the parameters are everywhere."""
    mesh = st.make_mesh((4,), devices=row)
    params = st.device_put({"w": np.zeros((8, 3))}, st.NamedSharding(mesh, st.P()))
    layouts = st.optim.zero(params, axis="axis_0", level=1)
    state = st.optim.sgd(0.1, momentum=0.9).init(st.reshard(params, layouts.state))
    (moment,) = [leaf for leaf in st.tree.leaves(state) if getattr(leaf, "shape", None) == (8, 3)]
    assert [shard.data.shape for shard in moment.addressable_shards] == [(2, 3)] * 4
    assert layouts.params["w"].spec == st.P()


def test_results_of_many_maps_are_passed_on(row: list[st.Device]) -> None:
    """Twenty maps in turn, of functions of lists, trees and numbers, send nothing."""
    value = array((10, 2), "float64", 1)
    state = [(part, 0) for part in st.shard(value, devices=row)]
    with st.transfers() as log, st.transfer_guard("disallow"):
        for _ in range(20):
            state = st.pmap(lambda pair: (pair[0] * 0.5, pair[1] + 1), state)
    assert log.bytes == 0
    assert devices_of([part for part, _ in state]) == row
    assert [count for _, count in state] == [20] * 4
    assert_same(st.unshard([part for part, _ in state]), value * 0.5**20)
