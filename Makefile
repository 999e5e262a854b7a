# What people run in a bare clone: `make test`, `make demo`.  Both build the environment they need once.
#
#   PYTHON=python3.12  interpreter that the environment is made from
#   INSTALL=0          make no environment: run $(PYTHON), which has the packages already
#   WORKERS=2          processes that share the test files; 0: one, without pytest-xdist

PYTHON ?= python3
INSTALL ?= 1
VENV ?= .venv
WORKERS ?= 2
HF_OLD := 5.17

export OMP_NUM_THREADS ?= 1

PIP = $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet

ifeq ($(INSTALL),1)
RUN := $(VENV)/bin/python
READY := $(VENV)/ready
READY_OLD := $(VENV)/ready-hf-$(HF_OLD)
else
RUN := env PYTHONPATH=src $(PYTHON)
endif

PYTEST = -m pytest $(if $(filter-out 0,$(WORKERS)),-n $(WORKERS) --dist loadfile)

.PHONY: test test-hf-old demo check install clean

# The last line is pytest's summary of the whole suite.
test: $(READY) $(if $(READY_OLD),test-hf-old)
	@$(RUN) -c 'import torch, transformers as t; print(f"suite: torch {torch.__version__}, transformers {t.__version__}")'
	@$(RUN) $(PYTEST)

# What depends on the release of transformers, again with the older one that is supported.
test-hf-old: RUN_OLD = env PYTHONPATH=$(abspath $(VENV))/hf-$(HF_OLD) $(RUN)
test-hf-old: $(READY) $(READY_OLD)
	@$(RUN_OLD) -c 'import transformers as t; assert t.__version__.startswith("$(HF_OLD)."), t.__version__; \
	print(f"older release: transformers {t.__version__}")'
	@$(RUN_OLD) $(PYTEST) $$(grep -lE 'transformers|tiny_models' tests/compiler/test_*.py) tests/runtime/test_tokens.py

demo: $(READY)
	@$(RUN) bench/demo.py

# Format, lint, types, layers; no tests.
check: $(READY)
	@.ci/run checks

install: $(READY)

# torch comes first and alone: a build at hand (the CPU one) is kept by what follows.
$(VENV)/ready: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
	sys.exit(f"midstream: Python {v} found, 3.11 or newer expected; run make PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "installing into $(VENV) (once, a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --constraint constraints.txt torch
	@$(PIP) --constraint constraints.txt --editable '.[hf,dev]'
	@touch $@

$(VENV)/ready-hf-$(HF_OLD): constraints-hf-$(HF_OLD).txt $(VENV)/ready
	@rm -rf $(VENV)/hf-$(HF_OLD)
	@$(PIP) --no-deps --target $(VENV)/hf-$(HF_OLD) --requirement constraints-hf-$(HF_OLD).txt
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks build dist
