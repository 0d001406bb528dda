#!/usr/bin/env bash
# Installs and builds what tests need beyond hack/deps.sh, and nothing that is there.
#
#   test-deps.sh            all of it: Go builds half a dozen programs, ten minutes on two cores the first time
#   test-deps.sh --debian   Debian's packages alone, for `make test`
#   test-deps.sh --bench    all of it, and what `make bench` puts beside cbt-backup
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

peers=
[ "${1-}" = --bench ] && peers="borg:borgbackup=1.2.* restic:restic=0.14.*"

# What is missing of: a program, and the Debian package that has it.
missing=()
# shellcheck disable=SC2086 # several words
for pair in shellcheck:shellcheck=0.9.* nbdcopy:libnbd-bin qemu-img:qemu-utils ip:iproute2 git:git openssl:openssl $peers; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
done
# Clients of HTTPS do not start without it.
[ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" -eq 0 ]; then
        echo "test-deps: installing ${missing[*]}"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    else
        echo "test-deps: missing ${missing[*]}: what needs them fails" >&2
    fi
fi
[ "${1-}" != --debian ] || exit 0
if ! command -v go >/dev/null; then
    echo "test-deps: go is missing: install Go 1.26 or later" >&2
    exit 1
fi

[ -e .deps/manifests/state ] || echo "test-deps: building the programs in Go: ten minutes on two cores the first time, less with Go's cache"

# Whether what a directory of .deps was built from is still the same.
fresh() { [ "$(cat ".deps/$1/state" 2>/dev/null)" = "$2" ]; }
hash_of() { sha256sum "$@" | sha256sum | cut -d ' ' -f 1; }

# csi-sanity, the CSI community's test of a driver.
version=v5.6.0
if ! [ -x ".deps/csi-sanity-$version/csi-sanity" ]; then
    echo "test-deps: building csi-sanity $version"
    GOBIN="$root/.deps/csi-sanity-$version" go install "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity@$version"
fi

# actionlint, which checks the workflows of .github and deploy/ci.
version=v1.7.12
if ! [ -x ".deps/actionlint-$version/actionlint" ]; then
    echo "test-deps: building actionlint $version"
    GOBIN="$root/.deps/actionlint-$version" go install "github.com/rhysd/actionlint/cmd/actionlint@$version"
fi

# hack/manifests, which checks deploy/ the way an API server would, with the CRDs of the releases in its go.mod.
state=$(hash_of hack/manifests/*.go hack/manifests/go.mod hack/manifests/go.sum)
if ! fresh manifests "$state"; then
    echo "test-deps: building the checker of the manifests"
    rm -rf .deps/manifests
    mkdir -p .deps/manifests/crds
    (cd hack/manifests && go vet . && go build -o "$root/.deps/manifests/manifests" .)
    for module in external-snapshotter/client/v8 external-snapshot-metadata/client; do
        source=$(cd hack/manifests && go list -m -f '{{.Dir}}' "github.com/kubernetes-csi/$module")
        cp "$source"/config/crd/*.io_*.yaml .deps/manifests/crds/
    done
    chmod -R u+w .deps/manifests/crds
    echo "$state" >.deps/manifests/state
fi

# hack/alerts, which plays the alerts of the chart.
state=$(hash_of hack/alerts/main.go hack/alerts/go.mod hack/alerts/go.sum)
if ! fresh alerts "$state"; then
    echo "test-deps: building the player of the alerts"
    mkdir -p .deps/alerts
    (cd hack/alerts && go vet . && go build -o "$root/.deps/alerts/alerts" .)
    echo "$state" >.deps/alerts/state
fi

# The example backup program, and the community's sidecar that it talks to.
state=$(hash_of deploy/backup-example/main.go deploy/backup-example/go.mod deploy/backup-example/go.sum hack/sidecar/go.mod hack/sidecar/go.sum)
if ! fresh backup "$state"; then
    echo "test-deps: building the example backup program and csi-snapshot-metadata"
    mkdir -p .deps/backup
    (cd deploy/backup-example && go vet . && go build -o "$root/.deps/backup/backup-example" .)
    (cd hack/sidecar && go build -o "$root/.deps/backup/" github.com/kubernetes-csi/external-snapshot-metadata/cmd/csi-snapshot-metadata)
    echo "$state" >.deps/backup/state
fi

# The Kubernetes API server, with its etcd, that the gateway and the earlier designs are tested against.
hack/kube-programs.sh etcd kube-apiserver kubectl >/dev/null

# The S3 server that cbt-backup is tested with.
hack/s3-server.sh >/dev/null

# gRPC for Python, which an example of cbt-lab's mock is written in.
requirements=crates/kit/lab/examples/python/requirements.txt
state=$(hash_of "$requirements")
if ! fresh python "$state"; then
    if command -v python3 >/dev/null; then
        echo "test-deps: installing gRPC for Python"
        rm -rf .deps/python
        python3 -m venv .deps/python
        .deps/python/bin/pip install --quiet --disable-pip-version-check --requirement "$requirements"
        echo "$state" >.deps/python/state
    else
        echo "test-deps: no python3, so the example in Python is not run" >&2
    fi
fi
