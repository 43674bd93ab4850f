# The targets install what they need in .venv on first use, and change nothing else on the machine.

PYTHON ?= python3
# Additional arguments of pip, such as an index of CPU-only torch wheels.
PIP_ARGS ?=
# Additional arguments of pytest, such as `-k client -x`.
PYTEST_ARGS ?=
# Additional arguments of `draftwire demo`, such as `--max-tokens 200`.
DEMO_ARGS ?=
# Models of the demo: smollm2, which is downloaded once, or tiny, which needs no download.
DEMO ?= smollm2
# Duration of the soak, and seed of its random faults.
MINUTES ?= 20
SEED ?= 1
# Additional arguments of `docker build`, such as `--secret id=ca,src=ca.pem`.
BUILD_ARGS ?=

# Directory of the virtual environment; CI keeps one outside its clone.
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CHECKED := draftwire draftwire_cli drafter_service verifier_service kernels/draftwire_kernels benchmarks/draftwire_bench training proto deploy

# CPU only: otherwise the tests would use a GPU if there is one. Two test processes, one thread each.
export CUDA_VISIBLE_DEVICES :=
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Some environments set this variable. Without bytecode on disk every process compiles torch and transformers: 22 s of CPU
# time instead of 7 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-gateway test-gateway test test-full test-gpu test-faults test-soak test-fuzz test-pacing test-compose lint protos run-log clean

help:
	@echo 'make demo          chat with SmolLM2-135M-Instruct (93 MB, downloaded once), with and without drafts; DEMO=tiny needs no download'
	@echo 'make demo-gateway  both services behind the OpenAI HTTP API: a chat, a tool call, JSON by a schema'
	@echo 'make test          lint, units, the contract, reference kernels, one path through both services'
	@echo 'make test-full     the rest: both services, exactness, hostile input, kernels in the interpreter'
	@echo 'make test-gpu      tests that need a GPU, and kernels and heads compiled for it; some tests need two GPUs'
	@echo 'make test-faults   faults of drafters, network, clients and verifiers; as root also lost packets'
	@echo 'make test-soak     both services under load and random faults for MINUTES (20) with SEED (1)'
	@echo 'make test-fuzz     hostile input on both ports: FUZZ_CASES (100000) with FUZZ_SEED (1)'
	@echo 'make test-gateway  both services behind smg: clients of OpenAI and Anthropic, load, a verifier that dies'
	@echo 'make test-pacing   simulated gain of drafts over various links; fails if drafts cost throughput'
	@echo 'make test-compose  build all images, scale and kill their containers under load, in plain text and with TLS; needs docker'
	@echo 'make lint          ruff, import-linter and mypy'
	@echo 'make protos        generate the stubs from proto/'
	@echo 'make run-log       list the result files of benchmarks/results in its README.md'
	@echo 'make clean         remove the virtual environment and all caches'
	@echo
	@echo 'Variables: PYTHON (3.11 or newer), PIP_ARGS, PYTEST_ARGS, DEMO, DEMO_ARGS, PACING_ARGS, MINUTES, SEED, BUILD_ARGS.'
	@echo 'The tests and the demo run on the CPU. If the default torch wheel is a large CUDA build, use an index of CPU wheels:'
	@echo '  make test PIP_ARGS="--extra-index-url URL"'

$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo 'make: $(PYTHON) not found; set PYTHON=/path/to/python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/draftwire demo --pair $(DEMO) $(DEMO_ARGS)

demo-gateway: $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[gateway]'
	$(BIN)/draftwire demo-gateway

lint: $(STAMP)
	$(BIN)/ruff check .
	PYTHONPATH=.:kernels:benchmarks $(BIN)/lint-imports
	$(BIN)/mypy $(CHECKED)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not long and not full' $(PYTEST_ARGS)

test-full: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m 'full and not long' $(PYTEST_ARGS)

# Kernels and heads are tested on a GPU if there is one, otherwise in Triton's interpreter.
test-gpu: $(STAMP)
	env -u CUDA_VISIBLE_DEVICES $(BIN)/python -m pytest -m 'gpu and not long' tests $(PYTEST_ARGS)
	env -u CUDA_VISIBLE_DEVICES $(BIN)/python -m pytest -m 'not gpu and not long' tests/kernels tests/heads $(PYTEST_ARGS)

test-faults: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults -m "" -v $(PYTEST_ARGS)

test-soak: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests:tests/exactness $(BIN)/python tests/faults/soak.py --minutes $(MINUTES) --seed $(SEED)

test-gateway: $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[gateway]' 'anthropic>=1,<3'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/gateway -m "" -v -s $(PYTEST_ARGS)

test-pacing: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests $(BIN)/python tests/verifier/far_places.py $(PACING_ARGS)

test-compose: $(STAMP)
	$(BIN)/python -m deploy.check --build-args '$(BUILD_ARGS)'
	$(BIN)/python -m deploy.check --no-build --tls

# Dense and top-n logits in parallel; -s shows the progress. A failure has the case's number: FUZZ_SEED=1 FUZZ_ONLY=7 repeats it.
test-fuzz: export FUZZ_CASES ?= 100000
test-fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/fuzz -n 2 -s $(PYTEST_ARGS)

protos: $(STAMP)
	$(BIN)/python proto/generate.py

run-log: $(STAMP)
	$(BIN)/python -m draftwire_bench.run_log

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .import_linter_cache .pytest_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
