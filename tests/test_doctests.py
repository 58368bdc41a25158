"""The examples in docstrings: every name that a room exports has one, and each runs and prints what it shows.

An example goes on from the one in the docstring of its room, which makes a small problem or model.
"""

import doctest
import importlib
import inspect
from functools import cache
from types import GenericAlias

import pytest
import torch

from fsla.algorithms import _registry

ROOMS = [
    "fsla",
    "fsla.algorithms",
    "fsla.contrib",
    "fsla.data",
    "fsla.distributed",
    "fsla.hypergradients",
    "fsla.integrations",
    "fsla.problems",
    "fsla.steps",
    "fsla.train",
]
IN_PLACE = ("fsla.contrib", "fsla.train")
"""Rooms whose examples move what the room's example has made."""
OTHERS = ("fsla.cli",)
"""Rooms whose names have tests of their own."""


def exported_names():
    """Return each name once, in the room where it is at home."""
    for room in ROOMS:
        for name in importlib.import_module(room).__all__:
            thing = getattr(importlib.import_module(room), name)
            if isinstance(thing, GenericAlias):  # such as `fsla.train.Record`: it has the docstring of dict
                continue
            home = thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", room)
            if not home.startswith(OTHERS) and (room == "fsla") == (home == "fsla"):
                yield room, name


def run_example(text, names, label):
    """Run the examples of a text on some names; return how many there are, and the names that they leave."""
    test = doctest.DocTestParser().get_doctest(inspect.cleandoc(text), names, label, None, 0)
    out = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    runner.run(test, out=out.append, clear_globs=False)
    assert not runner.failures, "".join(out)
    return len(test.examples), test.globs


@pytest.fixture(autouse=True)
def clean_surroundings(tmp_path, monkeypatch):
    """Examples draw from a fixed seed, write into an empty folder, and register no algorithm for other tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_registry, "_FACTORIES", dict(_registry._FACTORIES))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def names_of_room(room):
    """Return what the example of a room leaves."""
    return run_example(importlib.import_module(room).__doc__, {}, room)[1]


shared_names_of_room = cache(names_of_room)


@pytest.mark.parametrize("room", ROOMS)
def test_room_example_runs(room):
    """The first thing that a reader of a room types."""
    count, _ = run_example(importlib.import_module(room).__doc__, {}, room)
    assert count, f"{room} has no example"


@pytest.mark.parametrize(("room", "name"), list(exported_names()), ids=str)
def test_exported_name_example_runs(room, name):
    """A public name without an example, or with one that prints something else, is not documented."""
    text = getattr(importlib.import_module(room), name).__doc__
    assert text, f"{room}.{name} has no docstring"
    count, _ = run_example(text, names_of_room(room) if room in IN_PLACE else shared_names_of_room(room), name)
    assert count, f"{room}.{name} has no example"
