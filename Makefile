# Two commands do everything on a fresh machine (Debian or Ubuntu, Python 3.11+, no GPU, no model hub):
#   make demo                 train a LoRA on the bundled miniature base and look at it   (FAMILY=flux for the other one)
#   make test                 the checks and the whole test suite
# Both create .venv when it is missing and install what pyproject.toml and constraints.txt name.

PYTHON ?= python3
FAMILY ?= sd15
BIN := .venv/bin

.PHONY: demo test check format clean

demo: .venv/installed
	$(BIN)/lora-fp8 demo --family $(FAMILY)

test: check
	@scripts/install_browser.sh
	@echo "== tests (two at a time; about half an hour)"
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: .venv/installed
	@echo "== ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; choose one with make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "python3-venv is missing; on Debian and Ubuntu: sudo apt-get install python3-venv"; exit 2; }
	@echo "== making .venv and installing lora_fp8 with its dependencies (a few minutes; torch is large)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache lora_fp8.egg-info
