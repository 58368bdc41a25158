"""Print the size of the library and what its names and texts lack: `make stats`."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import tokenize
from collections import Counter
from pathlib import Path
from types import ModuleType

from test_names import banned_names

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fsla"
ROOMS = ("distributed", "problems", "steps", "hypergradients", "algorithms", "train", "contrib", "data")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
PRIVATE_WORDS = re.compile(
    r"\b(gone|stands?|standing|told|tells?|said|says|heard|found|kept|made|given|settle[sd]?|look(s|ed)? at|let go|"
    r"get on|of its own|as it stands|take[ns]? up|ways?|mended|material|lessons)\b"
)
LONGEST_SENTENCE = 25


def count_code_lines(text: str) -> int:
    """Count the lines with code: no blanks, comments or docstrings."""
    strings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - strings)


def count_private_words(text: str) -> int:
    """Count the words in docstrings that only their author understands."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, nodes)]
    return sum(len(PRIVATE_WORDS.findall(text)) for text in texts)


def count_long_sentences(text: str) -> int:
    """Count the sentences of a page with more than 25 words; code, tables and headings are left out."""
    text = re.sub(r"(?s)```.*?```|<!--.*?-->|\$\$.*?\$\$", " ", text)
    text = re.sub(r"(?m)^[ \t]*[|#>!-].*$", " ", text)
    return sum(len(s.split()) > LONGEST_SENTENCE for s in re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", text)))


def exported() -> dict[str, object]:
    """Return the classes and functions that the rooms export, once each."""
    objects: dict[int, tuple[str, object]] = {}
    for name in ("fsla", *(f"fsla.{room}" for room in ROOMS)):
        module: ModuleType = importlib.import_module(name)
        for public in module.__all__:
            value = getattr(module, public)
            if inspect.isclass(value) or inspect.isfunction(value):
                objects.setdefault(id(value), (f"{name}.{public}", value))
    return dict(objects.values())


def takes_arguments(value: object) -> bool:
    """Return whether a user types arguments for it: not for errors, warnings and protocols."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return False
    try:
        return bool(inspect.signature(value).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def own_docstring(value: object) -> str:
    """Return the docstring that a name has itself; dataclasses and subclasses get one for free."""
    text = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    automatic = inspect.isclass(value) and text and text.startswith(f"{value.__name__}(")
    return "" if automatic or not text else text


def lacking() -> dict[str, list[str]]:
    """Return the exported names that lack a docstring, a description of their arguments, or an example."""
    names: dict[str, list[str]] = {"docstring": [], "Args": [], "doctest": []}
    for name, value in exported().items():
        text = own_docstring(value)
        if not text:
            names["docstring"].append(name)
        if takes_arguments(value) and not re.search(r"^\s*(Args|Attributes):", text, re.MULTILINE):
            names["Args"].append(name)
        if ">>>" not in text:
            names["doctest"].append(name)
    return names


def main() -> None:
    files = {path: path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    code: Counter[str] = Counter()
    for path, text in files.items():
        parts = path.relative_to(SOURCE).parts
        code[parts[0] if len(parts) > 1 else "(root)"] += count_code_lines(text)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = lacking()
    rows = [("installed code lines", sum(code.values()))]
    rows += [(f"  {room}", lines) for room, lines in code.most_common()]
    rows.append(("Python files at the root of src/fsla", sum(path.parent == SOURCE for path in files)))
    rows.append(("exported classes and functions", len(exported())))
    rows += [(f"  without {what}", len(lacks)) for what, lacks in names.items()]
    rows.append(("private words in docstrings", sum(map(count_private_words, files.values()))))
    rows.append(("banned names in src/fsla", sum(len(banned_names(text)) for text in files.values())))
    long = sum(count_long_sentences(page.read_text(encoding="utf-8")) for page in pages)
    rows.append((f"sentences over {LONGEST_SENTENCE} words in README and docs", long))
    for what, number in rows:
        print(f"{what:46} {number:6}")
    for what, lacks in names.items():
        if lacks:
            print(f"\nwithout {what}: {', '.join(lacks)}")


if __name__ == "__main__":
    main()
