"""The tiers of tests: the slices together are the full tier, and two lines give what did not run and the time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.scripts import WITHOUT_PLUGINS, new_process, output_of
from tests.selection import slice_of, sliced

ROOT = Path(__file__).parents[2]

SUITE = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_fast(n):
    if n == 2:
        pytest.skip("out of luck: today")

@pytest.mark.full
@pytest.mark.parametrize("n", range(5))
def test_full(n): ...

@pytest.mark.slow
def test_slow(): ...

@pytest.mark.skip(reason="out of luck: always")
def test_dropped(): ...
"""

BACKENDS = """
import hypothesis
import pytest
from hypothesis import strategies as some
from tests.draws import drawn

seen = set()

@pytest.mark.parametrize("backend", ["a", "b", "c"])
@pytest.mark.parametrize("case", [object(), object(), object(), object()], ids="wxyz")
def test_in_turn(case, backend): ...

@pytest.mark.parametrize("backend", ["a", "b"])
@pytest.mark.parametrize("x", ["i", "j"])
@pytest.mark.parametrize("y", ["k", "l"])
def test_two(x, y, backend): ...

@pytest.mark.parametrize("backend", ["a", "b", "c"])
@pytest.mark.parametrize("case", ["s", "t"])
def test_few(case, backend): ...

@pytest.mark.parametrize("backend", ["a", "b"])
@pytest.mark.parametrize("case", ["one"])
def test_one_case(case, backend): ...

@pytest.mark.parametrize("backend", ["a", "b"])
def test_no_case(backend): ...

@hypothesis.settings(max_examples=drawn(40))
@hypothesis.given(x=some.integers())
def test_examples(x):
    seen.add(x)

def test_number():
    print(len(seen), "examples")
"""

FAST, FULL, SLOW = [f"test_fast[{n}]" for n in range(2)], [f"test_full[{n}]" for n in range(5)], ["test_slow"]

RUNS = {
    "workers": (SUITE, ["-n2"]),
    "full": (SUITE, ["--full"]),
    "quick": (SUITE, ["--quick"]),
    "slice": (SUITE, ["--slice=2/3"]),
    "named": (BACKENDS, ["SUITE::test_in_turn[w-b]", "SUITE::test_in_turn[x-c]"]),
    "backends": (BACKENDS, ["-s"]),
    "backends, full": (BACKENDS, ["-s", "--full"]),
}
"""Suites of tests, and options of their runs."""

PYTEST = """
import json, sys
import pytest
from tests import selection

selection.fixed_loop = lambda: 1.0  # It takes a second.
for options in json.load(sys.stdin):
    print("RUN", flush=True)
    assert pytest.main(options) == 0
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What pytest prints in each of the runs, which has the selection of this project and a module of its own: all in one
    process but that with workers.
    """
    folder, commands = tmp_path_factory.mktemp("suites"), {}
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = full\n    slow\n")
    for number, (name, (suite, options)) in enumerate(RUNS.items()):
        path = folder / f"test_suite_{number}.py"
        path.write_text(suite)
        named = [option.replace("SUITE", str(path)) for option in options]
        named += [str(path)] * (named == options)
        commands[name] = ["-p", "tests.selection", "-p", "no:cacheprovider", "-q", "-rp", *named]
    workers = output_of(new_process("-m", "pytest", "-p", "xdist", *commands.pop("workers"), **WITHOUT_PLUGINS))
    others = output_of(new_process("-c", PYTEST, stdin=json.dumps([*commands.values()]), **WITHOUT_PLUGINS))
    texts = others.split("RUN\n")[1:]
    return {"workers": workers, **dict(zip(commands, texts, strict=True))}


@pytest.mark.parametrize(
    ("run", "passed", "said"),
    [
        ("workers", FAST + SLOW, "5 marked full; 2 out of luck"),
        ("full", FAST + FULL + SLOW, "2 out of luck"),
        ("quick", FAST[:1], "5 marked full; 3 not quick; 1 out of luck"),
        ("slice", sorted([FAST[1], FULL[1], FULL[4]]), "6 in other slices; 1 out of luck"),
    ],
)
def test_options(run: str, passed: list[str], said: str, printed: dict[str, str]) -> None:
    text = printed[run]
    assert sorted(re.findall(r"^PASSED .*::(.*)", text, re.MULTILINE)) == passed
    assert f"\nnot run: {said}\n" in text
    assert re.search(r"^processor time: \d+ s, \d+ times a fixed loop$", text, re.MULTILINE)


@pytest.mark.parametrize("full", [False, True])
def test_the_fast_tier_draws_from_backends_and_examples(full: bool, printed: dict[str, str]) -> None:
    text = printed["backends, full" if full else "backends"]
    passed = sorted(re.findall(r"^PASSED .*::test_(.*)", text, re.MULTILINE))
    in_turn = (
        ["w-a", "x-b", "y-c", "z-a"] if not full else [f"{case}-{backend}" for case in "wxyz" for backend in "abc"]
    )
    every = ["one_case[one-a]", "one_case[one-b]", "no_case[a]", "no_case[b]", "examples", "number"]
    two = {name.removeprefix("two") for name in passed if name.startswith("two[")}
    few = {name.removeprefix("few") for name in passed if name.startswith("few[")}
    assert two == ({"[k-i-a]", "[k-j-b]", "[l-i-b]", "[l-j-a]"} if not full else two)
    assert (len(two), len(few)) == ((8, 6) if full else (4, 3))
    assert {name[-2] for name in few} == set("abc")
    others = [name for name in passed if not name.startswith(("two[", "few["))]
    assert others == sorted([*every, *(f"in_turn[{case}]" for case in in_turn)])
    assert f"{40 if full else 5} examples" in text


def test_a_case_that_is_named_runs_on_the_backend_of_its_name(printed: dict[str, str]) -> None:
    passed = re.findall(r"^PASSED .*::(.*)", printed["named"], re.MULTILINE)
    assert sorted(passed) == ["test_in_turn[w-b]", "test_in_turn[x-c]"]


def test_slices_together_are_all() -> None:
    tests = list(range(5171))
    parts = [sliced(tests, *slice_of(f"{k}/37")) for k in range(1, 38)]
    assert sorted(n for part in parts for n in part) == tests
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/2/3", "a/b", ""])
def test_what_is_no_slice(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        slice_of(text)
