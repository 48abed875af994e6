# Every target but gpu-check and site sets up .venv first when it is missing or the lock has changed.
.DEFAULT_GOAL := help
BIN := .venv/bin
export RAY_USAGE_STATS_ENABLED := 0
UNIT_TESTS = $(BIN)/pytest tests/unit tests/oracle -n logical --maxprocesses 4 --dist worksteal -m "not slow"

.PHONY: help setup demo test test-all unit chaos compatibility parallel oracle oracle-setup tokenizers torchvision verifiers tinker evaluators newest clients megatron gpu-check lint types imports docs site lock mlflow clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup:  ## Make .venv from the pinned lock (does nothing when it is up to date)
	@bash scripts/setup.sh

demo: setup  ## Train the quickstart: a real pretrained model, a few minutes on two CPU cores
	@$(BIN)/python run_pipeline.py --config configs/rlvr_quickstart.yaml

test: setup oracle-setup tokenizers torchvision verifiers  ## Lint, types, import contract, all tests but those marked slow
	@$(BIN)/python scripts/run_tests.py

test-all: setup oracle-setup tokenizers torchvision verifiers tinker evaluators clients megatron newest  ## The same and the slow ones: every test that a CPU can run
	@$(BIN)/python scripts/run_tests.py --slow

unit: setup  ## Unit and oracle tests only: without Ray, minutes
	$(UNIT_TESTS)

chaos: setup  ## Kill, stop and break the roles of runs in all phases, and compare what comes out: about 50 minutes
	$(BIN)/pytest tests/chaos -m "not gpu"

compatibility: setup torchvision  ## Run engines, training backends and families of models together; writes docs/compatibility.md
	$(BIN)/pytest tests/integration/test_compatibility.py --compatibility docs/compatibility.md

parallel: setup megatron  ## Compare every layout of ranks with one rank; prints and writes docs/parallel.md
	$(BIN)/pytest tests/integration/test_parallel.py --parallel docs/parallel.md

oracle: oracle-setup  ## Compare the algorithms with other libraries; prints and writes docs/conformance.md
	$(BIN)/pytest tests/oracle --conformance docs/conformance.md

oracle-setup: setup  ## Install the libraries that it compares with, apart from .venv
	@bash scripts/environment.sh oracle

tokenizers: setup  ## Fetch the tokenizers and chat templates that conversations are tested with
	@bash scripts/tokenizers.sh

torchvision: setup  ## Fetch a torchvision for vLLM with images on a CPU, apart from .venv: docs/vision.md
	@bash scripts/torchvision.sh

verifiers: setup  ## Make an environment with the verifiers library, apart from .venv: docs/verifiers.md
	@bash scripts/environment.sh verifiers

megatron: setup  ## Fetch Megatron-Core and its converter, apart from .venv: docs/backends.md
	@bash scripts/megatron.sh
	@bash scripts/megatron.sh megatron_bridge

tinker: setup  ## Make an environment with tinker's client and recipes, apart from .venv: docs/service.md
	@bash scripts/environment.sh tinker

evaluators: setup  ## Make an environment with lm-evaluation-harness and inspect: examples/other_evaluators
	@bash scripts/environment.sh evaluators

newest: setup  ## Fetch the newest transformers, MLflow, pydantic and NumPy, apart from .venv: docs/compatibility.md
	@bash scripts/environment.sh newest

clients: setup  ## Make an environment with frameworks for agents and coding agents: docs/agents.md
	@bash scripts/environment.sh clients

gpu-check:  ## Run what only a GPU can show, with the python3 of the active environment: docs/gpu.md
	@python3 scripts/gpu_check.py

lint: setup  ## Ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## mypy, strict
	$(BIN)/mypy

imports: setup  ## The layers between packages
	$(BIN)/lint-imports

docs: setup  ## Regenerate docs/configuration.md and the JSON Schema
	$(BIN)/python scripts/make_config_docs.py

site:  ## Build the documentation site into build/site, with an environment of its own
	@bash scripts/site.sh

lock: setup  ## Resolve requirements/*.in into requirements/cpu.txt, gpu.txt and docs.txt (needs uv)
	bash scripts/lock.sh

mlflow: setup  ## Open the MLflow UI on the local store of all runs
	@$(BIN)/roll-like ui

clean:  ## Remove caches and build leftovers (runs and .venv stay)
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
