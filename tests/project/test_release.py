"""The files of a release: what the wheel and the source distribution contain; versions and the changelog."""

from __future__ import annotations

import email
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import shardtensor
from tests.scripts import new_process, output_of

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()

PACKAGES = {
    "shardtensor": ROOT / "shardtensor",
    **{path.name: path for path in sorted((ROOT / "backends").iterdir()) if (path / "__init__.py").exists()},
}

DATA = {
    "shardtensor/digits/README.md",  # the source and the license of the digits
    "shardtensor/digits/digits.csv.gz",
    *(f"{package}/py.typed" for package in PACKAGES),
}
"""The files of the packages that are no modules."""

FOLDERS = (".ci", "backends", "benchmarks", "docs", "notebooks", "shardtensor", "tests")
"""What the tests read, besides files of the root."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built in this process, without an environment and without the network."""
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("wheel")
    return Path(next(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, likewise."""
    from hatchling.builders.sdist import SdistBuilder

    folder = tmp_path_factory.mktemp("sdist")
    return Path(next(SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])))


def files(folder: Path) -> set[str]:
    """The files below a folder, relative to the root, without those that programs leave there."""
    ignored = {"__pycache__", ".ipynb_checkpoints", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}
    found = (path.relative_to(ROOT) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if not ignored.intersection(path.parts)}


def test_the_wheel_has_the_modules_and_the_data_and_nothing_else(wheel: Path) -> None:
    modules = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*.py")
    }
    info = f"shardtensor-{VERSION}.dist-info"
    described = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    with zipfile.ZipFile(wheel) as archive:
        assert sorted(archive.namelist()) == sorted(modules | DATA | described)
    assert wheel.name == f"shardtensor-{VERSION}-py3-none-any.whl"


def test_the_wheel_describes_the_project(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"shardtensor-{VERSION}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        points = archive.read(f"{info}/entry_points.txt").decode()
    assert (metadata["Name"], metadata["Version"]) == ("shardtensor", VERSION)
    assert metadata["Requires-Python"] == PROJECT["project"]["requires-python"]
    systems = [name for name in metadata.get_all("Classifier", []) if name.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]
    for group in ("console_scripts", "shardtensor.backends", "shardtensor.engines"):
        assert f"[{group}]" in points


def test_the_wheel_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """It is imported from the unpacked wheel, and reads the data from there."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import shardtensor as st, shardtensor.demo\n"
        "print(st.__file__, st.__version__, len(shardtensor.demo.load_digits().images), st.ones((2,)).sum().item())\n"
        "import shardtensor_numpy; print(shardtensor_numpy.__file__)"
    )
    assert output_of(new_process("-I", "-c", code, cwd=tmp_path)).splitlines() == [
        f"{tmp_path / 'shardtensor' / '__init__.py'} {VERSION} 1797 2.0",
        str(tmp_path / "shardtensor_numpy" / "__init__.py"),
    ]


def test_the_source_distribution_has_what_the_tests_read(sdist: Path) -> None:
    top = {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"}
    wanted = set().union(*(files(ROOT / folder) for folder in FOLDERS)) | top
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(f"shardtensor-{VERSION}/") for name in archive.getnames()}
    assert sorted(names - {"PKG-INFO", ".gitignore"}) == sorted(wanted)
    assert sdist.name == f"shardtensor-{VERSION}.tar.gz"


# -- versions and the changelog --------------------------------------------------------------------


def sections() -> dict[str, str]:
    """The sections of the changelog by their titles, the newest first."""
    titles = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    return dict(zip(titles, re.split(r"^## .*$", CHANGELOG, flags=re.MULTILINE)[1:], strict=True))


def test_versions_agree() -> None:
    assert shardtensor.__version__ == VERSION
    unreleased, newest, *_ = sections()
    assert unreleased == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(VERSION)}\] - \d{{4}}-\d\d-\d\d", newest)
    assert f"depend on `shardtensor>={VERSION.rpartition('.')[0]}," in (ROOT / "docs" / "versions.md").read_text()


def test_a_version_has_at_most_one_page_in_the_changelog() -> None:
    for title, text in sections().items():
        assert len(text.strip().splitlines()) <= 65, title
    assert max(map(len, CHANGELOG.splitlines())) <= 120


def test_breaking_changes_come_first() -> None:
    for title, text in sections().items():
        headings = re.findall(r"^### (.*)$", text, re.MULTILINE)
        breaking = [position for position, heading in enumerate(headings) if "break" in heading]
        assert breaking in ([], [0]), title


def test_the_import_on_windows_names_linux() -> None:
    code = "import os; os.name = 'nt'; import shardtensor"
    done = new_process("-c", code)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: shardtensor needs Linux")
