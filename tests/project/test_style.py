"""The style, as a test, so that the second command of the README runs all required checks; `test_types` runs mypy."""

from __future__ import annotations

import pytest

from tests.scripts import new_process, output_of


@pytest.mark.parametrize("tool", [["ruff", "check"], ["ruff", "format", "--check"]], ids=["ruff", "format"])
def test_tool_reports_nothing(tool: list[str]) -> None:
    output_of(new_process("-m", *tool))
