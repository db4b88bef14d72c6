"""NumPy's products, diagonals and sums of products (einsum), against NumPy under drawn shardings."""

from __future__ import annotations

import string
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.functions.numpy import einsum as einsum_module
from shardtensor.functions.numpy import products
from tests.draws import drawn
from tests.layouts import array, assert_same, everywhere, mesh_of, meshes, placed, shapes

NUMBERS = some.sampled_from(["bool", "int8", "int64", "float32", "float64", "complex64"])


def operand(data: Any, shape: tuple[int, ...], dtype: str, backend: str, mesh: st.Mesh) -> tuple[Any, np.ndarray]:
    host = array(shape, dtype, data.draw(some.integers(0, 999)))
    return placed(data, host, backend, mesh), host


def compared(name: str, xs: list[Any], hosts: list[np.ndarray], *args: Any) -> None:
    with np.errstate(all="ignore"):
        found, wanted = getattr(st, name)(*xs, *args), getattr(np, name)(*hosts, *args)
    if not isinstance(found, st.ShardedTensor):  # Host arrays alone give a tensor, too.
        raise AssertionError(type(found))
    assert_same(found, wanted)


def products_of(data: Any, name: str, backend: str) -> None:
    mesh = data.draw(meshes(backend))
    a, b = data.draw(shapes(0, 3)), data.draw(shapes(0, 2))
    if name in ("dot", "inner") and a and b:
        at = -1 if name == "inner" or len(b) == 1 else -2
        b = (*b[: len(b) + at], a[-1], *b[len(b) + at + 1 :])
    pairs = [operand(data, shape, data.draw(NUMBERS), backend, mesh) for shape in (a, b)]
    compared(name, [x for x, _ in pairs], [host for _, host in pairs])


@everywhere
@pytest.mark.parametrize("name", ["dot", "inner", "outer", "kron"])
def test_products_match_numpy(name: str, backend: str) -> None:
    hypothesis.settings(max_examples=drawn(12))(
        hypothesis.given(some.data())(lambda data: products_of(data, name, backend))
    )()


@pytest.mark.full
@pytest.mark.parametrize("name", ["dot", "inner", "outer", "kron"])
def test_products_match_numpy_at_length(name: str, backend: str) -> None:
    hypothesis.settings(max_examples=drawn(300))(
        hypothesis.given(some.data())(lambda data: products_of(data, name, backend))
    )()


def sums_of_products(data: Any, backend: str) -> None:
    """Draws terms of up to four labels, some of them repeated or of size 1, and an ellipsis."""
    mesh, labels = data.draw(meshes(backend)), "abcdef"
    sizes = {label: data.draw(some.sampled_from([0, 1, 2, 3, 5, 8])) for label in labels}
    dots = data.draw(some.sampled_from([(), (), (2,), (3, 2)]))
    dtype, terms, xs, hosts = data.draw(some.sampled_from(["bool", "int32", "float64", "complex128"])), [], [], []
    for _ in range(data.draw(some.integers(1, 4))):
        term = data.draw(some.text(labels, max_size=4))
        # NumPy takes no diagonals of dimensions that broadcast.
        shape = [1 if term.count(n) == 1 and data.draw(some.integers(0, 5)) == 0 else sizes[n] for n in term]
        if dots and data.draw(some.booleans()):
            rest = dots[data.draw(some.integers(0, len(dots))) :]
            shape, term = [*rest, *shape], "..." + term
        x, host = operand(data, tuple(shape), dtype, backend, mesh)
        terms, xs, hosts = [*terms, term], [*xs, x], [*hosts, host]
    text = ",".join(terms)
    if data.draw(some.booleans()):
        known = sorted(set(text) - set(",."))
        kept = data.draw(some.lists(some.sampled_from(known), unique=True)) if known else []
        text += "->" + "..." * ("..." in text) + "".join(kept)
    try:
        wanted = np.einsum(text, *hosts)
    except ValueError:
        with pytest.raises(ValueError, match="einsum"):
            st.einsum(text, *xs)
        return
    found = st.einsum(text, *xs)
    assert_same(found, wanted)
    inferred = st.eval_shape(st.einsum, text, *xs)
    assert (inferred.shape, inferred.dtype, inferred.sharding) == (found.shape, found.dtype, found.sharding)


@everywhere
def test_sums_of_products_match_numpy(backend: str) -> None:
    run = hypothesis.given(some.data())(lambda data: sums_of_products(data, backend))
    hypothesis.settings(max_examples=drawn(40))(run)()


@pytest.mark.full
def test_sums_of_products_match_numpy_at_length(backend: str) -> None:
    run = hypothesis.given(some.data())(lambda data: sums_of_products(data, backend))
    hypothesis.settings(max_examples=drawn(1000))(run)()


def test_large_products_without_a_contraction_are_elementwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (products, einsum_module):
        monkeypatch.setattr(module, "SMALL", 0)
    einsum_module._program.cache_clear()
    a, b, c = array((4, 3), "float64", 1), array((5,), "float64", 2), array((3, 4, 2), "float64", 3)
    x = st.device_put(a, mesh_of((2, 2), "numpy"))
    for text, hosts in {"ij,k->ikj": (b,), "ij,jik->kij": (c,), "ij,ij->ji": (a,), "ij,j->ij": (a[0],)}.items():
        assert_same(st.einsum(text, x, *hosts), np.einsum(text, a, *hosts))
    assert_same(st.outer(x, b), np.outer(a, b))
    assert_same(st.kron(x, c), np.kron(a, c))
    einsum_module._program.cache_clear()


@everywhere
def test_einsum_keeps_operands_sharded(backend: str) -> None:
    """The sums over a split dimension are partial sums; nothing else is sent."""
    mesh = mesh_of((4,), backend)
    x = st.device_put(array((8, 6), "float64", 1), st.NamedSharding(mesh, st.P("x")))
    w, v = [st.device_put(array(s, "float64", 2), st.NamedSharding(mesh, st.P())) for s in ((6, 5), (5, 3))]
    with st.transfer_guard("disallow"):
        y = st.einsum("bi,ij,jk->kb", x, w, v)
    assert y.sharding.spec == st.P(None, "x")
    assert_same(y, np.einsum("bi,ij,jk->kb", *map(np.asarray, (x, w, v))))
    with st.transfers() as log:
        z = st.einsum("bi,bj->ij", x, x)
    assert 0 < log.bytes < 4 * 2 * 6 * 6 * 8
    assert_same(z, np.asarray(x).T @ np.asarray(x))
    z = st.device_put(np.eye(400), st.NamedSharding(mesh, st.P("x")))
    with st.transfers() as log:
        st.trace(z)
    assert log.bytes < 4 * 2 * 8 * 2
    with st.transfers() as log:
        st.diagonal(z)
    assert log.bytes <= 4 * 2 * 8 * 400


def test_other_forms_of_einsum() -> None:
    a, b = array((2, 3), "float64", 1), array((3, 4), "float64", 2)
    x, y = st.asarray(a), st.asarray(b)
    assert_same(st.einsum(x, [0, 1], y, [1, 2], [2, 0]), np.einsum(a, [0, 1], b, [1, 2], [2, 0]))
    assert_same(st.einsum(x, [0, 1], y, [1, 2]), np.einsum(a, [0, 1], b, [1, 2]))
    assert_same(st.einsum(x, [..., 1], [..., 1]), a)
    assert_same(st.einsum(" ij, jk ", x, y), a @ b)
    assert_same(
        st.einsum("ij,jk", x, y, dtype="complex64"), np.einsum("ij,jk", a, b, dtype="complex64", casting="unsafe")
    )
    for optimize in (False, True, "greedy", "optimal", ["einsum_path", (1, 2), (0, 1)]):
        found = st.einsum("ij,jk,ik->", x, y, st.ones((2, 4)), optimize=optimize)
        assert_same(found, np.einsum("ij,jk,ik->", a, b, np.ones((2, 4))))


def test_the_order_is_numpys_where_opt_einsum_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opt_einsum", None)
    einsum_module._program.cache_clear()
    hosts = [array((3, 4), "float64", 1), array((4, 5), "float64", 2), array((5, 6), "float64", 3)]
    assert_same(st.einsum("ij,jk,kl->il", *map(st.asarray, hosts)), np.linalg.multi_dot(hosts))
    einsum_module._program.cache_clear()


def test_a_sum_of_many_labels_is_contracted_from_left_to_right() -> None:
    """More dimensions than there are letters for `numpy.einsum_path`."""
    text = string.ascii_letters
    x = st.ones((1,) * 40)
    assert_same(st.einsum(f"{text[:40]},{text[30:]},a->", x, np.ones((1,) * 22), np.ones(1)), np.asarray(1.0))


ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "subscripts": (lambda x: st.einsum("i?", x), st.ArgumentError, "einsum: subscripts 'i.' are malformed"),
    "operands": (lambda x: st.einsum("ij,jk", x), st.ArgumentError, "for 2 operands, and 1 are given"),
    "dimensions": (lambda x: st.einsum("ijk", x), st.ShapeError, "2 dimensions has the subscripts 'ijk'"),
    "sizes": (lambda x: st.einsum("ij,ij", x, x.T), st.ShapeError, "'i' have sizes 2 and 3"),
    "a result": (lambda x: st.einsum("ij->k", x), st.ArgumentError, "has 'k' in the result"),
    "a label twice": (lambda x: st.einsum("ij->ii", x), st.ArgumentError, "has 'i' in the result"),
    "an ellipsis": (lambda x: st.einsum("i...->i", x), st.ArgumentError, "lacks an ellipsis"),
    "labels": (lambda x: st.einsum(x, ["a", "b"]), st.ArgumentError, "is not a list of labels"),
    "times": (lambda x: st.einsum("i->i", np.zeros(2, "m8[s]")), st.ArgumentTypeError, "dtype timedelta64"),
    "a diagonal": (lambda x: st.diagonal(x[0]), st.ShapeError, "diagonal: x has shape .3,.; wanted at least two"),
    "one axis": (lambda x: st.diagonal(x, 0, 1, -1), st.AxisError, "axis1=1 and axis2=-1 are the same dimension"),
    "an axis": (lambda x: st.trace(x, 0, 0, 2), st.AxisError, "trace: axis 2 is out of range"),
    "vectors": (lambda x: st.cross(x[:, :2], x[:, :2]), st.ShapeError, "cross: a has shape .2, 2., with size 2"),
    "bools": (lambda x: st.cross(x > 0, x > 0), st.ArgumentTypeError, "cross: does not take bool"),
    "inner sizes": (lambda x: st.inner(x, x.T), st.ShapeError, "^inner: a has shape .2, 3. and b has shape .3, 2."),
    "dot sizes": (lambda x: st.dot(x, x), st.ShapeError, "matmul: .* do not fit"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str, backend: str) -> None:
    call, kind, text = ERRORS[name]
    x = st.device_put(np.ones((2, 3)), mesh_of((2,), backend))
    with pytest.raises(kind, match=text):
        call(x)


@everywhere
def test_products_in_maps(backend: str) -> None:
    host = array((6, 3), "float64", 1)

    def f(x: Any) -> Any:
        y = st.einsum("ij,kj->ik", x, x) + st.outer(x[:, 0], x[:, 1]) + st.inner(x, x) + st.dot(x, x.T)
        return y + st.trace(y) + st.diagonal(y) + st.kron(x[:1, :1], y) + st.cross(x, x)[:, :1]

    found = st.pmap(f, st.shard(host, devices=mesh_of((2,), backend)))
    for k, part in enumerate((host[:3], host[3:])):
        y = 3 * part @ part.T + np.outer(part[:, 0], part[:, 1])
        wanted = y + np.trace(y) + np.diagonal(y) + np.kron(part[:1, :1], y)
        np.testing.assert_allclose(np.asarray(found[k]), wanted)


def test_diagonals_of_times_and_zeros() -> None:
    """Parts of other devices change neither the sign of zero nor a time."""
    for host in (
        np.full((5, 5), -0.0),
        np.arange(25).reshape(5, 5).astype("m8[s]"),
        np.full((4, 4), complex(-0.0, -0.0)),
    ):
        x = st.device_put(host, st.NamedSharding(mesh_of((3,), "numpy"), st.P(None, "x")))
        with st.transfers():  # With a log, the parts of all devices are combined.
            found = np.asarray(st.diagonal(x, 1))
        np.testing.assert_array_equal(found.view("i8"), np.diagonal(host, 1).copy().view("i8"))


def test_numpys_functions_of_tensors(backend: str) -> None:
    a, b = array((3, 3), "float64", 1), array((3, 3), "float64", 2)
    x = st.device_put(a, mesh_of((2,), backend))
    for name in ("dot", "inner", "outer", "kron", "cross"):
        assert_same(getattr(np, name)(x, b), getattr(np, name)(a, b))
    assert_same(np.diagonal(x, 1), np.diagonal(a, 1))
    assert_same(np.trace(x, dtype="float32"), np.trace(a, dtype="float32"))
    assert_same(np.einsum("ij,kj", b, x, optimize=True), np.einsum("ij,kj", b, a))
    assert_same(np.einsum(x, [0, 1], [1, 0], dtype="complex128"), a.T + 0j)
    for name, out in (("einsum", np.empty((3, 3))), ("outer", np.empty((9, 9)))):
        operands = ("ij,jk", x, b) if name == "einsum" else (x, b)
        assert getattr(np, name)(*operands, out=out) is out
        placed = st.zeros_like(st.asarray(out), device=x.sharding.mesh)
        assert getattr(np, name)(*operands, out=placed) is placed
        assert_same(placed, out)
        with pytest.raises(st.ArgumentTypeError, match=f"{name}: out is a list; wanted a tensor or a host array"):
            getattr(np, name)(*operands, out=[])


def test_einsum_keeps_what_it_made_where_it_is() -> None:
    """Of the product of the first two operands, which is as large as the third one, no part moves."""
    mesh = mesh_of((4,), "checked")
    a, b, c = [
        st.device_put(np.ones(shape), st.NamedSharding(mesh, st.P("x"))) for shape in ((64, 64), (64, 8), (8, 64))
    ]
    with st.transfers() as log:
        found = st.einsum("ij,jk,kl->il", a, b, c, optimize=True)
    assert found.sharding.spec == st.P("x")
    assert log.bytes == 3 * (b.nbytes + c.nbytes)
    np.testing.assert_array_equal(np.asarray(found), np.full((64, 64), 512.0))


def test_sums_of_products_of_any_memory_order(backend: str) -> None:
    """Products of two arrays with the same labels, of which some are added: the fastest dimension of both or not."""
    a, b = array((5, 6, 3), "float64", 1), array((5, 6, 3), "float64", 2)
    mesh = mesh_of((2,), backend)
    for spec in (st.P("x"), st.P(None, "x")):
        x, y = [st.device_put(z, st.NamedSharding(mesh, spec)) for z in (a, b)]
        for result in ("i", "j", "k", "ij", "ik", "kj", "kji"):
            assert_same(st.einsum(f"ijk,ijk->{result}", x, y), np.einsum(f"ijk,ijk->{result}", a, b))
            turned = st.einsum(f"ijk,kij->{result}", x, st.asarray(b.transpose(2, 0, 1), device=x.sharding))
            assert_same(turned, np.einsum(f"ijk,ijk->{result}", a, b))
