"""Hooks of the documentation's build: MathML of formulas, a reference of the commands, tutorials as notebooks."""

import html
import json
import re
from collections.abc import Iterator
from typing import Any

import typer
from latex2mathml.converter import convert
from mkdocs.structure.files import File

from fsla import cli

COMMANDS = "<!-- commands -->"
"""What a page holds in the place of the reference of the commands."""
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_UNKNOWN = re.compile(r"<m\w+>\s*(\\\w+|&(?![#\w]+;))")
"""What latex2mathml leaves where it does not know a command."""
_FENCE = re.compile(r"```(python|text)\n(.*?)```\n", re.DOTALL)
"""A block of code, or what the block before it prints."""


def on_files(files: Any, *, config: Any) -> None:
    """Add each tutorial as a notebook."""
    for page in list(files.documentation_pages()):
        if page.src_uri.startswith("tutorials/"):
            notebook = json.dumps(to_notebook(page.content_string), indent=1)
            files.append(File.generated(config, _notebook_of(page.src_uri), content=notebook))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page's text with the reference of all commands in the place of its marker, or a link to its notebook."""
    if page.file.src_uri.startswith("tutorials/"):
        return f"{markdown}\n\n[This page as a notebook]({_notebook_of(page.file.name + '.md')})\n"
    if COMMANDS not in markdown:
        return markdown
    cli.add_commands()
    return markdown.replace(COMMANDS, "\n".join(_describe(typer.main.get_command(cli.app), "fsla")))


def on_page_content(content: str, **_: Any) -> str:
    """Return a page's HTML with MathML, which browsers draw without a script, in the place of LaTeX."""
    return _FORMULA.sub(_to_mathml, content)


def to_notebook(markdown: str) -> dict[str, Any]:
    """Return a page as a Jupyter notebook: its Python blocks as cells, with the outputs that the page shows."""
    cells: list[dict[str, Any]] = []
    kinds = _FENCE.split(markdown)
    for text, kind, block in zip(kinds[::3], [*kinds[1::3], None], [*kinds[2::3], ""], strict=True):
        if text.strip():
            cells.append({"cell_type": "markdown", "metadata": {}, "source": text.strip()})
        if kind == "python":
            cell = {
                "cell_type": "code",
                "execution_count": None,
                "metadata": {},
                "outputs": [],
                "source": block.strip(),
            }
            cells.append(cell)
        elif kind == "text" and cells[-1]["cell_type"] == "code":
            cells[-1]["outputs"] = [{"name": "stdout", "output_type": "stream", "text": block}]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}


def _notebook_of(page: str) -> str:
    return page.removesuffix(".md") + ".ipynb"


def _to_mathml(match: re.Match[str]) -> str:
    tag, bracket, latex = match.groups()
    latex = html.unescape(latex).strip()
    formula = convert(latex, display="block" if bracket == "[" else "inline")
    if unknown := _UNKNOWN.search(formula):
        raise ValueError(f"latex2mathml cannot convert {unknown[1]!r} in the formula {latex!r}.")
    return f'<{tag} class="formula">{formula}</{tag}>'


def _describe(command: Any, name: str) -> Iterator[str]:
    """Yield the lines on a command and on the commands below it."""
    below = getattr(command, "commands", {})
    if name != "fsla":
        yield f"## fsla {name}\n"
        yield f"{command.help}\n"
    if not below:
        yield from _describe_options(command)
    for word, child in below.items():
        yield from _describe(child, word if name == "fsla" else f"{name} {word}")


def _describe_options(command: Any) -> Iterator[str]:
    context = typer.Context(command)
    yield "| option | meaning |"
    yield "| --- | --- |"
    for parameter in command.params:
        record = parameter.get_help_record(context) or (parameter.name.upper(), parameter.help)
        yield "| {} | {} |".format(*(_cell(text) for text in (f"`{record[0]}`", record[1])))
    yield ""


def _cell(text: str | None) -> str:
    return re.sub(r"\s+", " ", (text or "")).replace("|", "\\|")
