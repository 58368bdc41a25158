"""The documentation builds strictly, offline, and fetches nothing when it is read."""

import importlib.util
import json
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
import yaml

import fsla
from fsla import cli
from fsla.cli.options import EXIT_CODES
from launch import finish

ROOT = Path(__file__).parent.parent
LOADS = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src", "object": "data"}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None,
    reason="mkdocs and mkdocstrings are not installed; pip install -e '.[docs]' installs them",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = finish(*command, cwd=ROOT, env=os.environ | nowhere)
    assert done.returncode == 0, done.stderr
    return folder


class Loaded(HTMLParser):
    """What a browser loads with a page, without a click, and the page's classes."""

    def __init__(self, page):
        super().__init__()
        self.urls = []
        self.classes = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.classes.update((attributes.get("class") or "").split())
        url = attributes.get(LOADS.get(tag, ""))
        if url and not (tag == "link" and attributes.get("rel") in ("canonical", "next", "prev")):
            self.urls.append(url)


def external(urls):
    return [url for url in urls if re.match(r"\s*(https?:)?//", url)]


def test_external_keeps_remote_urls_only():
    assert external(["https://a.b/c.js", "//a.b/c.js", "assets/c.js", "../c.css"]) == ["https://a.b/c.js", "//a.b/c.js"]


def test_site_loads_local_files_only(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) >= 60
    for page in pages:
        loaded = Loaded(page)
        assert loaded.urls, page  # the theme's own files, at least
        assert external(loaded.urls) == [], page
        assert "mermaid" not in loaded.classes, page  # the theme would fetch a script for it
    for sheet in site.rglob("*.css"):
        urls = re.findall(r"""(?:url\(|@import\s)\s*["']?([^"')]+)""", sheet.read_text(encoding="utf-8"))
        assert external(urls) == [], sheet


def reference_names(site):
    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").rglob("*.html"))
    return set(re.findall(r'id="([\w.]+)"', pages))


def test_reference_lists_every_public_name(site):
    names = reference_names(site)
    assert [name for name in fsla.__all__ if f"fsla.{name}" not in names] == []


@pytest.mark.parametrize(
    "room", ["algorithms", "contrib", "data", "distributed", "hypergradients", "problems", "steps", "train"]
)
def test_reference_lists_every_name_of_room(site, room):
    """A name that a room exports is looked up by the room, or by the package where that exports it too."""
    names = reference_names(site)
    exported = getattr(fsla, room).__all__
    assert [name for name in exported if not names & {f"fsla.{name}", f"fsla.{room}.{name}"}] == []


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_formula_becomes_mathml(hooks):
    """A formula that a script must draw is text for readers who load none."""
    inline = hooks.on_page_content(r'<p><span class="arithmatex">\(\lambda &lt; 1\)</span></p>')
    assert '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline">' in inline
    assert "&#x003BB;" in inline
    assert "&#x0003C;" in inline
    block = hooks.on_page_content('<div class="arithmatex">\\[\nv = 1\n\\]</div>')
    assert 'display="block"' in block
    assert "arithmatex" not in inline + block


@pytest.mark.parametrize("latex", [r"\nosuch x", r"\begin{aligned} a &= b \end{aligned}"])
def test_unknown_latex_fails_the_build(hooks, latex):
    """latex2mathml copies what it does not know, which readers would see."""
    with pytest.raises(ValueError, match="cannot convert"):
        hooks.on_page_content(rf'<span class="arithmatex">\({latex.replace("&", "&amp;")}\)</span>')


def test_formulas_of_site_are_mathml(site):
    pages = [page.read_text(encoding="utf-8") for page in site.rglob("*.html")]
    assert sum("<math " in page for page in pages) >= 10
    assert not any("arithmatex" in page for page in pages)


def test_command_reference_lists_every_option(site):
    """It is made from the program, so that a new option cannot be forgotten."""
    page = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    cli.add_commands()
    commands = typer.main.get_command(cli.app).commands
    options = {option for name in ("clean", "weigh") for p in commands[name].params for option in p.opts}
    assert {"--label-column", "--quiet"} <= options
    assert [option for option in options if option.startswith("--") and option not in page] == []
    codes = re.findall(r"\d+", EXIT_CODES)
    assert "2" in codes
    assert [code for code in codes if f"<td>{code}</td>" not in page] == []
    for name in ("fsla clean", "fsla weigh", "fsla compare", "fsla bench steps", "fsla reproduce all"):
        assert f">{name}<" in page


def test_tutorials_are_notebooks_with_outputs(site, hooks):
    """A reader opens them in Jupyter; the outputs are those of the page."""
    for page in (ROOT / "docs" / "tutorials").glob("*.md"):
        notebook = json.loads((site / "tutorials" / f"{page.stem}.ipynb").read_text(encoding="utf-8"))
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        assert [cell["source"] for cell in code] == [block.strip() for block in blocks]
        assert any(cell["outputs"] for cell in code)
        assert f'href="{page.stem}.ipynb"' in (site / "tutorials" / f"{page.stem}.html").read_text(encoding="utf-8")


def menu_sizes(nav):
    """Yield how many entries the left menu of each tab has. One group is open; its untitled page is its heading."""
    for tab in nav:
        ((_, entries),) = tab.items()
        groups = [group for entry in entries if isinstance(entry, dict) for group in entry.values()]
        titled = [[page for page in group if isinstance(page, dict)] for group in groups if isinstance(group, list)]
        yield len(entries) + max(map(len, titled), default=0)


def test_menus_are_short():
    """A reader cannot choose among forty entries."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    sizes = list(menu_sizes(nav))
    assert len(sizes) <= 8
    assert max(sizes) <= 14


def test_menu_sizes_count_the_open_group():
    assert list(menu_sizes([{"Tab": ["a.md", {"Group": ["b.md", {"C": "c.md"}]}, {"D": "d.md"}]}])) == [4]


def test_docs_build_with_broken_link_fails(tmp_path):
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    strict = settings[settings.index("validation:") : settings.index("markdown_extensions:")]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Here\n\n[there](#nowhere)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\n" + strict)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = finish(*command, cwd=tmp_path)
    assert done.returncode != 0
    assert "nowhere" in done.stderr
