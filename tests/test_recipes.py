"""The recipes run as they are shown, and are as short as the page claims."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "how-to" / "sample-class-penalty-weights.md").read_text(
    encoding="utf-8"
)
SETUP, LOOP, *RECIPES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
ROWS = re.findall(r"^\| \[(.*?)\]\(#.*?\) \| (\d+) \| (\.\d+) \|$", PAGE, flags=re.MULTILINE)
PLAIN = re.search(r"^\| the plain loop \| +\| (\.\d+) \|$", PAGE, flags=re.MULTILINE)


def lines(code):
    return [line for line in code.splitlines() if line.strip() and not line.startswith("print")]


def outcome(code):
    space = {}
    exec(SETUP + code, space)
    return space["test_accuracy"]()


def test_recipes_page_states_added_lines():
    assert len(RECIPES) == len(ROWS) == 3
    for recipe, (name, count, _) in zip(RECIPES, ROWS, strict=True):
        added = [line for line in lines(recipe) if line not in lines(SETUP + LOOP)]
        assert len(added) == int(count) <= 15, (name, added)


@pytest.mark.filterwarnings("ignore::fsla.OverfittingWarning")  # the page says that it comes
@pytest.mark.parametrize("recipe", RECIPES, ids=[name for name, _, _ in ROWS])
def test_recipe_runs(recipe):
    short = recipe.replace("max_steps=1300", "max_steps=4, progress_bar=False")
    assert short != recipe
    assert outcome(short) > 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fsla.OverfittingWarning")
@pytest.mark.parametrize("number", range(3))
def test_recipe_beats_plain_loop(number):
    assert outcome(LOOP) == pytest.approx(float(PLAIN[1]), abs=0.05)
    assert outcome(RECIPES[number]) == pytest.approx(float(ROWS[number][2]), abs=0.05)
