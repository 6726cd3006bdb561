# make demo   runs the main job; make test   passes the tests. Both set up .venv in this folder first.
# PYTHON picks the interpreter (3.11 or newer); TORCH picks the torch to install, for example TORCH="torch==2.9.1".
PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP = .venv/bin/python -m pip --disable-pip-version-check
PYTEST = .venv/bin/python -m pytest

.PHONY: help setup demo test test-all lint types docs check clean

help:
	@echo "make demo      train the quickstart agent on this machine's CPU and show before and after"
	@echo "make test      the core tests"
	@echo "make test-all  all tests: also those with a real language model and with killed processes"
	@echo "make check     lint, types, tests"

setup: .venv/.ready

.venv/.ready: pyproject.toml
	@echo "== setting up .venv (once; torch is large, this takes some minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@$(PIP) install --quiet --upgrade 'pip>=25.1'
	@echo "== installing $(TORCH)"
	@$(PIP) install --quiet '$(TORCH)'
	@echo "== installing art-inplace and its test tools"
	@$(PIP) install --quiet --editable '.[langgraph,local,plot]' --group dev
	@$(PIP) install --quiet --no-deps trl==1.16.0  # only its chat templates are read, by tests
	@touch $@

demo: setup
	@.venv/bin/python recipes/quickstart/run.py

test: setup
	@echo "== core tests"
	@$(PYTEST) -n 2 -m "not slow"

test-all: setup
	@echo "== tests with a real language model and with killed processes"
	@$(PYTEST) -m slow

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .

types: setup
	@.venv/bin/mypy

docs: setup
	@echo "== examples of the documentation"
	@$(PYTEST) tests/docs

check: lint types test

clean:
	rm -rf .venv .art dist .pytest_cache .mypy_cache .ruff_cache
