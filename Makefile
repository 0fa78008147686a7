# The commands of this checkout. `make` alone lists them.

PYTHON := .venv/bin/python
ARGS ?=
MINI = $(or $(patsubst run.id=%,%,$(filter run.id=%,$(ARGS))),maze-mini)

.DEFAULT_GOAL := help
.PHONY: help setup serving rehearse mini test test-fast browser promtool lint docs lock licences sbom bench bench-lora clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do \
		printf '  make %-10s %s\n' "$$name" "$$text"; done
	@printf '%s\n' '' 'Each makes .venv first where it is missing. ARGS goes to the command, for example:' \
		'  make rehearse ARGS="trainer.max_training_steps=2"' '  make test-fast ARGS="-k maze"'

setup:  ## make .venv: CPU engine, test tools and this package, as locked (7 GB; nothing to do: under a second)
	@scripts/bootstrap.sh

serving: setup  ## make .venv-serving, with which the tests of Ray Serve run (7 GB)
	@scripts/serving.sh

rehearse: setup  ## train a tiny model with the whole stack on the CPU, in minutes
	.venv/bin/skyrl.entrypoints.main_base +recipe=maze_cpu $(ARGS)

mini: setup  ## the published curve in miniature on the CPU, and its page (about 20 minutes)
	.venv/bin/skyrl.entrypoints.main_base +recipe=maze_mini $(ARGS)
	.venv/bin/skyrl-maze report runs/$(MINI) --out runs/$(MINI)/report.html --force

test: setup  ## the whole test suite, the rehearsal included
	$(PYTHON) -m pytest $(ARGS)

test-fast: setup  ## the tests that take seconds
	$(PYTHON) -m pytest -m "not slow and not rehearsal" $(ARGS)

browser:  ## a Chromium for the tests of the report page: one that is there, else apt's (as root)
	@scripts/browser.sh

promtool: setup  ## promtool for the tests of the alert rules: one that is there, else Debian's, into .venv
	@scripts/promtool.sh

lint: setup  ## ruff and mypy
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

docs: setup  ## these pages as a site, in site/ (ARGS="--site-dir DIR": elsewhere)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict $(ARGS)

# Not after setup, which would install the very lock that is to be replaced.
lock:  ## remake requirements/ from pyproject.toml (ARGS=--upgrade: the newest of everything)
	@[ -x .venv/bin/uv ] || scripts/bootstrap.sh
	scripts/lock.sh $(ARGS)

licences: setup  ## docs/licences.md again, from the locks (downloads what is locked for GPUs and is new)
	$(PYTHON) scripts/licences.py

sbom: setup  ## what lies in .venv as a CycloneDX bill of materials, in dist/
	@mkdir -p dist
	.venv/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file dist/skyrl_maze.cdx.json $(PYTHON)

bench: setup  ## CPU time of one turn of a maze episode
	$(PYTHON) benchmarks/environment.py $(ARGS)

bench-lora: setup  ## the adapter's way to engines and disk, beside a plain copy and SkyRL's own
	$(PYTHON) benchmarks/lora.py $(ARGS)

clean:  ## remove .venv, caches and builds; runs/ stays
	rm -rf .venv .venv-serving build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
