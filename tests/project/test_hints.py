"""Names of other libraries: every hint names things that exist, its code runs, and no name with a hint exists."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import io
import pickle
import re
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import scipy.special

import shardtensor as st
from shardtensor import hint_tables, hints
from tests.layouts import everywhere, mesh_of
from tests.scripts import ROOT, new_process, output_of

CODE = re.compile(r"`([^`]+)`")
UNUSABLE = (st.BackendError,)
"""Errors of code about devices that this machine lacks."""


def namespace() -> dict[str, Any]:
    """The variables that hints use."""
    mesh = st.make_mesh((2, 2), ("x", "y"), devices=st.devices("numpy")[:4])
    x = st.device_put(np.arange(1.0, 17.0).reshape(4, 4) / 16 + np.eye(4), st.NamedSharding(mesh, st.P("x")))
    return {
        "st": st, "np": np, "pickle": pickle, "functools": functools, "scipy": scipy, "mesh": mesh, "x": x,
        "y": x.copy(), "key": st.random.key(0), "f": lambda *given: given[0], "params": {"w": x, "b": [x]},
        "i": 0, "v": 1.0, "file": io.BytesIO(), "path": io.StringIO("1\n2"),
        "cov": st.asarray(np.eye(4)),
        "pandas": types.SimpleNamespace(DataFrame=np.asarray, read_parquet=np.loadtxt),
    }  # fmt: skip


OBJECTS = {
    "ShardedTensor": "x", "Device": "mesh.flat[0]", "Mesh": "mesh", "NamedSharding": "x.sharding",
    "PartitionSpec": "x.sharding.spec", "ShapeDtypeStruct": "st.ShapeDtypeStruct((4, 4), 'float32')",
    "JitFunction": "st.jit(f)", "Lowered": "st.jit(f).lower(x)", "Compiled": "st.jit(f).lower(x).compile()",
}  # fmt: skip
"""An object of each class whose attributes have hints."""


def rows() -> Iterator[tuple[str, str, str]]:
    """Each hint with its place and its name."""
    for module, texts in hint_tables.MODULES.items():
        for name, text in texts.items():
            yield f"st.{module}".rstrip("."), name, text
    for cls, texts in hint_tables.CLASSES.items():
        for name, text in texts.items():
            yield OBJECTS[cls], name, text
    for texts in (hint_tables.ARGUMENTS, hint_tables.POSITIONAL):
        for name, text in texts.items():
            yield "arguments", name, text


ROWS = list(rows())


def run(code: str, known: dict[str, Any]) -> None:
    try:
        try:
            compiled = compile(code, "<hint>", "eval")
        except SyntaxError:
            exec(code, known)
            return
        eval(compiled, known)
    except UNUSABLE:
        pass


def test_the_code_of_each_hint_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtensor.sharding.mesh._settings", [])  # Some of it sets the mesh of the process.
    failed = []
    for place, name, text in ROWS:
        for code in CODE.findall(text):
            try:
                run(code, namespace())
            except Exception as error:
                failed.append((place, name, code, f"{type(error).__name__}: {error}"))
    assert not failed, "\n".join(map(str, failed))


def test_hints_name_only_what_exists() -> None:
    known, missing = {"st": st, "np": np, "x": namespace()["x"]}, []
    for place, name, text in ROWS:
        for root, path in re.findall(r"\b(st|np|x)((?:\.[a-zA-Z_]\w*)+)", text):
            value = known[root]
            for part in path[1:].split("."):
                if not hasattr(value, part):
                    missing.append((place, name, root + path))
                    break
                value = getattr(value, part)
                if callable(value) or isinstance(value, st.ShardedTensor):
                    break
        for page in re.findall(r"docs/\S+\.md", text):
            assert (ROOT / page).is_file(), page
    assert missing == []


def test_names_with_a_hint_do_not_exist() -> None:
    """Other libraries ask by ``hasattr`` and ``getattr`` what an array or a namespace is."""
    for module, texts in hint_tables.MODULES.items():
        place = importlib.import_module(f"shardtensor.{module}".rstrip("."))
        assert [name for name in texts if hasattr(place, name)] == []
        assert [name for name in texts if getattr(place, name, None) is not None] == []
        assert {*texts} & {*dir(place)} == set()
    assert {cls: {*names.split()} for cls, names in hints.LACKING.items()} == {
        cls: {*texts} for cls, texts in hint_tables.CLASSES.items()
    }
    for cls, texts in hint_tables.CLASSES.items():
        owner = eval(OBJECTS[cls], namespace())
        assert [name for name in texts if hasattr(owner, name) or hasattr(type(owner), name)] == []
        assert {*texts} & {*dir(owner)} == set()


def test_errors_have_the_hint() -> None:
    known = namespace()
    x = known["x"]
    for place, name, text in ROWS:
        if place == "arguments":
            continue
        owner = eval(place, {**known})
        with pytest.raises(AttributeError) as caught:
            getattr(owner, name)
        assert str(caught.value).endswith(f"has no attribute {name!r}: {hints.shown(text)}")
    with pytest.raises(AttributeError, match=r"^module 'shardtensor' has no attribute 'nonsense'$"):
        st.nonsense  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"^'ShardedTensor' object has no attribute 'nonsense'$"):
        x.nonsense  # type: ignore[attr-defined]
    for module in ("linalg", "random", "fft", "distributed", "optim", "data"):
        for name in {*getattr(st, module).__all__} - {*st.__all__, *hint_tables.MODULES[""]}:
            with pytest.raises(AttributeError, match=rf"has no attribute '{name}': use st\.{module}\.{name}$"):
                getattr(st, name)


def test_python_adds_no_guess_to_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    known = namespace()
    for code in ("st.lax", "st.random.PRNGKey", "x.numel", "mesh.axis_types", "st.arrange"):
        with pytest.raises(AttributeError) as caught:
            eval(code, known)
        sys.__excepthook__(caught.type, caught.value, None)
        assert ("Did you mean" in capsys.readouterr().err) == (code == "st.arrange"), code


# -- imports ---------------------------------------------------------------------------------------

WORKING = """
from shardtensor import P, Mesh, NamedSharding, PartitionSpec, make_mesh, shard_map, device_put, random, tree
from shardtensor.sharding import Mesh, PartitionSpec as P, NamedSharding, SingleDeviceSharding, AbstractMesh, get_mesh
from shardtensor.sharding import set_mesh, use_mesh, make_mesh, reshard, Device, auto_axes, explicit_axes
from shardtensor.distributed import process_allgather, make_array_from_callback
from shardtensor import auto_axes, explicit_axes, make_array_from_callback
import shardtensor.random, shardtensor.tree, shardtensor.linalg, shardtensor.distributed
"""

FAILING = {
    "import shardtensor.numpy as jnp": "No module named 'shardtensor.numpy': its functions are those of the package",
    "import shardtensor.numpy.linalg": "its functions are those of the package",
    "from shardtensor import numpy as jnp": "its functions are those of the package",
    "from shardtensor import lax": "cannot import name 'lax' from 'shardtensor': the collectives are st.psum",
    "from shardtensor.lax import psum": "the collectives are st.psum",
    "from shardtensor import nn": "there are no layers",
    "from shardtensor import array": "st.asarray([1, 2]) makes a tensor",
    "from shardtensor import make_jaxpr, jit": "st.jit",
    "from shardtensor.experimental.shard_map import shard_map": "st.shard_map",
    "from shardtensor.experimental import mesh_utils": "st.make_mesh",
    "from shardtensor.experimental import multihost_utils": "st.distributed",
    "from shardtensor.sharding import AxisType": "leave axis_types out",
    "from shardtensor import AxisType": "leave axis_types out",
    "from shardtensor.sharding import use_abstract_mesh": "with st.use_mesh(st.make_mesh(",
    "from shardtensor.sharding import get_abstract_mesh": "st.get_mesh()",
    "from shardtensor.sharding import PositionalSharding": "st.NamedSharding(mesh, st.P('x'))",
    "from shardtensor.tree_util import tree_map": "st.tree.map(f, params)",
    "from shardtensor.random import PRNGKey": "st.random.key(0)",
    "from shardtensor.linalg import inverse": "st.linalg.inv(x)",
}


@pytest.mark.parametrize("line", FAILING)
def test_imports_of_names_of_jax_say_what_to_write(line: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(line, {})
    assert FAILING[line] in str(caught.value)


def test_asking_for_a_module_finds_none() -> None:
    for name in ("shardtensor.nn", "shardtensor.random.PRNGKey"):
        assert importlib.util.find_spec(name) is None
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("shardtensor.nn")
    assert caught.value.name == "shardtensor.nn"
    with pytest.raises(ImportError) as raised:
        exec("from shardtensor import nn", {})
    assert type(raised.value) is ImportError
    for module in (st.linalg, st.random, st.tree):
        assert module.__spec__.submodule_search_locations == module.__path__


def test_imports() -> None:
    exec(WORKING, {})
    assert st.sharding.PartitionSpec is st.P
    for line in ("import shardtensor.nonsense", "from shardtensor import nonsense", "import shardtensor.core.nonsense"):
        with pytest.raises(ImportError) as caught:
            exec(line, {})
        assert ":" not in str(caught.value)
    code = "import sys, shardtensor, importlib; n = len(sys.meta_path); importlib.reload(shardtensor); "
    code += "print(len(sys.meta_path) - n, type(sys.meta_path[-1]).__module__)"
    assert output_of(new_process("-c", code)) == "0 shardtensor.hints\n"


# -- arguments -------------------------------------------------------------------------------------


def public_functions() -> Iterator[tuple[str, Any]]:
    for module in (st, st.random, st.linalg, st.fft, st.optim):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value


RENAMED = {"dim": "axis", "keepdim": "keepdims", "size": "shape", "dims": "axes", "ddof": "correction"}


def test_keywords_of_other_libraries_are_explained_by_every_function() -> None:
    """Each public function that has the argument under another name says so."""
    failed = []
    for name, function in public_functions():
        parameters = inspect.signature(function).parameters
        first = [None for p in parameters.values() if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            continue
        for theirs, ours in RENAMED.items():
            if ours not in parameters or theirs in parameters:
                continue
            with pytest.raises(TypeError) as caught:
                function(*first, **{theirs: 0})
            if f"it is called {ours} here" not in str(caught.value):
                failed.append((name, theirs, str(caught.value)))
    assert not failed, "\n".join(map(str, failed))


def test_arguments_are_called_as_the_table_says() -> None:
    functions = [f for _, f in public_functions()] + [st.distributed.initialize, st.data.Batches]
    taken = {name for function in functions for name in inspect.signature(function).parameters}
    assert {name for names in hint_tables.KEYWORDS.values() for name in names.split()} - taken == set()
    assert [name for name, names in hint_tables.KEYWORDS.items() if name in names.split()] == []


CALLS: dict[str, tuple[Any, str]] = {
    "sum": (lambda x: st.sum(x, keepdim=True), "sum: got an unexpected keyword argument 'keepdim'; it is called keepdims"),
    "x.sum": (lambda x: x.sum(dim=0), "sum: got an unexpected keyword argument 'dim'; it is called axis here"),
    "x.cumsum": (lambda x: x.cumsum(dim=0), "cumsum: got an unexpected keyword argument 'dim'; it is called axis here"),
    "by position": (lambda x: st.sum(x, x=1), "sum: got an unexpected keyword argument 'x'; x is given by position only"),
    "reshape": (lambda x: st.reshape(x, newshape=-1), "reshape: got an unexpected keyword argument 'newshape'; it is cal"),
    "no shape": (lambda x: st.reshape(x), "reshape: missing the argument shape"),
    "normal": (lambda x: st.random.normal(size=3), "normal: got an unexpected keyword argument 'size'; it is called shape"),
    "normal of numbers": (lambda x: st.random.normal(0.0, 1.0, 3), "by position it takes key, shape, and by name dtype="),
    "uniform": (lambda x: st.random.uniform(st.random.key(0), low=0), "write low + (high - low) * it"),
    "ones": (lambda x: st.ones(3, requires_grad=True), "'requires_grad'; leave it out: st.grad and st.value_and_grad"),
    "zeros": (lambda x: st.zeros(3, order="F"), "'order'; leave it out: the layout in memory"),
    "make_mesh": (lambda x: st.make_mesh((1,), ("x",), axis_types=0), "leave axis_types out"),
    "Mesh": (lambda x: st.Mesh(st.devices(), "x", axis_types=0), "Mesh: got an unexpected keyword argument 'axis_types'; mesh axes"),
    "AbstractMesh": (lambda x: st.AbstractMesh((1,), "x", axis_types=0), "AbstractMesh: got an unexpected keyword argument 'axis"),
    "types by position": (lambda x: st.make_mesh((1,), "x", (None,)), "make_mesh: 3 positional arguments are given; by position "
                          "it takes axis_sizes, axis_names, and by name devices=; mesh axes have no types"),
    "axis_name": (lambda x: st.pmap(len, "i"), "pmap: argument 0 is a str; wanted an array, or None for it in in_axes, or axis_na"
                  "me='i' if it is the name of the axis"),
    "src": (lambda x: st.device_put(x, None, src=x.device), "device_put: got an unexpected keyword argument 'src'; leave it out"),
    "a process": (lambda x: st.local_devices(process_index=0), "use [d for d in st.devices() if d.process_index == 0]"),
    "reshard": (lambda x: st.reshard(x, out_shardings=st.P()), "'out_shardings'; it is called sharding here"),
    "a constraint": (lambda x: st.with_sharding_constraint(x, shardings=st.P()), "'shardings'; it is called sharding here"),
    "a key": (lambda x: st.random.key(0, impl="rbg"), "key: got an unexpected keyword argument 'impl'; leave it out"),
    "vjp": (lambda x: st.vjp(st.exp, x, saveable_args=()), "vjp: got an unexpected keyword argument 'saveable_args'; leave it out"),
    "local_device_ids": (lambda x: st.distributed.initialize(local_device_ids=0), "initialize: got an unexpected keyword argument '"
                         "local_device_ids'; CUDA_VISIBLE_DEVICES chooses GPUs"),
    "exp": (lambda x: st.exp(x, out=x), "'out'; write the result: x[...] = st.exp(y)"),
    "a composition": (lambda x: st.median(x, dim=0), "median: got an unexpected keyword argument 'dim'; it is called ax"),
    "a misprint": (lambda x: st.sum(x, axsi=0), "sum: got an unexpected keyword argument 'axsi'; did you mean axis?"),
    "nonsense": (lambda x: st.exp(x, nonsense=0), "exp: got an unexpected keyword argument 'nonsense'; it takes x"),
    "device_put": (lambda x: st.device_put(x, sharding=x.sharding), "it is called device here"),
    "jit": (lambda x: st.jit(len, static_args=0), "it is called static_argnums here"),
    "a loader": (lambda x: st.data.Batches(x, batch_size=2), "Batches: got an unexpected keyword argument 'batch_size'; it "
                 "is called batch here"),
    "no batch": (lambda x: st.data.Batches(x), "Batches: missing the argument batch; it takes source, batch, key, shuffle"),
    "steps": (lambda x: st.accumulate(st.grad(len), every_k_schedule=2), "accumulate: got an unexpected keyword argument 'eve"
              "ry_k_schedule'; it is called n here"),
    "betas": (lambda x: st.optim.adamw(1e-3, betas=(0.9, 0.95)), "'betas'; b1= and b2= are two arguments: st.optim.adam(1e-3"),
    "a device": (lambda x: st.zeros(3, device="cuda:1"), "'cuda:1' is a str; wanted a Device, a Mesh, a NamedSharding or "
                 "a P; st.devices('cupy')[1] is such a device, and st.devices('cupy') are all of them"),
    "the host": (lambda x: st.device_put(x, "cpu"), "st.devices('numpy')[0] is such a device"),
    "a backend": (lambda x: st.devices("gpu"), "st.devices('cupy')[0] is such a device"),
    "another": (lambda x: st.devices("tpu"), "st.devices() lists the devices"),
    "initialize": (lambda x: st.distributed.initialize(rank=0), "'rank'; it is called process_id here"),
    "save": (lambda x: st.save(x, "f.npy"), "save: arr is the path 'f.npy'; the file comes first: st.save('f.npy', x)"),
    "missing": (lambda x: st.maximum(x), "maximum: missing the argument x2; it takes x1, x2"),
    "a key with a dtype": (lambda x: st.random.key(0, dtype="f4"), "'dtype'; leave it out: keys are no arrays: st.random.key(0)"),
    "all missing": (lambda x: st.add(), "add: missing the arguments x1 and x2; it takes x1, x2"),
    "names of positions": (lambda x: st.add(x1=1, x2=2), "add: got an unexpected keyword argument 'x1'; x1 is given by po"),
    "missing in hinted": (lambda x: st.make_mesh(axis_names=("x",)), "make_mesh: missing the argument axis_sizes; it takes axis_s"),
    "a mesh with a name": (lambda x: st.Mesh(name="mesh", shape=(2, 2)), "Mesh: got an unexpected keyword argument 'name'; leave "
                           "it out: operators have no names, and neither have meshes: st.make_mesh((2, 2))"),
    "a mesh of devices only": (lambda x: st.Mesh(x.sharding.mesh.devices), "Mesh: missing the argument axis_names; it takes devices"),
    "a client": (lambda x: st.num_shards(client="cuda"), "num_shards: got an unexpected keyword argument 'client'; it is called back"),
    "a type": (lambda x: st.zeros(3, type="f4"), "zeros: got an unexpected keyword argument 'type'; it is called dtype here"),
    "names of dimensions": (lambda x: st.asarray([1], names=["x"]), "'names'; leave it out: the dimensions of a tensor have numbers"),
    "keep_axes": (lambda x: x.sum(keep_axes=True), "sum: got an unexpected keyword argument 'keep_axes'; it is called keepdims"),
    "a default backend": (lambda x: st.ones(3, backend="cupy"), "ones: got an unexpected keyword argument 'backend'; it is called dev"),
    "jit with shardings of inputs": (lambda x: st.jit(len, input_shardings=[]), "it is called in_shardings here"),
    "shard_jit with in_shardings": (lambda x: st.shard_jit(len, x.sharding.mesh, in_shardings=[]), "it is called input_shardings here"),
    "by name only": (lambda x: st.ones((2, 2), "float32", x.sharding), "ones: 3 positional arguments are given; by position "
                     "it takes shape, dtype, and by name device=, out_sharding="),
    "of a method": (lambda x: x.cumsum(0, None, None, 1), "cumsum: 4 positional arguments are given; by position it takes axis, d"),
    "twice": (lambda x: st.random.normal(st.random.key(0), key=1), "normal: key is given twice, by position and by name"),
    "concat": (lambda x: st.concat(x, x), "concat: axis is a ShardedTensor; wanted a Python value, such as a number; the "
               "arrays go in a list: st.concat([x, y])"),
    "stack": (lambda x: st.stack(x, x, x), "by position it takes arrays, axis; the arrays go in a list: st.stack([x, y])"),
    "max": (lambda x: st.max(x, x), "st.maximum(x, y) compares two arrays"),
    "sizes": (lambda x: st.zeros(3, 4), "zeros: dtype is 4; wanted a NumPy dtype, such as 'float32'; a shape of several si"),
    "pmap donates": (lambda x: st.pmap(len, donate_argnums=0), "st.pmap takes donate=True"),
    "auto": (lambda x: st.shard_map(len, auto=()), "axis_names= names the axes"),
    "shard": (lambda x: st.shard(x, x.sharding.mesh), "shard: axis is a Mesh; the devices are given by name: devices="),
    "shards": (lambda x: st.sin(st.shard(x)), "sin: an operand is a list of shards, which st.unshard(shards) joins"),
    "shards in a method": (lambda x: x.dot(st.shard(x)), "st.unshard"),
    "shards drawn": (lambda x: st.visualize_sharding(st.shard(x)), "a list of shards, which st.unshard(shards) joins"),
    "frames": (lambda x: st.mean(pytest.importorskip("pandas").DataFrame({"a": [1.0, 2.0]})), "mean: an operand is a Data"
               "Frame, which st.asarray converts"),
    "view": (lambda x: x.view(2, 8), "view: a shape is given; x.reshape(shape) returns a view of that shape"),
    "view of -1": (lambda x: x.view(-1), "view: a shape is given"),
    "transpose": (lambda x: x.transpose(1), "transpose: axes=(1,) names 1 of x's 2 dimensions"),
    "eye": (lambda x: st.eye(2.0), "eye: n_rows is 2.0; wanted an integer"),
    "scipy": (lambda x: scipy.special._ufuncs.expit(x), "scipy.special.expit takes tensors if SCIPY_ARRAY_API=1 is set"),
    "load Parquet": (lambda x: st.load(io.BytesIO(b"PAR1" + bytes(20))), "st.asarray(pandas.read_parquet(path)) reads tab"),
    "load": (lambda x: st.load(io.BytesIO(b"1,2,3,4\n5,6,7,8")), "st.asarray(np.loadtxt(path)) reads text, with delimiter=','"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_other_libraries_have(name: str) -> None:
    call, words = CALLS[name]
    with pytest.raises(st.ShardTensorError) as caught:
        call(st.ones((4, 4)))
    assert words in str(caught.value)


def test_errors_of_functions_that_are_called_stay_as_they_are() -> None:
    def mapped(part: Any) -> Any:
        return part.sum(keepdim=True)  # NumPy's own array

    with pytest.raises(TypeError) as caught:
        st.pmap(mapped, st.ones(4))
    assert not isinstance(caught.value, st.ShardTensorError)
    with pytest.raises(TypeError, match="required positional argument: 'part'"):
        st.jit(mapped)()


def test_signatures_are_those_of_the_declarations() -> None:
    for name, op in st.OPS.items():
        declared = inspect.signature(op.dispatch.__wrapped__)  # type: ignore[attr-defined]
        assert inspect.signature(op.dispatch, follow_wrapped=False) == declared, name
    assert inspect.getfullargspec(st.add).args == ["x1", "x2"]
    assert inspect.getfullargspec(st.add).varkw is None


def test_statements_that_other_objects_support() -> None:
    x = st.ones((4, 4))
    with pytest.raises(AttributeError, match=r"st\.delete\(x, 0, axis=0\) returns another one"):
        del x[0]
    with pytest.raises(AttributeError, match=r"with st\.use_mesh\(mesh\): \.\.\."), x.sharding.mesh:
        pass
    assert repr(st.pmap(len)) == "<pmap of len>"


# -- what exists -----------------------------------------------------------------------------------


@everywhere
def test_names_of_jax_that_exist(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    host = {"w": np.arange(8.0), "b": [np.arange(3), 2], "none": None}
    found = st.device_get({**host, "w": st.device_put(host["w"], mesh)})
    assert type(found["w"]) is np.ndarray
    assert np.array_equal(found["w"], host["w"])
    assert found["b"] is not None
    assert found["b"][1] == 2
    assert found["none"] is None
    assert st.device_get(st.asarray(3, device=mesh)).shape == ()
    assert st.pmap(lambda part: type(st.device_get(part)).__name__ == "ndarray", st.shard(np.arange(4), devices=mesh))
    assert st.local_device_count(backend) == len(st.local_devices(backend)) == st.num_shards(backend)
    assert (st.process_index(), st.process_count()) == (0, 1)


def test_trees() -> None:
    tree = {"b": 1, "a": (2, None), "c": [3]}
    found, structure = st.tree.flatten(tree)
    assert found == st.tree.leaves(tree) == [2, 1, 3]
    assert st.tree.structure(tree) == structure
    assert st.tree.unflatten(structure, [4, 5, 6]) == {"b": 5, "a": (4, None), "c": [6]}
    assert st.tree.map(lambda *xs: sum(xs), tree, tree, tree) == {"b": 3, "a": (6, None), "c": [9]}
    assert st.tree.map(len, {"a": (1, 2)}, is_leaf=lambda x: isinstance(x, tuple)) == {"a": 2}
    assert st.tree.map(lambda x, entry: entry, {"a": 1}, {"a": [1, 2]}) == {"a": [1, 2]}
    with pytest.raises(st.ArgumentError, match=r"^tree.map: the trees have different structures: "):
        st.tree.map(lambda x, y: x, {"a": 1}, {"b": 1})
    with pytest.raises(st.ArgumentError, match=r"^tree.unflatten: there are 1 leaves; wanted 3"):
        st.tree.unflatten(structure, [1])


def test_trees_are_those_of_jax() -> None:
    jax = pytest.importorskip("jax")
    trees: list[Any] = [{"b": 1, "a": (2, None)}, [], None, 3, ({"x": [1, {}]},)]
    for tree in trees:
        assert st.tree.leaves(tree) == jax.tree.leaves(tree)
        assert st.tree.map(lambda x: x + 1, tree) == jax.tree.map(lambda x: x + 1, tree)


# -- other libraries -------------------------------------------------------------------------------

TYPED: Mapping[str, str] = {
    "numpy": (
        "array asanyarray ascontiguousarray asfortranarray copy copyto dtype errstate float double fromfile fromiter "
        "frombuffer isscalar issubdtype loadtxt genfromtxt matrix ma may_share_memory memmap ndarray ndenumerate ndim "
        "ndindex nditer poly1d put r_ row_stack s_ savetxt set_printoptions shape shares_memory single size vectorize"
    ),
    "numpy.random": (
        "seed default_rng rand randn randint random random_sample standard_normal shuffle get_state RandomState lognormal"
    ),
    "numpy.ndarray": "byteswap ctypes data dump dumps getfield resize setfield",
    "jax": (
        "Array block_until_ready checkpoint clear_caches config custom_vjp debug default_backend default_device "
        "device_get experimental grad jit jvp lax live_arrays local_device_count make_jaxpr nn "
        "numpy process_count process_index profiler pure_callback scipy tree tree_util value_and_grad vjp "
        "make_array_from_callback make_array_from_process_local_data make_array_from_single_device_arrays "
        "device_put_sharded device_put_replicated shard_map set_mesh typeof reshard xmap"
    ),
    "jax.sharding": "PositionalSharding auto_axes use_abstract_mesh AbstractMesh AxisType Mesh NamedSharding PartitionSpec SingleDeviceSharding get_abstract_mesh",
    "jax.lax": (
        "associative_scan cond dynamic_slice dynamic_update_slice eq fori_loop iota map mul rsqrt scan stop_gradient "
        "switch top_k while_loop psum pmean all_gather ppermute axis_index all_to_all psum_scatter select"
    ),
    "jax.random": "PRNGKey key split fold_in normal uniform randint permutation bernoulli categorical choice bits gumbel",
    "jax.tree": "map leaves flatten unflatten structure reduce all",
    "nx": (
        "add all_close as_type backend_copy backend_transfer concatenate conjugate covariance cumulative_max "
        "default_backend Defn defn dot fft gather global_default_backend ifft indexed_add indexed_put iota is_nan LinAlg "
        "make_diagonal negate new_axis product put_slice quotient rank Random reduce_max reverse select shape "
        "shard_jit size slice slice_along_axis sort standard_deviation take take_diagonal to_batched to_flat_list "
        "to_number top_k type variance weighted_mean window_max window_mean window_sum with_default_backend"
    ),
    "nx.random": "fold_in key normal normal_split randint shuffle split uniform",
    "nx.linalg": "adjoint cholesky determinant eigh invert least_squares norm qr solve svd triangular_solve",
    "torch": (
        "Tensor as_tensor bmm cat chunk clamp compile cuda device div einsum eq erf flatten float from_numpy gather ge "
        "index_select inference_mode inverse is_tensor lt manual_seed masked_select mm mul ne neg no_grad norm numel "
        "optim permute rand randint randn randperm relu repeat_interleave rsqrt scatter set_default_dtype sigmoid "
        "softmax sub t tensor_split unbind unsqueeze view_as_real"
    ),
    "torch.Tensor": (
        "abs add_ backward bfloat16 bool chunk clamp clone contiguous copy_ cpu cuda detach dim double element_size eq "
        "exp expand expand_as fill_ float gather grad half index_select int is_cuda log long masked_fill masked_fill_ "
        "matmul mm mul_ new_zeros norm numel numpy permute pin_memory pow relu requires_grad requires_grad_ scatter_ "
        "sigmoid softmax split sqrt stride sub_ t tanh to topk type type_as unbind unsqueeze view_as where zero_"
    ),
}
"""Names that people type, by where they come from."""

UNEXPLAINED = {"view_as_real"}


def test_common_names_of_other_libraries_exist_or_have_a_hint() -> None:
    x, count, lacking = st.ones((2, 2)), 0, set()
    for origin, names in TYPED.items():
        module = origin.partition(".")[2]
        place = module if module in hint_tables.MODULES else ""
        owner = x if module in ("ndarray", "Tensor") else importlib.import_module(f"shardtensor.{place}".rstrip("."))
        for name in names.split():
            count += 1
            try:
                getattr(owner, name)
            except AttributeError as error:
                if ": " not in str(error):
                    lacking.add(name)
    assert lacking == UNEXPLAINED
    assert count > 150


def test_hints_cost_nothing_while_names_are_found() -> None:
    """A class with ``__getattr__`` would make each look-up of an attribute slower."""
    assert not hasattr(st.ShardedTensor, "__getattr__")
    code = "import sys, shardtensor as st; st.zeros(3).sum(); print({'difflib', 'shardtensor.hint_tables'} & {*sys.modules})"
    assert output_of(new_process("-c", code)) == "set()\n"
    assert [type(finder).__module__ for finder in sys.meta_path].count("shardtensor.hints") == 1
