"""What a hyper-iteration costs: cases, candidates (ours, the peers', JAX's), and the race between them."""

from fsla_benchmarks.steps.cases import PROBLEMS, Case, case
from fsla_benchmarks.steps.race import Row, lines, save
from fsla_benchmarks.steps.request import BenchRequest
from fsla_benchmarks.steps.table import SCALINGS, measure, scaling
from fsla_benchmarks.steps.transformer import measure_transformer

__all__ = [
    "PROBLEMS",
    "SCALINGS",
    "BenchRequest",
    "Case",
    "Row",
    "case",
    "lines",
    "measure",
    "measure_transformer",
    "save",
    "scaling",
]
