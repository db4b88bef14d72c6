"""The cases of `training.py`: the same steps of training with every library, each library in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gradient_cases import normalized
from harness import Case

GROUPS = {"step": ("step", "products"), "adamw": ("adamw", "leaves", "traffic"), "zero": ("zero 1", "zero 2", "zero 3")}
"""The names of the rows that are sampled together, by group."""

RATE, DECAY, NORM = 1e-3, 0.1, 1.0
"""The learning rate, the decay of weights, and the limit of the global norm."""

Params = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of operands.

    Attributes:
        batch, length, width, heads, layers, vocabulary: of the transformer.
        adamw: the parameters of the optimizer's step.
        leaves: the leaves into which these are divided.
    """

    batch: int = 16
    length: int = 128
    width: int = 256
    heads: int = 8
    layers: int = 3
    vocabulary: int = 256
    adamw: int = 10_000_000
    leaves: int = 50


SIZES = Sizes()


# -- the model, by a library's namespace -----------------------------------------------------------


def parameters(sizes: Sizes) -> Params:
    """Returns the parameters, equal for all libraries."""
    import numpy as np

    random = np.random.default_rng(0)
    width = sizes.width

    def weights(*shape: int) -> Any:
        return random.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[0]))

    params = {"tokens": weights(sizes.vocabulary, width), "positions": weights(sizes.length, width)}
    for n in range(sizes.layers):
        params |= {f"{name}{n}": weights(width, width) for name in ("query", "key", "value", "out")}
        params |= {f"up{n}": weights(width, 4 * width), f"down{n}": weights(4 * width, width)}
    return params | {"logits": weights(width, sizes.vocabulary)}


def batch(sizes: Sizes) -> Any:
    """Returns the tokens of a batch, with one more than the length of an example."""
    import numpy as np

    return np.random.default_rng(1).integers(0, sizes.vocabulary, (sizes.batch, sizes.length + 1))


def loss(np: Any, sizes: Sizes, params: Params, tokens: Any, causal: Any, numbers: Any) -> Any:
    """Returns the mean cross entropy of the next token of a decoder-only transformer.

    Args:
        np: the namespace.
        sizes: the sizes.
        params: the parameters.
        tokens: the batch.
        causal: the bools which tokens see which.
        numbers: the numbers of the vocabulary.
    """
    examples, length, width, heads = tokens.shape[0], sizes.length, sizes.width, sizes.heads

    def split(y: Any) -> Any:
        return np.swapaxes(y.reshape(examples, length, heads, width // heads), 1, 2)

    x = params["tokens"][tokens[:, :-1]] + params["positions"]
    for n in range(sizes.layers):
        y = normalized(np, x)
        q, k, v = split(y @ params[f"query{n}"]), split(y @ params[f"key{n}"]), split(y @ params[f"value{n}"])
        scores = q @ np.swapaxes(k, -1, -2) * (width // heads) ** -0.5
        scores = np.where(causal, scores, -1e9)
        e = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
        attended = (e / np.sum(e, axis=-1, keepdims=True)) @ v
        x = x + np.swapaxes(attended, 1, 2).reshape(examples, length, width) @ params[f"out{n}"]
        h = normalized(np, x) @ params[f"up{n}"]
        x = x + (0.5 * h * (1 + np.tanh(0.7978845608 * (h + 0.044715 * h * h * h)))) @ params[f"down{n}"]
    logits = normalized(np, x) @ params["logits"]
    logits = logits - np.max(logits, axis=-1, keepdims=True)
    chosen = np.sum(np.where(tokens[:, 1:, None] == numbers, logits, 0.0), axis=-1)
    return np.mean(np.log(np.sum(np.exp(logits), axis=-1)) - chosen)


def products(np: Any, sizes: Sizes, params: Params, x: Any, wide: Any, heads: Any, scores: Any) -> list[Any]:
    """Returns the matrix products of a step, with the transposes of the backward pass.

    Args:
        np: the namespace.
        sizes: the sizes.
        params: the parameters.
        x: activations, of shape (batch, length, width).
        wide: those between the layers of a perceptron, with four times the width.
        heads: queries, of shape (batch, heads, length, width / heads).
        scores: scores of attention, of shape (batch, heads, length, length).
    """

    def all_three(x: Any, w: Any, y: Any) -> list[Any]:
        """Returns the product x w of shape of y, and the gradients of its operands."""
        rows, columns = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        return [x @ w, y @ w.T, rows.T @ columns]

    found = []
    for n in range(sizes.layers):
        for name in ("query", "key", "value", "out"):
            found += all_three(x, params[f"{name}{n}"], x)
        found += all_three(x, params[f"up{n}"], wide) + all_three(wide, params[f"down{n}"], x)
        found += [heads @ np.swapaxes(heads, -1, -2), scores @ heads, np.swapaxes(scores, -1, -2) @ heads]
        found += [scores @ heads, heads @ np.swapaxes(heads, -1, -2), np.swapaxes(scores, -1, -2) @ heads]
    return found + all_three(x, params["logits"], x[..., : sizes.vocabulary])


def product_operands(sizes: Sizes) -> dict[str, Any]:
    """Returns the activations for `products`."""
    import numpy as np

    random, heads = np.random.default_rng(2), sizes.heads
    shapes = {
        "x": (sizes.length, sizes.width),
        "wide": (sizes.length, 4 * sizes.width),
        "heads": (heads, sizes.length, sizes.width // heads),
        "scores": (heads, sizes.length, sizes.length),
    }
    return {name: random.standard_normal((sizes.batch, *shape), np.float32) for name, shape in shapes.items()}


def flat(sizes: Sizes, leaves: int) -> list[Any]:
    """Returns the parameters of the optimizer's step, in so many leaves."""
    import numpy as np

    return np.array_split(np.random.default_rng(3).standard_normal(sizes.adamw, np.float32), leaves)


def _group() -> str:
    return os.environ.get("TRAINING_GROUP", "")


# -- the cases of each library ---------------------------------------------------------------------


def shardtensor_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of shardtensor, on all devices of the process."""
    import numpy as np

    import shardtensor as st

    mesh = st.make_mesh((st.device_count(),), ("data",))
    split, whole = st.NamedSharding(mesh, st.P("data")), st.NamedSharding(mesh, st.P())
    causal, numbers = np.tri(sizes.length, dtype=bool), np.arange(sizes.vocabulary)

    def training(level: int) -> Case:
        optimizer = st.optim.chain(st.optim.clip_by_global_norm(NORM), st.optim.adamw(RATE, weight_decay=DECAY))
        params = st.tree.map(lambda a: st.device_put(a, whole), parameters(sizes))
        layouts = st.optim.zero(params, level=level) if level else None
        state = optimizer.init(params if layouts is None else st.reshard(params, layouts.state))
        params = params if layouts is None else st.reshard(params, layouts.params)
        tokens = st.device_put(batch(sizes), split)

        def step(params: Any, state: Any, tokens: Any) -> Any:
            def mean_loss(p: Any) -> Any:
                p = st.reshard(p, whole) if level == 3 else p
                return loss(st, sizes, p, tokens, causal, numbers)

            value, grads = st.value_and_grad(mean_loss)(params)
            grads = grads if layouts is None else st.reshard(grads, layouts.grads)
            updates, state = optimizer.update(grads, state, params)
            return st.optim.apply_updates(params, updates), state, value

        return _stepping(st.jit(step, donate_argnums=(0, 1), executor="c"), (params, state), tokens, st.tree.leaves)

    def optimizing(leaves: int) -> Case:
        optimizer = st.optim.adamw(RATE, weight_decay=DECAY)
        params = [st.device_put(a, split) for a in flat(sizes, leaves)]
        grads = [st.device_put(a, split) for a in flat(sizes, leaves)]

        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = optimizer.update(grads, state, params)
            return st.optim.apply_updates(params, updates), state, st.zeros(())

        run = st.jit(step, donate_argnums=(0, 1), executor="c")
        return _stepping(run, (params, optimizer.init(params)), grads, st.tree.leaves)

    def multiplying() -> Case:
        params = st.tree.map(lambda a: st.device_put(a, whole), parameters(sizes))
        given = {name: st.device_put(a, split) for name, a in product_operands(sizes).items()}
        return lambda: [y.block_until_ready() for y in products(st, sizes, params, **given)] and None

    makers: dict[str, dict[str, Callable[[], Case]]] = {
        "step": {"step": lambda: training(0), "products": multiplying},
        "adamw": {"adamw": lambda: optimizing(1), "leaves": lambda: optimizing(sizes.leaves)},
        "zero": {f"zero {level}": (lambda level=level: training(level)) for level in (1, 2, 3)},
    }
    return {name: make() for name, make in makers[_group()].items()}


def _stepping(run: Callable[..., Any], start: tuple[Any, Any], given: Any, leaves: Callable[[Any], Any]) -> Case:
    """Returns a case that makes a step from the parameters and the state that the one before has left; the first one
    returns the loss.
    """
    now = list(start)

    def step() -> float | None:
        first = len(now) == 2
        params, state, value = run(now[0], now[1], given)
        now[:] = [params, state, None]
        for leaf in leaves((params, state, value)):
            leaf.block_until_ready()
        return float(value) if first else None

    return step


def jax_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of jax.jit, on all devices of the process: optimizers as optax computes them."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jnp = jax.numpy
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    causal, numbers = np.tri(sizes.length, dtype=bool), np.arange(sizes.vocabulary)

    def adamw(params: Any, state: Any, grads: Any) -> Any:
        count, mu, nu = state
        count = count + 1
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
        nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, nu, grads)
        first, second = 1 / (1 - 0.9 ** count.astype("float32")), 1 / (1 - 0.999 ** count.astype("float32"))
        params = jax.tree.map(
            lambda p, m, v: p - RATE * (m * first / (jnp.sqrt(v * second) + 1e-8) + DECAY * p), params, mu, nu
        )
        return params, (count, mu, nu)

    def initial(params: Any) -> Any:
        return jnp.zeros((), "int32"), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)

    def training() -> Case:
        def step(params: Any, state: Any, tokens: Any) -> Any:
            value, grads = jax.value_and_grad(lambda p: loss(jnp, sizes, p, tokens, causal, numbers))(params)
            norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g: g * jnp.where(norm < NORM, 1.0, NORM / norm), grads)
            return *adamw(params, state, grads), value

        params = jax.device_put(parameters(sizes), whole)
        run = jax.jit(step, donate_argnums=(0, 1))
        return _stepping(
            run, (params, jax.device_put(initial(params), whole)), jax.device_put(batch(sizes), split), jax.tree.leaves
        )

    def optimizing(leaves: int) -> Case:
        # JAX splits arrays only into equal parts.
        count = sizes.adamw // leaves // len(jax.devices()) * len(jax.devices())
        params = jax.device_put([a[:count] for a in flat(sizes, leaves)], split)
        grads = jax.device_put([a[:count] for a in flat(sizes, leaves)], split)
        run = jax.jit(lambda p, s, g: (*adamw(p, s, g), jnp.zeros(())), donate_argnums=(0, 1))
        return _stepping(run, (params, initial(params)), grads, jax.tree.leaves)

    def multiplying() -> Case:
        params = jax.device_put(parameters(sizes), whole)
        given = {name: jax.device_put(a, split) for name, a in product_operands(sizes).items()}
        # Many calls at the same time deadlock on virtual devices. The compiler computes equal products once.
        run = jax.jit(lambda params, given: products(jnp, sizes, params, **given))
        return lambda: jax.block_until_ready(run(params, given)) and None

    makers: dict[str, dict[str, Callable[[], Case]]] = {
        "step": {"step": training, "products": multiplying},
        "adamw": {"adamw": lambda: optimizing(1), "leaves": lambda: optimizing(sizes.leaves)},
        "zero": {},
    }
    return {name: make() for name, make in makers[_group()].items()}


def torch_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of PyTorch: torch.compile of the loss, and the fused AdamW."""
    import torch
    from gradient_cases import _Torch

    np = _Torch(torch)

    def training() -> Case:
        params = {name: torch.from_numpy(a).requires_grad_() for name, a in parameters(sizes).items()}
        causal = torch.tril(torch.ones(sizes.length, sizes.length, dtype=torch.bool))
        numbers, tokens = torch.arange(sizes.vocabulary), torch.from_numpy(batch(sizes))
        optimizer = torch.optim.AdamW(params.values(), lr=RATE, weight_decay=DECAY, fused=True)
        compiled = torch.compile(lambda params, tokens: loss(np, sizes, params, tokens, causal, numbers))
        first = [True]

        def step() -> float | None:
            optimizer.zero_grad()
            value = compiled(params, tokens)
            value.backward()
            torch.nn.utils.clip_grad_norm_(params.values(), NORM)
            optimizer.step()
            return float(value.detach()) if first and first.pop() else None

        return step

    def optimizing(leaves: int) -> Case:
        params = [torch.from_numpy(a).requires_grad_() for a in flat(sizes, leaves)]
        optimizer = torch.optim.AdamW(params, lr=RATE, weight_decay=DECAY, fused=True)
        for p in params:
            p.grad = p.detach().clone()
        return lambda: optimizer.step()

    def multiplying() -> Case:
        params = {name: torch.from_numpy(a) for name, a in parameters(sizes).items()}
        given = {name: torch.from_numpy(a) for name, a in product_operands(sizes).items()}
        return lambda: products(np, sizes, params, **given) and None

    makers: dict[str, dict[str, Callable[[], Case]]] = {
        "step": {"step": training, "products": multiplying},
        "adamw": {"adamw": lambda: optimizing(1), "leaves": lambda: optimizing(sizes.leaves)},
        "zero": {},
    }
    return {name: make() for name, make in makers[_group()].items()}


def traffic_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the traffic of AdamW: four arrays are read and three written, by two threads of NumPy and BLAS."""
    import numpy as np

    if _group() != "adamw":
        return {}
    arrays = [np.random.default_rng(n).standard_normal(sizes.adamw, np.float32) for n in range(4)]
    written = [np.zeros(sizes.adamw, np.float32) for _ in range(3)]
    threads = 2
    pool = ThreadPoolExecutor(threads)

    def part(number: int) -> None:
        for begin in range(number * 65536, sizes.adamw, threads * 65536):
            rows = slice(begin, begin + 65536)
            np.dot(arrays[3][rows], arrays[3][rows])
            for source, target in zip(arrays, written, strict=False):
                np.copyto(target[rows], source[rows])

    def traffic() -> None:
        list(pool.map(part, range(threads)))

    return {"adamw": traffic, "leaves": traffic}
