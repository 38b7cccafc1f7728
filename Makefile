# Every target sets up .venv first if it has to. PYTHON=/path/to/python3.12 chooses the interpreter.
SHELL := /bin/bash
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: help venv demo test test-matrix test-power soak chaos check bench clean

help:
	@echo "make venv         create .venv with everything that constraints.txt pins"
	@echo "make demo         prepare text and train a small MoE GPT on 4 ranks (a few minutes)"
	@echo "make check        check formatting, lint and types, run the unit tests"
	@echo "make test         run the whole test suite"
	@echo "make test-matrix  run the full fault matrices and print a table of the recoveries"
	@echo "make test-power   put mistakes into the product and show which tests and simulations notice"
	@echo "make soak         simulate random jobs with faults on all cores until Ctrl-C, or for SECONDS=..."
	@echo "make chaos        kill processes of a small job at random, 50 times, and compare the final state"
	@echo "make bench        run the benchmarks and print their tables"
	@echo "make clean        remove runs and caches"

venv: .venv/installed

.venv/installed: constraints.txt pyproject.toml setup.py tools/make_venv.sh
	@PYTHON="$(PYTHON)" tools/make_venv.sh

demo: .venv/installed
	@PATH="$(CURDIR)/$(BIN):$$PATH" examples/quickstart.sh

test: .venv/installed
	$(BIN)/python -m pytest tests

test-matrix: .venv/installed
	$(BIN)/python -m pytest tests/distributed/test_fault_matrix.py tests/distributed/test_sparse_matrix.py \
	    -m "matrix or not matrix" -rP --tb=short --durations=0 | grep -vE "Warning|warn|^$$"

test-power: .venv/installed
	$(BIN)/python -W ignore -m tests.power

soak: .venv/installed
	$(BIN)/python -W ignore -m tests.simulation --jobs 0 --seconds $(or $(SECONDS),inf) --shrink \
	    --keep runs/soak $(if $(FIRST),--first $(FIRST),--random)

chaos: .venv/installed
	$(BIN)/python -m pytest tests/distributed/test_chaos.py -m chaos -rP --tb=short | grep -vE "Warning|warn|^$$"

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy moe_ft megatron/fault_tolerance kernels
	$(BIN)/python -m pytest tests/unit --quiet

bench: .venv/installed
	$(BIN)/python -m benchmarks.layouts
	$(BIN)/python -m benchmarks.stall
	$(BIN)/python -m benchmarks.storage
	$(BIN)/python -m benchmarks.planning
	$(BIN)/python -m benchmarks.sparse_schedule
	$(BIN)/python -m benchmarks.router_load
	$(BIN)/python -m benchmarks.partial_sizes
	$(BIN)/python -m benchmarks.partial_overhead
	$(BIN)/python -m benchmarks.sparse_overhead
	$(BIN)/python -m benchmarks.sparse_recovery

clean:
	rm -rf runs .mypy_cache .pytest_cache .ruff_cache
