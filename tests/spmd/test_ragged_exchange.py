"""`ragged_all_to_all`, compared with NumPy on the list of all devices' arrays."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.spmd.ragged_exchange import ragged_return
from tests import peers
from tests.draws import drawn
from tests.exchanges import Exchange, even_exchange, exchange_of, some_exchange
from tests.layouts import DTYPES, array, assert_close, everywhere, mesh_of, values_of
from tests.spmd.test_collectives import teams_along, together

GRIDS = [(1,), (2,), (3,), (4,), (5,), (2, 2), (2, 3), (1, 3)]


def called(arguments: Any, axis: Any, **more: Any) -> Any:
    return st.ragged_all_to_all(*arguments, axis_name=axis, **more)


def test_any_call_agrees_with_numpy(backend: str) -> None:
    @hypothesis.settings(max_examples=drawn(150, fast=25))
    @hypothesis.given(data=some.data())
    def check(data: Any) -> None:
        draw = data.draw
        grid = draw(some.sampled_from(GRIDS))
        mesh = mesh_of(grid, backend)
        axes = draw(some.permutations(mesh.axis_names))[: draw(some.integers(1, len(grid)))]
        teams, more = teams_along(grid, mesh.axis_names, axes), {}
        if draw(some.booleans()):
            indices = draw(some.permutations(range(len(teams[0]))))
            cuts = sorted(draw(some.sets(some.integers(1, len(indices)))) | {0, len(indices)})
            lists = [indices[a:b] for a, b in itertools.pairwise(cuts)]
            more = {"axis_index_groups": lists}
            teams = [[members[i] for i in group] for members in teams for group in lists]
        tail = tuple(draw(some.lists(some.integers(0, 3), max_size=2)))
        dtype, numbers = draw(some.sampled_from(DTYPES)), draw(some.sampled_from(["int32", "int64", "uint8"]))
        offers, wanted, returned = {}, {}, {}
        for members in teams:
            # Unsigned numbers cannot be negative, not even those of empty slices.
            least = 0 if numbers == "uint8" else -9

            def integer(a: int, b: int, least: int = least) -> int:
                return int(draw(some.integers(max(a, least), b)))

            exchange = exchange_of(len(members), draw(some.integers(1, 3)), tail, dtype, numbers, integer)
            back = [array(x.shape, dtype, 40 + k) for k, x in enumerate(exchange.outputs)]
            for n, k in enumerate(members):
                offers[k] = [*exchange.of(n), back[n]]
            wanted |= zip(members, exchange.answer(), strict=True)
            if dtype != "bool":
                returned |= zip(members, exchange.returned(back, exchange.operands), strict=True)
        axis = axes[0] if len(axes) == 1 and draw(some.booleans()) else tuple(axes)

        def program(offer: Any) -> Any:
            *arguments, back = offer
            result = called(arguments, axis, **more)
            if dtype == "bool":
                return [result]
            return [result, ragged_return(back, arguments[0], *arguments[2:], axis_name=axis, **more)]

        found = together(program, [offers[k] for k in range(mesh.size)], mesh)
        for k, results in enumerate(found):
            assert_close(results[0], wanted[k], True)
            if dtype != "bool":
                assert_close(results[1], returned[k], True)

    check()


@everywhere
def test_the_example_of_jax(backend: str) -> None:
    """That of the docstring of `jax.lax.ragged_all_to_all`; its CPU backend has no such collective."""
    given = [[[1, 2, 2], [3, 4, 0]], [[0] * 4] * 2, [[0, 1]] * 2, [[1, 2], [1, 1]], [[0, 0], [1, 2]], [[1, 1], [2, 1]]]
    mesh = mesh_of((2,), backend)
    arguments = [st.asarray(x, device=st.NamedSharding(mesh, st.P("x"))) for x in given]
    f = st.shard_map(
        lambda *a: called([x[0] for x in a], "x")[None], mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x")
    )
    for call in (f, st.jit(f)):
        assert values_of(call(*arguments)).tolist() == [[1, 3, 0, 0], [2, 2, 4, 0]]


@everywhere
def test_maps_of_every_kind(backend: str) -> None:
    exchange = even_exchange(4, 2)
    devices, wanted = st.devices(backend)[:4], np.array(exchange.answer())
    stacked = [np.stack(column) for column in exchange]
    mapped = st.pmap(lambda *a: called(a, "i"), axis_name="i", devices=devices)
    assert_close(values_of(mapped(*stacked)), wanted, True)
    assert_close(values_of(st.jit(mapped)(*stacked)), wanted, True)
    listed = st.pmap(lambda *a: called(a, "i"), *exchange, axis_name="i", devices=devices)
    for result, answer in zip(listed, wanted, strict=True):
        assert_close(values_of(result), answer, True)
    grid = np.array(devices, object).reshape(2, 2)

    def inner(*a: Any) -> Any:
        return st.pmap(lambda *b: called(b, ("o", "i")), *a, axis_name="i")

    nested = st.pmap(inner, *[x.reshape(2, 2, *x.shape[1:]) for x in stacked], axis_name="o", devices=grid)
    assert_close(values_of(nested).reshape(wanted.shape), wanted, True)


@everywhere
def test_maps_of_different_sizes_on_each_device(backend: str) -> None:
    """Operands and outputs of which some are empty, in lists of shards."""
    for seed in range(3):
        exchange = some_exchange(seed, 5, 2)
        made = st.pmap(lambda *a: called(a, "i"), *exchange, axis_name="i", devices=st.devices(backend)[:5])
        for result, answer in zip(made, exchange.answer(), strict=True):
            assert_close(values_of(result), answer, True)


@everywhere
@pytest.mark.parametrize("count", [1, 3])
def test_output_and_operand_stay_what_they_are(count: int, backend: str) -> None:
    """The result is a copy, and later writes to the arguments do not change it, nor one of them another."""
    exchange = even_exchange(count)

    def body(arguments: Any) -> Any:
        mine = [x * 1 for x in arguments]
        kept = [x * 1 for x in mine]
        result = called(mine, "x")
        same = [(x == y).all() for x, y in zip(mine, kept, strict=True)]
        for x in mine:
            x[...] = 7
        st.psum(1, "x")
        return [result, *same]

    found = together(body, [exchange.of(k) for k in range(count)], mesh_of((count,), backend))
    for (result, *same), answer in zip(found, exchange.answer(), strict=True):
        assert_close(result, answer, True)
        assert all(map(bool, same))


@pytest.mark.parametrize("backend", ["numpy", "checked"])
def test_results_are_read_only(backend: str) -> None:
    exchange = even_exchange(2)

    def body(arguments: Any) -> None:
        with pytest.raises(ValueError, match="read-only"):
            called(arguments, "x")[...] = 0

    together(body, [exchange.of(k) for k in range(2)], mesh_of((2,), backend))


def test_large_slices(backend: str) -> None:
    """Slices that are sent each by itself, and that are copied in blocks."""
    rng = np.random.default_rng(0)
    count, n = 3, 1 << 15
    sizes = np.array([[n, 5, 0], [0, n, n], [7, n, 1]])
    begins = np.cumsum(sizes, axis=1) - sizes
    places = np.cumsum(sizes, axis=0) - sizes
    operands = [rng.standard_normal((total, 5)) for total in sizes.sum(axis=1)]
    outputs = [np.zeros((total, 5)) for total in sizes.sum(axis=0)]
    exchange = Exchange(operands, outputs, [*begins], [*sizes], [*places], [*sizes.T])
    found = together(lambda a: called(a, "x"), [exchange.of(k) for k in range(count)], mesh_of((count,), backend))
    for result, answer in zip(found, exchange.answer(), strict=True):
        assert_close(result, answer, True)


# -- what is sent ------------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("each", [1, 2])
def test_bytes_are_those_of_the_rows_for_other_devices(each: int, backend: str) -> None:
    for count in (1, 2, 5):
        exchange = some_exchange(count, count, each, (3,), "float32")
        offers = [exchange.of(k) for k in range(count)]
        with st.transfers() as log, st.transfer_guard("disallow"):
            together(lambda a: called(a, "x"), offers, mesh_of((count,), backend))
        rows = [r for r in log if r.operator == "ragged_all_to_all"]
        assert {(r.source.id, r.destination.id): r.bytes for r in rows} == exchange.sent()
        assert len(rows) == len(exchange.sent())
        assert all(r.axis == "x" and r.explicit for r in rows)


def test_the_price_without_elements_is_an_upper_bound() -> None:
    """Each device receives as many rows as its output has, or all that the others can send."""

    def price(count: int, rows: int, room: int, each: int = 1) -> tuple[int, int]:
        mesh = st.AbstractMesh((count,), ("x",))
        given = [st.zeros((count * n, *tail), dtype=kind, device=st.NamedSharding(mesh, st.P("x")))
                 for n, tail, kind in [(rows, (2,), "float32"), (room, (2,), "float32"), *[(count * each, (), "int64")] * 4]]  # fmt: skip
        f = st.shard_map(lambda *a: called(a, "x"), mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))
        found = st.simulate(f, *given)
        assert st.eval_shape(f, *given).shape == (count * room, 2)
        return found.bytes, found.messages

    assert price(4, 100, 30) == (4 * 30 * 8, 12)
    assert price(4, 2, 30) == (4 * 6 * 8, 12)
    assert price(4, 2, 30, each=3) == (4 * 18 * 8, 12)
    assert price(1, 5, 5) == (0, 0)
    assert price(4, 0, 30) == (0, 0)
    assert price(512, 1000, 511) == (512 * 511 * 8, 512 * 511)


def test_the_price_of_blocks_of_unequal_sizes() -> None:
    """Two of four devices have a row, which each other device may get; where both may send, each has a share, rounded
    up.
    """
    mesh = st.AbstractMesh((4,), ("x",))
    f = st.shard_map(lambda *a: called(a, "x"), mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))
    shapes = [((2, 3), "float64"), ((5, 3), "float64"), *[((16,), "int64")] * 4]
    given = [st.zeros(shape, dtype=kind, device=st.NamedSharding(mesh, st.P("x"))) for shape, kind in shapes]
    assert st.simulate(f, *given).bytes == 24 * (1 + 1 + 2 + 2)
    # The gradient sends as much back; its operand is longer than what the forward pass has sent.
    back = st.simulate(lambda *a: st.grad(lambda x: f(x, *a[1:]).sum())(a[0]), *given)
    steps = [step for step in back.steps if step.operator == "ragged_all_to_all"]
    assert [(step.bytes, step.sent, step.received) for step in steps] == [
        (24 * 6, 24 * 3, 24 * 2),
        (24 * 6, 24 * 2, 24 * 3),
    ]


def test_jit_records_one_equation(backend: str) -> None:
    exchange = even_exchange(3)
    mesh = mesh_of((3,), backend)
    stacked = [st.asarray(np.concatenate(x), device=st.NamedSharding(mesh, st.P("x"))) for x in exchange]
    f = st.jit(st.shard_map(lambda *a: called(a, "x"), mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x")))
    assert f.lower(*stacked).as_text().count("ragged_all_to_all") == 1
    for turn in (0, 1):  # The second call has other offsets in the same arrays.
        given = [np.roll(column, turn, axis=0) if k < 2 else column for k, column in enumerate(exchange)]
        arguments = [st.asarray(np.concatenate(x), device=st.NamedSharding(mesh, st.P("x"))) for x in given]
        assert_close(values_of(f(*arguments)), np.concatenate(Exchange(*map(list, given)).answer()), True)
    other = even_exchange(3, seed=5)
    arguments = [st.asarray(np.concatenate(x), device=st.NamedSharding(mesh, st.P("x"))) for x in other]
    with st.transfers() as log:
        assert_close(values_of(f(*arguments)), np.concatenate(other.answer()), True)
    assert sum(r.bytes for r in log if r.operator == "ragged_all_to_all") == sum(other.sent().values())


def test_explain_shows_the_call() -> None:
    exchange = even_exchange(2)
    mesh = mesh_of((2,), "numpy")
    f = st.shard_map(lambda *a: called(a, "x"), mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))
    text = str(st.explain(f, *[np.concatenate(x) for x in exchange]))
    assert "ragged_all_to_all" in text


_OF_JAX = """
import numpy as np
import jax
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
spec = jax.sharding.PartitionSpec("x")
call = lambda *arrays: jax.lax.ragged_all_to_all(*[a[0] for a in arrays], axis_name="x")[None]
mapped = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
found = None
try:
    found = np.asarray(mapped(*given))
except jax.errors.JaxRuntimeError as error:
    assert "UNIMPLEMENTED" in str(error), error
"""


@pytest.mark.full
def test_the_results_are_those_of_jax() -> None:
    """JAX 0.12 has the collective on GPUs and TPUs only."""
    peers.require_jax()
    exchange = even_exchange(4, 2)
    found = peers.run(_OF_JAX, [np.stack(x) for x in exchange], devices=4)
    if found is None:
        pytest.skip("JAX has no ragged_all_to_all on CPUs")
    np.testing.assert_allclose(found, exchange.answer(), rtol=1e-6)


# -- what is refused ---------------------------------------------------------------------------------------------------

FITTING: dict[str, list[Any]] = {
    "operand": [np.ones((4, 2)), np.ones((3, 2))],
    "output": [np.zeros((4, 2)), np.zeros((5, 2))],
    "input_offsets": [[0, 1], [0, 2]],
    "send_sizes": [[1, 3], [2, 1]],
    "output_offsets": [[0, 0], [2, 4]],
    "recv_sizes": [[1, 2], [3, 1]],
}


@pytest.mark.parametrize(("changes", "kind", "words"), [
    ({"send_sizes": [[-1, 3], [2, 1]]}, st.CollectiveError, "send_sizes[0] of {0} is -1; wanted 0 or more"),
    ({"recv_sizes": [[1, 2], [3, -5]]}, st.CollectiveError, "recv_sizes[1] of {1} is -5; wanted 0 or more"),
    ({"send_sizes": [[1, 2], [2, 1]]}, st.CollectiveError, "send_sizes[1] of {0} is 2, and recv_sizes[0] of {1}, which receives it, is 3; wanted equal sizes"),
    ({"input_offsets": [[0, 2], [0, 2]]}, st.CollectiveError, "input_offsets[1] of {0} is 2, send_sizes[1] is 3, and operand has 4 rows; wanted slices within operand"),
    ({"input_offsets": [[0, 1], [-1, 2]]}, st.CollectiveError, "input_offsets[0] of {1} is -1, send_sizes[0] is 2"),
    ({"input_offsets": [[0, 2**63 - 1], [0, 2]]}, st.CollectiveError, "wanted slices within operand"),
    ({"output_offsets": [[0, 0], [3, 4]]}, st.CollectiveError, "output_offsets[0] of {1} is 3, send_sizes[0] is 2, and output of {0}, which receives it, has 4 rows; wanted slices within output"),
    ({"output_offsets": [[0, -2], [2, 4]]}, st.CollectiveError, "output_offsets[1] of {0} is -2"),
    ({"output_offsets": [[0, 0], [2, 2]]}, st.CollectiveError, "{1} receives rows 0 to 2 of its output from {0}, and rows 2 to 2 from {1}; wanted output_offsets of slices that do not overlap"),
    ({"input_offsets": [[0.0, 1.0], [0, 2]]}, st.ArgumentTypeError, "input_offsets of {0} has dtype float64; wanted integers"),
    ({"recv_sizes": [[1, 2], [True, False]]}, st.ArgumentTypeError, "recv_sizes of {1} has dtype bool; wanted integers"),
    ({"send_sizes": [[1, 3], [2, 1, 0]]}, st.ShapeError, "send_sizes of {1} has shape (3,); wanted one dimension, of a multiple of 2, the number of devices along axis 'x'"),
    ({"send_sizes": [[[1, 3]], [2, 1]]}, st.ShapeError, "send_sizes of {0} has shape (1, 2); wanted one dimension"),
    ({"send_sizes": [[1, 3], [2, 1, 0, 0]]}, st.ShapeError, "send_sizes of {1} has shape (4,), and input_offsets of {0} (2,); wanted equal shapes"),
    (dict.fromkeys(("input_offsets", "send_sizes", "output_offsets", "recv_sizes"), [np.zeros(0, int)] * 2), st.ShapeError, "input_offsets of {0} has shape (0,); wanted one dimension, of a multiple of 2"),
    ({"operand": [np.ones((4, 2)), np.ones((3, 1))]}, st.ShapeError, "operand of {1} has shape (3, 1), and operand of {0} (4, 2); wanted shapes that differ in the first dimension only"),
    ({"output": [np.zeros((4, 2)), np.zeros(5)]}, st.ShapeError, "output of {1} has shape (5,)"),
    ({"output": [np.zeros(()), np.zeros((5, 2))]}, st.ShapeError, "output of {0} has no dimension; wanted an array of rows"),
    ({"output": [np.zeros((4, 2)), np.zeros((5, 2), "float32")]}, st.ArgumentTypeError, "output of {1} is an array of float32, and operand of {0} one of float64; wanted one dtype"),
    ({"output": [None, None]}, st.ArgumentTypeError, "output is None; wanted an array"),
    ({"output": ["a", "b"]}, st.ArgumentTypeError, "output is a str; wanted an array"),
    ({"send_sizes": [(1, 3), (2, 1)]}, st.ArgumentTypeError, "send_sizes is a tuple; wanted an array"),
])  # fmt: skip
def test_errors(changes: dict[str, list[Any]], kind: type[Exception], words: str, backend: str) -> None:
    """All programs raise the same error."""
    mesh, messages = mesh_of((2,), backend), []

    def body(k: int) -> None:
        given = [column[k] for column in (FITTING | changes).values()]
        on_device = [st.asarray(np.asarray(x)) if isinstance(x, (np.ndarray, list)) else x for x in given]
        with pytest.raises(kind) as caught:
            called(on_device, "x")
        messages.append(str(caught.value))

    together(body, [0, 1], mesh)
    (message,) = {*messages}
    assert message.startswith("ragged_all_to_all: ")
    assert words.format(*mesh.flat) in message
    arguments = [[np.asarray(column[k]) for column in FITTING.values()] for k in range(2)]
    assert together(lambda a: called(a, "x"), arguments, mesh)[0].tolist() == [[1, 1], [0, 0], [1, 1], [1, 1]]


def test_other_errors(backend: str) -> None:
    mesh = mesh_of((3,), backend)
    exchange = even_exchange(3)
    offers = [exchange.of(k) for k in range(3)]
    for call, kind, words in [
        (lambda a: called(a, "q"), st.ShardingError, "ragged_all_to_all: no axis is called 'q' here"),
        (
            lambda a: called(a, "x", axis_index_groups=[[0], [1]]),
            st.ArgumentError,
            "every index from 0 to 2 must occur",
        ),
        (lambda a: called(a, "x") if st.axis_index("x") else a, st.CollectiveError, "returned without such a call"),
        (lambda a: called(a, "x") if st.axis_index("x") else st.psum(1, "x"), st.CollectiveError, "psum over 'x'"),
    ]:
        with pytest.raises(kind, match=None) as caught:
            together(call, offers, mesh)
        assert words in str(caught.value)
    with pytest.raises(st.ShardingError, match="ragged_all_to_all: there is no mapped function around this call"):
        called(offers[0], "x")
    with pytest.raises(st.ArgumentTypeError, match="axis_name"):
        st.ragged_all_to_all(*offers[0])


def test_programs_of_several_devices_are_refused() -> None:
    x = st.zeros((4, 2))
    with pytest.raises(st.ArgumentTypeError, match="this program has 2 devices; wanted programs of one device each"):
        st.shard_map(
            lambda x: called([x, x, *[np.zeros(2, int)] * 4], "x"), mesh=mesh_of((2, 2), "numpy"), in_specs=st.P("x"),
            out_specs=st.P("x"), axis_names={"x"},
        )(x)  # fmt: skip


# -- batches, and derivatives ------------------------------------------------------------------------------------------


def batches(seed: int, count: int, size: int, shared: bool) -> list[Exchange]:
    """Examples of one shape, with the same offsets and sizes, or others."""
    examples = [even_exchange(count, 2, seed=seed + e) for e in range(size)]
    return [Exchange(*x[:2], *examples[0][2:]) for x in examples] if shared else examples


@everywhere
@pytest.mark.parametrize("shared", [True, False])
def test_vmap_in_and_around_maps(shared: bool, backend: str) -> None:
    examples = batches(0, 3, 4, shared)
    wanted = np.stack([x.answer() for x in examples])  # (example, device, row, column)
    columns = [np.stack([np.stack(x[n]) for x in examples]) for n in range(6)]
    given = [x[0] if shared and n >= 2 else x for n, x in enumerate(columns)]
    axes = [0 if not shared or n < 2 else None for n in range(6)]
    inside = [x if axis is None else np.moveaxis(x, 0, 1) for x, axis in zip(given, axes, strict=True)]
    devices = st.devices(backend)[:3]
    mapped = st.pmap(lambda *a: called(a, "i"), axis_name="i", devices=devices)
    batched = st.pmap(st.vmap(lambda *a: called(a, "i"), in_axes=tuple(axes)), axis_name="i", devices=devices)
    for call in (lambda f: f, st.jit):
        assert_close(values_of(call(batched)(*inside)), np.moveaxis(wanted, 0, 1), True)
        assert_close(values_of(call(st.vmap(mapped, in_axes=tuple(axes)))(*given)), wanted, True)
    with st.transfers() as log:
        batched(*inside)
    (pairs,) = {len({(r.source, r.destination) for r in log if r.operator == "ragged_all_to_all"})}
    assert len([r for r in log if r.operator == "ragged_all_to_all"]) == pairs  # one exchange for all examples


@everywhere
def test_vmap_of_blocks_of_unequal_sizes_in_groups(backend: str) -> None:
    """The outputs of devices differ in size, and only some of the arguments from one example to another."""
    groups, size = [[2, 0], [1, 3]], 3
    of_group = [some_exchange(seed, 2, 2) for seed in (1, 2)]
    mesh = mesh_of((4,), backend)

    def body(k: int) -> Any:
        number, at = next((g, group.index(k)) for g, group in enumerate(groups) if k in group)
        operand, output, *numbers = of_group[number].of(at)
        of_examples = st.asarray(np.stack([operand + e for e in range(size)]))
        repeated = [st.asarray(np.stack([x] * size)) for x in numbers]

        def call(x: Any, *numbers: Any) -> Any:
            return called([x, st.asarray(output), *numbers], "x", axis_index_groups=groups)

        return [
            st.vmap(call)(of_examples, *repeated),
            st.vmap(call, in_axes=(0, None, 0, None, None))(of_examples, *[st.asarray(x) if n != 1 else repeated[1] for n, x in enumerate(numbers)]),
            st.vmap(call, in_axes=(0, *[None] * 4))(of_examples, *map(st.asarray, numbers)),
        ]  # fmt: skip

    for k, results in enumerate(together(body, [0, 1, 2, 3], mesh)):
        number, at = next((g, group.index(k)) for g, group in enumerate(groups) if k in group)
        exchange = of_group[number]
        wanted = [exchange._replace(operands=[x + e for x in exchange.operands]).answer()[at] for e in range(size)]
        for result in results:
            assert_close(result, np.stack(wanted), True)


def test_the_axis_of_vmap_is_refused() -> None:
    x, numbers = np.ones((2, 3)), np.zeros((2, 2), int)
    with pytest.raises(st.ArgumentError, match="ragged_all_to_all: 'b' is an axis of vmap; wanted axes of maps"):
        st.vmap(lambda x, n: called([x, x, n, n, n, n], "b"), axis_name="b")(x, numbers)


@everywhere
@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_gradients(jit: bool, backend: str) -> None:
    """In both directions, of the operand and of the output, also through `vmap`; twice on one backend."""
    exchange = even_exchange(3, 2, rows=4, room=10)
    operand, output, *numbers = [np.stack(x) for x in exchange]
    f = st.pmap(lambda *a: st.sin(called(a, "i")), axis_name="i", devices=st.devices(backend)[:3])
    f = st.jit(f) if jit else f
    st.testing.check_grads(lambda x, y: f(x, y, *numbers), (operand, output), 2 if backend == "checked" else 1)
    weights = np.random.default_rng(0).standard_normal((2, *output.shape))

    def loss(x: Any, y: Any, w: Any) -> Any:
        return (f(x, y, *numbers) * w).sum()

    found = st.vmap(st.grad(loss, (0, 1)), in_axes=(None, None, 0))(operand, output, weights)
    for e, w in enumerate(weights):
        for g, wanted in zip(found, st.grad(loss, (0, 1))(operand, output, w), strict=True):
            np.testing.assert_allclose(values_of(g)[e], values_of(wanted), rtol=1e-12)


def test_gradients_of_slices_that_overlap_are_added() -> None:
    """Where JAX's transpose would keep the last one. Empty slices between others have no effect on the output's."""
    devices = st.devices()[:2]
    operand, output = np.arange(8.0).reshape(2, 4), np.zeros((2, 5))
    begins, sizes = np.array([[0, 0, 1, 1], [1, 0, 0, 0]]), np.array([[2, 0, 3, 0], [2, 1, 1, 0]])
    places, expected = np.array([[0, 0, 0, 0], [2, 4, 3, 4]]), np.array([[2, 0, 2, 1], [3, 0, 1, 0]])
    weights = np.arange(1.0, 11).reshape(2, 5)

    def loss(x: Any, y: Any) -> Any:
        made = st.pmap(lambda *a: called(a, "i"), axis_name="i", devices=devices)(x, y, begins, sizes, places, expected)
        return (made * weights).sum()

    of_operand, of_output = st.grad(loss, (0, 1))(operand, output)
    assert of_operand.tolist() == [[1, 2 + 6, 7, 8], [5 + 9, 3, 4, 0]]
    assert of_output.tolist() == [[0] * 5, [0, 0, 0, 0, 10]]


def test_gradients_send_as_many_bytes_back() -> None:
    exchange = even_exchange(4)
    operand, output, *numbers = [np.stack(x) for x in exchange]
    f = st.pmap(lambda *a: called(a, "i"), axis_name="i", devices=st.devices()[:4])
    for both in (False, True):
        with st.transfers() as log, st.transfer_guard("disallow"):
            value, pull = st.vjp(*((lambda x, y: f(x, y, *numbers)), operand, output) if both else (lambda x: f(x, output, *numbers), operand))  # fmt: skip
            pull(st.ones_like(value))
        sent = sum(exchange.sent().values())
        assert sum(r.bytes for r in log if r.operator == "ragged_all_to_all") == 2 * sent
        # The offsets are needed only for the gradient of the output.
        assert sum(r.bytes for r in log if r.operator == "all_to_all") == (4 * 12 if both else 0) * 4 // 4


@everywhere
@pytest.mark.slow
def test_loops_of_programs(backend: str) -> None:
    """Each iteration sends the rows, also under jit, where the log has all of them; the gradient sends them back."""
    exchange = even_exchange(3, 2)
    operand, output, *numbers = [np.stack(x) for x in exchange]

    def program(x: Any, y: Any, *numbers: Any) -> Any:
        def step(carry: Any, _: Any) -> tuple[Any, None]:
            return st.tanh(called([x * carry[:1], carry, *numbers], "i")), None

        return st.scan(step, y, None, length=3)[0]

    def f(x: Any, y: Any) -> Any:
        return st.pmap(program, axis_name="i", devices=st.devices(backend)[:3])(x, y, *numbers)

    def loss(x: Any, y: Any) -> Any:
        return (f(x, y) ** 2).sum()

    current = exchange.outputs
    for _ in range(3):
        given = [x * y[:1] for x, y in zip(exchange.operands, current, strict=True)]
        current = list(map(np.tanh, exchange._replace(operands=given, outputs=current).answer()))
    wanted, compiled = np.stack(current), st.jit(f)
    for call in (f, compiled):
        np.testing.assert_allclose(values_of(call(operand, output)), wanted, rtol=1e-12)
        with st.transfers() as log:
            call(operand, output)
        sent = sum(r.bytes for r in log if r.operator == "ragged_all_to_all")
        assert sent == 3 * sum(exchange.sent().values())
    st.testing.check_grads(loss, (operand, output), 1)
    for g, other in zip(
        st.jit(st.grad(loss, (0, 1)))(operand, output), st.grad(loss, (0, 1))(operand, output), strict=True
    ):
        np.testing.assert_allclose(values_of(g), values_of(other), rtol=1e-12)


def test_derivatives_in_a_direction_within_programs() -> None:
    operand, output, *numbers = [np.stack(x) for x in even_exchange(3, 2)]

    def sines(*arguments: Any) -> Any:
        return st.sin(called(arguments, "i"))

    def program(x: Any, y: Any, *numbers: Any) -> Any:
        return st.jvp(lambda x, y: sines(x, y, *numbers), (x, y), (x * 2, y * 3))

    mapped = st.pmap(sines, axis_name="i", devices=st.devices()[:3])
    wanted = st.jvp(lambda x, y: mapped(x, y, *numbers), (operand, output), (operand * 2, output * 3))
    found = st.pmap(program, axis_name="i", devices=st.devices()[:3])(operand, output, *numbers)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(values_of(x), values_of(y), rtol=1e-12)
