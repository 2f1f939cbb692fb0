# Two commands for a newcomer: `make demo` and `make test`. Everything lives in .venv.
# `make test-launch` runs torchrun, mpirun and Slurm for real, as far as they can be installed.
#   PYTHON       interpreter to make .venv with (3.10, 3.11 or 3.12)
#   TORCH_INDEX  wheel index for torch, e.g. a CPU one; default: pip's own
PYTHON ?= python3
TORCH_INDEX ?=
BIN := .venv/bin

.PHONY: demo test test-launch lint clean

demo: .venv/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/01_sudoku_demo/demo.sh runs/demo

test: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/python -m pytest

test-launch: .venv/.installed-test
	@$(BIN)/pip install --quiet --retries 1 -r requirements-launch.txt || echo "no Open MPI and mpi4py wheels here" >&2
	$(BIN)/python -m pytest -rs tests/launch

lint: .venv/.installed-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); megamem needs Python 3.10, 3.11 or 3.12: make PYTHON=python3.11 …" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.installed: .venv/bin/python requirements.txt setup.py
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(BIN)/pip install --quiet -r requirements.txt
	$(BIN)/pip install --quiet --no-deps -e .
	@touch $@

.venv/.installed-test: .venv/.installed requirements-test.txt
	$(BIN)/pip install --quiet -r requirements-test.txt
	@touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache
