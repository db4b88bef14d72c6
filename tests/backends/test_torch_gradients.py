"""PyTorch's gradients in mapped functions: collectives, hooks, modules for each program, and functions of tensors."""

from __future__ import annotations

import functools
import gc
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'shardtensor[torch]'")
pytest.importorskip("array_api_compat", reason="array-api-compat is not installed: pip install 'shardtensor[torch]'")

import shardtensor_torch  # noqa: E402

import shardtensor as st  # noqa: E402 - what follows wants torch
from shardtensor.backend.registry import load  # noqa: E402
from shardtensor.core import OPS, implements  # noqa: E402
from shardtensor.spmd.axes import axis_position  # noqa: E402
from shardtensor.spmd.collectives import collective  # noqa: E402
from shardtensor.spmd.rendezvous import rendezvous  # noqa: E402
from tests.communication.test_distributed import launch  # noqa: E402
from tests.draws import drawn  # noqa: E402
from tests.project.test_docs_pages import DOCS, program  # noqa: E402
from tests.scripts import LAPTOP, output_of, run_script  # noqa: E402

COUNT = 4


def row(count: int = COUNT) -> list[Any]:
    return st.devices("torch")[:count]


def total(parts: list[Any]) -> Any:
    return functools.reduce(operator.add, parts)


def split(x: Any, axis: int = 0, count: int = COUNT) -> list[Any]:
    return list(torch.tensor_split(x, count, axis))


def product(parts: list[Any]) -> Any:
    return functools.reduce(operator.mul, parts)


Case = tuple[Callable[[Any], Any], Callable[[list[Any]], list[Any]], list[tuple[int, ...]]]
"""A collective, the same function of the arrays of all programs, and the shapes of these."""

SAME = [(3, 2)] * COUNT
GROUPS = [[0, 3], [1, 2]]
SHIFT = [(0, 1), (1, 2), (3, 0)]

_SIZES = np.array([[1, 0, 3, 2], [2, 2, 0, 1], [0, 4, 1, 0], [1, 1, 0, 1]])
ROWS = _SIZES, np.cumsum(_SIZES, axis=0) - _SIZES + 1, _SIZES.T
"""The numbers of rows that each device sends to each other, where these go, and what each device expects."""


def ragged(xs: list[Any], k: int) -> Any:
    y = torch.cat([xs[k]] * 9)
    for i, x in enumerate(xs):
        at, n = ROWS[1][i, k], ROWS[0][i, k]
        y[at : at + n] = x[:n]
    return y


CASES: dict[str, Case] = {
    "psum": (lambda x: st.psum(x, "i"), lambda xs: [total(xs)] * COUNT, SAME),
    "psum in groups": (
        lambda x: st.psum(x, "i", axis_index_groups=GROUPS),
        lambda xs: [xs[0] + xs[3], xs[1] + xs[2], xs[1] + xs[2], xs[0] + xs[3]],
        SAME,
    ),
    "pmean": (lambda x: st.pmean(x, "i"), lambda xs: [total(xs) / COUNT] * COUNT, SAME),
    "pmax": (lambda x: st.pmax(x, "i"), lambda xs: [torch.stack(xs).amax(0)] * COUNT, SAME),
    "pmin": (lambda x: st.pmin(x, "i"), lambda xs: [torch.stack(xs).amin(0)] * COUNT, SAME),
    "pprod": (lambda x: st.pprod(x, "i"), lambda xs: [product(xs)] * COUNT, SAME),
    "psum_scatter": (
        lambda x: st.psum_scatter(x, "i", scatter_dimension=-1),
        lambda xs: list(total(xs).unbind(-1)),
        [(2, COUNT)] * COUNT,
    ),
    "psum_scatter, tiled": (
        lambda x: st.psum_scatter(x, "i", tiled=True),
        lambda xs: split(total(xs)),
        [(10, 2)] * COUNT,
    ),
    "all_gather": (lambda x: st.all_gather(x, "i", axis=1), lambda xs: [torch.stack(xs, 1)] * COUNT, SAME),
    "all_gather, tiled": (
        lambda x: st.all_gather(x, "i", axis=-1, tiled=True),
        lambda xs: [torch.cat(xs, 1)] * COUNT,
        [(2, 3), (2, 2), (2, 2), (2, 2)],
    ),
    "all_gather of any sizes": (
        lambda x: st.all_gather(x, "i", tiled=True),
        lambda xs: [torch.cat(xs)] * COUNT,
        [(2, 3), (0, 3), (4, 3), (1, 3)],
    ),
    "all_to_all": (
        lambda x: st.all_to_all(x, "i", 1, 0),
        lambda xs: [torch.stack([x[:, k] for x in xs]) for k in range(COUNT)],
        [(3, COUNT)] * COUNT,
    ),
    "all_to_all, tiled": (
        lambda x: st.all_to_all(x, "i", 1, 0, tiled=True),
        lambda xs: [torch.cat(parts) for parts in zip(*[split(x, 1) for x in xs], strict=True)],
        [(2, 6), (2, 6), (1, 6), (1, 6)],
    ),
    "pswapaxes": (
        lambda x: st.pswapaxes(x, "i", 1),
        lambda xs: [torch.stack([x[:, k] for x in xs], 1) for k in range(COUNT)],
        [(3, COUNT)] * COUNT,
    ),
    "ppermute": (
        lambda x: st.ppermute(x, "i", SHIFT),
        lambda xs: [xs[3], xs[0], xs[1], torch.zeros_like(xs[3])],
        [(1, 2), (2, 2), (3, 2), (4, 2)],
    ),
    "pshuffle": (
        lambda x: st.pshuffle(x, "i", [2, 0, 3, 1]),
        lambda xs: [xs[2], xs[0], xs[3], xs[1]],
        [(1, 2), (2, 2), (3, 2), (4, 2)],
    ),
    "pbroadcast": (lambda x: st.pbroadcast(x, "i", 2), lambda xs: [xs[2]] * COUNT, [(2, 2), (2, 2), (2, 1), (2, 2)]),
    "ragged_all_to_all": (
        lambda x: st.ragged_all_to_all(
            x, torch.cat([x] * 9), np.zeros(COUNT, int), *[table[st.axis_index("i")] for table in ROWS], axis_name="i"
        ),
        lambda xs: [ragged(xs, k) for k in range(COUNT)],
        [(3, 2), (2, 2), (4, 2), (1, 2)],
    ),
}


def operands(shapes: list[tuple[int, ...]], dtype: str = "float64", seed: int = 0) -> list[Any]:
    """Small integers, so that there are equal extremes, and a fraction by which programs differ."""
    rng = np.random.default_rng(seed)
    parts = [torch.from_numpy(rng.integers(1, 4, shape).astype(dtype)) for shape in shapes]
    return [x * (1 + 0.5j) for x in parts] if dtype.startswith("complex") else parts


def loss_of(y: Any, k: int) -> Any:
    """A loss of the result of program ``k``, which is not linear."""
    square = (y * y.conj()).real
    return (square * torch.arange(1.0, 1 + y.numel(), dtype=square.dtype).reshape(y.shape)).sum() * (k + 1)


def wanted_gradients(case: Case, xs: list[Any], twice: bool) -> list[Any]:
    given = [x.clone().requires_grad_() for x in xs]
    value = total([loss_of(y, k) for k, y in enumerate(case[1]([x * x for x in given]))])
    gradients = torch.autograd.grad(value, given, create_graph=twice, materialize_grads=True)
    if not twice:
        return list(gradients)
    return list(
        torch.autograd.grad(total([(g * g.conj()).real.sum() for g in gradients]), given, materialize_grads=True)
    )


def by_backward(value: Callable[[Any], Any], x: Any) -> Any:
    w = x.clone().requires_grad_()
    value(w).backward()
    return w.grad


def by_grad(value: Callable[[Any], Any], x: Any) -> Any:
    w = x.clone().requires_grad_()
    return torch.autograd.grad(value(w), w)[0]


def by_func(value: Callable[[Any], Any], x: Any) -> Any:
    return torch.func.grad(value)(x)


def twice(value: Callable[[Any], Any], x: Any) -> Any:
    w = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(w), w, create_graph=True)
    return torch.autograd.grad((gradient * gradient.conj()).real.sum(), w)[0]


def twice_by_func(value: Callable[[Any], Any], x: Any) -> Any:
    def square(w: Any) -> Any:
        gradient = torch.func.grad(value)(w)
        return (gradient * gradient.conj()).real.sum()

    return torch.func.grad(square)(x)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_collectives(name: str) -> None:
    """All ways to a gradient give that of the sum of the losses of all programs."""
    case = CASES[name]
    for dtype in ("float64", "complex128") if name not in ("pmax", "pmin") else ("float64",):
        xs = operands(case[2], dtype)
        for way in (by_backward, by_grad, by_func, twice, twice_by_func):
            if dtype == "complex128" and way in (by_func, twice_by_func):
                continue  # They are the same functions of PyTorch.

            def fn(x: Any, way: Any = way) -> Any:
                return way(lambda w: loss_of(case[0](w * w), st.axis_index("i")), x)

            found = st.pmap(fn, [st.device_put(x.numpy(), d) for x, d in zip(xs, row(), strict=True)], axis_name="i")
            wanted = wanted_gradients(case, xs, way in (twice, twice_by_func))
            for mine, there in zip(found, wanted, strict=True):
                np.testing.assert_allclose(np.asarray(mine), there.numpy(), rtol=1e-12, err_msg=f"{dtype} {way}")


Step = tuple[Callable[..., Any], Callable[..., list[Any]], int]
"""A function of tensors in a program, the same function of the tensors of all programs, and the number of arguments."""


def each(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    return lambda *lists: [function(*parts, k) for k, parts in enumerate(zip(*lists, strict=True))]


def local(function: Callable[..., Any], count: int) -> Step:
    """A function without collectives, whose last argument is the number of the program."""
    return lambda *args: function(*args, st.axis_index("i")), each(function), count


SQUARE = [(COUNT, COUNT)] * COUNT
STEPS: list[Step] = [
    *[(CASES[n][0], CASES[n][1], 1) for n in ("psum", "psum in groups", "pmean", "pmax", "pprod", "pshuffle")],
    *[(CASES[n][0], CASES[n][1], 1) for n in ("ppermute", "pbroadcast", "pswapaxes", "all_to_all")],
    (
        lambda x: st.psum_scatter(st.all_gather(x, "i", axis=1, tiled=True), "i", scatter_dimension=1, tiled=True),
        lambda xs: [COUNT * x for x in xs],
        1,
    ),
    local(lambda x, k: torch.sin(x * (k + 1)), 1),
    local(lambda x, k: x / (1 + x * x), 1),
    local(lambda x, y, k: x + (k - 1) * y, 2),
    local(lambda x, y, k: x * y, 2),
    local(lambda x, y, k: x @ y / COUNT, 2),
]


def drawn_steps(rng: np.random.Generator) -> list[tuple[Step, list[int]]]:
    """Steps, each with the numbers of the earlier results that are its arguments."""
    made = []
    for n in range(1, int(rng.integers(4, 14))):
        step = STEPS[rng.integers(len(STEPS))]
        made.append((step, [int(k) for k in rng.integers(0, n, step[2])]))
    return made


def test_gradients_of_drawn_programs() -> None:
    """Any collectives, on any paths to the loss, in programs of one thread and of several: eager, and twice."""
    for seed in range(drawn(500, fast=12)):
        rng = np.random.default_rng(seed)
        steps = drawn_steps(rng)
        scales = rng.normal(size=len(steps) + 1).tolist()
        xs = [torch.from_numpy(rng.normal(size=shape)) for shape in SQUARE]

        def loss(w: Any, steps: Any = steps, scales: Any = scales) -> Any:
            values = [w]
            for (function, _, _), numbers in steps:
                values.append(torch.tanh(function(*[values[k] for k in numbers])))
            return total([(v * scale).sum() for v, scale in zip(values, scales, strict=True)])

        given = [x.clone().requires_grad_() for x in xs]
        lists = [given]
        for (_, function, _), numbers in steps:
            lists.append([torch.tanh(y) for y in function(*[lists[k] for k in numbers])])
        value = total([(v * scale).sum() for vs, scale in zip(lists, scales, strict=True) for v in vs])
        gradients = torch.autograd.grad(value, given, create_graph=True)
        second = torch.autograd.grad(total([g.sin().sum() for g in gradients]), given, materialize_grads=True)

        def both(x: Any, loss: Any = loss) -> Any:
            w = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(w), w, create_graph=True)
            if not gradient.requires_grad:
                return gradient, torch.zeros_like(gradient)
            return gradient, torch.autograd.grad(gradient.sin().sum(), w, materialize_grads=True)[0]

        with st.set_num_threads(1 + seed % 2):
            found = st.pmap(both, [x.numpy() for x in xs], axis_name="i", devices=row())
        for wanted, mine in zip((gradients, second), zip(*found, strict=True), strict=True):
            for there, here in zip(wanted, mine, strict=True):
                np.testing.assert_allclose(
                    np.asarray(here), there.detach().numpy(), rtol=1e-7, atol=1e-9, err_msg=f"seed {seed}"
                )


def test_every_collective_has_a_transpose() -> None:
    from shardtensor.core import OPS
    from shardtensor.spmd.recorded import TRANSPOSES

    collectives = {name for name, op in OPS.items() if "spmd" in op.tags and "axis_name" in op.params}
    assert set(TRANSPOSES) == collectives & {*st.__all__, "ragged_return"}


# -- programs --------------------------------------------------------------------------------------


def test_leaves_without_a_gradient_pass_beside_others() -> None:
    """A tree may have integers, numbers, constants and None beside tensors that require a gradient."""

    def fn(x: Any) -> Any:
        w = x.clone().requires_grad_()
        given = {"w": w, "n": torch.arange(2), "c": x, "one": 1, "none": None, "host": np.ones(2)}
        made = st.psum(given, "i")
        assert made["one"] == 2
        assert made["none"] is None
        assert not made["c"].requires_grad
        assert made["n"].tolist() == [0, 2]
        (made["w"] * made["c"]).sum().backward()
        with torch.no_grad():
            assert not st.psum(w, "i").requires_grad
        assert not st.psum(w.detach(), "i").requires_grad
        return w.grad

    found = st.pmap(fn, [np.ones(3), np.full(3, 2.0)], axis_name="i", devices=row(2))
    assert [g.tolist() for g in found] == [[6.0] * 3] * 2


def test_graphs_do_not_keep_the_operands_of_sums() -> None:
    def fn(x: Any) -> bool:
        w = x.clone().requires_grad_()
        product = w * 2
        kept = weakref.ref(product)
        y = st.psum(product, "i")
        del product
        gc.collect()
        y.sum().backward()
        return kept() is None

    assert st.pmap(fn, [np.ones(3)] * 2, axis_name="i", devices=row(2)) == [True, True]


def test_results_of_collectives_are_tensors_of_each_program() -> None:
    """Devices that share a memory receive one array, but every program has a graph of its own."""

    def fn(x: Any) -> Any:
        w = x.clone().requires_grad_()
        y = st.psum(w, "i")
        node = y.grad_fn
        st.psum(1, "i")
        assert y.grad_fn is node
        return y

    found = st.pmap(fn, [np.ones(3)] * 3, axis_name="i", devices=row(3))
    assert [y.tolist() for y in found] == [[3.0] * 3] * 3


@pytest.mark.parametrize("threads", [1, 2])
def test_independent_collectives_are_transposed_in_one_order(threads: int) -> None:
    """PyTorch chooses among nodes that it can take: programs have to agree, whichever thread they run in."""
    weights = np.random.default_rng(0).normal(size=(COUNT, 5, 3))

    def fn(x: Any) -> Any:
        w = x.clone().requires_grad_()
        parts = [st.psum(row * (k + 1), "i").sum() * (k + st.axis_index("i")) for k, row in enumerate(w)]
        parts += [st.all_gather(torch.sin(w), "i").sum(), (w * w).sum()]
        total(parts).backward()
        return w.grad

    with st.set_num_threads(threads):
        for _ in range(drawn(30, fast=3)):
            found = st.pmap(fn, weights, axis_name="i", devices=row())
            rows = np.arange(5)[:, None]
            wanted = (rows + 1) * (COUNT * rows + sum(range(COUNT))) + COUNT * np.cos(weights) + 2 * weights
            np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-12)


@pytest.mark.parametrize("threads", [1, 2])
def test_hooks_and_functions_of_the_user_call_collectives(threads: int) -> None:
    """Their backward passes run although no collective was recorded before."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return st.psum(g, "i")

    def fn(x: Any) -> Any:
        v, w = x.clone().requires_grad_(), x.clone().requires_grad_()
        v.register_hook(lambda g: 10 * st.pmean(g, "i"))
        for _ in range(3):
            ((Same.apply(w) ** 2).sum() + (v**2).sum()).backward()
        return v.grad, w.grad

    x = np.arange(8.0).reshape(COUNT, 2)
    with st.set_num_threads(threads):
        v, w = st.pmap(fn, x, axis_name="i", devices=row())
    np.testing.assert_allclose(np.asarray(v), np.broadcast_to(60 * x.mean(0), x.shape))
    np.testing.assert_allclose(np.asarray(w), np.broadcast_to(6 * x.sum(0), x.shape))


def test_transformations_of_torch_func_call_collectives() -> None:
    """Numbers and constants in a transformed function, auxiliary results, modules, and `torch.func.vjp`."""
    layer = torch.nn.Linear(2, 1, bias=False).double()
    layers = shardtensor_torch.replicate(layer, row(2))

    def fn(module: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            y = st.psum(torch.func.functional_call(module, {"weight": w}, (x,)), "i") / st.psum(1, "i")
            return (y * st.psum(x, "i").sum()).sum(), st.pmax(x[0], "i")

        w = torch.ones(1, 2, dtype=torch.float64)
        gradient, aux = torch.func.grad(loss, has_aux=True)(w)
        y, pull = torch.func.vjp(lambda w: st.all_gather(w, "i"), w)
        return gradient, aux, pull(y)[0]

    x = np.arange(4.0).reshape(2, 2)
    for (gradient, aux, pulled), part in zip(
        st.pmap(fn, layers, list(x), axis_name="i", devices=row(2)), x, strict=True
    ):
        assert gradient.tolist() == [(x.sum() * part).tolist()]
        assert float(aux) == 2
        assert pulled.tolist() == [[2.0, 2.0]]


def test_checkpoints_call_collectives_again() -> None:
    from torch.utils.checkpoint import checkpoint

    def fn(x: Any) -> Any:
        w = x.clone().requires_grad_()
        y = checkpoint(lambda w: torch.sin(st.psum(w * w, "i")), w, use_reentrant=False)
        y.sum().backward()
        return w.grad

    x = np.arange(6.0).reshape(3, 2)
    found = st.pmap(fn, x, axis_name="i", devices=row(3))
    np.testing.assert_allclose(np.asarray(found), 3 * np.cos((x * x).sum(0)) * 2 * x)


def test_programs_take_turns_with_modes_of_their_own() -> None:
    """Hooks of saved tensors, autocast, and what `torch.func` sets around a function, belong to one program."""
    saved: list[int] = []

    def fn(x: Any) -> Any:
        k = st.axis_index("i")
        w = x.clone().requires_grad_()
        autograd = torch._C._autograd
        if k == 0:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(k) or t, lambda t: t):
                st.psum(w * w, "i")
        elif k == 1:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                st.psum(w * w, "i")
                assert (x.float() @ x.float()).dtype == torch.bfloat16
        elif k == 2:
            torch.func.grad(lambda w: st.psum(w * w, "i").sum())(x)
        else:
            st.psum(w * w, "i")
            assert (x.float() @ x.float()).dtype == torch.float32
        if k == 2:  # Its backward pass has called the second one.
            return autograd._saved_tensors_hooks_is_enabled()
        st.psum({"gradient of psum 1, leaf 0": w * w}, "i")
        return autograd._saved_tensors_hooks_is_enabled()

    for threads in (1, 2):
        saved.clear()
        with st.set_num_threads(threads):
            assert st.pmap(fn, [np.ones(2)] * COUNT, axis_name="i", devices=row()) == [True] * COUNT
        assert saved == [0, 0]
        assert torch._C._autograd._saved_tensors_hooks_is_enabled()
        assert not torch.is_autocast_enabled("cpu")


def test_tensor_parallel_layers_as_in_megatron() -> None:
    """f passes x on, and its transpose sums; g sums, and its transpose passes on."""

    def f(x: Any) -> Any:
        x = x.view_as(x)
        x.register_hook(lambda cotangent: st.psum(cotangent, "model"))
        return x

    def g(x: Any) -> Any:
        return x - x.detach() + st.psum(x.detach(), "model")

    rng = np.random.default_rng(0)
    x, a, b = rng.normal(size=(5, 3)), rng.normal(size=(3, 6)), rng.normal(size=(6, 2))

    def fn(x: Any, a: Any, b: Any) -> Any:
        given = [t.clone().requires_grad_() for t in (x, a, b)]
        y = g(torch.tanh(f(given[0] * 1) @ given[1]) @ given[2])
        (y**2).sum().backward()
        return tuple([t.grad for t in given])

    mesh = st.make_mesh((2,), ("model",), devices=row(2))
    columns, rows = st.P(None, "model"), st.P("model")
    mapped = st.shard_map(fn, mesh=mesh, in_specs=(st.P(), columns, rows), out_specs=(st.P(), columns, rows))
    with st.transfers() as log:
        found = mapped(x, a, b)
    messages = [record for record in log if record.operator == "psum"]
    assert {record.bytes for record in messages} == {5 * 2 * 8, 5 * 3 * 8}  # one all-reduce each way
    given = [torch.from_numpy(t).requires_grad_() for t in (x, a, b)]
    ((torch.tanh(given[0] @ given[1]) @ given[2]) ** 2).sum().backward()
    for mine, there in zip(found, given, strict=True):
        np.testing.assert_allclose(np.asarray(mine), there.grad.numpy(), rtol=1e-12)


def test_collectives_along_the_axes_of_a_mesh() -> None:
    """The transposes are those along the same axes, in maps of maps too."""
    x = np.arange(1.0, 17.0).reshape(4, 4)

    def fn(x: Any) -> Any:
        w = x.clone().requires_grad_()
        y = st.psum(w * w, "a") * st.axis_index("b") + st.pmean(w, ("b", "a"))
        y.sum().backward()
        return w.grad

    mesh = st.make_mesh((2, 2), ("a", "b"), devices=row())
    found = st.shard_map(fn, mesh=mesh, in_specs=st.P("a", "b"), out_specs=st.P("a", "b"))(x)
    wanted = 2 * np.repeat([0, 1], 2) * 2 * x + 1
    np.testing.assert_allclose(np.asarray(found), wanted)
    nested = st.pmap(st.pmap(fn, axis_name="b"), axis_name="a", devices=np.array(row()).reshape(2, 2))
    blocks = x.reshape(2, 2, 2, 2).swapaxes(1, 2)
    np.testing.assert_allclose(np.asarray(nested(blocks)), wanted.reshape(2, 2, 2, 2).swapaxes(1, 2))


# -- errors ----------------------------------------------------------------------------------------


def test_programs_whose_backward_passes_differ_get_an_error() -> None:
    def only_one(x: Any) -> Any:
        w = x.clone().requires_grad_()
        y = st.psum(w * w, "i").sum()
        if st.axis_index("i") == 0:
            y.backward()

    def other_order(x: Any) -> Any:
        w = x.clone().requires_grad_()
        a, b = st.psum(w, "i").sum(), st.psum(w * w, "i").sum()
        for y in (a, b) if st.axis_index("i") else (b, a):
            y.backward()

    def other_leaf(x: Any) -> Any:
        w = x.clone().requires_grad_()
        a, b = st.psum((w, x) if st.axis_index("i") else (x, w), "i")
        (a + b).sum().backward()

    for fn, message in ((only_one, "returned without"), (other_order, "gradient of psum 2"), (other_leaf, "leaf 1")):
        with pytest.raises(st.CollectiveError, match=message):
            st.pmap(fn, [np.ones(2)] * 2, axis_name="i", devices=row(2))


def test_an_error_in_a_backward_pass_ends_the_map() -> None:
    def fn(x: Any) -> Any:
        w = x.clone().requires_grad_()
        y = st.psum(w * w, "i")
        if st.axis_index("i") == 1:
            y.register_hook(lambda g: 1 / 0)
        y.sum().backward()

    with pytest.raises(ZeroDivisionError):
        st.pmap(fn, [np.ones(2)] * 3, axis_name="i", devices=row(3))


def test_a_graph_that_leaves_its_program_has_no_collectives() -> None:
    held: list[Any] = []

    def fn(x: Any) -> None:
        w = x.clone().requires_grad_()
        held.append(st.psum(w, "i").sum())

    st.pmap(fn, [np.ones(2)] * 2, axis_name="i", devices=row(2))
    with pytest.raises(st.ShardingError, match="no mapped function around"):
        held[0].backward()


@pytest.fixture
def pnorm() -> Iterator[Callable[..., Any]]:
    """A collective of a user, which exists during one test."""

    @collective
    def pnorm(x: Any, axis_name: Any) -> Any: ...

    @implements(pnorm, "algorithm", "infer")
    def _pnorm(x: Any, axis_name: Any) -> Any:
        at = axis_position("pnorm", axis_name)
        return rendezvous("pnorm", at, x, (), lambda communicator, arrays: communicator.all_reduce(arrays, "add"))

    yield pnorm
    del OPS["pnorm"]


def test_a_collective_without_a_transpose_is_an_error(pnorm: Callable[..., Any]) -> None:
    def fn(x: Any) -> Any:
        assert pnorm(x, "i").tolist() == [2.0, 2.0]
        return pnorm(x.clone().requires_grad_(), "i")

    with pytest.raises(st.ArgumentTypeError, match=r"pnorm: x requires a gradient.*no transpose.*x\.detach"):
        st.pmap(fn, [np.ones(2)] * 2, axis_name="i", devices=row(2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # one of PyTorch's own
@pytest.mark.parametrize("way", ["vmap", "jvp", "dual"])
def test_other_transformations_of_collectives_raise(way: str) -> None:
    def fn(x: Any) -> Any:
        f = functools.partial(st.psum, axis_name="i")
        if way == "vmap":
            return torch.func.vmap(f)(x)
        if way == "jvp":
            return torch.func.jvp(f, (x,), (x,))
        forward = torch.autograd.forward_ad
        with forward.dual_level():
            return forward.unpack_dual(f(forward.make_dual(x, x))).tangent

    with pytest.raises(st.BackendError, match=r"collective inside.*(vmap|forward-mode)"):
        st.pmap(fn, [np.ones(2)] * 2, axis_name="i", devices=row(2))
    assert st.pmap(lambda x: st.psum(x, "i"), [np.ones(2)] * 2, axis_name="i", devices=row(2))[0].tolist() == [2, 2]


def test_transposes_of_uneven_exchanges_raise() -> None:
    def fn(x: Any) -> Any:
        w = x.clone().requires_grad_()
        st.all_to_all(w, "i", 1, 0, tiled=True).sum().backward()

    with pytest.raises(st.ShapeError, match=r"all_to_all.*split rule"):
        st.pmap(fn, [np.ones((1, 4)), np.ones((3, 4))], axis_name="i", devices=row(2))


# -- modules ---------------------------------------------------------------------------------------


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def test_data_parallel_training_equals_that_on_one_device() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 3)), rng.normal(size=(16, 1))
    model = network()
    replicas = shardtensor_torch.replicate(model, row())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in replicas]

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        for p, g in zip(model.parameters(), st.pmean([p.grad for p in model.parameters()], "batch"), strict=True):
            p.grad.copy_(g)
        optimizer.step()
        return st.pmean(loss.detach(), "batch")

    one = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    xs, ys = st.shard(x, devices=row()), st.shard(y, devices=row())
    for _ in range(3):
        losses = st.pmap(step, replicas, optimizers, xs, ys, axis_name="batch")
        one.zero_grad()
        wanted = ((model(torch.from_numpy(x)) - torch.from_numpy(y)) ** 2).mean()
        wanted.backward()
        one.step()
        np.testing.assert_allclose([float(loss) for loss in losses], wanted.item(), rtol=1e-12)
    states = [replica.state_dict() for replica in replicas]
    for name, parameter in model.state_dict().items():
        np.testing.assert_allclose(states[0][name].numpy(), parameter.numpy(), rtol=1e-12, atol=1e-13)
        assert all(torch.equal(state[name], states[0][name]) for state in states)
    model.load_state_dict(states[0])


def test_replicas_have_buffers_and_modes_of_their_own() -> None:
    """A batch normalization over all programs, by collectives in the forward pass, equals that of one device."""

    class Normalized(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.float64))
            self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))

        def forward(self, x: Any) -> Any:
            if not self.training:
                return (x - self.mean) * self.scale
            mean = st.pmean(x.mean(0), "batch")
            variance = st.pmean(((x - mean) ** 2).mean(0), "batch")
            self.mean.copy_(mean.detach())
            return (x - mean) / variance.sqrt() * self.scale

    x = np.random.default_rng(0).normal(size=(8, 2))
    modules = shardtensor_torch.replicate(Normalized(), row(2))

    def fn(module: Any, x: Any) -> Any:
        assert module.training
        w = x.clone().requires_grad_()
        (module(w) ** 3).sum().backward()
        return w.grad, st.psum(module.scale.grad, "batch")

    found = st.pmap(fn, modules, st.shard(x, devices=row(2)), axis_name="batch")
    w = torch.from_numpy(x).requires_grad_()
    scale = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    ((((w - w.mean(0)) / w.var(0, correction=0).sqrt()) * scale) ** 3).sum().backward()
    np.testing.assert_allclose(np.concatenate([np.asarray(g) for g, _ in found]), w.grad.numpy(), rtol=1e-11)
    np.testing.assert_allclose(np.asarray(found[1][1]), scale.grad.numpy(), rtol=1e-11)
    assert modules[0].mean is not modules[1].mean
    np.testing.assert_allclose(modules[1].mean.numpy(), x.mean(0), rtol=1e-12)
    for module in modules:
        module.eval()
    (made,) = st.pmap(lambda module, x: module(x), modules[:1], [x[:1]], devices=row(1))
    np.testing.assert_allclose(np.asarray(made), (x[:1] - x.mean(0)) * [2, 3])


def test_arguments_of_replicate_are_checked() -> None:
    assert len(shardtensor_torch.replicate(network())) == len(st.devices("torch"))
    with pytest.raises(st.ArgumentTypeError, match=r"replicate: module is function"):
        shardtensor_torch.replicate(network)
    with pytest.raises(st.ArgumentTypeError, match=r"replicate: devices has Device\('numpy:0'\)"):
        shardtensor_torch.replicate(network(), st.devices("numpy"))


# -- functions of tensors as derivatives -----------------------------------------------------------


def test_vjp_of_a_function_of_tensors() -> None:
    """`Backend.vjp`: what a map needs of a function that computes with PyTorch."""
    backend = load("torch")
    x, n = torch.arange(3.0, dtype=torch.float64), torch.arange(3)

    def fn(x: Any, n: Any) -> Any:
        y = x * 3
        x += 1  # in place
        return [y * n, x, n, "text", x * 0 + y]

    made, pull = backend.vjp(fn, [x.clone(), n])
    assert not any(isinstance(y, torch.Tensor) and y.requires_grad for y in made)
    assert made[3] == "text"
    np.testing.assert_array_equal(made[1].numpy(), [1, 2, 3])
    ones = torch.ones_like(x)
    gradient, none = pull([ones, 10 * ones, None, None, None])
    assert none is None
    np.testing.assert_allclose(gradient.numpy(), 3 * np.arange(3) + 10)
    made, pull = backend.vjp(lambda x: [x * 2j, x], [x * 1j])
    np.testing.assert_allclose(pull([ones + 0j, ones * 1j])[0].numpy(), [3j] * 3)  # as JAX: no conjugates
    made, pull = backend.vjp(lambda x: [x * x], [x])
    assert all(pull([ones], True)[0].tolist() == pull([ones], keep)[0].tolist() for keep in (True, False))
    made, pull = backend.vjp(lambda x: [x.detach()], [x])
    assert pull([ones]) == [None]
    with torch.no_grad():
        made, pull = backend.vjp(lambda x: [x, x * 2], [x])
        np.testing.assert_array_equal(pull([ones, None])[0].numpy(), 1)


def test_vjp_with_collectives_in_another_map() -> None:
    """The forward pass of a map keeps the graph, and a second map pulls cotangents back, with collectives."""
    backend = load("torch")
    x = np.arange(1.0, 5.0).reshape(2, 2)

    def forward(x: Any) -> Any:
        (y,), pull = backend.vjp(lambda x: [st.psum(x * x, "i") * x], [x])
        return y, [pull]

    forwarded = st.pmap(forward, list(x), axis_name="i", devices=row(2))
    cotangents = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    found = st.pmap(
        lambda held, g: held[0]([g])[0], [held for _, held in forwarded], cotangents, axis_name="i", devices=row(2)
    )
    g = np.array(cotangents)
    wanted = g * (x * x).sum(0) + 2 * x * (g * x).sum(0)
    np.testing.assert_allclose(np.stack([np.asarray(part) for part in found]), wanted, rtol=1e-12)


# -- tensors of this library under st.grad ---------------------------------------------------------


@pytest.mark.parametrize(
    "take", [torch.from_dlpack, torch.asarray, torch.as_tensor, torch.tensor], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_a_differentiated_tensor_does_not_become_one_of_pytorch(take: Any, name: str) -> None:
    x = st.device_put(np.arange(3.0), st.devices(name)[0])
    with pytest.raises(st.ConcretizationError, match="stop_gradient"):
        st.grad(lambda x: float(take(x).sum()) * x.sum())(x)
    found = st.grad(lambda x: float(take(st.stop_gradient(x)).sum()) * x.sum())(x)
    assert found.tolist() == [3.0] * 3


IN_A_JOB = """
import os
os.environ |= {"SHARDTENSOR_BACKEND": "torch", "SHARDTENSOR_NUM_DEVICES": "2"}
import numpy as np
import shardtensor as st
import shardtensor_torch
import torch

st.distributed.initialize()
mesh = st.make_mesh((4,), ("i",))
x = st.device_put(np.arange(1.0, 9.0).reshape(4, 2), st.NamedSharding(mesh, st.P("i")))


def fn(x):
    w = x.clone().requires_grad_()
    a, b, c = st.psum(w**2, "i"), st.all_gather(w, "i"), st.all_gather(w, "i", tiled=True)
    ((a**2).sum() * (1 + st.axis_index("i")) + (b**3).sum() + (c * a.sum()).sum()).backward()
    return w.grad


found = st.pmap(fn, x, axis_name="i", devices=st.devices())
print(np.asarray(st.reshard(found, st.NamedSharding(mesh, st.P()))).tolist())

layer = torch.nn.Linear(2, 1, bias=False).double()
torch.nn.init.ones_(layer.weight)
layers = shardtensor_torch.replicate(layer)
print([one is None for one in layers])


def step(layer, x):
    st.pmean(layer(x), "i").sum().backward()
    return st.psum(layer.weight.grad, "i")


made = st.pmap(step, layers, st.shard(x, devices=st.devices()), axis_name="i")
print([y.tolist() for y in made if y.is_fully_addressable])
"""


@pytest.mark.full
def test_gradients_in_programs_of_several_processes(tmp_path: Any) -> None:
    script = tmp_path / "job.py"
    script.write_text(IN_A_JOB)
    status, text = launch("gloo", 2, str(script))
    assert status == 0, text
    x = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(4, 2).requires_grad_()
    a = (x**2).sum(0)
    ((a**2).sum() * 10 + 4 * (x**3).sum() + 4 * x.sum() * a.sum()).backward()
    sums = [[x.detach().sum(0).tolist()]] * 2
    wanted = [str(x.grad.tolist()), *map(str, ([False] * 2 + [True] * 2, [True] * 2 + [False] * 2)), str(sums)]
    assert all(line in text for line in wanted), text


def test_the_pages_run_with_pytorch() -> None:
    """In one process, which imports PyTorch once."""
    pages = [
        (DOCS / name).read_text().replace("```python torch", "```python") for name in ("pytorch.md", "programs.md")
    ]
    codes, printed = zip(*map(program, pages), strict=True)
    script = LAPTOP + f"for code in {codes!r}:\n    exec(code, {{'__name__': '__main__'}})\n"
    assert output_of(run_script(script, seconds=300)) == "".join(printed)


@pytest.mark.parametrize("to", ["varying", "reduced", "unreduced"])
def test_casts_of_types(to: str) -> None:
    """The cotangent of one value of all programs is the sum of theirs; that of partial sums is each one's own."""
    blocks = np.arange(1.0, 13.0).reshape(COUNT, 3)

    def program(block: Any) -> Any:
        w = torch.ones(3, dtype=torch.float64, requires_grad=True)
        (st.pcast({"w": w}, "i", to=to)["w"] * block).sum().backward()
        return w.grad

    found = st.pmap(program, blocks, axis_name="i", devices=st.devices("torch")[:COUNT])
    np.testing.assert_allclose(found, blocks if to == "unreduced" else np.tile(blocks.sum(axis=0), (COUNT, 1)))
