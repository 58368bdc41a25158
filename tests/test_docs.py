"""The documentation builds strictly, offline, and fetches nothing when it is read."""

import importlib.util
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import fsla
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
    assert len(pages) >= 15
    for page in pages:
        loaded = Loaded(page)
        assert loaded.urls, page  # the theme's own files, at least
        assert external(loaded.urls) == [], page
        assert "mermaid" not in loaded.classes, page  # the theme would fetch a script for it
    for sheet in site.rglob("*.css"):
        urls = re.findall(r"""(?:url\(|@import\s)\s*["']?([^"')]+)""", sheet.read_text(encoding="utf-8"))
        assert external(urls) == [], sheet


def test_reference_lists_every_public_name(site):
    reference = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").rglob("*.html"))
    names = set(re.findall(r'id="([\w.]+)"', reference))
    assert [name for name in fsla.__all__ if f"fsla.{name}" not in names] == []


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
    assert "&lt;" in inline or "&#x0003C;" in inline
    block = hooks.on_page_content('<div class="arithmatex">\\[\nv = 1\n\\]</div>')
    assert 'display="block"' in block
    assert "arithmatex" not in inline + block


def test_formulas_of_site_are_mathml(site):
    pages = [page.read_text(encoding="utf-8") for page in site.rglob("*.html")]
    assert any("<math " in page for page in pages)
    assert not any("arithmatex" in page for page in pages)


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
