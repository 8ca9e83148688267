# `make demo` and `make test` do all set-up themselves; both are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: demo test test-all lint types bench results results-check clean

demo: $(STAMP)
	$(BIN)/python examples/digits.py

test: lint types
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: lint types
	$(BIN)/python -m pytest -n 2

lint: $(STAMP)
	$(BIN)/ruff check src lab tests examples

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable 'lab[opacus]'
	$(BIN)/adadp bench --goals

# Figures, tables and CLAIMS.md from the records in results/reproduce; the second says what would differ.
results: $(STAMP)
	$(BIN)/adadp reproduce --draw --claims CLAIMS.md

results-check: $(STAMP)
	$(BIN)/adadp reproduce --check --claims CLAIMS.md

# The stamp is newer than what it was made from, so that a changed dependency is installed and nothing else is.
$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' --editable lab
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info lab/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
