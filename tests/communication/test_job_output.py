"""The lines of several processes: tracebacks are printed once, and no other line waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardtensor import job_output
from shardtensor.job_output import Lines

STACK = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "    f()"]
OTHER = [*STACK[:1], '  File "a.py", line 2, in <module>', "    g()"]
END = "shardtensor.errors.DistributedError: the processes make different calls"


@pytest.fixture
def printed() -> list[str]:
    return []


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(printed: list[str], clock: Clock) -> Iterator[Lines]:
    made = Lines(printed.append, clock)
    for k in range(3):
        made.open(k)
    yield made
    assert made.error is None


def read(lines: Lines, process: int, *texts: str) -> None:
    for text in texts:
        lines.read(process, text)


def close(lines: Lines) -> None:
    for k in range(3):
        lines.close(k)


def test_a_traceback_of_all_processes_is_printed_once(lines: Lines, printed: list[str]) -> None:
    for k in (2, 0, 1):
        read(lines, k, "before", *STACK, "ValueError: no", "after")
    close(lines)
    assert printed == ["[2] before", "[0] before", "[1] before"] + [
        f"[0-2] {text}" for text in (*STACK, "ValueError: no", "after")
    ]


def test_the_message_of_an_error_with_other_places_is_printed_once(lines: Lines, printed: list[str]) -> None:
    read(lines, 0, *STACK, END)
    read(lines, 1, *OTHER, "ValueError: no", END)
    read(lines, 2, *STACK, END)
    close(lines)
    wanted = [f"[1] {text}" for text in (*OTHER, "ValueError: no")] + [f"[0, 2] {text}" for text in STACK]
    assert printed == [*wanted, f"[0-2] {END}"]


def test_the_numbers_of_hidden_frames_may_differ(lines: Lines, printed: list[str]) -> None:
    hidden = "frames of shardtensor are hidden; set SHARDTENSOR_TRACEBACK=full to see them)"
    read(lines, 0, *STACK, END, f"(13 {hidden}")
    read(lines, 1, *OTHER, END, "(1 frame of shardtensor is hidden; set SHARDTENSOR_TRACEBACK=full to see it)")
    close(lines)
    assert printed[-2:] == [f"[0-1] {END}", f"[0-1] ({hidden}"]


def test_an_error_without_a_stack_joins_those_with_one(lines: Lines, printed: list[str]) -> None:
    read(lines, 1, END)
    read(lines, 0, *STACK, END)
    close(lines)
    assert printed == [*(f"[0] {text}" for text in STACK), f"[0-1] {END}"]


def test_lines_that_begin_no_traceback_are_printed_at_once(lines: Lines, printed: list[str]) -> None:
    read(lines, 1, *STACK)
    read(lines, 0, "loss 3", "File not found", "  File names")
    assert printed == ["[0] loss 3", "[0] File not found", "[0]   File names"]
    lines.write("shardtensor launch: process 2 ended")
    assert printed[3:] == ["shardtensor launch: process 2 ended"]
    close(lines)
    assert printed[4:] == [f"[1] {text}" for text in STACK]


def test_a_traceback_waits_for_those_of_the_others_but_not_long(lines: Lines, printed: list[str], clock: Clock) -> None:
    read(lines, 0, *STACK, "ValueError: no")
    clock.now += 1
    lines.check()
    assert printed == []
    read(lines, 1, *STACK, "ValueError: no")
    clock.now += job_output.HELD - 0.5
    lines.check()
    assert printed == [f"[0-1] {text}" for text in (*STACK, "ValueError: no")]
    read(lines, 0, "the process goes on")
    assert printed[-1] == "[0] the process goes on"
    for k in range(3):  # Nothing is to come when all processes have printed one, some time ago.
        read(lines, k, *STACK, "KeyError: 1")
    clock.now += 0.6
    lines.check()
    assert printed[-1] == "[0-2] KeyError: 1"


def test_a_program_that_goes_on_after_a_traceback_is_not_held_up(
    lines: Lines, printed: list[str], clock: Clock
) -> None:
    """It logs errors that it handles, for example."""
    for k in range(5):
        read(lines, 0, *STACK, "ValueError: no")
        clock.now += 0.6
        read(lines, 0, f"step {k}")
        assert printed[-2:] == ["[0] ValueError: no", f"[0] step {k}"]
        clock.now += 0.9
        lines.check()
    assert len(printed) == 5 * (len(STACK) + 2)


def test_a_traceback_that_has_just_begun_is_not_split(lines: Lines, printed: list[str], clock: Clock) -> None:
    read(lines, 0, *STACK, "ValueError: no")
    clock.now += job_output.HELD
    read(lines, 1, *OTHER)
    clock.now += 0.1
    lines.check()
    assert printed == [f"[0] {text}" for text in (*STACK, "ValueError: no")]
    read(lines, 2, *OTHER)
    for k in (1, 2):
        read(lines, k, "KeyError: 1")
    close(lines)
    assert printed[4:] == [f"[1-2] {text}" for text in (*OTHER, "KeyError: 1")]


def test_few_characters_are_held_back(lines: Lines, printed: list[str]) -> None:
    read(lines, 0, *STACK)
    read(lines, 1, *STACK, *["x" * 1_000_000] * 3)
    assert printed == []
    read(lines, 0, *["y" * 1_000_000] * 2)
    assert len(printed) == 2 * len(STACK) + 5
