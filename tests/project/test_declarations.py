"""An operator is one declaration, from which its export, protocols and tests follow."""

from __future__ import annotations

import ast
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend import function_of
from shardtensor.backend.registry import load
from shardtensor.core import OPS, bind_into, operator
from shardtensor.functions.standard.elementwise import add, divide, multiply
from shardtensor.host.memory_pool import POOLED_FROM
from shardtensor.tensor.tensor import ArrayLike
from tests.cases import CASES, elementwise_cases
from tests.conftest import NO_TORCH
from tests.functions.test_operators import sweep
from tests.layouts import array, assert_same, everywhere, mesh_of
from tests.scripts import new_process, output_of

PACKAGE = Path(st.__file__).parent
ELEMENTWISE = PACKAGE / "functions" / "elementwise.py"


def exp2() -> Callable[..., Any]:
    """A function that every library has."""

    @operator("... -> ...")
    def exp2(x: ArrayLike, /) -> st.ShardedTensor: ...

    return exp2


def degrees() -> Callable[..., Any]:
    """A function that NumPy has and PyTorch lacks."""

    @operator("... -> ...", composed=lambda x: multiply(x, 180 / math.pi))
    def degrees(x: ArrayLike, /) -> st.ShardedTensor: ...

    return degrees


def midpoint() -> Callable[..., Any]:
    """A function that no library has, and for which NumPy has no ufunc that determines dtypes."""

    @operator("..., ... -> ...", composed=lambda x1, x2: divide(add(x1, x2), 2))
    def midpoint(x1: ArrayLike, x2: ArrayLike, /) -> st.ShardedTensor: ...

    return midpoint


@pytest.fixture(params=[exp2, degrees, midpoint], ids=lambda declare: declare.__name__)
def declared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A new operator, which exists during one test, in place of the library's own one if that has the same name."""
    before, names = dict(OPS), set(globals())
    OPS.pop(request.param.__name__, None)
    function = request.param()
    monkeypatch.setitem(CASES, function.__name__, elementwise_cases(function.__name__))
    yield function
    del OPS[function.__name__]
    OPS.update({name: op for name, op in before.items() if name == function.__name__})
    assert before == OPS
    assert set(globals()) == names  # A declaration inside of a function is in no module's `__all__`.


def on_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    name = function.__name__
    return getattr(np, name, lambda x1, x2: np.divide(np.add(x1, x2), 2))


def operands(function: Callable[..., Any], count: int, dtype: str = "float64") -> list[np.ndarray]:
    return [array((count,), dtype, seed) for seed in range(len(OPS[function.__name__].operands))]


@everywhere
def test_a_new_operator_gives_numpys_result_under_every_sharding(declared: Any, backend: str) -> None:
    sweep(declared.__name__, backend, 25)


def test_the_libraries_of_these_tests_lack_functions() -> None:
    if NO_TORCH:
        pytest.skip(NO_TORCH)
    assert not hasattr(load("torch").xp, "degrees")
    assert not hasattr(load("torch").xp, "cbrt")
    assert not hasattr(np, "midpoint")
    with pytest.raises(st.BackendError, match="midpoint: backend 'torch' has no such function; use another backend"):
        function_of(load("torch"), "midpoint")


@everywhere
def test_a_new_operator_is_inferred(declared: Any, backend: str) -> None:
    mesh = mesh_of((2,), backend)
    for dtype in ("bool", "int8", "int64", "float16", "float32", "float64"):
        xs = [st.device_put(x, st.NamedSharding(mesh, st.P("x"))) for x in operands(declared, 7, dtype)]
        inferred, made = st.eval_shape(declared, *xs), declared(*xs)
        assert inferred == st.ShapeDtypeStruct(made.shape, made.dtype, made.sharding)
        assert_same(made, on_numpy(declared)(*operands(declared, 7, dtype)))


@everywhere
def test_a_new_operator_runs_on_arrays_of_mapped_functions(declared: Any, backend: str) -> None:
    mesh, kinds = mesh_of((3,), backend), set()

    def mapped(*xs: Any) -> Any:
        made = declared(*xs)
        kinds.add(type(made) is type(xs[0]))
        assert st.current_device() in mesh.flat
        return made

    for dtype in ("int64", "float16", "float32", "float64"):
        hosts = operands(declared, 8, dtype)
        made = st.unshard(st.pmap(mapped, *[st.shard(x, devices=mesh) for x in hosts]))
        assert_same(made, on_numpy(declared)(*hosts))
        assert kinds == {True}


@everywhere
def test_a_new_operator_writes_in_place(declared: Any, backend: str) -> None:
    """Into another tensor, into a view, into an operand, through a mask, and into one element."""
    mesh, op, wanted = mesh_of((3,), backend), OPS[declared.__name__], on_numpy(declared)
    hosts = operands(declared, 9)
    rest = hosts[1:]
    x, *others = [st.device_put(h, mesh) for h in hosts]
    out = st.zeros(9, device=mesh)
    bind_into(out, op, (x, *others), ())
    assert_same(out, wanted(*hosts))
    bind_into(out[::-2], op, (x[::2], *[y[::2] for y in others]), ())
    assert_same(out[::-2], wanted(*[h[::2] for h in hosts]))
    before = st.asarray(x, copy=True)
    bind_into(x, op, (x, *others), ())
    assert_same(x, wanted(*hosts))
    assert_same(before, hosts[0])
    expected = wanted(*hosts)
    x[4] = declared(x[4], *[y[4] for y in others])
    expected[4] = wanted(expected[4], *[h[4] for h in rest])
    assert_same(x, expected)
    narrow = st.zeros(9, dtype="float32", device=mesh)
    bind_into(narrow, op, (before, *others), ())
    assert_same(narrow, wanted(*hosts).astype("float32"))


def test_a_new_operator_computes_large_arrays_in_blocks(declared: Any, backend: str) -> None:
    hosts = operands(declared, 2 * POOLED_FROM // 8 + 5)
    xs = [st.device_put(h, mesh_of((4,), backend)) for h in hosts]
    assert_same(declared(*xs), on_numpy(declared)(*hosts))


@everywhere
def test_a_new_operator_takes_scalars_and_lists_of_numpys_protocols(declared: Any, backend: str) -> None:
    mesh, hosts = mesh_of((2,), backend), operands(declared, 5)
    x = st.device_put(hosts[0], mesh)
    assert_same(declared(x, *[2.5] * (len(hosts) - 1)), on_numpy(declared)(hosts[0], *[2.5] * (len(hosts) - 1)))
    assert_same(declared(*[3] * len(hosts)), np.asarray(on_numpy(declared)(*[3] * len(hosts))))
    if OPS[declared.__name__].is_ufunc:
        ufunc = getattr(np, declared.__name__)
        assert_same(ufunc(x), ufunc(hosts[0]))
        assert ufunc(x, out=x) is x
        assert_same(x, ufunc(hosts[0]))


def test_dtypes_that_numpys_ufunc_refuses_are_errors(backend: str) -> None:
    for z in (np.ones(3, "complex64"), st.device_put(np.ones(3, "complex64"), mesh_of((2,), backend))):
        with pytest.raises(st.ArgumentTypeError, match=r"^cbrt: does not take complex64"):
            st.cbrt(z)


def test_compositions_are_pure() -> None:
    @operator("... -> ...", composed=lambda x: bind_into(x, OPS["add"], (x, 1), ()))
    def impure(x: ArrayLike, /) -> st.ShardedTensor: ...

    try:
        with pytest.raises(st.ArgumentTypeError, match="add: writes into a tensor inside a composition"):
            impure(st.ones(3))
    finally:
        del OPS["impure"]


# -- the declaration in the source -----------------------------------------------------------------


def test_an_operator_is_one_declaration_of_six_lines() -> None:
    assert ROW.count("\n") == 6
    tree = ast.parse(ELEMENTWISE.read_text())
    (node,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "cbrt"]
    assert node.end_lineno == node.decorator_list[0].lineno + 5


(ROW,) = re.findall(r"```python\n(.*?)```", (PACKAGE.parent / "docs" / "adding_an_operator.md").read_text(), re.DOTALL)

PROGRAM = """
import pydoc
import numpy as np
import shardtensor as st

x = st.asarray([-3.0, 1.0])
assert st.__file__.startswith({root!r}), st.__file__
assert st.softsign(x).tolist() == [-0.75, 0.5]
assert "softsign" in st.__all__ and dir(st) == sorted(st.__all__)
assert "softsign(x:" in pydoc.plain(pydoc.render_doc(st))
assert not {{"np", "operator", "implements", "annotations", "ArrayLike"}} & set(vars(st))
"""


@pytest.fixture
def extended(tmp_path: Path) -> Path:
    """A copy of the package whose table of elementwise functions has one row more."""
    shutil.copytree(PACKAGE, tmp_path / "shardtensor")
    with (tmp_path / "shardtensor" / "functions" / "elementwise.py").open("a") as file:
        file.write(f"\n\n{ROW}")
    return tmp_path


def test_a_row_of_the_table_is_exported(extended: Path) -> None:
    """Type checkers see it, too: see `test_types`."""
    path = f"{extended}:{PACKAGE.parent / 'backends'}"
    output_of(new_process("-c", PROGRAM.format(root=str(extended)), cwd=extended, PYTHONPATH=path))


def test_a_name_is_declared_once() -> None:
    with pytest.raises(st.ArgumentError, match="operator: exp is declared already; wanted another name"):

        @operator("... -> ...")
        def exp(x: Any, /) -> Any: ...

    assert OPS["exp"].dispatch is st.exp


def test_errors_name_the_function_that_was_called() -> None:
    x = st.ones(3)
    for call in (st.nansum, st.nancumsum, st.nanmean, st.nanvar, st.nanargmax, st.cumulative_sum):
        with pytest.raises(st.AxisError, match=f"{call.__name__}: axis 5 is out of range"):
            call(x, axis=5)
    with pytest.raises(st.AxisError, match="percentile: axis 5 is out of range"):
        st.percentile(x, 20, axis=5)
    with pytest.raises(st.ShapeError, match="hstack: array 1 has shape"):
        st.hstack([st.ones((2, 2)), st.ones((3, 3))])
