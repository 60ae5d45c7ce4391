# Everything runs from .venv, which `make setup` creates. Plain pip on purpose: it takes the torch
# build that this machine's package index is set up for, within the bound in pyproject.toml.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.setup-done

# libgomp's default spinning makes torch several times slower as soon as cores are shared.
export GOMP_SPINCOUNT ?= 10000

.DEFAULT_GOAL := help
.PHONY: help setup demo test check fix docs pebble bench faults clients browser vllm mutants scale

help:
	@echo "make setup    create .venv with what the demo and the tests need"
	@echo "make demo     train, judge, deploy and chat with a model on this machine"
	@echo "make test     checks, then every test that is not opt-in"
	@echo "make check    lint, format, types, import contracts"
	@echo "make fix      mend what lint and format can mend by themselves"
	@echo "make docs     write the generated reference pages again"
	@echo "make pebble   build the built-in model again"
	@echo "opt-in suites: make faults clients browser vllm bench mutants scale"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Honesmith needs Python 3.11 or newer, this is %d.%d; name another with make PYTHON=..." % v[:2])'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check --quiet -e ".[train,dev]"
	@touch $@

# The demo keeps everything in a home of its own; make demo SEED=1 trains with other chance.
SEED ?= 0
demo: setup
	$(VENV)/bin/honesmith demo --home .demo-home --seed $(SEED)

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports

fix: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

test: check
	$(PY) -m pytest -n 2 --dist loadfile \
		-m "not faults and not clients and not browser and not vllm and not bench and not scale"

docs: setup
	$(PY) docs/generate.py

pebble: setup
	$(PY) -P -m engine.worker.build_pebble

# pytest leaves with 5 when a marker selects nothing: a suite nobody has written must not look green.
faults clients browser vllm scale: setup
	@$(PY) -m pytest -m $@; status=$$?; \
	if [ $$status -eq 5 ]; then echo "make $@: there is no such suite yet, nothing was tested." >&2; exit 1; fi; \
	exit $$status

bench: setup
	$(PY) benchmarks/cold_start.py
	@echo "Training is not measured beside other trainers yet."

mutants: setup
	@echo "make mutants: there is no mutation suite yet, nothing was tested." >&2; exit 1
