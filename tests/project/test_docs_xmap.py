"""The page "Coming from jax.pmap and xmap": its code prints the output that is shown, and equals JAX's."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardtensor.backend import registry
from tests import peers
from tests.scripts import VARIABLES, output_of, run_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from_pmap_and_xmap.md").read_text()
TORCH = importlib.util.find_spec("torch") is not None


def blocks(text: str, *languages: str) -> list[str]:
    """The blocks of code in these languages, in order."""
    return [
        code
        for language, code in re.findall(r"^```([\w ]+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        if language in languages
    ]


PREAMBLE, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
TITLES = [section.partition("\n")[0] for section in SECTIONS]
WITH_JAX = [title for title, section in zip(TITLES, SECTIONS, strict=True) if blocks(section, "py")]


def ours(title: str) -> str:
    """Returns our code of a section, as a reader would type it."""
    languages = ("python", "python torch") if TORCH else ("python",)
    return "\n".join(blocks(PREAMBLE, "python") + blocks(SECTIONS[TITLES.index(title)], *languages))


def run(title: str, backend: str = "numpy") -> dict[str, Any]:
    """What our code of a section defines. What it prints must be what the comments beside it say."""
    code, names, out = ours(title), {"__name__": "page"}, io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, title, "exec"), names)
    lines = re.findall(r"print\(.*# -> (.*)", code)
    wanted = "".join(f"{line}\n" for line in lines).replace("numpy:", f"{backend}:")
    if backend != "numpy":  # Programs run in several threads, of which any may be the first to call.
        first, other = (
            "psum over 'i': N... called psum over 'i'",
            "N... called pmax over 'i' (2 others had not called yet)",
        )
        either = "p... over 'i': N... called p... over 'i', and N... called p... over 'i'..."
        wanted = wanted.replace(f"{first}, and {other}".replace("N", f"{backend}:"), either.replace("N", f"{backend}:"))
    if lines:
        assert doctest.OutputChecker().check_output(wanted, out.getvalue(), doctest.ELLIPSIS), out.getvalue()
    return names


@pytest.mark.parametrize("title", TITLES)
def test_section(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[str] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(sys._getframe(1).f_code.co_name))
    run(title)
    assert stops == (["f"] if "breakpoint" in title else [])


def test_every_section_has_code_and_most_have_jaxs() -> None:
    assert [title for title, section in zip(TITLES, SECTIONS, strict=True) if not blocks(section, "python")] == []
    assert len(WITH_JAX) >= 10
    assert len(re.findall("^```", PAGE, re.MULTILINE)) == 2 * len(blocks(PAGE, "python", "python torch", "py", "text"))


def test_links_exist() -> None:
    places = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in TITLES}
    assert set(re.findall(r"\]\(#(.*?)\)", PAGE)) <= places


@pytest.mark.parametrize("title", TITLES)
def test_section_on_separate_memories(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "default_backend", lambda: registry.load("checked"))
    monkeypatch.setattr(sys, "breakpointhook", lambda: None)
    run(title, "checked")


def test_pdb_stops_in_the_failing_call() -> None:
    code = ours("print and breakpoint") + "\nprint('done')"
    asked = "p ('v is', float(v), str(st.current_device()))\nc\n"
    out = output_of(run_script(code, stdin=asked, **VARIABLES))
    assert "('v is', -1.0, 'numpy:2')" in out
    assert out.rstrip().endswith("done")


# -- beside JAX ------------------------------------------------------------------------------------

THEIRS = """
import jax, numpy, warnings
warnings.simplefilter("ignore")
found = {}
for title, code in given:
    names = {}
    exec(code, names)
    found[title] = {
        name: [type(x).__module__, jax.tree.map(numpy.asarray, x)]
        for name, x in names.items()
        if isinstance(x, (jax.Array, numpy.ndarray)) and not getattr(x, "is_deleted", bool)()
    }
"""


@pytest.mark.full
def test_jaxs_code_gives_the_same() -> None:
    peers.require_jax("0.10", "0.12")
    sections = [
        (title, "\n".join(blocks(PREAMBLE, "py") + blocks(SECTIONS[TITLES.index(title)], "py"))) for title in WITH_JAX
    ]
    for title, theirs in peers.run(THEIRS, sections, devices=8).items():
        mine = run(title)
        computed = [name for name, (module, _) in theirs.items() if not module.startswith("numpy")]
        assert computed, title
        for name, (_, value) in theirs.items():
            here = mine[name]
            if isinstance(here, list):  # shards
                if here[0].is_donated:
                    continue
                here = np.concatenate([np.asarray(shard) for shard in here])
            assert np.shape(here) == value.shape, (title, name)
            np.testing.assert_allclose(np.asarray(here), value, rtol=1e-4, atol=1e-6, err_msg=f"{title}: {name}")
