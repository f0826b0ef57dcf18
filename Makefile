# Everything happens in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

DEMO_DATA := demo_data
DEMO_RUN := runs/demo
HF := .cache/hf
AZURITE := .cache/azurite

.PHONY: demo test test-docs test-web test-cluster test-long test-all test-pythons docs reference pictures bench bench-data bench-train \
    bench-launch bench-model bench-mup bench-ngram bench-sweep bench-page bench-gpu chaos hf azurite docker-check lint format clean

demo: $(VENV)/demo-installed ## train a small model on the standard library's sources: about three minutes
	@trap : INT; $(BIN)/roxxel-dist demo --data_path $(DEMO_DATA) --run_dir $(DEMO_RUN) || [ $$? = 42 ] # stopped and saved

PYTEST = JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

test: $(VENV)/dev-installed lint ## the linters and every part of the package: about eleven minutes on two cores
	$(PYTEST) -m "not docs and not web and not cluster and not long"

test-docs: $(VENV)/dev-installed ## every block of the documentation and the examples, as they stand
	$(PYTEST) -m "docs and not long"

test-web: $(VENV)/dev-installed ## the page in a browser: needs chromium and chromium-driver
	$(PYTEST) -n 0 -m "web and not long"

test-cluster: $(VENV)/dev-installed ## more of sshd, SLURM, Ray and several hosts; as root
	$(PYTEST) -m "cluster and not long"

test-long: $(VENV)/dev-installed azurite ## matrices, many repetitions, many examples of each property: hours
	$(PYTEST) -m "long or hypothesis" --hypothesis-profile=long

test-all: test test-docs test-web test-cluster test-long ## all of these, one after the other

test-pythons: $(VENV)/dev-installed ## the wheel, installed and tried with this Python and with 3.12 and 3.13 where they are
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m long tests/test_wheel.py

docs: $(VENV)/dev-installed ## build these pages into .cache/site
	@$(BIN)/zensical build --strict --config-file mkdocs.yml
	@echo "built: .cache/site/index.html"

reference: $(VENV)/dev-installed ## docs/reference/cli.md, config.md and api.md: what the program says of itself
	@$(BIN)/python tests/reference.py

pictures: $(VENV)/dev-installed ## the pictures of `top` in the documentation, of a training that it makes: two minutes; needs chromium
	@JAX_PLATFORMS=cpu $(BIN)/python tests/doc_pictures.py

# `make bench QUICK=1`: short forms, in about twenty minutes. QUICK works with one part too.
MEASURE = @JAX_PLATFORMS=cpu $(BIN)/python benchmarks/bench.py $(if $(QUICK),--quick)

bench: $(VENV)/dev-installed $(VENV)/bench-installed ## every table, docs/benchmarks.md and its pictures: about two and a half hours; as root
	-$(MEASURE)
	@$(BIN)/python benchmarks/page.py

bench-page: $(VENV)/demo-installed ## docs/benchmarks.md and its pictures, from the results that are there
	@$(BIN)/python benchmarks/page.py

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

bench-ngram: $(VENV)/demo-installed ## the demo's model against a 3-gram model of the same tokens: about five minutes
	$(MEASURE) ngram

bench-sweep: $(VENV)/dev-installed $(VENV)/bench-installed ## sweeps: the driver against Ray Tune, the engines against each other, real ones: about an hour and a half
	$(MEASURE) sweep

bench-gpu: $(VENV)/demo-installed ## a 124M-parameter model on a GPU; needs a jax for it in .venv
	@$(BIN)/python benchmarks/gpu.py

chaos: $(VENV)/dev-installed ## a training under 30 random faults, on three hosts that are network namespaces: ten to fifteen minutes, as root
	@JAX_PLATFORMS=cpu $(BIN)/python tests/chaos.py $(if $(SEED),--seed $(SEED))

docker-check: $(BIN)/python ## build the image with buildah, train two containers of it, compare with launch local: as root
	@PYTHON=$(abspath $(BIN)/python) docker/check

azurite: $(AZURITE)/installed ## Azure's emulator, for the long tests of az://; takes node's npm

hf: $(HF)/installed ## transformers in an environment of its own, for the tests of export; takes torch from Debian's python3-torch

lint: $(VENV)/dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(VENV)/dev-installed ## put the sources into their form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## take away what make demo and make test made
	rm -rf $(VENV) $(DEMO_DATA) $(DEMO_RUN) .cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 2; }

$(VENV)/demo-installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing into $(VENV), about 0.9 GB: half a minute with a fast network"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[plot]'
	@touch $@

$(VENV)/dev-installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/demo-installed

$(AZURITE)/installed:
	npm install --silent --no-audit --no-fund --prefix $(AZURITE) azurite@3.35.0
	@touch $@

$(HF)/installed: tests/hf_requirements.txt
	/usr/bin/python3 -c 'import torch' || { echo "apt install python3-torch python3-venv" >&2; exit 2; }
	/usr/bin/python3 -m venv --system-site-packages $(HF)
	$(HF)/bin/pip install --quiet --requirement tests/hf_requirements.txt
	@touch $@

$(VENV)/bench-installed: $(BIN)/python pyproject.toml constraints.txt benchmarks/requirements.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	$(BIN)/pip install --quiet --constraint constraints.txt --requirement benchmarks/requirements.txt || \
	    echo "the other loaders are not all installed; the table will say which" >&2
	@touch $@
