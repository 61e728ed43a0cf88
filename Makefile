# `make demo` and `make test` work alone on a fresh clone. To choose another build of PyTorch:
#   make demo TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
# The one on the path may be a shim that only says which versions there are.
OLDEST_PYTHON ?= $(firstword $(foreach python,python3.10 $(wildcard $(HOME)/.pyenv/versions/3.10.*/bin/python3.10),\
	$(shell $(python) -c 'import sys; print(sys.executable)' 2>/dev/null)) python3.10)
VENV ?= .venv
TORCH ?= torch==2.13.0
# Processes that run tests. Ranks wait for each other: more than there are cores.
WORKERS ?= 3
# Further options of pip, and which extra is installed.
PIP_OPTIONS ?=
EXTRA ?= dev
BIN := $(VENV)/bin

export OMP_NUM_THREADS ?= 1

# A name, for a record of versions and results in docs/records/: make test-oldest RECORD=oldest. Then: make docs
export COMMHOOKS_RECORD = $(RECORD)

.DELETE_ON_ERROR:

.PHONY: demo test test-fast test-oldest test-oldest-fast test-newest test-some coverage mutations peers lint format \
	bench bench-quick gpu stress docs linkcheck install clean

# With what the demo needs and no more, unless all is there already.
demo: $(or $(wildcard $(VENV)/.installed-dev),$(VENV)/.installed-demo)
	$(BIN)/python examples/lightning/demo.py

# Each file in one of the processes, so that what is launched for its tests is launched once.
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST = $(BIN)/python -m pytest $(PARALLEL)

test: install
	$(PYTEST)

# What sees most of what may go wrong, on two ranks: a good minute, after each edit.
FAST := contract registry wrappers lifecycle powersgd failure

test-fast: install
	$(PYTEST) --two-ranks $(FAST:%=tests/*/test_%.py)

# Lines and branches of both packages that the suite runs, in all of its processes.
coverage: install
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest $(PARALLEL)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

# The suite with exactly the lowest versions that pyproject.toml allows, on the lowest Python. Codecs are compiled into a
# folder of their own: what another PyTorch has left in the common one does not compile.
OLDEST = TORCHINDUCTOR_CACHE_DIR='$(CURDIR)/.venv-oldest/inductor' $(MAKE) VENV=.venv-oldest \
	PYTHON=$(OLDEST_PYTHON) TORCH='$(TORCH)' EXTRA=test PIP_OPTIONS='--constraint .venv-oldest/floors.txt'

test-oldest test-oldest-fast: TORCH = torch
test-oldest: .venv-oldest/floors.txt
	$(OLDEST) test

# The same with the tests that see most of what other versions break, some minutes: CI runs it.
OLDEST_FAST := contract cli examples forecast_accelerate hf_trainer lightning accelerate fsdp2 private_names \
	replicas torchft_lightning

test-oldest-fast: .venv-oldest/floors.txt
	$(OLDEST) test-some SOME='$(OLDEST_FAST)'

# Files of tests by their names: make test-some SOME='contract cli'
test-some: install
	$(PYTEST) --two-ranks $(SOME:%=tests/*/test_%.py)

.venv-oldest/floors.txt: pyproject.toml .ci/floors.py
	$(OLDEST_PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet "tomli; python_version < '3.11'"
	.venv-oldest/bin/python .ci/floors.py > $@

# The suite with the newest release of everything, as of now.
test-newest: TORCH = torch
test-newest:
	rm -f .venv-newest/.installed-*
	$(MAKE) test VENV=.venv-newest TORCH='$(TORCH)' PIP_OPTIONS='--upgrade --upgrade-strategy eager'

# Breaks the library in a hundred places, one at a time, and expects a test to fail each time.
mutations: install
	$(BIN)/python tests/mutations

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.readthedocs .readthedocs.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One after another. Those that miss a limit exit with 1; the others run nevertheless.
BENCHMARKS := wire_bytes fsdp_bytes bytes_per_rank quantized_step codecs min_bytes quantization_quality \
	local_sgd_digits powersgd_step time_to_loss network advise auto_choice monitor_overhead \
	profiler_overhead

bench: install
	$(MAKE) --keep-going --no-print-directory $(BENCHMARKS:%=bench-%)

bench-%: install
	$(BIN)/python benchmarks/$*.py

bench-time_to_loss: install
	$(BIN)/python benchmarks/time_to_loss.py --tune --again
	$(BIN)/python benchmarks/time_to_loss.py --again

bench-network: install
	$(BIN)/python benchmarks/network.py --again

# Two minutes: step times of a few hooks on two hosts, at 1 and 0.1 Gbit/s.
bench-quick: install
	$(BIN)/python benchmarks/network.py --quick

# Tests and benchmarks on NVIDIA GPUs, in ten minutes, and a page for a bug report. With a Python that has PyTorch for
# CUDA already, nothing is installed: make gpu GPU_PYTHON=python3. Without a GPU the script says so and exits with 3.
GPU_PYTHON ?=
GPU_RESULTS ?= benchmarks/results/gpu.txt

gpu: VENV = .venv-gpu
gpu:
	@$(or $(GPU_PYTHON),$(PYTHON)) benchmarks/gpu.py --check
	@$(if $(GPU_PYTHON),:,$(MAKE) --no-print-directory install VENV='$(VENV)')
	@$(or $(GPU_PYTHON),$(VENV)/bin/python) benchmarks/gpu.py --output '$(GPU_RESULTS)'

stress: install
	$(BIN)/python benchmarks/stress_launches.py
	$(BIN)/python benchmarks/resume_launches.py
	$(BIN)/python benchmarks/soak.py

# PyTorch's own tests of DDP and Accelerate's scripts, with each lossless hook and without.
peers: install
	$(BIN)/python tests/peers/run.py

# The pages in docs/ as HTML: docs/_build/html/index.html. Links within the repository are checked.
docs: install
	$(BIN)/python docs/options.py
	$(BIN)/python docs/support.py
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

# Links to other sites; needs the internet.
linkcheck: install
	$(BIN)/python -m sphinx -W --keep-going -q -b linkcheck docs docs/_build/linkcheck

install: $(VENV)/.installed-$(EXTRA)

# PyTorch first, so that no other requirement pulls in another build of it.
$(VENV)/.installed-%: pyproject.toml
	@echo "Creating $(VENV) and installing PyTorch, Lightning and the project; a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(PIP_OPTIONS) $(TORCH)
	$(BIN)/pip install --quiet $(PIP_OPTIONS) --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-gpu build dist docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache
