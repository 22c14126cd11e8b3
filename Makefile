# Everything a person or CI does with this checkout. Each target is safe to repeat: an install or a
# build runs only when what it was made from has changed (the stamps live in .venv and frontend/).

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$p && break; done)
NODE_MAJOR := $(shell node --version 2>/dev/null | sed 's/^v\([0-9]*\).*/\1/')
HAS_NODE := $(shell [ "0$(NODE_MAJOR)" -ge 20 ] && command -v npm)

BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
NPM := npm --prefix frontend --no-audit --no-fund --loglevel=error
FRONTEND_SOURCES := $(shell find frontend -path '*/node_modules' -prune -o -path frontend/dist -prune -o \
	-path frontend/test -prune -o -type f -print 2>/dev/null)
RUN_ARGS ?=
PYTEST_ARGS ?=
# Two lanes, see tests/conftest.py.
LANES := -n 2
# Django wants a data folder to be imported; the one of `make run` is left alone.
SCRATCH := ENGINE_DATA_DIR=.make
STEP = @printf '\033[2m%s\033[0m\n'

.PHONY: help run test lint venv frontend clean

help:
	@echo "make run    install, build, and start the whole product on this machine"
	@echo "make test   install, and run every test"
	@echo "make lint   formatters, linters, types, import rules, schema checks"
	@echo "make clean  remove what was installed and built (the data in .run stays)"

run: .venv/.run-installed $(if $(HAS_NODE),frontend/dist/.built,no-node)
	@exec $(BIN)/python manage.py demo $(RUN_ARGS)

# The browser tests walk through the built dashboard, so it is built first.
test: .venv/.dev-installed $(if $(HAS_NODE),frontend/dist/.built,no-node)
	$(if $(HAS_NODE),$(NPM) test --silent)
	$(SCRATCH) $(BIN)/python -m pytest $(LANES) $(PYTEST_ARGS)

lint: .venv/.dev-installed $(if $(HAS_NODE),frontend/node_modules/.installed,no-node)
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	$(SCRATCH) $(BIN)/mypy --no-error-summary
	$(BIN)/lint-imports --no-cache
	$(SCRATCH) $(BIN)/python manage.py makemigrations --check --dry-run
	$(SCRATCH) $(BIN)/python manage.py spectacular --validate --fail-on-warn --file /dev/null
	$(if $(HAS_NODE),$(NPM) run --silent lint && $(NPM) run --silent typecheck && $(NPM) run --silent check)

venv: .venv/.dev-installed
frontend: frontend/dist/.built

clean:
	rm -rf .venv frontend/node_modules frontend/dist *.egg-info

.PHONY: no-node
no-node:
	@echo "Node 20 or newer was not found: everything but the dashboard is built."

.venv/bin/python:
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or newer is needed."; exit 1; }
	$(STEP) "creating .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv || { echo "On Debian: apt-get install python3-venv"; rm -rf .venv; exit 1; }

.venv/.run-installed: pyproject.toml | .venv/bin/python
	$(STEP) "installing the control plane and the agent (minutes, the first time)"
	@$(PIP) --editable '.[agent,web,demo,export]'
	@touch $@

.venv/.dev-installed: pyproject.toml | .venv/bin/python
	$(STEP) "installing everything, tools for tests included (minutes, the first time)"
	@$(PIP) --editable '.[agent,web,demo,export,dev]'
	@touch .venv/.run-installed $@

frontend/node_modules/.installed: frontend/package.json frontend/package-lock.json
	$(STEP) "installing the dashboard's packages"
	@$(NPM) ci --silent
	@touch $@

frontend/dist/.built: frontend/node_modules/.installed $(FRONTEND_SOURCES)
	$(STEP) "building the dashboard"
	@$(NPM) run --silent build -- --logLevel warn
	@touch $@
