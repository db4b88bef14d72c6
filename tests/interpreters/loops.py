"""Programs of loops and branches, which run by `st` and by `jax.lax`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import shardtensor as st


class Ours:
    """The functions of this library that the programs call, on a mesh."""

    lax = st

    def __init__(self, mesh: st.Mesh, spec: st.P) -> None:
        self.mesh, self.spec = mesh, spec

    def put(self, x: Any, *, rows: bool = False) -> Any:
        spec = st.P(*([None] * rows), *self.spec)
        spec = st.P(*[axis if n else None for axis, n in zip(spec, x.shape, strict=False)])
        return st.device_put(x, st.NamedSharding(self.mesh, spec))

    def like(self, new: Any, old: Any) -> Any:
        """A new carry in the layout of the old one."""
        return st.with_sharding_constraint(st.astype(new, old.dtype), old.sharding) if old.ndim else new

    def __getattr__(self, name: str) -> Any:
        return getattr(st, name)


class Jaxs:
    """The same functions of JAX."""

    def __init__(self) -> None:
        import jax

        jax.config.update("jax_enable_x64", True)
        self.lax, self._numpy = jax.lax, jax.numpy

    def put(self, x: Any, **_: Any) -> Any:
        return self._numpy.asarray(x)

    def like(self, new: Any, old: Any) -> Any:
        return new.astype(old.dtype)

    def concat(self, xs: Any, axis: int = 0) -> Any:
        return self._numpy.concatenate(xs, axis=axis)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._numpy, name)


def draw_body(rng: np.random.Generator, count: int) -> list[tuple[str, int, int, float]]:
    """Draws what a body computes: the name of a function, its operands and a number, for each step."""
    names = ["add", "multiply", "tanh", "sin", "maximum", "where", "mean", "roll", "flip", "window", "cumsum", "scaled"]
    return [
        (str(rng.choice(names)), int(rng.integers(8)), int(rng.integers(8)), float(rng.normal())) for _ in range(count)
    ]


def compute(ns: Any, steps: list[tuple[str, int, int, float]], values: list[Any]) -> Any:
    """Runs the steps of a body on arrays of one shape, and returns a bounded array of that shape."""
    values = list(values)
    for name, a, b, c in steps:
        x, y = values[a % len(values)], values[b % len(values)]
        if name in ("add", "multiply", "maximum"):
            made = getattr(ns, name)(x, y)
        elif name in ("tanh", "sin"):
            made = getattr(ns, name)(x)
        elif name == "where":
            made = ns.where(x > c, x, y)
        elif name == "mean":
            made = x - ns.mean(y)
        elif name == "roll":
            made = ns.roll(x, 1, axis=0)
        elif name == "flip":
            made = y[::-1] * c
        elif name == "window":
            made = ns.concat([x[1:], y[:1]], axis=0)
        elif name == "cumsum":
            made = ns.cumsum(x, axis=0)
        else:
            made = x * c + 1
        values.append(made)
    return ns.tanh(values[-1])


def draw_program(seed: int) -> tuple[Callable[[Any, Any, Any], Any], tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Returns a program of the functions, a carry and the slices of a loop; and the arrays."""
    rng = np.random.default_rng(seed)
    shape = [(6,), (5, 3), (1,), (4, 2), (16,)][rng.integers(5)]
    dtype = ["f8", "f8", "f4"][rng.integers(3)]
    n = int(rng.integers(1, 6))
    c0, xs = rng.normal(size=shape).astype(dtype), rng.normal(size=(n, *shape)).astype(dtype)
    kind = ["scan", "scan", "fori", "while", "map", "branch", "nested", "associative"][rng.integers(8)]
    first, second = draw_body(rng, int(rng.integers(1, 5))), draw_body(rng, int(rng.integers(1, 4)))
    reverse, index = bool(rng.integers(2)), int(rng.integers(-1, 4))

    def step(ns: Any, carry: Any, x: Any) -> Any:
        new = ns.like(compute(ns, first, [carry[0], carry[1], x]), carry[0])
        return (new, ns.like(compute(ns, second, [carry[0], new]), carry[1])), ns.mean(new * x)

    def scan(ns: Any, c: Any, xs: Any) -> Any:
        return ns.lax.scan(lambda carry, x: step(ns, carry, x), (c, c * 0.5), xs, reverse=reverse)

    def fori(ns: Any, c: Any, xs: Any) -> Any:
        body = lambda i, carry: ns.like(compute(ns, first, [carry, carry * 0.5]) + i * 0.25, carry)  # noqa: E731
        return ns.lax.fori_loop(1, 1 + n, body, c)

    def loop(ns: Any, c: Any, xs: Any) -> Any:
        def body(state: Any) -> Any:
            k, carry = state
            return k + 1, ns.like(compute(ns, first, [carry, xs[0]]), carry)

        return ns.lax.while_loop(lambda state: (state[0] < n) & (ns.max(state[1]) < 10), body, (ns.asarray(0), c))

    def mapped(ns: Any, c: Any, xs: Any) -> Any:
        return ns.lax.map(lambda x: {"a": compute(ns, first, [x, c]), "b": ns.sum(x)}, xs)

    def branch(ns: Any, c: Any, xs: Any) -> Any:
        fs = [lambda a, b, s=s: ns.like(compute(ns, s, [a, b]), a) for s in (first, second, first[::-1])]
        return ns.lax.switch(index, fs, c, xs[0]), ns.lax.cond(ns.mean(c) > 0, fs[0], fs[1], c, xs[0])

    def nested(ns: Any, c: Any, xs: Any) -> Any:
        def outer(carry: Any, x: Any) -> Any:
            inner = ns.lax.fori_loop(0, 2, lambda i, a: ns.like(compute(ns, first, [a, x]), a), carry)
            chosen = ns.lax.cond(
                ns.max(inner) > 0.5,
                lambda a: ns.like(a * 0.5, a),
                lambda a: ns.like(compute(ns, second, [a]), a),
                inner,
            )
            return chosen, ns.sum(chosen)

        return ns.lax.scan(outer, c, xs)

    def associative(ns: Any, c: Any, xs: Any) -> Any:
        pairs = (ns.tanh(xs), xs)
        return ns.lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), pairs, reverse=reverse)

    programs = {
        "scan": scan, "fori": fori, "while": loop, "map": mapped, "branch": branch, "nested": nested,
        "associative": associative,
    }  # fmt: skip
    return programs[kind], (c0, xs)
