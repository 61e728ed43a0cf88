"""Sphinx: `make docs` builds these pages as HTML. They are Markdown that GitHub shows too."""

import inspect
import re
from importlib import import_module
from pathlib import Path

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

project = "lightning-commhooks"
author = "The lightning-commhooks developers"
release = re.search(r'__version__ = "(.+)"', Path("../lightning_commhooks/__init__.py").read_text())[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = True
# Types of other packages, and those that have no public name, have no page to link to.
nitpick_ignore_regex = [("py:.*", r"(?!(lightning_commhooks|accelerate_integration)\.\w+$).*")]

myst_enable_extensions = ["dollarmath"]
# Links to `page.md#a-heading` are the same as on GitHub.
myst_heading_anchors = 4

# In docstrings, which have single backticks.
default_role = "code"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"{project} {release}"
html_show_copyright = False
html_copy_source = False
# Formulas that browsers show by themselves; Sphinx's other ways load MathJax from its host, or need LaTeX.
html_math_renderer = "mathml"

linkcheck_timeout = 20
linkcheck_retries = 2

_logger = logging.getLogger(__name__)


def _contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make links to pages outside of this folder downloads, and the first page's links the table of contents."""
    folder = (app.srcdir / docname).parent

    def as_download(match: re.Match[str]) -> str:
        is_inside = (folder / match[1]).resolve().is_relative_to(app.srcdir)
        return match[0] if is_inside else f"](path:{match[1]})"

    source[0] = re.sub(r"\]\(((?:\.\./)+[\w/]+\.md)(?:#[\w-]+)?\)", as_download, source[0])
    if docname != "index":
        return
    # Derived from headings, because GitHub also shows these pages and has no `toctree`.
    for section in source[0].split("\n## ")[1:]:
        caption, _, text = section.partition("\n")
        pages = re.findall(r"\]\(([a-z]\w*(?:/\w+)*)\.md\)", text)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"


def _reference(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace the names on a reference page by their docstrings.

    A class shows the methods and properties listed after its name, or its own documentation of them if none is listed.
    """
    if docname.startswith("reference/"):
        source[0] = re.sub(r"^- `([\w.]+)\.(\w+)`(?:: (.+))?$", _directive, source[0], flags=re.MULTILINE)


def _directive(match: re.Match[str]) -> str:
    module, name, members = match.groups()
    found = getattr(import_module(module), name)
    if not inspect.isclass(found):
        directive, options = "autofunction", ""
    elif issubclass(found, BaseException):
        directive, options = "autoexception", "   :show-inheritance:\n"
    else:
        directive, options = "autoclass", f"   :members: {(members or '').replace('`', '')}\n"
    return f"```{{eval-rst}}\n.. {directive}:: {module}.{name}\n{options}```\n"


def _signature(
    app: Sphinx, what: str, name: str, found: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """Show the defaults of a dataclass. Omit the constructor of classes that users get but do not make."""
    if what != "class" or signature is None:
        return None
    if "\nArgs:\n" not in inspect.getdoc(found):
        return "", None
    factories = {field.name: field.default_factory for field in getattr(found, "__dataclass_fields__", {}).values()}
    for parameter in inspect.signature(found).parameters.values():
        if repr(parameter.default) == "<factory>":
            signature = signature.replace("<factory>", repr(factories[parameter.name]()), 1)
    return signature, returns


def _before_napoleon(app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Make links of `[`name`][]` in docstrings."""
    lines[:] = [re.sub(r"\[`(\w+)`\]\[\]", _link, line) for line in lines]
    if what == "property":
        # Napoleon takes text before a colon in the first line for the type. A final backslash prints nothing.
        lines.insert(0, "\\")


def _link(match: re.Match[str]) -> str:
    for module in ("lightning_commhooks", "lightning_commhooks.testing", "accelerate_integration"):
        if hasattr(import_module(module), match[1]):
            return f":py:obj:`~{module}.{match[1]}`"
    return f"`{match[1]}`"


def _after_napoleon(app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Show types of attributes by their names, without modules."""
    for i, line in enumerate(lines):
        if line.strip().startswith(":type: "):
            lines[i] = re.sub(r"(?<![\w.~])((?:lightning_commhooks|accelerate_integration|torch)\.)", r"~\1", line)


def _formula(self: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    is_block = isinstance(node, nodes.math_block)
    tag = "div" if is_block else "span"
    try:
        mathml = tex2mathml(node.astext(), as_block=is_block)
    except MathError as error:
        _logger.warning("formula %r: %s", node.astext(), error, location=node)
        mathml = ""
    self.body.append(f"{self.starttag(node, tag, '', CLASS='math notranslate nohighlight')}{mathml}</{tag}>")
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _contents)
    app.connect("source-read", _reference)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", _after_napoleon, priority=600)
    app.add_html_math_renderer("mathml", inline_renderers=(_formula, None), block_renderers=(_formula, None))
