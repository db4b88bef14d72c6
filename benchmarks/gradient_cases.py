"""The cases of `gradients.py`: the same gradients with every library, each library in a process of its own.

The environment variable ``GRADIENTS_GROUP`` names the group of rows for which a process makes operands and cases.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness import Case, resident_bytes

GROUPS = {
    "large": ("large", "large forward"),
    "small": ("small", "small forward"),
    "block": ("block", "block forward"),
    "embedding": ("embedding",),
    "slices": ("slices",),
}
"""The names of the rows that are sampled together, by group."""

MEMORY = ("peak", "remat")
"""The rows for the memory that a gradient takes, each measured in processes of its own."""

LAYERS, LINKS = 3, 30
"""The layers of the perceptrons, and the operators `tanh` of the chain whose memory is measured."""

OPERATORS = 200
"""The operators of the chain that is recorded."""

Arrays = list[Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of operands.

    Attributes:
        large, small: batch and width of the perceptrons.
        block: batch, sequence length, width and heads of the transformer block.
        embedding: rows and columns of the table, and the number of indices.
        slices: the number of slices, their length, and that of the array.
        chain: the number of elements of the chain whose memory is measured.
    """

    large: tuple[int, int] = (4096, 512)
    small: tuple[int, int] = (64, 32)
    block: tuple[int, int, int, int] = (16, 128, 256, 8)
    embedding: tuple[int, int, int] = (50_000, 128, 16_384)
    slices: tuple[int, int, int] = (200, 64, 1_000_000)
    chain: int = 1 << 21


SIZES = Sizes()


# -- the functions, by a library's namespace -------------------------------------------------------


def perceptron(np: Any, params: Arrays, x: Any) -> Any:
    for w in params:
        x = np.tanh(x @ w)
    return (x * x).mean()


def normalized(np: Any, x: Any) -> Any:
    d = x - np.mean(x, axis=-1, keepdims=True)
    return d / np.sqrt(np.mean(d * d, axis=-1, keepdims=True) + 1e-5)


def block(heads: int) -> Callable[..., Any]:
    """Returns the loss of a transformer block with this number of heads."""

    def loss(np: Any, params: Arrays, x: Any) -> Any:
        wq, wk, wv, wo, w1, w2 = params
        batch, length, width = x.shape

        def split(y: Any) -> Any:
            return np.swapaxes(y.reshape(batch, length, heads, width // heads), 1, 2)

        y = normalized(np, x)
        q, k, v = split(y @ wq), split(y @ wk), split(y @ wv)
        scores = q @ np.swapaxes(k, -1, -2) * (width // heads) ** -0.5
        e = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
        attended = (e / np.sum(e, axis=-1, keepdims=True)) @ v
        x = x + np.swapaxes(attended, 1, 2).reshape(batch, length, width) @ wo
        x = x + np.tanh(normalized(np, x) @ w1) @ w2
        return (x * x).mean()

    return loss


def embedded(np: Any, params: Arrays, ids: Any) -> Any:
    rows = params[0][ids]
    return (rows * rows).mean()


def sliced(sizes: Sizes) -> Callable[..., Any]:
    """Returns the sum of the squares of many slices."""
    count, length, size = sizes.slices

    def loss(np: Any, params: Arrays, x: Any) -> Any:
        total = 0.0
        for k in range(0, count * ((size - length) // count), (size - length) // count):
            part = params[0][k : k + length]
            total = total + (part * part).sum()
        return total

    return loss


def chain(np: Any, x: Any, links: int = LINKS) -> Any:
    for _ in range(links):
        x = np.tanh(x) * 0.9
    return x


def losses(sizes: Sizes) -> dict[str, Callable[..., Any]]:
    """Returns the function of each row, of a namespace, of the differentiated arrays and of another one."""
    return {
        "large": perceptron,
        "small": perceptron,
        "block": block(sizes.block[3]),
        "embedding": embedded,
        "slices": sliced(sizes),
    }


def operands(names: tuple[str, ...], sizes: Sizes) -> dict[str, tuple[Arrays, Any]]:
    """Returns the differentiated arrays and the other operand of rows, equal for all libraries."""
    import numpy as np

    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, np.float32)

    def weights(*shape: int) -> Any:
        return normal(*shape) / np.float32(np.sqrt(shape[0]))

    def layers(batch: int, width: int) -> tuple[Arrays, Any]:
        return [weights(width, width) for _ in range(LAYERS)], normal(batch, width)

    batch, length, width, _ = sizes.block
    rows, columns, count = sizes.embedding
    makers: dict[str, Callable[[], tuple[Arrays, Any]]] = {
        "large": lambda: layers(*sizes.large),
        "small": lambda: layers(*sizes.small),
        "block": lambda: (
            [*[weights(width, width) for _ in range(4)], weights(width, 4 * width), weights(4 * width, width)],
            normal(batch, length, width),
        ),
        "embedding": lambda: ([normal(rows, columns)], random.integers(0, rows, count)),
        "slices": lambda: ([normal(sizes.slices[2])], None),
    }
    return {name: makers[name]() for name in names}


# -- the cases of each library ---------------------------------------------------------------------


def _group() -> tuple[str, ...]:
    """Returns the names of the rows of the group of this process; of all for none."""
    group = os.environ.get("GRADIENTS_GROUP", "")
    names = GROUPS.get(group, () if group else tuple(name for names in GROUPS.values() for name in names))
    return tuple([name for name in names if "forward" not in name])


def _cases(
    sizes: Sizes,
    gradient: Mapping[str, Callable[..., Any]],
    forward: Mapping[str, Callable[..., Any]],
    place: Callable[[str, Arrays, Any], tuple[Any, Any]],
) -> dict[str, Case]:
    """Returns a case for each row, and a case ``checksum NAME``, to compare the libraries.

    Args:
        sizes: the sizes of operands.
        gradient: for each row, the function that returns a loss and its gradients.
        forward: the function that returns the loss.
        place: converts NumPy arrays into the library's operands.
    """
    import numpy as np

    def some(name: str, arrays: Arrays, other: Any) -> dict[str, Case]:
        params, x = place(name, arrays, other)

        def checksum() -> float:
            loss, grads = gradient[name](params, x)
            total = sum([float(np.abs(np.asarray(g, np.float64)).sum()) for g in grads])
            return float(np.asarray(loss)) + total

        made: dict[str, Case] = {
            name: lambda: gradient[name](params, x) and None,
            f"{name} forward": lambda: forward[name](params, x) and None,
            f"checksum {name}": checksum,
        }
        return {key: case for key, case in made.items() if "forward" not in key or name in forward}

    names = tuple([name for name in _group() if name in gradient])
    cases: dict[str, Case] = {}
    for name, (arrays, other) in operands(names, sizes).items():
        cases |= some(name, arrays, other)
    return cases


def growth(call: Case) -> float | None:
    """Returns the MiB by which the peak of the memory of a new process grows in a call."""
    import resource

    before = resident_bytes()
    call()
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None if before is None else (peak - before) / 2**20


def recorded(plain: Case, recording: Case) -> float:
    """Returns the seconds that recording an operator of a chain takes, the median of 20 runs."""

    def seconds(call: Case) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    plain(), recording()
    both = sorted([seconds(recording) - seconds(plain) for _ in range(20)])
    return both[10] / OPERATORS


def _shardtensor_cases(sizes: Sizes, wrap: Callable[[Any], Any]) -> dict[str, Case]:
    import shardtensor as st

    mesh = st.make_mesh((8,), ("d",))
    split, whole = st.NamedSharding(mesh, st.P("d")), st.NamedSharding(mesh, st.P())
    by_name = {name: (lambda params, x, f=f: f(st, params, x)) for name, f in losses(sizes).items()}

    def place(name: str, arrays: Arrays, other: Any) -> tuple[Any, Any]:
        where = split if name == "slices" else whole
        return [st.device_put(a, where) for a in arrays], None if other is None else st.device_put(other, split)

    def waiting(f: Callable[..., Any]) -> Callable[..., Any]:
        called = wrap(f)

        def call(*args: Any) -> Any:
            result = called(*args)
            for leaf in st.tree.leaves(result):
                leaf.block_until_ready()
            return result

        return call

    gradient = {name: waiting(st.value_and_grad(f)) for name, f in by_name.items()}
    return _cases(sizes, gradient, {name: waiting(f) for name, f in by_name.items()}, place)


def eager_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of shardtensor in eager mode, and those that measure recording and memory."""
    import numpy as np

    import shardtensor as st

    split = st.NamedSharding(st.make_mesh((8,), ("d",)), st.P("d"))
    x = st.device_put(np.ones(64), split)
    parts = st.remat(lambda x: chain(st, x, LINKS // 5))

    def multiplied(x: Any) -> Any:
        for _ in range(OPERATORS):
            x = x * 1.01
        return x

    def recomputed(x: Any) -> Any:
        for _ in range(5):
            x = parts(x)
        return x.sum()

    def peak(loss: Callable[..., Any]) -> Callable[[], float | None]:
        x = st.device_put(np.ones(sizes.chain), split)
        return lambda: growth(lambda: st.grad(loss)(x).block_until_ready())

    return _shardtensor_cases(sizes, lambda f: f) | {
        "recording": lambda: recorded(lambda: multiplied(x), lambda: st.vjp(multiplied, x)),
        "peak": peak(lambda x: chain(st, x).sum()),
        "remat": peak(recomputed),
    }


def jit_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of st.jit of gradients."""
    import numpy as np

    import shardtensor as st

    split = st.NamedSharding(st.make_mesh((8,), ("d",)), st.P("d"))

    def peak() -> float | None:
        small = st.jit(st.grad(lambda x: chain(st, x).sum()), executor="c")
        x = st.device_put(np.ones(sizes.chain), split)
        small.lower(x).compile()
        return growth(lambda: small(x).block_until_ready())

    return _shardtensor_cases(sizes, lambda f: st.jit(f, executor="c")) | {"peak": peak}


def numpy_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of NumPy, with gradients by hand: as few passes over memory as NumPy needs."""
    import numpy as np

    def layers(params: Arrays, x: Any) -> tuple[Any, Arrays]:
        kept = [x]
        for w in params:
            x = x @ w
            kept.append(np.tanh(x, out=x))
        g = x * np.float32(2 / x.size)
        grads: Arrays = []
        for k in range(LAYERS - 1, -1, -1):
            y = kept[k + 1]
            slope = y * y
            g *= np.subtract(1, slope, out=slope)
            grads.append(kept[k].T @ g)
            g = g @ params[k].T if k else g
        return np.mean(np.square(x)), grads[::-1]

    def rows(params: Arrays, ids: Any) -> tuple[Any, Arrays]:
        table = params[0]
        picked = table[ids]
        order = np.argsort(ids, kind="stable")
        begins = np.flatnonzero(np.diff(ids[order], prepend=-1))
        g = np.zeros_like(table)
        g[ids[order][begins]] = np.add.reduceat(picked[order] * np.float32(2 / picked.size), begins, axis=0)
        return np.mean(picked * picked), [g]

    def parts(params: Arrays, x: Any) -> tuple[Any, Arrays]:
        (a,), (count, length, size) = params, sizes.slices
        g, total, step = np.zeros_like(a), 0.0, (size - length) // count
        for k in range(0, count * step, step):
            part = a[k : k + length]
            total = total + (part * part).sum()
            g[k : k + length] += 2 * part
        return total, [g]

    by_name = losses(sizes)
    gradient = {"large": layers, "small": layers, "embedding": rows, "slices": parts}
    forward = {name: lambda params, x, f=by_name[name]: f(np, params, x) for name in ("large", "small", "block")}
    return _cases(sizes, gradient, forward, lambda name, arrays, other: (arrays, other))


def _torch_cases(sizes: Sizes, wrap: Callable[[Any], Any]) -> dict[str, Case]:
    import torch

    np = _Torch(torch)
    by_name = {name: wrap(lambda params, x, f=f: f(np, params, x)) for name, f in losses(sizes).items()}

    def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(params: Arrays, x: Any) -> tuple[Any, Any]:
            loss = f(params, x)
            return loss.detach(), torch.autograd.grad(loss, params)

        return call

    def forward(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(params: Arrays, x: Any) -> Any:
            with torch.no_grad():
                return f(params, x)

        return call

    def place(name: str, arrays: Arrays, other: Any) -> tuple[Any, Any]:
        params = [torch.from_numpy(a).requires_grad_() for a in arrays]
        return params, None if other is None else torch.from_numpy(other)

    return _cases(
        sizes,
        {name: gradient(f) for name, f in by_name.items()},
        {name: forward(f) for name, f in by_name.items()},
        place,
    )


def torch_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of PyTorch without a compiler."""
    import torch

    def multiplied(x: Any) -> Any:
        for _ in range(OPERATORS):
            x = x * 1.01
        return x

    x, y = torch.ones(64, dtype=torch.float64), torch.ones(64, dtype=torch.float64).requires_grad_()

    def peak() -> float | None:
        x = torch.ones(sizes.chain, dtype=torch.float64).requires_grad_()
        return growth(lambda: torch.autograd.grad(chain(torch, x).sum(), x))

    return _torch_cases(sizes, lambda f: f) | {
        "recording": lambda: recorded(lambda: multiplied(x), lambda: multiplied(y)),
        "peak": peak,
    }


def compiled_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of torch.compile, without the slices, of which it compiles each one."""
    import torch

    return {name: case for name, case in _torch_cases(sizes, torch.compile).items() if "slices" not in name}


class _Torch:
    """A namespace with PyTorch's functions under NumPy's names."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, "amax" if name == "max" else name)


def jax_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of jax.jit; every call waits for its result."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_enable_x64", True)
    mesh = Mesh(np.array(jax.devices()), ("d",))
    split, whole = NamedSharding(mesh, PartitionSpec("d")), NamedSharding(mesh, PartitionSpec())
    by_name = {name: (lambda params, x, f=f: f(jax.numpy, params, x)) for name, f in losses(sizes).items()}

    def place(name: str, arrays: Arrays, other: Any) -> tuple[Any, Any]:
        where = split if name == "slices" else whole
        return [jax.device_put(a, where) for a in arrays], None if other is None else jax.device_put(other, split)

    def blocking(f: Callable[..., Any]) -> Callable[..., Any]:
        compiled = jax.jit(f)
        return lambda *args: jax.block_until_ready(compiled(*args))

    def peak() -> float | None:
        x = jax.device_put(np.ones(sizes.chain), split)
        compiled = jax.jit(jax.grad(lambda x: chain(jax.numpy, x).sum())).lower(x).compile()
        return growth(lambda: jax.block_until_ready(compiled(x)))

    gradient = {name: blocking(jax.value_and_grad(f)) for name, f in by_name.items()}
    return _cases(sizes, gradient, {name: blocking(f) for name, f in by_name.items()}, place) | {"peak": peak}
