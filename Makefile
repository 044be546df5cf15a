# The entry points. Every target sets up its environment first, .venv from requirements.lock (test-gptq: .venv-gptq), when
# the lock file or the interpreter changed.
PYTHON ?= python3.11
JOBS ?= 2

# Quoted wherever it is used: the project's folder may have a space in its name.
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
export PATH := $(BIN):$(PATH)
export DO_NOT_TRACK := true
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
unexport PYTHONHOME
unexport PYTHONPATH

.PHONY: run test test-gptq check plan study ui setup setup-gptq
.DEFAULT_GOAL := run

run: setup  ## the whole pipeline: only what changed
	@"$(BIN)/python" -m dvc repro </dev/null
	@"$(BIN)/python" -m flows.results

test: setup  ## the test suite, a file at a time on each of JOBS workers
	@"$(BIN)/python" -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder </dev/null

test-gptq: setup-gptq  ## the optimum backend's tests, in .venv-gptq: its packages do not fit beside the others'
	@"$(CURDIR)/.venv-gptq/bin/python" -m pytest tests_gptq </dev/null

check: setup  ## style, types, import rules
	"$(BIN)/ruff" format --check tasks flows tests tests_gptq benchmarks
	"$(BIN)/ruff" check tasks flows tests tests_gptq benchmarks
	"$(BIN)/basedpyright"
	"$(BIN)/lint-imports"

plan: setup  ## what `make run` would do, before it does it; MODEL=Qwen/Qwen3-30B-A3B asks about another model
	@"$(BIN)/python" -m flows.plan $(if $(MODEL),--model '$(MODEL)')

study: setup  ## the same DAG on the larger profile params.study.yaml, in its own folder .study/; at most 3 h
	@"$(BIN)/python" -m flows.study </dev/null

ui: setup  ## MLflow, to compare runs
	@"$(BIN)/python" -m flows.ui

# $(call install,FOLDER,LOCK FILE): a virtual environment of exactly those packages. Its stamp holds what was installed
# (the lock file's checksum) and with what; anything else installs again.
define install
@wanted="$$(cksum < $(2)) $(PYTHON)"; home="$(CURDIR)/$(1)"; stamp="$$home/installed"; \
if [ "$$(cat "$$stamp" 2>/dev/null)" = "$$wanted" ] && [ -x "$$home/bin/python" ]; then exit 0; fi; \
if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' </dev/null 2>/dev/null; then \
  echo "make: error: '$(PYTHON)' is not Python 3.11, which $(2) is made for;" \
       "install it, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; fi; \
case "$$(cat "$$stamp" 2>/dev/null)" in ""|*" $(PYTHON)") ;; *) rm -rf "$$home" ;; esac; \
[ -x "$$home/bin/python" ] || { rm -rf "$$home"; "$(PYTHON)" -m venv "$$home" </dev/null; } || { \
  echo "make: error: '$(PYTHON) -m venv' failed; Debian and Ubuntu ship it as python3.11-venv" >&2; exit 1; }; \
rm -f "$$stamp"; \
echo "Installing $(2) into $(1): a few minutes, once"; \
"$$home/bin/python" -m pip install --quiet --progress-bar off -r $(2) </dev/null || exit 1; \
printf '%s\n' "$$wanted" > "$$stamp"
endef

# DVC refuses to work without git unless told (an unpacked archive).
setup:
	@[ -e .git ] || grep -qs no_scm .dvc/config.local || printf '[core]\n    no_scm = true\n' >> .dvc/config.local
	$(call install,.venv,requirements.lock)

# Building one of its packages takes a C compiler.
setup-gptq:
	$(call install,.venv-gptq,requirements-gptq.lock)
