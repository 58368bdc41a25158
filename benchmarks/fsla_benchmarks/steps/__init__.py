"""What a hyper-iteration costs: cases, candidates (ours, the peers', JAX's), and the race between them."""

from fsla_benchmarks.steps.cases import PROBLEMS, Case, case
from fsla_benchmarks.steps.race import Row, lines, write_rows
from fsla_benchmarks.steps.request import BenchRequest
from fsla_benchmarks.steps.results import describe_run, fill_tables, save
from fsla_benchmarks.steps.table import SCALINGS, measure, scaling
from fsla_benchmarks.steps.training import Cost, list_costs, measure_training, write_costs
from fsla_benchmarks.steps.transformer import measure_transformer

__all__ = [
    "PROBLEMS",
    "SCALINGS",
    "BenchRequest",
    "Case",
    "Cost",
    "Row",
    "case",
    "describe_run",
    "fill_tables",
    "lines",
    "list_costs",
    "measure",
    "measure_training",
    "measure_transformer",
    "save",
    "scaling",
    "write_costs",
    "write_rows",
]
