"""Copies are independent, views alias their base, and writes arrive: as in NumPy, eagerly and under jit.

The tables of functions and operands are in `tests.interpreters.aliases`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.interpreters.aliases import OPERANDS, RESULTS, WRITES, Call
from tests.layouts import READ_ONLY, USABLE, mesh_of, put, strided

SHAPES = {"small": (6, 10), "64 KiB": (96, 130), "512 KiB": (260, 270)}
"""Bases: below the threshold of small results, and above each. No stride is 64 bytes, with which NumPy 2.4 negates
wrongly in place.
"""

LAYOUTS: dict[str, Callable[[], Any]] = {
    "one device": lambda: st.devices("numpy")[0],
    "rows": lambda: st.NamedSharding(mesh_of((8,), "numpy"), st.P("x")),
    "rows and columns": lambda: st.NamedSharding(mesh_of((4, 2), "numpy"), st.P("x", "y")),
    "separate memories": lambda: st.NamedSharding(mesh_of((2, 2), "checked"), st.P("x", "y")),
    **{
        name: lambda name=name: st.NamedSharding(mesh_of((2,), name), st.P("x"))
        for name in USABLE
        if name not in READ_ONLY
    },
}

MODES = ("eager", "jit", "jit of the base", "jit in C", "eager, recorded", "jit, recorded")
"""How a function is called: under jit, the operand is an argument or made of one; and while transfers are recorded."""

Case = tuple[str, str]

_RESULTS = list(itertools.product(RESULTS, OPERANDS))
_WRITES = [case for case in itertools.product(WRITES, OPERANDS) if case[1] != "broadcast"]

_CASES = list(itertools.product(SHAPES, LAYOUTS, MODES))

_STEPS = {"small": 1, "64 KiB": 11, "512 KiB": 29}
"""Large arrays take longer, so that each layout and mode has a part of the cases, another one each."""

_FAST = {("small", "rows", "eager"): 7, ("small", "rows", "jit"): 29, ("small", "separate memories", "eager"): 41}
"""What runs in the fast tier, of which cases one in so many."""


def base_of(shape: tuple[int, ...], operand: str) -> np.ndarray:
    """Returns a base whose elements are different, and in no order."""
    size = np.prod(shape)
    base = (np.arange(size) * 7919 % size).reshape(shape).astype(float)
    return base + 1j * (base + 1) if operand.startswith(("real", "imag")) else base


def outcome(call: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """Returns the result of a call, or the error that it raises."""
    try:
        return call(*args), None
    except Exception as error:
        return None, error


def aliasing(result: Any, base: Any) -> tuple[Any, bool]:
    """Returns whether a write to a result arrives in its base, None if it is read-only, and whether a write to the base
    arrives in the result. The base is written.
    """
    before = np.array(result)
    base[...] = base * 0 - 7.5
    seen = not np.array_equal(np.array(result), before)
    try:
        result[...] = 9
    except ValueError:
        return None, seen
    return bool((np.array(base) != -7.5).any()), seen


def called(mode: str, function: Call, operand: Callable[[Any], Any], base: Any) -> Any:
    """Calls a function of a view of a tensor in one of the modes."""
    if mode == "jit of the base":
        return st.jit(lambda b: function(st, operand(b)))(base)
    x = operand(base)
    run = functools.partial(function, st)
    if mode.startswith("jit"):
        run = st.jit(run, executor="c" if mode == "jit in C" else None)
    with st.transfers() if mode.endswith("recorded") else contextlib.nullcontext():
        return run(x)


def difference(case: Case, shape: tuple[int, ...], layout: Any, mode: str) -> str | None:
    """Returns how the call of a function that returns an array differs from NumPy's; None if it does not."""
    function, operand = RESULTS[case[0]], OPERANDS[case[1]]
    host = base_of(shape, case[1])
    base = st.device_put(host.copy(), layout)
    wanted, refused = outcome(function, np, operand(host))
    if refused is not None or not isinstance(wanted, np.ndarray):
        return None
    found, error = outcome(called, mode, function, operand, base)
    if error is not None:
        return None if isinstance(error, st.ConcretizationError) else repr(error)
    now = np.array(found)
    if now.shape != wanted.shape or now.dtype != wanted.dtype or not np.allclose(now, wanted, equal_nan=True):
        return f"{now!r:.80}, not {wanted!r:.80}"
    if not wanted.size:
        return None
    its, mine = aliasing(found, base), aliasing(wanted, host)
    if case[1] == "broadcast":  # NumPy's is read-only, and the library's an independent tensor.
        return None if not any(its) else f"aliases {its}"
    return None if its == mine else f"aliases {its}, not {mine}"


def lost(case: Case, shape: tuple[int, ...], layout: Any, mode: str) -> str | None:
    """Returns how a base differs from NumPy's after a function has written to a view of it; None if it does not."""
    function, operand = WRITES[case[0]], OPERANDS[case[1]]
    if "out=" in case[0] and case[1].startswith(("bits", "no dimensions")):
        return None  # Casts to integers have rules of their own, and NumPy 2.4 crashes in cumsum of no dimensions.
    host = base_of(shape, case[1])
    base = st.device_put(host.copy(), layout)
    before = host.copy()

    def written(xp: Any, x: Any) -> None:
        function(xp, x)

    _, refused = outcome(written, np, operand(host))
    if refused is not None:
        return None
    _, error = outcome(called, mode, written, operand, base)
    if error is not None:
        return None if isinstance(error, st.ConcretizationError) else repr(error)
    now = np.array(base)
    if np.allclose(now, host, equal_nan=True):
        return None
    return "is lost" if np.array_equal(now, before) else f"{now!r:.80}, not {host!r:.80}"


def _cases() -> list[Any]:
    """Returns sizes, layouts and modes, each with a number; those that take long are marked `full`."""
    made = []
    for number, case in enumerate(_CASES):
        marks = () if case in _FAST else (pytest.mark.full,)
        made.append(pytest.param(number, *case, marks=marks, id=", ".join(case)))
    return made


def _drawn(cases: list[Case], number: int, size: str, *where: str) -> list[Case]:
    """Returns the cases of a test: in the fast tier a few, and of large arrays a part, each time another one."""
    step = _STEPS[size] * (1 if where[-1] in ("eager", "jit") else 3)
    return list(strided(cases[number % step :: step], _FAST.get((size, *where), 1), number))


@pytest.mark.parametrize(("number", "size", "layout", "mode"), _cases())
def test_copies_and_views_are_those_of_numpy(number: int, size: str, layout: str, mode: str) -> None:
    found = {
        case: words
        for case in _drawn(_RESULTS, number, size, layout, mode)
        if (words := difference(case, SHAPES[size], LAYOUTS[layout](), mode))
    }
    assert not found


@pytest.mark.parametrize(("number", "size", "layout", "mode"), _cases())
def test_writes_arrive_as_in_numpy(number: int, size: str, layout: str, mode: str) -> None:
    found = {
        case: words
        for case in _drawn(_WRITES, number, size, layout, mode)
        if (words := lost(case, SHAPES[size], LAYOUTS[layout](), mode))
    }
    assert not found


# -- one by one ------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["numpy", "c"])
def test_copies_of_views_of_a_slice_are_independent_under_jit(executor: str) -> None:
    def copies(x: Any) -> tuple[Any, ...]:
        part = x[1:3]
        more = np.resize(part, 2), np.repeat(part, 1), np.tile(part, 1), part.astype(part.dtype), part.T.flatten("F")
        return (part, part.flatten(), part.copy(), st.reshape(part, (2,), copy=True), *more)

    base = st.arange(10)
    view, *made = st.jit(copies, executor=executor)(base[1:6])
    for k, x in enumerate(made):
        x[...] = -k - 1
    assert base.tolist() == [*range(10)]
    assert [x.tolist() for x in made] == [[-k - 1] * 2 for k in range(len(made))]
    view[...] = 7
    assert base.tolist() == [0, 1, 7, 7, *range(4, 10)]
    with st.transfers():  # Its transfers are inferred, and the values computed on another path.
        _, copy, *_ = st.jit(copies, executor=executor)(base[1:6])
    copy[...] = 0
    assert base.tolist() == [0, 1, 7, 7, *range(4, 10)]


def test_a_program_for_each_layout_that_decides_between_view_and_copy() -> None:
    """Arguments of one shape have programs of their own where a function copies one and not the other."""
    flat = st.jit(lambda x: x.ravel())
    turned = st.jit(lambda x: x.T.reshape(-1))
    for _ in range(2):
        b = st.zeros((4, 8))
        for part, is_view in ((b[:, :4], False), (b[:2].reshape(4, 4), True), (b[:, ::2], False)):
            made = flat(part)
            made[...] = 1
            assert bool(b.sum() != 0) is is_view
            b[...] = 0
        for part, is_view in ((b[:, :4], False), (b[:2].reshape(4, 4), False), (b[:2].reshape(4, 4).T, True)):
            made = turned(part)
            made[...] = 1
            assert bool(b.sum() != 0) is is_view
            b[...] = 0


@pytest.mark.parametrize("n", [6, 300])
@pytest.mark.parametrize("jit", [False, True])
def test_diagonals_of_views_that_no_reshape_is_a_view_of_are_written(n: int, jit: bool) -> None:
    def write(x: Any) -> None:
        np.fill_diagonal(x[::-1, 1:], -1)
        np.fill_diagonal(x.T[1:], [-2, -3])

    host, x = np.zeros((n, n + 1)), st.zeros((n, n + 1))
    write(host)
    (st.jit(write) if jit else write)(x)
    np.testing.assert_array_equal(np.asarray(x), host)


def test_indices_along_a_flattened_view_are_written() -> None:
    x = st.asarray(np.zeros((2, 3), int))
    np.put_along_axis(x.T, np.array([1, -1]), [5, 6], axis=None)
    assert x.tolist() == [[0, 0, 0], [5, 0, 6]]
    for index in (6, -7):
        with pytest.raises(IndexError, match=f"put_along_axis: index {index} is out of bounds for 6 elements"):
            np.put_along_axis(x, np.array([index]), 1, axis=None)


def test_assignments_to_flat_repeat_the_values() -> None:
    x = st.zeros((2, 3), dtype=int)
    x.flat[:5] = [1, 2]
    x.flat[[5]] = [3, 4]
    x.flat[6:] = [8, 9]
    assert x.tolist() == [[1, 2, 1], [2, 1, 3]]
    with pytest.raises(ValueError, match="one element is written"):
        x.flat[0] = [1, 2]
    with pytest.raises(IndexError, match="flat"):
        x.flat[6] = 1


def test_parts_of_complex_numbers_are_not_contiguous() -> None:
    host = np.zeros((3, 2), complex)
    x = st.asarray(host)
    for part in (lambda x: x, lambda x: x.real, lambda x: x.T.imag, lambda x: x[:1, :1].real, lambda x: x[0].real):
        found, wanted = part(x).flags, part(host).flags
        assert (found.c_contiguous, found.f_contiguous) == (wanted.c_contiguous, wanted.f_contiguous)


def test_views_of_numpy_that_are_independent_tensors_here() -> None:
    """The list is that of the page on differences."""
    host = np.arange(12.0).reshape(3, 4)
    for function in (
        lambda x: np.diagonal(x),
        lambda x: x.diagonal(),
        lambda x: np.diag(x),
        lambda x: np.linalg.diagonal(x),
        lambda x: np.einsum("ii->i", x[:, :3]),
        lambda x: np.broadcast_to(x, (2, 3, 4)),
        lambda x: np.broadcast_arrays(x, np.zeros((2, 1, 1)))[0],
        lambda x: np.lib.stride_tricks.sliding_window_view(x, 2, axis=0),
    ):
        assert np.shares_memory(function(host), host)
        for mode in (function, st.jit(function)):
            x = st.asarray(host)
            made = mode(x)
            before = np.array(made)
            x[...] = -1
            assert np.array_equal(np.asarray(made), before)
            made[...] = 5
            assert bool(st.all(x == -1))


def test_a_reshape_to_the_same_shape_under_jit_has_the_layout_that_it_has_eagerly() -> None:
    """The only column of the view is on one of the devices that split the columns of the base."""
    mesh = mesh_of((4, 2), "checked")

    def column() -> Any:
        return st.device_put(np.arange(24.0).reshape(6, 4), st.NamedSharding(mesh, st.P(None, "y")))[1:-2, 1:-2]

    def added(x: Any) -> Any:
        y = x.reshape(-1, 1)
        np.add.at(y, [0, 0], 1)
        return y

    for call in (added, st.jit(added)):
        x = column()
        y = call(x)
        assert y.sharding.spec == column().reshape(-1, 1).sharding.spec
        assert np.asarray(y).tolist() == np.asarray(x).tolist() == [[7], [9], [13]]


@pytest.mark.parametrize("backend", USABLE, indirect=True)
def test_an_index_on_the_device_writes_to_a_reshaped_column(backend: str) -> None:
    """The elements are no box of the base, so that their positions are written, one by one."""
    x = st.device_put(np.arange(12.0).reshape(3, 4), st.devices(backend)[0])
    column = x[:, :1].reshape(-1)
    np.place(column, column > 2, [-1, -2])
    column[st.device_put(np.array([0, 0]), st.devices(backend)[0])] = -3
    assert np.asarray(x)[:, 0].tolist() == np.asarray(column).tolist() == [-3, -1, -2]


@pytest.mark.parametrize("backend", USABLE, indirect=True)
def test_all_elements_of_a_long_reshaped_view_are_written(backend: str) -> None:
    """NumPy's function for the coordinates of positions is wrong for more than 8192 of them, in columns."""
    base = put(np.zeros((64, 192)), backend, (1,), st.P())
    view = base[None].reshape(192, 64, 1)
    view[...] = -1
    view += 3
    view[view > 0] = 5
    assert (np.asarray(base) == 5).all()


@pytest.mark.parametrize("backend", USABLE, indirect=True)
def test_dimensions_of_size_1_in_front_of_what_is_assigned_are_dropped(backend: str) -> None:
    for n in (5, 600_000):
        x, values = put(np.zeros(n), backend), np.arange(float(n)).reshape(1, 1, n)
        for given in (values, put(values, backend, spec=st.P(None, None, "x"))):
            for at in (slice(None), slice(None, None, -1)):
                x[...] = 0
                x[at] = given
                assert np.array_equal(np.asarray(x)[at], values[0, 0])
        st.jit(lambda x, y: x.__setitem__(..., y))(x, values)
        assert np.array_equal(np.asarray(x), values[0, 0])


@pytest.mark.parametrize("backend", USABLE, indirect=True)
def test_a_tensor_is_written_to_its_own_elements_in_another_order(backend: str) -> None:
    for n in (5, 600_000):
        a, x = np.arange(2.0 * n).reshape(n, 2), put(np.arange(2.0 * n).reshape(n, 2), backend)
        for at in (np.s_[::-1], np.s_[:, ::-1], np.s_[...]):
            a[at] = a.copy()
            x[at] = x
            assert np.array_equal(np.asarray(x), a)
        x[::-1], a[::-1] = np.asarray(x), a.copy()
        assert np.array_equal(np.asarray(x), a)
