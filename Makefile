# make reproduce: install, train the main comparison, print its table.   make test: install, run the tests.
# make slurm-up, make slurm-down: start and stop a SLURM cluster of four nodes on this machine; as root.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# Of the cluster: where its files are (default: in a temporary folder), and 1 for a database of jobs.
SLURM_FOLDER ?=
SLURM_ACCOUNTING ?=

# Progress is shown as it happens, through a pipe too.
export PYTHONUNBUFFERED = 1

RUN = $(VENV)/bin/python
INSTALLED = $(VENV)/.installed

.PHONY: reproduce test lint install slurm-up slurm-down clean

reproduce: $(INSTALLED)
	$(RUN) run.py -m +ablation=baseline,cb,cb_no_epilogue
	@$(RUN) -m analysis table

test: $(INSTALLED)
	$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

install: $(INSTALLED)

# These need nothing installed but SLURM.
slurm-up:
	@$(PYTHON) -m tests.slurm.cluster up $(if $(SLURM_FOLDER),--folder '$(SLURM_FOLDER)') $(if $(SLURM_ACCOUNTING),--accounting)

slurm-down:
	@$(PYTHON) -m tests.slurm.cluster down $(if $(SLURM_FOLDER),--folder '$(SLURM_FOLDER)')

# The stamp is written last, so an installation that was interrupted starts over.
$(INSTALLED): pyproject.toml constraints/py311.txt constraints/py312.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null || { \
		echo "error: $(PYTHON) is not Python 3.11 or 3.12 ($$($(PYTHON) --version 2>&1 | head -n 1)); say which one is: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { \
		echo "error: $(PYTHON) can't make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(RUN) -m pip install -c constraints/py$$($(RUN) -c 'import sys; print("%d%d" % sys.version_info[:2])').txt -e '.[test,tracking,evaluation]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
