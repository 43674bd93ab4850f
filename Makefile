# Everything below sets itself up in .venv on first use; nothing else on the machine is changed.

PYTHON ?= python3
# Further arguments of pip, as an index of CPU-only torch wheels.
PIP_ARGS ?=
# Further arguments of pytest, as `-k client -x`.
PYTEST_ARGS ?=
# Further arguments of `draftwire demo`, as `--max-tokens 200`.
DEMO_ARGS ?=
# What the demo serves: smollm2, which is downloaded once, or tiny, which needs no download.
DEMO ?= smollm2
# Of the soak: how long it runs, and what its faults are drawn from.
MINUTES ?= 20
SEED ?= 1
# Further arguments of `docker build`, as `--secret id=ca,src=ca.pem`.
BUILD_ARGS ?=

# Where the virtual environment is; CI keeps one outside its clone.
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CHECKED := draftwire draftwire_cli drafter_service verifier_service kernels/draftwire_kernels benchmarks/draftwire_bench training proto deploy

# CPU only: without it the tests would use a GPU that happens to be there. Two test processes, one thread each.
export CUDA_VISIBLE_DEVICES :=
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Some environments set it. Without bytecode on disk every process compiles torch and transformers: 22 s of CPU time in
# place of 7 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-gateway test-gateway test test-full test-gpu test-faults test-soak test-fuzz test-pacing test-compose lint protos run-log clean

help:
	@echo 'make demo          chat with SmolLM2-135M-Instruct (93 MB, downloaded once), drafting on and off; DEMO=tiny needs no download'
	@echo 'make demo-gateway  both services behind the HTTP API of OpenAI: a chat, a tool, JSON by a schema'
	@echo 'make test          lint, units, the contract, reference kernels'
	@echo 'make test-full     the rest: both services, exactness, hostile input, kernels in the interpreter'
	@echo 'make test-gpu      what needs a GPU, and kernels and heads compiled for it; some tests need two'
	@echo 'make test-faults   every fault of drafters, network, clients and verifiers; as root, lost packets too'
	@echo 'make test-soak     both services under load and random faults for MINUTES (20) from a SEED (1)'
	@echo 'make test-fuzz     hostile input on both ports: FUZZ_CASES (100000) from FUZZ_SEED (1)'
	@echo 'make test-gateway  both services behind smg: the clients of OpenAI and Anthropic, load, a verifier that dies'
	@echo 'make test-pacing   what drafts gain over links of every kind, in simulated time; fails where they cost throughput'
	@echo 'make test-compose  build all images, scale and kill their containers under load, plain and with TLS; needs docker'
	@echo 'make lint          ruff, the layers of imports, and mypy'
	@echo 'make protos        generate the stubs from proto/'
	@echo 'make run-log       list the result files of benchmarks/results in its README.md'
	@echo 'make clean         remove the virtual environment and all caches'
	@echo
	@echo 'Variables: PYTHON (3.11 or newer), PIP_ARGS, PYTEST_ARGS, DEMO, DEMO_ARGS, PACING_ARGS, MINUTES, SEED, BUILD_ARGS.'
	@echo 'The tests and the demo run on the CPU; where the default torch wheel is a large CUDA build, name an index of CPU wheels:'
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

# Kernels and heads are tested on a GPU where there is one, and in Triton's interpreter where there is none.
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

# Dense and top-n logits side by side; -s shows how far they are. A failure names the case: FUZZ_SEED=1 FUZZ_ONLY=7 plays it.
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
