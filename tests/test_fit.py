"""The training loop: what it records, when it ends, and that it goes on exactly from wherever it was killed."""

import errno
import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fsla
from fsla import CheckpointError
from fsla._storage import _container as container
from fsla._storage import _locks as locks
from fsla.hypergradients._estimators import Tracked
from fsla.train import _process as process
from fsla.train import _records as journal
from fsla.train import _stores as stores
from fsla.train._loader_state import Feed
from launch import LIMIT_S
from support import ClassWeights
from support import class_weighted_loss as inner_loss
from support import plain_loss as outer_loss

F64 = torch.float64
STEPS = 30


class CountingWeights(ClassWeights):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, y):
        self.calls += 1
        return super().forward(y)


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=g, dtype=F64), torch.randint(3, (n,), generator=g)


class Augmented(Dataset):
    """Draws from NumPy's and Python's generators for each example, as transforms do."""

    def __init__(self, n, seed):
        self.x, self.y = data(n, seed)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i] + 0.1 * numpy.random.rand() + 0.1 * random.random() + 0.1 * torch.rand(()), self.y[i]


RATES = {
    "inner_optimizer": partial(torch.optim.Adam, lr=0.01),
    "adjoint_optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.5),
    "outer_optimizer": partial(torch.optim.Adam, lr=0.02),
}


class Setup:
    """A run as a script sets it up: with all that has a state."""

    def __init__(self, algorithm=fsla.FSLA, *, user_optimizers=True, width=6, workers=0, **options):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        layers = [nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 3)]
        self.model = nn.Sequential(*layers).to(F64)
        self.weights = CountingWeights()
        losses = {"inner_loss": inner_loss, "outer_loss": outer_loss}
        self.opt = algorithm(
            self.model, {"w": self.weights}, **self.of_mapping(losses), **(RATES if user_optimizers else {}), **options
        )
        self.train = DataLoader(Augmented(40, 1), batch_size=8, shuffle=True, num_workers=workers)
        generator = torch.Generator().manual_seed(5)
        self.trusted = DataLoader(TensorDataset(*data(28, 2)), batch_size=8, shuffle=True, generator=generator)
        self.schedulers = []
        if user_optimizers:
            self.schedulers = [
                lr_scheduler.CosineAnnealingLR(self.opt.inner_optimizer, STEPS),
                lr_scheduler.MultiStepLR(self.opt.outer_optimizer, [4, 11, 11], 0.5),
                lr_scheduler.ReduceLROnPlateau(self.opt.adjoint_optimizer, patience=0, factor=0.5),
            ]

    @staticmethod
    def of_mapping(losses):
        return {name: lambda m, o, b, f=f: f(m, o["w"], b) for name, f in losses.items()}

    def evaluate(self, model):
        x, y = data(30, 3)
        torch.rand(7)
        loss = nn.functional.cross_entropy(model(x), y)
        return {"loss": loss, "error": (model(x).argmax(1) != y).double().mean()}

    def fit(self, folder=None, **more):
        arguments = {
            "max_steps": STEPS,
            "eval_fn": self.evaluate,
            "eval_every": 4,
            "save_every": 3,
            "progress_bar": False,
        }
        arguments |= {"lr_schedulers": self.schedulers, "output_dir": folder}
        history = fsla.fit(self.opt, self.train, self.trusted, **(arguments | more))
        self.end = self.left()
        return history

    def left(self):
        """Everything that a run leaves, as text."""
        buffers = [*self.model.buffers(), *self.weights.buffers()]
        states = [self.model.state_dict(), self.weights.state_dict(), buffers, self.opt.state_dict()]
        states += [s.state_dict() for s in self.schedulers]
        states += [torch.get_rng_state(), str(numpy.random.get_state()), random.getstate()]
        return digest(states)


def digest(x):
    if isinstance(x, torch.Tensor):
        return f"{x.dtype}{list(x.shape)}{x.detach().reshape(-1).view(torch.uint8).tolist()};"
    if isinstance(x, dict):
        return "".join(f"{k!r}:{digest(v)}" for k, v in x.items())
    if isinstance(x, list | tuple):
        return "[" + "".join(map(digest, x)) + "]"
    return f"{x!r};"


class Stop(Exception):
    pass


def stop_at(step):
    def callback(opt, record):
        if record["step"] == step:
            raise Stop

    return callback


def records(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def checkpoints(folder):
    return sorted(p.name for p in folder.glob("checkpoint*"))


KINDS = {
    "fsla": {},
    "measured": {"user_optimizers": False},
    "average": {"momentum": "average", "max_grad_norm": 1.0, "max_adjoint_norm": 10.0},
    "storm": {"momentum": "storm"},
    "soba": {"algorithm": fsla.SOBA},
    "ma-soba": {"algorithm": fsla.MASOBA, "user_optimizers": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_fit_resumes_exactly_after_exception(tmp_path, kind):
    whole = Setup(**KINDS[kind])
    history = whole.fit(tmp_path / "whole")
    folder = tmp_path / "broken"
    for step in (4, 12, 20, 24):
        part = Setup(**KINDS[kind])
        if checkpoints(folder):
            torch.manual_seed(100 + step)  # all that a run draws from is in the checkpoint
        with pytest.raises(Stop):
            part.fit(folder, callbacks=[stop_at(step)])
    last = Setup(**KINDS[kind])
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    resumed = last.fit(folder)
    assert resumed.resumed_from == 21
    assert last.end == whole.end
    assert (folder / "records.jsonl").read_bytes() == (tmp_path / "whole" / "records.jsonl").read_bytes()
    assert resumed.records == history.records
    assert [r["step"] for r in history.records] == [4, 8, 12, 16, 20, 24, 28, 30]
    assert history.best_metric == min(r["loss"] for r in history.records)
    assert next(r["step"] for r in history.records if r["loss"] == history.best_metric) == history.best_step
    assert (resumed.best_metric, resumed.best_step, resumed.stop_reason) == (
        history.best_metric,
        history.best_step,
        "steps",
    )


def test_fit_saving_and_evaluating_change_nothing(tmp_path):
    plain = Setup(user_optimizers=False)
    plain.fit(eval_fn=None)
    other = Setup(user_optimizers=False)
    other.model[1].eval()
    other.model[1].train()
    other.fit(tmp_path, eval_every=1, save_every=1)
    assert other.end == plain.end
    assert other.model.training
    assert all(m.training for m in other.model.modules())


def test_fit_evaluation_keeps_module_modes():
    run = Setup()
    run.model[1].eval()
    seen = []

    def evaluate(model):
        seen.append((model[0].training, torch.is_grad_enabled()))
        return 1.0

    history = run.fit(max_steps=4, eval_fn=evaluate)
    assert seen == [(False, False)]
    assert (run.model[0].training, run.model[1].training) == (True, False)
    assert history.records[0]["metric"] == 1.0


def test_fit_resumes_with_more_steps(tmp_path):
    whole = Setup(user_optimizers=False)
    whole.fit(tmp_path / "whole", eval_every=5)
    Setup(user_optimizers=False).fit(tmp_path / "parts", max_steps=10, eval_every=5)
    later = Setup(user_optimizers=False)
    assert later.fit(tmp_path / "parts", eval_every=5).resumed_from == 10
    assert later.end == whole.end
    done = Setup(user_optimizers=False)
    history = done.fit(tmp_path / "parts", eval_every=5)
    assert (history.num_steps, history.resumed_from, len(history.records)) == (STEPS, STEPS, 6)
    assert digest(done.model.state_dict()) == digest(whole.model.state_dict())
    with pytest.raises(CheckpointError, match=r"at step 30, beyond max_steps=20\. Ask for more steps"):
        Setup(user_optimizers=False).fit(tmp_path / "parts", max_steps=20)


def test_fit_rollback_after_resume_is_unchanged(tmp_path):
    """What a rescue goes back to is saved too."""
    x, y = data(8, 1)
    bad = [(torch.full_like(x, torch.nan) if k == 19 else x, y) for k in range(40)]

    def run(folder, **more):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(F64)
        opt = fsla.FSLA(model, CountingWeights(), inner_loss=inner_loss, outer_loss=outer_loss, **RATES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fsla.RollbackWarning)
            fsla.fit(opt, bad, bad[:1], max_steps=30, output_dir=folder, eval_every=5, save_every=15, **more)
        return opt

    whole = run(None)
    assert whole.step_count == 20  # of 30: it went back from 20 to 10
    with pytest.raises(Stop):
        run(tmp_path, callbacks=[stop_at(15 + 5)])
    assert records(tmp_path)[-1]["inner_loss"] is None
    again = run(tmp_path)
    assert digest([again.state_dict(), again.model.state_dict()]) == digest(
        [whole.state_dict(), whole.model.state_dict()]
    )


# -------------------------------------------------------------------------------------------------------------- loaders


def test_fit_restarts_shorter_loader():
    x, y = data(6, 1)
    seen = {"inner": [], "outer": []}

    def spy(name, loss):
        def called(model, weights, batch):
            if not seen[name] or seen[name][-1] != batch[0]:
                seen[name].append(batch[0])
            return loss(model, weights, batch[1:])

        return called

    model = nn.Linear(4, 3).to(F64)
    losses = {"inner_loss": spy("inner", inner_loss), "outer_loss": spy("outer", outer_loss)}
    opt = fsla.SOBA(model, CountingWeights(), **losses, **RATES)
    fsla.fit(opt, [(k, x, y) for k in range(3)], ((k, x, y) for k in itertools.count()), max_steps=7)
    assert seen["inner"] == [0, 1, 2, 0, 1, 2, 0]
    assert seen["outer"] == [0, 1, 2, 3, 4, 5, 6]


def test_fit_without_outer_loader_passes_none():
    x, y = data(6, 1)

    def outer(model, weights, batch):
        assert batch is None
        return outer_loss(model, weights, (x, y))

    opt = fsla.SOBA(nn.Linear(4, 3).to(F64), CountingWeights(), inner_loss=inner_loss, outer_loss=outer, **RATES)
    assert fsla.fit(opt, [(x, y)], max_steps=2).num_steps == 2


def test_fit_reshuffles_and_sets_epoch():
    set_ = TensorDataset(torch.arange(6))
    feed = Feed(DataLoader(set_, shuffle=True), "inner_loader")
    epochs = [[int(feed.draw()[0]) for _ in range(6)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
    sampler = torch.utils.data.DistributedSampler(set_, num_replicas=1, rank=0)
    feed = Feed(DataLoader(set_, sampler=sampler), "inner_loader")
    epochs = [[int(feed.draw()[0]) for _ in range(6)] for _ in range(3)]
    assert epochs[0] != epochs[1]
    assert sampler.epoch == 2


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("drawn", [1, 4, 5, 6, 17])
def test_loader_position_is_restored(replacement, own_generator, drawn):
    def make():
        generator = torch.Generator().manual_seed(1) if own_generator else None
        sampler = torch.utils.data.RandomSampler(range(40), replacement=replacement, generator=generator)
        return Feed(DataLoader(range(40), batch_size=8, sampler=sampler), "inner_loader")

    torch.manual_seed(0)
    feed = make()
    for _ in range(drawn):
        feed.draw()
        torch.rand(3)
    place = feed.position()
    state = torch.get_rng_state()
    rest = [feed.draw().tolist() for _ in range(12)]
    torch.manual_seed(9)
    again = make()
    again.seek(place)
    again.restore_generators(place)
    torch.set_rng_state(state)
    assert [again.draw().tolist() for _ in range(12)] == rest


def test_loader_positions_with_one_generator_are_restored():
    def make():
        generator = torch.Generator().manual_seed(1)
        sizes = (5, 3)
        return [Feed(DataLoader(range(n), shuffle=True, generator=generator), "inner_loader") for n in sizes]

    feeds = make()
    for feed in feeds * 6:  # so that the first one started last
        feed.draw()
    places = [feed.position() for feed in feeds]
    rest = [int(feed.draw()) for feed in feeds * 12]
    again = make()
    for feed, place in zip(again, places, strict=True):
        feed.seek(place)
    for feed, place in zip(again, places, strict=True):
        feed.restore_generators(place)
    assert [int(feed.draw()) for feed in again * 12] == rest


def test_fit_with_iterator_or_empty_loader_raises():
    x, y = data(6, 1)

    def opt():
        return fsla.SOBA(
            nn.Linear(4, 3).to(F64), CountingWeights(), inner_loss=inner_loss, outer_loss=outer_loss, **RATES
        )

    with pytest.raises(ValueError, match=r"inner_loader must be iterable again.* generator that ended after 2"):
        fsla.fit(opt(), ((x, y) for _ in range(2)), [(x, y)], max_steps=5)
    with pytest.raises(ValueError, match=r"outer_loader must have at least one batch"):
        fsla.fit(opt(), [(x, y)], [], max_steps=5)
    small = DataLoader(TensorDataset(x, y), batch_size=8, drop_last=True)
    with pytest.raises(ValueError, match=r"inner_loader must have at least one batch.*drop_last=True"):
        fsla.fit(opt(), small, [(x, y)], max_steps=5)
    with pytest.raises(TypeError, match=r"inner_loader must be an iterable of batches\. Got int instead"):
        fsla.fit(opt(), 3, [(x, y)], max_steps=5)


# -------------------------------------------------------------------------------------- evaluation, stopping, callbacks


def test_fit_patience_stops_and_resume_stays_stopped(tmp_path):
    losses = iter([3.0, 3.5, 2.0, 2.5, float("nan"), 2.0, 1.0])
    history = Setup(user_optimizers=False).fit(tmp_path, eval_fn=lambda model: next(losses), eval_every=2, patience=3)
    assert (history.stop_reason, history.num_steps, history.best_metric, history.best_step) == ("patience", 12, 2.0, 6)
    assert [r["metric"] for r in history.records] == [3.0, 3.5, 2.0, 2.5, None, 2.0]
    again = Setup(user_optimizers=False).fit(tmp_path, eval_fn=lambda model: next(losses), eval_every=2, patience=3)
    assert (again.stop_reason, again.num_steps) == ("patience", 12)
    more = Setup(user_optimizers=False).fit(
        tmp_path, eval_fn=lambda model: next(losses), max_steps=14, eval_every=2, patience=9
    )
    assert (more.stop_reason, more.num_steps, more.best_step) == ("steps", 14, 14)


def tensors_of(run):
    """The model's and the weights' tensors as they are now."""
    return {**run.model.state_dict(), **{f"w.{name}": t for name, t in run.weights.state_dict().items()}}


def copied_at(run, step, copies):
    """A callback that copies a run's tensors at a step."""

    def callback(opt, record):
        if record["step"] == step:
            copies.update({name: t.clone() for name, t in tensors_of(run).items()})

    return callback


def test_fit_with_patience_ends_at_best_evaluation(tmp_path):
    """λ that fits the noise of few trusted samples is of no use; nor is the model that was trained with it."""
    arguments = {"eval_every": 2, "patience": 2}
    run, best, last = Setup(user_optimizers=False), {}, {}
    losses = iter([3.0, 1.0, 2.0, 2.0])
    callbacks = [copied_at(run, 4, best), copied_at(run, 8, last)]
    result = run.fit(tmp_path, eval_fn=lambda model: next(losses), callbacks=callbacks, **arguments)
    assert (result.stop_reason, result.num_steps, result.best_step) == ("patience", 8, 4)
    assert all(torch.equal(t, best[name]) for name, t in tensors_of(run).items())
    moves = [name for name, t in best.items() if not torch.equal(t, last[name])]
    assert "0.weight" in moves
    assert any(name.startswith("w.") for name in moves)
    again = Setup(user_optimizers=False)
    again.fit(tmp_path, eval_fn=lambda model: next(losses), **arguments)
    assert again.end == run.end
    arguments |= {"patience": 9, "max_steps": 12}
    whole, longer, end, longer_end = Setup(user_optimizers=False), Setup(user_optimizers=False), {}, {}
    losses = iter([3.0, 1.0, 2.0, 2.0, 1.5, 1.5])
    whole.fit(eval_fn=lambda model: next(losses), callbacks=[copied_at(whole, 12, end)], **arguments)
    losses = iter([1.5, 1.5])
    callbacks = [copied_at(longer, 12, longer_end)]
    longer.fit(tmp_path, eval_fn=lambda model: next(losses), callbacks=callbacks, **arguments)
    assert end.keys() == longer_end.keys()
    assert all(torch.equal(t, end[name]) for name, t in longer_end.items())
    assert all(torch.equal(t, best[name]) for name, t in tensors_of(longer).items())


@pytest.mark.parametrize("as_loader", [False, True])
def test_fit_with_more_outer_parameters_than_samples_warns(as_loader):
    """539 penalties on a few hundred samples fit their noise: the outer loss says nothing of that."""
    x, y = data(20, 1)

    def run(count, trusted, **more):
        model, penalties = nn.Linear(4, 3).to(F64), nn.Parameter(torch.zeros(count, dtype=F64))

        def penalised(model, penalties, batch):
            return nn.functional.cross_entropy(model(batch[0]), batch[1]) + penalties.exp().mean() * model.weight.norm()

        losses = {"inner_loss": penalised, "outer_loss": lambda m, p, b: nn.functional.cross_entropy(m(b[0]), b[1])}
        bilevel = fsla.SOBA(model, penalties, **losses, **RATES)
        batch = data(trusted, 2)
        loader = DataLoader(TensorDataset(*batch), batch_size=2) if as_loader else [batch]
        fsla.fit(bilevel, [(x, y)], loader, max_steps=1, progress_bar=False, **more)

    with pytest.warns(fsla.OverfittingWarning, match="7 outer parameters are learnt from 6 outer samples.*patience="):
        run(7, 6)
    run(6, 6)
    run(7, 6, eval_fn=lambda model: 1.0, patience=3)


def test_fit_callbacks_see_records_and_stop():
    seen = []
    run = Setup()
    last = [lambda opt, record: record["step"] == 8, lambda opt, record: seen.append((opt is run.opt, record["step"]))]
    history = run.fit(callbacks=last)
    assert (history.stop_reason, history.num_steps) == ("callback", 8)
    assert seen == [(True, 4), (True, 8)]


def test_fit_record_matches_step(tmp_path):
    Setup(user_optimizers=False).fit(tmp_path, max_steps=4)
    (record,) = records(tmp_path)
    expected_keys = [
        "step",
        "inner_loss",
        "outer_loss",
        "hypergradient_norm",
        "adjoint_norm",
        "hessian_norm",
        "outer_step_scale",
    ]
    assert list(record) == [*expected_keys, "loss", "error"]
    assert all(isinstance(value, int | float) for value in record.values())
    assert record["hessian_norm"] > 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_steps": 0}, "'max_steps' of fit must be at least 1"),
        ({"save_total_limit": 0}, "'save_total_limit' of fit must be at least 1"),
        ({"save_every_minutes": -1}, "'save_every_minutes' of fit must be positive"),
        ({"resume": "last"}, "must be True, False or 'previous'. Got 'last'"),
        ({"eval_fn": None, "patience": 1, "lr_schedulers": ()}, "patience requires eval_fn="),
        ({"eval_fn": None}, "ReduceLROnPlateau requires eval_fn="),
        ({"eval_fn": lambda model: {"step": 1}}, "names of its own. Got 'step'"),
        ({"eval_fn": lambda model: {}}, "names of its own. Got none"),
        ({"eval_fn": lambda model: None}, "Got NoneType for 'metric' instead"),
        ({"eval_fn": lambda model: {"loss": torch.ones(2)}}, "Got Tensor for 'loss' instead"),
        ({"tensorboard": True}, "needs a folder"),
    ],
)
def test_fit_invalid_argument_raises(more, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Setup().fit(**more)


def test_fit_with_scheduler_of_other_optimizer_raises():
    run = Setup()
    foreign = lr_scheduler.StepLR(torch.optim.SGD(run.model.parameters(), lr=0.1), 3)
    with pytest.raises(ValueError, match=r"must be of an optimiser that was given to FSLA.*Got a StepLR of another"):
        run.fit(lr_schedulers=foreign)
    measured = Setup(user_optimizers=False, outer_optimizer=RATES["outer_optimizer"])
    assert measured.opt.inner_optimizer is None
    with pytest.raises(
        ValueError, match=r"Got a StepLR of another one\. Variables without an optimiser of yours move by"
    ):
        measured.fit(lr_schedulers=[lr_scheduler.StepLR(run.opt.inner_optimizer, 3)])
    measured.fit(lr_schedulers=[lr_scheduler.StepLR(measured.opt.outer_optimizer, 3)], max_steps=4)
    assert measured.opt.outer_optimizer.param_groups[0]["lr"] == pytest.approx(0.02 * 0.1)


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_fit_keeps_last_checkpoints(tmp_path):
    Setup().fit(tmp_path, save_total_limit=3)
    assert checkpoints(tmp_path) == [f"checkpoint-{k:08}.safetensors" for k in (24, 27, 30)]
    assert {p.name for p in tmp_path.iterdir()} == {"records.jsonl", *checkpoints(tmp_path)}


def test_fit_saves_every_minutes(tmp_path, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(sys.modules["fsla.train._loop"], "monotonic", lambda: 60.0 * next(clock))
    Setup().fit(tmp_path, save_every=None, save_every_minutes=7.5, save_total_limit=100)
    assert checkpoints(tmp_path) == [f"checkpoint-{k:08}.safetensors" for k in (8, 16, 24, 30)]


def interrupted(folder, **more):
    with pytest.raises(Stop):
        Setup().fit(folder, callbacks=[stop_at(20)], **more)
    assert checkpoints(folder) == ["checkpoint-00000015.safetensors", "checkpoint-00000018.safetensors"]
    return folder / "checkpoint-00000018.safetensors"


@pytest.mark.parametrize("damage", ["truncated", "tampered", "empty"])
def test_fit_resumes_from_checkpoint_before_damaged_one(tmp_path, damage):
    whole = Setup()
    whole.fit()
    path = interrupted(tmp_path)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes({"truncated": content[:-500], "tampered": content, "empty": b""}[damage])
    with pytest.raises(CheckpointError, match=r"Cannot read .*00000018") as caught:
        Setup().fit(tmp_path)
    assert "resume='previous' goes on from checkpoint-00000015.safetensors" in caught.value.__notes__[0]
    with pytest.raises(Stop):
        Setup().fit(tmp_path, resume="previous", callbacks=[stop_at(16)])
    assert checkpoints(tmp_path) == ["checkpoint-00000015.safetensors", "checkpoint-00000018.safetensors.aside"]
    last = Setup()
    assert last.fit(tmp_path).resumed_from == 15
    assert last.end == whole.end


def test_fit_checkpoint_of_other_problem_raises(tmp_path):
    interrupted(tmp_path, run_config={"data": "first", "seed": 0})
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    same = {"data": "first", "seed": 0}

    def refused(setup, match, **more):
        state = digest(setup.model.state_dict())
        with pytest.raises(CheckpointError, match=match):
            setup.fit(tmp_path, **({"run_config": same} | more))
        assert digest(setup.model.state_dict()) == state

    refused(Setup(), r"run_config\.data: 'first' there, 'second' wanted", run_config={"data": "second", "seed": 0})
    refused(Setup(width=7), r"omega\.0\.weight: 'float64\[6, 4\]' there, 'float64\[7, 4\]' wanted")
    refused(Setup(algorithm=fsla.SOBA), r"optimizer: 'FSLA' there, 'SOBA' wanted")
    refused(Setup(momentum="average"), r"algorithm\.momentum\.type: 'NoMomentum' there, 'EMA' wanted")
    refused(Setup(adjoint_at="new_params"), r"algorithm\.adjoint_at: 'old_params' there, 'new_params' wanted")
    fewer = Setup()
    refused(fewer, r"schedulers\[1\]: 'MultiStepLR' there, nothing wanted", lr_schedulers=fewer.schedulers[:1])
    other = Setup()
    other.train = DataLoader(Augmented(48, 1), batch_size=8, shuffle=True)
    refused(other, r"batches\[0\]: 5 there, 6 wanted")
    refused(Setup(), r"resume=False resumes from none", resume=False)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_fit_resume_previous_needs_two_checkpoints(tmp_path):
    Setup().fit(tmp_path, save_total_limit=1)
    with pytest.raises(CheckpointError, match=r"needs two checkpoints"):
        Setup().fit(tmp_path, resume="previous")


def test_fit_checkpoint_of_other_kind_raises(tmp_path):
    fsla.train.save_checkpoint(tmp_path / "checkpoint-00000003.safetensors", {"a": 1})
    with pytest.raises(CheckpointError, match=r"it holds a checkpoint, not a checkpoint of fit"):
        Setup().fit(tmp_path)


def test_fit_unsavable_state_fails_at_first_step(tmp_path):
    run = Setup()
    run.schedulers[0].memory = {1, 2}
    with pytest.raises(TypeError, match="Got set instead") as caught:
        run.fit(tmp_path)
    assert "in 'schedulers'" in caught.value.__notes__[0]
    assert run.opt.step_count == 1


def test_fit_lost_records_warn_and_continue(tmp_path):
    interrupted(tmp_path)
    lines = (tmp_path / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    with pytest.warns(UserWarning, match=r"holds 2 readable records of the 4"):
        history = Setup().fit(tmp_path)
    assert [r["step"] for r in history.records] == [4, 8, 20, 24, 28, 30]
    assert records(tmp_path) == history.records


# ------------------------------------------------------------------------------------------ folders, locks and the disk


def test_fit_unwritable_folder_fails_before_first_step(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    run = Setup()
    with pytest.raises(CheckpointError, match=r"Cannot write to .*file.*: .*Name another"):
        run.fit(tmp_path / "file" / "run")

    def refuse(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(sys.modules["fsla.train._loop"], "ensure_folder", refuse)
    with pytest.raises(CheckpointError, match=r"Cannot write to .*: Read-only file system\. Name another"):
        run.fit(tmp_path / "run")
    assert run.opt.step_count == 0


def test_fit_inside_fit_raises(tmp_path):
    def again(opt, record):
        Setup().fit(tmp_path)

    with pytest.raises(CheckpointError, match=rf"one run at a time\. The process {os.getpid()} \(this one\)"):
        Setup().fit(tmp_path, callbacks=[again])
    assert not (tmp_path / "lock").exists()


def test_fit_takes_lock_of_dead_process(tmp_path):
    (tmp_path / "lock").write_text("4194304999\n")
    assert Setup().fit(tmp_path).num_steps == STEPS
    assert not (tmp_path / "lock").exists()


def planted(path, kind, victim):
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "hanging link":
        path.symlink_to(victim.parent / "none")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["link", "hanging link", "pipe", "folder"])
@pytest.mark.parametrize("name", ["lock", "records.jsonl"])
def test_fit_with_planted_file_raises_and_changes_nothing(tmp_path, name, kind):
    """A link would have the file that it names truncated, and a pipe would be waited for."""
    (tmp_path / "victim").write_text("123\n")  # as a lock has it
    folder = tmp_path / "run"
    folder.mkdir()
    planted(folder / name, kind, tmp_path / "victim")
    before = os.lstat(folder / name)
    run = Setup()
    what = "a symbolic link" if "link" in kind else f"a {kind}"
    with pytest.raises(CheckpointError, match=rf"Cannot use .*{name}: it is {what}, not a regular file\. Move it"):
        run.fit(folder)
    assert run.opt.step_count == 0
    assert os.lstat(folder / name) == before
    assert [p.name for p in folder.iterdir()] == [name]
    assert [p.name for p in tmp_path.iterdir() if p.name != "run"] == ["victim"]
    assert (tmp_path / "victim").read_text() == "123\n"


def test_fit_with_link_planted_at_records_raises(tmp_path, monkeypatch):
    """The journal opens the file by itself, without following links."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "records.jsonl").symlink_to(tmp_path / "victim")
    monkeypatch.setattr(sys.modules["fsla.train._loop"], "check_regular", lambda path: None)
    with pytest.raises(CheckpointError, match=r"records\.jsonl: it is a symbolic link"):
        Setup().fit(tmp_path)
    assert (tmp_path / "victim").read_text() == "precious"


def test_fit_with_foreign_lock_raises(tmp_path):
    """A file that happens to be named lock would be truncated, and then removed."""
    (tmp_path / "lock").write_text("my notes")
    with pytest.raises(CheckpointError, match=r"lock: it is not a lock of fsla\. Move it elsewhere"):
        Setup().fit(tmp_path)
    assert (tmp_path / "lock").read_text() == "my notes"
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("when", ["at the start", "during the run"])
def test_fit_checkpoint_does_not_follow_link(tmp_path, when):
    """The file that the link names would be replaced."""
    (tmp_path / "victim").write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    link = folder / "checkpoint-00000006.safetensors"

    def plant(opt, record):
        link.symlink_to(tmp_path / "victim")

    if when == "at the start":
        plant(None, None)
    with pytest.raises(CheckpointError, match=rf"Cannot use {link}: it is a symbolic link"):
        Setup().fit(folder, callbacks=[] if when == "at the start" else [plant])
    assert link.is_symlink()
    assert (tmp_path / "victim").read_text() == "precious"


def test_fit_removes_links_and_keeps_targets(tmp_path):
    """Old checkpoints and unfinished parts are removed, which may be links."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "x").write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "checkpoint-00000003.part").symlink_to(tmp_path / "precious")
    Setup().fit(folder, max_steps=2)
    assert not (folder / "checkpoint-00000003.part").is_symlink()
    assert (tmp_path / "precious" / "x").read_text() == "precious"


def test_fit_without_file_locks_warns(tmp_path, monkeypatch):
    def none(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "lockf", none)
    with pytest.warns(UserWarning, match="without locks"):
        Setup().fit(tmp_path)
    assert not (tmp_path / "lock").exists()


def test_fit_on_full_disk_keeps_previous_files(tmp_path, monkeypatch):
    whole = Setup()
    whole.fit()
    real = os.fsync
    calls = itertools.count()

    def full(file):
        if next(calls) >= 7:  # records, checkpoint and folder, twice, then the third records
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"checkpoint-00000009.*: No space left on device"):
        Setup().fit(tmp_path)
    monkeypatch.setattr(os, "fsync", real)
    assert checkpoints(tmp_path) == ["checkpoint-00000003.safetensors", "checkpoint-00000006.safetensors"]
    last = Setup()
    assert last.fit(tmp_path).resumed_from == 6
    assert last.end == whole.end


# ------------------------------------------------------------------------------------------------- the bar, TensorBoard


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_fit_progress_bar_needs_terminal(monkeypatch):
    monkeypatch.setattr(journal, "REFRESH_S", 0.0)
    monkeypatch.setenv("COLUMNS", "160")
    for stream, requested, shown in (
        (Terminal(), True, True),
        (Terminal(), False, False),
        (io.StringIO(), True, False),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        Setup(user_optimizers=False).fit(max_steps=6, progress_bar=requested)
        text = stream.getvalue()
        assert all((part in text) == shown for part in ("6/6", "inner", "outer", "|d|", "L "))


def test_fit_tensorboard_gets_records(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append(("open", folder, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("close")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    history = Setup().fit(tmp_path, max_steps=6, tensorboard=True)
    assert calls[0] == ("open", str(tmp_path / "tensorboard"), 1)
    assert calls[-1] == "close"
    assert ("loss", history.records[1]["loss"], 6) in calls
    assert {entry[0] for entry in calls[1:-1]} == set(history.records[0]) - {"step", "hessian_norm", "outer_step_scale"}
    Setup().fit(tmp_path, max_steps=8, tensorboard=True)
    assert ("open", str(tmp_path / "tensorboard"), 7) in calls
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'fsla\[tensorboard\]'"):
        Setup().fit(tmp_path / "other", tensorboard=True)


# ------------------------------------------------------------------------------------------------------------ processes


def start(code, *args):
    """A process that has this file's names."""
    head = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_fit import *\n"
    head += "torch.set_num_threads(1)\n"
    command = [sys.executable, "-c", head + code, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(child):
    out, err = child.communicate(timeout=LIMIT_S)
    return child.returncode, out, err


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(where, count):
    """Kills this process at the count-th time that it is somewhere."""
    left = itertools.count(1)

    def replacement(*args, **more):
        if next(left) == count:
            die()

    if where == "callback":
        return {"callbacks": [replacement]}
    owner, name = {
        "step": (fsla.FSLA, "advance"),
        "moves": (Tracked, "advance"),
        "fsync": (os, "fsync"),
        "rename": (Path, "replace"),
        "removal": (Path, "unlink"),
    }[where]
    real = getattr(owner, name)

    def spied(*args, **more):
        replacement()
        return real(*args, **more)

    setattr(owner, name, spied)
    return {}


def killed_in_turn(folder, moments):
    """Forks a process for each moment, which goes on from the one before and kills itself; then goes to the end."""
    whole = Setup()  # first, so that what torch loads at a first step is loaded once
    whole.fit(folder / "whole")
    for where, count in moments:
        child = os.fork()
        if child == 0:
            Setup().fit(folder, **die_at(where, count))
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, (where, count)
    last = Setup()
    history = last.fit(folder)
    assert history.resumed_from is not None
    assert last.end == whole.end
    assert (folder / "records.jsonl").read_bytes() == (folder / "whole" / "records.jsonl").read_bytes()
    assert {p.name for p in folder.iterdir()} == {"records.jsonl", "whole", *checkpoints(folder)}
    print("same")


def broken_off_with_workers(folder):
    whole = Setup(workers=2)
    whole.fit(max_steps=12)
    with pytest.raises(Stop):
        Setup(workers=2).fit(folder, max_steps=12, callbacks=[stop_at(8)])
    last = Setup(workers=2)
    torch.manual_seed(9)
    assert last.fit(folder, max_steps=12).resumed_from == 6
    assert last.end == whole.end
    print("same")


def test_fit_with_workers_resumes_exactly(tmp_path):
    code, out, err = ended(start("broken_off_with_workers(Path(sys.argv[1]))", tmp_path))
    assert (code, out) == (0, "same\n"), err


def test_fit_resumes_exactly_after_sigkill(tmp_path):
    moments = [("step", 2), ("callback", 2), ("fsync", 4), ("rename", 2), ("moves", 8), ("removal", 9)]
    code, out, err = ended(start(f"killed_in_turn(Path(sys.argv[1]), {moments})", tmp_path))
    assert (code, out) == (0, "same\n"), err


TALKS = """
def tell(opt, record):
    print(record["step"], flush=True)

run = Setup()
save_every = int(sys.argv[3]) if len(sys.argv) > 3 else 3
run.fit(sys.argv[1], max_steps=int(sys.argv[2]), eval_every=1, callbacks=[tell], save_every=save_every)
print("end", digest([run.model.state_dict(), run.weights.state_dict(), run.opt.state_dict()]), flush=True)
"""


@pytest.mark.slow
def test_fit_resumes_exactly_after_20_kills(tmp_path):
    draw = random.Random(0)
    target = 0
    for _ in range(20):
        target += draw.randrange(5, 60)
        child = start(TALKS, tmp_path / "killed", 100_000)
        for line in child.stdout:
            if int(line) >= target:
                break
        time.sleep(draw.random() * 0.02)
        child.kill()
        child.communicate()
        assert child.returncode == -signal.SIGKILL
    last = int(checkpoints(tmp_path / "killed")[-1][11:19])
    assert target - 60 < last
    steps = last + 100
    code, killed, err = ended(start(TALKS, tmp_path / "killed", steps))
    assert code == 0, err
    code, whole, err = ended(start(TALKS, tmp_path / "whole", steps))
    assert code == 0, err
    assert killed.splitlines()[-1] == whole.splitlines()[-1]
    assert (tmp_path / "killed" / "records.jsonl").read_bytes() == (tmp_path / "whole" / "records.jsonl").read_bytes()


def test_fit_second_process_raises_and_sigterm_saves(tmp_path):
    child = start(TALKS, tmp_path, 100_000, 1_000_000)
    for line in child.stdout:
        if line == "3\n":
            break
    with pytest.raises(CheckpointError, match=rf"one run at a time\. The process {child.pid} is using it\."):
        Setup().fit(tmp_path)
    child.terminate()
    code, _, err = ended(child)
    assert code == 143
    (name,) = checkpoints(tmp_path)
    step = int(name[11:19])
    assert err == (
        f"fsla: the run was ended by SIGTERM after step {step}, and is saved in {tmp_path / name}. Call fit again with "
        "this folder to go on.\n"
    )
    assert not (tmp_path / "lock").exists()
    assert len(records(tmp_path)) == step
    assert Setup().fit(tmp_path, max_steps=step + 2, eval_every=1).resumed_from == step


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_fit_restores_signal_handlers(tmp_path, capsys, number, code):
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    whole = Setup()
    whole.fit()
    sent = []

    def callback(opt, record):
        if not sent:
            sent.append(record["step"])
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as caught:
        Setup().fit(tmp_path, callbacks=[callback])
    assert caught.value.code == code
    assert capsys.readouterr().err.count("\n") == 1
    assert checkpoints(tmp_path)[-1] == "checkpoint-00000004.safetensors"
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    last = Setup()
    last.fit(tmp_path)
    assert last.end == whole.end


def test_fit_on_ranks_ignores_second_signal():
    """A cluster signals all processes, and torchrun signals its workers once more, while they save."""
    before = signal.getsignal(signal.SIGTERM)
    with process.Signals(patient=True) as signals:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert signals.received == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_fit_callback_random_draws_change_nothing():
    plain = Setup()
    plain.fit()
    drawing = Setup()
    drawing.fit(callbacks=[lambda opt, record: torch.rand(3) is None])
    assert drawing.end == plain.end


def test_fit_in_thread_installs_no_handlers(tmp_path):
    handlers = []
    thread = threading.Thread(target=lambda: handlers.append(Setup().fit(tmp_path).num_steps))
    thread.start()
    thread.join()
    assert handlers == [STEPS]


def test_fit_interrupted_write_loses_nothing(tmp_path):
    """A limit on the size of files breaks a write off midway, as a full disk does: a checkpoint's, then a record's."""
    code = """
import resource
folder = Path(sys.argv[1])
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
try:
    Setup().fit(folder, save_every=12, callbacks=[stop_at(12 + 4)])
except Stop:
    pass
whole = (folder / "records.jsonl").stat().st_size
for limit, step in ((whole - 10, 100), (20_000, 15)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        Setup().fit(folder, save_every=step)
    except CheckpointError as error:
        print(error)
    print([r["step"] for r in records(folder)], checkpoints(folder))
"""
    code_of_exit, out, err = ended(start(code, tmp_path))
    assert code_of_exit == 0, err
    lines = out.splitlines()
    assert "Cannot write the record of step 16" in lines[0]
    assert "records.jsonl: File too large." in lines[0]
    assert lines[1] == "[4, 8, 12] ['checkpoint-00000012.safetensors']"
    assert "checkpoint-00000015.safetensors: File too large." in lines[2]
    assert lines[3] == lines[1]
    whole = Setup()
    whole.fit()
    last = Setup()
    last.fit(tmp_path)
    assert last.end == whole.end


# ----------------------------------------------------------------------------------------- checkpoints that were edited


def leaves(nest, place=()):
    """Yield the places of the values in a JSON nest, and the values."""
    if isinstance(nest, dict | list):
        for name, part in nest.items() if isinstance(nest, dict) else enumerate(nest):
            yield from leaves(part, (*place, name))
    else:
        yield place, nest


def changed(nest, place, value):
    if not place:
        return value
    nest = dict(nest) if isinstance(nest, dict) else list(nest)
    nest[place[0]] = changed(nest[place[0]], place[1:], value)
    return nest


def edits(content):
    """Yield copies of a checkpoint with one thing that is of another kind."""
    for name, t in content.tensors.items():
        yield f"{name} has another shape", content.tensors | {name: t[None].expand(2, *t.shape).clone()}, content.json
        other = torch.int32 if t.is_floating_point() else torch.float64
        yield f"{name} has another dtype", content.tensors | {name: t.to(other)}, content.json
        yield f"without {name}", {key: value for key, value in content.tensors.items() if key != name}, content.json
    for place, value in leaves(content.json):
        bad = [{}, 0.5] if isinstance(value, str) else ["x", {}] if value is not None else []
        for other in bad:
            yield f"{place} = {other!r}", content.tensors, changed(content.json, place, other)


@pytest.mark.parametrize("kind", ["fsla", "measured"])
def test_fit_edited_checkpoint_raises_and_sets_nothing(tmp_path, kind):
    """All names, forms and kinds of values are known before the first of them is set."""
    Setup(**KINDS[kind]).fit(tmp_path, max_steps=12, save_total_limit=1)
    (path,) = tmp_path.glob("checkpoint-*")
    content = container.read(path, stores.KIND)
    run = Setup(**KINDS[kind])
    before = run.left()
    taken = []
    every = list(edits(content))
    for what, tensors, nest in random.Random(0).sample(every, 250):
        path.write_bytes(container.to_bytes(stores.KIND, tensors, nest, content.run_id))
        try:
            run.fit(tmp_path, max_steps=12)
            taken.append(what)
            run = Setup(**KINDS[kind])
        except CheckpointError:
            assert run.left() == before, what
    assert taken == []


def test_fit_checkpoint_of_other_run_raises(tmp_path):
    """Its forms, settings and step are the same; its run is another."""
    for name in ("one", "other"):
        Setup().fit(tmp_path / name, max_steps=6)
    name = "checkpoint-00000006.safetensors"
    (tmp_path / "one" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(CheckpointError, match=rf"{name} and checkpoint-00000003\.safetensors are of two runs"):
        Setup().fit(tmp_path / "one", max_steps=9)
