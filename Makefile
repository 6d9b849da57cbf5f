# Paths are relative, so the path of a checkout may contain spaces.
# On a machine without a GPU, a CPU build of PyTorch saves gigabytes:
#   make test PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
PYTHONS ?= python3.10 python3.13
PYTEST_ARGS ?=
DEMO_EPOCHS ?= 20

VENV := .venv
CONSTRAINTS := constraints.txt
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# One worker per core. Each takes a share of the files, and an idle worker takes tests from a busy one.
PYTEST := $(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal

MARKERS := -m 'not slow'

# If images set this variable, each worker and each process that a test starts would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

ifdef PIP_EXTRA_INDEX_URL
export PIP_EXTRA_INDEX_URL
endif

.PHONY: help demo test test-all test-cpus test-versions fast lint typecheck docs clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo      train on the built-in bodies, then label and draw a new body (minutes on a CPU)'
	@echo 'make test      lint, type-check the wheel, and run the fast tests; PYTEST_ARGS="-k name" selects tests'
	@echo 'make test-all  the same with the slow tests'
	@echo 'make test-cpus the tests that compare bits, as on CPUs with fewer instructions'
	@echo 'make test-versions  the fast tests with the lowest and the newest dependencies, and with PYTHONS=$(PYTHONS)'
	@echo 'make docs      run the code blocks of all pages, and build the site in build/docs; PYTHON=… is 3.11 or newer'
	@echo 'make clean     remove everything that make has created, including the environment'
	@echo 'All but the last create an environment in $(VENV) with PYTHON=$(PYTHON).'

demo: $(VENV)/installed
	rm -rf demo/run
	mkdir -p demo
	$(VENV)/bin/diffnet train segmentation --data bodies --k 64 --width 64 --epochs $(DEMO_EPOCHS) \
	    --out demo/run --cache demo/cache --seed 0
	$(VENV)/bin/diffnet predict "$$($(VENV)/bin/python -c "$$UNSEEN")" --checkpoint demo/run/last.pt \
	    --out demo/prediction.ply --html demo/view.html --png demo/view.png
	@echo
	@echo 'A body that the network has not seen, labeled: demo/view.png, interactive in demo/view.html'
	@echo 'The training curves and the test bodies:       demo/run/curves.png, demo/run/predictions.html'

define UNSEEN
from diffnet.data import BODIES
print(min((BODIES / "test").iterdir()))
endef
export UNSEEN

# The type checker uses one core, so the tests start beside it.
test: lint
	$(MAKE) -j2 typecheck fast

test-all: lint
	$(MAKE) -j2 typecheck fast MARKERS=

# pytest uses the last -m that it is given, so PYTEST_ARGS="-m gpu" runs slow GPU tests too.
fast: $(VENV)/installed-test
	$(PYTEST) $(MARKERS) $(PYTEST_ARGS)

# The tests of streaming, shards, resuming, ranks and caches, as PyTorch runs on CPUs without AVX-512 and without AVX2.
# They are an extra and stand for no other CPU: its libraries for products of matrices may round differently.
CPU_TESTS := tests/geometry/test_cache.py tests/data/test_shards.py $(addprefix tests/train/test_, batches.py \
    checkpoints.py determinism.py precompute_shards.py ranks.py streaming.py training.py)

test-cpus: $(VENV)/installed-test
	for which in default avx2; do ATEN_CPU_CAPABILITY=$$which $(PYTEST) $(MARKERS) $(CPU_TESTS) || exit 1; done

# PyTorch and Triton stay those of constraints.txt, because each other release takes gigabytes.
test-versions:
	grep -E '^(torch|triton)=' constraints.txt | tee .venv-newest.txt >.venv-lowest.txt
	grep -oE '"[A-Za-z0-9_-]+>=[0-9.]+' pyproject.toml | tr -d '"' | sed 's/>=/==/' \
	    | grep -vE '^(torch|triton)=' >>.venv-lowest.txt
	for which in lowest newest; do $(MAKE) fast VENV=.venv-$$which CONSTRAINTS=.venv-$$which.txt || exit 1; done
	for python in $(PYTHONS); do $(MAKE) fast VENV=.venv-$$(basename $$python) PYTHON=$$python || exit 1; done

lint: $(VENV)/installed-test
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .

# The wheel is checked, with the benchmarks beside it, because type checkers cannot map the rooms of the checkout to one
# namespace.
# setuptools would copy deleted modules from an old build/lib into the wheel. The site in build/docs stays.
typecheck: $(VENV)/installed-test
	rm -rf build/lib build/bdist.* build/wheel build/site
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(VENV)/bin/python -m zipfile -e build/wheel/*.whl build/site
	ln -s ../../../benchmarks build/site/diffnet/benchmarks
	cd build/site && ../../$(VENV)/bin/python -m mypy --config-file ../../pyproject.toml \
	    --cache-dir ../../.mypy_cache -p diffnet

# Each page is one session, so its blocks run in one worker. PICTURES=1 also replaces the pictures that the pages write.
PAGES := README.md docs examples/README.md benchmarks/README.md

docs: $(VENV)/installed-docs
	PYTHONPATH=docs OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -p blocks -n auto --maxprocesses 8 --dist loadfile $(PAGES)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m sphinx --quiet --fail-on-warning --keep-going -c docs . build/docs
	@echo 'The site: build/docs/index.html'

# Installed again only when one of these files has changed.
$(VENV)/installed: $(VENV)/pyvenv.cfg pyproject.toml $(CONSTRAINTS)
	$(PIP) install --quiet -e . -c $(CONSTRAINTS)
	touch $@

$(VENV)/installed-test: $(VENV)/pyvenv.cfg pyproject.toml $(CONSTRAINTS)
	$(PIP) install --quiet -e '.[test]' -c $(CONSTRAINTS)
	touch $@ $(VENV)/installed

$(VENV)/installed-docs: $(VENV)/pyvenv.cfg pyproject.toml $(CONSTRAINTS)
	@$(VENV)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo 'make: the documentation needs Python 3.11 or newer; choose one with make docs PYTHON=… VENV=…' >&2; exit 1; }
	$(PIP) install --quiet -e '.[docs]' -c $(CONSTRAINTS)
	touch $@ $(VENV)/installed $(VENV)/installed-test

# pyvenv.cfg has no prerequisites, so an existing environment is never rebuilt.
$(VENV)/pyvenv.cfg:
	@command -v '$(PYTHON)' >/dev/null || { echo 'make: $(PYTHON) not found; choose a Python with make PYTHON=…' >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo 'make: $(PYTHON) is older than 3.10; choose a newer one with make PYTHON=…' >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null \
	    || { echo 'make: $(PYTHON) has no venv module (on Debian: apt install python3-venv)' >&2; exit 1; }
	@test -n '$(PIP_EXTRA_INDEX_URL)' || command -v nvidia-smi >/dev/null || echo 'make: PyTorch for GPUs takes gigabytes;' \
	    'without a GPU, stop and add PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu'
	'$(PYTHON)' -m venv --clear $(VENV)

clean:
	rm -rf .venv .venv-* build dist demo *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
