"""A check of the built pages: every link inside of the site leads to a file, and to an anchor in it, that exist."""

from __future__ import annotations

import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.util.logging import getLogger


class Page(HTMLParser):
    """The anchors and the links of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects ids and the targets of links."""
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def broken_links(root: Path) -> list[str]:
    """Each broken link below a directory, with the page that contains it."""
    pages = {path: Page(path) for path in root.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            anchors = pages[target].anchors if target in pages else set()
            if not target.exists() or (parts.fragment and target in pages and unquote(parts.fragment) not in anchors):
                broken.append(f"{path.relative_to(root)}: {link}")
    return broken


def check_links(app: Sphinx, error: Exception | None) -> None:
    """Warns of broken links, after a build without an error."""
    if error is None and app.builder.format == "html":
        for link in broken_links(Path(app.outdir)):
            getLogger(__name__).warning("broken link in %s", link)


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the check."""
    app.connect("build-finished", check_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
