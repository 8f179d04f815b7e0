# Each target does its own set-up: a bare clone needs nothing but Python >= 3.10 and make.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: test demo toy lint figures clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "roadmap needs Python 3.10 or newer, this is %s; run: make PYTHON=/path/to/python3" % sys.version.split()[0])'
	@echo "Installing torch and the tools of the tests into $(VENV): some gigabytes, a few minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

test: lint ## everything that must hold: style, types, tests
	$(RUN) -m pytest --numprocesses auto

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

demo: $(STAMP) ## train three losses on the built-in characters and show what they retrieve
	$(RUN) -m roadmap.demo --out demo

toy: $(STAMP) ## optimise free embeddings of a hard toy set under each loss and draw what happens
	$(RUN) -m roadmap.toy --out toy

figures: $(STAMP) ## redraw every figure of the documentation
	for f in docs/figures/*.py; do $(RUN) $$f || exit 1; done

clean:
	rm -rf $(VENV) demo toy
