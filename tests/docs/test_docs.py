"""The pages in docs/ and the README: links, tables of options, blocks of code, the site that is made of them."""

import importlib.util
import inspect
import json
import re
import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip("markdown_it")

from docs_pages import DOCS, PAGES, ROOT, anchors, blocks, links
from torchrun import run_twice

import lightning_commhooks as lc
from lightning_commhooks import testing
from lightning_commhooks.interface.registry import get_hook_class

OTHERS = ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY", "benchmarks/README", "examples/README")
ALL = [*(ROOT / f"{name}.md" for name in OTHERS), *PAGES]
RUN = [ROOT / "README.md", *PAGES]
WRAPPERS = (lc.Cast, lc.PerParameter, lc.Schedule, lc.ScaleByGradAccumulation)
needs_frameworks = pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("lightning", "accelerate", "transformers", "ray", "jsonargparse")
    ),
    reason="pages show all frameworks",
)

needs_furo = pytest.mark.skipif(importlib.util.find_spec("furo") is None, reason="needs sphinx, myst-parser and furo")


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_links_lead_somewhere(path):
    for link in links(path):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        found = (path.parent / target).resolve() if target else path
        assert found.exists(), f"{link}: there is no {found}"
        assert found.is_relative_to(ROOT), f"{link} is outside of the repository"
        if anchor:
            assert anchor in anchors(found), f"{link}: {found.name} has {anchors(found)}"


def test_hook_of_a_page_and_of_the_example_are_the_same():
    (hook,) = (block.text for block in blocks(DOCS / "write_a_hook.md") if block.text.startswith("# topk.py\n"))
    _, _, example = (ROOT / "examples" / "topk_plugin" / "topk_plugin.py").read_text().partition("\n\n")
    assert hook == "# topk.py\n" + example.replace("@dataclass", "@lc.register\n@dataclass")
    assert len(hook.splitlines()) <= 41, "with its first line"
    check = "check_hook(TopK(ratio=0.1), num_ranks=(2,))"
    assert check in (ROOT / "examples" / "topk_plugin" / "test_topk.py").read_text()
    assert check in (DOCS / "write_a_hook.md").read_text()


def test_two_anchors_of_one_name(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b_c`: d, e-f!\n\n[x](#a-b_c-d-e-f)\n\n## Same\n\n## Same\n")
    assert anchors(page) == ["a-b_c-d-e-f", "same", "same-1"]
    assert links(page) == ["#a-b_c-d-e-f"]


@pytest.fixture(scope="module")
def options():
    spec = importlib.util.spec_from_file_location("options", DOCS / "options.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented_classes():
    by_name = {name: get_hook_class(name) for name in lc.available_hooks()}
    return by_name | {wrapper.name: wrapper for wrapper in WRAPPERS}


@pytest.mark.parametrize("name", documented_classes())
def test_options_of_each_hook_are_on_its_page(options, name):
    text = (DOCS / "hooks" / f"{name}.md").read_text()
    hook_class = documented_classes()[name]
    assert f"<!-- options: {hook_class.__name__} -->" in text
    assert options.updated(text) == text, "run: python docs/options.py"
    # Tables are made from docstrings; this does without.
    for parameter in inspect.signature(hook_class).parameters.values():
        (row,) = (line for line in text.splitlines() if line.startswith(f"| `{parameter.name}` |"))
        default = row.split("|")[2].strip().strip("`").replace('"', "'")
        assert default == ("must be given" if parameter.default is parameter.empty else shown(parameter.default))


def shown(default):
    # What a dataclass shows for a factory.
    return "{8: None}" if repr(default) == "<factory>" else repr(default)


def test_an_option_without_a_line_in_the_docstring(options):
    class Broken(lc.Int8):
        """An Int8.

        Args:
            block_size: numbers in a block.
        """

    with pytest.raises(ValueError, match=r"docstring and fields differ in .*rounding"):
        options.table(Broken)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What went wrong on each page: all are run at once, since importing the frameworks takes long."""
    file = tmp_path_factory.mktemp("docs") / "results.json"
    run_twice("docs_runner.py", file, timeout=150)
    return json.loads(file.read_text())


@needs_frameworks
@pytest.mark.parametrize("path", RUN, ids=name_of)
def test_code_runs(results, path):
    assert not results[name_of(path)], results[name_of(path)]


def test_blocks_that_are_not_run_have_a_reason():
    not_run = Counter(name_of(path) for path in RUN for block in blocks(path) if block.not_run is not None)
    assert not_run == {
        "docs/fsdp.md": 1,
        "docs/ray.md": 2,
        "docs/replicas.md": 5,
        "docs/restarts.md": 2,
        "docs/write_a_hook.md": 1,
    }
    assert all(len(block.not_run) > 20 for path in RUN for block in blocks(path) if block.not_run is not None)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_page_ends_with_a_next_step(path):
    last = path.read_text().rstrip().split("\n\n")[-1]
    assert last.startswith("Next: "), "what is the reader to do next?"
    assert "](" in last


# In `use.md` an option has a line; the other page has the text of an example.
WIDE = ("docs/use.md", "docs/write_a_hook.md")


@pytest.mark.parametrize("path", [path for path in RUN if name_of(path) not in WIDE], ids=name_of)
def test_code_fits_the_column_of_the_site(path):
    lines = [line for block in blocks(path) if block.language != "text" for line in block.text.splitlines()]
    assert not [line for line in lines if len(line) > 88], "messages, which wrap, are `text`"


def test_no_block_is_overlooked():
    for path in RUN:
        fences = [line for line in path.read_text().splitlines() if line.strip().startswith("```")]
        assert len(fences) == 2 * len(blocks(path)), path


def public_names():
    import accelerate_integration

    # What is imported when it is first used is public too, though a star import leaves some of it out.
    names = {f"lightning_commhooks.{name}" for name in {*lc.__all__, *lc._LAZY}}
    names |= {f"lightning_commhooks.testing.{name}" for name in testing.__all__}
    names |= {
        f"lightning_commhooks.torchft.{name}"
        for name in ("DistributedDataParallel", "ProcessGroupGloo", "start_manager")
    }
    return names | {f"accelerate_integration.{name}" for name in accelerate_integration.__all__}


@needs_frameworks
def test_each_public_name_is_in_the_reference_once():
    pages = (path.read_text() for path in DOCS.glob("reference/*.md"))
    listed = Counter(name for page in pages for name in re.findall(r"^- `(\w+(?:\.\w+)+)`", page, re.MULTILINE))
    assert listed == Counter(public_names())


def test_readthedocs_builds_the_pages_as_make_does():
    yaml = pytest.importorskip("yaml")
    (recipe,) = re.findall(r"^docs: install\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    there = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())["build"]["jobs"]["build"]["html"]
    names = {"$READTHEDOCS_VIRTUALENV_PATH/bin": "$(BIN)", '"$READTHEDOCS_OUTPUT/html"': "docs/_build/html"}
    for name, ours in names.items():
        there = [command.replace(name, ours) for command in there]
    assert there == recipe.strip().split("\n\t")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder with the pages as HTML."""
    html = tmp_path_factory.mktemp("docs") / "html"
    build = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", "-b", "html", str(DOCS), str(html)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return html


def soup(path):
    from bs4 import BeautifulSoup

    return BeautifulSoup(path.read_text(), "html.parser")


@needs_frameworks
@needs_furo
def test_site(site):
    for path in PAGES:
        html = (site / path.relative_to(DOCS).with_suffix(".html")).read_text()
        text = path.read_text()
        assert html.count("<table") == sum(
            line.startswith("|--") or line.startswith("| --") for line in text.splitlines()
        )
        formulas = count_formulas(path)
        assert html.count('class="math notranslate') == formulas, "formulas"
        assert html.count("<math ") == html.count("</math>") == formulas, "formulas that browsers show by themselves"


@needs_frameworks
@needs_furo
def test_site_asks_no_other_host(site):
    # What fonts, styles and scripts load.
    loaded = re.compile(r"(url\(|@import|import|importScripts\(|fetch\(|\.src ?=)\s*[\"'(]*(https?:)?//[^\"')]*")
    found = set()
    for path in site.rglob("*.html"):
        for tag in soup(path).find_all(True):
            for name, value in tag.attrs.items():
                if (tag.name, name) != ("a", "href") and name != "xmlns" and re.match(r"\s*(https?:)?//", str(value)):
                    found.add(f"{tag.name} {name}={value}")
    for path in (path for ending in ("html", "css", "js") for path in site.rglob(f"*.{ending}")):
        found |= {match[0] for match in loaded.finditer(path.read_text())}
    assert not found


@needs_frameworks
@needs_furo
def test_reference_on_the_site_has_all_options(site):
    pages = [soup(path) for path in site.glob("reference/*.html")]
    entries = {dt["id"]: dt for page in pages for dt in page.select("dt.sig[id]")}
    assert public_names() <= entries.keys()
    for hook_class in documented_classes().values():
        entry = entries[f"lightning_commhooks.{hook_class.__name__}"]
        signature = {found.select_one(".n").text: found.text for found in entry.select(".sig-param:has(.n)")}
        explained = {found.text for found in entry.find_next_sibling("dd").select(".field-list strong")}
        for parameter in inspect.signature(hook_class).parameters.values():
            assert parameter.name in explained
            if parameter.default is not parameter.empty:
                assert signature[parameter.name].endswith(f" = {shown(parameter.default)}")


@needs_frameworks
@needs_furo
def test_markup_of_docstrings_on_the_site(site):
    pages = [soup(path) for path in site.glob("reference/*.html")]
    links = {link["href"] for page in pages for link in page.select("dd a.reference.internal:has(code)")}
    assert "hooks.html#lightning_commhooks.ScaleByGradAccumulation" in links
    assert any(found.text == "powersgd" for page in pages for found in page.select("dd p code"))
    for page in pages:
        assert not page.select("dl.property .field-list"), "the beginning of a sentence as a type"
        for code in page.select("code, pre, script"):
            code.decompose()
        text = page.select_one("article").text
        assert not re.search(r"`|\]\[|Return type", text), "as it is in the docstring"
        found = set(re.findall(r"lightning_commhooks\.\w+\.\w+", text))
        assert found <= set(public_names()), "a module, which may move"


def count_formulas(path):
    from markdown_it import MarkdownIt
    from mdit_py_plugins.dollarmath import dollarmath_plugin

    parser = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin)
    tokens = parser.parse(path.read_text())
    found = [*tokens, *(child for token in tokens for child in token.children or ())]
    return sum(token.type.startswith("math") for token in found)
