# make train   set up once, then run the built-in demo      make test    set up once, then run the tests: minutes
# make lint    style                                        make types   mypy --strict
# make docs    the site, into build/site, with every link checked; it needs no network to be read
# make test-all    all that guards a merge: half an hour. `make test-rest` is what `make test` leaves of it
# make rehearsal   the real step of many layouts on a stand-in for the CUDA driver: its own environment, of 5 GB
# make versions    what is private in torch, in the oldest and the newest torch allowed: an environment each
# make campaign    all that is not in every test run, from where the last campaign of this commit ended: some hours
#
# PYTHON=python3.12 chooses the interpreter; PIP_FLAGS are added to pip's install line, for example
# PIP_FLAGS="--extra-index-url ..." with the index that holds the small torch without CUDA.

.PHONY: train test test-rest test-all campaign rehearsal versions lint types docs clean
.DEFAULT_GOAL := train

VENV := .venv
STAMP := $(VENV)/.installed
REHEARSAL ?= .venv-cuda
PIP_FLAGS ?=
PYTEST_FLAGS ?=

# The first Python of this machine that is new enough.
PYTHON ?= $(shell for each in python3.12 python3.11 python3.13 python3 python; do \
	"$$each" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$$each" && break; done)

train: $(STAMP)
	$(VENV)/bin/fivefold train

# The tiers of tests are markers: docs/explain/tests.md. Two processes take file after file: xdist 3.8 loses its groups
# under pytest 9. PYTEST_FLAGS are added.
PYTEST := $(VENV)/bin/python -m pytest $(PYTEST_FLAGS) --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(PYTEST) -m "not full and not campaign and not rehearsal"

test-rest: $(STAMP)
	$(PYTEST) -m "full and not campaign and not rehearsal"

test-all: test test-rest

# The trackers themselves, for one test, which is skipped where they cannot be installed.
$(VENV)/.trackers: $(STAMP)
	$(VENV)/bin/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[trackers]' || \
		echo "the trackers are not installed: their test is skipped"
	@touch $@

campaign: $(VENV)/.trackers
	$(VENV)/bin/python benchmarks/campaign.py

# With the usual build of torch for Linux, which has CUDA, in the versions that the table was measured with; REHEARSAL
# names another environment that has it.
rehearsal: $(REHEARSAL)/.installed
	@$(REHEARSAL)/bin/python -m fivefold.rehearsal.stand_in
	$(REHEARSAL)/bin/python -m pytest -m rehearsal tests/rehearsed tests/benchmarks/test_commands.py

$(REHEARSAL)/.installed: pyproject.toml
	$(PYTHON) -m venv $(REHEARSAL)
	$(REHEARSAL)/bin/python -m pip install -e . 'pytest>=9' torch==2.14.1 transformers==5.23.0
	@touch $@

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(STAMP)
	$(VENV)/bin/mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet
	! grep -rlE '<(script|link|img)[^>]+(src|href)="?https?://' build/site --include='*.html'  # it needs no network

# The ends of the range in pyproject.toml. Installs alone take minutes and hundreds of MB each, so `make test-all` has them
# not, and the campaign does.
TORCHS := 2.11 2.14

versions: $(TORCHS:%=.venv-torch-%/.installed)
	for each in $(TORCHS); do \
		.venv-torch-$$each/bin/python -m pytest tests/test_torch_internals.py || exit 1; done

.venv-torch-%/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-torch-$*
	.venv-torch-$*/bin/python -m pip install $(PIP_FLAGS) -e . "torch==$*.*" 'pytest>=9'
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { \
		echo "fivefold needs Python 3.11 or newer, and this machine has: $$(python3 --version 2>&1 || echo none)" >&2; \
		echo "install python3.12 (or name it: make train PYTHON=/path/to/python3.12)" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo "$(PYTHON) cannot make virtual environments" >&2; \
		echo "on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(REHEARSAL) $(TORCHS:%=.venv-torch-%) build/site
