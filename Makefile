# Every target sets up .venv first if it has to. PYTHON=/path/to/python3.12 chooses the interpreter.
SHELL := /bin/bash
BIN := .venv/bin
PYTEST = $(BIN)/python -m pytest
export OMP_NUM_THREADS ?= 1

.PHONY: help venv demo test test-units test-simulation test-jobs test-submitted test-all test-slurm test-versions \
    test-bridge test-power soak chaos coverage clean-coverage check docs docs-serve bench gpu-day gpu-day-prepare clean

help:
	@echo "make venv         create .venv with everything that constraints.txt pins: 5.4 GB, 2.5 with TORCH_INDEX=URL for CPUs"
	@echo "make demo         train a small MoE GPT on 4 ranks, kill one, and see it repaired (a few minutes)"
	@echo "make check        check formatting, lint, types and the documentation site"
	@echo "make test         run the tests that every commit passes, in about 20 minutes on two cores"
	@echo "make test-all     run all other tests, in an hour or two: more faults, layouts and random kills"
	@echo "make test-slurm   submit jobs to a SLURM of three nodes on this machine (needs slurm-wlm and munge)"
	@echo "make test-versions  run a choice of tests on other versions of Megatron, and on CHECKOUTS=..."
	@echo "make test-bridge  run the tests of jobs that train with Megatron-Bridge, in .venv/bridge: 0.5 GB more"
	@echo "make test-power   put mistakes into the product and show which tests and simulations notice"
	@echo "make soak         simulate random jobs with faults on all cores until Ctrl-C, or for SECONDS=..."
	@echo "make coverage     run 'make test' and name the lines of the product that it does not run"
	@echo "make chaos        strike small real jobs from outside for MINUTES=60, from SEED=1 on; FIRST=... runs one alone"
	@echo "make bench        run the benchmarks and print their tables"
	@echo "make gpu-day DAY=first  show on a GPU what no CPU can; other days are nccl, te and large"
	@echo "make gpu-day-prepare  fetch and build what those days need on a machine without a network"
	@echo "make docs         build the documentation site in runs/site"
	@echo "make docs-serve   show it at http://127.0.0.1:8000 and follow changes of its pages"
	@echo "make clean        remove runs and caches"

venv: .venv/installed

.venv/installed: constraints.txt pyproject.toml setup.py tools/make_venv.sh
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" tools/make_venv.sh

demo: .venv/installed
	@$(BIN)/python examples/demo.py

# Targets of their own, in this order, so that --keep-going runs the rest after one that failed.
.NOTPARALLEL:
test: test-units test-simulation test-jobs test-submitted

test-units: .venv/installed
	$(PYTEST) tests/unit tests/device tests/recipes --numprocesses 2 --quiet

test-simulation: .venv/installed
	$(PYTEST) tests/simulation

test-jobs: .venv/installed
	$(PYTEST) tests/distributed tests/gpu --numprocesses 2 --dist worksteal

test-submitted: .venv/installed
	$(PYTEST) tests/slurm

test-all: .venv/installed
	$(PYTEST) tests/unit tests/device tests/recipes tests/simulation tests/distributed tests/slurm -m "rest or chaos"

test-slurm: .venv/installed
	$(PYTEST) tests/slurm -m "rest or not rest" --needs-slurm

# Folders of Megatron-LM, with its compiled helpers: (cd megatron/core/datasets && make).
CHECKOUTS ?=
WHEELS ?= $(shell sed -n 's/^WHEELS = (\(.*\)).*/\1/p' megatron/fault_tolerance/seams/versions.py | tr -d '",')
test-versions: .venv/installed
	set -e; for version in $(WHEELS); do \
	    [ -d .venv/megatron/$$version ] || $(BIN)/python -m pip install --quiet --no-deps \
	        --target .venv/megatron/$$version megatron-core==$$version; done
	set -e; for folder in $(WHEELS:%=$(CURDIR)/.venv/megatron/%) $(CHECKOUTS); do echo "== $$folder"; \
	    PYTHONPATH=$$folder $(PYTEST) -m versions tests/distributed tests/unit/fault_tolerance/seams --numprocesses 2; done

# An environment of its own, since Bridge needs packages that nothing else here does. ALL=1 also runs the tests that
# are marked rest.
test-bridge: .venv/bridge/installed
	.venv/bridge/bin/python -W ignore -m pytest tests/bridge --numprocesses 2 --dist worksteal \
	    $(if $(ALL),-m "rest or not rest")

.venv/bridge/installed: .venv/installed tests/bridge/requirements.txt tools/make_bridge_venv.sh
	@tools/make_bridge_venv.sh

test-power: .venv/installed
	$(BIN)/python -W ignore -m tests.power

soak: .venv/installed
	$(BIN)/python -W ignore -m tests.simulation --jobs 0 --seconds $(or $(SECONDS),inf) --shrink \
	    --keep runs/soak $(if $(REPAIRS),--repairs) $(if $(SPARES),--spares) $(if $(ELASTIC),--elastic) \
	    $(if $(FIRST),--first $(FIRST),--random)

# VERSION=0.18.2 tests a Megatron that `make test-versions` has installed.
chaos: .venv/installed
	PYTHONPATH=$(if $(VERSION),.venv/megatron/$(VERSION):)$(CURDIR) $(BIN)/python -W ignore -m tests.chaos \
	    --minutes $(or $(MINUTES),60) --seed $(or $(SEED),1) $(if $(FIRST),--first $(FIRST)) \
	    --report $(or $(REPORT),runs/chaos.jsonl)

coverage: PYTEST = $(BIN)/coverage run -m pytest
coverage: clean-coverage test
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --show-missing --skip-covered

clean-coverage:
	rm -rf runs/coverage

check: .venv/installed docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy moe_ft megatron/fault_tolerance benchmarks tools examples tests pretrain_gpt_moe.py
	$(BIN)/python -m tools.sizes

# The variable silences an announcement of mkdocs-material. Not --quiet: warnings that are not printed do not fail.
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
docs: .venv/installed
	$(MKDOCS) build --strict

docs-serve: .venv/installed
	$(MKDOCS) serve

# Not here: papers.routing and papers.expert_placement need a trace that is not part of the repository; papers.quality
# and papers.expert_slots train for long, and keep their runs in a folder to be named; verdicts strikes nodes for an
# hour; bridge_recovery runs in .venv/bridge.
BENCHMARKS := stall storage convert recovery_time other_layout planning scale agreement local_recovery flag_costs \
    kernels object_store kernel_code streams gradient_replicas replica_sources \
    simulator_vs_measured report_speed spare_nodes elastic_nodes shared_roles shared_jobs parity_speed \
    corruption_checks papers.sparse_schedule papers.overhead papers.tables

bench: .venv/installed
	set -e; for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name; done

# DAY=first|nccl|te|large. STEPS="NAME..." runs some of its steps, BUDGET_S=SECONDS leaves out what does not fit; FOLDER is
# where results go. PYTHON=python3 is used as it is: a lent machine cannot install .venv. docs/gpu_day.md has the rest.
gpu-day: $(if $(PYTHON),,.venv/installed)
	$(or $(PYTHON),$(BIN)/python) -m tools.gpu_day $(DAY) $(STEPS) $(if $(BUDGET_S),--budget-s $(BUDGET_S)) \
	    $(if $(FOLDER),--folder $(FOLDER))

gpu-day-prepare: $(if $(PYTHON),,.venv/installed)
	@PYTHON="$(or $(PYTHON),$(BIN)/python)" bash tools/gpu_day/prepare.sh $(DAYS)

clean:
	rm -rf runs .mypy_cache .pytest_cache .ruff_cache
