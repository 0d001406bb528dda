# What a person and CI run. Each target does all it needs by itself on Debian 12 with Rust and root.

CARGO ?= cargo

.PHONY: help deps build demo test fmt lint check bench bench-core crash clean

help: ## Say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

deps: ## Install the programs that own an on-disk format (mkfs.xfs and the like); does nothing when they are there
	@hack/deps.sh

build: ## Build target/release/deltapath
	$(CARGO) build --release --locked

demo: deps build ## Play a full and an incremental backup on a real loop device
	target/release/deltapath demo

fmt: ## Format the code
	$(CARGO) fmt

lint: ## Formatting and clippy, warnings are errors
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets -- -D warnings

check: lint

test: deps lint ## Everything that must hold: lint, unit and integration tests, and nothing left behind
	hack/no-leaks.sh $(CARGO) test --locked

bench: deps ## What things cost, each beside the bare operation in the same run, in one table
	$(CARGO) bench --locked --bench table

bench-core: deps ## Criterion benches of the core: hash, map, delta, tuples
	$(CARGO) bench --locked --bench core

crash: deps ## The crash test with 1000 kills a pool instead of 90
	DELTAPATH_CRASH_ROUNDS=1000 hack/no-leaks.sh $(CARGO) test --locked --test suite -- crash --nocapture

clean: ## Remove what was built
	$(CARGO) clean
