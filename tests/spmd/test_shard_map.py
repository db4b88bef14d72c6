"""shard_map: a function on each device's block, compared with NumPy on the whole array."""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.sharding.layout import offsets
from shardtensor.spmd.maps import outputs
from tests import draws
from tests.layouts import (
    DTYPES,
    READ_ONLY,
    array,
    assert_same,
    everywhere,
    mesh_of,
    meshes,
    on_host,
    placed,
    shapes,
    specs,
    values_of,
)


def chains_of(spec: st.P, ndim: int) -> list[tuple[str, ...]]:
    return list(spec.chains_of(ndim))


def named_by(spec: st.P) -> tuple[str, ...]:
    return tuple(axis for chain in spec.chains for axis in chain)


def subset(mesh: st.Mesh, data: Any, proper: bool = False) -> tuple[str, ...]:
    """Some axes of a mesh, in any order."""
    most = len(mesh.axis_names) - proper
    return tuple(data.draw(some.permutations(mesh.axis_names))[: data.draw(some.integers(1, most))])


def over_alone(spec: st.P, axes: Sequence[str], ndim: int) -> st.P:
    """Returns a spec without the axes that are not listed."""
    return st.P(*[tuple(a for a in chain if a in axes) for chain in chains_of(spec, ndim)])


def my_part(x: Any, spec: st.P) -> Any:
    """Returns this device's block of an array that every device has whole."""
    for d, chain in enumerate(chains_of(spec, x.ndim)):
        if chain:
            bounds = offsets(x.shape[d], tuple(st.axis_size(a) for a in chain))
            k = st.axis_index(chain)
            x = x[(*[slice(None)] * d, slice(int(bounds[k]), int(bounds[k + 1])))]
    return x


def whole_of(block: Any, spec: st.P) -> Any:
    """Returns the whole array of which every device has a block."""
    for d, chain in enumerate(chains_of(spec, block.ndim)):
        if chain:
            block = st.all_gather(block, chain, axis=d, tiled=True)
    return block


def drawn(check: Callable[[Any], None], examples: int = 50) -> None:
    """Runs a check with data of hypothesis (which does not accept a test with a fixture of function scope)."""
    count = draws.drawn(examples, fast=examples // 5)
    hypothesis.settings(max_examples=count)(hypothesis.given(data=some.data())(check))()


def some_layout(data: Any, backend: str) -> tuple[np.ndarray, st.Mesh, st.P]:
    value = array(data.draw(shapes(0, 3)), data.draw(some.sampled_from(DTYPES)), 1)
    mesh = data.draw(meshes(backend))
    return value, mesh, data.draw(specs(mesh, value.ndim))


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_an_elementwise_body_is_the_function_and_moves_nothing(backend: str) -> None:
    def check(data: Any) -> None:
        value, mesh, spec = some_layout(data, backend)
        x = st.device_put(value, st.NamedSharding(mesh, spec))
        seen = {}

        def body(block: Any) -> Any:
            device = st.current_device()
            seen[device] = on_host(block, device)
            return block, ~block if value.dtype == bool else block + block

        f = st.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        with st.transfers() as log, st.transfer_guard("disallow"):
            same, twice = f(x)
        assert log.bytes == 0
        assert same.sharding == twice.sharding == st.NamedSharding(mesh, spec)
        for device, index in x.sharding.devices_indices_map(value.shape).items():
            np.testing.assert_array_equal(seen[device], value[index])
            assert seen[device].dtype == value.dtype
        assert_same(same, value, exact=True)
        assert_same(twice, ~value if value.dtype == bool else value + value, exact=True)

    drawn(check, 80)


def test_operands_of_any_layout_are_resharded_to_the_specs(backend: str) -> None:
    def check(data: Any) -> None:
        value, mesh, spec = some_layout(data, backend)
        x = placed(data, value, backend, mesh)
        turned = st.P(*chains_of(spec, value.ndim)[::-1])
        order = tuple(range(value.ndim))[::-1]
        f = st.shard_map(lambda block: st.permute_dims(block, order), mesh=mesh, in_specs=spec, out_specs=turned)
        made = f(x)
        assert made.sharding == st.NamedSharding(mesh, turned)
        assert_same(made, value.T, exact=True)
        np.testing.assert_array_equal(values_of(x), value)

    drawn(check)


def test_blocks_are_gathered_and_split_as_the_specs_require(backend: str) -> None:
    """The blocks are gathered from any layout and split into any other, within one body."""

    def check(data: Any) -> None:
        value, mesh, spec = some_layout(data, backend)
        other = data.draw(specs(mesh, value.ndim))

        def body(block: Any) -> Any:
            whole = whole_of(block, spec)
            return whole, st.asarray(my_part(whole, other), copy=True)

        made, moved = st.shard_map(body, mesh=mesh, in_specs=spec, out_specs=(st.P(), other))(value)
        assert made.sharding.is_fully_replicated
        assert_same(made, value, exact=True)
        assert moved.sharding == st.NamedSharding(mesh, other)
        assert_same(moved, value, exact=True)

    drawn(check)


def test_reductions_of_blocks_are_those_of_the_whole(backend: str) -> None:
    def check(data: Any) -> None:
        value, mesh, spec = some_layout(data, backend)
        value = value.real.astype("float64")  # these are sums of sixteenths, and round nowhere
        gone = data.draw(some.sampled_from([None, *range(value.ndim)]))
        chains = chains_of(spec, value.ndim)
        along = named_by(spec) if gone is None else chains[gone]
        kept = st.P() if gone is None else st.P(*chains[:gone], *chains[gone + 1 :])

        def body(block: Any) -> Any:
            total = st.sum(block, axis=gone)
            return {"sum": st.psum(total, along) if along else total}

        made = st.shard_map(body, mesh=mesh, in_specs=(spec,), out_specs={"sum": kept})(value)["sum"]
        assert made.sharding == st.NamedSharding(mesh, kept)
        assert_same(made, value.sum(axis=gone), exact=True)

    drawn(check)


def test_axes_on_one_dimension_split_it_in_the_given_order(backend: str) -> None:
    mesh = mesh_of((2, 3), backend)
    value = np.arange(11)
    for spec, parts in (
        (st.P(("x", "y")), [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]),
        (st.P(("y", "x")), [[0, 1], [4, 5], [8, 9], [2, 3], [6, 7], [10]]),
    ):
        seen = {}
        f = st.shard_map(
            lambda b, seen=seen: seen.update({st.axis_index(("x", "y")): values_of_here(b).tolist()}),
            mesh=mesh, in_specs=spec, out_specs=st.P(),
        )  # fmt: skip
        assert f(value) is None
        assert [seen[k] for k in range(6)] == parts


def values_of_here(x: Any) -> np.ndarray:
    return on_host(x, st.current_device())


@everywhere
def test_a_matrix_product_by_partial_sums(backend: str) -> None:
    a, b = array((5, 7), "float64", 1), array((7, 3), "float64", 2)
    mesh = mesh_of((2, 3), backend)
    in_specs = (st.P("x", "y"), st.P("y"))
    f = st.shard_map(lambda a, b: st.psum(a @ b, "y"), mesh=mesh, in_specs=in_specs, out_specs=st.P("x"))
    made = f(a, b)
    assert made.sharding.spec == st.P("x")
    assert_same(made, a @ b)
    g = st.shard_map(
        lambda a, b: st.psum_scatter(a @ b, "y", scatter_dimension=1, tiled=True),
        mesh=mesh, in_specs=in_specs, out_specs=st.P("x", "y"),
    )  # fmt: skip
    assert_same(g(a, b), a @ b)


@everywhere
def test_halos_by_permutation(backend: str) -> None:
    """Blocks of unequal sizes form a ring and exchange their edges: x[i - 1] + x[i + 1], periodic."""
    count, value = 4, array((11, 2), "float64", 1)
    mesh = mesh_of((count,), backend)
    ring = [(k, (k + 1) % count) for k in range(count)]

    def body(x: Any) -> Any:
        left = st.ppermute(x[-1:], "x", ring)
        right = st.ppermute(x[:1], "x", [(b, a) for a, b in ring])
        wide = st.concat([left, x, right])
        return wide[:-2] + wide[2:]

    made = st.shard_map(body, mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))(value)
    assert_same(made, np.roll(value, 1, axis=0) + np.roll(value, -1, axis=0), exact=True)


# -- blocks of sizes that are not the split rule's ---------------------------------------------------------------------


def test_blocks_of_any_sizes_are_joined_in_order_and_rebalanced(backend: str) -> None:
    def check(data: Any) -> None:
        mesh = data.draw(meshes(backend))
        ndim = data.draw(some.integers(1, 3))
        spec = data.draw(specs(mesh, ndim))
        chains = chains_of(spec, ndim)
        counts = [tuple(mesh.shape[a] for a in chain) for chain in chains]
        lengths = [math.prod(c) for c in counts]
        sizes = [data.draw(some.lists(some.integers(0, 4), min_size=n, max_size=n)) for n in lengths]
        value = array(tuple(sum(row) for row in sizes), "int64", 1)
        ends = [np.cumsum([0, *row]).tolist() for row in sizes]

        def body() -> Any:
            places = [st.axis_index(chain) if chain else 0 for chain in chains]
            return st.asarray(value[tuple(slice(e[k], e[k + 1]) for e, k in zip(ends, places, strict=True))])

        f = st.shard_map(body, mesh=mesh, in_specs=(), out_specs=spec)
        with st.transfers() as log:
            made = f()
        assert made.sharding == st.NamedSharding(mesh, spec)
        assert_same(made, value, exact=True)
        rule = [np.diff(offsets(*of)).tolist() for of in zip(value.shape, counts, strict=True)]
        if rule == sizes and set(named_by(spec)) == set(mesh.axis_names):
            assert not log.bytes

    drawn(check, 60)


def test_rows_that_pass_a_filter(backend: str) -> None:
    value = array((23,), "float64", 1)
    mesh = mesh_of((4,), backend)
    x = st.device_put(value, st.NamedSharding(mesh, st.P("x")))
    with st.transfers() as log:
        made = st.shard_map(lambda b: b[b > 0], mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))(x)
    assert_same(made, value[value > 0], exact=True)
    kept = [int((p > 0).sum()) for p in np.array_split(value, 4)]
    ends, bounds = np.cumsum([0, *kept]), offsets(sum(kept), (4,))
    stays = sum(max(0, min(ends[k + 1], bounds[k + 1]) - max(ends[k], bounds[k])) for k in range(4))
    assert log.bytes == 8 * (sum(kept) - stays) > 0


# -- forms of specs ----------------------------------------------------------------------------------------------------


@everywhere
def test_specs_may_be_prefixes_of_arguments(backend: str) -> None:
    pair = namedtuple("pair", "left right")
    mesh = mesh_of((2, 2), backend)
    w, v = array((4, 3), "float32", 1), array((5,), "float32", 2)
    params = {"layers": [pair(w, v), pair(w + 1, v + 1)], "scale": np.float32(2), "none": None}

    def body(params: Any, more: Any) -> Any:
        first, second = params["layers"]
        assert type(first) is pair
        assert first.left.shape == (2, 3)
        assert second.right.shape[0] in (2, 3)
        assert params["scale"].shape == ()
        assert params["none"] is None
        assert more[0].shape == (4, 3)
        return {"sums": (first.left * params["scale"], [second.right]), "same": pair(more[0], None)}

    in_specs = ({"layers": [st.P("x"), pair(st.P("x"), st.P("y"))], "scale": st.P(), "none": None}, st.P())
    out_specs = {"sums": (st.P("x"), st.P("y")), "same": st.P()}
    made = st.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(params, [w])
    assert list(made) == ["sums", "same"]
    assert type(made["same"]) is pair
    assert made["same"].right is None
    assert_same(made["sums"][0], w * 2, exact=True)
    assert_same(made["sums"][1][0], v + 1, exact=True)
    assert_same(made["same"].left, w, exact=True)
    assert made["sums"][1][0].sharding.spec == st.P("y")


def test_specs_of_dicts_are_matched_by_key(backend: str) -> None:
    mesh = mesh_of((2,), backend)
    a, b = np.arange(4), np.arange(4) * 10

    def body(tree: Any) -> Any:
        assert tree["a"].shape == (2,)
        assert tree["b"].shape == (4,)
        made = {"whole": tree["b"], "block": tree["a"]}
        return dict(reversed(made.items())) if st.axis_index("x") else made

    in_specs, out_specs = ({"b": st.P(), "a": st.P("x")},), {"block": st.P("x"), "whole": st.P()}
    made = st.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)({"a": a, "b": b})
    assert_same(made["block"], a, exact=True)
    assert_same(made["whole"], b, exact=True)


def test_one_spec_for_all_arguments_and_all_results(backend: str) -> None:
    mesh = mesh_of((3,), backend)
    a, b = array((7, 2), "float64", 1), array((8,), "int32", 2)
    f = st.shard_map(lambda a, b, c: (a, [b, c["k"]]), mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))
    made = f(a, b, {"k": a})
    for tensor, value in zip((made[0], *made[1]), (a, b, a), strict=True):
        assert_same(tensor, value, exact=True)
        assert tensor.sharding == st.NamedSharding(mesh, st.P("x"))
    assert st.shard_map(lambda: (), mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))() == ()


@everywhere
def test_shard_map_passes_static_arguments_unchanged(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    whole = st.ones((3,), device=mesh)
    host, thing = np.arange(3), object()
    seen = []

    def body(x: Any, *others: Any) -> Any:
        seen.append(others)
        return x * len(others[0])

    f = st.shard_map(body, mesh=mesh, in_specs=(st.P("x"), None, None, None), out_specs=st.P("x"))
    made = f(np.arange(5), "abc", whole, [thing, {"k": host}])
    assert_same(made, np.arange(5) * 3, exact=True)
    assert len(seen) == 4
    for how, tensor, tree in seen:
        assert how == "abc"
        assert tensor is whole
        assert tree[0] is thing
        assert tree[1]["k"] is host
    none = st.shard_map(lambda how: st.full((1,), how), mesh=mesh, in_specs=None, out_specs=st.P("x"))
    assert_same(none(3), np.full(4, 3), exact=True)


@everywhere
def test_without_in_specs_arguments_keep_their_own_specs(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    a, b = np.arange(24.0).reshape(6, 4), np.arange(4.0)
    x, y = st.device_put(a, st.NamedSharding(mesh, st.P("x", "y"))), st.device_put(b, st.NamedSharding(mesh, st.P("y")))
    shapes = []

    @st.shard_map(mesh=mesh, out_specs=st.P("x", "y"))
    def f(x: Any, inner: Any, how: Any) -> Any:
        shapes.append((x.shape, inner["y"].shape, inner["host"].shape))
        assert (how, inner["three"], inner["none"]) == ("static", 3, None)
        return (x + inner["y"]) * inner["three"] + float(inner["host"][2])

    with st.transfers() as log:
        z = f(x, {"y": y, "three": 3, "host": np.arange(5), "none": None}, "static")
    assert shapes == [((3, 2), (2,), (5,))] * 4
    assert {record.source for record in log if record.bytes} <= {st.HOST}
    np.testing.assert_array_equal(np.asarray(z), (a + b) * 3 + 2)
    with st.use_mesh(mesh):
        whole = st.shard_map(lambda x: x, out_specs=st.P())(st.device_put(b, st.P()))
    assert whole.sharding == st.NamedSharding(mesh, st.P())


def test_without_in_specs_over_some_axes(backend: str) -> None:
    """Splits by other axes are kept: the body gets tensors over these axes."""
    mesh = mesh_of((2, 2), backend)
    x = st.device_put(np.arange(16.0).reshape(4, 4), st.NamedSharding(mesh, st.P("x", "y")))
    seen = []
    f = st.shard_map(
        lambda b: seen.append(str(st.typeof(b))) or b * 2, mesh=mesh, out_specs=st.P("x"), axis_names={"x"}
    )
    assert f(x).sharding.spec == st.P("x", "y")
    assert seen == ["float64[2,4@y]{V:x}"] * 2


def test_without_in_specs_a_tensor_of_another_mesh_is_an_error(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    other = st.device_put(
        np.ones(8), st.NamedSharding(st.make_mesh((2,), ("z",), devices=st.devices(backend)), st.P("z"))
    )
    f = st.shard_map(lambda x: x, mesh=mesh, out_specs=st.P("x"))
    with pytest.raises(st.ShardingError, match=r"argument 0\['k'\] is split over axis 'z' of Mesh.*give in_specs"):
        f({"k": other})


def test_static_leaves_are_passed_unchanged_together_with_others(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    whole = st.ones((3,), device=mesh)
    host, thing = np.arange(3), object()

    def body(tree: Any) -> Any:
        assert tree["how"] == "abc"
        assert tree["thing"] is thing
        assert tree["k"][1] is host
        assert tree["tensor"] is whole
        return tree["k"][0] * 2

    in_specs = ({"k": (st.P("x"), None), "thing": None, "how": None, "tensor": None},)
    f = st.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=st.P("x"))
    made = f({"k": (np.arange(5), host), "thing": thing, "how": "abc", "tensor": whole})
    assert_same(made, np.arange(5) * 2, exact=True)


def test_scalars_and_arguments_of_no_dimensions(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)

    def body(a: Any, b: Any, c: Any) -> Any:
        assert np.shape(a) == b.shape == c.shape == ()
        return a + b, 2.5, True, st.axis_size("x") + c, np.float32(1)

    f = st.shard_map(body, mesh=mesh, in_specs=st.P(), out_specs=st.P())
    total, number, truth, count, host = f(1.5, np.array(2.0), st.asarray(3, device=st.devices(backend)[5]))
    assert_same(total, np.array(3.5))
    assert_same(number, np.array(2.5))
    assert_same(truth, np.array(True))
    assert_same(count, np.array(5))
    assert_same(host, np.array(1, "float32"))
    assert total.sharding == st.NamedSharding(mesh, st.P())


@everywhere
def test_as_a_decorator(backend: str) -> None:
    mesh = mesh_of((4,), backend)

    @st.shard_map(mesh=mesh, in_specs=(st.P("x"), st.P()), out_specs=(st.P("x"), st.P()))
    def scaled(block: Any, by: Any) -> Any:
        """A block, and the sum."""
        return block * by, st.psum(st.sum(block), "x")

    assert (scaled.__name__, scaled.__doc__) == ("scaled", "A block, and the sum.")
    for by in (2, 3):
        made, total = scaled(np.arange(6), by)
        assert_same(made, np.arange(6) * by, exact=True)
        assert_same(total, np.array(15), exact=True)


def test_the_default_mesh_is_that_of_the_call(backend: str) -> None:
    f = st.shard_map(lambda x: x + st.axis_index("x"), in_specs=st.P("x"), out_specs=st.P("x"))
    for count in (2, 4):
        with st.use_mesh(mesh_of((count,), backend)) as mesh:
            made = f(np.zeros(4))
        assert made.sharding == st.NamedSharding(mesh, st.P("x"))
        assert_same(made, np.repeat(np.arange(count), 4 // count) + 0.0, exact=True)
    if backend == "numpy":
        made = st.shard_map(lambda: st.axis_size("d"), in_specs=(), out_specs=st.P())()
        assert made.item() == len(st.devices())


def test_replicated_results_are_checked_for_equality(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    blocks = [1.0, 2.0, 1.0, 3.0]

    def body() -> Any:
        return st.full((3,), blocks[st.axis_index(("x", "y"))])

    with pytest.raises(st.ShapeError) as caught:
        st.shard_map(body, mesh=mesh, in_specs=(), out_specs=st.P("y"))()
    d = mesh.flat
    for word in ("'x'", "P('y')", str(d[1]), str(d[3]), "st.psum"):
        assert word in str(caught.value)
    assert str(d[0]) not in str(caught.value)
    with pytest.raises(st.ShapeError, match=f"{d[0]} and {d[1]} it differs"):
        st.shard_map(body, mesh=mesh, in_specs=(), out_specs=st.P("x"))()
    made = st.shard_map(body, mesh=mesh, in_specs=(), out_specs=st.P("y"), check_vma=False)()
    assert values_of(made).tolist() == [1.0] * 3 + [2.0] * 3  # the first device's count
    made = st.shard_map(body, mesh=mesh, in_specs=(), out_specs=st.P(), check_vma=False)()
    assert values_of(made).tolist() == [1.0] * 3
    blocks[3] = 2.0
    assert_same(st.shard_map(body, mesh=mesh, in_specs=(), out_specs=st.P("y"))(), np.repeat([1.0, 2.0], 3), exact=True)
    blocks[:] = [np.nan] * 4  # equals itself
    assert_same(st.shard_map(body, mesh=mesh, in_specs=(), out_specs=st.P())(), np.full(3, np.nan), exact=True)


def test_bytes_of_the_equality_check(backend: str) -> None:
    """Each device sends its block to the first device that must have an equal one; with check_vma=False, nothing is
    sent.
    """
    mesh = mesh_of((2, 3), backend)
    x = st.device_put(array((6, 5), "float64", 1), st.NamedSharding(mesh, st.P()))
    for spec, nbytes in ((st.P(), 5 * 240), (st.P("x"), 4 * 240), (st.P(("y", "x")), 0)):
        for check in (True, False):
            f = st.shard_map(lambda b: b + 1, mesh=mesh, in_specs=st.P(), out_specs=spec, check_vma=check)
            with st.transfers() as log, st.transfer_guard("disallow"):
                f(x)
            assert log.bytes == (nbytes if check else 0)
            assert {r.operator for r in log if r.bytes} <= {"shard_map"}


def test_nothing_moves_where_the_layout_fits(backend: str) -> None:
    """Blocks stay on their devices, for arguments and results, on any mesh."""
    mesh = mesh_of((2, 3), backend)
    value = array((5, 7), "float64", 1)
    spec = st.P(None, ("y", "x"))
    x = st.device_put(value, st.NamedSharding(mesh, spec))
    f = st.shard_map(lambda b: b * 2, mesh=mesh, in_specs=spec, out_specs=spec)
    with st.transfers() as log, st.transfer_guard("disallow"):
        made = f(f(x))
        made = f(made)
    assert (log.bytes, len([r for r in log if r.source != r.destination])) == (0, 0)
    assert_same(made, value * 8, exact=True)
    with st.transfers() as log:
        st.shard_map(lambda b: b, mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"), check_vma=False)(x)
    with st.transfers() as wanted:
        st.device_put(x, st.NamedSharding(mesh, st.P("x")))
    assert log.bytes == wanted.bytes > 0
    if backend == "numpy":
        address = x.addressable_shards[0].data.__array_interface__["data"]
        seen: list[int] = []

        def look(block: Any) -> None:
            seen.append(block.__array_interface__["data"][0])

        g = st.shard_map(look, mesh=mesh, in_specs=spec, out_specs=st.P())
        with st.transfers() as log:
            g(x)
        assert log.copied == 0
        assert seen[0] == address[0]


# -- some of the mesh's axes -------------------------------------------------------------------------------------------


def test_over_some_axes_bodies_get_tensors_over_the_others(backend: str) -> None:
    def check(data: Any) -> None:
        value = array(data.draw(shapes(1, 3)), "float64", 1)
        mesh = mesh_of(data.draw(some.sampled_from([(2, 2), (2, 3), (4, 2), (1, 3), (2, 2, 2)])), backend)
        over = subset(mesh, data, proper=True)
        rest = [a for a in mesh.axis_names if a not in over]
        spec = over_alone(data.draw(specs(mesh, value.ndim)), over, value.ndim)
        x = placed(data, value, backend, mesh)
        met = set()

        def body(block: Any) -> Any:
            assert isinstance(block, st.ShardedTensor)
            assert block.device.size == math.prod(mesh.shape[a] for a in rest)
            assert block.device.axis_names == tuple(rest)
            assert st.current_device() is None
            met.add((st.axis_index(over), block.device.flat))
            with pytest.raises(st.ShardingError, match="no axis is called"):
                st.axis_index(rest[0])
            total = st.psum(st.sum(block), named_by(spec)) if spec.chains else st.sum(block)
            return block * 2, st.exp(block).sum(axis=0) * 0, total

        along = st.P(*chains_of(spec, value.ndim)[1:])
        f = st.shard_map(body, mesh=mesh, in_specs=spec, out_specs=(spec, along, st.P()), axis_names=set(over))
        twice, nothing, total = f(x)
        assert len(met) == math.prod(mesh.shape[a] for a in over)
        assert_same(twice, value * 2, exact=True)
        assert_same(nothing, np.zeros(value.shape[1:]))
        assert_same(total, value.sum(), exact=True)
        assert twice.sharding.mesh == mesh
        for got, wanted in zip(chains_of(twice.sharding.spec, value.ndim), chains_of(spec, value.ndim), strict=True):
            assert got[: len(wanted)] == wanted

    drawn(check, 40)


def test_over_some_axes_nothing_moves_that_is_in_place(backend: str) -> None:
    mesh = mesh_of((2, 4), backend)
    value = array((9, 5), "float64", 1)
    for parts in (("x", "y"), (("x", "y"),), ("y", "x"), (None, "x"), ("y",)):
        spec = st.P(*parts)
        part = over_alone(spec, ("x",), 2)
        x = st.device_put(value, st.NamedSharding(mesh, spec))
        f = st.shard_map(lambda b: b + 1, mesh=mesh, in_specs=part, out_specs=part, axis_names={"x"}, check_vma=False)
        with st.transfers() as log, st.transfer_guard("disallow"):
            made = f(x)
        assert log.bytes == 0
        assert made.sharding == x.sharding
        assert_same(made, value + 1, exact=True)


@pytest.mark.parametrize("named", ["mesh", "part", "default"])
def test_a_map_over_the_others_inside(named: str, backend: str) -> None:
    """The inner map reaches single devices, on which the names of both maps can be used."""

    def check(data: Any) -> None:
        value = array(data.draw(shapes(1, 2)), "float64", 1)
        mesh = mesh_of(data.draw(some.sampled_from([(2, 2), (2, 3), (4, 2), (1, 3), (2, 2, 2)])), backend)
        over = subset(mesh, data, proper=True)
        rest = tuple(a for a in mesh.axis_names if a not in over)
        whole = data.draw(specs(mesh, value.ndim))
        outer, inner = over_alone(whole, over, value.ndim), over_alone(whole, rest, value.ndim)
        order = tuple(data.draw(some.permutations(mesh.axis_names)))
        seen = {}

        def inside(block: Any) -> Any:
            device = st.current_device()
            seen[device] = on_host(block, device)
            assert mesh.devices[tuple(st.axis_index(a) for a in mesh.axis_names)] == device
            count = st.psum(1, order)
            assert count == st.axis_size(order) == mesh.size
            places = st.all_gather(st.asarray(st.axis_index(mesh.axis_names)), order)
            total = st.sum(block)
            for axis in named_by(whole):
                total = st.psum(total, axis)
            return block + count, places, total

        def outside(block: Any) -> Any:
            here = {"mesh": mesh, "part": block.device, "default": None}[named]
            return st.shard_map(inside, mesh=here, in_specs=inner, out_specs=(inner, st.P(), st.P()))(block)

        made, places, total = st.shard_map(
            outside, mesh=mesh, in_specs=outer, out_specs=(outer, st.P(), st.P()), axis_names=over
        )(value)
        both = [a + b for a, b in zip(chains_of(outer, value.ndim), chains_of(inner, value.ndim), strict=True)]
        layout = st.NamedSharding(mesh, st.P(*both))
        for device, index in layout.devices_indices_map(value.shape).items():
            np.testing.assert_array_equal(seen[device], value[index])
        assert made.sharding == layout
        assert_same(made, value + mesh.size, exact=True)
        grid = np.arange(mesh.size).reshape(mesh.axis_sizes)
        assert_same(places, grid.transpose([mesh.axis_names.index(a) for a in order]).ravel(), exact=True)
        assert_same(total, value.sum(), exact=True)

    drawn(check, 25)


@everywhere
def test_three_maps_in_one_another(backend: str) -> None:
    mesh = mesh_of((2, 2, 2), backend)
    value = array((7, 6, 5), "float64", 1)
    named = []

    def third(block: Any) -> Any:
        named.append([st.axis_index(a) for a in "xyz"])
        return st.psum(st.sum(block), ("z", "x", "y")), block * 2

    def second(block: Any) -> Any:
        assert block.device.axis_names == ("z",)
        f = st.shard_map(third, in_specs=st.P(None, None, "z"), out_specs=(st.P(), st.P(None, None, "z")))
        total, twice = f(block)
        return total, twice + st.axis_index("y")

    def first(block: Any) -> Any:
        assert block.device.axis_names == ("y", "z")
        out_specs = (st.P(), st.P(None, "y"))
        f = st.shard_map(second, mesh=mesh, in_specs=st.P(None, "y"), out_specs=out_specs, axis_names={"y"})
        total, made = f(block)
        return total, made + 10 * st.axis_index("x")

    f = st.shard_map(first, mesh=mesh, in_specs=st.P("x"), out_specs=(st.P(), st.P("x")), axis_names={"x"})
    total, made = f(value)
    assert sorted(named) == [list(p) for p in np.ndindex(2, 2, 2)]
    wanted = value * 2 + np.repeat([0, 1], 3)[None, :, None] + np.repeat([0, 10], [4, 3])[:, None, None]
    assert_same(made, wanted, exact=True)
    assert made.sharding.spec == st.P("x", "y", "z")
    assert_same(total, value.sum(), exact=True)


def test_bodies_over_some_axes_may_return_any_layout(backend: str) -> None:
    """The calls return different layouts; the results have that of the first call."""
    mesh = mesh_of((2, 4), backend)
    value = array((6, 8), "float64", 1)

    def body(block: Any) -> Any:
        here = block.device
        if st.axis_index("x"):
            return st.reshard(block, st.NamedSharding(here, st.P(None, "y"))), block[:, 1:]
        square = st.Mesh(here.devices.reshape(2, 2), ("p", "q"))
        row = st.Mesh(here.devices, ("other",))
        return st.device_put(block, st.NamedSharding(square, st.P("p", "q"))), st.device_put(block[:, 1:], row)

    f = st.shard_map(body, mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"), axis_names="x")
    made, less = f(value)
    assert_same(made, value, exact=True)
    assert_same(less, value[:, 1:], exact=True)


def test_equal_results_of_different_layouts_are_equal(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    value = array((3, 4), "float64", 1)

    def body(block: Any) -> Any:
        spec = st.P(None, "y") if st.axis_index("x") else st.P("y")
        return st.reshard(block, st.NamedSharding(block.device, spec)) + wrong * st.axis_index("x")

    f = st.shard_map(body, mesh=mesh, in_specs=st.P(), out_specs=st.P(), axis_names={"x"})
    wrong = 0
    assert_same(f(value), value, exact=True)
    wrong = 1
    with pytest.raises(st.ShapeError, match="it differs"):
        f(value)


def test_results_on_another_grid_of_the_same_devices(backend: str) -> None:
    """The grid has as many axes, of other sizes: its layout does not apply to the mesh of the map."""
    mesh = mesh_of((2, 2, 2), backend)
    value = array((4, 4), "float64", 1)

    def body(block: Any) -> Any:
        row = st.Mesh(block.device.devices.reshape(4, 1), ("p", "q"))
        return st.device_put(block, st.NamedSharding(row, st.P("p", "q")))

    f = st.shard_map(body, mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"), axis_names={"x"})
    assert_same(f(value), value, exact=True)


# -- bodies ------------------------------------------------------------------------------------------------------------


@everywhere
def test_functions_of_the_library_run_on_the_device(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    value = array((4, 3), "float64", 1)
    seen: dict[int, st.Device | None] = {}

    def body(block: Any) -> Any:
        seen[st.axis_index(("x", "y"))] = st.current_device()
        made = [st.zeros((2,)), st.sum(block, axis=0), st.arange(3), st.asarray([1.0, 2.0]), st.psum(block, "x")]
        assert not any(isinstance(x, st.ShardedTensor) for x in made)
        zeros, total, row, _, _ = made
        return st.concat([zeros, total + row])

    made = st.shard_map(body, mesh=mesh, in_specs=st.P(("x", "y")), out_specs=st.P(("x", "y")))(value)
    assert [seen[k] for k in range(4)] == list(mesh.flat)
    assert st.current_device() is None
    assert_same(made, np.concatenate([np.concatenate([[0, 0], r + np.arange(3)]) for r in value]))


@everywhere
def test_bodies_may_use_arrays_of_enclosing_scopes(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    spread_ = st.device_put(np.arange(3.0), st.NamedSharding(mesh, st.P("x")))
    alone = st.device_put(np.arange(3.0), st.devices(backend)[6])
    host = np.arange(3.0)
    value = array((6, 3), "float64", 1)
    counts = []

    def body(block: Any) -> Any:
        counts.append(len(counts))
        elsewhere = spread_ + alone
        assert isinstance(elsewhere, st.ShardedTensor)
        return block + st.asarray(host), elsewhere, (alone,), host

    f = st.shard_map(body, mesh=mesh, in_specs=st.P("x"), out_specs=(st.P("x"), st.P(), st.P(), st.P()))
    made, both, (one,), own = f(value)
    assert counts == [0, 1, 2, 3]
    assert_same(made, value + host, exact=True)
    assert_same(both, 2 * host, exact=True)
    assert_same(one, host, exact=True)
    assert_same(own, host, exact=True)
    assert made.sharding.mesh == both.sharding.mesh == one.sharding.mesh == mesh
    host[:] = 7
    assert_same(own, np.arange(3.0), exact=True)


def test_any_callable(backend: str) -> None:
    mesh = mesh_of((3,), backend)

    class Scaled:
        def __init__(self, by: int) -> None:
            self.by = by

        def __call__(self, block: Any) -> Any:
            return block * self.by

    value = np.arange(7)
    for f in (Scaled(3), functools.partial(lambda by, block: block * by, 3)):
        made = st.shard_map(f, mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))(value)
        assert_same(made, value * 3, exact=True)


def test_results_that_are_none_or_trees(backend: str) -> None:
    mesh = mesh_of((2,), backend)
    ran = []
    f = st.shard_map(lambda x: ran.append(st.axis_index("x")), mesh=mesh, in_specs=st.P("x"), out_specs=st.P())
    assert f(np.arange(3)) is None
    assert sorted(ran) == [0, 1]
    made = st.shard_map(
        lambda x: {"a": x, "b": [None, (x * 2,)], "c": {}}, mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x")
    )(np.arange(3))
    assert list(made) == ["a", "b", "c"]
    assert made["b"][0] is None
    assert made["c"] == {}
    assert_same(made["a"], np.arange(3), exact=True)
    assert_same(made["b"][1][0], np.arange(3) * 2, exact=True)


@pytest.mark.parametrize("backend", READ_ONLY)
def test_blocks_are_read_only(backend: str) -> None:
    mesh = mesh_of((2,), backend)
    value = array((6,), "float64", 1)
    x = st.device_put(value, st.NamedSharding(mesh, st.P("x")))

    def body(block: Any, whole: Any) -> Any:
        for mine in (block, whole, block[1:], block.T):
            with pytest.raises(ValueError, match="read-only"):
                mine[...] = 0
            with pytest.raises(ValueError, match="read-only"):
                mine += 1
        own = block + 0
        own += 1
        return own

    f = st.shard_map(body, mesh=mesh, in_specs=(st.P("x"), st.P()), out_specs=st.P("x"))
    assert_same(f(x, x), value + 1, exact=True)
    assert_same(x, value, exact=True)


@everywhere
def test_later_writes_of_a_body_change_no_result(backend: str) -> None:
    mesh = mesh_of((2,), backend)
    kept = {}

    def body(block: Any) -> Any:
        made = block * 2
        kept[st.axis_index("x")] = made
        return made

    value = array((6,), "float64", 1)
    made = st.shard_map(body, mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))(value)

    def spoil() -> None:
        mine = kept[st.axis_index("x")]
        mine[...] = 99.0

    st.shard_map(spoil, mesh=mesh, in_specs=(), out_specs=st.P())()
    assert_same(made, value * 2, exact=True)


@everywhere
def test_errors_are_raised_unchanged_and_release_the_other_programs(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)

    class Mine(Exception):
        pass

    told = []

    def body(x: Any) -> Any:
        if st.axis_index(("x", "y")) == 2:
            raise Mine("no")
        try:
            return st.psum(x, ("x", "y"))
        except st.CollectiveError as error:
            told.append(str(error))
            raise

    f = st.shard_map(body, mesh=mesh, in_specs=st.P("x"), out_specs=st.P())
    with pytest.raises(Mine, match="no") as caught:
        f(np.arange(4.0))
    assert caught.value.__notes__ == [f"shard_map: raised for shard 2 on {mesh.flat[2]}"]
    assert caught.value.__context__ is None
    assert told
    assert all(f"{mesh.flat[2]} raised Mine: no" in text for text in told)
    assert st.current_device() is None
    g = st.shard_map(lambda x: st.psum(x, "x"), mesh=mesh, in_specs=st.P("x"), out_specs=st.P())
    assert_same(g(np.arange(4.0)), np.array([2.0, 4.0]), exact=True)


def test_a_name_is_bound_once(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    other = mesh_of((2,), backend, start=4)
    f = st.shard_map(lambda x: x, mesh=other, in_specs=st.P("x"), out_specs=st.P("x"))
    with pytest.raises(st.ShardingError, match="axis 'x' is bound by a map around this one"):
        st.shard_map(lambda x: f(np.arange(2)), mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))(np.arange(4))
    g = st.shard_map(lambda x: x, mesh=mesh, in_specs=st.P(), out_specs=st.P(), axis_names={"x"})
    with pytest.raises(st.ShardingError, match="'x'; it is mapped by a map around this one"):
        st.shard_map(lambda x: g(x), mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"), axis_names={"x"})(np.arange(4))
    h = st.shard_map(lambda x: x, mesh=mesh, in_specs=st.P(), out_specs=st.P())
    with pytest.raises(st.ShardingError, match=r"every axis of Mesh.* is mapped by a map around this one"):
        st.shard_map(lambda x: h(x), mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))(np.arange(4))


# -- what it refuses ---------------------------------------------------------------------------------------------------


ROWS = st.P("x")


def mapped(x: Any, in_specs: Any = ROWS, out_specs: Any = ROWS, body: Any = lambda x: x, **more: Any) -> Any:
    mesh = more.pop("mesh", None) or x.sharding.mesh
    args = more.pop("args", (x,))
    return st.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **more)(*args)


def test_errors_say_which_mesh_lacks_an_axis() -> None:
    """The default mesh has an axis that no program names."""
    specs = {"in_specs": st.P("q"), "out_specs": st.P("q")}
    mesh = mesh_of((2, 2), "numpy")
    for options in (specs, {**specs, "axis_names": {"q"}}):
        f = st.shard_map(lambda x: x, **options)
        with pytest.raises(
            st.ShardingError, match=r"no mesh is given or set .*st\.set_mesh.* default one has \('d',\)"
        ):
            f(np.ones(4))
        with st.use_mesh(mesh), pytest.raises(st.ShardingError, match=r"and the mesh in use has \('x', 'y'\)"):
            f(np.ones(4))
    with pytest.raises(
        st.ShardingError, match=r"reshard: P\('x'\) .* in use \(inside a mapped function.* has \('d',\)"
    ):
        mapped(st.device_put(np.ones(4), mesh), body=lambda x: st.reshard(x, st.P("x")))


def test_specs_are_checked_on_each_mesh_that_is_in_use() -> None:
    f = st.shard_map(lambda x: x + st.axis_size("x"), in_specs=st.P("x"), out_specs=st.P("x"))
    for sizes, names in (((2,), ("x",)), ((4,), ("x",)), ((2, 2), ("x", "y")), ((2,), ("y",)), ((2,), ("x",))):
        with st.use_mesh(st.make_mesh(sizes, names)):
            if "x" in names:
                assert f(np.zeros(4)).tolist() == [sizes[0]] * 4
            else:
                with pytest.raises(st.ShardingError, match=r"in_specs has P\('x'\).*the mesh in use has \('y',\)"):
                    f(np.zeros(4))


def test_a_scalar_result_that_is_to_be_joined_names_the_remedies() -> None:
    x = st.device_put(np.ones(4), mesh_of((2, 2), "numpy"))
    with pytest.raises(st.AxisError, match=r"shape \(\), and .*st\.psum and st\.P\(\).*keepdims=True"):
        mapped(x, body=lambda x: x.sum())
    assert mapped(x, body=lambda x: x.sum(keepdims=True)).shape == (2,)


@pytest.mark.parametrize(("call", "kind", "words"), [
    (lambda x: mapped(x, st.P("q")), st.ShardingError, ["in_specs", "P('q')", "axis 'q'", "the mesh has ('x', 'y')"]),
    (lambda x: mapped(x, out_specs=st.P("q")), st.ShardingError, ["out_specs", "axis 'q'", "the mesh has ('x', 'y')"]),
    (lambda x: mapped(x, st.P("y"), axis_names={"x"}), st.ShardingError, ["in_specs", "axis 'y'", "the map is over"]),
    (lambda x: mapped(x, out_specs=st.P("y"), axis_names={"x"}), st.ShardingError, ["out_specs", "axis 'y'", "the map is over"]),
    (lambda x: mapped(x, axis_names={"q"}), st.ShardingError, ["axis_names", "'q'", "the mesh has ('x', 'y')"]),
    (lambda x: mapped(x, st.P(None, None, "x")), st.ShapeError, ["argument 0", "(4, 3)", "3 dimensions"]),
    (lambda x: mapped(x, ({"a": st.P("x")},), args=({"a": [np.arange(3), np.array(1)]},)), st.ShapeError, ["argument 0['a'][1]", "shape ()"]),
    (lambda x: mapped(x, out_specs=st.P(None, None, "x")), st.AxisError, ["the result", "(2, 3)", "3 dimensions"]),
    (lambda x: mapped(x, (st.P("x"), st.P("x"))), st.ArgumentError, ["2 entries for 1 argument"]),
    (lambda x: mapped(x, ((st.P("x"), st.P("x")),), args=((x,),)), st.ArgumentError, ["in_specs[0]", "[0], [1]"]),
    (lambda x: mapped(x, ({"a": st.P("x")},)), st.ArgumentError, ["in_specs[0]", "argument 0 is a leaf"]),
    (lambda x: mapped(x, {"a": st.P("x")}, args=({"a": x},)), st.ArgumentTypeError, ["in_specs is a dict", "tuple"]),
    (lambda x: mapped(x, out_specs=(st.P("x"), st.P("x"))), st.ArgumentError, ["out_specs", "the result is a leaf"]),
    (lambda x: mapped(x, out_specs={"a": st.P("x")}, body=lambda x: {"b": x}), st.ArgumentError, ["['a']", "['b']"]),
    (lambda x: mapped(x, "x"), st.ArgumentTypeError, ["in_specs has a str", "P('x', None)", "None for an argument"]),
    (lambda x: mapped(x, (st.P("x"), 0)), st.ArgumentTypeError, ["in_specs has an int"]),
    (lambda x: mapped(x, x.sharding), st.ArgumentTypeError, ["in_specs has a NamedSharding"]),
    (lambda x: mapped(x, out_specs=["x"]), st.ArgumentTypeError, ["out_specs has a str"]),
    (lambda x: mapped(x, body=3), st.ArgumentTypeError, ["f is an int; wanted a function"]),
    (lambda x: mapped(x, mesh=st.devices()), st.ArgumentTypeError, ["mesh is a list; wanted a Mesh"]),
    (lambda x: mapped(x, args=("text",)), st.ArgumentTypeError, ["argument 0 is a str", "None in in_specs"]),
    (lambda x: mapped(x, args=([x, None],)), st.ArgumentTypeError, ["argument 0[1] is a NoneType"]),
    (lambda x: mapped(x, args=(object(),)), st.ArgumentTypeError, ["object"]),
    (lambda x: mapped(x, body=lambda x: "text"), st.ArgumentTypeError, ["the result is a str", "wanted an array"]),
    (lambda x: mapped(x, body=lambda x: {"a": object()}), st.ArgumentTypeError, ["the result['a'] is an object"]),
    (lambda x: mapped(x, body=lambda x: None if st.axis_index("x") else x), st.ArgumentTypeError, ["NoneType on"]),
    (lambda x: mapped(x, body=lambda x: (x,) if st.axis_index("x") else x), st.ShapeError, ["different forms"]),
    (lambda x: mapped(x, body=lambda x: x[0] if st.axis_index("x") else x), st.ShapeError, ["(2, 3)", "(3,)"]),
    (lambda x: mapped(x, body=lambda x: x[:, st.axis_index("x") :]), st.ShapeError, ["do not fit together along axis 1"]),
    (lambda x: mapped(x, st.P("x", "y"), st.P("x")), st.ShapeError, ["declared to be equal along", "'y'", "0", "1", "it differs"]),
])  # fmt: skip
def test_errors(call: Any, kind: type[Exception], words: list[str], backend: str) -> None:
    value = array((4, 3), "float64", 1)
    x = st.device_put(value, mesh_of((2, 2), backend))
    with pytest.raises(kind) as caught:
        call(x)
    text = str(caught.value)
    assert text.startswith("shard_map: ")
    for word in words:
        assert word in text
    assert_same(x, value, exact=True)
    assert_same(mapped(x), value, exact=True)


def test_blocks_of_different_dtypes_are_promoted(backend: str) -> None:
    x = st.device_put(np.arange(4.0) + 0.1, mesh_of((2,), backend))
    made = mapped(x, body=lambda x: st.astype(x, "float32") if st.axis_index("x") else x)
    assert_same(made, np.concatenate([[0.1, 1.1], np.array([2.1, 3.1], "float32").astype("float64")]), exact=True)
    with pytest.raises(st.ShapeError, match="it differs"):
        mapped(x, st.P(), st.P(), lambda x: st.astype(x, "float32") if st.axis_index("x") else x)


def test_specs_are_checked_before_any_program_runs(backend: str) -> None:
    ran: list[int] = []
    mesh = mesh_of((2,), backend)
    for in_specs, out_specs in ((st.P("q"), st.P("x")), (st.P("x"), st.P("q")), (st.P("x"), [{"a": st.P("q")}])):
        with pytest.raises(st.ShardingError, match="'q'"):
            st.shard_map(lambda x: ran.append(1), mesh=mesh, in_specs=in_specs, out_specs=out_specs)(np.arange(4))
    assert not ran


def test_one_sum_is_not_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs hold views of one sum, which are equal without a comparison; two arrays are compared."""
    compared = []
    monkeypatch.setattr(outputs, "_alike", lambda x, y, *devices: compared.append((x, y)) or True)
    mesh = st.make_mesh((4,), ("x",), devices=st.devices("numpy")[:4])
    x = np.arange(4.0)
    f = st.shard_map(lambda b: st.psum(b, "x"), mesh=mesh, in_specs=st.P("x"), out_specs=st.P())
    assert f(x).tolist() == [6.0]
    assert not compared
    g = st.shard_map(lambda b: st.psum(b, "x") + 1, mesh=mesh, in_specs=st.P("x"), out_specs=st.P())
    assert g(x).tolist() == [7.0]
    assert len(compared) == 3
    halves = np.arange(4.0).reshape(2, 2)
    h = st.shard_map(lambda: halves[st.axis_index("x") % 2], mesh=mesh, in_specs=(), out_specs=st.P())
    h()
    assert len(compared) == 6


def test_no_axis_names_are_all_of_them(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    f = st.shard_map(
        lambda b: st.psum(b, ("x", "y")), mesh=mesh, in_specs=st.P("x"), out_specs=st.P(), axis_names=set()
    )
    assert f(np.arange(2.0)).tolist() == [2.0]
