# make run    build and start Weir on the embedded engine (a quick build, to try it)
# make build  the binary for use: target/release/weir
# make dist   a tarball and a Debian package of it in target/dist, checked
# make page   the sale page alone, for the next build
# make stack  the services of compose.yaml without Docker: Postgres, Redis, Kafka, Weir, nginx, Prometheus
# make test   everything CI checks: format, prose, lints, every test (installs what the tests need)
# make bench  benchmarks next to baselines; writes bench/results and docs/performance.md
# make upgrade  an upgrade and a rollback under load, from the last release to this version
# make soak   request at 150/s for an hour and 500/s for a quarter, on both engines; SCALE=0.02 shortens it
# make help   this list

SHELL := /bin/bash
.DEFAULT_GOAL := help
# Only for the messages of `make run`: the server reads its settings itself.
LISTEN := $(or $(WEIR_LISTEN),$(shell sed -n 's/^listen *= *"\(.*\)".*/\1/p' weir.toml 2>/dev/null),127.0.0.1:8080)
PAGE_SOURCES := $(wildcard web/*.html web/*.json web/*.ts) $(shell find web/src web/tools -type f)
HAS_NODE := command -v npm >/dev/null 2>&1 && \
  node -e 'const [a, b] = process.versions.node.split(".").map(Number); process.exit(a > 20 || (a === 20 && b >= 19) ? 0 : 1)'

# TLS and SASL to Kafka need OpenSSL's headers. A binary that is built without them says so when they are asked for.
KAFKA_TLS = $(shell pkg-config --exists openssl 2>/dev/null || echo --no-default-features)

.PHONY: help run page build dist stack test upgrade fmt prose lint compile unit web schemathesis kubernetes
.PHONY: client-typescript client-python chromium openssl bench soak deps

help:
	@sed -n 's/^# //p' Makefile

# Of the C libraries, SQLite is optimised as the profile says, and librdkafka no more than that.
run stack: export CFLAGS := $(or $(CFLAGS),-O1 -g0)
run: page
	@test -x target/quick/weir || echo 'Building Weir. The first time this takes about three minutes on two cores; cargo shows how far it is.'
	cargo build --profile quick --locked -p weir $(KAFKA_TLS)
	@printf '\nStarting Weir on http://%s (stop with Ctrl-C). In another terminal, try:\n\n' '$(LISTEN)'
	@printf "  curl -s -H 'content-type: application/json' http://%s/api/config -d '{\"userId\":\"alice\",\"rateLimit\":2,\"timeWindow\":1}'\n" '$(LISTEN)'
	@printf "  curl -s -H 'content-type: application/json' http://%s/api/send   -d '{\"userId\":\"alice\",\"message\":\"hello\"}'\n" '$(LISTEN)'
	@printf '  or open http://%s/sale/\n\n' '$(LISTEN)'
	@exec ./target/quick/weir serve

# The sale page, which the build embeds in the binary; without Node the binary serves a hint on how to build it. Rebuilt only
# when its sources change, since a new page means a new binary.
page: web/dist/index.html

web/dist/index.html: $(PAGE_SOURCES)
	@if $(HAS_NODE); then cd web && npm ci --no-audit --no-fund --loglevel=error && npm run --silent build; \
	 else echo 'Node 20.19 or later is not installed: the binary is built without the sale page'; fi

build:
	cargo build --release --locked -p weir $(KAFKA_TLS)

# PROFILE=quick tries the packaging without the optimised build. Installs cargo-deb, once.
dist: page
	.ci/dist $(or $(PROFILE),release)

# Installs the servers that it needs, as the tests do. Stops them all at Ctrl-C.
stack: page
	cargo build --profile quick --locked -p weir $(KAFKA_TLS)
	cargo build --profile quick --locked -p weir-testkit --bin weir-stack
	@exec ./target/quick/weir-stack target/quick/weir

# The page comes first, since the tested server embeds it.
test: fmt prose page deps compile chromium
	.ci/tests web schemathesis kubernetes client-typescript client-python

fmt:
	@rustup component add rustfmt clippy >/dev/null 2>&1 || true
	cargo fmt --all --check

# Checks the width of Markdown lines, spelling, and replaced names.
prose:
	.ci/prose

lint: deps openssl
	cargo clippy --workspace --all-targets --locked -- -D warnings

# Compiles with clippy's driver, which is the compiler with its lints. A separate `cargo clippy` would compile all dependencies a
# second time.
test compile unit: export RUSTC_WORKSPACE_WRAPPER := clippy-driver
test compile unit: export CLIPPY_ARGS := -Dwarnings__CLIPPY_HACKERY__
compile: openssl
	cargo test --workspace --all-targets --locked --no-run

# All tests but those of the page.
unit: compile
	.ci/tests

# The sale page in Chromium, on the server that `compile` has built and on a mock with faults on demand.
web: page
	@if $(HAS_NODE); then $(MAKE) --no-print-directory chromium && cd web && \
	 { test -d node_modules || npm ci --no-audit --no-fund --loglevel=error; } && npm run --silent test:ci; \
	 else echo 'Node 20.19 or later is not installed: the sale page is not tested'; fi

# Generated calls to all operations of /openapi.json; responses must match the document.
schemathesis:
	.ci/schemathesis/run

# The overlays in deploy/kubernetes, against the schemas of Kubernetes and what Weir needs there. Builds kustomize, once, with Go.
kubernetes:
	.ci/kubernetes/run

# The clients, on the server that `compile` has built.
client-typescript:
	.ci/clients typescript

client-python:
	.ci/clients python

# The headless shell takes half the time. If it cannot be installed, the whole Chromium is used.
chromium:
	@if test -n "$${CHROMIUM:-}" || test -x /usr/bin/chromium-headless-shell; then exit; fi; \
	 install() { apt-get install -y -qq "$$1" >/dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq "$$1" >/dev/null; }; }; \
	 install chromium-headless-shell || test -x /usr/bin/chromium || install chromium

# OpenSSL's headers, for TLS and SASL to Kafka: the tests are about those, too.
openssl:
	@if pkg-config --exists openssl 2>/dev/null; then exit; fi; \
	 install() { apt-get install -y -qq libssl-dev pkg-config >/dev/null; }; \
	 install 2>/dev/null || { apt-get update -qq && install; }

# Checks of dependencies, if their tools are installed: building those takes longer than all of Weir.
deps:
	@if cargo deny --version >/dev/null 2>&1; then cargo deny --locked check bans licenses sources; \
	 else echo 'cargo-deny is not installed: licences and sources of dependencies are not checked'; fi
	@if cargo machete --version >/dev/null 2>&1; then cargo machete; \
	 else echo 'cargo-machete is not installed: unused dependencies are not checked'; fi

# Builds the last release (`.ci/upgrade-from`, or FROM=<revision>) in target/upgrade, once, which takes as long as any first build.
# The test itself takes half a minute.
upgrade: openssl
	.ci/upgrade $(FROM)

bench: openssl
	cargo bench --locked -p weir --bench suite -- --record
	cargo bench --locked -p weir-limiter --bench decide

# Fails if a latency is too long, something was lost, or memory or tables grow.
soak: openssl
	cargo bench --locked -p weir --bench suite -- --only soak --strict --scale $(or $(SCALE),1)
