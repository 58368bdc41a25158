# `make demo`, `make paper` and `make test` do all set-up by themselves; a second run installs nothing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo paper test stats wheel lint format clean

demo: $(READY)
	rm -rf out/demo
	$(BIN)/fsla clean --demo --out out/demo

paper: $(READY)
	$(BIN)/fsla reproduce synthetic --seeds 3 --out out/paper/synthetic
	$(BIN)/fsla reproduce overview --preset smoke --out out/paper/cleaning

test: $(READY) lint
	$(BIN)/python -m pytest

stats: $(READY)
	$(BIN)/python tests/stats.py

wheel: $(READY)
	rm -rf out/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir out/wheel .
	$(BIN)/python tests/wheel_program.py out/wheel/*.whl out/wheel constraints.txt

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) out .mypy_cache .pytest_cache .ruff_cache

$(READY): pyproject.toml reproduction/pyproject.toml benchmarks/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fsla needs Python 3.11 or newer. $$($(PYTHON) --version) was found; set PYTHON=/path/to/python." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
	  --editable '.[dev]' --editable ./reproduction --editable ./benchmarks
	touch $@
