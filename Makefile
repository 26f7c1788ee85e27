# One-line doors to tox; `make help` lists them. PYTHON is the interpreter of `tests`.
PYTHON ?= python3
TOOLS := .venv-tools
TOX := $(TOOLS)/bin/tox
DEMO := .venv-demo
export DATA_DIR ?= data
# The floor runs where a Python 3.8 is found; in continuous integration it must.
export IPUFIT_PYTHON38 := $(or $(shell .ci/find-python 3.8),python3.8)
RUN := $(TOX) run --skip-missing-interpreters $(if $(IPUFIT_REQUIRE_FLOOR),false,true)

.DEFAULT_GOAL := help
.PHONY: help test test-long matrix lint types tests floor docs examples gallery release packages screens demo clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

test: $(TOX)  ## the everyday checks: lint, types, tests, doctests, and some tests on the floor
	@$(RUN)

test-long: $(TOX)  ## slow tests, more cases of properties, other modes, the site, the rest on the floor
	@$(RUN) -m long; status=$$?; \
	if [ -n "$$(.ci/find-python 3.8)$(IPUFIT_REQUIRE_FLOOR)" ]; then \
		$(RUN) -e floor -- -m "not floor and not slow" || status=1; \
	fi; exit $$status

matrix: $(TOX)  ## other Pythons and torches, extras, release; hours, and gigabytes; ONLY="py39 py313" chooses some
	@.ci/matrix $(TOX) $(ONLY)

lint: $(TOX)  ## ruff: rules and format
	$(TOX) run -e lint

types: $(TOX)  ## mypy on the running interpreter
	$(TOX) exec -e tests -- mypy

tests: $(TOX)  ## types, tests and doctests on the running interpreter, and some tests looped
	$(TOX) run -e tests

floor: $(TOX)  ## types and some tests on Python 3.8 and the lowest dependencies
	$(TOX) run -e floor

docs: $(TOX)  ## the documentation's site, into .tox/docs/site, and its tests
	$(TOX) run -e docs

examples: $(TOX)  ## every example, with the packages that some of them ask for
	$(TOX) run -e examples

release: $(TOX)  ## build sdist and wheel into dist, check them, and try them where nothing else is
	$(TOX) run -e release -- --keep dist

gallery:  ## run every example and write examples/README.md; needs `pip install ".[examples]"` and torchvision
	@$(PYTHON) tools/gallery.py

packages:  ## write the map of files into CONTRIBUTING.md
	@$(PYTHON) tools/packages.py

screens:  ## run the code of pages and put what it prints and draws into them; needs `pip install ".[plot]"`
	@$(PYTHON) tools/screens.py

demo: $(DEMO)/ready  ## train MNIST on an emulated pipeline of four IPUs; MNIST is looked for in DATA_DIR
	$(DEMO)/bin/python examples/mnist_pipeline.py --data auto --data-dir "$(DATA_DIR)"

clean:  ## remove what the other targets made
	rm -rf $(TOOLS) $(DEMO) .tox .mypy_cache .pytest_cache .ruff_cache .hypothesis dist

$(TOX): .ci/requirements.txt
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m pip install -qq --requirement $<
	touch $@

$(DEMO)/ready: .ci/torch.txt .ci/torchvision.txt pyproject.toml
	$(PYTHON) -m venv --clear $(DEMO)
	$(DEMO)/bin/python -m pip install --quiet -r .ci/torch.txt -r .ci/torchvision.txt "scikit-learn>=1.3" --editable .
	touch $@
