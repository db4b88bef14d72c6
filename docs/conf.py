"""Settings of the documentation site: `sphinx-build -W --keep-going -c docs . build/site` builds it.

The source directory is the root of the repository, so that the README, the changelog, the notebooks and the page on
benchmarks are pages of the site, and links between files are the same here and in the repository.
"""

import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))  # docs/extensions

import shardtensor

project = "shardtensor"
author = copyright = "the shardtensor developers"
version = release = shardtensor.__version__

extensions = [
    "myst_nb",  # Markdown and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "extensions.reference",
    "extensions.links",
]
root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "benchmarks/results/README.md",
    "docs/**",
    "notebooks/*.ipynb",
    "shardtensor/digits/README.md",
]
exclude_patterns = [".venv", ".git", "build", "**/.ipynb_checkpoints"]

# Docstrings name objects in single backquotes: `psum` is a link if there is an entry, and code otherwise.
default_role = "py:obj"
autodoc_typehints = "none"
autodoc_member_order = "groupwise"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
add_module_names = False
toc_object_entries_show_parents = "hide"

myst_heading_anchors = 3
nb_execution_mode = "off"  # The notebooks contain their outputs, which the tests check.

html_theme = "furo"
html_title = f"shardtensor {release}"
html_static_path = ["static"]
html_extra_path = ["root"]
html_css_files = ["site.css"]


BELOW = {
    "docs/from_jax": ["/docs/from_pmap_and_xmap"],
    "docs/contributing": [
        "/docs/tests",
        "/docs/adding_an_operator",
        "/docs/adding_a_derivative",
        "/docs/adding_a_collective",
        "/docs/adding_an_interpreter",
        "/docs/writing_a_backend",
        "/docs/writing_an_engine",
    ],
    "benchmarks/README": ["/docs/jit_figures", "/benchmarks/results/README"],
}
"""The pages that the navigation shows below another page."""


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Adds the tree of pages: its four groups belong to the first page of the site, which is the README."""
    if docname == root_doc:
        source[0] += (Path(__file__).parent / "contents.txt").read_text()
    if docname in BELOW:
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", "", *BELOW[docname], "```\n"])


def setup(app: Sphinx) -> None:
    """Connects the tree of pages."""
    app.connect("source-read", add_contents)
