"""The types of arrays in maps, `pcast` and `pvary`, compared with those that JAX prints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.spmd.scheduling import mapped_program
from tests import peers
from tests.layouts import mesh_of

P = st.P
BOTH = ("x", "y")
SPECS = (P("x", "y"), P(reduced={"x"}), P(unreduced={"x", "y"}), P(unreduced={"x"}, reduced={"y"}), P())
CASTS = [(name, to) for name in "abcdeo" for to in ("varying", "unreduced", "reduced")]


def arguments(mesh: st.Mesh) -> list[st.ShardedTensor]:
    arrays = [np.ones((8, 4), np.float32), *[np.ones(4, np.float32)] * 4]
    return [st.device_put(x, st.NamedSharding(mesh, spec)) for x, spec in zip(arrays, SPECS, strict=True)]


def types_in(mapped: Any, *args: Any) -> dict[str, str]:
    """Returns what programs note in the dictionary that the mapped function gets last; all of them note the same."""
    found: list[dict[str, str]] = []
    mapped(*args, found.append)
    assert found
    assert all(one == found[0] for one in found)
    return found[0]


def body(a: Any, b: Any, c: Any, d: Any, e: Any, tell: Any) -> Any:
    o = st.psum(a, BOTH)
    named = {"a": a, "b": b, "c": c, "d": d, "e": e, "o": o}
    named |= {
        "sum of a": st.psum(a, "x"),
        "sum of c": st.psum(c, "x"),
        "all of c": st.psum(c, axis_name=BOTH),
        "most of a": st.pmax(a, "y"),
        "in a tree": st.psum({"k": (a, 1)}, "x")["k"][0],
        "broadcast": st.pbroadcast(a, "x", 0),
        "sum of what is gone": st.psum(a + o, "x"),
        "computed": a + o,
    }
    types = {name: str(st.typeof(x)) for name, x in named.items()}
    for name, to in CASTS:
        try:
            types[f"{name} to {to}"] = str(st.typeof(st.pcast(named[name], "x", to=to)))
        except st.ArgumentError:
            types[f"{name} to {to}"] = "an error"
    assert {name: str(st.typeof(x)) for name, x in named.items()}.items() <= types.items()
    tell(types)
    return a


def mapped(mesh: st.Mesh, **options: Any) -> Any:
    return st.shard_map(body, mesh=mesh, out_specs=SPECS[0], **options)


WANTED = {
    "a": "float32[4,2]{V:(x,y)}",
    "b": "float32[4]{R:x}",
    "c": "float32[4]{U:(x,y)}",
    "d": "float32[4]{U:x, R:y}",
    "e": "float32[4]",
    "o": "float32[4,2]",
    "sum of a": "float32[4,2]{V:y}",
    "sum of c": "float32[4]{U:y}",
    "all of c": "float32[4]",
    "most of a": "float32[4,2]{V:x}",
    "in a tree": "float32[4,2]{V:y}",
    "broadcast": "float32[4,2]{V:y}",
    "sum of what is gone": "float32[4,2]{V:y}",
    "computed": "float32[4,2]{V:(x,y)}",
    "b to varying": "float32[4]{V:x}",
    "e to varying": "float32[4]{V:x}",
    "o to varying": "float32[4,2]{V:x}",
    "a to unreduced": "float32[4,2]{V:y, U:x}",
    "e to reduced": "float32[4]{R:x}",
    "o to reduced": "float32[4,2]{R:x}",
}
"""The other casts of known types are errors, except that of an array that varies: `OURS`."""

OURS = {"a to varying": "float32[4,2]{V:(x,y)}", "a to reduced": "float32[4,2]{V:y, R:x}"}
"""A result of NumPy counts as one that varies, and may be equal."""


def wanted() -> dict[str, str]:
    return {f"{name} to {to}": "an error" for name, to in CASTS} | WANTED | OURS


def test_types_of_arguments_of_collectives_and_of_casts(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    assert types_in(mapped(mesh, in_specs=(*SPECS, None)), *arguments(mesh)) == wanted()
    assert types_in(mapped(mesh), *arguments(mesh)) == wanted()  # Arguments keep their own layouts.


def test_types_under_transformations(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    a, *rest = arguments(mesh)
    for transformed in (
        lambda f, tell: st.jit(lambda a: f(a, *rest, tell))(a),
        lambda f, tell: st.grad(lambda a: f(a, *rest, tell).sum())(a),
        lambda f, tell: st.vmap(lambda a: f(a, *rest, tell))(st.stack([a, a])),
        lambda f, tell: st.eval_shape(lambda a: f(a, *rest, tell), a),
    ):
        found = types_in(lambda tell, run=transformed: run(mapped(mesh, in_specs=(*SPECS, None)), tell))
        assert found == wanted()


def test_the_types_are_jaxs() -> None:
    peers.require_jax()
    found = peers.run(_JAX, (CASTS, list(WANTED)), devices=4)
    if found is None:
        pytest.skip("JAX 0.10 has other names of these types")
    ours = {name: text for name, text in wanted().items() if name not in OURS and name in found}
    assert {name: text for name, text in found.items() if name not in OURS} == ours


_JAX = """
import jax, jax.numpy as jnp
casts, names = given
P = jax.P
jax.set_mesh(jax.make_mesh((2, 2), ("x", "y")))
specs = (P("x", "y"), P(reduced={"x"}), P(unreduced={"x", "y"}), P(unreduced={"x"}, reduced={"y"}), P())
arrays = [jnp.ones((8, 4)), *[jnp.ones(4)] * 4]
found = {}

def body(a, b, c, d, e):
    o = jax.lax.psum(a, ("x", "y"))
    named = {"a": a, "b": b, "c": c, "d": d, "e": e, "o": o, "sum of a": jax.lax.psum(a, "x"),
             "sum of c": jax.lax.psum(c, "x"), "all of c": jax.lax.psum(c, axis_name=("x", "y")),
             "most of a": jax.lax.pmax(a, "y"), "in a tree": jax.lax.psum({"k": (a, 1)}, "x")["k"][0],
             "computed": a + o}
    found.update({name: str(jax.typeof(x)) for name, x in named.items()})
    for name, to in casts:
        try:
            found[f"{name} to {to}"] = str(jax.typeof(jax.lax.pcast(named[name], "x", to=to)))
        except ValueError:
            found[f"{name} to {to}"] = "an error"
    return a

if hasattr(jax.lax, "pcast") and not jax.__version__.startswith("0.10."):
    args = [jax.reshard(x, spec) for x, spec in zip(arrays, specs)]
    jax.shard_map(body, in_specs=specs, out_specs=specs[0])(*args)
else:
    found = None
"""


def test_types_are_values(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    types = []

    def body(block: Any) -> Any:
        types.append(st.typeof(st.psum(block, "x")))
        return block

    st.shard_map(body, mesh=mesh, out_specs=P("x", "y"))(arguments(mesh)[0])
    assert types == types[:1] * 4
    assert types[0].manual_axis_type.varying == {"y"}
    assert not types[0].manual_axis_type.unreduced
    assert st.typeof(np.ones(3)).manual_axis_type == st.typeof(1.0).manual_axis_type
    assert str(st.typeof(2.0)) == "float64[]"


def test_types_in_maps_inside_of_maps(backend: str) -> None:
    mesh, seen = mesh_of((2, 2), backend), []

    def outer(a: Any, w: Any) -> Any:
        total = st.psum(a, "x")

        def inner(b: Any, v: Any) -> Any:
            seen.append([str(st.typeof(x)) for x in (b, v, st.psum(b, "y"))])
            return b

        assert str(st.typeof(total)) == "float32[8,4@y]"
        return st.shard_map(inner, mesh=mesh, axis_names={"y"}, out_specs=P(None, "y"))(a, w)

    f = st.shard_map(outer, mesh=mesh, axis_names={"x"}, in_specs=(P("x"), P()), out_specs=P("x"))
    a, w = arguments(mesh)[0], st.device_put(np.ones(4, np.float32), st.NamedSharding(mesh, P()))
    f(st.concat([a, a]), w)
    assert seen == [["float32[8,2]{V:(x,y)}", "float32[4]{V:x}", "float32[8,2]{V:x}"]] * 4


def test_arrays_of_groups_and_of_maps_without_a_name_vary(backend: str) -> None:
    devices = st.devices(backend)[:4]
    seen = []

    def body(x: Any) -> Any:
        seen.append((str(st.typeof(x)), str(st.typeof(st.psum(x, "i", axis_index_groups=[[0, 1], [2, 3]])))))
        return x

    st.pmap(body, axis_name="i", devices=devices)(np.ones((4, 2)))
    st.pmap(lambda x: seen.append(str(st.typeof(x))), devices=devices)(np.ones((4, 2)))
    assert seen == [("float64[2]{V:i}", "float64[2]{V:i}")] * 4 + ["float64[2]"] * 4


def test_noted_types_do_not_keep_arrays() -> None:
    from shardtensor.spmd.scheduling.mapped_program import current

    def body(x: Any) -> Any:
        for _ in range(2000):
            y = st.psum(x, "i")
        assert str(st.typeof(y)) == "float64[2]"
        assert len(current().noted) <= 256
        return y

    st.pmap(body, axis_name="i")(np.ones((2, 2)))


def test_the_notes_of_a_chain_do_not_grow(backend: str) -> None:
    lengths = []

    def chain(x: Any) -> Any:
        program = mapped_program.current()
        for k in range(200):
            x = st.psum(x, ("x", "y", BOTH)[k % 3])
            lengths.append(max(len(entry[3]) for entry in program.noted.values()))
        return x

    st.shard_map(chain, mesh=mesh_of((2, 2), backend), in_specs=P("x", "y"), out_specs=P())(np.zeros((2, 2)))
    assert max(lengths) == 2


def test_types_do_not_depend_on_whether_operands_exist(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    seen = []

    def body(x: Any) -> Any:
        one = st.psum(st.psum(x, "x"), "y")
        named = st.psum(x, "x")
        two = st.psum(named, "y")
        del named
        other = st.psum(x=x, axis_name="x", axis_index_groups=None)
        seen.append([str(st.typeof(y)) for y in (one, two, other)])
        return x

    st.shard_map(body, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"))(np.ones((4, 4)))
    assert seen == [["float64[2,2]", "float64[2,2]", "float64[2,2]{V:y}"]] * 4


@pytest.mark.parametrize("count", [6, 7, 8, 9, 40])
def test_types_are_known_of_more_arrays_than_are_noted(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardtensor.spmd import manual_types
    from shardtensor.spmd.scheduling.mapped_program import current

    monkeypatch.setattr(manual_types, "_MOST_NOTED", 8)

    def body(x: Any) -> Any:
        kept = [st.psum(x, "i") for _ in range(count)]
        assert len(current().noted) == count  # All of them exist.
        del kept[::2]
        others = [st.psum(x, "i") for _ in range(100)]
        assert [str(st.typeof(y)) for y in kept + others] == ["float64[2]"] * (count // 2 + 100)
        del others
        for _ in range(200):
            kept = [*kept[1:], st.psum(x, "i")]
        assert len(current().noted) < 256
        return x

    st.pmap(body, axis_name="i")(np.ones((2, 2)))


def test_casts_change_no_element(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    x = st.device_put(np.arange(10.0), st.NamedSharding(mesh, P("x")))

    def body(block: Any) -> Any:
        cast = st.pvary(st.pcast({"k": (block, 2, np.float64(3))}, "x", to="varying"), ("x",))
        assert cast["k"][1] == 2
        assert cast["k"][2] == 3
        return cast["k"][0]

    with st.transfers() as log:
        y = st.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)
    assert log.bytes == 0
    assert np.asarray(y).tolist() == list(range(10))


@pytest.mark.parametrize("to", ["varying", "reduced"])
def test_gradients_in_programs(to: str, backend: str) -> None:
    """The cotangent of what is cast is the sum of those of all devices; without a cast, each has its own."""
    mesh = mesh_of((2, 2), backend)
    w, x = np.arange(1.0, 4.0), np.arange(30.0).reshape(10, 3)
    blocks = st.device_put(x, st.NamedSharding(mesh, P(BOTH)))

    def body(w: Any, block: Any) -> Any:
        cast = st.grad(lambda w: ((st.pcast(w, BOTH, to=to) * block) ** 2).sum())(w)
        one = st.grad(lambda w: ((st.pcast(w, "y", to=to) * block) ** 2).sum())(w)
        own = st.grad(lambda w: ((w * block) ** 2).sum())(w)
        return cast, one, st.expand_dims(own, axis=0)

    f = st.shard_map(body, mesh=mesh, in_specs=(P(), P(BOTH)), out_specs=(P(), P("x"), P(BOTH)))
    for call in (f, st.jit(f)):
        cast, one, own = call(w, blocks)
        np.testing.assert_allclose(np.asarray(cast), 2 * w * (x**2).sum(axis=0))
        np.testing.assert_allclose(np.asarray(own).sum(axis=0), 2 * w * (x**2).sum(axis=0))
        np.testing.assert_allclose(np.asarray(one).reshape(2, 3).sum(axis=0), 2 * w * (x**2).sum(axis=0))


def test_a_cast_to_unreduced_transfers_nothing_in_gradients(backend: str) -> None:
    mesh = mesh_of((2,), backend)

    def body(w: Any, block: Any) -> Any:
        return st.grad(lambda w: (st.pcast(w * block, "x", to="unreduced") * 3).sum())(w)

    f = st.shard_map(body, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
    w, x = [st.device_put(a, st.NamedSharding(mesh, s)) for a, s in ((np.ones(2), P()), (np.arange(4.0), P("x")))]
    with st.transfers() as log:
        g = f(w, x)
    assert np.asarray(g).tolist() == [0, 3, 6, 9]
    assert log.bytes == 0


@pytest.mark.parametrize("to", ["varying", "reduced", "unreduced"])
def test_gradients_of_maps_with_casts(to: str, backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    w, x = np.arange(1.0, 4.0), np.arange(30.0).reshape(10, 3)
    blocks = st.device_put(x, st.NamedSharding(mesh, P(BOTH)))

    def body(w: Any, block: Any) -> Any:
        product = st.pcast(w * block, BOTH, to=to) if to == "unreduced" else st.pcast(w, BOTH, to=to) * block
        return (product**2).sum(axis=0, keepdims=True)

    f = st.shard_map(body, mesh=mesh, in_specs=(P(), P(BOTH)), out_specs=P(BOTH))
    for call in (f, st.jit(f)):
        g, h = st.grad(lambda w, x, run=call: run(w, x).sum(), (0, 1))(w, blocks)
        np.testing.assert_allclose(np.asarray(g), 2 * w * (x**2).sum(axis=0))
        np.testing.assert_allclose(np.asarray(h), 2 * w**2 * x)
    batched = st.vmap(st.grad(lambda w: f(w, blocks).sum()))(np.stack([w, 2 * w]))
    np.testing.assert_allclose(np.asarray(batched), np.stack([2 * w, 4 * w]) * (x**2).sum(axis=0))


def test_errors_of_casts(backend: str) -> None:
    mesh = mesh_of((2,), backend)

    def run(body: Any) -> Any:
        return st.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(np.ones(4))

    with pytest.raises(st.ArgumentError, match=r"pcast: to is 'invarying'; wanted \"varying\", \"unreduced\" or"):
        run(lambda x: st.pcast(x, "x", to="invarying"))
    with pytest.raises(st.ArgumentError, match=r"pcast: to is 'invarying'; wanted"):
        st.vmap(lambda x: st.pcast(x, "examples", to="invarying"), axis_name="examples")(np.ones(3))
    with pytest.raises(st.ArgumentError, match=r"pcast: x is invarying along 'x', and to is 'unreduced'; wanted"):
        run(lambda x: st.pcast(st.psum(x, "x"), "x", to="unreduced"))
    with pytest.raises(st.ShardingError, match=r"pcast: no axis is called 'y' here"):
        run(lambda x: st.pcast(x, "y", to="varying"))
    with pytest.raises(st.ShardingError, match=r"pcast: there is no mapped function around this call"):
        st.pvary(np.ones(3), "x")
    with pytest.raises(TypeError, match=r"pcast: missing the argument to"):
        run(lambda x: st.pcast(x, "x"))
