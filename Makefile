# A bare machine with Python >= 3.11 is enough: every target first makes .venv, and again when its pins change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FULL := $(VENV)/.installed-full
DOCS := $(VENV)/.installed-docs
LOWEST := .lowest
BENCHMARKS := $(sort $(filter-out benchmarks/_%.py,$(wildcard benchmarks/*.py)))

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all test-fast test-lowest lint docs docs-check bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{ printf "%-12s %s\n", $$1, $$2 }'

venv: $(STAMP) ## make .venv with the pinned development environment (PYTHON=python3.12 chooses another Python)

$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "$(PYTHON) was not found; install Python 3.11 or newer, or name it: make venv PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "vacsr needs Python >= 3.11, $(PYTHON) is $$("$(PYTHON)" -V 2>&1); try: make venv PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) lacks venv or ensurepip; install them (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@# A half-made environment has no working pip: start it afresh.
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,clip]'
	@touch $@

$(FULL): $(STAMP) # the extras that only tests and types need
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,clip,serve,faiss,milvus,pgvector,qdrant,sentence-transformers,datasets,mteb,ray,kernels,lora,onnx]'
	@touch $@

$(DOCS): $(STAMP) # mkdocs-material and mkdocstrings
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,clip,serve,docs]'
	@touch $@

demo: $(STAMP) ## run `vacsr demo`, into demo/
	$(BIN)/vacsr demo --out demo

test: $(FULL) ## the suite with the slow tests, without the longest ones and those that need a GPU
	$(BIN)/pytest -m "not gpu and not long"

test-all: $(FULL) ## everything but what needs a GPU: some minutes more
	$(BIN)/pytest -m "not gpu"

test-fast: $(FULL) ## the suite without slow tests
	$(BIN)/pytest

test-lowest: ## the suite without slow tests, in .lowest, with the lowest versions of pyproject.toml (torch: that of constraints.txt)
	"$(PYTHON)" -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install -q --disable-pip-version-check --no-deps -c constraints.txt torch uv
	$(LOWEST)/bin/uv pip install -q --python $(LOWEST) --resolution lowest-direct \
	  -e '.[dev,clip,serve,eval,faiss,pgvector,qdrant,tensorboard]'
	$(LOWEST)/bin/pytest

docs: $(DOCS) ## build the site into site/; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

docs-check: $(FULL) ## tables, sentences, links, commands and short code blocks of docs/; a strict build where the tools of `make docs` are there
	$(PYTHON) tools/docs_tables.py --check
	$(PYTHON) tools/docs_text.py
	$(BIN)/pytest -n 0 -q -m "not long" tests/test_docs.py tests/test_docs_blocks.py tests/test_docs_tables.py
	@if $(BIN)/python -c 'import latex2mathml, material, mkdocstrings_handlers.python' 2>/dev/null; \
	then NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict; \
	else echo "site not checked: make docs installs what it needs" >&2; fi

lint: $(FULL) ## style, format, one-way imports, types, and the tables and sentences of docs/
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(PYTHON) tools/docs_tables.py --check
	$(PYTHON) tools/docs_text.py

bench: $(FULL) ## run every script of benchmarks/ in turn
	@test -n "$(BENCHMARKS)" || { echo "benchmarks/ holds no script; add one, such as benchmarks/folded_scoring.py" >&2; exit 1; }
	@for script in $(BENCHMARKS); do \
	  echo "== $$script"; $(BIN)/python "$$script"; code=$$?; \
	  [ $$code -eq 0 ] || [ $$code -eq 3 ] || exit $$code; \
	done # 3: this machine cannot, as without a GPU

clean: ## remove caches, builds, site/ and demo/ (.venv and runs/ stay)
	rm -rf build dist demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(wildcard src tests benchmarks) -type d -name __pycache__ -prune -exec rm -rf {} +
