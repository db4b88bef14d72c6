"""Every operator under every sharding, against NumPy, on shared and on separate memories."""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
import shardtensor.functions.building.special  # It declares operators, too, and is imported on use.
from shardtensor.backend.registry import load
from shardtensor.core import OPS
from shardtensor.sharding.mesh import default_mesh
from tests.cases import CASES, Case, check, sharded_somehow, wanted
from tests.draws import drawn
from tests.layouts import MESHES, READ_ONLY, USABLE, all_specs, array, assert_same, everywhere, mesh_of
from tests.operands import values
from tests.pairs import spread
from tests.scripts import ROOT

OPERATORS = sorted(CASES)


def test_every_declared_operator_is_tested() -> None:
    """Those without cases have tests that name them. Internal ones are tested by the functions that call them, and maps
    and collectives separately.
    """
    named: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        named.update(re.findall(r"\b(?:st|linalg|fft|random)\.(\w+)", text))
        named.update(" ".join(re.findall(r'"([\w ]+)"', text)).split())
    without_cases = {name for name, op in OPS.items() if "spmd" not in op.tags and "internal" not in op.tags} - set(
        CASES
    )
    assert without_cases - named == set(), "add a case in shardtensor/testing/, or a test that names the operator"
    assert set(CASES) <= set(OPS)


def sweep(name: str, backend: str, examples: int) -> None:
    """Draws other examples for each operator and backend: together they cover what the operators share."""

    @hypothesis.seed(zlib.crc32(f"{name} {backend}".encode()))
    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        made = CASES[name](data)
        operands = sharded_somehow(data, made, backend)
        if not load(backend).has_dtype(np.asarray(wanted(name, made)).dtype):
            made = refused(name, made, operands, backend)
        check(name, made, operands)

    run()


def refused(name: str, made: Case, operands: list[Any], backend: str) -> Case:
    """Asserts the error of a case whose result has a dtype that a backend lacks, such as the uint64 of a sum of uint8;
    with a dtype that the backend has, the case is tested like any other.
    """
    if any(d.backend == backend for x in operands if isinstance(x, st.ShardedTensor) for d in x.devices()):
        lacks = (
            f"{name}: backend '{backend}' has no arrays of {np.asarray(wanted(name, made)).dtype}; convert with astype"
        )
        with pytest.raises(st.ArgumentTypeError, match=lacks):
            made.run(OPS[name].dispatch, operands)
    return replace(made, params={**made.params, "dtype": "int64"})


EXAMPLES = {"numpy": (4, 3), "checked": (4, 3), "cupy": (2, 2), "torch": (2, 2)}
"""The examples of an operator, and of one that is composed of others, on each backend in the fast tier.

The first example is the simplest, and from the eleventh on hypothesis repeats parts of others.
"""


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_matches_numpy(name: str) -> None:
    op = OPS[name]
    composed = not (op.rule or op.parts.kernel or op.parts.movement or op.parts.algorithm)
    for backend in USABLE:
        few = EXAMPLES[backend][composed]
        sweep(name, backend, drawn(7 if composed else 25, fast=few))


@pytest.mark.full
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_matches_numpy_at_length(name: str, backend: str) -> None:
    sweep(name, backend, 1000 if backend in READ_ONLY else 200)


@pytest.mark.full
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_matches_numpy_where_four_devices_share_a_memory(name: str) -> None:
    sweep(name, "grouped", 100)


EACH = ["add", "sum", "var", "argmax", "reshape", "flip", "getitem"]
SHAPES = [(), (5,), (1, 4), (4, 3), (0, 3), (9, 1, 2)]


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("name", EACH)
def test_every_spec(name: str, mesh_shape: tuple[int, ...], backend: str) -> None:
    """Every spec of each mesh is tested, for one operator of each kind; in the fast tier each spec of several axes for
    some of the operators.
    """
    mesh, operator = mesh_of(mesh_shape, backend), EACH.index(name)
    for shape in SHAPES:
        x = array(shape, "float64", 7)
        calls = {
            "add": Case([x], (2.5,)),
            "sum": Case([x], params={"axis": 0 if x.ndim else None}),
            "var": Case([x]),
            "argmax": Case([x + 1 if x.size else np.ones((1, 1))], answer=None),
            "reshape": Case([x], (-1,)),
            "flip": Case([x]),
            "getitem": Case([x], (np.s_[1::2],), answer=x[1::2] if x.ndim else x),
        }
        made = calls[name]
        if name == "getitem" and not x.ndim:
            made = Case([x], ((),), answer=x)
        every = all_specs(mesh, made.operands[0].ndim)
        for spec in spread(every, (1, 3, 13)[len(mesh_shape) - 1], operator):
            check(name, made, [st.device_put(made.operands[0], st.NamedSharding(mesh, spec))])


@pytest.mark.parametrize("name", ["add", "matmul", "where"])
def test_every_pair_of_specs(name: str, backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    x, y = array((5, 3), "float64", 1), array((3, 3) if name == "matmul" else (5, 1), "float64", 2)
    for a, b in spread(itertools.product(all_specs(mesh, 2), repeat=2), 2):
        left, right = st.device_put(x, st.NamedSharding(mesh, a)), st.device_put(y, st.NamedSharding(mesh, b))
        if name == "where":
            check(name, Case([x > 0, x, y]), [left > 0, left, right])
        else:
            check(name, Case([x, y]), [left, right])


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda xp, **k: xp.zeros((5, 3), **k), (5, 3)),
        (lambda xp, **k: xp.ones(7, dtype="int32", **k), (7,)),
        (lambda xp, **k: xp.full((4, 2), 2.5, **k), (4, 2)),
        (lambda xp, **k: xp.full((4,), True, **k), (4,)),
        (lambda xp, **k: xp.full((), 3, **k), ()),
        (lambda xp, **k: xp.arange(11, **k), (11,)),
        (lambda xp, **k: xp.arange(20, 3, -4, **k), (5,)),
        (lambda xp, **k: xp.arange(0.1, 2.3, 0.3, **k), (8,)),
        (lambda xp, **k: xp.arange(0.5, 7, dtype="float32", **k), (7,)),
        (lambda xp, **k: xp.arange(3, 3, **k), (0,)),
        (lambda xp, **k: xp.arange(2, dtype=bool, **k), (2,)),
        (lambda xp, **k: xp.arange(0.5, 2, dtype=bool, **k), (2,)),
        (lambda xp, **k: xp.eye(5, **k), (5, 5)),
        (lambda xp, **k: xp.eye(4, 7, k=2, dtype="int8", **k), (4, 7)),
        (lambda xp, **k: xp.eye(7, 3, k=-3, **k), (7, 3)),
    ],
)
def test_creation_under_every_sharding(make: Any, shape: tuple[int, ...], backend: str) -> None:
    for mesh_shape in [(3,), (8,), (2, 3)]:
        mesh = mesh_of(mesh_shape, backend)
        for spec in all_specs(mesh, len(shape)):
            assert_same(make(st, device=st.NamedSharding(mesh, spec)), make(np), exact=True)
        assert_same(make(st, device=mesh), make(np), exact=True)
    assert_same(make(st, device=st.devices(backend)[5]), make(np), exact=True)
    assert make(st).sharding.mesh == default_mesh()


@pytest.mark.parametrize("name", ["zeros_like", "ones_like", "empty_like", "full_like"])
def test_like_keeps_layout(name: str, backend: str) -> None:
    mesh = mesh_of((2, 3), backend)
    for spec in all_specs(mesh, 2):
        x = st.device_put(array((5, 4), "float32", 1), st.NamedSharding(mesh, spec))
        more = (7,) if name == "full_like" else ()
        for dtype in (None, "int16"):
            made = getattr(st, name)(x, *more, dtype=dtype)
            assert made.sharding == x.sharding
            assert (made.shape, made.dtype) == ((5, 4), np.dtype(dtype or "float32"))
            if name != "empty_like":
                assert_same(made, getattr(np, name)(np.zeros((5, 4), "float32"), *more, dtype=dtype))
    assert st.zeros_like(x, device=st.devices(backend)[1]).device == st.devices(backend)[1]


@pytest.mark.parametrize("name", ["empty"])
def test_empty(name: str, backend: str) -> None:
    made = st.empty((3, 2), dtype="int16", device=mesh_of((2,), backend))
    assert (made.shape, made.dtype) == ((3, 2), np.dtype("int16"))


def test_full_takes_arrays_of_no_dimensions(backend: str) -> None:
    fill = st.device_put(np.float32(1.5), st.devices(backend)[1])
    assert_same(st.full((3,), fill, device=mesh_of((2,), backend)), np.full((3,), np.float32(1.5)))
    assert_same(st.full((2,), np.int8(3)), np.full((2,), np.int8(3)))


SCALARS = [True, 2, 2.5, 1 + 2j, np.float32(1.5), np.int64(3)]


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
@pytest.mark.parametrize("dtype", ["bool", "int32", "float32", "complex64"])
def test_scalars_promote_as_in_numpy(scalar: Any, dtype: str, backend: str) -> None:
    value = array((5,), dtype, 3)
    x = st.device_put(value, mesh_of((3,), backend))
    assert_same(x * scalar, value * scalar)
    assert_same(scalar + x, scalar + value)


NUMBERS = [300, -1, -129, 2**31, 2**53 + 1, 2**63, -(2**63), 1.5, 300.7, 1e300, math.nan, math.inf, 1j, True]

WAYS: dict[str, Callable[[Any, Any, dict[str, Any]], Any]] = {
    "asarray": lambda xp, n, to: xp.asarray(n, **to),
    "a list": lambda xp, n, to: xp.asarray([n], **to),
    "nested lists": lambda xp, n, to: xp.asarray([[n, 0], [1, 0.5]], **to),
    "a list of NumPy scalars": lambda xp, n, to: xp.asarray([np.asarray(n)[()]], **to),
    "full": lambda xp, n, to: xp.full(9, n, **to),
    "full of a NumPy scalar": lambda xp, n, to: xp.full(9, np.asarray(n)[()], **to),
    "full_like": lambda xp, n, to: xp.full_like(xp.zeros(9, **to), n),
    "arange": lambda xp, n, to: xp.arange(n, n + 3, **to),
    "arange down": lambda xp, n, to: xp.arange(n, n - 300, -100, **to),
    "fill": lambda xp, n, to: _after(xp.zeros(9, **to), lambda x: x.fill(n)),
    "an element": lambda xp, n, to: _after(xp.zeros(9, **to), lambda x: x.__setitem__(3, n)),
    "a slice": lambda xp, n, to: _after(xp.zeros(9, **to), lambda x: x.__setitem__(slice(2, 5), [n, 0, 1])),
    "a mask": lambda xp, n, to: _after(xp.zeros(9, **to), lambda x: x.__setitem__(np.arange(9) % 2 == 0, n)),
    "a sum": lambda xp, n, to: xp.zeros(9, **to) + n,
    "a comparison": lambda xp, n, to: n < xp.zeros(9, **to),
    "a sum in place": lambda xp, n, to: _after(xp.zeros(9, **to), lambda x: x.__iadd__(n)),
    "where": lambda xp, n, to: xp.where(np.arange(9) % 2 == 0, xp.zeros(9, **to), n),
    "clip": lambda xp, n, to: xp.clip(xp.zeros(9, **to), -5, n),
}
"""Where Python's numbers become elements, in the namespace of NumPy or of the library."""


def _after(x: Any, write: Callable[[Any], Any]) -> Any:
    write(x)
    return x


def _outcome(way: str, xp: Any, number: Any, to: dict[str, Any]) -> Any:
    """Returns the result as a host array, or the class of the error."""
    try:
        return np.asarray(WAYS[way](xp, number, to))
    except (OverflowError, TypeError, ValueError) as error:
        return next(kind for kind in (OverflowError, TypeError, ValueError) if isinstance(error, kind))


@everywhere
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_numbers_become_elements_as_in_numpy(way: str, backend: str) -> None:
    mesh = mesh_of((3,), backend)
    for dtype, number in itertools.product(["bool", "int8", "uint8", "int64", "uint64", "float32"], NUMBERS):
        if not load(backend).has_dtype(np.dtype(dtype)) or (way == "clip" and number == 1j):
            continue
        if way.startswith("arange") and (isinstance(number, complex) or not abs(number) < 1e30):
            continue
        if dtype == "bool" and number == 2**63 and way == "a sum in place":
            continue  # NumPy looks at the number before it looks at the dtypes
        wanted = _outcome(way, np, number, {"dtype": dtype})
        found = _outcome(way, st, number, {"dtype": dtype, "device": mesh})
        if isinstance(wanted, type) or isinstance(found, type):
            assert found is wanted, (dtype, number)
        else:
            assert found.dtype == wanted.dtype, (dtype, number)
            np.testing.assert_array_equal(found, wanted, err_msg=f"{number} of {dtype}")


@everywhere
def test_numbers_become_elements_as_in_numpy_in_maps(backend: str) -> None:
    parts = st.shard(st.zeros(2, device=st.devices(backend)[0]))
    for make in (lambda: st.asarray([300], dtype="int8"), lambda: st.full(2, 300, dtype="int8"),
                 lambda: st.arange(300, 302, dtype="int8")):  # fmt: skip
        with pytest.raises(OverflowError):
            st.pmap(lambda _, make=make: make(), parts)
    made = st.pmap(lambda _: st.asarray([2**53 + 1, 0.5], dtype="int64"), parts)[0]
    assert made.tolist() == [2**53 + 1, 0]


def test_numbers_that_do_not_fit_are_errors_that_name_the_operator(backend: str) -> None:
    x = st.zeros(4, dtype="int8", device=mesh_of((2,), backend))
    for name, call in {
        "asarray": lambda: st.asarray([[300]], dtype="int8"),
        "full": lambda: st.full(2, 300, dtype="int8"),
        "full_like": lambda: st.full_like(x, -129),
        "arange": lambda: st.arange(300, 302, dtype="int8"),
        "add": lambda: x + 300,
        "multiply": lambda: x.__imul__(300),
        "setitem": lambda: x.__setitem__(0, 300),
    }.items():
        with pytest.raises(st.RangeError, match=rf"^{name}: .* out of bounds for int8; use a dtype that holds it"):
            call()
    assert not x.any()
    with pytest.raises(st.ShapeError, match="asarray: copy=False, and a list has no memory to share"):
        st.asarray([1], copy=False)
    for x in np.ones(3), st.ones(3):
        with pytest.raises(
            st.ShapeError, match="asarray: copy=False, and dtype int32 of an array of float64 needs a copy"
        ):
            st.asarray(x, dtype="int32", copy=False)
    assert st.asarray(np.ones(3), dtype="float64", copy=False).dtype == "float64"


def test_a_tensor_on_one_device_is_joined_with_host_arrays(backend: str) -> None:
    a, b = array((3, 2), "float64", 1), array((3, 2), "float64", 2)
    x = st.device_put(a, mesh_of((2,), backend).flat[1])
    for join, joined in ((st.concat, np.concatenate), (st.unshard, np.concatenate), (st.stack, np.stack)):
        assert_same(join([x, b]), joined([a, b]))
        assert_same(join([b, x]), joined([b, a]))
        assert_same(join([x]), joined([a]))


def test_a_condition_without_choices_is_searched(backend: str) -> None:
    """NumPy's, CuPy's and JAX's `where` of one argument, which libraries such as scikit-learn call."""
    a = array((7, 3), "float64", 1)
    x = st.device_put(a, mesh_of((4,), backend))
    for found in (st.where(x > 0), np.where(x > 0)):
        assert isinstance(found, tuple)
        for mine, answer in zip(found, np.where(a > 0), strict=True):
            assert_same(mine, answer, exact=True)
    inside = st.pmap(lambda part: st.where(part > 0)[0], st.shard(x[:, 0]))
    for mine, part in zip(inside, st.shard(x[:, 0]), strict=True):
        assert_same(mine, np.where(np.asarray(part) > 0)[0])
    for choices in ((1.0,), (None, x), (x, None)):
        with pytest.raises(st.ArgumentTypeError, match=r"^where: x[12] is None; wanted .* or neither x1 nor x2"):
            st.where(x > 0, *choices)


def test_lists_of_tensors_are_stacked_where_they_are(backend: str) -> None:
    a = array((7, 3), "float32", 1)
    lists: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
        "tensors": (lambda x: [x, x + 1], {}),
        "a tuple": (lambda x: (x, x), {}),
        "nested": (lambda x: [[x, x], [x, -x]], {}),
        "a dtype": (lambda x: [x, x], {"dtype": "complex128"}),
        "promotion": (lambda x: [x, np.arange(21).reshape(7, 3)], {}),
        "a list of scalars": (lambda x: [x[:, 0], [1, x[5, 0], *range(5)]], {}),
        "numbers that a float does not hold": (lambda x: [x[:, 0] > 0, [2**53 + 1] * 7], {"dtype": "int64"}),
    }
    mesh = mesh_of((4,), backend)
    for name, (make, to) in lists.items():
        for home in (st.NamedSharding(mesh, st.P("x")), mesh.flat[2]):
            x = st.device_put(a, home)
            given = make(x)
            with st.transfer_guard("disallow"):
                found = st.asarray(given, **to)
            answer = np.asarray(make(a), **to)
            assert found.dtype == answer.dtype, name
            assert_same(found, answer)
            assert found.sharding.mesh == x.sharding.mesh, name
            assert found.committed, name
    x = st.device_put(a, st.NamedSharding(mesh, st.P("x")))
    with st.transfers() as log:
        assert st.asarray([x, x]).sharding == st.NamedSharding(mesh, st.P(None, "x"))
    assert not log.bytes
    assert st.asarray([x, x], device=mesh.flat[1]).device == mesh.flat[1]
    assert_same(st.jit(lambda x: st.asarray([x, 2 * x]))(x), np.asarray([a, 2 * a]))


def test_a_tensor_as_fill_value_does_not_choose_the_devices(backend: str) -> None:
    meshes = mesh_of((2,), backend), mesh_of((4,), backend)
    value = st.ones(3, device=meshes[0]).sum()
    for mesh in meshes:
        with st.use_mesh(mesh):
            assert st.full((4,), value).sharding.mesh == mesh
            assert st.full_like(np.ones(4), value).sharding.mesh == mesh


def test_manipulation_takes_scalars(backend: str) -> None:
    with st.use_mesh(mesh_of((2,), backend)):
        assert_same(st.reshape(2.5, (1, -1)), np.reshape(2.5, (1, -1)))
        assert_same(st.reshape(True, (1,), copy=True), np.array([True]))
        assert_same(st.concat([1, 2.5], axis=None), np.array([1, 2.5]))


DUNDERS = ["+", "-", "*", "/", "//", "%", "**", "@", "==", "!=", "<", "<=", ">", ">="]


@pytest.mark.parametrize("symbol", DUNDERS)
def test_python_operators(symbol: str, backend: str) -> None:
    a, b = array((3, 3), "float64", 1) + 4, array((3, 3), "float64", 2) + 4
    x, y = (st.device_put(v, mesh_of((2,), backend)) for v in (a, b))
    for left, right in [("x", "y"), ("x", "b"), ("a", "y"), ("x", "2.0"), ("2.0", "y")]:
        if symbol == "@" and "2.0" in (left, right):
            continue
        names = {"x": a, "y": b, "a": a, "b": b}
        assert_same(eval(f"{left} {symbol} {right}"), eval(f"{left} {symbol} {right}", names))


@pytest.mark.parametrize("symbol", ["&", "|", "^", "<<", ">>"])
def test_integer_operators(symbol: str, backend: str) -> None:
    a, b = array((5,), "int32", 1), np.abs(array((5,), "int32", 2))
    x = st.device_put(a, mesh_of((2,), backend))
    assert_same(eval("x " + symbol + " b"), eval("a " + symbol + " b"))
    assert_same(eval("3 " + symbol + " abs(x)"), eval("3 " + symbol + " abs(a)"))


def test_unary_and_divmod(backend: str) -> None:
    a = array((5,), "int32", 1)
    x = st.device_put(a, mesh_of((2,), backend))
    for made, answer in [(-x, -a), (+x, +a), (~x, ~a), (abs(x), abs(a))]:
        assert_same(made, answer)
    for made, answer in zip(divmod(x, 3), divmod(a, 3), strict=True):
        assert_same(made, answer)
    for made, answer in zip(divmod(3, x + 9), divmod(3, a + 9), strict=True):
        assert_same(made, answer)


@everywhere
def test_bounds_are_not_cast(backend: str) -> None:
    for dtype in ("bool", "int32", "int64", "float32"):
        host = values(dtype, 12)
        x = st.device_put(host, mesh_of((4,), backend))
        bounds = [(0.5, 1.5), (None, 1.5), (np.nan, None), (0.5, np.nan), (values("d", 12), None), (0, 1), (-1, None)]
        for low, high in bounds:
            assert_same(st.clip(x, low, high), np.clip(host, low, high))


@everywhere
@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor"])
def test_logical_functions_of_mixed_dtypes(name: str, backend: str) -> None:
    for left, right in itertools.product(["bool", "int64", "uint8", "float32", "complex64"], repeat=2):
        hosts = values(left, 12, 1), values(right, 12, 2)
        x, y = [st.device_put(host, mesh_of((4,), backend)) for host in hosts]
        assert_same(getattr(st, name)(x, y), getattr(np, name)(*hosts))
        assert_same(getattr(st, name)(x, 1j), getattr(np, name)(hosts[0], 1j))


@everywhere
def test_truth_of_complex_numbers(backend: str) -> None:
    host = values("complex128", 12)
    x = st.device_put(host, mesh_of((4,), backend))
    assert_same(st.logical_not(x), np.logical_not(host))
    assert_same(st.where(True, x, 0), np.where(True, host, 0))
    full = st.device_put(np.ones(256, bool), mesh_of((2,), backend))
    assert_same(st.vecdot(full, full), np.vecdot(np.ones(256, bool), np.ones(256, bool)))


PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "matmul": lambda x, y: x @ y,
    "matrix by vector": lambda x, y: x @ y[:, 0],
    "vector by matrix": lambda x, y: x[0] @ y,
    "tensordot": lambda x, y: np.tensordot(x, y, axes=1),
    "tensordot of pairs": lambda x, y: np.tensordot(x, y.T, axes=((1,), (1,))),
    "tensordot of a matrix and a vector": lambda x, y: np.tensordot(x, y[:, 0], axes=1),
    "tensordot of a vector and a matrix": lambda x, y: np.tensordot(x[0], y, axes=1),
    "outer tensordot": lambda x, y: np.tensordot(x, y, axes=0),
    "vecdot": lambda x, y: np.vecdot(x[0], y[:, 0]),
}


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", PRODUCTS)
def test_zero_times_nan_or_infinity_is_nan_in_every_layout(name: str) -> None:
    """This includes a shard that contracts a single element, with a matrix of one element."""
    sizes, whole = ((1, 1, 5), (3, 1, 1), (1, 4, 5), (3, 4, 1)), (st.P(), st.P("x"), st.P(None, "x"))
    numbers = (("float32", math.nan), ("complex64", math.inf))
    cases = itertools.product(USABLE, numbers, (False, True), sizes, whole, whole)
    for backend, (dtype, bad), swapped, (rows, depth, columns), left, right in spread(cases, 13):
        mesh = mesh_of((4,), backend)
        a, b = np.zeros((rows, depth), dtype), np.full((depth, columns), bad, dtype)
        if swapped:
            a, b = b.T, a.T
        x, y = st.device_put(a, st.NamedSharding(mesh, left)), st.device_put(b, st.NamedSharding(mesh, right))
        case = (backend, dtype, a.shape, b.shape, left, right)
        assert np.isnan(np.asarray(PRODUCTS[name](x, y))).all(), case
