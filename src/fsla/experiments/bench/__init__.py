"""What a hyper-iteration costs: cases, candidates (ours, the peers', JAX's), and the race between them."""

from fsla.experiments.bench.asked import Asked
from fsla.experiments.bench.cases import PROBLEMS, Case, case
from fsla.experiments.bench.race import Row, lines, save
from fsla.experiments.bench.table import SCALINGS, measure, scaling
from fsla.experiments.bench.transformer import measure_transformer

__all__ = [
    "PROBLEMS",
    "SCALINGS",
    "Asked",
    "Case",
    "Row",
    "case",
    "lines",
    "measure",
    "measure_transformer",
    "save",
    "scaling",
]
