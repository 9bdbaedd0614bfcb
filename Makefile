# Two commands do everything: `make sgft` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := .uv/bin/uv
SOURCES := $(wildcard core robotics benchmarks configs tests docs launch.py)
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/xla
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.5
# Exact versions are resolved for Python 3.11; other versions resolve from the ranges of setup.cfg.
CONSTRAINTS = $(shell $(PYTHON) -c 'import sys; print("-c constraints.txt" if sys.version_info[:2] == (3, 11) else "")')

.PHONY: help env parity sgft test test-slow lint format types results docs bench constraints clean

help:
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

env: $(VENV)/.ready  ## make the environment in .venv (reused while constraints.txt and setup.cfg are unchanged)

$(UV):
	$(PYTHON) -m venv .uv
	.uv/bin/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.ready: setup.cfg pyproject.toml constraints.txt | $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) $(VENV)
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python $(CONSTRAINTS) --editable '.[data,test]'
	touch $@

parity: $(VENV)/.parity  ## add a CPU build of torch, for parity tests and benchmarks

$(VENV)/.parity: $(VENV)/.ready
	$(BIN)/python -m ensurepip --upgrade > /dev/null
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps torch==2.13.0 sympy mpmath networkx
	$(BIN)/python -c 'import torch; assert torch.version.cuda is None, "this torch has CUDA: install a CPU build"; print("torch", torch.__version__)'
	touch $@

sgft: env  ## adapt a simulated policy to the real robot: the default run
	$(BIN)/python launch.py --config=configs/sgft.py --workdir=runs/sgft

lint: env  ## ruff and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --config-file setup.cfg core launch.py

format: env  ## rewrite the code in the house format
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .

test: lint  ## environment, lint, all default tests
	$(BIN)/python -m pytest

test-slow: env  ## what takes minutes: MJX compiles, reproductions
	$(BIN)/python -m pytest -m slow

bench: env  ## timings against peers (needs `make parity`)
	$(BIN)/python -m benchmarks.sgft

results: env  ## docs/results.md and the figures of the docs, from results/*.json
	$(BIN)/python -m docs.make_results

constraints: $(UV)  ## resolve constraints.txt anew, for Python 3.11
	$(UV) pip compile --quiet --upgrade --no-annotate --no-header --no-emit-index-url --python-version 3.11 --extra data --extra test setup.cfg -o constraints.txt

clean:  ## remove environments and caches (runs/ and results/ stay)
	rm -rf $(VENV) .uv .cache .mypy_cache .ruff_cache .pytest_cache build *.egg-info
