"""How long the maps of some code wait before they wake helper threads, which follows from how long the last one took.

Waking a helper thread takes as long as a tiny map. Code is known by its identity; the code itself may refer to data.
Where other code gets the identity of code that is gone, only its first map has helper threads too early or too late.
"""

from __future__ import annotations

import math

_LONG = 4
"""A map that takes more than this multiple of the helper delay has helper threads from the start the next time."""

_SHORT = 2
"""After one that takes up to this multiple, helper threads wait until the next one has become long: waking them takes
longer than the rest of a map that is as short again.
"""

_delays: dict[int, int] = {}
"""How many helper delays the next map of some code waits; one delay where it is unknown."""

_REMEMBERED = 4096
"""The maximum length of `_delays`."""


def delay_of(code: int, helper_delay: float) -> float:
    """Returns the seconds after which helper threads take part in the next map of some code.

    Args:
        code: the identity of the code; 0 if it is unknown.
        helper_delay: the seconds for code of which no map has run; infinite where helper threads never take part.
    """
    return _delays.get(code, 1) * helper_delay if math.isfinite(helper_delay) else helper_delay


def note(code: int, seconds: float, helper_delay: float) -> None:
    """Remembers how many seconds a map of some code took."""
    delays = 0 if seconds > _LONG * helper_delay else _LONG if seconds <= _SHORT * helper_delay else 1
    if not code or _delays.get(code) == delays:
        return
    if len(_delays) >= _REMEMBERED:
        _delays.clear()
    _delays[code] = delays
