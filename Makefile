# `make html` and `make test` need git, make and Python 3.11 or 3.12. A later
# one is tried, with a warning.
# On a GPU image that has torch and triton: make html PYTHON=python3 VENV=

SHELL := /bin/sh
ifndef PYTHON
PYTHON := $(shell for p in python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null && echo $$p && break; done)
endif
VENV ?= .venv
PORT ?= 8000
TUTORIALS ?=
PAGES ?=
ALL ?=
TRITON ?= 3.6.0 3.9.0
WORKERS ?= 2

PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
SITE := docs/_build/html
INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check
# One more worker than cores: it often waits, for a browser or what it started.
# A file or page stays together (conftest.py): its tests share what takes long to make.
PYTEST = $(PY) -m pytest -q -rs $(OPTIONS)
# What takes long and needs no site runs on the core that its build leaves.
BESIDE = $(patsubst %,tests/test_%.py,again measuring counters environment)
BUILD = PYTHONPATH=docs/_ext$${PYTHONPATH:+:$$PYTHONPATH} \
	$(PY) -m translation.build

.DEFAULT_GOAL := help
.PHONY: help html preview translations serve test test-all proof beside with-site test-gpu test-triton-versions record linkcheck lighthouse screenshot \
	lint cells lock clean check-python site-tools test-tools run-tools

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-21s %s\n", $$1, $$2 }' \
		$(MAKEFILE_LIST)

html: site-tools  ## build the site into docs/_build/html; on a GPU, measure first
	@$(BUILD) || { echo "make html: the build stopped; the lines \
	above say where and why." >&2; exit 1; }
	@echo "The site is in $(SITE): open $(SITE)/index.html, or run make serve."

preview: site-tools  ## build with stale or missing recordings marked; never publish it
	@FIGURES=preview $(BUILD)
	@echo "A preview is in $(SITE): open $(SITE)/index.html, or run make serve."

translations: html  ## refresh the catalogs of docs/locale, and print what is missing
	@PYTHONPATH=docs/_ext $(PY) -m translation.update

serve: check-python  ## show the built site at http://localhost:8000
	@test -f $(SITE)/index.html || { echo "make serve: run make html first." >&2; exit 1; }
	@$(PYTHON) -m http.server --bind localhost --directory $(SITE) $(PORT)

test: proof  ## everything that proves the project, without a GPU
test-all: OPTIONS := -m "" --hypothesis-profile=random
test-all: proof  ## the same with what is long: all widths and types, random cases
proof: test-tools
	@$(PY) -m ruff format --check --quiet . && $(PY) -m ruff check --quiet .
	@git ls-files '*.py' '*.rst' '*.md' '*.css' '*.html' Makefile \
		| xargs $(PY) -m codespell_lib
	@$(PY) -m sphinxlint -e all -d line-too-long \
		$(wildcard docs/*.rst README*.md)
	@$(PY) -m check_jsonschema -q --builtin-schema vendor.github-workflows \
		$(wildcard .github/workflows/*.yml)
	@echo "Building the site from clean; beside it $(BESIDE)"
	@rm -rf docs/_build docs/tutorials
	@$(MAKE) --no-print-directory -j2 beside with-site OPTIONS='$(OPTIONS)'
beside:
	@said=$$($(PYTEST) $(BESIDE) 2>&1); status=$$?; echo "$$said"; exit $$status
with-site:
	@FIGURES=recorded $(BUILD)
	@$(PYTEST) -n $$(($(WORKERS) + 1)) --dist loadscope \
		--no-loadscope-reorder \
		$(BESIDE:%=--ignore %) tests

test-gpu: run-tools  ## the checks that need a GPU
	@$(PY) -m pytest -q -n $(WORKERS) --dist loadscope tests/test_conformance.py tests/pages

test-triton-versions: test-tools  ## try the tutorials with other versions of triton, and write what comes of it
	@PYTHONPATH=docs/_ext$${PYTHONPATH:+:$$PYTHONPATH} \
		$(PY) tests/triton_versions.py $(TRITON) --tutorials $(TUTORIALS)

record: run-tools  ## measure on a GPU what is stale: TUTORIALS="layer-norm/01" picks, ALL=1 measures all
	@PYTHONPATH=docs/_ext$${PYTHONPATH:+:$$PYTHONPATH} \
		$(PY) -m measurements.record $(if $(ALL),--all) $(TUTORIALS)

linkcheck: site-tools  ## check links to other sites (needs the network)
	@$(PY) -m sphinx -q -n -W --keep-going -c . -b linkcheck \
		-d docs/_build/doctrees/linkcheck docs docs/_build/linkcheck && echo "No link is broken."

screenshot: test-tools  ## take the picture of the README anew, of the built site
	@PYTHONPATH=docs/_ext $(PY) tests/screenshot.py

lighthouse:  ## measure the built site on a phone, and fail below the bars (needs npm)
	@cd docs/_build && npm exec --yes --package=@lhci/cli@0.15.1 -- \
		lhci autorun --config=../../tests/lighthouse.json \
		$(PAGES:%=--collect.url=http://localhost/%)

lint: test-tools  ## format and lint, as make test asks for
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

cells: check-python  ## write the cells that pages share into all scripts
	@$(PYTHON) tools/cells.py

lock: check-python  ## find the versions that constraints.txt names
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) "uv>=0.8,<1"
# torch itself names the exact versions of what it needs of CUDA.
	@$(PY) -m uv pip compile --quiet --universal --python-version 3.11 \
		--upgrade --no-annotate --custom-compile-command "make lock" \
		requirements.txt tests/requirements.txt -o constraints.new
	@grep -vE '^(cuda|nvidia)-' constraints.new > constraints.txt
	@rm constraints.new

clean:  ## remove everything that was generated
	rm -rf docs/_build docs/tutorials .cache .pytest_cache .ruff_cache .hypothesis

# Tools ---------------------------------------------------------------------

check-python:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or 3.12 found; \
	install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		2>/dev/null || { echo "make: $(PYTHON) is older than Python 3.11; \
	name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || echo \
	"make: $(PYTHON) is later than Python 3.12, the last one tested" >&2
	@test -w . || { echo "make: no permission to write in $(CURDIR); \
	make it writable or clone elsewhere." >&2; exit 1; }

ifeq ($(VENV),)
test-tools: site-tools
run-tools: check-python
# Installing requirements.txt here would replace the torch of a GPU image.
site-tools: check-python
	@$(PY) -c 'import sphinx, sphinx_gallery, pydata_sphinx_theme, notfound, \
	sphinx_design, sphinx_copybutton, sphinx_markdown_builder, \
	sphinxext.opengraph, pagefind, \
	pytest' 2>/dev/null || { \
	echo "make: $(PY) lacks a package that builds the site; install them: \
	grep -iE 'sphinx|pagefind|pytest' requirements.txt | $(PY) -m pip install -r /dev/stdin" >&2; \
	exit 1; }
else
site-tools: $(VENV)/site.stamp
test-tools: $(VENV)/site.stamp $(VENV)/test.stamp
# A GPU machine may install the four packages of the tutorials and pytest only.
run-tools: $(VENV)/test.stamp
endif

# What pip says when no index answers takes a screen: one sentence does.
PIP_LOG = $(VENV)/pip.log
INSTALLED = $(INSTALL) -r $< -c constraints.txt 2>$(PIP_LOG) || { \
	if grep -q 'connection broken by' $(PIP_LOG); then \
	echo "make: no network: pip reaches no package index, from which it \
	installs $<. Connect, and run make again." >&2; \
	else cat $(PIP_LOG) >&2; \
	echo "make: pip could not install $<; its reason is above." >&2; fi; \
	exit 1; }

$(VENV)/site.stamp: requirements.txt constraints.txt | check-python
	@test -x $(PY) || { echo "Creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing requirements.txt (torch is large: this takes minutes)"
	@$(INSTALLED)
	@touch $@

$(VENV)/test.stamp: tests/requirements.txt $(VENV)/site.stamp
	@$(INSTALLED)
	@touch $@
