# Everything starts from a fresh machine with Python 3.11 or newer, make and a package index.
PYTHON ?= python3
NEWEST_PYTHON := python3.13
# A PYTHON that is asked for gets an environment of its own where .venv is of another version.
VENV := .venv
ifneq ($(origin PYTHON),file)
  VENV := .venv$(shell version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
    [ -d .venv/lib/python$$version ] || [ ! -d .venv ] || echo "-$$version")
endif
BIN := $(VENV)/bin
# One process more than there are cores, at most four: many tests wait for processes of their own.
WORKERS = $(shell $(PYTHON) -c 'import os; print(min(4, (os.cpu_count() or 1) + 1))')
PARALLEL = --numprocesses $(WORKERS) --dist loadscope --no-loadscope-reorder
THOROUGH := --hypothesis-profile=thorough --timeout=600

CONSTRAINTS :=
INSTALL = @echo "Installing Linnaeus with PyTorch into $(VENV): takes minutes, once"; \
  $(BIN)/python -m pip install -e

.DEFAULT_GOAL := help
.PHONY: growth help train test test-e2e test-slow test-all test-gpu test-integrations test-floor test-newest \
  test-wheel test-mutants coverage nightly messages lint typecheck docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(VENV)/.installed ## train on handwritten digits with AutoBatch
	$(BIN)/python -m linnaeus.train --cfg configs/digits.yaml

test: $(VENV)/.installed-dev ## run the quick tests: what a change must not break
	$(BIN)/python -m pytest -m "not e2e and not slow and not integrations" --ignore tests/integrations $(PARALLEL)

test-e2e: $(VENV)/.installed-dev ## run the tests that start whole runs
	$(BIN)/python -m pytest -m "e2e and not slow" --ignore tests/integrations $(PARALLEL) tests

test-slow: $(VENV)/.installed-dev ## run the slow tests, and the property tests with many examples
	$(BIN)/python -m pytest -m "slow or hypothesis" --ignore tests/integrations $(THOROUGH) $(PARALLEL)
	$(BIN)/python -m tests.phantom $(BIN)/python -m pytest -p tests.phantom.values -m "gpu and slow" --ignore tests/integrations tests

test-gpu: $(VENV)/.installed-dev ## run the tests that need a GPU: on a GPU, or else on a phantom of one
	$(BIN)/python -m tests.phantom $(BIN)/python -m pytest -p tests.phantom.values -m "gpu and not slow" --ignore tests/integrations tests

test-integrations: $(VENV)/.installed-dev,integrations ## run the tests with Lightning, transformers, TRL and accelerate
	$(BIN)/python -m pytest -m integrations $(PARALLEL) tests

test-all: $(VENV)/.installed-dev ## run the whole test suite
	$(BIN)/python -m pytest $(THOROUGH) $(PARALLEL)

test-mutants: $(VENV)/.installed-dev ## make mistakes in copies of the code, and see that tests catch each
	$(BIN)/python -m tests.mutants

coverage: $(VENV)/.installed-dev ## measure which lines of linnaeus/ the tests run, without integrations and slow tests
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not slow" --ignore tests/integrations -o timeout=600 $(PARALLEL)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --skip-covered --omit 'linnaeus/integrations/*'

test-floor: ## run the quick tests and integrations with the oldest packages that pyproject.toml allows
	$(MAKE) test test-integrations VENV=.venv-floor CONSTRAINTS=.venv-floor/lower_bounds.txt

test-newest: ## run the quick tests with the newest Python, where it is installed
	@if $(NEWEST_PYTHON) --version > /dev/null 2>&1; then $(MAKE) test PYTHON=$(NEWEST_PYTHON); \
	  else echo "make test-newest runs no tests: $(NEWEST_PYTHON) is not installed. Use make NEWEST_PYTHON=..."; fi

test-wheel: ## install a wheel into an empty environment: search with the library alone, then train
	rm -rf build
	$(PYTHON) -m venv build/env
	build/env/bin/python -m pip wheel --no-deps --wheel-dir build/wheel .
	build/env/bin/python -m pip install build/wheel/*.whl
	cp examples/gpt.py build && cd build && env/bin/python gpt.py
	build/env/bin/python -m pip install "$$(echo build/wheel/*.whl)[train]"
	cd build && env/bin/linnaeus train --cfg ../configs/digits.yaml TRAIN.EPOCHS=1
	rm -rf build

nightly: test-slow test-floor test-newest test-wheel test-mutants coverage docs growth ## run what takes hours

growth: $(VENV)/.installed-dev ## check that time grows linearly with rows, classes and runs
	$(BIN)/python benchmarks/research/growth.py --check

messages: $(VENV)/.installed-dev ## write tests/messages/ anew, to be read as a difference
	$(BIN)/python -m pytest --rewrite-messages -q -k test_messages tests

lint: $(VENV)/.installed-dev ## check style, format and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

typecheck: $(VENV)/.installed-dev ## check types
	$(BIN)/mypy

docs: $(VENV)/.installed-docs ## build the documentation into site/
	$(BIN)/mkdocs build --strict
	@! grep -q '<blockquote>' site/api/index.html || { echo "docs/api.md: an example needs the heading Examples:"; exit 1; }

clean: ## remove the environments and everything that was built
	rm -rf .venv .venv-* build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Linnaeus needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Use make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp for each set of extras: a second run finds it and installs nothing.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(INSTALL) ".[train]"
	@touch $@

$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(INSTALL) ".[$*]" $(CONSTRAINTS:%=--constraint %)
	@touch $@ $(VENV)/.installed

$(VENV)/lower_bounds.txt: pyproject.toml tools/lower_bounds.py | $(BIN)/python
	$(BIN)/python tools/lower_bounds.py > $@
