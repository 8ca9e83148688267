# `make demo` and `make test` do all set-up themselves; both are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: demo test test-all lint types imports format size docs wheel bench results results-check clean

demo: $(STAMP)
	$(BIN)/python examples/digits.py
	@echo
	@echo "Next:  source $(BIN)/activate     then  adadp --help,  adadp train,  or the first block of README.md in python"

test: lint types imports
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: lint types imports
	$(BIN)/python -m pytest -n 2

lint: $(STAMP)
	$(BIN)/ruff check src lab tests examples docs/_site
	$(BIN)/ruff format --check --quiet src lab tests examples docs/_site

types: $(STAMP)
	$(BIN)/mypy

# Which package may import which: the contracts are in pyproject.toml.
imports: $(STAMP)
	$(BIN)/lint-imports --no-logo

format: $(STAMP)
	$(BIN)/ruff check --fix src lab tests examples docs/_site
	$(BIN)/ruff format src lab tests examples docs/_site

# Lines of code of each package, without docstrings, comments and blank lines.
size: $(STAMP)
	$(BIN)/python -m adadp_lab.report.size

# The documentation as a site in site/, which is made anew; a link or an anchor that leads nowhere is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open site/index.html. With search: $(BIN)/mkdocs serve"

# Both wheels, installed together into an empty environment outside the checkout, where the demo is run.
wheel: $(STAMP)
	rm -rf build lab/build dist
	$(BIN)/python -m build --wheel --outdir dist .
	$(BIN)/python -m build --wheel --outdir dist lab
	empty=$$(mktemp -d) && trap 'rm -rf "$$empty"' EXIT && \
	$(PYTHON) -m venv "$$empty/venv" && \
	"$$empty/venv/bin/pip" install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl && \
	cp examples/digits.py "$$empty" && cd "$$empty" && venv/bin/python digits.py && venv/bin/adadp reproduce --list

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
	rm -rf $(VENV) build lab/build dist site *.egg-info src/*.egg-info lab/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
