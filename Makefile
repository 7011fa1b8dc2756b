# Two commands matter: `make serve` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint lock.txt
RUN := $(VENV)/.installed-run
LOAD := $(VENV)/.installed-load
DEV := $(VENV)/.installed-dev
AGENT := .venv-agent/bin/ddapm-test-agent
PYTEST := $(BIN)/python -m pytest

.PHONY: help serve demo test cover lint bench lock clean
help:  ## This list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

serve: $(RUN)  ## Set up and serve on 127.0.0.1:8000, with a Valkey of its own
	@exec $(BIN)/python -m service

demo: $(LOAD)  ## Three visitors, what they click, and how their slates move
	@$(BIN)/python -m loadtests demo

test:  ## Set up, check style, types and layers, and run the tests
	@$(MAKE) --no-print-directory --jobs=2 $(DEV) $(AGENT)
	@$(MAKE) --no-print-directory lint
	$(PYTEST) --numprocesses auto --dist loadfile -m "not alone"
	$(PYTEST) -m alone

cover: $(DEV) $(AGENT)  ## The tests once more, with the coverage of service and models
	$(PYTEST) --numprocesses auto --dist loadfile -m "not alone" --cov --cov-report=
	$(PYTEST) -m alone --cov --cov-append --cov-report=term:skip-covered

lint: $(DEV)  ## Style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(LOAD)  ## Capacity on one core, CPU a request, freshness
	$(BIN)/python -m loadtests bench

COMPILE := $(BIN)/uv pip compile pyproject.toml --universal --upgrade --no-emit-index-url \
  --no-header --no-annotate --python-version 3.11 --quiet
EXTRAS := $(addprefix --extra ,cpu datadog otel profile load openvino rtx ship stores signed track train dev)
lock: $(DEV)  ## Resolve the newest versions into lock.txt, for cpu and for gpu
	$(BIN)/pip install --quiet uv
	$(COMPILE) $(EXTRAS) > .lock-cpu
	$(COMPILE) --extra gpu --constraint .lock-cpu > .lock-gpu
	sort --unique .lock-cpu .lock-gpu > lock.txt
	rm .lock-cpu .lock-gpu

clean:  ## Remove what the other commands set up
	rm -rf $(VENV) .venv-helm .venv-agent .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info

$(RUN): pyproject.toml lock.txt
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --editable '.[cpu]'
	@touch $@

$(LOAD): $(RUN)
	@$(PIP) --editable '.[cpu,load]'
	@touch $@

$(DEV): $(RUN)
	@echo "setting up what the tests need"
	@$(PIP) --no-compile --editable '.[cpu,datadog,otel,profile,load,openvino,rtx,ship,train,dev]'
	@touch $@

# Datadog's test agent, whose needs are not ours, in an environment of its own
$(AGENT):
	@echo "setting up the agent that receives the tests' spans"
	@$(PYTHON) -m venv .venv-agent
	@.venv-agent/bin/pip install --quiet --disable-pip-version-check ddapm-test-agent==1.69.1
