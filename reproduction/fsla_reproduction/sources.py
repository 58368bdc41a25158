"""Not in the paper: which sources of text to trust, learnt while a transformer trains on all of them.

Ten sources follow one grammar or another (`problems.sources`); a little trusted text follows the first. A run
trains the network and, in SOBA's order, learns a weight for each source, with default attention and products by
differences; another trains it alike with equal weights. Both are judged on fresh text of the trusted grammar.

ω moves by Adam with the step τ that suits plain training at the size. λ moves by Adam too, so that α is a step in the
logit whatever the scale of the loss: 0.05 goes from ½ to 0.95 in some sixty steps. v moves by plain steps, which must
stay below 2/L, where L is the largest curvature of G. With preset smoke β = 0.05 and 0.005 select the same sources. A
network of four layers, 128 wide, needed two things more: λ and v must wait until the loss begins to fall (β = 0.01 from
the first step let ‖v‖ grow to 17, of no use ever after; after 40 steps of waiting it stayed below 1), and λ's Adam must
forget large gradients within some twenty steps. With them β = 0.01 and 0.003 select the same sources there too; the
largest network has the smaller one.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsla._checks import pick, positive, whole_number
from fsla._tree import Tree, norm
from fsla.algorithms import Algorithm, Simultaneous, State, fixed
from fsla.problems import StepBatches, make_functional
from fsla.steps import Adam, Rates, Schedule, Scheduled, constant
from fsla_reproduction.folder import Folder, Record
from fsla_reproduction.job import Job, ReportShare
from fsla_reproduction.problems.sources import GRAMMARS, TRUSTED, SourceWeighting, Text, TextSpec, weights
from fsla_reproduction.problems.transformer import GPT2_SMALL, TINY, Transformer, TransformerSize, build_transformer
from fsla_reproduction.report import Claim, Summary, table
from fsla_reproduction.runs import LOCAL, Report, Workers, unseen

METHODS = ("learnt", "equal")
UP = 0.8
DOWN = 0.2

_LITTLE_TEXT = TextSpec(symbols=32, length=32, sequences=2000)


@dataclass(frozen=True)
class SourcesSpec:
    """One experiment: the network, the text, and the steps."""

    seeds: int = 1
    size: TransformerSize = TINY
    text: TextSpec = _LITTLE_TEXT
    batch: int = 16
    steps: int = 500
    every: int = 10
    alpha: float = 0.05
    tau: float = 3e-3
    beta: float = 0.05
    wait: int = 20
    """Steps before λ and v begin to move: the first ones of training are large, and tell nothing about the sources."""
    autocast: bool = False

    def __post_init__(self) -> None:
        for name in ("seeds", "batch", "steps", "every", "wait"):
            whole_number(getattr(self, name), name, "SourcesSpec")
        for name in ("alpha", "tau", "beta"):
            positive(getattr(self, name), name, "SourcesSpec")

    @property
    def dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.autocast else None


PRESETS = {
    "smoke": SourcesSpec(),
    "full": SourcesSpec(size=GPT2_SMALL, text=TextSpec(), batch=8, tau=3e-4, beta=0.003, wait=50, autocast=True),
}
"""A minute on two cores; and GPT-2's small size under bfloat16 autocast, for a GPU."""


def run(
    spec: SourcesSpec, folder: Folder, device: torch.device, report: Report = unseen, workers: Workers = LOCAL
) -> list[Record]:
    """Do the runs that the folder lacks; return the records of all."""
    gpu = device.type != "cpu"
    jobs = [
        Job(f"{method}-{seed:03d}", f"{method}, seed {seed}", partial(_execute, spec, method, seed, device), gpu=gpu)
        for seed in range(spec.seeds)
        for method in METHODS
    ]
    workers.do(folder, jobs, report)
    return folder.gather([job.name for job in jobs])


def _execute(spec: SourcesSpec, method: str, seed: int, device: torch.device, report: ReportShare) -> list[Record]:
    text = Text.draw(spec.text, seed, device)
    model = build_transformer(spec.size, seed=seed, device=device)
    omega = {name: p.detach() for name, p in model.named_parameters()}
    with torch.device("meta"):
        _, net = make_functional(Transformer(spec.size))  # without weights of its own: those of the run are the only
    weighting = SourceWeighting(net, text)
    problem = weighting.problem(autocast_dtype=spec.dtype)
    algorithm = _algorithm(spec, method)
    generator = torch.Generator(device).manual_seed(seed)
    mask_seeds = spec.size.dropout > 0

    def batch(tokens: Tensor) -> Tensor:
        return torch.randint(len(tokens), (spec.batch,), generator=generator, device=device)

    def draw(k: int) -> StepBatches:
        seed = k if mask_seeds else None
        return StepBatches.draw("shared", lambda: batch(text.tokens), lambda: batch(text.trusted), seed=seed)

    state = algorithm.init(problem, weighting.start(omega), draw(0))
    del model, omega
    measure = _Meter(spec, weighting)
    records = [measure(state, method, seed, 0.0)]
    seconds = 0.0
    started = time.perf_counter()
    for k in range(1, spec.steps + 1):
        state = algorithm.step(problem, state, draw(k))
        if k % spec.every and k != spec.steps:
            continue
        _wait(device)
        seconds += time.perf_counter() - started
        records.append(measure(state, method, seed, seconds))
        report(k / spec.steps)
        started = time.perf_counter()
    return records


def _algorithm(spec: SourcesSpec, method: str) -> Algorithm[Any]:
    step_sizes = _Late(constant(spec.alpha, spec.tau, spec.beta), spec.wait)
    if pick(method, dict.fromkeys(METHODS, method), "method") == "equal":
        return replace(fixed(step_sizes), inner_update=Adam())
    return Simultaneous(step_sizes=step_sizes, inner_update=Adam(), outer_update=Adam(b2=0.95))


@dataclass(frozen=True)
class _Late(Scheduled):
    """Step sizes with which λ and v stay where they are for the first `wait` steps."""

    of: Schedule
    wait: int

    def rates(self, k: int, state: None = None) -> Rates:
        rates = self.of.rates(k)
        return rates if k >= self.wait else rates._replace(outer_lr=0.0, adjoint_lr=0.0)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Meter:
    """Losses over fixed text: two sequences of each source, 16 trusted ones and 16 fresh ones."""

    def __init__(self, spec: SourcesSpec, weighting: SourceWeighting) -> None:
        self._dtype = spec.dtype
        self._weighting = weighting
        text = weighting.text
        self._probe = torch.cat([(text.source == s).nonzero()[:2, 0] for s in range(len(GRAMMARS))])

    @torch.no_grad()
    def _loss(self, omega: Tree, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, self._dtype, enabled=self._dtype is not None):
            parts = [self._weighting.sequence_losses(omega, part) for part in torch.split(tokens, 8)]
        return torch.cat(parts)

    def __call__(self, state: State, method: str, seed: int, seconds: float) -> Record:
        text = self._weighting.text
        omega = state.omega.value
        by_source = self._loss(omega, text.tokens[self._probe]).view(len(GRAMMARS), -1).mean(1)
        return {
            "run": method,
            "seed": seed,
            "step": state.step_count,
            "seconds": seconds,
            "weights": weights(state.lam.value).tolist(),
            "source_losses": by_source.tolist(),
            "training_loss": float(by_source.mean()),
            "trusted_loss": float(self._loss(omega, text.trusted[:16]).mean()),
            "held_out_loss": float(self._loss(omega, text.held_out[:16]).mean()),
            "v_norm": float(norm(state.v)) if state.v else None,
        }


def summarise(spec: SourcesSpec, records: list[Record]) -> Record:
    """The last record of each run, which sources ended up or down, and whether those are the right ones."""
    last = [r for r in records if r["step"] == spec.steps]
    ends = {f"{r['run']}-{r['seed']:03d}": r for r in last}
    results = []
    for r in (r for r in last if r["run"] == "learnt"):
        up = [s for s, w in enumerate(r["weights"]) if w > UP]
        down = [s for s, w in enumerate(r["weights"]) if w < DOWN]
        right = up == [s for s, grammar in enumerate(GRAMMARS) if grammar == TRUSTED] and len(up) + len(down) == len(
            GRAMMARS
        )
        results.append({"seed": r["seed"], "up": up, "down": down, "right": right})
    held_out = {m: statistics.median(r["held_out_loss"] for r in last if r["run"] == m) for m in METHODS}
    seconds = {m: statistics.median(r["seconds"] for r in last if r["run"] == m) for m in METHODS}
    return {"sources": results, "held_out_loss": held_out, "seconds": seconds, "ends": ends}


def markdown(spec: SourcesSpec, summary: Record) -> str:
    """summary.md."""
    ends = summary["ends"]
    rows = [(name, r["training_loss"], r["trusted_loss"], r["held_out_loss"], r["seconds"]) for name, r in ends.items()]
    lines = [
        f"- seed {one['seed']}: above {UP}: {_listed(one['up'])}; below {DOWN}: {_listed(one['down'])}; "
        + ("the sources of the trusted grammar, and no other" if one["right"] else "**not** as the grammars have it")
        for one in summary["sources"]
    ]
    learned = [r for r in ends.values() if r["run"] == "learnt"]
    weighted = [(s, grammar, *(f"{r['weights'][s]:.3f}" for r in learned)) for s, grammar in enumerate(GRAMMARS)]
    held_out = summary["held_out_loss"]
    return "\n".join(
        [
            "# Weights of ten sources of text, learnt with a transformer\n",
            f"{spec.size.layers} layers, {spec.size.width} wide, {spec.size.vocabulary} tokens, {spec.steps} steps on "
            f"{spec.batch} sequences of {spec.text.length} tokens; products by differences, default attention"
            + (", bfloat16 autocast. " if spec.autocast else ". ")
            + f"α = {spec.alpha:g} (Adam), τ = {spec.tau:g} (Adam), β = {spec.beta:g}.\n",
            "## Sources\n",
            *lines,
            "",
            table(["source", "grammar", *(f"weight, seed {r['seed']}" for r in learned)], weighted),
            "## Losses\n",
            f"Fresh text of the trusted grammar: {held_out['learnt']:.3f} with learnt weights, {held_out['equal']:.3f} "
            f"with equal ones (median over seeds; a model that knows the grammar has "
            f"{torch.tensor(spec.text.successors).log():.3f}).\n",
            table(["run", "training, all sources alike", "trusted", "fresh", "seconds"], rows),
        ]
    )


def _listed(sources: list[int]) -> str:
    return ", ".join(f"{s} ({GRAMMARS[s]})" for s in sources) or "none"


def claims(summary: Record) -> tuple[Claim, ...]:
    """What the experiment is to show, held or not."""
    sources = summary["sources"]
    held_out = summary["held_out_loss"]
    summary_text = "; ".join(f"seed {one['seed']}: up {_listed(one['up'])}" for one in sources)
    return (
        Claim(
            f"The sources of the trusted grammar end above {UP}, all others below {DOWN}",
            all(one["right"] for one in sources),
            summary_text,
        ),
        Claim(
            "Learnt weights give a lower loss on fresh text of the trusted grammar than equal ones",
            held_out["learnt"] < held_out["equal"],
            f"learnt {held_out['learnt']:.3f}, equal {held_out['equal']:.3f}",
        ),
    )


def reproduce(
    out: Path,
    preset: str,
    seeds: int,
    device: torch.device,
    report: Report = unseen,
    workers: Workers = LOCAL,
) -> tuple[list[Record], Summary]:
    """Do the runs that the folder lacks, and write the summary; return the records and the summary."""
    spec = replace(pick(preset, PRESETS, "preset"), seeds=seeds)
    folder = workers.open(out, "sources", spec)
    records = run(spec, folder, device, report, workers)
    return records, conclude(spec, records, folder)


def conclude(spec: SourcesSpec, records: list[Record], folder: Folder) -> Summary:
    """Write summary.json and summary.md; return what they hold."""
    numbers = summarise(spec, records)
    summary = Summary(claims(numbers), numbers, markdown(spec, numbers))
    folder.conclude(summary)
    return summary
