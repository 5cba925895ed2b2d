# `make demo` and `make test` need only Python 3.11 or newer. They set up `.venv` first.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLD_TRITON := .overlays/triton-3.6.0
OLD_TRANSFORMERS := .overlays/transformers-5.17.0
TRANSFORMERS_MATRIX := 5.17.0 5.20.2 5.23.0 5.24.0
VLLM_NEEDS := .overlays/vllm-needs
DOCS := .overlays/docs
VLLM := 0.20.2 0.33.0
VLLM_MATRIX := 0.20.2 0.26.0 0.33.0
SGLANG_NEEDS := .overlays/sglang-needs
SGLANG := 0.5.12 0.5.23
SGLANG_MATRIX := 0.5.12 0.5.17 0.5.23
TRITON_MATRIX := 3.6.0 3.7.1 3.8.0 3.9.0
# What the newest engines bring.
ENGINES_TRITON := .overlays/triton-3.8.0
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes || { test -e /dev/kfd && echo yes; })
# Without a GPU: pinned versions, of a CPU build where pip's index or links have this one. PyPI's torch brings CUDA, and takes
# one Triton alone: 2.15 takes 3.9. Asked when a recipe needs it, since pip is in $(VENV).
CPU_TORCH := torch==2.13.0+cpu
HAS_CPU_TORCH = $(shell $(BIN)/pip install --quiet --dry-run --no-deps $(CPU_TORCH) >/dev/null 2>&1 && echo yes)
TORCH = $(if $(HAS_GPU),torch,$(if $(HAS_CPU_TORCH),$(CPU_TORCH),torch==2.15.0) triton==3.9.0)
# No bytecode: Python writes that of the modules that it imports, which are few of what is installed here.
PIP := $(BIN)/pip install --quiet --no-compile
# One thread a process: with two processes on two cores, more threads wait for one another and take twice the time.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# To compile a kernel takes a tenth less: MLIR takes no locks for its threads, which share no work of one kernel, and malloc
# keeps all freed pieces of a size for the next call, not seven.
export GLIBC_TUNABLES ?= glibc.malloc.tcache_count=65535
export MLIR_DISABLE_MULTITHREADING ?= 1
# vLLM compiles a few functions by PyTorch's compiler, in C++. To compile its headers ahead takes longer than it saves.
export TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS ?= 0
# Tests start many processes. Without bytecode, each would compile its tests, and an engine of thousands of files, again.
unexport PYTHONDONTWRITEBYTECODE
# Two processes, or three where there are four cores or more: suites run two at a time, and a process takes a gigabyte.
# One that has no tests left takes them from others. Some take a minute, most take milliseconds.
PROCESSES := $(shell cores=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((cores > 3 ? 3 : 2)))
IN_PARALLEL := -n $(PROCESSES) --dist worksteal

.PHONY: help demo docs dist test test-suites test-quick test-extended test-newest test-interpreter test-old-triton test-old-interpreter test-engines-triton test-mutants test-matrix list-matrix test-old-transformers test-newest-engines test-vllm test-sglang check test-gpu speed test-installs sanitize clean
help:
	@echo "make demo      continue a few prompts with the demo model; needs no GPU"
	@echo "make test      run every suite that needs no GPU, with the newest versions and the oldest compiler, two at a time; soonest: make -j2 -O test"
	@echo "make test-quick  run what answers within two minutes, while you work"
	@echo "make test-extended  run more cases of what the tests show, which make test leaves out, on the newest versions"
	@echo "make test-matrix  run the compile suite for Hopper GPUs and the interpreter on each Triton, each engine, test-extended and test-mutants; takes hours"
	@echo "make test-mutants  break the package in some 200 generated ways; too few that are noticed are a failure"
	@echo "make test-installs  ask pip whether every install line can be met from PyPI alone; needs a network"
	@echo "make dist      build wheels and source archives, install the wheels into an empty environment, run the README and the archive's tests there"
	@echo "make check     run ruff, ruff format and pyright"
	@echo "make test-gpu  run the GPU suite; PY=python3 uses your own environment (torch, triton, pytest, pytest-xdist, hypothesis); AS=sm80 runs an older card's code there"
	@echo "make speed     measure a dozen cases on this GPU, and say which became slower than in the runs that HISTORY=FILE.json has"
	@echo "make sanitize  run every kernel under compute-sanitizer: memcheck, synccheck, racecheck; needs a GPU"
	@echo "make docs      build the documentation site into build/site"
	@echo "make clean     remove .venv and what builds and tests left behind"
	@echo "Parts of make test: test-newest, test-interpreter, test-old-triton, test-newest-engines"
	@echo "Besides, a workflow runs on each push: test-old-interpreter, test-engines-triton, test-old-transformers, test-vllm, test-sglang"

# pip alone. It fetches the overlays while another one installs PyTorch.
$(VENV)/.pip:
	@echo "making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@touch $@

$(VENV)/.ready: pyproject.toml tools/pyproject.toml | $(VENV)/.pip
	@echo "installing $(TORCH) into $(VENV) ..."
	@$(PIP) $(TORCH)
	@echo "installing Quire, its tools and the packages for its development ..."
	@$(PIP) --editable ".[transformers]" --editable tools --group dev
	@touch $@

.PRECIOUS: .overlays/triton-%/.ready
.overlays/triton-%/.ready: | $(VENV)/.pip
	$(PIP) --no-deps --upgrade --target .overlays/triton-$* triton==$*
	@touch $@

.PRECIOUS: .overlays/transformers-%/.ready
.overlays/transformers-%/.ready: | $(VENV)/.pip
	$(PIP) --no-deps --upgrade --target .overlays/transformers-$* transformers==$*
	@touch $@

$(VLLM_NEEDS)/.ready: tests/engines/vllm_cpu/requirements.txt | $(VENV)/.pip
	$(PIP) --no-deps --upgrade --target $(VLLM_NEEDS) -r tests/engines/vllm_cpu/requirements.txt
	@touch $@

.PRECIOUS: .overlays/vllm-%/.ready
# vLLM without its compiled operators (its setup calls this "empty"): 33 MB of source instead of a wheel of several hundred MB.
# Its setup imports PyTorch.
.overlays/vllm-%/.ready: $(VLLM_NEEDS)/.ready $(VENV)/.ready
	PYTHONPATH=$(CURDIR)/$(VLLM_NEEDS) VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$* \
		$(PIP) --no-deps --no-build-isolation --no-binary vllm --upgrade --target .overlays/vllm-$* vllm==$*
	@touch $@

$(SGLANG_NEEDS)/.ready: tests/engines/sglang_cpu/requirements.txt | $(VENV)/.pip
	$(PIP) --no-deps --upgrade --target $(SGLANG_NEEDS) -r tests/engines/sglang_cpu/requirements.txt
	@touch $@

.PRECIOUS: .overlays/sglang-%/.ready
# SGLang without its kernels for GPUs: its wheel alone.
.overlays/sglang-%/.ready: $(SGLANG_NEEDS)/.ready
	$(PIP) --no-deps --upgrade --target .overlays/sglang-$* sglang==$*
	@touch $@

demo: $(VENV)/.ready
	$(BIN)/quire generate

# Two suites run at a time, also if make is not told so. What only has to be fetched is fetched before.
test: $(VENV)/.ready $(OLD_TRITON)/.ready $(OLD_TRANSFORMERS)/.ready $(VLLM_NEEDS)/.ready .overlays/sglang-$(lastword $(SGLANG))/.ready
	@$(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j2 -O) test-suites

# The longest suite begins first. At the same time, vLLM is built, and suites of engines follow one another. An engine's
# suite is one process, since another process would import the engine again.
test-suites: test-newest test-newest-engines test-interpreter test-old-triton

test-newest-engines: $(VENV)/.ready
	@env -u MAKEFLAGS make --no-print-directory --keep-going --output-sync=target BUT="and not slow" \
		test-vllm-$(lastword $(VLLM)) test-sglang-$(lastword $(SGLANG))

INTERPRETED := tests/kernels tests/bench/test_naive.py tests/bench/test_measure.py tests/integrations tests/engines/test_transformers.py \
	tests/test_api.py tests/test_service.py tests/test_recipes.py tests/mutations

test-newest: $(VENV)/.ready
	@echo "== CPU path, compile suite, commands, engines: newest Triton and Transformers"
	$(PYTEST) $(IN_PARALLEL)

test-interpreter: $(VENV)/.ready
	@echo "== Triton's interpreter, newest"
	TRITON_INTERPRET=1 $(PYTEST) $(IN_PARALLEL) $(INTERPRETED)

# Cases with the marker `extended`. pyproject.toml leaves them out of the other runs.
test-extended: $(VENV)/.ready
	@echo "== more cases of what other tests show: CPU path and compile suite, then Triton's interpreter, newest"
	$(PYTEST) $(IN_PARALLEL) -m extended
	TRITON_INTERPRET=1 $(PYTEST) $(IN_PARALLEL) -m extended $(INTERPRETED)

# Two minutes of two cores: no compiler, not PyTorch's either, no engine, no mutants, no benchmark, few processes, and
# every kernel in the interpreter.
NOT_QUICK := compile engines mutations bench tuning
BY_DEFAULT := not extended and not network
test-quick: $(VENV)/.ready
	$(PYTEST) $(IN_PARALLEL) $(NOT_QUICK:%=--ignore tests/%) -m "$(BY_DEFAULT) and not slow"
	TRITON_INTERPRET=1 $(PYTEST) $(IN_PARALLEL) tests/kernels -m "$(BY_DEFAULT) and not slow"

# Each kind of Gluon kernel: the newest Triton takes twice the time to compile one, and leaves them to this one.
test-old-triton: $(VENV)/.ready $(OLD_TRITON)/.ready
	@echo "== Triton 3.6.0: compile suite"
	PYTHONPATH=$(OLD_TRITON) $(PYTEST) $(IN_PARALLEL) tests/compile -m "$(BY_DEFAULT) and (each_kind or amd)"

test-old-interpreter: $(VENV)/.ready $(OLD_TRITON)/.ready
	@echo "== Triton 3.6.0: interpreter"
	PYTHONPATH=$(OLD_TRITON) TRITON_INTERPRET=1 $(PYTEST) $(IN_PARALLEL) tests/kernels tests/test_api.py -m "$(BY_DEFAULT) and not slow and not one_triton"

test-engines-triton: $(VENV)/.ready $(ENGINES_TRITON)/.ready
	@echo "== Triton 3.8.0: compile suite"
	PYTHONPATH=$(ENGINES_TRITON) $(PYTEST) $(IN_PARALLEL) tests/compile -m "$(BY_DEFAULT) and each_kind"

test-mutants: $(VENV)/.ready
	@echo "== generated mutants"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutations --count $(MUTANTS)
MUTANTS ?= 200

# The ends and a middle of every range of versions that is served, extended cases and mutants. It takes hours, so a nightly
# workflow runs it.
MATRIX := $(TRITON_MATRIX:%=test-triton-%) $(VLLM_MATRIX:%=test-vllm-%) $(SGLANG_MATRIX:%=test-sglang-%) \
	$(TRANSFORMERS_MATRIX:%=test-transformers-%) test-extended test-mutants
test-matrix: $(MATRIX)
list-matrix:
	@$(PYTHON) -c 'import json, sys; print(json.dumps(sys.argv[1:]))' $(MATRIX)
test-triton-%: $(VENV)/.ready .overlays/triton-%/.ready
	@echo "== Triton $*: all cases of the compile suite for Hopper GPUs, then the interpreter"
	PYTHONPATH=.overlays/triton-$* $(PYTEST) $(IN_PARALLEL) tests/compile -m hopper
	PYTHONPATH=.overlays/triton-$* TRITON_INTERPRET=1 $(PYTEST) $(IN_PARALLEL) tests/kernels tests/test_api.py

# .venv has the newest. TRANSFORMERS_MATRIX has the middle too.
test-old-transformers: test-transformers-$(OLD_TRANSFORMERS:.overlays/transformers-%=%)
test-transformers-%: $(VENV)/.ready .overlays/transformers-%/.ready
	@echo "== Transformers $*"
	PYTHONPATH=.overlays/transformers-$* $(PYTEST) tests/engines/test_transformers.py tests/engines/test_measure_transformers.py

test-vllm: $(VLLM:%=test-vllm-%)
# The newest also runs the example, judges mutants, and compares bits: these are of Quire's code, which is the same under all.
test-vllm-$(lastword $(VLLM)): MORE := tests/test_examples.py tests/mutations
# The newer model runner, which the oldest has for GPUs alone. vLLM takes Triton for missing where it finds no driver, unless
# CUDA_VISIBLE_DEVICES is empty.
RUNNER := tests/engines/test_vllm_v2.py
test-vllm-$(lastword $(VLLM)): RUNNER += tests/engines/test_vllm_bits.py
test-vllm-$(firstword $(VLLM)): RUNNER :=
test-vllm-%: .overlays/vllm-%/.ready $(OLD_TRANSFORMERS)/.ready
	@echo "== vLLM $*"
	PYTHONPATH=.overlays/vllm-$*:$(VLLM_NEEDS):$(OLD_TRANSFORMERS) $(PYTEST) tests/engines/test_vllm*.py $(MORE) -k vllm -m "$(BY_DEFAULT) $(BUT)"
	$(if $(RUNNER),PYTHONPATH=.overlays/vllm-$*:$(VLLM_NEEDS):$(OLD_TRANSFORMERS) CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(PYTEST) $(RUNNER) -m "$(BY_DEFAULT) $(BUT)")

# Asks pip, for each install line of the repository, whether PyPI alone can meet it. Nothing is installed. It needs a network.
test-installs: $(VENV)/.ready
	@echo "== install lines, from PyPI alone"
	$(PYTEST) tests/test_installs.py -m network

dist: $(VENV)/.ready
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m build tools --outdir dist
	$(BIN)/python scripts/try_wheel.py dist/quire-*.whl dist/quire_tools-*.whl dist/quire-*.tar.gz $(TORCH)

test-sglang: $(SGLANG:%=test-sglang-%)
test-sglang-%: $(VENV)/.ready .overlays/sglang-%/.ready
	@echo "== SGLang $*"
	PYTHONPATH=.overlays/sglang-$*:$(SGLANG_NEEDS) $(PYTEST) tests/engines/test_sglang.py tests/engines/test_sglang_dsa.py tests/engines/test_sglang_kit.py tests/engines/test_sglang_scheduler.py -m "$(BY_DEFAULT) $(BUT)"

check: $(VENV)/.ready
	$(BIN)/ruff check src tools tests scripts examples
	$(BIN)/ruff format --check src tools tests scripts examples
	$(BIN)/pyright

PY ?= $(BIN)/python
GPU_JOBS ?= 8
# An older card, sm80, sm86 or sm89, whose code the GPU runs. As sm86, which has sm80's instructions and sm89's shared memory, the
# slow cases are left out.
AS :=  # make has a program of this name
test-gpu: $(if $(findstring $(BIN),$(PY)),$(VENV)/.ready)
	$(if $(AS),TRITON_OVERRIDE_ARCH=$(AS) )PYTHONPATH=src:tools/src $(PY) -m pytest $(if $(filter sm86,$(AS)),-m "$(BY_DEFAULT) and not slow" )-p no:benchmark -p tests.gpu_of_worker -n $(GPU_JOBS) --dist worksteal tests/gpu tests/kernels tests/test_service.py tests/test_ops.py tests/test_api.py tests/test_recipes.py tests/test_examples.py tests/integrations

# A workflow runs it every night where there is a runner with a GPU.
HISTORY ?= build/history.json
speed: $(VENV)/.ready
	@mkdir -p $(dir $(HISTORY))
	$(BIN)/quire bench run --quick --peers Quire --output build/speed
	$(BIN)/python scripts/keep_history.py build/speed $(HISTORY)

# The pages are built from Markdown and docstrings: nothing of Quire is imported, so no torch is installed.
$(DOCS)/.ready: pyproject.toml
	@echo "installing MkDocs into $(DOCS) ..."
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/pip install --quiet --upgrade pip
	@$(DOCS)/bin/pip install --quiet --group docs
	@touch $@

docs: $(DOCS)/.ready
	@echo "building the pages ..."
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "built build/site; read it with: python3 -m http.server -d build/site 8000"

SANITIZE = PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=src compute-sanitizer --error-exitcode 1
sanitize: $(if $(findstring $(BIN),$(PY)),$(VENV)/.ready)
	$(SANITIZE) --tool memcheck $(PY) scripts/sanitize.py
	$(SANITIZE) --tool synccheck $(PY) scripts/sanitize.py
	$(SANITIZE) --tool racecheck $(PY) scripts/sanitize.py --portable

clean:
	rm -rf $(VENV) .overlays build dist src/*.egg-info tools/build tools/src/*.egg-info .pytest_cache .hypothesis .ruff_cache
