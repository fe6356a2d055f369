# Everything a person does here. Each target sets up what it needs from nothing.
#   make setup                  the environment in .venv, and the Debian packages of the sandbox
#   make quickstart [CONTROL=1] post-train a small model on two cores, 7 to 16 minutes, 5 to 9 more with CONTROL
#   make test                   all tests
#   make nightly                every recipe from end to end on the tiny model, a minute each
#   make test-vllm              the engines' tests against a real vLLM server, in an environment of its own (3.5 GB)
#   make check                  format, lint, types, import layers
#   make bench [NAME=engine]    benchmarks, beside a peer
#   make study                  the study of asynchrony: what is missing of it, then its report; within three hours
#   make soak [LEASES=10000]    leases with random faults, and a count of what is left behind
#   make soak-engine [REQUESTS=30000]  requests of random sizes with cancels; memory must stay flat
#   make mutants                breaks the code on purpose; each break must fail its test
#   make fetch                  the default model, converted and cached
#   make lock                   pin the newest versions that pyproject.toml allows
# PYTHON=python3.12 picks the interpreter; PIP_ARGS="--index-url …" is passed on to pip.

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
VLLM := .venv-vllm
RUN := $(VENV)/bin/python -m
READY := $(VENV)/.ready
WORKERS := 2

.PHONY: help setup quickstart test nightly test-vllm check bench study soak soak-engine mutants fetch lock clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(READY)

$(READY): requirements.lock pyproject.toml tools/setup.sh
	@tools/setup.sh $(VENV)
	@touch $@

quickstart: $(READY)
	$(VENV)/bin/lehr quickstart $(if $(CONTROL),--control) $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: $(READY)
	$(RUN) pytest -n $(WORKERS) --dist loadfile $(ARGS)

nightly: $(READY)
	$(RUN) pytest -m nightly tests/e2e/test_recipes.py $(ARGS)

$(VLLM)/.ready: tools/setup-vllm.sh $(READY)
	@tools/setup-vllm.sh $(VLLM)
	@touch $@

test-vllm: $(VLLM)/.ready fetch
	LEHR_VLLM_PYTHON=$(VLLM)/bin/python $(RUN) pytest tests/contract/engine -k vllm $(ARGS)

check: $(READY)
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(VENV)/bin/lint-imports
	$(RUN) pyright

bench: $(READY)
	$(RUN) benchmarks.run $(or $(NAME),all)

study: $(READY)
	$(RUN) studies.asynchrony $(ARGS)

soak: $(READY)
	$(VENV)/bin/python tests/soak/leases.py $(LEASES)

soak-engine: $(READY)
	$(VENV)/bin/python tests/soak/engine.py $(REQUESTS)

mutants: $(READY)
	$(VENV)/bin/python tests/mutants/run.py $(ARGS)

fetch: $(READY)
	$(VENV)/bin/lehr models fetch smollm2-135m

lock:
	tools/lock.sh

clean:
	rm -rf build dist .pytest_cache .ruff_cache
