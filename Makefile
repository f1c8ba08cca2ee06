# Two commands to know: `make demo` and `make test`. Both set everything up first, without root.
# The work is in hpctrain/install/bootstrap.py; this file only names it.

PYTHON ?= python3
VENV ?= .venv
MPI ?= auto
HOROVOD ?= auto
RANKS ?= 1,2,3,4
ONLY ?=
TORCH ?= 2.6.0
# What uses torch's own parallelism.
OF_TORCH ?= torch_backend or test_grid.py or pipeline or split_ or tensor

BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-ci test-all test-ranks test-torch lint clean

help:
	@echo "make setup       a venv with torch, MPI, hpctrain and Horovod (quick when up to date)"
	@echo "make demo        setup, then a two-rank training on handwritten digits"
	@echo "make test        setup, then the tests that show in minutes that it works"
	@echo "make test-ci     setup, then every test that CI runs: any number of ranks, launchers, Slurm, several nodes"
	@echo "make test-all    setup, then what takes too long for every day: each engine with each model and optimizer"
	@echo "make test-ranks  setup, then the tests that run under mpirun"
	@echo "make test-torch  a venv with TORCH, then the tests that depend on torch's version"
	@echo "make lint        setup, then ruff, mypy and import-linter"
	@echo "make clean       remove the venv and what tools left behind; built Horovods stay cached"
	@echo ""
	@echo "PYTHON=$(PYTHON)  the Python to use, 3.11 or later"
	@echo "VENV=$(VENV)  where the venv goes"
	@echo "MPI=$(MPI)  site (the one on PATH), mpich (from the package index) or auto (as the last time, else what works)"
	@echo "RANKS=$(RANKS)  how many ranks test-ranks runs with"
	@echo "ONLY=$(ONLY)  which of them, as pytest's -k"
	@echo "TORCH=$(TORCH)  the version of torch that test-torch runs with"
	@echo "HOROVOD=$(HOROVOD)  yes, no or auto (as the last time, else go on without if it cannot be built)"

setup:
	@$(PYTHON) -m hpctrain.install.bootstrap --venv "$(VENV)" --mpi $(MPI) --horovod $(HOROVOD)

demo: setup
	$(BIN)/hpctrain run -n 2 examples/digits.py

test: setup
	$(BIN)/python -m mpi_tests --quick

test-ci: setup
	$(BIN)/python -m mpi_tests

test-all: setup
	MPI_TESTS_FULL=1 $(BIN)/python -m mpi_tests ranks nodes benchmarks long --keep-result

test-ranks: setup
	$(BIN)/python -m mpi_tests ranks -n $(RANKS) $(if $(ONLY),-- -k "$(ONLY)")

test-torch:
	@$(PYTHON) -m hpctrain.install.bootstrap --venv ".venv-torch-$(TORCH)" --mpi mpich --horovod no --torch "$(TORCH)"
	.venv-torch-$(TORCH)/bin/python -m mpi_tests ranks -n 2,4 --keep-result -- -k "$(OF_TORCH)"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	@$(PYTHON) -m hpctrain.install.setup.cleaning "$(VENV)"
