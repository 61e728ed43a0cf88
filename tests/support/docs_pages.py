"""What is in the pages: links, anchors, blocks of code."""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)

_NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True)
class Block:
    """A block of code: its language, text, number of its first line, and why it is not run, if so."""

    language: str
    text: str
    line: int
    not_run: str | None

    @property
    def command(self):
        """How the script in this block is started, as its first line says; None for other blocks."""
        found = re.match(r"# ((?:python|torchrun) .*\w+\.py)\n", self.text) if self.language == "python" else None
        return found and found[1]


def blocks(path):
    """Blocks of a page. A comment `<!-- not run: why -->` before one says that it is not run."""
    found, comment = [], None
    for token in _tokens(path):
        if token.type == "fence":
            found.append(Block(token.info.strip(), token.content, token.map[0] + 2, comment))
        if token.type in ("fence", "inline", "html_block"):
            match = _NOT_RUN.search(token.content) if token.type == "html_block" else None
            comment = match and match[1]
    return found


def links(path):
    """Where links and images of a page lead."""
    names = {"link_open": "href", "image": "src"}
    inline = (child for token in _tokens(path) for child in token.children or ())
    return [child.attrGet(names[child.type]) for child in inline if child.type in names]


def anchors(path):
    """What links to a page may have after `#`: its headings, as GitHub makes them."""
    tokens, found = _tokens(path), []
    for heading, text in itertools.pairwise(tokens):
        if heading.type == "heading_open":
            content = "".join(child.content for child in text.children if child.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", content.lower()).replace(" ", "-")
            found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return found


def _tokens(path):
    return MarkdownIt("commonmark").enable("table").parse(path.read_text())
