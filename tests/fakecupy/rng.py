"""A small ``cupy.random``. Each device has its own generator, so that one seed yields equal numbers on all devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import graphs, launch
from . import world as w


class RandomState:
    """A legacy generator, whose numbers are drawn on the host and copied."""

    def __init__(self, seed: Any = None, method: Any = None) -> None:
        self._rng = np.random.RandomState(seed)

    def seed(self, seed: Any = None) -> None:
        self._rng.seed(seed)


class Generator:
    """A generator with the newer names, whose numbers are drawn on the host and copied."""

    def __init__(self, seed: Any = None) -> None:
        self._rng = np.random.default_rng(seed)


def _draw(name: str) -> Any:
    def draw(self: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        graphs.check_library("cuRAND")
        values = np.asarray(getattr(self._rng, name)(*args, **kwargs))
        return launch.from_host(values if dtype is None else values.astype(dtype))

    draw.__name__ = name
    return draw


LEGACY = ("rand", "randn", "randint", "uniform", "normal", "standard_normal", "random_sample", "permutation")
for _name in LEGACY:
    setattr(RandomState, _name, _draw(_name))
for _name in ("random", "integers", "uniform", "standard_normal"):
    setattr(Generator, _name, _draw(_name))


def get_random_state() -> RandomState:
    """Returns the generator of the current device."""
    states = w.world.__dict__.setdefault("random", {})
    return states.setdefault(w.world.current(), RandomState())


def _global(name: str) -> Any:
    def draw(*args: Any, **kwargs: Any) -> Any:
        return getattr(get_random_state(), name)(*args, **kwargs)

    draw.__name__ = name
    return draw


NAMES: dict[str, Any] = {
    "RandomState": RandomState,
    "get_random_state": get_random_state,
    "default_rng": Generator,
    "seed": lambda seed=None: get_random_state().seed(seed),
    "random": _global("random_sample"),
    **{name: _global(name) for name in LEGACY},
}
