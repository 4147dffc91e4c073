# SPDX-License-Identifier: Apache-2.0
# Everything runs in .venv, which each target makes by itself. `make help` lists the targets.

# The first of these that runs and is new enough; a shim of a version manager may be on the PATH and yet not run.
CANDIDATES = python3.11 python3 python3.12 python3.13
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1 && { echo $$p; break; }; done)
BIN = .venv/bin
FLAGS =
# Where etcd, kube-apiserver and kube-controller-manager are; PATH is searched too.
KUBE_BIN =
PYTEST = $(BIN)/python -m pytest
# Several files of tests at a time: most of them wait for processes that they have started. FLAGS="-n 0" for one.
PARALLEL = -n 4 --dist loadfile --no-loadscope-reorder
# Has how long each test took.
REPORT = --junitxml=build/tests.xml

SRC =

.PHONY: help demo chaos docs release programs screenshots fuzz test test-all test-clusters test-conformance test-fast test-keras test-kubernetes test-network test-ray test-slurm test-ssh test-versions test-oldest test-newest lint format bench bench-torch flames venv venv-dev venv-bench python clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | column -t -s '|' 2>/dev/null || grep '##' Makefile

demo: venv  ## train the digits experiment under every strategy (under 3 minutes); FLAGS=... adds flags
	@$(BIN)/python experiments/digits/run.py --flagfile=experiments/digits/digits.flags $(FLAGS)

chaos: venv  ## train while a random task is killed every 10 s (about 10 minutes); FLAGS=... adds flags
	@$(BIN)/python experiments/chaos/run.py --flagfile=experiments/chaos/chaos.flags $(FLAGS)

test: venv  ## run all tests but the slow ones (14 to 20 minutes of 2 cores); FLAGS=... adds pytest's flags
	$(PYTEST) $(PARALLEL) $(REPORT) $(FLAGS)

test-all: venv  ## the same and the slow ones (over an hour)
	$(PYTEST) $(PARALLEL) $(REPORT) -m "not repeated and not slurm and not real_ssh" $(FLAGS)

test-conformance: venv  ## run each case of training under each strategy that promises it, for changes of the step (longer still)
	$(PYTEST) $(PARALLEL) $(REPORT) -m "" tests/conformance tests/strategies/test_parameter_server.py \
		tests/strategies/test_parameter_server_policies.py tests/strategies/test_server_parts.py $(FLAGS)

# Two environments of their own, .venv-oldest and .venv-newest.
test-versions: $(foreach versions,oldest newest,test-$(versions))  ## run all tests with the oldest and the newest TensorFlow and Keras that setup.py admits

test-oldest test-newest: test-%: python
	@$(PYTHON) .ci/venv.py experiments,test $*
	.venv-$*/bin/python -m pip list --disable-pip-version-check | grep -iE '^(keras|tensorflow|numpy) '
	.venv-$*/bin/python -m pytest $(PARALLEL) $(FLAGS)

test-slurm: venv  ## run the Slurm launcher on a real four-node Slurm on this machine (root, slurm-wlm; 15 minutes)
	$(PYTEST) -n 0 -m slurm $(FLAGS)

test-ssh: venv  ## run jobs on hosts with a real sshd, and cut their links (root only, about 10 minutes)
	$(PYTEST) -n 0 -m real_ssh $(FLAGS)

test-network: venv  ## measure compressed updates over a link of 100 Mb/s between network namespaces (root, iproute2; 10 minutes)
	$(BIN)/python benchmarks/slow_network.py $(FLAGS)

test-ray: venv  ## run jobs on a Ray cluster of three raylets (the extra `ray`; 5 minutes)
	$(PYTEST) -n 0 -m "" tests/launchers/test_real_ray.py $(FLAGS)

# Each target runs on after another has failed. Those whose programs are not here skip their tests, and say why.
CLUSTERS = slurm ssh ray kubernetes

test-clusters: venv  ## run the launchers on all of these clusters, and keep build/clusters.log (root; an hour)
	@mkdir -p build && rm -f build/clusters.log
	@for each in $(CLUSTERS); do \
		{ $(MAKE) --no-print-directory test-$$each FLAGS="$(FLAGS)" || echo "test-$$each: failed"; } 2>&1 | tee -a build/clusters.log; \
	done; ! grep -E '^test-[a-z]+: failed' build/clusters.log

test-fast: venv  ## run the tests that start no process and need no device (seconds)
	$(PYTEST) -m "not processes and not devices and not slow and not repeated and not slurm" $(FLAGS)

test-keras: venv  ## run Keras' own tests under each strategy (half an hour); SRC=checkout of Keras, else the installed one's
	$(BIN)/python experiments/keras_tests/run.py --src=$(SRC) $(FLAGS)

test-kubernetes: venv  ## run the launcher against a real API server and Job controller (minutes); KUBE_BIN=directory of the binaries
	TFDIST_KUBE_BIN=$(KUBE_BIN) $(PYTEST) -n 0 -m "" tests/launchers/test_kubernetes_control_plane.py $(FLAGS)

lint: venv-dev  ## check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: venv-dev  ## format, and mend what can be mended by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: python  ## build the site into site/, strictly (1 minute)
	@$(PYTHON) .ci/venv.py docs
	$(BIN)/python .ci/site_pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'tfdist: site/index.html; its search needs a server: python3 -m http.server -d site'

release: python  ## build a release into dist/ and try it in empty environments (15 minutes); uploads nothing
	@$(PYTHON) .ci/venv.py release
	$(BIN)/python .ci/release.py

fuzz: venv  ## train random models on one device and under each strategy; FLAGS="--seed=N --count=1 --strategy=..."
	@$(BIN)/python tests/fuzz $(FLAGS)

bench: venv-bench  ## measure against stock TensorFlow (hours); FLAGS="--rows=... --sizes=..."
	$(BIN)/python benchmarks/run.py $(FLAGS)

bench-torch: python  ## measure against PyTorch's DistributedDataParallel, and Keras on PyTorch and JAX (half an hour)
	@$(PYTHON) .ci/venv.py bench,bench-torch
	$(BIN)/python benchmarks/run.py --rows=torch,steps_per_execution,backends $(FLAGS)

flames: venv-bench  ## draw where the time of a step goes, per strategy (5 minutes); FLAGS="--sizes=... --only=..."
	$(BIN)/python benchmarks/flames.py $(FLAGS)

programs: venv  ## run tutorials and examples of others, in SRC, under each strategy (hours); FLAGS="--programs=... --kinds=..."
	$(BIN)/python experiments/programs/run.py --src $(SRC) $(FLAGS)

screenshots: venv  ## take the screenshots of docs/watching.md (Chromium; 5 minutes); FLAGS=--logdir=... keeps the logs
	$(BIN)/python benchmarks/screenshots.py $(FLAGS)

venv: python
	@$(PYTHON) .ci/venv.py experiments,test

venv-dev: python
	@$(PYTHON) .ci/venv.py dev

venv-bench: python
	@$(PYTHON) .ci/venv.py bench

python:
	@test -n "$(PYTHON)" || { echo "tfdist needs Python 3.11, 3.12 or 3.13, and found none of: $(CANDIDATES)." \
		"Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }

clean:  ## remove .venv and everything else that was made
	rm -rf .venv .venv-* .venv.lock build dist *.egg-info .pytest_cache .ruff_cache .hypothesis experiments/*/results site .site benchmarks/results/latest.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
