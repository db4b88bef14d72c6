"""Views: operations return views and copies as in NumPy, and writes are visible in both directions.

Views are lazy, hold only their base, and have the layout of the same operator's result.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.backend import HOST, Backend
from shardtensor.backend.registry import load
from shardtensor.core import OPS, bind
from shardtensor.interpreters.execution.plan_cache import run
from shardtensor.sharding.index import canonical
from tests.draws import drawn
from tests.layouts import (
    MESHES,
    USABLE,
    all_specs,
    allocated,
    array,
    assert_same,
    everywhere,
    in_use,
    mesh_of,
    put,
    shapes,
    specs,
    strided,
    values_of,
)

Look = Callable[[Any, Any], Any]


def attempt(function: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """Returns the result of a call, or the error that it raises."""
    try:
        return function(*args), None
    except Exception as error:
        return None, error


def kinds(error: Exception) -> set[type[Exception]]:
    """Returns the builtin classes of an error."""
    return {k for k in (ValueError, IndexError, TypeError, StopIteration) if isinstance(error, k)}


# -- which are views -------------------------------------------------------------------------------

LOOKS: dict[str, Look] = {
    "x[1:]": lambda xp, x: x[1:],
    "x[::-2]": lambda xp, x: x[::-2],
    "x[...]": lambda xp, x: x[...],
    "x[()]": lambda xp, x: x[()],
    "x[:]": lambda xp, x: x[:],
    "x[0]": lambda xp, x: x[0],
    "x[-1, ...]": lambda xp, x: x[-1, ...],
    "x[..., 0]": lambda xp, x: x[..., 0],
    "x[:, 1]": lambda xp, x: x[:, 1],
    "x[0, 0]": lambda xp, x: x[0, 0],
    "x[0, 0, ...]": lambda xp, x: x[0, 0, ...],
    "x[0, 0, 0]": lambda xp, x: x[0, 0, 0],
    "x[None]": lambda xp, x: x[None],
    "x[None, 0]": lambda xp, x: x[None, 0],
    "x[..., None]": lambda xp, x: x[..., None],
    "x[np.int64(0)]": lambda xp, x: x[np.int64(0)],
    "x[np.array(0)]": lambda xp, x: x[np.array(0)],
    "x[[0]]": lambda xp, x: x[[0]],
    "x[[0], :1]": lambda xp, x: x[[0], :1],
    "x[x == x]": lambda xp, x: x[x == x],
    "x[True]": lambda xp, x: x[True],
    "x.T": lambda xp, x: x.T,
    "x.mT": lambda xp, x: x.mT,
    "x.transpose()": lambda xp, x: x.transpose(),
    "x.transpose(1, 0)": lambda xp, x: x.transpose(1, 0),
    "x.transpose((1, 0))": lambda xp, x: x.transpose((1, 0)),
    "x.swapaxes(0, -1)": lambda xp, x: x.swapaxes(0, -1),
    "permute_dims": lambda xp, x: xp.permute_dims(x, tuple(range(x.ndim))[::-1]),
    "moveaxis": lambda xp, x: xp.moveaxis(x, 0, -1),
    "matrix_transpose": lambda xp, x: xp.matrix_transpose(x),
    "x.ravel()": lambda xp, x: x.ravel(),
    "x.flatten()": lambda xp, x: x.flatten(),
    "x.reshape(-1)": lambda xp, x: x.reshape(-1),
    "x.reshape(x.shape)": lambda xp, x: x.reshape(x.shape),
    "x.reshape(2, -1)": lambda xp, x: x.reshape(2, -1),
    "x.reshape(-1, 2, 1)": lambda xp, x: x.reshape(-1, 2, 1),
    "x.reshape(1, ...)": lambda xp, x: x.reshape(1, *x.shape, 1),
    "reshape(copy=True)": lambda xp, x: xp.reshape(x, (-1,), copy=True),
    "reshape(copy=False)": lambda xp, x: xp.reshape(x, (-1,), copy=False),
    "x.reshape(copy=False)": lambda xp, x: x.reshape(2, -1, copy=False),
    "x.squeeze()": lambda xp, x: x.squeeze(),
    "x.squeeze(-1)": lambda xp, x: x.squeeze(-1) if x.ndim else x,
    "squeeze": lambda xp, x: xp.squeeze(x),
    "expand_dims": lambda xp, x: xp.expand_dims(x, axis=0),
    "expand_dims(axis=(0, -1))": lambda xp, x: xp.expand_dims(x, axis=(0, -1)),
    "flip": lambda xp, x: xp.flip(x),
    "flip(axis=0)": lambda xp, x: xp.flip(x, axis=0),
    "x.real": lambda xp, x: x.real,
    "x.imag": lambda xp, x: x.imag if x.dtype.kind == "c" else x,
    "real": lambda xp, x: xp.real(x),
    "unstack": lambda xp, x: xp.unstack(x)[0],
    "unstack(axis=-1)": lambda xp, x: xp.unstack(x, axis=-1)[0],
    "next(iter(x))": lambda xp, x: next(iter(x)),
    "list(x)[-1]": lambda xp, x: list(x)[-1],
    "x.astype(same)": lambda xp, x: x.astype(x.dtype),
    "x.astype(same, copy=False)": lambda xp, x: x.astype(x.dtype, copy=False),
    "x.astype(other, copy=False)": lambda xp, x: x.astype("complex64", copy=False),
    "x.copy()": lambda xp, x: x.copy(),
    "asarray": lambda xp, x: xp.asarray(x),
    "+x": lambda xp, x: +x,
    "roll": lambda xp, x: xp.roll(x, 0),
    "x.clip": lambda xp, x: x.clip(-100, 100),
    "x.round()": lambda xp, x: x.round(),
    "concat": lambda xp, x: xp.concat([x]),
    "where": lambda xp, x: xp.where(True, x, x),
    "np.reshape": lambda xp, x: np.reshape(x, -1),
    "np.squeeze": lambda xp, x: np.squeeze(x),
    "np.expand_dims": lambda xp, x: np.expand_dims(x, 0),
    "np.moveaxis": lambda xp, x: np.moveaxis(x, 0, -1),
    "np.swapaxes": lambda xp, x: np.swapaxes(x, 0, -1),
    "np.transpose": lambda xp, x: np.transpose(x),
    "np.transpose(x, axes)": lambda xp, x: np.transpose(x, (1, 0)),
    "np.ravel": lambda xp, x: np.ravel(x),
    "np.real": lambda xp, x: np.real(x),
    "np.copy": lambda xp, x: np.copy(x),
    "np.flip": lambda xp, x: np.flip(x),
}  # fmt: skip

if not hasattr(np, "unstack"):  # before NumPy 2.1
    for name in [name for name in LOOKS if "unstack" in name or "copy=" in name]:
        del LOOKS[name]

BASES: dict[str, Callable[[], np.ndarray]] = {
    "two dimensions": lambda: np.arange(24.0).reshape(6, 4),
    "three dimensions": lambda: np.arange(24.0).reshape(2, 3, 4),
    "a row": lambda: np.arange(7.0),
    "no dimensions": lambda: np.array(3.0),
    "size 1": lambda: np.array([[4.0]]),
    "a column": lambda: np.arange(5.0).reshape(5, 1),
    "complex": lambda: np.arange(12.0).reshape(4, 3) + 1j,
    "nothing": lambda: np.zeros((0, 3)),
}

FIRST: dict[str, Callable[[Any], Any]] = {
    "x": lambda x: x,
    "x.T": lambda x: x.T,
    "x[::-1]": lambda x: x[::-1],
    "x[1:]": lambda x: x[1:],
    "x[::2]": lambda x: x[::2],
    "x[..., :2]": lambda x: x[..., :2],
    "x[None]": lambda x: x[None],
    "x[0, ...]": lambda x: x[0, ...],
    "x.real": lambda x: x.real,
    "x.reshape(-1)": lambda x: x.reshape(-1),
    "x.reshape(2, -1).T": lambda x: x.reshape(2, -1).T,
}


@pytest.mark.parametrize("look", LOOKS)
def test_views_and_copies_are_numpys(look: str, backend: str) -> None:
    """Of new arrays and of views of them: later writes are visible in the same results as in NumPy, writes to results
    reach the same bases, copies stay as they are, and the same calls raise errors.
    """
    cases = itertools.product(BASES.items(), FIRST.items())
    for (name, base), (before, first) in strided(cases, 3, list(LOOKS).index(look) + (backend == "numpy")):
        where = f"{look} of {before}, {name}"
        a = base()
        if (view := attempt(first, a)[0]) is None:
            continue
        wanted, refused = attempt(LOOKS[look], np, view)
        x = put(a, backend, (2, 2))
        found, error = attempt(LOOKS[look], st, first(x))
        assert (error is None) == (refused is None), (where, error, refused)
        if refused is not None:
            assert kinds(error) & kinds(refused), (where, error, refused)
            continue
        assert_same(found, wanted, exact=True)
        a[...] = x[...] = -7
        np.testing.assert_array_equal(np.asarray(found), wanted, where)
        if isinstance(wanted, np.ndarray):
            wanted[...] = found[...] = 5
            np.testing.assert_array_equal(np.asarray(x), a, where)
            np.testing.assert_array_equal(np.asarray(found), wanted, where)


def test_imaginary_parts_of_real_numbers_are_zeros_of_their_own(backend: str) -> None:
    x = put(np.arange(6.0), backend, (2, 2))
    zeros = x.imag
    assert_same(zeros, np.zeros(6), exact=True)
    x += 1
    assert_same(zeros, np.zeros(6), exact=True)
    with pytest.raises(TypeError):
        x.imag = 1
    assert_same(x, np.arange(1.0, 7))


@everywhere
def test_what_is_broadcast_is_a_value_of_its_own(backend: str) -> None:
    x = put(np.arange(3.0), backend, (2, 2))
    for shape in ((3,), (2, 3)):
        wide = st.broadcast_to(x, shape)
        before = np.array(wide)
        x += 1
        np.testing.assert_array_equal(np.asarray(wide), before)
        wide[..., 0] = 9
        before[..., 0] = 9
        np.testing.assert_array_equal(np.asarray(wide), before)
        assert 9 not in np.asarray(x)


@everywhere
def test_results_of_operators_have_views_like_any_other(backend: str) -> None:
    """A root tensor counts as row-major, whatever the memory order of its elements."""
    value = np.arange(24.0).reshape(4, 6)
    x = put(value, backend, (2, 2))
    roots = {
        "a sum of transposes": x.T + x.T,
        "a copy of a transpose": x.T.copy(),
        "pieces of a map": st.unshard(
            st.pmap(lambda p: load(backend).contiguous((p + 0).T).T, st.shard(value, devices=x.device))
        ),
        "a column-major host array": st.device_put(np.asfortranarray(value), x.sharding),
        "one that is shared": st.device_put(np.asfortranarray(value), x.sharding, may_alias=True),
        "a product": x @ x.T,
        "an outer product": st.tensordot(x[0], x[:, 0], axes=0),
        "a reversed copy": st.reshard(x[::-1], x.sharding).copy(),
    }
    for name, root in roots.items():
        twin = np.array(root, order="C")
        for view, wanted in ((root.reshape(-1), twin.reshape(-1)), (root.reshape(-1, 2)[1:], twin.reshape(-1, 2)[1:])):
            view += 1
            wanted += 1
            view[::2] = 7
            wanted[::2] = 7
            np.testing.assert_array_equal(np.asarray(root), twin, name)
        with pytest.raises(ValueError, match="copy"):
            root.T.reshape(-1, copy=False)


# -- any chain of them -----------------------------------------------------------------------------


def some_look(data: Any, x: np.ndarray) -> tuple[str, Callable[[Any], Any]]:
    """Draws one more view of an array, for which NumPy may raise an error or copy."""
    kind = data.draw(
        some.sampled_from(["slices", "slices", "reshape", "reshape", "axes", "flip", "one", "new", "part"])
    )
    if kind == "slices":
        bounds = some.one_of(some.none(), some.integers(-6, 6))
        index = tuple(
            slice(data.draw(bounds), data.draw(bounds), data.draw(some.sampled_from([None, 1, 2, -1, -3])))
            for _ in x.shape
        )
        return f"{index}", lambda a: a[(*index, ...)]
    if kind == "reshape":
        shape, left = [], x.size
        while left > 1 and len(shape) < 3:
            shape.append(data.draw(some.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
            left //= shape[-1]
        return f"reshape{(*shape, left)}", lambda a: a.reshape(*shape, left)
    if kind == "axes":
        axes = tuple(data.draw(some.permutations(range(x.ndim))))
        return f"transpose{axes}", lambda a: a.transpose(axes) if axes else a
    if kind == "flip" and x.ndim:
        axis = data.draw(some.integers(0, x.ndim - 1))
        return f"flip({axis})", lambda a: (np if isinstance(a, np.ndarray) else st).flip(a, axis=axis)
    if kind == "one" and x.size and x.ndim:
        at = data.draw(some.integers(0, x.ndim - 1))
        index = (*[slice(None)] * at, data.draw(some.integers(-x.shape[at], x.shape[at] - 1)), ...)
        return f"{index}", lambda a: a[index]
    if kind == "part":
        return "real", lambda a: a.real
    return "[None]", lambda a: a[None]


def chains(examples: int, length: int) -> None:
    """Runs random chains of views over random shardings. Checks which step copies, that writes are visible at both
    ends, and the shard of each device.
    """

    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(data=some.data())
    def check(data: Any) -> None:
        a = np.array(
            array(data.draw(shapes(0, 3)), data.draw(some.sampled_from(["int64", "float32", "complex128"])), 3)
        )
        backend = data.draw(some.sampled_from(["numpy", "checked", *USABLE]))
        mesh = mesh_of(data.draw(some.sampled_from(MESHES)), backend)
        x = st.device_put(a, st.NamedSharding(mesh, data.draw(specs(mesh, a.ndim))))
        mine, his = x, a
        for _ in range(data.draw(some.integers(1, length))):
            name, look = some_look(data, his)
            if his.ndim > 5:
                break
            hypothesis.note(name)
            new = look(his)
            if not np.shares_memory(new, his):
                copied = look(mine)
                np.testing.assert_array_equal(np.asarray(copied), new)
                if new.size:
                    copied[...] = 99
                    np.testing.assert_array_equal(np.asarray(mine), his)
                break
            mine, his = look(mine), new
        if data.draw(some.booleans()):
            assert_same(mine, his, exact=True)
        x += 1
        a += 1
        assert_same(mine, his, exact=True)
        values = array(his.shape, str(his.dtype), 8)
        mine[...] = values
        his[...] = values
        assert_same(x, a, exact=True)
        mine *= 2
        his *= 2
        assert_same(x, a, exact=True)
        assert_same(mine, his, exact=True)

    check()


@pytest.mark.slow
def test_chains() -> None:
    chains(drawn(250, fast=60), 4)


@pytest.mark.full
def test_long_chains() -> None:
    chains(8000, 6)


def test_views_of_views_see_the_same_base(backend: str) -> None:
    a = np.arange(48.0).reshape(8, 6)
    x = put(a, backend, (2, 2))
    rows, wanted = x[1:7], a[1:7]
    inner, inside = rows.T[::2].reshape(3, 3, 2)[:, 1], wanted.T[::2].reshape(3, 3, 2)[:, 1]
    assert np.shares_memory(inside, a)
    inner += 100
    inside += 100
    turned, around = st.moveaxis(rows, 0, 1)[::-1, 2:4], np.moveaxis(wanted, 0, 1)[::-1, 2:4]
    turned *= -1
    around *= -1
    assert_same(x, a, exact=True)
    assert_same(rows, wanted, exact=True)
    rows[0] = 0
    wanted[0] = 0
    assert_same(turned, around, exact=True)
    x[...] = 3
    for view in (rows, inner, turned):
        assert_same(view, np.full(view.shape, 3.0), exact=True)


def test_equal_indices_of_other_types_are_told_apart(backend: str) -> None:
    data = np.arange(12.0).reshape(2, 6)
    x = put(data, backend, (2, 2))
    indices = [1, True, 0, False, (1,), (True,), slice(1), slice(True), slice(None, 1.0), (0, ...), [1], 1.0, None, 70]
    for index in 2 * indices:  # What a view is, is kept from the first time on.
        try:
            expected = data[index]
        except (IndexError, TypeError) as error:
            with pytest.raises(type(error)):
                x[index]
        else:
            assert_same(x[index], expected)
    assert_same(x.transpose(1, 0), data.T)
    with pytest.raises(TypeError):
        x.transpose(1.0, 0.0)


def test_rows_and_elements_of_a_loop(backend: str) -> None:
    """A row of a matrix is a view; an element of a row is a number, as in NumPy."""
    a = np.arange(12.0).reshape(4, 3)
    x = put(a, backend, (2, 2))
    for row, wanted in zip(x, a, strict=True):
        row += 1
        wanted += 1
        row[0] = -1
        wanted[0] = -1
        for element in row:
            element += 100
    assert_same(x, a, exact=True)
    for column, wanted in zip(st.unstack(x, axis=1), a.T, strict=True):
        column /= 2
        wanted /= 2
    assert_same(x, a, exact=True)


def test_parts_of_complex_numbers_are_written(backend: str) -> None:
    a = np.arange(6.0).reshape(2, 3) * (1 + 2j)
    x = put(a, backend, (2, 2))
    for t in (x, a):
        t.real += 1
        t.imag[1] *= 3
        t.imag = -t.imag
        t.T.real[0] = 7
        t[0].imag[::2] = t[1].real[::2]
        t.real[t.imag > 2] = 0
    assert_same(x, a, exact=True)
    assert x.real.dtype == np.float64
    y = put(np.arange(3.0), backend, (2, 2))
    y.real = 4
    y.real[1] += 1
    assert_same(y, np.array([4.0, 5, 4]), exact=True)


# -- lazy ------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the calls of the checked backend."""
    checked, made = load("checked"), []
    for name in ("on", "to_device", "from_host", "to_host", "record", "contiguous", "asarray"):
        real = getattr(type(checked), name)

        def spy(self: Backend, *args: Any, real: Any = real, name: str = name) -> Any:
            made.append(name)
            return real(self, *args)

        monkeypatch.setattr(type(checked), name, spy)
    return made


MOVING: dict[str, Callable[[Any], Any]] = {
    "x[1:]": lambda x: x[1:],
    "x[::-1]": lambda x: x[::-1],
    "x[3]": lambda x: x[3],
    "x[3, ...]": lambda x: x[3, ...],
    "x[:, 2]": lambda x: x[:, 2],
    "x.T[1:, 3:9]": lambda x: x.T[1:, 3:9],
    "x.reshape(6, 12)": lambda x: x.reshape(6, 12),
    "x.reshape(-1)[5:]": lambda x: x.reshape(-1)[5:],
    "flip": lambda x: st.flip(x),
    "x[None, ::2].squeeze()": lambda x: x[None, ::2].squeeze(),
    "x.real.mT": lambda x: x.real.mT,
    "unstack": lambda x: st.unstack(x)[11],
    "expand_dims": lambda x: st.expand_dims(x, axis=1)[2:],
    "moveaxis": lambda x: st.moveaxis(x, 0, 1)[0],
}


@pytest.mark.parametrize("look", MOVING)
def test_building_a_view_moves_and_computes_nothing(look: str, backend: str, calls: list[str]) -> None:
    x = put(np.arange(72.0).reshape(12, 6), backend, (4,))
    calls.clear()
    with st.transfer_guard("disallow"), st.transfers() as log:
        view = MOVING[look](x)
        assert (view.shape, view.dtype, view.device, view.size) == (view.shape, x.dtype, x.device, view.size)
        assert view.sharding.mesh == x.sharding.mesh
        assert view.committed
        assert not view.is_donated
    assert len(log) == 0
    assert not calls


@pytest.mark.parametrize("look", [name for name in MOVING if name != "x[3]"])
def test_reading_moves_once_for_each_value_of_the_base(look: str, backend: str) -> None:
    """The first read moves as many bytes as the operator by value, and later reads none until the base is written."""
    a = np.arange(72.0).reshape(12, 6)
    x = put(a, backend, (4,))
    other = put(a, backend, (4,))
    view = MOVING[look](x)
    with st.transfers() as log:
        read = view + 0
    first = log.bytes
    assert_same(read, np.asarray(view), exact=True)
    with st.transfers() as log:
        view + 1
        view * 2
        st.sum(view, axis=0)
        view.addressable_shards
        other += 1
    assert not sum(r.bytes for r in log if r.operator != "sum")
    x[0, 0] = 99
    with st.transfers() as log:
        view + 1
    assert log.bytes == first
    with st.transfers() as log:
        view + 1
    assert log.bytes == 0
    if first:
        x += 1
        with st.transfer_guard("disallow"), pytest.raises(st.TransferError):
            view + 1


def test_how_much_a_view_moves(backend: str) -> None:
    """Rows at the boundaries move, and none where the view's layout is that of the base."""
    x = put(np.arange(72.0).reshape(12, 6), backend, (4,))
    wanted = {
        "rows": (x[1:], 3 * 48),
        "columns": (x[:, 2:4], 0),
        "a transpose": (x.T, 0),
        "rows of a transpose": (x.T[1:], 0),
        "rows that are whole": (x.reshape(4, 3, 6), 0),
        "a reverse": (x[::-1], 12 * 48),
        "another shape": (x.reshape(8, 9), 0),
        "a row": (x[4, ...], 3 * 48),
        "nothing": (x[5:5], 0),
    }
    for name, (view, nbytes) in wanted.items():
        with st.transfers() as log:
            view + 0
        assert log.bytes == nbytes, name


READS: dict[str, Callable[[Any], Any]] = {
    "np.asarray": np.asarray,
    "np.array": np.array,
    "tolist": lambda v: v.tolist(),
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("read", READS)
def test_host_reads_go_straight_to_the_owners(read: str, backend: str) -> None:
    """Each element is copied once, from a device that holds it to the host."""
    x = put(np.arange(72.0).reshape(12, 6), backend, (4,))
    for name, look in MOVING.items():
        view = look(x)
        if "reshape" not in name:
            with st.transfers() as log, st.transfer_guard("disallow"):
                READS[read](view)
            assert log.bytes == view.nbytes, name
            assert {r.destination for r in log} == {HOST}, name


@pytest.mark.parametrize("read", READS)
def test_host_reads_through_another_shape_go_straight_to_the_owners(read: str, backend: str) -> None:
    """This includes views whose rows are not aligned with the boundaries between devices."""
    x = put(np.arange(72.0).reshape(12, 6), backend, (4,))
    for view in (x.reshape(6, 12), x.reshape(-1)[5:], x.T.reshape(2, 3, 12)[0], x.reshape(8, 9)[2:, ::-1]):
        with st.transfers() as log, st.transfer_guard("disallow"):
            READS[read](view)
        assert log.bytes == view.nbytes
        assert {r.destination for r in log} == {HOST}


def test_an_element_is_read_from_the_device_that_has_it(backend: str) -> None:
    a = np.arange(72.0).reshape(12, 6)
    x = put(a, backend, (4,))
    owner = x.sharding.mesh.flat[2]
    looks = (
        lambda t: t[7, 3],
        lambda t: t[7, 3, ...],
        lambda t: t.T[3][7],
        lambda t: t[::-1][4, 3],
        lambda t: t[1:].reshape(11, 3, 2)[6][1, 1],
    )
    for look in looks:
        for read in (float, lambda t: t.item(), lambda t: int(np.asarray(t)), lambda t: float(str(t))):
            with st.transfers() as log, st.transfer_guard("disallow"):
                assert read(look(x)) == look(a)
            assert [(r.bytes, r.source, r.destination) for r in log] == [(8, owner, HOST)]


def test_views_of_elements(backend: str) -> None:
    """An element that was read is a number, and every view of it has that number."""
    a = np.arange(6.0)
    x = put(a, backend, (3,))
    for look in (
        lambda t: t[...], lambda t: t.T, lambda t: t.real, lambda t: t.reshape(()), lambda t: t.reshape(1), lambda t: t[None],
        lambda t: t.squeeze(), lambda t: t[()], lambda t: t.ravel(), lambda t: t.copy(), lambda t: t.reshape(1, 1).T[0],
    ):  # fmt: skip
        element = x[4]
        seen = look(element)
        assert_same(seen, look(a[4]), exact=True)
        x += 1
        assert_same(seen, look(a[4]), exact=True)
        assert_same(seen + 1, look(a[4]) + 1, exact=True)
        x -= 1
        assert repr(seen) == repr(seen.copy())


def test_a_view_of_shared_memory_copies_nothing() -> None:
    x = st.zeros((1000, 1000), device=mesh_of((4,), "numpy"))
    tracemalloc.start()
    views = [x[1:], x.T, x.reshape(-1)[5:], x[::-1, ::2], st.flip(x), x.reshape(100, 10, 1000).mT]
    for view in views:
        assert np.shares_memory(np.asarray(view), np.asarray(x))
        assert view.addressable_shards[1].data.size
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


# -- what they hold --------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [False, True])
def test_a_base_lives_as_long_as_its_views(read: bool, backend: str) -> None:
    a = np.arange(12.0).reshape(4, 3)
    x = put(a, backend, (2, 2))
    base, first, second = weakref.ref(x), x[1:], x.T[0][1:]
    del x
    if read:
        assert_same(first + 0, a[1:])
        assert_same(second + 0, a[1:, 0])
    del first
    assert base() is not None
    second += 1
    assert_same(base(), np.where((np.arange(4) > 0)[:, None] & (np.arange(3) == 0), a + 1, a))
    view = weakref.ref(second)
    del second
    assert view() is None
    assert base() is None


@pytest.mark.parametrize("order", ["base first", "view first"])
def test_dropping_both_frees_the_memory(order: str, backend: str) -> None:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(2):  # plans and caches are made in the first round
            start = in_use(backend)
            x = st.zeros((500_000,), device=mesh_of((4,), backend))
            view = x[1:][::2]
            view + 1
            x += 1
            view + 1
            used = [in_use(backend) - start]
            if order == "base first":
                del x
                used.append(in_use(backend) - start)
                del view
            else:
                del view
                used.append(in_use(backend) - start)
                del x
            used.append(in_use(backend) - start)
        both, one, none = used
        assert both > 4_000_000
        assert one > 4_000_000 if order == "base first" else 5_000_000 > one > 3_900_000
        assert none < 100_000
    finally:
        tracemalloc.stop()
        gc.enable()


def test_views_that_come_and_go_leave_nothing(backend: str) -> None:
    x = st.zeros((2048,), device=mesh_of((4,), backend))
    for _ in range(20):
        x[1:] + 1
    tracemalloc.start()
    before = in_use(backend)
    for _ in range(300):
        view = x[1:]
        view + 1
        del view
    after = in_use(backend)
    tracemalloc.stop()
    assert after - before < 100_000


@everywhere
def test_what_a_view_has_read_goes_when_the_base_is_written(backend: str) -> None:
    """A cache of an old value is useless, and must not prevent writes in place."""
    x = st.zeros((400_000,), device=mesh_of((4,), backend))
    view = x[1:]
    view + 1
    x += 1
    x += 1
    view + 1
    with allocated(backend) as peak:
        x += 1
    assert peak[0] < 400_000
    assert_same(view[:3], np.full(3, 3.0))


@everywhere
def test_what_a_view_has_read_stays_after_a_write_of_no_elements(backend: str) -> None:
    x = put(np.arange(8.0), backend)
    view = x[::-1]
    [shard.data for shard in view.addressable_shards]
    x[0:0] = 1
    x[3:3] = np.zeros(0)
    with st.transfers() as log:
        [shard.data for shard in view.addressable_shards]
    assert log.bytes == 0


# -- copies and snapshots --------------------------------------------------------------------------

COPIES: dict[str, Callable[[Any], Any]] = {
    "x.copy()": lambda x: x.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "x + 0": lambda x: x + 0,
    "+x": lambda x: +x,
    "device_put": lambda x: st.device_put(x, x.sharding),
    "device_put(may_alias=True)": lambda x: st.device_put(x, x.sharding, may_alias=True),
    "device_put(may_alias=False)": lambda x: st.device_put(x, x.sharding, may_alias=False),
    "reshard": lambda x: st.reshard(x, x.sharding),
    "reshard elsewhere": lambda x: st.reshard(x, st.devices("numpy")[7]),
    "shard and unshard": lambda x: st.unshard(st.shard(x, devices=x.sharding.mesh)),
    "astype": lambda x: x.astype(x.dtype),
    "asarray(np.asarray)": lambda x: st.asarray(np.asarray(x), device=x.sharding),
    "broadcast_to": lambda x: st.broadcast_to(x, x.shape),
    "concat": lambda x: st.concat([x]),
    "roll": lambda x: st.roll(x, 0),
    "stack": lambda x: st.stack([x])[0],
    "index arrays": lambda x: x[np.arange(len(x))],
    "batches": lambda x: st.concat(st.to_batched_list(x, 2)),
    "one batch": lambda x: st.to_batched_list(x, len(x))[0],
    "a map": lambda x: st.unshard(st.pmap(lambda p: p, st.shard(x, devices=x.sharding.mesh))),
}
SEEN: dict[str, Callable[[Any], Any]] = {
    "x": lambda x: x,
    "x[1:]": lambda x: x[1:],
    "x[::-2]": lambda x: x[::-2],
    "x.T": lambda x: x.T,
    "x.reshape(3, 8)": lambda x: x.reshape(3, 8),
    "x.reshape(-1)[5:9]": lambda x: x.reshape(-1)[5:9],
    "x[:, 2]": lambda x: x[:, 2],
    "x.real": lambda x: x.real,
}


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_views_are_independent(way: str, backend: str) -> None:
    """Writes are visible in neither direction, whether the view was read before or not; and the same holds for copies
    of copies.
    """
    case = list(COPIES).index(way)
    for name, look in SEEN.items():
        for read in strided((False, True), 2, (case := case + 1)):
            a = np.arange(24.0).reshape(6, 4)
            x = put(a, backend, (2, 2))
            view, wanted = look(x), look(a)
            if read:
                view + 1
            twin = COPIES[way](view)
            again = COPIES[way](twin)
            before = np.array(wanted)
            assert_same(twin, before)
            x += 1
            a += 1
            np.testing.assert_array_equal(np.asarray(twin), before, name)
            twin[...] = -5
            assert_same(x, a, exact=True)
            assert_same(view, wanted, exact=True)
            np.testing.assert_array_equal(np.asarray(again), before, name)
            again *= 2
            view *= 3
            wanted *= 3
            assert_same(x, a, exact=True)
            assert_same(twin, np.full(before.shape, -5.0), exact=True)
            np.testing.assert_array_equal(np.asarray(again), before * 2, name)


def test_copies_keep_what_a_view_is(backend: str) -> None:
    """A copy has the view's shape, dtype, layout and commitment."""
    x = put(np.arange(24).reshape(6, 4), backend, (2, 2))
    free = st.arange(24).reshape(6, 4)
    for view in (x[1:], x.T, x[:, 1], x[2, 3], x[2, 3, ...], free[1:], free.T):
        for make in (lambda v: v.copy(), copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))):
            twin = make(view)
            assert (twin.shape, twin.dtype, twin.sharding) == (view.shape, view.dtype, view.sharding)
            assert twin.committed == view.committed
            assert_same(twin, np.asarray(view), exact=True)


SNAPSHOTS: dict[str, Callable[[Any], Any]] = {
    "np.asarray": lambda x: [np.asarray(x)],
    "a slice of it": lambda x: [np.asarray(x)[..., ::-1]],
    "its rows": lambda x: list(np.asarray(x)),
    "memoryview": lambda x: [memoryview(np.asarray(x))],
    "shards": lambda x: [s.data for s in x.addressable_shards],
    "an iterator": lambda x: [np.asarray(x).flat],
    "its transpose": lambda x: [np.asarray(x).T],
}


@pytest.mark.parametrize("kind", SNAPSHOTS)
def test_what_was_read_is_read_only_and_stays(kind: str, backend: str) -> None:
    for name, look in SEEN.items():
        x = put(np.arange(24.0).reshape(6, 4), backend, (2, 2))
        view = look(x)
        taken = SNAPSHOTS[kind](view)
        copied = values_of if kind == "shards" else np.array
        before = [copied(t) for t in taken]
        for t in taken:
            if isinstance(t, np.ndarray):
                assert not t.flags.writeable
                with pytest.raises((ValueError, st.BackendError)):
                    t[...] = 0
        x += 1
        x[2:4] = 50
        view[...] = 60
        x.T[0] = 70
        x[np.arange(6)] = 80
        x[x > 0] = 90
        for t, wanted in zip(taken, before, strict=True):
            np.testing.assert_array_equal(copied(t), wanted, name)


# -- how they look ---------------------------------------------------------------------------------


def test_repr_of_views(backend: str) -> None:
    """It is the repr of a copy of the current elements."""
    x = put(np.arange(24.0).reshape(6, 4), backend, (2, 2))
    for look in (*SEEN.values(), lambda x: x[0, 1], lambda x: x[0, 1, ...], lambda x: x[3:3]):
        assert repr(look(x)) == repr(look(x).copy())
    row = x[1]
    head = f"ShardedTensor(shape=(4,), dtype=float64, sharding=P() on Mesh(x=2, y=2; {backend}:0..3))\n"
    assert repr(row) == f"{head}[4. 5. 6. 7.]"
    x[1, :2] = 0
    assert repr(row) == f"{head}[0. 0. 6. 7.]"
    assert row._repr_html_() == row.copy()._repr_html_()


def test_repr_of_large_views_reads_the_corners_alone(backend: str) -> None:
    a = np.arange(200 * 300.0).reshape(200, 300)
    x = put(a, backend, (4,))
    for view, wanted in (
        (x[::-1], a[::-1]),
        (x.T, a.T),
        (x.reshape(300, 200), a.reshape(300, 200)),
        (x[5:, 1:].T, a[5:, 1:].T),
    ):
        with st.transfers() as log, st.transfer_guard("disallow"):
            text = repr(view)
        assert log.bytes == 49 * 8
        assert text.split("\n", 1)[1] == str(wanted)


# -- given away ------------------------------------------------------------------------------------

USES: dict[str, Callable[[Any], Any]] = {
    "np.asarray": np.asarray,
    "+ 1": lambda v: v + 1,
    "[0]": lambda v: np.asarray(v[0]),
    "another view": lambda v: np.asarray(v.T),
    "+= 1": lambda v: v.__iadd__(1),
    "[0] = 1": lambda v: v.__setitem__(0, 1),
    "[mask] = 1": lambda v: v.__setitem__(np.ones(v.shape, bool), 1),
    "out=": lambda v: np.add(np.ones(v.shape), 1, out=v),
    "copy": lambda v: v.copy(),
    "shards": lambda v: v.addressable_shards,
    "shard": lambda v: st.shard(v),
    "reshard": lambda v: st.reshard(v, st.devices()[0]),
    "pickle": pickle.dumps,
    "block_until_ready": lambda v: v.block_until_ready(),
}


@pytest.mark.parametrize("use", USES)
def test_views_of_what_was_given_away_say_so(use: str, backend: str) -> None:
    for look in SEEN.values():
        for read in (False, True):
            x = put(np.arange(24.0).reshape(6, 4), backend, (2, 2))
            view, shape = look(x), look(x).shape
            if read:
                view + 1
            st.device_put(x, st.devices(backend)[5], donate=True)
            assert view.is_donated
            assert view.shape == shape
            assert repr(view).endswith("<donated>")
            with pytest.raises(st.DonatedError, match="donated by device_put"):
                USES[use](view)


def test_elements_of_what_was_given_away_are_copies(backend: str) -> None:
    x = put(np.arange(24.0).reshape(6, 4), backend, (2, 2))
    element, total = x[2, 3], x.sum()
    st.device_put(x, st.devices(backend)[5], donate=True)
    assert float(element) == 11
    assert float(element + 1) == 12
    assert float(total) == 276


def zero(x: Any) -> Any:
    x[...] = 0
    return x


def test_views_that_are_given_away_leave_their_base(backend: str) -> None:
    """A mapped function that writes to a donated argument writes to a copy if something else holds the memory."""
    a = np.arange(24.0).reshape(6, 4)
    for look in SEEN.values():
        for read in (False, True):
            x = st.device_put(a, st.devices(backend)[1])
            view = look(x)
            if read:
                view + 1
            (out,) = st.pmap(zero, [view], donate=True)
            assert view.is_donated or view is x
            assert not np.asarray(out).any()
            if view is not x:
                assert not x.is_donated
                assert_same(x, a, exact=True)
                with pytest.raises(st.DonatedError):
                    view + 1
            with pytest.raises(st.DonatedError):
                view[...] = 1
    y = put(a, backend, (2, 2))
    part = y[2:]
    st.device_put(part, st.devices(backend)[6], donate=True)
    with pytest.raises(st.DonatedError):
        part += 1
    y += 1
    assert_same(y, a + 1, exact=True)


def test_a_base_that_is_given_away_does_not_change_what_was_read(backend: str) -> None:
    a = np.arange(24.0).reshape(6, 4)
    for look in SEEN.values():
        x = st.device_put(a, st.devices(backend)[1])
        view = look(x)
        kept, computed = np.asarray(view), view + 0
        st.pmap(zero, [x], donate=True)
        np.testing.assert_array_equal(kept, look(a))
        assert_same(computed, look(a), exact=True)
        with pytest.raises(st.DonatedError):
            np.asarray(view)


# -- where they lie --------------------------------------------------------------------------------

BY_VALUE: list[tuple[str, tuple[Any, ...]]] = [
    ("getitem", (slice(1, None),)),
    ("getitem", ((slice(None, None, -2), 1),)),
    ("getitem", (2,)),
    ("getitem", ((None, ..., slice(0, 3)),)),
    ("getitem", ((1, ..., 0),)),
    ("getitem", (slice(2, 2),)),
    ("permute_dims", ((2, 0, 1),)),
    ("matrix_transpose", ()),
    ("reshape", ((-1,), None)),
    ("reshape", ((7, 2, 2, 3), None)),
    ("reshape", ((28, 3), None)),
    ("reshape", ((2, -1, 1, 3), None)),
    ("flip", (None,)),
    ("flip", (0,)),
    ("squeeze", (None,)),
    ("expand_dims", (1,)),
    ("real", ()),
    ("imag", ()),
]


def by_value(name: str, x: st.ShardedTensor, params: tuple[Any, ...]) -> st.ShardedTensor:
    """Returns the result of an operator that copies."""
    if name == "getitem":
        params = (canonical(params[0], x.shape),)
    return run(OPS[name], (x,), params)  # type: ignore[no-any-return]


def assert_views_lie_like_values(a: np.ndarray, meshes: list[tuple[int, ...]], every: int, backend: str) -> None:
    turns = itertools.count()
    for mesh in meshes:
        for spec in all_specs(mesh_of(mesh, backend), a.ndim)[::every]:
            x = put(a, backend, mesh, spec)
            for name, params in strided(BY_VALUE, 2, next(turns)):
                where = (name, params, spec)
                view, value = bind(OPS[name], (x,), params), by_value(name, x, params)
                assert view.sharding == value.sharding, where
                assert (view.shape, view.dtype, view.committed) == (value.shape, value.dtype, value.committed), where
                assert_same(view, np.asarray(value), exact=True)
                if view.ndim > 1:
                    axes = tuple(range(view.ndim))[::-1]
                    rest = by_value("permute_dims", by_value("getitem", value, (slice(1, None),)), (axes,))
                    assert view[1:].T.sharding == rest.sharding, where


def test_views_lie_where_the_same_operators_results_do(backend: str) -> None:
    """The sizes divide no mesh, and some shards are empty: each device has the part of the result that the layout
    assigns to it.
    """
    a = np.arange(84.0).reshape(7, 4, 3) * (1 + 1j)
    assert_views_lie_like_values(a, [(3,), (2, 2)], 3, backend)


@pytest.mark.full
def test_views_lie_where_the_same_operators_results_do_everywhere(backend: str) -> None:
    a = np.arange(84.0).reshape(7, 4, 3) * (1 + 1j)
    assert_views_lie_like_values(a, [(1,), (3,), (8,), (2, 2), (4, 2), (2, 2, 2)], 1, backend)


def test_views_of_uneven_shards_are_written_where_they_are(backend: str) -> None:
    """10 rows over 4 devices are 3, 3, 2, 2; over 8, some devices have no columns. A write moves nothing of the base."""
    for count in (3, 4, 8):
        for spec in (st.P("x"), st.P(None, "x")):
            a = np.arange(50.0).reshape(10, 5)
            x = put(a, backend, (count,), spec)
            for look in (
                lambda t: t[1:], lambda t: t[::-1], lambda t: t[7], lambda t: t[:, 3], lambda t: t.T, lambda t: t[::3, 1:4],
                lambda t: t[2:3, 4:], lambda t: t.T[::-2, None, 5], lambda t: t.reshape(10, 5, 1)[:, 2],
                lambda t: t.reshape(10, 5, 1).mT[3:8],
            ):  # fmt: skip
                with st.transfers() as log, st.transfer_guard("disallow"):
                    view = look(x)
                    view += 1
                    view[...] = 2
                    view *= -3
                assert log.bytes == 0
                look(a)[...] = -6
                assert_same(x, a, exact=True)
                assert_same(look(x), look(a), exact=True)


def test_all_backends_count_alike_what_views_move() -> None:
    """They count reads and writes, also where a shard is not a box of the view's shape."""
    looks = [
        *SEEN.values(),
        *MOVING.values(),
        lambda t: t.reshape(8, 9)[1:4, ::-2],
        lambda t: t.reshape(-1)[3:41:4],
    ]
    for count in (3, 4):
        for look in strided(looks, 2, count):
            records = []
            for backend in USABLE:
                x = put(np.arange(72.0).reshape(12, 6), backend, (count,))
                if attempt(look, x)[0] is None:
                    continue
                with st.transfers() as log:
                    view = look(x)
                    view + 1
                    view[...] = 2
                    view -= 1
                    view[...] = np.arange(view.size).reshape(view.shape)
                    view += st.ones(view.shape, device=st.devices(backend)[0])
                    np.asarray(view)
                records.append(
                    [(r.bytes, r.source.id, r.destination.id, r.operator, r.explicit) for r in log if r.bytes]
                )
            assert len(records) in (0, len(USABLE))
            assert all(sorted(one) == sorted(records[0]) for one in records)


@everywhere
def test_views_keep_the_kind_of_memory(backend: str) -> None:
    x = put(np.arange(12.0).reshape(4, 3), backend, (2, 2))
    pinned = st.reshard(x, x.sharding.with_memory_kind("pinned_host"))
    for view in (pinned[1:], pinned.T, pinned.reshape(-1), pinned[0]):
        assert view.sharding.memory_kind == "pinned_host"
        view[...] = 1
    assert pinned.sharding.memory_kind == "pinned_host"
    assert_same(x, np.arange(12.0).reshape(4, 3))
    assert not st.arange(6)[1:].committed
    assert not st.arange(6).reshape(2, 3).committed


# -- views as operands -----------------------------------------------------------------------------


@everywhere
def test_everything_takes_views(backend: str) -> None:
    """Operators, lists and maps take the current elements of views."""
    a = np.arange(24.0).reshape(6, 4)
    x = put(a, backend, (2, 2))
    view, seen = x[::-1].T[1:], a[::-1].T[1:]
    for _ in range(2):
        assert_same(view + view, seen + seen)
        assert_same(view @ x, seen @ a)
        assert_same(st.sum(view, axis=0), seen.sum(0))
        assert_same(st.concat([view, view[:, :2]], axis=1), np.concatenate([seen, seen[:, :2]], axis=1))
        assert_same(st.stack([view, view]), np.stack([seen, seen]))
        assert_same(st.where(view > 3, view, x[0, 0]), np.where(seen > 3, seen, a[0, 0]))
        assert_same(np.exp(view), np.exp(seen))
        assert_same(view[[2, 0], 1:3], seen[[2, 0], 1:3])
        assert_same(view[view > 5], seen[seen > 5])
        assert_same(st.unshard(st.shard(view, devices=st.devices(backend)[:3])), seen)
        assert_same(st.unshard(st.pmap(lambda p: p * 2, st.shard(view, devices=st.devices(backend)[:2]))), seen * 2)
        assert_same(st.smap(lambda p: p + 1, view, axes=[1]), seen + 1)
        assert_same(st.reshard(view, st.devices(backend)[5]), seen)
        assert [b.shape for b in st.to_batched_list(view, 2)] == [(2, 6), (1, 6)]
        assert st.matmul(view, 2.0 * st.ones((6,))).shape == (3,)
        view += 1
        seen += 1
        x[3] = 0
        a[3] = 0


def test_memory_that_may_be_shared(backend: str) -> None:
    """The answer is NumPy's for views of one base; tensors that only lie in one buffer do not share memory in this
    sense.
    """
    a = np.arange(24.0).reshape(6, 4)
    x = put(a, backend, (2, 2))
    looks = [
        *SEEN.values(),
        lambda t: t[:2],
        lambda t: t[4:],
        lambda t: t[1:3, 1:],
        lambda t: t.T[0],
        lambda t: t[2, 2, ...],
    ]
    for first in looks:
        for second in looks:
            assert np.may_share_memory(first(x), second(x)) == np.may_share_memory(first(a), second(a))
        assert not np.may_share_memory(first(x), first(x).copy())
        assert not np.may_share_memory(first(x), first(x) + 0)
        assert not np.may_share_memory(first(x), first(a))
    assert not np.may_share_memory(x, st.reshard(x, x.sharding))
    assert not np.may_share_memory(x[0, 0], x)


@everywhere
def test_views_of_bits_and_of_parts_of_complex_numbers_are_views_of_each_other(backend: str) -> None:
    chains: list[Callable[[Any], Any]] = [
        lambda x: x.view("c8").real,
        lambda x: x.view("c8")[::2].imag,
        lambda x: x.view("c8").imag.view("i4")[1:],
        lambda x: x.view("c8").real.view("i4").view("f4").real,
        lambda x: x.view("c8").real.imag,
        lambda x: x.view("i8").view("c8").view("i8").real,
    ]
    on = st.NamedSharding(mesh_of((2,), backend), st.P("x"))
    for chain in chains:
        host = np.arange(7) + 1.5
        x = st.device_put(host, on)
        host_view, view = chain(host), chain(x)
        assert (view.dtype, view.shape) == (host_view.dtype, host_view.shape)
        np.testing.assert_array_equal(np.asarray(view), host_view)
        if host_view.flags.writeable:
            host_view[...] = 3
            view[...] = 3
        np.testing.assert_array_equal(np.asarray(x), host)
