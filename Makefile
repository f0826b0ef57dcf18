# Everything happens in .venv, which the first target that needs it makes.
# The first python3 of PATH, or a later one of the same version whose build is faster.
PYTHON ?= $(eval PYTHON := $(or $(shell python3 tests/support/pythons.py usual),python3))$(PYTHON)
VENV := .venv
BIN := $(VENV)/bin
# Where Python is newer than 3.11, jax is newer too.
CONSTRAINTS = $(shell $(BIN)/python -c 'import sys; print("constraints-newest.txt" if sys.version_info >= (3, 12) else "constraints.txt")')
# What `.ci/run` runs with the newest Python: the demo, two processes that are stopped and resumed to the bit, a sweep that is killed, the help
# of every command, and all that goes through a private part of jax.
ON_NEWEST := tests/process tests/cluster tests/devices tests/model/test_cudnn_attention.py tests/cli/test_help.py tests/whole/test_demo.py tests/train/test_golden.py \
    tests/whole/multiprocess/test_training.py::test_asked_to_stop_it_saves_and_goes_on_later \
    tests/sweep/test_sweep_command.py::test_a_killed_sweep_goes_on_and_its_best_can_be_trained
export PIP_DISABLE_PIP_VERSION_CHECK := 1

DEMO_DATA := demo_data
DEMO_RUN := runs/demo
HF := .cache/hf
LM_EVAL := .cache/lm_eval
NEWEST := .cache/newest
AZURITE := .cache/azurite
TPU := .cache/tpu
CUDA := .cache/cuda

.PHONY: demo test test-newest test-newest-part test-in-newest test-docs test-web test-cluster test-long test-all test-pythons test-release dist docs reference pictures bench bench-data bench-train bench-compiled \
    bench-launch bench-long bench-model bench-mup bench-ngram bench-sweep bench-table bench-gpu chaos scale hf lm_eval azurite tpu cuda docker-check lint format clean

demo: $(VENV)/demo-installed ## train a small model on the standard library's sources: about three minutes
	@trap : INT; $(BIN)/roxxel-dist demo --data_path $(DEMO_DATA) --run_dir $(DEMO_RUN) || [ $$? = 42 ] # stopped and saved

PYTEST = JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder
# Workers wait for processes and disks half of their time: four of them keep two cores busy.
USUAL := -n 4 -m "not docs and not web and not cluster and not long"

test: $(VENV)/dev-installed $(if $(ROOM),,lint) ## the linters and every part of the package; ROOM=launcher: the tests of one room
	$(PYTEST) $(USUAL) $(if $(ROOM),tests/$(ROOM))

test-newest: ## the tests of `make test` with the newest Python and jax that are here, in an environment of its own
	@$(MAKE) --no-print-directory test-in-newest MORE='$(USUAL)'

test-newest-part: ## a part of them, in about two minutes: what changes with jax and flax
	@$(MAKE) --no-print-directory test-in-newest MORE='$(ON_NEWEST)'

test-in-newest:
	@newest=$$(python3 tests/support/pythons.py newest) && PIP_NO_COMPILE=1 $(MAKE) --no-print-directory VENV=$(NEWEST) PYTHON=$$newest $(NEWEST)/dev-installed
	JAX_COMPILATION_CACHE_DIR=$(abspath $(NEWEST))/xla $(PYTEST:$(BIN)/%=$(NEWEST)/bin/%) $(MORE)

test-docs: $(VENV)/dev-installed ## every block of the documentation and the examples, as they stand
	$(PYTEST) -m "docs and not long" tests/docs tests/whole

test-web: $(VENV)/dev-installed ## the page in a browser: needs chromium and chromium-driver
	$(PYTEST) -n 0 -m "web and not long" tests/view tests/docs

test-cluster: $(VENV)/dev-installed ## more of sshd, SLURM, Ray and several hosts; as root
	$(PYTEST) -m "cluster and not long"

test-long: $(VENV)/dev-installed azurite tpu cuda ## matrices, many repetitions, many examples of each property: hours
	$(PYTEST) -m "long or hypothesis" --hypothesis-profile=long

scale: $(VENV)/dev-installed ## the controller, preflight, checkpoints and the fleet with thousands of pretended hosts: two minutes
	$(BIN)/python -m pytest -q -n 0 tests/scale --durations=10

test-all: test test-docs test-web test-cluster test-long ## all of these, one after the other

test-pythons: $(VENV)/dev-installed ## the wheel, installed and tried with this Python and with the newer ones that are here
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m long tests/whole/test_wheel.py

dist: $(VENV)/dev-installed ## the wheel and the source archive into dist/, checked as an index checks them
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

test-release: $(VENV)/dev-installed ## what is published: the archive builds itself, and uvx and pipx run the wheel; two minutes
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m long tests/whole/test_release.py

docs: reference ## build these pages into .cache/site
	@$(BIN)/zensical build --strict --config-file mkdocs.yml
	@$(BIN)/python tests/support/reference.py .cache/site/llms.txt
	@echo "built: .cache/site/index.html"

reference: $(VENV)/dev-installed ## docs/reference/{cli,config,api,json}.md, from the program and its docstrings
	@$(BIN)/python tests/support/reference.py

pictures: $(VENV)/dev-installed ## the pictures of the documentation, of trainings that it makes: four minutes; needs chromium
	@JAX_PLATFORMS=cpu $(BIN)/python tests/support/unbroken_picture.py
	@JAX_PLATFORMS=cpu $(BIN)/python tests/support/doc_pictures.py

# `make bench QUICK=1`: short forms, in about twenty minutes. QUICK works with one part too.
MEASURE = @JAX_PLATFORMS=cpu $(BIN)/python benchmarks/bench.py $(if $(QUICK),--quick)

bench: $(VENV)/dev-installed $(VENV)/bench-installed ## all benchmarks, into benchmarks/results/ and benchmarks/README.md: about two and a half hours; as root
	-$(MEASURE)
	@$(BIN)/python benchmarks/summary.py --write

bench-table: $(VENV)/demo-installed ## the table of benchmarks/README.md, from the results that are there
	@$(BIN)/python benchmarks/summary.py --write

bench-data: $(VENV)/dev-installed $(VENV)/bench-installed ## what reading and building data costs, against other loaders
	$(MEASURE) data

bench-train: $(VENV)/demo-installed ## what the training loop costs over the bare compiled step
	$(MEASURE) train

bench-launch: $(VENV)/bench-installed ## how soon a job is gone, or goes on, when something fails; needs root
	$(MEASURE) launch

bench-model: $(VENV)/demo-installed ## what decoding with a cache costs against the plain form
	$(MEASURE) model

bench-mup: $(VENV)/demo-installed ## the best learning rate at four widths, with the standard parametrization and with mup: half an hour
	$(MEASURE) mup

bench-compiled: $(VENV)/demo-installed tpu cuda ## what compilers of TPUs and GPUs make of a step, on up to 256 devices: no device is needed
	$(MEASURE) compiled

bench-long: $(VENV)/demo-installed tpu cuda ## rows that are cut over devices: memory, work, time, and the longest that fits: half an hour
	$(MEASURE) long

bench-ngram: $(VENV)/demo-installed ## the demo's model against a 3-gram model of the same tokens: about five minutes
	$(MEASURE) ngram

bench-sweep: $(VENV)/dev-installed $(VENV)/bench-installed ## sweeps: the driver against Ray Tune, the engines against each other, real ones: about an hour and a half
	$(MEASURE) sweep

bench-gpu: $(VENV)/demo-installed ## a 124M-parameter model on a GPU; needs a jax for it in .venv
	@$(BIN)/python benchmarks/gpu.py

chaos: $(VENV)/dev-installed ## a training under 30 random faults, on three hosts that are network namespaces: ten to fifteen minutes, as root
	@JAX_PLATFORMS=cpu $(BIN)/python tests/support/chaos.py $(if $(SEED),--seed $(SEED))

docker-check: $(BIN)/python ## build the image with buildah, train two containers of it, compare with launch local: as root
	@PYTHON=$(abspath $(BIN)/python) docker/check

azurite: $(AZURITE)/installed ## Azure's emulator, for the long tests of az://; takes node's npm

hf: $(HF)/installed ## transformers in an environment of its own, for the tests of export

lm_eval: $(LM_EVAL)/installed ## lm-evaluation-harness in an environment of its own, for its long test: about 1.3 GB

tpu: $(TPU)/installed ## libtpu in an environment of its own, for the tests that compile for TPUs: about 1.6 GB; no TPU is needed

cuda: $(CUDA)/installed ## jax with its CUDA plugin, likewise, for long tests: about 4 GB; no GPU is needed

lint: $(VENV)/dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(VENV)/dev-installed ## put the sources into their form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## take away what make demo and make test made
	rm -rf $(VENV) $(DEMO_DATA) $(DEMO_RUN) dist .cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 2; }

$(VENV)/demo-installed: $(BIN)/python pyproject.toml constraints.txt constraints-newest.txt
	@echo "installing into $(VENV), about 0.9 GB: half a minute with a fast network"
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[plot]'
	@touch $@

$(VENV)/dev-installed: $(BIN)/python pyproject.toml constraints.txt constraints-newest.txt
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	@touch $@ $(VENV)/demo-installed

$(AZURITE)/installed:
	npm install --silent --no-audit --no-fund --prefix $(AZURITE) azurite@3.35.0
	@touch $@

# Few of the modules of these are imported: each is compiled when it is, which is half of an installation.
$(HF)/installed: tests/support/hf_requirements.txt
	$(PYTHON) -m venv $(HF) || { rm -rf $(HF); exit 2; }
	$(HF)/bin/pip install --quiet --no-compile --requirement tests/support/hf_requirements.txt
	@touch $@

$(LM_EVAL)/installed: pyproject.toml constraints.txt constraints-newest.txt
	$(PYTHON) -m venv $(LM_EVAL) || { rm -rf $(LM_EVAL); exit 2; }
	$(LM_EVAL)/bin/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[lm-eval]'
	@touch $@

$(TPU)/installed: tests/support/tpu_requirements.txt pyproject.toml constraints.txt constraints-newest.txt
	$(PYTHON) -m venv $(TPU) || { rm -rf $(TPU); exit 2; }
	$(TPU)/bin/pip install --quiet --no-compile --requirement tests/support/tpu_requirements.txt
	@touch $@

$(CUDA)/installed: tests/support/cuda_requirements.txt pyproject.toml constraints.txt constraints-newest.txt
	$(PYTHON) -m venv $(CUDA) || { rm -rf $(CUDA); exit 2; }
	$(CUDA)/bin/pip install --quiet --no-compile --requirement tests/support/cuda_requirements.txt
	@touch $@

$(VENV)/bench-installed: $(BIN)/python pyproject.toml constraints.txt constraints-newest.txt benchmarks/requirements.txt
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable .
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --requirement benchmarks/requirements.txt || \
	    echo "the other loaders are not all installed; the table will say which" >&2
	@touch $@
