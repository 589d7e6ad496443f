# Two commands: `make lab` and `make test`. `make help` lists the rest.
# A bare machine needs python3 (3.11 to 3.14) with pip, make and git; everything else goes into a virtual environment.

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8888
JOBS ?= 4
BIN := $(VENV)/bin
# Python compiles what is imported when it is imported, and keeps it; pip would compile all there is.
INSTALL = $(BIN)/python -m pip install --no-compile --constraint $(CONSTRAINTS)
# SYSTEM=1: what PYTHON has already (an image with its own torch) is used and not replaced; pins are for the rest.
CONSTRAINTS = $(if $(SYSTEM),$(VENV)/constraints.txt,constraints.txt)
export PYTHONDONTWRITEBYTECODE =
# Every file of the project is UTF-8, whatever the locale says.
export PYTHONUTF8 = 1
# A test of processes waits for them now and then; so on a laptop's two cores four files of tests run at once.
# conftest.py says which of them begin first.
PARALLEL = --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder
# A lab is its solution with the exercises taken out, and waits where they are missing: an ordinary run executes the
# solutions; `thorough` and `notebooks` execute both folders.
NOTEBOOKS = solutions
# Stored outputs are compared, cell by cell, with a fresh run.
NBVAL = -p tests.no_iris --nbval --nbval-current-env --nbval-sanitize-with=tests/nbval_sanitize.cfg --nbval-cell-timeout=180
PYTEST = $(BIN)/python -m pytest -p no:anyio
# Every kernel of the environment runs it: before a lab is open, `check` says which cell to run. Its folder is on the
# path meanwhile, so it has a name that nothing can import.
STARTUP = $(VENV)/etc/ipython/startup/50-minimegatron.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help lab test pytest lint stale unit thorough notebooks site gpu browser format doctor clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "  variables: PYTHON=$(PYTHON) VENV=$(VENV) PORT=$(PORT) JOBS=$(JOBS); SYSTEM=1 uses the torch that PYTHON has"

lab: $(VENV)/.lab $(VENV)/.kernels $(STARTUP) ## environment, then JupyterLab on my-labs/, your copies (PORT=8888; LANGUAGE=zh: 中文; ALLOW_ROOT=1: as root)
	$(BIN)/minimegatron lab --port $(PORT) $(if $(findstring command,$(origin LANGUAGE)),--language $(LANGUAGE)) $(if $(ALLOW_ROOT),--allow-root)

# Types are checked on one core while the tests begin on the other.
test: $(VENV)/.test ## everything that must hold: style, types, imports, tests, notebooks
	@$(MAKE) --no-print-directory --jobs=2 lint pytest

pytest: $(VENV)/.compiled $(VENV)/.kernels
	$(PYTEST) $(PARALLEL) $(NBVAL) tests $(NOTEBOOKS)

lint: $(VENV)/.test ## ruff, mypy, and which package may import which (docs/architecture.md)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Each process imports torch: for some of the tests two are faster than three.
unit: JOBS = $(if $(ARGS),2,3)
unit: $(VENV)/.test ## the tests that take little (ARGS="tests/layers -k rope": some of them; SLOW=1: slow ones, too)
	$(PYTEST) -p no:nbval $(PARALLEL) $(if $(SLOW),,--quick) $(ARGS)

thorough: lint $(VENV)/.site ## all that there is: every matrix in full, notebooks as on other CPUs and with other seeds; takes long
	$(PYTEST) $(PARALLEL) $(NBVAL) --thorough $(or $(ARGS),tests labs solutions)

stale: $(VENV)/.test ## labs and solutions are what their sources say
	$(BIN)/python -m labkit.build --check

notebooks: stale ## labs and solutions also run to the outputs they store
	$(PYTEST) $(PARALLEL) $(NBVAL) labs solutions

site: $(VENV)/.site ## the website, into build/site/html: labs, guides, reference, papers, questions, a search
	$(BIN)/python -m docs.site

format: $(VENV)/.test ## sort imports, fix what ruff can fix, lay out the rest
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

doctor: $(VENV)/.lab ## what this machine can do
	@$(BIN)/minimegatron doctor

gpu: $(VENV)/.lab ## Transformer Engine and flash-attn, tried once (FORCE=1: again); says what it does and how long
	@$(BIN)/python -m minimegatron.kernels.gpu_setup --stamp $(VENV)/.gpu.json \
	    --constraints $(CONSTRAINTS) $(if $(FORCE),--force)

browser: $(VENV)/.browser $(VENV)/.site ## JupyterLab, the chat page, the pages of a run and the website in a browser (Chromium: from the system's packages)
	$(PYTEST) -p no:nbval --thorough tests/notebooks/test_browser.py tests/serving/test_browser.py \
	    tests/site/test_browser.py tests/watch/test_page.py tests/commands/test_report.py

clean: ## remove the environment and every cache
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info

# ------------------------------------------------------------------------------------------------- environment
# A stamp file says that a set of packages is installed; it is older than pyproject.toml or constraints.txt when the
# set has changed. Debian's python3 comes without ensurepip: then pip is fetched by the pip outside.

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, $(if $(SYSTEM),99,14)))' || \
	    { echo "minimegatron with the versions in constraints.txt needs Python 3.11 to 3.14, and $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	      echo "Install one and name it, for example: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12"; exit 1; }
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(if $(SYSTEM),--system-site-packages) $(VENV); \
	 else $(PYTHON) -m venv --without-pip $(if $(SYSTEM),--system-site-packages) $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; fi

# With SYSTEM=1: the pins of packages that PYTHON does not have.
$(VENV)/constraints.txt: constraints.txt | $(VENV)/pyvenv.cfg
	@$(PYTHON) -m pip list --format=freeze | awk -F '[=@ ]+' '{ name = tolower($$1); gsub(/[_.]/, "-", name) } \
	    !pins { here[name] = 1; next } !(name in here)' - pins=1 constraints.txt > $@

$(VENV)/.lab: pyproject.toml $(CONSTRAINTS) | $(VENV)/pyvenv.cfg
	$(INSTALL) --editable '.[lab,serve]'
	@touch $@

$(STARTUP): labkit/ipython_startup.py | $(VENV)/pyvenv.cfg
	@mkdir -p $(@D) && cp $< $@

# megatron-core is an oracle of some tests; its own dependencies want a GPU, and the tests do not need them. For Python
# 3.14 it has no wheel: what asks it is skipped there, and compares with stored numbers of it as everywhere.
$(VENV)/.test: pyproject.toml $(CONSTRAINTS) | $(VENV)/pyvenv.cfg
	$(INSTALL) --editable '.[lab,serve,test]'
	$(INSTALL) --no-deps 'megatron-core; python_version < "3.14"'
	@touch $@ $(VENV)/.lab

# Kernels for this CPU: otherwise the first rank that needs one compiles it, while the others wait for its message.
$(VENV)/.kernels: $(wildcard minimegatron/kernels/csrc/*.cpp minimegatron/kernels/csrc/*.h) | $(VENV)/.lab
	@$(BIN)/python -m minimegatron.kernels.build
	@touch $@

# Tests and what they import, compiled by one process: three would compile the same at the same time.
$(VENV)/.compiled: $(VENV)/.test
	@$(PYTEST) -p no:nbval --collect-only --quiet tests >/dev/null || true
	@touch $@

# The extra without the package, which is read and not imported: no torch.
$(VENV)/.site: pyproject.toml $(CONSTRAINTS) | $(VENV)/pyvenv.cfg
	$(INSTALL) $$($(BIN)/python -c 'import tomllib; from pathlib import Path; \
	    print(*tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]["site"])')
	@touch $@

$(VENV)/.browser: $(VENV)/.test
	$(INSTALL) --editable '.[browser]'
	@command -v chromium chromium-browser google-chrome >/dev/null || echo "no Chromium found: install your system's package, for example chromium"
	@touch $@
