# Everything a person or CI runs. `make` alone lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
MODEL ?= smollm2
JOBS ?= 4
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PYTEST := $(BIN)/python -m pytest
# More than cores: tests of the smaller kinds wait for processes and leases half of their time. A
# file stays in one process, which keeps its fixtures; in the order of their names the long waits of
# integration are not left to the end.
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder
NO_CLUSTER := tests --ignore=tests/e2e --ignore=tests/chaos --ignore=tests/extra
# Those of the chart and of what it is installed on. They are among the others in `make test`.
CHART_TESTS := $(wildcard tests/helm tests/fakekube)
# A cluster keeps two cores busy for half of its time. Those that are hurt on purpose stay alone.
TWO_CLUSTERS := -n 2 --dist loadfile --no-loadscope-reorder
# What failed beside others is run once more alone. It stays in the output, and is a fault to be looked
# for: a deadline too short for a crowded machine, or a race. A second failure ends the run.
AGAIN_ALONE := || { echo "failed beside others (see above), now alone:" >&2; \
  $(PYTEST) --last-failed --last-failed-no-failures none
SOURCES := services kernels loadtest tools tests
EXTRAS := worker,ray,kubernetes,test,dev

# A tool of ours must find its neighbours, and nobody's own packages must shadow the locked ones.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

.PHONY: help setup demo fmt lint types layers protos docs static unit integration e2e helm-test chaos \
        bench gpu test test-extra clean distclean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# -- set-up ----------------------------------------------------------------------------------

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; give one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null \
	  || { echo "$(PYTHON) cannot make virtual environments; install its venv package" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/install: $(STAMPS)/venv requirements.lock requirements-triton.lock pyproject.toml
	@echo "installing locked versions (a few minutes, about 1.4 GB) ..."
	$(BIN)/python -m pip install --quiet -c requirements.lock setuptools
	$(BIN)/python tools/tell_while.py installing $(VENV) -- \
	  $(BIN)/python -m pip install --quiet -c requirements.lock --no-build-isolation -e '.[$(EXTRAS)]'
	@# A CUDA build of torch brings the Triton it was made with; a CPU build brings none.
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("triton") is None)' \
	  || $(BIN)/python tools/tell_while.py "installing triton" $(VENV) -- \
	    $(BIN)/python -m pip install --quiet -c requirements-triton.lock triton
	@touch $@

setup: $(STAMPS)/install ## make .venv, install locked versions, build kernels, fetch the model
	@$(BIN)/python -m kernels.cpu.build
	@$(BIN)/isthmus model get $(MODEL) > /dev/null

# -- use -------------------------------------------------------------------------------------

demo: setup ## start a cluster, stream one chat, say where it ran, stop
	@$(BIN)/python tools/demo.py --model $(MODEL)

# -- static checks ---------------------------------------------------------------------------

fmt: $(STAMPS)/install ## format and fix what can be fixed
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

lint: $(STAMPS)/install ## ruff, formatting, spelling
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/codespell $(SOURCES) docs protos README.md CHANGELOG.md CONTRIBUTING.md

types: $(STAMPS)/install ## mypy --strict
	$(BIN)/mypy $(SOURCES)

layers: $(STAMPS)/install ## imports go downwards only
	$(BIN)/lint-imports --no-cache

protos: $(STAMPS)/install ## generate services/pb from protos/
	$(BIN)/python tools/gen_protos.py

docs: $(STAMPS)/install ## generate docs/ from the code, and the index of decisions
	$(BIN)/python -m tools.gen_docs
	$(BIN)/python tools/adr_index.py

static: lint types layers protos-check docs-check

.PHONY: static protos-check docs-check
protos-check: $(STAMPS)/install
	$(BIN)/python tools/gen_protos.py --check

docs-check: $(STAMPS)/install
	$(BIN)/python -m tools.gen_docs --check
	$(BIN)/python tools/adr_index.py --check

# -- tests -----------------------------------------------------------------------------------

$(STAMPS)/kube: tools/kube_tools.py $(STAMPS)/install
	@$(BIN)/python tools/tell_while.py "fetching helm and kubectl" $(VENV) -- \
	  $(BIN)/python tools/kube_tools.py > /dev/null
	@touch $@

unit: setup ## fast tests, nothing outside the process
	$(PYTEST) $(SIDE_BY_SIDE) tests/unit

integration: setup ## one real seam each: store, gRPC, ZMQ
	$(PYTEST) $(SIDE_BY_SIDE) tests/integration

e2e: setup ## every process of a cluster on this machine
	$(PYTEST) $(TWO_CLUSTERS) tests/e2e

helm-test: $(STAMPS)/kube ## the chart with real helm and kubectl, on a stand-in of a cluster
	$(PYTEST) $(SIDE_BY_SIDE) $(CHART_TESTS)

chaos: setup ## the ones of them that kill, freeze and cut
	$(PYTEST) -m chaos tests

gpu: setup ## what needs CUDA; skipped without
	$(PYTEST) -m gpu tests

test: setup static $(STAMPS)/kube ## what CI runs: static checks and every test that needs no GPU
	$(PYTEST) $(SIDE_BY_SIDE) $(NO_CLUSTER) $(AGAIN_ALONE) $(NO_CLUSTER); }
	$(PYTEST) $(TWO_CLUSTERS) tests/e2e $(AGAIN_ALONE) tests/e2e; }
	$(PYTEST) tests/chaos

test-extra: test ## the same, plus what needs programs a fresh machine lacks (skipped if absent)
	$(PYTEST) tests/extra

bench: setup ## first figures: two pools beside one worker
	$(BIN)/isthmus bench smoke

# -- releases --------------------------------------------------------------------------------

wheel: $(STAMPS)/install ## dist/*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

sbom: $(STAMPS)/install ## dist/sbom.json, what this environment is made of (CycloneDX)
	@mkdir -p dist
	$(BIN)/python tools/sbom.py > dist/sbom.json

.PHONY: wheel sbom

# -- cleaning --------------------------------------------------------------------------------

clean: ## remove caches and build output
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove the virtual environment
	rm -rf $(VENV) *.egg-info
