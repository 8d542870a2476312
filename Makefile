# Every target sets up what it needs: see scripts/with-python. PYTHON=path names another interpreter to try first.
#
#   make train [NPROC=n] [ARGS="..."]   train a GPT-2 (ARGS="--help" lists the arguments)
#   make test  [ARGS="..."]             lint, types and the CPU tests: 12 minutes on two cores (ARGS go to pytest)
#   make test-short / make test-long    the same without lint and types / the CPU tests that take longer: 20 minutes
#   make test-torch [TORCH=2.8.0]     all CPU tests with another version of torch, in an environment of its own
#   make test-transformers [TRANSFORMERS=4.57.6]  the tests of models and tokenizers with another version of transformers, likewise
#   make test-ray [RAY=2.60.0]          the tests with Ray Train, likewise
#   make test-gpu                       the GPU tests, on however many GPUs there are; writes benchmarks/results/gpu-tests.json
#   make bench [ARGS="..."]             compare this library with others on the GPUs there are (ARGS="--list", "--suite quick", "--help")
#   make docs [ARGS="--language en"]    build the documentation site into build/docs
#   make mutants [ARGS="..."]           plant faults in the source and see which test notices (ARGS="--rooms optim --count 20")
#   make faults [ARGS="..."]            kill, stop and spoil two tiny programs, resume them, and write what became of it (ARGS="--kind SIGKILL --kills 10")
#   make lint / make format             ruff and mypy / let ruff rewrite the files
#   make clean                          remove .venv and all that tools left behind; runs/ stays

PYTHON ?= python3
ARGS ?=
NPROC ?= 0
# Tests of several ranks are processes themselves: two pytest workers keep two cores busy, more only wait for one another.
JOBS ?= 2

export PYTHON

.PHONY: train test test-short test-long test-torch test-transformers test-ray test-gpu bench docs mutants faults lint format clean

train:
	@scripts/with-python train scripts/launch.py --nproc $(NPROC) examples/gpt2/train.py $(ARGS)

PYTEST = scripts/with-python test -m pytest -n $(JOBS) --dist=worksteal --ignore=tests/gpu --ignore=tests/ray_train

test: export SUITE_BEGAN := $(shell date +%s)
test: lint test-short

test-short:
	@$(PYTEST) -m "not long" $(ARGS)

test-long:
	@$(PYTEST) -m long $(ARGS)

# The oldest torch that is supported and the newest that constraints.txt has not got yet: TORCH=2.15.0
test-torch: export TORCH ?= 2.8.0
test-torch:
	@$(PYTEST) $(ARGS)

# Its own and torch's warnings of what is deprecated are not ours to mend.
TRANSFORMERS_TESTS = tests/data_sets/test_hugging_face_tokenizers.py tests/models
test-transformers: export TRANSFORMERS ?= 4.57.6
test-transformers:
	@scripts/with-python test -m pytest -n $(JOBS) --dist=loadfile -W ignore::FutureWarning $(TRANSFORMERS_TESTS) $(ARGS)

test-ray: export RAY ?= 2.60.0
test-ray:
	@scripts/with-python test -m pytest tests/ray_train $(ARGS)

test-gpu:
	@scripts/with-python test-gpu scripts/gpu_tests.py --commit "$$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" $(ARGS)

bench:
	@scripts/with-python bench benchmarks/compare.py --commit "$$(git describe --always --dirty 2>/dev/null || echo unknown)" $(ARGS)

docs:
	@scripts/with-python docs docs/site/build.py $(ARGS)

mutants:
	@scripts/with-python test scripts/mutants.py $(ARGS)

faults:
	@scripts/with-python test -m scripts.faults $(ARGS)

lint:
	@scripts/with-python test -m ruff check .
	@scripts/with-python test -m ruff format --check .
	@scripts/with-python test -m mypy
	@MYPYPATH=benchmarks scripts/with-python test -m mypy benchmarks tests/benchmarks  # apart: examples/ has a `models` too

format:
	@scripts/with-python test -m ruff check --fix .
	@scripts/with-python test -m ruff format .

clean:
	rm -rf .venv .venv-torch-* .venv-transformers-* .venv-ray-* build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
