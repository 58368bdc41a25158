"""Captured steps of a module, with a recorder that plays the device's part on a CPU."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn

import fsla
from fsla.problems import MicroBatches
from fsla.train import CaptureError, EngineWarning
from fsla.train._step_graphs import MOST, StepGraphs
from support import F64, ClassWeights, class_weighted_loss, plain_loss

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
OPTIONS = {
    "soba": {"algorithm": "soba"},
    "soba, by differences": {"algorithm": "soba", "hvp_method": "finite_difference"},
    "ma_soba": {"algorithm": "ma_soba"},
    "one_step": {"algorithm": "one_step"},
    "fsla": {"algorithm": fsla.algorithms.fsla(momentum="average")},
    "fsla with STORM": {"algorithm": fsla.algorithms.fsla(momentum="storm")},
    "a schedule": {"algorithm": fsla.algorithms.soba(fsla.steps.Schedule(0.1, 0.05, 0.05, 0.5, power=0.5))},
    "optimisers": {"inner_optimizer": SGD, "adjoint_optimizer": SGD, "outer_optimizer": SGD},
    "outer_every=3": {"inner_optimizer": SGD, "outer_every": 3},
    "bounds": {"projection": fsla.steps.Box(-0.01, 0.01), "max_adjoint_norm": 0.1, "max_grad_norm": 0.5},
}


class Recorder:
    """Work is recorded without being done, and done again at each replay."""

    def __init__(self):
        self.records = self.replays = 0

    def warm_up(self, work):
        work()
        work()

    def record(self, work):
        self.records += 1

        def replay():
            self.replays += 1
            work()

        return replay


def make(*, inner=class_weighted_loss, layers=(), captured=True, lenient=True, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), *layers, nn.Linear(5, 3)).to(F64)
    opt = fsla.BilevelOptimizer(
        model, ClassWeights().to(F64), inner_loss=inner, outer_loss=plain_loss, **{"hvp_method": "autograd"} | options
    )
    if captured:
        optimizers = list(opt._optimizers.values())
        opt._graphs = StepGraphs(opt._problem, optimizers, opt._info, lenient, Recorder())
    return opt


def batch(k, n=12):
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(n, 3, dtype=F64, generator=generator)
    return x, torch.randint(3, (n,), generator=generator)


def run(opt, steps, *, before=lambda opt, k: None, take=batch):
    infos = []
    for k in range(steps):
        before(opt, k)
        extra = {"independent_batches": (take(k + 200), take(k + 300))} if opt.reads_independent_batches else {}
        infos.append(opt.step(take(k), take(k + 100), **extra))
    return infos


def numbers(opt):
    tensors = [*opt.model.state_dict().values(), *opt.outer.state_dict().values(), *opt.adjoint.values()]
    return [t.clone() for t in (*tensors, *opt.hypergradient.values())]


def assert_same_run(eager, captured, steps=16, rtol=0.0, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("error", EngineWarning)
        expected, infos = run(eager, steps, **how), run(captured, steps, **how)
    for a, b in zip(numbers(eager), numbers(captured), strict=True):
        torch.testing.assert_close(b, a, rtol=rtol, atol=rtol)
    for a, b in zip(expected, infos, strict=True):
        assert a.step == b.step
        for one, two in zip(a[1:], b[1:], strict=True):
            assert (one is None) == (two is None)
            assert one is None or float(two) == pytest.approx(float(one), rel=rtol, abs=0)


@pytest.mark.parametrize("name", OPTIONS)
def test_captured_steps_match_eager_steps(name):
    """On a CPU the captured work is the step's own, so that the numbers are the same to the bit.

    The rates of a schedule are tensors in a captured step, which rounds otherwise.
    """
    captured = make(**OPTIONS[name])
    assert_same_run(make(captured=False, **OPTIONS[name]), captured, rtol=1e-13 if name == "a schedule" else 0.0)
    recorder = captured._graphs.recorder
    assert recorder.records == (2 if "outer_every" in OPTIONS[name] else 1)
    assert recorder.replays >= 12


def test_captured_step_reads_every_batch():
    eager, captured = make(captured=False), make()
    parts = lambda k: MicroBatches([batch(k), batch(k + 50)])  # noqa: E731
    assert_same_run(eager, captured, take=parts)
    assert captured._graphs.recorder.replays >= 12


def test_batch_of_another_form_gets_a_graph_of_its_own():
    def ragged(k):
        return batch(k, 7 if k % 100 in (4, 9, 14) else 12)

    captured = make()
    assert_same_run(make(captured=False), captured, take=ragged)
    assert captured._graphs.recorder.records == 2


def test_too_many_forms_are_taken_eagerly():
    captured = make()
    with pytest.warns(EngineWarning, match="forms of batches.* change at every step.*Using 'eager'"):
        run(captured, MOST + 2, take=lambda k: batch(k, 4 + k % 100))
    assert not captured._graphs.active


def test_learning_rate_that_a_scheduler_changes_is_followed():
    def schedule(opt, k):
        opt.inner_optimizer.param_groups[0]["lr"] = 0.05 if k < 8 else 0.01

    options = {"inner_optimizer": SGD}
    assert_same_run(make(captured=False, **options), make(**options), before=schedule)


def test_module_mode_is_followed():
    def mode(opt, k):
        opt.model.train(k < 8)

    assert_same_run(make(captured=False), make(), before=mode)


def test_parameters_with_new_storage_are_followed():
    def move(opt, k):
        if k == 8:
            for p in opt.model.parameters():
                p.data = p.data.clone()

    assert_same_run(make(captured=False), make(), before=move)


def test_rollback_is_followed():
    def poisoned(k):
        x, y = batch(k)
        return (x * float("nan") if k == 13 else x), y

    pair = [make(captured=False), make()]
    for opt in pair:
        with pytest.warns(fsla.RollbackWarning, match="goes on from step 10"):
            run(opt, 30, take=poisoned)
    for a, b in zip(*map(numbers, pair), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)
    assert pair[1]._graphs.recorder.replays > 15


def test_saved_state_goes_on_in_a_captured_run():
    eager, first, second = make(captured=False), make(), make()
    run(eager, 16)
    run(first, 8)
    second.model.load_state_dict(first.model.state_dict())
    second.outer.load_state_dict(first.outer.state_dict())
    second.load_state_dict(first.state_dict())
    for k in range(8, 16):
        second.step(batch(k), batch(k + 100))
    for a, b in zip(numbers(eager), numbers(second), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)


def test_step_info_stays_valid_after_later_steps():
    captured = make()
    infos = run(captured, 12)
    assert len({float(info.inner_loss) for info in infos}) == 12


@pytest.mark.parametrize("lenient", [True, False])
def test_loss_that_reads_a_number_from_elsewhere_is_noticed(lenient):
    """What is not handed to a loss is captured as it was."""
    number = {"now": 1.0}

    def inner(model, outer, data):
        return number["now"] * class_weighted_loss(model, outer, data)

    def count(opt, k):
        number["now"] = 1.0 + k

    eager = make(inner=inner, captured=False)
    run(eager, 16, before=count)

    captured = make(inner=inner, lenient=lenient)

    def record(work):
        def replay():
            now, number["now"] = number["now"], 1.5
            work()
            number["now"] = now

        return replay

    captured._graphs.recorder.record = record
    if lenient:
        with pytest.warns(EngineWarning, match="does not give the numbers of the step itself"):
            run(captured, 16, before=count)
        for a, b in zip(numbers(eager), numbers(captured), strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=0)
    else:
        with pytest.raises(CaptureError, match="does not give the numbers of the step itself"):
            run(captured, 16, before=count)


def test_random_layers_are_taken_eagerly():
    eager, captured = (
        make(layers=[nn.Dropout(0.3)], captured=c, hvp_method="finite_difference") for c in (False, True)
    )
    torch.manual_seed(3)
    run(eager, 8)
    stream = torch.get_rng_state()
    torch.manual_seed(3)
    with pytest.warns(EngineWarning, match="random layers, such as dropout, draw in the step"):
        run(captured, 8)
    assert torch.equal(torch.get_rng_state(), stream)
    for a, b in zip(numbers(eager), numbers(captured), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)


def test_batch_that_cannot_be_copied_is_taken_eagerly():
    class Data:
        def __init__(self, k):
            self.k = k

    def inner(model, outer, data):
        return class_weighted_loss(model, outer, batch(data.k) if isinstance(data, Data) else data)

    captured = make(inner=inner)

    def steps():
        for k in range(4):
            captured.step(Data(k), batch(k + 100))

    with pytest.warns(EngineWarning, match=r"takes batches of tensors, numbers and strings\. Got Data"):
        steps()


def test_graph_engine_on_a_cpu_says_what_it_needs():
    with pytest.raises(
        ValueError, match="engine='graph' is unavailable: it replays CUDA graphs, and the model is on cpu"
    ):
        make(captured=False, engine="graph")
    assert make(captured=False, engine="auto")._graphs is None


def test_unknown_engine_gets_one_message():
    with pytest.raises(ValueError, match=r"engine must be one of.*Got 'grap'"):
        make(captured=False, engine="grap")
