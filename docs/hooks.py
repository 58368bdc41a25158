"""Writes the page of examples from the files that are there, so that it cannot name one that is not."""

import ast
from pathlib import Path
from typing import Any

MARKER = "<!-- examples -->"
NONE = "This copy of the repository has no examples."


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Returns a page's text, on the page of examples with each file's own words and source."""
    if page.file.src_uri != "examples.md":
        return markdown
    folder = Path(config.config_file_path).parent / "examples"
    sections = [_section(path) for path in sorted(folder.glob("[!_]*.py"))]
    if MARKER not in markdown:
        raise ValueError(f"docs/examples.md must hold {MARKER}, where the examples go. It does not.")
    return markdown.replace(MARKER, "\n\n".join(sections) or NONE)


def _section(path: Path) -> str:
    source = path.read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(source)) or ""
    title = path.stem.replace("_", " ").capitalize()
    code = "\n".join("    " + line if line else "" for line in ["```python", *source.splitlines(), "```"])
    return f'## {title}\n\n{said}\n\n```sh\npython examples/{path.name}\n```\n\n??? example "{path.name}"\n\n{code}'
