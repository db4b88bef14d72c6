"""Batches of rows for training: `Batches`, whose order depends on a key and the step only.

The main nouns are the *order* (`order`: which row is at which place of an epoch), the *source* (`sources`: the rows of
arrays, files and objects), the *plan* (`batches`: which rows of which source a step needs in this process) and the
*reader* (`reader`: the thread that reads ahead). The thread reads host arrays only; tensors are made where a batch is
handed out, since all processes have to make them in the same order.

Formats of files are `shardtensor.files`. The public API imports this package, and nothing below may import it.

>>> batches = st.data.Batches(np.arange(8), 4, key=st.random.key(0))
>>> next(batches).tolist(), next(batches).tolist()
([0, 6, 4, 5], [7, 1, 2, 3])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardtensor.data.batches import Batches
from shardtensor.hints import missing

__all__ = ["Batches"]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise missing(__name__, name)
