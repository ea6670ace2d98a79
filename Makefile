# Two commands on a fresh Linux machine with python3, pip and make:
#   make demo   sets up .venv and runs one packed training step on real document shapes
#   make test   sets up .venv and runs lint, types and tests
#   make sim           runs the simulator's slow corpus: our kernels at length, and other people's
#   make example       fine-tunes a tiny MiniMax-M3 of Transformers, twice, and compares the losses
#   make integrations  tests the integrations with the oldest and the newest supported Transformers,
#                      and with NeMo AutoModel
# A python3 that already has torch (a GPU machine, say) is reused instead of downloading another one.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
# Idle OpenMP threads sleep instead of spinning: where the cores are shared, that is ten times faster.
export OMP_WAIT_POLICY ?= PASSIVE
BIN    := $(VENV)/bin
# Not by pip, which compiles module after module in one process. Some packages bring files for other
# versions of Python, which do not compile; no more than for pip is that an error.
INSTALL := pip install --quiet --no-compile
COMPILE := -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true

.PHONY: help demo test lint types pytest sim example integrations integrations-transformers \
  integrations-automodel clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

$(BIN)/python:
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then \
	  echo "setting up $(VENV) on top of the installed torch"; \
	  $(PYTHON) -m venv --system-site-packages $(VENV) || { rm -rf $(VENV); exit 1; }; \
	else \
	  echo "setting up $(VENV) with $(TORCH)"; \
	  $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; \
	fi

# torch comes first and by an exact version: left to the resolver, a plain requirement may bring a build
# of several gigabytes.
$(VENV)/.torch: | $(BIN)/python
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m $(INSTALL) "$(TORCH)"
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	@$(BIN)/python -m $(INSTALL) --editable '.[plot]'
	@$(BIN)/python $(COMPILE)
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@$(BIN)/python -m $(INSTALL) --editable '.[dev]'
	@$(BIN)/python $(COMPILE)
	@touch $@

demo: $(VENV)/.demo
	@mkdir -p out
	$(BIN)/openmsa run --plot out/demo.png --json out/demo.json

$(VENV)/.example: pyproject.toml $(VENV)/.torch
	@$(BIN)/python -m $(INSTALL) --editable '.[plot,transformers]'
	@$(BIN)/python $(COMPILE)
	@touch $@

example: $(VENV)/.example
	$(BIN)/python examples/finetune_m3_tiny.py --plot out/example.png

# Environments of their own: what a framework pins is its own affair.
integrations: integrations-transformers integrations-automodel

integrations-transformers:
	@for version in '==5.17.*' '>=5.17'; do \
	  environment=.venv-transformers-$$(echo "$$version" | tr -dc '0-9.=' | tr '=' '-'); \
	  echo "transformers $$version in $$environment"; \
	  test -x $$environment/bin/python || $(PYTHON) -m venv $$environment || exit 1; \
	  $$environment/bin/python -m pip install --quiet "$(TORCH)" && \
	  $$environment/bin/python -m pip install --quiet --editable . pytest matplotlib \
	    "transformers$$version" 'accelerate>=1.1' && \
	  $$environment/bin/python -m pytest -q tests/integrations || exit 1; \
	done

# AutoModel wants Python 3.11 or later, and brings 3 GB with it.
integrations-automodel:
	@environment=.venv-automodel; echo "nemo-automodel 0.7 in $$environment"; \
	  test -x $$environment/bin/python || $(PYTHON) -m venv $$environment || exit 1; \
	  $$environment/bin/python -m pip install --quiet "$(TORCH)" && \
	  $$environment/bin/python -m pip install --quiet --editable '.[automodel]' pytest && \
	  $$environment/bin/python -m pytest -q tests/integrations/test_automodel*.py

sim: $(VENV)/.dev
	PTXSIM_FULL=1 $(BIN)/python -m pytest -rs tests/ptxsim tests/sm90 tests/sm100 tests/triton_stages/test_simulated.py \
	  tests/triton_stages/test_ahead.py

test: lint types pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# A file's tests stay together, as they share what is costly to make; in the order of tests/conftest.py,
# which has the files that take minutes first.
pytest: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

clean:
	rm -rf $(VENV) out build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
