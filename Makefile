# The commands people need. Each one does its own set-up; nothing has to be activated first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

NATIVE := CMakeLists.txt $(shell find csrc -type f 2>/dev/null)
STAMP := $(VENV)/.installed

.PHONY: up test check format bench clean help

up: $(STAMP)  ## prefill, decode and proxy on this machine; prints a URL and a curl line
	$(BIN)/pdlink up --config configs/up.yaml

test: $(STAMP)  ## everything that needs no GPU and no heavy extra
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(STAMP)  ## ruff, ruff format, mypy strict, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p pdlink -p pdlink_proxy -p pdlink_bench -p tests
	$(BIN)/clang-format --dry-run --Werror $$(find csrc -name '*.cpp' -o -name '*.h')

format: $(STAMP)  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find csrc -name '*.cpp' -o -name '*.h')

bench: $(STAMP)  ## the transfer benchmark with its default workload
	$(BIN)/pdlink bench transfer

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt scikit-build-core nanobind cmake ninja libucx-cu13 torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

clean:  ## remove what the other commands made
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'
