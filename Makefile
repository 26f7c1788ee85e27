# One-line doors to tox; `make help` lists them. PYTHON is the interpreter of `tests`.
PYTHON ?= python3
TOOLS := .venv-tools
TOX := $(TOOLS)/bin/tox
MATRIX := $(TOOLS)/bin/python .ci/matrix.py
export DATA_DIR ?= data
export IPUFIT_PYTHON38 := $(shell .ci/find-python 3.8)

.DEFAULT_GOAL := help
.PHONY: help test test-long test-all matrix lint types tests modes keras floor docs examples gallery release packages screens demo clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

test: $(TOX)  ## the everyday checks: lint, types, tests, doctests, examples, modes, Keras, floor
	@$(MATRIX)

test-long: $(TOX)  ## the long ones: many more examples of properties, all tests in each mode, the site
	@$(MATRIX) --long

test-all: $(TOX)  ## the long ones and the matrix; hours, and gigabytes to fetch
	@$(MATRIX) --long --matrix

matrix: $(TOX)  ## other Pythons and torches, extras, release; ONLY="py39 py313" chooses some
	@$(MATRIX) --matrix $(ONLY)

lint: $(TOX)  ## ruff: rules and format
	$(TOX) run -e lint

types: $(TOX)  ## mypy: on the floor if there is a Python 3.8
	$(TOX) run $(if $(IPUFIT_PYTHON38),-e floor -x testenv:floor.commands=mypy,-e types)

tests: $(TOX)  ## tests, doctests and examples on the running interpreter
	$(TOX) run -e tests

modes: $(TOX)  ## the numbers with the emulator's programs looped
	$(TOX) run -e modes

keras: $(TOX)  ## Keras and ipufit side by side, on Python 3.11 or newer
	$(TOX) run -e keras

floor: $(TOX)  ## types and tests on Python 3.8 and the lowest dependencies
	$(TOX) run -e floor

docs: $(TOX)  ## the documentation's site, into .tox/docs/site, and its tests
	$(TOX) run -e docs

examples: $(TOX)  ## every example, with the packages that some of them ask for
	$(TOX) run -e examples

release: $(TOX)  ## build sdist and wheel into dist, check them, and try them where nothing else is
	$(TOX) run -e release -- --keep dist

gallery:  ## run every example and write examples/README.md; needs `pip install ".[examples]"` and torchvision
	@$(PYTHON) .ci/gallery.py

packages:  ## write the table of packages into CONTRIBUTING.md
	@$(PYTHON) .ci/packages.py

screens:  ## run the code of pages and put what it prints and draws into them; needs `pip install ".[plot]"`
	@$(PYTHON) .ci/screens.py

demo: $(TOX)  ## train the example; MNIST is looked for in DATA_DIR
	$(TOX) run -e demo

clean:  ## remove what the other targets made
	rm -rf $(TOOLS) .tox .mypy_cache .pytest_cache .ruff_cache .hypothesis dist

$(TOX): .ci/requirements.txt
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m pip install -qq --requirement $<
	touch $@
