# On a fresh machine, start with `make train` or `make test`; `make help` lists the other commands.
# Any variable can be given on the command line: make test PYTHON=python3.11

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
PYTHON ?= python3
CONFIG ?= configs/tiny_cpu.yaml
RUN ?= runs/tiny_cpu
# XLA's arrays in huge pages, and one arena of malloc: less processor time and memory for the same bits (docs/log.md).
HUGE_PAGES ?= $(or $(GLIBC_TUNABLES),glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1)
# Extra arguments of the training command and of pytest.
ARGS ?=
# Which tests `make test` runs.
MARKED ?= not long
# Each worker gets whole files (their tests share engines and programs); runs and meshes come first.  PYTEST_ARGS come
# after it, so that -n 0 among them holds.  Three workers on two cores: some tests wait for other processes.
WORKERS := 3
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The Python whose version counts: the environment's if it exists, else the one that will make it.
ENV_PYTHON := $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,$(PYTHON))
PY_VERSION := $(shell $(ENV_PYTHON) -c 'import sys; print("%d%02d" % sys.version_info[:2])' 2>/dev/null)
# Two sets of pinned versions: Python 3.11 with torch (the full tests), later Pythons with the newer JAX, without it.
ifeq ($(PY_VERSION),311)
CONSTRAINTS := $(CURDIR)/.ci/constraints-py311.txt
TEST_EXTRAS ?= dev,hf,tasks,torch,real
else
CONSTRAINTS := $(CURDIR)/.ci/constraints-py312.txt
TEST_EXTRAS ?= dev,hf,tasks
endif

RUN_PYTHON := $(VENV)/bin/python
# The pins also hold for build requirements; the two variables are those of older and newer releases of pip.
PIP_INSTALL = PIP_CONSTRAINT="$(CONSTRAINTS)" PIP_BUILD_CONSTRAINT="$(CONSTRAINTS)" PIP_DISABLE_PIP_VERSION_CHECK=1 \
	$(RUN_PYTHON) -m pip install -qq -c "$(CONSTRAINTS)"
# The pins of Python 3.11 are complete, so that nothing has to be resolved.  vLLM's own requirements would bring torchvision and
# others, which do not load beside a CPU build of torch.  torch is already installed and stays unchanged.
INSTALL_VLLM = $(if $(filter 311,$(PY_VERSION)),@$(PIP_INSTALL) --no-deps -r "$(CONSTRAINTS)")
say = @printf '\033[1m==> %s\033[0m\n' $(1)

.PHONY: help
help:  ## List the commands
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(RUN_PYTHON):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "make: Python 3.11 or newer is needed: got PYTHON=$(PYTHON) ($$($(PYTHON) --version 2>&1)). Try: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }
	$(call say,"making the virtual environment $(VENV) with $$($(PYTHON) --version)")
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "make: the venv module failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }

$(VENV)/.installed-train: pyproject.toml $(CONSTRAINTS) | $(RUN_PYTHON)
	$(call say,"installing jetrl-jax into $(VENV) with the versions of $(notdir $(CONSTRAINTS)) (about a minute and 1 GB)")
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(CONSTRAINTS) | $(RUN_PYTHON)
	$(call say,"installing jetrl-jax[$(TEST_EXTRAS)] into $(VENV) with the versions of $(notdir $(CONSTRAINTS)) (some minutes and 4 GB)")
	@$(PIP_INSTALL) -e '.[$(TEST_EXTRAS)]'
	$(INSTALL_VLLM)
	@touch $@ $(VENV)/.installed-train

$(VENV)/.installed-gpu: pyproject.toml $(CONSTRAINTS) | $(RUN_PYTHON)
	$(call say,"installing jetrl-jax[dev,cuda] into $(VENV) with the versions of $(notdir $(CONSTRAINTS)) (some minutes and several GB)")
	@$(PIP_INSTALL) -e '.[dev,cuda]'
	@touch $@ $(VENV)/.installed-train

# The Python of GPU benchmarks: PYTHON_GPU if given; else PYTHON if no environment exists and it has everything that the project
# and its tests need; nothing is installed then.  Otherwise the environment, with JAX for a GPU if the machine has one.
GPU_COMMANDS := gpu bench-kernels bench-train
ifneq ($(filter $(GPU_COMMANDS),$(MAKECMDGOALS)),)
ifeq ($(PYTHON_GPU)$(wildcard $(RUN_PYTHON)),)
PYTHON_GPU := $(shell $(PYTHON) .ci/has_everything.py && command -v $(PYTHON))
endif
endif
BENCH_INSTALLED := $(if $(PYTHON_GPU),,$(VENV)/.installed-$(if $(shell command -v nvidia-smi),gpu,train))
BENCH_PYTHON = $(or $(PYTHON_GPU),$(RUN_PYTHON))

.PHONY: install
install: $(VENV)/.installed-test  ## Make .venv with everything that the tests need

.PHONY: train
train: $(VENV)/.installed-train  ## Make .venv if missing, run the main job on the CPU, write its report
	$(call say,"training: $(CONFIG) into $(RUN)")
	GLIBC_TUNABLES=$(HUGE_PAGES) $(RUN_PYTHON) -m jetrl_jax.train --config $(CONFIG) --set run.directory=$(RUN) $(ARGS)
	$(call say,"report")
	$(RUN_PYTHON) -m jetrl_jax report $(RUN)

.PHONY: test
test: $(VENV)/.installed-test  ## Make .venv if missing, run the tests; the reason of each skip is printed
	$(call say,"testing with $$($(RUN_PYTHON) --version)")
	$(RUN_PYTHON) -m pytest -m "$(MARKED)" $(PARALLEL) $(PYTEST_ARGS)

.PHONY: test-long
test-long: $(VENV)/.installed-test  ## Run the tests that `make test` leaves out: more meshes and flows, more ways for a process to end
	$(RUN_PYTHON) -m pytest -m long $(PARALLEL) $(PYTEST_ARGS)

# Only this environment has the plugin that compiles for GPUs, as outside the tests it warns of a missing cuDNN when JAX starts.
PY312 = @python=$$(bash .ci/find_python.sh 3.12) && $(MAKE) --no-print-directory VENV=.venv-py312 PYTHON="$$python" \
	TEST_EXTRAS=dev,hf,tasks,aot
# What differs there: kernels interpreted and compiled for GPUs, the bits and numbers of the newer JAX, the package
# without torch, and each command once.
PY312_TESTS := $(addprefix tests/e2e/test_training_run.py::test_,run_leaves_its_whole_record exact_run_has_no_mismatch \
	generate_and_evaluate_read_the_run_and_its_export mismatch_names_the_first_operator_that_differs) tests/kernels \
	$(filter-out $(addprefix tests/parity/test_,lora.py speculation.py head_draft.py vllm_%),$(wildcard tests/parity/test_*.py)) \
	tests/parity/test_lora.py::test_adapted_layer_is_the_float64_formula \
	tests/parity/test_speculation.py::test_lookup_gives_the_tokens_and_bits_of_one_by_one \
	tests/unit/test_config_cli.py::test_every_command_reads_its_config_before_jax \
	tests/unit/test_report.py::test_command_line_writes_the_page \
	tests/unit/test_plan.py::test_command_prints_a_plan_and_stops_where_it_does_not_fit \
	tests/unit/test_repository.py::test_packages_import_without_extras_and_without_touching_a_device

.PHONY: install-py312
install-py312:  ## Make .venv-py312 with everything that the tests need there
	$(PY312) install

.PHONY: packages-py312
packages-py312:  ## Install the packages of .venv-py312 except this one, which only one installation at a time may build
	@python=$$(bash .ci/find_python.sh 3.12) && { [ -x .venv-py312/bin/python ] || "$$python" -m venv .venv-py312; }
	@pins=$(CURDIR)/.ci/constraints-py312.txt && PIP_CONSTRAINT="$$pins" PIP_BUILD_CONSTRAINT="$$pins" \
		.venv-py312/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r "$$pins"

.PHONY: test-py312
test-py312:  ## Run the tests that differ on Python 3.12, with the newer JAX and without torch (all tests: make test VENV=.venv-py312)
	$(PY312) test MARKED="not long or newest" PYTEST_ARGS="$(PY312_TESTS) $(PYTEST_ARGS)"

# The claims about bits, with each library's kernels for a CPU with only AVX2 (ISA=AVX512: AVX-512 without BF16).
ISA ?= AVX2
ISA_TESTS ?= $(addprefix tests/parity/test_,instruction_set.py vllm_exact.py vllm_lora.py vllm_export.py extend.py \
	dense_products.py $(addprefix vllm_in_process.py::test_trainer_and_vllm,$(addprefix _agree_,on_qwen3 on_qwen2 where_layers_are_bf16) \
	s_own_operations_are_one_policy_but_for_single_roundings) \
	$(addprefix vllm_kv_cache.py::test_,vllm_reads_the_trainers_codes_at_each_versions_scales codes_of_the_worker_are_the_trainers) \
	$(addsuffix ::test_rollout_logprobs_are_the_trainers_bits,kv_cache.py rollout_exact.py) \
	$(addprefix rollout_exact.py::test_,scores_are_the_bits_that_sampling_reports a_request_does_not_see_its_batch)) \
	tests/unit/test_torch_exact.py tests/unit/test_check_engine.py \
	$(addprefix tests/kernels/test_,quantize.py formats.py rounding.py) \
	tests/e2e/test_training_run.py::test_exact_run_has_no_mismatch

.PHONY: test-avx2
test-avx2: $(VENV)/.installed-test  ## Run the tests of equal bits with every library forced to its kernels for AVX2 (or ISA=AVX512)
	JETRL_TEST_ISA=$(ISA) PYTHONPATH=$(CURDIR)/tests/instruction_set$(if $(PYTHONPATH),:$(PYTHONPATH)) \
		$(RUN_PYTHON) -m pytest -m "not long or instruction_sets" $(PARALLEL) $(PYTEST_ARGS) $(ISA_TESTS)

.PHONY: lint
lint: $(VENV)/.installed-test  ## Run ruff (errors, order of imports, format) and import-linter (which module may import which: pyproject.toml)
	$(RUN_PYTHON) -m ruff check .
	$(RUN_PYTHON) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-cache

.PHONY: format
format: $(VENV)/.installed-test  ## Sort imports and format in place, by ruff
	$(RUN_PYTHON) -m ruff check --fix .
	$(RUN_PYTHON) -m ruff format .

.PHONY: types
types: $(VENV)/.installed-test  ## Run mypy on the three packages
	$(RUN_PYTHON) -m mypy

.PHONY: real-model
real-model: $(VENV)/.installed-test  ## Download and convert SmolLM2-135M-Instruct, for the tests and benchmarks on a real model (Python 3.11)
	$(RUN_PYTHON) tests/benchmarks/real_model/make.py

.PHONY: bench-real
bench-real: real-model  ## Measure, on the real model and GSM8K, rollout against training in each flow (also with vLLM) and the error of each FP8 product
	$(RUN_PYTHON) tests/benchmarks/real_model/mismatch.py $(ARGS)
	$(RUN_PYTHON) tests/benchmarks/real_model/mismatch.py --engine vllm $(ARGS)
	$(RUN_PYTHON) tests/benchmarks/real_model/fp8_sites.py

.PHONY: bench-flows
bench-flows: $(VENV)/.installed-test  ## Measure the mismatch of rollout and training in each precision flow, for the policy of RUN
	$(RUN_PYTHON) tests/benchmarks/flows.py $(RUN) $(ARGS)

.PHONY: bench-vllm
bench-vllm: $(VENV)/.installed-test  ## Compare the trainer with the real vLLM on random policies, seed by seed (needs vLLM)
	$(RUN_PYTHON) tests/benchmarks/vllm_gap.py $(ARGS)

.PHONY: bench-train
bench-train: $(BENCH_INSTALLED)  ## Train in FP8 and BF16 in turns, tokens a second of each (on a GPU; ARGS='--config configs/tiny_cpu.yaml ...' elsewhere)
	PYTHONPATH="$(CURDIR):$$PYTHONPATH" $(BENCH_PYTHON) tests/benchmarks/train_flows.py $(ARGS)

.PHONY: bench-scaling
bench-scaling: $(VENV)/.installed-test  ## Count bytes and collectives of a training step on one device, for meshes of 1 to 8
	$(RUN_PYTHON) tests/benchmarks/scaling.py $(ARGS)

.PHONY: gpu
gpu: $(BENCH_INSTALLED)  ## Run everything that needs a GPU in stages, resumable: tests, benchmarks, exactness, the real vLLM, tiles (ARGS='--minutes 60')
	$(BENCH_PYTHON) tests/benchmarks/gpu.py $(ARGS)

.PHONY: gpu-call gpu-call-dry
gpu-call:  ## Pack everything that a GPU machine without network lacks, print the two commands for it (docs/gpu_machine.md)
	@python=$$(bash .ci/find_python.sh 3.12) && "$$python" tests/benchmarks/gpu_pack.py $(ARGS)

# An environment like that of such a machine, without the packed packages.  The list is complete, so that nothing is resolved.
GPU_CONSTRAINTS := .ci/constraints-py312-gpu.txt
.venv-gpu-call/.installed: $(GPU_CONSTRAINTS)
	$(call say,"making .venv-gpu-call with the versions of $<")
	@python=$$(bash .ci/find_python.sh 3.12) && "$$python" -m venv --clear .venv-gpu-call
	@PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-gpu-call/bin/python -m pip install -qq --no-deps -r $<
	@touch $@

gpu-call-dry: .venv-gpu-call/.installed  ## Try both calls of make gpu-call without vLLM, as far as a CPU can; fails if a job cannot start
	@.venv-gpu-call/bin/python tests/benchmarks/gpu_pack.py --no-vllm >/dev/null
	env -u PYTHONPATH .venv-gpu-call/bin/python tests/benchmarks/gpu.py --dry $(ARGS)

WHAT ?= gemm
RIVALS ?= $(addprefix tests/benchmarks/kernel_,$(if $(filter layer,$(WHAT)),layer.py,$(if $(filter gemm decode,$(WHAT)),rivals.py)))

.PHONY: bench-kernels
bench-kernels: $(BENCH_INSTALLED)  ## Time the Pallas kernels against rivals on a Hopper GPU (torch for gemm, decode); WHAT=gemm, decode, linear, quantize, attention, layer
	PYTHONPATH="$(CURDIR):$$PYTHONPATH" $(BENCH_PYTHON) -m pallas_kernels.bench $(WHAT) $(if $(RIVALS),--rivals $(RIVALS)) $(ARGS)

.PHONY: plan-check
plan-check: $(VENV)/.installed-test  ## Compile Qwen3-8B and 32B for 8 devices ahead of time, print XLA's bytes beside the planner's (half an hour)
	for size in 8b 32b; do $(RUN_PYTHON) -m jetrl_jax plan --config configs/qwen3_$${size}_8xh100.yaml \
		--model configs/models/qwen3_$$size --devices 8xH100 --check $(ARGS) || exit 1; done

.PHONY: fuzz
fuzz: $(VENV)/.installed-test  ## Try damaged configs, safetensors files, indices and JSONL files, ten minutes each
	$(RUN_PYTHON) tests/benchmarks/fuzz.py $(ARGS)

STUDY ?= runs/study

.PHONY: study
study: $(VENV)/.installed-train  ## Train every precision flow with three seeds, into one page (an hour; resumable, each run in STUDY)
	$(RUN_PYTHON) tests/benchmarks/study.py --config $(CONFIG) --out $(STUDY) $(ARGS)

# Rivals need other versions, so each has its own environment (Python 3.11).
PEERS := tests/benchmarks/peers
PEER_SETTING ?= tiny
REAL := $(filter real,$(PEER_SETTING))
# All contenders are in memory at once: 3 to 8 GB each with the real model, so that others than these are asked for by name.
CONTENDERS ?= $(if $(REAL),jetrl:bf16 jetrl:fp8_unified torch:float32 torch:bfloat16,jetrl:fp32 jetrl:fp32-fast jetrl:bf16 \
	jetrl:bf16-fast jetrl:fp8_unified jetrl:fp8_unified-fast trl:float32 trl:bfloat16 tunix:float32 tunix:bfloat16)
PEER_ENVIRONMENTS := trl $(if $(REAL),,tunix)

.venv-%/.installed: $(PEERS)/requirements-%.txt
	$(call say,"making .venv-$* with the versions of $<")
	@python=$$(bash .ci/find_python.sh 3.11) && "$$python" -m venv .venv-$*
	@PIP_CONSTRAINT="$(CURDIR)/$<" .venv-$*/bin/python -m pip install -qq --no-deps -r $<
	@touch $@

.PHONY: bench-peers
bench-peers: $(if $(REAL),real-model) $(VENV)/.installed-test $(PEER_ENVIRONMENTS:%=.venv-%/.installed)  ## Time our step against TRL's and Tunix's (on an idle machine; PEER_SETTING=small or real)
	$(RUN_PYTHON) $(PEERS)/compare.py --setting $(PEER_SETTING) --contenders $(CONTENDERS) \
		$(if $(REAL),--rounds 3 --burst 1 --rollouts 0 --warmup 1) \
		--python trl=.venv-trl/bin/python torch=.venv-trl/bin/python tunix=.venv-tunix/bin/python \
		--out runs/benchmarks/peers_$(PEER_SETTING).json $(ARGS)

.PHONY: bench-profile
bench-profile: $(VENV)/.installed-test  ## Processor time of each program of a step of PEER_SETTING, its floor and dearest operations (ARGS='--flavors bf16 fp8_unified')
	$(RUN_PYTHON) tests/benchmarks/profile_step.py --setting $(PEER_SETTING) $(ARGS)

MISMATCH ?= runs/mismatch

.PHONY: picture
picture: $(VENV)/.installed-train  ## Draw README's picture from the records of RUN and of MISMATCH (a run with precision.preset=fp8_rollout_only)
	PYTHONPATH="$(CURDIR):$$PYTHONPATH" $(RUN_PYTHON) tests/benchmarks/readme_picture.py $(RUN) $(MISMATCH)

.PHONY: clean
clean:  ## Remove environments and caches; keeps runs/
	rm -rf .venv .venv-* .gpu .cache .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
