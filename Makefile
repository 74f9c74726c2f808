# `make setup` once (the other targets do it when needed), then `make test`, `make lint`, `make reproduce`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

# Extra arguments: make test PYTEST_ARGS='-k plan', make reproduce ARGS='--seed 1'
PYTEST_ARGS ?=
# Processes that share the tests, file by file; networks are so small that a thread each is best.
WORKERS ?= 2
ARGS ?=

.DEFAULT_GOAL := setup
.PHONY: setup test reproduce reference lint format docs clean

setup: $(STAMP)

# torch comes first and alone: the version in constraints.txt, from wherever pip is configured to find it (a CPU wheel
# if that is what it finds), so that nothing installed later pulls in another build.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, but $(PYTHON) is " + sys.version.split()[0] + ". Try: make setup PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

test: export HF_HUB_OFFLINE = 1
test: export OMP_NUM_THREADS = 1
test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(PYTEST_ARGS)

reproduce: $(STAMP)
	$(BIN)/python -m analysis reproduce $(ARGS)

# Makes every record in results/reference anew, by the command that is stored in it, then the list of them: hours.
reference: $(STAMP)
	$(BIN)/python -m analysis manifest --rerun

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# pdoc leaves out submodules that a package's __all__ does not name, so those of the core are listed. The warning is about
# the types of inherited fields, which it looks for in the module of the subclass.
docs: $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt -e '.[docs]'
	$(BIN)/python -W 'ignore:Error parsing type annotation' -m pdoc --docformat google --output-directory build/docs \
		analysis bench $$(find jagg_core -name '*.py' ! -name '__main__.py' | sed -e 's,/__init__,,' -e 's,\.py$$,,' | tr / . | sort)

# Caches and build output; the virtual environment and results/ stay.
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
