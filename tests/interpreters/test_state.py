"""Random programs of views, writes and shared values: the same statements on NumPy arrays and on several backends, of
shared and of separate memories.

After every statement all handles have NumPy's elements, each device holds its part, and all backends have the same
layouts and transfers.

A program is text. Each line runs in three namespaces, whose helpers differ: for NumPy ``put`` copies, ``pieces`` is
``array_split``, and a donated array is deleted. NumPy's arrays own their elements in row-major order, as tensors do.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import pickle
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.backend import current_device
from shardtensor.backend.registry import load
from tests.draws import drawn
from tests.interpreters.test_random_programs import sets, twin
from tests.layouts import NAMES, USABLE, array, mesh_of, on_host

Shape = tuple[int, ...]

BACKENDS = ("numpy", "checked")
HANDLE = re.compile(r"\bh\d")
ERRORS = (IndexError, ValueError, TypeError, OverflowError)
MESHES = [(1,), (2,), (3,), (7,), (8,), (2, 2), (4, 2), (2, 3), (2, 2, 2)]
SIZES = {3: [0, 1, 1, 2, 3, 3, 4, 5, 8], 6: [0, 1, 1, 2, 2, 2, 3]}
"""The sizes of dimensions by the largest number of dimensions."""
NARROW = ["bool", "int8", "int16", "int32", "uint8", "float16", "float32", "complex64"]
UNSIGNED = ["uint16", "uint32", "uint64"]
"""Data types that the torch backend does not support."""
DTYPES = [*["int64", "float64", "complex128"] * 3, *NARROW]
WHOLE = ["+", "-", "*", "//", "%", "&", "|", "^"]
OPERATORS = {"b": "|&^", "i": WHOLE, "u": WHOLE, "f": "+-*/", "c": "+-"}
UFUNCS = {  # not negative: NumPy 2.4 takes wrong elements where both strides are of one vector's length
    "b": ["greater", "logical_and", "not_equal", "isfinite"],
    "i": ["add", "subtract", "multiply", "maximum", "absolute", "square"],
    "u": ["add", "subtract", "multiply", "minimum", "remainder", "square"],
    "f": ["add", "subtract", "multiply", "divide", "minimum", "absolute", "square"],
    "c": ["add", "subtract", "conjugate", "positive"],
}
MAPPED: dict[str, Callable[[Any], Any]] = {
    "same": lambda a: a,
    "tail": lambda a: a[1:],
    "back": lambda a: turned(a),
    "twice": lambda a: a + a,
    "flat": lambda a: a.reshape(-1),
}


def turned(a: Any) -> Any:
    """Returns an array in reverse order: a view, if the backend's library has negative strides."""
    device = current_device()
    return a[::-1] if device is None else load(device.backend).view(a, np.s_[::-1])


def bump(a: Any) -> Any:
    """Writes to an argument, which was donated."""
    a += True
    return a


# -- the namespaces of programs --------------------------------------------------------------------


def owned(x: Any) -> np.ndarray:
    return np.array(x, order="C")


def separate(x: Any) -> Any:
    """Returns a copy of an array, and a scalar as it is."""
    return owned(x) if isinstance(x, np.ndarray) else x


def plain_names() -> dict[str, Any]:
    """Returns NumPy's namespace, in which all helpers that share or transfer tensors make copies."""
    gone: list[Any] = []

    def give(x: Any) -> np.ndarray:
        gone.append(x)
        return owned(x)

    return {
        "xp": np, "np": np, "array": array, "P": st.P, "gone": gone, "layout": lambda *_: None, "apart": np.copy,
        "put": lambda x, _: owned(x), "zeros": lambda shape, dtype, _: np.zeros(shape, dtype), "share": owned,
        "reshard": lambda x, _: owned(x), "copied": separate, "shallow": separate, "pickled": separate, "host": owned,
        "shards": lambda x: [], "pieces": lambda x, axis, count: list(map(owned, np.array_split(x, count, axis))),
        "joined": np.concatenate, "spread": lambda x, shape: owned(np.broadcast_to(x, shape)), "mapped": lambda name, parts: [MAPPED[name](owned(p))[()] for p in parts],
        "donated": lambda x, _: give(x), "bumped": lambda parts: [bump(give(p))[()] for p in parts],
    }  # fmt: skip


def laid_out(
    backend: str, shape: Shape, where: int | list[int], spec: st.P, kind: str | None = None
) -> st.NamedSharding:
    """Returns a layout over consecutive devices from a number on, or over the listed devices in their order."""
    devices = st.devices(backend)
    chosen = devices[where:] if isinstance(where, int) else [devices[k] for k in where]
    return st.NamedSharding(st.make_mesh(shape, NAMES[: len(shape)], devices=chosen), spec, memory_kind=kind)


def tensor_names(backend: str) -> dict[str, Any]:
    """Returns the namespace of a backend."""
    devices = st.devices(backend)
    return {
        "xp": st, "np": np, "array": array, "P": st.P, "put": st.device_put, "reshard": st.reshard, "joined": st.unshard,
        "layout": functools.partial(laid_out, backend), "spread": st.broadcast_to,
        "zeros": lambda shape, dtype, where: st.zeros(shape, dtype=dtype, device=where), "apart": lambda x: x,
        "share": lambda x: st.device_put(x, x.sharding, may_alias=True), "copied": lambda x: x.copy(), "host": np.asarray,
        "shallow": copy.copy, "pickled": lambda x: pickle.loads(pickle.dumps(x)),
        "shards": lambda x: [(s, held(s)) for s in x.addressable_shards],
        "pieces": lambda x, axis, count: st.shard(x, axis, devices=devices[:count]),
        "mapped": lambda name, parts: st.pmap(MAPPED[name], parts), "donated": functools.partial(st.reshard, donate=True),
        "bumped": lambda parts: st.pmap(bump, parts, donate=True),
    }  # fmt: skip


# -- running programs ------------------------------------------------------------------------------

twins = functools.lru_cache(4096)(twin)


def root(x: Any) -> Any:
    """Returns the array that owns the elements of a view."""
    return x if getattr(x, "base", None) is None else x.base


def held(shard: st.Shard) -> np.ndarray:
    """Returns a host copy of a shard, which may be in device memory or in host memory."""
    return np.array(shard.data) if isinstance(shard.data, np.ndarray) else on_host(shard.data, shard.device)


def layout_of(x: st.ShardedTensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.sharding


def counted(watched: bool) -> Any:
    return st.transfers() if watched else contextlib.nullcontext(())


def moves(log: Any) -> list[tuple[Any, ...]]:
    def number(context: Any) -> int:
        return -1 if context == st.HOST else int(context.id)

    return sorted((r.operator, r.bytes, number(r.source), number(r.destination), r.explicit) for r in log if r.bytes)


def assert_moved_alike(records: dict[str, list[tuple[Any, ...]]], what: str, backwards: bool = False) -> None:
    """Asserts that all backends made the same transfers.

    For lines that go backwards, backends without negative strides are left out: they write elements one by one.
    """
    first = next(iter(records.values()))
    for backend, found in records.items():
        if not backwards or load(backend).negative_strides:
            assert found == first, f"{what} moved {records}"


def assert_alike(found: Any, wanted: Any, what: str) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), what
    same = (found == wanted) | ((found != found) & (wanted != wanted))
    assert np.all(same), f"{what}\n{found}\nis not NumPy's\n{wanted}"


def assert_near(found: Any, wanted: Any, what: str) -> None:
    """Asserts that arrays are equal up to the rounding of one operator, relative to the largest finite element."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), f"{what}: {found.dtype}{found.shape}"
    limit = {"float16": 2e-2, "float32": 2e-5, "complex64": 2e-5}.get(str(wanted.dtype), 1e-11)
    finite = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
    np.testing.assert_allclose(found, wanted, rtol=limit, atol=limit * float(finite), err_msg=what)


def error_of(code: Any, names: dict[str, Any]) -> Exception | None:
    """Runs a line and returns the error that it raises, or None."""
    try:
        exec(code, names)
    except (*ERRORS, NameError, st.DonatedError) as error:
        return error.with_traceback(None)
    return None


class Program:
    """The lines of a program that have run, with NumPy's namespace (``plain``) and those of the backends.

    Args:
        watched: whether transfers are compared; if so, programs have no memory kinds, because transfers would differ
            where a backend has a separate host memory.
        gap: the number of lines from one comparison to the next.
        backends: the names of the backends.
    """

    def __init__(self, watched: bool = True, gap: int = 1, backends: tuple[str, ...] = BACKENDS) -> None:
        self.watched, self.gap, self.backends = watched, gap, backends
        self.lines: list[str] = []
        self.plain = plain_names()
        self.tensors = {backend: tensor_names(backend) for backend in backends}
        self.meshes = {backend: mesh_of((8,), backend) for backend in self.tensors}

    @property
    def handles(self) -> list[str]:
        """The names of tensors: ``h`` and a number; ``k`` are arrays on the host and what shards held."""
        return [name for name in self.plain if name[0] == "h" and name[1:].isdigit()]

    def run(self, line: str) -> None:
        self.lines.append(line)
        code = compile(line, "<program>", "exec")
        roots = {id(r): r for r in map(root, self.plain.values())}
        spaces = {"plain": self.plain, **self.tensors}
        before = {space: {name: names[name] for name in self.handles} for space, names in spaces.items()}
        layouts = {name: layout_of(x) for name, x in before[self.backends[0]].items()}
        backwards = self._backwards(line)
        wanted = error_of(code, self.plain)
        if isinstance(wanted, NameError):  # a line of a shortened program
            self.lines.pop()
            return
        kinds = tuple(k for k in ERRORS if isinstance(wanted, k)) or type(None)
        self._own(line, roots, before["plain"])
        records = {}
        for backend, names in self.tensors.items():
            with counted(self.watched) as log, st.use_mesh(self.meshes[backend]):
                found = error_of(code, names)
            assert isinstance(found, kinds), f"{backend}: {line} raised {found!r}, NumPy {wanted!r}"
            records[backend] = moves(log)
        assert_moved_alike(records, line, backwards)
        self._forget_rounded(line)
        for name, layout in layouts.items():
            kept = {names.get(name) is before[space][name] for space, names in spaces.items()}
            assert len(kept) == 1 or isinstance(before["plain"][name], np.generic), f"{line} bound {name} anew"
            assert layout_of(before[self.backends[0]][name]) == layout, f"{line} laid out {name} anew"
        del before
        self._forget_donated()
        if len(self.lines) % self.gap == 0:
            self.compare()

    def _backwards(self, line: str) -> bool:
        """Whether a line may write to a view in which a dimension goes backwards."""
        if re.match(r"h\d+(, h\d+)? = ", line):
            return False
        handles = [self.plain.get(name) for name in re.findall(r"\bh\d+", line)]
        return bool(re.search(r":-\d", line)) or any(n < 0 for h in handles for n in getattr(h, "strides", ()))

    def _own(self, line: str, roots: dict[int, Any], before: dict[str, Any]) -> None:
        """Makes NumPy's new values own their elements, in row-major order. Results that are an operand become views."""
        for name, value in self.plain.items():
            if name[0] in "hk" and isinstance(value, np.ndarray) and value is not before.get(name):
                if id(root(value)) not in roots:
                    self.plain[name] = owned(value)
                elif not re.fullmatch(r"h\d+ = h\d+", line):
                    self.plain[name] = value.view()

    def _forget_rounded(self, line: str) -> None:
        """Compares and deletes the names ``c`` and a number: backends may round these values differently, so that no later
        line may use them.
        """
        for name in [name for name in self.plain if re.fullmatch(r"c\d+", name)]:
            wanted = np.asarray(self.plain.pop(name))
            for backend, names in self.tensors.items():
                assert_near(np.asarray(names.pop(name)), wanted, f"{backend}: {line}")

    def _forget_donated(self) -> None:
        """Checks that donated tensors, their other names and their views raise errors, and deletes their names."""
        for given in self.plain["gone"]:
            dead = [x for x in map(self.plain.get, self.handles) if x is given or (root(x) is given and x.size)]
            for name in self.handles:
                if not any(self.plain[name] is x for x in dead):
                    continue
                for backend, names in self.tensors.items():
                    assert names[name].is_donated, f"{backend}: {name} was donated"
                    for use in ("np.asarray(x)", "x + 1", "x[...] = 0", "reshard(x, x.sharding)"):
                        error = error_of(use, names | {"x": names[name]})
                        what = f"{backend}: {name} was donated, and {use} raised {error!r}"
                        assert isinstance(error, st.DonatedError), what
                    del names[name]
                del self.plain[name]
        self.plain["gone"].clear()

    def compare(self) -> None:
        """Asserts that every handle has NumPy's elements, on the host and on each device, and equal layouts on all
        backends, and that arrays that were read earlier have not changed.
        """
        records = {}
        for backend, names in self.tensors.items():
            with counted(self.watched) as log:
                for name in self.handles:
                    x, wanted = names[name], np.asarray(self.plain[name])
                    assert (x.shape, x.dtype) == (wanted.shape, wanted.dtype), f"{backend}: {name} {x.dtype}{x.shape}"
                    assert_alike(np.asarray(x), wanted, f"{backend}: {name}")
                    for s in x.addressable_shards:
                        assert_alike(held(s), wanted[s.index], f"{backend}: {name} on {s.device}")
            records[backend] = moves(log)
            for name in [k for k in self.plain if k[0] == "k"]:
                if isinstance(names[name], list):
                    for shard, was in names[name]:
                        assert_alike(held(shard), was, f"{backend}: {name}, a shard's array")
                else:
                    assert_alike(names[name], self.plain[name], f"{backend}: {name} on the host")
                    assert not names[name].flags.writeable
        assert_moved_alike(records, "reading")
        for name in self.handles:
            x, *others = (names[name].sharding for names in self.tensors.values())
            for backend, y in zip(self.backends[1:], others, strict=True):
                assert twins(x, backend) == y, f"{name}: {x}, and on {backend} {y}"


def quietly() -> Any:
    context = contextlib.ExitStack()
    context.enter_context(warnings.catch_warnings())
    context.enter_context(np.errstate(all="ignore"))
    warnings.simplefilter("ignore")
    return context


def replay(text: str, watched: bool = True, gap: int = 1, backends: tuple[str, ...] = BACKENDS) -> Program:
    """Runs a program, for example one that a failed test has printed."""
    program = Program(watched, gap, backends)
    with quietly():
        for line in text.strip().splitlines():
            program.run(line.strip())
        program.compare()
    return program


def failure(lines: list[str], *how: Any) -> Exception | None:
    try:
        replay("\n".join(lines), *how)
    except Exception as error:
        return error
    return None


def shortest(lines: list[str], *how: Any) -> list[str]:
    """Returns a failing program without the lines that are not needed for the failure."""
    size = len(lines) // 2
    while size:
        for at in range(len(lines) - size, -1, -size):
            fewer = lines[:at] + lines[at + size :]
            if failure(fewer, *how):
                lines = fewer
        size //= 2
    return lines


# -- generating programs ---------------------------------------------------------------------------


class Dice:
    """Random choices that are determined by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def whole(self, low: int, high: int) -> int:
        """Returns a number from ``low`` to ``high``."""
        return low + int(self._random() * (high - low + 1))

    def pick(self, items: Any) -> Any:
        return items[self.whole(0, len(items) - 1)]

    def once_in(self, n: int) -> bool:
        return self.whole(0, n - 1) == n - 1


class Draws(Dice):
    """Choices that hypothesis draws."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def whole(self, low: int, high: int) -> int:
        return int(self._data.draw(some.integers(low, high)))


class Author:
    """Writes the next line of a program. Some lines are wrong; then ``fault`` names what is wrong."""

    def __init__(self, dice: Dice, program: Program) -> None:
        self.pick, self.whole, self.once_in = dice.pick, dice.whole, dice.once_in
        self.program, self.plain = program, program.plain
        self.numbers = itertools.count(1)
        self.fault = ""
        self.rounds_alike = "torch" not in program.backends
        """Whether all backends round quotients of complex numbers as NumPy does."""
        self.summed = "biu" if self.rounds_alike else "bi"
        """The kinds of dtypes whose sums are exact: PyTorch has no uint64, in which NumPy adds unsigned numbers."""
        self.dtypes = [*DTYPES, *(UNSIGNED if self.rounds_alike else [])]

    def line(self) -> str:
        self.all = self.program.handles
        arrays = [name for name in self.all if isinstance(self.plain[name], np.ndarray)]
        if len(self.all) > 7:
            return f"del {self.pick(self.all)}"
        self.fault = self.pick(["operator", "shape", "index", "value"]) if self.once_in(10) else ""
        often = [self.viewed] * 5 + [self.assigned] * 6 + [self.updated] * 4 + [self.into] * 3 + [self.computed] * 2
        kind = self.pick([*often, self.created, self.shared, self.shared, self.mapped, self.given, self.other])
        if kind == self.created or len(arrays) < 2:
            return f"{self.new()} = {self.created()}"
        scalars = [name for name in self.all if name not in arrays] if kind in (self.updated, self.shared) else []
        return str(kind(self.pick(scalars if scalars and self.once_in(3) else arrays[-5:])))

    def new(self) -> str:
        return f"h{next(self.numbers)}"

    # parts of lines

    def layout(self, ndim: int) -> str:
        mesh = self.pick(MESHES)
        parts: list[list[str]] = [[] for _ in range(ndim)]
        for axis in NAMES[: len(mesh)][:: self.pick([1, -1])]:
            home = self.whole(-1, ndim - 1)
            if home >= 0:
                parts[home].append(axis)
        size, kind = int(np.prod(mesh)), ", 'pinned_host'" if not self.program.watched and self.once_in(4) else ""
        where = sorted(range(8), key=lambda _: self.whole(0, 9))[:size] if self.once_in(4) else self.whole(0, 8 - size)
        return f"layout({mesh}, {where}, {st.P(*map(tuple, parts))!r}{kind})"

    def host(self, shape: Shape, dtype: Any) -> str:
        return f"array({shape}, '{dtype}', {self.whole(0, 99)})"

    def either(self, text: str, ndim: int) -> str:
        """Writes a host array, or a tensor with its elements."""
        return text if self.once_in(2) else f"put({text}, {self.layout(ndim)})"

    def scalar(self, dtype: Any) -> str:
        if self.fault == "value":
            return str(self.pick(["10**12", "1j", "2.5", "True", "-1", "300"]))
        n = self.whole(-4, 4)
        return {"b": str(n > 0), "i": str(n), "u": str(abs(n)), "f": str(n / 4), "c": f"({n / 2} + 1j)"}[dtype.kind]

    def span(self, n: int) -> str:
        start, stop = (self.pick(["", self.whole(-n - 1, n + 1)]) for _ in range(2))
        return ":" if self.once_in(3) else f"{start}:{stop}:{self.pick(['', '', 2, -1, -2, 3])}"

    def basic(self, shape: Shape) -> str:
        bad = self.fault == "index"
        out = []
        for n in shape[: self.whole(0, len(shape))]:
            out.append(str(self.whole(-n, n - 1 + bad)) if self.once_in(3) and n + bad else self.span(n))
        if self.once_in(3):
            out.append("...")
            if len(out) <= len(shape) and self.once_in(2):
                out.append(self.span(shape[-1]))
        if self.once_in(5):
            out.insert(self.whole(0, len(out)), "None")
        return ", ".join(out) or str(self.pick(["...", "()"]))

    def advanced(self, shape: Shape) -> str:
        """Writes an index with arrays or masks."""
        alike = [name for name in self.all if self.plain[name].shape == shape and self.plain[name].dtype.kind != "c"]
        if alike and self.once_in(3):
            name = self.pick(alike)
            return f"apart({name})" if self.plain[name].dtype.kind == "b" else f"{name} > {self.whole(-2, 2)}"
        if not shape or self.once_in(4):
            return self.either(self.host(shape, "bool"), len(shape))
        together = self.pick([(), (1,), (2,), (3,), (2, 2), (2, 1)])
        first, bad, out = self.whole(0, len(shape) - 1), self.fault == "index", []
        for d, n in enumerate(shape[: self.whole(first + 1, len(shape))]):
            way = "array" if d == first and n + bad else self.pick(["array", "mask", "whole", "span", "span"])
            if way == "array" and n + bad:
                size = together if self.once_in(2) or len(together) < 2 else together[1:]
                picked = [self.whole(-n, n - 1 + bad) for _ in range(int(np.prod(size)))]
                kinds = ["int64", "int64", "int32", "int8", *(["uint8"] if min(picked) >= 0 else [])]
                text = f"np.array({np.reshape(picked, size).tolist()}, '{self.pick(kinds)}')"
                out.append(self.either(text, len(size)) if size else text)
            elif way == "mask" or d == first:
                out.append(self.either(self.host((n,), "bool"), 1))
            else:
                out.append(str(self.whole(-n, n - 1)) if way == "whole" and n else self.span(n))
        if self.once_in(5):
            out.append("...")
        if self.once_in(8):
            out.insert(self.whole(0, len(out)), "None")
        return ", ".join(out)

    def fitted(self, shape: Shape, dtype: Any, name: str, unsafe: bool = False) -> str:
        """Writes a part of a handle with this shape, if there is one."""
        x = self.plain[name]
        lead = x.ndim - len(shape)
        if lead < 0 or not ((unsafe and self.holds(dtype, x)) or np.can_cast(x.dtype, dtype, "same_kind")):
            return ""
        if x.shape == shape and self.once_in(2):
            return str(self.pick([name, f"{name}[{', '.join(['::-1'] * x.ndim) or '...'}]", f"({name} + {name})"]))
        if x.shape == shape[::-1] and self.once_in(2):
            return f"{name}.T"
        if 0 in x.shape[:lead] or any(n > m for n, m in zip(shape, x.shape[lead:], strict=True)):
            return ""
        out = [str(self.whole(0, n - 1)) for n in x.shape[:lead]]
        for n, m in zip(shape, x.shape[lead:], strict=True):
            start = self.whole(0, m - n)
            backwards = self.once_in(3) and n
            out.append(f"{start + n - 1}:{start - 1 if start else ''}:-1" if backwards else f"{start}:{start + n}")
        return f"{name}[{', '.join(out) or '()'}]"

    def holds(self, dtype: Any, x: Any) -> bool:
        """Whether each element of x, truncated, is a value of the integer or bool dtype. Other casts depend on the
        machine.
        """
        if dtype.kind not in "biu" or x.dtype.kind == "c":
            return False
        if dtype.kind == "b" or x.dtype.kind != "f":
            return True
        limits = np.iinfo(dtype)
        return bool(np.all((x >= max(limits.min, -1e6)) & (x <= min(limits.max, 1e6))))

    def operand(self, shape: Shape, dtype: Any, near: str, unsafe: bool = False) -> str:
        """Writes a value that can be assigned to elements of this shape and dtype, preferably a part of ``near``."""
        for name in [near, self.pick(self.all), self.pick(self.all)]:
            text = self.fitted(shape, dtype, name, unsafe) if self.once_in(2) and not self.fault else ""
            if text:
                return text
        if (self.once_in(3) or self.fault == "value") and 0 not in shape:
            return self.scalar(dtype)
        shape = tuple(1 if self.once_in(4) else n for n in shape[self.whole(0, len(shape)) if self.once_in(4) else 0 :])
        if self.fault == "shape" and shape:
            shape = (*shape, 3)
        known = [d for d in self.dtypes if np.can_cast(d, dtype, "same_kind") and not self.fault]
        return self.either(self.host(shape, self.pick([*known, dtype, dtype])), len(shape))

    def target(self, name: str) -> tuple[str, Shape]:
        """Writes a part of a handle, and returns it with its shape."""
        shape = self.plain[name].shape
        text = f"{name}[{self.advanced(shape) if self.once_in(3) else self.basic(shape)}]"
        try:
            return text, eval(text, self.plain).shape
        except ERRORS:
            self.fault = "index"
            return text, ()

    # kinds of lines

    def created(self) -> str:
        ndim = self.pick([0, 1, 1, 2, 2, 2, 3, 3, self.whole(4, 6)])
        shape, dtype = tuple(self.pick(SIZES[3 if ndim <= 3 else 6]) for _ in range(ndim)), self.pick(self.dtypes)
        text, layout = self.host(shape, dtype), self.layout(len(shape))
        return str(
            self.pick([f"put({text}, {layout})"] * 4 + [f"zeros({shape}, '{dtype}', {layout})", f"xp.asarray({text})"])
        )

    def viewed(self, name: str) -> str:
        x = self.plain[name]
        ndim, size = x.ndim, x.size
        ways = [f"{name}[{self.basic(x.shape)}]"] * 3 + [f"{name}.T", f"xp.squeeze({name})"]
        if x.dtype.kind == "c":
            ways += [f"{name}.real", f"{name}.imag", f"xp.imag({name})"]
        if ndim < 6:
            shapes = [(-1,), (2, -1), (-1, 3), (1, -1), (2, 2, -1)] if size else []
            shapes = [s for s in shapes if size % abs(int(np.prod(s))) == 0]
            ways += [f"xp.reshape({name}, {self.pick([*shapes, x.shape[::-1]])})"] * 2
            ways += [f"{name}.ravel()", f"xp.expand_dims({name}, axis={self.whole(-ndim - 1, ndim)})"]
        if ndim:
            a, b = self.whole(-ndim, ndim - 1), self.whole(0, ndim - 1)
            ways += [f"xp.flip({name}, axis={a})", f"xp.flip({name})", f"xp.moveaxis({name}, {a}, {b})"]
            ways += (
                [f"xp.unstack({name}, axis={a})[{self.whole(0, x.shape[a] - 1)}]"]
                if x.shape[a] and hasattr(np, "unstack")
                else []
            )
            ways += [f"list({name})[{self.whole(0, x.shape[0] - 1)}]"] if x.shape[0] else []
            order = tuple(sorted(range(ndim), key=lambda _: self.whole(0, 9)))
            ways += [f"xp.permute_dims({name}, {order})", f"{name}.swapaxes({a}, {b})", f"{name}.transpose({order})"]
        ways += [f"{name}.mT"] if ndim > 1 else []
        return f"{self.new()} = {self.pick(ways)}"

    def assigned(self, name: str) -> str:
        """Writes an assignment. If the parts overlap, ``apart`` copies first: NumPy's result depends on its order."""
        x = self.plain[name]
        text, shape, dtype = *self.target(name), x.dtype
        if dtype.kind == "c" and not self.fault and self.once_in(8):
            text, shape, dtype = f"{name}.{self.pick(['real', 'imag'])}", x.shape, x.real.dtype
        value = self.operand(shape, dtype, name, unsafe=True)
        return f"{text} = apart({value})" if HANDLE.search(value) else f"{text} = {value}"

    def updated(self, name: str) -> str:
        x = self.plain[name]
        kind = x.dtype.kind
        if kind in "iuf" and x.size and np.abs(x).max() < 1e3 and self.once_in(12):
            return f"{name} **= 2"
        if x.ndim > 1 and kind in "iu" and self.once_in(8):
            return f"{name} @= {self.either(self.host((x.shape[-1],) * 2, x.dtype), 2)}"
        if kind == "c" and self.once_in(5):
            return f"{name} *= {self.whole(-2, 2)}"
        text, shape = (name, x.shape) if isinstance(x, np.generic) or self.once_in(2) else self.target(name)
        operator = self.pick("+-*/%&|" if self.fault == "operator" else OPERATORS[kind])
        if operator == "/" and kind == "c" and not self.rounds_alike:
            operator = "-"
        return f"{text} {operator}= {self.operand(shape, x.dtype, name)}"

    def into(self, name: str) -> str:
        """Writes an operator with ``out=``."""
        x = self.plain[name]
        kind = x.dtype.kind
        out = f"{name}[...{', ' + self.span(x.shape[-1]) if x.ndim else ''}]" if self.once_in(2) else name
        shape = eval(out, self.plain).shape
        if kind in "iuf" and self.once_in(5):
            tall = (*shape[:1], 3, *shape[1:])
            source = self.fitted(tall, x.dtype, name) or self.either(self.host(tall, x.dtype), len(tall))
            function = self.pick(["sum", "max", "min"] if kind in self.summed else ["max", "min"])
            return f"np.{function}({source}, axis={min(len(shape), 1)}, out={out})"
        function = self.pick(["divide", "bitwise_and", "add"] if self.fault == "operator" else UFUNCS[kind])
        if function == "divide" and kind == "c" and not self.rounds_alike:
            function = "add"
        operands = [self.operand(shape, x.dtype, name) for _ in range(getattr(np, function).nin)]
        return f"np.{function}({', '.join(operands)}, out={out})"

    def computed(self, name: str) -> str:
        """Writes an expression whose result is a new value."""
        x = self.plain[name]
        kind = self.pick([self.combined, self.combined, self.reduced, self.reduced, self.moved, self.rounded])
        ways = kind(name, x)
        return f"{'c' if kind == self.rounded else 'h'}{next(self.numbers)} = {self.pick(ways)}"

    def combined(self, name: str, x: Any) -> list[str]:
        """Writes an elementwise operator."""
        other = self.operand(x.shape, x.dtype, name)
        ways = [f"{name} + {other}", f"{other} - {name}"] if x.dtype.kind != "b" else [f"{name} | {other}"]
        ways += [f"{name}[{self.advanced(x.shape)}]", f"{name} != {other}", f"xp.logical_and({name}, {other})"]
        ways += [f"xp.where({name} != 0, {name}, {self.scalar(x.dtype)})", f"xp.where({name} != 0, {other}, {name})"]
        ways += [f"{name}.astype('{d}')" for d in self.dtypes if self.holds(np.dtype(d), x)]
        ways += [f"{name}.astype('{np.result_type(x.dtype, 'float32')}')"]
        if x.dtype.kind in "iuf":
            low, high = sorted(self.whole(-4 if x.dtype.kind != "u" else 0, 4) for _ in "ab")
            ways += [
                f"xp.clip({name}, {low}, {high})",
                f"xp.maximum({name}, {other})",
                f"xp.sign({name})",
                f"abs({name})",
            ]
        ways += [f"{name} << {self.whole(0, 3)}", f"~{name}", f"{name} >> 1"] if x.dtype.kind in "iu" else []
        ways += [f"xp.floor({name})", f"xp.round({name})", f"xp.signbit({name})"] if x.dtype.kind == "f" else []
        return ways

    def reduced(self, name: str, x: Any) -> list[str]:
        """Writes a reduction without rounding."""
        axes = [None, *([self.whole(-x.ndim, x.ndim - 1)] * 2 if x.ndim else [])]
        axes += [tuple(range(x.ndim))[self.whole(0, x.ndim - 1) :]] if x.ndim else []
        how = f"axis={self.pick(axes)}{self.pick(['', ', keepdims=True'])}"
        functions = ["any", "all", *(["max", "min"] if x.size and x.dtype.kind != "c" else [])]
        functions += ["sum", "prod"] if x.dtype.kind in self.summed else []
        ways = [f"xp.{function}({name}, {how})" for function in functions]
        if x.size and x.dtype.kind in "iuf" and not isinstance(axes[-1], int):
            ways += [f"xp.{f}({name}, axis={self.pick(axes[:2])})" for f in ("argmax", "argmin")]
        return ways

    def moved(self, name: str, x: Any) -> list[str]:
        """Writes an operator that moves or joins elements."""
        ways = [f"copied(xp.roll({name}, {self.whole(-9, 9)}))"] + [f"spread({name}, {(2, *x.shape)})"] * (x.size < 300)
        alike = [n for n in self.all if self.plain[n].shape == x.shape]
        if x.ndim:
            axis = self.whole(-x.ndim, x.ndim - 1)
            ways += [f"xp.roll({name}, {self.whole(-9, 9)}, axis={axis})"]
            if x.size < 100:
                ways += [f"xp.concat([{name}, {self.pick(alike)}, {name}], axis={self.pick([axis, None])})"] * 2
        if x.ndim < 6 and x.size < 100:
            ways += [f"xp.stack([{name}, {self.pick(alike)}], axis={self.whole(-x.ndim - 1, x.ndim)})"] * 2
        return ways

    def rounded(self, name: str, x: Any) -> list[str]:
        """Writes an operator that backends may round differently, on values so small that no digits cancel."""
        ways = [f"xp.cos({name})", f"xp.exp({name} * 0)"] if x.dtype.kind != "b" else [f"xp.sin({name})"]
        if not x.size or not np.all(np.abs(x) < 30):
            return ways
        how = f"axis={self.pick([None, *range(-x.ndim, x.ndim)])}"
        functions = ["mean", "var", "std", *(["sum"] if x.dtype.kind in f"{self.summed}fc" else [])]
        ways += [f"xp.{function}({name}, {how})" for function in functions]
        ways += [f"xp.tanh({name})", f"xp.sqrt({name} * {name})"] if x.dtype.kind in "f" else []
        if x.ndim > 1 and x.dtype.kind != "b":
            ways += [f"xp.matmul({name}, {name}.mT)", f"{name} @ {name}[{', '.join(['0'] * (x.ndim - 1))}, :]"] * 2
            ways += [f"xp.tensordot({name}, {name}, axes=(({d},), ({d},)))" for d in range(x.ndim) if x.ndim == 2]
        return ways

    def shared(self, name: str) -> str:
        """Writes another handle of the same value."""
        ndim, new = self.plain[name].ndim, self.new()
        if isinstance(self.plain[name], np.generic):
            ways = [name, name, f"{name}[None]", f"{name}[...]", f"xp.reshape({name}, (1,))", f"{name} + 1"]
        else:
            ways = [name, f"share({name})", f"copied({name})", f"shallow({name})", f"pickled({name})"]
            ways += [f"reshard({name}, {self.layout(ndim)})"] * 2
        if ndim and self.once_in(6):
            return f"{new}, {self.new()} = pieces({name}, {self.whole(-ndim, ndim - 1)}, 2)"
        return f"{new} = {self.pick(ways)}"

    def mapped(self, name: str) -> str:
        ndim, function = self.plain[name].ndim, self.pick(list(MAPPED))
        devices = self.program.tensors[self.program.backends[0]][name].devices()
        if len(devices) == 1 and self.once_in(2):
            call = f"bumped([{name}])" if self.once_in(3) else f"mapped('{function if ndim else 'same'}', [{name}])"
            return f"[{self.new()}] = {call}"
        if not ndim:
            return self.shared(name)
        axis, count = self.whole(0, ndim - 1), self.pick([1, 2, 3, 8])
        parts = f"pieces({name}, {axis}, {count})"
        parts = f"bumped({parts})" if self.once_in(4) else f"mapped('{function}', {parts})"
        if self.once_in(2) or "flat" in parts:
            return f"{self.new()} = {parts}[{self.whole(0, count - 1)}]"
        return f"{self.new()} = joined({parts}, {axis})"

    def given(self, name: str) -> str:
        return f"{self.new()} = donated({name}, {self.layout(self.plain[name].ndim)})"

    def other(self, name: str) -> str:
        """Writes a line that deletes a handle, or reads one; the arrays that were read must not change later."""
        if self.once_in(3):
            return f"del {name}"
        read = [k for k in self.plain if k[0] == "k"]
        if len(read) > 2:
            return f"del {self.pick(read)}"
        return f"k{next(self.numbers)} = {self.pick(['host', 'host', 'shards'])}({name})"


# -- the tests -------------------------------------------------------------------------------------


def run_program(dice: Dice, length: int, backends: tuple[str, ...] = BACKENDS) -> None:
    """Generates and runs a program of this many lines. A failure prints a shortened form of it that fails."""
    watched, gap = not dice.once_in(4), dice.pick([1, 1, 1, 4])
    program = Program(watched, gap, backends)
    author = Author(dice, program)
    try:
        with quietly():
            for _ in range(length):
                program.run(author.line())
            program.compare()
    except Exception as error:
        error.add_note(f'replay("""\n{chr(10).join(program.lines)}\n""", {watched}, {gap}, {backends})')
        error.program = program  # type: ignore[attr-defined]
        raise


def run_seeds(seeds: range, length: int, backends: tuple[str, ...] = BACKENDS) -> None:
    for seed in seeds:
        try:
            run_program(Dice(seed), length, backends)
        except Exception as error:
            program = error.program  # type: ignore[attr-defined]
            how = program.watched, program.gap, backends
            lines = shortest(program.lines, *how)
            text = "\n".join(lines)
            found = failure(lines, *how) or error
            what = f'{found}\nseed {seed}, shortened:\nreplay("""\n{text}\n""", {", ".join(map(str, how))})'
            raise AssertionError(what) from None


FOUND = {
    "one element, backwards": """
        h1 = put(array((), 'complex128', 69), layout((3,), 5, P()))
        h8 = xp.expand_dims(xp.reshape(h1, (-1,)), axis=1)
        h8[:-2:-1, put(np.array([-1, -1, -1], 'int64'), layout((2,), 2, P('x')))] += put(array((1, 3), 'bool', 4), layout((4, 2), 0, P('x')))
        """,
    "where takes what does not fit": """
        h1 = put(array((2, 3), 'int32', 60), layout((1,), 3, P()))
        h2 = xp.where(h1 != 0, h1, 10**12)
        """,
    "an element that another memory broadcasts": """
        h1 = put(array((3,), 'int8', 46), layout((4, 2), 0, P()))
        h4 = xp.reshape(h1, (1, -1))
        h4[..., :] += put(array((1, 1), 'int64', 79), layout((2, 3), 1, P('x')))
        """,
    "a mask of positions apart, where devices share memories": """
        h1 = xp.asarray(array((2, 3, 4), 'int64', 81))
        h3 = xp.unstack(h1, axis=-2)[0]
        h7 = xp.reshape(h3, (2, -1))
        h7[h7 > -1] = 10**12
        """,
    "negative indices of a dtype that does not hold the size": """
        h2 = zeros((8, 5, 4), 'int64', layout((2,), 2, P()))
        h6 = xp.reshape(h2, (-1,))
        h12 = h6.astype('float64')
        h12[np.array([83, 64, -69], 'int8')] = apart(h12[147:144:-1])
        """,
}


@pytest.mark.parametrize("program", FOUND)
def test_what_failed_before(program: str) -> None:
    replay(FOUND[program], backends=(*USABLE, "grouped"))


@pytest.mark.slow
@hypothesis.settings(max_examples=drawn(80, fast=5))
@hypothesis.given(data=some.data())
def test_drawn_programs(data: Any) -> None:
    run_program(Draws(data), 15)


@pytest.mark.slow
@sets
def test_programs(backends: tuple[str, ...]) -> None:
    first, count = (0, drawn(140, fast=10)) if backends == BACKENDS else (5000, drawn(20, fast=2))
    run_seeds(range(first, first + count), 40, backends)


@pytest.mark.full
@pytest.mark.parametrize("part", range(20))
@sets
def test_many_programs(backends: tuple[str, ...], part: int) -> None:
    """As many steps in all parts as ``SHARDTENSOR_STEPS`` says; without it what takes ten minutes."""
    steps = int(os.environ.get("SHARDTENSOR_STEPS", "350000" if backends == BACKENDS else "100000"))
    count = steps // 60 // 20
    run_seeds(range(1000 + part * count, 1000 + (part + 1) * count), 60, backends)
