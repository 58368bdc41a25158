"""Batches of a step: who shares a pass, which seed each has, the order in which they are drawn, and micro-batches."""

import pytest
import torch
from torch import nn

import fsla
from fsla import Batch, BatchSpec, CountedProblem, MicroBatches, Point, Problem, StepBatches
from fsla import _tree as tree
from fsla.problems import Sampler
from support import F64, normal, ridge_logistic

RATES = fsla.steps.constant(0.05, 0.1, 0.1, 0.5)


def data(batches):
    return [[batch.data for batch in slot] for slot in batches.slots]


def test_step_batches_share_a_pass_by_identity_only():
    """A batch is its own identity: tensors of equal numbers may be two draws."""
    problem, at, train, valid = ridge_logistic()
    algorithm = fsla.algorithms.fsla(RATES, momentum="none")
    one = Batch(train)
    same = StepBatches.of((one,), (valid,), (one,))
    separate = StepBatches.of((Batch(train),), (valid,), (Batch(train),))
    state = algorithm.init(problem, at, same)
    views = []
    for batches in (same, separate):
        counted = CountedProblem(problem)
        after = algorithm.step(counted, state, batches)
        views.append((counted.calls.inner_views, after.direction))
    assert views[1][0] == views[0][0] + 1
    assert float(tree.norm(tree.sub(views[0][1], views[1][1]))) < 1e-14
    assert Batch(train) != Batch(train)


def test_step_batches_of_missing_slots_reuses_others():
    """hvp repeats inner_grad, mixed_hvp its first, and outer_grad_lam the first of outer_grad_omega."""
    batches = StepBatches.of(("a", "b"), ("x", "y"))
    assert data(batches) == [["a", "b"], ["x", "y"], ["a", "b"], ["x"], ["a"]]
    assert batches.hvp is batches.inner_grad
    assert batches.mixed_hvp[0] is batches.inner_grad[0]
    assert batches.outer_grad_lam[0] is batches.outer_grad_omega[0]
    assert data(StepBatches.of(("a",), ("x",), None, ("y",), ("c",))) == [["a"], ["x"], ["a"], ["y"], ["c"]]
    assert data(StepBatches.shared("a", "x")) == [["a"], ["x"], ["a"], ["x"], ["a"]]


def test_step_batches_of_seeds_each_batch():
    """Two draws have two masks; a batch in two slots has one; a seed that a batch brings along stays."""
    first, twice = Batch("k", seed=3), Batch("t")
    batches = StepBatches.of(("a", "b"), (first,), (twice,), (twice,), ("c",), seed=7)
    seeds = [batch.seed for slot in batches.slots for batch in slot]
    assert batches.hvp[0] is batches.outer_grad_lam[0]
    assert batches.outer_grad_omega == (first,)
    assert len(set(seeds)) == len(seeds) - 1
    assert None not in seeds
    again = StepBatches.of(("a", "b"), (first,), (twice,), (twice,), ("c",), seed=7)
    assert [batch.seed for slot in again.slots for batch in slot] == seeds
    other = StepBatches.of(("a", "b"), (first,), (twice,), (twice,), ("c",), seed=8)
    assert [batch.seed for slot in other.slots for batch in slot][2] == 3
    assert not {b.seed for b in other.inner_grad} & {b.seed for b in batches.inner_grad}
    assert {batch.seed for slot in StepBatches.of(("a",), ("x",)).slots for batch in slot} == {None}


def test_step_batches_of_keeps_batch_index():
    """SAGA stores the derivatives of each batch by it."""
    batches = StepBatches.of((Batch("a", number=4),), ("x",), seed=1)
    assert [slot[0].number for slot in batches.slots] == [4, None, 4, None, 4]
    assert batches.inner_grad[0].seed is not None


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("independent", [0, 1, 2, 3, 4]), ("grouped", [0, 1, 0, 3, 2]), ("shared", [0, 1, 0, 1, 0])],
)
def test_step_batches_draw_order_is_fixed(mode, expected):
    """Two sources may draw from one random generator: a run repeats only where the order of draws stays."""
    stream = iter(range(10))
    batches = StepBatches.draw(mode, stream, stream)
    assert [slot[0].data for slot in batches.slots] == expected
    assert batches.mode == mode


def test_sampler_draw_order_is_fixed():
    """Further batches come after those that every step has, those for products last."""
    stream = iter(range(100)).__next__
    sampler = Sampler(BatchSpec(inner_grad=2, outer_grad_omega=2, hvp=3), stream, stream)
    assert data(sampler()) == [[0, 5], [1, 6], [2, 7, 8], [3], [4]]


def test_sampler_with_steps_again_repeats_inner_batches():
    """Unrolled differentiation is that of the actual steps: the same batches, with the same masks."""
    stream = iter(range(100)).__next__
    batches = Sampler(BatchSpec(inner_grad=3, hvp=3), stream, stream, "grouped", seed=1, steps_again=True)()
    assert data(batches) == [[0, 4, 5], [1], [0, 4, 5], [3], [2]]
    assert batches.hvp == batches.inner_grad
    assert len({batch.seed for batch in batches.inner_grad}) == 3


def test_sampler_of_plain_training_draws_no_outer_batch():
    """An algorithm without an outer problem needs no trusted data."""

    def refuse():
        raise AssertionError("an outer batch was drawn")

    batches = Sampler(fsla.algorithms.fixed(RATES, inner_steps=2).batches, iter("abc").__next__, refuse, seed=1)()
    assert data(batches)[0] == ["a", "b"]


# ------------------------------------------------------------------------------------------------------- micro-batches


def dropout_problem(hvp_method="auto"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)).to(F64)
    omega, net = fsla.make_functional(model)

    def inner(lam, omega, x):
        return (lam["a"].exp() * net(omega, x).square().mean(0)).sum()

    def outer(lam, omega, x):
        return net(omega, x).square().mean() + 0.1 * lam["a"].square().sum()

    return Problem(inner, outer, hvp_method=hvp_method), Point({"a": normal(2)}, omega)


def some_v(at):
    return tree.unflatten(normal(tree.size(at.omega), seed=5), at.omega)


def everything(view, v):
    hv, jv = view.products(v)
    by_omega, by_lam = view.gradients()
    return {"value": view.value, "hv": hv, "jv": jv, "by_omega": by_omega, "by_lam": by_lam}


def gap(x, y):
    if isinstance(x, torch.Tensor):
        return float((x - y).abs())
    return float(tree.norm(tree.sub(tree.dense(x), tree.dense(y))))


@pytest.mark.parametrize("hvp_method", ["auto", "reverse_over_reverse", "finite_difference"])
@pytest.mark.parametrize("has_seed", [True, False])
def test_micro_batches_average_their_parts(hvp_method, has_seed):
    """Accumulated gradients are those of training on parts one by one; so are products."""
    problem, at = dropout_problem(hvp_method) if has_seed else ridge_problem(hvp_method)
    parts = [normal(6, 4, seed=j) for j in range(3)]
    batch = Batch(MicroBatches(parts), 11 if has_seed else None)
    v = some_v(at)
    for level in ("inner_at", "outer_at"):
        actual = everything(getattr(problem, level)(at, batch), v)
        of_parts = [everything(getattr(problem, level)(at, Batch(*part)), v) for part in batch.parts]
        for name, value in actual.items():
            if isinstance(value, torch.Tensor):
                mean = sum(one[name] for one in of_parts) / 3
            else:
                mean = {k: sum(tree.dense(one[name])[k] for one in of_parts) / 3 for k in value}
            assert gap(value, mean) < (1e-12 if hvp_method != "finite_difference" else 1e-8), (level, name)


def ridge_problem(hvp_method):
    return (
        Problem(
            lambda lam, omega, x: (lam["a"].exp() * (x @ omega["w"]).square().mean(0)).sum() + omega["w"].pow(4).sum(),
            lambda lam, omega, x: (x @ omega["w"] - 1).square().mean() + lam["a"].square().sum(),
            hvp_method=hvp_method,
        ),
        Point({"a": normal(2)}, {"w": normal(4, 2, seed=1)}),
    )


def test_micro_batches_first_mask_equals_full_batch():
    """Parts with one mask would be correlated; the first keeps it, so that a batch in one part is the batch."""
    problem, at = dropout_problem()
    x = normal(6, 4)
    seeds = [seed for _, seed in Batch(MicroBatches([x, x, x]), 11).parts]
    assert seeds[0] == 11
    assert len(set(seeds)) == 3
    assert [seed for _, seed in Batch(MicroBatches([x, x])).parts] == [None, None]
    whole, one, two = (
        problem.inner_at(at, Batch(d, 11)).grad_omega for d in (x, MicroBatches([x]), MicroBatches([x, x]))
    )
    assert gap(whole, one) == 0
    assert gap(whole, two) > 1e-3


@pytest.mark.parametrize("name", ["fsla", "soba", "cg"])
def test_micro_batches_step_equals_full_batch(name):
    """Without random layers parts are a matter of memory alone."""
    problem, at = ridge_problem("auto")
    algorithm = fsla.algorithms.get_algorithm(name)(RATES)
    x, z = normal(8, 4, seed=2), normal(8, 4, seed=3)
    whole = StepBatches.of((x,), (z,), None, (z,), (x,), mode="grouped")
    a, b = (MicroBatches(list(d.chunk(4))) for d in (x, z))
    parts = StepBatches.of((a,), (b,), None, (b,), (a,), mode="grouped")
    one, two = algorithm.init(problem, at, whole), algorithm.init(problem, at, parts)
    for _ in range(3):
        one, two = algorithm.step(problem, one, whole), algorithm.step(problem, two, parts)
    assert gap(one.direction, two.direction) < 1e-12
    assert gap(one.omega.value, two.omega.value) < 1e-12


def test_micro_batches_empty_raises():
    """A mean over no parts is no number."""
    with pytest.raises(ValueError, match="must hold at least one batch"):
        MicroBatches([])
