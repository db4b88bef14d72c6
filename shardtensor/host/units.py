"""Formatting of numbers: bytes with binary units, and counts of things."""

from __future__ import annotations

from collections.abc import Sequence


def readable(nbytes: float) -> str:
    """Formats a number of bytes in the largest suitable unit, with three significant digits.

    >>> from shardtensor.host.units import readable
    >>> readable(1023), readable(1536), readable(5 << 30)
    ('1023 B', '1.5 KiB', '5 GiB')
    """
    power = power_of_1024(nbytes)
    count = nbytes / 1024**power
    return f"{count:.3g} {UNITS[power]}" if count < 99.95 else f"{count:.0f} {UNITS[power]}"


UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def power_of_1024(nbytes: float) -> int:
    """Returns the index in `UNITS` of the largest unit in which the number of bytes, rounded to three digits, is at
    least 1; 0 for less than one byte.
    """
    return next((k for k in range(len(UNITS) - 1) if nbytes < 1023.5 * 1024**k), len(UNITS) - 1)


def counted(count: int, one: str, several: str = "", *, spec: str = "") -> str:
    """Formats a number of things: in the singular if there is one, otherwise in the plural.

    >>> from shardtensor.host.units import counted
    >>> counted(1, "device"), counted(2, "device"), counted(0, "axis", "axes"), counted(1000, "byte", spec=",")
    ('1 device', '2 devices', '0 axes', '1,000 bytes')

    Args:
        count: the number.
        one: the name of one of them.
        several: the name of several, by default with an "s".
        spec: how the number is formatted.
    """
    return f"{count:{spec}} {one if count == 1 else several or f'{one}s'}"


def listed(labels: Sequence[str], limit: int = 6) -> str:
    """Joins labels for error messages: the first ``limit`` of them, and the number of the others."""
    more = f" and {len(labels) - limit} more" if len(labels) > limit else ""
    return ", ".join(labels[:limit]) + more
