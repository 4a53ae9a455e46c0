# Everything on a fresh machine with Python >= 3.11, pip, make and a C++ compiler:
# `make run` installs kvkeep alone and generates; `make test` installs what developers need, too.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PRODUCT := $(VENV)/.product
READY := $(VENV)/.ready

# Tests start a thousand processes: without files of bytecode, each would compile kvkeep again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run fmt check test test-extended test-all test-oldest test-slow test-new fuzz sanitize emulated wheel release audit install-size site lint types page install clean

install: $(READY)

SOURCES := pyproject.toml setup.py constraints.txt $(wildcard kvkeep/compiled/src/*)
PIP_INSTALL := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt

# The product: kvkeep and what it needs to run, with the kernels of this processor.
# torch first and pinned: a bare requirement may bring gigabytes of CUDA libraries.
$(PRODUCT): $(SOURCES)
	@echo "kvkeep: installing into $(VENV) (about a minute on 2 cores, and 1.1 GB; the kernels need a C++ compiler)"
	@echo "kvkeep: installing PyTorch (pip shows nothing while it unpacks, up to half a minute)"
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	@echo "kvkeep: installing kvkeep, and compiling its kernels for this processor"
	$(PIP_INSTALL) --editable '.[server]'
	touch $@

# With all that developers need, and the kernels of every instruction set.
$(READY): $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --quiet torch==$$(sed -n 's/^torch==//p' constraints.txt)
	KVKEEP_KERNELS_FOR=all $(PIP_INSTALL) --quiet --editable '.[dev]'
	touch $(PRODUCT) $@

# The main job: a manual of several thousand tokens is read through a budget of 512, and the model
# writes on from it on the same memory. `make run TOKENS=-1` writes until Ctrl-C.
TOKENS ?= 1000
MANUAL := from pydoc_data.topics import topics; print(topics["typesseq"])

run: $(PRODUCT)
	@echo "kvkeep: SmolLM2-135M-Instruct reads a chapter of Python's manual (5,700 tokens) through a"
	@echo "budget of 512 KV cells, and then generates $(TOKENS) tokens in the same memory"
	$(BIN)/kvkeep pull
	$(BIN)/python -c '$(MANUAL)' | \
	  $(BIN)/kvkeep generate --max-kv-size 512 --max-tokens $(TOKENS) --ignore-eos --seed 1

# As many processes as there are cores, up to 8: most tests keep one core busy.
AT_ONCE := -n auto --maxprocesses=8 --dist=worksteal

# What every change needs, in minutes. `make test-all` is the rest, too: whole models on every
# instruction set, more architectures of transformers, fleets on Ray, browsers, terminals, and
# commands that are run as users run them.
test: install
	$(BIN)/python -m pytest $(AT_ONCE) -m 'not slow and not extended'

# One process more: these tests often wait for other programs.
ONE_MORE := $(BIN)/python -c 'import os; print(min(os.cpu_count(), 8) + 1)'

test-extended: install
	$(BIN)/python -m pytest -n $$($(ONE_MORE)) --dist=worksteal -m 'extended and not slow'

test-all: test test-extended

# What is inside of transformers, by the oldest release of it that kvkeep says it works with.
OLDEST := $(CURDIR)/build/oldest
OLDEST_TRANSFORMERS := $(shell sed -n 's/^transformers = \["transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml).0

test-oldest: install
	rm -rf $(OLDEST)
	$(BIN)/pip install --quiet --no-deps --target $(OLDEST) \
	  "transformers==$(OLDEST_TRANSFORMERS)" "huggingface-hub<2"
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest $(AT_ONCE) -m 'not slow' tests/integrations

# What runs before a release only; an hour or two.
test-slow: install
	$(BIN)/python -m pytest $(AT_ONCE) -m slow --hypothesis-profile=new

# The properties of `make test-all`, on ten times as many examples, which were never tried before.
test-new: install
	KVKEEP_EXAMPLES=10 $(BIN)/python -m pytest $(AT_ONCE) -m '(hypothesis and not slow)' \
	  --hypothesis-profile=new

# 100,000 damaged inputs for each format of a file; an hour or two.
fuzz: install
	KVKEEP_FUZZ=100000 $(BIN)/python -m pytest $(AT_ONCE) tests/fuzz

# Builds the kernels with the address and undefined-behaviour sanitizers, in a folder of their own, and
# runs their tests. One thread, except in tests of several: threads that wait for each other take
# minutes here. Builds the best instruction set of this machine, and AVX2: together they cover every
# line. Whole models run on the best set only (tests/compiled/conftest.py).
# Left out are tests that load checkpoints or run the default model: others visit the same lines.
SANITIZED := $(CURDIR)/build/sanitize
SAME_KERNELS := checkpoint_decodes or experts_are_packed or default_model
SANITIZERS := -fsanitize=address,undefined

BEST := from kvkeep.compiled.instruction_sets import selected_set; print(selected_set().name)

sanitize: install
	KVKEEP_KERNELS_FOR="$$($(BIN)/python -c '$(BEST)' | sed '/^avx2$$/d;s/^torch$$//') avx2" \
	  CFLAGS='$(SANITIZERS) -fno-sanitize-recover=all -fno-omit-frame-pointer -g' \
	  LDFLAGS='$(SANITIZERS)' $(BIN)/python -W ignore setup.py --quiet build_ext \
	  --force --build-lib $(SANITIZED) --build-temp $(SANITIZED)/objects
	KVKEEP_KERNELS=$(SANITIZED)/kvkeep/compiled OMP_NUM_THREADS=1 \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	  $(BIN)/python -m pytest $(AT_ONCE) -p no:cacheprovider -m 'not slow' tests/compiled \
	  tests/methods/test_similarity.py \
	  tests/test_torch_defaults.py --ignore tests/compiled/test_real_model.py \
	  -k 'not (number_of_threads and (gemma4 or experts)) and not ($(SAME_KERNELS))'

# The wheel of this platform, tried in an environment without a compiler. See docs/wheels.md.
wheel: install
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[release]'
	$(BIN)/python tools/wheels.py

# All that a release is made of, built and tried; nothing is uploaded (tools/release.py --help).
release: install
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[release]'
	$(BIN)/python tools/release.py

# Static analysis, and published faults of all packages that kvkeep is tested with, those that others
# require among them (needs a network).
# tools/audit.py says what was not audited; its status is 0 only if all was.
AUDIT := $(CURDIR)/build/audit

audit: install
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/pip install --quiet bandit pip-audit
	$(AUDIT)/bin/python tools/audit.py --python $(BIN)/python

# Seconds, megabytes and packages of an installation: the figures of docs/install.md.
install-size:
	$(PYTHON) tools/install_size.py

# The documentation, in site/. A link that leads nowhere is an error.
site: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --site-dir site

# Builds the kernels for Arm with a cross compiler and runs their tests in an emulator, on any machine
# with Linux. On Debian: apt-get install g++-aarch64-linux-gnu qemu-user
EMULATED := $(CURDIR)/build/emulated
CROSS := aarch64-linux-gnu-
NEEDED := $(CROSS)g++ qemu-aarch64
ON_EACH_SET := byte_rows compressed decoding experts products prompt_attention ragged sizes states

emulated: install
	@for tool in $(NEEDED); do command -v $$tool > /dev/null || \
	  { echo "make emulated needs $$tool: install g++-aarch64-linux-gnu and qemu-user"; exit 1; }; done
	KVKEEP_KERNELS_FOR=all CC=$(CROSS)gcc CXX=$(CROSS)g++ LDSHARED='$(CROSS)gcc -shared' \
	  LDCXXSHARED='$(CROSS)g++ -shared' _PYTHON_HOST_PLATFORM=linux-aarch64 \
	  $(BIN)/python -W ignore setup.py --quiet build_ext \
	  --build-lib $(EMULATED) --build-temp $(EMULATED)/objects
	$(CROSS)g++ -std=c++17 -O2 -Wall -Wextra -fopenmp -no-pie -Wl,--no-as-needed \
	  -Wl,-Ttext-segment=0x100000000000 -o $(EMULATED)/machine tests/emulated/machine.cpp
	KVKEEP_KERNELS=$(EMULATED)/kvkeep/compiled PYTHONPATH=tests \
	  $(BIN)/python -m pytest -p emulated.plugin -p no:cacheprovider tests/emulated \
	  $(addprefix tests/compiled/test_,$(addsuffix .py,$(ON_EACH_SET))) \
	  tests/methods/test_similarity.py \
	  tests/compiled/test_instruction_sets.py::test_numbers_are_rounded_to_the_same_bits

CPP := $(wildcard kvkeep/compiled/src/*) $(wildcard tests/emulated/*.cpp)

# Formats everything; `make check` is what to run before each commit (also by .pre-commit-config.yaml).
fmt: install
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

check: lint types $(if $(shell command -v npm),page)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/codespell

types: install
	$(BIN)/mypy

# The web UI's JavaScript: its types, lint and unit tests; needs node and npm. Part of `check` where they are.
page:
	cd tools/page && npm ci --no-audit --no-fund && npm run types && npm run lint && npm test

clean:
	rm -rf tools/page/node_modules $(VENV) build dist site *.egg-info kvkeep/compiled/*.so kvkeep/compiled/built.json
