"""States as data: what `flatten` takes apart, `unflatten` puts together; anything else is refused."""

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args, get_origin

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsla
from fsla import _state_tree as state_tree
from fsla._state_tree import describe, flatten, map_tensors, saved, tensors_of, unflatten
from fsla._tree import Tree
from fsla.steps import Variable
from support import ridge_logistic


@saved
@dataclass(frozen=True)
class Box3:
    """A type that the tests declare."""

    numbers: tuple[float, ...]
    trees: Tree
    inside: "Box3 | None" = None


@saved
class Pair7(NamedTuple):
    first: int
    second: object


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
names = st.text(max_size=4) | st.sampled_from(["", "/", "~", "a/b", "~1", "~0", "~2", "a~1b", "0"])
tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 100),
)
plain = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=3)
nests = st.recursive(
    plain | tensors,
    lambda inside: (
        st.dictionaries(names, inside, max_size=4)
        | st.lists(inside, max_size=3)
        | st.lists(inside, max_size=3).map(tuple)
        | st.builds(Pair7, st.integers(), inside)
        | st.builds(Box3, st.lists(st.floats(), max_size=2).map(tuple), st.dictionaries(names, tensors, max_size=2))
    ),
    max_leaves=12,
)


def same(a, b):
    """Whether two nests are equal, in types and bit by bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, Box3):
        return same(vars(a), vars(b))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(nests)
@settings(max_examples=300, deadline=None)
def test_unflatten_inverts_flatten_through_json(nest):
    """Whatever a state holds comes back, through JSON as a store writes it: names with "/", "~" or none, NaN and ∞."""
    tensors, shape = flatten(nest)
    text = json.dumps(shape, allow_nan=False)
    assert same(unflatten(tensors, json.loads(text)), nest)


@given(nests)
@settings(max_examples=100, deadline=None)
def test_flatten_gives_tensors_unique_paths(nest):
    """Two tensors under one path would be one tensor in the file."""
    tensors, _ = flatten(nest)
    assert len(tensors) == len({*map(id, tensors_of(nest))})
    assert all(isinstance(path, str) for path in tensors)


def test_flatten_names_tensors_by_position():
    """The paths are what a reader of the file sees."""
    t = torch.zeros(1)
    assert list(flatten({"omega": Variable({"0.weight": t})})[0]) == ["omega/value/0.weight"]
    assert list(flatten({"a/b": {"~": t}})[0]) == ["a~1b/~0"]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_flatten_writes_nonfinite_numbers_as_text(number):
    """JSON has no NaN and no infinity."""
    _, shape = flatten({"x": number})
    assert same(unflatten({}, json.loads(json.dumps(shape, allow_nan=False))), {"x": number})


class Undeclared(NamedTuple):
    x: int


@dataclass
class Unknown:
    x: int


def named_like_a_declared_type():
    @dataclass(frozen=True)
    class Box3:
        numbers: int

    return Box3(1)


@pytest.mark.parametrize(
    "value",
    [
        Undeclared(1),
        Unknown(1),
        named_like_a_declared_type(),
        {1.5: 2},
        {"a": {1, 2}},
        [b"bytes"],
        {"f": len},
        torch.zeros(1, device="meta"),
        torch.eye(2).to_sparse(),
        torch.zeros(1, dtype=torch.complex128),
    ],
    ids=lambda value: type(value).__name__,
)
def test_flatten_of_undeclared_type_raises(value):
    """A file is read without pickle: nothing may enter that only Python knows."""
    with pytest.raises(TypeError, match="A state holds"):
        flatten({"part": value})


def test_flatten_of_cyclic_tree_raises():
    """A nest that holds itself is refused in words, not by a full stack."""
    nest = []
    nest.append(nest)
    with pytest.raises(TypeError, match="at most 100 levels"):
        flatten(nest)


@pytest.mark.parametrize(
    "shape",
    [
        [1, 2],
        {"tensor": "missing"},
        {"float": "1.5"},
        {"nothing": []},
        {"Undeclared": [1]},
        {"mapping": [["a"]]},
        {"mapping": [[None, 1]]},
        {"mapping": [], "tuple": []},
        {"Pair7": [1]},
        {"Pair7": ["one", 2]},
        {"Pair7": [True, 2]},
        {"Box3": [{"tuple": ["x"]}, {"mapping": []}, None]},
        {"Box3": [{"list": [1.0]}, {"mapping": []}, None]},
        {"Box3": [{"tuple": []}, {"mapping": [["a", 1]]}, None]},
        {"Box3": [{"tuple": []}, {"mapping": []}, {"Pair7": [1, 2]}]},
    ],
    ids=json.dumps,
)
def test_unflatten_of_malformed_tree_raises(shape):
    """A file that was damaged, or is of something else, is refused before anything uses it."""
    with pytest.raises(ValueError, match=r"its nest|it has a|a tensor is missing|a part of its nest"):
        unflatten({}, shape)


def test_unflatten_checks_expected_type():
    """A state of one algorithm is no state of another."""
    tensors, shape = flatten(Pair7(1, 2))
    assert unflatten(tensors, shape, Pair7) == Pair7(1, 2)
    with pytest.raises(ValueError, match="not the Box3 that belongs there"):
        unflatten(tensors, shape, Box3)


def test_saved_second_type_of_one_name_raises():
    """The name is all that a file has of a type."""
    with pytest.raises(TypeError, match=r"different names\. Both are called Variable"):

        @saved
        class Variable:
            pass


def test_map_tensors_keeps_structure():
    """A state moves to another device as a whole; one tensor in two places comes twice."""
    t = torch.ones(2)
    nest = {"a": (t, [t]), "b": Box3((1.0,), {"w": t}), "c": "text"}
    doubled = map_tensors(lambda x: 2 * x, nest)
    assert same(doubled, {"a": (2 * t, [2 * t]), "b": Box3((1.0,), {"w": 2 * t}), "c": "text"})
    assert [x is t for x in tensors_of(nest)] == [True] * 3


def mentions_any(hint):
    return hint is Any or any(map(mentions_any, get_args(hint))) or get_origin(hint) is Any


def test_saved_types_declare_every_field():
    """A field of any type would be read back unchecked."""
    library = {name: cls for name, cls in state_tree._TYPES.items() if cls.__module__.startswith("fsla.")}
    assert {"State", "Variable", "Point", "Position", "Measured"} <= library.keys()
    loose = [
        f"{name}.{field}"
        for name, cls in library.items()
        for field, hint in state_tree._hints(cls).items()
        if mentions_any(hint)
    ]
    assert not loose


@pytest.mark.parametrize("name", ["fsla", "soba", "cg", "ma_soba", "fdehbo", "f2sa", "hoag"])
def test_states_of_algorithms_round_trip(name):
    """The typed states are what checkpoints hold."""
    problem, at, train, valid = ridge_logistic()
    bound = {"max_adjoint_norm": 10.0} if name == "fdehbo" else {}
    algorithm = fsla.algorithms.get_algorithm(name)(fsla.steps.constant(0.1, 0.1, 0.1, 0.5), **bound)
    batches = fsla.StepBatches.of((train,), (valid,), None, (valid,), (train,), seed=1, mode="grouped")
    state = algorithm.step(problem, algorithm.init(problem, at, batches), batches)
    tensors, shape = flatten(state)
    again = unflatten(tensors, json.loads(json.dumps(shape)), type(state))
    one, two = algorithm.step(problem, state, batches), algorithm.step(problem, again, batches)
    assert all(map(torch.equal, tensors_of(one), tensors_of(two)))


def test_describe_shows_public_fields():
    """A run resumes only where this is the same."""
    shown = describe(fsla.algorithms.soba(fsla.steps.constant(0.1, 0.2, 0.3)))
    assert shown["type"] == "Simultaneous"
    assert shown["step_sizes"]["inner_lr"] == 0.2
    assert shown != describe(fsla.algorithms.soba(fsla.steps.constant(0.1, 0.2, 0.4)))
    json.dumps(shown)
