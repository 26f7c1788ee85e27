# One-line doors to tox; `make help` lists them. PYTHON is the interpreter of `tests`.
PYTHON ?= python3
TOOLS := .venv-tools
TOX := $(TOOLS)/bin/tox
DEMO := .venv-demo
export DATA_DIR ?= data
# The floor runs where a Python 3.8 is found; in continuous integration it must.
PYTHON38 := $(or $(shell .ci/find-python 3.8),$(if $(IPUFIT_REQUIRE_FLOOR),python3.8))
FLOOR := $(if $(PYTHON38),$(TOX) run --skip-missing-interpreters false -e floor,echo "skipped, as there is no Python 3.8: tox run -e floor")
SPREAD := $(shell cat tests/floor.txt)
export IPUFIT_PYTHON38 := $(or $(PYTHON38),python3.8)

.DEFAULT_GOAL := help
.PHONY: help test test-long matrix lint types tests modes floor docs examples gallery release packages screens demo clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

# The floor's wheels are large: they are fetched while the tests run. mypy runs then, too, so
# that it only looks at what it keeps when its turn comes.
test: $(TOX)  ## the everyday checks: lint, tests, doctests, types and a spread of tests on the floor
	@{ $(FLOOR) --notest --skip-pkg-install && $(TOX) exec -e floor -- mypy; } >/dev/null 2>&1 & \
	$(TOX) run -e lint,tests; status=$$?; wait; \
	$(FLOOR) && exit $$status

test-long: $(TOX)  ## the long ones: examples, more cases of properties, tests in the other modes, the site, the rest of the floor
	@$(TOX) run -m long; status=$$?; \
	$(FLOOR) -- tests --ignore=tests/docs/test_examples.py --ignore=tests/keras --ignore=tests/benchmarks $(SPREAD:%=--ignore=%) && exit $$status

matrix: $(TOX)  ## other Pythons and torches, extras, release; hours, and gigabytes; ONLY="py39 py313" chooses some
	@.ci/matrix $(TOX) $(ONLY)

lint: $(TOX)  ## ruff: rules and format
	$(TOX) run -e lint

types: $(TOX)  ## mypy on the running interpreter; `floor` runs it on 3.8
	$(TOX) run -e types

tests: $(TOX)  ## tests and doctests on the running interpreter, and some tests looped
	$(TOX) run -e tests

modes: $(TOX)  ## tests that run programs in the emulator's other modes: looped, and contiguous
	$(TOX) run -e modes

floor: $(TOX)  ## types and a spread of the tests on Python 3.8 and the lowest dependencies
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
