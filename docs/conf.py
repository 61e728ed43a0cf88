"""Sphinx: `make docs` builds these pages as HTML. They are Markdown that GitHub shows too."""

import re
from pathlib import Path

from sphinx.application import Sphinx

project = "lightning-commhooks"
author = "The lightning-commhooks developers"
release = re.search(r'__version__ = "(.+)"', Path("../lightning_commhooks/__init__.py").read_text())[1]

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
nitpicky = True

myst_enable_extensions = ["dollarmath"]
# Links to `page.md#a-heading` are the same as on GitHub.
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False
html_copy_source = False

linkcheck_timeout = 20
linkcheck_retries = 2


def _contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make links to pages outside of this folder downloads, and the first page's links the table of contents."""
    folder = (app.srcdir / docname).parent

    def as_download(match: re.Match[str]) -> str:
        is_inside = (folder / match[1]).resolve().is_relative_to(app.srcdir)
        return match[0] if is_inside else f"](path:{match[1]})"

    source[0] = re.sub(r"\]\(((?:\.\./)+[\w/]+\.md)(?:#[\w-]+)?\)", as_download, source[0])
    if docname != "index":
        return
    # By its headings. GitHub, which shows these pages too, knows no `toctree`.
    for section in source[0].split("\n## ")[1:]:
        caption, _, text = section.partition("\n")
        pages = re.findall(r"\]\(([a-z]\w*(?:/\w+)*)\.md\)", text)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _contents)
