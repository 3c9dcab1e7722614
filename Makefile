# Two commands do everything on a fresh machine (Debian or Ubuntu, Python 3.11 to 3.14, no GPU, no model hub):
#   make demo                 train a LoRA on the bundled miniature base and look at it   (FAMILY=flux for the other one)
#   make test                 the checks, and every kind of test; of many cases of one test, some (tests/short.toml)
#   make test-all             the checks, and the whole test suite
#   make test ROOM=precision  only the tests of one room (tests/rooms.toml), most of them in seconds
#   make fuzz                 70,000 broken and hostile settings, LoRA files, images, imports and remote answers (half an hour)
#   make torture              every crash point and every power loss of tests/crash, and thousands of kills (two hours)
#   make container            the steps of the Dockerfile in a clean Debian root (root and debootstrap; ten minutes)
#   make mutants              planted one-line bugs, each of which a test must notice (a quarter of an hour)
#   make docs                 the documentation as a site with search, in both languages: build/site/index.html
# All create .venv when it is missing and install what pyproject.toml and constraints.txt name.

PYTHON ?= python3
FAMILY ?= sd15
BIN := .venv/bin

.PHONY: demo test test-all torture fuzz container mutants docs check format clean

demo: .venv/installed
	$(BIN)/lora-fp8 demo --family $(FAMILY)

ifdef ROOM
test: .venv/installed
	$(BIN)/python -m pytest --room $(ROOM)
else
test: check
	@scripts/install_browser.sh
	@scripts/install_servers.sh
	@echo "== tests (two at a time; about 16 minutes)"
	$(BIN)/python -m pytest --short -n 2 --dist loadfile --no-loadscope-reorder
endif

test-all: check
	@scripts/install_browser.sh
	@scripts/install_servers.sh
	@echo "== all tests (two at a time; 35 to 50 minutes)"
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

fuzz: .venv/installed
	@echo "== fuzz: 20,000 settings, 20,000 LoRA files, 5,000 images, 5,000 imports, 20,000 answers of other machines; what fails is kept in fuzz-failures/"
	FUZZ=1 $(BIN)/python -m pytest -n 2 --timeout 14400 tests/fuzz

torture: .venv/installed fuzz
	@echo "== torture: a fault at every file-changing call, 2,000 disks after a power loss of each kind, 2,000 kills"
	TORTURE=1 KILLS=2000 $(BIN)/python -m pytest -n 2 --timeout 14400 tests/crash tests/test_captions_crash.py

container:
	$(PYTHON) scripts/try_container.py build/container

mutants: .venv/installed
	$(BIN)/python scripts/mutants.py

docs: .venv/installed
	$(BIN)/python scripts/build_docs.py
	@echo "read it with: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000"

check: .venv/installed
	@echo "== ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "== mypy (about a minute; seconds when it has run before)"
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || { echo "Python 3.11 to 3.14 is needed; choose one with make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "python3-venv is missing; on Debian and Ubuntu: sudo apt-get install python3-venv"; exit 2; }
	@echo "== making .venv and installing lora_fp8 with its dependencies (a few minutes; torch is large)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache lora_fp8.egg-info
