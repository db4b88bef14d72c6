"""The places in the program of the user that errors and traces name."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.places import Place, calling_from, place_of, user_call, user_place
from tests.scripts import new_process, output_of


def here() -> Place:
    place = user_place()
    assert place is not None
    return place


def test_the_place_is_the_innermost_line_outside_of_the_package_and_of_libraries() -> None:
    found: list[Place] = []

    class Array:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            found.append(here())
            return np.zeros(2)

    assert (here().line, here().name) == (here.__code__.co_firstlineno + 1, "here")
    st.asarray(Array())  # The package and NumPy call code of the user, which is innermost.
    assert found[0].name == "here"
    assert found[0].file == __file__


@pytest.mark.parametrize("call", [lambda: st.ones(3).reshape(2, 2), lambda: np.reshape(st.ones(3), (2, 2))])
def test_the_place_of_an_error_is_the_line_that_called_the_package(call: object) -> None:
    with pytest.raises(st.ShapeError) as raised:
        call()  # type: ignore[operator]
    place = place_of(raised.value)
    assert place is not None
    assert (Path(place.file).name, place.name) == ("test_places.py", "<lambda>")
    assert place_of(ValueError()) is None


def test_files_are_shown_relative_to_the_current_folder_or_to_that_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/programs", *sys.path])
    assert str(Place(str(tmp_path / "a" / "b.py"), 3, "f")) == "a/b.py:3"
    assert str(Place("/programs/train.py", 4, "f")) == "train.py:4"
    assert str(Place("/elsewhere/train.py", 5, "f")) == "/elsewhere/train.py:5"
    assert str(Place("<string>", 6, "f")) == "<string>:6"


def test_the_place_in_code_of_the_command_line_and_in_libraries_is_found() -> None:
    code = "import json, shardtensor as st\nfrom shardtensor.places import user_place\n\n"
    code += "class Code(json.JSONEncoder):\n    default = staticmethod(lambda x: str(user_place()))\n\n"
    code += "print(json.dumps(1j, cls=Code))"
    assert output_of(new_process("-c", code)) == '"<string>:5"\n'


def test_a_thread_that_works_for_a_suspended_program_has_the_call_of_the_program() -> None:
    """It has no frame of the user's program itself: an exchange between processes names the collective."""

    def place_on(frame: Any) -> Place | None:
        with calling_from(frame):
            return user_call()[0]

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(place_on, sys._getframe()).result()
    assert found is not None
    assert (found.file, found.name) == (__file__, sys._getframe().f_code.co_name)
