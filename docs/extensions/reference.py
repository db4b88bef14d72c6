"""The API reference: the directive ``public``, and links from `st.name` in any text to the entry of the name."""

from __future__ import annotations

import inspect
import re
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.logging import getLogger

import shardtensor as st
from shardtensor.hints import Lacking

from .chapters import NUMPYS, names_in, pages_of_names

PUBLIC = re.compile(r"st\.([\w.]+)(?:\(\))?")

PROPERTIES: dict[str, list[str]] = {}
"""The docstrings of properties, by name, while Napoleon converts them."""


class Public(SphinxDirective):
    """``.. public:: module …`` shows a table of the public names of the modules, then the documentation of each."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """The table and the entries, parsed."""
        table, entries = [], []
        for argument in self.arguments[0].split():
            for name in names_in(argument):
                doc = documentation(name, argument)
                table += [f"   * - :py:obj:`{name} <shardtensor.{name}>`", f"     - {summary(doc)}"]
                entries += ["", *entry(name, doc)]
        header = ["", ".. list-table::", "   :class: names", "   :widths: auto", ""]
        parent = nodes.Element()
        source, _ = self.get_source_info()
        self.state.nested_parse(StringList([*header, *table, *entries, ""], source), self.content_offset, parent)
        return parent.children


def is_value(name: str) -> bool:
    """Whether a public name is neither a class nor a function nor a module."""
    return not callable(getattr(st, name)) and not inspect.ismodule(getattr(st, name))


def documentation(name: str, argument: str) -> str:
    """The docstring of a public name; for a value, the string below its assignment in the module that is named."""
    if not is_value(name):
        return inspect.getdoc(getattr(st, name)) or ""
    module = argument.removesuffix(f".{name}")
    return "\n".join(ModuleAnalyzer.for_module(module).find_attr_docs()["", name])


def summary(doc: str) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])|(?<=:)$", paragraph, maxsplit=1)[0]


def entry(name: str, doc: str) -> list[str]:
    """The directive that documents a public name."""
    if is_value(name):
        return [f".. py:data:: {name}", "   :module: shardtensor", "", *(f"   {line}" for line in doc.splitlines())]
    thing = getattr(st, name)
    if inspect.ismodule(thing):
        return [f".. automodule:: shardtensor.{name}", "   :members:", "   :imported-members:"]
    if not inspect.isclass(thing):
        return [f".. autofunction:: shardtensor.{name}"]
    if issubclass(thing, Exception):
        return [f".. autoexception:: shardtensor.{name}", "   :show-inheritance:"]
    return [f".. autoclass:: shardtensor.{name}", "   :members:", "   :inherited-members: tuple, str, list, dict"]


class LinkPublicNames(SphinxTransform):
    """Inline code that is a public name, such as `st.psum`, becomes a link; a name that does not exist is a warning."""

    default_priority = 300

    def apply(self, **options: Any) -> None:
        """Replaces the code of this document."""
        for node in list(self.document.findall(nodes.literal)):
            found = PUBLIC.fullmatch(node.astext())
            if (
                found
                and found[1] not in NUMPYS
                and not isinstance(node.parent, nodes.reference | addnodes.pending_xref)
            ):
                target = f"shardtensor.{found[1]}"
                link = addnodes.pending_xref(
                    "", refdomain="py", reftype="obj", reftarget=target, refwarn=True, refdoc=self.env.docname
                )
                node.replace_self(link)
                link += node


def keep_properties(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Keeps the docstring of a property: Napoleon would take the words before a colon as its type."""
    if what == "property":
        PROPERTIES[name] = lines.copy()


def link_docstrings(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """In docstrings, `st.name` becomes a link to the entry of the name, and the path of a page a link to the page."""
    lines[:] = PROPERTIES.pop(name, lines)
    text = re.sub(r"(?<!`)`st\.([\w.]+)`(?!`)", r"`st.\1 <shardtensor.\1>`", "\n".join(lines))
    lines[:] = re.sub(r"`?docs/(\w+)\.md`?", r":doc:`/docs/\1`", text).split("\n")


def skip_hints(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out names of other libraries, for which a class has errors that say what to write."""
    return True if isinstance(thing, Lacking) else None


def check_names(app: Sphinx, environment: BuildEnvironment) -> None:
    """Warns of public names that are on no page, or on several."""
    for name, pages in pages_of_names().items():
        if len(pages) != 1:
            getLogger(__name__).warning("the public name %s is on %d pages of docs/reference", name, len(pages))


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directive, the transform and the check."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"  # as in the docstrings; Sphinx calls them variables
    app.add_directive("public", Public)
    app.add_transform(LinkPublicNames)
    app.connect("autodoc-process-docstring", keep_properties, priority=400)  # Napoleon's is 500.
    app.connect("autodoc-process-docstring", link_docstrings, priority=600)
    app.connect("autodoc-skip-member", skip_hints)
    app.connect("env-check-consistency", check_names)
    return {"parallel_read_safe": True}
