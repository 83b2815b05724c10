# `make` or `make help` lists the targets. PYTHON=/path/to/python3.11 chooses the interpreter of .venv.

BIN := .venv/bin
SUITE := tests/unit tests/api tests/machine tests/ray tests/hosts
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-faults test-gpu check bench bench-api bench-exec bench-faults bench-launch bench-mpi bench-queue bench-ray bench-store bench-trace clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 12

setup: ## .venv with everything: raycontrol, frameworks, test tools
	@scripts/setup all

demo: ## train a classifier with torchrun over two instances, on this machine
	@scripts/setup torch
	$(BIN)/raycontrol run configs/ddp/job.yaml --set placement=pack

test: setup ## every test but the long ones
	$(BIN)/python -m pytest -m 'not long and not gpu' --durations=25 $(SUITE)

test-all: setup ## every test
	$(BIN)/python -m pytest -m 'not gpu' $(SUITE)

test-faults: setup ## every kind of fault over four hosts while jobs are in every state (needs root); three quarters of an hour
	$(BIN)/python -m pytest --durations=25 tests/faults

test-gpu: ## what can be tested with a GPU only, beside nvidia-smi
	@scripts/setup test
	$(BIN)/python -m pytest -m gpu tests/gpu

check: ## format, lint, types, unit tests; under a minute
	@scripts/setup test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m 'not long' tests/unit tests/api

bench: setup ## every figure beside its peers, on hosts that are network namespaces, written to docs/benchmarks.md (needs root; an hour)
	$(BIN)/python -m tests.bench --output docs/benchmarks.md

bench-launch: ## a job that does nothing, and the command line, beside Slurm and Ray's own ways, on three hosts (needs root)
	@scripts/setup test
	$(BIN)/python -m tests.bench.launch

bench-api: ## a list over HTTP while 200 follow a job's log, beside an empty FastAPI route, on this machine
	@scripts/setup test
	$(BIN)/python -m tests.bench.api

bench-exec: ## `true` on three hosts by exec, beside Slurm's srun (needs root, and Debian's slurmctld slurmd slurm-client munge)
	@scripts/setup test
	$(BIN)/python -m tests.bench.exec

bench-faults: ## how soon the controller, a gang and the queue are over a fault, on four hosts (needs root); half an hour
	@scripts/setup test
	$(BIN)/python -m tests.bench.faults

bench-mpi: setup ## an mpirun of 3 x 2 ranks through raycontrol's ssh, beside plain sshd, on three hosts (needs root)
	$(BIN)/python -m tests.bench.mpi

bench-queue: ## one pass of the queue: 1,000 and 10,000 jobs, 1,000 nodes, the three policies; CPU time beside a floor
	@scripts/setup test
	$(BIN)/python -m tests.bench.queue

bench-ray: ## from a submit to a ray job's first line, beside three `ray start` by a script, on three hosts (needs root)
	@scripts/setup test
	$(BIN)/python -m tests.bench.ray

bench-store: ## jobs taken in per second from 8 clients, beside plain SQLite; pages of a list of 10,000 jobs
	@scripts/setup test
	$(BIN)/python -m tests.bench.store

bench-trace: ## a simulated week of a mixed load under the three policies: waits, GPU time used
	@scripts/setup test
	$(BIN)/python -m tests.bench.trace
	$(BIN)/python -m tests.bench.trace --limited 1

clean: ## remove what builds and checks have left (.venv stays)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
