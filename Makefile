# Every target sets itself up: a machine with Python 3.11+ and pip is enough.
#   make demo   search, explain and run a GPT training step on 8 host devices
#   make test   the test suite without its longest tests
#   make test-fast   its quick tests, for while one writes
#   make test-all   everything, longer experiments too
#   make lint   ruff, pyright, and a strict build of the documentation
#   make docs   the documentation as a site; open site/index.html

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A file of tests for each process at a time: most of a test is one thread that compiles.
PYTEST_ARGS ?= --numprocesses=auto --maxprocesses=4 --dist=loadfile

# PATH, because the signatures in the API reference are formatted by the command ruff.
MKDOCS = NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mkdocs build --strict --quiet

export JAX_PLATFORMS ?= cpu

.PHONY: demo test test-fast test-all lint docs format clean

demo: $(STAMP)
	$(BIN)/python -m experiments.demo

# Seconds of a test function, with all its parameters, by tests/seconds.txt.
test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS) --at-most 2

test-fast: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS) --at-most 0.2

test-all: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(MKDOCS)

docs: $(STAMP)
	$(MKDOCS)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The stamp is touched last, so that an interrupted installation is taken up again by the next call.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "diffshard needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis build dist out site
