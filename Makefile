# The two commands of README: `make app` and `make test`. Everything lives in .venv, but for a Chromium that
# `make test` installs with apt-get if there is none.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed

.PHONY: app test lint bench clean

app: $(INSTALLED)
	$(BIN)/resinspect app

test: $(INSTALLED) lint
	RESINSPECT_CHROMIUM="$$(sh tests/find_chromium.sh)" $(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(INSTALLED)
	$(BIN)/python -m pytest tests/benchmarks/bench_*.py --benchmark-columns=min,median --benchmark-sort=min

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("resinspect needs Python 3.11 or newer; set PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[app,train,dev]'
	# Without its dependencies: the tests read one plain torch file of it, and it asks for triton.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps flash-attn-res==0.1.12
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
