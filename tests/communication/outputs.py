"""The output of jobs, in which a line that several processes print begins with the numbers of all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator


def numbers(text: str) -> list[int]:
    """The numbers in a list of processes, such as ``0, 2-3``."""
    bounds = [part.split("-") for part in text.split(", ")]
    return [k for pair in bounds for k in range(int(pair[0]), int(pair[-1]) + 1)]


def of_each(lines: Iterable[str]) -> Iterator[str]:
    """The lines as if each process had printed its own, and the names of processes without ranges."""
    for line in lines:
        found = re.match(r"\[(\d[\d, -]*)\] ", line)
        rest = re.sub(r"\bprocesses (\d[\d, -]*\d)", lambda m: f"processes {', '.join(map(str, numbers(m[1])))}", line)
        if found is None:
            yield rest
        else:
            yield from (f"[{k}] {rest[found.end() :]}" for k in numbers(found[1]))
