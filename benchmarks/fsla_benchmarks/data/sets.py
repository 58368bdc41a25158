"""The sets of the benchmark by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fsla._checks import pick
from fsla_benchmarks.data import mixed, real
from fsla_benchmarks.data.problem import Problem
from fsla_reproduction.folder import RunError

ALL_SIZES = (50, 100, 300)


class Line(NamedTuple):
    """A set, and how it is drawn from the number of checked rows and a seed."""

    sizes: tuple[int, ...]
    """Numbers of checked rows for which the set has rows enough."""
    origin: str
    """"file", "bundled" or "synthetic"."""
    about: str
    draw: Callable[[int, int, Path | None], Problem]


def _from_file(draw: Callable[[str, Path | None, int, int], Problem], name: str) -> Callable[..., Problem]:
    return lambda checked, seed, folder: draw(name, folder, checked, seed)


def _from_memory(draw: Callable[..., Problem], name: str) -> Callable[..., Problem]:
    return lambda checked, seed, folder: draw(name, checked, seed)


def _flipped(flip: mixed.Flip, *, long_tail: bool = False) -> Callable[..., Problem]:
    return partial(mixed.draw_flipped_digits, flip=flip, long_tail=long_tail)


_DRAWN: dict[str, tuple[tuple[int, ...], str, str, Callable[..., Problem]]] = {
    "youtube": (ALL_SIZES, "file", "comments, 10 labelling functions", real.draw_text),
    "trec": (ALL_SIZES, "file", "questions, 68 labelling functions", real.draw_text),
    "agnews": (ALL_SIZES, "file", "news, labelled by people", real.draw_text),
    "hausa": (ALL_SIZES, "file", "headlines, labelled by a lexicon", real.draw_text),
    "polite": (ALL_SIZES, "file", "requests, scores of about 200 annotators", real.draw_polite),
    "heart": ((50, 100), "file", "patients of three hospitals for a fourth", real.draw_heart),
    "diabetes": ((50, 100), "bundled", "table, 5 sources", mixed.draw_diabetes),
    "bc": ((50, 100), "bundled", "table, 6 sources", mixed.draw_breast_cancer),
    "wine": ((50,), "bundled", "table, 3 sources", mixed.draw_wine),
    "digsrc": (ALL_SIZES, "bundled", "digits, 10 sources", mixed.draw_digit_sources),
    "digann": (ALL_SIZES, "bundled", "digits, 8 annotators", mixed.draw_digit_annotators),
    "uniform": ((50, 100), "synthetic", "digits, 40 % of labels replaced", _flipped(mixed.flip_uniform)),
    "pairs": ((50, 100), "synthetic", "digits, 40 % of five classes confused", _flipped(mixed.flip_pairs)),
    "instance": ((50, 100), "synthetic", "digits, wrong where hard", _flipped(mixed.flip_by_row)),
    "tail": ((50, 100), "synthetic", "unequal digits, 40 % replaced", _flipped(mixed.flip_uniform, long_tail=True)),
    "friedman": ((50, 100), "synthetic", "smooth function, 10 sources", mixed.draw_friedman),
    "linear": ((50, 100), "synthetic", "linear function, 5 sources", mixed.draw_linear),
}  # fmt: skip
SETS = {
    name: Line(sizes, origin, about, (_from_file if origin == "file" else _from_memory)(draw, name))
    for name, (sizes, origin, about, draw) in _DRAWN.items()
}


def draw_problem(name: str, checked: int, seed: int, folder: Path | None = None) -> Problem:
    """Return a set with so many checked rows, as a seed draws it."""
    return pick(name, SETS, "set").draw(checked, seed, folder)


def available_sets(folder: Path | None) -> tuple[str, ...]:
    """Return the sets that need no file, and those whose file is in the folder."""
    return tuple(name for name, line in SETS.items() if line.origin != "file" or real.has_file(name, folder))


def parse_numbers(text: str) -> tuple[int, ...]:
    """Return the whole numbers of "3,5" or "3-7".

    Raises:
        RunError: The text is something else.
    """
    numbers: list[int] = []
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        try:
            numbers += range(int(low), int(high or low) + 1)
        except ValueError:
            raise RunError(f"{text!r} is no list of whole numbers. Write 3,5 or 3-7.") from None
    return tuple(numbers)
