"""Names say what they hold: words that only their author understands are not names."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "reproduction", "benchmarks", "tests", "examples")
BANNED = {
    "afresh", "alone", "answers", "apart", "aside", "asked", "bare", "begun", "believed", "caution", "chances",
    "coded", "complain", "crew", "cross", "evident", "exchanged", "filled", "finding", "forwarded", "found", "front",
    "gate", "given", "go", "gone", "hear", "heard", "held", "here", "kept", "learnt", "lessons", "look", "looks",
    "lying", "made", "maker", "makers", "material", "mend", "mended", "mine", "numbered", "ours", "own", "passing",
    "quietly", "ranks", "reached", "rescue", "rescues", "said", "say", "seeded", "settle", "speaks", "stand_in",
    "stand_ins", "standing", "stands", "stated", "surroundings", "take_apart", "take_up", "taken_up", "tell", "tells",
    "theirs", "together", "told", "trusting", "truths", "unread", "usual", "verdict", "verdicts", "wanted", "way",
    "ways", "weighed", "xi",
}  # fmt: skip
"""Participles, verbs without an object and private words."""


def defined_names(source: str) -> list[tuple[int, str]]:
    """Return line and name of everything that a text defines, assigns or takes as an argument."""
    names = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.append((node.lineno, name))
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.append((node.lineno, name))
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                names.append((node.lineno, name))
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                names.append((node.lineno, name))
    return names


def banned_names(source: str) -> list[tuple[int, str]]:
    """Return line and name of what is banned, whatever its case and its underscores at either end."""
    return [(line, name) for line, name in defined_names(source) if name.strip("_").lower() in BANNED]


@pytest.mark.parametrize("folder", FOLDERS)
def test_identifiers_are_not_banned_words(folder):
    """A reader who meets a banned name must read the code to learn what it holds; modules have names as well."""
    hits = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        names = banned_names(path.read_text(encoding="utf-8"))
        names += [(1, path.stem)] if path.stem.strip("_").lower() in BANNED else []
        hits += [f"{place}:{line}: {name}" for line, name in names]
    assert not hits, "\n".join(["Rename, for what it holds or does:", *hits])


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "for found in (): pass",
        "a, *found = b",
        "def found(): pass",
        "async def _found(): pass",
        "class Found: pass",
        "def f(found): pass",
        "lambda *, found: 1",
        "self.found = 1",
        "import a as found",
        "with a as found: pass",
        "try: pass\nexcept A as found: pass",
        "[1 for found in a]",
        "(found := 1)",
        "match a:\n case {'b': found}: pass",
        "FOUND_ = found__ = 1",
    ],
)
def test_banned_names_sees_every_form_of_definition(source):
    assert banned_names(source)


def test_banned_names_ignores_uses_and_longer_words():
    """Other libraries name their arguments as they like."""
    assert banned_names("f(found=1).found; not_found = x.told; 'own'") == []
