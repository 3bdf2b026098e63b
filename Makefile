# make run    build and start Weir on the embedded engine (a quick build, to try it)
# make build  the binary for use: target/release/weir
# make page   the sale page alone, for the next build
# make test   everything CI checks: format, prose, lints, every test (installs what the tests need)
# make bench  the speed of this machine, side by side with baselines (written to bench/results and docs/performance.md)
# make help   this list

SHELL := /bin/bash
.DEFAULT_GOAL := help
# Only to be shown: the server reads it by itself, from the same places.
LISTEN := $(or $(WEIR_LISTEN),$(shell sed -n 's/^listen *= *"\(.*\)".*/\1/p' weir.toml 2>/dev/null),127.0.0.1:8080)
PAGE_SOURCES := $(wildcard web/*.html web/*.json web/*.ts) $(shell find web/src web/tools -type f)
HAS_NODE := command -v npm >/dev/null 2>&1 && \
  node -e 'const [a, b] = process.versions.node.split(".").map(Number); process.exit(a > 20 || (a === 20 && b >= 19) ? 0 : 1)'

.PHONY: help run page build test fmt prose lint compile unit web schemathesis chromium bench deps

help:
	@sed -n 's/^# //p' Makefile

run: page
	@test -x target/quick/weir || echo 'Building Weir. The first time this takes about four minutes; cargo shows how far it is.'
	cargo build --profile quick --locked -p weir
	@printf '\nStarting Weir on http://%s (stop with Ctrl-C). In another terminal, try:\n\n' '$(LISTEN)'
	@printf "  curl -s -H 'content-type: application/json' http://%s/api/config -d '{\"userId\":\"alice\",\"rateLimit\":2,\"timeWindow\":1}'\n" '$(LISTEN)'
	@printf "  curl -s -H 'content-type: application/json' http://%s/api/send   -d '{\"userId\":\"alice\",\"message\":\"hello\"}'\n" '$(LISTEN)'
	@printf '  or open http://%s/sale/\n\n' '$(LISTEN)'
	@exec ./target/quick/weir serve

# The sale page, which the build puts into the binary; without Node the binary says how to get it. Built anew only when it
# changed: a new page means a new binary.
page: web/dist/index.html

web/dist/index.html: $(PAGE_SOURCES)
	@if $(HAS_NODE); then cd web && npm ci --no-audit --no-fund --loglevel=error && npm run --silent build; \
	 else echo 'Node 20.19 or later is not installed: the binary goes without the sale page, and says how to get it'; fi

build:
	cargo build --release --locked -p weir

# The page first: the server that is tested has it. Then everything is compiled, and every test run.
test: fmt prose page deps compile chromium
	.ci/tests web schemathesis

fmt:
	@rustup component add rustfmt clippy >/dev/null 2>&1 || true
	cargo fmt --all --check

# Markdown of at most 120 columns, spelling, and words that were replaced.
prose:
	.ci/prose

lint: deps
	cargo clippy --workspace --all-targets --locked -- -D warnings

# What is tested is linted as it is compiled: clippy's driver is the compiler with its lints, and `cargo clippy` beside the tests would
# take every dependency through the compiler a second time.
test compile unit: export RUSTC_WORKSPACE_WRAPPER := clippy-driver
test compile unit: export CLIPPY_ARGS := -Dwarnings__CLIPPY_HACKERY__
compile:
	cargo test --workspace --all-targets --locked --no-run

# Every test but those of the page.
unit: compile
	.ci/tests

# The sale page in a real browser: on the server that `compile` has built, and on a mock that fails when told to.
web: page
	@if $(HAS_NODE); then $(MAKE) --no-print-directory chromium && cd web && \
	 { test -d node_modules || npm ci --no-audit --no-fund --loglevel=error; } && npm run --silent test:ci; \
	 else echo 'Node 20.19 or later is not installed: the sale page is not tested'; fi

# Every operation of /openapi.json, on the server that `compile` has built: made-up calls, and answers as the document says.
schemathesis:
	.ci/schemathesis/run

# Without a window a page costs half as much. Where that Chromium is not to be had, the whole one will do.
chromium:
	@if test -n "$${CHROMIUM:-}" || test -x /usr/bin/chromium-headless-shell; then exit; fi; \
	 install() { apt-get install -y -qq "$$1" >/dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq "$$1" >/dev/null; }; }; \
	 install chromium-headless-shell || test -x /usr/bin/chromium || install chromium

# Checks of the dependency tree, where their tools are installed: they take longer to build than all of Weir.
deps:
	@if cargo deny --version >/dev/null 2>&1; then cargo deny --locked check bans licenses sources; \
	 else echo 'cargo-deny is not installed: licences and sources of dependencies are not checked'; fi
	@if cargo machete --version >/dev/null 2>&1; then cargo machete; \
	 else echo 'cargo-machete is not installed: unused dependencies are not checked'; fi

bench:
	cargo bench --locked -p weir --bench suite -- --record
	cargo bench --locked -p weir-limiter --bench decide
