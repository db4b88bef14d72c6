"""shard_jit: a compiled function of whole arrays, called with lists of the shards of each device."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from tests import draws
from tests.layouts import DTYPES, array, assert_same, mesh_of, meshes, shapes, specs


def shards_of(value: np.ndarray, sharding: st.NamedSharding) -> list[st.ShardedTensor]:
    """The shards of an array in mesh order, each on its device."""
    indices = sharding.devices_indices_map(value.shape)
    return [st.device_put(value[indices[device]], device) for device in sharding.mesh.flat]


def dict_of(spec: st.P, ndim: int, data: Any, mesh: st.Mesh) -> dict[int, Any]:
    """A spec as a dict, with axes by names or numbers, and dimensions from the start or the end."""
    found: dict[int, Any] = {}
    for d, chain in enumerate(spec.chains_of(ndim)):
        axes = [data.draw(some.sampled_from([axis, mesh.axis_names.index(axis)])) for axis in chain]
        if axes or data.draw(some.booleans()):
            found[d - data.draw(some.sampled_from([0, ndim]))] = axes[0] if len(axes) == 1 else axes
    return found


def grid(backend: str) -> st.Mesh:
    return st.make_mesh((2, 2), devices=st.devices(backend)[:4])


def test_shards_are_those_of_any_layout_and_stay_where_they_are(backend: str) -> None:
    @hypothesis.settings(max_examples=draws.drawn(60, fast=12))
    @hypothesis.given(some.data())
    def check(data: Any) -> None:
        value, mesh = (
            array(data.draw(shapes(0, 3)), data.draw(some.sampled_from(DTYPES)), 1),
            data.draw(meshes(backend)),
        )
        sharding = st.NamedSharding(mesh, data.draw(specs(mesh, value.ndim)))
        run = st.shard_jit(
            lambda x: (x, ~x if value.dtype == bool else x + x),
            mesh,
            input_shardings=[dict_of(sharding.spec, value.ndim, data, mesh)],
        )
        shards = shards_of(value, sharding)
        with st.transfers() as log, st.transfer_guard("disallow"):
            results = run([[part] for part in shards])
            again = run([(same,) for same, _ in results])
        assert log.bytes == 0
        twice = ~value if value.dtype == bool else value + value
        for device, index, (same, doubled), (last, _) in zip(
            mesh.flat, sharding.devices_indices_map(value.shape).values(), results, again, strict=True
        ):
            assert [x.device for x in (same, doubled, last)] == [device] * 3
            assert_same(same, value[index], exact=True)
            assert_same(doubled, twice[index], exact=True)
            assert_same(last, value[index], exact=True)

    check()


def test_the_function_sees_whole_arrays(backend: str) -> None:
    """Operators transfer what they need; the devices that hold equal elements of the result have a shard each."""
    value, seen = array((10, 6), "float64", 1), []

    def centred(x: Any) -> Any:
        seen.append(x.shape)
        return x - x.mean(axis=0), x.sum(axis=0), x[1:]

    mesh = grid(backend)
    run = st.shard_jit(centred, mesh, input_shardings=[{0: [0]}])
    parts = [value[:5], value[:5], value[5:], value[5:]]
    for _ in range(2):
        results = run([[part] for part in parts])
    assert seen == [(10, 6)]  # Traced once, for all devices.
    whole = value - value.mean(axis=0)
    for k, (x, total, rest) in enumerate(results):
        assert x.device == total.device == rest.device == mesh.flat[k]
        assert_same(x, whole[:5] if k < 2 else whole[5:])
        assert_same(total, value.sum(axis=0))
        assert_same(rest, value[1:6] if k < 2 else value[6:], exact=True)  # 9 rows are split as 5 and 4.


def test_the_examples_of_nx(backend: str) -> None:
    """A grid of two by two, with numbers of axes: an array that both axes split, and one that the first axis splits."""
    mesh = grid(backend)
    x, y = np.stack([np.arange(8), np.arange(10, 18)], axis=1), np.arange(100, 108)[:, None]
    args = [[x[4 * i : 4 * i + 4, j : j + 1], y[4 * i : 4 * i + 4]] for i in range(2) for j in range(2)]
    run = st.shard_jit(lambda x, y: (x + y, y * 2), mesh, input_shardings=[{0: [0], 1: [1]}, {0: [0]}])
    for k, (total, twice) in enumerate(run(args)):
        assert total.device == twice.device == mesh.flat[k]
        assert_same(total, args[k][0] + args[k][1], exact=True)
        assert_same(twice, args[k][1] * 2, exact=True)
    rows = np.arange(16).reshape(4, 4)
    turned = st.shard_jit(st.transpose, mesh, input_shardings=[{0: [0, 1], 1: []}])(
        [[rows[i : i + 1]] for i in range(4)]
    )
    for k, part in enumerate(turned):
        assert_same(part, rows[k : k + 1].T, exact=True)


def test_shards_on_other_devices_and_of_other_sizes_are_transferred(backend: str) -> None:
    mesh, value = mesh_of((4,), backend), array((10, 2), "float32", 1)
    run = st.shard_jit(lambda x: x * 2, mesh, input_shardings=[{0: "x"}])
    sizes = [0, 7, 1, 2]  # The split rule gives 3, 3, 2, 2.
    ragged = np.split(value, np.cumsum(sizes)[:-1])
    with st.transfers() as log:
        results = run([[st.device_put(part, mesh.flat[3 - k])] for k, part in enumerate(ragged)])
    assert log.bytes > 0
    assert [x.device for x in results] == list(mesh.flat)
    for part, wanted in zip(results, np.array_split(value * 2, 4), strict=True):
        assert_same(part, wanted, exact=True)


def test_trees_of_arguments_and_results(backend: str) -> None:
    mesh, w = grid(backend), array((6, 4), "float64", 1)
    shards = [
        {"w": w[3 * i : 3 * i + 3, 2 * j : 2 * j + 2], "b": (np.arange(4.0), None)} for i in range(2) for j in range(2)
    ]
    batch = ({"x": np.ones((2, 6))}, 2)

    def layer(params: Any, batch: Any) -> Any:
        images, scale = batch
        return {"y": images["x"] @ params["w"] * scale + params["b"][0], "count": 3, "none": params["b"][1]}

    run = st.shard_jit(layer, mesh, input_shardings=[{"w": {0: [0], -1: [1]}, "b": {}}, ({0: ["axis_0"]}, {})])
    for k, found in enumerate(run([[part, batch] for part in shards])):
        assert found["y"].device == mesh.flat[k]
        assert (found["count"], found["none"]) == (3, None)
        columns = slice(0, 2) if k % 2 == 0 else slice(2, 4)
        assert_same(found["y"], (np.ones((2, 6)) @ w * 2 + np.arange(4.0))[:, columns])
    both = st.shard_jit(
        lambda tree: tree["u"] + tree["v"][0], mesh, input_shardings=[{0: [0, 1]}]
    )  # one for all leaves
    parts = both([[{"u": np.full(2, k), "v": [np.full(2, 10 * k)]}] for k in range(4)])
    assert [part.tolist() for part in parts] == [[11 * k] * 2 for k in range(4)]


def test_writes_of_the_function_and_of_its_caller_are_separate(backend: str) -> None:
    mesh = mesh_of((2,), backend)

    def add_one(x: Any) -> Any:
        x += 1
        return x

    def unchanged(x: Any) -> Any:
        return x

    for function, step in ((add_one, 1), (unchanged, 0)):
        shards = st.shard(np.arange(4), devices=mesh)
        results = st.shard_jit(function, mesh, input_shardings=[{0: "x"}])([[part] for part in shards])
        results[0][0] = 7
        shards[1][1] = 9
        assert [part.tolist() for part in shards] == [[0, 1], [2, 9]]
        assert [part.tolist() for part in results] == [[7, 1 + step], [2 + step, 3 + step]]


def test_arrays_that_the_function_creates_are_on_the_mesh(backend: str) -> None:
    """Results on other devices come back to the mesh: each device has them whole."""
    mesh, elsewhere = mesh_of((2, 2), backend), st.devices(backend)[7]
    host = np.arange(3)

    def create(x: Any) -> Any:
        made = st.ones((6,))
        return x + made, made, st.full((2,), 5, device=elsewhere), host

    results = st.shard_jit(create, mesh, input_shardings=[{}])([[np.arange(6)]] * 4)
    sizes = [2, 1, 2, 1]  # 6 elements over two axes of 2: 3 and 3, and each of these as 2 and 1.
    for k, (total, made, far, constant) in enumerate(results):
        assert {x.device for x in (total, made, far, constant)} == {mesh.flat[k]}
        assert far.tolist() == [5, 5]
        assert constant.tolist() == [0, 1, 2]
        assert total.shape == made.shape == (sizes[k],)


def test_derivatives_batches_and_programs_around_it(backend: str) -> None:
    mesh, value, w = grid(backend), array((10, 3), "float64", 1), array((3, 2), "float64", 2)
    run = st.shard_jit(lambda x, w: st.tanh(x @ w), mesh, input_shardings=[{0: [0, 1]}, {}])
    sharding = st.NamedSharding(mesh, st.P(mesh.axis_names))
    shards = shards_of(value, sharding)

    def loss(parts: Any, w: Any) -> Any:
        return st.concat(run([[part, w] for part in parts])).sum()

    wanted = np.tanh(value @ w)
    assert_same(loss(shards, w), wanted.sum())
    assert_same(st.jit(loss)(shards, w), wanted.sum())
    parts, of_w = st.grad(loss, argnums=(0, 1))(shards, st.asarray(w, device=mesh))
    slope = 1 - wanted**2
    assert [part.device for part in parts] == list(mesh.flat)
    for part, rows in zip(parts, np.split(slope @ w.T, [3, 5, 8]), strict=True):
        assert_same(part, rows)
    assert_same(of_w, value.T @ slope)
    _, along = st.jvp(loss, (shards, st.asarray(w)), (shards, st.zeros(w.shape)))
    assert_same(along, (slope * (value @ w)).sum())
    batch = st.vmap(lambda v: run([[v, w] for v in st.split(v, 4)])[3])(st.stack([value[:8], value[2:]]))
    assert_same(batch, np.tanh(np.stack([value[6:8], value[8:]]) @ w))


def test_inferred_explained_mapped_and_without_jit(backend: str) -> None:
    """Layouts are known without elements; in a map, lists are those of the devices that the call owns."""
    mesh, value = grid(backend), array((10, 3), "float64", 1)
    run = st.shard_jit(lambda x: (x.sum(axis=0), 2 * x), mesh, input_shardings=[{0: [0, 1]}])
    args = [[part] for part in shards_of(value, st.NamedSharding(mesh, st.P(mesh.axis_names)))]
    found = st.eval_shape(run, args)
    assert [rows.shape for _, rows in found] == [(3, 3), (2, 3), (3, 3), (2, 3)]
    assert [total.sharding.device_set for total, _ in found] == [{device} for device in mesh.flat]
    explained = st.explain(run, args)
    with st.transfers() as log:
        run(args)
    assert explained.bytes == log.bytes == 2 * 3 * (3 * 8)  # The sums of four parts are added, and are everywhere.

    def inner(v: Any) -> Any:
        own = st.get_mesh()
        assert own.size == 4
        twice = st.shard_jit(lambda x: 2 * x, own, input_shardings=[{0: 0}])
        return st.concat(twice([[part] for part in st.shard(v)]))

    with st.use_mesh(mesh_of((8,), backend)):
        for k, part in enumerate(st.pmap(inner, [value, value + 1])):
            assert_same(part, 2 * (value + k))
    with st.disable_jit():
        (first, *_) = st.shard_jit(
            lambda x: x if float(x[0, 0]) == value[0, 0] else -x, mesh, input_shardings=[{0: 0}]
        )([[part] for part in (value[:5], value[:5], value[5:], value[5:])])
    assert_same(first, value[:5])


def test_a_replicated_argument_has_the_gradient_of_its_first_shard(backend: str) -> None:
    """Only the first of equal shards counts, so that the gradients of all of them add up to that of the argument."""
    mesh = mesh_of((2,), backend)
    run = st.shard_jit(lambda x, w: x * w, mesh, input_shardings=[{0: "x"}, {}])
    copies = [st.device_put(np.float64(3), device) for device in mesh.flat]
    found = st.grad(lambda copies: st.concat(run([[np.arange(2.0) + k, w] for k, w in enumerate(copies)])).sum())(
        copies
    )
    assert [(g.item(), g.device) for g in found] == [(4.0, mesh.flat[0]), (0.0, mesh.flat[1])]


def test_chains_of_list_functions(backend: str) -> None:
    """Lists go from `shard` to `pmap` to `shard_jit` and back; nothing is gathered."""
    mesh, value = mesh_of((4,), backend), array((10, 2), "float64", 1)
    shards = st.shard(value, devices=mesh)
    with st.transfers() as log, st.transfer_guard("disallow"):
        squares = st.pmap(lambda block: block * block, shards)
        halves = st.shard_jit(lambda x: x / 2, mesh, input_shardings=[{0: "x"}])([[part] for part in squares])
        joined = st.unshard(st.pmap(lambda block: block + 1, halves))
    assert log.bytes == 0
    assert_same(joined, value * value / 2 + 1)


ERRORS = {
    "no function": (lambda m: st.shard_jit(3, m, input_shardings=[]), st.ArgumentTypeError, "shard_jit: fn is an int"),
    "no mesh": (
        lambda m: st.shard_jit(abs, (2, 2), input_shardings=[{}]),
        st.ArgumentTypeError, "shard_jit: mesh is a tuple; wanted a Mesh",
    ),
    "no shardings": (lambda m: st.shard_jit(abs, m), st.ArgumentTypeError, "missing the argument input_shardings"),
    "a dict": (
        lambda m: st.shard_jit(abs, m, input_shardings={0: [0]}),
        st.ArgumentTypeError, "input_shardings is a dict; wanted a list with a dict for each argument, such as [{0: ['x']}, {}]",
    ),
    "an iterator": (
        lambda m: st.shard_jit(abs, m, input_shardings=iter([{0: [0]}])),
        st.ArgumentTypeError, "input_shardings is a list_iterator; wanted a list with a dict for each argument",
    ),
    "an iterator of axes": (
        lambda m: st.shard_jit(abs, m, input_shardings=[{0: iter([0, 1])}]), st.ShardingError, "mesh axis <list_iterator",
    ),
    "a name of a dimension": (
        lambda m: st.shard_jit(abs, m, input_shardings=[{"batch": [0]}]),
        st.ArgumentTypeError, "input_shardings[0] has an int in it, 0; wanted a dict from the numbers of dimensions",
    ),
    "a number": (
        lambda m: st.shard_jit(abs, m, input_shardings=[{0: [2]}]),
        st.ShardingError, "input_shardings[0] names mesh axis 2; the mesh has the axes ('axis_0', 'axis_1'), or by number 0 to 1",
    ),
    "a negative number": (lambda m: st.shard_jit(abs, m, input_shardings=[{0: -1}]), st.ShardingError, "mesh axis -1; "),
    "a bool": (lambda m: st.shard_jit(abs, m, input_shardings=[{0: True}]), st.ShardingError, "mesh axis True; "),
    "a name": (
        lambda m: st.shard_jit(abs, m, input_shardings=[{}, {0: ["axis_3"]}]),
        st.ShardingError, "input_shardings[1] names mesh axis 'axis_3'; the mesh has the axes ('axis_0', 'axis_1'), or by "
        "number 0 to 1; did you mean",
    ),
    "an axis twice": (
        lambda m: st.shard_jit(abs, m, input_shardings=[{0: [0], 1: ["axis_0"]}]),
        st.ShardingError, "input_shardings[0] has axis 'axis_0' twice; an axis splits one dimension at most",
    ),
    "a dimension too many": (
        lambda m: st.shard_jit(abs, m, input_shardings=[{3: [0]}])([[np.ones((4, 2))]] * 4),
        st.AxisError, "argument 0: input_shardings splits dimension 3; axis 3 is out of range for 2 dimensions",
    ),
    "a dimension twice": (
        lambda m: st.shard_jit(abs, m, input_shardings=[{1: [0], -1: [1]}])([[np.ones((4, 2))]] * 4),
        st.ShardingError, "argument 0: input_shardings has dimension 1 twice, as 1 and -1",
    ),
    "an array": (
        lambda m: st.shard_jit(abs, m, input_shardings=[{}])(np.ones(4)),
        st.ArgumentTypeError, "the argument is a ndarray; wanted a list of 4 lists, one for each device of the mesh, of 1 argu",
    ),
    "three lists": (
        lambda m: st.shard_jit(abs, m, input_shardings=[{}])([[1]] * 3),
        st.ArgumentError, "the argument is a list of 3; wanted a list of 4 lists",
    ),
    "no lists": (
        lambda m: st.shard_jit(abs, m, input_shardings=[{}])([[1], [1], np.ones(3), [1]]),
        st.ArgumentTypeError, "item 2 is a ndarray; wanted a list of 4 lists",
    ),
    "two arguments": (
        lambda m: st.shard_jit(abs, m, input_shardings=[{}])([[1], [1, 2], [1], [1]]),
        st.ArgumentError, "item 1 has 2 arguments, and input_shardings has 1 entry; wanted one for each",
    ),
    "other forms": (
        lambda m: st.shard_jit(abs, m, input_shardings=[{}])([[{"a": 1}], [{"b": 1}], [{"a": 1}], [{"a": 1}]]),
        st.ArgumentError, "argument 0 is a pytree of the form {'a': *} in item 0, and {'b': *} in item 1; wanted one form",
    ),
    "another prefix": (
        lambda m: st.shard_jit(abs, m, input_shardings=[{"a": {}}])([[{"b": 1}]] * 4),
        st.ArgumentError, "input_shardings[0] has the entries ['a'], and argument 0 has ['b']",
    ),
    "shapes": (
        lambda m: st.shard_jit(abs, m, input_shardings=[{0: [0, 1]}])([[np.ones((2, 3 + k // 3))] for k in range(4)]),
        st.ShapeError, "shard_jit: argument 0: blocks of shapes (2, 3) and (2, 4) do not fit together along axis 1; there are",
    ),
    "numbers of dimensions": (
        lambda m: st.shard_jit(len, m, input_shardings=[{}])([[{"a": np.ones(k)}] for k in (2, 2, (2, 2), 2)]),
        st.ShapeError, "shard_jit: argument 0['a'] has shapes (2,) and (2, 2) on ",
    ),
    "text": (
        lambda m: st.shard_jit(abs, m, input_shardings=[{}])([["text"]] * 4),
        st.ArgumentTypeError, "shard_jit: argument 0 is a str; wanted an array of numbers",
    ),
    "elements": (
        lambda m: st.shard_jit(bool, m, input_shardings=[{}])([[1.0]] * 4), st.ConcretizationError, "needs the elements",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_to_write(name: str, backend: str) -> None:
    call, kind, words = ERRORS[name]
    with pytest.raises(kind) as caught:
        call(grid(backend))
    assert words in str(caught.value)
    if name != "elements":
        assert str(caught.value).startswith("shard_jit: ")


def test_one_device() -> None:
    mesh = st.make_mesh((1,))
    assert [x.tolist() for x in st.shard_jit(abs, mesh, input_shardings=[{0: 0}])([[np.arange(-2, 1)]])] == [[2, 1, 0]]


def test_the_error_names_shapes_that_differ() -> None:
    run = st.shard_jit(abs, st.make_mesh((2, 2)), input_shardings=[{0: [0], 1: [1]}])
    with pytest.raises(st.ShapeError, match=r"argument 0: blocks of shapes \(3, 1\) and \(4, 1\) do not fit together"):
        run([[np.ones((n, 1))] for n in (4, 4, 3, 4)])


def test_numbers_stay_weakly_typed(backend: str) -> None:
    mesh = st.make_mesh((2, 2), devices=st.devices(backend))
    double = st.shard_jit(lambda x, y: x * y, mesh, input_shardings=[{0: [0, 1]}, {}])
    results = double([[np.ones(1, "float32"), 2.5]] * 4)
    assert [(y.dtype.name, y.tolist()) for y in results] == [("float32", [2.5])] * 4
