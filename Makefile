# What a person and CI run. Each target does all it needs by itself on Debian 12 with Rust and root.

CARGO ?= cargo

# Rounds of `make crash`, of each kind, over all pools.
ROUNDS ?= 2000

# Runs containers and builds images: docker or podman.
ENGINE ?= docker

# How long and where `make soak` runs, and how long `make fuzz` searches each target.
MINUTES ?= 30
POOL ?= btrfs
SECONDS ?= 60

# Schedules of each kind that `make interleavings` plays of each protocol.
SCHEDULES ?= 100000

# Power cuts of `make power-cuts`.
CUTS ?= 200
KILLS ?= 300

# Where images are: make dist names them IMAGE_REGISTRY/NAME:VERSION, in the chart too. And where the release is.
export IMAGE_REGISTRY ?=
export HOMEPAGE ?=

# Copies that each test of `make order` takes.
COPIES ?= 300

# Drivers that `make bench-peers` measures, and how often.
export PEERS ?=
export RUNS ?= 3

# Lives of `make backup-lives`.
LIVES ?= 50

# Power cuts of `make backup-power` on each filesystem.
BACKUP_CUTS ?= 100

VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)

# What programs and images say about themselves. The commit and its date are the same wherever they are built.
COMMIT = $(shell git log -1 --abbrev=12 --format='%h %cs' 2>/dev/null)
RELEASE = --build-arg VERSION=$(VERSION) --build-arg REVISION=$(shell git rev-parse HEAD 2>/dev/null || echo unknown) \
	--build-arg COMMIT="$(COMMIT)"

# What is built once only needs no state for the next build: it is 6 GB and takes time to write.
ifeq ($(CI),true)
export CARGO_INCREMENTAL ?= 0
endif

.PHONY: help deps build demo test unit fmt lint check test-all test-times bench bench-peers charts bench-core crash power-cuts transfer-kills soak order full-pools backup-lives backup-power conformance-many interleavings simulation deny fuzz seeds image lab-image gateway-image router-image earlier-image cbt-backup-image backup-example-image dist dist-push image-rootfs test-deps cluster-deps cluster-smoke cluster-test clients-test cluster-e2e book clean

help: ## Say what there is
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

deps: ## Install the programs that own an on-disk format (mkfs.xfs and the like); does nothing when they are there
	@hack/deps.sh

build: export DELTAPATH_COMMIT = $(COMMIT)
build: ## Build the programs: deltapath, deltapath-gateway, deltapath-router, cbt-backup, cbt-earlier and cbt-lab in target/release
	$(CARGO) build --release --locked --package deltapath --package deltapath-gateway --package deltapath-router --package cbt-backup --package deltapath-earlier --package cbt-lab

demo: deps ## Play a full and an incremental backup on a real loop device
	$(CARGO) build --release --locked --package deltapath
	target/release/deltapath demo

fmt: ## Format the code
	$(CARGO) fmt --all

# One run sees everything but two pieces that release builds have: a function without failpoints, and the imports of std's locks.
lint: ## Formatting, clippy, and the sentences of the pages; warnings are errors
	@hack/plain-english.sh
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets --features failpoints,deltapath/interleavings -- -D warnings

check: lint

test: deps ## Lint, unit and integration tests on all pools, and nothing left behind: all that needs no Go and no image
	@hack/test-deps.sh --debian
	@$(MAKE) --no-print-directory lint
	@echo "make test: what takes longest, or needs programs built by Go or the container image, is left to make test-all"
	CARGO="$(CARGO)" hack/no-leaks.sh hack/run-tests.sh --short

PARTS = deps test-deps lint book image-rootfs
test-all: ## Everything that must hold, also with csi-sanity, a Kubernetes API server, an S3 server and the image (needs Go)
	@rm -f target/parts
	@for part in $(PARTS); do hack/part.sh $$part $(MAKE) --no-print-directory $$part || exit 1; done
	hack/no-leaks.sh hack/cluster.sh smoke --if-built
	CARGO="$(CARGO)" hack/no-leaks.sh hack/run-tests.sh

test-times: test-all ## The 30 slowest tests, and what each of them took to hack/test-times, by which the next run orders them
	@awk '$$1 >= 5' target/test-times >hack/test-times
	@head -n 30 target/test-times

unit: ## Unit tests alone: no root, no devices, under two minutes on two cores
	$(CARGO) test --locked --workspace --lib --bins

# What is shipped and measured is optimised across crates; what a person builds is there in less than half the time.
bench bench-core bench-peers soak: export CARGO_PROFILE_RELEASE_LTO = thin
bench bench-core bench-peers soak: export CARGO_PROFILE_RELEASE_OPT_LEVEL = 3
bench bench-core bench-peers soak: export CARGO_PROFILE_RELEASE_CODEGEN_UNITS = 4

bench: deps ## What things cost, each with the bare operation in the same run: tables, and all rows in target/bench.json
	@hack/test-deps.sh --bench
	rm -f target/bench.json
	$(CARGO) bench --locked --bench table
	$(CARGO) bench --locked --package deltapath-gateway --bench gateway
	$(CARGO) bench --locked --package cbt-backup --bench backup
	$(CARGO) bench --locked --package deltapath-earlier --bench designs
	$(CARGO) bench --locked --package deltapath-router --bench router

bench-peers: deps ## cbt-lab bench on deltapath and on each driver of PEERS="NAME=SOCKET[,DIR] ...", one after the other: one table
	$(CARGO) build --release --locked --package deltapath --package cbt-lab
	hack/no-leaks.sh hack/bench-peers.sh

charts: ## Draw docs/charts from docs/benchmarks.json
	DELTAPATH_CHARTS=1 $(CARGO) test --locked --package deltapath-testkit --lib -- charts

bench-core: deps ## Criterion benches of the core: hash, map, delta, tuples
	$(CARGO) bench --locked --bench core

crash: deps ## ROUNDS=2000 kills at random moments, as many before chosen steps, and an error in every step
	CARGO="$(CARGO)" hack/crash.sh $(ROUNDS)

soak: deps ## Everything at once, every byte checked, for MINUTES=30 on POOL=btrfs (or xfs, dir)
	@CARGO=$(CARGO) MINUTES=$(MINUTES) POOL=$(POOL) hack/soak.sh

full-pools: deps ## Fill pools of 6 and 16 GiB in every way, then delete everything in random order (takes 16 GiB of disk)
	hack/no-leaks.sh $(CARGO) test --locked --features failpoints --test suite -- many_gigabytes --include-ignored --nocapture --test-threads 1

order: deps ## Copies of devices under write keep the order of writes: COPIES=300 in each of 23 ways
	DELTAPATH_ORDER_COPIES=$(COPIES) hack/no-leaks.sh $(CARGO) test --locked --features failpoints --test suite -- order:: --include-ignored --nocapture --test-threads 1

backup-lives: ## Random lives of a repository, LIVES=50, a fourth of them in a bucket: several commands at once, killed at any moment
	DELTAPATH_BACKUP_LIVES=$(LIVES) hack/no-leaks.sh $(CARGO) test --locked --package cbt-backup --test suite -- history:: --nocapture --test-threads=4

backup-power: ## Cut the power of a machine with a repository on it and audit what is found, BACKUP_CUTS=100 times on each filesystem
	DELTAPATH_BACKUP_CUTS=$(BACKUP_CUTS) hack/no-leaks.sh $(CARGO) test --locked --package cbt-backup --test suite -- power:: --nocapture

conformance-many: deps ## cbt-lab conformance with a million changes between two snapshots, on all pools and in both styles
	hack/no-leaks.sh $(CARGO) test --locked --features failpoints --test suite -- million_ranges --include-ignored --nocapture --test-threads 1

interleavings: ## Locks, queue and stream memory under a model checker, SCHEDULES=100000 of each kind, and a hundredth as many lives of a driver
	DELTAPATH_SCHEDULES=$(SCHEDULES) $(CARGO) test --locked --lib --features interleavings -- interleavings:: --nocapture

deny: ## Licences, sources and known faults of the dependencies (needs cargo-deny, and a network for the list of faults)
	$(CARGO) deny --locked check

simulation: LIVES = 10000
simulation: ## LIVES=10000 simulated lives of routers and nodes: cuts, losses, kills, old disks; each seed replays exactly
	DELTAPATH_LIVES=$(LIVES) $(CARGO) test --locked --package deltapath-router --bin deltapath-router -- simulation:: --nocapture

fuzz: ## Search the fuzz targets with libFuzzer, SECONDS=60 each, or one: TARGET=maps (needs nightly Rust)
	@hack/fuzz.sh $(SECONDS) $(TARGET)

seeds: deps ## Write the seeds of the fuzz corpora anew, from files of the driver and of a repository
	DELTAPATH_SEEDS=1 $(CARGO) test --locked --features failpoints --test suite -- seeds
	DELTAPATH_SEEDS=1 $(CARGO) test --locked --package cbt-backup --lib -- seeds

power-cuts: deps ## Cut the power of machines under a working driver, CUTS=200 times, and audit each boot
	DELTAPATH_POWER_CUTS=$(CUTS) hack/no-leaks.sh $(CARGO) test --locked --features failpoints --test suite -- power --nocapture

transfer-kills: deps ## Kill both ends of transfers between nodes, KILLS=300 times and before each step, and nodes in the middle of each call
	DELTAPATH_TRANSFER_KILLS=$(KILLS) hack/no-leaks.sh $(CARGO) test --locked --package deltapath-router --features failpoints --test suite -- transfer_kills transfer_points every_call --nocapture

image: ## Build the container image deltapath:VERSION (ENGINE=docker or podman)
	$(ENGINE) build $(RELEASE) \
		--tag deltapath:$(VERSION) .

lab-image: ## Build the image of the conformance suite, cbt-lab:VERSION
	$(ENGINE) build --target lab $(RELEASE) \
		--tag cbt-lab:$(VERSION) .

gateway-image: ## Build the image of the gateway, deltapath-gateway:VERSION
	$(ENGINE) build --target gateway $(RELEASE) \
		--tag deltapath-gateway:$(VERSION) .

router-image: ## Build the image of the router, deltapath-router:VERSION
	$(ENGINE) build --target router $(RELEASE) \
		--tag deltapath-router:$(VERSION) .

earlier-image: ## Build the image of the earlier designs, cbt-earlier:VERSION
	$(ENGINE) build --target earlier $(RELEASE) \
		--tag cbt-earlier:$(VERSION) .

cbt-backup-image: ## Build the image of the backup tool, cbt-backup:VERSION
	$(ENGINE) build --target backup $(RELEASE) \
		--tag cbt-backup:$(VERSION) .

backup-example-image: ## Build the image of the example backup program, backup-example:VERSION
	$(ENGINE) build --tag backup-example:$(VERSION) deploy/backup-example

test-deps: ## Install and build what only the tests need: shellcheck, the checker of the manifests, a sidecar
	@hack/test-deps.sh

cluster-deps: ## Build once what a real Kubernetes cluster needs, into ~/.cache/deltapath (half an hour the first time)
	@hack/cluster-deps.sh

cluster-smoke: cluster-deps ## A real cluster: install, claims, two snapshots, the listed delta
	hack/no-leaks.sh hack/cluster.sh smoke

cluster-test: cluster-deps ## Every manifest, example and page in real clusters, and nothing left behind
	hack/no-leaks.sh hack/cluster-test.sh

cluster-e2e: ## Kubernetes' own storage tests in a real cluster (builds them first: some more minutes, once)
	hack/no-leaks.sh hack/cluster-e2e.sh

clients-test: test-deps cluster-deps ## What others wrote: csi-sanity, the community's clients and Kubernetes' storage tests, on one node and on two (an hour)
	CARGO="$(CARGO)" hack/no-leaks.sh hack/run-tests.sh sanity
	hack/no-leaks.sh hack/cluster-test.sh clients
	hack/no-leaks.sh hack/cluster-e2e.sh
	hack/no-leaks.sh hack/cluster-e2e.sh --distributed
	@[ -n "$(VELERO_IMAGE)" ] || echo "make clients-test: without VELERO_IMAGE, Velero is left out; docs/clients.md says how it is run"
	[ -z "$(VELERO_IMAGE)" ] || hack/no-leaks.sh hack/cluster-test.sh velero

dist: ## All that a release is, in dist: programs, images as one OCI layout, chart, SBOM, checksums (IMAGE_REGISTRY=example.org/team)
	@hack/dist.sh

dist-push: ## Push the images of make dist to IMAGE_REGISTRY
	@hack/dist.sh push

image-rootfs: ## Build the image without an engine and unpack it into .deps, for the tests
	@hack/image-rootfs.sh

book: ## All pages as one book with search: target/book/index.html
	@CARGO="$(CARGO)" hack/book.sh

clean: ## Remove what was built
	$(CARGO) clean
