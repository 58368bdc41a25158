"""Hooks of the documentation's build: formulas become MathML, which browsers draw without a script."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Return a page's HTML with MathML in the place of LaTeX."""
    return _FORMULA.sub(_to_mathml, content)


def _to_mathml(match: re.Match[str]) -> str:
    tag, bracket, latex = match.groups()
    latex = html.unescape(latex).strip()
    formula = convert(latex, display="block" if bracket == "[" else "inline")
    return f'<{tag} class="formula">{formula}</{tag}>'
