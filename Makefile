# Every command of the repository. `make` alone lists them.

PYTHON ?= python3
# Another one beside it, for another Python: make test PYTHON=python3.13 VENV=.venv-3.13
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
INSTALLED := $(VENV)/.installed
INSTALLED_PEERS := $(VENV)/.installed-bench
# The oldest Python and torch that the packages name.
PYTHON_OLDEST ?= python3.10
OLDEST := .venv-oldest
PACKAGES := $(sort $(notdir $(wildcard packages/*)))
BENCHMARKS ?= $(filter-out benchmarks/table.py benchmarks/_%.py,$(sort $(wildcard benchmarks/*.py)))
# More words for pytest, for example: make test PYTEST="-k resume -x"
PYTEST ?=

.DEFAULT_GOAL := help
.PHONY: help setup test test-gpu test-oldest torture check format lint types boundaries dependencies doctests blocks alone demo bench clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(INSTALLED) ## make .venv and install the packages and the tools into it

# Runs again when what is to be installed has changed. pip comes first: an old one does not know editable installs.
$(INSTALLED): requirements-dev.txt $(foreach package,$(PACKAGES),packages/$(package)/pyproject.toml)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 10) else f"Python {v[0]}.{v[1]} is too old: efficio needs 3.10 or newer; run for example: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12")'
	@test -x $(PY) && $(PY) -m pip --version >/dev/null 2>&1 || { echo "Making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	$(PY) -m pip install --upgrade pip
	$(PY) -m pip install -r requirements-dev.txt
	@test -x $(VENV)/s3-server/bin/python || $(PY) -m venv $(VENV)/s3-server
	$(VENV)/s3-server/bin/python -m pip install -q 'moto[server]>=5'
	@touch $@

$(INSTALLED_PEERS): $(INSTALLED) requirements-bench.txt
	$(PY) -m pip install -r requirements-bench.txt
	@touch $@

test: setup ## run all tests but the long proofs; those marked gpu skip without a card
	$(PY) -m pytest $(PYTEST)

test-gpu: setup ## run the tests that need a CUDA device; an error where there is none
	@$(PY) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch sees no CUDA device here: nothing would be tested")'
	$(PY) -m pytest -m gpu $(PYTEST)

test-oldest: $(OLDEST)/.installed ## run all tests on the oldest Python and torch that are named; downloads gigabytes
	$(OLDEST)/bin/python -m pytest $(PYTEST)

$(OLDEST)/.installed: requirements-oldest.txt $(foreach package,$(PACKAGES),packages/$(package)/pyproject.toml)
	@test -x $(OLDEST)/bin/python || $(PYTHON_OLDEST) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --upgrade pip
	$(OLDEST)/bin/python -m pip install -r requirements-oldest.txt
	@test -x $(OLDEST)/s3-server/bin/python || $(OLDEST)/bin/python -m venv $(OLDEST)/s3-server
	$(OLDEST)/s3-server/bin/python -m pip install -q 'moto[server]>=5'
	@touch $@

torture: setup ## run the long proofs whole
	$(PY) -m pytest -m torture $(PYTEST)

check: format lint types boundaries dependencies doctests blocks alone ## run every check besides the tests
	@echo "All checks passed."

format: setup ## formatting, as ruff wants it; `.venv/bin/ruff format .` mends it
	$(BIN)/ruff format --check .

lint: setup ## ruff's lint rules
	$(BIN)/ruff check .

types: setup ## mypy --strict on the sources
	$(BIN)/mypy --strict $(foreach package,$(PACKAGES),packages/$(package)/src)

boundaries: setup ## who may import whom
	$(BIN)/lint-imports

dependencies: setup ## each package declares what it imports, and imports what it declares
	@set -e; for package in $(PACKAGES); do echo "deptry $$package"; (cd packages/$$package && ../../$(BIN)/deptry src); done

doctests: setup ## the examples in docstrings
	$(PY) -m pytest --doctest-modules -q $(foreach package,$(PACKAGES),packages/$(package)/src)

blocks: setup ## the python blocks of the READMEs and of docs/
	$(PY) -m pytest -q tests/repo/test_readme_blocks.py

alone: setup ## each package from its wheel, in an environment without its siblings
	$(PY) tests/repo/isolation.py

demo: setup ## train on real images; stop, kill and resume; compare with the run that was never stopped
	$(PY) examples/quickstart.py

bench: $(INSTALLED_PEERS) ## run the benchmarks beside their peers and rewrite the tables
	@set -e; for benchmark in $(BENCHMARKS); do echo "$$benchmark"; $(PY) $$benchmark; done
	@if [ -f benchmarks/table.py ]; then $(PY) benchmarks/table.py; fi

clean: ## remove .venv, caches and build outputs; runs and their checkpoints stay
	rm -rf $(VENV) $(OLDEST) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis packages/*/dist packages/*/build
	find packages tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
