"""Section 6.2: one run of data hyper-cleaning, from a frozen spec to its records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn

from fsla._checks import pick, positive, whole_number
from fsla._tree import norm
from fsla.algorithms import Algorithm, Alternating, AlternatingState, State
from fsla.problems import CountedProblem, GaussNewtonProblem, Oracles, Point, Sampler, StepBatches
from fsla.problems._batches import Mode
from fsla.steps import inverse_sqrt
from fsla.train import Record
from fsla_reproduction.algorithm_run import Run, run_algorithm
from fsla_reproduction.datasets import CleaningTask, Images, TaskSpec, make_task
from fsla_reproduction.methods import Bp, Fsla, Method, Oracle
from fsla_reproduction.problems.networks import MODELS, RIDGE, build
from fsla_reproduction.problems.reweighting import Reweighting, weights

BINS = 20
SAMPLES = {
    "independent": "five draws",
    "grouped": "one draw for ω and v, another for λ",
    "shared": "one draw for everything",
}


@dataclass(frozen=True)
class RunSpec:
    """One run. The defaults are the paper's (Appendix E), and the readings where it is silent.

    `budget_s` stops a run by the clock, so that its records depend on the machine; `budget_calls` by oracle calls.
    """

    task: TaskSpec = field(default_factory=TaskSpec)
    method: Method = field(default_factory=Fsla)
    model: str = "cnn"
    steps: int = 2000
    every: int = 50
    batch: int = 256
    delta: float = 1000.0
    c_tau: float = 1e-3
    c_beta: float = 1e-4
    c_eta: float = 9e-4
    samples: Mode = "independent"
    budget_s: float | None = None
    budget_calls: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.task, TaskSpec):
            raise TypeError(f"The 'task' of RunSpec must be a TaskSpec. Got {self.task!r} instead.")
        if not isinstance(self.method, Method):
            raise TypeError(
                "The 'method' of RunSpec must be one of Fsla(), Bp(T), Ns(T, K), Cg(T, K), NoCleaning() and Oracle(). "
                f"Got {self.method!r} instead."
            )
        pick(self.model, MODELS, "model")
        pick(self.samples, SAMPLES, "sampling mode (samples)")
        for name in ("steps", "every", "batch"):
            whole_number(getattr(self, name), name, "RunSpec")
        for name in ("delta", "c_tau", "c_beta", "c_eta"):
            positive(getattr(self, name), name, "RunSpec")
        positive(self.budget_s, "budget_s", "RunSpec", optional=True)
        if self.budget_calls is not None:
            whole_number(self.budget_calls, "budget_calls", "RunSpec")

    @property
    def name(self) -> str:
        """A file name that no other run has."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:10]
        return f"{self.task.dataset}-{self.model}-{self.method}-seed{self.task.seed}-{digest}"

    def with_seed(self, seed: int) -> RunSpec:
        return replace(self, task=replace(self.task, seed=seed))


def algorithm(spec: RunSpec) -> Algorithm[Any]:
    """The algorithm of a spec."""
    return spec.method.algorithm(inverse_sqrt(spec.delta, spec.c_tau, spec.c_beta, spec.c_eta))


def problem(spec: RunSpec, reweighting: Reweighting) -> Oracles:
    """The problem of a spec, as its algorithm sees it."""
    newton = isinstance(spec.method, Fsla) and spec.method.curvature == "gauss-newton"
    return GaussNewtonProblem(reweighting.losses()) if newton else reweighting.losses()


def sampler(spec: RunSpec, task: CleaningTask, generator: torch.Generator) -> Sampler:
    """The source of a spec's batches: indices, drawn with replacement. BP differentiates the steps that were taken."""

    def indices(n: int) -> Tensor:
        return torch.randint(n, (spec.batch,), generator=generator, device=generator.device)

    def inner() -> Tensor:
        return indices(len(task.train_y))

    def outer() -> Tensor:
        return indices(len(task.valid_y))

    return Sampler(algorithm(spec).batches, inner, outer, spec.samples, steps_again=isinstance(spec.method, Bp))


def prepare(spec: RunSpec, task: CleaningTask) -> tuple[Run, Reweighting]:
    """The run of a spec on a task: model, problem, algorithm and sampler, all from the spec's seed."""
    device = task.train_x.device
    model = build(spec.model, task.train_x.shape[-1], task.classes, seed=spec.task.seed, device=device)
    ridge = RIDGE.get(spec.model, 0.0)
    reweighting = Reweighting(model, task.train_x, task.train_y, task.valid_x, task.valid_y, ridge=ridge)
    generator = torch.Generator(device).manual_seed(spec.task.seed)
    source = sampler(spec, task, generator)
    solver = algorithm(spec)
    seen = problem(spec, reweighting)

    def start() -> State:
        at = reweighting.start()
        if isinstance(spec.method, Oracle):
            at = Point({"weight_logits": torch.where(task.changed, -40.0, 40.0)}, at.omega)
        state: State = solver.init(seen, at, StepBatches.draw("independent", source.inner, source.outer))
        return state

    return Run(solver, CountedProblem(seen, size=_size), generator, start, source), reweighting


def _size(indices: Any) -> int:
    return len(indices)


def measurer(spec: RunSpec, task: CleaningTask, run: Run, reweighting: Reweighting) -> Callable[[State], Record]:
    """What is measured at a state. Draws nothing from the run's generator, and counts no oracle of the run."""
    generator = torch.Generator().manual_seed(spec.task.seed + 10**6)
    index = torch.randint(len(task.train_y), (spec.batch,), generator=generator).to(task.train_y.device)
    outer = torch.randint(len(task.valid_y), (spec.batch,), generator=generator).to(task.train_y.device)
    fixed = StepBatches.shared(index, outer)
    plain = problem(spec, reweighting)
    changed = task.changed.cpu().numpy()

    def measure(state: State) -> Record:
        omega = state.omega.value
        learned = weights(state.lam.value)
        valid = reweighting.scores(omega, task.valid_x)
        train_p = reweighting.scores(omega, task.train_x).softmax(1)
        p_given = train_p.gather(1, task.train_y[:, None])[:, 0]
        record: Record = {
            "valid_loss": float(nn.functional.cross_entropy(valid, task.valid_y)),
            "valid_accuracy": float((valid.argmax(1) == task.valid_y).double().mean()),
            "test_accuracy": float((reweighting.scores(omega, task.test_x).argmax(1) == task.test_y).double().mean()),
        }
        logits = state.lam.value["weight_logits"]  # the weights' order, without the ties of a saturated sigmoid
        for name, score in (("weight", logits), ("confidence", p_given)):
            wrongness = torch.nan_to_num(-score.double(), nan=0.0).cpu().numpy()
            if changed.any() and not changed.all():
                record[f"{name}_auroc"] = float(roc_auc_score(changed, wrongness))
                record[f"{name}_ap"] = float(average_precision_score(changed, wrongness))
        for name, mask in (("clean", ~task.changed), ("corrupted", task.changed)):
            masked = learned[mask]
            record[f"weight_{name}"] = float(masked.double().mean()) if len(masked) else None
            record[f"histogram_{name}"] = torch.histc(masked.float(), BINS, 0.0, 1.0).long().tolist()
        record["omega_norm"] = float(norm(omega))
        record["d_norm"] = float(norm(state.direction))
        record["v_norm"] = float(norm(state.v)) if state.v else None
        record["hypergradient_norm"] = None
        solver = run.algorithm
        if isinstance(solver, Alternating) and isinstance(state, AlternatingState):
            step = solver.context(plain, state.step_count, state.measured, fixed, update_buffers=False)
            gradient = solver.estimator.gradient(step, state.position)
            record["hypergradient_norm"] = float(norm(gradient))
        return record

    return measure


def warm_up(run: Run) -> None:
    """Take a step and throw it away, so that what libraries load on their first call is not on the run's clock."""
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
    """Do one run, on `images`, or by default on the spec's data set. `checkpoint` is a separate folder.

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
    result = run_algorithm(
        run,
        max_steps=spec.steps,
        eval_fn=measure,
        eval_every=spec.every,
        output_dir=checkpoint,
        callbacks=[lambda run, record: on_measure(record)],
        run_config=identity(spec, task),
        max_seconds=spec.budget_s,
        max_oracle_calls=spec.budget_calls,
        engine=engine,
    )
    head = {"run": spec.name, "spec": asdict(spec), **facts}
    return [head | r if i == 0 else {"run": spec.name} | r for i, r in enumerate(result.records)]


def identity(spec: RunSpec, task: CleaningTask) -> dict[str, Any]:
    """What a run is of: a checkpoint may be resumed only by the run of the same spec on the same data."""
    return {"spec": asdict(spec), "data": checksum(task)}


def checksum(task: CleaningTask) -> str:
    """A digest of the task's tensors: their names, types, shapes and every value, whatever device they are on."""
    digest = hashlib.sha256()
    for name, value in task._asdict().items():
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
