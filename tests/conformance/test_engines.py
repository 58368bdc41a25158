"""Every algorithm whose step can be captured takes the same steps from a graph; a recorder plays the device's part."""

import pytest
import torch
from rows import begin, make, names_where, row_of

import fsla
from fsla import CountedProblem, StepBatches
from fsla import _tree as tree
from fsla.train._captured import CaptureError
from fsla.train._engine import Eager, make_engine
from recorder import captured
from support import ridge_logistic


@pytest.mark.parametrize("name", names_where(lambda algorithm: not algorithm.capturable))
def test_engine_skips_steps_that_vary(name):
    algorithm = make(name)
    problem, at, train, valid = ridge_logistic()
    batches = StepBatches.shared(train, valid, seed=0)
    state = algorithm.init(problem, begin(name, at), batches)
    rest = (algorithm, problem, lambda: batches, torch.Generator(), state)
    with pytest.raises(CaptureError, match="does not take the same operations at every step"):
        make_engine("graph", *rest)
    assert make_engine("auto", *rest, steps=10**6).name == "eager"


@pytest.mark.parametrize("name", names_where(lambda algorithm: algorithm.capturable))
def test_engines_take_equal_steps(name):
    algorithm = make(name, fsla.steps.Schedule(0.02, 0.1, 0.1, 0.5, power=0.5))
    problem, at, train, valid = ridge_logistic()
    batches, states = StepBatches.shared(train, valid), []
    for choice in ("eager", "graph"):
        counted, generator = CountedProblem(problem), torch.Generator()
        state = algorithm.init(counted, begin(name, at), batches)
        motor = Eager(algorithm, counted, lambda: batches)
        if choice != "eager":
            motor, _ = captured(algorithm, counted, lambda: batches, generator)
        states.append((motor.advance(state, 6 - state.step_count), counted.calls))
    (a, calls), (b, same) = states
    assert calls == same
    assert a.step_count == b.step_count == 6
    for x, y in ((a.lam.value, b.lam.value), (a.omega.value, b.omega.value), (a.direction, b.direction)):
        assert float(tree.norm(tree.sub(x, y)) / tree.norm(x)) < (1e-12 if row_of(name).exact else 1e-6)
