# make reproduce: install, train a small study of all techniques, make the tables, figures and the report.
# make reproduce SCALE=paper: print what that would be at the paper's size, start nothing.
# make figures: tables, figures and the report, from the runs that are there.   make test: install, run the tests.
# make soak MINUTES=10 SEED=1: random runs that are killed and damaged, random command lines; prints each seed that fails.
# make slurm-up, make slurm-down: start and stop a SLURM cluster of four nodes on this machine; as root.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# small or paper.
SCALE ?= small
# Where runs are, and where the report goes.
RUNS ?= runs
REPORT ?= report
# Of the cluster: where its files are (default: in a temporary folder), and 1 for a database of jobs.
SLURM_FOLDER ?=
SLURM_ACCOUNTING ?=
# Of the soak: for how long, the first seed, how many trials at most, and chains or lines for one kind alone.
MINUTES ?= 10
SEED ?= 1
TRIALS ?=
ONLY ?=

# Progress is shown as it happens, through a pipe too.
export PYTHONUNBUFFERED = 1

RUN = $(VENV)/bin/python
INSTALLED = $(VENV)/.installed

.PHONY: reproduce figures test soak lint install slurm-up slurm-down clean

# All of the paper's tables and figures that take trainings; some share runs.
PAPERS_RECIPES = table_pretraining table_lazy_error figure_motivation figure_stage_fraction_rank figure_breakdown \
	figure_layouts figure_scaling

ifeq ($(SCALE),paper)
reproduce: $(INSTALLED)
	@for recipe in $(PAPERS_RECIPES); do \
		echo; echo "== $(RUN) run.py experiment=$$recipe"; \
		$(RUN) run.py experiment=$$recipe launcher.dry_run=true || exit 1; done
else ifeq ($(SCALE),small)
reproduce: $(INSTALLED)
	$(RUN) run.py experiment=laptop/reproduce runs_dir='$(RUNS)'
	@ls -d '$(RUNS)'/benchmarks/codecs-* >/dev/null 2>&1 || \
		$(RUN) run.py experiment=laptop/figure_codec_throughput runs_dir='$(RUNS)' model=gpt_tiny,gpt_mini
	@$(MAKE) --no-print-directory figures
else
reproduce:
	@echo "error: SCALE=$(SCALE): small or paper" >&2; exit 1
endif

figures: $(INSTALLED)
	$(RUN) -m paper_figures --runs '$(RUNS)' --output '$(REPORT)'

test: $(INSTALLED)
	$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

soak: $(INSTALLED)
	$(RUN) -m tests.soak --minutes $(MINUTES) --seed $(SEED) $(if $(TRIALS),--trials $(TRIALS)) $(if $(ONLY),--only $(ONLY))

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
