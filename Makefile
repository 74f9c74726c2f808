# `make setup` once (the other targets do it when needed), then `make test`, `make lint`, `make reproduce`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

# Extra arguments: make test PYTEST_ARGS='-k plan', make reproduce ARGS='--seed 1'
PYTEST_ARGS ?=
# Processes that share the tests, file by file, in the order of their names: sorted by number of tests, files with few and
# long ones would come last, and a process would wait. Networks are so small that a thread each is best.
WORKERS ?= 2
ARGS ?=
# About a minute on two cores: numbers by hand, pinned numbers, and the stored tables made again.
QUICK := $(addprefix tests/,jagg_core/test_plan.py jagg_core/test_pinned.py jagg_core/test_theory.py bench/test_noise.py \
	bench/test_compare.py analysis/test_statistics.py analysis/test_bank.py analysis/test_similarity.py \
	analysis/test_reference.py)
# Kernels of a processor of 2008, so that no test hangs on the last bit. numpy names what it may leave out.
OLD_KERNELS = ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OPENBLAS_CORETYPE=Nehalem \
	NPY_DISABLE_CPU_FEATURES="$$($(BIN)/python -c 'import numpy; print(*numpy.show_config("dicts")["SIMD Extensions"].get("found", []))')"

.DEFAULT_GOAL := setup
.PHONY: setup help test quick old-kernels reproduce reference lint format docs clean

setup: $(STAMP)

help:
	@echo 'make setup        .venv with everything (the other targets do it when needed)'
	@echo "make test         all tests; a part: make test PYTEST_ARGS='tests/jagg_core -k plan'"
	@echo 'make quick        tests that hold numbers, about a minute'
	@echo 'make old-kernels  the same with the kernels of another processor'
	@echo 'make lint         ruff, mypy; make format: what ruff can repair'
	@echo "make reproduce    the main job; a smoke run: make reproduce ARGS='--quick'"
	@echo 'make reference    every stored record anew: hours'
	@echo 'make docs         API pages in build/docs; make clean: caches and build output go'

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
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

quick:
	$(MAKE) test PYTEST_ARGS='$(QUICK)'

# The quick tests as another processor computes them.
old-kernels: $(STAMP)
	$(OLD_KERNELS) $(MAKE) quick

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
