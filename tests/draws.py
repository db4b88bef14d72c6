"""The number of examples of hypothesis: all in the full tier, a part of them in the fast tier."""

from __future__ import annotations

all_of_them = False
"""Whether the tests run with all of their examples; `tests.selection` sets it before modules of tests are imported."""


def drawn(examples: int, fast: int | None = None) -> int:
    """Returns the number of examples of a test: all with ``--full``, else ``fast``, by default an eighth."""
    return examples if all_of_them else fast or max(1, examples // 8)
