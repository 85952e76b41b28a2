# Everything sets itself up: `make demo` and `make test` need Python 3.11 or 3.12, make, and a package registry.
PYTHON ?= $(shell command -v python3.12 >/dev/null 2>&1 && python3.12 -c 'import sys' 2>/dev/null && echo python3.12 || echo python3.11)
VENV   ?= .venv
PY     := $(VENV)/bin/python
JOBS   ?= 2
TORCH  ?= torch==2.14.1 torchvision==0.29.1

.PHONY: setup demo digits test check bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet $(TORCH)
	$(PY) -m pip install --quiet -e '.[dev,examples]'
	touch $@

demo: setup
	cd examples && ../$(PY) demo.py

digits: setup
	$(PY) examples/digits_training.py

test: setup
	$(PY) -m pytest -n $(JOBS) --dist loadfile tests

check: setup
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -n $(JOBS) --dist loadfile -m "not slow" tests

bench: setup
	$(PY) benchmarks/anchors.py

clean:
	rm -rf $(VENV) build dist *.egg-info
