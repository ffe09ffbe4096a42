# What a checkout can do with Python 3.11 to 3.13 and make alone; `make` lists it. Everything lands in the checkout.

VENV ?= .venv
ifndef ACCELERATOR
ACCELERATOR := $(shell if [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi)
endif
export VENV PYTHON

DEMO_MODEL := .models/SmolLM2-135M-Instruct
MODEL ?= $(DEMO_MODEL)
# To be made first; nothing, where the user names a model.
MODEL_FILES := $(if $(filter $(DEMO_MODEL),$(MODEL)),$(DEMO_MODEL)/config.json)
CONFIG ?= $(if $(filter cpu,$(ACCELERATOR)),$(if $(MODEL_FILES),examples/demo.yaml))
PORT ?=
ARGS ?=
URL = http://127.0.0.1:$(or $(PORT),$(if $(CONFIG),$(shell sed -n 's/^port: *\([0-9]*\).*/\1/p' $(CONFIG) 2>/dev/null)),8000)

# The demo model is small: on a CPU more threads than these slow it down, and it needs no compiler.
CPU_THREADS := $(shell n=$$(nproc); echo $$((n > 8 ? 8 : n > 2 ? n - 1 : 1)))
CPU_ENV := VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=$(CPU_THREADS) TORCH_COMPILE_DISABLE=1
DEMO_ENV := HF_HUB_OFFLINE=1 $(if $(filter cpu,$(ACCELERATOR)),$(CPU_ENV))
SERVE_ENV := VLLM_NO_USAGE_STATS=1 $(if $(MODEL_FILES),$(DEMO_ENV))
# One thread each: with more, a busy machine can make a request thirty times slower.
TEST_ENV := VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TORCH_COMPILE_DISABLE=1 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind

.PHONY: help
help:
	@echo 'make serve       an OpenAI-compatible server with KV offload, on a small demo model'
	@echo '                 MODEL=name-or-folder CONFIG=kvortex.yaml PORT=8000 ARGS="--any-vllm-option"'
	@echo 'make demo        conversations that outgrow the KV pool, with and without KVortex; a few minutes'
	@echo 'make test        linters, types, layers and all tests'
	@echo 'make lint        the first three alone'
	@echo 'make bench       the benchmarks that need neither GPU nor model: index, scheduler step, policies,'
	@echo '                 checksums, and two loads in virtual time; some minutes'
	@echo 'make clean       removes everything that make made'
	@echo
	@echo 'PYTHON=python3.12 picks the Python, ACCELERATOR=cpu the vLLM build, VENV=.venv the environment.'

# The others load a model or need a GPU; their docstrings say what.
BENCHMARKS := index.py scheduler_step.py 'eviction.py --seeds 1' verify.py virtual_turns.py virtual_sessions.py

# --- what the targets stand on: one environment, one model -----------------------------------------------------

# A stamp from another accelerator or a moved checkout does not count: make_environment.sh writes made_for.
ifneq ($(shell cat $(VENV)/made_for 2>/dev/null),$(ACCELERATOR) $(CURDIR))
.PHONY: $(VENV)/installed
endif

$(VENV)/installed: pyproject.toml requirements/cpu_overrides.txt tools/make_environment.sh
	@tools/make_environment.sh $(ACCELERATOR) demo dev
	@touch $@

$(DEMO_MODEL)/config.json: | $(VENV)/installed
	@$(VENV)/bin/python examples/make_demo_model.py $(DEMO_MODEL)

# --- targets ---------------------------------------------------------------------------------------------------

# `exec`: a SIGTERM to make must reach the server, not a shell in between.
.PHONY: serve
serve: $(VENV)/installed $(MODEL_FILES)
	@echo 'When the server says "Application startup complete", in another terminal:'
	@echo
	@echo "  curl $(URL)/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"What is a cache?\"}], \"max_tokens\": 60}'"
	@echo '  $(VENV)/bin/kvortex inspect --url $(URL)'
	@echo
	@exec env $(SERVE_ENV) $(VENV)/bin/kvortex serve $(MODEL) $(if $(CONFIG),--config $(CONFIG)) $(if $(PORT),--port $(PORT)) $(ARGS)

.PHONY: demo
demo: $(VENV)/installed $(MODEL_FILES)
	@exec env $(SERVE_ENV) $(VENV)/bin/python examples/demo.py $(MODEL)

.PHONY: lint
lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --strict
	$(VENV)/bin/lint-imports

.PHONY: test
test: lint $(DEMO_MODEL)/config.json
	@env $(TEST_ENV) tools/run_tests.sh $(VENV)/bin/python

.PHONY: bench
bench: $(VENV)/installed
	@set -e; for benchmark in $(BENCHMARKS); do \
		echo "benchmarks/$$benchmark"; $(VENV)/bin/python benchmarks/$$benchmark; done

.PHONY: clean
clean:
	rm -rf .models .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks .import_linter_cache dist build
	if [ -e $(VENV)/made_for ]; then rm -rf $(VENV); fi
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
