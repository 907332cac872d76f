# Everything a developer runs. `make` alone lists it.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
READY := .venv/.ready
PLAIN := .venv/.plain
DOCS_BIN := .venv-docs/bin
DOCS_READY := .venv-docs/.ready

# The data sets that lie beside a checkout are used unless the environment names others.
ifndef SHOAL_DATA
ifneq ($(wildcard ../shared/data/.),)
export SHOAL_DATA := $(abspath ../shared/data)
endif
endif

.DEFAULT_GOAL := help
.PHONY: help demo compare quick test blocks soak frameworks check format docs dist proto bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# The demo needs the package alone; an environment with everything in it serves as well.
demo: $(if $(wildcard $(READY)),$(READY),$(PLAIN)) ## what Shoal is good for, in three minutes; writes demo.html
	$(BIN)/shoal demo --report demo.html --json demo.json

compare: $(READY) ## compare seven strategies, four workers on this machine; writes compare.html and compare.json
	$(BIN)/shoal compare --task digits --strategies single,sync,local,bmuf,diloco,downpour,easgd -n 4 \
	    --epochs 5 --seed 0 --strategy.period 4 --transport processes --json compare.json --report compare.html

# Tests share out the cores. Soaks whose bounds in seconds only hold where nothing else runs have a run of their own,
# which reads only the files that have some: ten seconds less.
# Python keeps what it compiles, whatever the environment says: pytest rewrites every assert, ten seconds a process.
test quick blocks soak frameworks: export PYTHONDONTWRITEBYTECODE :=
ALONE = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)
BLOCKS = $(shell grep -rl --include='test_*.py' 'mark\.blocks' tests)
test: $(READY) ## run the tests; ARGS='-k easgd' picks some
	$(BIN)/python -m pytest -n auto --dist loadscope --no-loadscope-reorder $(ARGS) || test $$? -eq 5

blocks: $(READY) ## run the code blocks of the documentation
	$(BIN)/python -m pytest -n auto -m "blocks and not soak" $(or $(ARGS),$(BLOCKS)) || test $$? -eq 5

quick: $(READY) ## run the quick tests of the heart, for every save
	$(BIN)/python -m pytest -q -n auto -m "not slow and not alone and not soak" tests/core tests/engine

soak: $(READY) ## run the long tests that look for what is rare
	$(BIN)/python -m pytest -n auto --dist loadscope -m "soak and not alone" --timeout 3600 $(ARGS) || test $$? -eq 5
	$(BIN)/python -m pytest -m "soak and alone" --timeout 3600 $(or $(ARGS),$(ALONE)) || test $$? -eq 5

# An environment of its own: what Lightning and the others need must not decide what the rest is tested with.
FRAMEWORKS := .venv-frameworks
frameworks: $(FRAMEWORKS)/.ready ## test Shoal with Lightning, transformers, Accelerate, Keras, Ray and the loggers
	$(FRAMEWORKS)/bin/python -m pytest -n 2 --dist loadfile -m "not alone and not soak" $(or $(ARGS),tests/frameworks tests/loggers) || test $$? -eq 5
	$(FRAMEWORKS)/bin/python -m pytest -m "alone and not soak" $(or $(ARGS),tests/frameworks) || test $$? -eq 5

$(FRAMEWORKS)/.ready: pyproject.toml constraints-frameworks.txt
	test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install -q -c constraints-frameworks.txt setuptools
	$(FRAMEWORKS)/bin/python -m pip install -q -c constraints-frameworks.txt --no-build-isolation \
	    -e '.[lightning,huggingface,accelerate,ray,tensorboard,wandb,mlflow,digits,grpc]' \
	    keras pytest pytest-timeout pytest-xdist
	touch $@

check: $(READY) ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY) ## rewrite the files as `make check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, its checks and the packages have an environment of their own, without torch: the reference is made
# from the sources, which nothing imports.
docs: $(DOCS_READY) ## build the site, build/site/index.html; a dead link or an unknown name is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict --quiet
	$(DOCS_BIN)/cffconvert --validate -i CITATION.cff

dist: $(DOCS_READY) ## build the wheel and the source distribution into dist/
	rm -rf dist
	$(DOCS_BIN)/python -m build --no-isolation

# Code from protoc 25 (grpcio-tools 1.62) runs on protobuf 4.25 and on every later runtime. Code from protoc 27 or
# later asks the runtime for its own version, and would force it on users. Hence an environment of its own.
# 1.62.3 has wheels for Python 3.7 to 3.12: on a later Python name an older one, `make proto PYTHON=python3.11`.
PROTOC := build/protoc/bin/python
proto: ## generate control_pb2.py from control.proto
	test -x $(PROTOC) || $(PYTHON) -m venv build/protoc
	$(PROTOC) -m pip install -q grpcio-tools==1.62.3 'setuptools<80'
	$(PROTOC) -m grpc_tools.protoc -I src --python_out=src --pyi_out=src src/shoal/transports/grpc/control.proto

# slow_link.py needs root and half an hour, scaled_rates.py half an hour, crews.py ten minutes, against.py another commit;
# machine_load.py is imported by others; groups.py runs groups_worker.py; gpu.py needs a GPU; two_hosts.py needs root, sshd and a while.
NOT_RUN := slow_link.py slow_link_worker.py scaled_rates.py crews.py machine_load.py two_hosts.py two_hosts_worker.py regressions.py against.py groups_worker.py gpu.py gpu_worker.py
BENCHES := $(filter-out $(NOT_RUN:%=benchmarks/%), $(sort $(wildcard benchmarks/*.py)))

bench: $(READY) ## check the stored figures, then run the benchmarks; they print ratios taken in one run
	$(BIN)/python benchmarks/regressions.py --check
	@set -e; for bench in $(BENCHES); do \
	    echo "== $$bench"; $(BIN)/python "$$bench" $(ARGS); done

clean: ## remove what the other targets made, except the environments
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f demo.html demo.json compare.html compare.json
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The builder is installed beside the rest, pinned like it, and used from there: a build in isolation would
# fetch a builder of its own each time, whatever the pins say, and could not be repeated offline.
$(READY): EXTRAS := [dev]
$(READY) $(PLAIN): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt setuptools
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.$(EXTRAS)'
	touch $@

$(DOCS_READY): constraints-docs.txt
	test -x $(DOCS_BIN)/python || $(PYTHON) -m venv .venv-docs
	$(DOCS_BIN)/python -m pip install -q -r constraints-docs.txt
	touch $@
