# `make` alone prints this help. Every target is safe to run again.

PYTHON ?= python3
# An environment of your own is used as it is: make lint VENV=/path/to/environment
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Tests of `make test-fast` that run at once, by file; `make test` runs one after another beside the engine.
JOBS ?= 2

ifeq ($(VENV),.venv)
bootstrap = $(PYTHON) deploy/packaging/bootstrap.py
else
bootstrap = @: # VENV was given:
endif

.DEFAULT_GOAL := help
.PHONY: help up dev test test-fast test-full lint format protos requirements clean

help: ## Print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# In the clone, where `sealmesh` finds it again; sealmesh would otherwise start one in the home folder.
up: export SEALMESH_STATE ?= $(CURDIR)/.sealmesh
up: ## Set everything up and run the mesh; Ctrl-C stops it (ARGS=... for sealmesh up)
	@$(bootstrap)
	@exec $(BIN)/sealmesh up $(ARGS)

dev: ## Set up the environment with the test and lint tools
	@$(bootstrap) --dev

test: dev ## Run every test, the real engine's included (under 40 minutes)
	$(PYTEST) -m "not full"

test-fast: dev ## Run the tests that need no engine (under 2 minutes)
	$(PYTEST) -m "not full and not engine" --ignore=tests/mesh --numprocesses=$(JOBS) --dist=loadfile

test-full: dev ## Run everything, the long tests too
	$(PYTEST)

lint: dev ## Run every static check: style, types, imports, contracts
	@$(BIN)/python deploy/packaging/checks.py

format: dev ## Format the Python files
	$(BIN)/ruff check --select I --fix --quiet .
	$(BIN)/ruff format .

protos: dev ## Generate protos/gen from protos/sealmesh
	$(BIN)/python protos/generate.py

requirements: dev ## Compile the pinned requirement files (ARGS=--upgrade for newer versions)
	@$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r deploy/packaging/requirements/uv.txt
	$(BIN)/python deploy/packaging/requirements/compile.py $(ARGS)

clean: ## Remove the environment and all caches; .sealmesh (keys, models, KV data) stays
	rm -rf $(if $(filter .venv,$(VENV)),.venv .venv.lock) .dev build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
