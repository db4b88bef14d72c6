"""Random numbers: their bits, equal numbers on every layout and backend, keys, maps and errors.

`test_distributions` tests their distributions.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import types
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor import P
from shardtensor.functions.random import distributions, numbers_of_words, random_elements
from shardtensor.functions.random.random_elements import Elements, fill
from shardtensor.host import philox
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.testing.layouts import meshes, shapes, specs
from tests.draws import drawn
from tests.layouts import everywhere, mesh_of, values_of

KEY = st.random.key(2026)

# -- the bits --------------------------------------------------------------------------------------

VECTORS = [
    ([0] * 4, [0] * 2, [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]),
    (
        [2**64 - 1] * 4,
        [2**64 - 1] * 2,
        [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0],
    ),
    (
        [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
        [0x452821E638D01377, 0xBE5466CF34E90C6C],
        [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6],
    ),
]
"""Counter, key and block of the file kat_vectors of Random123, philox4x64 with 10 rounds."""


def whole(words: Any) -> int:
    return sum(int(word) << 64 * k for k, word in enumerate(words))


@pytest.mark.parametrize(("counter", "key", "block"), VECTORS)
def test_known_answers_of_random123(counter: Any, key: Any, block: Any) -> None:
    assert philox.words(whole(key), whole(counter), 1).tolist() == block


@pytest.mark.parametrize(("counter", "key", "block"), VECTORS[:1])
def test_known_answers_in_any_library(counter: Any, key: Any, block: Any) -> None:
    found = philox.block(np, whole(key), np.zeros(1, np.int64), 0)
    assert [int(word[0]) % 2**64 for word in found] == block


def test_both_implementations_compute_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        key, (index, draw) = whole(rng.integers(0, 2**64, 2, np.uint64)), rng.integers(0, 2**64, 2, np.uint64).tolist()
        found = np.stack(philox.block(np, key, np.array([index], np.uint64).view(np.int64), draw), axis=-1)
        np.testing.assert_array_equal(found.view(np.uint64).ravel(), philox.words(key, index | draw << 64, 1))
    long = philox.words(5, 2**64 - 3, 8)
    np.testing.assert_array_equal(long[12:], philox.words(5, 1 << 64, 5))


OTHER = types.SimpleNamespace(**vars(np))
"""A namespace of NumPy's functions that is treated like that of any other library."""


@pytest.mark.parametrize("length", [4, 8, 1000, 50_000])
def test_numbers_of_words_have_the_same_bits_in_any_library(length: int) -> None:
    words = np.random.default_rng(0).integers(-(2**63), 2**63, length)
    words[:4] = 0, -1, 2**63 - 1, -(2**63)
    for function in (
        lambda xp: numbers_of_words.positive(xp, words),
        lambda xp: numbers_of_words.fraction(xp, words),
        lambda xp: numbers_of_words.halves_of(xp, words),
        lambda xp: numbers_of_words.normal64(xp, words),
        lambda xp: numbers_of_words.below32(xp, words, 3 << 30),
        lambda xp: numbers_of_words.below64(xp, words, 3 << 62),
        lambda xp: np.stack(philox.scrambled(xp, words, words[::-1], 3)),
    ):
        np.testing.assert_array_equal(function(np), function(OTHER))
    unsigned = words.view(np.uint64).astype(np.float64)  # rounded once
    np.testing.assert_array_equal(numbers_of_words.positive(np, words), unsigned * 2.0**-64 + 2.0**-65)


def test_scrambled_words_depend_on_all_bits() -> None:
    """Each bit of a pair changes each bit of the pair after the next in half of all cases, and pairs remain different."""
    rng = np.random.default_rng(3)
    a, b = rng.integers(-(2**63), 2**63, (2, 4000))
    pairs = philox.scrambled(np, a, b, 1)
    for word, bit in itertools.product(range(2), (0, 1, 31, 32, 62, 63)):
        flip = np.array([philox.signed(1 << bit) if k == word else 0 for k in range(2)])
        once = philox.scrambled(np, a ^ flip[0], b ^ flip[1], 1)
        changed = np.stack(philox.scrambled(np, *once, 2)) ^ np.stack(philox.scrambled(np, *pairs, 2))
        for shift in range(64):
            ones = np.count_nonzero(changed >> shift & 1, axis=1)
            assert np.all(abs(ones - 2000) < 5 * math.sqrt(1000))
    few = np.arange(64)
    found = {(int(x), int(y)) for x, y in zip(*philox.scrambled(np, few.repeat(64), np.tile(few, 64), 1), strict=True)}
    assert len(found) == 64 * 64


def test_products_of_words() -> None:
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.integers(-(2**63), 2**63, 100), [0, 1, -1, 2**63 - 1, -(2**63), 2**32 - 1, 2**32]])
    for factor in (1, 3, 2**32 - 1, 2**32, 2**63, 2**64 - 1, *rng.integers(0, 2**64, 5, np.uint64).tolist()):
        high, low = philox.mulhilo(x, factor)
        products = [int(n) % 2**64 * factor for n in x]
        assert [int(h) % 2**64 << 64 | int(n) % 2**64 for h, n in zip(high, low, strict=True)] == products


def reference(dtype: str, key: st.random.Key, shape: Any) -> np.ndarray:
    """Computes the documented result of `uniform`."""
    philox = np.random.Philox(key=np.array([key.seed, key.stream], np.uint64), counter=np.full(4, 2**64 - 1, np.uint64))
    words, size = philox.random_raw(math.prod(shape)), math.prod(shape)
    if dtype == "float64":
        return ((words >> np.uint64(11)) * 2.0**-53).reshape(shape)
    bits = 24 if dtype == "float32" else 11
    halves = np.stack([words & np.uint64(2**32 - 1), words >> np.uint64(32)], axis=-1).reshape(-1)[:size]
    return ((halves >> np.uint64(32 - bits)) * 2.0**-bits).astype(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_uniform_numbers_are_the_bits_of_their_index(dtype: str) -> None:
    for shape in ((), (0,), (7,), (3, 5), (2, 40_000)):
        found = st.random.uniform(KEY, shape, dtype=dtype, device=mesh_of((3,), "numpy"))
        np.testing.assert_array_equal(np.asarray(found), reference(dtype, KEY, shape))


# -- the same numbers on every layout --------------------------------------------------------------

DRAWS: dict[str, Any] = {
    "uniform": lambda key, shape, **to: st.random.uniform(key, shape, **to),
    "uniform of float32": lambda key, shape, **to: st.random.uniform(key, shape, dtype="float32", **to),
    "uniform of float16": lambda key, shape, **to: st.random.uniform(key, shape, dtype="float16", **to),
    "normal": lambda key, shape, **to: st.random.normal(key, shape, **to),
    "normal of float32": lambda key, shape, **to: st.random.normal(key, shape, dtype="float32", **to),
    "normal of float16": lambda key, shape, **to: st.random.normal(key, shape, dtype="float16", **to),
    "exponential": lambda key, shape, **to: st.random.exponential(key, shape, **to),
    "exponential of float32": lambda key, shape, **to: st.random.exponential(key, shape, dtype="float32", **to),
    "integers": lambda key, shape, **to: st.random.integers(key, -3, 10, shape, **to),
    "integers of 32 bits, one in four rejected": lambda key, shape, **to: st.random.integers(
        key, -5, (3 << 30) - 5, shape, **to
    ),
    "integers, one in four rejected": lambda key, shape, **to: st.random.integers(key, -5, 3 << 61, shape, **to),
    "integers, all": lambda key, shape, **to: st.random.integers(key, -(2**63), 2**63, shape, **to),
    "bernoulli": lambda key, shape, **to: st.random.bernoulli(key, 0.3, shape, **to),
    "gamma": lambda key, shape, **to: st.random.gamma(key, 0.7, shape, **to),
    "poisson, few": lambda key, shape, **to: st.random.poisson(key, 2.0, shape, **to),
    "poisson, many": lambda key, shape, **to: st.random.poisson(key, 200.0, shape, **to),
    "binomial, few": lambda key, shape, **to: st.random.binomial(key, 5, 0.8, shape, **to),
    "binomial, many": lambda key, shape, **to: st.random.binomial(key, 500, 0.8, shape, **to),
    "truncated_normal": lambda key, shape, **to: st.random.truncated_normal(key, -0.5, 2.0, shape, **to),
    "choice": lambda key, shape, **to: st.random.choice(key, 77, shape, **to),
    "choice without replacement": lambda key, shape, **to: st.random.choice(key, 3000, shape, False, **to),
}  # fmt: skip

EXACT = ("uniform", "integers", "bernoulli", "choice")
"""What is the same to the bit in any library."""


def on_one_device(name: str, key: Any, shape: Any) -> np.ndarray:
    return np.asarray(DRAWS[name](key, shape, device=st.devices("numpy")[0]))


def assert_equal(found: np.ndarray, wanted: np.ndarray, name: str) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if wanted.dtype.kind != "f" or name.startswith(EXACT):
        np.testing.assert_array_equal(found, wanted)
    else:
        np.testing.assert_array_max_ulp(found, wanted, 8 if name in ("gamma", "truncated_normal") else 4)


@everywhere
@pytest.mark.parametrize("name", ["uniform", "normal of float32", "integers, one in four rejected", "gamma"])
def test_numbers_do_not_depend_on_the_library(name: str, backend: str) -> None:
    found = DRAWS[name](KEY, (7,), device=mesh_of((2,), backend))
    assert_equal(values_of(found), on_one_device(name, KEY, (7,)), name)


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_do_not_depend_on_the_layout(name: str, backend: str) -> None:
    """Rows of whole blocks, rows that begin within a block, empty shards, and replicas."""
    mesh = mesh_of((2, 2), backend)
    for shape, spec in (((2, 9), P("x", "y")), ((7,), P(("y", "x"))), ((3, 1, 5), P("x", None, None)), ((), P())):
        found = DRAWS[name](KEY, shape, device=st.NamedSharding(mesh, spec))
        assert found.sharding == st.NamedSharding(mesh, spec)
        assert_equal(values_of(found), on_one_device(name, KEY, shape), name)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("backend", ["numpy", pytest.param("checked", marks=pytest.mark.full)])
def test_numbers_of_drawn_layouts(name: str, backend: str) -> None:
    @hypothesis.settings(max_examples=8)
    @hypothesis.given(some.data(), some.integers(0, 2**64 - 1), some.integers(0, 2**64 - 1))
    def run(data: Any, seed: int, stream: int) -> None:
        key, shape, mesh = st.random.Key(seed, stream), data.draw(shapes()), data.draw(meshes(backend))
        found = DRAWS[name](key, shape, device=st.NamedSharding(mesh, data.draw(specs(mesh, len(shape)))))
        assert_equal(values_of(found), on_one_device(name, key, shape), name)

    run()


@hypothesis.settings(max_examples=drawn(50))
@hypothesis.given(some.data(), some.lists(some.integers(1, 9), max_size=4), some.sampled_from([4, 40, 1 << 22]))
def test_any_box_of_an_array_gets_its_own_numbers(data: Any, shape: list[int], most: int) -> None:
    box = [tuple(sorted(data.draw(some.tuples(some.integers(0, n), some.integers(0, n))))) for n in shape]
    everything = ShardContext.everywhere(tuple(shape), (), np.dtype(np.float64))
    part = ShardContext(tuple(box), (), tuple(shape), (), np.dtype(np.float64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_elements, "_PIECE", most)
        for count in (1, 4, 8):

            def sample(elements: Elements, count: int = count) -> Any:
                flat = elements.packed(
                    count, lambda xp, words: words.reshape(-1, 4)[:, :count].repeat(-(-count // 4), 1).reshape(-1)
                )
                return flat + elements.accepted(lambda xp, a, b: (a, b > 0))

            whole_array = fill(np, everything, 99, sample)
            np.testing.assert_array_equal(fill(np, part, 99, sample), whole_array[tuple(slice(*ends) for ends in box)])


def test_numbers_do_not_depend_on_the_number_of_threads() -> None:
    shape, before = (3, 50_001), st.num_threads()
    try:
        for name in DRAWS:
            if name == "choice without replacement":
                continue
            found = []
            for count in (1, 4):
                st.set_num_threads(count)
                found.append(on_one_device(name, KEY, shape))
            np.testing.assert_array_equal(*found)
    finally:
        st.set_num_threads(before)


def test_parameters_stay_where_they_are(backend: str) -> None:
    """The result has the layout of the parameters, and nothing is transferred."""
    mesh = mesh_of((2, 2), backend)
    a = np.linspace(0.1, 30, 35).reshape(7, 5)
    x = st.device_put(a, st.NamedSharding(mesh, P("y", "x")))
    draws = {
        "gamma": lambda p: st.random.gamma(KEY, p),
        "poisson": lambda p: st.random.poisson(KEY, p),
        "bernoulli": lambda p: st.random.bernoulli(KEY, p / 30),
        "binomial": lambda p: st.random.binomial(KEY, 40, p / 30),
        "truncated_normal": lambda p: st.random.truncated_normal(KEY, p, np.inf),
    }
    for name, draw in draws.items():
        with st.transfer_guard("disallow"):
            found = draw(x)
        assert found.sharding == x.sharding
        assert_equal(values_of(found), np.asarray(draw(a)), name)
    with st.transfer_guard("disallow"):
        drawn = st.random.categorical(KEY, x, axis=0, shape=(6, 5)[1:])
    np.testing.assert_array_equal(values_of(drawn), np.asarray(st.random.categorical(KEY, a, axis=0)))


PARAMETERS: dict[str, Any] = {
    "bernoulli": (st.random.bernoulli, 0.3),
    "gamma": (st.random.gamma, 2.5),
    "gamma, small": (st.random.gamma, 0.3),
    "poisson, few": (st.random.poisson, 2.0),
    "poisson, many": (st.random.poisson, 40.0),
    "poisson, none": (st.random.poisson, 0.0),
    "binomial, few": (st.random.binomial, 10.0, 0.3),
    "binomial, many": (st.random.binomial, 1000.0, 0.7),
    "truncated_normal": (st.random.truncated_normal, -1.0, 5.0),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_numbers_are_those_of_arrays_of_the_same_parameters(name: str, backend: str) -> None:
    draw, *parameters = PARAMETERS[name]
    for n in (0, 1, 500):
        found = draw(KEY, *parameters, (n,), device=mesh_of((3,), backend))
        arrays = [np.full(n, p) for p in parameters]
        wanted = draw(KEY, *arrays, device=mesh_of((3,), backend))
        assert_equal(values_of(found), values_of(wanted), name.partition(",")[0])


def test_large_pieces_have_the_numbers_of_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [on_one_device(name, KEY, (3, 23_000)) for name in EITHER]
    monkeypatch.setattr(random_elements, "_HOST_PIECE", 1000)
    monkeypatch.setattr(random_elements, "_HOST_PIECES", 7)
    for name, wanted in zip(EITHER, before, strict=True):
        np.testing.assert_array_equal(on_one_device(name, KEY, (3, 23_000)), wanted)


EITHER = (
    "uniform of float16",
    "normal",
    "integers",
    "integers of 32 bits, one in four rejected",
    "gamma",
    "poisson, many",
)


# -- keys ------------------------------------------------------------------------------------------


def test_keys_are_values() -> None:
    key = st.random.fold_in(KEY, 3)
    assert key == st.random.fold_in(st.random.key(2026), 3) != KEY
    assert hash(key) == hash(pickle.loads(pickle.dumps(key)))
    assert pickle.loads(pickle.dumps(key)) == copy.deepcopy(key) == eval(repr(key), {"Key": st.random.Key}) == key
    assert repr(KEY) == "Key(2026, 0)"
    with pytest.raises(AttributeError):
        key.seed = 1
    assert st.random.key(np.uint64(2**64 - 1)).seed == 2**64 - 1
    assert len({*st.random.split(KEY, 100), *(st.random.fold_in(KEY, i) for i in range(100)), KEY}) == 201
    assert st.random.split(KEY, 5)[:2] == st.random.split(KEY)
    assert st.random.split(KEY, 0) == []


def test_keys_are_derived_from_the_bits_of_their_own_counters() -> None:
    words = philox.words(2026, 1 << 192, 2).reshape(2, 4)
    assert st.random.split(KEY) == [st.random.Key(*row[:2].tolist()) for row in words]
    assert st.random.fold_in(KEY, 7) == st.random.Key(*philox.words(2026, (2 << 192) + 7, 1)[:2].tolist())


# -- inside of maps, and without elements ----------------------------------------------------------


def test_keys_in_maps(backend: str) -> None:
    devices = st.devices(backend)[:3]
    parts = st.shard(np.zeros((6, 2)), devices=devices)
    same = st.pmap(lambda x: st.random.normal(KEY, x.shape), parts)
    for part in same:
        assert_equal(values_of(part), on_one_device("normal", KEY, (2, 2)), "normal")
    keys = st.random.split(KEY, 3)
    for part, key in zip(st.pmap(lambda x, key: st.random.gamma(key, x + 0.7), parts, keys), keys, strict=True):
        assert_equal(values_of(part), on_one_device("gamma", key, (2, 2)), "gamma")
    mesh = mesh_of((3,), backend)

    def program(x: Any) -> Any:
        key = st.random.fold_in(KEY, st.axis_index("x"))
        return x + st.random.choice(key, st.random.permutation(key, 5), x.shape)

    found = st.shard_map(program, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(np.zeros(6, int))
    for i in range(3):
        key = st.random.fold_in(KEY, i)
        wanted = np.asarray(st.random.permutation(key, 5))[np.asarray(st.random.choice(key, 5, (2,)))]
        np.testing.assert_array_equal(values_of(found)[2 * i : 2 * i + 2], wanted)


@pytest.mark.parametrize("backend", ["numpy", "checked"])
def test_results_are_inferred(backend: str) -> None:
    place = st.NamedSharding(mesh_of((2, 2), backend), P("x", "y"))
    for draw in DRAWS.values():
        inferred, made = (
            st.eval_shape(lambda draw=draw: draw(KEY, (3, 5), device=place)),
            draw(KEY, (3, 5), device=place),
        )
        assert inferred == st.ShapeDtypeStruct(made.shape, made.dtype, made.sharding)
    logits = st.zeros((4, 5), device=place)
    inferred = st.eval_shape(lambda x: st.random.categorical(KEY, x, shape=(2, 4)), logits)
    made = st.random.categorical(KEY, logits, shape=(2, 4))
    assert inferred == st.ShapeDtypeStruct((2, 4), "int64", made.sharding)
    assert st.eval_shape(lambda x: st.random.choice(KEY, x, (3,)), logits).shape == (3, 5)


def test_nothing_is_sent() -> None:
    mesh = st.AbstractMesh((64,), ("x",))

    def program(x: Any) -> Any:
        key = st.random.fold_in(KEY, st.axis_index("x"))
        return x * st.random.gamma(KEY, x) + st.random.normal(key, x.shape)

    mapped = st.shard_map(program, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert st.simulate(mapped, st.ones((128, 3), device=mesh)).bytes == 0
    for draw in DRAWS.values():
        assert st.simulate(lambda draw=draw: draw(KEY, (1001,), device=mesh), mesh=mesh).bytes == 0
    assert "uniform() -> float64[3]" in str(st.explain(lambda: st.random.uniform(KEY, 3)))


def test_plans_do_not_depend_on_the_key() -> None:
    from shardtensor.interpreters.execution.plan_cache import _cached_plan

    for draw in DRAWS.values():
        draw(KEY, (3,))
    before = _cached_plan.cache_info().misses
    for key in st.random.split(KEY, 3):
        for draw in DRAWS.values():
            draw(key, (3,))
    assert _cached_plan.cache_info().misses == before


# -- arguments -------------------------------------------------------------------------------------


def test_results_are_placed_like_those_of_creation_functions() -> None:
    device = st.devices("numpy")[2]
    for name, draw in DRAWS.items():
        assert not draw(KEY, (3,)).committed
        placed = draw(KEY, (3,), device=device)
        assert placed.committed
        assert placed.device == device, name
        assert draw(KEY, 3).shape == (3,)
    x = st.ones((4, 3))
    for made in (st.random.gamma(KEY, x, device=device), st.random.choice(KEY, x, (2,), device=device)):
        assert made.device == device
    assert st.random.gamma(KEY, np.ones(3), (2, 3)).shape == (2, 3)
    assert st.random.gamma(KEY, st.ones((2, 1)), (4, 2, 3)).shape == (4, 2, 3)
    assert st.random.binomial(KEY, np.array([[3], [4]]), st.asarray([0.1, 0.2])).shape == (2, 2)
    assert st.random.gamma(KEY, np.ones(3, "float32")).dtype == "float32"
    assert st.random.gamma(KEY, np.ones(3, int)).dtype == "float64"
    assert st.random.gamma(KEY, np.ones(3), dtype="float16").dtype == "float16"
    assert st.random.uniform(KEY).shape == st.random.gamma(KEY, 2.0).shape == ()


def test_choice() -> None:
    a = np.arange(12).reshape(4, 3) * 10
    for array in (a, st.asarray(a), a.tolist()):
        picked = np.asarray(st.random.choice(KEY, 4, (2, 5)))
        np.testing.assert_array_equal(np.asarray(st.random.choice(KEY, array, (2, 5))), a[picked])
        rows = np.asarray(st.random.choice(KEY, array, 4, replace=False))
        assert sorted(rows.tolist()) == a.tolist()
    assert st.random.choice(KEY, np.zeros((0, 2)), (0,)).shape == (0, 2)
    assert st.random.choice(KEY, 0, (0,), False).shape == (0,)
    np.testing.assert_array_equal(
        np.asarray(st.random.choice(KEY, 9, (5,), False)), np.asarray(st.random.permutation(KEY, 9))[:5]
    )


def test_equal_words_keep_their_order_in_permutations(monkeypatch: Any) -> None:
    words = np.random.default_rng(0).integers(0, 5, 1000)
    monkeypatch.setattr(distributions, "fill", lambda *args, **params: words)
    found = st.random.permutation(KEY, 1000)
    np.testing.assert_array_equal(np.asarray(found), np.argsort(words, kind="stable"))


def test_elements_out_of_range() -> None:
    assert np.isnan(np.asarray(st.random.gamma(KEY, np.array([-1.0, np.nan])))).all()
    np.testing.assert_array_equal(np.asarray(st.random.gamma(KEY, np.array([0.0, np.inf]))), [0, np.inf])
    np.testing.assert_array_equal(
        np.asarray(st.random.poisson(KEY, np.array([-1.0, np.nan, 1e300, 0]))), [-1, -1, -1, 0]
    )
    trials, p = np.array([-1, 5, 5, 5, 0, 90, 90]), np.array([0.5, -0.1, np.nan, 1.1, 0.5, 0.0, 1.0])
    np.testing.assert_array_equal(np.asarray(st.random.binomial(KEY, trials, p)), [-1, -1, -1, -1, 0, 0, 90])
    low, high = np.array([1.0, 2.0, np.nan, np.inf, 3.0]), np.array([1.0, 1.0, 1.0, np.inf, np.inf])
    found = np.asarray(st.random.truncated_normal(KEY, low, high))
    np.testing.assert_array_equal(np.isnan(found), [True, True, True, True, False])
    assert not np.asarray(st.random.bernoulli(KEY, np.array([0.0, np.nan, -1.0] * 50))).any()
    assert np.asarray(st.random.bernoulli(KEY, np.ones(100))).all()
    assert np.asarray(st.random.categorical(KEY, np.array([-np.inf, 0, -np.inf]), shape=(50,))).tolist() == [1] * 50


ERRORS = [
    (lambda: st.random.uniform(7), TypeError, "uniform: key is an int; wanted a key, such as st.random.key"),
    (lambda: st.random.key(-1), ValueError, "key: seed is -1; wanted an integer from 0"),
    (lambda: st.random.key(2**64), ValueError, "key: seed is"),
    (lambda: st.random.key(1.0), TypeError, "key: seed is a float"),
    (lambda: st.random.split(KEY, -1), ValueError, "split: num is -1"),
    (lambda: st.random.fold_in(KEY, -1), ValueError, "fold_in: data is -1"),
    (lambda: st.random.uniform(KEY, (-1,)), ValueError, r"uniform: shape \(-1,\) has a negative size"),
    (lambda: st.random.normal(KEY, 2.5), TypeError, "normal: shape"),
    (lambda: st.random.normal(KEY, dtype=int), TypeError, "normal: dtype is int64; wanted float16, float32 or float64"),
    (lambda: st.random.normal(KEY, dtype="nothing"), TypeError, "normal: dtype is 'nothing'"),
    (lambda: st.random.uniform(KEY, device=3), TypeError, "uniform: 3 is an int; wanted a Device"),
    (
        lambda: st.random.uniform(KEY, (), device=st.NamedSharding(mesh_of((2,), "numpy"), P("x"))),
        ValueError,
        "uniform: ",
    ),
    (lambda: st.random.integers(KEY, 3, 3), ValueError, "integers: low is 3 and high 3"),
    (lambda: st.random.integers(KEY, 0, 2**63 + 1), ValueError, "integers: low is 0"),
    (lambda: st.random.integers(KEY, 0.0, 2), TypeError, "integers: low is a float; wanted an integer"),
    (lambda: st.random.permutation(KEY, -1), ValueError, "permutation: n is -1"),
    (lambda: st.random.choice(KEY, 0, (1,)), ValueError, "choice: a has 0 elements, and 1 are to be drawn with repl"),
    (lambda: st.random.choice(KEY, 3, (2, 2), False), ValueError, "choice: a has 3 elements, and 4 are .* without"),
    (lambda: st.random.choice(KEY, 2.5), TypeError, "choice: a is a float; wanted an array or an integer"),
    (lambda: st.random.bernoulli(KEY, 1.5), ValueError, "bernoulli: p is 1.5; wanted a probability from 0 to 1"),
    (lambda: st.random.bernoulli(KEY, [0.5]), TypeError, "bernoulli: p is a list"),
    (lambda: st.random.gamma(KEY, -1), ValueError, "gamma: a is -1; wanted a number of at least 0"),
    (lambda: st.random.gamma(KEY, np.float32("nan")), ValueError, "gamma: a is nan"),
    (lambda: st.random.gamma(KEY, 1j), TypeError, "gamma: a is a complex"),
    (
        lambda: st.random.gamma(KEY, np.ones(3), (2,)),
        ValueError,
        r"gamma: parameters of shapes \(3,\) do not broadcast",
    ),
    (lambda: st.random.gamma(KEY, np.ones((2, 3)), (3,)), ValueError, r"do not broadcast to \(3,\)"),
    (lambda: st.random.poisson(KEY, -0.5), ValueError, "poisson: lam is -0.5; wanted a number from 0"),
    (lambda: st.random.binomial(KEY, 2.5, 0.5), ValueError, "binomial: n is 2.5; wanted an integer"),
    (lambda: st.random.binomial(KEY, np.ones(2), np.ones(3)), ValueError, "binomial: parameters of shapes"),
    (lambda: st.random.truncated_normal(KEY, 1, 1), ValueError, "truncated_normal: lower is 1 and upper 1"),
    (lambda: st.random.categorical(KEY, 1.0), ValueError, "categorical: logits"),
    (lambda: st.random.categorical(KEY, np.ones(3), axis=1), IndexError, "categorical: axis 1 is out of range"),
    (lambda: st.random.categorical(KEY, np.ones((3, 0))), ValueError, "categorical: logits has shape"),
    (lambda: st.random.categorical(KEY, np.ones((3, 2)), shape=(2,)), ValueError, "categorical: shape is"),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS, ids=[message for *_, message in ERRORS])
def test_errors(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        call()
    assert isinstance(caught.value, st.ShardTensorError)
