"""The paper: its data sets, problems, theory, experiments (a frozen spec, runs, records, a summary) and figures."""
