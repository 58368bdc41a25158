"""The report in a browser: what it says, a round of review, and that nothing in it acts or leaves."""

import csv
import io
import re

import numpy as np
import pytest

from browser import CHROMIUM, chromium
from fabricated import fabricate, fabricated_result
from fsla.data import _report as report
from fsla.data._clean import build_result
from fsla.data._report import render, visible
from launch import wait_until

EVIL = "<script>alert(1)</script>"
HOSTILE = [
    EVIL, '"><img src=x onerror=alert(2)>', "{{ 7 * 7 }}", "</article></main></html>", "\x1b[31mred", "a\u202eb\u2066c",
    "'+alert(3)+'", "javascript:alert(4)", "x" * 50_000, "&amp;&#60;b&#62;", "=cmd|' /C calc'!A0", "line\r\nbreak",
]  # fmt: skip
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed; apt-get install chromium installs it"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


def written(folder, result):
    path = folder / "report.html"
    path.write_text(render(result), encoding="utf-8")
    return path


def hostile_result():
    """Return a result of which every string is an attack."""
    loaded, fit = fabricate("better", texts=[HOSTILE[i % len(HOSTILE)] for i in range(120)], ids=HOSTILE * 10)
    names = np.array([EVIL, HOSTILE[1], HOSTILE[5]], dtype=object)
    object.__setattr__(fit.data, "classes", names)
    object.__setattr__(fit.data, "group_names", np.array([*HOSTILE[:2], HOSTILE[4]], dtype=object))
    loaded.notes = tuple(HOSTILE)
    loaded.columns["note"] = HOSTILE[:5]
    loaded.duplicates["why"] = EVIL
    inputs = {"data": f"/tmp/{EVIL}.csv", "group": EVIL}
    return build_result(loaded, fit, relabel="sure", review=30, seed=0, inputs=inputs)


def test_every_string_of_the_data_is_escaped():
    """The one script of the page is ours, and its policy allows no other."""
    text = render(hostile_result())
    assert text.count("<script") == 1
    assert "<img src=x" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "49" not in re.findall(r"<dd>([^<]*)</dd>", text)
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", text)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'")


def test_long_cells_are_cut_in_the_page():
    """Fifty texts of a book each would make a page that no browser opens."""
    assert len(render(hostile_result())) < 800_000


@pytest.mark.parametrize(
    ("text", "shown"),
    [("ünï 漢字 🎉", "ünï 漢字 🎉"), ("a\x00\x1b\u202eb", "a\\x00\\x1b\\u202eb"), ("a\u200db\nc", "a\u200db\nc")],
)
def test_visible_escapes_what_acts_and_keeps_what_is_read(text, shown):
    """A change of direction could show a label as another one."""
    assert visible(text) == shown


@pytest.mark.parametrize("effect", ["better", "same", "worse", "unknown"])
def test_page_and_terminal_have_the_same_lines(effect):
    """Two texts would contradict each other some day."""
    result = fabricated_result(effect, checked=0 if effect == "unknown" else 40)
    text = render(result).replace("\u00a0", " ")
    assert f'<h1 id="decision">{result.decision}</h1>' in text
    assert all(f"<li>{line}</li>" in text for line in result.facts)


@pytest.mark.parametrize(
    ("effect", "best"), [("better", "This model"), ("same", None), ("worse", "Everything as it is")]
)
def test_picture_marks_what_the_decision_recommends(effect, best):
    """The eye goes to the bold line first."""
    marked = re.findall(r'<dt class="best">([^<]*)</dt>', render(fabricated_result(effect)))
    assert marked == ([] if best is None else [best])


def test_intervals_are_drawn_where_the_figures_are():
    """A picture that lies is worse than none."""
    svg = report._interval(report.Estimate(0.75, 0.5, 1.0), 0.5, 1.0)
    assert 'd="M0.00 5H100.00"' in svg
    assert 'd="M50.00 5h0"' in svg


def test_many_classes_have_a_list_and_no_heat_map():
    """Thirty columns of numbers are no picture."""
    loaded, fit = fabricate("better")
    classes = np.array([f"c{i:02d}" for i in range(30)], dtype=object)
    posterior = np.c_[fit.posterior, np.zeros((120, 27))]
    for name, value in (("posterior", posterior), ("confusion", np.full((30, 30), 0.02) + 0.4 * np.eye(30, k=1))):
        object.__setattr__(fit, name, value)
    object.__setattr__(fit.data, "classes", classes)
    text = render(build_result(loaded, fit, relabel="sure", review=4, seed=0, inputs={}))
    assert "true \\ given" not in text
    assert re.search(r"42\u00a0% of <strong>c00</strong> is labelled <strong>c01</strong>", text)
    assert text.count("<select") == 4
    assert text.count('<option value="c17">') == 4


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_hostile_page_is_inert_and_asks_for_nothing(page, tmp_path, width):
    """No cell acts, no request leaves, and the policy lets the page's own style and script run."""
    path = written(tmp_path, hostile_result())
    page.requests.clear()
    page.open(path, width)
    assert page.requests == [path.as_uri()]
    assert page.complaints == []
    assert page.evaluate("document.scripts.length") == 1
    assert page.evaluate("document.images.length") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.getElementById('progress').textContent") == "0 of 30 decided"
    assert page.evaluate("getComputedStyle(document.querySelector('article')).borderLeftWidth") != "0px"


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_review_by_keys_saves_a_file_with_what_was_chosen(page, tmp_path, width):
    """A person decides, stops, comes back, and takes the file to the next run."""
    result = fabricated_result("better", label=f"label {width}")
    path = written(tmp_path, result)
    page.open(path, width)
    assert page.evaluate("document.getElementById('save').disabled")
    page.evaluate("document.querySelector('article').focus()")
    page.press("2")  # the focus moves on
    page.press("3")
    page.press("0")
    page.press("ArrowUp")
    page.press("ArrowUp")
    page.press("1")  # the second row again
    page.press("9")  # no such class
    assert page.evaluate("document.getElementById('progress').textContent") == "3 of 20 decided"

    def is_restored():  # Chromium hands storage from one process to the next when it finds the time
        page.open(path, width)
        return page.evaluate("document.getElementById('progress').textContent") == "3 of 20 decided"

    wait_until(is_restored)
    folder = tmp_path / "downloads"
    folder.mkdir()
    saved = page.download("document.getElementById('save').click()", folder).decode()
    rows = list(csv.DictReader(io.StringIO(saved)))
    review = result.review
    assert [row["checked_label"] for row in rows] == ["bee", "ant"]
    for row, expected in zip(rows, review.head(2).to_dict("records"), strict=True):
        assert row["row"] == str(expected["row"])
        assert row["id"] == expected["id"]
        assert row["given_label"] == expected["given_label"]
        assert row["is_random"] == str(expected["is_random"]).lower()
    page.evaluate("document.getElementById('clear').click()")
    assert page.evaluate("document.getElementById('save').disabled")


@needs_chromium
def test_review_by_clicks_can_be_taken_back(page, tmp_path):
    """The mouse does what the keys do, and a second click undoes the first."""
    page.open(written(tmp_path, fabricated_result("same")), 1280)
    click = "document.querySelectorAll('article')[4].querySelectorAll('button')[1].click()"
    pressed = "document.querySelectorAll('article')[4].querySelectorAll('[aria-pressed=true]').length"
    page.evaluate(click)
    assert page.evaluate(pressed) == 1
    page.evaluate(click)
    assert page.evaluate(pressed) == 0
    assert page.evaluate("document.getElementById('progress').textContent") == "0 of 20 decided"


@needs_chromium
def test_saved_file_quotes_what_a_csv_must(page, tmp_path):
    """Ids and labels may hold commas, quotes and line breaks."""
    result = hostile_result()
    page.open(written(tmp_path, result), 1280)
    page.evaluate("[...document.querySelectorAll('article')].forEach(a => a.querySelector('button').click())")
    folder = tmp_path / "downloads"
    folder.mkdir()
    saved = page.download("document.getElementById('save').click()", folder).decode()
    rows = list(csv.DictReader(io.StringIO(saved, newline="")))
    assert [row["id"] for row in rows] == result.review["id"].tolist()
    assert {row["checked_label"] for row in rows} == {EVIL}
    page.evaluate("document.getElementById('clear').click()")


@needs_chromium
def test_phone_shows_group_and_decision_without_scrolling(page, tmp_path):
    """The decision is what a reader came for."""
    page.open(written(tmp_path, fabricated_result("better")), 390)
    boxes = page.evaluate("""[...document.querySelectorAll(".badge")].map(badge => {
      const box = badge.getBoundingClientRect();
      return [box.left, box.right];
    })""")
    assert len(boxes) == 3
    assert all(0 <= left < right <= 390 for left, right in boxes)
    assert page.evaluate("document.documentElement.scrollWidth") == 390


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_contrasts_with_its_ground(page, tmp_path, scheme):
    """WCAG asks for 4.5 to 1."""
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.open(written(tmp_path, fabricated_result("better")), 1280)
    ratios = page.evaluate("""(() => {
      const parse = text => text.match(/[\\d.]+/g).map(Number);
      const light = rgb => rgb.slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
      const ground = element => {
        for (let e = element; e; e = e.parentElement) {
          const color = parse(getComputedStyle(e).backgroundColor);
          if (color[3] === undefined || color[3] === 1) return color;
        }
      };
      const chosen = document.querySelectorAll("h1, li, .badge, .soft, .what, button:not(:disabled), a, dd.value");
      return [...chosen].map(e => {
        const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
        return [(a + 0.05) / (b + 0.05), e.className || e.tagName];
      });
    })()""")
    page.call("Emulation.setEmulatedMedia", features=[])
    assert len(ratios) > 30
    assert min(ratios)[0] >= 4.5, min(ratios)


@needs_chromium
def test_page_prints_without_controls(page, tmp_path):
    """On paper nothing can be clicked."""
    page.open(written(tmp_path, fabricated_result("better")), 1280)
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.evaluate("getComputedStyle(document.querySelector('.tools')).display") == "none"
    assert page.call("Page.printToPDF")["data"].startswith("JVBERi0")  # %PDF-
    page.call("Emulation.setEmulatedMedia", media="")


@needs_chromium
def test_review_of_many_classes_takes_any_label(page, tmp_path):
    """Beyond twelve classes a list has all of them."""
    loaded, fit = fabricate("better")
    object.__setattr__(fit, "posterior", np.c_[fit.posterior, np.zeros((120, 12))])
    object.__setattr__(fit, "confusion", None)
    names = np.array([*fit.data.classes, *(f"rare {i}" for i in range(12))], dtype=object)
    object.__setattr__(fit.data, "classes", names)
    page.open(written(tmp_path, build_result(loaded, fit, relabel="sure", review=6, seed=0, inputs={})), 1280)
    page.evaluate("""(() => {
      const list = document.querySelector("article select");
      list.value = "rare 7";
      list.dispatchEvent(new Event("change", {bubbles: true}));
    })()""")
    folder = tmp_path / "downloads"
    folder.mkdir()
    saved = page.download("document.getElementById('save').click()", folder).decode()
    assert next(csv.DictReader(io.StringIO(saved)))["checked_label"] == "rare 7"
    page.evaluate("document.getElementById('clear').click()")


def test_page_has_the_confusions_of_each_group():
    """Whoever mixes up two classes is told which."""
    _, fit = fabricate("better")
    confusion = np.stack([np.eye(3), np.eye(3), np.roll(np.eye(3), 1, axis=1)])
    loaded, _ = fabricate("better")
    object.__setattr__(fit, "group_confusion", confusion)
    result = build_result(loaded, fit, relabel="sure", review=0, seed=0, inputs={})
    assert result.group_confusions["forum"].loc["ant", "bee"] == 1
    page = render(result)
    section = page[page.index("<h3>forum</h3>") :]
    assert re.search(r'<th scope="row">ant</th><td class="h0">0</td><td class="h9">100</td>', section)
