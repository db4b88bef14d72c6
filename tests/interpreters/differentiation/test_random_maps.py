"""Gradients of random programs of maps: with and without types, under jit, with remat, and central differences."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import shardtensor as st
from shardtensor.spmd import map_gradients
from tests.draws import drawn
from tests.interpreters.differentiation.numeric import check_gradients
from tests.layouts import mesh_of

SHAPE = (2, 4)
"""The shape of every value in a program."""

P = st.P
SPECS = {"a": P("x"), "b": P(None, "y"), "c": P(), "d": P("x", "y")}
"""The arguments of programs, of which each program has blocks of that shape."""

AXES = ['"x"', '"y"', '("x", "y")', '("y", "x")']


class Author:
    """Writes a random program, of which every value has the same shape on every device."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.names = list(SPECS)
        self.lines: list[str] = []

    def value(self) -> str:
        return self.dice.choice(self.names[-6:])

    def number(self) -> str:
        index = f"(1 + st.axis_index({self.dice.choice(AXES)}) % 3)"
        return self.dice.choice(["0.5", "1.25", "np.float64(0.75)", index])

    def collective(self, x: str) -> str:
        axis = self.dice.choice(AXES)
        size = 4 if "(" in axis else 2
        return self.dice.choice([
            f"st.psum({x}, {axis})", f"st.pmean({x}, {axis})", f"st.pmax({x}, {axis})", f"st.pmin({x}, {axis})",
            f"st.pprod({x}, {axis})", f"st.pbroadcast({x}, {axis}, {self.dice.randrange(size)})",
            f"st.pshuffle({x}, {axis}, {self.dice.sample(range(size), size)})",
            f"st.ppermute({x}, {axis}, [(0, 1)])",
            f"st.all_gather({x}, {axis}, axis=1, tiled=True)[:, 1:5]", f"st.all_gather({x}, {axis}).mean(axis=0)",
            f"st.all_gather(st.psum_scatter({x}, {axis}, scatter_dimension=1, tiled=True), {axis}, axis=1, tiled=True)",
            f"st.psum({x}.sum(), {axis}) * {self.value()}",
            f'st.all_to_all(st.all_to_all({x}, "x", 0, 1, tiled=True) ** 2, "x", 1, 0, tiled=True)',
        ])  # fmt: skip

    def expression(self) -> str:
        x = self.value()
        kind = self.dice.randrange(10)
        if kind < 4:
            return self.collective(f"st.sin({x})" if self.dice.random() < 0.5 else x)
        if kind < 5:
            return f"({x} if st.axis_index({self.dice.choice(AXES)}) % 2 else st.cos({self.value()}))"
        return self.dice.choice([
            f"st.tanh({x})", f"{x} * {self.number()}", f"{x} * {self.value()}", f"{x} - st.sin({self.value()})",
            f"st.where({x} > 0.1, {x}, {self.value()} * 0.5)", f"({x} @ {self.value()}.T) @ {self.value()} * 0.1",
            f"{x}[::-1]", f"(st.stop_gradient({x}) * {self.value()})",
            f"({x} if float({self.value()}.sum()) > 0.2 else {self.value()})",
        ])  # fmt: skip

    def write(self) -> None:
        name = f"v{len(self.lines)}"
        if self.dice.random() < 0.1:
            self.lines += [f"{name} = {self.value()}.copy()", f"{name}[0] = {self.value()}[1] * {self.number()}"]
        else:
            self.lines.append(f"{name} = {self.expression()}")
        self.names.append(name)

    def source(self) -> str:
        for _ in range(self.dice.randrange(3, 9)):
            self.write()
        first, second, third = self.value(), self.value(), self.value()
        results = f'st.psum(st.sin({first}), ("x", "y")), st.sin({second}), st.pmean({third}, "y")'
        body = "\n    ".join([*self.lines, f"return {results}"])
        return f"def program({', '.join(SPECS)}):\n    {body}\n"


def arguments(seed: int) -> list[Any]:
    rng, mesh = np.random.default_rng(seed), mesh_of((2, 2), "numpy")
    sizes = {None: 1, "x": 2, "y": 2}
    made = []
    for spec in SPECS.values():
        entries = [*spec, None, None][:2]
        shape = tuple([n * sizes[axis] for n, axis in zip(SHAPE, entries, strict=True)])
        made.append(st.device_put(rng.uniform(-1, 1, shape), st.NamedSharding(mesh, spec)))
    return made


def mapped(program: Callable[..., Any]) -> Callable[..., Any]:
    specs = {"in_specs": tuple(SPECS.values()), "out_specs": (P(), P("x", "y"), P("x"))}
    fn = st.shard_map(program, mesh=mesh_of((2, 2), "numpy"), **specs)
    return lambda *xs: sum([(y * y * (k + 1)).sum() for k, y in enumerate(fn(*xs))])


def assert_close(found: Any, wanted: Any, what: str) -> None:
    for g, w in zip(found, wanted, strict=True):
        scale = 1 + np.abs(np.asarray(w)).max()
        np.testing.assert_allclose(np.asarray(g) / scale, np.asarray(w) / scale, rtol=0, atol=1e-11, err_msg=what)


def run(seed: int) -> None:
    text = Author(seed).source()
    space: dict[str, Any] = {"st": st, "np": np}
    exec(text, space)
    fn, xs, numbers = mapped(space["program"]), arguments(seed), tuple(range(len(SPECS)))
    try:
        is_whole = "stop_gradient" not in text
        gradients = check_gradients(fn, xs, numbers, limit=1e-5) if is_whole else st.grad(fn, numbers)(*xs)
        with mock.patch.object(map_gradients, "types_of", return_value=None):
            assert_close(st.grad(fn, numbers)(*xs), gradients, "without types")
        again = st.grad(mapped(st.remat(space["program"])), numbers)
        assert_close(again(*xs), gradients, "remat")
        if "if float" not in text:
            assert_close(st.jit(st.grad(fn, numbers))(*xs), gradients, "jit")
    except BaseException as error:
        error.add_note(f"seed {seed}:\n{text}")
        raise


@pytest.mark.parametrize("first", range(0, drawn(1000, fast=20), 10))
def test_random_maps(first: int) -> None:
    for seed in range(first, first + 10):
        run(seed)
