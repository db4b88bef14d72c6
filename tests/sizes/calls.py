"""Calls of every function with drawn dtypes, values, layouts and devices, eager and under jit."""

from __future__ import annotations

import contextlib
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import shardtensor as st
from tests.layouts import mesh_of
from tests.numpy_calls import Operands
from tests.sizes.functions import (
    ADDING,
    CALLS,
    DECOMPOSITIONS,
    EITHER_ZERO,
    EXACT,
    EXCEPT_ON,
    ILL_CONDITIONED,
    LEFT_OUT,
    NOT_STABLE,
    Call,
)  # fmt: skip
from tests.sizes.operands import (
    DTYPES,
    FLOATS,
    LAYOUTS,
    MESHES,
    SPECIALS,
    Differs,
    check_errors,
    compare,
    made,
    outcome,
    place,
    scale_of,
    viewed,
)  # fmt: skip

MODES = ("eager", "log", "jit", "jit", "jit, log")


class Drawn(Operands):
    """The operands of a call, with drawn dtypes and values. Numbers that add up exactly are multiples of a quarter.

    Args:
        seed: all else is drawn by it.
        place: returns an array as an operand.
        special: which values are among the elements.
        complex_special: the same for complex numbers.
    """

    def __init__(self, seed: int, place: Callable[[Any], Any], special: str, complex_special: str) -> None:
        draw = random.Random(seed)
        super().__init__(place, draw.choice([3, 5, 8, 16]), draw.choice([2, 3, 6]))
        kinds = {"c": complex_special}
        dtype, integer = draw.choice(DTYPES), draw.choice(["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
        rng = np.random.default_rng(seed)
        with np.errstate(invalid="ignore"):
            for name in "xyzvwsft":
                self._arrays[name] = made(
                    np.round(self._arrays[name] * 4) / 4, dtype, kinds.get(dtype[0], special), rng
                )
            for name in "cg":
                self._arrays[name] = made(
                    np.round(self._arrays[name] * 4) / 4, draw.choice(["c8", "c16"]), complex_special, rng
                )
        self._arrays["n"] = made(self._arrays["n"], integer, special, rng)
        self._arrays["k"] = self._arrays["k"].astype(integer.replace("?", "i8"))
        self._arrays["s"] = np.sort(np.nan_to_num(self._arrays["s"]))  # The points of `interp` are numbers.
        for name in "qr":
            self._arrays[name] = self._arrays[name].astype(draw.choice(FLOATS[:2]))


class Case:
    """A call with drawn operands, layout and way.

    Attributes:
        name: the name of the call.
        seed: all else is drawn by it.
        backend: the backend of the devices.
        executor: that of jit.
    """

    def __init__(self, name: str, seed: int, backend: str, executor: str = "numpy") -> None:
        self.name, self.seed, self.backend = name, seed, backend
        draw = random.Random(f"{name} {seed}")
        self.special = draw.choice(SPECIALS)
        is_transform = name.startswith("fft") and "shift" not in name
        if is_transform or name in (*DECOMPOSITIONS, *ILL_CONDITIONED, *EXCEPT_ON.get(backend, ())):
            self.special = "plain"
        if self.special == "extreme" and name.rpartition(".")[2] in ADDING:
            self.special = "odd"
        self.layout, self.mode, self.executor = (
            draw.choice(LAYOUTS),
            draw.choice(MODES),
            executor,
        )
        mesh = mesh_of(draw.choice(MESHES), backend)
        names = draw.sample([*mesh.axis_names, None], 2) if len(mesh.axis_names) > 1 else ["x", None]
        draw.shuffle(names)
        self.sharding = st.NamedSharding(mesh, st.P(*names))

    def __str__(self) -> str:
        return f"{self.name} {self.seed} on {self.backend}: {self.special}, {self.layout}, {self.mode}, {self.sharding}"

    def check(self) -> None:
        """Compares the results, and the operands after the call, with NumPy's."""
        call = CALLS[self.name]
        # The complex products of PyTorch and of compilers are those of C, which leaves those of infinities open.
        specials = self.special, "plain" if self.backend == "torch" else self.special
        plain = Drawn(self.seed, lambda x: viewed(x, self.layout, lambda a: np.array(a, order="C")), *specials)
        wanted = outcome(call, plain)
        mine = Drawn(self.seed, lambda x: place(x, self.layout, self.sharding), *specials)
        if "jit" in self.mode:
            call = self._traced(call, list(plain.used))
        with st.transfers() if "log" in self.mode else contextlib.nullcontext():
            found = outcome(call, mine)
        self._same(found, wanted, plain, mine)

    def _traced(self, call: Call, names: list[str]) -> Call:
        traced = st.jit(
            lambda *xs: call(types.SimpleNamespace(**dict(zip(names, xs, strict=True)))), executor=self.executor
        )
        return lambda operands: traced(*[getattr(operands, name) for name in names])

    def _same(self, found: Any, wanted: Any, plain: Any, mine: Any) -> None:
        if isinstance(found, Exception) or isinstance(wanted, Exception):
            check_errors(found, wanted)
            return
        name, scale = self.name.rpartition(".")[2], scale_of(self.name, plain.used.values())
        exact, either_zero = name in EXACT, name in EITHER_ZERO
        if self.name.startswith("fft") and any(x.dtype == np.float16 for x in plain.used.values()):
            scale *= 2**13  # NumPy rounds factors to float16, and the results are of complex64.
        if len(found) != len(wanted):
            raise Differs(f"{len(found)} results instead of {len(wanted)}")
        for x, y in zip(found, wanted, strict=True):
            if self.name in NOT_STABLE and isinstance(x, st.ShardedTensor):
                x, y = self._in_order(x, plain), self._in_order(y, plain)
            compare(x, y, exact, scale, either_zero)
        for name, y in plain.used.items():
            if self.name != "x.partition":
                compare(mine.used[name], y, True, scale, either_zero)

    def _in_order(self, x: Any, plain: Any) -> np.ndarray:
        """Returns what of a result NumPy defines: the elements that are selected, in order."""
        x = np.asarray(x)
        axis = -1 if self.name == "x.argsort" else 0
        elements = np.take_along_axis(plain.used["x"], x, axis) if "arg" in self.name else x
        return np.sort(elements, axis=axis)


def run_calls(backends: list[str], first: int, count: int, executor: str) -> Iterator[str]:
    """Checks each call with operands of several seeds, on one backend after the other, and yields what is wrong."""
    for k, name in enumerate([name for name in CALLS if name not in LEFT_OUT]):
        for seed in range(first, first + count):
            case = Case(name, seed, backends[(k + seed) % len(backends)], executor)
            try:
                case.check()
            except Differs as error:
                yield f"{case}: {error}"
            except Exception as error:
                yield f"{case}: raised {error!r}"
