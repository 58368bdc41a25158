"""Benchmarks: cost of a step, algorithms compared, automatic steps, data quality."""
