"""What a hyper-iteration costs: cases, candidates (ours, the peers', JAX's), and the race between them."""

from fsla.experiments.bench.cases import PROBLEMS, Case, case
from fsla.experiments.bench.table import SCALINGS, Row, measure, save, scaling

__all__ = ["PROBLEMS", "SCALINGS", "Case", "Row", "case", "measure", "save", "scaling"]
