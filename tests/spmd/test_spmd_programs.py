"""Random programs with collectives, on every device of a mesh, by each way of mapping, compared with NumPy.

NumPy runs the same lines on the list of all devices' arrays. Programs in which one device departs from the others must
raise an error within the time limit, and the next map must work.

A program is text. On a device, a name stands for that device's array; for NumPy, for the list of the arrays of all
devices, in mesh order.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.interpreters.test_state import Dice, assert_alike, assert_near, held, quietly
from tests.layouts import NAMES, USABLE, array, everywhere, mesh_of, on_host, strided
from tests.spmd.test_collectives import EXACT, Call, dtypes_of, teams_along
from tests.spmd.test_scheduler import (
    hard_end,  # noqa: F401 - the first one works by being here
    in_time,
    total_works,
)

GRIDS = [(1,), (2,), (3,), (5,), (7,), (8,), (2, 2), (2, 3), (4, 2), (1, 3), (2, 2, 2)]
MANY = (11,)
"""More programs than devices, which only `pmap` accepts."""
LIMIT = 10.0
"""The time limit of a program, in seconds."""
SIZES = [0, 1, 2, 3, 4, 5, 8, 9]

Blocks = list[Any]


class Mine(Exception):
    """An error of the user's code."""


# -- the namespaces of programs --------------------------------------------------------------------


def groups_of(teams: Sequence[Sequence[int]], groups: Any) -> list[list[int]]:
    """Returns the positions of the devices in each group of each team."""
    return [[team[i] for i in group] for team in teams for group in (groups or [range(len(team))])]


class Oracle:
    """NumPy's namespace for a grid, in which names are lists of the arrays of all devices."""

    def __init__(self, grid: Sequence[int]) -> None:
        self.grid, self.names = tuple(grid), NAMES[: len(grid)]
        self.size = math.prod(grid)
        self.space: dict[str, Any] = {
            "given": self.given, "local": self.local, "call": self.call, "only": self.only, "inner": self.inner,
        }  # fmt: skip

    def given(self, shapes: Sequence[tuple[int, ...]], dtype: str, seed: int) -> Blocks:
        return [array(shape, dtype, seed + k) for k, shape in enumerate(shapes)]

    def local(self, text: str, *names: Blocks) -> Blocks:
        rows = zip(*names, strict=True)
        return [np.asarray(expression(text)(np, k, *row)) for k, row in enumerate(rows)]

    def teams(self, axes: Sequence[str], groups: Any = None) -> list[list[int]]:
        return groups_of(teams_along(self.grid, self.names, axes), groups)

    def call(self, x: Any, axes: Sequence[str], groups: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(self.call(part, axes, groups, name, *args, **kwargs) for part in x)
        found: Blocks = [None] * self.size
        if name in ("ppermute", "pshuffle"):  # their indices count in mesh order, as JAX's do
            axes = [axis for axis in self.names if axis in axes]
        for team in self.teams(axes, groups):
            for k, answer in zip(team, Call(name, args, kwargs).answer([x[k] for k in team]), strict=True):
                found[k] = np.asarray(answer)
        return found

    def only(self, axis: str, index: int, x: Blocks, axes: Sequence[str], name: str, *args: Any) -> Blocks:
        whole = self.call(x, axes, None, name, *args)
        place = np.indices(self.grid)[self.names.index(axis)].ravel()
        return [w if p == index else old for w, p, old in zip(whole, place, x, strict=True)]

    def inner(self, x: Blocks, count: int, axes: Sequence[str], name: str) -> Blocks:
        pieces = [piece for block in x for piece in np.array_split(block, count)]
        fine = Oracle((*self.grid, count))
        fine.names = (*self.names, "k")
        found = fine.call(pieces, axes, None, name)
        return [np.concatenate(found[k : k + count]) for k in range(0, len(found), count)]


@functools.lru_cache(4096)
def expression(text: str) -> Callable[..., Any]:
    """Returns an expression as a function of the namespace, the position and one or two arrays."""
    return eval(f"lambda xp, i, a, b=None: {text}")  # type: ignore[no-any-return]


class OnDevice:
    """The namespace of one device."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.position = int(st.axis_index(self.names))
        self.device = st.current_device()
        self.space: dict[str, Any] = {
            "given": self.given, "local": self.local, "call": self.call, "only": self.only, "inner": self.inner,
            "axis_size": st.axis_size,
        }  # fmt: skip

    def given(self, shapes: Sequence[tuple[int, ...]], dtype: str, seed: int) -> Any:
        return st.asarray(array(shapes[self.position], dtype, seed + self.position))

    def local(self, text: str, *names: Any) -> Any:
        return expression(text)(st, self.position, *names)

    def call(self, x: Any, axes: Sequence[str], groups: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        more = {} if groups is None else {"axis_index_groups": groups}
        return getattr(st, name)(x, axes[0] if len(axes) == 1 else tuple(axes), *args, **kwargs, **more)

    def only(self, axis: str, index: int, x: Any, axes: Sequence[str], name: str, *args: Any) -> Any:
        return self.call(x, axes, None, name, *args) if st.axis_index(axis) == index else x

    def inner(self, x: Any, count: int, axes: Sequence[str], name: str) -> Any:
        bounds = [0, *itertools.accumulate(len(p) for p in np.array_split(np.empty(x.shape[0]), count))]
        pieces = [x[a:b] for a, b in itertools.pairwise(bounds)]
        return st.concat(st.pmap(lambda piece: self.call(piece, axes, None, name), pieces, axis_name="k"))

    def on_host(self, x: Any) -> np.ndarray:
        """Returns a host copy of a name's array, or of the tensor that an inner map returned."""
        return np.array(x) if isinstance(x, st.ShardedTensor) else on_host(x, self.device)


class OnRow(OnDevice):
    """The namespace of a program that owns several devices, in which names are tensors over them."""

    def given(self, shapes: Sequence[tuple[int, ...]], dtype: str, seed: int) -> Any:
        shape = shapes[self.position]
        row = st.zeros(()).sharding.mesh
        parts: list[Any] = [None] * len(shape)
        if (home := seed % (len(shape) + 1)) < len(shape):
            parts[home] = row.axis_names
        sharding = st.NamedSharding(row, st.P(*parts), memory_kind="pinned_host" if seed % 7 == 0 else None)
        return st.device_put(array(shape, dtype, seed + self.position), sharding)

    def on_host(self, x: Any) -> np.ndarray:
        for shard in x.addressable_shards:
            assert_alike(held(shard), np.asarray(x)[shard.index], f"{shard.device}")
        return np.array(x)


# -- the ways of mapping ---------------------------------------------------------------------------


def by_shard_map(body: Callable[[], Any], mesh: st.Mesh) -> None:
    st.shard_map(lambda: body(), mesh=mesh, in_specs=(), out_specs=st.P())()


def by_maps_in_maps(body: Callable[[], Any], mesh: st.Mesh) -> None:
    """Maps by one `shard_map` for each axis of the mesh, the last one over single devices."""

    def level(axes: Sequence[str]) -> Any:
        inside = body if len(axes) == 1 else lambda: level(axes[1:])()
        return st.shard_map(lambda: inside(), mesh=mesh, in_specs=(), out_specs=st.P(), axis_names={axes[0]})

    level(mesh.axis_names)()


def by_pmap(body: Callable[[], Any], mesh: st.Mesh) -> None:
    """Maps by `pmap` of nested lists, one level for each axis of the mesh."""
    items: Any = [st.device_put(np.array(float(k)), device) for k, device in enumerate(mesh.flat)]
    for size in mesh.axis_sizes[:0:-1]:
        items = [items[k : k + size] for k in range(0, len(items), size)]

    def level(x: Any, axes: Sequence[str]) -> Any:
        inside = (lambda _: body()) if len(axes) == 1 else (lambda row: level(row, axes[1:]))
        return st.pmap(inside, x, axis_name=axes[0])

    level(items, mesh.axis_names)


def by_pmap_of_arrays(body: Callable[[], Any], mesh: st.Mesh) -> None:
    """Maps by `pmap` of one array, one level for each axis of the mesh."""

    def level(x: Any, axes: Sequence[str], **where: Any) -> Any:
        def inside(part: Any) -> Any:
            if len(axes) > 1:
                return level(part, axes[1:], devices=part.sharding.mesh)
            body()
            return part

        return st.pmap(inside, x, axis_name=axes[0], **where)

    level(np.zeros(mesh.axis_sizes), mesh.axis_names, devices=mesh)


def by_smap(body: Callable[[], Any], mesh: st.Mesh) -> None:
    """Maps by `smap`, which chooses the grid."""

    def inside(x: Any) -> Any:
        body()
        return x

    axes = tuple(range(len(mesh.axis_sizes))) if len(mesh.axis_sizes) > 1 else [0]
    st.smap(inside, np.zeros(mesh.axis_sizes), axes=axes, axis_name=mesh.axis_names, devices=mesh.flat)


WAYS = {f.__name__.removeprefix("by_"): f for f in (by_shard_map, by_maps_in_maps, by_pmap, by_pmap_of_arrays, by_smap)}


def rows_by_shard_map(body: Callable[[], Any], mesh: st.Mesh) -> None:
    st.shard_map(lambda: body(), mesh=mesh, in_specs=(), out_specs=st.P(), axis_names={"x"})()


def rows_by_pmap(body: Callable[[], Any], mesh: st.Mesh) -> None:
    rows = [st.device_put(np.zeros(9), st.Mesh(row, ("r",))) for row in mesh.devices]
    st.pmap(lambda _: body(), rows, axis_name="x")


def rows_by_pmap_of_arrays(body: Callable[[], Any], mesh: st.Mesh) -> None:
    st.pmap(lambda x: (body(), x)[1], np.zeros(mesh.axis_sizes), axis_name="x", devices=mesh)


ROWS = {f.__name__: f for f in (rows_by_shard_map, rows_by_pmap, rows_by_pmap_of_arrays)}
"""The ways of mapping in which each program owns one row of the mesh."""
SQUARISH = [(1,), (2,), (3,), (5,), (7,), (8,), (2, 2), (4, 2), (2, 2, 2)]
"""The grids that `smap` chooses for as many devices."""


def run_many(body: Callable[[], Any], count: int, backend: str) -> None:
    """Runs ``count`` programs, distributed over all devices."""
    with st.use_mesh(mesh_of((8,), backend)):
        st.pmap(lambda _: body(), [float(k) for k in range(count)], axis_name="x")


# -- running programs ------------------------------------------------------------------------------


def device_lines(lines: Sequence[str]) -> list[tuple[str, Any]]:
    return [(line, compile(line, "<program>", "exec")) for line in lines]


def other_dtype(x: Any) -> str:
    return "float32" if str(x.dtype).endswith("int8") else "int8"


class Fault:
    """A departure from the program: one device replaces one line."""

    def __init__(self, position: int, line: int, kind: str) -> None:
        self.position, self.line, self.kind = position, line, kind

    def __repr__(self) -> str:
        return f"Fault({self.position}, {self.line}, {self.kind!r})"

    def apply(self, line: str, space: dict[str, Any]) -> bool:
        """Runs the replacement; returns whether the device continues with the next line."""
        statement = ast.parse(line).body[0]
        assert isinstance(statement, ast.Assign)
        assert isinstance(statement.value, ast.Call)
        name, (given, axes) = ast.unparse(statement.targets[0]), map(ast.unparse, statement.value.args[:2])
        if self.kind == "raise":
            raise Mine("on purpose")
        if self.kind == "return":
            return False
        if self.kind == "other":
            another = "'pbroadcast', 0" if "pshuffle" in line else f"'pshuffle', list(range(axis_size({axes})))"
            given = f"call({given}, {axes}, None, {another})"
        if self.kind in ("drop", "other"):
            exec(f"{name} = {given}", space)
            return True
        old = dict(space)
        if self.kind == "dtype":
            parts = given.strip("()").split(", ")
            space |= {part: st.astype(space[part], other_dtype(space[part])) for part in parts}
        exec(line, space)
        space |= {key: value for key, value in old.items() if key != name}
        if self.kind == "twice":
            exec(line, space)
        return True


def run_lines(
    grid: tuple[int, ...],
    way: str,
    lines: Sequence[str],
    backend: str,
    order: Sequence[int],
    fault: Fault | None = None,
) -> list[dict[str, Any]]:
    """Runs a program and returns the arrays of each device by name."""
    found: list[dict[str, Any]] = [{} for _ in range(math.prod(grid))]
    codes = device_lines(lines)

    def body() -> None:
        here = OnRow(("x",)) if way in ROWS else OnDevice(NAMES[: len(grid)])
        for number, (line, code) in enumerate(codes):
            if fault is not None and (fault.position, fault.line) == (here.position, number):
                if not fault.apply(line, here.space):
                    return
            else:
                exec(code, here.space)
        for name in [n for n in here.space if n[0] == "v"]:
            value = here.space[name]
            parts = value if isinstance(value, tuple) else (value,)
            copies = tuple(map(here.on_host, parts))
            found[here.position][name] = copies if isinstance(value, tuple) else copies[0]

    if math.prod(grid) > 8:
        run_many(body, math.prod(grid), backend)
        return found
    devices = st.devices(backend)
    mesh = st.make_mesh(grid, NAMES[: len(grid)], devices=[devices[k] for k in order[: math.prod(grid)]])
    if way in ROWS:
        mesh = st.make_mesh((*grid, 8 // grid[0]), ("x", "r"), devices=[devices[k] for k in order])
    (WAYS | ROWS)[way](body, mesh)
    return found


def replay(grid: tuple[int, ...], way: str, text: str, backend: str, order: Sequence[int] = range(8)) -> None:
    """Runs a program, for example one that a failed test has printed, and compares its arrays with NumPy's."""
    lines = [line.strip() for line in text.strip().splitlines()]
    oracle = Oracle(grid)
    with quietly():
        for line in lines:
            exec(line, oracle.space)
        found = run_lines(grid, way, lines, backend, order)
    for name in [n for n in oracle.space if n[0] == "v"]:
        wanted = oracle.space[name]
        for k, mine in enumerate(found):
            pairs = zip(mine[name], wanted, strict=True) if isinstance(wanted, tuple) else [(mine[name], wanted)]
            for got, answer in pairs:
                compare = assert_alike if backend in EXACT else assert_near
                compare(got, answer[k], f"{name} on device {k}")


# -- generating programs ---------------------------------------------------------------------------


def same(shapes: Sequence[Any]) -> bool:
    return all(shape == shapes[0] for shape in shapes)


def without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    axis %= len(shape)
    return shape[:axis] + shape[axis + 1 :]


class Author:
    """Writes the next line of a program, which the oracle runs at once."""

    def __init__(self, dice: Dice, grid: tuple[int, ...], backend: str) -> None:
        self.pick, self.whole, self.once_in = dice.pick, dice.whole, dice.once_in
        self.oracle, self.backend = Oracle(grid), backend
        self.lines: list[str] = []
        self.numbers = itertools.count(1)
        self.rendezvous: dict[int, list[list[int]]] = {}
        """For each line with a collective of all devices, the positions of the devices in each group."""

    @property
    def known(self) -> list[str]:
        return [n for n, x in self.oracle.space.items() if n[0] == "v" and isinstance(x, list)]

    def add(self, text: str) -> None:
        line = f"v{next(self.numbers)} = {text}"
        exec(line, self.oracle.space)
        self.lines.append(line)

    def write(self) -> None:
        known = self.known
        if len(known) < 2 or self.once_in(6):
            self.add(self.given())
            return
        name = self.pick(known[-5:])
        kind = self.pick([self.met, self.met, self.met, self.computed, self.computed, self.branched, self.nested])
        text = kind(name, self.oracle.space[name])
        if text:
            self.add(text)

    def permuted(self, items: Sequence[Any]) -> list[Any]:
        return sorted(items, key=lambda _: self.whole(0, 999))

    def given(self) -> str:
        ndim = self.pick([0, 1, 1, 2, 2, 3])
        shape = tuple(self.pick(SIZES) for _ in range(ndim))
        shapes = [shape] * self.oracle.size
        if ndim and self.once_in(3):
            at = self.whole(0, ndim - 1)
            shapes = [(*s[:at], self.pick(SIZES), *s[at + 1 :]) for s in shapes]
        elif ndim and self.once_in(2):
            at = self.whole(0, ndim - 1)
            shapes = [(*s[:at], self.pick(self.oracle.grid), *s[at + 1 :]) for s in shapes[:1]] * self.oracle.size
        return f"given({shapes}, '{self.pick(dtypes_of(self.backend))}', {self.whole(0, 99)})"

    def axes(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(self.permuted(names)[: self.whole(1, len(names))])

    def groups(self, count: int) -> list[list[int]] | None:
        if self.once_in(2):
            return None
        indices = self.permuted(range(count))
        cuts = sorted({0, count, *(self.whole(1, count) for _ in range(self.whole(0, 3)))})
        return [indices[a:b] for a, b in itertools.pairwise(cuts)]

    def met(self, name: str, x: Blocks) -> str:
        """Writes a collective of all devices."""
        axes = self.axes(self.oracle.names)
        count = math.prod(self.oracle.grid[self.oracle.names.index(a)] for a in axes)
        moves = self.once_in(3)
        groups = None if moves else self.groups(count)
        call = self.move(count) if moves else self.pick([*self.collectives(x, self.oracle.teams(axes, groups)), ""])
        if not call:
            return ""
        self.rendezvous[len(self.lines)] = self.oracle.teams(axes, groups)
        alike = [n for n in self.known if [b.shape for b in self.oracle.space[n]] == [b.shape for b in x]]
        other = self.pick(alike)
        if self.oracle.space[other][0].dtype == x[0].dtype and self.once_in(6):
            name = f"({name}, {other})"
        return f"call({name}, {axes}, {groups}, {call})"

    def move(self, count: int) -> str:
        order, others = self.permuted(range(count)), self.permuted(range(count))
        pairs = list(zip(order, others, strict=True))[: self.whole(0, count)]
        return str(self.pick([f"'ppermute', {pairs}", f"'pshuffle', {order}", f"'pbroadcast', {order[0]}"]))

    def collectives(self, x: Blocks, teams: Sequence[Sequence[int]]) -> list[str]:
        """Returns the collectives that accept these arrays."""
        ndim, shapes = x[0].ndim, [[x[k].shape for k in team] for team in teams]
        alike, calls = all(map(same, shapes)), []
        if alike:
            calls += [f"'{name}'" for name in self.reductions(x)]
            calls += [f"'all_gather', axis={self.whole(-ndim - 1, ndim)}"] * (ndim < 4)
        if not ndim:
            return calls
        at, to = self.whole(-ndim, ndim - 1), self.whole(-ndim, ndim - 1)
        square = all(s[0][at] == len(s) for s in shapes)
        if alike:
            calls += [f"'psum_scatter', scatter_dimension={at}, tiled=True"] * 2
        if alike and square:
            calls += [f"'psum_scatter', scatter_dimension={at}", f"'all_to_all', {at}, {to}", f"'pswapaxes', {at}"] * 2
        if all(same([without(shape, to) for shape in s]) for s in shapes):
            calls += [f"'all_gather', axis={to}, tiled=True", f"'all_to_all', {at}, {to}, tiled=True"] * 2
        return calls

    def reductions(self, x: Blocks) -> list[str]:
        """Returns the reductions whose results stay small, without complex products: NumPy rounds them by position."""
        kind, largest = x[0].dtype.kind, max(np.abs(b).max(initial=0) for b in x)
        names = ["psum", "pmean"] if kind in "biu" or largest < 1e3 else []
        names += ["pmax", "pmin"] if kind != "c" or self.backend != "torch" else []
        return names + (["pprod"] if kind in "biu" or (kind == "f" and largest < 3) else [])

    def computed(self, name: str, x: Blocks) -> str:
        """Writes a local operator."""
        ndim, kind = x[0].ndim, x[0].dtype.kind
        ways = ["a", "xp.reshape(a, (-1,))", "xp.expand_dims(a, axis=0)", "a != 0"] if ndim < 4 else ["a != 0"]
        ways += ["a + a"] if kind in "iuc" or (kind == "f" and all(np.all(np.abs(b) < 100) for b in x)) else []
        ways += ["a * (i % 3)"] if kind in "iuf" else []
        if ndim:
            ways += ["a[i % 3 :]", "a[: i + 1]", "a[..., :2]", "xp.flip(a, axis=0)", "xp.concat([a, a], axis=-1)"]
            ways += ["xp.sum(a, axis=0)", "xp.any(a, axis=-1)"] if kind in "bi" else ["xp.any(a, axis=-1)"]
            ways += [f"xp.moveaxis(a, 0, {ndim - 1})", "xp.roll(a, i, axis=0)"]
        if self.once_in(3):
            alike = [
                n for n in self.known if all(p.shape == q.shape for p, q in zip(self.oracle.space[n], x, strict=True))
            ]
            other = self.pick(alike)
            if self.oracle.space[other][0].dtype == x[0].dtype:
                return f"local('xp.where(a != b, a, b)', {name}, {other})"
        if max(b.size for b in x) > 400:
            ways = [f"a[{', '.join([':2'] * ndim)}]"]
        return f"local('{self.pick(ways)}', {name})"

    def branched(self, name: str, x: Blocks) -> str:
        """Writes a collective of only those devices that have one index along an axis."""
        names = self.oracle.names
        if len(names) < 2:
            return ""
        axis = self.pick(names)
        axes = self.axes([n for n in names if n != axis])
        teams = self.oracle.teams(axes)
        keeps = [r for r in self.reductions(x) if r in ("pmax", "pmin")]
        if not all(same([x[k].shape for k in team]) for team in teams):
            keeps = []
        call = self.pick([*(f"'{r}'" for r in keeps), self.move(len(teams[0]))])
        index = self.whole(0, self.oracle.grid[names.index(axis)] - 1)
        return f"only('{axis}', {index}, {name}, {axes}, {call})"

    def nested(self, name: str, x: Blocks) -> str:
        """Writes a map over pieces of each device's array."""
        count = self.whole(1, 3)
        if not x[0].ndim or not same([b.shape for b in x]) or x[0].shape[0] % count:
            return ""
        axes = self.permuted([*self.axes(self.oracle.names), "k"]) if self.once_in(2) else ["k"]
        calls = self.reductions(x)
        return f"inner({name}, {count}, {tuple(axes)}, '{self.pick(calls)}')" if calls else ""


class AuthorOfRows(Author):
    """Writes programs whose names are tensors over several devices; collectives of these keep their shapes."""

    def met(self, name: str, x: Blocks) -> str:
        return super().met(name, x) if same([b.shape for b in x]) else ""

    def collectives(self, x: Blocks, teams: Sequence[Sequence[int]]) -> list[str]:
        return [f"'{name}'" for name in self.reductions(x)]

    def branched(self, name: str, x: Blocks) -> str:
        return ""

    nested = branched


def made_up(dice: Dice, backend: str, length: int) -> tuple[tuple[int, ...], str, Author, list[int]]:
    """Generates a program: returns a grid, a way of mapping, the program's author, and an order of devices."""
    way = dice.pick([*WAYS, *ROWS])
    grid = dice.pick([(2,), (3,), (4,)] if way in ROWS else SQUARISH if way == "smap" else GRIDS)
    if way == "pmap" and dice.once_in(6):
        grid = MANY
    author = (AuthorOfRows if way in ROWS else Author)(dice, grid, backend)
    with quietly():
        for _ in range(length):
            author.write()
    order = author.permuted(range(8)) if dice.once_in(2) else list(range(8))
    return grid, way, author, order


def failure(
    grid: tuple[int, ...], way: str, lines: Sequence[str], backend: str, order: Sequence[int]
) -> Exception | None:
    try:
        in_time(lambda: replay(grid, way, "\n".join(lines), backend, order), LIMIT)
    except NameError:
        return None
    except Exception as error:
        return error
    return None


def shortened(fails: Callable[[list[str]], Any], lines: list[str]) -> list[str]:
    """Returns a failing program without the lines that are not needed for the failure."""
    for at in range(len(lines) - 1, -1, -1):
        fewer = lines[:at] + lines[at + 1 :]
        if fails(fewer):
            lines = fewer
    return lines


def run_seed(seed: int, backend: str, length: int) -> None:
    grid, way, author, order = made_up(Dice(seed), backend, length)
    error = failure(grid, way, author.lines, backend, order)
    if error is not None:
        lines = shortened(lambda fewer: failure(grid, way, fewer, backend, order), author.lines)
        found = failure(grid, way, lines, backend, order) or error
        text = "\n".join(lines)
        raise AssertionError(
            f'{found!r}\nseed {seed}:\nreplay({grid}, {way!r}, """\n{text}\n""", {backend!r}, {order})'
        )


# -- the tests -------------------------------------------------------------------------------------


@everywhere
def test_programs(backend: str) -> None:
    for seed in strided(range(20), 2, USABLE.index(backend)):
        run_seed(seed, backend, 12)


@pytest.mark.full
@everywhere
def test_many_programs(backend: str) -> None:
    """Runs ``SHARDTENSOR_PROGRAMS`` programs, 2000 by default."""
    for seed in range(1000, 1000 + int(os.environ.get("SHARDTENSOR_PROGRAMS", "2000"))):
        run_seed(seed, backend, 12)


# -- one device does something else ----------------------------------------------------------------

FAULTS = ("raise", "return", "drop", "twice", "other", "dtype")


def run_fault(seed: int, backend: str, length: int) -> None:
    """One device departs from a program at a collective of several devices; the map must raise, and the next map work."""
    dice = Dice(seed)
    grid, way, author, order = made_up(dice, backend, length)
    places = [(n, team) for n, teams in author.rendezvous.items() for team in teams if len(team) > 1]
    if not places:
        return
    line, team = dice.pick(places)
    fault = Fault(dice.pick(team), line, dice.pick(FAULTS))
    what = f"seed {seed}: {grid}, {way!r}, {fault}, {author.lines}"
    with quietly(), pytest.raises(Exception) as caught:  # noqa: PT011 - which one it is depends on the fault
        in_time(lambda: run_lines(grid, way, author.lines, backend, order, fault), LIMIT)
    error = caught.value
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    if fault.kind == "raise":
        assert isinstance(error, Mine), f"{error!r} {what}"
        assert grid == MANY or way in ROWS or f"on {backend}:{order[fault.position]}" in text, f"{text} {what}"
    devices = st.devices(backend)
    in_time(lambda: total_works(list(devices)), LIMIT)
    assert isinstance(error, (Mine, st.ShardTensorError, ValueError, TypeError, IndexError)), f"{error!r} {what}"


@pytest.mark.parametrize("backend", ["numpy", "checked"])
def test_one_device_deviates(backend: str) -> None:
    for seed in strided(range(20), 2, USABLE.index(backend)):
        run_fault(seed, backend, 8)


@pytest.mark.full
@everywhere
def test_one_device_deviates_often(backend: str) -> None:
    for seed in range(1000, 2000):
        run_fault(seed, backend, 8)
