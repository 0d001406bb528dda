#!/usr/bin/env bash
# Kubernetes' own storage suites against the driver, in a real cluster of hack/cluster.sh: every test of External Storage
# that deploy/e2e/test-driver.yaml selects, and those for SnapshotMetadata. docs/e2e.md has the results.
set -euo pipefail
# shellcheck source=hack/cluster/lib.sh
. "$(dirname "$0")/cluster/lib.sh"

usage="usage: cluster-e2e.sh [--distributed] [--focus REGEX] [--procs N] [--keep] [--results DIRECTORY]
  --distributed        a driver on each of two nodes, instead of one on one node
  --focus REGEX        only the tests whose name matches, of those that are selected anyway
  --procs N            tests at once (4)
  --keep               leave the cluster, \$CLUSTER, as it is at the end, and use it again
  --results DIRECTORY  where the log and the report go (.deps/e2e)"
distributed=() nodes=1 focus='' procs=4 keep=no results=$root/.deps/e2e
while [ $# -gt 0 ]; do
    case "$1" in
        --distributed) distributed=(--distributed) nodes=2 ;;
        --focus) focus=${2:?$usage} && shift ;;
        --procs) procs=${2:?$usage} && shift ;;
        --results) results=${2:?$usage} && shift ;;
        --keep) keep=yes ;;
        -h | --help) echo "$usage" && exit 0 ;;
        *) fail "unknown argument $1
$usage" ;;
    esac
    shift
done
[ "$(id -u)" -eq 0 ] || fail "needs root, for namespaces and mounts"
need jq
"$root/hack/cluster-deps.sh" --e2e >/dev/null

# What cannot run here, each with its reason; docs/e2e.md has the same list.
skip=(
    # Restarts kubelet through SSH.
    '\[Disruptive\]'
    # Panics for every driver that a file describes; it runs as "External Storage SnapshotMetadata" instead.
    '\[Driver: deltapath.csi.dev\] \[Testpattern: SnapshotMetadata\] snapshotmetadata'
    # Wants a claim to be bound before it makes the pod that uses it, and the class waits for the first consumer.
    'volume-modify-stress.*multiple pods should modify volumes'
    # Its images (hello-populator, volume-data-source-validator) cannot be built: no Go module has their sources.
    'any volume data source'
)
# The default filesystem is ext4, which wants CAP_SYS_RESOURCE to grow while it is mounted.
[ "${#e2e_flags[@]}" -eq 0 ] || skip+=('\(default fs\)[^]]*\] (volume-expand should resize|ephemeral should support expansion)')

# The volumes of its StatefulSet are on both nodes, and the volumes of a group snapshot must be on one.
[ "$nodes" -eq 1 ] || skip+=('volumegroupsnapshottable(-stress)? .*StatefulSet volumes')

[ "$keep" = yes ] || [ "$CLUSTER" != deltapath ] || CLUSTER=e2e-$$
export CLUSTER
cluster=$root/hack/cluster.sh
mkdir -p "$results"
rm -f "$results"/{log,report.json,tests}
[ "$keep" = yes ] || trap '"$cluster" down' EXIT
"$cluster" up --nodes "$nodes"
"$cluster" load "$e2e_cache"/images/*.tar
"$cluster" install "${distributed[@]}"

skips=()
for name in "${skip[@]}"; do skips+=("--skip=$name"); done
say "running the suites, $procs tests at once: $results/log"
status=0
"$cluster" exec "$e2e_cache/bin/ginkgo" --procs="$procs" --timeout=4h --no-color --silence-skips \
    --output-dir="$results" --json-report=report.json \
    --focus="External.Storage.*$focus" "${skips[@]}" "$e2e_cache/bin/storage.test" -- \
    -kubeconfig="${DELTAPATH_CLUSTERS:-/var/tmp/deltapath-clusters}/$CLUSTER/pki/admin.kubeconfig" -provider=skeleton \
    -storage.testdriver="$root/deploy/e2e/test-driver.yaml" -disable-log-dump \
    >"$results/log" 2>&1 || status=$?

# A line for each test that ran, and counts by suite: the word after the pattern.
jq -r '.[].SpecReports[] | select(.LeafNodeType == "It") | select(.State == "passed" or .State == "failed" or .State == "panicked" or .State == "timedout")
    | "\(.State)\t\(.RunTime / 1e9 | floor) s\t\((.ContainerHierarchyTexts + [.LeafNodeText]) | join(" "))"' \
    "$results/report.json" | sort >"$results/tests"
grep -v ^passed "$results/tests" || true
sed -E 's/^([a-z]*).*\[Testpattern: [^]]*\] ([A-Za-z-]+).*/\2 \1/' "$results/tests" | sort | uniq -c
passed=$(grep -c ^passed "$results/tests" || true)
failed=$(grep -vc ^passed "$results/tests" || true)
echo "$passed passed, $failed failed"
[ "$status" -eq 0 ] && [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
