# make demo: verify a real Triton backward pass and a broken one.  make test: lint, types, contracts, tests.
# Both set themselves up in .venv (Python >= 3.11, no GPU needed).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

.PHONY: demo test test-whole bytecode lint setup test-newest test-oldest first-hour opdb outside docs docs-serve package clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   verify the shipped RMSNorm and catch a broken one (under two minutes after set-up)"
	@echo "make test   lint, types, import contracts, tests (the site and the package are built in them); make test-whole"
	@echo "            also the parts of long frozen sets that another day runs"
	@echo "make opdb   today's part of 28 of PyTorch's op database, beside what was adjudicated (part of make test)"
	@echo "make docs   the site, into build/site; make docs-serve shows it at http://127.0.0.1:8000"
	@echo "make test-newest  what depends on versions, with the newest torch, Triton, NumPy and jax; make test-oldest the lowest"
	@echo "make first-hour  the built wheel in fresh environments, walked as a newcomer does; times are printed"
	@echo "make outside  what verify says of 428 ops of other libraries, beside what was adjudicated (own environment, resumable)"
	@echo "make package  wheel and sdist, into dist"

setup: $(STAMP)

$(STAMP): | .uv/bin/uv
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "retrograd needs Python >= 3.11, $(PYTHON) is " + sys.version.split()[0] + "; run make PYTHON=python3.11 ...")'
	@echo "setting up $(VENV) (once; torch and triton are large)"
	@rm -rf $(VENV) && .uv/bin/uv venv -q -p $(PYTHON) $(VENV)
	@.uv/bin/uv pip install -q -p $(VENV) --compile-bytecode $${PIP_FIND_LINKS:+--find-links "$$PIP_FIND_LINKS"} -c constraints.txt -e '.[all]' --group dev --group docs
	@touch $@

demo: setup
	@$(BIN)/python examples/demo.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --diff -q . || (echo "run: .venv/bin/ruff format ." && false)
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python tools/structure.py --check
	$(BIN)/python tools/names.py --check

# A file stays in one process: tests of a file share what is expensive to make. Of what is marked `dealt` a part each day.
test: lint bytecode
	$(BIN)/python -m pytest -n 2 --dist loadfile --rotate $$(( $$(date +%s) / 86400 ))
	@$(MAKE) --no-print-directory opdb

test-whole: lint bytecode
	$(BIN)/python -m pytest -n 2 --dist loadfile
	@$(MAKE) --no-print-directory opdb

# Under PYTHONDONTWRITEBYTECODE, which images set, each process that a test starts would compile what it imports of src:
# 0.5 of its 3.4 CPU seconds.
bytecode: setup
	@$(BIN)/python -m compileall -q src

# One part of 28 of PyTorch's op database, another one each day, beside benchmarks/opdb_baseline.toml: 90 seconds.
opdb: setup
	@rm -f build/opdb-part.sqlite
	$(BIN)/python benchmarks/opdb.py --baseline --samples all --minutes 3 --parts 28 --rotate $$(( $$(date +%s) / 86400 )) --results build/opdb-part.sqlite -j 2

# No network: what is built comes from this checkout alone.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q
	@echo "build/site/index.html"

docs-serve: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# Newest of everything without our pins, and the lowest of everything that pyproject.toml promises: each sets up an
# environment of its own (.venv-newest, .venv-oldest; torch for CUDA, 6 GB each) and runs what depends on versions.
# Everything: make test-newest OPTIONS=--whole
test-newest test-oldest: test-%: .uv/bin/uv
	@$(PYTHON) tools/versions.py $* $(OPTIONS)

# A newcomer's first hour from the built wheel, in fresh environments (base, [torch], [all]) with the newest of everything.
# Versions of constraints.txt: make first-hour OPTIONS=--pinned; without the largest: OPTIONS="--only base,torch"
first-hour: .uv/bin/uv
	@$(PYTHON) tools/first_hour.py $(OPTIONS)

# Ops of torchvision, PyTorch Geometric, kornia, gpytorch, ... in an environment of their own (.venv-outside).
# One library: make outside OPTIONS="--libraries kornia --only filters"
outside: .uv/bin/uv
	@$(PYTHON) tools/outside.py $(OPTIONS)

.uv/bin/uv:
	@if command -v uv >/dev/null; then mkdir -p .uv/bin && ln -sf "$$(command -v uv)" $@; \
	elif $(PYTHON) -m pip --version >/dev/null 2>&1; then \
	  $(PYTHON) -m pip install -q --disable-pip-version-check --root-user-action=ignore --target .uv uv; \
	else echo "$(PYTHON) has no pip, and uv is not on PATH; run make PYTHON=... with one that has, or install uv"; false; fi

package: setup
	@rm -rf dist
	@$(BIN)/python -m hatchling build
	@$(BIN)/python -m pytest -q tests/package

clean:
	rm -rf $(VENV) $(VENV)-newest $(VENV)-oldest $(VENV)-outside .uv out build dist
