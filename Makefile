# `make demo` and `make test` need Python 3.11 or newer, git and make; a C++ compiler makes CPUs faster. They install the rest into .venv, once.

PYTHON ?= python3
# What runs the targets. On a machine that brings its own torch: make gpu-check RUN=python3
RUN ?= .venv/bin/python
# Processes that share the tests.
JOBS ?= 2
# What running needs, and what testing and developing needs beside it.
RUNNING := $(if $(filter .venv/%,$(RUN)),.venv/installed)
INSTALLED := $(if $(filter .venv/%,$(RUN)),.venv/installed-dev)
# Python compiles what it imports and keeps it: to compile all packages beforehand takes longer than the demo's start.
# Where this variable is set, as in many containers, it would keep nothing and compile at each start.
unexport PYTHONDONTWRITEBYTECODE
# Another release of torch, which `make test-torch` tests in an environment of its own.
TORCH ?= 2.11.0
OTHER := .venv-torch-$(TORCH)
PIP := .venv/bin/python -m pip install --quiet --no-compile

.PHONY: help .venv demo test test-slow test-torch test-pairs test-presets test-scale architectures check bench gpu-check docs notebooks store-notebooks dist

help:
	@echo "make demo       plan, train, evaluate and report a small model on this machine"
	@echo "make test       run the tests"
	@echo "make test-slow  run the slow tests: notebooks, a fine-tuning, an ablation"
	@echo "make test-torch test what runs on another torch: planning, training, resume, export (TORCH=2.11.0, the oldest)"
	@echo "make test-pairs test all pairs of techniques that can be combined"
	@echo "make test-presets dry-run all public models of 'preheat models' with all layers"
	@echo "make test-scale compare all techniques on several processes with one; read checkpoints across layouts; two hosts and their faults"
	@echo "make architectures  run and check all architectures, and write docs/pages/architectures.md"
	@echo "make check      run ruff, codespell and mypy"
	@echo "make bench      compare training speed and memory with other trainers, on this CPU"
	@echo "make gpu-check  run the tests and benchmarks that need a CUDA device"
	@echo "make docs       build the site in site/: guides, techniques, recipe keys, evidence"
	@echo "make notebooks  install JupyterLab into .venv and open it in notebooks/"
	@echo "make store-notebooks  run all notebooks at their real size and store their outputs in them"
	@echo "make dist       build and check the wheel and the source archive in dist/"

.venv: .venv/installed-dev

.venv/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "preheat needs Python 3.11 or newer, and '$(PYTHON)' is not: name one, as in: make demo PYTHON=python3.11" >&2; exit 1; }
	@echo "installing into .venv what preheat needs to run (1.2 GiB, more with CUDA)"
	@$(PYTHON) -m venv .venv
	@$(PIP) --requirement requirements.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

.venv/installed-dev: .venv/installed requirements-dev.lock
	@echo "installing into .venv what its tests and its development need (1.5 GiB)"
	@$(PIP) --requirement requirements.lock --requirement requirements-dev.lock
	@touch $@

demo: .venv/installed
	@.venv/bin/preheat demo

test: $(INSTALLED)
	@$(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: $(INSTALLED)
	@$(RUN) -m pytest -n $(JOBS) -m slow

# All locked versions but torch's, and that of setuptools: older releases of torch limit it, and pyproject.toml needs 77.
$(OTHER)/installed: requirements.lock requirements-dev.lock pyproject.toml
	@echo "installing torch $(TORCH) and what preheat needs into $(OTHER) (1.2 GiB, more with CUDA)"
	@$(PYTHON) -m venv $(OTHER)
	@grep --invert-match --extended-regexp '^(torch|setuptools)==' requirements.lock >$(OTHER)/requirements.txt
	@$(OTHER)/bin/python -m pip install --quiet --no-compile --requirement $(OTHER)/requirements.txt \
	  --constraint requirements-dev.lock torch==$(TORCH) 'setuptools>=77' pytest pytest-xdist
	@$(OTHER)/bin/python -m pip install --quiet --no-compile --no-deps --no-build-isolation --editable .
	@touch $@

test-torch: $(OTHER)/installed
	@$(OTHER)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow" $(TORCH_TESTS)
	@$(OTHER)/bin/python benchmarks/gpu_check.py correct --device cpu --only $(TORCH_CASES) >/dev/null

# Names of torch; its allocator; planning; a loss with torch's own kernel; tracing; a training, its resume, and exports.
TORCH_TESTS := $(addprefix tests/unit/,core/test_torch_compat.py hardware/test_hardware.py ops/test_loss_kernels.py \
  compress/test_export_formats.py::test_a_traced_model_takes_any_batch_and_length \
  planning/test_planning.py planning/test_fake_tensor_cache.py planning/test_roofline.py) $(addprefix tests/e2e/, \
  test_commands.py::test_plan_train_report_eval_generate_export test_commands.py::test_lora_run_exports_merged \
  test_commands.py::test_a_run_can_be_lengthened)
TORCH_CASES := operators techniques/chunked_loss techniques/nf4 recipes/demo recipes/fine-tune resume/deterministic

test-pairs: $(INSTALLED)
	@PREHEAT_PAIRS=all $(RUN) -m pytest tests/contract -k "pairs or together"

test-presets: $(INSTALLED)
	@PREHEAT_PRESETS=all $(RUN) -m pytest tests/unit/models/test_presets.py

test-scale: $(INSTALLED)
	@PREHEAT_SCALE=all $(RUN) -m pytest tests/distributed tests/e2e/test_out_of_memory.py tests/e2e/test_gpu_check.py

architectures: $(INSTALLED)
	@$(RUN) -m tests.architectures.matrix

check: $(INSTALLED)
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check
	@$(RUN) -m codespell_lib
	@$(RUN) -m mypy

bench: $(RUNNING)
	@$(RUN) benchmarks/cpu_vs_peers.py

# First what is not installed, or that there is no CUDA device, in one line.
gpu-check: $(INSTALLED)
	@$(RUN) benchmarks/gpu_check.py correct --list >/dev/null
	@$(RUN) -m pytest tests/gpu
	@for part in correct memory ladder; do $(RUN) benchmarks/gpu_check.py $$part || exit 1; done

docs: $(INSTALLED)
	@$(RUN) docs/build.py && echo "the site is in site/: open site/index.html"

# The constraints keep the locked releases; JupyterLab's own packages are not locked.
.venv/installed-notebooks: .venv/installed requirements-dev.lock pyproject.toml
	@echo "installing into .venv what the notebooks need (JupyterLab)"
	@$(PIP) --constraint requirements.lock --constraint requirements-dev.lock --no-build-isolation --editable '.[notebooks]'
	@touch $@

notebooks: .venv/installed-notebooks
	@.venv/bin/jupyter lab --notebook-dir notebooks

store-notebooks: $(INSTALLED)
	@$(RUN) notebooks/store.py $(NOTEBOOKS)

dist: $(INSTALLED)
	@rm -rf dist build
	@$(RUN) -m build --no-isolation
	@$(RUN) -m twine check --strict dist/*
