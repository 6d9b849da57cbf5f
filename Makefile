# Paths are relative, so that a checkout may lie in a folder with spaces in its name.
# Where there is no GPU, a CPU build of PyTorch saves gigabytes:
#   make test PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
PYTEST_ARGS ?=
DEMO_EPOCHS ?= 20

VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check

ifdef PIP_EXTRA_INDEX_URL
export PIP_EXTRA_INDEX_URL
endif

.PHONY: help demo test lint typecheck clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo   train on generated figures, then label and picture one the network has not seen (minutes on a CPU)'
	@echo 'make test   lint, type-check the wheel, and run the tests; PYTEST_ARGS="-k name" picks some'
	@echo 'make clean  remove everything that make has made, the environment too'
	@echo 'Both make their own environment in $(VENV), from PYTHON=$(PYTHON).'

demo: $(VENV)/installed
	rm -rf demo/run
	mkdir -p demo
	$(VENV)/bin/diffnet train segmentation --data figures --features log-hks --k 64 --width 64 \
	    --epochs $(DEMO_EPOCHS) --schedule cosine --out demo/run --cache demo/cache --seed 0
	$(VENV)/bin/python -c "$$WRITE_UNSEEN"
	$(VENV)/bin/diffnet predict demo/unseen.ply --checkpoint demo/run/last.pt \
	    --out demo/prediction.ply --html demo/view.html --png demo/view.png
	@echo
	@echo 'A figure from outside the data set, labelled: demo/view.png, and to turn in a browser demo/view.html'
	@echo 'The run, with curves and the test figures:    demo/run/curves.png, demo/run/predictions.html'

# Turned at random: the network has only seen figures that stand.
define WRITE_UNSEEN
import trimesh
from diffnet.data.figures import figure
mesh = figure(1000, upright=False).mesh
trimesh.Trimesh(mesh.verts, mesh.faces, process=False).export("demo/unseen.ply")
endef
export WRITE_UNSEEN

test: lint typecheck
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/installed-test
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .

# Type checkers can't follow the rooms of the checkout into one namespace, so the wheel is checked as it is installed.
# build goes first, because setuptools would put modules that are gone from the checkout into the wheel.
typecheck: $(VENV)/installed-test
	rm -rf build
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(PIP) install --quiet --no-deps --target build/site build/wheel/*.whl
	cd build/site && ../../$(VENV)/bin/python -m mypy --config-file ../../pyproject.toml \
	    --cache-dir ../../.mypy_cache -p diffnet

# Made anew only when what is to be installed has changed.
$(VENV)/installed: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(PIP) install --quiet -e . -c constraints.txt
	touch $@

$(VENV)/installed-test: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(PIP) install --quiet -e '.[test]' -c constraints.txt
	touch $@ $(VENV)/installed

# pyvenv.cfg is old for good, so that it never makes anything out of date.
$(VENV)/pyvenv.cfg:
	@command -v '$(PYTHON)' >/dev/null || { echo 'make: no $(PYTHON) here; name a Python: make PYTHON=…' >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo 'make: $(PYTHON) is older than 3.10; name a newer one: make PYTHON=…' >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null \
	    || { echo 'make: $(PYTHON) has no venv module (on Debian: apt install python3-venv)' >&2; exit 1; }
	'$(PYTHON)' -m venv --clear $(VENV)

clean:
	rm -rf $(VENV) build dist demo *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
