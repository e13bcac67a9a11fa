# `make demo` and `make test` need Python 3.11 or newer, git, make and a C++ compiler; the rest they install into .venv, once.

PYTHON ?= python3
# What runs the targets. On a machine that brings its own torch: make gpu-check RUN=python3
RUN ?= .venv/bin/python
# Processes that share the tests.
JOBS ?= 2
INSTALLED := $(if $(filter .venv/%,$(RUN)),.venv/installed)

.PHONY: help .venv demo test test-slow test-pairs test-presets test-scale architectures check bench gpu-check docs

help:
	@echo "make demo       plan, train, evaluate and report a small model on this machine"
	@echo "make test       the tests"
	@echo "make test-pairs every pair of techniques that may go together"
	@echo "make test-presets every public model of 'preheat models' dry-run with all its layers"
	@echo "make test-scale every technique on several processes against one, every layout from every other, two hosts and their faults"
	@echo "make architectures  every architecture planned, trained, resumed, exported and generated with, into docs/pages/architectures.md"
	@echo "make check      ruff, codespell and mypy"
	@echo "make bench      training speed and memory against other trainers, on this CPU"
	@echo "make gpu-check  the tests and benchmarks that need a CUDA device"
	@echo "make docs       the site: guides, techniques, recipe keys, evidence, into site/"

.venv: .venv/installed

.venv/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "preheat needs Python 3.11 or newer, and '$(PYTHON)' is not: name one, as in: make demo PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --requirement requirements.lock
	.venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: .venv/installed
	@.venv/bin/preheat demo

test: $(INSTALLED)
	@$(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: $(INSTALLED)
	@$(RUN) -m pytest -n $(JOBS) -m slow

test-pairs: $(INSTALLED)
	@PREHEAT_PAIRS=all $(RUN) -m pytest tests/contract -k "pairs or together"

test-presets: $(INSTALLED)
	@PREHEAT_PRESETS=all $(RUN) -m pytest tests/unit/models/test_presets.py

test-scale: $(INSTALLED)
	@PREHEAT_SCALE=all $(RUN) -m pytest tests/distributed tests/e2e/test_out_of_memory.py

architectures: $(INSTALLED)
	@$(RUN) -m tests.architectures.matrix

check: $(INSTALLED)
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check
	@$(RUN) -m codespell_lib
	@$(RUN) -m mypy

bench: $(INSTALLED)
	@$(RUN) benchmarks/cpu_vs_peers.py

# First what is not installed, or that there is no CUDA device, in one line.
gpu-check: $(INSTALLED)
	@$(RUN) benchmarks/gpu_check.py correct --list >/dev/null
	@$(RUN) -m pytest tests/gpu
	@for part in correct memory ladder; do $(RUN) benchmarks/gpu_check.py $$part || exit 1; done

docs: $(INSTALLED)
	@$(RUN) docs/build.py && echo "the site is in site/: open site/index.html"
