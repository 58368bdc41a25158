"""The documentation builds strictly, offline, and fetches nothing when it is read."""

import importlib.util
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

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
    reference = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    names = set(re.findall(r'id="([\w.]+)"', reference))
    assert [name for name in fsla.__all__ if f"fsla.{name}" not in names] == []


def test_examples_page_shows_each_file(site):
    page = (site / "examples.html").read_text(encoding="utf-8")
    files = sorted((ROOT / "examples").glob("[!_]*.py"))
    for path in files:
        assert f"<summary>{path.name}</summary>" in page
    assert files or "no examples" in page


def test_examples_page_is_built_from_files(tmp_path):
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "few_shot.py").write_text('"""Learns a start."""\n\nprint(1)\n')
    (tmp_path / "examples" / "_shared.py").write_text("")
    config = SimpleNamespace(config_file_path=str(tmp_path / "mkdocs.yml"))

    def written(name, text):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name))
        return hooks.on_page_markdown(text, page=page, config=config, files=None)

    page = written("examples.md", f"# Examples\n\n{hooks.MARKER}\n")
    assert page.startswith("# Examples\n\n## Few shot\n\nLearns a start.\n\n```sh\npython examples/few_shot.py\n```")
    assert "    print(1)\n" in page
    assert "_shared" not in page
    assert written("other.md", hooks.MARKER) == hooks.MARKER
    with pytest.raises(ValueError, match="must hold"):
        written("examples.md", "# Examples")


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
