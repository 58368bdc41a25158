"""Wrong arguments for every public callable: an error in words, at once or at the first use."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fsla
from faults.saved import BATCHES, _lazy_run, inner_loss, new_optimizer, outer_loss
from faults.trials import SilentlyWrong, Trial, new_folder
from fsla import algorithms, contrib, data, distributed, hypergradients, problems, steps, train

CATEGORY = "API misuse: wrong arguments"

Values = dict[str, Any]
_NOTHING: Values = {"None": None, "an object": object()}
NOT_NEGATIVE: Values = {
    "text": "5",
    "a list": [1.0],
    "nan": math.nan,
    "an object": object(),
    "-1": -1.0,
    "inf": math.inf,
}
NUMBER: Values = {"text": "5", "a list": [1.0], "nan": math.nan, "an object": object()}
POSITIVE = NUMBER | {"-1": -1.0, "0": 0.0, "inf": math.inf}
FRACTION = NUMBER | {"-1": -1.0, "2": 2.0}
WHOLE: Values = {"text": "5", "a list": [1], "1.5": 1.5, "nan": math.nan, "an object": object()}
COUNT = WHOLE | {"-1": -1, "0": 0}
FROM_ZERO = WHOLE | {"-1": -1}
CALLABLE: Values = {"5": 5, "text": "f", "a list": [], "a tensor": torch.zeros(1)}
MODULE: Values = {"None": None, "5": 5, "text": "model", "a tensor": torch.zeros(3), "a class": nn.Linear}
NAME: Values = {"5": 5, "another": "no such name", "a list": [], "an object": object()}
PATH: Values = {"5": 5, "a list": [], "an object": object(), "a null byte": "a\0b", "1.5": 1.5}
ITERABLE: Values = {"5": 5, "an object": object()}
CALLABLES: Values = {"5": 5, "numbers": [5], "text": "f"}
OPTIMIZER: Values = {"5": 5, "text": "SGD", "a class": object, "a lambda": lambda p: 5, "uphill": None}
PROJECTION: Values = {"5": 5, "text": "box", "a list": []}
SIZES: Values = {"5": 5, "0.1": 0.1, "text": "auto", "a list": [0.1, 0.1, 0.1]}
UPDATE: Values = {"5": 5, "text": "sgd", "a class": steps.Momentum}
PROBLEM: Values = {"5": 5, "a lambda": lambda: 0, "None": None}
TREE: Values = {"None": None, "5": 5, "a tensor": torch.zeros(3), "text": {"w": "x"}, "empty": {}, "a list": [1]}
TABLE: Values = {"None": None, "5": 5, "a lambda": lambda: 0, "missing": "/nowhere/data.csv"}
COLUMN: Values = {"5": 5, "another": "no such column", "a list": ["x0"]}
COLUMNS: Values = {"5": 5, "another": ["no such column"], "numbers": [5]}

PARAMETERS: dict[str, Values] = {
    **dict.fromkeys(("inner_steps", "hvp_steps", "num_terms", "max_iter", "refresh_period", "period", "moves"), COUNT),
    **dict.fromkeys(("inner_batches", "outer_batches", "unroll_length", "outer_every", "block"), COUNT),
    **dict.fromkeys(("max_steps", "eval_every", "save_every", "save_total_limit", "patience"), COUNT),
    **dict.fromkeys(("num_samples", "world_size", "batch_size", "steps", "cv", "draws", "hidden"), COUNT),
    **dict.fromkeys(("rank", "seed", "max_rollbacks", "warm_up_steps", "warm_up", "review"), FROM_ZERO),
    **dict.fromkeys(("adjoint_lr", "max_adjoint_norm", "max_grad_norm", "max_norm"), POSITIVE),
    **dict.fromkeys(("radius", "weight", "rel_step", "step_size", "tol", "mu", "eps", "width"), POSITIVE),
    **dict.fromkeys(("max_seconds", "save_every_minutes", "tolerance", "rho", "bound", "scale", "fall"), POSITIVE),
    **dict.fromkeys(("c_tau", "c_beta", "c_eta", "inner_lr", "outer_lr", "delta"), NOT_NEGATIVE),
    **dict.fromkeys(("decay", "b1", "b2", "new_grad_weight", "average", "aggregation", "second", "floor"), FRACTION),
    **dict.fromkeys(("inner_loss", "outer_loss", "prox", "fixed_point_map", "sample_weight"), CALLABLE),
    **dict.fromkeys(("per_sample_loss", "eval_fn", "row_index", "model_outputs", "collate_fn"), CALLABLE),
    **dict.fromkeys(("regularizer", "progress_callback", "should_stop", "progress", "matvec"), CALLABLE),
    **dict.fromkeys(("hvp_method", "algorithm", "momentum", "adjoint_at", "engine", "method", "mode"), NAME),
    **dict.fromkeys(("batch_norm", "relabel", "missing", "task", "device", "resume"), NAME),
    **dict.fromkeys(("output_dir", "path", "folder"), PATH),
    **dict.fromkeys(("inner_loader", "outer_loader", "batches_to_cycle"), ITERABLE),
    **dict.fromkeys(("callbacks", "lr_schedulers"), CALLABLES),
    **dict.fromkeys(("inner_optimizer", "outer_optimizer", "adjoint_optimizer"), OPTIMIZER),
    **dict.fromkeys(("projection", "onto"), PROJECTION),
    **dict.fromkeys(("step_sizes", "of"), SIZES),
    **dict.fromkeys(("outer_update", "update", "inner_update", "adjoint_update"), UPDATE),
    **dict.fromkeys(("problem",), PROBLEM),
    **dict.fromkeys(("lam", "omega", "like"), TREE),
    **dict.fromkeys(("source", "trusted"), TABLE),
    **dict.fromkeys(("label", "group", "checked", "trusted_column", "id", "annotator", "image"), COLUMN),
    **dict.fromkeys(("features", "ignore", "label_columns", "text"), COLUMNS),
    "model": MODULE,
    "outer": MODULE,
    "autocast_dtype": {"text": "bfloat16", "5": 5, "an object": object()},
    "damping": POSITIVE,
    "strategies": {"5": 5, "another": ["no such strategy"], "numbers": [5], "empty": [], "text": "all_data"},
    "learners": {"5": 5, "another": ["no such learner"], "numbers": [5], "empty": [], "text": "linear"},
    "random_state": {"text": "0", "1.5": 1.5, "a list": [0], "-1": -1},
    "groups": {"5.5": 5.5, "None": None, "0": 0, "-1": -1, "empty": [], "twice": ["a", "a"]},
    "low": NUMBER,
    "high": NUMBER,
    "init": {"text": "x", "nan": math.nan, "a list": [1]},
    "parts": {"5": 5, "empty": [], "None": None},
    "index_range": {"5": 5, "None": None, "a range": range(5)},
    "num_steps": COUNT,
    "optimizer": {"5": 5, "None": None, "an SGD": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)},
    "run_config": {"5": 5, "an object in it": {"a": object()}, "numbers as names": {1: 2}},
    "image_size": COUNT,
    "run": {"5": 5, "None": None},
    "encoder": {"missing": "/nowhere", "5": 5},
}
"""Bad values of parameters, by name."""

EXCEPT = {
    ("GroupWeights", "init"): {"text": "x", "unknown": {"c": 1.0}, "negative": {"a": -1.0, "b": 1.0}},
    ("Automatic", "block"): COUNT,
    ("reshard", "world_size"): COUNT | {"more than samples": 1000},
    ("load_checkpoint", "device"): {"5": 5.5, "another": "abacus", "a list": []},
    ("load_shards", "device"): {"5": 5.5, "another": "abacus", "a list": []},
    ("largest_eigenvalue", "seed"): {"text": "5", "an object": object(), "1.5": 1.5},
    ("save_shards", "folder"): {name: PATH[name] for name in ("5", "a list", "an object", "1.5")},
    ("constant", "adjoint_lr"): NOT_NEGATIVE,
    ("Schedule", "adjoint_lr"): NOT_NEGATIVE,
    ("constant", "new_grad_weight"): NOT_NEGATIVE,  # More than 1 counts as 1.
    ("Schedule", "new_grad_weight"): NOT_NEGATIVE,
    ("DampedProblem", "damping"): NOT_NEGATIVE,
    ("hypergradient", "seed"): WHOLE,
    ("vrbo", "inner_steps"): FROM_ZERO,
    ("Sampler", "seed"): WHOLE,
    ("Sampler", "outer"): {"5": 5, "an object": object()},
    ("IndexRange", "num_samples"): FROM_ZERO,
    ("LazyRowOptimizer", "index_range"): {"5": 5, "a range": range(5)},
    ("clean", "trusted"): {"5": 5, "a lambda": lambda: 0, "missing": "/nowhere/data.csv"},
    ("Problem", "problem"): PROBLEM,
    ("penalty", "tolerance"): POSITIVE,
    ("clean", "text"): COLUMNS,
    ("clean", "image"): COLUMN,
    ("accbo", "gamma"): FRACTION,
    ("bsa", "growth"): FRACTION | {"2": -3.0},
    ("hoag", "decay"): FRACTION,
}
SKIPPED = {
    ("DataParallelReducer", "model"),
    ("Automatic", "outer"),
    ("save_shards", "group"),
    ("bda", "aggregation"),  # A positive number of any size.
}
OPTIONAL_ZERO = {"warm_up_steps"}


def toy() -> fsla.Problem:
    """Return G = ½ ‖ω - λ‖² and F = ½ ‖ω - 1‖²."""
    return fsla.Problem(
        lambda lam, omega, batch: 0.5 * (omega["w"] - lam["x"]).square().sum(),
        lambda lam, omega, batch: 0.5 * (omega["w"] - 1).square().sum(),
    )


POINT = fsla.Point({"x": torch.zeros(3)}, {"w": torch.ones(3)})


def _step(algorithm: Any, point: Any = POINT) -> None:
    """Take two steps of an algorithm."""
    batches = fsla.StepBatches.of(*[[None] * max(1, n) for n in algorithm.batches])
    problem = toy()
    state = algorithm.init(problem, point, batches)
    for _ in range(2):
        state = algorithm.step(problem, state, batches)


def _step_module(bilevel: Any) -> None:
    for _ in range(2):
        bilevel.step(BATCHES[0], BATCHES[1])


def _use_update(update: Any) -> None:
    variable = update.init({"w": torch.tensor([1.0, 2.0])})
    update(variable, {"w": torch.tensor([0.5, 0.5])}, 0.1)


def _use_problem(problem: Any) -> None:
    view = problem.inner_at(POINT, fsla.Batch(None))
    view.hvp({"w": torch.ones(3)})
    assert view.grad_omega["w"].isfinite().all()


def _scratch(name: str) -> Path:
    return new_folder() / name


@cache
def table() -> Any:
    """Return a small table with a checked column."""
    import pandas as pd

    rng = np.random.default_rng(0)
    x = rng.standard_normal(60)
    label = np.where(x > 0, "a", "b")
    frame = pd.DataFrame({"x0": x.astype(str), "label": label, "source": ["s", "t"] * 30})
    frame["checked"] = np.where(np.arange(60) < 30, label, "")
    return frame


def _fit_estimator(estimator: Any) -> None:
    x = table()[["x0"]].astype(float).to_numpy()
    checked = table()["checked"].replace("", None).to_numpy()
    groups = {"groups": table()["source"].to_numpy()} if isinstance(estimator, data.GroupWeigher) else {}
    estimator.fit(x, table()["label"].to_numpy(), y_checked=checked, **groups)


_MODULE = {"inner_loss": inner_loss, "outer_loss": outer_loss}
_FAST = {"strategies": ["trusted_only"], "learners": ["linear"]}
_NO_USE: Callable[[Any], None] = lambda result: None  # noqa: E731 (a default)


def _module_arguments() -> dict[str, Any]:
    return {"model": nn.Linear(2, 1), "outer": fsla.SampleWeights(4), **_MODULE}


def _weighted() -> dict[str, Any]:
    return {
        "per_sample_loss": lambda omega, batch: (omega["w"] - 1).square(),
        "sample_weight": lambda lam, batch: lam["x"].sigmoid(),
        "outer_loss": lambda lam, omega, batch: omega["w"].square().sum(),
    }


def _new_shards() -> Path:
    folder = _scratch("shards")
    contrib.save_shards(folder, _lazy_run(0))
    return folder


def _lazy_arguments() -> dict[str, Any]:
    from lazy_rows_program import weighted

    problem, at = weighted()
    return {
        "algorithm": algorithms.soba(steps.constant(1.0, 0.1, 0.1)),
        "problem": problem,
        "at": at,
        "batches": fsla.StepBatches.shared(torch.arange(5), torch.arange(5)),
    }


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], Callable[[Any], None]]] = {
    "SOBA": (fsla.SOBA, _module_arguments, _step_module),
    "MASOBA": (fsla.MASOBA, _module_arguments, _step_module),
    "FSLA": (fsla.FSLA, _module_arguments, _step_module),
    "BilevelOptimizer": (fsla.BilevelOptimizer, _module_arguments, _step_module),
    "fit": (
        fsla.fit,
        lambda: {
            "optimizer": new_optimizer(),
            "inner_loader": BATCHES,
            "outer_loader": BATCHES,
            "max_steps": 3,
            "progress_bar": False,
        },
        _NO_USE,
    ),
    "GroupWeights": (fsla.GroupWeights, lambda: {"groups": ["a", "b"]}, lambda w: w(["a"])),
    "SampleWeights": (fsla.SampleWeights, lambda: {"num_samples": 4}, lambda w: w(torch.tensor([0]))),
    "save_checkpoint": (train.save_checkpoint, lambda: {"path": _scratch("x"), "value": 1}, _NO_USE),
    "load_checkpoint": (train.load_checkpoint, lambda: {"path": _saved_checkpoint()}, _NO_USE),
    "hypergradient": (
        fsla.hypergradient,
        lambda: {"problem": toy(), "at": POINT, "inner_batch": None, "outer_batch": None},
        _NO_USE,
    ),
    "Problem": (
        fsla.Problem,
        lambda: {"inner_loss": toy().inner_loss, "outer_loss": toy().outer_loss},
        _use_problem,
    ),
    "FixedPointProblem": (
        fsla.FixedPointProblem,
        lambda: {
            "fixed_point_map": lambda lam, omega, batch: {"w": 0.5 * omega["w"] + lam["x"]},
            "outer_loss": lambda lam, omega, batch: omega["w"].square().sum(),
        },
        lambda problem: problem.inner_at(POINT, fsla.Batch(None)).grad_omega,
    ),
    "DampedProblem": (fsla.DampedProblem, lambda: {"problem": toy(), "damping": 0.1}, _use_problem),
    "FiniteDifferenceProblem": (fsla.FiniteDifferenceProblem, lambda: {"problem": toy()}, _use_problem),
    "CountedProblem": (fsla.CountedProblem, lambda: {"problem": toy()}, _use_problem),
    "GaussNewtonProblem": (fsla.GaussNewtonProblem, lambda: {"problem": toy()}, _NO_USE),
    "WeightedLossProblem": (
        fsla.WeightedLossProblem,
        _weighted,
        lambda p: p.inner_at(POINT, fsla.Batch(None)).grad_omega,
    ),
    "make_functional": (fsla.make_functional, lambda: {"model": nn.Linear(2, 1)}, _NO_USE),
    "Point": (
        fsla.Point,
        lambda: {"lam": {"x": torch.zeros(3)}, "omega": {"w": torch.zeros(3)}},
        lambda point: algorithms.soba(steps.constant(0.1, 0.1, 0.1)).init(
            toy(), point, fsla.StepBatches.shared(None, None)
        ),
    ),
    "MicroBatches": (fsla.MicroBatches, lambda: {"parts": [1, 2]}, _NO_USE),
    "LazyRowOptimizer": (fsla.LazyRowOptimizer, _lazy_arguments, _NO_USE),
    "save_shards": (contrib.save_shards, lambda: {"folder": _scratch("s"), "run": _lazy_run(0)}, _NO_USE),
    "load_shards": (
        contrib.load_shards,
        lambda: {"folder": _new_shards(), "index_range": distributed.IndexRange(101)},
        _NO_USE,
    ),
    "reshard": (contrib.reshard, lambda: {"folder": _new_shards(), "world_size": 2}, _NO_USE),
    "IndexRange": (distributed.IndexRange, lambda: {"num_samples": 10}, len),
    "ShardedSampler": (
        distributed.ShardedSampler,
        lambda: {"index_range": distributed.IndexRange(10), "batch_size": 2, "seed": 0},
        lambda sampler: sampler(),
    ),
    "Sampler": (
        problems.Sampler,
        lambda: {"spec": fsla.BatchSpec(), "inner": range(3), "outer": range(3)},
        lambda sampler: sampler(),
    ),
    "cycle": (problems.cycle, lambda: {"batches": [1]}, next),
    "largest_eigenvalue": (
        hypergradients.largest_eigenvalue,
        lambda: {"matvec": lambda v: v, "like": {"w": torch.ones(3)}},
        _NO_USE,
    ),
    "LabelCleaner": (data.LabelCleaner, lambda: dict(_FAST), _fit_estimator),
    "GroupWeigher": (data.GroupWeigher, lambda: dict(_FAST), _fit_estimator),
    "clean": (data.clean, lambda: {"source": table(), "checked": "checked", **_FAST}, _NO_USE),
    "load_model": (data.load_model, lambda: {"path": _scratch("no such file")}, _NO_USE),
}
_UPDATES = ("Momentum", "Adam", "Adaptive", "ScaleFree", "Clipped", "Projected", "Proximal")
_STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "constant": lambda: {"outer_lr": 0.1, "inner_lr": 0.1, "adjoint_lr": 0.1},
    "Schedule": lambda: {"outer_lr": 0.1, "inner_lr": 0.1, "adjoint_lr": 0.1},
    "inverse_sqrt": dict,
    "constant_over_horizon": lambda: {"steps": 10, "delta": 1.0, "c_tau": 0.1, "c_beta": 0.1, "c_eta": 0.1},
    "PeriodicRefresh": lambda: {"of": steps.constant(0.1, 0.1, 0.1), "period": 3},
    "Momentum": dict,
    "Adam": dict,
    "Adaptive": dict,
    "ScaleFree": dict,
    "Clipped": lambda: {"max_norm": 1.0},
    "Projected": lambda: {"onto": steps.Box(0, 1)},
    "Proximal": lambda: {"prox": steps.SoftThreshold(1.0)},
    "Ball": lambda: {"radius": 1.0},
    "Box": lambda: {"low": 0.0, "high": 1.0},
    "SoftThreshold": lambda: {"weight": 1.0},
    "Automatic": dict,
}
_SOLVERS: dict[str, dict[str, Any]] = {
    "ConjugateGradient": {"hvp_steps": 3},
    "Neumann": {"num_terms": 3, "adjoint_lr": 0.1},
    "RandomNeumann": {"num_terms": 3, "adjoint_lr": 0.1},
    "Identity": {"adjoint_lr": 0.1},
    "ReverseUnroll": {},
    "Tracked": {},
    "WarmStartCG": {"hvp_steps": 3},
}


def _rates(sizes: Any) -> None:
    if isinstance(sizes, steps.Scheduled):
        numbers = [float(x) for k in (0, 5) for x in sizes.rates(k)]
        if not all(map(math.isfinite, numbers)) or min(numbers) < 0:
            raise SilentlyWrong(f"step sizes {numbers}")


for _name, _arguments in _STEPS.items():
    _use = _use_update if _name in _UPDATES else _rates if _name[0].islower() or "Sched" in _name else _NO_USE
    if _name in ("Ball", "Box"):
        _use = lambda projection: projection({"w": torch.ones(2)})  # noqa: E731
    if _name == "SoftThreshold":
        _use = lambda projection: projection({"w": torch.ones(2)}, 0.1)  # noqa: E731
    CALLS[_name] = (getattr(steps, _name), _arguments, _use)
for _name, _fixed in _SOLVERS.items():
    CALLS[_name] = (getattr(hypergradients, _name), partial(dict, _fixed), _NO_USE)


def _algorithm_arguments(name: str) -> dict[str, Any]:
    parameters = inspect.signature(algorithms.get_algorithm(name)).parameters
    arguments: dict[str, Any] = {}
    if "step_sizes" in parameters:
        arguments["step_sizes"] = steps.constant(0.1, 0.1, 0.1)
    return arguments | ({"max_adjoint_norm": 10.0} if "max_adjoint_norm" in parameters else {})


for _name in algorithms.list_algorithms():
    CALLS[f"algorithms.{_name}"] = (algorithms.get_algorithm(_name), partial(_algorithm_arguments, _name), _step)


@cache
def _saved_checkpoint() -> Path:
    path = _scratch("x")
    train.save_checkpoint(path, {"a": torch.zeros(3)})
    return path


class _Uphill(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, maximize=True)


def trials(seed: int) -> Iterator[Trial]:
    """Yield every bad value of every parameter; the seed changes nothing."""
    for name, (function, valid, use) in CALLS.items():
        yield Trial(f"{CATEGORY}", f"{name}: right arguments", _right(function, valid, use, name))
        short = name.rpartition(".")[2]
        names = dict.fromkeys(inspect.signature(function).parameters)
        if "options" in names:
            names |= dict.fromkeys(inspect.signature(fsla.BilevelOptimizer).parameters)
        for parameter in names:
            values = EXCEPT.get((short, parameter), PARAMETERS.get(parameter))
            if values is None or (short, parameter) in SKIPPED:
                continue
            for label, value in values.items():
                if parameter.endswith("_optimizer") and label == "uphill":
                    value = _Uphill
                call = _misuse(function, valid, use, parameter, value)
                yield Trial(CATEGORY, f"{name}({parameter}={label})", call)
    yield from _calls()


def _right(
    function: Callable[..., Any], valid: Callable[[], Any], use: Callable[[Any], None], name: str
) -> Callable[[], None]:
    def run() -> None:
        if name != "load_model":
            use(function(**valid()))

    return run


def _misuse(
    function: Callable[..., Any], valid: Callable[[], Any], use: Callable[[Any], None], parameter: str, value: Any
) -> Callable[[], None]:
    def run() -> None:
        use(function(**{**valid(), parameter: value}))
        raise SilentlyWrong(f"{parameter}={value!r} was accepted")

    return run


def _calls() -> Iterator[Trial]:
    """Yield misuse of objects that were made rightly."""
    weights = fsla.GroupWeights(["a", "b"])
    samples = fsla.SampleWeights(4)
    cases: dict[str, Callable[[], Any]] = {
        "GroupWeights()('c')": lambda: weights(["c"]),
        "GroupWeights()(-1)": lambda: weights(torch.tensor([-1])),
        "GroupWeights()(2)": lambda: weights(torch.tensor([2])),
        "GroupWeights()(0.5)": lambda: weights(torch.tensor([0.5])),
        "GroupWeights()(None)": lambda: weights(None),
        "SampleWeights()(-1)": lambda: samples(torch.tensor([-1])),
        "SampleWeights()(4)": lambda: samples(torch.tensor([4])),
        "SampleWeights()(0.5)": lambda: samples(torch.tensor([0.5])),
        "SampleWeights()(text)": lambda: samples("a"),
        "ProductWeights()": lambda: fsla.ProductWeights(),
        "ProductWeights(5)": lambda: fsla.ProductWeights(5),
        "step(DataLoader)": lambda: new_optimizer().step(BATCHES[0], torch.utils.data.DataLoader(torch.arange(4))),
        "step(ended iterator)": lambda: new_optimizer().step(BATCHES[0], iter([])),
        "step(seed='x')": lambda: new_optimizer().step(BATCHES[0], BATCHES[0], seed="x"),
        "step without losses": lambda: fsla.SOBA(nn.Linear(2, 1), samples).step(1, 2),
        "backward(5, 5) without losses": lambda: fsla.SOBA(nn.Linear(2, 1), samples).backward(5, 5),
        "one loss": lambda: fsla.SOBA(nn.Linear(2, 1), samples, inner_loss=inner_loss),
        "lr=": lambda: fsla.SOBA(nn.Linear(2, 1), samples, lr=0.1, **_MODULE),
        "unknown=": lambda: fsla.SOBA(nn.Linear(2, 1), samples, unknown=0.1, **_MODULE),
        "hypergradient before the first step": lambda: new_optimizer().hypergradient,
        "param_groups": lambda: new_optimizer().param_groups,
        "inner loss that is not a scalar": lambda: _step_module(
            fsla.SOBA(
                nn.Linear(2, 1),
                fsla.SampleWeights(4),
                inner_loss=lambda model, outer, i: model(torch.ones(3, 2)),
                outer_loss=outer_loss,
            )
        ),
        "inner loss that is a float": lambda: _step_module(
            fsla.SOBA(
                nn.Linear(2, 1),
                fsla.SampleWeights(4),
                inner_loss=lambda model, outer, i: 1.0,
                outer_loss=outer_loss,
            )
        ),
        "inner loss without the model": lambda: _step_module(
            fsla.SOBA(
                nn.Linear(2, 1),
                fsla.SampleWeights(4),
                inner_loss=lambda model, outer, i: outer(i).sum(),
                outer_loss=outer_loss,
            )
        ),
        "inner loss without the outer variable": lambda: _step_module(
            fsla.SOBA(
                nn.Linear(2, 1),
                fsla.SampleWeights(4),
                inner_loss=lambda model, outer, i: model(torch.ones(3, 2)).square().sum(),
                outer_loss=outer_loss,
            )
        ),
        "outer loss that is detached": lambda: _step_module(
            fsla.SOBA(
                nn.Linear(2, 1),
                fsla.SampleWeights(4),
                inner_loss=inner_loss,
                outer_loss=lambda model, outer, i: outer_loss(model, outer, i).detach(),
            )
        ),
        "model without parameters": lambda: fsla.SOBA(nn.ReLU(), samples, **_MODULE),
        "outer without parameters": lambda: fsla.SOBA(nn.Linear(2, 1), nn.ReLU(), **_MODULE),
        "outer that is the model": lambda: _same_module(),
        "parameters of integers": lambda: fsla.SOBA(
            nn.Linear(2, 1), nn.Parameter(torch.zeros(3, dtype=torch.long), requires_grad=False), **_MODULE
        ),
        "inner_optimizer of another model": lambda: fsla.SOBA(
            nn.Linear(2, 1), samples, inner_optimizer=torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1), **_MODULE
        ),
        "fit(callbacks that raise nothing but are classes)": lambda: fsla.fit(
            new_optimizer(), BATCHES, BATCHES, max_steps=2, eval_every=1, callbacks=["x"], progress_bar=False
        ),
        "fit(eval_fn that returns text)": lambda: fsla.fit(
            new_optimizer(), BATCHES, BATCHES, max_steps=2, eval_fn=lambda model: "good", progress_bar=False
        ),
        "fit(eval_fn that returns None)": lambda: fsla.fit(
            new_optimizer(), BATCHES, BATCHES, max_steps=2, eval_fn=lambda model: None, progress_bar=False
        ),
        "fit(empty loader)": lambda: fsla.fit(new_optimizer(), [], BATCHES, max_steps=2, progress_bar=False),
        "fit(generator)": lambda: fsla.fit(
            new_optimizer(), (b for b in BATCHES), BATCHES, max_steps=5, progress_bar=False
        ),
        "get_algorithm(5)": lambda: algorithms.get_algorithm(5),
        "get_algorithm([])": lambda: algorithms.get_algorithm([]),
        "load_state_dict(None)": lambda: new_optimizer().load_state_dict(None),
        "load_state_dict({})": lambda: new_optimizer().load_state_dict({}),
        "check_hypergradient(5)": lambda: fsla.check_hypergradient(5),
        "check_hypergradient(num_steps='x')": lambda: fsla.check_hypergradient(toy(), POINT, None, None, num_steps="x"),
        "predict before fit": lambda: data.LabelCleaner().predict([[1.0]]),
        "fit of nothing": lambda: data.LabelCleaner(**_FAST).fit([], [], y_checked=[]),
        "fit of unequal lengths": lambda: data.LabelCleaner(**_FAST).fit([[1.0]] * 4, ["a"] * 3, y_checked=["a"] * 4),
        "fit of text as X": lambda: data.LabelCleaner(**_FAST).fit("abc", ["a"], y_checked=["a"]),
        "fit of one class": lambda: data.LabelCleaner(**_FAST).fit([[1.0]] * 9, ["a"] * 9, y_checked=["a"] * 9),
        "fit without checked rows": lambda: data.LabelCleaner(**_FAST).fit([[1.0], [2.0]] * 9, ["a", "b"] * 9),
        "box upside down": lambda: steps.Box(1.0, 0.0),
        "rank beyond the world": lambda: distributed.IndexRange(10, rank=3, world_size=2),
        "parts(-1, 2)": lambda: distributed.parts(-1, 2),
        "parts(4, 0)": lambda: distributed.parts(4, 0),
        "parts('x', 2)": lambda: distributed.parts("x", 2),
        "config outer_every=0": lambda: _config(outer_every=0),
        "config weights=5": lambda: _config(weights=5),
        "config batch size 'x'": lambda: _config(trusted_batch_size="x"),
        "config options=5": lambda: _config(options=5),
        "weigh_groups of an unknown column": lambda: data.weigh_groups(
            table(), label="nope", group="source", trusted=table()
        ),
    }
    for name, call in cases.items():
        yield Trial(CATEGORY, name, _refused(call))


def _same_module() -> None:
    model = nn.Linear(2, 1)
    _step_module(fsla.SOBA(model, model, **_MODULE))


def _config(**changes: Any) -> Any:
    from fsla.integrations import BilevelConfig

    return BilevelConfig(**{"weights": fsla.GroupWeights(["a", "b"]), "trusted_dataset": [1, 2], **changes})


def _refused(call: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        raise SilentlyWrong(f"it returned {call()!r}")

    return run
