"""The files around the code agree with the code."""

import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

import fsla
import stats

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def load_yaml(name):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; pip install -e '.[docs]' installs it")
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_version_is_written_in_one_place():
    """Two places disagree after the next release."""
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    files = [*ROOT.glob("*.toml"), *ROOT.glob("*/pyproject.toml"), *ROOT.glob("*.cff"), *ROOT.glob("src/**/*.py")]
    version = re.compile(rf"""version\S*\s*[=:]\s*["']?{re.escape(fsla.__version__)}\b""")
    places = [path.relative_to(ROOT).as_posix() for path in files if version.search(path.read_text(encoding="utf-8"))]
    assert places == ["src/fsla/_version.py"]


def test_build_backend_is_pinned():
    """A build runs the backend's code: which one must not depend on the day."""
    for path in [ROOT / "pyproject.toml", *ROOT.glob("*/pyproject.toml")]:
        (backend,) = tomllib.loads(path.read_text(encoding="utf-8"))["build-system"]["requires"]
        assert re.fullmatch(r"setuptools==\d+(\.\d+)+", backend)


def test_workflow_tests_the_oldest_promised_python():
    (job,) = load_yaml(".github/workflows/tests.yml")["jobs"].values()
    (python,) = (step["with"]["python-version"] for step in job["steps"] if "with" in step)
    assert PROJECT["requires-python"] == f">={python}"
    assert "bash .ci/run" in [step.get("run") for step in job["steps"]]


def test_promised_torch_is_no_newer_than_the_tested_one():
    """The tests run with the version in constraints.txt; older ones are promised down to the bound."""
    (bound,) = (name.removeprefix("torch>=") for name in PROJECT["dependencies"] if name.startswith("torch"))
    tested = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert bound == "2.11"
    assert [int(part) for part in bound.split(".")] <= [int(part) for part in tested.split(".")]


def test_pre_commit_runs_what_make_lint_runs():
    hooks = {
        hook["entry"] for repository in load_yaml(".pre-commit-config.yaml")["repos"] for hook in repository["hooks"]
    }
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1]
    commands = {re.sub(r"\t\$\(BIN\)/| --check| \.$", "", line) for line in lint.splitlines()}
    assert {entry.removesuffix(" --fix") for entry in hooks} == commands


def test_changelog_has_the_form_of_keep_a_changelog():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version) for version in versions[1:])
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_citation_names_software_and_paper():
    citation = load_yaml("CITATION.cff")
    assert (citation["type"], citation["license"]) == ("software", PROJECT["license"])
    assert citation["preferred-citation"]["doi"] == "10.1609/aaai.v36i7.20706"


def test_logo_is_one_line_that_reads_nothing():
    """Two nested loops as one line; a page that shows it must fetch nothing."""
    text = (ROOT / "docs" / "assets" / "logo.svg").read_text(encoding="utf-8")
    (path,) = ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}path")
    assert path.get("d").count("M") == 1
    assert not re.findall(r"href|url\(|@import", text)


def test_stats_counts_code_words_and_sentences():
    text = '"""Told and kept.\n\nOnce.\n"""\n# told\nx = (\n    1,\n)\n\n\ndef f():\n    """Keep what was given."""\n'
    assert stats.count_code_lines(text) == 4
    assert stats.count_private_words(text) == 2
    assert (
        stats.count_long_sentences("One two three. " + "word " * 26 + "end. | a |\n```\n" + "word " * 40 + "\n```") == 1
    )


def test_stats_finds_names_without_docstring_arguments_or_example():
    lacks = stats.lacking()
    assert set(lacks) == {"docstring", "Args", "doctest"}
    assert set().union(*lacks.values()) <= set(stats.exported())
    assert stats.takes_arguments(fsla.fit)
    assert not stats.takes_arguments(fsla.CheckpointError)
