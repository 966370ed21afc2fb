# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

# `make demo` and `make test` do everything on a fresh machine. `make help` lists the rest.

PYTHON ?= $(shell sh tools/find-python)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
MEMBERS := packages/pcifacts packages/eventline packages/kata-device-plugin testing/simnode testing/simcluster testing/vmlab
SOURCES := $(MEMBERS) tests conformance bench demo tools

.DEFAULT_GOAL := check
.PHONY: help setup demo test test-all check lint fix bench lock proto conformance kernel clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 22

setup: $(STAMP) ## make the virtual environment in .venv

$(STAMP): requirements/dev.txt Makefile $(MEMBERS:%=%/pyproject.toml)
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; install one, or run: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation $(MEMBERS:%=-e %)
	@touch $@

demo: $(STAMP) ## the main job on a simulated node: no hardware, no cluster, no root
	$(BIN)/python demo/demo.py

test: $(STAMP) ## the fast suite, on one Python
	$(BIN)/python -m pytest -q -n 2 $(T)

test-all: $(STAMP) ## the fast suite, on every Python 3.11 or newer of this machine
	sh tools/test-all

check: lint test ## everything that needs no more than this checkout

lint: $(STAMP) ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports

fix: $(STAMP) ## format and apply safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## measure the plugin, and any peer: make bench ARGS='--peer NAME=COMMAND'
	$(BIN)/python -m bench.plugin $(ARGS)

conformance: $(STAMP) ## the real kubelet device manager and the reference CDI libraries (root, Go)
	$(BIN)/python conformance/build.py
	$(BIN)/python -m pytest -p no:randomly conformance

kernel: $(STAMP) ## the plugin in a guest with a real kernel (root, mmdebstrap; QEMU comes from packages)
	$(BIN)/python -m vmlab build
	$(BIN)/python -m pytest -p no:randomly tests/kernel

proto: $(STAMP) ## generate the kubelet protocol modules anew
	$(BIN)/python tools/gen_proto.py

lock: ## resolve the requirement files anew (needs uv)
	for f in plugin dev; do uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --no-emit-find-links --no-annotate --no-header requirements/$$f.in -o requirements/$$f.txt; done

clean: ## remove what the targets made here
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
