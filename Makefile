# Every target makes what it needs: a virtual environment with the pins of constraints-dev.txt.
PYTHON ?= python3
VENV ?= .venv
# Python for test-gpu; name one that has a CUDA build of torch, and nothing is installed: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(VENV)/bin/python
# Engines and tests that share the GPU. (pytest-benchmark, where it is installed, warns beside workers.)
GPU_WORKERS ?= 8
PYTEST_FLAGS ?=
# Paths for test, test-sglang and test-vllm in the place of all: make test T="tests/incidents tests/test_step.py"
T ?=
BENCH_FLAGS ?=
# SGLang for test-sglang, in an environment of its own, since its pins and ours don't fit together. Another release takes
# the place of the one there in seconds; for two side by side: make test-sglang SGLANG=0.5.17 VENV_SGLANG=.venv-sglang-old
SGLANG ?= 0.5.21
VENV_SGLANG ?= .venv-sglang
# vLLM for test-vllm, likewise.
VLLM ?= 0.32.0
VENV_VLLM ?= .venv-vllm
# Minutes of traffic that all engines of the soak share, their starts not counted; the same seed asks the same.
SOAK_MINUTES ?= 10
SOAK_SEED ?=
SOAK_FLAGS ?=
# An older Transformers for test-transformers: it lies over the one of VENV, with whose other packages it works.
TRANSFORMERS ?= 5.23.0
SUITES_FLAGS ?=
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
# Engines small enough to run in the tests and the demo.
# The last Transformers for Python 3.10 measures a CPU's memory with psutil, and has none without it.
ENGINES := transformers 'psutil; python_version < "3.11"'
# The engine of examples/canary-mini-infer, without what only its server needs.
MINI_INFER := 'mini-infer==0.2.5; python_version >= "3.11"'
STAMP := $(VENV)/.stamp
STAMP_SGLANG := $(VENV_SGLANG)/.stamp-$(SGLANG)
STAMP_VLLM := $(VENV_VLLM)/.stamp-$(VLLM)
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints-dev.txt
# What pip brings is compiled as far as it is imported, and kept.
unexport PYTHONDONTWRITEBYTECODE
empty :=
space := $(empty) $(empty)

.PHONY: demo test test-transformers suites test-sglang test-vllm bugs bugs-live soak check test-gpu bench clean

demo: $(STAMP)
	$(VENV)/bin/canary demo

# One torch thread a worker: two workers fill two cores, and more threads than cores only wait for each other.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile --timeout 300 $(PYTEST_FLAGS) \
		$(or $(T),tests $(wildcard plugins/*/tests examples/*/tests))

# What depends on the release of Transformers, on an older one. 5.17 wants an older huggingface-hub: it needs a VENV of its own.
test-transformers: $(STAMP) .venv-transformers-$(TRANSFORMERS)/transformers
	PYTHONPATH=.venv-transformers-$(TRANSFORMERS):$$PYTHONPATH OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile \
		--timeout 300 $(PYTEST_FLAGS) $(addprefix plugins/canary-transformers/tests/,generate continuous test_conformance.py test_version.py)

.venv-transformers-$(TRANSFORMERS)/transformers:
	$(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --no-deps --target $(@D) \
		transformers==$(TRANSFORMERS)

# The engines' own tests, guarded and not; see tests/suites. SUITES_FLAGS="--only models/llama --tree ../transformers"
suites: $(STAMP) $(STAMP_VLLM)
	$(VENV)/bin/python tests/suites transformers --python $(VENV)/bin/python $(SUITES_FLAGS)
	$(VENV)/bin/python tests/suites vllm --python $(VENV_VLLM)/bin/python $(SUITES_FLAGS)

# Each engine that the tests share is a group, so that it starts once; they are in an order that ends with small ones.
# PYTEST_FLAGS="-m 'not gpu and not beyond_ci'" is what CI runs of it.
test-sglang: $(STAMP_SGLANG)
	OMP_NUM_THREADS=1 $(VENV_SGLANG)/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --timeout 900 \
		$(PYTEST_FLAGS) $(or $(T),plugins/canary-sglang/tests tests/bugs/sglang)

# Engines of one process (see vllm_on_cpu/setups.py) are a group. PYTEST_FLAGS="-m older_release" is what CI runs on an
# older release.
test-vllm: $(STAMP_VLLM)
	OMP_NUM_THREADS=1 $(VENV_VLLM)/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --timeout 900 \
		$(PYTEST_FLAGS) $(or $(T),plugins/canary-vllm/tests tests/bugs/vllm)

# The museum of real bugs, patched into the real engines: all of it, and docs/bugs.md.
bugs: $(STAMP) $(STAMP_SGLANG) $(STAMP_VLLM)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile --timeout 300 $(PYTEST_FLAGS) tests/bugs/transformers tests/bugs/test_museum.py tests/bugs/test_table.py
	OMP_NUM_THREADS=1 $(VENV_SGLANG)/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --timeout 900 \
		$(PYTEST_FLAGS) tests/bugs/sglang
	OMP_NUM_THREADS=1 $(VENV_VLLM)/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --timeout 900 \
		$(PYTEST_FLAGS) tests/bugs/vllm

# Bugs that unmodified releases show; see tests/bugs/live.
bugs-live: $(STAMP) $(STAMP_SGLANG) $(STAMP_VLLM)
	for python in $(VENV) $(VENV_SGLANG) $(VENV_VLLM); do \
		OMP_NUM_THREADS=1 $$python/bin/python -m pytest --timeout 900 $(PYTEST_FLAGS) tests/bugs/live || exit 1; done

# Random traffic over every engine under guard. SOAK_FLAGS="--setups vllm/ngram --rounds 3", "--list", ...
soak: $(STAMP) $(STAMP_SGLANG) $(STAMP_VLLM)
	$(VENV)/bin/python tests/soak --seconds $$(( 60 * $(SOAK_MINUTES) )) $(addprefix --seed ,$(SOAK_SEED)) \
		--python sglang=$(VENV_SGLANG)/bin/python vllm=$(VENV_VLLM)/bin/python $(SOAK_FLAGS)

check: $(STAMP)
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy
	$(VENV)/bin/python -m pytest -q -p no:cacheprovider tests/test_imports.py

test-gpu: $(filter $(STAMP),$(patsubst $(VENV)/bin/python,$(STAMP),$(GPU_PYTHON)))
	PYTHONPATH=$(subst $(space),:,$(strip src $(wildcard plugins/*/src))):$$PYTHONPATH \
		$(GPU_PYTHON) -m pytest -p no:benchmark -m gpu -n $(GPU_WORKERS) --dist loadgroup --no-loadscope-reorder --timeout 900 \
		$(PYTEST_FLAGS) tests $(wildcard plugins/*/tests)

# Says what is missing where there is no GPU. BENCH_FLAGS="--quick --no-builtin", "--list", "--json raw.json", ...
bench: $(filter $(STAMP),$(patsubst $(VENV)/bin/python,$(STAMP),$(GPU_PYTHON)))
	PYTHONPATH=src:$$PYTHONPATH $(GPU_PYTHON) -m benchmarks $(BENCH_FLAGS)

clean:
	rm -rf $(VENV) $(VENV_SGLANG) $(VENV_VLLM) .venv-transformers-* .suites

$(STAMP): pyproject.toml constraints-dev.txt $(addsuffix /pyproject.toml,$(PLUGINS))
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable '.[dev]' $(addprefix --editable ./,$(PLUGINS)) $(ENGINES)
	$(PIP) --no-deps $(MINI_INFER)
	touch $@

$(STAMP_SGLANG): pyproject.toml plugins/canary-sglang/pyproject.toml $(wildcard plugins/canary-sglang/tests/cpu/*)
	PYTHON=$(PYTHON) plugins/canary-sglang/tests/cpu/setup.sh $(VENV_SGLANG) $(SGLANG)
	$(VENV_SGLANG)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints-dev.txt setuptools
	$(VENV_SGLANG)/bin/python -m pip --disable-pip-version-check install --quiet --no-build-isolation --no-deps \
		--editable . --editable plugins/canary-sglang
	rm -f $(@D)/.stamp-*
	touch $@

$(STAMP_VLLM): pyproject.toml plugins/canary-vllm/pyproject.toml $(wildcard plugins/canary-vllm/tests/cpu/*)
	PYTHON=$(PYTHON) plugins/canary-vllm/tests/cpu/setup.sh $(VENV_VLLM) $(VLLM)
	$(VENV_VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --no-build-isolation --no-deps \
		--editable . --editable plugins/canary-vllm
	rm -f $(@D)/.stamp-*
	touch $@
