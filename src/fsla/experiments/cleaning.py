"""Section 6.2: one run of data hyper-cleaning, from a frozen spec to its records.

Methods are named as in the paper's legends: "fsla"; "bp_T" with T inner steps; "ns_T_K" and "cg_T_K" with T inner
steps and K hypergradient steps, warm for T = 1 and restarted for T > 1; besides "none" (weights fixed at ½) and
"oracle" (weight 1 for the labels that are right, 0 for the others, which no method may know).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn

from fsla import algorithms
from fsla.checks import pick, positive, whole
from fsla.counted import Counted
from fsla.data import CleaningTask, Images, TaskSpec, make_task
from fsla.problem import Point
from fsla.problems.networks import MODELS, RIDGE, build
from fsla.problems.reweighting import Reweighting, weights
from fsla.rates import paper
from fsla.sample import Batch, Batches, Sample
from fsla.solver import Algorithm, Solver, State
from fsla.training import Record, Run, train
from fsla.tree import norm
from fsla.wrap import GaussNewton

BINS = 20


@dataclass(frozen=True)
class RunSpec:
    """One run. The defaults are the paper's (Appendix E), and the readings where it is silent."""

    task: TaskSpec = field(default_factory=TaskSpec)
    method: str = "fsla"
    model: str = "cnn"
    steps: int = 2000
    every: int = 50
    batch: int = 256
    delta: float = 1000.0
    c_tau: float = 1e-3
    c_beta: float = 1e-4
    c_eta: float = 9e-4
    ns_beta: float = 0.1
    momentum: str = "storm"
    v_at: str = "old"
    samples: str = "independent"
    curvature: str = "hessian"
    budget_s: float | None = None

    def __post_init__(self) -> None:
        parse(self.method)
        pick(self.model, MODELS, "model")
        pick(self.curvature, {"hessian": 0, "gauss-newton": 0}, "curvature")
        for name in ("steps", "every", "batch"):
            whole(getattr(self, name), name, "RunSpec")
        positive(self.budget_s, "budget_s", "RunSpec")

    @property
    def name(self) -> str:
        """A file name that tells the run and no other apart."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:10]
        return f"{self.task.dataset}-{self.model}-{self.method}-seed{self.task.seed}-{digest}"

    def seeded(self, seed: int) -> RunSpec:
        return replace(self, task=replace(self.task, seed=seed))


class Method(NamedTuple):
    kind: str
    T: int = 1
    K: int = 1


def parse(name: str) -> Method:
    """Returns the parts of a method's name."""
    if name in ("fsla", "none", "oracle"):
        return Method(name)
    found = re.fullmatch(r"bp_([1-9]\d*)|(ns|cg)_([1-9]\d*)_([1-9]\d*)", name)
    if not found:
        raise ValueError(
            "The method must be 'fsla', 'bp_T', 'ns_T_K', 'cg_T_K', 'none' or 'oracle', with T and K whole numbers "
            f"from 1. Got {name!r} instead."
        )
    bp, kind, T, K = found.groups()
    return Method("bp", int(bp)) if bp else Method(kind, int(T), int(K))


def algorithm(spec: RunSpec) -> Algorithm:
    method, rates = parse(spec.method), paper(spec.delta, spec.c_tau, spec.c_beta, spec.c_eta)
    if method.kind == "fsla":
        return algorithms.fsla(rates, v_at=spec.v_at, momentum=spec.momentum)  # type: ignore[arg-type]
    if method.kind == "bp":
        return algorithms.bp(rates, T=method.T, momentum=spec.momentum)
    if method.kind == "ns":
        return algorithms.ns(rates, T=method.T, K=method.K, beta=spec.ns_beta, momentum=spec.momentum)
    if method.kind == "cg":
        return algorithms.cg(rates, T=method.T, K=method.K, momentum=spec.momentum)
    return algorithms.fixed(rates)


def prepare(spec: RunSpec, task: CleaningTask) -> tuple[Run, Reweighting]:
    """The run of a spec on a task: model, problem, algorithm and sampler, all from the spec's seed."""
    device, method = task.train_x.device, parse(spec.method)
    model = build(spec.model, task.train_x.shape[-1], task.classes, seed=spec.task.seed, device=device)
    data = (task.train_x, task.train_y, task.valid_x, task.valid_y)
    reweighting = Reweighting(model, *data, ridge=RIDGE.get(spec.model, 0.0))
    generator = torch.Generator(device).manual_seed(spec.task.seed)

    def batch(n: int) -> Tensor:
        return torch.randint(n, (spec.batch,), generator=generator, device=device)

    def inner() -> Batch:
        return batch(len(task.train_y))

    def outer() -> Batch:
        return batch(len(task.valid_y))

    def draw() -> Sample:
        if method.kind in ("none", "oracle"):
            return Sample.full(inner(), None)
        xi = Sample.draw(spec.samples, inner, outer)  # type: ignore[arg-type]
        if method.T > 1:
            xi = xi._replace(inner=Batches([xi.inner, *(inner() for _ in range(method.T - 1))]))
        return xi._replace(hvp=xi.inner) if method.kind == "bp" else xi  # BP differentiates the steps that were taken

    def start() -> State:
        at = reweighting.start()
        if method.kind == "oracle":
            at = Point({"weight_logits": torch.where(task.changed, -40.0, 40.0)}, at.omega)
        first = Sample.draw("independent", inner, outer)
        return run.algorithm.init(reweighting.losses(), at, first)

    losses = reweighting.losses()
    problem = GaussNewton(losses) if spec.curvature == "gauss-newton" else losses
    run = Run(algorithm(spec), Counted(problem, size=_size), generator, start, draw)
    return run, reweighting


def _size(batch: Batch) -> int:
    return sum(len(b) for b in batch) if isinstance(batch, Batches) else len(batch)


def measurer(spec: RunSpec, task: CleaningTask, run: Run, reweighting: Reweighting) -> Callable[[State], Record]:
    """What is measured at a state. Draws nothing from the run's generator, and counts no oracle of the run."""
    generator = torch.Generator().manual_seed(spec.task.seed + 10**6)
    index = torch.randint(len(task.train_y), (spec.batch,), generator=generator).to(task.train_y.device)
    outer = torch.randint(len(task.valid_y), (spec.batch,), generator=generator).to(task.train_y.device)
    fixed, plain = Sample.full(index, outer), reweighting.losses()
    changed = task.changed.cpu().numpy()

    def measure(state: State) -> Record:
        omega, w = state.at.omega, weights(state.at.lam)
        valid = reweighting.scores(omega, task.valid_x)
        train_p = reweighting.scores(omega, task.train_x).softmax(1)
        given = train_p.gather(1, task.train_y[:, None])[:, 0]
        record: Record = {
            "valid_loss": float(nn.functional.cross_entropy(valid, task.valid_y)),
            "valid_accuracy": float((valid.argmax(1) == task.valid_y).double().mean()),
            "test_accuracy": float((reweighting.scores(omega, task.test_x).argmax(1) == task.test_y).double().mean()),
        }
        logits = state.at.lam["weight_logits"]  # the weights' order, without the ties of a saturated sigmoid
        for name, score in (("weight", logits), ("confidence", given)):
            wrongness = torch.nan_to_num(-score.double(), nan=0.0).cpu().numpy()
            if changed.any() and not changed.all():
                record[f"{name}_auroc"] = float(roc_auc_score(changed, wrongness))
                record[f"{name}_ap"] = float(average_precision_score(changed, wrongness))
        for name, mask in (("clean", ~task.changed), ("corrupted", task.changed)):
            own = w[mask]
            record[f"weight_{name}"] = float(own.double().mean()) if len(own) else None
            record[f"histogram_{name}"] = torch.histc(own.float(), BINS, 0.0, 1.0).long().tolist()
        record["omega_norm"], record["d_norm"] = float(norm(omega)), float(norm(state.d))
        record["v_norm"] = None if state.memory is None else float(norm(state.memory))
        record["hypergradient_norm"] = None
        if isinstance(run.algorithm, Solver):
            gradient = run.algorithm.estimator.gradient(plain, state.at, state.memory, _for_trail(fixed, state))
            record["hypergradient_norm"] = float(norm(gradient))
        return record

    return measure


def _for_trail(xi: Sample, state: State) -> Sample:
    return xi._replace(hvp=Batches([xi.hvp] * len(state.at.trail))) if state.at.trail else xi


def warm_up(run: Run) -> None:
    """Takes a step and throws it away, so that what libraries load on their first call is not on the run's clock."""
    random = run.generator.get_state()
    run.problem.counting(lambda: run.algorithm.step(run.problem, run.start(), run.draw()))
    run.generator.set_state(random)


def execute(
    spec: RunSpec,
    *,
    checkpoint: Path | None = None,
    data_dir: Path | None = None,
    images: Images | None = None,
    device: torch.device | str = "cpu",
    engine: str = "auto",
    on_measure: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Does one run, on `images` if they are given, else on the spec's data set.

    Each record carries the run's name; the first also the spec and the facts that make the run repeatable.
    """
    task = make_task(spec.task, data_dir=data_dir, device=device, images=images)
    run, reweighting = prepare(spec, task)
    warm_up(run)
    measure = measurer(spec, task, run, reweighting)
    facts: dict[str, Any] = {
        "origin": task.origin,
        "changed_labels": int(task.changed.sum()),
        "initialisation": "torch default",
        "batches": "with replacement",
        "device": _device_name(torch.device(device)),
        "torch": torch.__version__,
    }
    records = train(
        run,
        steps=spec.steps,
        every=spec.every,
        measure=measure,
        checkpoint=checkpoint,
        budget_s=spec.budget_s,
        engine=engine,
        on_measure=on_measure,
    )
    head = {"run": spec.name, "spec": asdict(spec), **facts}
    return [head | r if i == 0 else {"run": spec.name} | r for i, r in enumerate(records)]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
