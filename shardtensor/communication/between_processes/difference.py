"""`difference`: the message of the error that is raised in all processes when they do not make the same calls.

The message is the same in all processes. It names, for each group of processes, the place in the user's program, and
the function. Numbers of calls, identities of tensors and checksums are details.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Value = TypeVar("Value", bound=Hashable)

DETAIL = "\x01"
"""Ends the part of a call that has to be the same in all processes. Of an error, the place and the message follow, each
after this character.
"""

_SIZE = 8192
"""Bytes of a report."""

_LINE = 100
"""Characters of a call in a report."""


class State(enum.IntEnum):
    """The state of a process."""

    RUNNING = 0
    FAILED = 1
    ENDED = 2


class Header(NamedTuple):
    """The header that processes compare: the number of the exchange and of calls, the hash of these, and the state."""

    sequence: int
    calls: int
    digest: bytes
    state: int


class Report(NamedTuple):
    """The report that a process sends to the others when their headers differ.

    Attributes:
        failure: the message of the error that has ended the process.
        place: where in the user's program the process is, or has failed; empty if this is not known.
        function: the function that the program calls there.
        calls: the hash and the text of its last calls, by their numbers.
    """

    failure: str
    place: str
    function: str
    calls: Mapping[int, tuple[str, str]]

    def packed(self) -> bytes:
        """Returns the report as bytes; their number is always the same."""
        lines = [self.failure[: _SIZE // 4], self.place[: _SIZE // 8], self.function]
        # The oldest calls, which come last, may be cut off.
        lines += [f"{n} {digest} {_cut(text)}" for n, (digest, text) in sorted(self.calls.items(), reverse=True)]
        return "\n".join(lines).encode()[:_SIZE].ljust(_SIZE, b"\0")

    @staticmethod
    def unpacked(data: bytes) -> Report:
        """Returns the report of which these are the bytes."""
        failure, place, function, *rest = data.rstrip(b"\0").decode(errors="replace").split("\n")
        lines = [line.split(" ", 2) for line in rest]
        return Report(failure, place, function, {int(line[0]): (line[1], line[2]) for line in lines if len(line) == 3})

    @property
    def where(self) -> str:
        """The place with the function."""
        return f"{self.place} {self.function}".strip()


def difference(headers: Sequence[Header], reports: Sequence[Report]) -> tuple[str, str]:
    """Returns the message of an error and its details: which process has failed or ended, or the first call that
    differs.
    """
    if failed := [k for k, header in enumerate(headers) if header.state == State.FAILED]:
        return _failure(failed, headers, reports)
    calls = [report.calls for report in reports]
    begin = max(min(c, default=1) for c in calls)
    for n in range(begin, max(h.calls for h in headers) + 1):
        ended = [k for k, header in enumerate(headers) if header.calls < n]
        if not ended and len({c[n][0] for c in calls}) == 1:
            continue
        if not ended and begin == n > 1:
            break  # The hashes include all calls before, so that they differ from the first difference on.
        by_process = {k: c[n][1] for k, c in enumerate(calls) if n in c}
        if 0 < len(errors := [k for k, text in by_process.items() if DETAIL in text]) < len(headers):
            return _error_of_some(errors, n, reports)
        texts = grouped({k: text.replace(DETAIL, ": ") for k, text in by_process.items()})
        details = f"call {n} is " + ", and ".join(f"{text} in {processes_text(ks)}" for text, ks in texts.items())
        if ended and all(headers[k].state == State.RUNNING for k in by_process):
            at, positions = _at([reports[k].place for k in ended]), _positions(by_process, reports)
            message = f"{processes_text(ended)} {_has(ended)} ended without an exception{at}, and {positions}"
            message += "; all processes have to make the same calls"
            return message, f"{processes_text(ended)} {_has(ended)} ended after call {n - 1}; {details}"
        return _other_calls(n, by_process | dict.fromkeys(ended, "nothing"), headers, reports), details
    message = "the processes have made different calls some time ago; " + _positions(range(len(reports)), reports)
    return message, f"the calls differ in call {begin}, or before it"


def processes_text(numbers: Iterable[int]) -> str:
    """Returns the name of some processes: ``process 1``, or ``processes 0, 2-3``."""
    text = numbers_text(numbers)
    return f"{'process' if text.isdecimal() else 'processes'} {text}"


def numbers_text(numbers: Iterable[int]) -> str:
    """Returns the numbers of processes: ``0, 2-3``."""
    runs = list[list[int]]()
    for k in sorted(numbers):
        if runs and runs[-1][1] == k - 1:
            runs[-1][1] = k
        else:
            runs.append([k, k])
    return ", ".join([str(a) if a == b else f"{a}-{b}" for a, b in runs])


def grouped(values: Mapping[int, Value]) -> dict[Value, list[int]]:
    """Returns the processes that have each value, the smallest groups first: an error is most likely there."""
    groups: dict[Value, list[int]] = {}
    for k, value in values.items():
        groups.setdefault(value, []).append(k)
    return dict(sorted(groups.items(), key=lambda item: (len(item[1]), item[1])))


def compared(call: str) -> str:
    """Returns the part of a call that has to be the same in all processes."""
    return call.partition(DETAIL)[0]


def function_of(text: str) -> str:
    """Returns the function of a call."""
    return _CHECKSUM.sub("", re.split(r"[(:\x01]", text, maxsplit=1)[0])


def _failure(failed: Sequence[int], headers: Sequence[Header], reports: Sequence[Report]) -> tuple[str, str]:
    """Returns the message and the details where an error has ended some processes."""
    groups: dict[tuple[str, str], list[int]] = grouped({k: (reports[k].place, reports[k].failure) for k in failed})
    others = _positions([k for k in range(len(reports)) if k not in failed], reports)
    between = f", and the others did not: {others}; " if others else ": "
    parts = [f"{processes_text(ks)} failed{_at([place])}{between}{failure}" for (place, failure), ks in groups.items()]
    details = [f"process {k} has failed after call {headers[k].calls}: {reports[k].failure}" for k in failed]
    return "; ".join(parts), "; ".join(details)


def _error_of_some(errors: Sequence[int], n: int, reports: Sequence[Report]) -> tuple[str, str]:
    """Returns the message and the details where call ``n`` is an error in some of the processes."""
    call, _, rest = reports[errors[0]].calls[n][1].partition(DETAIL)
    place, _, message = rest.partition(DETAIL)
    them = processes_text(errors)
    others = _positions([k for k in range(len(reports)) if k not in errors], reports)
    text = f"{them} raised {call}{_at([place])}, and the others did not: {others}; {message}"
    return text, f"{them} raised {call} after call {n - 1}, and the others did not: {message}"


def _other_calls(n: int, by_process: Mapping[int, str], headers: Sequence[Header], reports: Sequence[Report]) -> str:
    """Returns the message where the processes make different calls of number ``n``."""
    names = {k: function_of(text) for k, text in by_process.items()}
    known = {k: _without_identities(text) for k, text in by_process.items()}
    plain = {k: _CHECKSUM.sub("", text) for k, text in known.items()}
    problem, shown = f"the processes call {names[0]} with different arguments", names
    if len(set(names.values())) > 1:
        problem = "the processes make different calls"
    elif len(set(plain.values())) > 1:
        shown = plain
    elif len(set(known.values())) > 1:
        problem = "the processes have host arrays with different elements"
    elif len(set(by_process.values())) > 1:
        problem = f"the processes pass different tensors to {names[0]}"
    digests = {k: report.calls[n][0] if n in report.calls else "" for k, report in enumerate(reports)}
    entries = {k: (digests[k], _entry(shown[k], names[k], headers[k], reports[k])) for k in by_process}
    return f"{problem}: " + "; ".join(f"{processes_text(ks)}: {entry}" for (_, entry), ks in grouped(entries).items())


def _entry(label: str, name: str, header: Header, report: Report) -> str:
    """Returns where a process makes the call ``label`` of the function ``name``, as far as this is known."""
    if header.state == State.ENDED:
        return f"{label} before it ended{_at([report.place])}"
    if name in (report.function, function_of(report.calls[max(report.calls)][1])):
        return f"{report.place} {label}".strip()
    return f"{label} before {report.where}"


def _positions(numbers: Iterable[int], reports: Sequence[Report]) -> str:
    """Returns where some processes are in the user's program."""
    groups = grouped({k: reports[k].where for k in numbers})
    return "; ".join(
        f"{processes_text(ks)} {'is' if len(ks) == 1 else 'are'} at {where}" for where, ks in groups.items()
    )


def _at(places: Iterable[str]) -> str:
    known = dict.fromkeys(filter(None, places))
    return f" at {', '.join(known)}" if known else ""


def _has(numbers: Sequence[int]) -> str:
    return "has" if len(numbers) == 1 else "have"


_CHECKSUM = re.compile(r" with checksum [0-9a-f]{8}")


def _without_identities(text: str) -> str:
    """Returns a call without the identities of tensors: what is between `` #`` and the end of an argument."""
    kept, depth, begin = "", 0, -1  # `begin` is the depth of brackets where an identity begins.
    for k, character in enumerate(text):
        if begin < 0 and text.startswith(" #", k):
            begin = depth
        if begin >= 0 and depth == begin and character in ",);":
            begin = -1
        depth += (character in "([") - (character in ")]")
        if begin < 0:
            kept += character
    return kept


def _cut(call: str) -> str:
    """Returns a call as it is sent in reports."""
    head, mark, rest = call.partition(DETAIL)
    return head[:_LINE] + mark + rest
