"""`st.eval_shape`: the layouts of results without elements, compared with the eager interpreter's."""

from __future__ import annotations

import pickle
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor import tensor
from shardtensor.core import OPS, interpreting
from shardtensor.functions.standard.indexing import setitem
from shardtensor.interpreters.infer import INFER
from shardtensor.interpreters.views.views import stand_in
from shardtensor.tensor.pytree import leaves
from tests.cases import CASES, sharded_somehow
from tests.draws import drawn
from tests.layouts import USABLE, array, everywhere, mesh_of

DATA_DEPENDENT = {"take_along_axis", *[name for name, op in OPS.items() if op.parts.announcing]}
"""Operators whose transfers depend on the elements, which are inferred as for elements in random order."""

OPERATORS = sorted(set(CASES) - {name for name, op in OPS.items() if "escapes" in op.tags})


def layouts(result: Any) -> list[Any]:
    """Returns the shape, dtype, sharding and placement of every tensor in a result."""
    return [(x.shape, x.dtype, x.sharding, x.committed) if hasattr(x, "sharding") else x for x in leaves(result)]


def outcome(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return layouts(call())
        except st.ShardTensorError as error:
            return type(error), str(error)


def totals(*logs: st.TransferLog) -> Counter[Any]:
    """Returns the bytes of a log by operator, axis, source and destination."""
    found: Counter[Any] = Counter()
    for log in logs:
        for record in log:
            if record.source != record.destination and record.bytes:
                found[record.operator, record.axis, record.source, record.destination] += record.bytes
    return found


def examples(name: str, full: int) -> Callable[[Any], Any]:
    """Sets the examples of an operator: in the fast tier three, of which the first one is the simplest, and two of
    operators whose layouts follow from a pattern of subscripts. Operators have examples of their own.
    """
    settings = hypothesis.settings(max_examples=drawn(full, fast=2 if isinstance(OPS[name].rule, str) else 3))
    return lambda test: hypothesis.seed(zlib.crc32(name.encode()))(settings(test))


def some_backend(data: Any) -> str:
    """Draws a backend, mostly one of those that have no library below them but NumPy."""
    return str(data.draw(some.sampled_from(["numpy", "checked", *USABLE])))


@pytest.mark.parametrize("name", OPERATORS)
def test_inferred_layouts_and_transfers_are_those_of_the_eager_interpreter(name: str) -> None:
    @examples(name, 60)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        made = CASES[name](data)
        operands = sharded_somehow(data, made, some_backend(data))
        function = OPS[name].dispatch
        given = [stand_in(x) for x in operands]  # of views that have not been read
        with st.transfers() as sent:
            wanted = outcome(lambda: made.run(function, operands))
        found = outcome(lambda: st.eval_shape(lambda xs: made.run(function, xs), operands))
        assert found == wanted
        with st.transfers() as inferred, interpreting(INFER):
            outcome(lambda: made.run(function, given))
        if name not in DATA_DEPENDENT:
            assert totals(inferred) == totals(sent)

    run()


def split(backend: str, shape: tuple[int, ...] = (10, 6), dtype: str = "float32") -> st.ShardedTensor:
    mesh = mesh_of((2, 2), backend)
    return st.device_put(array(shape, dtype, 1), st.NamedSharding(mesh, st.P(*mesh.axis_names[: len(shape)])))


def step(x: Any, w: Any) -> Any:
    """Views, writes through views, reductions, products with a split contraction, lists and creation functions."""
    y = st.zeros_like(x)
    y[1:] = x[:-1] * 2
    y[0] += 1
    y[y.shape[0] // 2, ::2] = [1, 2, 3]
    y.T[-1] -= 0.5
    np.multiply(y, 2, out=y)
    h = st.tanh(y @ w)
    parts = [part.sum(axis=0) for part in st.unstack(h, axis=1)]
    return {
        "loss": st.mean(h),
        "rows": st.stack(parts),
        "flat": h.reshape(-1)[3:],
        "one": h[2, 1],
        "same": y,
        "text": "!",
    }


@everywhere
def test_programs(backend: str) -> None:
    x, w = split(backend), split(backend, (6, 4))
    before = np.array(x)
    wanted = step(x, w)
    found = st.eval_shape(step, x, w=w)
    assert found["text"] == "!"
    del found["text"], wanted["text"]
    assert layouts(found) == layouts(wanted)
    assert all(isinstance(leaf, st.ShapeDtypeStruct) for leaf in leaves(found))
    np.testing.assert_array_equal(x, before)


def is_array(x: Any) -> bool:
    """Whether a 0-d tensor is an array, which can be written, and not a scalar."""
    try:
        x[...] = 0
    except st.ArgumentTypeError:
        return False
    return True


SAME: dict[str, Callable[[Any], Any]] = {
    "arrays": lambda x: [
        is_array(made)
        for made in (
            st.asarray(1), st.asarray(x.sum()), st.asarray(x.sum(), copy=True), st.asarray(x.sum(), dtype="int8"),
            st.asarray(x.sum(), device=x.device), st.reshard(x.sum(), x.device), st.device_put(x.sum(), x.device),
            x.sum().copy(), np.copy(x.sum()), x[0, 0], x[0, 0, ...], x[np.array(0), 0], x[np.array(0), 0, ...],
            x.sum().astype("int8"), st.asarray(1).astype("int8"), st.where(x.sum() > 0, x.sum(), x.max()),
            st.where(True, x.sum(), x.max()), st.broadcast_to(x.sum(), ()), st.broadcast_to(1, ()),
            x.sum().reshape(()), x.sum().real, st.flip(st.asarray(1)), x[:1, :1].squeeze(),
            setitem(st.asarray(1), 2, ...),
        )
    ],
    "scalars are replaced": lambda x: x.sum().astype("int32").__iadd__(1.5),
    "arrays are written": lambda x: st.asarray(1).__iadd__(1.5),
    "device_put": lambda x: [st.device_put({"x": x, "a": np.ones(3), "1": 1}), st.device_put(x.T, x.device)],
    "histograms": lambda x: [
        st.histogram(x), st.histogram(x, 3, weights=x), st.histogram2d(x[0], x[1], 3), st.histogramdd(x, 2),
        st.histogram_bin_edges(x.astype("float32"), 4), st.histogram(x.astype("int8"), density=True),
    ],
    "batches": lambda x: [st.to_batched_list(x, 4), st.to_batched_list(np.ones((5, 2)), 3, leftover="repeat")],
    "views of views": lambda x: [x.T[1:].T.reshape(-1), x.T.ravel(), x[::2].reshape(2, -1), x.T.reshape(4, 15)],
    "no view": lambda x: x.T.reshape(-1, copy=False),
    "no view of a row": lambda x: x[:, 1:].reshape(-1, copy=False),
    "integers as an index": lambda x: [x[st.asarray([0, 1])], x[st.argmax(x, axis=0)], x[:0][st.zeros(0, dtype=int)]],
    "written at integers": lambda x: x.__setitem__(st.argmax(x, axis=0), 1),
    "asarray of a list": lambda x: st.asarray([1], copy=False),
    "asarray of another dtype": lambda x: st.asarray(x, dtype="int8", copy=False),
    "reshard of a list": lambda x: st.reshard([1, 2], x.device),
    "both": lambda x: st.reshard(x, x.device, donate=True, may_alias=True),
    "overflow": lambda x: st.zeros(3, dtype="int8").__iadd__(300),
    "overflow of an element": lambda x: st.zeros(3, dtype="int8").__setitem__(0, 300),
    "overflow of a scalar": lambda x: st.zeros(3, dtype="int8") + 300,
    "results of maps": lambda x: [y.reshape(-1, copy=False) for y in st.pmap(lambda b: b.T, st.shard(x))],
    "arrays and results of maps": lambda x: is_array(st.pmap(lambda b: st.asarray(3.0), st.shard(x))[0]),
    "repr": lambda x: [type(repr(y)) for y in (x, x.T, x.sum())],
}  # fmt: skip


@pytest.mark.parametrize("name", list(SAME))
def test_results_and_errors_are_those_of_the_eager_interpreter(name: str, backend: str) -> None:
    function = SAME[name]
    assert outcome(lambda: st.eval_shape(function, split(backend))) == outcome(lambda: function(split(backend)))


def donated(x: Any) -> Any:
    st.reshard(x, x.device, donate=True)
    return x


def view_of_donated(x: Any) -> Any:
    view = x[1:]
    donated(x)
    return view


DONATED: dict[str, Callable[[Any], Any]] = {
    "an operand": lambda x: donated(x) + 1,
    "a reduction": lambda x: donated(x).sum(),
    "one of several": lambda x: st.clip(x * 1, donated(x), 1),
    "a list": lambda x: st.concat([x * 1, donated(x)]),
    "a view": lambda x: donated(x).T,
    "an element": lambda x: view_of_donated(x)[0, 0],
    "an operand that is a view": lambda x: view_of_donated(x) + 1,
    "a view of a view": lambda x: view_of_donated(x)[1:],
    "a transfer": lambda x: st.reshard(donated(x), x.device),
    "a transferred view": lambda x: st.reshard(view_of_donated(x), x.device),
    "the shape only": lambda x: st.zeros_like(donated(x)),
    "a fill value": lambda x: st.full_like(x, donated(x)),
    "written": lambda x: donated(x).__setitem__(0, 1),
    "a written view": lambda x: view_of_donated(x).__iadd__(1),
    "a value": lambda x: (x * 1).__setitem__(slice(1, None), view_of_donated(x)),
    "a value for nothing": lambda x: x.copy()[:0].__setitem__(..., donated(x)[:0] if x.size == 0 else donated(x * 1)),
    "an argument of a map": lambda x: st.pmap(lambda b: b * 2, [donated(x)], devices=x.device.flat[:1]),
    "of a map": lambda x: [st.pmap(lambda b: b * 2, parts := st.shard(x, devices=x.device), donate=True), parts[0] + 1],
}


@pytest.mark.parametrize("name", list(DONATED))
def test_donated_tensors_raise_as_they_do_otherwise(name: str, backend: str) -> None:
    wanted = outcome(lambda: DONATED[name](split(backend)))
    x = split(backend)
    simulated = st.empty_like(x, device=st.NamedSharding(st.AbstractMesh((2, 2), ("x", "y")), x.sharding.spec))
    found = outcome(lambda: DONATED[name](simulated))
    assert found == wanted if isinstance(wanted[0], type) else len(found) == len(wanted)
    assert outcome(lambda: st.eval_shape(DONATED[name], x)) == wanted
    assert outcome(lambda: st.explain(DONATED[name], x).result) == wanted
    assert not x.is_donated


def test_tensors_that_are_inferred_outside_stay_unchanged() -> None:
    x = st.zeros((4, 3), device=st.AbstractMesh((2,), ("x",)))
    st.eval_shape(donated, x)
    assert not x.is_donated
    assert st.eval_shape(lambda x: [st.eval_shape(donated, x), x + 1][1], x).shape == (4, 3)


@pytest.mark.parametrize("infer", [st.eval_shape, st.explain])
def test_tensors_that_the_function_closes_over_keep_their_memory(infer: Callable[..., Any], backend: str) -> None:
    known = split(backend)
    parts = st.shard(known, devices=known.device)
    infer(lambda: [donated(known), st.pmap(lambda b: b * 2, parts, donate=True)])
    np.testing.assert_array_equal(st.unshard(parts), known)


def test_arguments_alias_as_they_do_otherwise() -> None:
    x = split("numpy")
    assert st.eval_shape(lambda a, b: a is b, x, x)
    with pytest.raises(st.DonatedError, match=r"^add: the memory of this tensor was donated by reshard"):
        st.eval_shape(lambda x, view: [donated(x), view + 1], x, x[1:])


def test_only_functions_are_inferred() -> None:
    with pytest.raises(st.ArgumentTypeError, match="eval_shape: fn is an int; wanted a function"):
        st.eval_shape(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("write", [False, True])
def test_an_index_out_of_bounds_raises(write: bool) -> None:
    function = (lambda x: x.__setitem__([10], 1)) if write else (lambda x: x[[10]])
    for call in (lambda: function(split("numpy")), lambda: st.eval_shape(function, split("numpy"))):
        with pytest.raises(st.IndexingError, match="index 10 is out of bounds"):
            call()


@everywhere
@pytest.mark.parametrize("write", [False, True])
def test_an_integer_out_of_bounds_raises_although_the_arrays_beside_it_select_nothing(
    write: bool, backend: str
) -> None:
    none = np.zeros(0, int)
    function = (lambda x: x.__setitem__((10, none), 1)) if write else (lambda x: x[10, none])
    for call in (np.ones((10, 6)).copy, lambda: split(backend)):
        with pytest.raises(IndexError, match="index 10 is out of bounds"):
            function(call())
    with pytest.raises(st.IndexingError, match="index 10 is out of bounds"):
        st.eval_shape(function, split(backend))
    assert split(backend)[[10], none].shape == (0,)  # NumPy does not check index arrays that select nothing.


def test_views_as_arguments_are_views() -> None:
    with pytest.raises(st.ShapeError, match="reshape: copy=False"):
        st.eval_shape(lambda x: x.reshape(-1, copy=False), split("numpy").T)


def test_structs_are_values() -> None:
    given = st.ShapeDtypeStruct([4, 2], "float32", mesh_of((2,), "numpy"))
    assert pickle.loads(pickle.dumps(given)) == given
    tensor.value.aval.cache_clear()
    again = st.ShapeDtypeStruct((4, 2), "float32", mesh_of((2,), "numpy"))
    assert again == given
    assert hash(again) == hash(given)
    assert again != st.ShapeDtypeStruct((4, 2), "float64", mesh_of((2,), "numpy"))
    with pytest.raises(st.ShapeError, match=r"^ShapeDtypeStruct: shape .* negative"):
        st.ShapeDtypeStruct((-1,), "float32")
    with pytest.raises(st.ArgumentTypeError, match=r"^ShapeDtypeStruct: shape"):
        st.ShapeDtypeStruct((4.5,), "float32")  # type: ignore[arg-type]
    assert st.eval_shape(lambda fn: fn, fn=given) == given


def test_structs_are_arguments_like_tensors() -> None:
    x = split("numpy")
    given = st.ShapeDtypeStruct(x.shape, "float32", x.sharding)
    assert st.eval_shape(lambda x: x, x) == given == st.eval_shape(lambda x: x, given)
    assert hash(given) == hash(st.eval_shape(lambda x: x, x))
    assert given.committed
    free = st.ShapeDtypeStruct((3,), "int8")
    assert not free.committed
    assert (free.sharding.mesh.size, free.ndim, free.size) == (8, 1, 3)
    with pytest.raises(st.ArgumentTypeError, match=r"^ShapeDtypeStruct: dtype is 'f5'"):
        st.ShapeDtypeStruct((3,), "f5")
    assert repr(given) == "ShapeDtypeStruct(shape=(10, 6), dtype=float32, sharding=P('x', 'y'))"


def test_nothing_is_computed_or_written(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, total = split(backend), st.zeros((10, 6))

    def accumulate(x: Any) -> Any:
        nonlocal total
        total += x
        return st.sum(st.exp(total) @ x.T)

    with st.transfers() as log:
        assert st.eval_shape(accumulate, x).shape == ()
    assert not log.bytes
    assert not np.any(total)


def test_tensors_with_elements_can_be_read(backend: str) -> None:
    """Only the elements of the arguments and of results are unknown."""
    known = split(backend)
    scale = st.eval_shape(lambda x: x * float(np.asarray(known)[0, 0]) + np.asarray(known).sum(), split(backend))
    assert scale.shape == known.shape


CONCRETE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "float": (lambda x: float(x.sum()), "float"),
    "branch": (lambda x: 1 if x[0, 0] > 0 else 2, "bool"),
    "asarray": (lambda x: np.asarray(x), "asarray"),
    "mask": (lambda x: x[x > 0], "getitem"),
    "masked write": (lambda x: x.__setitem__(x > 0, x), "setitem"),
    "dlpack": (lambda x: np.from_dlpack(x), "to_dlpack|dlpack_device"),
    "map": (lambda x: st.pmap(lambda s: float(s.sum()), st.shard(x)), "float"),
    "shards": (lambda x: x.addressable_shards[0].data, ""),
}


@pytest.mark.parametrize("name", list(CONCRETE))
def test_what_needs_elements_raises(name: str, backend: str) -> None:
    function, caller = CONCRETE[name]
    x = split(backend)
    with pytest.raises(st.ConcretizationError, match=rf"^({caller}).*needs the elements of a tensor"):
        st.eval_shape(function, x)
    assert np.asarray(x + 1).shape == x.shape  # The eager interpreter is back.


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ x,
        lambda x: x.reshape(7, 7),
        lambda x: x.__setitem__(slice(1), np.ones((3, 3))),
        lambda x: x.__setitem__((0, 11), 1),
        lambda x: np.add(x, 1, out=x[1:]),
        lambda x: x.sum().__iadd__(1) + x.sum(axis=5),
        lambda x: st.concat([x, x.T]),
    ],
)
def test_errors_are_those_of_the_eager_interpreter(function: Callable[[Any], Any]) -> None:
    x = split("numpy")
    failure = outcome(lambda: function(x))
    assert isinstance(failure[0], type)
    assert outcome(lambda: st.eval_shape(function, x)) == failure


@everywhere
def test_structs_of_arrays(backend: str) -> None:
    x = split(backend)
    assert st.ShapeDtypeStruct.like(x) == st.eval_shape(lambda: x) == st.ShapeDtypeStruct.like(st.eval_shape(lambda: x))
    free = st.zeros((4, 2), dtype="int8").T
    struct = st.ShapeDtypeStruct.like(free)
    assert (struct.shape, struct.dtype, struct.sharding, struct.committed) == ((2, 4), "int8", free.sharding, False)
    for given, dtype in ((np.ones((2, 3), "float32"), "float32"), (x.addressable_shards[0].data, x.dtype)):
        struct = st.ShapeDtypeStruct.like(given)
        assert (struct.shape, struct.dtype, struct.committed) == (tuple(given.shape), dtype, False)
    assert st.ShapeDtypeStruct.like(2.5) == st.ShapeDtypeStruct((), float)
    with pytest.raises(st.ArgumentTypeError, match=r"^ShapeDtypeStruct.like: x is a list; wanted a tensor"):
        st.ShapeDtypeStruct.like([1, 2])


def test_updated_structs() -> None:
    rows, whole = (st.NamedSharding(mesh_of((2,), "numpy"), spec) for spec in (st.P("x"), st.P()))
    given = st.ShapeDtypeStruct((4, 2), "float32", rows)
    assert given.update() == given
    assert given.update(shape=(3,), dtype="int8") == st.ShapeDtypeStruct((3,), "int8", rows)
    assert given.update(sharding=whole) == st.ShapeDtypeStruct((4, 2), "float32", whole)
    assert given.update(sharding=None) == st.ShapeDtypeStruct((4, 2), "float32")
    assert st.ShapeDtypeStruct((3,), "int8").update(shape=()) == st.ShapeDtypeStruct((), "int8")
    with pytest.raises(st.ShardingError, match=r"^ShapeDtypeStruct: P.'x'. has 1 dimension and the array has 0"):
        given.update(shape=())
    for change in ("weak_type", "vma", "manual_axis_type", "is_ref"):
        with pytest.raises(st.ArgumentTypeError, match=f"^ShapeDtypeStruct: .*'{change}'; leave it out: "):
            given.update(**{change: None})
